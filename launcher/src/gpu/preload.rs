//! Preloading the interposer: whether and from where to preload it, and the socket for its agents.
//!
//! `--interpose auto` preloads the interposer if it is installed and a CUDA driver is installed. The driver is searched
//! where the dynamic loader would search, but not loaded, to keep driver code out of this process. A job with a driver in
//! a directory of its own needs `--interpose PATH`.

use crate::agents::{Agents, Loss, Quiesced, ReturnSummary};
use crate::sys::descriptor_limit;
use crate::sys::runtime_dir::{private, runtime_dir, short_name};
use anyhow::{Context, Result, bail};
use ckpt_protocol::agent::SOCKET_VARIABLE;
use ckpt_snapshot::{AgentsRecord, JobDir};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The interposer's file name.
pub const LIBRARY: &str = "libckpt_interpose.so";
/// The CUDA driver's file name.
const DRIVER: &str = "libcuda.so.1";

/// The library has code for this architecture only.
pub const IS_AVAILABLE: bool = cfg!(target_arch = "x86_64");
/// The dynamic loader's cache of installed libraries.
const LOADER_CACHE: &str = "/etc/ld.so.cache";
/// Default directories of the loader, because its cache may be outdated.
const LOADER_DIRS: &[&str] =
    &["/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib"];

/// Whether the interposer is preloaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Interposer {
    /// Preloaded from this path.
    On(PathBuf),
    /// Not preloaded, for this reason.
    Off(String),
}

impl Default for Interposer {
    fn default() -> Self {
        Self::Off("not chosen yet".to_owned())
    }
}

impl Interposer {
    /// Parses the value of `--interpose`; `None` if it is invalid.
    #[must_use]
    pub fn parse(value: &str) -> Option<Self> {
        match value {
            "off" => Some(Self::Off("as wanted".to_owned())),
            "auto" => Some(Self::find(
                std::env::current_exe().ok().as_deref(),
                &driver_dirs(std::env::var_os("LD_LIBRARY_PATH")),
                Path::new(LOADER_CACHE),
            )),
            path => {
                let path = fs::canonicalize(path).ok()?;
                (IS_AVAILABLE && path.is_file() && can_be_preloaded(&path)).then_some(Self::On(path))
            }
        }
    }

    /// The library to preload, if any.
    #[must_use]
    pub fn library(&self) -> Option<&Path> {
        match self {
            Self::On(path) => Some(path),
            Self::Off(_) => None,
        }
    }

    fn find(program: Option<&Path>, driver_dirs: &[PathBuf], cache: &Path) -> Self {
        if !IS_AVAILABLE {
            return Self::Off(format!(
                "{LIBRARY} is for x86-64 only: jobs that use a GPU cannot be saved here"
            ));
        }
        let Some(library) = program.and_then(installed) else {
            return Self::Off(format!("{LIBRARY} is neither beside ckpt-run nor in ../lib"));
        };
        if !can_be_preloaded(&library) {
            return Self::Off(format!(
                "LD_PRELOAD cannot name {}: its path contains a space or a colon",
                library.display()
            ));
        }
        if !has_driver(driver_dirs, cache) {
            return Self::Off(format!("there is no CUDA driver ({DRIVER}) on this machine"));
        }
        Self::On(library)
    }
}

impl std::fmt::Display for Interposer {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::On(path) => path.display().fmt(out),
            Self::Off(why) => write!(out, "off: {why}"),
        }
    }
}

/// The interposer installed with `program`: in the same directory, or in `../lib`.
fn installed(program: &Path) -> Option<PathBuf> {
    let dir = program.parent()?;
    let candidates = [dir.join(LIBRARY), dir.join("../lib").join(LIBRARY)];
    candidates.iter().find_map(|path| fs::canonicalize(path).ok().filter(|path| path.is_file()))
}

/// Spaces and colons separate the entries of `LD_PRELOAD` (ld.so(8)).
fn can_be_preloaded(path: &Path) -> bool {
    !path.as_os_str().as_bytes().iter().any(|byte| b": \t\n".contains(byte))
}

/// The directories that the dynamic loader searches besides its cache, for this `LD_LIBRARY_PATH`.
fn driver_dirs(library_path: Option<OsString>) -> Vec<PathBuf> {
    let library_path = library_path.unwrap_or_default();
    // Semicolons separate like colons, and an empty entry is the working directory (ld.so(8)).
    let listed = library_path.as_bytes().split(|byte| b":;".contains(byte)).filter(|dir| !dir.is_empty());
    let listed = listed.map(|dir| PathBuf::from(OsStr::from_bytes(dir)));
    listed.chain(LOADER_DIRS.iter().map(PathBuf::from)).collect()
}

fn has_driver(dirs: &[PathBuf], cache: &Path) -> bool {
    dirs.iter().any(|dir| dir.join(DRIVER).is_file())
        || fs::read(cache).is_ok_and(|cache| cache_entries(&cache, DRIVER).any(|path| path.is_file()))
}

/// The paths of `library` in a loader's cache. Its string table contains them between zero bytes; the rest of the cache is
/// irrelevant here.
fn cache_entries<'a>(cache: &'a [u8], library: &'a str) -> impl Iterator<Item = PathBuf> + 'a {
    let strings = cache.split(|&byte| byte == 0);
    let path = |string: &&[u8]| {
        let slash = string.iter().rposition(|&byte| byte == b'/');
        string.starts_with(b"/") && slash.is_some_and(|slash| &string[slash + 1..] == library.as_bytes())
    };
    strings.filter(path).map(|string| PathBuf::from(OsStr::from_bytes(string)))
}

/// The path at which the processes of a new job look for the launcher.
fn socket_path(dir: &JobDir) -> Result<PathBuf> {
    Ok(runtime_dir()?.join(format!("{}.agents", short_name(dir.path()))))
}

/// Listens for agents: where those of a snapshot look for the launcher, also if the store was moved since, or
/// XDG_RUNTIME_DIR is another one. A process whose GPU driver hangs for `gpu_timeout` is lost.
///
/// # Errors
/// When the socket cannot be created, or another launcher listens there.
pub fn listen(dir: &JobDir, resumed: Option<&AgentsRecord>, gpu_timeout: Duration) -> Result<Agents> {
    let path = match resumed.map(|record| record.socket.as_str()).filter(|path| !path.is_empty()) {
        Some(recorded) => PathBuf::from(recorded),
        None => socket_path(dir)?,
    };
    if let Some(parent) = path.parent() {
        private(parent.to_owned()).with_context(|| {
            format!("the job's processes look for ckpt-run at {}, which cannot be used", path.display())
        })?;
    }
    if UnixStream::connect(&path).is_ok() {
        bail!(
            "another ckpt-run listens at {}: it runs the same job, perhaps from a copy of the store. Stop it first",
            path.display()
        );
    }
    descriptor_limit::raise();
    Agents::listen(&path, gpu_timeout)
        .with_context(|| format!("cannot listen for the interposer at {}", path.display()))
}

/// The environment variables that preload the interposer into the job's processes and name the launcher's socket. The
/// interposer comes before the libraries that the user preloads, because it has to be found before the driver.
///
/// # Errors
/// When there is no directory for the socket.
pub fn variables(interposer: &Interposer, dir: &JobDir) -> Result<Vec<(String, OsString)>> {
    let Some(library) = interposer.library() else { return Ok(Vec::new()) };
    let mut preload = library.as_os_str().to_owned();
    if let Some(more) = std::env::var_os("LD_PRELOAD").filter(|more| !more.is_empty()) {
        preload.push(":");
        preload.push(more);
    }
    let socket = socket_path(dir)?.into_os_string();
    Ok(vec![("LD_PRELOAD".to_owned(), preload), (SOCKET_VARIABLE.to_owned(), socket)])
}

/// Waits until the agents of a resumed job have returned, or it `is_over`; `proc` is the job's /proc.
///
/// # Errors
/// When a process has lost its GPU state, or does not connect.
pub fn await_return(
    agents: &Agents,
    record: &AgentsRecord,
    proc: &Path,
    timeout: Duration,
    is_over: &dyn Fn() -> bool,
) -> Result<(), Loss> {
    let expected = Quiesced::expected(record.attempt, record.pids.iter().copied(), proc);
    agents.drop_unexpected_mirrors(&expected);
    let summary = agents.await_return_unless(is_over, &expected, timeout);
    log_return(&summary);
    let silent = summary.missing.into_iter().next().filter(|_| !agents.is_restoring());
    let silent = silent.map(|process| Loss {
        process,
        reason: format!("its interposer has not connected to {} after the restore", agents.path().display()),
    });
    summary.lost.into_iter().next().or(silent).map_or(Ok(()), Err)
}

/// Logs which processes have returned.
pub fn log_return(summary: &ReturnSummary) {
    tracing::debug!(
        "interposer: {} processes continued, {} were restored",
        summary.continued,
        summary.restored
    );
    for process in &summary.missing {
        tracing::warn!(
            "the interposer in {process} has not returned yet; no further snapshot is taken until it has"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(path: &Path) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "").unwrap();
    }

    #[test]
    fn auto_needs_a_library_and_a_driver() {
        let dir = tempfile::tempdir().unwrap();
        let at = |path: &str| dir.path().canonicalize().unwrap().join(path);
        let find = || Interposer::find(Some(&at("bin/ckpt-run")), &[at("driver")], &at("cache"));
        touch(&at("bin/ckpt-run"));
        touch(&at("driver/libcuda.so.1"));
        assert!(find().to_string().contains("neither beside ckpt-run nor"), "{}", find());
        touch(&at("lib/libckpt_interpose.so"));
        assert_eq!(find(), Interposer::On(at("lib/libckpt_interpose.so")));
        touch(&at("bin/libckpt_interpose.so"));
        assert_eq!(find(), Interposer::On(at("bin/libckpt_interpose.so")));
        fs::remove_file(at("driver/libcuda.so.1")).unwrap();
        assert!(find().to_string().contains("no CUDA driver"), "{}", find());
        // The cache may name a file that no longer exists.
        let driver = at("elsewhere/libcuda.so.1");
        fs::write(at("cache"), format!("glibc-ld.so.cache1.1\0\x01\0{}\0tail\0", driver.display())).unwrap();
        assert!(find().library().is_none());
        touch(&driver);
        assert!(find().library().is_some());
    }

    #[test]
    fn a_path_that_ld_preload_would_split_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let library = dir.path().canonicalize().unwrap().join("my programs").join(LIBRARY);
        touch(&library);
        assert_eq!(Interposer::parse(library.to_str().unwrap()), None);
        let found =
            Interposer::find(Some(&library.with_file_name("ckpt-run")), &[], Path::new("/nonexistent"));
        assert!(found.to_string().contains("a space or a colon"), "{found}");
        assert_eq!(Interposer::parse("/nonexistent.so"), None);
        assert_eq!(Interposer::parse("off").unwrap().library(), None);
    }

    #[test]
    fn the_cache_is_searched_for_whole_names() {
        let cache =
            b"\0\x03/a/libcuda.so.1\0/b/libcuda.so.1\0/c/libcuda.so.11\0/d/xlibcuda.so.1\0libcuda.so.1\0";
        assert_eq!(cache_entries(cache, DRIVER).collect::<Vec<_>>(), [Path::new("/b/libcuda.so.1")]);
    }

    #[test]
    fn the_library_path_comes_first() {
        let dirs = driver_dirs(Some("/one:/two;:/three".into()));
        assert_eq!(dirs[..3], ["/one", "/two", "/three"].map(PathBuf::from));
        assert_eq!(dirs[3..], LOADER_DIRS.iter().map(PathBuf::from).collect::<Vec<_>>());
    }
}
