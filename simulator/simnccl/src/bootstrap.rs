//! How ranks find each other: by the address in the unique ID, where a thread of the process that made it tells all ranks
//! of each other. From then on rank 0 is connected to every other rank, over TCP, for exchanges of small data.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddrV4, TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::net;
use crate::types::{Error, Result, UniqueId, warn};

const MAGIC: &[u8; 8] = b"SIMNCCL1";
/// More ranks have no place in the tables of a communicator.
pub(crate) const MAX_RANKS: usize = 64;
/// How long ranks wait for the first one of those that are left of a communicator, and how often they look.
const LEFT_LIMIT: Duration = Duration::from_secs(60);
const LEFT_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Tries something until it succeeds, for [`LEFT_LIMIT`] at most.
fn retried<T>(mut what: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let until = Instant::now() + LEFT_LIMIT;
    loop {
        match what() {
            Err(_) if Instant::now() < until => std::thread::sleep(LEFT_POLL_INTERVAL),
            done => return done,
        }
    }
}

/// What a unique ID holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Root {
    address: SocketAddrV4,
    pub(crate) number: u64,
}

impl Root {
    fn encode(self) -> UniqueId {
        let mut bytes = [0; 128];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..14].copy_from_slice(&address_bytes(self.address));
        bytes[16..24].copy_from_slice(&self.number.to_le_bytes());
        UniqueId { bytes }
    }

    /// # Errors
    /// `ncclInvalidArgument` for bytes that no `ncclGetUniqueId` made.
    pub(crate) fn decode(id: &UniqueId) -> Result<Self> {
        let bytes = &id.bytes;
        if &bytes[..8] != MAGIC {
            warn("the unique ID is none");
            return Err(Error::InvalidArgument);
        }
        let number = bytes[16..24].try_into().map_err(|_| Error::InternalError)?;
        Ok(Self { address: address_of(&bytes[8..14]), number: u64::from_le_bytes(number) })
    }
}

pub(crate) fn address_bytes(address: SocketAddrV4) -> [u8; 6] {
    let [a, b, c, d] = address.ip().octets();
    let [e, f] = address.port().to_be_bytes();
    [a, b, c, d, e, f]
}

/// Of 6 bytes.
pub(crate) fn address_of(bytes: &[u8]) -> SocketAddrV4 {
    let port = u16::from_be_bytes([bytes[4], bytes[5]]);
    SocketAddrV4::new(Ipv4Addr::new(bytes[0], bytes[1], bytes[2], bytes[3]), port)
}

/// A socket that waits for connections, and its address.
pub(crate) fn listen() -> io::Result<(TcpListener, SocketAddrV4)> {
    let listener = TcpListener::bind((net::address()?, 0))?;
    match listener.local_addr()? {
        std::net::SocketAddr::V4(address) => Ok((listener, address)),
        std::net::SocketAddr::V6(_) => Err(io::Error::other("an address of the wrong kind")),
    }
}

/// A fresh unique ID. A thread waits for its ranks.
pub(crate) fn unique_id() -> Result<UniqueId> {
    let (listener, address) = listen()?;
    let root = Root { address, number: crate::random()? };
    let serve = move || {
        if let Err(error) = introduce(&listener, root.number) {
            warn(&format!("bootstrap: {error}"));
        }
    };
    std::thread::Builder::new().name("simnccl-root".into()).spawn(serve)?;
    Ok(root.encode())
}

/// What a rank says first: number, ranks, rank, its own address.
const HELLO_BYTES: usize = 24;

/// Tells all ranks of each other, or all that came that they do not go together.
fn introduce(listener: &TcpListener, number: u64) -> io::Result<()> {
    let mut ranks: Vec<Option<(TcpStream, [u8; 6])>> = Vec::new();
    loop {
        let (mut stream, _) = listener.accept()?;
        let mut hello = [0; HELLO_BYTES];
        stream.read_exact(&mut hello)?;
        let word = |at: usize| u32::from_le_bytes(hello[at..at + 4].try_into().unwrap_or_default()) as usize;
        let (count, rank) = (word(8), word(12));
        if hello[..8] != number.to_le_bytes() {
            continue;
        }
        if ranks.is_empty() {
            ranks.resize_with(count, || None);
        }
        let fits = ranks.len() == count && ranks.get(rank).is_some_and(Option::is_none);
        if !fits {
            warn(&format!(
                "bootstrap: rank {rank} of {count} where {} ranks are expected once each",
                ranks.len()
            ));
            for (stream, _) in ranks.iter_mut().flatten() {
                stream.write_all(&[0])?;
            }
            return stream.write_all(&[0]);
        }
        ranks[rank] = Some((stream, hello[16..22].try_into().unwrap_or_default()));
        if ranks.iter().all(Option::is_some) {
            break;
        }
    }
    let table: Vec<u8> = ranks.iter().flatten().flat_map(|(_, address)| *address).collect();
    for (stream, _) in ranks.iter_mut().flatten() {
        stream.write_all(&[1])?;
        stream.write_all(&table)?;
    }
    Ok(())
}

/// The connections of one communicator.
pub(crate) struct Bootstrap {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    /// The same on all ranks, another one for each communicator.
    pub(crate) number: u64,
    /// Rank 0: to ranks 1, 2, …; any other rank: to rank 0.
    links: Vec<TcpStream>,
    /// Held by an exchange from beginning to end.
    turn: Mutex<()>,
}

impl Bootstrap {
    /// Meets the other ranks of a unique ID.
    pub(crate) fn meet(root: Root, rank: usize, ranks: usize) -> Result<Self> {
        let (listener, address) = listen()?;
        let mut stream = TcpStream::connect(root.address)?;
        let mut hello = Vec::with_capacity(HELLO_BYTES);
        hello.extend(root.number.to_le_bytes());
        hello.extend(u32::try_from(ranks).unwrap_or(0).to_le_bytes());
        hello.extend(u32::try_from(rank).unwrap_or(0).to_le_bytes());
        hello.extend(address_bytes(address));
        hello.resize(HELLO_BYTES, 0);
        stream.write_all(&hello)?;
        let mut status = [0];
        stream.read_exact(&mut status)?;
        if status != [1] {
            warn("the ranks of this unique ID do not agree on their number, or one came twice");
            return Err(Error::InvalidArgument);
        }
        let mut table = vec![0; 6 * ranks];
        stream.read_exact(&mut table)?;
        Self::join(&listener, address_of(&table[..6]), rank, ranks, root.number)
    }

    /// Connects rank 0 and all others.
    fn join(
        listener: &TcpListener,
        first: SocketAddrV4,
        rank: usize,
        ranks: usize,
        number: u64,
    ) -> Result<Self> {
        let mut links = Vec::new();
        if rank == 0 {
            let mut others: Vec<Option<TcpStream>> = (1..ranks).map(|_| None).collect();
            while others.iter().any(Option::is_none) {
                let (mut stream, _) = listener.accept()?;
                let mut hello = [0; 16];
                stream.read_exact(&mut hello)?;
                let (theirs, their_rank) = hello.split_at(8);
                let their_rank = their_rank.first().map_or(0, |rank| usize::from(*rank));
                if theirs == number.to_le_bytes() && (1..ranks).contains(&their_rank) {
                    others[their_rank - 1] = Some(stream);
                }
            }
            links.extend(others.into_iter().flatten());
        } else {
            let mut stream = TcpStream::connect(first)?;
            let mut hello = [0; 16];
            hello[..8].copy_from_slice(&number.to_le_bytes());
            hello[8] = u8::try_from(rank).map_err(|_| Error::InternalError)?;
            stream.write_all(&hello)?;
            links.push(stream);
        }
        for link in &links {
            link.set_nodelay(true)?;
        }
        Ok(Self { rank, ranks, number, links, turn: Mutex::new(()) })
    }

    /// What each rank gives, in the order of the ranks. All give as many bytes, at least one.
    pub(crate) fn all_gather(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let _turn = self.turn.lock();
        let mut all = vec![0; mine.len() * self.ranks];
        if self.rank == 0 {
            all[..mine.len()].copy_from_slice(mine);
            for (index, mut link) in self.links.iter().enumerate() {
                let start = (index + 1) * mine.len();
                link.read_exact(&mut all[start..start + mine.len()])?;
            }
            for mut link in &self.links {
                link.write_all(&all)?;
            }
        } else if let Some(mut link) = self.links.first() {
            link.write_all(mine)?;
            link.read_exact(&mut all)?;
        }
        Ok(all.chunks(mine.len()).map(<[u8]>::to_vec).collect())
    }

    /// Whether all ranks are on one machine.
    pub(crate) fn is_on_one_host(&self) -> Result<bool> {
        let all = self.all_gather(&net::host())?;
        Ok(all.windows(2).all(|pair| pair[0] == pair[1]))
    }

    /// Waits for all ranks.
    pub(crate) fn barrier(&self) -> Result {
        self.all_gather(&[0]).map(drop)
    }

    /// The connections among some of the ranks; all ranks call it. `members` are those of this rank's part, in their new
    /// order.
    pub(crate) fn part(&self, members: &[usize], number: u64) -> Result<Self> {
        let (listener, address) = listen()?;
        let addresses = self.all_gather(&address_bytes(address))?;
        let rank = members.iter().position(|member| *member == self.rank).ok_or(Error::InternalError)?;
        Self::join(&listener, address_of(&addresses[members[0]]), rank, members.len(), number)
    }

    /// As [`Bootstrap::part`], for a rank that is in no part.
    pub(crate) fn no_part(&self) -> Result {
        self.all_gather(&[0; 6]).map(drop)
    }

    /// The connections among the ranks that are left when the others do not answer. The first of them has a socket whose
    /// name all know, so they are on one machine. `members` as for [`Bootstrap::part`].
    pub(crate) fn left(&self, members: &[usize], number: u64) -> Result<Self> {
        let name = SocketAddr::from_abstract_name(format!("simnccl-left-{number:x}"))?;
        let rank = members.iter().position(|member| *member == self.rank).ok_or(Error::InvalidArgument)?;
        let (listener, address) = listen()?;
        let mut first = address_bytes(address);
        if rank == 0 {
            let named = UnixListener::bind_addr(&name)?;
            named.set_nonblocking(true)?;
            for _ in 1..members.len() {
                let (mut other, _) = retried(|| named.accept())?;
                other.set_nonblocking(false)?;
                other.write_all(&first)?;
            }
        } else {
            retried(|| UnixStream::connect_addr(&name))?.read_exact(&mut first)?;
        }
        Self::join(&listener, address_of(&first), rank, members.len(), number)
    }

    /// Ends exchanges under way, of this rank and of those that wait for it.
    pub(crate) fn abort(&self) {
        for link in &self.links {
            // An error means that it is closed already.
            let _ = link.shutdown(Shutdown::Both);
        }
    }
}
