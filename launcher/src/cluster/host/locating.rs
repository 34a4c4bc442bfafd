//! Which addresses are those of nodes: node 0 knows. A node asks when a connection of its part stands still, or was closed
//! right before a cut, since one to any other machine is none of the snapshot's.

use super::{Host, Message};
use std::net::IpAddr;

impl Host {
    /// A node asks.
    pub(super) fn locate(&self, rank: u32, address: IpAddr) {
        let is_node = self.addresses.contains(&address.to_canonical());
        match self.links.get(&rank) {
            Some(link) => link.send(Message::Located { address, is_node }),
            None => self.located(address, is_node),
        }
    }

    /// Node 0 has answered.
    pub(super) fn located(&self, address: IpAddr, is_node: bool) {
        if let Some(gate) = &self.gate {
            gate.located(address, is_node);
        }
    }
}
