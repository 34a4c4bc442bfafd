//! Device memory that processes of the job share, by CUDA IPC or by descriptors: the launcher keeps the driver's
//! descriptors and hands them out by key.
//!
//! ```text
//!          Publish            owner: Withdraw, or it has ended
//!   absent -------> published -------------------------------> orphaned
//!     ^               |   ^                                       |
//!     |               |   +---------------------------------------+
//!     |               |            Publish (in a resumed job)     |
//!     +---------------+-------------------------------------------+
//!       owner ended, and neither an importer nor a descriptor is left
//! ```
//!
//! Memory that was published with a root is one that programs pass by descriptors, and the root tells whether there are
//! any. As with the driver, such memory can be imported after the end of its owner.
//!
//! Shared memory stays here while its owner is detached for a dump. In a job that runs on, owner and importers then open
//! the same memory again. A launcher that resumes a job starts without shared memory: owners publish their restored memory
//! again.
//!
//! Orphaned memory is still in use by a process that has opened it, or may be imported, but no process captures it: a
//! snapshot would be wrong.
//!
//! No process may write to memory that another process is capturing. So processes that share memory wait for each other
//! between draining and capturing. A process that has captured its memory lets no further process have it in this attempt:
//! that one still runs, and would write to it.

use crate::sys::deadline::{AGENT_EXIT_TIMEOUT, PROCESS_POLL_INTERVAL};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use ckpt_protocol::agent::{FromAgent, ShareKey, ToAgent};
use ckpt_protocol::frame::FrameError;
use tracing::debug;

use super::lease;
use super::process::{Process, ProcessHandle, QuiesceError};
use super::stream::AgentStream;

/// Shared device memory of a job.
#[derive(Default)]
pub struct Broker {
    table: Mutex<Table>,
    /// Notified whenever a process is drained, or an attempt ends.
    changed: Condvar,
}

#[derive(Default)]
struct Table {
    /// Processes that share memory, by ID in the job.
    participants: BTreeMap<u32, Participant>,
    shared: BTreeMap<ShareKey, SharedMemory>,
    drain: Drain,
}

/// Memory that was published.
struct SharedMemory {
    memory: Arc<OwnedFd>,
    bytes: u64,
    /// The memfd whose other descriptors stand for the memory.
    root: Option<OwnedFd>,
    /// Kept after the owner has ended.
    owner: u32,
    publisher: Process,
    is_orphaned: bool,
    importers: BTreeSet<u32>,
}

/// A process that shares memory.
pub struct Participant {
    /// The process.
    pub process: Process,
    /// Tells whether it still runs.
    pub handle: Arc<ProcessHandle>,
    /// Which program it runs, see [`Hello::instance`](ckpt_protocol::agent::Hello::instance); 0 if unknown.
    pub instance: u64,
}

/// Processes that are drained in the current attempt, if one is under way.
#[derive(Default)]
struct Drain {
    attempt: Option<u64>,
    pids: BTreeSet<u32>,
}

/// What is there of memory that a process asks for.
enum Fetched {
    /// The driver's descriptor, and the size in bytes.
    Memory(Arc<OwnedFd>, u64),
    /// It can be had once the attempt is over.
    Withheld,
    Nothing,
}

/// Memory that is in use and that no process can save.
#[derive(Debug, PartialEq, Eq)]
pub struct Orphan {
    /// A process that uses it; of memory that nobody uses, its owner.
    pub process: Process,
    /// Why it cannot be saved.
    pub reason: String,
}

impl From<Orphan> for QuiesceError {
    fn from(Orphan { process, reason }: Orphan) -> Self {
        Self::Refused { process, reason, others: 0 }
    }
}

/// The instance that a message comes from; 0 if it does not say.
fn instance(message: &FromAgent) -> u64 {
    match message {
        FromAgent::Publish { instance, .. } | FromAgent::Fetch { instance, .. } => *instance,
        _ => 0,
    }
}

/// The sender of a message for the broker. If such a message is the first of a connection, it is the only one.
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
    /// Answers a message that has a [`sender`]. `is_registered` tells whether the agent of a process is connected and has
    /// restored its GPU state. Waits for other processes until `end`.
    ///
    /// # Errors
    /// The connection failed.
    pub fn serve(
        &self,
        stream: &AgentStream,
        participant: Participant,
        message: &FromAgent,
        is_registered: impl Fn(u32) -> bool,
        end: Instant,
    ) -> Result<(), FrameError> {
        let process = participant.process.clone();
        if let Some(pid) = sender(message) {
            let mut table = self.pruned();
            table.note_instance(pid, instance(message));
            let known = table.participants.get(&pid).map_or(0, |known| known.instance);
            let instance = if known == 0 { instance(message) } else { known };
            table.participants.insert(pid, Participant { instance, ..participant });
        }
        let mut memory = None;
        let answer = match message {
            FromAgent::Publish { pid, key, bytes, has_root, .. } => {
                // Without the descriptors, the agent is answered too.
                let count = 1 + usize::from(*has_root);
                let received = stream.receive_files_if_room(count, "receive shared memory")?;
                let mut received = received.into_iter().flatten();
                let is_kept = received.next().is_some_and(|memory| {
                    debug!(pid, bytes, "device memory is shared");
                    let memory = Arc::new(memory);
                    let (owner, importers) = (*pid, BTreeSet::new());
                    let (root, bytes, publisher) = (received.next(), *bytes, process);
                    let is_orphaned = false;
                    self.publish(
                        *key,
                        SharedMemory { memory, bytes, root, owner, publisher, is_orphaned, importers },
                    )
                });
                ToAgent::Published { is_kept }
            }
            FromAgent::Fetch { pid, key, owner, .. } => {
                // Before it is looked for: the owner may publish it and register meanwhile.
                let is_owner_back = is_registered(*owner);
                match self.fetch(*key, *pid) {
                    Fetched::Memory(found, bytes) => {
                        memory = Some(found);
                        ToAgent::Shared { bytes }
                    }
                    Fetched::Withheld => ToAgent::NotShared { is_final: false },
                    Fetched::Nothing => ToAgent::NotShared { is_final: is_owner_back },
                }
            }
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
        stream.send_with_files(&answer, &memory)
    }

    /// Returns whether the memory is kept. A process cannot replace the memory of another process.
    fn publish(&self, key: ShareKey, mut memory: SharedMemory) -> bool {
        let mut table = self.pruned();
        if let Some(before) = table.shared.get(&key) {
            if !before.is_orphaned && before.owner != memory.owner {
                return false;
            }
            memory.importers.clone_from(&before.importers);
        }
        table.shared.insert(key, memory);
        true
    }

    /// Only processes that had fetched orphaned memory before can fetch it again, or that have a descriptor of it.
    fn fetch(&self, key: ShareKey, pid: u32) -> Fetched {
        let mut table = self.pruned();
        let Table { shared, drain, .. } = &mut *table;
        let Some(shared) = shared.get_mut(&key) else { return Fetched::Nothing };
        let is_gone = shared.is_orphaned && !shared.importers.contains(&pid) && !shared.has_descriptors();
        if is_gone {
            return Fetched::Nothing;
        }
        if shared.is_withheld(drain, pid) {
            return Fetched::Withheld;
        }
        if shared.is_orphaned || shared.owner != pid {
            shared.importers.insert(pid);
        }
        Fetched::Memory(Arc::clone(&shared.memory), shared.bytes)
    }

    fn withdraw(&self, keys: &[ShareKey], pid: u32) {
        let mut table = self.pruned();
        for key in keys {
            if let Some(shared) = table.shared.get_mut(key) {
                shared.withdraw(pid);
            }
        }
        table.remove_unused();
    }

    /// Called when the agent of a process has connected: if the process has executed another program since its last message,
    /// it has none of its memory any more.
    pub fn note_instance(&self, pid: u32, instance: u64) {
        self.pruned().note_instance(pid, instance);
    }

    /// Called when the connection of a process was lost: removes its shared memory, which occupies the GPU, once the
    /// process has ended. A process that runs on keeps it.
    pub fn forget_after_exit(&self, handle: &ProcessHandle) {
        let end = Instant::now() + AGENT_EXIT_TIMEOUT;
        while !self.pruned().shared.is_empty() && !handle.has_ended() && Instant::now() < end {
            std::thread::sleep(PROCESS_POLL_INTERVAL);
        }
        self.table.lock().prune();
    }

    /// Memory that prevents a snapshot of the processes for which `is_saved` holds.
    pub fn orphan(&self, is_saved: impl Fn(u32) -> bool) -> Option<Orphan> {
        let table = self.pruned();
        // A process that has just ended may not be recognized as ended yet.
        let is_lost = |shared: &&SharedMemory| shared.is_orphaned || !is_saved(shared.owner);
        let mut lost = table.shared.values().filter(is_lost);
        lost.find_map(|shared| shared.as_orphan(&table.participants))
    }

    /// Begins an attempt, in which no process is drained yet.
    pub fn begin(&self, attempt: u64) {
        self.table.lock().drain = Drain { attempt: Some(attempt), pids: BTreeSet::new() };
    }

    /// Ends the current attempt: processes no longer wait for it.
    pub fn end_attempt(&self) {
        self.table.lock().drain = Drain::default();
        self.changed.notify_all();
    }

    /// Notes that a process is drained, and waits until all are that share memory. False if the attempt fails first.
    fn await_drained(&self, attempt: u64, pid: u32, end: Instant) -> bool {
        let mut table = self.table.lock();
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

    /// The table, after processes that have ended were removed.
    fn pruned(&self) -> MutexGuard<'_, Table> {
        let mut table = self.table.lock();
        table.prune();
        table
    }
}

impl Table {
    /// Removes processes that have ended.
    fn prune(&mut self) {
        let has_ended =
            |(pid, participant): (&u32, &Participant)| participant.handle.has_ended().then_some(*pid);
        let ended: Vec<u32> = self.participants.iter().filter_map(has_ended).collect();
        for pid in ended {
            self.participants.remove(&pid);
            self.shared.values_mut().for_each(|shared| shared.withdraw(pid));
        }
        self.remove_unused();
    }

    fn note_instance(&mut self, pid: u32, instance: u64) {
        let Some(known) = self.participants.get(&pid).map(|known| known.instance) else { return };
        if known != 0 && instance != 0 && known != instance {
            self.participants.remove(&pid);
            self.shared.values_mut().for_each(|shared| shared.withdraw(pid));
            self.remove_unused();
        }
    }

    fn remove_unused(&mut self) {
        self.shared.retain(|_, shared| !shared.is_orphaned || shared.is_wanted());
    }

    /// The processes that use memory together with others.
    fn sharing(&self) -> impl Iterator<Item = u32> {
        let used = self.shared.values().filter(|shared| !shared.importers.is_empty());
        used.flat_map(|shared| {
            let owner = (!shared.is_orphaned).then_some(shared.owner);
            owner.into_iter().chain(shared.importers.iter().copied())
        })
    }
}

impl SharedMemory {
    /// Whether its owner may be capturing it, or have captured it, while the process may still run.
    fn is_withheld(&self, drain: &Drain, pid: u32) -> bool {
        !self.is_orphaned && drain.pids.contains(&self.owner) && !drain.pids.contains(&pid)
    }

    /// Whether a program has a descriptor that stands for it.
    fn has_descriptors(&self) -> bool {
        self.root.as_ref().is_some_and(|root| !lease::is_open_nowhere_else(root))
    }

    /// Whether a process uses it, or may import it.
    fn is_wanted(&self) -> bool {
        !self.importers.is_empty() || self.has_descriptors()
    }

    /// Why it cannot be saved without its owner; `None` if no process needs it.
    fn as_orphan(&self, participants: &BTreeMap<u32, Participant>) -> Option<Orphan> {
        let importer = self.importers.first().and_then(|importer| participants.get(importer));
        if let Some(importer) = importer {
            let reason = format!(
                "it has opened device memory (cuIpcOpenMemHandle, cuMemImportFromShareableHandle) of process {}, which \
                 has freed it or ended",
                self.owner
            );
            return Some(Orphan { process: importer.process.clone(), reason });
        }
        self.has_descriptors().then(|| Orphan {
            process: self.publisher.clone(),
            reason: "it has ended, and there are descriptors of device memory that it has exported \
                     (cuMemExportToShareableHandle): close them"
                .to_owned(),
        })
    }

    /// Removes a process from its users.
    fn withdraw(&mut self, pid: u32) {
        self.is_orphaned |= pid == self.owner;
        self.importers.remove(&pid);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Seek, Write};
    use std::os::fd::AsRawFd;
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
    /// The program that each process runs at first.
    const FIRST: u64 = 1;

    /// A broker and real processes, by their IDs in the job.
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

        fn handle(&self, pid: u32) -> ProcessHandle {
            let host_pid = self.processes[&pid].id();
            let number = rustix::process::Pid::from_raw(host_pid.cast_signed()).and_then(pidfd);
            ProcessHandle::new(number, Path::new("/proc").join(host_pid.to_string()))
        }

        fn end(&mut self, pid: u32) {
            let process = self.processes.get_mut(&pid).expect("a process");
            process.kill().expect("killed");
            process.wait().expect("reaped");
        }

        /// What the broker answers to a message, and the content of the memory that comes with it.
        fn ask(&self, message: &FromAgent, memory: &[&File]) -> (ToAgent, Option<String>) {
            let pid = sender(message).expect("a message for the broker");
            let (here, there) = UnixStream::pair().expect("a pair");
            descriptors::send(here.as_fd(), &memory.iter().map(|file| file.as_fd()).collect::<Vec<_>>())
                .expect("sent");
            let process = Process { pid: Some(pid), host_pid: None, exe: format!("/bin/{pid}") };
            let participant = Participant { process, handle: Arc::new(self.handle(pid)), instance: 0 };
            let is_registered = |pid| self.processes.contains_key(&pid);
            self.broker
                .serve(&AgentStream::new(there), participant, message, is_registered, Instant::now() + LONG)
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
            self.publish_with(pid, content, None)
        }

        fn publish_with(&self, pid: u32, content: &str, root: Option<&File>) -> bool {
            let mut memory = tempfile::tempfile().expect("a file");
            memory.write_all(content.as_bytes()).expect("written");
            let message =
                FromAgent::Publish { pid, key: KEY, bytes: 99, has_root: root.is_some(), instance: FIRST };
            let files: Vec<_> = [Some(&memory), root].into_iter().flatten().collect();
            let ToAgent::Published { is_kept } = self.ask(&message, &files).0 else {
                panic!("not an answer");
            };
            is_kept
        }

        /// The content of the memory, or whether it is final that there is none.
        fn fetch(&self, pid: u32, owner: u32) -> Result<String, bool> {
            match self.ask(&FromAgent::Fetch { pid, key: KEY, owner, instance: FIRST }, &[]) {
                (ToAgent::Shared { bytes: 99 }, Some(content)) => Ok(content),
                (ToAgent::NotShared { is_final }, None) => Err(is_final),
                other => panic!("{other:?}"),
            }
        }

        fn withdraw(&self, pid: u32) {
            let message = FromAgent::Withdraw { pid, keys: vec![KEY, ShareKey(5)] };
            assert_eq!(self.ask(&message, &[]), (ToAgent::Withdrawn, None));
        }

        fn orphan(&self) -> Option<Orphan> {
            self.broker.orphan(|_| true)
        }

        fn is_empty(&self) -> bool {
            self.broker.table.lock().shared.is_empty()
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
    fn published_memory_can_be_fetched_until_it_is_withdrawn() {
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
    fn only_the_owner_can_publish_a_key_again() {
        let job = Job::of([1, 2]);
        assert!(job.publish(1, "one"));
        assert!(!job.publish(2, "two"));
        assert_eq!(job.fetch(2, 1).as_deref(), Ok("one"));
        assert!(job.publish(1, "three"));
        assert_eq!(job.fetch(2, 1).as_deref(), Ok("three"));
    }

    #[test]
    fn memory_freed_by_its_owner_stays_open_for_importers_and_prevents_a_snapshot() {
        let mut job = Job::of([1, 2, 3]);
        assert!(job.publish(1, "one"));
        assert!(job.fetch(2, 1).is_ok());
        job.withdraw(1);
        assert_eq!(job.fetch(2, 1).as_deref(), Ok("one"));
        assert_eq!(job.fetch(3, 1), Err(true));
        let orphan = job.orphan().expect("an orphan");
        assert_eq!((orphan.process.pid, orphan.process.exe.as_str()), (Some(2), "/bin/2"));
        assert!(orphan.reason.contains("of process 1, which has freed it"), "{}", orphan.reason);
        job.end(2);
        assert_eq!(job.orphan(), None);
        assert!(job.is_empty());
    }

    /// It has none of its memory, and nothing that it had opened.
    #[test]
    fn a_process_that_executes_another_program_is_a_new_one() {
        let job = Job::of([1, 2]);
        assert!(job.publish(1, "one"));
        assert!(job.fetch(2, 1).is_ok());
        job.broker.note_instance(1, FIRST);
        job.broker.note_instance(2, 0);
        assert_eq!(job.orphan(), None);
        job.broker.note_instance(1, FIRST + 1);
        assert_eq!(job.orphan().map(|orphan| orphan.process.pid), Some(Some(2)));
        job.broker.note_instance(2, FIRST + 1);
        assert_eq!(job.orphan(), None);
        assert!(job.is_empty());
    }

    /// As with the driver: until the last descriptor is closed.
    #[test]
    fn exported_memory_can_be_imported_after_the_end_of_its_owner() {
        let mut job = Job::of([1, 2]);
        let root = rustix::fs::memfd_create("root", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
        let name = Path::new("/proc/self/fd").join(root.as_raw_fd().to_string());
        let descriptor = File::open(&name).expect("opened");
        let root = File::from(root);
        assert!(job.publish_with(1, "one", Some(&root)));
        drop(root);
        job.end(1);
        let orphan = job.orphan().expect("an orphan");
        assert_eq!(orphan.process.pid, Some(1));
        assert!(orphan.reason.contains("it has ended, and there are descriptors"), "{}", orphan.reason);
        assert_eq!(job.fetch(2, 1).as_deref(), Ok("one"));
        assert_eq!(job.orphan().expect("an orphan").process.pid, Some(2));
        job.withdraw(2);
        assert!(!job.is_empty());
        drop(descriptor);
        // A process that another test has just forked may have a copy until its exec.
        let end = Instant::now() + LONG;
        while job.orphan().is_some() {
            assert!(Instant::now() < end, "no descriptor is left");
            thread::yield_now();
        }
        assert!(job.is_empty());
    }

    #[test]
    fn shared_memory_is_removed_when_its_owner_ends() {
        let mut job = Job::of([1, 2]);
        assert!(job.publish(1, "one"));
        let (handle, begun) = (job.handle(1), Instant::now());
        thread::scope(|scope| {
            let waits = scope.spawn(|| job.broker.forget_after_exit(&handle));
            thread::sleep(SHORT);
            assert!(!waits.is_finished(), "it has not ended");
            assert!(!job.is_empty());
            let id = rustix::process::Pid::from_raw(job.processes[&1].id().cast_signed()).expect("an ID");
            rustix::process::kill_process(id, rustix::process::Signal::KILL).expect("killed");
        });
        assert!(begun.elapsed() < LONG);
        assert!(job.is_empty());
        job.end(1);
    }

    #[test]
    fn an_owner_that_is_not_saved_leaves_orphans() {
        let job = Job::of([1, 2]);
        assert!(job.publish(1, "one"));
        let is_saved = |pid| pid == 2;
        assert_eq!(job.broker.orphan(is_saved), None, "no other process uses it");
        assert!(job.fetch(2, 1).is_ok());
        assert_eq!(job.orphan(), None);
        assert_eq!(job.broker.orphan(is_saved).map(|orphan| orphan.process.pid), Some(Some(2)));
    }

    fn drained(job: &Job, attempt: u64, pid: u32) -> bool {
        let ToAgent::AllDrained { is_complete } = job.ask(&FromAgent::Drained { attempt, pid }, &[]).0 else {
            panic!("not an answer");
        };
        is_complete
    }

    #[test]
    fn processes_that_share_memory_wait_until_all_are_drained() {
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
        job.end(4);
    }

    /// A process that runs would write to it.
    #[test]
    fn memory_that_is_being_captured_cannot_be_had_until_the_attempt_ends() {
        let job = Job::of([1, 2, 3]);
        assert!(job.publish(1, "one"));
        assert!(job.fetch(2, 1).is_ok());
        job.withdraw(2);
        job.broker.begin(5);
        assert!(job.fetch(3, 1).is_ok(), "nothing is captured yet");
        job.withdraw(3);
        assert!(drained(&job, 5, 1));
        assert_eq!(job.fetch(2, 1), Err(false), "it may be had later");
        assert!(drained(&job, 5, 3));
        assert!(job.fetch(3, 1).is_ok(), "its gate is closed");
        job.broker.end_attempt();
        assert!(job.fetch(2, 1).is_ok());
    }

    #[test]
    fn the_end_of_an_attempt_ends_the_wait() {
        let job = Job::of([1, 2]);
        assert!(job.publish(1, "one"));
        assert!(job.fetch(2, 1).is_ok());
        job.broker.begin(5);
        thread::scope(|scope| {
            let first = scope.spawn(|| drained(&job, 5, 1));
            while job.broker.table.lock().drain.pids.is_empty() {
                thread::yield_now();
            }
            job.broker.end_attempt();
            assert!(!first.join().expect("joined"));
        });
        assert!(!drained(&job, 5, 2));
    }
}
