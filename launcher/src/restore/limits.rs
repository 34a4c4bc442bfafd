//! Limits of the job's processes (getrlimit(2)) that a resume cannot give back. Without CAP_SYS_RESOURCE, no limit can be set
//! above the hard limit of this process, and CRIU leaves it there without an error.

use crate::criu::soft_limits;
use crate::files::staging::StagedDir;
use crate::sys::privileges::Privileges;
use rustix::process::{Resource, getrlimit};
use rustix::thread::CapabilitySet;

/// The limits whose loss a program notices, with their numbers and the option of `ulimit`.
const KINDS: &[(usize, Resource, &str)] = &[
    (1, Resource::Fsize, "file size (-f)"),
    (2, Resource::Data, "data size (-d)"),
    (3, Resource::Stack, "stack size (-s)"),
    (6, Resource::Nproc, "processes (-u)"),
    (7, Resource::Nofile, "open files (-n)"),
    (8, Resource::Memlock, "locked memory (-l)"),
    (9, Resource::As, "address space (-v)"),
];

/// Warns of limits that will be lower than they were.
pub(super) fn warn_of_lower(images: &StagedDir) {
    let rights = Privileges::detect();
    if rights.has_real_rights() && rights.has(CapabilitySet::SYS_RESOURCE) {
        return;
    }
    let then = soft_limits(&|name| images.read(name)).unwrap_or_else(|error| {
        tracing::debug!("the limits of the job's processes are not known: {error}");
        Vec::new()
    });
    let lower = KINDS.iter().filter_map(|(number, resource, name)| {
        let (then, now) = (*then.get(*number)?, getrlimit(*resource).maximum?);
        let shown = if then == u64::MAX { "unlimited".to_owned() } else { then.to_string() };
        (now < then).then(|| format!("{name} {shown}, now {now}"))
    });
    let lower: Vec<_> = lower.collect();
    if !lower.is_empty() {
        tracing::warn!(
            "the job had higher limits than can be set here, and goes on with lower ones: {}. To keep them, end it, raise the hard limits (`ulimit -H`, systemd: LimitNOFILE= and the like) and run the same command again",
            lower.join("; ")
        );
    }
}
