//! Questions about copies between a device and the memory of the host.
//!
//! A checkpoint copies device memory while the job is paused, and unpins what it was copied to.

use std::ffi::c_void;
use std::sync::Mutex;
use std::sync::mpsc;
use std::time::Instant;

use cuda_abi::sys::CUevent_flags;

use crate::check::{Result, Stop, failed};
use crate::{gpu, ok};

const PIECES: usize = 16;

/// Memory of the host in pieces, and the context to use it in.
struct Pieces {
    start: usize,
    piece_bytes: usize,
    context: usize,
}

impl Pieces {
    fn new(is_huge: bool) -> Result<Self> {
        let context = gpu::start()?.expose_provenance();
        let most_bytes = (gpu::free_bytes()? / 32).clamp(16 << 20, 4 << 30);
        let piece_bytes = (most_bytes / PIECES) & !0xf_ffff;
        let start = shared_memory(piece_bytes * PIECES, is_huge)?.expose_provenance();
        Ok(Self { start, piece_bytes, context })
    }

    fn bytes(&self) -> usize {
        PIECES * self.piece_bytes
    }

    fn at(&self, piece: usize) -> *mut c_void {
        std::ptr::with_exposed_provenance_mut(self.start + piece * self.piece_bytes)
    }

    fn set_current(&self) -> Result {
        ok!(cuCtxSetCurrent(std::ptr::with_exposed_provenance_mut(self.context)));
        Ok(())
    }

    /// Has threads work on pieces; returns milliseconds.
    fn by_threads(&self, threads: usize, work: impl Fn(usize) -> Result + Sync) -> Result<u128> {
        let begun = Instant::now();
        in_threads(threads, |first| {
            self.set_current()?;
            (first..PIECES).step_by(threads).try_for_each(&work)
        })?;
        Ok(begun.elapsed().as_millis())
    }

    fn register(&self, piece: usize) -> Result {
        ok!(cuMemHostRegister_v2(self.at(piece), self.piece_bytes, 0));
        Ok(())
    }

    fn unregister(&self, piece: usize) -> Result {
        ok!(cuMemHostUnregister(self.at(piece)));
        Ok(())
    }
}

fn in_threads(threads: usize, work: impl Fn(usize) -> Result + Sync) -> Result {
    std::thread::scope(|scope| {
        let work = &work;
        let all: Vec<_> = (0..threads).map(|first| scope.spawn(move || work(first))).collect();
        all.into_iter()
            .try_for_each(|one| one.join().map_err(|_| Stop::Failed("a thread panicked".into()))?)
    })
}

pub(super) fn pinning_by_threads() -> Result<String> {
    let mut lines = Vec::new();
    for is_huge in [false, true] {
        let pieces = Pieces::new(is_huge)?;
        lines.push(format!("{} bytes in {PIECES} pieces, {} in huge pages", pieces.bytes(), huge()?));
        for threads in [1, 4, PIECES] {
            let registered_ms = pieces.by_threads(threads, |piece| pieces.register(piece))?;
            let unregistered_ms = pieces.by_threads(threads, |piece| pieces.unregister(piece))?;
            lines.push(format!(
                "by {threads} threads: registered in {registered_ms} ms, unregistered in {unregistered_ms} ms"
            ));
        }
    }
    Ok(lines.join("; "))
}

pub(super) fn unpinning_during_copies() -> Result<String> {
    let pieces = Pieces::new(true)?;
    let device = gpu::alloc(pieces.bytes())?;
    let mut lines = vec![format!("{} bytes in {PIECES} pieces", pieces.bytes())];
    // How many copies there are at a time, and whether memory is unregistered meanwhile.
    for (at_a_time, meanwhile) in [(PIECES, false), (PIECES, true), (1, true), (2, true), (3, true)] {
        for piece in 0..PIECES {
            pieces.register(piece)?;
        }
        let times = copy_and_unpin(&pieces, device, at_a_time, meanwhile)?;
        let how = if meanwhile { "meanwhile" } else { "afterwards" };
        lines.push(format!("{at_a_time} copies at a time, {how}: {times}"));
    }
    Ok(lines.join("; "))
}

/// How much shared memory this process has mapped in huge pages, as the kernel says it.
fn huge() -> Result<String> {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup")
        .map_err(|error| Stop::Failed(format!("smaps_rollup: {error}")))?;
    let value = text.lines().find_map(|line| line.strip_prefix("ShmemPmdMapped:"));
    Ok(value.unwrap_or("none").trim().to_owned())
}

fn copy_and_unpin(pieces: &Pieces, device: u64, at_a_time: usize, meanwhile: bool) -> Result<String> {
    let stream = gpu::stream()?;
    let events: Vec<_> = (0..PIECES)
        .map(|_| Ok(gpu::event(CUevent_flags::CU_EVENT_DISABLE_TIMING)?.expose_provenance()))
        .collect::<Result<_>>()?;
    let (copied, ready) = mpsc::channel();
    let begun = Instant::now();
    let unregister = || -> Result<u128> {
        pieces.set_current()?;
        let mut busy_us = 0;
        for piece in ready {
            let begun = Instant::now();
            pieces.unregister(piece)?;
            busy_us += begun.elapsed().as_micros();
        }
        Ok(busy_us)
    };
    let copy = |copied: mpsc::Sender<usize>| -> Result<u128> {
        let event = |piece: usize| std::ptr::with_exposed_provenance_mut(events[piece]);
        let mut wait = |piece: usize| -> Result {
            ok!(cuEventSynchronize(event(piece)));
            if meanwhile {
                copied.send(piece).map_err(|_| Stop::Failed("the other thread has ended".into()))?;
            }
            Ok(())
        };
        for piece in 0..PIECES {
            if let Some(earlier) = piece.checked_sub(at_a_time) {
                wait(earlier)?;
            }
            let from = device + (piece * pieces.piece_bytes) as u64;
            ok!(cuMemcpyDtoHAsync_v2(pieces.at(piece), from, pieces.piece_bytes, stream));
            ok!(cuEventRecord(event(piece), stream));
        }
        (PIECES.saturating_sub(at_a_time)..PIECES).try_for_each(&mut wait)?;
        let copied_us = begun.elapsed().as_micros();
        if !meanwhile {
            (0..PIECES).try_for_each(|piece| copied.send(piece).map_err(|_| Stop::Failed("ended".into())))?;
        }
        Ok(copied_us)
    };
    let (copied_us, busy_us) = std::thread::scope(|scope| -> Result<_> {
        let other = scope.spawn(unregister);
        let copied_us = copy(copied);
        let busy_us = other.join().map_err(|_| Stop::Failed("a thread panicked".into()))??;
        Ok((copied_us?, busy_us))
    })?;
    Ok(format!(
        "copied in {copied_us} us, {busy_us} us in cuMemHostUnregister, all in {} us",
        begun.elapsed().as_micros()
    ))
}

/// Each thread copies every n-th chunk through two pinned buffers of its own: one is filled while the other is emptied.
pub(super) fn through_a_ring() -> Result<String> {
    let pieces = Pieces::new(true)?;
    let device = gpu::upload(&vec![7_u8; pieces.bytes()])?;
    let mut lines = vec![format!("{} bytes, {} in huge pages", pieces.bytes(), huge()?)];
    for (threads, chunk_bytes) in [
        (1, 4 << 20),
        (2, 4 << 20),
        (4, 4 << 20),
        (8, 4 << 20),
        (8, 1 << 20),
        (12, 4 << 20),
        (16, 4 << 20),
        (16, 1 << 20),
    ] {
        for is_down in [true, false] {
            let began = Mutex::new(None);
            let ready = std::sync::Barrier::new(threads);
            in_threads(threads, |first| {
                pieces.set_current()?;
                let mine = Buffers::new(chunk_bytes)?;
                ready.wait();
                began
                    .lock()
                    .map_err(|_| Stop::Failed("a thread panicked".into()))?
                    .get_or_insert_with(Instant::now);
                let chunks: Vec<_> = (first..pieces.bytes() / chunk_bytes).step_by(threads).collect();
                mine.copy(&pieces, device, &chunks, is_down)
            })?;
            let seconds = match *began.lock().map_err(|_| Stop::Failed("a thread panicked".into()))? {
                Some(began) => began.elapsed().as_secs_f64(),
                None => return failed("no thread has begun"),
            };
            #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
            let rate = pieces.bytes() as f64 / seconds / 1e9;
            let way = if is_down { "to host" } else { "to device" };
            lines.push(format!("{threads} threads, {chunk_bytes} bytes: {way} {rate:.1} GB/s"));
        }
    }
    // SAFETY: the mapping is as long as that, and no copy to it is under way.
    let copied = unsafe { std::slice::from_raw_parts(pieces.at(0).cast::<u8>(), pieces.bytes()) };
    match copied.iter().all(|byte| *byte == 7) {
        true => Ok(lines.join("; ")),
        false => failed("the copy differs"),
    }
}

/// What one thread copies with.
struct Buffers {
    at: [*mut c_void; 2],
    streams: [cuda_abi::types::CUstream; 2],
    chunk_bytes: usize,
}

impl Buffers {
    fn new(chunk_bytes: usize) -> Result<Self> {
        let at = [gpu::pinned(chunk_bytes)?, gpu::pinned(chunk_bytes)?];
        Ok(Self { at, streams: [gpu::stream()?, gpu::stream()?], chunk_bytes })
    }

    fn copy(&self, pieces: &Pieces, device: u64, chunks: &[usize], is_down: bool) -> Result {
        let bytes = self.chunk_bytes;
        let host = |chunk: usize| std::ptr::with_exposed_provenance_mut::<u8>(pieces.start + chunk * bytes);
        let from = |chunk: usize| device + (chunk * bytes) as u64;
        // SAFETY: no other thread has this chunk, and the stream of the buffer is done.
        let empty = |buffer: usize, chunk: usize| unsafe {
            std::ptr::copy_nonoverlapping(self.at[buffer].cast(), host(chunk), bytes);
        };
        // SAFETY: as above.
        let fill = |buffer: usize, chunk: usize| unsafe {
            std::ptr::copy_nonoverlapping(host(chunk), self.at[buffer].cast(), bytes);
        };
        for (index, &chunk) in chunks.iter().enumerate() {
            let this = index % 2;
            if is_down {
                ok!(cuMemcpyDtoHAsync_v2(self.at[this], from(chunk), bytes, self.streams[this]));
                if let Some(earlier) = index.checked_sub(1) {
                    ok!(cuStreamSynchronize(self.streams[1 - this]));
                    empty(1 - this, chunks[earlier]);
                }
            } else {
                ok!(cuStreamSynchronize(self.streams[this]));
                fill(this, chunk);
                ok!(cuMemcpyHtoDAsync_v2(from(chunk), self.at[this], bytes, self.streams[this]));
            }
        }
        if let (true, Some(last)) = (is_down, chunks.len().checked_sub(1)) {
            ok!(cuStreamSynchronize(self.streams[last % 2]));
            empty(last % 2, chunks[last]);
        }
        self.streams.iter().try_for_each(|stream| {
            ok!(cuStreamSynchronize(*stream));
            Ok(())
        })
    }
}

/// A mapping of a memfd with all its pages present. It stays until the process ends.
pub(super) fn shared_memory(size_bytes: usize, is_huge: bool) -> Result<*mut c_void> {
    use rustix::mm::{Advice, MapFlags, ProtFlags};
    let describe = |error: rustix::io::Errno| Stop::Failed(format!("memfd: {error}"));
    let file = rustix::fs::memfd_create("staging", rustix::fs::MemfdFlags::CLOEXEC).map_err(describe)?;
    rustix::fs::ftruncate(&file, size_bytes as u64).map_err(describe)?;
    // SAFETY: a fresh mapping at an address of the kernel's choice replaces no other mapping.
    let mapping = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            size_bytes,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED,
            &file,
            0,
        )
    }
    .map_err(describe)?;
    if is_huge {
        // SAFETY: advice about a mapping of ours changes no content. A kernel without huge pages refuses it.
        let _ = unsafe { rustix::mm::madvise(mapping, size_bytes, Advice::LinuxHugepage) };
    }
    for offset in (0..size_bytes).step_by(4096) {
        // SAFETY: the page is in the mapping.
        unsafe { mapping.wrapping_byte_add(offset).cast::<u8>().write_volatile(0) };
    }
    Ok(mapping)
}
