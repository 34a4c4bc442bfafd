//! What works without root: a user with no rights at all, in a user namespace of ckpt-run's; one with a few
//! capabilities; and one with neither, for whom nothing is started. docs/privileges.md has the table.

use crate::agents::harmless;
use ckpt_run_tests::{Running, Sandbox, ckpt_run, criu, programs, python, set_variables, until};
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// What a user needs to have jobs with TCP connections on the machine's network saved, apart from what CAP_SETPCAP is
/// for: a bounding set that is not full.
const SMALLEST: &str = "+sys_admin,+net_admin,+setpcap";
const NOTHING: &str = "-all";

/// State in two processes and in what lies between them; each step hangs on all of it. Slow while `slow` is there.
const JOB: &str = r"
import hashlib, os, random, socket, sys, time
if sys.argv[1] == 'tcp':
    listener = socket.create_server(('127.0.0.1', 0))
    ours = socket.create_connection(listener.getsockname())
    theirs = listener.accept()[0]
else:
    ours, theirs = socket.socketpair()
if os.fork() == 0:
    ours.close()
    state = b'worker'
    while data := theirs.recv(32):
        state = hashlib.sha256(state + data).digest()
        theirs.sendall(state)
    os._exit(0)
theirs.close()
random.seed(7)
log = open('steps', 'a')
for step in range(200):
    ours.sendall(random.randbytes(32))
    log.write(f'{step} {ours.recv(32).hex()} {os.getuid()}\n')
    log.flush()
    if os.path.exists('slow'):
        time.sleep(0.05)
";

/// A user ID that no other test uses, and a directory of that user.
struct User {
    uid: u32,
    sandbox: Sandbox,
    home: PathBuf,
}

impl User {
    fn new(uid: u32) -> Self {
        let sandbox = Sandbox::new();
        fs::write(sandbox.path().join("job.py"), JOB).unwrap();
        for name in ["job.py", "job.out", "job.err", "slow"] {
            let path = sandbox.path().join(name);
            fs::File::options().append(true).create(true).open(&path).unwrap();
            chown(&path, Some(uid), Some(uid)).unwrap();
        }
        chown(sandbox.path(), Some(uid), Some(uid)).unwrap();
        let user = Self { uid, home: sandbox.path().to_owned(), sandbox };
        user.forget();
        user
    }

    /// Where sockets are, as there is no XDG_RUNTIME_DIR.
    fn runtime_dir(&self) -> PathBuf {
        format!("/tmp/ckpt-run-{}", self.uid).into()
    }

    fn forget(&self) {
        for dir in self.random_dirs().into_iter().chain([self.runtime_dir()]) {
            let _ = fs::remove_dir_all(&dir).or_else(|_| fs::remove_file(&dir));
        }
    }

    /// Those that ckpt-run makes if all others are another user's.
    fn random_dirs(&self) -> Vec<PathBuf> {
        let all = fs::read_dir("/tmp").unwrap().map(|entry| entry.unwrap().path());
        let prefix = format!("{}-", self.runtime_dir().display());
        all.filter(|path| path.display().to_string().starts_with(&prefix)).collect()
    }

    /// The program and arguments that make a program run as this user with these capabilities and no others.
    fn words(&self, capabilities: &str) -> Vec<String> {
        let uid = self.uid.to_string();
        let mut words: Vec<_> =
            ["setpriv", "--reuid", &uid, "--regid", &uid, "--clear-groups"].map(str::to_owned).into();
        let all = if capabilities == NOTHING { NOTHING.into() } else { format!("-all,{capabilities}") };
        words.extend(["--inh-caps".into(), all.clone(), "--ambient-caps".into(), all]);
        words
    }

    fn command(&self, capabilities: &str, arguments: &[&str]) -> Command {
        let inner = self.sandbox.command(arguments);
        let mut command = wrapped(&self.words(capabilities), &inner);
        command.env("HOME", &self.home);
        command
    }

    fn job(&self, capabilities: &str, kind: &str) -> Command {
        let python = python().display().to_string();
        self.command(capabilities, &["--", &python, "job.py", kind])
    }

    fn steps(&self) -> String {
        self.sandbox.read("steps")
    }

    fn until_steps(&self, job: &mut Running, steps: usize) {
        job.until("steps of the job", || (self.steps().lines().count() >= steps).then_some(()));
    }

    /// Starts the job, takes a snapshot, kills everything, resumes, and compares with an unbroken run.
    fn goes_on(&self, capabilities: &str, kind: &str) -> String {
        let mut job = self.sandbox.start_command("job", self.job(capabilities, kind));
        self.until_steps(&mut job, 5);
        job.until("a launcher that answers", || {
            let output = self.command(capabilities, &["status", "--json"]).output().unwrap();
            String::from_utf8_lossy(&output.stdout).contains("launcher_pid\": ").then_some(())
        });
        let output = self.command(capabilities, &["checkpoint"]).output().unwrap();
        assert!(output.status.success(), "{}{}", said(&output), job.said());
        let id = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        let saved_at = self.steps().lines().count();
        self.until_steps(&mut job, saved_at + 3);
        let first = job.said();
        job.kill_everything();

        let mut job = self.sandbox.start_command("job", self.job(capabilities, kind));
        self.until_steps(&mut job, saved_at + 5);
        fs::remove_file(self.sandbox.path().join("slow")).unwrap();
        assert_eq!(job.wait(), 0, "{}", job.said());
        assert!(job.said().contains(&format!("resumed from snapshot {id}")), "{}", job.said());
        let resumed = self.steps();

        let plain = Self::new(self.uid);
        fs::remove_file(plain.sandbox.path().join("slow")).unwrap();
        let mut command = Command::new("setpriv");
        command.args(&plain.words(NOTHING)[1..]).arg(python()).args(["job.py", kind]);
        assert!(command.current_dir(plain.sandbox.path()).status().unwrap().success());
        assert_eq!(resumed, plain.steps());
        assert_eq!(resumed.lines().count(), 200);
        assert!(resumed.lines().all(|line| line.ends_with(&format!(" {}", self.uid))), "another user");
        first
    }
}

impl Drop for User {
    fn drop(&mut self) {
        self.forget();
    }
}

/// `inner`, started by other programs; its directory and variables stay.
fn wrapped(words: &[String], inner: &Command) -> Command {
    let mut outer = Command::new(&words[0]);
    outer.args(&words[1..]).arg(inner.get_program()).args(inner.get_args());
    outer.current_dir(inner.get_current_dir().unwrap()).stdin(std::process::Stdio::null());
    set_variables(&mut outer, inner);
    outer.env_remove("XDG_RUNTIME_DIR");
    outer
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Whether other users can get at what is tested here at all.
fn can_be_reached(user: &User) -> bool {
    let mut words = user.words(NOTHING);
    words.extend(["test", "-x"].map(str::to_owned));
    let reaches = |path: &Path| {
        Command::new(&words[0]).args(&words[1..]).arg(path).status().is_ok_and(|status| status.success())
    };
    let all = [ckpt_run(), criu(), user.sandbox.path().to_owned()].iter().all(|path| reaches(path));
    if !all {
        ckpt_test_skip::skip("other users have no access to the programs under test, or to target/tests");
    }
    all
}

#[test]
fn a_user_without_any_rights_has_a_job_that_goes_on() {
    let user = User::new(61_001);
    if !can_be_reached(&user) {
        return;
    }
    let said = user.goes_on(NOTHING, "unix");
    assert!(said.contains("in a user namespace of its own"), "{said}");
}

/// As systemd opens them for a service with `User=` and `StandardOutput=append:`: the user may read them, and not open them for
/// writing.
#[test]
fn logs_that_root_has_opened_for_the_user_go_on() {
    let user = User::new(59_013);
    let program = "import os, time\nfor step in range(200):\n    print(step, flush=True)\n    open('steps', 'a').write('s\\n')\n    if os.path.exists('slow'): time.sleep(0.05)";
    let python = python().display().to_string();
    for name in ["job.out", "job.err"] {
        chown(user.sandbox.path().join(name), Some(0), Some(0)).unwrap();
    }
    let command = || user.command(NOTHING, &["--", &python, "-c", program]);
    let mut job = user.sandbox.start_command("job", command());
    user.until_steps(&mut job, 5);
    for _ in 0..2 {
        assert!(user.command(NOTHING, &["checkpoint"]).status().unwrap().success(), "{}", job.said());
    }
    // The user may not mount a tmpfs. The warning is logged once.
    assert_eq!(job.said().matches("cannot be staged in memory").count(), 1, "{}", job.said());
    let saved_at = user.steps().lines().count();
    user.until_steps(&mut job, saved_at + 5);
    job.kill_everything();
    fs::remove_file(user.sandbox.path().join("slow")).unwrap();
    let mut job = user.sandbox.start_command("job", command());
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert!(job.said().contains("resumed from snapshot"), "{}", job.said());
    let unbroken: String = (0..200).map(|step| format!("{step}\n")).collect();
    assert_eq!(user.sandbox.read("job.out"), unbroken);
}

/// Without CAP_SYS_RESOURCE, no limit can be set above the hard limit of the shell.
#[test]
fn limits_that_a_resume_cannot_give_back_are_named() {
    let user = User::new(59_015);
    let start = |name: &str, files: u32| {
        let limit = ["sh", "-c", &format!(r#"ulimit -n {files}; exec "$@""#), "sh"].map(str::to_owned);
        user.sandbox.start_command(name, wrapped(&limit, &user.job(NOTHING, "pair")))
    };
    let mut job = start("job", 900);
    user.until_steps(&mut job, 5);
    assert!(user.command(NOTHING, &["checkpoint"]).status().unwrap().success(), "{}", job.said());
    job.kill_everything();
    for (name, files) in [("same", 900), ("lower", 800)] {
        let mut job = start(name, files);
        let log = format!("{name}.err");
        job.until("a resume", || user.sandbox.read(&log).contains("resumed from snapshot").then_some(()));
        let is_told = job.said().contains("open files (-n) 900, now 800");
        assert_eq!(is_told, files < 900, "{}", job.said());
        job.kill_everything();
    }
}

#[test]
fn a_limit_of_open_files_that_is_too_low_is_named() {
    let user = User::new(59_014);
    let low = ["sh", "-c", r#"ulimit -n 64; exec "$@""#, "sh"].map(str::to_owned);
    let limited = || wrapped(&low, &user.job(NOTHING, "pair"));
    let mut job = user.sandbox.start_command("job", limited());
    user.until_steps(&mut job, 5);
    assert!(job.said().contains("the hard limit of open files is 64"), "{}", job.said());
    assert!(user.command(NOTHING, &["checkpoint"]).status().unwrap().success(), "{}", job.said());
    job.kill_everything();
    let mut refused = user.sandbox.start_command("refused", limited());
    assert_eq!(refused.wait(), 125, "{}", refused.said());
    assert!(refused.said().contains("Raise the hard limit"), "{}", refused.said());
    fs::remove_file(user.sandbox.path().join("slow")).unwrap();
    let mut job = user.sandbox.start_command("again", user.job(NOTHING, "pair"));
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert!(job.said().contains("resumed from snapshot"), "{}", job.said());
    assert_eq!(user.steps().lines().count(), 200);
}

#[test]
fn the_smallest_set_of_capabilities_does_for_tcp_on_the_machines_network() {
    let user = User::new(61_002);
    if !can_be_reached(&user) {
        return;
    }
    let said = user.goes_on(SMALLEST, "tcp");
    assert!(!said.contains("user namespace"), "{said}");
}

/// Any user can make a directory in /tmp. One that is in the way at the start is avoided, also by the commands that look
/// for the launcher. One that is in the way of a snapshot's processes is named.
#[test]
fn a_directory_of_another_user_in_tmp_is_avoided_or_named() {
    const STRANGER: u32 = 61_011;
    let user = User::new(61_010);
    if !can_be_reached(&user) {
        return;
    }
    let dir = user.runtime_dir();
    let occupy = || {
        fs::create_dir(&dir).unwrap();
        chown(&dir, Some(STRANGER), Some(STRANGER)).unwrap();
    };
    occupy();
    user.goes_on(NOTHING, "unix");
    // Without a home directory, too.
    let mut user = User::new(61_010);
    occupy();
    user.home = "/nonexistent".into();
    user.goes_on(NOTHING, "unix");

    let user = User::new(61_010);
    let mut job = user.sandbox.start_command("job", user.job(NOTHING, "unix"));
    user.until_steps(&mut job, 5);
    job.until("a snapshot", || {
        user.command(NOTHING, &["checkpoint"]).output().unwrap().status.success().then_some(())
    });
    job.kill_everything();
    user.forget();
    // What is no directory cannot be covered.
    fs::write(&dir, "").unwrap();
    chown(&dir, Some(STRANGER), Some(STRANGER)).unwrap();
    let mut job = user.sandbox.start_command("job", user.job(NOTHING, "unix"));
    assert_eq!(job.wait(), 125, "{}", job.said());
    assert!(job.said().contains(&format!("{}: ", dir.display())), "{}", job.said());
    user.forget();
    occupy();
    fs::remove_file(user.sandbox.path().join("slow")).unwrap();
    let mut job = user.sandbox.start_command("job", user.job(NOTHING, "unix"));
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert!(job.said().contains("resumed from snapshot"), "{}", job.said());
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
}

/// The processes of a snapshot look for ckpt-run where it was when they were started.
#[test]
fn a_resume_with_another_runtime_directory_has_its_agents() {
    let user = User::new(61_013);
    if !can_be_reached(&user) {
        return;
    }
    let program = user.sandbox.path().join("played.py");
    fs::copy(programs().join("agent/played.py"), &program).unwrap();
    let command = |dir: &str, arguments: &[&str]| {
        let mut command = user.command(NOTHING, arguments);
        command.env("XDG_RUNTIME_DIR", user.sandbox.path().join(dir));
        command.env("CKPT_INTERPOSE", harmless()).env("CKPT_FILES_EXCLUDE", "*");
        command
    };
    let python = python().display().to_string();
    let start = |dir: &str| user.sandbox.start_command("job", command(dir, &["--", &python, "played.py"]));
    let mut job = start("one");
    job.until("the agent", || user.sandbox.path().join("ready").exists().then_some(()));
    job.until("a snapshot", || {
        command("one", &["checkpoint"]).output().unwrap().status.success().then_some(())
    });
    let names_in =
        |dir: PathBuf| fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>();
    let names = names_in(user.sandbox.path().join("one/ckpt-run"));
    let has = |end: &str| names.iter().any(|name| name.to_string_lossy().ends_with(end));
    assert!(has(".sock") && has(".agents"), "{names:?}");
    // From there the reaper's program is executed, at the same address in each resume.
    assert_eq!(names_in(user.runtime_dir()), ["private"], "the variable counts");
    job.kill_everything();
    let mut job = start("two");
    job.until("the resume", || job_has_said(&user, "resumed from snapshot"));
    fs::write(user.sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert_eq!(user.sandbox.read("log"), "started\npass\n", "{}", job.said());
}

fn job_has_said(user: &User, text: &str) -> Option<()> {
    user.sandbox.read("job.err").contains(text).then_some(())
}

/// Somebody who could write to the directory of sockets and locks has put other things there. The job itself runs or is
/// refused, nothing hangs, and nothing outside changes.
#[test]
fn whatever_is_in_the_runtime_directory_only_the_job_itself_runs() {
    let user = User::new(61_014);
    if !can_be_reached(&user) {
        return;
    }
    let [dir, canary] = ["runtime", "canary"].map(|name| user.sandbox.path().join(name));
    let (go, script) = (user.sandbox.path().join("go"), "while [ ! -e go ]; do sleep 0.05; done; echo end");
    let command = |arguments: &[&str]| {
        let mut command = user.command(NOTHING, arguments);
        command.env("XDG_RUNTIME_DIR", &dir).env("CKPT_INTERPOSE", harmless());
        command
    };
    let unreachable = || user.sandbox.read("job.err").matches("cannot reach this job").count();
    // Its job is asked for a checkpoint, and goes to its end.
    let run = |what: &str| {
        let before = unreachable();
        let mut job = user.sandbox.start_command("job", command(&["--", "sh", "-c", script]));
        let mut asked = None;
        until("a snapshot, the end, or that nobody can ask for one", || {
            let child = asked.get_or_insert_with(|| command(&["checkpoint"]).spawn().unwrap());
            let is_saved = child.try_wait().unwrap().is_some_and(|status| {
                asked = None;
                status.success()
            });
            (is_saved || unreachable() > before || job.has_ended()).then_some(())
        });
        let names = fs::read_dir(dir.join("ckpt-run")).unwrap().map(|entry| entry.unwrap().path());
        let names: Vec<_> = names.collect();
        fs::write(&go, "").unwrap();
        let code = job.wait();
        fs::remove_file(&go).unwrap();
        println!("{what}: {code}, {}", job.said());
        let has_ended = user.sandbox.read("job.out").contains("end");
        assert!(code == 0 && has_ended || matches!(code, 2 | 125), "{what}: {code}, {}", job.said());
        assert!(!job.said().contains("panicked"), "{what}: {}", job.said());
        (code, names)
    };
    let (code, names) = run("as it was");
    let has = |end: &str| names.iter().any(|name| name.to_string_lossy().ends_with(end));
    assert!(code == 0 && [".sock", ".agents", "/names.lock"].into_iter().all(has), "{names:?}");
    fs::write(&canary, "alive").unwrap();
    chown(&canary, Some(user.uid), Some(user.uid)).unwrap();
    for name in &names {
        for what in ["a link", "a directory", "a fifo", "a file"] {
            let _ = fs::remove_file(name);
            let _ = fs::remove_dir_all(name);
            match what {
                "a link" => std::os::unix::fs::symlink(&canary, name).unwrap(),
                "a directory" => fs::create_dir(name).unwrap(),
                "a fifo" => assert!(Command::new("mkfifo").arg(name).status().unwrap().success()),
                _ => fs::write(name, "garbage").unwrap(),
            }
            std::os::unix::fs::lchown(name, Some(user.uid), Some(user.uid)).unwrap();
            run(&format!("{} is {what}", name.display()));
            assert_eq!(fs::read_to_string(&canary).unwrap(), "alive", "{} is {what}", name.display());
        }
        let _ = fs::remove_file(name);
        let _ = fs::remove_dir_all(name);
    }
}

/// This user cannot have memory for the images. With a key, they do not go to the disk either, unless that is allowed.
#[test]
fn the_memory_of_an_encrypted_job_is_not_written_to_the_disk() {
    let user = User::new(61_012);
    if !can_be_reached(&user) {
        return;
    }
    let key = user.sandbox.path().join("key");
    fs::write(&key, std::array::from_fn::<u8, 32, _>(|at| at as u8)).unwrap();
    chown(&key, Some(user.uid), Some(user.uid)).unwrap();
    fs::set_permissions(&key, Permissions::from_mode(0o600)).unwrap();
    let encrypted = |staging: &str, command: &mut Command| {
        command.env("CKPT_ENCRYPT_KEY_FILE", &key).env("CKPT_STAGING", staging);
    };
    let start = |staging| {
        let mut command = user.job(NOTHING, "unix");
        encrypted(staging, &mut command);
        user.sandbox.start_command("job", command)
    };
    let checkpoint = |job: &mut Running| loop {
        let mut command = user.command(NOTHING, &["checkpoint"]);
        encrypted("auto", &mut command);
        let output = command.output().unwrap();
        if !said(&output).contains("not running") {
            return output;
        }
        assert!(!job.has_ended(), "{}", job.said());
    };
    let refused = |text: &str| {
        assert!(text.contains("must not be on disk") && text.contains("--staging any"), "{text}");
    };
    let mut job = start("auto");
    user.until_steps(&mut job, 2);
    let output = checkpoint(&mut job);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    refused(&said(&output));
    assert!(!user.sandbox.job_dir().join("staging").exists());
    let steps = user.steps().lines().count();
    user.until_steps(&mut job, steps + 2);
    job.kill_everything();
    fs::remove_file(user.sandbox.path().join("steps")).unwrap();

    let mut job = start("any");
    user.until_steps(&mut job, 2);
    let output = checkpoint(&mut job);
    assert!(output.status.success(), "{}", said(&output));
    job.kill_everything();
    let mut job = start("auto");
    assert_eq!(job.wait(), 125, "{}", job.said());
    refused(&job.said());
    assert!(!user.sandbox.job_dir().join("staging").exists());
    fs::remove_file(user.sandbox.path().join("slow")).unwrap();
    let mut job = start("any");
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert!(job.said().contains("resumed from snapshot"), "{}", job.said());
}

/// Capabilities are for ckpt-run and CRIU.
#[test]
fn the_job_has_none_of_the_capabilities() {
    let user = User::new(61_003);
    if !can_be_reached(&user) {
        return;
    }
    for capabilities in [NOTHING, SMALLEST] {
        let script = ["--", "grep", "-E", "Cap(Inh|Prm|Eff|Amb)", "/proc/self/status"];
        let output = user.command(capabilities, &script).output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
        let sets = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(sets.lines().count(), 4, "{sets}");
        assert!(sets.lines().all(|line| line.ends_with("\t0000000000000000")), "{sets}");
    }
}

/// What would come back wrong is refused by name, and the job runs on.
#[test]
fn what_needs_more_rights_is_refused_by_name() {
    let user = User::new(61_004);
    if !can_be_reached(&user) {
        return;
    }
    let refused = |kind: &str, reason: &str| {
        let mut job = user.sandbox.start_command("job", user.job(NOTHING, kind));
        user.until_steps(&mut job, 2);
        let output = loop {
            let output = user.command(NOTHING, &["checkpoint"]).output().unwrap();
            if !said(&output).contains("not running") {
                break output;
            }
            assert!(!job.has_ended(), "{}", job.said());
        };
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        assert!(said(&output).contains(reason), "{}", said(&output));
        let steps = user.steps().lines().count();
        user.until_steps(&mut job, steps + 2);
        job.kill_everything();
        fs::remove_file(user.sandbox.path().join("steps")).unwrap();
        fs::remove_dir_all(&user.sandbox.store).unwrap();
    };
    refused("tcp", "CAP_NET_ADMIN");
    let more =
        "import mmap, os\nfd = os.memfd_create('x')\nos.ftruncate(fd, 4096)\nkept = mmap.mmap(fd, 4096)\n";
    fs::write(user.sandbox.path().join("job.py"), more.to_owned() + JOB).unwrap();
    refused("unix", "has a memfd mapped");
    let more = "import ctypes\nassert ctypes.CDLL(None).semget(0, 1, 0o600) >= 0\n";
    fs::write(user.sandbox.path().join("job.py"), more.to_owned() + JOB).unwrap();
    refused("unix", "SysV");
}

/// In a changed root directory the kernel makes no user namespaces.
fn without_user_namespaces(user: &User, arguments: &[&str]) -> Output {
    let root = user.sandbox.path().join("root");
    fs::create_dir_all(&root).unwrap();
    let script = "mount --rbind / \"$1\" && cd / && root=$1 dir=$2 && shift 2 && exec chroot \"$root\" sh -c 'cd \"$1\" && shift && exec \"$@\"' sh \"$dir\" \"$@\"";
    let mut words: Vec<_> = ["unshare", "--mount", "sh", "-c", script, "sh"].map(str::to_owned).into();
    words.extend([root.display().to_string(), user.sandbox.path().display().to_string()]);
    words.extend(user.words(NOTHING));
    wrapped(&words, &user.sandbox.command(arguments)).output().unwrap()
}

#[test]
fn without_rights_and_user_namespaces_nothing_is_started() {
    let user = User::new(61_005);
    if !can_be_reached(&user) {
        return;
    }
    let output = without_user_namespaces(&user, &["--", "touch", "it-ran"]);
    let text = said(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    for words in ["user ID 61005 has no CAP_SYS_ADMIN", "user.max_user_namespaces", "Run ckpt-run as root"] {
        assert!(text.contains(words), "{text}");
    }
    let nothing_is_left = || {
        assert!(!user.sandbox.path().join("it-ran").exists() && !user.sandbox.store.exists());
        assert!(!user.runtime_dir().exists());
    };
    nothing_is_left();
    let output = without_user_namespaces(&user, &["doctor"]);
    let found = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(1), "{found}");
    assert!(found.contains("limited  user                 user ID 61005"), "{found}");
    assert!(found.contains("MISSING  PID namespace"), "{found}");
    nothing_is_left();

    // Some rights, but not enough: a resume would wait for ever.
    let mut words = user.words("+sys_admin");
    words.extend(["--bounding-set", "-wake_alarm"].map(str::to_owned));
    let output = wrapped(&words, &user.sandbox.command(["--", "touch", "it-ran"])).output().unwrap();
    let text = said(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("user ID 61005 lacks CAP_SETPCAP"), "{text}");
    nothing_is_left();
}

#[test]
fn doctor_tells_what_a_user_has() {
    let user = User::new(61_006);
    if !can_be_reached(&user) {
        return;
    }
    let lines = |capabilities: &str| {
        let output = user.command(capabilities, &["doctor"]).output().unwrap();
        assert_eq!(
            output.status.code(),
            Some(0),
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            said(&output)
        );
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let found = lines(NOTHING);
    for line in [
        "limited  user                 user ID 61006; its jobs run in a user namespace",
        "limited  CAP_SYS_ADMIN        not held",
        "limited  CAP_NET_ADMIN        not held",
        "ok       PID namespace        can be created",
        "limited  staging in memory    Operation not permitted",
    ] {
        assert!(found.contains(line), "{line}: {found}");
    }
    let found = lines(SMALLEST);
    for line in [
        "ok       criu check ",
        "limited  user                 user ID 61006, with capabilities",
        "ok       CAP_SYS_ADMIN        held",
        "ok       CAP_SETPCAP          held",
        "limited  CAP_SYS_TIME         not held",
        "ok       staging in memory    a tmpfs can be created",
    ] {
        assert!(found.contains(line), "{line}: {found}");
    }
}

/// All that is in a directory, with owners, modes and lengths.
fn listing(dir: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let meta = fs::symlink_metadata(&path).unwrap();
        found.push(format!("{} {} {:o} {}", path.display(), meta.uid(), meta.mode(), meta.len()));
        if meta.is_dir() {
            found.extend(listing(&path));
        }
    }
    found.sort();
    found
}

#[test]
fn another_user_gets_at_nothing() {
    let (user, stranger) = (User::new(61_007), User::new(61_008));
    if !can_be_reached(&user) {
        return;
    }
    let mut job = user.sandbox.start_command("job", user.job(NOTHING, "unix"));
    user.until_steps(&mut job, 2);
    let sockets = user.runtime_dir();
    let socket = job.until("a control socket", || {
        let all = fs::read_dir(&sockets).ok()?.flatten().map(|entry| entry.path());
        all.filter(|path| path.extension().is_some_and(|kind| kind == "sock")).max()
    });
    assert_eq!(fs::metadata(&socket).unwrap().mode() & 0o777, 0o600);
    assert_eq!(fs::metadata(&sockets).unwrap().mode() & 0o777, 0o700);
    // The directory of the job is not in the stranger's way.
    let open = Permissions::from_mode(0o755);
    fs::set_permissions(user.sandbox.path(), open).unwrap();
    let store = user.sandbox.store.display().to_string();
    let fails = |script: &str, argument: &Path| {
        let mut words = stranger.words(NOTHING);
        words.extend([
            python().display().to_string(),
            "-c".into(),
            script.to_owned(),
            argument.display().to_string(),
        ]);
        let output = Command::new(&words[0]).args(&words[1..]).output().unwrap();
        assert!(said(&output).contains("PermissionError"), "{script}: {}", said(&output));
    };
    fails("import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])", &socket);
    fails("import os, sys; os.listdir(sys.argv[1])", &sockets);
    fails("import os, sys; os.listdir(sys.argv[1])", &user.sandbox.store);
    for arguments in [["checkpoint"], ["status"], ["ls"], ["stop"]] {
        let mut command = stranger.command(NOTHING, &arguments);
        command.env("CKPT_STORE", &store);
        let output = command.output().unwrap();
        assert!(!output.status.success() && !said(&output).is_empty(), "{arguments:?}: {}", said(&output));
    }
    assert!(!job.has_ended(), "{}", job.said());
    job.kill_everything();

    // What root has made stays as it is, whatever a user asks for.
    let root = Sandbox::new();
    root.ok(["--", "true"]);
    fs::set_permissions(root.path(), Permissions::from_mode(0o755)).unwrap();
    let before = listing(root.path());
    for arguments in [&["--", "true"][..], &["prune"], &["ls"]] {
        let mut command = stranger.command(NOTHING, arguments);
        command.env("CKPT_STORE", &root.store);
        let output = command.output().unwrap();
        assert!(!output.status.success(), "{arguments:?}: {}", said(&output));
    }
    assert_eq!(before, listing(root.path()));
}
