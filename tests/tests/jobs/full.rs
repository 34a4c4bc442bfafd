//! A newer PyTorch than the system's, in the private root that `cargo xtask test --full` makes: its torchrun with two
//! ranks, killed without warning and resumed, ends bit for bit as an unbroken run.
//!
//! ckpt-run is in that root too. So it is also the test of a job whose file system is not the machine's.

use ckpt_run_tests::{Running, Sandbox, ckpt_run, criu, set_variables, train_script};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Half a minute's worth: the memory of these processes is large, and the training goes on while it is written to the
/// disk.
const STEPS: usize = 1000;

/// Makes a root of its own out of the one that is given, enters it, and becomes the command.
///
/// The top of it is a tmpfs, so that no mount point has to be made in the given root. It is entered with pivot_root
/// and not with chroot: for CRIU, the root of a mount namespace must be a mount point. All of it is gone with the
/// last process in it, since the mount namespace is the caller's own (`unshare`).
///
/// `/run/ckpt-run` and `/tmp` lie in the sandbox, since each call makes a root of its own: ckpt-run's commands find the
/// launcher by a socket in the first, and what torchrun has put into the second must be there when it is resumed.
const ENTER: &str = r#"set -eu
given=$1 top=$2 workspace=$3 programs=$4 sandbox=$5
shift 5
mount -t tmpfs -o mode=0755 tmpfs "$top"
for path in bin sbin lib lib64; do
    cp -P "$given/$path" "$top/$path"
done
mkdir "$top/old" "$top/proc" "$top/run"
bind() {
    mkdir -p "$top$2"
    mount --rbind "$1" "$top$2"
}
bind "$given/usr" /usr
bind "$given/etc" /etc
bind /dev /dev
bind /sys /sys
mount -t proc proc "$top/proc"
mount -t tmpfs -o mode=0755 tmpfs "$top/run"
bind "$sandbox/run" /run/ckpt-run
bind "$sandbox/tmp" /tmp
# The sandbox, CRIU and the training script are in the workspace. The programs under test are mostly there too.
bind "$workspace" "$workspace"
case $programs in
    "$workspace"/*) ;;
    *) bind "$programs" "$programs" ;;
esac
cd "$top"
pivot_root . old
umount -l /old
rmdir /old
cd "$sandbox"
exec "$@"
"#;

/// A root with the newer PyTorch, and what runs in it.
struct Root {
    given: PathBuf,
    /// Where it is mounted until it is entered: outside of the workspace, which is mounted in it.
    top: tempfile::TempDir,
    sandbox: Sandbox,
}

impl Root {
    fn new(given: &Path) -> Self {
        assert!(
            criu().starts_with(workspace()),
            "{} needs libraries that the root may lack; take criu off PATH and CKPT_CRIU: \
             `cargo xtask` then sets up one that brings its own",
            criu().display()
        );
        let sandbox = Sandbox::new();
        for dir in ["run", "tmp"] {
            std::fs::create_dir(sandbox.path().join(dir)).unwrap();
        }
        std::fs::write(sandbox.path().join("enter"), ENTER).unwrap();
        Self { given: given.to_owned(), top: tempfile::tempdir().unwrap(), sandbox }
    }

    /// The same command, in the root. It keeps its PID: every step on the way there is an exec.
    fn enter(&self, inner: &Command) -> Command {
        let mut outer = Command::new("unshare");
        outer.args(["--mount", "--propagation", "private", "/bin/sh"]).arg(self.sandbox.path().join("enter"));
        let ckpt_run = ckpt_run();
        let programs = ckpt_run.parent().unwrap();
        outer.args([&self.given, self.top.path(), workspace(), programs, self.sandbox.path()]);
        outer.arg(inner.get_program()).args(inner.get_args()).current_dir(self.sandbox.path());
        set_variables(&mut outer, inner);
        // Those of the system's Python and of this machine's user mean nothing in there.
        for name in ["PYTHONPATH", "PYTHONHOME", "TMPDIR", "LD_LIBRARY_PATH"] {
            outer.env_remove(name);
        }
        outer.env("PATH", "/usr/sbin:/usr/bin").env("HOME", "/tmp").env("OMP_NUM_THREADS", "1");
        // This PyTorch is built without libuv; see xtask's tools/rootfs.rs.
        outer.env("USE_LIBUV", "0").env("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1");
        outer.stdin(std::process::Stdio::null());
        outer
    }

    /// torchrun with two ranks, which meet by way of a file in the working directory.
    fn training(step_ms: &str) -> Vec<OsString> {
        let mut argv: Vec<OsString> =
            "/usr/bin/torchrun -r 1 -t 1 --nproc_per_node=2 --local_addr 127.0.0.1 \
             --rdzv_backend c10d --rdzv_endpoint rendezvous --rdzv_conf store_type=file"
                .split_whitespace()
                .map(OsString::from)
                .collect();
        argv.push(train_script().into());
        let steps = STEPS.to_string();
        argv.extend(["--steps", &steps, "--step-ms", step_ms, "--log", "losses.txt"].map(OsString::from));
        argv
    }

    fn start(&self) -> Running {
        let arguments = ["--interval", "off", "--"].map(OsString::from).into_iter();
        let inner = self.sandbox.command(arguments.chain(Self::training("30")));
        self.sandbox.start_command("job", self.enter(&inner))
    }

    /// A command that has to succeed; returns what it prints.
    fn ok(&self, inner: &Command) -> String {
        let output = self.enter(inner).output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{}: {out}{err}", output.status);
        out.trim_end().to_owned()
    }

    fn steps_done(&self) -> usize {
        self.sandbox.read("losses.txt").lines().count()
    }

    fn until_step(&self, job: &mut Running, step: usize) {
        job.until("a step of the training", || (self.steps_done() >= step).then_some(()));
    }
}

fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// The losses of a run in such a root without ckpt-run; in a hurry, which does not change them.
fn unbroken(given: &Path) -> String {
    let root = Root::new(given);
    let argv = Root::training("0");
    let mut command = Command::new(&argv[0]);
    command.args(&argv[1..]);
    root.ok(&command);
    assert_eq!(root.steps_done(), STEPS);
    root.sandbox.read("losses.txt")
}

#[test]
fn a_newer_pytorch_in_a_root_of_its_own_survives() {
    let Some(given) = std::env::var_os("CKPT_TEST_ROOTFS").map(PathBuf::from) else {
        ckpt_test_skip::needs_full();
        return;
    };
    let root = Root::new(&given);
    let mut python = Command::new("/usr/bin/python3");
    let version = root.ok(python.args(["-c", "import torch; print(torch.__version__)"]));
    let major: u32 = version.split('.').next().unwrap().parse().unwrap();
    assert!(major >= 2, "the system's PyTorch may be {version}, the root's has to be newer");

    let mut job = root.start();
    root.until_step(&mut job, 5);
    let id = root.ok(&root.sandbox.command(["checkpoint"]));
    let at_snapshot = root.steps_done();
    root.until_step(&mut job, at_snapshot + 5);
    assert!(job.descendants().len() > 4, "init, reaper, torchrun and two ranks are found to be killed");
    job.kill_everything();
    let at_kill = root.steps_done();
    assert!(at_kill < STEPS, "it was killed in the middle");

    let mut job = root.start();
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert!(job.said().contains(&format!("resumed from snapshot {id}")), "{}", job.said());
    assert_eq!(root.sandbox.read("losses.txt"), unbroken(&given));
    root.ok(&root.sandbox.command(["verify", "--all"]));
}
