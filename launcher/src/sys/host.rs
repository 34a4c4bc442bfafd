//! Facts about this machine, recorded in every snapshot.

use ckpt_snapshot::HostFacts;

/// The facts about this machine.
#[must_use]
pub fn facts() -> HostFacts {
    let uname = rustix::system::uname();
    let text = |value: &std::ffi::CStr| value.to_string_lossy().into_owned();
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    HostFacts {
        hostname: text(uname.nodename()),
        kernel: text(uname.release()),
        arch: text(uname.machine()),
        cpu: cpu_of(&cpuinfo),
        boot_id: boot_id.trim().to_owned(),
    }
}

/// The CPU's model; on arm64, which names none, its numbers.
fn cpu_of(cpuinfo: &str) -> String {
    let first = |name: &str| {
        let lines = cpuinfo.lines().filter_map(|line| line.split_once(':'));
        lines.filter(|(field, _)| field.trim() == name).map(|(_, value)| value.trim()).next()
    };
    if let Some(model) = first("model name") {
        return model.to_owned();
    }
    let numbers = ["CPU implementer", "CPU part", "CPU variant", "CPU revision"];
    numbers.into_iter().filter_map(first).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cpu_has_a_name() {
        let intel =
            "processor\t: 0\nmodel\t\t: 143\nmodel name\t: Intel(R) Xeon(R): 2\n\nmodel name\t: other\n";
        assert_eq!(cpu_of(intel), "Intel(R) Xeon(R): 2");
        let arm = "processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: 0xd4f\nCPU revision\t: 1\n";
        assert_eq!(cpu_of(arm), "0x41 0xd4f 0x0 1");
        assert_eq!(cpu_of(""), "");
        assert!(!facts().cpu.is_empty());
    }
}
