//! Releases of NVIDIA's driver, as far as programs and checkpoints see a difference.
//!
//! | release | CUDA | checkpoints (release notes in NVIDIA/cuda-checkpoint's README; CUDA driver API reference) |
//! |---|---|---|
//! | 550 | 12.4 | by the program `cuda-checkpoint` only, which is not simulated: there are no calls |
//! | 570 | 12.8 | cuCheckpointProcess…; a restore takes the GPUs of the same indices |
//! | 575 | 12.9 | the same |
//! | 580 | 13.0 | pairs of GPUs (`gpuPairs`) |
//! | 590 | 13.1 | the same; jobs (`cuda-checkpoint --launch-job`), which are not simulated |
//! | 610 | 13.3 | the same; memory shared by CUDA IPC, in such jobs only |

/// A release of the driver.
#[derive(Debug, PartialEq, Eq)]
pub struct Release {
    /// What `SIMCUDA_DRIVER` calls it.
    pub branch: u32,
    /// cuDriverGetVersion's answer.
    pub cuda_version: i32,
    /// NVML's answer.
    pub version: &'static str,
}

/// The releases, the oldest first.
pub const RELEASES: [Release; 6] = [
    Release { branch: 550, cuda_version: 12040, version: "550.163.01" },
    Release { branch: 570, cuda_version: 12080, version: "570.158.01" },
    Release { branch: 575, cuda_version: 12090, version: "575.57.08" },
    DEFAULT,
    Release { branch: 590, cuda_version: 13010, version: "590.48.01" },
    Release { branch: 610, cuda_version: 13030, version: "610.57.04" },
];

const DEFAULT: Release = Release { branch: 580, cuda_version: 13000, version: "580.95.05" };

/// The first release that behaves as 580.159.04 was seen to; earlier ones behave as is reported of them.
const FIRST_AS_SEEN: u32 = 580;

/// The first release whose restore takes pairs of GPUs.
const FIRST_WITH_PAIRS: u32 = 580;

impl Release {
    /// The release that `SIMCUDA_DRIVER` names.
    ///
    /// # Errors
    /// Says what is wrong with the variable.
    pub fn from_environment() -> Result<&'static Self, String> {
        let found = |text: &str| {
            let branch = text.parse().ok()?;
            RELEASES.iter().find(|release| release.branch == branch)
        };
        crate::config::variable("SIMCUDA_DRIVER", &DEFAULT, found)
    }

    /// Whether it behaves as release 580 was seen to on a GPU: its lock needs no context, a checkpoint leaves
    /// placeholders in the address ranges, and takes memory that was exported by CUDA IPC, of which only the restore fails.
    #[must_use]
    pub fn is_as_seen(&self) -> bool {
        self.branch >= FIRST_AS_SEEN
    }

    /// Whether a restore takes pairs of GPUs.
    #[must_use]
    pub fn has_pairs(&self) -> bool {
        self.branch >= FIRST_WITH_PAIRS
    }
}
