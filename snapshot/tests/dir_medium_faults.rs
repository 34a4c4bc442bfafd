//! Every step of the directory medium fails once, and is the place where the process is killed once: what was there
//! stays, and nothing half-written is to be seen.
#![cfg(feature = "faults")]

use ckpt_snapshot::RelPath;
use ckpt_snapshot::medium::{BLOCK_ALIGN, DirMedium, Medium, read_all};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

/// The points that one run of [`works_on_a_directory`] passes, in order.
const POINTS: &[&str] = &[
    "save-file",
    "save-write@1",
    "save-write@3",
    "save-fsync",
    "save-rename",
    "sync-dir@1",
    "put-write",
    "put-fsync",
    "put-rename",
    "sync-dir@2",
    "remove-data",
    "sync-dir@3",
];

/// Errors, and what is said of them. The last three are those of NFS.
const ERRORS: [(&str, &str); 5] = [
    ("eio", "Input/output error"),
    ("enospc", "No space left"),
    ("estale", "Stale file handle"),
    ("eintr", "Interrupted system call"),
    ("eexist", "File exists"),
];

fn name(text: &str) -> RelPath {
    RelPath::new(text).unwrap()
}

fn write(medium: &dyn Medium, path: &str, fill: u8) -> std::io::Result<()> {
    let mut writer = medium.create(&name(path), 2, BLOCK_ALIGN)?;
    for _ in 0..5 {
        let mut block = writer.block()?;
        block.fill(fill);
        block.set_filled(BLOCK_ALIGN);
        writer.append(block)?;
    }
    writer.finish()
}

/// Run by the tests below in a process of its own, with a fault.
#[test]
#[ignore = "run by the other tests"]
fn works_on_a_directory() {
    let Some(root) = std::env::var_os("CKPT_TEST_ROOT") else { return };
    let medium = DirMedium::new(PathBuf::from(root));
    let steps = [
        write(&medium, "packs/new", 2),
        medium.put_new(&name("manifests/new"), b"new"),
        medium.remove(&name("packs/old")),
    ];
    for step in steps {
        match step {
            Ok(()) => println!("step: done"),
            Err(error) => println!("step: {error}"),
        }
    }
}

fn run(root: &Path, fault: &str) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--ignored", "--nocapture", "works_on_a_directory"])
        .envs([("CKPT_FAULT", fault.as_ref()), ("CKPT_TEST_ROOT", root.as_os_str())])
        .output()
        .unwrap()
}

/// A directory with an old object of each kind.
fn prepared() -> (tempfile::TempDir, DirMedium) {
    let dir = tempfile::tempdir().unwrap();
    let medium = DirMedium::new(dir.path().to_owned());
    write(&medium, "packs/old", 1).unwrap();
    medium.put_new(&name("manifests/old"), b"old").unwrap();
    (dir, medium)
}

/// Each object is as it was or as it was to be, and none other is there.
fn is_whole(medium: &DirMedium, what: &str) {
    for dir in ["packs", "manifests"] {
        for (file, _) in medium.list(&name(dir)).unwrap() {
            let content = read_all(medium, &name(&format!("{dir}/{file}")), 1 << 20).unwrap();
            let expected = match (dir, &*file) {
                ("packs", "old") => vec![1; 5 * BLOCK_ALIGN],
                ("packs", "new") => vec![2; 5 * BLOCK_ALIGN],
                ("manifests", "old") => b"old".to_vec(),
                ("manifests", "new") => b"new".to_vec(),
                other => panic!("{what}: {other:?}"),
            };
            assert!(content == expected, "{what}: {dir}/{file}");
        }
    }
    assert!(medium.open(&name("manifests/old")).is_ok(), "{what}");
}

#[test]
fn an_error_at_any_step_is_told_and_leaves_the_rest_alone() {
    for point in POINTS {
        for (action, expected) in ERRORS {
            let what = format!("{point}={action}");
            let (dir, medium) = prepared();
            let output = run(dir.path(), &what);
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success(), "{what}: {said}");
            let errors = said.lines().filter(|line| line.contains("step: ") && !line.contains("step: done"));
            assert_eq!(errors.clone().count(), 1, "{what}: {said}");
            assert!(errors.clone().all(|line| line.contains(expected)), "{what}: {said}");
            is_whole(&medium, &what);
            assert_eq!(medium.sweep(Duration::ZERO).unwrap(), [""; 0], "{what}: it cleans up behind itself");
            let new = medium.open(&name("packs/new")).is_ok();
            assert_eq!(new, !point.starts_with("save-"), "{what}");
            let old = medium.open(&name("packs/old")).is_ok();
            assert_eq!(old, *point == "remove-data", "{what}");
        }
    }
}

/// An error of a call that has succeeded: what a client of a network file system gets for a repeated request.
#[test]
fn an_error_after_a_success_is_none_if_the_object_is_there() {
    for (point, is_told) in [("rename-done@1", ["eio", "estale"]), ("rename-done@2", ["eio", "estale"])] {
        for action in ["eexist", "eintr"].into_iter().chain(is_told) {
            let what = format!("{point}={action}");
            let (dir, medium) = prepared();
            let output = run(dir.path(), &what);
            let said = String::from_utf8_lossy(&output.stdout);
            let done = said.lines().filter(|line| line.ends_with("step: done")).count();
            assert_eq!(done, if is_told.contains(&action) { 2 } else { 3 }, "{what}: {said}");
            is_whole(&medium, &what);
            assert!(medium.open(&name("packs/new")).is_ok() && medium.open(&name("manifests/new")).is_ok());
            assert_eq!(medium.sweep(Duration::ZERO).unwrap(), [""; 0], "{what}");
        }
    }
}

#[test]
fn a_kill_at_any_step_leaves_whole_objects_and_what_can_be_swept() {
    for point in POINTS {
        let what = format!("{point}=kill");
        let (dir, medium) = prepared();
        let output = run(dir.path(), &what);
        assert_eq!(output.status.signal(), Some(9), "{what}");
        is_whole(&medium, &what);
        let swept = medium.sweep(Duration::ZERO).unwrap();
        let is_unfinished = ["save-write", "save-fsync", "save-rename", "put-fsync", "put-rename"]
            .iter()
            .any(|step| point.starts_with(step));
        assert_eq!(swept.len(), usize::from(is_unfinished), "{what}: {swept:?}");
        is_whole(&medium, &what);
        // And it goes on from there.
        if medium.open(&name("packs/new")).is_err() {
            write(&medium, "packs/new", 2).unwrap();
        }
        is_whole(&medium, &what);
    }
}
