//! A library that is loaded into CRIU for a dump. It corrects two things.
//!
//! **System calls in which a dump interrupts the job's threads** (`registers.rs`). The kernel makes `poll`, `nanosleep`, `clock_nanosleep` and `futex` with a timeout again by itself when a task was
//! stopped in them. CRIU 4.2.1 has them return EINTR instead, in the job that goes on and after a resume (compel's
//! `compel_get_task_regs`). Programs never see that otherwise, and many do not expect it: PyTorch's TCPStore raises
//! "Interrupted system call". CRIU also makes calls such as `read` again for which a signal handler without SA_RESTART
//! has run. The library corrects both.
//!
//! **Pages that ckpt-run copies itself** (`pages.rs`). CRIU copies the processes' memory one after the other, on one core.
//! ckpt-run copies large parts of it on all cores, and has the library say that no page of them is there.
//!
//! Only x86-64: elsewhere, the library does nothing.

#[cfg(test)]
mod pages;
#[cfg(all(test, target_arch = "x86_64"))]
mod registers;

use crate::namespace::inside;
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::Path;

/// Made by `build.rs` from `entry.rs`.
const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libckpt_criu.so"));
const NAME: &str = "libckpt_criu.so";
/// The name that the library gives to the process.
const COMM: &str = "criu-with-pages";
/// The name that it gave before it knew of pages. A static CRIU may be older than this program.
const COMM_WITHOUT_PAGES: &str = "criu-with-calls";

/// The name of the list of pages; see `pages.rs`.
const LIST_NAME: &str = "ckpt-copied-pages";

/// What a CRIU has of the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Loaded {
    /// Nothing.
    Nothing,
    /// It corrects interrupted calls.
    Calls,
    /// It leaves out pages that are copied, too.
    Pages,
}

/// The library, as a file in memory.
///
/// # Errors
/// When there is not enough memory.
pub fn library() -> io::Result<OwnedFd> {
    let mut file = File::from(memfd_create(NAME, MemfdFlags::CLOEXEC)?);
    file.write_all(LIBRARY)?;
    Ok(file.into())
}

/// What this CRIU, which has begun to trace the job, has of the library. `root` is the root directory of its namespace.
#[must_use]
pub fn loaded(root: &Path, criu_pid: i32) -> Loaded {
    let comm = fs::read_to_string(inside(root, format!("/proc/{criu_pid}/comm"))).unwrap_or_default();
    match comm.trim_end() {
        COMM => Loaded::Pages,
        COMM_WITHOUT_PAGES => Loaded::Calls,
        _ => Loaded::Nothing,
    }
}

/// Pages of a process, by its PID in the job's namespace.
pub type CopiedPages = (i32, Range<u64>);

/// An empty list of the pages that CRIU leaves out.
///
/// # Errors
/// When there is not enough memory.
pub fn page_list() -> io::Result<File> {
    Ok(File::from(memfd_create(LIST_NAME, MemfdFlags::CLOEXEC)?))
}

/// Has CRIU leave these pages out, from now on.
///
/// # Errors
/// When there is not enough memory.
pub fn leave_out(list: &mut File, pages: &[CopiedPages]) -> io::Result<()> {
    let entry = |(pid, range): &CopiedPages| [u64::from(pid.cast_unsigned()), range.start, range.end];
    let numbers = pages.iter().flat_map(entry);
    list.write_all(&numbers.flat_map(u64::to_ne_bytes).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::pages::{self, Copied, ENTRY_BYTES, Region};
    use super::*;
    use std::io::{Read, Seek};

    fn copied(pages: &[CopiedPages]) -> Copied {
        let mut list = page_list().unwrap();
        leave_out(&mut list, pages).unwrap();
        let mut content = Vec::new();
        list.rewind().unwrap();
        list.read_to_end(&mut content).unwrap();
        assert_eq!(content.len(), pages.len() * ENTRY_BYTES);
        Copied::parse(&content).unwrap()
    }

    #[test]
    fn the_library_finds_the_list_by_its_name() {
        assert_eq!(LIST_NAME, pages::LIST_NAME);
        assert_eq!(Copied::parse(&[]), None);
    }

    #[test]
    fn copied_pages_are_taken_out_of_what_the_kernel_has_found() {
        let copied = copied(&[(7, 20..30), (7, 40..50), (7, 50..60), (8, 0..100)]);
        let region = |range: Range<u64>| Region { start: range.start, end: range.end, categories: 5 };
        for (found, left) in [
            (vec![0..10], vec![0..10]),
            (vec![20..30], vec![]),
            (vec![10..35], vec![10..20, 30..35]),
            (vec![22..24, 26..45, 55..70], vec![30..40, 60..70]),
            (vec![30..40, 60..61], vec![30..40, 60..61]),
        ] {
            let found: Vec<_> = found.into_iter().map(region).collect();
            let left: Vec<_> = left.into_iter().map(region).collect();
            assert_eq!(copied.take_out(7, &found, 9), (left, None));
            assert_eq!(copied.take_out(6, &found, 9), (found, None), "another process");
        }
        let guard = Region { categories: 1 << 8, ..region(22..24) };
        assert_eq!(copied.take_out(7, &[guard], 9), (vec![guard], None));
        let (left, cut_at) = copied.take_out(7, &[region(10..70)], 2);
        assert_eq!((left, cut_at), (vec![region(10..20), region(30..40)], Some(60)));
    }

    #[test]
    fn copied_pages_are_cleared_in_a_page_table() {
        let copied = copied(&[(7, 0x2000..0x4000), (7, 0x6000..0x7000)]);
        // Eight pages, from the second one on.
        for (entries, cleared) in [(7, vec![2, 3, 6]), (2, vec![2]), (1, vec![])] {
            let mut table = vec![1_u8; entries * 8];
            copied.clear(7, &mut table, 8);
            let found: Vec<_> =
                (0..entries).filter(|at| table[at * 8..][..8] == [0; 8]).map(|at| at + 1).collect();
            assert_eq!(found, cleared);
        }
    }
}
