//! The driver's jobs: `cuda-checkpoint --launch-job` names a file in memory by `CUDA_CHECKPOINT_JOB_FILE` and executes a program
//! (from 590 on, cuda-checkpoint issue 43). From 610 on, processes of a job may share memory by CUDA IPC (issue 56), and are
//! saved one after the other (dynamo pull request 11304). What is in the file is not documented.

use std::ffi::OsString;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use cuda_abi::types::*;
use rustix::fs::MemfdFlags;
use rustix::process::{Pid, Signal, kill_process};

use crate::check::{Result, Stop, expect_equal, failed};
use crate::ckpt::{checkpoint, lock, me, restore, unlock};
use crate::helper::Helper;
use crate::{gpu, ok, roles};

const JOB_FILE: &str = "CUDA_CHECKPOINT_JOB_FILE";
const TOOL: &str = "cuda-checkpoint";
/// How long one try may take: outside of a job, the call hung in one report.
const LIMIT: Duration = Duration::from_secs(8);
/// All processes take a step before the next one.
pub const STEPS: [&str; 4] = ["lock", "checkpoint", "restore", "unlock"];

/// Takes one of [`STEPS`] in this process.
pub fn perform(step: &str) -> Result {
    match step {
        "lock" => lock(me()),
        "checkpoint" => checkpoint(me()),
        "restore" => restore(me()),
        "unlock" => unlock(me()),
        _ => failed(format!("no such step: {step:?}")),
    }
}

/// Shares memory with another process, and takes both of them off the device and back.
pub fn share_and_checkpoint() -> Result<String> {
    gpu::start()?;
    let mut handle = CUipcMemHandle { reserved: [0; 64] };
    let address = gpu::upload(&[6_u32; 1024])?;
    ok!(cuIpcGetMemHandle(&raw mut handle, address));
    let mut other = Helper::start()?;
    let there = other.number(&format!("ipc-open {}", roles::hex_of(&handle)))?;
    for step in STEPS {
        perform(step)?;
        other.ask(&format!("ckpt {step}"))?;
    }
    gpu::expect_content(address, &[6_u32; 1024])?;
    expect_equal("content in the other process", other.number(&format!("read {there}"))?, 6)?;
    gpu::write(address, &[7_u32])?;
    gpu::synchronize()?;
    Ok(match other.number(&format!("read {there}"))? {
        7 => "saved, and shared as before".to_owned(),
        _ => "saved, and not shared any more".to_owned(),
    })
}

fn outcome(mut helper: Helper) -> Result<String> {
    let pid = Pid::from_raw(helper.pid());
    let (say, heard) = mpsc::channel();
    let asking = std::thread::spawn(move || {
        let answer = helper.ask("share-and-checkpoint");
        let _ = say.send(());
        answer
    });
    let is_hung = heard.recv_timeout(LIMIT).is_err();
    if is_hung && let Some(pid) = pid {
        // Its answer is that it has ended.
        let _ = kill_process(pid, Signal::KILL);
    }
    let answer = asking.join().map_or_else(|_| failed("the thread panicked"), Ok)?;
    Ok(match answer {
        _ if is_hung => format!("no answer within {} s", LIMIT.as_secs()),
        Ok(answer) => answer,
        Err(Stop::Failed(text) | Stop::Skipped(text)) => text,
    })
}

fn without_a_job(mut command: Command) -> Command {
    command.env_remove(JOB_FILE);
    command
}

/// The tool executes the command.
fn by_the_tool(command: Command) -> Command {
    let mut tool = Command::new(TOOL);
    tool.arg("--launch-job").arg(command.get_program()).args(command.get_args());
    without_a_job(tool)
}

fn is_on_the_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory| directory.join(program).is_file())
}

pub(super) fn ipc() -> Result<String> {
    gpu::needs_driver(12080)?;
    let outside = outcome(Helper::spawn_by(without_a_job)?)?;
    // Without MFD_CLOEXEC: the processes of the job inherit it under its number.
    let file = rustix::fs::memfd_create("job", MemfdFlags::empty());
    let file = file.or_else(|error| failed(format!("memfd_create: {error}")))?;
    let name = OsString::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let empty = outcome(Helper::spawn_by(|mut command| {
        command.env(JOB_FILE, name);
        command
    })?)?;
    let written = rustix::fs::fstat(&file).map_or(-1, |facts| facts.st_size);
    let launched = match is_on_the_path(TOOL) {
        true => outcome(Helper::spawn_by(by_the_tool)?)?,
        false => format!("there is no {TOOL}"),
    };
    Ok(format!(
        "outside of a job: {outside}; with an empty file: {empty} (the file has {written} bytes then); started by {TOOL}: {launched}"
    ))
}
