//! Making graphs and asking about them.

use std::ptr::null_mut;

use cuda_abi::sys::{self, CUgraphInstantiateResult, CUresult};

use super::{INVALID, Log, empty, graph, instantiate, kind, nodes, run, try_instantiate};
use crate::testing;
use crate::transfer::testing::call;

#[test]
fn nodes_and_edges_are_as_they_were_added() {
    let _context = testing::context();
    let graph = graph();
    let first = empty(graph, &[]);
    let second = empty(graph, &[first]);
    let third = empty(graph, &[first, second]);
    assert_eq!(nodes(graph), [first, second, third]);
    assert_eq!(kind(third), sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY as u32);

    let mut count = 5;
    let (mut from, mut to) = ([graph.cast(); 5], [graph.cast(); 5]);
    call!(cuGraphGetEdges(graph, from.as_mut_ptr(), to.as_mut_ptr(), &raw mut count)).unwrap();
    assert_eq!(count, 3);
    // What is not used of the arrays is NULL.
    assert_eq!(from, [first, first, second, null_mut(), null_mut()]);
    assert_eq!(to, [second, third, third, null_mut(), null_mut()]);

    let mut roots = [null_mut(); 1];
    count = 1;
    call!(cuGraphGetRootNodes(graph, roots.as_mut_ptr(), &raw mut count)).unwrap();
    assert_eq!((count, roots), (1, [first]));

    // A short array gets what fits.
    count = 1;
    call!(cuGraphNodeGetDependencies(third, roots.as_mut_ptr(), &raw mut count)).unwrap();
    assert_eq!((count, roots), (1, [first]));
    let mut later = [null_mut(); 2];
    count = 2;
    call!(cuGraphNodeGetDependentNodes(first, later.as_mut_ptr(), &raw mut count)).unwrap();
    assert_eq!((count, later), (2, [second, third]));
    count = 77;
    call!(cuGraphNodeGetDependentNodes(third, null_mut(), &raw mut count)).unwrap();
    assert_eq!(count, 0);
}

#[test]
fn what_is_no_dependency_is_refused() {
    let _context = testing::context();
    let (one, other) = (graph(), graph());
    let (first, foreign) = (empty(one, &[]), empty(other, &[]));
    let second = empty(one, &[first]);
    let mut node = null_mut();
    let mut add = |after: &[_]| call!(cuGraphAddEmptyNode(&raw mut node, one, after.as_ptr(), after.len()));
    assert_eq!(add(&[foreign]), INVALID);
    assert_eq!(add(&[null_mut()]), INVALID);
    assert_eq!(add(&[first, first]), INVALID);
    assert_eq!(call!(cuGraphAddEmptyNode(null_mut(), one, std::ptr::null(), 0)), INVALID);
    assert_eq!(call!(cuGraphAddEmptyNode(&raw mut node, one, std::ptr::null(), 1)), INVALID);
    assert_eq!(call!(cuGraphAddEmptyNode(&raw mut node, null_mut(), std::ptr::null(), 0)), INVALID);

    let link = |from, to| call!(cuGraphAddDependencies(one, &raw const from, &raw const to, 1));
    assert_eq!(link(first, second), INVALID);
    assert_eq!(link(first, first), INVALID);
    assert_eq!(link(first, foreign), INVALID);
    let unlink = |from, to| call!(cuGraphRemoveDependencies(one, &raw const from, &raw const to, 1));
    assert_eq!(unlink(second, first), INVALID);
    assert_eq!(unlink(first, second), Ok(()));
    assert_eq!(unlink(first, second), INVALID);
    assert_eq!(link(second, first), Ok(()));
    assert_eq!(nodes(one).len(), 2);
}

#[test]
fn edges_are_changed_all_or_none() {
    let _context = testing::context();
    let graph = graph();
    let (first, second, third) = (empty(graph, &[]), empty(graph, &[]), empty(graph, &[]));
    let (from, to) = ([first, second], [second, second]);
    assert_eq!(call!(cuGraphAddDependencies(graph, from.as_ptr(), to.as_ptr(), 2)), INVALID);
    let mut count = 9;
    call!(cuGraphGetEdges(graph, null_mut(), null_mut(), &raw mut count)).unwrap();
    assert_eq!(count, 0);
    let (from, to) = ([first, second], [second, third]);
    call!(cuGraphAddDependencies(graph, from.as_ptr(), to.as_ptr(), 2)).unwrap();
    call!(cuGraphGetEdges(graph, null_mut(), null_mut(), &raw mut count)).unwrap();
    assert_eq!(count, 2);
}

#[test]
fn a_cycle_cannot_be_instantiated() {
    let _context = testing::context();
    let graph = graph();
    let free = empty(graph, &[]);
    let first = empty(graph, &[free]);
    let second = empty(graph, &[first]);
    call!(cuGraphAddDependencies(graph, &raw const second, &raw const first, 1)).unwrap();
    assert_eq!(try_instantiate(graph), INVALID);

    let mut exec = null_mut();
    let mut params = sys::CUDA_GRAPH_INSTANTIATE_PARAMS {
        flags: 0,
        hUploadStream: null_mut(),
        hErrNode_out: null_mut(),
        result_out: CUgraphInstantiateResult::CUDA_GRAPH_INSTANTIATE_SUCCESS,
    };
    assert_eq!(call!(cuGraphInstantiateWithParams(&raw mut exec, graph, &raw mut params)), INVALID);
    assert_eq!(params.result_out, CUgraphInstantiateResult::CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE);
    assert!([first, second].contains(&params.hErrNode_out));

    let (mut node, mut log) = (null_mut(), [1_i8; 12]);
    let reported =
        call!(cuGraphInstantiate_v2(&raw mut exec, graph, &raw mut node, log.as_mut_ptr(), log.len()));
    assert_eq!(reported, INVALID);
    assert!([first, second].contains(&node));
    assert_eq!((log[0], log[11]), (b't' as i8, 0));

    call!(cuGraphRemoveDependencies(graph, &raw const second, &raw const first, 1)).unwrap();
    call!(cuGraphInstantiateWithParams(&raw mut exec, graph, &raw mut params)).unwrap();
    assert_eq!(params.result_out, CUgraphInstantiateResult::CUDA_GRAPH_INSTANTIATE_SUCCESS);
    assert!(params.hErrNode_out.is_null());
}

#[test]
fn flags_are_checked() {
    let _context = testing::context();
    let (graph, mut exec, mut flags) = (graph(), null_mut(), 99);
    assert_eq!(call!(cuGraphInstantiateWithFlags(&raw mut exec, graph, 16)), INVALID);
    // Only the call with parameters uploads.
    assert_eq!(call!(cuGraphInstantiateWithFlags(&raw mut exec, graph, 2)), INVALID);
    let by_device = call!(cuGraphInstantiateWithFlags(&raw mut exec, graph, 4));
    assert_eq!(by_device, Err(CUresult::CUDA_ERROR_NOT_SUPPORTED));
    call!(cuGraphInstantiateWithFlags(&raw mut exec, graph, 9)).unwrap();
    call!(cuGraphExecGetFlags(exec, &raw mut flags)).unwrap();
    assert_eq!(flags, 9);
    assert_eq!(call!(cuGraphCreate(null_mut(), 0)), INVALID);
    let mut other = null_mut();
    assert_eq!(call!(cuGraphCreate(&raw mut other, 1)), INVALID);
}

#[test]
fn what_is_destroyed_is_gone() {
    let _context = testing::context();
    let graph = graph();
    let first = empty(graph, &[]);
    let second = empty(graph, &[first]);
    call!(cuGraphDestroyNode(first)).unwrap();
    assert_eq!(call!(cuGraphDestroyNode(first)), INVALID);
    assert_eq!(nodes(graph), [second]);
    let mut count = 9;
    call!(cuGraphNodeGetDependencies(second, null_mut(), &raw mut count)).unwrap();
    assert_eq!(count, 0);

    let exec = instantiate(graph);
    call!(cuGraphDestroy(graph)).unwrap();
    let mut kind = 0;
    assert_eq!(call!(cuGraphDestroy(graph)), INVALID);
    assert_eq!(call!(cuGraphNodeGetType(second, &raw mut kind)), INVALID);
    assert_eq!(try_instantiate(graph), INVALID);
    run(exec);
    call!(cuGraphExecDestroy(exec)).unwrap();
    assert_eq!(call!(cuGraphExecDestroy(exec)), INVALID);
    assert_eq!(call!(cuGraphLaunch(exec, null_mut())), INVALID);
}

#[test]
fn a_clone_has_nodes_of_its_own() {
    let _context = testing::context();
    let (graph, log) = (graph(), Log::default());
    let first = log.node(graph, &[], 1);
    let second = log.node(graph, &[first], 2);
    let mut clone = null_mut();
    call!(cuGraphClone(&raw mut clone, graph)).unwrap();
    let mut found = null_mut();
    call!(cuGraphNodeFindInClone(&raw mut found, second, clone)).unwrap();
    assert_eq!(found, nodes(clone)[1]);
    assert_eq!(call!(cuGraphNodeFindInClone(&raw mut found, second, graph)), INVALID);

    call!(cuGraphDestroy(graph)).unwrap();
    run(instantiate(clone));
    assert_eq!(log.all(), [1, 2]);

    let mut containing = null_mut();
    call!(cuGraphNodeGetContainingGraph(found, &raw mut containing)).unwrap();
    assert_eq!(containing, clone);
}

#[test]
fn edges_that_say_something_are_not_dropped_silently() {
    let _context = testing::context();
    let graph = graph();
    let (first, second) = (empty(graph, &[]), empty(graph, &[]));
    let data =
        |from_port, to_port, type_| sys::CUgraphEdgeData { from_port, to_port, type_, reserved: [0; 5] };
    let link = |data: sys::CUgraphEdgeData| {
        call!(cuGraphAddDependencies_v2(graph, &raw const first, &raw const second, &raw const data, 1))
    };
    // Only kernels have ports.
    assert_eq!(link(data(1, 0, 1)), INVALID);
    assert_eq!(link(data(0, 1, 0)), INVALID);
    assert_eq!(link(data(0, 0, 9)), INVALID);
    assert_eq!(link(data(0, 0, 0)), Ok(()));
}

#[test]
fn a_dot_file_names_all_nodes_and_edges() {
    let _context = testing::context();
    let (outer, inner, log) = (graph(), graph(), Log::default());
    let graph = outer;
    let first = log.node(graph, &[], 1);
    empty(inner, &[]);
    let mut child = null_mut();
    call!(cuGraphAddChildGraphNode(&raw mut child, graph, &raw const first, 1, inner)).unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = std::ffi::CString::new(file.path().to_str().unwrap()).unwrap();
    call!(cuGraphDebugDotPrint(graph, path.as_ptr(), 0)).unwrap();
    let text = std::fs::read_to_string(file.path()).unwrap();
    let mut id = 0;
    call!(cuGraphGetId(graph, &raw mut id)).unwrap();
    assert!(text.contains(&format!("\"graph_{id}_node_0\" -> \"graph_{id}_node_1\";")), "{text}");
    assert!(text.contains("0 HOST") && text.contains("1 GRAPH") && text.contains("0 EMPTY"), "{text}");
    let nowhere = c"/nonexistent/graph.dot".as_ptr();
    assert_eq!(call!(cuGraphDebugDotPrint(graph, nowhere, 0)), Err(CUresult::CUDA_ERROR_OPERATING_SYSTEM));
    assert_eq!(call!(cuGraphDebugDotPrint(graph, path.as_ptr(), 1 << 30)), INVALID);
}
