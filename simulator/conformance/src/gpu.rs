//! The driver under test, and the few things that nearly every check does with it.

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use cuda_abi::api::Api;
use cuda_abi::sys;
use cuda_abi::types::*;

use crate::check::{Result, expect_equal, skipped};
use crate::{cu, ok};

static API: OnceLock<(Api, PathBuf)> = OnceLock::new();

/// Opens the driver of this process.
pub fn load(path: &Path) -> anyhow::Result<()> {
    // SAFETY: the user named the library as a CUDA driver; its constructors may run and its
    // symbols have the driver's signatures.
    let api = unsafe { Api::load(path) }?;
    anyhow::ensure!(API.set((api, path.to_owned())).is_ok(), "a driver is already open");
    Ok(())
}

/// The driver of this process. Checks start only after [`load`].
pub fn api() -> &'static Api {
    &API.get().expect("main() opens the driver before any check starts").0
}

/// Where it lies.
pub fn path() -> &'static Path {
    &API.get().expect("main() opens the driver before any check starts").1
}

/// The driver's own name of a result code.
pub fn name_of(code: u32) -> String {
    let mut text: *const c_char = std::ptr::null();
    // SAFETY: `text` is a live variable.
    let known = unsafe { api().cuGetErrorName(code, &raw mut text) };
    if known != 0 || text.is_null() {
        return format!("result {code}");
    }
    // SAFETY: the driver gave a NUL-terminated text that lives as long as it does.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Initialises the driver and makes device 0's primary context current.
pub fn start() -> Result<CUcontext> {
    ok!(cuInit(0));
    let mut context = std::ptr::null_mut();
    ok!(cuDevicePrimaryCtxRetain(&raw mut context, 0));
    ok!(cuCtxSetCurrent(context));
    Ok(context)
}

/// A second device, or the check is skipped.
pub fn second_device() -> Result<CUdevice> {
    let mut count = 0;
    ok!(cuDeviceGetCount(&raw mut count));
    if count < 2 { skipped("needs two devices") } else { Ok(1) }
}

/// Skips the check on a driver older than `version` (1000 * major + 10 * minor).
pub fn needs_driver(version: i32) -> Result {
    let mut have = 0;
    ok!(cuDriverGetVersion(&raw mut have));
    if have < version {
        return skipped(format!("needs driver API {version}, this is {have}"));
    }
    Ok(())
}

/// An attribute of device 0.
pub fn device_attribute(attribute: sys::CUdevice_attribute) -> Result<i32> {
    let mut value = 0;
    ok!(cuDeviceGetAttribute(&raw mut value, attribute as u32, 0));
    Ok(value)
}

/// Device memory from cuMemAlloc.
pub fn alloc(size_bytes: usize) -> Result<u64> {
    let mut address = 0;
    ok!(cuMemAlloc_v2(&raw mut address, size_bytes));
    Ok(address)
}

/// Free memory of the current device.
pub fn free_bytes() -> Result<usize> {
    let (mut free, mut total) = (0, 0);
    ok!(cuMemGetInfo_v2(&raw mut free, &raw mut total));
    Ok(free)
}

/// Device memory with this content.
pub fn upload<T: Copy>(data: &[T]) -> Result<u64> {
    let address = alloc(size_of_val(data))?;
    write(address, data)?;
    Ok(address)
}

/// Copies to the device, for work on whichever stream: a copy from pageable memory may return before the last bytes
/// have arrived (driver API reference, "API synchronization behavior").
pub fn write<T: Copy>(address: u64, data: &[T]) -> Result {
    ok!(cuMemcpyHtoD_v2(address, data.as_ptr().cast(), size_of_val(data)));
    ok!(cuStreamSynchronize(std::ptr::null_mut()));
    Ok(())
}

/// Copies from the device.
pub fn read<T: Copy + Default>(address: u64, count: usize) -> Result<Vec<T>> {
    let mut data = vec![T::default(); count];
    ok!(cuMemcpyDtoH_v2(data.as_mut_ptr().cast(), address, count * size_of::<T>()));
    Ok(data)
}

/// Fails unless the device memory holds this.
pub fn expect_content<T: Copy + Default + PartialEq + std::fmt::Debug>(address: u64, wanted: &[T]) -> Result {
    let got = read::<T>(address, wanted.len())?;
    match got.iter().zip(wanted).position(|(got, wanted)| got != wanted) {
        None => Ok(()),
        Some(at) => expect_equal(&format!("element {at} of {}", wanted.len()), got[at], wanted[at]),
    }
}

/// Waits for everything in the current context.
pub fn synchronize() -> Result {
    ok!(cuCtxSynchronize());
    Ok(())
}

/// A stream that is not ordered by the legacy default stream.
pub fn stream() -> Result<CUstream> {
    stream_with(CUstream_flags::CU_STREAM_NON_BLOCKING)
}

/// A stream.
pub fn stream_with(flags: CUstream_flags) -> Result<CUstream> {
    let mut stream = std::ptr::null_mut();
    ok!(cuStreamCreate(&raw mut stream, flags as u32));
    Ok(stream)
}

/// An event.
pub fn event(flags: CUevent_flags) -> Result<CUevent> {
    let mut event = std::ptr::null_mut();
    ok!(cuEventCreate(&raw mut event, flags as u32));
    Ok(event)
}

/// Pinned host memory, zeroed.
pub fn pinned(size_bytes: usize) -> Result<*mut c_void> {
    let mut memory = std::ptr::null_mut();
    ok!(cuMemHostAlloc(&raw mut memory, size_bytes, 0));
    // SAFETY: the driver gave `size_bytes` bytes of host memory.
    unsafe { memory.cast::<u8>().write_bytes(0, size_bytes) };
    Ok(memory)
}

/// A word of pinned memory that both the host and the device see. A check that holds a stream up with it opens
/// it again when it ends early, so that nothing waits for ever at the process's end.
pub struct Flag(*mut u32);

impl Flag {
    /// A word that is 0.
    pub fn new() -> Result<Self> {
        Ok(Self(pinned(4)?.cast()))
    }

    /// Its address, the same for host and device.
    pub fn address(&self) -> u64 {
        self.0 as u64
    }

    /// The host's view of it, also from a host function.
    pub fn word(&self) -> &AtomicU32 {
        // SAFETY: the pinned word is aligned, is never freed, and everything in this process that touches it
        // does so atomically.
        unsafe { AtomicU32::from_ptr(self.0) }
    }

    /// Sets it for the device and for host functions.
    pub fn set(&self, value: u32) {
        self.word().store(value, Ordering::SeqCst);
    }

    /// Its value.
    pub fn get(&self) -> u32 {
        self.word().load(Ordering::SeqCst)
    }

    /// Holds the stream up until the word is not 0.
    pub fn hold(&self, stream: CUstream) -> Result {
        ok!(cuStreamWaitValue32_v2(stream, self.address(), 1, 0));
        Ok(())
    }
}

impl Drop for Flag {
    fn drop(&mut self) {
        self.set(u32::MAX);
    }
}

/// Loads PTX text, which ends with a NUL.
pub fn module(ptx: &str) -> Result<CUmodule> {
    let mut module = std::ptr::null_mut();
    ok!(cuModuleLoadData(&raw mut module, ptx.as_ptr().cast()));
    Ok(module)
}

/// A kernel of a module.
pub fn function_of(module: CUmodule, name: &str) -> Result<CUfunction> {
    let name = CString::new(name).expect("names of kernels have no NUL");
    let mut function = std::ptr::null_mut();
    ok!(cuModuleGetFunction(&raw mut function, module, name.as_ptr()));
    Ok(function)
}

/// A kernel of PTX text, which ends with a NUL.
pub fn function(ptx: &str, name: &str) -> Result<CUfunction> {
    function_of(module(ptx)?, name)
}

/// Launches a one-dimensional grid. Each parameter is given as the bits of 8 bytes; a kernel's smaller one takes
/// the lowest.
pub fn launch(
    function: CUfunction,
    blocks: u32,
    threads: u32,
    stream: CUstream,
    parameters: &[u64],
) -> Result {
    launch_with(function, [blocks, 1, 1], [threads, 1, 1], 0, stream, parameters)
}

/// Launches a kernel.
pub fn launch_with(
    function: CUfunction,
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    stream: CUstream,
    parameters: &[u64],
) -> Result {
    let code = try_launch(function, grid, block, shared_bytes, stream, parameters)?;
    crate::check::expect_code("cuLaunchKernel", code, &[sys::CUresult::CUDA_SUCCESS])
}

/// Launches a kernel and gives the result of the call.
pub fn try_launch(
    function: CUfunction,
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    stream: CUstream,
    parameters: &[u64],
) -> Result<u32> {
    let mut pointers = parameter_pointers(parameters);
    Ok(cu!(cuLaunchKernel(
        function,
        grid[0],
        grid[1],
        grid[2],
        block[0],
        block[1],
        block[2],
        shared_bytes,
        stream,
        pointers.as_mut_ptr(),
        std::ptr::null_mut(),
    )))
}

/// What a launch takes as `kernelParams`.
pub fn parameter_pointers(parameters: &[u64]) -> Vec<*mut c_void> {
    parameters.iter().map(|parameter| std::ptr::from_ref(parameter).cast_mut().cast()).collect()
}
