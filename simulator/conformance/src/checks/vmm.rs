//! Virtual memory management, rule by rule.

use cuda_abi::sys::CUmemAccess_flags as Access;

use crate::check::{Check, Result, check, expect_equal};
use crate::vmm::{
    READ_WRITE, access, allow, create, granularity, map, mapped, place, properties, reserve, unmap,
};
use crate::{cu, ensure, gives, gpu, kernels, ok, refuses, vmm};

/// The checks of this area.
pub const CHECKS: &[Check] = &[
    check(
        "vmm/granularity",
        "the granularity is a power of two, the recommended one a multiple of it",
        granularity_rules,
    ),
    check(
        "vmm/round-trip",
        "reserve, create, map, set access, use, unmap, release, free (programming guide)",
        round_trip,
    ),
    check("vmm/no-context", "physical memory and addresses need no current context", no_context),
    check(
        "vmm/reserve-size",
        "a reservation's size is a multiple of the granularity (reference)",
        reserve_size,
    ),
    check(
        "vmm/reserve-alignment",
        "an alignment is a power of two (reference, cuMemAddressReserve)",
        reserve_alignment,
    ),
    check("vmm/reserve-aligned", "a reservation has the alignment asked for", reserve_aligned),
    check(
        "vmm/reserve-hint",
        "a hint that is taken leads to other addresses, without an error",
        reserve_hint,
    ),
    check(
        "vmm/address-free-whole",
        "only a whole reservation can be freed (reference, cuMemAddressFree)",
        free_whole,
    ),
    check("vmm/address-free-mapped", "a reservation with mappings cannot be freed", free_mapped),
    check(
        "vmm/create-size",
        "physical memory comes in multiples of the granularity (reference, cuMemCreate)",
        create_size,
    ),
    check(
        "vmm/create-too-much",
        "more than there is, is CUDA_ERROR_OUT_OF_MEMORY (reference, cuMemCreate)",
        create_too_much,
    ),
    check(
        "vmm/create-bad-device",
        "physical memory on no device is an error (reference, cuMemCreate)",
        create_bad_device,
    ),
    check("vmm/create-flags", "cuMemCreate's flags must be 0 (reference)", create_flags),
    check("vmm/map-offset", "cuMemMap's offset must be 0 (reference)", map_offset),
    check(
        "vmm/map-alignment",
        "cuMemMap's address and size are multiples of the granularity (source: reference, cuMemMap)",
        map_alignment,
    ),
    check("vmm/map-outside", "what is mapped lies inside one reservation (reference, cuMemMap)", map_outside),
    check("vmm/map-twice", "mapping over a mapping is an error", map_twice),
    check(
        "vmm/map-more-than-handle",
        "no more than the handle's size is mapped (source: reference, cuMemMap)",
        map_more,
    ),
    check("vmm/two-addresses", "one handle mapped at two addresses is the same memory", two_addresses),
    check(
        "vmm/unmap-part",
        "unmapping part of a mapping is CUDA_ERROR_INVALID_VALUE (reference, cuMemUnmap)",
        unmap_part,
    ),
    check(
        "vmm/unmap-several",
        "several whole mappings are unmapped by one call (reference, cuMemUnmap)",
        unmap_several,
    ),
    check(
        "vmm/unmap-nothing",
        "unmapping a reservation without memory is CUDA_ERROR_INVALID_VALUE, or nothing (580.159.04); memory can be mapped there afterwards",
        unmap_nothing,
    ),
    check("vmm/access-needed", "memory without access cannot be used (reference, cuMemMap)", access_needed),
    check(
        "vmm/access-unmapped",
        "access to what is not mapped is CUDA_ERROR_INVALID_VALUE (reference)",
        access_unmapped,
    ),
    check("vmm/access-flags", "cuMemGetAccess gives what cuMemSetAccess set (reference)", access_flags),
    check("vmm/access-goes-with-mapping", "a new mapping at the same address has no access yet", access_goes),
    check(
        "vmm/release-before-unmap",
        "memory lives until it is released and unmapped (reference, cuMemRelease)",
        release_first,
    ),
    check(
        "vmm/retain",
        "cuMemRetainAllocationHandle gives the handle of an address, to be released as well (reference)",
        retain,
    ),
    check("vmm/retain-plain", "there is no handle of cuMemAlloc's memory", retain_plain),
    check(
        "vmm/properties",
        "cuMemGetAllocationPropertiesFromHandle gives what cuMemCreate was given",
        properties_of,
    ),
    check("vmm/accounting", "physical memory counts while it lives, addresses do not", accounting),
    check("vmm/across-mappings", "copies and fills run across adjacent mappings", across_mappings),
    check("vmm/keeps-content", "content stays when memory is unmapped and mapped elsewhere", keeps_content),
    check("vmm/not-cuMemFree", "cuMemFree of a mapping is CUDA_ERROR_INVALID_VALUE", not_mem_free),
    check(
        "vmm/released-handle",
        "a process that maps memory by a handle that it has released is ended by a signal (source: seen with 580.159.04)",
        released_handle,
    ),
    check("vmm/peer-access", "access is given device by device (programming guide)", peer_access),
];

fn granularity_rules() -> Result {
    gpu::start()?;
    let smallest = granularity()?;
    ensure!(smallest.is_power_of_two(), "granularity {smallest}");
    let (properties, mut recommended) = (properties(0, false), 0);
    ok!(cuMemGetAllocationGranularity(&raw mut recommended, &raw const properties, 1));
    ensure!(recommended.is_multiple_of(smallest), "recommended {recommended}, smallest {smallest}");
    gives!(
        CUDA_ERROR_INVALID_VALUE,
        cuMemGetAllocationGranularity(std::ptr::null_mut(), &raw const properties, 0)
    );
    Ok(())
}

fn round_trip() -> Result {
    gpu::start()?;
    let unit = granularity()?;
    let (address, handle) = mapped(2 * unit, false)?;
    let data: Vec<u32> = (0..1000).collect();
    gpu::write(address + unit as u64 - 2000, &data)?;
    gpu::expect_content(address + unit as u64 - 2000, &data)?;
    let store = gpu::function(kernels::BASIC, "store")?;
    gpu::launch(store, 1, 1, std::ptr::null_mut(), &[address, 77])?;
    gpu::expect_content(address, &[77_u32])?;
    unmap(address, 2 * unit, handle)
}

fn no_context() -> Result {
    ok!(cuInit(0));
    let unit = granularity()?;
    let (address, handle) = mapped(unit, false)?;
    unmap(address, unit, handle)
}

fn released_handle() -> Result {
    let (signal, outcome) = vmm::end_of_using_released("map")?;
    ensure!(signal.is_some(), "{outcome}");
    Ok(())
}

fn reserve_size() -> Result {
    gpu::start()?;
    let unit = granularity()?;
    let mut address = 0;
    for size_bytes in [0, 1, unit + 1, unit - 4096] {
        gives!(CUDA_ERROR_INVALID_VALUE, cuMemAddressReserve(&raw mut address, size_bytes, 0, 0, 0));
    }
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemAddressReserve(std::ptr::null_mut(), unit, 0, 0, 0));
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemAddressReserve(&raw mut address, unit, 0, 0, 1));
    Ok(())
}

fn reserve_alignment() -> Result {
    gpu::start()?;
    let unit = granularity()?;
    let mut address = 0;
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemAddressReserve(&raw mut address, unit, 3 * unit, 0, 0));
    Ok(())
}

fn reserve_aligned() -> Result {
    gpu::start()?;
    let unit = granularity()?;
    for alignment in [unit, 4 * unit, 64 * unit] {
        let mut address = 0;
        ok!(cuMemAddressReserve(&raw mut address, unit, alignment, 0, 0));
        ensure!(address.is_multiple_of(alignment as u64), "{address:#x} is not aligned to {alignment:#x}");
        ok!(cuMemAddressFree(address, unit));
    }
    Ok(())
}

fn reserve_hint() -> Result {
    gpu::start()?;
    let unit = granularity()?;
    let taken = reserve(unit)?;
    let mut address = 0;
    ok!(cuMemAddressReserve(&raw mut address, unit, 0, taken, 0));
    ensure!(address != taken && address != 0, "{taken:#x} was given twice");
    Ok(())
}

fn free_whole() -> Result {
    gpu::start()?;
    let unit = granularity()?;
    let address = reserve(4 * unit)?;
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemAddressFree(address, unit));
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemAddressFree(address + unit as u64, 3 * unit));
    ok!(cuMemAddressFree(address, 4 * unit));
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemAddressFree(address, 4 * unit));
    Ok(())
}

fn free_mapped() -> Result {
    gpu::start()?;
    let unit = granularity()?;
    let (address, handle) = mapped(unit, false)?;
    refuses!(cuMemAddressFree(address, unit));
    unmap(address, unit, handle)
}

fn create_size() -> Result {
    gpu::start()?;
    let (unit, properties, mut handle) = (granularity()?, properties(0, false), 0);
    for size_bytes in [0, 1, unit + 1] {
        gives!(CUDA_ERROR_INVALID_VALUE, cuMemCreate(&raw mut handle, size_bytes, &raw const properties, 0));
    }
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemCreate(&raw mut handle, unit, std::ptr::null(), 0));
    Ok(())
}

fn create_too_much() -> Result {
    gpu::start()?;
    let (unit, properties, mut handle) = (granularity()?, properties(0, false), 0);
    let size_bytes = (gpu::free_bytes()? / unit + 64) * unit;
    gives!(CUDA_ERROR_OUT_OF_MEMORY, cuMemCreate(&raw mut handle, size_bytes, &raw const properties, 0));
    create(unit, false).map(|_| ())
}

fn create_bad_device() -> Result {
    gpu::start()?;
    let (unit, properties, mut handle) = (granularity()?, properties(1000, false), 0);
    gives!(
        CUDA_ERROR_INVALID_VALUE | CUDA_ERROR_INVALID_DEVICE,
        cuMemCreate(&raw mut handle, unit, &raw const properties, 0)
    );
    Ok(())
}

fn create_flags() -> Result {
    gpu::start()?;
    let (unit, properties, mut handle) = (granularity()?, properties(0, false), 0);
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemCreate(&raw mut handle, unit, &raw const properties, 1));
    Ok(())
}

fn map_offset() -> Result {
    gpu::start()?;
    let unit = granularity()?;
    let (address, handle) = (reserve(unit)?, create(2 * unit, false)?);
    gives!(CUDA_ERROR_INVALID_VALUE | CUDA_ERROR_NOT_SUPPORTED, cuMemMap(address, unit, unit, handle, 0));
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemMap(address, unit, 0, handle, 1));
    Ok(())
}

fn map_alignment() -> Result {
    gpu::start()?;
    let unit = granularity()?;
    let (address, handle) = (reserve(4 * unit)?, create(2 * unit, false)?);
    gives!(CUDA_ERROR_INVALID_VALUE | CUDA_ERROR_NOT_SUPPORTED, cuMemMap(address + 4096, unit, 0, handle, 0));
    gives!(CUDA_ERROR_INVALID_VALUE | CUDA_ERROR_NOT_SUPPORTED, cuMemMap(address, unit + 4096, 0, handle, 0));
    gives!(CUDA_ERROR_INVALID_VALUE | CUDA_ERROR_NOT_SUPPORTED, cuMemMap(address, 0, 0, handle, 0));
    Ok(())
}

fn map_outside() -> Result {
    gpu::start()?;
    let unit = granularity()?;
    let (address, handle) = (reserve(unit)?, create(2 * unit, false)?);
    refuses!(cuMemMap(address, 2 * unit, 0, handle, 0));
    ok!(cuMemAddressFree(address, unit));
    refuses!(cuMemMap(address, unit, 0, handle, 0));
    Ok(())
}

fn map_twice() -> Result {
    gpu::start()?;
    let unit = granularity()?;
    let address = reserve(2 * unit)?;
    let (first, second) = (create(unit, false)?, create(2 * unit, false)?);
    map(address, unit, first)?;
    refuses!(cuMemMap(address, unit, 0, first, 0));
    refuses!(cuMemMap(address, 2 * unit, 0, second, 0));
    map(address + unit as u64, unit, first)
}

fn map_more() -> Result {
    gpu::start()?;
    let unit = granularity()?;
    let (address, handle) = (reserve(2 * unit)?, create(unit, false)?);
    gives!(CUDA_ERROR_INVALID_VALUE | CUDA_ERROR_NOT_SUPPORTED, cuMemMap(address, 2 * unit, 0, handle, 0));
    Ok(())
}

fn two_addresses() -> Result {
    gpu::start()?;
    let unit = granularity()?;
    let (first, handle) = mapped(unit, false)?;
    let second = reserve(unit)?;
    map(second, unit, handle)?;
    allow(second, unit, READ_WRITE)?;
    ok!(cuMemsetD32_v2(first, 0x1234_5678, unit / 4));
    gpu::synchronize()?;
    gpu::expect_content(second, &[0x1234_5678_u32; 16])
}

fn unmap_part() -> Result {
    gpu::start()?;
    let unit = granularity()?;
    let (address, handle) = mapped(2 * unit, false)?;
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemUnmap(address, unit));
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemUnmap(address + unit as u64, unit));
    gpu::write(address, &[1_u32])?;
    unmap(address, 2 * unit, handle)
}

fn unmap_several() -> Result {
    gpu::start()?;
    let unit = granularity()?;
    let (address, first, second) = (reserve(2 * unit)?, create(unit, false)?, create(unit, false)?);
    map(address, unit, first)?;
    map(address + unit as u64, unit, second)?;
    ok!(cuMemUnmap(address, 2 * unit));
    ok!(cuMemAddressFree(address, 2 * unit));
    Ok(())
}

fn unmap_nothing() -> Result {
    gpu::start()?;
    let unit = granularity()?;
    let address = reserve(unit)?;
    gives!(CUDA_SUCCESS | CUDA_ERROR_INVALID_VALUE, cuMemUnmap(address, unit));
    map(address, unit, create(unit, false)?)?;
    allow(address, unit, READ_WRITE)?;
    gpu::write(address, &[7_u32])?;
    gpu::expect_content(address, &[7_u32])
}

fn access_needed() -> Result {
    gpu::start()?;
    let unit = granularity()?;
    let (address, handle) = (reserve(unit)?, create(unit, false)?);
    map(address, unit, handle)?;
    let store = gpu::function(kernels::BASIC, "store")?;
    gpu::launch(store, 1, 1, std::ptr::null_mut(), &[address, 1])?;
    gives!(CUDA_ERROR_ILLEGAL_ADDRESS, cuCtxSynchronize());
    Ok(())
}

fn access_unmapped() -> Result {
    gpu::start()?;
    let unit = granularity()?;
    let (address, access) = (reserve(2 * unit)?, access(0, READ_WRITE));
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemSetAccess(address, unit, &raw const access, 1));
    map(address, unit, create(unit, false)?)?;
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemSetAccess(address, 2 * unit, &raw const access, 1));
    Ok(())
}

fn access_flags() -> Result {
    gpu::start()?;
    let unit = granularity()?;
    let (address, handle) = (reserve(unit)?, create(unit, false)?);
    map(address, unit, handle)?;
    let (location, mut flags) = (place(0), 77);
    ok!(cuMemGetAccess(&raw mut flags, &raw const location, address));
    expect_equal("at first", flags, 0)?;
    allow(address, unit, READ_WRITE)?;
    ok!(cuMemGetAccess(&raw mut flags, &raw const location, address));
    expect_equal("set to read and write", flags, 3)?;
    allow(address, unit, Access::CU_MEM_ACCESS_FLAGS_PROT_NONE)?;
    ok!(cuMemGetAccess(&raw mut flags, &raw const location, address));
    expect_equal("set to none", flags, 0)
}

fn access_goes() -> Result {
    gpu::start()?;
    let unit = granularity()?;
    let (address, handle) = mapped(unit, false)?;
    ok!(cuMemUnmap(address, unit));
    map(address, unit, handle)?;
    let (location, mut flags) = (place(0), 77);
    ok!(cuMemGetAccess(&raw mut flags, &raw const location, address));
    expect_equal("access", flags, 0)
}

fn release_first() -> Result {
    gpu::start()?;
    let unit = granularity()?;
    let before = gpu::free_bytes()?;
    let (address, handle) = mapped(8 * unit, false)?;
    ok!(cuMemRelease(handle));
    gpu::write(address, &[5_u32])?;
    gpu::expect_content(address, &[5_u32])?;
    ensure!(gpu::free_bytes()? < before, "the memory is given back while it is mapped");
    ok!(cuMemUnmap(address, 8 * unit));
    expect_equal("free at the end", gpu::free_bytes()?, before)
}

fn retain() -> Result {
    gpu::start()?;
    let unit = granularity()?;
    let (address, handle) = mapped(4 * unit, false)?;
    let mut again = 0;
    let inside = (address + unit as u64) as *mut std::ffi::c_void;
    ok!(cuMemRetainAllocationHandle(&raw mut again, inside));
    expect_equal("handle", again, handle)?;
    ok!(cuMemRelease(handle));
    let second = reserve(4 * unit)?;
    map(second, 4 * unit, again)?;
    ok!(cuMemRelease(again));
    refuses!(cuMemRelease(again));
    Ok(())
}

fn retain_plain() -> Result {
    gpu::start()?;
    let (address, mut handle) = (gpu::alloc(4 << 20)?, 0);
    gives!(
        CUDA_ERROR_INVALID_VALUE,
        cuMemRetainAllocationHandle(&raw mut handle, address as *mut std::ffi::c_void)
    );
    Ok(())
}

fn properties_of() -> Result {
    gpu::start()?;
    let unit = granularity()?;
    let handle = create(unit, true)?;
    let mut got = properties(7, false);
    let wanted = properties(0, true);
    ok!(cuMemGetAllocationPropertiesFromHandle(&raw mut got, handle));
    expect_equal("type", got.type_, wanted.type_)?;
    expect_equal("handle types", got.requestedHandleTypes, wanted.requestedHandleTypes)?;
    // SAFETY: the location is a device, whose number is the integer.
    let device = unsafe { got.location.__bindgen_anon_1.id };
    expect_equal("device", device, 0)
}

fn accounting() -> Result {
    gpu::start()?;
    let unit = granularity()?;
    let before = gpu::free_bytes()?;
    let address = reserve(1024 * unit)?;
    expect_equal("free after a reservation", gpu::free_bytes()?, before)?;
    let handle = create(16 * unit, false)?;
    expect_equal("free after cuMemCreate", gpu::free_bytes()?, before - 16 * unit)?;
    ok!(cuMemRelease(handle));
    expect_equal("free after cuMemRelease", gpu::free_bytes()?, before)?;
    ok!(cuMemAddressFree(address, 1024 * unit));
    Ok(())
}

fn across_mappings() -> Result {
    gpu::start()?;
    let unit = granularity()?;
    let address = reserve(3 * unit)?;
    for index in 0..3 {
        let at = address + index * unit as u64;
        map(at, unit, create(unit, false)?)?;
    }
    allow(address, 3 * unit, READ_WRITE)?;
    let data: Vec<u32> = (0..u32::try_from(3 * unit / 4).unwrap_or(u32::MAX)).collect();
    gpu::write(address, &data)?;
    gpu::expect_content(address, &data)?;
    ok!(cuMemsetD8_v2(address + unit as u64 - 8, 0x11, unit + 16));
    gpu::expect_content(address + 2 * unit as u64 + 4, &[0x1111_1111, data[2 * unit / 4 + 2]])
}

fn keeps_content() -> Result {
    gpu::start()?;
    let unit = granularity()?;
    let (first, handle) = mapped(unit, false)?;
    gpu::write(first, &[1_u32, 2, 3])?;
    ok!(cuMemUnmap(first, unit));
    let second = reserve(unit)?;
    map(second, unit, handle)?;
    allow(second, unit, READ_WRITE)?;
    gpu::expect_content(second, &[1_u32, 2, 3])
}

fn not_mem_free() -> Result {
    gpu::start()?;
    let unit = granularity()?;
    let (address, handle) = mapped(unit, false)?;
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(address));
    unmap(address, unit, handle)
}

fn peer_access() -> Result {
    gpu::start()?;
    let second = gpu::second_device()?;
    let mut peers = 0;
    ok!(cuDeviceCanAccessPeer(&raw mut peers, second, 0));
    if peers == 0 {
        return crate::check::skipped("the devices cannot access each other");
    }
    let unit = granularity()?;
    let (address, _) = mapped(unit, false)?;
    let mut context = std::ptr::null_mut();
    ok!(cuCtxCreate_v2(&raw mut context, 0, second));
    let store = gpu::function(kernels::BASIC, "store")?;
    let access = access(second, READ_WRITE);
    ok!(cuMemSetAccess(address, unit, &raw const access, 1));
    gpu::launch(store, 1, 1, std::ptr::null_mut(), &[address, 9])?;
    ok!(cuCtxSynchronize());
    let none = vmm::access(second, Access::CU_MEM_ACCESS_FLAGS_PROT_NONE);
    ok!(cuMemSetAccess(address, unit, &raw const none, 1));
    gpu::launch(store, 1, 1, std::ptr::null_mut(), &[address, 9])?;
    let code = cu!(cuCtxSynchronize());
    expect_equal("without access", gpu::name_of(code), "CUDA_ERROR_ILLEGAL_ADDRESS".into())
}
