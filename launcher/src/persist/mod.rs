//! Copies of snapshots from one tier to another, in the background.

pub mod copier;
pub mod memory;
pub mod upload;
