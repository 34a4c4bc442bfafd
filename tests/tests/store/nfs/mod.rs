//! Stores on NFS: the server is a virtual machine with the kernel's nfsd, and jobs run in another one. A job is killed and
//! resumed; the server loses power, is booted again, or does not answer for a while.

mod outages;

use ckpt_run_tests::file_systems::{FileSystem, make_image};
use ckpt_run_tests::virtual_machine::{Hardware, Network, VirtualMachine, address, shared_directory, tool};
use ckpt_run_tests::{Running, Sandbox, ckpt_run, criu, python, workspace};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

const BOTH: &str = include_str!("both.sh");
const SERVER: &str = include_str!("server.sh");
const CLIENT: &str = include_str!("client.sh");

/// The server's place in the network.
const SERVER_PLACE: u8 = 1;
const DISK_BYTES: u64 = 512 << 20;
/// The name of the jobs.
const JOB_NAME: &str = "j";
/// How many snapshots they keep.
const KEEP: usize = 4;

/// A job: `job.py HURRY END`. It ends at a multiple of 100 steps when the file HURRY is there, or after END steps, without
/// delays. Its log depends on all of its memory.
const JOB: &str = r#"
import os, random, sys, time, zlib

hurry, end = sys.argv[1], int(sys.argv[2])
memory = bytearray(random.Random(7).randbytes(1 << 22))
chain = step = 0
with open("log", "w", buffering=1) as log:
    while step != end and not (step % 100 == 0 and os.path.exists(hurry)):
        chain = zlib.crc32(b"%d" % step, chain)
        memory[chain % len(memory)] = step & 255
        log.write(f"{step} {chain}\n")
        step += 1
        if end < 0:
            time.sleep(0.01)
    log.write(f"end {zlib.crc32(memory)}\n")
"#;

/// The machines use the CPUs, and memory.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The directory that xtask sets up, or a skip.
fn tool_or_skip() -> Option<PathBuf> {
    let tool = tool();
    if tool.is_none() {
        ckpt_test_skip::needs_full();
    }
    tool
}

fn make_disk(image: &Path) {
    make_image(image, DISK_BYTES).and_then(|()| FileSystem::Ext4.format(image)).unwrap();
}

fn boot_server(tool: &Path, dir: &Path, disk: &Path) -> VirtualMachine {
    let network = Some(Network { dir, place: SERVER_PLACE });
    let hardware = Hardware { cores: 1, memory_mib: 1024, disk, network };
    let machine = VirtualMachine::boot(tool, &dir.join("server"), hardware);
    machine.ok(&format!("{BOTH}{SERVER}"));
    machine
}

/// A machine whose sandboxes are on its disk.
fn boot_client(tool: &Path, dir: &Path) -> VirtualMachine {
    let disk = dir.join("client-disk");
    make_disk(&disk);
    let network = Some(Network { dir, place: 3 - SERVER_PLACE });
    let hardware = Hardware { cores: 1, memory_mib: 1536, disk: &disk, network };
    let machine = VirtualMachine::boot(tool, &dir.join("client"), hardware);
    let sandboxes = workspace().join("target/tests");
    machine.ok(&format!("{BOTH}{CLIENT}mount /dev/vda '{}'\n", sandboxes.display()));
    machine
}

/// A server with an empty disk, and a client.
fn boot_both(tool: &Path, dir: &Path) -> (VirtualMachine, VirtualMachine) {
    let disk = dir.join("server-disk");
    make_disk(&disk);
    (boot_server(tool, dir, &disk), boot_client(tool, dir))
}

/// How a client mounts the server's directory.
#[derive(Clone, Copy, Debug)]
struct Mount {
    name: &'static str,
    options: &'static str,
    /// Whether other machines see its locks.
    has_shared_locks: bool,
}

const V4: Mount = Mount { name: "v4", options: "vers=4.2", has_shared_locks: true };
const V3: Mount = Mount { name: "v3", options: "vers=3", has_shared_locks: true };
const NO_LOCK: Mount =
    Mount { name: "no-lock", options: "vers=3,nolock,nosharecache", has_shared_locks: false };
const LOCAL_LOCK: Mount =
    Mount { name: "local-lock", options: "vers=3,local_lock=flock,nosharecache", has_shared_locks: false };

impl Mount {
    /// The command that mounts it on the directory `at`, for a shell.
    fn script(self, server: &str, at: &Path) -> String {
        let path = if self.options.starts_with("vers=4") { "/" } else { "/srv/disk/export" };
        format!("mkdir -p {0} && mount.nfs {server}:{path} {0} -o {1}", at.display(), self.options)
    }

    /// Mounts it, in a machine. Returns a sandbox with a job, whose store is there.
    fn sandbox(self) -> Sandbox {
        let at = Path::new("/mnt").join(self.name);
        let script = self.script(&address(SERVER_PLACE), &at);
        let output = Command::new("sh").args(["-c", &script]).output().unwrap();
        assert!(output.status.success(), "{self:?}: {}", String::from_utf8_lossy(&output.stderr));
        let mut sandbox = Sandbox::new();
        sandbox.store = at.join(format!("store-{}", self.name));
        fs::write(sandbox.path().join("job.py"), JOB).unwrap();
        sandbox
    }
}

fn start_job(sandbox: &Sandbox) -> Running {
    let keep = KEEP.to_string();
    let mut command = sandbox.command(["--job", JOB_NAME, "--keep", &keep, "--"]);
    command.arg(python()).args(["-I", "-S", "job.py", "go", "-1"]);
    let mut running = sandbox.start_command("job", command);
    running.until_answering(sandbox);
    running
}

fn until_it_moves(running: &mut Running, sandbox: &Sandbox) {
    let before = sandbox.read("log").len();
    running.until("a step of the job", || (sandbox.read("log").len() > before).then_some(()));
}

/// Lets the job end, and compares its log with that of an unbroken run; the store has to be sound.
fn finish_job(mut running: Running, sandbox: &Sandbox) {
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(running.wait(), 0, "{}", running.said());
    let log = sandbox.read("log");
    let unbroken = Sandbox::new();
    let steps = (log.lines().count() - 1).to_string();
    let mut command = Command::new(python());
    command.args(["-I", "-S"]).arg(sandbox.path().join("job.py")).args(["no-hurry", &steps]);
    assert!(command.current_dir(unbroken.path()).status().unwrap().success());
    assert_eq!(log, unbroken.read("log"), "{}", running.said());
    sandbox.verify_all();
    sandbox.ok(["verify", "--scrub"]);
}

/// In the client: a job is killed twice and resumed.
fn survives(mount: Mount, shared: &Path) {
    let sandbox = mount.sandbox();
    let mut running = start_job(&sandbox);
    for _ in 0..2 {
        until_it_moves(&mut running, &sandbox);
        running.checkpoint(&sandbox);
    }
    if mount.has_shared_locks {
        fs::write(shared.join(format!("running-{}", mount.name)), "").unwrap();
        let checked = shared.join(format!("checked-{}", mount.name));
        running.until("the other machine's start is refused", || checked.exists().then_some(()));
    }
    until_it_moves(&mut running, &sandbox);
    let newest = running.checkpoint(&sandbox);
    until_it_moves(&mut running, &sandbox);
    running.kill_everything();
    // What a launcher on another machine may be writing.
    let unfinished = sandbox.job_dir().join("packs/.tmp-1-0-x");
    fs::write(&unfinished, "").unwrap();
    let mut running = start_job(&sandbox);
    assert!(running.said().contains(&format!("resumed from snapshot {newest}")), "{}", running.said());
    assert_eq!(unfinished.exists(), !mount.has_shared_locks, "{mount:?}");
    until_it_moves(&mut running, &sandbox);
    running.checkpoint(&sandbox);
    finish_job(running, &sandbox);
    println!("{}: 4 snapshots, resumed from {newest}", mount.name);
}

/// On the server, which mounts its own directory: the job cannot be started a second time.
fn is_refused_on(server: &VirtualMachine, mount: Mount) {
    let at = Path::new("/mnt").join(mount.name);
    let started = server.shared().join("started");
    let script = format!(
        "{} && cd /tmp && CKPT_CRIU='{}' CKPT_STORE={}/store-{} '{}' --job {JOB_NAME} -- touch /run/host/started",
        mount.script("127.0.0.1", &at),
        criu().display(),
        at.display(),
        mount.name,
        ckpt_run().display(),
    );
    let call = server.start(&script);
    let code = call.wait();
    let said = call.said();
    println!("{}, on another machine: {said}", mount.name);
    assert_eq!(code, 2, "{said}");
    assert!(said.contains("is already running") && said.contains("on machine2"), "{said}");
    assert!(!started.exists(), "{said}");
}

#[test]
fn a_job_with_its_store_on_nfs_survives() {
    if let Some(shared) = shared_directory() {
        for mount in [V4, V3, NO_LOCK, LOCAL_LOCK] {
            survives(mount, &shared);
        }
        return;
    }
    let Some(tool) = tool_or_skip() else { return };
    let _alone = alone();
    let sandbox = Sandbox::new();
    let (server, client) = boot_both(&tool, sandbox.path());
    let test = client.start_test("nfs::a_job_with_its_store_on_nfs_survives");
    for mount in [V4, V3] {
        let running = client.shared().join(format!("running-{}", mount.name));
        test.until("a running job", || running.exists().then_some(()));
        is_refused_on(&server, mount);
        fs::write(client.shared().join(format!("checked-{}", mount.name)), "").unwrap();
    }
    println!("{}", test.ok());
}
