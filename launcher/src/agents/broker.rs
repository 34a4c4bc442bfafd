//! Device memory that processes of the job share (CUDA IPC): the launcher keeps its exported descriptors and hands
//! them out by key.
//!
//! ```text
//!          Publish            owner: Withdraw, or it has ended
//!   absent -------> published -------------------------------> orphaned
//!     ^               |   ^                                       |
//!     |               |   +---------------------------------------+
//!     |               |            Publish (in a resumed job)     |
//!     +---------------+-------------------------------------------+
//!       owner gone, and nobody is left who has fetched it
//! ```
//!
//! What is kept here outlives the absence of its owner for a dump, so that in a job that runs on owner and importers
//! take the same memory up again. A launcher that resumes a job begins with nothing: owners publish anew what they
//! have put back.
//!
//! Orphaned memory is still used by a process that has opened it, and nobody captures it: a snapshot would be wrong.
//!
//! What one process captures another may not write to meanwhile, so those who share wait for each other between
//! being drained and capturing.

use crate::sys::deadline::{AGENT_EXIT_TIMEOUT, PROCESS_POLL_INTERVAL};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use ckpt_protocol::agent::{FromAgent, ShareKey, ToAgent};
use ckpt_protocol::frame::FrameError;
use tracing::debug;

use super::line::Line;
use super::process::{Life, Process, QuiesceError};
/// Shared device memory of a job.
#[derive(Default)]
pub struct Broker {
    table: Mutex<Table>,
    /// Told whenever a process is drained, or an attempt is given up.
    changed: Condvar,
}

#[derive(Default)]
struct Table {
    /// Who has anything to do with what is shared, by ID in the job.
    parties: BTreeMap<u32, Party>,
    shared: BTreeMap<ShareKey, Shared>,
    drain: Drain,
}

/// Memory that was published.
struct Shared {
    memory: Arc<OwnedFd>,
    bytes: u64,
    /// Stays known when it is gone.
    owner: u32,
    is_orphaned: bool,
    importers: BTreeSet<u32>,
}

/// A process that shares memory.
pub struct Party {
    /// Who it is.
    pub process: Process,
    /// Whether it still is there.
    pub life: Arc<Life>,
}

/// Who is drained in the present attempt; no attempt is under way if there is no number.
#[derive(Default)]
struct Drain {
    attempt: Option<u64>,
    pids: BTreeSet<u32>,
}

/// Memory that somebody uses and nobody can save.
#[derive(Debug, PartialEq, Eq)]
pub struct Orphan {
    /// Who uses it.
    pub importer: Process,
    /// Why it cannot be saved.
    pub reason: String,
}

impl From<Orphan> for QuiesceError {
    fn from(Orphan { importer, reason }: Orphan) -> Self {
        Self::Refused { process: importer, reason, others: 0 }
    }
}

/// Who has sent a message that is for the broker; as the first one on a connection, it is the only one.
pub fn sender(message: &FromAgent) -> Option<u32> {
    match message {
        FromAgent::Publish { pid, .. }
        | FromAgent::Fetch { pid, .. }
        | FromAgent::Withdraw { pid, .. }
        | FromAgent::Drained { pid, .. } => Some(*pid),
        _ => None,
    }
}

impl Broker {
    /// Answers a message that has a [`sender`]. `is_here` tells whether the agent of a process is connected and has
    /// nothing left to put back; until `end` others may be waited for.
    ///
    /// # Errors
    /// The connection failed.
    pub fn serve(
        &self,
        stream: &Line,
        party: Party,
        message: &FromAgent,
        is_here: impl Fn(u32) -> bool,
        end: Instant,
    ) -> Result<(), FrameError> {
        if let Some(pid) = sender(message) {
            self.pruned().parties.insert(pid, party);
        }
        let mut memory = None;
        let answer = match message {
            FromAgent::Publish { pid, key, bytes } => {
                let received = stream.receive(1).or_else(none_if_short)?;
                let is_kept = received.into_iter().next().is_some_and(|received| {
                    debug!(pid, bytes, "device memory is shared");
                    self.publish(*key, received, *bytes, *pid)
                });
                ToAgent::Published { is_kept }
            }
            FromAgent::Fetch { pid, key, owner } => match self.fetch(*key, *pid) {
                Some((found, bytes)) => {
                    memory = Some(found);
                    ToAgent::Shared { bytes }
                }
                None => ToAgent::NotShared { is_final: is_here(*owner) },
            },
            FromAgent::Withdraw { pid, keys } => {
                self.withdraw(keys, *pid);
                ToAgent::Withdrawn
            }
            FromAgent::Drained { attempt, pid } => {
                ToAgent::AllDrained { is_complete: self.await_drained(*attempt, *pid, end) }
            }
            _ => return Ok(()),
        };
        let memory: Vec<_> = memory.iter().map(AsFd::as_fd).collect();
        stream.say_with(&answer, &memory)
    }

    /// Says whether it is kept. Nobody replaces the memory of another process.
    fn publish(&self, key: ShareKey, memory: OwnedFd, bytes: u64, owner: u32) -> bool {
        let mut table = self.pruned();
        let before = table.shared.get(&key);
        if before.is_some_and(|before| !before.is_orphaned && before.owner != owner) {
            return false;
        }
        let importers = before.map(|before| before.importers.clone()).unwrap_or_default();
        let memory = Arc::new(memory);
        table.shared.insert(key, Shared { memory, bytes, owner, is_orphaned: false, importers });
        true
    }

    /// Orphaned memory is found by those who had fetched it before.
    fn fetch(&self, key: ShareKey, pid: u32) -> Option<(Arc<OwnedFd>, u64)> {
        let mut table = self.pruned();
        let shared = table.shared.get_mut(&key)?;
        if shared.is_orphaned && !shared.importers.contains(&pid) {
            return None;
        }
        if shared.is_orphaned || shared.owner != pid {
            shared.importers.insert(pid);
        }
        Some((Arc::clone(&shared.memory), shared.bytes))
    }

    fn withdraw(&self, keys: &[ShareKey], pid: u32) {
        let mut table = self.pruned();
        for key in keys {
            if let Some(shared) = table.shared.get_mut(key) {
                shared.withdraw(pid);
            }
        }
        table.sweep();
    }

    /// Forgets what a process has shared whose agent's connection has ended, as soon as it has ended itself: what is
    /// kept here takes room on the GPU. One that lives on keeps it.
    pub fn outlive(&self, life: &Life) {
        let end = Instant::now() + AGENT_EXIT_TIMEOUT;
        while !self.pruned().shared.is_empty() && !life.is_over() && Instant::now() < end {
            std::thread::sleep(PROCESS_POLL_INTERVAL);
        }
        self.lock().prune();
    }

    /// Memory that stands against a snapshot, by who will be in that.
    pub fn orphan(&self, is_saved: impl Fn(u32) -> bool) -> Option<Orphan> {
        let table = self.pruned();
        // Who has ended just now may not look like it yet.
        let is_lost = |shared: &&Shared| shared.is_orphaned || !is_saved(shared.owner);
        let orphan = table.shared.values().filter(is_lost).find(|shared| !shared.importers.is_empty())?;
        let importer = table.parties.get(orphan.importers.first()?)?.process.clone();
        let reason = format!(
            "it has opened device memory (cuIpcOpenMemHandle) of process {}, which has freed it or ended",
            orphan.owner
        );
        Some(Orphan { importer, reason })
    }

    /// An attempt begins: nobody is drained.
    pub fn begin(&self, attempt: u64) {
        self.lock().drain = Drain { attempt: Some(attempt), pids: BTreeSet::new() };
    }

    /// The present attempt has failed: nobody waits for it any more.
    pub fn give_up(&self) {
        self.lock().drain = Drain::default();
        self.changed.notify_all();
    }

    /// Notes that a process is drained, and waits until all are that share memory. False if the attempt fails first.
    fn await_drained(&self, attempt: u64, pid: u32, end: Instant) -> bool {
        let mut table = self.lock();
        if table.drain.attempt == Some(attempt) {
            table.drain.pids.insert(pid);
            self.changed.notify_all();
        }
        loop {
            table.prune();
            if table.drain.attempt != Some(attempt) {
                return false;
            }
            if table.sharing().all(|pid| table.drain.pids.contains(&pid)) {
                return true;
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let _ = self.changed.wait_for(&mut table, left.min(PROCESS_POLL_INTERVAL));
        }
    }

    /// The table without those whose life is over.
    fn pruned(&self) -> MutexGuard<'_, Table> {
        let mut table = self.lock();
        table.prune();
        table
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock()
    }
}

/// The launcher may have no room for one more descriptor, which the agent is to hear.
fn none_if_short(error: io::Error) -> Result<Vec<OwnedFd>, FrameError> {
    if error.kind() == io::ErrorKind::InvalidData {
        Ok(Vec::new())
    } else {
        Err(FrameError::Io { step: "receive shared memory", source: error })
    }
}

impl Table {
    /// Takes out those whose life is over.
    fn prune(&mut self) {
        let is_over = |(pid, party): (&u32, &Party)| party.life.is_over().then_some(*pid);
        let ended: Vec<u32> = self.parties.iter().filter_map(is_over).collect();
        for pid in ended {
            self.parties.remove(&pid);
            self.shared.values_mut().for_each(|shared| shared.withdraw(pid));
            self.sweep();
        }
    }

    fn sweep(&mut self) {
        self.shared.retain(|_, shared| !shared.is_orphaned || !shared.importers.is_empty());
    }

    /// The processes that use memory which others use too.
    fn sharing(&self) -> impl Iterator<Item = u32> {
        let used = self.shared.values().filter(|shared| !shared.importers.is_empty());
        used.flat_map(|shared| {
            let owner = (!shared.is_orphaned).then_some(shared.owner);
            owner.into_iter().chain(shared.importers.iter().copied())
        })
    }
}

impl Shared {
    /// A process has no more to do with it.
    fn withdraw(&mut self, pid: u32) {
        self.is_orphaned |= pid == self.owner;
        self.importers.remove(&pid);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Seek, Write};
    use std::os::unix::net::UnixStream;
    use std::path::Path;
    use std::process::{Child, Command};
    use std::thread;
    use std::time::Duration;

    use ckpt_protocol::{descriptors, frame};

    use super::super::process::pidfd;
    use super::*;

    const KEY: ShareKey = ShareKey(1 << 100 | 7);
    const LONG: Duration = Duration::from_secs(300);
    const SHORT: Duration = Duration::from_millis(60);

    /// Processes 1 and 2 and so on, with lives of their own.
    struct Job {
        broker: Broker,
        processes: BTreeMap<u32, Child>,
    }

    impl Job {
        fn of(pids: impl IntoIterator<Item = u32>) -> Self {
            let sleep = |_| Command::new("/bin/sleep").arg("1000").spawn().expect("a process");
            let processes = pids.into_iter().map(|pid| (pid, sleep(pid))).collect();
            Self { broker: Broker::default(), processes }
        }

        fn life(&self, pid: u32) -> Life {
            let host_pid = self.processes[&pid].id();
            let number = rustix::process::Pid::from_raw(host_pid.cast_signed()).and_then(pidfd);
            Life::of(number, Path::new("/proc").join(host_pid.to_string()))
        }

        fn ends(&mut self, pid: u32) {
            let process = self.processes.get_mut(&pid).expect("a process");
            process.kill().expect("killed");
            process.wait().expect("reaped");
        }

        /// What the broker answers to a message, and the content of the memory that comes with it.
        fn says(&self, message: &FromAgent, memory: Option<&File>) -> (ToAgent, Option<String>) {
            let pid = sender(message).expect("a message for the broker");
            let (here, there) = UnixStream::pair().expect("a pair");
            descriptors::send(here.as_fd(), &memory.map(AsFd::as_fd).into_iter().collect::<Vec<_>>())
                .expect("sent");
            let process = Process { pid: Some(pid), host_pid: None, exe: format!("/bin/{pid}") };
            let party = Party { process, life: Arc::new(self.life(pid)) };
            let is_here = |pid| self.processes.contains_key(&pid);
            self.broker
                .serve(&Line::new(there), party, message, is_here, Instant::now() + LONG)
                .expect("served");
            let answer: ToAgent = frame::read(&mut &here).expect("an answer");
            let count = usize::from(matches!(answer, ToAgent::Shared { .. }));
            let received = descriptors::receive(here.as_fd(), count).expect("received");
            let content = received.into_iter().next().map(|memory| {
                let (mut memory, mut content) = (File::from(memory), String::new());
                memory.rewind().expect("rewound");
                memory.read_to_string(&mut content).expect("read");
                content
            });
            (answer, content)
        }

        fn publish(&self, pid: u32, content: &str) -> bool {
            let mut memory = tempfile::tempfile().expect("a file");
            memory.write_all(content.as_bytes()).expect("written");
            let message = FromAgent::Publish { pid, key: KEY, bytes: 99 };
            let ToAgent::Published { is_kept } = self.says(&message, Some(&memory)).0 else {
                panic!("not an answer");
            };
            is_kept
        }

        /// The content of the memory, or whether it is final that there is none.
        fn fetch(&self, pid: u32, owner: u32) -> Result<String, bool> {
            match self.says(&FromAgent::Fetch { pid, key: KEY, owner }, None) {
                (ToAgent::Shared { bytes: 99 }, Some(content)) => Ok(content),
                (ToAgent::NotShared { is_final }, None) => Err(is_final),
                other => panic!("{other:?}"),
            }
        }

        fn withdraw(&self, pid: u32) {
            let message = FromAgent::Withdraw { pid, keys: vec![KEY, ShareKey(5)] };
            assert_eq!(self.says(&message, None), (ToAgent::Withdrawn, None));
        }

        fn orphan(&self) -> Option<Orphan> {
            self.broker.orphan(|_| true)
        }

        fn is_empty(&self) -> bool {
            self.broker.lock().shared.is_empty()
        }
    }

    impl Drop for Job {
        fn drop(&mut self) {
            for process in self.processes.values_mut() {
                let _ = process.kill();
                let _ = process.wait();
            }
        }
    }

    #[test]
    fn what_is_published_is_found_until_it_is_withdrawn() {
        let job = Job::of([1, 2, 3]);
        assert_eq!(job.fetch(2, 1), Err(true));
        assert_eq!(job.fetch(2, 9), Err(false), "its owner may still publish it");
        assert!(job.publish(1, "one"));
        for pid in [1, 2, 2, 3] {
            assert_eq!(job.fetch(pid, 1).as_deref(), Ok("one"));
        }
        for pid in [2, 3, 1] {
            assert_eq!(job.orphan(), None);
            job.withdraw(pid);
        }
        assert!(job.is_empty());
        assert_eq!(job.fetch(2, 1), Err(true));
    }

    #[test]
    fn an_owner_publishes_anew_and_nobody_else_in_its_place() {
        let job = Job::of([1, 2]);
        assert!(job.publish(1, "one"));
        assert!(!job.publish(2, "two"));
        assert_eq!(job.fetch(2, 1).as_deref(), Ok("one"));
        assert!(job.publish(1, "three"));
        assert_eq!(job.fetch(2, 1).as_deref(), Ok("three"));
    }

    #[test]
    fn what_its_owner_has_freed_belongs_to_who_has_opened_it_and_stands_against_a_snapshot() {
        let mut job = Job::of([1, 2, 3]);
        assert!(job.publish(1, "one"));
        assert!(job.fetch(2, 1).is_ok());
        job.withdraw(1);
        assert_eq!(job.fetch(2, 1).as_deref(), Ok("one"));
        assert_eq!(job.fetch(3, 1), Err(true));
        let orphan = job.orphan().expect("an orphan");
        assert_eq!((orphan.importer.pid, orphan.importer.exe.as_str()), (Some(2), "/bin/2"));
        assert!(orphan.reason.contains("of process 1, which has freed it"), "{}", orphan.reason);
        job.ends(2);
        assert_eq!(job.orphan(), None);
        assert!(job.is_empty());
    }

    #[test]
    fn what_a_process_has_shared_goes_with_it() {
        let mut job = Job::of([1, 2]);
        assert!(job.publish(1, "one"));
        let (life, begun) = (job.life(1), Instant::now());
        thread::scope(|scope| {
            let waits = scope.spawn(|| job.broker.outlive(&life));
            thread::sleep(SHORT);
            assert!(!waits.is_finished(), "it has not ended");
            assert!(!job.is_empty());
            let id = rustix::process::Pid::from_raw(job.processes[&1].id().cast_signed()).expect("an ID");
            rustix::process::kill_process(id, rustix::process::Signal::KILL).expect("killed");
        });
        assert!(begun.elapsed() < LONG);
        assert!(job.is_empty());
        job.ends(1);
    }

    #[test]
    fn an_owner_that_is_not_saved_leaves_orphans() {
        let job = Job::of([1, 2]);
        assert!(job.publish(1, "one"));
        let is_saved = |pid| pid == 2;
        assert_eq!(job.broker.orphan(is_saved), None, "nobody else uses it");
        assert!(job.fetch(2, 1).is_ok());
        assert_eq!(job.orphan(), None);
        assert_eq!(job.broker.orphan(is_saved).map(|orphan| orphan.importer.pid), Some(Some(2)));
    }

    fn drained(job: &Job, attempt: u64, pid: u32) -> bool {
        let ToAgent::AllDrained { is_complete } = job.says(&FromAgent::Drained { attempt, pid }, None).0
        else {
            panic!("not an answer");
        };
        is_complete
    }

    #[test]
    fn those_who_share_wait_until_all_of_them_are_drained() {
        let mut job = Job::of([1, 2, 3, 4]);
        assert!(job.publish(1, "one"));
        assert!(job.fetch(2, 1).is_ok() && job.fetch(4, 1).is_ok());
        job.broker.begin(5);
        assert!(!drained(&job, 4, 1), "another attempt");
        thread::scope(|scope| {
            let first = scope.spawn(|| drained(&job, 5, 1));
            let second = scope.spawn(|| drained(&job, 5, 2));
            thread::sleep(SHORT);
            assert!(!first.is_finished() && !second.is_finished(), "process 4 is not drained");
            let id = rustix::process::Pid::from_raw(job.processes[&4].id().cast_signed()).expect("an ID");
            rustix::process::kill_process(id, rustix::process::Signal::KILL).expect("killed");
            assert!(first.join().expect("joined") && second.join().expect("joined"));
        });
        job.ends(4);
    }

    #[test]
    fn nobody_waits_for_an_attempt_that_has_failed() {
        let job = Job::of([1, 2]);
        assert!(job.publish(1, "one"));
        assert!(job.fetch(2, 1).is_ok());
        job.broker.begin(5);
        thread::scope(|scope| {
            let first = scope.spawn(|| drained(&job, 5, 1));
            while job.broker.lock().drain.pids.is_empty() {
                thread::yield_now();
            }
            job.broker.give_up();
            assert!(!first.join().expect("joined"));
        });
        assert!(!drained(&job, 5, 2));
    }
}
