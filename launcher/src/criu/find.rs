//! Finding CRIU and checking its version.

use crate::sys::privileges::{self, Privileges};
use crate::sys::process_memory::PAGE_BYTES;
use std::ffi::OsString;
use std::fmt;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The oldest supported CRIU: older versions fail on the vDSO layout of current kernels.
pub const MIN_VERSION: Version = Version { major: 4, minor: 1, patch: 0 };

/// The oldest CRIU for kernels that [restrict socket options](restricts_socket_options), where older versions fail on every
/// TCP or UDP socket, and for arm64.
const MIN_VERSION_NEW: Version = Version { major: 4, minor: 2, patch: 0 };

/// CPUs with SVE, and with SME (asm/hwcap.h of arm64).
const HWCAP_SVE: usize = 1 << 22;
const HWCAP2_SME: usize = 1 << 23;

/// Whether this kernel supports SO_PASSCRED and SO_PASSSEC for unix sockets only (Linux 6.16 and newer). CRIU before 4.2
/// queries both for every socket and treats the refusal as an error.
fn restricts_socket_options() -> bool {
    let Ok(socket) = std::net::UdpSocket::bind("127.0.0.1:0") else { return false };
    rustix::net::sockopt::socket_passcred(&socket).is_err()
}

/// The oldest CRIU that works on this machine.
fn needed_version() -> Version {
    // CRIU before 4.2 restores no process on a CPU with pointer authentication.
    let is_new = restricts_socket_options() || cfg!(target_arch = "aarch64");
    if is_new { MIN_VERSION_NEW } else { MIN_VERSION }
}

/// Why no CRIU saves the processes of this machine as they are.
fn unsupported() -> Option<String> {
    let bytes = rustix::param::page_size() as u64;
    if bytes != PAGE_BYTES {
        return Some(format!(
            "the kernel's memory pages have {bytes} bytes, and ckpt-run works with pages of {PAGE_BYTES} bytes only. Use a kernel with such pages"
        ));
    }
    let (hwcap, hwcap2) = rustix::param::linux_hwcap();
    // CRIU 4.2.1 saves the registers of NT_PRFPREG only, which are the lower halves.
    let has_vectors = cfg!(target_arch = "aarch64") && (hwcap & HWCAP_SVE != 0 || hwcap2 & HWCAP2_SME != 0);
    has_vectors.then(|| {
        "the CPU has SVE or SME, whose registers CRIU does not save: a job would go on with wrong values. Use the kernel parameters arm64.nosve and arm64.nosme".to_owned()
    })
}

/// A CRIU version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    major: u32,
    minor: u32,
    patch: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

impl Version {
    /// Parses the output of `criu --version`.
    fn parse(text: &str) -> Option<Self> {
        let line = text.lines().find_map(|line| line.strip_prefix("Version:"))?;
        let mut numbers = line.trim().split(['.', '-', ' ']).map(str::parse::<u32>);
        let (major, minor) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
        Some(Self { major, minor, patch: numbers.next().and_then(Result::ok).unwrap_or(0) })
    }
}

/// The CRIU of the Python package `ckpt-run-criu`, seen from the directory of ckpt-run.
const PACKAGED: &str = "../lib/ckpt-run/criu";

/// A usable CRIU.
#[derive(Clone, Debug)]
pub struct Criu {
    /// Its program.
    pub path: PathBuf,
    /// Its version.
    pub version: Version,
    /// Why this one is used.
    pub reason: String,
}

/// There is no usable CRIU.
#[derive(Debug, thiserror::Error)]
pub enum CriuMissing {
    /// No CRIU was found.
    #[error(
        "CRIU is not installed: there is no `criu` in PATH, and the package ckpt-run-criu is not installed with ckpt-run. Install criu {needed} or newer, or name one with --criu PATH", needed = needed_version()
    )]
    NotFound,
    /// The program is not a working CRIU.
    #[error("{path} does not run as CRIU: {reason}. Name another one with --criu PATH", path = path.display())]
    Broken {
        /// The program.
        path: PathBuf,
        /// What failed.
        reason: String,
    },
    /// No process can be started.
    #[error("cannot start {path}: {reason}", path = path.display())]
    NoProcess {
        /// The program.
        path: PathBuf,
        /// What failed.
        reason: String,
    },
    /// CRIU is too old.
    #[error("{path} is CRIU {found}, but this machine needs at least {needed}. Name another one with --criu PATH", path = path.display())]
    TooOld {
        /// The program.
        path: PathBuf,
        /// Its version.
        found: Version,
        /// The oldest version that works on this machine.
        needed: Version,
    },
    /// No CRIU works on this machine as it is.
    #[error("jobs cannot be saved on this machine: {reason}")]
    Unsupported {
        /// What is wrong, and the remedy.
        reason: String,
    },
}

impl Criu {
    /// Finds the CRIU that the user named. Without one: the newer of the one in PATH or the sbin directories, and the one
    /// of the package `ckpt-run-criu`.
    ///
    /// # Errors
    /// See [`CriuMissing`].
    pub fn find(named: Option<&Path>) -> Result<Self, CriuMissing> {
        if let Some(reason) = unsupported() {
            return Err(CriuMissing::Unsupported { reason });
        }
        if let Some(path) = named {
            let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
            return Self::at(path, "named with --criu");
        }
        let path = std::env::var_os("PATH").unwrap_or_default();
        let more = ["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from);
        let mut candidates = std::env::split_paths(&path).chain(more).map(|dir| dir.join("criu"));
        let in_path = candidates.find(|path| path.is_file());
        let packaged = std::env::current_exe().ok().and_then(|program| packaged(&program));
        let try_one = |path: Option<PathBuf>, reason| {
            path.map_or(Err(CriuMissing::NotFound), |path| Self::at(path, reason))
        };
        Self::choose(try_one(in_path, "the one in PATH"), try_one(packaged, "of the package ckpt-run-criu"))
    }

    /// The newer one. The one in PATH if both have the same version: it fits the system.
    fn choose(
        in_path: Result<Self, CriuMissing>,
        packaged: Result<Self, CriuMissing>,
    ) -> Result<Self, CriuMissing> {
        let because = |criu: Self, why: String| Self { reason: format!("{}: {why}", criu.reason), ..criu };
        match (in_path, packaged) {
            (Ok(in_path), Ok(packaged)) if packaged.version > in_path.version => {
                let why = format!("{} is only {}", in_path.path.display(), in_path.version);
                Ok(because(packaged, why))
            }
            (Ok(in_path), _) => Ok(in_path),
            (Err(CriuMissing::NotFound), Ok(packaged)) => {
                Ok(because(packaged, "there is no criu in PATH".to_owned()))
            }
            (Err(CriuMissing::TooOld { path, found, .. }), Ok(packaged)) => {
                Ok(because(packaged, format!("{} is only {found}", path.display())))
            }
            (Err(_), Ok(packaged)) => Ok(because(packaged, "the criu in PATH does not work".to_owned())),
            (Err(CriuMissing::NotFound), Err(packaged)) => Err(packaged),
            (Err(in_path), Err(_)) => Err(in_path),
        }
    }

    /// Asks the program at `path` for its version.
    fn at(path: PathBuf, reason: &str) -> Result<Self, CriuMissing> {
        let broken = |reason: String| CriuMissing::Broken { path: path.clone(), reason };
        let output = Command::new(&path).arg("--version").stdin(Stdio::null()).output();
        let output = output.map_err(|error| match (error.kind(), error.to_string()) {
            (ErrorKind::WouldBlock, reason) => CriuMissing::NoProcess { path: path.clone(), reason },
            (_, reason) => broken(reason),
        })?;
        let text = String::from_utf8_lossy(&output.stdout);
        let version = Version::parse(&text).ok_or_else(|| {
            broken(format!("--version printed {:?}", text.lines().next().unwrap_or_default()))
        })?;
        let needed = needed_version();
        if version < needed {
            return Err(CriuMissing::TooOld { path, found: version, needed });
        }
        Ok(Self { path, version, reason: reason.to_owned() })
    }

    /// Runs `criu check`, which checks the kernel for the features that CRIU needs.
    ///
    /// # Errors
    /// CRIU's first error message.
    pub fn check(&self) -> Result<(), String> {
        let mut command = Command::new(&self.path);
        command.arg("check").stdin(Stdio::null());
        if Privileges::detect().is_limited() {
            command.arg("--unprivileged");
        }
        let handed_on = privileges::hand_on();
        let output = handed_on.and_then(|()| command.output());
        let _ = privileges::keep_back();
        let output = output.map_err(|error| error.to_string())?;
        if output.status.success() {
            return Ok(());
        }
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        Err(text.lines().find(|line| line.contains("Error")).unwrap_or(text.trim()).to_owned())
    }

    /// Whether `criu check` says that this kernel tracks changes to memory (soft-dirty bits).
    #[must_use]
    pub fn tracks_memory(&self) -> bool {
        let mut command = Command::new(&self.path);
        command.args(["check", "--feature", "mem_dirty_track"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    }

    /// The command line of `criu swrk`, without the number of its socket.
    #[must_use]
    pub fn swrk(&self) -> Vec<OsString> {
        vec![self.path.clone().into_os_string(), OsString::from("swrk")]
    }
}

/// The CRIU that is installed with `program`.
fn packaged(program: &Path) -> Option<PathBuf> {
    std::fs::canonicalize(program.parent()?.join(PACKAGED)).ok().filter(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn criu(path: &str, version: &str) -> Criu {
        let version = Version::parse(&format!("Version: {version}")).unwrap();
        Criu { path: path.into(), version, reason: path.to_owned() }
    }

    #[test]
    fn the_newer_one_is_used() {
        let choose = |in_path: &str, packaged: &str| {
            let chosen = Criu::choose(Ok(criu("in PATH", in_path)), Ok(criu("packaged", packaged)));
            chosen.unwrap().reason
        };
        assert_eq!(choose("4.1", "4.2.1"), "packaged: in PATH is only 4.1.0");
        assert_eq!(choose("4.2.1", "4.2.1"), "in PATH");
        assert_eq!(choose("4.3", "4.2.1"), "in PATH");
    }

    #[test]
    fn the_packaged_one_stands_in_for_one_that_is_unusable() {
        let old = || CriuMissing::TooOld { path: "/x".into(), found: MIN_VERSION, needed: MIN_VERSION };
        let broken = || CriuMissing::Broken { path: "/x".into(), reason: "no ELF".into() };
        for (in_path, why) in [
            (CriuMissing::NotFound, "there is no criu in PATH"),
            (old(), "/x is only 4.1.0"),
            (broken(), "the criu in PATH does not work"),
        ] {
            let chosen = Criu::choose(Err(in_path), Ok(criu("packaged", "4.2.1"))).unwrap();
            assert_eq!(chosen.reason, format!("packaged: {why}"));
        }
        let missing = || CriuMissing::NotFound;
        assert!(matches!(Criu::choose(Err(missing()), Err(missing())), Err(CriuMissing::NotFound)));
        assert!(matches!(Criu::choose(Err(old()), Err(missing())), Err(CriuMissing::TooOld { .. })));
        assert!(matches!(Criu::choose(Err(missing()), Err(broken())), Err(CriuMissing::Broken { .. })));
        assert_eq!(Criu::choose(Ok(criu("in PATH", "4.2")), Err(broken())).unwrap().reason, "in PATH");
    }

    #[test]
    fn finds_what_the_package_installs() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("bin/ckpt-run");
        assert_eq!(packaged(&program), None);
        std::fs::create_dir_all(dir.path().join("bin")).unwrap();
        std::fs::create_dir_all(dir.path().join("lib/ckpt-run")).unwrap();
        let criu = dir.path().join("lib/ckpt-run/criu");
        std::fs::write(&criu, "").unwrap();
        assert_eq!(packaged(&program), Some(std::fs::canonicalize(criu).unwrap()));
    }

    #[test]
    fn reads_versions() {
        let parse = |text| Version::parse(text).map(|version| version.to_string());
        assert_eq!(parse("Version: 4.1.1\n"), Some("4.1.1".into()));
        assert_eq!(parse("Version: 4.2\nGitID: v4.2-3\n"), Some("4.2.0".into()));
        assert_eq!(parse("criu: not found"), None);
        assert!(Version::parse("Version: 3.19").unwrap() < MIN_VERSION);
        assert!(Version::parse("Version: 4.1").unwrap() >= MIN_VERSION);
    }
}
