//! The consistent cut: all ranks of a job stop at the same collective, so that a checkpoint finds nothing in flight.
//!
//! NCCL's collectives wait for each other: one that some ranks have enqueued and others have not keeps the GPU busy for
//! ever. So before a checkpoint every communicator needs the same number of steps on all its members. Each rank counts
//! its steps per communicator (its *sequences*). A coordinator collects the sequences and sends *targets*: how far each
//! rank has to go. A rank whose targets are met *parks* before its next step.
//!
//! ```text
//! coordinator (launcher)                      rank (process of the job)
//!   Count  ---------------------------------->  parks before every step
//!          <----------------------------------  Report{sequences, calls in progress}
//!   Reach{version, targets}  ---------------->  parks where all targets are met; else it runs on
//!          <----------------------------------  Report{version, sequences, calls in progress}, at each change
//!     (a rank went past a target: Reach with the next version)
//!     (all ranks have met the newest version, and none is in a call: the cut)
//!   Release  -------------------------------->  runs on
//! ```
//!
//! The crate does no I/O. [`rank::Clock`] is the rank's side: a few atomic operations in front of a step while no cut is
//! wanted. [`Coordinator`] is a pure state machine over messages; [`JobCut`] has it serve the ranks of several launchers.
//! `docs/design/collectives.md` has the algorithm, its proof and its limits.

#![forbid(unsafe_code)]

mod coordinator;
mod job;
mod messages;
mod names;
pub mod rank;

pub use coordinator::{Blocker, Coordinator, Failure, NamedMember, RankId, Settings, State};
pub use job::JobCut;
pub use messages::{FromLauncher, MemberReport, NamedRank, Order, Report, Role, ToLauncher};
pub use names::{Member, Name};

#[cfg(test)]
mod tests;
