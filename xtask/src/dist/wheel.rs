//! Wheels of programs: laid out here, packed by `wheel`, which makes the list of files with their hashes.
//!
//! Files go into the environment itself (`bin`, `lib`, `share`), as in an installation by hand. So the launcher finds the
//! interposer in `../lib`, in virtual environments of pip, uv and pipx alike, and with `sudo`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use super::build::Architecture;
use super::{Entry, lay_out};
use crate::elf::Version;
use crate::tools::{self, python};
use crate::{process, workspace};

/// What a wheel says about itself.
pub struct Wheel<'a> {
    /// Its name on PyPI.
    pub name: &'a str,
    pub version: &'a str,
    pub summary: &'a str,
    /// An SPDX expression.
    pub licence: &'a str,
    /// Files with the texts of the licence.
    pub licences: Vec<PathBuf>,
    /// A page in Markdown.
    pub description: String,
    /// More lines of the metadata.
    pub more: &'a [&'a str],
    /// The oldest glibc that it works with.
    pub glibc: Version,
    pub architecture: Architecture,
}

impl Wheel<'_> {
    /// Writes the wheel with these files into `out` and returns its path.
    pub fn write(&self, entries: &[Entry], out: &Path) -> Result<PathBuf> {
        let stem = format!("{}-{}", self.name.replace('-', "_"), self.version);
        let tree = out.join("wheel").join(&stem);
        let places = entries.iter().map(|entry| {
            let place = match entry.place.strip_prefix("bin/") {
                Some(program) => format!("scripts/{program}"),
                None => format!("data/{}", entry.place),
            };
            Entry::new(format!("{stem}.data/{place}"), &entry.from)
        });
        let licences = self.licences.iter().map(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            Entry::new(format!("{stem}.dist-info/licenses/{name}"), path)
        });
        lay_out(&places.chain(licences).collect::<Vec<_>>(), &tree)?;
        let info = tree.join(format!("{stem}.dist-info"));
        fs::write(info.join("METADATA"), self.metadata())?;
        let tag = self.tag();
        let about = format!("Wheel-Version: 1.0\nGenerator: xtask\nRoot-Is-Purelib: false\nTag: {tag}\n");
        fs::write(info.join("WHEEL"), about)?;

        let mut pack = Command::new(python::PYTHON);
        pack.args(["-m", "wheel", "pack", "--dest-dir"]).arg(out).arg(&tree);
        // The same content gives the same file.
        pack.env("PYTHONPATH", tools::dist()?).env("SOURCE_DATE_EPOCH", source_date()?);
        process::capture(&mut pack)?;
        Ok(out.join(format!("{stem}-{tag}.whl")))
    }

    fn tag(&self) -> String {
        let Version(major, minor) = self.glibc;
        format!("py3-none-manylinux_{major}_{minor}_{}", self.architecture)
    }

    fn metadata(&self) -> String {
        let mut lines = vec![
            "Metadata-Version: 2.4".to_owned(),
            format!("Name: {}", self.name),
            format!("Version: {}", self.version),
            format!("Summary: {}", self.summary),
            format!("License-Expression: {}", self.licence),
        ];
        let names = self.licences.iter().filter_map(|path| path.file_name());
        lines.extend(names.map(|name| format!("License-File: {}", name.to_string_lossy())));
        lines.extend(self.more.iter().map(|&line| line.to_owned()));
        lines.push("Classifier: Operating System :: POSIX :: Linux".to_owned());
        lines.push("Description-Content-Type: text/markdown".to_owned());
        format!("{}\n\n{}", lines.join("\n"), self.description)
    }
}

/// The time of the last commit, in seconds since 1970.
fn source_date() -> Result<String> {
    let mut git = Command::new("git");
    git.args(["log", "-1", "--format=%ct"]).current_dir(workspace::root());
    Ok(process::capture(&mut git)?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_names_the_licence_and_ends_with_the_description() {
        let wheel = Wheel {
            name: "ckpt-run-criu",
            version: "4.2.1",
            summary: "CRIU",
            licence: "GPL-2.0-only",
            licences: vec!["/x/COPYING".into()],
            description: "# CRIU\n".to_owned(),
            more: &["Provides-Extra: x"],
            glibc: Version(2, 17),
            architecture: Architecture::X86_64,
        };
        let metadata = wheel.metadata();
        let (head, body) = metadata.split_once("\n\n").unwrap();
        for line in ["Name: ckpt-run-criu", "License-File: COPYING", "Provides-Extra: x"] {
            assert!(head.lines().any(|one| one == line), "{line}: {head}");
        }
        assert_eq!(body, "# CRIU\n");
        assert_eq!(wheel.tag(), "py3-none-manylinux_2_17_x86_64");
    }
}
