//! Launches: what a program asks for is checked and copied when it calls, and run when a stream comes to it.

mod attributes;
mod params;

use std::ffi::c_void;
use std::sync::Arc;

use cuda_abi::sys::{self, CUresult};
use cuda_abi::types::{CUfunction, CUstream};
use simcuda_machine::Turn;
use simcuda_ptx as ptx;

use super::function::{self, Function};
use super::occupancy::resident_blocks;
use super::settings::max_threads;
use crate::context::{self, Context};
use crate::device::{
    MAX_BLOCK_DIM, MAX_GRID_DIM, MULTIPROCESSORS, SHARED_BYTES_PER_BLOCK_OPTIN, THREADS_PER_BLOCK,
};
use crate::error::{Error, Result};
use crate::stream::{self, Work};
use crate::{entry, memory, process};

pub(super) use attributes::Attributes;

/// A launch that is ready to run: function, dimensions, a copy of its parameters.
pub(crate) struct Kernel {
    function: Arc<Function>,
    grid: [u32; 3],
    block: [u32; 3],
    dynamic_shared_bytes: u32,
    params: Vec<u8>,
    cooperative: bool,
    cluster: [u32; 3],
}

/// What a launch asks for besides function and parameters.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) grid: [u32; 3],
    pub(super) block: [u32; 3],
    pub(super) dynamic_shared_bytes: u32,
    pub(super) cooperative: bool,
    /// None: whatever the function requires.
    pub(super) cluster: Option<[u32; 3]>,
}

impl Shape {
    pub(super) fn plain(grid: [u32; 3], block: [u32; 3], dynamic_shared_bytes: u32) -> Self {
        Self { grid, block, dynamic_shared_bytes, cooperative: false, cluster: None }
    }
}

impl Kernel {
    /// Checks a launch and copies its parameters.
    ///
    /// # Errors
    /// As cuLaunchKernel.
    ///
    /// # Safety
    /// `kernel_params` is NULL or has one pointer to each parameter's value; `extra` is NULL or a list that
    /// ends with `CU_LAUNCH_PARAM_END`.
    pub(crate) unsafe fn from_params(
        func: CUfunction,
        grid: [u32; 3],
        block: [u32; 3],
        dynamic_shared_bytes: u32,
        kernel_params: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> Result<Self> {
        let function = function::by_handle(func)?;
        // SAFETY: the caller vouches for both.
        let params = unsafe { params::read(function.code(), kernel_params, extra) }?;
        Self::new(function, Shape::plain(grid, block, dynamic_shared_bytes), params)
    }

    /// Checks a launch.
    ///
    /// # Errors
    /// As cuLaunchKernel and cuLaunchCooperativeKernel.
    pub(super) fn new(function: Arc<Function>, shape: Shape, params: Vec<u8>) -> Result<Self> {
        let code = function.code();
        let settings = function.settings();
        check_dimensions(code, &shape)?;
        if shape.dynamic_shared_bytes > settings.max_dynamic_shared_bytes(code) {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let threads: u32 = shape.block.iter().product();
        let required = settings.required_cluster(code);
        let cluster = cluster(&shape, required, settings.cluster_blocks_max())?;
        if shape.cooperative {
            let resident = resident_blocks(&function, threads, shape.dynamic_shared_bytes as usize);
            let blocks: u64 = shape.grid.iter().map(|size| u64::from(*size)).product();
            if blocks > u64::from(resident) * u64::from(MULTIPROCESSORS) {
                return Err(CUresult::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
            }
        }
        let Shape { grid, block, dynamic_shared_bytes, cooperative, .. } = shape;
        Ok(Self { function, grid, block, dynamic_shared_bytes, params, cooperative, cluster })
    }

    /// Runs all blocks.
    ///
    /// # Errors
    /// The sticky error of the context: an illegal or misaligned address, a trap, a failed assertion.
    pub(crate) fn run(&self, device: i32) -> Result {
        let module = &self.function.module;
        let turn = memory::take_turn(device, &|| module.context.check().is_ok())?;
        let memory = DeviceMemory { ordinal: device, context: &module.context, turn };
        let launch = ptx::Launch {
            image: &module.image,
            function: self.function.name(),
            grid: self.grid,
            block: self.block,
            dynamic_shared_bytes: self.dynamic_shared_bytes,
            params: &self.params,
            cooperative: self.cooperative,
            cluster: self.cluster,
            max_shared_bytes: SHARED_BYTES_PER_BLOCK_OPTIN,
        };
        let workers = process::machine()?.config.threads;
        launch.run(&memory, workers).map_err(|fault| {
            if let ptx::Fault::Assert { message } = &fault {
                // The real driver prints it, too.
                eprint!("{message}{}", if message.ends_with('\n') { "" } else { "\n" });
            }
            if entry::tracing() {
                eprintln!("simcuda: kernel {}: {fault}", self.function.name());
            }
            error_of(&fault, &module.context)
        })
    }

    /// The launched function, as a handle in its context.
    pub(crate) fn function(&self) -> CUfunction {
        self.function.handle as CUfunction
    }

    /// The context in which the function is loaded.
    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.function.module.context
    }

    pub(crate) fn grid(&self) -> [u32; 3] {
        self.grid
    }

    pub(crate) fn block(&self) -> [u32; 3] {
        self.block
    }

    pub(crate) fn dynamic_shared_bytes(&self) -> u32 {
        self.dynamic_shared_bytes
    }

    /// Where the copy of each parameter lies: what `kernelParams` would be. Good as long as the launch lives.
    pub(crate) fn param_pointers(&self) -> Vec<*mut c_void> {
        let start = self.params.as_ptr().cast_mut().cast::<u8>();
        let params = &self.function.code().params;
        params.iter().map(|param| start.wrapping_add(param.offset).cast::<c_void>()).collect()
    }
}

/// Device memory as a kernel of a context may access it.
struct DeviceMemory<'a> {
    ordinal: i32,
    context: &'a Context,
    /// On a device whose kernels take turns.
    turn: Option<Turn<'static>>,
}

// SAFETY: a span is memory of a segment or of the program that stays mapped while `keep` lives.
unsafe impl ptx::Memory for DeviceMemory<'_> {
    fn window(&self, address: u64) -> Option<ptx::Window> {
        memory::span(address, self.ordinal).map(window_of)
    }

    fn team(&self, address: u64) -> Vec<ptx::Window> {
        let team = memory::team(address, self.ordinal).unwrap_or_default();
        team.into_iter().map(window_of).collect()
    }

    /// A kernel does not outlive its context, nor the device's loss, nor its turn.
    fn cancelled(&self) -> bool {
        self.context.check().is_err() || self.turn.as_ref().is_some_and(Turn::is_over)
    }
}

fn window_of(span: memory::Span) -> ptx::Window {
    let memory::Span { start, len, host, writable, keep } = span;
    ptx::Window { start, len, host, writable, keep }
}

fn error_of(fault: &ptx::Fault, context: &Context) -> Error {
    match fault {
        ptx::Fault::IllegalAddress { .. } => CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
        ptx::Fault::MisalignedAddress { .. } => CUresult::CUDA_ERROR_MISALIGNED_ADDRESS,
        ptx::Fault::IllegalInstruction { .. } => CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION,
        ptx::Fault::InvalidProgramCounter { .. } => CUresult::CUDA_ERROR_INVALID_PC,
        ptx::Fault::HardwareStackError { .. } => CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR,
        ptx::Fault::Assert { .. } => CUresult::CUDA_ERROR_ASSERT,
        ptx::Fault::Trap { .. } => CUresult::CUDA_ERROR_LAUNCH_FAILED,
        ptx::Fault::LaunchOutOfResources(_) => CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
        ptx::Fault::Cancelled => context.check().err().unwrap_or(CUresult::CUDA_ERROR_LAUNCH_FAILED),
        // Checked when the launch was made.
        ptx::Fault::NoSuchFunction(_) | ptx::Fault::InvalidLaunch(_) => CUresult::CUDA_ERROR_UNKNOWN,
    }
}

fn check_dimensions(code: &ptx::Function, shape: &Shape) -> Result {
    let invalid = Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    let within = |sizes: [u32; 3], limits: [u32; 3]| {
        sizes.iter().zip(limits).all(|(size, limit)| (1..=limit).contains(size))
    };
    if !within(shape.grid, MAX_GRID_DIM) || !within(shape.block, MAX_BLOCK_DIM) {
        return invalid;
    }
    let threads: u32 = shape.block.iter().product();
    if threads > THREADS_PER_BLOCK || threads > max_threads(code) {
        return invalid;
    }
    // `.reqntid` (PTX ISA, section "Performance-Tuning Directives").
    if code.required_threads.is_some_and(|required| required != shape.block) {
        return invalid;
    }
    Ok(())
}

/// The cluster dimensions of a launch; 1 by 1 by 1 without clusters.
///
/// # Errors
/// `CUDA_ERROR_INVALID_CLUSTER_SIZE` if the grid is no multiple of them, if they are too many blocks, or not
/// those that the function requires.
pub(super) fn cluster(shape: &Shape, required: [u32; 3], most_blocks: u32) -> Result<[u32; 3]> {
    let invalid = Err(CUresult::CUDA_ERROR_INVALID_CLUSTER_SIZE);
    let asked = shape.cluster.unwrap_or(required);
    if asked == [0; 3] {
        return Ok([1; 3]);
    }
    if required != [0; 3] && asked != required {
        return invalid;
    }
    let blocks = asked.iter().try_fold(1u32, |blocks, size| blocks.checked_mul(*size));
    let fits = blocks.is_some_and(|blocks| (1..=most_blocks).contains(&blocks));
    if !fits || asked.iter().zip(shape.grid).any(|(size, blocks)| blocks % size != 0) {
        return invalid;
    }
    Ok(asked)
}

/// Puts a launch onto a stream of the current context.
///
/// # Errors
/// As cuLaunchKernel.
///
/// # Safety
/// As [`Kernel::from_params`].
unsafe fn launch(
    handle: CUfunction,
    shape: Shape,
    stream: CUstream,
    kernel_params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Result {
    let context = context::current()?;
    let function = function::by_handle(handle)?;
    if !Arc::ptr_eq(&function.module.context, &context) {
        return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
    // SAFETY: the caller vouches for both.
    let params = unsafe { params::read(function.code(), kernel_params, extra) }?;
    stream::submit(stream, Work::Kernel(Arc::new(Kernel::new(function, shape, params)?)))
}

pub(crate) unsafe fn cuLaunchKernel(
    f: CUfunction,
    grid_x: u32,
    grid_y: u32,
    grid_z: u32,
    block_x: u32,
    block_y: u32,
    block_z: u32,
    dynamic_shared_bytes: u32,
    stream: CUstream,
    kernel_params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Result {
    let shape = Shape::plain([grid_x, grid_y, grid_z], [block_x, block_y, block_z], dynamic_shared_bytes);
    // SAFETY: the caller passes parameters in one of the two ways.
    unsafe { launch(f, shape, stream, kernel_params, extra) }
}

pub(crate) unsafe fn cuLaunchCooperativeKernel(
    f: CUfunction,
    grid_x: u32,
    grid_y: u32,
    grid_z: u32,
    block_x: u32,
    block_y: u32,
    block_z: u32,
    dynamic_shared_bytes: u32,
    stream: CUstream,
    kernel_params: *mut *mut c_void,
) -> Result {
    let shape = Shape::plain([grid_x, grid_y, grid_z], [block_x, block_y, block_z], dynamic_shared_bytes);
    let shape = Shape { cooperative: true, ..shape };
    // SAFETY: the caller passes a pointer to each parameter.
    unsafe { launch(f, shape, stream, kernel_params, std::ptr::null_mut()) }
}

pub(crate) unsafe fn cuLaunchKernelEx(
    config: *const sys::CUlaunchConfig,
    f: CUfunction,
    kernel_params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Result {
    let context = context::current()?;
    // SAFETY: `config` is NULL or the caller's structure, in which only pointers and numbers stand.
    let config = unsafe { config.as_ref() }.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    // SAFETY: the structure has as many attributes as it says.
    let attributes = unsafe { Attributes::read(config) }?;
    for event in &attributes.events {
        if !stream::event_by_handle(event.handle)?.is_of(&context) {
            return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
        }
    }
    // SAFETY: the caller passes parameters in one of the two ways.
    unsafe { launch(f, attributes.shape(config), config.hStream, kernel_params, extra) }?;
    for event in attributes.events {
        // Both kinds of event may be reported as late as the end of the kernel (CUDA driver API reference,
        // CUlaunchAttributeID).
        // SAFETY: the call checks the handle itself.
        unsafe { crate::dispatch::cuEventRecordWithFlags(event.handle, config.hStream, event.flags) }?;
    }
    Ok(())
}
