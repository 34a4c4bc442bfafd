//! Libraries and kernels.

use cuda_abi::sys::{CUfunction_attribute as A, CUlibraryOption as Option_};
use cuda_abi::types::{CUkernel, CUlibrary};

use super::*;

fn load_library(text: &str) -> Result<CUlibrary> {
    let text = CString::new(text).unwrap();
    let mut library = null_mut();
    let none = null_mut();
    // SAFETY: a NUL-terminated text, a local variable and no options.
    unsafe {
        cuLibraryLoadData(&raw mut library, text.as_ptr().cast(), none, null_mut(), 0, none, null_mut(), 0)
    }
    .map(|()| library)
}

fn kernel(library: CUlibrary, name: &CStr) -> Result<CUkernel> {
    let mut kernel = null_mut();
    // SAFETY: a local variable and a NUL-terminated text.
    unsafe { cuLibraryGetKernel(&raw mut kernel, library, name.as_ptr()) }.map(|()| kernel)
}

fn counter(library: CUlibrary) -> Result<CUdeviceptr> {
    let mut address = 0;
    // SAFETY: local variables and a NUL-terminated text.
    unsafe { cuLibraryGetGlobal(&raw mut address, null_mut(), library, c"counter".as_ptr()) }
        .map(|()| address)
}

#[test]
fn a_library_has_variables_of_its_own_in_each_context() {
    let first = testing::context();
    let library = load_library(GLOBALS).unwrap();
    let kernel = kernel(library, c"bump").unwrap();
    let of_first = counter(library).unwrap();
    // A kernel is launched as if it were a function.
    launch(kernel.cast(), [1; 3], [1; 3], &mut []).unwrap();
    wait(&first).unwrap();
    assert_eq!(u32::from_le_bytes(read(of_first + 4)), 106);

    let second = testing::context();
    let of_second = counter(library).unwrap();
    assert_ne!(of_first, of_second);
    assert_eq!(u32::from_le_bytes(read(of_second + 4)), 6);
    launch(kernel.cast(), [1; 3], [1; 3], &mut []).unwrap();
    launch(kernel.cast(), [1; 3], [1; 3], &mut []).unwrap();
    wait(&second).unwrap();
    assert_eq!(u32::from_le_bytes(read(of_second + 4)), 206);
    assert_eq!(u32::from_le_bytes(read(of_first + 4)), 106);
}

#[test]
fn handles_lead_to_each_other() {
    let _context = testing::context();
    let library = load_library(GLOBALS).unwrap();
    let kernel_handle = kernel(library, c"bump").unwrap();
    assert_eq!(kernel(library, c"nothing"), Err(CUresult::CUDA_ERROR_NOT_FOUND));
    let (mut module, mut f, mut of_function, mut of_kernel) =
        (null_mut(), null_mut(), null_mut(), null_mut());
    // SAFETY: local variables.
    unsafe {
        cuLibraryGetModule(&raw mut module, library).unwrap();
        cuKernelGetFunction(&raw mut f, kernel_handle).unwrap();
        cuFuncGetModule(&raw mut of_function, f).unwrap();
        cuKernelGetLibrary(&raw mut of_kernel, kernel_handle).unwrap();
    }
    assert_eq!((of_function, of_kernel), (module, library));
    assert_eq!(function(module, "bump"), Ok(f));
    // SAFETY: a library's module is refused.
    assert_eq!(unsafe { cuModuleUnload(module) }, Err(CUresult::CUDA_ERROR_NOT_PERMITTED));
    let (mut count, mut name, mut params) = (0, std::ptr::null(), usize::MAX);
    let mut kernels = [null_mut(); 2];
    // SAFETY: local variables.
    unsafe {
        cuLibraryGetKernelCount(&raw mut count, library).unwrap();
        cuLibraryEnumerateKernels(kernels.as_mut_ptr(), 2, library).unwrap();
        cuKernelGetName(&raw mut name, kernel_handle).unwrap();
        cuKernelGetParamCount(kernel_handle, &raw mut params).unwrap();
    }
    assert_eq!((count, kernels, params), (1, [kernel_handle, null_mut()], 0));
    // SAFETY: the call gave a NUL-terminated text.
    assert_eq!(unsafe { CStr::from_ptr(name) }, c"bump");
    let (mut address, mut pointer) = (0, null_mut());
    // SAFETY: local variables.
    unsafe {
        let managed = cuLibraryGetManaged(&raw mut address, null_mut(), library, c"counter".as_ptr());
        assert_eq!(managed, Err(CUresult::CUDA_ERROR_NOT_FOUND));
        let unified = cuLibraryGetUnifiedFunction(&raw mut pointer, library, c"bump".as_ptr());
        assert_eq!(unified, Err(CUresult::CUDA_ERROR_NOT_FOUND));
    }
}

#[test]
fn an_unloaded_library_is_gone_with_all_that_came_from_it() {
    let _context = testing::context();
    let library = load_library(GLOBALS).unwrap();
    let kernel_handle = kernel(library, c"bump").unwrap();
    let address = counter(library).unwrap();
    assert!(memory::span(address, 0).is_some());
    // SAFETY: the library is not used any more.
    unsafe { cuLibraryUnload(library) }.unwrap();
    let invalid = Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
    assert_eq!(launch(kernel_handle.cast(), [1; 3], [1; 3], &mut []), invalid);
    // SAFETY: as above.
    assert_eq!(unsafe { cuLibraryUnload(library) }, invalid);
    assert_eq!(kernel(library, c"bump"), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
}

#[test]
fn attributes_of_a_kernel_are_by_device_and_a_function_s_own_go_first() {
    let _context = testing::context();
    let library = load_library(GLOBALS).unwrap();
    let kernel = kernel(library, c"bump").unwrap();
    let dynamic = A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as u32;
    let of_kernel = |ordinal| {
        let mut value = 0;
        // SAFETY: a local variable.
        unsafe { cuKernelGetAttribute(&raw mut value, dynamic, kernel, ordinal) }.map(|()| value)
    };
    let of_function = |f: CUfunction| {
        let mut value = 0;
        // SAFETY: a local variable.
        unsafe { cuFuncGetAttribute(&raw mut value, dynamic, f) }.map(|()| value)
    };
    // SAFETY: handles and numbers are checked.
    unsafe { cuKernelSetAttribute(dynamic, 100_000, kernel, 0) }.unwrap();
    assert_eq!((of_kernel(0), of_kernel(1)), (Ok(100_000), Ok(49152)));
    assert_eq!(of_kernel(2), Err(CUresult::CUDA_ERROR_INVALID_DEVICE));
    let mut f = null_mut();
    // SAFETY: a local variable.
    unsafe { cuKernelGetFunction(&raw mut f, kernel) }.unwrap();
    assert_eq!(of_function(f), Ok(100_000));
    // SAFETY: handles and numbers are checked.
    unsafe { cuFuncSetAttribute(f, dynamic, 60_000) }.unwrap();
    // SAFETY: as above.
    unsafe { cuKernelSetAttribute(dynamic, 90_000, kernel, 0) }.unwrap();
    assert_eq!((of_function(f), of_kernel(0)), (Ok(60_000), Ok(90_000)));
    // SAFETY: as above.
    let refused = unsafe { cuKernelSetCacheConfig(kernel, 4, 0) };
    assert_eq!(refused, Err(CUresult::CUDA_ERROR_INVALID_VALUE));
}

#[test]
fn options_of_a_library_are_checked() {
    let _context = testing::context();
    let text = CString::new(GLOBALS).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("globals.ptx");
    std::fs::write(&path, GLOBALS).unwrap();
    let path = CString::new(path.to_str().unwrap()).unwrap();
    let load = |option: u32, from_file: bool| {
        let (mut library, mut options, mut values) = (null_mut(), [option], [null_mut()]);
        let (out, none) = (&raw mut library, null_mut());
        let (options, values) = (options.as_mut_ptr(), values.as_mut_ptr());
        // SAFETY: NUL-terminated texts, a local variable and one option with its value.
        unsafe {
            if from_file {
                cuLibraryLoadFromFile(out, path.as_ptr(), none, null_mut(), 0, options, values, 1)
            } else {
                cuLibraryLoadData(out, text.as_ptr().cast(), none, null_mut(), 0, options, values, 1)
            }
        }
    };
    let refused = Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(load(Option_::CU_LIBRARY_BINARY_IS_PRESERVED as u32, false), Ok(()));
    assert_eq!(load(Option_::CU_LIBRARY_BINARY_IS_PRESERVED as u32, true), refused);
    assert_eq!(load(Option_::CU_LIBRARY_HOST_UNIVERSAL_FUNCTION_AND_DATA_TABLE as u32, true), Ok(()));
    assert_eq!(load(Option_::CU_LIBRARY_NUM_OPTIONS as u32, false), refused);
}

#[test]
fn a_library_needs_no_context_until_it_is_used() {
    testing::context();
    // SAFETY: this thread's own context goes off its stack.
    unsafe { crate::context::cuCtxPopCurrent_v2(null_mut()) }.unwrap();
    let library = load_library(GLOBALS).unwrap();
    kernel(library, c"bump").unwrap();
    assert_eq!(counter(library), Err(CUresult::CUDA_ERROR_INVALID_CONTEXT));
    assert_eq!(load_library("no image"), Err(CUresult::CUDA_ERROR_INVALID_IMAGE));
}
