//! Device memory that goes away and comes back while a program has it, on simcuda, with a launcher that is played by
//! the test: parked, copied back, changed in part, staged or not.

mod common;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::Command;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use ckpt_protocol::agent::{FromAgent, GpuReport, GraphMemory, Region, RegionFlags, RegionKind, ToAgent};
use ckpt_protocol::{descriptors, frame};
use common::launcher::{Agent, Kept, Launcher};
use common::program::{self, Program};

const MIB: u64 = 1 << 20;
const PAGE: usize = 4096;

static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| program::program("away"));

/// A program under the interposer, and what its launcher has of it.
struct Job {
    program: Program,
    launcher: Launcher,
    agent: Agent,
    kept: Kept,
    attempt: u64,
}

impl Job {
    /// Starts the program with these variables.
    fn start(variables: &[(&str, &str)]) -> Self {
        Self::start_with(|command, _| {
            command.envs(variables.iter().copied());
        })
    }

    /// Starts the program, whose calls of the driver are recorded.
    fn traced() -> Self {
        Self::start_with(|command, launcher| {
            let trace = File::create(launcher.path("trace")).expect("a file");
            command.env("SIMCUDA_TRACE", "1").stderr(trace);
        })
    }

    fn start_with(prepare: impl FnOnce(&mut Command, &Launcher)) -> Self {
        let launcher = Launcher::new();
        let mut command = program::plain(&PROGRAM, &launcher.path("devices"));
        program::interpose(&mut command, &launcher.socket());
        command.env("SIMCUDA_MEMORY", "96MiB");
        prepare(&mut command, &launcher);
        let mut program = Program::start(command);
        let agent = launcher.next();
        assert_eq!(program.line(), "ready");
        Self { program, launcher, agent, kept: Kept::new(7), attempt: 0 }
    }

    /// The launcher answers meanwhile what the program's own threads ask.
    fn does(&mut self, command: &str) {
        let Self { program, launcher, kept, .. } = self;
        let is_done = AtomicBool::new(false);
        let said = thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(SeqCst) {
                    match launcher.try_accept() {
                        Some(stream) => kept.answer(&stream),
                        None => thread::sleep(Duration::from_millis(1)),
                    }
                }
            });
            let said = program.does(command);
            is_done.store(true, SeqCst);
            said
        });
        assert_eq!(said, "ok", "{command}");
    }

    /// Announces a checkpoint: how large the mirror has to be, or why there can be none.
    fn prepares(&mut self) -> Result<u64, String> {
        self.attempt += 1;
        self.agent.say(&ToAgent::Prepare { attempt: self.attempt });
        match self.agent.hear() {
            FromAgent::Needs { mirror_bytes, .. } => Ok(mirror_bytes),
            FromAgent::Failed { reason, is_lost: false, .. } => Err(reason),
            other => panic!("{other:?}"),
        }
    }

    /// Asks the process to go away, which it refuses: why.
    fn is_refused(&mut self) -> String {
        self.attempt += 1;
        match self.agent.quiesce(self.attempt) {
            FromAgent::Failed { reason, is_lost: false, .. } => reason,
            other => panic!("{other:?}"),
        }
    }

    fn stage(&mut self) {
        self.attempt += 1;
        self.kept.stage(&self.agent, self.attempt);
    }

    /// The mirror may change nowhere but where the report says so.
    fn goes(&mut self, park: bool) -> GpuReport {
        self.launcher.stop_listening();
        if !park {
            self.kept.forget_parked();
        }
        let before = self.kept.content();
        let report = self.kept.sends_away(&self.agent, self.attempt, park).expect("it uses a GPU");
        let written = report.capture.iter().flat_map(|capture| &capture.written);
        let written: Vec<_> = written.collect();
        let after = self.kept.content();
        for (page, (before, after)) in (0..).step_by(PAGE).zip(before.chunks(PAGE).zip(after.chunks(PAGE))) {
            let is_told = written.iter().any(|range| range.contains(&page));
            assert!(before == after || is_told, "a change at {page} is not among {written:?}");
        }
        report
    }

    /// How many ranges of host memory were pinned and unpinned so far.
    fn pins(&self) -> (usize, usize) {
        let trace = fs::read_to_string(self.launcher.path("trace")).expect("a trace");
        let count = |call| trace.lines().filter(|line| *line == format!("simcuda: {call} = 0")).count();
        (count("cuMemHostRegister_v2"), count("cuMemHostUnregister"))
    }

    /// Returns how many bytes were copied back.
    fn comes_back(&mut self) -> u64 {
        self.launcher.listen();
        self.agent = self.launcher.next();
        match self.kept.bring_back(&self.agent) {
            FromAgent::Reconnected { copied_bytes, lost: None, .. } => copied_bytes,
            other => panic!("{other:?}"),
        }
    }

    /// Away and back, with all that belongs to it.
    fn round(&mut self, park: bool) -> (GpuReport, u64) {
        self.stage();
        let report = self.goes(park);
        let copied_bytes = self.comes_back();
        (report, copied_bytes)
    }
}

fn bytes_of(report: &GpuReport) -> u64 {
    report.regions.iter().map(|region| region.bytes).sum()
}

#[test]
fn parked_memory_is_not_copied_back() {
    let mut job = Job::start(&[]);
    // There is no room for another one like that.
    job.does(&format!("alloc {}", 40 * MIB));
    job.does("fill 1");
    for _ in 0..3 {
        let (report, copied_bytes) = job.round(true);
        assert_eq!(copied_bytes, 0);
        assert_eq!((report.parked_bytes, report.unparked_because.as_deref()), (bytes_of(&report), None));
        job.does("check");
    }
    job.does("change 3");
    job.round(true);
    job.does("check");
}

/// The driver counts what the launcher holds, and `check` asks it for the free memory.
#[test]
fn memory_that_is_freed_is_parked_no_longer() {
    let mut job = Job::start(&[]);
    job.does("fill 1");
    job.round(true);
    let count = job.kept.parked_count();
    job.does("free 5");
    assert_eq!(job.kept.parked_count(), count - 1);
    job.does("check");
    // What is new is parked beside what is.
    let count = job.kept.parked_count();
    job.does("alloc 5000000");
    let (report, copied_bytes) = job.round(true);
    assert_eq!((job.kept.parked_count(), copied_bytes), (count + 1, 0));
    assert_eq!(report.parked_bytes, bytes_of(&report));
    job.does("check");
}

/// The driver exports nothing that has come back by a descriptor: the launcher has the first one.
#[test]
fn parked_memory_can_be_shared() {
    let mut job = Job::start(&[]);
    job.does("fill 1");
    job.round(true);
    job.does("share 5");
    assert_eq!(job.kept.published.len(), 1);
    for _ in 0..2 {
        let (report, copied_bytes) = job.round(true);
        assert_eq!(copied_bytes, 0);
        assert_eq!(report.regions.iter().filter(|region| region.flags.is_shared).count(), 1);
        job.does("check");
    }
}

/// Memory without room in the mirror stays on the device, where the driver saves it, but not what came back by a descriptor.
#[test]
fn parked_memory_needs_room_in_the_mirror() {
    let mut job = Job::start(&[]);
    job.does("fill 1");
    job.round(true);
    assert!(job.is_refused().contains("the next one has room for that"));
    job.does("check");
    let (report, copied_bytes) = job.round(true);
    assert_eq!((report.parked_bytes, copied_bytes), (bytes_of(&report), 0));
    job.does("check");
}

#[test]
fn memory_that_is_not_parked_comes_from_the_mirror() {
    let mut job = Job::start(&[]);
    job.does("fill 9");
    let (report, copied_bytes) = job.round(false);
    assert!(copied_bytes >= 23 * MIB, "{copied_bytes}");
    assert_eq!((copied_bytes, report.parked_bytes), (bytes_of(&report), 0));
    job.does("check");
    for kind in [RegionKind::Allocation, RegionKind::Slab, RegionKind::Program, RegionKind::Pool] {
        assert!(report.regions.iter().any(|region| region.kind == kind), "{kind:?}: {:?}", report.regions);
    }
    assert!(report.regions.is_sorted_by_key(|region| region.address));
    // What the launcher could not keep comes from there too.
    job.stage();
    job.goes(true);
    job.kept.forget_parked();
    assert_eq!(job.comes_back(), bytes_of(&report));
    job.does("check");
}

/// Pinning and unpinning take long, and the program would wait for it.
#[test]
fn a_mirror_that_was_copied_back_stays_pinned_until_it_is_captured_to() {
    let mut job = Job::traced();
    job.does("fill 3");
    for _ in 0..2 {
        job.stage();
        let (pinned, unpinned) = job.pins();
        assert!(pinned > unpinned, "{pinned} {unpinned}");
        job.goes(false);
        assert_eq!(job.pins(), (pinned, pinned), "a dump would contain it");
        job.comes_back();
        let (pinned, unpinned) = job.pins();
        assert!(pinned > unpinned, "{pinned} {unpinned}");
        job.does("check");
        job.does("change 7");
        job.stage();
        assert_eq!(job.pins(), (pinned, unpinned), "it is pinned already");
        // Nor is it pinned again after an attempt that was given up.
        job.agent.say(&ToAgent::Unstage { attempt: job.attempt });
        job.does("check");
    }
    job.round(true);
    let (pinned, unpinned) = job.pins();
    assert_eq!(pinned, unpinned, "nothing was copied back");
    job.does("check");
}

/// Threads that copy through pinned buffers leave nothing to unpin but these, there and back.
#[test]
fn a_mirror_that_threads_copy_to_is_never_pinned() {
    let mut job = Job::traced();
    job.kept.copy_threads = 3;
    job.does("fill 3");
    for round in 1..=2 {
        let (_, copied_bytes) = job.round(false);
        assert!(copied_bytes >= 23 * MIB, "{copied_bytes}");
        assert_eq!(job.pins(), (2 * round, 2 * round), "buffers to capture, and buffers to copy back");
        job.does("check");
        job.does("change 7");
    }
    // An attempt that was given up: the next one uses its buffers.
    job.stage();
    job.agent.say(&ToAgent::Unstage { attempt: job.attempt });
    job.does("check");
    job.round(true);
    assert_eq!(job.pins(), (5, 5));
    job.does("check");
}

/// Its pages would stay, or be others than those of the file.
#[test]
fn a_mirror_that_the_launcher_may_free_is_unpinned_before_the_program_runs() {
    let mut job = Job::traced();
    job.does("fill 3");
    job.kept.may_stay = false;
    job.round(false);
    let (pinned, unpinned) = job.pins();
    assert_eq!(pinned, unpinned);
    job.does("check");
    // Nor does a window stay.
    job.stage();
    job.goes(false);
    job.launcher.listen();
    job.agent = job.launcher.next();
    let back = job.kept.bring_back_by_window(&job.agent);
    assert!(matches!(back, FromAgent::Reconnected { copied_bytes: 1.., lost: None, .. }), "{back:?}");
    let (pinned, unpinned) = job.pins();
    assert_eq!(pinned, unpinned);
    job.does("check");
}

/// What is pinned is not what the next capture needs: another mirror, or one of another size, or more than is needed, or
/// what a context may have taken with it.
#[test]
fn a_mirror_that_does_not_fit_any_more_is_pinned_again() {
    let mut job = Job::traced();
    job.does("fill 3");
    job.round(false);
    for what in ["another", "alloc 5000000", "free 7", "context"] {
        let (pinned, unpinned) = job.pins();
        assert!(pinned > unpinned, "{what}: {pinned} {unpinned}");
        match what {
            "another" => job.kept = Kept::new(8),
            command => job.does(command),
        }
        let before_bytes = job.kept.allocated_bytes();
        job.stage();
        assert!(job.pins().0 > pinned, "{what}");
        job.goes(false);
        let (pinned, unpinned) = job.pins();
        assert_eq!(pinned, unpinned, "{what}");
        if what == "free 7" {
            let after_bytes = job.kept.allocated_bytes();
            assert!(after_bytes + 7 * MIB <= before_bytes, "{after_bytes} of {before_bytes}");
        }
        job.comes_back();
        job.does("check");
    }
}

#[test]
fn a_region_tells_what_is_special_about_it() {
    let mut job = Job::start(&[("SIMCUDA_DEVICES", "2")]);
    job.does("special");
    job.program.say("share 5");
    // On a connection of its own, the memory is published.
    let publisher = common::until("a published piece", || job.launcher.try_accept());
    let FromAgent::Publish { .. } = frame::read(&mut &publisher).expect("a message") else {
        panic!("no memory")
    };
    let memory = descriptors::receive(publisher.as_fd(), 1).expect("memory");
    frame::write(&mut &publisher, &ToAgent::Published { is_kept: true }).expect("said");
    assert_eq!(job.program.line(), "ok");
    job.stage();
    let report = job.goes(true);
    drop(memory);
    let special = RegionFlags {
        is_parked: true,
        is_exportable: true,
        is_compressible: true,
        aliases: 1,
        peers: vec![1],
        ..RegionFlags::default()
    };
    let is_special = |region: &&Region| region.flags == special && region.kind == RegionKind::Program;
    assert_eq!(
        report.regions.iter().filter(is_special).map(|region| region.bytes).collect::<Vec<_>>(),
        [4 * MIB]
    );
    let shared: Vec<_> = report.regions.iter().filter(|region| region.flags.is_shared).collect();
    // What is shared the launcher has already: it is not parked once more.
    assert!(
        matches!(shared[..], [Region { bytes, flags, .. }] if *bytes == 2 * MIB && !flags.is_parked),
        "{shared:?}"
    );
    let parked = RegionFlags { is_parked: true, ..RegionFlags::default() };
    for region in &report.regions {
        let is_plain = region.kind != RegionKind::Program && !region.flags.is_shared;
        assert!(!is_plain || region.flags == parked, "{region:?}");
    }
    assert!(report.origins.is_empty() && report.regions.iter().all(|region| region.origin.is_none()));
}

#[test]
fn what_was_not_parked_is_not_told_to_be() {
    let mut job = Job::start(&[]);
    let (report, _) = job.round(false);
    assert!(report.regions.iter().all(|region| !region.flags.is_parked), "{:?}", report.regions);
    let aliases: u64 = report.regions.iter().map(|region| region.flags.aliases).sum();
    assert_eq!(aliases, 1, "one piece has a second address");
}

/// The program's own calls, from the one that allocates outwards; nothing of the interposer's.
#[test]
fn a_region_tells_which_calls_have_made_it() {
    let mut job = Job::start(&[("CKPT_ORIGINS", "1")]);
    let (report, _) = job.round(true);
    let program = PROGRAM.canonicalize().expect("a path").to_string_lossy().into_owned();
    let stack_of = |region: &Region| &report.origins[region.origin.expect("an origin")];
    for region in &report.regions {
        let stack = stack_of(region);
        assert!(stack[0].starts_with(&format!("{program}+0x")), "{region:?}: {stack:?}");
        assert!(
            stack.iter().any(|call| call.contains("libc.so.6+0x") && call.contains("(__libc_start_main")),
            "{stack:?}"
        );
        assert!(!stack.iter().any(|call| call.contains("libckpt_interpose")), "{stack:?}");
    }
    let places = |kind: RegionKind| -> BTreeSet<&Vec<String>> {
        report.regions.iter().filter(|region| region.kind == kind).map(stack_of).collect()
    };
    // Four large allocations are made by one call, and both of the program's own by a function of two callers.
    assert_eq!(places(RegionKind::Allocation).len(), 1);
    assert_eq!(places(RegionKind::Program).len(), 2);
    // It is the same in the process that goes on, and what comes later has names too.
    job.does("alloc 4000000");
    let (later, _) = job.round(true);
    assert_eq!(later.origins.len(), report.origins.len() + 1);
    assert!(later.origins.iter().all(|stack| stack[0].starts_with(&program)), "{:?}", later.origins);
}

#[test]
fn memory_of_graphs_is_told_as_the_driver_counts_it() {
    let mut job = Job::start(&[]);
    job.does("fill 2");
    let (report, _) = job.round(true);
    assert_eq!(report.graph_memory, []);
    job.does("graph 3145728");
    let (report, _) = job.round(true);
    let [GraphMemory { device: 0, used_bytes, reserved_bytes }] = report.graph_memory[..] else {
        panic!("{report:?}")
    };
    assert!(used_bytes >= 3 * MIB && reserved_bytes >= used_bytes, "{used_bytes} of {reserved_bytes}");
    job.does("check");
}

#[test]
fn only_what_has_changed_is_copied() {
    let mut job = Job::start(&[("CKPT_CAPTURE", "changed")]);
    let changed =
        |report: &GpuReport| report.regions.iter().filter_map(|region| region.changed_bytes).sum::<u64>();
    job.does("fill 5");
    let (report, _) = job.round(true);
    assert_eq!(changed(&report), bytes_of(&report));
    let (report, _) = job.round(true);
    assert_eq!(changed(&report), 0);
    job.does("change 7");
    let (report, _) = job.round(false);
    assert_eq!(changed(&report), 8 * MIB, "7 MiB lie in four chunks");
    job.does("check");
    // Another mirror has nothing.
    job.kept = Kept::new(8);
    let (report, _) = job.round(false);
    assert_eq!(changed(&report), bytes_of(&report));
    job.does("check");
    // Allocations come and go.
    job.does("free 5");
    job.does("alloc 5000000");
    job.does("alloc 300");
    let (report, _) = job.round(false);
    assert!(changed(&report) < 10 * MIB, "{}", changed(&report));
    job.does("check");
    job.round(false);
    job.does("check");
}

fn number_of(report: &GpuReport) -> u64 {
    report.capture.as_ref().expect("a capture").number
}

fn written_bytes(report: &GpuReport) -> u64 {
    report.capture.iter().flat_map(|capture| &capture.written).map(|range| range.end - range.start).sum()
}

/// Allocations come and go, others take their places in the mirror, some change: [`Job::goes`] compares.
#[test]
fn whatever_is_written_to_the_mirror_is_told() {
    let mut job = Job::start(&[("CKPT_CAPTURE", "changed")]);
    job.does("fill 1");
    let (report, _) = job.round(false);
    assert_eq!(written_bytes(&report), bytes_of(&report));
    // Which of the allocations are cuMemAlloc's.
    let mut are_plain = [vec![true; 8], vec![false; 4]].concat();
    let mut random = fastrand::Rng::with_seed(1);
    let mut below = |bound: usize| random.usize(..bound);
    let mut least_bytes = u64::MAX;
    for round in 1..=16 {
        for _ in 0..below(4) {
            let one = below(are_plain.len());
            match below(3) {
                0 if are_plain[one] && are_plain.len() > 6 => {
                    job.does(&format!("free {one}"));
                    are_plain.swap_remove(one);
                }
                1 if are_plain.len() < 24 => {
                    job.does(&format!("alloc {}", (below(6 << 20) + 4) & !3));
                    are_plain.push(true);
                }
                _ => job.does(&format!("change {one}")),
            }
        }
        let (report, _) = job.round(round % 2 == 0);
        job.does("check");
        assert_eq!(number_of(&report), round + 1);
        least_bytes = least_bytes.min(written_bytes(&report));
    }
    assert!(least_bytes < 4 * MIB, "not all of it is told each time: {least_bytes}");
}

/// Nobody is told what was written by a capture whose attempt has failed: its number is missing.
#[test]
fn a_capture_that_nobody_is_told_of_counts() {
    let fault = ("SIMCUDA_FAULT", "cuCheckpointProcessCheckpoint:2=CUDA_ERROR_UNKNOWN");
    let mut job = Job::start(&[("CKPT_CAPTURE", "changed"), fault]);
    job.does("fill 5");
    assert_eq!(number_of(&job.round(true).0), 1);
    job.does("change 7");
    job.stage();
    let answer = job.kept.quiesce(&job.agent, job.attempt, true);
    assert!(matches!(answer, FromAgent::Failed { is_lost: false, .. }), "{answer:?}");
    job.kept.forget_parked();
    assert_eq!(number_of(&job.round(true).0), 3);
    job.does("check");
    // Nor does another mirror, or none, make a number come again.
    job.kept = Kept::new(8);
    let (report, _) = job.round(false);
    assert_eq!((number_of(&report), written_bytes(&report)), (4, bytes_of(&report)));
    job.attempt += 1;
    assert_eq!(job.goes(true).capture, None);
    job.comes_back();
    let (report, _) = job.round(true);
    assert_eq!((number_of(&report), written_bytes(&report)), (6, bytes_of(&report)));
    job.does("check");
}

/// The driver's "not supported" is remembered: no detach and no mirror until something has changed.
#[test]
fn a_refusal_by_the_driver_is_remembered_until_something_changes() {
    let mut job = Job::start(&[("SIMCUDA_FAULT", "cuCheckpointProcessLock:1=CUDA_ERROR_NOT_SUPPORTED")]);
    job.does("fill 3");
    let all = job.prepares().expect("nothing is known yet");
    assert!(all > 0);
    let reason = job.is_refused();
    assert!(reason.contains("(801)") && reason.contains("tried again once"), "{reason}");
    for _ in 0..2 {
        assert_eq!(job.prepares(), Err(reason.clone()));
    }
    job.does("context");
    assert_eq!(job.prepares(), Ok(all));
    job.round(true);
    job.does("check");
    assert_eq!(job.prepares(), Ok(all));
}

#[test]
fn what_is_wrong_with_the_device_is_said_before_anything_is_detached() {
    for (variable, mode) in
        [("SIMCUDA_MIG", "an instance of a GPU in MIG mode"), ("SIMCUDA_MPS", "shared by MPS")]
    {
        let mut job = Job::start(&[(variable, "1")]);
        job.does("fill 3");
        let reason = job.prepares().expect_err(variable);
        assert!(reason.contains(mode), "{reason}");
        assert_eq!(job.is_refused(), reason, "without a preparation too");
        job.does("check");
    }
}

#[test]
fn a_profiler_refuses_checkpoints_for_good() {
    let mut job = Job::start(&[]);
    job.does("fill 3");
    let all = job.prepares().expect("no profiler");
    job.does("profile");
    for _ in 0..2 {
        let reason = job.prepares().expect_err("a profiler");
        assert!(reason.contains("a profiler is attached by CUPTI (cuptiActivityEnable)"), "{reason}");
        assert_eq!(job.is_refused(), reason);
    }
    // Whether it is possible again the driver knows.
    job.does("stop");
    assert_eq!(job.prepares(), Ok(all));
    let reason = job.is_refused();
    assert!(reason.contains("(801)") && reason.contains("cuptiFinalize"), "{reason}");
    assert_eq!(job.prepares(), Err(reason));
    job.does("detach");
    assert_eq!(job.prepares(), Ok(all));
    let reason = job.is_refused();
    assert!(
        reason.contains("(801)") && reason.contains("driver 580 saves no process after that"),
        "{reason}"
    );
    job.does("check");
}

#[test]
fn a_profiler_that_starts_the_program_refuses_checkpoints() {
    let cupti = common::driver().with_file_name("libcupti.so.13");
    let path = cupti.to_str().expect("UTF-8");
    let mut job = Job::start(&[("CUDA_INJECTION64_PATH", path)]);
    let reason = job.prepares().expect_err("a profiler");
    assert!(reason.contains(path) && reason.contains("CUDA_INJECTION64_PATH"), "{reason}");
}

#[test]
fn without_a_mirror_memory_goes_the_drivers_way() {
    let mut job = Job::start(&[]);
    job.does("fill 3");
    job.attempt += 1;
    let report = job.goes(true);
    assert_eq!((bytes_of(&report), report.parked_bytes), (0, 0));
    assert_eq!(report.capture, None);
    assert_eq!(job.comes_back(), 0);
    job.does("check");
}

/// A thread that uses memory of the host needs no call for that: the gate does not hold it.
#[test]
fn memory_of_the_host_is_away_too_and_threads_that_use_it_wait() {
    let mut job = Job::start(&[]);
    job.does("host 6291456");
    job.does("fill 3");
    job.does("touch");
    for park in [true, false, false] {
        let (report, copied_bytes) = job.round(park);
        let of_host = report.regions.iter().filter(|region| region.flags.is_of_host);
        assert_eq!(of_host.map(|region| region.bytes).sum::<u64>(), 8 * MIB);
        assert_eq!((copied_bytes == 0, report.unparked_because), (park, None));
        job.does("touched");
        job.does("check");
        job.does("change 12");
    }
    // Without a mirror it would stay, and the driver does not bring it back.
    let reason = job.is_refused();
    assert!(reason.contains("memory of the host"), "{reason}");
    job.does("touched");
    job.does("check");
}

/// Threads that use memory of the host run on after an attempt that fails.
#[test]
fn memory_of_the_host_is_given_back_when_an_attempt_fails() {
    let mut job = Job::start(&[("SIMCUDA_FAULT", "cuCheckpointProcessCheckpoint:1=CUDA_ERROR_UNKNOWN")]);
    job.does("host 2097152");
    job.does("fill 4");
    job.does("touch");
    job.stage();
    let reason = job.is_refused();
    assert!(reason.contains("cuCheckpointProcessCheckpoint"), "{reason}");
    job.does("touched");
    job.does("check");
    job.round(true);
    job.does("touched");
    job.does("check");
}

#[test]
fn an_attempt_that_is_given_up_changes_nothing() {
    let mut job = Job::start(&[]);
    job.does("fill 4");
    job.stage();
    job.agent.say(&ToAgent::Unstage { attempt: job.attempt });
    job.does("check");
    job.round(true);
    job.does("check");
}
