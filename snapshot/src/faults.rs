//! Named fault points: places where a test can inject a failure, to prove that no snapshot is lost.
//!
//! `CKPT_FAULT=point=action[,point=action…]` arms them in builds with the feature `faults`. In every other build
//! [`hit`] is an empty inline function. `point@N` arms the Nth passage (from 1). Actions: `kill` (SIGKILL to this
//! process), `error` (an I/O error), `enospc`, `eio`, `estale`, `eintr`, `eexist`, `delay:MILLISECONDS`, `hold:PATH` (waits
//! for as long as there is such a file). Any other action goes to the handler that the program registered with `on_other` (the launcher: `kill-criu`, `kill-rank`).

/// Passes the fault point `name`.
///
/// # Errors
/// The injected error, if the point is armed with one. Without the feature `faults` it never fails.
#[cfg(not(feature = "faults"))]
#[inline]
pub fn hit(_name: &str) -> std::io::Result<()> {
    Ok(())
}

#[cfg(feature = "faults")]
pub use armed::{hit, on_other};

#[cfg(feature = "faults")]
mod armed {
    use parking_lot::Mutex;
    use std::collections::HashMap;
    use std::io;
    use std::sync::OnceLock;
    use std::time::Duration;

    type Handler = Box<dyn Fn(&str, &str) + Send + Sync>;

    static HANDLER: OnceLock<Handler> = OnceLock::new();
    static PASSED: OnceLock<Mutex<HashMap<String, u64>>> = OnceLock::new();

    /// Registers the handler for actions that this module does not know; called with (point, action).
    pub fn on_other(handler: impl Fn(&str, &str) + Send + Sync + 'static) {
        let _ = HANDLER.set(Box::new(handler));
    }

    /// Passes the fault point `name`.
    ///
    /// # Errors
    /// The injected error, if the point is armed with one.
    ///
    /// # Panics
    /// If `CKPT_FAULT` does not parse: a test with a typing error must not pass.
    pub fn hit(name: &str) -> io::Result<()> {
        let Ok(armed) = std::env::var("CKPT_FAULT") else { return Ok(()) };
        let passages = {
            let mut passed = PASSED.get_or_init(Mutex::default).lock();
            let count = passed.entry(name.to_owned()).or_insert(0);
            *count += 1;
            *count
        };
        for item in armed.split(',') {
            let (point, action) = item.split_once('=').expect("CKPT_FAULT is point=action");
            let (point, nth) = match point.split_once('@') {
                Some((point, nth)) => (point, nth.parse::<u64>().expect("a number after @")),
                None => (point, passages),
            };
            if point == name && nth == passages {
                return act(name, action);
            }
        }
        Ok(())
    }

    fn act(name: &str, action: &str) -> io::Result<()> {
        tracing::warn!("fault point {name}: {action}");
        match action {
            "kill" => {
                let _ =
                    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
                loop {
                    std::thread::park();
                }
            }
            "error" => Err(io::Error::other(format!("injected at {name}"))),
            "enospc" => Err(rustix::io::Errno::NOSPC.into()),
            "eio" => Err(rustix::io::Errno::IO.into()),
            "estale" => Err(rustix::io::Errno::STALE.into()),
            "eintr" => Err(rustix::io::Errno::INTR.into()),
            "eexist" => Err(rustix::io::Errno::EXIST.into()),
            other if other.starts_with("delay:") => {
                let delay_ms = other.trim_start_matches("delay:").parse().expect("delay:MILLISECONDS");
                std::thread::sleep(Duration::from_millis(delay_ms));
                Ok(())
            }
            other if other.starts_with("hold:") => {
                while std::path::Path::new(other.trim_start_matches("hold:")).exists() {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Ok(())
            }
            other => {
                HANDLER.get().unwrap_or_else(|| panic!("unknown fault action {other}"))(name, other);
                Ok(())
            }
        }
    }
}
