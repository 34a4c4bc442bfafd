//! The GPUs' device files, which the launcher holds open from the first preparation of a checkpoint in a job session to its
//! end.
//!
//! Without persistence mode the driver tears a GPU down that no process has open, with the memory that only exported
//! descriptors hold (open-gpu-kernel-modules, kernel-open/nvidia/nv.c and rmobjexportimport.c): parked memory would be
//! lost when the last process of the job has detached. It also saves the time to initialise the GPU again.
//!
//! Opening one is a call of the driver, which initialises the GPU, and may hang: it has a time limit.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use ckpt_snapshot::faults;
use crossbeam_channel::{Receiver, Sender};
use tracing::{debug, warn};

use super::STACK_BYTES;
use crate::sys::deadline::DEVICE_OPEN_TIMEOUT;

/// What the path of a GPU's device file begins with; a number follows.
const GPU_PREFIX: &str = "/dev/nvidia";

/// Open device files, by path.
pub(super) struct DeviceFiles {
    prefix: String,
    open: BTreeMap<PathBuf, File>,
    /// Those that have not opened in time. They are not tried again: a thread still waits for each.
    stuck: BTreeSet<PathBuf>,
    /// What the threads that open files send and report: also after the time limit.
    opened: (Sender<Opened>, Receiver<Opened>),
}

/// A path, and its file.
type Opened = (PathBuf, io::Result<File>);

impl Default for DeviceFiles {
    fn default() -> Self {
        let opened = crossbeam_channel::unbounded();
        Self { prefix: prefix(), open: BTreeMap::new(), stuck: BTreeSet::new(), opened }
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
        // Opened by the link: the process may have another mount namespace.
        let links = descriptors.flatten().map(|descriptor| descriptor.path());
        self.hold(links.filter_map(|link| Some((fs::read_link(&link).ok()?, link))), DEVICE_OPEN_TIMEOUT);
    }

    /// Opens all GPUs that the launcher may use.
    pub fn hold_all(&mut self) {
        let parent = Path::new(&self.prefix).parent().map(Path::to_owned).unwrap_or_default();
        let entries = fs::read_dir(parent).into_iter().flatten().flatten();
        self.hold(entries.map(|entry| (entry.path(), entry.path())), DEVICE_OPEN_TIMEOUT);
    }

    /// Whether no GPU is held.
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Opens those files that are GPUs, all at the same time, by their links.
    fn hold(&mut self, files: impl Iterator<Item = (PathBuf, PathBuf)>, limit: Duration) {
        while let Ok(late) = self.opened.1.try_recv() {
            self.stuck.remove(&late.0);
            self.keep(late);
        }
        let is_known = |path: &PathBuf| self.open.contains_key(path) || self.stuck.contains(path);
        let mut wanted: BTreeMap<_, _> =
            files.filter(|(path, _)| self.is_gpu(path) && !is_known(path)).collect();
        let until = Instant::now() + limit;
        wanted.retain(|path, link| {
            let (sender, path, link) = (self.opened.0.clone(), path.clone(), link.clone());
            let work = move || drop(sender.send((path, open(&link))));
            let thread = thread::Builder::new().name("device-file".to_owned()).stack_size(STACK_BYTES);
            let spawned = thread.spawn(work);
            spawned.inspect_err(|error| debug!(%error, "no thread to open a GPU's device file")).is_ok()
        });
        while !wanted.is_empty()
            && let Ok(opened) = self.opened.1.recv_deadline(until)
        {
            wanted.remove(&opened.0);
            self.keep(opened);
        }
        for path in wanted.into_keys() {
            warn!(
                "{} has not opened within {} s: its driver may hang. Without persistence mode, memory of this GPU is lost while no process has it open",
                path.display(),
                limit.as_secs_f64()
            );
            self.stuck.insert(path);
        }
    }

    fn keep(&mut self, (path, result): Opened) {
        match result {
            Ok(file) => drop(self.open.insert(path, file)),
            Err(error) => debug!(path = %path.display(), %error, "a GPU's device file cannot be held open"),
        }
    }

    /// `/dev/nvidia0`, but not `/dev/nvidiactl` or `/dev/nvidia-uvm`.
    fn is_gpu(&self, path: &Path) -> bool {
        let number = path.to_str().and_then(|path| path.strip_prefix(&self.prefix));
        number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
    }
}

fn open(link: &Path) -> io::Result<File> {
    faults::hit("device-file")?;
    OpenOptions::new().read(true).write(true).open(link)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(prefix: PathBuf) -> DeviceFiles {
        let prefix = prefix.into_os_string().into_string().expect("text");
        DeviceFiles { prefix, ..DeviceFiles::default() }
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
