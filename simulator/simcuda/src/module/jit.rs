//! The options of the calls that compile PTX, and the messages that they give back.

use std::ffi::{c_char, c_void};
use std::time::Instant;

use cuda_abi::sys::{CUjit_option as O, CUresult};
use simcuda_ptx::ParseError;

use crate::error::Result;

/// A log buffer of the program, and the option value that receives how much of it is filled.
#[derive(Clone, Copy)]
struct Log {
    buffer: *mut c_char,
    size_bytes: usize,
    filled_bytes: usize,
    size_out: *mut *mut c_void,
}

/// Options as one call passed them. The pointers in it are good for that call, or until cuLinkDestroy where they
/// came to cuLinkCreate (CUDA driver API reference, cuLinkCreate).
pub(super) struct Options {
    info: Option<Log>,
    error: Option<Log>,
    wall_time: Option<*mut *mut c_void>,
    target: Option<u32>,
    started: Instant,
}

// SAFETY: the holder of the options writes through the pointers, one thread at a time; what they point to
// is the program's, which promises to leave it alone meanwhile.
unsafe impl Send for Options {}

/// The messages of one compilation.
#[derive(Default)]
pub(super) struct Messages {
    info: String,
    error: String,
}

impl Messages {
    /// Notes why a text was refused, in ptxas's format: programs search for the line.
    pub(super) fn refuse(&mut self, name: &str, error: &ParseError) {
        let ParseError { line, message } = error;
        self.error.push_str(&match line {
            0 => format!("{name}; error   : {message}\n"),
            line => format!("{name}, line {line}; error   : {message}\n"),
        });
    }

    /// Notes something that is not about a line.
    pub(super) fn report(&mut self, message: &str) {
        self.info.push_str(message);
        self.info.push('\n');
    }
}

impl Options {
    /// Options of a call that has none.
    pub(super) fn none() -> Self {
        Self { info: None, error: None, wall_time: None, target: None, started: Instant::now() }
    }

    /// Reads and checks what a program passed.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for an unknown option or a value outside of its range.
    ///
    /// # Safety
    /// `options` and `values` are valid for `count` elements, and log buffers for the sizes that come with them.
    pub(super) unsafe fn read(count: u32, options: *const u32, values: *mut *mut c_void) -> Result<Self> {
        let mut read = Self::none();
        if count == 0 {
            return Ok(read);
        }
        if options.is_null() || values.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let (mut buffers, mut sizes) = ([None; 2], [None; 2]);
        for index in 0..count as usize {
            // SAFETY: below `count`.
            let option = unsafe { options.add(index) };
            // SAFETY: as above.
            let option = unsafe { option.read() };
            // SAFETY: below `count`.
            let slot = unsafe { values.add(index) };
            // The value of an option that takes none may lie anywhere.
            if option == O::CU_JIT_TARGET_FROM_CUCONTEXT as u32 {
                continue;
            }
            // SAFETY: as above.
            let value = unsafe { slot.read() };
            match option {
                o if o == O::CU_JIT_INFO_LOG_BUFFER as u32 => buffers[0] = Some(value.cast::<c_char>()),
                o if o == O::CU_JIT_ERROR_LOG_BUFFER as u32 => buffers[1] = Some(value.cast::<c_char>()),
                o if o == O::CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES as u32 => sizes[0] = Some(slot),
                o if o == O::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES as u32 => sizes[1] = Some(slot),
                o if o == O::CU_JIT_WALL_TIME as u32 => read.wall_time = Some(slot),
                option => read.check(option, value.addr())?,
            }
        }
        // SAFETY: the slots are inside of `values`.
        read.info = unsafe { log(buffers[0], sizes[0]) }?;
        // SAFETY: as above.
        read.error = unsafe { log(buffers[1], sizes[1]) }?;
        Ok(read)
    }

    /// Options that only steer the real compiler change nothing here, but their values have to be right.
    fn check(&mut self, option: u32, value: usize) -> Result {
        // The program stores an integer in a pointer; only its lower half is the option's.
        let value = value as u32;
        let is = |known: O| option == known as u32;
        let right = if is(O::CU_JIT_OPTIMIZATION_LEVEL) {
            value <= 4
        } else if is(O::CU_JIT_TARGET) {
            self.target = Some(value);
            value >= 30
        } else if is(O::CU_JIT_FALLBACK_STRATEGY) {
            value <= 1
        } else if is(O::CU_JIT_CACHE_MODE) {
            value <= 2
        } else if is(O::CU_JIT_GLOBAL_SYMBOL_COUNT) {
            // Device symbols at host addresses are not supported.
            value == 0
        } else {
            option < O::CU_JIT_NUM_OPTIONS as u32
        };
        if right { Ok(()) } else { Err(CUresult::CUDA_ERROR_INVALID_VALUE) }
    }

    /// Whether a log, the wall time or a target is among them, none of which belong to one input of a linker
    /// (CUDA driver API reference, cuLinkAddData).
    pub(super) fn have_what_only_a_linker_takes(&self) -> bool {
        self.info.is_some() || self.error.is_some() || self.wall_time.is_some() || self.target.is_some()
    }

    /// Gives the program the messages.
    ///
    /// # Safety
    /// The pointers that the options were read from are still valid.
    pub(super) unsafe fn give_back(&mut self, messages: &Messages) {
        for (log, text) in [(&mut self.info, &messages.info), (&mut self.error, &messages.error)] {
            if let Some(log) = log {
                // SAFETY: the caller vouches for the buffer.
                unsafe { log.append(text) };
            }
        }
        if let Some(slot) = self.wall_time {
            let time_ms = self.started.elapsed().as_secs_f32() * 1e3;
            // SAFETY: the caller vouches for the slot, which has room for a pointer and so for a float.
            unsafe { slot.cast::<f32>().write(time_ms) };
        }
    }
}

/// # Safety
/// `size` is valid for reads.
unsafe fn log(buffer: Option<*mut c_char>, size: Option<*mut *mut c_void>) -> Result<Option<Log>> {
    let Some(buffer) = buffer.filter(|buffer| !buffer.is_null()) else {
        return Ok(None);
    };
    // A buffer without a size cannot be filled.
    let size_out = size.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    // SAFETY: the caller vouches for the slot.
    let size_bytes = unsafe { size_out.read() }.addr() as u32 as usize;
    Ok(Some(Log { buffer, size_bytes, filled_bytes: 0, size_out }))
}

impl Log {
    /// Adds a text, cut to what fits with a NUL behind it.
    ///
    /// # Safety
    /// The buffer is valid for writes of `size_bytes`, the slot for one write.
    unsafe fn append(&mut self, text: &str) {
        if self.size_bytes > 0 {
            let kept = text.len().min(self.size_bytes - 1 - self.filled_bytes);
            // SAFETY: `filled_bytes` is below `size_bytes`.
            let end = unsafe { self.buffer.add(self.filled_bytes) };
            // SAFETY: `kept` and a NUL fit behind what is filled.
            unsafe { end.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), kept) };
            // SAFETY: as above.
            let nul = unsafe { end.add(kept) };
            // SAFETY: as above.
            unsafe { nul.write(0) };
            self.filled_bytes += kept;
        }
        // SAFETY: the caller vouches for the slot.
        unsafe { self.size_out.write(std::ptr::without_provenance_mut(self.filled_bytes)) };
    }
}
