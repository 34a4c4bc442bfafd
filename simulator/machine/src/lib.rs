//! The simulated machine, as the simulated driver and the simulated NVML both see it: its settings, its devices' files
//! and identities, and what makes CRIU refuse a process that has a device open.

pub mod config;
mod counters;
pub mod device_file;
mod dump_blockers;
pub mod faults;
mod gpu;
mod ledger;
mod mapping;
mod release;
mod turns;

pub use counters::Counters;
pub use dump_blockers::DumpBlockers;
pub use gpu::{Gpu, visible};
pub use ledger::{Ledger, TRAILER_BYTES, own_directory, under_lock};
pub use mapping::Mapping;
pub use release::Release;
pub use turns::{Turn, Turns};

const FIRST_BUS: usize = 0x10;

/// The number of a GPU's bus: PCI domain 0, a bus of its own, device 0.
#[must_use]
pub fn bus(id: usize) -> i32 {
    i32::try_from(FIRST_BUS + id).unwrap_or(i32::MAX)
}
