//! `cargo xtask test`: everything that the tests need, then the tests.

use std::io::BufReader;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result};

use crate::failures::Failures;
use crate::tools::{self, Tool, Variables};
use crate::{bundle, dist, fuzz, process, skips, workspace};

/// How long `--full` stresses the gate, in seconds; interpose/tests/stress.rs has a shorter time of its own.
const STRESS_S: &str = "60";
/// How often `--full` kills each job on a GPU; tests/tests/gpu/jobs.rs has a smaller number of its own.
const KILLS: &str = "20";
/// How many simulations of several machines `--full` runs; launcher/src/job/simulation.rs has a number of its own.
const SEEDS: &str = "100000";
/// How many altered inputs each reader gets with `--full`; tests/mutate has a number of its own.
const MUTATIONS: &str = "30000";
/// How long libFuzzer alters the input of each reader with `--full`, in seconds.
const FUZZ_S: u32 = 60;
/// How many sequences of actions on snapshots `--full` tries; launcher/src/persist/state_model.rs has a number of its own.
const CASES: &str = "1000";
/// How often jobs run with faults of system calls with `--full`.
const SYSTEM_CALL_ROUNDS: &str = "50";

/// Without `--full`, property tests try the same inputs each time: what is new is looked for with it.
const PROPTEST_SEED: (&str, &str) = ("PROPTEST_RNG_SEED", "1");

/// How long the tests of one program may take: a program that hangs is ended and named, and the others still run.
const PROGRAM_LIMIT: &str = "35m";
/// Two tests of all programs in a virtual machine take 25 minutes each.
const FULL_PROGRAM_LIMIT: &str = "120m";

/// How many tests of a program run at a time.
const THREADS_VARIABLE: &str = "RUST_TEST_THREADS";

/// Options of `cargo xtask test`.
#[derive(clap::Args)]
pub struct Args {
    /// Also the slower stage: a private root of a newer suite with PyTorch 2.6, packages for users in bare roots, virtual
    /// machines with a distribution's kernel, CRIU's own tests as jobs, and more of everything
    #[arg(long)]
    full: bool,
    /// Passed to `cargo test`, for instance the name of a test
    #[arg(last = true)]
    args: Vec<String>,
}

/// Sets up, builds and tests. The exit code is that of the first cargo command that failed, or 1 for a test that
/// skipped and may not.
pub fn run(args: &Args) -> Result<ExitCode> {
    let tools = tools::environment(&Tool::ALL)?;
    let full = args.full.then(tools::full_environment).transpose()?;
    let mut test = match with_programs(tools)? {
        Ok(test) => test,
        Err(code) => return Ok(code),
    };
    // All faults at once: a run takes long.
    test.args(["--workspace", "--no-fail-fast", "--features", workspace::FAULTS]).args(&args.args);
    let limit = if args.full { FULL_PROGRAM_LIMIT } else { PROGRAM_LIMIT };
    let limited = ["timeout"].into_iter().chain(process::TIMEOUT).chain([limit]);
    test.env("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER", limited.collect::<Vec<_>>().join(" "));
    test.env("CKPT_TEST_BUNDLE", bundle::for_tests()?);
    if !args.full && std::env::var_os(THREADS_VARIABLE).is_none() {
        // Tests wait for jobs now and then, while one more can use the core.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        test.env(THREADS_VARIABLE, (cores + 1).to_string());
    }
    if let Some(tools) = full {
        let packages = dist::packages()?;
        test.envs(tools)
            .env("CKPT_TEST_PACKAGES", packages[0].parent().context("packages without a directory")?)
            // Power is lost at each flush, on three file systems.
            .env("CKPT_TEST_POWER_LOSSES", "all")
            .env("CKPT_TEST_STRESS_S", STRESS_S)
            .env("CKPT_TEST_KILLS", KILLS)
            .env("CKPT_TEST_SEEDS", SEEDS)
            .env("CKPT_TEST_CASES", CASES)
            .env("CKPT_TEST_MUTATIONS", MUTATIONS)
            .env("CKPT_TEST_SYSTEM_CALL_ROUNDS", SYSTEM_CALL_ROUNDS);
    } else {
        test.env(PROPTEST_SEED.0, PROPTEST_SEED.1);
    }
    let skipped = skips::file()?;
    skips::clear(&skipped)?;
    test.env(skips::FILE_VARIABLE, &skipped).stdout(Stdio::piped());
    let mut child = test.spawn().context("could not start cargo test")?;
    let failures = Failures::read(BufReader::new(child.stdout.take().context("no output of cargo test")?))?;
    let status = child.wait()?;
    let all_may_skip = skips::report(&skips::read(&skipped)?, args.full);
    print!("{}", failures.report());
    let no_findings =
        if args.full && args.args.is_empty() { fuzz::all_readers(FUZZ_S, "")? } else { ExitCode::SUCCESS };
    if status.success() && all_may_skip && no_findings != ExitCode::SUCCESS {
        return Ok(no_findings);
    }
    Ok(if status.success() && !all_may_skip { ExitCode::FAILURE } else { process::exit_code(status) })
}

/// Builds the programs that the scenarios run and that `cargo test` alone does not build: the real binary, the real
/// preload library, and simcuda. Returns a `cargo test` that finds them, or the exit code of the build.
pub fn with_programs(tools: Variables) -> Result<Result<Command, ExitCode>> {
    let mut build = workspace::cargo();
    // With all targets, dependencies get the features that they have in `cargo test`, which does not build them again.
    build.args(["build", "--workspace", "--all-targets", "--features", workspace::FAULTS]);
    let status = build.status().context("could not start cargo build")?;
    if !status.success() {
        return Ok(Err(process::exit_code(status)));
    }
    let libcuda = workspace::link_simcuda()?;
    let cargo = workspace::cargo();
    // A shell starts background commands with Ctrl-C ignored, and tests send it.
    let mut test = Command::new("env");
    test.arg("--default-signal=INT").arg(cargo.get_program()).arg("test").current_dir(workspace::root());
    clear_options(&mut test);
    test.envs(tools).env("CKPT_TEST_BIN", workspace::target_dir()?.join("debug/ckpt-run"));
    test.env("CKPT_TEST_LIBCUDA", libcuda);
    Ok(Ok(test))
}

/// Removes every `CKPT_*` variable from the environment of a command. They are options of ckpt-run, and the options of
/// the user of xtask must not change what is tested or shown.
pub fn clear_options(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("CKPT_") {
            command.env_remove(name);
        }
    }
}
