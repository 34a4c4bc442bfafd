//! Obstacles to `LD_PRELOAD` in a program: static linking, set-user-ID and set-group-ID (ld.so(8)).

use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Program header: the dynamic loader to use (elf(5)).
const PT_INTERP: u32 = 3;
/// The size of a program header of an ELF file of 64 bits.
const PROGRAM_HEADER_BYTES: u16 = 56;
/// The kernel accepts program headers of up to 64 KiB; programs have a dozen.
const MAX_PROGRAM_HEADERS: u16 = 1170;

/// The reason why a library cannot be preloaded into `program`, such as "is statically linked". For a script, its
/// interpreter counts. An unreadable program is taken for preloadable.
#[must_use]
pub fn obstacle(program: &Path) -> Option<&'static str> {
    let interpreter = interpreter_of(program);
    let program = interpreter.as_deref().unwrap_or(program);
    let file = File::open(program).ok()?;
    let metadata = file.metadata().ok()?;
    if metadata.mode() & libc::S_ISUID != 0 && metadata.uid() != rustix::process::getuid().as_raw() {
        return Some("has set-user-ID");
    }
    if metadata.mode() & libc::S_ISGID != 0 && metadata.gid() != rustix::process::getgid().as_raw() {
        return Some("has set-group-ID");
    }
    (!has_loader(&file)?).then_some("is statically linked")
}

/// The interpreter in the first line of a script.
fn interpreter_of(program: &Path) -> Option<PathBuf> {
    let mut start = [0; 256];
    let read = File::open(program).ok()?.read(&mut start).ok()?;
    let line = start[..read].strip_prefix(b"#!")?.split(|&byte| byte == b'\n').next()?;
    let path = line.trim_ascii().split(u8::is_ascii_whitespace).next()?;
    (!path.is_empty()).then(|| PathBuf::from(std::ffi::OsStr::from_bytes(path)))
}

/// Whether a 64-bit ELF file names a dynamic loader; `None` for other files.
fn has_loader(file: &File) -> Option<bool> {
    let mut header = [0; 64];
    file.read_exact_at(&mut header, 0).ok()?;
    if !header.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let half = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
    let at = u64::from_le_bytes(header[32..40].try_into().ok()?);
    let (size, count) = (half(54), half(56));
    if size != PROGRAM_HEADER_BYTES || count > MAX_PROGRAM_HEADERS {
        return None;
    }
    let mut headers = vec![0; usize::from(size) * usize::from(count)];
    file.read_exact_at(&mut headers, at).ok()?;
    let mut kinds = headers.chunks_exact(usize::from(size)).map(|one| [one[0], one[1], one[2], one[3]]);
    Some(kinds.any(|kind| u32::from_le_bytes(kind) == PT_INTERP))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    /// An ELF file with program headers of these types.
    fn elf(kinds: &[u32]) -> Vec<u8> {
        let mut bytes = vec![0; 64];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[32] = 64;
        bytes[54] = 56;
        bytes[56] = u8::try_from(kinds.len()).unwrap();
        for kind in kinds {
            let mut header = [0; 56];
            header[..4].copy_from_slice(&kind.to_le_bytes());
            bytes.extend(header);
        }
        bytes
    }

    #[test]
    fn static_programs_are_found_behind_scripts_too() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, content: &[u8]| {
            let path = dir.path().join(name);
            fs::write(&path, content).unwrap();
            path
        };
        let fixed = write("static", &elf(&[1, 2]));
        assert_eq!(obstacle(&fixed), Some("is statically linked"));
        assert_eq!(obstacle(&write("dynamic", &elf(&[6, PT_INTERP, 1]))), None);
        let script = write("script", format!("#! {} -e\n", fixed.display()).as_bytes());
        assert_eq!(obstacle(&script), Some("is statically linked"));
        assert_eq!(obstacle(&write("text", b"#!\n")), None);
        assert_eq!(obstacle(&write("cut", &elf(&[1, 2])[..100])), None);
        assert_eq!(obstacle(&std::env::current_exe().unwrap()), None);
    }

    #[test]
    fn set_user_id_of_another_user_is_an_obstacle() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("program");
        fs::write(&path, elf(&[PT_INTERP])).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o4755)).unwrap();
        // Set-user-ID of the user itself adds no privileges.
        assert_eq!(obstacle(&path), None);
        if rustix::process::getuid().is_root() {
            std::os::unix::fs::chown(&path, Some(1), None).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o4755)).unwrap();
            assert_eq!(obstacle(&path), Some("has set-user-ID"));
        }
    }
}
