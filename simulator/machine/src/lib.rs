//! The simulated machine, as the simulated driver and the simulated NVML both see it: its settings, its devices' files
//! and identities, and what makes CRIU refuse a process that has a device open.

pub mod config;
mod counters;
pub mod device_file;
mod dump_blockers;
mod mapping;

use std::path::{Path, PathBuf};

pub use counters::Counters;
pub use dump_blockers::DumpBlockers;
pub use mapping::Mapping;

/// The name of every device.
pub const DEVICE_NAME: &str = "SimCUDA Device sm_90";

/// The name of the file in a device's directory that counts its memory, see [`Counters`].
pub const LEDGER: &str = "ledger";

const FIRST_BUS: i32 = 0x10;

/// The number of a device's bus: PCI domain 0, a bus of its own, device 0.
#[must_use]
pub fn bus(ordinal: i32) -> i32 {
    FIRST_BUS + ordinal
}

/// The directory of a device's memory.
#[must_use]
pub fn device_directory(machine: &Path, ordinal: usize) -> PathBuf {
    machine.join(format!("device{ordinal}"))
}

/// A device's UUID: the same in every process that shares the device, another one for each device.
#[must_use]
pub fn uuid(machine: &Path, ordinal: usize) -> [u8; 16] {
    // However the directory is spelt, it is the same device.
    let canonical = machine.canonicalize();
    let mut hasher = blake3::Hasher::new();
    hasher.update(canonical.as_deref().unwrap_or(machine).as_os_str().as_encoded_bytes());
    hasher.update(&[0]);
    hasher.update(&(ordinal as u64).to_le_bytes());
    let hash = hasher.finalize();
    *hash.as_bytes().first_chunk().expect("a hash has 32 bytes")
}
