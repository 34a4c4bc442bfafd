//! The commands besides `run`.

mod diff;
mod doctor;
mod explain;
mod export;
mod jobs;
mod marks;
mod memory_map;
mod print;
mod scrub;
mod snapshots;
mod watch;

use crate::cli::args;
use crate::cli::config::Config;
use crate::container::auto::{self, Auto};
use crate::supervise;
use anyhow::{Context, Result};
use ckpt_snapshot::Marks;
use clap::ArgMatches;
use std::ffi::OsString;

/// Performs the command `name`; returns its exit code.
///
/// # Errors
/// What went wrong, for stderr; the kind of error decides the exit code.
pub fn perform(name: &str, matches: &ArgMatches, config: &Config, auto: Auto) -> Result<i32> {
    let flag = |name: &str| matches.try_get_one::<bool>(name).ok().flatten().copied().unwrap_or(false);
    let text = |name: &str| matches.try_get_one::<String>(name).ok().flatten().map(String::as_str);
    let json = flag("json");
    let id = text("ID").unwrap_or_default();
    match name {
        "run" => {
            let argv: Vec<OsString> = matches.get_many("CMD").into_iter().flatten().cloned().collect();
            if auto == Auto::IfPossible {
                auto::run_plain_where_needed(config, &argv);
            }
            supervise::run(config, &argv)
        }
        "checkpoint" => jobs::checkpoint(config, text("JOB"), json),
        "stop" => jobs::stop(config, text("JOB"), json),
        "status" if flag("watch") => watch::watch(config, text("JOB")),
        "status" => jobs::status(config, text("JOB"), json),
        "explain" => explain::explain(config, text("JOB"), flag("all"), json),
        "ls" => snapshots::list(config, text("JOB"), json),
        "show" => snapshots::show(config, id, json),
        "verify" if flag("scrub") => scrub::scrub(config, json),
        "verify" => snapshots::verify(config, text("ID"), json),
        "tag" => marks::tag(config, id, text("TAG").unwrap_or_default()),
        "untag" => marks::untag(config, id, text("TAG").unwrap_or_default()),
        "pin" => marks::change(config, id, Marks::pin),
        "unpin" => marks::change(config, id, Marks::unpin),
        "unmark" => marks::change(config, id, Marks::restore_worked),
        "export" => export::export(config, id, text("format").unwrap_or_default(), text("to")),
        "diff" => diff::diff(config, id, text("OTHER").unwrap_or_default(), json),
        "rm" => snapshots::remove(config, id),
        "prune" => snapshots::prune(config, text("JOB"), flag("dry-run"), json),
        "doctor" => doctor::doctor(config, json),
        "config" => show_config(config, json),
        "completions" => {
            let shell = *matches.get_one::<clap_complete::Shell>("SHELL").context("no shell")?;
            clap_complete::generate(shell, &mut args::command(), "ckpt-run", &mut std::io::stdout());
            Ok(0)
        }
        _ => {
            clap_mangen::Man::new(args::command()).render(&mut std::io::stdout())?;
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
