//! The store beside fio with the same bytes and direct I/O, and beside PyTorch's own ways. Each step is a process of its
//! own (`snapshot/examples/bench_store.rs`); who is first takes turns; medians of ratios.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::Value;

use super::median;
use crate::{process, tools, workspace};

/// Options of `cargo xtask bench store`.
#[derive(clap::Args)]
pub struct Args {
    /// The directory to measure in, on the disk in question
    #[arg(long, value_name = "DIR", default_value = ".")]
    dir: PathBuf,
    /// Size of a snapshot, MiB
    #[arg(long, default_value_t = 512)]
    mib: u64,
    /// Rounds; the medians are told
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Logical sizes that show what grows, GiB
    #[arg(long, value_delimiter = ',', default_values_t = [16, 64])]
    linear_gib: Vec<u64>,
    /// Compare with PyTorch 2.6, which has torch.distributed.checkpoint, in a private root that is made if need be;
    /// without it, with the system's PyTorch
    #[arg(long)]
    newer_torch: bool,
    /// Also write the JSON to this file
    #[arg(long)]
    pub json: Option<PathBuf>,
}

/// Medians over the rounds; ratios of speeds are ours to the other's, more is better for us.
#[derive(Serialize)]
pub struct Report {
    mib: u64,
    write_ratio_vs_fio: f64,
    read_ratio_vs_fio: f64,
    /// `verify` of one snapshot, and a scrub of the whole store when it has no other.
    verify_ratio_vs_fio: f64,
    scrub_ratio_vs_fio: f64,
    changed5_bytes_ratio: f64,
    /// The store is told what has not changed, as it is of a mirror of device memory.
    changed5_time_ratio: f64,
    /// It is not, and hashes everything.
    changed5_hashed_time_ratio: f64,
    cpu_s_per_gb: f64,
    peak_bytes: f64,
    /// Where torch is installed.
    write_ratio_vs_torch_save: Option<f64>,
    read_ratio_vs_torch_load: Option<f64>,
    /// torch.distributed.checkpoint, where it can save asynchronously; that too until it is durable.
    write_ratio_vs_dcp_save: Option<f64>,
    write_ratio_vs_dcp_async_save: Option<f64>,
    read_ratio_vs_dcp_load: Option<f64>,
    linear: Vec<Value>,
    rounds: Vec<Round>,
}

fn seconds(value: &Value) -> f64 {
    value["seconds"].as_f64().unwrap_or(f64::NAN)
}

/// Seconds, unless the name says otherwise.
#[derive(Serialize)]
struct Round {
    save: Value,
    changed5: Value,
    changed5_hashed: Value,
    load: Value,
    verify: Value,
    scrub: Value,
    fio_write_s: f64,
    fio_read_s: f64,
    torch: Option<Value>,
}

/// Writes and reads the same number of bytes, durably, and prints the seconds of each. Of an asynchronous save also how
/// long the training stands still.
const TORCH: &str = "
import json, os, shutil, sys, time, torch
place, mib = sys.argv[1], int(sys.argv[2])
told = {'version': torch.__version__}
state = {str(i): torch.randn(1 << 20) for i in range(mib // 4)}

def forget(path):
    for base, _, names in os.walk(path) if os.path.isdir(path) else [(os.path.dirname(path), [], [os.path.basename(path)])]:
        for name in names:
            with open(os.path.join(base, name), 'rb') as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

def timed(name, work):
    begun = time.monotonic()
    work()
    told[name] = time.monotonic() - begun

def save(path):
    with open(path, 'wb') as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())

path = os.path.join(place, 'torch')
timed('save_s', lambda: save(path))
forget(path)
timed('load_s', lambda: torch.load(path))
os.remove(path)
try:
    import torch.distributed.checkpoint as dcp
    dcp.async_save
except (ImportError, AttributeError):
    pass
else:
    path = os.path.join(place, 'dcp')
    timed('dcp_save_s', lambda: dcp.save(state, checkpoint_id=path))
    forget(path)
    timed('dcp_load_s', lambda: dcp.load(state, checkpoint_id=path))
    shutil.rmtree(path)
    os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT='0', RANK='0', WORLD_SIZE='1')
    torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)
    begun = time.monotonic()
    future = dcp.async_save(state, checkpoint_id=path)
    told['dcp_async_stall_s'] = time.monotonic() - begun
    future.result()
    told['dcp_async_save_s'] = time.monotonic() - begun
    shutil.rmtree(path)
print(json.dumps(told))
";

/// Runs Python in a root, with a directory of the machine at `/mnt`, in a mount namespace that ends with it.
const IN_ROOT: &str =
    "mount --bind \"$2\" \"$1/mnt\" && mount -t proc proc \"$1/proc\" && shift 2 && exec chroot \"$@\"";

/// Measures everything.
pub fn measure(args: &Args) -> Result<Report> {
    let fio = tools::fio()?;
    let root = args.newer_torch.then(tools::trixie_root).transpose()?;
    eprintln!("bench: building (release)");
    let build = ["build", "--release", "--quiet", "-p", "ckpt-snapshot", "--example", "bench_store"];
    process::capture(workspace::cargo().args(build))?;
    let bench =
        Bench { step: workspace::target_dir()?.join("release/examples/bench_store"), fio, root, args };
    let mut rounds = Vec::new();
    // The first round is not counted: it finds memory and the disk cold for whoever comes first.
    for round in 0..=args.rounds {
        eprintln!("bench: round {round} of {}", args.rounds);
        let result = bench.round(round % 2 == 0)?;
        if round > 0 {
            rounds.push(result);
        }
    }
    let mut linear = Vec::new();
    for gib in &args.linear_gib {
        eprintln!("bench: {gib} GiB, generated");
        let dir = bench.dir()?;
        let mut told = bench.step(&["linear", path(dir.path())?, &gib.to_string()])?;
        told["gib"] = (*gib).into();
        linear.push(told);
    }
    Ok(report(args.mib, rounds, linear))
}

fn report(mib: u64, rounds: Vec<Round>, linear: Vec<Value>) -> Report {
    let number = |value: &Value, field: &str| value[field].as_f64().unwrap_or(f64::NAN);
    let median_of = |pick: &dyn Fn(&Round) -> f64| median(rounds.iter().map(pick).collect());
    // Their seconds to ours.
    let torch = |field: &str, ours: fn(&Round) -> f64| {
        let ratio = |round: &Round| Some(round.torch.as_ref()?[field].as_f64()? / ours(round));
        let ratios: Vec<_> = rounds.iter().filter_map(ratio).collect();
        (!ratios.is_empty()).then(|| median(ratios))
    };
    let save = |round: &Round| seconds(&round.save);
    let load = |round: &Round| seconds(&round.load);
    let gb = mib as f64 * 1_048_576.0 / 1e9;
    Report {
        mib,
        write_ratio_vs_fio: median_of(&|round| round.fio_write_s / seconds(&round.save)),
        read_ratio_vs_fio: median_of(&|round| round.fio_read_s / seconds(&round.load)),
        verify_ratio_vs_fio: median_of(&|round| round.fio_read_s / seconds(&round.verify)),
        scrub_ratio_vs_fio: median_of(&|round| round.fio_read_s / seconds(&round.scrub)),
        changed5_bytes_ratio: median_of(&|round| {
            number(&round.changed5, "stored_bytes") / number(&round.save, "stored_bytes")
        }),
        changed5_time_ratio: median_of(&|round| seconds(&round.changed5) / seconds(&round.save)),
        changed5_hashed_time_ratio: median_of(&|round| {
            seconds(&round.changed5_hashed) / seconds(&round.save)
        }),
        cpu_s_per_gb: median_of(&|round| number(&round.save, "cpu_s") / gb),
        peak_bytes: median_of(&|round| number(&round.save, "peak_bytes")),
        write_ratio_vs_torch_save: torch("save_s", save),
        read_ratio_vs_torch_load: torch("load_s", load),
        write_ratio_vs_dcp_save: torch("dcp_save_s", save),
        write_ratio_vs_dcp_async_save: torch("dcp_async_save_s", save),
        read_ratio_vs_dcp_load: torch("dcp_load_s", load),
        linear,
        rounds,
    }
}

struct Bench<'a> {
    step: PathBuf,
    fio: PathBuf,
    /// With the newer PyTorch.
    root: Option<PathBuf>,
    args: &'a Args,
}

impl Bench<'_> {
    fn dir(&self) -> Result<tempfile::TempDir> {
        let dir = &self.args.dir;
        tempfile::Builder::new()
            .prefix("ckpt-bench-store-")
            .tempdir_in(dir)
            .with_context(|| format!("creating a directory in {}", dir.display()))
    }

    fn round(&self, ours_first: bool) -> Result<Round> {
        let dir = self.dir()?;
        let (store, file) = (dir.path().join("store"), dir.path().join("fio"));
        let (store, mib) = (path(&store)?.to_owned(), self.args.mib.to_string());
        let (mut save, mut load) = (Value::Null, Value::Null);
        let (mut fio_write_s, mut fio_read_s) = (0.0, 0.0);
        for ours in [ours_first, !ours_first] {
            if ours {
                save = self.step(&["save", &store, "1", &mib, "0"])?;
            } else {
                fio_write_s = self.fio("write", &file)?;
            }
        }
        for ours in [ours_first, !ours_first] {
            if ours {
                load = self.step(&["load", &store, "1"])?;
            } else {
                fio_read_s = self.fio("read", &file)?;
            }
        }
        let (verify, scrub) = (self.step(&["verify", &store, "1"])?, self.step(&["scrub", &store])?);
        let (mut changed5, mut changed5_hashed) = (Value::Null, Value::Null);
        for told in [ours_first, !ours_first] {
            if told {
                changed5 = self.step(&["save", &store, "2", &mib, "5", "1"])?;
            } else {
                changed5_hashed = self.step(&["save", &store, "3", &mib, "5"])?;
            }
        }
        std::fs::remove_file(&file).with_context(|| format!("removing {}", file.display()))?;
        let torch = self.torch(dir.path())?;
        Ok(Round { save, changed5, changed5_hashed, load, verify, scrub, fio_write_s, fio_read_s, torch })
    }

    fn step(&self, words: &[&str]) -> Result<Value> {
        let text = process::capture(Command::new(&self.step).args(words))?;
        serde_json::from_str(&text).with_context(|| format!("the step printed {text:?}"))
    }

    /// Seconds for all bytes, durable by then.
    fn fio(&self, direction: &str, file: &Path) -> Result<f64> {
        let text = process::capture(Command::new(&self.fio).args([
            "--name=bench",
            &format!("--filename={}", path(file)?),
            &format!("--size={}M", self.args.mib),
            &format!("--rw={direction}"),
            "--bs=4M",
            "--direct=1",
            "--ioengine=libaio",
            "--iodepth=8",
            "--end_fsync=1",
            "--refill_buffers",
            "--output-format=json",
        ]))?;
        let told: Value = serde_json::from_str(&text).context("fio printed no JSON")?;
        let run_ms = told["jobs"][0][direction]["runtime"].as_f64();
        run_ms.map(|run_ms| run_ms / 1e3).context("fio told no time")
    }

    /// In a directory, which is as before afterwards.
    fn torch(&self, dir: &Path) -> Result<Option<Value>> {
        let mib = self.args.mib.to_string();
        let mut python = match &self.root {
            Some(root) => {
                let mut unshare = Command::new("unshare");
                unshare.args(["--mount", "--propagation", "private", "sh", "-c", IN_ROOT, "sh"]);
                unshare.args([root, dir, root]).args(["/usr/bin/python3", "-c", TORCH, "/mnt", &mib]);
                unshare
            }
            None => {
                let mut import = Command::new(tools::python::PYTHON);
                if process::capture(import.args(["-c", "import torch"])).is_err() {
                    return Ok(None);
                }
                let mut python = Command::new(tools::python::PYTHON);
                python.args(["-c", TORCH, path(dir)?, &mib]);
                python
            }
        };
        let text = process::capture(&mut python)?;
        // The last line: libraries of PyTorch's complain on the standard output.
        let told = text.lines().next_back().unwrap_or_default();
        serde_json::from_str(told).map(Some).with_context(|| format!("torch printed {text:?}"))
    }
}

fn path(path: &Path) -> Result<&str> {
    path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))
}
