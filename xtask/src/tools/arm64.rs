//! A virtual machine with arm64, for the test of the package for it: QEMU with a CPU that it emulates, Debian's kernel, and
//! a root with CRIU. They are packages of newer suites, unpacked into `target/tools/arm64`.
//!
//! `initramfs`, `kernel` and `bin` are as for the [other machine](super::machine). `root` is its root, in which `/tool` has
//! what its first script looks for.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::apt::{self, PrivateApt, Section};
use super::machine::{self, Initramfs};
use super::os::Os;
use super::{find_or_unpack, finish, log_file, prefix, unfinished};
use crate::{process, workspace};

/// The variable by which tests find it.
pub const VARIABLE: &str = "CKPT_TEST_ARM64";

const QEMU: &str = "qemu-system-aarch64";
const QEMU_PROGRAM: &str = "usr/bin/qemu-system-aarch64";
/// CRIU before 4.2 fails on CPUs with pointer authentication, such as the one that is emulated.
const CRIU_SUITE: &str = "forky";
/// Packages of the root, with what they depend on.
const PROGRAMS: &[&str] = &["bash", "busybox-static", "coreutils", "criu", "mount"];
/// What the packages leave to their scripts, and where the machine mounts something.
const DIRECTORIES: &[&str] = &["dev", "proc", "run", "sys", "tmp", "tool/bin", "usr/lib/modules"];

/// Sets it up and returns the directory.
pub fn set_up() -> Result<PathBuf> {
    let place = workspace::tools_dir().join("arm64");
    let failure = "the virtual machine with arm64 for `cargo xtask test --full` could not be set up; it needs Debian, as root";
    find_or_unpack(&place, is_finished(&place), version, unpack, failure)?;
    Ok(place)
}

/// Whether it is all there, for this place, with this PID 1.
fn is_finished(place: &Path) -> bool {
    let has =
        |name: &str, expected: &str| fs::read_to_string(place.join(name)).is_ok_and(|text| text == expected);
    has(&format!("bin/{QEMU}"), &script(place)) && has("init/init", machine::INIT)
}

/// The script in `bin`.
fn script(place: &Path) -> String {
    let prefix = place.join("prefix");
    let firmware = prefix.join("usr/share/qemu").to_string_lossy().into_owned();
    prefix::script(&prefix, QEMU_PROGRAM, &["-L".to_owned(), firmware])
}

fn unpack(place: &Path) -> Result<String> {
    let os = Os::detect()?;
    os.require_apt()?;
    ensure!(os.id == "debian", "only Debian's mirrors have {CRIU_SUITE}");
    let log = log_file("arm64")?;
    eprintln!("tools: getting {QEMU}, and programs and a kernel for arm64, the log is {}", log.display());
    let work = unfinished()?;
    let built = work.path().join("arm64");
    let get = |suite: &str, architecture: &str, packages: &[&str], to: &str| -> Result<()> {
        let dir = work.path().join(format!("apt-{to}"));
        let apt = PrivateApt::create_for(&dir, &os, suite, Section::Free, architecture)?;
        apt.update(&log)?;
        apt::unpack(&apt.download(packages, &log)?, &built.join(to), &log).map(drop)
    };
    get(machine::SUITE, "amd64", &["qemu-system-arm", "busybox-static"], "prefix")?;
    get(machine::SUITE, "arm64", &["linux-image-arm64"], "kernels")?;
    get(CRIU_SUITE, "arm64", PROGRAMS, "root")?;

    let (kernels, root) = (built.join("kernels"), built.join("root"));
    let kernel = machine::kernel_version(&kernels)?;
    fs::copy(kernels.join(format!("boot/vmlinuz-{kernel}")), built.join("kernel"))?;
    for dir in DIRECTORIES {
        fs::create_dir_all(root.join(dir))?;
    }
    symlink("bash", root.join("usr/bin/sh")).or_else(machine::if_exists)?;
    symlink("../../usr/bin/busybox", root.join("tool/bin/busybox"))?;
    let initramfs = Initramfs {
        host_busybox: &built.join("prefix").join(machine::BUSYBOX),
        busybox: &root.join(machine::BUSYBOX),
        modules: &kernels.join("usr"),
        kernel: &kernel,
    };
    initramfs.make(&built, &log)?;
    fs::rename(kernels.join("usr/lib/modules"), root.join("tool/modules"))?;
    fs::remove_dir_all(&kernels)?;

    let bin = built.join("bin");
    fs::create_dir_all(&bin)?;
    machine::write_program(&bin.join(QEMU), &script(place))?;
    finish(&built, place)?;
    version(place).context("it was unpacked, but does not work here")
}

/// The versions of QEMU and of the kernel.
fn version(place: &Path) -> Result<String> {
    let qemu = process::capture(Command::new(place.join("bin").join(QEMU)).arg("--version"))?;
    let qemu = qemu.split_whitespace().nth(3).unwrap_or_default();
    ensure!(place.join("kernel").is_file() && place.join("initramfs").is_file(), "its kernel is missing");
    let modules =
        fs::read_dir(place.join("root/tool/modules"))?.next().context("its modules are missing")??;
    Ok(format!("QEMU {qemu} for arm64 with Linux {}", modules.file_name().to_string_lossy()))
}
