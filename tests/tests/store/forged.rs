//! Snapshots that somebody has put into an encrypted store who can write to it and does not have the key.

use ckpt_run_tests::{Running, Sandbox, from_env, python, rng_of_run, workspace};
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Ends when there is a file `go`, and says its name.
const JOB: &str = "echo begun; while [ ! -e go ]; do sleep 0.02; done; echo end of $0";

struct Encrypted {
    sandbox: Sandbox,
    key: PathBuf,
}

impl Encrypted {
    fn new() -> Self {
        let mut sandbox = Sandbox::new();
        // What this machine remembers outside of the store.
        let state = sandbox.path().join("state").display().to_string();
        sandbox.variables.push(("XDG_STATE_HOME".to_owned(), state));
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

/// Snapshots and records with their codes, as they were in the store before.
#[test]
fn an_older_state_of_the_job_is_refused() {
    let jobs = Encrypted::new();
    let first = jobs.saved("victim", 1, true);
    // Elsewhere: what is made in the job's directory right after the kill counts as its own.
    let apart = Sandbox::new();
    let (victim, older) = (jobs.dir("victim"), apart.path().join("older"));
    let put_back = || {
        fs::remove_dir_all(&victim).unwrap();
        copy_into_new(&older, &victim);
    };
    copy_into_new(&victim, &older);
    jobs.saved("victim", 1, true);
    put_back();
    let refused = || {
        let (code, said) = with_key(&jobs, "victim", &["--", "sh", "-c", JOB, "victim"]);
        assert!(
            code == Some(2) && said.contains("has put back an older state of the job"),
            "{code:?}: {said}"
        );
        PathBuf::from(said.rsplit_once("Remove ").unwrap().1.split_once(" if").unwrap().0)
    };
    let seen = refused();
    assert!(seen.starts_with(jobs.sandbox.path().join("state")), "{}", seen.display());
    // From before a pin.
    fs::remove_file(&seen).unwrap();
    assert_eq!(with_key(&jobs, "victim", &["pin", &first[0]]).0, Some(0));
    put_back();
    assert_eq!(refused(), seen);
    // The user may have put it back.
    fs::remove_file(&seen).unwrap();
    let said = jobs.end("victim");
    assert!(said.contains(&format!("resumed from snapshot {}", first[0])), "{said}");
    // A store that was deleted begins anew.
    fs::remove_dir_all(&victim).unwrap();
    jobs.saved("victim", 1, true);
}

/// The list of files that the job has written is under the key, too: who adds a path to it does not have that file moved
/// away by a resume.
#[test]
fn files_that_somebody_lists_are_not_the_jobs() {
    for is_encrypted in [true, false] {
        let (jobs, apart) = (Encrypted::new(), Sandbox::new());
        jobs.saved("victim", 1, is_encrypted);
        let precious = apart.path().join("precious");
        fs::write(&precious, "x").unwrap();
        let path = serde_json::Value::from(precious.to_str().unwrap()).to_string();
        for record in files_of(&jobs.dir("victim").join("written")) {
            let mut content = fs::read(&record).unwrap();
            content.extend(format!("{path}\n").bytes());
            fs::write(record, content).unwrap();
        }
        let interrupted =
            format!(r#"{{"until_ns":9000000000000000000,"is_same_boot":true,"paths":[{path}]}}"#);
        fs::write(jobs.dir("victim").join("put-back.json"), interrupted).unwrap();
        let go = jobs.sandbox.path().join("go");
        fs::write(&go, "").unwrap();
        let mut job = jobs.sandbox.start_command("end", jobs.command("victim", is_encrypted));
        assert_eq!(job.wait(), 0, "{}", job.said());
        assert!(job.said().contains("resumed from snapshot"), "{}", job.said());
        // Without a key, a store is trusted.
        assert_eq!(precious.exists(), is_encrypted, "{}", job.said());
    }
}

/// The highest number of a record of this kind, and its file.
fn newest(dir: &Path, kind: &str) -> (u64, PathBuf) {
    let number = |file: &PathBuf| file.file_stem()?.to_str()?.parse::<u64>().ok();
    let files = files_of(&dir.join(kind));
    files.into_iter().filter_map(|file| Some((number(&file)?, file))).max().unwrap()
}

/// A command of this job with the key.
fn with_key(jobs: &Encrypted, name: &str, arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = jobs.sandbox.command(["--job", name].iter().chain(arguments));
    let output = command.env("CKPT_ENCRYPT_KEY_FILE", &jobs.key).output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn records_that_somebody_writes_are_refused() {
    let (jobs, plain) = (Encrypted::new(), Encrypted::new());
    let ids = jobs.saved("victim", 1, true);
    assert_eq!(with_key(&jobs, "victim", &["tag", &ids[0], "good"]).0, Some(0));
    jobs.saved("other", 1, true);
    plain.saved("victim", 1, false);
    let (victim, other) = (jobs.dir("victim"), jobs.dir("other"));
    for (what, from, kind) in [
        ("of another number", newest(&victim, "job").1, "job"),
        ("of another kind", newest(&victim, "marks").1, "job"),
        ("of another kind", newest(&victim, "job").1, "marks"),
        ("of another job", newest(&other, "job").1, "job"),
        ("without a code", newest(&plain.dir("victim"), "job").1, "job"),
    ] {
        let planted = victim.join(kind).join(format!("{}.json", newest(&victim, kind).0 + 1));
        fs::copy(from, &planted).unwrap();
        let command: &[&str] = if kind == "job" { &["status"] } else { &["ls"] };
        for arguments in [command, &["prune"], &["tag", &ids[0], "x"], &["--", "sh", "-c", JOB, "victim"]] {
            if kind == "job" && arguments[0] == "tag" {
                continue;
            }
            let (code, said) = with_key(&jobs, "victim", arguments);
            assert_eq!(code, Some(2), "{what}, {arguments:?}: {said}");
            assert!(said.contains(planted.to_str().unwrap()), "{what}, {arguments:?}: {said}");
            assert!(said.contains("Remove the file"), "{what}, {arguments:?}: {said}");
        }
        fs::remove_file(planted).unwrap();
    }
    let said = jobs.end("victim");
    assert!(said.contains(&format!("resumed from snapshot {}", ids[0])), "{said}");
}

/// The record of the job beside its uploads is one of these.
#[test]
fn a_record_in_the_object_store_is_refused() {
    let jobs = Encrypted::new();
    let remote = jobs.sandbox.path().join("remote");
    fs::create_dir(&remote).unwrap();
    let url = format!("file://{}", remote.display());
    let command = ["--upload", &url, "--", "true"];
    let (code, said) = with_key(&jobs, "victim", &command);
    assert_eq!(code, Some(0), "{said}");
    let (number, own) = newest(&remote.join("jobs/victim"), "job");
    let planted = own.with_file_name(format!("{}.json", number + 1));
    fs::copy(own, &planted).unwrap();
    let (code, said) = with_key(&jobs, "victim", &command);
    assert!(code == Some(2) && said.contains("Remove the file"), "{code:?}: {said}");
    assert!(said.contains(&format!("jobs/victim/job/{}.json", number + 1)), "{said}");
    fs::remove_file(planted).unwrap();
    assert_eq!(with_key(&jobs, "victim", &command).0, Some(0));
}

/// Whatever is written where the job's records are: the job that runs saves, ends, and says what it has seen.
#[test]
fn a_record_that_somebody_writes_does_not_stop_a_running_job() {
    let (jobs, plain) = (Encrypted::new(), Encrypted::new());
    plain.saved("victim", 1, false);
    let mut job = jobs.start("victim", true);
    let first = job.checkpoint_of(&jobs.sandbox, "victim");
    let victim = jobs.dir("victim");
    let claim = newest(&plain.dir("victim"), "job").1;
    fs::create_dir_all(victim.join("marks")).unwrap();
    let next = newest(&victim, "job").0 + 1;
    let planted = [format!("job/{next}.json"), format!("job/{}.json", u64::MAX), "marks/9.json".to_owned()];
    for name in &planted {
        fs::copy(&claim, victim.join(name)).unwrap();
    }
    let second = job.checkpoint_of(&jobs.sandbox, "victim");
    let go = jobs.sandbox.path().join("go");
    fs::write(&go, "").unwrap();
    assert_eq!(job.wait(), 0, "{}", job.said());
    let said = job.said();
    assert!(
        said.contains("is passed over") && said.contains(&planted[0]) && said.contains(&planted[1]),
        "{said}"
    );
    assert!(!said.contains("has claimed the job") && !said.contains("cannot prune"), "{said}");
    // The next start names them. Without them, it finds the job as it was left.
    for name in &planted {
        let (code, said) = with_key(&jobs, "victim", &["--", "sh", "-c", JOB, "victim"]);
        assert!(code == Some(2) && said.contains("does not count"), "{code:?}: {said}");
        fs::remove_file(victim.join(name)).unwrap();
    }
    let listed = fs::read_dir(victim.join("manifests")).unwrap().count();
    assert_eq!(listed, 2, "{first} and {second}");
    let said = jobs.end("victim");
    assert!(said.contains("it was complete"), "{said}");
}

/// Ends with an error once, when there is a file `die`.
const DYING: &str =
    "echo begun; while [ ! -e go ]; do [ ! -e die ] || { mv die died; exit 1; }; sleep 0.02; done";

/// Also if the records of the job are removed besides: its launcher knows what it has written, and restarts the job.
#[test]
fn a_restart_does_not_depend_on_records_that_somebody_writes() {
    let (jobs, plain) = (Encrypted::new(), Encrypted::new());
    plain.saved("victim", 1, false);
    let mut command = jobs.sandbox.command(["--job", "victim", "--files", "off", "--max-restarts", "9"]);
    command.env("CKPT_ENCRYPT_KEY_FILE", &jobs.key).args(["--", "sh", "-c", DYING, "victim"]);
    let mut job = jobs.sandbox.start_command("victim", command);
    job.until_answering(&jobs.sandbox);
    job.until("its begin", || jobs.sandbox.read("victim.out").contains("begun").then_some(()));
    let id = job.checkpoint_of(&jobs.sandbox, "victim");
    let planted = ["job", "marks"].map(|kind| jobs.dir("victim").join(kind).join("99.json"));
    for file in &planted {
        let folder = file.parent().unwrap();
        files_of(folder).iter().for_each(|own| fs::remove_file(own).unwrap());
        fs::copy(newest(&plain.dir("victim"), "job").1, file).unwrap();
    }
    fs::write(jobs.sandbox.path().join("die"), "").unwrap();
    let resumed = format!("resumed from snapshot {id}");
    job.until("its restart", || jobs.sandbox.read("victim.err").contains(&resumed).then_some(()));
    job.until_answering(&jobs.sandbox);
    job.checkpoint_of(&jobs.sandbox, "victim");
    let go = jobs.sandbox.path().join("go");
    fs::write(&go, "").unwrap();
    assert_eq!(job.wait(), 0, "{}", job.said());
    fs::remove_file(go).unwrap();
    assert!(!job.said().contains("cannot prune"), "{}", job.said());
    // Its records are there again.
    planted.iter().for_each(|file| fs::remove_file(file).unwrap());
    let said = jobs.end("victim");
    assert!(said.contains("it was complete"), "{said}");
}

/// Neither a record that the next start would refuse, nor what the records protect.
#[test]
fn without_the_key_nothing_of_an_encrypted_job_is_changed() {
    let jobs = Encrypted::new();
    let ids = jobs.saved("victim", 2, true);
    let victim = jobs.dir("victim");
    // Its launcher has made a record of no marks. That of an older one may have made none.
    fs::remove_dir_all(victim.join("marks")).unwrap();
    for command in [
        &["pin", &ids[0]][..],
        &["tag", &ids[0], "good"],
        &["rm", &ids[0], "--force"],
        &["prune", "--keep", "1"],
        &["rm", "--whole-job", "victim", "--force"],
    ] {
        let output = jobs.sandbox.call(["--job", "victim"].iter().chain(command));
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{command:?}: {said}");
        assert!(said.contains("--encrypt-key-file"), "{command:?}: {said}");
    }
    assert_eq!(fs::read_dir(victim.join("manifests")).unwrap().count(), 2);
    let output = jobs.sandbox.call(["--job", "victim", "ls"]);
    let listed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.code() == Some(1) && listed.contains("give the key"), "{listed}");
    let said = jobs.end("victim");
    assert!(said.contains(&format!("resumed from snapshot {}", ids[1])), "{said}");
}

/// A job that had no key, or an older ckpt-run.
#[test]
fn records_without_a_code_are_adopted_on_request() {
    let jobs = Encrypted::new();
    jobs.sandbox.ok(["--job", "old", "--", "true"]);
    let (code, said) = with_key(&jobs, "old", &["--", "true"]);
    assert!(code == Some(2) && said.contains("repair --adopt-records"), "{code:?}: {said}");
    let output = jobs.sandbox.call(["--job", "old", "repair", "--adopt-records"]);
    assert_eq!(output.status.code(), Some(2), "there is no key: {output:?}");
    jobs.sandbox.ok(["--job", "plain", "--", "true"]);
    let mut of_all = jobs.sandbox.command(["repair", "--adopt-records"]);
    let output = of_all.env("CKPT_ENCRYPT_KEY_FILE", &jobs.key).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("--job"), "{said}");
    let (code, said) = with_key(&jobs, "old", &["repair", "--adopt-records"]);
    assert_eq!(code, Some(0), "{said}");
    let (code, said) = with_key(&jobs, "old", &["--", "true"]);
    assert!(code == Some(0) && said.contains("it was complete"), "{code:?}: {said}");
}

/// All files of a job.
fn files_of(dir: &Path) -> Vec<PathBuf> {
    let listed = Command::new("find").arg(dir).args(["-type", "f"]).output().unwrap();
    let mut files: Vec<_> = String::from_utf8(listed.stdout).unwrap().lines().map(PathBuf::from).collect();
    // Not those that have become huge.
    files.retain(|file| file.metadata().is_ok_and(|meta| meta.len() < 1 << 30));
    files.sort();
    files
}

/// Copies a file into the store, unless that would go through a link.
fn put(from: &Path, victim: &Path, name: &str) -> io::Result<String> {
    let to = victim.join(name);
    let folder = to.parent().unwrap();
    fs::create_dir_all(folder)?;
    if folder.is_symlink() || fs::copy(from, &to).is_err() {
        return Ok("nothing".to_owned());
    }
    Ok(format!("{name} is {}", from.display()))
}

/// Makes something that is no file. Returns what.
fn something_else(random: &mut fastrand::Rng, path: &Path, canary: &Path) -> io::Result<&'static str> {
    match random.u32(..3) {
        0 => {
            std::os::unix::fs::symlink(canary, path)?;
            Ok("a link out of the store")
        }
        1 => {
            fs::create_dir(path)?;
            Ok("a directory")
        }
        _ => {
            assert!(Command::new("mkfifo").arg(path).status()?.success());
            Ok("a fifo")
        }
    }
}

/// Does one thing to the store that only needs the right to write there. Returns what. It fails if a launcher has deleted the file
/// meanwhile.
fn attack(
    random: &mut fastrand::Rng,
    victim: &Path,
    others: &[PathBuf],
    canary: &Path,
) -> io::Result<String> {
    let files = files_of(victim);
    let Some(file) = random.choice(&files) else { return Ok("nothing is left".to_owned()) };
    let of_another = &others[random.usize(..others.len())];
    let name = file.strip_prefix(victim).unwrap().display().to_string();
    let content = fs::read(file)?;
    Ok(match random.u32(..12) {
        0 => {
            fs::remove_file(file)?;
            format!("{name} is deleted")
        }
        1 => {
            fs::write(file, &content[..random.usize(..=content.len())])?;
            format!("{name} is cut")
        }
        2 if !content.is_empty() => {
            let mut altered = content.clone();
            altered[random.usize(..content.len())] ^= 1 << random.u32(..8);
            fs::write(file, altered)?;
            format!("a bit of {name} is flipped")
        }
        3 => {
            fs::copy(of_another, file)?;
            format!("{name} is replaced by {}", of_another.display())
        }
        4 => {
            let own = random.choice(&files).unwrap();
            fs::write(file, fs::read(own)?)?;
            format!("{name} is replaced by {}", own.display())
        }
        5..8 => {
            fs::remove_file(file)?;
            format!("{name} is {}", something_else(random, file, canary)?)
        }
        8 => {
            let later = format!("manifests/00000{}-20991231T235959Z", random.u32(4..9));
            put(of_another, victim, &later)?
        }
        9 => {
            let record = format!("{}/99.json", ["job", "marks"][random.usize(..2)]);
            put(of_another, victim, &record)?
        }
        10 if file.parent() != Some(victim) => {
            let folder = file.parent().unwrap().to_owned();
            fs::remove_dir_all(&folder)?;
            std::os::unix::fs::symlink(canary.parent().unwrap(), &folder)?;
            format!("{} is a link out of the store", folder.display())
        }
        _ => {
            fs::File::options().write(true).open(file)?.set_len(1 << 40)?;
            format!("{name} has a tebibyte")
        }
    })
}

/// Each step hangs on all before it. Slow while `slow` is there. Started again, it begins its file again.
const STEPS: &str = r"
import hashlib, os, time
secret, log = hashlib.sha256(b'begin').digest(), open('steps', 'w')
for step in range(300):
    secret = hashlib.sha256(secret).digest()
    log.write(secret.hex()[:16] + '\n')
    log.flush()
    if os.path.exists('slow'):
        time.sleep(0.02)
";

/// The same while the job runs and is saved: the job itself is never disturbed. After a kill it resumes right, begins again, or
/// is refused.
#[test]
fn whatever_is_done_to_the_store_while_the_job_runs_its_steps_are_right() {
    let rounds = from_env("CKPT_TEST_KILLS", || "6".into()).to_str().unwrap().parse::<u64>().unwrap();
    let others = Encrypted::new();
    others.saved("other", 2, true);
    let files = files_of(&others.dir("other"));
    let canary = others.sandbox.path().join("outside/canary");
    fs::create_dir(canary.parent().unwrap()).unwrap();
    fs::write(&canary, "alive").unwrap();
    let plain = Sandbox::new();
    let unbroken = Command::new(python()).args(["-c", STEPS]).current_dir(plain.path()).status().unwrap();
    assert!(unbroken.success());
    let unbroken = plain.read("steps");
    let mut random = rng_of_run();
    for round in 0..rounds {
        let jobs = Encrypted::new();
        let (sandbox, slow) = (&jobs.sandbox, jobs.sandbox.path().join("slow"));
        fs::write(&slow, "").unwrap();
        let command = || {
            let mut command =
                sandbox.command(["--job", "victim", "--interval", "200ms", "--max-restarts", "0"]);
            command.env("CKPT_ENCRYPT_KEY_FILE", &jobs.key).env("CKPT_INTERVAL", "200ms");
            command.args(["--".as_ref(), python().as_os_str(), "-c".as_ref(), STEPS.as_ref()]);
            command
        };
        let mut job = sandbox.start_command("job", command());
        let victim = jobs.dir("victim");
        job.until("a snapshot", || fs::read_dir(victim.join("manifests")).ok()?.next().map(drop));
        let done: Vec<_> = (0..random.u32(1..6))
            .map(|_| {
                std::thread::sleep(Duration::from_millis(random.u64(..300)));
                attack(&mut random, &victim, &files, &canary).unwrap_or_else(|error| error.to_string())
            })
            .collect();
        let is_killed = random.bool();
        if is_killed {
            job.kill_everything();
            fs::remove_file(&slow).unwrap();
            job = sandbox.start_command("again", command());
        } else {
            fs::remove_file(&slow).unwrap();
        }
        let (code, said) = (job.wait(), job.said());
        println!("round {round}: {code}, killed: {is_killed}: {done:?}");
        assert!(code == 0 || is_killed && matches!(code, 2 | 125), "{code} after {done:?}: {said}");
        assert!(code != 0 || sandbox.read("steps") == unbroken, "{done:?}: {said}");
        assert!(!said.contains("panicked"), "{done:?}: {said}");
        assert_eq!(fs::read_to_string(&canary).ok().as_deref(), Some("alive"), "{done:?}: {said}");
        assert_eq!(fs::read_dir(canary.parent().unwrap()).unwrap().count(), 1, "{done:?}");
    }
}

/// Random changes of the store by somebody who can write to it. The job resumes from a snapshot that the key authenticates,
/// starts from the beginning, or is refused: nothing else runs, nothing hangs, and nothing outside of the store changes.
#[test]
fn whatever_is_done_to_the_store_only_the_job_itself_runs() {
    let rounds = from_env("CKPT_TEST_KILLS", || "12".into()).to_str().unwrap().parse::<u64>().unwrap();
    let jobs = Encrypted::new();
    jobs.saved("victim", 3, true);
    jobs.saved("other", 3, true);
    let plain = Encrypted::new();
    plain.saved("victim", 3, false);
    // What is new in the job's directory right after a kill may be taken for the job's.
    let apart = Sandbox::new();
    let (victim, pristine) = (jobs.dir("victim"), apart.path().join("pristine"));
    copy_into_new(&victim, &pristine);
    let others =
        [jobs.dir("other"), plain.dir("victim")].iter().flat_map(|dir| files_of(dir)).collect::<Vec<_>>();
    let outside = apart.path().join("outside");
    fs::create_dir(&outside).unwrap();
    let canary = outside.join("canary");
    fs::write(&canary, "alive").unwrap();
    fs::write(jobs.sandbox.path().join("go"), "").unwrap();
    let mut resumed = 0;
    let mut random = rng_of_run();
    for round in 0..rounds {
        fs::remove_dir_all(&victim).unwrap();
        copy_into_new(&pristine, &victim);
        // As on a machine that has not seen the job.
        let _ = fs::remove_dir_all(jobs.sandbox.path().join("state"));
        let attacks = if round == 0 { 0 } else { random.u32(1..5) };
        let done: Vec<_> =
            (0..attacks).map(|_| attack(&mut random, &victim, &others, &canary).unwrap()).collect();
        let name = format!("round-{round}");
        let mut job = jobs.sandbox.start_command(&name, jobs.command("victim", true));
        let code = job.wait();
        let (out, said) = (jobs.sandbox.read(&format!("{name}.out")), job.said());
        println!(
            "{code}, {}: {done:?}",
            if said.contains("resumed from") { "resumed" } else { "not resumed" }
        );
        resumed += u64::from(said.contains("resumed from snapshot"));
        assert!(matches!(code, 0 | 2 | 125), "{code} after {done:?}: {said}");
        assert!(code != 0 || out.contains("end of victim"), "{done:?}: {said}");
        assert!(!said.contains("end of other") && !said.contains("panicked"), "{done:?}: {said}");
        assert_eq!(fs::read_to_string(&canary).ok().as_deref(), Some("alive"), "{done:?}: {said}");
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 1, "{done:?}");
        assert!(resumed > 0, "an untouched store does not resume: {said}");
    }
    // How many of a few rounds resume is chance.
    assert!(
        rounds < 100 || resumed > rounds / 10,
        "{resumed} of {rounds} resumed: the attacks are too coarse to tell anything"
    );
}

fn copy_into_new(from: &Path, to: &Path) {
    assert!(Command::new("cp").arg("-a").arg(from).arg(to).status().unwrap().success());
}
