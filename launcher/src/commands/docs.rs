//! `ckpt-run docs`: the documentation of this build, also without a network.

use crate::cli::args::similar;
use crate::sys::error::bad_input;
use anyhow::{Result, anyhow};
use std::io::{self, Write};

macro_rules! pages {
    ($($name:literal)*) => {
        &[$(($name, include_str!(concat!("../../../docs/", $name, ".md")))),*]
    };
}

/// The pages of `docs/` for users, with their texts.
const PAGES: &[(&str, &str)] = pages!(
    "cluster" "commands" "containers" "exit-codes" "format" "gpus" "install" "limits" "object-stores" "options" "privileges"
    "report" "resuming" "slurm" "threat-model" "unattended"
);

/// Prints a page, or the names of all.
///
/// # Errors
/// Bad input: there is no such page.
pub fn docs(named: Option<&str>) -> Result<i32> {
    let mut out = io::stdout().lock();
    let Some(named) = named else {
        writeln!(out, "`ckpt-run docs PAGE` prints one of these pages:\n")?;
        PAGES.iter().try_for_each(|(name, text)| writeln!(out, "  {name:<14} {}", title(text)))?;
        return Ok(0);
    };
    // Also as other pages name it.
    let name = named.split_once(".md").map_or(named, |(name, _)| name).trim_start_matches("docs/");
    let Some((_, text)) = PAGES.iter().find(|(page, _)| *page == name) else {
        let meant = similar(name, PAGES.iter().map(|(page, _)| *page));
        let meant = meant.map(|page| format!("Did you mean `ckpt-run docs {page}`? ")).unwrap_or_default();
        return Err(bad_input(anyhow!("there is no page {name:?}. {meant}`ckpt-run docs` lists the pages")));
    };
    out.write_all(readable(text).as_bytes())?;
    Ok(0)
}

/// The text with what a reader without the source code can follow, instead of links to files.
fn readable(text: &str) -> String {
    let (mut readable, mut rest) = (String::new(), text);
    while let Some(middle) = rest.find("](") {
        let (before, behind) = (&rest[..middle], &rest[middle + 2..]);
        match (before.rfind('['), behind.find(')')) {
            (Some(open), Some(close)) => {
                readable += &before[..open];
                readable += &without_link(&before[open + 1..], &behind[..close]);
                rest = &behind[close + 1..];
            }
            _ => {
                readable += &rest[..middle + 2];
                rest = behind;
            }
        }
    }
    readable + rest
}

fn without_link(label: &str, target: &str) -> String {
    if target.contains("://") {
        return format!("[{label}]({target})");
    }
    let file = target.split('#').next().unwrap_or_default();
    let name = file.strip_suffix(".md").unwrap_or_default().trim_start_matches("../docs/");
    match PAGES.iter().find(|(page, _)| *page == name) {
        Some(_) => format!("{label} (`ckpt-run docs {name}`)"),
        // A part of the same page.
        None if file.is_empty() => label.to_owned(),
        None => {
            let path = file.strip_prefix("../").map_or_else(|| format!("docs/{file}"), str::to_owned);
            format!("{label} ({path} in the source code)")
        }
    }
}

/// The heading of a page.
fn title(text: &str) -> &str {
    text.lines().next().unwrap_or_default().trim_start_matches("# ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::{Path, PathBuf};

    fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                sources(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }

    #[test]
    fn messages_name_pages_that_there_are() {
        let mut files = Vec::new();
        sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut files);
        let mut named = 0;
        for file in files {
            let text = fs::read_to_string(&file).unwrap();
            for (_, rest) in
                text.match_indices("`ckpt-run docs ").map(|(at, found)| (at, &text[at + found.len()..]))
            {
                let page = rest.split('`').next().unwrap();
                if page != "PAGE" && !page.contains('{') {
                    assert!(PAGES.iter().any(|(name, _)| *name == page), "{page} in {}", file.display());
                    named += 1;
                }
            }
        }
        assert!(named > 10, "{named}");
        assert_eq!(title(PAGES[7].1), "Limits");
        for (name, text) in PAGES {
            let readable = readable(text);
            let links = readable.match_indices("](").map(|(at, _)| &readable[at + 2..]);
            for target in links {
                assert!(target.starts_with("http"), "{name}: {}", target.lines().next().unwrap());
            }
        }
        let shown = readable(
            "See [the limits](limits.md#x), [this](#y), [a](measurements.md) and [b](https://c.d/).",
        );
        let expected = "See the limits (`ckpt-run docs limits`), this, a (docs/measurements.md in the source code) and [b](https://c.d/).";
        assert_eq!(shown, expected);
        assert!(docs(Some("nosuchpage")).is_err());
    }
}
