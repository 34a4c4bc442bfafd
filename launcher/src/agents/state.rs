//! Who is connected, who is away and who has come back.

use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;
use std::time::Instant;

use ckpt_protocol::agent::GpuReport;

use super::activity::Look;
use super::line::Line;
use super::mirrors::Holdings;
use super::prepare::Preparation;
use super::process::{Away, Back, GpuState, Life, Loss, Process, QuiesceError, Quiesced};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Listening,
    Quiescing { attempt: u64, end: Instant },
    Deaf,
}

pub(super) struct State {
    pub(super) phase: Phase,
    pub(super) next_id: u64,
    pub(super) connections: BTreeMap<u64, Connection>,
    /// Who has gone away and is not back, unless [`Agents::quiesce`](super::Agents::quiesce) has handed it out.
    pub(super) away: Vec<Away>,
    /// Who has device memory, and whose connection was lost since the last quiesce began: nobody knows what it has
    /// done with that memory.
    pub(super) torn: Vec<Away>,
    /// Who said hello since the last quiesce began.
    pub(super) arrivals: Vec<Arrival>,
    pub(super) holdings: Holdings,
}

pub(super) struct Connection {
    pub(super) stream: Arc<Line>,
    pub(super) process: Process,
    pub(super) life: Arc<Life>,
    /// The agent has said hello and all that belongs to it.
    pub(super) is_greeted: bool,
    /// The attempt of a Quiesce that the agent has not answered, or has refused in the present attempt.
    pub(super) asked: Option<u64>,
    /// How far it is in an attempt that has not begun to send agents away.
    pub(super) preparation: Option<Preparation>,
    /// What the agent said when it refused the present attempt.
    pub(super) refusal: Option<String>,
    /// Whether it was asked what its process does with GPUs.
    pub(super) look: Look,
}

pub(super) struct Arrival {
    pub(super) connection: u64,
    pub(super) process: Process,
    /// What a Back said; `None` for an agent that begins.
    pub(super) back: Option<Returned>,
}

/// What an agent says of its return.
pub(super) struct Returned {
    pub(super) restored: bool,
    pub(super) copied_bytes: u64,
    pub(super) lost: Option<String>,
}

/// How a connection ended.
pub(super) enum Parting {
    /// The agent is gone.
    Lost,
    /// It has gone away for a dump, and has told what was on its process's GPUs.
    Farewell(Option<Box<GpuReport>>),
}

impl Arrival {
    /// Whether this is the process that went away, be it let go on, restored, or with another program.
    pub(super) fn is(&self, gone: &Process) -> bool {
        let restored = self.back.as_ref().is_some_and(|back| back.restored);
        let elsewhere = restored || gone.host_pid.is_none();
        self.process.pid == gone.pid && (elsewhere || self.process.host_pid == gone.host_pid)
    }

    pub(super) fn loss(&self) -> Option<Loss> {
        let reason = self.back.as_ref()?.lost.clone()?;
        Some(Loss { process: self.process.clone(), reason })
    }
}

impl State {
    /// Those who have said hello and were not asked to go yet. They count as asked from now on.
    pub(super) fn unasked(&mut self, attempt: u64) -> Vec<Arc<Line>> {
        let mut streams = Vec::new();
        for connection in self.connections.values_mut() {
            if connection.is_greeted && connection.asked.is_none() {
                connection.asked = Some(attempt);
                streams.push(Arc::clone(&connection.stream));
            }
        }
        streams
    }

    /// Hands out those who have gone away, with what they had on their GPUs.
    pub(super) fn quiesced(&mut self, attempt: u64) -> Quiesced {
        let mut away = mem::take(&mut self.away);
        let state = |away: &mut Away| {
            let report = away.report.take()?;
            let mirror = away.process.pid.and_then(|pid| self.holdings.mirror(pid)).cloned();
            Some(GpuState { process: away.process.clone(), mirror, report })
        };
        let gpu = away.iter_mut().filter_map(state).collect();
        Quiesced { attempt, away, gpu }
    }

    pub(super) fn is_away(&self, pid: u32) -> bool {
        self.away.iter().any(|away| away.process.pid == Some(pid))
    }

    /// Whether an agent is there, and has put back what its process had on the GPU.
    pub(super) fn is_here(&self, pid: u32) -> bool {
        self.connections.values().any(|one| one.is_greeted && one.process.pid == Some(pid))
    }

    /// The end of an attempt that somebody refused. Whoever did can be asked again.
    pub(super) fn refused(&mut self) -> Option<QuiesceError> {
        let mut refusals = Vec::new();
        for connection in self.connections.values_mut() {
            if let Some(reason) = connection.refusal.take() {
                connection.asked = None;
                refusals.push((connection.process.clone(), reason));
            }
        }
        let others = refusals.len().saturating_sub(1);
        let (process, reason) = refusals.into_iter().next()?;
        Some(QuiesceError::Refused { process, reason, others })
    }

    pub(super) fn who_is_back(&self, expected: &[Away]) -> Back {
        let lost = self.arrivals.iter().filter_map(Arrival::loss).collect();
        let mut back = Back { lost, ..Back::default() };
        let mut arrivals: Vec<_> = self.arrivals.iter().collect();
        for away in expected {
            let arrival = arrivals.iter().position(|arrival| arrival.is(&away.process));
            match arrival.map(|place| arrivals.swap_remove(place).back.as_ref()) {
                Some(Some(returned)) => {
                    let count = if returned.restored { &mut back.restored } else { &mut back.continued };
                    *count += 1;
                    back.copied_bytes = back.copied_bytes.saturating_add(returned.copied_bytes);
                }
                // Another program in the same process: what went away will not come back.
                Some(None) => {}
                None if away.life.is_over() => {}
                None => back.missing.push(away.process.clone()),
            }
        }
        back
    }
}
