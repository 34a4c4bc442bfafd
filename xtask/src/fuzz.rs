//! `cargo xtask fuzz`: libFuzzer alters the input of each reader of untrusted bytes, guided by the code that it reaches.
//!
//! The readers are the tests with `ckpt_test_mutate`: their names begin with `any_`. What reaches new code is kept in
//! `target/fuzz/corpus` for the next run. A finding is a panic, more than 2 GiB of memory, or more than 10 seconds.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail, ensure};

use crate::{process, workspace};

/// The packages with readers, and their programs of tests. Other programs do not have libFuzzer, and could not be linked.
const PACKAGES: [&str; 3] = ["ckpt-run", "ckpt-snapshot", "ckpt-protocol"];
const PROGRAMS: [&str; 8] =
    ["--bin", "ckpt-run", "--test", "records", "--test", "readers", "--test", "frames"];
/// How the name of a test of a reader begins.
const READER: &str = "any_";
/// Code for this machine alone is counted, that of build scripts and macros is not.
const TARGET: &str = "x86_64-unknown-linux-gnu";
/// Counters and comparisons for libFuzzer, as cargo-fuzz asks for them.
const COUNTED: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1";
const LIMITS: &str = "-timeout=10\n-rss_limit_mb=2048\n-print_final_stats=1";
/// The line with which libFuzzer says how much it has tried.
const EXECUTED: &str = "stat::number_of_executed_units:";

/// Options of `cargo xtask fuzz`.
#[derive(clap::Args)]
pub struct Args {
    /// How long each reader gets
    #[arg(long, default_value_t = 60)]
    seconds: u32,
    /// Only readers whose names contain this
    #[arg(value_name = "NAME")]
    name: Option<String>,
}

/// A test of a reader.
struct Reader {
    program: PathBuf,
    name: String,
}

/// Builds, and lets libFuzzer work on each reader. The exit code is 1 if there is a finding.
pub fn run(args: &Args) -> Result<ExitCode> {
    all_readers(args.seconds, args.name.as_deref().unwrap_or_default())
}

/// Gives each reader whose name contains `name` this time (seconds), two readers at a time.
pub fn all_readers(seconds: u32, name: &str) -> Result<ExitCode> {
    let dir = workspace::target_dir()?.join("fuzz");
    let mut readers = Vec::new();
    for program in programs(&dir)? {
        readers.extend(readers_of(&program)?);
    }
    readers.retain(|reader| reader.name.contains(name));
    ensure!(!readers.is_empty(), "no reader has a name that contains {name:?}");
    let (left, is_clean) = (Mutex::new(readers), AtomicBool::new(true));
    let next = || left.lock().expect("no thread panics").pop();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(reader) = next() {
                    let outcome = fuzz(&reader, seconds, &dir);
                    is_clean.fetch_and(outcome.is_ok(), Ordering::Relaxed);
                    match outcome {
                        Ok(tried) => println!("fuzz: {:<60} {tried:>12} inputs, no finding", reader.name),
                        Err(error) => println!("fuzz: {:<60} FOUND: {error:#}", reader.name),
                    }
                }
            });
        }
    });
    Ok(if is_clean.into_inner() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Builds the tests of all readers with counters, and returns the programs.
fn programs(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut build = workspace::cargo();
    build.args(["test", "--no-run", "--target", TARGET, "--message-format", "json-render-diagnostics"]);
    // The mutator itself is selected for its feature.
    build.args(["--package", "ckpt-test-mutate", "--features", "ckpt-test-mutate/guided"]);
    build.args(PACKAGES.iter().flat_map(|package| ["--package", package])).args(PROGRAMS);
    build.args(["--config", "profile.dev.opt-level=1"]);
    build.env("RUSTFLAGS", COUNTED).env("CARGO_TARGET_DIR", dir);
    let output = build.stderr(Stdio::inherit()).output().context("could not start cargo test")?;
    ensure!(output.status.success(), "the tests could not be built ({})", output.status);
    let messages = String::from_utf8(output.stdout).context("cargo's messages")?;
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    Ok(messages.filter_map(|message| message["executable"].as_str().map(PathBuf::from)).collect())
}

fn readers_of(program: &Path) -> Result<Vec<Reader>> {
    let listed = process::capture(Command::new(program).args(["--list", "--format", "terse"]))?;
    let names = listed.lines().filter_map(|line| line.strip_suffix(": test"));
    let is_reader = |name: &&str| name.rsplit("::").next().is_some_and(|name| name.starts_with(READER));
    let reader = |name: &str| Reader { program: program.to_owned(), name: name.to_owned() };
    Ok(names.filter(is_reader).map(reader).collect())
}

/// Returns how many inputs were tried.
fn fuzz(reader: &Reader, seconds: u32, dir: &Path) -> Result<u64> {
    let folder = reader.name.replace("::", ".");
    let (corpus, log) = (dir.join("corpus").join(&folder), dir.join(format!("{folder}.log")));
    // The file of a finding is named after its content.
    let arguments =
        format!("{LIMITS}\n-max_total_time={seconds}\n-artifact_prefix={}/{folder}-", dir.display());
    let mut command = Command::new(&reader.program);
    command.args(["--exact", &reader.name, "--nocapture", "--test-threads=1"]);
    command.env("CKPT_TEST_FUZZ_CORPUS", corpus).env("CKPT_TEST_FUZZ_ARGUMENTS", arguments);
    // The program does not return from the test, and leaves its temporary files.
    let temporary = dir.join("tmp").join(&folder);
    std::fs::create_dir_all(&temporary).with_context(|| format!("creating {}", temporary.display()))?;
    command.env("TMPDIR", &temporary);
    let output = command.stdin(Stdio::null()).output().context("the program of the tests did not start")?;
    std::fs::remove_dir_all(&temporary).with_context(|| format!("removing {}", temporary.display()))?;
    let said = String::from_utf8_lossy(&output.stderr);
    std::fs::write(&log, &*said).with_context(|| format!("writing {}", log.display()))?;
    if !output.status.success() {
        bail!("{}; see {}", output.status, log.display());
    }
    let tried = said.lines().find_map(|line| line.strip_prefix(EXECUTED));
    let tried = tried.with_context(|| format!("libFuzzer has not run; see {}", log.display()))?;
    tried.trim().parse().context("libFuzzer's number of inputs")
}
