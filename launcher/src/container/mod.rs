//! In a container: a first process that becomes ckpt-run, PID 1, what cannot be preloaded.

#[allow(unsafe_code)]
pub mod auto;
#[allow(unsafe_code)]
pub mod pid1;
pub mod preloadable;
