//! CRIU: the one on `PATH` if it will do, else a newer suite's, unpacked into `target/tools/criu`.
//!
//! A newer suite's criu needs a newer libc than the system has, see [`mod@prefix`]. Nothing is installed: `dpkg -x` unpacks,
//! no maintainer script runs.

use std::fmt;
use std::fs;
use std::net::UdpSocket;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use super::apt::{self, PrivateApt, Section};
use super::os::Os;
use super::{finish, log_file, prefix, unfinished};
use crate::{process, say, workspace};

/// The oldest version that works. CRIU 3.17 fails on the vDSO of kernels from 6.x on. From Linux 6.16 on, the options
/// SO_PASSCRED and SO_PASSSEC are for unix sockets only; CRIU before 4.2 asks every socket for them, and fails on the
/// first TCP socket, which `criu check` does not find out.
fn floor() -> Version {
    let socket = UdpSocket::bind("127.0.0.1:0");
    let is_refused = socket.is_ok_and(|socket| rustix::net::sockopt::socket_passcred(&socket).is_err());
    if is_refused { Version(4, 2, 0) } else { Version(4, 1, 0) }
}

/// Where criu is in the prefix.
const PROGRAM: &str = "usr/sbin/criu";

/// What to do where nothing can be done automatically.
fn by_hand() -> String {
    let floor = floor();
    format!(
        "install CRIU {floor} or newer so that `criu check` passes as root, and put it on PATH or name it in CKPT_CRIU"
    )
}

/// Suites to take criu from: a stable one for its fixed versions, then newer ones for kernels that it is too old for.
struct Suites {
    os: &'static str,
    names: &'static [&'static str],
}

const SUITES: &[Suites] = &[
    Suites { os: "debian", names: &["trixie", "forky"] },
    // Not tried: the project's machines are Debian's.
    Suites { os: "ubuntu", names: &["questing", "resolute"] },
];

/// CRIU's version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Version(u32, u32, u32);

impl Version {
    /// Reads the line `Version: 4.1.1` of the output of `criu --version`, or `Version: 4.1.1-1` of a package's record.
    fn parse(output: &str) -> Option<Self> {
        let text = output.lines().find_map(|line| line.strip_prefix("Version:"))?.trim();
        let mut numbers = text.split(['.', '-']).map_while(|part| part.parse().ok());
        Some(Self(numbers.next()?, numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(major, minor, patch) = self;
        if *patch == 0 { write!(f, "{major}.{minor}") } else { write!(f, "{major}.{minor}.{patch}") }
    }
}

/// Finds or sets up CRIU and returns the program to call.
pub fn set_up() -> Result<PathBuf> {
    let named = std::env::var_os("CKPT_CRIU").filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(path) = named {
        let version = check(&path).with_context(|| format!("CKPT_CRIU names {}", path.display()))?;
        eprintln!("tools: criu {version}, {} (from CKPT_CRIU)", path.display());
        return Ok(path);
    }
    let on_path = process::find_program("criu");
    if let Some(path) = &on_path {
        match check(path) {
            Ok(version) => {
                eprintln!("tools: criu {version}, {}", path.display());
                return Ok(path.clone());
            }
            Err(error) => eprintln!("tools: criu at {} will not do: {error:#}", path.display()),
        }
    }
    let place = workspace::tools_dir().join("criu");
    let wrapper = place.join("bin/criu");
    if is_finished(&place) {
        // Complete, so that a check that fails is this machine's fault: unpacking it again would not help.
        let version = check(&wrapper).with_context(|| format!("CRIU does not work here; {}", by_hand()))?;
        eprintln!("tools: criu {version}, {}", wrapper.display());
        return Ok(wrapper);
    }
    let start = Instant::now();
    let (version, suite) = unpack(&place).with_context(|| {
        format!("no CRIU {} or newer, and it could not be set up; {}", floor(), by_hand())
    })?;
    eprintln!(
        "tools: criu {version}, {} (packages of {suite}, set up in {})",
        wrapper.display(),
        say::duration(start.elapsed())
    );
    Ok(wrapper)
}

/// The version of the CRIU that is used.
pub fn version_in_use() -> Result<String> {
    Ok(version(&mut Command::new(set_up()?))?.to_string())
}

/// The suites that may have it.
pub fn suites(os: &Os) -> Result<&'static [&'static str]> {
    let suites = SUITES.iter().find(|suites| suites.os == os.id).context("no suite is known")?;
    Ok(suites.names)
}

/// The prefix that the wrapper script leads to. It is set up even where the system has a CRIU that will do: that one's
/// libraries are not for taking along.
pub fn prefix() -> Result<PathBuf> {
    let named = std::env::var_os("CKPT_CRIU").map(PathBuf::from);
    let beside = named.as_deref().and_then(|wrapper| Some(wrapper.parent()?.parent()?.join("prefix")));
    if let Some(prefix) = beside.filter(|prefix| prefix.join(PROGRAM).is_file()) {
        return Ok(prefix);
    }
    let place = workspace::tools_dir().join("criu");
    if !is_finished(&place) {
        unpack(&place).context("CRIU could not be set up to be taken along")?;
    }
    Ok(place.join("prefix"))
}

/// Whether the prefix is there, for this place and this kernel: a workspace that was moved has a wrapper that points
/// elsewhere.
fn is_finished(place: &Path) -> bool {
    let wrapper = place.join("bin/criu");
    fs::read_to_string(&wrapper).is_ok_and(|text| text == wrapper_script(place))
        && version(&mut Command::new(&wrapper)).is_ok_and(|version| version >= floor())
}

/// The version of a criu that is new enough and passes its own check of the kernel and of our rights.
fn check(path: &Path) -> Result<Version> {
    let version = version(&mut Command::new(path))?;
    ensure!(
        version >= floor(),
        "version {version} is too old for this kernel, which needs {} or newer",
        floor()
    );
    process::capture(Command::new(path).arg("check"))?;
    Ok(version)
}

fn version(command: &mut Command) -> Result<Version> {
    let output = process::capture(command.arg("--version"))?;
    Version::parse(&output).with_context(|| format!("cannot read a version from {output:?}"))
}

/// Unpacks the first suite's criu that works, and puts it in its place.
fn unpack(place: &Path) -> Result<(Version, &'static str)> {
    let os = Os::detect()?;
    os.require_apt()?;
    let log = log_file("criu")?;
    let _ = fs::remove_file(&log);
    let mut failures = Vec::new();
    for suite in suites(&os)? {
        eprintln!("tools: getting criu from {} {suite}, the log is {}", os.id, log.display());
        match unpack_suite(&os, suite, place, &log) {
            Ok(version) => return Ok((version, suite)),
            Err(error) => {
                eprintln!("tools: {suite} will not do: {error:#}");
                failures.push(format!("{suite}: {error:#}"));
            }
        }
    }
    bail!("{}", failures.join("; "))
}

fn unpack_suite(os: &Os, suite: &str, place: &Path, log: &Path) -> Result<Version> {
    let work = unfinished()?;
    let apt = PrivateApt::create(&work.path().join("apt"), os, suite, Section::Free)?;
    apt.update(log)?;
    let candidate = apt.show("criu")?;
    let candidate = Version::parse(&candidate).context("its criu has no version")?;
    ensure!(
        candidate >= floor(),
        "its version {candidate} is too old for this kernel, which needs {}",
        floor()
    );
    let packages = apt.download(&["criu"], log)?;

    let built = work.path().join("criu");
    let prefix = built.join("prefix");
    let names = apt::unpack(&packages, &prefix, log)?;
    fs::write(built.join("packages.txt"), names)?;
    let [program, args @ ..] = prefix::command(&prefix, PROGRAM);
    version(Command::new(program).args(args))?;

    let bin = built.join("bin");
    fs::create_dir_all(&bin)?;
    fs::write(bin.join("criu"), wrapper_script(place))?;
    fs::set_permissions(bin.join("criu"), fs::Permissions::from_mode(0o755))?;
    finish(&built, place)?;
    check(&place.join("bin/criu")).context("it was unpacked, but does not work here")
}

/// The script that stands for the program `criu`.
fn wrapper_script(place: &Path) -> String {
    prefix::script(&place.join("prefix"), PROGRAM, &[])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_versions() {
        assert_eq!(Version::parse("Version: 4.1.1\n"), Some(Version(4, 1, 1)));
        assert_eq!(Version::parse("Version: 4.2\nGitID: v4.2\n"), Some(Version(4, 2, 0)));
        assert_eq!(Version::parse("Package: criu\nVersion: 4.1.1-1\n"), Some(Version(4, 1, 1)));
        assert_eq!(Version::parse("Version: 4.1-rc1\n"), Some(Version(4, 1, 0)));
        assert_eq!(Version::parse("criu: not found\n"), None);
    }

    #[test]
    fn orders_versions() {
        assert!(Version(3, 17, 1) < floor());
        assert!(Version(4, 0, 9) < floor());
        assert!(Version(4, 10, 0) > Version(4, 2, 1));
    }
}
