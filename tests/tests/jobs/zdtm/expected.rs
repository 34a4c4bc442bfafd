//! The programs that ckpt-run refuses, and those that are left out, each with the reason.

use super::programs::Need;

/// A program whose checkpoint is refused. It goes on and passes.
pub struct Expected {
    /// Its path, such as `static/pid00`.
    pub program: &'static str,
    /// A part of the message.
    pub words: &'static str,
    /// It is refused only where this is missing.
    pub without: Option<Need>,
}

const fn refused(program: &'static str, words: &'static str) -> Expected {
    Expected { program, words, without: None }
}

/// CRIU changes a limit of the program's, which is another user's by then.
const fn of_another_user(program: &'static str) -> Expected {
    Expected { without: Some(Need::Resources), ..refused(program, "Can't get rlimit") }
}

/// Leases that are being broken.
const LEASE: &str = "has a lease of a file that another program is about to open";

/// What is refused.
pub const EXPECTED: &[Expected] = &[
    of_another_user("static/mlock_setuid"),
    of_another_user("static/pid00"),
    of_another_user("static/seccomp_filter"),
    of_another_user("static/thread_different_uid_gid"),
    refused("static/file_lease02", LEASE),
    refused("static/file_lease03", LEASE),
    refused("static/file_lease04", LEASE),
    // A stopped child of a tracer.
    refused("static/ptrace_sig", "Unseizable non-zombie"),
    refused("static/sigtrap", "pending SIGTRAP"),
    // Descriptors in messages that nobody has received: CRIU would lose them.
    refused("static/scm06", "messages with descriptors (SCM_RIGHTS) wait"),
    // Connections that are not accepted yet, with data or already closed.
    refused("static/sk-unix-listen02", "Non-empty write queue on an in-flight socket"),
    refused("static/sk-unix-listen03", "closed in-flight socket"),
    refused("static/sk-unix-listen04", "closed in-flight socket"),
    // The same of TCP: the next attempt may succeed.
    refused("static/socket-tcp-skip-in-flight", "In-flight connection"),
    refused("static/socket_udp-corked", "corked dgram socket"),
    refused("static/timens_for_kids", "nested time_for_children namespace"),
    refused("static/timens_nested", "nested time namespace"),
];

/// Programs of CRIU's flavours `ns` and `uns`, for which the namespaces of every job do.
pub const NAMESPACES_OF_A_JOB: &[&str] = &[
    "static/child_subreaper_and_reparent",
    "static/ipc_namespace",
    "static/msgque",
    "static/pty-console",
    "static/remap_dead_pid",
    "static/remap_dead_pid_root",
    "static/scm06",
    "static/sem",
    "static/session00",
    "static/session01",
    "static/shm",
    "static/shm-mp",
    "static/shm-unaligned",
    "static/sk-unix-restore-fs-share",
    "static/socket-tcp-closed",
    "static/socket-tcp4v6-closed",
    "static/socket-tcp6-closed",
    "static/unlink_multiple_largefiles",
    "static/utsname",
    "static/zombie_leader",
    "transition/ipc",
];

const CGROUPS: &str = "it mounts and changes cgroups of the machine, and a job's mounts are not kept";
const HUGE_PAGES: &str = "it needs huge pages, which are the machine's to reserve";
const OPTION: &str = "it tests an option of CRIU that ckpt-run does not use";
const HOOK: &str = "it needs a network namespace that its hook makes";
const FIREWALL: &str = "it needs a program that sets up a firewall";
const NOT_BUILT: &str = "its makefile does not build it as a test of this machine";
const LIBRARY: &str = "it needs a library that the other programs do not need";
const FILTER: &str = "it expects that there is no seccomp filter, and every job has ckpt-run's";

/// Programs that are left out, and why.
pub const LEFT_OUT: &[(&str, &str)] = &[
    ("static/bpf_array", LIBRARY),
    ("static/bpf_hash", LIBRARY),
    ("static/cgroup00", CGROUPS),
    ("static/cgroup01", CGROUPS),
    ("static/cgroup02", CGROUPS),
    ("static/cgroup03", CGROUPS),
    ("static/cgroup04", CGROUPS),
    ("static/cgroup_ifpriomap", CGROUPS),
    ("static/cgroup_ignore", CGROUPS),
    ("static/cgroup_stray", CGROUPS),
    ("static/cgroup_threads", CGROUPS),
    ("static/cgroup_yard", CGROUPS),
    ("static/cgroupns", CGROUPS),
    ("static/cgroupv2_00", CGROUPS),
    ("static/cgroupv2_01", CGROUPS),
    ("static/criu-rtc", NOT_BUILT),
    ("static/get_smaps_bits", NOT_BUILT),
    ("static/jobctl00", NOT_BUILT),
    ("static/maps09", HUGE_PAGES),
    ("static/maps10", HUGE_PAGES),
    ("static/memfd02-hugetlb", HUGE_PAGES),
    ("static/net_lock_socket_iptables", HOOK),
    ("static/net_lock_socket_iptables6", HOOK),
    ("static/net_lock_socket_nftables", HOOK),
    ("static/net_lock_socket_nftables6", HOOK),
    ("static/netns_lock_iptables", HOOK),
    ("static/netns_lock_nftables", HOOK),
    ("static/ofd_file_locks", NOT_BUILT),
    ("static/rtc", "it needs a real-time clock and a plugin of CRIU"),
    ("static/s390x_gs_threads", NOT_BUILT),
    ("static/s390x_runtime_instr", NOT_BUILT),
    ("static/seccomp_filter_threads", FILTER),
    ("static/seccomp_strict", FILTER),
    ("static/skip-me", NOT_BUILT),
    ("static/socket-dump-tcp-close", OPTION),
    ("static/socket-tcp-close0", OPTION),
    ("static/socket-tcp-ipt-nfconntrack", FIREWALL),
    ("static/socket-tcp-nft-nfconntrack", FIREWALL),
    ("static/socket-tcp-reseted", FIREWALL),
    ("static/socket-tcp-syn-sent", FIREWALL),
    ("static/uprobes", LIBRARY),
    ("transition/pid_reuse", "it is told of dumps in advance, which ckpt-run does not do"),
];
