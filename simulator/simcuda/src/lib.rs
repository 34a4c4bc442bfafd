//! A simulation of NVIDIA's `libcuda.so.1` that runs PTX on the CPU.
//!
//! It exists so that every path of ckpt-run that touches a GPU can be built, tested and fault-injected on a
//! machine without one. It is strict where the real driver is strict: device memory cannot be touched by the
//! host, work is asynchronous, the checkpoint API has the real one's rules and hazards. simulator/README.md says
//! what is simulated and what is not.
//!
//! A call comes in through `exports` (expanded from the table in `cuda-abi`), passes `entry` (trace, fault
//! injection, the checkpoint lock) and reaches its handler through `dispatch`, which names every handler
//! that exists; what has none answers `CUDA_ERROR_NOT_SUPPORTED`.

#![allow(non_snake_case, reason = "entry points carry the driver's names")]
#![allow(clippy::too_many_arguments, reason = "entry points have the driver's parameters")]
#![cfg_attr(test, allow(dead_code, reason = "tests export nothing, so that nothing counts as reached"))]

mod checkpoint;
mod context;
mod device;
mod dispatch;
mod entry;
mod error;
mod exports;
mod faults;
mod graph;
mod handle;
mod memory;
mod module;
mod proc_address;
mod process;
mod stream;
#[cfg(test)]
mod testing;
mod transfer;
