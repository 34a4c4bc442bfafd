//! Preloading the interposer: whether, from where, and the socket on which its agents are met.
//!
//! `--interpose auto` preloads it if it lies where it is installed and there is a CUDA driver for a job to find. The
//! driver is looked for in the places where the dynamic loader would look, without loading it: that would be a driver's
//! code in our own process. A job that brings a driver along in a place of its own needs `--interpose PATH`.

use crate::agents::{Agents, Back, Loss, Quiesced};
use crate::sys::descriptor_limit;
use crate::sys::runtime_dir::{runtime_dir, short_name};
use anyhow::{Context, Result};
use ckpt_protocol::agent::SOCKET_VARIABLE;
use ckpt_snapshot::{AgentsRecord, JobDir};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The interposer's file name.
pub const LIBRARY: &str = "libckpt_interpose.so";
/// The CUDA driver's.
const DRIVER: &str = "libcuda.so.1";

/// The dynamic loader's list of the libraries that there are.
const LOADER_CACHE: &str = "/etc/ld.so.cache";
/// Where the loader looks besides; the list may be older than what lies there.
const LOADER_DIRS: &[&str] =
    &["/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib"];

/// Whether the interposer is preloaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Interposer {
    /// It is, from here.
    On(PathBuf),
    /// It is not, and why.
    Off(String),
}

impl Default for Interposer {
    fn default() -> Self {
        Self::Off("not chosen yet".to_owned())
    }
}

impl Interposer {
    /// What an option's value comes to; `None` if it is not one.
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
                (path.is_file() && can_be_preloaded(&path)).then_some(Self::On(path))
            }
        }
    }

    /// The library, if it is to be preloaded.
    #[must_use]
    pub fn library(&self) -> Option<&Path> {
        match self {
            Self::On(path) => Some(path),
            Self::Off(_) => None,
        }
    }

    fn find(program: Option<&Path>, driver_dirs: &[PathBuf], cache: &Path) -> Self {
        let Some(library) = program.and_then(installed) else {
            return Self::Off(format!("{LIBRARY} is neither beside ckpt-run nor in ../lib"));
        };
        if !can_be_preloaded(&library) {
            return Self::Off(format!(
                "LD_PRELOAD cannot name {}: there is a space or a colon in it",
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

/// Where the interposer is installed with `program`: beside it, or in `../lib`.
fn installed(program: &Path) -> Option<PathBuf> {
    let dir = program.parent()?;
    let places = [dir.join(LIBRARY), dir.join("../lib").join(LIBRARY)];
    places.iter().find_map(|place| fs::canonicalize(place).ok().filter(|place| place.is_file()))
}

/// `LD_PRELOAD` is a list with spaces and colons between (ld.so(8)).
fn can_be_preloaded(path: &Path) -> bool {
    !path.as_os_str().as_bytes().iter().any(|byte| b": \t\n".contains(byte))
}

/// The directories in which the dynamic loader looks without its cache, given `LD_LIBRARY_PATH`.
fn driver_dirs(library_path: Option<OsString>) -> Vec<PathBuf> {
    let library_path = library_path.unwrap_or_default();
    // Semicolons are as good as colons, and nothing between two of them is the working directory (ld.so(8)).
    let listed = library_path.as_bytes().split(|byte| b":;".contains(byte)).filter(|dir| !dir.is_empty());
    let listed = listed.map(|dir| PathBuf::from(OsStr::from_bytes(dir)));
    listed.chain(LOADER_DIRS.iter().map(PathBuf::from)).collect()
}

fn has_driver(dirs: &[PathBuf], cache: &Path) -> bool {
    dirs.iter().any(|dir| dir.join(DRIVER).is_file())
        || fs::read(cache).is_ok_and(|cache| cached(&cache, DRIVER).any(|path| path.is_file()))
}

/// The paths of `library` in a loader's cache. Its table of strings has them whole, each with a zero byte before and
/// after it; what else is in the cache does not matter here.
fn cached<'a>(cache: &'a [u8], library: &'a str) -> impl Iterator<Item = PathBuf> + 'a {
    let strings = cache.split(|&byte| byte == 0);
    let path = |string: &&[u8]| {
        let slash = string.iter().rposition(|&byte| byte == b'/');
        string.starts_with(b"/") && slash.is_some_and(|slash| &string[slash + 1..] == library.as_bytes())
    };
    strings.filter(path).map(|string| PathBuf::from(OsStr::from_bytes(string)))
}

/// The same path in every run of a job: its processes find it again when they are resumed.
fn socket_path(dir: &JobDir) -> Result<PathBuf> {
    Ok(runtime_dir()?.join(format!("{}.agents", short_name(dir.path()))))
}

/// Listens for agents.
///
/// # Errors
/// When the socket cannot be made.
pub fn listen(dir: &JobDir) -> Result<Agents> {
    let path = socket_path(dir)?;
    descriptor_limit::raise();
    Agents::listen(&path).with_context(|| format!("cannot listen for the interposer at {}", path.display()))
}

/// The variables by which the interposer gets into the job's processes and finds its way back here. It comes before
/// what the user preloads: it has to be the first that a program's look for the driver meets.
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

/// Waits for the agents of a job that was resumed; `proc` is the job's /proc.
///
/// # Errors
/// When a process has lost its state on the GPU.
pub fn welcome_back(
    agents: &Agents,
    record: &AgentsRecord,
    proc: &Path,
    limit: Duration,
) -> Result<(), Loss> {
    let expected = Quiesced::expected(record.attempt, record.pids.iter().copied(), proc);
    agents.settle(&expected);
    let back = agents.await_back(&expected, limit);
    tell(&back);
    back.lost.into_iter().next().map_or(Ok(()), Err)
}

/// Says who is back.
pub fn tell(back: &Back) {
    tracing::debug!("interposer: {} processes went on, {} were restored", back.continued, back.restored);
    for process in &back.missing {
        tracing::warn!(
            "the interposer in {process} has not come back yet; there is no further snapshot before it has"
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
    fn auto_takes_a_library_and_a_driver() {
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
        // The cache may name what is not there any more.
        let driver = at("elsewhere/libcuda.so.1");
        fs::write(at("cache"), format!("glibc-ld.so.cache1.1\0\x01\0{}\0tail\0", driver.display())).unwrap();
        assert!(find().library().is_none());
        touch(&driver);
        assert!(find().library().is_some());
    }

    #[test]
    fn a_path_that_ld_preload_would_take_apart_is_refused() {
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
        assert_eq!(cached(cache, DRIVER).collect::<Vec<_>>(), [Path::new("/b/libcuda.so.1")]);
    }

    #[test]
    fn the_library_path_comes_first() {
        let dirs = driver_dirs(Some("/one:/two;:/three".into()));
        assert_eq!(dirs[..3], ["/one", "/two", "/three"].map(PathBuf::from));
        assert_eq!(dirs[3..], LOADER_DIRS.iter().map(PathBuf::from).collect::<Vec<_>>());
    }
}
