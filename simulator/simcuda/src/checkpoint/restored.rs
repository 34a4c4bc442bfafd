//! With `SIMCUDA_KILL_RUINS=1`, killing a process that the driver has restored ruins the machine's devices for good: no
//! process can use them any more (cuda-checkpoint issue 53: the host hangs). A process that was checkpointed again, or
//! ends by exit(3), does no harm.
//!
//! The mark of a restored process is a file with a lock that ends with the process.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::time::SystemTime;

use rustix::fs::{FlockOperation, flock};
use simcuda_machine::config::Config;

const PREFIX: &str = "restored-";

/// The mark of this process, removed when dropped.
pub(super) struct Restored {
    path: PathBuf,
    _lock: File,
}

impl Restored {
    /// Marks this process, if the machine is one where that matters.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn mark(config: &Config) -> io::Result<Option<Self>> {
        static AT_EXIT: Once = Once::new();
        if !config.kill_ruins {
            return Ok(None);
        }
        let now = SystemTime::UNIX_EPOCH.elapsed().map_err(io::Error::other)?;
        let path = config.directory.join(format!("{PREFIX}{}-{}", std::process::id(), now.as_nanos()));
        let lock = File::create_new(&path)?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
        // SAFETY: the handler is a function of this library, which is never unloaded.
        AT_EXIT.call_once(|| unsafe {
            libc::atexit(at_exit);
        });
        Ok(Some(Self { path, _lock: lock }))
    }
}

impl Drop for Restored {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

extern "C" fn at_exit() {
    super::state::let_go();
}

/// Checks that no restored process was killed.
///
/// # Errors
/// One was.
pub(super) fn check(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if !entry.file_name().as_encoded_bytes().starts_with(PREFIX.as_bytes()) {
            continue;
        }
        // The process may remove its mark at this moment.
        let mark = File::open(entry.path());
        if mark.is_ok_and(|mark| flock(&mark, FlockOperation::NonBlockingLockShared).is_ok()) {
            return Err(io::Error::other("a process that was restored was killed: the devices are ruined"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_without_its_process_ruins_the_devices() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let config = Config::from_environment().unwrap();
        let config = Config { directory: directory.path().to_owned(), kill_ruins: true, ..config };
        let harmless = Config { kill_ruins: false, ..config.clone() };
        assert!(Restored::mark(&harmless).unwrap().is_none());
        let checkpointed = Restored::mark(&config).unwrap().unwrap();
        check(directory.path()).unwrap();
        drop(checkpointed);
        check(directory.path()).unwrap();
        let killed = Restored::mark(&config).unwrap().unwrap();
        flock(&killed._lock, FlockOperation::Unlock).unwrap();
        assert!(check(directory.path()).is_err());
    }
}
