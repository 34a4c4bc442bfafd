//! What cudarc's safe interface offers, used once each, and what it answers. Prints `ok`.

use std::sync::Arc;

use cudarc::driver::sys::{CUevent_flags, CUgraphInstantiate_flags, CUresult, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaModule, DriverError, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;

const COUNT: u32 = 5000;

/// `scale(x, n)`: `x[i] = x[i] * factor`, where `factor` is a constant of the module that begins as 3.
const PTX: &str = "
.version 7.0
.target sm_70
.address_size 64
.visible .const .align 4 .f32 factor = 0f40400000;
.visible .entry scale(.param .u64 x, .param .u32 n)
{
    .reg .pred %p;
    .reg .b32 %r<5>;
    .reg .f32 %f<4>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [x];
    ld.param.u32 %r1, [n];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.u32 %r2, %r2, %r3, %r4;
    setp.ge.u32 %p, %r2, %r1;
    @%p ret;
    cvta.to.global.u64 %rd2, %rd1;
    mul.wide.u32 %rd3, %r2, 4;
    add.u64 %rd4, %rd2, %rd3;
    ld.global.f32 %f1, [%rd4];
    ld.const.f32 %f2, [factor];
    mul.rn.f32 %f3, %f1, %f2;
    st.global.f32 [%rd4], %f3;
    ret;
}
";

fn main() -> Result<(), DriverError> {
    let context = CudaContext::new(0)?;
    assert_eq!(context.compute_capability()?, (9, 0));
    let (free_bytes, total_bytes) = context.mem_get_info()?;
    assert!(0 < free_bytes && free_bytes <= total_bytes);
    let module = context.load_module(Ptx::from_src(PTX))?;
    streams_and_events(&context, &module)?;
    constant(&context, &module)?;
    graph(&context, &module)?;
    errors(&context, &module)?;
    context.synchronize()?;
    let (free_at_end_bytes, _) = context.mem_get_info()?;
    assert!(free_at_end_bytes + (64 << 20) >= free_bytes, "memory leaked");
    println!("ok");
    Ok(())
}

fn numbers() -> Vec<f32> {
    (0..COUNT).map(|i| i as f32).collect()
}

fn times(factor: f32) -> Vec<f32> {
    numbers().into_iter().map(|number| number * factor).collect()
}

/// Two streams that share a buffer; pinned memory; the time between two events.
fn streams_and_events(context: &Arc<CudaContext>, module: &Arc<CudaModule>) -> Result<(), DriverError> {
    let scale = module.load_function("scale")?;
    let first = context.new_stream()?;
    let start = first.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT))?;
    // SAFETY: it is filled before it is read.
    let mut pinned = unsafe { context.alloc_pinned::<f32>(COUNT as usize) }?;
    pinned.as_mut_slice()?.copy_from_slice(&numbers());
    let mut buffer = first.clone_htod(&pinned)?;
    // SAFETY: the kernel gets the buffer and its length.
    unsafe {
        first.launch_builder(&scale).arg(&mut buffer).arg(&COUNT).launch(LaunchConfig::for_num_elems(COUNT))
    }?;
    let second = first.fork()?;
    // SAFETY: as above.
    unsafe {
        second.launch_builder(&scale).arg(&mut buffer).arg(&COUNT).launch(LaunchConfig::for_num_elems(COUNT))
    }?;
    first.join(&second)?;
    assert_eq!(first.clone_dtoh(&buffer)?, times(9.0));
    let end = first.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT))?;
    assert!(start.elapsed_ms(&end)? > 0.0);
    let copy = first.clone_dtod(&buffer)?;
    drop(buffer);
    assert_eq!(first.clone_dtoh(&copy.slice(10..20))?, times(9.0)[10..20]);
    Ok(())
}

/// A constant of the module is written.
fn constant(context: &Arc<CudaContext>, module: &Arc<CudaModule>) -> Result<(), DriverError> {
    let stream = context.default_stream();
    let scale = module.load_function("scale")?;
    let mut factor = module.get_global("factor", &stream)?;
    stream.memcpy_htod(&2.0f32.to_le_bytes(), &mut factor)?;
    let mut buffer = stream.clone_htod(&numbers())?;
    // SAFETY: the kernel gets the buffer and its length.
    unsafe {
        stream.launch_builder(&scale).arg(&mut buffer).arg(&COUNT).launch(LaunchConfig::for_num_elems(COUNT))
    }?;
    assert_eq!(stream.clone_dtoh(&buffer)?, times(2.0));
    stream.memcpy_htod(&3.0f32.to_le_bytes(), &mut factor)?;
    stream.synchronize()
}

/// A captured launch runs when its graph is launched, and not before.
fn graph(context: &Arc<CudaContext>, module: &Arc<CudaModule>) -> Result<(), DriverError> {
    let scale = module.load_function("scale")?;
    let stream = context.new_stream()?;
    // SAFETY: everything below is on one stream. With it, cudarc would wait inside of the capture for events from
    // outside of it, which is an error.
    unsafe { context.disable_event_tracking() };
    let mut buffer = stream.clone_htod(&numbers())?;
    stream.synchronize()?;
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)?;
    // SAFETY: the kernel gets the buffer and its length.
    unsafe {
        stream.launch_builder(&scale).arg(&mut buffer).arg(&COUNT).launch(LaunchConfig::for_num_elems(COUNT))
    }?;
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags)?.expect("a graph was captured");
    assert_eq!(stream.clone_dtoh(&buffer)?, numbers());
    graph.launch()?;
    graph.launch()?;
    assert_eq!(stream.clone_dtoh(&buffer)?, times(9.0));
    // SAFETY: switching it on is always sound.
    unsafe { context.enable_event_tracking() };
    Ok(())
}

/// What is refused is refused with the right error, and nothing else suffers.
fn errors(context: &Arc<CudaContext>, module: &Arc<CudaModule>) -> Result<(), DriverError> {
    let refused = |result: Result<(), DriverError>| result.expect_err("it is refused").0;
    let missing = module.load_function("missing").map(|_| ());
    assert_eq!(refused(missing), CUresult::CUDA_ERROR_NOT_FOUND);
    let bad = context.load_module(Ptx::from_src(".version 7.0\n.target sm_70\nnonsense")).map(|_| ());
    assert_eq!(refused(bad), CUresult::CUDA_ERROR_INVALID_PTX);
    let stream = context.default_stream();
    let huge = stream.alloc_zeros::<u8>(1 << 50).map(|_| ());
    assert_eq!(refused(huge), CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    let scale = module.load_function("scale")?;
    let mut buffer = stream.clone_htod(&numbers())?;
    let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (2048, 1, 1), shared_mem_bytes: 0 };
    // SAFETY: the kernel gets the buffer and its length.
    let too_large =
        unsafe { stream.launch_builder(&scale).arg(&mut buffer).arg(&COUNT).launch(config) }.map(|_| ());
    assert_eq!(refused(too_large), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(stream.clone_dtoh(&buffer)?, numbers());
    Ok(())
}
