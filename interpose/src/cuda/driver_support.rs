//! Whether the driver supports checkpoints.
//!
//! The process checkpoints itself with cuCheckpointProcess* of NVIDIA's driver 570 (CUDA 12.8). Drivers from 550 on
//! can only be checkpointed by a separate program (`cuda-checkpoint`), which is not used: see docs/design/gpu.md.

use std::ffi::c_int;

use thiserror::Error;

use super::entry_points::{self, Index};
use super::{driver, real};

/// The first version that has the calls, as cuDriverGetVersion gives it.
const FIRST_VERSION: c_int = 12080;

/// What taking the state off and bringing it back takes.
const CALLS: [Index; 4] = [
    Index::cuCheckpointProcessLock,
    Index::cuCheckpointProcessCheckpoint,
    Index::cuCheckpointProcessRestore,
    Index::cuCheckpointProcessUnlock,
];

/// The version of NVIDIA's kernel module, where one is loaded.
const MODULE_VERSION: &str = "/sys/module/nvidia/version";

/// The driver has no support for checkpoints.
#[derive(Debug, Error)]
#[error("{driver} {lack}")]
pub struct UnsupportedDriver {
    driver: String,
    lack: Lack,
}

#[derive(Debug, Error)]
enum Lack {
    #[error(
        "has no {0}: to save a process that uses a GPU, NVIDIA's driver 570 (CUDA 12.8) or newer is needed"
    )]
    Call(&'static str),
    #[error("does not support it here")]
    Support,
}

impl UnsupportedDriver {
    fn new(lack: Lack) -> Self {
        let module = std::fs::read_to_string(MODULE_VERSION).ok();
        Self { driver: describe_driver(module.as_deref(), cuda_version()), lack }
    }

    /// The driver has the calls and answers that it does not support them.
    pub fn refused() -> Self {
        Self::new(Lack::Support)
    }
}

/// Checks that the driver has the calls.
///
/// # Errors
/// It lacks one.
pub(super) fn check() -> Result<(), UnsupportedDriver> {
    let is_too_old = cuda_version().is_some_and(|version| version < FIRST_VERSION);
    let mut calls = CALLS.into_iter().map(|index| index as usize);
    let missing = calls.find(|index| is_too_old || real::address(*index).is_null());
    match missing {
        Some(index) => {
            Err(UnsupportedDriver::new(Lack::Call(entry_points::name(index).to_str().unwrap_or_default())))
        }
        None => Ok(()),
    }
}

/// `the driver 550.54.15 (CUDA 12.4)`, as much of it as is known.
fn describe_driver(module: Option<&str>, cuda: Option<c_int>) -> String {
    let module = module.map(str::trim).filter(|version| !version.is_empty());
    let module = module.map_or_else(String::new, |version| format!(" {version}"));
    // 1000 times the major version and ten times the minor one (CUDA driver API reference, cuDriverGetVersion).
    let cuda = cuda.map_or_else(String::new, |cuda| format!(" (CUDA {}.{})", cuda / 1000, cuda % 1000 / 10));
    format!("the driver{module}{cuda}")
}

fn cuda_version() -> Option<c_int> {
    // SAFETY: the call writes to a local variable.
    let version = driver::ask(0, |version| unsafe { driver::cuDriverGetVersion(version) });
    version.ok().filter(|version| *version > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_much_is_told_as_is_known() {
        assert_eq!(describe_driver(Some("550.54.15\n"), Some(12040)), "the driver 550.54.15 (CUDA 12.4)");
        assert_eq!(describe_driver(None, Some(13010)), "the driver (CUDA 13.1)");
        assert_eq!(describe_driver(Some(" "), None), "the driver");
    }
}
