//! `cargo xtask test`: everything that the tests need, then the tests.

use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};

use crate::tools::Tools;
use crate::{bundle, process, tools, workspace};

/// How long `--full` stresses the gate, in seconds; interpose/tests/stress.rs has a shorter time of its own.
const STRESS_S: &str = "60";
/// How often `--full` kills each job on a GPU; tests/tests/gpu/jobs.rs has a smaller number of its own.
const KILLS: &str = "20";

/// How long the tests of one program may take: one that hangs is named, and does not take the others along.
const PROGRAM_LIMIT: &str = "25m";

/// Options of `cargo xtask test`.
#[derive(clap::Args)]
pub struct Args {
    /// Also the slower stage: a private root of a newer suite with PyTorch 2.6, and a minute of stress for the gate
    #[arg(long)]
    full: bool,
    /// Passed to `cargo test`, for instance the name of a test
    #[arg(last = true)]
    args: Vec<String>,
}

/// Sets up, builds and tests. The exit code is that of the first cargo command that failed.
pub fn run(args: &Args) -> Result<ExitCode> {
    let tools = Tools::set_up()?;
    let rootfs = args.full.then(tools::trixie_root).transpose()?;
    let mut test = match with_programs(&tools)? {
        Ok(test) => test,
        Err(code) => return Ok(code),
    };
    // All faults at once: a run takes long.
    test.args(["--workspace", "--no-fail-fast", "--features", workspace::FAULTS]).args(&args.args);
    let limited = ["timeout"].into_iter().chain(process::TIMEOUT).chain([PROGRAM_LIMIT]);
    test.env("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER", limited.collect::<Vec<_>>().join(" "));
    test.env("CKPT_TEST_BUNDLE", bundle::for_tests()?);
    if let Some(rootfs) = rootfs {
        test.env("CKPT_TEST_ROOTFS", rootfs)
            .env("CKPT_TEST_STRESS_S", STRESS_S)
            .env("CKPT_TEST_KILLS", KILLS);
    }
    let status = test.status().context("could not start cargo test")?;
    Ok(process::exit_code(status))
}

/// Builds what the scenarios run: the real binary with the real preload library, which `cargo test` alone does not
/// build, and simcuda. A `cargo test` that finds them, or the exit code of the build.
pub fn with_programs(tools: &Tools) -> Result<Result<Command, ExitCode>> {
    let mut build = workspace::cargo();
    // With all targets, dependencies get the features that they have in `cargo test`, which does not build them again.
    build.args(["build", "--workspace", "--all-targets", "--features", workspace::FAULTS]);
    let status = build.status().context("could not start cargo build")?;
    if !status.success() {
        return Ok(Err(process::exit_code(status)));
    }
    let libcuda = workspace::link_simcuda()?;
    let mut test = workspace::cargo();
    test.arg("test");
    clear_options(&mut test);
    // What is started in the background by a shell has Ctrl-C ignored, and tests send it.
    let hear_interrupts = || {
        // SAFETY: the default action is no function.
        unsafe { libc::signal(libc::SIGINT, libc::SIG_DFL) };
        Ok(())
    };
    // SAFETY: one system call, allowed between fork and exec.
    unsafe { test.pre_exec(hear_interrupts) };
    test.envs(tools.env()).env("CKPT_TEST_BIN", workspace::target_dir()?.join("debug/ckpt-run"));
    test.env("CKPT_TEST_LIBCUDA", libcuda);
    Ok(Ok(test))
}

/// Takes every `CKPT_*` variable from the environment: they are options of ckpt-run, and those of whoever started
/// xtask must not change what is tested or shown.
pub fn clear_options(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("CKPT_") {
            command.env_remove(name);
        }
    }
}
