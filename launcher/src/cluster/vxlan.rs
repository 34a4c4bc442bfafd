//! A VXLAN interface: an Ethernet whose frames go to the other machines in UDP packets. Each machine is told where each other
//! one is; nothing is learned and nothing is broadcast. Numbers are those of the kernel's `linux/rtnetlink.h`,
//! `linux/if_link.h`, `linux/if_addr.h` and `linux/neighbour.h`.

use super::diag::number_of;
use super::netlink::{Attributes, Socket};
use rustix::net::{AddressFamily, SocketType, netdevice};
use std::io;
use std::net::{IpAddr, Ipv4Addr};

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
}

impl Interface {
    /// Makes it, and brings it up.
    ///
    /// # Errors
    /// When the kernel refuses: it has no VXLAN, or rights are missing.
    pub(super) fn make(layout: &Layout) -> io::Result<Self> {
        let socket = Socket::of(None)?;
        let none = Attributes::default;
        let local = match layout.local {
            IpAddr::V4(address) => none().bytes(IFLA_VXLAN_LOCAL, &address.octets()),
            IpAddr::V6(address) => none().bytes(IFLA_VXLAN_LOCAL6, &address.octets()),
        };
        let data = local
            .bytes(IFLA_VXLAN_ID, &layout.number.to_ne_bytes())
            .bytes(IFLA_VXLAN_PORT, &layout.port.to_be_bytes())
            .bytes(IFLA_VXLAN_LEARNING, &[0]);
        let info = none().text(IFLA_INFO_KIND, "vxlan").nested(IFLA_INFO_DATA, &data);
        let around = if layout.local.is_ipv4() { AROUND_V4 } else { AROUND_V6 };
        let mtu = layout.most_packet_bytes.saturating_sub(around).max(LEAST_MTU);
        let link = none()
            .text(IFLA_IFNAME, &layout.name)
            .bytes(IFLA_ADDRESS, &layout.mac)
            .bytes(IFLA_MTU, &mtu.to_ne_bytes())
            .nested(IFLA_LINKINFO, &info);
        socket.call(RTM_NEWLINK, CREATE, &link.after(&link_header(0, IFF_UP)))?;
        let any = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None)?;
        let index = netdevice::name_to_index(any, &layout.name)?;
        // From here on it is deleted if something fails.
        let made = Self { socket, index };
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

/// Deletes the interface of this name, if there is one.
///
/// # Errors
/// The kernel's.
pub(super) fn delete(name: &str) -> io::Result<()> {
    let attributes = Attributes::default().text(IFLA_IFNAME, name);
    match Socket::of(None)?.call(RTM_DELLINK, 0, &attributes.after(&link_header(0, 0))) {
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(()),
        other => other,
    }
}

/// `struct ifinfomsg` of the interface with this number, or of one that is named, with these flags.
fn link_header(index: u32, flags: u32) -> [u8; 16] {
    let mut header = [0; 16];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    header[8..12].copy_from_slice(&flags.to_ne_bytes());
    header[12..].copy_from_slice(&flags.to_ne_bytes());
    header
}
