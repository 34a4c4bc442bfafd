//! Limits of the job's processes (getrlimit(2)) that a resume cannot give back. Without CAP_SYS_RESOURCE, no limit can be set
//! above the hard limit of this process. CRIU sets neither the soft nor the hard limit then, without an error: a process has
//! those that CRIU has, which raises its own limit of open files.

use crate::criu::limits;
use crate::files::staging::StagedDir;
use crate::sys::privileges::Privileges;
use rustix::process::{Resource, getrlimit};

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
    if Privileges::detect().may_raise_limits() {
        return;
    }
    let then = limits(&|name| images.read(name)).unwrap_or_else(|error| {
        tracing::debug!("the limits of the job's processes are not known: {error}");
        Vec::new()
    });
    let shown = |limit: u64| if limit == u64::MAX { "unlimited".to_owned() } else { limit.to_string() };
    let lower = KINDS.iter().filter_map(|(number, resource, name)| {
        let ((soft, hard), now) = (*then.get(*number)?, getrlimit(*resource));
        let now_hard = now.maximum.unwrap_or(u64::MAX);
        let left = if *resource == Resource::Nofile { now_hard } else { now.current.unwrap_or(u64::MAX) };
        (hard > now_hard && left < soft).then(|| format!("{name} {}, now {}", shown(soft), shown(left)))
    });
    let lower: Vec<_> = lower.collect();
    if !lower.is_empty() {
        tracing::warn!(
            "the job had higher limits than can be set here, and goes on with lower ones: {}. To keep them, end it, raise the hard limits (`ulimit -H`, systemd: LimitNOFILE= and the like) and run the same command again",
            lower.join("; ")
        );
    }
}
