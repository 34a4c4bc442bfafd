//! The linker.

use cuda_abi::sys::CUjitInputType as T;
use cuda_abi::types::CUlinkState;

use super::*;

const CALLER: &str = "
.version 8.0
.target sm_80
.address_size 64
.extern .func (.param .b32 result) twice(.param .b32 value);
.extern .global .align 4 .u32 offset;
.visible .entry caller(.param .u64 out)
{
    .reg .b32 %r<4>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [out];
    {
    .param .b32 value0;
    .param .b32 result0;
    st.param.b32 [value0], 21;
    call (result0), twice, (value0);
    ld.param.b32 %r1, [result0];
    }
    ld.global.u32 %r2, [offset];
    add.u32 %r3, %r1, %r2;
    st.global.u32 [%rd1], %r3;
    ret;
}
";

const CALLED: &str = "
.version 8.0
.target sm_80
.address_size 64
.visible .global .align 4 .u32 offset = 1000;
.visible .func (.param .b32 result) twice(.param .b32 value)
{
    .reg .b32 %r<3>;
    ld.param.b32 %r1, [value];
    add.u32 %r2, %r1, %r1;
    st.param.b32 [result], %r2;
    ret;
}
";

fn create(logs: &mut Logs) -> CUlinkState {
    let mut state = null_mut();
    let (options, values) = (logs.options.as_mut_ptr(), logs.values.as_mut_ptr());
    // SAFETY: a local variable and four options that outlive the linker.
    unsafe { cuLinkCreate_v2(4, options, values, &raw mut state) }.unwrap();
    state
}

fn add(state: CUlinkState, kind: T, data: &[u8], name: &CStr) -> Result {
    let data_at = data.as_ptr().cast_mut().cast();
    // SAFETY: data of the size that is said, and no options.
    unsafe {
        cuLinkAddData_v2(state, kind as u32, data_at, data.len(), name.as_ptr(), 0, null_mut(), null_mut())
    }
}

fn complete(state: CUlinkState) -> Result<Vec<u8>> {
    let (mut image, mut size_bytes) = (null_mut(), 0);
    // SAFETY: local variables.
    unsafe { cuLinkComplete(state, &raw mut image, &raw mut size_bytes) }?;
    // SAFETY: the linker owns so many bytes until it is destroyed.
    Ok(unsafe { std::slice::from_raw_parts(image.cast::<u8>(), size_bytes) }.to_vec())
}

fn destroy(state: CUlinkState) -> Result {
    // SAFETY: handles are checked.
    unsafe { cuLinkDestroy(state) }
}

#[test]
fn two_texts_are_linked_and_the_image_is_loaded() {
    let context = testing::context();
    let mut logs = Logs::new(256);
    let state = create(&mut logs);
    add(state, T::CU_JIT_INPUT_PTX, CALLER.as_bytes(), c"caller.ptx").unwrap();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("called.ptx");
    std::fs::write(&path, CALLED).unwrap();
    let path = CString::new(path.to_str().unwrap()).unwrap();
    let ptx = T::CU_JIT_INPUT_PTX as u32;
    // SAFETY: a NUL-terminated text and no options.
    unsafe { cuLinkAddFile_v2(state, ptx, path.as_ptr(), 0, null_mut(), null_mut()) }.unwrap();
    let image = complete(state).unwrap();
    assert_eq!(logs.error(), "");
    assert_eq!(logs.info(), "linked 2 PTX texts\n");
    assert_eq!(complete(state).unwrap(), image, "the image stays");
    destroy(state).unwrap();
    assert_eq!(destroy(state), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));

    let mut module = null_mut();
    // SAFETY: a whole image and a local variable.
    unsafe { cuModuleLoadData(&raw mut module, image.as_ptr().cast()) }.unwrap();
    let f = function(module, "caller").unwrap();
    let mut out = allocate(4);
    launch(f, [1; 3], [1; 3], &mut [param(&mut out)]).unwrap();
    wait(&context).unwrap();
    assert_eq!(u32::from_le_bytes(read(out)), 1042);
}

#[test]
fn a_linked_image_is_an_input_again() {
    testing::context();
    let mut logs = Logs::new(256);
    let first = create(&mut logs);
    add(first, T::CU_JIT_INPUT_PTX, CALLED.as_bytes(), c"called.ptx").unwrap();
    let image = complete(first).unwrap();
    destroy(first).unwrap();
    let mut logs = Logs::new(256);
    let second = create(&mut logs);
    add(second, T::CU_JIT_INPUT_CUBIN, &image, c"called.cubin").unwrap();
    add(second, T::CU_JIT_INPUT_PTX, CALLER.as_bytes(), c"caller.ptx").unwrap();
    complete(second).unwrap();
    destroy(second).unwrap();
}

#[test]
fn a_bad_input_is_told_with_its_name_and_line() {
    testing::context();
    let mut logs = Logs::new(256);
    let state = create(&mut logs);
    let bad = CALLED.replace("add.u32", "frobnicate.u32");
    let refused = add(state, T::CU_JIT_INPUT_PTX, bad.as_bytes(), c"called.ptx");
    assert_eq!(refused, Err(CUresult::CUDA_ERROR_INVALID_PTX));
    assert!(logs.error().starts_with("called.ptx, line 10; error   : "), "{}", logs.error());
    // The linker continues without it.
    add(state, T::CU_JIT_INPUT_PTX, CALLED.as_bytes(), c"called.ptx").unwrap();
    complete(state).unwrap();
    destroy(state).unwrap();
}

#[test]
fn a_name_that_nobody_defines_fails_the_link() {
    testing::context();
    let mut logs = Logs::new(256);
    let state = create(&mut logs);
    add(state, T::CU_JIT_INPUT_PTX, CALLER.as_bytes(), c"caller.ptx").unwrap();
    assert_eq!(complete(state), Err(CUresult::CUDA_ERROR_UNKNOWN));
    assert!(logs.error().contains("twice") || logs.error().contains("offset"), "{}", logs.error());
    destroy(state).unwrap();
}

#[test]
fn inputs_that_hold_no_ptx_are_refused() {
    testing::context();
    let mut logs = Logs::new(256);
    let state = create(&mut logs);
    let mut cubin = [0; 64];
    cubin[..4].copy_from_slice(b"\x7fELF");
    cubin[18] = 190;
    let refused = add(state, T::CU_JIT_INPUT_CUBIN, &cubin, c"a.cubin");
    assert_eq!(refused, Err(CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU));
    for kind in [T::CU_JIT_INPUT_OBJECT, T::CU_JIT_INPUT_LIBRARY, T::CU_JIT_INPUT_FATBINARY] {
        assert_eq!(add(state, kind, b"what", c"a"), Err(CUresult::CUDA_ERROR_INVALID_IMAGE), "{kind:?}");
    }
    let unknown = add(state, T::CU_JIT_NUM_INPUT_TYPES, b"what", c"a");
    assert_eq!(unknown, Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    assert_eq!(add(state, T::CU_JIT_INPUT_PTX, b"", c"a"), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    // SAFETY: NUL-terminated texts and no options.
    let missing = unsafe { cuLinkAddFile_v2(state, 1, c"/nonexistent".as_ptr(), 0, null_mut(), null_mut()) };
    assert_eq!(missing, Err(CUresult::CUDA_ERROR_FILE_NOT_FOUND));
    // A log belongs to the whole linker.
    let mut input_logs = Logs::new(16);
    let (options, values) = (input_logs.options.as_mut_ptr(), input_logs.values.as_mut_ptr());
    let text = CALLED.as_ptr().cast_mut().cast();
    // SAFETY: a text of the size that is said, and four options.
    let log = unsafe { cuLinkAddData_v2(state, 1, text, CALLED.len(), c"a".as_ptr(), 4, options, values) };
    assert_eq!(log, Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    destroy(state).unwrap();
}
