//! The command line, the options, ckpt-run's own messages.

pub mod args;
pub mod config;
pub mod logging;
