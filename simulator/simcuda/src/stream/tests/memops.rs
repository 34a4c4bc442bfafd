use cuda_abi::types::CUstreamBatchMemOpParams;

use super::memop::Condition;
use super::*;
use crate::{memory, testing};

const GEQ: u32 = 0;
const EQ: u32 = 1;
const AND: u32 = 2;
const NOR: u32 = 3;

/// Pinned memory of 64 bytes, zeroed.
fn pinned() -> *mut u8 {
    let mut pointer = null_mut();
    // SAFETY: `pointer` is a local variable.
    unsafe { memory::cuMemHostAlloc(&raw mut pointer, 64, 0) }.unwrap();
    // SAFETY: the 64 bytes were just allocated.
    unsafe { pointer.write_bytes(0, 64) };
    pointer.cast()
}

/// Device memory of 256 bytes.
fn device_memory() -> u64 {
    let mut address = 0;
    // SAFETY: `address` is a local variable.
    unsafe { memory::cuMemAlloc_v2(&raw mut address, 256) }.unwrap();
    address
}

/// A word that the host and streams share.
fn word<'a>(pointer: *mut u8) -> &'a std::sync::atomic::AtomicU32 {
    // SAFETY: pinned memory of a test is aligned and never freed, and accessed atomically only.
    unsafe { std::sync::atomic::AtomicU32::from_ptr(pointer.cast()) }
}

fn wait32(stream: CUstream, address: u64, value: u32, flags: u32) -> Result {
    // SAFETY: all parameters are checked.
    unsafe { cuStreamWaitValue32_v2(stream, address, value, flags) }
}

fn write32(stream: CUstream, address: u64, value: u32) -> Result {
    // SAFETY: all parameters are checked.
    unsafe { cuStreamWriteValue32_v2(stream, address, value, 0) }
}

#[test]
fn one_stream_waits_for_what_another_writes() {
    let _context = testing::context();
    for address in [pinned() as u64, device_memory()] {
        let (reader, writer, gate, log) =
            (stream(NON_BLOCKING), stream(NON_BLOCKING), Gate::new(), Log::default());
        write32(writer, address, 0).unwrap();
        synchronize(writer).unwrap();
        wait32(reader, address, 7, EQ).unwrap();
        log.on(reader, "after the wait");
        log.on_behind(writer, &gate, "before the write");
        write32(writer, address, 7).unwrap();
        assert_eq!(query(reader), NOT_READY);
        gate.open();
        synchronize(reader).unwrap();
        assert_eq!(log.all(), ["before the write", "after the wait"]);
    }
}

#[test]
fn a_wait_ends_with_its_context() {
    let context = testing::context();
    let (stream, log) = (stream(NON_BLOCKING), Log::default());
    wait32(stream, pinned() as u64, 1, EQ).unwrap();
    log.on(stream, "after the wait");
    // SAFETY: the handle is of a live context.
    unsafe { context::cuCtxDestroy_v2(context.handle as _) }.unwrap();
    assert_eq!(log.all(), [""; 0]);
}

/// Flags, value, what does not fulfil the condition and what does.
const CONDITIONS: [(u32, u32, u32, u32); 6] = [
    (GEQ, 10, 9, 12),
    // The difference is signed: 3 comes after u32::MAX, and i32::MAX + 11 before 10.
    (GEQ, u32::MAX, u32::MAX - 1, 3),
    (GEQ, 10, i32::MAX as u32 + 11, 10),
    (EQ, 5, 6, 5),
    (AND, 0b100, 0b011, 0b110),
    (NOR, 0x0000_ffff, 0xffff_0000, 0x7fff_0000),
];

#[test]
fn conditions() {
    for (flags, value, not_yet, at_last) in CONDITIONS {
        let condition = Condition::from_flags(flags).unwrap();
        assert!(!condition.holds(not_yet.into(), value.into(), false), "{condition:?} {not_yet:#x}");
        assert!(condition.holds(at_last.into(), value.into(), false), "{condition:?} {at_last:#x}");
        // In 64 bits, the words' upper halves.
        let upper = |word: u32| u64::from(word) << 32 | u64::from(u32::MAX);
        let value = if flags == GEQ { upper(value) } else { u64::from(value) << 32 };
        let not_yet = if flags == AND { u64::from(not_yet) << 32 } else { upper(not_yet) };
        assert!(!condition.holds(not_yet, value, true), "{condition:?} {not_yet:#x}");
        let at_last = if flags == EQ { u64::from(at_last) << 32 } else { upper(at_last) };
        assert!(condition.holds(at_last, value, true), "{condition:?} {at_last:#x}");
    }
}

#[test]
fn a_stream_waits_for_the_host() {
    use std::sync::atomic::Ordering::Release;
    let _context = testing::context();
    let (stream, pointer) = (stream(NON_BLOCKING), pinned());
    for (flags, value, not_yet, at_last) in CONDITIONS {
        word(pointer).store(not_yet, Release);
        wait32(stream, pointer as u64, value, flags).unwrap();
        assert_eq!(query(stream), NOT_READY);
        word(pointer).store(at_last, Release);
        synchronize(stream).unwrap();
    }
}

#[test]
fn wide_words() {
    let _context = testing::context();
    let (stream, pointer) = (stream(BLOCKING), pinned());
    let address = pointer as u64;
    // SAFETY: all parameters are checked.
    unsafe {
        cuStreamWriteValue64_v2(stream, address, 1 << 40, 0).unwrap();
        cuStreamWaitValue64_v2(stream, address, 1 << 40, EQ).unwrap();
        cuStreamWaitValue64_v2(stream, address, (1 << 40) - 1, GEQ).unwrap();
        cuStreamWaitValue64_v2(stream, address, u64::MAX >> 1, NOR).unwrap();
    }
    synchronize(stream).unwrap();
    // SAFETY: the pinned memory is aligned, and all work is done.
    assert_eq!(unsafe { pointer.cast::<u64>().read() }, 1 << 40);
}

#[test]
fn a_batch_runs_in_its_order() {
    let _context = testing::context();
    let (stream, pointer) = (stream(BLOCKING), pinned());
    let address = pointer as u64;
    // As C lays them out: operation, (flags), address, value, flags.
    let write = |offset: u64, value: u64| [2, address + offset, value, 1, 0, 0];
    let ops = [write(0, 1), [1, address, 1, EQ.into(), 0, 0], [6 | 1 << 32, 0, 0, 0, 0, 0], write(4, 2)];
    let ops = ops.as_ptr().cast_mut().cast::<CUstreamBatchMemOpParams>();
    // SAFETY: there are 4 elements.
    unsafe { cuStreamBatchMemOp_v2(stream, 4, ops, 0) }.unwrap();
    synchronize(stream).unwrap();
    // SAFETY: the pinned memory is aligned, and all work is done.
    assert_eq!(unsafe { pointer.cast::<[u32; 2]>().read() }, [1, 2]);
    let invalid = Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    // SAFETY: there are 4 elements; a count that is too large is refused before they are read.
    unsafe {
        assert_eq!(cuStreamBatchMemOp_v2(stream, 4, ops, 1), invalid);
        assert_eq!(cuStreamBatchMemOp_v2(stream, 256, ops, 0), invalid);
        assert_eq!(cuStreamBatchMemOp_v2(stream, 1, null_mut(), 0), invalid);
    }
    for (operation, error) in [(7, invalid), (3, Err(CUresult::CUDA_ERROR_NOT_SUPPORTED))] {
        let op = [operation, address, 0, 0, 0, 0_u64];
        // SAFETY: there is 1 element.
        assert_eq!(unsafe { cuStreamBatchMemOp(stream, 1, op.as_ptr().cast_mut().cast(), 0) }, error);
    }
}

#[test]
fn addresses_and_flags_are_checked_at_the_call() {
    let _context = testing::context();
    let (stream, address) = (stream(BLOCKING), pinned() as u64);
    let invalid = Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(wait32(stream, address + 2, 0, EQ), invalid);
    assert_eq!(wait32(stream, 0x1000, 0, EQ), invalid);
    assert_eq!(wait32(stream, address, 0, 4), invalid);
    assert_eq!(wait32(stream, address, 0, EQ | 1 << 30), Err(CUresult::CUDA_ERROR_NOT_SUPPORTED));
    // SAFETY: all parameters are checked.
    unsafe {
        assert_eq!(cuStreamWaitValue64_v2(stream, address + 4, 0, EQ), invalid);
        assert_eq!(cuStreamWriteValue32(stream, address, 0, 2), invalid);
        assert_eq!(cuStreamWriteValue64(stream, address + 4, 0, 0), invalid);
        cuStreamWaitValue32(stream, address, 0, EQ).unwrap();
        cuStreamWaitValue64(stream, address, 0, EQ).unwrap();
    }
    synchronize(stream).unwrap();
}

#[test]
fn a_wait_ends_when_the_context_has_failed() {
    let _context = testing::context();
    let (waiting, failing) = (stream(NON_BLOCKING), stream(NON_BLOCKING));
    wait32(waiting, pinned() as u64, 1, EQ).unwrap();
    assert_eq!(query(waiting), NOT_READY);
    fail(failing);
    assert_eq!(synchronize(waiting), Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
}
