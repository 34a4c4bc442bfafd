//! With what a job was started: the scripts that its command line names, as they were then. A resumed job runs the code that
//! it had loaded, so a script that was changed since has no effect, and its user has to know that.

use crate::files::inventory::nanoseconds;
use ckpt_snapshot::{JobDir, read_regular, write_atomically};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::fs;
use std::path::Path;

/// In the job's directory.
const FILE: &str = "started-with.json";
/// A longer record is damaged, and a longer file is no script (bytes).
const MAX_BYTES: u64 = 16 << 20;
/// Names of files with these ends are scripts; so is what begins with `#!`.
const ENDS: [&str; 9] = ["py", "sh", "bash", "jl", "R", "lua", "pl", "rb", "js"];

/// A script.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Script {
    /// As the command line names it.
    path: String,
    bytes: u64,
    modified_ns: i64,
    /// BLAKE3, hexadecimal; with a key for an encrypted job, so that the store does not tell what a script contains.
    hash: String,
}

/// Records the scripts of a command that starts from the beginning in the working directory. A failure is only logged:
/// nothing but a message depends on the record.
pub fn record(dir: &JobDir, argv: &[OsString]) {
    let key = dir.file_key(FILE);
    let scripts: Vec<_> =
        argv.iter().filter_map(|argument| Script::read(argument.to_str()?, key.as_ref())).collect();
    let written = serde_json::to_vec(&scripts)
        .map_err(std::io::Error::from)
        .and_then(|text| write_atomically(&dir.path().join(FILE), &text));
    if let Err(error) = written {
        tracing::debug!("cannot record the scripts of the job: {error}");
    }
}

/// The scripts of the job that have changed since it was started.
#[must_use]
pub fn changed_scripts(dir: &JobDir) -> Vec<String> {
    let text = read_regular(&dir.path().join(FILE), MAX_BYTES).unwrap_or_default();
    let scripts: Vec<Script> = serde_json::from_slice(&text).unwrap_or_default();
    let key = dir.file_key(FILE);
    scripts.into_iter().filter(|script| script.has_changed(key.as_ref())).map(|script| script.path).collect()
}

impl Script {
    /// `None` if there is no script of that name.
    fn read(path: &str, key: Option<&[u8; 32]>) -> Option<Self> {
        let meta = fs::metadata(path).ok()?;
        if !meta.is_file() || meta.len() > MAX_BYTES {
            return None;
        }
        let content = read_regular(Path::new(path), MAX_BYTES).ok()?;
        let end = Path::new(path).extension().and_then(|end| end.to_str());
        let is_script = end.is_some_and(|end| ENDS.contains(&end)) || content.starts_with(b"#!");
        is_script.then(|| Self {
            path: path.to_owned(),
            bytes: meta.len(),
            modified_ns: meta.modified().map(nanoseconds).unwrap_or_default(),
            hash: key
                .map_or_else(|| blake3::hash(&content), |key| blake3::keyed_hash(key, &content))
                .to_hex()
                .to_string(),
        })
    }

    /// A script that is missing now, or that was only touched, has not changed.
    fn has_changed(&self, key: Option<&[u8; 32]>) -> bool {
        Self::read(&self.path, key).is_some_and(|now| {
            (now.bytes, now.modified_ns) != (self.bytes, self.modified_ns) && now.hash != self.hash
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckpt_snapshot::{JobKey, StoreRoot};
    use std::time::{Duration, SystemTime};

    #[test]
    fn changed_scripts_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let job = StoreRoot::open_or_create(&dir.path().join("store")).unwrap();
        let job = job.job(&JobKey::named("job").unwrap());
        drop(job.lock_to_run(|_| ()).unwrap());
        assert!(changed_scripts(&job).is_empty(), "nothing is known");
        let at = |name: &str| dir.path().join(name);
        let path = |name: &str| at(name).to_str().unwrap().to_owned();
        for name in ["train.py", "touched.sh", "tool", "data.csv", "gone.py"] {
            fs::write(at(name), if name == "tool" { "#!/bin/sh\n1" } else { "1" }).unwrap();
        }
        let argv = ["python3", "train.py", "touched.sh", "tool", "data.csv", "gone.py", "none.py"];
        record(&job, &argv.map(|name| path(name).into()));
        assert!(changed_scripts(&job).is_empty());
        for name in ["train.py", "tool", "data.csv"] {
            fs::write(at(name), "#!/bin/sh\n other").unwrap();
        }
        let touched = fs::File::options().write(true).open(at("touched.sh")).unwrap();
        touched.set_modified(SystemTime::now() + Duration::from_secs(60)).unwrap();
        fs::remove_file(at("gone.py")).unwrap();
        assert_eq!(changed_scripts(&job), ["train.py", "tool"].map(path));
    }
}
