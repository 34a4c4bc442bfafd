//! Programs' use of modules, through the handlers.

#![allow(
    clippy::multiple_unsafe_ops_per_block,
    reason = "a program's calls in a row, with the same arguments"
)]

mod formats;
mod functions;
mod launches;
mod libraries;
mod links;

use std::ffi::{CString, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use cuda_abi::sys::{CUjit_option as Jit, CUresult};
use cuda_abi::types::{CUdeviceptr, CUfunction, CUmodule, CUstream};

use crate::context::Context;
use crate::error::Result;
use crate::module::*;
use crate::{memory, stream, testing};

/// c[i] = a[i] + b[i] for i below n.
pub(super) const VECTOR_ADD: &str = "
.version 8.0
.target sm_80
.address_size 64

.visible .entry vector_add(
    .param .u64 a,
    .param .u64 b,
    .param .u64 c,
    .param .u32 n
)
{
    .reg .pred %p<2>;
    .reg .b32 %r<6>;
    .reg .f32 %f<4>;
    .reg .b64 %rd<11>;

    ld.param.u64 %rd1, [a];
    ld.param.u64 %rd2, [b];
    ld.param.u64 %rd3, [c];
    ld.param.u32 %r1, [n];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra done;
    mul.wide.u32 %rd4, %r5, 4;
    cvta.to.global.u64 %rd5, %rd1;
    add.s64 %rd6, %rd5, %rd4;
    cvta.to.global.u64 %rd7, %rd2;
    add.s64 %rd8, %rd7, %rd4;
    ld.global.f32 %f1, [%rd6];
    ld.global.f32 %f2, [%rd8];
    add.f32 %f3, %f1, %f2;
    cvta.to.global.u64 %rd9, %rd3;
    add.s64 %rd10, %rd9, %rd4;
    st.global.f32 [%rd10], %f3;
done:
    ret;
}
";

/// A variable and a constant with initial values, and a kernel that copies and changes them.
pub(super) const GLOBALS: &str = "
.version 8.0
.target sm_80
.address_size 64

.visible .global .align 4 .u32 counter[3] = {5, 6, 7};
.visible .const .align 8 .u64 pointer = generic(counter);
.global .align 16 .b8 hidden[64];

.visible .entry bump()
{
    .reg .b32 %r<3>;
    .reg .b64 %rd<3>;
    ld.const.u64 %rd1, [pointer];
    ld.u32 %r1, [%rd1+4];
    add.u32 %r2, %r1, 100;
    st.u32 [%rd1+4], %r2;
    ret;
}
";

/// A kernel that writes its parameters' bytes to memory: differing sizes, with padding between them.
pub(super) const STORE_PARAMS: &str = "
.version 8.0
.target sm_80
.address_size 64

.visible .entry store_params(.param .u8 small, .param .u64 out, .param .u16 medium, .param .f64 large)
{
    .reg .b16 %rs<3>;
    .reg .b64 %rd<3>;
    .reg .f64 %fd<2>;
    ld.param.u8 %rs1, [small];
    ld.param.u64 %rd1, [out];
    ld.param.u16 %rs2, [medium];
    ld.param.f64 %fd1, [large];
    cvta.to.global.u64 %rd2, %rd1;
    st.global.u8 [%rd2], %rs1;
    st.global.u16 [%rd2+2], %rs2;
    st.global.f64 [%rd2+8], %fd1;
    ret;
}
";

pub(super) fn load(text: &str) -> Result<CUmodule> {
    let text = CString::new(text).unwrap();
    let mut module = null_mut();
    // SAFETY: a NUL-terminated text and a local variable.
    unsafe { cuModuleLoadData(&raw mut module, text.as_ptr().cast()) }.map(|()| module)
}

pub(super) fn function(module: CUmodule, name: &str) -> Result<CUfunction> {
    let name = CString::new(name).unwrap();
    let mut function = null_mut();
    // SAFETY: a NUL-terminated text and a local variable.
    unsafe { cuModuleGetFunction(&raw mut function, module, name.as_ptr()) }.map(|()| function)
}

/// A context of the test's own with one module and one of its functions.
pub(super) fn loaded(text: &str, name: &str) -> (Arc<Context>, CUmodule, CUfunction) {
    let context = testing::context();
    let module = load(text).unwrap();
    let function = function(module, name).unwrap();
    (context, module, function)
}

pub(super) fn allocate(size_bytes: usize) -> CUdeviceptr {
    let mut address = 0;
    // SAFETY: a local variable.
    unsafe { memory::cuMemAlloc_v2(&raw mut address, size_bytes) }.unwrap();
    address
}

fn host(address: CUdeviceptr, len: usize) -> *mut u8 {
    let span = memory::span(address, 0).unwrap();
    let offset = address - span.start;
    assert!(offset + len as u64 <= span.len);
    span.host.wrapping_add(usize::try_from(offset).unwrap())
}

pub(super) fn write(address: CUdeviceptr, bytes: &[u8]) {
    // SAFETY: `host` has checked the length; no kernel is running.
    unsafe { host(address, bytes.len()).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
}

pub(super) fn read<const N: usize>(address: CUdeviceptr) -> [u8; N] {
    // SAFETY: `host` has checked the length; no kernel is running.
    unsafe { host(address, N).cast::<[u8; N]>().read() }
}

/// Launches with parameters by pointer, on the default stream.
pub(super) fn launch(f: CUfunction, grid: [u32; 3], block: [u32; 3], params: &mut [*mut c_void]) -> Result {
    launch_on(null_mut(), f, grid, block, 0, params)
}

pub(super) fn launch_on(
    stream: CUstream,
    f: CUfunction,
    [gx, gy, gz]: [u32; 3],
    [bx, by, bz]: [u32; 3],
    shared_bytes: u32,
    params: &mut [*mut c_void],
) -> Result {
    let params = if params.is_empty() { null_mut() } else { params.as_mut_ptr() };
    // SAFETY: as many pointers to values as the kernel has parameters.
    unsafe { cuLaunchKernel(f, gx, gy, gz, bx, by, bz, shared_bytes, stream, params, null_mut()) }
}

/// A pointer to a parameter's value.
pub(super) fn param<T>(value: &mut T) -> *mut c_void {
    (&raw mut *value).cast()
}

/// Options for an info and an error log, as a program keeps them.
pub(super) struct Logs {
    info: Vec<u8>,
    error: Vec<u8>,
    pub(super) options: [u32; 4],
    pub(super) values: [*mut c_void; 4],
}

impl Logs {
    pub(super) fn new(size_bytes: usize) -> Self {
        let (mut info, mut error) = (vec![0x7f; size_bytes], vec![0x7f; size_bytes]);
        let options = [
            Jit::CU_JIT_INFO_LOG_BUFFER as u32,
            Jit::CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES as u32,
            Jit::CU_JIT_ERROR_LOG_BUFFER as u32,
            Jit::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES as u32,
        ];
        let size = std::ptr::without_provenance_mut(size_bytes);
        let values = [info.as_mut_ptr().cast(), size, error.as_mut_ptr().cast(), size];
        Self { info, error, options, values }
    }

    pub(super) fn info(&self) -> &str {
        self.text(&self.info, 1)
    }

    pub(super) fn error(&self) -> &str {
        self.text(&self.error, 3)
    }

    /// What a buffer holds; the option has its length; a NUL is behind it.
    fn text<'a>(&self, buffer: &'a [u8], size: usize) -> &'a str {
        let filled = self.values[size].addr();
        assert_eq!(buffer[filled], 0);
        std::str::from_utf8(&buffer[..filled]).unwrap()
    }

    pub(super) fn load(&mut self, text: &str) -> Result<CUmodule> {
        let text = CString::new(text).unwrap();
        let mut module = null_mut();
        let (options, values) = (self.options.as_mut_ptr(), self.values.as_mut_ptr());
        // SAFETY: a NUL-terminated text, a local variable and four options with their values.
        unsafe { cuModuleLoadDataEx(&raw mut module, text.as_ptr().cast(), 4, options, values) }
            .map(|()| module)
    }
}

pub(super) fn wait(context: &Arc<Context>) -> Result {
    stream::synchronize_context(context)
}

#[test]
fn a_vector_add_runs() {
    let (context, _, f) = loaded(VECTOR_ADD, "vector_add");
    let n = 1000u32;
    let (mut a, mut b, mut c) = (allocate(4 * 1000), allocate(4 * 1000), allocate(4 * 1001));
    let bytes =
        |values: &dyn Fn(u32) -> f32| (0..n).flat_map(|i| values(i).to_le_bytes()).collect::<Vec<_>>();
    write(a, &bytes(&|i| i as f32));
    write(b, &bytes(&|i| 0.5 * i as f32));
    write(c + 4000, &[1, 2, 3, 4]);
    let mut count = n;
    let params = &mut [param(&mut a), param(&mut b), param(&mut c), param(&mut count)];
    launch(f, [4, 1, 1], [256, 1, 1], params).unwrap();
    // The parameters are copied at the call.
    count = 0;
    assert_eq!(count, 0);
    wait(&context).unwrap();
    for i in 0..n {
        assert_eq!(f32::from_le_bytes(read(c + 4 * u64::from(i))), 1.5 * i as f32);
    }
    assert_eq!(read(c + 4000), [1, 2, 3, 4]);
}

#[test]
fn variables_have_their_values_and_take_new_ones() {
    let (context, module, f) = loaded(GLOBALS, "bump");
    let (mut address, mut size_bytes) = (0, 0);
    // SAFETY: local variables and a NUL-terminated text.
    unsafe { cuModuleGetGlobal_v2(&raw mut address, &raw mut size_bytes, module, c"counter".as_ptr()) }
        .unwrap();
    assert_eq!(size_bytes, 12);
    let counter = || [0, 4, 8].map(|offset| u32::from_le_bytes(read(address + offset)));
    assert_eq!(counter(), [5, 6, 7]);
    launch(f, [1; 3], [1; 3], &mut []).unwrap();
    wait(&context).unwrap();
    assert_eq!(counter(), [5, 106, 7]);
    write(address + 4, &1000u32.to_le_bytes());
    launch(f, [1; 3], [1; 3], &mut []).unwrap();
    wait(&context).unwrap();
    assert_eq!(counter(), [5, 1100, 7]);

    // One of the two out parameters may be left out, and a name that is not `.visible` is found, too.
    let mut pointer = 0;
    // SAFETY: as above.
    unsafe { cuModuleGetGlobal_v2(&raw mut pointer, null_mut(), module, c"pointer".as_ptr()) }.unwrap();
    assert_eq!(u64::from_le_bytes(read(pointer)), address);
    // SAFETY: as above.
    unsafe { cuModuleGetGlobal_v2(null_mut(), &raw mut size_bytes, module, c"hidden".as_ptr()) }.unwrap();
    assert_eq!(size_bytes, 64);
    // SAFETY: as above.
    let refused = unsafe { cuModuleGetGlobal_v2(null_mut(), null_mut(), module, c"hidden".as_ptr()) };
    assert_eq!(refused, Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    // SAFETY: as above.
    let missing = unsafe { cuModuleGetGlobal_v2(&raw mut pointer, null_mut(), module, c"bump".as_ptr()) };
    assert_eq!(missing, Err(CUresult::CUDA_ERROR_NOT_FOUND));
}

#[test]
fn an_unloaded_module_is_gone_with_its_functions_and_variables() {
    let (context, module, f) = loaded(GLOBALS, "bump");
    let mut address = 0;
    // SAFETY: local variables and a NUL-terminated text.
    unsafe { cuModuleGetGlobal_v2(&raw mut address, null_mut(), module, c"counter".as_ptr()) }.unwrap();
    assert!(memory::span(address, 0).is_some());
    // SAFETY: the module is not used any more.
    unsafe { cuModuleUnload(module) }.unwrap();
    assert_eq!(launch(f, [1; 3], [1; 3], &mut []), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
    assert_eq!(function(module, "bump"), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
    // SAFETY: as above.
    assert_eq!(unsafe { cuModuleUnload(module) }, Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
    drop(context);
}

#[test]
fn a_destroyed_context_takes_its_modules_along() {
    let (context, module, f) = loaded(GLOBALS, "bump");
    // SAFETY: the context is the test's own.
    unsafe { crate::context::cuCtxDestroy_v2(context.handle as cuda_abi::types::CUcontext) }.unwrap();
    let _other = testing::context();
    assert_eq!(function(module, "bump"), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
    assert_eq!(launch(f, [1; 3], [1; 3], &mut []), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
}

/// Runs until it is cancelled, once it has said that it runs.
const ENDLESS: &str = "
.version 8.0
.target sm_80
.address_size 64

.visible .entry endless(.param .u64 flag)
{
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [flag];
    cvta.to.global.u64 %rd2, %rd1;
    st.volatile.global.u32 [%rd2], 1;
again:
    bra again;
}
";

/// Starts an endless kernel on the default stream and waits until it runs.
fn start_endless(f: CUfunction) {
    let mut flag = null_mut();
    // SAFETY: `flag` is a local variable.
    unsafe { memory::cuMemAllocHost_v2(&raw mut flag, 4) }.unwrap();
    // SAFETY: pinned memory of this test, aligned, freed with its context only; accessed atomically only.
    let runs = unsafe { std::sync::atomic::AtomicU32::from_ptr(flag.cast()) };
    let mut flag = flag as u64;
    launch(f, [1; 3], [1; 3], &mut [(&raw mut flag).cast()]).unwrap();
    while runs.load(std::sync::atomic::Ordering::Acquire) == 0 {
        std::thread::yield_now();
    }
}

#[test]
fn an_endless_kernel_ends_with_its_context() {
    let (context, _, f) = loaded(ENDLESS, "endless");
    start_endless(f);
    // SAFETY: the context is the test's own.
    unsafe { crate::context::cuCtxDestroy_v2(context.handle as cuda_abi::types::CUcontext) }.unwrap();
}

#[test]
fn names_and_missing_ones() {
    let (_context, module, f) = loaded(GLOBALS, "bump");
    // The same function has the same handle.
    assert_eq!(function(module, "bump"), Ok(f));
    assert_eq!(function(module, "counter"), Err(CUresult::CUDA_ERROR_NOT_FOUND));
    let mut out = null_mut();
    // SAFETY: a local variable.
    let no_name = unsafe { cuModuleGetFunction(&raw mut out, module, std::ptr::null()) };
    assert_eq!(no_name, Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    // SAFETY: nothing is written.
    let no_place = unsafe { cuModuleGetFunction(null_mut(), module, c"bump".as_ptr()) };
    assert_eq!(no_place, Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    let mut count = 0;
    // SAFETY: a local variable.
    unsafe { cuModuleGetFunctionCount(&raw mut count, module) }.unwrap();
    assert_eq!(count, 1);
    let mut functions = [null_mut(); 2];
    // SAFETY: room for two handles.
    unsafe { cuModuleEnumerateFunctions(functions.as_mut_ptr(), 2, module) }.unwrap();
    assert_eq!(functions, [f, null_mut()]);
    let mut texture = null_mut();
    // SAFETY: local variables.
    let no_texture = unsafe { cuModuleGetTexRef(&raw mut texture, module, c"counter".as_ptr()) };
    assert_eq!(no_texture, Err(CUresult::CUDA_ERROR_NOT_FOUND));
}
