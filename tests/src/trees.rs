//! Directory trees: what is in them, and how two of them differ.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// End of the names of files whose lines may be in any order: several processes write them at the same time.
const UNORDERED: &str = ".unordered";
/// The most differences that are listed.
const LISTED_MAX: usize = 12;

/// What has a name in a tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A file with this content.
    File(Vec<u8>),
    /// A directory.
    Directory,
    /// A symbolic link to this.
    Symlink(PathBuf),
    /// A FIFO.
    Fifo,
    /// Something else.
    Other,
}

/// One name in a tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// What it is.
    pub kind: Kind,
    /// Mode, user and group.
    pub access: (u32, u32, u32),
    /// The first name in the tree of a file with several.
    pub same_as: Option<PathBuf>,
}

/// A tree without the times of its files, by path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tree(pub BTreeMap<PathBuf, Node>);

impl Tree {
    /// Reads a tree. `top` itself is not in it.
    ///
    /// # Panics
    /// When it cannot be read, or changes meanwhile.
    #[must_use]
    pub fn read(top: &Path) -> Self {
        let mut nodes = BTreeMap::new();
        read_below(top, Path::new(""), &mut nodes);
        let mut first_names = BTreeMap::new();
        for (path, (node, inode)) in &mut nodes {
            if matches!(node.kind, Kind::File(_)) {
                let first = first_names.entry(*inode).or_insert_with(|| path.clone());
                node.same_as = (first != path).then(|| first.clone());
            }
        }
        Self(nodes.into_iter().map(|(path, (node, _))| (path, node)).collect())
    }

    /// Lists where this tree is not as `expected`.
    #[must_use]
    pub fn differences(&self, expected: &Self) -> Vec<String> {
        let paths: std::collections::BTreeSet<_> = self.0.keys().chain(expected.0.keys()).collect();
        let differences = paths.into_iter().filter_map(|path| {
            let shown = path.display();
            match (self.0.get(path), expected.0.get(path)) {
                (Some(_), None) => Some(format!("{shown} should not be there")),
                (None, Some(_)) => Some(format!("{shown} is missing")),
                (Some(is), Some(should)) if is != should => {
                    Some(format!("{shown}: {}", is.difference(should)))
                }
                _ => None,
            }
        });
        let mut all: Vec<_> = differences.collect();
        let more = all.len().saturating_sub(LISTED_MAX);
        all.truncate(LISTED_MAX);
        if more > 0 {
            all.push(format!("and {more} more"));
        }
        all
    }
}

impl Node {
    fn difference(&self, expected: &Self) -> String {
        if self.access != expected.access {
            let show = |(mode, uid, gid): (u32, u32, u32)| format!("mode {mode:o}, owner {uid}:{gid}");
            return format!("{}, expected {}", show(self.access), show(expected.access));
        }
        if self.same_as != expected.same_as {
            return format!("a link to {:?}, expected {:?}", self.same_as, expected.same_as);
        }
        match (&self.kind, &expected.kind) {
            (Kind::File(is), Kind::File(should)) => {
                let same = is.iter().zip(should).take_while(|(a, b)| a == b).count();
                format!("{} bytes, expected {}; the first difference is at {same}", is.len(), should.len())
            }
            (is, should) => format!("{}, expected {}", is.show(), should.show()),
        }
    }
}

impl Kind {
    fn show(&self) -> String {
        match self {
            Self::File(content) => format!("a file of {} bytes", content.len()),
            other => format!("{other:?}"),
        }
    }
}

type Inode = (u64, u64);

fn read_below(top: &Path, below: &Path, nodes: &mut BTreeMap<PathBuf, (Node, Inode)>) {
    for entry in fs::read_dir(top.join(below)).expect("a directory") {
        let path = below.join(entry.expect("an entry").file_name());
        let full = top.join(&path);
        let meta = fs::symlink_metadata(&full).expect("metadata");
        let kind = match meta.file_type() {
            kind if kind.is_dir() => Kind::Directory,
            kind if kind.is_symlink() => Kind::Symlink(fs::read_link(&full).expect("a link")),
            kind if kind.is_fifo() => Kind::Fifo,
            kind if kind.is_file() => Kind::File(content(&full)),
            _ => Kind::Other,
        };
        let access = (meta.mode() & 0o7777, meta.uid(), meta.gid());
        let is_directory = kind == Kind::Directory;
        nodes.insert(path.clone(), (Node { kind, access, same_as: None }, (meta.dev(), meta.ino())));
        if is_directory {
            read_below(top, &path, nodes);
        }
    }
}

fn content(path: &Path) -> Vec<u8> {
    let content = fs::read(path).expect("content");
    if !path.as_os_str().as_bytes().ends_with(UNORDERED.as_bytes()) {
        return content;
    }
    let mut lines: Vec<_> = content.split_inclusive(|&byte| byte == b'\n').collect();
    lines.sort_unstable();
    lines.concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{Permissions, hard_link, set_permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn sample() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::create_dir(path("d")).unwrap();
        fs::write(path("d/a"), "a").unwrap();
        hard_link(path("d/a"), path("d/b")).unwrap();
        symlink("d/a", path("s")).unwrap();
        fs::write(path("log.unordered"), "1\n2\n").unwrap();
        dir
    }

    #[test]
    fn finds_every_kind_of_difference() {
        let (dir, same) = (sample(), sample());
        fs::write(same.path().join("log.unordered"), "2\n1\n").unwrap();
        let expected = Tree::read(dir.path());
        assert_eq!(Tree::read(same.path()).differences(&expected), [""; 0]);
        let path = |name: &str| dir.path().join(name);
        set_permissions(path("d"), Permissions::from_mode(0o701)).unwrap();
        fs::remove_file(path("d/b")).unwrap();
        fs::write(path("d/b"), "a").unwrap();
        fs::write(path("d/a"), "ab").unwrap();
        fs::write(path("new"), "").unwrap();
        fs::remove_file(path("s")).unwrap();
        symlink("d/b", path("s")).unwrap();
        fs::remove_file(path("log.unordered")).unwrap();
        let found = Tree::read(dir.path()).differences(&expected);
        for (found, part) in found.iter().zip([
            "d: mode 701",
            "d/a: 2 bytes, expected 1; the first difference is at 1",
            "d/b: a link to None, expected Some(\"d/a\")",
            "log.unordered is missing",
            "new should not be there",
            "s: Symlink(\"d/b\"), expected",
        ]) {
            assert!(found.contains(part), "{found}: {part}");
        }
        assert_eq!(found.len(), 6, "{found:?}");
    }
}
