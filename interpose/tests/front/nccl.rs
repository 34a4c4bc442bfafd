//! Communicators of NCCL: those of several ranks refuse a checkpoint while they are there. NCCL is played.

use super::*;

const SHARED: [&str; 3] = ["-shared", "-fPIC", "-Wl,-soname,libnccl.so.2"];

/// A program that makes communicators, step by step.
struct Steps<'a> {
    launcher: &'a mut Launcher,
    program: Program,
}

impl<'a> Steps<'a> {
    /// The program is linked against NCCL, or else opens `libraries`.
    fn new(launcher: &'a mut Launcher, libraries: &[&Path]) -> Self {
        let nccl = compile(launcher, "fake_nccl.c", "libnccl.so.2", &SHARED);
        let linked = ["-DLINKED", nccl.to_str().expect("text")];
        let options = if libraries.is_empty() { &linked[..] } else { &[] };
        let program = compile_with_driver(launcher, "nccl.c", "nccl", &[options, &["-ldl"]].concat());
        Self::start(launcher, &program, libraries)
    }

    fn start(launcher: &'a mut Launcher, program: &Path, libraries: &[&Path]) -> Self {
        let command = preloaded(launcher, program);
        Self::start_command(launcher, command, libraries)
    }

    fn start_command(launcher: &'a mut Launcher, mut command: Command, libraries: &[&Path]) -> Self {
        let driver = driver();
        // Ours first: there is a stand-in for NCCL beside the driver.
        let places = [launcher.directory.path(), driver.parent().expect("a directory")];
        command.env("LD_LIBRARY_PATH", std::env::join_paths(places).expect("paths"));
        command.env("NCCL_PEER", launcher.path("peer")).args(libraries);
        let mut program = Program::start(command);
        assert_eq!(program.line(), "ready");
        Self { launcher, program }
    }

    fn take(&mut self, step: &str) -> i32 {
        self.program.say(step);
        self.program.line().parse().expect("a number")
    }

    /// Whether a checkpoint is refused, and the words of the reason.
    fn refused(&self) -> String {
        match agent_of(self.launcher, &self.program).quiesce(1) {
            FromAgent::Failed { attempt: 1, reason, .. } => reason,
            answer => panic!("{answer:?}"),
        }
    }

    fn is_saved(&mut self) {
        let agent = agent_of(self.launcher, &self.program);
        while_away(self.launcher, vec![agent], || {});
    }

    /// What is made by a step cannot be saved until it is destroyed.
    fn stands_until(&mut self, step: &str, words: &str, place: usize) {
        assert_eq!(self.take(step), 0, "{step}");
        let reason = self.refused();
        let told = format!("an NCCL communicator of {words} is alive: ");
        assert!(reason.contains(&told) && reason.contains("ncclCommDestroy"), "{step}: {reason}");
        let end = if place == 0 { "destroy" } else { "abort" };
        assert_eq!(self.take(&format!("{end} {place}")), 0);
        self.is_saved();
    }

    fn goes_through_every_way(&mut self) {
        self.stands_until("init 4", "4 ranks (ncclCommInitRank)", 0);
        self.stands_until("config 8", "8 ranks (ncclCommInitRankConfig)", 0);
        self.stands_until("scalable 16", "16 ranks (ncclCommInitRankScalable)", 0);
        // By the names that profilers call.
        self.stands_until("profiled 6", "6 ranks (ncclCommInitRank)", 0);
        assert_eq!(self.take("init 6"), 0);
        assert_eq!(self.take("unprofile 0"), 0);
        self.is_saved();
        assert_eq!(self.take("init 1"), 0);
        // 1 + 2 * 2 + 3 * 3: the parameter that is passed by value.
        assert_eq!(self.take("sum 0"), 14);
        self.is_saved();
        assert_eq!(self.take("reduce 0"), 0);
        self.stands_until("grow 5", "5 ranks (ncclCommGrow)", 1);
        assert_eq!(self.take("destroy 0"), 0);
        assert_eq!(self.take("all 2"), 0);
        assert_eq!(self.take("destroy 0"), 0);
        assert!(self.refused().contains("of 2 ranks (ncclCommInitAll)"), "the other one is there");
        assert_eq!(self.take("abort 1"), 0);
        self.is_saved();
        // What fails has made nothing.
        assert_eq!(self.take("init -2"), 4);
        self.is_saved();
    }
}

#[test]
fn communicators_of_several_ranks_refuse_a_checkpoint_by_name() {
    Steps::new(&mut Launcher::new(), &[]).goes_through_every_way();
}

#[test]
fn a_library_that_is_opened_is_seen_too() {
    let mut launcher = Launcher::new();
    let library = launcher.path("libnccl.so.2");
    Steps::new(&mut launcher, &[&library]).goes_through_every_way();
}

/// A profiler between the program and NCCL, in front of the interposer or behind it.
#[test]
fn calls_through_a_profiler_are_counted_once() {
    for is_in_front in [false, true] {
        let mut launcher = Launcher::new();
        let nccl = compile(&launcher, "fake_nccl.c", "libnccl.so.2", &SHARED);
        let nccl = nccl.to_str().expect("text");
        let profiler = compile(&launcher, "nccl_profiler.c", "profiler.so", &["-shared", "-fPIC"]);
        let profiler = profiler.to_str().expect("text");
        let libraries = ["-DLINKED", "-Wl,--no-as-needed", profiler, nccl];
        let program = compile_with_driver(&launcher, "nccl.c", "nccl", &[&libraries[..], &["-ldl"]].concat());
        let mut command = preloaded(&launcher, &program);
        if is_in_front {
            let preloads = command.get_envs().find(|(name, _)| *name == "LD_PRELOAD");
            let ours = preloads.and_then(|(_, value)| value?.to_str()).expect("the interposer");
            let both = format!("{profiler}:{ours}");
            command.env("LD_PRELOAD", both);
        }
        let mut steps = Steps::start_command(&mut launcher, command, &[]);
        steps.stands_until("init 4", "4 ranks (ncclCommInitRank)", 0);
        steps.stands_until("profiled 5", "5 ranks (ncclCommInitRank)", 0);
    }
}

#[test]
fn parts_of_a_communicator_count_by_themselves() {
    let mut launcher = Launcher::new();
    let mut steps = Steps::new(&mut launcher, &[]);
    assert_eq!(steps.take("all 4"), 0);
    // A part of one rank, one of two, and none.
    for (step, expected) in [("split 0", 1), ("split 2", 2), ("shrink 2", 2), ("split -1", 0)] {
        assert_eq!(steps.take(step), 0);
        assert!(steps.refused().contains("of 4 ranks (ncclCommInitAll)"));
        if expected > 0 {
            assert_eq!(steps.take("abort 1"), 0);
        }
    }
    let mut launcher = Launcher::new();
    let mut steps = Steps::new(&mut launcher, &[]);
    assert_eq!(steps.take("init 4"), 0);
    assert_eq!(steps.take("split 2"), 0);
    assert_eq!(steps.take("destroy 0"), 0);
    assert!(steps.refused().contains("of 2 ranks (ncclCommSplit)"));
    assert_eq!(steps.take("abort 1"), 0);
    assert_eq!(steps.take("init 4"), 0);
    assert_eq!(steps.take("split 0"), 0);
    assert_eq!(steps.take("destroy 0"), 0);
    steps.is_saved();
    assert_eq!(steps.take("init 5"), 0);
    assert_eq!(steps.take("shrink 2"), 0);
    assert_eq!(steps.take("destroy 0"), 0);
    assert!(steps.refused().contains("of 3 ranks (ncclCommShrink)"));
}

#[test]
fn a_communicator_that_is_being_made_refuses_a_checkpoint() {
    let mut launcher = Launcher::new();
    let peer = launcher.path("peer");
    let mut steps = Steps::new(&mut launcher, &[]);
    steps.program.say("init 3");
    assert_eq!(steps.program.line(), "waits");
    let reason = steps.refused();
    assert!(reason.contains("of 3 ranks (ncclCommInitRank) is under way"), "{reason}");
    fs::write(peer, "").expect("written");
    assert_eq!(steps.program.line(), "0");
    assert!(steps.refused().contains("is alive"));
}

#[test]
#[ignore = "a measurement: cargo test --release -p ckpt-interpose --test front a_collective_costs -- --ignored --nocapture"]
fn a_collective_costs() {
    const CALLS: u32 = 1_000_000;
    let mut launcher = Launcher::new();
    let mut steps = Steps::new(&mut launcher, &[]);
    assert_eq!(steps.take("init 4"), 0);
    let counted = steps.take(&format!("speed {CALLS}"));
    drop(steps);
    let mut command = plain(&launcher, &launcher.path("nccl"));
    let driver = driver();
    let places = [launcher.directory.path(), driver.parent().expect("a directory")];
    command.env("LD_LIBRARY_PATH", std::env::join_paths(places).expect("paths"));
    let mut program = Program::start(command);
    assert_eq!(program.line(), "ready");
    assert_eq!(program.does("init 4"), "0");
    let alone: i32 = program.does(&format!("speed {CALLS}")).parse().expect("a number");
    let [counted, alone] = [counted, alone].map(|tenths| f64::from(tenths) / 10.0);
    println!("ncclAllReduce: {alone} ns without the interposer, {counted} ns with it");
}

#[test]
fn a_program_without_nccl_finds_none() {
    let mut launcher = Launcher::new();
    let program = compile_with_driver(&launcher, "nccl.c", "nccl", &["-ldl"]);
    assert_eq!(Steps::start(&mut launcher, &program, &[]).take("found 0"), 0);
    // What is linked is found, and by default too.
    assert_eq!(Steps::new(&mut launcher, &[]).take("found 0"), 1);
}

#[test]
fn calls_of_a_library_that_has_nccl_in_itself_stay_there() {
    let mut launcher = Launcher::new();
    let first = launcher.path("libnccl.so.2");
    let bundle = compile(&launcher, "fake_nccl.c", "bundle.so", &["-shared", "-fPIC", "-DSALT=100"]);
    let mut steps = Steps::new(&mut launcher, &[&first, &bundle]);
    assert_eq!(steps.take("bundle 4"), 0);
    assert_eq!(steps.take("sum 0"), 114);
    assert!(steps.refused().contains("of 4 ranks (ncclCommInitRank) is alive"));
}

/// Copies of NCCL beside the first one.
fn copies(launcher: &Launcher, count: u32) -> Vec<PathBuf> {
    let copy = |number: u32| {
        let salt = format!("-DSALT={}", number * 100);
        compile(launcher, "fake_nccl.c", &format!("other{number}.so"), &[&SHARED[..], &[&salt]].concat())
    };
    (1..=count).map(copy).collect()
}

#[test]
fn a_second_copy_is_counted_too() {
    let mut launcher = Launcher::new();
    let (first, others) = (launcher.path("libnccl.so.2"), copies(&launcher, 1));
    let mut steps = Steps::new(&mut launcher, &[&first, &others[0]]);
    assert_eq!(steps.take("init 1"), 0);
    assert_eq!(steps.take("sum 0"), 14);
    steps.is_saved();
    assert_eq!(steps.take("other 4"), 0);
    // Its own function has made it.
    assert_eq!(steps.take("sum 0"), 114);
    assert!(steps.refused().contains("of 4 ranks (ncclCommInitRank) is alive"));
    assert_eq!(steps.take("leave 0"), 0);
    steps.is_saved();
}

#[test]
fn a_fifth_copy_is_left_alone_and_told() {
    let mut launcher = Launcher::new();
    let (first, others) = (launcher.path("libnccl.so.2"), copies(&launcher, 4));
    let libraries: Vec<&Path> = [&first].into_iter().chain(&others).map(PathBuf::as_path).collect();
    let mut steps = Steps::new(&mut launcher, &libraries);
    for other in 0..3 {
        assert_eq!(steps.take(&format!("seek {other}")), 0);
    }
    steps.is_saved();
    assert_eq!(steps.take("seek 3"), 0);
    assert!(steps.refused().contains("a copy of NCCL whose communicators are not seen"));
}

#[test]
fn names_for_profilers_of_a_second_copy_are_told() {
    let mut launcher = Launcher::new();
    let (first, others) = (launcher.path("libnccl.so.2"), copies(&launcher, 1));
    let mut steps = Steps::new(&mut launcher, &[&first, &others[0]]);
    assert_eq!(steps.take("seek 0"), 0);
    steps.is_saved();
    assert_eq!(steps.take("second 0"), 0);
    assert!(steps.refused().contains("called by names as pncclAllReduce"));
}
