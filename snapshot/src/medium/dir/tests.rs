//! The directory medium as the packed store uses it.

use super::*;
use crate::medium::{BLOCK_ALIGN, Block, read_all};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::time::Duration;

fn name(text: &str) -> RelPath {
    RelPath::new(text).unwrap()
}

/// Bytes that differ from place to place.
fn content(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at * 7 + (at >> 12)) as u8).collect()
}

/// Writes an object through blocks of `block_bytes`.
fn write(medium: &dyn Medium, path: &str, content: &[u8], blocks: usize, block_bytes: usize) {
    let mut writer = medium.create(&name(path), blocks, block_bytes).unwrap();
    for part in content.chunks(block_bytes) {
        let mut block = writer.block().unwrap();
        block[..part.len()].copy_from_slice(part);
        block.set_filled(part.len());
        writer.append(block).unwrap();
    }
    writer.finish().unwrap();
}

/// All entries below `root`, directories too.
fn tree(root: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut todo = vec![root.to_owned()];
    while let Some(dir) = todo.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            found.push(path.strip_prefix(root).unwrap().display().to_string());
            if path.is_dir() && !path.is_symlink() {
                todo.push(path);
            }
        }
    }
    found.sort();
    found
}

/// All of the ways, each with the file system that it is tried on.
fn everywhere() -> Vec<(IoFeatures, tempfile::TempDir, String)> {
    let mut all = Vec::new();
    for (direct, ring) in [(true, true), (true, false), (false, true), (false, false)] {
        for parent in ["/var/tmp", "/dev/shm"] {
            let ways = IoFeatures { direct, ring };
            all.push((ways, tempfile::tempdir_in(parent).unwrap(), format!("{ways:?} in {parent}")));
        }
    }
    all
}

#[test]
fn objects_of_all_lengths_read_back() {
    for (ways, dir, what) in everywhere() {
        let medium = DirMedium::new(dir.path().join("job")).with_io_features(ways);
        let lengths = [
            0, 1, 511, 512, 4095, 4096, 4097, 8191, 8192, 8193, 16_383, 16_384, 40_959, 40_960, 100_000,
            300_001,
        ];
        for bytes in lengths {
            let path = format!("packs/{bytes}");
            write(&medium, &path, &content(bytes), 3, 2 * BLOCK_ALIGN);
            let read = read_all(&medium, &name(&path), 1 << 20).unwrap();
            assert!(read == content(bytes), "{bytes} bytes, {what}");
        }
        let mut listed = medium.list(&name("packs")).unwrap();
        listed.sort_by_key(|(_, bytes)| *bytes);
        let expected: Vec<_> = lengths.iter().map(|&bytes| (bytes.to_string(), bytes as u64)).collect();
        assert_eq!(listed, expected, "{what}");
    }
}

#[test]
fn any_part_can_be_read_to_any_address() {
    for (ways, dir, what) in everywhere() {
        let medium = DirMedium::new(dir.path().to_owned()).with_io_features(ways);
        let bytes = (3 << 20) + 1234;
        let whole = content(bytes);
        write(&medium, "packs/x", &whole, 2, 1 << 20);
        let object = medium.open(&name("packs/x")).unwrap();
        let mut block = Block::new(4 << 20);
        for offset in [0, 1, 4095, 4096, 65_536, 1_000_000, bytes - 65_536 - 1234, bytes - 70_000] {
            for length in [1, 4096, 5000, 65_535, 65_536, 65_537, 70_000, 2_000_000, bytes] {
                for address in [0, 1, 512, 4096] {
                    if offset + length > bytes {
                        continue;
                    }
                    block.fill(0xee);
                    let into = &mut block[address..address + length];
                    object.read_at(offset as u64, into).unwrap();
                    let right = *into == whole[offset..offset + length];
                    assert!(right, "{length} bytes at {offset} to {address}, {what}");
                    assert_eq!(block[address + length], 0xee, "nothing is written beyond");
                }
            }
        }
    }
}

#[test]
fn many_writers_at_once() {
    for (ways, dir, what) in everywhere() {
        let medium = DirMedium::new(dir.path().to_owned()).with_io_features(ways);
        std::thread::scope(|scope| {
            for number in 0..8 {
                let medium = &medium;
                let bytes = 500_000 + 4097 * number;
                scope.spawn(move || {
                    let path = format!("packs/{number}");
                    write(medium, &path, &content(bytes)[number..], 4, 16 * BLOCK_ALIGN);
                });
            }
        });
        for number in 0..8 {
            let read = read_all(&medium, &name(&format!("packs/{number}")), 1 << 20).unwrap();
            assert!(read == content(500_000 + 4097 * number)[number..], "{number}, {what}");
        }
        assert_eq!(tree(dir.path()).len(), 9, "{what}");
    }
}

fn output(command: &mut std::process::Command) -> std::process::Output {
    let start = crate::job::tests::start();
    let started = command.stdout(std::process::Stdio::piped()).spawn().unwrap();
    drop(start);
    started.wait_with_output().unwrap()
}

/// How much the page cache has of a file (bytes), by util-linux's tool: a read would bring it there.
fn cached_bytes(path: &Path) -> u64 {
    let mut fincore = std::process::Command::new("fincore");
    let output = output(fincore.args(["-nb", "-o", "RES"]).arg(path));
    String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
}

#[test]
fn the_page_cache_is_left_alone() {
    for (ways, dir, what) in everywhere().into_iter().filter(|(_, dir, _)| dir.path().starts_with("/var/tmp"))
    {
        let medium = DirMedium::new(dir.path().to_owned()).with_io_features(ways);
        let whole = content(4 << 20);
        write(&medium, "packs/x", &whole, 2, 1 << 20);
        let path = dir.path().join("packs/x");
        assert_eq!(cached_bytes(&path), 0, "after writing, {what}");
        let object = medium.open(&name("packs/x")).unwrap();
        object.read_at(0, &mut vec![0; 4 << 20]).unwrap();
        assert_eq!(cached_bytes(&path), 0, "after reading, {what}");
        object.read_at(1 << 20, &mut [0; 100]).unwrap();
        assert_ne!(cached_bytes(&path), 0, "a small read shows that this test can fail, {what}");
    }
}

#[test]
fn a_writer_waits_for_what_is_in_flight_when_it_is_dropped() {
    for (ways, dir, what) in everywhere() {
        let medium = DirMedium::new(dir.path().to_owned()).with_io_features(ways);
        for blocks in 1..4 {
            let mut writer = medium.create(&name("packs/x"), 4, 4 << 20).unwrap();
            for _ in 0..blocks {
                let mut block = writer.block().unwrap();
                block.fill(blocks);
                block.set_filled(4 << 20);
                writer.append(block).unwrap();
            }
            drop(writer);
            assert_eq!(tree(dir.path()), ["packs"], "{what}");
        }
    }
}

#[test]
fn misuse_of_blocks_is_an_error_and_no_damage() {
    let dir = tempfile::tempdir().unwrap();
    let medium = DirMedium::new(dir.path().to_owned());
    assert!(medium.create(&name("packs/x"), 1, 1000).is_err());
    let mut writer = medium.create(&name("packs/x"), 2, BLOCK_ALIGN).unwrap();
    let mut first = writer.block().unwrap();
    let mut second = writer.block().unwrap();
    assert!(writer.block().is_err(), "there is none left, and none comes back");
    first.set_filled(1);
    second.set_filled(1);
    writer.append(first).unwrap();
    assert!(writer.append(second).is_err(), "the first one was the last one");
    assert!(writer.finish().is_err());
    assert_eq!(tree(dir.path()), ["packs"]);
}

#[test]
fn a_file_system_without_exclusive_renames_gets_links() {
    let dir = tempfile::tempdir().unwrap();
    let root = Root::new(dir.path().to_owned(), Notes::default());
    for attempt in 0..2 {
        let temporary = Temporary::new(root.make_folder_of(&name("packs/x")).unwrap()).unwrap();
        let linked = temporary.link_new();
        match attempt {
            0 => linked.unwrap(),
            _ => assert_eq!(linked.unwrap_err().kind(), io::ErrorKind::AlreadyExists),
        }
        drop(temporary);
        assert_eq!(tree(dir.path()), ["packs", "packs/x"]);
    }
}

/// A client of NFS repeats a request whose answer was lost.
#[test]
fn a_link_that_was_made_already_is_not_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let root = Root::new(dir.path().to_owned(), Notes::default());
    let temporary = Temporary::new(root.make_folder_of(&name("packs/x")).unwrap()).unwrap();
    let [of_temporary] = &tree(dir.path())[1..] else { panic!("one file") };
    fs::hard_link(dir.path().join(of_temporary), dir.path().join("packs/x")).unwrap();
    temporary.link_new().unwrap();
    drop(temporary);
    assert_eq!(tree(dir.path()), ["packs", "packs/x"]);

    let temporary = Temporary::new(root.make_folder_of(&name("packs/y")).unwrap()).unwrap();
    let of_temporary = tree(dir.path()).into_iter().find(|path| path.ends_with("-y")).expect("one more");
    let of_temporary = dir.path().join(of_temporary);
    fs::rename(&of_temporary, dir.path().join("packs/y")).unwrap();
    // The server says that the name exists; here, the kernel looks for the file to rename first.
    fs::write(&of_temporary, "").unwrap();
    temporary.publish().unwrap();
    fs::remove_file(of_temporary).unwrap();
    assert_eq!(tree(dir.path()), ["packs", "packs/x", "packs/y"]);
}

/// Runs `check` on a tmpfs of `bytes` bytes in a mount namespace of its own.
#[allow(unsafe_code, reason = "the mount namespace of one thread")]
fn on_small_disk(bytes: u64, check: impl FnOnce(&Path) + Send) {
    use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
    use rustix::thread::{UnshareFlags, unshare_unsafe};
    let dir = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // SAFETY: what can go wrong is a table of descriptors that is not shared any more; this flag leaves it.
            unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.unwrap();
            let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
            mount_change("/", private).unwrap();
            let options = std::ffi::CString::new(format!("size={bytes}")).unwrap();
            mount("tmpfs", dir.path(), "tmpfs", MountFlags::empty(), &*options).unwrap();
            check(dir.path());
        });
        thread.join().unwrap();
    });
}

#[test]
fn a_full_disk_is_told_and_what_is_there_stays() {
    on_small_disk(1 << 20, |root| {
        let medium = DirMedium::new(root.to_owned());
        write(&medium, "packs/x", &content(300_000), 2, BLOCK_ALIGN);
        medium.put_new(&name("marks.json"), b"old").unwrap();
        assert!(medium.free_bytes().unwrap().unwrap() < 1 << 20);
        let mut writer = medium.create(&name("packs/y"), 4, 16 * BLOCK_ALIGN).unwrap();
        let filled = (0..100).try_for_each(|_| {
            let mut block = writer.block()?;
            block.set_filled(block.len());
            writer.append(block)
        });
        assert_eq!(filled.unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(writer.block().unwrap_err().kind(), io::ErrorKind::StorageFull, "it stays so");
        assert_eq!(writer.finish().unwrap_err().kind(), io::ErrorKind::StorageFull);
        let large = vec![1; 2 << 20];
        assert_eq!(
            medium.put_new(&name("manifests/1"), &large).unwrap_err().kind(),
            io::ErrorKind::StorageFull
        );
        assert_eq!(tree(root), ["manifests", "marks.json", "packs", "packs/x"]);
        assert_eq!(read_all(&medium, &name("packs/x"), 1 << 20).unwrap(), content(300_000));
        assert_eq!(read_all(&medium, &name("marks.json"), 1 << 20).unwrap(), b"old");
        write(&medium, "packs/y", &content(300_000), 2, BLOCK_ALIGN);
    });
}

#[cfg(feature = "faults")]
mod recording {
    use super::*;
    use crate::medium::record::{Operation, Recorder};

    /// The whole record of one object of each kind.
    #[test]
    fn everything_that_is_done_is_recorded_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let recorder = Recorder::default();
        let medium = DirMedium::recorded(dir.path().to_owned(), recorder.clone());
        write(&medium, "packs/x", &content(2 * BLOCK_ALIGN + 1), 2, BLOCK_ALIGN);
        medium.put_new(&name("packs/y"), b"small").unwrap();
        recorder.mark("put");
        medium.put_new(&name("marks.json"), b"{}").unwrap();
        medium.remove(&name("packs/x")).unwrap();
        drop(medium.create(&name("packs/z"), 1, BLOCK_ALIGN).unwrap());
        let mut kinds = Vec::new();
        for (number, operation) in recorder.operations().into_iter().enumerate() {
            let (kind, path) = match operation {
                Operation::MakeDir { path } => ("dir", path),
                Operation::Create { path } => ("create", path),
                Operation::Write { path, .. } => ("write", path),
                Operation::SetLength { path, .. } => ("length", path),
                Operation::SyncFile { path, begun } | Operation::SyncDir { path, begun } => {
                    assert_eq!(begun, number, "nobody else is at work");
                    ("sync", path)
                }
                Operation::Rename { to, .. } => ("rename", to),
                Operation::Link { to, .. } => ("link", to),
                Operation::Unlink { path } => ("unlink", path),
                Operation::Mark(_) => ("mark", PathBuf::new()),
            };
            let path = path.display().to_string();
            let path = path.split_once(".tmp-").map_or(path.clone(), |(dir, _)| format!("{dir}~"));
            if kind != "length" {
                kinds.push(format!("{kind} {path}"));
            }
        }
        assert_eq!(
            kinds.join(", "),
            [
                "dir packs, sync , create packs/~, write packs/~, write packs/~, write packs/~, sync packs/~",
                "rename packs/x, sync packs",
                "create packs/~, write packs/~, sync packs/~, rename packs/y, sync packs, mark ",
                "create ~, write ~, sync ~, rename marks.json, sync ",
                "unlink packs/x, sync packs",
                "create packs/~, unlink packs/~",
            ]
            .join(", ")
        );
    }

    /// What the record says of the files' content is what the files have.
    #[test]
    fn played_back_the_record_gives_the_same_files() {
        for (ways, dir, what) in everywhere() {
            let recorder = Recorder::default();
            let medium = DirMedium::recorded(dir.path().to_owned(), recorder.clone()).with_io_features(ways);
            for bytes in [0, 100, 4096, 700_001] {
                write(&medium, &format!("packs/{bytes}"), &content(bytes), 3, 16 * BLOCK_ALIGN);
                medium.put_new(&name(&format!("manifests/{bytes}")), &content(bytes)).unwrap();
            }
            medium.put_new(&name("manifests/new"), b"new").unwrap();
            medium.remove(&name("packs/100")).unwrap();
            let mut files = std::collections::BTreeMap::<PathBuf, Vec<u8>>::new();
            for operation in recorder.operations() {
                match operation {
                    Operation::Create { path } => assert_eq!(files.insert(path, Vec::new()), None),
                    Operation::Write { path, offset, content } => {
                        let (file, begin) = (files.get_mut(&path).unwrap(), offset as usize);
                        file.resize(file.len().max(begin + content.len()), 0);
                        file[begin..begin + content.len()].copy_from_slice(&content);
                    }
                    Operation::SetLength { path, bytes } => {
                        files.get_mut(&path).unwrap().resize(bytes as usize, 0);
                    }
                    Operation::Rename { from, to } => {
                        let file = files.remove(&from).unwrap();
                        files.insert(to, file);
                    }
                    Operation::Unlink { path } => assert!(files.remove(&path).is_some()),
                    Operation::Link { .. } => panic!("these file systems rename"),
                    _ => {}
                }
            }
            for (path, content) in &files {
                assert!(fs::read(dir.path().join(path)).unwrap() == *content, "{}, {what}", path.display());
            }
            assert_eq!(files.len(), 8, "{what}");
            assert_eq!(tree(dir.path()).len(), 8 + 2, "{what}");
        }
    }
}

/// Run by the next test, in a process that may not make large files.
#[test]
#[ignore = "run by another test"]
fn writes_until_a_file_is_too_large() {
    if std::env::var_os("CKPT_TEST_SMALL_FILES").is_none() {
        return;
    }
    for (ways, dir, what) in everywhere() {
        let medium = DirMedium::new(dir.path().to_owned()).with_io_features(ways);
        let mut writer = medium.create(&name("packs/x"), 4, 64 << 10).unwrap();
        let mut blocks = 0;
        let error = loop {
            let written = writer.block().and_then(|mut block| {
                block.set_filled(64 << 10);
                writer.append(block)
            });
            match written {
                Ok(()) => blocks += 1,
                Err(error) => break error,
            }
            assert!(blocks < 30, "{what}");
        };
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge, "{what}");
        assert!(writer.finish().is_err());
        assert_eq!(tree(dir.path()), ["packs"], "{what}");
        write(&medium, "packs/x", &content(900_000), 4, 64 << 10);
        assert!(read_all(&medium, &name("packs/x"), 1 << 20).unwrap() == content(900_000), "{what}");
    }
}

#[test]
fn a_write_that_does_not_fit_wholly_is_an_error() {
    let program = std::env::current_exe().unwrap();
    // 1000 KiB: the limit is in the middle of a block.
    let mut bash = std::process::Command::new("bash");
    bash.args(["-c", "trap '' XFSZ; ulimit -f 1000; exec \"$0\" \"$@\""])
        .arg(program)
        .env("CKPT_TEST_SMALL_FILES", "1")
        .args(["--exact", "--ignored", "medium::dir::tests::writes_until_a_file_is_too_large"]);
    let output = output(&mut bash);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
fn only_the_owner_can_read_them() {
    let dir = tempfile::tempdir().unwrap();
    let medium = DirMedium::new(dir.path().join("a/job"));
    write(&medium, "packs/x", b"secret", 1, BLOCK_ALIGN);
    medium.put_new(&name("manifests/1"), b"secret").unwrap();
    medium.put_new(&name("marks.json"), b"secret").unwrap();
    for path in tree(dir.path()) {
        let facts = fs::metadata(dir.path().join(&path)).unwrap();
        let expected = if facts.is_dir() { 0o700 } else { 0o600 };
        assert_eq!(facts.permissions().mode() & 0o7777, expected, "{path}");
    }
}

#[test]
fn a_dropped_writer_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let medium = DirMedium::new(dir.path().to_owned());
    let mut writer = medium.create(&name("packs/x"), 2, BLOCK_ALIGN).unwrap();
    let mut block = writer.block().unwrap();
    block.set_filled(BLOCK_ALIGN);
    writer.append(block).unwrap();
    assert_eq!(medium.list(&name("packs")).unwrap(), [], "nobody sees it");
    assert_eq!(tree(dir.path()).len(), 2);
    drop(writer);
    assert_eq!(tree(dir.path()), ["packs"]);
}

#[test]
fn what_a_killed_writer_left_is_swept_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let medium = DirMedium::new(dir.path().to_owned());
    write(&medium, "packs/x", b"x", 1, BLOCK_ALIGN);
    medium.put_new(&name("marks.json"), b"{}").unwrap();
    fs::write(dir.path().join("job.log"), "someone else's").unwrap();
    fs::create_dir(dir.path().join(".tmp-dir")).unwrap();
    for path in ["packs/y", "manifests/a/b"] {
        std::mem::forget(medium.create(&name(path), 1, BLOCK_ALIGN).unwrap());
    }
    assert_eq!(medium.sweep(Duration::from_secs(3600)).unwrap(), [""; 0], "somebody may be writing still");
    let mut swept = medium.sweep(Duration::ZERO).unwrap();
    swept.sort();
    assert_eq!(swept.len(), 2, "{swept:?}");
    assert!(swept[0].starts_with("manifests/a/.tmp-") && swept[1].starts_with("packs/.tmp-"), "{swept:?}");
    assert_eq!(
        tree(dir.path()),
        [".tmp-dir", "job.log", "manifests", "manifests/a", "marks.json", "packs", "packs/x"]
    );
    assert_eq!(medium.sweep(Duration::ZERO).unwrap(), [""; 0]);
    assert_eq!(DirMedium::new(dir.path().join("none")).sweep(Duration::ZERO).unwrap(), [""; 0]);
}

#[test]
fn of_several_who_put_the_same_name_one_wins() {
    let dir = tempfile::tempdir().unwrap();
    let medium = DirMedium::new(dir.path().to_owned());
    let path = name("manifests/1");
    let wins: Vec<_> = std::thread::scope(|scope| {
        let put = |number: u8| {
            let (medium, path) = (&medium, &path);
            scope.spawn(move || medium.put_new(path, &[number; 10_000]))
        };
        let puts: Vec<_> = (0..8).map(put).collect();
        puts.into_iter().map(|put| put.join().unwrap()).collect()
    });
    let winner = wins.iter().position(Result::is_ok).unwrap();
    for (number, put) in wins.iter().enumerate() {
        match put {
            Ok(()) => assert_eq!(number, winner),
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::AlreadyExists),
        }
    }
    assert_eq!(read_all(&medium, &path, 1 << 20).unwrap(), [winner as u8; 10_000]);
    assert_eq!(tree(dir.path()), ["manifests", "manifests/1"]);
}

#[test]
fn what_is_not_there_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let medium = DirMedium::new(dir.path().join("later"));
    assert_eq!(medium.open(&name("packs/x")).err().unwrap().kind(), io::ErrorKind::NotFound);
    assert_eq!(medium.list(&name("packs")).unwrap(), []);
    medium.remove(&name("packs/x")).unwrap();
    assert!(medium.free_bytes().unwrap().unwrap() > 0);
    write(&medium, "packs/x", b"x", 1, BLOCK_ALIGN);
    medium.remove(&name("packs/x")).unwrap();
    medium.remove(&name("packs/x")).unwrap();
    assert_eq!(medium.open(&name("packs/x")).err().unwrap().kind(), io::ErrorKind::NotFound);
    let reserved = medium.put_new(&name("packs/.tmp-1"), b"");
    assert_eq!(reserved.unwrap_err().kind(), io::ErrorKind::InvalidInput);
}

#[test]
fn a_read_beyond_the_end_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let medium = DirMedium::new(dir.path().to_owned());
    write(&medium, "packs/x", &content(10_000), 1, 4 * BLOCK_ALIGN);
    let object = medium.open(&name("packs/x")).unwrap();
    for (offset, bytes) in [(0, 10_001), (9_999, 2), (10_000, 1), (u64::MAX, 1), (1 << 40, 1)] {
        let read = object.read_at(offset, &mut vec![0; bytes]);
        assert_eq!(read.unwrap_err().kind(), io::ErrorKind::UnexpectedEof, "{bytes} bytes at {offset}");
    }
    object.read_at(10_000, &mut []).unwrap();
}

#[test]
fn the_root_may_be_a_symbolic_link_and_nothing_below_it() {
    let dir = tempfile::tempdir().unwrap();
    let (real, outside) = (dir.path().join("real"), dir.path().join("outside"));
    fs::create_dir(&real).unwrap();
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("x"), "precious").unwrap();
    fs::write(outside.join(".tmp-x"), "precious").unwrap();
    symlink(&real, dir.path().join("job")).unwrap();
    let medium = DirMedium::new(dir.path().join("job"));
    write(&medium, "packs/x", b"ours", 1, BLOCK_ALIGN);
    assert_eq!(fs::read(real.join("packs/x")).unwrap(), b"ours");
    // A directory that is a link.
    symlink(&outside, real.join("manifests")).unwrap();
    let path = name("manifests/x");
    assert!(medium.open(&path).is_err());
    assert!(medium.put_new(&name("manifests/y"), b"").is_err());
    assert!(medium.create(&name("manifests/y"), 1, BLOCK_ALIGN).is_err());
    assert!(medium.remove(&path).is_err());
    assert!(medium.list(&name("manifests")).is_err());
    medium.sweep(Duration::ZERO).unwrap();
    // An object that is a link.
    symlink(outside.join("x"), real.join("packs/y")).unwrap();
    assert!(medium.open(&name("packs/y")).is_err());
    assert_eq!(medium.list(&name("packs")).unwrap(), [("x".to_owned(), 4)]);
    let put = medium.put_new(&name("packs/y"), b"");
    assert_eq!(put.unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    medium.remove(&name("packs/y")).unwrap();
    assert_eq!(tree(&outside), [".tmp-x", "x"]);
    assert_eq!(fs::read(outside.join("x")).unwrap(), b"precious");
}
