//! Making graphs: nodes, dependencies, clones.

use std::collections::BTreeMap;
use std::sync::Arc;

use cuda_abi::sys::{self, CUgraphNodeType as Kind};
use cuda_abi::types::{CUcontext, CUdeviceptr, CUevent, CUgraph, CUgraphNode};

use super::allocation::Allocation;
use super::edge::Edge;
use super::operation::Operation;
use super::params::{AllocationRequest, NodeParams};
use super::{Graph, INVALID, NodeId, discard, graph_by_handle, node_by_handle};
use crate::error::{Result, write_out};
use crate::process;
use crate::stream::{HostFunction, event_by_handle};
use crate::transfer::layout::array;

pub(crate) unsafe fn cuGraphCreate(out: *mut CUgraph, flags: u32) -> Result {
    process::machine()?;
    if out.is_null() || flags != 0 {
        return Err(INVALID);
    }
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, Graph::create().handle()) }
}

pub(crate) unsafe fn cuGraphDestroy(graph: CUgraph) -> Result {
    let graph = graph_by_handle(graph)?;
    if graph.is_embedded {
        return Err(INVALID);
    }
    graph.destroy();
    Ok(())
}

pub(crate) unsafe fn cuGraphClone(out: *mut CUgraph, graph: CUgraph) -> Result {
    let graph = graph_by_handle(graph)?;
    if out.is_null() {
        return Err(INVALID);
    }
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, graph.duplicate(false)?.handle()) }
}

// ---- nodes ----

/// Where a new node goes: what all calls that add one have in common.
struct Slot {
    out: *mut CUgraphNode,
    graph: CUgraph,
    after: *const CUgraphNode,
    edges: *const sys::CUgraphEdgeData,
    count: usize,
}

impl Slot {
    /// # Safety
    /// Until the slot is filled, `out` is NULL or valid for a write, and `after` NULL or `count` elements long.
    unsafe fn new(out: *mut CUgraphNode, graph: CUgraph, after: *const CUgraphNode, count: usize) -> Self {
        Self { out, graph, after, edges: std::ptr::null(), count }
    }

    /// Adds a node that does what `operation` gives, once the place for it is found good.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for an invalid graph or dependency, or a dependency that is named twice.
    fn fill(self, operation: impl FnOnce(&Arc<Graph>) -> Result<Operation>) -> Result<NodeId> {
        let graph = graph_by_handle(self.graph)?;
        if self.out.is_null() {
            return Err(INVALID);
        }
        // SAFETY: `new` was promised this length.
        let nodes = unsafe { array(self.after, self.count) }?;
        // SAFETY: the function that set the edges promised the same.
        let edges = unsafe { read_edges(self.edges, self.count) }?;
        let mut after = BTreeMap::new();
        for (node, edge) in nodes.iter().zip(edges) {
            if after.insert(graph.node_id(*node)?, edge).is_some() {
                return Err(INVALID);
            }
        }
        let id = graph.add_operation(operation(&graph)?, after)?;
        // SAFETY: not NULL, and `new` was promised the rest.
        unsafe { write_out(self.out, id.handle()) }?;
        Ok(id)
    }
}

/// # Safety
/// `data` is NULL, for default edges, or has `count` elements.
unsafe fn read_edges(data: *const sys::CUgraphEdgeData, count: usize) -> Result<Vec<Edge>> {
    if data.is_null() {
        return Ok(vec![Edge::default(); count]);
    }
    // SAFETY: the caller vouches for the length; the structure is bytes only.
    unsafe { array(data, count) }?.iter().map(Edge::from_data).collect()
}

pub(crate) unsafe fn cuGraphAddKernelNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    after: *const CUgraphNode,
    count: usize,
    params: *const sys::CUDA_KERNEL_NODE_PARAMS_v1,
) -> Result {
    // SAFETY: the arrays are the caller's, as the call asks.
    let slot = unsafe { Slot::new(out, graph, after, count) };
    // SAFETY: `params` is NULL or the caller's structure.
    slot.fill(|_| unsafe { Operation::kernel_v1(params) }).map(|_| ())
}

pub(crate) unsafe fn cuGraphAddKernelNode_v2(
    out: *mut CUgraphNode,
    graph: CUgraph,
    after: *const CUgraphNode,
    count: usize,
    params: *const sys::CUDA_KERNEL_NODE_PARAMS,
) -> Result {
    // SAFETY: the arrays are the caller's, as the call asks.
    let slot = unsafe { Slot::new(out, graph, after, count) };
    // SAFETY: `params` is NULL or the caller's structure.
    slot.fill(|_| unsafe { Operation::kernel(params) }).map(|_| ())
}

pub(crate) unsafe fn cuGraphAddMemcpyNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    after: *const CUgraphNode,
    count: usize,
    params: *const sys::CUDA_MEMCPY3D,
    context: CUcontext,
) -> Result {
    // SAFETY: the arrays are the caller's, as the call asks.
    let slot = unsafe { Slot::new(out, graph, after, count) };
    // SAFETY: `params` is NULL or the caller's structure.
    slot.fill(|_| unsafe { Operation::copy(params, context) }).map(|_| ())
}

pub(crate) unsafe fn cuGraphAddMemsetNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    after: *const CUgraphNode,
    count: usize,
    params: *const sys::CUDA_MEMSET_NODE_PARAMS,
    context: CUcontext,
) -> Result {
    // SAFETY: the arrays are the caller's, as the call asks.
    let slot = unsafe { Slot::new(out, graph, after, count) };
    // SAFETY: `params` is NULL or the caller's structure.
    slot.fill(|_| unsafe { Operation::fill(params, context) }).map(|_| ())
}

pub(crate) unsafe fn cuGraphAddHostNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    after: *const CUgraphNode,
    count: usize,
    params: *const sys::CUDA_HOST_NODE_PARAMS,
) -> Result {
    // SAFETY: the arrays are the caller's, as the call asks.
    let slot = unsafe { Slot::new(out, graph, after, count) };
    // SAFETY: `params` is NULL or the caller's structure.
    slot.fill(|_| unsafe { host(params) }).map(|_| ())
}

/// # Safety
/// `params` is NULL or points to a structure.
pub(super) unsafe fn host(params: *const sys::CUDA_HOST_NODE_PARAMS) -> Result<Operation> {
    // SAFETY: the caller vouches for it; the structure holds pointers only.
    let params = unsafe { params.as_ref() }.ok_or(INVALID)?;
    Ok(Operation::Host(HostFunction::new(params.fn_, params.userData)?))
}

pub(crate) unsafe fn cuGraphAddEmptyNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    after: *const CUgraphNode,
    count: usize,
) -> Result {
    // SAFETY: the arrays are the caller's, as the call asks.
    let slot = unsafe { Slot::new(out, graph, after, count) };
    slot.fill(|_| Ok(Operation::Empty)).map(|_| ())
}

pub(crate) unsafe fn cuGraphAddChildGraphNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    after: *const CUgraphNode,
    count: usize,
    child: CUgraph,
) -> Result {
    // SAFETY: the arrays are the caller's, as the call asks.
    let slot = unsafe { Slot::new(out, graph, after, count) };
    slot.fill(|_| child_of(child)).map(|_| ())
}

pub(super) fn child_of(child: CUgraph) -> Result<Operation> {
    Ok(Operation::Child(graph_by_handle(child)?.duplicate(true)?))
}

pub(crate) unsafe fn cuGraphAddEventRecordNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    after: *const CUgraphNode,
    count: usize,
    event: CUevent,
) -> Result {
    // SAFETY: the arrays are the caller's, as the call asks.
    let slot = unsafe { Slot::new(out, graph, after, count) };
    slot.fill(|_| Ok(Operation::Record(event_by_handle(event)?))).map(|_| ())
}

pub(crate) unsafe fn cuGraphAddEventWaitNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    after: *const CUgraphNode,
    count: usize,
    event: CUevent,
) -> Result {
    // SAFETY: the arrays are the caller's, as the call asks.
    let slot = unsafe { Slot::new(out, graph, after, count) };
    slot.fill(|_| Ok(Operation::Wait(event_by_handle(event)?))).map(|_| ())
}

pub(crate) unsafe fn cuGraphAddBatchMemOpNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    after: *const CUgraphNode,
    count: usize,
    params: *const sys::CUDA_BATCH_MEM_OP_NODE_PARAMS,
) -> Result {
    // SAFETY: the arrays are the caller's, as the call asks.
    let slot = unsafe { Slot::new(out, graph, after, count) };
    // SAFETY: `params` is NULL or the caller's structure.
    slot.fill(|_| unsafe { Operation::memory_ops(params) }).map(|_| ())
}

pub(crate) unsafe fn cuGraphAddMemAllocNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    after: *const CUgraphNode,
    count: usize,
    params: *mut sys::CUDA_MEM_ALLOC_NODE_PARAMS,
) -> Result {
    // SAFETY: the arrays are the caller's, as the call asks.
    let slot = unsafe { Slot::new(out, graph, after, count) };
    // SAFETY: `params` is NULL or the caller's structure.
    slot.fill(|graph| unsafe { allocate(params, graph) }).map(|_| ())
}

/// An allocation node; its address is written to the structure.
///
/// # Errors
/// `CUDA_ERROR_NOT_SUPPORTED` for memory that is not a device's, or to be shared by handle.
///
/// # Safety
/// `params` is NULL or points to a structure.
unsafe fn allocate(params: *mut sys::CUDA_MEM_ALLOC_NODE_PARAMS, graph: &Graph) -> Result<Operation> {
    if graph.is_embedded {
        return Err(INVALID);
    }
    // SAFETY: NULL or valid, as the caller vouches.
    let asked = unsafe { AllocationRequest::read(params) }?;
    let allocation = Allocation::new(asked.size_bytes, asked.device, graph.handle)?;
    // SAFETY: read above, so it is there.
    unsafe { (*params).dptr = allocation.address() };
    Ok(Operation::Allocate(allocation))
}

pub(crate) unsafe fn cuGraphAddMemFreeNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    after: *const CUgraphNode,
    count: usize,
    address: CUdeviceptr,
) -> Result {
    // SAFETY: the arrays are the caller's, as the call asks.
    let slot = unsafe { Slot::new(out, graph, after, count) };
    slot.fill(|graph| free(address, graph)).map(|_| ())
}

fn free(address: CUdeviceptr, graph: &Graph) -> Result<Operation> {
    // Memory nodes of a child would have to move there with their graph.
    if graph.is_embedded { Err(INVALID) } else { Operation::free(address, graph) }
}

pub(crate) unsafe fn cuGraphAddNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    after: *const CUgraphNode,
    count: usize,
    params: *mut sys::CUgraphNodeParams,
) -> Result {
    // SAFETY: all are the caller's own, as the call asks.
    unsafe { cuGraphAddNode_v2(out, graph, after, std::ptr::null(), count, params) }
}

pub(crate) unsafe fn cuGraphAddNode_v2(
    out: *mut CUgraphNode,
    graph: CUgraph,
    after: *const CUgraphNode,
    edges: *const sys::CUgraphEdgeData,
    count: usize,
    params: *mut sys::CUgraphNodeParams,
) -> Result {
    // SAFETY: the arrays are the caller's, as the call asks; that of the edges is as long as that of the nodes.
    let slot = Slot { edges, ..unsafe { Slot::new(out, graph, after, count) } };
    // SAFETY: `params` is NULL or the caller's structure.
    let node = unsafe { NodeParams::read(params) }?;
    let make = |graph: &Arc<Graph>| match node.kind() {
        Kind::CU_GRAPH_NODE_TYPE_MEM_ALLOC => {
            // SAFETY: read above, so it is there; the member that the kind names begins where the union does,
            // and both versions of it are laid out alike.
            let member = unsafe { &raw mut (*params).__bindgen_anon_1 };
            // SAFETY: as above.
            unsafe { allocate(member.cast(), graph) }
        }
        Kind::CU_GRAPH_NODE_TYPE_MEM_FREE => free(node.first_field(), graph),
        // SAFETY: the pointers in the structure are as the call asks.
        _ => unsafe { node.operation() },
    };
    slot.fill(make).map(|_| ())
}

pub(crate) unsafe fn cuGraphAddNode_v3(
    out: *mut CUgraphNode,
    graph: CUgraph,
    after: *const CUgraphNode,
    edges: *const sys::CUgraphEdgeData,
    count: usize,
    params: *mut sys::CUgraphNodeParams,
) -> Result {
    // SAFETY: all are the caller's own, as the call asks.
    unsafe { cuGraphAddNode_v2(out, graph, after, edges, count, params) }
}

pub(crate) unsafe fn cuGraphDestroyNode(node: CUgraphNode) -> Result {
    let (graph, id) = node_by_handle(node)?;
    if graph.has_memory_nodes() {
        return Err(INVALID);
    }
    let mut nodes = graph.nodes.lock();
    let node = nodes.remove(&id).ok_or(INVALID)?;
    for other in nodes.values_mut() {
        other.after.remove(&id);
    }
    drop(nodes);
    discard(id, &node);
    Ok(())
}

// ---- dependencies ----

pub(crate) unsafe fn cuGraphAddDependencies(
    graph: CUgraph,
    from: *const CUgraphNode,
    to: *const CUgraphNode,
    count: usize,
) -> Result {
    // SAFETY: all are the caller's own, as the call asks.
    unsafe { cuGraphAddDependencies_v2(graph, from, to, std::ptr::null(), count) }
}

/// All edges are added, or none.
pub(crate) unsafe fn cuGraphAddDependencies_v2(
    graph: CUgraph,
    from: *const CUgraphNode,
    to: *const CUgraphNode,
    edges: *const sys::CUgraphEdgeData,
    count: usize,
) -> Result {
    let graph = graph_by_handle(graph)?;
    // SAFETY: the caller's arrays, of the length that it says.
    let pairs = unsafe { pairs(&graph, from, to, edges, count) }?;
    let mut nodes = graph.nodes.lock();
    let mut changed = nodes.clone();
    for (from, to, edge) in pairs {
        edge.check(changed.get(&from).ok_or(INVALID)?)?;
        let after = &mut changed.get_mut(&to).ok_or(INVALID)?.after;
        if from == to || after.insert(from, edge).is_some() {
            return Err(INVALID);
        }
    }
    *nodes = changed;
    Ok(())
}

pub(crate) unsafe fn cuGraphRemoveDependencies(
    graph: CUgraph,
    from: *const CUgraphNode,
    to: *const CUgraphNode,
    count: usize,
) -> Result {
    // SAFETY: all are the caller's own, as the call asks.
    unsafe { cuGraphRemoveDependencies_v2(graph, from, to, std::ptr::null(), count) }
}

/// All edges are removed, or none.
pub(crate) unsafe fn cuGraphRemoveDependencies_v2(
    graph: CUgraph,
    from: *const CUgraphNode,
    to: *const CUgraphNode,
    edges: *const sys::CUgraphEdgeData,
    count: usize,
) -> Result {
    let graph = graph_by_handle(graph)?;
    if count > 0 && graph.has_memory_nodes() {
        return Err(INVALID);
    }
    // SAFETY: the caller's arrays, of the length that it says.
    let pairs = unsafe { pairs(&graph, from, to, edges, count) }?;
    let mut nodes = graph.nodes.lock();
    let mut changed = nodes.clone();
    for (from, to, edge) in pairs {
        let after = &mut changed.get_mut(&to).ok_or(INVALID)?.after;
        if after.remove(&from) != Some(edge) {
            return Err(INVALID);
        }
    }
    *nodes = changed;
    Ok(())
}

/// # Safety
/// The arrays are NULL or have `count` elements.
unsafe fn pairs(
    graph: &Graph,
    from: *const CUgraphNode,
    to: *const CUgraphNode,
    edges: *const sys::CUgraphEdgeData,
    count: usize,
) -> Result<Vec<(NodeId, NodeId, Edge)>> {
    // SAFETY: the caller vouches for the length of this array and those below.
    let from = unsafe { array(from, count) }?;
    // SAFETY: as above.
    let to = unsafe { array(to, count) }?;
    // SAFETY: as above.
    let edges = unsafe { read_edges(edges, count) }?;
    let ends = from.iter().zip(to).map(|(from, to)| Ok((graph.node_id(*from)?, graph.node_id(*to)?)));
    ends.zip(edges).map(|(ends, edge)| ends.map(|(from, to)| (from, to, edge))).collect()
}
