//! Messages in the queues of unix sockets: CRIU may lose them without an error, see [`crate::criu::UnixQueues`].

use crate::criu::{Holder, Queue, UnixQueues, put_senders_last};
use crate::files::staging::StagedDir;
use crate::namespace::Namespace;
use crate::restore::resume::Failure;
use anyhow::{Context, anyhow};

/// Prepares messages in the queues of unix sockets, see [`put_senders_last`]. Returns what has to be in the queues.
///
/// # Errors
/// [`Failure::Refused`] if messages would be lost: an older ckpt-run has taken the snapshot.
pub(super) fn prepare(images: &StagedDir) -> Result<Vec<Queue>, Failure> {
    let queues = UnixQueues::read(&|name| images.read(name)).map_err(anyhow::Error::from)?;
    if !queues.lost().is_empty() {
        return Err(Failure::Refused(anyhow!(
            "it has messages with descriptors (SCM_RIGHTS) between processes of the job, which CRIU would lose"
        )));
    }
    put_senders_last(images, &queues).context("cannot prepare the messages between the job's processes")?;
    Ok(queues.lengths())
}

/// Checks that CRIU has restored all messages in the queues of unix sockets. A socket that cannot be asked is left out.
pub(super) fn check(namespace: &Namespace, queues: &[Queue]) -> Result<(), String> {
    if queues.is_empty() {
        return Ok(());
    }
    let sockets = queues.iter().map(|queue| (queue.holder.pid, queue.holder.fd)).collect();
    compare(queues, &namespace.queued_bytes(sockets).map_err(|error| error.to_string())?)
}

fn compare(queues: &[Queue], restored: &[Option<u64>]) -> Result<(), String> {
    for (Queue { holder: Holder { pid, fd }, bytes }, restored) in queues.iter().zip(restored) {
        if let Some(restored) = restored.filter(|restored| restored != bytes) {
            return Err(format!(
                "CRIU has not restored all messages: {restored} of {bytes} bytes wait at descriptor {fd} of process {pid}"
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_that_is_shorter_than_it_was_ends_the_resume() {
        let queues = [(4, 20), (5, 8)].map(|(fd, bytes)| Queue { holder: Holder { pid: 12, fd }, bytes });
        assert_eq!(compare(&queues, &[Some(20), Some(8)]), Ok(()));
        assert_eq!(compare(&queues, &[Some(20), None]), Ok(()));
        let lost = compare(&queues, &[Some(20), Some(0)]).unwrap_err();
        assert!(lost.contains("0 of 8 bytes") && lost.contains("descriptor 5 of process 12"), "{lost}");
    }
}
