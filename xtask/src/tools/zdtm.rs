//! zdtm, CRIU's own functional tests: Debian's source package of the CRIU that is used, its tests built in
//! `target/tools/zdtm`.
//!
//! Nothing else of it is built. What the tests are linked with comes from packages of the system's own suite, which are
//! unpacked beside the sources.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use super::apt::{self, PrivateApt, Section};
use super::criu;
use super::os::Os;
use super::{finish, log_file, unfinished};
use crate::{process, say, workspace};

/// The variable that names the directory with the built tests, and by which tests find it.
pub const VARIABLE: &str = "CKPT_TEST_ZDTM";

/// Static libraries and headers that the tests are built with.
const LIBRARIES: &[&str] = &["libaio-dev", "libcap-dev"];
/// The directory of the tests in the sources.
const TESTS: &str = "test/zdtm";
/// A test that is always built.
const PROOF: &str = "static/busyloop00";

/// Finds or builds the tests of the CRIU that is used, and returns their directory.
pub fn set_up() -> Result<PathBuf> {
    if let Some(named) = std::env::var_os(VARIABLE).filter(|value| !value.is_empty()).map(PathBuf::from) {
        ensure!(named.join(PROOF).is_file(), "{VARIABLE} names {}, which has no {PROOF}", named.display());
        eprintln!("tools: zdtm, {} (from {VARIABLE})", named.display());
        return Ok(named);
    }
    let version = criu::version_in_use()?;
    let place = workspace::tools_dir().join("zdtm");
    let tests = place.join(format!("criu-{version}")).join(TESTS);
    if tests.join(PROOF).is_file() {
        eprintln!("tools: zdtm {version}, {}", tests.display());
        return Ok(tests);
    }
    let start = Instant::now();
    build(&version, &place).with_context(|| {
        format!("CRIU's tests could not be built; that needs Debian, as root, with make, or {VARIABLE} has to name a directory {TESTS} that is built")
    })?;
    eprintln!("tools: zdtm {version}, {} (built in {})", tests.display(), say::duration(start.elapsed()));
    Ok(tests)
}

fn build(version: &str, place: &Path) -> Result<()> {
    let os = Os::detect()?;
    os.require_apt()?;
    let log = log_file("zdtm")?;
    let _ = fs::remove_file(&log);
    eprintln!("tools: building the tests of CRIU {version} (a few minutes), the log is {}", log.display());
    let work = unfinished()?;
    let built = work.path().join("zdtm");
    let archive = sources(&os, version, work.path(), &log)?;
    fs::create_dir(&built)?;
    process::logged(Command::new("tar").arg("-xf").arg(archive).arg("-C").arg(&built), &log)?;

    let apt = PrivateApt::create(&work.path().join("libraries"), &os, &os.codename, Section::Free)?;
    apt.update(&log)?;
    let prefix = built.join("prefix");
    apt::unpack(&apt.download_alone(LIBRARIES, &log)?, &prefix, &log)?;

    let tests = built.join(format!("criu-{version}")).join(TESTS);
    let jobs = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let mut make = Command::new("make");
    // --keep-going: some need more than these libraries. The test that runs them says which are missing.
    make.args(["--keep-going", &format!("--jobs={jobs}"), "all"]).current_dir(&tests);
    make.env("CPPFLAGS", format!("-I{}", prefix.join("usr/include").display()));
    make.env("LDFLAGS", format!("-L{}", prefix.join("usr/lib/x86_64-linux-gnu").display()));
    // A newer compiler than theirs has more warnings.
    make.env("USERCFLAGS", "-Wno-error");
    let result = process::logged(&mut make, &log);
    if !tests.join(PROOF).is_file() {
        result?;
        bail!("there is no {PROOF} after make");
    }
    finish(&built, place)
}

/// Downloads the sources from the first suite that has this version.
fn sources(os: &Os, version: &str, work: &Path, log: &Path) -> Result<PathBuf> {
    for suite in criu::suites(os)? {
        let apt = PrivateApt::create(&work.join(suite), os, suite, Section::SourceCode)?;
        apt.update(log)?;
        let archive = apt.download_source("criu", log)?;
        let name = archive.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with(&format!("criu_{version}.orig.tar.")) {
            return Ok(archive);
        }
    }
    bail!("no suite of {} has the sources of CRIU {version}", os.id)
}
