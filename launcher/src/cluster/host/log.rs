//! The log at node 0. A thread of its own reads and writes it: while the store is slow, node 0 goes on talking to the others.

use super::{Host, Input, Message, Notice};
use crate::cluster::messages::End;
use crate::cluster::stored_log::StoredLog;
use crate::sys::error::EXIT_OWN;
use ckpt_cluster::{AttemptId, PutAnswer, Record, Step};
use crossbeam_channel::{Sender, unbounded};
use std::io;

/// What is asked of the thread.
#[derive(Debug)]
enum Request {
    Read { from: u64 },
    Put { position: u64, record: Record },
    Begin { attempt: AttemptId },
    Complete,
}

/// What it answers.
#[derive(Debug)]
pub(in crate::cluster) enum Answer {
    Read {
        from: u64,
        records: io::Result<Vec<Record>>,
    },
    Put {
        position: u64,
        answer: io::Result<PutAnswer>,
    },
    /// The run is begun, for the end of this resume.
    Begun {
        attempt: AttemptId,
        result: io::Result<()>,
    },
    Complete(io::Result<()>),
}

/// The thread.
#[derive(Debug)]
pub(super) struct LogThread {
    requests: Sender<Request>,
    has_begun: bool,
    /// It reads, or puts a record: what is repeated meanwhile is dropped.
    is_reading: bool,
    is_putting: bool,
}

impl LogThread {
    /// Starts it. Its answers go to `inputs`.
    ///
    /// # Errors
    /// When there can be no more threads.
    pub(super) fn start(mut log: StoredLog, inputs: Sender<Input>) -> io::Result<Self> {
        let has_begun = log.has_begun();
        let (requests, inbox) = unbounded();
        let run = move || {
            for request in inbox {
                let answer = match request {
                    Request::Read { from } => Answer::Read { from, records: log.read(from) },
                    Request::Put { position, record } => {
                        Answer::Put { position, answer: log.put(position, &record) }
                    }
                    Request::Begin { attempt } => Answer::Begun { attempt, result: log.begin() },
                    Request::Complete => Answer::Complete(log.set_complete()),
                };
                if inputs.send(Input::Log(answer)).is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new().name("nodes-log".to_owned()).spawn(run)?;
        Ok(Self { requests, has_begun, is_reading: false, is_putting: false })
    }

    fn ask(&self, request: Request) {
        // It ends with this launcher.
        let _ = self.requests.send(request);
    }
}

impl Host {
    pub(super) fn read_log(&mut self, from: u64) {
        let Some(log) = self.log.as_mut().filter(|log| !log.is_reading) else { return };
        log.is_reading = true;
        log.ask(Request::Read { from });
    }

    pub(super) fn put_record(&mut self, position: u64, record: Record) {
        let Some(log) = self.log.as_mut().filter(|log| !log.is_putting) else { return };
        log.is_putting = true;
        log.ask(Request::Put { position, record });
    }

    /// Before the end of the first resume: the run begins, if it is a new one. Whether the step is to wait for that.
    pub(super) fn begins_run(&self, attempt: AttemptId) -> bool {
        let Some(log) = self.log.as_ref().filter(|log| !log.has_begun) else { return false };
        log.ask(Request::Begin { attempt });
        true
    }

    /// All parts have ended with 0.
    pub(super) fn complete(&mut self) {
        self.is_completing = true;
        self.log.iter().for_each(|log| log.ask(Request::Complete));
    }

    /// The thread has answered.
    pub(super) fn answered(&mut self, answer: Answer) {
        if let Some(log) = &mut self.log {
            log.is_reading &= !matches!(answer, Answer::Read { .. });
            log.is_putting &= !matches!(answer, Answer::Put { .. });
        }
        match answer {
            Answer::Complete(result) => {
                match result {
                    Ok(()) => {}
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                        tracing::error!("the end of the job is not noted: {error}");
                    }
                    Err(error) => tracing::error!(
                        "the end of the job cannot be noted: {error}. The next run needs --resume never"
                    ),
                }
                self.tell_all(&Message::Complete);
                self.spares.tell(&Message::Complete);
                let _ = self.notices.send(Notice::Complete);
                self.is_over = true;
            }
            _ if self.is_completing => {}
            Answer::Read { from, records: Ok(records) } => self.peer.read(self.now(), from, records),
            Answer::Read { records: Err(error), .. } => {
                let why = format!("node 0: the log of the job's nodes cannot be read: {error}");
                self.end(End::failure(why, EXIT_OWN));
            }
            // Between the start of this launcher and its first record.
            Answer::Put { answer: Ok(PutAnswer::Taken(Record::Complete)), .. }
                if self.log.as_ref().is_some_and(|log| log.has_begun) =>
            {
                let why = "node 0: under other launchers, the job has ended with 0 on all nodes meanwhile";
                self.end(End::failure(why.to_owned(), EXIT_OWN));
            }
            Answer::Put { position, answer: Ok(answer) } => self.peer.put(self.now(), position, answer),
            // Repeated until there is an answer.
            Answer::Put { answer: Err(error), .. } => {
                tracing::warn!("the log of the job's nodes cannot be written: {error}");
            }
            Answer::Begun { attempt, result: Ok(()) } => {
                self.log.iter_mut().for_each(|log| log.has_begun = true);
                self.pass_on(attempt, Step::Prove);
            }
            Answer::Begun { result: Err(error), .. } => {
                let why = format!("node 0: the log of the job's nodes cannot be written: {error}");
                self.end(End::failure(why, EXIT_OWN));
            }
        }
    }
}
