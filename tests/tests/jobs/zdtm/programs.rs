//! The programs of zdtm, and which of them can be jobs here.

use super::expected::{LEFT_OUT, NAMESPACES_OF_A_JOB};
use ckpt_run_tests::{criu, python};
use procfs_core::FromRead;
use procfs_core::process::Status;
use serde_json::Value;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Prints the descriptors of all programs as JSON. A descriptor is an expression of Python. A source like `x.pb-c.c` is
/// generated, where protoc-c is installed, and no program.
const DESCRIBE: &str = r"
import glob, json, os, sys
os.chdir(sys.argv[1])
found = {}
for source in sorted(glob.glob('static/*.c') + glob.glob('transition/*.c')):
    name = source[:-2]
    if '.' in name:
        continue
    text = open(name + '.desc').read() if os.path.exists(name + '.desc') else ''
    found[name] = eval(text.strip() or '{}')
print(json.dumps(found))
";

/// What this machine may lack.
pub enum Need {
    /// CAP_SYS_RESOURCE, without which CRIU saves no process of another user.
    Resources,
}

impl Need {
    /// Whether it is there.
    pub fn is_met(&self) -> bool {
        const CAP_SYS_RESOURCE: u64 = 24;
        let Self::Resources = self;
        let status = Status::from_file("/proc/self/status").expect("/proc/self/status");
        status.capeff >> CAP_SYS_RESOURCE & 1 == 1
    }
}

/// A program that can be a job.
pub struct Program {
    /// Its path, such as `static/pid00`.
    pub path: String,
    /// The line that starts it.
    pub command: String,
    flags: Vec<String>,
}

impl Program {
    /// The last part of its path.
    pub fn name(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or_default()
    }

    /// Whether its descriptor has this flag.
    pub fn has_flag(&self, flag: &str) -> bool {
        self.flags.iter().any(|one| one == flag)
    }
}

/// The programs of zdtm.
pub struct Programs {
    root: PathBuf,
    known: HashMap<String, Value>,
    /// Those that can be jobs here.
    pub list: Vec<Program>,
    /// Those that could be jobs elsewhere, with what is missing here.
    pub unavailable: Vec<String>,
}

impl Programs {
    /// Finds them in the directory `test/zdtm` of CRIU's sources.
    pub fn find(root: PathBuf) -> Self {
        let described = output(Command::new(python()).args(["-c", DESCRIBE]).arg(&root));
        let known: HashMap<String, Value> = serde_json::from_str(&described).expect("descriptors");
        let mut eligible: Vec<_> =
            known.keys().filter(|path| is_eligible(path, &known[*path])).cloned().collect();
        eligible.sort();
        let mut features = HashMap::new();
        let mut unavailable = Vec::new();
        eligible.retain(|path| {
            let missing = missing(&root, path, &known[path], &mut features);
            unavailable.extend(missing.iter().map(|what| format!("{path} ({what})")));
            missing.is_none()
        });
        let commands = commands(&root, &eligible);
        let program = |path: &String| Program {
            command: commands.get(path).unwrap_or_else(|| panic!("make does not start {path}")).clone(),
            flags: words(&known[path]["flags"]),
            path: path.clone(),
        };
        Self { list: eligible.iter().map(program).collect(), root, known, unavailable }
    }

    /// Whether there is such a program.
    pub fn is_known(&self, path: &str) -> bool {
        self.known.contains_key(path)
    }

    /// The executable file.
    pub fn executable(&self, program: &Program) -> PathBuf {
        self.root.join(&program.path)
    }
}

/// The words of a descriptor's text.
fn words(value: &Value) -> Vec<String> {
    value.as_str().unwrap_or_default().split_whitespace().map(str::to_owned).collect()
}

/// Whether a program can be a job, on a machine that has all that it needs.
fn is_eligible(path: &str, described: &Value) -> bool {
    let (flavours, arch) = (words(&described["flavor"]), words(&described["arch"]));
    let fits =
        flavours.is_empty() || flavours.iter().any(|one| one == "h") || NAMESPACES_OF_A_JOB.contains(&path);
    fits && (arch.is_empty() || arch.iter().any(|one| one == std::env::consts::ARCH))
        && !words(&described["flags"]).iter().any(|flag| flag == "noauto")
        && !LEFT_OUT.iter().any(|(left_out, _)| *left_out == path)
}

/// What a program needs and this machine lacks.
fn missing(
    root: &Path,
    path: &str,
    described: &Value,
    features: &mut HashMap<String, bool>,
) -> Option<String> {
    for feature in words(&described["feature"]) {
        let has = *features.entry(feature.clone()).or_insert_with(|| {
            Command::new(criu()).args(["check", "--feature", &feature]).output().unwrap().status.success()
        });
        if !has {
            return Some(format!("no {feature}"));
        }
    }
    let check = root.join(format!("{path}.checkskip"));
    let skips = check.exists() && !Command::new(&check).current_dir(root).output().unwrap().status.success();
    skips.then(|| "its own check says so".to_owned())
}

/// The commands that start programs, as the makefiles have them.
fn commands(root: &Path, paths: &[String]) -> HashMap<String, String> {
    let mut found = HashMap::new();
    for dir in ["static", "transition"] {
        let names = paths.iter().filter_map(|path| path.strip_prefix(dir)?.strip_prefix('/'));
        let mut make = Command::new("make");
        make.args(["--no-print-directory", "--dry-run", "-C"]).arg(root.join(dir));
        make.args(names.map(|name| format!("{name}.pid")));
        for line in output(&mut make).lines() {
            if let Some((name, _)) = line.strip_prefix("./").and_then(|rest| rest.split_once(' ')) {
                found.insert(format!("{dir}/{name}"), line.to_owned());
            }
        }
    }
    found
}

fn output(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().expect("it runs");
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}
