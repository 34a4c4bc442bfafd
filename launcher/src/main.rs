//! `ckpt-run`: runs jobs that survive crashes. See docs/design/README.md for the design and ARCHITECTURE.md for the map of the
//! code.

// The modules with unsafe code are listed in ARCHITECTURE.md.
#![deny(unsafe_code)]

mod agents;
mod checkpoint;
mod cli;
mod cluster;
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
use clap::FromArgMatches;
use cli::config::Config;
use cli::resolve::mistyped_variables;
use cli::{args, logging};
use cluster::Rejoin;
use container::auto::Auto;
use container::pid1;
use namespace::stdio;
use report::failure;
use std::ffi::OsString;
use std::os::fd::RawFd;
use std::sync::Arc;
use sys::inherited;

fn main() {
    if std::env::args_os().nth(1).is_some_and(|argument| argument == namespace::INIT_ARGUMENT) {
        namespace::init_main();
    }
    if std::env::args_os().nth(1).is_some_and(|argument| argument == sys::gpus::ARGUMENT) {
        sys::gpus::serve();
    }
    match std::env::args_os().nth(1) {
        Some(argument) if argument == commands::demo::job::ARGUMENT => commands::demo::job::main(),
        Some(argument) if argument == commands::demo::job::WORKER_ARGUMENT => {
            commands::demo::job::worker_main()
        }
        Some(argument) if argument == commands::completions::ARGUMENT => {
            return commands::completions::answer(std::env::args_os().skip(2));
        }
        _ => {}
    }
    let auto = Auto::take();
    pid1::fork_if_pid1();
    let mut arguments = std::env::args_os().collect();
    let rejoin = Rejoin::take(&mut arguments);
    let code = run(arguments, auto, rejoin);
    stdio::restore_terminal();
    std::process::exit(code);
}

fn run(arguments: Vec<OsString>, auto: Auto, rejoin: Option<(Rejoin, Option<RawFd>)>) -> i32 {
    stdio::messages_begin();
    let matches = match args::command().try_get_matches_from(args::with_run(arguments)) {
        Ok(matches) => matches,
        Err(error) => {
            let _ = error.print();
            return error.exit_code();
        }
    };
    let command = args::Command::from_arg_matches(&matches).expect("clap has checked the arguments");
    let is_run = matches!(command, args::Command::Run(_));
    // Options may precede and follow the command: the command's matches have both.
    let (_, options) = matches.subcommand().expect("clap requires a command");
    match configure(options, rejoin).and_then(|config| commands::perform(command, &config, auto)) {
        Ok(code) => code,
        // `ckpt-run ls | head` is no error.
        Err(error) if !is_run && failure::is_closed_output(&error) => 0,
        Err(error) => {
            if let Some(rejoin) = error.downcast_ref::<Rejoin>() {
                stdio::restore_terminal();
                tracing::error!("cannot start again to resume the job: {}", rejoin.exec());
                return sys::error::EXIT_OWN;
            }
            let error = failure::naming_output(error);
            failure::log_error(&error);
            failure::exit_code(&error, if is_run { sys::error::EXIT_OWN } else { sys::error::EXIT_NEGATIVE })
        }
    }
}

fn configure(matches: &clap::ArgMatches, rejoin: Option<(Rejoin, Option<RawFd>)>) -> Result<Config> {
    let mut config = Config::resolve(matches, &|name| std::env::var(name).ok())?;
    let memory = rejoin.as_ref().and_then(|(_, memory)| Some(inherited::take((*memory)?)));
    if let Some((rejoin, _)) = rejoin {
        config.rejoin(&rejoin);
    }
    logging::start(config.verbosity, config.log_format, config.log_file.as_deref(), &config.store.trust)?;
    match memory.transpose() {
        Ok(memory) => config.nodes.memory = memory.map(Arc::new),
        Err(error) => tracing::warn!("the snapshots in memory are lost: {error}"),
    }
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    for (name, meant) in mistyped_variables(names) {
        tracing::warn!("the variable {name} is no option of ckpt-run and is ignored. Did you mean {meant}?");
    }
    Ok(config)
}
