//! `ckpt-run`: runs a job so that it survives. docs/design.md says how and why, ARCHITECTURE.md where what is.

mod agents;
mod checkpoint;
mod cli;
mod commands;
mod container;
mod criu;
mod files;
mod gpu;
mod job;
mod namespace;
mod observe;
mod persist;
mod report;
mod restore;
mod store;
mod supervise;
mod sys;

use anyhow::Result;
use cli::config::Config;
use cli::{args, logging};
use container::auto::Auto;
use container::pid1;
use namespace::stdio;
use report::failure;
use std::ffi::OsString;

fn main() {
    if std::env::args_os().nth(1).is_some_and(|argument| argument == namespace::INIT_ARGUMENT) {
        namespace::init_main();
    }
    let auto = Auto::take();
    pid1::stand_below_an_init();
    let code = run(std::env::args_os().collect(), auto);
    stdio::restore_terminal();
    std::process::exit(code);
}

fn run(arguments: Vec<OsString>, auto: Auto) -> i32 {
    let matches = match args::command().try_get_matches_from(args::with_run(arguments)) {
        Ok(matches) => matches,
        Err(error) => {
            let _ = error.print();
            return error.exit_code();
        }
    };
    let (name, matches) = matches.subcommand().expect("clap requires a command");
    let otherwise = if name == "run" { sys::error::EXIT_OWN } else { sys::error::EXIT_NEGATIVE };
    let outcome = configure(matches).and_then(|config| commands::perform(name, matches, &config, auto));
    match outcome {
        Ok(code) => code,
        // `ckpt-run ls | head` is no mistake.
        Err(error) if name != "run" && failure::is_closed_output(&error) => 0,
        Err(error) => {
            failure::log_error(&error);
            failure::exit_code(&error, otherwise)
        }
    }
}

fn configure(matches: &clap::ArgMatches) -> Result<Config> {
    let config = Config::resolve(matches, &|name| std::env::var(name).ok())?;
    logging::start(config.verbosity, config.log_format, config.log_file.as_deref())?;
    Ok(config)
}
