//! The library that is loaded into CRIU for a dump. `build.rs` compiles it, and ckpt-run contains it. The static CRIU of
//! the package `ckpt-run-criu` is linked with it.
//!
//! It stands in front of `ptrace(2)`, when CRIU reads the registers of a thread and when CRIU lets it go on; and in front of
//! `ioctl(2)` and `pread(2)`, when CRIU reads which pages a process has. It uses nothing but the standard library, since
//! `rustc` alone compiles it.
//!
//! SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
#![cfg(target_arch = "x86_64")]

mod pages;
mod registers;

use pages::{Copied, LIST_NAME, Region};
use registers::{CODE_BYTES, IP, Interrupted, Registers};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{c_int, c_long, c_uint, c_ulong};
use std::fs;
use std::mem::size_of;
use std::path::PathBuf;
use std::ptr::from_mut;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

const SYS_IOCTL: c_long = 16;
const SYS_PREAD64: c_long = 17;
const SYS_PTRACE: c_long = 101;
const PEEKTEXT: c_uint = 1;
const PEEKUSER: c_uint = 3;
const DETACH: c_uint = 17;
const GETREGSET: c_uint = 0x4204;
const SETREGSET: c_uint = 0x4205;
const SEIZE: c_uint = 0x4206;
/// The general registers.
const NT_PRSTATUS: usize = 1;

/// linux/fs.h.
const PAGEMAP_SCAN: c_ulong = 0xc060_6610;

/// `struct pm_scan_arg` of linux/fs.h.
#[repr(C)]
struct ScanArguments {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    regions: *mut Region,
    most_regions: u64,
    most_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct iovec`.
#[repr(C)]
struct Place {
    start: *mut Registers,
    bytes: usize,
}

unsafe extern "C" {
    fn syscall(number: c_long, ...) -> c_long;
    fn __errno_location() -> *mut c_int;
}

/// By the name of its process, ckpt-run knows a CRIU with this library. At most 15 characters.
const COMM: &std::ffi::CStr = c"criu-with-pages";
const SYS_PRCTL: c_long = 157;
const PR_SET_NAME: c_long = 15;

/// The threads whose registers CRIU has read, with the system call that they are in.
static READ: Mutex<Option<HashMap<c_int, Option<Interrupted>>>> = Mutex::new(None);

/// glibc's function with its arguments, which are passed alike if a function is declared with `...`.
///
/// # Safety
/// As `ptrace(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ptrace(request: c_uint, thread: c_int, address: usize, data: usize) -> c_long {
    match request {
        SEIZE => {
            IS_DUMPING.store(true, Ordering::Relaxed);
            // SAFETY: the name is a string.
            _ = unsafe { syscall(SYS_PRCTL, PR_SET_NAME, COMM.as_ptr()) };
        }
        DETACH => give_back(thread),
        _ => {}
    }
    // SAFETY: as the caller.
    let result = unsafe { plain_ptrace(request, thread, address, data) };
    if request == GETREGSET && address == NT_PRSTATUS && result == 0 {
        // SAFETY: the kernel has filled this place.
        let place = unsafe { &*(data as *const Place) };
        if place.bytes == size_of::<Registers>() {
            // SAFETY: as above.
            found(thread, unsafe { &mut *place.start });
        }
    }
    result
}

/// What glibc does.
unsafe fn plain_ptrace(request: c_uint, thread: c_int, address: usize, data: usize) -> c_long {
    if !(PEEKTEXT..=PEEKUSER).contains(&request) {
        // SAFETY: as the caller.
        return unsafe { syscall(SYS_PTRACE, c_long::from(request), c_long::from(thread), address, data) };
    }
    let mut word: c_long = 0;
    // SAFETY: the kernel writes one word.
    let result =
        unsafe { syscall(SYS_PTRACE, c_long::from(request), c_long::from(thread), address, from_mut(&mut word)) };
    if result < 0 {
        return result;
    }
    // SAFETY: it always points to this thread's errno.
    unsafe { *__errno_location() = 0 };
    word
}

/// CRIU has read the registers of a thread.
fn found(thread: c_int, registers: &mut Registers) {
    let Ok(mut read) = READ.lock() else { return };
    // CRIU reads them again after it has run code in the thread.
    let Entry::Vacant(vacant) = read.get_or_insert_default().entry(thread) else { return };
    if let Some(found) = vacant.insert(interrupted(thread, registers)) {
        *registers = *found.for_criu();
    }
}

/// CRIU is about to let a thread go on.
fn give_back(thread: c_int) {
    let Ok(mut read) = READ.lock() else { return };
    let before = read.as_mut().and_then(|read| read.remove(&thread));
    let mut now: Registers = [0; 27];
    if matches!(before, Some(None)) || !transfer(GETREGSET, thread, &mut now) {
        return;
    }
    let found = match before.flatten() {
        Some(found) => Some(found).filter(|found| found.was_restored(&now)),
        // CRIU has stopped it only: for a pre-dump, or an attempt that has failed.
        None => interrupted(thread, &now).filter(Interrupted::has_ended),
    };
    let Some(found) = found else { return };
    // CRIU's code in a process ends with rt_sigreturn, and runs in its first thread.
    transfer(SETREGSET, thread, &mut found.left(|| leader(thread).is_none()).clone());
}

fn interrupted(thread: c_int, registers: &Registers) -> Option<Interrupted> {
    Interrupted::find(registers, || code(thread, registers[IP]), || a_handler_waits(thread))
}

/// Reads or sets the registers of a thread. Returns whether that was possible.
fn transfer(request: c_uint, thread: c_int, registers: &mut Registers) -> bool {
    let mut place = Place { start: registers, bytes: size_of::<Registers>() };
    // SAFETY: the place is valid.
    let result = unsafe { plain_ptrace(request, thread, NT_PRSTATUS, from_mut(&mut place) as usize) };
    result == 0 && place.bytes == size_of::<Registers>()
}

/// What is before the thread's next instruction.
fn code(thread: c_int, next: u64) -> Option<[u8; CODE_BYTES]> {
    let start = next.checked_sub(CODE_BYTES as u64)? as usize;
    // SAFETY: reads a word of the thread's memory, or fails.
    let (word, error) = unsafe { (plain_ptrace(PEEKTEXT, thread, start, 0), *__errno_location()) };
    (word != -1 || error == 0).then(|| std::array::from_fn(|at| word.to_le_bytes()[at]))
}

/// Whether a signal waits for the thread for which there is a handler. The kernel gives the signals of a process to its
/// first thread, unless that blocks them.
fn a_handler_waits(thread: c_int) -> bool {
    let Some(status) = status(thread) else { return true };
    let mask = |name| number(&status, name, 16);
    let shared = mask("ShdPnd:") & leader(thread).map_or(u64::MAX, |status| number(&status, "SigBlk:", 16));
    (mask("SigPnd:") | shared) & mask("SigCgt:") & !mask("SigBlk:") != 0
}

/// The status of the first thread of the process; `None` if this is the first one.
fn leader(thread: c_int) -> Option<String> {
    let leader = number(&status(thread)?, "Tgid:", 10);
    let leader = c_int::try_from(leader).ok().filter(|&leader| leader != thread)?;
    status(leader)
}

fn status(thread: c_int) -> Option<String> {
    // The name of a thread is the program's: it need not be UTF-8.
    let status = fs::read(format!("/proc/{thread}/status")).ok()?;
    Some(String::from_utf8_lossy(&status).into_owned())
}

fn number(status: &str, name: &str, radix: u32) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|line| u64::from_str_radix(line.trim(), radix).ok()).unwrap_or(0)
}

/// Whether CRIU has stopped a thread of the job. A restore stops some at its end only.
static IS_DUMPING: AtomicBool = AtomicBool::new(false);

/// Which pages ckpt-run copies itself. It lists them when CRIU has stopped the job.
static COPIED: Mutex<Option<Copied>> = Mutex::new(None);

/// glibc's function with its arguments, as above.
///
/// # Safety
/// As `ioctl(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(file: c_int, request: c_ulong, argument: usize) -> c_int {
    // SAFETY: as the caller.
    let result = unsafe { syscall(SYS_IOCTL, c_long::from(file), request, argument) } as c_int;
    if request != PAGEMAP_SCAN || result <= 0 || !IS_DUMPING.load(Ordering::Relaxed) {
        return result;
    }
    // SAFETY: the kernel has accepted the arguments, and written so many regions.
    let (arguments, found) = unsafe {
        let arguments = &mut *(argument as *mut ScanArguments);
        let found = std::slice::from_raw_parts_mut(arguments.regions, result as usize);
        (arguments, found)
    };
    let Some((left, cut_at)) =
        with_copied(file, |copied, pid| copied.take_out(pid, found, arguments.most_regions as usize))
    else {
        return result;
    };
    if let Some(cut_at) = cut_at {
        arguments.walk_end = cut_at;
    }
    // SAFETY: the caller has room for `most_regions`.
    let place = unsafe { std::slice::from_raw_parts_mut(arguments.regions, left.len()) };
    place.copy_from_slice(&left);
    left.len() as c_int
}

/// glibc's function: CRIU reads the pages of a process with it where the kernel has no PAGEMAP_SCAN.
///
/// # Safety
/// As `pread(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pread64(file: c_int, into: *mut u8, count: usize, offset: i64) -> isize {
    // SAFETY: as the caller.
    let read = unsafe { syscall(SYS_PREAD64, c_long::from(file), into, count, offset) } as isize;
    if let (true, Ok(length), Ok(offset)) =
        (IS_DUMPING.load(Ordering::Relaxed), usize::try_from(read), u64::try_from(offset))
    {
        with_copied(file, |copied, pid| {
            // SAFETY: the kernel has written so many bytes.
            copied.clear(pid, unsafe { std::slice::from_raw_parts_mut(into, length) }, offset);
        });
    }
    read
}

/// Calls `act` with what ckpt-run copies itself and a process, if it copies anything, and `file` is the pagemap of the process.
fn with_copied<T>(file: c_int, act: impl FnOnce(&Copied, u64) -> T) -> Option<T> {
    let path = fs::read_link(format!("/proc/self/fd/{file}")).ok()?;
    let pid = path.parent().filter(|_| path.ends_with("pagemap"))?.file_name()?.to_str()?.parse().ok()?;
    let mut copied = COPIED.lock().ok()?;
    if copied.is_none() {
        *copied = read_list();
    }
    copied.as_ref().map(|copied| act(copied, pid))
}

/// The list; `None` as long as it is empty.
fn read_list() -> Option<Copied> {
    static LIST: Mutex<Option<PathBuf>> = Mutex::new(None);
    let mut list = LIST.lock().ok()?;
    if list.is_none() {
        let is_it = |path: &PathBuf| {
            fs::read_link(path).is_ok_and(|to| to.to_string_lossy().starts_with(&format!("/memfd:{LIST_NAME}")))
        };
        let mut files = fs::read_dir("/proc/self/fd").ok()?.flatten().map(|entry| entry.path());
        *list = files.find(is_it);
    }
    Copied::parse(&fs::read(list.as_ref()?).ok()?)
}
