//! Graphs that streams capture.

use std::ptr::null_mut;

use cuda_abi::sys::CUgraphNodeType as Kind;

use super::{Log, begin_capture, copy_params, device, graph, instantiate, kind, nodes, run};
use crate::testing;
use crate::transfer::testing::{Device, call, pattern, stream};

#[test]
fn captured_copies_read_the_host_s_memory_at_each_launch() {
    let _context = testing::context();
    let target = device(32);
    let stream = stream();
    let mut source = pattern(32, 1);
    let mut back = vec![0; 32];
    begin_capture(stream);
    call!(cuMemcpyHtoDAsync_v2(target.address, source.as_ptr().cast(), 32, stream)).unwrap();
    call!(cuMemsetD8Async(target.address, 5, 4, stream)).unwrap();
    call!(cuMemcpyDtoHAsync_v2(back.as_mut_ptr().cast(), target.address, 32, stream)).unwrap();
    let mut graph = null_mut();
    call!(cuStreamEndCapture(stream, &raw mut graph)).unwrap();
    assert_eq!(back, [0; 32]);
    let kinds: Vec<u32> = nodes(graph).into_iter().map(kind).collect();
    let (memcpy, memset) = (Kind::CU_GRAPH_NODE_TYPE_MEMCPY as u32, Kind::CU_GRAPH_NODE_TYPE_MEMSET as u32);
    assert_eq!(kinds, [memcpy, memset, memcpy]);

    let exec = instantiate(graph);
    for seed in [2, 3] {
        source.copy_from_slice(&pattern(32, seed));
        run(exec);
        let mut model = pattern(32, seed);
        model[..4].fill(5);
        assert_eq!(back, model);
    }
}

#[test]
fn the_parameters_of_a_captured_copy_make_the_same_copy() {
    let _context = testing::context();
    let (source, target) = (Device::with(&pattern(16, 1)), device(16));
    let stream = stream();
    begin_capture(stream);
    call!(cuMemcpyDtoDAsync_v2(target.address, source.address, 16, stream)).unwrap();
    let mut captured = null_mut();
    call!(cuStreamEndCapture(stream, &raw mut captured)).unwrap();
    let mut params = copy_params(0, 0, 0);
    call!(cuGraphMemcpyNodeGetParams(nodes(captured)[0], &raw mut params)).unwrap();
    let built = graph();
    super::copy(built, &[], &params);
    run(instantiate(built));
    assert_eq!(target.read(), pattern(16, 1));
}

#[test]
fn a_captured_launch_is_a_child() {
    let _context = testing::context();
    let (inner, log) = (graph(), Log::default());
    let first = log.node(inner, &[], 1);
    log.node(inner, &[first], 2);
    let exec = instantiate(inner);
    let stream = stream();
    begin_capture(stream);
    call!(cuGraphLaunch(exec, stream)).unwrap();
    let host = log.params(3);
    call!(cuLaunchHostFunc(stream, host.fn_, host.userData)).unwrap();
    let mut captured = null_mut();
    call!(cuStreamEndCapture(stream, &raw mut captured)).unwrap();
    assert_eq!(kind(nodes(captured)[0]), Kind::CU_GRAPH_NODE_TYPE_GRAPH as u32);
    assert_eq!(log.all(), []);
    // The launch that became a node does not hold up others.
    run(exec);
    run(instantiate(captured));
    assert_eq!(log.all(), [1, 2, 1, 2, 3]);
}

#[test]
fn captured_allocations_are_memory_nodes() {
    let _context = testing::context();
    let stream = stream();
    let target = device(8);
    begin_capture(stream);
    let mut address = 0;
    call!(cuMemAllocAsync(&raw mut address, 8, stream)).unwrap();
    call!(cuMemsetD8Async(address, 3, 8, stream)).unwrap();
    call!(cuMemcpyDtoDAsync_v2(target.address, address, 8, stream)).unwrap();
    call!(cuMemFreeAsync(address, stream)).unwrap();
    let mut graph = null_mut();
    call!(cuStreamEndCapture(stream, &raw mut graph)).unwrap();
    let made = nodes(graph);
    assert_eq!(kind(made[0]), Kind::CU_GRAPH_NODE_TYPE_MEM_ALLOC as u32);
    assert_eq!(kind(made[3]), Kind::CU_GRAPH_NODE_TYPE_MEM_FREE as u32);
    let exec = instantiate(graph);
    run(exec);
    assert_eq!(target.read(), [3; 8]);
    target.write(&[0; 8]);
    run(exec);
    assert_eq!(target.read(), [3; 8]);
}
