//! Serving one agent's connection: the hello, the messages while the job runs and during a checkpoint attempt, and the
//! end of the connection.

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
use ckpt_snapshot::FailedProcess;
use rustix::process::Pid;
use tracing::{debug, warn};

use super::activity::{Activity, ActivityQuery, GpuActivity};
use super::broker::{self, Participant};
use super::prepare::Step;
use super::process::{DetachedProcess, Loss, Process, ProcessHandle, pidfd};
use super::release::Release;
use super::state::{Arrival, Connection, ConnectionEnd, Phase, Refusal, Returned, Unprepared};
use super::stream::AgentStream;
use super::{STACK_BYTES, Shared};
use crate::sys::exit_status::exit_code;
use crate::sys::peer;

impl Shared {
    /// Asks an agent to detach. An agent that cannot be asked has ended, or is reported later as one that did not answer.
    ///
    /// The agent gets a little less time than is left until `end`, so that its own error arrives before the deadline.
    pub(super) fn send_quiesce(&self, stream: &AgentStream, attempt: u64, end: Instant) {
        let timeout = end.saturating_duration_since(Instant::now()) / 8 * 7;
        let timeout_ms = timeout.as_millis().try_into().unwrap_or(u64::MAX);
        let park_by_key = self.parks_memory.load(Ordering::Relaxed);
        let measures = self.gpus.has_answered();
        let message = ToAgent::Quiesce { attempt, timeout_ms, park: false, park_by_key, measures };
        stream.send_or_log(&message, &[], "an agent cannot be asked to detach");
    }

    /// Accepts a connection and starts its thread.
    pub(super) fn accept_connection(self: &Arc<Self>, stream: UnixStream) -> io::Result<()> {
        let peer = peer::credentials(&stream)?;
        if peer.uid != rustix::process::geteuid().as_raw() {
            warn!(pid = peer.pid, uid = peer.uid, "refused a connection of another user");
            return Ok(());
        }
        stream.set_read_timeout(Some(AGENT_HELLO_TIMEOUT))?;
        stream.set_write_timeout(Some(AGENT_WRITE_TIMEOUT))?;
        let stream = Arc::new(AgentStream::new(stream));
        let proc_dir = Path::new("/proc").join(peer.pid.to_string());
        let handle = Arc::new(ProcessHandle::new(Pid::from_raw(peer.pid).and_then(pidfd), proc_dir));
        let connection = Connection {
            stream: Arc::clone(&stream),
            process: Process {
                pid: None,
                host_pid: u32::try_from(peer.pid).ok().filter(|&pid| pid != 0),
                exe: String::new(),
            },
            handle: Arc::clone(&handle),
            is_registered: false,
            supports_reads: false,
            parks_by_key: false,
            supports_loads: false,
            asked: None,
            unprepared: Unprepared::default(),
            preparation: None,
            refusal: None,
            is_lost: false,
            activity_query: ActivityQuery::Unsupported,
            release: Release::Unsupported,
        };
        let mut state = self.lock();
        let id = state.next_id;
        state.next_id += 1;
        state.connections.insert(id, connection);
        drop(state);
        let shared = Arc::clone(self);
        let serve = move || match shared.serve_connection(id, &stream) {
            ConnectionEnd::Lost => {
                let process = shared.unregister(id, ConnectionEnd::Lost);
                handle.wait_for_exit(AGENT_EXIT_TIMEOUT);
                shared.note_failure(process, &handle);
                let ended = shared.lock().holdings.remove_ended();
                drop(ended);
            }
            detached => drop(shared.unregister(id, detached)),
        };
        let thread = thread::Builder::new().name(format!("agent-{id}")).stack_size(STACK_BYTES);
        thread.spawn(serve).map(drop).inspect_err(|_| drop(self.unregister(id, ConnectionEnd::Lost)))
    }

    /// Serves a connection from the hello to its end.
    fn serve_connection(&self, id: u64, stream: &AgentStream) -> ConnectionEnd {
        match self.handshake(id, stream) {
            Ok(None) => {}
            Ok(Some(end)) => return end,
            Err(error) => {
                debug!(id, error = &error as &dyn std::error::Error, "the handshake with an agent failed");
                return ConnectionEnd::Lost;
            }
        }
        loop {
            match stream.receive().and_then(|message| self.handle_message(id, stream, message)) {
                Ok(None) => {}
                Ok(Some(end)) => return end,
                Err(FrameError::Closed) => return ConnectionEnd::Lost,
                Err(error) => {
                    debug!(id, error = &error as &dyn std::error::Error, "the connection to an agent failed");
                    return ConnectionEnd::Lost;
                }
            }
        }
    }

    /// Handles one message of a registered agent. Returns how the connection ended, if the message ends it.
    fn handle_message(
        &self,
        id: u64,
        stream: &AgentStream,
        message: FromAgent,
    ) -> Result<Option<ConnectionEnd>, FrameError> {
        match message {
            FromAgent::Quiesced { attempt, gpu } => {
                debug!(id, attempt, "an agent has detached");
                wait_for_close(id, stream);
                return Ok(Some(ConnectionEnd::Detached(gpu.map(Box::new))));
            }
            FromAgent::Needs { attempt, mirror_bytes, used_bytes, changes, ranks_on } => {
                self.record_step(id, attempt, Step::Needs { mirror_bytes, used_bytes, changes, ranks_on });
            }
            FromAgent::Activity { calls, is_waiting, members } => {
                let gpu = GpuActivity { calls, is_waiting };
                self.record_activity(id, Activity { gpu, members });
            }
            FromAgent::Readable { attempt, regions, capture, used } => {
                for message in self.hand_in(id, stream, (attempt, regions, capture, used))? {
                    if let Some(end) = self.handle_message(id, stream, message)? {
                        return Ok(Some(end));
                    }
                }
            }
            // After the deadline of its attempt.
            FromAgent::Content { .. } => {}
            FromAgent::Steps { report } => self.receive_steps(id, report),
            FromAgent::Released { problem } => self.record_release(id, problem),
            FromAgent::Staged { attempt } => self.record_step(id, attempt, Step::Staged),
            FromAgent::Measure { .. } => self.measure(id, stream)?,
            FromAgent::Fill { ranges } => {
                let pid = self.lock().connections.get(&id).and_then(|connection| connection.process.pid);
                self.fill(stream, pid, ranges)?;
            }
            FromAgent::GivesUp { attempt, reason } => self.record_giving_up(id, attempt, reason),
            FromAgent::Failed { attempt, reason, is_lost } => {
                debug!(id, attempt, reason, is_lost, "an agent has refused");
                if is_lost {
                    self.report_loss(id, &reason);
                }
                if let Some((attempt, end)) = self.record_refusal(id, attempt, reason) {
                    self.send_quiesce(stream, attempt, end);
                }
            }
            message if broker::sender(&message).is_some() => {
                self.serve_broker_message(id, stream, &message)?;
            }
            message => {
                warn!(id, ?message, "an agent sent an unexpected message");
                return Ok(Some(ConnectionEnd::Lost));
            }
        }
        Ok(None)
    }

    /// Records that a process will refuse, before it is back: the attempt ends for all, so that those that are detached come
    /// back, for which it waits.
    fn record_giving_up(&self, id: u64, attempt: u64, reason: String) {
        let mut state = self.lock();
        let is_current =
            matches!(state.phase, Phase::Quiescing { attempt: current, .. } if current == attempt);
        if let Some(connection) = state.connections.get_mut(&id).filter(|_| is_current) {
            debug!(id, attempt, reason, "an agent gives up");
            connection.refusal = Some(Refusal::new(reason, connection.refusal.take()));
            self.broker.end_attempt();
            self.changed.notify_all();
        }
    }

    /// Reports that a process lost its GPU state while detaching.
    fn report_loss(&self, id: u64, reason: &str) {
        let process = self.lock().connections.get_mut(&id).map(|connection| {
            connection.is_lost = true;
            connection.process.clone()
        });
        if let Some(process) = process {
            // The receiver is dropped only when nothing is left that could act on the loss.
            let _ = self.losses.send(Loss { process, reason: reason.to_owned() });
        }
    }

    /// Has the broker answer a message.
    pub(super) fn serve_broker_message(
        &self,
        id: u64,
        stream: &AgentStream,
        message: &FromAgent,
    ) -> Result<(), FrameError> {
        let state = self.lock();
        let Some(connection) = state.connections.get(&id) else { return Ok(()) };
        let sender = broker::sender(message);
        // A connection that carries only this message does not say which program it belongs to.
        let agent = state.connections.values().find(|one| one.process.pid == sender);
        let process = Process { pid: sender, ..agent.unwrap_or(connection).process.clone() };
        let participant = Participant { process, handle: Arc::clone(&connection.handle), instance: 0 };
        let end = match state.phase {
            Phase::Quiescing { end, .. } => end,
            Phase::Listening | Phase::NotListening => Instant::now(),
        };
        drop(state);
        self.broker.serve(stream, participant, message, |pid| self.lock().is_registered(pid), end)
    }

    /// Records a refusal. Returns the current attempt if the refusal was about an older one: the agent is asked again.
    fn record_refusal(&self, id: u64, attempt: u64, reason: String) -> Option<(u64, Instant)> {
        let mut state = self.lock();
        let phase = state.phase;
        let connection = state.connections.get_mut(&id)?;
        if connection.asked != Some(attempt) {
            connection.unprepared.answer();
        }
        let again = match phase {
            Phase::Quiescing { attempt: current, .. } if current == attempt => {
                connection.refusal = Some(Refusal::new(reason, connection.refusal.take()));
                self.broker.end_attempt();
                None
            }
            Phase::Quiescing { attempt: current, end } if connection.asked == Some(attempt) => {
                connection.asked = Some(current);
                Some((current, end))
            }
            // The agent refused to prepare for an earlier attempt, and was already asked about the current one.
            Phase::Quiescing { .. } => None,
            Phase::Listening | Phase::NotListening => {
                connection.asked = None;
                connection.record_step(attempt, Step::Refused(reason));
                None
            }
        };
        self.changed.notify_all();
        again
    }

    /// Receives the hello and the messages that belong to it. Returns how the connection ended, if it is not to be served
    /// further.
    fn handshake(&self, id: u64, stream: &AgentStream) -> Result<Option<ConnectionEnd>, FrameError> {
        let hello = match stream.receive()? {
            FromAgent::Hello(hello) => hello,
            message if broker::sender(&message).is_some() => {
                self.serve_broker_message(id, stream, &message)?;
                return Ok(Some(ConnectionEnd::Answered));
            }
            message => {
                warn!(id, ?message, "an agent did not begin with a hello");
                return Ok(Some(ConnectionEnd::Lost));
            }
        };
        let answer = ToAgent::answer(&hello);
        stream.send(&answer)?;
        if let ToAgent::Refused { reason } = answer {
            warn!(pid = hello.pid, exe = hello.exe, reason, "an agent was refused");
            if hello.is_detached {
                // No other launcher can give the process its GPU state.
                let reason = format!("{reason}: resume the job with the ckpt-run that took the snapshot");
                let lost = Returned { restored: true, copied_bytes: 0, lost: Some(reason) };
                self.register(id, Hello { supports_cut: false, ..hello }, Some(lost));
            }
            return Ok(Some(ConnectionEnd::Lost));
        }
        let returned = match hello.away {
            None => None,
            Some(_) => match self.receive_return(id, stream, &hello)? {
                FromAgent::Reconnected { attempt, restored, copied_bytes, lost } => {
                    debug!(
                        id,
                        pid = hello.pid,
                        attempt,
                        restored,
                        copied_bytes,
                        lost,
                        "an agent has returned"
                    );
                    Some(Returned { restored, copied_bytes, lost })
                }
                message => {
                    warn!(id, ?message, "an agent that had detached did not report its return");
                    return Ok(Some(ConnectionEnd::Lost));
                }
            },
        };
        stream.set_read_timeout(None)?;
        if let Some((attempt, end)) = self.register(id, hello, returned) {
            self.send_quiesce(stream, attempt, end);
        }
        Ok(None)
    }

    /// Registers an agent. Returns the attempt for which it has to detach, if one is under way.
    fn register(&self, id: u64, hello: Hello, returned: Option<Returned>) -> Option<(u64, Instant)> {
        self.broker.note_instance(hello.pid, hello.instance);
        let mut state = self.lock_for_return(hello.pid);
        let phase = state.phase;
        let connection = state.connections.get_mut(&id)?;
        connection.process.pid = Some(hello.pid);
        connection.process.exe = hello.exe;
        connection.is_registered = true;
        // Memory that was read through a window has to be parked.
        connection.supports_reads = hello.supports_reads && hello.parks_by_key;
        connection.parks_by_key = hello.parks_by_key;
        connection.supports_loads = hello.supports_loads;
        connection.activity_query =
            if hello.supports_activity { ActivityQuery::NotAsked } else { ActivityQuery::Unsupported };
        connection.release = if hello.supports_release { Release::NotAsked } else { Release::Unsupported };
        let attempt = match phase {
            Phase::Quiescing { attempt, end } if connection.asked.is_none() => {
                connection.asked = Some(attempt);
                Some((attempt, end))
            }
            _ => None,
        };
        let arrival = Arrival { connection: id, process: connection.process.clone(), returned };
        let refill = state.holdings.take_refill(hello.pid);
        let restarted = arrival.returned.is_none().then(|| {
            self.migrations.lock().forget(hello.pid);
            state.holdings.forget(hello.pid)
        });
        if hello.supports_cut {
            state.cut.join(id, arrival.process.to_string(), arrival.returned.is_some());
        }
        debug!(id, process = %arrival.process, "an agent has registered");
        if let Some(loss) = arrival.loss() {
            // The receiver is dropped only when nothing is left that could act on the loss.
            let _ = self.losses.send(loss);
        }
        state.detached.retain(|detached| !arrival.is(&detached.process));
        state.arrivals.push(arrival);
        self.changed.notify_all();
        drop(state);
        self.send_orders();
        drop((refill, restarted));
        attempt
    }

    /// Notes how a process with device memory has ended, if that was a failure.
    pub(super) fn note_failure(&self, process: Option<Process>, handle: &ProcessHandle) {
        let code = handle.exit_status().map_or(0, exit_code);
        if let Some(Process { pid: Some(pid), exe, .. }) = process.filter(|_| code != 0) {
            let name = exe.rsplit('/').next().unwrap_or_default().to_owned();
            self.failed.lock().push(FailedProcess { pid, name, code });
        }
    }

    /// Removes a connection. Returns the process if it had device memory and did not detach.
    fn unregister(&self, id: u64, end: ConnectionEnd) -> Option<Process> {
        if let ConnectionEnd::Detached(Some(report)) = &end {
            self.note_needs(report);
        }
        let mut state = self.lock();
        let (mut lost, mut had_memory) = (None, None);
        if let Some(Connection { stream, process, handle, is_registered, supports_loads, .. }) =
            state.connections.remove(&id)
        {
            // Another process may still hold the other end, and has to see that the connection has ended.
            stream.shut_down();
            let mirror = process.pid.and_then(|pid| state.holdings.mirror(pid));
            let has_mirror = mirror.is_some();
            if let ConnectionEnd::Detached(mut report) = end {
                if let Some(mirror) = mirror {
                    mirror.record_capture(report.as_mut().and_then(|report| report.capture.as_deref_mut()));
                }
                state.detached.push(DetachedProcess { process, handle, report, supports_loads });
            } else if is_registered {
                let has_memory = process.pid.is_some_and(|pid| state.holdings.has(pid));
                had_memory = has_memory.then(|| process.clone());
                if has_mirror && matches!(state.phase, Phase::Quiescing { .. }) {
                    let handle = Arc::clone(&handle);
                    state.disconnected.push(DetachedProcess {
                        process,
                        handle,
                        report: None,
                        supports_loads,
                    });
                }
                lost = Some(handle);
            }
        }
        // A returned process counts as returned even if it exits. Other arrivals would accumulate over a job's lifetime.
        state.arrivals.retain(|arrival| arrival.connection != id || arrival.returned.is_some());
        state.cut.leave(id);
        self.changed.notify_all();
        drop(state);
        self.send_orders();
        if let Some(handle) = lost {
            self.broker.forget_after_exit(&handle);
        }
        had_memory
    }
}

/// Waits for a limited time until every copy of the other end is closed.
fn wait_for_close(id: u64, stream: &AgentStream) {
    if stream.set_read_timeout(Some(AGENT_CLOSE_TIMEOUT)).is_err() {
        return;
    }
    match stream.receive() {
        Err(error) if error.is_timeout() => {
            debug!(id, "a process still holds the connection of an agent that has detached");
        }
        Ok(message) => warn!(id, ?message, "an agent sent a message after it had detached"),
        Err(_) => {}
    }
}
