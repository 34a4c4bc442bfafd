//! NVIDIA's own `libcuda.so.1`, for tests of how programs find it and how it fails: packages of Debian's section
//! non-free, unpacked into `target/tools/libcuda`.
//!
//! It loads on a machine without a GPU: cuInit answers CUDA_ERROR_NO_DEVICE, and all look-ups work.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use super::apt::{self, PrivateApt, Section};
use super::os::Os;
use super::{finish, log_file, python, unfinished};
use crate::{process, say, workspace};

/// The variable that names another one, and by which tests find it.
pub const VARIABLE: &str = "CKPT_TEST_NVIDIA_LIBCUDA";

/// The suite that has the version of the measured facts in cuda-abi.
const SUITE: &str = "trixie";
/// What a driver of that version says: CUDA 12.4.
const CUDA_VERSION: &str = "12040";
const PACKAGES: &[&str] = &["libcuda1", "libnvidia-ptxjitcompiler1"];

/// Prints what cuDriverGetVersion answers.
const ASK: &str = "import ctypes, sys
version = ctypes.c_int()
assert ctypes.CDLL(sys.argv[1]).cuDriverGetVersion(ctypes.byref(version)) == 0
print(version.value)";

/// Finds or unpacks the library, and returns its path.
pub fn set_up() -> Result<PathBuf> {
    if let Some(named) = std::env::var_os(VARIABLE).filter(|value| !value.is_empty()).map(PathBuf::from) {
        check(&named).with_context(|| format!("{VARIABLE} names {}", named.display()))?;
        eprintln!("tools: libcuda.so.1, {} (from {VARIABLE})", named.display());
        return Ok(named);
    }
    let place = workspace::tools_dir().join("libcuda");
    let library = library(&place);
    if check(&library).is_ok() {
        eprintln!("tools: libcuda.so.1, {}", library.display());
        return Ok(library);
    }
    let start = Instant::now();
    unpack(&place).with_context(|| {
        format!(
            "NVIDIA's libcuda.so.1 could not be set up; it needs Debian, as root, or {VARIABLE} has to name one for CUDA 12.4"
        )
    })?;
    let took = say::duration(start.elapsed());
    eprintln!("tools: libcuda.so.1, {} (set up in {took})", library.display());
    Ok(library)
}

fn library(place: &Path) -> PathBuf {
    place.join("prefix/usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.1")
}

fn check(library: &Path) -> Result<()> {
    ensure!(library.is_file(), "there is no {}", library.display());
    let version = process::capture(Command::new(python::PYTHON).args(["-c", ASK]).arg(library))?;
    ensure!(version.trim() == CUDA_VERSION, "it is for CUDA {}, not {CUDA_VERSION}", version.trim());
    Ok(())
}

fn unpack(place: &Path) -> Result<()> {
    let os = Os::detect()?;
    os.require_apt()?;
    let log = log_file("libcuda")?;
    eprintln!("tools: getting {} from {} {SUITE}, the log is {}", PACKAGES.join(" "), os.id, log.display());
    let work = unfinished()?;
    let apt = PrivateApt::create(&work.path().join("apt"), &os, SUITE, Section::NonFree)?;
    apt.update(&log)?;
    let packages = apt.download_alone(PACKAGES, &log)?;
    let built = work.path().join("libcuda");
    let names = apt::unpack(&packages, &built.join("prefix"), &log)?;
    fs::write(built.join("packages.txt"), names)?;
    check(&library(&built))?;
    finish(&built, place)
}
