//! Hard links and reflinks of files that are too large for a snapshot: `jobs/KEY/held/ID` in the store. They are deleted
//! with their snapshot.

use ckpt_snapshot::{JobDir, SnapshotId};
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;

/// Their directory in the job's directory.
const HELD: &str = "held";

/// Deletes those of the snapshot `id`.
pub fn delete(dir: &JobDir, id: &SnapshotId) {
    if let Ok(Some(folder)) = dir.folder(HELD) {
        remove(&folder.path().join(id.to_string()));
    }
}

/// Deletes those of snapshots that do not exist. `present` lists the snapshots of the job, if that is needed.
///
/// # Errors
/// When they cannot be listed.
pub fn sweep<E>(dir: &JobDir, present: impl FnOnce() -> Result<BTreeSet<String>, E>) -> Result<(), E> {
    let Ok(Some(folder)) = dir.folder(HELD) else { return Ok(()) };
    let found = folder.entries().unwrap_or_default();
    if found.is_empty() {
        return Ok(());
    }
    let present = present()?;
    found
        .iter()
        .filter(|entry| !entry.file_name().to_str().is_some_and(|id| present.contains(id)))
        .for_each(|entry| remove(&entry.path()));
    Ok(())
}

fn remove(path: &Path) {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!("cannot remove {}: {error}", path.display());
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckpt_snapshot::{JobKey, StoreRoot};
    use std::time::SystemTime;

    #[test]
    fn links_of_deleted_snapshots_are_deleted() {
        let dir = tempfile::tempdir().unwrap();
        let root = StoreRoot::open_or_create(&dir.path().join("store")).unwrap();
        let job = root.job(&JobKey::named("job").unwrap());
        let ids = [1, 2, 3].map(|number| SnapshotId::new(number, SystemTime::UNIX_EPOCH));
        for id in &ids {
            fs::create_dir_all(job.held_dir(id)).unwrap();
            fs::write(job.held_dir(id).join("1"), "x").unwrap();
        }
        sweep(&job, || Ok::<_, ()>(ids[1..].iter().map(ToString::to_string).collect())).unwrap();
        delete(&job, &ids[1]);
        delete(&job, &ids[1]);
        let left: Vec<_> = fs::read_dir(job.path().join("held")).unwrap().flatten().collect();
        assert!(left.len() == 1 && left[0].path() == job.held_dir(&ids[2]), "{left:?}");
    }
}
