//! "Machines" on this one: network namespaces with an Ethernet link between them, each with a sandbox of its own.

use crate::{Running, Sandbox, set_variables};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// Where distributions have it.
const IP: &str = "/usr/sbin/ip";

/// Two machines. Dropped, they are removed.
pub struct Machines {
    names: [String; 2],
    /// Their working directories and stores.
    pub sandboxes: [Sandbox; 2],
}

impl Machines {
    /// Makes them, or says why this is not possible here.
    ///
    /// # Errors
    /// The tool is missing, or namespaces are not allowed.
    pub fn two() -> Result<Self, String> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = |machine| format!("ckpt-test-{}-{number}-{machine}", std::process::id());
        if !Path::new(IP).is_file() {
            return Err(format!("{IP} (iproute2) is missing"));
        }
        let machines = Self { names: [name(0), name(1)], sandboxes: [Sandbox::new(), Sandbox::new()] };
        for name in &machines.names {
            ip(&["netns", "add", name])?;
        }
        let [first, second] = &machines.names;
        ip(&[
            "link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second,
        ])?;
        for (machine, name) in machines.names.iter().enumerate() {
            let address = format!("{}/24", machines.address(machine));
            ip(&["-n", name, "address", "add", &address, "dev", "eth0"])?;
            ip(&["-n", name, "link", "set", "eth0", "up"])?;
            ip(&["-n", name, "link", "set", "lo", "up"])?;
        }
        Ok(machines)
    }

    /// The address of a machine.
    #[must_use]
    pub fn address(&self, machine: usize) -> String {
        format!("10.77.0.{}", machine + 1)
    }

    /// Gives a machine another address.
    ///
    /// # Panics
    /// When that is not possible.
    pub fn readdress(&self, machine: usize, address: &str) {
        let name = &self.names[machine];
        ip(&["-n", name, "address", "flush", "dev", "eth0"]).expect("flush");
        ip(&["-n", name, "address", "add", &format!("{address}/24"), "dev", "eth0"]).expect("add");
    }

    /// Breaks the network between them, or repairs it.
    ///
    /// # Panics
    /// When that is not possible.
    pub fn connect(&self, is_up: bool) {
        ip(&["-n", &self.names[0], "link", "set", "eth0", if is_up { "up" } else { "down" }]).expect("link");
    }

    /// The command, on a machine, with its variables and its working directory.
    #[must_use]
    pub fn on(&self, machine: usize, inner: &Command) -> Command {
        let mut command = Command::new(IP);
        command.args(["netns", "exec", &self.names[machine]]).arg(inner.get_program()).args(inner.get_args());
        command.current_dir(self.sandboxes[machine].path()).stdin(std::process::Stdio::null());
        set_variables(&mut command, inner);
        command
    }

    /// Starts `ckpt-run ARGUMENTS` on a machine in the background; its output goes to `job.out` and `job.err`.
    pub fn start(&self, machine: usize, arguments: &[String]) -> Running {
        let sandbox = &self.sandboxes[machine];
        sandbox.start_command("job", self.on(machine, &sandbox.command(arguments)))
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        for name in &self.names {
            // One that could not be made cannot be removed.
            let _ = ip(&["netns", "delete", name]);
        }
    }
}

fn ip(arguments: &[&str]) -> Result<(), String> {
    let output = Command::new(IP).args(arguments).output().map_err(|error| format!("{IP}: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("ip {}: {}", arguments.join(" "), said.trim())) }
}
