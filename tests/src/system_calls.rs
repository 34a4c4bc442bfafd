//! Commands whose system calls have faults; see `src/bin/system-call-faults.rs`.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::set_variables;

/// Becomes the command behind it when the tracer has it.
const TRACED: &str = r#"ready=$1 log=$2 tracer=$3 faults=$4
shift 4
( "$tracer" $$ "$ready" "$log" $faults 2>> "$log.err" & )
while ! [ -e "$ready" ]; do sleep 0.01; done
rm "$ready"
exec "$@"
"#;

/// The same command with faults: `SEED AFTER-MS ONE-IN MOST KIND...`. `tracer` is the program `system-call-faults`. Each
/// fault is a line of the file `faults` in `notes`, which must not be the job's directory: it would be a file that changes
/// all the time.
#[must_use]
pub fn traced(inner: &Command, tracer: &str, notes: &Path, faults: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", TRACED, "sh"]).args(["ready", "faults"].map(|name| notes.join(name)));
    command.arg(tracer).arg(faults).arg(inner.get_program()).args(inner.get_args()).stdin(Stdio::null());
    if let Some(directory) = inner.get_current_dir() {
        command.current_dir(directory);
    }
    set_variables(&mut command, inner);
    command
}
