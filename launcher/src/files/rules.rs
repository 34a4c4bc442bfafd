//! Which files are the job's, and how much of them a snapshot keeps.

use anyhow::{Context, Result};
use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// Never the job's own files: the kernel's, and shared memory, which is saved in another way.
const NOT_ON_DISK: &[&str] = &["/proc", "/sys", "/dev", "/run/ckpt-run"];
/// Caches, version control and virtual environments.
const EXCLUDED: &[&str] = &[
    "**/.git/**",
    "**/__pycache__/**",
    "**/.cache/**",
    "**/.venv/**",
    "**/node_modules/**",
    "**/.ckpt-run-kept/**",
];
/// Source code, which people edit while the job runs. Excluded where it is unknown who has written a file.
const EXCLUDED_UNSEEN: &[&str] = &["**/*.{py,pyi,ipynb,sh,rs,c,cc,cpp,cu,h,hpp,md}", "**/ckpt-run.toml"];

/// Which files that are not open for writing are covered (`--files`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Coverage {
    /// Those that the job is known to have written. If one cannot be put back, the resume is refused.
    #[default]
    Auto,
    /// Those too that it may have written, where that is not known.
    Strict,
    /// As `Strict`, but a file that cannot be put back stays as it is, with a warning.
    Lenient,
    /// None.
    Off,
}

/// The options of the job's files.
#[derive(Clone, Debug, Default)]
pub struct FileOptions {
    /// Patterns of files that are not the job's.
    pub exclude: Vec<String>,
    /// The most that one snapshot may copy, bytes.
    pub budget_bytes: u64,
    /// Which files are covered.
    pub coverage: Coverage,
}

/// Which files are covered.
#[derive(Clone, Debug)]
pub struct FileRules {
    /// The patterns that the user has given.
    pub patterns: Vec<String>,
    excluded: GlobSet,
    excluded_unseen: GlobSet,
    /// Directories and files of ckpt-run.
    own: Vec<PathBuf>,
    /// The most that one snapshot may copy, bytes.
    pub budget_bytes: u64,
    /// Which files that are not open for writing are covered.
    pub coverage: Coverage,
}

impl FileRules {
    /// The rules for these options. `own` are files and directories of ckpt-run: the store, the log.
    ///
    /// # Errors
    /// When a pattern is not valid.
    pub fn new(options: &FileOptions, own: Vec<PathBuf>) -> Result<Self> {
        let given = options.exclude.iter().map(String::as_str);
        Ok(Self {
            patterns: options.exclude.clone(),
            excluded: patterns(EXCLUDED.iter().copied().chain(given))?,
            excluded_unseen: patterns(EXCLUDED_UNSEEN.iter().copied())?,
            own,
            budget_bytes: options.budget_bytes,
            coverage: options.coverage,
        })
    }

    /// Whether files are covered that are not open for writing. `is_tracked` is whether the job's writes are recorded.
    #[must_use]
    pub fn is_on(&self, is_tracked: bool) -> bool {
        match self.coverage {
            Coverage::Off => false,
            Coverage::Auto => is_tracked,
            Coverage::Strict | Coverage::Lenient => true,
        }
    }

    /// Whether a change that nobody has recorded counts as the job's.
    #[must_use]
    pub fn assumes_changes(&self) -> bool {
        matches!(self.coverage, Coverage::Strict | Coverage::Lenient)
    }

    /// Files and directories of ckpt-run.
    #[must_use]
    pub fn own(&self) -> &[PathBuf] {
        &self.own
    }

    /// Whether the file `path` (absolute) is covered. `is_seen` is whether ckpt-run knows that the job has written it.
    #[must_use]
    pub fn covers(&self, path: &Path, is_seen: bool) -> bool {
        let is_below = |dir: &Path| path.starts_with(dir);
        self.coverage != Coverage::Off
            && !NOT_ON_DISK.iter().any(|dir| is_below(Path::new(dir)))
            && !self.own.iter().any(|own| is_below(own))
            && !self.excluded.is_match(path)
            && (is_seen || !self.excluded_unseen.is_match(path))
    }
}

/// A pattern without a slash matches in every directory, as in .gitignore.
fn patterns<'a>(all: impl Iterator<Item = &'a str>) -> Result<GlobSet> {
    let mut set = GlobSetBuilder::new();
    for pattern in all {
        let anywhere = if pattern.contains('/') { pattern.to_owned() } else { format!("**/{pattern}") };
        for pattern in [format!("{anywhere}/**"), anywhere] {
            let glob = GlobBuilder::new(&pattern).literal_separator(true).build();
            set.add(glob.with_context(|| format!("{pattern:?} is not a pattern for files"))?);
        }
    }
    Ok(set.build()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_exclude_files_and_directories() {
        let exclude = ["*.tmp", "/data/sets", "**/wandb/**"].map(str::to_owned).to_vec();
        let options = FileOptions { exclude, coverage: Coverage::Strict, ..FileOptions::default() };
        let rules = FileRules::new(&options, vec!["/work/.ckpt-run".into()]).unwrap();
        let covers = |path: &str| rules.covers(Path::new(path), true);
        assert!(covers("/work/log") && covers("/work/train.py") && covers("/data/other"));
        for path in ["/work/a.tmp", "/data/sets/1", "/work/wandb/run/x", "/proc/1", "/work/.ckpt-run/jobs/x"]
        {
            assert!(!covers(path), "{path}");
        }
        assert!(!covers("/work/.git/index") && !covers("/work/x/__pycache__/a.pyc"));
        assert!(!rules.covers(Path::new("/work/train.py"), false), "perhaps a person has edited it");
        let bad = FileOptions { exclude: vec!["[".into()], ..FileOptions::default() };
        assert!(FileRules::new(&bad, Vec::new()).unwrap_err().to_string().contains("is not a pattern"));
    }
}
