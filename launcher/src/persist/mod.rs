//! Copies of snapshots from one tier to another, and of the journal, in the background.

pub mod copier;
pub mod journal_copies;
pub mod memory;
#[cfg(test)]
mod state_model;
pub mod upload;
