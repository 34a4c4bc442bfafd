//! TCP connections inside the job that one end has closed for sending. CRIU restores such an end by sending it the end of
//! the data (`libsoccr`, a raw packet). The kernel's answer finds no socket if the other end is not restored yet, and is
//! answered with a reset, which breaks the connection. So resets are dropped until all ends are there.

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

/// The rule against resets, if the images have such connections. It has to be removed before the job runs.
///
/// # Errors
/// When the images cannot be read. Without the rights for the rule there is none.
pub(super) fn shield(images: &StagedDir, namespace: &Namespace) -> Result<Option<PacketRule>> {
    let ports = Descriptors::read(&|name| images.read(name))?.half_closed_ports;
    if ports.is_empty() {
        return Ok(None);
    }
    let rule = put(&ports, namespace.init_pid());
    Ok(rule
        .inspect_err(|error| {
            tracing::warn!(
                "the job's half-closed TCP connections may be reset by the resume: packets cannot be dropped ({error})"
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
