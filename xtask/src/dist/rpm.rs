//! The package for Fedora, RHEL, SUSE and their relatives, packed by `rpmbuild`, from Debian's package `rpm`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::build::{Built, GLIBC};
use super::{DESCRIPTION, Entry, SUMMARY, VERSION, lay_out};
use crate::{process, tools};

/// Writes the package into `out` and returns its path.
pub fn package(built: &Built, out: &Path) -> Result<PathBuf> {
    let rpmbuild = tools::rpmbuild()?;
    let work = out.join("rpm");
    let tree = work.join("tree");
    let mut entries: Vec<_> =
        built.entries.iter().map(|entry| Entry::new(format!("usr/{}", entry.place), &entry.from)).collect();
    let names = ["LICENSE", "THIRD-PARTY-NOTICES.txt"];
    let texts = names.iter().zip(&built.licences);
    entries.extend(texts.map(|(name, from)| Entry::new(format!("usr/share/licenses/ckpt-run/{name}"), from)));
    lay_out(&entries, &tree)?;
    let spec = work.join("ckpt-run.spec");
    fs::write(&spec, specification(&entries, &tree)).context("writing the specification")?;
    let mut build = Command::new(rpmbuild);
    build
        .args(["-bb", "--target", "x86_64-linux"])
        .arg("--define")
        .arg(format!("_topdir {}", work.display()));
    build.arg("--define").arg(format!("_rpmdir {}", out.display()));
    build.arg("--define").arg("_build_name_fmt %%{NAME}-%%{VERSION}-%%{RELEASE}.%%{ARCH}.rpm").arg(&spec);
    process::capture(&mut build)?;
    let path = out.join(format!("ckpt-run-{VERSION}-1.x86_64.rpm"));
    let listed = process::capture(Command::new("rpm").args(["-qpl"]).arg(&path))?;
    for entry in &entries {
        ensure!(listed.contains(&entry.place), "{} lacks {}", path.display(), entry.place);
    }
    Ok(path)
}

fn specification(entries: &[Entry], tree: &Path) -> String {
    // The files are finished: nothing is stripped, compressed or searched for dependencies.
    let mut spec = format!(
        "%global debug_package %{{nil}}\n%global __os_install_post %{{nil}}\nName: ckpt-run\nVersion: {VERSION}\n\
         Release: 1\nSummary: {SUMMARY}\nLicense: Apache-2.0\nAutoReqProv: no\nRequires: glibc >= {GLIBC}\n\
         Requires: libgcc\nRecommends: criu >= 4.1\n\n%description\n{}\n\n%install\ncp -a '{}/.' '%{{buildroot}}/'\n\n%files\n",
        DESCRIPTION.join("\n"),
        tree.display(),
    );
    for entry in entries {
        let directive = if entry.place.contains("/licenses/") { "%license " } else { "" };
        spec += &format!("{directive}/{}\n", entry.place);
    }
    spec
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_specification_lists_every_file() {
        let entries =
            [Entry::new("usr/bin/ckpt-run", "/x"), Entry::new("usr/share/licenses/a/LICENSE", "/y")];
        let spec = specification(&entries, Path::new("/tree"));
        let (_, files) = spec.split_once("%files\n").unwrap();
        assert_eq!(files, "/usr/bin/ckpt-run\n%license /usr/share/licenses/a/LICENSE\n");
        assert!(spec.contains("Requires: glibc >= 2.31\n"), "{spec}");
    }
}
