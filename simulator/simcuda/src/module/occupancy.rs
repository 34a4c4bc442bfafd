//! How many blocks run on a multiprocessor at once, by the limits of sm_90 (`cuda_occupancy.h` of the CUDA toolkit,
//! and the CUDA C++ programming guide, "Technical Specifications per Compute Capability").

use cuda_abi::sys::{self, CUresult};
use cuda_abi::types::{CUfunction, CUoccupancyB2DSize};

use super::function::{self, Function};
use super::launch::{Attributes, Shape, cluster};
use super::settings::{max_threads, registers};
use crate::context;
use crate::device::{
    MULTIPROCESSORS, REGISTERS_PER_MULTIPROCESSOR, RESERVED_SHARED_BYTES, SHARED_BYTES_PER_BLOCK_OPTIN,
    SHARED_BYTES_PER_MULTIPROCESSOR, THREADS_PER_BLOCK, THREADS_PER_MULTIPROCESSOR, WARP_SIZE,
};
use crate::error::{Result, write_both, write_out};

const BLOCKS_PER_MULTIPROCESSOR: u32 = 32;
/// A multiprocessor has four parts with a quarter of the registers each.
const PARTITIONS: u32 = 4;
/// Registers are given to a warp in such pieces.
const REGISTER_GRANULARITY: u32 = 256;
const SHARED_GRANULARITY_BYTES: usize = 128;

/// The blocks of `threads` threads that fit on a multiprocessor; none if not even one does.
pub(super) fn resident_blocks(function: &Function, threads: u32, dynamic_shared_bytes: usize) -> u32 {
    let code = function.code();
    if threads == 0
        || threads > max_threads(code)
        || dynamic_shared_bytes > function.settings().max_dynamic_shared_bytes(code) as usize
    {
        return 0;
    }
    let shared_bytes = code.static_shared_bytes as usize + dynamic_shared_bytes;
    blocks_by_warps(threads)
        .min(BLOCKS_PER_MULTIPROCESSOR)
        .min(blocks_by_registers(threads, registers(code)))
        .min(blocks_by_shared(shared_bytes))
}

fn blocks_by_warps(threads: u32) -> u32 {
    THREADS_PER_MULTIPROCESSOR / WARP_SIZE / threads.div_ceil(WARP_SIZE)
}

fn blocks_by_registers(threads: u32, registers: u32) -> u32 {
    let warps = threads.div_ceil(WARP_SIZE);
    let per_warp = (registers * WARP_SIZE).next_multiple_of(REGISTER_GRANULARITY);
    // The hardware reckons as if each partition took its share of the block's warps.
    if per_warp * warps.next_multiple_of(PARTITIONS) > REGISTERS_PER_MULTIPROCESSOR {
        return 0;
    }
    REGISTERS_PER_MULTIPROCESSOR / PARTITIONS / per_warp * PARTITIONS / warps
}

fn blocks_by_shared(shared_bytes: usize) -> u32 {
    let block_bytes =
        (shared_bytes + RESERVED_SHARED_BYTES as usize).next_multiple_of(SHARED_GRANULARITY_BYTES);
    u32::try_from(SHARED_BYTES_PER_MULTIPROCESSOR as usize / block_bytes).unwrap_or(0)
}

fn invalid<T>() -> Result<T> {
    Err(CUresult::CUDA_ERROR_INVALID_VALUE)
}

/// The only flag says what happens on parts that can switch a cache off, which sm_90 cannot.
fn check_flags(flags: u32) -> Result {
    if flags & !(sys::CUoccupancy_flags::CU_OCCUPANCY_DISABLE_CACHING_OVERRIDE as u32) != 0 {
        return invalid();
    }
    Ok(())
}

fn block_size(size: i32) -> Result<u32> {
    u32::try_from(size).ok().filter(|size| *size > 0).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
}

pub(crate) unsafe fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
    out: *mut i32,
    f: CUfunction,
    threads: i32,
    dynamic_shared_bytes: usize,
) -> Result {
    // SAFETY: `out` is the caller's out parameter.
    unsafe { cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(out, f, threads, dynamic_shared_bytes, 0) }
}

pub(crate) unsafe fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    out: *mut i32,
    f: CUfunction,
    threads: i32,
    dynamic_shared_bytes: usize,
    flags: u32,
) -> Result {
    context::current()?;
    check_flags(flags)?;
    let function = function::by_handle(f)?;
    let blocks = resident_blocks(&function, block_size(threads)?, dynamic_shared_bytes);
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, blocks.cast_signed()) }
}

pub(crate) unsafe fn cuOccupancyMaxPotentialBlockSize(
    grid_out: *mut i32,
    block_out: *mut i32,
    f: CUfunction,
    shared_of_block: CUoccupancyB2DSize,
    dynamic_shared_bytes: usize,
    limit: i32,
) -> Result {
    // SAFETY: the out parameters and the callback are the caller's.
    unsafe {
        cuOccupancyMaxPotentialBlockSizeWithFlags(
            grid_out,
            block_out,
            f,
            shared_of_block,
            dynamic_shared_bytes,
            limit,
            0,
        )
    }
}

pub(crate) unsafe fn cuOccupancyMaxPotentialBlockSizeWithFlags(
    grid_out: *mut i32,
    block_out: *mut i32,
    f: CUfunction,
    shared_of_block: CUoccupancyB2DSize,
    dynamic_shared_bytes: usize,
    limit: i32,
    flags: u32,
) -> Result {
    context::current()?;
    check_flags(flags)?;
    let function = function::by_handle(f)?;
    // 0 means no limit.
    let limit = match u32::try_from(limit) {
        Ok(0) => THREADS_PER_BLOCK,
        Ok(limit) => limit,
        Err(_) => return invalid(),
    };
    let shared_bytes = |threads: u32| match shared_of_block {
        // SAFETY: the caller's function takes a block size.
        Some(shared_of_block) => unsafe { shared_of_block(threads.cast_signed()) },
        None => dynamic_shared_bytes,
    };
    let (threads, blocks) = best_block(&function, limit, shared_bytes);
    let values = ((blocks * MULTIPROCESSORS).cast_signed(), threads.cast_signed());
    // SAFETY: both are the caller's out parameters.
    unsafe { write_both(grid_out, block_out, values) }
}

/// The largest block size that keeps most threads resident, and how many such blocks a multiprocessor has.
fn best_block(function: &Function, limit: u32, shared_bytes: impl Fn(u32) -> usize) -> (u32, u32) {
    let limit = limit.min(max_threads(function.code()));
    let mut best = (0, 0);
    for aligned in (1..=limit.div_ceil(WARP_SIZE)).rev().map(|warps| warps * WARP_SIZE) {
        let threads = aligned.min(limit);
        let blocks = resident_blocks(function, threads, shared_bytes(threads));
        if threads * blocks > best.0 * best.1 {
            best = (threads, blocks);
        }
    }
    best
}

pub(crate) unsafe fn cuOccupancyAvailableDynamicSMemPerBlock(
    out: *mut usize,
    f: CUfunction,
    blocks: i32,
    threads: i32,
) -> Result {
    context::current()?;
    let function = function::by_handle(f)?;
    let (blocks, threads) = (block_size(blocks)?, block_size(threads)?);
    // Without any shared memory the other limits already have to allow as many blocks.
    if resident_blocks(&function, threads, 0) < blocks {
        return invalid();
    }
    let code = function.code();
    let share = SHARED_BYTES_PER_MULTIPROCESSOR as usize / blocks as usize / SHARED_GRANULARITY_BYTES
        * SHARED_GRANULARITY_BYTES;
    let block_bytes =
        share.saturating_sub(RESERVED_SHARED_BYTES as usize).min(SHARED_BYTES_PER_BLOCK_OPTIN as usize);
    let dynamic_bytes = block_bytes.saturating_sub(code.static_shared_bytes as usize);
    let allowed = function.settings().max_dynamic_shared_bytes(code) as usize;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, dynamic_bytes.min(allowed)) }
}

/// The largest cluster that the function may be launched with.
pub(crate) unsafe fn cuOccupancyMaxPotentialClusterSize(
    out: *mut i32,
    f: CUfunction,
    config: *const sys::CUlaunchConfig,
) -> Result {
    context::current()?;
    let function = function::by_handle(f)?;
    // SAFETY: `config` is NULL or the caller's structure.
    let shape = unsafe { shape_of(config) }?;
    let threads = block_threads(shape.block)?;
    let blocks = match resident_blocks(&function, threads, shape.dynamic_shared_bytes as usize) {
        0 => 0,
        _ => function.settings().cluster_blocks_max(),
    };
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, blocks.cast_signed()) }
}

/// As if the multiprocessors were one pool: a real part, whose clusters must not cross the borders between its
/// groups of multiprocessors, may hold a few less.
pub(crate) unsafe fn cuOccupancyMaxActiveClusters(
    out: *mut i32,
    f: CUfunction,
    config: *const sys::CUlaunchConfig,
) -> Result {
    context::current()?;
    let function = function::by_handle(f)?;
    // SAFETY: `config` is NULL or the caller's structure.
    let shape = unsafe { shape_of(config) }?;
    let settings = function.settings();
    let dimensions =
        cluster(&shape, settings.required_cluster(function.code()), settings.cluster_blocks_max())?;
    let threads = block_threads(shape.block)?;
    let resident = resident_blocks(&function, threads, shape.dynamic_shared_bytes as usize);
    let clusters = resident * MULTIPROCESSORS / dimensions.iter().product::<u32>();
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, clusters.cast_signed()) }
}

/// The shape of a launch.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` for NULL, else as [`Attributes::read`].
///
/// # Safety
/// `config` is NULL or a structure with as many attributes as it says.
unsafe fn shape_of(config: *const sys::CUlaunchConfig) -> Result<Shape> {
    // SAFETY: the caller of this function vouches for it.
    let config = unsafe { config.as_ref() }.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    // SAFETY: as above.
    Ok(unsafe { Attributes::read(config) }?.shape(config))
}

fn block_threads(block: [u32; 3]) -> Result<u32> {
    let threads = block.iter().try_fold(1u32, |threads, size| threads.checked_mul(*size));
    threads.filter(|threads| *threads > 0).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand, from the limits of sm_90.
    #[test]
    fn each_limit_by_itself() {
        assert_eq!(blocks_by_warps(1024), 2);
        assert_eq!(blocks_by_warps(256), 8);
        assert_eq!(blocks_by_warps(33), 32);
        // 32 registers: 1024 a warp, 16 warps in each quarter.
        assert_eq!(blocks_by_registers(1024, 32), 2);
        // 40 registers: 1280 a warp, 12 warps in each quarter, 48 in all.
        assert_eq!(blocks_by_registers(256, 40), 6);
        assert_eq!(blocks_by_registers(1024, 64), 1);
        // 65 registers are rounded to 2304 a warp: 32 warps want 73728.
        assert_eq!(blocks_by_registers(1024, 65), 0);
        // 233472 bytes in all, 1024 of each block's for the driver.
        assert_eq!(blocks_by_shared(0), 228);
        assert_eq!(blocks_by_shared(48 << 10), 4);
        assert_eq!(blocks_by_shared(100 << 10), 2);
        assert_eq!(blocks_by_shared(227 << 10), 1);
    }
}
