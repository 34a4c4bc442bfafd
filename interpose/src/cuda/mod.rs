//! Interception of the CUDA driver.
//!
//! | module | does |
//! |---|---|
//! | `activation`, `init` | whether the library is active; cuInit, from which on it takes part |
//! | `entry_points`, `exports` | the index of entry points; one exported function for each |
//! | `handler`, `handlers` | the signature of a handler; which call has which handler |
//! | `hooks`, `proc_address` | `dlsym` and cuGetProcAddress, by which programs find the driver's functions |
//! | `real`, `substitute` | the driver's functions; which exported function replaces which of them |
//! | `libc_symbols`, `elf` | the C library's `dlsym`; symbols of a loaded library without it |
//! | `unknown_entry_points`, `bypass` | calls that the library does not see |
//! | `driver`, `result` | our own calls of the driver, and their results |
//! | `shared` | state behind a lock |
//! | `driver_support`, `gpus` | whether the driver supports checkpoints; the GPUs behind the devices |
//! | `gate`, `cold_call`, `launch` | keeps calls out during a checkpoint, at almost no cost otherwise |
//! | `activity` | GPU activity, for the hang detection |
//! | `device_files`, `device_modes` | the driver's device files, held by NVML alone or inherited by a fork; MIG and MPS |
//! | `context`, `objects`, `stream_capture` | contexts, objects and stream captures of the program |
//! | `taint`, `sticky` | state that cannot be saved; errors after which every call fails |
//! | `memory` | device memory: allocation, bookkeeping, offload and restore |
//! | `capture` | copies device memory to the launcher's mirror and back |
//! | `address_space` | keeps the driver's addresses free while it is checkpointed |
//! | `checkpoint` | detaches the process from the GPU and attaches it again |
//! | `nccl` | interception of NCCL, whose ranks stop at a consistent cut |
//! | `libraries` | interception of NVML and CUPTI |
//! | `changes` | what may change whether the driver supports a checkpoint |
//! | `faults` | named fault points for tests |
//!
//! Nothing here calls the driver before the program does: the process takes part from its first cuInit on.

#![allow(non_snake_case, reason = "entry points carry the driver's names")]
#![allow(clippy::too_many_arguments, reason = "entry points have the driver's parameters")]
#![cfg_attr(test, allow(dead_code, reason = "tests export nothing, so that nothing counts as reached"))]

mod activation;
pub mod activity;
mod address_space;
mod bypass;
mod capture;
mod changes;
mod checkpoint;
mod cold_call;
mod context;
mod device_files;
mod device_modes;
mod driver;
mod driver_support;
pub mod elf;
mod entry_points;
pub mod exports;
mod faults;
mod gate;
mod gpus;
mod handler;
mod handlers;
pub mod hooks;
mod init;
mod launch;
mod libc_symbols;
mod libraries;
mod memory;
pub mod nccl;
mod objects;
mod proc_address;
mod real;
mod result;
mod shared;
mod sticky;
mod stream_capture;
mod substitute;
mod taint;
#[cfg(test)]
mod testing;
mod thread_word;
mod unknown_entry_points;

#[cfg(test)]
pub use capture::CaptureError;
#[cfg(test)]
pub use checkpoint::{AttachError, DetachError};
pub use checkpoint::{Delivered, Gpu, MirrorNeeds, ProcessGpu, Request};

/// Lets the library stand in front of the driver: from the constructor.
pub fn activate() {
    #[cfg(feature = "faults")]
    {
        faults::arm();
        device_files::arm();
    }
    libraries::cupti::activate();
    capture::activate();
    memory::activate();
    context::on_removal(context::OnRemoval {
        contents_removed: |context| {
            memory::context_removed(context);
            objects::context_removed(context);
        },
        code_removed: capture::forget,
    });
    gate::prepare();
    activation::activate();
}

/// In the child of a fork.
pub fn after_fork_in_child() {
    if activation::may_have_files() {
        device_files::replace_in_child();
    }
    gate::after_fork_in_child();
    checkpoint::after_fork_in_child();
    nccl::after_fork_in_child();
    memory::after_fork_in_child();
    activation::after_fork_in_child();
}
