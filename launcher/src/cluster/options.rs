//! The options of a job on several nodes.

use super::connection::ClusterKey;
use ckpt_snapshot::RelPath;
use ckpt_snapshot::codec::{Key, KeyError};
use ckpt_snapshot::medium::{Medium, read_all};
use ipnet::Ipv4Net;
use serde::Deserialize;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// The key's name in a store.
const KEY_FILE: &str = "cluster.key";
const KEY_BYTES: u64 = 32;
const CONTEXT: &str = "ckpt-run nodes 1: key of a cluster";

impl ClusterKey {
    /// Reads the key file: as that of an encrypted store.
    ///
    /// # Errors
    /// When it cannot be read, is readable by others, or holds no key.
    pub fn from_file(path: &Path) -> Result<Self, KeyError> {
        Ok(Self::of_encrypted(&Key::from_file(path)?))
    }

    /// The key in the directory of a store, which all nodes share. The first launcher makes it, readable for its user only.
    ///
    /// # Errors
    /// When it can be neither made nor read.
    pub fn of_store(dir: &Path) -> io::Result<Self> {
        let path = dir.join(KEY_FILE);
        if !path.exists() {
            make_key(dir, &path)?;
        }
        Self::from_file(&path).map_err(io::Error::other)
    }

    /// The key among the objects of a store that all nodes share, made as [`Self::of_store`]: who can read the store has it.
    ///
    /// # Errors
    /// When it can be neither made nor read.
    pub fn of_objects(medium: &dyn Medium) -> io::Result<Self> {
        let name = RelPath::new(KEY_FILE).expect("a plain path");
        let read = || read_all(medium, &name, KEY_BYTES);
        let key = match read() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                match medium.put_new(&name, &random_key()?) {
                    Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                    _ => read()?,
                }
            }
            key => key?,
        };
        if key.len() as u64 != KEY_BYTES {
            let name = medium.describe(&name);
            return Err(io::Error::new(io::ErrorKind::InvalidData, format!("{name} is damaged: delete it")));
        }
        Ok(Self(blake3::derive_key(CONTEXT, &key)))
    }

    /// The key of nodes that have this key of an encrypted store: that of the same file as [`Self::from_file`].
    #[must_use]
    pub fn of_encrypted(key: &Key) -> Self {
        Self(key.for_purpose(CONTEXT))
    }
}

fn random_key() -> io::Result<[u8; KEY_BYTES as usize]> {
    let mut key = [0; KEY_BYTES as usize];
    File::open("/dev/urandom")?.read_exact(&mut key)?;
    Ok(key)
}

/// Makes a key file, complete or not at all. One that another launcher makes at the same time stays.
fn make_key(dir: &Path, path: &Path) -> io::Result<()> {
    let key = random_key()?;
    let unique = key.iter().take(8).map(|byte| format!("{byte:02x}")).collect::<String>();
    let unfinished = dir.join(format!("{KEY_FILE}.{unique}"));
    let write = || {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&unfinished)?;
        // Whatever the umask was.
        file.set_permissions(Permissions::from_mode(0o600))?;
        file.write_all(&key)?;
        file.sync_all()?;
        match fs::hard_link(&unfinished, path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(()),
        }
    };
    let written = write();
    let _ = fs::remove_file(&unfinished);
    written
}

/// Where node 0 listens: at the first of these hosts that is its machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Coordinator {
    /// Names or addresses: of the machine of node 0, then of those of spares that can take its place.
    pub hosts: Vec<String>,
    /// The TCP port.
    pub port: u16,
}

impl Coordinator {
    /// Parses `HOST[,HOST…]:PORT`; an IPv6 address is in brackets.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (hosts, port) = text.rsplit_once(':')?;
        let port = port.parse().ok().filter(|port| *port != 0)?;
        let parse = |host: &str| {
            let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
            let is_name = match bare {
                Some(bare) => !bare.is_empty(),
                None => !host.is_empty() && !host.contains(':'),
            };
            is_name.then(|| bare.unwrap_or(host).to_owned())
        };
        let hosts = hosts.split(',').map(parse).collect::<Option<_>>()?;
        Some(Self { hosts, port })
    }

    /// Whether spares can take the place of node 0.
    #[must_use]
    pub fn may_move(&self) -> bool {
        self.hosts.len() > 1
    }
}

impl std::fmt::Display for Coordinator {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let host = |host: &String| if host.contains(':') { format!("[{host}]") } else { host.clone() };
        let hosts: Vec<_> = self.hosts.iter().map(host).collect();
        write!(out, "{}:{}", hosts.join(","), self.port)
    }
}

/// The options as they were given; [`NodeOptions::complete`] adds what an engine says.
#[derive(Clone, Debug, Default)]
pub struct NodeOptions {
    /// Number of nodes; `None` without an engine, and 1, is a job on this machine alone.
    pub nodes: Option<u32>,
    /// Which node this one is.
    pub rank: Option<u32>,
    /// Where node 0 listens.
    pub coordinator: Option<Coordinator>,
    /// The key that all nodes share.
    pub key: Option<ClusterKey>,
    /// A node that is not heard for this long is lost.
    pub timeout: Duration,
    /// From which addresses those of a network of the job's own are chosen.
    pub network_range: Ipv4Net,
    /// The engine that has completed the options.
    pub engine: Option<&'static str>,
    /// What the launchers do that are left when one is lost.
    pub on_loss: OnNodeLoss,
    /// Whether it was started as another node than that of `rank`, or as a spare.
    pub is_moved: bool,
    /// Its number as a spare.
    pub spare: u32,
    /// This launcher starts again as the node of this rank, see [`super::Rejoin`].
    pub rejoins_as: Option<u32>,
    /// In a run that had begun then.
    pub has_begun: bool,
    /// With the memory of the launcher before.
    pub memory: Option<Arc<OwnedFd>>,
    /// How many other nodes have each snapshot in memory.
    pub replicas: u32,
}

/// What the launchers do that are left when one is lost, with its machine or without.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnNodeLoss {
    /// They end: who has started them starts all of them again.
    Exit,
    /// They start again, and wait until all nodes are there.
    Wait,
    /// They wait if there is a spare, and otherwise end.
    #[default]
    Auto,
}

impl NodeOptions {
    /// Number of nodes of a job on several.
    #[must_use]
    pub fn several(&self) -> Option<u32> {
        self.nodes.filter(|nodes| *nodes > 1)
    }

    /// Whether this launcher was started as a spare.
    #[must_use]
    pub fn is_spare(&self) -> bool {
        matches!((self.nodes, self.rank), (Some(nodes), Some(rank)) if rank >= nodes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckpt_snapshot::medium::DirMedium;

    #[test]
    fn the_first_launcher_makes_the_key_of_a_store() {
        let dir = tempfile::tempdir().unwrap();
        let make = || ClusterKey::of_store(dir.path()).unwrap().0;
        let keys: Vec<_> = std::thread::scope(|scope| {
            let all: Vec<_> = (0..8).map(|_| scope.spawn(make)).collect();
            all.into_iter().map(|one| one.join().unwrap()).collect()
        });
        assert!(keys.iter().all(|key| *key == keys[0]));
        let path = dir.path().join(KEY_FILE);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing unfinished is left");
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        let error = ClusterKey::of_store(dir.path()).unwrap_err().to_string();
        assert!(error.contains("other users have access"), "{error}");
    }

    #[test]
    fn the_first_launcher_makes_the_key_of_a_store_of_objects() {
        let dir = tempfile::tempdir().unwrap();
        let medium = DirMedium::new(dir.path().join("a"));
        let make = || ClusterKey::of_objects(&medium).unwrap().0;
        let key = make();
        assert_eq!(key, make());
        assert_ne!(key, ClusterKey::of_objects(&DirMedium::new(dir.path().join("b"))).unwrap().0);
        fs::write(dir.path().join("a").join(KEY_FILE), "short").unwrap();
        assert!(ClusterKey::of_objects(&medium).unwrap_err().to_string().contains("is damaged"));
    }

    #[test]
    fn an_address_has_a_host_and_a_port() {
        for text in ["node0:7070", "10.0.0.1:1", "[fd00::1]:7070", "node0,10.0.0.4,[fd00::1]:7070"] {
            assert_eq!(Coordinator::parse(text).unwrap().to_string(), text);
        }
        for text in
            ["node0", ":7070", "node0:", "node0:0", "fd00::1:7070", "node0:70700", "a,:7070", "[]:7070"]
        {
            assert_eq!(Coordinator::parse(text), None, "{text}");
        }
    }
}
