//! Agents whose GPU driver does not come back from a call.
//!
//! Calls of the driver's checkpoint API may hang for ever. The program waits behind the gate then, and nothing in the
//! process can end that. So the launcher measures the time from outside: an agent that has not answered for the GPU
//! timeout after its deadline counts as a loss of GPU state, which ends the job. So does one whose memory is being read back
//! from a store that does not answer. An agent in a process without a driver
//! holds nothing up: it is only slow.

use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use tracing::warn;

use super::process::{DetachedProcess, Loss, Process, ProcessHandle};
use super::refill::Refill;
use super::state::{Connection, State};
use super::{STACK_BYTES, Shared};
use crate::sys::deadline::STUCK_AGENT_POLL_INTERVAL;

const DRIVER: &str = "its GPU driver has not come back from a checkpoint or a resume";
/// The memory could not stay on the GPU, and the process has no other copy of it.
const STORE: &str = "the store has not answered while its device memory was read back";
const WINDOW: &str = "the store has not answered while its device memory was loaded";

impl State {
    /// The processes whose device memory the store has not loaded within `limit`.
    pub(super) fn without_an_answer(
        &self,
        missing: &[Process],
        limit: Duration,
    ) -> impl Iterator<Item = Loss> {
        let limit = humantime::format_duration(limit);
        let reason = format!(
            "the store has not answered for {limit} while its device memory was loaded (--freeze-timeout and --gpu-timeout)"
        );
        let is_loading =
            |process: &&Process| self.refill_of(process.pid).is_some_and(|refill| refill.is_loading());
        missing
            .iter()
            .filter(is_loading)
            .map(move |process| Loss { process: process.clone(), reason: reason.clone() })
    }

    fn refill_of(&self, pid: Option<u32>) -> Option<Arc<Refill>> {
        self.holdings.refill(pid?)
    }
}

impl Shared {
    /// Watches the agents that have not answered whether they have detached.
    pub(super) fn watch_silent(self: &Arc<Self>, state: &State, attempt: u64) {
        for (&id, connection) in &state.connections {
            if connection.asked == Some(attempt) && connection.refusal.is_none() {
                self.watch_connection(id, connection, move |one| one.asked == Some(attempt));
            }
        }
    }

    /// Watches the agents that have not answered what they need, or that they have a mirror, until their next answer.
    pub(super) fn watch_unprepared(self: &Arc<Self>, state: &mut State) {
        for (&id, connection) in &mut state.connections {
            if connection.unprepared.is_silent() && !connection.unprepared.is_watched {
                connection.unprepared.is_watched = true;
                let answered = connection.unprepared.answered;
                self.watch_connection(id, connection, move |one| one.unprepared.answered == answered);
            }
        }
    }

    fn watch_connection(
        self: &Arc<Self>,
        id: u64,
        connection: &Connection,
        is_silent: impl Fn(&Connection) -> bool + Send + 'static,
    ) {
        let is_stuck = move |state: &State| state.connections.get(&id).is_some_and(&is_silent);
        self.watch(connection.process.clone(), Arc::clone(&connection.handle), is_stuck);
    }

    /// Watches a process that has detached and not returned.
    pub(super) fn watch_missing(self: &Arc<Self>, missing: &DetachedProcess) {
        let process = missing.process.clone();
        let is_missing = move |state: &State| state.detached.iter().any(|one| one.process == process);
        self.watch(missing.process.clone(), Arc::clone(&missing.handle), is_missing);
    }

    fn watch(
        self: &Arc<Self>,
        process: Process,
        handle: Arc<ProcessHandle>,
        is_stuck: impl Fn(&State) -> bool + Send + 'static,
    ) {
        let (shared, timeout) = (Arc::downgrade(self), self.gpu_timeout);
        let pid = process.pid;
        let last_load = move |state: &State| state.refill_of(pid).and_then(|refill| refill.last_activity());
        let watch = move || {
            if handle.has_driver()
                && outlasts(&shared, timeout, &handle, is_stuck, last_load)
                && let Some(shared) = shared.upgrade()
            {
                let state = shared.lock();
                let is_filling = pid.is_some_and(|pid| state.filling.contains(&pid));
                let is_loading = state.refill_of(pid).is_some_and(|refill| refill.is_loading());
                drop(state);
                let what = match (is_filling, is_loading) {
                    (true, _) => STORE,
                    (_, true) => WINDOW,
                    _ => DRIVER,
                };
                let timeout = humantime::format_duration(timeout);
                let reason = format!("{what} for {timeout} beyond its time limit (--gpu-timeout)");
                // The receiver is dropped only when nothing is left that could act on the loss.
                let _ = shared.losses.send(Loss { process, reason });
            }
        };
        let thread = thread::Builder::new().name("stuck-agent".to_owned()).stack_size(STACK_BYTES);
        if let Err(error) = thread.spawn(watch) {
            warn!("a process whose GPU driver hangs would not be noticed: {error}");
        }
    }
}

/// Whether an agent stays stuck for so long. Time counts only while its process may run, since a user may have stopped it. It
/// begins anew with each part of its memory that is loaded from the store.
fn outlasts(
    shared: &Weak<Shared>,
    timeout: Duration,
    handle: &ProcessHandle,
    is_stuck: impl Fn(&State) -> bool,
    last_load: impl Fn(&State) -> Option<Instant>,
) -> bool {
    let (mut waited, mut loaded) = (Duration::ZERO, None);
    while waited < timeout {
        thread::sleep(STUCK_AGENT_POLL_INTERVAL);
        let Some(shared) = shared.upgrade() else { return false };
        let (is_stuck, last) = {
            let state = shared.lock();
            (is_stuck(&state), last_load(&state))
        };
        if !is_stuck || handle.has_ended() {
            return false;
        }
        if last != loaded {
            (waited, loaded) = (Duration::ZERO, last);
        } else if !handle.is_stopped() {
            waited += STUCK_AGENT_POLL_INTERVAL;
        }
    }
    true
}
