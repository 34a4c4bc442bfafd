//! Messages to the launcher about shared memory.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use ckpt_protocol::agent::{FromAgent, ShareKey as Key, ToAgent};
use cuda_abi::types::CUresult;

use crate::cuda::gate;
use crate::cuda::memory::physical::{self, Id, registry};
use crate::cuda::result::INVALID_VALUE;
use crate::cuda::shared::Shared;
use crate::link::{Conversation, Link};
use crate::process;
use crate::socket::Socket;

/// The timeout for an answer of a launcher that listens.
const ANSWER_TIMEOUT_S: u16 = 10;
/// A launcher that has not answered for so long is late.
const LATE: Duration = Duration::from_secs(1);
/// How long a late launcher is not told again that memory is not used any more.
const LATE_PAUSE: Duration = Duration::from_secs(60);
/// The pause before a retry.
pub(super) const RETRY_INTERVAL: Duration = Duration::from_millis(20);
/// The timeout for a launcher that does not listen; the time of a checkpoint does not count.
const LAUNCHER_TIMEOUT: Duration = Duration::from_secs(60);
/// The timeout for a process that restores its memory. A process that fails to ends the job.
pub(super) const OWNER_TIMEOUT: Duration = Duration::from_secs(600);

/// The connection broke or an invalid answer arrived.
#[derive(Debug)]
pub(crate) struct ConnectionLost;

/// A connection of its own, for one message. To be called inside [`crate::fork::while_none`].
pub(super) fn connect() -> Result<ShortConnection, ConnectionLost> {
    let address = crate::launcher::address().filter(|address| address.exists()).ok_or(ConnectionLost)?;
    let socket = Socket::brief().map_err(|_| ConnectionLost)?;
    socket.connect(address).and_then(|()| socket.limit(ANSWER_TIMEOUT_S)).map_err(|_| ConnectionLost)?;
    Ok(ShortConnection(socket))
}

/// A connection that is closed on drop.
pub(super) struct ShortConnection(Socket);

impl Link for ShortConnection {
    fn ask(&mut self, message: &FromAgent, with: &[BorrowedFd<'_>]) -> Option<(ToAgent, Vec<OwnedFd>)> {
        Conversation::new(&self.0).ask(message, with)
    }
}

/// Why memory was not shared or fetched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ShareError {
    /// A call failed.
    Failed(CUresult),
    /// The launcher does not listen: there may be a checkpoint.
    Away,
    /// Another process has not restored its memory yet.
    NotYet,
}

impl From<CUresult> for ShareError {
    fn from(result: CUresult) -> Self {
        Self::Failed(result)
    }
}

impl From<ConnectionLost> for ShareError {
    fn from(ConnectionLost: ConnectionLost) -> Self {
        Self::Away
    }
}

/// Retries an operation that needs the launcher until it succeeds or fails for good. It waits outside the gate, since
/// the reason may be a checkpoint of this process. So each attempt starts from scratch.
pub(super) fn tried<T>(mut attempt: impl FnMut() -> Result<T, ShareError>) -> Result<T, ShareError> {
    let (mut away, mut not_yet) = (Duration::ZERO, Duration::ZERO);
    loop {
        let begun = Instant::now();
        let error = match attempt() {
            Err(error @ (ShareError::Away | ShareError::NotYet)) => error,
            done => return done,
        };
        let (waited, most) = match error {
            ShareError::Away if crate::launcher::address().is_none() => return Err(error),
            ShareError::Away => (&mut away, LAUNCHER_TIMEOUT),
            _ => (&mut not_yet, OWNER_TIMEOUT),
        };
        *waited += begun.elapsed() + RETRY_INTERVAL;
        if *waited > most {
            return Err(error);
        }
        gate::outside(|| std::thread::sleep(RETRY_INTERVAL));
    }
}

/// Asks for memory. `Ok(None)`: there is none under that key, for good; [`ShareError::NotYet`] if its owner may still
/// be putting it back.
pub(super) fn fetch(
    launcher: &mut dyn Link,
    key: Key,
    owner: u32,
) -> Result<Option<(OwnedFd, u64)>, ShareError> {
    let pid = std::process::id();
    let message = FromAgent::Fetch { pid, key, owner, instance: process::instance() };
    let (answer, memory) = launcher.ask(&message, &[]).ok_or(ConnectionLost)?;
    match (answer, memory.into_iter().next()) {
        (ToAgent::Shared { bytes }, Some(memory)) => Ok(Some((memory, bytes))),
        (ToAgent::NotShared { is_final }, _) if is_final || owner == pid || !exists(owner) => Ok(None),
        (ToAgent::NotShared { .. }, _) => Err(ShareError::NotYet),
        _ => Err(ShareError::Away),
    }
}

/// A descriptor of memory of this process. What was parked may have come back by a descriptor, and the driver does not export
/// that again (seen with 580.159.04): the launcher has the first one.
pub(super) fn descriptor_of(allocation: Id) -> Result<OwnedFd, ShareError> {
    let known = registry().allocations.get(&allocation).map(|known| (known.handle, known.parked));
    let (handle, parked) = known.ok_or(INVALID_VALUE)?;
    let Some(key) = parked else { return Ok(physical::export(handle)?) };
    let message = FromAgent::Unpark { pid: std::process::id(), keys: vec![key] };
    let (answer, memory) = connect()?.ask(&message, &[]).ok_or(ConnectionLost)?;
    match (answer, memory.into_iter().next()) {
        (ToAgent::Unparked { .. }, Some(memory)) => Ok(memory),
        // It does not have it. The driver exports what was not imported since.
        _ => Ok(physical::export(handle)?),
    }
}

/// Whether a process exists, even one of another user.
fn exists(pid: u32) -> bool {
    let Some(pid) = libc::pid_t::try_from(pid).ok().filter(|pid| *pid > 0) else { return false };
    // SAFETY: kill takes plain numbers; signal 0 is none.
    let result = unsafe { libc::kill(pid, 0) };
    result == 0 || std::io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH)
}

/// What is said of memory that is published.
#[derive(Clone, Copy)]
pub(super) struct Publication {
    pub key: Key,
    pub bytes: u64,
    pub is_multicast: bool,
}

/// Publishes memory, with the root of its descriptors if it has one; returns whether the launcher keeps it.
pub(super) fn publish(
    launcher: &mut dyn Link,
    publication: Publication,
    memory: &OwnedFd,
    root: Option<BorrowedFd<'_>>,
) -> Result<bool, ConnectionLost> {
    let (pid, instance) = (std::process::id(), process::instance());
    let Publication { key, bytes, is_multicast } = publication;
    let message = FromAgent::Publish { pid, key, bytes, has_root: root.is_some(), is_multicast, instance };
    let descriptors: Vec<_> = [Some(memory.as_fd()), root].into_iter().flatten().collect();
    match launcher.ask(&message, &descriptors).ok_or(ConnectionLost)? {
        (ToAgent::Published { is_kept }, _) => Ok(is_kept),
        _ => Err(ConnectionLost),
    }
}

/// What the launcher knows of this process, and the messages that are pending. The lock is held while they are sent,
/// which keeps their order; it is taken inside [`crate::fork::while_none`] only, or by the agent.
#[derive(Default)]
pub(super) struct Notices {
    /// How many mappings there are, or will be, of each memory that was fetched.
    uses: BTreeMap<Key, u64>,
    withdrawn: Vec<Key>,
    /// When the launcher did not answer in time.
    late_since: Option<Instant>,
}

pub(super) static NOTICES: Shared<Notices> =
    Shared::new(Notices { uses: BTreeMap::new(), withdrawn: Vec::new(), late_since: None });

impl Notices {
    /// Fetches memory for one more mapping.
    pub fn fetch(
        &mut self,
        launcher: &mut dyn Link,
        key: Key,
        owner: u32,
    ) -> Result<Option<(OwnedFd, u64)>, ShareError> {
        let found = fetch(launcher, key, owner)?;
        if found.is_some() {
            *self.uses.entry(key).or_default() += 1;
            self.withdrawn.retain(|withdrawn| *withdrawn != key);
        }
        Ok(found)
    }

    /// Records that a mapping was removed.
    pub fn unmapped(&mut self, key: Key) {
        let Some(uses) = self.uses.get_mut(&key) else { return };
        *uses -= 1;
        if *uses == 0 {
            self.uses.remove(&key);
            self.withdraw(key);
        }
    }

    /// Records that this process no longer uses the memory.
    pub fn withdraw(&mut self, key: Key) {
        self.withdrawn.push(key);
    }

    pub fn has_pending(&self) -> bool {
        !self.withdrawn.is_empty()
    }

    /// As [`Self::send_now`], if there is anything to send. If the launcher has not answered in time, this is not tried again
    /// for a while: a program that frees much would wait each time.
    pub fn send_soon(&mut self) {
        let is_late = self.late_since.is_some_and(|since| since.elapsed() < LATE_PAUSE);
        if self.has_pending() && !is_late {
            self.send_now();
        }
    }

    /// As [`Self::send`], on a connection of its own.
    pub fn send_now(&mut self) {
        let begun = Instant::now();
        let is_sent = connect().is_ok_and(|mut launcher| self.send(&mut launcher).is_ok());
        self.late_since = (!is_sent && begun.elapsed() >= LATE).then(Instant::now);
    }

    /// Sends the pending messages.
    pub fn send(&mut self, launcher: &mut dyn Link) -> Result<(), ConnectionLost> {
        if self.withdrawn.is_empty() {
            return Ok(());
        }
        let message = FromAgent::Withdraw { pid: std::process::id(), keys: self.withdrawn.clone() };
        match launcher.ask(&message, &[]).ok_or(ConnectionLost)? {
            (ToAgent::Withdrawn, _) => {
                self.withdrawn.clear();
                Ok(())
            }
            _ => Err(ConnectionLost),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    const KEY: Key = Key(3);
    /// No process has this ID: it is above the kernel's highest, PID_MAX_LIMIT of proc(5).
    const NOBODY: u32 = (1 << 22) + 1;

    /// Gives its answers one after the other, then breaks.
    #[derive(Default)]
    struct Answers {
        answers: VecDeque<ToAgent>,
        heard: Vec<FromAgent>,
    }

    impl Answers {
        fn of(answers: impl IntoIterator<Item = ToAgent>) -> Self {
            Self { answers: answers.into_iter().collect(), heard: Vec::new() }
        }
    }

    impl Link for Answers {
        fn ask(&mut self, message: &FromAgent, _: &[BorrowedFd<'_>]) -> Option<(ToAgent, Vec<OwnedFd>)> {
            self.heard.push(message.clone());
            let answer = self.answers.pop_front()?;
            let memory = || OwnedFd::from(std::fs::File::open("/dev/null").expect("a file"));
            let descriptors = (0..answer.descriptors()).map(|_| memory()).collect();
            Some((answer, descriptors))
        }
    }

    fn shared() -> ToAgent {
        ToAgent::Shared { bytes: 9 }
    }

    fn found(answer: ToAgent, owner: u32) -> Result<Option<u64>, ShareError> {
        fetch(&mut Answers::of([answer]), KEY, owner).map(|found| found.map(|(_, bytes)| bytes))
    }

    #[test]
    fn memory_is_waited_for_as_long_as_its_owner_may_still_publish_it() {
        let parent = std::os::unix::process::parent_id();
        assert_eq!(found(shared(), parent), Ok(Some(9)));
        assert_eq!(found(ToAgent::NotShared { is_final: false }, parent), Err(ShareError::NotYet));
        assert_eq!(found(ToAgent::NotShared { is_final: true }, parent), Ok(None));
        assert_eq!(found(ToAgent::NotShared { is_final: false }, NOBODY), Ok(None));
        assert_eq!(found(ToAgent::NotShared { is_final: false }, std::process::id()), Ok(None));
        assert_eq!(found(ToAgent::Withdrawn, parent), Err(ShareError::Away));
    }

    #[test]
    fn memory_is_withdrawn_after_its_last_mapping() {
        let mut launcher = Answers::of([shared(), shared(), ToAgent::Withdrawn]);
        let mut line = Notices::default();
        assert!(line.fetch(&mut launcher, KEY, NOBODY).is_ok());
        assert!(line.fetch(&mut launcher, KEY, NOBODY).is_ok());
        line.unmapped(KEY);
        assert!(!line.has_pending());
        line.unmapped(KEY);
        assert!(line.has_pending());
        line.send(&mut launcher).expect("told");
        assert!(!line.has_pending());
        let withdraw = FromAgent::Withdraw { pid: std::process::id(), keys: vec![KEY] };
        assert_eq!(launcher.heard.last(), Some(&withdraw));
        line.unmapped(KEY);
        assert!(!line.has_pending(), "it was not fetched");
    }

    #[test]
    fn what_could_not_be_told_is_told_later_unless_it_is_not_so_any_more() {
        let mut line = Notices::default();
        line.withdraw(Key(8));
        assert!(line.send(&mut Answers::default()).is_err());
        assert!(line.fetch(&mut Answers::of([shared()]), KEY, NOBODY).is_ok());
        line.unmapped(KEY);
        assert!(line.fetch(&mut Answers::of([shared()]), KEY, NOBODY).is_ok());
        let mut launcher = Answers::of([ToAgent::Withdrawn]);
        line.send(&mut launcher).expect("told");
        let withdraw = FromAgent::Withdraw { pid: std::process::id(), keys: vec![Key(8)] };
        assert_eq!(launcher.heard, [withdraw]);
    }
}
