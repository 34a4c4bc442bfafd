//! Power losses: whole runs with their store on a real file system, on a disk that is recorded. The power is lost at each
//! flush of the disk, by replaying the record. No snapshot that was reported as stored is lost, every snapshot that is
//! there is sound, and every resume ends like an unbroken run.

use ckpt_run_tests::file_systems::{
    FileSystem, in_namespaces, inner_directory, make_image, unavailable, unmount,
};
use ckpt_run_tests::power_loss::{Left, PowerLoss, RecordedDisk, Recording};
use ckpt_run_tests::{Running, Sandbox, python, seeded_rng, set_variables};
use ckpt_test_skip::is_full_run_or_skip;
use fastrand::Rng;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Instant, UNIX_EPOCH};

/// Set by `cargo xtask test --full`.
const FULL_VARIABLE: &str = "CKPT_TEST_POWER_LOSSES";
/// A seed, to repeat a test.
const SEED_VARIABLE: &str = "CKPT_TEST_POWER_LOSS_SEED";
/// More than mkfs.xfs's minimum of 300 MB. The image is sparse.
const IMAGE_BYTES: u64 = 320 << 20;
/// How many power losses there are without `--full`, and how many of them are followed by a resume.
const LOSSES: usize = 40;
const RESUMES: usize = 8;
/// With `--full`, every so many are followed by a resume.
const FULL_RESUME_EVERY: usize = 10;
/// Where the kernel says which boot this is.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// A job with a log, and a file that it replaces in each step. It waits in the middle until it may hurry.
const JOB: &str = r#"
import os, sys, time, zlib

hurry = sys.argv[1]
memory = bytearray(os.urandom(1 << 20))
chain = 0
with open("log", "w", buffering=1) as log:
    for step in range(1000):
        chain = zlib.crc32(b"%d" % step, chain)
        log.write(f"{step} {chain}\n")
        memory[chain % len(memory)] = step & 255
        with open("state.tmp", "w") as state:
            state.write(f"{step} {chain}\n" * 1000)
        os.rename("state.tmp", "state")
        while not os.path.exists(hurry):
            time.sleep(0.01)
            if step != 900:
                break
"#;

/// What has been promised at a moment of the recording.
#[derive(Clone, Copy, Debug)]
struct Promise {
    /// The log's length then.
    position: u64,
    /// The number of the snapshot that was reported as stored; `None` once the job was complete.
    snapshot: Option<u64>,
}

/// One test, in its namespaces.
struct Scene {
    kind: FileSystem,
    /// The directory of the outer test: the job's program is here.
    dir: PathBuf,
    /// In memory: the disk's images and the log.
    disk: PathBuf,
    /// Where the disk is mounted.
    top: PathBuf,
    sandbox: Sandbox,
    /// The launcher's output, not on that disk.
    notes: Sandbox,
    promises: Vec<Promise>,
}

pub fn number(id: &str) -> u64 {
    id.split('-').next().and_then(|digits| digits.parse().ok()).unwrap_or_else(|| panic!("{id}"))
}

pub fn mount_tmpfs(at: &Path) {
    fs::create_dir(at).unwrap();
    let status = Command::new("mount").args(["-t", "tmpfs", "tmpfs"]).arg(at).status();
    if !status.is_ok_and(|status| status.success()) {
        unavailable("no tmpfs can be mounted");
    }
}

/// Replaces the boot's ID.
fn set_boot(disk: &Path, id: &str) {
    let file = disk.join("boot-id");
    let is_mounted = file.exists();
    fs::write(&file, format!("{id}\n")).unwrap();
    if !is_mounted {
        let status = Command::new("mount").arg("--bind").arg(&file).arg(BOOT_ID).status();
        assert!(status.is_ok_and(|status| status.success()), "{BOOT_ID} cannot be replaced");
    }
    assert_eq!(fs::read_to_string(BOOT_ID).unwrap(), format!("{id}\n"));
}

/// A command after a boot: its clocks start anew.
fn after_boot(inner: &Command) -> Command {
    let uptime = fs::read_to_string("/proc/uptime").unwrap();
    let seconds: u64 = uptime.split('.').next().and_then(|digits| digits.parse().ok()).unwrap();
    let mut outer = Command::new("unshare");
    outer.args(["--time", "--fork", "--kill-child"]);
    outer.args(["--boottime", "--monotonic"].map(|clock| format!("{clock}=-{}", seconds.saturating_sub(1))));
    outer.arg(inner.get_program()).args(inner.get_args()).current_dir(inner.get_current_dir().unwrap());
    set_variables(&mut outer, inner);
    outer
}

/// Writes the job's program, and the log of an unbroken run.
fn prepare_job(dir: &Path) {
    let program = dir.join("job.py");
    fs::write(&program, JOB).unwrap();
    let mut command = Command::new(python());
    // It may hurry: its program is there.
    let status = command.args(["-I", "-S"]).args([&program, &program]).current_dir(dir).status().unwrap();
    assert!(status.success(), "{status}");
}

impl Scene {
    /// Makes the disk, records a run on it, and returns what power losses leave of it.
    fn record(kind: FileSystem, dir: &Path) -> (Self, PowerLoss) {
        let (disk, top) = (dir.join("disk"), dir.join("mounted"));
        mount_tmpfs(&disk);
        fs::create_dir(&top).unwrap();
        prepare_job(dir);
        set_boot(&disk, "first");
        let [image, start, log] = ["image", "start", "log"].map(|name| disk.join(name));
        let ready = make_image(&image, IMAGE_BYTES).and_then(|()| kind.format(&image));
        ready.unwrap_or_else(|why| unavailable(&why));
        assert!(Command::new("cp").arg("--sparse=auto").args([&image, &start]).status().unwrap().success());
        let program = Path::new(env!("CARGO_BIN_EXE_recorded-disk"));
        let recorded = RecordedDisk::start(program, &image, &log).unwrap_or_else(|why| unavailable(&why));
        kind.mount_image(&image, &top).unwrap_or_else(|why| unavailable(&why));
        let sandbox = Sandbox::new_in(&top);
        let mut notes = Sandbox::new_in(dir);
        notes.store.clone_from(&sandbox.store);
        let mut scene = Self { kind, dir: dir.to_owned(), disk, top, sandbox, notes, promises: Vec::new() };
        rustix::fs::sync();
        scene.promise(&recorded, Some(0));
        scene.run(&recorded);
        unmount(&scene.top).unwrap();
        unmount(&image).unwrap();
        drop(recorded);
        let sector_bytes = if kind == FileSystem::Btrfs { 4096 } else { 512 };
        // The super block of ext4 takes two sectors and has a checksum: a mount fails if only one was written.
        let whole_bytes = if kind == FileSystem::Ext4 { 4096 } else { 0 };
        let loss =
            PowerLoss::new(Recording::read(&log).unwrap(), &start, sector_bytes).with_whole(whole_bytes);
        (scene, loss)
    }

    fn promise(&mut self, recorded: &RecordedDisk, snapshot: Option<u64>) {
        self.promises.push(Promise { position: recorded.position(), snapshot });
    }

    fn command(&self) -> Command {
        let mut command = self.sandbox.command(["--keep", "2", "--interval", "off", "--"]);
        command.arg(python()).args(["-I", "-S"]).arg(self.dir.join("job.py")).arg(self.dir.join("hurry"));
        command
    }

    /// Six snapshots, two kills, and the job's end.
    fn run(&mut self, recorded: &RecordedDisk) {
        for _ in 0..3 {
            let mut running = self.start();
            running.until_answering(&self.sandbox);
            for _ in 0..2 {
                self.until_it_moves(&mut running);
                let id = running.checkpoint(&self.sandbox);
                self.promise(recorded, Some(number(&id)));
            }
            self.until_it_moves(&mut running);
            running.kill_everything();
        }
        fs::write(self.dir.join("hurry"), "").unwrap();
        assert_eq!(self.start().wait(), 0);
        self.promise(recorded, None);
        self.check_result().unwrap();
        self.sandbox.verify_all();
    }

    fn start(&self) -> Running {
        self.notes.start_command("job", self.command())
    }

    fn until_it_moves(&self, running: &mut Running) {
        let before = self.sandbox.read("log").lines().count();
        running.until("a step of the job", || {
            let now = self.sandbox.read("log").lines().count();
            (now != before && now > 3).then_some(())
        });
    }

    fn check_result(&self) -> Result<(), String> {
        let unbroken = fs::read_to_string(self.dir.join("log")).unwrap();
        let state = format!("{}\n", unbroken.lines().last().unwrap()).repeat(1000);
        for (name, expected) in [("log", unbroken), ("state", state)] {
            if self.sandbox.read(name) != expected {
                return Err(format!("the file {name} differs from that of an unbroken run"));
            }
        }
        Ok(())
    }

    /// What must be true after so many flushes: the newest snapshot that is stored, and whether the job is complete.
    fn promised(&self, recording: &Recording, flushes: usize) -> (u64, bool) {
        let held =
            self.promises.iter().filter(|promise| recording.flushes_before(promise.position) <= flushes);
        held.fold((0, false), |(newest, complete), promise| match promise.snapshot {
            Some(number) => (newest.max(number), complete),
            None => (newest, true),
        })
    }

    /// Mounts the disk after a power loss, and checks the store on it.
    fn check(&self, loss: &mut PowerLoss, case: &Case, rng: &mut Rng) -> Result<(), String> {
        let image = self.disk.join("after");
        loss.image(case.flushes, case.left, rng, &image).map_err(|error| error.to_string())?;
        self.kind.mount_image(&image, &self.top)?;
        let (newest, is_complete) = self.promised(loss.recording(), case.flushes);
        let mut found = self.check_snapshots(newest);
        if case.resumes && found.is_ok() {
            set_boot(&self.disk, &format!("after-{}", case.flushes));
            found = self.check_resume(newest, is_complete);
        }
        unmount(&self.top)?;
        found
    }

    fn check_snapshots(&self, newest: u64) -> Result<(), String> {
        if newest == 0 && !self.sandbox.store.join("store.json").exists() {
            return Ok(());
        }
        let verified = said(&self.sandbox.call(["verify", "--all"]))?;
        // What the journal has kept can be read.
        said(&self.sandbox.call(["explain"]))?;
        let listed = self.sandbox.call(["ls", "--json"]);
        let rows: Vec<Value> = serde_json::from_slice(&listed.stdout).map_err(|_| text(&listed))?;
        let numbers = rows.iter().map(|row| number(row["id"].as_str().unwrap()));
        match numbers.max().unwrap_or(0) {
            found if found >= newest => Ok(()),
            found => Err(format!("snapshot {newest} was stored, {found} is the newest: {verified}")),
        }
    }

    /// Whether the job's record says that the job is complete.
    fn is_recorded_complete(&self) -> bool {
        let records =
            fs::read_dir(self.sandbox.job_dir().join("job")).unwrap().map(|entry| entry.unwrap().path());
        let number = |path: &PathBuf| path.file_stem()?.to_str()?.parse::<u64>().ok();
        let newest = records.filter(|path| number(path).is_some()).max_by_key(number).unwrap();
        let record: Value = serde_json::from_slice(&fs::read(newest).unwrap()).unwrap();
        record["body"]["outcome"]["state"].as_str().unwrap() == "complete"
    }

    /// Runs the job's command again.
    fn check_resume(&self, newest: u64, is_complete: bool) -> Result<(), String> {
        // The record may have reached the disk before its flush.
        let is_complete = is_complete || newest > 0 && self.is_recorded_complete();
        let said = said(&after_boot(&self.command()).output().unwrap())?;
        let resumed = said.split_once("resumed from snapshot ").map(|(_, id)| number(id));
        match resumed {
            Some(_) if is_complete => return Err(format!("a complete job was resumed: {said}")),
            Some(found) if found < newest => return Err(format!("resumed from before {newest}: {said}")),
            None if !is_complete && newest > 0 => return Err(format!("not resumed from {newest}: {said}")),
            _ => {}
        }
        self.check_result().map_err(|why| format!("{why}: {said}"))
    }
}

fn text(output: &Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    format!("{}: {out}{err}", output.status)
}

/// The output of a command that has to succeed.
fn said(output: &Output) -> Result<String, String> {
    if output.status.success() { Ok(text(output)) } else { Err(text(output)) }
}

/// A power loss.
#[derive(Debug)]
struct Case {
    /// After how many flushes.
    flushes: usize,
    left: Left,
    /// Whether the job is resumed then.
    resumes: bool,
}

/// The power losses of a run of the tests, in the order of the flushes.
fn cases(scene: &Scene, recording: &Recording, rng: &mut Rng) -> Vec<Case> {
    let mut at_promises: Vec<_> =
        scene.promises.iter().map(|promise| recording.flushes_before(promise.position)).collect();
    at_promises.dedup();
    let all: Vec<_> = (at_promises[0]..=recording.flushes()).collect();
    let mut cases: Vec<_> =
        at_promises.into_iter().map(|flushes| Case { flushes, left: Left::Nothing, resumes: true }).collect();
    let kind = |rng: &mut Rng| Left::KINDS[rng.usize(..Left::KINDS.len())];
    if std::env::var_os(FULL_VARIABLE).is_some() {
        for flushes in all {
            let resumes = flushes % FULL_RESUME_EVERY == 0;
            cases.push(Case { flushes, left: Left::Nothing, resumes: false });
            cases.push(Case { flushes, left: kind(rng), resumes });
        }
    } else {
        let chosen = rng.choose_multiple(all, LOSSES);
        cases.extend(chosen.into_iter().enumerate().map(|(number, flushes)| Case {
            flushes,
            left: kind(rng),
            resumes: number < RESUMES,
        }));
    }
    cases.sort_by_key(|case| case.flushes);
    cases
}

fn check_all(kind: FileSystem, dir: &Path) {
    let seed = std::env::var(SEED_VARIABLE).ok().and_then(|seed| seed.parse().ok());
    let is_full = std::env::var_os(FULL_VARIABLE).is_some();
    let new = || if is_full { UNIX_EPOCH.elapsed().unwrap().as_secs() } else { 1 };
    let mut rng = seeded_rng(seed.unwrap_or_else(new));
    let begun = Instant::now();
    let (scene, mut loss) = Scene::record(kind, dir);
    let cases = cases(&scene, loss.recording(), &mut rng);
    println!("{} flushes, {} power losses, {:?}", loss.recording().flushes(), cases.len(), begun.elapsed());
    let mut wrong = Vec::new();
    for case in &cases {
        if let Err(why) = scene.check(&mut loss, case, &mut rng) {
            wrong.push(format!("{case:?}: {why}"));
        }
    }
    let resumes = cases.iter().filter(|case| case.resumes).count();
    println!("{} power losses, {resumes} resumes, {:?}", cases.len(), begun.elapsed());
    assert!(wrong.is_empty(), "{} power losses:\n{}", wrong.len(), wrong.join("\n"));
}

fn on(kind: FileSystem, test: &str) {
    match inner_directory() {
        Some(dir) => check_all(kind, &dir),
        None => {
            let sandbox = Sandbox::new();
            if let Err(why) = in_namespaces(&format!("power_loss::{test}"), sandbox.path()) {
                ckpt_test_skip::skip(why);
            }
        }
    }
}

/// The same, with `cargo xtask test --full` only.
fn in_full_on(kind: FileSystem, test: &str) {
    if is_full_run_or_skip() {
        on(kind, test);
    }
}

#[test]
fn ext4_keeps_what_was_stored() {
    on(FileSystem::Ext4, "ext4_keeps_what_was_stored");
}

#[test]
fn xfs_keeps_what_was_stored() {
    in_full_on(FileSystem::Xfs, "xfs_keeps_what_was_stored");
}

#[test]
fn btrfs_keeps_what_was_stored() {
    in_full_on(FileSystem::Btrfs, "btrfs_keeps_what_was_stored");
}
