//! Replicas (`--replicas`): each snapshot in memory is also in the memory of the launcher of another node, its holder. If a
//! machine is lost, its part is read from there.
//!
//! ```text
//!   node K                                           node K + 1, the holder (of the last node: node 0)
//!   persist/memory.rs: the tier `replica`
//!    │ a store of packs
//!    ▼
//!   medium.rs  ── requests for objects (wire.rs) ──► holder.rs: a directory of objects in its memory
//!              ── which parts these are ──────────►   tells node 0 when it joins again (join.rs)
//! ```
//!
//! The launchers that are left start again in their own processes, with their memory. Node 0 then knows who has which part, and
//! tells each node where its holder is. A part counts as there if the node or its holder has it.

mod holder;
mod medium;
mod ports;
mod wire;

pub use ports::has_port;

use super::connection::ClusterKey;
use super::messages::{HeldPart, HeldParts, HolderPlace, Holding, Join, Welcome};
use crate::persist::memory::Memory;
use crate::store::tiers::REPLICA;
use anyhow::{Context, Result};
use ckpt_cluster::AttemptId;
use ckpt_snapshot::medium::Medium;
use ckpt_snapshot::{History, Manifest, Tiers};
use holder::Holder;
use medium::{Client, HolderMedium};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

/// Both ends of the replicas at this node: those of its own part at its holder, and those that it holds.
#[derive(Debug)]
pub struct Replicas {
    client: Arc<Client>,
    publishing: Mutex<()>,
    holder: Arc<Holder>,
    /// Where others reach those that this node holds.
    port: u16,
}

/// The rank of the node that holds the replicas of this one.
#[must_use]
pub fn holder_of(rank: u32, nodes: u32) -> u32 {
    (rank + 1) % nodes
}

/// The rank of the node whose replicas this one holds.
#[must_use]
pub fn held_by(rank: u32, nodes: u32) -> u32 {
    (rank + nodes - 1) % nodes
}

impl Replicas {
    /// Holds replicas in `memory` for another node, which has the key.
    ///
    /// # Errors
    /// When no port can be listened at.
    pub fn start(memory: &Memory, key: &ClusterKey, (rank, nodes): (u32, u32)) -> Result<Self> {
        let listener = ports::listen().context("cannot listen for the replicas of another node")?;
        let port = listener.local_addr()?.port();
        let holder = Arc::new(Holder::new(memory, held_by(rank, nodes))?);
        holder::serve(&holder, listener, key)?;
        let client = Arc::new(Client::new(key.clone(), rank));
        Ok(Self { client, publishing: Mutex::default(), holder, port })
    }

    /// The objects at the holder; none before [`Self::connect`].
    #[must_use]
    pub fn medium(&self) -> Arc<dyn Medium> {
        Arc::new(HolderMedium(Arc::clone(&self.client)))
    }

    /// What this node tells of those that it holds.
    #[must_use]
    pub fn holding(&self) -> Holding {
        Holding { port: self.port, replicas: self.holder.held() }
    }

    /// All nodes have joined. `node_0` is the address of the machine of node 0, if this is another node.
    pub fn connect(&self, welcome: &Welcome, (rank, nodes): (u32, u32), node_0: Option<IpAddr>) {
        self.holder.begin(welcome.number);
        let of_holder = welcome.holders.iter().find(|host| host.rank == holder_of(rank, nodes));
        let address = of_holder.and_then(|host| Some(SocketAddr::new(host.address.or(node_0)?, host.port)));
        match address {
            Some(address) => self.client.connect(address, welcome.number),
            None => tracing::warn!("it is not known where the node is that holds the replicas of this one"),
        }
    }

    /// Local ports of the connections in the replicas of this node.
    #[must_use]
    pub fn ports(welcome: &Welcome, rank: u32) -> BTreeSet<u16> {
        let own = welcome.holders.iter().filter(|host| host.rank == rank);
        own.flat_map(|host| host.ports.iter().copied()).collect()
    }

    /// Ends the requests in progress.
    pub fn interrupt(&self) {
        self.client.interrupt();
    }

    /// Ends all requests, now and from now on: the job has ended on all nodes.
    pub fn close(&self) {
        self.client.close();
    }

    /// Tells the holder which parts it holds.
    ///
    /// # Errors
    /// When it cannot be reached, or they cannot be read.
    pub fn publish(&self, store: &Tiers, history: &History) -> Result<()> {
        // The list that the holder gets last has to be the newest one.
        let _alone = self.publishing.lock();
        let listed = store.tier(REPLICA)?.store().list()?;
        let manifests: Vec<_> = listed.into_iter().filter_map(|one| one.manifest.ok()).collect();
        let parts = manifests.iter().filter_map(|manifest| HeldPart::of(manifest, history)).collect();
        let ports = manifests.iter().filter_map(|manifest| manifest.part.as_ref());
        let ports = ports.flat_map(|part| part.ports.iter().copied()).collect();
        Ok(self.client.publish(&HeldParts { parts, ports })?)
    }
}

/// How the nodes have joined, each with the parts that another node holds of it.
#[must_use]
pub fn with_held(all: &[&Join]) -> Vec<Join> {
    let with_held = |join: &&Join| {
        let mut join = Join::clone(join);
        let holder = all.iter().find(|one| one.rank == holder_of(join.rank, join.nodes));
        let held = holder.and_then(|holder| holder.holding.as_ref());
        for part in held.iter().flat_map(|holding| &holding.replicas.parts) {
            let is_it = |own: &HeldPart| (&own.log, own.attempt) == (&part.log, part.attempt);
            if !join.parts.iter().any(is_it) {
                join.parts.push(part.clone());
            }
        }
        join
    };
    all.iter().map(with_held).collect()
}

/// Where the nodes hold replicas, each with what is held of its own part. These are the addresses of the machines but that of
/// node 0.
#[must_use]
pub fn places(all: &[&Join], addresses: &BTreeMap<u32, IpAddr>) -> Vec<HolderPlace> {
    let place = |join: &&Join| {
        let holder = all.iter().find(|one| one.rank == holder_of(join.rank, join.nodes));
        let held = holder.and_then(|holder| holder.holding.as_ref());
        let ports = held.map_or_else(BTreeSet::new, |holding| holding.replicas.ports.clone());
        let (address, port) = (addresses.get(&join.rank).copied(), join.holding.as_ref()?.port);
        Some(HolderPlace { rank: join.rank, address, port, ports })
    };
    all.iter().filter_map(place).collect()
}

impl HeldPart {
    /// The part of which this is the manifest, if it is one of a job on several nodes.
    #[must_use]
    pub fn of(manifest: &Manifest, history: &History) -> Option<Self> {
        let part = manifest.part.as_ref()?;
        let attempt = AttemptId { epoch: part.epoch, number: part.attempt };
        let is_abandoned = history.is_abandoned(&manifest.id);
        let (log, hash) = (part.log.clone(), manifest.content_hash());
        Some(Self { log, attempt, hash, is_abandoned })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use ckpt_snapshot::codec::Codec;
    use ckpt_snapshot::medium::{Block, read_all};
    use ckpt_snapshot::packed::{Limits, PackStore};
    use ckpt_snapshot::{Input, JobIdentity, JobKey, NodePart, RelPath, SnapshotId, Store, Tier};
    use std::io::ErrorKind;
    use std::sync::atomic::AtomicBool;
    use std::time::SystemTime;

    const KEY: [u8; 32] = [7; 32];
    const NODES: u32 = 2;

    /// Two nodes, each with replicas of the other one; `None` where this process may have no memory of its own.
    fn pair() -> Option<[Replicas; 2]> {
        Some(pair_with_memory()?.0)
    }

    /// The same, with the memory of both.
    pub fn pair_with_memory() -> Option<([Replicas; 2], [Memory; 2])> {
        let nodes = [0, 1].map(|rank| {
            let memory = Memory::open(None).ok()?;
            let replicas = Replicas::start(&memory, &ClusterKey(KEY), (rank, NODES)).unwrap();
            Some((replicas, memory))
        });
        let [Some((zero, its)), Some((one, other))] = nodes else {
            ckpt_test_skip::skip("there may be no tmpfs that is mounted nowhere");
            return None;
        };
        Some(([zero, one], [its, other]))
    }

    fn welcome(nodes: &[Replicas; 2], number: u64) -> Welcome {
        let local = IpAddr::from([127, 0, 0, 1]);
        let places = [0, 1].map(|rank| HolderPlace {
            rank,
            address: (rank > 0).then_some(local),
            port: nodes[rank as usize].port,
            ports: [rank as u16 + 5].into(),
        });
        let (log, committed) = (String::new(), Vec::new());
        Welcome { passed_over: None, log, committed, network: None, number, holders: places.into() }
    }

    pub fn connect(nodes: &[Replicas; 2], number: u64) {
        let welcome = welcome(nodes, number);
        let local = IpAddr::from([127, 0, 0, 1]);
        nodes[0].connect(&welcome, (0, NODES), None);
        nodes[1].connect(&welcome, (1, NODES), Some(local));
    }

    pub fn name(text: &str) -> RelPath {
        RelPath::new(text).unwrap()
    }

    #[test]
    fn the_last_node_is_held_by_the_first() {
        assert_eq!([0, 1, 2].map(|rank| holder_of(rank, 3)), [1, 2, 0]);
        assert!((0..5).all(|rank| held_by(holder_of(rank, 5), 5) == rank));
    }

    #[test]
    fn objects_are_those_of_the_holder() {
        let Some(nodes) = pair() else { return };
        let medium = nodes[1].medium();
        // Nothing is there before all nodes are, and nothing can be stored.
        assert_eq!(medium.list(&name("packs")).unwrap(), []);
        assert_eq!(medium.open(&name("packs/a")).err().unwrap().kind(), ErrorKind::NotFound);
        assert!(medium.put_new(&name("packs/a"), b"a").is_err());
        connect(&nodes, 1);
        medium.put_new(&name("small/a"), b"first").unwrap();
        let again = medium.put_new(&name("small/a"), b"other").unwrap_err();
        assert_eq!(again.kind(), ErrorKind::AlreadyExists);
        // More than one message can hold.
        let long: Vec<_> = (0..20_000_003_u32).map(|at| (at % 251) as u8).collect();
        medium.put_new(&name("small/long"), &long).unwrap();
        assert_eq!(read_all(&*medium, &name("small/long"), u64::MAX).unwrap(), long);
        let mut listed = medium.list(&name("small")).unwrap();
        listed.sort();
        assert_eq!(listed, [("a".to_owned(), 5), ("long".to_owned(), long.len() as u64)]);
        assert!(medium.list_times(&name("small")).unwrap().iter().all(|(_, at)| at.elapsed().is_ok()));
        assert!(medium.free_bytes().unwrap().is_some());
        let mut beyond = [0; 9];
        let short = medium.open(&name("small/a")).unwrap().read_at(2, &mut beyond).unwrap_err();
        assert_eq!(short.kind(), ErrorKind::UnexpectedEof);

        let write = |parts: &[&[u8]], is_finished: bool| {
            let mut writer = medium.create(&name("packs/b"), 4, 8 << 20).unwrap();
            for part in parts {
                let mut block = writer.block().unwrap();
                block[..part.len()].copy_from_slice(part);
                Block::set_filled(&mut block, part.len());
                writer.append(block).unwrap();
            }
            if is_finished {
                writer.finish().unwrap();
            }
        };
        write(&[&[1; 4096]], false);
        assert_eq!(medium.list(&name("packs")).unwrap(), [], "it was not finished");
        write(&[&[1; 4096], &[2; 4096], &[3; 10]], true);
        let content = read_all(&*medium, &name("packs/b"), u64::MAX).unwrap();
        assert_eq!((content.len(), content[4095], content[4096], content[8201]), (8202, 1, 2, 3));
        medium.remove(&name("packs/b")).unwrap();
        medium.remove(&name("packs/b")).unwrap();
        assert_eq!(medium.open(&name("packs/b")).err().unwrap().kind(), ErrorKind::NotFound);
        // Those of the other node are others.
        assert_eq!(nodes[0].medium().list(&name("small")).unwrap(), []);
    }

    #[test]
    fn only_the_node_of_the_same_start_is_served() {
        let Some(nodes) = pair() else { return };
        connect(&nodes, 5);
        let late = Client::new(ClusterKey(KEY), 1);
        let at = nodes[1].client.address().unwrap();
        let refused = |client: Client| {
            HolderMedium(Arc::new(client)).put_new(&name("small/a"), b"a").unwrap_err().to_string()
        };
        late.connect(at, 4);
        assert!(refused(late).contains("started again since"));
        let other = Client::new(ClusterKey(KEY), 0);
        other.connect(at, 5);
        assert!(refused(other).contains("no replicas of that node"));
        let stranger = Client::new(ClusterKey([8; 32]), 1);
        stranger.connect(at, 5);
        let why = refused(stranger);
        assert!(why.contains("it was closed"), "{why}");
        nodes[1].medium().put_new(&name("small/a"), b"a").unwrap();
        nodes[1].close();
        assert!(nodes[1].medium().list(&name("small")).unwrap_err().to_string().contains("has ended"));
        assert_eq!(Replicas::ports(&welcome(&nodes, 5), 1), [6].into());
    }

    fn store(medium: Arc<dyn Medium>) -> Box<dyn Store> {
        Box::new(PackStore::new(medium, Codec::default(), Limits { needs_room: true, ..Limits::default() }))
    }

    /// The part of a node in the memory of another one is the same part.
    #[test]
    fn a_replica_is_the_part() {
        let Some(nodes) = pair() else { return };
        connect(&nodes, 1);
        let own = Memory::open(None).unwrap();
        let tiers = Tiers::new(vec![
            Tier::new("memory", store(Arc::new(own.medium("own"))), true),
            Tier::new(REPLICA, store(nodes[1].medium()), false),
        ]);
        let go_on = AtomicBool::new(false);
        let mut content = vec![3; 5 << 20];
        for number in 1..=2_u8 {
            content[usize::from(number) << 20] = number;
            let id = SnapshotId::new(number.into(), SystemTime::now());
            let key = JobKey::named("job").unwrap().to_string();
            let identity = JobIdentity { key, cwd: String::new(), argv: Vec::new() };
            let mut writer = tiers.tier("memory").unwrap().store().begin(&id, 6 << 20).unwrap();
            let path = name("content");
            writer.put(&[Input { path: path.clone(), from: &content }], &|_| {}).unwrap();
            let part = NodePart {
                log: "log".to_owned(),
                epoch: 1,
                attempt: number.into(),
                node: 1,
                nodes: NODES,
                addresses: Vec::new(),
                ports: vec![7 + u16::from(number)],
                network: None,
            };
            let manifest = Manifest { part: Some(part), ..Manifest::new(id.clone(), identity) };
            let manifest = writer.commit(manifest).unwrap();
            let copy = tiers.replicate(&id, "memory", REPLICA, &go_on).unwrap();
            assert_eq!(copy.content_hash(), manifest.content_hash());
            nodes[1].publish(&tiers, &History::default()).unwrap();
        }
        let held = nodes[0].holding().replicas;
        let attempts: Vec<_> = held.parts.iter().map(|part| part.attempt.number).collect();
        assert_eq!((attempts, held.ports), (vec![1, 2], [8, 9].into()));
        // As the launcher reads it that takes the place of the node.
        let newest = SnapshotId::clone(&tiers.tier(REPLICA).unwrap().store().list().unwrap()[1].id);
        let taken = Tiers::new(vec![Tier::new("new", store(nodes[1].medium()), true)]);
        let manifest = taken.manifest(&newest).unwrap();
        let hash = HeldPart::of(&manifest, &History::default()).unwrap().hash;
        assert_eq!(hash, held.parts[1].hash);
        let mut read = vec![0; content.len()];
        taken.read_source(&manifest, &name("content"), |from| from.read_at(0, &mut read)).unwrap();
        assert!(read == content);
    }

    #[test]
    fn a_node_counts_as_having_what_is_held_of_it() {
        let part = |number| HeldPart {
            log: "log".to_owned(),
            attempt: AttemptId { epoch: 1, number },
            hash: number.to_string(),
            is_abandoned: false,
        };
        let join = |rank, own: &[u64], held: &[u64]| {
            let replicas = HeldParts { parts: held.iter().copied().map(part).collect(), ports: [9].into() };
            let holding = Some(Holding { port: 100 + rank as u16, replicas });
            let parts = own.iter().copied().map(part).collect();
            Join { parts, holding, ..Join::of_machine("job", rank, 3, None) }
        };
        // Node 1 is a new launcher, and node 2, which holds its replicas, is not.
        let (zero, one, two) = (join(0, &[1, 2, 3], &[2]), join(1, &[1], &[]), join(2, &[1, 3], &[1, 2, 3]));
        let all = [&zero, &one, &two];
        let merged = with_held(&all);
        let numbers = |join: &Join| join.parts.iter().map(|part| part.attempt.number).collect::<Vec<_>>();
        assert_eq!(
            merged.iter().map(numbers).collect::<Vec<_>>(),
            [vec![1, 2, 3], vec![1, 2, 3], vec![1, 3, 2]]
        );
        let address = IpAddr::from([10, 0, 0, 1]);
        let places = places(&all, &[(1, address), (2, address)].into());
        let known: Vec<_> = places.iter().map(|place| (place.rank, place.address, place.port)).collect();
        assert_eq!(known, [(0, None, 100), (1, Some(address), 101), (2, Some(address), 102)]);
    }
}
