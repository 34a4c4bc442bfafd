//! The Python package `ckpt-run-criu`: CRIU, its licences, and its source code.
//!
//! CRIU is built by `packaging/criu/build.sh` from the archive of Debian's source package, as a static program: it works
//! with every C library, so no library has to lie beside it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::build::Architecture;
use super::wheel::Wheel;
use super::{Entry, check_size};
use crate::elf::{self, Version};
use crate::tools::{self, CriuSource};
use crate::{process, say, workspace};

/// How large the wheel may be.
const MOST_MB: u64 = 10;

/// The packages whose libraries are in the program, beside CRIU.
const LINKED: &[&str] =
    &["libbsd-dev", "libc6-dev", "libmd-dev", "libnet1-dev", "libnl-3-dev", "libprotobuf-c-dev", "uuid-dev"];

/// The files of ckpt-run's library in CRIU, its root first.
const LIBRARY: [&str; 3] = ["entry.rs", "registers.rs", "pages.rs"];

/// Texts of licences that those packages' own files refer to.
const COMMON_LICENCES: &[&str] = &["GPL-2", "LGPL-2.1"];

const LICENCE: &str =
    "GPL-2.0-only AND LGPL-2.1-only AND LGPL-2.1-or-later AND BSD-2-Clause AND BSD-3-Clause";

/// Writes the wheel into `out` and returns its path.
pub fn wheel(out: &Path) -> Result<PathBuf> {
    let files = workspace::root().join("packaging/criu");
    let depends = fs::read_to_string(files.join("BUILD-DEPENDS")).context("reading BUILD-DEPENDS")?;
    let source = tools::criu_source(&depends.lines().collect::<Vec<_>>())?;
    let work = out.join("criu");
    fs::create_dir_all(&work).with_context(|| format!("creating {}", work.display()))?;
    let program = build(&files, &source, &work)?;
    let bytes = fs::read(&program).with_context(|| format!("reading {}", program.display()))?;
    ensure!(elf::needed_libraries(&bytes)?.is_empty(), "{} is not static", program.display());
    let said = process::capture(Command::new(&program).arg("--version"))?;
    ensure!(said.contains(&format!("Version: {}\n", source.version)), "the built CRIU says {said:?}");

    fs::write(work.join("SOURCES"), sources(&source)?)?;
    let mut entries =
        vec![Entry::new("lib/ckpt-run/criu", &program), Entry::new(share("SOURCES"), work.join("SOURCES"))];
    for name in ["build.sh", "BUILD-DEPENDS", "README.md"] {
        entries.push(Entry::new(share(name), files.join(name)));
    }
    for name in LIBRARY {
        entries.push(Entry::new(share(name), library().join(name)));
    }
    let archive = source.archive.file_name().context("an archive without a name")?.to_string_lossy();
    entries.push(Entry::new(share(&archive), &source.archive));
    let wheel = Wheel {
        name: "ckpt-run-criu",
        version: &source.version,
        summary: "CRIU for ckpt-run",
        licence: LICENCE,
        licences: licences(&source, &work)?,
        description: fs::read_to_string(files.join("README.md")).context("reading README.md")?,
        more: &[],
        // A static program needs none. pip knows tags from 2.17 on by their old names too.
        glibc: Version(2, 17),
        architecture: Architecture::X86_64,
    };
    let path = wheel.write(&entries, out)?;
    check_size(&path, MOST_MB)?;
    Ok(path)
}

/// The directory of ckpt-run's library in CRIU.
fn library() -> PathBuf {
    workspace::root().join("launcher/src/criu/library")
}

fn share(name: &str) -> String {
    format!("share/ckpt-run-criu/{name}")
}

/// Builds the program, unless an earlier call has built it from the same archive with the same script.
fn build(files: &Path, source: &CriuSource, work: &Path) -> Result<PathBuf> {
    let program = work.join("criu");
    let script = files.join("build.sh");
    let mut made_from = format!("{}\n{}", source.sha256, fs::read_to_string(&script)?);
    for name in LIBRARY {
        made_from += &fs::read_to_string(library().join(name))?;
    }
    let record = work.join("made-from");
    if program.is_file() && fs::read_to_string(&record).is_ok_and(|text| text == made_from) {
        return Ok(program);
    }
    let start = std::time::Instant::now();
    let log = work.join("build.log");
    eprintln!("dist:  building CRIU {}, the log is {}", source.version, log.display());
    let [entry_rs, ..] = LIBRARY.map(|name| library().join(name));
    process::logged(Command::new(&script).arg(&source.archive).arg(&program).arg(entry_rs), &log)?;
    fs::write(&record, made_from)?;
    eprintln!("dist:  CRIU {} is built ({})", source.version, say::duration(start.elapsed()));
    Ok(program)
}

/// Which sources the program is made of.
fn sources(source: &CriuSource) -> Result<String> {
    let mut query = Command::new("dpkg-query");
    query.args(["--show", "--showformat=${source:Package} ${source:Version}\n"]).args(LINKED);
    Ok(format!(
        "The program lib/ckpt-run/criu was built by build.sh from\n\n{} (SHA-256 {})\n\n\
         which is beside this file, and linked with libraries of these source packages of Debian,\n\
         which snapshot.debian.org keeps:\n\n{}",
        source.archive.file_name().unwrap_or_default().to_string_lossy(),
        source.sha256,
        process::capture(&mut query)?
    ))
}

/// The texts of all licences, copied into `work`.
fn licences(source: &CriuSource, work: &Path) -> Result<Vec<PathBuf>> {
    let dir = work.join("licences");
    fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
    let mut texts = vec![("COPYING.criu".to_owned(), member(&source.archive, "COPYING")?)];
    let mut copy = |name: String, from: PathBuf| -> Result<()> {
        let text = fs::read_to_string(&from).with_context(|| format!("reading {}", from.display()))?;
        texts.push((name, text));
        Ok(())
    };
    for package in LINKED {
        copy(format!("copyright.{package}"), format!("/usr/share/doc/{package}/copyright").into())?;
    }
    for name in COMMON_LICENCES {
        copy((*name).to_owned(), format!("/usr/share/common-licenses/{name}").into())?;
    }
    let write = |(name, text): (String, String)| {
        let path = dir.join(name);
        fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
        Ok(path)
    };
    texts.into_iter().map(write).collect()
}

/// A file of the archive, by its name in the archive's only directory.
fn member(archive: &Path, name: &str) -> Result<String> {
    let mut tar = Command::new("tar");
    tar.args(["--extract", "--to-stdout", "--wildcards", "--file"]).arg(archive).arg(format!("*/{name}"));
    process::capture(tar.args(["--no-wildcards-match-slash"]))
}
