//! The server of NFS loses power while a job saves snapshots, and stops answering for a while.

use super::{
    KEEP, Mount, V3, V4, alone, boot_both, boot_client, boot_server, finish_job, make_disk, start_job,
    tool_or_skip, until_it_moves,
};
use crate::power_loss::{mount_tmpfs, number};
use ckpt_run_tests::file_systems::{FileSystem, in_namespaces, inner_directory, unavailable, unmount};
use ckpt_run_tests::power_loss::{Left, PowerLoss, RecordedDisk, Recording};
use ckpt_run_tests::virtual_machine::{Call, VirtualMachine, shared_directory};
use ckpt_run_tests::{Sandbox, seeded_rng};
use fastrand::Rng;
use rustix::process::Signal;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, UNIX_EPOCH};

/// How often the server loses power in a test.
const LOSSES: usize = 4;
/// At how many other flushes of the disk between two losses power could have been lost: the disk is then checked only.
const OTHERS: usize = 12;
/// The longest time between a snapshot and a loss.
const LONGEST: Duration = Duration::from_secs(6);
/// How long the server does not answer. A request of NFS is sent again after 60 s; locks expire after 10 s.
const SILENCES: [Duration; 3] = [Duration::from_secs(15), Duration::from_secs(80), Duration::from_secs(15)];
/// How long the job may pause: as long as for a snapshot on a slow machine.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// A seed, to repeat a test.
const SEED_VARIABLE: &str = "CKPT_TEST_POWER_LOSS_SEED";

fn random(rng: &mut Rng, longest: Duration) -> Duration {
    longest.mul_f64(rng.f64())
}

fn rng() -> Rng {
    let seed = std::env::var(SEED_VARIABLE).ok().and_then(|seed| seed.parse().ok());
    seeded_rng(seed.unwrap_or_else(|| UNIX_EPOCH.elapsed().unwrap().as_secs()))
}

/// In the client: saves snapshots of a job one after the other until it is told to finish, and reports each that is stored.
/// Returns the longest pause of the job.
fn save_until_told(mount: Mount, shared: &Path) -> Duration {
    let sandbox = mount.sandbox();
    let mut stored = File::create(shared.join("stored")).unwrap();
    let mut running = start_job(&sandbox);
    let is_over = AtomicBool::new(false);
    let (saved, pause) = std::thread::scope(|scope| {
        let watch = scope.spawn(|| longest_pause(&sandbox, &is_over));
        let over = Over(&is_over);
        let mut saved = Vec::new();
        while !shared.join("finish").exists() {
            until_it_moves(&mut running, &sandbox);
            let id = running.checkpoint(&sandbox);
            writeln!(stored, "{id}").unwrap();
            saved.push(number(&id));
        }
        drop(over);
        (saved, watch.join().unwrap())
    });
    check_snapshots(&saved, &sandbox).unwrap();
    finish_job(running, &sandbox);
    println!("{} snapshots were stored; the job's longest pause was {pause:?}", saved.len());
    pause
}

/// Sets the flag when it is dropped, also if a test fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The longest time in which the job's log did not grow.
fn longest_pause(sandbox: &Sandbox, is_over: &AtomicBool) -> Duration {
    let (mut longest, mut since, mut bytes) = (Duration::ZERO, Instant::now(), 0);
    while !is_over.load(Ordering::Relaxed) {
        let now = fs::metadata(sandbox.path().join("log")).map_or(0, |log| log.len());
        if now != bytes {
            (since, bytes) = (Instant::now(), now);
        }
        longest = longest.max(since.elapsed());
        std::thread::sleep(Duration::from_millis(20));
    }
    longest
}

/// Whether all snapshots that were reported as stored are there and sound, apart from those that newer ones have replaced.
fn check_snapshots(reported: &[u64], sandbox: &Sandbox) -> Result<(), String> {
    if reported.is_empty() && !sandbox.store.join("store.json").exists() {
        return Ok(());
    }
    for arguments in [&["verify", "--all"][..], &["verify", "--scrub"]] {
        let output = sandbox.call(arguments);
        let [out, err] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
        if !output.status.success() {
            return Err(format!("{arguments:?}: {}: {out}{err}", output.status));
        }
    }
    let listed: Vec<_> = sandbox.snapshots().iter().map(|id| number(id)).collect();
    let is_lost = |id: &&u64| !listed.contains(id) && listed.iter().filter(|other| other > id).count() < KEEP;
    match reported.iter().find(is_lost) {
        Some(id) => Err(format!("snapshot {id} was reported as stored; there are {listed:?}")),
        None => Ok(()),
    }
}

/// Numbers of the snapshots that the client has reported so far.
fn reported(client: &VirtualMachine) -> Vec<u64> {
    let text = fs::read_to_string(client.shared().join("stored")).unwrap_or_default();
    // The last line may be incomplete.
    let complete = text.rsplit_once('\n').map_or("", |(lines, _)| lines);
    complete.lines().map(number).collect()
}

/// The server's disk.
struct Disk {
    /// It is served from here.
    image: PathBuf,
    /// Its content at the server's boot.
    start: PathBuf,
    log: PathBuf,
    /// After a power loss.
    after: PathBuf,
    /// Where it is mounted then.
    top: PathBuf,
    /// With the store on the mounted disk.
    sandbox: Sandbox,
}

/// How many snapshots had been reported at a position in the log.
struct Promise {
    position: u64,
    snapshots: usize,
}

impl Disk {
    fn new(dir: &Path, mount: Mount) -> Self {
        let (disk, top) = (dir.join("disk"), dir.join("mounted"));
        mount_tmpfs(&disk);
        fs::create_dir(&top).unwrap();
        let [image, start, log, after] = ["image", "start", "log", "after"].map(|name| disk.join(name));
        make_disk(&image);
        let mut sandbox = Sandbox::new_in(dir);
        sandbox.store = top.join(format!("export/store-{}", mount.name));
        Self { image, start, log, after, top, sandbox }
    }

    /// Records what is written from now on.
    fn record(&self) -> RecordedDisk {
        copy(&self.image, &self.start);
        let _ = fs::remove_file(&self.log);
        let program = Path::new(env!("CARGO_BIN_EXE_recorded-disk"));
        RecordedDisk::start(program, &self.image, &self.log).unwrap_or_else(|why| unavailable(&why))
    }

    /// Checks the store after power losses at some flushes, and after one at the end of the recording, which the disk is
    /// left in. Returns how many flushes there were.
    fn lose_power(&self, promises: &[Promise], reported: &[u64], rng: &mut Rng) -> usize {
        let recording = Recording::read(&self.log).unwrap();
        let all = recording.flushes();
        let first = recording.flushes_before(promises.first().map_or(0, |promise| promise.position));
        let mut flushes = rng.choose_multiple(first..all, OTHERS);
        flushes.sort_unstable();
        flushes.push(all);
        let mut loss = PowerLoss::new(recording, &self.start, 512);
        for flush in flushes {
            let left = Left::KINDS[rng.usize(..Left::KINDS.len())];
            loss.image(flush, left, rng, &self.after).unwrap();
            if flush == all {
                copy(&self.after, &self.image);
            }
            let is_before = |promise: &&Promise| loss.recording().flushes_before(promise.position) <= flush;
            let held = promises.iter().filter(is_before).map(|promise| promise.snapshots).max().unwrap_or(0);
            FileSystem::Ext4.mount_image(&self.after, &self.top).unwrap();
            let found = check_snapshots(&reported[..held], &self.sandbox);
            unmount(&self.top).unwrap();
            found.unwrap_or_else(|why| panic!("after flush {flush} of {all}, {left:?}: {why}"));
        }
        all
    }
}

fn copy(from: &Path, to: &Path) {
    assert!(Command::new("cp").arg("--sparse=auto").args([from, to]).status().unwrap().success());
}

/// Lets the client save until a moment after another snapshot. Returns what was promised when.
fn until_a_moment(
    client: &VirtualMachine,
    test: &Call<'_>,
    recorded: &RecordedDisk,
    rng: &mut Rng,
) -> Vec<Promise> {
    let before = reported(client).len();
    let mut promises = vec![Promise { position: 0, snapshots: before }];
    let mut end = None;
    test.until("a moment for a power loss", || {
        let now = reported(client).len();
        if now > promises[promises.len() - 1].snapshots {
            promises.push(Promise { position: recorded.position(), snapshots: now });
            end.get_or_insert_with(|| Instant::now() + random(rng, LONGEST));
        }
        end.filter(|end| *end <= Instant::now()).map(|_| ())
    });
    promises
}

/// In namespaces: the server loses power, and is booted again with what the disk has kept.
fn lose_power(mount: Mount, test: &str, tool: &Path, dir: &Path) {
    let mut rng = rng();
    let disk = Disk::new(dir, mount);
    let mut recorded = disk.record();
    let mut server = boot_server(tool, dir, &disk.image);
    let client = boot_client(tool, dir);
    let test = client.start_test(&format!("nfs::outages::{test}"));
    let mut flushes = 0;
    for round in 0..LOSSES {
        let promises = until_a_moment(&client, &test, &recorded, &mut rng);
        drop(server);
        let reported = reported(&client);
        unmount(&disk.image).unwrap();
        drop(recorded);
        let all = disk.lose_power(&promises, &reported, &mut rng);
        println!("power loss {round}: {all} flushes of the disk, {} snapshots so far", reported.len());
        flushes += all;
        recorded = disk.record();
        server = boot_server(tool, dir, &disk.image);
    }
    let _ = until_a_moment(&client, &test, &recorded, &mut rng);
    fs::write(client.shared().join("finish"), "").unwrap();
    println!("{}", test.ok());
    println!("{LOSSES} power losses of the server, {flushes} flushes, the disk at {OTHERS} of them each");
}

fn on_a_server_that_loses_power(mount: Mount, test: &str) {
    if let Some(shared) = shared_directory() {
        save_until_told(mount, &shared);
        return;
    }
    let Some(tool) = tool_or_skip() else { return };
    if let Some(dir) = inner_directory() {
        lose_power(mount, test, &tool, &dir);
        return;
    }
    let _alone = alone();
    let sandbox = Sandbox::new();
    if let Err(why) = in_namespaces(&format!("nfs::outages::{test}"), sandbox.path()) {
        ckpt_test_skip::skip(why);
    }
}

#[test]
fn a_server_of_nfs_4_keeps_what_was_stored() {
    on_a_server_that_loses_power(V4, "a_server_of_nfs_4_keeps_what_was_stored");
}

#[test]
fn a_server_of_nfs_3_keeps_what_was_stored() {
    on_a_server_that_loses_power(V3, "a_server_of_nfs_3_keeps_what_was_stored");
}

/// The job goes on meanwhile, and so do its snapshots afterwards.
#[test]
fn a_job_outlasts_a_silent_server() {
    if let Some(shared) = shared_directory() {
        let pause = save_until_told(V4, &shared);
        assert!(pause < LONGEST_PAUSE, "{pause:?}");
        return;
    }
    let Some(tool) = tool_or_skip() else { return };
    let _alone = alone();
    let mut rng = rng();
    let sandbox = Sandbox::new();
    let (server, client) = boot_both(&tool, sandbox.path());
    let test = client.start_test("nfs::outages::a_job_outlasts_a_silent_server");
    for silence in SILENCES {
        let before = reported(&client).len();
        test.until("a snapshot", || (reported(&client).len() > before).then_some(()));
        std::thread::sleep(random(&mut rng, LONGEST));
        server.signal(Signal::STOP);
        let stopped = reported(&client).len();
        std::thread::sleep(silence);
        let meanwhile = reported(&client).len() - stopped;
        server.signal(Signal::CONT);
        println!("silent for {silence:?}: {stopped} snapshots before, {meanwhile} meanwhile");
        assert!(meanwhile <= 1, "{meanwhile} snapshots were stored on a server that does not answer");
    }
    let before = reported(&client).len();
    test.until("a snapshot", || (reported(&client).len() > before).then_some(()));
    fs::write(client.shared().join("finish"), "").unwrap();
    println!("{}", test.ok());
}
