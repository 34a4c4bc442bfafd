//! Files in /dev/shm that the job writes to. They are memory, not storage: CRIU takes them for files that will be
//! there, with the content they have by then; after a reboot they are gone. So their content goes into the snapshot.

use crate::staging::StagedDir;
use ckpt_snapshot::{RelPath, ShmFile, SparseWriter, copy_hashed};
use rustix::fs::{SeekFrom, seek};
use std::fs::{File, Permissions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::Path;

const PREFIX: &str = "/dev/shm/";

/// Copies the files of `writable` (absolute paths) that lie in /dev/shm to `to`, with the job standing still. `root` leads to the
/// job's view of the file system.
///
/// # Errors
/// The first that cannot be copied.
pub fn save(writable: &[String], root: &Path, to: &StagedDir) -> io::Result<Vec<ShmFile>> {
    let mut saved = Vec::new();
    for path in writable.iter().filter(|path| path.starts_with(PREFIX)) {
        let mut from = File::open(root.join(path.trim_start_matches('/')))?;
        let meta = from.metadata()?;
        let name = saved.len().to_string();
        copy_sparse(&mut from, &mut to.create(&name)?, meta.len())?;
        let data = RelPath::new(format!("shm/{name}")).map_err(io::Error::other)?;
        let (mode, uid, gid) = (meta.mode() & 0o7777, meta.uid(), meta.gid());
        saved.push(ShmFile { path: path.clone(), data, mode, uid, gid });
    }
    Ok(saved)
}

/// Puts one file back, replacing what has its name.
///
/// # Errors
/// When it cannot be written; what was there is then still there.
pub fn put_back(file: &ShmFile, mut content: impl Read) -> io::Result<()> {
    let path = Path::new(&file.path);
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent)?;
    }
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".ckpt-run");
    let temporary = Path::new(&temporary);
    // One that is there is left from a resume that was interrupted, or somebody's trap: it is not written to.
    match std::fs::remove_file(temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut to = File::options().write(true).create_new(true).mode(0o600).open(temporary)?;
    let mut sparse = SparseWriter::new(&mut to);
    copy_hashed(&mut content, &mut sparse, &|_| {})?;
    sparse.finish()?;
    chown(temporary, Some(file.uid), Some(file.gid))?;
    to.set_permissions(Permissions::from_mode(file.mode))?;
    std::fs::rename(temporary, path)
}

/// Copies the parts of a file that hold data: a segment of gigabytes of which little was touched stays small.
fn copy_sparse(from: &mut File, to: &mut File, length_bytes: u64) -> io::Result<()> {
    to.set_len(length_bytes)?;
    let mut at = 0;
    while at < length_bytes {
        let data = match seek(&*from, SeekFrom::Data(at)) {
            Ok(data) => data,
            Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let hole = seek(&*from, SeekFrom::Hole(data))?.min(length_bytes);
        from.seek(io::SeekFrom::Start(data))?;
        to.seek(io::SeekFrom::Start(data))?;
        io::copy(&mut Read::take(&mut *from, hole - data), to)?;
        at = hole;
    }
    to.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sparse_files_stay_sparse_and_right() {
        let dir = tempfile::tempdir().unwrap();
        let mut from = File::create_new(dir.path().join("from")).unwrap();
        from.set_len(64 << 20).unwrap();
        from.seek(io::SeekFrom::Start(20 << 20)).unwrap();
        from.write_all(b"in the middle").unwrap();
        drop(from);
        let mut from = File::open(dir.path().join("from")).unwrap();
        let mut to = File::create_new(dir.path().join("to")).unwrap();
        copy_sparse(&mut from, &mut to, 64 << 20).unwrap();
        assert!(
            std::fs::read(dir.path().join("from")).unwrap() == std::fs::read(dir.path().join("to")).unwrap()
        );
        assert!(to.metadata().unwrap().blocks() * 512 < 1 << 20);
    }
}
