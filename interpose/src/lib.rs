//! libckpt_interpose.so: what ckpt-run preloads into every process of the job.
//!
//! | module | does |
//! |---|---|
//! | `auto` | hands the first process of a container over to ckpt-run (`CKPT_AUTO`) |
//! | `agent` | the thread that answers the launcher, and its life over checkpoint, restore and fork |
//! | `cuda` | stands in front of the CUDA driver and of NCCL, and takes the driver's state off the GPU for a dump |
//! | `exec` | keeps programs in the job that are started with another environment |
//! | `link` | what others may ask of the launcher in the agent's conversation |
//! | `socket` | its connection: out of the application's way, and never mistaken for the application's own |
//! | `fork` | keeps `fork` and the agent's descriptors apart |
//! | `process` | what a process can say of itself without `std::env` |
//!
//! The library must not disturb the program. It exports only names of the driver, of NCCL, NVML and CUPTI, `dlsym`
//! and the exec family. It prints nothing (except why a hand-over failed), handles no signal and leaves the low descriptor numbers
//! to the application. If anything fails, it becomes inactive and the job runs as it would have run alone. It does
//! nothing without [`ckpt_protocol::agent::SOCKET_VARIABLE`] and [`ckpt_protocol::agent::AUTO_VARIABLE`] in the
//! environment, or in a program that runs with more rights than its user (`AT_SECURE`).

#[cfg(panic = "abort")]
compile_error!("a panic in here must never end the job: build the interposer with unwinding");

mod agent;
mod auto;
mod cuda;
mod exec;
mod fork;
mod launcher;
mod link;
mod process;
mod socket;

use std::panic::{catch_unwind, set_hook};

use ckpt_protocol::agent::SOCKET_VARIABLE;

// SAFETY: the C library is initialised before constructors of preloaded libraries run, and of Rust's
// standard library only parts are used that need no set-up of their own (no std::env, no std::thread's
// handles, no standard streams).
#[ctor::ctor(unsafe)]
fn construct() {
    // Nothing in there is known to panic; this is for unknown bugs.
    let _ = catch_unwind(begin);
}

/// Starts the agent if the launcher asked for one.
fn begin() {
    if process::is_privileged() {
        return;
    }
    // This library has a standard library of its own, so the hook sees our panics only, none of a program
    // that is written in Rust too. The default one would write to the job's stderr.
    set_hook(Box::new(|_| {}));
    let Some(path) = process::variable(SOCKET_VARIABLE.as_bytes()) else { return auto::hand_over() };
    let Some(address) = socket::Address::new(path) else { return };
    cuda::nccl::interface::choose();
    cuda::activate();
    exec::follow(path);
    agent::install(address);
}
