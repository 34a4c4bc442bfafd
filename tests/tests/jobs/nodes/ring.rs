//! Four machines with a connection from each to the next one: processes, launchers and machines die, and the network breaks
//! in two halves, at any moment. If only processes of the job die, it is restarted. Otherwise the job ends on all machines,
//! leaves nothing behind, and goes on when the same commands are run again.

use super::job::{Job, codes, kill_processes, machines, said};
use ckpt_run_tests::processes::state;
use ckpt_run_tests::{Running, python, seeded_rng, until};
use std::process::Command;
use std::time::{Duration, Instant};

pub const ROUNDS: usize = 4000;

/// The rounds are those of a ring that was never broken.
pub fn assert_rounds(job: &Job, running: &[Running]) {
    for node in 0..job.nodes() {
        let mut command = Command::new(python());
        command.arg(ckpt_run_tests::programs().join("nodes/ring.py")).arg("expect");
        command.args([node, ROUNDS, job.nodes()].map(|number| number.to_string()));
        let expected = String::from_utf8(command.output().unwrap().stdout).unwrap();
        let found = job.machines.sandboxes[node].read("rounds.txt");
        assert!(found == expected, "node {node}: {} lines\n{}", found.lines().count(), said(running));
    }
}

/// The packet rules that are there on any machine.
fn rules(job: &Job) -> Vec<String> {
    let tables = |node| {
        let mut command = Command::new(python());
        command.arg(ckpt_run_tests::programs().join("nodes/tables.py"));
        let output = job.machines.on(node, &command).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    (0..job.nodes()).map(tables).filter(|tables| !tables.is_empty()).collect()
}

/// Whether a process of the job is frozen on any machine.
fn is_frozen(running: &[Running]) -> bool {
    let pids = running.iter().flat_map(Running::descendants);
    pids.into_iter().any(|pid| state(pid) == Some('t'))
}

/// All launchers have ended, or were killed. The job is resumed, runs on, and is saved.
fn goes_on(job: &Job) -> Vec<Running> {
    assert_eq!(rules(job), [""; 0]);
    let before = (0..job.nodes()).map(|node| job.lines(node, "rounds.txt")).max().unwrap_or_default();
    let mut running = job.start();
    job.until_answering(&mut running);
    job.until_lines(&mut running, "rounds.txt", before + 2);
    job.checkpoint(&running);
    running
}

/// What is killed.
#[derive(Clone, Copy, Debug)]
enum Victim {
    /// The job's process on a machine.
    Rank(usize),
    /// The launcher alone.
    Launcher(usize),
    Machine(usize),
    Machines(usize, usize),
}

impl Victim {
    fn kill(self, running: &mut [Running]) {
        match self {
            Self::Rank(node) => assert_eq!(kill_processes(&running[node], "ring.py"), 1),
            Self::Launcher(node) => running[node].kill_launcher(),
            Self::Machine(node) => running[node].kill_everything(),
            Self::Machines(one, other) => {
                running[one].kill_everything();
                running[other].kill_everything();
            }
        }
    }
}

#[test]
fn a_ring_of_four_machines_survives_kills() {
    let Some(machines) = machines(4) else { return };
    let mut job = Job::ring(machines, ROUNDS);
    job.options.extend(["--interval", "2s", "--max-restarts", "10"].map(str::to_owned));
    let mut random = seeded_rng(u64::from(std::process::id()));
    let mut running = job.begun("rounds.txt");
    job.checkpoint(&running);
    let victims = [
        Victim::Rank(1),
        Victim::Launcher(2),
        Victim::Machine(3),
        Victim::Machine(0),
        Victim::Rank(0),
        Victim::Launcher(0),
        Victim::Machines(0, 3),
    ];
    for victim in victims {
        std::thread::sleep(Duration::from_millis(random.u64(0..2000)));
        let before = (0..job.nodes()).map(|node| job.lines(node, "rounds.txt")).max().unwrap_or_default();
        victim.kill(&mut running);
        if let Victim::Rank(_) = victim {
            // All launchers are there: they restart the job.
            job.until_lines(&mut running, "rounds.txt", before + 2);
            job.checkpoint(&running);
            continue;
        }
        for one in &mut running {
            let status = one.wait_status();
            assert!(!status.success() && status.code() != Some(2), "{victim:?}: {}", one.said());
        }
        running = goes_on(&job);
    }
    job.full_speed();
    assert_eq!(codes(&mut running), [0; 4], "{}", said(&running));
    assert_rounds(&job, &running);
}

/// At which moment the network breaks.
#[derive(Clone, Copy, Debug)]
enum Phase {
    Running,
    Frozen,
    Storing,
    Resuming,
}

impl Phase {
    fn fault(self) -> Option<&'static str> {
        match self {
            Self::Running => None,
            Self::Frozen => Some("dump-post-dump@1=delay:3000"),
            Self::Storing => Some("save-before-commit@1=delay:3000"),
            Self::Resuming => Some("part-restored@1=delay:3000"),
        }
    }
}

/// The job, started so that the phase can be met, and at that moment.
fn at_the_moment(job: &mut Job, phase: Phase) -> Vec<Running> {
    job.fault(3, phase.fault());
    let messages = |job: &Job| job.machines.sandboxes[3].read("job.err").matches("fault point").count();
    let before = messages(job);
    let mut running = job.start();
    if !matches!(phase, Phase::Resuming) {
        job.until_answering(&mut running);
    }
    if matches!(phase, Phase::Frozen | Phase::Storing) {
        let mut call = job.machines.sandboxes[2].command(["checkpoint"]);
        call.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
        drop(call.spawn().unwrap());
    }
    if phase.fault().is_some() {
        running[3].until("the moment", || (messages(job) > before).then_some(()));
    }
    running
}

#[test]
fn a_network_in_two_halves_ends_the_job_on_both_sides() {
    let Some(machines) = machines(4) else { return };
    let mut job = Job::ring(machines, ROUNDS);
    let options = ["--freeze-timeout", "8s", "--node-timeout", "12s", "--interval", "off"];
    job.options.extend(options.map(str::to_owned));
    let mut running = job.begun("rounds.txt");
    job.checkpoint(&running);
    running[0].kill_everything();
    codes(&mut running[1..]);
    for phase in [Phase::Running, Phase::Frozen, Phase::Storing, Phase::Resuming] {
        let mut running = at_the_moment(&mut job, phase);
        job.machines.join_halves(false);
        let cut = Instant::now();
        // The lease ends before the other half is given up.
        until("tasks that run, and no packet rule", || {
            (!is_frozen(&running) && rules(&job).is_empty()).then_some(())
        });
        eprintln!("{phase:?}: not frozen {:.1} s after the cut", cut.elapsed().as_secs_f64());
        assert_eq!(codes(&mut running), [125; 4], "{phase:?}: {}", said(&running));
        eprintln!("{phase:?}: ended on all machines after {:.1} s", cut.elapsed().as_secs_f64());
        job.machines.join_halves(true);
        job.fault(3, None);
        let mut running = goes_on(&job);
        running[2].kill_everything();
        for one in &mut running {
            one.wait_status();
        }
    }
    job.full_speed();
    let mut running = job.start();
    assert_eq!(codes(&mut running), [0; 4], "{}", said(&running));
    assert_rounds(&job, &running);
}

/// One machine loses its network while all are frozen; the others name it.
#[test]
fn a_machine_that_is_cut_off_is_named() {
    let Some(machines) = machines(4) else { return };
    let mut job = Job::ring(machines, ROUNDS);
    job.options.extend(["--freeze-timeout", "8s", "--node-timeout", "12s"].map(str::to_owned));
    let mut running = job.begun("rounds.txt");
    job.checkpoint(&running);
    job.machines.connect(1, false);
    assert_eq!(codes(&mut running), [125; 4], "{}", said(&running));
    for node in [0, 2, 3] {
        assert!(job.has_said(node, "node 1 is silent"), "{}", running[node].said());
    }
    // Whichever is first: the launcher has heard nothing, or the kernel has had no answer.
    let own = ["node 0, the coordinator, is silent", "the connection to node 0 is lost"];
    assert!(own.iter().any(|text| job.has_said(1, text)), "{}", running[1].said());
    job.machines.connect(1, true);
    let mut running = goes_on(&job);
    job.full_speed();
    assert_eq!(codes(&mut running), [0; 4], "{}", said(&running));
    assert_rounds(&job, &running);
}
