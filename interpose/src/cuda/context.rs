//! The program's contexts, and a context to work in on each device.
//!
//! ```text
//!            Create, Attach, primary retained, met as a thread's own
//!   unknown ---------------------------------------------------------> live
//!                                                                       |
//!   Destroy, the last Detach, the primary context is inactive: `gone`, and forgotten
//! ```
//!
//! A context that was created in another way (NVIDIA's runtime has private tables) is recorded when it is found to be
//! current on a thread. Green contexts are parts of their device's primary context, which owns their memory and
//! streams.
//!
//! Modules above this one register what they do when a context is removed ([`on_removal`]).

use std::ffi::{c_int, c_uint};
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use cuda_abi::sys::{CUctxCreateParams, CUdevResourceDesc, CUexecAffinityParam, CUgreenCtx};
use cuda_abi::types::{CUcontext, CUdevice, CUresult};

use super::handler::handlers;
use super::{changes, driver};
use crate::cuda::activation::is_started;
use crate::cuda::result::SUCCESS;
use crate::cuda::shared::Shared;

#[derive(Clone, Copy, PartialEq, Eq)]
enum ContextKind {
    Primary,
    /// Made by the program, with its count of uses (cuCtxAttach, cuCtxDetach).
    Own {
        uses: u64,
    },
    /// Stands for a green context.
    Green {
        green: usize,
    },
}

/// As the program makes one.
const MADE: ContextKind = ContextKind::Own { uses: 1 };

struct KnownContext {
    context: usize,
    device: c_int,
    kind: ContextKind,
}

struct Contexts {
    known: Vec<KnownContext>,
    /// Green contexts and their devices.
    green: Vec<(usize, c_int)>,
}

static CONTEXTS: Shared<Contexts> = Shared::new(Contexts { known: Vec::new(), green: Vec::new() });

/// What other modules do when a context is removed.
pub(crate) struct OnRemoval {
    /// The memory and the objects of a context are gone.
    pub contents_removed: fn(CUcontext),
    /// The code that this library has loaded into a context was unloaded.
    pub code_removed: fn(CUcontext),
}

static ON_REMOVAL: OnceLock<OnRemoval> = OnceLock::new();

/// See [`removals`].
static REMOVALS: AtomicU64 = AtomicU64::new(0);

/// How many contexts have lost what was in them so far, such as pinned memory: they were destroyed or reset.
pub(crate) fn removals() -> u64 {
    REMOVALS.load(SeqCst)
}

/// Registers what other modules do when a context is removed; the first registration stays.
pub(crate) fn on_removal(callbacks: OnRemoval) {
    let _ = ON_REMOVAL.set(callbacks);
}

impl Contexts {
    fn find(&mut self, context: usize) -> Option<&mut KnownContext> {
        self.known.iter_mut().find(|known| known.context == context)
    }

    fn primary_of(&self, device: c_int) -> Option<usize> {
        let is_it = |known: &&KnownContext| known.kind == ContextKind::Primary && known.device == device;
        self.known.iter().find(is_it).map(|known| known.context)
    }

    fn forget(&mut self, context: usize) {
        self.known.retain(|known| known.context != context);
    }
}

/// The calling thread's context and its device; `None` without one. In a green context it is the primary one of the
/// device, to which everything belongs that is made there.
pub(crate) fn current() -> Option<(CUcontext, c_int)> {
    // SAFETY: the call writes to a local variable.
    let context = driver::ask(null_mut(), |context| unsafe { driver::cuCtxGetCurrent(context) }).ok()?;
    if context.is_null() {
        return None;
    }
    let known = CONTEXTS.lock().find(context as usize).map(|known| (known.device, known.kind));
    if let Some((device, kind)) = known {
        let is_part = matches!(kind, ContextKind::Green { .. });
        let whole = is_part.then(|| CONTEXTS.lock().primary_of(device)).flatten();
        return Some((whole.map_or(context, |primary| primary as CUcontext), device));
    }
    // SAFETY: as above.
    let device = driver::ask(0, |device| unsafe { driver::cuCtxGetDevice(device) }).ok()?;
    let is_primary = ask_for_primary(device) == Some(context as usize);
    note(context, device, if is_primary { ContextKind::Primary } else { MADE });
    Some((context, device))
}

/// Runs `work` in a context, on any thread; the thread's own context is current again afterwards.
///
/// # Errors
/// The driver's, if the context is not one.
pub(crate) fn within<T>(context: CUcontext, work: impl FnOnce() -> T) -> Result<T, CUresult> {
    // SAFETY: a context that was destroyed only gives an error.
    driver::checked(unsafe { driver::cuCtxPushCurrent_v2(context) })?;
    let done = work();
    let mut popped: CUcontext = null_mut();
    // SAFETY: `popped` is a local variable. The context was pushed above, so there is one to pop.
    let _ = unsafe { driver::cuCtxPopCurrent_v2(&raw mut popped) };
    Ok(done)
}

/// The program's contexts and their devices; what is done in one waits for its green parts too.
pub(crate) fn all() -> Vec<(CUcontext, c_int)> {
    let contexts = CONTEXTS.lock();
    let whole = contexts.known.iter().filter(|known| !matches!(known.kind, ContextKind::Green { .. }));
    whole.map(|known| (known.context as CUcontext, known.device)).collect()
}

/// The devices that the program has contexts on.
pub(crate) fn devices() -> Vec<c_int> {
    let mut devices: Vec<c_int> = all().into_iter().map(|(_, device)| device).collect();
    devices.sort_unstable();
    devices.dedup();
    devices
}

/// A context of a device to work in, until it is dropped.
pub(crate) struct OnDevice {
    pub context: CUcontext,
    /// The device, if its primary context was retained for this.
    retained: Option<c_int>,
}

impl OnDevice {
    /// Whether it is one of the program's, which this does not keep alive.
    pub fn is_of_program(&self) -> bool {
        self.retained.is_none()
    }
}

impl Drop for OnDevice {
    fn drop(&mut self) {
        if let Some(device) = self.retained {
            give_back_primary(device);
            if !is_primary_active(device)
                && let Some(callbacks) = ON_REMOVAL.get()
            {
                (callbacks.code_removed)(self.context);
            }
        }
    }
}

/// A context of a device: one of the program's if there is one, else the primary one for the time being. `None` if
/// the device gives none.
pub(crate) fn on_device(device: c_int) -> Option<OnDevice> {
    // The oldest one first: it is the most likely to stay.
    let of_program = all().into_iter().filter(|(_, of)| *of == device).map(|(context, _)| context);
    // A context may have been destroyed by a call that we do not see.
    let live = of_program.into_iter().find(|context| within(*context, || ()).is_ok());
    if let Some(context) = live {
        return Some(OnDevice { context, retained: None });
    }
    let context = retain_primary(device)?;
    Some(OnDevice { context, retained: Some(device) })
}

/// A context for a process that has initialised the driver and has none, such as one that only counts its devices: the
/// driver's lock fails in it ("initialization error", llm-d-rl-time-slicing issue 148). `None` if it has one.
///
/// # Errors
/// No device has room for a context now.
pub(crate) fn for_lock() -> Result<Option<OnDevice>, NoRoom> {
    // SAFETY: the call writes to a local variable.
    let count = driver::ask(0, |count| unsafe { driver::cuDeviceGetCount(count) }).unwrap_or(0);
    let has_context = !all().is_empty() || (0..count).any(is_primary_active);
    if has_context || count == 0 {
        return Ok(None);
    }
    (0..count).find_map(on_device).map(Some).ok_or(NoRoom)
}

/// No device has room for a context.
#[derive(Debug)]
pub(crate) struct NoRoom;

fn retain_primary(device: c_int) -> Option<CUcontext> {
    // SAFETY: the call writes to a local variable.
    let retain = |context| unsafe { driver::cuDevicePrimaryCtxRetain(context, device) };
    driver::ask(null_mut(), retain).ok().filter(|context| !context.is_null())
}

fn give_back_primary(device: c_int) {
    // SAFETY: it was retained by ourselves.
    let _ = unsafe { driver::cuDevicePrimaryCtxRelease_v2(device) };
    // The program may have released it meanwhile.
    primary_given_back(device);
}

/// Whether a device's primary context exists; true if the driver does not answer.
fn is_primary_active(device: c_int) -> bool {
    let (mut flags, mut is_active): (c_uint, c_int) = (0, 0);
    // SAFETY: both are local variables.
    let result = unsafe { driver::cuDevicePrimaryCtxGetState(device, &raw mut flags, &raw mut is_active) };
    result != SUCCESS || is_active != 0
}

/// A device's primary context, if it is there.
fn ask_for_primary(device: c_int) -> Option<usize> {
    if !is_primary_active(device) {
        return None;
    }
    let context = retain_primary(device)?;
    give_back_primary(device);
    Some(context as usize)
}

fn note(context: CUcontext, device: c_int, kind: ContextKind) {
    if !is_started() || context.is_null() {
        return;
    }
    let mut contexts = CONTEXTS.lock();
    let context = context as usize;
    match contexts.find(context) {
        Some(known) => (known.device, known.kind) = (device, kind),
        None => contexts.known.push(KnownContext { context, device, kind }),
    }
}

/// A context was removed, with everything in it.
fn removed(context: usize) {
    CONTEXTS.lock().forget(context);
    changes::note();
    contents_removed(context);
}

/// The contents of a context were removed.
pub(super) fn contents_removed(context: usize) {
    REMOVALS.fetch_add(1, SeqCst);
    if let Some(callbacks) = ON_REMOVAL.get() {
        (callbacks.contents_removed)(context as CUcontext);
    }
}

/// A device's primary context was released.
fn primary_given_back(device: c_int) {
    let Some(context) = CONTEXTS.lock().primary_of(device) else { return };
    if !is_primary_active(device) {
        removed(context);
    }
}

/// # Safety
/// `out` is what the driver has written, if the call succeeded, or NULL.
unsafe fn noted(result: CUresult, out: *mut CUcontext, device: c_int, kind: ContextKind) -> CUresult {
    if result == SUCCESS && !out.is_null() {
        // SAFETY: the driver has written it.
        note(unsafe { *out }, device, kind);
        changes::note();
    }
    result
}

handlers! {
    fn cuCtxCreate_v2(out: *mut CUcontext, flags: c_uint, device: CUdevice) |call| {
        // SAFETY: the caller's out parameter.
        unsafe { noted(call(), out, device, MADE) }
    }

    fn cuCtxCreate_v3(
        out: *mut CUcontext, parameters: *mut CUexecAffinityParam, count: c_int, flags: c_uint,
        device: CUdevice
    ) |call| {
        // SAFETY: the caller's out parameter.
        unsafe { noted(call(), out, device, MADE) }
    }

    fn cuCtxCreate_v4(
        out: *mut CUcontext, parameters: *mut CUctxCreateParams, flags: c_uint, device: CUdevice
    ) |call| {
        // SAFETY: the caller's out parameter.
        unsafe { noted(call(), out, device, MADE) }
    }

    fn cuCtxDestroy_v2(context: CUcontext) |call| {
        let result = call();
        if result == SUCCESS && is_started() {
            removed(context as usize);
        }
        result
    }

    fn cuCtxAttach(out: *mut CUcontext, flags: c_uint) |call| {
        let result = call();
        // What is attached to is the thread's own: here it is noted if it was not yet.
        if result == SUCCESS
            && is_started()
            && let Some((context, _)) = current()
            && let Some(KnownContext { kind: ContextKind::Own { uses }, .. }) =
                CONTEXTS.lock().find(context as usize)
        {
            *uses += 1;
        }
        result
    }

    fn cuCtxDetach(context: CUcontext) |call| {
        let result = call();
        if result == SUCCESS && is_started() {
            let mut contexts = CONTEXTS.lock();
            if let Some(KnownContext { kind: ContextKind::Own { uses }, .. }) =
                contexts.find(context as usize)
            {
                *uses = uses.saturating_sub(1);
                if *uses == 0 {
                    drop(contexts);
                    removed(context as usize);
                }
            }
        }
        result
    }

    fn cuDevicePrimaryCtxRetain(out: *mut CUcontext, device: CUdevice) |call| {
        // SAFETY: the caller's out parameter.
        unsafe { noted(call(), out, device, ContextKind::Primary) }
    }

    fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) |call| {
        let result = call();
        if result == SUCCESS && is_started() {
            primary_given_back(device);
        }
        result
    }

    /// What is in the context goes; the context itself stays as long as it is retained (CUDA driver API reference,
    /// cuDevicePrimaryCtxReset).
    fn cuDevicePrimaryCtxReset_v2(device: CUdevice) |call| {
        let result = call();
        let primary =
            (result == SUCCESS && is_started()).then(|| CONTEXTS.lock().primary_of(device)).flatten();
        if let Some(context) = primary {
            contents_removed(context);
            primary_given_back(device);
        }
        result
    }

    fn cuGreenCtxCreate(
        out: *mut CUgreenCtx, resources: CUdevResourceDesc, device: CUdevice, flags: c_uint
    ) |call| {
        let result = call();
        if result == SUCCESS && is_started() && !out.is_null() {
            // SAFETY: the driver has written it.
            let green = unsafe { *out } as usize;
            CONTEXTS.lock().green.push((green, device));
            // It has retained the primary context, which may not be recorded yet.
            if let Some(primary) = ask_for_primary(device) {
                note(primary as CUcontext, device, ContextKind::Primary);
            }
        }
        result
    }

    fn cuCtxFromGreenCtx(out: *mut CUcontext, green: CUgreenCtx) |call| {
        let result = call();
        let green = green as usize;
        let device =
            CONTEXTS.lock().green.iter().find(|(known, _)| *known == green).map(|(_, device)| *device);
        match device {
            // SAFETY: the caller's out parameter.
            Some(device) => unsafe { noted(result, out, device, ContextKind::Green { green }) },
            None => result,
        }
    }

    /// Memory and streams that were made in it stay (CUDA driver API reference, cuGreenCtxDestroy).
    fn cuGreenCtxDestroy(green: CUgreenCtx) |call| {
        let result = call();
        if result != SUCCESS || !is_started() {
            return result;
        }
        let green = green as usize;
        let mut contexts = CONTEXTS.lock();
        contexts.known.retain(|known| known.kind != ContextKind::Green { green });
        let place = contexts.green.iter().position(|(known, _)| *known == green);
        let device = place.map(|place| contexts.green.swap_remove(place).1);
        drop(contexts);
        // It has given the primary context back.
        device.into_iter().for_each(primary_given_back);
        result
    }
}
