//! Ranks wait for each other before the first work that needs their connections: NCCL makes these then, and the call of one
//! rank returns when the others have called too. Seen with NCCL 2.28.9 on an H200 (docs/simcuda.md). The memory for
//! collectives is made in that call, that for sends and receives with the communicator.

use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::net::{SocketAddrV4, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cuda_abi::types::CUdevice;
use parking_lot::Mutex;

use crate::bootstrap::{Bootstrap, address_bytes, address_of, listen};
use crate::collective::{Call, Way};
use crate::transport::{uses_mapped_memory, variable};
use crate::types::{Error, Result, warn};

/// How often a rank looks whether another one has come.
const POLL_INTERVAL: Duration = Duration::from_micros(200);
/// What a rank says to another one: the communicator's number, the rank, whether it sends.
const HELLO_BYTES: usize = 10;

/// Which ranks of a communicator have met.
pub(crate) struct Meeting {
    listener: TcpListener,
    addresses: Vec<SocketAddrV4>,
    /// Whether ranks are connected for collectives by the first one, and not when the communicator is made.
    pub(crate) is_late: bool,
    is_aborted: AtomicBool,
    met: Mutex<Met>,
}

#[derive(Default)]
struct Met {
    are_all: bool,
    ways: BTreeSet<Way>,
    /// Peers that wait for this rank.
    waiting: BTreeSet<Way>,
}

impl Meeting {
    /// All ranks call it.
    pub(crate) fn prepare(bootstrap: &Bootstrap, device: CUdevice) -> Result<Self> {
        let (listener, address) = listen()?;
        listener.set_nonblocking(true)?;
        let all = bootstrap.all_gather(&address_bytes(address))?;
        Ok(Self {
            listener,
            addresses: all.iter().map(|bytes| address_of(bytes)).collect(),
            is_late: uses_mapped_memory(device)? && variable("NCCL_RUNTIME_CONNECT") != Some(false),
            is_aborted: AtomicBool::new(false),
            met: Mutex::default(),
        })
    }

    /// Whether these calls have to wait for other ranks.
    pub(crate) fn is_needed(&self, calls: &[Call], rank: usize, ranks: usize) -> bool {
        let met = self.met.lock();
        let is_new = |call: &Call| {
            let mut ways = call.ways(rank, ranks).into_iter().flatten();
            ways.any(|way| !met.ways.contains(&way))
        };
        calls.iter().any(|call| self.needs_all(call, &met) || is_new(call))
    }

    fn needs_all(&self, call: &Call, met: &Met) -> bool {
        self.is_late && !met.are_all && call.ways(0, 1).is_none()
    }

    /// Waits for the ranks that these calls need for the first time. `connect_all` connects all ranks for collectives, in each
    /// of them.
    ///
    /// # Errors
    /// `ncclRemoteError` if one of them has ended before, and, for a pair, `ncclInvalidUsage` after an abort. One that ends
    /// meanwhile is waited for.
    pub(crate) fn meet(
        &self,
        bootstrap: &Bootstrap,
        calls: &[Call],
        connect_all: impl FnOnce() -> Result,
    ) -> Result {
        let mut met = self.met.lock();
        if calls.iter().any(|call| self.needs_all(call, &met)) {
            connect_all()?;
            met.are_all = true;
        }
        let ways = calls.iter().filter_map(|call| call.ways(bootstrap.rank, bootstrap.ranks)).flatten();
        let new: BTreeSet<Way> = ways.filter(|way| !met.ways.contains(way)).collect();
        new.iter().try_for_each(|way| self.tell(bootstrap, *way)).map_err(|error| {
            warn(&format!("a peer cannot be reached: {error}"));
            Error::RemoteError
        })?;
        while !new.is_subset(&met.waiting) {
            if self.is_aborted.load(Ordering::Acquire) {
                return Err(Error::InvalidUsage);
            }
            match self.listener.accept() {
                Ok((stream, _)) => met.waiting.extend(heard(stream, bootstrap)?),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    std::thread::sleep(POLL_INTERVAL);
                }
                Err(error) => return Err(error.into()),
            }
        }
        met.waiting.retain(|way| !new.contains(way));
        met.ways.extend(new);
        Ok(())
    }

    fn tell(&self, bootstrap: &Bootstrap, way: Way) -> io::Result<()> {
        let mut hello = bootstrap.number.to_le_bytes().to_vec();
        hello.push(u8::try_from(bootstrap.rank).unwrap_or(u8::MAX));
        hello.push(way.sends.into());
        TcpStream::connect(self.addresses[way.peer])?.write_all(&hello)
    }

    /// Ends the wait for others.
    pub(crate) fn abort(&self) {
        self.is_aborted.store(true, Ordering::Release);
    }
}

/// The way that another rank waits for, as this one sees it.
fn heard(mut stream: TcpStream, bootstrap: &Bootstrap) -> Result<Option<Way>> {
    stream.set_nonblocking(false)?;
    let mut hello = [0; HELLO_BYTES];
    stream.read_exact(&mut hello)?;
    let (number, rest) = hello.split_at(8);
    let is_ours = number == bootstrap.number.to_le_bytes();
    Ok(is_ours.then(|| Way { peer: rest[0].into(), sends: rest[1] == 0 }))
}
