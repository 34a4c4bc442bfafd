//! What loading accepts and refuses, and its messages.

use super::*;

/// Which line of a text has `part`, from 1.
fn line(text: &str, part: &str) -> usize {
    text.lines().position(|line| line.contains(part)).unwrap() + 1
}

#[test]
fn an_unknown_instruction_is_told_with_its_line() {
    testing::context();
    let text = VECTOR_ADD.replace("add.f32 %f3", "frobnicate.f32 %f3");
    let mut logs = Logs::new(512);
    assert_eq!(logs.load(&text), Err(CUresult::CUDA_ERROR_INVALID_PTX));
    let expected = format!("ptx input, line {}; error   : ", line(&text, "frobnicate"));
    assert!(logs.error().starts_with(&expected), "{}", logs.error());
    assert!(logs.error().contains("frobnicate"), "{}", logs.error());
    assert_eq!(logs.info(), "");
}

#[test]
fn a_log_is_cut_to_its_buffer() {
    testing::context();
    let mut logs = Logs::new(12);
    assert_eq!(logs.load(&VECTOR_ADD.replace("add.f32", "foo.f32")), Err(CUresult::CUDA_ERROR_INVALID_PTX));
    assert_eq!(logs.error(), "ptx input, ");
}

#[test]
fn a_module_that_loads_leaves_the_logs_empty() {
    testing::context();
    let mut logs = Logs::new(64);
    logs.load(VECTOR_ADD).unwrap();
    assert_eq!((logs.info(), logs.error()), ("", ""));
}

#[test]
fn a_syntax_error_and_an_unresolved_name_are_invalid_ptx() {
    testing::context();
    let mut logs = Logs::new(512);
    let text = VECTOR_ADD.replace("mov.u32 %r3, %ntid.x;", "mov.u32 %r3 %ntid.x;");
    assert_eq!(logs.load(&text), Err(CUresult::CUDA_ERROR_INVALID_PTX));
    assert!(logs.error().contains(&format!("line {}", line(&text, "%ntid.x"))), "{}", logs.error());
    let text = VECTOR_ADD.replace(".visible .entry", ".extern .func somewhere();\n.visible .entry");
    let text = text.replace("done:", "call somewhere;\ndone:");
    let mut logs = Logs::new(512);
    assert_eq!(logs.load(&text), Err(CUresult::CUDA_ERROR_INVALID_PTX));
    assert!(logs.error().contains("somewhere"), "{}", logs.error());
}

#[test]
fn ptx_that_is_newer_than_the_driver_is_refused() {
    testing::context();
    let mut logs = Logs::new(512);
    let text = VECTOR_ADD.replace(".version 8.0", ".version 9.1");
    assert_eq!(logs.load(&text), Err(CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION));
    assert_eq!(
        logs.error(),
        "ptx input, line 2; error   : Unsupported .version 9.1; current version is '9.0'\n"
    );
    load(&VECTOR_ADD.replace(".version 8.0", ".version 9.0")).unwrap();
}

#[test]
fn a_newer_architecture_is_refused_and_a_variant_of_this_one_is_not() {
    testing::context();
    let text = VECTOR_ADD.replace(".version 8.0", ".version 9.0");
    assert_eq!(load(&text.replace("sm_80", "sm_100")), Err(CUresult::CUDA_ERROR_INVALID_PTX));
    load(&text.replace("sm_80", "sm_90a")).unwrap();
}

#[test]
fn code_that_asks_for_more_memory_than_there_is_is_refused() {
    testing::context();
    let kernel = |variable: &str, param: &str, version: &str| {
        format!(
            ".version {version}\n.target sm_90\n.address_size 64\n{variable}\n\
             .visible .entry k({param})\n{{ .reg .b64 %rd<2>; mov.u64 %rd1, v; ret; }}\n"
        )
    };
    let mut logs = Logs::new(256);
    let shared = logs.load(&kernel(".shared .b8 v[50000];", "", "8.0"));
    assert_eq!(shared, Err(CUresult::CUDA_ERROR_INVALID_PTX));
    let expected = "Entry function 'k' uses too much shared data (0xc350 bytes, 0xc000 max)\n";
    assert!(logs.error().ends_with(expected), "{}", logs.error());
    load(&kernel(".shared .b8 v[49152];", "", "8.0")).unwrap();
    let refused = Err(CUresult::CUDA_ERROR_INVALID_PTX);
    assert_eq!(load(&kernel(".const .b8 v[65537];", "", "8.0")), refused);
    load(&kernel(".const .b8 v[65536];", "", "8.0")).unwrap();
    let large = ".param .align 8 .b8 large[5000]";
    assert_eq!(load(&kernel(".global .b8 v[1];", large, "8.0")), refused);
    load(&kernel(".global .b8 v[1];", large, "8.1")).unwrap();
    // There are no managed variables.
    assert_eq!(load(&kernel(".global .attribute(.managed) .b8 v[1];", "", "8.0")), refused);
}

#[test]
fn a_fat_binary_is_loaded_through_its_wrapper() {
    testing::context();
    let container: &[u8] = include_bytes!("../fatbin/add_one_zstd.fatbin");
    let wrapper = [0x1_4662_43b1, container.as_ptr().addr() as u64, 0];
    let mut module = null_mut();
    // SAFETY: a whole wrapper and a local variable.
    unsafe { cuModuleLoadFatBinary(&raw mut module, wrapper.as_ptr().cast()) }.unwrap();
    let f = function(module, "add_one").unwrap();
    let mut values = allocate(16);
    write(values, &[1, 0, 0, 0, 9, 0, 0, 0]);
    launch(f, [1; 3], [2, 1, 1], &mut [param(&mut values)]).unwrap();
    wait(&crate::context::current().unwrap()).unwrap();
    assert_eq!(read(values), [2, 0, 0, 0, 10, 0, 0, 0]);
}

#[test]
fn files_are_loaded() {
    testing::context();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vector_add.ptx");
    std::fs::write(&path, VECTOR_ADD).unwrap();
    let path = CString::new(path.to_str().unwrap()).unwrap();
    let mut module = null_mut();
    // SAFETY: a NUL-terminated text and a local variable.
    unsafe { cuModuleLoad(&raw mut module, path.as_ptr()) }.unwrap();
    function(module, "vector_add").unwrap();
    // SAFETY: as above.
    let missing = unsafe { cuModuleLoad(&raw mut module, c"/nonexistent.ptx".as_ptr()) };
    assert_eq!(missing, Err(CUresult::CUDA_ERROR_FILE_NOT_FOUND));
}

#[test]
fn options_are_checked() {
    testing::context();
    let text = CString::new(VECTOR_ADD).unwrap();
    let with = |option: u32, value: usize| {
        let mut module = null_mut();
        let mut options = [option];
        let mut values = [std::ptr::without_provenance_mut::<c_void>(value)];
        let (options, values) = (options.as_mut_ptr(), values.as_mut_ptr());
        // SAFETY: a NUL-terminated text, a local variable and one option with its value.
        unsafe { cuModuleLoadDataEx(&raw mut module, text.as_ptr().cast(), 1, options, values) }
    };
    let refused = Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(with(Jit::CU_JIT_OPTIMIZATION_LEVEL as u32, 4), Ok(()));
    assert_eq!(with(Jit::CU_JIT_OPTIMIZATION_LEVEL as u32, 5), refused);
    assert_eq!(with(Jit::CU_JIT_MAX_REGISTERS as u32, 32), Ok(()));
    assert_eq!(with(Jit::CU_JIT_CACHE_MODE as u32, 3), refused);
    assert_eq!(with(Jit::CU_JIT_NUM_OPTIONS as u32, 0), refused);
    assert_eq!(with(0xffff_ffff, 0), refused);
    // A log needs a size.
    let mut buffer = [0u8; 8];
    assert_eq!(with(Jit::CU_JIT_ERROR_LOG_BUFFER as u32, buffer.as_mut_ptr().addr()), refused);
    let mut module = null_mut();
    // SAFETY: nothing is read from the missing arrays.
    let missing =
        unsafe { cuModuleLoadDataEx(&raw mut module, text.as_ptr().cast(), 1, null_mut(), null_mut()) };
    assert_eq!(missing, refused);
}

#[test]
fn the_wall_time_is_told() {
    testing::context();
    let text = CString::new(VECTOR_ADD).unwrap();
    let mut options = [Jit::CU_JIT_WALL_TIME as u32];
    let mut values = [null_mut::<c_void>()];
    let mut module = null_mut();
    let (at_options, at_values) = (options.as_mut_ptr(), values.as_mut_ptr());
    // SAFETY: a NUL-terminated text, a local variable and one option with its value.
    unsafe { cuModuleLoadDataEx(&raw mut module, text.as_ptr().cast(), 1, at_options, at_values) }.unwrap();
    // SAFETY: the call has written a float there.
    let time_ms = unsafe { values.as_ptr().cast::<f32>().read() };
    assert!(time_ms > 0.0 && time_ms < 60e3, "{time_ms}");
}

#[test]
fn nothing_loads_without_a_context_or_a_place_for_it() {
    testing::context();
    let text = CString::new(VECTOR_ADD).unwrap();
    // SAFETY: nothing is written.
    let no_place = unsafe { cuModuleLoadData(null_mut(), text.as_ptr().cast()) };
    assert_eq!(no_place, Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    let mut module = null_mut();
    // SAFETY: a local variable.
    let no_image = unsafe { cuModuleLoadData(&raw mut module, std::ptr::null()) };
    assert_eq!(no_image, Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    // SAFETY: this thread's own context goes off its stack.
    unsafe { crate::context::cuCtxPopCurrent_v2(null_mut()) }.unwrap();
    assert_eq!(load(VECTOR_ADD), Err(CUresult::CUDA_ERROR_INVALID_CONTEXT));
}
