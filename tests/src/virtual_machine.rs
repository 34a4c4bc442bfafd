//! Virtual machines with a distribution's kernel, for tests of what this machine's kernel lacks. `cargo xtask test --full`
//! sets up QEMU and the kernel; the CPU is emulated.
//!
//! A machine has the files of this one, at the same paths: the programs under test, CRIU, Python. What it writes is lost at
//! its end, except what is on its disk, and in a directory that it shares with the test. Shell scripts run in it, several
//! at a time, and so do tests of the calling test program.

use crate::{processes, set_variables, until, workspace};
use std::cell::Cell;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The directory that xtask sets up.
const TOOL_VARIABLE: &str = "CKPT_TEST_MACHINE";
/// The same for arm64.
const ARM64_VARIABLE: &str = "CKPT_TEST_ARM64";
/// The programs that emulate machines.
const X86_64_PROGRAM: &str = "bin/qemu-system-x86_64";
const ARM64_PROGRAM: &str = "bin/qemu-system-aarch64";
/// Set for a test that runs in a machine.
const WITHIN: &str = "CKPT_TEST_WITHIN_MACHINE";
/// Where a machine has the directory that it shares with the test.
const SHARED: &str = "/run/host";
/// Its first script.
const BOOT: &str = include_str!("virtual_machine/boot.sh");

/// The directory with QEMU, the kernel and the programs of NFS; `None` without `--full`.
#[must_use]
pub fn tool() -> Option<PathBuf> {
    std::env::var_os(TOOL_VARIABLE).map(PathBuf::from)
}

/// The same for a machine with arm64. Its root has CRIU and a shell, not the files of this machine.
#[must_use]
pub fn arm64_tool() -> Option<PathBuf> {
    std::env::var_os(ARM64_VARIABLE).map(PathBuf::from)
}

/// Held by a test that emulates a machine for a long time: two at once are slower than one after the other, and time limits
/// apply to each.
pub fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The directory shared with the outer test, in a test that runs in a machine.
#[must_use]
pub fn shared_directory() -> Option<PathBuf> {
    std::env::var_os(WITHIN).map(|_| SHARED.into())
}

/// What a machine has.
#[derive(Clone, Copy, Debug)]
pub struct Hardware<'a> {
    /// CPUs. Each uses one of this machine's.
    pub cores: u32,
    /// Memory, in MiB. Files that it writes outside of its disk are in there.
    pub memory_mib: u32,
    /// An image, its `/dev/vda`.
    pub disk: &'a Path,
    /// Its place in a network.
    pub network: Option<Network<'a>>,
}

/// The network's addresses, without the place.
const NETWORK: &str = "10.0.0.";

/// A place in a network of two machines. A machine that ends leaves it, and another one may take its place.
#[derive(Clone, Copy, Debug)]
pub struct Network<'a> {
    /// The network's sockets are here.
    pub dir: &'a Path,
    /// Which of the two it is: 1 or 2. Its address ends with that, see [`address`].
    pub place: u8,
}

/// The address of a machine in its network.
#[must_use]
pub fn address(place: u8) -> String {
    format!("{NETWORK}{place}")
}

/// A machine that is running. Killed when dropped.
pub struct VirtualMachine {
    qemu: Child,
    /// The calls' numbers are written here.
    console: Option<std::process::ChildStdin>,
    dir: PathBuf,
    calls: Cell<u32>,
}

impl VirtualMachine {
    /// Boots a machine, and returns when it takes calls. `dir` is made, for its console's output and the shared directory;
    /// what an earlier machine left there is removed.
    ///
    /// # Panics
    /// When it does not boot.
    #[must_use]
    pub fn boot(tool: &Path, dir: &Path, hardware: Hardware<'_>) -> Self {
        let shared = dir.join("shared");
        fs::create_dir_all(&shared).expect("a directory");
        for entry in fs::read_dir(&shared).expect("the directory") {
            fs::remove_file(entry.expect("an entry").path()).expect("a file of an earlier machine");
        }
        let place = hardware.network.map(|network| network.place.to_string()).unwrap_or_default();
        let tool_within = if is_arm64(tool) { Path::new("/tool") } else { tool };
        let boot =
            format!("TOOL={} PLACE={place} NETWORK={NETWORK}\n{BOOT}", quoted(tool_within.as_os_str()));
        fs::write(shared.join("boot"), boot).expect("the first script");
        let log = File::create(dir.join("console")).expect("a file");
        let mut command = qemu(tool, &shared, hardware);
        let errors = log.try_clone().expect("the same file");
        let mut qemu = command.stdin(Stdio::piped()).stdout(log).stderr(errors).spawn().expect("QEMU");
        let console = qemu.stdin.take();
        let machine = Self { qemu, console, dir: dir.to_owned(), calls: Cell::new(0) };
        machine.until("a machine that takes calls", || shared.join("ready").exists().then_some(()));
        machine
    }

    /// The directory that it shares with the test.
    #[must_use]
    pub fn shared(&self) -> PathBuf {
        self.dir.join("shared")
    }

    /// Starts a shell script in it.
    ///
    /// # Panics
    /// When the machine has ended.
    pub fn start(&self, script: &str) -> Call<'_> {
        let number = self.calls.get() + 1;
        self.calls.set(number);
        fs::write(self.shared().join(format!("{number}.sh")), script).expect("a script");
        writeln!(self.console.as_ref().expect("a console"), "{number}").expect("QEMU takes input");
        Call { machine: self, number }
    }

    /// Runs a shell script in it that has to succeed; returns its output.
    ///
    /// # Panics
    /// When it fails.
    pub fn ok(&self, script: &str) -> String {
        self.start(script).ok()
    }

    /// Starts the test `name` (its path in the calling test program) in it, where [`shared_directory`] is set.
    ///
    /// # Panics
    /// When the machine has ended.
    pub fn start_test(&self, name: &str) -> Call<'_> {
        self.start_test_with(name, &[])
    }

    /// The same with these environment variables.
    ///
    /// # Panics
    /// When the machine has ended.
    pub fn start_test_with(&self, name: &str, variables: &[(&str, &str)]) -> Call<'_> {
        let mut test = Command::new(std::env::current_exe().expect("the test's own path"));
        test.args([name, "--exact", "--nocapture"]).env(WITHIN, "1").envs(variables.iter().copied());
        self.start(&script_of(test))
    }

    /// Polls until `condition` returns a value.
    ///
    /// # Panics
    /// When the machine ends, or after the time for a test.
    pub fn until<T>(&self, what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
        until(what, || {
            let value = condition();
            assert!(value.is_some() || !self.has_ended(), "the machine ended before: {what}");
            value
        })
    }

    fn has_ended(&self) -> bool {
        processes::has_ended(self.qemu.id().cast_signed())
    }

    /// Sends a signal to QEMU: SIGSTOP stops the machine.
    ///
    /// # Panics
    /// When it cannot be sent.
    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.qemu);
        rustix::process::kill_process(pid, signal).expect("QEMU is there");
    }
}

impl Drop for VirtualMachine {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
        if std::thread::panicking() {
            let console = fs::read(self.dir.join("console")).unwrap_or_default();
            eprintln!("--- console of {}\n{}", self.dir.display(), String::from_utf8_lossy(&console));
        }
    }
}

/// A script that runs in a machine.
pub struct Call<'a> {
    machine: &'a VirtualMachine,
    number: u32,
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() && self.status().is_none() {
            eprintln!("--- output of what has not ended\n{}", self.said());
        }
    }
}

impl Call<'_> {
    fn file(&self, kind: &str) -> PathBuf {
        self.machine.shared().join(format!("{}.{kind}", self.number))
    }

    /// Its output so far.
    #[must_use]
    pub fn said(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.file("said")).unwrap_or_default()).into_owned()
    }

    /// Its exit code, if it has ended.
    ///
    /// # Panics
    /// When the shell wrote something else.
    #[must_use]
    pub fn status(&self) -> Option<i32> {
        let text = fs::read_to_string(self.file("status")).ok()?;
        Some(text.trim().parse().expect("an exit code"))
    }

    /// Polls until `condition` returns a value.
    ///
    /// # Panics
    /// When the script or the machine ends, or after the time for a test.
    pub fn until<T>(&self, what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
        self.machine.until(what, || {
            let value = condition();
            assert!(
                value.is_some() || self.status().is_none(),
                "the script ended before: {what}\n{}",
                self.said()
            );
            value
        })
    }

    /// Waits until it ends; returns its exit code.
    ///
    /// # Panics
    /// When it does not end.
    #[must_use]
    pub fn wait(&self) -> i32 {
        self.machine.until("the end of a script", || self.status())
    }

    /// The same for one that has to succeed; returns its output.
    ///
    /// # Panics
    /// When it fails.
    #[must_use]
    pub fn ok(&self) -> String {
        let code = self.wait();
        assert_eq!(code, 0, "{}", self.said());
        self.said()
    }
}

fn is_arm64(tool: &Path) -> bool {
    tool.join(ARM64_PROGRAM).exists()
}

fn qemu(tool: &Path, shared: &Path, hardware: Hardware<'_>) -> Command {
    let Hardware { cores, memory_mib, disk, network } = hardware;
    // QEMU ends with this thread.
    let mut command = Command::new("setpriv");
    let (program, cpu, console, root) = if is_arm64(tool) {
        let cpu = ["-machine", "virt", "-cpu", "max,pauth-impdef=on,sve=off,sme=off"].as_slice();
        (ARM64_PROGRAM, cpu, "ttyAMA0", tool.join("root"))
    } else {
        (X86_64_PROGRAM, ["-cpu", "max,la57=off"].as_slice(), "ttyS0", PathBuf::from("/"))
    };
    command.args(["--pdeathsig", "KILL", "nice", "-n", "5"]).arg(tool.join(program));
    command.args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-serial", "stdio"]);
    command.args(["-accel", "tcg,thread=multi"]).args(cpu);
    command.args(["-smp", &cores.to_string(), "-m", &memory_mib.to_string()]);
    command.arg("-kernel").arg(tool.join("kernel")).arg("-initrd").arg(tool.join("initramfs"));
    command.args(["-append", &format!("console={console} quiet panic=-1 mitigations=off")]);
    let mut share = |tag: &str, path: &Path, options: &str| {
        let mut fs = OsString::from(format!("local,id={tag},security_model=none,{options}path="));
        fs.push(path);
        command.arg("-fsdev").arg(fs);
        command.args(["-device", &format!("virtio-9p-pci,fsdev={tag},mount_tag={tag}")]);
    };
    share("root", &root, "readonly=on,multidevs=remap,");
    share("host", shared, "");
    let mut drive = OsString::from("format=raw,if=virtio,cache=writeback,file.locking=off,file=");
    drive.push(disk);
    command.arg("-drive").arg(drive);
    if let Some(Network { dir, place }) = network {
        let peer = 3 - place;
        // Relative paths: those of sockets are short.
        let sockets =
            format!("local.type=unix,local.path={place}.sock,remote.type=unix,remote.path={peer}.sock");
        command.args(["-netdev", &format!("dgram,id=net,{sockets}")]).current_dir(dir);
        command.args(["-device", &format!("virtio-net-pci,netdev=net,romfile=,mac=52:54:00:00:00:0{place}")]);
    }
    command
}

fn quoted(text: &std::ffi::OsStr) -> String {
    format!("'{}'", text.to_str().expect("text").replace('\'', r"'\''"))
}

/// A script that becomes a command, with the variables of this test.
fn script_of(mut test: Command) -> String {
    let own = std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("CKPT_"));
    let mut inner = Command::new("");
    inner.envs(own.filter(|(name, _)| name != TOOL_VARIABLE));
    set_variables(&mut test, &inner);
    let mut script = format!("cd {}\n", quoted(workspace().join("tests").as_os_str()));
    for (name, value) in test.get_envs() {
        let (name, value) = (name.to_str().expect("a name"), quoted(value.expect("a value")));
        writeln!(script, "export {name}={value}").expect("memory");
    }
    let words = std::iter::once(test.get_program()).chain(test.get_args()).map(quoted);
    // A shell starts background commands with Ctrl-C ignored, and tests send it.
    writeln!(script, "exec env --default-signal=INT {}", words.collect::<Vec<_>>().join(" "))
        .expect("memory");
    script
}
