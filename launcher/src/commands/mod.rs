//! The commands other than `run`.

pub mod completions;
pub mod demo;
mod diff;
mod docs;
mod doctor;
mod explain;
mod export;
mod job_files;
mod jobs;
mod logs;
mod marks;
mod memory_map;
mod parts;
mod print;
mod prune;
mod remove;
mod report;
mod scrub;
mod snapshots;
mod watch;

use crate::cli::args::Command;
use crate::cli::config::Config;
use crate::cli::man;
use crate::container::auto::{self, Auto};
use crate::supervise;
use crate::sys::deadline::{RECORD_STALL_TIMEOUT, STORE_LOOK_RETRY_TIMEOUT};
use anyhow::Result;
use ckpt_object_medium::Retry;
use ckpt_snapshot::Marks;
use std::io;
use std::sync::Arc;

/// Whether a command only reads records and manifests. It shows what there is on this machine without waiting long for
/// an object store.
fn only_reads(command: &Command) -> bool {
    use Command::{Diff, Doctor, Explain, Logs, Ls, Report, Show, Status};
    matches!(command, Diff(_) | Doctor(_) | Explain(_) | Logs(_) | Ls(_) | Report(_) | Show(_) | Status(_))
}

/// How long such a command asks an object store.
fn retry_of_reader(command: &Command) -> Retry {
    // What is watched for hours is asked again.
    let is_watching = matches!(command, Command::Status(args) if args.watch);
    Retry {
        give_up_after: STORE_LOOK_RETRY_TIMEOUT,
        stall: RECORD_STALL_TIMEOUT,
        has_given_up: (!is_watching).then(Arc::default),
        ..Retry::default()
    }
}

/// Performs a command and returns its exit code.
///
/// # Errors
/// The failure, for stderr; its type decides the exit code.
pub fn perform(command: Command, config: &Config, auto: Auto) -> Result<i32> {
    let mut config = config.clone();
    if only_reads(&command) {
        config.store.retry = retry_of_reader(&command);
    }
    let config = &config;
    match command {
        Command::Run(args) => {
            let found = supervise::with_nodes(config)?;
            let config = found.as_ref().unwrap_or(config);
            if auto == Auto::IfPossible {
                auto::run_plain_where_needed(config, &args.argv);
            }
            supervise::run(config, &args.argv)
        }
        Command::Checkpoint(args) => jobs::checkpoint(config, args.job.name(), args.output.json),
        Command::Stop(args) => jobs::stop(config, &args),
        Command::Status(args) if args.watch => watch::watch(config, args.job.name()),
        Command::Status(args) => jobs::status(config, args.job.name(), args.output.json),
        Command::Ps(output) => jobs::running(output.json),
        Command::Explain(args) => explain::explain(config, args.job.name(), args.all, args.output.json),
        Command::Logs(args) => logs::logs(config, args.job.name(), args.output.json),
        Command::Report(args) => {
            report::report(config, args.job.name(), args.output.json, args.to.as_deref())
        }
        Command::Ls(args) => snapshots::list(config, args.job.name(), args.output.json),
        Command::Show(args) => snapshots::show(config, &args.snapshot.id, args.output.json),
        Command::Verify(args) if args.scrub => {
            scrub::scrub(config, args.tier, args.read_data_subset, args.output.json)
        }
        Command::Verify(args) => snapshots::verify(config, args.id.as_deref(), args.tier, args.output.json),
        Command::Repair(args) => scrub::repair(config, args.adopt_records, args.output.json),
        Command::Tag(args) => marks::tag(config, &args.snapshot.id, &args.tag),
        Command::Untag(args) => marks::untag(config, &args.snapshot.id, &args.tag),
        Command::Pin(args) => marks::pin(config, &args.id),
        Command::Unpin(args) => marks::unpin(config, &args.snapshot.id, args.all_machines),
        Command::Unmark(args) => marks::change(config, &args.id, Marks::restore_worked),
        Command::Export(args) => export::export(config, &args.snapshot.id, args.format, args.to),
        Command::Diff(args) => diff::diff(config, &args.from, &args.to, args.output.json),
        Command::Rm(args) => remove::remove(config, &args),
        Command::Prune(args) => prune::prune(config, args.job.name(), args.dry_run, args.output.json),
        Command::Demo(args) => demo::demo(config, &args),
        Command::Doctor(output) => doctor::doctor(config, output.json),
        Command::Config(output) => show_config(config, output.json),
        Command::Docs(args) => docs::docs(args.page.as_deref()),
        Command::Completions(args) => {
            completions::script(args.shell, &mut io::stdout())?;
            Ok(0)
        }
        Command::Man => {
            man::write(&mut io::stdout())?;
            Ok(0)
        }
    }
}

fn show_config(config: &Config, json: bool) -> Result<i32> {
    if json {
        return print::json(&config.resolved);
    }
    let rows = config.resolved.iter().map(|one| {
        let value = if one.value.is_empty() { "-" } else { &one.value };
        let found = one.found.as_ref().map(|found| format!(" ({found})")).unwrap_or_default();
        vec![one.name.to_owned(), format!("{value}{found}"), one.origin.to_string()]
    });
    print::table(&["OPTION", "VALUE", "FROM"], rows.collect())
}
