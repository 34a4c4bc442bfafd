//! Stream-ordered allocation that the interposer serves keeps the streams' order, and says what the driver says. Each
//! part of the program runs without the interposer and with it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use ckpt_protocol::agent::SOCKET_VARIABLE;

/// Seeds of when work begins.
const SEEDS: [&str; 4] = ["1", "2", "3", "4"];

/// The program, once for all tests of this process.
fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/stream_order.c");
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("stream_order");
        let mut cc = Command::new("cc");
        cc.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1"]).arg(source).arg("-o").arg(&path);
        let result = cc.arg(driver()).arg("-lpthread").output().expect("cc");
        assert!(result.status.success(), "{}", String::from_utf8_lossy(&result.stderr));
        path
    })
}

/// simcuda, as `libcuda.so.1`.
fn driver() -> PathBuf {
    let default = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/simcuda/libcuda.so.1");
    let path = std::env::var_os("CKPT_TEST_LIBCUDA").map_or_else(default, PathBuf::from);
    assert!(path.is_file(), "{} is not there: call `cargo xtask test`", path.display());
    path
}

fn library() -> PathBuf {
    let test = std::env::current_exe().expect("this test's path");
    let deps = test.parent().expect("a directory");
    let built = |path: PathBuf| Some((fs::metadata(&path).ok()?.modified().ok()?, path));
    let places = [deps.join("libckpt_interpose.so"), deps.with_file_name("libckpt_interpose.so")];
    places.into_iter().filter_map(built).max().expect("libckpt_interpose.so is built with this test").1
}

/// Runs a part of the program on small devices of its own. There is no launcher: the agent waits for one.
fn run(part: &str, is_interposed: bool, settings: &[(&str, &str)]) -> Output {
    let directory =
        tempfile::Builder::new().prefix("pools-test-").tempdir_in("/dev/shm").expect("a directory");
    let mut command = Command::new(program());
    command.arg(part).env("LD_LIBRARY_PATH", driver().parent().expect("a directory"));
    command.env("SIMCUDA_DIR", directory.path()).env("SIMCUDA_MEMORY", "64MiB");
    if is_interposed {
        command.env("LD_PRELOAD", library()).env(SOCKET_VARIABLE, directory.path().join("socket"));
    }
    command.envs(settings.iter().copied()).output().expect("started")
}

fn said(output: &Output) -> String {
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}\n{stdout}{stderr}", output.status);
    stdout.into_owned()
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
    both("captured", &[]);
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
