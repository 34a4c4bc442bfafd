//! Taking the job's processes off their GPUs before they are killed.
//!
//! Killing a process that NVIDIA's driver has restored can hang the host some seconds later; a lock and a checkpoint by
//! the driver before that avoid it (cuda-checkpoint issue 53, driver 595.71.05).

use std::sync::Arc;
use std::time::{Duration, Instant};

use ckpt_protocol::agent::ToAgent;
use tracing::{debug, warn};

use super::process::DetachedProcess;
use super::state::{Connection, Phase};
use super::{Agents, Process, Shared};
use crate::sys::deadline::PROCESS_POLL_INTERVAL;

/// The state of the request to one agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Release {
    /// The agent's version does not support the request.
    Unsupported,
    NotAsked,
    Pending,
    Answered,
}

impl Agents {
    /// Waits, at most for `timeout`, until an attempt in which a process was lost is over, and until the others have come
    /// back: they are on their GPUs then.
    pub fn await_others(&self, lost: &Process, timeout: Duration) {
        let end = Instant::now() + timeout;
        let mut state = self.shared.lock();
        loop {
            let is_lost = |one: &Process| one.pid == lost.pid;
            let is_away = |one: &DetachedProcess| !is_lost(&one.process) && !one.handle.has_ended();
            let is_back = |one: &Connection| one.is_registered || is_lost(&one.process);
            let are_back = !state.detached.iter().any(is_away) && state.connections.values().all(is_back);
            let left = end.saturating_duration_since(Instant::now());
            if state.phase == Phase::Listening && are_back || left.is_zero() {
                return;
            }
            self.shared.wait(&mut state, left.min(PROCESS_POLL_INTERVAL));
        }
    }

    /// Has all processes take their state off the GPUs, without saving it, and waits for that at most for `timeout`. They
    /// cannot run on: kill them. Processes that are detached, or about to be, are left as they are, unless they are lost.
    pub fn release(&self, timeout: Duration) {
        let end = Instant::now() + timeout;
        let mut state = self.shared.lock();
        let is_listening = state.phase == Phase::Listening;
        let mut streams = Vec::new();
        for connection in state.connections.values_mut() {
            let stays = is_listening || connection.is_lost;
            if stays && connection.is_registered && connection.release == Release::NotAsked {
                connection.release = Release::Pending;
                streams.push(Arc::clone(&connection.stream));
            }
        }
        drop(state);
        // A little less than is waited for here.
        let timeout_ms = (timeout / 8 * 7).as_millis().try_into().unwrap_or(u64::MAX);
        for stream in streams {
            let failure = "an agent cannot be asked to release its GPUs";
            stream.send_or_log(&ToAgent::Release { timeout_ms }, &[], failure);
        }
        let is_pending = |one: &Connection| one.release == Release::Pending;
        let mut state = self.shared.lock();
        let left = end.saturating_duration_since(Instant::now());
        let _ = self.shared.changed.wait_while_for(
            &mut state,
            |state| state.connections.values().any(is_pending),
            left,
        );
        for connection in state.connections.values().filter(|one| is_pending(one)) {
            warn!(
                "{} is killed with its state on the GPU: its GPU driver does not answer",
                connection.process
            );
        }
    }
}

impl Shared {
    /// Records an agent's answer.
    pub(super) fn record_release(&self, id: u64, problem: Option<String>) {
        if let Some(connection) = self.lock().connections.get_mut(&id) {
            connection.release = Release::Answered;
            match problem {
                Some(problem) => {
                    warn!("{} is killed with its state on the GPU: {problem}", connection.process);
                }
                None => debug!(id, "an agent has released its GPUs"),
            }
        }
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::path::Path;
    use std::thread;

    use ckpt_protocol::agent::{FromAgent, Hello};

    use super::super::tests::{
        LONG, SHORT, connect, connect_agent, hello, receive, send, socket_dir, until_count,
    };
    use super::*;

    fn connect_with_release(path: &Path, pid: u32) -> UnixStream {
        let FromAgent::Hello(plain) = hello(pid, None) else { unreachable!("a hello") };
        let stream = connect(path);
        send(&stream, &FromAgent::Hello(Hello { supports_release: true, ..plain }));
        receive(&stream).expect("a welcome");
        stream
    }

    /// An agent of an older version is not asked, and one that ends meanwhile is not waited for.
    #[test]
    fn all_agents_that_can_are_asked_and_waited_for() {
        let (_directory, path) = socket_dir();
        let agents = Agents::listen(&path, LONG).expect("listening");
        let old = connect_agent(&path, 1, None);
        let asked = [2, 3].map(|pid| connect_with_release(&path, pid));
        until_count(&agents, 3);
        let [answering, ending] = asked;
        let answering = thread::spawn(move || {
            assert_eq!(receive(&answering).expect("a message"), ToAgent::Release { timeout_ms: 262_500 });
            send(&answering, &FromAgent::Released { problem: None });
            answering
        });
        let ending = thread::spawn(move || drop(receive(&ending).expect("a message")));
        let begun = Instant::now();
        agents.release(LONG);
        assert!(begun.elapsed() < LONG);
        ending.join().expect("an agent");
        let answering = answering.join().expect("an agent");
        // Once is enough.
        agents.release(LONG);
        drop((old, answering));
    }

    #[test]
    fn an_agent_that_does_not_answer_is_given_up() {
        let (_directory, path) = socket_dir();
        let agents = Agents::listen(&path, LONG).expect("listening");
        let _silent = connect_with_release(&path, 1);
        until_count(&agents, 1);
        agents.release(SHORT);
    }
}
