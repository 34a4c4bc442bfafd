//! Programs of the CUDA driver API on a simulated GPU.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::{from_env, programs, workspace};

/// The directory that has simcuda as `libcuda.so.1`.
///
/// # Panics
/// When it has not been built.
#[must_use]
pub fn libcuda_dir() -> PathBuf {
    let path = from_env("CKPT_TEST_LIBCUDA", || workspace().join("target/simcuda/libcuda.so.1"));
    assert!(path.is_file(), "{} is not there: call `cargo xtask test`", path.display());
    path.parent().expect("a directory").to_owned()
}

/// The files that stand for the driver's other device files, for the interposer: what makes CRIU refuse a process that
/// uses simcuda. See simcuda's `dump_blockers.rs`.
const DEVICE_FILES: &str =
    "anon_inode:[userfaultfd],anon_inode:[landlock-ruleset],/secretmem;/secretmem,socket:[";

/// A machine with simulated GPUs of its own: its memory is not shared with other tests.
pub struct Gpu {
    directory: tempfile::TempDir,
}

impl Gpu {
    /// One device with the default memory.
    ///
    /// # Panics
    /// When there is no room for it.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "it makes a directory")]
    pub fn new() -> Self {
        let directory = tempfile::Builder::new().prefix("simcuda-test-").tempdir_in("/dev/shm");
        Self { directory: directory.expect("a directory in /dev/shm") }
    }

    /// Where the devices' memory lies.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// A command that finds simcuda as the system's `libcuda.so.1`.
    #[must_use]
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        for (name, _) in
            std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("SIMCUDA_"))
        {
            command.env_remove(name);
        }
        command.env("LD_LIBRARY_PATH", libcuda_dir()).env("SIMCUDA_DIR", self.directory.path());
        command.env("CKPT_TEST_DEVICE_FILES", self.device_files(self.directory.path()));
        // So that simcuda's files of capabilities of MIG count as those below /dev.
        command.env("CKPT_TEST_DEVICES", format!("{}/", self.directory.path().display()));
        command
    }

    /// The device files of the simulated GPUs in a directory, for the interposer and the launcher.
    #[must_use]
    pub fn device_files(&self, machine: &Path) -> String {
        format!("{},{DEVICE_FILES}", machine.join("nvidia").display())
    }

    /// A Python script of `tests/programs/cuda` with cuda-bindings and numba-cuda.
    #[must_use]
    pub fn python(&self, script: &str) -> Command {
        let mut command = self.command(cuda_python());
        command.arg(cuda_program(script));
        command.env_remove("PYTHONPATH").env("PYTHONDONTWRITEBYTECODE", "1").env("PYTHONNOUSERSITE", "1");
        command
    }

    /// A C program, linked directly against `libcuda.so.1`, in `directory`.
    ///
    /// # Panics
    /// When it cannot be compiled.
    #[must_use]
    pub fn compile(&self, source: &Path, directory: &Path) -> PathBuf {
        compile(source, directory, &["-l:libcuda.so.1"])
    }

    /// The same, linked against `libnccl.so.2` too.
    ///
    /// # Panics
    /// When it cannot be compiled.
    #[must_use]
    pub fn compile_with_nccl(&self, source: &Path, directory: &Path) -> PathBuf {
        compile(source, directory, &["-l:libnccl.so.2", "-l:libcuda.so.1"])
    }
}

fn compile(source: &Path, directory: &Path, libraries: &[&str]) -> PathBuf {
    let program = directory.join(source.file_stem().expect("a name"));
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O2"]).arg(source).arg("-o").arg(&program);
    cc.arg("-L").arg(libcuda_dir()).args(libraries).arg("-lpthread");
    succeed(cc);
    program
}

/// The Python that has cuda-bindings and numba-cuda.
///
/// # Panics
/// When it has not been set up.
#[must_use]
pub fn cuda_python() -> PathBuf {
    let python =
        from_env("CKPT_TEST_CUDA_PYTHON", || workspace().join("target/tools/cuda-python/bin/python3"));
    assert!(python.is_file(), "{} is not there: call `cargo xtask test`", python.display());
    python
}

/// The directory of cuda-bindings alone, for a Python that has other packages of its own; made in `directory`.
///
/// # Panics
/// When it cannot be made.
#[must_use]
pub fn cuda_bindings_alone(directory: &Path) -> PathBuf {
    let environment = cuda_python().parent().and_then(Path::parent).expect("PREFIX/bin/python3").join("lib");
    let versions = std::fs::read_dir(&environment).expect("the environment's lib");
    let mut packages = versions.map(|version| version.expect("an entry").path().join("site-packages/cuda"));
    let package = packages.find(|path| path.is_dir()).expect("the package `cuda`");
    let path = directory.join("cuda-bindings");
    std::fs::create_dir(&path).expect("a directory");
    std::os::unix::fs::symlink(package, path.join("cuda")).expect("a link");
    path
}

/// A source of `tests/programs/cuda`.
#[must_use]
pub fn cuda_program(name: &str) -> PathBuf {
    programs().join("cuda").join(name)
}

/// Runs a command that has to succeed; returns its standard output.
///
/// # Panics
/// When it fails, with what it said.
pub fn succeed(mut command: Command) -> String {
    let Output { status, stdout, stderr } =
        command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{command:?}: {status}\n--- stdout\n{stdout}--- stderr\n{stderr}");
    stdout.into_owned()
}

/// A program or script of the examples.
#[must_use]
pub fn example(path: &str) -> PathBuf {
    workspace().join("examples").join(path)
}

/// A program that this workspace's build has made.
///
/// # Panics
/// When it has not been built.
#[must_use]
pub fn built(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("the test's own path");
    let path = test.parent().and_then(Path::parent).expect("target/PROFILE/deps").join(name);
    assert!(path.is_file(), "{} is not there: call `cargo xtask test`", path.display());
    path
}
