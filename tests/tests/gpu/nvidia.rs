//! NVIDIA's own libraries, and frameworks that were built for CUDA, on a machine without a GPU: in front of NVIDIA's
//! libcuda.so.1 they load, count devices and fail in the same way with the interposer as without it.
//!
//! The frameworks take 8 GB: `cargo xtask conformance --real-driver --full` sets them up.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use ckpt_run_tests::gpu::{built, cuda_program};
use ckpt_run_tests::{Sandbox, from_env, python, torchrun_with_two_ranks, train_script, workspace};

use crate::gpu_job::library;

/// More steps than the job does before it is killed the last time: it goes on while more than a gigabyte is stored.
const STEPS: &str = "400";
/// By this function a runtime looks up all others.
const LOOK_UP: &str = "cuGetProcAddress_v2 is in ";
const DRIVER: &str = "libcuda.so.";
const INTERPOSER: &str = "libckpt_interpose.so";
const NO_DEVICE: &str = "no CUDA-capable device is detected";
/// The runtime of CUDA 13 asks the driver of CUDA 12.4 for its version only.
const TOO_OLD: &str = "CUDA driver version is insufficient for CUDA runtime version";

/// The directory of NVIDIA's libcuda.so.1.
fn driver_dir() -> PathBuf {
    let default = "target/tools/libcuda/prefix/usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.1";
    let path = from_env("CKPT_TEST_NVIDIA_LIBCUDA", || workspace().join(default));
    assert!(path.is_file(), "{} is not there: call `cargo xtask test`", path.display());
    path.parent().expect("a directory").to_owned()
}

/// The directory with NVIDIA's runtimes and its library of collectives.
fn libraries() -> PathBuf {
    let default = "target/tools/nvidia-libraries/lib/python3.11/site-packages/nvidia";
    let path = from_env("CKPT_TEST_NVIDIA_LIBRARIES", || workspace().join(default));
    assert!(path.is_dir(), "{} is not there: call `cargo xtask test`", path.display());
    path
}

/// What `--full` sets up.
fn of_full(variable: &str) -> Option<PathBuf> {
    let path = std::env::var_os(variable).map(PathBuf::from);
    if path.is_none() {
        ckpt_test_skip::skip(format!(
            "{variable} is not set; `cargo xtask conformance --real-driver --full` sets it"
        ));
    }
    path
}

/// A command that finds NVIDIA's driver, and nothing of the user's Python.
fn with_driver(program: impl AsRef<Path>) -> Command {
    let mut command = Command::new(program.as_ref());
    command.env("LD_LIBRARY_PATH", driver_dir()).env("NCCL_SOCKET_IFNAME", "lo");
    command.env("PYTHONNOUSERSITE", "1").env("PYTHONDONTWRITEBYTECODE", "1").env_remove("PYTHONPATH");
    command
}

/// Runs a command without and with the interposer. Its exit code and its standard output have to be the same but for
/// where the driver's function is; its standard error but for the digits of times and process IDs. Returns the output.
fn same_with_the_interposer(make: impl Fn() -> Command) -> String {
    let interposer = built("libckpt_interpose.so");
    let plain = make().output().expect("it runs");
    let preloaded = make().env("LD_PRELOAD", interposer).output().expect("it runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let errors = |output: &Output| text(&output.stderr).replace(|c: char| c.is_ascii_digit(), "0");
    let lines = |output: &Output, file: &str| {
        let place = format!("{LOOK_UP}{file}");
        let line = |line: &str| if line.starts_with(&place) { LOOK_UP.to_owned() } else { line.to_owned() };
        text(&output.stdout).lines().map(line).collect::<Vec<_>>()
    };
    let found = lines(&preloaded, INTERPOSER);
    assert_eq!(found, lines(&plain, DRIVER), "{}", text(&preloaded.stderr));
    assert_eq!(errors(&preloaded), errors(&plain));
    assert_eq!(preloaded.status, plain.status);
    assert_eq!(plain.status.code(), Some(0), "{}", text(&plain.stderr));
    found.join("\n")
}

/// A library by `runtime.py`: the texts of the results of its calls.
fn results(kind: &str, library: &Path) -> BTreeSet<String> {
    let output = same_with_the_interposer(|| {
        let mut command = with_driver(python());
        command.arg(cuda_program("runtime.py")).arg(kind).arg(library);
        command
    });
    let mut lines: Vec<_> = output.lines().collect();
    assert_eq!(lines.pop(), Some(LOOK_UP));
    assert!(lines.len() >= 5, "{output}");
    let texts = lines.iter().map(|line| line.split(", ").nth(2).expect("a text").to_owned());
    texts.collect()
}

#[test]
fn nvidias_runtimes_fail_as_without_the_interposer() {
    for (library, error) in [
        ("cuda_runtime/lib/libcudart.so.11.0", NO_DEVICE),
        ("cuda_runtime/lib/libcudart.so.12", NO_DEVICE),
        ("cu13/lib/libcudart.so.13", TOO_OLD),
    ] {
        let found = results("cudart", &libraries().join(library));
        assert_eq!(found, BTreeSet::from([error.to_owned(), "no error".to_owned()]), "{library}");
    }
}

/// Calls of NCCL 2.18 to 2.32 that no other rank has to match: about the calling rank's own memory and communicators,
/// texts and settings, and what NCCL's device API computes on the host (NCCL user guide, "NCCL API").
const NCCL_OF_ONE_RANK: &[&str] = &[
    "ncclCommCount",
    "ncclCommCuDevice",
    "ncclCommDeregister",
    "ncclCommGetUniqueId",
    "ncclCommMemStats",
    "ncclCommQueryProperties",
    "ncclCommRegister",
    // Without ncclCommSuspend, which refuses checkpoints, it does nothing; the same holds for ncclDevCommCreate.
    "ncclCommResume",
    "ncclCommUserRank",
    "ncclCommWindowDeregister",
    "ncclDevCommDestroy",
    "ncclMemAlloc",
    "ncclMemFree",
    "ncclRedOpCreatePreMulSum",
    "ncclRedOpDestroy",
    "ncclSetEncryption",
    "ncclWinGetUserPtr",
];
/// Beginnings of names of others.
const NCCL_OF_ONE_RANK_ALL: &[&str] =
    &["ncclGet", "ncclGin", "ncclLLA2A", "ncclLsaBarrier", "ncclParam", "ncclResetDebug", "ncclTeam"];

/// The functions of a library.
fn functions(library: &Path) -> BTreeSet<String> {
    let output = Command::new("nm").args(["-D", "--defined-only"]).arg(library).output().expect("nm runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("names");
    let name = |line: &str| Some(line.split_whitespace().last()?.split('@').next()?.to_owned());
    text.lines().filter_map(name).collect()
}

/// A new version of NCCL may have calls that ranks wait for.
#[test]
fn every_call_of_nccl_is_counted_or_needs_no_other_rank() {
    let ours = functions(Path::new(&library()));
    let is_public = |name: &&String| {
        name.strip_prefix("nccl").is_some_and(|rest| rest.starts_with(|first: char| first.is_uppercase()))
    };
    let is_of_one_rank = |name: &&String| {
        NCCL_OF_ONE_RANK.contains(&name.as_str())
            || NCCL_OF_ONE_RANK_ALL.iter().any(|beginning| name.starts_with(beginning))
    };
    let nccl = functions(&libraries().join("nccl/lib/libnccl.so.2"));
    let public: BTreeSet<_> = nccl.iter().filter(is_public).collect();
    // As many as 2.18 has: CKPT_TEST_NVIDIA_LIBRARIES may name an older one.
    assert!(public.len() >= 27, "{public:?}");
    let unknown: Vec<_> =
        public.iter().filter(|name| !ours.contains(**name)).filter(|name| !is_of_one_rank(name)).collect();
    assert!(unknown.is_empty(), "add a row in interpose/src/cuda/nccl/calls.rs for {unknown:?}");
    // Each call has a second name, which profilers call.
    let profiled: Vec<_> = nccl.iter().filter_map(|name| name.strip_prefix('p')).collect();
    let counted: Vec<_> = profiled.iter().filter(|name| ours.contains(**name)).collect();
    assert!(counted.len() >= 18, "{counted:?}");
    let missed: Vec<_> = counted.iter().filter(|name| !ours.contains(&format!("p{name}"))).collect();
    assert!(missed.is_empty(), "calls by the names for profilers go past the interposer: {missed:?}");
}

#[test]
fn nvidias_nccl_fails_as_without_the_interposer() {
    nccl_fails(&libraries().join("nccl/lib/libnccl.so.2"));
}

fn nccl_fails(library: &Path) {
    let found = results("nccl", library);
    assert!(found.contains("no error"), "{found:?}");
    assert!(found.iter().any(|text| text.starts_with("unhandled cuda error")), "{found:?}");
}

#[test]
fn nvidias_nccl_for_cuda_13_fails_as_without_the_interposer() {
    if let Some(directory) = of_full("CKPT_TEST_NCCL_13") {
        nccl_fails(&directory.join("nccl/lib/libnccl.so.2"));
    }
}

#[test]
fn frameworks_on_nvidias_driver_fail_as_without_the_interposer() {
    let Some(python) = of_full("CKPT_TEST_CUDA_FRAMEWORKS") else { return };
    for (name, variable, said) in [
        ("torch", None, "init raises RuntimeError: No CUDA GPUs are available"),
        (
            "cupy",
            None,
            "zeros raises CUDARuntimeError: cudaErrorNoDevice: no CUDA-capable device is detected",
        ),
        ("jax", None, "devices [CpuDevice(id=0)]"),
        // Not stopped by its own check before: JAX's client starts.
        (
            "jax",
            Some("JAX_SKIP_CUDA_CONSTRAINTS_CHECK"),
            "devices raises RuntimeError: Unable to initialize backend 'cuda'",
        ),
        ("numba", None, "Call to cuInit results in CUDA_ERROR_NO_DEVICE (100)"),
        ("triton", None, "utils raises RuntimeError: Triton Error [CUDA]: initialization error"),
    ] {
        let output = same_with_the_interposer(|| {
            let mut command = with_driver(&python);
            command.arg(cuda_program("frameworks.py")).arg(name);
            command.envs(variable.map(|variable| (variable, "1")));
            command
        });
        assert!(output.lines().any(|line| line.starts_with(said)), "{name}: {output}");
    }
}

/// The arguments of a training on the CPU that has asked the driver for devices before.
fn training(python: &Path) -> Vec<std::ffi::OsString> {
    let mut argv = vec![python.into(), "-m".into(), "torch.distributed.run".into()];
    argv.extend(torchrun_with_two_ranks().into_iter().skip(1));
    argv.extend([cuda_program("no_device.py").into(), train_script().into()]);
    let options = ["--steps", STEPS, "--workers", "1", "--step-ms", "150", "--slow-while", "slow"];
    argv.extend(options.map(Into::into));
    argv
}

#[test]
fn pytorchs_cuda_build_on_nvidias_driver_survives() {
    let Some(python) = of_full("CKPT_TEST_CUDA_FRAMEWORKS") else { return };
    let argv = training(&python);
    let unbroken = Sandbox::new();
    let mut plain = with_driver(&python);
    plain.args(&argv[1..]).env("OMP_NUM_THREADS", "1").current_dir(unbroken.path());
    let output = plain.output().expect("torchrun runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    let sandbox = Sandbox::new();
    let start = || {
        let ours = ["--interpose".into(), built("libckpt_interpose.so").into(), "--".into()];
        let mut command = sandbox.command(ours.into_iter().chain(argv.iter().cloned()));
        command.env("LD_LIBRARY_PATH", driver_dir()).env("PYTHONNOUSERSITE", "1");
        sandbox.start_command("job", command)
    };
    let steps = || {
        let losses = std::fs::read_to_string(sandbox.path().join("losses.txt"));
        losses.map_or(0, |text| text.lines().count())
    };
    std::fs::write(sandbox.path().join("slow"), "").expect("a file");
    let mut job = start();
    for _ in 0..2 {
        let before = steps();
        job.until("steps of the training", || (steps() >= before + 5).then_some(()));
        let id = job.checkpoint(&sandbox);
        let agents = sandbox.json(["show", &id, "--json"])["tree"]["agents"]["pids"].clone();
        // At the end of an epoch, the loaders' workers end and new ones begin.
        assert!(agents.as_array().is_some_and(|pids| pids.len() >= 3), "torchrun and two ranks: {agents}");
        let at_snapshot = steps();
        job.until("steps after the snapshot", || (steps() >= at_snapshot + 5).then_some(()));
        job.kill_everything();
        job = start();
        job.until("the resume", || job_resumed(&sandbox, &id));
    }
    std::fs::remove_file(sandbox.path().join("slow")).expect("the file");
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert_eq!(sandbox.read("losses.txt"), unbroken.read("losses.txt"));
    assert_eq!(sandbox.read("losses.txt").lines().count().to_string(), STEPS);
    sandbox.verify_all();
}

fn job_resumed(sandbox: &Sandbox, id: &str) -> Option<()> {
    sandbox.read("job.err").contains(&format!("resumed from snapshot {id}")).then_some(())
}
