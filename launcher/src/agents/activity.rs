//! Asking the agents what their processes do with GPUs, for the watchdog.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ckpt_cut::MemberReport;
use ckpt_protocol::agent::ToAgent;

use super::state::{Connection, Phase};
use super::{Agents, Shared};

/// What a process does with its GPUs, as its agent reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuActivity {
    /// Changes whenever the program calls a function that submits work, changes a GPU's state or waits for a GPU.
    pub calls: u64,
    /// Whether one of its threads waits for a GPU.
    pub is_waiting: bool,
}

/// An agent's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Activity {
    /// What the process does with its GPUs.
    pub gpu: GpuActivity,
    /// How far it is on each of its communicators of NCCL.
    pub members: Vec<MemberReport>,
}

/// The state of the question to one agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ActivityQuery {
    /// The agent's version does not support the question.
    Unsupported,
    NotAsked,
    /// The agent is not asked again before it has answered: the connection to a stopped process would fill up.
    Pending,
    Answered(Activity),
}

/// Asks the agents of a job for the activity of their processes.
#[derive(Clone)]
pub struct ActivityProbe {
    shared: Arc<Shared>,
}

impl Agents {
    /// A probe for the activity of the job's processes.
    pub fn activity_probe(&self) -> ActivityProbe {
        ActivityProbe { shared: Arc::clone(&self.shared) }
    }
}

impl ActivityProbe {
    /// The activity by process ID in the launcher's PID namespace. `None` for a process whose agent has not answered
    /// within `timeout`, or is detaching. Processes without an agent, or whose agent does not support the question, have
    /// no entry.
    pub fn poll(&self, timeout: Duration) -> BTreeMap<i32, Option<Activity>> {
        let end = Instant::now() + timeout;
        self.ask();
        let is_pending = |one: &Connection| one.activity_query == ActivityQuery::Pending;
        let mut state = self.shared.lock();
        let left = end.saturating_duration_since(Instant::now());
        let _ = self.shared.changed.wait_while_for(
            &mut state,
            |state| state.connections.values().any(is_pending),
            left,
        );
        state.connections.values().filter_map(Connection::activity).collect()
    }

    fn ask(&self) {
        let mut streams = Vec::new();
        let mut state = self.shared.lock();
        let is_listening = state.phase == Phase::Listening;
        for connection in state.connections.values_mut() {
            if matches!(connection.activity_query, ActivityQuery::NotAsked | ActivityQuery::Answered(_)) {
                // An agent that is detaching may be busy, or close its connection before it answers.
                let is_free = is_listening && connection.is_registered && connection.asked.is_none();
                connection.activity_query =
                    if is_free { ActivityQuery::Pending } else { ActivityQuery::NotAsked };
                streams.extend(is_free.then(|| Arc::clone(&connection.stream)));
            }
        }
        drop(state);
        for stream in streams {
            let failure = "an agent cannot be asked for its GPU activity";
            stream.send_or_log(&ToAgent::QueryActivity, &[], failure);
        }
    }
}

impl Connection {
    fn activity(&self) -> Option<(i32, Option<Activity>)> {
        let pid = self.process.host_pid?.try_into().ok()?;
        match &self.activity_query {
            ActivityQuery::Unsupported => None,
            ActivityQuery::NotAsked | ActivityQuery::Pending => Some((pid, None)),
            ActivityQuery::Answered(activity) => Some((pid, Some(activity.clone()))),
        }
    }
}

impl Shared {
    /// Records an agent's answer.
    pub(super) fn record_activity(&self, id: u64, activity: Activity) {
        if let Some(connection) = self.lock().connections.get_mut(&id) {
            connection.activity_query = ActivityQuery::Answered(activity);
        }
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::path::Path;
    use std::thread;

    use ckpt_cut::{Member, Name, Role};
    use ckpt_protocol::agent::{FromAgent, Hello};

    use super::super::tests::{
        LONG, SHORT, connect, connect_agent, expect_quiesce, hello, receive, send, socket_dir, until_count,
    };
    use super::*;

    fn connect_with_activity(path: &Path, pid: u32) -> UnixStream {
        let FromAgent::Hello(plain) = hello(pid, None) else { unreachable!("a hello") };
        let stream = connect(path);
        send(&stream, &FromAgent::Hello(Hello { supports_activity: true, ..plain }));
        receive(&stream).expect("a welcome");
        stream
    }

    fn own_pid() -> i32 {
        std::process::id().cast_signed()
    }

    #[test]
    fn agents_are_asked_unless_their_version_does_not_support_it() {
        let (_directory, path) = socket_dir();
        let agents = Agents::listen(&path, LONG).expect("listening");
        let old = connect_agent(&path, 1, None);
        until_count(&agents, 1);
        assert_eq!(agents.activity_probe().poll(LONG), BTreeMap::new());
        let stream = connect_with_activity(&path, 2);
        until_count(&agents, 2);
        for calls in [3, 8] {
            let polling = thread::spawn({
                let activity_probe = agents.activity_probe();
                move || activity_probe.poll(LONG)
            });
            assert_eq!(receive(&stream).expect("a question"), ToAgent::QueryActivity);
            let member = Member { communicator: Name(5), index: 1 };
            let role = Role::Communicator { awaits: None, alias: None };
            let members = vec![MemberReport { member, role, sequence: calls, call: String::new() }];
            send(&stream, &FromAgent::Activity { calls, is_waiting: true, members: members.clone() });
            let expected = Activity { gpu: GpuActivity { calls, is_waiting: true }, members };
            assert_eq!(polling.join().expect("an answer"), BTreeMap::from([(own_pid(), Some(expected))]));
        }
        old.set_read_timeout(Some(SHORT)).expect("set");
        assert!(receive(&old).is_err_and(|error| error.is_timeout()), "it was asked nothing");
    }

    #[test]
    fn an_agent_that_does_not_answer_is_asked_once() {
        let (_directory, path) = socket_dir();
        let agents = Agents::listen(&path, LONG).expect("listening");
        let stream = connect_with_activity(&path, 1);
        until_count(&agents, 1);
        let activity_probe = agents.activity_probe();
        for _ in 0..3 {
            assert_eq!(activity_probe.poll(SHORT), BTreeMap::from([(own_pid(), None)]));
        }
        assert_eq!(receive(&stream).expect("a question"), ToAgent::QueryActivity);
        stream.set_read_timeout(Some(SHORT)).expect("set");
        assert!(receive(&stream).is_err_and(|error| error.is_timeout()));
        // A process that has ended is not waited for.
        drop(stream);
        assert_eq!(activity_probe.poll(LONG), BTreeMap::new());
    }

    #[test]
    fn a_detaching_agent_is_not_asked() {
        let (_directory, path) = socket_dir();
        let agents = Agents::listen(&path, LONG).expect("listening");
        let stream = connect_with_activity(&path, 1);
        until_count(&agents, 1);
        let activity_probe = agents.activity_probe();
        let leaving = thread::spawn(move || {
            expect_quiesce(&stream, 1);
            assert_eq!(activity_probe.poll(LONG), BTreeMap::from([(own_pid(), None)]));
            send(&stream, &FromAgent::Quiesced { attempt: 1, gpu: None });
        });
        agents.quiesce(1, LONG).expect("quiesced");
        leaving.join().expect("an agent");
    }
}
