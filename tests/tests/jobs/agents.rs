//! How the launcher reacts to messages of agents. A program plays the agent, so that no GPU is needed.

use ckpt_run_tests::packs::unique_chunks;
use ckpt_run_tests::{Running, Sandbox, ckpt_run, programs, python};
use std::ffi::OsString;
use std::path::Path;

/// A library that can be preloaded and does nothing, since the program plays the agent.
pub fn harmless() -> &'static str {
    let places = ["/lib/x86_64-linux-gnu/libm.so.6", "/usr/lib64/libm.so.6", "/lib64/libm.so.6"];
    places.into_iter().find(|place| Path::new(place).is_file()).expect("the C library's mathematics")
}

fn start(sandbox: &Sandbox, interpose: &str) -> Running {
    start_named("job", sandbox, interpose, None)
}

fn start_named(name: &str, sandbox: &Sandbox, interpose: &str, fault: Option<&str>) -> Running {
    let argv: [OsString; 3] = ["--".into(), python().into(), programs().join("agent/played.py").into()];
    let mut command = sandbox.command(argv);
    command.env("CKPT_INTERPOSE", interpose).env("CKPT_VERBOSE", "1");
    // What the agent notes for the test is not put back.
    command.env("CKPT_FILES_EXCLUDE", "*");
    if let Some(fault) = fault {
        command.env("CKPT_FAULT", fault);
    }
    sandbox.start_command(name, command)
}

fn started(sandbox: &Sandbox) -> Running {
    until_ready(start(sandbox, harmless()), sandbox)
}

fn until_ready(mut job: Running, sandbox: &Sandbox) -> Running {
    job.until("the agent", || sandbox.path().join("ready").exists().then_some(()));
    job.until_answering(sandbox);
    job
}

/// An agent whose process has device memory.
fn started_with_memory(sandbox: &Sandbox, fault: Option<&str>) -> Running {
    write(sandbox, "memory", "what is on the GPU");
    until_ready(start_named("job", sandbox, harmless(), fault), sandbox)
}

fn ends_right(mut job: Running, sandbox: &Sandbox, what: &str) {
    sandbox.verify_all();
    write(sandbox, "go", "");
    assert_eq!(job.wait(), 0, "{what}: {}", job.said());
    assert_eq!(sandbox.read("log"), "started\npass\n", "{what}: {}", job.said());
}

fn write(sandbox: &Sandbox, name: &str, content: &str) {
    std::fs::write(sandbox.path().join(name), content).unwrap();
}

fn remove(sandbox: &Sandbox, name: &str) {
    std::fs::remove_file(sandbox.path().join(name)).unwrap();
}

#[test]
fn a_refusal_is_reported_and_the_job_continues() {
    let sandbox = Sandbox::new();
    let mut job = started(&sandbox);
    write(&sandbox, "quiesce", "managed memory (cuMemAllocManaged) cannot be saved: use cuMemAlloc");
    for _ in 0..2 {
        let output = sandbox.call(["checkpoint"]);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("the job cannot be saved as it is: process 10002 of the job"), "{said}");
        assert!(said.contains("(cuMemAllocManaged) cannot be saved: use cuMemAlloc"), "{said}");
        assert!(!said.contains("CRIU"), "it was not asked: {said}");
    }
    assert_eq!(sandbox.read("refused"), "1\n2\n", "once for each checkpoint");
    let status = sandbox.json(["status", "--json"]);
    assert_eq!(status[0]["failed"], 2);
    assert!(status[0]["last_failure"].as_str().unwrap().contains("cuMemAllocManaged"), "{status}");
    assert_eq!(job.said().matches("no snapshot this time").count(), 1, "{}", job.said());

    remove(&sandbox, "quiesce");
    write(&sandbox, "delay_s", "0.7");
    let id = job.checkpoint(&sandbox);
    let stall_s = sandbox.json(["show", &id, "--json"])["stall_s"].as_f64().unwrap();
    assert!((0.7..300.0).contains(&stall_s), "until the agent is back: {stall_s}");
    write(&sandbox, "go", "");
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert_eq!(sandbox.read("log"), "started\npass\n");
}

#[test]
fn lost_gpu_state_ends_the_job_and_its_snapshot_is_good() {
    let sandbox = Sandbox::new();
    let mut job = started(&sandbox);
    write(&sandbox, "lost", "GPU state is gone: the driver said 999");
    let id = job.checkpoint(&sandbox);
    assert_eq!(job.wait(), 125, "{}", job.said());
    let said = job.said();
    assert!(said.contains("the job was ended because its GPU state was lost (process 10002"), "{said}");
    assert!(said.contains("GPU state is gone: the driver said 999"), "{said}");
    assert!(said.contains(&format!("The snapshot {id} is good: run the same command again")), "{said}");

    // The resume loses the GPU state too, and is not retried.
    let mut job = start(&sandbox, harmless());
    assert_eq!(job.wait(), 125, "{}", job.said());
    let said = job.said();
    assert!(
        said.contains(&format!("the snapshot {id} is intact, but the job's GPU state could not")),
        "{said}"
    );
    assert_eq!(said.matches("the driver said 999").count(), 1, "the first run's are rolled back: {said}");

    // A detached process waits for the launcher, even if the interposer is off now.
    remove(&sandbox, "lost");
    let mut job = start(&sandbox, "off");
    // A process that ends right after its return may not be counted.
    job.until_answering(&sandbox);
    assert!(job.said().contains("0 processes continued, 1 were restored"), "{}", job.said());
    write(&sandbox, "go", "");
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert_eq!(sandbox.read("log"), "started\npass\n");
}

/// A process whose agent does not come back after a resume hangs for ever: the resume has failed, and says so.
#[test]
fn a_resume_without_an_agent_has_failed() {
    let sandbox = Sandbox::new();
    let mut job = started(&sandbox);
    let id = job.checkpoint(&sandbox);
    job.kill_everything();
    write(&sandbox, "absent", "");
    let argv: [OsString; 3] = ["--".into(), python().into(), programs().join("agent/played.py").into()];
    let mut command = sandbox.command(argv);
    command.env("CKPT_INTERPOSE", harmless()).env("CKPT_FILES_EXCLUDE", "*").env("CKPT_FREEZE_TIMEOUT", "2s");
    let mut job = sandbox.start_command("again", command);
    assert_eq!(job.wait(), 125, "{}", job.said());
    for said in ["its interposer has not connected to ", &format!("the snapshot {id} is intact")] {
        assert!(job.said().contains(said), "{said}: {}", job.said());
    }
    assert!(!job.said().contains("resumed from snapshot"), "{}", job.said());
    remove(&sandbox, "absent");
    let mut job = start(&sandbox, harmless());
    job.until_answering(&sandbox);
    ends_right(job, &sandbox, "with the agent");
}

#[test]
fn device_memory_is_saved_in_a_mirror() {
    let sandbox = Sandbox::new();
    let mut job = started_with_memory(&sandbox, None);
    let ids = [job.checkpoint(&sandbox), job.checkpoint(&sandbox)];
    assert_eq!(sandbox.read("deliveries"), "parked\nparked\n");
    let status = sandbox.json(["status", "--json"])[0]["device_memory"].clone();
    assert_eq!((&status["processes"], &status["bytes"]), (&1.into(), &19.into()), "{status}");
    assert_eq!((&status["parked_bytes"], &status["copied_back_bytes"]), (&19.into(), &0.into()), "{status}");
    let said = sandbox.ok(["status"]);
    assert!(said.contains("device memory    19 B in 1 process, 1 B changed"), "{said}");
    assert!(said.contains("it stayed on the GPU meanwhile"), "{said}");

    let shown = sandbox.ok(["show", &ids[1]]);
    assert!(shown.contains("process 10002: 19 B in 1 region, 1 B changed"), "{shown}");
    assert!(shown.contains("1 context, 2 streams, 3 events, 4 modules, 5 graphs, 1 allocation"), "{shown}");
    assert!(shown.contains("0x7f0000000000  19 B"), "{shown}");
    let shown = sandbox.json(["show", &ids[1], "--json"]);
    assert_eq!(shown["version"], 3);
    assert_eq!(shown["gpu"][0]["memory"], "gpu/10002.mem");
    assert_eq!(shown["gpu_processes"][0]["regions"][0]["offset"], 3 << 20, "{shown}");

    job.kill_everything();
    remove(&sandbox, "ready");
    let job = started(&sandbox);
    assert_eq!(sandbox.read("deliveries"), "parked\nparked\nmirror\n");
    assert!(job.said().contains(&format!("resumed from snapshot {}", ids[1])), "{}", job.said());
    job.checkpoint(&sandbox);
    let mirrors = sandbox.read("mirrors");
    let numbers: Vec<_> = mirrors.lines().collect();
    assert_eq!(numbers.len(), 3);
    assert!(numbers.iter().all(|number| *number == numbers[0]), "it is the same one all along: {numbers:?}");
    ends_right(job, &sandbox, "mirror");
}

#[test]
fn damaged_device_memory_is_found_and_the_older_snapshot_taken() {
    let sandbox = Sandbox::new();
    let mut job = started_with_memory(&sandbox, None);
    let ids = [job.checkpoint(&sandbox), job.checkpoint(&sandbox)];
    job.kill_everything();
    let [place] = &unique_chunks(&sandbox, &ids[1], "gpu/10002.mem")[..] else { panic!("one chunk") };
    let mut content = std::fs::read(&place.pack).unwrap();
    let memory = &mut content[place.offset..place.offset + place.bytes];
    assert_eq!(&memory[3 << 20..], b"what is on the GPU.");
    *memory.last_mut().unwrap() ^= 1;
    std::fs::write(&place.pack, content).unwrap();
    assert_eq!(sandbox.call(["verify", &ids[1]]).status.code(), Some(1));
    remove(&sandbox, "ready");
    // Under another name, so that its log is not rolled back with the first one's.
    let job = until_ready(start_named("second", &sandbox, harmless(), None), &sandbox);
    let said = job.said();
    assert!(said.contains(&format!("the snapshot {} is damaged: gpu/10002.mem", ids[1])), "{said}");
    assert!(said.contains(&format!("resumed from snapshot {}", ids[0])), "{said}");
    sandbox.ok(["rm", &ids[1]]);
    ends_right(job, &sandbox, "damage");
}

/// The second checkpoint meets the fault.
#[test]
fn the_launcher_is_killed_while_it_prepares_and_delivers() {
    for point in ["prepare", "staged", "cut", "delivered"] {
        let sandbox = Sandbox::new();
        let mut job = started_with_memory(&sandbox, Some(&format!("{point}@2=kill")));
        let id = job.checkpoint(&sandbox);
        assert!(!sandbox.call(["checkpoint"]).status.success(), "{point}");
        job.wait_status();
        assert_eq!(sandbox.snapshots(), [id.as_str()], "{point}");
        remove(&sandbox, "ready");
        let job = started(&sandbox);
        assert!(job.said().contains(&format!("resumed from snapshot {id}")), "{point}: {}", job.said());
        job.checkpoint(&sandbox);
        ends_right(job, &sandbox, point);
    }
}

#[test]
fn a_failed_preparation_leaves_the_job_running() {
    for (point, unstaged) in [("prepare", ""), ("staged", "1\n"), ("cut", "1\n")] {
        let sandbox = Sandbox::new();
        let mut job = started_with_memory(&sandbox, Some(&format!("{point}@1=error")));
        let output = sandbox.call(["checkpoint"]);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{point}: {said}");
        assert!(said.contains(&format!("injected at {point}")), "{said}");
        job.until("the agent to let go", || (sandbox.read("unstaged") == unstaged).then_some(()));
        assert_eq!(sandbox.read("deliveries"), "", "{point}: it was not sent away");
        job.checkpoint(&sandbox);
        ends_right(job, &sandbox, point);
    }
}

#[test]
fn a_rank_is_parked_for_a_checkpoint_and_released_after_it_and_after_a_resume() {
    let sandbox = Sandbox::new();
    write(&sandbox, "rank", "");
    let mut job = started(&sandbox);
    let id = job.checkpoint(&sandbox);
    job.until("the release", || (sandbox.read("orders") == "count\nreach\nrelease\n").then_some(()));
    let shown = sandbox.json(["show", &id, "--json"]);
    assert_eq!((&shown["version"], &shown["cut"]["attempts"]), (&4.into(), &1.into()), "{shown}");
    let attempt = "all ranks of NCCL at the same step after";
    assert!(sandbox.ok(["show", &id]).contains(attempt) && sandbox.ok(["status"]).contains(attempt));

    job.kill_everything();
    remove(&sandbox, "ready");
    remove(&sandbox, "orders");
    let mut job = started(&sandbox);
    job.until("the release", || (sandbox.read("orders") == "release\n").then_some(()));
    ends_right(job, &sandbox, "cut");
}

#[test]
fn a_job_that_is_not_cut_runs_on() {
    let sandbox = Sandbox::new();
    write(&sandbox, "rank", "");
    write(&sandbox, "silent", "");
    let mut command = sandbox.command(["--freeze-timeout", "1s", "--"]);
    command.arg(python()).arg(programs().join("agent/played.py"));
    command.env("CKPT_INTERPOSE", harmless()).env("CKPT_FILES_EXCLUDE", "*");
    let mut job = until_ready(sandbox.start_command("job", command), &sandbox);
    let output = sandbox.call(["checkpoint"]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("did not reach a common step in 1 attempt: process 10002 of the job"), "{said}");
    assert!(said.contains("has not answered (given up after "), "{said}");
    job.until("the release", || (sandbox.read("orders") == "count\nrelease\n").then_some(()));
    assert_eq!(sandbox.json(["status", "--json"])[0]["failed"], 1);
    ends_right(job, &sandbox, "no cut");
}

/// The final snapshot needs the time.
#[test]
fn a_preemption_ends_the_wait_for_a_cut() {
    let sandbox = Sandbox::new();
    write(&sandbox, "rank", "");
    write(&sandbox, "silent", "");
    let mut job = started(&sandbox);
    let mut waiting = sandbox.command(["checkpoint"]).stderr(std::process::Stdio::null()).spawn().unwrap();
    job.until("the cut", || (sandbox.read("orders") == "count\n").then_some(()));
    remove(&sandbox, "silent");
    job.signal(rustix::process::Signal::TERM);
    assert_eq!(job.wait(), 75, "{}", job.said());
    assert!(!waiting.wait().unwrap().success());
    assert_eq!(sandbox.read("orders"), "count\nrelease\ncount\nreach\n");
    assert_eq!(sandbox.snapshots().len(), 1);
}

#[test]
fn a_connection_lost_on_delivery_is_reestablished() {
    let sandbox = Sandbox::new();
    let job = started_with_memory(&sandbox, Some("delivered@1=error"));
    job.checkpoint(&sandbox);
    assert_eq!(sandbox.read("lost_connections"), "\n");
    // The launcher still has what the process has parked.
    assert_eq!(sandbox.read("deliveries"), "parked\n");
    ends_right(job, &sandbox, "delivered");
}

#[test]
fn a_job_has_the_limit_of_open_files_that_the_launcher_was_started_with() {
    let sandbox = Sandbox::new();
    let limit = "ulimit -Sn > limit; ulimit -Hn >> limit; while [ ! -e go ]; do sleep 0.01; done";
    let run = format!("ulimit -n 900; ulimit -Sn 800; exec '{}' sh -c '{limit}'", ckpt_run().display());
    let named = sandbox.command([""; 0]);
    let mut command = std::process::Command::new("/bin/sh");
    command.args(["-c", &run]).current_dir(sandbox.path()).env("CKPT_INTERPOSE", harmless());
    command.envs(named.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let mut job = sandbox.start_command("job", command);
    job.until("the job", || (sandbox.read("limit") == "800\n900\n").then_some(()));
    let own = std::fs::read_to_string(format!("/proc/{}/limits", job.pid())).unwrap();
    let own = own.lines().find(|line| line.starts_with("Max open files")).unwrap();
    assert_eq!(own.split_whitespace().skip(3).take(2).collect::<Vec<_>>(), ["900", "900"]);
    write(&sandbox, "go", "");
    assert_eq!(job.wait(), 0, "{}", job.said());
}
