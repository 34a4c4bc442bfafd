//! "Machines" on this one: network namespaces with an Ethernet link between them, each with a sandbox of its own.

use crate::{Running, Sandbox, set_variables};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::File;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// Where distributions have it.
const IP: &str = "/usr/sbin/ip";

/// Machines. Dropped, they are removed.
///
/// There are two switches with a link between them. The first half of the machines is at one of them, the others at the
/// other one.
pub struct Machines {
    names: Vec<String>,
    /// The namespace of the switches.
    switches: String,
    /// Their working directories and stores.
    pub sandboxes: Vec<Sandbox>,
}

impl Machines {
    /// Makes that many, or says why this is not possible here.
    ///
    /// # Errors
    /// The tool is missing, or namespaces are not allowed.
    pub fn make(count: usize) -> Result<Self, String> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = |which: &str| format!("ckpt-test-{}-{number}-{which}", std::process::id());
        if !Path::new(IP).is_file() {
            return Err(format!("{IP} (iproute2) is missing"));
        }
        let names = (0..count).map(|machine| name(&machine.to_string())).collect();
        let sandboxes = (0..count).map(|_| Sandbox::new()).collect();
        let machines = Self { names, switches: name("switches"), sandboxes };
        machines.set_up()?;
        Ok(machines)
    }

    fn set_up(&self) -> Result<(), String> {
        let switches = &self.switches;
        ip(&["netns", "add", switches])?;
        for half in ["0", "1"] {
            ip(&["-n", switches, "link", "add", &format!("switch{half}"), "type", "bridge"])?;
            ip(&["-n", switches, "link", "set", &format!("switch{half}"), "up"])?;
        }
        ip(&["-n", switches, "link", "add", "trunk0", "type", "veth", "peer", "name", "trunk1"])?;
        for half in ["0", "1"] {
            let (trunk, switch) = (format!("trunk{half}"), format!("switch{half}"));
            ip(&["-n", switches, "link", "set", &trunk, "master", &switch])?;
            ip(&["-n", switches, "link", "set", &trunk, "up"])?;
        }
        for (machine, name) in self.names.iter().enumerate() {
            ip(&["netns", "add", name])?;
            let port = format!("port{machine}");
            ip(&[
                "link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", &port, "netns",
                switches,
            ])?;
            let switch = if machine < self.names.len().div_ceil(2) { "switch0" } else { "switch1" };
            ip(&["-n", switches, "link", "set", &port, "master", switch])?;
            ip(&["-n", switches, "link", "set", &port, "up"])?;
            let address = format!("{}/24", self.address(machine));
            ip(&["-n", name, "address", "add", &address, "dev", "eth0"])?;
            ip(&["-n", name, "link", "set", "eth0", "up"])?;
            ip(&["-n", name, "link", "set", "lo", "up"])?;
        }
        Ok(())
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

    /// Breaks the network between the first half of the machines and the others, or repairs it.
    ///
    /// # Panics
    /// When that is not possible.
    pub fn join_halves(&self, is_up: bool) {
        ip(&["-n", &self.switches, "link", "set", "trunk0", up_or_down(is_up)]).expect("link");
    }

    /// Cuts one machine off, or connects it again.
    ///
    /// # Panics
    /// When that is not possible.
    pub fn connect(&self, machine: usize, is_up: bool) {
        ip(&["-n", &self.switches, "link", "set", &format!("port{machine}"), up_or_down(is_up)])
            .expect("link");
    }

    /// Has a machine send no UDP packets to the others, or send them again.
    ///
    /// # Panics
    /// When that is not possible.
    pub fn block_udp(&self, machine: usize, is_blocked: bool) {
        let (name, rule) = (&self.names[machine], ["ipproto", "udp", "prohibit"]);
        let what = if is_blocked { "add" } else { "delete" };
        ip(&[&["-n", name, "rule", what][..], &rule].concat()).expect("rule");
    }

    /// Makes a VXLAN interface on a machine, as an administrator would.
    ///
    /// # Panics
    /// When that is not possible.
    pub fn add_vxlan(&self, machine: usize, name: &str) {
        let kind = ["type", "vxlan", "id", "77", "dstport", "4789", "dev", "eth0"];
        ip(&[&["-n", &self.names[machine], "link", "add", name][..], &kind].concat()).expect("link");
    }

    /// The network interfaces of a machine whose names begin so.
    ///
    /// # Panics
    /// When they cannot be listed.
    #[must_use]
    pub fn interfaces(&self, machine: usize, beginning: &str) -> Vec<String> {
        let mut command = Command::new("cat");
        command.arg("/proc/net/dev");
        let listed = self.on(machine, &command).output().expect("ip").stdout;
        let listed = String::from_utf8(listed).expect("text");
        let names = listed.lines().filter_map(|line| line.split_once(':')).map(|(name, _)| name.trim());
        names.filter(|name| name.starts_with(beginning)).map(str::to_owned).collect()
    }

    /// A socket that listens on the loopback interface of a machine.
    ///
    /// # Panics
    /// When that is not possible.
    #[must_use]
    pub fn listen(&self, machine: usize, port: u16) -> TcpListener {
        let namespace = File::open(Path::new("/run/netns").join(&self.names[machine])).expect("a namespace");
        // A socket stays in the namespace in which it was made.
        let listen = move || {
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).expect("setns");
            TcpListener::bind(("127.0.0.1", port)).expect("listen")
        };
        std::thread::spawn(listen).join().expect("no panic")
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

    /// Starts `ckpt-run ARGUMENTS` on a machine in the background, with the working directory and the store of that of
    /// `place`; its output goes to `job.out` and `job.err` there.
    pub fn start(&self, machine: usize, place: usize, arguments: &[String]) -> Running {
        let sandbox = &self.sandboxes[place];
        let mut command = self.on(machine, &sandbox.command(arguments));
        command.current_dir(sandbox.path());
        sandbox.start_command("job", command)
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        for name in self.names.iter().chain([&self.switches]) {
            // One that could not be made cannot be removed.
            let _ = ip(&["netns", "delete", name]);
        }
    }
}

fn up_or_down(is_up: bool) -> &'static str {
    if is_up { "up" } else { "down" }
}

fn ip(arguments: &[&str]) -> Result<(), String> {
    let output = Command::new(IP).args(arguments).output().map_err(|error| format!("{IP}: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("ip {}: {}", arguments.join(" "), said.trim())) }
}
