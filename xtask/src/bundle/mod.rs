//! `cargo xtask gpu-bundle`: one folder with all that is needed to try ckpt-run on a machine with a GPU, which has no
//! network, no Rust and no time to spare. What is in it and how it is used says `xtask/bundle/README.md`.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, ensure};

use crate::elf::{self, Version};
use crate::{process, tools, workspace};

/// The newest glibc whose symbols may be asked for: that of the oldest machine that the bundle is for.
const GLIBC: Version = Version(2, 35);
/// How large the bundle may be, MiB.
const MOST_MIB: u64 = 60;
/// What is built for it.
const PACKAGES: &[&str] = &["ckpt-run", "ckpt-interpose", "ckpt-conformance", "train-mlp"];
/// What the build makes, and where it goes.
const BUILT: &[(&str, &str)] = &[
    ("ckpt-run", "bin/ckpt-run"),
    ("conformance", "bin/conformance"),
    ("train-mlp", "bin/train-mlp"),
    ("libckpt_interpose.so", "lib/libckpt_interpose.so"),
];
/// Programs in C: the source, and where it goes.
const PROGRAMS: &[(&str, &str)] = &[
    ("xtask/bundle/programs/state.c", "bin/state"),
    ("xtask/bundle/programs/copies.c", "bin/copies"),
    ("xtask/src/bench/gpu/launches.c", "bin/launches"),
    ("examples/legacy-job/legacy-job.c", "bin/legacy-job"),
    ("tests/programs/cuda/exchanged.c", "bin/exchanged"),
    ("tests/programs/cuda/exported.c", "bin/exported"),
    ("tests/programs/cuda/forked.c", "bin/forked"),
    ("tests/programs/cuda/graph_memory.c", "bin/graph_memory"),
    ("tests/programs/cuda/graphs.c", "bin/graphs"),
    ("tests/programs/cuda/hosted.c", "bin/hosted"),
    ("tests/programs/cuda/late.c", "bin/late"),
    ("tests/programs/cuda/managed.c", "bin/managed"),
    ("tests/programs/cuda/multicast.c", "bin/multicast"),
    ("tests/programs/cuda/orphan.c", "bin/orphan"),
    ("tests/programs/cuda/pinned.c", "bin/pinned"),
    ("tests/programs/cuda/pools.c", "bin/pools"),
    ("tests/programs/cuda/shared.c", "bin/shared"),
    ("tests/programs/cuda/shared_pools.c", "bin/shared_pools"),
    ("tests/programs/cuda/churns.c", "bin/churns"),
    ("tests/programs/cuda/vmm.c", "bin/vmm"),
];
/// Python programs: the source; they go into `programs`.
const SCRIPTS: &[&str] = &[
    "xtask/bundle/programs/driver_facts.py",
    "xtask/bundle/programs/frameworks.py",
    "xtask/bundle/programs/gpt.py",
    "xtask/bundle/programs/watcher.py",
    "tests/programs/cuda/numba_job.py",
];
/// The wrapper that stands for the program `criu`. It starts no other program before: `criu swrk` gets the descriptors
/// that it inherits, and is the process that was started.
const CRIU_WRAPPER: &str = r#"#!/bin/sh
# Made by `cargo xtask gpu-bundle`.
here=${0%/*}/..
exec "$here/lib/ld-linux-x86-64.so.2" --library-path "$here/lib" "$here/sbin/criu" "$@"
"#;

/// Options of `cargo xtask gpu-bundle`.
#[derive(clap::Args)]
pub struct Args {
    /// Where it is made; by default `gpu-bundle` in the build directory
    #[arg(long, value_name = "DIR")]
    to: Option<PathBuf>,
}

/// What the programs were built for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Build {
    /// For other machines: optimised, small, for old enough systems.
    Release,
    /// For the tests on this machine: what they have built anyway.
    Tests,
}

/// Makes the bundle and prints where it is.
pub fn run(args: &Args) -> Result<ExitCode> {
    let to = match &args.to {
        Some(to) => std::env::current_dir()?.join(to),
        None => workspace::target_dir()?.join("gpu-bundle"),
    };
    make(&to, Build::Release)?;
    println!("{}", to.display());
    Ok(ExitCode::SUCCESS)
}

/// The same folder for the tests of this machine, from the programs that they have built.
pub fn for_tests() -> Result<PathBuf> {
    let to = workspace::target_dir()?.join("tests-bundle");
    make(&to, Build::Tests)?;
    Ok(to)
}

/// Makes it beside its place, then puts it there: what is there is whole.
fn make(to: &Path, build: Build) -> Result<()> {
    let prefix = tools::criu_prefix()?;
    let built = build_programs(build)?;
    let libcuda = match build {
        Build::Release => workspace::simcuda()?,
        Build::Tests => workspace::link_simcuda()?,
    };
    let part = to.with_extension("part");
    clear(&part)?;
    fs::create_dir_all(&part).with_context(|| format!("creating {}", part.display()))?;
    for (name, place) in BUILT {
        copy(&built.join(name), &part.join(place))?;
    }
    copy(&interposer_measures(build)?, &part.join("bin/interposer-measures"))?;
    for (source, place) in PROGRAMS {
        compile(&workspace::root().join(source), &part.join(place), &libcuda)?;
    }
    let files = workspace::root().join("xtask/bundle");
    for name in ["run.sh", "README.md"] {
        copy(&files.join(name), &part.join(name))?;
    }
    for source in SCRIPTS {
        let source = workspace::root().join(source);
        copy(&source, &part.join("programs").join(source.file_name().context("a path without a name")?))?;
    }
    copy_scripts(&files.join("harness"), &part.join("harness"))?;
    copy(&workspace::root().join("LICENSE"), &part.join("LICENSE"))?;
    take_criu(&prefix, &part.join("criu"))?;
    describe(&part)?;
    if build == Build::Release {
        check_symbols(&part)?;
        let mib = size_bytes(&part)?.div_ceil(1 << 20);
        ensure!(mib <= MOST_MIB, "the bundle has {mib} MiB, it may have {MOST_MIB}: see {}", part.display());
        eprintln!("bundle: {mib} MiB, for glibc {GLIBC} and newer");
    }
    clear(to)?;
    fs::rename(&part, to).with_context(|| format!("renaming {} to {}", part.display(), to.display()))
}

/// Builds, and returns where the programs are.
fn build_programs(build: Build) -> Result<PathBuf> {
    let target = workspace::target_dir()?;
    if build == Build::Tests {
        return Ok(target.join("debug"));
    }
    eprintln!("bundle: building ckpt-run, the interposer, the conformance suite and train-mlp (release)");
    let mut cargo = workspace::cargo();
    cargo.args(["build", "--release", "--quiet"]);
    for package in PACKAGES {
        cargo.args(["-p", package]);
    }
    let status = cargo.status().context("could not start cargo build")?;
    ensure!(status.success(), "`{}` failed", process::describe(&cargo));
    Ok(target.join("release"))
}

/// The unit tests of the interposer, one of which measures captures: nobody else sees its insides.
fn interposer_measures(build: Build) -> Result<PathBuf> {
    let mut cargo = workspace::cargo();
    cargo.args(["test", "--no-run", "--message-format=json-render-diagnostics"]);
    match build {
        Build::Release => cargo.args(["--release", "-p", "ckpt-interpose", "--lib"]),
        // The very command of the tests, so that nothing is built twice.
        Build::Tests => cargo.args(["--workspace", "--features", workspace::FAULTS]),
    };
    // What it builds is shown as it goes.
    let output = cargo.stderr(Stdio::inherit()).output().context("could not start cargo test")?;
    ensure!(output.status.success(), "`{}` failed", process::describe(&cargo));
    let said = String::from_utf8_lossy(&output.stdout);
    let messages = said.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let is_it = |message: &serde_json::Value| {
        message["reason"] == "compiler-artifact"
            && message["target"]["name"] == "ckpt_interpose"
            && message["profile"]["test"] == true
    };
    let found = messages.filter(is_it).find_map(|message| message["executable"].as_str().map(PathBuf::from));
    found.context("cargo does not tell where the unit tests of the interposer are")
}

/// A program of the driver API, linked directly; the driver's file is only asked which symbols there are.
fn compile(source: &Path, to: &Path, libcuda: &Path) -> Result<()> {
    create_parent(to)?;
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-O2", "-s"]).arg(source).arg("-o").arg(to);
    cc.arg("-L").arg(libcuda.parent().unwrap_or(Path::new("."))).arg("-l:libcuda.so.1");
    process::capture(&mut cc).map(drop)
}

/// CRIU with the libraries that it needs, its loader, and their licences.
fn take_criu(prefix: &Path, to: &Path) -> Result<()> {
    let libraries = prefix.join("usr/lib/x86_64-linux-gnu");
    let loader = libraries.join("ld-linux-x86-64.so.2");
    let criu = prefix.join("usr/sbin/criu");
    let mut list = Command::new(&loader);
    list.arg("--library-path").arg(&libraries).arg("--list").arg(&criu);
    let said = process::capture(&mut list)?;
    let names = said.lines().filter_map(|line| line.split_once(" => ")).filter_map(|(name, _)| {
        let name = name.trim();
        (!name.contains('/')).then(|| name.to_owned())
    });
    for name in names.chain(["ld-linux-x86-64.so.2".to_owned()]) {
        copy(&libraries.join(&name), &to.join("lib").join(&name))?;
    }
    copy(&criu, &to.join("sbin/criu"))?;
    let wrapper = to.join("bin/criu");
    create_parent(&wrapper)?;
    fs::write(&wrapper, CRIU_WRAPPER)?;
    fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755))?;
    for entry in fs::read_dir(prefix.join("usr/share/doc"))? {
        let entry = entry?;
        let licence = entry.path().join("copyright");
        if licence.is_file() {
            copy(&licence, &to.join("licences").join(entry.file_name()))?;
        }
    }
    process::capture(Command::new(&wrapper).arg("--version")).context("the bundle's CRIU does not start")?;
    Ok(())
}

/// What the results say of where they come from.
fn describe(bundle: &Path) -> Result<()> {
    let git = |arguments: &[&str]| {
        let said = process::capture(Command::new("git").current_dir(workspace::root()).args(arguments));
        said.map(|text| text.trim().to_owned()).unwrap_or_default()
    };
    let description = serde_json::json!({
        "version": env!("CARGO_PKG_VERSION"),
        "commit": git(&["rev-parse", "HEAD"]),
        "is_changed": !git(&["status", "--porcelain"]).is_empty(),
    });
    fs::write(bundle.join("bundle.json"), format!("{description}\n")).context("writing bundle.json")
}

/// No program may ask for symbols of a newer glibc. CRIU has its own.
fn check_symbols(bundle: &Path) -> Result<()> {
    for directory in ["bin", "lib"] {
        for entry in fs::read_dir(bundle.join(directory))? {
            let path = entry?.path();
            let needed = elf::needed_glibc(&fs::read(&path)?)
                .with_context(|| format!("reading {}", path.display()))?;
            ensure!(
                needed <= Some(GLIBC),
                "{} needs glibc {}, the bundle is for {GLIBC} and newer: build on an older system",
                path.display(),
                needed.unwrap_or(GLIBC)
            );
        }
    }
    Ok(())
}

fn copy_scripts(from: &Path, to: &Path) -> Result<()> {
    for entry in fs::read_dir(from).with_context(|| format!("reading {}", from.display()))? {
        let entry = entry?;
        let (path, place) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type()?.is_dir() {
            if entry.file_name() != OsStr::new("__pycache__") {
                copy_scripts(&path, &place)?;
            }
        } else {
            copy(&path, &place)?;
        }
    }
    Ok(())
}

fn create_parent(path: &Path) -> Result<()> {
    let parent = path.parent().context("a path without a parent")?;
    fs::create_dir_all(parent).with_context(|| format!("creating {}", parent.display()))
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    create_parent(to)?;
    fs::copy(from, to).with_context(|| format!("copying {} to {}", from.display(), to.display())).map(drop)
}

/// Removes what an earlier call made.
fn clear(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("removing {}", path.display()))
        }
        _ => Ok(()),
    }
}

fn size_bytes(directory: &Path) -> Result<u64> {
    let mut sum = 0;
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        sum += if metadata.is_dir() { size_bytes(&entry.path())? } else { metadata.len() };
    }
    Ok(sum)
}
