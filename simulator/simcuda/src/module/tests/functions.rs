//! Attributes of functions, occupancy.

use cuda_abi::sys::CUfunction_attribute as A;

use super::*;

/// 16 KiB of static shared memory, blocks of at most 128 threads.
const BOUNDED: &str = "
.version 8.0
.target sm_80
.address_size 64
.shared .align 16 .b8 tile[16384];
.extern .shared .align 16 .b8 dynamic[];
.const .align 4 .b8 table[40];
.visible .entry bounded(.param .u32 a, .param .u64 b)
.maxntid 128, 1, 1
{
    .reg .b32 %r<4>;
    mov.u32 %r1, tile;
    mov.u32 %r2, dynamic;
    st.shared.u32 [%r1], %r2;
    ret;
}
.visible .entry fixed()
.reqntid 8, 4, 1
{
    ret;
}
";

fn get(f: CUfunction, attribute: A) -> Result<i32> {
    let mut value = i32::MIN;
    // SAFETY: a local variable.
    unsafe { cuFuncGetAttribute(&raw mut value, attribute as u32, f) }.map(|()| value)
}

fn set(f: CUfunction, attribute: A, value: i32) -> Result {
    // SAFETY: handle and number are checked.
    unsafe { cuFuncSetAttribute(f, attribute as u32, value) }
}

#[test]
fn attributes_tell_what_the_code_says() {
    let (_context, module, f) = loaded(BOUNDED, "bounded");
    assert_eq!(get(f, A::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK), Ok(128));
    assert_eq!(get(f, A::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES), Ok(16384));
    assert_eq!(get(f, A::CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES), Ok(40));
    assert_eq!(get(f, A::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES), Ok(0));
    assert_eq!(get(f, A::CU_FUNC_ATTRIBUTE_PTX_VERSION), Ok(80));
    assert_eq!(get(f, A::CU_FUNC_ATTRIBUTE_BINARY_VERSION), Ok(90));
    assert_eq!(get(f, A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES), Ok(49152 - 16384));
    assert_eq!(get(f, A::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT), Ok(-1));
    let registers = get(f, A::CU_FUNC_ATTRIBUTE_NUM_REGS).unwrap();
    assert!((8..=64).contains(&registers), "{registers}");
    assert_eq!(get(f, A::CU_FUNC_ATTRIBUTE_MAX), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    let fixed = function(module, "fixed").unwrap();
    assert_eq!(get(fixed, A::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK), Ok(32));
    assert_eq!(get(null_mut(), A::CU_FUNC_ATTRIBUTE_NUM_REGS), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
}

#[test]
fn only_some_attributes_can_be_set_and_only_within_their_range() {
    let (_context, _, f) = loaded(BOUNDED, "bounded");
    let refused = Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(set(f, A::CU_FUNC_ATTRIBUTE_NUM_REGS, 32), refused);
    let dynamic = A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    let most = 227 * 1024 - 16384;
    assert_eq!(set(f, dynamic, most), Ok(()));
    assert_eq!(get(f, dynamic), Ok(most));
    assert_eq!(set(f, dynamic, most + 1), refused);
    assert_eq!(set(f, dynamic, -1), refused);
    assert_eq!(set(f, A::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 101), refused);
    assert_eq!(set(f, A::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 50), Ok(()));
    assert_eq!(get(f, A::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT), Ok(50));
    assert_eq!(set(f, A::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 2), refused);
    assert_eq!(set(f, A::CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH, -1), refused);
    // SAFETY: handle and number are checked.
    unsafe { cuFuncSetCacheConfig(f, 3) }.unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { cuFuncSetCacheConfig(f, 4) }, refused);
    // SAFETY: as above.
    assert_eq!(unsafe { cuFuncSetSharedMemConfig(f, 3) }, refused);
}

#[test]
fn a_function_tells_its_name_module_and_parameters() {
    let (_context, module, f) = loaded(STORE_PARAMS, "store_params");
    let mut name = std::ptr::null();
    // SAFETY: a local variable.
    unsafe { cuFuncGetName(&raw mut name, f) }.unwrap();
    // SAFETY: the call gave a NUL-terminated text.
    assert_eq!(unsafe { CStr::from_ptr(name) }, c"store_params");
    let mut of = null_mut();
    // SAFETY: a local variable.
    unsafe { cuFuncGetModule(&raw mut of, f) }.unwrap();
    assert_eq!(of, module);
    let mut count = 0;
    // SAFETY: a local variable.
    unsafe { cuFuncGetParamCount(f, &raw mut count) }.unwrap();
    assert_eq!(count, 4);
    let places = [0, 1, 2, 3].map(|index| {
        let (mut offset, mut size_bytes) = (0, 0);
        // SAFETY: local variables.
        unsafe { cuFuncGetParamInfo(f, index, &raw mut offset, &raw mut size_bytes) }.unwrap();
        (offset, size_bytes)
    });
    assert_eq!(places, [(0, 1), (8, 8), (16, 2), (24, 8)]);
    let mut offset = 0;
    // SAFETY: local variables.
    let beyond = unsafe { cuFuncGetParamInfo(f, 4, &raw mut offset, null_mut()) };
    assert_eq!(beyond, Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    let mut state = 0;
    // SAFETY: a local variable.
    unsafe { cuFuncIsLoaded(&raw mut state, f) }.unwrap();
    assert_eq!(state, 1);
    // SAFETY: handles are checked.
    unsafe { cuFuncLoad(f) }.unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { cuFuncLoad(null_mut()) }, Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
}

fn active(f: CUfunction, threads: i32, dynamic_bytes: usize) -> Result<i32> {
    let mut blocks = -1;
    // SAFETY: a local variable.
    unsafe { cuOccupancyMaxActiveBlocksPerMultiprocessor(&raw mut blocks, f, threads, dynamic_bytes) }
        .map(|()| blocks)
}

#[test]
fn occupancy_by_hand() {
    let (_context, _, f) = loaded(VECTOR_ADD, "vector_add");
    // 2048 threads and 32 blocks are the limits.
    assert_eq!(active(f, 1024, 0), Ok(2));
    assert_eq!(active(f, 256, 0), Ok(8));
    assert_eq!(active(f, 32, 0), Ok(32));
    // 48 KiB and the driver's 1 KiB of 228 KiB.
    assert_eq!(active(f, 32, 48 << 10), Ok(4));
    // More than 48 KiB was not asked for.
    assert_eq!(active(f, 32, (48 << 10) + 1), Ok(0));
    set(f, A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 100 << 10).unwrap();
    assert_eq!(active(f, 32, 100 << 10), Ok(2));
    assert_eq!(active(f, 1025, 0), Ok(0));
    assert_eq!(active(f, 0, 0), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    let mut blocks = 0;
    // SAFETY: a local variable.
    let flags = unsafe { cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(&raw mut blocks, f, 32, 0, 2) };
    assert_eq!(flags, Err(CUresult::CUDA_ERROR_INVALID_VALUE));
}

extern "C" fn a_kibibyte_per_warp(threads: i32) -> usize {
    usize::try_from(threads).unwrap() / 32 * 1024
}

#[test]
fn the_best_block_size() {
    let (_context, module, f) = loaded(VECTOR_ADD, "vector_add");
    let best = |f, shared_of_block, dynamic_bytes, limit| {
        let (mut grid, mut block) = (0, 0);
        // SAFETY: local variables and a function of ours.
        unsafe {
            cuOccupancyMaxPotentialBlockSize(
                &raw mut grid,
                &raw mut block,
                f,
                shared_of_block,
                dynamic_bytes,
                limit,
            )
        }
        .map(|()| (grid, block))
    };
    assert_eq!(best(f, None, 0, 0), Ok((264, 1024)));
    // 9 warps would fit 7 times, 8 warps fit 8 times.
    assert_eq!(best(f, None, 0, 300), Ok((8 * 132, 256)));
    // Four blocks of 48 KiB: the larger the better.
    assert_eq!(best(f, None, 48 << 10, 256), Ok((4 * 132, 256)));
    assert_eq!(best(f, None, 0, -1), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    // With 33 KiB each, two blocks of 1024 threads still fit.
    assert_eq!(best(f, Some(a_kibibyte_per_warp), 0, 0), Ok((264, 1024)));
    let _ = module;
}

#[test]
fn shared_memory_that_is_left_for_so_many_blocks() {
    let (_context, _, f) = loaded(BOUNDED, "bounded");
    let left = |blocks| {
        let mut size_bytes = 0;
        // SAFETY: a local variable.
        unsafe { cuOccupancyAvailableDynamicSMemPerBlock(&raw mut size_bytes, f, blocks, 128) }
            .map(|()| size_bytes)
    };
    // 233472 / 8 = 29184, less 1024 for the driver, less 16384 static.
    assert_eq!(left(8), Ok(29184 - 1024 - 16384));
    // Not more than the launch may ask for.
    assert_eq!(left(1), Ok(49152 - 16384));
    assert_eq!(left(17), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
}
