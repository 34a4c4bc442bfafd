//! A job on several nodes: the launchers talk over TCP, take snapshots of all parts at one moment, and end or resume the
//! job together. Node 0 coordinates. The protocol is that of the crate `ckpt-cluster`; docs/design/cluster.md explains it.
//!
//! ```text
//!                 connection.rs                      gate.rs
//!   other nodes <---------------> host.rs (thread) <---------> checkpointer: Prepare … Store
//!                                  │  Peer          <---------> resume: Load, Unblock, Thaw
//!                                  │ notices
//!                                  v
//!                              supervise/ (Load, Checkpoint, Complete, End)
//! ```

mod connection;
mod diag;
mod engine;
mod gate;
mod host;
mod job_network;
mod join;
mod links;
mod messages;
mod netlink;
mod options;
mod packet_rule;
pub mod progress;
mod rejoin;
mod replicas;
pub mod sockets;
mod spares;
mod stored_log;
mod vxlan;

pub use connection::ClusterKey;
pub use gate::{Gate, GateEnd};
pub use host::{Cluster, Load, Notice, RankReports, Resumable};
pub use job_network::{JobNetwork, delete_left_interfaces, left_interfaces};
pub use join::{Member, Wanted, has_snapshots, join, newest};
pub use messages::{End, EndedPart, HeldPart, IdlePart, Join, RankReport, Restart, StopHow};
pub use options::{Coordinator, NodeOptions, OnNodeLoss};
pub use packet_rule::PacketRule;
pub use rejoin::Rejoin;
pub use replicas::Replicas;
pub use spares::{Patience, Waiting, await_place};
pub use stored_log::GlobalManifests;

/// Between the name of a job and the number of a node, in the name of its part.
pub const NODE: &str = ".node";
