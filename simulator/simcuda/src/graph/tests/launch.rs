//! What launches do, and in which order.

use std::ptr::null_mut;

use cuda_abi::sys::CUresult;
use proptest::prelude::*;

use super::super::exec::{order, unfold};
use super::super::graph_by_handle;
use super::{
    INVALID, Log, copy, copy_params, device, empty, fill, fill_params, graph, instantiate, nodes, run,
};
use crate::testing;
use crate::transfer::testing::{Device, Gate, call, pattern, stream};

/// For each node the earlier ones that it comes after.
fn any_dag() -> impl Strategy<Value = Vec<Vec<usize>>> {
    (1..12_usize).prop_flat_map(|count| {
        let node = |place: usize| prop::collection::btree_set(0..place.max(1), 0..=place.min(3));
        (0..count)
            .map(|place| {
                node(place).prop_map(move |after| after.into_iter().filter(|b| *b < place).collect())
            })
            .collect::<Vec<_>>()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn every_node_runs_once_and_after_its_dependencies(dag in any_dag(), seed: u64) {
        let _context = testing::context();
        let (graph, log) = (graph(), Log::default());
        let mut made = Vec::new();
        for (place, after) in dag.iter().enumerate() {
            let after: Vec<_> = after.iter().map(|before| made[*before]).collect();
            made.push(log.node(graph, &after, place));
        }
        let check = |order: &[usize]| {
            let mut sorted = order.to_vec();
            sorted.sort_unstable();
            let is_complete = sorted == (0..dag.len()).collect::<Vec<_>>();
            let place_of = |node: usize| order.iter().position(|other| *other == node);
            is_complete
                && dag.iter().enumerate().all(|(node, after)| {
                    after.iter().all(|before| place_of(*before) < place_of(node))
                })
        };
        run(instantiate(graph));
        prop_assert!(check(&log.all()));

        // With a seed the order is another one, which keeps the dependencies too, and always the same.
        let unfolded = unfold(&graph_by_handle(graph).unwrap()).ok().unwrap();
        let random = order(&unfolded, Some(seed));
        prop_assert!(check(&random));
        prop_assert_eq!(random, order(&unfolded, Some(seed)));
    }
}

#[test]
fn seeds_give_different_orders() {
    let _context = testing::context();
    let graph = graph();
    for _ in 0..10 {
        empty(graph, &[]);
    }
    let unfolded = unfold(&graph_by_handle(graph).unwrap()).ok().unwrap();
    let orders: std::collections::BTreeSet<_> = (0..20).map(|seed| order(&unfolded, Some(seed))).collect();
    assert!(orders.len() > 15, "{orders:?}");
}

#[test]
fn copies_and_fills_run_at_each_launch() {
    let _context = testing::context();
    let (source, target) = (Device::with(&pattern(64, 1)), device(64));
    let graph = graph();
    let first = copy(graph, &[], &copy_params(target.address, source.address, 64));
    fill(graph, &[first], &fill_params(target.address + 60, 7, 4));
    let exec = instantiate(graph);
    assert_eq!(target.read(), [0; 64]);
    for seed in [1, 2] {
        source.write(&pattern(64, seed));
        run(exec);
        let mut model = pattern(64, seed);
        model[60..].fill(7);
        assert_eq!(target.read(), model);
    }
}

#[test]
fn a_child_runs_between_what_is_before_and_after_it() {
    let _context = testing::context();
    let (inner, outer, log) = (graph(), graph(), Log::default());
    let first = log.node(inner, &[], 10);
    log.node(inner, &[first], 11);
    log.node(inner, &[first], 12);
    let before = log.node(outer, &[], 1);
    let mut child = null_mut();
    call!(cuGraphAddChildGraphNode(&raw mut child, outer, &raw const before, 1, inner)).unwrap();
    log.node(outer, &[child], 2);
    // The child was copied: this comes too late.
    log.node(inner, &[], 13);
    run(instantiate(outer));
    assert_eq!(log.all(), [1, 10, 11, 12, 2]);

    // The copy itself can be changed, but not destroyed.
    let mut embedded = null_mut();
    call!(cuGraphChildGraphNodeGetGraph(child, &raw mut embedded)).unwrap();
    assert_eq!(call!(cuGraphDestroy(embedded)), INVALID);
    log.node(embedded, &[nodes(embedded)[2]], 14);
    run(instantiate(outer));
    assert_eq!(log.all()[5..], [1, 10, 11, 12, 14, 2]);

    call!(cuGraphDestroyNode(child)).unwrap();
    let mut count = 0;
    assert_eq!(call!(cuGraphGetNodes(embedded, null_mut(), &raw mut count)), INVALID);
}

#[test]
fn children_can_be_empty_and_nested() {
    let _context = testing::context();
    let (bottom, middle, top, log) = (graph(), graph(), graph(), Log::default());
    let mut child = null_mut();
    let before = log.node(middle, &[], 2);
    call!(cuGraphAddChildGraphNode(&raw mut child, middle, &raw const before, 1, bottom)).unwrap();
    log.node(middle, &[child], 3);
    let before = log.node(top, &[], 1);
    call!(cuGraphAddChildGraphNode(&raw mut child, top, &raw const before, 1, middle)).unwrap();
    log.node(top, &[child], 4);
    run(instantiate(top));
    assert_eq!(log.all(), [1, 2, 3, 4]);
}

#[test]
fn launches_of_one_executable_come_one_after_the_other() {
    let _context = testing::context();
    let (graph, log) = (graph(), Log::default());
    let first = log.node(graph, &[], 1);
    log.node(graph, &[first], 2);
    let exec = instantiate(graph);
    let (one, other) = (stream(), stream());
    let gate = Gate::on(one);
    call!(cuGraphLaunch(exec, one)).unwrap();
    // Its stream is free, but the launch before it is not done.
    call!(cuGraphLaunch(exec, other)).unwrap();
    let separate = stream();
    call!(cuStreamSynchronize(separate)).unwrap();
    assert_eq!(call!(cuStreamQuery(other)), Err(CUresult::CUDA_ERROR_NOT_READY));
    assert_eq!(log.all(), []);
    // What is queued stays as it was, and runs even if the executable is destroyed.
    call!(cuGraphNodeSetEnabled(exec, first, 0)).unwrap_err();
    call!(cuGraphExecDestroy(exec)).unwrap();
    gate.open();
    call!(cuStreamSynchronize(other)).unwrap();
    call!(cuStreamSynchronize(one)).unwrap();
    assert_eq!(log.all(), [1, 2, 1, 2]);
}

#[test]
fn a_disabled_node_does_nothing() {
    let _context = testing::context();
    let target = device(8);
    let (graph, log) = (graph(), Log::default());
    let node = fill(graph, &[], &fill_params(target.address, 9, 8));
    let host = log.node(graph, &[node], 1);
    let exec = instantiate(graph);
    call!(cuGraphNodeSetEnabled(exec, node, 0)).unwrap();
    let mut is_enabled = 9;
    call!(cuGraphNodeGetEnabled(exec, node, &raw mut is_enabled)).unwrap();
    assert_eq!(is_enabled, 0);
    // Host nodes cannot be disabled.
    assert_eq!(call!(cuGraphNodeSetEnabled(exec, host, 0)), INVALID);
    run(exec);
    assert_eq!((target.read(), log.all()), (vec![0; 8], vec![1]));
    call!(cuGraphNodeSetEnabled(exec, node, 1)).unwrap();
    run(exec);
    assert_eq!(target.read(), [9; 8]);
}

#[test]
fn a_node_that_fails_ends_the_launch_and_the_context() {
    let _context = testing::context();
    let (lost, log) = (Device::new(64), Log::default());
    let graph = graph();
    let node = fill(graph, &[], &fill_params(lost.address, 1, 8));
    log.node(graph, &[node], 1);
    let exec = instantiate(graph);
    lost.free();
    let stream = stream();
    call!(cuGraphLaunch(exec, stream)).unwrap();
    let illegal = Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    assert_eq!(call!(cuStreamSynchronize(stream)), illegal);
    assert_eq!(call!(cuGraphLaunch(exec, stream)), illegal);
    assert_eq!(log.all(), []);
}

#[test]
fn events_of_nodes_order_launches_and_streams() {
    let _context = testing::context();
    let mut event = null_mut();
    call!(cuEventCreate(&raw mut event, 2)).unwrap();
    let (graph, log) = (graph(), Log::default());
    let first = log.node(graph, &[], 1);
    let mut node = null_mut();
    call!(cuGraphAddEventRecordNode(&raw mut node, graph, &raw const first, 1, event)).unwrap();
    let exec = instantiate(graph);
    let (one, other) = (stream(), stream());
    let gate = Gate::on(one);
    call!(cuGraphLaunch(exec, one)).unwrap();
    assert_eq!(call!(cuEventQuery(event)), Err(CUresult::CUDA_ERROR_NOT_READY));
    call!(cuStreamWaitEvent(other, event, 0)).unwrap();
    assert_eq!(call!(cuStreamQuery(other)), Err(CUresult::CUDA_ERROR_NOT_READY));
    gate.open();
    call!(cuStreamSynchronize(other)).unwrap();
    assert_eq!(log.all(), [1]);
}

#[test]
fn a_launch_waits_for_the_events_of_its_nodes() {
    let _context = testing::context();
    let mut event = null_mut();
    call!(cuEventCreate(&raw mut event, 2)).unwrap();
    let (graph, log) = (graph(), Log::default());
    let mut node = null_mut();
    call!(cuGraphAddEventWaitNode(&raw mut node, graph, std::ptr::null(), 0, event)).unwrap();
    log.node(graph, &[node], 1);
    let exec = instantiate(graph);
    let (one, other) = (stream(), stream());
    let gate = Gate::on(one);
    call!(cuEventRecord(event, one)).unwrap();
    call!(cuGraphLaunch(exec, other)).unwrap();
    assert_eq!(call!(cuStreamQuery(other)), Err(CUresult::CUDA_ERROR_NOT_READY));
    assert_eq!(log.all(), []);
    gate.open();
    call!(cuStreamSynchronize(other)).unwrap();
    assert_eq!(log.all(), [1]);
}
