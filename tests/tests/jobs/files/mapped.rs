//! Files that the job changes through a mapping, which not every file system notices, right before a snapshot.

use ckpt_run_tests::file_systems::{FileSystem, in_namespaces, inner_directory, unavailable};
use ckpt_run_tests::{Sandbox, python};
use std::fs;
use std::path::Path;

/// Has a file mapped, and maps another one later. Each is changed, and not mapped any more, before the snapshot; `keep` keeps
/// them open.
const JOB: &str = r#"
import mmap, os, sys, time
NAMES = ["early.bin", "late.bin"]
def until(name):
    while not os.path.exists(name): time.sleep(0.01)
def opened(name):
    with open(name, "wb") as new: new.write(b"old" * 100000)
    return open(name, "r+b")
def mapped(file):
    memory = mmap.mmap(file.fileno(), 0)
    assert memory[:3] == b"old"
    return memory
files = [opened(name) for name in NAMES]
early = mapped(files[0])
early[3:6] = b"old"
open("ready", "w").close()
until("change")
for memory in [early, mapped(files[1])]:
    memory[:3] = b"new"
    memory.close()
if sys.argv[1] != "keep":
    for file in files: file.close()
open("changed", "w").close()
until("go")
print([open(name, "rb").read(3).decode() for name in NAMES])
"#;

/// The files are changed after they were copied for the snapshot, while the job runs.
fn a_change_is_in_the_snapshot(sandbox: &mut Sandbox, keep: &str) {
    let hold = format!("files-prepared=hold:{}", sandbox.path().join("hold").display());
    sandbox.variables = vec![("CKPT_FAULT".to_owned(), hold)];
    let path = |name: &str| sandbox.path().join(name);
    fs::write(path("hold"), "").unwrap();
    let python = python();
    let command = ["--", python.to_str().unwrap(), "-c", JOB, keep];
    let mut job = sandbox.start("job", command);
    job.until("the files are there", || path("ready").exists().then_some(()));
    job.until_answering(sandbox);
    // A file that has just been changed is not copied before the job is frozen.
    let early = path("early.bin");
    job.until("files that are old enough", || {
        let changed = fs::metadata(&early).unwrap().modified().unwrap();
        (changed.elapsed().unwrap().as_secs() >= 3).then_some(())
    });
    let mut asked = sandbox.start("asked", ["checkpoint"]);
    job.until("the copies", || sandbox.read("job.err").contains("files-prepared").then_some(()));
    fs::write(path("change"), "").unwrap();
    job.until("the change", || path("changed").exists().then_some(()));
    fs::remove_file(path("hold")).unwrap();
    assert_eq!(asked.wait(), 0, "{}", asked.said());
    job.kill_everything();
    for name in ["early.bin", "late.bin"] {
        fs::write(path(name), "lost").unwrap();
    }
    fs::write(path("go"), "").unwrap();
    let mut job = sandbox.start("again", command);
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert_eq!(sandbox.read("again.out"), "['new', 'new']\n", "{keep}: {}", job.said());
}

#[test]
fn a_file_that_is_changed_through_a_mapping_is_in_the_snapshot() {
    for keep in ["keep", "close"] {
        a_change_is_in_the_snapshot(&mut Sandbox::new(), keep);
    }
}

/// Its times do not show such changes.
#[test]
fn a_file_of_a_tmpfs_that_is_changed_through_a_mapping_is_in_the_snapshot() {
    let name = "files::mapped::a_file_of_a_tmpfs_that_is_changed_through_a_mapping_is_in_the_snapshot";
    let on = |dir: &Path| {
        let top = FileSystem::Tmpfs.mount(dir).unwrap_or_else(|why| unavailable(&why));
        for keep in ["keep", "close"] {
            a_change_is_in_the_snapshot(&mut Sandbox::new_in(&top), keep);
        }
    };
    match inner_directory() {
        Some(dir) => on(&dir),
        None => in_namespaces(name, Sandbox::new().path()).unwrap_or_else(ckpt_test_skip::skip),
    }
}
