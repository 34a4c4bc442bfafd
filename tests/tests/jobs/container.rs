//! The examples of containers: the one of an OCI runtime, run in a root filesystem and namespaces of its own with the
//! capabilities that it names and no more, is killed and stopped and resumes; the one of Kubernetes is valid.

use ckpt_run_tests::{Running, Sandbox, ckpt_run, criu, from_env, train_script, workspace};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A stand-in for a container runtime, as far as config.json of the example needs one.
struct Container {
    config: Value,
    /// Where its root filesystem is mounted until it is entered.
    top: tempfile::TempDir,
    /// Its volume is `data` in here.
    sandbox: Sandbox,
}

fn texts(value: &Value) -> impl Iterator<Item = &str> {
    value.as_array().expect("a list").iter().map(|text| text.as_str().expect("text"))
}

impl Container {
    fn new() -> Self {
        let config = fs::read_to_string(workspace().join("examples/container/config.json")).unwrap();
        let config: Value = serde_json::from_str(&config).expect("JSON");
        let container = Self { config, top: tempfile::tempdir().unwrap(), sandbox: Sandbox::new() };
        fs::create_dir(container.sandbox.path().join("data")).unwrap();
        fs::write(container.sandbox.path().join("enter"), container.enter_script()).unwrap();
        container
    }

    /// Makes the root filesystem, enters it, drops what the configuration does not grant, and becomes the command.
    ///
    /// The image is the root that `cargo xtask test --full` makes, or the programs of this system.
    fn enter_script(&self) -> String {
        let image = from_env("CKPT_TEST_ROOTFS", || "/".into());
        let top = self.top.path().display();
        let mut script = format!("set -eu\numask 022\ntop={top} image={}\n", image.display());
        script += "mount -t tmpfs -o mode=0755 tmpfs \"$top\"\n";
        script += "for path in bin sbin lib lib64; do cp -P \"$image/$path\" \"$top/$path\"; done\n";
        script += "dir() { mkdir -p \"$top$2\"; mount --rbind \"$1\" \"$top$2\"; }\n";
        script += "file() { mkdir -p \"$top${2%/*}\"; : > \"$top$2\"; mount --bind \"$1\" \"$top$2\"; }\n";
        script += "dir \"$image/usr\" /usr\ndir \"$image/etc\" /etc\nmkdir \"$top/old\"\n";
        let criu = criu();
        let criu_dir = criu.parent().and_then(Path::parent).expect("DIR/bin/criu").display().to_string();
        let program = ckpt_run();
        let library = program.with_file_name("libckpt_interpose.so");
        for (from, to) in [
            (program, "/opt/ckpt-run/bin/ckpt-run"),
            (library, "/opt/ckpt-run/lib/libckpt_interpose.so"),
            (train_script(), "/app/train.py"),
        ] {
            let _ = writeln!(script, "file {} {to}", from.display());
        }
        for mount in self.config["mounts"].as_array().unwrap() {
            self.mount(mount, &mut script);
        }
        // After the mounts: it may lie below one of them.
        if criu_dir != "/usr" {
            let _ = writeln!(script, "dir {criu_dir} {criu_dir}");
        }
        if self.config["root"]["readonly"] == true {
            script += "mount -o remount,bind,ro \"$top\"\n";
        }
        script += "cd \"$top\"\npivot_root . old\numount -l /old\n";
        let _ = writeln!(script, "cd {}", self.config["process"]["cwd"].as_str().unwrap());
        script + "exec \"$@\"\n"
    }

    fn mount(&self, mount: &Value, script: &mut String) {
        let text = |name: &str| mount[name].as_str().unwrap();
        let (kind, at) = (text("type"), text("destination"));
        let options: Vec<_> = mount.get("options").map(|all| texts(all).collect()).unwrap_or_default();
        let options = if options.is_empty() { "rw".to_owned() } else { options.join(",") };
        let _ = match kind {
            "bind" => {
                let from = self.sandbox.path().join(text("source"));
                writeln!(script, "dir {} {at}", from.display())
            }
            _ => writeln!(script, "mkdir -p \"$top{at}\"; mount -t {kind} -o {options} {kind} \"$top{at}\""),
        };
        if at == "/dev" {
            // What every runtime puts there.
            for (name, minor) in [("null", 3), ("zero", 5), ("full", 7), ("random", 8), ("urandom", 9)] {
                let _ = writeln!(script, "mknod -m 666 \"$top/dev/{name}\" c 1 {minor}");
            }
            *script += "mknod -m 666 \"$top/dev/tty\" c 5 0\nln -s pts/ptmx \"$top/dev/ptmx\"\n";
            *script += "ln -s /proc/self/fd \"$top/dev/fd\"\n";
        }
    }

    /// What a process of the container gets: rights, and the environment. `but` is left out.
    fn grant(&self, but: &str) -> Vec<String> {
        let process = &self.config["process"];
        let bounding = texts(&process["capabilities"]["bounding"]);
        let names = bounding.map(|name| format!("+{}", name.strip_prefix("CAP_").unwrap().to_lowercase()));
        let bounding = names.fold("-all".to_owned(), |all, name| all + "," + &name);
        let mut words = vec!["setpriv".to_owned(), "--inh-caps".into(), "-all".into()];
        words.extend(["--bounding-set".to_owned(), bounding]);
        if process["noNewPrivileges"] == true {
            words.push("--no-new-privs".into());
        }
        words.extend(["env", "-i"].map(str::to_owned));
        words.extend(texts(&process["env"]).filter(|entry| !entry.starts_with(but)).map(str::to_owned));
        // The example's image has CRIU on the PATH. With one thread the losses do not hang on the machine's CPUs.
        words.extend([format!("CKPT_CRIU={}", criu().display()), "OMP_NUM_THREADS=1".to_owned()]);
        words
    }

    fn command(&self, but: &str, argv: &[String]) -> Command {
        let mut command = Command::new("unshare");
        command.args(["--fork", "--kill-child", "--propagation", "private"]);
        for namespace in self.config["linux"]["namespaces"].as_array().unwrap() {
            command.arg(format!("--{}", namespace["type"].as_str().unwrap()));
        }
        command.arg("/bin/sh").arg(self.sandbox.path().join("enter")).args(self.grant(but)).args(argv);
        command.stdin(std::process::Stdio::null());
        command
    }

    /// The example's command; its steps are slow for as long as the volume has the file `slow`, so that nothing here
    /// is a race with the job's end.
    fn argv(&self) -> Vec<String> {
        let slower = |text: &str| text.replace("--step-ms 20", "--step-ms 200 --slow-while slow");
        texts(&self.config["process"]["args"]).map(slower).collect()
    }

    fn slow(&self) -> PathBuf {
        self.sandbox.path().join("data/slow")
    }

    fn start(&self, name: &str) -> Running {
        // No option of ckpt-run but those in the configuration.
        self.sandbox.start_command(name, self.command("none", &self.argv()))
    }

    /// Something that is brought into the running container.
    fn exec(&self, first: i32, argv: &[&str]) -> String {
        let mut command = Command::new("nsenter");
        command.args(["-t", &first.to_string(), "--mount", "--pid", "--ipc", "--uts", "--root", "--wd"]);
        let output = command.args(self.grant("none")).args(argv).current_dir("/").output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{argv:?}: {said}");
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    fn losses(&self) -> String {
        self.sandbox.read("data/losses.txt")
    }

    fn until_steps(&self, job: &mut Running, steps: usize) {
        job.until("steps of the training", || (self.losses().lines().count() >= steps).then_some(()));
    }
}

/// PID 1 of a running container, as it is seen from here.
fn first(job: &Running) -> i32 {
    job.descendants()[0]
}

#[test]
fn a_killed_and_stopped_container_ends_like_an_unbroken_run() {
    let container = Container::new();
    let steps = || container.losses().lines().count();
    fs::write(container.slow(), "").unwrap();
    let mut job = container.start("first");
    container.until_steps(&mut job, 3);
    let id = container.exec(first(&job), &["ckpt-run", "checkpoint"]);
    container.until_steps(&mut job, steps() + 3);
    kill_process(Pid::from_raw(first(&job)).unwrap(), Signal::KILL).unwrap();
    // The exit status of unshare for a killed child.
    assert!(!job.wait_status().success(), "{}", job.said());
    let at_kill = steps();

    let mut job = container.start("second");
    container.until_steps(&mut job, at_kill + 3);
    assert!(job.said().contains(&format!("resumed from snapshot {id}")), "{}", job.said());
    // As `docker stop`, or a pod's end.
    kill_process(Pid::from_raw(first(&job)).unwrap(), Signal::TERM).unwrap();
    assert_eq!(job.wait(), 75, "{}", job.said());
    assert!(steps() < 300, "it was stopped in the middle");

    fs::remove_file(container.slow()).unwrap();
    let mut job = container.start("third");
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert!(job.said().contains("resumed from snapshot"), "{}", job.said());
    assert!(
        !job.said().contains("losses.txt: rolled back"),
        "nothing was done after the last snapshot: {}",
        job.said()
    );
    let broken = container.losses();
    assert_eq!(broken.lines().count(), 300);

    fs::remove_file(container.sandbox.path().join("data/losses.txt")).unwrap();
    let output = container.command("CKPT_AUTO", &container.argv()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(broken, container.losses());
}

/// The three sets have to be the same: what is permitted and not in the bounding set is lost at the first exec.
#[test]
fn the_examples_capabilities_agree() {
    let config = Container::new().config;
    let sets = &config["process"]["capabilities"];
    let set = |name: &str| {
        let mut names: Vec<_> = texts(&sets[name]).map(|name| name.strip_prefix("CAP_").unwrap()).collect();
        names.sort_unstable();
        names.join(" ")
    };
    assert_eq!(set("bounding"), set("effective"));
    assert_eq!(set("bounding"), set("permitted"));
    let job = kubernetes();
    let security = &job["spec"]["template"]["spec"]["containers"][0]["securityContext"]["capabilities"];
    let mut added: Vec<_> = texts(&security["add"]).collect();
    added.sort_unstable();
    assert_eq!(set("bounding"), added.join(" "));
    let dockerfile = fs::read_to_string(workspace().join("examples/container/Dockerfile")).unwrap();
    for name in [
        "SYS_ADMIN",
        "SYS_PTRACE",
        "CHECKPOINT_RESTORE",
        "NET_ADMIN",
        "SYS_RESOURCE",
        "SYS_TIME",
        "DAC_READ_SEARCH",
    ] {
        assert!(dockerfile.contains(&format!("--cap-add {name}")) && added.contains(&name), "{name}");
    }
}

/// The Python that has the schemas of Kubernetes' API.
fn kubernetes_python() -> PathBuf {
    from_env("CKPT_TEST_KUBERNETES_PYTHON", || workspace().join("target/tools/kubernetes/bin/python3"))
}

fn manifest(name: &str) -> PathBuf {
    workspace().join("examples/kubernetes").join(name)
}

/// The objects of this kind in a manifest.
fn objects(name: &str, kind: &str) -> Vec<Value> {
    let script = "import json, sys, yaml\n\
        print(json.dumps([one for one in yaml.safe_load_all(open(sys.argv[1])) if one['kind'] == sys.argv[2]]))";
    let output =
        Command::new(kubernetes_python()).args(["-c", script]).arg(manifest(name)).arg(kind).output();
    let output = output.expect("call `cargo xtask test`");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// The Job in the example's manifest.
fn kubernetes() -> Value {
    let jobs = objects("job.yaml", "Job");
    assert_eq!(jobs.len(), 1);
    jobs[0].clone()
}

/// The newest API that the schemas know, and the oldest that has all of the fields.
const VERSIONS: [&[&str]; 2] = [&["--strict"], &["--strict", "-k", "1.30"]];

/// Compares a manifest with the schemas.
fn validate(file: &Path, version: &[&str]) -> std::process::Output {
    let mut command = Command::new(kubernetes_python());
    command.args(["-c", "import sys, kubernetes_validate.__main__ as it; sys.exit(it.main())"]);
    command.args(version).arg(file).output().expect("call `cargo xtask test`")
}

/// The capabilities that a container of a pod adds, sorted.
fn added(pod: &Value) -> Vec<String> {
    let security = &pod["containers"][0]["securityContext"]["capabilities"];
    let mut names: Vec<_> = texts(&security["add"]).map(str::to_owned).collect();
    names.sort_unstable();
    names
}

#[test]
fn the_base_of_kubernetes_is_valid_and_has_the_rights_of_the_job() {
    let sandbox = Sandbox::new();
    let rights = added(&kubernetes()["spec"]["template"]["spec"]);
    let mut files = vec![manifest("doctor.yaml")];
    for name in ["jobset.yaml", "jobset-nodes.yaml"] {
        let sets = objects(name, "JobSet");
        let template = &sets[0]["spec"]["replicatedJobs"][0]["template"];
        assert_eq!(added(&template["spec"]["template"]["spec"]), rights, "{name}");
        // The schemas know no JobSet; what it contains is a Job.
        let job = serde_json::json!({
            "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "one"}, "spec": template["spec"],
        });
        files.push(sandbox.path().join(name).with_extension("json"));
        fs::write(files.last().unwrap(), job.to_string()).unwrap();
    }
    for file in files {
        for version in VERSIONS {
            let output = validate(&file, version);
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{}: {said}", file.display());
        }
    }
    let doctor = objects("doctor.yaml", "DaemonSet");
    assert_eq!(added(&doctor[0]["spec"]["template"]["spec"]), rights);
    let base = objects("kustomization.yaml", "Kustomization");
    for name in texts(&base[0]["resources"]) {
        assert!(manifest(name).is_file(), "{name}");
    }
}

/// The command of the set that is one job on several nodes is one that ckpt-run understands. Without the number of its pod it is
/// refused, so nothing is started here.
#[test]
fn the_set_of_nodes_starts_one_job() {
    let sets = objects("jobset-nodes.yaml", "JobSet");
    let (name, job) = (&sets[0]["metadata"]["name"], &sets[0]["spec"]["replicatedJobs"][0]);
    let spec = &job["template"]["spec"];
    let container = &spec["template"]["spec"]["containers"][0];
    let command: Vec<_> = texts(&container["command"]).collect();
    let pods = spec["completions"].as_u64().unwrap();
    assert_eq!((command[0], &spec["parallelism"]), ("ckpt-run", &spec["completions"]));
    // JobSet's name of the first pod, with its default subdomain.
    let first = format!("{0}-{1}-0-0.{0}", name.as_str().unwrap(), job["name"].as_str().unwrap());
    for option in
        [format!("--nodes={pods}"), format!("--coordinator={first}:7070"), format!("--master_addr={first}")]
    {
        assert!(command.contains(&option.as_str()), "{option}: {command:?}");
    }
    let sandbox = Sandbox::new();
    // Also as the comment says.
    let text = fs::read_to_string(manifest("jobset-nodes.yaml")).unwrap();
    assert!(text.contains("`--lost-node=wait`") && spec["backoffLimit"] == 0);
    for more in [&[][..], &["--lost-node=wait"]] {
        let output = sandbox.call(more.iter().chain(&command[1..]));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains("also needs --node-rank\n"), "{said}");
    }
}

#[test]
fn the_job_of_kubernetes_is_valid_and_leaves_time_for_its_last_snapshot() {
    for version in VERSIONS {
        let output = validate(&manifest("job.yaml"), version);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        // It would have said so.
        let sandbox = Sandbox::new();
        let wrong = sandbox.path().join("wrong.yaml");
        let text = fs::read_to_string(manifest("job.yaml")).unwrap();
        fs::write(&wrong, text.replace("terminationGracePeriodSeconds", "terminationGracePeriod")).unwrap();
        assert!(!validate(&wrong, version).status.success());
    }
    let pod = &kubernetes()["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    let variable = |name: &str| {
        let all = container["env"].as_array().unwrap();
        let found = all.iter().find(|one| one["name"] == name).unwrap_or_else(|| panic!("{name}"));
        found["value"].as_str().unwrap().to_owned()
    };
    let limit_s = pod["terminationGracePeriodSeconds"].as_u64().unwrap();
    let grace_s: u64 = variable("CKPT_GRACE").strip_suffix('s').unwrap().parse().unwrap();
    assert!(grace_s + 5 <= limit_s && grace_s * 2 > limit_s, "{grace_s} s of {limit_s} s");
    assert_eq!(variable("CKPT_AUTO"), "1");
    let data =
        container["volumeMounts"].as_array().unwrap().iter().find(|one| one["name"] == "data").unwrap();
    assert_eq!(data["mountPath"], container["workingDir"], "the store is in the working directory");
}
