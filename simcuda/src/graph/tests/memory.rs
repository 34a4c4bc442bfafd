//! Allocation and free nodes.

use std::ptr::null_mut;

use cuda_abi::sys::{self, CUgraphMem_attribute as Attribute, CUresult};
use cuda_abi::types::{CUgraph, CUgraphNode};

use super::{
    INVALID, copy, copy_params, device, fill, fill_params, graph, instantiate, run, try_instantiate,
};
use crate::error::Result;
use crate::testing;
use crate::transfer::testing::call;

const AUTO_FREE: u64 = 1;

fn params(size_bytes: usize) -> sys::CUDA_MEM_ALLOC_NODE_PARAMS {
    sys::CUDA_MEM_ALLOC_NODE_PARAMS {
        poolProps: sys::CUmemPoolProps {
            allocType: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            handleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
            location: sys::CUmemLocation {
                type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
                __bindgen_anon_1: sys::CUmemLocation_st__bindgen_ty_1 { id: 0 },
            },
            win32SecurityAttributes: null_mut(),
            maxSize: 0,
            usage: 0,
            gpuDirectRDMACapable: 0,
            reserved: [0; 53],
        },
        accessDescs: std::ptr::null(),
        accessDescCount: 0,
        bytesize: size_bytes,
        dptr: 0,
    }
}

fn allocate(graph: CUgraph, size_bytes: usize) -> (CUgraphNode, u64) {
    let (mut node, mut params) = (null_mut(), params(size_bytes));
    call!(cuGraphAddMemAllocNode(&raw mut node, graph, std::ptr::null(), 0, &raw mut params)).unwrap();
    (node, params.dptr)
}

fn free(graph: CUgraph, after: CUgraphNode, address: u64) -> Result<CUgraphNode> {
    let mut node = null_mut();
    call!(cuGraphAddMemFreeNode(&raw mut node, graph, &raw const after, 1, address)).map(|()| node)
}

#[test]
fn memory_is_there_between_its_nodes_at_each_launch() {
    let _context = testing::context();
    let target = device(100);
    let graph = graph();
    let (node, address) = allocate(graph, 100);
    let filled = fill(graph, &[node], &fill_params(address, 4, 100));
    let copied = copy(graph, &[filled], &copy_params(target.address, address, 100));
    let freed = free(graph, copied, address).unwrap();
    let mut told = params(0);
    call!(cuGraphMemAllocNodeGetParams(node, &raw mut told)).unwrap();
    assert_eq!((told.dptr, told.bytesize), (address, 100));
    let mut freed_address = 0;
    call!(cuGraphMemFreeNodeGetParams(freed, &raw mut freed_address)).unwrap();
    assert_eq!(freed_address, address);

    let exec = instantiate(graph);
    for _ in 0..3 {
        target.write(&[0; 100]);
        run(exec);
        assert_eq!(target.read(), [4; 100]);
        assert!(crate::memory::span(address, 0).is_none());
    }
}

#[test]
fn what_memory_nodes_do_not_allow() {
    let _context = testing::context();
    let (graph, other) = (graph(), graph());
    let (node, address) = allocate(graph, 100);
    let freed = free(graph, node, address).unwrap();
    assert_eq!(free(graph, node, address), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    let own = device(8);
    assert_eq!(free(graph, node, own.address), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    let stranger = super::empty(other, &[]);
    assert_eq!(free(other, stranger, address), Err(CUresult::CUDA_ERROR_INVALID_VALUE));

    let mut out = null_mut();
    assert_eq!(call!(cuGraphClone(&raw mut out, graph)), INVALID);
    assert_eq!(call!(cuGraphDestroyNode(freed)), INVALID);
    assert_eq!(call!(cuGraphRemoveDependencies(graph, &raw const node, &raw const freed, 1)), INVALID);
    let mut child = null_mut();
    assert_eq!(call!(cuGraphAddChildGraphNode(&raw mut child, other, std::ptr::null(), 0, graph)), INVALID);

    let exec = instantiate(graph);
    assert_eq!(try_instantiate(graph), INVALID);
    call!(cuGraphExecDestroy(exec)).unwrap();
    assert_eq!(try_instantiate(graph), Ok(()));

    let mut empty = params(0);
    assert_eq!(
        call!(cuGraphAddMemAllocNode(&raw mut child, other, std::ptr::null(), 0, &raw mut empty)),
        INVALID
    );
    let mut far = params(8);
    far.poolProps.location.__bindgen_anon_1.id = 9;
    let no_device = call!(cuGraphAddMemAllocNode(&raw mut child, other, std::ptr::null(), 0, &raw mut far));
    assert_eq!(no_device, Err(CUresult::CUDA_ERROR_INVALID_DEVICE));
}

#[test]
fn memory_that_is_left_must_be_freed_before_the_next_launch() {
    let _context = testing::context();
    let graph = graph();
    let (node, address) = allocate(graph, 100);
    fill(graph, &[node], &fill_params(address, 6, 100));
    let exec = instantiate(graph);
    run(exec);
    let mut bytes = [0_u8; 100];
    call!(cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), address, 100)).unwrap();
    assert_eq!(bytes, [6; 100]);
    assert_eq!(call!(cuGraphLaunch(exec, null_mut())), INVALID);
    call!(cuMemFreeAsync(address, null_mut())).unwrap();
    run(exec);
    call!(cuMemFree_v2(address)).unwrap();
    let lost = Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    assert_eq!(call!(cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), address, 100)), lost);
}

#[test]
fn another_graph_can_free_what_was_left() {
    let _context = testing::context();
    let (maker, taker) = (graph(), graph());
    let (_, address) = allocate(maker, 100);
    let start = super::empty(taker, &[]);
    free(taker, start, address).unwrap();
    let (make, take) = (instantiate(maker), instantiate(taker));
    // There is nothing to free yet.
    assert_eq!(call!(cuGraphLaunch(take, null_mut())), INVALID);
    for _ in 0..2 {
        call!(cuGraphLaunch(make, null_mut())).unwrap();
        call!(cuGraphLaunch(take, null_mut())).unwrap();
    }
    call!(cuStreamSynchronize(null_mut())).unwrap();
    assert!(crate::memory::span(address, 0).is_none());
}

#[test]
fn memory_can_be_freed_by_the_next_launch() {
    let _context = testing::context();
    let graph = graph();
    let (node, address) = allocate(graph, 100);
    fill(graph, &[node], &fill_params(address, 6, 100));
    let mut exec = null_mut();
    call!(cuGraphInstantiateWithFlags(&raw mut exec, graph, AUTO_FREE)).unwrap();
    run(exec);
    run(exec);
    assert!(crate::memory::span(address, 0).is_some());
}

fn attribute(which: Attribute) -> u64 {
    let mut value = 0_u64;
    // On device 1, of which no other test allocates in graphs.
    call!(cuDeviceGetGraphMemAttribute(1, which as u32, (&raw mut value).cast())).unwrap();
    value
}

#[test]
fn the_device_s_share_is_told() {
    let _context = testing::context_on(1);
    let graph = graph();
    let (mut node, mut params) = (null_mut(), params(1000));
    params.poolProps.location.__bindgen_anon_1.id = 1;
    call!(cuGraphAddMemAllocNode(&raw mut node, graph, std::ptr::null(), 0, &raw mut params)).unwrap();
    assert_eq!(attribute(Attribute::CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT), 0);
    let exec = instantiate(graph);
    run(exec);
    assert_eq!(attribute(Attribute::CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT), 1000);
    assert_eq!(attribute(Attribute::CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT), 1000);
    call!(cuMemFree_v2(params.dptr)).unwrap();
    assert_eq!(attribute(Attribute::CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT), 0);
    assert_eq!(attribute(Attribute::CU_GRAPH_MEM_ATTR_USED_MEM_HIGH), 1000);
    let (mut zero, mut one) = (0_u64, 1_u64);
    let high = Attribute::CU_GRAPH_MEM_ATTR_USED_MEM_HIGH as u32;
    assert_eq!(call!(cuDeviceSetGraphMemAttribute(1, high, (&raw mut one).cast())), INVALID);
    call!(cuDeviceSetGraphMemAttribute(1, high, (&raw mut zero).cast())).unwrap();
    assert_eq!(attribute(Attribute::CU_GRAPH_MEM_ATTR_USED_MEM_HIGH), 0);
    call!(cuGraphExecDestroy(exec)).unwrap();
    call!(cuGraphDestroy(graph)).unwrap();
    assert_eq!(attribute(Attribute::CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT), 0);
    assert_eq!(call!(cuDeviceGraphMemTrim(1)), Ok(()));
    assert_eq!(call!(cuDeviceGraphMemTrim(5)), Err(CUresult::CUDA_ERROR_INVALID_DEVICE));
}
