//! The collective clock of a process.
//!
//! ```text
//!             Count                    Reach
//!   Running ---------> all steps park ---------> steps park where all targets are met
//!      ^                                              |        ^       |
//!      |                    Release                   |        | Reach |
//!      +----------------------------------------------+        +-------+
//! ```
//!
//! While no cut is wanted, a step takes three atomic operations: it marks itself as in progress in the clock's word,
//! adds to its sequence, and takes the mark back. The word also has the bit that a cut is wanted, so after that bit is
//! set no step marks itself past the lock. From then on steps begin under the lock, which makes a step over several
//! communicators atomic.
//!
//! A step that was between its mark and its sequence when the bit was set is missing in a report's sequences, but not
//! in its calls in progress. The agent reports again later, so the sequence is reported at the latest with the report
//! that has no call in progress.

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::PoisonError;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use super::sync::{AtomicBool, AtomicU32, AtomicU64, Condvar, Mutex, MutexGuard};
use crate::messages::{MemberReport, Order, Report, Role};
use crate::names::Member;
use crate::rank::Attempt;

/// The bit of the clock's word that a cut is wanted. Below it: the number of steps in progress.
const PENDING: u64 = 1 << 63;

/// No call yet, as the index of a call.
const NO_CALL: u32 = u32::MAX;

/// A communicator, or a pair of its ranks, of which this process is a member.
pub struct Entry {
    member: Member,
    role: Role,
    sequence: AtomicU64,
    /// Whether its creation, if it had one of its own, has returned.
    is_created: AtomicBool,
    /// The index of the last call.
    call: AtomicU32,
}

impl Entry {
    fn new(member: Member, role: Role) -> Self {
        let (sequence, is_created) = (AtomicU64::new(0), AtomicBool::new(false));
        Self { member, role, sequence, is_created, call: AtomicU32::new(NO_CALL) }
    }

    /// The place in the communicator.
    #[must_use]
    pub fn member(&self) -> Member {
        self.member
    }

    /// Number of steps begun.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.sequence.load(Relaxed)
    }

    /// The creation of the communicator has returned successfully: all its members have begun it. To be called before
    /// the step of the creation ends.
    pub fn created(&self) {
        self.is_created.store(true, Release);
    }

    fn role(&self) -> Role {
        match self.role {
            Role::Communicator { alias, .. } if self.is_created.load(Acquire) => {
                Role::Communicator { awaits: None, alias }
            }
            role => role,
        }
    }
}

struct Shared {
    entries: BTreeMap<Member, Arc<Entry>>,
    attempt: Option<Attempt>,
    /// The calls that wait in front of their step.
    parked: Vec<u32>,
}

/// The collective clock of a process; usually there is one.
pub struct Clock {
    word: AtomicU64,
    shared: Mutex<Shared>,
    /// Notified when parked steps may begin.
    may_begin: Condvar,
    calls: &'static [&'static str],
    wake: fn(),
}

/// A step in progress. It ends when this is dropped, on any thread: a nonblocking call keeps it until NCCL reports that
/// the call is complete.
#[must_use = "the step ends when this is dropped"]
pub struct InCall<'a> {
    clock: &'a Clock,
}

impl Drop for InCall<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release: who sees no step in progress sees the sequences of all of them.
        if self.clock.word.fetch_sub(1, Release) & PENDING != 0 {
            (self.clock.wake)();
        }
    }
}

impl Clock {
    /// A clock. `calls` names the calls by their index. `wake` is called, with no lock held, when [`Clock::report`] may
    /// have changed; the thread that reports also polls it every few milliseconds while a cut is wanted.
    #[must_use]
    pub fn new(calls: &'static [&'static str], wake: fn()) -> Self {
        let shared = Shared { entries: BTreeMap::new(), attempt: None, parked: Vec::new() };
        let (word, shared) = (AtomicU64::new(0), Mutex::new(shared));
        Self { word, shared, may_begin: Condvar::new(), calls, wake }
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a communicator of this process: before its creation begins, or for a part of another one before the split
    /// ends.
    pub fn register(&self, member: Member, role: Role) -> Arc<Entry> {
        let entry = Arc::new(Entry::new(member, role));
        self.lock().entries.insert(member, Arc::clone(&entry));
        entry
    }

    /// The entry of what the member sends to another one of its communicator, or receives from it.
    pub fn pair(&self, of: &Entry, peer: u32, sends: bool) -> Arc<Entry> {
        let Member { communicator, index } = of.member;
        let (from, to) = if sends { (index, peer) } else { (peer, index) };
        let member = Member { communicator: communicator.pair(from, to), index: u32::from(!sends) };
        let new = || Arc::new(Entry::new(member, Role::Pair { of: communicator, from, to }));
        Arc::clone(self.lock().entries.entry(member).or_insert_with(new))
    }

    /// Removes a communicator and its pairs: it is destroyed, aborted, revoked, or its creation has failed. Steps on it
    /// no longer matter for a cut.
    pub fn retire(&self, entry: &Entry) {
        let mut shared = self.lock();
        let is_of = |(member, other): (&Member, &Arc<Entry>)| match other.role {
            Role::Communicator { .. } => *member == entry.member,
            Role::Pair { of, from, to } => {
                let index = if member.index == 0 { from } else { to };
                Member { communicator: of, index } == entry.member
            }
        };
        let gone: Vec<_> =
            shared.entries.iter().filter(|one| is_of(*one)).map(|(member, _)| *member).collect();
        shared.entries.retain(|member, _| !gone.contains(member));
        let attempt = shared.attempt.as_mut();
        let is_pending = attempt.map(|attempt| attempt.forget(&gone)).is_some();
        drop(shared);
        if is_pending {
            (self.wake)();
        }
    }

    /// Begins a step: so many operations on each of these communicators. Waits while the step has to park.
    #[inline]
    pub fn begin<E: Borrow<Entry>>(&self, step: &[(E, u32)], call: u32) -> InCall<'_> {
        self.begin_at_once(step, call).unwrap_or_else(|| {
            self.begin_pending(step, call);
            InCall { clock: self }
        })
    }

    /// As [`Clock::begin`], but `None` if a cut is wanted, whether the step would have to park or not.
    #[inline]
    pub fn begin_at_once<E: Borrow<Entry>>(&self, step: &[(E, u32)], call: u32) -> Option<InCall<'_>> {
        self.mark().then(|| {
            count(step, call);
            InCall { clock: self }
        })
    }

    /// Marks a step as in progress unless a cut is wanted.
    #[inline]
    fn mark(&self) -> bool {
        let mut word = self.word.load(Relaxed);
        while word & PENDING == 0 {
            match self.word.compare_exchange_weak(word, word + 1, Acquire, Relaxed) {
                Ok(_) => return true,
                Err(current) => word = current,
            }
        }
        false
    }

    #[cold]
    fn begin_pending<E: Borrow<Entry>>(&self, step: &[(E, u32)], call: u32) {
        let mut shared = self.lock();
        while !self.has_begun(&shared, step, call) {
            shared.parked.push(call);
            shared = self.may_begin.wait(shared).unwrap_or_else(PoisonError::into_inner);
            if let Some(place) = shared.parked.iter().position(|parked| *parked == call) {
                shared.parked.swap_remove(place);
            }
        }
        drop(shared);
        // The step may have gone past a target.
        (self.wake)();
    }

    /// Begins the step unless it has to park.
    fn has_begun<E: Borrow<Entry>>(&self, shared: &Shared, step: &[(E, u32)], call: u32) -> bool {
        let sequence_of = |member| shared.entries.get(&member).map_or(0, |entry| entry.sequence());
        if shared.attempt.as_ref().is_some_and(|attempt| attempt.parks(sequence_of)) {
            return false;
        }
        self.word.fetch_add(1, AcqRel);
        count(step, call);
        true
    }

    /// As [`Clock::begin`], but instead of waiting there is no step.
    #[cfg(test)]
    pub(crate) fn try_begin<E: Borrow<Entry>>(&self, step: &[(E, u32)], call: u32) -> Option<InCall<'_>> {
        self.begin_at_once(step, call).or_else(|| {
            let shared = self.lock();
            self.has_begun(&shared, step, call).then(|| InCall { clock: self })
        })
    }

    /// Follows an order of the coordinator.
    pub fn follow(&self, order: Order) {
        let mut shared = self.lock();
        shared.attempt = Attempt::after(shared.attempt.take(), order);
        if shared.attempt.is_some() {
            self.word.fetch_or(PENDING, AcqRel);
        } else {
            self.word.fetch_and(!PENDING, AcqRel);
        }
        self.may_begin.notify_all();
    }

    /// Adds operations to a step that is in progress: they belong to it, and do not park.
    pub fn extend<E: Borrow<Entry>>(&self, step: &[(E, u32)], call: u32) {
        debug_assert!(self.word.load(Relaxed) & !PENDING > 0, "there is a step in progress");
        count(step, call);
    }

    /// Whether the targets of the current attempt are known and met, so that a step would park.
    pub fn has_met_targets(&self) -> bool {
        let shared = self.lock();
        let sequence_of = |member| shared.entries.get(&member).map_or(0, |entry| entry.sequence());
        shared.attempt.as_ref().is_some_and(|attempt| attempt.version > 0 && attempt.parks(sequence_of))
    }

    /// The state to report; `None` while no cut is wanted.
    pub fn report(&self) -> Option<Report> {
        let shared = self.lock();
        let attempt = shared.attempt.as_ref()?;
        // First: without a step in progress, all sequences are complete.
        let in_call = self.word.load(Acquire) & !PENDING;
        let mut parked: Vec<_> = shared.parked.iter().map(|call| self.name_of(*call)).collect();
        parked.sort_unstable();
        Some(Report {
            attempt: attempt.number,
            version: attempt.version,
            in_call,
            members: self.members_of(&shared),
            parked,
        })
    }

    /// The communicators and pairs as in a report, whether a cut is wanted or not. Of steps that begin meanwhile, some may
    /// be counted and others not.
    pub fn members(&self) -> Vec<MemberReport> {
        self.members_of(&self.lock())
    }

    fn members_of(&self, shared: &Shared) -> Vec<MemberReport> {
        let member = |entry: &Arc<Entry>| MemberReport {
            member: entry.member,
            role: entry.role(),
            sequence: entry.sequence(),
            call: self.name_of(entry.call.load(Relaxed)),
        };
        shared.entries.values().map(member).collect()
    }

    fn name_of(&self, call: u32) -> String {
        self.calls.get(call as usize).copied().unwrap_or_default().to_owned()
    }
}

#[inline]
fn count<E: Borrow<Entry>>(step: &[(E, u32)], call: u32) {
    for (entry, operations) in step {
        let entry: &Entry = entry.borrow();
        entry.sequence.fetch_add(u64::from(*operations), Relaxed);
        entry.call.store(call, Relaxed);
    }
}
