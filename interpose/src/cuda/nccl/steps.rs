//! Counts calls: each is a step of the consistent cut, and waits in front of NCCL where it has to park.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering::Acquire};
use std::sync::{Arc, OnceLock};

use ckpt_cut::rank::{Counts, Entry, InCall, Thread};
use cuda_abi::types::CUstream;

use super::{
    Call, Communicator, GENERATION, IN_PROGRESS, SUCCESS, Status, calls, communicators, graphs, ranks,
};
use crate::cuda::thread_word::thread_word;

/// How a call is treated.
pub(super) enum Begun {
    /// It is not counted: another call makes it, or it is about nothing that is known.
    Passes,
    /// It belongs to the open group of the thread.
    InGroup,
    /// It belongs to a capture.
    InCapture,
    /// It is a step.
    Alone(InCall<'static>),
}

/// More than a thread usually has in turn.
const CACHE: usize = 16;

/// What a thread has looked up last, by what it has looked for.
struct Recent<K, V> {
    known: Vec<(K, V)>,
    next: usize,
    generation: u64,
}

impl<K, V> Default for Recent<K, V> {
    fn default() -> Self {
        Self { known: Vec::new(), next: 0, generation: 0 }
    }
}

impl<K: PartialEq, V> Recent<K, V> {
    /// The value of a key, which is looked up if it is not known. All is forgotten when the generation is another one.
    #[inline]
    fn get(&mut self, generation: &AtomicU64, key: K, find: impl FnOnce(&K) -> Option<V>) -> Option<&V> {
        let generation = generation.load(Acquire);
        if self.generation != generation {
            self.forget(generation);
        }
        let place = match self.known.iter().position(|(known, _)| *known == key) {
            Some(place) => place,
            None => self.add(key, find)?,
        };
        Some(&self.known[place].1)
    }

    #[cold]
    fn forget(&mut self, generation: u64) {
        self.known.clear();
        (self.generation, self.next) = (generation, 0);
    }

    #[cold]
    fn add(&mut self, key: K, find: impl FnOnce(&K) -> Option<V>) -> Option<usize> {
        let value = find(&key)?;
        let place = self.next;
        self.next = (place + 1) % CACHE;
        match self.known.get_mut(place) {
            Some(old) => *old = (key, value),
            None => self.known.push((key, value)),
        }
        Some(place)
    }
}

/// A communicator, or what the thread sends to a peer or receives from it.
type Of = (usize, Option<(c_int, bool)>);

/// The entry of a communicator, or of one of its pairs.
fn find_entry(&(of, peer): &Of) -> Option<Arc<Entry>> {
    let whole = communicators::entry(of as Communicator)?;
    match peer {
        Some((peer, sends)) => Some(ranks().clock.pair(&whole, u32::try_from(peer).ok()?, sends)),
        None => Some(whole),
    }
}

/// What a thread is in the middle of.
#[derive(Default)]
pub(super) struct State {
    /// The calls, of whatever copy of NCCL: one may be built on another.
    calls: Thread,
    entries: Recent<Of, Arc<Entry>>,
    /// By executable graphs; `None` for one without calls.
    launched: Recent<usize, Option<Arc<Counts>>>,
    groups: [Group; 1 + calls::COPIES],
}

impl State {
    /// The open group in the copy of NCCL that a call goes to.
    pub fn group(&mut self, call: Call) -> &mut Group {
        &mut self.groups[call.copy]
    }
}

/// The open group of a thread in one copy of NCCL.
#[derive(Default)]
pub(super) struct Group {
    counts: Thread,
    /// The communicators of its calls.
    handles: Vec<usize>,
    /// Communicators that its end makes, by their numbers.
    makings: Vec<u64>,
}

impl Group {
    /// Adds a step on these entries, which concerns a communicator. `false` if no group is open.
    #[inline]
    pub fn has(&mut self, entries: &[&Arc<Entry>], of: Communicator) -> bool {
        self.counts.is_in_group() && self.has_added(entries, of)
    }

    fn has_added(&mut self, entries: &[&Arc<Entry>], of: Communicator) -> bool {
        entries.iter().for_each(|entry| {
            self.counts.add_to_group(entry, 1);
        });
        if !entries.is_empty() {
            self.add(of);
        }
        !entries.is_empty()
    }

    fn add(&mut self, of: Communicator) {
        if !of.is_null() && !self.handles.contains(&(of as usize)) {
            self.handles.push(of as usize);
        }
    }

    pub fn make(&mut self, makings: &[u64]) {
        self.makings.extend_from_slice(makings);
    }

    /// What the end of the group, which has returned this, has to see to: its communicators, and those that it makes.
    fn over(&mut self, status: Status) -> (Vec<usize>, Vec<u64>) {
        if status == SUCCESS && self.makings.is_empty() {
            // Mostly. The memory is for the next group.
            self.handles.clear();
            return (Vec::new(), Vec::new());
        }
        (std::mem::take(&mut self.handles), std::mem::take(&mut self.makings))
    }
}

thread_word!(
    /// Each thread's state; null while it has none.
    state_of_thread,
    "ckpt_nccl_state"
);

/// Frees a thread's state when the thread ends.
static THREAD_ENDS: OnceLock<Option<libc::pthread_key_t>> = OnceLock::new();

/// The calling thread's state, for as long as a call takes.
#[inline(always)]
fn state() -> &'static RefCell<State> {
    // SAFETY: the thread's state is freed when the thread ends, which is not inside a call.
    unsafe { (state_of_thread::get() as *const RefCell<State>).as_ref() }.unwrap_or_else(make_state)
}

#[cold]
fn make_state() -> &'static RefCell<State> {
    let state = Box::into_raw(Box::<RefCell<State>>::default());
    state_of_thread::set(state as usize);
    let create = || {
        let mut key = 0;
        // SAFETY: `key` is writable; the destructor is a function of this library, which stays mapped.
        (unsafe { libc::pthread_key_create(&raw mut key, Some(thread_ends)) } == 0).then_some(key)
    };
    // Without a key, states of ended threads are not freed, which only costs their memory.
    if let Some(key) = THREAD_ENDS.get_or_init(create) {
        // SAFETY: the key was created and is never deleted.
        unsafe { libc::pthread_setspecific(*key, state.cast()) };
    }
    // SAFETY: it was made above.
    unsafe { &*state }
}

extern "C" fn thread_ends(state: *mut c_void) {
    // A destructor that runs after this one may call NCCL again: that makes another state.
    state_of_thread::set(0);
    // SAFETY: the value is the thread's state, see `make_state`.
    drop(unsafe { Box::from_raw(state.cast::<RefCell<State>>()) });
}

/// A call that the thread is in.
pub(super) struct Entered {
    pub begun: Begun,
    /// Where the call is noted.
    state: Option<&'static RefCell<State>>,
}

impl Drop for Entered {
    #[inline]
    fn drop(&mut self) {
        if let Some(state) = self.state {
            state.borrow_mut().calls.leave();
        }
    }
}

/// Begins a call, which waits here if it has to park.
#[inline(always)]
pub(super) fn enter(call: Call, begin: impl FnOnce(&mut State) -> Begun) -> Entered {
    let of_thread = state();
    // A signal handler may come in between, and is not counted.
    let Ok(mut state) = of_thread.try_borrow_mut() else {
        return Entered { begun: Begun::Passes, state: None };
    };
    let passes = state.calls.enter() || call.target.is_nccls;
    let begun = if passes { Begun::Passes } else { begin(&mut state) };
    Entered { begun, state: Some(of_thread) }
}

/// What `begin` makes of the operations of an executable graph, if it has any.
#[inline]
pub(super) fn launching<T>(executable: usize, begin: impl FnOnce(&Counts) -> Option<T>) -> Option<T> {
    match state().try_borrow_mut() {
        Ok(mut state) => {
            let find = |executable: &usize| Some(graphs::counts_of_executable(*executable));
            begin(state.launched.get(&graphs::GENERATION, executable, find)?.as_ref()?)
        }
        // A signal handler.
        Err(_) => begin(&*graphs::counts_of_executable(executable)?),
    }
}

/// An operation on a communicator, or on a pair of its ranks.
#[inline]
pub(super) fn operation(
    call: Call,
    of: Communicator,
    peer: Option<(c_int, bool)>,
    stream: Option<CUstream>,
    real: impl FnOnce() -> Status,
) -> Status {
    let mut entered = enter(call, |State { entries, groups, .. }| {
        // NCCL refuses a communicator that is none.
        let key = (of as usize, peer);
        let Some(entry) = entries.get(&GENERATION, key, find_entry) else { return Begun::Passes };
        if let Some(stream) = stream
            && graphs::may_record()
            && graphs::record(stream, &[(Arc::clone(entry), 1)], call.index)
        {
            return Begun::InCapture;
        }
        if groups[call.copy].has(&[entry], of) {
            return Begun::InGroup;
        }
        Begun::Alone(ranks().clock.begin(&[(&**entry, 1)], call.index))
    });
    let status = real();
    if status == IN_PROGRESS
        && let Begun::Alone(in_call) = std::mem::replace(&mut entered.begun, Begun::Passes)
    {
        communicators::keep(&Arc::new(in_call), &[of as usize]);
    }
    status
}

pub(super) fn start_group(call: Call, real: impl FnOnce() -> Status) -> Status {
    let _entered = enter(call, |state| {
        state.group(call).counts.start_group();
        Begun::InGroup
    });
    real()
}

/// The end of a group: if it is the outermost one, a step with all operations of the group.
pub(super) fn end_group(call: Call, real: impl FnOnce() -> Status) -> Status {
    let mut entered = enter(call, |state| {
        let Some(counts) = state.group(call).counts.end_group() else { return Begun::InGroup };
        if counts.is_empty() {
            return Begun::InGroup;
        }
        let in_call = ranks().clock.begin(counts.step(), call.index);
        counts.clear();
        Begun::Alone(in_call)
    });
    let status = real();
    if let Begun::Alone(in_call) = std::mem::replace(&mut entered.begun, Begun::Passes)
        && let Some(state) = entered.state
    {
        let (handles, makings) = state.borrow_mut().group(call).over(status);
        finish(call, status, in_call, &makings, &handles);
    }
    status
}

/// The group ends without being carried out.
pub(super) fn simulate_group(call: Call, real: impl FnOnce() -> Status) -> Status {
    let mut makings = Vec::new();
    let _entered = enter(call, |state| {
        let group = state.group(call);
        if let Some(counts) = group.counts.end_group() {
            counts.clear();
            makings = std::mem::take(&mut group.makings);
            group.handles.clear();
        }
        Begun::InGroup
    });
    let status = real();
    communicators::failed(&makings);
    status
}

/// A step has returned that makes these communicators, and is about communicators with these handles.
pub(super) fn finish(
    call: Call,
    status: Status,
    in_call: InCall<'static>,
    makings: &[u64],
    handles: &[usize],
) {
    match status {
        SUCCESS => communicators::made(call, makings),
        IN_PROGRESS => {
            let in_call = Arc::new(in_call);
            communicators::wait_for(makings, &in_call);
            communicators::keep(&in_call, handles);
        }
        _ => communicators::failed(makings),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;

    #[test]
    fn what_was_looked_up_is_kept_until_the_generation_changes() {
        let generation = AtomicU64::new(0);
        let mut recent = Recent::default();
        let mut look_ups = 0;
        let mut get = |key: usize| {
            let find = |key: &usize| {
                look_ups += 1;
                (*key < 100).then_some((*key, look_ups))
            };
            recent.get(&generation, key, find).copied()
        };
        assert_eq!([get(1), get(2), get(1)], [Some((1, 1)), Some((2, 2)), Some((1, 1))]);
        assert_eq!([get(100), get(100)], [None; 2], "what does not exist is looked up again");
        generation.fetch_add(1, Relaxed);
        assert_eq!(get(1), Some((1, 5)));
        // More than are kept: the one that was found first gives way.
        assert!((2..2 + CACHE).all(|key| get(key).is_some()));
        assert_eq!(get(1), Some((1, 6 + CACHE)));
        assert_eq!(get(1 + CACHE), Some((1 + CACHE, 5 + CACHE)));
    }

    #[test]
    fn the_state_of_a_thread_ends_with_it() {
        let entry = std::thread::spawn(|| {
            let member =
                ckpt_cut::Member { communicator: ckpt_cut::Name::of_unique_ids(b"threads"), index: 0 };
            let role = ckpt_cut::Role::Communicator { awaits: None, alias: None };
            let entry = ranks().clock.register(member, role);
            let known = (7, None);
            state().borrow_mut().entries.get(&GENERATION, known, |_| Some(Arc::clone(&entry)));
            ranks().clock.retire(&entry);
            entry
        });
        let entry = entry.join().expect("the thread");
        assert_eq!(Arc::strong_count(&entry), 1);
    }
}
