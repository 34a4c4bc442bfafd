//! Memory through which ranks reach each other: which kind, and the table by which the kernel finds it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;

use cuda_abi::sys::CUdevice_attribute as A;
use cuda_abi::types::CUdevice;

use crate::bootstrap::{Bootstrap, MAX_RANKS};
use crate::cuda::{self, Context, Memory, Pinned};
use crate::kernel::{ROW_BYTES, SLOT_BYTES, SLOTS};
use crate::nvls::Nvls;
use crate::proxy::Proxy;
use crate::service::{self, Service};
use crate::types::{Error, Result, warn};

/// Bytes of a pair's counter and chunk headers.
pub(crate) const FLAG_BYTES: usize = 64;
/// Where a buffer says, peer by peer, how many chunks the peer has consumed.
pub(crate) const CONSUMED_AT: usize = MAX_RANKS * FLAG_BYTES;
/// Where the slots of a buffer begin.
pub(crate) const SLOTS_AT: usize = 64 << 10;
/// Slots of one direction of a pair.
pub(crate) const PAIR_BYTES: usize = SLOTS * SLOT_BYTES;

/// How ranks reach each other's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Kind {
    /// Memory of cuMemCreate, passed as descriptors.
    Mapped,
    /// Memory of cuMemAlloc, passed as legacy IPC handles.
    Legacy,
    /// Host memory of cuMemCreate, passed as descriptors.
    HostMapped,
    /// A file in /dev/shm that is registered with the driver.
    HostFile,
    /// TCP, with copies through pinned memory.
    Socket,
}

/// Whether a variable has a value other than what is meant by its absence.
pub(crate) fn variable(name: &str) -> Option<bool> {
    std::env::var(name).ok().map(|text| text.trim() != "0")
}

fn has(attribute: A, device: CUdevice) -> Result<bool> {
    cuda::device_attribute(attribute, device).map(|value| value != 0)
}

/// Whether memory is that of cuMemCreate.
pub(crate) fn uses_mapped_memory(device: CUdevice) -> Result<bool> {
    Ok(variable("NCCL_CUMEM_ENABLE") != Some(false)
        && has(A::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device)?
        && has(A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, device)?)
}

impl Kind {
    /// As the environment and the device permit.
    pub(crate) fn choose(device: CUdevice) -> Result<Self> {
        let mapped = uses_mapped_memory(device)?;
        if variable("NCCL_P2P_DISABLE") != Some(true) {
            return Ok(if mapped { Self::Mapped } else { Self::Legacy });
        }
        if variable("NCCL_SHM_DISABLE") == Some(true) {
            return Ok(Self::Socket);
        }
        let attribute = A::CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
        let host_mapped =
            mapped && variable("NCCL_CUMEM_HOST_ENABLE") != Some(false) && has(attribute, device)?;
        Ok(if host_mapped { Self::HostMapped } else { Self::HostFile })
    }
}

/// What a rank tells the others of its memory.
#[derive(Clone, PartialEq, Eq)]
struct Offer {
    kind: u8,
    pid: u32,
    /// The address in the rank's own process, and the context.
    address: u64,
    context: u64,
    handle: [u8; 64],
}

const OFFER_BYTES: usize = 96;

impl Offer {
    fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![self.kind];
        bytes.extend(self.pid.to_le_bytes());
        bytes.extend(self.address.to_le_bytes());
        bytes.extend(self.context.to_le_bytes());
        bytes.extend(self.handle);
        bytes.resize(OFFER_BYTES, 0);
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        Some(Self {
            kind: *bytes.first()?,
            pid: u32::from_le_bytes(bytes.get(1..5)?.try_into().ok()?),
            address: u64::from_le_bytes(bytes.get(5..13)?.try_into().ok()?),
            context: u64::from_le_bytes(bytes.get(13..21)?.try_into().ok()?),
            handle: bytes.get(21..85)?.try_into().ok()?,
        })
    }
}

/// What connections are for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    All,
    /// Sends and receives; there are others for collectives.
    Pairs,
    Collectives,
}

impl Purpose {
    /// By which the ranks find each other's memory.
    fn number(self, bootstrap: &Bootstrap) -> u64 {
        if self == Self::Collectives { bootstrap.number.rotate_left(17) } else { bootstrap.number }
    }
}

/// What the ranks of a communicator share. The fields are dropped in this order.
pub(crate) struct Transport {
    kind: Kind,
    pub(crate) nvls: Option<Nvls>,
    pub(crate) proxy: Option<Proxy>,
    _service: Option<Service>,
    /// The peers' memory as it is mapped here.
    _peers: Vec<Memory>,
    _flags: Option<Arc<Pinned>>,
    _buffer: Arc<Memory>,
    /// The table of peers, for the kernel.
    pub(crate) table: Memory,
}

impl Drop for Transport {
    fn drop(&mut self) {
        if let Some(nvls) = self.nvls.take() {
            nvls.end();
        }
    }
}

/// The addresses in a row of the table.
struct Row {
    send_slots: u64,
    send_flags: u64,
    send_consumed: u64,
    recv_slots: u64,
    recv_flags: u64,
    recv_consumed: u64,
}

impl Row {
    fn words(&self) -> [u64; ROW_BYTES / 8] {
        let Self { send_slots, send_flags, send_consumed, recv_slots, recv_flags, recv_consumed } = *self;
        [send_slots, send_flags, send_consumed, recv_slots, recv_flags, recv_consumed, 0, 0]
    }
}

fn at(base: u64, offset: usize) -> u64 {
    base + offset as u64
}

impl Transport {
    /// Connects a rank with all others. If they are on several machines, all use sockets. NCCL has those on the same one
    /// share memory all the same.
    pub(crate) fn connect(
        bootstrap: &Bootstrap,
        context: Context,
        device: CUdevice,
        purpose: Purpose,
    ) -> Result<Self> {
        let kind = if bootstrap.is_on_one_host()? { Kind::choose(device)? } else { Kind::Socket };
        warn(&format!("rank {} of {}: {kind:?}", bootstrap.rank, bootstrap.ranks));
        if kind == Kind::Socket {
            socket(bootstrap, context)
        } else {
            shared(bootstrap, context, device, kind, purpose)
        }
    }

    /// Whether ranks can map each other's memory of cuMemCreate.
    pub(crate) fn supports_windows(&self) -> bool {
        self.kind == Kind::Mapped
    }
}

fn buffer_bytes(ranks: usize) -> usize {
    SLOTS_AT + ranks * PAIR_BYTES
}

/// The file behind a rank's buffer.
fn file_of(number: u64, rank: usize) -> PathBuf {
    PathBuf::from(format!("/dev/shm/simnccl-{number:016x}-{rank}"))
}

fn create_file(number: u64, rank: usize, size_bytes: usize) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create_new(true).open(file_of(number, rank))?;
    file.set_len(size_bytes as u64)?;
    Ok(file)
}

fn own_buffer(
    (bootstrap, context, device): (&Bootstrap, Context, CUdevice),
    number: u64,
    kind: Kind,
) -> Result<Memory> {
    let size_bytes = buffer_bytes(bootstrap.ranks);
    let memory = match kind {
        Kind::Mapped => Memory::create(context, device, size_bytes, false)?,
        Kind::HostMapped => Memory::create(context, device, size_bytes, true)?,
        Kind::HostFile => {
            let file = create_file(number, bootstrap.rank, size_bytes)?;
            Memory::register(context, file.as_fd(), size_bytes)?
        }
        Kind::Legacy | Kind::Socket => Memory::allocate(context, size_bytes)?,
    };
    memory.clear()?;
    Ok(memory)
}

/// A peer's buffer: its address here, and what has to be kept for it.
fn peer_buffer(
    (bootstrap, context, device): (&Bootstrap, Context, CUdevice),
    offer: &Offer,
    (number, peer): (u64, usize),
    kind: Kind,
) -> Result<(u64, Option<Memory>)> {
    let size_bytes = buffer_bytes(bootstrap.ranks);
    let memory = match kind {
        Kind::Mapped | Kind::HostMapped => {
            let descriptor = service::fetch(number, peer, service::BUFFER)?;
            let unit = 2 << 20;
            let mapped_bytes = size_bytes.next_multiple_of(unit);
            Memory::import(context, device, descriptor.as_fd(), mapped_bytes, kind == Kind::HostMapped)?
        }
        // A process cannot open its own handles.
        Kind::Legacy if offer.pid == std::process::id() => {
            cuda::reach(offer.context)?;
            return Ok((offer.address, None));
        }
        Kind::Legacy => Memory::open(context, offer.handle, size_bytes)?,
        Kind::HostFile => {
            let file = OpenOptions::new().read(true).write(true).open(file_of(number, peer))?;
            Memory::register(context, file.as_fd(), size_bytes)?
        }
        Kind::Socket => return Err(Error::InternalError),
    };
    Ok((memory.address, Some(memory)))
}

/// Hands descriptors of a buffer to the peers, for kinds that are passed by them.
fn serve(
    buffer: &Arc<Memory>,
    context: Context,
    kind: Kind,
    number: u64,
    rank: usize,
) -> Result<Option<Service>> {
    if !matches!(kind, Kind::Mapped | Kind::HostMapped) {
        return Ok(None);
    }
    let exported = Arc::clone(buffer);
    let export = move |_| {
        cuda::make_current(context)?;
        exported.export()
    };
    Ok(Some(Service::start(number, rank, export)?))
}

/// The kernels of one rank write to the memory of another.
fn shared(
    bootstrap: &Bootstrap,
    context: Context,
    device: CUdevice,
    kind: Kind,
    purpose: Purpose,
) -> Result<Transport> {
    let (me, ranks, number) = (bootstrap.rank, bootstrap.ranks, purpose.number(bootstrap));
    let buffer = Arc::new(own_buffer((bootstrap, context, device), number, kind)?);
    let service = serve(&buffer, context, kind, number, me)?;
    let handle = if kind == Kind::Legacy { buffer.ipc_handle()? } else { [0; 64] };
    let offer = Offer {
        kind: kind as u8,
        pid: std::process::id(),
        address: buffer.address,
        context: context.0 as u64,
        handle,
    };
    let offers = bootstrap.all_gather(&offer.encode())?;
    let mut peers = Vec::new();
    let mut rows = Vec::new();
    for (peer, bytes) in offers.iter().enumerate() {
        let offer = Offer::decode(bytes).filter(|offer| offer.kind == kind as u8).ok_or_else(|| {
            warn("the ranks do not agree on NCCL_P2P_DISABLE, NCCL_SHM_DISABLE or NCCL_CUMEM_ENABLE");
            Error::InvalidUsage
        })?;
        let mut theirs = buffer.address;
        if peer != me {
            let (address, memory) = peer_buffer((bootstrap, context, device), &offer, (number, peer), kind)?;
            theirs = address;
            peers.extend(memory);
        }
        let mine = buffer.address;
        rows.push(Row {
            send_slots: at(theirs, SLOTS_AT + me * PAIR_BYTES),
            send_flags: at(theirs, me * FLAG_BYTES),
            send_consumed: at(mine, CONSUMED_AT + peer * FLAG_BYTES),
            recv_slots: at(mine, SLOTS_AT + peer * PAIR_BYTES),
            recv_flags: at(mine, peer * FLAG_BYTES),
            recv_consumed: at(theirs, CONSUMED_AT + me * FLAG_BYTES),
        });
    }
    bootstrap.barrier()?;
    if kind == Kind::HostFile {
        std::fs::remove_file(file_of(number, me))?;
    }
    let table = table(context, ranks, &rows)?;
    let has_nvls = kind == Kind::Mapped && purpose != Purpose::Pairs;
    let nvls = if has_nvls { Nvls::connect(bootstrap, context, device)? } else { None };
    Ok(Transport {
        kind,
        nvls,
        proxy: None,
        _service: service,
        _peers: peers,
        _flags: None,
        _buffer: buffer,
        table,
    })
}

fn table(context: Context, ranks: usize, rows: &[Row]) -> Result<Memory> {
    let table = Memory::allocate(context, ranks * ROW_BYTES)?;
    let words: Vec<u64> = rows.iter().flat_map(Row::words).collect();
    cuda::upload(table.address, &words)?;
    Ok(table)
}

/// The kernel's flags are in pinned memory, where the proxy sees them; its slots are on the device.
fn socket(bootstrap: &Bootstrap, context: Context) -> Result<Transport> {
    let ranks = bootstrap.ranks;
    let buffer = Arc::new(Memory::allocate(context, SLOTS_AT + 2 * ranks * PAIR_BYTES)?);
    buffer.clear()?;
    let flags = Arc::new(Pinned::create(context, 4 * CONSUMED_AT)?);
    let places = Places { buffer: buffer.address, flags: flags.address, ranks };
    let rows: Vec<Row> = (0..ranks)
        .map(|peer| Row {
            send_slots: places.outbox(peer, 0),
            send_flags: places.out_flags(peer),
            send_consumed: places.out_consumed(peer),
            recv_slots: places.inbox(peer, 0),
            recv_flags: places.in_flags(peer),
            recv_consumed: places.in_consumed(peer),
        })
        .collect();
    let offer = Offer { kind: Kind::Socket as u8, pid: 0, address: 0, context: 0, handle: [0; 64] };
    for bytes in bootstrap.all_gather(&offer.encode())? {
        if Offer::decode(&bytes).is_none_or(|offer| offer.kind != Kind::Socket as u8) {
            warn("the ranks do not agree on NCCL_P2P_DISABLE and NCCL_SHM_DISABLE");
            return Err(Error::InvalidUsage);
        }
    }
    let proxy = Proxy::start(bootstrap, context, places)?;
    let table = table(context, ranks, &rows)?;
    Ok(Transport {
        kind: Kind::Socket,
        nvls: None,
        proxy: Some(proxy),
        _service: None,
        _peers: Vec::new(),
        _flags: Some(flags),
        _buffer: buffer,
        table,
    })
}

/// Where the proxy and the kernel meet.
#[derive(Clone, Copy)]
pub(crate) struct Places {
    buffer: u64,
    flags: u64,
    ranks: usize,
}

impl Places {
    fn slot(self, index: usize, slot: usize) -> u64 {
        at(self.buffer, SLOTS_AT + index * PAIR_BYTES + slot * SLOT_BYTES)
    }

    pub(crate) fn inbox(self, peer: usize, slot: usize) -> u64 {
        self.slot(peer, slot)
    }

    pub(crate) fn outbox(self, peer: usize, slot: usize) -> u64 {
        self.slot(self.ranks + peer, slot)
    }

    pub(crate) fn out_flags(self, peer: usize) -> u64 {
        at(self.flags, peer * FLAG_BYTES)
    }

    pub(crate) fn out_consumed(self, peer: usize) -> u64 {
        at(self.flags, CONSUMED_AT + peer * FLAG_BYTES)
    }

    pub(crate) fn in_flags(self, peer: usize) -> u64 {
        at(self.flags, 2 * CONSUMED_AT + peer * FLAG_BYTES)
    }

    pub(crate) fn in_consumed(self, peer: usize) -> u64 {
        at(self.flags, 3 * CONSUMED_AT + peer * FLAG_BYTES)
    }
}
