//! The notices of the crates that are linked into the programs, which their licences ask for: a text in every package.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

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
    let notices = text(&linked(&metadata))? + &standard_library()?;
    fs::write(&path, notices).with_context(|| format!("writing {}", path.display()))?;
    Ok(path)
}

/// The notices of Rust's standard library, which every program contains. The toolchain has them as a web page.
fn standard_library() -> Result<String> {
    let sysroot = process::capture(Command::new("rustc").args(["--print", "sysroot"]))?;
    let path = Path::new(sysroot.trim()).join("share/doc/rust/COPYRIGHT-library.html");
    let page = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    Ok(format!("\n{RULE}\nRust's standard library\n{RULE}\n\n{}", text_of(&page)))
}

/// The lines of a web page, without its tags.
fn text_of(page: &str) -> String {
    let mut text = String::new();
    for part in page.split('<') {
        // Before the first tag there is none.
        text += part.split_once('>').map_or(part, |(_, text)| text);
    }
    for (entity, letter) in [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&#39;", "'"), ("&amp;", "&")] {
        text = text.replace(entity, letter);
    }
    let lines = text.lines().map(str::trim_end).filter(|line| !line.is_empty());
    lines.flat_map(|line| [line, "\n"]).collect()
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
    fn a_page_without_its_tags() {
        let page = "<h1>Notices</h1>\n\n<p>one &amp; <a href=\"x\">two</a> &lt;a@b.c&gt;</p>\n";
        assert_eq!(text_of(page), "Notices\none & two <a@b.c>\n");
    }

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
        assert!(text.contains("The Rust Project Developers"));
        assert!(text.contains("Permission is hereby granted") && text.contains("Apache License"));
    }
}
