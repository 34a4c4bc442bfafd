//! Launches: parameters, limits, errors.

use cuda_abi::sys::{self, CUfunction_attribute as A, CUlaunchAttributeID as Id};

use super::*;

const INVALID: Result = Err(CUresult::CUDA_ERROR_INVALID_VALUE);

/// Kernels that do not take parameters: nothing, a loop without end, a wild store, an odd store, a trap, and one
/// that waits for all blocks of its grid.
const ODD_ONES: &str = "
.version 8.0
.target sm_90
.address_size 64

.visible .global .align 4 .u32 arrived;
.extern .shared .align 16 .b8 dynamic[];

.visible .entry nothing() { ret; }

.visible .entry for_ever()
{
again:
    bra.uni again;
}

.visible .entry wild()
{
    .reg .b64 %rd<2>;
    mov.u64 %rd1, 4096;
    st.global.u32 [%rd1], 1;
    ret;
}

.visible .entry misaligned()
{
    .reg .b64 %rd<2>;
    mov.u64 %rd1, arrived;
    st.global.u32 [%rd1+2], 1;
    ret;
}

.visible .entry trapped() { trap; ret; }

.visible .entry meet(.param .u32 blocks)
{
    .reg .pred %p<2>;
    .reg .b32 %r<4>;
    .reg .b64 %rd<2>;
    ld.param.u32 %r1, [blocks];
    mov.u64 %rd1, arrived;
    atom.global.add.u32 %r2, [%rd1], 1;
wait:
    ld.volatile.global.u32 %r3, [%rd1];
    setp.lt.u32 %p1, %r3, %r1;
    @%p1 bra wait;
    ret;
}

.visible .entry required_cluster() .reqnctapercluster 2, 1, 1 { ret; }
";

#[test]
fn parameters_by_pointer_and_by_buffer() {
    let (context, _, f) = loaded(STORE_PARAMS, "store_params");
    let mut out = allocate(32);
    let (mut small, mut medium, mut large) = (0x11u8, 0x2233u16, 1.25f64);
    launch(
        f,
        [1; 3],
        [1; 3],
        &mut [param(&mut small), param(&mut out), param(&mut medium), param(&mut large)],
    )
    .unwrap();
    wait(&context).unwrap();
    let expected = [[0x11, 0, 0x33, 0x22, 0, 0, 0, 0], 1.25f64.to_le_bytes()].concat();
    assert_eq!(read::<16>(out), *expected);

    write(out, &[0; 16]);
    let mut buffer = [0u8; 32];
    buffer[0] = 0x44;
    buffer[8..16].copy_from_slice(&out.to_le_bytes());
    buffer[16..18].copy_from_slice(&0x5566u16.to_le_bytes());
    buffer[24..32].copy_from_slice(&2.5f64.to_le_bytes());
    let by_buffer = |mut size_bytes: usize| {
        let [end, pointer, size] = [0, 1, 2].map(std::ptr::without_provenance_mut::<c_void>);
        let mut extra = [size, param(&mut size_bytes), pointer, buffer.as_ptr().cast_mut().cast(), end];
        // SAFETY: a list with a buffer of the size that it says.
        unsafe { cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, null_mut(), null_mut(), extra.as_mut_ptr()) }
    };
    by_buffer(32).unwrap();
    wait(&context).unwrap();
    let expected = [[0x44, 0, 0x66, 0x55, 0, 0, 0, 0], 2.5f64.to_le_bytes()].concat();
    assert_eq!(read::<16>(out), *expected);
    assert_eq!(by_buffer(31), INVALID);
}

#[test]
fn parameters_in_both_ways_or_none_are_refused() {
    let (_context, _, f) = loaded(STORE_PARAMS, "store_params");
    let mut values = [null_mut::<c_void>(); 4];
    let mut extra = [null_mut::<c_void>(); 1];
    let launch = |params, extra| {
        // SAFETY: neither list is followed to the end.
        unsafe { cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, null_mut(), params, extra) }
    };
    assert_eq!(launch(values.as_mut_ptr(), extra.as_mut_ptr()), INVALID);
    assert_eq!(launch(null_mut(), null_mut()), INVALID);
    assert_eq!(launch(values.as_mut_ptr(), null_mut()), INVALID);
    assert_eq!(launch(null_mut(), extra.as_mut_ptr()), INVALID);
    let mut unknown = [std::ptr::without_provenance_mut::<c_void>(3), null_mut()];
    assert_eq!(launch(null_mut(), unknown.as_mut_ptr()), INVALID);
}

#[test]
fn dimensions_have_limits() {
    let (context, module, f) = loaded(ODD_ONES, "nothing");
    let run = |grid, block| launch(f, grid, block, &mut []);
    for (grid, block) in [
        ([0, 1, 1], [1; 3]),
        ([1, 0, 1], [1; 3]),
        ([1; 3], [1, 1, 0]),
        ([1, 65536, 1], [1; 3]),
        ([1, 1, 65536], [1; 3]),
        ([0x8000_0000, 1, 1], [1; 3]),
        ([1; 3], [1025, 1, 1]),
        ([1; 3], [1, 1, 65]),
        ([1; 3], [32, 32, 2]),
    ] {
        assert_eq!(run(grid, block), INVALID, "{grid:?} {block:?}");
    }
    run([1, 1, 1], [1024, 1, 1]).unwrap();
    run([1, 1, 1], [16, 16, 4]).unwrap();
    wait(&context).unwrap();
    assert_eq!(launch(null_mut(), [1; 3], [1; 3], &mut []), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
    let other = testing::context();
    assert_eq!(run([1; 3], [1; 3]), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
    let _ = (module, other);
}

#[test]
fn more_than_48_kib_of_shared_memory_must_be_asked_for() {
    let (context, _, f) = loaded(ODD_ONES, "nothing");
    let run = |size_bytes| launch_on(null_mut(), f, [1; 3], [1; 3], size_bytes, &mut []);
    run(48 << 10).unwrap();
    assert_eq!(run((48 << 10) + 1), INVALID);
    let attribute = A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as u32;
    // SAFETY: handle and number are checked.
    unsafe { cuFuncSetAttribute(f, attribute, 227 << 10) }.unwrap();
    run(227 << 10).unwrap();
    assert_eq!(run((227 << 10) + 1), INVALID);
    wait(&context).unwrap();
}

#[test]
fn faults_become_the_context_s_error() {
    for (kernel, error) in [
        ("wild", CUresult::CUDA_ERROR_ILLEGAL_ADDRESS),
        ("misaligned", CUresult::CUDA_ERROR_MISALIGNED_ADDRESS),
        ("trapped", CUresult::CUDA_ERROR_LAUNCH_FAILED),
    ] {
        let (context, _, f) = loaded(ODD_ONES, kernel);
        launch(f, [1; 3], [1; 3], &mut []).unwrap();
        assert_eq!(wait(&context), Err(error), "{kernel}");
        // It stays.
        assert_eq!(launch(f, [1; 3], [1; 3], &mut []), Err(error), "{kernel}");
        assert_eq!(load(VECTOR_ADD), Err(error), "{kernel}");
    }
}

#[test]
fn a_kernel_without_end_ends_with_its_context_s_error() {
    let (context, _, f) = loaded(ODD_ONES, "for_ever");
    launch(f, [1; 3], [1; 3], &mut []).unwrap();
    context.fail(CUresult::CUDA_ERROR_UNKNOWN);
    assert_eq!(wait(&context), Err(CUresult::CUDA_ERROR_UNKNOWN));
}

fn cooperative(f: CUfunction, blocks: u32, threads: u32, params: &mut [*mut c_void]) -> Result {
    let params = if params.is_empty() { null_mut() } else { params.as_mut_ptr() };
    // SAFETY: as many pointers to values as the kernel has parameters.
    unsafe { cuLaunchCooperativeKernel(f, blocks, 1, 1, threads, 1, 1, 0, null_mut(), params) }
}

#[test]
fn all_blocks_of_a_cooperative_grid_are_there_at_once() {
    let (context, module, f) = loaded(ODD_ONES, "meet");
    let mut blocks = 64u32;
    cooperative(f, blocks, 1, &mut [param(&mut blocks)]).unwrap();
    wait(&context).unwrap();
    let nothing = function(module, "nothing").unwrap();
    // 132 multiprocessors hold two blocks of 1024 threads each.
    assert_eq!(
        cooperative(nothing, 265, 1024, &mut []),
        Err(CUresult::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE)
    );
    cooperative(nothing, 264, 1024, &mut []).unwrap();
    wait(&context).unwrap();
}

/// A launch with attributes, each given by its number and the first numbers of its value.
fn launch_ex(f: CUfunction, blocks: u32, attributes: &[(u32, [u32; 3])]) -> Result {
    // SAFETY: an attribute is a number, padding and a union in which all zeros are a value.
    let mut attrs: Vec<sys::CUlaunchAttribute> = vec![unsafe { std::mem::zeroed() }; attributes.len()];
    for (attr, (id, value)) in attrs.iter_mut().zip(attributes) {
        // SAFETY: the field of a structure of ours, which a C program may set to any number.
        unsafe { (&raw mut attr.id).cast::<u32>().write(*id) };
        // SAFETY: the value has room for 64 bytes.
        unsafe { (&raw mut attr.value).cast::<[u32; 3]>().write(*value) };
    }
    let config = sys::CUlaunchConfig {
        gridDimX: blocks,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: 32,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: 0,
        hStream: null_mut(),
        attrs: attrs.as_mut_ptr(),
        numAttrs: u32::try_from(attrs.len()).unwrap(),
    };
    // SAFETY: a configuration with as many attributes as it says, for a kernel without parameters.
    unsafe { cuLaunchKernelEx(&raw const config, f, null_mut(), null_mut()) }
}

#[test]
fn launch_attributes_are_checked() {
    let (context, _, f) = loaded(ODD_ONES, "nothing");
    launch_ex(f, 4, &[]).unwrap();
    for (id, value) in [
        (Id::CU_LAUNCH_ATTRIBUTE_IGNORE, 77),
        (Id::CU_LAUNCH_ATTRIBUTE_COOPERATIVE, 1),
        (Id::CU_LAUNCH_ATTRIBUTE_PRIORITY, 5),
        (Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, 1),
        (Id::CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN, 1),
        (Id::CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
    ] {
        assert_eq!(launch_ex(f, 4, &[(id as u32, [value, 0, 0])]), Ok(()), "{id:?}");
    }
    for (id, value) in [
        (Id::CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY as u32, 1),
        (Id::CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN as u32, 2),
        (Id::CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT as u32, 101),
        (Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE as u32, 3),
        (15, 0),
        (1000, 0),
    ] {
        assert_eq!(launch_ex(f, 4, &[(id, [value, 0, 0])]), INVALID, "{id}");
    }
    let updatable = Id::CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE as u32;
    assert_eq!(launch_ex(f, 4, &[(updatable, [1, 0, 0])]), Err(CUresult::CUDA_ERROR_NOT_SUPPORTED));
    // SAFETY: nothing is read.
    assert_eq!(unsafe { cuLaunchKernelEx(std::ptr::null(), f, null_mut(), null_mut()) }, INVALID);
    wait(&context).unwrap();
}

#[test]
fn clusters_divide_the_grid_and_have_a_largest_size() {
    let (context, module, f) = loaded(ODD_ONES, "nothing");
    let id = Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION as u32;
    let refused = Err(CUresult::CUDA_ERROR_INVALID_CLUSTER_SIZE);
    launch_ex(f, 16, &[(id, [8, 1, 1])]).unwrap();
    assert_eq!(launch_ex(f, 12, &[(id, [8, 1, 1])]), refused);
    assert_eq!(launch_ex(f, 16, &[(id, [1, 2, 1])]), refused);
    assert_eq!(launch_ex(f, 16, &[(id, [0, 1, 1])]), INVALID);
    assert_eq!(launch_ex(f, 16, &[(id, [16, 1, 1])]), refused);
    let allowed = A::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED as u32;
    // SAFETY: handle and number are checked.
    unsafe { cuFuncSetAttribute(f, allowed, 1) }.unwrap();
    launch_ex(f, 16, &[(id, [16, 1, 1])]).unwrap();
    // A preferred size is a multiple of the one that is asked for.
    let preferred = Id::CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION as u32;
    launch_ex(f, 16, &[(preferred, [4, 1, 1]), (id, [2, 1, 1])]).unwrap();
    assert_eq!(launch_ex(f, 16, &[(preferred, [3, 1, 1]), (id, [2, 1, 1])]), INVALID);

    let required = function(module, "required_cluster").unwrap();
    launch(required, [4, 1, 1], [1; 3], &mut []).unwrap();
    assert_eq!(launch(required, [3, 1, 1], [1; 3], &mut []), refused);
    assert_eq!(launch_ex(required, 4, &[(id, [4, 1, 1])]), refused);
    let width = A::CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH as u32;
    let mut value = 0;
    // SAFETY: a local variable.
    unsafe { cuFuncGetAttribute(&raw mut value, width, required) }.unwrap();
    assert_eq!(value, 2);
    // SAFETY: handle and number are checked.
    let set = unsafe { cuFuncSetAttribute(required, width, 4) };
    assert_eq!(set, Err(CUresult::CUDA_ERROR_NOT_PERMITTED));
    wait(&context).unwrap();
}

#[test]
fn active_clusters_and_the_largest_one() {
    let (_context, _, f) = loaded(ODD_ONES, "nothing");
    // SAFETY: a structure of numbers, pointers and an array that is not there.
    let mut config: sys::CUlaunchConfig = unsafe { std::mem::zeroed() };
    (config.gridDimX, config.gridDimY, config.gridDimZ) = (8, 1, 1);
    (config.blockDimX, config.blockDimY, config.blockDimZ) = (1024, 1, 1);
    let mut size = 0;
    // SAFETY: a local variable and a configuration without attributes.
    unsafe { cuOccupancyMaxPotentialClusterSize(&raw mut size, f, &raw const config) }.unwrap();
    assert_eq!(size, 8);
    // SAFETY: all zeros are an attribute.
    let mut cluster: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
    cluster.id = Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    // SAFETY: the value has room for three numbers.
    unsafe { (&raw mut cluster.value).cast::<[u32; 3]>().write([8, 1, 1]) };
    (config.attrs, config.numAttrs) = (&raw mut cluster, 1);
    let mut clusters = 0;
    // SAFETY: a local variable and a configuration with one attribute.
    unsafe { cuOccupancyMaxActiveClusters(&raw mut clusters, f, &raw const config) }.unwrap();
    // Two blocks of 1024 threads on each of 132 multiprocessors, in clusters of 8.
    assert_eq!(clusters, 33);
}

#[test]
fn an_event_of_a_launch_is_told_when_the_kernel_is_done() {
    let (context, _, f) = loaded(ODD_ONES, "nothing");
    let mut event = null_mut();
    // SAFETY: a local variable.
    unsafe { stream::cuEventCreate(&raw mut event, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32) }
        .unwrap();
    let address = event.addr() as u64;
    let value = [address as u32, (address >> 32) as u32, 0];
    launch_ex(f, 1, &[(Id::CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT as u32, value)]).unwrap();
    // SAFETY: an event of this context.
    unsafe { stream::cuEventSynchronize(event) }.unwrap();
    let none = launch_ex(f, 1, &[(Id::CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT as u32, [0; 3])]);
    assert_eq!(none, Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
    let external = [value[0], value[1], 1];
    let refused = launch_ex(f, 1, &[(Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT as u32, external)]);
    assert_eq!(refused, INVALID);
    wait(&context).unwrap();
}

#[test]
fn launches_as_before_cuda_4() {
    let (context, _, f) = loaded(STORE_PARAMS, "store_params");
    let out = allocate(32);
    let mut pointer = out;
    // SAFETY: values of the sizes that are said, and handles that are checked.
    unsafe {
        cuFuncSetBlockShape(f, 1, 1, 1).unwrap();
        cuFuncSetSharedSize(f, 16).unwrap();
        assert_eq!(cuLaunch(f), INVALID, "the parameters are missing");
        cuParamSeti(f, 0, 0x77).unwrap();
        cuParamSetv(f, 8, param(&mut pointer), 8).unwrap();
        cuParamSeti(f, 16, 0x8899).unwrap();
        let mut large = 4.5f64;
        cuParamSetv(f, 24, param(&mut large), 8).unwrap();
        cuParamSetSize(f, 32).unwrap();
        cuLaunchGrid(f, 1, 1).unwrap();
    }
    wait(&context).unwrap();
    let expected = [[0x77, 0, 0x99, 0x88, 0, 0, 0, 0], 4.5f64.to_le_bytes()].concat();
    assert_eq!(read::<16>(out), *expected);
    // SAFETY: handles and numbers are checked.
    unsafe {
        assert_eq!(cuFuncSetBlockShape(f, 0, 1, 1), INVALID);
        assert_eq!(cuLaunchGrid(f, -1, 1), INVALID);
        assert_eq!(cuParamSetf(f, -4, 1.0), INVALID);
        assert_eq!(cuParamSetSize(f, 40000), INVALID);
    }
}

#[test]
fn a_graph_s_kernel_node_can_be_asked_what_it_is() {
    let (context, _, f) = loaded(STORE_PARAMS, "store_params");
    let mut out = allocate(32);
    let (mut small, mut medium, mut large) = (1u8, 2u16, 3f64);
    let mut params = [param(&mut small), param(&mut out), param(&mut medium), param(&mut large)];
    // SAFETY: a pointer to each parameter.
    let kernel = unsafe { Kernel::from_params(f, [2, 1, 1], [3, 1, 1], 64, params.as_mut_ptr(), null_mut()) };
    let kernel = kernel.unwrap();
    assert_eq!((kernel.function(), kernel.grid(), kernel.block()), (f, [2, 1, 1], [3, 1, 1]));
    assert_eq!(kernel.dynamic_shared_bytes(), 64);
    assert!(Arc::ptr_eq(kernel.context(), &context));
    let pointers = kernel.param_pointers();
    assert_eq!(pointers.len(), 4);
    // SAFETY: the second parameter is an address.
    assert_eq!(unsafe { pointers[1].cast::<u64>().read() }, out);
    // SAFETY: the last one is a double.
    assert_eq!(unsafe { pointers[3].cast::<f64>().read() }, 3.0);
}
