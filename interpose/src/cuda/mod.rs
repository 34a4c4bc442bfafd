//! In front of the CUDA driver.
//!
//! | module | does |
//! |---|---|
//! | `exports` | one exported function for each row of the table of entry points |
//! | `hooks`, `proc_address` | the other two ways in which programs find the driver's functions |
//! | `real` | where the driver's own functions are |
//! | `handlers` | what is done with a call beside passing it on |
//! | `gate` | keeps calls out while the process is being saved |
//! | `activity` | what the program does with the GPU, for a watchdog |
//! | `track`, `taint` | state that has to be known; state that nobody can save |
//! | `nccl` | in front of NCCL, whose communicators cannot be saved yet |
//! | `sticky` | errors after which every call fails |
//! | `newer` | entry points that a newer driver has |
//! | `checkpoint` | takes the driver's state off the GPU and brings it back |
//! | `holes` | keeps the addresses of the device free while the driver is away |
//! | `able` | whether the driver can be checkpointed at all |
//! | `bypass` | finds a driver that is in use past this library |
//! | `elf` | symbols of a loaded library, without dlsym |
//! | `aside` | rare calls out of the paths that every call takes |
//! | `context` | the program's contexts |
//! | `capture` | device memory to the launcher's mirror, and back |
//! | `memory` | device memory: served, known, taken off the device and brought back |
//! | `driver` | calls of the driver by ourselves |
//! | `faults` | named fault points for tests |
//!
//! Nothing here calls the driver before the program has: the process takes part from its first cuInit on.

#![allow(non_snake_case, reason = "entry points carry the driver's names")]
#![allow(clippy::too_many_arguments, reason = "entry points have the driver's parameters")]
#![cfg_attr(test, allow(dead_code, reason = "tests export nothing, so that nothing counts as reached"))]

mod able;
pub mod activity;
mod aside;
mod bypass;
mod capture;
mod checkpoint;
mod context;
mod driver;
pub mod elf;
pub mod exports;
mod faults;
mod gate;
mod handlers;
mod holes;
pub mod hooks;
mod memory;
pub mod nccl;
mod newer;
mod objects;
mod proc_address;
mod real;
mod sticky;
mod taint;
#[cfg(test)]
mod testing;
mod track;

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use cuda_abi::types::CUresult;

pub use checkpoint::{Delivered, Gpu, Refusal};

const SUCCESS: CUresult = 0;

/// Whether there is a launcher to work for.
static ACTIVE: AtomicBool = AtomicBool::new(false);
/// Whether the program has initialised the driver.
static STARTED: AtomicBool = AtomicBool::new(false);

/// Lets the library stand in front of the driver: from the constructor.
pub fn activate() {
    #[cfg(feature = "faults")]
    faults::arm();
    capture::activate();
    memory::origin::activate();
    gate::prepare();
    ACTIVE.store(true, Relaxed);
}

/// The program is about to initialise the driver, which maps nothing before.
fn starting() {
    if ACTIVE.load(Relaxed) {
        holes::prepare();
    }
}

fn started() {
    STARTED.store(ACTIVE.load(Relaxed), Relaxed);
}

/// Whether the program uses the driver, and somebody may want to save it. Otherwise calls are passed on and no more.
fn is_started() -> bool {
    STARTED.load(Relaxed)
}

/// In the child of a fork. A driver that the parent had initialised does not work in the child, so there is
/// nothing to save in it.
pub fn after_fork_in_child() {
    gate::after_fork_in_child();
    checkpoint::after_fork_in_child();
    STARTED.store(false, Relaxed);
}
