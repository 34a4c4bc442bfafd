//! Completions in bash, as its readline asks for them.

use crate::supervisor::{touch, until_ready};
use ckpt_run_tests::{Sandbox, ckpt_run, python};
use std::process::Command;

/// Prints the candidates for the last of the arguments, which follow the path of the program.
const ASK: &str = r#"
program=$1
shift
PATH="${program%/*}:$PATH"
source <(ckpt-run completions bash)
COMP_WORDS=(ckpt-run "$@")
COMP_CWORD=$#
"$(complete -p ckpt-run | sed 's/.*-F \([^ ]*\) .*/\1/')" ckpt-run "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\n' "${COMPREPLY[@]}"
"#;

/// Waits until there is `go`.
const JOB: &str =
    "import os, time\nopen('ready', 'w').close()\nwhile not os.path.exists('go'): time.sleep(0.02)";

#[test]
fn bash_completes_snapshots_jobs_and_values() {
    let sandbox = Sandbox::new();
    let python = python();
    let mut job = sandbox.start("job", ["--job", "train", "--", python.to_str().unwrap(), "-c", JOB]);
    until_ready(&mut job, &sandbox);
    let ids = [job.checkpoint(&sandbox), job.checkpoint(&sandbox)];
    sandbox.ok(["tag", &ids[0], "best"]);
    let completed = |words: &[&str]| -> Vec<String> {
        let settings = sandbox.command(["ls"]);
        let mut bash = Command::new("bash");
        bash.args(["-c", ASK, "bash"]).arg(ckpt_run()).args(words).current_dir(sandbox.path());
        ckpt_run_tests::set_variables(&mut bash, &settings);
        let output = bash.output().unwrap();
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && err.is_empty(), "{words:?}: {err}");
        String::from_utf8_lossy(&output.stdout).split_whitespace().map(str::to_owned).collect()
    };
    let newest_first = [ids[1].as_str(), ids[0].as_str()];
    assert_eq!(completed(&["show", "0000"]), newest_first);
    assert_eq!(completed(&["rm", &ids[0], "--dry-run", "000002"]), newest_first[..1]);
    assert_eq!(completed(&["--resume", ""]), [&["auto", "never", "required"], &newest_first[..]].concat());
    assert_eq!(completed(&["untag", &ids[0], ""]), ["best"]);
    assert_eq!(completed(&["status", ""]), ["train"]);
    assert_eq!(completed(&["ls", "--job", "t"]), ["train"]);
    assert_eq!(completed(&["--store", "nowhere", "status", "t"]), [""; 0]);
    // What does not depend on the store.
    assert_eq!(completed(&["expl"]), ["explain"]);
    assert_eq!(completed(&["ls", "--js"]), ["--json"]);
    assert_eq!(completed(&["export", "1", "--format", ""]), ["raw", "safetensors", "criu"]);
    assert_eq!(completed(&["--compress", "z"]), ["zstd"]);
    assert_eq!(completed(&["python3", "tr"]), [""; 0], "bash completes files then");
    touch(&sandbox, "go");
    assert_eq!(job.wait(), 0, "{}", job.said());
}
