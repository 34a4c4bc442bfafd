//! The linker: several PTX texts become one image.

use std::ffi::{CStr, c_char, c_void};

use cuda_abi::sys::{CUjitInputType as T, CUresult};
use cuda_abi::types::{CUjit_option, CUjitInputType, CUlinkState};
use parking_lot::Mutex;

use super::image;
use super::jit::{Messages, Options};
use crate::context;
use crate::error::{Result, write_if_wanted, write_out};
use crate::handle::Table;
use crate::process;

struct Linker {
    state: Mutex<LinkerState>,
}

struct LinkerState {
    options: Options,
    texts: Vec<String>,
    /// What cuLinkComplete made; the program reads it until cuLinkDestroy.
    image: Option<Vec<u8>>,
}

static LINKERS: Table<Linker> = Table::new();

fn by_handle(handle: CUlinkState) -> Result<std::sync::Arc<Linker>> {
    process::machine()?;
    LINKERS.get(handle as usize).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
}

pub(crate) unsafe fn cuLinkCreate_v2(
    count: u32,
    options: *mut CUjit_option,
    values: *mut *mut c_void,
    out: *mut CUlinkState,
) -> Result {
    context::current()?;
    if out.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller passes `count` options and values, which stay valid until cuLinkDestroy.
    let options = unsafe { Options::read(count, options, values) }?;
    let mut handle = 0;
    LINKERS.insert_with(|fresh| {
        handle = fresh;
        Linker { state: Mutex::new(LinkerState { options, texts: Vec::new(), image: None }) }
    });
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, handle as CUlinkState) }
}

pub(crate) unsafe fn cuLinkAddData_v2(
    handle: CUlinkState,
    kind: CUjitInputType,
    data: *mut c_void,
    size_bytes: usize,
    name: *const c_char,
    count: u32,
    options: *mut CUjit_option,
    values: *mut *mut c_void,
) -> Result {
    let linker = by_handle(handle)?;
    // SAFETY: the caller passes `count` options and values.
    unsafe { check_input_options(count, options, values) }?;
    if data.is_null() || size_bytes == 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller passes `size_bytes` bytes.
    let bytes = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), size_bytes) };
    // SAFETY: `name` is NULL or the caller's text.
    let name = unsafe { name_or(name, "ptx input") };
    // SAFETY: what was passed to cuLinkCreate is valid until cuLinkDestroy.
    unsafe { linker.state.lock().add(kind, bytes, &name) }
}

pub(crate) unsafe fn cuLinkAddFile_v2(
    handle: CUlinkState,
    kind: CUjitInputType,
    path: *const c_char,
    count: u32,
    options: *mut CUjit_option,
    values: *mut *mut c_void,
) -> Result {
    let linker = by_handle(handle)?;
    // SAFETY: the caller passes `count` options and values.
    unsafe { check_input_options(count, options, values) }?;
    // SAFETY: `path` is the caller's text.
    let bytes = unsafe { super::file(path) }?;
    // SAFETY: as above.
    let name = unsafe { name_or(path, "ptx input") };
    // SAFETY: what was passed to cuLinkCreate is valid until cuLinkDestroy.
    unsafe { linker.state.lock().add(kind, &bytes, &name) }
}

/// # Safety
/// `options` and `values` are valid for `count` elements.
unsafe fn check_input_options(count: u32, options: *mut CUjit_option, values: *mut *mut c_void) -> Result {
    // SAFETY: the caller vouches for the arrays.
    let options = unsafe { Options::read(count, options, values) }?;
    if options.have_what_only_a_linker_takes() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    Ok(())
}

/// # Safety
/// `name` is NULL or a NUL-terminated text.
unsafe fn name_or(name: *const c_char, default: &str) -> String {
    if name.is_null() {
        return default.to_owned();
    }
    // SAFETY: not NULL, and the caller vouches for the rest.
    unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
}

impl LinkerState {
    /// Adds one input.
    ///
    /// # Safety
    /// What the linker's options point to is still valid.
    unsafe fn add(&mut self, kind: CUjitInputType, bytes: &[u8], name: &str) -> Result {
        if self.image.is_some() {
            // Linking is complete.
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let mut messages = Messages::default();
        let texts = accepted(kind, bytes).and_then(|texts| {
            for text in &texts {
                image::parse(text, name, &mut messages)?;
            }
            Ok(texts)
        });
        // SAFETY: the caller vouches for the options.
        unsafe { self.options.give_back(&messages) };
        self.texts.extend(texts?);
        Ok(())
    }
}

/// The PTX texts of an input. Machine code, host objects and archives have none that can be linked here.
fn accepted(kind: CUjitInputType, bytes: &[u8]) -> Result<Vec<String>> {
    let is = |known: T| kind == known as u32;
    if is(T::CU_JIT_INPUT_PTX) || is(T::CU_JIT_INPUT_CUBIN) || is(T::CU_JIT_INPUT_FATBINARY) {
        return image::texts(bytes);
    }
    if kind >= T::CU_JIT_NUM_INPUT_TYPES as u32 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    Err(CUresult::CUDA_ERROR_INVALID_IMAGE)
}

pub(crate) unsafe fn cuLinkComplete(
    handle: CUlinkState,
    out: *mut *mut c_void,
    size_bytes: *mut usize,
) -> Result {
    let linker = by_handle(handle)?;
    let mut state = linker.state.lock();
    if out.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    if state.image.is_none() {
        let mut messages = Messages::default();
        let linked = image::compile(&state.texts, &mut messages);
        if linked.is_ok() {
            messages.report(&format!("linked {} PTX texts", state.texts.len()));
        }
        // SAFETY: what was passed to cuLinkCreate is valid until cuLinkDestroy.
        unsafe { state.options.give_back(&messages) };
        // The texts parsed when they were added: a failure now means an undefined or multiply defined name,
        // which the real linker answers with this error.
        linked.map_err(|_| CUresult::CUDA_ERROR_UNKNOWN)?;
        state.image = Some(image::linked(&state.texts));
    }
    let image = state.image.as_mut().expect("made above");
    // SAFETY: `size_bytes` is the caller's out parameter or NULL.
    unsafe { write_if_wanted(size_bytes, image.len()) };
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, image.as_mut_ptr().cast()) }
}

pub(crate) unsafe fn cuLinkDestroy(handle: CUlinkState) -> Result {
    process::machine()?;
    LINKERS.remove(handle as usize).map(|_| ()).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
}
