//! The Python package `ckpt-run`: the launcher, the interposer, completions and the manual page.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::build::{Built, GLIBC};
use super::wheel::Wheel;
use super::{SUMMARY, VERSION, check_size};
use crate::workspace;

/// How large the wheel may be.
const MOST_MB: u64 = 15;

/// Writes the wheel into `out` and returns its path.
pub fn wheel(built: &Built, out: &Path) -> Result<PathBuf> {
    let readme = workspace::root().join("README.md");
    let description = fs::read_to_string(&readme).with_context(|| format!("reading {}", readme.display()))?;
    let description = without_relative_links(&description);
    let wheel = Wheel {
        name: "ckpt-run",
        version: VERSION,
        summary: SUMMARY,
        licence: "Apache-2.0",
        licences: built.licences.to_vec(),
        description,
        // The same in all wheels, since tools that lock versions read one of them. There is no CRIU for arm64.
        more: &[
            "Provides-Extra: criu",
            "Requires-Dist: ckpt-run-criu >=4.2 ; extra == 'criu' and platform_machine == 'x86_64'",
        ],
        glibc: GLIBC,
        architecture: built.architecture,
    };
    let path = wheel.write(&built.entries, out)?;
    check_size(&path, MOST_MB)?;
    Ok(path)
}

/// The wheel for arm64. `built` is what the packages for x86-64 have.
pub fn arm64_wheel(built: &Built, out: &Path) -> Result<PathBuf> {
    wheel(&built.for_arm64()?, out)
}

/// The text without links to files, which exist beside the source code only.
fn without_relative_links(text: &str) -> String {
    let (mut changed, mut rest) = (String::new(), text);
    while let Some(middle) = rest.find("](") {
        let (before, behind) = (&rest[..middle], &rest[middle + 2..]);
        let open = before.rfind('[').unwrap_or_default();
        let close = behind.find(')').unwrap_or_default();
        if behind.starts_with("http") {
            changed += &rest[..middle + 2 + close];
            rest = &behind[close..];
        } else {
            changed += &before[..open];
            changed += before[open..].trim_start_matches('[');
            rest = behind[close..].trim_start_matches(')');
        }
    }
    changed + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_to_files_are_taken_out() {
        let text = "[a](docs/a.md), [b](https://b.c/d) and [e](#f).";
        assert_eq!(without_relative_links(text), "a, [b](https://b.c/d) and e.");
        let readme = fs::read_to_string(workspace::root().join("README.md")).unwrap();
        let changed = without_relative_links(&readme);
        let targets = changed.match_indices("](").map(|(at, _)| &changed[at + 2..]);
        assert!(targets.clone().count() > 0 && targets.clone().all(|target| target.starts_with("http")));
    }
}
