//! The command line: exit codes, streams, when a job resumes, the other commands.

use ckpt_run_tests::{Running, Sandbox, criu, packs, programs, python, schema, set_variables, until};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

fn run(sandbox: &Sandbox, script: &str) -> (i32, String, String) {
    let output = sandbox.call(["--", "sh", "-c", script]);
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

/// A job that writes `ready`, waits for `go`, then exits with 3 if `fail` is there.
fn waiter(sandbox: &Sandbox, name: &str, options: &[&str]) -> Running {
    let script = "echo begun >> begun; : > ready; while [ ! -e go ]; do sleep 0.02; done; [ ! -e fail ] || exit 3; echo done";
    let mut arguments: Vec<&str> = options.to_vec();
    arguments.extend(["--", "sh", "-c", script]);
    sandbox.start(name, arguments)
}

fn until_ready(job: &mut Running, sandbox: &Sandbox) {
    job.until("the job is ready", || sandbox.path().join("ready").exists().then_some(()));
    job.until_answering(sandbox);
}

#[test]
fn the_exit_code_is_that_of_the_command() {
    let sandbox = Sandbox::new();
    assert_eq!(run(&sandbox, "exit 0").0, 0);
    assert_eq!(run(&sandbox, "exit 7").0, 7);
    assert_eq!(run(&sandbox, "kill -9 $$").0, 137);
    assert_eq!(sandbox.call(["--", "no-such-command"]).status.code(), Some(127));
    assert_eq!(sandbox.call(["--", "/usr/bin"]).status.code(), Some(126));
    fs::write(sandbox.path().join("plain"), "not a program").unwrap();
    assert_eq!(sandbox.call(["--job", "plain", "--", "./plain"]).status.code(), Some(126));
    let status = sandbox.ok(["status", "plain"]);
    assert!(status.contains("could not be started") && !status.contains("died"), "{status}");
    let story = sandbox.ok(["explain", "plain"]);
    assert!(story.contains("not started") && story.contains("cannot run \"./plain\": "), "{story}");
}

#[test]
fn streams_are_wired_through() {
    let sandbox = Sandbox::new();
    let (_, out, err) = run(&sandbox, "echo to stdout; echo to stderr >&2");
    assert_eq!(out, "to stdout\n");
    assert!(
        err.starts_with("ckpt-run: job sh-") && err.ends_with("command resumes it\nto stderr\n"),
        "{err}"
    );
    let output = sandbox.call(["-q", "--", "sh", "-c", "echo quiet >&2"]);
    assert_eq!(String::from_utf8_lossy(&output.stderr), "quiet\n");
    let mut child =
        sandbox.command(["--", "wc", "-c"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(&vec![b'x'; 300_000]).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "300000");
    // Much output, all of it, in order, also when the job ends at once.
    let (_, out, _) = run(&sandbox, "seq 1 200000");
    assert_eq!(out.lines().count(), 200_000);
    assert!(out.ends_with("\n200000\n"));
}

#[test]
fn a_closed_output_ends_the_job() {
    let sandbox = Sandbox::new();
    let mut child = sandbox.command(["--", "yes"]).stdout(Stdio::piped()).spawn().unwrap();
    child.stdout.take().unwrap().read_exact(&mut [0; 10]).unwrap();
    let status = until("the end of a job that nobody reads", || child.try_wait().unwrap());
    assert_eq!(status.code(), Some(128 + 13));
}

#[test]
fn the_job_sees_itself_in_a_namespace_of_its_own() {
    let sandbox = Sandbox::new();
    let (_, out, _) = run(&sandbox, "echo $$; ls -d /proc/[0-9]* | wc -l; umask; pwd");
    let lines: Vec<_> = out.lines().collect();
    assert!(lines[0].parse::<i32>().unwrap() > 10_000, "PIDs of the job are apart from CRIU's: {out}");
    assert!(lines[1].parse::<i32>().unwrap() <= 5, "it sees its own processes only: {out}");
    assert_eq!(lines[3], sandbox.path().to_str().unwrap());
}

#[test]
fn signals_reach_the_command() {
    let sandbox = Sandbox::new();
    let mut job = sandbox.start(
        "job",
        [
            "--on-signal",
            "off",
            "--",
            "sh",
            "-c",
            "trap 'echo got it; exit 5' TERM; : > ready; while :; do sleep 0.02; done",
        ],
    );
    until_ready(&mut job, &sandbox);
    job.signal(Signal::TERM);
    assert_eq!(job.wait(), 5);
    assert!(job.said().contains("got it"));
}

#[test]
fn a_complete_job_starts_afresh_and_a_failed_one_resumes() {
    let sandbox = Sandbox::new();
    let mut job = waiter(&sandbox, "first", &[]);
    until_ready(&mut job, &sandbox);
    job.checkpoint(&sandbox);
    // It fails: the next run resumes, and fails in the same way as long as the reason is there.
    fs::write(sandbox.path().join("fail"), "").unwrap();
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 3);
    let mut job = waiter(&sandbox, "second", &[]);
    assert_eq!(job.wait(), 3);
    assert!(job.said().contains("resumed from snapshot"));
    fs::remove_file(sandbox.path().join("fail")).unwrap();
    let mut job = waiter(&sandbox, "third", &[]);
    assert_eq!(job.wait(), 0);
    assert_eq!(sandbox.read("begun"), "begun\n", "it was begun once");
    // Now it is complete: its snapshot is not resumed any more, unless it is asked for.
    let mut job = waiter(&sandbox, "fourth", &[]);
    assert_eq!(job.wait(), 0);
    assert!(!job.said().contains("resumed"), "{}", job.said());
    assert_eq!(sandbox.read("begun"), "begun\nbegun\n");
    let id = sandbox.snapshots().remove(0);
    let mut job = waiter(&sandbox, "fifth", &["--resume", &id]);
    assert_eq!(job.wait(), 0);
    assert!(job.said().contains(&format!("resumed from snapshot {id}")), "{}", job.said());
}

#[test]
fn a_job_is_known_by_its_name_or_by_directory_and_command() {
    let sandbox = Sandbox::new();
    let mut job = waiter(&sandbox, "first", &["--job", "mine"]);
    until_ready(&mut job, &sandbox);
    job.checkpoint(&sandbox);
    job.kill_everything();
    fs::write(sandbox.path().join("go"), "").unwrap();
    // The same name with another command line: it is the same job.
    let mut job = sandbox.start("named", ["--job", "mine", "--", "sh", "-c", "echo another"]);
    assert_eq!(job.wait(), 0);
    assert_eq!(sandbox.read("named.out"), "done\n", "{}", job.said());
    // The same command line without the name: it is another job.
    let mut job = waiter(&sandbox, "unnamed", &[]);
    assert_eq!(job.wait(), 0);
    assert_eq!(sandbox.read("begun"), "begun\nbegun\n");
}

#[test]
fn one_launcher_per_job() {
    let sandbox = Sandbox::new();
    let mut job = waiter(&sandbox, "first", &[]);
    until_ready(&mut job, &sandbox);
    let mut second = waiter(&sandbox, "second", &[]);
    assert_eq!(second.wait(), 2);
    assert!(
        second.said().contains("already running") && second.said().contains(&job.pid().to_string()),
        "{}",
        second.said()
    );
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0);
    assert_eq!(sandbox.read("begun"), "begun\n");
}

#[test]
fn the_job_dies_with_its_launcher() {
    let sandbox = Sandbox::new();
    let mut job = waiter(&sandbox, "first", &[]);
    until_ready(&mut job, &sandbox);
    job.kill_launcher();
}

#[test]
fn the_interval_takes_snapshots_and_keeps_some() {
    let sandbox = Sandbox::new();
    let mut job = waiter(&sandbox, "job", &["--interval", "200ms", "--keep", "2"]);
    until_ready(&mut job, &sandbox);
    job.until("a fourth snapshot", || (sandbox.snapshots().last()?.as_str() >= "000004").then_some(()));
    let listed = sandbox.snapshots();
    // The newest two, one that is about to go, and the first: none is a minute old.
    assert!((3..=4).contains(&listed.len()) && listed[0].starts_with("000001"), "{listed:?}");
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0);
    sandbox.verify_all();
}

#[test]
fn other_commands_list_and_delete_snapshots() {
    let sandbox = Sandbox::new();
    let mut job = waiter(&sandbox, "job", &["--keep", "4"]);
    until_ready(&mut job, &sandbox);
    let ids: Vec<_> = (0..4).map(|_| job.checkpoint(&sandbox)).collect();
    assert_eq!(sandbox.snapshots(), ids);
    let status = sandbox.json(["status", "--json"]);
    assert_eq!((&status[0]["running"], &status[0]["saved"]), (&true.into(), &4.into()));
    assert_eq!(status[0]["last_snapshot"]["id"], *ids[3]);
    assert!(sandbox.ok(["status"]).contains(&ids[3]));
    let shown = sandbox.json(["show", "2", "--json"]);
    assert_eq!(shown["id"], *ids[1]);
    assert!(sandbox.ok(["show", "2"]).contains("sh -c"));
    let verified = sandbox.json(["verify", "--all", "--json"]);
    assert!(verified.as_array().unwrap().iter().all(|one| one["sound"] == true), "{verified}");
    assert!(sandbox.ok(["rm", "--dry-run", &ids[0]]).contains(&format!("would remove {}", ids[0])));
    assert!(sandbox.ok(["rm", &ids[0]]).contains(&format!("removed {}", ids[0])));
    assert_eq!(sandbox.snapshots(), ids[1..]);
    for (mark, unmark, why) in
        [(&["pin"][..], "unpin", "is pinned"), (&["tag"], "untag", r#"has the tag "good""#)]
    {
        let tag = (unmark == "untag").then_some("good");
        sandbox.ok(mark.iter().copied().chain([ids[1].as_str()]).chain(tag));
        let refused = sandbox.call(["rm", &ids[1]]);
        let said = String::from_utf8_lossy(&refused.stderr);
        assert_eq!(refused.status.code(), Some(2), "{said}");
        assert!(said.contains(why) && said.contains("--force"), "{said}");
        sandbox.ok([unmark, ids[1].as_str()].into_iter().chain(tag));
    }
    // All of an unfinished job's.
    let refused = sandbox.call(["rm", &ids[1], &ids[2], &ids[3]]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("is the last snapshot from which the job"));
    assert_eq!((refused.status.code(), sandbox.snapshots()), (Some(2), ids[1..].to_vec()));
    assert!(sandbox.ok(["prune", "--keep", "2", "--dry-run"]).contains(&format!("would remove {}", ids[1])));
    assert_eq!(sandbox.snapshots(), ids[1..]);
    sandbox.ok(["prune", "--keep", "2"]);
    assert_eq!(sandbox.snapshots(), ids[2..]);
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0);
    let status = sandbox.ok(["status"]);
    assert!(status.contains("complete") && status.contains("\n  time             "), "{status}");
    let output = sandbox.call(["checkpoint"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("is not running"));
    // Of several at once, the space is reclaimed once.
    let removed = sandbox.call(["rm", "-v", &ids[2], &ids[3]]);
    let said = String::from_utf8_lossy(&removed.stderr);
    assert!(removed.status.success() && sandbox.snapshots().is_empty(), "{said}");
    assert_eq!(said.matches("is reclaimed").count(), 1, "{said}");
}

/// A job whose memory is new at each snapshot.
const NOISE: &str =
    "until [ -e go ]; do noise=$(head -c 3000000 /dev/urandom | base64); : > ready; sleep 0.05; done";

/// The second snapshot of a job, and the packs that it has added.
fn second_snapshot(job: &mut Running, sandbox: &Sandbox) -> (String, Vec<PathBuf>) {
    until_ready(job, sandbox);
    job.checkpoint(sandbox);
    let before = packs::objects(sandbox);
    let id = job.checkpoint(sandbox);
    let mut own = packs::objects(sandbox);
    own.retain(|path| path.extension().is_some_and(|kind| kind == "pack") && !before.contains(path));
    assert!(!own.is_empty());
    (id, own)
}

/// Its launcher frees the space at once: the next checkpoint may need it.
#[test]
fn a_snapshot_that_is_deleted_while_its_job_runs_takes_no_space() {
    let sandbox = Sandbox::new();
    let mut job = sandbox.start("job", ["--keep", "9", "--", "sh", "-c", NOISE]);
    let (id, own) = second_snapshot(&mut job, &sandbox);
    job.checkpoint(&sandbox);
    sandbox.ok(["rm", &id]);
    assert!(!own.iter().all(|pack| pack.exists()), "all packs are there");
    job.checkpoint(&sandbox);
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0);
    sandbox.verify_all();
}

/// The command does not wait for the checkpoint, after which the space is free.
#[test]
fn a_snapshot_that_is_deleted_during_a_checkpoint_takes_no_space_afterwards() {
    let sandbox = Sandbox::new();
    let hold = sandbox.path().join("hold");
    fs::write(&hold, "").unwrap();
    let mut command = sandbox.command(["--keep", "9", "--", "sh", "-c", NOISE]);
    command.env("CKPT_FAULT", format!("save-before-commit@3=hold:{}", hold.display()));
    let mut job = sandbox.start_command("job", command);
    let (id, own) = second_snapshot(&mut job, &sandbox);
    std::thread::scope(|scope| {
        let saved = scope.spawn(|| sandbox.ok(["checkpoint"]));
        until("the third snapshot is stored", || {
            job.said().contains("fault point save-before-commit").then_some(())
        });
        let removed = sandbox.call(["rm", &id]);
        let said = String::from_utf8_lossy(&removed.stderr);
        assert!(
            removed.status.success() && said.contains("once the checkpoint in progress is over"),
            "{said}"
        );
        assert!(own.iter().all(|pack| pack.exists()), "the checkpoint may use them");
        fs::remove_file(&hold).unwrap();
        saved.join().expect("no panic");
    });
    until("a pack is gone", || (!own.iter().all(|pack| pack.exists())).then_some(()));
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0);
    sandbox.verify_all();
}

/// The outputs for programs, of a job that runs and of one that has ended.
#[test]
fn json_is_as_its_schemas_say() {
    let sandbox = Sandbox::new();
    // The job writes files, which are then in the snapshot.
    let mut job = waiter(&sandbox, "job", &["--interval", "1h"]);
    until_ready(&mut job, &sandbox);
    let check = |arguments: &[&str]| {
        let output = sandbox.json(arguments.iter().chain(&["--json"]));
        schema::check(arguments[0], &output);
        output
    };
    let id = check(&["checkpoint"])["id"].as_str().unwrap().to_owned();
    let check_all = || {
        for command in schema::QUERIES {
            check(&[command]);
        }
    };
    check_all();
    let store = sandbox.json(["status", "--json"])[0]["store"].clone();
    let runs = check(&["ps"]);
    assert!(runs.as_array().unwrap().iter().any(|one| one["store"] == store), "{store}: {runs:#}");
    check(&["show", &id]);
    for all in ["--all", "--scrub"] {
        assert!(!check(&["verify", all]).as_array().unwrap().is_empty(), "{all}");
    }
    let other = check(&["checkpoint"])["id"].as_str().unwrap().to_owned();
    let difference = check(&["diff", &id, &other]);
    assert!(!difference["regions"].as_array().unwrap().is_empty(), "{difference:#}");
    assert_eq!(check(&["prune", "--keep", "1"]).as_array().unwrap().len(), 1);
    check(&["config"]);
    let doctor = sandbox.call(["doctor", "--json"]);
    schema::check("doctor", &serde_json::from_slice(&doctor.stdout).unwrap());
    assert!(check(&["stop"])["snapshot"].is_string());
    assert_eq!(job.wait(), 75);
    assert!(!check(&["repair"]).as_array().unwrap().is_empty());
    let mut job = waiter(&sandbox, "job", &["--interval", "1h"]);
    until_ready(&mut job, &sandbox);
    fs::write(sandbox.path().join("fail"), "").unwrap();
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 3);
    check_all();
}

#[test]
fn help_configuration_completions_and_manual() {
    let sandbox = Sandbox::new();
    let (short, long) = (sandbox.ok(["-h"]), sandbox.ok(["--help"]));
    assert!(long.len() > short.len() && long.contains("Exit codes"));
    fs::write(sandbox.path().join("ckpt-run.toml"), "keep = 7\n").unwrap();
    let config = sandbox.json(["config", "--json", "--interval", "3m"]);
    let find =
        |name: &str| config.as_array().unwrap().iter().find(|one| one["name"] == name).unwrap().clone();
    assert_eq!(
        (find("keep")["value"].clone(), find("interval")["origin"].clone()),
        ("7".into(), "flag".into())
    );
    assert_eq!(find("store")["origin"]["variable"], "CKPT_STORE");
    assert!(sandbox.ok(["completions", "bash"]).contains("complete -F"));
    assert!(sandbox.ok(["man"]).contains(".TH ckpt-run"));
    let doctor = sandbox.json(["doctor", "--json"]);
    let criu = doctor.as_array().unwrap().iter().find(|one| one["need"] == "criu").unwrap().clone();
    assert_eq!(criu["state"], "ok");
}

/// The job's output is appended to a file: a resumed run continues there without lost or repeated lines.
#[test]
fn an_appended_log_has_each_line_once() {
    let sandbox = Sandbox::new();
    let script = "wait_for() { until [ -e $1 ]; do sleep 0.01; done; }; i=0; while [ $i -lt 60 ]; do echo $i; \
                  i=$((i+1)); case $i in 20) wait_for go;; 40) wait_for end;; esac; done";
    let start = || {
        let mut command = sandbox.command(["-qq", "--", "sh", "-c", script]);
        command.stdin(Stdio::null());
        sandbox.start_command("log", command)
    };
    let lines = || sandbox.read("log.out").lines().count();
    let mut job = start();
    job.until_answering(&sandbox);
    job.until("some lines", || (lines() == 20).then_some(()));
    job.checkpoint(&sandbox);
    fs::write(sandbox.path().join("go"), "").unwrap();
    job.until("more lines", || (lines() == 40).then_some(()));
    job.kill_everything();
    fs::write(sandbox.path().join("end"), "").unwrap();
    assert_eq!(start().wait(), 0);
    let wanted: String = (0..60).map(|line| format!("{line}\n")).collect();
    assert_eq!(sandbox.read("log.out"), wanted);
}

/// After a resume the job continues to read its input file at its old position.
#[test]
fn input_from_a_file_continues_at_its_position() {
    let sandbox = Sandbox::new();
    let lines: String = (0..10).map(|line| format!("line {line}\n")).collect();
    fs::write(sandbox.path().join("input"), lines).unwrap();
    let start = |name: &str| {
        let mut command = sandbox.command(["--".into(), python(), programs().join("stdin_data.py")]);
        command.stdin(fs::File::open(sandbox.path().join("input")).unwrap());
        sandbox.start_command(name, command)
    };
    let mut job = start("first");
    until_ready(&mut job, &sandbox);
    job.checkpoint(&sandbox);
    job.kill_everything();
    let mut job = start("second");
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert_eq!(sandbox.read("log"), "started\npass\n");
}

/// A snapshot while the input pipe is full: no input is lost, and none arrives twice.
#[test]
fn input_in_flight_is_not_lost() {
    let sandbox = Sandbox::new();
    let lines: String = (0..30_000).map(|line| format!("line {line}\n")).collect();
    fs::write(sandbox.path().join("input"), &lines).unwrap();
    let script = r#"
import os, time
copy = open("copy", "ab", buffering=0)
open("ready", "w")
gates, blocks = {1: "more", 20: "go"}, 0
while block := os.read(0, 2000):
    copy.write(block)
    blocks += 1
    while blocks in gates and not os.path.exists(gates[blocks]): time.sleep(0.01)
"#;
    let start = |name: &str| {
        let mut command = sandbox.command(["--", python().to_str().unwrap(), "-c", script]);
        command.stdin(fs::File::open(sandbox.path().join("input")).unwrap());
        sandbox.start_command(name, command)
    };
    let mut job = start("first");
    until_ready(&mut job, &sandbox);
    job.until("the first block", || (!sandbox.read("copy").is_empty()).then_some(()));
    job.checkpoint(&sandbox);
    let at = sandbox.read("copy").len();
    fs::write(sandbox.path().join("more"), "").unwrap();
    job.until("more blocks", || (sandbox.read("copy").len() >= at + 19 * 1000).then_some(()));
    job.kill_everything();
    assert!(sandbox.read("copy").len() < lines.len() / 2, "it was killed in the middle");
    fs::write(sandbox.path().join("go"), "").unwrap();
    // Another input would be taken for the rest of this one. Nothing of the job runs, and nothing is lost.
    let copied = sandbox.read("copy");
    fs::write(sandbox.path().join("other"), "other lines\n".repeat(30_000)).unwrap();
    fs::write(sandbox.path().join("short"), &lines[..1000]).unwrap();
    let open = |name: &str| fs::File::open(sandbox.path().join(name)).unwrap();
    for (input, problem) in [
        (Stdio::null(), "has no input (/dev/null)"),
        (Stdio::piped(), "has a pipe as its input"),
        (open("other").into(), "has a file with other content as its input"),
        (open("short").into(), "has a shorter file as its input"),
    ] {
        let mut command = sandbox.command(["--", python().to_str().unwrap(), "-c", script]);
        let output = command.stdin(input).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(
            said.contains(problem) && said.contains("< FILE") && !said.contains("resumed from"),
            "{said}"
        );
        assert_eq!(sandbox.read("copy"), copied);
    }
    // The same content is enough.
    fs::write(sandbox.path().join("input"), &lines).unwrap();
    let mut job = start("second");
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert!(job.said().contains("resumed from snapshot"));
    assert!(sandbox.read("copy") == lines, "the copy is not the input");
}

/// What a pipe has delivered cannot be compared: a resume warns, and goes on with what the new pipe delivers. A job that reads
/// nothing takes any input.
#[test]
fn a_resume_warns_of_input_that_came_from_a_pipe() {
    const WARNING: &str = "of its input from a pipe before the snapshot";
    for reads in [true, false] {
        let sandbox = Sandbox::new();
        let read = if reads { "print(input(), flush=True)" } else { "" };
        let script = format!(
            "import os, time\n{read}\nopen('ready', 'w')\nwhile not os.path.exists('go'): time.sleep(0.01)\n{read}"
        );
        let start = |name: &str, line: &str| {
            let mut command = sandbox.command(["--", python().to_str().unwrap(), "-c", &script]);
            let (from, mut to) = std::io::pipe().unwrap();
            to.write_all(line.as_bytes()).unwrap();
            command.stdin(from);
            sandbox.start_command(name, command)
        };
        let mut job = start("first", "one\n");
        until_ready(&mut job, &sandbox);
        job.checkpoint(&sandbox);
        job.kill_everything();
        fs::write(sandbox.path().join("go"), "").unwrap();
        let mut job = start("second", "two\n");
        assert_eq!(job.wait(), 0, "{}", job.said());
        assert_eq!(job.said().contains(WARNING), reads, "{}", job.said());
        assert_eq!(sandbox.read("second.out"), if reads { "two\n" } else { "" });
    }
}

/// After a resume from an older snapshot, later runs ignore the newer ones and continue from the older one.
#[test]
fn later_runs_continue_from_a_resumed_older_snapshot() {
    let sandbox = Sandbox::new();
    let program = programs().join("append_log.py");
    let start = |name: &str, options: &[&str]| {
        let mut arguments: Vec<PathBuf> = options.iter().map(PathBuf::from).collect();
        arguments.extend(["--".into(), python(), program.clone()]);
        sandbox.start(name, arguments)
    };
    let mut job = start("first", &[]);
    until_ready(&mut job, &sandbox);
    let older = job.checkpoint(&sandbox);
    let newer = job.checkpoint(&sandbox);
    job.kill_everything();
    let mut job = start("second", &["--resume", &older]);
    job.until_answering(&sandbox);
    job.kill_everything();
    let mut job = start("third", &[]);
    job.until_answering(&sandbox);
    assert!(job.said().contains(&format!("resumed from snapshot {older}")), "{}", job.said());
    let newest = job.checkpoint(&sandbox);
    assert!(newest > newer);
    job.kill_everything();
    let mut job = start("fourth", &[]);
    job.until_answering(&sandbox);
    assert!(job.said().contains(&format!("resumed from snapshot {newest}")), "{}", job.said());
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert_eq!(sandbox.read("log"), "started\npass\n");
}

/// A job that ends right after its resume.
#[test]
fn an_exit_right_after_a_resume_is_noticed() {
    let sandbox = Sandbox::new();
    let script = "echo begun >> begun; : > ready; while [ ! -e go ]; do :; done; exit 4";
    let start = |name: &str| sandbox.start(name, ["--", "sh", "-c", script]);
    let mut job = start("first");
    until_ready(&mut job, &sandbox);
    job.checkpoint(&sandbox);
    job.kill_everything();
    fs::write(sandbox.path().join("go"), "").unwrap();
    for round in 0..8 {
        let mut job = start("again");
        assert_eq!(job.wait(), 4, "round {round}: {}", job.said());
    }
    assert_eq!(sandbox.read("begun"), "begun\n");
}

/// Before anything is made. Another try does not help.
#[test]
fn a_machine_without_criu_is_bad_input() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.command(["--", "/bin/true"]);
    command.env_remove("CKPT_CRIU").env("PATH", sandbox.path());
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("CRIU is not installed"), "{said}");
    assert!(!sandbox.store.exists());
}

#[test]
fn jobs_started_at_the_same_time_share_one_store() {
    let sandbox = Sandbox::new();
    let jobs = (0..6).map(|number| {
        let name = format!("job{number}");
        sandbox.start(&name.clone(), ["--job".to_owned(), name, "--".to_owned(), "true".to_owned()])
    });
    let mut jobs: Vec<_> = jobs.collect();
    for job in &mut jobs {
        assert_eq!(job.wait(), 0, "{}", job.said());
    }
    assert_eq!(sandbox.json(["status", "--json"]).as_array().unwrap().len(), 6);
}

/// A full disk under the job's log is reported, and does not end the job.
#[test]
fn an_output_error_is_reported() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.command(["--", "sh", "-c", "seq 1 1000; exit 6"]);
    command.stdout(fs::File::options().write(true).open("/dev/full").unwrap());
    let output = command.stderr(Stdio::piped()).spawn().unwrap().wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(6), "{said}");
    assert_eq!(said.matches("the job's output cannot be written").count(), 1, "{said}");
}

/// A terminal for one `ckpt-run`.
struct Terminal {
    master: fs::File,
    slave: PathBuf,
}

impl Terminal {
    fn open() -> Self {
        use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let slave = PathBuf::from(ptsname(&master, Vec::new()).unwrap().into_string().unwrap());
        Self { master: fs::File::from(master), slave }
    }

    /// Starts `command` with this as its controlling terminal; what it prints is read in the background.
    fn start(&self, mut command: Command) -> (AtTerminal, std::sync::Arc<std::sync::Mutex<String>>) {
        let open = || fs::File::options().read(true).write(true).open(&self.slave).unwrap();
        command.stdin(open()).stdout(open()).stderr(open());
        let take_terminal = || {
            // SIGINT is ignored when the tests run in the background of a shell.
            // SAFETY: the default action is no function.
            unsafe { libc::signal(libc::SIGINT, libc::SIG_DFL) };
            rustix::process::setsid()?;
            rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?;
            Ok(())
        };
        // SAFETY: three system calls, allowed between fork and exec.
        unsafe { command.pre_exec(take_terminal) };
        let child = command.spawn().unwrap();
        let said = std::sync::Arc::new(std::sync::Mutex::new(String::new()));
        let (mut from, to) =
            (self.master.as_fd().try_clone_to_owned().map(fs::File::from).unwrap(), said.clone());
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(read @ 1..) = from.read(&mut buffer) {
                to.lock().unwrap().push_str(&String::from_utf8_lossy(&buffer[..read]));
            }
        });
        (AtTerminal(child), said)
    }
}

/// A `ckpt-run` at a terminal; killed with its job when dropped.
struct AtTerminal(std::process::Child);

impl AtTerminal {
    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    fn ends(&mut self) -> std::process::ExitStatus {
        until("the end", || self.0.try_wait().unwrap())
    }
}

impl Drop for AtTerminal {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            self.kill();
        }
    }
}

#[test]
fn a_controlling_terminal_is_restored() {
    let sandbox = Sandbox::new();
    let command = || sandbox.command(["--".into(), python(), programs().join("ctty.py")]);
    let first = Terminal::open();
    let (mut child, said) = first.start(command());
    until("the program is ready", || sandbox.path().join("ready").exists().then_some(()));
    until("a snapshot", || sandbox.call(["checkpoint"]).status.success().then_some(()));
    child.kill();
    until_printed(&said, "terminal /dev/pts/");
    // Another terminal takes the place of the first.
    let second = Terminal::open();
    let (mut child, said) = second.start(command());
    until_printed(&said, "resumed from snapshot");
    fs::write(sandbox.path().join("go"), "").unwrap();
    let status = child.ends();
    assert_eq!(status.code(), Some(0), "{}{}", said.lock().unwrap(), sandbox.read("log"));
    assert_eq!(sandbox.read("log"), "started\npass\n");
    until_printed(&said, "pass");
}

/// What is printed is read by a thread, a moment after it was printed.
fn until_printed(said: &std::sync::Mutex<String>, what: &str) {
    until(what, || said.lock().unwrap().contains(what).then_some(()));
}

/// Waits until ckpt-run relays keys. Before that, a key would be a signal for ckpt-run, as it starts.
fn until_keys_are_relayed(terminal: &Terminal) {
    until("keys are relayed", || {
        let modes = rustix::termios::tcgetattr(&terminal.master).unwrap().local_modes;
        (!modes.contains(rustix::termios::LocalModes::ISIG)).then_some(())
    });
}

/// Ctrl-C typed at the user's terminal reaches the job through its own: always with `--on-signal TERM`, otherwise if the
/// job reads single keys or cannot be saved.
#[test]
fn keys_reach_the_job() {
    let traps = "trap 'echo interrupted; exit 9' INT";
    let waits = ": > ready; while :; do sleep 0.02; done";
    let single = format!("stty -icanon; {traps}; {waits}");
    let unsaved = r#"
import os, signal, sys, time
def interrupted(*_): print("interrupted"); sys.exit(9)
signal.signal(signal.SIGINT, interrupted)
counter = os.eventfd(0, os.EFD_SEMAPHORE)
open("ready", "w").close()
while True: time.sleep(0.02)
"#;
    let python = python();
    for command in [
        &["--on-signal", "TERM", "--", "sh", "-c", &format!("{traps}; {waits}")][..],
        &["--", "sh", "-c", &single],
        &["--", python.to_str().unwrap(), "-c", unsaved],
    ] {
        let sandbox = Sandbox::new();
        let terminal = Terminal::open();
        let (mut child, said) = terminal.start(sandbox.command(command));
        until("the job is ready", || sandbox.path().join("ready").exists().then_some(()));
        until_keys_are_relayed(&terminal);
        (&terminal.master).write_all(b"\x03").unwrap();
        let status = child.ends();
        assert_eq!(status.code(), Some(9), "{}", said.lock().unwrap());
        until_printed(&said, "interrupted");
    }
}

/// Otherwise Ctrl-C saves the job and ends it. So does a terminal that is closed.
#[test]
fn ctrl_c_saves_the_job() {
    for is_closed in [false, true] {
        let sandbox = Sandbox::new();
        let terminal = Terminal::open();
        let script = "echo begun >> begun; : > ready; while [ ! -e go ]; do sleep 0.02; done";
        let (mut child, said) = terminal.start(sandbox.command(["--", "sh", "-c", script]));
        until("the job is ready", || sandbox.path().join("ready").exists().then_some(()));
        until_keys_are_relayed(&terminal);
        until("the launcher answers", || sandbox.ok(["status"]).contains("launcher ").then_some(()));
        if is_closed {
            kill_process(Pid::from_child(&child.0), Signal::HUP).unwrap();
        } else {
            (&terminal.master).write_all(b"\x03").unwrap();
        }
        assert_eq!(child.ends().code(), Some(75), "{}", said.lock().unwrap());
        assert_eq!(sandbox.snapshots().len(), 1, "{}", said.lock().unwrap());
        fs::write(sandbox.path().join("go"), "").unwrap();
        let second = Terminal::open();
        let (mut child, said) = second.start(sandbox.command(["--", "sh", "-c", script]));
        assert_eq!(child.ends().code(), Some(0), "{}", said.lock().unwrap());
        assert_eq!(sandbox.read("begun"), "begun\n", "{}", said.lock().unwrap());
    }
}

/// A child that has ended, and that the command has not waited for, is not left running.
#[test]
fn what_a_command_leaves_running_is_named() {
    let sandbox = Sandbox::new();
    let said = |script: &str| {
        let output = sandbox.call(["--", "sh", "-c", script]);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let left = said("sleep 60 & sleep 0.5; exit 0");
    assert!(left.contains("what it left running is ended too: 1 process (sleep)"), "{left}");
    let none = said("true & sleep 0.1; exec sh -c 'exit 0'");
    assert!(!none.contains("left running"), "{none}");
}

/// In a network of its own, a job's port is never taken.
#[test]
fn a_private_network_keeps_ports_free() {
    let sandbox = Sandbox::new();
    let script = "import socket,os,time\ns=socket.socket(); s.bind(('127.0.0.1', 15871)); s.listen()\nopen('ready','w')\nwhile not os.path.exists('go'): time.sleep(0.02)\nc=socket.create_connection(('127.0.0.1', 15871)); s.accept(); print('connected')\n";
    let start = |name: &str| {
        sandbox.start(name, ["--network", "private", "--", python().to_str().unwrap(), "-c", script])
    };
    let mut job = start("first");
    until_ready(&mut job, &sandbox);
    job.checkpoint(&sandbox);
    job.kill_everything();
    let taken = std::net::TcpListener::bind("127.0.0.1:15871").unwrap();
    let mut job = start("second");
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert!(
        job.said().contains("resumed from snapshot") && job.said().contains("connected"),
        "{}",
        job.said()
    );
    drop(taken);
}

/// Another program has both ports of a connection of the job for a while.
#[test]
fn a_resume_waits_for_the_ports_of_a_connection() {
    let sandbox = Sandbox::new();
    let (python, program) = (python(), programs().join("pair.py"));
    let arguments = ["--", python.to_str().unwrap(), program.to_str().unwrap(), "job"];
    let mut job = sandbox.start("first", arguments);
    until_ready(&mut job, &sandbox);
    job.checkpoint(&sandbox);
    job.kill_everything();
    let mut other = Command::new(&python);
    let mut other =
        other.arg(&program).arg("take").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut taken = [0; 6];
    other.stdout.as_mut().unwrap().read_exact(&mut taken).unwrap();
    // To the same log, which is cut to its length at the snapshot.
    let mut job = sandbox.start("first", arguments);
    job.until("a resume that waits", || job_says(&sandbox, "first", "still in use").then_some(()));
    let story = String::from_utf8_lossy(&sandbox.call(["explain"]).stdout).into_owned();
    assert!(story.contains("waiting up to") && story.contains("still in use"), "{story}");
    let tried = || {
        let attempts = fs::read_dir(sandbox.job_dir().join("attempts")).unwrap();
        attempts
            .filter_map(|entry| entry.unwrap().path().join("criu.log").metadata().ok()?.modified().ok())
            .max()
    };
    for _ in 0..2 {
        let before = tried();
        job.until("another try", || (tried() > before).then_some(()));
    }
    drop(other.stdin.take());
    assert!(other.wait().unwrap().success());
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0, "{}", job.said());
    let kept: Vec<_> = fs::read_dir(sandbox.job_dir().join("kept")).unwrap().collect();
    assert_eq!(kept.len(), 1, "one resume, however often it was tried: {kept:?}");
    assert_eq!(job.said().matches("still in use").count(), 1, "{}", job.said());
    assert!(
        job.said().contains("resumed from snapshot") && job.said().contains("connected"),
        "{}",
        job.said()
    );
}

fn job_says(sandbox: &Sandbox, name: &str, text: &str) -> bool {
    sandbox.read(&format!("{name}.err")).contains(text)
}

/// CRIU loads no plugins: that for CUDA would checkpoint what ckpt-run has checkpointed already.
#[test]
fn plugins_of_criu_are_not_used() {
    let (sandbox, python) = (Sandbox::new(), python());
    let plugins = sandbox.path().join("plugins");
    fs::create_dir(&plugins).unwrap();
    // CRIU fails when it cannot load one.
    fs::write(plugins.join("broken.so"), "no library").unwrap();
    let script =
        "import os, time\nopen('ready', 'w').close()\nwhile not os.path.exists('go'): time.sleep(0.02)";
    let start = || {
        let mut command = sandbox.command(["--", python.to_str().unwrap(), "-c", script]);
        command.env("CRIU_LIBS_DIR", &plugins);
        sandbox.start_command("job", command)
    };
    let mut job = start();
    job.until("a job", || sandbox.path().join("ready").exists().then_some(()));
    job.until_answering(&sandbox);
    job.checkpoint(&sandbox);
    job.kill_everything();
    let mut job = start();
    job.until_answering(&sandbox);
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert!(job.said().contains("resumed from snapshot"), "{}", job.said());
}

#[test]
fn pre_copy_is_refused_where_the_kernel_tracks_no_memory() {
    let check = Command::new(criu()).args(["check", "--feature", "mem_dirty_track"]).output().unwrap();
    let sandbox = Sandbox::new();
    let run = |option: &str| {
        let output = sandbox.call(["--precopy", option, "--", "true"]);
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    for option in ["auto", "off"] {
        let (code, said) = run(option);
        assert_eq!(code, Some(0), "{option}: {said}");
    }
    let (code, said) = run("2");
    if check.status.success() {
        assert_eq!(code, Some(0), "{said}");
    } else {
        assert!(code == Some(2) && said.contains("CONFIG_MEM_SOFT_DIRTY"), "{code:?} {said}");
    }
    let (code, said) = run("9");
    assert!(code == Some(2) && said.contains("rounds from 1 to 8"), "{code:?} {said}");
}

/// When a launcher is killed, its job may run on for a moment. The next start waits for the end of all its processes: until
/// then they write files.
#[test]
fn a_start_waits_for_the_end_of_the_earlier_session() {
    let sandbox = Sandbox::new();
    let count = "n=0; : > ready; while [ ! -e go ]; do n=$((n + 1)); echo $n >> counts; sleep 0.01; done";
    let start = |name: &str| sandbox.start(name, ["--", "sh", "-c", count]);
    let mut first = start("first");
    until_ready(&mut first, &sandbox);
    first.checkpoint(&sandbox);
    let is_init =
        |pid: &i32| fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap().contains("\0__init\0");
    let init = first.descendants().into_iter().find(is_init).and_then(Pid::from_raw).expect("the init");
    kill_process(init, Signal::STOP).unwrap();
    first.signal(Signal::KILL);
    first.wait_status();

    let wait = |name: &str| {
        let mut started = start(name);
        started.until("a start that waits", || {
            let said = sandbox.read(&format!("{name}.err"));
            assert!(!said.contains("resum"), "{said}");
            said.contains("waiting until the processes of its earlier session have ended: process ")
                .then_some(())
        });
        started
    };
    let mut ended = wait("ended");
    ended.signal(Signal::TERM);
    assert_eq!(ended.wait(), 75, "{}", ended.said());
    assert!(ended.said().contains("received SIGTERM while the job was being started"), "{}", ended.said());
    let mut second = wait("second");
    let status = String::from_utf8_lossy(&sandbox.call(["status"]).stdout).into_owned();
    assert!(
        status.contains(": waiting, 1 snapshot\n  launcher         waiting until the processes of"),
        "{status}"
    );
    let before = sandbox.read("counts").len();
    until("more that the first session writes", || (sandbox.read("counts").len() > before).then_some(()));
    kill_process(init, Signal::KILL).unwrap();
    second
        .until("the resume", || sandbox.read("second.err").contains("resuming from snapshot").then_some(()));
    until_ready(&mut second, &sandbox);
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(second.wait(), 0, "{}", second.said());
    let counts = sandbox.read("counts");
    let expected: String = (1..=counts.lines().count()).map(|n| format!("{n}\n")).collect();
    assert_eq!(counts, expected, "as of an unbroken run");
}

#[test]
fn a_job_has_the_nice_value_and_the_scheduling_policy_of_the_launcher() {
    let sandbox = Sandbox::new();
    for (prefix, expected) in [
        (&["nice", "-n", "7"][..], "7 SCHED_OTHER"),
        (&["nice", "-n", "3", "chrt", "-b", "0"], "3 SCHED_BATCH"),
    ] {
        let script = r#"echo "$(nice) $(chrt -p $$ | sed -n 's/.*policy: //p')""#;
        let inner = sandbox.command(["--interval", "off", "--resume", "never", "--", "sh", "-c", script]);
        let mut command = Command::new(prefix[0]);
        command.args(&prefix[1..]).arg(inner.get_program()).args(inner.get_args());
        set_variables(&mut command, &inner);
        let output = command.current_dir(sandbox.path()).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), expected, "{output:?}");
    }
}
