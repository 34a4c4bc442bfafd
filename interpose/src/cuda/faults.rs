//! Named fault points between the steps of detach and attach, in builds with the feature `faults` only; in every
//! other build [`hit`] is an empty inline function.
//!
//! `CKPT_FAULT=point=action[,point=action…]` arms them, in every process of the job, as long as the file that
//! `CKPT_FAULT_WHILE` names exists: a restored process has the environment of the one that was dumped, so a test
//! disarms it by removing the file. Actions: `kill` (SIGKILL to this process), `stop` (SIGSTOP, after a
//! file of the same name with the extension `stopped` was made), `delay:MILLISECONDS`.
//! Points of other programs (the launcher reads the same variable) are passed over.

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

    struct Armed {
        points: &'static [u8],
        while_exists: &'static Path,
    }

    static ARMED: OnceLock<Armed> = OnceLock::new();

    /// Reads the environment: from the constructor only.
    pub(in crate::cuda) fn arm() {
        if let Some(points) = process::variable(b"CKPT_FAULT")
            && let Some(file) = process::variable(b"CKPT_FAULT_WHILE")
        {
            let _ = ARMED.set(Armed { points, while_exists: Path::new(OsStr::from_bytes(file)) });
        }
    }

    /// Passes the fault point `name`.
    pub(in crate::cuda) fn hit(name: &str) {
        let Some(armed) = ARMED.get() else { return };
        if let Some(action) = action(armed.points, name)
            && armed.while_exists.exists()
        {
            act(action, armed.while_exists);
        }
    }

    fn action<'a>(points: &'a [u8], name: &str) -> Option<&'a str> {
        let of = |item: &'a [u8]| item.strip_prefix(name.as_bytes())?.strip_prefix(b"=");
        str::from_utf8(points.split(|byte| *byte == b',').find_map(of)?).ok()
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
            let points = b"detach-locked=kill,detach-gate=delay:20,dump-done=kill-rank";
            assert_eq!(action(points, "detach-locked"), Some("kill"));
            assert_eq!(action(points, "detach-gate"), Some("delay:20"));
            assert_eq!(action(points, "detach"), None);
            assert_eq!(action(points, "attach-restored"), None);
        }
    }
}
