//! TCP connections inside the job of which one end is restored before the other. A packet that it sends meanwhile finds no
//! socket and is answered with a reset, which breaks the connection. So resets are dropped until all ends are there. Such
//! packets are sent in two cases:
//!
//! - An end that was closed for sending: CRIU restores it by sending it the end of the data (`libsoccr`, a raw packet), and
//!   the kernel answers.
//! - Data that the other end has not acknowledged: the kernel sends it again one second after CRIU has put it into the
//!   queue.

use crate::cluster::PacketRule;
use crate::criu::Descriptors;
use crate::files::staging::StagedDir;
use crate::namespace::Namespace;
use anyhow::Result;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;

/// The rule that drops resets, if the images have such connections. It has to be removed before the job runs.
/// `are_acknowledged`: no connection has data that the other end has not acknowledged.
///
/// # Errors
/// When the images cannot be read. Without the rights for the rule there is none.
pub(super) fn rule(
    images: &StagedDir,
    namespace: &Namespace,
    are_acknowledged: bool,
) -> Result<Option<PacketRule>> {
    let found = Descriptors::read(&|name| images.read(name))?;
    let ports = if are_acknowledged { found.half_closed_ports } else { found.connected_ports };
    if ports.is_empty() {
        return Ok(None);
    }
    let rule = put(&ports, namespace.init_pid());
    Ok(rule
        .inspect_err(|error| {
            tracing::warn!(
                "the job's TCP connections that are half-closed, or have data under way, may be reset by the resume: packets cannot be dropped ({error})"
            );
        })
        .ok())
}

/// Puts the rule into the network namespace of the job.
fn put(ports: &BTreeSet<u16>, init_pid: i32) -> io::Result<PacketRule> {
    let of_job = format!("/proc/{init_pid}/ns/net");
    if fs::read_link(&of_job)? == fs::read_link("/proc/self/ns/net")? {
        return PacketRule::against_resets(ports);
    }
    let work = || {
        let namespace = File::open(&of_job)?;
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
        PacketRule::against_resets(ports)
    };
    // Only this thread changes its namespace.
    std::thread::scope(|scope| scope.spawn(work).join()).unwrap_or_else(|_| Err(io::Error::other("a panic")))
}
