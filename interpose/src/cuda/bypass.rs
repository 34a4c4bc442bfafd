//! Detects drivers that are in use without passing this library.
//!
//! A library that was opened with `RTLD_DEEPBIND` finds the driver's symbols before ours, and one in a namespace of
//! its own (`dlmopen`) does not see ours at all. The calls of such a library neither pass the gate nor are recorded,
//! so the process cannot be saved. A driver that is loaded but was never initialised holds no state and is ignored.

use std::ffi::{c_int, c_void};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::ops::Range;

use cuda_abi::types::CUresult;
use thiserror::Error;

use super::elf;
use crate::cuda::activation::{is_started, may_have_files};
use crate::cuda::result::SUCCESS;
use crate::fork;

type DeviceGetCount = unsafe extern "C" fn(*mut c_int) -> CUresult;

/// A driver was initialised without this library in front of it.
#[derive(Debug, Error)]
#[error(
    "the CUDA driver {driver} was initialised past the interposer, by a library that was opened with \
     RTLD_DEEPBIND or dlmopen(3): open it without"
)]
pub struct BypassedDriver {
    driver: String,
}

/// Checks that no driver was initialised past this library.
///
/// # Errors
/// One was, so that the process cannot be saved.
pub(super) fn check() -> Result<(), BypassedDriver> {
    // Who goes through the loaded libraries holds a lock of the dynamic linker. A child that is forked then could load no
    // library.
    fork::while_none(find).map_or(Ok(()), Err)
}

fn find() -> Option<BypassedDriver> {
    // Not dlopen: a library's constructor that takes its time holds the lock that it needs.
    if !is_started() {
        let count = elf::function(&["libcuda.so"], c"cuDeviceGetCount");
        // The program may have initialised it through the interposer meanwhile.
        if is_initialised(count, &elf::relocated_part(count)) && !may_have_files() {
            return Some(BypassedDriver { driver: "libcuda.so.1".to_owned() });
        }
    }
    let lines = maps()?;
    for Mapped { start, path } in libraries(lines) {
        if elf::is_in_our_namespace(start as *const c_void) {
            continue;
        }
        // SAFETY: a file with code behind its beginning was put there by a dynamic loader, if it has an ELF header;
        // drivers stay loaded, and another library the program would have to close at this very moment.
        let count = unsafe { elf::function_at(start, c"cuDeviceGetCount") };
        // SAFETY: as above.
        let relocated_part = unsafe { elf::relocated_part_at(start) };
        if is_initialised(count, &relocated_part) {
            return Some(BypassedDriver { driver: path });
        }
    }
    None
}

/// The lines of `/proc/self/maps`.
fn maps() -> Option<impl Iterator<Item = Vec<u8>>> {
    let maps = File::open("/proc/self/maps").ok()?;
    Some(BufReader::new(maps).split(b'\n').map_while(Result::ok))
}

/// A file whose beginning is mapped, followed by code.
#[derive(Debug, PartialEq, Eq)]
struct Mapped {
    start: usize,
    path: String,
}

/// The libraries that the lines of `/proc/PID/maps` tell of. A file that is mapped as data does not count: it does not
/// lie in memory as its headers say.
fn libraries(lines: impl Iterator<Item = Vec<u8>>) -> Vec<Mapped> {
    let mut libraries = Vec::new();
    let mut begun = None;
    for line in lines {
        let Some(Line { start, permissions, is_beginning, path }) = parse(&line) else {
            begun = None;
            continue;
        };
        if is_beginning && permissions.starts_with('r') {
            begun = Some(Mapped { start, path: path.to_owned() });
        }
        begun = begun.take_if(|mapped| mapped.path == path);
        if permissions.contains('x')
            && let Some(library) = begun.take()
        {
            libraries.push(library);
        }
    }
    libraries
}

struct Line<'a> {
    start: usize,
    permissions: &'a str,
    /// The file's first byte is mapped there.
    is_beginning: bool,
    path: &'a str,
}

/// A line of `/proc/PID/maps`, if it is that of a file (proc(5): addresses, permissions, offset, device, inode, path).
fn parse(line: &[u8]) -> Option<Line<'_>> {
    let line = str::from_utf8(line).ok()?;
    let mut fields = line.splitn(6, ' ');
    let (range, permissions, offset) = (fields.next()?, fields.next()?, fields.next()?);
    let path = fields.nth(2)?.trim_start();
    let start = usize::from_str_radix(range.split('-').next()?, 16).ok()?;
    let is_beginning = offset.bytes().all(|digit| digit == b'0');
    path.starts_with('/').then_some(Line { start, permissions, is_beginning, path })
}

/// Whether a driver answers, which it does only once it is initialised (CUDA driver API reference: every call but
/// cuInit, cuDriverGetVersion and a few like it returns `CUDA_ERROR_NOT_INITIALIZED` before). One that is being loaded is
/// not, and cannot be called before it is relocated.
fn is_initialised(device_get_count: *const c_void, relocated_part: &Range<usize>) -> bool {
    if device_get_count.is_null() || !maps().is_some_and(|lines| is_relocated(lines, relocated_part)) {
        return false;
    }
    // SAFETY: the address is that of a driver's symbol of this type.
    let device_get_count: DeviceGetCount = unsafe { std::mem::transmute(device_get_count) };
    let mut count = 0;
    // SAFETY: `count` is a local variable.
    unsafe { device_get_count(&raw mut count) == SUCCESS }
}

/// Whether the loader has made this part of a library read-only.
fn is_relocated(maps: impl Iterator<Item = Vec<u8>>, relocated_part: &Range<usize>) -> bool {
    let mut is_writable = false;
    for line in maps {
        let Some(line) = parse(&line) else { continue };
        if line.start > relocated_part.start {
            break;
        }
        is_writable = line.permissions.contains('w');
    }
    relocated_part.is_empty() || !is_writable
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_is_relocated_once_its_tables_are_read_only() {
        let maps = |permissions: &str| {
            let text = format!(
                "\
7f00a000-7f00b000 r-xp 00000000 08:01 77                     /usr/lib/libcuda.so.550.54
7f00b000-7f00e000 {permissions} 00001000 08:01 77                     /usr/lib/libcuda.so.550.54
7f00e000-7f00f000 rw-p 00002000 08:01 77                     /usr/lib/libcuda.so.550.54"
            );
            text.lines().map(|line| line.as_bytes().to_vec()).collect::<Vec<_>>().into_iter()
        };
        assert!(is_relocated(maps("r--p"), &(0x7f00_b000..0x7f00_d000)));
        assert!(!is_relocated(maps("rw-p"), &(0x7f00_b000..0x7f00_d000)));
        assert!(is_relocated(maps("rw-p"), &(0x7f00_b000..0x7f00_b000)), "it has none");
    }

    /// Those that are loaded are relocated, the C library and this program too.
    #[test]
    fn what_is_loaded_is_relocated() {
        let in_libc = elf::function(&["libc.so"], c"malloc");
        let ourselves = is_initialised as *const c_void;
        for address in [in_libc, ourselves] {
            let part = elf::relocated_part(address);
            assert!(!part.is_empty() && is_relocated(maps().unwrap(), &part), "{part:x?}");
        }
    }

    #[test]
    fn libraries_are_told_from_other_mappings() {
        let maps = "\
400000-401000 r-xp 00000000 08:01 1                          /usr/bin/old style
7f00a000-7f00b000 r--p 00000000 08:01 77                     /usr/lib/libcuda.so.550.54
7f00b000-7f00c000 r-xp 00001000 08:01 77                     /usr/lib/libcuda.so.550.54
7f00c000-7f00d000 r--p 00002000 08:01 77                     /usr/lib/libcuda.so.550.54
7f01a000-7f01b000 r--p 00000000 08:01 77                     /usr/lib/libcuda.so.550.54
7f01b000-7f01c000 r-xp 00000000 00:00 0
7f01c000-7f01d000 r--p 00000000 08:01 78                     /usr/share/data
7f01d000-7f01e000 r-xp 00001000 08:01 79                     /usr/lib/no-beginning.so
x-y r-xp 00000000 08:01 77                                   /usr/lib/no-address.so
7ffe2000-7ffe4000 r-xp 00000000 00:00 0                      [vdso]";
        let lines = maps.lines().map(|line| line.as_bytes().to_vec());
        let library = |start, path: &str| Mapped { start, path: path.to_owned() };
        let expected =
            [library(0x40_0000, "/usr/bin/old style"), library(0x7f00_a000, "/usr/lib/libcuda.so.550.54")];
        assert_eq!(libraries(lines), expected);
    }
}
