//! One connection to the launcher, from the hello to its end.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use ckpt_cut::Report;
use ckpt_protocol::agent::{FromAgent, Hello, PROTOCOL_VERSION, ToAgent};
use ckpt_protocol::frame::FrameError;
use thiserror::Error;

use super::main_thread;
use crate::cuda::activity::Activity;
use crate::cuda::{Delivered, Gpu, MirrorNeeds, Request};
use crate::link::{self, Conversation, Link, describe};
use crate::process;
use crate::socket::Socket;

/// Why a conversation ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Hangup {
    /// The launcher is about to dump the process.
    Quiesced { attempt: u64 },
    /// The connection broke.
    Lost,
    /// The launcher refuses this agent, or sends a message that the agent does not understand.
    Refused,
}

/// A checkpoint that the agent has disconnected for and has not yet reported its return from.
pub(super) struct Absence {
    pub attempt: u64,
    /// The outcome of putting the state back, once that was tried: the bytes that were copied, or the reason of the
    /// loss.
    pub returned: Option<Result<u64, String>>,
}

/// A connection, and the process's start time after it was made; 0 if unknown.
pub(super) struct Found {
    pub socket: Socket,
    pub start_time_ticks: u64,
}

/// Converses with the launcher until one side ends the connection. `away` is taken once the return has been reported;
/// `started_ticks`, the start time that the launcher knows, is updated then.
pub(super) fn converse(
    found: &Found,
    away: &mut Option<Absence>,
    started_ticks: &mut u64,
    gpu: &mut dyn Gpu,
) -> Hangup {
    let Found { socket, start_time_ticks } = found;
    let mut conversation = Conversation::new(socket);
    // After noting down the socket, before reading: the main thread does these two the other way round.
    if away.is_none() && main_thread::has_ended() {
        return Hangup::Lost;
    }
    match greet(socket, away.as_ref(), *start_time_ticks, gpu.is_detached()) {
        Ok(ToAgent::Welcome { .. }) => {}
        Ok(_) => return Hangup::Refused,
        Err(hangup) => return hangup,
    }
    if let Some(absence) = away {
        let is_known = *started_ticks != 0 && *start_time_ticks != 0;
        let restored = is_known && started_ticks != start_time_ticks;
        if let Err(hangup) = come_back(socket, &mut conversation, absence, restored, gpu) {
            return hangup;
        }
        *away = None;
        if main_thread::has_ended() {
            return Hangup::Lost;
        }
    }
    *started_ticks = *start_time_ticks;
    let mut steps = Steps::default();
    loop {
        let answered =
            steps.hear(&mut conversation, gpu).and_then(|message| answer(message, &mut conversation, gpu));
        let answer = match answered {
            Ok(Some(answer)) => answer,
            Ok(None) => continue,
            Err(hangup) => return hangup,
        };
        match (say(socket, &answer), answer) {
            // Even if the launcher has not received it: the state is off the GPU.
            (_, FromAgent::Quiesced { attempt, .. }) => return Hangup::Quiesced { attempt },
            (Ok(()), _) => {}
            (Err(hangup), _) => return hangup,
        }
    }
}

/// The interval at which the steps of a rank are polled while a cut is wanted.
const STEPS_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// What the launcher was told of the rank's steps in this conversation.
#[derive(Default)]
struct Steps {
    /// There was an order. A rank that has come back still stands at the cut of an earlier conversation, of which the
    /// launcher expects no report.
    is_wanted: bool,
    reported: Option<Report>,
}

impl Steps {
    /// Waits for the next request that is not about the cut. Follows the launcher's orders and reports meanwhile.
    fn hear(&mut self, conversation: &mut Conversation<'_>, gpu: &mut dyn Gpu) -> Result<ToAgent, Hangup> {
        loop {
            let report = gpu.steps().filter(|_| self.is_wanted);
            let is_pending = report.is_some();
            if report != self.reported {
                if let Some(report) = report.clone() {
                    say(conversation.socket(), &FromAgent::Steps { report })?;
                }
                self.reported = report;
            }
            let limit = is_pending.then_some(STEPS_POLL_INTERVAL);
            match conversation.hear_within(limit).map_err(hangup)? {
                Some(ToAgent::Cut { order }) => {
                    self.is_wanted = true;
                    gpu.follow(order);
                }
                Some(message) => return Ok(message),
                None => {}
            }
        }
    }
}

/// Does what the launcher asks for; returns the answer, if it expects one.
fn answer(
    message: ToAgent,
    conversation: &mut Conversation<'_>,
    gpu: &mut dyn Gpu,
) -> Result<Option<FromAgent>, Hangup> {
    Ok(Some(match message {
        ToAgent::Prepare { attempt } => prepare(attempt, conversation, gpu),
        ToAgent::Stage { attempt, mirror, bytes, more_bytes, is_partial, copy_threads } => {
            let delivered = delivered(conversation.socket(), mirror, bytes, is_partial)?;
            stage(attempt, Delivered { more_bytes, copy_threads, ..delivered }, gpu)
        }
        ToAgent::StageWindow { attempt, mirror, bytes, window_bytes } => {
            let delivered = delivered(conversation.socket(), mirror, bytes, false)?;
            stage(attempt, Delivered { window_bytes: Some(window_bytes), ..delivered }, gpu)
        }
        ToAgent::Read { .. } | ToAgent::Stored { .. } => return Ok(link::late_answer(&message)),
        ToAgent::Unstage { .. } => {
            gpu.unstage();
            return Ok(None);
        }
        ToAgent::QueryActivity => {
            let Activity { calls, is_waiting } = gpu.activity();
            FromAgent::Activity { calls, is_waiting, members: gpu.members() }
        }
        ToAgent::Release { timeout_ms } => release(timeout_ms, gpu),
        ToAgent::Quiesce { attempt, timeout_ms, park_by_key: park, measures, .. } => {
            let timeout = Duration::from_millis(timeout_ms);
            quiesce(Request { attempt, timeout, park, measures }, conversation, gpu)
        }
        _ => return Err(Hangup::Refused),
    }))
}

/// Receives the descriptor that follows.
fn delivered(socket: &Socket, id: u64, bytes: u64, is_partial: bool) -> Result<Delivered, Hangup> {
    let file = socket.receive(1).ok().and_then(|mut files| files.pop()).ok_or(Hangup::Lost)?;
    let (more_bytes, may_stay, copy_threads, window_bytes) = (None, false, 0, None);
    Ok(Delivered { id, bytes, more_bytes, is_partial, may_stay, copy_threads, window_bytes, file })
}

/// A panic in this library, which must not end the agent while the state is off the GPU.
#[derive(Debug, Error)]
#[error("the interposer made a mistake when it {step}; please report it")]
struct Panicked {
    step: &'static str,
}

fn guarded<T>(step: &'static str, work: impl FnOnce() -> T) -> Result<T, Panicked> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|_| Panicked { step })
}

/// The outcome of a step with the text of its error, for the launcher.
fn described<T, E: std::error::Error>(outcome: Result<Result<T, E>, Panicked>) -> Result<T, String> {
    outcome.map_err(|panicked| describe(&panicked))?.map_err(|error| describe(&error))
}

/// Whether the process can be dumped, as far as that is known, and how large its mirror has to be.
fn prepare(attempt: u64, link: &mut dyn Link, gpu: &mut dyn Gpu) -> FromAgent {
    if let Err(reason) = described(guarded("looked for what cannot be saved", || gpu.check())) {
        return FromAgent::Failed { attempt, reason, is_lost: false };
    }
    let needs = || gpu.mirror_needs(link).map(|needs| (needs, gpu.ranks_on()));
    let (reason, is_lost) = match guarded("looked through the GPU's memory", needs) {
        Ok(Ok((MirrorNeeds { bytes, used_bytes, changes }, ranks_on))) => {
            let used_bytes = Some(used_bytes);
            return FromAgent::Needs { attempt, mirror_bytes: bytes, used_bytes, changes, ranks_on };
        }
        Ok(Err(error)) => (describe(&error), true),
        Err(panicked) => undone(&panicked, link, gpu),
    };
    FromAgent::Failed { attempt, reason, is_lost }
}

/// Undoes a step in which this library has panicked: it is unknown how far it went. Returns what to tell the launcher, and
/// whether the process is lost.
fn undone(panicked: &Panicked, link: &mut dyn Link, gpu: &mut dyn Gpu) -> (String, bool) {
    let undone = guarded("put it back again", || gpu.undo(link));
    (describe(panicked), !matches!(undone, Ok(Ok(()))))
}

fn stage(attempt: u64, mirror: Delivered, gpu: &mut dyn Gpu) -> FromAgent {
    match described(guarded("pinned memory", || gpu.stage(mirror))) {
        Ok(()) => FromAgent::Staged { attempt },
        Err(reason) => FromAgent::Failed { attempt, reason, is_lost: false },
    }
}

/// Takes the state off the GPU before the process is killed; returns the answer.
fn release(timeout_ms: u64, gpu: &mut dyn Gpu) -> FromAgent {
    let timeout = Duration::from_millis(timeout_ms);
    FromAgent::Released { problem: described(guarded("released the GPU", || gpu.release(timeout))).err() }
}

/// Takes the state off the GPU; returns the answer.
fn quiesce(request: Request, link: &mut dyn Link, gpu: &mut dyn Gpu) -> FromAgent {
    let attempt = request.attempt;
    let (reason, is_lost) = match guarded("took the GPU's state off", || gpu.detach(request, link)) {
        Ok(Ok(gpu)) => return FromAgent::Quiesced { attempt, gpu },
        Ok(Err(error)) => (describe(&error), error.is_lost()),
        Err(panicked) => undone(&panicked, link, gpu),
    };
    FromAgent::Failed { attempt, reason, is_lost }
}

/// Puts the state back if it is off the GPU, once, and reports that.
fn come_back(
    socket: &Socket,
    link: &mut dyn Link,
    absence: &mut Absence,
    restored: bool,
    gpu: &mut dyn Gpu,
) -> Result<(), Hangup> {
    if absence.returned.is_none() {
        absence.returned = Some(if gpu.is_detached() { put_back(socket, link, gpu)? } else { Ok(0) });
    }
    let (copied_bytes, lost) = match &absence.returned {
        Some(Ok(copied_bytes)) => (*copied_bytes, None),
        Some(Err(reason)) => (0, Some(reason.clone())),
        None => (0, None),
    };
    say(socket, &FromAgent::Reconnected { attempt: absence.attempt, restored, copied_bytes, lost })
}

/// The outcome of putting the state back from the mirror or through the window that the launcher delivers. Waits for the delivery first.
fn put_back(socket: &Socket, link: &mut dyn Link, gpu: &mut dyn Gpu) -> Result<Result<u64, String>, Hangup> {
    let (mirror, pairs) = match hear(socket)? {
        ToAgent::Deliver { mirror, bytes, pairs, is_partial, may_stay, copy_threads, .. } => {
            let mirror = if bytes > 0 {
                Some(Delivered { may_stay, copy_threads, ..delivered(socket, mirror, bytes, is_partial)? })
            } else {
                None
            };
            (mirror, pairs)
        }
        ToAgent::DeliverWindow { mirror, bytes, window_bytes, pairs } => {
            let delivered = delivered(socket, mirror, bytes, false)?;
            (Some(Delivered { window_bytes: Some(window_bytes), ..delivered }), pairs)
        }
        _ => return Err(Hangup::Lost),
    };
    Ok(described(guarded("put the GPU's state back", || gpu.attach(mirror, &pairs, link))))
}

/// Says hello and waits for the answer.
fn greet(
    socket: &Socket,
    away: Option<&Absence>,
    start_time_ticks: u64,
    is_detached: bool,
) -> Result<ToAgent, Hangup> {
    let hello = Hello {
        version: PROTOCOL_VERSION,
        pid: std::process::id(),
        start_time_ticks,
        exe: process::exe(),
        away: away.map(|absence| absence.attempt),
        is_detached,
        supports_activity: true,
        supports_release: true,
        supports_cut: true,
        supports_reads: true,
        supports_loads: true,
        parks_by_key: true,
        instance: process::instance(),
    };
    say(socket, &FromAgent::Hello(hello))?;
    hear(socket)
}

fn say(socket: &Socket, message: &FromAgent) -> Result<(), Hangup> {
    link::say(socket, message).map_err(|_| Hangup::Lost)
}

fn hear(socket: &Socket) -> Result<ToAgent, Hangup> {
    link::hear(socket).map_err(hangup)
}

fn hangup(error: FrameError) -> Hangup {
    match error {
        FrameError::NotJson(_) | FrameError::TooLong { .. } => Hangup::Refused,
        _ => Hangup::Lost,
    }
}
