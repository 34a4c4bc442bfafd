//! Directories on this machine outside of the store: for files that live as long as a launcher (control sockets), and for
//! the local part of an object store.

use rustix::process::getuid;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// How many names are tried that others cannot know.
const RANDOM_TRIES: usize = 3;
/// A longer directory leaves no room for the name of a socket (`sockaddr_un` has 108 bytes).
const MAX_BYTES: usize = 80;

/// Where such files may be, the preferred directory first. Any user can create the one in `/tmp`, and so keep its owner
/// from it: then the next one is used.
fn candidates() -> impl Iterator<Item = PathBuf> {
    let of_environment = if getuid().is_root() { None } else { absolute_variable("XDG_RUNTIME_DIR") };
    let of_environment = of_environment.map(|dir| dir.join("ckpt-run"));
    let usual = of_environment.into_iter().chain(fixed_candidates()).chain(home_state_dir());
    // Only when they are needed: others may have made many files there.
    usual.chain(std::iter::once_with(with_random_end).flatten())
}

/// Those of [`candidates`] that do not depend on the environment, the preferred directory first.
fn fixed_candidates() -> Vec<PathBuf> {
    let uid = getuid();
    let of_root = uid.is_root().then(|| PathBuf::from("/run/ckpt-run"));
    of_root.into_iter().chain([Path::new("/tmp").join(in_tmp())]).collect()
}

/// The directory for sockets and locks: the first of `/run/ckpt-run` (root) or `$XDG_RUNTIME_DIR/ckpt-run` (other users),
/// `/tmp/ckpt-run-UID` and `~/.local/state/ckpt-run` that can be used; created if missing. If none can, `/tmp/ckpt-run-UID-`
/// with a random end.
///
/// # Errors
/// When none can be created, or they belong to other users.
pub fn runtime_dir() -> io::Result<PathBuf> {
    first_usable(candidates())
}

fn first_usable(dirs: impl Iterator<Item = PathBuf>) -> io::Result<PathBuf> {
    first_private(dirs).or_else(|error| (0..RANDOM_TRIES).find_map(|_| with_new_end()).ok_or(error))
}

/// Makes one of [`with_random_end`].
fn with_new_end() -> Option<PathBuf> {
    let number = RandomState::new().hash_one(std::process::id());
    let path = Path::new("/tmp").join(format!("{}-{number:016x}", in_tmp()));
    std::fs::DirBuilder::new().mode(0o700).create(&path).ok()?;
    Some(path)
}

/// The name of this user's directory in `/tmp`.
fn in_tmp() -> String {
    format!("ckpt-run-{}", getuid().as_raw())
}

/// The directories of this user with a random end, see [`runtime_dir`].
fn with_random_end() -> Vec<PathBuf> {
    let prefix = format!("{}-", in_tmp());
    let entries = std::fs::read_dir("/tmp").into_iter().flatten().flatten();
    let ours = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix));
    let mut ours: Vec<_> = ours.map(|entry| entry.path()).filter(|path| is_private(path)).collect();
    ours.sort();
    ours
}

/// The file of this name in the directory in which it exists, or would be created. A launcher may have had another
/// environment than this process.
///
/// # Errors
/// As [`runtime_dir`].
pub fn find(name: &str) -> io::Result<PathBuf> {
    let mut existing = candidates().filter(|dir| is_private(dir)).map(|dir| dir.join(name));
    existing.find(|path| path.exists()).map_or_else(|| Ok(runtime_dir()?.join(name)), Ok)
}

/// The files with this end of their name in all of these directories.
#[must_use]
pub fn all_with_end(end: &str) -> Vec<PathBuf> {
    let dirs = candidates().filter(|dir| is_private(dir));
    let files =
        dirs.filter_map(|dir| std::fs::read_dir(dir).ok()).flatten().flatten().map(|file| file.path());
    let mut files: Vec<_> = files.filter(|path| path.to_string_lossy().ends_with(end)).collect();
    files.sort();
    files
}

/// A directory that is the same on all machines and in every environment, if it can be used: `/run/ckpt-run` for root,
/// `/tmp/ckpt-run-UID` for others. Otherwise another one of [`runtime_dir`]'s.
///
/// # Errors
/// As [`runtime_dir`].
pub fn fixed_dir() -> io::Result<PathBuf> {
    first_usable(fixed_candidates().into_iter().chain(candidates()))
}

fn first_private(dirs: impl Iterator<Item = PathBuf>) -> io::Result<PathBuf> {
    let mut problems = Vec::new();
    for dir in dirs.filter(|dir| dir.as_os_str().len() <= MAX_BYTES && dir.to_str().is_some()) {
        match private(dir) {
            Ok(dir) => return Ok(dir),
            Err(error) => problems.push(error.to_string()),
        }
    }
    let problems = problems.join("; ");
    Err(io::Error::other(format!(
        "{problems}. Set XDG_RUNTIME_DIR to a directory that only you can write to"
    )))
}

/// Whether it is a directory of this user, to which nobody else can write.
fn is_private(path: &Path) -> bool {
    std::fs::symlink_metadata(path)
        .is_ok_and(|meta| meta.is_dir() && meta.uid() == getuid().as_raw() && meta.mode() & 0o022 == 0)
}

/// Creates a directory that only this user may use, if it is missing.
///
/// # Errors
/// When it cannot be created, or belongs to another user.
pub fn private(path: PathBuf) -> io::Result<PathBuf> {
    let named = |problem: &dyn std::fmt::Display| io::Error::other(format!("{}: {problem}", path.display()));
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&path).map_err(|error| named(&error))?;
    if !is_private(&path) {
        return Err(named(&"the directory belongs to another user or is writable by others"));
    }
    Ok(path)
}

/// The directory for state on this machine: `$XDG_STATE_HOME/ckpt-run`, or `~/.local/state/ckpt-run`. Without either
/// variable, [`runtime_dir`].
///
/// # Errors
/// When there is no such directory.
pub fn state_dir() -> io::Result<PathBuf> {
    home_state_dir().map_or_else(runtime_dir, Ok)
}

fn home_state_dir() -> Option<PathBuf> {
    let base = absolute_variable("XDG_STATE_HOME");
    Some(base.or_else(|| Some(absolute_variable("HOME")?.join(".local/state")))?.join("ckpt-run"))
}

fn absolute_variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute())
}

/// A short name for a directory that fits into the path of a socket.
#[must_use]
pub fn short_name(path: &Path) -> String {
    // FNV-1a, 64 bits: the same in every build; a collision of two stores on one machine is practically impossible.
    let hash = path.as_os_str().as_bytes().iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{hash:016x}")
}
