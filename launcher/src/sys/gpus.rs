//! The machine's GPUs: which ones there are, how much of their memory is free, and which processes have how much of it.
//!
//! NVML knows. Its code runs in a process of its own, which answers over a pipe: NVIDIA's libraries are not loaded into the
//! launcher, and one that hangs holds nothing up. `CUDA_VISIBLE_DEVICES` hides no GPU from NVML.

use ckpt_snapshot::size_text;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::retry_on_intr;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::sys::deadline::{
    DEVICE_MEMORY_POLL_INTERVAL, GPU_ANSWER_TIMEOUT, GPU_FIRST_ANSWER_TIMEOUT, GPU_HELPER_END_TIMEOUT,
    GPU_LONGEST_SILENCE, GPU_SILENCE, PROCESS_POLL_INTERVAL,
};

/// The argument of `ckpt-run` that makes it the process that asks NVML.
pub const ARGUMENT: &str = "__gpus";

/// The first driver that restores a process on other GPUs (cuda-checkpoint, release 580).
const FIRST_WITH_MIGRATION: u32 = 580;

/// The machine's GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpus {
    /// The driver's version, such as `580.95.05`.
    pub driver: String,
    /// In NVML's order.
    pub gpus: Vec<Gpu>,
}

/// One GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// `GPU-` and groups of hexadecimal digits.
    pub uuid: String,
    /// Its type.
    pub name: String,
    /// Its memory.
    pub memory_bytes: u64,
    /// Memory that nothing uses.
    pub free_bytes: u64,
    /// The processes with memory on it.
    pub processes: Vec<GpuProcess>,
}

/// A process with memory on a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuProcess {
    /// Its ID in the PID namespace of the launcher.
    pub pid: u32,
    /// Its memory.
    pub bytes: u64,
}

/// Memory of a GPU that attaching processes to it takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuNeed {
    /// The GPU's UUID.
    pub uuid: String,
    /// In bytes.
    pub bytes: u64,
}

/// A GPU has too little free memory.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "{uuid} ({name}) has {free} of free memory, and {needed} is needed to restore the job's state on it: end what uses this GPU, or choose another one with --gpu-map",
    free = size_text(*free_bytes),
    needed = size_text(*needed_bytes)
)]
pub struct Shortage {
    uuid: String,
    name: String,
    free_bytes: u64,
    needed_bytes: u64,
}

impl Gpus {
    /// Whether the driver can restore a process on other GPUs.
    #[must_use]
    pub fn can_migrate(&self) -> bool {
        let major = self.driver.split('.').next().and_then(|major| major.parse::<u32>().ok());
        major.is_some_and(|major| major >= FIRST_WITH_MIGRATION)
    }

    /// The first GPU with too little free memory for all needs together. A GPU that is not known is not judged.
    fn shortage(&self, needs: &[GpuNeed]) -> Option<(Shortage, bool)> {
        self.gpus.iter().find_map(|gpu| {
            let on_it = needs.iter().filter(|need| need.uuid == gpu.uuid).map(|need| need.bytes);
            let needed_bytes = on_it.fold(0, u64::saturating_add);
            let shortage = Shortage {
                uuid: gpu.uuid.clone(),
                name: gpu.name.clone(),
                free_bytes: gpu.free_bytes,
                needed_bytes,
            };
            (needed_bytes > gpu.free_bytes).then_some((shortage, needed_bytes > gpu.memory_bytes))
        })
    }
}

/// Asks for the machine's GPUs.
#[derive(Debug, Default)]
pub struct GpuProbe {
    state: Mutex<State>,
    has_answered: AtomicBool,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    NotStarted,
    Running(Helper),
    Silent(Silence),
}

/// NVML has failed.
#[derive(Debug)]
struct Silence {
    /// It is not asked before this moment.
    until: Instant,
    /// How long that is.
    length: Duration,
    /// What was to ask it, and may hang in the driver: there is no other one before it has ended.
    helper: Option<Helper>,
}

impl GpuProbe {
    /// The GPUs as they are now; `None` without a working NVML. The first of several failures in a row is reported. After a
    /// failure it is asked again later.
    pub fn look(&self) -> Option<Gpus> {
        let mut state = self.state.lock();
        let mut helper = None;
        let (timeout, silence) = match &mut *state {
            State::NotStarted => (GPU_FIRST_ANSWER_TIMEOUT, None),
            State::Running(_) => (GPU_ANSWER_TIMEOUT, None),
            State::Silent(silence) => {
                if !silence.is_over() {
                    return None;
                }
                (GPU_ANSWER_TIMEOUT, Some(silence.length))
            }
        };
        let asked = match std::mem::take(&mut *state) {
            State::Running(running) => Ok(running),
            _ => Helper::start(),
        };
        let answer = asked.and_then(|asked| helper.insert(asked).ask(timeout));
        self.has_answered.store(answer.is_ok(), Ordering::Relaxed);
        match answer {
            Ok(gpus) => {
                *state = helper.map_or(State::NotStarted, State::Running);
                Some(gpus)
            }
            Err(error) => {
                if silence.is_none() {
                    tracing::warn!(
                        "NVIDIA's management library (NVML, libnvidia-ml.so.1) does not say which GPUs there are: {error}. Before GPU state is restored, free memory is not waited for, and the GPUs are not compared with those of the snapshot"
                    );
                }
                *state = State::Silent(Silence::after(silence, helper));
                None
            }
        }
    }

    /// Whether NVML has answered before, and has not failed since.
    pub fn has_answered(&self) -> bool {
        self.has_answered.load(Ordering::Relaxed)
    }

    /// Waits until each GPU has enough free memory for all needs together. Without NVML there is nothing to wait for.
    ///
    /// # Errors
    /// At `until`, or when `is_cancelled`, or at once if a GPU is too small.
    pub fn await_free_memory(
        &self,
        needs: &[GpuNeed],
        until: Instant,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(), Shortage> {
        let mut is_reported = false;
        while let Some((shortage, is_too_small)) = self.look().and_then(|gpus| gpus.shortage(needs)) {
            if is_too_small || is_cancelled() || Instant::now() >= until {
                return Err(shortage);
            }
            if !is_reported {
                let left = until.saturating_duration_since(Instant::now()).as_secs();
                tracing::warn!("{shortage}. Waiting up to {left} s for it");
                is_reported = true;
            }
            std::thread::sleep(DEVICE_MEMORY_POLL_INTERVAL);
        }
        Ok(())
    }
}

impl Silence {
    /// Another one after a silence of this length, if there was one. The helper is killed.
    fn after(length: Option<Duration>, mut helper: Option<Helper>) -> Self {
        let length = length.map_or(GPU_SILENCE, |length| (length * 2).min(GPU_LONGEST_SILENCE));
        if let Some(helper) = &mut helper {
            let _ = helper.child.kill();
        }
        Self { until: Instant::now() + length, length, helper }
    }

    /// Whether NVML may be asked again.
    fn is_over(&mut self) -> bool {
        let has_ended = |helper: &mut Helper| !matches!(helper.child.try_wait(), Ok(None));
        Instant::now() >= self.until && self.helper.as_mut().is_none_or(has_ended)
    }
}

/// The process that asks NVML, once for each line that it reads.
#[derive(Debug)]
struct Helper {
    child: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Helper {
    fn start() -> io::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        // A group of its own: Ctrl-C is for the job.
        command.arg(ARGUMENT).process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn()?;
        let (requests, answers) = (child.stdin.take(), child.stdout.take());
        let requests = requests.ok_or(io::ErrorKind::BrokenPipe)?;
        let answers = BufReader::new(answers.ok_or(io::ErrorKind::BrokenPipe)?);
        Ok(Self { child, requests, answers })
    }

    fn ask(&mut self, limit: Duration) -> io::Result<Gpus> {
        self.requests.write_all(b"\n")?;
        let timeout = Timespec::try_from(limit).unwrap_or_default();
        let mut answer = [PollFd::new(self.answers.get_ref(), PollFlags::IN)];
        if retry_on_intr(|| rustix::event::poll(&mut answer, Some(&timeout)))? == 0 {
            let what = format!("no answer within {} s", limit.as_secs());
            return Err(io::Error::new(io::ErrorKind::TimedOut, what));
        }
        let mut line = String::new();
        if self.answers.read_line(&mut line)? == 0 {
            return Err(io::Error::other("the process that asks it has ended"));
        }
        serde_json::from_str::<Result<Gpus, String>>(&line)?.map_err(io::Error::other)
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        // An error means that the process has ended already.
        let _ = self.child.kill();
        // One that waits in the driver does not end by a signal.
        let until = Instant::now() + GPU_HELPER_END_TIMEOUT;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < until {
            std::thread::sleep(PROCESS_POLL_INTERVAL);
        }
    }
}

/// The whole life of the process that asks NVML.
pub fn serve() -> ! {
    let nvml = Nvml::builder().lib_path("libnvidia-ml.so.1".as_ref()).init();
    let mut out = io::stdout().lock();
    for _ in io::stdin().lock().lines().map_while(Result::ok) {
        let gpus = nvml
            .as_ref()
            .map_err(ToString::to_string)
            .and_then(|nvml| gpus(nvml).map_err(|error| error.to_string()));
        let answer = serde_json::to_string(&gpus).map_err(io::Error::other);
        // Without NVML, or where it fails, the next answer needs another process.
        if answer.and_then(|answer| writeln!(out, "{answer}")).is_err() || gpus.is_err() {
            break;
        }
    }
    std::process::exit(0)
}

fn gpus(nvml: &Nvml) -> Result<Gpus, NvmlError> {
    let all = (0..nvml.device_count()?).filter_map(|index| nvml.device_by_index(index).ok());
    // One that has fallen off the bus is none.
    let gpus = all.filter_map(|device| gpu(&device).ok()).collect();
    Ok(Gpus { driver: nvml.sys_driver_version()?, gpus })
}

fn gpu(device: &Device<'_>) -> Result<Gpu, NvmlError> {
    let memory = device.memory_info()?;
    let processes = device.running_compute_processes().unwrap_or_default();
    let processes = processes.into_iter().filter_map(|process| match process.used_gpu_memory {
        UsedGpuMemory::Used(bytes) => Some(GpuProcess { pid: process.pid, bytes }),
        UsedGpuMemory::Unavailable => None,
    });
    Ok(Gpu {
        uuid: device.uuid()?,
        name: device.name()?,
        memory_bytes: memory.total,
        free_bytes: memory.free,
        processes: processes.collect(),
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A machine with these GPUs: names and free bytes of 100.
    pub(crate) fn machine(driver: &str, gpus: &[(&str, &str, u64)]) -> Gpus {
        let gpu = |(uuid, name, free_bytes): &(&str, &str, u64)| Gpu {
            uuid: (*uuid).to_owned(),
            name: (*name).to_owned(),
            memory_bytes: 100,
            free_bytes: *free_bytes,
            processes: Vec::new(),
        };
        Gpus { driver: driver.to_owned(), gpus: gpus.iter().map(gpu).collect() }
    }

    fn need(uuid: &str, bytes: u64) -> GpuNeed {
        GpuNeed { uuid: uuid.to_owned(), bytes }
    }

    #[test]
    fn needs_of_a_gpu_add_up() {
        let machine = machine("580.1", &[("GPU-a", "A", 50), ("GPU-b", "A", 50)]);
        let fits = [need("GPU-a", 20), need("GPU-a", 30), need("GPU-b", 50), need("GPU-other", 900)];
        assert_eq!(machine.shortage(&fits), None);
        let (shortage, is_too_small) =
            machine.shortage(&[need("GPU-b", 31), need("GPU-b", 20)]).expect("too much");
        assert!(!is_too_small);
        let told = shortage.to_string();
        assert!(told.contains("GPU-b (A) has 50 B") && told.contains("51 B is needed"), "{told}");
        assert!(machine.shortage(&[need("GPU-a", 101)]).expect("too much").1);
    }

    #[test]
    fn migration_came_with_580() {
        for (driver, can) in [("575.57.08", false), ("580.65.06", true), ("610.57.04", true), ("?", false)] {
            assert_eq!(machine(driver, &[]).can_migrate(), can, "{driver}");
        }
    }
}
