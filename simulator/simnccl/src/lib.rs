//! A stand-in for `libnccl.so.2` over the CUDA driver API: the calls of NCCL's public header, for ranks on one machine.
//!
//! It looks like the real one from the driver's side: memory shared by descriptors or legacy handles, host memory, sockets
//! with a proxy that calls the driver, kernels that wait for peers. Where a fact of the real library matters, its source is
//! the NCCL user guide, "NCCL API", unless a comment names another one.

mod bootstrap;
mod collective;
mod comm;
mod cuda;
mod group;
mod kernel;
mod meeting;
mod net;
mod nvls;
mod proxy;
mod service;
mod transport;
mod types;
mod windows;

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use cuda_abi::types::CUstream;
use parking_lot::Mutex;

use collective::{Call, Kind, address};
use comm::{Comm, Origin, by_handle};
use cuda::Stream;
use types::{Config, ConfigHead, DataType, Error, Reduction, Result, SUCCESS, UniqueId, warn};

/// `NCCL_VERSION(2, 29, 7)`.
const VERSION: c_int = 22907;
/// `NCCL_SPLIT_NOCOLOR`.
const NO_COLOUR: c_int = -1;
/// `NCCL_SHRINK_ABORT`.
const SHRINK_ABORT: c_int = 1;

type Handle = *mut c_void;
type Code = u32;

fn random() -> Result<u64> {
    let mut bytes = [0; 8];
    let read = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    read.map_err(|_| Error::SystemError)?;
    Ok(u64::from_ne_bytes(bytes))
}

/// A panic does not reach the program.
fn guarded(body: impl FnOnce() -> Result) -> Code {
    let result = catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(Error::InternalError));
    group::note(result).map_or_else(|error| error as Code, |()| SUCCESS)
}

/// # Safety
/// `out` is NULL or valid for a write.
unsafe fn write<T>(out: *mut T, value: T) -> Result {
    if out.is_null() {
        warn("an out parameter is NULL");
        return Err(Error::InvalidArgument);
    }
    // SAFETY: not NULL, and the caller vouches for the rest.
    unsafe { out.write(value) };
    Ok(())
}

/// Exports functions of the header; the bodies give a [`Result`].
macro_rules! exports {
    ($( $(#[$doc:meta])* fn $name:ident ( $($arg:ident : $ty:ty),* $(,)? ) $body:block )*) => { $(
        $(#[$doc])*
        ///
        /// # Safety
        /// As the header says: pointers are NULL or the program's, of the size that the call is about.
        // SAFETY: the name is NCCL's, which this library stands in for.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $ty),*) -> Code {
            guarded(move || $body)
        }
    )* };
}

exports! {
    /// The version of the library.
    fn ncclGetVersion(version: *mut c_int) {
        // SAFETY: the program's out parameter.
        unsafe { write(version, VERSION) }
    }

    /// A name for a communicator that is to be made.
    fn ncclGetUniqueId(out: *mut UniqueId) {
        if out.is_null() {
            return Err(Error::InvalidArgument);
        }
        let id = bootstrap::unique_id()?;
        // SAFETY: the program's out parameter.
        unsafe { write(out, id) }
    }

    /// Makes a communicator.
    fn ncclCommInitRank(out: *mut Handle, ranks: c_int, id: UniqueId, rank: c_int) {
        // SAFETY: the program's out parameter.
        unsafe { init(out, ranks, &id, rank, Config::DEFAULT) }
    }

    /// As `ncclCommInitRank`, with settings.
    fn ncclCommInitRankConfig(
        out: *mut Handle, ranks: c_int, id: UniqueId, rank: c_int, config: *const ConfigHead,
    ) {
        // SAFETY: the program's structure.
        let config = unsafe { Config::read(config, Config::DEFAULT) }?;
        // SAFETY: the program's out parameter.
        unsafe { init(out, ranks, &id, rank, config) }
    }

    /// As `ncclCommInitRankConfig`, with one ID or several, of which the first is used.
    fn ncclCommInitRankScalable(
        out: *mut Handle, ranks: c_int, rank: c_int, count: c_int, ids: *const UniqueId, config: *const ConfigHead,
    ) {
        if ids.is_null() || count < 1 {
            return Err(Error::InvalidArgument);
        }
        // SAFETY: the program's structure.
        let config = unsafe { Config::read(config, Config::DEFAULT) }?;
        // SAFETY: the program's IDs, at least one.
        let id = unsafe { ids.read() };
        // SAFETY: the program's out parameter.
        unsafe { init(out, ranks, &id, rank, config) }
    }

    /// Makes a communicator for devices of this process.
    fn ncclCommInitAll(out: *mut Handle, count: c_int, devices: *const c_int) {
        let count = usize::try_from(count).map_err(|_| Error::InvalidArgument)?;
        if out.is_null() || count == 0 {
            return Err(Error::InvalidArgument);
        }
        // SAFETY: the program's arrays of so many elements.
        unsafe { init_all(out, count, devices) }
    }

    /// Makes a communicator of each colour's ranks.
    fn ncclCommSplit(parent: Handle, colour: c_int, key: c_int, out: *mut Handle, config: *const ConfigHead) {
        let parent = by_handle(parent)?;
        if out.is_null() || colour < NO_COLOUR {
            return Err(Error::InvalidArgument);
        }
        // SAFETY: the program's structure.
        let config = unsafe { Config::read(config, parent.config) }?;
        let part = parent.split((colour != NO_COLOUR).then_some(colour), key, config)?;
        let handle = part.as_ref().map_or(std::ptr::null_mut(), |(comm, _)| comm.handle());
        // SAFETY: the program's out parameter.
        unsafe { write(out, handle) }?;
        part.map_or(Ok(()), |(comm, origin)| group::make(comm, origin))
    }

    /// Makes a communicator without some ranks, which do not call this.
    fn ncclCommShrink(
        parent: Handle, excluded: *const c_int, count: c_int, out: *mut Handle, config: *const ConfigHead, flags: c_int,
    ) {
        let parent = by_handle(parent)?;
        let count = usize::try_from(count).map_err(|_| Error::InvalidArgument)?;
        if out.is_null() || excluded.is_null() || flags & !SHRINK_ABORT != 0 {
            return Err(Error::InvalidArgument);
        }
        // SAFETY: the program's array of so many ranks.
        let excluded = unsafe { std::slice::from_raw_parts(excluded, count) }.iter();
        let number = |rank: &c_int| usize::try_from(*rank).map_err(|_| Error::InvalidArgument);
        let excluded = excluded.map(number).collect::<Result<Vec<_>>>()?;
        // SAFETY: the program's structure.
        let config = unsafe { Config::read(config, parent.config) }?;
        let (comm, origin) = parent.shrink(&excluded, config, flags & SHRINK_ABORT != 0)?;
        // SAFETY: the program's out parameter.
        unsafe { write(out, comm.handle()) }?;
        group::make(comm, origin)
    }

    /// A unique ID for ranks that join this communicator, with the next `ncclCommGrow`.
    fn ncclCommGetUniqueId(comm: Handle, out: *mut UniqueId) {
        by_handle(comm)?.error()?;
        // SAFETY: the program's out parameter.
        unsafe { write(out, bootstrap::unique_id()?) }
    }

    /// Makes a communicator of the ranks of another one, which keep their numbers, and of new ranks, which name no other
    /// one. The rank that made the unique ID passes it.
    fn ncclCommGrow(
        parent: Handle, ranks: c_int, id: *const UniqueId, rank: c_int, out: *mut Handle, config: *const ConfigHead,
    ) {
        // SAFETY: NULL, or the program's ID.
        let id = unsafe { id.as_ref() };
        if out.is_null() {
            return Err(Error::InvalidArgument);
        }
        if parent.is_null() {
            // SAFETY: the program's structure.
            let config = unsafe { Config::read(config, Config::DEFAULT) }?;
            // SAFETY: the program's out parameter.
            return unsafe { init(out, ranks, id.ok_or(Error::InvalidArgument)?, rank, config) };
        }
        let parent = by_handle(parent)?;
        // SAFETY: the program's structure.
        let config = unsafe { Config::read(config, parent.config) }?;
        if rank != -1 {
            warn("ncclCommGrow: a rank of the communicator keeps its number, and passes -1");
            return Err(Error::InvalidArgument);
        }
        let (comm, origin) = parent.grow(id, peer(ranks)?, config)?;
        // SAFETY: the program's out parameter.
        unsafe { write(out, comm.handle()) }?;
        group::make(comm, origin)
    }

    /// Stops the communicator's work. It can only be shrunk or ended then.
    fn ncclCommRevoke(comm: Handle, flags: c_int) {
        let comm = by_handle(comm)?;
        if flags == 0 { comm.revoke() } else { Err(Error::InvalidArgument) }
    }

    /// Waits for the communicator's work; nothing can be queued any more.
    fn ncclCommFinalize(comm: Handle) {
        by_handle(comm)?.finalize()
    }

    /// Ends a communicator.
    fn ncclCommDestroy(comm: Handle) {
        if comm.is_null() { Ok(()) } else { by_handle(comm)?.destroy(false) }
    }

    /// Ends a communicator and the work that it waits for.
    fn ncclCommAbort(comm: Handle) {
        if comm.is_null() { Ok(()) } else { by_handle(comm)?.destroy(true) }
    }

    /// What went wrong without a call that could say so.
    fn ncclCommGetAsyncError(comm: Handle, out: *mut Code) {
        let state = by_handle(comm)?.error().map_or_else(|error| error as Code, |()| SUCCESS);
        // SAFETY: the program's out parameter.
        unsafe { write(out, state) }
    }

    /// How many ranks a communicator has.
    fn ncclCommCount(comm: Handle, out: *mut c_int) {
        let ranks = c_int::try_from(by_handle(comm)?.ranks).unwrap_or(c_int::MAX);
        // SAFETY: the program's out parameter.
        unsafe { write(out, ranks) }
    }

    /// The device of this rank.
    fn ncclCommCuDevice(comm: Handle, out: *mut c_int) {
        let device = by_handle(comm)?.device;
        // SAFETY: the program's out parameter.
        unsafe { write(out, device) }
    }

    /// This rank.
    fn ncclCommUserRank(comm: Handle, out: *mut c_int) {
        let rank = c_int::try_from(by_handle(comm)?.rank).unwrap_or(c_int::MAX);
        // SAFETY: the program's out parameter.
        unsafe { write(out, rank) }
    }

    /// Registers a buffer of this rank alone.
    fn ncclCommRegister(comm: Handle, buffer: *mut c_void, size: usize, out: *mut Handle) {
        let comm = by_handle(comm)?;
        if buffer.is_null() || size == 0 || out.is_null() {
            return Err(Error::InvalidArgument);
        }
        let handle = comm.in_context(|| comm.windows.add_buffer(address(buffer), size))?;
        // SAFETY: the program's out parameter.
        unsafe { write(out, handle as Handle) }
    }

    /// Undoes `ncclCommRegister`.
    fn ncclCommDeregister(comm: Handle, handle: Handle) {
        let comm = by_handle(comm)?;
        if handle.is_null() { Ok(()) } else { comm.windows.remove_buffer(handle as usize) }
    }

    /// Registers a buffer together with all other ranks. The handle is NULL if they cannot map each other's memory.
    fn ncclCommWindowRegister(comm: Handle, buffer: *mut c_void, size: usize, out: *mut Handle, flags: c_int) {
        let comm = by_handle(comm)?;
        // SAFETY: the program's out parameter.
        unsafe { write(out, std::ptr::null_mut()) }?;
        if buffer.is_null() || size == 0 {
            return Err(Error::InvalidArgument);
        }
        let request = windows::Request { buffer: address(buffer), size_bytes: size, flags };
        group::register(comm, request, out)
    }

    /// Ends a window for this rank alone.
    fn ncclCommWindowDeregister(comm: Handle, window: Handle) {
        let comm = by_handle(comm)?;
        if window.is_null() {
            return Ok(());
        }
        comm.in_context(|| comm.windows.deregister(window as usize))
    }

    /// Allocates memory that can be registered.
    fn ncclMemAlloc(out: *mut *mut c_void, size: usize) {
        if out.is_null() || size == 0 {
            return Err(Error::InvalidArgument);
        }
        let memory = allocate(size)?;
        let start = memory.address;
        ALLOCATED.lock().insert(start, memory);
        // SAFETY: the program's out parameter.
        unsafe { write(out, start as *mut c_void) }
    }

    /// Frees memory of `ncclMemAlloc`.
    fn ncclMemFree(memory: *mut c_void) {
        if memory.is_null() {
            return Ok(());
        }
        let (before, _) = cuda::context()?;
        let known = ALLOCATED.lock().remove(&address(memory));
        known.map(drop).ok_or(Error::InvalidArgument)?;
        cuda::make_current(cuda::Context(before))
    }

    /// Begins a group.
    fn ncclGroupStart() {
        group::start();
        Ok(())
    }

    /// Ends a group.
    fn ncclGroupEnd() {
        group::end()
    }

    /// Reduces to all ranks.
    fn ncclAllReduce(
        send: *const c_void, recv: *mut c_void, count: usize, ty: c_int, op: c_int, comm: Handle, stream: CUstream,
    ) {
        call(Kind::AllReduce(Reduction::of(op)?), send, recv, count, ty, comm, stream)
    }

    /// Reduces to one rank.
    fn ncclReduce(
        send: *const c_void, recv: *mut c_void, count: usize, ty: c_int, op: c_int, root: c_int, comm: Handle,
        stream: CUstream,
    ) {
        call(Kind::Reduce(Reduction::of(op)?, peer(root)?), send, recv, count, ty, comm, stream)
    }

    /// Reduces, each rank gets a part.
    fn ncclReduceScatter(
        send: *const c_void, recv: *mut c_void, count: usize, ty: c_int, op: c_int, comm: Handle, stream: CUstream,
    ) {
        call(Kind::ReduceScatter(Reduction::of(op)?), send, recv, count, ty, comm, stream)
    }

    /// Copies from one rank to all.
    fn ncclBroadcast(
        send: *const c_void, recv: *mut c_void, count: usize, ty: c_int, root: c_int, comm: Handle, stream: CUstream,
    ) {
        call(Kind::Broadcast(peer(root)?), send, recv, count, ty, comm, stream)
    }

    /// As `ncclBroadcast`, in place.
    fn ncclBcast(buffer: *mut c_void, count: usize, ty: c_int, root: c_int, comm: Handle, stream: CUstream) {
        call(Kind::Broadcast(peer(root)?), buffer, buffer, count, ty, comm, stream)
    }

    /// Copies from each rank to all.
    fn ncclAllGather(
        send: *const c_void, recv: *mut c_void, count: usize, ty: c_int, comm: Handle, stream: CUstream,
    ) {
        call(Kind::AllGather, send, recv, count, ty, comm, stream)
    }

    /// Copies a part from each rank to each.
    fn ncclAlltoAll(
        send: *const c_void, recv: *mut c_void, count: usize, ty: c_int, comm: Handle, stream: CUstream,
    ) {
        call(Kind::AllToAll, send, recv, count, ty, comm, stream)
    }

    /// Copies from each rank to one.
    fn ncclGather(
        send: *const c_void, recv: *mut c_void, count: usize, ty: c_int, root: c_int, comm: Handle, stream: CUstream,
    ) {
        call(Kind::Gather(peer(root)?), send, recv, count, ty, comm, stream)
    }

    /// Copies a part from one rank to each.
    fn ncclScatter(
        send: *const c_void, recv: *mut c_void, count: usize, ty: c_int, root: c_int, comm: Handle, stream: CUstream,
    ) {
        call(Kind::Scatter(peer(root)?), send, recv, count, ty, comm, stream)
    }

    /// Sends to a rank.
    fn ncclSend(send: *const c_void, count: usize, ty: c_int, to: c_int, comm: Handle, stream: CUstream) {
        call(Kind::Send(peer(to)?), send, std::ptr::null_mut(), count, ty, comm, stream)
    }

    /// Receives from a rank.
    fn ncclRecv(recv: *mut c_void, count: usize, ty: c_int, from: c_int, comm: Handle, stream: CUstream) {
        call(Kind::Recv(peer(from)?), std::ptr::null(), recv, count, ty, comm, stream)
    }
}

/// The text of a result.
// SAFETY: the name is NCCL's, which this library stands in for.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(code: Code) -> *const c_char {
    Error::text(code).as_ptr()
}

/// The text of the last error. It is kept nowhere: `NCCL_DEBUG=WARN` prints it.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(_comm: Handle) -> *const c_char {
    c"".as_ptr()
}

/// What `ncclMemAlloc` has given, by address.
static ALLOCATED: Mutex<BTreeMap<u64, cuda::Memory>> = Mutex::new(BTreeMap::new());

fn allocate(size_bytes: usize) -> Result<cuda::Memory> {
    let (context, device) = cuda::context()?;
    let context = cuda::Context(context);
    if transport::uses_mapped_memory(device)? {
        cuda::Memory::create(context, device, size_bytes, false)
    } else {
        cuda::Memory::allocate(context, size_bytes)
    }
}

fn peer(rank: c_int) -> Result<usize> {
    usize::try_from(rank).map_err(|_| Error::InvalidArgument)
}

fn call(
    kind: Kind,
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    ty: c_int,
    comm: Handle,
    stream: CUstream,
) -> Result {
    let call = Call { kind, input: address(send), output: address(recv), count, ty: DataType::of(ty)? };
    group::add(by_handle(comm)?, call, Stream(stream))
}

/// # Safety
/// `out` is NULL or valid for a write.
unsafe fn init(out: *mut Handle, ranks: c_int, id: &UniqueId, rank: c_int, config: Config) -> Result {
    if out.is_null() {
        return Err(Error::InvalidArgument);
    }
    let root = bootstrap::Root::decode(id)?;
    let comm = Comm::create(peer(rank)?, peer(ranks)?, config)?;
    // SAFETY: checked above, and the caller vouches for the rest.
    unsafe { write(out, comm.handle()) }?;
    group::make(comm, Origin::Root(root))
}

/// # Safety
/// `out` is valid for writes of `count` handles, `devices` NULL or valid for as many reads.
unsafe fn init_all(out: *mut Handle, count: usize, devices: *const c_int) -> Result {
    let root = bootstrap::Root::decode(&bootstrap::unique_id()?)?;
    let (before, _) = cuda::context()?;
    group::start();
    for rank in 0..count {
        let device = if devices.is_null() {
            peer_number(rank)
        } else {
            // SAFETY: the caller vouches for the array.
            unsafe { *devices.wrapping_add(rank) }
        };
        cuda::use_device(device)?;
        let comm = Comm::create(rank, count, Config::DEFAULT)?;
        // SAFETY: the caller vouches for the array.
        unsafe { write(out.wrapping_add(rank), comm.handle()) }?;
        group::make(Arc::clone(&comm), Origin::Root(root))?;
    }
    let made = group::end();
    cuda::make_current(cuda::Context(before))?;
    made
}

fn peer_number(rank: usize) -> c_int {
    c_int::try_from(rank).unwrap_or(c_int::MAX)
}
