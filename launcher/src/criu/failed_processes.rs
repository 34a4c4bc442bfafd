//! Processes in CRIU's images that have ended with a failure, and that their parent has not waited for yet. Field numbers
//! are those of CRIU's images/pstree.proto and core.proto.

use super::images::{COMMON_MAGIC, ImageError, entries};
use super::unix_queues::{PROCESSES_MAGIC, ProcessEntry, Read};
use crate::sys::exit_status::exit_code;
use ckpt_snapshot::FailedProcess;
use prost::Message;

const CORE_MAGIC: u32 = 0x5505_3847;
/// The state of a process that has ended.
const DEAD: u32 = 2;

#[derive(Message)]
struct CoreEntry {
    #[prost(message, optional, tag = "3")]
    task: Option<TaskEntry>,
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
}

/// The processes that have failed; `read` returns the content of an image, or `None` if CRIU did not write it.
///
/// # Errors
/// When an image cannot be read.
pub fn failed_processes(read: Read) -> Result<Vec<FailedProcess>, ImageError> {
    let mut pids = Vec::new();
    entries(read, "pstree.img", COMMON_MAGIC, PROCESSES_MAGIC, |process: ProcessEntry| {
        pids.push(process.pid);
    })?;
    let mut found = Vec::new();
    for pid in pids {
        entries(read, &format!("core-{pid}.img"), COMMON_MAGIC, CORE_MAGIC, |core: CoreEntry| {
            let ended = core.task.filter(|task| task.state == DEAD && task.status != 0);
            found.extend(ended.map(|task| FailedProcess {
                pid,
                code: exit_code(task.status),
                name: String::from_utf8_lossy(&task.name).into_owned(),
            }));
        })?;
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn image<T: Message>(magic: u32, entry: &T) -> Vec<u8> {
        let mut bytes = [COMMON_MAGIC, magic].map(u32::to_le_bytes).concat();
        let entry = entry.encode_to_vec();
        bytes.extend((entry.len() as u32).to_le_bytes());
        bytes.extend(entry);
        bytes
    }

    #[test]
    fn processes_that_ended_with_a_failure_are_found() {
        let mut images = HashMap::new();
        let mut tree = [COMMON_MAGIC, PROCESSES_MAGIC].map(u32::to_le_bytes).concat();
        for (pid, state, status) in [(1, 1, 0), (2, DEAD, 9), (3, DEAD, 3 << 8), (4, DEAD, 0), (5, DEAD, 139)]
        {
            tree.extend(&image(PROCESSES_MAGIC, &ProcessEntry { pid })[8..]);
            let task =
                TaskEntry { state, status, name: [format!("program {pid}").as_bytes(), b"\xc3"].concat() };
            images.insert(format!("core-{pid}.img"), image(CORE_MAGIC, &CoreEntry { task: Some(task) }));
        }
        images.insert("pstree.img".to_owned(), tree);
        let found = failed_processes(&|name| Ok(images.get(name).cloned())).unwrap();
        let found: Vec<_> = found.iter().map(|one| (one.pid, one.code, &one.name[..])).collect();
        assert_eq!(
            found,
            [(2, 137, "program 2\u{fffd}"), (3, 3, "program 3\u{fffd}"), (5, 139, "program 5\u{fffd}")]
        );
    }
}
