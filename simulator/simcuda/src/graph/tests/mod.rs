//! Graphs, through their handlers.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "the calls of a test have one reason to be safe")]

mod build;
mod capture;
mod launch;
mod memory;
mod objects;
mod params;
mod update;

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

use cuda_abi::sys::{self, CUmemorytype, CUresult};
use cuda_abi::types::{CUgraph, CUgraphExec, CUgraphNode, CUstream};
use parking_lot::Mutex;

use crate::error::Result;
use crate::transfer::testing::{Device, call};

const INVALID: Result = Err(CUresult::CUDA_ERROR_INVALID_VALUE);

fn graph() -> CUgraph {
    let mut graph = null_mut();
    call!(cuGraphCreate(&raw mut graph, 0)).unwrap();
    graph
}

fn instantiate(graph: CUgraph) -> CUgraphExec {
    let mut exec = null_mut();
    call!(cuGraphInstantiateWithFlags(&raw mut exec, graph, 0)).unwrap();
    exec
}

/// Captures what this thread does: a global capture would forbid allocations to the tests beside it.
fn begin_capture(stream: CUstream) {
    const THREAD_LOCAL: u32 = 1;
    call!(cuStreamBeginCapture_v2(stream, THREAD_LOCAL)).unwrap();
}

fn try_instantiate(graph: CUgraph) -> Result {
    let mut exec = null_mut();
    call!(cuGraphInstantiateWithFlags(&raw mut exec, graph, 0))
}

fn empty(graph: CUgraph, after: &[CUgraphNode]) -> CUgraphNode {
    let mut node = null_mut();
    call!(cuGraphAddEmptyNode(&raw mut node, graph, after.as_ptr(), after.len())).unwrap();
    node
}

/// What host nodes note, in their order.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<usize>>>);

impl Log {
    fn all(&self) -> Vec<usize> {
        self.0.lock().clone()
    }

    /// The parameters of a host node that notes `number` at each launch.
    fn params(&self, number: usize) -> sys::CUDA_HOST_NODE_PARAMS {
        let entry: &'static (Self, usize) = Box::leak(Box::new((self.clone(), number)));
        sys::CUDA_HOST_NODE_PARAMS { fn_: Some(note), userData: (&raw const *entry).cast_mut().cast() }
    }

    fn node(&self, graph: CUgraph, after: &[CUgraphNode], number: usize) -> CUgraphNode {
        let (mut node, params) = (null_mut(), self.params(number));
        call!(cuGraphAddHostNode(&raw mut node, graph, after.as_ptr(), after.len(), &raw const params))
            .unwrap();
        node
    }
}

unsafe extern "C" fn note(entry: *mut c_void) {
    // SAFETY: made by `Log::params`, and never freed.
    let (log, number) = unsafe { &*entry.cast::<(Log, usize)>() };
    log.0.lock().push(*number);
}

/// A plain copy, between two device addresses.
fn copy_params(to: u64, from: u64, len: usize) -> sys::CUDA_MEMCPY3D {
    sys::CUDA_MEMCPY3D {
        srcXInBytes: 0,
        srcY: 0,
        srcZ: 0,
        srcLOD: 0,
        srcMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
        srcHost: std::ptr::null(),
        srcDevice: from,
        srcArray: null_mut(),
        reserved0: null_mut(),
        srcPitch: len,
        srcHeight: 1,
        dstXInBytes: 0,
        dstY: 0,
        dstZ: 0,
        dstLOD: 0,
        dstMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstHost: null_mut(),
        dstDevice: to,
        dstArray: null_mut(),
        reserved1: null_mut(),
        dstPitch: len,
        dstHeight: 1,
        WidthInBytes: len,
        Height: 1,
        Depth: 1,
    }
}

fn copy(graph: CUgraph, after: &[CUgraphNode], params: &sys::CUDA_MEMCPY3D) -> CUgraphNode {
    let mut node = null_mut();
    call!(cuGraphAddMemcpyNode(&raw mut node, graph, after.as_ptr(), after.len(), params, null_mut()))
        .unwrap();
    node
}

fn fill_params(address: u64, value: u32, width: usize) -> sys::CUDA_MEMSET_NODE_PARAMS {
    sys::CUDA_MEMSET_NODE_PARAMS { dst: address, pitch: 0, value, elementSize: 1, width, height: 1 }
}

fn fill(graph: CUgraph, after: &[CUgraphNode], params: &sys::CUDA_MEMSET_NODE_PARAMS) -> CUgraphNode {
    let mut node = null_mut();
    call!(cuGraphAddMemsetNode(&raw mut node, graph, after.as_ptr(), after.len(), params, null_mut()))
        .unwrap();
    node
}

/// Launches on the default stream and waits.
fn run(exec: CUgraphExec) {
    call!(cuGraphLaunch(exec, null_mut())).unwrap();
    call!(cuStreamSynchronize(null_mut())).unwrap();
}

/// All nodes of a graph.
fn nodes(graph: CUgraph) -> Vec<CUgraphNode> {
    let mut count = 0;
    call!(cuGraphGetNodes(graph, null_mut(), &raw mut count)).unwrap();
    let mut nodes = vec![null_mut(); count];
    call!(cuGraphGetNodes(graph, nodes.as_mut_ptr(), &raw mut count)).unwrap();
    nodes
}

fn kind(node: CUgraphNode) -> u32 {
    let mut kind = 99;
    call!(cuGraphNodeGetType(node, &raw mut kind)).unwrap();
    kind
}

fn device(len: usize) -> Device {
    Device::with(&vec![0; len])
}
