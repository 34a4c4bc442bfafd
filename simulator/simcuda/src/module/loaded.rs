//! Modules that are loaded into a context.

use std::collections::HashMap;
use std::ffi::{c_char, c_void};
use std::sync::Arc;

use cuda_abi::sys::{self, CUresult};
use cuda_abi::types::{
    CUdeviceptr, CUfunction, CUjit_option, CUmodule, CUmoduleLoadingMode, CUsurfref, CUtexref,
};
use parking_lot::Mutex;
use simcuda_ptx as ptx;

use super::function::{self, Function};
use super::jit::{Messages, Options};
use super::{file, image, text};
use crate::context::{self, Context};
use crate::error::{Result, write_if_wanted, write_out};
use crate::handle::Table;
use crate::{memory, process, stream};

/// Code in a context, with memory for its variables.
pub(super) struct LoadedModule {
    pub(super) handle: usize,
    pub(super) context: Arc<Context>,
    pub(super) image: ptx::Image,
    /// One address for each variable of the code.
    addresses: Vec<u64>,
    /// What was allocated for them; none if there are none, or no longer.
    allocation: Mutex<Option<u64>>,
    /// The library of which this is the part in one context.
    pub(super) library: Option<usize>,
    /// By name: the handles of the functions that were asked for.
    functions: Mutex<HashMap<String, usize>>,
}

static MODULES: Table<LoadedModule> = Table::new();

impl LoadedModule {
    /// Loads code into a context: allocates and fills its variables.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub(super) fn load(
        context: &Arc<Context>,
        code: Arc<ptx::Module>,
        library: Option<usize>,
    ) -> Result<Arc<Self>> {
        let (offsets, size_bytes, align) = lay_out(code.globals());
        let allocation = match size_bytes {
            0 => None,
            size_bytes => Some(memory::allocate_internal(context, size_bytes, align)?),
        };
        let start = allocation.unwrap_or(0);
        let addresses: Vec<_> = offsets.into_iter().map(|offset| start + offset as u64).collect();
        let image = ptx::Image::new(code, addresses.clone());
        if let Err(error) = fill(&image, &addresses, context.device.ordinal) {
            free(allocation);
            return Err(error);
        }
        Ok(MODULES.insert_with(|handle| Self {
            handle,
            context: Arc::clone(context),
            image,
            addresses,
            allocation: Mutex::new(allocation),
            library,
            functions: Mutex::new(HashMap::new()),
        }))
    }

    /// Makes the module's handle and those of its functions invalid and frees its variables.
    pub(super) fn unload(&self) {
        MODULES.remove(self.handle);
        for handle in std::mem::take(&mut *self.functions.lock()).into_values() {
            function::remove(handle);
        }
        free(self.allocation.lock().take());
    }

    pub(super) fn code(&self) -> &Arc<ptx::Module> {
        self.image.module()
    }

    /// The function of a name; the same handle each time.
    ///
    /// # Errors
    /// `CUDA_ERROR_NOT_FOUND`.
    pub(super) fn function(self: &Arc<Self>, name: &str) -> Result<Arc<Function>> {
        if self.code().function(name).is_none() {
            return Err(CUresult::CUDA_ERROR_NOT_FOUND);
        }
        let mut functions = self.functions.lock();
        if let Some(function) = functions.get(name).and_then(|handle| function::by_own_handle(*handle)) {
            return Ok(function);
        }
        let function = function::add(self, name);
        functions.insert(name.to_owned(), function.handle);
        Ok(function)
    }

    /// Address and size of a variable.
    ///
    /// # Errors
    /// `CUDA_ERROR_NOT_FOUND`.
    pub(super) fn global(&self, name: &str) -> Result<(u64, usize)> {
        let globals = self.code().globals();
        let index = globals.iter().position(|global| global.name == name);
        let index = index.ok_or(CUresult::CUDA_ERROR_NOT_FOUND)?;
        Ok((self.addresses[index], globals[index].size_bytes))
    }
}

fn free(allocation: Option<u64>) {
    if let Some(address) = allocation {
        memory::free_internal(address);
    }
}

/// Offsets of the variables in one allocation, its size and its alignment.
fn lay_out(globals: &[ptx::Global]) -> (Vec<usize>, usize, usize) {
    let (mut end, mut align) = (0usize, 1);
    let offsets = globals
        .iter()
        .map(|global| {
            let offset = end.next_multiple_of(global.align.max(1));
            end = offset + global.size_bytes;
            align = align.max(global.align);
            offset
        })
        .collect();
    (offsets, end, align)
}

/// Writes the variables' initial values.
fn fill(image: &ptx::Image, addresses: &[u64], ordinal: i32) -> Result {
    for (index, address) in addresses.iter().enumerate() {
        let bytes = image.initial_bytes(index);
        if bytes.is_empty() {
            continue;
        }
        let span = memory::span(*address, ordinal).ok_or(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS)?;
        let offset = address - span.start;
        assert!(offset + bytes.len() as u64 <= span.len, "an allocation for variables is in one piece");
        let offset = usize::try_from(offset).expect("spans lie in the address space");
        // SAFETY: the offset is inside of the span.
        let place = unsafe { span.host.add(offset) };
        // SAFETY: the span has room for all bytes, as asserted, and no other code knows its address yet.
        unsafe { place.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }
    Ok(())
}

/// The module of a handle.
///
/// # Errors
/// `CUDA_ERROR_INVALID_HANDLE`.
pub(super) fn by_handle(handle: CUmodule) -> Result<Arc<LoadedModule>> {
    MODULES.get(handle as usize).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
}

/// Unloads what a context has.
pub(super) fn unload_all(context: &Arc<Context>) {
    for module in MODULES.all().iter().filter(|module| Arc::ptr_eq(&module.context, context)) {
        module.unload();
    }
}

/// Loads what was found in an image and gives the program the compiler's messages.
///
/// # Safety
/// `out` is NULL or valid for a write, and what `options` point to is still valid.
unsafe fn load(out: *mut CUmodule, mut options: Options, texts: Result<Vec<String>>) -> Result {
    let context = context::current()?;
    if out.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // Loading allocates, which a capture forbids like cuMemAlloc.
    stream::forbid_in_capture()?;
    let mut messages = Messages::default();
    let code = texts.and_then(|texts| image::compile(&texts, &mut messages));
    // SAFETY: the caller vouches for the options.
    unsafe { options.give_back(&messages) };
    let module = LoadedModule::load(&context, code?, None)?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, module.handle as CUmodule) }
}

pub(crate) unsafe fn cuModuleLoad(out: *mut CUmodule, path: *const c_char) -> Result {
    context::current()?;
    // SAFETY: `path` is the caller's text.
    let bytes = unsafe { file(path) }?;
    // SAFETY: `out` is the caller's out parameter, and there are no options.
    unsafe { load(out, Options::none(), image::texts(&bytes)) }
}

pub(crate) unsafe fn cuModuleLoadData(out: *mut CUmodule, data: *const c_void) -> Result {
    context::current()?;
    // SAFETY: the caller passes a whole image.
    let texts = unsafe { image::texts_at(data) };
    // SAFETY: `out` is the caller's out parameter, and there are no options.
    unsafe { load(out, Options::none(), texts) }
}

pub(crate) unsafe fn cuModuleLoadDataEx(
    out: *mut CUmodule,
    data: *const c_void,
    count: u32,
    options: *mut CUjit_option,
    values: *mut *mut c_void,
) -> Result {
    context::current()?;
    // SAFETY: the caller passes `count` options and values.
    let options = unsafe { Options::read(count, options, values) }?;
    // SAFETY: the caller passes a whole image.
    let texts = unsafe { image::texts_at(data) };
    // SAFETY: `out` is the caller's out parameter; its options live as long as the call.
    unsafe { load(out, options, texts) }
}

pub(crate) unsafe fn cuModuleLoadFatBinary(out: *mut CUmodule, data: *const c_void) -> Result {
    // SAFETY: the caller passes a whole fat binary, which is one of the images that are accepted.
    unsafe { cuModuleLoadData(out, data) }
}

pub(crate) unsafe fn cuModuleUnload(handle: CUmodule) -> Result {
    context::current()?;
    let module = by_handle(handle)?;
    if module.library.is_some() {
        // It is unloaded with its library (CUDA driver API reference, cuModuleUnload).
        return Err(CUresult::CUDA_ERROR_NOT_PERMITTED);
    }
    stream::forbid_in_capture()?;
    // Kernels of the module that are still queued use its variables. A fault of one of them is reported by
    // the next call; the module goes nevertheless.
    let waited = stream::synchronize_context(&module.context);
    module.unload();
    waited
}

/// `CUDA_MODULE_LOADING` is the driver's own variable (CUDA programming guide, "CUDA Environment Variables").
/// Code is loaded at once in either mode here, which lazy loading permits.
pub(crate) unsafe fn cuModuleGetLoadingMode(out: *mut CUmoduleLoadingMode) -> Result {
    process::machine()?;
    let eager = std::env::var_os("CUDA_MODULE_LOADING").is_some_and(|mode| mode == "EAGER");
    let mode = if eager {
        sys::CUmoduleLoadingMode::CU_MODULE_EAGER_LOADING
    } else {
        sys::CUmoduleLoadingMode::CU_MODULE_LAZY_LOADING
    };
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, mode as CUmoduleLoadingMode) }
}

pub(crate) unsafe fn cuModuleGetFunction(
    out: *mut CUfunction,
    handle: CUmodule,
    name: *const c_char,
) -> Result {
    context::current()?;
    let module = by_handle(handle)?;
    // SAFETY: `name` is the caller's text.
    let function = module.function(unsafe { text(name) }?)?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, function.handle as CUfunction) }
}

pub(crate) unsafe fn cuModuleGetFunctionCount(out: *mut u32, handle: CUmodule) -> Result {
    process::machine()?;
    let module = by_handle(handle)?;
    let count = u32::try_from(module.code().functions().count()).unwrap_or(u32::MAX);
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, count) }
}

pub(crate) unsafe fn cuModuleEnumerateFunctions(
    out: *mut CUfunction,
    count: u32,
    handle: CUmodule,
) -> Result {
    process::machine()?;
    let module = by_handle(handle)?;
    if out.is_null() || count == 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let code = Arc::clone(module.code());
    for (index, function) in code.functions().take(count as usize).enumerate() {
        let function = module.function(&function.name)?;
        // SAFETY: the caller's array has room for `count` handles.
        let place = unsafe { out.add(index) };
        // SAFETY: as above.
        unsafe { place.write(function.handle as CUfunction) };
    }
    Ok(())
}

pub(crate) unsafe fn cuModuleGetGlobal_v2(
    address: *mut CUdeviceptr,
    size_bytes: *mut usize,
    handle: CUmodule,
    name: *const c_char,
) -> Result {
    context::current()?;
    let module = by_handle(handle)?;
    // SAFETY: `name` is the caller's text.
    let global = module.global(unsafe { text(name) }?)?;
    // SAFETY: both are the caller's out parameters.
    unsafe { write_global(address, size_bytes, global) }
}

/// Gives address and size of a variable, of which the program may leave out one.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` if it left out both.
///
/// # Safety
/// Each pointer is NULL or valid for a write.
pub(super) unsafe fn write_global(
    address: *mut CUdeviceptr,
    size_bytes: *mut usize,
    global: (u64, usize),
) -> Result {
    if address.is_null() && size_bytes.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller vouches for the pointer.
    unsafe { write_if_wanted(address, global.0) };
    // SAFETY: the caller vouches for the pointer.
    unsafe { write_if_wanted(size_bytes, global.1) };
    Ok(())
}

/// PTX of today has no texture references: textures are objects that kernels get as parameters.
pub(crate) unsafe fn cuModuleGetTexRef(
    _out: *mut CUtexref,
    handle: CUmodule,
    _name: *const c_char,
) -> Result {
    context::current()?;
    by_handle(handle)?;
    Err(CUresult::CUDA_ERROR_NOT_FOUND)
}

/// As [`cuModuleGetTexRef`].
pub(crate) unsafe fn cuModuleGetSurfRef(
    _out: *mut CUsurfref,
    handle: CUmodule,
    _name: *const c_char,
) -> Result {
    context::current()?;
    by_handle(handle)?;
    Err(CUresult::CUDA_ERROR_NOT_FOUND)
}
