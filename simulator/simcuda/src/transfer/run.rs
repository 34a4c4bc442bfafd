//! The work itself: bytes from one endpoint to another.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cuda_abi::sys::CUresult;

use super::{Copy, Endpoint, Fill, Side, check};
use crate::error::Result;
use crate::memory::Span;
use crate::process;

/// Long copies are cut into pieces, so that their speed can be held.
const PIECE_BYTES: usize = 4 << 20;

/// One side of a copy while it runs: remembers the piece of memory that the last address lay in.
struct Window {
    side: Side,
    device: i32,
    write: bool,
    span: Option<Span>,
}

impl Window {
    fn new(side: Side, address: u64, device: i32, write: bool) -> Self {
        Self { side: check::resolved(side, address), device, write, span: None }
    }

    /// Where the bytes from `address` on lie and how many of them, up to `want`, lie there in one piece.
    ///
    /// # Errors
    /// `CUDA_ERROR_ILLEGAL_ADDRESS` if the device has no such memory, or may not write it.
    fn from(&mut self, address: u64, want: usize) -> Result<(*mut u8, usize)> {
        if self.side == Side::Host {
            return Ok((address as *mut u8, want));
        }
        let span = self.span_of(address)?;
        let offset = usize_of(address - span.start)?;
        let left = usize_of(span.len)? - offset;
        Ok((span.host.wrapping_add(offset), left.min(want)))
    }

    /// Where the bytes up to `end` begin, of which up to `want` lie in one piece, and how many do.
    ///
    /// # Errors
    /// As [`Self::from`].
    fn up_to(&mut self, end: u64, want: usize) -> Result<(*mut u8, usize)> {
        if self.side == Side::Host {
            return Ok(((end as *mut u8).wrapping_sub(want), want));
        }
        let span = self.span_of(end - 1)?;
        let offset = usize_of(end - span.start)?;
        let len = offset.min(want);
        Ok((span.host.wrapping_add(offset - len), len))
    }

    fn span_of(&mut self, address: u64) -> Result<&Span> {
        let inside = |span: &Span| address >= span.start && address - span.start < span.len;
        if !self.span.as_ref().is_some_and(inside) {
            self.span = check::span(address, self.device);
        }
        match &self.span {
            Some(span) if span.writable || !self.write => Ok(span),
            _ => Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS),
        }
    }
}

fn usize_of(value: u64) -> Result<usize> {
    usize::try_from(value).map_err(|_| CUresult::CUDA_ERROR_ILLEGAL_ADDRESS)
}

/// Holds a copy to the bus's speed.
pub(super) struct Pace {
    start: Instant,
    bytes_per_s: Option<f64>,
    bytes: f64,
}

impl Pace {
    pub(super) fn start(bytes_per_s: Option<f64>) -> Self {
        Self { start: Instant::now(), bytes_per_s, bytes: 0.0 }
    }

    /// `bytes` more are done: waits for the rest of the time that they take.
    pub(super) fn done(&mut self, bytes: usize) {
        let Some(bytes_per_s) = self.bytes_per_s else { return };
        self.bytes += bytes as f64;
        let due = Duration::from_secs_f64(self.bytes / bytes_per_s);
        std::thread::sleep(due.saturating_sub(self.start.elapsed()));
    }
}

impl Copy {
    /// Copies, at the bus's simulated speed if it crosses it.
    ///
    /// # Errors
    /// `CUDA_ERROR_ILLEGAL_ADDRESS` if device memory on either side was freed.
    pub(crate) fn run(&self, device: i32) -> Result {
        if self.is_empty() {
            return Ok(());
        }
        let mut to = Window::new(self.to.side, self.to.address, device, true);
        let mut from = Window::new(self.from.side, self.from.address, device, false);
        let mut pace = Pace::start(self.bytes_per_s());
        if let Some(total) = self.contiguous_bytes() {
            return run_bytes(&mut to, self.to.address, &mut from, self.from.address, total, &mut pace);
        }
        for slice in 0..self.depth {
            for row in 0..self.height {
                let (target, source) = (self.to.row(slice, row), self.from.row(slice, row));
                run_bytes(&mut to, target, &mut from, source, self.width_bytes, &mut pace)?;
            }
        }
        Ok(())
    }

    /// How many bytes there are, if no gaps lie between the rows on either side.
    fn contiguous_bytes(&self) -> Option<usize> {
        let packed = |endpoint: &Endpoint| {
            (self.height == 1 && self.depth == 1)
                || (endpoint.pitch_bytes == self.width_bytes
                    && (self.depth == 1 || endpoint.slice_rows == self.height))
        };
        (packed(&self.to) && packed(&self.from)).then(|| self.width_bytes * self.height * self.depth)
    }

    /// The speed that the simulated machine allows, if this copy crosses the bus.
    fn bytes_per_s(&self) -> Option<f64> {
        let limit = process::machine().ok()?.config.copy_bytes_per_s?;
        let home = |endpoint: &Endpoint| match endpoint.side {
            Side::Host => None,
            Side::Device | Side::Unified => check::device_of(endpoint.address),
        };
        (home(&self.to) != home(&self.from)).then_some(limit)
    }
}

impl Endpoint {
    /// Where a row begins.
    pub(super) fn row(&self, slice: usize, row: usize) -> u64 {
        let rows = slice as u64 * self.slice_rows as u64 + row as u64;
        self.address + rows * self.pitch_bytes as u64
    }
}

/// Copies a row, or all rows that lie one after the other, piece by piece; from the end if the target overlaps
/// the source from above, so that no byte is overwritten before it was read.
fn run_bytes(
    to: &mut Window,
    target: u64,
    from: &mut Window,
    source: u64,
    len: usize,
    pace: &mut Pace,
) -> Result {
    let backwards = target > source && target - source < len as u64;
    let mut done = 0;
    while done < len {
        let want = (len - done).min(PIECE_BYTES);
        let (target, source, piece) = if backwards {
            let left = (len - done) as u64;
            let (target_at, target_len) = to.up_to(target + left, want)?;
            let (source_at, source_len) = from.up_to(source + left, want)?;
            let piece = target_len.min(source_len);
            // Both end where they should; the longer one begins too early.
            (target_at.wrapping_add(target_len - piece), source_at.wrapping_add(source_len - piece), piece)
        } else {
            let (target_at, target_len) = to.from(target + done as u64, want)?;
            let (source_at, source_len) = from.from(source + done as u64, want)?;
            (target_at, source_at, target_len.min(source_len))
        };
        // SAFETY: device memory: both pieces lie in spans that the windows keep alive, the target in a
        // writable one. Host memory: the program vouches for it, as to a real driver. `copy` allows overlap.
        // If a kernel or the program touches the same bytes meanwhile, the program races with itself.
        unsafe { std::ptr::copy(source, target, piece) };
        done += piece;
        pace.done(piece);
    }
    Ok(())
}

/// A multiple of every element size.
const PATTERN_BYTES: usize = 4096;

impl Fill {
    /// Fills.
    ///
    /// # Errors
    /// `CUDA_ERROR_ILLEGAL_ADDRESS` if the memory was freed.
    pub(crate) fn run(&self, device: i32) -> Result {
        if self.width == 0 || self.height == 0 {
            return Ok(());
        }
        let mut window = Window::new(Side::Device, self.address, device, true);
        let value = self.value.to_le_bytes();
        let pattern: [u8; PATTERN_BYTES] = std::array::from_fn(|index| value[index % self.element_bytes]);
        for row in 0..self.height {
            let start = self.address + row as u64 * self.pitch_bytes as u64;
            fill_row(&mut window, start, self.width * self.element_bytes, self.element_bytes, &pattern)?;
        }
        Ok(())
    }
}

fn fill_row(
    window: &mut Window,
    start: u64,
    len: usize,
    element_bytes: usize,
    pattern: &[u8; PATTERN_BYTES],
) -> Result {
    let mut done = 0;
    while done < len {
        // A piece of memory may end within an element.
        let phase = done % element_bytes;
        let want = (len - done).min(PATTERN_BYTES - phase);
        let (target, piece) = window.from(start + done as u64, want)?;
        // SAFETY: the target lies in a writable span that the window keeps alive; the pattern is ours and is
        // at least `phase + piece` long. A kernel that touches the same bytes races by the program's fault.
        unsafe { std::ptr::copy_nonoverlapping(pattern[phase..].as_ptr(), target, piece) };
        done += piece;
    }
    Ok(())
}

/// Takes the bytes of a copy's source now, so that the program may change them after the call.
pub(super) fn stage(copy: &mut Copy) {
    let mut bytes = vec![0; copy.width_bytes * copy.height * copy.depth];
    let rows = (0..copy.depth).flat_map(|slice| (0..copy.height).map(move |row| (slice, row)));
    for ((slice, row), target) in rows.zip(bytes.chunks_exact_mut(copy.width_bytes)) {
        let source = copy.from.row(slice, row) as *const u8;
        // SAFETY: pageable host memory that the program vouches for until the call returns; the target is ours.
        unsafe { std::ptr::copy_nonoverlapping(source, target.as_mut_ptr(), target.len()) };
    }
    let bytes: Arc<[u8]> = bytes.into();
    copy.from = Endpoint {
        address: bytes.as_ptr() as u64,
        side: Side::Host,
        pitch_bytes: copy.width_bytes,
        slice_rows: copy.height,
    };
    copy.staged = Some(bytes);
}
