//! The package for Debian and Ubuntu, packed by `dpkg-deb`, which those systems install packages with.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::build::{Built, GLIBC};
use super::{DESCRIPTION, Entry, SUMMARY, VERSION, lay_out};
use crate::process;

/// Writes the package into `out` and returns its path.
pub fn package(built: &Built, out: &Path) -> Result<PathBuf> {
    let tree = out.join("deb");
    let mut entries: Vec<_> = built
        .entries
        .iter()
        .map(|entry| {
            // Where Debian's zsh looks.
            let place = entry.place.replace("zsh/site-functions", "zsh/vendor-completions");
            Entry::new(format!("usr/{place}"), &entry.from)
        })
        .collect();
    let names = ["copyright", "THIRD-PARTY-NOTICES.txt"];
    let texts = names.iter().zip(&built.licences);
    entries.extend(texts.map(|(name, from)| Entry::new(format!("usr/share/doc/ckpt-run/{name}"), from)));
    lay_out(&entries, &tree)?;
    fs::create_dir(tree.join("DEBIAN")).context("creating DEBIAN")?;
    fs::write(tree.join("DEBIAN/control"), control()).context("writing DEBIAN/control")?;
    let path = out.join(format!("ckpt-run_{VERSION}_amd64.deb"));
    let mut pack = Command::new("dpkg-deb");
    pack.args(["--root-owner-group", "--build"]).arg(&tree).arg(&path);
    process::capture(&mut pack)?;
    let listed = process::capture(Command::new("dpkg-deb").arg("--contents").arg(&path))?;
    for entry in &entries {
        ensure!(listed.contains(&entry.place), "{} lacks {}", path.display(), entry.place);
    }
    Ok(path)
}

fn control() -> String {
    let description = DESCRIPTION.join("\n ");
    format!(
        "Package: ckpt-run\nVersion: {VERSION}\nArchitecture: amd64\nMaintainer: The ckpt-run authors\n\
         Section: utils\nPriority: optional\nDepends: libc6 (>= {GLIBC}), libgcc-s1\nRecommends: criu (>= 4.1)\n\
         Description: {SUMMARY}\n {description}\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_of_the_control_file_is_a_field_or_its_continuation() {
        for line in control().lines() {
            assert!(line.starts_with(' ') || line.split_once(": ").is_some(), "{line:?}");
        }
    }
}
