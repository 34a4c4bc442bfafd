//! Files that the job only reads, such as data, and that may have changed since the snapshot, by their times. CRIU checks their
//! lengths only. The job goes on with what is there now; its user is told.

use crate::criu::Descriptors;
use crate::files::inventory::{Entry, Inventory, nanoseconds};
use crate::files::staging::StagedDir;
use crate::sys::path_text::{shown, text_path};
use std::fs;
use std::time::SystemTime;

/// How many are named.
const NAMED: usize = 5;

/// What may have changed since the snapshot, for people; `None` if that is nothing. `taken` is when it was taken, if that was on
/// this machine: files are copied to others at some time.
pub(super) fn changed(
    images: &StagedDir,
    inventory: &Inventory,
    taken: Option<SystemTime>,
) -> Option<String> {
    let read = Descriptors::only_read(&|name| images.read(name)).unwrap_or_else(|error| {
        tracing::debug!("it is not known which files the job reads: {error}");
        Default::default()
    });
    let changed: Vec<_> =
        read.iter().filter(|path| has_changed(path, inventory, taken)).map(|path| shown(path)).collect();
    let (named, more) = changed.split_at(changed.len().min(NAMED));
    if named.is_empty() {
        return None;
    }
    let more = if more.is_empty() { String::new() } else { format!(" and {} more", more.len()) };
    Some(format!(
        "files that the job has open for reading have another time or length than at the snapshot, and it goes on with what they contain now: {}{more}",
        named.join(", ")
    ))
}

/// Whether the content of a file may be another one: by the time of its last change, and its length. A file that the job has
/// written is put back, and a missing one is CRIU's to report.
fn has_changed(path: &str, inventory: &Inventory, taken: Option<SystemTime>) -> bool {
    let Some(now) = fs::metadata(text_path(path)).ok().filter(fs::Metadata::is_file) else { return false };
    let Ok(modified) = now.modified() else { return false };
    match inventory.entries.get(path) {
        Some(entry) if entry.written || entry.is_open => false,
        Some(Entry { identity, .. }) => {
            identity.modified_ns != nanoseconds(modified) || identity.bytes != now.len()
        }
        None => taken.is_some_and(|taken| modified > taken),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::inventory::{Copies, Identity, Kind};
    use std::time::Duration;

    #[test]
    fn what_has_another_time_or_length_has_changed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data");
        let then = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
        let write = |content: &str, at: SystemTime| {
            fs::write(&path, content).unwrap();
            fs::File::options().write(true).open(&path).unwrap().set_modified(at).unwrap();
        };
        write("abc", then);
        let identity = Identity::of(&fs::metadata(&path).unwrap());
        let text = path.to_str().unwrap();
        let hour = Duration::from_secs(3600);
        let inventory = |entry: Option<bool>| {
            let mut inventory = Inventory::default();
            if let Some(written) = entry {
                let (kind, mode, uid, gid) = (Kind::File(Copies::default()), 0o600, 0, 0);
                let entry =
                    Entry { identity, mode, uid, gid, written, is_open: false, is_mapped: false, kind };
                inventory.entries.insert(text.to_owned(), entry);
            }
            inventory
        };
        for (content, at, expected) in [
            ("abc", then, [false, false, false]),
            ("xyz", then - hour, [false, true, false]),
            ("xyz", then + hour * 2, [true, true, false]),
            ("longer", then, [false, true, false]),
        ] {
            write(content, at);
            assert!(!has_changed(text, &inventory(None), None));
            let found = [None, Some(false), Some(true)]
                .map(|entry| has_changed(text, &inventory(entry), Some(then + hour)));
            assert_eq!(found, expected, "{content} {at:?}");
        }
        fs::remove_file(&path).unwrap();
        assert!(!has_changed(text, &inventory(Some(false)), Some(then)));
    }
}
