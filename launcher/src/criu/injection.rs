//! Whether CRIU may be killed at this moment. It dumps a process by changing its registers and its code for a while. Killed
//! meanwhile, it leaves both changed, and the process ends by SIGTRAP (compel/src/lib/infect.c of CRIU 4.2.1).
//!
//! Most of the time a process waits in CRIU's parasite code instead, which notices the end of CRIU, puts everything back
//! and lets the process run on.

use procfs_core::FromRead;
use procfs_core::process::{MMPermissions, MMapPath, Stat};
use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::namespace::numbers_in;
use crate::sys::path_text::read_maps;

/// What CRIU writes where a process has its first code, to have it execute one system call: `syscall` and breakpoints.
#[cfg(target_arch = "x86_64")]
const CALL: [u8; 8] = [0x0f, 0x05, 0xcc, 0xcc, 0xcc, 0xcc, 0xcc, 0xcc];
/// The same for arm64: `svc #0`, `brk #0`.
#[cfg(target_arch = "aarch64")]
const CALL: [u8; 8] = [0x01, 0x00, 0x00, 0xd4, 0x00, 0x00, 0x20, 0xd4];
/// What it writes behind that: the name of the memory for its parasite code.
const NAME: &[u8] = b"CRIUMFD";
/// How the file of that memory begins, in the list of mappings.
const PARASITE: &[u8] = b"/memfd:CRIUMFD";

/// Whether all processes would run on without a CRIU that is stopped. `proc` is the `/proc` of their PID namespace. What
/// cannot be looked at counts as harmless.
pub fn is_harmless_to_kill(proc: &Path, criu_pid: i32) -> bool {
    let pids = numbers_in(proc).unwrap_or_default().into_iter();
    // A child of CRIU maps the parasite code, and does not execute it.
    let is_of_criu = |pid: i32| {
        let stat = Stat::from_file(proc.join(pid.to_string()).join("stat"));
        pid == criu_pid || stat.is_ok_and(|stat| stat.ppid == criu_pid)
    };
    pids.filter(|&pid| !is_of_criu(pid))
        .all(|pid| is_left_alone(&proc.join(pid.to_string()), pid).unwrap_or(true))
}

fn is_left_alone(process: &Path, pid: i32) -> Option<bool> {
    let maps = read_maps(process.join("maps")).ok()?;
    let code = maps.iter().find(|map| map.perms.contains(MMPermissions::EXECUTE))?;
    let mut bytes = [0; CALL.len() + NAME.len()];
    File::open(process.join("mem")).ok()?.read_exact_at(&mut bytes, code.address.0).ok()?;
    if bytes.starts_with(&CALL) || bytes.ends_with(NAME) {
        return Some(false);
    }
    let Some(parasite) = maps.iter().find(|map| is_parasite(&map.pathname)) else { return Some(true) };
    let parasite = parasite.address.0..parasite.address.1;
    let threads = numbers_in(process.join("task")).unwrap_or_default();
    Some(threads.into_iter().all(|thread| {
        let directory = process.join("task").join(thread.to_string());
        may_run_on(&directory, &parasite, thread == pid).unwrap_or(true)
    }))
}

/// Whether this is memory for CRIU's parasite code. Its name is followed by " (deleted)", as that of all memfds.
fn is_parasite(path: &MMapPath) -> bool {
    matches!(path, MMapPath::Path(path) if path.as_os_str().as_bytes().starts_with(PARASITE))
}

/// The first thread may wait in the parasite code. Stopped there, or running, it may be on its way out, to a breakpoint.
/// Others enter it for one command, which ends with a breakpoint.
fn may_run_on(thread: &Path, parasite: &Range<u64>, is_first: bool) -> Option<bool> {
    let Some(at) = instruction_pointer(thread) else { return Some(false) };
    if !parasite.contains(&at) {
        return Some(true);
    }
    Some(is_first && matches!(state_of(thread)?, 'S' | 'D'))
}

/// `None` for a thread that runs.
fn instruction_pointer(thread: &Path) -> Option<u64> {
    let text = fs::read_to_string(thread.join("syscall")).ok()?;
    u64::from_str_radix(text.split_whitespace().last()?.strip_prefix("0x")?, 16).ok()
}

/// Whether a process has stopped, or ended.
pub fn has_stopped(process: &Path) -> bool {
    state_of(process).is_none_or(|state| matches!(state, 'T' | 't' | 'Z' | 'X'))
}

/// The state of a process or thread, as /proc has it; `None` for one that is gone.
fn state_of(directory: &Path) -> Option<char> {
    Some(Stat::from_file(directory.join("stat")).ok()?.state)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::OpenOptions;
    use std::process::Command;

    #[test]
    fn memory_for_parasite_code_is_found() {
        let found = || {
            let maps = read_maps("/proc/self/maps").unwrap();
            maps.iter().any(|map| is_parasite(&map.pathname))
        };
        assert!(!found());
        let file = File::from(rustix::fs::memfd_create("CRIUMFD", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        file.set_len(4096).unwrap();
        let map = memmap2::MmapOptions::new().map_raw(&file).unwrap();
        assert!(found());
        drop(map);
    }

    #[test]
    fn a_call_that_criu_has_a_process_make_is_seen() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id().cast_signed();
        let process = Path::new("/proc").join(pid.to_string());
        // The shared libraries are there once it sleeps; before that, it is in other calls.
        let call = format!("{} ", libc::SYS_clock_nanosleep);
        let sleeps = || fs::read_to_string(process.join("syscall")).is_ok_and(|text| text.starts_with(&call));
        while !sleeps() {
            std::thread::yield_now();
        }
        let is_harmless = || is_left_alone(&process, pid);
        assert_eq!(is_harmless(), Some(true));
        let maps = read_maps(process.join("maps")).unwrap();
        let code = maps.iter().find(|map| map.perms.contains(MMPermissions::EXECUTE)).unwrap().address.0;
        let memory = OpenOptions::new().read(true).write(true).open(process.join("mem")).unwrap();
        let mut before = [0; 16];
        memory.read_exact_at(&mut before, code).unwrap();
        for (bytes, offset) in [(&CALL[..], 0), (NAME, 8)] {
            memory.write_all_at(bytes, code + offset).unwrap();
            assert_eq!(is_harmless(), Some(false));
            memory.write_all_at(&before, code).unwrap();
            assert_eq!(is_harmless(), Some(true));
        }
        assert!(!has_stopped(&process));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(has_stopped(&process) && is_harmless().is_none());
    }
}
