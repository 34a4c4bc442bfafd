//! Libraries: code that belongs to no context and is loaded into each one that asks for it.

use std::ffi::{CString, c_char, c_void};
use std::sync::Arc;

use cuda_abi::sys::{self, CUresult};
use cuda_abi::types::{
    CUdevice, CUdeviceptr, CUfunc_cache, CUfunction, CUfunction_attribute, CUjit_option, CUkernel, CUlibrary,
    CUlibraryOption, CUmodule,
};
use parking_lot::Mutex;
use simcuda_ptx as ptx;

use super::function::{Function, check_cache_config, write_param_info};
use super::jit::{Messages, Options};
use super::loaded::{LoadedModule, write_global};
use super::settings::Settings;
use super::{file, image, text};
use crate::context::{self, Context};
use crate::error::{Result, write_out};
use crate::handle::Table;
use crate::{entry, process};

struct Library {
    handle: usize,
    code: Arc<ptx::Module>,
    kernels: Vec<Arc<LibraryKernel>>,
    /// The library in each context that asked for it so far.
    modules: Mutex<Vec<Arc<LoadedModule>>>,
}

/// A kernel of a library, in no context.
struct LibraryKernel {
    handle: usize,
    name: CString,
    library: usize,
    code: Arc<ptx::Module>,
    /// By device.
    settings: Vec<Mutex<Settings>>,
}

static LIBRARIES: Table<Library> = Table::new();
static KERNELS: Table<LibraryKernel> = Table::new();

impl Library {
    /// The library in a context; loaded there now if it is not yet.
    fn module_in(&self, context: &Arc<Context>) -> Result<Arc<LoadedModule>> {
        // Also in calls that do not pass the checkpoint lock otherwise: loading takes memory of the device.
        let _inside = entry::enter()?;
        let mut modules = self.modules.lock();
        if let Some(module) = modules.iter().find(|module| Arc::ptr_eq(&module.context, context)) {
            return Ok(Arc::clone(module));
        }
        let module = LoadedModule::load(context, Arc::clone(&self.code), Some(self.handle))?;
        modules.push(Arc::clone(&module));
        Ok(module)
    }

    fn kernel(&self, name: &str) -> Option<&Arc<LibraryKernel>> {
        self.kernels.iter().find(|kernel| kernel.name() == name)
    }
}

impl LibraryKernel {
    fn name(&self) -> &str {
        self.name.to_str().expect("names of functions come out of a text")
    }

    fn function(&self) -> &ptx::Function {
        self.code.function(self.name()).expect("a handle is only made for a function that is there")
    }

    fn settings(&self, ordinal: CUdevice) -> Result<&Mutex<Settings>> {
        let index = usize::try_from(ordinal).ok();
        index.and_then(|index| self.settings.get(index)).ok_or(CUresult::CUDA_ERROR_INVALID_DEVICE)
    }
}

fn by_handle(handle: CUlibrary) -> Result<Arc<Library>> {
    process::machine()?;
    LIBRARIES.get(handle as usize).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
}

fn kernel_by_handle(handle: CUkernel) -> Result<Arc<LibraryKernel>> {
    process::machine()?;
    KERNELS.get(handle as usize).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
}

/// The function that a kernel is in the current context.
///
/// # Errors
/// `CUDA_ERROR_INVALID_HANDLE`, or what loading the library into the context fails with.
pub(super) fn function_of_kernel(handle: usize) -> Result<Arc<Function>> {
    let kernel = kernel_by_handle(handle as CUkernel)?;
    let library = by_handle(kernel.library as CUlibrary)?;
    library.module_in(&context::current()?)?.function(kernel.name())
}

/// What was set for a kernel on a device; nothing once its library is unloaded.
pub(super) fn settings(library: usize, name: &str, ordinal: CUdevice) -> Settings {
    let Some(library) = LIBRARIES.get(library) else {
        return Settings::default();
    };
    let kernel = library.kernel(name).and_then(|kernel| kernel.settings(ordinal).ok());
    kernel.map_or_else(Settings::default, |settings| *settings.lock())
}

/// Forgets what libraries have in a context.
pub(super) fn forget_context(context: &Arc<Context>) {
    for library in LIBRARIES.all() {
        library.modules.lock().retain(|module| !Arc::ptr_eq(&module.context, context));
    }
}

/// # Safety
/// `options` and `values` are valid for `count` elements.
unsafe fn check_options(
    options: *const CUlibraryOption,
    values: *mut *mut c_void,
    count: u32,
    from_file: bool,
) -> Result {
    if count == 0 {
        return Ok(());
    }
    if options.is_null() || values.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller vouches for the array.
    let options = unsafe { std::slice::from_raw_parts(options, count as usize) };
    let preserved = sys::CUlibraryOption::CU_LIBRARY_BINARY_IS_PRESERVED as u32;
    let known = sys::CUlibraryOption::CU_LIBRARY_NUM_OPTIONS as u32;
    // This option is for images in memory only (CUDA driver API reference, CUlibraryOption).
    if options.iter().any(|option| *option >= known || (from_file && *option == preserved)) {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    Ok(())
}

/// Makes a library of what was found in an image and gives the program the compiler's messages.
///
/// # Safety
/// `out` is NULL or valid for a write, and what `options` point to is still valid.
unsafe fn load(out: *mut CUlibrary, mut options: Options, texts: Result<Vec<String>>) -> Result {
    let devices = process::machine()?.devices.len();
    if out.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let mut messages = Messages::default();
    let code = texts.and_then(|texts| image::compile(&texts, &mut messages));
    // SAFETY: the caller vouches for the options.
    unsafe { options.give_back(&messages) };
    let code = code?;
    let library = LIBRARIES.insert_with(|library| {
        let kernel = |function: &ptx::Function| {
            KERNELS.insert_with(|handle| LibraryKernel {
                handle,
                name: CString::new(function.name.as_str()).expect("PTX has no NUL in a name"),
                library,
                code: Arc::clone(&code),
                settings: (0..devices).map(|_| Mutex::default()).collect(),
            })
        };
        let kernels = code.functions().map(kernel).collect();
        Library { handle: library, code: Arc::clone(&code), kernels, modules: Mutex::default() }
    });
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, library.handle as CUlibrary) }
}

pub(crate) unsafe fn cuLibraryLoadData(
    out: *mut CUlibrary,
    data: *const c_void,
    jit_options: *mut CUjit_option,
    jit_values: *mut *mut c_void,
    jit_count: u32,
    options: *mut CUlibraryOption,
    values: *mut *mut c_void,
    count: u32,
) -> Result {
    process::machine()?;
    // SAFETY: the caller passes `count` options and values.
    unsafe { check_options(options, values, count, false) }?;
    // SAFETY: the caller passes `jit_count` options and values.
    let jit = unsafe { Options::read(jit_count, jit_options, jit_values) }?;
    // SAFETY: the caller passes a whole image.
    let texts = unsafe { image::texts_at(data) };
    // SAFETY: `out` is the caller's out parameter; its options live as long as the call.
    unsafe { load(out, jit, texts) }
}

pub(crate) unsafe fn cuLibraryLoadFromFile(
    out: *mut CUlibrary,
    path: *const c_char,
    jit_options: *mut CUjit_option,
    jit_values: *mut *mut c_void,
    jit_count: u32,
    options: *mut CUlibraryOption,
    values: *mut *mut c_void,
    count: u32,
) -> Result {
    process::machine()?;
    // SAFETY: the caller passes `count` options and values.
    unsafe { check_options(options, values, count, true) }?;
    // SAFETY: the caller passes `jit_count` options and values.
    let jit = unsafe { Options::read(jit_count, jit_options, jit_values) }?;
    // SAFETY: `path` is the caller's text.
    let bytes = unsafe { file(path) }?;
    // SAFETY: the caller passes an out parameter; its options live as long as the call.
    unsafe { load(out, jit, image::texts(&bytes)) }
}

/// Kernels of the library that are still queued are waited for, as they use its variables.
pub(crate) unsafe fn cuLibraryUnload(handle: CUlibrary) -> Result {
    let library = by_handle(handle)?;
    LIBRARIES.remove(library.handle);
    for kernel in &library.kernels {
        KERNELS.remove(kernel.handle);
    }
    for module in std::mem::take(&mut *library.modules.lock()) {
        // A kernel's fault is reported by its context; the library is unloaded nevertheless.
        let _ = crate::stream::synchronize_context(&module.context);
        module.unload();
    }
    Ok(())
}

pub(crate) unsafe fn cuLibraryGetKernel(
    out: *mut CUkernel,
    handle: CUlibrary,
    name: *const c_char,
) -> Result {
    let library = by_handle(handle)?;
    // SAFETY: `name` is the caller's text.
    let kernel = library.kernel(unsafe { text(name) }?).ok_or(CUresult::CUDA_ERROR_NOT_FOUND)?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, kernel.handle as CUkernel) }
}

pub(crate) unsafe fn cuLibraryGetKernelCount(out: *mut u32, handle: CUlibrary) -> Result {
    let library = by_handle(handle)?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, u32::try_from(library.kernels.len()).unwrap_or(u32::MAX)) }
}

pub(crate) unsafe fn cuLibraryEnumerateKernels(out: *mut CUkernel, count: u32, handle: CUlibrary) -> Result {
    let library = by_handle(handle)?;
    if out.is_null() || count == 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    for (index, kernel) in library.kernels.iter().take(count as usize).enumerate() {
        // SAFETY: the caller's array has room for `count` handles.
        let place = unsafe { out.add(index) };
        // SAFETY: as above.
        unsafe { place.write(kernel.handle as CUkernel) };
    }
    Ok(())
}

pub(crate) unsafe fn cuLibraryGetModule(out: *mut CUmodule, handle: CUlibrary) -> Result {
    let module = by_handle(handle)?.module_in(&context::current()?)?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, module.handle as CUmodule) }
}

pub(crate) unsafe fn cuLibraryGetGlobal(
    address: *mut CUdeviceptr,
    size_bytes: *mut usize,
    handle: CUlibrary,
    name: *const c_char,
) -> Result {
    let module = by_handle(handle)?.module_in(&context::current()?)?;
    // SAFETY: `name` is the caller's text.
    let global = module.global(unsafe { text(name) }?)?;
    // SAFETY: both are the caller's out parameters.
    unsafe { write_global(address, size_bytes, global) }
}

/// There are no managed variables: the interpreter refuses PTX that has some.
pub(crate) unsafe fn cuLibraryGetManaged(
    _address: *mut CUdeviceptr,
    _size_bytes: *mut usize,
    handle: CUlibrary,
    name: *const c_char,
) -> Result {
    by_handle(handle)?;
    // SAFETY: `name` is the caller's text.
    unsafe { text(name) }?;
    Err(CUresult::CUDA_ERROR_NOT_FOUND)
}

/// The device says that it has no unified function pointers.
pub(crate) unsafe fn cuLibraryGetUnifiedFunction(
    _out: *mut *mut c_void,
    handle: CUlibrary,
    symbol: *const c_char,
) -> Result {
    by_handle(handle)?;
    // SAFETY: `symbol` is the caller's text.
    unsafe { text(symbol) }?;
    Err(CUresult::CUDA_ERROR_NOT_FOUND)
}

pub(crate) unsafe fn cuKernelGetFunction(out: *mut CUfunction, handle: CUkernel) -> Result {
    let function = function_of_kernel(handle as usize)?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, function.handle as CUfunction) }
}

pub(crate) unsafe fn cuKernelGetLibrary(out: *mut CUlibrary, handle: CUkernel) -> Result {
    let kernel = kernel_by_handle(handle)?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, kernel.library as CUlibrary) }
}

pub(crate) unsafe fn cuKernelGetAttribute(
    out: *mut i32,
    attribute: CUfunction_attribute,
    handle: CUkernel,
    ordinal: CUdevice,
) -> Result {
    let kernel = kernel_by_handle(handle)?;
    let settings = *kernel.settings(ordinal)?.lock();
    let value = settings.get(&kernel.code, kernel.function(), attribute)?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, value) }
}

pub(crate) unsafe fn cuKernelSetAttribute(
    attribute: CUfunction_attribute,
    value: i32,
    handle: CUkernel,
    ordinal: CUdevice,
) -> Result {
    let kernel = kernel_by_handle(handle)?;
    kernel.settings(ordinal)?.lock().set(kernel.function(), attribute, value)
}

pub(crate) unsafe fn cuKernelSetCacheConfig(
    handle: CUkernel,
    config: CUfunc_cache,
    ordinal: CUdevice,
) -> Result {
    kernel_by_handle(handle)?.settings(ordinal)?;
    check_cache_config(config)
}

/// The name lives as long as the handle.
pub(crate) unsafe fn cuKernelGetName(out: *mut *const c_char, handle: CUkernel) -> Result {
    process::machine()?;
    if handle.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let kernel = kernel_by_handle(handle)?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, kernel.name.as_ptr()) }
}

pub(crate) unsafe fn cuKernelGetParamInfo(
    handle: CUkernel,
    index: usize,
    offset: *mut usize,
    size_bytes: *mut usize,
) -> Result {
    let kernel = kernel_by_handle(handle)?;
    // SAFETY: both are the caller's out parameters.
    unsafe { write_param_info(kernel.function(), index, offset, size_bytes) }
}

pub(crate) unsafe fn cuKernelGetParamCount(handle: CUkernel, out: *mut usize) -> Result {
    let kernel = kernel_by_handle(handle)?;
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, kernel.function().params.len()) }
}
