//! Stream-ordered allocation that the interposer serves keeps the streams' order, and says what the driver says. Each
//! part of the program runs without the interposer and with it.

mod common;

use std::path::PathBuf;
use std::process::Output;
use std::sync::LazyLock;

use common::program::{self, said};

/// Seeds of when work begins.
const SEEDS: [&str; 4] = ["1", "2", "3", "4"];

static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| program::program("stream_order"));

/// Runs a part of the program on small devices.
fn run(part: &str, is_interposed: bool, settings: &[(&str, &str)]) -> Output {
    program::run(&PROGRAM, &[part], is_interposed, &[&[("SIMCUDA_MEMORY", "64MiB")], settings].concat())
}

/// The part says the same both times, whenever work begins. Returns what it said aside when it was interposed.
fn both(part: &str, settings: &[(&str, &str)]) -> Vec<String> {
    let plain = said(&run(part, false, settings));
    assert!(!plain.is_empty());
    let run = |seed| {
        let output = run(part, true, &[settings, &[("SIMCUDA_JITTER", seed)]].concat());
        assert_eq!(said(&output), plain, "first with the interposer and seed {seed}, then without");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    SEEDS.into_iter().map(run).collect()
}

#[test]
fn memory_passes_between_streams_only_in_their_order() {
    for aside in both("mix", &[]) {
        let numbers: Vec<u64> = aside.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let [again, elsewhere, reserved_bytes] = numbers[..] else { panic!("{aside}") };
        assert!(again > 300 && elsewhere > 100, "memory is to be used again: {aside}");
        assert!(reserved_bytes < 32 << 20, "memory is to be used again: {aside}");
    }
}

#[test]
fn without_other_memory_a_stream_waits_for_that_of_others() {
    both("tight", &[]);
    both("side by side", &[]);
    both("scattered", &[]);
}

#[test]
fn either_free_takes_memory_of_either_kind() {
    both("crossed", &[]);
}

/// simcuda's own pools lose what is still to be freed when a context ends, so there is nothing to compare with.
#[test]
fn pools_outlive_contexts() {
    for seed in SEEDS {
        let output = run("contexts", true, &[("SIMCUDA_JITTER", seed)]);
        assert_eq!(said(&output), "used at the end: 0\n");
    }
}

#[test]
fn threads_have_default_streams_of_their_own() {
    both("threads", &[]);
}

#[test]
fn an_allocation_is_freed_once() {
    both("race", &[]);
}

#[test]
fn captures_are_not_disturbed_and_get_memory_of_the_driver() {
    // What pools hold is not given back for what a graph allocates: there is to be enough for both.
    both("captured", &[("SIMCUDA_MEMORY", "1GiB")]);
}

#[test]
fn errors_are_the_drivers() {
    both("errors", &[]);
}

#[test]
fn a_stream_that_waits_for_the_host_keeps_what_it_has_freed() {
    both("held", &[]);
}

#[test]
fn a_pools_books_are_kept() {
    both("books", &[]);
}

#[test]
fn other_devices_may_use_what_was_and_will_be_allocated() {
    both("peers", &[("SIMCUDA_DEVICES", "2")]);
}

/// The program gets its memory from the driver itself, or waits for it.
#[test]
fn what_the_driver_refuses_us_the_program_does_not_feel() {
    let calls = [
        "cuMemCreate",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemUnmap",
        "cuMemRelease",
        "cuEventCreate",
        "cuEventRecord",
        "cuEventQuery",
        "cuStreamGetId",
        "cuStreamGetCtx",
        "cuStreamGetDevice",
        "cuStreamIsCapturing",
        "cuThreadExchangeStreamCaptureMode",
        "cuDeviceGetMemPool",
    ];
    for call in calls {
        for which in ["1", "3", "2+"] {
            let fault = format!("{call}:{which}=CUDA_ERROR_UNKNOWN");
            let output = run("troubled", true, &[("SIMCUDA_FAULT", &fault)]);
            assert!(output.status.success(), "{fault}: {}", String::from_utf8_lossy(&output.stderr));
        }
    }
}
