//! Errors as messages with a remedy, and as exit codes.

pub mod failure;
