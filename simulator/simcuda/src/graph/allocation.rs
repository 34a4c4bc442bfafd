//! Memory nodes: allocations with an address that is fixed from the node's creation on. The addresses and the
//! memory behind them belong to the device's current pool ([`memory::graph_allocate`]) as long as the node, or
//! an executable made of it, is there; they can be accessed between the nodes that allocate and free.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use cuda_abi::sys::{self, CUresult};
use cuda_abi::types::{CUdevice, CUgraphMem_attribute, c_void};
use parking_lot::Mutex;

use super::INVALID;
use crate::error::{Result, write_out};
use crate::{context, dispatch, memory, process};

/// Memory that an allocation node gives at each launch.
pub(crate) struct Allocation {
    address: u64,
    size_bytes: u64,
    device: i32,
    /// Handle of the graph with the allocation node.
    owner: usize,
    /// Handles of the graphs that have a free node for it.
    freed_by: Mutex<Vec<usize>>,
}

/// All allocations by their address; the nodes own them.
static KNOWN: Mutex<BTreeMap<u64, Known>> = Mutex::new(BTreeMap::new());
/// The most bytes that graphs have used and reserved of each device.
static HIGH: Mutex<BTreeMap<i32, Usage>> = Mutex::new(BTreeMap::new());

/// What can be told of an allocation without owning it for a moment: its last owner gives its memory back.
struct Known {
    size_bytes: u64,
    device: i32,
    allocation: Weak<Allocation>,
}

#[derive(Clone, Copy, Default)]
struct Usage {
    used_bytes: u64,
    reserved_bytes: u64,
}

impl Allocation {
    /// An allocation of `size_bytes` for a node of the graph `owner`.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for 0 bytes, `CUDA_ERROR_OUT_OF_MEMORY`.
    pub(super) fn new(size_bytes: u64, device: i32, owner: usize) -> Result<Arc<Self>> {
        // Memory of a pool belongs to no context.
        let context = context::top().map_or(0, |context| context.handle);
        let address = memory::graph_allocate(device, context, size_bytes)?;
        Ok(Self::known(address, size_bytes, device, owner))
    }

    /// The allocation that a stream captured: its address was returned already.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if there is none.
    pub(super) fn captured(address: u64, owner: usize) -> Result<Arc<Self>> {
        let device = memory::device_of(address).ok_or(INVALID)?;
        let mut size_bytes = 0;
        // SAFETY: the out parameter is a local variable, and the other one is not wanted.
        unsafe { dispatch::cuMemGetAddressRange_v2(std::ptr::null_mut(), &raw mut size_bytes, address) }?;
        Ok(Self::known(address, size_bytes as u64, device, owner))
    }

    fn known(address: u64, size_bytes: u64, device: i32, owner: usize) -> Arc<Self> {
        let allocation = Arc::new(Self { address, size_bytes, device, owner, freed_by: Mutex::default() });
        let known = Known { size_bytes, device, allocation: Arc::downgrade(&allocation) };
        KNOWN.lock().insert(address, known);
        note_usage(device);
        allocation
    }

    pub(super) fn address(&self) -> u64 {
        self.address
    }

    /// The parameters of its node.
    pub(super) fn params(&self) -> sys::CUDA_MEM_ALLOC_NODE_PARAMS {
        let location = sys::CUmemLocation {
            type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            __bindgen_anon_1: sys::CUmemLocation_st__bindgen_ty_1 { id: self.device },
        };
        let pool = sys::CUmemPoolProps {
            allocType: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            handleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
            location,
            win32SecurityAttributes: std::ptr::null_mut(),
            maxSize: 0,
            usage: 0,
            gpuDirectRDMACapable: 0,
            reserved: [0; 53],
        };
        sys::CUDA_MEM_ALLOC_NODE_PARAMS {
            poolProps: pool,
            accessDescs: std::ptr::null(),
            accessDescCount: 0,
            bytesize: self.size_bytes as usize,
            dptr: self.address,
        }
    }

    /// What a free node of a graph holds.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for a second one in the same graph, and for ones in both the graph that
    /// allocates and another one.
    pub(super) fn claim(self: Arc<Self>, graph: usize) -> Result<Arc<Claim>> {
        let mut freed_by = self.freed_by.lock();
        let by_owner = graph == self.owner || freed_by.contains(&self.owner);
        if freed_by.contains(&graph) || (by_owner && !freed_by.is_empty()) {
            return Err(INVALID);
        }
        freed_by.push(graph);
        drop(freed_by);
        Ok(Arc::new(Claim { allocation: self, graph }))
    }

    /// Whether a launch that was submitted leaves it allocated and the program has not freed it since.
    pub(super) fn is_left(&self) -> bool {
        memory::graph_is_left(self.address)
    }

    /// A launch is submitted that leaves it allocated, or frees it.
    pub(super) fn set_left(&self, is_left: bool) {
        memory::graph_set_left(self.address, is_left);
    }

    /// The allocation node is reached.
    ///
    /// # Errors
    /// `CUDA_ERROR_ILLEGAL_ADDRESS` if the memory is in use.
    pub(super) fn map(&self) -> Result {
        memory::pool_activate(self.address).map_err(|_| CUresult::CUDA_ERROR_ILLEGAL_ADDRESS)?;
        note_usage(self.device);
        Ok(())
    }

    /// The free node is reached.
    ///
    /// # Errors
    /// `CUDA_ERROR_ILLEGAL_ADDRESS` if there is no memory at this point of the order.
    pub(super) fn unmap(&self) -> Result {
        if !is_mapped(self.address, self.device) {
            return Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        }
        memory::pool_release(self.address).map_err(|_| CUresult::CUDA_ERROR_ILLEGAL_ADDRESS)
    }

    /// Frees what an earlier launch left (CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH).
    ///
    /// # Errors
    /// As [`Self::unmap`].
    pub(super) fn unmap_if_mapped(&self) -> Result {
        if is_mapped(self.address, self.device) { self.unmap() } else { Ok(()) }
    }
}

/// The right of a graph's free node, and of what is made of it, to free an allocation.
pub(super) struct Claim {
    pub(super) allocation: Arc<Allocation>,
    graph: usize,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.allocation.freed_by.lock().retain(|graph| *graph != self.graph);
    }
}

impl Drop for Allocation {
    /// What a launch left allocated outlives the nodes, until the program frees it (CUDA programming guide,
    /// "Graph Memory Nodes").
    fn drop(&mut self) {
        KNOWN.lock().remove(&self.address);
        memory::graph_forget(self.address);
    }
}

fn usage(device: i32) -> Usage {
    let mut usage = Usage::default();
    for (address, known) in KNOWN.lock().iter().filter(|(_, known)| known.device == device) {
        usage.reserved_bytes += known.size_bytes;
        if is_mapped(*address, device) {
            usage.used_bytes += known.size_bytes;
        }
    }
    usage
}

fn is_mapped(address: u64, device: i32) -> bool {
    memory::span(address, device).is_some()
}

fn note_usage(device: i32) {
    let now = usage(device);
    let mut high = HIGH.lock();
    let high = high.entry(device).or_default();
    high.used_bytes = high.used_bytes.max(now.used_bytes);
    high.reserved_bytes = high.reserved_bytes.max(now.reserved_bytes);
}

/// The allocation of an address that a free node names.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` if no allocation node gave it.
pub(super) fn of_free(address: u64) -> Result<Arc<Allocation>> {
    KNOWN.lock().get(&address).and_then(|known| known.allocation.upgrade()).ok_or(INVALID)
}

/// The memory of nodes that are there is not given back: there is nothing else that could be.
pub(crate) unsafe fn cuDeviceGraphMemTrim(device: CUdevice) -> Result {
    process::device(device).map(|_| ())
}

pub(crate) unsafe fn cuDeviceGetGraphMemAttribute(
    device: CUdevice,
    attribute: CUgraphMem_attribute,
    value: *mut c_void,
) -> Result {
    use sys::CUgraphMem_attribute as Attribute;
    let device = process::device(device)?;
    let now = usage(device.ordinal);
    let high = HIGH.lock().get(&device.ordinal).copied().unwrap_or_default();
    let bytes = match attribute {
        id if id == Attribute::CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT as u32 => now.used_bytes,
        id if id == Attribute::CU_GRAPH_MEM_ATTR_USED_MEM_HIGH as u32 => high.used_bytes,
        id if id == Attribute::CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT as u32 => now.reserved_bytes,
        id if id == Attribute::CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH as u32 => high.reserved_bytes,
        _ => return Err(INVALID),
    };
    // SAFETY: `value` is the caller's out parameter, which is 64 bits for each of these attributes.
    unsafe { write_out(value.cast::<u64>(), bytes) }
}

/// The high marks can be set back to what is in use now, by 0.
pub(crate) unsafe fn cuDeviceSetGraphMemAttribute(
    device: CUdevice,
    attribute: CUgraphMem_attribute,
    value: *mut c_void,
) -> Result {
    use sys::CUgraphMem_attribute as Attribute;
    let device = process::device(device)?;
    // SAFETY: NULL or the caller's value, which is 64 bits for each of these attributes.
    if unsafe { value.cast::<u64>().as_ref() } != Some(&0) {
        return Err(INVALID);
    }
    let now = usage(device.ordinal);
    let mut high = HIGH.lock();
    let high = high.entry(device.ordinal).or_default();
    match attribute {
        id if id == Attribute::CU_GRAPH_MEM_ATTR_USED_MEM_HIGH as u32 => high.used_bytes = now.used_bytes,
        id if id == Attribute::CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH as u32 => {
            high.reserved_bytes = now.reserved_bytes;
        }
        _ => return Err(INVALID),
    }
    Ok(())
}
