//! Relative paths that stay inside their base directory.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::{Component, Path};

/// A path below a snapshot's directory: not empty, not absolute, no `.` or `..`, no NUL. Manifests are untrusted
/// input: deserialising any other path fails.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String")]
pub struct RelPath(String);

/// Why a string is not a [`RelPath`].
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("the path {0:?} {stays_not}", stays_not = STAYS_NOT)]
pub struct RelPathError(pub String);

const STAYS_NOT: &str = "does not stay inside the snapshot's directory";

impl RelPathError {
    /// The invalid path that caused a JSON error, if one did. serde keeps only the text of such an error.
    pub(crate) fn within(error: &serde_json::Error) -> Option<Self> {
        let text = error.to_string();
        let path = text.strip_prefix("the path ")?.split_once(STAYS_NOT)?.0.trim_end();
        Some(Self(path.trim_matches('"').to_owned()))
    }
}

impl RelPath {
    /// Checks `path`.
    ///
    /// # Errors
    /// If the path is empty, absolute, not normalised, or leaves its base directory.
    pub fn new(path: impl Into<String>) -> Result<Self, RelPathError> {
        let path = path.into();
        let normal = Path::new(&path).components().all(|part| matches!(part, Component::Normal(_)));
        // `components` hides `a//b` and `a/./b`. Only the normal form is accepted, so each file has one name.
        let plain = path.split('/').all(|part| !part.is_empty() && part != "." && part != "..");
        if normal && plain && !path.contains('\0') { Ok(Self(path)) } else { Err(RelPathError(path)) }
    }

    /// The path as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl AsRef<Path> for RelPath {
    fn as_ref(&self) -> &Path {
        Path::new(&self.0)
    }
}

impl fmt::Display for RelPath {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

impl TryFrom<String> for RelPath {
    type Error = RelPathError;
    fn try_from(path: String) -> Result<Self, RelPathError> {
        Self::new(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_paths_inside_the_directory() {
        for good in ["a", "images/pages-1.img", "a/b/c", "..a", "a..b"] {
            assert_eq!(RelPath::new(good).unwrap().as_str(), good);
        }
    }

    #[test]
    fn refuses_paths_outside_the_directory() {
        for bad in ["", "/", "/etc/passwd", "..", "../x", "a/../../x", "a/..", "./a", "a//b", "a/", "a\0b"] {
            assert!(RelPath::new(bad).is_err(), "{bad:?}");
        }
    }
}
