//! Programs with GPU state under ckpt-run: saved, killed at random moments, resumed, with the same output as if
//! nothing had happened.

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::time::{Duration, Instant};

use crate::gpu_job::{GpuJob, few_kills, kills, library, steps};
use ckpt_run_tests::file_systems::{in_namespaces, inner_directory};
use ckpt_run_tests::gpu::{Gpu, built, cuda_program, example, libcuda_dir};
use ckpt_run_tests::{Running, Sandbox, python, until};

/// The example, which prints a line every ten rounds.
fn legacy_job(rounds: u32, rest_ms: u32) -> GpuJob {
    let program = |gpu: &Gpu, sandbox: &Sandbox| {
        let mut command = gpu.command(gpu.compile(&example("legacy-job/legacy-job.c"), sandbox.path()));
        command.args([rounds.to_string(), "200".into()]);
        command
    };
    GpuJob::new(program).slowed_by([rest_ms.to_string()])
}

#[test]
fn legacy_job_survives() {
    legacy_job(450, 15).survives(20);
}

/// Between the moment in which a process says how much memory its mirror needs and the copy, other memory is used.
#[test]
fn a_program_that_allocates_all_the_time_is_saved_each_time() {
    const CHECKPOINTS: usize = 8;
    let job = GpuJob::new(|gpu, sandbox| {
        let mut command = gpu.command(gpu.compile(&cuda_program("churns.c"), sandbox.path()));
        command.arg("5000").env("CKPT_MIRROR", "all");
        command
    });
    let mut running = job.start();
    running.until_answering(&job.sandbox);
    let mut is_slow = false;
    for _ in 0..CHECKPOINTS {
        // The job must not end before it is killed.
        if !is_slow && job.output().lines().count() > 2000 {
            job.slow_down();
            is_slow = true;
        }
        running.checkpoint(&job.sandbox);
    }
    running.kill_everything();
    if is_slow {
        job.full_speed();
    }
    let mut running = job.start();
    assert_eq!(running.wait(), 0, "{}", running.said());
    assert!(running.said().contains("resumed from snapshot"), "{}", running.said());
    assert_eq!(job.output(), job.unbroken());
}

/// The processes in the snapshot look for the launcher where it was when they were started.
#[test]
fn a_program_is_resumed_from_a_moved_store() {
    let mut job = GpuJob::in_c("vmm.c");
    job.slow_down();
    job.start_and_save().kill_everything();
    for place in ["moved", "moved-again"] {
        let to = job.sandbox.path().join(place);
        std::fs::rename(&job.sandbox.store, &to).expect("it is moved");
        job.sandbox.store = to;
        // The second snapshot is that of a resumed job.
        let mut running = job.start();
        running.until_answering(&job.sandbox);
        job.until_more_lines(&mut running, 2);
        running.checkpoint(&job.sandbox);
        running.kill_everything();
    }
    job.full_speed();
    let mut running = job.start();
    assert_eq!(running.wait(), 0, "{}", running.said());
    assert!(running.said().contains("resumed from snapshot"), "{}", running.said());
    assert_eq!(job.output(), job.unbroken());
}

/// A resume of another job may hold the lock on the names of CRIU's links. The job uses its GPU until the lock is free.
#[test]
fn a_job_runs_while_its_checkpoint_waits_for_a_lock() {
    if inner_directory().is_none() {
        let sandbox = Sandbox::new();
        if let Err(why) =
            in_namespaces("jobs::a_job_runs_while_its_checkpoint_waits_for_a_lock", sandbox.path())
        {
            ckpt_test_skip::skip(why);
        }
        return;
    }
    let job = GpuJob::in_c("vmm.c");
    job.slow_down();
    let mut running = job.start_and_save();
    let lock = std::fs::File::options().write(true).open("/run/ckpt-run/names.lock").expect("the lock");
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).expect("it is free");
    let waiting = job.sandbox.command(["checkpoint"]).spawn().expect("ckpt-run runs");
    let is_dumping = || {
        let status = job.sandbox.json(["status", "--json"]);
        (status[0]["progress"]["phase"] == "dump").then_some(())
    };
    running.until("a checkpoint", is_dumping);
    job.until_more_lines(&mut running, 3);
    drop(lock);
    assert!(waiting.wait_with_output().expect("it ends").status.success(), "{}", running.said());
    running.kill_everything();
    job.full_speed();
    let mut running = job.start();
    assert_eq!(running.wait(), 0, "{}", running.said());
    assert_eq!(job.output(), job.unbroken());
}

#[test]
fn programs_are_preempted() {
    GpuJob::in_c("vmm.c").is_preempted(4);
    GpuJob::in_c("pools.c").is_preempted(2);
}

#[test]
fn a_program_is_restarted_by_its_launcher() {
    GpuJob::in_c("vmm.c").is_restarted(3);
}

/// Idle time after which a job counts as hung.
const HANG_TIMEOUT: Duration = Duration::from_secs(2);

/// A job whose stream can be made to hang, and the kind of wait for it.
fn hanging(how: Option<&str>) -> GpuJob {
    let mut job = GpuJob::in_c("hangs.c");
    if let Some(how) = how {
        job.program.env("HANGS_WAIT", how);
    }
    job.slow_down();
    job
}

fn start_watched(job: &GpuJob, interval: &str) -> Running {
    let mut command = job.command(library());
    command.env("CKPT_MAX_RESTARTS", "9").env("CKPT_LOG_FILE", "messages");
    command.env("CKPT_HANG_TIMEOUT", format!("{}s", HANG_TIMEOUT.as_secs()));
    command.env("CKPT_MONITOR_INTERVAL", "100ms");
    command.env("CKPT_INTERVAL", interval).env("CKPT_FREEZE_TIMEOUT", "2s");
    job.sandbox.start_command("job", command)
}

/// A stream that never ends: the hang is detected, and the job resumes from before it. Snapshots during the hang are
/// refused.
fn detects_a_hung_stream(how: Option<&str>, expected: &str) {
    let job = hanging(how);
    let mut running = start_watched(&job, "1s");
    running.until_answering(&job.sandbox);
    job.until_more_lines(&mut running, 2);
    // On a busy machine the short time for a checkpoint may be over before one succeeds.
    running.until("a snapshot", || job.sandbox.call(["checkpoint"]).status.success().then_some(()));
    std::fs::write(job.sandbox.path().join("hang"), "").expect("a file");
    running
        .until("a restart", || job.sandbox.read("messages").contains("resumed from snapshot").then_some(()));
    let messages = job.sandbox.read("messages");
    assert!(messages.contains(&format!("the job hangs: {expected}")), "{messages}");
    assert!(messages.contains("no snapshot this time"), "{messages}");
    let attempts = std::fs::read_dir(job.sandbox.job_dir().join("attempts")).expect("attempts");
    let hang = attempts.map(|entry| entry.expect("an entry").path());
    let hang = hang.filter(|path| path.to_string_lossy().contains("-hang-")).max().expect("stacks");
    let stacks = std::fs::read_to_string(hang.join("stacks.txt")).expect("stacks");
    assert!(stacks.contains("thread") && stacks.contains(" hangs: state "), "{stacks}");
    job.full_speed();
    assert_eq!(running.wait(), 0, "{}", running.said());
    assert_eq!(job.output(), job.unbroken());
    assert!(job.sandbox.ok(["explain"]).contains(&format!("it hung: {expected}")));
}

#[test]
fn a_stream_that_never_ends_is_detected() {
    detects_a_hung_stream(None, "none of its processes");
}

/// The process uses a CPU all the time, as with a real driver.
#[test]
fn a_spinning_wait_for_a_hung_stream_is_detected() {
    detects_a_hung_stream(Some("stream"), "process 10002 (hangs) has waited for its GPU for 2s");
}

#[test]
fn a_spinning_wait_for_a_hung_event_is_detected() {
    detects_a_hung_stream(Some("event"), "process 10002 (hangs) has waited for its GPU for 2s");
}

#[test]
fn a_spinning_copy_is_detected() {
    detects_a_hung_stream(Some("copy"), "process 10002 (hangs) has waited for its GPU for 2s");
}

#[test]
fn polling_of_a_hung_stream_is_detected() {
    detects_a_hung_stream(Some("query"), "process 10002 (hangs) has waited for its GPU for 2s");
}

/// A job that submits no work and waits for none for three times the limit does not hang.
#[test]
fn a_job_that_computes_without_its_gpu_is_left_alone() {
    let job = hanging(Some("stream"));
    let mut running = start_watched(&job, "1s");
    running.until_answering(&job.sandbox);
    job.until_more_lines(&mut running, 2);
    let compute = job.sandbox.path().join("compute");
    std::fs::write(&compute, "").expect("a file");
    let begun = Instant::now();
    // No event shows that no hang was detected.
    while begun.elapsed() < HANG_TIMEOUT * 3 {
        assert!(!running.has_ended(), "{}", running.said());
        std::thread::sleep(Duration::from_millis(50));
    }
    running.until("a snapshot", || job.sandbox.read("messages").contains(" saved: ").then_some(()));
    std::fs::remove_file(compute).expect("it computed");
    job.full_speed();
    assert_eq!(running.wait(), 0, "{}", running.said());
    assert_eq!(job.output(), job.unbroken());
    let messages = job.sandbox.read("messages");
    assert!(messages.contains(" saved: ") && !messages.contains("the job hangs"), "{messages}");
}

#[test]
fn train_mlp_survives() {
    let program = |gpu: &Gpu, _: &Sandbox| {
        let mut command = gpu.command(built("train-mlp"));
        command.args(["--steps", "200"]);
        command
    };
    GpuJob::new(program).slowed_by(["--rest-ms", "40"]).survives(20);
}

#[test]
fn cuda_bindings_survives() {
    GpuJob::in_python("bindings_job.py").survives(kills());
}

#[test]
fn numba_cuda_survives() {
    GpuJob::in_python("numba_job.py").survives(kills());
}

/// As `torchrun --nproc_per_node=gpu`: before release 580, the driver's lock needs a context.
#[test]
fn a_program_without_a_context_survives() {
    let mut job = GpuJob::in_c("late.c");
    job.program.env("SIMCUDA_DRIVER", "575");
    job.survives(kills());
}

/// The other drivers with calls of the checkpoint API.
#[test]
fn programs_survive_with_each_driver() {
    for release in ["570", "580", "590", "610"] {
        let mut job = GpuJob::in_c("late.c");
        job.program.env("SIMCUDA_DRIVER", release);
        job.survives(few_kills());
    }
}

/// Before release 580, the driver's lock needs a context.
#[test]
fn a_gpu_monitor_survives_with_an_early_driver() {
    for (release, arguments) in [("570", &[][..]), ("570", &["init"]), ("580", &["init"])] {
        let mut job = GpuJob::in_python("nvml_job.py");
        job.program.args(arguments).env("SIMCUDA_DRIVER", release);
        job.survives(few_kills());
    }
}

/// A monitor has the GPUs' device files open by NVML alone, as has a launcher of training that counts its devices.
#[test]
fn a_gpu_monitor_survives() {
    GpuJob::in_python("nvml_job.py").survives(kills());
}

/// nvitop, with all that it asks.
#[test]
fn a_users_monitor_survives() {
    let mut job = GpuJob::in_python("nvml_job.py");
    job.program.arg("nvitop").env("SIMCUDA_DEVICES", "2");
    job.survives(few_kills());
}

/// The driver's checkpoint takes NVML's device files away too.
#[test]
fn a_program_with_nvml_and_the_driver_survives() {
    let mut job = GpuJob::in_python("nvml_job.py");
    job.program.arg("driver");
    job.survives(kills());
}

/// A thread asks NVML all the time. Between detach and attach its calls wait: the library would fail them.
fn notices_no_checkpoint(arguments: &[&str]) {
    let mut job = GpuJob::in_python("nvml_job.py");
    job.program.args(arguments);
    job.slow_down();
    let mut running = job.start();
    for round in 0..2 {
        running.until_answering(&job.sandbox);
        for _ in 0..6 {
            job.until_more_lines(&mut running, 1);
            running.checkpoint(&job.sandbox);
        }
        job.until_more_lines(&mut running, 1);
        if round == 0 {
            running.kill_everything();
            running = job.start();
        }
    }
    job.full_speed();
    assert_eq!(running.wait(), 0, "{}", running.said());
    assert_eq!(job.output(), job.unbroken());
}

#[test]
fn a_monitor_that_polls_all_the_time_notices_no_checkpoint() {
    notices_no_checkpoint(&["polls"]);
}

#[test]
fn a_monitor_beside_the_driver_notices_no_checkpoint() {
    notices_no_checkpoint(&["driver", "polls"]);
}

/// At most moments the process has no device file open, but it may open one at any moment.
#[test]
fn a_monitor_that_reopens_nvml_notices_no_checkpoint() {
    notices_no_checkpoint(&["reopens"]);
}

/// A known limit: to save a program that uses NVML alone, its driver has to be initialised, which does not work in children
/// that are forked afterwards.
#[test]
fn children_that_a_gpu_monitor_forks_after_a_checkpoint_have_no_cuda() {
    let mut job = GpuJob::in_python("nvml_job.py");
    job.program.arg("forks");
    job.slow_down();
    let mut running = job.start();
    let path = job.sandbox.path().join("forked");
    let mut forked = || running.until("a child and another program", || std::fs::read_to_string(&path).ok());
    let before = forked();
    assert_eq!(before, "0 0", "the results of cuInit");
    running.until_answering(&job.sandbox);
    let id = running.checkpoint(&job.sandbox);
    running.until("children without a driver", || {
        std::fs::read_to_string(&path).ok().filter(|forked| forked == "3 0")
    });
    let shown = job.sandbox.ok(["show", &id]);
    assert!(shown.contains("CUDA does not work in processes that it forks from now on"), "{shown}");
    running.kill_everything();
}

#[test]
fn workers_that_are_forked_by_a_gpu_monitor_survive() {
    let mut job = GpuJob::in_python("nvml_job.py");
    job.program.arg("workers");
    job.survives(kills());
}

/// The workers of a pool that is forked once the driver has started, and the threads that feed it.
#[test]
fn numba_cuda_with_forked_workers_survives() {
    let mut job = GpuJob::in_python("numba_job.py");
    job.program.arg("2");
    job.survives(kills());
}

#[test]
fn graphs_survive() {
    GpuJob::in_c("graphs.c").survives(kills());
}

/// The driver saves memory of graphs; the snapshot lists its size.
#[test]
fn memory_of_graphs_survives() {
    let job = GpuJob::in_c("graph_memory.c");
    job.survives(kills());
    let id = job.sandbox.snapshots().pop().expect("a snapshot");
    let shown = job.sandbox.json(["show", &id, "--json"]);
    let memory = &shown["gpu_processes"][0]["graph_memory"][0];
    assert!(memory["device"] == 0 && memory["used_bytes"].as_u64() >= Some(1024), "{shown}");
    let text = job.sandbox.ok(["show", &id]);
    assert!(text.contains("graphs reserve ") && text.contains("; the driver saves it"), "{text}");
}

/// `show` lists flags of device memory and the calls that allocated it, also for a resumed job.
#[test]
fn show_lists_flags_and_origins_of_allocations() {
    let mut job = GpuJob::in_c("vmm.c");
    job.program.env("CKPT_ORIGINS", "1");
    job.slow_down();
    let program = job.program.get_program().to_string_lossy().into_owned();
    let tells = |running: &mut Running| {
        running.until_answering(&job.sandbox);
        job.until_more_lines(running, 2);
        // Names are looked up when a checkpoint begins: a call that is new since then gets its name with the next one.
        let (id, shown) = until("a snapshot without new calls", || {
            let id = running.checkpoint(&job.sandbox);
            let shown = job.sandbox.json(["show", &id, "--json"]);
            let origins = shown["gpu_processes"][0]["origins"].as_array().expect("origins");
            let is_named = |origin: &Value| origin[0].as_str().is_some_and(|call| !call.starts_with("0x"));
            origins.iter().all(is_named).then_some((id, shown))
        });
        let process = &shown["gpu_processes"][0];
        let regions = process["regions"].as_array().expect("regions");
        assert!(regions.iter().all(|region| region["flags"]["is_parked"] == true), "{shown}");
        for region in regions {
            let origin = region["origin"].as_u64().expect("an origin");
            let innermost = process["origins"][origin as usize][0].as_str().expect("a call");
            assert!(innermost.starts_with(&format!("{program}+0x")), "{innermost}");
        }
        let text = job.sandbox.ok(["show", &id]);
        assert!(text.contains("ALLOCATIONS  FLAGS") && text.contains("  parked"), "{text}");
        assert!(text.contains(&format!("    from {program}+0x")), "{text}");
    };
    let mut first = job.start();
    tells(&mut first);
    first.kill_everything();
    let mut resumed = job.start();
    tells(&mut resumed);
    job.full_speed();
    assert_eq!(resumed.wait(), 0, "{}", resumed.said());
}

#[test]
fn sixteen_threads_on_their_default_streams_survive() {
    GpuJob::in_c("threads.c").survives(kills());
}

#[test]
fn memory_that_a_program_maps_itself_survives() {
    GpuJob::in_c("vmm.c").survives(kills());
}

/// Aliases, parts, memory that is mapped nowhere, handles that were released: all is checked by the program itself.
#[test]
fn aliased_and_partial_mappings_survive() {
    GpuJob::in_c("mappings.c").survives(kills());
}

#[test]
fn stream_ordered_memory_survives() {
    GpuJob::in_c("pools.c").survives(kills());
}

#[test]
fn pinned_memory_events_host_functions_and_globals_survive() {
    GpuJob::in_c("pinned.c").survives(kills());
}

/// As a DataLoader's workers: they inherit the driver's descriptors and mappings, which CRIU refuses.
#[test]
fn workers_that_are_forked_after_the_driver_has_started_survive() {
    GpuJob::in_c("forked.c").survives(kills());
}

/// Two ranks that use the GPU by cuda-bindings and gloo between each other, with PyTorch's own Python.
#[test]
fn torchrun_with_two_ranks_survives() {
    GpuJob::torchrun(&(160 * kills()).to_string()).survives(kills());
}

/// Each line has the driver's attributes of pointers and handles, and the content of the memory: all lines are the
/// same.
#[test]
fn pointers_and_handles_stay_what_they_are() {
    let job = GpuJob::in_c("pointers.c");
    let output = job.killed_at_random_moments(kills());
    let answers: Vec<_> = output.lines().map(|line| line.split_once(": ").expect("step N: ...").1).collect();
    for answer in &answers {
        assert_eq!(*answer, answers[0]);
    }
    assert_eq!(without_addresses(&output), without_addresses(&job.unbroken()));
}

/// Addresses and handles, printed as `0x...`, differ in each run. So does the free memory: without the interposer,
/// small allocations share a block with the driver's own.
fn without_addresses(text: &str) -> String {
    let mut parts = text.split("0x");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |kept, part| kept + "0x" + part.trim_start_matches(|c: char| c.is_ascii_hexdigit()))
}

#[test]
fn memory_that_four_processes_share_survives() {
    GpuJob::in_c("shared.c").survives(kills());
}

#[test]
fn shared_memory_is_refused_while_its_owner_is_gone() {
    GpuJob::in_c("orphan.c").is_refused_until_private("opened device memory (cuIpcOpenMemHandle, ");
}

#[test]
fn memory_of_a_pool_is_refused_while_its_owner_has_given_it_up() {
    GpuJob::in_c("pool_orphan.c").is_refused_until_private("cuMemPoolImportPointer) of process ");
}

/// Shared memory works as on the driver itself: the launcher passes the handles on.
#[test]
fn the_conformance_suite_finds_memory_shared_as_by_the_driver() {
    let job = GpuJob::new(|gpu, _| {
        let mut command = gpu.command(built("conformance"));
        command.arg("--lib").arg(libcuda_dir().join("libcuda.so.1")).env("SIMCUDA_DEVICES", "2");
        command.args(["ipc/", "share/", "pool-ipc/", "nccl/", "host-vmm/shared"]);
        command.args([
            "multicast/export",
            "multicast/other-process",
            "checkpoint/multicast-hangs",
            "--jobs",
            "2",
        ]);
        command
    });
    let mut running = job.start();
    assert_eq!(running.wait(), 0, "{}{}", job.output(), running.said());
    let areas = ["ipc", "share", "pool-ipc", "multicast"].map(|area| format!("{area}/other-process"));
    for name in areas.iter().map(String::as_str).chain(["nccl/all-reduce-2"]) {
        assert!(job.output().contains(&format!("pass   {name}")), "{}", job.output());
    }
}

#[test]
fn managed_memory_is_refused_while_there_is_some() {
    let reason = "it has called cuMemAllocManaged: managed memory cannot be saved; free it";
    GpuJob::in_c("managed.c").is_refused_until_private(reason);
}

/// A job that has one of those devices open or mapped (`how`), which is called `name` in a directory that stands for `/dev`.
/// If only the agent is to find it, the launcher looks elsewhere.
fn registered(name: &str, how: &str, is_for_agent: bool) -> GpuJob {
    let job = GpuJob::new(|gpu, sandbox| {
        let program = gpu.compile(&cuda_program("registered.c"), sandbox.path());
        let device = sandbox.path().join("dev").join(name);
        std::fs::create_dir_all(device.parent().expect("a directory")).expect("a directory");
        std::fs::write(&device, [0; 4096]).expect("a file");
        let devices = format!("{}/dev/", sandbox.path().display());
        let mut command = if is_for_agent {
            let mut command = gpu.command("env");
            command.arg(format!("CKPT_TEST_DEVICES={devices}")).arg(program);
            command
        } else {
            let mut command = gpu.command(program);
            command.env("CKPT_TEST_DEVICES", devices);
            command
        };
        command.arg(steps()).arg(device).arg(how);
        command
    });
    job.slow_down();
    job
}

/// A started job whose checkpoints are refused for this reason.
fn is_refused_twice(job: &GpuJob, reason: &str) -> Running {
    let mut running = job.start();
    running.until_answering(&job.sandbox);
    job.until_more_lines(&mut running, 2);
    for _ in 0..2 {
        let refused = job.sandbox.call(["checkpoint"]);
        assert_eq!(refused.status.code(), Some(1), "{refused:?}");
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(said.contains("registered)") && said.contains(reason), "not {reason:?}: {said}");
        job.until_more_lines(&mut running, 2);
    }
    running
}

/// Devices, what a message calls them, and what it says to do.
const REGISTERING: [(&str, &str, &str); 4] = [
    ("gdrdrv", "GDRCopy's device, with which memory of the GPU is registered", "NCCL_GDRCOPY_ENABLE=0"),
    ("nvidia-fs3", "GPUDirect Storage's device", "cuFileDriverClose"),
    ("infiniband/uverbs0", "an RDMA device", "NCCL_IB_DISABLE=1"),
    ("nvidia-caps/nvidia-cap12", "an instance of a GPU in MIG mode", "nvidia-smi -mig 0"),
];

/// Each kind of device, by its descriptor and by its mapping alone. The launcher looks before the job is taken off its GPUs,
/// and the agent behind the closed gate.
#[test]
fn each_device_that_memory_is_registered_with_is_found_by_launcher_and_agent() {
    for (number, (name, what, remedy)) in REGISTERING.into_iter().enumerate() {
        // Launcher and agent use one table: each is tried with two kinds open and two mapped.
        for is_for_agent in [false, true] {
            let how = if (number % 2 == 0) == is_for_agent { "open" } else { "mapped" };
            let job = registered(name, how, is_for_agent);
            let reason =
                if is_for_agent { format!("it has a device {how}, {what}") } else { format!("is {what}") };
            let mut running = is_refused_twice(&job, &reason);
            assert!(running.said().contains(remedy), "{}", running.said());
            std::fs::write(job.sandbox.path().join("private"), "").expect("a file");
            job.until_more_lines(&mut running, 3);
            running.checkpoint(&job.sandbox);
            running.kill_everything();
        }
    }
}

/// Memory that is registered with another device must not be moved: the job is not taken off its GPU at all.
#[test]
fn memory_that_is_registered_is_not_moved() {
    let job = registered("gdrdrv", "open", false);
    let mut running = is_refused_twice(&job, "is GDRCopy's device");
    std::fs::write(job.sandbox.path().join("private"), "").expect("a file");
    job.until_more_lines(&mut running, 3);
    running.checkpoint(&job.sandbox);
    running.kill_everything();
    job.full_speed();
    let mut running = job.start();
    assert_eq!(running.wait(), 0, "{}", running.said());
    assert_eq!(job.output(), job.unbroken());
}

/// A process imports its own memory.
#[test]
fn memory_that_a_program_exports_to_itself_survives() {
    GpuJob::in_c("exported.c").survives(kills());
}

/// At each moment some descriptors are exported and not imported yet, and some of that memory was released by its owner.
#[test]
fn memory_that_processes_pass_by_descriptors_survives() {
    GpuJob::in_c("exchanged.c").survives(few_kills());
}

/// At each moment some pools and some of their allocations are exported and not imported yet. Some allocations are freed by
/// their owner first.
#[test]
fn pools_that_processes_share_survive() {
    let job = GpuJob::in_c("shared_pools.c");
    std::fs::write(job.sandbox.path().join("lax"), "").expect("a file");
    job.survives(few_kills());
}

/// Without what CUDA does not define.
#[test]
fn pools_that_processes_share_by_the_rules_are_preempted() {
    GpuJob::in_c("shared_pools.c").is_preempted(1);
}

/// Threads use that memory without any call of the driver.
#[test]
fn host_memory_that_processes_pass_by_descriptors_survives() {
    GpuJob::in_c("hosted.c").survives(1);
}

/// A program that reaches the memory of two devices by multicast objects, in so many processes.
fn multicast(processes: &str) -> GpuJob {
    GpuJob::new(|gpu, sandbox| {
        let mut command = gpu.command(gpu.compile(&cuda_program("multicast.c"), sandbox.path()));
        command.args([&(20 * kills()).to_string(), processes]).env("SIMCUDA_DEVICES", "2");
        command.env("SIMCUDA_JITTER", "1");
        command
    })
}

#[test]
fn multicast_objects_of_a_process_survive() {
    multicast("1").survives(1);
}

#[test]
fn multicast_objects_that_processes_share_survive() {
    multicast("2").survives(few_kills());
}

/// Snapshots at given steps of a job that changes little memory, and the bytes that each of them did not read. With
/// hashes only changed memory is read and stored, otherwise all of it. The store fails once.
struct PartialChanges {
    /// The device memory in each snapshot.
    memory: Vec<Vec<Vec<u8>>>,
    unread_bytes: Vec<u64>,
}

impl PartialChanges {
    const STOPS: [usize; 5] = [2, 4, 6, 8, 11];
    /// The step whose snapshot fails.
    const FAILS: usize = 6;

    fn captured_by(way: &str) -> Self {
        let program = |gpu: &Gpu, sandbox: &Sandbox| {
            let mut command = gpu.command(gpu.compile(&cuda_program("little.c"), sandbox.path()));
            command.arg("14").env("CKPT_CAPTURE", way);
            command
        };
        let job = GpuJob::new(program);
        let sandbox = &job.sandbox;
        let stop = |step: &usize| sandbox.path().join(format!("stop-{step}"));
        // At the last stop the first run is killed.
        Self::STOPS.iter().chain(&[13]).for_each(|step| std::fs::write(stop(step), "").expect("a file"));
        let mut command = job.command(library());
        command.env("CKPT_KEEP", "9").env("CKPT_FAULT", "save-before-commit@3=error");
        let mut running = sandbox.start_command("job", command);
        running.until_answering(sandbox);
        let (mut ids, mut unread_bytes) = (Vec::new(), Vec::new());
        for step in &Self::STOPS {
            running.until("the step", || (job.output().lines().count() == *step).then_some(()));
            if *step == Self::FAILS {
                let output = sandbox.call(["checkpoint"]);
                assert_eq!(output.status.code(), Some(1), "{output:?}");
            } else {
                let saved = sandbox.json(["checkpoint", "--json"]);
                ids.push(saved["id"].as_str().expect("an ID").to_owned());
                unread_bytes.push(saved["unread_bytes"].as_u64().expect("bytes"));
            }
            std::fs::remove_file(stop(step)).expect("it stood there");
        }
        let totals = sandbox.json(["status", "--json"])[0]["totals"]["unread_bytes"].as_u64();
        assert_eq!(totals, Some(unread_bytes.iter().sum()));
        let status = sandbox.ok(["status"]);
        assert_eq!(status.contains("unchanged and not read"), way == "changed", "{status}");
        running.kill_everything();
        sandbox.verify_all();
        let memory = ids.iter().map(|id| exported(sandbox, id)).collect();

        // After a resume all memory counts as changed until the next snapshot is committed.
        let mut resumed = job.start();
        resumed.until_answering(sandbox);
        assert!(resumed.said().contains("resumed from snapshot"), "{}", resumed.said());
        resumed.until("the step", || (job.output().lines().count() == 13).then_some(()));
        for is_again in [false, true] {
            let saved = sandbox.json(["checkpoint", "--json"]);
            assert_eq!(saved["unread_bytes"].as_u64() > Some(0), way == "changed" && is_again, "{saved}");
        }
        resumed.kill_everything();
        std::fs::remove_file(stop(&13)).expect("it stood there");
        let mut last = job.start();
        assert_eq!(last.wait(), 0, "{}", last.said());
        assert_eq!(job.output(), job.unbroken());
        Self { memory, unread_bytes }
    }
}

/// The content of each region of device memory in a snapshot, sorted, since addresses differ in each run.
fn exported(sandbox: &Sandbox, id: &str) -> Vec<Vec<u8>> {
    let to = sandbox.path().join(format!("exported-{id}"));
    sandbox.ok(["export", id, "--to", to.to_str().expect("UTF-8")]);
    let mut found = Vec::new();
    for process in std::fs::read_dir(to.join("gpu")).expect("device memory") {
        let device = process.expect("a process").path().join("device-0");
        let regions = std::fs::read_dir(device).expect("regions");
        found.extend(regions.map(|region| std::fs::read(region.expect("a region").path()).expect("read")));
    }
    std::fs::remove_dir_all(to).expect("removed");
    found.sort();
    found
}

/// Saved continuously, killed and resumed: memory that is not read again is right after every resume.
#[test]
fn a_job_that_changes_little_memory_survives() {
    let mut job = GpuJob::in_c("little.c");
    job.program.env("CKPT_CAPTURE", "changed");
    job.survives(kills());
}

/// Threads copy device memory to the mirror and back, as they do with a large mirror and many CPUs.
#[test]
fn a_job_whose_memory_threads_copy_survives() {
    for capture in ["changed", "all"] {
        let mut job = GpuJob::in_c("little.c");
        job.program.env("CKPT_CAPTURE", capture).env("CKPT_FAULT_COPY_THREADS", "3");
        job.survives(few_kills());
    }
}

/// Snapshots with and without hashes are equal byte for byte.
#[test]
fn unchanged_memory_is_not_read() {
    let (changed, all) = (PartialChanges::captured_by("changed"), PartialChanges::captured_by("all"));
    let bytes = |memory: &Vec<Vec<u8>>| memory.iter().map(Vec::len).sum::<usize>() as u64;
    for (number, (changed, all)) in changed.memory.iter().zip(&all.memory).enumerate() {
        assert!(bytes(changed) >= 80 << 20, "{}", bytes(changed));
        assert!(changed == all, "snapshot {number} has something else than is there");
    }
    assert_eq!(all.unread_bytes, [0; 4]);
    let [first, later @ ..] = &changed.unread_bytes[..] else { panic!("no snapshots") };
    assert_eq!(*first, 0);
    let least = bytes(&changed.memory[0]) / 2;
    assert!(later.iter().all(|unread_bytes| *unread_bytes > least), "{later:?}");
}

/// The job continues after each checkpoint with the same results.
#[test]
fn a_checkpoint_does_not_change_what_a_job_computes() {
    let job = legacy_job(450, 15);
    let mut running = job.start();
    running.until_answering(&job.sandbox);
    for _ in 0..3 {
        job.until_more_lines(&mut running, 1);
        running.checkpoint(&job.sandbox);
    }
    assert_eq!(running.wait(), 0, "{}", running.said());
    assert_eq!(job.output(), job.unbroken());
}

/// Starts a rank, and waits for it when there is the file `reap`.
const WAITS_FOR_A_RANK: &str = r#"
import os, subprocess, sys, time
rank = subprocess.Popen(sys.argv[1:])
while not os.path.exists("reap"): time.sleep(0.02)
rank.wait()
open("reaped", "w").close()
while True: time.sleep(0.02)
"#;

/// A rank was killed, and its launcher, which has waited for it, is about to end: its snapshots are doubtful, although no
/// ended process is in them.
#[test]
fn snapshots_without_a_rank_that_was_killed_are_doubtful() {
    let job = GpuJob::new(|gpu, sandbox| {
        let mut command = gpu.command(python());
        command.args(["-I", "-S", "-c", WAITS_FOR_A_RANK]);
        command.arg(gpu.compile(&cuda_program("vmm.c"), sandbox.path())).arg(steps());
        command
    });
    job.slow_down();
    let running = job.start_and_save();
    let failed = |id: &str| job.sandbox.json(["show", id, "--json"])["failed_process"].take();
    let good = running.checkpoint(&job.sandbox);
    assert!(failed(&good).is_null());
    let name = |pid: i32| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let rank = running.descendants().into_iter().find(|pid| name(*pid) == "vmm\n").expect("a rank");
    kill_process(Pid::from_raw(rank).expect("a PID"), Signal::KILL).expect("it is there");
    let state = || std::fs::read_to_string(format!("/proc/{rank}/stat")).unwrap_or_default();
    until("the end of the rank", || state().contains(") Z ").then_some(()));
    std::fs::write(job.sandbox.path().join("reap"), "").expect("a file");
    until("its parent", || job.sandbox.path().join("reaped").exists().then_some(()));
    let doubtful = failed(&running.checkpoint(&job.sandbox));
    assert_eq!((&doubtful["code"], &doubtful["name"]), (&137.into(), &"vmm".into()), "{}", running.said());
}

/// Without the interposer a process with GPU state cannot be saved: the checkpoint is refused, and the job continues.
#[test]
fn without_the_interposer_a_checkpoint_is_refused() {
    let job = legacy_job(450, 15);
    let mut running = job.sandbox.start_command("job", job.command("off"));
    running.until_answering(&job.sandbox);
    job.until_more_lines(&mut running, 1);
    let refused = job.sandbox.call(["checkpoint"]);
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    assert_eq!(running.wait(), 0, "{}", running.said());
    assert_eq!(job.output(), job.unbroken());
}

/// Where killing a process that the driver has restored ruins the device, as with some real drivers. The job ignores
/// SIGTERM, and its last snapshot fails, so that it is killed.
#[test]
fn a_restored_job_is_taken_off_its_gpus_before_it_is_killed() {
    let mut job = GpuJob::new(|gpu, sandbox| {
        let mut command = gpu.command("env");
        command.arg("--ignore-signal=TERM").arg(gpu.compile(&cuda_program("vmm.c"), sandbox.path()));
        command.arg(steps()).env("SIMCUDA_JITTER", "1");
        command
    });
    job.program.env("SIMCUDA_KILL_RUINS", "1");
    job.slow_down();
    let mut command = job.command(library());
    command.env("CKPT_FAULT", "prepare@2=error").env("CKPT_GRACE", "1s");
    let mut running = job.sandbox.start_command("job", command);
    running.until_answering(&job.sandbox);
    job.until_more_lines(&mut running, 2);
    running.checkpoint(&job.sandbox);
    job.until_more_lines(&mut running, 1);
    running.signal(Signal::TERM);
    running.wait();
    assert!(!running.said().contains("is killed with its state"), "{}", running.said());
    job.full_speed();
    let mut running = job.start();
    assert_eq!(running.wait(), 0, "{}", running.said());
    assert!(running.said().contains("resumed from snapshot"), "{}", running.said());
    assert_eq!(job.output(), job.unbroken());
}
