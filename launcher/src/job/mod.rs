//! A job in the store: its record, which launcher owns it, its journal, where a run resumes.

pub mod alive;
pub mod attempt_logs;
pub mod claim;
pub mod deletion;
pub mod earlier_init;
pub mod handover;
pub mod journal;
pub mod ownership;
pub mod resume_point;
#[cfg(test)]
mod simulation;
pub mod started_with;
pub mod status;
pub mod times;
