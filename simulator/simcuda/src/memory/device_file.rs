//! The devices' files, as long as this process has its driver state.
//!
//! When the last process closes a device, a real one is torn down, with all memory that is held by exported descriptors
//! only, unless persistence mode is on (open-gpu-kernel-modules, kernel-open/nvidia/nv.c and rmobjexportimport.c). A
//! killed process cannot do that itself, so it is made up for when the file is opened again.

use std::fs::File;
use std::io;

use super::ledger::{self, DeviceMemory};

/// The files of all devices, closed when dropped.
pub(crate) struct DeviceFiles(Vec<(&'static DeviceMemory, Option<File>)>);

impl DeviceFiles {
    /// Opens them.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn open() -> io::Result<Self> {
        let open = |device: &&'static DeviceMemory| Ok((*device, Some(device.open_file_of_device()?)));
        Ok(Self(ledger::devices().iter().map(open).collect::<io::Result<_>>()?))
    }
}

impl Drop for DeviceFiles {
    fn drop(&mut self) {
        for (device, file) in &mut self.0 {
            device.close_file_of_device(file.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use simcuda_machine::config::Config;

    use super::*;

    fn device(directory: &Path, is_persistent: bool) -> DeviceMemory {
        let config = Config::from_environment().unwrap();
        let config = Config { directory: directory.to_owned(), is_persistent, ..config };
        DeviceMemory::open(&config, &config.gpus().unwrap()[0]).unwrap()
    }

    /// Whether memory that only a descriptor holds is there after the last process has closed the device.
    fn outlives_its_openers(is_persistent: bool) -> bool {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let device = device(directory.path(), is_persistent);
        let (first, second) = (device.open_file_of_device().unwrap(), device.open_file_of_device().unwrap());
        let (id, _descriptor) = device.create(4096, 1).unwrap();
        device.close_file_of_device(Some(first));
        assert!(device.open_segment(id).is_ok(), "another process has the device open");
        device.close_file_of_device(Some(second));
        let is_there = device.open_segment(id).is_ok();
        assert_eq!(device.used_bytes().unwrap(), if is_there { 4096 } else { 0 });
        is_there
    }

    #[test]
    fn persistence_mode_keeps_memory_that_no_process_holds() {
        assert!(outlives_its_openers(true));
        assert!(!outlives_its_openers(false));
    }

    /// A process that is killed does not tear the device down itself.
    #[test]
    fn what_a_killed_process_left_is_gone_when_the_device_is_opened_again() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let device = device(directory.path(), false);
        let killed = device.open_file_of_device().unwrap();
        let (id, _descriptor) = device.create(4096, 1).unwrap();
        drop(killed);
        let _again = device.open_file_of_device().unwrap();
        assert!(device.open_segment(id).is_err());
    }
}
