//! `ckpt-run`: runs a job so that it survives. docs/design.md says how and why, ARCHITECTURE.md where what is.

mod agents;
mod auto;
mod background;
mod checkpoint;
mod cli;
mod commands;
mod config;
mod control_server;
mod copier;
mod criu;
mod decide;
mod descriptor_limit;
mod device_memory;
mod diagnose;
mod directories;
mod dump;
mod failure;
mod handover;
mod host;
#[cfg(feature = "faults")]
mod injected;
mod interpose;
mod journal;
mod links;
mod loading;
mod logging;
mod metrics;
mod namespace;
mod ownership;
mod persist;
mod pid1;
mod preloadable;
mod privileges;
mod progress;
mod regions;
mod restore;
mod rollback;
mod root;
mod runtime_dir;
mod saved;
mod secrets;
mod sources;
mod staging;
mod status;
mod stdio;
mod stores;
mod supervise;
mod upload;

use anyhow::Result;
use auto::Auto;
use config::Config;
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
    let matches = match cli::command().try_get_matches_from(cli::with_run(arguments)) {
        Ok(matches) => matches,
        Err(error) => {
            let _ = error.print();
            return error.exit_code();
        }
    };
    let (name, matches) = matches.subcommand().expect("clap requires a command");
    let otherwise = if name == "run" { failure::EXIT_OWN } else { failure::EXIT_NEGATIVE };
    let outcome = configure(matches).and_then(|config| commands::perform(name, matches, &config, auto));
    match outcome {
        Ok(code) => code,
        // `ckpt-run ls | head` is no mistake.
        Err(error) if name != "run" && failure::is_closed_output(&error) => 0,
        Err(error) => {
            commands::complain(&error);
            failure::exit_code(&error, otherwise)
        }
    }
}

fn configure(matches: &clap::ArgMatches) -> Result<Config> {
    let config = Config::resolve(matches, &|name| std::env::var(name).ok())?;
    logging::start(config.verbosity, config.log_format, config.log_file.as_deref())?;
    Ok(config)
}
