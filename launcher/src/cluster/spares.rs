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

use super::connection::{self, ClusterKey, Receiver, Side};
use super::host::Input;
use super::join::{self, Refusal};
use super::links::{Joining, Link};
use super::messages::{Join, Message};
use super::options::{Coordinator, OnNodeLoss};
use crate::sys::deadline::{
    NODE_CONNECTION_TIMEOUT, NODE_FIRST_RETRY_INTERVAL, NODE_RETRY_INTERVAL, SPARE_TAKES_LIMIT,
};
use crate::sys::error::{EXIT_OWN, bad_input};
use anyhow::{Result, anyhow};
use std::collections::BTreeMap;
use std::time::Instant;

/// The spares that wait at node 0.
#[derive(Debug, Default)]
pub(super) struct Spares {
    waiting: BTreeMap<u32, Link>,
    /// The nodes whose places were given to spares, which have not joined yet.
    given: BTreeMap<u32, Instant>,
}

impl Spares {
    /// Takes a spare in. `number` tells its connection from others.
    pub(super) fn add(&mut self, joining: Joining, number: u64, inputs: &crossbeam_channel::Sender<Input>) {
        let Joining { join, connection, .. } = joining;
        let link = match Link::start(join.rank, number, connection, inputs) {
            Ok(link) => link,
            Err(error) => return tracing::warn!("the spare {} cannot be served: {error}", join.rank),
        };
        link.send(Message::Spare);
        tracing::info!("the spare {} on {} is there", join.rank, join.hostname);
        self.waiting.insert(join.rank, link);
    }

    /// A connection is lost. Whether it was that of a spare.
    pub(super) fn lost(&mut self, rank: u32, number: u64) -> bool {
        let is_it = |link: &Link| link.number == number;
        self.waiting.get(&rank).is_some_and(is_it) && self.waiting.remove(&rank).is_some()
    }

    /// Whether none waits.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Tells all of them.
    pub(super) fn tell(&self, message: &Message) {
        self.waiting.values().for_each(|link| link.send(message.clone()));
    }

    /// Gives spares the places of these nodes, as far as there are spares.
    pub(super) fn give(&mut self, missing: impl Iterator<Item = u32>) {
        for rank in missing {
            if self.given.get(&rank).is_some_and(|given| given.elapsed() < SPARE_TAKES_LIMIT) {
                continue;
            }
            let Some((spare, link)) = self.waiting.pop_first() else { return };
            tracing::warn!("node {rank} is not there: the spare {spare} takes its place");
            link.send(Message::Take { rank });
            link.finish();
            self.given.insert(rank, Instant::now());
        }
    }

    /// Sends what is queued, then closes the connections.
    pub(super) fn finish(self) {
        self.waiting.into_values().for_each(Link::finish);
    }
}

/// What becomes of a spare.
pub enum Place {
    /// It takes the place of this node.
    Node(u32),
    /// The job has ended, with this exit code.
    Over(i32),
}

/// Waits, as the spare that `join` describes, until node 0 needs it.
///
/// # Errors
/// Bad input: another key, another version, other options at node 0.
pub fn await_place(
    at: &Coordinator,
    key: &ClusterKey,
    join: impl Fn() -> Join,
    on_loss: OnNodeLoss,
) -> Result<Place> {
    let mut pause = NODE_FIRST_RETRY_INTERVAL;
    loop {
        match wait_at(at, key, join()) {
            Ok(Told::Place(place)) => return Ok(place),
            Ok(Told::Rejoin) => pause = NODE_FIRST_RETRY_INTERVAL,
            Ok(Told::Lost(why)) if on_loss == OnNodeLoss::Wait => {
                tracing::warn!("{why}. This spare waits until it is there again");
            }
            Ok(Told::Lost(why)) => {
                tracing::error!("{why}: this spare ends");
                return Ok(Place::Over(EXIT_OWN));
            }
            Err(Refusal::Final(why)) => {
                return Err(bad_input(anyhow!("node 0 at {at} does not take this spare: {why}")));
            }
            Err(Refusal::Transient(why)) => tracing::debug!("no connection to node 0 at {at}: {why}"),
        }
        std::thread::sleep(pause);
        pause = NODE_RETRY_INTERVAL.min(pause * 2);
    }
}

/// What a spare was told.
enum Told {
    Place(Place),
    /// A launcher is lost: node 0 starts again.
    Rejoin,
    /// Nothing more: why.
    Lost(String),
}

fn wait_at(at: &Coordinator, key: &ClusterKey, join: Join) -> Result<Told, Refusal> {
    let rank = join.rank;
    let stream = join::connect_to(at)?;
    let (mut sender, mut receiver) = connection::open(stream, key, Side::Node, NODE_CONNECTION_TIMEOUT)?;
    sender.send(&Message::Join(join))?;
    match receiver.receive()? {
        Message::Spare => {}
        Message::Refused { why, is_transient: false } => return Err(Refusal::Final(why)),
        _ => return Err(Refusal::Transient("it is not ready".to_owned())),
    }
    tracing::info!("spare {rank}: waits until a node is lost, and takes its place then (node 0 is at {at})");
    receiver.set_timeout(None)?;
    Ok(told(&mut receiver, at))
}

fn told(receiver: &mut Receiver, at: &Coordinator) -> Told {
    loop {
        match receiver.receive() {
            Ok(Message::Take { rank }) => {
                tracing::warn!("this spare takes the place of node {rank}");
                return Told::Place(Place::Node(rank));
            }
            Ok(Message::Complete) => return Told::Place(Place::Over(0)),
            Ok(Message::End(end)) if end.is_to_rejoin => return Told::Rejoin,
            Ok(Message::End(end)) => {
                tracing::info!("the job has ended on all nodes: {}", end.why);
                return Told::Place(Place::Over(end.code));
            }
            Ok(_) => {}
            Err(error) => return Told::Lost(format!("the connection to node 0 at {at} is lost ({error})")),
        }
    }
}
