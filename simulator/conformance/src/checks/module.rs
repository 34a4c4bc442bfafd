//! Modules, libraries, linking.

use std::ffi::{CStr, CString, c_void};

use cuda_abi::sys::{CUfunction_attribute, CUjit_option as Option_, CUjitInputType};
use cuda_abi::types::*;

use crate::check::{Check, Result, check, expect_equal};
use crate::{cu, ensure, gives, gpu, kernels, ok, refuses};

/// The checks of this area.
pub const CHECKS: &[Check] = &[
    check(
        "module/missing-names",
        "a function or variable that is not there is CUDA_ERROR_NOT_FOUND (reference)",
        missing_names,
    ),
    check(
        "module/global",
        "a variable has its size, its initial value, and is what kernels use (reference)",
        global,
    ),
    check(
        "module/global-optional",
        "NULL for address or size of a variable is ignored (reference, cuModuleGetGlobal)",
        global_optional,
    ),
    check(
        "module/constant",
        "a constant variable has its initial values and can be written by the host",
        constant,
    ),
    check("module/twice", "a module loaded twice has its variables twice", twice),
    check("module/unload", "an unloaded module and its memory are released", unload),
    check(
        "module/from-file",
        "cuModuleLoad reads a file; one that is not there is CUDA_ERROR_FILE_NOT_FOUND (reference)",
        from_file,
    ),
    check(
        "module/count",
        "the functions of a module are counted and listed (reference, cuModuleEnumerateFunctions)",
        count,
    ),
    check(
        "module/syntax-error",
        "PTX with an error is CUDA_ERROR_INVALID_PTX, and the log names the line (reference)",
        syntax_error,
    ),
    check(
        "module/unknown-instruction",
        "an instruction that does not exist is CUDA_ERROR_INVALID_PTX",
        unknown_instruction,
    ),
    check(
        "module/newer-ptx",
        "PTX of a later version is CUDA_ERROR_UNSUPPORTED_PTX_VERSION (reference)",
        newer_ptx,
    ),
    check("module/rubbish", "what is no image at all is refused", rubbish),
    check(
        "module/log-buffers",
        "log buffers of a good module stay empty or are terminated (reference, cuModuleLoadDataEx)",
        log_buffers,
    ),
    check(
        "module/function-attributes",
        "attributes of a function (reference, cuFuncGetAttribute)",
        function_attributes,
    ),
    check(
        "module/parameters",
        "offset and size of each parameter (reference, cuFuncGetParamInfo)",
        parameters,
    ),
    check("module/function-name", "a function knows its name and its module (reference)", function_name),
    check(
        "library/kernel",
        "a library's kernel is launched as it is and by its function (reference, cuLibraryGetKernel)",
        library_kernel,
    ),
    check(
        "library/global",
        "a library's variable is found in the current context (reference)",
        library_global,
    ),
    check(
        "library/no-context",
        "a library is loaded without a current context (programming guide, Library management)",
        library_no_context,
    ),
    check("library/questions", "count, name and parameters of a library's kernels", library_questions),
    check(
        "link/two-texts",
        "two PTX texts that need each other are linked (reference, cuLinkAddData)",
        link_two,
    ),
    check("link/unresolved", "an undefined function is an error", link_unresolved),
];

fn missing_names() -> Result {
    gpu::start()?;
    let module = gpu::module(kernels::MODULE)?;
    let (mut function, mut address, mut size) = (std::ptr::null_mut(), 0, 0);
    let name = c"not_there".as_ptr();
    gives!(CUDA_ERROR_NOT_FOUND, cuModuleGetFunction(&raw mut function, module, name));
    gives!(CUDA_ERROR_NOT_FOUND, cuModuleGetGlobal_v2(&raw mut address, &raw mut size, module, name));
    Ok(())
}

fn variable(module: CUmodule, name: &CStr) -> Result<(u64, usize)> {
    let (mut address, mut size) = (0, 0);
    ok!(cuModuleGetGlobal_v2(&raw mut address, &raw mut size, module, name.as_ptr()));
    Ok((address, size))
}

fn global() -> Result {
    gpu::start()?;
    let module = gpu::module(kernels::MODULE)?;
    let (counter, size) = variable(module, c"counter")?;
    expect_equal("size", size, 4)?;
    gpu::expect_content(counter, &[41_u32])?;
    let (bytes, size) = variable(module, c"bytes")?;
    expect_equal("size of the other", size, 16)?;
    gpu::expect_content(bytes, &[0_u8; 16])?;
    let (bump, out) = (gpu::function_of(module, "bump")?, gpu::alloc(4)?);
    gpu::launch(bump, 1, 1, std::ptr::null_mut(), &[out])?;
    gpu::expect_content(out, &[42_u32])?;
    gpu::write(counter, &[100_u32])?;
    gpu::launch(bump, 1, 1, std::ptr::null_mut(), &[out])?;
    gpu::expect_content(counter, &[101_u32])
}

fn global_optional() -> Result {
    gpu::start()?;
    let module = gpu::module(kernels::MODULE)?;
    let (mut address, mut size, null) = (0, 0, std::ptr::null_mut());
    ok!(cuModuleGetGlobal_v2(&raw mut address, null, module, c"counter".as_ptr()));
    ok!(cuModuleGetGlobal_v2(std::ptr::null_mut(), &raw mut size, module, c"counter".as_ptr()));
    ensure!(address != 0 && size == 4, "address {address:#x}, size {size}");
    Ok(())
}

fn constant() -> Result {
    gpu::start()?;
    let module = gpu::module(kernels::MODULE)?;
    let (lookup, out) = (gpu::function_of(module, "lookup")?, gpu::alloc(16)?);
    gpu::launch(lookup, 1, 4, std::ptr::null_mut(), &[out])?;
    gpu::expect_content(out, &[10_u32, 20, 30, 40])?;
    let (table, size) = variable(module, c"table")?;
    expect_equal("size", size, 16)?;
    gpu::write(table + 4, &[21_u32, 31])?;
    gpu::launch(lookup, 1, 4, std::ptr::null_mut(), &[out])?;
    gpu::expect_content(out, &[10_u32, 21, 31, 40])
}

fn twice() -> Result {
    gpu::start()?;
    let (first, second) = (gpu::module(kernels::MODULE)?, gpu::module(kernels::MODULE)?);
    let (in_first, _) = variable(first, c"counter")?;
    let (in_second, _) = variable(second, c"counter")?;
    ensure!(in_first != in_second, "both modules have one variable");
    gpu::write(in_first, &[7_u32])?;
    gpu::expect_content(in_second, &[41_u32])
}

fn unload() -> Result {
    gpu::start()?;
    let module = gpu::module(kernels::MODULE)?;
    ok!(cuModuleUnload(module));
    for _ in 0..50 {
        let module = gpu::module(kernels::MODULE)?;
        ok!(cuModuleUnload(module));
    }
    let before = gpu::free_bytes()?;
    for _ in 0..50 {
        let module = gpu::module(kernels::MODULE)?;
        ok!(cuModuleUnload(module));
    }
    expect_equal("free memory after 50 modules", gpu::free_bytes()?, before)
}

fn from_file() -> Result {
    gpu::start()?;
    let file = tempfile::NamedTempFile::new();
    let file = file.or_else(|error| crate::check::failed(format!("temporary file: {error}")))?;
    let text = kernels::MODULE.trim_end_matches('\0');
    std::fs::write(file.path(), text)
        .or_else(|error| crate::check::failed(format!("temporary file: {error}")))?;
    let path = CString::new(file.path().as_os_str().as_encoded_bytes()).expect("paths have no NUL");
    let mut module = std::ptr::null_mut();
    ok!(cuModuleLoad(&raw mut module, path.as_ptr()));
    gpu::function_of(module, "bump")?;
    gives!(CUDA_ERROR_FILE_NOT_FOUND, cuModuleLoad(&raw mut module, c"/nonexistent.ptx".as_ptr()));
    Ok(())
}

fn count() -> Result {
    gpu::start()?;
    let (module, mut count) = (gpu::module(kernels::MODULE)?, 0);
    ok!(cuModuleGetFunctionCount(&raw mut count, module));
    expect_equal("functions", count, 5)?;
    let mut functions = [std::ptr::null_mut(); 5];
    ok!(cuModuleEnumerateFunctions(functions.as_mut_ptr(), 5, module));
    ensure!(functions.iter().all(|function| !function.is_null()), "{functions:?}");
    Ok(())
}

/// Loads PTX with log buffers and gives the result and the error log.
fn load_with_log(ptx: &str) -> Result<(u32, String)> {
    let text = CString::new(ptx).expect("PTX has no NUL");
    let mut log = vec![0_u8; 4096];
    let mut options =
        [Option_::CU_JIT_ERROR_LOG_BUFFER as u32, Option_::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES as u32];
    let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), 4096 as *mut c_void];
    let mut module = std::ptr::null_mut();
    let code = cu!(cuModuleLoadDataEx(
        &raw mut module,
        text.as_ptr().cast(),
        2,
        options.as_mut_ptr(),
        values.as_mut_ptr(),
    ));
    let text = CStr::from_bytes_until_nul(&log).map(|text| text.to_string_lossy().into_owned());
    let text = text.or_else(|_| crate::check::failed("the log has no end"))?;
    Ok((code, text))
}

const HEAD: &str = ".version 7.0\n.target sm_70\n.address_size 64\n";

fn syntax_error() -> Result {
    gpu::start()?;
    let ptx = format!("{HEAD}.visible .entry broken()\n{{\n    this is not PTX\n    ret;\n}}\n");
    let (code, log) = load_with_log(&ptx)?;
    expect_equal("result", gpu::name_of(code), "CUDA_ERROR_INVALID_PTX".into())?;
    ensure!(log.contains("line 6"), "the log does not name line 6: {log:?}");
    let mut module = std::ptr::null_mut();
    let text = CString::new(ptx).expect("PTX has no NUL");
    gives!(CUDA_ERROR_INVALID_PTX, cuModuleLoadData(&raw mut module, text.as_ptr().cast()));
    Ok(())
}

fn unknown_instruction() -> Result {
    gpu::start()?;
    let body = "    .reg .b32 %r;\n    frobnicate.u32 %r, %r;\n    ret;\n";
    let (code, log) = load_with_log(&format!("{HEAD}.visible .entry broken()\n{{\n{body}}}\n"))?;
    expect_equal("result", gpu::name_of(code), "CUDA_ERROR_INVALID_PTX".into())?;
    ensure!(!log.is_empty(), "the log is empty");
    Ok(())
}

fn newer_ptx() -> Result {
    gpu::start()?;
    let ptx = ".version 99.0\n.target sm_70\n.address_size 64\n.visible .entry fine() { ret; }\n";
    let (code, _) = load_with_log(ptx)?;
    expect_equal("result", gpu::name_of(code), "CUDA_ERROR_UNSUPPORTED_PTX_VERSION".into())
}

fn rubbish() -> Result {
    gpu::start()?;
    let mut module = std::ptr::null_mut();
    let bytes = [0x55_u8, 0xaa, 3, 4, 5, 6, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    refuses!(cuModuleLoadData(&raw mut module, bytes.as_ptr().cast()));
    gives!(CUDA_ERROR_INVALID_VALUE, cuModuleLoadData(&raw mut module, std::ptr::null()));
    Ok(())
}

fn log_buffers() -> Result {
    gpu::start()?;
    let (code, log) = load_with_log(kernels::BASIC.trim_end_matches('\0'))?;
    expect_equal("result", gpu::name_of(code), "CUDA_SUCCESS".into())?;
    expect_equal("error log", log, String::new())
}

fn attribute(function: CUfunction, attribute: CUfunction_attribute) -> Result<i32> {
    let mut value = -1;
    ok!(cuFuncGetAttribute(&raw mut value, attribute as u32, function));
    Ok(value)
}

fn function_attributes() -> Result {
    use CUfunction_attribute as A;
    gpu::start()?;
    let reduce = gpu::function(kernels::TOGETHER, "reduce")?;
    expect_equal("shared memory", attribute(reduce, A::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?, 1024)?;
    expect_equal("threads", attribute(reduce, A::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?, 1024)?;
    expect_equal("PTX version", attribute(reduce, A::CU_FUNC_ATTRIBUTE_PTX_VERSION)?, 70)?;
    let registers = attribute(reduce, A::CU_FUNC_ATTRIBUTE_NUM_REGS)?;
    ensure!((1..=255).contains(&registers), "{registers} registers");
    let bounded = gpu::function(kernels::MODULE, "bounded")?;
    expect_equal("bounded", attribute(bounded, A::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?, 64)?;
    let local = gpu::function(kernels::STRUCTURE, "local_array")?;
    let local = attribute(local, A::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?;
    ensure!(local >= 128, "{local} bytes of local memory");
    let mut value = 0;
    gives!(CUDA_ERROR_INVALID_VALUE, cuFuncGetAttribute(&raw mut value, 1000, reduce));
    Ok(())
}

fn parameters() -> Result {
    gpu::start()?;
    let mixed = gpu::function(kernels::MODULE, "mixed")?;
    let mut got = Vec::new();
    for index in 0..5 {
        let (mut offset, mut size) = (0, 0);
        ok!(cuFuncGetParamInfo(mixed, index, &raw mut offset, &raw mut size));
        got.push((offset, size));
    }
    expect_equal("parameters", got, vec![(0, 1), (2, 2), (8, 8), (16, 4), (24, 8)])?;
    let (mut offset, mut size) = (0, 0);
    gives!(CUDA_ERROR_INVALID_VALUE, cuFuncGetParamInfo(mixed, 5, &raw mut offset, &raw mut size));
    Ok(())
}

fn function_name() -> Result {
    gpu::start()?;
    let module = gpu::module(kernels::MODULE)?;
    let function = gpu::function_of(module, "lookup")?;
    let (mut its_module, mut name) = (std::ptr::null_mut(), std::ptr::null());
    ok!(cuFuncGetModule(&raw mut its_module, function));
    expect_equal("module", its_module, module)?;
    ok!(cuFuncGetName(&raw mut name, function));
    // SAFETY: the driver gave a NUL-terminated text that lives as long as the module.
    let name = unsafe { CStr::from_ptr(name) };
    expect_equal("name", name, c"lookup")
}

fn load_library(ptx: &str) -> Result<CUlibrary> {
    let (mut library, null) = (std::ptr::null_mut(), std::ptr::null_mut());
    ok!(cuLibraryLoadData(
        &raw mut library,
        ptx.as_ptr().cast(),
        std::ptr::null_mut(),
        null,
        0,
        std::ptr::null_mut(),
        std::ptr::null_mut(),
        0,
    ));
    Ok(library)
}

fn kernel(library: CUlibrary, name: &CStr) -> Result<CUkernel> {
    let mut kernel = std::ptr::null_mut();
    ok!(cuLibraryGetKernel(&raw mut kernel, library, name.as_ptr()));
    Ok(kernel)
}

fn library_kernel() -> Result {
    gpu::start()?;
    let library = load_library(kernels::BASIC)?;
    let (kernel, address) = (kernel(library, c"affine")?, gpu::upload(&[1_u32])?);
    gpu::launch(kernel.cast(), 1, 1, std::ptr::null_mut(), &[address, 2, 1])?;
    let mut function = std::ptr::null_mut();
    ok!(cuKernelGetFunction(&raw mut function, kernel));
    gpu::launch(function, 1, 1, std::ptr::null_mut(), &[address, 2, 1])?;
    gpu::expect_content(address, &[7_u32])?;
    let mut missing = std::ptr::null_mut();
    gives!(CUDA_ERROR_NOT_FOUND, cuLibraryGetKernel(&raw mut missing, library, c"nothing".as_ptr()));
    ok!(cuLibraryUnload(library));
    Ok(())
}

fn library_global() -> Result {
    gpu::start()?;
    let library = load_library(kernels::MODULE)?;
    let (mut address, mut size) = (0, 0);
    ok!(cuLibraryGetGlobal(&raw mut address, &raw mut size, library, c"counter".as_ptr()));
    expect_equal("size", size, 4)?;
    let (bump, out) = (kernel(library, c"bump")?, gpu::alloc(4)?);
    gpu::launch(bump.cast(), 1, 1, std::ptr::null_mut(), &[out])?;
    gpu::expect_content(address, &[42_u32])?;
    let mut module = std::ptr::null_mut();
    ok!(cuLibraryGetModule(&raw mut module, library));
    expect_equal("the module's variable", variable(module, c"counter")?.0, address)
}

fn library_no_context() -> Result {
    ok!(cuInit(0));
    let library = load_library(kernels::MODULE)?;
    let bump = kernel(library, c"bump")?;
    gpu::start()?;
    let out = gpu::alloc(4)?;
    gpu::launch(bump.cast(), 1, 1, std::ptr::null_mut(), &[out])?;
    gpu::expect_content(out, &[42_u32])
}

fn library_questions() -> Result {
    gpu::start()?;
    let (library, mut count) = (load_library(kernels::MODULE)?, 0);
    ok!(cuLibraryGetKernelCount(&raw mut count, library));
    expect_equal("kernels", count, 5)?;
    let mixed = kernel(library, c"mixed")?;
    let mut name = std::ptr::null();
    ok!(cuKernelGetName(&raw mut name, mixed));
    // SAFETY: the driver gave a NUL-terminated text that lives as long as the library.
    let name = unsafe { CStr::from_ptr(name) };
    expect_equal("name", name, c"mixed")?;
    let (mut offset, mut size) = (0, 0);
    ok!(cuKernelGetParamInfo(mixed, 4, &raw mut offset, &raw mut size));
    expect_equal("the last parameter", (offset, size), (24, 8))
}

const CALLER: &str = "\
.version 7.0
.target sm_70
.address_size 64
.extern .func (.param .b32 result) doubled(.param .b32 x);
.visible .entry twice(.param .u64 to)
{
    .reg .b32 %r<2>;
    .reg .b64 %d;
    ld.param.u64 %d, [to];
    ld.global.u32 %r0, [%d];
    {
        .param .b32 argument;
        .param .b32 answer;
        st.param.b32 [argument], %r0;
        call.uni (answer), doubled, (argument);
        ld.param.b32 %r1, [answer];
    }
    st.global.u32 [%d], %r1;
    ret;
}
\0";

const CALLEE: &str = "\
.version 7.0
.target sm_70
.address_size 64
.visible .func (.param .b32 result) doubled(.param .b32 x)
{
    .reg .b32 %r;
    ld.param.u32 %r, [x];
    add.u32 %r, %r, %r;
    st.param.b32 [result], %r;
    ret;
}
\0";

fn link_start() -> Result<CUlinkState> {
    let mut state = std::ptr::null_mut();
    ok!(cuLinkCreate_v2(0, std::ptr::null_mut(), std::ptr::null_mut(), &raw mut state));
    Ok(state)
}

fn link_add(state: CUlinkState, ptx: &str, name: &CStr) -> Result {
    ok!(cuLinkAddData_v2(
        state,
        CUjitInputType::CU_JIT_INPUT_PTX as u32,
        ptx.as_ptr().cast_mut().cast(),
        ptx.len(),
        name.as_ptr(),
        0,
        std::ptr::null_mut(),
        std::ptr::null_mut(),
    ));
    Ok(())
}

fn link_two() -> Result {
    gpu::start()?;
    let state = link_start()?;
    link_add(state, CALLER, c"caller")?;
    link_add(state, CALLEE, c"callee")?;
    let (mut image, mut size, mut module) = (std::ptr::null_mut(), 0, std::ptr::null_mut());
    ok!(cuLinkComplete(state, &raw mut image, &raw mut size));
    ensure!(size > 0, "the image is empty");
    ok!(cuModuleLoadData(&raw mut module, image));
    ok!(cuLinkDestroy(state));
    let address = gpu::upload(&[21_u32])?;
    gpu::launch(gpu::function_of(module, "twice")?, 1, 1, std::ptr::null_mut(), &[address])?;
    gpu::expect_content(address, &[42_u32])
}

fn link_unresolved() -> Result {
    gpu::start()?;
    let state = link_start()?;
    link_add(state, CALLER, c"caller")?;
    let (mut image, mut size) = (std::ptr::null_mut(), 0);
    refuses!(cuLinkComplete(state, &raw mut image, &raw mut size));
    Ok(())
}
