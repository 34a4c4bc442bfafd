//! Snapshots that somebody has put into an encrypted store who can write to it and does not have the key.

use ckpt_run_tests::{Running, Sandbox, workspace};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Ends when there is a file `go`, and says its name.
const JOB: &str = "echo begun; while [ ! -e go ]; do sleep 0.02; done; echo end of $0";

struct Encrypted {
    sandbox: Sandbox,
    key: PathBuf,
}

impl Encrypted {
    fn new() -> Self {
        let sandbox = Sandbox::new();
        let key = sandbox.path().join("key");
        fs::write(&key, std::array::from_fn::<u8, 32, _>(|place| place as u8 + 1)).unwrap();
        fs::set_permissions(&key, Permissions::from_mode(0o600)).unwrap();
        Self { sandbox, key }
    }

    fn command(&self, name: &str, is_encrypted: bool) -> Command {
        let mut command = self.sandbox.command(["--job", name, "--keep", "9"]);
        if is_encrypted {
            command.env("CKPT_ENCRYPT_KEY_FILE", &self.key);
        }
        command.args(["--", "sh", "-c", JOB, name]);
        command
    }

    /// Starts a job, or resumes it.
    fn start(&self, name: &str, is_encrypted: bool) -> Running {
        let mut job = self.sandbox.start_command(name, self.command(name, is_encrypted));
        job.until_answering(&self.sandbox);
        job.until("its begin", || self.sandbox.read(&format!("{name}.out")).contains("begun").then_some(()));
        job
    }

    /// A job with so many snapshots.
    fn saved(&self, name: &str, snapshots: usize, is_encrypted: bool) -> Vec<String> {
        let mut job = self.start(name, is_encrypted);
        let ids = (0..snapshots).map(|_| job.checkpoint_of(&self.sandbox, name)).collect();
        job.kill_everything();
        ids
    }

    fn dir(&self, name: &str) -> PathBuf {
        self.sandbox.store.join("jobs").join(name)
    }

    /// Resumes a job, lets it end, and returns what was said.
    fn end(&self, name: &str) -> String {
        let go = self.sandbox.path().join("go");
        let mut job = self.sandbox.start_command("end", self.command(name, true));
        fs::write(&go, "").unwrap();
        let code = job.wait();
        fs::remove_file(go).unwrap();
        let said = job.said();
        assert_eq!(code, 0, "{said}");
        said
    }
}

/// Copies what a directory has into another one, except what that has already.
fn copy_into(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-rn").arg(from.join(".")).arg(to).status().unwrap();
    assert!(copied.success());
}

/// Adds the snapshots of one job to another one.
fn plant(from: &Path, to: &Path) {
    for kind in ["packs", "manifests"] {
        copy_into(&from.join(kind), &to.join(kind));
    }
}

#[test]
fn the_snapshot_of_another_job_is_not_resumed() {
    let jobs = Encrypted::new();
    let own = jobs.saved("victim", 1, true);
    let other = jobs.saved("other", 2, true);
    plant(&jobs.dir("other"), &jobs.dir("victim"));
    let said = jobs.end("victim");
    assert!(said.contains(&format!("{} is damaged: its manifest", other[1])), "{said}");
    assert!(said.contains("it is of the job other") && said.contains("end of victim"), "{said}");
    assert!(said.contains(&format!("resumed from snapshot {}", own[0])), "{said}");
}

#[test]
fn a_snapshot_without_encryption_is_not_resumed() {
    let jobs = Encrypted::new();
    jobs.saved("victim", 1, true);
    // The same job, saved without the key.
    let plain = Encrypted::new();
    plain.saved("victim", 2, false);
    plant(&plain.dir("victim"), &jobs.dir("victim"));
    let mut job = jobs.sandbox.start_command("refused", jobs.command("victim", true));
    assert_eq!(job.wait(), 2, "{}", job.said());
    let said = job.said();
    assert!(said.contains("it is not encrypted"), "{said}");
    assert!(!said.contains("resumed from snapshot"), "{said}");
}

#[test]
fn snapshots_that_change_their_names_are_not_resumed() {
    let jobs = Encrypted::new();
    let ids = jobs.saved("victim", 2, true);
    // The older one as the newer one.
    let manifests = jobs.dir("victim").join("manifests");
    fs::copy(manifests.join(&ids[0]), manifests.join(&ids[1])).unwrap();
    let said = jobs.end("victim");
    assert!(said.contains(&format!("{} is damaged", ids[1])), "{said}");
    assert!(said.contains(&format!("resumed from snapshot {}", ids[0])), "{said}");
}

/// Version 1 of the store knew no encryption.
#[test]
fn an_old_snapshot_is_not_resumed() {
    let jobs = Encrypted::new();
    let own = jobs.saved("victim", 1, true);
    let old = workspace().join("snapshot/tests/fixtures/store-v1/jobs/train/snapshots");
    let planted = jobs.dir("victim").join("snapshots");
    fs::create_dir_all(&planted).unwrap();
    copy_into(&old, &planted);
    let said = jobs.end("victim");
    assert!(said.contains("are not used"), "{said}");
    assert!(said.contains(&format!("resumed from snapshot {}", own[0])), "{said}");
}
