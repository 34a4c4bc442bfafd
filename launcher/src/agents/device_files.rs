//! The GPUs' device files, which the launcher holds open from the first detach of a job session to its end.
//!
//! Without persistence mode the driver tears a GPU down that no process has open, with the memory that only exported
//! descriptors hold (open-gpu-kernel-modules, kernel-open/nvidia/nv.c and rmobjexportimport.c): parked memory would be
//! lost when the last process of the job has detached. It also saves the time to initialise the GPU again.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};

use tracing::debug;

/// What the path of a GPU's device file begins with; a number follows.
const GPU_PREFIX: &str = "/dev/nvidia";

/// Open device files, by path.
pub(super) struct DeviceFiles {
    prefix: String,
    open: BTreeMap<PathBuf, File>,
}

impl Default for DeviceFiles {
    fn default() -> Self {
        Self { prefix: prefix(), open: BTreeMap::new() }
    }
}

/// [`GPU_PREFIX`], or that of a simulated GPU: `CKPT_TEST_DEVICE_FILES` begins with it.
fn prefix() -> String {
    #[cfg(feature = "faults")]
    if let Ok(simulated) = std::env::var("CKPT_TEST_DEVICE_FILES") {
        return simulated.split(',').next().unwrap_or_default().to_owned();
    }
    GPU_PREFIX.to_owned()
}

impl DeviceFiles {
    /// Opens the GPUs that a process has open.
    pub fn hold_those_of(&mut self, host_pid: u32) {
        let Ok(descriptors) = fs::read_dir(format!("/proc/{host_pid}/fd")) else { return };
        for descriptor in descriptors.flatten() {
            // Opened by the link: the process may have another mount namespace.
            if let Ok(path) = fs::read_link(descriptor.path()) {
                self.hold(&path, &descriptor.path());
            }
        }
    }

    /// Opens all GPUs that the launcher may use.
    pub fn hold_all(&mut self) {
        let parent = Path::new(&self.prefix).parent().map(Path::to_owned).unwrap_or_default();
        for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
            self.hold(&entry.path(), &entry.path());
        }
    }

    /// Whether no GPU is held.
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    fn hold(&mut self, path: &Path, link: &Path) {
        if !self.is_gpu(path) || self.open.contains_key(path) {
            return;
        }
        match OpenOptions::new().read(true).write(true).open(link) {
            Ok(file) => drop(self.open.insert(path.to_owned(), file)),
            Err(error) => debug!(path = %path.display(), %error, "a GPU's device file cannot be held open"),
        }
    }

    /// `/dev/nvidia0`, but not `/dev/nvidiactl` or `/dev/nvidia-uvm`.
    fn is_gpu(&self, path: &Path) -> bool {
        let number = path.to_str().and_then(|path| path.strip_prefix(&self.prefix));
        number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(prefix: PathBuf) -> DeviceFiles {
        let prefix = prefix.into_os_string().into_string().expect("text");
        DeviceFiles { prefix, open: BTreeMap::new() }
    }

    #[test]
    fn only_gpus_are_held() {
        let directory = tempfile::tempdir().expect("a directory");
        let at = |name: &str| directory.path().join(name);
        let mine: Vec<_> = ["nvidia0", "nvidia12", "nvidiactl", "nvidia-uvm", "nvidia", "other0"]
            .map(|name| File::create(at(name)).expect("a file"))
            .into();
        let gpus = [at("nvidia0"), at("nvidia12")];
        let mut held = files(at("nvidia"));
        held.hold_all();
        assert!(held.open.keys().eq(&gpus));
        let mut held = files(at("nvidia"));
        held.hold_those_of(std::process::id());
        assert!(held.open.keys().eq(&gpus));
        drop(mine);
        assert_eq!(files(PathBuf::from(GPU_PREFIX)).prefix, "/dev/nvidia");
    }
}
