//! The options of a job on several nodes.

use super::connection::ClusterKey;
use ckpt_snapshot::codec::{Key, KeyError};
use std::path::Path;

const CONTEXT: &str = "ckpt-run nodes 1: key of a cluster";

impl ClusterKey {
    /// Reads the key file: as that of an encrypted store.
    ///
    /// # Errors
    /// When it cannot be read, is readable by others, or holds no key.
    pub fn from_file(path: &Path) -> Result<Self, KeyError> {
        Ok(Self(Key::from_file(path)?.for_purpose(CONTEXT)))
    }
}

/// Where node 0 listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Coordinator {
    /// A name or an address.
    pub host: String,
    /// The TCP port.
    pub port: u16,
}

impl Coordinator {
    /// Parses `HOST:PORT`; an IPv6 address is in brackets.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        let port = port.parse().ok().filter(|port| *port != 0)?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let host = bare.unwrap_or(host);
        let is_name = !host.is_empty() && (bare.is_some() || !host.contains(':'));
        is_name.then(|| Self { host: host.to_owned(), port })
    }
}

impl std::fmt::Display for Coordinator {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.host.contains(':') {
            write!(out, "[{}]:{}", self.host, self.port)
        } else {
            write!(out, "{}:{}", self.host, self.port)
        }
    }
}

/// The options as they were given. [`NodeOptions::nodes`] of 1 is a job on this machine alone.
#[derive(Clone, Debug, Default)]
pub struct NodeOptions {
    /// Number of nodes.
    pub nodes: u32,
    /// Which node this one is.
    pub rank: Option<u32>,
    /// Where node 0 listens.
    pub coordinator: Option<Coordinator>,
    /// The key that all nodes share.
    pub key: Option<ClusterKey>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_a_host_and_a_port() {
        for text in ["node0:7070", "10.0.0.1:1", "[fd00::1]:7070"] {
            assert_eq!(Coordinator::parse(text).unwrap().to_string(), text);
        }
        for text in ["node0", ":7070", "node0:", "node0:0", "fd00::1:7070", "node0:70700"] {
            assert_eq!(Coordinator::parse(text), None, "{text}");
        }
    }
}
