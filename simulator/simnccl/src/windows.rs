//! Memory of the program that a communicator knows: buffers that one rank registers for itself, and windows, which all
//! ranks register together and map into each other. Collectives read inputs in symmetric windows where they are.
//!
//! Sources: NCCL user guide, "User Buffer Registration", ncclCommRegister, ncclCommWindowRegister and "Window Registration
//! Flags"; what it leaves open, as the result of a bad call, is that of NCCL 2.28's `dev_runtime.cc` and `register.cc`.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::os::fd::{AsFd, OwnedFd};

use cuda_abi::types::*;
use parking_lot::Mutex;

use crate::bootstrap::Bootstrap;
use crate::collective::{Call, Work};
use crate::cuda::{self, Context, Memory, call};
use crate::service::{self, Service};
use crate::types::{Error, Result, warn};

/// `NCCL_WIN_COLL_SYMMETRIC`.
const SYMMETRIC: c_int = 1;
/// `NCCL_WIN_REQUIRED_ALIGNMENT`.
const ALIGNMENT: u64 = 4096;

/// What a rank asks for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(crate) buffer: u64,
    pub(crate) size_bytes: usize,
    pub(crate) flags: c_int,
}

struct Window {
    request: Request,
    /// Where each rank's buffer is mapped here; this rank's own is the program's.
    addresses: Vec<u64>,
    _peers: Vec<Memory>,
}

/// A buffer of one rank, and how often it was registered.
struct Buffer {
    start: u64,
    size_bytes: usize,
    registrations: usize,
}

#[derive(Default)]
struct State {
    /// By handle. The number is the same on all ranks.
    windows: BTreeMap<usize, Window>,
    last_window: usize,
    buffers: BTreeMap<usize, Buffer>,
    last_buffer: usize,
}

/// What is registered under a communicator. Its end deregisters what is left.
#[derive(Default)]
pub(crate) struct Windows {
    state: Mutex<State>,
}

/// The physical memory around a buffer.
struct Allocation {
    base: u64,
    size_bytes: usize,
    descriptor: OwnedFd,
}

/// # Errors
/// `ncclUnhandledCudaError` for memory that is not of cuMemCreate or cannot be exported.
fn allocation(request: Request) -> Result<Allocation> {
    let (mut base, mut size_bytes, mut handle) = (0, 0, 0);
    call!(cuMemGetAddressRange_v2(&raw mut base, &raw mut size_bytes, request.buffer))?;
    let end = request.buffer.checked_add(request.size_bytes as u64).ok_or(Error::InvalidArgument)?;
    if !request.buffer.is_multiple_of(ALIGNMENT) || end > base + size_bytes as u64 {
        warn("a window has to begin at a multiple of 4096 bytes and to lie in one allocation");
        return Err(Error::InvalidArgument);
    }
    call!(cuMemRetainAllocationHandle(&raw mut handle, base as *mut c_void))?;
    let exported = cuda::export_handle(handle);
    call!(cuMemRelease(handle))?;
    Ok(Allocation { base, size_bytes, descriptor: exported? })
}

/// What a rank tells the others: whether its buffer is fit, its size, flags, offset in its allocation, that one's size.
fn offer(request: Request, found: Option<&Allocation>) -> [u64; 5] {
    let (offset, size_bytes) =
        found.map_or((0, 0), |found| (request.buffer - found.base, found.size_bytes as u64));
    [
        found.is_some().into(),
        request.size_bytes as u64,
        u64::from(request.flags.cast_unsigned()),
        offset,
        size_bytes,
    ]
}

fn exchange(bootstrap: &Bootstrap, mine: [u64; 5]) -> Result<Vec<Vec<u64>>> {
    let bytes: Vec<u8> = mine.iter().flat_map(|word| word.to_le_bytes()).collect();
    let all = bootstrap.all_gather(&bytes)?;
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap_or_default());
    Ok(all.iter().map(|bytes| bytes.chunks(8).map(word).collect()).collect())
}

impl Windows {
    /// Registers a window with all other ranks; waits for them.
    ///
    /// # Errors
    /// Those of the buffer; `ncclInvalidUsage` if that of another rank is not fit, or size or flags differ.
    pub(crate) fn register(
        &self,
        request: Request,
        bootstrap: &Bootstrap,
        context: Context,
        device: CUdevice,
    ) -> Result<usize> {
        let found = allocation(request);
        let mine = offer(request, found.as_ref().ok());
        let all = exchange(bootstrap, mine)?;
        let number = {
            let mut state = self.state.lock();
            state.last_window += 1;
            state.last_window
        };
        let own = found?;
        if all.iter().any(|other| other[..3] != mine[..3]) {
            warn("the ranks register windows of other sizes or flags, or of memory that cannot be shared");
            return Err(Error::InvalidUsage);
        }
        let name = bootstrap.number.rotate_left(32) ^ number as u64;
        let shared = own.descriptor.try_clone()?;
        let service = Service::start(name, bootstrap.rank, move |_| Ok(shared.try_clone()?))?;
        bootstrap.barrier()?;
        let (mut addresses, mut peers) = (Vec::new(), Vec::new());
        for (peer, offer) in all.iter().enumerate() {
            if peer == bootstrap.rank {
                addresses.push(request.buffer);
                continue;
            }
            let descriptor = service::fetch(name, peer, service::BUFFER)?;
            let size_bytes = usize::try_from(offer[4]).map_err(|_| Error::InternalError)?;
            let memory = Memory::import(context, device, descriptor.as_fd(), size_bytes, false)?;
            addresses.push(memory.address + offer[3]);
            peers.push(memory);
        }
        bootstrap.barrier()?;
        drop(service);
        self.state.lock().windows.insert(number, Window { request, addresses, _peers: peers });
        Ok(number)
    }

    /// This rank does not use a window any more; the others may.
    pub(crate) fn deregister(&self, number: usize) -> Result {
        let window = self.state.lock().windows.remove(&number);
        window.map(drop).ok_or(Error::InvalidArgument)
    }

    /// Registers a buffer of this rank.
    pub(crate) fn add_buffer(&self, start: u64, size_bytes: usize) -> Result<usize> {
        call!(cuMemGetAddressRange_v2(std::ptr::null_mut(), std::ptr::null_mut(), start))?;
        let mut state = self.state.lock();
        let is_same = |buffer: &Buffer| (buffer.start, buffer.size_bytes) == (start, size_bytes);
        if let Some((number, buffer)) = state.buffers.iter_mut().find(|(_, buffer)| is_same(buffer)) {
            buffer.registrations += 1;
            return Ok(*number);
        }
        state.last_buffer += 1;
        let number = state.last_buffer;
        state.buffers.insert(number, Buffer { start, size_bytes, registrations: 1 });
        Ok(number)
    }

    /// Undoes one registration of a buffer.
    ///
    /// # Errors
    /// `ncclInvalidUsage` for a handle that is none.
    pub(crate) fn remove_buffer(&self, number: usize) -> Result {
        let mut state = self.state.lock();
        let buffer = state.buffers.get_mut(&number).ok_or(Error::InvalidUsage)?;
        buffer.registrations -= 1;
        if buffer.registrations == 0 {
            state.buffers.remove(&number);
        }
        Ok(())
    }

    /// Says what the program has forgotten.
    pub(crate) fn warn_of_rest(&self) {
        let state = self.state.lock();
        if !(state.windows.is_empty() && state.buffers.is_empty()) {
            warn("a communicator ends whose windows and buffers are not all deregistered");
        }
    }

    /// Lets the ranks read each other's inputs where they are, if this rank's input and output are in symmetric windows:
    /// those of the others are at the same offsets then. What is in place would be overwritten before all have read it.
    pub(crate) fn apply(&self, work: &mut Work, call: &Call, rank: usize, ranks: usize) {
        let Some([input_bytes, output_bytes]) = call.symmetric_bytes(ranks) else { return };
        let (input_end, output_end) = (call.input + input_bytes as u64, call.output + output_bytes as u64);
        if call.input < output_end && call.output < input_end {
            return;
        }
        let state = self.state.lock();
        let (Some(input), Some(output)) =
            (state.symmetric(call.input, input_end), state.symmetric(call.output, output_end))
        else {
            return;
        };
        let inputs: Vec<u64> = input.1.addresses.iter().map(|address| address + input.2).collect();
        let place = [input.0 as u32, input.2 as u32, output.0 as u32, output.2 as u32];
        work.read_inputs(call, rank, &inputs, place);
    }
}

impl State {
    /// The symmetric window around a part of this rank's memory: its number, and the offset in it.
    fn symmetric(&self, start: u64, end: u64) -> Option<(usize, &Window, u64)> {
        self.windows.iter().find_map(|(number, window)| {
            let Request { buffer, size_bytes, flags } = window.request;
            let is_around = buffer <= start && end <= buffer + size_bytes as u64;
            (flags & SYMMETRIC != 0 && is_around).then(|| (*number, window, start - buffer))
        })
    }
}
