//! A virtual machine with a distribution's kernel, for tests of what this machine's kernel lacks: QEMU, Debian's kernel
//! with its modules, and the programs of an NFS server and client. They are packages of a newer suite, unpacked into
//! `target/tools/machine`. Its CPU is emulated, so KVM is not needed.
//!
//! The machine uses this machine's root, which it cannot change. In `target/tools/machine` are
//!
//! - `bin`: a script for each program, and busybox,
//! - `kernel`, `initramfs`: what QEMU boots,
//! - `modules`: the kernel's modules,
//! - `etc`: files that the programs of NFS look for in `/etc`.

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::apt::{self, PrivateApt, Section};
use super::os::Os;
use super::{find_or_unpack, finish, log_file, prefix, unfinished};
use crate::{process, workspace};

/// The variable by which tests find it.
pub const VARIABLE: &str = "CKPT_TEST_MACHINE";

/// The first suite whose QEMU emulates this kernel without faults: that of bookworm, 7.2, corrupts its page tables.
pub const SUITE: &str = "trixie";
/// The cloud kernel is smaller, but has no 9P.
const PACKAGES: &[&str] = &["qemu-system-x86", "busybox-static", "nfs-kernel-server", "linux-image-amd64"];

const QEMU: &str = "qemu-system-x86_64";
/// Where the other programs are in the prefix.
const PROGRAMS: &[(&str, &str)] = &[
    ("exportfs", "usr/sbin/exportfs"),
    ("mount.nfs", "usr/sbin/mount.nfs"),
    ("nfsdcld", "usr/sbin/nfsdcld"),
    ("rpc.mountd", "usr/sbin/rpc.mountd"),
    ("rpc.nfsd", "usr/sbin/rpc.nfsd"),
    ("rpc.statd", "usr/sbin/rpc.statd"),
    ("rpcbind", "usr/sbin/rpcbind"),
    ("sm-notify", "usr/sbin/sm-notify"),
];
pub const BUSYBOX: &str = "usr/bin/busybox";

/// PID 1.
pub const INIT: &str = include_str!("../../machine/init.sh");
/// The modules that PID 1 needs, those that they need not included.
const MODULES: &[&str] = &["9p", "9pnet_virtio", "overlay"];

/// Makes `initramfs` of the directory in which it is called, with the busybox that it is given.
const PACK: &str = r#"find . | "$0" cpio -o -H newc > ../initramfs"#;

/// Sets it up and returns the directory.
pub fn set_up() -> Result<PathBuf> {
    let place = workspace::tools_dir().join("machine");
    let failure =
        "the virtual machine for `cargo xtask test --full` could not be set up; it needs Debian, as root";
    find_or_unpack(&place, is_finished(&place), version, unpack, failure)?;
    Ok(place)
}

/// Whether it is all there, for this place, with this PID 1.
fn is_finished(place: &Path) -> bool {
    let has =
        |name: &str, expected: &str| fs::read_to_string(place.join(name)).is_ok_and(|text| text == expected);
    scripts(place).iter().all(|(name, script)| has(&format!("bin/{name}"), script)) && has("init/init", INIT)
}

/// The scripts in `bin`.
fn scripts(place: &Path) -> Vec<(&'static str, String)> {
    let prefix = place.join("prefix");
    let firmware = ["usr/share/qemu", "usr/share/seabios"]
        .map(|dir| ["-L".to_owned(), prefix.join(dir).to_string_lossy().into_owned()])
        .concat();
    let script = |program, options: &[String]| prefix::script(&prefix, program, options);
    let mut scripts = vec![(QEMU, script("usr/bin/qemu-system-x86_64", &firmware))];
    scripts.extend(PROGRAMS.iter().map(|(name, path)| (*name, script(path, &[]))));
    scripts
}

fn unpack(place: &Path) -> Result<String> {
    let os = Os::detect()?;
    os.require_apt()?;
    ensure!(os.id == "debian", "only Debian's mirrors have {SUITE}");
    let log = log_file("machine")?;
    eprintln!("tools: getting {} from {} {SUITE}, the log is {}", PACKAGES.join(" "), os.id, log.display());
    let work = unfinished()?;
    let apt = PrivateApt::create(&work.path().join("apt"), &os, SUITE, Section::Free)?;
    apt.update(&log)?;
    let packages = apt.download(PACKAGES, &log)?;

    let built = work.path().join("machine");
    let prefix = built.join("prefix");
    let names = apt::unpack(&packages, &prefix, &log)?;
    fs::write(built.join("packages.txt"), names)?;
    let kernel = kernel_version(&prefix)?;
    symlink(format!("prefix/boot/vmlinuz-{kernel}"), built.join("kernel"))?;
    symlink("prefix/usr/lib/modules", built.join("modules"))?;
    symlink("prefix/etc", built.join("etc"))?;
    let bin = built.join("bin");
    fs::create_dir(&bin)?;
    symlink(Path::new("../prefix").join(BUSYBOX), bin.join("busybox"))?;
    for (name, script) in scripts(place) {
        write_program(&bin.join(name), &script)?;
    }
    let busybox = prefix.join(BUSYBOX);
    let initramfs = Initramfs {
        host_busybox: &busybox,
        busybox: &busybox,
        modules: &prefix.join("usr"),
        kernel: &kernel,
    };
    initramfs.make(&built, &log)?;
    finish(&built, place)?;
    version(place).context("it was unpacked, but does not work here")
}

pub fn write_program(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text)?;
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(0o755))?)
}

/// The version of the only kernel in the prefix.
pub fn kernel_version(prefix: &Path) -> Result<String> {
    let mut entries = fs::read_dir(prefix.join("usr/lib/modules")).context("the packages have no kernel")?;
    let entry = entries.next().context("the packages have no modules")??;
    Ok(entry.file_name().to_string_lossy().into_owned())
}

/// No error if it is that something exists already.
pub fn if_exists(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::AlreadyExists { Ok(()) } else { Err(error) }
}

/// What a machine boots with.
pub struct Initramfs<'a> {
    /// The busybox that packs it.
    pub host_busybox: &'a Path,
    /// The busybox that is in it.
    pub busybox: &'a Path,
    /// The directory with `lib/modules`.
    pub modules: &'a Path,
    /// The version of the kernel.
    pub kernel: &'a str,
}

impl Initramfs<'_> {
    /// Makes `init` and `initramfs` in this directory.
    pub fn make(&self, built: &Path, log: &Path) -> Result<()> {
        let depmod = |command: &mut Command| process::logged(command, log);
        depmod(Command::new(self.host_busybox).args(["depmod", "-b"]).arg(self.modules).arg(self.kernel))?;
        let root = built.join("init");
        for dir in ["bin", "dev", "lower", "modules", "root", "upper"] {
            fs::create_dir_all(root.join(dir))?;
        }
        write_program(&root.join("init"), INIT)?;
        fs::copy(self.busybox, root.join("bin/busybox"))?;
        let modules = self.modules.join("lib/modules").join(self.kernel);
        let needs = fs::read_to_string(modules.join("modules.dep")).context("reading modules.dep")?;
        let mut order = Vec::new();
        for name in MODULES {
            add_module(name, &needs, &mut order)?;
        }
        let mut names = String::new();
        for path in order {
            let name = Path::new(path).file_name().unwrap_or_default();
            fs::copy(modules.join(path), root.join("modules").join(name))?;
            names += &format!("{}\n", name.to_string_lossy());
        }
        fs::write(root.join("modules/order"), names)?;
        let mut pack = Command::new(self.host_busybox);
        pack.args(["sh", "-c", PACK]).arg(self.host_busybox).current_dir(&root);
        process::logged(&mut pack, log)
    }
}

/// Adds a module's path behind those of the modules that it needs, by `modules.dep`.
fn add_module<'a>(name: &str, needs: &'a str, order: &mut Vec<&'a str>) -> Result<()> {
    let line = needs.lines().find_map(|line| {
        let (path, needed) = line.split_once(':')?;
        (module_name(path) == name).then_some((path, needed))
    });
    let (path, needed) = line.with_context(|| format!("the kernel has no module {name}"))?;
    for needed in needed.split_whitespace() {
        add_module(module_name(needed), needs, order)?;
    }
    if !order.contains(&path) {
        order.push(path);
    }
    Ok(())
}

fn module_name(path: &str) -> &str {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split('.').next().unwrap_or(file)
}

/// The versions of QEMU and of the kernel.
fn version(place: &Path) -> Result<String> {
    let qemu = process::capture(Command::new(place.join("bin").join(QEMU)).arg("--version"))?;
    let qemu = qemu.split_whitespace().nth(3).unwrap_or_default();
    ensure!(place.join("kernel").is_file() && place.join("initramfs").is_file(), "its kernel is missing");
    Ok(format!("QEMU {qemu} with Linux {}", kernel_version(&place.join("prefix"))?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_follows_what_it_needs() {
        let needs = "k/a.ko.xz: k/c.ko.xz k/b.ko.xz\nk/b.ko.xz: k/c.ko.xz\nk/c.ko.xz:\n";
        let mut order = Vec::new();
        add_module("b", needs, &mut order).unwrap();
        add_module("a", needs, &mut order).unwrap();
        assert_eq!(order, ["k/c.ko.xz", "k/b.ko.xz", "k/a.ko.xz"]);
        assert!(add_module("d", needs, &mut order).is_err());
    }
}
