//! Changes to executables.

use std::ptr::null_mut;

use cuda_abi::sys::{self, CUgraphExecUpdateResult as UpdateResult, CUresult};
use cuda_abi::types::{CUgraph, CUgraphExec, CUgraphNode};

use super::{
    INVALID, Log, copy, copy_params, device, empty, fill, fill_params, graph, instantiate, nodes, run,
};
use crate::testing;
use crate::transfer::testing::{Device, call, pattern};

/// What an update says: result, node at fault, node that the edge at fault comes from.
fn update(exec: CUgraphExec, graph: CUgraph) -> (UpdateResult, CUgraphNode, CUgraphNode) {
    let mut info = sys::CUgraphExecUpdateResultInfo {
        result: UpdateResult::CU_GRAPH_EXEC_UPDATE_ERROR,
        errorNode: null_mut(),
        errorFromNode: null_mut(),
    };
    let result = call!(cuGraphExecUpdate_v2(exec, graph, &raw mut info));
    let is_success = info.result == UpdateResult::CU_GRAPH_EXEC_UPDATE_SUCCESS;
    assert_eq!(result, if is_success { Ok(()) } else { Err(CUresult::CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE) });
    (info.result, info.errorNode, info.errorFromNode)
}

#[test]
fn an_update_takes_the_parameters_of_a_graph_of_the_same_shape() {
    let _context = testing::context();
    let (source, target) = (Device::with(&pattern(64, 1)), device(64));
    let log = Log::default();
    let make = |from: u64, value, number| {
        let graph = graph();
        let copied = copy(graph, &[], &copy_params(target.address, from, 16));
        let filled = fill(graph, &[copied], &fill_params(target.address + 16, value, 4));
        log.node(graph, &[filled], number);
        graph
    };
    let exec = instantiate(make(source.address, 1, 10));
    run(exec);
    let new = make(source.address + 32, 2, 20);
    assert_eq!(update(exec, new), (UpdateResult::CU_GRAPH_EXEC_UPDATE_SUCCESS, null_mut(), null_mut()));
    run(exec);
    let bytes = target.read();
    assert_eq!(bytes[..16], pattern(64, 1)[32..48]);
    assert_eq!(bytes[16..20], [2; 4]);
    assert_eq!(log.all(), [10, 20]);
    let (mut node, mut reported) = (null_mut(), 99);
    call!(cuGraphExecUpdate(exec, new, &raw mut node, &raw mut reported)).unwrap();
    assert_eq!(reported, UpdateResult::CU_GRAPH_EXEC_UPDATE_SUCCESS as u32);
}

#[test]
fn another_shape_is_refused() {
    let _context = testing::context();
    let base = graph();
    let first = empty(base, &[]);
    let second = empty(base, &[first]);
    empty(base, &[second]);
    let exec = instantiate(base);
    let topology = UpdateResult::CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;

    let longer = graph();
    for _ in 0..4 {
        empty(longer, &[]);
    }
    assert_eq!(update(exec, longer), (topology, null_mut(), null_mut()));

    let more_edges = graph();
    let first = empty(more_edges, &[]);
    let second = empty(more_edges, &[first]);
    let third = empty(more_edges, &[first, second]);
    assert_eq!(update(exec, more_edges), (topology, third, null_mut()));

    let other_edges = graph();
    let first = empty(other_edges, &[]);
    empty(other_edges, &[first]);
    let third = empty(other_edges, &[first]);
    assert_eq!(update(exec, other_edges), (topology, third, first));

    let log = Log::default();
    let other_kinds = graph();
    let first = empty(other_kinds, &[]);
    let second = log.node(other_kinds, &[first], 1);
    empty(other_kinds, &[second]);
    let changed = UpdateResult::CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED;
    assert_eq!(update(exec, other_kinds), (changed, second, null_mut()));
    run(exec);
    assert_eq!(log.all(), []);
    assert_eq!(call!(cuGraphExecUpdate_v2(exec, base, null_mut())), INVALID);
    assert_eq!(call!(cuGraphExecDestroy(exec)), Ok(()));
    let mut info = sys::CUgraphExecUpdateResultInfo {
        result: UpdateResult::CU_GRAPH_EXEC_UPDATE_SUCCESS,
        errorNode: null_mut(),
        errorFromNode: null_mut(),
    };
    assert_eq!(call!(cuGraphExecUpdate_v2(exec, base, &raw mut info)), INVALID);
    assert_eq!(info.result, UpdateResult::CU_GRAPH_EXEC_UPDATE_ERROR);
}

#[test]
fn operands_stay_on_their_devices() {
    let _far = testing::context_on(1);
    let far = device(64);
    let _near = testing::context_on(0);
    let near = device(64);
    let mut host = vec![0_u8; 64];
    let base = graph();
    copy(base, &[], &copy_params(near.address, near.address + 32, 16));
    let exec = instantiate(base);
    let changed = UpdateResult::CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED;

    let to_far = graph();
    let node = copy(to_far, &[], &copy_params(far.address, near.address + 32, 16));
    assert_eq!(update(exec, to_far), (changed, node, null_mut()));

    let to_host = graph();
    let mut params = copy_params(0, near.address + 32, 16);
    params.dstMemoryType = sys::CUmemorytype::CU_MEMORYTYPE_HOST;
    params.dstHost = host.as_mut_ptr().cast();
    let node = copy(to_host, &[], &params);
    assert_eq!(update(exec, to_host), (changed, node, null_mut()));
}

#[test]
fn single_nodes_of_an_executable_are_set() {
    let _context = testing::context();
    let (source, target) = (Device::with(&pattern(64, 1)), device(64));
    let graph = graph();
    let mut params = copy_params(target.address, source.address, 16);
    let copied = copy(graph, &[], &params);
    let mut row = fill_params(target.address + 32, 1, 8);
    let filled = fill(graph, &[copied], &row);
    let exec = instantiate(graph);

    params.srcDevice += 8;
    params.WidthInBytes = 12;
    call!(cuGraphExecMemcpyNodeSetParams(exec, copied, &raw const params, null_mut())).unwrap();
    row.value = 5;
    row.width = 6;
    call!(cuGraphExecMemsetNodeSetParams(exec, filled, &raw const row, null_mut())).unwrap();
    run(exec);
    let mut model = [0; 64];
    model[..12].copy_from_slice(&pattern(64, 1)[8..20]);
    model[32..38].fill(5);
    assert_eq!(target.read(), model);

    // The graph stays as it is.
    let mut reported = copy_params(0, 0, 0);
    call!(cuGraphMemcpyNodeGetParams(copied, &raw mut reported)).unwrap();
    assert_eq!(reported.srcDevice, source.address);

    params.Height = 2;
    params.srcPitch = 16;
    params.dstPitch = 16;
    params.srcHeight = 2;
    params.dstHeight = 2;
    assert_eq!(call!(cuGraphExecMemcpyNodeSetParams(exec, copied, &raw const params, null_mut())), INVALID);
    row.height = 2;
    row.pitch = 8;
    assert_eq!(call!(cuGraphExecMemsetNodeSetParams(exec, filled, &raw const row, null_mut())), INVALID);
    row.width = 0;
    row.height = 1;
    assert_eq!(call!(cuGraphExecMemsetNodeSetParams(exec, filled, &raw const row, null_mut())), INVALID);
    assert_eq!(call!(cuGraphExecMemsetNodeSetParams(exec, copied, &raw const row, null_mut())), INVALID);
    let stranger = fill(super::graph(), &[], &fill_params(target.address, 1, 8));
    row.width = 8;
    assert_eq!(call!(cuGraphExecMemsetNodeSetParams(exec, stranger, &raw const row, null_mut())), INVALID);
}

#[test]
fn a_child_s_nodes_are_set_together_or_one_by_one() {
    let _context = testing::context();
    let log = Log::default();
    let make = |numbers: [usize; 2]| {
        let graph = graph();
        let first = log.node(graph, &[], numbers[0]);
        log.node(graph, &[first], numbers[1]);
        graph
    };
    let outer = graph();
    let before = log.node(outer, &[], 1);
    let mut child = null_mut();
    let inner = make([2, 3]);
    call!(cuGraphAddChildGraphNode(&raw mut child, outer, &raw const before, 1, inner)).unwrap();
    log.node(outer, &[child], 4);
    let exec = instantiate(outer);
    call!(cuGraphExecChildGraphNodeSetParams(exec, child, make([20, 30]))).unwrap();
    run(exec);
    assert_eq!(log.all(), [1, 20, 30, 4]);

    let mut embedded = null_mut();
    call!(cuGraphChildGraphNodeGetGraph(child, &raw mut embedded)).unwrap();
    let params = log.params(31);
    call!(cuGraphExecHostNodeSetParams(exec, nodes(embedded)[1], &raw const params)).unwrap();
    run(exec);
    assert_eq!(log.all()[4..], [1, 20, 31, 4]);

    let flat = graph();
    log.node(flat, &[], 5);
    log.node(flat, &[], 6);
    assert_eq!(call!(cuGraphExecChildGraphNodeSetParams(exec, child, flat)), INVALID);
    assert_eq!(call!(cuGraphExecChildGraphNodeSetParams(exec, before, inner)), INVALID);
}
