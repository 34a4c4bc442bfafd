//! Counts of eventfds that do not fit into 32 bits. CRIU 4.2.1 creates an eventfd with its count as the initial value
//! (`eventfd_open` in its eventfd.c), of which the system call takes 32 bits. The rest is added by a write.

use super::descriptors;
use ckpt_snapshot::EventCounter;
use std::io;

/// The counters of which CRIU would lose a part. The job must be frozen.
pub(super) fn read(eventfds: &[(i32, i32)]) -> Vec<EventCounter> {
    let counter = |&(pid, fd): &(i32, i32)| {
        let high = u32::try_from(count(pid, fd)? >> u32::BITS).ok()?;
        (high > 0).then_some(EventCounter { pid, fd, high })
    };
    eventfds.iter().filter_map(counter).collect()
}

/// The count of an eventfd, see proc_pid_fdinfo(5).
fn count(pid: i32, fd: i32) -> Option<u64> {
    let info = std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{fd}")).ok()?;
    let count = info.lines().find_map(|line| line.strip_prefix("eventfd-count:"))?;
    u64::from_str_radix(count.trim(), 16).ok()
}

/// Adds what CRIU has lost. Returns warnings for counters that could not be restored.
pub(super) fn restore(counters: &[EventCounter]) -> Vec<String> {
    let failed = |counter: &EventCounter| {
        let error = add(counter).err()?;
        let EventCounter { pid, fd, .. } = counter;
        Some(format!("cannot restore the count of the eventfd {fd} of process {pid}: {error}"))
    };
    counters.iter().filter_map(failed).collect()
}

fn add(&EventCounter { pid, fd, high }: &EventCounter) -> io::Result<()> {
    let present = count(pid, fd).ok_or(io::ErrorKind::NotFound)?;
    // Another process's descriptor of the same eventfd may have been written to.
    let missing = (u64::from(high) << u32::BITS).saturating_sub(present >> u32::BITS << u32::BITS);
    // More than the largest count would block the write.
    if present.checked_add(missing).is_none_or(|sum| sum == u64::MAX) {
        return Err(io::Error::other("it would be too large"));
    }
    if missing == 0 {
        return Ok(());
    }
    let eventfd = descriptors::open(pid, fd)?.ok_or(io::ErrorKind::NotFound)?;
    rustix::io::write(&eventfd, &missing.to_ne_bytes())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use std::os::fd::AsRawFd;

    #[test]
    fn what_does_not_fit_into_32_bits_is_added_once() {
        let pid = std::process::id().cast_signed();
        let full = u64::MAX - 1;
        for (wanted, high) in [((7 << 32) + 5, 7), (full, u32::MAX)] {
            let old = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
            rustix::io::write(&old, &u64::to_ne_bytes(wanted)).unwrap();
            let read = read(&[(pid, old.as_raw_fd())]);
            assert_eq!(read, [EventCounter { pid, fd: old.as_raw_fd(), high }]);
            // As CRIU restores it.
            let low = u32::try_from(wanted & u64::from(u32::MAX)).unwrap();
            let new = eventfd(low, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
            let counter = EventCounter { pid, fd: new.as_raw_fd(), high };
            assert_eq!(restore(&[counter.clone(), counter]), Vec::<String>::new());
            let mut value = [0; 8];
            rustix::io::read(&new, &mut value).unwrap();
            assert_eq!(u64::from_ne_bytes(value), wanted);
        }
        let small = eventfd(u32::MAX, EventfdFlags::CLOEXEC).unwrap();
        assert_eq!(read(&[(pid, small.as_raw_fd()), (pid, -1)]), []);
    }

    #[test]
    fn a_missing_eventfd_and_one_that_would_overflow_are_named() {
        let pid = std::process::id().cast_signed();
        let most = eventfd(u32::MAX, EventfdFlags::CLOEXEC).unwrap();
        for (fd, high) in [(1_000_000, 1), (most.as_raw_fd(), u32::MAX)] {
            let warnings = restore(&[EventCounter { pid, fd, high }]);
            let is_named = warnings.len() == 1 && warnings[0].contains(&format!("eventfd {fd} of process"));
            assert!(is_named, "{warnings:?}");
        }
        assert_eq!(count(pid, most.as_raw_fd()), Some(u32::MAX.into()));
    }
}
