//! Graphs that are built by hand.

use cuda_abi::sys::{CUgraphExecUpdateResult as Update, CUgraphNodeType as Type};
use cuda_abi::types::*;

use crate::check::{Check, Result, check, expect_equal};
use crate::gpu::Flag;
use crate::{ensure, gives, gpu, kernels, ok, refuses};

/// The checks of this area.
pub const CHECKS: &[Check] = &[
    check(
        "graph/dependencies",
        "nodes run after what they depend on (programming guide, CUDA graphs)",
        dependencies,
    ),
    check(
        "graph/added-edge",
        "cuGraphAddDependencies orders nodes, cuGraphRemoveDependencies undoes it",
        added_edge,
    ),
    check("graph/cycle", "a cycle cannot be instantiated (reference, cuGraphInstantiate)", cycle),
    check("graph/copy-fill-host", "copy, fill and host nodes do what they say", copy_fill_host),
    check("graph/questions", "nodes, edges, roots, types and neighbours are as built (reference)", questions),
    check(
        "graph/exec-lives-on",
        "an executable outlives its graph (reference, cuGraphDestroy)",
        exec_lives_on,
    ),
    check(
        "graph/parameters-copied",
        "an executable has the parameters of the time when it was made",
        parameters_copied,
    ),
    check("graph/get-params", "cuGraphKernelNodeGetParams gives what was set", get_params),
    check(
        "graph/exec-set-params",
        "cuGraphExecKernelNodeSetParams changes later launches only (reference)",
        exec_set_params,
    ),
    check(
        "graph/update",
        "cuGraphExecUpdate takes new parameters from a graph of the same shape (reference)",
        update,
    ),
    check(
        "graph/update-topology",
        "cuGraphExecUpdate refuses another shape and says why (reference)",
        update_topology,
    ),
    check(
        "graph/clone",
        "a clone is a graph of its own, and its nodes are found (reference, cuGraphClone)",
        clone,
    ),
    check("graph/child", "a child graph runs as one node (reference, cuGraphAddChildGraphNode)", child),
    check(
        "graph/launches-in-order",
        "two launches of one executable do not overlap (reference, cuGraphLaunch)",
        launches_in_order,
    ),
    check("graph/stream-order", "a launch keeps its place in the stream's order", stream_order),
    check(
        "graph/disabled",
        "a disabled node does nothing, the next ones run (reference, cuGraphNodeSetEnabled)",
        disabled,
    ),
    check(
        "graph/destroy-node",
        "a destroyed node is removed with its edges (reference, cuGraphDestroyNode)",
        destroy_node,
    ),
    check("graph/empty", "a graph without nodes can be launched", empty),
    check("graph/event-nodes", "event nodes record and wait (reference)", event_nodes),
    check(
        "graph/other-graphs-node",
        "a node of another graph is no dependency: CUDA_ERROR_INVALID_VALUE",
        other_graphs_node,
    ),
];

fn create() -> Result<CUgraph> {
    let mut graph = std::ptr::null_mut();
    ok!(cuGraphCreate(&raw mut graph, 0));
    Ok(graph)
}

fn instantiate(graph: CUgraph) -> Result<CUgraphExec> {
    let mut exec = std::ptr::null_mut();
    ok!(cuGraphInstantiateWithFlags(&raw mut exec, graph, 0));
    Ok(exec)
}

fn run(exec: CUgraphExec) -> Result {
    let stream = gpu::stream()?;
    ok!(cuGraphLaunch(exec, stream));
    ok!(cuStreamSynchronize(stream));
    Ok(())
}

fn kernel_params(function: CUfunction, pointers: &mut [*mut c_void]) -> CUDA_KERNEL_NODE_PARAMS {
    CUDA_KERNEL_NODE_PARAMS {
        func: function,
        gridDimX: 1,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: 1,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: 0,
        kernelParams: pointers.as_mut_ptr(),
        extra: std::ptr::null_mut(),
        kern: std::ptr::null_mut(),
        ctx: std::ptr::null_mut(),
    }
}

/// Adds a node with one thread.
fn add_kernel(
    graph: CUgraph,
    after: &[CUgraphNode],
    function: CUfunction,
    parameters: &[u64],
) -> Result<CUgraphNode> {
    let mut pointers = gpu::parameter_pointers(parameters);
    let params = kernel_params(function, &mut pointers);
    let mut node = std::ptr::null_mut();
    ok!(cuGraphAddKernelNode_v2(&raw mut node, graph, after.as_ptr(), after.len(), &raw const params));
    Ok(node)
}

fn affine() -> Result<CUfunction> {
    gpu::function(kernels::BASIC, "affine")
}

fn dependencies() -> Result {
    gpu::start()?;
    let (affine, graph, address) = (affine()?, create()?, gpu::upload(&[1_u32])?);
    let first = add_kernel(graph, &[], affine, &[address, 1, 1])?;
    let second = add_kernel(graph, &[first], affine, &[address, 10, 0])?;
    add_kernel(graph, &[first, second], affine, &[address, 1, 7])?;
    let exec = instantiate(graph)?;
    run(exec)?;
    gpu::expect_content(address, &[27_u32])?;
    run(exec)?;
    gpu::expect_content(address, &[287_u32])
}

fn added_edge() -> Result {
    gpu::start()?;
    let (affine, graph, address) = (affine()?, create()?, gpu::upload(&[1_u32])?);
    let last = add_kernel(graph, &[], affine, &[address, 10, 0])?;
    let first = add_kernel(graph, &[], affine, &[address, 1, 1])?;
    ok!(cuGraphAddDependencies(graph, &raw const first, &raw const last, 1));
    run(instantiate(graph)?)?;
    gpu::expect_content(address, &[20_u32])?;
    refuses!(cuGraphAddDependencies(graph, &raw const first, &raw const last, 1));
    ok!(cuGraphRemoveDependencies(graph, &raw const first, &raw const last, 1));
    let mut edges = 77;
    ok!(cuGraphGetEdges(graph, std::ptr::null_mut(), std::ptr::null_mut(), &raw mut edges));
    expect_equal("edges", edges, 0)
}

fn cycle() -> Result {
    gpu::start()?;
    let (affine, graph, address) = (affine()?, create()?, gpu::upload(&[1_u32])?);
    let first = add_kernel(graph, &[], affine, &[address, 1, 1])?;
    let second = add_kernel(graph, &[first], affine, &[address, 1, 1])?;
    // Either the edge or the graph is refused.
    let added = crate::cu!(cuGraphAddDependencies(graph, &raw const second, &raw const first, 1));
    if added == 0 {
        let mut exec = std::ptr::null_mut();
        gives!(CUDA_ERROR_INVALID_VALUE, cuGraphInstantiateWithFlags(&raw mut exec, graph, 0));
    }
    Ok(())
}

static HOST_RAN: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);

unsafe extern "C" fn note(_: *mut c_void) {
    HOST_RAN.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
}

fn memset_params(address: u64, value: u32, words: usize) -> CUDA_MEMSET_NODE_PARAMS {
    CUDA_MEMSET_NODE_PARAMS { dst: address, pitch: words * 4, value, elementSize: 4, width: words, height: 1 }
}

/// A copy of one row between device memory.
pub fn copy_params(target: u64, source: u64, size_bytes: usize) -> CUDA_MEMCPY3D {
    use cuda_abi::sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as DEVICE;
    let null = std::ptr::null_mut();
    CUDA_MEMCPY3D {
        srcXInBytes: 0,
        srcY: 0,
        srcZ: 0,
        srcLOD: 0,
        srcMemoryType: DEVICE,
        srcHost: std::ptr::null(),
        srcDevice: source,
        srcArray: std::ptr::null_mut(),
        reserved0: null,
        srcPitch: size_bytes,
        srcHeight: 1,
        dstXInBytes: 0,
        dstY: 0,
        dstZ: 0,
        dstLOD: 0,
        dstMemoryType: DEVICE,
        dstHost: null,
        dstDevice: target,
        dstArray: std::ptr::null_mut(),
        reserved1: null,
        dstPitch: size_bytes,
        dstHeight: 1,
        WidthInBytes: size_bytes,
        Height: 1,
        Depth: 1,
    }
}

fn copy_fill_host() -> Result {
    let context = gpu::start()?;
    let (graph, first, second) = (create()?, gpu::alloc(4096)?, gpu::alloc(4096)?);
    let fill = memset_params(first, 0x0102_0304, 1024);
    let copy = copy_params(second, first, 4096);
    let host = CUDA_HOST_NODE_PARAMS { fn_: Some(note), userData: std::ptr::null_mut() };
    let mut nodes = [std::ptr::null_mut(); 3];
    ok!(cuGraphAddMemsetNode(&raw mut nodes[0], graph, std::ptr::null(), 0, &raw const fill, context));
    let filled = nodes[0];
    ok!(cuGraphAddMemcpyNode(&raw mut nodes[1], graph, &raw const filled, 1, &raw const copy, context));
    let copied = nodes[1];
    ok!(cuGraphAddHostNode(&raw mut nodes[2], graph, &raw const copied, 1, &raw const host));
    run(instantiate(graph)?)?;
    gpu::expect_content(second, &[0x0102_0304_u32; 1024])?;
    expect_equal("host function ran", HOST_RAN.load(std::sync::atomic::Ordering::SeqCst), 1)
}

fn questions() -> Result {
    let context = gpu::start()?;
    let (affine, graph, address) = (affine()?, create()?, gpu::upload(&[1_u32])?);
    let kernel = add_kernel(graph, &[], affine, &[address, 1, 1])?;
    let (fill, mut filled) = (memset_params(address, 0, 1), std::ptr::null_mut());
    ok!(cuGraphAddMemsetNode(&raw mut filled, graph, &raw const kernel, 1, &raw const fill, context));
    let mut end = std::ptr::null_mut();
    let both = [kernel, filled];
    ok!(cuGraphAddEmptyNode(&raw mut end, graph, both.as_ptr(), 2));
    let (mut count, mut nodes) = (3, [std::ptr::null_mut(); 3]);
    ok!(cuGraphGetNodes(graph, nodes.as_mut_ptr(), &raw mut count));
    nodes.sort_unstable();
    let mut wanted = [kernel, filled, end];
    wanted.sort_unstable();
    expect_equal("nodes", (count, nodes), (3, wanted))?;
    let (mut roots, mut root_count) = ([std::ptr::null_mut(); 2], 2);
    ok!(cuGraphGetRootNodes(graph, roots.as_mut_ptr(), &raw mut root_count));
    expect_equal("roots", (root_count, roots[0]), (1, kernel))?;
    let mut edges = 0;
    ok!(cuGraphGetEdges(graph, std::ptr::null_mut(), std::ptr::null_mut(), &raw mut edges));
    expect_equal("edges", edges, 3)?;
    let (mut before, mut after) = (0, 0);
    ok!(cuGraphNodeGetDependencies(end, std::ptr::null_mut(), &raw mut before));
    ok!(cuGraphNodeGetDependentNodes(kernel, std::ptr::null_mut(), &raw mut after));
    expect_equal("neighbours", (before, after), (2, 2))?;
    for (node, wanted) in [
        (kernel, Type::CU_GRAPH_NODE_TYPE_KERNEL),
        (filled, Type::CU_GRAPH_NODE_TYPE_MEMSET),
        (end, Type::CU_GRAPH_NODE_TYPE_EMPTY),
    ] {
        let mut kind = 77;
        ok!(cuGraphNodeGetType(node, &raw mut kind));
        expect_equal("type", kind, wanted as u32)?;
    }
    Ok(())
}

fn exec_lives_on() -> Result {
    gpu::start()?;
    let (affine, graph, address) = (affine()?, create()?, gpu::upload(&[1_u32])?);
    add_kernel(graph, &[], affine, &[address, 5, 0])?;
    let exec = instantiate(graph)?;
    ok!(cuGraphDestroy(graph));
    run(exec)?;
    gpu::expect_content(address, &[5_u32])?;
    ok!(cuGraphExecDestroy(exec));
    Ok(())
}

fn parameters_copied() -> Result {
    gpu::start()?;
    let (affine, graph, address) = (affine()?, create()?, gpu::upload(&[1_u32])?);
    let mut parameters = [address, 2, 0];
    add_kernel(graph, &[], affine, &parameters)?;
    parameters[1] = 100;
    run(instantiate(graph)?)?;
    ensure!(parameters[1] == 100, "the driver changed the parameters");
    gpu::expect_content(address, &[2_u32])
}

fn get_params() -> Result {
    gpu::start()?;
    let (affine, graph, address) = (affine()?, create()?, gpu::upload(&[1_u32])?);
    let node = add_kernel(graph, &[], affine, &[address, 6, 7])?;
    let mut params = kernel_params(std::ptr::null_mut(), &mut []);
    ok!(cuGraphKernelNodeGetParams_v2(node, &raw mut params));
    let dimensions = (params.gridDimX, params.blockDimX, params.sharedMemBytes);
    expect_equal("dimensions", dimensions, (1, 1, 0))?;
    ensure!(!params.kernelParams.is_null(), "no parameters");
    let second = params.kernelParams.wrapping_add(1);
    // SAFETY: the driver gives an array of three pointers, the second of which is to a u32.
    let second = unsafe { second.read() };
    // SAFETY: as above.
    let factor = unsafe { second.cast::<u32>().read_unaligned() };
    expect_equal("the second parameter", factor, 6)
}

fn exec_set_params() -> Result {
    gpu::start()?;
    let (affine, graph, address) = (affine()?, create()?, gpu::upload(&[1_u32])?);
    let node = add_kernel(graph, &[], affine, &[address, 2, 0])?;
    let (exec, other) = (instantiate(graph)?, instantiate(graph)?);
    let parameters = [address, 7, 0];
    let mut pointers = gpu::parameter_pointers(&parameters);
    let params = kernel_params(affine, &mut pointers);
    ok!(cuGraphExecKernelNodeSetParams_v2(exec, node, &raw const params));
    run(exec)?;
    gpu::expect_content(address, &[7_u32])?;
    run(other)?;
    gpu::expect_content(address, &[14_u32])
}

fn update_info() -> CUgraphExecUpdateResultInfo {
    CUgraphExecUpdateResultInfo {
        result: Update::CU_GRAPH_EXEC_UPDATE_ERROR,
        errorNode: std::ptr::null_mut(),
        errorFromNode: std::ptr::null_mut(),
    }
}

fn update() -> Result {
    gpu::start()?;
    let (affine, graph, address) = (affine()?, create()?, gpu::upload(&[1_u32])?);
    let first = add_kernel(graph, &[], affine, &[address, 2, 0])?;
    add_kernel(graph, &[first], affine, &[address, 1, 1])?;
    let exec = instantiate(graph)?;
    let other = create()?;
    let first = add_kernel(other, &[], affine, &[address, 10, 0])?;
    add_kernel(other, &[first], affine, &[address, 1, 5])?;
    let mut info = update_info();
    ok!(cuGraphExecUpdate_v2(exec, other, &raw mut info));
    expect_equal("result", info.result, Update::CU_GRAPH_EXEC_UPDATE_SUCCESS)?;
    run(exec)?;
    gpu::expect_content(address, &[15_u32])
}

fn update_topology() -> Result {
    gpu::start()?;
    let (affine, graph, address) = (affine()?, create()?, gpu::upload(&[1_u32])?);
    let first = add_kernel(graph, &[], affine, &[address, 2, 0])?;
    add_kernel(graph, &[first], affine, &[address, 1, 1])?;
    let exec = instantiate(graph)?;
    let other = create()?;
    add_kernel(other, &[], affine, &[address, 10, 0])?;
    let mut info = update_info();
    info.result = Update::CU_GRAPH_EXEC_UPDATE_SUCCESS;
    gives!(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, cuGraphExecUpdate_v2(exec, other, &raw mut info));
    expect_equal("result", info.result, Update::CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED)?;
    run(exec)?;
    gpu::expect_content(address, &[3_u32])
}

fn clone() -> Result {
    gpu::start()?;
    let (affine, graph, address) = (affine()?, create()?, gpu::upload(&[1_u32])?);
    let node = add_kernel(graph, &[], affine, &[address, 3, 0])?;
    let (mut copy, mut its_node) = (std::ptr::null_mut(), std::ptr::null_mut());
    ok!(cuGraphClone(&raw mut copy, graph));
    ok!(cuGraphNodeFindInClone(&raw mut its_node, node, copy));
    ensure!(!its_node.is_null() && its_node != node, "the clone has the node itself");
    ok!(cuGraphDestroy(graph));
    run(instantiate(copy)?)?;
    gpu::expect_content(address, &[3_u32])
}

fn child() -> Result {
    gpu::start()?;
    let (affine, inner, address) = (affine()?, create()?, gpu::upload(&[1_u32])?);
    let first = add_kernel(inner, &[], affine, &[address, 1, 1])?;
    add_kernel(inner, &[first], affine, &[address, 10, 0])?;
    let (outer, mut node) = (create()?, std::ptr::null_mut());
    let before = add_kernel(outer, &[], affine, &[address, 1, 2])?;
    ok!(cuGraphAddChildGraphNode(&raw mut node, outer, &raw const before, 1, inner));
    add_kernel(outer, &[node], affine, &[address, 1, 3])?;
    ok!(cuGraphDestroy(inner));
    run(instantiate(outer)?)?;
    gpu::expect_content(address, &[43_u32])
}

fn launches_in_order() -> Result {
    gpu::start()?;
    let (affine, graph, address) = (affine()?, create()?, gpu::upload(&[0_u32])?);
    let mut last: Vec<CUgraphNode> = Vec::new();
    for _ in 0..10 {
        last = vec![add_kernel(graph, &last, affine, &[address, 1, 1])?];
    }
    let (exec, first, second) = (instantiate(graph)?, gpu::stream()?, gpu::stream()?);
    for _ in 0..10 {
        ok!(cuGraphLaunch(exec, first));
        ok!(cuGraphLaunch(exec, second));
    }
    gpu::synchronize()?;
    gpu::expect_content(address, &[200_u32])
}

fn stream_order() -> Result {
    gpu::start()?;
    let (affine, graph, address) = (affine()?, create()?, gpu::upload(&[1_u32])?);
    add_kernel(graph, &[], affine, &[address, 10, 0])?;
    let (exec, stream, flag) = (instantiate(graph)?, gpu::stream()?, Flag::new()?);
    flag.hold(stream)?;
    gpu::launch(affine, 1, 1, stream, &[address, 1, 1])?;
    ok!(cuGraphLaunch(exec, stream));
    gpu::launch(affine, 1, 1, stream, &[address, 1, 4])?;
    gives!(CUDA_ERROR_NOT_READY, cuStreamQuery(stream));
    flag.set(1);
    ok!(cuStreamSynchronize(stream));
    gpu::expect_content(address, &[24_u32])
}

fn disabled() -> Result {
    gpu::start()?;
    let (affine, graph, address) = (affine()?, create()?, gpu::upload(&[1_u32])?);
    let first = add_kernel(graph, &[], affine, &[address, 10, 0])?;
    add_kernel(graph, &[first], affine, &[address, 1, 1])?;
    let exec = instantiate(graph)?;
    ok!(cuGraphNodeSetEnabled(exec, first, 0));
    let mut enabled = 77;
    ok!(cuGraphNodeGetEnabled(exec, first, &raw mut enabled));
    expect_equal("enabled", enabled, 0)?;
    run(exec)?;
    gpu::expect_content(address, &[2_u32])
}

fn destroy_node() -> Result {
    gpu::start()?;
    let (affine, graph, address) = (affine()?, create()?, gpu::upload(&[1_u32])?);
    let first = add_kernel(graph, &[], affine, &[address, 10, 0])?;
    add_kernel(graph, &[first], affine, &[address, 1, 1])?;
    ok!(cuGraphDestroyNode(first));
    let mut edges = 77;
    ok!(cuGraphGetEdges(graph, std::ptr::null_mut(), std::ptr::null_mut(), &raw mut edges));
    expect_equal("edges", edges, 0)?;
    run(instantiate(graph)?)?;
    gpu::expect_content(address, &[2_u32])
}

fn empty() -> Result {
    gpu::start()?;
    run(instantiate(create()?)?)
}

fn event_nodes() -> Result {
    gpu::start()?;
    let (affine, graph, address) = (affine()?, create()?, gpu::upload(&[1_u32])?);
    let default = CUevent_flags::CU_EVENT_DEFAULT;
    let (start, end, earlier) = (gpu::event(default)?, gpu::event(default)?, gpu::event(default)?);
    let mut nodes = [std::ptr::null_mut(); 3];
    ok!(cuGraphAddEventWaitNode(&raw mut nodes[0], graph, std::ptr::null(), 0, earlier));
    let waited = nodes[0];
    ok!(cuGraphAddEventRecordNode(&raw mut nodes[1], graph, &raw const waited, 1, start));
    let kernel = add_kernel(graph, &[nodes[1]], affine, &[address, 3, 0])?;
    ok!(cuGraphAddEventRecordNode(&raw mut nodes[2], graph, &raw const kernel, 1, end));
    let mut time_ms = -1.0;
    gives!(CUDA_ERROR_INVALID_HANDLE, cuEventElapsedTime(&raw mut time_ms, start, end));
    run(instantiate(graph)?)?;
    ok!(cuEventElapsedTime(&raw mut time_ms, start, end));
    ensure!(time_ms >= 0.0, "{time_ms} ms between the events");
    gpu::expect_content(address, &[3_u32])
}

fn other_graphs_node() -> Result {
    gpu::start()?;
    let (affine, address) = (affine()?, gpu::upload(&[1_u32])?);
    let (first, second) = (create()?, create()?);
    let foreign = add_kernel(first, &[], affine, &[address, 1, 1])?;
    let mut node = std::ptr::null_mut();
    gives!(CUDA_ERROR_INVALID_VALUE, cuGraphAddEmptyNode(&raw mut node, second, &raw const foreign, 1));
    Ok(())
}
