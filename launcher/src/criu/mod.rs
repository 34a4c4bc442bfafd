//! CRIU: finding it, controlling it over its RPC, reading its images, and explaining its errors (`known_errors.rs`).

mod empty_messages;
mod fields;
mod find;
mod images;
pub mod injection;
mod known_errors;
pub mod library;
mod mappings;
mod pagemap;
mod rpc;
mod session;
mod tasks;
mod tcp_queues;
#[allow(unsafe_code)]
mod tcp_repair;
mod timers;
mod unix_queues;

pub use empty_messages::{EmptyMessagesError, with_empty_messages};
pub use find::{Criu, CriuMissing, MIN_VERSION};
pub use images::{Descriptors, ImageError};
pub use known_errors::explain;
pub use mappings::Mappings;
pub use pagemap::{Merged, PageEntry, Pagemap, Pages, Piece, chunk_ends};
pub use rpc::{CRIU_EVERYTHING, CRIU_WARNINGS, InheritFd, Options};
pub use session::{RestoreLimits, Session, SessionError};
pub use tasks::{failed_processes, limits, rseq_areas};
pub use tcp_queues::count_unsent_as_sent;
pub use tcp_repair::end_tcp_repair;
pub use timers::arm_expired_timers;
pub use unix_queues::{Holder, Queue, UnixQueues, put_senders_last};
