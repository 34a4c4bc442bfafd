//! CRIU: finding it, controlling it over its RPC, reading its images, and explaining its errors (`known_errors.rs`).

mod find;
mod images;
mod known_errors;
mod pagemap;
mod rpc;
mod session;
mod timers;

#[cfg(test)]
pub use find::CriuMissing;
pub use find::{Criu, MIN_VERSION};
pub use images::{Descriptors, ImageError};
pub use known_errors::explain;
pub use pagemap::{Pagemap, chunk_ends};
pub use rpc::{CRIU_EVERYTHING, CRIU_WARNINGS, InheritFd, Options};
pub use session::{RestoreLimits, Session, SessionError};
pub use timers::arm_expired_timers;
