//! `ckpt-run export`: the content of a snapshot as files for other tools.

use super::print;
use super::snapshots::find;
use crate::cli::args::ExportFormat;
use crate::cli::config::Config;
use crate::gpu::regions::{self, Memory, MemoryRegion, Owner, Readers};
use crate::store::tiers;
use crate::sys::error::bad_input;
use crate::sys::progress::Bar;
use anyhow::{Context, Result, anyhow};
use ckpt_snapshot::{Load, Manifest, RelPath, Store, Target};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Writes files to a new or empty directory.
///
/// # Errors
/// Bad input: no such snapshot, a directory that is not empty. Damage; a failed write.
pub fn export(config: &Config, text: &str, format: ExportFormat, to: Option<PathBuf>) -> Result<i32> {
    let (job, id) = find(config, text)?;
    let store = tiers::open(&config.store, &job)?;
    let store: &dyn Store = &*store;
    let manifest = store.manifest(&id)?;
    let has_device_memory = || Ok::<_, anyhow::Error>(!regions::of_devices(store, &manifest)?.is_empty());
    if format == ExportFormat::Safetensors && !has_device_memory()? {
        return Err(bad_input(anyhow!(
            "the snapshot {id} has no device memory, which is what --format safetensors writes: use --format raw or criu"
        )));
    }
    let dir = to.unwrap_or_else(|| PathBuf::from(id.to_string()));
    if fs::read_dir(&dir).is_ok_and(|mut entries| entries.next().is_some()) || dir.is_file() {
        return Err(bad_input(anyhow!(
            "{} exists and is not empty: name another directory with --to",
            dir.display()
        )));
    }
    make_dir(&dir)?;
    check_own(&dir)?;
    let bytes = match format {
        ExportFormat::Criu => criu(store, &manifest, &dir)?,
        ExportFormat::Safetensors => {
            safetensors(store, &manifest, &regions::of_devices(store, &manifest)?, &dir)?
        }
        ExportFormat::Raw => raw(store, &manifest, &regions::of_all(store, &manifest)?, &dir)?,
    };
    writeln!(io::stdout(), "{} written to {}", print::bytes(bytes), dir.display())?;
    Ok(0)
}

/// Private to the owner: the files hold the memory of processes.
fn make_dir(dir: &Path) -> Result<()> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
    made.with_context(|| format!("cannot create {}", dir.display()))
}

/// Refuses an existing directory in which another user could replace our files.
fn check_own(dir: &Path) -> Result<()> {
    let meta = fs::symlink_metadata(dir).with_context(|| format!("cannot inspect {}", dir.display()))?;
    let is_own =
        meta.is_dir() && meta.uid() == rustix::process::geteuid().as_raw() && meta.mode() & 0o022 == 0;
    if !is_own {
        return Err(bad_input(anyhow!(
            "{} belongs to another user, is writable by others, or is a link: name another directory with --to",
            dir.display()
        )));
    }
    Ok(())
}

fn make_file(path: &Path) -> Result<File> {
    let mut options = File::options();
    let file = options.write(true).create_new(true).mode(0o600).open(path);
    file.with_context(|| format!("cannot create {}", path.display()))
}

fn criu(store: &dyn Store, manifest: &Manifest, dir: &Path) -> Result<u64> {
    let mut files = Vec::new();
    let mut bytes = 0;
    for file in &manifest.files {
        let Some(name) = file.path.as_str().strip_prefix("images/") else { continue };
        files.push((&file.path, make_file(&dir.join(name))?));
        bytes += file.bytes;
    }
    let wanted: Vec<_> = files.iter().map(|(path, into)| Load { path, into: into as &dyn Target }).collect();
    let bar = Bar::new("exporting", bytes);
    store.load(manifest, &wanted, &|bytes| bar.advance(bytes))?;
    Ok(bytes)
}

/// One file for each region of memory. Data files are loaded as a resume does it, in parallel: in an object store, each read
/// takes a while.
fn raw(store: &dyn Store, manifest: &Manifest, memory: &Memory, dir: &Path) -> Result<u64> {
    let mut files: BTreeMap<&RelPath, Regions> = BTreeMap::new();
    let mut bytes = 0;
    for (owner, pieces) in memory {
        let below = dir.join(owner.to_string());
        make_dir(&below)?;
        for piece in pieces {
            let path = below.join(format!("{}.bin", piece.name()));
            make_file(&path)?
                .set_len(piece.bytes)
                .with_context(|| format!("cannot write {}", path.display()))?;
            files.entry(&piece.file).or_default().add(piece, path);
            bytes += piece.bytes;
        }
    }
    let wanted: Vec<_> = files.iter().map(|(path, into)| Load { path, into: into as &dyn Target }).collect();
    let bar = Bar::new("exporting", bytes);
    store.load(manifest, &wanted, &|bytes| bar.advance(bytes))?;
    Ok(bytes)
}

/// The regions of a data file, each with the file that it goes to. The files are opened for each write, since there may be
/// more than a process may have open.
#[derive(Default)]
struct Regions {
    /// By their ends in the data file.
    all: BTreeMap<(u64, PathBuf), Range<u64>>,
    longest_bytes: u64,
}

impl Regions {
    fn add(&mut self, piece: &MemoryRegion, to: PathBuf) {
        let end = piece.offset + piece.bytes;
        self.all.insert((end, to), piece.offset..end);
        self.longest_bytes = self.longest_bytes.max(piece.bytes);
    }

    /// Those of which a part is in this range, and that part.
    fn within(&self, range: Range<u64>) -> impl Iterator<Item = (&Path, &Range<u64>, Range<u64>)> {
        let first = (range.start + 1, PathBuf::new());
        let beyond = range.end.saturating_add(self.longest_bytes);
        let ends_behind = self.all.range(first..).take_while(move |((end, _), _)| *end < beyond);
        ends_behind.filter_map(move |((_, path), region)| {
            let part = region.start.max(range.start)..region.end.min(range.end);
            (!part.is_empty()).then_some((path.as_path(), region, part))
        })
    }
}

impl Target for Regions {
    fn set_bytes(&self, bytes: u64) -> io::Result<()> {
        match self.all.last_key_value() {
            Some(((end, _), _)) if *end > bytes => {
                Err(io::Error::other("the snapshot is inconsistent: a memory region is outside of its file"))
            }
            _ => Ok(()),
        }
    }

    fn wants(&self, range: Range<u64>) -> bool {
        self.within(range).next().is_some()
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        for (path, region, part) in self.within(offset..offset + bytes.len() as u64) {
            let content = &bytes[(part.start - offset) as usize..(part.end - offset) as usize];
            File::options().write(true).open(path)?.write_all_at(content, part.start - region.start)?;
        }
        Ok(())
    }
}

/// One file per process, with one tensor per region of its device memory.
fn safetensors(store: &dyn Store, manifest: &Manifest, memory: &Memory, dir: &Path) -> Result<u64> {
    let mut processes: BTreeMap<u32, Vec<(String, &MemoryRegion)>> = BTreeMap::new();
    for (owner, pieces) in memory {
        let Owner::Device { pid, device } = owner else { continue };
        let named = pieces.iter().map(|piece| (format!("device-{device}/{}", piece.name()), piece));
        processes.entry(*pid).or_default().extend(named);
    }
    let mut bytes = 0;
    for (pid, pieces) in processes {
        let mut readers = Readers::new(store, manifest);
        let mut contents = Vec::new();
        for (name, piece) in pieces {
            contents.push((name, readers.of(&piece.file)?.read_all(piece.offset, piece.bytes)?));
            bytes += piece.bytes;
        }
        let tensor = |content| TensorView::new(Dtype::U8, vec![<[u8]>::len(content)], content);
        let tensors = contents.iter().map(|(name, content)| Ok((name, tensor(content)?)));
        let tensors = tensors.collect::<Result<Vec<_>>>()?;
        let facts = [
            ("snapshot", manifest.id.to_string()),
            ("job", manifest.job.key.clone()),
            ("pid", pid.to_string()),
            ("ckpt_run_version", env!("CARGO_PKG_VERSION").to_owned()),
        ];
        let facts = facts.map(|(name, value)| (name.to_owned(), value)).into_iter().collect();
        let path = dir.join(format!("gpu-{pid}.safetensors"));
        drop(make_file(&path)?);
        safetensors::serialize_to_file(tensors, Some(facts), &path)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::failure::exit_code;
    use crate::sys::error::EXIT_BAD_INPUT;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    #[test]
    fn each_region_gets_its_part_of_what_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let mut regions = Regions::default();
        let ranges = [0..10, 10..12, 20..50, 25..30];
        let path = |range: &Range<u64>| dir.path().join(format!("{}-{}", range.start, range.end));
        for range in &ranges {
            make_file(&path(range)).unwrap().set_len(range.end - range.start).unwrap();
            let (bytes, offset) = (range.end - range.start, range.start);
            let file = RelPath::new("images/pages-1.img").unwrap();
            regions.add(&MemoryRegion { address: None, bytes, file, offset }, path(range));
        }
        regions.set_bytes(50).unwrap();
        regions.set_bytes(49).unwrap_err();
        let content: Vec<u8> = (0..60).collect();
        for (start, end) in [(0, 7), (7, 11), (11, 22), (22, 40), (40, 60)] {
            regions.write_at(start as u64, &content[start..end]).unwrap();
        }
        for range in &ranges {
            let expected = &content[range.start as usize..range.end as usize];
            assert_eq!(fs::read(path(range)).unwrap(), expected, "{range:?}");
        }
        for (range, is_wanted) in
            [(12..20, false), (11..12, true), (50..60, false), (48..60, true), (0..1, true)]
        {
            assert_eq!(regions.wants(range.clone()), is_wanted, "{range:?}");
        }
    }

    #[test]
    fn only_a_private_directory_is_written_to() {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join("own");
        make_dir(&own).unwrap();
        check_own(&own).unwrap();
        let mode = |mode| fs::set_permissions(&own, fs::Permissions::from_mode(mode)).unwrap();
        mode(0o755);
        check_own(&own).unwrap();
        mode(0o777);
        let error = check_own(&own).unwrap_err();
        assert_eq!(exit_code(&error, 1), EXIT_BAD_INPUT);
        mode(0o700);
        let link = dir.path().join("link");
        symlink(&own, &link).unwrap();
        check_own(&link).unwrap_err();
        if rustix::process::getuid().is_root() {
            chown(&own, Some(1234), None).unwrap();
            check_own(&own).unwrap_err();
        }
    }
}
