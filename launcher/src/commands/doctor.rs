//! `ckpt-run doctor`: what this machine supports, what is missing, why it matters, and how to fix it.

use super::print;
use crate::agents::MirrorMode;
use crate::cli::config::Config;
use crate::cluster;
use crate::criu::{Criu, CriuMissing, MIN_VERSION};
use crate::files::staging::Staging;
use crate::gpu::preload::Interposer;
use crate::namespace::{Namespace, Network};
use crate::report::failure::in_one_line;
use crate::store::root::Root;
use crate::sys::error::EXIT_NEGATIVE;
use crate::sys::memory;
use crate::sys::privileges::Privileges;
use anyhow::Result;
use rustix::thread::CapabilitySet;
use serde::Serialize;
use std::io::{self, Write};

#[derive(Clone, Serialize)]
struct Finding {
    need: &'static str,
    state: State,
    /// The result of the check.
    found: String,
    why: &'static str,
    remedy: &'static str,
}

#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    Ok,
    /// ckpt-run works without it, with limits.
    Limited,
    Missing,
}

fn finding(
    need: &'static str,
    outcome: Result<String, String>,
    otherwise: State,
    why: &'static str,
    remedy: &'static str,
) -> Finding {
    let (state, found) = match outcome {
        Ok(found) => (State::Ok, found),
        Err(found) => (otherwise, found),
    };
    Finding { need, state, found, why, remedy }
}

/// What was found, as a success or as a failure.
fn ok_if(is_ok: bool, found: String) -> Result<String, String> {
    if is_ok { Ok(found) } else { Err(found) }
}

/// Runs all checks; exit code 1 when a requirement is missing.
///
/// # Errors
/// When stdout cannot be written.
pub fn doctor(config: &Config, json: bool) -> Result<i32> {
    let findings = [check_criu(config), check_system(config)].concat();
    let code = if findings.iter().any(|one| one.state == State::Missing) { EXIT_NEGATIVE } else { 0 };
    if json {
        print::json(&findings)?;
        return Ok(code);
    }
    let mut out = io::stdout().lock();
    writeln!(out, "{}\n", verdict(&findings, Privileges::detect().wants_user_namespace()))?;
    for one in &findings {
        let state = match one.state {
            State::Ok => "ok",
            State::Limited => "limited",
            State::Missing => "MISSING",
        };
        writeln!(out, "{state:8} {:20} {}", one.need, one.found)?;
        if one.state != State::Ok {
            writeln!(out, "{:30}why: {}\n{:30}how: {}", "", one.why, "", one.remedy)?;
        }
    }
    Ok(code)
}

/// Which jobs can be saved here.
fn verdict(findings: &[Finding], is_in_user_namespace: bool) -> String {
    let lacks = |names: &[&str]| -> Vec<&str> {
        let lacking = findings.iter().filter(|one| one.state != State::Ok && names.contains(&one.need));
        lacking.map(|one| one.need).collect()
    };
    let missing: Vec<_> =
        findings.iter().filter(|one| one.state == State::Missing).map(|one| one.need).collect();
    let say = |missing: &[&str]| match missing {
        [] => "yes".to_owned(),
        missing => format!("no ({})", missing.join(", ")),
    };
    if !missing.is_empty() {
        return format!("Jobs: {}. See below, marked MISSING.", say(&missing));
    }
    let torchrun = match say(&lacks(&["CAP_NET_ADMIN"])) {
        _ if is_in_user_namespace => "only with --network private".to_owned(),
        said => said,
    };
    let gpu = say(&lacks(&["NVIDIA driver", "interposer"]));
    format!("Plain jobs: yes. torchrun and other jobs with TCP connections: {torchrun}. GPU jobs: {gpu}.")
}

fn check_criu(config: &Config) -> Vec<Finding> {
    let criu = Criu::find(config.criu.as_deref());
    let found = match &criu {
        Ok(criu) => Ok(format!("{} at {} ({})", criu.version, criu.path.display(), criu.reason)),
        Err(error) => Err(error.to_string()),
    };
    debug_assert!(MIN_VERSION.to_string().starts_with("4.1"), "the text below names it");
    let mut findings = vec![finding(
        "criu",
        found,
        State::Missing,
        "CRIU saves and restores the processes",
        match &criu {
            Err(CriuMissing::Unsupported { .. }) => "use another kernel command line, kernel or machine",
            _ if cfg!(target_arch = "aarch64") => "install CRIU 4.2 or newer, or name one with --criu PATH",
            _ => {
                "install CRIU 4.1 or newer (Debian 13: apt-get install criu; or the Python package ckpt-run-criu beside ckpt-run), or name one with --criu PATH"
            }
        },
    )];
    // Not for jobs in a user namespace: CRIU has its capabilities only there.
    if let (Ok(criu), false) = (criu, Privileges::detect().wants_user_namespace()) {
        let checked = criu.check().map(|()| "this kernel supports CRIU".to_owned());
        let how = match &checked {
            Err(why) if why.contains("Read-only file system") => "make /tmp writable: a tmpfs is enough",
            _ => "run as root; a custom kernel needs CONFIG_CHECKPOINT_RESTORE",
        };
        findings.push(finding(
            "criu check",
            checked,
            State::Missing,
            "CRIU needs certain kernel features, capabilities, and a writable /tmp",
            how,
        ));
    }
    findings
}

fn check_system(config: &Config) -> Vec<Finding> {
    let mut findings = vec![kernel(&crate::sys::host::facts().kernel)];
    findings.extend(check_rights());
    findings.extend([
        pid_namespace(),
        ptrace_scope(),
        staging_memory(),
        nftables(),
        driver(),
        interposer(config),
        free_memory(),
        mirror(config),
        if config.store.url.is_some() { object_store(config) } else { free_disk(config) },
    ]);
    findings.extend(left_interfaces());
    findings
}

/// The oldest kernel that is supported.
const OLDEST_KERNEL: (u32, u32) = (5, 11);

/// Major and minor version of a kernel release, such as `6.8.0-45-generic`.
fn kernel_version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|letter: char| !letter.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

fn kernel(release: &str) -> Finding {
    let (major, minor) = OLDEST_KERNEL;
    let too_old = format!("{release}, which is older than {major}.{minor}");
    let found = match kernel_version(release) {
        Some(version) if version < OLDEST_KERNEL => Err(too_old),
        // A version of another form is judged by the other checks.
        _ => Ok(release.to_owned()),
    };
    finding(
        "kernel",
        found,
        State::Missing,
        "CRIU and namespaces need kernel features",
        "use Linux 5.11 or newer",
    )
}

/// Capabilities, and the jobs that need them. Every job needs some, see `privileges`; docs/privileges.md says which jobs need
/// the others.
const RIGHTS: [(&str, &str); 8] = [
    (
        "CAP_SYS_ADMIN",
        "for the job's namespaces, mapped files without a name (multiprocessing), io_uring, staging in memory",
    ),
    (
        "CAP_NET_ADMIN",
        "for jobs with TCP connections (torchrun), unless they run with --network private in a user namespace",
    ),
    (
        "CAP_SETPCAP",
        "to resume a job whose bounding set is not full, as in containers; not with no_new_privs",
    ),
    ("CAP_SYS_TIME", "for a monotonic clock that continues after a reboot (root only)"),
    ("CAP_SYS_CHROOT", "for the root directories of resumed processes (root only)"),
    ("CAP_DAC_READ_SEARCH", "for jobs that watch files with inotify or fanotify"),
    ("CAP_SYS_PTRACE", "for processes of the job with other users or capabilities"),
    (
        "CAP_SYS_RESOURCE",
        "to save processes of another user, and to restore resource limits above those of the user",
    ),
];

/// The capability with this name.
fn capability(name: &str) -> Option<CapabilitySet> {
    CapabilitySet::from_name(name.strip_prefix("CAP_")?)
}

fn check_rights() -> Vec<Finding> {
    let rights = Privileges::detect();
    let uid = rustix::process::getuid().as_raw();
    let user = match (rights.is_root(), rights.wants_user_namespace()) {
        (true, _) => Ok("root".to_owned()),
        (_, true) => Err(format!("user ID {uid}; its jobs run in a user namespace")),
        _ => Err(format!("user ID {uid}, with capabilities")),
    };
    let user = finding(
        "user",
        user,
        State::Limited,
        "everything works for root; see `ckpt-run docs privileges` for other users",
        "run ckpt-run as root",
    );
    let how = if rights.is_root() {
        "give it to the container or service in which ckpt-run runs as root (--cap-add)"
    } else {
        "run ckpt-run as root, or give it this capability (setcap on its file, or as an ambient one)"
    };
    let needed = rights.needed();
    let of_right = |(name, why)| {
        let is_needed = needed.iter().any(|one| one.name == name);
        let is_held = capability(name).is_some_and(|capability| rights.has(capability));
        finding(
            name,
            if is_held { Ok("held".to_owned()) } else { Err("not held".to_owned()) },
            if is_needed { State::Missing } else { State::Limited },
            why,
            how,
        )
    };
    std::iter::once(user).chain(RIGHTS.into_iter().map(of_right)).collect()
}

fn pid_namespace() -> Finding {
    let made = Namespace::create(Network::Host, None);
    finding(
        "PID namespace",
        made.map(|_| "can be created".to_owned()).map_err(|error| error.to_string()),
        State::Missing,
        "a resumed job needs its old PIDs; in a PID namespace they are always free",
        "run as root, or allow user namespaces (sysctl user.max_user_namespaces); in a container, add the capability SYS_ADMIN and allow the mount and clone system calls",
    )
}

fn ptrace_scope() -> Finding {
    let scope =
        std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_else(|_| "0".to_owned());
    let found = format!("kernel.yama.ptrace_scope is {}", scope.trim());
    finding(
        "ptrace",
        ok_if(scope.trim() != "3", found),
        State::Missing,
        "CRIU stops processes with ptrace; 3 forbids it for everybody",
        "reboot with sysctl kernel.yama.ptrace_scope=1 (3 cannot be changed without a reboot)",
    )
}

fn staging_memory() -> Finding {
    finding(
        "staging in memory",
        Staging::in_memory(0).map(|_| "a tmpfs can be created".to_owned()).map_err(|error| error.to_string()),
        State::Limited,
        "images are staged in memory, so that the job is paused only while memory is copied",
        "run as root, on Linux 5.2 or newer",
    )
}

fn nftables() -> Finding {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut dirs: Vec<_> = std::env::split_paths(&path).collect();
    dirs.extend(["/usr/sbin", "/sbin"].map(Into::into));
    let found = dirs.iter().map(|dir| dir.join("nft")).find(|path| path.is_file());
    finding(
        "nftables",
        found.map(|path| path.display().to_string()).ok_or("nft is not in PATH".to_owned()),
        State::Limited,
        "CRIU can lock connections with it; ckpt-run does not need that, since both ends are paused",
        "nothing to do",
    )
}

fn driver() -> Finding {
    let version = std::fs::read_to_string("/sys/module/nvidia/version");
    let version = version
        .map_err(|_| "none: there is no /sys/module/nvidia/version".to_owned())
        .map(|version| version.trim().to_owned());
    finding(
        "NVIDIA driver",
        version.and_then(|version| ok_if(is_new_enough(&version), version)),
        State::Limited,
        "for jobs that use a GPU: drivers from 570 on can save and restore their state",
        "nothing to do for jobs without a GPU; otherwise install version 570 or newer",
    )
}

/// Whether the driver has the checkpoint API (CUDA 12.8, driver 570).
fn is_new_enough(version: &str) -> bool {
    version.split('.').next().and_then(|major| major.parse::<u32>().ok()).is_some_and(|major| major >= 570)
}

fn interposer(config: &Config) -> Finding {
    let outcome = match &config.interpose {
        Interposer::On(path) => Ok(path.display().to_string()),
        Interposer::Off(why) => Err(format!("off: {why}")),
    };
    finding(
        "interposer",
        outcome,
        State::Limited,
        "for jobs that use a GPU: the preloaded library moves their GPU state to host memory for a snapshot",
        if cfg!(target_arch = "x86_64") {
            "nothing to do for jobs without a GPU; otherwise put libckpt_interpose.so beside ckpt-run, or name it with --interpose PATH"
        } else {
            "nothing to do for jobs without a GPU; others need a machine with x86-64"
        },
    )
}

fn free_memory() -> Finding {
    let available = memory::available_bytes().map_err(|error| error.to_string());
    finding(
        "free memory",
        available.and_then(|bytes| ok_if(bytes > 1 << 30, format!("{} available", print::bytes(bytes)))),
        State::Limited,
        "a checkpoint copies the memory of the job to free memory; without enough of it, the copy goes to disk and the pause is longer",
        "leave as much memory free as the job uses",
    )
}

/// Which copy of device memory the job's launcher would keep.
fn mirror(config: &Config) -> Finding {
    let available = memory::available_bytes().map_err(|error| error.to_string());
    finding(
        "copy of GPU memory",
        available.map(|bytes| mirror_choice(config.mirror, bytes)),
        State::Limited,
        "checkpoints of a job with a GPU take host memory for its device memory (--mirror)",
        "mount /proc",
    )
}

/// The choice with this much free host memory, in words.
fn mirror_choice(mode: MirrorMode, free_bytes: u64) -> String {
    let (half, most) = (print::bytes(free_bytes / 2), print::bytes(free_bytes));
    match mode {
        MirrorMode::Auto => format!(
            "--mirror auto: all for up to {half} of device memory; changed while that and the job's own memory fit into {most}; otherwise none"
        ),
        MirrorMode::None => "--mirror none: at most 32 MiB of host memory for each process".to_owned(),
        mode => format!("--mirror {}: up to {most} of device memory", mode.name()),
    }
}

/// An object store must be reachable.
fn object_store(config: &Config) -> Finding {
    let checked = Root::open(&config.store).and_then(|root| root.check().map(|()| root.name()));
    let checked = checked.map(|name| format!("{name} is reachable")).map_err(|error| in_one_line(&error));
    finding(
        "object store",
        checked,
        State::Missing,
        "all snapshots are stored there (--store)",
        "fix the reported problem",
    )
}

/// Networks of jobs whose launchers were killed.
fn left_interfaces() -> Option<Finding> {
    let left = cluster::left_interfaces().unwrap_or_default();
    (!left.is_empty()).then(|| {
        finding(
            "network interfaces",
            Err(format!("left by launchers that were killed: {}", left.join(", "))),
            State::Limited,
            "each has an address of the job and the UDP port of its coordinator",
            "nothing to do: the next start of any job with CAP_NET_ADMIN in this network namespace deletes them",
        )
    })
}

fn free_disk(config: &Config) -> Finding {
    let absolute = std::path::absolute(&config.store.dir).unwrap_or_else(|_| config.store.dir.clone());
    let free = memory::free_bytes_at(&absolute).map_err(|error| error.to_string());
    let found = |bytes| format!("{} free for {}", print::bytes(bytes), absolute.display());
    finding(
        "free disk",
        free.and_then(|bytes| ok_if(bytes > 10 << 30, found(bytes))),
        State::Limited,
        "a snapshot is as large as the job's memory, and --keep of them are kept",
        "free some space, or put --store on a larger disk",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_choice_of_the_mirror_has_its_numbers() {
        let said = mirror_choice(MirrorMode::Auto, 20_000_000_000);
        assert!(said.contains("up to 10.00 GB") && said.contains("fit into 20.00 GB"), "{said}");
        for mode in [MirrorMode::All, MirrorMode::Changed, MirrorMode::None] {
            let said = mirror_choice(mode, 20_000_000_000);
            assert!(said.starts_with(&format!("--mirror {}: ", mode.name())), "{said}");
        }
    }

    #[test]
    fn the_verdict_comes_from_the_findings() {
        let one = |need, state| Finding { need, state, found: String::new(), why: "", remedy: "" };
        let all =
            |criu, net, driver| [one("criu", criu), one("CAP_NET_ADMIN", net), one("NVIDIA driver", driver)];
        let said = verdict(&all(State::Ok, State::Ok, State::Ok), false);
        assert_eq!(
            said,
            "Plain jobs: yes. torchrun and other jobs with TCP connections: yes. GPU jobs: yes."
        );
        let said = verdict(&all(State::Ok, State::Limited, State::Limited), false);
        assert!(
            said.contains("TCP connections: no (CAP_NET_ADMIN). GPU jobs: no (NVIDIA driver)."),
            "{said}"
        );
        let said = verdict(&all(State::Ok, State::Limited, State::Ok), true);
        assert!(said.contains("only with --network private"), "{said}");
        assert!(verdict(&all(State::Missing, State::Ok, State::Ok), false).starts_with("Jobs: no (criu)."));
    }

    #[test]
    fn kernels_that_are_too_old_are_named() {
        for (release, state) in [
            ("5.11.0", State::Ok),
            ("6.8.0-45-generic", State::Ok),
            ("5.10.0-32-amd64", State::Missing),
            ("4.18.0-553.el8.x86_64", State::Missing),
            ("6.1", State::Ok),
            ("custom", State::Ok),
        ] {
            assert!(kernel(release).state == state, "{release}: {}", kernel(release).found);
        }
        let said = verdict(&[kernel("5.4.0-1")], false);
        assert!(said.starts_with("Jobs: no (kernel)."), "{said}");
    }

    #[test]
    fn every_right_names_a_capability() {
        for (name, _) in RIGHTS {
            assert!(capability(name).is_some(), "{name}");
        }
        assert_eq!(capability("CAP_SYS_ADMIN"), Some(CapabilitySet::SYS_ADMIN));
    }
}
