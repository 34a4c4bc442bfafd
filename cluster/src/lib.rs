//! One snapshot of a job on several nodes: the protocol between their launchers.
//!
//! ```text
//! coordinator                                   node
//!   Beat  -------------------------------------->
//!        <--------------------------------------  Hello{its session}
//!   Order{attempt, step}  ---------------------->  performs the step
//!        <--------------------------------------  Report{attempt, step, outcome}
//!     (all nodes have done the step: the next one; a failure or the deadline: Abort)
//!   Abort{attempt}  ---------------------------->  lets go
//! ```
//!
//! A checkpoint and a resume are attempts: lists of steps, with a barrier after each. The global manifest is a record of
//! the store's log, which takes one record at each position: this is the commit, and it also decides who coordinates.
//!
//! The crate does no I/O. [`Peer`] is a launcher: a state machine over messages, answers of the store and times.
//! `docs/design/cluster.md` has the protocol, the reasons why it is right, and its limits.

#![forbid(unsafe_code)]

mod action;
mod coordinator;
mod log;
mod messages;
mod node;
mod peer;

pub use action::{Action, Event, PutAnswer, Reason, Settings};
pub use log::{Log, PartId, PartRecord, Record};
pub use messages::{
    AttemptId, Blame, Envelope, Hello, Message, NodeId, Order, OtherVersion, Outcome, SessionState, Step,
    VERSION,
};
pub use node::Node;
pub use peer::Peer;

#[cfg(test)]
mod tests;
