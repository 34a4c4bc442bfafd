//! Events of our own, which tell when a free has happened.

use std::collections::BTreeMap;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cuda_abi::sys;
use cuda_abi::types::{CUcontext, CUevent, CUstream};

use crate::cuda::result::SUCCESS;
use crate::cuda::{context, driver};

const FLAGS: u32 = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;

/// So many events of a context are kept for later use.
const KEPT: usize = 64;

static CACHE: Mutex<Cache> = Mutex::new(Cache { by_context: BTreeMap::new() });

struct Cache {
    by_context: BTreeMap<usize, Vec<Event>>,
}

fn cache() -> MutexGuard<'static, Cache> {
    CACHE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An event of a context, which goes with it. Not to be dropped under a lock: that calls the driver.
pub(super) struct Event {
    event: usize,
    context: usize,
    is_gone: AtomicBool,
}

impl Drop for Event {
    fn drop(&mut self) {
        if !self.is_gone.load(Relaxed) {
            // SAFETY: the event is ours, and nobody else has it. There is nothing to do about a failure.
            let _ = unsafe { driver::cuEventDestroy_v2(self.event as CUevent) };
        }
    }
}

impl Event {
    fn create(context: CUcontext) -> Option<Self> {
        let make = || {
            let mut event: CUevent = null_mut();
            // SAFETY: `event` is a local variable.
            (unsafe { driver::cuEventCreate(&raw mut event, FLAGS) } == SUCCESS).then_some(event)
        };
        // Going into a context where one is already costs more than asking.
        let is_there = context::current().is_some_and(|(current, _)| current == context);
        let event = if is_there { make() } else { context::within(context, make).ok()? }?;
        Some(Self { event: event as usize, context: context as usize, is_gone: AtomicBool::new(false) })
    }

    /// Whether all work has run that was in the stream when the event was recorded.
    pub fn has_happened(&self) -> bool {
        // SAFETY: the event is there as long as its context.
        self.is_gone() || unsafe { driver::cuEventQuery(self.event as CUevent) } == SUCCESS
    }

    /// Waits until it has happened. Returns whether it has.
    pub fn wait(&self) -> bool {
        // SAFETY: as in `has_happened`.
        self.is_gone() || unsafe { driver::cuEventSynchronize(self.event as CUevent) } == SUCCESS
    }

    /// Lets later work of a stream wait for it. Returns whether it will.
    pub fn holds_back(&self, stream: CUstream) -> bool {
        // SAFETY: as in `has_happened`; the stream is the caller's caller's.
        self.is_gone() || unsafe { driver::cuStreamWaitEvent(stream, self.event as CUevent, 0) } == SUCCESS
    }

    pub fn is_of(&self, context: CUcontext) -> bool {
        self.context == context as usize
    }

    /// Its context is gone, and all work in it.
    pub fn goes_with_context(&self) {
        self.is_gone.store(true, Relaxed);
    }

    fn is_gone(&self) -> bool {
        self.is_gone.load(Relaxed)
    }
}

/// Records an event in a stream of a context; `None` if the driver refuses.
pub(super) fn record(stream: CUstream, context: CUcontext) -> Option<Event> {
    let kept = cache().by_context.get_mut(&(context as usize)).and_then(Vec::pop);
    let event = match kept {
        Some(event) => event,
        None => Event::create(context)?,
    };
    // SAFETY: the event is ours and of the stream's context.
    let result = unsafe { driver::cuEventRecord(event.event as CUevent, stream) };
    (result == SUCCESS).then_some(event)
}

/// Takes events back that have happened.
pub(super) fn give_back(events: impl IntoIterator<Item = Arc<Event>>) {
    // Somebody may be about to wait for one: that one goes when they are done.
    for event in events.into_iter().filter_map(Arc::into_inner) {
        let mut surplus = None;
        let mut cache = cache();
        let kept = cache.by_context.entry(event.context).or_default();
        if kept.len() < KEPT && !event.is_gone() {
            kept.push(event);
        } else {
            surplus = Some(event);
        }
        drop(cache);
        drop(surplus);
    }
}

/// A context is gone, and its events with it.
pub(super) fn context_removed(context: CUcontext) {
    let gone = cache().by_context.remove(&(context as usize)).unwrap_or_default();
    gone.iter().for_each(Event::goes_with_context);
}
