//! The packet rule: while a cut is made, the kernel drops the packets of the job's TCP connections to other machines; while
//! half-closed connections are restored, it drops the job's resets.
//!
//! The rule is an nftables table of its own, with the job's local ports. Packets of other programs and of ckpt-run's own
//! connections are not affected, in a cut those of the loopback interface neither. The table is owned by a netlink socket of
//! this process: when the process dies in whatever way, the kernel removes the table.

use super::netlink::{Attributes, Batch, Socket};
use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

const NEW_TABLE: u16 = 0;
const DELETE_TABLE: u16 = 2;
const NEW_CHAIN: u16 = 3;
const NEW_RULE: u16 = 6;
const NEW_SET: u16 = 9;
const NEW_ELEMENTS: u16 = 12;
const CREATE: u16 = 0x400;
const APPEND: u16 = 0x800;

/// The table ends with the socket that has made it (Linux 5.12).
const OWNED: u32 = 2;
const SET: &str = "ports";
/// nft's number for ports; the kernel does not read it.
const TYPE_PORT: u32 = 13;
/// Before everything else, connection tracking included.
const PRIORITY: i32 = -300;
const ACCEPT: u32 = 1;
const LOOPBACK_TYPE: u16 = 772;
/// An attribute's length has 16 bits.
const ELEMENTS_PER_REQUEST: usize = 2000;

/// A direction: name of the chain, netfilter's hook, meta key of the interface's type, offset of the job's port in the TCP
/// header.
const DIRECTIONS: [(&str, u32, u32, u32); 2] = [("in", 0, 8, 2), ("out", 3, 9, 0)];

/// Which packets are dropped.
#[derive(Clone, Copy)]
enum Matched {
    /// All of TCP, in both directions, that are not of a loopback interface.
    BeyondLoopback,
    /// TCP resets that leave a socket, or come from where there is none.
    ResetsSent,
}

/// A rule that is in place. Dropped, it is removed.
#[derive(Debug)]
pub struct PacketRule {
    socket: Socket,
    table: String,
    ports: BTreeSet<u16>,
}

impl PacketRule {
    /// Drops the TCP packets with these local ports in the network namespace of the calling thread, except on loopback
    /// interfaces.
    ///
    /// # Errors
    /// When the kernel refuses: rights, or nftables with owned tables are missing.
    pub fn put(ports: &BTreeSet<u16>) -> io::Result<Self> {
        Self::of(ports, Matched::BeyondLoopback)
    }

    /// Drops the TCP resets that are sent from these local ports in the network namespace of the calling thread.
    ///
    /// # Errors
    /// As for [`Self::put`].
    pub fn against_resets(ports: &BTreeSet<u16>) -> io::Result<Self> {
        Self::of(ports, Matched::ResetsSent)
    }

    fn of(ports: &BTreeSet<u16>, matched: Matched) -> io::Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let table = format!("ckpt-run-{}-{number}", std::process::id());
        let socket = Socket::open()?;
        socket.perform(&batch(&table, ports, matched))?;
        Ok(Self { socket, table, ports: ports.clone() })
    }

    /// The local ports.
    #[must_use]
    pub fn ports(&self) -> &BTreeSet<u16> {
        &self.ports
    }
}

impl Drop for PacketRule {
    fn drop(&mut self) {
        // A child that is just being started may still hold the socket: its end alone could come late.
        let mut batch = Batch::default();
        batch.request(DELETE_TABLE, 0, &Attributes::default().text(1, &self.table));
        if let Err(error) = self.socket.perform(&batch) {
            tracing::debug!("the packet rule ends with its socket: {error}");
        }
    }
}

fn batch(table: &str, ports: &BTreeSet<u16>, matched: Matched) -> Batch {
    let mut batch = Batch::default();
    batch.request(NEW_TABLE, CREATE, &Attributes::default().text(1, table).number(2, OWNED));
    let set = Attributes::default().text(1, table).text(2, SET).number(3, 0).number(4, TYPE_PORT);
    batch.request(NEW_SET, CREATE, &set.number(5, 2).number(10, 1));
    let ports: Vec<_> = ports.iter().copied().collect();
    for ports in ports.chunks(ELEMENTS_PER_REQUEST) {
        let element = |port: &u16| {
            let key = Attributes::default().bytes(1, &port.to_be_bytes());
            Attributes::default().nested(1, &key)
        };
        let elements = ports.iter().fold(Attributes::default(), |all, port| all.nested(1, &element(port)));
        let elements = Attributes::default().text(1, table).text(2, SET).nested(3, &elements).number(4, 1);
        batch.request(NEW_ELEMENTS, CREATE, &elements);
    }
    let directions = match matched {
        Matched::BeyondLoopback => &DIRECTIONS[..],
        Matched::ResetsSent => &DIRECTIONS[1..],
    };
    for &(chain, hook, interface, port) in directions {
        let place = Attributes::default().number(1, hook).number(2, PRIORITY.cast_unsigned());
        let new = Attributes::default().text(1, table).text(3, chain).nested(4, &place);
        batch.request(NEW_CHAIN, CREATE, &new.number(5, ACCEPT).text(7, "filter"));
        let expressions = expressions(matched, interface, port);
        let rule = Attributes::default().text(1, table).text(2, chain).nested(4, &expressions);
        batch.request(NEW_RULE, CREATE | APPEND, &rule);
    }
    batch
}

/// `meta l4proto tcp, tcp dport @ports`, with `meta iiftype != loopback` or `tcp flags rst`, and `drop`.
fn expressions(matched: Matched, interface: u32, port: u32) -> Attributes {
    const L4PROTO: u32 = 16;
    const TCP: u8 = 6;
    const TRANSPORT_HEADER: u32 = 2;
    const FLAGS_OFFSET: u32 = 13;
    const RESET: u8 = 4;
    const EQUAL: u32 = 0;
    const NOT_EQUAL: u32 = 1;
    let none = Attributes::default;
    let meta = |key| ("meta", none().number(1, 1).number(2, key));
    let compare =
        |how, value: &[u8]| ("cmp", none().number(1, 1).number(2, how).nested(3, &none().bytes(1, value)));
    let payload = |offset, bytes| {
        ("payload", none().number(1, 1).number(2, TRANSPORT_HEADER).number(3, offset).number(4, bytes))
    };
    let mask = none().number(1, 1).number(2, 1).number(3, 1);
    let mask = mask.nested(4, &none().bytes(1, &[RESET])).nested(5, &none().bytes(1, &[0]));
    let drop = none().nested(2, &none().number(1, 0));
    let mut all = vec![meta(L4PROTO), compare(EQUAL, &[TCP])];
    all.extend(match matched {
        Matched::BeyondLoopback => vec![meta(interface), compare(NOT_EQUAL, &LOOPBACK_TYPE.to_ne_bytes())],
        Matched::ResetsSent => vec![payload(FLAGS_OFFSET, 1), ("bitwise", mask), compare(NOT_EQUAL, &[0])],
    });
    all.extend([
        payload(port, 2),
        ("lookup", none().text(1, SET).number(2, 1).number(4, 1)),
        ("immediate", none().number(1, 0).nested(2, &drop)),
    ]);
    all.iter().fold(none(), |list, (name, data)| list.nested(1, &none().text(1, name).nested(2, data)))
}
