//! Asking the agents what their processes do with GPUs, for the watchdog.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ckpt_protocol::agent::ToAgent;
use tracing::debug;

use super::attend::say;
use super::state::{Connection, Phase};
use super::{Agents, Shared};

/// What a process does with its GPUs, as its agent tells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuActivity {
    /// A number that is another one once the program has made a call that submits work, changes a GPU's state or waits
    /// for it.
    pub calls: u64,
    /// Whether a thread of it waits for a GPU.
    pub is_waiting: bool,
}

/// How far an agent is that is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Look {
    /// It does not know the question.
    Unknown,
    Unasked,
    /// It is not asked again before it has answered: a stopped process would have its connection fill up.
    Asked,
    Told(GpuActivity),
}

/// Asks the agents of a job, for as long as there are any.
#[derive(Clone)]
pub struct Onlooker {
    shared: Arc<Shared>,
}

impl Agents {
    /// One who asks the agents what their processes do.
    pub fn onlooker(&self) -> Onlooker {
        Onlooker { shared: Arc::clone(&self.shared) }
    }
}

impl Onlooker {
    /// What the processes do with their GPUs, by their IDs as the launcher sees them; `None` for one whose agent has not
    /// answered `within` that time, or has other things to do now. Without an entry is a process that has no agent, or
    /// one that does not know the question.
    pub fn look(&self, within: Duration) -> BTreeMap<i32, Option<GpuActivity>> {
        let end = Instant::now() + within;
        self.ask();
        let mut state = self.shared.lock();
        loop {
            let is_quiet = |one: &Connection| one.look != Look::Asked;
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || state.connections.values().all(is_quiet) {
                break;
            }
            self.shared.wait(&mut state, left);
        }
        state.connections.values().filter_map(Connection::activity).collect()
    }

    fn ask(&self) {
        let mut streams = Vec::new();
        let mut state = self.shared.lock();
        let is_listening = state.phase == Phase::Listening;
        for connection in state.connections.values_mut() {
            if matches!(connection.look, Look::Unasked | Look::Told(_)) {
                // One that is on its way out may have no time, or nobody to answer to.
                let is_here = is_listening && connection.is_greeted && connection.asked.is_none();
                connection.look = if is_here { Look::Asked } else { Look::Unasked };
                streams.extend(is_here.then(|| Arc::clone(&connection.stream)));
            }
        }
        drop(state);
        for stream in streams {
            if let Err(error) = say(&stream, &ToAgent::QueryActivity) {
                debug!(error = &error as &dyn std::error::Error, "an agent cannot be asked what goes on");
            }
        }
    }
}

impl Connection {
    fn activity(&self) -> Option<(i32, Option<GpuActivity>)> {
        let pid = self.process.host_pid?.try_into().ok()?;
        match self.look {
            Look::Unknown => None,
            Look::Unasked | Look::Asked => Some((pid, None)),
            Look::Told(activity) => Some((pid, Some(activity))),
        }
    }
}

impl Shared {
    /// An agent has answered.
    pub(super) fn told_activity(&self, id: u64, activity: GpuActivity) {
        if let Some(connection) = self.lock().connections.get_mut(&id) {
            connection.look = Look::Told(activity);
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
        LONG, SHORT, agent, connected, hello, is_asked, place, tell, told, until_count,
    };
    use super::*;

    fn telling(path: &Path, pid: u32) -> UnixStream {
        let FromAgent::Hello(plain) = hello(pid, None) else { unreachable!("a hello") };
        let stream = connected(path);
        tell(&stream, &FromAgent::Hello(Hello { supports_activity: true, ..plain }));
        told(&stream).expect("a welcome");
        stream
    }

    fn own() -> i32 {
        std::process::id().cast_signed()
    }

    #[test]
    fn agents_are_asked_and_those_of_before_are_not() {
        let (_directory, path) = place();
        let agents = Agents::listen(&path).expect("listening");
        let old = agent(&path, 1, None);
        until_count(&agents, 1);
        assert_eq!(agents.onlooker().look(LONG), BTreeMap::new());
        let stream = telling(&path, 2);
        until_count(&agents, 2);
        for calls in [3, 8] {
            let looking = thread::spawn({
                let onlooker = agents.onlooker();
                move || onlooker.look(LONG)
            });
            assert_eq!(told(&stream).expect("a question"), ToAgent::QueryActivity);
            tell(&stream, &FromAgent::Activity { calls, is_waiting: true });
            let expected = GpuActivity { calls, is_waiting: true };
            assert_eq!(looking.join().expect("a look"), BTreeMap::from([(own(), Some(expected))]));
        }
        old.set_read_timeout(Some(SHORT)).expect("set");
        assert!(told(&old).is_err_and(|error| error.is_timeout()), "it was asked nothing");
    }

    #[test]
    fn who_does_not_answer_is_asked_once() {
        let (_directory, path) = place();
        let agents = Agents::listen(&path).expect("listening");
        let stream = telling(&path, 1);
        until_count(&agents, 1);
        let onlooker = agents.onlooker();
        for _ in 0..3 {
            assert_eq!(onlooker.look(SHORT), BTreeMap::from([(own(), None)]));
        }
        assert_eq!(told(&stream).expect("a question"), ToAgent::QueryActivity);
        stream.set_read_timeout(Some(SHORT)).expect("set");
        assert!(told(&stream).is_err_and(|error| error.is_timeout()));
        // Who is away is no more waited for.
        drop(stream);
        assert_eq!(onlooker.look(LONG), BTreeMap::new());
    }

    #[test]
    fn who_is_sent_away_is_not_asked() {
        let (_directory, path) = place();
        let agents = Agents::listen(&path).expect("listening");
        let stream = telling(&path, 1);
        until_count(&agents, 1);
        let onlooker = agents.onlooker();
        let leaving = thread::spawn(move || {
            is_asked(&stream, 1);
            assert_eq!(onlooker.look(LONG), BTreeMap::from([(own(), None)]));
            tell(&stream, &FromAgent::Quiesced { attempt: 1, gpu: None });
        });
        agents.quiesce(1, LONG).expect("quiesced");
        leaving.join().expect("an agent");
    }
}
