//! Communicators: made, split, used, ended.

use std::collections::BTreeMap;
use std::ffi::{CString, c_void};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use cuda_abi::types::*;
use parking_lot::Mutex;

use crate::bootstrap::{Bootstrap, MAX_RANKS, Root};
use crate::collective::{Call, Work};
use crate::cuda::{self, Context, Pinned, Stream, call};
use crate::meeting::Meeting;
use crate::nvls::Nvls;
use crate::proxy::Proxy;
use crate::transport::{Purpose, Transport};
use crate::types::{Config, Error, Result, SUCCESS, UniqueId, warn};
use crate::windows::{Request, Windows};
use crate::{kernel, net};

/// How often a wait for the end of work looks.
const POLL_INTERVAL: Duration = Duration::from_micros(100);
/// How long an abort waits for kernels to see it.
const ABORT_LIMIT: Duration = Duration::from_secs(10);

/// Bytes of a work descriptor of the ring, and how many there are.
const WORK_BYTES: usize = 4096;
const RING: usize = 64;

/// The words that the host and the kernel share: abort, mismatch.
const CONTROL_BYTES: usize = 64;

/// What a communicator has once it is made. The fields are dropped in this order.
pub(crate) struct Connected {
    works: Mutex<Works>,
    order: Mutex<Order>,
    meeting: Meeting,
    /// Made by the first one, if they have connections of their own.
    collectives: OnceLock<Transport>,
    transport: Transport,
    control: Pinned,
    function: Function,
    pub(crate) bootstrap: Bootstrap,
}

/// A kernel's handle, which any thread may use.
struct Function {
    module: CUmodule,
    function: CUfunction,
}

// SAFETY: the driver's handles belong to no thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Drop for Function {
    fn drop(&mut self) {
        // At the end of the process the driver may be gone.
        let _ = call!(cuModuleUnload(self.module));
    }
}

impl Function {
    fn load() -> Result<Self> {
        let text = CString::new(kernel::text()).map_err(|_| Error::InternalError)?;
        let name = CString::new(kernel::NAME).map_err(|_| Error::InternalError)?;
        let mut module = std::ptr::null_mut();
        call!(cuModuleLoadData(&raw mut module, text.as_ptr().cast()))?;
        let mut loaded = Self { module, function: std::ptr::null_mut() };
        call!(cuModuleGetFunction(&raw mut loaded.function, module, name.as_ptr()))?;
        Ok(loaded)
    }
}

/// Descriptors of work: those of a ring, which is used again and again, and those that graphs keep.
struct Works {
    ring: Pinned,
    next: usize,
    is_used: [bool; RING],
    of_graphs: Vec<Pinned>,
}

/// Work of a communicator runs in the order of the calls, on whichever streams.
struct Order {
    event: CUevent,
    last: Option<Stream>,
}

// SAFETY: the driver's handles belong to no thread.
unsafe impl Send for Order {}

/// A communicator, as the handles of a program name it.
pub(crate) struct Comm {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    pub(crate) device: CUdevice,
    pub(crate) context: Context,
    pub(crate) config: Config,
    /// An `ncclResult_t`: in progress while it is made or finalized, or what went wrong.
    state: AtomicU32,
    pub(crate) windows: Windows,
    connected: OnceLock<Connected>,
    is_finalized: AtomicBool,
    /// How many communicators were split off.
    children: AtomicU32,
}

static ALL: Mutex<BTreeMap<usize, Arc<Comm>>> = Mutex::new(BTreeMap::new());

/// The communicator of a handle.
///
/// # Errors
/// `ncclInvalidArgument` for a handle that is none.
pub(crate) fn by_handle(handle: *mut c_void) -> Result<Arc<Comm>> {
    let found = ALL.lock().get(&(handle as usize)).cloned();
    found.ok_or_else(|| {
        warn("the communicator is none, or destroyed");
        Error::InvalidArgument
    })
}

/// Where a new communicator's connections come from.
pub(crate) enum Origin {
    Root(Root),
    Part {
        parent: Arc<Comm>,
        members: Vec<usize>,
        number: u64,
    },
    /// As a part, but the other ranks do not answer.
    Left {
        parent: Arc<Comm>,
        members: Vec<usize>,
        number: u64,
    },
}

fn word(address: u64) -> &'static AtomicU32 {
    // SAFETY: callers pass words of pinned memory that a communicator keeps while it is used, touched by atomics and
    // kernels only.
    unsafe { AtomicU32::from_ptr(address as *mut u32) }
}

impl Comm {
    /// A communicator that is not connected yet, and its handle.
    pub(crate) fn create(rank: usize, ranks: usize, config: Config) -> Result<Arc<Self>> {
        if ranks == 0 || ranks > MAX_RANKS || rank >= ranks {
            warn(&format!("invalid rank requested: {rank}/{ranks}"));
            return Err(Error::InvalidArgument);
        }
        let (context, device) = cuda::context()?;
        let comm = Arc::new(Self {
            rank,
            ranks,
            device,
            context: Context(context),
            config,
            state: AtomicU32::new(Error::InProgress as u32),
            windows: Windows::default(),
            connected: OnceLock::new(),
            is_finalized: AtomicBool::new(false),
            children: AtomicU32::new(0),
        });
        ALL.lock().insert(comm.handle() as usize, Arc::clone(&comm));
        Ok(comm)
    }

    pub(crate) fn handle(self: &Arc<Self>) -> *mut c_void {
        Arc::as_ptr(self).cast_mut().cast()
    }

    /// Makes the connections. The result is the communicator's state, too.
    pub(crate) fn connect(self: &Arc<Self>, origin: Origin) -> Result {
        let result = self.try_connect(origin);
        self.state.store(result.map_or_else(|error| error as u32, |()| SUCCESS), Ordering::Release);
        result
    }

    fn try_connect(&self, origin: Origin) -> Result {
        cuda::make_current(self.context)?;
        let bootstrap = match origin {
            Origin::Root(root) => Bootstrap::meet(root, self.rank, self.ranks)?,
            Origin::Part { parent, members, number } => {
                parent.connected()?.bootstrap.part(&members, number)?
            }
            Origin::Left { parent, members, number } => {
                parent.connected()?.bootstrap.left(&members, number)?
            }
        };
        self.check_devices(&bootstrap)?;
        let function = Function::load()?;
        let meeting = Meeting::prepare(&bootstrap, self.device)?;
        let purpose = if meeting.is_late { Purpose::Pairs } else { Purpose::All };
        let transport = Transport::connect(&bootstrap, self.context, self.device, purpose)?;
        let mut event = std::ptr::null_mut();
        call!(cuEventCreate(&raw mut event, 2))?;
        let ring = Pinned::create(self.context, RING * WORK_BYTES)?;
        let connected = Connected {
            works: Mutex::new(Works { ring, next: 0, is_used: [false; RING], of_graphs: Vec::new() }),
            order: Mutex::new(Order { event, last: None }),
            meeting,
            collectives: OnceLock::new(),
            transport,
            control: Pinned::create(self.context, CONTROL_BYTES)?,
            function,
            bootstrap,
        };
        connected.bootstrap.barrier()?;
        self.connected.set(connected).map_err(|_| Error::InternalError)
    }

    /// Two ranks on one device are refused, unless they are asked for.
    fn check_devices(&self, bootstrap: &Bootstrap) -> Result {
        let place = [&cuda::bus_id(self.device)?[..], &net::host()].concat();
        let ids = bootstrap.all_gather(&place)?;
        let is_wanted = std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|text| text.trim() == "1");
        let is_same = |(rank, id): (usize, &Vec<u8>)| rank != self.rank && *id == ids[self.rank];
        if !is_wanted && ids.iter().enumerate().any(is_same) {
            warn(&format!("Duplicate GPU detected : rank {} and another one", self.rank));
            return Err(Error::InvalidUsage);
        }
        Ok(())
    }

    /// # Errors
    /// `ncclInvalidUsage` while it is being made; what went wrong if it could not be made.
    pub(crate) fn connected(&self) -> Result<&Connected> {
        self.connected.get().ok_or_else(|| self.error().err().unwrap_or(Error::InvalidUsage))
    }

    /// The asynchronous state.
    ///
    /// # Errors
    /// `ncclInProgress`, or what went wrong.
    pub(crate) fn error(&self) -> Result {
        let of_proxy = || {
            let proxies = self.connected.get().into_iter().flat_map(Connected::proxies);
            proxies.map(Proxy::error).find(|error| *error != 0).unwrap_or(0)
        };
        let mismatch =
            || self.connected.get().map_or(0, |it| word(it.control.address + 4).load(Ordering::Acquire));
        match self.state.load(Ordering::Acquire) {
            SUCCESS if mismatch() != 0 => Err(Error::InvalidUsage),
            SUCCESS => code_of(of_proxy()),
            state => code_of(state),
        }
    }

    /// Whether calls have to wait for other ranks before they are queued.
    ///
    /// # Errors
    /// When nothing can be queued.
    pub(crate) fn has_to_meet(&self, calls: &[(Call, Stream)]) -> Result<bool> {
        self.error().map_err(|error| match error {
            Error::InProgress => {
                warn("a communicator is used while it is in progress");
                Error::InvalidArgument
            }
            error => error,
        })?;
        if self.is_finalized.load(Ordering::Acquire) {
            // As NCCL 2.28.9, which is killed by SIGSEGV then.
            eprintln!("simnccl: a call on a communicator that is finalized");
            std::process::abort();
        }
        Ok(self.connected()?.meeting.is_needed(&without_streams(calls), self.rank, self.ranks))
    }

    /// Waits for the ranks that calls need for the first time.
    pub(crate) fn meet(&self, calls: &[(Call, Stream)]) -> Result {
        let connected = self.connected()?;
        let connect_all = || {
            cuda::make_current(self.context)?;
            let connect =
                || Transport::connect(&connected.bootstrap, self.context, self.device, Purpose::Collectives);
            let transport = cuda::outside_capture(connect)?;
            connected.collectives.set(transport).map_err(|_| Error::InternalError)
        };
        connected.meeting.meet(&connected.bootstrap, &without_streams(calls), connect_all)
    }

    /// As [`Self::meet`] and [`Self::enqueue`], in a thread: the communicator is in progress meanwhile.
    pub(crate) fn enqueue_later(self: &Arc<Self>, calls: Vec<(Call, Stream)>) -> Result {
        self.state.store(Error::InProgress as u32, Ordering::Release);
        let comm = Arc::clone(self);
        let work = move || {
            let queued = cuda::make_current(comm.context)
                .and_then(|()| comm.meet(&calls))
                .and_then(|()| comm.enqueue(&calls));
            let state = queued.map_or_else(|error| error as u32, |()| SUCCESS);
            // What an abort has set meanwhile stays.
            let (present, order) = (Error::InProgress as u32, Ordering::AcqRel);
            let _ = comm.state.compare_exchange(present, state, order, Ordering::Acquire);
        };
        std::thread::Builder::new().name("simnccl-group".into()).spawn(work)?;
        Ok(())
    }

    /// Queues calls in their order; all sends and receives among them make progress together.
    pub(crate) fn enqueue(&self, calls: &[(Call, Stream)]) -> Result {
        let connected = self.connected()?;
        let pairs: Vec<Call> =
            calls.iter().map(|(call, _)| *call).filter(|call| call.kind.is_pairwise()).collect();
        for (call, stream) in calls.iter().filter(|(call, _)| !call.kind.is_pairwise()) {
            let mut work = Work::of(call, self.rank, self.ranks);
            self.windows.apply(&mut work, call, self.rank, self.ranks);
            connected.launch(&work, connected.for_collectives(), *stream)?;
        }
        let of_pairs = calls.iter().find(|(call, _)| call.kind.is_pairwise());
        match of_pairs {
            Some((_, stream)) => {
                let rounds = Work::of_pairs(&pairs, self.rank)?;
                rounds.iter().try_for_each(|round| connected.launch(round, &connected.transport, *stream))
            }
            None => Ok(()),
        }
    }

    /// Registers a window with all other ranks. None if ranks cannot map each other's memory.
    pub(crate) fn register_window(&self, request: Request) -> Result<Option<usize>> {
        self.error()?;
        let connected = self.connected()?;
        if !connected.transport.supports_windows() {
            return Ok(None);
        }
        let register = || self.windows.register(request, &connected.bootstrap, self.context, self.device);
        self.in_context(register).map(Some)
    }

    /// Does something in the context of this communicator.
    pub(crate) fn in_context<T>(&self, body: impl FnOnce() -> Result<T>) -> Result<T> {
        let before = Context(cuda::context()?.0);
        cuda::make_current(self.context)?;
        let result = body();
        cuda::make_current(before)?;
        result
    }

    /// Waits until all work is done and sent.
    pub(crate) fn finalize(&self) -> Result {
        if self.is_finalized.swap(true, Ordering::AcqRel) {
            return Err(Error::InvalidArgument);
        }
        while self.connected.get().is_some() && self.state.load(Ordering::Acquire) == Error::InProgress as u32
        {
            std::thread::sleep(POLL_INTERVAL);
        }
        if let Some(connected) = self.connected.get() {
            connected.works.lock().wait_for_all(&connected.control, None);
            connected.proxies().for_each(Proxy::flush);
            // A peer may still read this rank's memory through the object.
            if connected.for_collectives().nvls.as_ref().is_some_and(Nvls::is_alone_in_process)
                && self.error().is_ok()
            {
                connected.bootstrap.barrier()?;
            }
        }
        Ok(())
    }

    /// Ends the communicator; `aborts`: also work that waits for peers.
    pub(crate) fn destroy(self: Arc<Self>, aborts: bool) -> Result {
        if aborts && let Some(connected) = self.connected.get() {
            connected.bootstrap.abort();
            connected.stop();
            self.state.store(Error::InvalidUsage as u32, Ordering::Release);
        }
        if !aborts && !self.is_finalized.load(Ordering::Acquire) {
            self.finalize()?;
        }
        self.windows.warn_of_rest();
        let before = cuda::context()?.0;
        cuda::make_current(self.context)?;
        ALL.lock().remove(&(self.handle() as usize));
        drop(self);
        cuda::make_current(Context(before))
    }

    /// The communicator of this rank's colour, for all ranks with that colour, by key and then by rank. None without a
    /// colour.
    pub(crate) fn split(
        self: &Arc<Self>,
        colour: Option<i32>,
        key: i32,
        config: Config,
    ) -> Result<Option<(Arc<Self>, Origin)>> {
        self.error()?;
        let bootstrap = &self.connected()?.bootstrap;
        let child = self.children.fetch_add(1, Ordering::AcqRel);
        let mut mine = colour.unwrap_or(-1).to_le_bytes().to_vec();
        mine.extend(key.to_le_bytes());
        let all = bootstrap.all_gather(&mine)?;
        let field = |bytes: &[u8]| i32::from_le_bytes(bytes.try_into().unwrap_or_default());
        let Some(colour) = colour else {
            bootstrap.no_part()?;
            return Ok(None);
        };
        let mut members: Vec<(i32, usize)> = all
            .iter()
            .enumerate()
            .filter(|(_, bytes)| field(&bytes[..4]) == colour)
            .map(|(rank, bytes)| (field(&bytes[4..]), rank))
            .collect();
        members.sort_unstable();
        let members: Vec<usize> = members.into_iter().map(|(_, rank)| rank).collect();
        let rank = members.iter().position(|member| *member == self.rank).ok_or(Error::InternalError)?;
        let number = number_of(bootstrap.number, &[u64::from(child) + 1, u64::from(colour.cast_unsigned())]);
        let comm = Self::create(rank, members.len(), config)?;
        Ok(Some((comm, Origin::Part { parent: Arc::clone(self), members, number })))
    }

    /// A communicator with new ranks, which come by the unique ID. One of the ranks has it, and tells the others.
    pub(crate) fn grow(
        self: &Arc<Self>,
        id: Option<&UniqueId>,
        ranks: usize,
        config: Config,
    ) -> Result<(Arc<Self>, Origin)> {
        self.error()?;
        if ranks <= self.ranks {
            warn(&format!("ncclCommGrow: {ranks} ranks are no more than {}", self.ranks));
            return Err(Error::InvalidArgument);
        }
        let mine = id.map_or([0; 128], |id| id.bytes);
        let all = self.connected()?.bootstrap.all_gather(&mine)?;
        let found = all.into_iter().find(|bytes| bytes.iter().any(|byte| *byte != 0));
        let bytes = found.and_then(|bytes| bytes.try_into().ok()).ok_or_else(|| {
            warn("ncclCommGrow: no rank of the communicator has passed the unique ID");
            Error::InvalidArgument
        })?;
        let root = Root::decode(&UniqueId { bytes })?;
        Ok((Self::create(self.rank, ranks, config)?, Origin::Root(root)))
    }

    /// Stops all work, also what waits for peers. Nothing can be queued any more.
    pub(crate) fn revoke(&self) -> Result {
        self.connected()?.stop();
        self.state.store(Error::InvalidUsage as u32, Ordering::Release);
        Ok(())
    }

    /// A communicator without some ranks, which do not take part in this. `aborts`: work is stopped first.
    pub(crate) fn shrink(
        self: &Arc<Self>,
        excluded: &[usize],
        config: Config,
        aborts: bool,
    ) -> Result<(Arc<Self>, Origin)> {
        if excluded.is_empty()
            || excluded.contains(&self.rank)
            || excluded.iter().any(|rank| *rank >= self.ranks)
        {
            warn("ncclCommShrink: no ranks to leave out, this rank, or one that there is not");
            return Err(Error::InvalidArgument);
        }
        let connected = self.connected()?;
        if aborts {
            self.revoke()?;
        }
        let child = self.children.fetch_add(1, Ordering::AcqRel);
        let members: Vec<usize> = (0..self.ranks).filter(|rank| !excluded.contains(rank)).collect();
        let rank = members.iter().position(|member| *member == self.rank).ok_or(Error::InternalError)?;
        let left = members.iter().fold(0, |left, member| left | 1 << *member);
        // No split has this one.
        let number = number_of(connected.bootstrap.number, &[u64::from(child) + 1, u64::MAX, left]);
        let comm = Self::create(rank, members.len(), config)?;
        Ok((comm, Origin::Left { parent: Arc::clone(self), members, number }))
    }
}

fn without_streams(calls: &[(Call, Stream)]) -> Vec<Call> {
    calls.iter().map(|(call, _)| *call).collect()
}

/// The number of a communicator that is made of another one.
fn number_of(parent: u64, words: &[u64]) -> u64 {
    words.iter().fold(parent, |hash, word| (hash ^ word).wrapping_mul(0x0100_0000_01b3))
}

fn code_of(code: u32) -> Result {
    let known = [
        Error::UnhandledCudaError,
        Error::SystemError,
        Error::InternalError,
        Error::InvalidArgument,
        Error::InvalidUsage,
        Error::RemoteError,
        Error::InProgress,
    ];
    if code == SUCCESS {
        return Ok(());
    }
    Err(known.into_iter().find(|error| *error as u32 == code).unwrap_or(Error::InternalError))
}

impl Connected {
    /// Ends all work, also what waits for peers.
    fn stop(&self) {
        self.meeting.abort();
        word(self.control.address).store(1, Ordering::Release);
        self.works.lock().wait_for_all(&self.control, Some(Instant::now() + ABORT_LIMIT));
    }

    fn for_collectives(&self) -> &Transport {
        self.collectives.get().unwrap_or(&self.transport)
    }

    fn proxies(&self) -> impl Iterator<Item = &Proxy> {
        [Some(&self.transport), self.collectives.get()]
            .into_iter()
            .flatten()
            .filter_map(|it| it.proxy.as_ref())
    }

    /// Puts work into a stream.
    fn launch(&self, work: &Work, transport: &Transport, stream: Stream) -> Result {
        for (to, from, bytes) in &work.copies {
            call!(cuMemcpyDtoDAsync_v2(*to, *from, *bytes, stream.0))?;
        }
        if work.is_empty() {
            return Ok(());
        }
        let is_capturing = stream.is_capturing()?;
        let mut order = self.order.lock();
        if !is_capturing && order.last.is_some_and(|last| last != stream) {
            call!(cuStreamWaitEvent(stream.0, order.event, 0))?;
        }
        let descriptor = self.descriptor(work, transport, is_capturing)?;
        let arguments = [descriptor, transport.table.address, self.control.address];
        let mut pointers =
            arguments.each_ref().map(|argument| std::ptr::from_ref(argument).cast_mut().cast());
        let function = self.function.function;
        let no_extra = std::ptr::null_mut();
        let pointers = pointers.as_mut_ptr();
        call!(cuLaunchKernel(function, 1, 1, 1, kernel::THREADS, 1, 1, 0, stream.0, pointers, no_extra))?;
        if !is_capturing {
            call!(cuEventRecord(order.event, stream.0))?;
            order.last = Some(stream);
        }
        Ok(())
    }

    /// A descriptor of the work in pinned memory. Graphs keep theirs, for each of their launches.
    fn descriptor(&self, work: &Work, transport: &Transport, is_kept: bool) -> Result<u64> {
        let multicast = transport.nvls.as_ref().map(Nvls::addresses);
        let words = work.words(self.bootstrap.rank, self.bootstrap.ranks, multicast);
        let mut works = self.works.lock();
        let address = if is_kept || work.descriptor_bytes() > WORK_BYTES {
            let memory = cuda::outside_capture(|| {
                Pinned::create(Context(cuda::context()?.0), work.descriptor_bytes())
            })?;
            let address = memory.address;
            works.of_graphs.push(memory);
            address
        } else {
            works.take(&self.control)?
        };
        // SAFETY: the memory has room for the words, and no kernel reads it before it is launched.
        let target = unsafe { std::slice::from_raw_parts_mut(address as *mut u64, words.len()) };
        target.copy_from_slice(&words);
        Ok(address)
    }
}

impl Works {
    fn place(&self, index: usize) -> u64 {
        self.ring.address + (index * WORK_BYTES) as u64
    }

    fn is_done(&self, index: usize) -> bool {
        !self.is_used[index] || word(self.place(index)).load(Ordering::Acquire) == 1
    }

    /// The next descriptor, once its work is done.
    fn take(&mut self, control: &Pinned) -> Result<u64> {
        let index = self.next;
        while !self.is_done(index) {
            if word(control.address).load(Ordering::Acquire) != 0 {
                return Err(Error::InvalidUsage);
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        self.next = (index + 1) % RING;
        self.is_used[index] = true;
        Ok(self.place(index))
    }

    /// Waits until all work of the ring is done, the communicator has failed, or the time is up.
    fn wait_for_all(&self, control: &Pinned, limit: Option<Instant>) {
        let is_done = || (0..RING).all(|index| self.is_done(index));
        let is_given_up = || match limit {
            Some(limit) => Instant::now() >= limit,
            None => word(control.address + 4).load(Ordering::Acquire) != 0,
        };
        while !(is_done() || is_given_up()) {
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}
