//! Named fault points between the steps of detach and attach, in builds with the feature `faults` only; in every
//! other build [`hit`] is an empty inline function.
//!
//! `CKPT_FAULT_FILE` names a file. Its content, `point=action[,point=action…]`, applies to every process of the job
//! while the file exists: a restored process has the environment of the dumped one, and a test can change the file.
//! Actions: `kill` (SIGKILL to this process), `stop` (SIGSTOP, after creating a file of the same name with the
//! extension `stopped`), `hold` (waits until the file is gone, after creating one with the extension `held`),
//! `delay:MILLISECONDS`, `panic`.

#[cfg(not(feature = "faults"))]
#[inline]
pub(super) fn hit(_name: &str) {}

#[cfg(feature = "faults")]
pub(super) use armed::{arm, hit};

#[cfg(feature = "faults")]
mod armed {
    use std::ffi::{OsStr, c_int};
    use std::os::unix::ffi::OsStrExt;
    use std::path::Path;
    use std::sync::OnceLock;
    use std::time::Duration;

    use crate::process;

    static FILE: OnceLock<&'static Path> = OnceLock::new();

    /// Reads the environment: from the constructor only.
    pub(crate) fn arm() {
        if let Some(file) = process::variable(b"CKPT_FAULT_FILE") {
            let _ = FILE.set(Path::new(OsStr::from_bytes(file)));
        }
    }

    /// Passes the fault point `name`.
    pub(crate) fn hit(name: &str) {
        let Some(file) = FILE.get() else { return };
        let points = std::fs::read_to_string(file).unwrap_or_default();
        if let Some(action) = action(&points, name) {
            act(action, file);
        }
    }

    fn action<'a>(points: &'a str, name: &str) -> Option<&'a str> {
        let of = |item: &'a str| item.strip_prefix(name)?.strip_prefix('=');
        points.split(',').find_map(of)
    }

    /// An action that is not understood is one with a typing error, which must not pass as a fault survived.
    fn act(action: &str, file: &Path) {
        let delay_ms = || action.strip_prefix("delay:")?.parse().ok();
        match action {
            "kill" => signal(libc::SIGKILL),
            "stop" => {
                // That a process stands still is seen for other reasons too.
                let _ = std::fs::File::create(file.with_extension("stopped"));
                signal(libc::SIGSTOP);
            }
            "hold" => {
                let _ = std::fs::File::create(file.with_extension("held"));
                while file.exists() {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            "panic" => panic!("injected"),
            _ => match delay_ms() {
                Some(delay_ms) => std::thread::sleep(Duration::from_millis(delay_ms)),
                None => signal(libc::SIGABRT),
            },
        }
    }

    /// Kills or stops the whole process before the calling thread has gone any further, which a signal to the
    /// process would not: another thread may be the one to take it.
    fn signal(signal: c_int) {
        // SAFETY: raise takes a plain number.
        unsafe { libc::raise(signal) };
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn a_point_has_its_own_action() {
            let points = "detach-locked=kill,detach-gate=delay:20";
            assert_eq!(action(points, "detach-locked"), Some("kill"));
            assert_eq!(action(points, "detach-gate"), Some("delay:20"));
            assert_eq!(action(points, "detach"), None);
            assert_eq!(action(points, "attach-restored"), None);
        }
    }
}
