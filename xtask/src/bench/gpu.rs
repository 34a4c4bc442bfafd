//! What the interposer adds to calls of the CUDA driver while no checkpoint is taken: the same program with and
//! without it, in turns. The calls are those of a driver whose functions return at once, the launches simcuda's. And
//! what checkpoints of device memory take, on simcuda or a GPU.

pub(super) mod job;
mod mirrors;
mod scaling;
mod stalls;

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::{process, tools, workspace};

const STUB: &str = include_str!("gpu/stub.c");
const CALLS: &str = include_str!("gpu/calls.c");
const LAUNCHES: &str = include_str!("gpu/launches.c");
const MEMORY: &str = include_str!("gpu/memory.c");
const ALLOCATIONS: &str = include_str!("gpu/allocations.c");

pub(super) const ROUNDS: usize = 15;
pub(super) const TIMED_CALLS: u64 = 20_000_000;
pub(super) const LAUNCH_COUNT: u64 = 20_000;
const LAUNCH_ROUNDS: usize = 100;
/// Which of all parts of a launch-bound program stands for them. The very fastest are so by luck: of how the threads of
/// simcuda meet.
const LAUNCH_QUANTILE: f64 = 0.05;
/// Two counts, so that what start and end take cancels out.
const COUNTED_CALLS: [u64; 2] = [20_000, 40_000];

/// One kind of call.
#[derive(Serialize)]
struct Call {
    /// What the open gate adds to a call, nanoseconds: the difference of the fastest runs.
    gate_ns: f64,
    /// The same in instructions, by callgrind.
    gate_instructions: Option<f64>,
}

/// Captures, in one context.
#[derive(Serialize, Deserialize)]
struct Capture {
    /// Speed of the capture of memory that has all changed, beside plain copies of it into pinned memory.
    capture_ratio: f64,
    /// Speed of bringing it back, beside plain copies out of pinned memory.
    copyback_ratio: f64,
    /// Bytes per second of the hash, beside a copy on the device.
    hash_ratio: f64,
}

/// The measurement of captures: a test of the interposer's, since nobody else sees its insides.
const CAPTURE: &str = "cuda::capture::tests::measure::ratios";

/// What was measured.
#[derive(Serialize)]
pub struct Report {
    /// A call of two parameters, all in registers.
    #[serde(flatten)]
    call: Call,
    /// A call of eleven parameters, five of which are copied on the stack.
    launch: Call,
    /// Time of a launch-bound program with the interposer / without, less one.
    launch_slowdown: f64,
    #[serde(flatten)]
    capture: Capture,
    stall_by_change: stalls::StallByChange,
    alloc_scaling: scaling::AllocScaling,
    /// Why something is missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    gate_instructions_missing: Option<&'static str>,
    cpus: usize,
    kernel: String,
}

/// Pauses by `--mirror`, alone.
#[derive(Serialize)]
pub struct MirrorReport {
    #[serde(flatten)]
    mirrors: mirrors::Pauses,
    cpus: usize,
    kernel: String,
}

/// Builds everything and measures the pauses by `--mirror`.
///
/// # Errors
/// A build or a program that fails.
pub fn measure_mirrors(args: &super::GpuArgs) -> Result<MirrorReport> {
    let bench = Bench::build(args)?;
    Ok(MirrorReport { mirrors: mirrors::measure(&bench, args.mib)?, cpus: cpus(), kernel: kernel()? })
}

fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn kernel() -> Result<String> {
    Ok(process::capture(Command::new("uname").arg("-r"))?.trim().to_owned())
}

/// Builds everything and measures.
///
/// # Errors
/// A build or a program that fails.
pub fn measure(args: &super::GpuArgs) -> Result<Report> {
    let bench = Bench::build(args)?;
    let valgrind = process::find_program("valgrind");
    let call = |kind: &str| -> Result<Call> {
        eprintln!("bench: {kind}");
        let count = TIMED_CALLS.to_string();
        let timed = |preload| bench.timed(&bench.stub, &["calls", kind, &count], preload);
        let (without_ns, with_ns) = bench.in_turns(ROUNDS, timed)?;
        let counted = |valgrind| bench.instructions(valgrind, &bench.stub, &["calls", kind]);
        let counted = valgrind.as_deref().map(counted).transpose()?;
        Ok(Call { gate_ns: with_ns - without_ns, gate_instructions: counted })
    };
    let (short, long) = (call("record")?, call("launch")?);
    eprintln!("bench: a launch-bound program");
    let launches = ["launches", &LAUNCH_COUNT.to_string()];
    let (without_s, with_s) = bench.parts(LAUNCH_ROUNDS, &bench.simcuda, &launches)?;
    let launch_slowdown = with_s / without_s - 1.0;
    let capture = bench.capture(args.mib)?;
    Ok(Report {
        call: short,
        launch: long,
        launch_slowdown,
        capture,
        stall_by_change: stalls::measure(&bench, args.mib)?,
        alloc_scaling: scaling::measure(&bench)?,
        gate_instructions_missing: valgrind.is_none().then_some("valgrind is not installed"),
        cpus: cpus(),
        kernel: kernel()?,
    })
}

/// The programs, and the drivers that they run on.
pub(super) struct Bench {
    pub(super) dir: tempfile::TempDir,
    /// Where simcuda has its devices' memory.
    device: tempfile::TempDir,
    /// Directories with a `libcuda.so.1`: one whose functions return at once, simcuda, and the one whose device memory
    /// is measured.
    pub(super) stub: PathBuf,
    pub(super) simcuda: PathBuf,
    driver: PathBuf,
    library: PathBuf,
    ckpt_run: PathBuf,
    criu: PathBuf,
    /// Where jobs have their stores: on the disk of the build directory.
    store_parent: PathBuf,
}

impl Bench {
    fn build(args: &super::GpuArgs) -> Result<Self> {
        let criu = tools::criu()?;
        eprintln!("bench: building ckpt-run, the interposer and simcuda (release)");
        let mut build = workspace::cargo();
        build.args([
            "build",
            "--release",
            "--quiet",
            "-p",
            "ckpt-run",
            "-p",
            "ckpt-interpose",
            "-p",
            "simcuda",
        ]);
        succeed(&mut build)?;
        Self::new(&workspace::target_dir()?, criu, args.driver.as_deref())
    }

    pub(super) fn new(target: &Path, criu: PathBuf, driver: Option<&Path>) -> Result<Self> {
        let release = target.join("release");
        let dir = tempfile::tempdir()?;
        let [stub, simcuda, chosen] = ["stub", "simcuda", "driver"].map(|name| dir.path().join(name));
        for directory in [&stub, &simcuda, &chosen] {
            std::fs::create_dir(directory)?;
        }
        let built = release.join("libsimcuda.so");
        symlink(&built, simcuda.join("libcuda.so.1"))?;
        symlink(driver.unwrap_or(&built), chosen.join("libcuda.so.1"))?;
        let bench = Self {
            dir,
            device: tempfile::Builder::new().prefix("simcuda-bench-").tempdir_in("/dev/shm")?,
            stub,
            simcuda,
            driver: chosen,
            library: release.join("libckpt_interpose.so"),
            ckpt_run: release.join("ckpt-run"),
            criu,
            store_parent: target.to_owned(),
        };
        let shared = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"];
        bench.compile("stub", STUB, &shared, &bench.stub.join("libcuda.so.1"))?;
        let programs = [
            ("calls", CALLS, &bench.stub),
            ("launches", LAUNCHES, &bench.simcuda),
            ("memory", MEMORY, &bench.simcuda),
            ("allocations", ALLOCATIONS, &bench.simcuda),
        ];
        for (name, source, driver) in programs {
            let place = format!("-L{}", driver.display());
            bench.compile(name, source, &[&place, "-l:libcuda.so.1"], &bench.dir.path().join(name))?;
        }
        Ok(bench)
    }

    pub(super) fn compile(&self, name: &str, source: &str, options: &[&str], to: &Path) -> Result<()> {
        let file = self.dir.path().join(name).with_extension("c");
        std::fs::write(&file, source)?;
        succeed(Command::new("cc").args(["-std=gnu11", "-O2"]).arg(&file).arg("-o").arg(to).args(options))
    }

    /// A program on one of the drivers. Its agent looks for a launcher that is not there, as seldom as agents do.
    fn command(&self, driver: &Path, argv: &[&str], preload: bool) -> Command {
        let mut command = Command::new(self.dir.path().join(argv[0]));
        command.args(&argv[1..]).env("LD_LIBRARY_PATH", driver).env("SIMCUDA_DIR", self.device.path());
        command.stdin(Stdio::null());
        if preload {
            command.env("LD_PRELOAD", &self.library);
            command.env("CKPT_AGENT_SOCKET", self.dir.path().join("nobody"));
        }
        command
    }

    /// The number that a program prints.
    pub(super) fn timed(&self, driver: &Path, argv: &[&str], preload: bool) -> Result<f64> {
        let text = process::capture(&mut self.command(driver, argv, preload))?;
        text.trim().parse().with_context(|| format!("{argv:?} printed {text:?}"))
    }

    /// The fastest without and the fastest with, of rounds in turns: whatever else the machine does only adds time.
    pub(super) fn in_turns(&self, rounds: usize, run: impl Fn(bool) -> Result<f64>) -> Result<(f64, f64)> {
        let (mut without, mut with) = (f64::INFINITY, f64::INFINITY);
        for round in 0..rounds {
            for preload in [round % 2 == 1, round % 2 == 0] {
                let best = if preload { &mut with } else { &mut without };
                *best = best.min(run(preload)?);
            }
        }
        Ok((without, with))
    }

    /// The seconds of a part of a launch-bound program, without the interposer and with it.
    pub(super) fn parts(&self, rounds: usize, driver: &Path, argv: &[&str]) -> Result<(f64, f64)> {
        let [mut without, mut with] = [const { Vec::<f64>::new() }; 2];
        for round in 0..rounds {
            for preload in [round % 2 == 1, round % 2 == 0] {
                let text = process::capture(&mut self.command(driver, argv, preload))?;
                let parts = if preload { &mut with } else { &mut without };
                for line in text.lines() {
                    parts.push(line.parse().with_context(|| format!("{argv:?} printed {line:?}"))?);
                }
            }
        }
        let of = |mut parts: Vec<f64>| {
            parts.sort_by(f64::total_cmp);
            parts.get((parts.len() as f64 * LAUNCH_QUANTILE) as usize).copied().unwrap_or(f64::NAN)
        };
        Ok((of(without), of(with)))
    }

    /// Captures.
    fn capture(&self, mib: usize) -> Result<Capture> {
        eprintln!("bench: capture of {mib} MiB");
        let mut test = workspace::cargo();
        test.args([
            "test",
            "--release",
            "--quiet",
            "-p",
            "ckpt-interpose",
            "--lib",
            "--",
            "--exact",
            CAPTURE,
        ]);
        test.args(["--ignored", "--nocapture"]);
        test.env("CKPT_TEST_LIBCUDA", self.driver.join("libcuda.so.1"))
            .env("CKPT_BENCH_MIB", mib.to_string());
        let text = process::capture(&mut test)?;
        let line = text.lines().find(|line| line.starts_with('{'));
        serde_json::from_str(line.with_context(|| format!("{CAPTURE} measured nothing: {text}"))?)
            .with_context(|| format!("{CAPTURE} printed {text:?}"))
    }

    /// What the interposer adds to a call, instructions by callgrind. The program's last argument is how many calls it
    /// makes.
    pub(super) fn instructions(&self, valgrind: &Path, driver: &Path, argv: &[&str]) -> Result<f64> {
        let [few, many] = COUNTED_CALLS;
        let of_a_call = |preload: bool| -> Result<f64> {
            let counted = |calls: u64| {
                let calls = calls.to_string();
                let argv: Vec<&str> = argv.iter().copied().chain([calls.as_str()]).collect();
                collected(valgrind, &self.command(driver, &argv, preload))
            };
            Ok((counted(many)? - counted(few)?) / (many - few) as f64)
        };
        Ok(of_a_call(true)? - of_a_call(false)?)
    }
}

/// The instructions of a whole run.
fn collected(valgrind: &Path, program: &Command) -> Result<f64> {
    let mut command = Command::new(valgrind);
    command.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]);
    command.arg(program.get_program()).args(program.get_args());
    command.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let output = command.stdin(Stdio::null()).output().context("starting valgrind")?;
    let said = String::from_utf8_lossy(&output.stderr);
    let count = said.lines().find_map(|line| line.split_once("Collected : ")?.1.trim().parse().ok());
    count.with_context(|| format!("callgrind did not say what it collected: {said}"))
}

pub(super) fn succeed(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("starting {}", process::describe(command)))?;
    ensure!(status.success(), "{} failed ({status})", process::describe(command));
    Ok(())
}
