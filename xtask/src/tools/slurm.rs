//! Slurm and munge, for the tests of the example in examples/slurm: packages of the system's own suite, unpacked into
//! `target/tools/slurm`. Installing them would start daemons and make users.
//!
//! The programs use the system's libc, and the prefix's other libraries. In `target/tools/slurm` are
//!
//! - `bin`: a script for each program,
//! - `plugins`: a link to what `PluginDir` of `slurm.conf` has to name.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::apt::{self, PrivateApt, Section};
use super::os::Os;
use super::{find_or_unpack, finish, log_file, unfinished};
use crate::{process, workspace};

const PACKAGES: &[&str] = &["slurmctld", "slurmd", "slurm-client", "munge"];

/// Where programs are in the prefix. Debian's alternatives, which a maintainer script would set up, take the suffix
/// from the daemons' names; Slurm looks at those names.
const PROGRAMS: &[(&str, &str)] = &[
    ("munged", "usr/sbin/munged"),
    ("sbatch", "usr/bin/sbatch"),
    ("scancel", "usr/bin/scancel"),
    ("scontrol", "usr/bin/scontrol"),
    ("sinfo", "usr/bin/sinfo"),
    ("slurmctld", "usr/sbin/slurmctld-wlm"),
    ("slurmd", "usr/sbin/slurmd-wlm"),
    ("slurmstepd", "usr/sbin/slurmstepd-wlm"),
    ("squeue", "usr/bin/squeue"),
    ("srun", "usr/bin/srun"),
];

/// Sets up Slurm and returns the directory with `bin` and `plugins`.
pub fn set_up() -> Result<PathBuf> {
    if let Some(named) = std::env::var_os("CKPT_TEST_SLURM").filter(|value| !value.is_empty()) {
        let named = PathBuf::from(named);
        let version =
            version(&named).with_context(|| format!("CKPT_TEST_SLURM names {}", named.display()))?;
        eprintln!("tools: {version}, {} (from CKPT_TEST_SLURM)", named.display());
        return Ok(named);
    }
    let place = workspace::tools_dir().join("slurm");
    let failure = "Slurm, which the test of its example needs, could not be set up; it needs Debian, as root, or CKPT_TEST_SLURM has to name a directory with its `bin` and `plugins`";
    find_or_unpack(&place, is_finished(&place), version, unpack, failure)?;
    Ok(place)
}

/// Whether it is all there, for this place: scripts in a workspace that was moved point elsewhere.
fn is_finished(place: &Path) -> bool {
    PROGRAMS.iter().all(|(name, _)| {
        fs::read_to_string(place.join("bin").join(name)).is_ok_and(|text| text == script(place, name))
    })
}

fn unpack(place: &Path) -> Result<String> {
    let os = Os::detect()?;
    os.require_apt()?;
    let log = log_file("slurm")?;
    eprintln!(
        "tools: getting {} from {} {}, the log is {}",
        PACKAGES.join(" "),
        os.id,
        os.codename,
        log.display()
    );
    let work = unfinished()?;
    let apt = PrivateApt::create(&work.path().join("apt"), &os, &os.codename, Section::Free)?;
    apt.update(&log)?;
    let mut packages = apt.download(PACKAGES, &log)?;
    // The system's loader would not go with another libc.
    packages
        .retain(|file| !file.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libc6_")));

    let built = work.path().join("slurm");
    let prefix = built.join("prefix");
    let names = apt::unpack(&packages, &prefix, &log)?;
    fs::write(built.join("packages.txt"), names)?;
    symlink("prefix/usr/lib/x86_64-linux-gnu/slurm-wlm", built.join("plugins"))?;
    for dir in ["bin", "programs"] {
        fs::create_dir(built.join(dir))?;
    }
    for (name, path) in PROGRAMS {
        ensure!(prefix.join(path).is_file(), "the packages have no {path}");
        symlink(Path::new("../prefix").join(path), built.join("programs").join(name))?;
        let bin = built.join("bin").join(name);
        fs::write(&bin, script(place, name))?;
        fs::set_permissions(&bin, fs::Permissions::from_mode(0o755))?;
    }
    finish(&built, place)?;
    version(place).context("it was unpacked, but does not work here")
}

/// The versions that the daemons tell: they run. The other programs want a configuration first.
fn version(place: &Path) -> Result<String> {
    let of = |name: &str| process::capture(Command::new(place.join("bin").join(name)).arg("-V"));
    let (slurm, munge) = (of("slurmd").and_then(|_| of("slurmctld"))?, of("munged")?);
    Ok(format!("{}, {}", slurm.trim(), munge.split_whitespace().next().unwrap_or_default()))
}

/// The script that stands for a program.
fn script(place: &Path, name: &str) -> String {
    let quoted = |path: PathBuf| format!("'{}'", path.to_string_lossy().replace('\'', r"'\''"));
    let prefix = place.join("prefix");
    let libraries =
        ["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu/slurm-wlm"];
    let libraries = libraries.map(|dir| quoted(prefix.join(dir))).join(":");
    let program = quoted(place.join("programs").join(name));
    format!("#!/bin/sh\n# Made by `cargo xtask`.\nLD_LIBRARY_PATH={libraries} exec {program} \"$@\"\n")
}
