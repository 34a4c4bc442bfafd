//! What copies and fills refuse.

use std::ffi::c_void;
use std::ptr::null_mut;

use cuda_abi::sys::{self, CUmemcpySrcAccessOrder as Order, CUresult};

use super::super::testing::{Device, call, pattern, stream};
use super::super::{Copy, Fill, Side};
use crate::testing;

const INVALID: crate::error::Result = Err(CUresult::CUDA_ERROR_INVALID_VALUE);

#[test]
fn a_context_is_needed() {
    let context = testing::context();
    let mut popped = null_mut();
    call!(cuCtxPopCurrent_v2(&raw mut popped)).unwrap();
    let missing = Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
    let mut bytes = [0_u8; 8];
    assert_eq!(call!(cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), 8, 8)), missing);
    assert_eq!(call!(cuMemsetD8_v2(8, 0, 8)), missing);
    call!(cuCtxPushCurrent_v2(context.handle as _)).unwrap();
}

#[test]
fn addresses_must_be_what_the_call_says() {
    let _context = testing::context();
    let device = Device::with(&pattern(1 << 20, 0));
    let mut host = vec![0_u8; 64];
    let (at, end) = (device.address, device.address + device.len as u64);
    let data = host.as_mut_ptr();

    assert_eq!(call!(cuMemcpyHtoD_v2(0, data.cast(), 8)), INVALID);
    assert_eq!(call!(cuMemcpyHtoD_v2(at, std::ptr::null(), 8)), INVALID);
    assert_eq!(call!(cuMemcpyDtoH_v2(null_mut(), at, 8)), INVALID);
    // A host address for a device one and the other way round.
    assert_eq!(call!(cuMemcpyHtoD_v2(data as u64, data.cast(), 8)), INVALID);
    assert_eq!(call!(cuMemcpyHtoD_v2(at, at as *const _, 8)), INVALID);
    assert_eq!(call!(cuMemcpyDtoH_v2(at as *mut _, at, 8)), INVALID);
    assert_eq!(call!(cuMemcpyDtoH_v2(data.cast(), data as u64, 8)), INVALID);
    assert_eq!(call!(cuMemcpyDtoD_v2(at, data as u64, 8)), INVALID);
    // Past the end.
    assert_eq!(call!(cuMemcpyHtoD_v2(end - 8, data.cast(), 9)), INVALID);
    assert_eq!(call!(cuMemcpyHtoD_v2(end - 8, data.cast(), 8)), Ok(()));
    assert_eq!(call!(cuMemcpyDtoH_v2(data.cast(), at, usize::MAX)), INVALID);
    assert_eq!(call!(cuMemsetD8_v2(end - 8, 0, 9)), INVALID);
    assert_eq!(call!(cuMemsetD8_v2(data as u64, 0, 8)), INVALID);
    assert_eq!(call!(cuMemcpyHtoDAsync_v2(end - 8, data.cast(), 9, stream())), INVALID);
}

/// Small allocations share pages. The bytes between and behind them belong to no allocation, even where a kernel
/// can access them.
#[test]
fn a_range_outside_of_all_allocations_is_refused() {
    let _context = testing::context();
    let (device, behind) = (Device::new(1000), Device::new(1000));
    let mut host = [0_u8; 2048];
    let data: *mut c_void = host.as_mut_ptr().cast();
    assert_eq!(behind.address, device.address + 1024, "in the same page");
    let free = behind.address + (1 << 20);
    assert!(crate::memory::span(free, 0).is_some(), "a kernel can reach it");
    for (address, len) in [
        (free, 8),
        (device.address + 1000, 8),
        (device.address + 900, 101),
        (device.address, 2024),
        (device.address - 1, 2),
    ] {
        assert_eq!(call!(cuMemcpyHtoD_v2(address, data.cast_const(), len)), INVALID);
        assert_eq!(call!(cuMemcpyDtoH_v2(data, address, len)), INVALID);
        assert_eq!(call!(cuMemcpyDtoD_v2(address, device.address, len)), INVALID);
        assert_eq!(call!(cuMemcpy(address, data as u64, len)), INVALID);
        assert_eq!(call!(cuMemcpyDtoHAsync_v2(data, address, len, stream())), INVALID);
        assert_eq!(call!(cuMemsetD8_v2(address, 0, len)), INVALID);
        assert_eq!(call!(cuMemsetD8Async(address, 0, len, stream())), INVALID);
        assert_eq!(call!(cuMemsetD2D8_v2(address, len, 0, len, 1)), INVALID);
    }
    assert_eq!(call!(cuMemsetD2D8_v2(device.address, 500, 0, 500, 3)), INVALID);
    assert_eq!(call!(cuStreamWriteValue32_v2(null_mut(), free, 1, 0)), INVALID);
    // Freed memory belongs to no allocation, from the call on.
    call!(cuMemFreeAsync(behind.address, null_mut())).unwrap();
    assert_eq!(call!(cuMemsetD8_v2(behind.address, 0, 8)), INVALID);
    assert_eq!(call!(cuMemsetD8_v2(device.address, 0, 1000)), Ok(()));
    assert_eq!(call!(cuStreamSynchronize(null_mut())), Ok(()));
}

#[test]
fn nothing_to_copy_is_no_error() {
    let _context = testing::context();
    assert_eq!(call!(cuMemcpyHtoD_v2(0, std::ptr::null(), 0)), Ok(()));
    assert_eq!(call!(cuMemcpy(0, 0, 0)), Ok(()));
    assert_eq!(call!(cuMemcpyDtoHAsync_v2(null_mut(), 0, 0, stream())), Ok(()));
    assert_eq!(call!(cuMemsetD32_v2(0, 1, 0)), Ok(()));
    assert_eq!(call!(cuMemsetD2D8_v2(0, 0, 1, 0, 5)), Ok(()));
}

#[test]
fn fills_ask_for_aligned_elements() {
    let _context = testing::context();
    let device = Device::new(4096);
    assert_eq!(call!(cuMemsetD16_v2(device.address + 1, 0, 1)), INVALID);
    assert_eq!(call!(cuMemsetD32_v2(device.address + 2, 0, 1)), INVALID);
    assert_eq!(call!(cuMemsetD2D16_v2(device.address, 7, 0, 2, 2)), INVALID);
    // A pitch that is less than a row; with one row there is none.
    assert_eq!(call!(cuMemsetD2D8_v2(device.address, 3, 0, 4, 2)), INVALID);
    assert_eq!(call!(cuMemsetD2D8_v2(device.address, 3, 0, 4, 1)), Ok(()));
    assert_eq!(call!(cuMemsetD2D32_v2(device.address, 1024, 0, 2, 5)), INVALID);
}

fn plain_2d(device: &Device, host: &mut [u8]) -> sys::CUDA_MEMCPY2D {
    sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_HOST,
        srcHost: host.as_ptr().cast(),
        srcDevice: 0,
        srcArray: null_mut(),
        srcPitch: 16,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstHost: null_mut(),
        dstDevice: device.address,
        dstArray: null_mut(),
        dstPitch: 32,
        WidthInBytes: 16,
        Height: 4,
    }
}

#[test]
fn shapes_must_fit() {
    let _context = testing::context();
    let device = Device::new(128);
    let mut host = vec![0; 64];
    let good = plain_2d(&device, &mut host);
    let run = |change: fn(&mut sys::CUDA_MEMCPY2D)| {
        let mut params = good;
        change(&mut params);
        call!(cuMemcpy2D_v2(&raw const params))
    };
    assert_eq!(run(|_| ()), Ok(()));
    assert_eq!(run(|params| params.srcPitch = 15), INVALID);
    assert_eq!(run(|params| params.dstXInBytes = 17), INVALID);
    assert_eq!(run(|params| params.dstPitch = 1 << 31), INVALID);
    assert_eq!(run(|params| params.Height = 5), INVALID);
    assert_eq!(run(|params| params.dstY = 1), INVALID);
    assert_eq!(run(|params| params.dstY = usize::MAX), INVALID);
    assert_eq!(run(|params| params.srcHost = std::ptr::null()), INVALID);
    assert_eq!(run(|params| params.Height = 0), Ok(()));
    let array = sys::CUmemorytype::CU_MEMORYTYPE_ARRAY;
    let mut arrays = good;
    arrays.srcMemoryType = array;
    assert_eq!(call!(cuMemcpy2D_v2(&raw const arrays)), Err(CUresult::CUDA_ERROR_NOT_SUPPORTED));
    assert_eq!(call!(cuMemcpy2D_v2(std::ptr::null())), INVALID);

    let mut unknown = std::mem::MaybeUninit::new(good);
    // SAFETY: the field lies within the structure, which is then passed on as bytes only.
    unsafe { unknown.as_mut_ptr().cast::<u32>().wrapping_add(4).write(99) };
    assert_eq!(call!(cuMemcpy2D_v2(unknown.as_ptr())), INVALID);
}

#[test]
fn memory_that_is_gone_when_work_runs_is_an_illegal_address() {
    let _context = testing::context();
    let device = Device::new(4096);
    let (address, mut host) = (device.address, vec![0_u8; 16]);
    let copy = Copy::linear((host.as_mut_ptr() as u64, Side::Host), (address, Side::Device), 16);
    let fill = Fill { address, value: 0, element_bytes: 1, width: 16, height: 1, pitch_bytes: 0 };
    assert_eq!(copy.run(0), Ok(()));
    assert_eq!(fill.run(0), Ok(()));
    device.free();
    assert_eq!(copy.run(0), Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
    assert_eq!(fill.run(0), Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
}

fn attributes(order: Order) -> sys::CUmemcpyAttributes {
    let nowhere = sys::CUmemLocation {
        type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID,
        __bindgen_anon_1: sys::CUmemLocation_st__bindgen_ty_1 { id: 0 },
    };
    sys::CUmemcpyAttributes { srcAccessOrder: order, srcLocHint: nowhere, dstLocHint: nowhere, flags: 0 }
}

#[test]
fn batches_are_checked_as_a_whole() {
    let _context = testing::context();
    let (source, target) = (Device::with(&pattern(64, 1)), Device::with(&[0; 64]));
    let stream = stream();
    let mut to = [target.address, target.address + 16, target.address + 32];
    let mut from = [source.address, source.address + 16, source.address + 32];
    let mut sizes = [16; 3];
    let mut attributes = [
        attributes(Order::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM),
        attributes(Order::CU_MEMCPY_SRC_ACCESS_ORDER_ANY),
    ];
    let mut run = |sizes: &mut [usize; 3], starts: &mut [usize; 2], stream| {
        let mut failed = 7;
        let result = call!(cuMemcpyBatchAsync(
            to.as_mut_ptr(),
            from.as_mut_ptr(),
            sizes.as_mut_ptr(),
            3,
            attributes.as_mut_ptr(),
            starts.as_mut_ptr(),
            2,
            &raw mut failed,
            stream,
        ));
        (result, failed)
    };
    assert_eq!(run(&mut sizes, &mut [1, 2], stream), (INVALID, usize::MAX));
    assert_eq!(run(&mut sizes, &mut [0, 0], stream), (INVALID, usize::MAX));
    assert_eq!(run(&mut sizes, &mut [0, 3], stream), (INVALID, usize::MAX));
    assert_eq!(run(&mut sizes, &mut [0, 2], null_mut()), (INVALID, usize::MAX));
    // The last copy goes past the end: none runs.
    assert_eq!(run(&mut [16, 16, 60], &mut [0, 2], stream), (INVALID, 2));
    call!(cuStreamSynchronize(stream)).unwrap();
    assert_eq!(target.read(), [0; 64]);

    assert_eq!(run(&mut sizes, &mut [0, 2], stream), (Ok(()), 7));
    call!(cuStreamSynchronize(stream)).unwrap();
    assert_eq!(target.read()[..48], pattern(64, 1)[..48]);
}

#[test]
fn copies_with_attributes_name_an_access_order() {
    let _context = testing::context();
    let (source, target) = (pattern(64, 1), Device::with(&[0; 64]));
    let stream = stream();
    let from = source.as_ptr() as u64;
    let mut bad = attributes(Order::CU_MEMCPY_SRC_ACCESS_ORDER_INVALID);
    assert_eq!(call!(cuMemcpyWithAttributesAsync(target.address, from, 64, &raw mut bad, stream)), INVALID);
    let mut good = attributes(Order::CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL);
    call!(cuMemcpyWithAttributesAsync(target.address, from, 64, &raw mut good, stream)).unwrap();
    call!(cuStreamSynchronize(stream)).unwrap();
    assert_eq!(target.read(), source);
    good.flags = 2;
    assert_eq!(call!(cuMemcpyWithAttributesAsync(target.address, from, 64, &raw mut good, stream)), INVALID);
}
