//! The files that every package contains: the launcher and the interposer, built for an old glibc, and what the launcher
//! prints about itself.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::{Entry, notices};
use crate::elf::{self, Version};
use crate::{process, tools, workspace};

/// The oldest glibc that packages are for.
pub const GLIBC: Version = Version(2, 31);
const PROFILE: &str = "release";

/// What a package is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    X86_64,
    Aarch64,
}

impl Architecture {
    /// Rust's name of it.
    fn target(self) -> String {
        format!("{self}-unknown-linux-gnu")
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::X86_64 => "x86_64",
            Self::Aarch64 => "aarch64",
        })
    }
}

/// What is in the packages. The programs need [`GLIBC`] or an older one.
pub struct Built {
    pub architecture: Architecture,
    /// Files and their places below a prefix, licences not among them.
    pub entries: Vec<Entry>,
    /// The text of the licence, and the notices of the crates that are linked in.
    pub licences: [PathBuf; 2],
}

/// Builds it for x86-64. Generated texts go to `out`.
pub fn build(out: &Path) -> Result<Built> {
    let dir = compile(Architecture::X86_64, &["ckpt-run", "ckpt-interpose"])?;
    let launcher = dir.join("ckpt-run");
    let interposer = dir.join("libckpt_interpose.so");
    check(&dir, &[&launcher, &interposer])?;
    let mut entries =
        vec![Entry::new("bin/ckpt-run", &launcher), Entry::new("lib/libckpt_interpose.so", &interposer)];
    entries.extend(texts(&launcher, &out.join("texts"))?);
    let licences = [workspace::root().join("LICENSE"), notices::write(out)?];
    Ok(Built { architecture: Architecture::X86_64, entries, licences })
}

impl Built {
    /// The same for arm64: the launcher alone, since the interposer is for x86-64. It has the texts of this one.
    pub fn for_arm64(&self) -> Result<Self> {
        let architecture = Architecture::Aarch64;
        tools::rust_target(&architecture.target())?;
        let dir = compile(architecture, &["ckpt-run"])?;
        let launcher = dir.join("ckpt-run");
        check(&dir, &[&launcher])?;
        let mut entries = vec![Entry::new("bin/ckpt-run", &launcher)];
        entries.extend(self.entries.iter().filter(|entry| entry.place.starts_with("share/")).cloned());
        Ok(Self { architecture, entries, licences: self.licences.clone() })
    }
}

/// Compiles packages of the workspace and returns the directory with the result. They are linked against Zig's description
/// of [`GLIBC`], whatever the machine has.
fn compile(architecture: Architecture, packages: &[&str]) -> Result<PathBuf> {
    let zig = tools::dist()?;
    let target = architecture.target();
    let mut cargo = Command::new(zig.join("bin/cargo-zigbuild"));
    cargo.arg("zigbuild").args(["--profile", PROFILE, "--target", &format!("{target}.{GLIBC}")]);
    cargo.args(packages.iter().flat_map(|package| ["--package", package])).current_dir(workspace::root());
    cargo.env("CARGO_ZIGBUILD_ZIG_PATH", zig.join("ziglang/zig"));
    // xtask's own package would be taken for the one to build.
    cargo.env_remove("CARGO_MANIFEST_DIR");
    eprintln!("dist:  building for glibc {GLIBC}: {}", process::describe(&cargo));
    let status = cargo.status().context("could not start cargo-zigbuild")?;
    ensure!(status.success(), "`{}` failed", process::describe(&cargo));
    Ok(workspace::target_dir()?.join(target).join(PROFILE))
}

/// An error if one of the files, or the library for CRIU, needs a newer glibc or another library.
fn check(dir: &Path, files: &[&Path]) -> Result<()> {
    let in_criu = library_in_criu(&dir.join("build"))?;
    let glibc = needed_glibc(&[files, &[&in_criu]].concat())?;
    ensure!(glibc <= GLIBC, "the build needs glibc {glibc}, and packages are for {GLIBC} and newer");
    eprintln!("dist:  the programs need glibc {glibc}");
    Ok(())
}

/// The library for CRIU, which the launcher contains: the one that was built last.
fn library_in_criu(builds: &Path) -> Result<PathBuf> {
    let entries = fs::read_dir(builds).with_context(|| format!("reading {}", builds.display()))?;
    let paths = entries.flatten().map(|entry| entry.path().join("out/libckpt_criu.so"));
    let built = paths.filter_map(|path| Some((fs::metadata(&path).ok()?.modified().ok()?, path)));
    Ok(built.max().context("there is no libckpt_criu.so in the build")?.1)
}

/// The newest glibc that one of these files needs. Each may need no other libraries than glibc's own.
fn needed_glibc(files: &[&Path]) -> Result<Version> {
    let mut newest = Version(2, 17);
    for path in files {
        let bytes = fs::read(path).with_context(|| format!("reading {}", path.display()))?;
        let foreign: Vec<_> =
            elf::needed_libraries(&bytes)?.into_iter().filter(|name| !is_everywhere(name)).collect();
        ensure!(foreign.is_empty(), "{} needs {}", path.display(), foreign.join(", "));
        newest = newest.max(elf::needed_glibc(&bytes)?.unwrap_or(newest));
    }
    Ok(newest)
}

/// Whether every system with glibc has this library (PEP 600 and the policies of auditwheel).
fn is_everywhere(library: &str) -> bool {
    let name = library.split(".so.").next().unwrap_or_default();
    [
        "libc",
        "libm",
        "libdl",
        "librt",
        "libpthread",
        "libutil",
        "libgcc_s",
        "ld-linux-x86-64",
        "ld-linux-aarch64",
    ]
    .contains(&name)
}

/// The completions and the manual page, as the launcher prints them.
fn texts(launcher: &Path, dir: &Path) -> Result<Vec<Entry>> {
    fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
    let made: &[(&[&str], &str)] = &[
        (&["man"], "share/man/man1/ckpt-run.1"),
        (&["completions", "bash"], "share/bash-completion/completions/ckpt-run"),
        (&["completions", "zsh"], "share/zsh/site-functions/_ckpt-run"),
        (&["completions", "fish"], "share/fish/vendor_completions.d/ckpt-run.fish"),
    ];
    let print = |(arguments, place): &(&[&str], &str)| {
        let text = process::capture(Command::new(launcher).args(*arguments).stdin(Stdio::null()))?;
        let file: PathBuf = dir.join(place.replace('/', "-"));
        fs::write(&file, text).with_context(|| format!("writing {}", file.display()))?;
        Ok(Entry::new(*place, file))
    };
    made.iter().map(print).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_libraries_of_glibc_are_everywhere() {
        for name in ["libc.so.6", "ld-linux-x86-64.so.2", "libgcc_s.so.1", "libm.so.6"] {
            assert!(is_everywhere(name), "{name}");
        }
        for name in ["libssl.so.3", "libz.so.1", "libcuda.so.1", "libstdc++.so.6"] {
            assert!(!is_everywhere(name), "{name}");
        }
    }

    #[test]
    fn this_test_needs_what_is_everywhere() {
        let program = std::env::current_exe().unwrap();
        assert!(needed_glibc(&[&program]).unwrap() >= Version(2, 17));
    }
}
