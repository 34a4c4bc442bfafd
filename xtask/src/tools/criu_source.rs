//! The sources of the newest CRIU that a suite has, in `target/tools/criu-source`, and the packages that they are built
//! with.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::apt::{self, PrivateApt, Section};
use super::os::Os;
use super::{criu, finish, log_file, unfinished};
use crate::{process, workspace};

/// An archive of CRIU's sources.
pub struct CriuSource {
    /// The archive, `criu_4.2.1.orig.tar.xz`.
    pub archive: PathBuf,
    /// The version of CRIU, `4.2.1`.
    pub version: String,
    /// The checksum of the archive.
    pub sha256: String,
}

/// Finds or downloads the archive, and installs the packages `depends` where they are missing.
pub fn set_up(depends: &[&str]) -> Result<CriuSource> {
    let os = Os::detect()?;
    os.require_apt()?;
    let log = log_file("criu-source")?;
    if process::capture(Command::new("dpkg-query").arg("--show").args(depends)).is_err() {
        eprintln!("tools: installing {}, the log is {}", depends.join(" "), log.display());
        apt::install_system(depends, &log)?;
    }
    let place = workspace::tools_dir().join("criu-source");
    if find(&place).is_err() {
        let suite = criu::suites(&os)?.last().context("no suite is known")?;
        let work = unfinished()?;
        let apt = PrivateApt::create(&work.path().join("apt"), &os, suite, Section::SourceCode)?;
        apt.update(&log)?;
        let archive = apt.download_source("criu", &log)?;
        let made = work.path().join("criu-source");
        fs::create_dir(&made)?;
        let name = archive.file_name().context("an archive without a name")?;
        fs::copy(&archive, made.join(name)).with_context(|| format!("copying {}", archive.display()))?;
        finish(&made, &place)?;
    }
    find(&place)
}

fn find(place: &Path) -> Result<CriuSource> {
    let entries = fs::read_dir(place).with_context(|| format!("reading {}", place.display()))?;
    for entry in entries {
        let archive = entry?.path();
        let name = archive.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let version = name.strip_prefix("criu_").and_then(|rest| rest.split_once(".orig.tar."));
        if let Some((version, _)) = version {
            let sum = process::capture(Command::new("sha256sum").arg(&archive))?;
            let sha256 = sum.split(' ').next().unwrap_or_default().to_owned();
            return Ok(CriuSource { archive, version: version.to_owned(), sha256 });
        }
    }
    anyhow::bail!("{} has no archive of CRIU's sources", place.display())
}
