//! Copies of snapshots from one tier to another, in the background.

pub mod copier;
pub mod memory;
#[cfg(test)]
mod state_model;
pub mod upload;
