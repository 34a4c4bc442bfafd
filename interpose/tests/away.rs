//! Device memory that goes away and comes back while a program has it, on simcuda, with a launcher that is played by
//! the test: parked, copied back, changed in part, staged or not.

mod common;

use std::path::PathBuf;
use std::sync::LazyLock;

use ckpt_protocol::agent::{FromAgent, GpuReport, RegionKind, ToAgent};
use common::launcher::{Agent, Kept, Launcher};
use common::program::{self, Program};

const MIB: u64 = 1 << 20;

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
        let launcher = Launcher::new();
        let mut command = program::plain(&PROGRAM, &launcher.path("devices"));
        program::interpose(&mut command, &launcher.socket());
        command.env("SIMCUDA_MEMORY", "96MiB").envs(variables.iter().copied());
        let mut program = Program::start(command);
        let agent = launcher.next();
        assert_eq!(program.line(), "ready");
        Self { program, launcher, agent, kept: Kept::new(7), attempt: 0 }
    }

    fn does(&mut self, command: &str) {
        assert_eq!(self.program.does(command), "ok", "{command}");
    }

    fn stage(&mut self) {
        self.attempt += 1;
        self.kept.stage(&self.agent, self.attempt);
    }

    fn goes(&mut self, park: bool) -> GpuReport {
        self.launcher.stop_listening();
        self.kept.sends_away(&self.agent, self.attempt, park).expect("it uses a GPU")
    }

    /// Returns how many bytes were copied back.
    fn comes_back(&mut self) -> u64 {
        self.launcher.listen();
        self.agent = self.launcher.next();
        match self.kept.bring_back(&self.agent) {
            FromAgent::Back { copied_bytes, lost: None, .. } => copied_bytes,
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

#[test]
fn without_a_mirror_memory_goes_the_drivers_way() {
    let mut job = Job::start(&[]);
    job.does("fill 3");
    job.attempt += 1;
    let report = job.goes(true);
    assert_eq!((bytes_of(&report), report.parked_bytes), (0, 0));
    assert_eq!(job.comes_back(), 0);
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
