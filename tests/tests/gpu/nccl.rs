//! Ranks that work together with NCCL (simnccl): saved at a consistent cut, killed at random moments, resumed, with the
//! same output as if nothing had happened.

use std::fs;
use std::time::{Duration, Instant};

use ckpt_run_tests::gpu::{built, cuda_program, libcuda_dir};
use ckpt_run_tests::{Running, Sandbox, rng_of_run, schema, torchrun_with_ranks, torchrun_with_two_ranks};
use ckpt_test_skip::is_full_run_or_skip;

use crate::gpu_job::{GpuJob, few_kills, kills, library};

/// Nothing of the memory below NCCL is shared.
const SOCKETS: &[(&str, &str)] = &[("CKPT_NCCL", "sockets")];
/// Ranks have each other's device memory by descriptors of cuMemExportToShareableHandle.
const P2P: &[(&str, &str)] = &[("CKPT_NCCL", "p2p")];
/// Memory of the host by such descriptors.
const HOST: &[(&str, &str)] = &[("NCCL_P2P_DISABLE", "1"), ("NCCL_CUMEM_HOST_ENABLE", "1")];
/// By handles of cuIpcGetMemHandle.
const LEGACY: &[(&str, &str)] = &[("CKPT_NCCL", "p2p"), ("NCCL_CUMEM_ENABLE", "0")];
/// As NCCL chooses: with multicast objects (NVLS), since each rank has a device of its own.
const AUTO: &[(&str, &str)] = &[];

/// Nothing below NCCL is shared, also without ckpt-run, and parking fails: device memory is allocated again and copied back.
const COPIED_BACK: &[(&str, &str)] = &[
    ("NCCL_P2P_DISABLE", "1"),
    ("NCCL_SHM_DISABLE", "1"),
    ("NCCL_NVLS_ENABLE", "0"),
    ("SIMCUDA_FAULT", "cuMemExportToShareableHandle:1+=CUDA_ERROR_NOT_SUPPORTED"),
];

/// Steps of a job that ends when it is told to.
const MANY: u32 = 100_000;

/// So many ranks of `ranks.c`, each with a device of its own. The job lasts longer than all kills take; steps of more ranks
/// take longer.
fn ranks(count: u32, variables: &[(&str, &str)]) -> GpuJob {
    ranks_with(count, variables, kills() * (20 + 60 / count))
}

fn ranks_with(count: u32, variables: &[(&str, &str)], steps: u32) -> GpuJob {
    ranks_of("ranks.c", count, variables, steps)
}

fn ranks_of(program: &str, count: u32, variables: &[(&str, &str)], steps: u32) -> GpuJob {
    GpuJob::new(|gpu, sandbox| {
        let mut command = gpu.command(gpu.compile_with_nccl(&cuda_program(program), sandbox.path()));
        command.args([steps.to_string(), count.to_string()]).env("SIMCUDA_DEVICES", count.to_string());
        command.env("SIMCUDA_JITTER", "1").envs(variables.iter().copied());
        command
    })
}

/// What the tests below say of the memory between ranks is so under ckpt-run too.
#[test]
fn ranks_share_the_memory_that_these_tests_are_about() {
    for (variables, kind, has_multicast) in [
        (SOCKETS, "Socket", false),
        (COPIED_BACK, "Socket", false),
        (P2P, "Mapped", false),
        (HOST, "HostMapped", false),
        (LEGACY, "Legacy", false),
        (AUTO, "Mapped", true),
    ] {
        let mut job = ranks_with(2, variables, 2);
        job.program.env("NCCL_DEBUG", "INFO");
        let mut running = job.start();
        assert_eq!(running.wait(), 0, "{}", running.said());
        let said = running.said();
        for rank in 0..2 {
            assert!(said.contains(&format!("simnccl: rank {rank} of 2: {kind}\n")), "{variables:?}: {said}");
            let joins = said.contains(&format!("simnccl: rank {rank} of 2: a multicast object\n"));
            assert_eq!(joins, has_multicast, "{variables:?}: {said}");
        }
    }
}

/// Each rank has a communicator of its own: nothing is shared, and there is no multicast object, which a checkpoint would
/// have to take down.
#[test]
fn a_rank_alone_shares_nothing_and_survives() {
    let mut job = ranks(1, AUTO);
    job.program.env("NCCL_DEBUG", "INFO");
    job.survives(few_kills());
    let said = job.sandbox.read("job.err");
    assert!(said.contains("simnccl: rank 0 of 1: "), "{said}");
    assert!(!said.contains("multicast object"), "{said}");
}

#[test]
fn two_ranks_over_sockets_survive() {
    ranks(2, SOCKETS).survives(few_kills());
}

#[test]
fn two_ranks_that_share_host_memory_survive() {
    ranks(2, HOST).survives(few_kills());
}

#[test]
fn four_ranks_that_share_device_memory_survive() {
    ranks(4, P2P).survives(few_kills());
}

#[test]
fn two_ranks_that_share_multicast_objects_survive() {
    ranks(2, AUTO).survives(few_kills());
}

#[test]
fn four_ranks_that_share_multicast_objects_survive() {
    ranks(4, AUTO).survives(few_kills());
}

#[test]
fn eight_ranks_that_share_device_memory_by_ipc_survive() {
    ranks(8, LEGACY).survives(few_kills());
}

/// Ranks that register windows and buffers all the time, and are killed in the middle of that too.
fn windows(count: u32, variables: &[(&str, &str)], kills: u32) -> GpuJob {
    ranks_of("windows.c", count, variables, kills * (20 + 60 / count))
}

#[test]
fn two_ranks_with_windows_survive() {
    windows(2, AUTO, kills()).survives(few_kills());
}

/// Ranks that cannot map each other's memory: a registration is a step that has no effect.
#[test]
fn two_ranks_with_windows_over_sockets_survive() {
    windows(2, SOCKETS, kills()).survives(few_kills());
}

#[test]
fn four_ranks_with_windows_survive_kills_of_each_kind() {
    if !is_full_run_or_skip() {
        return;
    }
    windows(4, P2P, MANY).survives_kills_of_each_kind(kills());
}

#[test]
fn two_ranks_with_windows_whose_memory_is_copied_back_survive_kills_of_each_kind() {
    if !is_full_run_or_skip() {
        return;
    }
    windows(2, COPIED_BACK, MANY).survives_kills_of_each_kind(kills());
}

/// One process has all ranks (ncclCommInitAll), in groups.
#[test]
fn ranks_in_one_process_survive() {
    for variables in [AUTO, COPIED_BACK] {
        ranks_of("one_process.c", 3, variables, 60 * kills()).survives(few_kills());
    }
}

/// Ranks go on without two others, which keep their communicators: what they did not do together does not count.
#[test]
fn ranks_that_leave_others_out_survive() {
    for variables in [AUTO, COPIED_BACK] {
        ranks_of("leaves.c", 4, variables, 60 * kills()).survives(few_kills());
    }
}

/// A rank joins the others, whose communicator is replaced by one of all.
#[test]
fn ranks_that_others_join_survive() {
    for variables in [AUTO, COPIED_BACK] {
        ranks_of("joins.c", 3, variables, 60 * kills()).survives(few_kills());
    }
}

/// Ranks wait in calls that return only when others have made them.
#[test]
fn ranks_that_connect_all_the_time_survive() {
    ranks_of("connects.c", 4, P2P, 25 * kills()).survives(few_kills());
}

/// The launcher resumes the job when one of its ranks has been killed.
#[test]
fn a_killed_rank_is_resumed_with_all_others() {
    ranks(3, P2P).is_restarted(3);
}

/// A rank, the job's init, the launcher: each is killed so often, at random moments.
fn survive_kills_of_each_kind(count: u32, variables: &[(&str, &str)]) {
    if !is_full_run_or_skip() {
        return;
    }
    ranks_with(count, variables, MANY).survives_kills_of_each_kind(kills());
}

#[test]
fn two_ranks_survive_kills_of_each_kind() {
    survive_kills_of_each_kind(2, AUTO);
}

#[test]
fn two_ranks_whose_memory_is_copied_back_survive_kills_of_each_kind() {
    survive_kills_of_each_kind(2, COPIED_BACK);
}

#[test]
fn four_ranks_survive_kills_of_each_kind() {
    survive_kills_of_each_kind(4, P2P);
}

#[test]
fn four_ranks_whose_memory_is_copied_back_survive_kills_of_each_kind() {
    survive_kills_of_each_kind(4, COPIED_BACK);
}

#[test]
fn eight_ranks_survive_kills_of_each_kind() {
    survive_kills_of_each_kind(8, AUTO);
}

#[test]
fn eight_ranks_whose_memory_is_copied_back_survive_kills_of_each_kind() {
    survive_kills_of_each_kind(8, COPIED_BACK);
}

/// A second copy of NCCL, with communicators and groups of its own.
#[test]
fn two_ranks_with_two_copies_of_nccl_survive() {
    let job = GpuJob::new(|gpu, sandbox| {
        let copy = sandbox.path().join("libnccl-copy.so");
        fs::copy(libcuda_dir().join("libnccl.so.2"), &copy).expect("a copy of simnccl");
        let mut command = gpu.command(gpu.compile_with_nccl(&cuda_program("copies.c"), sandbox.path()));
        command.arg((60 * kills()).to_string()).arg(copy);
        command.env("SIMCUDA_DEVICES", "2").env("SIMCUDA_JITTER", "1").envs(P2P.iter().copied());
        command
    });
    job.survives(few_kills());
}

#[test]
fn ranks_are_preempted() {
    ranks(2, P2P).is_preempted(3);
}

#[test]
fn train_mlp_with_two_ranks_survives() {
    let job = GpuJob::new(|gpu, _| {
        let mut command = gpu.command(built("train-mlp"));
        command.args(["--ranks", "2", "--steps", "150"]).env("SIMCUDA_DEVICES", "2");
        command.envs(P2P.iter().copied());
        command
    });
    job.slowed_by(["--rest-ms", "40"]).survives(few_kills());
}

/// In each sum the order of four ranks matters, since it is one of floating-point numbers.
#[test]
fn train_mlp_with_four_ranks_survives() {
    let job = GpuJob::new(|gpu, _| {
        let mut command = gpu.command(built("train-mlp"));
        command.args(["--ranks", "4", "--steps", "60"]).env("SIMCUDA_DEVICES", "4");
        command
    });
    job.slowed_by(["--rest-ms", "40"]).survives(1);
}

/// torchrun starts the ranks, and prints what they print.
#[test]
fn train_mlp_under_torchrun_survives() {
    let job = GpuJob::new(|gpu, _| {
        let argv = torchrun_with_two_ranks();
        let mut command = gpu.command(&argv[0]);
        command.args(&argv[1..]).arg("--no_python").arg(built("train-mlp"));
        command.args(["--ranks", "2", "--steps", "150"]).env("SIMCUDA_DEVICES", "2");
        command.envs(P2P.iter().copied());
        command
    });
    job.slowed_by(["--rest-ms", "40"]).survives(1);
}

/// Rank 0 waits on the host for rank 1, which is parked: there is no common step. The job runs on, and the message names
/// who waits for what.
#[test]
fn ranks_that_wait_on_the_host_for_parked_ones_run_on_unharmed() {
    let job = GpuJob::new(|gpu, sandbox| {
        let mut command = gpu.command(gpu.compile_with_nccl(&cuda_program("waits.c"), sandbox.path()));
        command.arg("10").env("SIMCUDA_DEVICES", "4").envs(SOCKETS.iter().copied());
        command
    });
    let of_job = |name| job.sandbox.path().join(name);
    fs::write(of_job("hold"), "").expect("the sandbox is writable");
    let mut running = job.sandbox.start_command("job", job.command(library()));
    running.until_answering(&job.sandbox);
    running.until("a step that rank 0 cannot get to", || of_job("begun").exists().then_some(()));
    // A machine that stands still for a minute leaves the ranks no time to say where they are: looked at again.
    let said = running.until("a checkpoint that finds out who waits", || {
        let output = job.sandbox.command(["checkpoint"]).output().expect("ckpt-run runs");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{said}");
        let took_s = said.split_once("(given up after ").and_then(|(_, after)| after.split_once('s'));
        let took_s: f64 = took_s.and_then(|(took_s, _)| took_s.parse().ok()).expect("how long it took");
        (took_s < 59.0).then_some(said)
    });
    fs::remove_file(of_job("hold")).expect("the file is there");
    assert!(
        said.contains("in 3 attempts")
            && said.contains(" steps as rank 0 of communicator ")
            && said.contains("waits after ncclAllReduce")
            && said.contains("is parked before nccl"),
        "{said}"
    );
    assert_eq!(running.wait(), 0, "{}", running.said());
    assert_eq!(job.output(), job.unbroken());
}

/// Three ranks under torchrun that use NCCL, and gloo and a store between them. Some of their steps have a part in which no
/// cut is possible.
fn with_the_host_too(variables: &[(&str, &str)]) -> GpuJob {
    let mut job = GpuJob::new(|gpu, _| {
        let argv = torchrun_with_ranks(3);
        let mut command = gpu.command(&argv[0]);
        command.args(&argv[1..]).arg(cuda_program("host_too.py")).args([&*MANY.to_string(), "steps.txt"]);
        command.env("SIMCUDA_DEVICES", "3").env("PYTHONDONTWRITEBYTECODE", "1");
        command.envs(variables.iter().copied());
        command
    });
    job.output = "steps.txt";
    job
}

/// Number of attempts that the cut of a snapshot took.
fn attempts_of(id: &str, sandbox: &Sandbox) -> u64 {
    let shown = sandbox.json(["show", id, "--json"]);
    shown["cut"]["attempts"].as_u64().expect("a snapshot with a cut")
}

/// Takes a snapshot while rank 0 is in the part in which no cut is possible, until its being parked has been noticed.
fn checkpoint_in_vain_first(job: &GpuJob, running: &mut Running) -> u64 {
    let of_job = |name| job.sandbox.path().join(name);
    fs::write(of_job("hold"), "").expect("the sandbox is writable");
    running.until("the part without a cut", || of_job("begun").exists().then_some(()));
    let attempts = attempts_of(&running.checkpoint(&job.sandbox), &job.sandbox);
    assert!(attempts == 1 || !of_job("begun").exists(), "rank 0 has been parked");
    attempts
}

/// The first attempt ends at its deadline, as the others wait on the host for rank 0, which is parked. A later one finds a
/// cut, and the snapshot is as good as any other.
fn is_saved_in_a_later_attempt(variables: &[(&str, &str)]) {
    const LONGEST_LIFE_MS: u64 = 1000;
    let job = with_the_host_too(variables);
    job.slow_down();
    let mut running = job.start();
    running.until_answering(&job.sandbox);
    // On a machine with much load, a collective takes long that nobody has parked.
    let is_retried = (0..3).any(|_| checkpoint_in_vain_first(&job, &mut running) > 1);
    assert!(is_retried, "the part without a cut was none\n{}", running.said());
    running.kill_everything();
    let mut random = rng_of_run();
    for _ in 0..few_kills() {
        let mut command = job.command(library());
        command.env("CKPT_INTERVAL", "250ms");
        let mut running = job.sandbox.start_command("job", command);
        kill_after(&mut running, Duration::from_millis(random.u64(..LONGEST_LIFE_MS)));
    }
    ends_when_told(&job);
}

/// Kills the job after this time.
fn kill_after(running: &mut Running, life: Duration) {
    let death = Instant::now() + life;
    while Instant::now() < death {
        assert!(!running.has_ended(), "it was to be killed in the middle\n{}", running.said());
        std::thread::sleep(Duration::from_millis(1));
    }
    running.kill_everything();
}

#[test]
fn ranks_that_wait_on_the_host_now_and_then_are_saved_in_a_later_attempt() {
    is_saved_in_a_later_attempt(P2P);
}

#[test]
fn ranks_over_sockets_that_wait_on_the_host_now_and_then_are_saved_in_a_later_attempt() {
    if !is_full_run_or_skip() {
        return;
    }
    is_saved_in_a_later_attempt(SOCKETS);
}

/// So many snapshots that took more than one attempt, by chance, at short intervals. The job is killed at random moments
/// after a new snapshot.
#[test]
fn ranks_that_wait_on_the_host_survive_kills_at_short_intervals() {
    const RETRIED: usize = 2;
    const LONGEST_LIFE_MS: u64 = 15_000;
    if !is_full_run_or_skip() {
        return;
    }
    let job = with_the_host_too(P2P);
    let mut random = rng_of_run();
    job.slow_down();
    job.start_and_save().kill_everything();
    let retried = || {
        let journal = fs::read_to_string(job.sandbox.job_dir().join("journal.jsonl")).expect("a journal");
        journal.matches(" attempts), stored").count()
    };
    let mut lives = 0;
    while retried() < RETRIED {
        let mut command = job.command(library());
        command.env("CKPT_INTERVAL", "250ms");
        let newest = job.sandbox.snapshots().pop();
        let mut running = job.sandbox.start_command("job", command);
        running.until("a new snapshot", || (job.sandbox.snapshots().pop() > newest).then_some(()));
        kill_after(&mut running, Duration::from_millis(random.u64(..LONGEST_LIFE_MS)));
        lives += 1;
    }
    println!("{lives} kills, {} snapshots", job.sandbox.snapshots().len());
    ends_when_told(&job);
}

fn ends_when_told(job: &GpuJob) {
    let steps_at = job.program.get_args().position(|argument| argument == &*MANY.to_string());
    job.ends_when_told(steps_at.expect("the number of steps"));
}

/// After a checkpoint, a GPU does not run the kernels of two processes in turns any more: the ranks would wait for each
/// other for ever.
#[test]
fn ranks_on_one_gpu_are_refused_and_run_on() {
    let job = GpuJob::new(|gpu, _| {
        let mut command = gpu.command(built("train-mlp"));
        command.args(["--ranks", "2", "--steps", "200", "--rest-ms", "40"]).env("SIMCUDA_DEVICES", "1");
        command.env("NCCL_MULTI_RANK_GPU_ENABLE", "1");
        command
    });
    let mut running = job.sandbox.start_command("job", job.command(library()));
    running.until_answering(&job.sandbox);
    running.until("some steps", || (job.output().lines().count() >= 3).then_some(()));
    let output = job.sandbox.command(["checkpoint"]).output().expect("ckpt-run runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("ranks of NCCL on one GPU (GPU-"), "{said}");
    assert_eq!(running.wait(), 0, "{}", running.said());
    assert_eq!(job.output(), job.unbroken());
}

/// Three ranks of `lags.c`, of which the last one lets the others wait as long as the file `hold` is there.
fn lagging() -> GpuJob {
    let job = GpuJob::new(|gpu, sandbox| {
        let mut command = gpu.command(gpu.compile_with_nccl(&cuda_program("lags.c"), sandbox.path()));
        // With sockets, threads of simnccl use the CPU all the time: a rank that does nothing seems to work.
        command.args(["12", "3"]).env("SIMCUDA_DEVICES", "3").envs(P2P.iter().copied());
        command
    });
    fs::write(job.sandbox.path().join("hold"), "").expect("the sandbox is writable");
    job
}

/// A rank that lets others wait is named, with what it does meanwhile, until it goes on.
#[test]
fn a_rank_that_lets_others_wait_is_named_until_it_goes_on() {
    let job = lagging();
    let of_job = |name| job.sandbox.path().join(name);
    fs::write(of_job("end"), "").expect("the sandbox is writable");
    let mut command = job.command(library());
    command.env("CKPT_FAULT_LATE_RANK_MS", "2000");
    let mut running = job.sandbox.start_command("job", command);
    running.until_answering(&job.sandbox);
    let late = || job.sandbox.json(["status", "--json"])[0]["late_ranks"].clone();
    let of_rank_2 =
        serde_json::json!({"rank": 2, "waiting": [0, 1], "call": "ncclAllReduce", "doing": "nothing"});
    running.until("a late rank", || {
        let late = late();
        of_rank_2.as_object()?.iter().all(|(name, value)| late[0][name] == *value).then_some(())
    });
    schema::check("status", &job.sandbox.json(["status", "--json"]));
    running.until("the late rank in words", || {
        let status = job.sandbox.ok(["status"]);
        let is_named = status.contains("late rank        rank 2 (process ");
        (is_named && status.contains("; ranks 0-1 wait in it. It does nothing")).then_some(())
    });
    fs::write(of_job("busy"), "").expect("the sandbox is writable");
    running.until("a slow rank", || (late()[0]["doing"] == "gpu-work").then_some(()));
    fs::remove_file(of_job("hold")).expect("the file is there");
    running.until("no late rank", || late().as_array().is_some_and(Vec::is_empty).then_some(()));
    fs::remove_file(of_job("end")).expect("the file is there");
    assert_eq!(running.wait(), 0, "{}", running.said());
    assert_eq!(job.output(), job.unbroken());
    let explained = job.sandbox.ok(["explain"]);
    assert!(
        explained.contains("late rank    rank 2 ") && explained.contains("rank 2 does not hang any more"),
        "{explained}"
    );
    schema::check("explain", &job.sandbox.json(["explain", "--json"]));
    let report = job.sandbox.json(["report", "--json"]);
    schema::check("report", &report);
    assert!(report["late_ranks"][0]["what"].to_string().contains("rank 2 "), "{report}");
}

#[test]
fn a_job_with_a_rank_that_hangs_is_restarted() {
    let job = lagging();
    let of_job = |name| job.sandbox.path().join(name);
    // The ranks wait before that step until the job is saved.
    fs::write(of_job("early"), "").expect("the sandbox is writable");
    let mut command = job.command(library());
    command.env("CKPT_FAULT_LATE_RANK_MS", "3000").env("CKPT_HANG_TIMEOUT", "auto");
    command.env("CKPT_MAX_RESTARTS", "100");
    let mut running = job.sandbox.start_command("job", command);
    running.until_answering(&job.sandbox);
    running
        .until("the step after which the ranks wait", || (job.output().lines().count() == 2).then_some(()));
    let id = running.checkpoint(&job.sandbox);
    schema::check("show", &job.sandbox.json(["show", &id, "--json"]));
    schema::check("status", &job.sandbox.json(["status", "--json"]));
    fs::remove_file(of_job("early")).expect("the file is there");
    running.until("a restart", || {
        let status = job.sandbox.json(["status", "--json"]);
        status[0]["restarts"].as_u64().filter(|restarts| *restarts > 0)
    });
    fs::remove_file(of_job("hold")).expect("the file is there");
    assert_eq!(running.wait(), 0, "{}", running.said());
    assert!(running.said().contains("resumed from snapshot"), "{}", running.said());
    // What was said before is rolled back with the output of the job.
    assert!(running.said().contains("it hung: rank 2 (process "), "{}", running.said());
    assert_eq!(job.output(), job.unbroken());
    let sessions = job.sandbox.json(["report", "--json"])["sessions"].clone();
    assert_eq!(sessions[0]["ending"], "hung", "{sessions}");
}
