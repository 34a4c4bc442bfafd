//! Profilers: whether one is attached to the driver, which then refuses a checkpoint (NVIDIA in cuda-checkpoint issue 15).
//!
//! A library of CUPTI that is loaded is not attached: PyTorch always loads it. CUPTI is attached by a subscription or by
//! an activity that is enabled, and until cuptiFinalize (CUPTI documentation, "Dynamic Attach and Detach"). Driver 580.159
//! refuses even after that (seen on an H200), but another one may not. So they alone are an obstacle, and after that the
//! driver is asked.
//!
//! What is linked statically with CUPTI is not seen. Profilers that start a program have the driver load them
//! (`CUDA_INJECTION64_PATH`): those are recognised by the variable.

use std::collections::BTreeSet;
use std::ffi::CStr;
use std::sync::OnceLock;

use super::Parameters;
use crate::cuda::shared::Shared;
use crate::cuda::{changes, elf};
use crate::process;

/// `CUPTI_SUCCESS`.
pub(super) const SUCCESS: u32 = 0;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Attached {
    /// A subscriber, by its handle.
    Subscriber(usize),
    /// A kind of activity, in a context; 0: in all.
    Activity { context: usize, kind: u32 },
}

struct State {
    attached: BTreeSet<Attached>,
    /// CUPTI was attached, and was not detached since.
    is_there: bool,
    /// CUPTI was attached once.
    was_there: bool,
}

static STATE: Shared<State> =
    Shared::new(State { attached: BTreeSet::new(), is_there: false, was_there: false });

/// The library that a profiler has the driver load.
static INJECTED: OnceLock<String> = OnceLock::new();

/// Reads the environment: from the constructor only.
pub(in crate::cuda) fn activate() {
    let path = process::variable(b"CUDA_INJECTION64_PATH").and_then(|path| str::from_utf8(path).ok());
    if let Some(path) = path.filter(|path| !path.is_empty()) {
        // A copy: programs write their titles over the environment.
        let _ = INJECTED.set(path.to_owned());
    }
}

/// Records a call that has succeeded.
///
/// # Safety
/// The parameters are those of the call of this name.
pub(super) unsafe fn called(name: &CStr, parameters: &Parameters) {
    let mut state = STATE.lock();
    let [first, second, ..] = *parameters;
    // `CUpti_ActivityKind` is an enum: the upper half of its register is undefined.
    let activity = |context, kind: usize| Attached::Activity { context, kind: kind as u32 };
    match name.to_bytes() {
        b"cuptiSubscribe" | b"cuptiSubscribe_v2" => {
            // SAFETY: CUPTI has written the handle of the subscriber.
            let subscriber = unsafe { *(first as *const usize) };
            state.attached.insert(Attached::Subscriber(subscriber));
            state.is_there = true;
        }
        b"cuptiUnsubscribe" => _ = state.attached.remove(&Attached::Subscriber(first)),
        b"cuptiActivityEnable" | b"cuptiActivityEnableAndDump" => {
            state.attached.insert(activity(0, first));
            state.is_there = true;
        }
        b"cuptiActivityEnableContext" => {
            state.attached.insert(activity(first, second));
            state.is_there = true;
        }
        b"cuptiActivityDisable" => {
            let ended = first as u32;
            state.attached.retain(|one| !matches!(one, Attached::Activity { kind, .. } if *kind == ended));
        }
        b"cuptiActivityDisableContext" => _ = state.attached.remove(&activity(first, second)),
        _ => (state.attached, state.is_there) = (BTreeSet::new(), false),
    }
    state.was_there |= state.is_there;
    drop(state);
    changes::note();
}

/// The reason why the process cannot be saved, if it is a profiler.
pub(in crate::cuda) fn obstacle() -> Option<String> {
    const CHANGE: &str = "the driver refuses checkpoints meanwhile, and driver 580 even afterwards; run the program without the profiler";
    if let Some(path) = INJECTED.get().filter(|path| elf::is_loaded(path)) {
        return Some(format!("the profiler {path} is in the process (CUDA_INJECTION64_PATH): {CHANGE}"));
    }
    let what = match STATE.lock().attached.first()? {
        Attached::Subscriber(_) => "cuptiSubscribe",
        Attached::Activity { .. } => "cuptiActivityEnable",
    };
    Some(format!("a profiler is attached by CUPTI ({what}): {CHANGE}"))
}

/// What may help if the driver does not support a checkpoint; empty if CUPTI has nothing to do with that.
pub(in crate::cuda) fn hint() -> &'static str {
    let state = STATE.lock();
    if state.is_there {
        "; CUPTI has been attached and not been detached: cuptiFinalize does that (TEARDOWN_CUPTI=1 for PyTorch's profiler). Driver 580 \
         refuses even after that"
    } else if state.was_there {
        "; a profiler has been attached by CUPTI, and driver 580 saves no process after that: run the program without it"
    } else {
        ""
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(name: &CStr, first: usize, second: usize) {
        // SAFETY: the first parameter of a subscription is a local variable.
        unsafe { called(name, &[first, second, 0, 0, 0, 0]) };
    }

    #[test]
    fn a_profiler_is_an_obstacle_while_it_is_attached() {
        assert_eq!((obstacle(), hint()), (None, ""));
        let subscriber = 7_usize;
        call(c"cuptiSubscribe", (&raw const subscriber).addr(), 0);
        call(c"cuptiActivityEnable", 3 | 1 << 40, 0);
        call(c"cuptiActivityEnableContext", 99, 3);
        assert!(obstacle().is_some_and(|reason| reason.contains("cuptiSubscribe")));
        call(c"cuptiUnsubscribe", 7, 0);
        assert!(obstacle().is_some_and(|reason| reason.contains("cuptiActivityEnable")));
        call(c"cuptiActivityDisable", 3, 0);
        assert_eq!(obstacle(), None);
        assert!(hint().contains("cuptiFinalize"));
        let before = changes::count();
        call(c"cuptiFinalize", 0, 0);
        assert_eq!(obstacle(), None);
        assert!(hint().contains("driver 580"));
        assert_ne!(changes::count(), before);
    }
}
