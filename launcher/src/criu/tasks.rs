//! What CRIU's images say of each process: whether it has ended with a failure and its parent has not waited for it yet, and
//! its limits. Field numbers are those of CRIU's images/pstree.proto, core.proto and rlimit.proto.

use super::images::{COMMON_MAGIC, ImageError, entries};
use super::unix_queues::{PROCESSES_MAGIC, ProcessEntry, Read};
use crate::sys::exit_status::exit_code;
use ckpt_snapshot::FailedProcess;
use prost::Message;
use std::collections::HashMap;
use std::ops::Range;

const CORE_MAGIC: u32 = 0x5505_3847;
/// The state of a process that has ended.
const DEAD: u32 = 2;

#[derive(Message)]
struct CoreEntry {
    #[prost(message, optional, tag = "3")]
    task: Option<TaskEntry>,
}

#[derive(Message)]
struct ThreadsEntry {
    #[prost(int32, required, tag = "1")]
    pid: i32,
    #[prost(uint32, repeated, packed = "false", tag = "5")]
    threads: Vec<u32>,
}

#[derive(Message)]
struct ThreadCoreEntry {
    #[prost(message, optional, tag = "5")]
    thread: Option<ThreadEntry>,
}

#[derive(Message)]
struct ThreadEntry {
    #[prost(message, optional, tag = "15")]
    rseq: Option<RseqEntry>,
}

#[derive(Message)]
struct RseqEntry {
    #[prost(uint64, required, tag = "1")]
    address: u64,
    #[prost(uint32, required, tag = "2")]
    bytes: u32,
}

impl RseqEntry {
    /// `None` if the thread has none.
    fn range(&self) -> Option<Range<u64>> {
        let end = self.address.checked_add(u64::from(self.bytes))?;
        (self.address != 0 && end > self.address).then_some(self.address..end)
    }
}

#[derive(Message)]
struct TaskEntry {
    #[prost(uint32, required, tag = "1")]
    state: u32,
    /// As wait(2) has it.
    #[prost(uint32, required, tag = "2")]
    status: u32,
    /// The kernel cuts it after 15 bytes: it need not be UTF-8.
    #[prost(bytes = "vec", required, tag = "6")]
    name: Vec<u8>,
    #[prost(message, optional, tag = "8")]
    limits: Option<LimitsEntry>,
}

#[derive(Message)]
struct LimitsEntry {
    /// In the order of their numbers, see getrlimit(2).
    #[prost(message, repeated, tag = "1")]
    limits: Vec<LimitEntry>,
}

#[derive(Clone, Message)]
struct LimitEntry {
    #[prost(uint64, required, tag = "1")]
    soft: u64,
    #[prost(uint64, required, tag = "2")]
    hard: u64,
}

fn each_task(read: Read, mut visit: impl FnMut(u32, TaskEntry)) -> Result<(), ImageError> {
    let mut pids = Vec::new();
    entries(read, "pstree.img", COMMON_MAGIC, PROCESSES_MAGIC, |process: ProcessEntry| {
        pids.push(process.pid);
    })?;
    for pid in pids {
        entries(read, &format!("core-{pid}.img"), COMMON_MAGIC, CORE_MAGIC, |core: CoreEntry| {
            core.task.into_iter().for_each(|task| visit(pid, task));
        })?;
    }
    Ok(())
}

/// The highest soft and the highest hard limit of each kind that a process has, by its number (getrlimit(2)).
///
/// # Errors
/// When an image cannot be read.
pub fn limits(read: Read) -> Result<Vec<(u64, u64)>, ImageError> {
    let mut highest = Vec::new();
    each_task(read, |_, task| {
        for (number, limit) in task.limits.map(|limits| limits.limits).unwrap_or_default().iter().enumerate()
        {
            highest.resize(highest.len().max(number + 1), (0, 0));
            let (soft, hard) = highest[number];
            highest[number] = (limit.soft.max(soft), limit.hard.max(hard));
        }
    })?;
    Ok(highest)
}

/// Where the threads of each process have registered restartable sequences (rseq(2)), by PID. The kernel writes there.
///
/// # Errors
/// When an image cannot be read.
pub fn rseq_areas(read: Read) -> Result<HashMap<i32, Vec<Range<u64>>>, ImageError> {
    let mut threads = Vec::new();
    entries(read, "pstree.img", COMMON_MAGIC, PROCESSES_MAGIC, |process: ThreadsEntry| {
        threads.extend(process.threads.iter().map(|thread| (process.pid, *thread)));
    })?;
    let mut found: HashMap<i32, Vec<_>> = HashMap::new();
    for (pid, thread) in threads {
        entries(read, &format!("core-{thread}.img"), COMMON_MAGIC, CORE_MAGIC, |core: ThreadCoreEntry| {
            if let Some(area) = core.thread.and_then(|thread| thread.rseq).and_then(|area| area.range()) {
                found.entry(pid).or_default().push(area);
            }
        })?;
    }
    Ok(found)
}

/// The processes that have failed; `read` returns the content of an image, or `None` if CRIU did not write it.
///
/// # Errors
/// When an image cannot be read.
pub fn failed_processes(read: Read) -> Result<Vec<FailedProcess>, ImageError> {
    let mut found = Vec::new();
    each_task(read, |pid, task| {
        if task.state == DEAD && task.status != 0 {
            let name = String::from_utf8_lossy(&task.name).into_owned();
            found.push(FailedProcess { pid, code: exit_code(task.status), name });
        }
    })?;
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image<T: Message>(magic: u32, entry: &T) -> Vec<u8> {
        let mut bytes = [COMMON_MAGIC, magic].map(u32::to_le_bytes).concat();
        let entry = entry.encode_to_vec();
        bytes.extend((entry.len() as u32).to_le_bytes());
        bytes.extend(entry);
        bytes
    }

    #[test]
    fn areas_of_restartable_sequences_are_found() {
        let mut images = HashMap::new();
        let tree = ThreadsEntry { pid: 7, threads: vec![7, 8, 9] };
        images.insert("pstree.img".to_owned(), image(PROCESSES_MAGIC, &tree));
        for (thread, area) in
            [(7, Some((0x1000, 32))), (8, Some((0, 0))), (9, None), (10, Some((0x5000, 32)))]
        {
            let rseq = area.map(|(address, bytes)| RseqEntry { address, bytes });
            let core = ThreadCoreEntry { thread: Some(ThreadEntry { rseq }) };
            images.insert(format!("core-{thread}.img"), image(CORE_MAGIC, &core));
        }
        let found = rseq_areas(&|name| Ok(images.get(name).cloned())).unwrap();
        assert_eq!(found, HashMap::from([(7, vec![0x1000..0x1020])]));
    }

    #[test]
    fn failures_and_limits_of_processes_are_found() {
        let mut images = HashMap::new();
        let mut tree = [COMMON_MAGIC, PROCESSES_MAGIC].map(u32::to_le_bytes).concat();
        for (pid, state, status) in [(1, 1, 0), (2, DEAD, 9), (3, DEAD, 3 << 8), (4, DEAD, 0), (5, DEAD, 139)]
        {
            tree.extend(&image(PROCESSES_MAGIC, &ProcessEntry { pid })[8..]);
            let name = [format!("program {pid}").as_bytes(), b"\xc3"].concat();
            let limits_of_task =
                LimitsEntry { limits: vec![LimitEntry { soft: u64::from(status), hard: 500 }; 2] };
            let task = TaskEntry { state, status, name, limits: (pid != 4).then_some(limits_of_task) };
            images.insert(format!("core-{pid}.img"), image(CORE_MAGIC, &CoreEntry { task: Some(task) }));
        }
        images.insert("pstree.img".to_owned(), tree);
        assert_eq!(limits(&|name| Ok(images.get(name).cloned())).unwrap(), [(3 << 8, 500); 2]);
        let found = failed_processes(&|name| Ok(images.get(name).cloned())).unwrap();
        let found: Vec<_> = found.iter().map(|one| (one.pid, one.code, &one.name[..])).collect();
        assert_eq!(
            found,
            [(2, 137, "program 2\u{fffd}"), (3, 3, "program 3\u{fffd}"), (5, 139, "program 5\u{fffd}")]
        );
    }
}
