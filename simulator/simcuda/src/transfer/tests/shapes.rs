//! What ends up where.

use cuda_abi::sys::{self, CUmemorytype};
use proptest::prelude::*;

use super::super::testing::{Device, call, pattern};
use crate::testing;

#[test]
fn plain_copies_bring_every_byte() {
    let _context = testing::context();
    for len in [1, 2, 255, 4096, 5_000_001] {
        let bytes = pattern(len, 1);
        let (first, second) = (Device::with(&bytes), Device::with(&pattern(len, 2)));
        assert_eq!(first.read(), bytes);
        call!(cuMemcpyDtoD_v2(second.address, first.address, len)).unwrap();
        assert_eq!(second.read(), bytes);
        let mut back = vec![0; len];
        call!(cuMemcpy(back.as_mut_ptr() as u64, second.address, len)).unwrap();
        assert_eq!(back, bytes);
        let mut copy = vec![0; len];
        call!(cuMemcpy(copy.as_mut_ptr() as u64, back.as_ptr() as u64, len)).unwrap();
        assert_eq!(copy, bytes);
        first.free();
        second.free();
    }
}

#[test]
fn a_part_is_copied_and_the_rest_stays() {
    let _context = testing::context();
    let (mut model, source) = (pattern(1000, 1), pattern(1000, 9));
    let device = Device::with(&model);
    call!(cuMemcpyHtoD_v2(device.address + 123, source.as_ptr().cast(), 456)).unwrap();
    model[123..123 + 456].copy_from_slice(&source[..456]);
    assert_eq!(device.read(), model);
}

#[test]
fn overlapping_copies_are_as_if_buffered() {
    let _context = testing::context();
    // More than one piece.
    let len = 10 << 20;
    for (from, to) in [(0, 1000), (1000, 0), (0, 5 << 20), (5 << 20, 0), (77, 77)] {
        let mut model = pattern(len, 3);
        let device = Device::with(&model);
        let count = len - from.max(to);
        call!(cuMemcpyDtoD_v2(device.address + to as u64, device.address + from as u64, count)).unwrap();
        model.copy_within(from..from + count, to);
        assert!(device.read() == model, "{from} to {to}");
        device.free();
    }
}

/// Two adjacent mappings of 2 MiB with memory of their own.
fn two_mappings() -> Device {
    const PAGE: usize = 2 << 20;
    let location = sys::CUmemLocation {
        type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        __bindgen_anon_1: sys::CUmemLocation_st__bindgen_ty_1 { id: 0 },
    };
    let properties = sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location,
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    };
    let mut address = 0;
    call!(cuMemAddressReserve(&raw mut address, 2 * PAGE, 0, 0, 0)).unwrap();
    for place in [address, address + PAGE as u64] {
        let mut handle = 0;
        call!(cuMemCreate(&raw mut handle, PAGE, &raw const properties, 0)).unwrap();
        call!(cuMemMap(place, PAGE, 0, handle, 0)).unwrap();
        call!(cuMemRelease(handle)).unwrap();
    }
    let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    let access = sys::CUmemAccessDesc { location, flags };
    call!(cuMemSetAccess(address, 2 * PAGE, &raw const access, 1)).unwrap();
    Device { address, len: 2 * PAGE }
}

#[test]
fn copies_and_fills_go_across_adjacent_mappings() {
    let _context = testing::context();
    let device = two_mappings();
    let mut model = pattern(device.len, 5);
    device.write(&model);
    assert!(device.read() == model);

    let border = device.len / 2;
    call!(cuMemsetD32_v2(device.address + border as u64 - 8, 0x0403_0201, 4)).unwrap();
    for element in model[border - 8..border + 8].chunks_mut(4) {
        element.copy_from_slice(&[1, 2, 3, 4]);
    }
    assert!(device.read() == model);

    // Backwards, since the target overlaps the source from above.
    let (from, to, len) = (border - 5000, border - 2000, 6000);
    call!(cuMemcpyDtoD_v2(device.address + to as u64, device.address + from as u64, len)).unwrap();
    model.copy_within(from..from + len, to);
    assert!(device.read() == model);
}

#[test]
fn memory_of_another_device_is_reached_without_peer_access() {
    let there = testing::context_on(1);
    let far = Device::with(&pattern(3000, 1));
    let here = testing::context_on(0);
    let near = Device::with(&pattern(3000, 2));
    let contexts = (here.handle as _, there.handle as _);
    call!(cuMemcpyPeer(near.address, contexts.0, far.address, contexts.1, 2000)).unwrap();
    let mut model = pattern(3000, 2);
    model[..2000].copy_from_slice(&pattern(3000, 1)[..2000]);
    assert_eq!(near.read(), model);

    call!(cuMemcpyDtoD_v2(far.address, near.address, 3000)).unwrap();
    assert_eq!(far.read(), model);
}

/// One side of a random copy: where the box of bytes lies in a buffer.
#[derive(Clone, Copy, Debug)]
struct Box3 {
    kind: CUmemorytype,
    is_device: bool,
    origin: [usize; 3],
    pitch: usize,
    rows: usize,
}

impl Box3 {
    fn place(&self, slice: usize, row: usize) -> usize {
        let [x, y, z] = self.origin;
        ((z + slice) * self.rows + y + row) * self.pitch + x
    }
}

fn any_box(extent: [usize; 3]) -> impl Strategy<Value = Box3> {
    let kinds = prop_oneof![
        Just((CUmemorytype::CU_MEMORYTYPE_HOST, false)),
        Just((CUmemorytype::CU_MEMORYTYPE_DEVICE, true)),
        Just((CUmemorytype::CU_MEMORYTYPE_UNIFIED, false)),
        Just((CUmemorytype::CU_MEMORYTYPE_UNIFIED, true)),
    ];
    (kinds, 0..9_usize, 0..4_usize, 0..3_usize, 0..7_usize, 0..3_usize).prop_map(
        move |((kind, is_device), x, y, z, more_pitch, more_rows)| Box3 {
            kind,
            is_device,
            origin: [x, y, z],
            pitch: x + extent[0] + more_pitch,
            rows: y + extent[1] + more_rows,
        },
    )
}

fn any_copy() -> impl Strategy<Value = ([usize; 3], Box3, Box3)> {
    [1..20_usize, 1..6_usize, 1..5_usize]
        .prop_flat_map(|extent| (Just(extent), any_box(extent), any_box(extent)))
}

/// A buffer that is large enough for every box, on its side of the bus.
enum Buffer {
    Host(Vec<u8>),
    Device(Device),
}

const BUFFER_BYTES: usize = 40 * 20 * 10;

impl Buffer {
    fn new(side: &Box3, bytes: &[u8]) -> Self {
        if side.is_device { Self::Device(Device::with(bytes)) } else { Self::Host(bytes.to_vec()) }
    }

    fn address(&self) -> u64 {
        match self {
            Self::Host(bytes) => bytes.as_ptr() as u64,
            Self::Device(device) => device.address,
        }
    }

    fn into_bytes(self) -> Vec<u8> {
        match self {
            Self::Host(bytes) => bytes,
            Self::Device(device) => {
                let bytes = device.read();
                device.free();
                bytes
            }
        }
    }
}

fn params(extent: [usize; 3], from: (&Box3, u64), to: (&Box3, u64)) -> sys::CUDA_MEMCPY3D {
    sys::CUDA_MEMCPY3D {
        srcXInBytes: from.0.origin[0],
        srcY: from.0.origin[1],
        srcZ: from.0.origin[2],
        srcLOD: 0,
        srcMemoryType: from.0.kind,
        srcHost: from.1 as *const _,
        srcDevice: from.1,
        srcArray: std::ptr::null_mut(),
        reserved0: std::ptr::null_mut(),
        srcPitch: from.0.pitch,
        srcHeight: from.0.rows,
        dstXInBytes: to.0.origin[0],
        dstY: to.0.origin[1],
        dstZ: to.0.origin[2],
        dstLOD: 0,
        dstMemoryType: to.0.kind,
        dstHost: to.1 as *mut _,
        dstDevice: to.1,
        dstArray: std::ptr::null_mut(),
        reserved1: std::ptr::null_mut(),
        dstPitch: to.0.pitch,
        dstHeight: to.0.rows,
        WidthInBytes: extent[0],
        Height: extent[1],
        Depth: extent[2],
    }
}

/// Runs the copy on buffers and on vectors.
fn compare(
    extent: [usize; 3],
    from: &Box3,
    to: &Box3,
    copy: impl FnOnce(&sys::CUDA_MEMCPY3D),
) -> Result<(), TestCaseError> {
    let (source, mut model) = (pattern(BUFFER_BYTES, 1), pattern(BUFFER_BYTES, 77));
    let (source_buffer, target_buffer) = (Buffer::new(from, &source), Buffer::new(to, &model));
    copy(&params(extent, (from, source_buffer.address()), (to, target_buffer.address())));
    for slice in 0..extent[2] {
        for row in 0..extent[1] {
            let (source_at, target_at) = (from.place(slice, row), to.place(slice, row));
            model[target_at..target_at + extent[0]]
                .copy_from_slice(&source[source_at..source_at + extent[0]]);
        }
    }
    prop_assert!(target_buffer.into_bytes() == model);
    prop_assert!(source_buffer.into_bytes() == source);
    Ok(())
}

fn as_2d(params: &sys::CUDA_MEMCPY3D) -> sys::CUDA_MEMCPY2D {
    sys::CUDA_MEMCPY2D {
        srcXInBytes: params.srcXInBytes,
        srcY: params.srcY,
        srcMemoryType: params.srcMemoryType,
        srcHost: params.srcHost,
        srcDevice: params.srcDevice,
        srcArray: params.srcArray,
        srcPitch: params.srcPitch,
        dstXInBytes: params.dstXInBytes,
        dstY: params.dstY,
        dstMemoryType: params.dstMemoryType,
        dstHost: params.dstHost,
        dstDevice: params.dstDevice,
        dstArray: params.dstArray,
        dstPitch: params.dstPitch,
        WidthInBytes: params.WidthInBytes,
        Height: params.Height,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn boxes_of_three_dimensions((extent, from, to) in any_copy()) {
        let _context = testing::context();
        compare(extent, &from, &to, |params| call!(cuMemcpy3D_v2(params)).unwrap())?;
    }

    #[test]
    fn boxes_in_a_stream((extent, from, to) in any_copy()) {
        let _context = testing::context();
        compare(extent, &from, &to, |params| {
            let stream = super::super::testing::stream();
            call!(cuMemcpy3DAsync_v2(params, stream)).unwrap();
            call!(cuStreamSynchronize(stream)).unwrap();
        })?;
    }

    #[test]
    fn boxes_of_two_dimensions((extent, from, to) in any_copy()) {
        let _context = testing::context();
        let flat = |side: Box3| Box3 { origin: [side.origin[0], side.origin[1], 0], ..side };
        compare([extent[0], extent[1], 1], &flat(from), &flat(to), |params| {
            call!(cuMemcpy2D_v2(&as_2d(params))).unwrap();
        })?;
    }

    #[test]
    fn fills_of_rows(
        element in 0..3_usize,
        value: u32,
        width in 0..30_usize,
        height in 0..6_usize,
        more_pitch in 0..4_usize,
        offset in 0..5_usize,
    ) {
        let _context = testing::context();
        let element_bytes = 1 << element;
        let (pitch, offset) = ((width + more_pitch) * element_bytes, offset * element_bytes);
        let mut model = pattern(2000, 4);
        let device = Device::with(&model);
        let address = device.address + offset as u64;
        match element_bytes {
            1 => call!(cuMemsetD2D8_v2(address, pitch, value as u8, width, height)),
            2 => call!(cuMemsetD2D16_v2(address, pitch, value as u16, width, height)),
            _ => call!(cuMemsetD2D32_v2(address, pitch, value, width, height)),
        }
        .unwrap();
        for row in 0..height {
            for column in 0..width {
                let at = offset + row * pitch + column * element_bytes;
                model[at..at + element_bytes].copy_from_slice(&value.to_le_bytes()[..element_bytes]);
            }
        }
        prop_assert!(device.read() == model);
        device.free();
    }
}

#[test]
fn a_long_fill_keeps_its_phase() {
    let _context = testing::context();
    let device = Device::new(50_000);
    call!(cuMemsetD8_v2(device.address, 9, device.len)).unwrap();
    call!(cuMemsetD32_v2(device.address + 4, 0x0403_0201, 12_000)).unwrap();
    call!(cuMemsetD16_v2(device.address + 2, 0x0605, 1)).unwrap();
    let bytes = device.read();
    assert_eq!(bytes[..8], [9, 9, 5, 6, 1, 2, 3, 4]);
    assert!(bytes[4..48_004].chunks(4).all(|element| element == [1, 2, 3, 4]));
    assert!(bytes[48_004..].iter().all(|byte| *byte == 9));
}

#[test]
fn a_pitch_of_nothing_is_a_packed_one() {
    let _context = testing::context();
    let extent = [8, 3, 1];
    let side = |kind, is_device, pitch| Box3 { kind, is_device, origin: [2, 1, 0], pitch, rows: 0 };
    let packed = side(CUmemorytype::CU_MEMORYTYPE_DEVICE, true, 0);
    let bytes = pattern(100, 6);
    let device = Device::with(&bytes);
    let mut target = vec![0; 100];
    let host = side(CUmemorytype::CU_MEMORYTYPE_HOST, false, 20);
    let params = params(extent, (&packed, device.address), (&host, target.as_mut_ptr() as u64));
    call!(cuMemcpy3D_v2(&raw const params)).unwrap();
    for row in 0..3 {
        let (from, to) = ((row + 1) * 10 + 2, (row + 1) * 20 + 2);
        assert_eq!(target[to..to + 8], bytes[from..from + 8]);
    }
}
