//! A job of two ranks that is saved and killed repeatedly, at random moments: its result is that of an unbroken run,
//! and no resource grows. `cargo xtask soak` runs the same for longer.
//!
//! It has namespaces of its own, so that it counts its own resources only: processes, mounts, `/dev/shm`,
//! `/run/ckpt-run`.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ckpt_run_tests::processes::{descendants, has_ended};
use ckpt_run_tests::{Running, Sandbox, WAIT_TIMEOUT, seeded_rng, torchrun_with_two_ranks, train_script};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

const TEST: &str = "soak::kills_change_no_result_and_nothing_grows";
/// Set in the namespaces.
const WITHIN: &str = "CKPT_TEST_SOAK_WITHIN";
const KEEP: usize = 3;
/// Longer than the training may take from its last snapshot to its end.
const END_LIMIT: Duration = Duration::from_secs(900);
/// A slow training does so many steps for each checkpoint at most, with half a second between two of them, on whatever
/// machine.
const STEPS_PER_CHECKPOINT: u64 = 20;

/// How long to soak: as `cargo xtask soak` says in the environment, otherwise a tenth of that within a time limit.
struct Plan {
    checkpoints: u64,
    kills: u64,
    seed: u64,
    limit: Option<Duration>,
}

/// Time limit for checkpoints and kills in an ordinary test run. The rest takes half a minute more.
const LIMIT: Duration = Duration::from_secs(60);

impl Plan {
    fn from_env() -> Self {
        let number = |name: &str, default: u64| {
            std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name}")))
        };
        Self {
            checkpoints: number("CKPT_TEST_SOAK_CHECKPOINTS", 50),
            kills: number("CKPT_TEST_SOAK_KILLS", 10),
            seed: number("CKPT_TEST_SOAK_SEED", 1),
            limit: std::env::var_os("CKPT_TEST_SOAK_CHECKPOINTS").is_none().then_some(LIMIT),
        }
    }

    fn steps(&self) -> String {
        let steps = self.limit.map_or(self.checkpoints * STEPS_PER_CHECKPOINT, |limit| limit.as_secs() * 10);
        steps.to_string()
    }
}

/// Sleeps for a random time below `most_ms`.
fn sleep_randomly(random: &mut fastrand::Rng, most_ms: u64) {
    std::thread::sleep(Duration::from_millis(random.u64(..most_ms)));
}

/// Resources of the launcher, of the job and of the machine that could grow.
#[derive(Clone, Debug)]
struct Numbers {
    launcher_anon_kib: u64,
    launcher_descriptors: u64,
    launcher_threads: u64,
    processes: u64,
    mounts: u64,
    shm_entries: u64,
    runtime_entries: u64,
    snapshots: u64,
    /// Of packs and manifests: what retention is about.
    store_bytes: u64,
    store_files: u64,
    attempts: u64,
}

/// Normal variation of the allocator: some buffers of 4 MiB.
const ANON_SLACK_KIB: u64 = 12 << 10;
/// A pack is rewritten only when enough of it is unused: until then the unused part takes space.
const STORE_FACTOR: u64 = 2;
/// Snapshots that stay in case that the job is about to fail: one that is a minute old, the one that will be that next, and
/// the newest that is not doubtful.
const BEFORE_FAILURES: usize = 3;
/// Small packs that a short warm-up does not create.
const FEW_FILES: u64 = 16;

impl Numbers {
    fn take(sandbox: &Sandbox, job: &Running) -> Self {
        let launcher = format!("/proc/{}", job.pid());
        let count = |dir: String| fs::read_dir(dir).map_or(0, |entries| entries.count() as u64);
        let status = fs::read_to_string(format!("{launcher}/status")).unwrap_or_default();
        let anon = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("RssAnon");
        let dir = sandbox.job_dir();
        let (packs, manifests) = (files(&dir.join("packs")), files(&dir.join("manifests")));
        Self {
            launcher_anon_kib: anon.trim().trim_end_matches(" kB").parse().expect("a number"),
            launcher_descriptors: count(format!("{launcher}/fd")),
            launcher_threads: count(format!("{launcher}/task")),
            processes: processes(),
            mounts: fs::read_to_string(format!("{launcher}/mountinfo")).unwrap_or_default().lines().count()
                as u64,
            shm_entries: count("/dev/shm".into()),
            runtime_entries: count("/run/ckpt-run".into()),
            snapshots: sandbox.snapshots().len() as u64,
            store_bytes: packs.1 + manifests.1,
            store_files: packs.0 + manifests.0,
            attempts: count(dir.join("attempts").to_string_lossy().into_owned()),
        }
    }

    /// Whether nothing has grown since `then`.
    fn has_not_grown(&self, then: &Self) -> bool {
        self.launcher_anon_kib <= then.launcher_anon_kib + ANON_SLACK_KIB
            && self.launcher_descriptors <= then.launcher_descriptors
            && self.launcher_threads <= then.launcher_threads
            && self.processes <= then.processes
            && self.mounts <= then.mounts
            && self.shm_entries <= then.shm_entries
            && self.runtime_entries <= then.runtime_entries
            && self.snapshots <= (KEEP + BEFORE_FAILURES) as u64
            && self.store_bytes <= then.store_bytes * STORE_FACTOR
            && self.store_files <= then.store_files * STORE_FACTOR + FEW_FILES
            // ckpt-run keeps that many logs of what has failed.
            && self.attempts <= 10
    }

    fn json(&self) -> Value {
        json!({
            "launcher_anon_kib": self.launcher_anon_kib,
            "launcher_descriptors": self.launcher_descriptors,
            "launcher_threads": self.launcher_threads,
            "processes": self.processes,
            "mounts": self.mounts,
            "shm_entries": self.shm_entries,
            "runtime_entries": self.runtime_entries,
            "snapshots": self.snapshots,
            "store_bytes": self.store_bytes,
            "store_files": self.store_files,
            "attempts": self.attempts,
        })
    }
}

/// How many files there are in a directory, and their bytes.
fn files(dir: &Path) -> (u64, u64) {
    let sizes = fs::read_dir(dir).into_iter().flatten().flatten().filter_map(|entry| entry.metadata().ok());
    sizes.fold((0, 0), |(files, bytes), file| (files + 1, bytes + file.len()))
}

/// Processes that are alive, in this PID namespace and below.
fn processes() -> u64 {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| !has_ended(*pid)).count() as u64
}

/// The job, and what was done to it.
struct Soak {
    plan: Plan,
    random: fastrand::Rng,
    sandbox: Sandbox,
    argv: Vec<std::ffi::OsString>,
    job: Running,
    checkpoints: u64,
    /// Of a rank, and of the launcher with or without everything below it.
    rank_kills: u64,
    launcher_kills: u64,
    begun: Instant,
}

impl Soak {
    fn begin(plan: Plan) -> Self {
        let sandbox = Sandbox::new();
        fs::write(sandbox.path().join("slow"), "").unwrap();
        let mut argv = torchrun_with_two_ranks();
        argv.extend(["--monitor_interval", "0.1"].map(Into::into));
        argv.push(train_script().into());
        let steps = plan.steps();
        let options = ["--steps", &steps, "--step-ms", "500", "--slow-while", "slow", "--log", "losses.txt"];
        argv.extend(options.map(Into::into));
        let job = Self::start(&sandbox, &argv);
        let random = seeded_rng(plan.seed);
        let (checkpoints, rank_kills, launcher_kills, begun) = (0, 0, 0, Instant::now());
        let mut soak =
            Self { plan, random, sandbox, argv, job, checkpoints, rank_kills, launcher_kills, begun };
        soak.job.until_answering(&soak.sandbox);
        // A start from the beginning would find the log of this one.
        soak.trains();
        soak.checkpoint();
        soak
    }

    fn start(sandbox: &Sandbox, argv: &[std::ffi::OsString]) -> Running {
        let options = ["--network", "private", "--log-file", "messages", "--keep"].map(Into::into);
        let options = options.into_iter().chain([KEEP.to_string().into(), "--".into()]);
        let mut command = sandbox.command(options.chain(argv.iter().cloned()));
        // With one heap instead of eight per core, a leak shows sooner: each heap keeps up to 4 MiB of freed memory.
        command.env("CKPT_MAX_RESTARTS", "32767").env("MALLOC_ARENA_MAX", "1");
        sandbox.start_command("job", command)
    }

    /// Waits until both ranks make progress. A snapshot may contain a dead rank; then it takes several restarts.
    fn trains(&mut self) {
        let Self { sandbox, job, .. } = self;
        let launcher = job.pid();
        // The restarts and the steps when both ranks were seen first.
        let mut since = None;
        job.until("both ranks get on", || {
            std::thread::sleep(Duration::from_millis(50));
            let restarts =
                restarts(sandbox).filter(|_| (0..2).all(|number| rank(launcher, number).is_some()));
            let lines = sandbox.read("losses.txt").lines().count();
            since = since.filter(|(then, _)| restarts == Some(*then)).or(restarts.map(|now| (now, lines)));
            since.filter(|(_, then)| lines >= then + 2).map(drop)
        });
    }

    /// Takes a snapshot at a random moment.
    fn checkpoint(&mut self) {
        sleep_randomly(&mut self.random, 100);
        let Self { sandbox, job, .. } = self;
        job.until("a snapshot", || sandbox.call(["checkpoint"]).status.success().then_some(()));
        self.checkpoints += 1;
    }

    /// A checkpoint that is under way while something else happens; `None` every other time.
    fn perhaps_under_way(&mut self) -> Option<Child> {
        let mut command = self.sandbox.command(["checkpoint"]);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        self.random.bool().then(|| command.spawn().expect("ckpt-run runs"))
    }

    /// Kills one rank at a random moment; the launcher restarts the job.
    fn kill_rank(&mut self) {
        let under_way = self.perhaps_under_way();
        sleep_randomly(&mut self.random, 1000);
        let number = self.random.u64(..2);
        let Self { sandbox, job, .. } = self;
        let launcher = job.pid();
        let before = job.until("a status", || restarts(sandbox));
        let pid = job.until("a rank", || rank(launcher, number));
        kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
        job.until("a restart", || restarts(sandbox).filter(|restarts| *restarts > before));
        if let Some(mut checkpoint) = under_way {
            checkpoint.wait().unwrap();
        }
        self.trains();
        self.rank_kills += 1;
    }

    /// Kills the launcher at a random moment, alone or with all its descendants; then the same command resumes the job.
    fn kill_launcher(&mut self) {
        let under_way = self.perhaps_under_way();
        sleep_randomly(&mut self.random, 1000);
        if self.random.bool() {
            self.job.kill_launcher();
        } else {
            self.job.kill_everything();
        }
        if let Some(mut checkpoint) = under_way {
            checkpoint.wait().unwrap();
        }
        self.job = Self::start(&self.sandbox, &self.argv);
        self.job.until_answering(&self.sandbox);
        self.trains();
        self.launcher_kills += 1;
    }

    /// Rounds of a kill and checkpoints after it: so many, or as many as there is time for, up to this part of it.
    fn rounds(&mut self, kills: u64, kill: fn(&mut Self), part: f64) {
        let limit = self.plan.limit.map(|limit| limit.mul_f64(part));
        let is_late = |soak: &Self| limit.is_some_and(|limit| soak.begun.elapsed() > limit);
        for round in 0..kills {
            if round > 0 && is_late(self) {
                break;
            }
            kill(self);
            let done = self.rank_kills + self.launcher_kills;
            for since_kill in 1.. {
                self.checkpoint();
                let is_enough = self.checkpoints >= self.plan.checkpoints * done / self.plan.kills;
                // After so many snapshots those that a resume has skipped are deleted, too.
                if since_kill > KEEP && (is_enough || is_late(self)) {
                    break;
                }
            }
            let Self { checkpoints, rank_kills, launcher_kills, .. } = self;
            println!(
                "{checkpoints} checkpoints, {rank_kills} kills of a rank, {launcher_kills} of the launcher"
            );
        }
    }

    fn numbers(&self) -> Numbers {
        Numbers::take(&self.sandbox, &self.job)
    }

    /// Waits until no resource is larger than before. A request that has just ended may hold a thread and a descriptor
    /// for a moment.
    fn has_not_grown_since(&self, then: &Numbers) -> Numbers {
        let deadline = Instant::now() + WAIT_TIMEOUT / 4;
        loop {
            let now = self.numbers();
            if now.has_not_grown(then) {
                return now;
            }
            assert!(Instant::now() < deadline, "it has grown\nfrom {}\nto   {}", then.json(), now.json());
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// The smallest of several samples.
    fn settled(&self) -> Numbers {
        let samples = (0..10).map(|_| {
            std::thread::sleep(Duration::from_millis(50));
            self.numbers()
        });
        samples.min_by_key(|now| (now.processes, now.launcher_threads, now.launcher_descriptors)).unwrap()
    }

    /// At full speed to the end; returns what it has computed.
    fn end(&mut self) -> String {
        fs::remove_file(self.sandbox.path().join("slow")).unwrap();
        let deadline = Instant::now() + END_LIMIT;
        while !self.job.has_ended() {
            assert!(Instant::now() < deadline, "the training does not end\n{}", self.job.said());
            std::thread::sleep(Duration::from_millis(50));
        }
        assert_eq!(self.job.wait(), 0, "{}", self.job.said());
        self.sandbox.verify_all();
        self.sandbox.read("losses.txt")
    }
}

/// How often the running job has been restarted; `None` while it is not running.
fn restarts(sandbox: &Sandbox) -> Option<u64> {
    let status = sandbox.call(["status", "--json"]).stdout;
    let status: Value = serde_json::from_slice(&status).unwrap_or_default();
    status[0]["restarts"].as_u64().filter(|_| status[0]["restart_s"].is_null())
}

/// The process of a rank, if it is alive.
fn rank(launcher: u32, number: u64) -> Option<i32> {
    let variable = format!("LOCAL_RANK={number}").into_bytes();
    // One that has ended has none.
    let environment = |pid: &i32| fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let is_rank = |pid: &i32| environment(pid).split(|&byte| byte == 0).any(|one| one == variable);
    descendants(launcher.cast_signed()).into_iter().find(is_rank)
}

impl Drop for Soak {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("{}", self.sandbox.read("messages"));
        }
    }
}

/// The losses of an unbroken run.
fn unbroken(argv: &[std::ffi::OsString]) -> String {
    let sandbox = Sandbox::new();
    let mut command = Command::new(&argv[0]);
    command.args(&argv[1..]).env("OMP_NUM_THREADS", "1").current_dir(sandbox.path());
    assert!(command.stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap().success());
    sandbox.read("losses.txt")
}

#[test]
fn kills_change_no_result_and_nothing_grows() {
    if std::env::var_os(WITHIN).is_none() {
        return in_namespaces();
    }
    let plan = Plan::from_env();
    println!("{} checkpoints, {} kills, seed {}", plan.checkpoints, plan.kills, plan.seed);
    let (begun, seed, steps, kills) = (Instant::now(), plan.seed, plan.steps(), plan.kills);
    let mut soak = Soak::begin(plan);
    // A fifth of the kills to warm up, then most kills under the same launcher, then kills of the launcher.
    soak.rounds(kills / 5, Soak::kill_rank, 0.3);
    let warm = soak.settled();
    soak.rounds(kills - 2 * (kills / 5), Soak::kill_rank, 0.8);
    let same_launcher = soak.has_not_grown_since(&warm);
    soak.rounds(kills / 5, Soak::kill_launcher, 1.0);
    let end = soak.has_not_grown_since(&warm);
    let (kept_entries, _) = files(&soak.sandbox.job_dir().join("kept"));
    let (checkpoints, argv) = (soak.checkpoints, soak.argv.clone());
    let (rank_kills, launcher_kills) = (soak.rank_kills, soak.launcher_kills);
    let soaked_s = begun.elapsed().as_secs_f64();
    let output = soak.end();
    let lines = output.lines().count();
    assert_eq!(lines.to_string(), steps);
    assert!(output == unbroken(&argv), "the losses are not those of an unbroken run");
    let told = json!({
        "seed": seed,
        "checkpoints": checkpoints,
        "rank_kills": rank_kills,
        "launcher_kills": launcher_kills,
        "steps": lines,
        "soaked_s": soaked_s.round(),
        "total_s": begun.elapsed().as_secs_f64().round(),
        "warm": warm.json(),
        "same_launcher": same_launcher.json(),
        "end": end.json(),
        "kept_tails": kept_entries,
    });
    println!("{told}");
}

/// Runs this test in namespaces of its own, and passes its output on.
fn in_namespaces() {
    let script = "mount -t tmpfs tmpfs /dev/shm && mkdir -p /run/ckpt-run \
                  && mount -t tmpfs -o mode=700 tmpfs /run/ckpt-run && \"$@\" 2>&1; exit $?";
    let mut outer = Command::new("unshare");
    outer.args(["--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"]);
    outer.args(["sh", "-c", script, "sh"]).arg(std::env::current_exe().unwrap());
    outer.args([TEST, "--exact", "--nocapture"]).env(WITHIN, "1").stdout(Stdio::piped());
    let mut child = outer.spawn().expect("unshare");
    for line in BufReader::new(child.stdout.take().unwrap()).lines() {
        println!("{}", line.unwrap());
    }
    assert!(child.wait().unwrap().success());
}
