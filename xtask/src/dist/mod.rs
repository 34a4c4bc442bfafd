//! `cargo xtask dist`: everything that users install, in `target/dist`.
//!
//! | file | made by |
//! |---|---|
//! | `ckpt_run-*.whl` | [`mod@run`], and [`wheel`] |
//! | `ckpt_run-*_aarch64.whl` | [`mod@run`], for jobs without a GPU |
//! | `ckpt_run_criu-*.whl` | [`criu`], and [`wheel`] |
//! | `ckpt-run_*.deb` | [`deb`] |
//! | `ckpt-run-*.rpm` | [`rpm`] |
//!
//! Those for x86-64 contain the same two files, which are built once ([`build`]) for an old glibc. maturin makes wheels of
//! programs too, but only of what it compiles itself: the other packages would contain another build, and the manual page
//! and the completions, which the built program prints, would have to exist before.

mod build;
mod criu;
mod deb;
mod notices;
mod rpm;
mod run;
mod wheel;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

use self::build::Built;
use crate::workspace;

/// What ckpt-run is, in one line.
const SUMMARY: &str = "Makes any training job survive crashes, kills and reboots";
/// The same at greater length.
const DESCRIPTION: &[&str] = &[
    "ckpt-run runs an unmodified command, saves its whole process tree at an",
    "interval, and resumes it from the last snapshot after a crash, a kill or a",
    "reboot. It needs CRIU.",
];

/// The version of ckpt-run: that of the workspace, which xtask is part of.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Options of `cargo xtask dist`.
#[derive(clap::Args)]
pub struct Args {
    /// What to make [default: everything]
    #[arg(id = "WHAT", value_enum)]
    what: Vec<What>,
}

/// Something that is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum What {
    /// The Python package ckpt-run
    Wheel,
    /// The Python package ckpt-run for arm64, for jobs without a GPU
    Arm64Wheel,
    /// The Python package ckpt-run-criu
    CriuWheel,
    /// The package for Debian and Ubuntu
    Deb,
    /// The package for Fedora, RHEL and SUSE
    Rpm,
}

/// Makes it, and prints files and sizes.
pub fn run(args: &Args) -> Result<ExitCode> {
    for path in make(&args.what)? {
        println!("{} ({})", path.display(), megabytes(size(&path)?));
    }
    Ok(ExitCode::SUCCESS)
}

/// All packages, for tests that install them.
pub fn packages() -> Result<Vec<PathBuf>> {
    make(&[])
}

fn make(what: &[What]) -> Result<Vec<PathBuf>> {
    let is_wanted = |one: What| what.is_empty() || what.contains(&one);
    let out = workspace::target_dir()?.join("dist");
    fs::create_dir_all(&out).with_context(|| format!("creating {}", out.display()))?;
    let mut made = Vec::new();
    if is_wanted(What::CriuWheel) {
        made.push(criu::wheel(&out)?);
    }
    type Package = fn(&Built, &Path) -> Result<PathBuf>;
    let packages: [(What, Package); 4] = [
        (What::Wheel, run::wheel),
        (What::Arm64Wheel, run::arm64_wheel),
        (What::Deb, deb::package),
        (What::Rpm, rpm::package),
    ];
    if packages.iter().any(|(one, _)| is_wanted(*one)) {
        let built = build::build(&out)?;
        for (_, package) in packages.iter().filter(|(one, _)| is_wanted(*one)) {
            made.push(package(&built, &out)?);
        }
    }
    Ok(made)
}

/// Where a file goes in a package, and where it comes from. The place is relative to the prefix: `bin/ckpt-run`.
#[derive(Clone)]
struct Entry {
    place: String,
    from: PathBuf,
}

impl Entry {
    fn new(place: impl Into<String>, from: impl Into<PathBuf>) -> Self {
        Self { place: place.into(), from: from.into() }
    }

    /// Programs are; texts and libraries are not.
    fn is_executable(&self) -> bool {
        let name = self.place.rsplit('/').next().unwrap_or_default();
        let is_text = self.place.contains("share/");
        !is_text && matches!(name, "ckpt-run" | "criu")
    }
}

/// Copies files to their places in `tree`, which is made anew.
fn lay_out(entries: &[Entry], tree: &Path) -> Result<()> {
    if tree.exists() {
        fs::remove_dir_all(tree).with_context(|| format!("removing {}", tree.display()))?;
    }
    for entry in entries {
        let to = tree.join(&entry.place);
        let dir = to.parent().context("a file without a directory")?;
        fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
        fs::copy(&entry.from, &to).with_context(|| format!("copying {}", entry.from.display()))?;
        let mode = if entry.is_executable() { 0o755 } else { 0o644 };
        fs::set_permissions(&to, fs::Permissions::from_mode(mode))?;
    }
    Ok(())
}

/// An error if a package is larger than it may be.
fn check_size(path: &Path, most_mb: u64) -> Result<()> {
    let bytes = size(path)?;
    if bytes > most_mb * 1_000_000 {
        bail!("{} has {}, and may have {most_mb} MB", path.display(), megabytes(bytes));
    }
    Ok(())
}

fn size(path: &Path) -> Result<u64> {
    Ok(fs::metadata(path).with_context(|| format!("reading {}", path.display()))?.len())
}

fn megabytes(bytes: u64) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}
