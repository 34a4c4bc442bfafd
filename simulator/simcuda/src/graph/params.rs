//! Reading and setting what a node does.

use cuda_abi::sys::{self, CUgraphNodeType as Kind, CUresult};
use cuda_abi::types::{CUcontext, CUdeviceptr, CUevent, CUgraph, CUgraphNode};

use super::build::{child_of, host};
use super::operation::{MemoryOpsNode, Operation, fill_params};
use super::{INVALID, node_by_handle};
use crate::error::{Result, write_out};
use crate::process;
use crate::stream::event_by_handle;
use crate::transfer::layout;

/// What a node does.
fn operation_of(node: CUgraphNode) -> Result<Operation> {
    let (graph, id) = node_by_handle(node)?;
    graph.operation(id)
}

fn set(node: CUgraphNode, operation: Operation) -> Result {
    let (graph, id) = node_by_handle(node)?;
    graph.set_operation(id, operation)
}

// ---- one kind each ----

pub(crate) unsafe fn cuGraphKernelNodeGetParams(
    node: CUgraphNode,
    out: *mut sys::CUDA_KERNEL_NODE_PARAMS_v1,
) -> Result {
    let Operation::Kernel(kernel) = operation_of(node)? else { return Err(INVALID) };
    let params = kernel.params();
    let params = sys::CUDA_KERNEL_NODE_PARAMS_v1 {
        func: params.func,
        gridDimX: params.gridDimX,
        gridDimY: params.gridDimY,
        gridDimZ: params.gridDimZ,
        blockDimX: params.blockDimX,
        blockDimY: params.blockDimY,
        blockDimZ: params.blockDimZ,
        sharedMemBytes: params.sharedMemBytes,
        kernelParams: params.kernelParams,
        extra: params.extra,
    };
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, params) }
}

pub(crate) unsafe fn cuGraphKernelNodeGetParams_v2(
    node: CUgraphNode,
    out: *mut sys::CUDA_KERNEL_NODE_PARAMS,
) -> Result {
    let Operation::Kernel(kernel) = operation_of(node)? else { return Err(INVALID) };
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, kernel.params()) }
}

pub(crate) unsafe fn cuGraphKernelNodeSetParams(
    node: CUgraphNode,
    params: *const sys::CUDA_KERNEL_NODE_PARAMS_v1,
) -> Result {
    node_by_handle(node)?;
    // SAFETY: `params` is NULL or the caller's structure.
    set(node, unsafe { Operation::kernel_v1(params) }?)
}

pub(crate) unsafe fn cuGraphKernelNodeSetParams_v2(
    node: CUgraphNode,
    params: *const sys::CUDA_KERNEL_NODE_PARAMS,
) -> Result {
    node_by_handle(node)?;
    // SAFETY: `params` is NULL or the caller's structure.
    set(node, unsafe { Operation::kernel(params) }?)
}

pub(crate) unsafe fn cuGraphMemcpyNodeGetParams(node: CUgraphNode, out: *mut sys::CUDA_MEMCPY3D) -> Result {
    let Operation::Copy(copy) = operation_of(node)? else { return Err(INVALID) };
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, copy.params) }
}

pub(crate) unsafe fn cuGraphMemcpyNodeSetParams(
    node: CUgraphNode,
    params: *const sys::CUDA_MEMCPY3D,
) -> Result {
    let Operation::Copy(copy) = operation_of(node)? else { return Err(INVALID) };
    // SAFETY: `params` is NULL or the caller's structure.
    set(node, unsafe { Operation::copy(params, copy.context.handle as CUcontext) }?)
}

pub(crate) unsafe fn cuGraphMemsetNodeGetParams(
    node: CUgraphNode,
    out: *mut sys::CUDA_MEMSET_NODE_PARAMS,
) -> Result {
    let Operation::Fill { fill, .. } = operation_of(node)? else { return Err(INVALID) };
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, fill_params(&fill)) }
}

pub(crate) unsafe fn cuGraphMemsetNodeSetParams(
    node: CUgraphNode,
    params: *const sys::CUDA_MEMSET_NODE_PARAMS,
) -> Result {
    let Operation::Fill { context, .. } = operation_of(node)? else { return Err(INVALID) };
    // SAFETY: `params` is NULL or the caller's structure.
    set(node, unsafe { Operation::fill(params, context.handle as CUcontext) }?)
}

pub(crate) unsafe fn cuGraphHostNodeGetParams(
    node: CUgraphNode,
    out: *mut sys::CUDA_HOST_NODE_PARAMS,
) -> Result {
    let Operation::Host(function) = operation_of(node)? else { return Err(INVALID) };
    let (fn_, userData) = function.parts();
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, sys::CUDA_HOST_NODE_PARAMS { fn_, userData }) }
}

pub(crate) unsafe fn cuGraphHostNodeSetParams(
    node: CUgraphNode,
    params: *const sys::CUDA_HOST_NODE_PARAMS,
) -> Result {
    // SAFETY: `params` is NULL or the caller's structure.
    set(node, unsafe { host(params) }?)
}

/// The graph is destroyed with its node: it can be changed, but not destroyed on its own.
pub(crate) unsafe fn cuGraphChildGraphNodeGetGraph(node: CUgraphNode, out: *mut CUgraph) -> Result {
    let Operation::Child(child) = operation_of(node)? else { return Err(INVALID) };
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, child.handle()) }
}

pub(crate) unsafe fn cuGraphEventRecordNodeGetEvent(node: CUgraphNode, out: *mut CUevent) -> Result {
    let Operation::Record(event) = operation_of(node)? else { return Err(INVALID) };
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, event.handle as CUevent) }
}

pub(crate) unsafe fn cuGraphEventRecordNodeSetEvent(node: CUgraphNode, event: CUevent) -> Result {
    set(node, Operation::Record(event_by_handle(event)?))
}

pub(crate) unsafe fn cuGraphEventWaitNodeGetEvent(node: CUgraphNode, out: *mut CUevent) -> Result {
    let Operation::Wait(event) = operation_of(node)? else { return Err(INVALID) };
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, event.handle as CUevent) }
}

pub(crate) unsafe fn cuGraphEventWaitNodeSetEvent(node: CUgraphNode, event: CUevent) -> Result {
    set(node, Operation::Wait(event_by_handle(event)?))
}

/// Operations that a stream captured cannot be read back.
pub(crate) unsafe fn cuGraphBatchMemOpNodeGetParams(
    node: CUgraphNode,
    out: *mut sys::CUDA_BATCH_MEM_OP_NODE_PARAMS,
) -> Result {
    let Operation::MemoryOps(ops) = operation_of(node)? else { return Err(INVALID) };
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, memory_ops_params(&ops)?) }
}

/// The array is the node's own, and lives as long as the node has it.
fn memory_ops_params(ops: &MemoryOpsNode) -> Result<sys::CUDA_BATCH_MEM_OP_NODE_PARAMS> {
    let array = ops.params.as_ref().ok_or(CUresult::CUDA_ERROR_NOT_SUPPORTED)?;
    Ok(sys::CUDA_BATCH_MEM_OP_NODE_PARAMS {
        ctx: ops.context.handle as CUcontext,
        // At most 255, as checked when the node was made.
        count: array.len() as u32,
        paramArray: array.as_ptr().cast_mut(),
        flags: 0,
    })
}

pub(crate) unsafe fn cuGraphBatchMemOpNodeSetParams(
    node: CUgraphNode,
    params: *const sys::CUDA_BATCH_MEM_OP_NODE_PARAMS,
) -> Result {
    node_by_handle(node)?;
    // SAFETY: `params` is NULL or the caller's structure.
    set(node, unsafe { Operation::memory_ops(params) }?)
}

pub(crate) unsafe fn cuGraphMemAllocNodeGetParams(
    node: CUgraphNode,
    out: *mut sys::CUDA_MEM_ALLOC_NODE_PARAMS,
) -> Result {
    let Operation::Allocate(allocation) = operation_of(node)? else { return Err(INVALID) };
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, allocation.params()) }
}

pub(crate) unsafe fn cuGraphMemFreeNodeGetParams(node: CUgraphNode, out: *mut CUdeviceptr) -> Result {
    let Operation::Free(claim) = operation_of(node)? else { return Err(INVALID) };
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, claim.allocation.address()) }
}

// ---- any kind ----

/// `CUgraphNodeParams`, with the kind as an integer and its parameters as words.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct NodeParams {
    kind: u32,
    reserved_ints: [i32; 3],
    words: [u64; 29],
    reserved_word: i64,
}

/// `CUDA_MEMCPY_NODE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy)]
struct CopyParams {
    flags: i32,
    reserved: i32,
    context: usize,
    copy: [u64; size_of::<sys::CUDA_MEMCPY3D>() / 8],
}

const _: () = {
    assert!(size_of::<NodeParams>() == size_of::<sys::CUgraphNodeParams>());
    assert!(size_of::<CopyParams>() == size_of::<sys::CUDA_MEMCPY_NODE_PARAMS>());
    assert!(size_of::<sys::CUDA_KERNEL_NODE_PARAMS>() == size_of::<sys::CUDA_KERNEL_NODE_PARAMS_v3>());
    assert!(size_of::<sys::CUDA_MEM_ALLOC_NODE_PARAMS>() == size_of::<sys::CUDA_MEM_ALLOC_NODE_PARAMS_v2>());
    assert!(
        size_of::<sys::CUDA_BATCH_MEM_OP_NODE_PARAMS>() == size_of::<sys::CUDA_BATCH_MEM_OP_NODE_PARAMS_v2>()
    );
};

/// The kinds of nodes, and how large their parameters are.
const KINDS: [(Kind, usize); 11] = [
    (Kind::CU_GRAPH_NODE_TYPE_KERNEL, size_of::<sys::CUDA_KERNEL_NODE_PARAMS_v3>()),
    (Kind::CU_GRAPH_NODE_TYPE_MEMCPY, size_of::<sys::CUDA_MEMCPY_NODE_PARAMS>()),
    (Kind::CU_GRAPH_NODE_TYPE_MEMSET, size_of::<sys::CUDA_MEMSET_NODE_PARAMS_v2>()),
    (Kind::CU_GRAPH_NODE_TYPE_HOST, size_of::<sys::CUDA_HOST_NODE_PARAMS_v2>()),
    (Kind::CU_GRAPH_NODE_TYPE_GRAPH, size_of::<sys::CUDA_CHILD_GRAPH_NODE_PARAMS>()),
    (Kind::CU_GRAPH_NODE_TYPE_EMPTY, 0),
    (Kind::CU_GRAPH_NODE_TYPE_WAIT_EVENT, size_of::<sys::CUDA_EVENT_WAIT_NODE_PARAMS>()),
    (Kind::CU_GRAPH_NODE_TYPE_EVENT_RECORD, size_of::<sys::CUDA_EVENT_RECORD_NODE_PARAMS>()),
    (Kind::CU_GRAPH_NODE_TYPE_MEM_ALLOC, size_of::<sys::CUDA_MEM_ALLOC_NODE_PARAMS_v2>()),
    (Kind::CU_GRAPH_NODE_TYPE_MEM_FREE, size_of::<sys::CUDA_MEM_FREE_NODE_PARAMS>()),
    (Kind::CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, size_of::<sys::CUDA_BATCH_MEM_OP_NODE_PARAMS_v2>()),
];

const ABSENT_KINDS: [Kind; 3] = [
    Kind::CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL,
    Kind::CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT,
    Kind::CU_GRAPH_NODE_TYPE_CONDITIONAL,
];

impl NodeParams {
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for NULL, for an unknown kind, and for bytes that are not 0 although no
    /// kind or not this one uses them; `CUDA_ERROR_NOT_SUPPORTED` for kinds of nodes that are not there.
    ///
    /// # Safety
    /// `params` is NULL or points to a structure, all of it initialised, as the calls ask.
    pub(super) unsafe fn read(params: *const sys::CUgraphNodeParams) -> Result<Self> {
        // SAFETY: the caller vouches for it.
        let params = unsafe { layout::read(params.cast::<Self>()) }?;
        if ABSENT_KINDS.iter().any(|kind| *kind as u32 == params.kind) {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        let (_, used_bytes) = KINDS.iter().find(|(kind, _)| *kind as u32 == params.kind).ok_or(INVALID)?;
        let unused = &params.words[used_bytes.div_ceil(8)..];
        let is_clean = params.reserved_ints == [0; 3] && params.reserved_word == 0;
        if is_clean && unused.iter().all(|word| *word == 0) { Ok(params) } else { Err(INVALID) }
    }

    pub(super) fn kind(&self) -> Kind {
        let found = KINDS.iter().find(|(kind, _)| *kind as u32 == self.kind);
        found.expect("a kind that was checked when the structure was read").0
    }

    /// The address, event or graph with which the parameters of some kinds begin.
    pub(super) fn first_field(&self) -> u64 {
        self.words[0]
    }

    /// What a node with these parameters does. Memory nodes are made elsewhere, as they cannot be changed.
    ///
    /// # Errors
    /// Those of the call for the kind; `CUDA_ERROR_NOT_SUPPORTED` for memory nodes.
    ///
    /// # Safety
    /// The pointers in the structure are as the call for the kind asks.
    pub(super) unsafe fn operation(&self) -> Result<Operation> {
        let member = self.words.as_ptr();
        match self.kind() {
            // SAFETY: the words are the structure of the kind, here and below. Version 3 of this one is laid
            // out as version 2.
            Kind::CU_GRAPH_NODE_TYPE_KERNEL => unsafe { Operation::kernel(member.cast()) },
            Kind::CU_GRAPH_NODE_TYPE_MEMCPY => {
                // SAFETY: as above.
                let params = unsafe { layout::read(member.cast::<CopyParams>()) }?;
                if params.flags != 0 || params.reserved != 0 {
                    return Err(INVALID);
                }
                // SAFETY: as above.
                unsafe { Operation::copy(params.copy.as_ptr().cast(), params.context as CUcontext) }
            }
            Kind::CU_GRAPH_NODE_TYPE_MEMSET => {
                // SAFETY: as above; the structure holds no enums.
                let params = unsafe { layout::read(member.cast::<sys::CUDA_MEMSET_NODE_PARAMS_v2>()) }?;
                // SAFETY: as above; version 2 of the structure begins with version 1.
                unsafe { Operation::fill(member.cast(), params.ctx) }
            }
            // SAFETY: as above; version 2 of the structure begins with version 1.
            Kind::CU_GRAPH_NODE_TYPE_HOST => unsafe { host(member.cast()) },
            Kind::CU_GRAPH_NODE_TYPE_GRAPH => self.child(),
            Kind::CU_GRAPH_NODE_TYPE_EMPTY => Ok(Operation::Empty),
            Kind::CU_GRAPH_NODE_TYPE_WAIT_EVENT => {
                Ok(Operation::Wait(event_by_handle(self.first_field() as CUevent)?))
            }
            Kind::CU_GRAPH_NODE_TYPE_EVENT_RECORD => {
                Ok(Operation::Record(event_by_handle(self.first_field() as CUevent)?))
            }
            // SAFETY: as above; both versions of the structure are laid out alike.
            Kind::CU_GRAPH_NODE_TYPE_BATCH_MEM_OP => unsafe { Operation::memory_ops(member.cast()) },
            _ => Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
        }
    }

    /// # Errors
    /// `CUDA_ERROR_NOT_SUPPORTED` for a child that is to be moved into its node.
    fn child(&self) -> Result<Operation> {
        use sys::CUgraphChildGraphNodeOwnership as Ownership;
        // The low half of the second word, which holds the enum of 32 bits.
        match self.words[1] as i32 {
            owner if owner == Ownership::CU_GRAPH_CHILD_GRAPH_OWNERSHIP_CLONE as i32 => {
                child_of(self.first_field() as CUgraph)
            }
            owner if owner == Ownership::CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE as i32 => {
                Err(CUresult::CUDA_ERROR_NOT_SUPPORTED)
            }
            _ => Err(INVALID),
        }
    }

    /// The structure of a node.
    ///
    /// # Errors
    /// `CUDA_ERROR_NOT_SUPPORTED` for memory operations that a stream captured.
    fn of(operation: &Operation) -> Result<Self> {
        let mut params =
            Self { kind: operation.kind() as u32, reserved_ints: [0; 3], words: [0; 29], reserved_word: 0 };
        match operation {
            Operation::Kernel(kernel) => params.put(kernel.params()),
            Operation::Copy(node) => {
                let (copyCtx, copyParams) = (node.context.handle as CUcontext, node.params);
                params.put(sys::CUDA_MEMCPY_NODE_PARAMS { flags: 0, reserved: 0, copyCtx, copyParams });
            }
            Operation::Fill { fill, context } => {
                let sys::CUDA_MEMSET_NODE_PARAMS { dst, pitch, value, elementSize, width, height } =
                    fill_params(fill);
                let ctx = context.handle as CUcontext;
                params.put(sys::CUDA_MEMSET_NODE_PARAMS_v2 {
                    dst,
                    pitch,
                    value,
                    elementSize,
                    width,
                    height,
                    ctx,
                });
            }
            Operation::Host(function) => {
                let (fn_, userData) = function.parts();
                params.put(sys::CUDA_HOST_NODE_PARAMS { fn_, userData });
            }
            // Ownership 0: the child was cloned into its node.
            Operation::Child(child) => params.words[0] = child.handle() as u64,
            Operation::Empty => {}
            Operation::Wait(event) | Operation::Record(event) => params.words[0] = event.handle as u64,
            Operation::Allocate(allocation) => params.put(allocation.params()),
            Operation::Free(claim) => params.words[0] = claim.allocation.address(),
            Operation::MemoryOps(ops) => params.put(memory_ops_params(ops)?),
        }
        Ok(params)
    }

    fn put<T>(&mut self, params: T) {
        const { assert!(size_of::<T>() <= size_of::<[u64; 29]>() && align_of::<T>() <= align_of::<u64>()) };
        // SAFETY: the words are large enough and aligned; any bits are words.
        unsafe { self.words.as_mut_ptr().cast::<T>().write(params) };
    }
}

pub(crate) unsafe fn cuGraphNodeSetParams(node: CUgraphNode, params: *mut sys::CUgraphNodeParams) -> Result {
    let (graph, id) = node_by_handle(node)?;
    // SAFETY: `params` is NULL or the caller's structure.
    let params = unsafe { NodeParams::read(params) }?;
    if graph.operation(id)?.kind() != params.kind() {
        return Err(INVALID);
    }
    // SAFETY: the pointers in the structure are as the call asks.
    graph.set_operation(id, unsafe { params.operation() }?)
}

pub(crate) unsafe fn cuGraphNodeSetParams_v2(
    node: CUgraphNode,
    params: *mut sys::CUgraphNodeParams,
) -> Result {
    // SAFETY: all are the caller's own, as the call asks.
    unsafe { cuGraphNodeSetParams(node, params) }
}

pub(crate) unsafe fn cuGraphNodeGetParams(node: CUgraphNode, out: *mut sys::CUgraphNodeParams) -> Result {
    let params = NodeParams::of(&operation_of(node)?)?;
    // SAFETY: `out` is the caller's out parameter, of the same layout.
    unsafe { write_out(out.cast(), params) }
}

// ---- allocations ----

/// What an allocation node is asked for.
pub(super) struct AllocationRequest {
    pub(super) size_bytes: u64,
    pub(super) device: i32,
}

/// `CUDA_MEM_ALLOC_NODE_PARAMS` with its enums as integers.
#[repr(C)]
#[derive(Clone, Copy)]
struct AllocationParams {
    memory_type: u32,
    handle_types: u32,
    location: [i32; LOCATION_WORDS],
    win32_attributes: usize,
    max_size_bytes: usize,
    usage: u16,
    rdma: u8,
    reserved: [u8; 53],
    access: *const Access,
    access_count: usize,
    size_bytes: u64,
    address: u64,
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Access {
    location: [i32; LOCATION_WORDS],
    flags: u32,
}

const LOCATION_WORDS: usize = size_of::<sys::CUmemLocation>() / 4;

const _: () = {
    assert!(size_of::<AllocationParams>() == size_of::<sys::CUDA_MEM_ALLOC_NODE_PARAMS>());
    assert!(size_of::<Access>() == size_of::<sys::CUmemAccessDesc>());
};

impl AllocationRequest {
    /// # Errors
    /// `CUDA_ERROR_NOT_SUPPORTED` for memory that is not a device's, that is to be shared by handle, or that
    /// another device is to access; `CUDA_ERROR_INVALID_VALUE` for NULL and for what does not exist,
    /// `CUDA_ERROR_INVALID_DEVICE`.
    ///
    /// # Safety
    /// `params` is NULL or points to a structure, whose array is as long as it says.
    pub(super) unsafe fn read(params: *const sys::CUDA_MEM_ALLOC_NODE_PARAMS) -> Result<Self> {
        // SAFETY: the caller vouches for it.
        let params = unsafe { layout::read(params.cast::<AllocationParams>()) }?;
        if params.memory_type != sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED as u32 {
            return Err(INVALID);
        }
        if params.handle_types != sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE.0 {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        let device = device_at(params.location)?;
        // SAFETY: the caller vouches for the length.
        for access in unsafe { layout::array(params.access, params.access_count) }? {
            if device_at(access.location)? != device {
                return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
            }
        }
        Ok(Self { size_bytes: params.size_bytes, device })
    }
}

/// The device of a `CUmemLocation`: its kind and number are the first two words.
fn device_at(location: [i32; LOCATION_WORDS]) -> Result<i32> {
    if location[0].cast_unsigned() != sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as u32 {
        return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    }
    Ok(process::device(location[1])?.ordinal)
}
