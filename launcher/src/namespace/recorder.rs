//! The file of what the job writes, appended to by a thread of the init.
//!
//! The file is in the store, and a network file system may not answer for a while, in any call. The init has to serve the
//! launcher meanwhile, or a job that is frozen then would stay so.

use super::written_files::{INCOMPLETE, hurry};
use crate::sys::authentic::{FileKey, sealed};
use ckpt_snapshot::faults;
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, SystemTime};

/// The file that paths are appended to, with the key of its lines.
pub(super) struct Journal {
    file: File,
    key: FileKey,
    /// Lines could not be written, nor that they are missing.
    is_wrong: bool,
}

impl Journal {
    /// A file in which this life of the job has begun.
    pub(super) fn new(file: File, key: FileKey) -> Self {
        Self { file, key, is_wrong: false }
    }

    /// Lines that cannot be written are left out, and the file says that some are missing, as soon as it can.
    ///
    /// # Errors
    /// Lines are missing.
    fn append(&mut self, lines: &[String]) -> io::Result<()> {
        self.correct()?;
        self.write(lines).inspect_err(|_| {
            self.is_wrong = true;
            let _ = self.correct();
        })
    }

    fn stamp(&mut self, at: SystemTime) -> io::Result<()> {
        self.correct()?;
        self.file.set_modified(at)
    }

    fn write(&mut self, lines: &[String]) -> io::Result<()> {
        let lines = lines.iter().map(|line| sealed(&self.key, line) + "\n").collect::<String>();
        self.file.write_all(lines.as_bytes())
    }

    /// Says that lines are missing, if that is not said yet. The space of all others is freed for it.
    fn correct(&mut self) -> io::Result<()> {
        if self.is_wrong {
            self.file.set_len(0)?;
            self.write(&[INCOMPLETE.to_owned()])?;
            self.is_wrong = false;
        }
        Ok(())
    }
}

/// What is to be done, in this order.
enum Work {
    /// The lines that follow go to another file. The one before is closed.
    Switch(Journal),
    Append(Vec<String>),
}

#[derive(Default)]
struct Queue {
    work: VecDeque<Work>,
    /// The time of the file, after the work.
    stamp: Option<SystemTime>,
    is_busy: bool,
    has_failed: bool,
    is_over: bool,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
}

/// Appends to journals. Dropping this ends its thread after the work that is queued.
#[derive(Default)]
pub(super) struct Recorder {
    shared: Arc<Shared>,
    /// Since the first journal. Before that the init has one thread: it forks the job.
    has_thread: bool,
}

impl Recorder {
    /// What follows goes to this file. Returns whether there was none before.
    pub(super) fn switch(&mut self, mut journal: Journal) -> bool {
        let is_first = !self.has_thread;
        if is_first {
            let shared = Arc::clone(&self.shared);
            let thread = thread::Builder::new().name("recorder".to_owned()).spawn(move || run(&shared));
            self.has_thread = thread.is_ok();
        }
        if self.has_thread {
            self.shared.queue.lock().work.push_back(Work::Switch(journal));
            self.shared.changed.notify_all();
        } else {
            journal.is_wrong = true;
            let _ = journal.correct();
            self.shared.queue.lock().has_failed = true;
        }
        is_first
    }

    /// Appends lines, if there is a file.
    pub(super) fn append(&self, lines: Vec<String>) {
        if !self.has_thread || lines.is_empty() {
            return;
        }
        let mut queue = self.shared.queue.lock();
        match queue.work.back_mut() {
            Some(Work::Append(waiting)) => waiting.extend(lines),
            _ => queue.work.push_back(Work::Append(lines)),
        }
        drop(queue);
        self.shared.changed.notify_all();
    }

    /// Notes that all that was written until then has been appended.
    pub(super) fn stamp(&self, at: SystemTime) {
        self.shared.queue.lock().stamp = Some(at);
        self.shared.changed.notify_all();
    }

    /// Whether lines could not be written since the last call. The file says so, too.
    pub(super) fn take_failure(&self) -> bool {
        std::mem::take(&mut self.shared.queue.lock().has_failed)
    }

    /// Waits until everything is done, for this long at most.
    pub(super) fn flush(&self, limit: Duration) {
        if self.has_thread {
            let is_at_work = |queue: &mut Queue| queue.is_busy || queue.has_work();
            self.shared.changed.wait_while_for(&mut self.shared.queue.lock(), is_at_work, limit);
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.shared.queue.lock().is_over = true;
        self.shared.changed.notify_all();
    }
}

impl Queue {
    fn has_work(&self) -> bool {
        !self.work.is_empty() || self.stamp.is_some()
    }
}

fn run(shared: &Shared) {
    hurry();
    let (mut journal, mut stamped) = (None, None);
    loop {
        let mut queue = shared.queue.lock();
        queue.is_busy = false;
        shared.changed.notify_all();
        shared.changed.wait_while(&mut queue, |queue| !queue.has_work() && !queue.is_over);
        if !queue.has_work() {
            return;
        }
        queue.is_busy = true;
        let (work, stamp) = (std::mem::take(&mut queue.work), queue.stamp.take());
        drop(queue);
        for one in work {
            if perform(one, &mut journal).is_err() {
                shared.queue.lock().has_failed = true;
            }
        }
        stamped = stamp.or(stamped);
        if let (Some(journal), Some(at)) = (&mut journal, stamped) {
            // Also after an append, which renews the time: what was written shortly before may be missing still. An older
            // time only means that less is known.
            let _ = journal.stamp(at);
        }
    }
}

fn perform(work: Work, journal: &mut Option<Journal>) -> io::Result<()> {
    match work {
        Work::Switch(next) => {
            if let Some(before) = journal.replace(next) {
                let _ = faults::hit("record-close");
                drop(before);
            }
            Ok(())
        }
        Work::Append(lines) => {
            faults::hit("record-append")?;
            journal.as_mut().map_or(Ok(()), |journal| journal.append(&lines))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn lines(text: &str) -> Vec<String> {
        vec![text.to_owned()]
    }

    #[test]
    fn lines_go_to_the_file_of_their_time() {
        let dir = tempfile::tempdir().unwrap();
        let [first, second] = ["first", "second"].map(|name| dir.path().join(name));
        let mut recorder = Recorder::default();
        recorder.append(lines("before there is a file"));
        recorder.switch(Journal::new(File::create(&first).unwrap(), None));
        recorder.append(lines("a"));
        recorder.append(lines("b"));
        recorder.switch(Journal::new(File::create(&second).unwrap(), None));
        recorder.append(lines("c"));
        recorder.stamp(SystemTime::UNIX_EPOCH + LONG);
        recorder.flush(LONG);
        let read = |path| std::fs::read_to_string(path).unwrap();
        assert_eq!((read(&first), read(&second)), ("a\nb\n".to_owned(), "c\n".to_owned()));
        let at = |path| std::fs::metadata(path).unwrap().modified().unwrap();
        assert_eq!(at(&second), SystemTime::UNIX_EPOCH + LONG);
        assert!(at(&first) > at(&second) && !recorder.take_failure());
    }

    #[test]
    fn a_file_that_lacks_lines_says_so_as_soon_as_it_can() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let content = || std::fs::read_to_string(file.path()).unwrap();
        std::fs::write(file.path(), "a\n").unwrap();
        // Neither can be written.
        let mut journal = Journal::new(File::open(file.path()).unwrap(), None);
        journal.append(&lines("b")).unwrap_err();
        journal.stamp(SystemTime::UNIX_EPOCH).unwrap_err();
        assert_eq!(content(), "a\n");
        journal.file = File::options().append(true).open(file.path()).unwrap();
        journal.append(&lines("c")).unwrap();
        assert_eq!(content(), format!("{INCOMPLETE}\nc\n"));
    }

    #[test]
    fn lines_that_cannot_be_written_are_told_once() {
        let full = || Journal::new(File::options().write(true).open("/dev/full").unwrap(), None);
        let mut recorder = Recorder::default();
        for _ in 0..2 {
            recorder.switch(full());
            recorder.append(lines("a"));
            recorder.flush(LONG);
            assert!(recorder.take_failure() && !recorder.take_failure());
        }
    }
}
