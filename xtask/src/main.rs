//! The project's chores: `cargo xtask test`, `cargo xtask demo`, `cargo xtask bench`, `cargo xtask conformance`,
//! `cargo xtask soak`, `cargo xtask fuzz`, `cargo xtask simcuda`, `cargo xtask gpu-bundle`, `cargo xtask dist`, `cargo xtask structure`, `cargo xtask ci`.
//!
//! Each works on a fresh machine: what it needs and does not find is set up first, see [`tools`].

#![forbid(unsafe_code)]

mod bench;
mod bundle;
mod ci;
mod conformance;
mod demo;
mod dist;
mod elf;
mod failures;
mod fuzz;
mod process;
mod say;
mod skips;
mod soak;
mod structure;
mod test;
mod tools;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// The command line.
#[derive(Parser)]
#[command(name = "cargo xtask", about = "Set-up, tests, demo and checks of ckpt-run")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// One chore.
#[derive(Subcommand)]
enum Command {
    /// Set up what the tests need, build, and run every test
    Test(test::Args),
    /// Train, checkpoint, kill -9 everything, run the same command again, compare the losses
    Demo(demo::Args),
    /// Measure, and print JSON
    Bench(bench::Args),
    /// Checkpoint and kill a job hundreds of times; it has to end as if nothing had been, and nothing may grow
    Soak(soak::Args),
    /// Let libFuzzer look for input that makes a reader of untrusted bytes panic
    Fuzz(fuzz::Args),
    /// Build simcuda, the simulated CUDA driver, and print where its libcuda.so.1 is
    Simcuda,
    /// Check simcuda, or another CUDA driver, against CUDA's documentation
    Conformance(conformance::Args),
    /// Make a folder that tries everything on a machine with a GPU, by one command there
    GpuBundle(bundle::Args),
    /// Make the packages that users install
    Dist(dist::Args),
    /// Print the structure of the source code as JSON: entries per folder, import cycles, long functions
    Structure(structure::Args),
    /// What continuous integration runs: format, clippy, cargo-deny, docs, tests
    Ci,
    /// Only set up CRIU and PyTorch, and print where they are
    Tools(tools::Args),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Test(args) => test::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Soak(args) => soak::run(&args),
        Command::Fuzz(args) => fuzz::run(&args),
        Command::Simcuda => workspace::simcuda().map(|path| {
            println!("{}", path.display());
            ExitCode::SUCCESS
        }),
        Command::Conformance(args) => conformance::run(&args),
        Command::GpuBundle(args) => bundle::run(&args),
        Command::Dist(args) => dist::run(&args),
        Command::Structure(args) => structure::run(&args),
        Command::Ci => ci::run(),
        Command::Tools(args) => tools::run(&args),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("xtask: {error:#}");
        ExitCode::FAILURE
    })
}
