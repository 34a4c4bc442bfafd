//! What tests and demo need besides the Rust toolchain, found or set up under `target/tools`.
//!
//! | tool | found | else, on Debian and Ubuntu as root |
//! |---|---|---|
//! | CRIU | on `PATH`, if new enough and `criu check` passes | a newer suite's packages, unpacked into a prefix ([`mod@criu`]) |
//! | PyTorch | `/usr/bin/python3 -c 'import torch'` | the system's package `python3-torch` ([`python`]) |
//! | uvloop | - | PyPI's wheel, in a virtual environment ([`python`]) |
//! | cuda-bindings, numba-cuda | - | PyPI's wheels, likewise |
//! | blake3, cryptography, zstandard | - | PyPI's wheels, likewise |
//! | kubernetes-validate | - | PyPI's wheels, likewise |
//! | Slurm, munge | in `CKPT_TEST_SLURM` | packages of the system's own suite, unpacked into a prefix ([`slurm`]) |
//! | a root with PyTorch 2.6 | - | debootstrap, for `test --full` only ([`rootfs`]) |
//!
//! Each is built beside its final place and renamed into it, so that an interrupted set-up is never taken for a
//! finished one, and each is checked by running it, at every start.

mod apt;
mod criu;
mod os;
pub mod python;
mod rootfs;
mod slurm;

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};

use crate::{process, workspace};

/// Begins the names of directories that are being built; any that is found at the start was left by an interrupted
/// set-up.
const UNFINISHED_PREFIX: &str = ".unfinished-";

/// Options of `cargo xtask tools`.
#[derive(clap::Args)]
pub struct Args {
    /// Also what `cargo xtask test --full` needs
    #[arg(long)]
    full: bool,
}

/// Sets up and prints the environment that the tests get.
pub fn run(args: &Args) -> Result<ExitCode> {
    let tools = Tools::set_up()?;
    for (name, value) in tools.env() {
        println!("{name}={}", value.display());
    }
    if args.full {
        println!("CKPT_TEST_ROOTFS={}", trixie_root()?.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// The tools, ready to be used.
pub struct Tools {
    /// The `criu` to use: a program or a wrapper script.
    criu: PathBuf,
    python: python::Python,
    /// A directory for `PYTHONPATH` that has uvloop.
    pythonpath: PathBuf,
    /// The Python that has cuda-bindings and numba-cuda.
    cuda_python: PathBuf,
    /// The Python that has what the reader of stores imports.
    reader_python: PathBuf,
    /// The Python that has the schemas of Kubernetes' API.
    kubernetes_python: PathBuf,
    /// A directory with Slurm's programs and plugins.
    slurm: PathBuf,
}

impl Tools {
    /// Finds or sets up everything, and prints a line for each.
    pub fn set_up() -> Result<Self> {
        let _lock = lock()?;
        let criu = criu::set_up()?;
        let python = python::set_up_torch()?;
        let pythonpath = python::set_up_uvloop()?;
        let cuda_python = python::set_up_cuda()?;
        let reader_python = python::set_up_store_reader()?;
        let kubernetes_python = python::set_up_kubernetes()?;
        let slurm = slurm::set_up()?;
        Ok(Self { criu, python, pythonpath, cuda_python, reader_python, kubernetes_python, slurm })
    }

    /// The variables that tests find the tools by. `CKPT_CRIU` is also ckpt-run's own `--criu`.
    pub fn env(&self) -> Vec<(&'static str, OsString)> {
        vec![
            ("CKPT_CRIU", self.criu.clone().into()),
            ("CKPT_TEST_PYTHON", python::PYTHON.into()),
            ("CKPT_TEST_TORCHRUN", self.python.torchrun.clone().into()),
            ("CKPT_TEST_PYTHONPATH", self.pythonpath.clone().into()),
            ("CKPT_TEST_CUDA_PYTHON", self.cuda_python.clone().into()),
            ("CKPT_TEST_READER_PYTHON", self.reader_python.clone().into()),
            ("CKPT_TEST_KUBERNETES_PYTHON", self.kubernetes_python.clone().into()),
            ("CKPT_TEST_SLURM", self.slurm.clone().into()),
        ]
    }

    /// The `criu` to use.
    pub fn criu(&self) -> &Path {
        &self.criu
    }

    /// The Python that has PyTorch.
    pub fn python(&self) -> &Path {
        Path::new(python::PYTHON)
    }

    /// The `torchrun` that belongs to the Python with PyTorch.
    pub fn torchrun(&self) -> &Path {
        &self.python.torchrun
    }
}

/// CRIU alone, for what needs nothing else.
pub fn criu() -> Result<PathBuf> {
    let _lock = lock()?;
    criu::set_up()
}

/// The directory with CRIU, its libraries and its loader, to be taken elsewhere.
pub fn criu_prefix() -> Result<PathBuf> {
    let _lock = lock()?;
    criu::prefix()
}

/// Finds fio or installs the system's package of it.
pub fn fio() -> Result<PathBuf> {
    let _lock = lock()?;
    if let Some(fio) = process::find_program("fio") {
        return Ok(fio);
    }
    os::Os::detect()?.require_apt().context("there is no fio; install it")?;
    let log = log_file("fio")?;
    eprintln!("tools: installing the system's package fio, the log is {}", log.display());
    apt::install_system(&["fio"], &log)?;
    process::find_program("fio").context("fio was installed, but is not on PATH")
}

/// The directory of a private root of Debian trixie that has PyTorch 2.6.
pub fn trixie_root() -> Result<PathBuf> {
    let _lock = lock()?;
    rootfs::set_up()
}

/// Keeps a second xtask from setting up the same things, and sweeps what an interrupted one left.
fn lock() -> Result<File> {
    let dir = workspace::tools_dir();
    fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
    let path = dir.join("lock");
    let lock = File::create(&path).with_context(|| format!("creating {}", path.display()))?;
    if lock.try_lock().is_err() {
        eprintln!("tools: waiting for another xtask that sets up {}", dir.display());
        lock.lock().with_context(|| format!("locking {}", path.display()))?;
    }
    for entry in fs::read_dir(&dir)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(UNFINISHED_PREFIX) {
            fs::remove_dir_all(entry.path())
                .with_context(|| format!("removing the unfinished {}", entry.path().display()))?;
        }
    }
    Ok(lock)
}

/// A directory to build a tool in. It goes away again unless [`finish`] gives it its name.
fn unfinished() -> Result<tempfile::TempDir> {
    let dir = workspace::tools_dir();
    tempfile::Builder::new()
        .prefix(UNFINISHED_PREFIX)
        .tempdir_in(&dir)
        .with_context(|| format!("creating a directory in {}", dir.display()))
}

/// Puts what was built in `from` in the place of whatever is at `to`.
fn finish(from: &Path, to: &Path) -> Result<()> {
    match fs::remove_dir_all(to) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("removing the old {}", to.display()));
        }
        _ => {}
    }
    fs::rename(from, to).with_context(|| format!("renaming {} to {}", from.display(), to.display()))
}

/// The log file of a tool's set-up.
fn log_file(tool: &str) -> Result<PathBuf> {
    let dir = workspace::tools_dir().join("log");
    fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
    Ok(dir.join(format!("{tool}.log")))
}
