//! A VXLAN interface: an Ethernet whose frames go to the other machines in UDP packets. Each machine is told where each other
//! one is; nothing is learned and nothing is broadcast. Numbers are those of the kernel's `linux/rtnetlink.h`,
//! `linux/if_link.h`, `linux/if_addr.h` and `linux/neighbour.h`.
//!
//! An interface stays when its launcher is killed. So each has a mark from its first moment, and its launcher has a socket
//! with a name that belongs to it, in the same network namespace. The kernel frees the name when the launcher ends in
//! whatever way: an interface with the mark whose name is free is nobody's.

use super::diag::{RTM_GETLINK, number_of, of_kind};
use super::netlink::{Attributes, Socket, attributes, field};
use rustix::net::{AddressFamily, SocketType, netdevice};
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

const RTM_NEWLINK: u16 = 16;
const RTM_DELLINK: u16 = 17;
const RTM_NEWADDR: u16 = 20;
const RTM_NEWNEIGH: u16 = 28;
/// Make it; an error if it exists.
const CREATE: u16 = 0x400 | 0x200;
/// Make it, or change it.
const CREATE_OR_REPLACE: u16 = 0x400 | 0x100;

const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_LINKINFO: u16 = 18;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
const IFLA_GROUP: u16 = 27;
const IFLA_VXLAN_ID: u16 = 1;
const IFLA_VXLAN_LOCAL: u16 = 4;
const IFLA_VXLAN_LEARNING: u16 = 7;
const IFLA_VXLAN_PORT: u16 = 15;
const IFLA_VXLAN_LOCAL6: u16 = 17;
const IFF_UP: u32 = 1;

const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;

const NDA_DST: u16 = 1;
const NDA_LLADDR: u16 = 2;
const NUD_NOARP: u16 = 0x40;
const NUD_PERMANENT: u16 = 0x80;
/// An entry of the interface itself: the machine behind an Ethernet address.
const NTF_SELF: u8 = 2;

/// What `linkinfo` says of the interfaces here.
const KIND: &str = "vxlan";
/// The mark: their group. It has no effect, and nobody else has a group with this number, which is "ckpt" in ASCII.
const GROUP: u32 = 0x636b_7074;

/// What a frame has around it on its way, bytes: Ethernet, VXLAN, UDP and IP headers.
const AROUND_V4: u32 = 50;
const AROUND_V6: u32 = 70;
/// IPv4 needs interfaces of at least this.
const LEAST_MTU: u32 = 576;

/// An Ethernet address.
pub(super) type Mac = [u8; 6];

/// What an interface is made with.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    pub(super) name: String,
    /// The number of the network, 24 bits.
    pub(super) number: u32,
    /// The UDP port, the same on all machines.
    pub(super) port: u16,
    /// The address of this machine from which packets are sent.
    pub(super) local: IpAddr,
    /// The largest packet of the interface of that address, bytes.
    pub(super) most_packet_bytes: u32,
    pub(super) mac: Mac,
    pub(super) address: Ipv4Addr,
    pub(super) prefix: u8,
}

/// An interface of the network namespace of the calling thread. Dropped, it is deleted.
#[derive(Debug)]
pub(super) struct Interface {
    socket: Socket,
    index: u32,
    /// Says that this launcher runs.
    _owner: UnixDatagram,
}

impl Interface {
    /// Makes it, and brings it up.
    ///
    /// # Errors
    /// When the kernel refuses: it has no VXLAN, or rights are missing.
    pub(super) fn make(layout: &Layout) -> io::Result<Self> {
        let (socket, owner) = (Socket::of(None)?, own(&layout.name, layout.number)?);
        let none = Attributes::default;
        let local = match layout.local {
            IpAddr::V4(address) => none().bytes(IFLA_VXLAN_LOCAL, &address.octets()),
            IpAddr::V6(address) => none().bytes(IFLA_VXLAN_LOCAL6, &address.octets()),
        };
        let data = local
            .bytes(IFLA_VXLAN_ID, &layout.number.to_ne_bytes())
            .bytes(IFLA_VXLAN_PORT, &layout.port.to_be_bytes())
            .bytes(IFLA_VXLAN_LEARNING, &[0]);
        let info = none().text(IFLA_INFO_KIND, KIND).nested(IFLA_INFO_DATA, &data);
        let around = if layout.local.is_ipv4() { AROUND_V4 } else { AROUND_V6 };
        let mtu = layout.most_packet_bytes.saturating_sub(around).max(LEAST_MTU);
        let link = none()
            .text(IFLA_IFNAME, &layout.name)
            .bytes(IFLA_ADDRESS, &layout.mac)
            .bytes(IFLA_MTU, &mtu.to_ne_bytes())
            .bytes(IFLA_GROUP, &GROUP.to_ne_bytes())
            .nested(IFLA_LINKINFO, &info);
        socket.call(RTM_NEWLINK, CREATE, &link.after(&link_header(0, IFF_UP)))?;
        let index = index_of(&layout.name)?;
        // From here on it is deleted if something fails.
        let made = Self { socket, index, _owner: owner };
        // struct ifaddrmsg.
        let mut header = vec![number_of(AddressFamily::INET), layout.prefix, 0, 0];
        header.extend_from_slice(&index.to_ne_bytes());
        let address = layout.address.octets();
        let attributes = none().bytes(IFA_LOCAL, &address).bytes(IFA_ADDRESS, &address);
        made.socket.call(RTM_NEWADDR, CREATE, &attributes.after(&header))?;
        Ok(made)
    }

    /// Says where another machine is: packets to `address` go to `machine`.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn add(&self, address: Ipv4Addr, mac: Mac, machine: IpAddr) -> io::Result<()> {
        let around = match machine {
            IpAddr::V4(machine) => machine.octets().to_vec(),
            IpAddr::V6(machine) => machine.octets().to_vec(),
        };
        let inside = Attributes::default().bytes(NDA_DST, &address.octets()).bytes(NDA_LLADDR, &mac);
        let header = self.neighbour_header(AddressFamily::INET, NUD_PERMANENT, 0);
        // The kernel may have looked for it already: a packet of that machine has come.
        self.socket.call(RTM_NEWNEIGH, CREATE_OR_REPLACE, &inside.after(&header))?;
        let outside = Attributes::default().bytes(NDA_LLADDR, &mac).bytes(NDA_DST, &around);
        let header = self.neighbour_header(AddressFamily::BRIDGE, NUD_PERMANENT | NUD_NOARP, NTF_SELF);
        self.socket.call(RTM_NEWNEIGH, CREATE_OR_REPLACE, &outside.after(&header))
    }

    /// `struct ndmsg`.
    fn neighbour_header(&self, family: AddressFamily, state: u16, flags: u8) -> Vec<u8> {
        let mut header = vec![number_of(family), 0, 0, 0];
        header.extend_from_slice(&self.index.to_ne_bytes());
        header.extend_from_slice(&state.to_ne_bytes());
        header.extend_from_slice(&[flags, 0]);
        header
    }
}

impl Drop for Interface {
    fn drop(&mut self) {
        // By its number: another launcher may have made one of the same name.
        let _ = self.socket.call(RTM_DELLINK, 0, &link_header(self.index, 0));
    }
}

fn index_of(name: &str) -> io::Result<u32> {
    let any = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None)?;
    Ok(netdevice::name_to_index(any, name)?)
}

/// Whether there is an interface of this name, whosever it is.
///
/// # Errors
/// The kernel's.
pub(super) fn exists(name: &str) -> io::Result<bool> {
    match index_of(name) {
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(false),
        other => other.map(|_| true),
    }
}

/// The socket of the launcher that has the interface of this name and number.
///
/// # Errors
/// `AddrInUse`: the launcher runs.
fn own(name: &str, number: u32) -> io::Result<UnixDatagram> {
    UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(format!("ckpt-run: network {name} {number}"))?)
}

/// An interface that a launcher has left which was killed.
#[derive(Debug)]
pub(super) struct Left {
    index: u32,
    /// No launcher can have it meanwhile.
    _owner: UnixDatagram,
}

impl Left {
    /// Deletes it.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn delete(self) -> io::Result<()> {
        match Socket::of(None)?.call(RTM_DELLINK, 0, &link_header(self.index, 0)) {
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(()),
            other => other,
        }
    }
}

/// The interfaces that launchers have left in the network namespace of the calling thread, by name; an error in place of one
/// that cannot be told from those of launchers that run.
///
/// # Errors
/// The kernel's.
pub(super) fn left() -> io::Result<Vec<(String, io::Result<Left>)>> {
    let mut found = Vec::new();
    // Kernels that can pass over interfaces of other kinds do.
    let wanted = Attributes::default()
        .nested(IFLA_LINKINFO, &Attributes::default().text(IFLA_INFO_KIND, KIND))
        .after(&link_header(0, 0));
    for message in Socket::of(None)?.dump(RTM_GETLINK, &wanted)? {
        let Some((index, name, number)) = marked(&message) else { continue };
        match own(&name, number) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            owner => found.push((name, owner.map(|owner| Left { index, _owner: owner }))),
        }
    }
    Ok(found)
}

/// Reads `struct ifinfomsg` and what follows: the index, the name and the number of an interface with the mark.
fn marked(message: &[u8]) -> Option<(u32, String, u32)> {
    let all = attributes(message.get(16..)?);
    let link = attributes(of_kind(&all, IFLA_LINKINFO)?);
    let is_vxlan = of_kind(&link, IFLA_INFO_KIND)?.strip_suffix(&[0])? == KIND.as_bytes();
    let is_marked = field(of_kind(&all, IFLA_GROUP)?, 0).map(u32::from_ne_bytes).ok()? == GROUP;
    let data = attributes(of_kind(&link, IFLA_INFO_DATA)?);
    let number = u32::from_ne_bytes(field(of_kind(&data, IFLA_VXLAN_ID)?, 0).ok()?);
    let name = std::str::from_utf8(of_kind(&all, IFLA_IFNAME)?.strip_suffix(&[0])?).ok()?;
    let index = u32::from_ne_bytes(field(message, 4).ok()?);
    (is_vxlan && is_marked).then(|| (index, name.to_owned(), number))
}

/// `struct ifinfomsg` of the interface with this number, or of one that is named, with these flags.
fn link_header(index: u32, flags: u32) -> [u8; 16] {
    let mut header = [0; 16];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    header[8..12].copy_from_slice(&flags.to_ne_bytes());
    header[12..].copy_from_slice(&flags.to_ne_bytes());
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: &str, group: u32) -> Vec<u8> {
        let data = Attributes::default().bytes(IFLA_VXLAN_ID, &7_u32.to_ne_bytes());
        let link = Attributes::default().text(IFLA_INFO_KIND, kind).nested(IFLA_INFO_DATA, &data);
        Attributes::default()
            .text(IFLA_IFNAME, "ckpt01234567")
            .bytes(IFLA_GROUP, &group.to_ne_bytes())
            .nested(IFLA_LINKINFO, &link)
            .after(&link_header(3, IFF_UP))
    }

    #[test]
    fn only_marked_interfaces_are_found() {
        let ours = message(KIND, GROUP);
        assert_eq!(marked(&ours), Some((3, "ckpt01234567".to_owned(), 7)));
        assert_eq!(marked(&message(KIND, 0)), None);
        assert_eq!(marked(&message("bridge", GROUP)), None);
    }

    #[test]
    fn any_message_is_an_interface_or_left_out() {
        ckpt_test_mutate::mutations(&[message(KIND, GROUP)], |bytes| drop(marked(bytes)));
    }

    #[test]
    fn an_interface_has_one_owner() {
        let (name, number) = (format!("test{}", std::process::id()), 7);
        let owner = own(&name, number).unwrap();
        assert_eq!(own(&name, number).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        own(&name, 8).unwrap();
        drop(owner);
        // A process that another test has just forked may have it for a moment.
        while own(&name, number).is_err() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_name_without_an_interface_is_free() {
        assert!(exists("lo").unwrap());
        assert!(!exists("ckpt-no-such-if").unwrap());
        left().unwrap();
    }
}
