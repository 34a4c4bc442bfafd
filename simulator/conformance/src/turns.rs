//! Kernels of two processes on one device.

use cuda_abi::types::CUstream;

use crate::check::{Result, failed};
use crate::gpu::Flag;
use crate::helper::Helper;
use crate::questions::jobs::STEPS;
use crate::{cu, gpu, kernels};

/// How long a kernel of the helpers may keep another process waiting, on a simulated device.
const LIMIT_MS: &str = "300";

/// A kernel of this process that waits until it is let go.
pub struct Waiting {
    flag: Flag,
    stream: CUstream,
}

impl Waiting {
    /// Launches it, and waits until it runs.
    pub fn start() -> Result<Self> {
        let (started, flag, stream) = (Flag::new()?, Flag::new()?, gpu::stream()?);
        let kernel = gpu::function(kernels::BASIC, "wait")?;
        gpu::launch(kernel, 1, 1, stream, &[started.address(), flag.address()])?;
        while started.get() == 0 {
            std::thread::yield_now();
        }
        Ok(Self { flag, stream })
    }

    /// Lets it go, and says what comes of it: CUDA_SUCCESS, or the error of its context.
    pub fn end(self) -> Result<String> {
        self.flag.set(1);
        Ok(gpu::name_of(cu!(cuStreamSynchronize(self.stream))))
    }
}

/// Runs a kernel of this process to its end.
pub fn run() -> Result {
    let kernel = gpu::function(kernels::BASIC, "store")?;
    gpu::launch(kernel, 1, 1, std::ptr::null_mut(), &[gpu::alloc(4)?, 7])?;
    gpu::synchronize()
}

/// A process that uses device 0.
pub fn helper() -> Result<Helper> {
    let mut helper = Helper::spawn_by(|mut command| {
        command.env("SIMCUDA_SWITCH_TIMEOUT_MS", LIMIT_MS);
        command
    })?;
    helper.ask("start")?;
    // The module is loaded and the memory allocated: later, nothing but kernels waits.
    helper.ask("kernel-run")?;
    Ok(helper)
}

/// Takes a process off the device and brings it back.
pub fn cycle(process: &mut Helper) -> Result {
    STEPS.iter().try_for_each(|step| process.ask(&format!("ckpt {step}")).map(drop))
}

/// Whether the device runs a kernel of a process while one of another process waits for something.
pub fn are_taken(waiting: &mut Helper, running: &mut Helper) -> Result<bool> {
    waiting.ask("kernel-wait")?;
    running.ask("kernel-run")?;
    match &*waiting.ask("kernel-end")? {
        "CUDA_SUCCESS" => Ok(true),
        "CUDA_ERROR_LAUNCH_FAILED" => Ok(false),
        other => failed(format!("the kernel that waits ends with {other}")),
    }
}
