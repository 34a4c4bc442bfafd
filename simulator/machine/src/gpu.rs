//! The GPUs of the machine: `SIMCUDA_DEVICES` equal ones, or those that a file lists.
//!
//! The file `gpus` in `SIMCUDA_DIR` has a line for each GPU: its ID (a number, from which its UUID follows), its memory
//! (`64MiB`) and its name. It is read when a process initialises the driver or NVML, and again when the driver restores
//! a process. So a test that replaces the file gives a process another machine.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use crate::config::{Config, parse_bytes};

/// The name of the file.
const FILE: &str = "gpus";

/// The name of every GPU that no file lists.
const NAME: &str = "SimCUDA Device sm_90";

/// A GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// Its number, wherever it stands in the machine's order: from it follow its UUID and where its memory lies.
    pub id: usize,
    /// Its memory.
    pub memory_bytes: u64,
    /// Its name, which stands for the type of its chip.
    pub name: String,
    /// Its UUID.
    pub uuid: [u8; 16],
}

impl Gpu {
    fn new(machine: &Path, id: usize, memory_bytes: u64, name: &str) -> Self {
        Self { id, memory_bytes, name: name.to_owned(), uuid: uuid(machine, id) }
    }

    /// Its UUID as NVML and `CUDA_VISIBLE_DEVICES` write it.
    #[must_use]
    pub fn uuid_text(&self) -> String {
        let hex: String = self.uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
    }
}

impl Config {
    /// The machine's GPUs in their order, as they are now.
    ///
    /// # Errors
    /// The file cannot be read, or has a line that is none.
    pub fn gpus(&self) -> Result<Vec<Gpu>, String> {
        let path = self.directory.join(FILE);
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let gpu = |id| Gpu::new(&self.directory, id, self.memory_bytes, NAME);
                return Ok((0..self.devices).map(gpu).collect());
            }
            Err(error) => return Err(format!("{}: {error}", path.display())),
        };
        let bad = |line| format!("{}: cannot use the line {line:?}", path.display());
        text.lines().map(|line| parse(&self.directory, line).ok_or_else(|| bad(line))).collect()
    }
}

fn parse(machine: &Path, line: &str) -> Option<Gpu> {
    let (id, rest) = line.split_once(' ')?;
    let (memory, name) = rest.split_once(' ')?;
    Some(Gpu::new(machine, id.parse().ok()?, parse_bytes(memory)?, name))
}

/// The positions of the GPUs that a process sees, in its own order. The list ends at the first entry that is none (CUDA
/// programming guide, "CUDA Environment Variables").
#[must_use]
pub fn visible(gpus: &[Gpu], listed: Option<&str>) -> Vec<usize> {
    let Some(listed) = listed else { return (0..gpus.len()).collect() };
    let position = |entry: &str| match entry.parse() {
        Ok(position) => Some(position).filter(|position| *position < gpus.len()),
        Err(_) if entry.starts_with("GPU-") => gpus.iter().position(|gpu| gpu.uuid_text().starts_with(entry)),
        Err(_) => None,
    };
    listed.split(',').map_while(|entry| position(entry.trim())).collect()
}

/// The same in every process that shares the GPU, another one for each GPU.
fn uuid(machine: &Path, id: usize) -> [u8; 16] {
    // However the directory is spelt, it is the same GPU.
    let canonical = machine.canonicalize();
    let mut hasher = blake3::Hasher::new();
    hasher.update(canonical.as_deref().unwrap_or(machine).as_os_str().as_encoded_bytes());
    hasher.update(&[0]);
    hasher.update(&(id as u64).to_le_bytes());
    let hash = hasher.finalize();
    *hash.as_bytes().first_chunk().expect("a hash has 32 bytes")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(directory: &Path) -> Config {
        let config = Config::from_environment().unwrap();
        Config { directory: directory.to_owned(), devices: 3, memory_bytes: 1 << 20, ..config }
    }

    #[test]
    fn a_file_lists_the_gpus() {
        let directory = tempfile::tempdir().unwrap();
        let config = machine(directory.path());
        let equal = config.gpus().unwrap();
        assert_eq!(equal.iter().map(|gpu| gpu.id).collect::<Vec<_>>(), [0, 1, 2]);
        fs::write(directory.path().join(FILE), "2 64MiB Other Chip\n0 1MiB SimCUDA Device sm_90\n").unwrap();
        let listed = config.gpus().unwrap();
        assert_eq!((listed[0].name.as_str(), listed[0].memory_bytes), ("Other Chip", 64 << 20));
        assert_eq!(listed[0].uuid, equal[2].uuid, "it follows from the ID");
        assert_eq!(listed[1], equal[0]);
        fs::write(directory.path().join(FILE), "2 lots of it\n").unwrap();
        assert!(config.gpus().unwrap_err().contains("\"2 lots of it\""));
    }

    #[test]
    fn uuids_differ_by_gpu_and_directory() {
        let one = Path::new("/one");
        assert_eq!(uuid(one, 0), uuid(one, 0));
        assert_ne!(uuid(one, 0), uuid(one, 1));
        assert_ne!(uuid(one, 0), uuid(Path::new("/other"), 0));
    }

    #[test]
    fn a_process_sees_what_is_listed() {
        let directory = tempfile::tempdir().unwrap();
        let gpus = machine(directory.path()).gpus().unwrap();
        let third = gpus[2].uuid_text();
        for (listed, seen) in [
            (None, vec![0, 1, 2]),
            (Some(""), vec![]),
            (Some("1"), vec![1]),
            (Some("2, 0"), vec![2, 0]),
            (Some("1,-1,0"), vec![1]),
            (Some("0,7,1"), vec![0]),
            (Some(&third[..12]), vec![2]),
        ] {
            assert_eq!(visible(&gpus, listed), seen, "{listed:?}");
        }
    }
}
