//! Whose files decide what ckpt-run does. A configuration names programs to execute, and a store contains processes to
//! resume: those of another user would run with the rights of the caller. Git refuses repositories of other users for the
//! same reason (`safe.directory`).

use rustix::process::{getegid, geteuid, getgroups};
use std::collections::BTreeSet;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

const GROUP_MAY_WRITE: u32 = 0o020;
const ALL_MAY_WRITE: u32 = 0o002;
/// In a directory with this bit, only the owner of a file may rename and delete it.
const STICKY: u32 = 0o1000;

/// The kernel follows no more links than these.
const MOST_LINKS: usize = 40;

/// Directories that are trusted whoever owns them (`--trust`).
#[derive(Clone, Debug, Default)]
pub struct Trust(Vec<PathBuf>);

/// A file or directory that another user controls.
#[derive(Debug, thiserror::Error)]
#[error(
    "{}, so that its content may come from another user, and ckpt-run would execute it as you. Correct the owner or the mode, or allow it with --trust {}",
    problem, dir.display()
)]
pub struct Untrusted {
    problem: String,
    dir: PathBuf,
}

/// Why a file was not opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// It cannot be.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Another user controls it.
    #[error(transparent)]
    Untrusted(#[from] Untrusted),
}

/// A user, for messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    uid: u32,
    name: Option<String>,
}

impl Owner {
    fn of(uid: u32) -> Self {
        let users = fs::read_to_string("/etc/passwd").unwrap_or_default();
        let name_of = |line: &str| {
            let mut fields = line.split(':');
            let name = fields.next()?.to_owned();
            (fields.nth(1)?.parse::<u32>() == Ok(uid)).then_some(name)
        };
        Self { uid, name: users.lines().find_map(name_of) }
    }

    /// The user as an argument of `sudo -u`.
    #[must_use]
    pub fn for_sudo(&self) -> String {
        self.name.clone().unwrap_or_else(|| format!("'#{}'", self.uid))
    }
}

impl std::fmt::Display for Owner {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.name {
            Some(name) => out.write_str(name),
            None => write!(out, "user {}", self.uid),
        }
    }
}

/// The users and groups that may write what the caller trusts.
struct Caller {
    users: BTreeSet<u32>,
    groups: BTreeSet<u32>,
}

impl Caller {
    fn current() -> Self {
        let mut users = BTreeSet::from([0, geteuid().as_raw()]);
        // Who becomes root with sudo can write anywhere.
        let sudo = std::env::var("SUDO_UID").ok().and_then(|uid| uid.parse::<u32>().ok());
        users.extend(sudo.filter(|_| geteuid().is_root()));
        let mut groups = BTreeSet::from([0, getegid().as_raw()]);
        groups.extend(getgroups().unwrap_or_default().iter().map(|group| group.as_raw()));
        Self { users, groups }
    }

    /// What is wrong with a file or directory.
    fn problem(&self, path: &Path, meta: &Metadata) -> Option<String> {
        let is_sticky = meta.is_dir() && meta.mode() & STICKY != 0;
        // The mode of a link means nothing.
        let is_protected = is_sticky || meta.is_symlink();
        let of_writers = || self.problem_of_writers(path, meta).filter(|_| !is_protected);
        self.problem_of_owner(path, meta).or_else(of_writers)
    }

    fn problem_of_owner(&self, path: &Path, meta: &Metadata) -> Option<String> {
        let is_foreign = !self.users.contains(&meta.uid());
        is_foreign.then(|| format!("{} belongs to user {}", path.display(), meta.uid()))
    }

    fn problem_of_writers(&self, path: &Path, meta: &Metadata) -> Option<String> {
        let path = path.display();
        if meta.mode() & ALL_MAY_WRITE != 0 {
            return Some(format!("every user may write to {path}"));
        }
        let is_foreign = meta.mode() & GROUP_MAY_WRITE != 0 && !self.groups.contains(&meta.gid());
        is_foreign.then(|| format!("group {}, which is not yours, may write to {path}", meta.gid()))
    }
}

impl Trust {
    /// Parses the value of `--trust`: absolute directories, separated by commas; `None` if one is not absolute.
    #[must_use]
    pub fn parse(value: &str) -> Option<Self> {
        let dirs: Vec<_> = value.split(',').filter(|dir| !dir.is_empty()).map(PathBuf::from).collect();
        dirs.iter().all(|dir| dir.is_absolute()).then_some(Self(dirs))
    }

    /// Checks that root does not write into a directory of another user, who could neither read nor resume what is there
    /// afterwards. `None` if it may.
    #[must_use]
    pub fn owner_shut_out(&self, dir: &Path) -> Option<Owner> {
        let uid = fs::metadata(dir).ok()?.uid();
        let path = fs::canonicalize(dir).ok()?;
        let is_trusted = self.covers(&path) || self.covers(dir);
        (geteuid().is_root() && uid != 0 && !is_trusted).then(|| Owner::of(uid))
    }

    /// Opens a file that is only written to, with these options, as [`Trust::check_written`] allows.
    ///
    /// # Errors
    /// As [`Trust::open`].
    pub fn open_written(&self, path: &Path, options: &fs::OpenOptions) -> Result<File, OpenError> {
        self.check_written(path)?;
        let file = options.open(path)?;
        self.check_written(path)?;
        let absolute = std::path::absolute(path)?;
        if is_named(&file.metadata()?, path) || self.covers(&absolute) {
            return Ok(file);
        }
        Err(replaced(&absolute).into())
    }

    /// Opens the file `path` for reading, if only the caller, root and the caller's groups can change it. The file that is
    /// read counts, and not one that had its name before or has it afterwards.
    ///
    /// # Errors
    /// When another user can change it, or has replaced it meanwhile; when it cannot be opened.
    pub fn open(&self, path: &Path) -> Result<File, OpenError> {
        // A fifo of another user would be waited for.
        if fs::symlink_metadata(path).is_ok() {
            self.check(path)?;
        }
        let file = File::open(path)?;
        self.check(path)?;
        let (opened, absolute) = (file.metadata()?, std::path::absolute(path)?);
        let untrusted = match is_named(&opened, path) {
            true => {
                let problem = Caller::current().problem(&absolute, &opened);
                problem.map(|problem| Untrusted { problem, dir: parent(&absolute) })
            }
            false => Some(replaced(&absolute)),
        };
        let is_covered = || {
            let target = fs::canonicalize(path).unwrap_or_default();
            self.covers(&absolute) || self.covers(&target)
        };
        untrusted.filter(|_| !is_covered()).map_or(Ok(file), |untrusted| Err(untrusted.into()))
    }

    /// Whether `path` (absolute) is in a directory that is trusted whoever owns it.
    fn covers(&self, path: &Path) -> bool {
        self.0.iter().any(|trusted| path.starts_with(trusted))
    }

    /// Checks that only the caller, root and the caller's groups can change the file or directory `path` and replace it in
    /// its directory. Of a path that does not exist, the nearest directory that does is checked. Directories above are not.
    ///
    /// # Errors
    /// When another user can.
    pub fn check(&self, path: &Path) -> Result<(), Untrusted> {
        self.check_each(path, Caller::problem)
    }

    /// As [`Trust::check`], of a file that is only written to: others may write to it, too, if it is not theirs.
    ///
    /// # Errors
    /// When it belongs to another user, or another user can replace it.
    pub fn check_written(&self, path: &Path) -> Result<(), Untrusted> {
        self.check_each(path, |caller, path, meta| match meta.is_dir() {
            true => caller.problem(path, meta),
            // Nobody finds there what was written to a device.
            false if meta.file_type().is_char_device() => None,
            false => caller.problem_of_owner(path, meta),
        })
    }

    /// As [`Trust::check`], of a directory whose entries are all the caller's: nobody else may add one either, which
    /// everybody may in a directory like /tmp.
    ///
    /// # Errors
    /// When another user can change or add something there.
    pub fn check_store(&self, dir: &Path) -> Result<(), Untrusted> {
        self.check(dir)?;
        let (Ok(dir), caller) = (fs::canonicalize(dir), Caller::current()) else { return Ok(()) };
        let problem = fs::metadata(&dir).ok().and_then(|meta| caller.problem_of_writers(&dir, &meta));
        match problem.filter(|_| !self.covers(&dir)) {
            Some(problem) => {
                let problem = format!("{problem} (a directory of your own in it would do)");
                Err(Untrusted { problem, dir })
            }
            None => Ok(()),
        }
    }

    fn check_each(
        &self,
        path: &Path,
        problem: impl Fn(&Caller, &Path, &Metadata) -> Option<String>,
    ) -> Result<(), Untrusted> {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let caller = Caller::current();
        // Each link on the way, and what all lead to, each with its directory.
        let ways = links_of(&path).into_iter().chain([path.clone()]).chain(fs::canonicalize(&path).ok());
        let ways: Vec<_> = ways.collect();
        let checked = ways.iter().flat_map(|path| {
            let exists = fs::symlink_metadata(path).is_ok();
            path.ancestors().filter(|path| fs::symlink_metadata(path).is_ok()).take(if exists {
                2
            } else {
                1
            })
        });
        for path in checked {
            let Ok(meta) = fs::symlink_metadata(path) else { continue };
            let dir = if meta.is_dir() { path } else { path.parent().unwrap_or(path) };
            // Who may write to the root directory may do everything. In a container it may belong to nobody.
            if self.covers(path) || path == Path::new("/") {
                continue;
            }
            // Only who may write to its directory can change a link, and in one like /tmp its owner.
            let is_in_sticky = || {
                path.parent().is_some_and(|dir| fs::metadata(dir).is_ok_and(|meta| meta.mode() & STICKY != 0))
            };
            if meta.is_symlink() && !is_in_sticky() {
                continue;
            }
            if let Some(problem) = problem(&caller, path, &meta) {
                // To trust all there is would be no advice.
                let dir = if dir == Path::new("/") { path } else { dir };
                return Err(Untrusted { problem, dir: dir.to_owned() });
            }
        }
        Ok(())
    }
}

/// Whether the file that was opened is the one at `path`.
fn is_named(opened: &Metadata, path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|named| (named.dev(), named.ino()) == (opened.dev(), opened.ino()))
}

fn replaced(path: &Path) -> Untrusted {
    Untrusted { problem: format!("{} was replaced while it was opened", path.display()), dir: parent(path) }
}

fn parent(path: &Path) -> PathBuf {
    path.parent().unwrap_or(path).to_owned()
}

/// The symbolic links that the kernel follows on the way along an absolute path, those of its directories included.
fn links_of(path: &Path) -> Vec<PathBuf> {
    let components =
        |path: &Path| path.components().map(|one| PathBuf::from(one.as_os_str())).rev().collect::<Vec<_>>();
    let (mut at, mut rest, mut links) = (PathBuf::new(), components(path), Vec::new());
    while let Some(one) = rest.pop() {
        if one == Path::new("..") {
            at.pop();
            continue;
        }
        // The root takes the place of what is before it.
        let next = at.join(one);
        match fs::read_link(&next) {
            Ok(target) if links.len() < MOST_LINKS => {
                links.push(next);
                rest.extend(components(&target));
            }
            _ => at = next,
        }
    }
    links
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn what_others_can_change_is_not_trusted() {
        let dir = tempfile::tempdir().unwrap();
        let (inner, trust) = (dir.path().join("inner"), Trust::default());
        let file = inner.join("file");
        fs::create_dir(&inner).unwrap();
        fs::write(&file, "").unwrap();
        assert!(trust.check(&file).is_ok() && trust.check(&inner.join("new/file")).is_ok());
        set_mode(&file, 0o666);
        let error = trust.check(&file).unwrap_err().to_string();
        assert!(error.contains("every user may write to") && error.contains("--trust"), "{error}");
        assert!(Trust::parse(&inner.to_string_lossy()).unwrap().check(&file).is_ok());
        set_mode(&file, 0o600);
        set_mode(&inner, 0o777);
        assert!(trust.check(&file).is_err() && trust.check(&inner.join("new")).is_err());
        set_mode(&inner, 0o1777);
        assert!(trust.check(&file).is_ok());
        // A link in a directory of one's own, to a file in another's.
        set_mode(&inner, 0o777);
        let link = dir.path().join("link");
        symlink(&file, &link).unwrap();
        assert!(trust.check(&link).is_err());
        // The same in the middle of the way to a file of one's own, and as a directory of its path.
        let (own, through) = (dir.path().join("own"), inner.join("through"));
        fs::write(&own, "").unwrap();
        symlink(&own, &through).unwrap();
        symlink(&through, dir.path().join("chain")).unwrap();
        symlink(dir.path(), inner.join("around")).unwrap();
        symlink(inner.join("around"), dir.path().join("folder")).unwrap();
        for name in ["chain", "folder/own"] {
            assert!(trust.check(&dir.path().join(name)).is_err(), "{name}");
        }
        set_mode(&inner, 0o700);
        // The owner of a link can change it in a directory like /tmp only.
        if geteuid().is_root() {
            std::os::unix::fs::lchown(&through, Some(64_123), None).unwrap();
            assert!(trust.check(&dir.path().join("chain")).is_ok());
            set_mode(&inner, 0o1777);
            assert!(trust.check(&dir.path().join("chain")).is_err());
            std::os::unix::fs::lchown(&through, Some(0), None).unwrap();
            set_mode(&inner, 0o700);
        }
        for name in ["chain", "folder/own", "inner/../folder/own"] {
            assert!(trust.check(&dir.path().join(name)).is_ok(), "{name}");
        }
        assert_eq!(links_of(&dir.path().join("chain")), [dir.path().join("chain"), through]);
        assert!(Trust::parse("relative").is_none());
    }

    #[test]
    fn a_log_that_is_replaced_while_it_is_opened_is_not_written_to() {
        let dir = tempfile::tempdir().unwrap();
        let (log, trust) = (dir.path().join("log"), Trust::default());
        let mut options = File::options();
        options.append(true).create(true);
        assert!(trust.open_written(&log, &options).is_ok());
        let opened = File::open(&log).unwrap();
        fs::rename(&log, dir.path().join("other")).unwrap();
        fs::write(&log, "").unwrap();
        assert!(!is_named(&opened.metadata().unwrap(), &log));
        // Others may replace it.
        set_mode(dir.path(), 0o777);
        assert!(matches!(trust.open_written(&log, &options), Err(OpenError::Untrusted(_))));
    }

    #[test]
    fn root_leaves_stores_of_others_alone() {
        let dir = tempfile::tempdir().unwrap();
        let trust = Trust::default();
        assert_eq!(trust.owner_shut_out(dir.path()), None, "one's own");
        assert_eq!(trust.owner_shut_out(&dir.path().join("none")), None, "it will be one's own");
        if geteuid().is_root() {
            std::os::unix::fs::chown(dir.path(), Some(64_123), None).unwrap();
            let owner = trust.owner_shut_out(dir.path()).unwrap();
            assert_eq!((owner.to_string(), owner.for_sudo()), ("user 64123".into(), "'#64123'".into()));
            let trust = Trust::parse(&dir.path().to_string_lossy()).unwrap();
            assert_eq!(trust.owner_shut_out(dir.path()), None);
        }
        assert_eq!(Owner::of(0).to_string(), "root");
    }

    #[test]
    fn only_some_owners_and_groups_are_trusted() {
        let dir = tempfile::tempdir().unwrap();
        let meta = fs::metadata(dir.path()).unwrap();
        let caller = |user, group| Caller { users: [user].into(), groups: [group].into() };
        assert!(caller(meta.uid(), meta.gid()).problem(dir.path(), &meta).is_none());
        assert!(caller(meta.uid() + 1, meta.gid()).problem(dir.path(), &meta).is_some());
        set_mode(dir.path(), 0o770);
        let meta = fs::metadata(dir.path()).unwrap();
        assert!(caller(meta.uid(), meta.gid()).problem(dir.path(), &meta).is_none());
        assert!(caller(meta.uid(), meta.gid() + 1).problem(dir.path(), &meta).is_some());
    }
}
