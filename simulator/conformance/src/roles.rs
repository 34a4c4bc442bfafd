//! What this program does as the second process of a check.

use std::ffi::c_char;
use std::io::BufRead;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context, bail};
use cuda_abi::types::*;

use crate::check::{Result, Stop, failed};
use crate::{checks, cu, gpu, helper, kernels, multicast, nccl, ok, pools, questions, turns, vmm};

/// This program in a role. It is killed when its parent ends.
pub fn command(lib: &Path, words: &[&str]) -> std::io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("--lib").arg(lib).arg("--role").args(words);
    Ok(command)
}

/// Plays a role until its end.
pub fn play(words: &[String]) -> anyhow::Result<ExitCode> {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    match words {
        [role] if role == "identify" => match identify() {
            Ok(text) => println!("\ndriver {text}"),
            Err(stop) => bail!("{}", text_of(stop)),
        },
        [role, words @ ..] if role == "nccl" => {
            nccl::play(words, &[checks::nccl::SCENARIOS, checks::nccl_windows::SCENARIOS].concat())?;
        }
        [role, socket] if role == "serve" => serve(socket.parse().context("a descriptor")?)?,
        _ => bail!("no such role: {words:?}"),
    }
    Ok(ExitCode::SUCCESS)
}

fn text_of(stop: Stop) -> String {
    match stop {
        Stop::Failed(text) | Stop::Skipped(text) => text,
    }
}

fn identify() -> Result<String> {
    let mut version = 0;
    ok!(cuDriverGetVersion(&raw mut version));
    ok!(cuInit(0));
    let mut name = [0_u8; 128];
    ok!(cuDeviceGetName(name.as_mut_ptr().cast::<c_char>(), 128, 0));
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
    Ok(format!("{version} {}", String::from_utf8_lossy(&name[..end])))
}

fn serve(socket: i32) -> anyhow::Result<()> {
    // SAFETY: the parent made this descriptor for us, and nothing else in this process knows it.
    let socket = UnixStream::from(unsafe { OwnedFd::from_raw_fd(socket) });
    let mut state = Served { socket, handle: 0, exporter: None, kernel: None };
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<_> = line.split(' ').collect();
        match state.perform(&words) {
            Ok(value) => println!("\n{}ok {value}", helper::ANSWER),
            Err(Stop::Failed(text)) => println!("\n{}error {text}", helper::ANSWER),
            Err(Stop::Skipped(text)) => println!("\n{}skip {text}", helper::ANSWER),
        }
    }
    Ok(())
}

struct Served {
    socket: UnixStream,
    /// The physical memory that was created or imported last.
    handle: u64,
    exporter: Option<pools::Exporter>,
    kernel: Option<turns::Waiting>,
}

fn number(text: &str) -> Result<u64> {
    text.parse().or_else(|_| failed(format!("not a number: {text:?}")))
}

fn size(text: &str) -> Result<usize> {
    text.parse().or_else(|_| failed(format!("not a size: {text:?}")))
}

impl Served {
    fn perform(&mut self, words: &[&str]) -> Result<String> {
        match *words {
            ["start"] => gpu::start().map(|_| String::new()),
            ["alloc", bytes] => gpu::alloc(size(bytes)?).map(text),
            ["take-all"] => take_all(),
            ["free-bytes"] => gpu::free_bytes().map(text),
            ["fill", address, value, count] => fill(number(address)?, number(value)?, size(count)?),
            ["read", address] => gpu::read::<u32>(number(address)?, 1).map(|words| text(words[0])),
            ["ipc-get", address] => ipc_get(number(address)?),
            ["ipc-open", handle] => ipc_open(handle).map(text),
            ["ipc-close", address] => ipc_close(number(address)?),
            ["create", bytes] => self.create(size(bytes)?).map(text),
            ["export"] => self.export(),
            ["import", bytes] => self.import(size(bytes)?).map(text),
            [command, ref rest @ ..] if command.starts_with("pool-") => self.share_pool(command, rest),
            ["mc-import"] => self.import_object().map(text),
            ["mc-add", object, device] => {
                let device = i32::try_from(number(device)?).or_else(|_| failed("a device"))?;
                multicast::add(number(object)?, device).map(|()| String::new())
            }
            ["mc-bind", object, device, bytes] => {
                let device = i32::try_from(number(device)?).or_else(|_| failed("a device"))?;
                let member = multicast::Member::create(device, size(bytes)?)?;
                member.bind(number(object)?, size(bytes)?)?;
                Ok(text(member.address))
            }
            ["mc-map", object, bytes] => multicast::map_object(number(object)?, size(bytes)?).map(text),
            ["mc-store", address, value] => {
                let kernel = gpu::function(kernels::MULTICAST, "mc_store")?;
                let parameters = [number(address)?, number(value)?];
                gpu::launch(kernel, 1, 1, std::ptr::null_mut(), &parameters)?;
                gpu::synchronize().map(|()| String::new())
            }
            ["kernel-run"] => turns::run().map(|()| String::new()),
            ["kernel-wait"] => {
                self.kernel = Some(turns::Waiting::start()?);
                Ok(String::new())
            }
            ["kernel-end"] => match self.kernel.take() {
                Some(kernel) => kernel.end(),
                None => failed("no kernel waits"),
            },
            ["use-released", way] => vmm::use_released(way).map(|()| String::new()),
            ["ckpt", step] => questions::jobs::perform(step).map(|()| String::new()),
            ["share-and-checkpoint"] => questions::jobs::share_and_checkpoint(),
            ["reserve-at", address, bytes] => reserve_at(number(address)?, size(bytes)?).map(text),
            _ => failed(format!("no such command: {words:?}")),
        }
    }

    fn share_pool(&mut self, command: &str, words: &[&str]) -> Result<String> {
        if command == "pool-export" {
            let (exporter, descriptor) = pools::Exporter::start()?;
            self.exporter = Some(exporter);
            let sent = helper::send_descriptor(&self.socket, std::os::fd::AsFd::as_fd(&descriptor));
            return sent.map(|()| String::new()).or_else(|error| failed(format!("sending: {error}")));
        }
        let Some(exporter) = self.exporter else { return failed("no pool is exported") };
        match (command, words) {
            ("pool-allocate", [bytes]) => exporter.allocate(size(bytes)?, true),
            ("pool-allocate-later", [bytes]) => exporter.allocate(size(bytes)?, false),
            ("pool-synchronize", []) => exporter.synchronize().map(|()| String::new()),
            ("pool-free", [address]) => exporter.free(number(address)?).map(|()| String::new()),
            ("pool-allow", [device]) => {
                let device = i32::try_from(number(device)?).or_else(|_| failed("a device"))?;
                exporter.allow(device).map(|()| String::new())
            }
            _ => failed(format!("no such command: {command} {words:?}")),
        }
    }

    fn create(&mut self, size_bytes: usize) -> Result<u64> {
        let (address, handle) = vmm::mapped(size_bytes, true)?;
        self.handle = handle;
        Ok(address)
    }

    fn export(&self) -> Result<String> {
        let descriptor = vmm::export(self.handle)?;
        match helper::send_descriptor(&self.socket, std::os::fd::AsFd::as_fd(&descriptor)) {
            Ok(()) => Ok(String::new()),
            Err(error) => failed(format!("sending a descriptor: {error}")),
        }
    }

    fn import_object(&mut self) -> Result<u64> {
        let descriptor = helper::receive_descriptor(&self.socket);
        let descriptor = descriptor.or_else(|error| failed(format!("receiving a descriptor: {error}")))?;
        vmm::import(descriptor.as_raw_fd())
    }

    fn import(&mut self, size_bytes: usize) -> Result<u64> {
        let descriptor = helper::receive_descriptor(&self.socket);
        let descriptor = descriptor.or_else(|error| failed(format!("receiving a descriptor: {error}")))?;
        self.handle = vmm::import(descriptor.as_raw_fd())?;
        let address = vmm::reserve(size_bytes)?;
        vmm::map(address, size_bytes, self.handle)?;
        vmm::allow(address, size_bytes, vmm::READ_WRITE)?;
        Ok(address)
    }
}

fn text(value: impl ToString) -> String {
    value.to_string()
}

fn fill(address: u64, value: u64, count: usize) -> Result<String> {
    let value = u32::try_from(value).or_else(|_| failed("a value of 32 bits"))?;
    ok!(cuMemsetD32_v2(address, value, count));
    gpu::synchronize().map(|()| String::new())
}

/// Allocates all memory of the device, in ever smaller pieces.
fn take_all() -> Result<String> {
    const SMALLEST_BYTES: usize = 64 << 10;
    let mut size_bytes = gpu::free_bytes()?;
    while size_bytes >= SMALLEST_BYTES {
        let mut address = 0;
        if cu!(cuMemAlloc_v2(&raw mut address, size_bytes)) != 0 {
            size_bytes /= 2;
        }
    }
    Ok(String::new())
}

fn ipc_get(address: u64) -> Result<String> {
    let mut handle = CUipcMemHandle { reserved: [0; 64] };
    ok!(cuIpcGetMemHandle(&raw mut handle, address));
    Ok(hex_of(&handle))
}

/// An IPC handle as text.
pub fn hex_of(handle: &CUipcMemHandle) -> String {
    handle.reserved.iter().map(|byte| format!("{:02x}", byte.cast_unsigned())).collect()
}

/// An IPC handle from its text.
pub fn handle_of(hex: &str) -> Result<CUipcMemHandle> {
    let mut handle = CUipcMemHandle { reserved: [0; 64] };
    for (at, byte) in handle.reserved.iter_mut().enumerate() {
        let digits = hex.get(2 * at..2 * at + 2).and_then(|digits| u8::from_str_radix(digits, 16).ok());
        *byte = digits.map(u8::cast_signed).map_or_else(|| failed("an IPC handle of 64 bytes"), Ok)?;
    }
    Ok(handle)
}

fn ipc_open(hex: &str) -> Result<u64> {
    let handle = handle_of(hex)?;
    let mut address = 0;
    // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the one flag that must be given.
    ok!(cuIpcOpenMemHandle_v2(&raw mut address, handle, 1));
    Ok(address)
}

fn ipc_close(address: u64) -> Result<String> {
    ok!(cuIpcCloseMemHandle(address));
    Ok(String::new())
}

fn reserve_at(address: u64, size_bytes: usize) -> Result<u64> {
    let mut got = 0;
    ok!(cuMemAddressReserve(&raw mut got, size_bytes, 0, address, 0));
    Ok(got)
}
