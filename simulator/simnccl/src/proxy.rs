//! The proxy of the sockets: threads that copy what the kernel has put into its outbox to pinned memory and send it, and
//! what peers send to pinned memory and then into the kernel's inbox.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddrV4, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;

use crate::bootstrap::{self, Bootstrap};
use crate::cuda::{self, Context, Pinned, Stream};
use crate::kernel::{SLOT_BYTES, SLOTS};
use crate::transport::Places;
use crate::types::{Error, Result, warn};

/// How often the sender looks for work when there is none.
const POLL_INTERVAL: Duration = Duration::from_micros(50);
/// The same, of a thread that has been idle for a while: many ranks have many of them, and few processors.
const IDLE_POLL_INTERVAL: Duration = Duration::from_millis(1);

const DATA: u8 = 1;
const CONSUMED: u8 = 2;
/// The peer sends nothing more: the end of the connection is no error.
const BYE: u8 = 3;
/// Kind, tag or count, length.
const FRAME_BYTES: usize = 9;

/// A word of pinned memory.
fn word<'a>(address: u64) -> &'a AtomicU32 {
    // SAFETY: the address is of pinned memory that the proxy keeps, aligned, and touched by atomics and kernels only.
    unsafe { AtomicU32::from_ptr(address as *mut u32) }
}

/// The header of a chunk: tag and length.
fn header<'a>(flags: u64, number: u32) -> [&'a AtomicU32; 2] {
    let place = flags + 16 + 8 * u64::from(number % SLOTS as u32);
    [word(place), word(place + 4)]
}

/// What the threads of a proxy share.
struct Shared {
    context: Context,
    places: Places,
    /// By rank; none for this one.
    peers: Vec<Option<TcpStream>>,
    is_ending: AtomicBool,
    /// What went wrong first, as an `ncclResult_t`.
    error: AtomicU32,
    /// By rank: chunks sent.
    sent: Mutex<Vec<u32>>,
}

impl Shared {
    fn fail(&self, error: Error) {
        if !self.is_ending.load(Ordering::Acquire) {
            let _ = self.error.compare_exchange(0, error as u32, Ordering::AcqRel, Ordering::Relaxed);
        }
    }
}

/// The running proxy of a communicator, ended when dropped.
pub(crate) struct Proxy {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// A connection with each peer: the lower rank listens.
fn connect(bootstrap: &Bootstrap) -> Result<Vec<Option<TcpStream>>> {
    let (me, ranks) = (bootstrap.rank, bootstrap.ranks);
    let (listener, address) = bootstrap::listen()?;
    let mut mine = address.ip().octets().to_vec();
    mine.extend(address.port().to_le_bytes());
    let all = bootstrap.all_gather(&mine)?;
    let mut peers: Vec<Option<TcpStream>> = (0..ranks).map(|_| None).collect();
    for (peer, bytes) in all.iter().enumerate().take(me) {
        let ip = std::net::Ipv4Addr::new(bytes[0], bytes[1], bytes[2], bytes[3]);
        let port = u16::from_le_bytes([bytes[4], bytes[5]]);
        let mut stream = TcpStream::connect(SocketAddrV4::new(ip, port))?;
        stream.write_all(&[u8::try_from(me).map_err(|_| Error::InternalError)?])?;
        peers[peer] = Some(stream);
    }
    while peers.iter().skip(me + 1).any(Option::is_none) {
        let (mut stream, _) = listener.accept()?;
        let mut rank = [0];
        stream.read_exact(&mut rank)?;
        let peer = peers.get_mut(usize::from(rank[0])).ok_or(Error::InternalError)?;
        *peer = Some(stream);
    }
    for stream in peers.iter().flatten() {
        stream.set_nodelay(true)?;
    }
    Ok(peers)
}

impl Proxy {
    pub(crate) fn start(bootstrap: &Bootstrap, context: Context, places: Places) -> Result<Self> {
        let peers = connect(bootstrap)?;
        let sent = Mutex::new(vec![0; peers.len()]);
        let (is_ending, error) = (AtomicBool::new(false), AtomicU32::new(0));
        let shared = Arc::new(Shared { context, places, peers, is_ending, error, sent });
        let mut threads = Vec::new();
        let mut spawn = |name: &str, body: Box<dyn FnOnce() + Send>| -> io::Result<()> {
            threads.push(std::thread::Builder::new().name(name.into()).spawn(body)?);
            Ok(())
        };
        let sender = Arc::clone(&shared);
        spawn(
            "simnccl-proxy",
            Box::new(move || with_staging(&sender, |staging| send_all(&sender, staging))),
        )?;
        for peer in (0..bootstrap.ranks).filter(|peer| *peer != bootstrap.rank) {
            let receiver = Arc::clone(&shared);
            spawn(
                "simnccl-recv",
                Box::new(move || with_staging(&receiver, |staging| receive_all(&receiver, peer, staging))),
            )?;
        }
        Ok(Self { shared, threads })
    }

    /// An `ncclResult_t`; 0 as long as all is well.
    pub(crate) fn error(&self) -> u32 {
        self.shared.error.load(Ordering::Acquire)
    }

    /// Waits until everything that kernels have put into the outbox is sent.
    pub(crate) fn flush(&self) {
        let is_sent = || {
            let sent = self.shared.sent.lock();
            let is_peer = |peer: &usize| self.shared.peers[*peer].is_some();
            (0..sent.len())
                .filter(is_peer)
                .all(|peer| word(self.shared.places.out_flags(peer)).load(Ordering::Acquire) == sent[peer])
        };
        while self.error() == 0 && !is_sent() {
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.is_ending.store(true, Ordering::Release);
        let mut threads = std::mem::take(&mut self.threads).into_iter();
        // The sender says goodbye before its end.
        if let Some(sender) = threads.next() {
            let _ = sender.join();
        }
        for stream in self.shared.peers.iter().flatten() {
            // An error means that it is closed already.
            let _ = stream.shutdown(Shutdown::Both);
        }
        for thread in threads {
            let _ = thread.join();
        }
    }
}

/// Pinned memory for one chunk, and a stream for the copies.
struct Staging {
    memory: Pinned,
    stream: Stream,
}

impl Staging {
    fn create(context: Context) -> Result<Self> {
        cuda::make_current(context)?;
        Ok(Self { memory: Pinned::create(context, SLOT_BYTES)?, stream: Stream::create()? })
    }

    fn bytes(&mut self, len: usize) -> &mut [u8] {
        // SAFETY: the memory has a slot's size, which `len` does not exceed; only this thread uses it, and the driver's
        // copies are done.
        unsafe { std::slice::from_raw_parts_mut(self.memory.address as *mut u8, len.min(SLOT_BYTES)) }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        self.stream.destroy();
    }
}

fn frame(kind: u8, number: u32, len: u32) -> [u8; FRAME_BYTES] {
    let mut bytes = [kind; FRAME_BYTES];
    bytes[1..5].copy_from_slice(&number.to_le_bytes());
    bytes[5..].copy_from_slice(&len.to_le_bytes());
    bytes
}

/// Runs a thread's body, which makes its calls whatever the program captures at that time, as NCCL's proxy does. An error
/// is known before the staging is freed: that waits for kernels, which may wait for ever because of the error.
fn with_staging(shared: &Shared, body: impl FnOnce(&mut Staging) -> Result) {
    let result = cuda::outside_capture(|| {
        let mut staging = Staging::create(shared.context)?;
        if let Err(error) = body(&mut staging) {
            shared.fail(error);
        }
        Ok(())
    });
    if let Err(error) = result {
        shared.fail(error);
    }
}

fn send_all(shared: &Shared, staging: &mut Staging) -> Result {
    let mut acknowledged = vec![0; shared.peers.len()];
    let mut pause = POLL_INTERVAL;
    loop {
        let is_ending = shared.is_ending.load(Ordering::Acquire);
        let mut is_idle = true;
        for (peer, stream) in shared.peers.iter().enumerate() {
            let Some(stream) = stream else { continue };
            is_idle &= !send_ready(shared, peer, stream, staging)?;
            is_idle &= !send_consumed(shared, peer, stream, &mut acknowledged[peer]);
        }
        if is_idle && is_ending {
            for mut stream in shared.peers.iter().flatten() {
                // A peer that has ended needs no goodbye; the others do.
                let _ = stream.write_all(&frame(BYE, 0, 0));
            }
            return Ok(());
        }
        if is_idle {
            std::thread::sleep(pause);
            pause = (pause * 2).min(IDLE_POLL_INTERVAL);
        } else {
            pause = POLL_INTERVAL;
        }
    }
}

/// Sends the next chunk for a peer, if there is one.
fn send_ready(shared: &Shared, peer: usize, mut stream: &TcpStream, staging: &mut Staging) -> Result<bool> {
    let flags = shared.places.out_flags(peer);
    let ready = word(flags).load(Ordering::Acquire);
    let number = shared.sent.lock()[peer];
    if ready == number {
        return Ok(false);
    }
    let number = number.wrapping_add(1);
    let [tag, len] = header(flags, number).map(|word| word.load(Ordering::Acquire));
    let slot = shared.places.outbox(peer, number as usize % SLOTS);
    cuda::to_host(staging.memory.address, slot, len as usize, staging.stream)?;
    stream.write_all(&frame(DATA, tag, len))?;
    stream.write_all(staging.bytes(len as usize))?;
    shared.sent.lock()[peer] = number;
    Ok(true)
}

/// Tells a peer how many of its chunks are consumed, if there are more. A peer that has ended needs not know it; that one
/// has died is what the receiver finds.
fn send_consumed(shared: &Shared, peer: usize, mut stream: &TcpStream, known: &mut u32) -> bool {
    let consumed = word(shared.places.in_consumed(peer)).load(Ordering::Acquire);
    if consumed == *known {
        return false;
    }
    *known = consumed;
    let _ = stream.write_all(&frame(CONSUMED, consumed, 0));
    true
}

fn receive_all(shared: &Shared, peer: usize, staging: &mut Staging) -> Result {
    let mut stream = shared.peers[peer].as_ref().ok_or(Error::InternalError)?;
    let mut number = 0_u32;
    loop {
        let mut bytes = [0; FRAME_BYTES];
        stream.read_exact(&mut bytes)?;
        let field = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap_or_default());
        let (value, len) = (field(1), field(5));
        match bytes[0] {
            CONSUMED => word(shared.places.out_consumed(peer)).store(value, Ordering::Release),
            BYE => return Ok(()),
            DATA if len as usize <= SLOT_BYTES => {
                stream.read_exact(staging.bytes(len as usize))?;
                number = number.wrapping_add(1);
                let slot = shared.places.inbox(peer, number as usize % SLOTS);
                cuda::to_device(slot, staging.memory.address, len as usize, staging.stream)?;
                let flags = shared.places.in_flags(peer);
                for (word, value) in header(flags, number).into_iter().zip([value, len]) {
                    word.store(value, Ordering::Release);
                }
                word(flags).store(number, Ordering::Release);
            }
            kind => {
                warn(&format!("proxy: a message of unknown kind {kind}"));
                return Err(Error::InternalError);
            }
        }
    }
}
