//! How much of a device is in use, and what happens to the memory of processes that have ended.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use simcuda_machine::config::Config;

use super::*;
use crate::memory::ledger::DeviceMemory;

const CAPACITY_BYTES: u64 = 8 * PAGE;

fn open(machine: &Path) -> std::io::Result<DeviceMemory> {
    let config = Config::from_environment().unwrap();
    let config = Config {
        directory: machine.to_owned(),
        memory_bytes: CAPACITY_BYTES,
        is_persistent: false,
        ..config
    };
    DeviceMemory::open(&config, &config.gpus().unwrap()[0])
}

fn device(machine: &Path) -> DeviceMemory {
    open(machine).unwrap()
}

#[test]
fn memory_is_shared_by_all_who_open_the_device() {
    let directory = tempfile::tempdir().unwrap();
    let (one, other) = (device(directory.path()), device(directory.path()));
    let (first, held) = one.create(5 * PAGE, 0).unwrap();
    assert_eq!(other.used_bytes(), Ok(5 * PAGE));
    let refused = other.create(4 * PAGE, 0).map(|(id, _)| id);
    assert_eq!(refused, Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
    let (second, _held) = other.create(3 * PAGE, 0).unwrap();
    assert_ne!(first, second);
    drop(held);
    one.release(first);
    assert_eq!(other.used_bytes(), Ok(3 * PAGE));
}

#[test]
fn a_segment_lives_while_anybody_holds_it() {
    let directory = tempfile::tempdir().unwrap();
    let memory = device(directory.path());
    let (id, held) = memory.create(PAGE, 1).unwrap();
    let (trailer, exported) = memory.open_segment(id).unwrap();
    assert_eq!((trailer.id, trailer.size_bytes, trailer.handle_types), (id, PAGE, 1));
    assert!(memory.is_segment(id, &exported));
    drop(held);
    memory.release(id);
    assert_eq!(memory.used_bytes(), Ok(PAGE), "the exported descriptor holds it");
    drop(exported);
    assert_eq!(memory.used_bytes(), Ok(0), "the next reader frees it");
    assert_eq!(memory.open_segment(id).map(|_| ()), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
}

#[test]
fn what_a_crash_leaves_is_reused() {
    let directory = tempfile::tempdir().unwrap();
    let memory = device(directory.path());
    let (_, dead) = memory.create(CAPACITY_BYTES, 0).unwrap();
    drop(dead);
    // A new segment does not fail before the dead are counted out.
    let (_, _alive) = memory.create(CAPACITY_BYTES - PAGE, 0).unwrap();
    // The ledger lost, cut short and wrong: the files count.
    for damage in [&b""[..], b"SIMLEDG1", &[0xff; 24]] {
        std::fs::write(directory.path().join("device0/ledger"), damage).unwrap();
        assert_eq!(memory.used_bytes(), Ok(CAPACITY_BYTES - PAGE));
        let (id, held) = memory.create(PAGE, 0).unwrap();
        drop(held);
        memory.release(id);
    }
}

#[test]
fn a_directory_that_is_not_the_user_s_is_refused() {
    let refused = |prepare: &dyn Fn(&Path)| {
        let machine = tempfile::tempdir().unwrap();
        prepare(&machine.path().join("device0"));
        assert!(open(machine.path()).is_err());
    };
    let elsewhere = tempfile::tempdir().unwrap();
    refused(&|path| std::os::unix::fs::symlink(elsewhere.path(), path).unwrap());
    refused(&|path| std::fs::write(path, "").unwrap());
    // SAFETY: geteuid has no preconditions.
    if unsafe { libc::geteuid() } == 0 {
        refused(&|path| {
            std::fs::create_dir(path).unwrap();
            std::os::unix::fs::chown(path, Some(12345), None).unwrap();
        });
    }
}

#[test]
fn a_segment_whose_trailer_is_damaged_is_not_opened() {
    let directory = tempfile::tempdir().unwrap();
    let memory = device(directory.path());
    let (id, held) = memory.create(PAGE, 0).unwrap();
    held.write_all_at(b"?", PAGE + 9).unwrap();
    assert_eq!(memory.open_segment(id).map(|_| ()), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    held.set_len(10).unwrap();
    assert_eq!(memory.open_segment(id).map(|_| ()), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    let other: File = tempfile::tempfile().unwrap();
    assert!(!memory.is_segment(id, &other));
}
