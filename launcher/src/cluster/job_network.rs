//! `--network job`: an address for each node of a job that stays when the node moves to another machine. An Ethernet over UDP
//! (VXLAN) between the machines carries it, and the job finds the nodes there by the names that their machines had when it
//! began.
//!
//! The addresses follow from the name of the log, so that they are the same in every run of the same job. Node 0 tells all
//! nodes at which machines the others are.

use super::diag;
use super::messages::{Join, NetworkPlan};
use super::options::Coordinator;
use super::vxlan::{self, Interface, Layout, Left, Mac};
use crate::namespace::Names;
use crate::sys::deadline::{
    NODE_FIRST_RETRY_INTERVAL, NODE_INTERFACE_LIMIT, NODE_REACH_LIMIT, NODE_REACH_TRY, NODE_RETRY_INTERVAL,
};
use crate::sys::error::bad_input;
use anyhow::{Context, Result, anyhow, bail};
use ckpt_snapshot::{Manifest, PartNetwork};
use ipnet::Ipv4Net;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Once;
use std::time::Instant;

const CONTEXT: &str = "ckpt-run nodes 1: network of a job";
/// Libraries that choose the interface of their connections by these variables: Gloo, NCCL and TensorPipe.
const INTERFACE_VARIABLES: [&str; 3] = ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"];
/// Where torchrun and its ranks meet. An address is that of a machine, which may change.
const ADDRESS_VARIABLES: [&str; 2] = ["MASTER_ADDR", "PET_MASTER_ADDR"];
/// A port at which nothing listens (discard): the kernel of a machine that can be reached answers with a reset.
const UNUSED_PORT: u16 = 9;
/// Nodes that are checked at the same time, each by a thread.
const CHECKS_AT_ONCE: usize = 16;
/// Ethernet's maximum.
const USUAL_PACKET_BYTES: u32 = 1500;

/// The network at this node.
#[derive(Debug)]
pub struct JobNetwork {
    rank: u32,
    /// Deleted with this.
    _interface: Interface,
    interface_name: String,
    subnet: Ipv4Net,
    /// Where the other nodes are.
    machines: BTreeMap<u32, IpAddr>,
    /// What the job sees.
    part: Mutex<PartNetwork>,
}

/// What node 0 tells all.
///
/// # Errors
/// Bad input: the range is too small, or two nodes are on the same machine.
pub(super) fn plan(
    range: Ipv4Net,
    log: &str,
    coordinator: &Coordinator,
    nodes: &[(&Join, IpAddr)],
) -> Result<NetworkPlan> {
    let own = nodes.first().map(|(join, _)| &join.addresses).into_iter().flatten();
    let mut known: BTreeMap<IpAddr, u32> = own.map(|address| (*address, 0)).collect();
    for (join, machine) in &nodes[1..] {
        if let Some(other) = known.insert(*machine, join.rank).or_else(|| machine.is_loopback().then_some(0))
        {
            bail!(bad_input(anyhow!(
                "with --network job, each node needs a machine of its own, and node {} and node {other} are both at {machine}",
                join.rank
            )));
        }
    }
    Ok(NetworkPlan {
        number: fastrand::u32(1..1 << 24),
        subnet: subnet(range, log, nodes.len())?,
        machines: nodes[1..].iter().map(|(join, machine)| (join.rank, *machine)).collect(),
        names: names(&nodes.iter().map(|(join, _)| *join).collect::<Vec<_>>(), coordinator),
    })
}

/// The smallest subnet for so many nodes; which one of the range depends on the log.
fn subnet(range: Ipv4Net, log: &str, nodes: usize) -> Result<Ipv4Net> {
    // Two addresses are not those of machines.
    let bits = (nodes + 2).next_power_of_two().trailing_zeros();
    let prefix = u8::try_from(32 - bits).context("too many nodes")?;
    let too_small = || {
        bad_input(anyhow!(
            "--network-range {range} is too small for {nodes} nodes: a /{prefix} is needed at least"
        ))
    };
    let count = 1_u64 << prefix.checked_sub(range.prefix_len()).ok_or_else(too_small)?;
    let chosen = u32::try_from(number(log) % count).context("a range of IPv4")?;
    let first = u32::from(range.network()) + (chosen << bits);
    Ok(Ipv4Net::new(first.into(), prefix)?)
}

/// A number that follows from the name of the log.
fn number(log: &str) -> u64 {
    let hash = blake3::derive_key(CONTEXT, log.as_bytes());
    u64::from_le_bytes(hash[..8].try_into().expect("8 bytes"))
}

/// The names of each node: those of its machine that no other node has, and one for all jobs.
fn names(nodes: &[&Join], coordinator: &Coordinator) -> Vec<Vec<String>> {
    let of_node = |join: &&Join| {
        let mut names = vec![join.hostname.clone()];
        names.extend(join.engine_name.clone());
        // Where the job begins, node 0 is at the first one.
        let first =
            coordinator.hosts.first().filter(|host| join.rank == 0 && host.parse::<IpAddr>().is_err());
        if let Some(first) = first {
            names.push(first.clone());
        }
        let short: Vec<_> =
            names.iter().filter_map(|name| Some(name.split_once('.')?.0.to_owned())).collect();
        names.into_iter().chain(short).filter(|name| is_name(name)).collect::<BTreeSet<_>>()
    };
    let all: Vec<_> = nodes.iter().map(of_node).collect();
    let is_only = |name: &String| all.iter().filter(|names| names.contains(name)).count() == 1;
    let with_own = |(names, join): (&BTreeSet<String>, &&Join)| {
        let own = format!("ckpt-node-{}", join.rank);
        std::iter::once(own).chain(names.iter().filter(|name| is_only(name)).cloned()).collect()
    };
    all.iter().zip(nodes).map(with_own).collect()
}

/// Whether a text can be a name in `/etc/hosts`, and is not one that every machine has for itself.
fn is_name(name: &str) -> bool {
    let is_of_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    !name.is_empty()
        && name.bytes().all(is_of_name)
        && !["localhost", "localhost.localdomain"].contains(&name)
}

fn mac(rank: u32) -> Mac {
    let [_, high, middle, low] = rank.to_be_bytes();
    // A local address of one machine.
    [0x02, 0x63, 0x6b, high, middle, low]
}

fn address(subnet: Ipv4Net, rank: u32) -> Ipv4Addr {
    (u32::from(subnet.network()) + 1 + rank).into()
}

fn is_inside(subnet: Ipv4Net, address: &IpAddr) -> bool {
    matches!(address, IpAddr::V4(address) if subnet.contains(address))
}

impl JobNetwork {
    /// Makes the network at this node, whose machine has the address `local`.
    ///
    /// # Errors
    /// The kernel has no VXLAN, rights are missing, or the addresses are in use.
    pub(super) fn make(
        plan: &NetworkPlan,
        log: &str,
        rank: u32,
        (local, port): (IpAddr, u16),
        hostname: &str,
    ) -> Result<Self> {
        let subnet = plan.subnet;
        // The job may know it, so it stays.
        let interface_name = format!("ckpt{:08x}", number(log) >> 32);
        await_name(&interface_name)?;
        let others = diag::addresses().context("cannot list the addresses of this machine")?;
        if let Some(taken) = others.iter().find(|other| is_inside(subnet, other)) {
            bail!(bad_input(anyhow!(
                "this machine has the address {taken}, and the network of the job would be {subnet}: choose other addresses with --network-range, on all nodes"
            )));
        }
        let most = diag::most_packet_bytes(local).context("cannot look at the interfaces of this machine")?;
        let layout = Layout {
            name: interface_name.clone(),
            number: plan.number,
            port,
            local,
            most_packet_bytes: most.unwrap_or(USUAL_PACKET_BYTES),
            mac: mac(rank),
            address: address(subnet, rank),
            prefix: subnet.prefix_len(),
        };
        let interface = Interface::make(&layout).map_err(|error| {
            anyhow!("cannot make the network of the job (VXLAN, UDP port {port}): {error}. This needs CAP_NET_ADMIN and the kernel module vxlan")
        })?;
        let machines: BTreeMap<_, _> =
            plan.machines.iter().filter(|(other, _)| *other != rank).copied().collect();
        for (other, machine) in &machines {
            if machine.is_ipv4() != local.is_ipv4() {
                bail!(
                    "node {other} is at {machine} and this node at {local}: the network of a job is either over IPv4 or over IPv6"
                );
            }
            let added = interface.add(address(subnet, *other), mac(*other), *machine);
            added.with_context(|| format!("cannot add node {other} to the network of the job"))?;
        }
        let (names, hostname) = (plan.names.clone(), hostname.to_owned());
        let part = Mutex::new(PartNetwork { subnet: subnet.to_string(), hostname, names });
        Ok(Self { rank, _interface: interface, interface_name, subnet, machines, part })
    }

    /// Checks that packets reach the other nodes, which may still make their interfaces, until `is_over`.
    ///
    /// # Errors
    /// Names the node that does not answer.
    pub(super) fn check(&self, port: u16, is_over: &(dyn Fn() -> bool + Sync)) -> Result<()> {
        let deadline = Instant::now() + NODE_REACH_LIMIT;
        let others: Vec<_> = self.machines.iter().collect();
        let check = |(other, machine): &(&u32, &IpAddr)| {
            let reached = reach(address(self.subnet, **other), deadline, is_over);
            reached.map_err(|error| {
                anyhow!(
                    "node {other} at {machine} does not answer on the network of the job ({error}): is a firewall between the machines, which have to let UDP port {port} through, or on that machine, which has to let the job's connections through on the interface {}?",
                    self.interface_name
                )
            })
        };
        for some in others.chunks(CHECKS_AT_ONCE) {
            std::thread::scope(|scope| {
                let all: Vec<_> = some.iter().map(|one| scope.spawn(move || check(one))).collect();
                all.into_iter().try_for_each(|one| one.join().map_err(|_| anyhow!("a check has panicked"))?)
            })?;
        }
        Ok(())
    }

    /// What the job sees of it.
    #[must_use]
    pub fn part(&self) -> PartNetwork {
        self.part.lock().clone()
    }

    /// The job that is resumed keeps what it has seen.
    ///
    /// # Errors
    /// Bad input: it began without this network, or has other addresses.
    pub fn keep(&self, manifest: &Manifest) -> Result<()> {
        let Some(part) = manifest.part.as_ref().and_then(|part| part.network.as_ref()) else {
            bail!(bad_input(anyhow!(
                "the job began without --network job, and its connections have the addresses of its machines: use --network host"
            )));
        };
        if part.subnet != self.subnet.to_string() {
            bail!(bad_input(anyhow!(
                "the job has the addresses {}, and --network-range gives {}: use the --network-range with which it began",
                part.subnet,
                self.subnet
            )));
        }
        *self.part.lock() = part.clone();
        Ok(())
    }

    /// The names of machines for the job.
    ///
    /// # Errors
    /// When the machine's own names cannot be read.
    pub fn names(&self) -> Result<Names> {
        let system = match fs::read_to_string("/etc/hosts") {
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            other => other.context("cannot read /etc/hosts")?,
        };
        let part = self.part();
        let addresses = (0..).map(|rank| address(self.subnet, rank));
        let of_nodes = addresses.zip(&part.names).collect::<Vec<_>>();
        Ok(Names { hosts: hosts(&of_nodes, &system), hostname: part.hostname })
    }

    /// Variables for a job that begins; `get` gives those of the user.
    #[must_use]
    pub fn variables(&self, get: impl Fn(&str) -> Option<OsString>) -> Vec<(String, OsString)> {
        variables(&self.interface_name, get, |machine| {
            let given = machine.parse().ok()?;
            self.rank_at(given).map(|rank| address(self.subnet, rank))
        })
    }

    /// The node whose machine has this address.
    fn rank_at(&self, machine: IpAddr) -> Option<u32> {
        let other = self.machines.iter().find(|(_, known)| **known == machine).map(|(rank, _)| *rank);
        other.or_else(|| diag::addresses().is_ok_and(|own| own.contains(&machine)).then_some(self.rank))
    }

    /// Says once that connections of the job with these addresses of its own do not use the network.
    pub fn warn_of_others(part: &PartNetwork, addresses: &[IpAddr]) {
        static SAID: Once = Once::new();
        let Ok(subnet) = part.subnet.parse::<Ipv4Net>() else { return };
        if let Some(outside) = addresses.iter().find(|address| !is_inside(subnet, address)) {
            SAID.call_once(|| {
                tracing::warn!(
                    "the job has connections from {outside}, an address of this machine, although it has a network of its own (--network job): its snapshots can be resumed on machines with that address only. Use the names of the nodes, such as ckpt-node-0, in place of addresses"
                );
            });
        }
    }

    /// The addresses of all nodes.
    pub(super) fn addresses(plan: &NetworkPlan, nodes: u32) -> impl Iterator<Item = IpAddr> {
        (0..nodes).map(move |rank| address(plan.subnet, rank).into())
    }
}

/// Waits until no interface has this name.
fn await_name(name: &str) -> Result<()> {
    let deadline = Instant::now() + NODE_INTERFACE_LIMIT;
    loop {
        // The start has warned of those that cannot be deleted.
        delete_left();
        if !vxlan::exists(name).with_context(|| format!("cannot look for the interface {name}"))? {
            return Ok(());
        }
        if Instant::now() >= deadline {
            bail!(
                "this machine has an interface {name}, as the network of the job would: end the ckpt-run that has it, or delete it (`ip link delete {name}`) if none has"
            );
        }
        std::thread::sleep(NODE_RETRY_INTERVAL);
    }
}

/// Deletes the interfaces that killed launchers, of any job, have left in this network namespace. Those of launchers that run
/// stay. Warns of those that cannot be deleted.
pub fn delete_left_interfaces() {
    for problem in delete_left() {
        tracing::warn!("{problem}");
    }
}

/// Returns what went wrong.
fn delete_left() -> Vec<String> {
    match vxlan::left() {
        Ok(all) => delete_each(all, Left::delete),
        Err(error) => vec![format!("network interfaces that launchers have left cannot be listed: {error}")],
    }
}

fn delete_each<T>(all: Vec<(String, io::Result<T>)>, delete: impl Fn(T) -> io::Result<()>) -> Vec<String> {
    let mut problems = Vec::new();
    for (name, left) in all {
        match left.and_then(&delete) {
            Ok(()) => tracing::info!(
                "the network interface {name}, which a ckpt-run that was killed had left, is deleted"
            ),
            Err(error) => problems.push(format!(
                "the network interface {name}, which a ckpt-run that was killed has left, cannot be deleted: {error}. This needs CAP_NET_ADMIN; as root: `ip link delete {name}`"
            )),
        }
    }
    problems
}

/// The names of these interfaces.
///
/// # Errors
/// When the kernel does not list interfaces.
pub fn left_interfaces() -> io::Result<Vec<String>> {
    Ok(vxlan::left()?.into_iter().filter(|(_, left)| left.is_ok()).map(|(name, _)| name).collect())
}

/// `inside` gives the address in the network of a node whose machine has this address.
fn variables(
    interface: &str,
    get: impl Fn(&str) -> Option<OsString>,
    inside: impl Fn(&str) -> Option<Ipv4Addr>,
) -> Vec<(String, OsString)> {
    let addresses = ADDRESS_VARIABLES.into_iter().filter_map(|name| {
        let inside = inside(get(name)?.to_str()?)?;
        Some((name, inside.to_string()))
    });
    let interfaces = INTERFACE_VARIABLES.into_iter().map(|name| (name, interface.to_owned()));
    let mut variables = Vec::new();
    for (name, value) in interfaces.chain(addresses) {
        if let Some(given) = get(name).filter(|given| *given != *value) {
            tracing::info!("{name}={} is replaced by {value}, for --network job", given.display());
        }
        variables.push((name.to_owned(), value.into()));
    }
    variables
}

/// Waits until a machine answers, whatever it is.
fn reach(address: Ipv4Addr, deadline: Instant, is_over: &(dyn Fn() -> bool + Sync)) -> io::Result<()> {
    let to = SocketAddr::from((address, UNUSED_PORT));
    loop {
        match TcpStream::connect_timeout(&to, NODE_REACH_TRY) {
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => return Ok(()),
            Err(error) if Instant::now() >= deadline || is_over() => return Err(error),
            Err(_) => std::thread::sleep(NODE_FIRST_RETRY_INTERVAL),
        }
    }
}

/// `/etc/hosts` with the nodes; lines of the machine's own file lose the names of nodes.
fn hosts(nodes: &[(Ipv4Addr, &Vec<String>)], system: &str) -> String {
    let mut text = String::from("# The nodes of the job, for ckpt-run --network job\n");
    for (address, names) in nodes {
        text.push_str(&format!("{address} {}\n", names.join(" ")));
    }
    let is_of_node = |name: &str| nodes.iter().any(|(_, names)| names.iter().any(|one| one == name));
    for line in system.lines() {
        let (entry, comment) = line.split_once('#').map_or((line, None), |(entry, text)| (entry, Some(text)));
        let mut words = entry.split_ascii_whitespace();
        let address = words.next();
        let (removed, kept): (Vec<_>, Vec<_>) = words.partition(|name| is_of_node(name));
        match (address, removed.is_empty(), kept.is_empty(), comment) {
            (Some(address), false, false, _) => text.push_str(&format!("{address} {}", kept.join(" "))),
            (_, false, true, _) => continue,
            _ => text.push_str(line),
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn join(rank: u32, hostname: &str) -> Join {
        Join { hostname: hostname.into(), engine_name: None, ..Join::of_machine("job", rank, 2, None) }
    }

    fn coordinator(host: &str) -> Coordinator {
        Coordinator { hosts: vec![host.into()], port: 7070 }
    }

    #[test]
    fn a_job_keeps_its_addresses() {
        let range: Ipv4Net = "198.18.0.0/15".parse().unwrap();
        for (nodes, prefix) in [(2, 30), (3, 29), (6, 29), (7, 28), (1024, 21)] {
            let chosen = subnet(range, "000001-a", nodes).unwrap();
            assert_eq!((chosen.prefix_len(), subnet(range, "000001-a", nodes).unwrap()), (prefix, chosen));
            let last = address(chosen, u32::try_from(nodes).unwrap() - 1);
            assert!(
                range.contains(&chosen) && chosen.contains(&last) && last != chosen.broadcast(),
                "{chosen}"
            );
        }
        let all: BTreeSet<_> = (0..50).map(|log| subnet(range, &log.to_string(), 2).unwrap()).collect();
        assert!(all.len() > 40, "{all:?}");
        let small = "10.0.0.0/30".parse().unwrap();
        assert_eq!(subnet(small, "a", 2).unwrap(), small);
        assert!(subnet(small, "a", 3).unwrap_err().to_string().contains("a /29 is needed"));
    }

    #[test]
    fn each_node_has_names_that_no_other_has() {
        let nodes =
            [join(0, "a.example"), Join { engine_name: Some("n1".into()), ..join(1, "b") }, join(2, "b")];
        let all = names(&nodes.iter().collect::<Vec<_>>(), &coordinator("head"));
        let expected =
            [&["ckpt-node-0", "a", "a.example", "head"][..], &["ckpt-node-1", "n1"], &["ckpt-node-2"]];
        assert_eq!(all, expected);
        let hostile = [join(0, "a\n10.0.0.1 b"), join(1, "localhost")];
        let all = names(&hostile.iter().collect::<Vec<_>>(), &coordinator("10.0.0.1"));
        assert_eq!(all, [["ckpt-node-0"], ["ckpt-node-1"]]);
    }

    #[test]
    fn the_machines_own_file_loses_the_names_of_nodes() {
        let names = [vec!["ckpt-node-0".to_owned(), "a".to_owned()], vec!["ckpt-node-1".to_owned()]];
        let nodes: Vec<_> =
            [[198, 18, 0, 1], [198, 18, 0, 2]].map(Ipv4Addr::from).into_iter().zip(&names).collect();
        let system =
            "127.0.0.1 localhost\n127.0.1.1 a.example a # own\n10.0.0.1\ta\n# a comment\n\n10.0.0.9 c";
        let expected = "198.18.0.1 ckpt-node-0 a\n198.18.0.2 ckpt-node-1\n127.0.0.1 localhost\n127.0.1.1 a.example\n# a comment\n\n10.0.0.9 c\n";
        assert_eq!(hosts(&nodes, system).split_once('\n').unwrap().1, expected);
    }

    #[test]
    fn an_interface_that_stays_does_not_keep_the_others() {
        let all = vec![
            ("a".to_owned(), Err(io::Error::other("x"))),
            ("b".to_owned(), Ok(1)),
            ("c".to_owned(), Ok(2)),
        ];
        let tried = Mutex::new(Vec::new());
        let problems = delete_each(all, |left| {
            tried.lock().push(left);
            if left == 1 { Err(io::Error::other("refused")) } else { Ok(()) }
        });
        assert_eq!(tried.into_inner(), [1, 2]);
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert!(problems[1].contains("interface b,") && problems[1].contains("refused"), "{problems:?}");
    }

    /// Packets of a part that was cut off, and has not ended, reach nobody.
    #[test]
    fn each_start_has_a_number_of_its_own() {
        let (own, other) = (join(0, "a"), join(1, "b"));
        let nodes = [(&own, [0; 4].into()), (&other, [10, 0, 0, 2].into())];
        let plan = || plan("10.9.0.0/16".parse().unwrap(), "a", &coordinator("a"), &nodes).unwrap();
        let (first, second) = (plan(), plan());
        assert_eq!(first.subnet, second.subnet);
        assert_ne!(first.number, second.number);
        assert!(first.number < 1 << 24 && second.number < 1 << 24);
    }

    #[test]
    fn libraries_use_the_network() {
        let get = |name: &str| match name {
            "GLOO_SOCKET_IFNAME" => Some("eth0".into()),
            "MASTER_ADDR" => Some("10.0.0.1".into()),
            "PET_MASTER_ADDR" => Some("head".into()),
            _ => None,
        };
        let inside = |machine: &str| (machine == "10.0.0.1").then_some(Ipv4Addr::new(198, 18, 0, 1));
        let expected = [
            ("GLOO_SOCKET_IFNAME", "ckpt1"),
            ("NCCL_SOCKET_IFNAME", "ckpt1"),
            ("TP_SOCKET_IFNAME", "ckpt1"),
            ("MASTER_ADDR", "198.18.0.1"),
        ];
        let expected = expected.map(|(name, value)| (name.to_owned(), OsString::from(value)));
        assert_eq!(variables("ckpt1", get, inside), expected);
    }

    #[test]
    fn two_nodes_on_a_machine_are_refused() {
        let own = Join { addresses: ["10.0.0.1".parse().unwrap()].into(), ..join(0, "a") };
        let (one, two) = (join(1, "b"), join(2, "c"));
        let plan = |machines: [&str; 2]| {
            let machines = machines.map(|machine| machine.parse().unwrap());
            let nodes = [(&own, [0; 4].into()), (&one, machines[0]), (&two, machines[1])];
            plan("10.9.0.0/16".parse().unwrap(), "a", &coordinator("a"), &nodes)
        };
        assert_eq!(plan(["10.0.0.2", "10.0.0.3"]).unwrap().machines.len(), 2);
        for machines in [["10.0.0.2", "10.0.0.2"], ["10.0.0.1", "10.0.0.2"], ["10.0.0.2", "127.0.0.1"]] {
            assert!(plan(machines).unwrap_err().to_string().contains("machine of its own"), "{machines:?}");
        }
    }
}
