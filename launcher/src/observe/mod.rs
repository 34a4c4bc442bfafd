//! What others ask a running launcher: commands over its socket, Prometheus over HTTP.

pub mod control_server;
pub mod metrics;
pub mod notify;
