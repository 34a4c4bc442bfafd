//! The driver, as the real library uses it: `libcuda.so.1` opened by name, its functions found with `dlsym`.

use std::ffi::{c_char, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::OnceLock;

use cuda_abi::api::Api;
use cuda_abi::layout::{Access, Properties};
use cuda_abi::sys;
use cuda_abi::types::*;

use crate::types::{Error, Result, warn};

static API: OnceLock<Option<Api>> = OnceLock::new();

const POSIX: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// The driver.
///
/// # Errors
/// `ncclSystemError` where there is none.
pub(crate) fn api() -> Result<&'static Api> {
    // SAFETY: the name is the driver's, whose functions have the signatures of the table.
    let load = || unsafe { Api::load(Path::new("libcuda.so.1")) };
    API.get_or_init(|| load().map_err(|error| warn(&error.to_string())).ok())
        .as_ref()
        .ok_or(Error::SystemError)
}

/// Calls the driver; any error is `ncclUnhandledCudaError`.
macro_rules! call {
    ($name:ident ( $($arg:expr),* $(,)? )) => {
        $crate::cuda::api().and_then(|api| {
            #[allow(clippy::macro_metavars_in_unsafe, reason = "the comment is about the calls of this crate")]
            // SAFETY: pointers are to live variables or memory of this library; handles are ones that the driver gave, or
            // that the program vouches for.
            let code = unsafe { api.$name($($arg),*) };
            $crate::cuda::checked(stringify!($name), code)
        })
    };
}
pub(crate) use call;

pub(crate) fn checked(name: &str, code: CUresult) -> Result {
    if code == 0 {
        return Ok(());
    }
    warn(&format!("Cuda failure: {name} gave {code}"));
    Err(Error::UnhandledCudaError)
}

/// The current context; that of device 0 where a thread has none.
pub(crate) fn context() -> Result<(CUcontext, CUdevice)> {
    let mut context = std::ptr::null_mut();
    call!(cuInit(0))?;
    call!(cuCtxGetCurrent(&raw mut context))?;
    if context.is_null() {
        call!(cuDevicePrimaryCtxRetain(&raw mut context, 0))?;
        call!(cuCtxSetCurrent(context))?;
    }
    let mut device = 0;
    call!(cuCtxGetDevice(&raw mut device))?;
    Ok((context, device))
}

pub(crate) fn make_current(context: Context) -> Result {
    call!(cuCtxSetCurrent(context.0))
}

/// A context's handle, which any thread may use.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Context(pub(crate) CUcontext);

// SAFETY: the driver's handles belong to no thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// A stream's handle, likewise.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stream(pub(crate) CUstream);

// SAFETY: as above.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    pub(crate) fn create() -> Result<Self> {
        let mut stream = std::ptr::null_mut();
        call!(cuStreamCreate(&raw mut stream, CUstream_flags::CU_STREAM_NON_BLOCKING as u32))?;
        Ok(Self(stream))
    }

    pub(crate) fn is_capturing(self) -> Result<bool> {
        let mut status = 0;
        call!(cuStreamIsCapturing(self.0, &raw mut status))?;
        Ok(status != 0)
    }

    pub(crate) fn synchronize(self) -> Result {
        call!(cuStreamSynchronize(self.0))
    }

    pub(crate) fn destroy(self) {
        // At the end of the process the driver may be gone.
        let _ = call!(cuStreamDestroy_v2(self.0));
    }
}

pub(crate) fn device_attribute(attribute: sys::CUdevice_attribute, device: CUdevice) -> Result<i32> {
    let mut value = 0;
    call!(cuDeviceGetAttribute(&raw mut value, attribute as u32, device))?;
    Ok(value)
}

/// `DOMAIN:BUS:DEVICE.0`: which device of the machine it is.
pub(crate) fn bus_id(device: CUdevice) -> Result<[u8; 16]> {
    let mut id = [0_u8; 16];
    call!(cuDeviceGetPCIBusId(id.as_mut_ptr().cast::<c_char>(), 16, device))?;
    Ok(id)
}

/// Pinned host memory, zeroed, at one address for host and devices. Freed when dropped.
pub(crate) struct Pinned {
    pub(crate) address: u64,
    context: Context,
}

impl Pinned {
    pub(crate) fn create(context: Context, size_bytes: usize) -> Result<Self> {
        let mut memory: *mut c_void = std::ptr::null_mut();
        let portable = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP;
        call!(cuMemHostAlloc(&raw mut memory, size_bytes, portable))?;
        // SAFETY: the driver gave so many bytes.
        unsafe { memory.cast::<u8>().write_bytes(0, size_bytes) };
        Ok(Self { address: memory as u64, context })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let freed =
            make_current(self.context).and_then(|()| call!(cuMemFreeHost(self.address as *mut c_void)));
        // At the end of the process the driver may be gone.
        let _ = freed;
    }
}

/// How memory that is shared with peers was made.
enum Origin {
    /// cuMemCreate or an import: mapped at a reserved address.
    Mapped(CUmemGenericAllocationHandle),
    Allocated,
    Opened,
    /// A file in /dev/shm, mapped and registered.
    Registered,
}

/// Memory that kernels of this process use, freed when dropped.
pub(crate) struct Memory {
    pub(crate) address: u64,
    size_bytes: usize,
    origin: Origin,
    context: Context,
}

/// The access of a device, and of the host's NUMA node.
fn accesses(device: CUdevice, host: bool) -> Vec<Access> {
    let node = CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA as u32, id: 0 };
    let of_device = Access::of(device);
    let of_host = Access { location: node, ..of_device };
    if host { vec![of_device, of_host] } else { vec![of_device] }
}

impl Memory {
    /// Physical memory of the device, or of the host, that can be exported; mapped.
    pub(crate) fn create(
        context: Context,
        device: CUdevice,
        size_bytes: usize,
        on_host: bool,
    ) -> Result<Self> {
        let mut properties = Properties { handle_types: POSIX.0, ..Properties::of(device) };
        if on_host {
            properties.location = accesses(device, true)[1].location;
        }
        let properties = (&raw const properties).cast();
        let (mut unit, mut handle) = (0, 0);
        call!(cuMemGetAllocationGranularity(&raw mut unit, properties, 0))?;
        let size_bytes = size_bytes.next_multiple_of(unit);
        call!(cuMemCreate(&raw mut handle, size_bytes, properties, 0))?;
        Self::map(context, device, handle, size_bytes, on_host)
    }

    /// Physical memory, or a multicast object, at a reserved address.
    pub(crate) fn map(
        context: Context,
        device: CUdevice,
        handle: CUmemGenericAllocationHandle,
        size_bytes: usize,
        on_host: bool,
    ) -> Result<Self> {
        let mut address = 0;
        call!(cuMemAddressReserve(&raw mut address, size_bytes, 0, 0, 0))?;
        call!(cuMemMap(address, size_bytes, 0, handle, 0))?;
        let accesses = accesses(device, on_host);
        call!(cuMemSetAccess(address, size_bytes, accesses.as_ptr().cast(), accesses.len()))?;
        Ok(Self { address, size_bytes, origin: Origin::Mapped(handle), context })
    }

    /// The memory of a descriptor.
    pub(crate) fn import(
        context: Context,
        device: CUdevice,
        descriptor: BorrowedFd<'_>,
        size_bytes: usize,
        on_host: bool,
    ) -> Result<Self> {
        Self::map(context, device, import_handle(descriptor)?, size_bytes, on_host)
    }

    pub(crate) fn handle(&self) -> Result<CUmemGenericAllocationHandle> {
        match self.origin {
            Origin::Mapped(handle) => Ok(handle),
            _ => Err(Error::InternalError),
        }
    }

    pub(crate) fn export(&self) -> Result<OwnedFd> {
        export_handle(self.handle()?)
    }

    /// cuMemAlloc's, which is shared by a legacy handle.
    pub(crate) fn allocate(context: Context, size_bytes: usize) -> Result<Self> {
        let mut address = 0;
        call!(cuMemAlloc_v2(&raw mut address, size_bytes))?;
        Ok(Self { address, size_bytes, origin: Origin::Allocated, context })
    }

    pub(crate) fn ipc_handle(&self) -> Result<[u8; 64]> {
        let mut handle = CUipcMemHandle { reserved: [0; 64] };
        call!(cuIpcGetMemHandle(&raw mut handle, self.address))?;
        Ok(handle.reserved.map(c_char::cast_unsigned))
    }

    /// The memory of a legacy handle.
    pub(crate) fn open(context: Context, handle: [u8; 64], size_bytes: usize) -> Result<Self> {
        let mut address = 0;
        let handle = CUipcMemHandle { reserved: handle.map(u8::cast_signed) };
        call!(cuIpcOpenMemHandle_v2(&raw mut address, handle, 1))?;
        Ok(Self { address, size_bytes, origin: Origin::Opened, context })
    }

    /// A shared mapping of a file, registered with the driver.
    pub(crate) fn register(context: Context, file: BorrowedFd<'_>, size_bytes: usize) -> Result<Self> {
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no memory in use.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), size_bytes, protection, flags, file.as_raw_fd(), 0) };
        if start == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error().into());
        }
        let memory = Self { address: start as u64, size_bytes, origin: Origin::Registered, context };
        call!(cuMemHostRegister_v2(start, size_bytes, CU_MEMHOSTREGISTER_PORTABLE))?;
        Ok(memory)
    }

    /// Zeroes all of it.
    pub(crate) fn clear(&self) -> Result {
        alone(|stream| call!(cuMemsetD8Async(self.address, 0, self.size_bytes, stream.0)))
    }

    fn free(&self) -> Result {
        make_current(self.context)?;
        match self.origin {
            Origin::Mapped(handle) => {
                call!(cuMemUnmap(self.address, self.size_bytes))?;
                call!(cuMemRelease(handle))?;
                call!(cuMemAddressFree(self.address, self.size_bytes))
            }
            Origin::Allocated => call!(cuMemFree_v2(self.address)),
            Origin::Opened => call!(cuIpcCloseMemHandle(self.address)),
            Origin::Registered => {
                let start = self.address as *mut c_void;
                let unregistered = call!(cuMemHostUnregister(start));
                // SAFETY: the mapping is this value's own, and no kernel uses it any more.
                unsafe { libc::munmap(start, self.size_bytes) };
                unregistered
            }
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // At the end of the process the driver may be gone.
        let _ = self.free();
    }
}

/// The physical memory or multicast object of a descriptor.
pub(crate) fn import_handle(descriptor: BorrowedFd<'_>) -> Result<CUmemGenericAllocationHandle> {
    let mut handle = 0;
    let number = descriptor.as_raw_fd() as usize as *mut c_void;
    call!(cuMemImportFromShareableHandle(&raw mut handle, number, POSIX))?;
    Ok(handle)
}

/// A descriptor of it.
pub(crate) fn export_handle(handle: CUmemGenericAllocationHandle) -> Result<OwnedFd> {
    let mut descriptor: i32 = -1;
    call!(cuMemExportToShareableHandle((&raw mut descriptor).cast(), handle, POSIX, 0))?;
    // SAFETY: the driver has opened it for this caller.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// Copies words to memory that kernels use.
pub(crate) fn upload(address: u64, words: &[u64]) -> Result {
    alone(|stream| call!(cuMemcpyHtoDAsync_v2(address, words.as_ptr().cast(), size_of_val(words), stream.0)))
}

/// Does work on a stream of its own, and waits for it: a program may be capturing its streams.
fn alone(begin: impl FnOnce(Stream) -> Result) -> Result {
    let stream = Stream::create()?;
    let done = begin(stream).and_then(|()| stream.synchronize());
    stream.destroy();
    done
}

/// Lets the current context access memory of another context of this process.
pub(crate) fn reach(context: u64) -> Result {
    let context = context as CUcontext;
    let mut current = std::ptr::null_mut();
    call!(cuCtxGetCurrent(&raw mut current))?;
    if current == context {
        return Ok(());
    }
    // SAFETY: the handle is one of this process's.
    let code = unsafe { api()?.cuCtxEnablePeerAccess(context, 0) };
    let enabled = sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED as CUresult;
    if code == enabled { Ok(()) } else { checked("cuCtxEnablePeerAccess", code) }
}

/// The driver's copies between pinned and device memory, on a stream of the caller's.
pub(crate) fn to_device(address: u64, host: u64, size_bytes: usize, stream: Stream) -> Result {
    call!(cuMemcpyHtoDAsync_v2(address, host as *const c_void, size_bytes, stream.0))?;
    stream.synchronize()
}

pub(crate) fn to_host(host: u64, address: u64, size_bytes: usize, stream: Stream) -> Result {
    call!(cuMemcpyDtoHAsync_v2(host as *mut c_void, address, size_bytes, stream.0))?;
    stream.synchronize()
}

/// Makes the primary context of a device current.
pub(crate) fn use_device(device: CUdevice) -> Result {
    let mut context = std::ptr::null_mut();
    call!(cuDevicePrimaryCtxRetain(&raw mut context, device))?;
    call!(cuCtxSetCurrent(context))
}

/// Makes calls that a capture on this thread would forbid.
pub(crate) fn outside_capture<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as CUstreamCaptureMode;
    call!(cuThreadExchangeStreamCaptureMode(&raw mut mode))?;
    let result = body();
    call!(cuThreadExchangeStreamCaptureMode(&raw mut mode))?;
    result
}
