//! Our own events, which show when a free has happened.

use std::collections::BTreeMap;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use cuda_abi::sys;
use cuda_abi::types::{CUcontext, CUevent, CUstream};

use crate::cuda::result::SUCCESS;
use crate::cuda::shared::Shared;
use crate::cuda::{context, driver};

const FLAGS: u32 = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;

/// The number of events that are kept for reuse in each context.
const KEPT: usize = 64;

static CACHE: Shared<Cache> = Shared::new(Cache { by_context: BTreeMap::new() });

struct Cache {
    by_context: BTreeMap<usize, Vec<Event>>,
}

/// An event of a context, which is destroyed with it. It must not be dropped under a lock, since that calls the
/// driver.
pub(super) struct Event {
    event: usize,
    context: usize,
    is_removed: AtomicBool,
}

impl Drop for Event {
    fn drop(&mut self) {
        if !self.is_removed.load(Relaxed) {
            // SAFETY: the event is ours, and not used elsewhere. There is nothing to do about a failure.
            let _ = unsafe { driver::cuEventDestroy_v2(self.event as CUevent) };
        }
    }
}

impl Event {
    fn create(context: CUcontext) -> Option<Self> {
        let make = || {
            // SAFETY: the call writes to a local variable.
            driver::ask(null_mut(), |event| unsafe { driver::cuEventCreate(event, FLAGS) }).ok()
        };
        // Entering the current context again costs more than comparing.
        let is_there = context::current().is_some_and(|(current, _)| current == context);
        let event = if is_there { make() } else { context::within(context, make).ok()? }?;
        Some(Self { event: event as usize, context: context as usize, is_removed: AtomicBool::new(false) })
    }

    /// Whether all work has run that was in the stream when the event was recorded.
    pub fn has_happened(&self) -> bool {
        // SAFETY: the event is there as long as its context.
        self.is_removed() || unsafe { driver::cuEventQuery(self.event as CUevent) } == SUCCESS
    }

    /// Waits until it has happened. Returns whether it has.
    pub fn wait(&self) -> bool {
        // SAFETY: as in `has_happened`.
        self.is_removed() || unsafe { driver::cuEventSynchronize(self.event as CUevent) } == SUCCESS
    }

    /// Lets later work of a stream wait for it. Returns whether it will.
    pub fn holds_back(&self, stream: CUstream) -> bool {
        // SAFETY: as in `has_happened`; the stream is the caller's caller's.
        self.is_removed() || unsafe { driver::cuStreamWaitEvent(stream, self.event as CUevent, 0) } == SUCCESS
    }

    pub fn is_of(&self, context: CUcontext) -> bool {
        self.context == context as usize
    }

    /// Its context was removed, with all work in it.
    pub fn removed_with_context(&self) {
        self.is_removed.store(true, Relaxed);
    }

    fn is_removed(&self) -> bool {
        self.is_removed.load(Relaxed)
    }
}

/// Records an event in a stream of a context; `None` if the driver refuses.
pub(super) fn record(stream: CUstream, context: CUcontext) -> Option<Event> {
    let kept = CACHE.lock().by_context.get_mut(&(context as usize)).and_then(Vec::pop);
    let event = match kept {
        Some(event) => event,
        None => Event::create(context)?,
    };
    // SAFETY: the event is ours and of the stream's context.
    let result = unsafe { driver::cuEventRecord(event.event as CUevent, stream) };
    (result == SUCCESS).then_some(event)
}

/// Keeps events that have happened for reuse.
pub(super) fn give_back(events: impl IntoIterator<Item = Arc<Event>>) {
    // Somebody may be about to wait for one: that one goes when they are done.
    for event in events.into_iter().filter_map(Arc::into_inner) {
        let mut surplus = None;
        let mut cache = CACHE.lock();
        let kept = cache.by_context.entry(event.context).or_default();
        if kept.len() < KEPT && !event.is_removed() {
            kept.push(event);
        } else {
            surplus = Some(event);
        }
        drop(cache);
        drop(surplus);
    }
}

/// A context was removed, and its events with it.
pub(super) fn context_removed(context: CUcontext) {
    let gone = CACHE.lock().by_context.remove(&(context as usize)).unwrap_or_default();
    gone.iter().for_each(Event::removed_with_context);
}
