//! In a container: a first process that becomes ckpt-run, PID 1, what cannot be preloaded.

pub mod auto;
pub mod pid1;
pub mod preloadable;
