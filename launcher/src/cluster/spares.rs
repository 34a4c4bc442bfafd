//! Spares: launchers whose node rank is not below the number of nodes. Each waits at node 0 until the launcher of a node is
//! lost, and takes its place.
//!
//! ```text
//! spare                         node 0
//!   Join (rank 4 of 4)   ------->
//!                        <-------  Spare                        (while nodes join, or while the job runs)
//!                        <-------  End, with is_to_rejoin       a launcher is lost: node 0 starts again, the spare waits for it
//!                        <-------  Take (rank 1)                all others are there again, node 1 is not
//!   (joins as node 1)
//! ```
//!
//! The place of node 0 takes a spare whose machine is one of the hosts of the coordinator. It listens there all the time. When
//! half of the other nodes look for node 0 there, and it has no connection to node 0 itself, it starts again as node 0. Two
//! launchers that take themselves for node 0 do no harm: a session needs all other nodes, and the log tells who has the job.

use super::connection::{ClusterKey, ConnectionError, Receiver};
use super::host::Input;
use super::join::{self, Reached, Refusal};
use super::links::{self, Joining, Link};
use super::messages::{Join, Message};
use super::options::Coordinator;
use super::rejoin::Rejoin;
use crate::sys::deadline::{
    NODE_BEAT_INTERVAL, NODE_CONNECTION_TIMEOUT, NODE_FIRST_RETRY_INTERVAL, NODE_RETRY_INTERVAL,
    NODE_SOUGHT_TIME, NODE_WAIT_REPORT, REJOIN_LIMIT, SPARE_ASKS_STORE_INTERVAL, SPARE_REJOIN_PATIENCE,
    SPARE_SILENCE_TIMEOUT, SPARE_SLOW_PATIENCE, SPARE_START_PATIENCE, SPARE_TAKES_LIMIT,
};
use crate::sys::error::{EXIT_OWN, bad_input};
use anyhow::{Result, anyhow};
use crossbeam_channel::{RecvTimeoutError, unbounded};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::io;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// The spares that wait at node 0.
#[derive(Debug, Default)]
pub(super) struct Spares {
    /// By their ranks, and the numbers of their connections.
    waiting: BTreeMap<(u32, u64), Link>,
    /// The nodes whose places were given to spares, which have not joined yet.
    given: BTreeMap<u32, Instant>,
    /// When they were last shown that node 0 is there.
    beat: Option<Instant>,
}

impl Spares {
    /// Takes a spare in. `number` tells its connection from others.
    pub(super) fn add(
        &mut self,
        joining: Joining,
        (number, is_running): (u64, bool),
        inputs: &crossbeam_channel::Sender<Input>,
    ) {
        let Joining { join, connection, .. } = joining;
        if let Err(error) = connection.0.end_without_acknowledgement(SPARE_SILENCE_TIMEOUT) {
            tracing::debug!("a spare that is silent is found out late: {error}");
        }
        let link = match Link::start(join.rank, number, connection, inputs) {
            Ok(link) => link,
            Err(error) => return tracing::warn!("the spare {} cannot be served: {error}", join.rank),
        };
        link.send(Message::Spare { is_running });
        // A node whose rank another launcher has comes again as a spare.
        if join.rank >= join.nodes {
            tracing::info!("the spare {} on {} is there", join.rank, join.hostname);
            self.waiting.insert((join.rank, number), link);
        } else {
            link.finish();
        }
    }

    /// A connection is lost. Whether it was that of a spare.
    pub(super) fn lost(&mut self, rank: u32, number: u64) -> bool {
        self.waiting.remove(&(rank, number)).is_some()
    }

    /// How many wait.
    pub(super) fn number(&self) -> usize {
        self.waiting.len()
    }

    /// Tells all of them.
    pub(super) fn tell(&self, message: &Message) {
        self.waiting.values().for_each(|link| link.send(message.clone()));
    }

    /// Shows them that node 0 is there, if it is time.
    pub(super) fn show(&mut self, is_running: bool) {
        if self.beat.is_none_or(|beat| beat.elapsed() >= NODE_BEAT_INTERVAL) {
            self.tell(&Message::Spare { is_running });
            self.beat = Some(Instant::now());
        }
    }

    /// Gives spares the places of these nodes, as far as there are spares.
    pub(super) fn give(&mut self, missing: impl Iterator<Item = u32>, has_begun: bool) {
        for rank in missing {
            if self.given.get(&rank).is_some_and(|given| given.elapsed() < SPARE_TAKES_LIMIT) {
                continue;
            }
            let Some(((spare, _), link)) = self.waiting.pop_first() else { return };
            tracing::warn!("node {rank} is not there: the spare {spare} takes its place");
            link.send(Message::Take { rank, has_begun });
            link.finish();
            self.given.insert(rank, Instant::now());
        }
    }

    /// Sends what is queued, then closes the connections.
    pub(super) fn finish(self) {
        self.waiting.into_values().for_each(Link::finish);
    }
}

/// A spare that waits.
pub struct Waiting {
    /// Where node 0 listens.
    pub at: Coordinator,
    /// The key that all nodes share.
    pub key: ClusterKey,
    /// Its rank, the number of nodes and so on.
    pub join: Join,
    /// Node 0 is lost if it is silent for this long.
    pub timeout: Duration,
    /// How long it waits for node 0 after a loss.
    pub patience: Patience,
}

/// How long a spare waits for node 0 after a loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// Not at all.
    None,
    /// For a while: another spare may take its place.
    Some,
    /// For ever.
    Endless,
}

/// Waits until a node is lost, or the job has ended: returns the exit code then. `may_resume` says whether the job has something
/// to resume: otherwise the place of node 0 is left empty.
///
/// # Errors
/// [`Rejoin`] as the node whose place it takes. Bad input: another key, another version, other options at node 0.
pub fn await_place(waiting: &Waiting, may_resume: impl Fn() -> bool + Send + 'static) -> Result<i32> {
    let Waiting { at, patience, .. } = waiting;
    let sight = Arc::new(Sight::default());
    if at.may_move()
        && let Err(error) = stand_by(waiting, Arc::clone(&sight), may_resume)
    {
        tracing::info!("this spare cannot take the place of node 0, since it cannot listen at {at}: {error}");
    }
    let (mut pause, mut lost) = (NODE_FIRST_RETRY_INTERVAL, None);
    loop {
        match wait_at(waiting, &sight) {
            Ok(Told::Take(rejoin)) => return Err(rejoin.into()),
            Ok(Told::Over(code)) => return Ok(code),
            Ok(Told::Rejoin) => (pause, lost) = (NODE_FIRST_RETRY_INTERVAL, Some(Instant::now())),
            Ok(Told::Lost(why)) if *patience == Patience::None => {
                tracing::error!("{why}: this spare ends");
                return Ok(EXIT_OWN);
            }
            Ok(Told::Lost(why)) => {
                tracing::warn!("{why}. This spare waits until node 0 is there again");
                (pause, lost) = (NODE_FIRST_RETRY_INTERVAL, Some(Instant::now()));
            }
            Err(Refusal::Final(why)) => {
                return Err(bad_input(anyhow!("node 0 at {at} does not take this spare: {why}")));
            }
            Err(Refusal::Transient(why)) => tracing::debug!("no connection to node 0 at {at}: {why}"),
            Err(Refusal::Taken) => tracing::debug!("node 0 at {at} knows this spare already"),
            Err(Refusal::Ended(why)) => {
                tracing::error!("{why}: this spare ends");
                return Ok(EXIT_OWN);
            }
        }
        if *patience != Patience::Endless && lost.is_some_and(|lost: Instant| lost.elapsed() >= REJOIN_LIMIT)
        {
            tracing::error!("node 0 is not there any more: this spare ends");
            return Ok(EXIT_OWN);
        }
        thread::sleep(pause);
        pause = NODE_RETRY_INTERVAL.min(pause * 2);
    }
}

/// What a spare was told.
enum Told {
    /// To take the place of this node.
    Take(Rejoin),
    /// The job has ended, with this exit code.
    Over(i32),
    /// A launcher is lost: node 0 starts again.
    Rejoin,
    /// Nothing more: why.
    Lost(String),
}

fn wait_at(waiting: &Waiting, sight: &Sight) -> Result<Told, Refusal> {
    let Waiting { at, key, join, timeout, .. } = waiting;
    let join = Join { incarnation: join::incarnation(), ..join.clone() };
    let Reached { connection: (_sender, mut receiver), answer, .. } = join::connect_to(at, key, &join)?;
    match join::check_answer(answer) {
        Err(Refusal::Taken) => {}
        Err(refusal) => return Err(refusal),
        Ok(()) => return Err(Refusal::Transient("it takes this spare for a node".to_owned())),
    }
    sight.see();
    tracing::info!(
        "spare {}: waits until a node is lost, and takes its place then (node 0 is at {at})",
        join.rank
    );
    // While node 0 reads its log, it is silent.
    receiver.set_timeout(Some((*timeout).max(SPARE_SILENCE_TIMEOUT)))?;
    let told = told(&mut receiver, at, sight);
    // A launcher that starts again may need some time to end its part.
    sight.forget(matches!(told, Told::Rejoin));
    Ok(told)
}

fn told(receiver: &mut Receiver, at: &Coordinator, sight: &Sight) -> Told {
    loop {
        match receiver.receive() {
            Ok(Message::Take { rank, has_begun }) => {
                tracing::warn!("this spare takes the place of node {rank}");
                return Told::Take(Rejoin { rank, has_begun });
            }
            Ok(Message::Complete) => return Told::Over(0),
            Ok(Message::End(end)) if end.is_to_rejoin => return Told::Rejoin,
            Ok(Message::End(end)) => {
                tracing::info!("the job has ended on all nodes: {}", end.why);
                return Told::Over(end.code);
            }
            Ok(_) => sight.see(),
            Err(ConnectionError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                return Told::Lost(format!("node 0 at {at} is silent"));
            }
            Err(error) => return Told::Lost(format!("the connection to node 0 at {at} is lost ({error})")),
        }
    }
}

/// When a spare has seen node 0 last.
#[derive(Default)]
struct Sight {
    seen: Mutex<Option<Instant>>,
    was_there: AtomicBool,
    /// It has said that it starts again.
    is_back_soon: AtomicBool,
}

impl Sight {
    fn see(&self) {
        *self.seen.lock() = Some(Instant::now());
        self.was_there.store(true, Ordering::SeqCst);
    }

    fn forget(&self, is_back_soon: bool) {
        *self.seen.lock() = None;
        self.is_back_soon.store(is_back_soon, Ordering::SeqCst);
    }

    /// How long nodes may look for it elsewhere.
    fn patience(&self) -> Duration {
        match (self.was_there.load(Ordering::SeqCst), self.is_back_soon.load(Ordering::SeqCst)) {
            (true, false) => SPARE_REJOIN_PATIENCE,
            (true, true) => SPARE_SLOW_PATIENCE,
            (false, _) => SPARE_START_PATIENCE,
        }
    }

    fn is_there(&self, timeout: Duration) -> bool {
        self.seen.lock().is_some_and(|seen| seen.elapsed() < timeout)
    }
}

/// Listens as node 0 would, in a thread of its own, and takes its place if the nodes look for it here.
fn stand_by(
    waiting: &Waiting,
    sight: Arc<Sight>,
    may_resume: impl Fn() -> bool + Send + 'static,
) -> io::Result<()> {
    let (nodes, timeout, (inputs, inbox)) = (waiting.join.nodes, waiting.timeout, unbounded());
    links::listen(&join::own_addresses(&waiting.at)?, nodes, &waiting.key, &inputs)?;
    let watch = move || {
        let (mut sought, mut since, mut asked) = (BTreeMap::new(), None, None);
        loop {
            match inbox.recv_timeout(NODE_BEAT_INTERVAL) {
                Ok(Input::Joining(joining)) => {
                    let Joining { join, connection: (mut sender, _), .. } = *joining;
                    let _ = sender.send(&Message::NotHere);
                    sender.close();
                    sought.insert(join.rank, Instant::now());
                }
                Ok(_) | Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            sought.retain(|_, at: &mut Instant| at.elapsed() < NODE_SOUGHT_TIME);
            if sight.is_there(timeout) || !is_sought(sought.keys().copied(), nodes) {
                since = None;
                continue;
            }
            let is_time = since.get_or_insert_with(Instant::now).elapsed() >= sight.patience();
            let may_ask = asked.is_none_or(|asked: Instant| asked.elapsed() >= SPARE_ASKS_STORE_INTERVAL);
            if is_time && may_ask {
                asked = Some(Instant::now());
                // That may take a while.
                if may_resume() && !sight.is_there(timeout) {
                    tracing::warn!("node 0 is not there: this spare takes its place");
                    tracing::error!("cannot start again as node 0: {}", Rejoin::begun(0).exec());
                }
            }
        }
    };
    thread::Builder::new().name("spare-standby".to_owned()).spawn(watch).map(drop)
}

/// Whether half of the nodes but node 0 are among those that look for it.
fn is_sought(by: impl Iterator<Item = u32>, nodes: u32) -> bool {
    let number = by.filter(|rank| (1..nodes).contains(rank)).count();
    number > 0 && number * 2 >= (nodes - 1) as usize
}

/// For node 0 while it waits for the others, which may be at another node 0, with which the job runs, or for which they look
/// first. Then this launcher is a spare, as which `join` describes it.
///
/// # Errors
/// When the thread cannot be started.
pub(super) fn give_way(
    at: Coordinator,
    key: ClusterKey,
    join: Join,
    has_joined: Arc<AtomicBool>,
) -> io::Result<()> {
    let watch = move || {
        let is_it = |(is_first, stream)| match ask_node_0(stream, &key, &join) {
            Some(is_running) => is_running || is_first,
            None => false,
        };
        while !has_joined.load(Ordering::SeqCst) {
            if join::others(&at).into_iter().any(is_it) && !has_joined.load(Ordering::SeqCst) {
                tracing::warn!("there is another launcher of node 0: this one is a spare");
                let again = Rejoin { rank: join.rank, has_begun: join.rejoins };
                tracing::error!("cannot start again as a spare: {}", again.exec());
            }
            thread::sleep(NODE_WAIT_REPORT);
        }
    };
    thread::Builder::new().name("spare-give-way".to_owned()).spawn(watch).map(drop)
}

/// Whether the job runs with the node 0 at the other end; `None` if that is not node 0.
fn ask_node_0(stream: TcpStream, key: &ClusterKey, join: &Join) -> Option<bool> {
    match join::ask(stream, key, join, NODE_CONNECTION_TIMEOUT).ok()?.answer {
        Message::Spare { is_running } => Some(is_running),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::is_sought;

    #[test]
    fn half_of_the_other_nodes_look_for_node_0() {
        for (by, nodes, expected) in [
            (&[1][..], 2, true),
            (&[], 2, false),
            (&[2], 2, false),
            (&[1, 4], 4, false),
            (&[1, 3], 4, true),
            (&[1, 2], 5, true),
            (&[0, 2], 5, false),
        ] {
            assert_eq!(is_sought(by.iter().copied(), nodes), expected, "{by:?} of {nodes}");
        }
    }
}
