//! `ckpt-run report` of a real job with injected faults: the job and the test note every moment themselves, and the
//! classes of the report are compared with that. Also what snapshots cost, against what the job has in memory and changes.

mod browser;

use crate::supervisor::{touch, until_ready};
use ckpt_run_tests::{Running, Sandbox, processes, python, schema, until};
use ckpt_test_skip::is_full_run_or_skip;
use rustix::process::Signal;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

/// Works, and notes each step and its time. Notes are names of links: a file that is open at a checkpoint would be cut.
const JOB: &str = r#"
import os, time
os.mkdir("notes")
open("ready", "w").close()
step = 0
while not os.path.exists("go"):
    begin = time.monotonic()
    while time.monotonic() - begin < 0.004: pass
    time.sleep(0.006)
    step += 1
    now = time.time_ns()
    os.symlink(f"{step} {now // 1000000}", f"notes/{now}")
    if os.path.exists("hang"):
        os.unlink("hang")
        while True: time.sleep(3600)
    if os.path.exists("fail"):
        os.unlink("fail")
        os._exit(3)
"#;

/// Each is injected once in a round.
const ROUNDS: usize = 4;
/// How many steps of about 10 ms the job makes before and after each checkpoint.
const STEPS: usize = 100;
/// Times without the job that follow each other count as one: only the launcher knows when a wait is over, and when it
/// has begun itself.
const GONE: &str = "away, waiting, restart";

/// How a session ends, and what the test has seen of that: milliseconds since 1970 UTC.
enum End {
    /// The job failed.
    Failed,
    /// The job hung, and was ended at this time.
    Hung { ended_ms: u64 },
    /// The launcher was killed, and another one started.
    Killed { started_ms: u64 },
    /// The launcher was asked to end the job, and another one was started.
    Preempted { ended_ms: u64, started_ms: u64 },
    /// The job is complete.
    Complete,
}

/// A step of the job, and when it was done.
#[derive(Clone, Copy)]
struct Step {
    number: u64,
    at_ms: u64,
}

struct Story {
    sandbox: Sandbox,
    job: Option<Running>,
    /// When the first launcher was started.
    begun_ms: u64,
    ends: Vec<End>,
    /// When checkpoints were asked for, and reported.
    checkpoints: Vec<(u64, u64)>,
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis().try_into().unwrap()
}

fn launch(sandbox: &Sandbox) -> Running {
    let python = python();
    let options =
        ["--files", "off", "--interval", "off", "--hang-timeout", "15s", "--monitor-interval", "100ms"];
    let command = ["--", python.to_str().unwrap(), "-c", JOB];
    let mut command = sandbox.command(options.iter().chain(&command));
    command.env("CKPT_MAX_RESTARTS", "1000");
    sandbox.start_command("job", command)
}

impl Story {
    fn begin() -> Self {
        let sandbox = Sandbox::new();
        let begun_ms = now_ms();
        let mut job = launch(&sandbox);
        until_ready(&mut job, &sandbox);
        Self { sandbox, job: Some(job), begun_ms, ends: Vec::new(), checkpoints: Vec::new() }
    }

    fn job(&mut self) -> &mut Running {
        self.job.as_mut().unwrap()
    }

    fn count(&self) -> usize {
        fs::read_dir(self.sandbox.path().join("notes")).unwrap().count()
    }

    fn work(&self) {
        let wanted = self.count() + STEPS;
        until("some steps", || (self.count() >= wanted).then_some(()));
    }

    /// Works, with a checkpoint in the middle.
    fn work_and_save(&mut self) {
        self.work();
        let begun_ms = now_ms();
        self.job.as_ref().unwrap().checkpoint(&self.sandbox);
        self.checkpoints.push((begun_ms, now_ms()));
        self.work();
    }

    fn relaunch(&mut self) -> u64 {
        // Away for a while.
        std::thread::sleep(std::time::Duration::from_millis(1500));
        let started_ms = now_ms();
        self.job = Some(launch(&self.sandbox));
        started_ms
    }

    fn fail(&mut self) {
        self.work_and_save();
        touch(&self.sandbox, "fail");
        self.ends.push(End::Failed);
        let gone = self.sandbox.path().join("fail");
        self.job().until("the failure", || (!gone.exists()).then_some(()));
    }

    fn hang(&mut self) {
        self.work_and_save();
        let is_python = |pid: &i32| {
            fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.starts_with("python"))
        };
        let pid = self.job().descendants().into_iter().find(is_python).unwrap();
        touch(&self.sandbox, "hang");
        until("the end of the hung job", || processes::has_ended(pid).then_some(()));
        self.ends.push(End::Hung { ended_ms: now_ms() });
    }

    fn kill(&mut self) {
        self.work_and_save();
        self.job().kill_everything();
        let started_ms = self.relaunch();
        self.ends.push(End::Killed { started_ms });
    }

    fn preempt(&mut self) {
        self.work_and_save();
        self.job().signal(Signal::TERM);
        assert_eq!(self.job().wait(), 75, "{}", self.job().said());
        let ended_ms = now_ms();
        let started_ms = self.relaunch();
        self.ends.push(End::Preempted { ended_ms, started_ms });
    }

    fn complete(&mut self) {
        self.work();
        touch(&self.sandbox, "go");
        assert_eq!(self.job().wait(), 0, "{}", self.job().said());
        self.ends.push(End::Complete);
    }

    /// The steps of each session.
    fn sessions(&self) -> Vec<Vec<Step>> {
        let read = |entry: fs::DirEntry| {
            let text = fs::read_link(entry.path()).unwrap();
            let (number, at_ms) = text.to_str().unwrap().split_once(' ').unwrap();
            Step { number: number.parse().unwrap(), at_ms: at_ms.parse().unwrap() }
        };
        let notes = fs::read_dir(self.sandbox.path().join("notes")).unwrap();
        let mut steps: Vec<_> = notes.map(|entry| read(entry.unwrap())).collect();
        steps.sort_by_key(|step| step.at_ms);
        let mut sessions = vec![Vec::new()];
        for step in steps {
            let open = sessions.len() - 1;
            let is_later = sessions[open].last().is_some_and(|last: &Step| match self.ends[open] {
                End::Preempted { started_ms, .. } => step.at_ms > started_ms,
                // It goes back to the snapshot.
                _ => step.number <= last.number,
            });
            if is_later {
                sessions.push(Vec::new());
            }
            sessions.last_mut().unwrap().push(step);
        }
        assert_eq!(sessions.len(), self.ends.len());
        sessions
    }

    /// The time of each class in milliseconds.
    fn truth(&self) -> BTreeMap<&'static str, u64> {
        let sessions = self.sessions();
        let mut truth: BTreeMap<&'static str, u64> = BTreeMap::new();
        let mut add = |class, ms: u64| *truth.entry(class).or_default() += ms;
        let (mut before, mut started_ms): (&[Step], u64) = (&[], self.begun_ms);
        for (session, end) in sessions.iter().zip(&self.ends) {
            let (first, last) = (session[0], session[session.len() - 1]);
            add(GONE, first.at_ms - started_ms);
            let work = last.at_ms - first.at_ms;
            let pauses: u64 = self.checkpoints.iter().filter_map(|during| pause_ms(session, *during)).sum();
            // As long as it took the first time: the same steps may take another time under load.
            let lost = before.iter().find(|step| step.number == first.number);
            let redone =
                lost.map_or(0, |step| before[before.len() - 1].at_ms - step.at_ms).min(work - pauses);
            add("stall", pauses);
            add("redone", redone);
            add("productive", work - redone - pauses);
            before = session;
            started_ms = match *end {
                End::Failed | End::Complete => last.at_ms,
                End::Hung { ended_ms } => {
                    add("hang", ended_ms - last.at_ms);
                    ended_ms
                }
                End::Killed { started_ms } => {
                    add(GONE, started_ms - last.at_ms);
                    started_ms
                }
                End::Preempted { ended_ms, started_ms } => {
                    add("stall", ended_ms - last.at_ms);
                    add(GONE, started_ms - ended_ms);
                    started_ms
                }
            };
        }
        truth
    }
}

/// How long the job made no step during a checkpoint, if that was in this session.
fn pause_ms(session: &[Step], (begun_ms, ended_ms): (u64, u64)) -> Option<u64> {
    let within = |pair: &&[Step]| pair[1].at_ms > begun_ms && pair[0].at_ms < ended_ms;
    session.windows(2).filter(within).map(|pair| pair[1].at_ms - pair[0].at_ms).max()
}

/// Each class is within half a percent of the whole time, or a second: starts and ends are seen that late on a busy machine.
/// A machine that stops for seconds would break that, so this is not in an ordinary run.
#[test]
fn the_report_agrees_with_what_the_job_has_noted() {
    if !is_full_run_or_skip() {
        return;
    }
    let mut story = Story::begin();
    for _ in 0..ROUNDS {
        story.fail();
        story.kill();
        story.preempt();
        story.hang();
    }
    story.complete();
    let report = story.sandbox.json(["report", "--json"]);
    let time = |class: &str| report["time_ms"][class].as_u64().unwrap_or_default();
    let whole = report["whole_ms"].as_u64().unwrap();
    let allowed = (whole / 200).max(1000);
    for (class, truth) in story.truth() {
        let told = if class == GONE { time("restart") + time("waiting") + time("away") } else { time(class) };
        println!("{class}: {told} ms, in truth {truth} ms of {whole} ms");
        assert!(told.abs_diff(truth) <= allowed, "{class}: {told} ms, in truth {truth} ms: {report:#}");
    }
    let endings: Vec<_> = report["sessions"].as_array().unwrap().iter().map(|one| &one["ending"]).collect();
    // Twice in each round, for 1.5 s. When a killed job ended is known to within a quarter of a second.
    assert!(time("away") >= 2700 * u64::try_from(ROUNDS).unwrap(), "{report:#}");
    assert_eq!(endings[..4], ["failed", "killed", "ended", "hung"], "{report:#}");
    if browser::is_there() {
        let page = story.sandbox.path().join("report.html");
        story.sandbox.ok(["report", "--output", page.to_str().unwrap()]);
        let used = report["time_ms"].as_object().unwrap().values().filter(|ms| ms.as_u64() > Some(0));
        browser::check(&page, 2, used.count());
    }
}

/// The child has `PRIVATE` bytes of its own, and the parent `SHARED` bytes that a child may share. The child writes `CHANGED`
/// bytes for each file `change-N`.
const COSTLY_JOB: &str = r#"
import mmap, os, sys, time
private, shared, changed = (int(word) for word in sys.argv[1:])
pid = os.fork()
if pid == 0:
    memory = bytearray(os.urandom(private))
    done = 0
    os.symlink(str(os.getpid()), "child")
    while os.getppid() != 1 and not os.path.exists("go"):
        if os.path.exists(f"change-{done}"):
            memory[:changed] = os.urandom(changed)
            os.symlink("done", f"changed-{done}")
            done += 1
        time.sleep(0.01)
    os._exit(0)
area = mmap.mmap(-1, shared)
area[:] = os.urandom(shared)
os.symlink(str(os.getpid()), "parent")
os.waitpid(pid, 0)
"#;

const MIB: u64 = 1 << 20;
const PRIVATE: u64 = 96 * MIB;
const SHARED: u64 = 16 * MIB;
const CHANGED: u64 = 24 * MIB;
/// What an idle Python changes, and has besides.
const SLACK: u64 = 20 * MIB;

/// A job with three snapshots: of all its memory, after a change, and without one.
fn costly_job() -> (Sandbox, Running, Vec<String>) {
    let sandbox = Sandbox::new();
    let python = python();
    let sizes = [PRIVATE, SHARED, CHANGED].map(|bytes| bytes.to_string());
    let command = ["--files", "off", "--interval", "off", "--", python.to_str().unwrap(), "-c", COSTLY_JOB];
    let mut job = sandbox.start("job", command.iter().copied().chain(sizes.iter().map(String::as_str)));
    let exists = |name: &str| fs::symlink_metadata(sandbox.path().join(name)).is_ok();
    job.until("both processes", || (exists("child") && exists("parent")).then_some(()));
    job.until_answering(&sandbox);
    let mut ids = vec![job.checkpoint(&sandbox)];
    touch(&sandbox, "change-0");
    job.until("the change", || exists("changed-0").then_some(()));
    ids.push(job.checkpoint(&sandbox));
    ids.push(job.checkpoint(&sandbox));
    (sandbox, job, ids)
}

fn bytes_of(value: &Value, name: &str) -> u64 {
    value[name].as_u64().unwrap_or_else(|| panic!("{name} in {value:#}"))
}

/// The phases of each pause add up to it, and all pauses to the totals, which are those of the launcher.
fn check_sums(report: &Value, status: &Value) {
    let (snapshots, totals) = (report["snapshots"].as_array().unwrap(), &report["totals"]);
    for one in snapshots {
        let phases = one["stall_phases"].as_object().unwrap();
        let sum: u64 = phases.values().map(|us| us.as_u64().unwrap()).sum();
        assert_eq!(sum, bytes_of(one, "stall_us"), "{one:#}");
        assert!(
            bytes_of(&one["stall_phases"], "dump_us") > 0 && bytes_of(&one["stall_phases"], "record_us") > 0
        );
    }
    for name in ["stall_us", "bytes", "changed_bytes", "stored_bytes"] {
        let sum: u64 = snapshots.iter().map(|one| bytes_of(one, name)).sum();
        assert_eq!(bytes_of(totals, name), sum, "{name} in {report:#}");
    }
    for (phase, sum) in totals["stall_phases"].as_object().unwrap() {
        let all: u64 = snapshots.iter().map(|one| bytes_of(&one["stall_phases"], phase)).sum();
        assert_eq!(sum.as_u64(), Some(all), "{phase} in {report:#}");
    }
    for name in ["bytes", "stored_bytes"] {
        assert_eq!(totals[name], status["totals"][name], "{name}");
    }
    let stall_us = status["totals"]["stall_s"].as_f64().unwrap() * 1e6;
    assert!((bytes_of(totals, "stall_us") as f64 - stall_us).abs() < 5.0, "{totals} is not {stall_us}");
}

#[test]
fn what_snapshots_cost_is_what_the_job_has_and_changes() {
    let (sandbox, mut job, ids) = costly_job();
    let (report, status) = (sandbox.json(["report", "--json"]), sandbox.json(["status", "--json"]));
    schema::check("report", &report);
    check_sums(&report, &status[0]);
    let snapshots = report["snapshots"].as_array().unwrap();
    for (one, [least, most]) in snapshots.iter().zip([
        [PRIVATE + SHARED, PRIVATE + SHARED + 2 * SLACK],
        [CHANGED, CHANGED + SLACK],
        [0, SLACK],
    ]) {
        let (changed, stored) = (bytes_of(one, "changed_bytes"), bytes_of(one, "stored_bytes"));
        assert!((least..most).contains(&changed), "{least} to {most} bytes have changed: {one:#}");
        // What is random is stored as it is.
        assert!((least * 9 / 10..most).contains(&stored), "{least} to {most} bytes are stored: {one:#}");
    }
    let memory = &report["memory"];
    assert_eq!(memory["snapshot"], *ids[2]);
    let pid = |name: &str| -> i64 {
        fs::read_link(sandbox.path().join(name)).unwrap().to_str().unwrap().parse().unwrap()
    };
    let processes = memory["processes"].as_array().unwrap();
    let of =
        |name| processes.iter().find(|one| one["pid"] == pid(name)).unwrap_or_else(|| panic!("{memory:#}"));
    let (child, parent) = (of("child"), of("parent"));
    assert_eq!(processes[0], *child, "the largest is first: {memory:#}");
    assert!((PRIVATE..PRIVATE + SLACK).contains(&bytes_of(child, "private_bytes")), "{child}");
    assert!((SHARED..SHARED + SLACK).contains(&bytes_of(parent, "shared_bytes")), "{parent}");
    assert!(
        bytes_of(parent, "private_bytes") < SLACK && parent["name"].as_str().unwrap().starts_with("python")
    );
    let shown = sandbox.json(["show", &ids[2], "--json"]);
    assert_eq!(shown["tree"]["processes"].as_array().unwrap().len(), processes.len(), "{memory:#}");
    assert_eq!(shown["changed_bytes"], snapshots[2]["changed_bytes"]);
    sandbox.ok(["report", "-o", "report.html"]);
    let page = sandbox.read("report.html");
    for wanted in ["<h3>Pauses by phase</h3>", "<h2>Memory by process</h2>", "were written to the store"] {
        assert!(page.contains(wanted), "{wanted}: {page}");
    }
    touch(&sandbox, "go");
    assert_eq!(job.wait(), 0, "{}", job.said());
}
