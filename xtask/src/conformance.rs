//! `cargo xtask conformance`: the conformance suite against simcuda or any other driver, and what NVIDIA's own
//! libcuda.so.1 shows without a GPU.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};

use crate::tools::{self, Tool};
use crate::{process, test, workspace};

/// The packages with tests of NVIDIA's library, and what the names of those tests contain.
const REAL_DRIVER_PACKAGES: &[&str] = &["cuda-abi", "ckpt-interpose", "ckpt-conformance", "ckpt-run-tests"];
const REAL_DRIVER_TESTS: &str = "nvidias";

/// Options of `cargo xtask conformance`.
#[derive(clap::Args)]
pub struct Args {
    /// The libcuda.so.1 to check; without it simcuda, built now
    #[arg(long, value_name = "PATH")]
    lib: Option<PathBuf>,
    /// The libnccl.so.2 to check over that driver; without it, the one in the same folder
    #[arg(long, value_name = "PATH")]
    nccl: Option<PathBuf>,
    /// Run the tests of NVIDIA's own libcuda.so.1, runtimes and NCCL instead, which are downloaded and need no GPU
    #[arg(long, conflicts_with_all = ["lib", "nccl", "json", "names"])]
    real_driver: bool,
    /// With `--real-driver`: also PyTorch's CUDA build, CuPy, JAX, numba and Triton, which take 8 GB
    #[arg(long, requires = "real_driver")]
    full: bool,
    /// Write all outcomes to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Only these checks; a name that ends with / stands for all of its area
    #[arg(value_name = "NAME")]
    names: Vec<String>,
}

/// Builds the suite and runs it. The exit code is the suite's: 1 if a check failed, 2 for bad input.
pub fn run(args: &Args) -> Result<ExitCode> {
    if args.real_driver { run_with_real_driver(args.full) } else { run_suite(args) }
}

/// Runs the tests of NVIDIA's libraries. Without `is_full` they are also part of `cargo xtask test`.
fn run_with_real_driver(is_full: bool) -> Result<ExitCode> {
    let mut needed = vec![Tool::Criu, Tool::Torch, Tool::NvidiaLibcuda, Tool::NvidiaLibraries];
    if is_full {
        needed.extend([Tool::Nccl13, Tool::CudaFrameworks]);
    }
    let mut command = match test::with_programs(tools::environment(&needed)?)? {
        Ok(command) => command,
        Err(code) => return Ok(code),
    };
    let packages = REAL_DRIVER_PACKAGES.iter().flat_map(|package| ["--package", package]);
    command.args(packages).args(["--features", "ckpt-interpose/faults", "--tests", "--no-fail-fast"]);
    let status = command.args(["--", REAL_DRIVER_TESTS]).status().context("could not start cargo test")?;
    Ok(process::exit_code(status))
}

fn run_suite(args: &Args) -> Result<ExitCode> {
    let here = std::env::current_dir().context("finding the working directory")?;
    let mut command = workspace::cargo();
    command.args(["run", "--quiet", "--package", "ckpt-conformance", "--", "--lib"]);
    match &args.lib {
        Some(lib) => {
            command.arg(here.join(lib));
        }
        None => {
            command.arg(workspace::simcuda()?);
            // Each check has devices of its own there; two let nothing be skipped.
            let jobs = std::thread::available_parallelism().map_or(1, usize::from);
            command.args(["--jobs", &jobs.to_string()]).env("SIMCUDA_DEVICES", "2");
        }
    }
    if let Some(nccl) = &args.nccl {
        command.arg("--nccl").arg(here.join(nccl));
    }
    if let Some(json) = &args.json {
        command.arg("--json").arg(here.join(json));
    }
    let status = command.args(&args.names).status().context("could not start the conformance suite")?;
    Ok(process::exit_code(status))
}
