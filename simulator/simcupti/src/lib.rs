//! A simulated `libcupti.so.13` (CUPTI): how profilers attach to the driver and detach. It records nothing.
//!
//! From the first subscription or enabled activity on, the simulated driver's lock is refused: CUPTI and the driver's
//! checkpoint exclude each other (cuda-checkpoint issue 15). `cuptiFinalize` ends what CUPTI does, but the lock is refused
//! after it, too: seen with driver 580.159.04, after PyTorch's profiler.

use std::collections::BTreeSet;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr::without_provenance_mut;

use parking_lot::Mutex;

// CUptiResult of cupti_result.h.
const OK: c_uint = 0;
const INVALID_PARAMETER: c_uint = 1;
const MULTIPLE_SUBSCRIBERS: c_uint = 39;

/// `CUpti_SubscriberHandle`.
type Subscriber = *mut c_void;
/// The handle of the only subscriber that there can be.
const SUBSCRIBER: usize = 0x2000;

struct State {
    was_attached: bool,
    is_subscribed: bool,
    /// Kinds of activities, each with its context; 0: all contexts.
    activities: BTreeSet<(usize, c_uint)>,
}

static STATE: Mutex<State> =
    Mutex::new(State { was_attached: false, is_subscribed: false, activities: BTreeSet::new() });

/// Makes the only subscriber.
///
/// # Safety
/// `out` is NULL or valid for a write.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuptiSubscribe(
    out: *mut Subscriber,
    _callback: *mut c_void,
    _data: *mut c_void,
) -> c_uint {
    let mut state = STATE.lock();
    if out.is_null() {
        return INVALID_PARAMETER;
    }
    if state.is_subscribed {
        return MULTIPLE_SUBSCRIBERS;
    }
    (state.was_attached, state.is_subscribed) = (true, true);
    // SAFETY: not NULL, and the caller vouches for the rest.
    unsafe { out.write(without_provenance_mut(SUBSCRIBER)) };
    OK
}

/// Ends the subscription; CUPTI stays attached.
#[unsafe(no_mangle)]
extern "C" fn cuptiUnsubscribe(subscriber: Subscriber) -> c_uint {
    let mut state = STATE.lock();
    if !state.is_subscribed || subscriber.addr() != SUBSCRIBER {
        return INVALID_PARAMETER;
    }
    state.is_subscribed = false;
    OK
}

fn enable(context: usize, kind: c_uint) -> c_uint {
    let mut state = STATE.lock();
    state.was_attached = true;
    state.activities.insert((context, kind));
    OK
}

/// Records a kind of activity from now on.
#[unsafe(no_mangle)]
extern "C" fn cuptiActivityEnable(kind: c_uint) -> c_uint {
    enable(0, kind)
}

/// The same in one context.
#[unsafe(no_mangle)]
extern "C" fn cuptiActivityEnableContext(context: *mut c_void, kind: c_uint) -> c_uint {
    enable(context.addr(), kind)
}

/// The kind of activity is no longer recorded; CUPTI stays attached.
#[unsafe(no_mangle)]
extern "C" fn cuptiActivityDisable(kind: c_uint) -> c_uint {
    STATE.lock().activities.retain(|(_, enabled)| *enabled != kind);
    OK
}

/// The same in one context.
#[unsafe(no_mangle)]
extern "C" fn cuptiActivityDisableContext(context: *mut c_void, kind: c_uint) -> c_uint {
    STATE.lock().activities.remove(&(context.addr(), kind));
    OK
}

/// Ends all that was begun.
#[unsafe(no_mangle)]
extern "C" fn cuptiFinalize() -> c_uint {
    let mut state = STATE.lock();
    (state.is_subscribed, state.activities) = (false, BTreeSet::new());
    OK
}

/// What the driver calls in the library of `CUDA_INJECTION64_PATH`, as profilers are made that start programs. Returns 1,
/// as injected libraries do.
#[unsafe(no_mangle)]
extern "C" fn InitializeInjection() -> c_int {
    let mut state = STATE.lock();
    (state.was_attached, state.is_subscribed) = (true, true);
    1
}

/// For the simulated driver's lock: whether CUPTI is attached.
#[unsafe(no_mangle)]
extern "C" fn simcupti_is_attached() -> c_int {
    c_int::from(STATE.lock().was_attached)
}
