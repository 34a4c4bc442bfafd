//! Reading and setting what nodes do.

use std::ptr::null_mut;

use cuda_abi::sys::{self, CUgraphNodeType as Kind, CUresult};
use cuda_abi::types::{CUfunction, CUgraphNode, c_void};

use super::{INVALID, Log, copy, copy_params, device, empty, fill, fill_params, graph, instantiate, run};
use crate::testing;
use crate::transfer::testing::{Device, call, pattern};

const STORE: &std::ffi::CStr = c"
.version 7.0
.target sm_70
.address_size 64
.visible .entry store(.param .u64 address, .param .u32 value)
{
    .reg .u64 %a;
    .reg .u32 %v;
    ld.param.u64 %a, [address];
    ld.param.u32 %v, [value];
    st.global.u32 [%a], %v;
    ret;
}
";

/// A kernel that stores a word.
fn store() -> CUfunction {
    let (mut module, mut function) = (null_mut(), null_mut());
    call!(cuModuleLoadData(&raw mut module, STORE.as_ptr().cast())).unwrap();
    call!(cuModuleGetFunction(&raw mut function, module, c"store".as_ptr())).unwrap();
    function
}

/// Changes the value that the second parameter points to.
fn set(values: [*mut c_void; 2], value: u32) {
    // SAFETY: it points to a word of the test.
    unsafe { values[1].cast::<u32>().write(value) };
}

fn kernel_params(function: CUfunction, values: &mut [*mut c_void; 2]) -> sys::CUDA_KERNEL_NODE_PARAMS {
    sys::CUDA_KERNEL_NODE_PARAMS {
        func: function,
        gridDimX: 1,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: 2,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: 16,
        kernelParams: values.as_mut_ptr(),
        extra: null_mut(),
        kern: null_mut(),
        ctx: null_mut(),
    }
}

#[test]
fn kernel_parameters_are_copied_read_and_set() {
    let context = testing::context();
    let target = device(4);
    let (mut address, mut value) = (target.address, 0x0403_0201_u32);
    let mut values: [*mut c_void; 2] = [(&raw mut address).cast(), (&raw mut value).cast()];
    let (graph, mut node) = (graph(), null_mut());
    let mut params = kernel_params(store(), &mut values);
    call!(cuGraphAddKernelNode_v2(&raw mut node, graph, std::ptr::null(), 0, &raw const params)).unwrap();
    set(values, 0);
    run(instantiate(graph));
    assert_eq!(target.read(), [1, 2, 3, 4]);

    let mut reported = kernel_params(null_mut(), &mut [null_mut(); 2]);
    call!(cuGraphKernelNodeGetParams_v2(node, &raw mut reported)).unwrap();
    assert_eq!((reported.func, reported.blockDimX, reported.sharedMemBytes), (params.func, 2, 16));
    assert_eq!(reported.ctx as usize, context.handle);
    // SAFETY: the node's own array of pointers to its values.
    let reported_value = unsafe { *(*reported.kernelParams.add(1)).cast::<u32>() };
    assert_eq!(reported_value, 0x0403_0201);

    set(values, 0x0807_0605);
    call!(cuGraphKernelNodeSetParams_v2(node, &raw const params)).unwrap();
    let exec = instantiate(graph);
    run(exec);
    assert_eq!(target.read(), [5, 6, 7, 8]);

    set(values, 0x0c0b_0a09);
    call!(cuGraphExecKernelNodeSetParams_v2(exec, node, &raw const params)).unwrap();
    run(exec);
    assert_eq!(target.read(), [9, 10, 11, 12]);

    // The parameters that a node reports make the same node again.
    let (again, mut copied) = (super::graph(), null_mut());
    call!(cuGraphAddKernelNode_v2(&raw mut copied, again, std::ptr::null(), 0, &raw const reported)).unwrap();
    params.gridDimX = 0;
    assert_eq!(call!(cuGraphKernelNodeSetParams_v2(node, &raw const params)), INVALID);
    call!(cuGraphDestroy(graph)).unwrap();
}

#[test]
fn the_structure_of_cuda_11_does_too() {
    let _context = testing::context();
    let target = device(4);
    let (mut address, mut value) = (target.address, 7_u32);
    let mut values: [*mut c_void; 2] = [(&raw mut address).cast(), (&raw mut value).cast()];
    let new = kernel_params(store(), &mut values);
    let old = sys::CUDA_KERNEL_NODE_PARAMS_v1 {
        func: new.func,
        gridDimX: 1,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: 1,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: 0,
        kernelParams: new.kernelParams,
        extra: null_mut(),
    };
    let (graph, mut node) = (graph(), null_mut());
    call!(cuGraphAddKernelNode(&raw mut node, graph, std::ptr::null(), 0, &raw const old)).unwrap();
    let exec = instantiate(graph);
    run(exec);
    assert_eq!(target.read(), [7, 0, 0, 0]);
    set(values, 8);
    call!(cuGraphExecKernelNodeSetParams(exec, node, &raw const old)).unwrap();
    run(exec);
    assert_eq!(target.read(), [8, 0, 0, 0]);
    let mut reported = old;
    call!(cuGraphKernelNodeGetParams(node, &raw mut reported)).unwrap();
    assert_eq!(reported.func, old.func);
}

#[test]
fn copies_and_fills_tell_what_they_were_given() {
    let _context = testing::context();
    let (source, target) = (Device::with(&pattern(64, 1)), device(64));
    let graph = graph();
    let mut given = copy_params(target.address, source.address, 64);
    let node = copy(graph, &[], &given);
    let mut reported = copy_params(0, 0, 0);
    call!(cuGraphMemcpyNodeGetParams(node, &raw mut reported)).unwrap();
    assert_eq!(
        (reported.srcDevice, reported.dstDevice, reported.WidthInBytes),
        (source.address, target.address, 64)
    );
    given.WidthInBytes = 10;
    call!(cuGraphMemcpyNodeSetParams(node, &raw const given)).unwrap();

    let row = fill_params(target.address + 20, 3, 5);
    let filled = fill(graph, &[node], &row);
    let mut reported = fill_params(0, 0, 0);
    call!(cuGraphMemsetNodeGetParams(filled, &raw mut reported)).unwrap();
    assert_eq!(reported, row);
    let wide = sys::CUDA_MEMSET_NODE_PARAMS { elementSize: 2, value: 0x0201, ..row };
    call!(cuGraphMemsetNodeSetParams(filled, &raw const wide)).unwrap();
    run(instantiate(graph));
    let mut model = [0; 64];
    model[..10].copy_from_slice(&pattern(64, 1)[..10]);
    model[20..30].copy_from_slice(&[1, 2, 1, 2, 1, 2, 1, 2, 1, 2]);
    assert_eq!(target.read(), model);

    let bad = sys::CUDA_MEMSET_NODE_PARAMS { elementSize: 3, ..row };
    assert_eq!(call!(cuGraphMemsetNodeSetParams(filled, &raw const bad)), INVALID);
    given.WidthInBytes = 65;
    assert_eq!(call!(cuGraphMemcpyNodeSetParams(node, &raw const given)), INVALID);
}

#[test]
fn a_node_has_the_parameters_of_its_kind_only() {
    let _context = testing::context();
    let graph = graph();
    let node = empty(graph, &[]);
    let (log, target) = (Log::default(), device(8));
    let host = log.node(graph, &[], 1);
    let mut copy = copy_params(target.address, target.address, 4);
    assert_eq!(call!(cuGraphMemcpyNodeGetParams(node, &raw mut copy)), INVALID);
    assert_eq!(call!(cuGraphMemcpyNodeSetParams(host, &raw const copy)), INVALID);
    let mut event = null_mut();
    assert_eq!(call!(cuGraphEventRecordNodeGetEvent(node, &raw mut event)), INVALID);
    let mut params = log.params(2);
    assert_eq!(call!(cuGraphHostNodeSetParams(node, &raw const params)), INVALID);
    call!(cuGraphHostNodeSetParams(host, &raw const params)).unwrap();
    run(instantiate(graph));
    assert_eq!(log.all(), [2]);
    params.fn_ = None;
    assert_eq!(call!(cuGraphHostNodeSetParams(host, &raw const params)), INVALID);
    assert_eq!(call!(cuGraphHostNodeGetParams(host, null_mut())), INVALID);
    call!(cuGraphHostNodeGetParams(host, &raw mut params)).unwrap();
    assert!(params.fn_.is_some());
}

#[test]
fn event_nodes_name_their_events() {
    let _context = testing::context();
    let (mut first, mut second) = (null_mut(), null_mut());
    call!(cuEventCreate(&raw mut first, 0)).unwrap();
    call!(cuEventCreate(&raw mut second, 0)).unwrap();
    let (graph, mut node, mut reported) = (graph(), null_mut(), null_mut());
    call!(cuGraphAddEventRecordNode(&raw mut node, graph, std::ptr::null(), 0, first)).unwrap();
    call!(cuGraphEventRecordNodeSetEvent(node, second)).unwrap();
    call!(cuGraphEventRecordNodeGetEvent(node, &raw mut reported)).unwrap();
    assert_eq!(reported, second);
    let exec = instantiate(graph);
    call!(cuGraphExecEventRecordNodeSetEvent(exec, node, first)).unwrap();
    assert_eq!(call!(cuGraphExecEventWaitNodeSetEvent(exec, node, first)), INVALID);
    call!(cuGraphAddEventWaitNode(&raw mut node, graph, std::ptr::null(), 0, first)).unwrap();
    call!(cuGraphEventWaitNodeSetEvent(node, second)).unwrap();
    call!(cuGraphEventWaitNodeGetEvent(node, &raw mut reported)).unwrap();
    assert_eq!(reported, second);
    let stale = call!(cuGraphAddEventWaitNode(&raw mut node, graph, std::ptr::null(), 0, null_mut()));
    assert_eq!(stale, Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
}

/// `CUgraphNodeParams` of a kind, with nothing in them.
fn blank(kind: Kind) -> sys::CUgraphNodeParams {
    type Union = sys::CUgraphNodeParams_st__bindgen_ty_1;
    let union = Union { asBytes: [0; size_of::<Union>()] };
    sys::CUgraphNodeParams { type_: kind, reserved0: [0; 3], __bindgen_anon_1: union, reserved2: 0 }
}

fn add(
    graph: cuda_abi::types::CUgraph,
    params: &mut sys::CUgraphNodeParams,
) -> crate::error::Result<CUgraphNode> {
    let mut node = null_mut();
    call!(cuGraphAddNode_v2(&raw mut node, graph, std::ptr::null(), std::ptr::null(), 0, params))
        .map(|()| node)
}

#[test]
fn one_call_makes_and_changes_nodes_of_any_kind() {
    let context = testing::context();
    let (source, target) = (Device::with(&pattern(64, 1)), device(64));
    let graph = graph();
    let mut params = blank(Kind::CU_GRAPH_NODE_TYPE_MEMCPY);
    params.__bindgen_anon_1.memcpy.copyParams = copy_params(target.address, source.address, 32);
    let copied = add(graph, &mut params).unwrap();
    let mut reported = blank(Kind::CU_GRAPH_NODE_TYPE_EMPTY);
    call!(cuGraphNodeGetParams(copied, &raw mut reported)).unwrap();
    assert_eq!(reported.type_, Kind::CU_GRAPH_NODE_TYPE_MEMCPY);
    // SAFETY: the member that the kind names.
    let member = unsafe { reported.__bindgen_anon_1.memcpy };
    assert_eq!((member.copyCtx as usize, member.copyParams.dstDevice), (context.handle, target.address));

    let mut params = blank(Kind::CU_GRAPH_NODE_TYPE_MEMSET);
    params.__bindgen_anon_1.memset = sys::CUDA_MEMSET_NODE_PARAMS_v2 {
        dst: target.address + 40,
        pitch: 0,
        value: 6,
        elementSize: 1,
        width: 8,
        height: 1,
        ctx: context.handle as _,
    };
    let filled = add(graph, &mut params).unwrap();
    params.__bindgen_anon_1.memset.value = 9;
    call!(cuGraphNodeSetParams(filled, &raw mut params)).unwrap();
    assert_eq!(call!(cuGraphNodeSetParams(copied, &raw mut params)), INVALID);
    let exec = instantiate(graph);
    run(exec);
    let mut model = [0; 64];
    model[..32].copy_from_slice(&pattern(64, 1)[..32]);
    model[40..48].fill(9);
    assert_eq!(target.read(), model);
    params.__bindgen_anon_1.memset.value = 4;
    call!(cuGraphExecNodeSetParams(exec, filled, &raw mut params)).unwrap();
    run(exec);
    assert_eq!(target.read()[40..48], [4; 8]);

    let mut event = null_mut();
    call!(cuEventCreate(&raw mut event, 0)).unwrap();
    let mut params = blank(Kind::CU_GRAPH_NODE_TYPE_WAIT_EVENT);
    params.__bindgen_anon_1.eventWait.event = event;
    let waits = add(graph, &mut params).unwrap();
    call!(cuGraphNodeGetParams(waits, &raw mut reported)).unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { reported.__bindgen_anon_1.eventWait.event }, event);
}

#[test]
fn memory_and_child_nodes_too() {
    let _context = testing::context();
    let (outer, inner) = (graph(), graph());
    let mut params = blank(Kind::CU_GRAPH_NODE_TYPE_MEM_ALLOC);
    let pool = &raw mut params.__bindgen_anon_1;
    // SAFETY: the member that the kind names.
    let alloc = unsafe { &mut (*pool).alloc };
    alloc.poolProps.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    alloc.poolProps.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    alloc.bytesize = 50;
    let node = add(outer, &mut params).unwrap();
    // SAFETY: as above.
    let address = unsafe { params.__bindgen_anon_1.alloc.dptr };
    assert_ne!(address, 0);
    assert_eq!(call!(cuGraphNodeSetParams(node, &raw mut params)), Err(CUresult::CUDA_ERROR_NOT_SUPPORTED));
    let mut params = blank(Kind::CU_GRAPH_NODE_TYPE_MEM_FREE);
    params.__bindgen_anon_1.free.dptr = address;
    add(outer, &mut params).unwrap();

    let log = Log::default();
    log.node(inner, &[], 5);
    let holder = graph();
    let mut params = blank(Kind::CU_GRAPH_NODE_TYPE_GRAPH);
    params.__bindgen_anon_1.graph.graph = inner;
    add(holder, &mut params).unwrap();
    run(instantiate(holder));
    assert_eq!(log.all(), [5]);
    params.__bindgen_anon_1.graph.ownership =
        sys::CUgraphChildGraphNodeOwnership::CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE;
    assert_eq!(add(holder, &mut params), Err(CUresult::CUDA_ERROR_NOT_SUPPORTED));
}

#[test]
fn bytes_that_mean_nothing_must_be_zero() {
    let _context = testing::context();
    let graph = graph();
    let mut params = blank(Kind::CU_GRAPH_NODE_TYPE_EMPTY);
    add(graph, &mut params).unwrap();
    params.reserved2 = 1;
    assert_eq!(add(graph, &mut params), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    params = blank(Kind::CU_GRAPH_NODE_TYPE_EMPTY);
    params.__bindgen_anon_1.free.dptr = 1;
    assert_eq!(add(graph, &mut params), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    let mut conditional = blank(Kind::CU_GRAPH_NODE_TYPE_CONDITIONAL);
    assert_eq!(add(graph, &mut conditional), Err(CUresult::CUDA_ERROR_NOT_SUPPORTED));
    let mut unknown = std::mem::MaybeUninit::new(blank(Kind::CU_GRAPH_NODE_TYPE_EMPTY));
    // SAFETY: the kind is the structure's first field; it is passed on as bytes only.
    unsafe { unknown.as_mut_ptr().cast::<u32>().write(77) };
    let mut node = null_mut();
    assert_eq!(
        call!(cuGraphAddNode(&raw mut node, graph, std::ptr::null(), 0, unknown.as_mut_ptr())),
        INVALID
    );
}

#[test]
fn memory_operations_are_nodes() {
    let _context = testing::context();
    let target = device(8);
    let mut params = std::mem::MaybeUninit::<sys::CUstreamBatchMemOpParams>::zeroed();
    let fields = params.as_mut_ptr().cast::<u32>();
    // SAFETY: the operation is the first field of the zeroed structure.
    unsafe { fields.write(sys::CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_32 as u32) };
    // SAFETY: zeroed, which every member of the union allows but for the operation, which is set.
    let mut array = [unsafe { params.assume_init() }];
    array[0].writeValue.address = target.address + 4;
    array[0].writeValue.__bindgen_anon_1.value = 0x0403_0201;
    let mut given = sys::CUDA_BATCH_MEM_OP_NODE_PARAMS {
        ctx: null_mut(),
        count: 1,
        paramArray: array.as_mut_ptr(),
        flags: 0,
    };
    let (graph, mut node) = (graph(), null_mut());
    call!(cuGraphAddBatchMemOpNode(&raw mut node, graph, std::ptr::null(), 0, &raw const given)).unwrap();
    let exec = instantiate(graph);
    run(exec);
    assert_eq!(target.read(), [0, 0, 0, 0, 1, 2, 3, 4]);
    // SAFETY: the structure's array is this test's.
    unsafe { (*given.paramArray).writeValue.__bindgen_anon_1.value = 1 };
    call!(cuGraphExecBatchMemOpNodeSetParams(exec, node, &raw const given)).unwrap();
    run(exec);
    assert_eq!(target.read(), [0, 0, 0, 0, 1, 0, 0, 0]);
    given.paramArray = null_mut();
    let mut reported = given;
    call!(cuGraphBatchMemOpNodeGetParams(node, &raw mut reported)).unwrap();
    assert_eq!(reported.count, 1);
    // SAFETY: the node's own array.
    assert_eq!(unsafe { (*reported.paramArray).writeValue.address }, target.address + 4);
    assert_eq!(call!(cuGraphBatchMemOpNodeSetParams(node, &raw const given)), INVALID);
}
