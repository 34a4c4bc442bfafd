//! Plain device memory.

use crate::check::{Check, Result, check, expect_equal, failed};
use crate::helper::Helper;
use crate::{ensure, gives, gpu, ok};

/// The checks of this area.
pub const CHECKS: &[Check] = &[
    check("alloc/zero-bytes", "cuMemAlloc of 0 bytes is CUDA_ERROR_INVALID_VALUE (reference)", zero_bytes),
    check("alloc/null", "a NULL result is CUDA_ERROR_INVALID_VALUE", null),
    check("alloc/too-much", "more than there is, is CUDA_ERROR_OUT_OF_MEMORY (reference)", too_much),
    check(
        "alloc/alignment",
        "memory is aligned to 256 bytes or more (programming guide, Device memory)",
        alignment,
    ),
    check("alloc/distinct", "allocations of all sizes do not overlap and keep their content", distinct),
    check("alloc/free-null", "cuMemFree of 0 succeeds", free_null),
    check("alloc/double-free", "freeing twice is CUDA_ERROR_INVALID_VALUE", double_free),
    check("alloc/free-interior", "freeing the middle is CUDA_ERROR_INVALID_VALUE (reference)", free_interior),
    check("alloc/free-unknown", "freeing what is no device memory is CUDA_ERROR_INVALID_VALUE", free_unknown),
    check("alloc/pitch", "a pitch is at least the width and aligned for coalescing (reference)", pitch),
    check(
        "alloc/pitch-element",
        "elements of other sizes than 4, 8 and 16 are refused (reference)",
        pitch_element,
    ),
    check("alloc/range", "cuMemGetAddressRange finds the allocation of an inner address (reference)", range),
    check(
        "alloc/range-unknown",
        "cuMemGetAddressRange of no device memory is an error (reference)",
        range_unknown,
    ),
    check("alloc/accounting", "free memory falls with an allocation and comes back with its end", accounting),
    check("alloc/many", "ten thousand small allocations live at a time", many),
    check("alloc/other-context", "memory is freed from another context of the device", other_context),
    check("alloc/not-for-the-host", "the host cannot read device memory: SIGSEGV", not_for_the_host),
    check("alloc/shared-by-processes", "processes share a device's memory", shared_by_processes),
    check("alloc/crash-frees", "memory of a killed process comes back (programming guide)", crash_frees),
];

fn zero_bytes() -> Result {
    gpu::start()?;
    let mut address = 0;
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemAlloc_v2(&raw mut address, 0));
    Ok(())
}

fn null() -> Result {
    gpu::start()?;
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemAlloc_v2(std::ptr::null_mut(), 64));
    Ok(())
}

fn too_much() -> Result {
    gpu::start()?;
    let mut address = 0;
    gives!(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc_v2(&raw mut address, 1 << 46));
    let free = gpu::free_bytes()?;
    gives!(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc_v2(&raw mut address, free + (64 << 20)));
    gpu::alloc(1 << 20).map(|_| ())
}

fn alignment() -> Result {
    gpu::start()?;
    for size_bytes in [1, 3, 100, 257, 4096, (1 << 20) + 1, 3 << 20] {
        let address = gpu::alloc(size_bytes)?;
        ensure!(address.is_multiple_of(256), "{size_bytes} bytes at {address:#x}");
    }
    Ok(())
}

fn distinct() -> Result {
    gpu::start()?;
    let sizes = [4_usize, 64, 1000, 4096, 65536, 1 << 20, (2 << 20) + 4, 5 << 20];
    let mut all = Vec::new();
    for (value, words) in (1_u32..).zip(sizes.map(|size_bytes| size_bytes / 4)) {
        let address = gpu::alloc(words * 4)?;
        ok!(cuMemsetD32_v2(address, value, words));
        all.push((address, words, value));
    }
    for (address, words, value) in all {
        gpu::expect_content(address, &vec![value; words])?;
    }
    Ok(())
}

fn free_null() -> Result {
    gpu::start()?;
    ok!(cuMemFree_v2(0));
    Ok(())
}

fn double_free() -> Result {
    gpu::start()?;
    let address = gpu::alloc(4096)?;
    ok!(cuMemFree_v2(address));
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(address));
    Ok(())
}

fn free_interior() -> Result {
    gpu::start()?;
    let address = gpu::alloc(1 << 20)?;
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(address + 256));
    ok!(cuMemFree_v2(address));
    Ok(())
}

fn free_unknown() -> Result {
    gpu::start()?;
    let word = 0_u64;
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(&raw const word as u64));
    Ok(())
}

fn pitch() -> Result {
    gpu::start()?;
    let (mut address, mut pitch) = (0, 0);
    for width in [1, 63, 257, 1000, 4097] {
        ok!(cuMemAllocPitch_v2(&raw mut address, &raw mut pitch, width, 10, 4));
        ensure!(pitch >= width && pitch.is_multiple_of(64), "width {width}: pitch {pitch}");
        ok!(cuMemsetD2D8_v2(address, pitch, 1, width, 10));
        ok!(cuMemFree_v2(address));
    }
    Ok(())
}

fn pitch_element() -> Result {
    gpu::start()?;
    let (mut address, mut pitch) = (0, 0);
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemAllocPitch_v2(&raw mut address, &raw mut pitch, 100, 10, 3));
    gives!(CUDA_ERROR_INVALID_VALUE, cuMemAllocPitch_v2(&raw mut address, &raw mut pitch, 0, 10, 4));
    Ok(())
}

fn range() -> Result {
    gpu::start()?;
    let size_bytes = 5 << 20;
    let address = gpu::alloc(size_bytes)?;
    for offset in [0, 1, 4096, size_bytes as u64 - 1] {
        let (mut base, mut size) = (0, 0);
        ok!(cuMemGetAddressRange_v2(&raw mut base, &raw mut size, address + offset));
        expect_equal("base", base, address)?;
        expect_equal("size", size, size_bytes)?;
    }
    let mut size = 0;
    ok!(cuMemGetAddressRange_v2(std::ptr::null_mut(), &raw mut size, address));
    expect_equal("size, without a base", size, size_bytes)
}

fn range_unknown() -> Result {
    gpu::start()?;
    let (mut base, mut size, word) = (0, 0, 0_u64);
    gives!(
        CUDA_ERROR_INVALID_VALUE | CUDA_ERROR_NOT_FOUND,
        cuMemGetAddressRange_v2(&raw mut base, &raw mut size, &raw const word as u64)
    );
    Ok(())
}

fn accounting() -> Result {
    gpu::start()?;
    let size_bytes = 32 << 20;
    let before = gpu::free_bytes()?;
    let address = gpu::alloc(size_bytes)?;
    let during = gpu::free_bytes()?;
    ensure!(during + size_bytes <= before, "{before} free before, {during} with {size_bytes} taken");
    ok!(cuMemFree_v2(address));
    expect_equal("free at the end", gpu::free_bytes()?, before)
}

fn many() -> Result {
    gpu::start()?;
    let before = gpu::free_bytes()?;
    let mut all = (0..10_000).map(|_| gpu::alloc(512)).collect::<Result<Vec<_>>>()?;
    all.sort_unstable();
    ensure!(all.windows(2).all(|pair| pair[0] + 512 <= pair[1]), "two allocations overlap");
    for address in all {
        ok!(cuMemFree_v2(address));
    }
    let after = gpu::free_bytes()?;
    ensure!(after + (4 << 20) >= before, "{before} free before, {after} after");
    Ok(())
}

fn other_context() -> Result {
    gpu::start()?;
    let address = gpu::alloc(4096)?;
    let mut context = std::ptr::null_mut();
    ok!(cuCtxCreate_v2(&raw mut context, 0, 0));
    ok!(cuMemFree_v2(address));
    Ok(())
}

fn not_for_the_host() -> Result {
    gpu::start()?;
    let address = gpu::alloc(4096)?;
    // SAFETY: the child reads one address, by which it is killed, or leaves.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: it sets the default for a signal of this child only.
        unsafe { libc::signal(libc::SIGSEGV, libc::SIG_DFL) };
        // SAFETY: the read is meant to be caught by the memory protection; the child holds nothing.
        let byte = unsafe { (address as *const u8).read_volatile() };
        // SAFETY: it ends the child at once.
        unsafe { libc::_exit(i32::from(byte & 1)) };
    }
    ensure!(child > 0, "fork failed");
    let mut status = 0;
    // SAFETY: `status` is a live variable and the child is ours.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    let killed = libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV;
    ensure!(killed, "the host read device memory (status {status})");
    Ok(())
}

fn shared_by_processes() -> Result {
    gpu::start()?;
    let mut helper = Helper::start()?;
    let before = gpu::free_bytes()?;
    let size_bytes = 64 << 20;
    helper.number(&format!("alloc {size_bytes}"))?;
    let after = gpu::free_bytes()?;
    ensure!(
        after + size_bytes <= before,
        "{before} free before, {after} after another process took {size_bytes}"
    );
    Ok(())
}

fn crash_frees() -> Result {
    gpu::start()?;
    // What the driver keeps of a process that was killed: 64 KiB were seen with 580.159.04.
    const KEPT_BYTES: usize = 2 << 20;
    let before = gpu::free_bytes()?;
    let mut helper = Helper::start()?;
    helper.number(&format!("alloc {}", 64 << 20))?;
    helper.kill()?;
    // A driver may need a moment to clear up after a process that did not end in order.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
    loop {
        let after = gpu::free_bytes()?;
        if after + KEPT_BYTES >= before {
            return Ok(());
        }
        if std::time::Instant::now() > deadline {
            return failed(format!("{before} free before, {after} after the other process was killed"));
        }
        std::thread::yield_now();
    }
}
