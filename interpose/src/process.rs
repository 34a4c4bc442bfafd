//! Properties of this process: environment, start time, executable.
//!
//! `std::env` is not used: it takes a lock that a `fork` in another thread could leave locked.

use std::ffi::{CStr, CString, c_char};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

unsafe extern "C" {
    /// The C library's own variable, see environ(7).
    static environ: *const *const c_char;
}

/// Field 22 of `/proc/PID/stat`, counted from the one after the program's name, which is field 2.
const START_TIME_AFTER_NAME: usize = 22 - 3;

/// Whether the program runs with more rights than the user who started it (set-user-ID and the like).
pub fn is_privileged() -> bool {
    // SAFETY: getauxval takes any number and only reads the vector that the kernel left for this process.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// The environment at the program's start.
///
/// To be used in the constructor only: nothing else may be changing the environment.
pub fn environment() -> impl Iterator<Item = &'static CStr> {
    // SAFETY: reading a pointer that the C library keeps initialised; at this time no other thread exists
    // that could be writing it.
    let mut entry = unsafe { environ };
    std::iter::from_fn(move || {
        if entry.is_null() {
            return None;
        }
        // SAFETY: `entry` is within environ's array, as it stays at the null pointer that ends it.
        let text = unsafe { *entry };
        if text.is_null() {
            return None;
        }
        entry = entry.wrapping_add(1);
        // SAFETY: the entries are NUL-terminated strings. They live as long as the process: they lie on the
        // initial stack, which is never given back.
        Some(unsafe { CStr::from_ptr(text) })
    })
}

/// The value of an environment variable, as the environment is at the program's start.
///
/// To be called from the constructor only: nothing else may be changing the environment.
pub fn variable(name: &[u8]) -> Option<&'static [u8]> {
    environment().find_map(|entry| entry.to_bytes().strip_prefix(name)?.strip_prefix(b"="))
}

/// Takes a variable out of the environment, which the program and those below it then do not have.
///
/// To be called from the constructor only: nothing else may be using the environment.
pub fn forget_variable(name: &str) {
    let Ok(name) = CString::new(name) else { return };
    // SAFETY: a NUL-terminated name; no other thread exists. The C library moves the pointers behind it up, in the
    // array that `main` is given too.
    unsafe { libc::unsetenv(name.as_ptr()) };
}

/// Sets a variable, for the program and those below it.
///
/// To be called from the constructor only: nothing else may be using the environment.
pub fn set_variable(name: &str, value: &str) {
    let (Ok(name), Ok(value)) = (CString::new(name), CString::new(value)) else { return };
    // SAFETY: NUL-terminated texts, which the C library copies; no other thread exists.
    unsafe { libc::setenv(name.as_ptr(), value.as_ptr(), 1) };
}

/// How many CPUs the calling thread, and threads that it starts, may run on; as many as there can be if the kernel does not
/// tell.
pub fn cpus() -> usize {
    let mut set = std::mem::MaybeUninit::<libc::cpu_set_t>::zeroed();
    // SAFETY: the set has the size that is given.
    let result = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), set.as_mut_ptr()) };
    // SAFETY: all zeroes is an empty set.
    let set = unsafe { set.assume_init() };
    // SAFETY: the set is initialised.
    if result == 0 { unsafe { libc::CPU_COUNT(&set) as usize } } else { usize::MAX }
}

/// This process's start in clock ticks since boot, if `/proc` has it.
///
/// A restored process has another start time than the one that was dumped: its task was recreated.
pub fn start_time_ticks() -> Option<u64> {
    // Far more than the line's names and numbers can take; no heap, as this runs with forks held up.
    let mut text = [0; 2048];
    let bytes = std::fs::File::open("/proc/self/stat").ok()?.read(&mut text).ok()?;
    parse_start_time(&text[..bytes])
}

fn parse_start_time(stat: &[u8]) -> Option<u64> {
    // The name, in parentheses, is the application's to choose; it may hold any byte, parentheses as well.
    let name_end = stat.iter().rposition(|&byte| byte == b')')?;
    let fields = str::from_utf8(&stat[name_end + 1..]).ok()?;
    fields.split_ascii_whitespace().nth(START_TIME_AFTER_NAME)?.parse().ok()
}

/// A random number that this process has until it executes another program; never 0. Where the system has no random
/// numbers, the same for all.
pub fn instance() -> u64 {
    static INSTANCE: AtomicU64 = AtomicU64::new(0);
    let known = INSTANCE.load(SeqCst);
    if known != 0 {
        return known;
    }
    let mut bytes = [0_u8; 8];
    // SAFETY: the pointer and the length are those of one live buffer.
    unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    let made = u64::from_ne_bytes(bytes).max(1);
    // Another thread may have been faster.
    INSTANCE.compare_exchange(0, made, SeqCst, SeqCst).err().unwrap_or(made)
}

/// This process's mappings (proc_pid_maps(5)). The names of files may have bytes that are not UTF-8, which are replaced.
///
/// # Errors
/// When they cannot be read.
pub fn mappings() -> std::io::Result<String> {
    Ok(String::from_utf8_lossy(&std::fs::read("/proc/self/maps")?).into_owned())
}

/// Where this process's program lies; empty if that cannot be read.
pub fn exe() -> String {
    let path = std::fs::read_link("/proc/self/exe").unwrap_or_default();
    String::from_utf8_lossy(path.as_os_str().as_bytes()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIELDS: &str = "S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20 21";

    #[test]
    fn the_start_time_is_found_behind_any_name() {
        for name in ["sleep", "", "a b", ") S 1 (", "\u{fffd}("] {
            let line = format!("42 ({name}) {FIELDS}\n");
            assert_eq!(parse_start_time(line.as_bytes()), Some(4711), "{name:?}");
        }
        let mut line = b"42 (\xff\x00) ".to_vec();
        line.extend_from_slice(FIELDS.as_bytes());
        assert_eq!(parse_start_time(&line), Some(4711));
    }

    #[test]
    fn a_line_that_is_cut_off_has_no_start_time() {
        for line in ["", "42", "42 (sleep", "42 (sleep)", "42 (sleep) S 1 2 3"] {
            assert_eq!(parse_start_time(line.as_bytes()), None, "{line:?}");
        }
    }

    #[test]
    fn this_process_knows_itself() {
        assert!(start_time_ticks().is_some_and(|ticks| ticks > 0));
        assert!(exe().starts_with('/'));
        assert!(!is_privileged());
        let first = instance();
        assert_ne!(first, 0);
        assert_eq!(instance(), first);
    }
}
