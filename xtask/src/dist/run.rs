//! The Python package `ckpt-run`: the launcher, the interposer, completions and the manual page.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::build::{Built, GLIBC};
use super::wheel::Wheel;
use super::{SUMMARY, VERSION, check_size};
use crate::workspace;

/// How large the wheel may be.
const MOST_MB: u64 = 15;

/// Writes the wheel into `out` and returns its path.
pub fn wheel(built: &Built, out: &Path) -> Result<PathBuf> {
    let readme = workspace::root().join("README.md");
    let description = fs::read_to_string(&readme).with_context(|| format!("reading {}", readme.display()))?;
    let wheel = Wheel {
        name: "ckpt-run",
        version: VERSION,
        summary: SUMMARY,
        licence: "Apache-2.0",
        licences: vec![workspace::root().join("LICENSE")],
        description,
        more: &["Provides-Extra: criu", "Requires-Dist: ckpt-run-criu >=4.2 ; extra == 'criu'"],
        glibc: GLIBC,
    };
    let path = wheel.write(&built.entries, out)?;
    check_size(&path, MOST_MB)?;
    Ok(path)
}
