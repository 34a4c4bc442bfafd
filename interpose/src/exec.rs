//! `execve` and its variants: a program that is started with an environment of its own is part of the job too.
//!
//! Each function is replaced by one that adds two variables to the environment if they are missing: those that
//! preload this library and name the launcher's socket. It then calls the next library's function. The functions are
//! called between `fork` or `vfork` and `exec`, so they use no heap and no lock and leave the memory of a parent that
//! shares it unchanged. Programs that the C library itself starts (`system`, `popen`) inherit the environment of this
//! process.

#![cfg_attr(test, allow(dead_code, reason = "tests export nothing, so that nothing counts as reached"))]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::{MaybeUninit, transmute};
use std::ptr::{null, null_mut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use ckpt_protocol::agent::SOCKET_VARIABLE;

use crate::cuda::elf;
use crate::process;

const PRELOAD: &CStr = c"LD_PRELOAD=";

type Strings = *const *const c_char;

/// The entries that every environment needs.
struct Entries {
    preload: CString,
    socket: CString,
}

static ENTRIES: OnceLock<Entries> = OnceLock::new();

/// Makes programs that this process starts part of the job. To be called from the constructor only.
pub fn follow(socket: &[u8]) {
    look_up_all();
    let Some(library) = own_path() else { return };
    // If this library was loaded by other means, the children load it in the same way.
    if !process::variable(b"LD_PRELOAD").is_some_and(|list| has(list, library.to_bytes())) {
        return;
    }
    let preload = CString::new([PRELOAD.to_bytes(), library.to_bytes()].concat());
    let socket = CString::new([SOCKET_VARIABLE.as_bytes(), b"=", socket].concat());
    if let (Ok(preload), Ok(socket)) = (preload, socket) {
        let _ = ENTRIES.set(Entries { preload, socket });
    }
}

/// This library's path, as `LD_PRELOAD` has it.
pub fn own_path() -> Option<&'static CStr> {
    let path = elf::library_of(own_path as *const c_void)?.dli_fname;
    // SAFETY: the name of a loaded library is a NUL-terminated string that lives as long as the library.
    (!path.is_null()).then(|| unsafe { CStr::from_ptr(path) })
}

/// Whether a list for `LD_PRELOAD` names a library (ld.so(8): separated by spaces or colons).
fn has(list: &[u8], library: &[u8]) -> bool {
    list.split(|byte| matches!(byte, b' ' | b':')).any(|entry| entry == library)
}

/// What an environment lacks.
struct Missing<'a> {
    /// How many entries it has.
    count: usize,
    socket: bool,
    preload: Option<Preload<'a>>,
}

/// What to do about `LD_PRELOAD`.
enum Preload<'a> {
    Add,
    /// The entry at `index` has this list, which we are not in.
    Extend {
        index: usize,
        list: &'a [u8],
    },
}

/// # Safety
/// `environment` is an environment as environ(7) describes it, or NULL, which Linux takes for an empty one.
unsafe fn missing<'a>(environment: Strings, entries: &Entries) -> Missing<'a> {
    let library = &entries.preload.to_bytes()[PRELOAD.count_bytes()..];
    let mut missing = Missing { count: 0, socket: true, preload: Some(Preload::Add) };
    if environment.is_null() {
        return missing;
    }
    loop {
        // SAFETY: within the array, as the loop stops at the null pointer that ends it.
        let entry = unsafe { environment.wrapping_add(missing.count).read() };
        if entry.is_null() {
            return missing;
        }
        // SAFETY: the entries are NUL-terminated strings.
        let entry = unsafe { CStr::from_ptr(entry) }.to_bytes();
        if let Some(list) = entry.strip_prefix(PRELOAD.to_bytes()) {
            // The dynamic loader takes the last one if there are several.
            missing.preload = (!has(list, library)).then_some(Preload::Extend { index: missing.count, list });
        } else if entry.strip_prefix(SOCKET_VARIABLE.as_bytes()).is_some_and(|rest| rest.starts_with(b"=")) {
            missing.socket = false;
        }
        missing.count += 1;
    }
}

/// Room for an environment that most programs do not fill: on the stack.
const STACK_WORDS: usize = 1024;

/// Calls `exec` with the environment and what it lacks.
///
/// # Safety
/// As for [`missing`].
unsafe fn with_ours(
    entries: Option<&Entries>,
    environment: Strings,
    exec: impl FnOnce(Strings) -> c_int,
) -> c_int {
    let Some(entries) = entries else { return exec(environment) };
    // SAFETY: the caller vouches for it.
    let missing = unsafe { missing(environment, entries) };
    if !missing.socket && missing.preload.is_none() {
        return exec(environment);
    }
    // Two more and the null pointer; behind them the list that is made longer: ours, a colon, theirs and a NUL.
    let pointers = missing.count + 3;
    let list_bytes = match missing.preload {
        Some(Preload::Extend { list, .. }) => entries.preload.count_bytes() + list.len() + 2,
        _ => 0,
    };
    let words = pointers + list_bytes.div_ceil(size_of::<usize>());
    if words <= STACK_WORDS {
        let mut room = MaybeUninit::<[usize; STACK_WORDS]>::uninit();
        // SAFETY: there is room for that many words.
        unsafe { fill(room.as_mut_ptr().cast(), environment, entries, &missing) };
        return exec(room.as_ptr().cast());
    }
    // After a vfork and a successful exec this stays with the parent, a few pages each time.
    let bytes = words * size_of::<usize>();
    // SAFETY: a new mapping of private memory, nothing existing is touched.
    let room = unsafe {
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        libc::mmap(null_mut(), bytes, access, kind, -1, 0)
    };
    if room == libc::MAP_FAILED {
        return exec(environment);
    }
    // SAFETY: there is room for that many words.
    unsafe { fill(room.cast(), environment, entries, &missing) };
    let result = exec(room.cast());
    // SAFETY: it was mapped above, and the function that used it has returned. errno stays, as it succeeds.
    unsafe { libc::munmap(room, bytes) };
    result
}

/// Writes the environment with what it lacks.
///
/// # Safety
/// `room` has the size that [`with_ours`] has worked out, and `missing` is about `environment`.
unsafe fn fill(room: *mut *const c_char, environment: Strings, entries: &Entries, missing: &Missing<'_>) {
    let mut end = missing.count;
    if end > 0 {
        // SAFETY: the environment has as many entries, and does not lie in the new room.
        unsafe { room.copy_from_nonoverlapping(environment, end) };
    }
    let mut put = |entry: *const c_char| {
        // SAFETY: there is room for three more than the environment has.
        unsafe { room.wrapping_add(end).write(entry) };
        end += 1;
    };
    if missing.socket {
        put(entries.socket.as_ptr());
    }
    if matches!(missing.preload, Some(Preload::Add)) {
        put(entries.preload.as_ptr());
    }
    put(null());
    if let Some(Preload::Extend { index, list }) = missing.preload {
        let text = room.wrapping_add(missing.count + 3).cast::<u8>();
        let mut length = 0;
        for part in [entries.preload.to_bytes(), b":", list, b"\0"] {
            // SAFETY: the room behind the pointers is as long as these parts together.
            unsafe { text.wrapping_add(length).copy_from_nonoverlapping(part.as_ptr(), part.len()) };
            length += part.len();
        }
        // SAFETY: the index is that of an entry.
        unsafe { room.wrapping_add(index).write(text.cast()) };
    }
}

/// A function of the libraries behind this one. It is looked for in the constructor; looking takes the loader's lock,
/// which could stay locked in a child of `fork`.
fn next(slot: &AtomicPtr<c_void>, name: &CStr) -> Option<*const c_void> {
    if slot.load(Relaxed).is_null() {
        slot.store(elf::next(next as *const c_void, name).cast_mut(), Relaxed);
    }
    let found = slot.load(Relaxed).cast_const();
    (!found.is_null()).then_some(found)
}

/// What a call answers for which there is no function: only an old C library lacks one.
fn no_such_function() -> c_int {
    // SAFETY: takes nothing and has no preconditions.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: it is the calling thread's own.
    unsafe { errno.write(libc::ENOSYS) };
    -1
}

unsafe extern "C" {
    /// The C library's own variable, see environ(7).
    static environ: Strings;
}

fn own_environment() -> Strings {
    // SAFETY: a program that changes its environment while it executes another is on its own.
    unsafe { environ }
}

/// Functions that add to the environment what it lacks and call the next library's function, usually the C library's.
macro_rules! replaced {
    ($( $(#[$doc:meta])* $next:ident = $text:literal,
        fn $name:ident ( $($arg:ident : $ty:ty),* ) with $environment:ident, or $absent:expr ; )*) => {
        $( static $next: AtomicPtr<c_void> = AtomicPtr::new(null_mut()); )*

        /// Looks up all of the next functions.
        fn look_up_all() {
            $( let _ = next(&$next, $text); )*
        }

        $(
            $(#[$doc])*
            ///
            /// # Safety
            /// As for the C library's.
            #[cfg_attr(not(test), unsafe(no_mangle))]
            pub unsafe extern "C" fn $name($($arg: $ty),*) -> c_int {
                type Function = unsafe extern "C" fn($($ty),*) -> c_int;
                let Some(real) = next(&$next, $text) else { return $absent };
                // SAFETY: the address is that of the function of this name, which has this type.
                let real = unsafe { transmute::<*const c_void, Function>(real) };
                // SAFETY: the parameters are those of our own caller.
                let exec = |$environment| unsafe { real($($arg),*) };
                // SAFETY: as above.
                unsafe { with_ours(ENTRIES.get(), $environment, exec) }
            }
        )*
    };
}

replaced! {
    /// See execve(2).
    EXECVE = c"execve", fn execve(path: *const c_char, argv: Strings, environment: Strings)
        with environment, or no_such_function();
    /// See exec(3).
    EXECVPE = c"execvpe", fn execvpe(file: *const c_char, argv: Strings, environment: Strings)
        with environment, or no_such_function();
    /// See fexecve(3).
    FEXECVE = c"fexecve", fn fexecve(descriptor: c_int, argv: Strings, environment: Strings)
        with environment, or no_such_function();
    /// See execveat(2).
    EXECVEAT = c"execveat", fn execveat(
        directory: c_int, path: *const c_char, argv: Strings, environment: Strings, flags: c_int
    ) with environment, or no_such_function();
    /// See posix_spawn(3).
    POSIX_SPAWN = c"posix_spawn", fn posix_spawn(
        pid: *mut libc::pid_t, path: *const c_char, actions: *const libc::posix_spawn_file_actions_t,
        attributes: *const libc::posix_spawnattr_t, argv: Strings, environment: Strings
    ) with environment, or libc::ENOSYS;
    /// See posix_spawn(3).
    POSIX_SPAWNP = c"posix_spawnp", fn posix_spawnp(
        pid: *mut libc::pid_t, file: *const c_char, actions: *const libc::posix_spawn_file_actions_t,
        attributes: *const libc::posix_spawnattr_t, argv: Strings, environment: Strings
    ) with environment, or libc::ENOSYS;
}

/// See exec(3).
///
/// # Safety
/// As for the C library's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn execv(path: *const c_char, argv: Strings) -> c_int {
    // SAFETY: the parameters are those of our own caller.
    unsafe { execve(path, argv, own_environment()) }
}

/// See exec(3).
///
/// # Safety
/// As for the C library's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn execvp(file: *const c_char, argv: Strings) -> c_int {
    // SAFETY: the parameters are those of our own caller.
    unsafe { execvpe(file, argv, own_environment()) }
}

/// `execle`'s environment follows the null pointer that ends its arguments.
///
/// # Safety
/// `arguments` are those of execle from the second one on.
unsafe extern "C" fn execle_with_list(path: *const c_char, arguments: Strings) -> c_int {
    let mut end = arguments;
    // SAFETY: the loop stops at the null pointer that ends the arguments.
    while !unsafe { *end }.is_null() {
        // SAFETY: one more follows.
        end = unsafe { end.add(1) };
    }
    // SAFETY: the environment is the next argument.
    let environment = unsafe { end.wrapping_add(1).read() }.cast();
    // SAFETY: the parameters are those of our own caller.
    unsafe { execve(path, arguments, environment) }
}

/// A function with a list of arguments of any length, which is made into an array: those that came in registers are
/// pushed in front of those on the stack, with the return address kept below them. Comes back if there was an error.
macro_rules! variadic {
    ($name:ident, $with_list:ident) => {
        /// See exec(3).
        ///
        /// # Safety
        /// As for the C library's.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name() {
            std::arch::naked_asm!(
                "pop rax",
                "push r9",
                "push r8",
                "push rcx",
                "push rdx",
                "push rsi",
                "mov rsi, rsp",
                // With it the stack is aligned again.
                "push rax",
                "call {with_list}",
                "pop rcx",
                "add rsp, 40",
                "push rcx",
                "ret",
                with_list = sym $with_list,
            )
        }
    };
}

variadic!(execl, execv);
variadic!(execlp, execvp);
variadic!(execle, execle_with_list);

#[cfg(test)]
mod tests {
    use super::*;

    fn entries() -> Entries {
        Entries {
            preload: c"LD_PRELOAD=/lib/ours.so".to_owned(),
            socket: c"CKPT_AGENT_SOCKET=/run/socket".to_owned(),
        }
    }

    /// What a program would see that was started with this environment.
    fn seen(environment: &[&str]) -> Vec<String> {
        let texts: Vec<CString> = environment.iter().map(|text| CString::new(*text).unwrap()).collect();
        let mut pointers: Vec<_> = texts.iter().map(|text| text.as_ptr()).collect();
        pointers.push(null());
        seen_at(pointers.as_ptr())
    }

    fn seen_at(environment: Strings) -> Vec<String> {
        let mut seen = Vec::new();
        let look = |environment: Strings| {
            for index in 0.. {
                // SAFETY: the loop stops at the null pointer that ends the array.
                let entry = unsafe { environment.wrapping_add(index).read() };
                if entry.is_null() {
                    break;
                }
                // SAFETY: entries are strings.
                seen.push(unsafe { CStr::from_ptr(entry) }.to_str().unwrap().to_owned());
            }
            7
        };
        // SAFETY: `environment` is one.
        assert_eq!(unsafe { with_ours(Some(&entries()), environment, look) }, 7);
        seen
    }

    #[test]
    fn what_is_missing_is_added() {
        let both = ["CKPT_AGENT_SOCKET=/run/socket", "LD_PRELOAD=/lib/ours.so"];
        assert_eq!(seen(&[]), both);
        assert_eq!(seen_at(null()), both);
        assert_eq!(seen(&["A=1"]), ["A=1", both[0], both[1]]);
        assert_eq!(seen(&[both[1], "A=1"]), [both[1], "A=1", both[0]]);
        assert_eq!(seen(&["CKPT_AGENT_SOCKETS=no"]), ["CKPT_AGENT_SOCKETS=no", both[0], both[1]]);
    }

    #[test]
    fn what_is_there_stays() {
        let whole = ["LD_PRELOAD=/lib/a.so:/lib/ours.so /lib/b.so", "B=", "CKPT_AGENT_SOCKET=/other"];
        assert_eq!(seen(&whole), whole);
    }

    #[test]
    fn other_libraries_come_after_ours() {
        let expected = ["LD_PRELOAD=/lib/ours.so:/lib/ours.so.2", "A=1", "CKPT_AGENT_SOCKET=/run/socket"];
        assert_eq!(seen(&["LD_PRELOAD=/lib/ours.so.2", "A=1"]), expected);
    }

    #[test]
    fn an_environment_of_any_size_is_kept() {
        for count in [STACK_WORDS - 4, STACK_WORDS - 3, STACK_WORDS - 2, STACK_WORDS * 40] {
            let texts: Vec<String> = (0..count).map(|index| format!("V{index}=x")).collect();
            let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
            let seen = seen(&texts);
            assert_eq!(seen[..count], texts);
            assert_eq!(seen[count..], ["CKPT_AGENT_SOCKET=/run/socket", "LD_PRELOAD=/lib/ours.so"]);
        }
        let long = format!("LD_PRELOAD=/{}", "x".repeat(100_000));
        assert_eq!(seen(&[&long])[0], long.replacen('=', "=/lib/ours.so:", 1));
    }
}
