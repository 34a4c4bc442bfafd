//! Changes to executable graphs (CUDA driver API reference, cuGraphExecUpdate and cuGraphExec…SetParams). They
//! count for launches to come.

use std::sync::Arc;

use cuda_abi::sys::{self, CUgraphExecUpdateResult as UpdateResult, CUresult};
use cuda_abi::types::{CUcontext, CUevent, CUgraph, CUgraphExec, CUgraphExecUpdateResult, CUgraphNode};

use super::allocation::Allocation;
use super::build::host;
use super::exec::{Exec, ExecNode, by_handle, unfold};
use super::operation::Operation;
use super::params::NodeParams;
use super::{Graph, INVALID, NodeId, graph_by_handle, node_by_handle};
use crate::error::{Result, write_if_wanted, write_out};
use crate::memory;
use crate::stream::event_by_handle;
use crate::transfer::{Copy, Fill};

/// Why an executable does not take a graph's parameters.
struct Refusal {
    update_result: UpdateResult,
    node: Option<NodeId>,
    from: Option<NodeId>,
}

impl Refusal {
    fn node(update_result: UpdateResult, node: NodeId) -> Self {
        Self { update_result, node: Some(node), from: None }
    }
}

/// The executable's nodes with the parameters of a graph of the same shape. Nodes are paired in the order in
/// which they were made.
fn updated(old: &[ExecNode], graph: &Graph) -> std::result::Result<Vec<ExecNode>, Refusal> {
    let topology = UpdateResult::CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
    let new = unfold(graph).map_err(|node| Refusal::node(topology, node))?;
    if old.len() != new.len() {
        return Err(Refusal { update_result: topology, node: None, from: None });
    }
    let mut nodes = Vec::with_capacity(old.len());
    for (old, new_node) in old.iter().zip(&new) {
        if old.operation.kind() != new_node.operation.kind() {
            return Err(Refusal::node(
                UpdateResult::CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED,
                new_node.id,
            ));
        }
        if old.after.len() != new_node.after.len() {
            return Err(Refusal::node(topology, new_node.id));
        }
        if let Some(place) = new_node.after.iter().find(|place| !old.after.contains(place)) {
            let from = Some(new[*place].id);
            return Err(Refusal { update_result: topology, node: Some(new_node.id), from });
        }
        check(&old.operation, &new_node.operation)
            .map_err(|update_result| Refusal::node(update_result, new_node.id))?;
        let operation = match &old.operation {
            // The child itself says no more than that its nodes are done.
            Operation::Child(_) => old.operation.clone(),
            _ => new_node.operation.clone(),
        };
        nodes.push(ExecNode { operation, ..old.clone() });
    }
    Ok(nodes)
}

/// Whether a node that does `old` may come to do `new`, which is of the same kind.
fn check(old: &Operation, new: &Operation) -> std::result::Result<(), UpdateResult> {
    let allowed = match (old, new) {
        (Operation::Kernel(old), Operation::Kernel(new)) => {
            if old.kernel.context().handle != new.kernel.context().handle {
                return Err(UpdateResult::CU_GRAPH_EXEC_UPDATE_ERROR_UNSUPPORTED_FUNCTION_CHANGE);
            }
            true
        }
        (Operation::Copy(old), Operation::Copy(new)) => is_like(&old.copy, &new.copy),
        (Operation::Fill { fill: old, .. }, Operation::Fill { fill: new, .. }) => is_fill_like(old, new),
        (Operation::MemoryOps(old), Operation::MemoryOps(new)) => {
            old.ops.len() == new.ops.len() && old.context.handle == new.context.handle
        }
        (Operation::Allocate(old), Operation::Allocate(new)) => is_same(old, new)?,
        (Operation::Free(old), Operation::Free(new)) => is_same(&old.allocation, &new.allocation)?,
        _ => true,
    };
    if allowed { Ok(()) } else { Err(UpdateResult::CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED) }
}

/// Memory nodes cannot change.
fn is_same(old: &Arc<Allocation>, new: &Arc<Allocation>) -> std::result::Result<bool, UpdateResult> {
    if Arc::ptr_eq(old, new) { Ok(true) } else { Err(UpdateResult::CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED) }
}

/// Both sides stay on their devices and of their kind of memory.
fn is_like(old: &Copy, new: &Copy) -> bool {
    [(&old.to, &new.to), (&old.from, &new.from)].iter().all(|(old, new)| {
        old.side == new.side && memory::device_of(old.address) == memory::device_of(new.address)
    })
}

/// A fill of several rows keeps its shape.
fn is_fill_like(old: &Fill, new: &Fill) -> bool {
    let is_shape_kept = old.height == new.height
        && (old.height == 1
            || (old.width == new.width
                && old.element_bytes == new.element_bytes
                && old.pitch_bytes == new.pitch_bytes));
    is_shape_kept && memory::device_of(old.address) == memory::device_of(new.address)
}

pub(crate) unsafe fn cuGraphExecUpdate_v2(
    exec: CUgraphExec,
    graph: CUgraph,
    info: *mut sys::CUgraphExecUpdateResultInfo,
) -> Result {
    if info.is_null() {
        return Err(INVALID);
    }
    let (result, update_result, node, from) = update(exec, graph);
    let handle = |id: Option<NodeId>| id.map_or(std::ptr::null_mut(), NodeId::handle);
    let update_result = sys::CUgraphExecUpdateResultInfo {
        result: update_result,
        errorNode: handle(node),
        errorFromNode: handle(from),
    };
    // SAFETY: `info` is the caller's out parameter, checked above.
    unsafe { write_out(info, update_result) }?;
    result
}

pub(crate) unsafe fn cuGraphExecUpdate(
    exec: CUgraphExec,
    graph: CUgraph,
    error_node: *mut CUgraphNode,
    update_result_out: *mut CUgraphExecUpdateResult,
) -> Result {
    if update_result_out.is_null() {
        return Err(INVALID);
    }
    let (result, update_result, node, _) = update(exec, graph);
    // SAFETY: `error_node` is the caller's out parameter; NULL means that it is not wanted.
    unsafe { write_if_wanted(error_node, node.map_or(std::ptr::null_mut(), NodeId::handle)) };
    // SAFETY: `update_result_out` is the caller's out parameter, checked above.
    unsafe { write_out(update_result_out, update_result as u32) }?;
    result
}

fn update(exec: CUgraphExec, graph: CUgraph) -> (Result, UpdateResult, Option<NodeId>, Option<NodeId>) {
    let (exec, graph) = match (by_handle(exec), graph_by_handle(graph)) {
        (Ok(exec), Ok(graph)) => (exec, graph),
        (Err(error), _) | (_, Err(error)) => {
            return (Err(error), UpdateResult::CU_GRAPH_EXEC_UPDATE_ERROR, None, None);
        }
    };
    let old = Arc::clone(&exec.nodes.lock());
    match updated(&old, &graph) {
        Ok(nodes) => {
            exec.replace(nodes);
            (Ok(()), UpdateResult::CU_GRAPH_EXEC_UPDATE_SUCCESS, None, None)
        }
        Err(Refusal { update_result, node, from }) => {
            (Err(CUresult::CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE), update_result, node, from)
        }
    }
}

// ---- single nodes ----

/// Gives the node in the executable what `make` gives, if it may have it.
fn set(exec: CUgraphExec, node: CUgraphNode, make: impl FnOnce(&Operation) -> Result<Operation>) -> Result {
    let exec = by_handle(exec)?;
    let place = exec.place_of(node)?;
    let mut nodes = exec.nodes.lock().to_vec();
    let operation = make(&nodes[place].operation)?;
    let old = &nodes[place].operation;
    if old.kind() != operation.kind() || check(old, &operation).is_err() || !is_plain(old, &operation) {
        return Err(INVALID);
    }
    nodes[place].operation = operation;
    exec.replace(nodes);
    Ok(())
}

/// Copies can be changed one by one only if they have one row, before and after, and fills and copies not to
/// nothing.
fn is_plain(old: &Operation, new: &Operation) -> bool {
    match (old, new) {
        (Operation::Copy(old), Operation::Copy(new)) => {
            let has_one_row = |copy: &Copy| copy.height == 1 && copy.depth == 1;
            has_one_row(&old.copy) && has_one_row(&new.copy) && !new.copy.is_empty()
        }
        (_, Operation::Fill { fill, .. }) => fill.width > 0 && fill.height > 0,
        _ => true,
    }
}

pub(crate) unsafe fn cuGraphExecKernelNodeSetParams(
    exec: CUgraphExec,
    node: CUgraphNode,
    params: *const sys::CUDA_KERNEL_NODE_PARAMS_v1,
) -> Result {
    // SAFETY: `params` is NULL or the caller's structure.
    set(exec, node, |_| unsafe { Operation::kernel_v1(params) })
}

pub(crate) unsafe fn cuGraphExecKernelNodeSetParams_v2(
    exec: CUgraphExec,
    node: CUgraphNode,
    params: *const sys::CUDA_KERNEL_NODE_PARAMS,
) -> Result {
    // SAFETY: `params` is NULL or the caller's structure.
    set(exec, node, |_| unsafe { Operation::kernel(params) })
}

pub(crate) unsafe fn cuGraphExecMemcpyNodeSetParams(
    exec: CUgraphExec,
    node: CUgraphNode,
    params: *const sys::CUDA_MEMCPY3D,
    context: CUcontext,
) -> Result {
    // SAFETY: `params` is NULL or the caller's structure.
    set(exec, node, |_| unsafe { Operation::copy(params, context) })
}

pub(crate) unsafe fn cuGraphExecMemsetNodeSetParams(
    exec: CUgraphExec,
    node: CUgraphNode,
    params: *const sys::CUDA_MEMSET_NODE_PARAMS,
    context: CUcontext,
) -> Result {
    // SAFETY: `params` is NULL or the caller's structure.
    set(exec, node, |_| unsafe { Operation::fill(params, context) })
}

pub(crate) unsafe fn cuGraphExecHostNodeSetParams(
    exec: CUgraphExec,
    node: CUgraphNode,
    params: *const sys::CUDA_HOST_NODE_PARAMS,
) -> Result {
    // SAFETY: `params` is NULL or the caller's structure.
    set(exec, node, |_| unsafe { host(params) })
}

pub(crate) unsafe fn cuGraphExecEventRecordNodeSetEvent(
    exec: CUgraphExec,
    node: CUgraphNode,
    event: CUevent,
) -> Result {
    set(exec, node, |_| Ok(Operation::Record(event_by_handle(event)?)))
}

pub(crate) unsafe fn cuGraphExecEventWaitNodeSetEvent(
    exec: CUgraphExec,
    node: CUgraphNode,
    event: CUevent,
) -> Result {
    set(exec, node, |_| Ok(Operation::Wait(event_by_handle(event)?)))
}

pub(crate) unsafe fn cuGraphExecBatchMemOpNodeSetParams(
    exec: CUgraphExec,
    node: CUgraphNode,
    params: *const sys::CUDA_BATCH_MEM_OP_NODE_PARAMS,
) -> Result {
    // SAFETY: `params` is NULL or the caller's structure.
    set(exec, node, |_| unsafe { Operation::memory_ops(params) })
}

pub(crate) unsafe fn cuGraphExecChildGraphNodeSetParams(
    exec: CUgraphExec,
    node: CUgraphNode,
    child: CUgraph,
) -> Result {
    let (exec, child) = (by_handle(exec)?, graph_by_handle(child)?);
    set_child(&exec, node, &child)
}

/// The child's nodes are right before its own node, as many as its graph has.
fn set_child(exec: &Exec, node: CUgraphNode, child: &Graph) -> Result {
    let place = exec.place_of(node)?;
    let (graph, id) = node_by_handle(node)?;
    let Operation::Child(embedded) = graph.operation(id)? else { return Err(INVALID) };
    let count = unfold(&embedded).map_err(|_| INVALID)?.len();
    let mut nodes = exec.nodes.lock().to_vec();
    let first = place.checked_sub(count).ok_or(INVALID)?;
    // Inside the child, places count from its first node, and what the child as a whole comes after is no part
    // of its shape.
    let inside: Vec<ExecNode> = nodes[first..place]
        .iter()
        .map(|node| {
            let after = node.after.iter().filter(|before| (first..place).contains(before));
            ExecNode { after: after.map(|before| before - first).collect(), ..node.clone() }
        })
        .collect();
    let updated = updated(&inside, child).map_err(|_| INVALID)?;
    for (node, updated) in nodes[first..place].iter_mut().zip(updated) {
        node.operation = updated.operation;
    }
    exec.replace(nodes);
    Ok(())
}

pub(crate) unsafe fn cuGraphExecNodeSetParams(
    exec: CUgraphExec,
    node: CUgraphNode,
    params: *mut sys::CUgraphNodeParams,
) -> Result {
    // SAFETY: `params` is NULL or the caller's structure.
    let params = unsafe { NodeParams::read(params) }?;
    if params.kind() == sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_GRAPH {
        let (exec, child) = (by_handle(exec)?, graph_by_handle(params.first_field() as CUgraph)?);
        return set_child(&exec, node, &child);
    }
    set(exec, node, |old| {
        if old.kind() != params.kind() {
            return Err(INVALID);
        }
        // SAFETY: the pointers in the structure are as the call asks.
        unsafe { params.operation() }
    })
}
