//! Allocation and free nodes.

use std::ptr::null_mut;

use cuda_abi::sys::{self, CUgraphMem_attribute as Attribute, CUresult};
use cuda_abi::types::{CUgraph, CUgraphNode, CUmemoryPool};

use super::{
    INVALID, begin_capture, copy, copy_params, device, fill, fill_params, graph, instantiate, run,
    try_instantiate,
};
use crate::error::Result;
use crate::testing;
use crate::transfer::testing::{Gate, call, stream};

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
    let mut reported = params(0);
    call!(cuGraphMemAllocNodeGetParams(node, &raw mut reported)).unwrap();
    assert_eq!((reported.dptr, reported.bytesize), (address, 100));
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
fn a_launch_and_a_free_can_be_queued_without_waiting() {
    let _context = testing::context();
    let stream = stream();
    let (maker, target) = (graph(), device(100));
    let (node, address) = allocate(maker, 100);
    let filled = fill(maker, &[node], &fill_params(address, 7, 100));
    copy(maker, &[filled], &copy_params(target.address, address, 100));
    let exec = instantiate(maker);
    assert_eq!(call!(cuMemFreeAsync(address, stream)), INVALID, "no launch has left it");
    assert_eq!(call!(cuMemFree_v2(address)), INVALID);
    let gate = Gate::on(stream);
    for _ in 0..5 {
        call!(cuGraphLaunch(exec, stream)).unwrap();
        assert_eq!(call!(cuGraphLaunch(exec, stream)), INVALID, "the memory is left");
        call!(cuMemFreeAsync(address, stream)).unwrap();
        assert_eq!(call!(cuMemFreeAsync(address, stream)), INVALID, "it is freed already");
    }
    gate.open();
    call!(cuStreamSynchronize(stream)).unwrap();
    assert_eq!(target.read(), [7; 100]);
    assert!(crate::memory::span(address, 0).is_none());
}

/// A pool that is the current one of its device as long as this lives.
struct OwnPool(CUmemoryPool);

impl OwnPool {
    fn on(device: i32) -> Self {
        let (mut pool, properties) = (null_mut(), params(1).poolProps);
        call!(cuMemPoolCreate(&raw mut pool, &raw const properties)).unwrap();
        call!(cuDeviceSetMemPool(device, pool)).unwrap();
        Self(pool)
    }

    /// What is in use, graphs' memory included.
    fn used_bytes(&self) -> u64 {
        let mut bytes = 0_u64;
        call!(cuMemPoolGetAttribute(self.0, 7, (&raw mut bytes).cast())).unwrap();
        bytes
    }
}

impl Drop for OwnPool {
    fn drop(&mut self) {
        call!(cuMemPoolDestroy(self.0)).unwrap();
    }
}

#[test]
fn what_was_left_outlives_its_graph_and_goes_back_to_the_pool() {
    // The device's current pool is everybody's: alone in a process.
    if !testing::is_own_process(
        "graph::tests::memory::what_was_left_outlives_its_graph_and_goes_back_to_the_pool",
        &[],
    ) {
        return;
    }
    let _context = testing::context();
    let pool = OwnPool::on(0);
    // The program frees it after its graph is destroyed, and before that, at a point not reached yet.
    for (frees_before, frees_in_order) in [(false, true), (false, false), (true, true)] {
        let stream = stream();
        let maker = graph();
        let (node, address) = allocate(maker, 100);
        fill(maker, &[node], &fill_params(address, 3, 100));
        let exec = instantiate(maker);
        assert_eq!(pool.used_bytes(), 512);
        let gate = Gate::on(stream);
        call!(cuGraphLaunch(exec, stream)).unwrap();
        if frees_before {
            call!(cuMemFreeAsync(address, stream)).unwrap();
        }
        call!(cuGraphExecDestroy(exec)).unwrap();
        call!(cuGraphDestroy(maker)).unwrap();
        gate.open();
        call!(cuStreamSynchronize(stream)).unwrap();
        if !frees_before {
            assert_eq!(pool.used_bytes(), 512);
            let mut bytes = [0_u8; 100];
            call!(cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), address, 100)).unwrap();
            assert_eq!(bytes, [3; 100]);
            if frees_in_order {
                call!(cuMemFreeAsync(address, stream)).unwrap();
                call!(cuStreamSynchronize(stream)).unwrap();
            } else {
                call!(cuMemFree_v2(address)).unwrap();
            }
        }
        assert_eq!(pool.used_bytes(), 0);
        assert_eq!(call!(cuMemFree_v2(address)), INVALID);
        assert_eq!(call!(cuMemsetD8_v2(address, 0, 1)), INVALID);
    }
}

#[test]
fn a_graph_that_never_ran_gives_its_memory_back() {
    if !testing::is_own_process("graph::tests::memory::a_graph_that_never_ran_gives_its_memory_back", &[]) {
        return;
    }
    let _context = testing::context();
    let pool = OwnPool::on(0);
    let maker = graph();
    allocate(maker, 100);
    assert_eq!(pool.used_bytes(), 512);
    call!(cuGraphDestroy(maker)).unwrap();
    assert_eq!(pool.used_bytes(), 0);
}

#[test]
fn a_captured_free_frees_nothing_until_its_graph_runs() {
    let _context = testing::context();
    let stream = stream();
    let maker = graph();
    let (node, address) = allocate(maker, 100);
    let make = instantiate(maker);
    call!(cuGraphLaunch(make, stream)).unwrap();
    let mut taker = null_mut();
    begin_capture(stream);
    call!(cuMemFreeAsync(address, stream)).unwrap();
    call!(cuStreamEndCapture(stream, &raw mut taker)).unwrap();
    let take = instantiate(taker);
    assert_eq!(call!(cuGraphLaunch(make, stream)), INVALID, "it is still left");
    for _ in 0..2 {
        call!(cuGraphLaunch(take, stream)).unwrap();
        assert_eq!(call!(cuGraphLaunch(take, stream)), INVALID, "there is nothing to free");
        assert_eq!(call!(cuMemFreeAsync(address, stream)), INVALID);
        call!(cuGraphLaunch(make, stream)).unwrap();
    }
    call!(cuMemFreeAsync(address, stream)).unwrap();
    call!(cuStreamSynchronize(stream)).unwrap();
    assert!(crate::memory::span(address, 0).is_none());
    // The graph that allocates may free it only when no other one does.
    assert_eq!(free(maker, node, address), INVALID.map(|()| null_mut()));
    call!(cuGraphExecDestroy(take)).unwrap();
    call!(cuGraphDestroy(taker)).unwrap();
    free(maker, node, address).unwrap();
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
