//! The handlers: arguments are checked here, before anything is done to any process.

use cuda_abi::sys::CUresult;
use cuda_abi::types::{
    CUcheckpointCheckpointArgs, CUcheckpointLockArgs, CUcheckpointOperationHandle, CUcheckpointRestoreArgs,
    CUcheckpointUnlockArgs, CUprocessState,
};

use super::remote::{self, Target};
use super::wire::{MAX_PAIRS, Operation, Pair};
use super::{control, state, tools};
use crate::error::{Result, write_out};
use crate::process;

/// All argument structures are of this size, in every version of the API.
const ARGS_BYTES: usize = 64;
const _: () = assert!(size_of::<CUcheckpointLockArgs>() == ARGS_BYTES);
const _: () = assert!(size_of::<CUcheckpointCheckpointArgs>() == ARGS_BYTES);
const _: () = assert!(size_of::<CUcheckpointRestoreArgs>() == ARGS_BYTES);
const _: () = assert!(size_of::<CUcheckpointUnlockArgs>() == ARGS_BYTES);

/// The process that a call is about.
enum Process {
    /// The calling one, which needs no messenger.
    Own,
    Other(Target),
}

impl Process {
    fn of(pid: i32) -> Result<Self> {
        let own = rustix::process::getpid().as_raw_nonzero().get();
        if pid == own || remote::process_of(pid)? == own {
            // A process without driver state, the child of a fork included, has none to checkpoint.
            return process::machine().map(|_| Self::Own);
        }
        Target::find(remote::process_of(pid)?).map(Self::Other)
    }

    fn carry_out(&self, operation: Operation) -> Result {
        match self {
            Self::Own => state::carry_out(&operation, &|| true),
            Self::Other(target) => target.carry_out(operation),
        }
    }
}

pub(crate) unsafe fn cuCheckpointProcessGetState(pid: i32, out: *mut CUprocessState) -> Result {
    let state = match Process::of(pid)? {
        // Seen with 580.159.04. Of another process it is not known, and not simulated.
        Process::Own if process::release()?.is_as_seen() && tools::cupti_is_attached() => {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        Process::Own => state::current(),
        Process::Other(target) => target.state()?,
    };
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, state as u32) }
}

pub(crate) unsafe fn cuCheckpointProcessGetRestoreThreadId(pid: i32, out: *mut i32) -> Result {
    let thread_id = match Process::of(pid)? {
        Process::Own => control::thread_id().ok_or(CUresult::CUDA_ERROR_NOT_INITIALIZED)?,
        Process::Other(target) => target.thread_id()?,
    };
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, thread_id) }
}

pub(crate) unsafe fn cuCheckpointProcessLock(pid: i32, args: *mut CUcheckpointLockArgs) -> Result {
    // SAFETY: `args` is NULL or the caller's structure.
    let args = unsafe { read_args(args.cast()) };
    let (timeout_ms, reserved) = args.split_first_chunk().expect("the structure begins with 4 bytes");
    all_zero(reserved)?;
    Process::of(pid)?.carry_out(Operation::Lock { timeout_ms: u32::from_ne_bytes(*timeout_ms) })
}

pub(crate) unsafe fn cuCheckpointProcessCheckpoint(
    pid: i32,
    args: *mut CUcheckpointCheckpointArgs,
) -> Result {
    // SAFETY: `args` is NULL or the caller's structure.
    let args = unsafe { read_args(args.cast()) };
    let (custom_storage, reserved) = args.split_at(size_of::<usize>());
    all_zero(reserved)?;
    refuse_custom_storage(custom_storage)?;
    Process::of(pid)?.carry_out(Operation::Checkpoint)
}

pub(crate) unsafe fn cuCheckpointProcessRestore(pid: i32, args: *mut CUcheckpointRestoreArgs) -> Result {
    // SAFETY: `args` is NULL or the caller's structure.
    let bytes = unsafe { read_args(args.cast()) };
    let custom_storage = std::mem::offset_of!(CUcheckpointRestoreArgs, customStorageInfo_out);
    let count_end = std::mem::offset_of!(CUcheckpointRestoreArgs, gpuPairsCount) + size_of::<u32>();
    let (custom_storage, reserved) = bytes[custom_storage..].split_at(size_of::<usize>());
    all_zero(reserved)?;
    // Before CUDA 13.4 the padding was part of what is reserved.
    all_zero(&bytes[count_end..std::mem::offset_of!(CUcheckpointRestoreArgs, customStorageInfo_out)])?;
    refuse_custom_storage(custom_storage)?;
    if !process::release()?.has_pairs() {
        // Where the pairs are was reserved.
        all_zero(&bytes)?;
    }
    // SAFETY: as above; the pairs are the caller's array.
    let pairs = unsafe { read_pairs(args) }?;
    Process::of(pid)?.carry_out(Operation::Restore { pairs })
}

pub(crate) unsafe fn cuCheckpointProcessUnlock(pid: i32, args: *mut CUcheckpointUnlockArgs) -> Result {
    // SAFETY: `args` is NULL or the caller's structure.
    all_zero(&unsafe { read_args(args.cast()) })?;
    Process::of(pid)?.carry_out(Operation::Unlock)
}

/// Completes an operation with custom storage, of which none can have begun.
pub(crate) unsafe fn cuCheckpointOperationComplete(_operation: CUcheckpointOperationHandle) -> Result {
    Err(CUresult::CUDA_ERROR_NOT_SUPPORTED)
}

/// The bytes of an argument structure; NULL is the same as all zeros.
///
/// # Safety
/// `args` is NULL or points to a structure of [`ARGS_BYTES`] bytes.
unsafe fn read_args(args: *const [u8; ARGS_BYTES]) -> [u8; ARGS_BYTES] {
    // SAFETY: bytes have no alignment and no invalid values; the caller vouches for the size.
    if args.is_null() { [0; ARGS_BYTES] } else { unsafe { args.read() } }
}

/// # Safety
/// `args` is NULL or the caller's structure, whose pairs are as many as it says.
unsafe fn read_pairs(args: *const CUcheckpointRestoreArgs) -> Result<Vec<Pair>> {
    // SAFETY: the structure holds a pointer and numbers, for which every bit pattern is valid.
    let Some(args) = (unsafe { args.as_ref() }) else { return Ok(Vec::new()) };
    let count = args.gpuPairsCount as usize;
    if args.gpuPairs.is_null() && count == 0 {
        return Ok(Vec::new());
    }
    if args.gpuPairs.is_null() || !(1..=MAX_PAIRS).contains(&count) {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller's array of so many pairs, each of which is two UUIDs of 16 bytes.
    Ok(unsafe { std::slice::from_raw_parts(args.gpuPairs.cast::<Pair>(), count) }.to_vec())
}

fn all_zero(reserved: &[u8]) -> Result {
    if reserved.iter().all(|byte| *byte == 0) { Ok(()) } else { Err(CUresult::CUDA_ERROR_INVALID_VALUE) }
}

/// Storage of the caller's is not offered: the contents always go to the process's own host memory.
fn refuse_custom_storage(pointer: &[u8]) -> Result {
    all_zero(pointer).map_err(|_| CUresult::CUDA_ERROR_NOT_SUPPORTED)
}
