//! What tests and demo need besides the Rust toolchain, found or set up under `target/tools`. Each command of xtask
//! sets up only the tools that it uses.
//!
//! | tool | found | else, on Debian and Ubuntu as root |
//! |---|---|---|
//! | CRIU | on `PATH`, if new enough and `criu check` passes | a newer suite's packages, unpacked into a prefix ([`mod@criu`]) |
//! | PyTorch | `/usr/bin/python3 -c 'import torch'` | the system's package `python3-torch` ([`python`]) |
//! | uvloop | - | PyPI's wheel, in a virtual environment ([`python`]) |
//! | LMDB | - | PyPI's wheel, likewise |
//! | mkfs.xfs | on `PATH` | the system's package `xfsprogs` |
//! | buildah | on `PATH` | the system's package `buildah`, for `test --full` only |
//! | Chromium | on `PATH` | the system's package `chromium`, for `test --full` only |
//! | mkfs.btrfs | on `PATH` | the system's package `btrfs-progs`, for `test --full` only |
//! | cuda-bindings, numba-cuda | - | PyPI's wheels, likewise |
//! | blake3, cryptography, zstandard | - | PyPI's wheels, likewise |
//! | kubernetes-validate | - | PyPI's wheels, likewise |
//! | uv | - | PyPI's wheel, likewise, for `test --full` only |
//! | Zig, cargo-zigbuild, wheel | - | PyPI's wheels, likewise, for `dist` only |
//! | CRIU's sources | - | the archive of Debian's source package, for `dist` only ([`mod@criu_source`]) |
//! | Slurm, munge | in `CKPT_TEST_SLURM` | packages of the system's own suite, unpacked into a prefix ([`slurm`]) |
//! | NVIDIA's libcuda.so.1 | in `CKPT_TEST_NVIDIA_LIBCUDA` | packages of Debian's section non-free, unpacked ([`libcuda`]) |
//! | NVIDIA's libcudart and NCCL | - | PyPI's wheels, likewise |
//! | PyTorch's CUDA build, CuPy, JAX, numba, Triton | - | PyPI's wheels, for `conformance --real-driver --full` only |
//! | CRIU's own tests | in `CKPT_TEST_ZDTM` | sources of the CRIU that is used, for `test --full` only ([`zdtm`]) |
//! | earlier builds of ckpt-run | - | from the history of this repository, for `test --full` only ([`releases`]) |
//! | a root with PyTorch 2.6, bare roots | - | debootstrap, for `test --full` only ([`rootfs`]) |
//! | a virtual machine with Debian's kernel, NFS | - | packages of a newer suite, unpacked, for `test --full` only ([`machine`]) |
//! | a virtual machine with arm64 | - | likewise ([`arm64`]) |
//! | Rust's standard library for arm64 | installed | rustup, for `dist` only |
//!
//! Each tool is built beside its final place and renamed into it: an interrupted set-up is never mistaken for a
//! finished one. Each tool is checked at every start by running it.

mod apt;
mod arm64;
mod criu;
mod criu_source;
mod libcuda;
pub mod machine;
mod os;
mod prefix;
pub mod python;
mod releases;
mod rootfs;
mod slurm;
mod zdtm;

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Context, Result};

use crate::{process, say, workspace};
pub use criu_source::CriuSource;

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
    let mut variables = environment(&Tool::ALL)?;
    if args.full {
        variables.extend(full_environment()?);
    }
    for (name, value) in variables {
        println!("{name}={}", value.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// A tool that tests find by environment variables.
#[derive(Clone, Copy)]
pub enum Tool {
    /// The `criu` to use: a program or a wrapper script.
    Criu,
    /// A Python that has PyTorch, and its `torchrun`.
    Torch,
    /// A directory for `PYTHONPATH` that has uvloop.
    Uvloop,
    /// A Python that has cuda-bindings and numba-cuda.
    CudaPython,
    /// A Python that has what the reader of stores imports.
    StoreReader,
    /// A Python that has the schemas of Kubernetes' API.
    Kubernetes,
    /// A directory with Slurm's programs and plugins.
    Slurm,
    /// A directory for `PYTHONPATH` that has LMDB.
    Lmdb,
    /// The program `mkfs.xfs`.
    MkfsXfs,
    /// NVIDIA's own `libcuda.so.1`.
    NvidiaLibcuda,
    /// A directory with NVIDIA's runtimes and its library of collectives.
    NvidiaLibraries,
    /// A directory with the library of collectives for CUDA 13. For `conformance --real-driver --full`.
    Nccl13,
    /// A Python that has frameworks that were built for CUDA. For `conformance --real-driver --full`.
    CudaFrameworks,
}

/// Environment variables.
pub type Variables = Vec<(&'static str, OsString)>;

impl Tool {
    /// What the whole test suite needs.
    pub const ALL: [Self; 11] = [
        Self::Criu,
        Self::Torch,
        Self::Uvloop,
        Self::CudaPython,
        Self::StoreReader,
        Self::Kubernetes,
        Self::Slurm,
        Self::Lmdb,
        Self::MkfsXfs,
        Self::NvidiaLibcuda,
        Self::NvidiaLibraries,
    ];

    fn set_up(self) -> Result<Variables> {
        let one = |name, value: PathBuf| vec![(name, value.into())];
        Ok(match self {
            // Also ckpt-run's own `--criu`.
            Self::Criu => one("CKPT_CRIU", criu::set_up()?),
            Self::Torch => vec![
                ("CKPT_TEST_PYTHON", python::PYTHON.into()),
                ("CKPT_TEST_TORCHRUN", python::set_up_torch()?.into()),
            ],
            Self::Uvloop => one("CKPT_TEST_PYTHONPATH", python::set_up_uvloop()?),
            Self::CudaPython => one("CKPT_TEST_CUDA_PYTHON", python::set_up_cuda()?),
            Self::StoreReader => one("CKPT_TEST_READER_PYTHON", python::set_up_store_reader()?),
            Self::Kubernetes => one("CKPT_TEST_KUBERNETES_PYTHON", python::set_up_kubernetes()?),
            Self::Slurm => one("CKPT_TEST_SLURM", slurm::set_up()?),
            Self::Lmdb => one("CKPT_TEST_LMDB", python::set_up_lmdb()?),
            Self::MkfsXfs => one("CKPT_TEST_MKFS_XFS", set_up_program("mkfs.xfs", "xfsprogs")?),
            Self::NvidiaLibcuda => one(libcuda::VARIABLE, libcuda::set_up()?),
            Self::NvidiaLibraries => one("CKPT_TEST_NVIDIA_LIBRARIES", python::set_up_nvidia_libraries()?),
            Self::Nccl13 => one("CKPT_TEST_NCCL_13", python::set_up_nccl_13()?),
            Self::CudaFrameworks => one("CKPT_TEST_CUDA_FRAMEWORKS", python::set_up_frameworks()?),
        })
    }
}

/// Finds or sets up tools, prints a line for each, and returns the variables by which tests find them.
pub fn environment(tools: &[Tool]) -> Result<Variables> {
    let _lock = lock()?;
    let mut variables = Variables::new();
    for tool in tools {
        variables.extend(tool.set_up()?);
    }
    Ok(variables)
}

/// The same for what only `cargo xtask test --full` needs.
pub fn full_environment() -> Result<Variables> {
    let _lock = lock()?;
    let mut variables = vec![
        (zdtm::VARIABLE, zdtm::set_up()?.into()),
        (machine::VARIABLE, machine::set_up()?.into()),
        (arm64::VARIABLE, arm64::set_up()?.into()),
        ("CKPT_TEST_BUILDAH", set_up_program("buildah", "buildah")?.into()),
        ("CKPT_TEST_CHROMIUM", set_up_program("chromium", "chromium")?.into()),
        ("CKPT_TEST_MKFS_BTRFS", set_up_program("mkfs.btrfs", "btrfs-progs")?.into()),
        ("CKPT_TEST_ROOTFS", rootfs::set_up()?.into()),
    ];
    let roots = std::env::join_paths(rootfs::set_up_bare()?).context("joining the paths of bare roots")?;
    variables.push(("CKPT_TEST_BARE_ROOTS", roots));
    variables.push(("CKPT_TEST_UV", python::set_up_uv()?.into()));
    variables.extend(releases::set_up()?.map(|dir| (releases::VARIABLE, dir.into())));
    Ok(variables)
}

/// The directory of a private root of Debian trixie that has PyTorch 2.6.
pub fn trixie_root() -> Result<PathBuf> {
    let _lock = lock()?;
    rootfs::set_up()
}

/// CRIU: the program to call.
pub fn criu() -> Result<PathBuf> {
    let _lock = lock()?;
    criu::set_up()
}

/// The `torchrun` of the system's Python, which has PyTorch.
pub fn torchrun() -> Result<PathBuf> {
    let _lock = lock()?;
    python::set_up_torch()
}

/// The directory with CRIU, its libraries and its loader, to be taken elsewhere.
pub fn criu_prefix() -> Result<PathBuf> {
    let _lock = lock()?;
    criu::prefix()
}

/// The directory with Zig, cargo-zigbuild and wheel.
pub fn dist() -> Result<PathBuf> {
    let _lock = lock()?;
    python::set_up_dist()
}

/// Installs Rust's standard library for a target, unless it is there.
pub fn rust_target(target: &str) -> Result<()> {
    let _lock = lock()?;
    let print = ["--print", "target-libdir", "--target", target];
    let dir = process::capture(Command::new("rustc").args(print).current_dir(workspace::root()))?;
    if Path::new(dir.trim()).is_dir() {
        return Ok(());
    }
    let log = log_file(target)?;
    eprintln!("tools: getting Rust's standard library for {target}, the log is {}", log.display());
    let mut rustup = Command::new("rustup");
    process::logged(rustup.args(["target", "add", target]).current_dir(workspace::root()), &log)
        .with_context(|| format!("Rust's standard library for {target} is not installed"))
}

/// Finds rpmbuild or installs the system's package of it.
pub fn rpmbuild() -> Result<PathBuf> {
    let _lock = lock()?;
    set_up_program("rpmbuild", "rpm")
}

/// The sources of CRIU. Installs the packages `depends`, which they are built with.
pub fn criu_source(depends: &[&str]) -> Result<CriuSource> {
    let _lock = lock()?;
    criu_source::set_up(depends)
}

/// Finds fio or installs the system's package of it.
pub fn fio() -> Result<PathBuf> {
    let _lock = lock()?;
    set_up_program("fio", "fio")
}

/// Finds a program or installs the system's package of it.
fn set_up_program(name: &str, package: &str) -> Result<PathBuf> {
    if let Some(path) = process::find_program(name) {
        return Ok(path);
    }
    os::Os::detect()?.require_apt().with_context(|| format!("there is no {name}; install {package}"))?;
    let log = log_file(package)?;
    eprintln!("tools: installing the system's package {package}, the log is {}", log.display());
    apt::install_system(&[package], &log)?;
    process::find_program(name).with_context(|| format!("{package} was installed, but {name} is not on PATH"))
}

/// Finds what is unpacked at a place, or unpacks it there, and prints its version. `failure` says what it is needed for.
fn find_or_unpack(
    place: &Path,
    is_finished: bool,
    version: fn(&Path) -> Result<String>,
    unpack: fn(&Path) -> Result<String>,
    failure: &'static str,
) -> Result<()> {
    if is_finished && let Ok(version) = version(place) {
        eprintln!("tools: {version}, {}", place.display());
        return Ok(());
    }
    let start = Instant::now();
    let version = unpack(place).context(failure)?;
    let took = say::duration(start.elapsed());
    eprintln!("tools: {version}, {} (set up in {took})", place.display());
    Ok(())
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
