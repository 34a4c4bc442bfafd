//! The command line.

use crate::cli::config;
use clap::builder::StyledStr;
use clap::{Arg, ArgAction, Command};
use std::ffi::{OsStr, OsString};

const AFTER_HELP: &str = "\
Examples:
  ckpt-run torchrun --nproc_per_node=8 train.py    run a job; run the same again after a crash: it resumes
  ckpt-run --interval 30m -- ./train.sh --big      `--` ends ckpt-run's own options
  ckpt-run checkpoint                              take a snapshot of the running job now
  ckpt-run ls                                      the snapshots that there are
  ckpt-run doctor                                  what this machine has and lacks";

const AFTER_LONG_HELP: &str = "\
Examples:
  ckpt-run torchrun --nproc_per_node=8 train.py    run a job; run the same again after a crash: it resumes
  ckpt-run --interval 30m -- ./train.sh --big      `--` ends ckpt-run's own options
  ckpt-run checkpoint                              take a snapshot of the running job now
  ckpt-run ls                                      the snapshots that there are
  ckpt-run doctor                                  what this machine has and lacks

How it works:
  The command runs unchanged, in a PID namespace of its own. Every --interval its processes are stopped for a moment
  while CRIU copies their memory; they go on while the copy is written to --store and verified. When the job dies, for
  whatever reason, the same ckpt-run command starts it again from its newest whole snapshot: processes, memory, open
  files and connections between its own processes. Files that it was writing are cut back to their length at the
  snapshot (what is cut off is kept in the store). A job that ended with 0 is complete: the next run starts afresh.
  A checkpoint that fails leaves the job running; why is said once, and `ckpt-run status` knows.

Exit codes:
  of run:      the command's own; 128 + n if it died of signal n; 127 if it does not exist, 126 if it cannot be executed;
               75 if it was preempted or stopped: run it again; 2 for bad input and 125 if ckpt-run itself failed
  of others:   0; 1 if the answer is no (damage found, checkpoint failed, something is missing); 2 for bad input";

/// The names of all commands.
pub const COMMANDS: &[&str] = &[
    "run",
    "checkpoint",
    "stop",
    "status",
    "explain",
    "ls",
    "show",
    "verify",
    "tag",
    "untag",
    "pin",
    "unpin",
    "unmark",
    "export",
    "diff",
    "rm",
    "prune",
    "doctor",
    "config",
    "completions",
    "man",
    "help",
];

/// The whole command line.
#[must_use]
pub fn command() -> Command {
    Command::new("ckpt-run")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Makes any training job survive: run it under ckpt-run, and after a crash run the same again")
        .after_help(StyledStr::from(AFTER_HELP))
        .after_long_help(StyledStr::from(AFTER_LONG_HELP))
        .override_usage("ckpt-run [OPTIONS] [--] CMD [ARGS]...\n       ckpt-run [OPTIONS] COMMAND [ARGS]...")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .args(config::args())
        .subcommands(commands())
}

fn commands() -> Vec<Command> {
    let json = || Arg::new("json").long("json").action(ArgAction::SetTrue).help("Print JSON");
    let job = || {
        Arg::new("JOB")
            .help("The job: its name or the beginning of it [default: the only one, or the one that runs]")
    };
    let id = |help: &'static str| Arg::new("ID").help(help);
    vec![
        Command::new("run")
            .about("Run a command, or resume it (the same as naming no command of ckpt-run)")
            .arg(
                Arg::new("CMD")
                    .required(true)
                    .num_args(1..)
                    .trailing_var_arg(true)
                    .allow_hyphen_values(true)
                    .value_parser(clap::value_parser!(OsString))
                    .help("The command and its arguments"),
            ),
        Command::new("checkpoint")
            .about("Take a snapshot of a running job now; prints its ID once it is durable")
            .args([job(), json()]),
        Command::new("stop")
            .about("End a running job with a snapshot; prints its ID. The next run of the same command goes on from it")
            .args([job(), json()]),
        Command::new("status")
            .about("How a job is: running or not, its newest snapshot, failures")
            .args([
                job(),
                Arg::new("watch")
                    .long("watch")
                    .short('w')
                    .action(ArgAction::SetTrue)
                    .conflicts_with("json")
                    .help("Show it on the whole terminal, always up to date"),
                json(),
            ]),
        Command::new("explain").about("What happened to a job, why, and what to do").args([
            job(),
            Arg::new("all").long("all").action(ArgAction::SetTrue).help("All that is known, not only the last"),
            json(),
        ]),
        Command::new("ls").about("List snapshots").args([job(), json()]),
        Command::new("show").about("Everything about one snapshot").args([
            id("The snapshot: its ID, its number, or the beginning of its ID").required(true),
            json(),
        ]),
        Command::new("verify").about("Compare snapshots with their checksums").args([
            id("The snapshot").required_unless_present_any(["all", "scrub"]),
            Arg::new("all")
                .long("all")
                .action(ArgAction::SetTrue)
                .conflicts_with("ID")
                .help("All snapshots in the store"),
            Arg::new("scrub")
                .long("scrub")
                .action(ArgAction::SetTrue)
                .conflicts_with_all(["ID", "all"])
                .help("Everything in the store, whether a snapshot needs it or not"),
            json(),
        ]),
        Command::new("tag").about("Give a snapshot a name; it stays for as long as it has one").args([
            id("The snapshot").required(true),
            Arg::new("TAG").required(true).help("Letters, digits, '.', '_' and '-'"),
        ]),
        Command::new("untag").about("Take a name away from a snapshot").args([
            id("The snapshot").required(true),
            Arg::new("TAG").required(true).help("The name"),
        ]),
        Command::new("pin").about("Keep a snapshot, whatever --keep says").arg(id("The snapshot").required(true)),
        Command::new("unpin").about("Let a snapshot go again").arg(id("The snapshot").required(true)),
        Command::new("unmark")
            .about("Forget that a snapshot could not be restored, so that it is resumed again by itself")
            .arg(id("The snapshot").required(true)),
        Command::new("export").about("Write what a snapshot holds to files for other tools").args([
            id("The snapshot").required(true),
            Arg::new("format")
                .long("format")
                .value_name("FORMAT")
                .value_parser(["raw", "safetensors", "criu"])
                .default_value("raw")
                .help("raw: memory, one file per region. safetensors: device memory, one file per process. criu: CRIU's images"),
            Arg::new("to").long("to").value_name("DIR").help("Where to [default: ./ID]"),
        ]),
        Command::new("diff").about("Say what changed from one snapshot to another").args([
            id("The one").required(true),
            Arg::new("OTHER").required(true).help("The other"),
            json(),
        ]),
        Command::new("rm").about("Remove a snapshot").arg(id("The snapshot").required(true)),
        Command::new("prune").about("Remove all but the newest --keep snapshots of each job").args([
            job(),
            Arg::new("dry-run").long("dry-run").action(ArgAction::SetTrue).help("Only say which"),
            json(),
        ]),
        Command::new("doctor").about("Say what this machine has and lacks for checkpoints").arg(json()),
        Command::new("config").about("Show the effective options and where each comes from").arg(json()),
        Command::new("completions").about("Print completions for a shell").arg(
            Arg::new("SHELL")
                .required(true)
                .value_parser(clap::value_parser!(clap_complete::Shell))
                .help("The shell"),
        ),
        Command::new("man").about("Print the manual page"),
    ]
}

/// Puts `run` before a command line that names no command of ours: `ckpt-run --store X python train.py`.
#[must_use]
pub fn with_run(arguments: Vec<OsString>) -> Vec<OsString> {
    let takes_value = |flag: &str| {
        let command = command();
        let by_name = |arg: &Arg| {
            arg.get_long().is_some_and(|long| flag == format!("--{long}"))
                || arg.get_short().is_some_and(|short| flag == format!("-{short}"))
        };
        command.get_arguments().any(|arg| by_name(arg) && matches!(arg.get_action(), ArgAction::Set))
    };
    let mut at = 1;
    while let Some(argument) = arguments.get(at).map(OsString::as_os_str) {
        let text = argument.to_str().unwrap_or("");
        if text == "--" || !text.starts_with('-') || text == "-" {
            break;
        }
        at += if takes_value(text) { 2 } else { 1 };
    }
    let named = |argument: &OsStr| COMMANDS.iter().any(|command| OsStr::new(command) == argument);
    let mut arguments = arguments;
    match arguments.get(at) {
        Some(argument) if !named(argument) => arguments.insert(at, OsString::from("run")),
        _ => {}
    }
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(arguments: &[&str]) -> Vec<String> {
        let arguments = std::iter::once(&"ckpt-run").chain(arguments).map(OsString::from).collect();
        with_run(arguments).into_iter().skip(1).map(|argument| argument.into_string().unwrap()).collect()
    }

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
        let names: Vec<_> = commands().iter().map(|command| command.get_name().to_owned()).collect();
        assert!(names.iter().all(|name| COMMANDS.contains(&name.as_str())));
    }

    #[test]
    fn run_is_the_default() {
        assert_eq!(put(&["python", "a.py", "--x"]), ["run", "python", "a.py", "--x"]);
        assert_eq!(put(&["--store", "d", "python"]), ["--store", "d", "run", "python"]);
        assert_eq!(
            put(&["-s", "ls", "-v", "--keep=3", "python"]),
            ["-s", "ls", "-v", "--keep=3", "run", "python"]
        );
        assert_eq!(put(&["--", "ls", "-l"]), ["run", "--", "ls", "-l"]);
        assert_eq!(put(&["ls", "--json"]), ["ls", "--json"]);
        assert_eq!(put(&["--help"]), ["--help"]);
    }

    #[test]
    fn the_job_keeps_its_own_options() {
        let arguments =
            put(&["--store", "d", "torchrun", "--nproc_per_node=2", "-v", "--store", "x", "--", "y"]);
        let matches =
            command().try_get_matches_from(std::iter::once("ckpt-run".to_owned()).chain(arguments)).unwrap();
        let (name, sub) = matches.subcommand().unwrap();
        assert_eq!(name, "run");
        let given: Vec<_> =
            sub.get_many::<OsString>("CMD").unwrap().map(|part| part.to_str().unwrap()).collect();
        assert_eq!(given, ["torchrun", "--nproc_per_node=2", "-v", "--store", "x", "--", "y"]);
        assert_eq!(sub.get_one::<String>("store").unwrap(), "d");
        assert_eq!(sub.get_count("verbose"), 0);
    }
}
