//! Contexts: primary and user contexts, each thread's stack of them, and their errors that stay.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use cuda_abi::sys::{self, CUresult};
use cuda_abi::types::{CUcontext, CUdevice, CUfunc_cache, CUsharedconfig};
use parking_lot::Mutex;

use crate::device::Device;
use crate::error::{Error, Result, write_both, write_if_wanted, write_out};
use crate::handle::{self, Table};
use crate::{memory, module, process, stream};

/// A context: every object that a program creates belongs to a context and is destroyed with it.
pub(crate) struct Context {
    pub(crate) handle: usize,
    /// Unlike handles, never the same twice (cuCtxGetId).
    id: u64,
    pub(crate) device: &'static Device,
    primary: bool,
    flags: AtomicU32,
    api_version: u32,
    destroyed: AtomicBool,
    /// The sticky error of the context; 0 while there is none.
    error: AtomicU32,
    limits: Mutex<[usize; LIMITS]>,
    cache_config: AtomicU32,
    shared_config: AtomicU32,
    /// Default streams and what orders work between the context's streams.
    pub(crate) streams: stream::PerContext,
}

const LIMITS: usize = sys::CUlimit::CU_LIMIT_MAX as usize;
static CONTEXTS: Table<Context> = Table::new();
/// The error of every context, once the device is lost; 0 before.
static LOST: AtomicU32 = AtomicU32::new(0);
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

thread_local! {
    static STACK: RefCell<Vec<Option<Arc<Context>>>> = const { RefCell::new(Vec::new()) };
}

/// One device's primary context: its handle is the same each time that it is retained.
pub(crate) struct Primary {
    handle: usize,
    /// Of the context, now and when it is made again.
    flags: AtomicU32,
    /// Held until the context is destroyed, so that the next one of its handle begins after it. A host function
    /// that is waited for meanwhile must not need it.
    state: Mutex<PrimaryState>,
}

struct PrimaryState {
    retained: u32,
    context: Option<Arc<Context>>,
}

impl Primary {
    pub(crate) fn new() -> Self {
        let state = PrimaryState { retained: 0, context: None };
        Self { handle: handle::fresh(), flags: AtomicU32::new(0), state: Mutex::new(state) }
    }

    /// A fresh context under the handle.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` if the device has no room for it.
    fn make(&self, device: &'static Device) -> Result<Arc<Context>> {
        take_place(self.handle, device)?;
        let flags = self.flags.load(Ordering::Relaxed);
        let context = Arc::new(Context::new(self.handle, device, true, flags, 3020));
        CONTEXTS.insert(self.handle, Arc::clone(&context));
        Ok(context)
    }

    /// The context, if it is there.
    fn active(&self) -> Option<Arc<Context>> {
        CONTEXTS.get(self.handle).filter(|context| !context.is_destroyed())
    }
}

impl Context {
    fn new(handle: usize, device: &'static Device, primary: bool, flags: u32, api_version: u32) -> Self {
        Self {
            handle,
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            device,
            primary,
            flags: AtomicU32::new(flags),
            api_version,
            destroyed: AtomicBool::new(false),
            error: AtomicU32::new(LOST.load(Ordering::Acquire)),
            limits: Mutex::new(default_limits()),
            cache_config: AtomicU32::new(0),
            shared_config: AtomicU32::new(0),
            streams: stream::PerContext::new(),
        }
    }

    /// Spoils the context: every later call that needs it fails with the same error. The first error stays.
    pub(crate) fn fail(&self, error: Error) {
        let _ = self.error.compare_exchange(0, error as u32, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Whether the context can still be used.
    ///
    /// # Errors
    /// `CUDA_ERROR_CONTEXT_IS_DESTROYED`, or its sticky error.
    pub(crate) fn check(&self) -> Result {
        if self.destroyed.load(Ordering::Acquire) {
            return Err(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED);
        }
        match self.error.load(Ordering::Acquire) {
            0 => Ok(()),
            code => Err(error_of(code)),
        }
    }

    /// Whether waiters for the context's work spin (`CU_CTX_SCHED_SPIN`). Left to itself a real driver mostly
    /// does so too; here the processor is needed for the work.
    pub(crate) fn is_spinning(&self) -> bool {
        let schedule = self.flags.load(Ordering::Relaxed) & sys::CUctx_flags::CU_CTX_SCHED_MASK as u32;
        schedule == sys::CUctx_flags::CU_CTX_SCHED_SPIN as u32
    }

    pub(crate) fn is_destroyed(&self) -> bool {
        self.destroyed.load(Ordering::Acquire)
    }
}

fn default_limits() -> [usize; LIMITS] {
    let mut limits = [0; LIMITS];
    limits[sys::CUlimit::CU_LIMIT_STACK_SIZE as usize] = 1024;
    limits[sys::CUlimit::CU_LIMIT_PRINTF_FIFO_SIZE as usize] = 1 << 20;
    limits[sys::CUlimit::CU_LIMIT_MALLOC_HEAP_SIZE as usize] = 8 << 20;
    limits[sys::CUlimit::CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH as usize] = 2;
    limits[sys::CUlimit::CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT as usize] = 2048;
    limits[sys::CUlimit::CU_LIMIT_MAX_L2_FETCH_GRANULARITY as usize] = 64;
    limits
}

/// The calling thread's current context.
///
/// # Errors
/// `CUDA_ERROR_INVALID_CONTEXT` if there is none, else as [`Context::check`].
pub(crate) fn current() -> Result<Arc<Context>> {
    process::machine()?;
    let context = top().ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
    context.check()?;
    Ok(context)
}

/// The calling thread's current context, whatever state it is in.
pub(crate) fn top() -> Option<Arc<Context>> {
    let top = STACK.with_borrow(|stack| stack.last().cloned().flatten())?;
    if top.is_destroyed() {
        // A primary context that was retained again, or reset, lives on under the same handle.
        return Some(CONTEXTS.get(top.handle).unwrap_or(top));
    }
    Some(top)
}

/// The live context of a handle.
///
/// # Errors
/// `CUDA_ERROR_INVALID_CONTEXT` for an invalid or destroyed handle.
pub(crate) fn by_handle(handle: CUcontext) -> Result<Arc<Context>> {
    process::machine()?;
    let context = CONTEXTS.get(handle as usize).filter(|context| !context.is_destroyed());
    context.ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)
}

/// All contexts, in the order of their creation; also one that is being destroyed, as long as it has work.
pub(crate) fn all() -> Vec<Arc<Context>> {
    CONTEXTS.all()
}

/// The device is lost: every context is unusable, and no new one can be created.
pub(crate) fn lose_all(error: Error) {
    LOST.store(error as u32, Ordering::Release);
    for context in all() {
        context.fail(error);
    }
}

/// # Errors
/// The error of the device's loss.
fn check_device() -> Result {
    match LOST.load(Ordering::Acquire) {
        0 => Ok(()),
        code => Err(error_of(code)),
    }
}

fn error_of(code: u32) -> Error {
    crate::proc_address::error_by_code(code).unwrap_or(CUresult::CUDA_ERROR_UNKNOWN)
}

/// # Errors
/// `CUDA_ERROR_INVALID_CONTEXT` if another thread was faster.
fn destroy(context: &Arc<Context>) -> Result {
    // Before its work is waited for: what is queued is dropped, and kernels and waits that might never end are
    // given up.
    if context.destroyed.swap(true, Ordering::AcqRel) {
        return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
    }
    stream::finish_context(context);
    CONTEXTS.remove(context.handle);
    module::context_destroyed(context);
    memory::context_destroyed(context);
    stream::context_destroyed(context);
    Ok(())
}

// ---- user contexts ----

fn create(flags: u32, ordinal: CUdevice, api_version: u32) -> Result<Arc<Context>> {
    let device = process::device(ordinal)?;
    check_flags(flags)?;
    check_device()?;
    let context = CONTEXTS.insert_with(|handle| Context::new(handle, device, false, flags, api_version));
    take_place(context.handle, device).inspect_err(|_| drop(CONTEXTS.remove(context.handle)))?;
    STACK.with_borrow_mut(|stack| stack.push(Some(Arc::clone(&context))));
    Ok(context)
}

/// Takes what a context takes: memory of the device, and time.
fn take_place(context: usize, device: &Device) -> Result {
    let config = &process::machine()?.config;
    memory::context_created(context, device.ordinal, config.context_bytes)?;
    std::thread::sleep(config.context_time);
    Ok(())
}

fn check_flags(flags: u32) -> Result {
    let schedule = flags & sys::CUctx_flags::CU_CTX_SCHED_MASK as u32;
    if flags & !(sys::CUctx_flags::CU_CTX_FLAGS_MASK as u32) != 0 || !matches!(schedule, 0 | 1 | 2 | 4) {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    Ok(())
}

pub(crate) unsafe fn cuCtxCreate_v2(out: *mut CUcontext, flags: u32, ordinal: CUdevice) -> Result {
    process::machine()?;
    if out.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let context = create(flags, ordinal, 3020)?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, context.handle as CUcontext) }
}

pub(crate) unsafe fn cuCtxCreate_v3(
    out: *mut CUcontext,
    affinity: *mut sys::CUexecAffinityParam,
    affinities: i32,
    flags: u32,
    ordinal: CUdevice,
) -> Result {
    if !affinity.is_null() || affinities != 0 {
        // Needs an MPS server (CUDA driver API reference, cuCtxCreate_v3).
        return Err(CUresult::CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY);
    }
    // SAFETY: `out` is the caller's out parameter.
    unsafe { cuCtxCreate_v2(out, flags, ordinal) }
}

pub(crate) unsafe fn cuCtxCreate_v4(
    out: *mut CUcontext,
    params: *mut sys::CUctxCreateParams,
    flags: u32,
    ordinal: CUdevice,
) -> Result {
    // SAFETY: `params` is NULL or the caller's structure.
    if let Some(params) = unsafe { params.as_ref() }
        && (!params.execAffinityParams.is_null() || !params.cigParams.is_null())
    {
        return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    }
    // SAFETY: `out` is the caller's out parameter.
    unsafe { cuCtxCreate_v2(out, flags, ordinal) }
}

pub(crate) unsafe fn cuCtxDestroy_v2(handle: CUcontext) -> Result {
    let context = by_handle(handle)?;
    if context.primary {
        return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
    }
    destroy(&context)?;
    STACK.with_borrow_mut(|stack| {
        if stack.last().is_some_and(|top| top.as_ref().is_some_and(|top| Arc::ptr_eq(top, &context))) {
            stack.pop();
        }
    });
    Ok(())
}

// ---- the thread's stack ----

pub(crate) unsafe fn cuCtxPushCurrent_v2(handle: CUcontext) -> Result {
    let context = by_handle(handle)?;
    STACK.with_borrow_mut(|stack| stack.push(Some(context)));
    Ok(())
}

pub(crate) unsafe fn cuCtxPopCurrent_v2(out: *mut CUcontext) -> Result {
    process::machine()?;
    let popped = STACK.with_borrow_mut(Vec::pop).ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
    // SAFETY: `out` is the caller's out parameter; NULL means that it is not wanted.
    unsafe { write_if_wanted(out, as_handle(popped.as_ref())) };
    Ok(())
}

pub(crate) unsafe fn cuCtxSetCurrent(handle: CUcontext) -> Result {
    process::machine()?;
    let context = if handle.is_null() { None } else { Some(by_handle(handle)?) };
    STACK.with_borrow_mut(|stack| {
        stack.pop();
        if context.is_some() {
            stack.push(context);
        }
    });
    Ok(())
}

pub(crate) unsafe fn cuCtxGetCurrent(out: *mut CUcontext) -> Result {
    process::machine()?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, as_handle(top().as_ref())) }
}

fn as_handle(context: Option<&Arc<Context>>) -> CUcontext {
    context.map_or(std::ptr::null_mut(), |context| context.handle as CUcontext)
}

pub(crate) unsafe fn cuCtxGetDevice(out: *mut CUdevice) -> Result {
    let context = current()?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, context.device.ordinal) }
}

pub(crate) unsafe fn cuCtxGetDevice_v2(out: *mut CUdevice, handle: CUcontext) -> Result {
    let context = given_or_current(handle)?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, context.device.ordinal) }
}

/// The context of a handle, or the current one for NULL.
///
/// # Errors
/// As [`by_handle`], [`current`] and [`Context::check`].
pub(crate) fn given_or_current(handle: CUcontext) -> Result<Arc<Context>> {
    if handle.is_null() {
        return current();
    }
    let context = by_handle(handle)?;
    context.check()?;
    Ok(context)
}

// ---- properties ----

pub(crate) unsafe fn cuCtxGetFlags(out: *mut u32) -> Result {
    let context = current()?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, context.flags.load(Ordering::Relaxed)) }
}

pub(crate) unsafe fn cuCtxSetFlags(flags: u32) -> Result {
    let context = current()?;
    check_flags(flags)?;
    context.flags.store(flags, Ordering::Relaxed);
    Ok(())
}

pub(crate) unsafe fn cuCtxGetId(handle: CUcontext, out: *mut u64) -> Result {
    let context = given_or_current(handle)?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, context.id) }
}

pub(crate) unsafe fn cuCtxGetApiVersion(handle: CUcontext, out: *mut u32) -> Result {
    let context = given_or_current(handle)?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, context.api_version) }
}

pub(crate) unsafe fn cuCtxSetLimit(limit: u32, value: usize) -> Result {
    let context = current()?;
    let mut limits = context.limits.lock();
    let slot = limits.get_mut(limit as usize).ok_or(CUresult::CUDA_ERROR_UNSUPPORTED_LIMIT)?;
    *slot = value;
    Ok(())
}

pub(crate) unsafe fn cuCtxGetLimit(out: *mut usize, limit: u32) -> Result {
    let context = current()?;
    let value = context.limits.lock().get(limit as usize).copied();
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, value.ok_or(CUresult::CUDA_ERROR_UNSUPPORTED_LIMIT)?) }
}

pub(crate) unsafe fn cuCtxSetCacheConfig(config: u32) -> Result {
    let context = current()?;
    if config > sys::CUfunc_cache::CU_FUNC_CACHE_PREFER_EQUAL as u32 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    context.cache_config.store(config, Ordering::Relaxed);
    Ok(())
}

pub(crate) unsafe fn cuCtxGetCacheConfig(out: *mut CUfunc_cache) -> Result {
    let context = current()?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, context.cache_config.load(Ordering::Relaxed)) }
}

pub(crate) unsafe fn cuCtxSetSharedMemConfig(config: u32) -> Result {
    let context = current()?;
    if config > sys::CUsharedconfig::CU_SHARED_MEM_CONFIG_EIGHT_BYTE_BANK_SIZE as u32 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    context.shared_config.store(config, Ordering::Relaxed);
    Ok(())
}

pub(crate) unsafe fn cuCtxGetSharedMemConfig(out: *mut CUsharedconfig) -> Result {
    let context = current()?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, context.shared_config.load(Ordering::Relaxed)) }
}

pub(crate) unsafe fn cuCtxResetPersistingL2Cache() -> Result {
    current().map(|_| ())
}

// ---- primary contexts ----

pub(crate) unsafe fn cuDevicePrimaryCtxRetain(out: *mut CUcontext, ordinal: CUdevice) -> Result {
    let device = process::device(ordinal)?;
    check_device()?;
    let primary = &device.primary;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, primary.handle as CUcontext) }?;
    let mut state = primary.state.lock();
    if state.context.is_none() {
        state.context = Some(primary.make(device)?);
    }
    state.retained += 1;
    Ok(())
}

pub(crate) unsafe fn cuDevicePrimaryCtxRelease_v2(ordinal: CUdevice) -> Result {
    let device = process::device(ordinal)?;
    let mut state = device.primary.state.lock();
    if state.retained == 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
    }
    state.retained -= 1;
    if state.retained == 0
        && let Some(context) = state.context.take()
    {
        destroy(&context)?;
    }
    Ok(())
}

pub(crate) unsafe fn cuDevicePrimaryCtxReset_v2(ordinal: CUdevice) -> Result {
    let device = process::device(ordinal)?;
    let mut state = device.primary.state.lock();
    if let Some(context) = state.context.take() {
        destroy(&context)?;
        // It stays retained: the handle then refers to an empty context (CUDA driver API reference).
        if state.retained > 0 {
            state.context = Some(device.primary.make(device)?);
        }
    }
    Ok(())
}

pub(crate) unsafe fn cuDevicePrimaryCtxSetFlags_v2(ordinal: CUdevice, flags: u32) -> Result {
    let device = process::device(ordinal)?;
    check_flags(flags)?;
    device.primary.flags.store(flags, Ordering::Relaxed);
    if let Some(context) = device.primary.active() {
        context.flags.store(flags, Ordering::Relaxed);
    }
    Ok(())
}

pub(crate) unsafe fn cuDevicePrimaryCtxGetState(
    ordinal: CUdevice,
    flags: *mut u32,
    active: *mut i32,
) -> Result {
    let primary = &process::device(ordinal)?.primary;
    let values = (primary.flags.load(Ordering::Relaxed), i32::from(primary.active().is_some()));
    // SAFETY: both are the caller's out parameters.
    unsafe { write_both(flags, active, values) }
}

#[cfg(test)]
mod tests {
    use std::ffi::c_void;
    use std::ptr::null_mut;

    use super::*;
    use crate::testing;
    use crate::transfer::testing::call;

    const INVALID: Result = Err(CUresult::CUDA_ERROR_INVALID_VALUE);

    fn primary_state(ordinal: i32) -> (u32, i32) {
        let (mut flags, mut active) = (99, 99);
        call!(cuDevicePrimaryCtxGetState(ordinal, &raw mut flags, &raw mut active)).unwrap();
        (flags, active)
    }

    #[test]
    fn a_call_that_fails_leaves_nothing_behind() {
        let name = "context::tests::a_call_that_fails_leaves_nothing_behind";
        if !testing::is_own_process(name, &[]) {
            return;
        }
        let context = testing::context();
        assert_eq!(call!(cuCtxCreate_v2(null_mut(), 0, 0)), INVALID);
        assert_eq!(call!(cuCtxCreate_v4(null_mut(), null_mut(), 0, 0)), INVALID);
        assert!(Arc::ptr_eq(&top().unwrap(), &context));
        assert_eq!(all().len(), 1);
        assert_eq!(call!(cuDevicePrimaryCtxRetain(null_mut(), 0)), INVALID);
        assert_eq!(primary_state(0), (0, 0));
        let mut flags = 7;
        assert_eq!(call!(cuDevicePrimaryCtxGetState(0, &raw mut flags, null_mut())), INVALID);
        assert_eq!(flags, 7);
        let mut bytes = 7;
        assert_eq!(call!(cuMemGetInfo_v2(&raw mut bytes, null_mut())), INVALID);
        assert_eq!(bytes, 7);
    }

    static BEGUN: AtomicBool = AtomicBool::new(false);

    unsafe extern "C" fn ask_for_state(answer: *mut c_void) {
        BEGUN.store(true, Ordering::Release);
        // The context counts as destroyed before its work is waited for.
        while primary_state(0).1 == 1 {
            std::thread::yield_now();
        }
        // SAFETY: the test's own, which waits for this function.
        unsafe { answer.cast::<i32>().write(0) };
    }

    #[test]
    fn a_host_function_may_ask_about_the_context_that_is_being_released() {
        let name = "context::tests::a_host_function_may_ask_about_the_context_that_is_being_released";
        if !testing::is_own_process(name, &[]) {
            return;
        }
        let _other = testing::context();
        let (mut context, mut active) = (null_mut(), 99);
        call!(cuDevicePrimaryCtxRetain(&raw mut context, 0)).unwrap();
        call!(cuCtxPushCurrent_v2(context)).unwrap();
        call!(cuLaunchHostFunc(null_mut(), Some(ask_for_state), (&raw mut active).cast())).unwrap();
        // What has not begun is dropped.
        while !BEGUN.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        call!(cuDevicePrimaryCtxRelease_v2(0)).unwrap();
        assert_eq!((primary_state(0), active), ((0, 0), 0));
        // What was retained again is another one under the same handle.
        let mut again = null_mut();
        call!(cuDevicePrimaryCtxRetain(&raw mut again, 0)).unwrap();
        assert_eq!(again, context);
        assert_eq!(primary_state(0), (0, 1));
        call!(cuCtxSynchronize()).unwrap();
    }
}
