//! Copies and fills in all shapes.

use cuda_abi::sys::CUmemorytype as Kind;
use cuda_abi::types::*;

use crate::check::{Check, Result, check, expect_equal, skipped};
use crate::checks::graph::copy_params;
use crate::gpu::Flag;
use crate::{cu, ensure, gives, gpu, kernels, ok};

/// The checks of this area.
pub const CHECKS: &[Check] = &[
    check("copy/linear", "host to device, device to device and back, at odd offsets and lengths", linear),
    check("copy/unified", "cuMemcpy sees by the address which side is which (reference, cuMemcpy)", unified),
    check("copy/nothing", "copies and fills of 0 bytes succeed", nothing),
    check(
        "copy/bad-device-address",
        "an invalid device address is CUDA_ERROR_INVALID_VALUE",
        bad_device_address,
    ),
    check(
        "copy/beyond-the-end",
        "a range that leaves its memory is CUDA_ERROR_INVALID_VALUE",
        beyond_the_end,
    ),
    check(
        "copy/pageable-source",
        "the source of an asynchronous copy from pageable memory may change at once (reference, \"API synchronization behavior\")",
        pageable_source,
    ),
    check(
        "copy/pageable-target",
        "an asynchronous copy to pageable memory is done when the call returns (reference)",
        pageable_target,
    ),
    check(
        "copy/pinned-is-asynchronous",
        "an asynchronous copy from pinned memory waits for its turn while the host continues",
        pinned_is_asynchronous,
    ),
    check(
        "copy/2d",
        "rows with pitches and offsets, to the device and back (reference, cuMemcpy2D)",
        two_dimensional,
    ),
    check("copy/2d-device", "rows from device to device with different pitches", two_dimensional_device),
    check(
        "copy/2d-bad-pitch",
        "a pitch below the width is CUDA_ERROR_INVALID_VALUE (reference, cuMemcpy2D)",
        bad_pitch,
    ),
    check(
        "copy/3d",
        "slices of rows with offsets in all three directions (reference, cuMemcpy3D)",
        three_dimensional,
    ),
    check("copy/peer-same-device", "cuMemcpyPeer between two contexts of one device", peer_same_device),
    check("copy/peer", "cuMemcpyPeer between two devices (reference)", peer),
    check(
        "copy/waits-for-kernels",
        "a synchronous copy comes after kernels on the default stream",
        waits_for_kernels,
    ),
    check("copy/large", "a copy of many MiB arrives whole", large),
    check("copy/batch", "cuMemcpyBatchAsync does every copy (reference)", batch),
    check("fill/widths", "cuMemsetD8, D16 and D32 fill elements of their size", widths),
    check("fill/alignment", "D16 and D32 need aligned addresses (reference, cuMemsetD32)", alignment),
    check(
        "fill/2d",
        "two-dimensional fills leave what is between the rows (reference, cuMemsetD2D8)",
        fill_2d,
    ),
    check("fill/2d-bad-pitch", "a pitch below the width is CUDA_ERROR_INVALID_VALUE", fill_bad_pitch),
    check("fill/asynchronous", "asynchronous fills keep the stream's order", fill_asynchronous),
];

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|index| u8::try_from((index * 7 + index / 251) % 256).unwrap_or(0)).collect()
}

fn linear() -> Result {
    gpu::start()?;
    let (first, second) = (gpu::alloc(70_000)?, gpu::alloc(70_000)?);
    for (offset, length) in [(0, 1), (1, 3), (17, 1000), (4095, 2), (3, 65_536), (0, 70_000)] {
        let data = pattern(length);
        gpu::write(first + offset, &data)?;
        ok!(cuMemcpyDtoD_v2(second + 70_000 - length as u64, first + offset, length));
        gpu::expect_content(second + 70_000 - length as u64, &data)?;
    }
    Ok(())
}

fn unified() -> Result {
    gpu::start()?;
    let (source, address, other) = (pattern(1000), gpu::alloc(1000)?, gpu::alloc(1000)?);
    let mut back = vec![0_u8; 1000];
    ok!(cuMemcpy(address, source.as_ptr() as u64, 1000));
    ok!(cuMemcpy(other, address, 1000));
    ok!(cuMemcpy(back.as_mut_ptr() as u64, other, 1000));
    expect_equal("content", back, source)
}

fn nothing() -> Result {
    gpu::start()?;
    let (address, mut byte) = (gpu::alloc(64)?, 0_u8);
    ok!(cuMemcpyHtoD_v2(address, (&raw const byte).cast(), 0));
    ok!(cuMemcpyDtoH_v2((&raw mut byte).cast(), address, 0));
    ok!(cuMemsetD8_v2(address, 1, 0));
    ok!(cuMemcpyDtoDAsync_v2(address, address + 8, 0, std::ptr::null_mut()));
    Ok(())
}

fn bad_device_address() -> Result {
    gpu::start()?;
    let (host, mut other) = (0_u64, 0_u64);
    let address = &raw const host as u64;
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemcpyHtoD_v2(0, (&raw const other).cast(), 8));
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH_v2((&raw mut other).cast(), 0, 8));
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemsetD8_v2(address, 0, 8));
    gpu::alloc(64).map(|_| ())
}

fn beyond_the_end() -> Result {
    gpu::start()?;
    let address = gpu::alloc(4 << 20)?;
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemsetD8_v2(address, 0, 1 << 40));
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoD_v2(address, address, 1 << 40));
    ok!(cuMemsetD8_v2(address, 0, 4 << 20));
    Ok(())
}

fn pageable_source() -> Result {
    gpu::start()?;
    let (stream, address, wanted) = (gpu::stream()?, gpu::alloc(60_000)?, pattern(60_000));
    let mut source = wanted.clone();
    ok!(cuMemcpyHtoDAsync_v2(address, source.as_ptr().cast(), 60_000, stream));
    source.fill(0xee);
    ok!(cuStreamSynchronize(stream));
    gpu::expect_content(address, &wanted)
}

fn pageable_target() -> Result {
    gpu::start()?;
    let (stream, wanted) = (gpu::stream()?, pattern(60_000));
    let address = gpu::upload(&wanted)?;
    let mut target = vec![0_u8; 60_000];
    ok!(cuMemcpyDtoHAsync_v2(target.as_mut_ptr().cast(), address, 60_000, stream));
    ensure!(target == wanted, "the copy was not done when the call returned");
    Ok(())
}

fn pinned_is_asynchronous() -> Result {
    gpu::start()?;
    let (stream, flag, address) = (gpu::stream()?, Flag::new()?, gpu::upload(&[1_u32])?);
    let source = gpu::pinned(4)?.cast::<u32>();
    flag.hold(stream)?;
    ok!(cuMemcpyHtoDAsync_v2(address, source.cast(), 4, stream));
    gives!(CUDA_ERROR_NOT_READY, cuStreamQuery(stream));
    // SAFETY: the copy cannot run before the flag is set.
    unsafe { source.write_volatile(99) };
    flag.set(1);
    ok!(cuStreamSynchronize(stream));
    gpu::expect_content(address, &[99_u32])
}

/// A copy from host to host of nothing, for the caller to fill in.
fn empty_2d() -> CUDA_MEMCPY2D {
    CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: Kind::CU_MEMORYTYPE_HOST,
        srcHost: std::ptr::null(),
        srcDevice: 0,
        srcArray: std::ptr::null_mut(),
        srcPitch: 0,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: Kind::CU_MEMORYTYPE_HOST,
        dstHost: std::ptr::null_mut(),
        dstDevice: 0,
        dstArray: std::ptr::null_mut(),
        dstPitch: 0,
        WidthInBytes: 0,
        Height: 0,
    }
}

fn two_dimensional() -> Result {
    gpu::start()?;
    let data = pattern(50 * 20);
    let (mut address, mut pitch) = (0, 0);
    ok!(cuMemAllocPitch_v2(&raw mut address, &raw mut pitch, 64, 16, 4));
    ok!(cuMemsetD8_v2(address, 0, pitch * 16));
    let mut copy = empty_2d();
    (copy.srcHost, copy.srcPitch, copy.srcXInBytes, copy.srcY) = (data.as_ptr().cast(), 50, 3, 2);
    copy.dstMemoryType = Kind::CU_MEMORYTYPE_DEVICE;
    (copy.dstDevice, copy.dstPitch, copy.dstXInBytes, copy.dstY) = (address, pitch, 5, 1);
    (copy.WidthInBytes, copy.Height) = (40, 12);
    ok!(cuMemcpy2D_v2(&raw const copy));
    let mut back = vec![0_u8; 100 * 14];
    let mut copy = empty_2d();
    copy.srcMemoryType = Kind::CU_MEMORYTYPE_DEVICE;
    (copy.srcDevice, copy.srcPitch, copy.srcXInBytes, copy.srcY) = (address, pitch, 4, 0);
    (copy.dstHost, copy.dstPitch) = (back.as_mut_ptr().cast(), 100);
    (copy.WidthInBytes, copy.Height) = (42, 14);
    ok!(cuMemcpy2DUnaligned_v2(&raw const copy));
    for row in 0..14 {
        for column in 0..42 {
            let inside = (1..13).contains(&row) && (1..41).contains(&column);
            let wanted = if inside { data[(row - 1 + 2) * 50 + column - 1 + 3] } else { 0 };
            expect_equal(&format!("row {row}, column {column}"), back[row * 100 + column], wanted)?;
        }
    }
    Ok(())
}

fn two_dimensional_device() -> Result {
    gpu::start()?;
    let data = pattern(64 * 8);
    let (first, second) = (gpu::upload(&data)?, gpu::alloc(128 * 8)?);
    ok!(cuMemsetD8_v2(second, 0xff, 128 * 8));
    gpu::synchronize()?;
    let stream = gpu::stream()?;
    let mut copy = empty_2d();
    (copy.srcMemoryType, copy.dstMemoryType) = (Kind::CU_MEMORYTYPE_DEVICE, Kind::CU_MEMORYTYPE_DEVICE);
    (copy.srcDevice, copy.srcPitch, copy.dstDevice, copy.dstPitch) = (first, 64, second, 128);
    (copy.WidthInBytes, copy.Height) = (60, 8);
    ok!(cuMemcpy2DAsync_v2(&raw const copy, stream));
    ok!(cuStreamSynchronize(stream));
    let back = gpu::read::<u8>(second, 128 * 8)?;
    for row in 0..8 {
        let got = &back[row * 128..row * 128 + 128];
        expect_equal("a row", &got[..60], &data[row * 64..row * 64 + 60])?;
        ensure!(got[60..].iter().all(|byte| *byte == 0xff), "row {row} is too long");
    }
    Ok(())
}

fn bad_pitch() -> Result {
    gpu::start()?;
    let (data, address) = (pattern(1000), gpu::alloc(1000)?);
    let mut copy = empty_2d();
    (copy.srcHost, copy.srcPitch) = (data.as_ptr().cast(), 10);
    copy.dstMemoryType = Kind::CU_MEMORYTYPE_DEVICE;
    (copy.dstDevice, copy.dstPitch, copy.WidthInBytes, copy.Height) = (address, 100, 20, 5);
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemcpy2D_v2(&raw const copy));
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemcpy2D_v2(std::ptr::null()));
    Ok(())
}

fn three_dimensional() -> Result {
    gpu::start()?;
    // The host's box is 20 x 10 x 6, the device's 32 x 8 x 5; 12 x 4 x 3 are copied.
    let data = pattern(20 * 10 * 6);
    let address = gpu::alloc(32 * 8 * 5)?;
    ok!(cuMemsetD8_v2(address, 0, 32 * 8 * 5));
    let mut copy = copy_params(address, 0, 0);
    copy.srcMemoryType = Kind::CU_MEMORYTYPE_HOST;
    (copy.srcHost, copy.srcPitch, copy.srcHeight) = (data.as_ptr().cast(), 20, 10);
    (copy.srcXInBytes, copy.srcY, copy.srcZ) = (2, 3, 1);
    (copy.dstDevice, copy.dstPitch, copy.dstHeight) = (address, 32, 8);
    (copy.dstXInBytes, copy.dstY, copy.dstZ) = (7, 2, 1);
    (copy.WidthInBytes, copy.Height, copy.Depth) = (12, 4, 3);
    ok!(cuMemcpy3D_v2(&raw const copy));
    let back = gpu::read::<u8>(address, 32 * 8 * 5)?;
    for (index, got) in back.iter().enumerate() {
        let (x, y, z) = (index % 32, index / 32 % 8, index / 256);
        let inside = (7..19).contains(&x) && (2..6).contains(&y) && (1..4).contains(&z);
        let wanted = if inside { data[z * 200 + (y - 2 + 3) * 20 + x - 7 + 2] } else { 0 };
        expect_equal(&format!("at {x}, {y}, {z}"), *got, wanted)?;
    }
    Ok(())
}

fn copy_between(first: CUcontext, second: CUcontext) -> Result {
    ok!(cuCtxSetCurrent(first));
    let source = gpu::upload(&pattern(5000))?;
    ok!(cuCtxSetCurrent(second));
    let target = gpu::alloc(5000)?;
    ok!(cuMemcpyPeer(target, second, source, first, 5000));
    gpu::expect_content(target, &pattern(5000))?;
    ok!(cuMemsetD8_v2(target, 9, 5000));
    ok!(cuMemcpyPeerAsync(source, first, target, second, 5000, std::ptr::null_mut()));
    ok!(cuCtxSynchronize());
    ok!(cuCtxSetCurrent(first));
    ok!(cuCtxSynchronize());
    gpu::expect_content(source, &[9_u8; 5000])
}

fn peer_same_device() -> Result {
    let first = gpu::start()?;
    let mut second = std::ptr::null_mut();
    ok!(cuCtxCreate_v2(&raw mut second, 0, 0));
    copy_between(first, second)
}

fn peer() -> Result {
    let first = gpu::start()?;
    let device = gpu::second_device()?;
    let mut second = std::ptr::null_mut();
    ok!(cuDevicePrimaryCtxRetain(&raw mut second, device));
    copy_between(first, second)
}

fn waits_for_kernels() -> Result {
    gpu::start()?;
    let affine = gpu::function(kernels::BASIC, "affine")?;
    let address = gpu::upload(&[1_u32])?;
    for _ in 0..10 {
        gpu::launch(affine, 1, 1, std::ptr::null_mut(), &[address, 2, 1])?;
    }
    gpu::expect_content(address, &[(2_u32 << 10) - 1])
}

fn large() -> Result {
    gpu::start()?;
    let data = pattern((40 << 20) + 3);
    let address = gpu::upload(&data)?;
    let other = gpu::alloc(data.len())?;
    ok!(cuMemcpyDtoD_v2(other, address, data.len()));
    let back = gpu::read::<u8>(other, data.len())?;
    ensure!(back == data, "the content differs");
    Ok(())
}

fn batch() -> Result {
    gpu::start()?;
    gpu::needs_driver(12080)?;
    let (stream, source) = (gpu::stream()?, gpu::upload(&pattern(3000))?);
    let target = gpu::alloc(3000)?;
    let mut sources = [source, source + 1000, source + 2000];
    let mut targets = [target + 2000, target, target + 1000];
    let (mut sizes, mut first, mut failed_at) = ([1000; 3], 0, 0);
    // SAFETY: integers and enums; the one enum that is read is set below, and 0 is a value of all of them.
    let mut attributes: std::mem::MaybeUninit<CUmemcpyAttributes> = std::mem::MaybeUninit::zeroed();
    // SAFETY: the access order is the structure's first integer: CU_MEMCPY_SRC_ACCESS_ORDER_STREAM.
    unsafe { attributes.as_mut_ptr().cast::<u32>().write(1) };
    let code = cu!(cuMemcpyBatchAsync(
        targets.as_mut_ptr(),
        sources.as_mut_ptr(),
        sizes.as_mut_ptr(),
        3,
        attributes.as_mut_ptr(),
        &raw mut first,
        1,
        &raw mut failed_at,
        stream,
    ));
    if gpu::name_of(code) == "CUDA_ERROR_NOT_SUPPORTED" {
        return skipped("the driver does not support batches of copies");
    }
    expect_equal("cuMemcpyBatchAsync", gpu::name_of(code), "CUDA_SUCCESS".into())?;
    ok!(cuStreamSynchronize(stream));
    let data = pattern(3000);
    let wanted = [&data[1000..3000], &data[..1000]].concat();
    gpu::expect_content(target, &wanted)
}

fn widths() -> Result {
    gpu::start()?;
    let address = gpu::alloc(64)?;
    ok!(cuMemsetD8_v2(address, 0x11, 64));
    ok!(cuMemsetD16_v2(address + 8, 0x2233, 4));
    ok!(cuMemsetD32_v2(address + 32, 0x4455_6677, 2));
    let mut wanted = [0x11_u8; 64];
    wanted[8..16].copy_from_slice(&[0x33, 0x22, 0x33, 0x22, 0x33, 0x22, 0x33, 0x22]);
    wanted[32..40].copy_from_slice(&[0x77, 0x66, 0x55, 0x44, 0x77, 0x66, 0x55, 0x44]);
    gpu::expect_content(address, &wanted)
}

fn alignment() -> Result {
    gpu::start()?;
    let address = gpu::alloc(64)?;
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemsetD16_v2(address + 1, 0, 4));
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemsetD32_v2(address + 2, 0, 4));
    ok!(cuMemsetD8_v2(address + 1, 0, 4));
    Ok(())
}

fn fill_2d() -> Result {
    gpu::start()?;
    let address = gpu::alloc(256 * 8)?;
    ok!(cuMemsetD8_v2(address, 0xaa, 256 * 8));
    ok!(cuMemsetD2D8_v2(address, 256, 1, 10, 3));
    ok!(cuMemsetD2D16_v2(address + 3 * 256, 256, 0x0202, 5, 2));
    ok!(cuMemsetD2D32_v2(address + 5 * 256, 256, 0x0303_0303, 4, 3));
    let back = gpu::read::<u8>(address, 256 * 8)?;
    for (row, (value, width)) in
        [(1, 10), (1, 10), (1, 10), (2, 10), (2, 10), (3, 16), (3, 16), (3, 16)].into_iter().enumerate()
    {
        let got = &back[row * 256..row * 256 + 256];
        ensure!(got[..width].iter().all(|byte| *byte == value), "row {row}: {:?}", &got[..width]);
        ensure!(got[width..].iter().all(|byte| *byte == 0xaa), "row {row} is too long");
    }
    Ok(())
}

fn fill_bad_pitch() -> Result {
    gpu::start()?;
    let address = gpu::alloc(4096)?;
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemsetD2D8_v2(address, 10, 0, 20, 5));
    Ok(())
}

fn fill_asynchronous() -> Result {
    gpu::start()?;
    let (stream, address) = (gpu::stream()?, gpu::alloc(4096)?);
    for value in 0..=200 {
        ok!(cuMemsetD8Async(address, value, 4096, stream));
    }
    ok!(cuMemsetD2D8Async(address, 64, 1, 32, 2, stream));
    ok!(cuStreamSynchronize(stream));
    gpu::expect_content(address, &[1_u8; 32])?;
    gpu::expect_content(address + 96, &[200_u8; 1000])
}
