//! The state that all connections share: which agents are connected, detached or returned.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::sync::Arc;
use std::time::Instant;

use ckpt_protocol::agent::GpuReport;

use super::activity::ActivityQuery;
use super::cut::Cut;
use super::mirrors::{Holdings, Mirror};
use super::prepare::Preparation;
use super::process::{
    DetachedProcess, GpuState, Loss, Process, ProcessHandle, QuiesceError, Quiesced, ReturnSummary,
};
use super::release::Release;
use super::stream::AgentStream;
use super::window::Offer;

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    #[default]
    Listening,
    Quiescing {
        attempt: u64,
        end: Instant,
    },
    NotListening,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) phase: Phase,
    pub(super) next_id: u64,
    pub(super) connections: BTreeMap<u64, Connection>,
    /// Processes that have detached and not returned, except those that [`Agents::detach_all`](super::Agents::detach_all) has
    /// handed out.
    pub(super) detached: Vec<DetachedProcess>,
    /// Processes with device memory whose connection was lost since the last quiesce began. What they have done with
    /// that memory is unknown.
    pub(super) disconnected: Vec<DetachedProcess>,
    /// Agents that registered since the last quiesce began.
    pub(super) arrivals: Vec<Arrival>,
    pub(super) holdings: Holdings,
    /// Device memory that the current attempt has to store.
    pub(super) offers: Vec<Offer>,
    /// Processes for which parts of their mirrors are being read from the store, by their IDs in the job's PID namespace.
    pub(super) filling: BTreeSet<u32>,
    pub(super) cut: Cut,
}

/// That a process cannot be detached in the current attempt.
pub(super) struct Refusal {
    since: Instant,
    reason: String,
}

impl Refusal {
    /// The refusal with this reason, if there is `earlier` one of the same process: since then.
    pub(super) fn new(reason: String, earlier: Option<Self>) -> Self {
        Self { since: earlier.map_or_else(Instant::now, |earlier| earlier.since), reason }
    }
}

pub(super) struct Connection {
    pub(super) stream: Arc<AgentStream>,
    pub(super) process: Process,
    pub(super) handle: Arc<ProcessHandle>,
    /// The handshake is complete.
    pub(super) is_registered: bool,
    /// The agent can hand its memory out through a window.
    pub(super) supports_reads: bool,
    /// Whether the agent parks memory by keys.
    pub(super) parks_by_key: bool,
    /// The restored process can load its memory through a window.
    pub(super) supports_loads: bool,
    /// The attempt of a Quiesce that the agent has not answered, or has refused in the current attempt.
    pub(super) asked: Option<u64>,
    /// Announcements and mirrors that the agent has not answered. It may be in a call of its driver.
    pub(super) unprepared: Unprepared,
    /// Progress in an attempt that has not yet begun to detach agents.
    pub(super) preparation: Option<Preparation>,
    /// The agent's reason for refusing the current attempt.
    pub(super) refusal: Option<Refusal>,
    /// The process has lost its GPU state in a checkpoint, before it was detached, and cannot continue.
    pub(super) is_lost: bool,
    /// State of the question what the process does with its GPUs.
    pub(super) activity_query: ActivityQuery,
    /// State of the request to release the process's GPUs.
    pub(super) release: Release,
}

/// Messages before the detach, each of which an agent answers.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Unprepared {
    pub(super) sent: u64,
    pub(super) answered: u64,
    /// It is watched until the next answer.
    pub(super) is_watched: bool,
}

impl Unprepared {
    pub(super) fn answer(&mut self) {
        self.answered = self.sent.min(self.answered + 1);
        self.is_watched = false;
    }

    pub(super) fn is_silent(&self) -> bool {
        self.answered < self.sent
    }
}

pub(super) struct Arrival {
    pub(super) connection: u64,
    pub(super) process: Process,
    /// Content of the agent's Back message; `None` for an agent that starts.
    pub(super) returned: Option<Returned>,
}

/// What an agent reports about its return.
pub(super) struct Returned {
    pub(super) restored: bool,
    pub(super) copied_bytes: u64,
    pub(super) lost: Option<String>,
}

/// How a connection ended.
pub(super) enum ConnectionEnd {
    /// The connection failed or the process ended.
    Lost,
    /// It was made for one request, which was answered.
    Answered,
    /// The agent has detached for a dump and reported what was on its process's GPUs.
    Detached(Option<Box<GpuReport>>),
}

impl Arrival {
    /// Whether this is the process that had detached, whether it was continued, restored, or executed another program.
    pub(super) fn is(&self, detached: &Process) -> bool {
        let restored = self.returned.as_ref().is_some_and(|returned| returned.restored);
        let ignores_host_pid = restored || detached.host_pid.is_none();
        self.process.pid == detached.pid && (ignores_host_pid || self.process.host_pid == detached.host_pid)
    }

    pub(super) fn loss(&self) -> Option<Loss> {
        let reason = self.returned.as_ref()?.lost.clone()?;
        Some(Loss { process: self.process.clone(), reason })
    }
}

impl State {
    /// Registered agents that have not been asked to detach. They count as asked from now on.
    pub(super) fn mark_asked(&mut self, attempt: u64) -> Vec<Arc<AgentStream>> {
        let mut streams = Vec::new();
        for connection in self.connections.values_mut() {
            if connection.is_registered && connection.asked.is_none() {
                connection.asked = Some(attempt);
                streams.push(Arc::clone(&connection.stream));
            }
        }
        streams
    }

    /// Hands out the processes that have detached, with what they had on their GPUs.
    pub(super) fn take_quiesced(&mut self, attempt: u64) -> Quiesced {
        let mut detached = mem::take(&mut self.detached);
        let state = |one: &mut DetachedProcess| {
            let report = one.report.take()?;
            let mirror = one.process.pid.and_then(|pid| self.holdings.mirror(pid)).cloned();
            let (process, supports_loads) = (one.process.clone(), one.supports_loads);
            Some(GpuState { process, mirror, report: *report, gpus: Vec::new(), supports_loads })
        };
        let gpu = detached.iter_mut().filter_map(state).collect();
        Quiesced { attempt, detached, gpu }
    }

    /// Takes the mirrors of processes that will get windows and have returned.
    pub(super) fn take_replaced_mirrors(&mut self) -> Vec<Mirror> {
        let mut replaced = Vec::new();
        for one in self.connections.values().filter(|one| one.is_registered && one.supports_reads) {
            let Some(pid) = one.process.pid else { continue };
            if self.holdings.mirror(pid).is_some_and(|mirror| mirror.window.is_none()) {
                replaced.extend(self.holdings.set_mirror(pid, &one.handle, None));
            }
        }
        replaced
    }

    pub(super) fn is_detached(&self, pid: u32) -> bool {
        self.detached.iter().any(|one| one.process.pid == Some(pid))
    }

    /// Whether a process has a registered agent, and has its GPU state back.
    pub(super) fn is_registered(&self, pid: u32) -> bool {
        self.connections.values().any(|one| one.is_registered && one.process.pid == Some(pid))
    }

    /// The error of an attempt that agents refused. Those agents can be asked again.
    pub(super) fn take_refusals(&mut self) -> Option<QuiesceError> {
        let mut refusals = Vec::new();
        for connection in self.connections.values_mut() {
            if let Some(Refusal { since, reason }) = connection.refusal.take() {
                connection.asked = None;
                refusals.push((since, connection.process.clone(), reason));
            }
        }
        // Those of processes that wait for each other follow from the first one.
        refusals.sort_by_key(|(since, ..)| *since);
        let others = refusals.len().saturating_sub(1);
        let (_, process, reason) = refusals.into_iter().next()?;
        Some(QuiesceError::Refused { process, reason, others })
    }

    pub(super) fn summarize_return(&self, expected: &[DetachedProcess]) -> ReturnSummary {
        let lost = self.arrivals.iter().filter_map(Arrival::loss).collect();
        let mut summary = ReturnSummary { lost, ..ReturnSummary::default() };
        let mut arrivals: Vec<_> = self.arrivals.iter().collect();
        for detached in expected {
            let arrival = arrivals.iter().position(|arrival| arrival.is(&detached.process));
            match arrival.map(|index| arrivals.swap_remove(index).returned.as_ref()) {
                Some(Some(returned)) => {
                    let count =
                        if returned.restored { &mut summary.restored } else { &mut summary.continued };
                    *count += 1;
                    summary.copied_bytes = summary.copied_bytes.saturating_add(returned.copied_bytes);
                }
                // The process executed another program: the agent that detached will not return.
                Some(None) => {}
                None if detached.handle.has_ended() => {}
                None => summary.missing.push(detached.process.clone()),
            }
        }
        summary
    }
}
