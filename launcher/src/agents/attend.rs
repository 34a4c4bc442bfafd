//! The life of a connection: an agent's greeting, what it says while the job runs and in an attempt, its farewell or end.

use crate::sys::deadline::{
    AGENT_CLOSE_TIMEOUT, AGENT_EXIT_TIMEOUT, AGENT_HELLO_TIMEOUT, AGENT_WRITE_TIMEOUT,
};
use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Instant;

use ckpt_protocol::agent::{FromAgent, Hello, ToAgent};
use ckpt_protocol::frame::FrameError;
use rustix::process::Pid;
use tracing::{debug, warn};

use super::activity::{GpuActivity, Look};
use super::broker::{self, Party};
use super::line::{self, Line};
use super::prepare::Step;
use super::process::{Away, Life, Loss, Process, pidfd};
use super::state::{Arrival, Connection, Parting, Phase, Returned};
use super::{STACK_BYTES, Shared};
impl Shared {
    /// Asks an agent to go away. One that cannot be asked is gone, or shows up as one that did not answer.
    ///
    /// The agent gets a little less time than there is until `end`, so that its own reason comes first.
    pub(super) fn ask(&self, stream: &Line, attempt: u64, end: Instant) {
        let timeout = end.saturating_duration_since(Instant::now()) / 8 * 7;
        let timeout_ms = timeout.as_millis().try_into().unwrap_or(u64::MAX);
        let park = self.parks.load(Ordering::Relaxed);
        if let Err(error) = say(stream, &ToAgent::Quiesce { attempt, timeout_ms, park }) {
            debug!(error = &error as &dyn std::error::Error, "an agent cannot be asked to go away");
        }
    }

    /// Takes up a connection and gives it a thread.
    pub(super) fn take_up(self: &Arc<Self>, stream: UnixStream) -> io::Result<()> {
        let peer = line::peer(&stream)?;
        if peer.uid != rustix::process::geteuid().as_raw() {
            warn!(pid = peer.pid, uid = peer.uid, "a stranger was turned away");
            return Ok(());
        }
        stream.set_read_timeout(Some(AGENT_HELLO_TIMEOUT))?;
        stream.set_write_timeout(Some(AGENT_WRITE_TIMEOUT))?;
        let stream = Arc::new(Line::new(stream));
        let life =
            Life::of(Pid::from_raw(peer.pid).and_then(pidfd), Path::new("/proc").join(peer.pid.to_string()));
        let life = Arc::new(life);
        let connection = Connection {
            stream: Arc::clone(&stream),
            process: Process {
                pid: None,
                host_pid: u32::try_from(peer.pid).ok().filter(|&pid| pid != 0),
                exe: String::new(),
            },
            life: Arc::clone(&life),
            is_greeted: false,
            asked: None,
            preparation: None,
            refusal: None,
            look: Look::Unknown,
        };
        let mut state = self.lock();
        let id = state.next_id;
        state.next_id += 1;
        state.connections.insert(id, connection);
        drop(state);
        let shared = Arc::clone(self);
        let attend = move || match shared.attend(id, &stream) {
            Parting::Lost => {
                shared.part(id, Parting::Lost);
                life.wait_for_exit(AGENT_EXIT_TIMEOUT);
                let over = shared.lock().holdings.sweep();
                drop(over);
            }
            farewell => shared.part(id, farewell),
        };
        let thread = thread::Builder::new().name(format!("agent-{id}")).stack_size(STACK_BYTES);
        thread.spawn(attend).map(drop).inspect_err(|_| self.part(id, Parting::Lost))
    }

    /// The life of a connection.
    fn attend(&self, id: u64, stream: &Line) -> Parting {
        match self.greet(id, stream) {
            Ok(true) => {}
            Ok(false) => return Parting::Lost,
            Err(error) => {
                debug!(id, error = &error as &dyn std::error::Error, "an agent did not get past its hello");
                return Parting::Lost;
            }
        }
        loop {
            match hear(stream) {
                Ok(FromAgent::Quiesced { attempt, gpu }) => {
                    debug!(id, attempt, "an agent has gone away");
                    wait_for_close(id, stream);
                    return Parting::Farewell(gpu.map(Box::new));
                }
                Ok(FromAgent::Needs { attempt, mirror_bytes }) => {
                    self.advance(id, attempt, Step::Needs(mirror_bytes));
                }
                Ok(FromAgent::Activity { calls, is_waiting }) => {
                    self.told_activity(id, GpuActivity { calls, is_waiting });
                }
                Ok(FromAgent::Staged { attempt }) => self.advance(id, attempt, Step::Staged),
                Ok(FromAgent::Park { count }) => {
                    if let Err(error) = self.park(id, stream, count) {
                        debug!(id, error = &error as &dyn std::error::Error, "an agent was lost");
                        return Parting::Lost;
                    }
                }
                // An attempt that fails after memory was parked takes it back before it says so.
                Ok(FromAgent::Unpark { first, count }) => {
                    if let Err(error) = self.take_back(id, stream, first, count) {
                        debug!(id, error = &error as &dyn std::error::Error, "an agent was lost");
                        return Parting::Lost;
                    }
                }
                Ok(FromAgent::Failed { attempt, reason, is_lost }) => {
                    debug!(id, attempt, reason, is_lost, "an agent has refused");
                    if is_lost {
                        self.lose(id, &reason);
                    }
                    if let Some((attempt, end)) = self.refuse(id, attempt, reason) {
                        self.ask(stream, attempt, end);
                    }
                }
                Ok(message) if broker::sender(&message).is_some() => {
                    if let Err(error) = self.broker(id, stream, &message) {
                        debug!(id, error = &error as &dyn std::error::Error, "an agent was lost");
                        return Parting::Lost;
                    }
                }
                Ok(message) => {
                    warn!(id, ?message, "an agent spoke out of turn");
                    return Parting::Lost;
                }
                Err(FrameError::Closed) => return Parting::Lost,
                Err(error) => {
                    debug!(id, error = &error as &dyn std::error::Error, "an agent was lost");
                    return Parting::Lost;
                }
            }
        }
    }

    /// A process has lost its state on the GPU while it was to be taken off it.
    fn lose(&self, id: u64, reason: &str) {
        let process = self.lock().connections.get(&id).map(|connection| connection.process.clone());
        if let Some(process) = process {
            // Nobody listens only if nobody is left to act on it.
            let _ = self.losses.send(Loss { process, reason: reason.to_owned() });
        }
    }

    /// Has the broker answer a message.
    pub(super) fn broker(&self, id: u64, stream: &Line, message: &FromAgent) -> Result<(), FrameError> {
        let state = self.lock();
        let Some(connection) = state.connections.get(&id) else { return Ok(()) };
        let sender = broker::sender(message);
        // A connection for this message alone does not say which program it is of.
        let agent = state.connections.values().find(|one| one.process.pid == sender);
        let process = Process { pid: sender, ..agent.unwrap_or(connection).process.clone() };
        let party = Party { process, life: Arc::clone(&connection.life) };
        let end = match state.phase {
            Phase::Quiescing { end, .. } => end,
            Phase::Listening | Phase::Deaf => Instant::now(),
        };
        drop(state);
        self.broker.serve(stream, party, message, |pid| self.lock().is_here(pid), end)
    }

    /// Notes that an agent has refused; returns the attempt that it has to be asked about if it is another one.
    fn refuse(&self, id: u64, attempt: u64, reason: String) -> Option<(u64, Instant)> {
        let mut state = self.lock();
        let phase = state.phase;
        // It runs on with all its memory.
        let pid = state.connections.get(&id)?.process.pid;
        let parked = pid.map(|pid| state.holdings.take_parked(pid));
        let connection = state.connections.get_mut(&id)?;
        let again = match phase {
            Phase::Quiescing { attempt: now, .. } if now == attempt => {
                connection.refusal = Some(reason);
                self.broker.give_up();
                None
            }
            Phase::Quiescing { attempt: now, end } if connection.asked == Some(attempt) => {
                connection.asked = Some(now);
                Some((now, end))
            }
            // It has refused to be prepared for an attempt that was given up since, and is asked about this one.
            Phase::Quiescing { .. } => None,
            Phase::Listening | Phase::Deaf => {
                connection.asked = None;
                connection.advance(attempt, Step::Refused(reason));
                None
            }
        };
        self.changed.notify_all();
        drop(state);
        drop(parked);
        again
    }

    /// Hears the hello and what belongs to it; says whether the agent is one to go on with.
    fn greet(&self, id: u64, stream: &Line) -> Result<bool, FrameError> {
        let hello = match hear(stream)? {
            FromAgent::Hello(hello) => hello,
            message if broker::sender(&message).is_some() => {
                self.broker(id, stream, &message)?;
                return Ok(false);
            }
            message => {
                warn!(id, ?message, "an agent did not begin with a hello");
                return Ok(false);
            }
        };
        let answer = ToAgent::answer(&hello);
        say(stream, &answer)?;
        if let ToAgent::Refused { reason } = answer {
            warn!(pid = hello.pid, exe = hello.exe, reason, "an agent was refused");
            if hello.is_detached {
                // Nobody else can give it what it needs.
                let reason = format!("{reason}: resume the job with the ckpt-run that took the snapshot");
                let lost = Returned { restored: true, copied_bytes: 0, lost: Some(reason) };
                self.arrive(id, hello, Some(lost));
            }
            return Ok(false);
        }
        let back = match hello.away {
            None => None,
            Some(_) => match self
                .hear_back(id, stream, &hello)
                .inspect_err(|_| self.drop_parked(hello.pid))?
            {
                FromAgent::Reconnected { attempt, restored, copied_bytes, lost } => {
                    debug!(id, pid = hello.pid, attempt, restored, copied_bytes, lost, "an agent is back");
                    Some(Returned { restored, copied_bytes, lost })
                }
                message => {
                    warn!(id, ?message, "an agent that was away did not say that it is back");
                    return Ok(false);
                }
            },
        };
        stream.limit_wait(None)?;
        if let Some((attempt, end)) = self.arrive(id, hello, back) {
            self.ask(stream, attempt, end);
        }
        Ok(true)
    }

    /// Nobody will ask for it any more: the process makes its memory anew, for which the device needs room.
    fn drop_parked(&self, pid: u32) {
        let parked = self.lock().holdings.take_parked(pid);
        drop(parked);
    }

    /// Notes an agent down; returns the attempt that it has to be sent away for, if one is under way.
    fn arrive(&self, id: u64, hello: Hello, back: Option<Returned>) -> Option<(u64, Instant)> {
        let mut state = self.lock();
        let phase = state.phase;
        let connection = state.connections.get_mut(&id)?;
        connection.process.pid = Some(hello.pid);
        connection.process.exe = hello.exe;
        connection.is_greeted = true;
        connection.look = if hello.supports_activity { Look::Unasked } else { Look::Unknown };
        let attempt = match phase {
            Phase::Quiescing { attempt, end } if connection.asked.is_none() => {
                connection.asked = Some(attempt);
                Some((attempt, end))
            }
            _ => None,
        };
        let arrival = Arrival { connection: id, process: connection.process.clone(), back };
        let parked = state.holdings.take_parked(hello.pid);
        let begun_anew = arrival.back.is_none().then(|| state.holdings.forget(hello.pid));
        debug!(id, process = %arrival.process, "an agent is here");
        if let Some(loss) = arrival.loss() {
            // Nobody listens only if nobody is left to act on it.
            let _ = self.losses.send(loss);
        }
        state.away.retain(|away| !arrival.is(&away.process));
        state.arrivals.push(arrival);
        self.changed.notify_all();
        drop(state);
        drop((parked, begun_anew));
        attempt
    }

    /// Forgets a connection.
    fn part(&self, id: u64, parting: Parting) {
        let mut state = self.lock();
        let mut ended = None;
        if let Some(Connection { stream, process, life, is_greeted, .. }) = state.connections.remove(&id) {
            // Somebody may still hold the other end, who is to learn that it leads nowhere.
            stream.cut();
            let mirror = process.pid.and_then(|pid| state.holdings.mirror(pid));
            let has_mirror = mirror.is_some();
            if let Parting::Farewell(mut report) = parting {
                if let Some(mirror) = mirror {
                    mirror.captured(report.as_mut().and_then(|report| report.capture.as_deref_mut()));
                }
                state.away.push(Away { process, life, report: report.map(|report| *report) });
            } else if is_greeted {
                if has_mirror && matches!(state.phase, Phase::Quiescing { .. }) {
                    state.torn.push(Away { process, life: Arc::clone(&life), report: None });
                }
                ended = Some(life);
            }
        }
        // What came back has come back, and may exit; of the others there may be any number over a job's life.
        state.arrivals.retain(|arrival| arrival.connection != id || arrival.back.is_some());
        self.changed.notify_all();
        drop(state);
        if let Some(life) = ended {
            self.broker.outlive(&life);
        }
    }
}

/// Waits until nobody holds the other end any more, within reason.
pub(super) fn wait_for_close(id: u64, stream: &Line) {
    if stream.limit_wait(Some(AGENT_CLOSE_TIMEOUT)).is_err() {
        return;
    }
    match hear(stream) {
        Err(error) if error.is_timeout() => {
            debug!(id, "somebody holds an agent's connection after its farewell");
        }
        Ok(message) => warn!(id, ?message, "an agent spoke after its farewell"),
        Err(_) => {}
    }
}

pub(super) fn say(stream: &Line, message: &ToAgent) -> Result<(), FrameError> {
    stream.say(message)
}

pub(super) fn hear(stream: &Line) -> Result<FromAgent, FrameError> {
    stream.hear()
}
