//! The arena: the allocator behind cuMemAlloc, cuMemAllocPitch and cuMemFree.
//!
//! An allocation of at least the device's granularity is a block of its own; a smaller one is part of a slab. If the
//! arena cannot serve a call, the driver's own function does: the program gets the memory or the error that it would
//! have got without us.
//!
//! The lock protects the tables and is never held across a driver call.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ckpt_protocol::agent::RegionKind;
use cuda_abi::sys;
use cuda_abi::types::{CUcontext, CUdeviceptr, CUresult};

use super::block::Block;
use super::device::Device;
use super::peer;
use super::reclaim::make_room;
use super::slab::Slabs;
use crate::cuda::activation::is_started;
use crate::cuda::handler::handlers;
use crate::cuda::result::{OUT_OF_MEMORY, SUCCESS};
use crate::cuda::shared::Shared;
use crate::cuda::{context, driver, sticky, stream_capture};

/// More than any device has, and asked for only to learn whether the driver refuses for another reason.
const FAR_TOO_MUCH: usize = 1 << 60;

/// Memory that the program has allocated.
#[derive(Clone, Debug)]
pub(crate) struct Allocation {
    pub address: CUdeviceptr,
    /// As the program asked for.
    pub bytes: u64,
    /// The address of the context that it goes with.
    pub context: usize,
    pub device: c_int,
    /// Never the same twice in the life of the process, and none that the driver would give.
    pub id: u64,
    /// `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`.
    pub is_sync_memops: bool,
    room: Room,
}

/// Where it lies.
#[derive(Clone, Copy, Debug)]
enum Room {
    Own(Block),
    Slab,
}

struct Arena {
    allocations: BTreeMap<CUdeviceptr, Allocation>,
    slabs: BTreeMap<c_int, Slabs>,
}

/// The numbers of allocations begin here: the driver's own are small.
static LAST_NUMBER: AtomicU64 = AtomicU64::new(0x436b << 40);

/// A number for an allocation, as the driver gives each (`CU_POINTER_ATTRIBUTE_BUFFER_ID`): never the same twice in the
/// life of the process, and none that the driver would give.
fn new_number() -> u64 {
    LAST_NUMBER.fetch_add(1, Relaxed)
}

static ARENA: Shared<Arena> = Shared::new(Arena { allocations: BTreeMap::new(), slabs: BTreeMap::new() });

impl Arena {
    fn note(&mut self, owner: Owner, address: CUdeviceptr, bytes: u64, room: Room) {
        let Owner { context, device } = owner;
        let (id, is_sync_memops) = (new_number(), false);
        let allocation = Allocation { address, bytes, context, device, id, is_sync_memops, room };
        self.allocations.insert(address, allocation);
    }

    fn around(&self, address: CUdeviceptr) -> Option<&Allocation> {
        let (start, allocation) = self.allocations.range(..=address).next_back()?;
        (address - start < allocation.bytes).then_some(allocation)
    }

    /// A part of a slab.
    ///
    /// # Errors
    /// There is no room: how large the slab is to be that makes some.
    fn allocate_small(&mut self, owner: Owner, bytes: u64, device: &Device) -> Result<CUdeviceptr, u64> {
        let slabs = self.slabs.entry(owner.device).or_default();
        let Some((address, _)) = slabs.take(bytes) else {
            return Err(slabs.next_bytes(device.granularity));
        };
        self.note(owner, address, bytes, Room::Slab);
        Ok(address)
    }

    /// Takes back the room of an allocation that is in no table any more; returns what goes back to the device.
    fn give(&mut self, allocation: &Allocation) -> Vec<Block> {
        match allocation.room {
            Room::Own(block) => vec![block],
            Room::Slab => {
                let slabs = self.slabs.entry(allocation.device).or_default();
                slabs.give(allocation.address, allocation.bytes)
            }
        }
    }
}

/// Whom an allocation is for.
#[derive(Clone, Copy)]
struct Owner {
    context: usize,
    device: c_int,
}

/// The allocation that an address lies in.
pub(crate) fn find(address: CUdeviceptr) -> Option<Allocation> {
    ARENA.lock().around(address).cloned()
}

/// How many allocations there are.
pub(crate) fn count() -> u64 {
    ARENA.lock().allocations.len() as u64
}

/// How many allocations begin in a range.
pub(crate) fn count_in(address: CUdeviceptr, bytes: u64) -> u64 {
    ARENA.lock().allocations.range(address..address.saturating_add(bytes)).count() as u64
}

/// Notes `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS` of the allocation that an address lies in.
pub(super) fn set_sync_memops(address: CUdeviceptr, is_set: bool) {
    let mut arena = ARENA.lock();
    let start = arena.around(address).map(|allocation| allocation.address);
    if let Some(allocation) = start.and_then(|start| arena.allocations.get_mut(&start)) {
        allocation.is_sync_memops = is_set;
    }
}

/// Takes an allocation out of the table: it is no longer found, and its memory stays until [`reclaim`].
pub(crate) fn take(address: CUdeviceptr, id: u64) -> Option<Allocation> {
    let mut arena = ARENA.lock();
    let is_it = arena.allocations.get(&address).is_some_and(|allocation| allocation.id == id);
    is_it.then(|| arena.allocations.remove(&address)).flatten()
}

/// Gives the memory of what was taken back. No submitted work may use it any more.
pub(crate) fn reclaim(allocation: &Allocation) {
    let blocks = ARENA.lock().give(allocation);
    blocks.into_iter().for_each(Block::give_back);
}

/// Frees the memory of a removed context, without waiting.
pub(crate) fn context_removed(context: CUcontext) {
    let mut blocks = Vec::new();
    let mut arena = ARENA.lock();
    let is_of_it = |allocation: &&Allocation| allocation.context == context as usize;
    let removed: Vec<_> =
        arena.allocations.values().filter(is_of_it).map(|allocation| allocation.address).collect();
    for address in removed {
        if let Some(allocation) = arena.allocations.remove(&address) {
            blocks.extend(arena.give(&allocation));
        }
    }
    drop(arena);
    blocks.into_iter().for_each(Block::give_back);
}

/// Gives memory back to a device that is allocated and not used; whether there was any.
pub(crate) fn trim(device: c_int) -> bool {
    let blocks = ARENA.lock().slabs.get_mut(&device).map(|slabs| slabs.drop_empty(0)).unwrap_or_default();
    let is_any = !blocks.is_empty();
    blocks.into_iter().for_each(Block::give_back);
    is_any
}

/// A block; what lies idle makes room for it.
fn create(kind: RegionKind, device: &Device, bytes: u64) -> Result<Block, CUresult> {
    match create_now(kind, device, bytes) {
        Err(OUT_OF_MEMORY) if make_room(device.ordinal) => create_now(kind, device, bytes),
        result => result,
    }
}

/// A block that its device, and those that have peer access to it, may read and write.
fn create_now(kind: RegionKind, device: &Device, bytes: u64) -> Result<Block, CUresult> {
    let allow = |block: &Block| peer::grant(device.ordinal, block.address, block.bytes);
    Block::create(kind, bytes, &device.properties(), allow)
}

fn allocate(owner: Owner, bytes: u64) -> Result<CUdeviceptr, CUresult> {
    const NOT_SUPPORTED: CUresult = sys::CUresult::CUDA_ERROR_NOT_SUPPORTED as CUresult;
    let device = Device::of(owner.device).ok_or(NOT_SUPPORTED)?;
    if bytes >= device.granularity {
        let rounded = bytes.checked_next_multiple_of(device.granularity).ok_or(OUT_OF_MEMORY)?;
        let block = create(RegionKind::Allocation, &device, rounded)?;
        ARENA.lock().note(owner, block.address, bytes, Room::Own(block));
        return Ok(block.address);
    }
    loop {
        let wanted = match ARENA.lock().allocate_small(owner, bytes, &device) {
            Ok(address) => return Ok(address),
            Err(wanted) => wanted,
        };
        let slab = match create_now(RegionKind::Slab, &device, wanted) {
            Err(OUT_OF_MEMORY) => create(RegionKind::Slab, &device, device.granularity),
            result => result,
        }?;
        // Other threads may have taken all of it before the next turn.
        ARENA.lock().slabs.entry(owner.device).or_default().add(slab);
    }
}

/// Owner an allocation by this thread is; `None` where the driver has to answer.
fn owner() -> Option<Owner> {
    if !is_started() {
        return None;
    }
    let (context, device) = context::current()?;
    Some(Owner { context: context as usize, device })
}

fn is_of_capture(result: CUresult) -> bool {
    const FIRST: CUresult = sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED as CUresult;
    const LAST: CUresult = sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD as CUresult;
    (FIRST..=LAST).contains(&result)
}

/// What the driver says of an allocation while a stream is being captured: its mode, and the thread's, decide, and
/// what is forbidden spoils the capture. And after an error that stays, which every allocation fails with.
pub(super) fn permitted() -> Result<(), CUresult> {
    if stream_capture::open_captures() == 0 && !sticky::is_suspected() {
        return Ok(());
    }
    let mut address = 0;
    // SAFETY: `address` is a local variable.
    let result = unsafe { driver::cuMemAlloc_v2(&raw mut address, FAR_TOO_MUCH) };
    if is_of_capture(result) || sticky::is_one(result) { Err(result) } else { Ok(()) }
}

/// Waits for all work of the current context, as cuMemFree does.
pub(super) fn synchronize() -> CUresult {
    if stream_capture::open_captures() > 0 {
        // cuCtxSynchronize would spoil a capture that cuMemFree leaves alone: so it is a cuMemFree that waits.
        let mut address = 0;
        // SAFETY: `address` is a local variable.
        let result = unsafe { driver::cuMemAlloc_v2(&raw mut address, 1) };
        if result == SUCCESS {
            // SAFETY: it was allocated above and is not used.
            return unsafe { driver::cuMemFree_v2(address) };
        }
        if is_of_capture(result) {
            return result;
        }
    }
    // SAFETY: the call has no parameters.
    unsafe { driver::cuCtxSynchronize() }
}

/// The pitch of rows on a device, and the length of so many.
fn pitched(device: c_int, width_bytes: usize, height: usize) -> Option<(usize, u64)> {
    let pitch = (width_bytes as u64).checked_next_multiple_of(Device::of(device)?.pitch)?;
    Some((usize::try_from(pitch).ok()?, pitch.checked_mul(height as u64)?))
}

handlers! {
    fn cuMemAlloc_v2(out: *mut CUdeviceptr, bytes: usize) |call| {
        let owner = if out.is_null() || bytes == 0 { None } else { owner() };
        if let Some(owner) = owner
            && permitted().is_ok()
            && let Ok(address) = allocate(owner, bytes as u64)
        {
            // SAFETY: the caller's out parameter, which is not NULL.
            unsafe { out.write(address) };
            return SUCCESS;
        }
        call()
    }

    fn cuMemAllocPitch_v2(
        out: *mut CUdeviceptr, pitch_out: *mut usize, width_bytes: usize, height: usize, element_bytes: c_uint
    ) |call| {
        let is_valid = !out.is_null() && !pitch_out.is_null() && width_bytes > 0 && height > 0;
        let owner = if is_valid && matches!(element_bytes, 4 | 8 | 16) { owner() } else { None };
        if let Some(owner) = owner
            && let Some((pitch, bytes)) = pitched(owner.device, width_bytes, height)
            && permitted().is_ok()
            && let Ok(address) = allocate(owner, bytes)
        {
            // SAFETY: the caller's out parameter, which is not NULL.
            unsafe { out.write(address) };
            // SAFETY: as above.
            unsafe { pitch_out.write(pitch) };
            return SUCCESS;
        }
        call()
    }

    /// Slabs that nothing is in count as free: they are given back before an allocation fails.
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) |call| {
        let result = call();
        if result == SUCCESS
            && !free.is_null()
            && let Some(owner) = owner()
        {
            let idle_bytes = ARENA.lock().slabs.get(&owner.device).map_or(0, Slabs::empty_bytes);
            // SAFETY: the caller's out parameter, which the driver has written to.
            let free_bytes = unsafe { free.read() };
            // SAFETY: as above.
            unsafe { free.write(free_bytes.saturating_add(idle_bytes as usize)) };
        }
        result
    }
}
