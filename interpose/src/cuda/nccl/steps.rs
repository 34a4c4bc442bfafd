//! Counts calls: each is a step of the consistent cut, and waits in front of NCCL where it has to park.

use std::cell::RefCell;
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::Ordering::Acquire;

use ckpt_cut::rank::{Entry, InCall, Thread};
use cuda_abi::types::CUstream;

use super::{
    Call, Communicator, GENERATION, IN_PROGRESS, SUCCESS, Status, calls, communicators, graphs, ranks,
};

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

/// What a thread has looked up: a communicator, or what it sends to a peer or receives from it.
struct Known {
    handle: usize,
    peer: Option<(c_int, bool)>,
    entry: Arc<Entry>,
}

/// More than a thread usually has in turn.
const CACHE: usize = 16;

/// The entries that a thread has used last.
#[derive(Default)]
pub(super) struct Cache {
    known: Vec<Known>,
    next: usize,
    generation: u64,
}

impl Cache {
    /// The entry of a communicator, or of one of its pairs.
    #[inline]
    fn entry(&mut self, of: Communicator, peer: Option<(c_int, bool)>) -> Option<&Arc<Entry>> {
        let generation = GENERATION.load(Acquire);
        if self.generation != generation {
            self.known.clear();
            (self.generation, self.next) = (generation, 0);
        }
        let is_it = |known: &Known| known.handle == of as usize && known.peer == peer;
        let place = match self.known.iter().position(is_it) {
            Some(place) => place,
            None => self.find(of, peer)?,
        };
        Some(&self.known[place].entry)
    }

    #[cold]
    fn find(&mut self, of: Communicator, peer: Option<(c_int, bool)>) -> Option<usize> {
        let whole = communicators::entry(of)?;
        let entry = match peer {
            Some((peer, sends)) => ranks().clock.pair(&whole, u32::try_from(peer).ok()?, sends),
            None => whole,
        };
        let known = Known { handle: of as usize, peer, entry };
        let place = self.next;
        self.next = (place + 1) % CACHE;
        match self.known.get_mut(place) {
            Some(old) => *old = known,
            None => self.known.push(known),
        }
        Some(place)
    }
}

/// What a thread is in the middle of.
#[derive(Default)]
pub(super) struct State {
    /// The calls, of whatever copy of NCCL: one may be built on another.
    calls: Thread,
    cache: Cache,
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
    pub fn has(&mut self, entries: &[&Arc<Entry>], of: Communicator) -> bool {
        let is_open = !entries.is_empty() && entries.iter().all(|entry| self.counts.add_to_group(entry, 1));
        if is_open {
            self.add(of);
        }
        is_open
    }

    fn add(&mut self, of: Communicator) {
        if !of.is_null() && !self.handles.contains(&(of as usize)) {
            self.handles.push(of as usize);
        }
    }

    pub fn make(&mut self, makings: &[u64]) {
        self.makings.extend_from_slice(makings);
    }
}

thread_local! {
    static STATE: RefCell<State> = RefCell::default();
}

/// A call that the thread is in.
pub(super) struct Entered {
    pub begun: Begun,
    is_noted: bool,
}

impl Drop for Entered {
    #[inline]
    fn drop(&mut self) {
        if self.is_noted {
            let _ = STATE.try_with(|state| state.borrow_mut().calls.leave());
        }
    }
}

/// Begins a call, which waits here if it has to park.
#[inline]
pub(super) fn enter(call: Call, begin: impl FnOnce(&mut State) -> Begun) -> Entered {
    let mut begin = Some(begin);
    let mut of_thread = |state: &RefCell<State>| {
        // A signal handler may come in between, and is not counted.
        let mut state = state.try_borrow_mut().ok()?;
        let passes = state.calls.enter() || call.target.is_nccls;
        let begun = if passes { Begun::Passes } else { begin.take()?(&mut state) };
        Some(Entered { begun, is_noted: true })
    };
    match STATE.try_with(&mut of_thread) {
        Ok(entered) => entered.unwrap_or(Entered { begun: Begun::Passes, is_noted: false }),
        // The thread ends: it has no group any more.
        Err(_) => {
            let begun = begin.take().map_or(Begun::Passes, |begin| begin(&mut State::default()));
            Entered { begun, is_noted: false }
        }
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
    let mut entered = enter(call, |State { cache, groups, .. }| {
        // NCCL refuses a communicator that is none.
        let Some(entry) = cache.entry(of, peer) else { return Begun::Passes };
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
    let (mut handles, mut makings) = (Vec::new(), Vec::new());
    let mut entered = enter(call, |state| {
        let group = state.group(call);
        let Some(counts) = group.counts.end_group() else { return Begun::InGroup };
        (handles, makings) = (std::mem::take(&mut group.handles), std::mem::take(&mut group.makings));
        if counts.is_empty() {
            return Begun::InGroup;
        }
        let in_call = ranks().clock.begin(counts.step(), call.index);
        counts.clear();
        Begun::Alone(in_call)
    });
    let status = real();
    if let Begun::Alone(in_call) = std::mem::replace(&mut entered.begun, Begun::Passes) {
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
