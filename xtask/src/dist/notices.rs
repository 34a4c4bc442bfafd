//! The notices of the crates that are linked into the programs, which their licences ask for: a text in every package.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::{process, workspace};

/// The programs, by their packages.
const PROGRAMS: [&str; 2] = ["ckpt-run", "ckpt-interpose"];
const PLATFORM: &str = "x86_64-unknown-linux-gnu";
/// How the names of files with licences and notices begin.
const NAMES: [&str; 6] = ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "UNLICENSE"];
const RULE: &str = "--------------------------------------------------------------------------------";

/// The output of `cargo metadata`.
#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    resolve: Resolve,
}

#[derive(Deserialize)]
struct Package {
    id: String,
    name: String,
    version: String,
    license: Option<String>,
    /// `None` for a crate of the workspace.
    source: Option<String>,
    manifest_path: PathBuf,
}

#[derive(Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Deserialize)]
struct Node {
    id: String,
    deps: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    pkg: String,
    dep_kinds: Vec<Kind>,
}

#[derive(Deserialize)]
struct Kind {
    /// `None` for a crate that is linked in.
    kind: Option<String>,
}

/// Writes the notices to a file in `out`, and returns its path.
pub fn write(out: &Path) -> Result<PathBuf> {
    let mut cargo = workspace::cargo();
    cargo.args(["metadata", "--format-version=1", "--locked", "--filter-platform", PLATFORM]);
    let metadata: Metadata =
        serde_json::from_str(&process::capture(&mut cargo)?).context("reading cargo's metadata")?;
    let path = out.join("THIRD-PARTY-NOTICES.txt");
    fs::write(&path, text(&linked(&metadata))?).with_context(|| format!("writing {}", path.display()))?;
    Ok(path)
}

/// The crates of others that are linked into the programs, by name and version.
fn linked(metadata: &Metadata) -> BTreeMap<(&str, &str), &Package> {
    let packages: HashMap<_, _> = metadata.packages.iter().map(|package| (&*package.id, package)).collect();
    let nodes: HashMap<_, _> = metadata.resolve.nodes.iter().map(|node| (&*node.id, node)).collect();
    let is_program = |package: &&&Package| package.source.is_none() && PROGRAMS.contains(&&*package.name);
    let mut left: Vec<_> = packages.values().filter(is_program).map(|package| &*package.id).collect();
    let mut found = BTreeSet::new();
    while let Some(id) = left.pop() {
        if found.insert(id) {
            let dependencies = nodes.get(id).into_iter().flat_map(|node| &node.deps);
            let is_linked = |one: &&Dependency| one.dep_kinds.iter().any(|kind| kind.kind.is_none());
            left.extend(dependencies.filter(is_linked).map(|one| &*one.pkg));
        }
    }
    let all = found.into_iter().filter_map(|id| packages.get(id).copied());
    let others = all.filter(|package| package.source.is_some());
    others.map(|package| ((&*package.name, &*package.version), package)).collect()
}

/// Each text once, with the crates that have it.
fn text(crates: &BTreeMap<(&str, &str), &Package>) -> Result<String> {
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut list = String::new();
    for ((name, version), package) in crates {
        let licence = package.license.as_deref().unwrap_or("see its text");
        list += &format!("{name} {version}: {licence}\n");
        let dir = package.manifest_path.parent().context("a manifest without a directory")?;
        let mut has_any = false;
        for entry in fs::read_dir(dir).with_context(|| format!("reading {}", dir.display()))? {
            let path = entry?.path();
            let file = path.file_name().unwrap_or_default().to_string_lossy().to_uppercase();
            if path.is_file() && NAMES.iter().any(|start| file.starts_with(start)) {
                let content = String::from_utf8_lossy(&fs::read(&path)?).trim().to_owned();
                texts.entry(content).or_default().push(format!("{name} {version}"));
                has_any = true;
            }
        }
        ensure!(has_any, "{name} {version} has no file with its licence");
    }
    let mut all = format!("ckpt-run contains these crates:\n\n{list}\nTheir licences and notices:\n");
    for (content, of) in texts {
        all += &format!("\n{RULE}\n{}\n{RULE}\n\n{content}\n", of.join(", "));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_crate_that_is_linked_in_has_its_licence_in_the_notices() {
        let dir = tempfile::tempdir().unwrap();
        let text = fs::read_to_string(write(dir.path()).unwrap()).unwrap();
        for name in ["serde", "aws-lc-sys", "libc", "clap"] {
            assert!(text.lines().any(|line| line.starts_with(&format!("{name} "))), "{name}");
        }
        // The tests' own, and ours.
        for name in ["proptest", "ckpt-snapshot"] {
            assert!(!text.lines().any(|line| line.starts_with(&format!("{name} "))), "{name}");
        }
        assert!(text.contains("Permission is hereby granted") && text.contains("Apache License"));
    }
}
