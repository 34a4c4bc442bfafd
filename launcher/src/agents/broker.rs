//! Device memory of which the launcher keeps the driver's descriptors, and hands them out by key: what processes of the job
//! share, by CUDA IPC or by descriptors, and what they have parked.
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
//! The memory stays here while its owner is detached for a dump. In a job that runs on, owner and importers then open
//! the same memory again. A launcher that resumes a job starts without memory: owners publish their restored memory again.
//!
//! Parked memory is for its owner only. It stays here between checkpoints too, since the driver does not export memory that
//! has come back by a descriptor.
//!
//! Orphaned memory is still in use by a process that has opened it, or may be imported, but no process captures it: a
//! snapshot would be wrong.
//!
//! Multicast objects are shared in the same way. The launcher closes the driver's descriptor of one when all its processes
//! have taken it down, and gets another one when its owner has created it again, see [`cycle`].
//!
//! No process may write to memory that another process is capturing. So processes that share memory wait for each other
//! between draining and capturing. A process that has captured its memory lets no further process have it in this attempt:
//! that one still runs, and would write to it.

mod cycle;

use crate::sys::deadline::{AGENT_EXIT_TIMEOUT, PROCESS_POLL_INTERVAL, RETURN_STEP_TIMEOUT};
use crate::sys::descriptor_limit;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ckpt_protocol::agent::{
    Cycle as NamedCycle, CycleStep, FromAgent, MulticastObject, Progress, ShareKey, ToAgent,
};
use ckpt_protocol::frame::FrameError;
use tracing::debug;

use super::lease;
use super::mirrors::random_number;
use super::process::{Process, ProcessHandle, QuiesceError};
use super::stream::AgentStream;
use cycle::{Cycle, Objects};

/// Parked memory takes at most this part of the descriptors that the launcher may have.
const PARKED_PART: u64 = 2;
/// The interval at which the end of a process is polled that takes long to end.
const SLOW_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Shared and parked device memory of a job.
#[derive(Default)]
pub struct Broker {
    table: Mutex<Table>,
    /// Notified whenever a process is drained, or an attempt ends.
    changed: Condvar,
}

#[derive(Default)]
struct Table {
    /// Processes that share or park memory, by ID in the job.
    participants: BTreeMap<u32, Participant>,
    shared: BTreeMap<ShareKey, SharedMemory>,
    /// What each process has parked.
    parked: BTreeMap<u32, BTreeMap<ShareKey, Arc<OwnedFd>>>,
    /// No more memory is kept.
    is_closed: bool,
    drain: Drain,
    /// The last one.
    cycle: Option<Cycle>,
}

/// Memory that was published.
struct SharedMemory {
    /// `None` for a multicast object that all have taken down, until its owner has created it again.
    memory: Option<Arc<OwnedFd>>,
    is_multicast: bool,
    bytes: u64,
    /// The memfd whose other descriptors stand for the memory.
    root: Option<OwnedFd>,
    /// Kept after the owner has ended.
    owner: u32,
    publisher: Process,
    is_orphaned: bool,
    importers: BTreeSet<u32>,
}

/// A process that shares or parks memory.
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
    objects: Objects,
    /// For all processes alike: some may have acted on it before others ask.
    outcome: Option<Drained>,
}

/// How waiting for all processes to drain has ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Drained {
    attempt: u64,
    is_complete: bool,
    problem: Option<String>,
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
        FromAgent::Publish { instance, .. }
        | FromAgent::Fetch { instance, .. }
        | FromAgent::Park { instance, .. } => *instance,
        _ => 0,
    }
}

/// The sender of a message for the broker. If such a message is the first of a connection, it is the only one.
pub fn sender(message: &FromAgent) -> Option<u32> {
    match message {
        FromAgent::Publish { pid, .. }
        | FromAgent::Fetch { pid, .. }
        | FromAgent::Withdraw { pid, .. }
        | FromAgent::Park { pid, .. }
        | FromAgent::Unpark { pid, .. }
        | FromAgent::Drained { pid, .. }
        | FromAgent::Arrive { pid, .. } => Some(*pid),
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
        let mut memory = Vec::new();
        let answer = match message {
            FromAgent::Publish { .. } => {
                ToAgent::Published { is_kept: self.receive_published(stream, process, message)? }
            }
            FromAgent::Fetch { pid, key, owner, .. } => {
                // Before it is looked for: the owner may publish it and register meanwhile.
                let is_owner_back = is_registered(*owner);
                match self.fetch(*key, *pid) {
                    Fetched::Memory(found, bytes) => {
                        memory.push(found);
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
            FromAgent::Park { pid, keys, .. } => {
                ToAgent::Parked { is_kept: self.receive_parked(stream, *pid, keys)? }
            }
            FromAgent::Unpark { pid, keys } => {
                memory = self.unpark(*pid, keys);
                ToAgent::Unparked { count: memory.len() }
            }
            FromAgent::Drained { attempt, pid, objects } => {
                let (drained, cycle) = self.await_drained(*attempt, *pid, objects, end);
                let Drained { is_complete, problem, .. } = drained;
                ToAgent::AllDrained { is_complete, cycle, problem }
            }
            FromAgent::Arrive { pid, cycle, step } => {
                ToAgent::Arrived { progress: self.arrive(*pid, cycle, *step, end) }
            }
            _ => return Ok(()),
        };
        let memory: Vec<_> = memory.iter().map(AsFd::as_fd).collect();
        stream.send_with_files(&answer, &memory)
    }

    fn receive_published(
        &self,
        stream: &AgentStream,
        process: Process,
        message: &FromAgent,
    ) -> Result<bool, FrameError> {
        // Without the descriptors, the agent is answered too.
        let received = stream.receive_files_if_room(message.descriptors(), "receive shared memory")?;
        Ok(received.is_some_and(|received| self.keep(process, message, received)))
    }

    fn receive_parked(&self, stream: &AgentStream, pid: u32, keys: &[ShareKey]) -> Result<bool, FrameError> {
        let received = stream.receive_files_if_room(keys.len(), "receive parked memory")?;
        let most = descriptor_limit::current() / PARKED_PART;
        Ok(received.is_some_and(|received| self.park(pid, keys, received, most)))
    }

    /// Keeps what a [`FromAgent::Publish`] of a process publishes, with the descriptors that followed it; returns whether
    /// it is kept.
    fn keep(&self, publisher: Process, message: &FromAgent, received: Vec<OwnedFd>) -> bool {
        let FromAgent::Publish { pid, key, bytes, is_multicast, .. } = *message else { return false };
        let mut received = received.into_iter();
        let Some(memory) = received.next() else { return false };
        debug!(pid, bytes, is_multicast, "device memory is shared");
        let shared = SharedMemory {
            is_multicast,
            bytes,
            root: received.next(),
            ..SharedMemory::of(pid, publisher, memory)
        };
        self.publish(key, shared)
    }

    /// Keeps parked memory, if there are not more than `most` descriptors of such memory then.
    fn park(&self, pid: u32, keys: &[ShareKey], received: Vec<OwnedFd>, most: u64) -> bool {
        let mut table = self.pruned();
        let parked: usize = table.parked.values().map(BTreeMap::len).sum();
        let is_kept = !table.is_closed && (parked + received.len()) as u64 <= most;
        if is_kept {
            let memory = received.into_iter().map(Arc::new);
            table.parked.entry(pid).or_default().extend(keys.iter().copied().zip(memory));
        } else {
            debug!(pid, parked, "more memory cannot be parked: there are too many open files");
        }
        is_kept
    }

    /// The parked memory of these keys: all of it, or nothing.
    fn unpark(&self, pid: u32, keys: &[ShareKey]) -> Vec<Arc<OwnedFd>> {
        let table = self.pruned();
        let parked = table.parked.get(&pid);
        keys.iter().map(|key| parked?.get(key).cloned()).collect::<Option<_>>().unwrap_or_default()
    }

    /// Removes all parked memory: no process of the job comes back for it.
    pub fn forget_parked(&self) {
        let parked = std::mem::take(&mut self.table.lock().parked);
        drop(parked);
    }

    /// Returns whether the memory is kept. A process cannot replace the memory of another process.
    fn publish(&self, key: ShareKey, mut memory: SharedMemory) -> bool {
        let mut table = self.pruned();
        if table.is_closed {
            return false;
        }
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
        let Some(memory) = shared.memory.as_ref().filter(|_| !shared.is_withheld(drain, pid)) else {
            return Fetched::Withheld;
        };
        let memory = Arc::clone(memory);
        if shared.is_orphaned || shared.owner != pid {
            shared.importers.insert(pid);
        }
        Fetched::Memory(memory, shared.bytes)
    }

    fn withdraw(&self, keys: &[ShareKey], pid: u32) {
        let mut table = self.pruned();
        let parked = table.parked.get_mut(&pid);
        let parked: Vec<_> =
            parked.into_iter().flat_map(|parked| keys.iter().filter_map(|key| parked.remove(key))).collect();
        for key in keys {
            if let Some(shared) = table.shared.get_mut(key) {
                shared.withdraw(pid);
            }
        }
        table.remove_unused();
        drop(table);
        // The driver frees the memory with its last descriptor, which may take long.
        drop(parked);
    }

    /// Called when the agent of a process has connected: if the process has executed another program since its last message,
    /// it has none of its memory any more.
    pub fn note_instance(&self, pid: u32, instance: u64) {
        self.pruned().note_instance(pid, instance);
    }

    /// Called when the connection of a process was lost: removes its memory, which occupies the GPU, once the process has
    /// ended. A process that runs on keeps it.
    pub fn forget_after_exit(&self, handle: &ProcessHandle) {
        let begun = Instant::now();
        let has_memory = || {
            let table = self.pruned();
            !table.is_closed && (!table.shared.is_empty() || !table.parked.is_empty())
        };
        while has_memory() && !handle.has_ended() {
            // The kernel may take seconds to end a process that has much memory.
            let is_slow = begun.elapsed() > AGENT_EXIT_TIMEOUT;
            std::thread::sleep(if is_slow { SLOW_POLL_INTERVAL } else { PROCESS_POLL_INTERVAL });
        }
        self.forget_ended();
    }

    /// Removes the memory of processes that have ended.
    pub fn forget_ended(&self) {
        self.table.lock().prune();
    }

    /// Removes all memory, for good: the job has ended.
    pub fn close(&self) {
        let closed = Table { is_closed: true, ..Table::default() };
        let table = std::mem::replace(&mut *self.table.lock(), closed);
        drop(table);
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
        let mut table = self.table.lock();
        table.drain = Drain { attempt: Some(attempt), ..Drain::default() };
        table.fail_cycle();
    }

    /// Ends the current attempt: processes no longer wait for it.
    pub fn end_attempt(&self) {
        let mut table = self.table.lock();
        let outcome = table.drain.outcome.take();
        table.drain = Drain { outcome, ..Drain::default() };
        table.fail_cycle();
        drop(table);
        self.changed.notify_all();
    }

    /// The processes that share memory, if they were told in this attempt that all of them are drained, so that they have
    /// captured it or do.
    pub fn capturing(&self, attempt: u64) -> BTreeSet<u32> {
        let table = self.table.lock();
        let is_told =
            table.drain.outcome.as_ref().is_some_and(|told| told.attempt == attempt && told.is_complete);
        if is_told { table.sharing().collect() } else { BTreeSet::new() }
    }

    /// Notes that a process is drained, and waits until all are that share memory, or the attempt fails. Returns the cycle of
    /// the multicast objects, if the process is a member.
    fn await_drained(
        &self,
        attempt: u64,
        pid: u32,
        objects: &[MulticastObject],
        end: Instant,
    ) -> (Drained, Option<NamedCycle>) {
        let mut table = self.table.lock();
        if table.drain.attempt == Some(attempt) {
            table.drain.pids.insert(pid);
            table.drain.objects.note(pid, objects);
            self.changed.notify_all();
        }
        loop {
            table.prune();
            let is_late = end.saturating_duration_since(Instant::now()).is_zero();
            if let Some(drained) = table.drained(attempt, is_late) {
                let cycle = table.cycle.as_ref().filter(|cycle| drained.is_complete && cycle.has(pid));
                let cycle = cycle.map(|cycle| cycle.named().clone());
                drop(table);
                self.changed.notify_all();
                return (drained, cycle);
            }
            let left = end.saturating_duration_since(Instant::now());
            let _ = self.changed.wait_for(&mut table, left.min(PROCESS_POLL_INTERVAL));
        }
    }

    /// Notes that a process has come to a step of a cycle, and waits for the other members: on their way down until `end`,
    /// then it has failed; on their way back for a while, since processes that are restored have no timeout.
    fn arrive(&self, pid: u32, named: &NamedCycle, step: CycleStep, end: Instant) -> Progress {
        let end = if step == CycleStep::Down { end } else { Instant::now() + RETURN_STEP_TIMEOUT };
        let mut table = self.table.lock();
        let closed = table.arrive(pid, named, step);
        self.changed.notify_all();
        // Closed before any member goes on, so that the objects have ended then.
        drop(closed);
        loop {
            table.prune();
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero()
                && step == CycleStep::Down
                && let Some(cycle) = table.cycle_of(named)
            {
                cycle.fail();
            }
            let progress = table.progress(named, step);
            if progress != Progress::Pending || left.is_zero() {
                drop(table);
                self.changed.notify_all();
                return progress;
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
            self.remove(pid);
        }
        self.remove_unused();
    }

    /// Removes a process, which has none of its memory any more.
    fn remove(&mut self, pid: u32) {
        self.participants.remove(&pid);
        if let Some(parked) = self.parked.remove(&pid) {
            // The driver frees the memory meanwhile, which may take long.
            std::thread::spawn(move || drop(parked));
        }
        self.shared.values_mut().for_each(|shared| shared.withdraw(pid));
        if let Some(cycle) = &mut self.cycle {
            cycle.note_end(pid);
        }
    }

    fn fail_cycle(&mut self) {
        if let Some(cycle) = &mut self.cycle {
            cycle.fail();
        }
    }

    /// How draining has ended in an attempt; `None` if it has not. It has failed if it has not been completed and `is_late`.
    fn drained(&mut self, attempt: u64, is_late: bool) -> Option<Drained> {
        if let Some(outcome) = self.drain.outcome.as_ref().filter(|outcome| outcome.attempt == attempt) {
            return Some(outcome.clone());
        }
        let failed = Drained { attempt, ..Drained::default() };
        if self.drain.attempt != Some(attempt) {
            return Some(failed);
        }
        let are_drained = self.sharing().all(|pid| self.drain.pids.contains(&pid));
        if !are_drained && !is_late {
            return None;
        }
        let problem = if are_drained { self.drain.objects.problem() } else { None };
        let is_complete = are_drained && problem.is_none();
        let members = self.drain.objects.members();
        if is_complete {
            self.cycle = (!members.is_empty()).then(|| Cycle::new(cycle_id(), members));
        }
        let outcome = Drained { is_complete, problem, ..failed };
        self.drain.outcome = Some(outcome.clone());
        Some(outcome)
    }

    /// Notes that a process has come to a step. Returns the descriptors of objects that have ended with that.
    fn arrive(&mut self, pid: u32, named: &NamedCycle, step: CycleStep) -> Vec<Arc<OwnedFd>> {
        let is_known = self.cycle_of(named).is_some();
        if !is_known && step != CycleStep::Down {
            self.cycle = Some(Cycle::of_snapshot(named.clone()));
        }
        let Some(cycle) = self.cycle_of(named) else { return Vec::new() };
        if !cycle.arrive(pid, step) {
            return Vec::new();
        }
        let objects = self.shared.values_mut().filter(|shared| shared.is_multicast);
        objects.filter_map(|shared| shared.memory.take()).collect()
    }

    fn cycle_of(&mut self, named: &NamedCycle) -> Option<&mut Cycle> {
        self.cycle.as_mut().filter(|cycle| cycle.named().id == named.id)
    }

    fn progress(&mut self, named: &NamedCycle, step: CycleStep) -> Progress {
        self.cycle_of(named).map_or(Progress::Failed, |cycle| cycle.progress(step))
    }

    fn note_instance(&mut self, pid: u32, instance: u64) {
        let Some(known) = self.participants.get(&pid).map(|known| known.instance) else { return };
        if known != 0 && instance != 0 && known != instance {
            self.remove(pid);
            self.remove_unused();
        }
    }

    fn remove_unused(&mut self) {
        self.shared.retain(|_, shared| !shared.is_orphaned || shared.is_wanted());
    }

    /// The processes that use memory together with others.
    fn sharing(&self) -> impl Iterator<Item = u32> {
        // A multicast object goes down in a cycle even if it is not imported yet.
        let is_used = |shared: &&SharedMemory| !shared.importers.is_empty() || shared.is_multicast;
        let used = self.shared.values().filter(is_used);
        used.flat_map(|shared| {
            let owner = (!shared.is_orphaned).then_some(shared.owner);
            owner.into_iter().chain(shared.importers.iter().copied())
        })
    }
}

/// What names a cycle: restored processes may bring one of an earlier launcher's.
fn cycle_id() -> u64 {
    // Without random numbers, a cycle has the time's.
    random_number().unwrap_or_else(|_| {
        let time = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        time.map_or(1, |time| time.as_nanos() as u64)
    })
}

impl SharedMemory {
    /// Memory of a process that is neither a multicast object nor passed by descriptors.
    fn of(owner: u32, publisher: Process, memory: OwnedFd) -> Self {
        Self {
            memory: Some(Arc::new(memory)),
            is_multicast: false,
            bytes: 0,
            root: None,
            owner,
            publisher,
            is_orphaned: false,
            importers: BTreeSet::new(),
        }
    }

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
                "it has opened device memory (cuIpcOpenMemHandle, cuMemImportFromShareableHandle, \
                 cuMemPoolImportPointer) of process {}, which has freed it or ended",
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
            let received = descriptors::receive(here.as_fd(), answer.descriptors()).expect("received");
            let content = received.into_iter().next().map(|memory| {
                let (mut memory, mut content) = (File::from(memory), String::new());
                memory.rewind().expect("rewound");
                memory.read_to_string(&mut content).expect("read");
                content
            });
            (answer, content)
        }

        /// Parks memory under these keys.
        fn park(&self, pid: u32, keys: &[u128], instance: u64) -> bool {
            let files: Vec<File> = keys.iter().map(|_| tempfile::tempfile().expect("a file")).collect();
            let keys = keys.iter().copied().map(ShareKey).collect();
            let (answer, _) =
                self.ask(&FromAgent::Park { pid, keys, instance }, &files.iter().collect::<Vec<_>>());
            let ToAgent::Parked { is_kept } = answer else { panic!("{answer:?}") };
            is_kept
        }

        /// How many descriptors a process gets for these keys.
        fn unpark(&self, pid: u32, keys: &[u128]) -> usize {
            let keys = keys.iter().copied().map(ShareKey).collect();
            let (answer, _) = self.ask(&FromAgent::Unpark { pid, keys }, &[]);
            let ToAgent::Unparked { count } = answer else { panic!("{answer:?}") };
            count
        }

        fn publish(&self, pid: u32, content: &str) -> bool {
            self.publish_with(pid, content, None)
        }

        fn publish_with(&self, pid: u32, content: &str, root: Option<&File>) -> bool {
            let mut memory = tempfile::tempfile().expect("a file");
            memory.write_all(content.as_bytes()).expect("written");
            let message = FromAgent::Publish {
                pid,
                key: KEY,
                bytes: 99,
                has_root: root.is_some(),
                is_multicast: false,
                instance: FIRST,
            };
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
    fn parked_memory_is_its_owners_until_it_is_withdrawn() {
        let job = Job::of([1, 2]);
        assert!(job.park(1, &[7, 8], FIRST) && job.park(1, &[9], FIRST) && job.park(2, &[10], FIRST));
        for _ in 0..2 {
            assert_eq!(job.unpark(1, &[8, 9]), 2);
        }
        assert_eq!((job.unpark(1, &[8, 11]), job.unpark(1, &[10])), (0, 0), "all of it, or nothing");
        let withdraw = FromAgent::Withdraw { pid: 1, keys: vec![ShareKey(8)] };
        assert_eq!(job.ask(&withdraw, &[]), (ToAgent::Withdrawn, None));
        assert_eq!((job.unpark(1, &[8]), job.unpark(1, &[7, 9])), (0, 2));
        // Nobody else uses it: nobody waits for its process.
        job.broker.begin(5);
        assert!(job.broker.orphan(|_| false).is_none());
        let (drained, _) = job.broker.await_drained(5, 2, &[], Instant::now() + LONG);
        assert!(drained.is_complete);
    }

    #[test]
    fn parked_memory_goes_with_its_process() {
        let mut job = Job::of([1, 2, 3]);
        assert!(job.park(1, &[7], FIRST) && job.park(2, &[8], FIRST) && job.park(3, &[9], FIRST));
        job.end(1);
        job.broker.forget_ended();
        assert_eq!(job.broker.table.lock().parked.len(), 2);
        // It has executed another program.
        job.broker.note_instance(2, FIRST + 1);
        assert_eq!(job.unpark(2, &[8]), 0);
        assert_eq!(job.unpark(3, &[9]), 1);
    }

    #[test]
    fn what_is_too_much_is_not_parked_and_what_is_parked_stays() {
        let job = Job::of([1]);
        assert!(job.park(1, &[7], FIRST));
        let files = || vec![OwnedFd::from(tempfile::tempfile().expect("a file"))];
        assert!(!job.broker.park(1, &[ShareKey(8)], files(), 1));
        assert_eq!((job.unpark(1, &[7]), job.unpark(1, &[8])), (1, 0));
        assert!(job.broker.park(1, &[ShareKey(8)], files(), 2));
        job.broker.forget_parked();
        assert_eq!(job.unpark(1, &[7]), 0);
        job.broker.close();
        assert!(!job.park(1, &[9], FIRST) && !job.publish(1, "memory"), "nothing is kept any more");
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
        let drained = FromAgent::Drained { attempt, pid, objects: Vec::new() };
        let ToAgent::AllDrained { is_complete, .. } = job.ask(&drained, &[]).0 else {
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

    fn publish_object(job: &Job, content: &str) {
        let mut memory = tempfile::tempfile().expect("a file");
        memory.write_all(content.as_bytes()).expect("written");
        let (key, has_root) = (KEY, false);
        let message =
            FromAgent::Publish { pid: 1, key, bytes: 99, has_root, is_multicast: true, instance: FIRST };
        assert_eq!(job.ask(&message, &[&memory]).0, ToAgent::Published { is_kept: true });
    }

    /// All processes come to a place at once; the answers.
    fn together(job: &Job, message: impl Fn(u32) -> FromAgent + Sync) -> Vec<ToAgent> {
        thread::scope(|scope| {
            let ask = |pid: &u32| {
                let pid = *pid;
                let message = &message;
                scope.spawn(move || job.ask(&message(pid), &[]).0)
            };
            let all: Vec<_> = job.processes.keys().map(ask).collect();
            all.into_iter().map(|one| one.join().expect("joined")).collect()
        })
    }

    /// The cycle of two processes that share an object of two devices.
    fn cycle_of(job: &Job, attempt: u64) -> NamedCycle {
        job.broker.begin(attempt);
        let drained = together(job, |pid| {
            let team_size = (pid == 1).then_some(2);
            let objects = vec![MulticastObject { key: KEY, devices: 1, team_size, is_used: true }];
            FromAgent::Drained { attempt, pid, objects }
        });
        let ToAgent::AllDrained { is_complete: true, cycle: Some(cycle), problem: None } = &drained[0] else {
            panic!("not drained: {drained:?}");
        };
        assert_eq!(cycle.members, [1, 2]);
        assert_eq!(drained[0], drained[1]);
        cycle.clone()
    }

    fn arrived(job: &Job, cycle: &NamedCycle, step: CycleStep) -> Vec<Progress> {
        let answers = together(job, |pid| FromAgent::Arrive { pid, cycle: cycle.clone(), step });
        let progress = |answer| match answer {
            ToAgent::Arrived { progress } => progress,
            other => panic!("not an answer: {other:?}"),
        };
        answers.into_iter().map(progress).collect()
    }

    #[test]
    fn a_multicast_object_ends_when_all_are_down_and_is_waited_for_until_it_is_made_again() {
        let job = Job::of([1, 2]);
        publish_object(&job, "one");
        assert_eq!(job.fetch(2, 1), Ok("one".to_owned()));
        let cycle = cycle_of(&job, 5);
        assert_eq!(arrived(&job, &cycle, CycleStep::Down), [Progress::Complete; 2]);
        job.broker.end_attempt();
        assert_eq!(job.fetch(2, 1), Err(false), "its owner has not made it again");
        publish_object(&job, "two");
        assert_eq!(job.fetch(2, 1), Ok("two".to_owned()));
        for step in [CycleStep::Added, CycleStep::Bound] {
            assert_eq!(arrived(&job, &cycle, step), [Progress::Complete; 2]);
        }
        // A launcher that resumes the job.
        let again = Job::of([1, 2]);
        let alone = FromAgent::Arrive { pid: 1, cycle: cycle.clone(), step: CycleStep::Added };
        assert_eq!(again.ask(&alone, &[]).0, ToAgent::Arrived { progress: Progress::Pending });
        assert_eq!(arrived(&again, &cycle, CycleStep::Added), [Progress::Complete; 2]);
    }

    #[test]
    fn a_multicast_object_lives_on_if_the_attempt_fails_first() {
        let job = Job::of([1, 2]);
        publish_object(&job, "one");
        assert!(job.fetch(2, 1).is_ok());
        let cycle = cycle_of(&job, 5);
        let down = FromAgent::Arrive { pid: 1, cycle: cycle.clone(), step: CycleStep::Down };
        thread::scope(|scope| {
            let first = scope.spawn(|| job.ask(&down, &[]).0);
            job.broker.end_attempt();
            assert_eq!(first.join().expect("joined"), ToAgent::Arrived { progress: Progress::Failed });
        });
        assert_eq!(arrived(&job, &cycle, CycleStep::Down), [Progress::Failed; 2]);
        assert_eq!(job.fetch(2, 1), Ok("one".to_owned()));
        assert_eq!(arrived(&job, &cycle, CycleStep::Bound), [Progress::Complete; 2]);
        // The next attempt has a cycle of its own.
        assert_ne!(cycle_of(&job, 6).id, cycle.id);
    }
}
