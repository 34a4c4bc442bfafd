//! Ranks of NCCL that are brought to a consistent cut by the real coordinator, with the launcher's part played. NCCL is
//! simnccl over sockets: its proxy calls the driver.

use std::time::{Duration, Instant};

use ckpt_cut::{Coordinator, Order, RankId, Report, Settings, State};
use ckpt_protocol::agent::ToAgent;
use common::{TEST_TIMEOUT, until};

use super::*;

struct Job {
    launcher: Launcher,
    ranks: Vec<Program>,
    /// By rank.
    agents: Vec<Agent>,
    coordinator: Coordinator,
    /// The newest report of each rank.
    reports: Vec<Option<Report>>,
    begun: Instant,
}

impl Job {
    fn start(ranks: usize, way: &str) -> Self {
        let launcher = Launcher::new();
        let nccl = driver().with_file_name("libnccl.so.2");
        let program = compile_with_driver(&launcher, "ranks.c", "ranks", &[nccl.to_str().expect("text")]);
        let start = |rank: usize| {
            let mut command = preloaded(&launcher, &program);
            command.env("SIMCUDA_DEVICES", ranks.to_string()).env("NCCL_SOCKET_IFNAME", "lo");
            command.envs([("NCCL_P2P_DISABLE", "1"), ("NCCL_SHM_DISABLE", "1"), ("NCCL_NVLS_ENABLE", "0")]);
            command.args([rank.to_string(), ranks.to_string()]).arg(launcher.directory.path()).arg(way);
            Program::start(command)
        };
        let mut ranks: Vec<Program> = (0..ranks).map(start).collect();
        let agents = ranks.iter().map(|rank| agent_of(&launcher, rank)).collect();
        ranks.iter_mut().for_each(|rank| assert_eq!(rank.line(), "ready"));
        let settings = Settings { timeout: TEST_TIMEOUT, attempts: 1, back_off: Duration::from_millis(1) };
        let mut coordinator = Coordinator::new(settings);
        (0..ranks.len()).for_each(|rank| coordinator.join(RankId(rank as u64), Duration::ZERO));
        let reports = vec![None; ranks.len()];
        Self { launcher, ranks, agents, coordinator, reports, begun: Instant::now() }
    }

    /// Brings all ranks to a cut; returns how many operations each of them has begun.
    fn cut(&mut self) -> Vec<u64> {
        let Self { agents, coordinator, reports, begun, .. } = self;
        let mut operations = vec![0; agents.len()];
        coordinator.request(begun.elapsed());
        until("the cut", || {
            for (RankId(rank), order) in coordinator.take_orders() {
                agents[usize::try_from(rank).expect("small")].say(&ToAgent::Cut { order });
            }
            for (rank, agent) in agents.iter().enumerate() {
                while let Some(report) = agent.report() {
                    operations[rank] = report.members.iter().map(|member| member.sequence).sum();
                    coordinator.receive(RankId(rank as u64), report.clone());
                    reports[rank] = Some(report);
                }
            }
            assert!(!matches!(coordinator.state(), State::Failed(_)), "{:?}", coordinator.state());
            (*coordinator.state() == State::Cut).then_some(())
        });
        operations
    }

    /// Lets all ranks run until each has begun more operations than before, and brings them to a cut again.
    fn cut_after(&mut self, before: &[u64]) -> Vec<u64> {
        until("all ranks to have moved", || {
            self.run_on();
            std::thread::sleep(Duration::from_millis(5));
            let operations = self.cut();
            operations.iter().zip(before).all(|(now, before)| now > before).then_some(operations)
        })
    }

    fn run_on(&mut self) {
        self.coordinator.release();
        for (RankId(rank), order) in self.coordinator.take_orders() {
            self.agents[usize::try_from(rank).expect("small")].say(&ToAgent::Cut { order });
        }
    }

    /// Takes all ranks off their GPUs, one after the other: none of them waits for another one.
    fn saves(&mut self) {
        let agents = std::mem::take(&mut self.agents);
        let mut back = while_away(&mut self.launcher, agents, || {});
        let place = |agent: &Agent| self.ranks.iter().position(|rank| rank.pid() == agent.hello.pid);
        back.sort_by_key(place);
        self.agents = back;
    }

    fn ends(mut self) {
        fs::write(self.launcher.path("stop"), "").expect("written");
        for rank in &mut self.ranks {
            assert_eq!(rank.line(), "done");
            assert_eq!(rank.ends(), Some(0));
        }
    }
}

/// Several cuts, with a checkpoint at each.
fn is_saved_again_and_again(ranks: usize, way: &str) {
    let mut job = Job::start(ranks, way);
    let mut operations = job.cut();
    for _ in 0..3 {
        job.saves();
        operations = job.cut_after(&operations);
    }
    job.run_on();
    job.ends();
}

#[test]
fn ranks_are_saved_at_a_cut() {
    is_saved_again_and_again(2, "plain");
}

#[test]
fn groups_parts_and_pairs_are_saved_at_a_cut() {
    is_saved_again_and_again(3, "groups");
}

/// Their registration is a step, their end is not: a rank does it without the others.
#[test]
fn ranks_that_deregister_windows_at_different_steps_are_saved_at_a_cut() {
    is_saved_again_and_again(2, "windows");
}

#[test]
fn communicators_that_do_not_block_are_saved_at_a_cut() {
    is_saved_again_and_again(2, "nonblocking");
}

/// The part is used in the graph alone.
#[test]
fn launches_of_graphs_with_collectives_are_steps() {
    let mut job = Job::start(2, "graphs");
    let mut operations = job.cut();
    for _ in 0..3 {
        job.saves();
        operations = job.cut_after(&operations);
    }
    // A cut may come after any step: of a few cuts, none need be behind a third launch.
    let has_launched = |report: &Report| {
        report.members.iter().any(|member| member.call == "cuGraphLaunch" && member.sequence > 2)
    };
    for _ in 0..20 {
        if job.reports.iter().flatten().all(has_launched) {
            break;
        }
        operations = job.cut_after(&operations);
    }
    assert!(job.reports.iter().flatten().all(has_launched), "{:?}", job.reports);
    job.run_on();
    job.ends();
}

/// The launcher asks for nothing else, or is lost.
#[test]
fn ranks_run_on_after_a_cut() {
    let mut job = Job::start(2, "plain");
    let before = job.cut();
    job.cut_after(&before);
    // The connections are lost: the ranks run on by themselves.
    job.agents.clear();
    job.ends();
}

#[test]
fn ranks_that_did_not_stop_at_a_cut_are_refused() {
    let job = Job::start(2, "plain");
    for agent in &job.agents {
        let reason = refusal(agent, 1);
        assert!(
            reason.contains("of 2 ranks (ncclCommInitRank) is alive: its ranks did not stop"),
            "{reason}"
        );
        // Being asked to stop is not enough.
        agent.say(&ToAgent::Cut { order: Order::Count { attempt: 1 } });
        assert!(refusal(agent, 2).contains("did not stop"));
        agent.say(&ToAgent::Cut { order: Order::Release });
    }
    job.ends();
}
