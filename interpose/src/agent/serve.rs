//! The agent's main loop: finds the launcher and converses with it, again and again.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use ckpt_cut::Order;

use super::conversation::{Absence, Found, Hangup, converse};
use super::main_thread;
use crate::cuda::Gpu;
use crate::socket::{Address, Socket};
use crate::{fork, process};

/// The polling interval for the launcher, first and at most.
const FIRST_POLL_INTERVAL: Duration = Duration::from_millis(1);
pub(super) const LONGEST_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How many times an agent tries to reach a launcher that was never there or was lost: about a minute. A process can be
/// started while the launcher prepares a dump, so this has to outlast that.
const MAX_TRIES: u32 = 1200;
/// An agent that is away polls more slowly after so many tries.
const SLOW_POLL_AFTER: u32 = 1200;
const SLOW_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// The start time of the process when its agent was started; 0 where `/proc` cannot be read.
static STARTED_TICKS: AtomicU64 = AtomicU64::new(0);

/// Notes the start time of the process: before its agent is started.
pub(super) fn note_start_time() {
    STARTED_TICKS.store(process::start_time_ticks().unwrap_or(0), SeqCst);
}

/// Why an agent ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The main thread ended.
    MainThread,
    /// There is no launcher to talk to.
    Silent,
}

/// Runs an agent until it ends.
pub(super) fn serve(address: &Address, gpu: &mut dyn Gpu) -> End {
    let mut started_ticks = STARTED_TICKS.load(SeqCst);
    let mut away = None;
    let mut search = Search::new(address);
    let first = Socket::noted().filter(|socket| socket.connect(address).is_ok());
    let mut found = first.map(|socket| Found { socket, start_time_ticks: started_ticks });
    loop {
        let Some(found) = found.take().or_else(|| search.run(away.is_some())) else {
            return if main_thread::has_ended() { End::MainThread } else { End::Silent };
        };
        let hangup = converse(&found, &mut away, &mut started_ticks, gpu);
        // Whatever was prepared was so for this conversation.
        gpu.unstage();
        // A process that is away stands at the cut until the launcher is back. Any other one nobody else would release.
        if matches!(hangup, Hangup::Refused) || matches!(hangup, Hangup::Lost) && away.is_none() {
            gpu.follow(Order::Release);
        }
        match hangup {
            Hangup::Quiesced { attempt } => {
                away = Some(Absence { attempt, returned: None });
                search = Search::new(address);
            }
            Hangup::Lost => {}
            Hangup::Refused => return End::Silent,
        }
    }
}

/// The search for the launcher. The number of tries is not reset when a connection is lost, so that the search ends for
/// a launcher that fails again and again.
struct Search<'a> {
    address: &'a Address,
    tries: u32,
    wait: Duration,
}

impl<'a> Search<'a> {
    fn new(address: &'a Address) -> Self {
        Self { address, tries: 0, wait: FIRST_POLL_INTERVAL }
    }

    /// Polls until there is a connection. For an agent that is not away: `None` if the main thread has
    /// ended, or after [`MAX_TRIES`].
    fn run(&mut self, is_away: bool) -> Option<Found> {
        loop {
            if !is_away && (main_thread::has_ended() || self.tries >= MAX_TRIES) {
                return None;
            }
            std::thread::sleep(self.wait);
            self.tries = self.tries.saturating_add(1);
            let is_early = self.tries < SLOW_POLL_AFTER;
            self.wait =
                if is_early { (self.wait * 2).min(LONGEST_POLL_INTERVAL) } else { SLOW_POLL_INTERVAL };
            // What is not there is not connected to: a dump could catch the socket that is made for it.
            if self.address.exists()
                && let Ok(socket) = fork::while_none(Socket::open)
                && socket.connect(self.address).is_ok()
            {
                let start_time_ticks = fork::while_none(process::start_time_ticks).unwrap_or(0);
                return Some(Found { socket, start_time_ticks });
            }
        }
    }
}
