//! Entry points of stream capture.

use std::ptr::null_mut;
use std::sync::Arc;

use cuda_abi::sys::{CUresult, CUstreamCaptureStatus, CUstreamUpdateCaptureDependencies_flags};
use cuda_abi::types::{CUgraph, CUgraphEdgeData, CUgraphNode, CUstream, CUstreamCaptureMode};

use super::capture::{self, Capture, Mode};
use super::object::{Stream, find};
use crate::error::{Result, write_if_wanted, write_out};
use crate::graph::{Graph, NodeId, graph_by_handle, node_by_handle};
use crate::process;

const NONE: u32 = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as u32;
const ACTIVE: u32 = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE as u32;
const INVALIDATED: u32 = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED as u32;

/// Before CUDA 10.1 there was no mode.
pub(crate) unsafe fn cuStreamBeginCapture(stream: CUstream) -> Result {
    capture::begin(&find(stream)?, Mode::Global, None)
}

pub(crate) unsafe fn cuStreamBeginCapture_v2(stream: CUstream, mode: CUstreamCaptureMode) -> Result {
    capture::begin(&find(stream)?, Mode::new(mode)?, None)
}

pub(crate) unsafe fn cuStreamBeginCaptureToGraph(
    stream: CUstream,
    graph: CUgraph,
    nodes: *const CUgraphNode,
    edges: *const CUgraphEdgeData,
    count: usize,
    mode: CUstreamCaptureMode,
) -> Result {
    let (stream, mode) = (find(stream)?, Mode::new(mode)?);
    let graph = graph_by_handle(graph)?;
    // SAFETY: the caller passes `count` edges, or NULL.
    unsafe { check_edges(edges, count) }?;
    // SAFETY: the caller passes `count` nodes.
    let nodes = unsafe { read_nodes(&graph, nodes, count) }?;
    capture::begin(&stream, mode, Some((graph, nodes)))
}

/// # Safety
/// `nodes` is NULL or valid for `count` reads.
unsafe fn read_nodes(graph: &Arc<Graph>, nodes: *const CUgraphNode, count: usize) -> Result<Vec<NodeId>> {
    if count == 0 {
        return Ok(Vec::new());
    }
    if nodes.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller vouches for `count` handles.
    let handles = unsafe { std::slice::from_raw_parts(nodes, count) };
    handles.iter().map(|handle| node_of(graph, *handle)).collect()
}

/// The node of a handle.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` if it is none of this graph.
fn node_of(graph: &Arc<Graph>, handle: CUgraphNode) -> Result<NodeId> {
    let (owner, node) = node_by_handle(handle)?;
    if Arc::ptr_eq(&owner, graph) { Ok(node) } else { Err(CUresult::CUDA_ERROR_INVALID_VALUE) }
}

/// Only plain edges are known: those of programmatic dependent launch are not.
///
/// # Safety
/// `edges` is NULL or valid for `count` reads.
unsafe fn check_edges(edges: *const CUgraphEdgeData, count: usize) -> Result {
    if edges.is_null() || count == 0 {
        return Ok(());
    }
    // SAFETY: the caller vouches for `count` edges, which are plain bytes.
    let edges =
        unsafe { std::slice::from_raw_parts(edges.cast::<[u8; size_of::<CUgraphEdgeData>()]>(), count) };
    if edges.iter().flatten().all(|byte| *byte == 0) {
        Ok(())
    } else {
        Err(CUresult::CUDA_ERROR_NOT_SUPPORTED)
    }
}

pub(crate) unsafe fn cuStreamEndCapture(stream: CUstream, out: *mut CUgraph) -> Result {
    let stream = find(stream)?;
    // SAFETY: `out` is the caller's out parameter. A capture that fails gives NULL.
    unsafe { write_out(out, null_mut()) }?;
    let graph = capture::end(&stream)?;
    // SAFETY: as above.
    unsafe { write_out(out, graph.handle()) }
}

pub(crate) unsafe fn cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode) -> Result {
    process::machine()?;
    if mode.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: `mode` is the caller's in and out parameter.
    let wanted = Mode::new(unsafe { mode.read() })?;
    let before = capture::exchange_thread_mode(wanted);
    // SAFETY: as above.
    unsafe { write_out(mode, before as u32) }
}

// ---- asking ----

pub(crate) unsafe fn cuStreamIsCapturing(stream: CUstream, out: *mut u32) -> Result {
    let status = inspect(&*find(stream)?, |capture| {
        capture.map_or(NONE, |capture| if capture.is_invalid { INVALIDATED } else { ACTIVE })
    })?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, status) }
}

/// Inspects the stream's capture, which stays as it is.
fn inspect<T>(stream: &Stream, see: impl FnOnce(Option<&mut Capture>) -> T) -> Result<T> {
    let Some(mut captures) = capture::open() else { return Ok(see(None)) };
    if captures.is_implied(stream) {
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    }
    Ok(see(captures.of(stream)))
}

pub(crate) unsafe fn cuStreamGetCaptureInfo(stream: CUstream, status: *mut u32, id: *mut u64) -> Result {
    let (graph, nodes, count) = (null_mut(), null_mut(), null_mut());
    // SAFETY: all are the caller's out parameters; NULL means that it is not wanted.
    unsafe { cuStreamGetCaptureInfo_v2(stream, status, id, graph, nodes, count) }
}

pub(crate) unsafe fn cuStreamGetCaptureInfo_v2(
    stream: CUstream,
    status: *mut u32,
    id: *mut u64,
    graph: *mut CUgraph,
    nodes: *mut *const CUgraphNode,
    count: *mut usize,
) -> Result {
    // SAFETY: all are the caller's out parameters; NULL means that it is not wanted.
    unsafe { cuStreamGetCaptureInfo_v3(stream, status, id, graph, nodes, null_mut(), count) }
}

pub(crate) unsafe fn cuStreamGetCaptureInfo_v3(
    stream: CUstream,
    status: *mut u32,
    id: *mut u64,
    graph: *mut CUgraph,
    nodes: *mut *const CUgraphNode,
    edges: *mut *const CUgraphEdgeData,
    count: *mut usize,
) -> Result {
    let stream = find(stream)?;
    if status.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    inspect(&stream, |capture| {
        let Some(capture) = capture else {
            // SAFETY: `status` is the caller's out parameter, checked above.
            return unsafe { write_out(status, NONE) };
        };
        if capture.is_invalid {
            // SAFETY: as above.
            return unsafe { write_out(status, INVALIDATED) };
        }
        let shown = capture.show(&stream);
        // SAFETY: as above.
        unsafe { write_out(status, ACTIVE) }?;
        // SAFETY: `id` is the caller's out parameter; NULL means that it is not wanted.
        unsafe { write_if_wanted(id, capture.id) };
        // SAFETY: `graph` is the caller's out parameter; NULL means that it is not wanted.
        unsafe { write_if_wanted(graph, capture.graph.handle()) };
        // SAFETY: `nodes` is the caller's out parameter; NULL means that it is not wanted.
        unsafe { write_if_wanted(nodes, shown.0) };
        // SAFETY: `edges` is the caller's out parameter; NULL means that it is not wanted.
        unsafe { write_if_wanted(edges, shown.1) };
        // SAFETY: `count` is the caller's out parameter; NULL means that it is not wanted.
        unsafe { write_if_wanted(count, shown.2) };
        Ok(())
    })?
}

// ---- changing ----

pub(crate) unsafe fn cuStreamUpdateCaptureDependencies(
    stream: CUstream,
    nodes: *mut CUgraphNode,
    count: usize,
    flags: u32,
) -> Result {
    // SAFETY: all parameters are the caller's own; there are no edges.
    unsafe { cuStreamUpdateCaptureDependencies_v2(stream, nodes, std::ptr::null(), count, flags) }
}

pub(crate) unsafe fn cuStreamUpdateCaptureDependencies_v2(
    stream: CUstream,
    nodes: *mut CUgraphNode,
    edges: *const CUgraphEdgeData,
    count: usize,
    flags: u32,
) -> Result {
    use CUstreamUpdateCaptureDependencies_flags as Flags;
    const ADD: u32 = Flags::CU_STREAM_ADD_CAPTURE_DEPENDENCIES as u32;
    const SET: u32 = Flags::CU_STREAM_SET_CAPTURE_DEPENDENCIES as u32;
    let stream = find(stream)?;
    if !matches!(flags, ADD | SET) {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller passes `count` edges, or NULL.
    unsafe { check_edges(edges, count) }?;
    inspect(&stream, |capture| {
        let capture = capture.ok_or(CUresult::CUDA_ERROR_ILLEGAL_STATE)?.checked()?;
        // SAFETY: the caller passes `count` nodes.
        let nodes = unsafe { read_nodes(&capture.graph, nodes, count) }?;
        capture.come_after(&stream, &nodes, flags == SET);
        Ok(())
    })?
}
