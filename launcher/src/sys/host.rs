//! Facts about this machine, recorded in every snapshot.

use ckpt_snapshot::HostFacts;

/// The facts about this machine.
#[must_use]
pub fn facts() -> HostFacts {
    let uname = rustix::system::uname();
    let text = |value: &std::ffi::CStr| value.to_string_lossy().into_owned();
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    HostFacts {
        hostname: text(uname.nodename()),
        kernel: text(uname.release()),
        arch: text(uname.machine()),
        cpu: model.map_or_else(String::new, |(_, model)| model.trim().to_owned()),
        boot_id: boot_id.trim().to_owned(),
    }
}
