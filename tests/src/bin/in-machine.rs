//! Runs a command in a virtual machine with a distribution's kernel, for benchmarks: `in-machine MIB RESULT COMMAND…`.
//!
//! The machine has MIB MiB of memory, and the files of this one. The command runs on a disk of its own, in the directory that
//! is its CKPT_BENCH_DIR. What it writes to the file `result` there is RESULT afterwards.

use ckpt_run_tests::file_systems::{FileSystem, make_image};
use ckpt_run_tests::virtual_machine::{Hardware, VirtualMachine, tool};
use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::Duration;
use std::{env, fs, thread};

const DISK_BYTES: u64 = 32 << 30;
const POLL_INTERVAL: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    let mut arguments = env::args().skip(1);
    let memory_mib = arguments.next().and_then(|mib| mib.parse().ok()).expect("how much memory");
    let result = arguments.next().expect("the name of a file");
    let tool = tool().expect("CKPT_TEST_MACHINE names QEMU and a kernel");
    let dir = tempfile::tempdir_in(ckpt_run_tests::workspace().join("target")).expect("a directory");
    let disk = dir.path().join("disk");
    make_image(&disk, DISK_BYTES).and_then(|()| FileSystem::Ext4.format(&disk)).expect("a disk");
    let hardware = Hardware { cores: 2, memory_mib, disk: &disk, network: None };
    let machine = VirtualMachine::boot(&tool, &dir.path().join("machine"), hardware);
    let mut script = "mkdir /run/disk && mount /dev/vda /run/disk && cd /run/disk || exit\n\
         export CKPT_BENCH_DIR=/run/disk\n"
        .to_owned();
    let quoted = |text: &str| format!("'{}'", text.replace('\'', r"'\''"));
    for (name, value) in env::vars().filter(|(name, _)| name.starts_with("CKPT_")) {
        writeln!(script, "export {name}={}", quoted(&value)).expect("memory");
    }
    let command = arguments.map(|argument| quoted(&argument)).collect::<Vec<_>>().join(" ");
    write!(script, "{command} || exit\ncp result /run/host/result\n").expect("memory");
    let call = machine.start(&script);
    let mut told = 0;
    let code = loop {
        let code = call.status();
        let said = call.said();
        eprint!("{}", said.get(told..).unwrap_or_default());
        told = said.len();
        match code {
            Some(code) => break code,
            None => thread::sleep(POLL_INTERVAL),
        }
    };
    if code != 0 {
        eprintln!("in-machine: the command has failed with {code}");
        return ExitCode::FAILURE;
    }
    fs::copy(machine.shared().join("result"), &result).expect("the result");
    ExitCode::SUCCESS
}
