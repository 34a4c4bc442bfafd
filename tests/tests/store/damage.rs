//! Damage: every flipped byte is found, and a resume falls back to the older snapshot. A disk that is full. Input that
//! is bad: a clear error, exit code 2, nothing touched.

use crate::keeper;
use ckpt_run_tests::packs::{ChunkLocation, manifest_file, objects, unique_chunks};
use ckpt_run_tests::{Running, Sandbox, programs, python};
use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

fn start(sandbox: &Sandbox, name: &str, options: &[&str]) -> Running {
    let mut arguments: Vec<PathBuf> = options.iter().map(PathBuf::from).collect();
    arguments.extend([PathBuf::from("--"), python(), programs().join("append_log.py")]);
    sandbox.start(name, arguments)
}

fn until_ready(job: &mut Running, sandbox: &Sandbox) {
    job.until("the program is ready", || sandbox.path().join("ready").exists().then_some(()));
    job.until_answering(sandbox);
}

/// A job with two snapshots, killed.
fn two_snapshots() -> (Sandbox, Vec<String>) {
    let sandbox = Sandbox::new();
    let mut job = start(&sandbox, "first", &[]);
    until_ready(&mut job, &sandbox);
    let ids = vec![job.checkpoint(&sandbox), job.checkpoint(&sandbox)];
    job.kill_everything();
    assert_eq!(sandbox.snapshots(), ids);
    (sandbox, ids)
}

fn files_below(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { found.extend(files_below(&path)) } else { found.push(path) }
    }
    found.sort();
    found
}

fn flip(path: &Path, position: usize) {
    let mut content = fs::read(path).unwrap();
    content[position] ^= 0x10;
    fs::write(path, content).unwrap();
}

/// Damages the middle of the first chunk.
fn flip_in(chunks: &[ChunkLocation]) {
    flip(&chunks[0].pack, chunks[0].offset + chunks[0].bytes / 2);
}

fn code_and_errors(sandbox: &Sandbox, arguments: &[&str]) -> (i32, String) {
    let output = sandbox.call(arguments);
    (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn one_flipped_byte_in_every_file_is_found() {
    let (sandbox, ids) = two_snapshots();
    sandbox.verify_all();
    let files = objects(&sandbox);
    assert!(files.len() >= 6 && files.contains(&manifest_file(&sandbox, &ids[1])), "{files:?}");
    for path in &files {
        let length = fs::metadata(path).unwrap().len() as usize;
        for position in [0, length / 2, length - 1] {
            flip(path, position);
            let (code, _) = code_and_errors(&sandbox, &["verify", "--scrub"]);
            assert_eq!(code, 1, "{} byte {position} of {length}", path.display());
            flip(path, position);
        }
    }
    sandbox.verify_all();
}

/// The newest record of the job is damaged: that is named, with what to do, and that is enough.
#[test]
fn a_damaged_record_is_named_and_can_be_moved_away() {
    let (sandbox, ids) = two_snapshots();
    let records = sandbox.job_dir().join("job");
    let number = |path: &PathBuf| path.file_stem().unwrap().to_str().unwrap().parse::<u64>().unwrap();
    let newest = files_below(&records).into_iter().max_by_key(number).unwrap();
    flip(&newest, 200);
    let name = newest.file_name().unwrap().to_str().unwrap();
    for (arguments, code) in [
        (&["verify", "--all"][..], 1),
        (&["verify", "--scrub"], 1),
        (&["repair"], 1),
        (&["status"], 2),
        (&["ls"], 2),
    ] {
        let output = sandbox.call(arguments);
        let said =
            format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
        assert!(said.contains(name) && said.contains("move it away"), "{arguments:?}: {said}");
    }
    fs::rename(&newest, sandbox.path().join("aside")).unwrap();
    let mut job = start(&sandbox, "again", &[]);
    job.until_answering(&sandbox);
    assert!(job.said().contains(&format!("resumed from snapshot {}", ids[1])), "{}", job.said());
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert_eq!(sandbox.read("log"), "started\npass\n");
}

/// Each pack has a copy of its index.
#[test]
fn a_damaged_index_costs_nothing() {
    let (sandbox, ids) = two_snapshots();
    let indexes =
        objects(&sandbox).into_iter().filter(|path| path.extension().is_some_and(|end| end == "index"));
    for index in indexes {
        flip(&index, 100);
    }
    let mut job = start(&sandbox, "again", &[]);
    job.until_answering(&sandbox);
    let said = job.said();
    assert!(
        said.contains(&format!("resumed from snapshot {}", ids[1])) && said.contains("ckpt-run repair"),
        "{said}"
    );
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert_eq!(sandbox.read("log"), "started\npass\n");
}

#[test]
fn a_resume_skips_a_damaged_snapshot() {
    // Pages are compared while CRIU restores, small images before, the manifest first of all.
    for part in ["images/pages-2.img", "images/files.img", "manifest"] {
        let (sandbox, ids) = two_snapshots();
        if part == "manifest" {
            let path = manifest_file(&sandbox, &ids[1]);
            flip(&path, fs::metadata(&path).unwrap().len() as usize / 2);
        } else {
            flip_in(&unique_chunks(&sandbox, &ids[1], part));
        }
        let mut job = start(&sandbox, "second", &[]);
        job.until_answering(&sandbox);
        let said = job.said();
        assert!(said.contains(&format!("the snapshot {} is damaged", ids[1])), "{part}: {said}");
        if part == "manifest" {
            // The manifest is intact again, but the job has resumed from an older snapshot.
            job.kill_everything();
            let path = manifest_file(&sandbox, &ids[1]);
            flip(&path, fs::metadata(&path).unwrap().len() as usize / 2);
            job = start(&sandbox, "third", &[]);
            job.until_answering(&sandbox);
        }
        fs::write(sandbox.path().join("go"), "").unwrap();
        assert_eq!(job.wait(), 0, "{part}: {}", job.said());
        let said = job.said();
        assert!(said.contains(&format!("resumed from snapshot {}", ids[0])), "{part}: {said}");
        let told = said.matches(&format!("{} is damaged", ids[1])).count();
        assert!(told <= 1, "{part}: {said}");
        assert_eq!(sandbox.read("log"), "started\npass\n", "{part}");
    }
}

#[test]
fn when_every_snapshot_is_damaged_nothing_is_started() {
    let (sandbox, ids) = two_snapshots();
    for id in &ids {
        flip_in(&unique_chunks(&sandbox, id, "images/core-10002.img"));
    }
    let log = sandbox.read("log");
    let mut job = start(&sandbox, "second", &[]);
    assert_eq!(job.wait(), 125);
    let said = job.said();
    assert!(said.contains("none of the 2 snapshots") && said.contains("--resume never"), "{said}");
    for id in &ids {
        assert_eq!(said.matches(&format!("{id} is damaged")).count(), 1, "{id} in {said}");
    }
    assert_eq!(sandbox.read("log"), log, "nothing ran");
    fs::remove_file(sandbox.path().join("ready")).unwrap();
    let mut job = start(&sandbox, "third", &["--resume", "never"]);
    until_ready(&mut job, &sandbox);
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0, "{}", job.said());
}

/// A small tmpfs as the store's file system, unmounted at the end.
struct SmallDisk<'a>(&'a Path);

impl<'a> SmallDisk<'a> {
    fn mount(path: &'a Path, megabytes: u64) -> Self {
        use rustix::mount::{MountFlags, mount};
        fs::create_dir(path).unwrap();
        let options = std::ffi::CString::new(format!("size={megabytes}m,mode=700")).unwrap();
        mount("tmpfs", path, "tmpfs", MountFlags::empty(), &*options).unwrap();
        Self(path)
    }
}

impl Drop for SmallDisk<'_> {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

#[test]
fn a_full_disk_leaves_the_job_and_the_older_snapshot_alone() {
    let mut sandbox = Sandbox::new();
    let disk_path = sandbox.path().join("disk");
    let disk = SmallDisk::mount(&disk_path, 24);
    sandbox.store = disk_path.join("store");
    let mut job = start(&sandbox, "first", &[]);
    until_ready(&mut job, &sandbox);
    let id = job.checkpoint(&sandbox);
    // Detected before the dump: there is no room for another snapshot.
    let filler = disk_path.join("filler");
    let free = rustix::fs::statvfs(&disk_path).unwrap();
    let free = (free.f_bavail * free.f_frsize) as usize;
    fs::write(&filler, vec![1; free - (1 << 20)]).unwrap();
    let (code, said) = code_and_errors(&sandbox, &["checkpoint"]);
    assert_eq!(code, 1);
    assert!(said.contains("no room") && said.contains("needs at least") && said.contains("MB"), "{said}");
    assert_eq!(sandbox.snapshots(), [id.as_str()]);
    sandbox.verify_all();
    let status = sandbox.json(["status", "--json"]);
    assert_eq!(status[0]["failed"], 1, "{status}");
    // With room again, the next one works, though there is none for a second one of that size.
    let stored_bytes = sandbox.json(["ls", "--json"])[0]["stored_bytes"].as_u64().unwrap();
    fs::write(&filler, vec![1; free - (stored_bytes / 2) as usize]).unwrap();
    let newer = job.checkpoint(&sandbox);
    assert_eq!(sandbox.snapshots(), [id, newer]);
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert_eq!(sandbox.read("log"), "started\npass\n");
    drop(disk);
}

/// Not even the record of what is being deleted has room.
#[test]
fn a_full_disk_can_be_pruned() {
    let mut sandbox = Sandbox::new();
    let disk_path = sandbox.path().join("disk");
    let disk = SmallDisk::mount(&disk_path, 64);
    sandbox.store = disk_path.join("store");
    let mut job = start(&sandbox, "first", &[]);
    until_ready(&mut job, &sandbox);
    let ids: Vec<_> = (0..4).map(|_| job.checkpoint(&sandbox)).collect();
    job.kill_everything();
    sandbox.ok(["pin", &ids[0]]);
    let mut filler = fs::File::create(disk_path.join("filler")).unwrap();
    while filler.write_all(&[1; 4096]).is_ok() {}
    drop(filler);
    let pruned = sandbox.ok(["prune", "--keep", "1"]);
    assert!(pruned.contains(&ids[1]) && pruned.contains(&ids[2]), "{pruned}");
    assert_eq!(sandbox.snapshots(), [&*ids[0], &*ids[3]]);
    sandbox.verify_all();
    drop(disk);
}

#[test]
fn a_store_that_is_not_mounted_is_not_begun_anew() {
    // The second one is the mount point itself.
    for below in ["disk/store", "disk"] {
        let mut sandbox = Sandbox::new();
        let disk_path = sandbox.path().join("disk");
        let disk = SmallDisk::mount(&disk_path, 64);
        sandbox.store = sandbox.path().join(below);
        let mut job = start(&sandbox, "first", &[]);
        until_ready(&mut job, &sandbox);
        job.checkpoint(&sandbox);
        job.kill_everything();
        drop(disk);
        let uploads = format!("file://{}", sandbox.store.display());
        for arguments in [&["--", "true"][..], &["--store", &uploads, "--", "true"]] {
            let (code, said) = code_and_errors(&sandbox, arguments);
            let is_told = said.contains("nothing is mounted at") && said.contains("--resume never");
            assert!(code == 2 && is_told, "{below}: {said}");
        }
        assert_eq!(fs::read_dir(&disk_path).unwrap().count(), 0, "{below}: nothing is made there");
        sandbox.ok(["--resume", "never", "--", "true"]);
        assert!(sandbox.store.join("jobs").exists());
        // A store that is there is not looked for on another file system.
        sandbox.ok(["--", "true"]);
    }
}

#[test]
fn uploads_to_what_is_not_mounted_any_more_fail() {
    let mut sandbox = Sandbox::new();
    let disk_path = sandbox.path().join("disk");
    let disk = SmallDisk::mount(&disk_path, 64);
    sandbox.variables.push(("CKPT_UPLOAD".to_owned(), format!("file://{}", disk_path.join("x").display())));
    let mut job = start(&sandbox, "first", &[]);
    until_ready(&mut job, &sandbox);
    job.checkpoint(&sandbox);
    let uploaded = || sandbox.json(["status", "--json"])[0]["uploads"]["uploaded"].as_u64();
    job.until("the upload", || (uploaded() == Some(1)).then_some(()));
    drop(disk);
    job.checkpoint(&sandbox);
    job.until("a warning", || job_said(&sandbox).contains("is not mounted any more").then_some(()));
    assert_eq!(fs::read_dir(&disk_path).unwrap().count(), 0, "nothing is made there");
    // Nor by a launcher that has not seen it.
    job.kill_everything();
    let mut job = start(&sandbox, "first", &[]);
    job.until_answering(&sandbox);
    job.checkpoint(&sandbox);
    let failure = || sandbox.json(["status", "--json"])[0]["uploads"]["last_failure"].to_string();
    job.until("a failure", || failure().contains("nothing is mounted").then_some(()));
    assert_eq!(fs::read_dir(&disk_path).unwrap().count(), 0, "nothing is made there");
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0, "{}", job.said());
}

fn job_said(sandbox: &Sandbox) -> String {
    sandbox.read("first.err")
}

#[test]
fn a_job_whose_directory_is_not_mounted_is_refused() {
    const COUNT: &str = r#"
import os, time
number = 0
while not os.path.exists("go"):
    with open("steps.txt", "a") as file: print(number, file=file)
    number += 1
    time.sleep(0.02)
"#;
    let sandbox = Sandbox::new();
    let [real, dir] = ["real", "mounted"].map(|name| sandbox.path().join(name));
    for made in [&real, &dir] {
        fs::create_dir(made).unwrap();
    }
    let mount = || {
        rustix::mount::mount_bind(&real, &dir).unwrap();
        SmallDisk(&dir)
    };
    let start = |name: &str| {
        let mut command =
            sandbox.command(["--".as_ref(), python().as_os_str(), "-c".as_ref(), COUNT.as_ref()]);
        sandbox.start_command(name, {
            command.current_dir(&dir);
            command
        })
    };
    let mounted = mount();
    let mut job = start("first");
    let steps = || fs::read_to_string(real.join("steps.txt")).unwrap_or_default();
    job.until("steps", || (steps().lines().count() > 5).then_some(()));
    job.checkpoint(&sandbox);
    job.kill_everything();
    drop(mounted);
    let mut refused = start("unmounted");
    assert_eq!(refused.wait(), 2, "{}", refused.said());
    assert!(refused.said().contains("nothing is mounted there now"), "{}", refused.said());
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0, "nothing is made there");
    let _mounted = mount();
    fs::write(real.join("go"), "").unwrap();
    let mut job = start("again");
    assert_eq!(job.wait(), 0, "{}", job.said());
    let numbers: Vec<_> = steps().lines().map(str::to_owned).collect();
    assert_eq!(numbers, (0..numbers.len()).map(|number| number.to_string()).collect::<Vec<_>>());
}

/// The disk is full when the job ends: ckpt-run still returns its exit code.
#[test]
fn a_full_disk_at_the_end_does_not_change_the_result() {
    let mut sandbox = Sandbox::new();
    let disk_path = sandbox.path().join("disk");
    let disk = SmallDisk::mount(&disk_path, 24);
    sandbox.store = disk_path.join("store");
    let mut job = start(&sandbox, "first", &[]);
    until_ready(&mut job, &sandbox);
    let filler = disk_path.join("filler");
    let mut file = fs::File::create(&filler).unwrap();
    while file.write_all(&[1; 4096]).is_ok() {}
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert!(job.said().contains("the end of the job cannot be noted"), "{}", job.said());
    drop(disk);
}

/// Everything below a directory with its content, to see that nothing was touched: all but the PID in the lock file.
fn picture(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let files = files_below(dir).into_iter().filter(|path| !path.ends_with("lock"));
    files.map(|path| (path.clone(), fs::read(path).unwrap())).collect()
}

#[track_caller]
fn refuses(sandbox: &Sandbox, arguments: &[&str], wanted: &[&str]) {
    let before = picture(sandbox.path());
    let (code, said) = code_and_errors(sandbox, arguments);
    assert_eq!(code, 2, "{arguments:?}: {said}");
    for part in wanted {
        assert!(said.contains(part), "{arguments:?} should say {part:?}: {said}");
    }
    assert_eq!(picture(sandbox.path()), before, "{arguments:?} touched something");
}

#[test]
fn bad_command_lines_are_refused() {
    let sandbox = Sandbox::new();
    refuses(&sandbox, &[], &["Usage"]);
    refuses(&sandbox, &["--no-such-option", "true"], &["--no-such-option"]);
    refuses(&sandbox, &["--interval", "soon", "true"], &["interval", "soon", "command line", "10m, or off"]);
    refuses(&sandbox, &["--keep", "0", "true"], &["keep", "from 1"]);
    refuses(&sandbox, &["--job", "../x", "true"], &["job's name"]);
    refuses(&sandbox, &["--config", "none.toml", "true"], &["none.toml"]);
    refuses(&sandbox, &["--resume", "required", "true"], &["there is no store"]);
    refuses(&sandbox, &["--resume", "000001-20260101T000000Z", "true"], &["there is no store"]);
    refuses(&sandbox, &["--criu", "/bin/false", "true"], &["/bin/false does not run as CRIU"]);
    refuses(&sandbox, &["--criu", "/nonexistent", "true"], &["/nonexistent does not run as CRIU"]);
    refuses(&sandbox, &["ls"], &["there is no store", "--store"]);
    refuses(&sandbox, &["checkpoint"], &["there is no store"]);
}

#[test]
fn bad_stores_are_refused() {
    let mut sandbox = Sandbox::new();
    // A directory that is not a store.
    sandbox.store = sandbox.path().join("thesis");
    fs::create_dir(&sandbox.store).unwrap();
    fs::write(sandbox.store.join("chapter1.tex"), "x").unwrap();
    refuses(&sandbox, &["true"], &["is not a ckpt-run store"]);
    refuses(&sandbox, &["ls"], &["is not a ckpt-run store"]);
    // A store of a newer version.
    fs::remove_file(sandbox.store.join("chapter1.tex")).unwrap();
    fs::write(sandbox.store.join("store.json"), r#"{"format":"ckpt-run store","version":7}"#).unwrap();
    refuses(&sandbox, &["true"], &["version 7", "newer"]);
    // A store whose description is unreadable.
    fs::write(sandbox.store.join("store.json"), "{{{").unwrap();
    refuses(&sandbox, &["true"], &["does not read"]);
    // A store that is a file.
    sandbox.store = sandbox.path().join("file");
    fs::write(&sandbox.store, "x").unwrap();
    refuses(&sandbox, &["true"], &["cannot"]);
}

/// Puts another body with a right checksum in place of a manifest's.
fn forge(path: &Path, change: impl FnOnce(&mut serde_json::Value)) {
    let whole = fs::read(path).unwrap();
    let number = |at: usize| u64::from_le_bytes(whole[at..at + 8].try_into().unwrap());
    let (header, json_bytes) = (&whole[..24], number(32) as usize);
    let mut json: serde_json::Value = serde_json::from_slice(&whole[40..40 + json_bytes]).unwrap();
    change(&mut json);
    let json = json.to_string();
    let table = &whole[40 + json_bytes..whole.len() - 32];
    let mut forged = header.to_vec();
    forged.extend_from_slice(&((8 + json.len() + table.len()) as u64).to_le_bytes());
    forged.extend_from_slice(&(json.len() as u64).to_le_bytes());
    forged.extend_from_slice(json.as_bytes());
    forged.extend_from_slice(table);
    let checksum = blake3::hash(&forged);
    forged.extend_from_slice(checksum.as_bytes());
    fs::write(path, forged).unwrap();
}

#[test]
fn manifests_that_climb_out_or_are_newer_are_refused() {
    let (sandbox, ids) = two_snapshots();
    let manifest = manifest_file(&sandbox, &ids[1]);
    let program = programs().join("append_log.py");
    let (python, program) = (python(), program.to_str().unwrap());
    let run = ["--", python.to_str().unwrap(), program];
    let whole = fs::read(&manifest).unwrap();
    for path in ["../../../../etc/passwd", "/etc/passwd", "images/../../x"] {
        forge(&manifest, |body| body["files"][0]["path"] = path.into());
        refuses(&sandbox, &["verify", &ids[1]], &["refused", path]);
        refuses(&sandbox, &run, &["refused", path]);
        refuses(&sandbox, &["show", &ids[1]], &["refused", path]);
    }
    forge(&manifest, |body| body["version"] = 9.into());
    refuses(&sandbox, &["verify", "--all"], &["manifest version 9"]);
    refuses(&sandbox, &run, &["manifest version 9"]);
    refuses(&sandbox, &["show", "77"], &["there is no snapshot 77"]);
    fs::write(&manifest, whole).unwrap();
    sandbox.verify_all();
}

/// The store, or a part of it, is deleted while the job runs: the next snapshots have all that is needed, and no second
/// launcher gets the job.
#[test]
fn a_store_that_is_deleted_while_the_job_runs_is_made_again() {
    let sandbox = Sandbox::new();
    let store = sandbox.path().join(".ckpt-run");
    let mut job = keeper::start(&sandbox, "job", &["--interval", "300ms"]);
    let saved = || sandbox.read("job.err").matches(" saved: ").count();
    job.until("a snapshot", || (saved() > 0).then_some(()));
    let job_dir = sandbox.job_dir();
    let parts = ["packs", "manifests", "job", "lock"].map(|name| job_dir.join(name));
    for gone in [store.join("store.json"), store.join("jobs"), store.clone()].iter().chain(&parts) {
        keeper::step(&sandbox, &mut job);
        let told = || sandbox.read("job.err").matches("were deleted while the job runs").count();
        let (before, told_before) = (saved(), told());
        // A snapshot may be saved at this moment.
        job.until("the deletion", || match fs::remove_dir_all(gone) {
            Err(error) if error.kind() == std::io::ErrorKind::NotADirectory => fs::remove_file(gone).ok(),
            other => other.ok(),
        });
        job.until("two snapshots more", || (saved() >= before + 2).then_some(()));
        let (code, said) = code_and_errors(&sandbox, &["--", "true"]);
        assert_eq!(code, 0, "another job, {}: {said}", gone.display());
        let python = python();
        let (code, said) = code_and_errors(&sandbox, &["--", python.to_str().unwrap(), "-c", keeper::KEEPER]);
        assert!(code == 2 && said.contains("is already running"), "{}: {code}: {said}", gone.display());
        // Other directories of the job are made as they are needed.
        let is_told = !["packs", "manifests", "job"].map(|name| job_dir.join(name)).contains(gone);
        // Twice, if a snapshot was saved while files were being deleted.
        assert_eq!(told() > told_before, is_told, "{}: {}", gone.display(), job.said());
        assert!(store.join("store.json").exists());
    }
    job.kill_everything();
    sandbox.verify_all();
    let again = keeper::start(&sandbox, "again", &[]);
    assert!(again.said().contains("resumed from snapshot"), "{}", again.said());
    assert_eq!(keeper::finish(&sandbox, "again", again), keeper::unbroken(parts.len() + 3));
}
