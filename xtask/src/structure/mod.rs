//! `cargo xtask structure`: the structure of the source code as JSON, and a check of it against limits.
//!
//! For each product crate: entries per folder, import cycles between folders and between files, lines of code. For
//! the whole workspace, tests included: functions that are too long.

mod functions;
mod graph;
mod imports;
mod limits;
mod lines;
mod modules;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use serde::Serialize;

use self::functions::Function;
use self::graph::Graph;
use self::imports::Import;
use self::modules::SourceTree;
use crate::{process, workspace};

/// The crates that a user runs; the others are tests and tools.
const PRODUCT_CRATES: [&str; 8] =
    ["launcher", "snapshot", "object-medium", "protocol", "interpose", "cuda-abi", "cut", "cluster"];

/// Code whose functions may be long: the PTX interpreter has one arm per instruction.
const INTERPRETER: [&str; 2] = ["simulator/ptx/src/exec", "simcuda/ptx/src/exec"];

/// Options of `cargo xtask structure`.
#[derive(clap::Args)]
pub struct Args {
    /// Print what exceeds the limits of the project instead of the JSON; the exit code is 1 if anything does
    #[arg(long)]
    check: bool,
    /// List the imports between the top-level folders of a crate, such as `launcher`, and print no JSON
    #[arg(long, value_name = "CRATE", conflicts_with = "check")]
    imports: Option<String>,
}

/// The structure of all source code.
#[derive(Serialize)]
struct Report {
    crates: BTreeMap<String, CrateReport>,
    /// The longest function first.
    long_functions: Vec<Function>,
}

/// The structure of one crate, tests left out.
#[derive(Serialize)]
struct CrateReport {
    /// Lines that hold code: not blank, no comment, no test.
    product_lines: usize,
    files: usize,
    /// Files and folders in each folder; `x.rs` and `x/` are one entry.
    entries_per_folder: BTreeMap<String, usize>,
    /// Top-level folders and modules of `src` that import each other, directly or not.
    folder_cycles: Vec<Vec<String>>,
    /// Files that import each other, directly or not. The largest cycle first.
    file_cycles: Vec<FileCycle>,
    #[serde(skip)]
    imports: Vec<Import>,
    #[serde(skip)]
    folders: BTreeSet<String>,
}

#[derive(Serialize)]
struct FileCycle {
    size: usize,
    files: Vec<String>,
}

/// Prints the structure, or with `--check` everything that exceeds a limit.
pub fn run(args: &Args) -> Result<ExitCode> {
    if let Some(name) = &args.imports {
        print_imports(&report_crate(name)?);
        return Ok(ExitCode::SUCCESS);
    }
    let report = Report {
        crates: PRODUCT_CRATES
            .iter()
            .map(|name| Ok(((*name).to_owned(), report_crate(name)?)))
            .collect::<Result<_>>()?,
        long_functions: long_functions()?,
    };
    if !args.check {
        println!("{}", serde_json::to_string_pretty(&report)?);
        return Ok(ExitCode::SUCCESS);
    }
    let violations = limits::violations(&report);
    violations.iter().for_each(|violation| eprintln!("structure: {violation}"));
    eprintln!("structure: {} violations", violations.len());
    Ok(if violations.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn report_crate(name: &str) -> Result<CrateReport> {
    let src = workspace::root().join(name).join("src");
    let read = |path: &Path| fs::read_to_string(src.join(path)).ok();
    let tree = SourceTree::load(&read).with_context(|| format!("reading the sources of {name}"))?;
    Ok(CrateReport::new(&tree))
}

impl CrateReport {
    fn new(tree: &SourceTree) -> Self {
        let imports = imports::between_files(tree);
        let by_folder = Graph::new(imports.iter().map(Import::folders));
        let by_file = Graph::new(imports.iter().map(|import| (import.from.clone(), import.to.clone())));
        let file_cycles = by_file.cycles().into_iter().map(|files| FileCycle { size: files.len(), files });
        Self {
            product_lines: tree.modules.iter().map(|module| module.product_lines).sum(),
            files: tree.modules.len(),
            entries_per_folder: tree.entries_per_folder(),
            folder_cycles: by_folder.cycles(),
            file_cycles: file_cycles.collect(),
            folders: tree.modules.iter().filter_map(|module| module.path.first().cloned()).collect(),
            imports,
        }
    }
}

/// One line for each pair of folders: the number of imports, and where the first one is.
fn print_imports(report: &CrateReport) {
    let mut pairs: BTreeMap<_, Vec<&Import>> = BTreeMap::new();
    for import in &report.imports {
        pairs.entry(import.folders()).or_default().push(import);
    }
    for ((from, to), imports) in pairs.iter().filter(|((from, to), _)| from != to) {
        println!("{from} -> {to}: {}, for instance {}", imports.len(), imports[0]);
    }
}

/// The functions of all Rust files of the repository that are longer than the limit.
fn long_functions() -> Result<Vec<Function>> {
    let mut git = Command::new("git");
    git.current_dir(workspace::root());
    git.args(["ls-files", "--cached", "--others", "--exclude-standard", "*.rs"]);
    let mut found = Vec::new();
    for file in process::capture(&mut git)?.lines() {
        let Ok(text) = fs::read_to_string(workspace::root().join(file)) else {
            // Deleted in the working tree, not yet in the index.
            continue;
        };
        if INTERPRETER.iter().any(|dir| file.starts_with(dir)) {
            continue;
        }
        let functions = functions::find(file, &text).with_context(|| format!("parsing {file}"))?;
        found.extend(functions.into_iter().filter(|function| function.lines > limits::FUNCTION_LINES));
    }
    found.sort_by_key(|function| std::cmp::Reverse(function.lines));
    Ok(found)
}
