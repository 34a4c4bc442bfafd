//! The command line.

use crate::cli::settings;
use crate::store::tiers;
use clap::builder::StyledStr;
use clap::{ArgAction, Args, Subcommand, ValueEnum};
use std::ffi::OsString;
use std::path::PathBuf;

/// Examples.
pub(super) const EXAMPLES: &str = "\
  ckpt-run torchrun --nproc_per_node=8 train.py    run a job; after a crash, the same command resumes it
  ckpt-run --interval 30m -- ./train.sh --big      `--` ends the options of ckpt-run
  ckpt-run checkpoint                              take a snapshot of the running job now
  ckpt-run ls                                      list the snapshots
  ckpt-run doctor                                  check what this machine supports
  ckpt-run demo                                    see a small job survive a kill";

/// How it works.
pub(super) const HOW_IT_WORKS: &str = "\
  The command runs unchanged in its own PID namespace. Every --interval, ckpt-run pauses its processes while CRIU copies
  their memory. The processes then continue, and the copy is written to --store and verified. When the job dies, for
  whatever reason, the same ckpt-run command restarts it from the newest valid snapshot: processes, memory, open files,
  and connections between its own processes. Files that the job was writing are truncated to their length at the
  snapshot; the removed tails are kept in the store. A job that exits with 0 is complete: the next run starts from the
  beginning. A failed checkpoint does not stop the job: the reason is logged once, and `ckpt-run status` shows it.";

/// The exit codes.
pub(super) const EXIT_CODES: &str = "\
  of run:      the exit code of the command; 128 + n if signal n killed it; 127 if the command does not exist, 126 if it
               cannot be executed; 75 if the job was preempted or stopped (run the same command again to resume it);
               2 for bad input; 125 if ckpt-run itself failed
  of others:   0 for success; 1 for failure (damage found, checkpoint failed, something is missing); 2 for bad input";

/// A command of ckpt-run, with its arguments. The doc comments are the help.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a command, or resume it (the default when no command of ckpt-run is named)
    Run(RunArgs),
    /// Take a snapshot of a running job now, and print its ID once it is stored
    Checkpoint(JobArgs),
    /// Stop a running job with a final snapshot, and print its ID. The next run of the same command resumes from it
    Stop(StopArgs),
    /// Show the state of a job: whether it is running, its newest snapshot, its failures
    Status(StatusArgs),
    /// List the running jobs of this user on this machine, in whatever store
    Ps(JsonArgs),
    /// Explain what happened to a job, why, and what to do
    Explain(ExplainArgs),
    /// Show the last output of each session of a job, from its start or resume to its end, and the paths of its log files
    Logs(JobArgs),
    /// Show what a job's time went into, as a web page with -o
    Report(ReportArgs),
    /// List snapshots
    Ls(JobArgs),
    /// Show the details of a snapshot
    Show(ShowArgs),
    /// Verify the checksums of snapshots
    Verify(VerifyArgs),
    /// Write lost or damaged indexes of packs again
    Repair(RepairArgs),
    /// Tag a snapshot. A snapshot with a tag is never pruned
    Tag(TagArgs),
    /// Remove a tag from a snapshot
    Untag(TagArgs),
    /// Keep a snapshot regardless of --keep
    Pin(SnapshotArgs),
    /// Let --keep apply to a snapshot again
    Unpin(UnpinArgs),
    /// Clear the failed restores of a snapshot, so that a resume may choose it again
    Unmark(SnapshotArgs),
    /// Write the content of a snapshot to files for other tools
    Export(ExportArgs),
    /// Show what changed between two snapshots
    Diff(DiffArgs),
    /// Delete snapshots, or complete jobs. What is pinned, tagged or the last of an unfinished job only with --force
    Rm(RmArgs),
    /// Delete all but the newest --keep snapshots of each job
    Prune(PruneArgs),
    /// Show on this machine that a job survives: a small job is checkpointed, killed and resumed
    Demo(DemoArgs),
    /// Check what this machine supports and what is missing
    Doctor(JsonArgs),
    /// Show the effective options and where each comes from
    Config(JsonArgs),
    /// Print a page of the documentation
    Docs(DocsArgs),
    /// Print completions for a shell
    Completions(CompletionsArgs),
    /// Print the manual page
    Man,
}

/// Arguments of `run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// The command and its arguments
    #[arg(id = "CMD", required = true, num_args = 1.., trailing_var_arg = true, allow_hyphen_values = true)]
    pub argv: Vec<OsString>,
}

/// The job that a command is about.
#[derive(Debug, Args)]
pub struct JobName {
    /// The job: its name or a prefix of it [default: the only job, or the running one]
    #[arg(id = "JOB")]
    name: Option<String>,
}

impl JobName {
    /// The name or prefix that was given.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }
}

/// How a command prints its result.
#[derive(Debug, Args)]
pub struct JsonArgs {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of commands about a job.
#[derive(Debug, Args)]
pub struct JobArgs {
    /// The job.
    #[command(flatten)]
    pub job: JobName,
    /// How to print.
    #[command(flatten)]
    pub output: JsonArgs,
}

/// Arguments of `stop`.
#[derive(Debug, Args)]
pub struct StopArgs {
    /// The job.
    #[command(flatten)]
    pub job: JobName,
    /// End the job even if it cannot be saved: it gets SIGTERM, and SIGKILL after --grace
    #[arg(long)]
    pub force: bool,
    /// How to print.
    #[command(flatten)]
    pub output: JsonArgs,
}

/// Arguments of `status`.
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// The job.
    #[command(flatten)]
    pub job: JobName,
    /// Show the state on the whole terminal, and keep it up to date
    #[arg(long, short, conflicts_with = "json")]
    pub watch: bool,
    /// How to print.
    #[command(flatten)]
    pub output: JsonArgs,
}

/// Arguments of `explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// The job.
    #[command(flatten)]
    pub job: JobName,
    /// Show the whole journal, not only the latest entries
    #[arg(long)]
    pub all: bool,
    /// How to print.
    #[command(flatten)]
    pub output: JsonArgs,
}

/// Arguments of `report`.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// The job.
    #[command(flatten)]
    pub job: JobName,
    /// Write the report to this file, as a web page (as JSON with --json); `-` is the standard output
    #[arg(long = "output", short = 'o', value_name = "FILE")]
    pub to: Option<PathBuf>,
    /// How to print.
    #[command(flatten)]
    pub output: JsonArgs,
}

/// The snapshot that a command is about.
#[derive(Debug, Args)]
pub struct SnapshotArgs {
    /// The snapshot: its ID, its number, a prefix of its ID, or a tag
    #[arg(id = "ID")]
    pub id: String,
}

/// Arguments of `unpin`.
#[derive(Debug, Args)]
pub struct UnpinArgs {
    /// The snapshot.
    #[command(flatten)]
    pub snapshot: SnapshotArgs,
    /// Delete the pins and tags of all machines in the object store, for machines that are gone
    #[arg(long)]
    pub all_machines: bool,
}

/// Arguments of `rm`.
#[derive(Debug, Args)]
pub struct RmArgs {
    /// The snapshots: their IDs, numbers, prefixes of their IDs, or tags
    #[arg(id = "ID", required_unless_present = "whole-job", conflicts_with = "whole-job")]
    pub ids: Vec<String>,
    /// Delete all of a job that is complete: its snapshots, record, journal, logs and kept files
    #[arg(long = "whole-job", id = "whole-job", value_name = "JOB")]
    pub whole_jobs: Vec<String>,
    /// Also what is pinned or tagged, and the last snapshot of an unfinished job
    #[arg(long)]
    pub force: bool,
    /// Only print what would be deleted
    #[arg(long)]
    pub dry_run: bool,
}

/// Arguments of `show`.
#[derive(Debug, Args)]
pub struct ShowArgs {
    /// The snapshot.
    #[command(flatten)]
    pub snapshot: SnapshotArgs,
    /// How to print.
    #[command(flatten)]
    pub output: JsonArgs,
}

/// Arguments of `verify`.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// The snapshot
    #[arg(id = "ID", required_unless_present_any = ["all", "scrub"])]
    pub id: Option<String>,
    /// Verify all snapshots in the store
    #[arg(long, conflicts_with = "ID")]
    pub all: bool,
    /// Verify everything in the store, whether a snapshot needs it or not
    #[arg(long, conflicts_with_all = ["ID", "all"])]
    pub scrub: bool,
    /// Only in this tier
    #[arg(long, value_name = "TIER")]
    pub tier: Option<TierName>,
    /// With --scrub: read a random part of the packs' content, such as 5%. All else is checked
    #[arg(long, value_name = "SHARE", requires = "scrub", conflicts_with_all = ["ID", "all"], value_parser = share, default_value = "100%")]
    pub read_data_subset: f64,
    /// How to print.
    #[command(flatten)]
    pub output: JsonArgs,
}

/// Arguments of `repair`.
#[derive(Debug, Args)]
pub struct RepairArgs {
    /// Sign the job's records that an older ckpt-run has written without the key. Only if nobody else can have written
    /// to the store: their content is taken as it is
    #[arg(long)]
    pub adopt_records: bool,
    /// How to print.
    #[command(flatten)]
    pub output: JsonArgs,
}

/// A tier of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TierName {
    /// The store on disk
    Disk,
    /// The object store: --upload, or --store with an address
    Remote,
}

impl TierName {
    /// Whether snapshots in the store's tier of this name are meant.
    #[must_use]
    pub fn has(self, name: &str) -> bool {
        (self == Self::Remote) == (name == tiers::REMOTE)
    }

    /// Why there is nothing to verify in this tier.
    #[must_use]
    pub fn missing(self) -> &'static str {
        if self == Self::Remote {
            "no job here has an object store: name it with --upload URL, or with --store URL"
        } else {
            "the jobs are in an object store alone: leave out --tier"
        }
    }
}

/// A percentage above 0 and up to 100, as a fraction of 1.
fn share(text: &str) -> Result<f64, String> {
    let percent = text.strip_suffix('%').and_then(|number| number.parse::<f64>().ok());
    let percent = percent.filter(|percent| *percent > 0.0 && *percent <= 100.0);
    percent.map(|percent| percent / 100.0).ok_or_else(|| "use a percentage from above 0% to 100%".to_owned())
}

/// Arguments of `tag` and `untag`.
#[derive(Debug, Args)]
pub struct TagArgs {
    /// The snapshot.
    #[command(flatten)]
    pub snapshot: SnapshotArgs,
    /// The tag: letters, digits, '.', '_' and '-'
    #[arg(id = "TAG")]
    pub tag: String,
}

/// What `export` writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ExportFormat {
    /// Memory, one file per region
    Raw,
    /// Device memory, one file per process
    Safetensors,
    /// The images of CRIU
    Criu,
}

/// Arguments of `export`.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// The snapshot.
    #[command(flatten)]
    pub snapshot: SnapshotArgs,
    /// What to write
    #[arg(long, value_enum, default_value_t = ExportFormat::Raw)]
    pub format: ExportFormat,
    /// The directory to write to [default: ./ID]
    #[arg(long, value_name = "DIR")]
    pub to: Option<PathBuf>,
}

/// Arguments of `diff`.
#[derive(Debug, Args)]
pub struct DiffArgs {
    /// The older snapshot
    #[arg(id = "ID")]
    pub from: String,
    /// The newer snapshot
    #[arg(id = "OTHER")]
    pub to: String,
    /// How to print.
    #[command(flatten)]
    pub output: JsonArgs,
}

/// Arguments of `prune`.
#[derive(Debug, Args)]
pub struct PruneArgs {
    /// The job.
    #[command(flatten)]
    pub job: JobName,
    /// Show what would be deleted, and delete nothing
    #[arg(long)]
    pub dry_run: bool,
    /// How to print.
    #[command(flatten)]
    pub output: JsonArgs,
}

/// Arguments of `demo`.
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Run the built-in job even if there is a Python with PyTorch
    #[arg(long)]
    pub plain: bool,
}

/// Arguments of `docs`.
#[derive(Debug, Args)]
pub struct DocsArgs {
    /// The page, such as `limits` [default: the list of pages]
    #[arg(id = "PAGE")]
    pub page: Option<String>,
}

/// Arguments of `completions`.
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell
    #[arg(id = "SHELL")]
    pub shell: clap_complete::Shell,
}

/// The whole command line.
#[must_use]
pub fn command() -> clap::Command {
    // The enum's doc comment would replace an `about` that is set before.
    let mut command = Command::augment_subcommands(clap::Command::new("ckpt-run").args(settings::args()))
        .version(env!("CARGO_PKG_VERSION"))
        .about("Makes any training job survive crashes: run it under ckpt-run, and resume it with the same command")
        .after_help(StyledStr::from(format!("Examples:\n{EXAMPLES}")))
        .after_long_help(StyledStr::from(format!(
            "Examples:\n{EXAMPLES}\n\nHow it works:\n{HOW_IT_WORKS}\n\nExit codes:\n{EXIT_CODES}"
        )))
        .override_usage("ckpt-run [OPTIONS] [--] CMD [ARGS]...\n       ckpt-run [OPTIONS] COMMAND [ARGS]...")
        .subcommand_required(true)
        .arg_required_else_help(true);
    // Gives each command the global options; all but `run` show in their short help only those that concern them.
    command.build();
    let names: Vec<_> = command.get_subcommands().map(|ours| ours.get_name().to_owned()).collect();
    for name in names.iter().filter(|name| !["run", "help"].contains(&name.as_str())) {
        command = command.mut_subcommand(name, |ours| with_own_options(ours, name));
    }
    command
}

/// Hides options of `run` in the short help of another command.
fn with_own_options(command: clap::Command, name: &str) -> clap::Command {
    let of_prune: &[_] = if name == "prune" { &["keep", "keep-every"] } else { &[] };
    let concerns = |option: &str| OF_ALL.contains(&option) || of_prune.contains(&option);
    command
        .mut_args(|arg| {
            let is_hidden = arg.is_global_set() && !concerns(arg.get_id().as_str());
            arg.hide_short_help(is_hidden)
        })
        .after_help("`--help` shows all options.")
        .after_long_help(StyledStr::new())
}

/// Options that concern all commands.
const OF_ALL: [&str; 5] = ["store", "job", "encrypt-key-file", "verbose", "quiet"];

/// Inserts `run` into a command line that names no command of ours: `ckpt-run --store X python train.py`.
#[must_use]
pub fn with_run(mut arguments: Vec<OsString>) -> Vec<OsString> {
    let mut command = command();
    // Adds the command `help`.
    command.build();
    let takes_value = |flag: &str| {
        command.get_arguments().filter(|arg| matches!(arg.get_action(), ArgAction::Set)).any(|arg| {
            arg.get_long().is_some_and(|long| flag.strip_prefix("--") == Some(long))
                || arg.get_short().is_some_and(|short| flag == format!("-{short}"))
        })
    };
    let mut at = 1;
    while let Some(text) = arguments.get(at).map(|argument| argument.to_str().unwrap_or("")) {
        if text == "--" || !text.starts_with('-') || text == "-" {
            break;
        }
        at += if takes_value(text) { 2 } else { 1 };
    }
    let is_ours = |argument: &OsString| command.get_subcommands().any(|ours| argument == ours.get_name());
    if arguments.get(at).is_some_and(|argument| !is_ours(argument)) {
        arguments.insert(at, OsString::from("run"));
    }
    arguments
}

/// The command of ours whose name is most similar to a mistyped `name`.
#[must_use]
pub fn similar_command(name: &str) -> Option<String> {
    let command = command();
    similar(name, command.get_subcommands().map(clap::Command::get_name)).map(str::to_owned)
}

/// The candidate that is most similar to a mistyped `text`, if one is similar enough. The same measure as clap's.
#[must_use]
pub fn similar<'a>(text: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    const THRESHOLD: f64 = 0.8;
    let scored = candidates.map(|candidate| (strsim::jaro(text, candidate), candidate));
    let best = scored.max_by(|one, other| one.0.total_cmp(&other.0));
    best.filter(|(score, _)| *score >= THRESHOLD).map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::FromArgMatches;

    fn put(arguments: &[&str]) -> Vec<String> {
        let arguments = std::iter::once(&"ckpt-run").chain(arguments).map(OsString::from).collect();
        with_run(arguments).into_iter().skip(1).map(|argument| argument.into_string().unwrap()).collect()
    }

    fn matches(arguments: &[&str]) -> Result<clap::ArgMatches, clap::Error> {
        command().try_get_matches_from(std::iter::once("ckpt-run".to_owned()).chain(put(arguments)))
    }

    fn parse(arguments: &[&str]) -> Command {
        Command::from_arg_matches(&matches(arguments).unwrap()).unwrap()
    }

    #[test]
    fn every_output_has_a_schema() {
        let command = command();
        let prints_json =
            |command: &&clap::Command| command.get_arguments().any(|one| one.get_id() == "json");
        let mut commands: Vec<_> =
            command.get_subcommands().filter(prints_json).map(clap::Command::get_name).collect();
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/schemas");
        let names =
            std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut schemas: Vec<_> = names.map(|name| name.trim_end_matches(".json").to_owned()).collect();
        commands.sort_unstable();
        schemas.sort_unstable();
        assert_eq!(schemas, commands);
    }

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
        let about = |command: &clap::Command| command.get_about().unwrap().to_string();
        assert!(about(&command()).starts_with("Makes any training job survive crashes"));
        // Not the doc comments of the types.
        for ours in command().get_subcommands() {
            let about = about(ours);
            assert!(!about.starts_with("Arguments of") && !about.contains(" command is about"), "{about}");
        }
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
        assert_eq!(put(&["help", "ls"]), ["help", "ls"]);
        assert_eq!(put(&["--help"]), ["--help"]);
    }

    #[test]
    fn the_job_keeps_its_own_options() {
        let arguments = ["--store", "d", "torchrun", "--nproc_per_node=2", "-v", "--store", "x", "--", "y"];
        let Command::Run(run) = parse(&arguments) else { panic!("not run") };
        assert_eq!(run.argv, ["torchrun", "--nproc_per_node=2", "-v", "--store", "x", "--", "y"]);
        let matches = matches(&arguments).unwrap();
        let (name, sub) = matches.subcommand().unwrap();
        assert_eq!(name, "run");
        assert_eq!(sub.get_one::<String>("store").unwrap(), "d");
        assert_eq!(sub.get_count("verbose"), 0);
    }

    #[test]
    fn options_may_follow_a_command() {
        let arguments = ["status", "train", "--json", "--store", "d", "--job", "other"];
        let Command::Status(status) = parse(&arguments) else { panic!("not status") };
        assert_eq!(status.job.name(), Some("train"));
        assert!(status.output.json && !status.watch);
        let matches = matches(&arguments).unwrap();
        let (_, sub) = matches.subcommand().unwrap();
        assert_eq!(sub.get_one::<String>("job").unwrap(), "other", "the option, not the argument");
        let Command::Export(export) = parse(&["export", "7", "--to", "d"]) else { panic!("not export") };
        assert_eq!((export.format, export.to), (ExportFormat::Raw, Some("d".into())));
        let Command::Verify(verify) = parse(&["verify", "--scrub"]) else { panic!("not verify") };
        assert!(verify.scrub && verify.id.is_none());
        for bad in [&["verify"][..], &["verify", "7", "--all"], &["status", "--watch", "--json"], &["show"]] {
            command().try_get_matches_from(std::iter::once(&"ckpt-run").chain(bad)).unwrap_err();
        }
    }

    #[test]
    fn the_short_help_of_a_command_is_its_own() {
        let help = |arguments: &[&str]| matches(arguments).unwrap_err().to_string();
        let short = help(&["status", "-h"]);
        assert!(
            short.contains("--watch") && short.contains("--store") && !short.contains("--grace"),
            "{short}"
        );
        assert!(help(&["prune", "-h"]).contains("--keep"));
        assert!(help(&["run", "-h"]).contains("--grace") && help(&["status", "--help"]).contains("--grace"));
    }

    #[test]
    fn typos_are_answered_with_what_is_similar() {
        let error = matches(&["--intervall", "3m", "python"]).unwrap_err().to_string();
        assert!(error.contains("'--interval'"), "{error}");
        assert_eq!(similar_command("chekpoint").as_deref(), Some("checkpoint"));
        assert_eq!(similar_command("statsu").as_deref(), Some("status"));
        for program in ["python3", "torchrun", "nosuchcommand", ""] {
            assert_eq!(similar_command(program), None, "{program}");
        }
    }
}
