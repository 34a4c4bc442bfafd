//! Device memory that the interposer serves is, for all that a program can see of it, memory of the driver. Each part
//! of the program runs without the interposer and with it, and says the same.

mod common;

use std::path::PathBuf;
use std::process::Output;
use std::sync::LazyLock;

use common::program::{self, said};

static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| program::program("memory"));

/// Runs a part of the program on two devices.
fn run(part: &[&str], is_interposed: bool, settings: &[(&str, &str)]) -> Output {
    program::run(&PROGRAM, part, is_interposed, &[&[("SIMCUDA_DEVICES", "2")], settings].concat())
}

/// What a part says, which is the same both times.
fn both(part: &str, settings: &[(&str, &str)]) -> String {
    let plain = said(&run(&[part], false, settings));
    let interposed = said(&run(&[part], true, settings));
    assert_eq!(interposed, plain, "first with the interposer, then without");
    assert!(!plain.is_empty());
    plain
}

/// How many bytes of device memory a hundred thousand allocations took.
fn used_by_many(is_interposed: bool) -> u64 {
    let output = run(&["many", "100000"], is_interposed, &[("SIMCUDA_MEMORY", "64GiB")]);
    said(&output);
    String::from_utf8_lossy(&output.stderr).trim().parse().expect("a number")
}

#[test]
fn a_hundred_thousand_allocations_live_apart_and_take_no_more_memory() {
    let plain = used_by_many(false);
    let interposed = used_by_many(true);
    assert!(interposed <= plain + plain / 100, "{interposed} bytes with the interposer, {plain} without");
}

#[test]
fn threads_do_not_get_each_others_memory() {
    both("threads", &[]);
}

#[test]
fn every_attribute_is_that_of_the_drivers_own_memory() {
    both("attributes", &[]);
}

#[test]
fn errors_and_pitches_are_the_drivers() {
    both("errors", &[]);
}

#[test]
fn memory_ends_where_the_drivers_ends() {
    both("full", &[("SIMCUDA_MEMORY", "102MiB")]);
    both("full", &[("SIMCUDA_MEMORY", "4GiB")]);
}

#[test]
fn all_of_a_device_can_be_the_arenas() {
    let settings = [("SIMCUDA_MEMORY", "514MiB"), ("SIMCUDA_TRACE", "1")];
    let output = run(&["full"], true, &settings);
    said(&output);
    let calls = String::from_utf8_lossy(&output.stderr);
    assert!(calls.contains("cuMemCreate = 2") && !calls.contains("cuMemAlloc_v2 = 0"), "{calls}");
}

#[test]
fn a_free_waits_for_the_work_of_the_memorys_context() {
    let text = both("waits", &[]);
    assert!(text.lines().all(|line| line.contains("allocation 0, after a free 1,")), "{text}");
}

#[test]
fn a_capture_forbids_what_it_forbids_the_driver() {
    let text = both("captures", &[]);
    assert!(text.contains(": 900, ends 901") && text.contains(": 0, ends 0"), "{text}");
}

#[test]
fn peer_access_holds_for_what_was_and_will_be_allocated() {
    let text = both("peers", &[]);
    let [before, enabled, .., disabled] = text.lines().collect::<Vec<_>>()[..] else { panic!("{text}") };
    assert_eq!(before, "step 0: 0; 0/3 0/3");
    assert_eq!(enabled, "step 1: 0; 3/3 3/3 3/3 3/3");
    assert_eq!(disabled, "step 5: 0; 0/3 0/3 0/3 0/3 0/3 0/3");
}

#[test]
fn the_child_of_a_fork_has_no_driver() {
    both("child", &[]);
}

/// The program gets its memory from the driver itself, or later, and nothing is left behind.
#[test]
fn what_the_driver_refuses_us_the_program_does_not_feel() {
    let calls = [
        "cuDeviceGetAttribute",
        "cuMemGetAllocationGranularity",
        "cuMemCreate",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
        "cuThreadExchangeStreamCaptureMode",
    ];
    for call in calls {
        for error in ["CUDA_ERROR_UNKNOWN", "CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_OUT_OF_MEMORY"] {
            for which in ["1", "2", "3", "5", "1+", "4+"] {
                let fault = format!("{call}:{which}={error}");
                let output = run(&["troubled"], true, &[("SIMCUDA_FAULT", &fault)]);
                assert!(output.status.success(), "{fault}: {}", String::from_utf8_lossy(&output.stdout));
            }
        }
    }
}
