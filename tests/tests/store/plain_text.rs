//! The memory of a job with an encrypted store never reaches a disk: whole runs with all their directories on a disk that
//! is recorded, with kills at phases of a checkpoint, at each with `--full`, and resumes after them. No write to that disk, of a file that is gone
//! again either, has a secret that is in the job's memory.

use super::faults::{CRIU_POINTS, POINTS};
use super::power_loss::mount_tmpfs;
use ckpt_run_tests::file_systems::{
    FileSystem, in_namespaces, inner_directory, make_image, unavailable, unmount,
};
use ckpt_run_tests::power_loss::RecordedDisk;
use ckpt_run_tests::{Sandbox, is_full_run, python, seeded_rng, until};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Sparse.
const IMAGE_BYTES: u64 = 1 << 30;
/// One in so many of the points is tried without `--full`.
const EACH: usize = 5;
/// The runtime directory of root.
const RUNTIME: &str = "/run/ckpt-run";

/// A job with a secret wherever memory of a job can be: its heap, a pipe, sockets, a file without a name in memory. It
/// reads the secret backwards, so that it is in no file.
const JOB: &str = r#"
import os, socket, sys, time

secret = open(sys.argv[1]).read()[::-1].encode() * 64
heap = bytearray(secret * 256)
read, write = os.pipe()
os.write(write, secret)
pair = socket.socketpair()
pair[0].send(secret)
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
client.send(secret)
accepted, _ = server.accept()
memory = os.memfd_create("secret")
os.write(memory, secret)
open("ready", "w").close()
while not os.path.exists("go"):
    time.sleep(0.01)
received = os.read(read, 4096), pair[1].recv(4096), accepted.recv(4096), os.pread(memory, 4096, 0)
assert received == (secret,) * 4 and heap == secret * 256
"#;

/// One run, with its disk.
struct Scene {
    /// In memory.
    disk: PathBuf,
    top: PathBuf,
    sandbox: Sandbox,
}

impl Scene {
    /// Makes the disk, and mounts it.
    fn new(dir: &Path, is_encrypted: bool) -> (Self, RecordedDisk) {
        let name = if is_encrypted { "encrypted" } else { "plain" };
        let (disk, top) = (dir.join(name), dir.join(format!("{name}-mounted")));
        mount_tmpfs(&disk);
        fs::create_dir(&top).unwrap();
        let image = disk.join("image");
        make_image(&image, IMAGE_BYTES)
            .and_then(|()| FileSystem::Ext4.format(&image))
            .unwrap_or_else(|why| unavailable(&why));
        let program = Path::new(env!("CARGO_BIN_EXE_recorded-disk"));
        let recorded =
            RecordedDisk::start(program, &image, &disk.join("log")).unwrap_or_else(|why| unavailable(&why));
        FileSystem::Ext4.mount_image(&image, &top).unwrap_or_else(|why| unavailable(&why));
        for name in ["runtime", "tmp", "home"] {
            fs::create_dir(top.join(name)).unwrap();
            fs::set_permissions(top.join(name), fs::Permissions::from_mode(0o700)).unwrap();
        }
        let mut bind = Command::new("mount");
        assert!(bind.arg("--bind").arg(top.join("runtime")).arg(RUNTIME).status().unwrap().success());
        let key = is_encrypted.then(|| disk.join("key"));
        if let Some(key) = &key {
            fs::write(key, std::array::from_fn::<u8, 32, _>(|at| at as u8)).unwrap();
            fs::set_permissions(key, fs::Permissions::from_mode(0o600)).unwrap();
        }
        let mut sandbox = Sandbox::new_in(&top);
        let mut set =
            |name: &str, path: &Path| sandbox.variables.push((name.into(), path.display().to_string()));
        set("TMPDIR", &top.join("tmp"));
        set("HOME", &top.join("home"));
        set("XDG_STATE_HOME", &top.join("home"));
        key.iter().for_each(|key| set("CKPT_ENCRYPT_KEY_FILE", key));
        (Self { disk, top, sandbox }, recorded)
    }

    /// A job that is saved and killed at each of the points, and then ends.
    fn run(&self, dir: &Path, points: &[Option<String>]) {
        let [job, backwards] = ["job.py", "backwards"].map(|name| dir.join(name));
        let command = || {
            let mut command = self.sandbox.command(["--keep", "2", "--"]);
            command.arg(python()).args(["-I", "-S"]).args([&job, &backwards]);
            command
        };
        for point in points {
            let mut faulty = command();
            point.iter().for_each(|point| _ = faulty.env("CKPT_FAULT", point));
            let mut running = self.sandbox.start_command("job", faulty);
            running.until("the job", || self.sandbox.path().join("ready").exists().then_some(()));
            // At some points it is killed before it answers.
            let mut is_saved = false;
            until("a snapshot, or the end of the launcher", || {
                is_saved = self.sandbox.call(["checkpoint"]).status.success();
                (is_saved || running.has_ended()).then_some(())
            });
            assert!(is_saved || point.is_some(), "{}", running.said());
            running.kill_everything();
        }
        let mut running = self.sandbox.start_command("job", command());
        running.until_answering(&self.sandbox);
        fs::write(self.sandbox.path().join("go"), "").unwrap();
        assert_eq!(running.wait(), 0, "{}", running.said());
        assert!(running.said().contains("resumed from snapshot"), "{}", running.said());
    }

    /// Whether the secret was ever written to the disk.
    fn has_written(&self, recorded: RecordedDisk, secret: &str) -> bool {
        unmount(Path::new(RUNTIME)).unwrap();
        unmount(&self.top).unwrap();
        let log = self.disk.join("log");
        unmount(&self.disk.join("image")).unwrap();
        assert!(recorded.position() > 4 << 20, "{} bytes were written", recorded.position());
        drop(recorded);
        let mut grep = Command::new("grep");
        let status = grep.args(["--quiet", "--text", "--fixed-strings", secret]).arg(log).status().unwrap();
        assert!(matches!(status.code(), Some(0 | 1)), "{status}");
        status.success()
    }
}

fn check_all(dir: &Path) {
    let mut rng = seeded_rng(if is_full_run() { fastrand::u64(..) } else { 1 });
    let secret: String = std::iter::repeat_with(|| rng.alphanumeric()).take(64).collect();
    fs::write(dir.join("job.py"), JOB).unwrap();
    fs::write(dir.join("backwards"), secret.chars().rev().collect::<String>()).unwrap();
    let killed = POINTS.iter().map(|point| format!("{point}=kill"));
    let of_criu = CRIU_POINTS.iter().map(|point| format!("{point}@1=kill-criu"));
    let each = if is_full_run() { 1 } else { EACH };
    let points: Vec<_> = [None].into_iter().chain(killed.chain(of_criu).step_by(each).map(Some)).collect();
    // What can be found is found: without a key.
    for (is_encrypted, points) in [(false, &points[..1]), (true, &points[..])] {
        let (scene, recorded) = Scene::new(dir, is_encrypted);
        scene.run(dir, points);
        assert_eq!(scene.has_written(recorded, &secret), !is_encrypted, "with a key: {is_encrypted}");
    }
}

#[test]
fn the_memory_of_an_encrypted_job_reaches_no_disk() {
    match inner_directory() {
        Some(dir) => check_all(&dir),
        None => {
            let sandbox = Sandbox::new();
            let name = "plain_text::the_memory_of_an_encrypted_job_reaches_no_disk";
            if let Err(why) = in_namespaces(name, sandbox.path()) {
                ckpt_test_skip::skip(why);
            }
        }
    }
}
