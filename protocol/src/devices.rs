//! Devices that rule a checkpoint of a process out, since memory of a GPU may be registered with them: what is registered
//! must not be moved. Launcher and agents both look for them.

/// Such a device.
#[derive(Debug, PartialEq, Eq)]
pub struct Device {
    /// What its path begins with, below `/dev/`.
    pub name: &'static str,
    /// What it is.
    pub what: &'static str,
    /// What to do about it.
    pub remedy: &'static str,
}

/// The first one that fits counts.
const DEVICES: &[Device] = &[
    Device {
        name: "infiniband",
        what: "an RDMA device",
        remedy: "RDMA cannot be saved; use TCP (for NCCL: NCCL_IB_DISABLE=1)",
    },
    Device {
        name: "gdrdrv",
        what: "GDRCopy's device, with which memory of the GPU is registered",
        remedy: "run without GDRCopy (NCCL_GDRCOPY_ENABLE=0, UCX_TLS=^gdr_copy)",
    },
    Device {
        name: "nvidia-fs",
        what: "GPUDirect Storage's device, with which memory of the GPU is registered",
        remedy: "close it (cuFileDriverClose), or use CUFILE_FORCE_COMPAT_MODE=true",
    },
    Device {
        name: "nvidia-caps/",
        what: "an instance of a GPU in MIG mode",
        remedy: "NVIDIA's driver does not support checkpoints of it; use a whole GPU (nvidia-smi -mig 0)",
    },
];

/// The rights to configure and to watch MIG (NVIDIA MIG user guide, Device Nodes and Capabilities): they say nothing of
/// instances. The driver opens both, as root, for a process on a whole GPU too (seen with 580.159 on an H200).
const OF_NO_INSTANCE: [&str; 2] = ["nvidia-caps/nvidia-cap1", "nvidia-caps/nvidia-cap2"];

/// The device with this path, if it is one; `dev` is the directory of devices, with a slash at its end.
#[must_use]
pub fn find(path: &str, dev: &str) -> Option<&'static Device> {
    let name = path.strip_prefix(dev)?;
    DEVICES.iter().find(|device| name.starts_with(device.name)).filter(|_| !OF_NO_INSTANCE.contains(&name))
}

/// The file of a line of `/proc/PID/maps`, empty for memory without one: the sixth field, see proc_pid_maps(5).
#[must_use]
pub fn path_of_mapping(line: &str) -> Option<&str> {
    line.splitn(6, ' ').nth(5).map(str::trim_start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_told_from_others() {
        let name = |path| find(path, "/dev/").map(|device| device.name);
        assert_eq!(name("/dev/infiniband/uverbs0"), Some("infiniband"));
        assert_eq!(name("/dev/gdrdrv"), Some("gdrdrv"));
        assert_eq!(name("/dev/nvidia-fs3"), Some("nvidia-fs"));
        assert_eq!(name("/dev/nvidia-caps/nvidia-cap12"), Some("nvidia-caps/"));
        for other in
            ["/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-caps-imex-channels/channel0", "/tmp/gdrdrv"]
                .into_iter()
                .chain(OF_NO_INSTANCE.map(|name| ["/dev/", name].concat().leak() as &str))
        {
            assert_eq!(name(other), None, "{other}");
        }
    }
}
