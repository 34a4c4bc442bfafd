//! The command line, the options, the messages of ckpt-run.

pub mod args;
pub mod config;
pub mod logging;
pub mod man;
pub mod resolve;
pub mod settings;
pub mod values;
