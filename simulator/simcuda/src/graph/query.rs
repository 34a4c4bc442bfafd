//! What can be asked about graphs and nodes.

use std::ffi::{CStr, OsStr};
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt;

use cuda_abi::sys::{self, CUresult};
use cuda_abi::types::{CUgraph, CUgraphNode, CUgraphNodeType, c_char};

use super::edge::Edge;
use super::operation::Operation;
use super::{Graph, INVALID, Node, NodeId, graph_by_handle, node_by_handle};
use crate::error::{Result, write_out};

pub(crate) unsafe fn cuGraphNodeGetType(node: CUgraphNode, out: *mut CUgraphNodeType) -> Result {
    let (graph, id) = node_by_handle(node)?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, graph.operation(id)?.kind() as u32) }
}

pub(crate) unsafe fn cuGraphNodeGetContainingGraph(node: CUgraphNode, out: *mut CUgraph) -> Result {
    let (graph, _) = node_by_handle(node)?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, graph.handle()) }
}

pub(crate) unsafe fn cuGraphNodeGetLocalId(node: CUgraphNode, out: *mut u32) -> Result {
    let (graph, id) = node_by_handle(node)?;
    let number = graph.nodes.lock().get(&id).ok_or(INVALID)?.number;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, number) }
}

pub(crate) unsafe fn cuGraphNodeGetToolsId(node: CUgraphNode, out: *mut u64) -> Result {
    let (_, id) = node_by_handle(node)?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, id.0 as u64) }
}

pub(crate) unsafe fn cuGraphGetId(graph: CUgraph, out: *mut u32) -> Result {
    let graph = graph_by_handle(graph)?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, graph.id) }
}

pub(crate) unsafe fn cuGraphNodeFindInClone(
    out: *mut CUgraphNode,
    original: CUgraphNode,
    clone: CUgraph,
) -> Result {
    let original = NodeId(original as usize);
    let clone = graph_by_handle(clone)?;
    let found =
        clone.nodes.lock().iter().find(|(_, node)| node.original == Some(original)).map(|(id, _)| *id);
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, found.ok_or(INVALID)?.handle()) }
}

// ---- lists ----

/// Gives a list the way that these calls do: without an array only its length; with one as much as fits, and
/// NULL for the rest.
///
/// # Safety
/// `count` is NULL or valid; `out` is NULL or has room for `*count` elements.
unsafe fn write_nodes(nodes: &[NodeId], out: *mut CUgraphNode, count: *mut usize) -> Result {
    if count.is_null() {
        return Err(INVALID);
    }
    // SAFETY: not NULL, and the caller vouches for the rest.
    let room = unsafe { count.read() };
    if out.is_null() {
        // SAFETY: as above.
        unsafe { count.write(nodes.len()) };
        return Ok(());
    }
    for index in 0..room {
        let handle = nodes.get(index).map_or(std::ptr::null_mut(), |id| id.handle());
        // SAFETY: below the length that the caller vouches for.
        unsafe { write_out(out.wrapping_add(index), handle) }?;
    }
    // SAFETY: as above.
    unsafe { count.write(nodes.len().min(room)) };
    Ok(())
}

/// As [`write_nodes`], with what the edges to or from them say.
///
/// # Errors
/// `CUDA_ERROR_LOSSY_QUERY` if an edge has data and there is no array for it.
///
/// # Safety
/// As [`write_nodes`], also for `data`.
unsafe fn write_edges(
    edges: &[(NodeId, Edge)],
    out: *mut CUgraphNode,
    data: *mut sys::CUgraphEdgeData,
    count: *mut usize,
) -> Result {
    if out.is_null() && !data.is_null() {
        return Err(INVALID);
    }
    let is_lossy = data.is_null() && !out.is_null() && edges.iter().any(|(_, edge)| !edge.is_default());
    if is_lossy {
        return Err(CUresult::CUDA_ERROR_LOSSY_QUERY);
    }
    let nodes: Vec<NodeId> = edges.iter().map(|(id, _)| *id).collect();
    // SAFETY: the caller vouches for all.
    unsafe { write_nodes(&nodes, out, count) }?;
    if !data.is_null() {
        // SAFETY: written by the call above.
        let written = unsafe { count.read() };
        for (index, (_, edge)) in edges.iter().take(written).enumerate() {
            // SAFETY: below the length that the caller vouches for.
            unsafe { write_out(data.wrapping_add(index), edge.data()) }?;
        }
    }
    Ok(())
}

pub(crate) unsafe fn cuGraphGetNodes(graph: CUgraph, out: *mut CUgraphNode, count: *mut usize) -> Result {
    let nodes: Vec<NodeId> = graph_by_handle(graph)?.nodes.lock().keys().copied().collect();
    // SAFETY: the caller's out parameters.
    unsafe { write_nodes(&nodes, out, count) }
}

pub(crate) unsafe fn cuGraphGetRootNodes(graph: CUgraph, out: *mut CUgraphNode, count: *mut usize) -> Result {
    let graph = graph_by_handle(graph)?;
    let nodes = graph.nodes.lock();
    let roots: Vec<NodeId> =
        nodes.iter().filter(|(_, node)| node.after.is_empty()).map(|(id, _)| *id).collect();
    drop(nodes);
    // SAFETY: the caller's out parameters.
    unsafe { write_nodes(&roots, out, count) }
}

pub(crate) unsafe fn cuGraphGetEdges(
    graph: CUgraph,
    from: *mut CUgraphNode,
    to: *mut CUgraphNode,
    count: *mut usize,
) -> Result {
    // SAFETY: the caller's out parameters.
    unsafe { cuGraphGetEdges_v2(graph, from, to, std::ptr::null_mut(), count) }
}

pub(crate) unsafe fn cuGraphGetEdges_v2(
    graph: CUgraph,
    from: *mut CUgraphNode,
    to: *mut CUgraphNode,
    data: *mut sys::CUgraphEdgeData,
    count: *mut usize,
) -> Result {
    let graph = graph_by_handle(graph)?;
    if from.is_null() != to.is_null() || count.is_null() {
        return Err(INVALID);
    }
    let mut sources = Vec::new();
    let mut targets = Vec::new();
    for (id, node) in graph.nodes.lock().iter() {
        sources.extend(node.after.iter().map(|(before, edge)| (*before, *edge)));
        targets.resize(sources.len(), *id);
    }
    // SAFETY: not NULL, so the caller's in and out parameter.
    let room = unsafe { count.read() };
    // SAFETY: the caller's out parameters.
    unsafe { write_edges(&sources, from, data, count) }?;
    if !to.is_null() {
        let mut room = room;
        // SAFETY: the caller's array is as long as it said.
        unsafe { write_nodes(&targets, to, &raw mut room) }?;
    }
    Ok(())
}

pub(crate) unsafe fn cuGraphNodeGetDependencies(
    node: CUgraphNode,
    out: *mut CUgraphNode,
    count: *mut usize,
) -> Result {
    // SAFETY: the caller's out parameters.
    unsafe { cuGraphNodeGetDependencies_v2(node, out, std::ptr::null_mut(), count) }
}

pub(crate) unsafe fn cuGraphNodeGetDependencies_v2(
    node: CUgraphNode,
    out: *mut CUgraphNode,
    data: *mut sys::CUgraphEdgeData,
    count: *mut usize,
) -> Result {
    let (graph, id) = node_by_handle(node)?;
    let nodes = graph.nodes.lock();
    let edges: Vec<_> = nodes.get(&id).ok_or(INVALID)?.after.iter().map(|(id, edge)| (*id, *edge)).collect();
    drop(nodes);
    // SAFETY: the caller's out parameters.
    unsafe { write_edges(&edges, out, data, count) }
}

pub(crate) unsafe fn cuGraphNodeGetDependentNodes(
    node: CUgraphNode,
    out: *mut CUgraphNode,
    count: *mut usize,
) -> Result {
    // SAFETY: the caller's out parameters.
    unsafe { cuGraphNodeGetDependentNodes_v2(node, out, std::ptr::null_mut(), count) }
}

pub(crate) unsafe fn cuGraphNodeGetDependentNodes_v2(
    node: CUgraphNode,
    out: *mut CUgraphNode,
    data: *mut sys::CUgraphEdgeData,
    count: *mut usize,
) -> Result {
    let (graph, id) = node_by_handle(node)?;
    let nodes = graph.nodes.lock();
    let later = nodes.iter().filter_map(|(other, node)| Some((*other, *node.after.get(&id)?)));
    let edges: Vec<_> = later.collect();
    drop(nodes);
    // SAFETY: the caller's out parameters.
    unsafe { write_edges(&edges, out, data, count) }
}

// ---- DOT ----

const VERBOSE: u32 = sys::CUgraphDebugDot_flags::CU_GRAPH_DEBUG_DOT_FLAGS_VERBOSE as u32;
const HANDLES: u32 = sys::CUgraphDebugDot_flags::CU_GRAPH_DEBUG_DOT_FLAGS_HANDLES as u32;
const LAST: u32 = sys::CUgraphDebugDot_flags::CU_GRAPH_DEBUG_DOT_FLAGS_CONDITIONAL_NODE_PARAMS as u32;

/// Nodes carry their kind and number; handles too, if they are asked for.
pub(crate) unsafe fn cuGraphDebugDotPrint(graph: CUgraph, path: *const c_char, flags: u32) -> Result {
    let graph = graph_by_handle(graph)?;
    if path.is_null() || flags >= 2 * LAST {
        return Err(INVALID);
    }
    // SAFETY: not NULL, so the caller's NUL-terminated path.
    let path = OsStr::from_bytes(unsafe { CStr::from_ptr(path) }.to_bytes());
    let mut text = String::from("digraph dot {\n");
    dot(&graph, flags & (VERBOSE | HANDLES) != 0, &mut text);
    text.push_str("}\n");
    std::fs::write(path, text).map_err(|_| CUresult::CUDA_ERROR_OPERATING_SYSTEM)
}

fn dot(graph: &Graph, with_handles: bool, text: &mut String) {
    let nodes = graph.nodes.lock().clone();
    let name = |node: &Node| format!("\"graph_{}_node_{}\"", graph.id, node.number);
    // Writing to a `String` cannot fail.
    let _ = writeln!(text, "subgraph cluster_{0} {{\nlabel=\"graph_{0}\";", graph.id);
    for (id, node) in &nodes {
        let kind = format!("{:?}", node.operation.kind());
        let kind = kind.trim_start_matches("CU_GRAPH_NODE_TYPE_");
        let handle = if with_handles { format!("\\n{:#x}", id.0) } else { String::new() };
        let _ = writeln!(text, "{}[label=\"{} {kind}{handle}\"];", name(node), node.number);
        for before in node.after.keys().filter_map(|before| nodes.get(before)) {
            let _ = writeln!(text, "{} -> {};", name(before), name(node));
        }
    }
    for node in nodes.values() {
        if let Operation::Child(child) = &node.operation {
            dot(child, with_handles, text);
        }
    }
    text.push_str("}\n");
}
