//! The driver's calls that make graphs, copy them and launch them, as far as the consistent cut is concerned; the rest
//! of them the handlers of `memory::graph` and `objects` do.

use std::ffi::{c_char, c_ulonglong};

use cuda_abi::sys::{self, CUgraphEdgeData, CUgraphNodeParams};
use cuda_abi::types::{
    CUDA_GRAPH_INSTANTIATE_PARAMS, CUgraph, CUgraphExec, CUgraphExecUpdateResult,
    CUgraphExecUpdateResultInfo, CUgraphNode, CUgraphNodeType, CUresult, CUstream,
};

use super::graphs;
use crate::cuda::handler::handlers;
use crate::cuda::result::SUCCESS;
use crate::cuda::{memory::graph as memory, objects};

const CHILD: CUgraphNodeType = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_GRAPH as CUgraphNodeType;
const CONDITIONAL: CUgraphNodeType = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_CONDITIONAL as CUgraphNodeType;

/// # Safety
/// `out` is what the driver has written if the call succeeded, or NULL.
unsafe fn instantiated(result: CUresult, out: *mut CUgraphExec, graph: CUgraph) -> CUresult {
    if result == SUCCESS && !out.is_null() {
        // SAFETY: the driver has written it.
        graphs::set(unsafe { out.read() }, graph);
    }
    result
}

/// The parameters of a node of this kind, if it is one.
///
/// # Safety
/// The parameters are NULL or the program's; `T` is what nodes of this kind have.
unsafe fn of_kind<T: Copy>(parameters: *const CUgraphNodeParams, kind: CUgraphNodeType) -> Option<T> {
    // SAFETY: the structure begins with the type of the node, an `int`.
    if parameters.is_null() || unsafe { parameters.cast::<CUgraphNodeType>().read_unaligned() } != kind {
        return None;
    }
    // SAFETY: the field of the program's structure.
    let of_node = unsafe { &raw const (*parameters).__bindgen_anon_1 };
    // SAFETY: promised.
    Some(unsafe { of_node.cast::<T>().read_unaligned() })
}

/// The child graph of a new node, for parameters of any node.
///
/// # Safety
/// The parameters are NULL or the program's.
unsafe fn child_of(parameters: *const CUgraphNodeParams) -> Option<CUgraph> {
    // SAFETY: those of a child node begin with the graph's handle.
    unsafe { of_kind(parameters, CHILD) }
}

/// Notes the node that was added: its child graph, and the bodies of a conditional node.
///
/// # Safety
/// `child` is that of the parameters before the call; they are NULL or the program's, as the driver has left them.
unsafe fn added(
    result: CUresult,
    graph: CUgraph,
    child: Option<CUgraph>,
    parameters: *const CUgraphNodeParams,
) -> CUresult {
    if result != SUCCESS {
        return result;
    }
    if let Some(child) = child {
        graphs::add(graph, child);
    }
    // SAFETY: what a conditional node has.
    if let Some(node) = unsafe { of_kind::<sys::CUDA_CONDITIONAL_NODE_PARAMS>(parameters, CONDITIONAL) }
        && !node.phGraph_out.is_null()
    {
        // SAFETY: the driver has made an array of as many bodies.
        graphs::add_bodies(graph, unsafe {
            std::slice::from_raw_parts(node.phGraph_out.cast(), node.size as usize)
        });
    }
    result
}

handlers! {
    fn cuGraphLaunch(executable: CUgraphExec, stream: CUstream) |_, real| {
        let _in_call = graphs::launch(executable, stream);
        // SAFETY: the parameters are those of our own caller.
        unsafe { memory::cuGraphLaunch(real, executable, stream) }
    }

    fn cuGraphInstantiate_v2(
        out: *mut CUgraphExec, graph: CUgraph, node: *mut CUgraphNode, log: *mut c_char, bytes: usize
    ) |_, real| {
        // SAFETY: the parameters are those of our own caller.
        let result = unsafe { memory::cuGraphInstantiate_v2(real, out, graph, node, log, bytes) };
        // SAFETY: as above.
        unsafe { instantiated(result, out, graph) }
    }

    fn cuGraphInstantiateWithFlags(out: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong) |_, real| {
        // SAFETY: the parameters are those of our own caller.
        let result = unsafe { memory::cuGraphInstantiateWithFlags(real, out, graph, flags) };
        // SAFETY: as above.
        unsafe { instantiated(result, out, graph) }
    }

    fn cuGraphInstantiateWithParams(
        out: *mut CUgraphExec, graph: CUgraph, parameters: *mut CUDA_GRAPH_INSTANTIATE_PARAMS
    ) |_, real| {
        // SAFETY: the parameters are those of our own caller.
        let result = unsafe { memory::cuGraphInstantiateWithParams(real, out, graph, parameters) };
        // SAFETY: as above.
        unsafe { instantiated(result, out, graph) }
    }

    fn cuGraphExecDestroy(executable: CUgraphExec) |_, real| {
        // SAFETY: the parameters are those of our own caller.
        graphs::destroy_executable(executable, || unsafe { memory::cuGraphExecDestroy(real, executable) })
    }

    fn cuGraphDestroy(graph: CUgraph) |_, real| {
        // SAFETY: the parameters are those of our own caller.
        graphs::destroy_graph(graph, || unsafe { objects::cuGraphDestroy(real, graph) })
    }

    fn cuGraphClone(out: *mut CUgraph, original: CUgraph) |_, real| {
        // SAFETY: the parameters are those of our own caller.
        let result = unsafe { objects::cuGraphClone(real, out, original) };
        if result == SUCCESS && !out.is_null() {
            // SAFETY: the driver has written it.
            graphs::add(unsafe { out.read() }, original);
        }
        result
    }

    fn cuGraphAddChildGraphNode(
        node: *mut CUgraphNode, graph: CUgraph, dependencies: *const CUgraphNode, count: usize, child: CUgraph
    ) |call| {
        let result = call();
        if result == SUCCESS {
            graphs::add(graph, child);
        }
        result
    }

    fn cuGraphAddNode(
        node: *mut CUgraphNode, graph: CUgraph, dependencies: *const CUgraphNode, count: usize,
        parameters: *mut CUgraphNodeParams
    ) |_, real| {
        // SAFETY: the parameters are those of our own caller.
        let child = unsafe { child_of(parameters) };
        // SAFETY: as above.
        let result = unsafe { memory::cuGraphAddNode(real, node, graph, dependencies, count, parameters) };
        // SAFETY: as above.
        unsafe { added(result, graph, child, parameters) }
    }

    fn cuGraphAddNode_v2(
        node: *mut CUgraphNode, graph: CUgraph, dependencies: *const CUgraphNode,
        edges: *const CUgraphEdgeData, count: usize, parameters: *mut CUgraphNodeParams
    ) |_, real| {
        // SAFETY: the parameters are those of our own caller.
        let child = unsafe { child_of(parameters) };
        // SAFETY: as above; one function serves both forms.
        let result =
            unsafe { memory::cuGraphAddNode_v3(real, node, graph, dependencies, edges, count, parameters) };
        // SAFETY: as above.
        unsafe { added(result, graph, child, parameters) }
    }

    fn cuGraphExecUpdate(
        executable: CUgraphExec, graph: CUgraph, node: *mut CUgraphNode, out: *mut CUgraphExecUpdateResult
    ) |call| {
        let result = call();
        if result == SUCCESS {
            graphs::set(executable, graph);
        }
        result
    }

    fn cuGraphExecUpdate_v2(
        executable: CUgraphExec, graph: CUgraph, info: *mut CUgraphExecUpdateResultInfo
    ) |call| {
        let result = call();
        if result == SUCCESS {
            graphs::set(executable, graph);
        }
        result
    }
}

/// The parameters are the same.
pub(crate) use cuGraphAddNode_v2 as cuGraphAddNode_v3;
