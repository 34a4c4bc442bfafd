//! The driver's device files: whether a process has some without having initialised the driver, and what becomes of them
//! in the child of a fork.
//!
//! The child of a process with a driver inherits its descriptors of `/dev/nvidia*` and its mappings of them: the mappings
//! are not `VM_DONTCOPY` (open-gpu-kernel-modules, kernel-open/nvidia/nv-mmap.c). CRIU refuses both, so that a job with
//! the workers of a DataLoader could not be saved. The driver does not work in the child in any case: its calls fail
//! (CUDA programming guide, "Initialization"). So the child gets `/dev/null` in the place of each descriptor, under the
//! same number, and memory of its own in the place of each mapping. That memory has the protection that the mapping had:
//! what the driver does at the child's exit must not end it by a signal.
//!
//! Memory of the GPU that is registered with another device must not be moved, so that a process with such a device open
//! is not taken off its GPUs ([`obstacle`]).

use std::ffi::c_int;
use std::fs;
use std::os::unix::ffi::OsStrExt;
#[cfg(feature = "faults")]
use std::sync::OnceLock;

use ckpt_protocol::devices;

use crate::process;

/// What the paths of the driver's device files begin with.
const DEVICE_FILES: &str = "/dev/nvidia";

/// The simulator's: what the paths of descriptors begin with, separated by commas, and behind a semicolon the same for
/// mappings. No machine without a GPU has such files under their own names.
#[cfg(feature = "faults")]
static SIMULATED: OnceLock<(&str, &str)> = OnceLock::new();

/// The directory that stands for `/dev/` when devices are looked for with which memory may be registered.
#[cfg(feature = "faults")]
static SIMULATED_DEVICES: OnceLock<&str> = OnceLock::new();

/// Reads the environment: from the constructor only.
#[cfg(feature = "faults")]
pub(super) fn arm() {
    let simulated = process::variable(b"CKPT_TEST_DEVICE_FILES");
    if let Some(simulated) = simulated.and_then(|prefixes| str::from_utf8(prefixes).ok()?.split_once(';')) {
        let _ = SIMULATED.set(simulated);
    }
    let directory = process::variable(b"CKPT_TEST_DEVICES");
    if let Some(directory) = directory.and_then(|directory| str::from_utf8(directory).ok()) {
        let _ = SIMULATED_DEVICES.set(directory);
    }
}

/// What the paths of descriptors and of mappings begin with.
fn prefixes() -> (&'static str, &'static str) {
    #[cfg(feature = "faults")]
    if let Some(simulated) = SIMULATED.get() {
        return *simulated;
    }
    (DEVICE_FILES, DEVICE_FILES)
}

/// In the child of a fork whose parent has initialised the driver. What cannot be replaced stays, and a checkpoint
/// refuses it by name.
pub(super) fn replace_in_child() {
    let (of_descriptors, of_mappings) = prefixes();
    descriptors(of_descriptors).into_iter().for_each(put_null);
    let maps = process::mappings().unwrap_or_default();
    maps.lines().filter_map(|line| Mapping::parse(line, of_mappings)).for_each(|mapping| mapping.replace());
}

/// Whether this process has a device file open.
pub(super) fn are_open() -> bool {
    !descriptors(prefixes().0).is_empty()
}

/// The reason why the process cannot be saved, if it is a device with which memory of the GPU may be registered: open, or
/// mapped. The launcher has looked for them before ([`devices`]); this is for those that were opened since.
pub(super) fn obstacle() -> Option<String> {
    let found = |path: &str| devices::find(path, directory_of_devices());
    let entries = fs::read_dir("/proc/self/fd").ok()?;
    let mut targets = entries.flatten().filter_map(|entry| fs::read_link(entry.path()).ok());
    let mut open = || Some((targets.find_map(|target| found(target.to_str()?))?, "open"));
    let maps = process::mappings().unwrap_or_default();
    let mapped = || Some((maps.lines().find_map(|line| found(devices::path_of_mapping(line)?))?, "mapped"));
    let (device, how) = open().or_else(mapped)?;
    Some(format!("it has a device {how}, {}: {}", device.what, device.remedy))
}

fn directory_of_devices() -> &'static str {
    #[cfg(feature = "faults")]
    if let Some(directory) = SIMULATED_DEVICES.get() {
        return directory;
    }
    "/dev/"
}

fn has_prefix(path: &[u8], prefixes: &str) -> bool {
    prefixes.split(',').any(|prefix| path.starts_with(prefix.as_bytes()))
}

/// Numbers of the descriptors whose files have one of these prefixes.
fn descriptors(prefixes: &str) -> Vec<c_int> {
    let Ok(entries) = fs::read_dir("/proc/self/fd") else { return Vec::new() };
    let found = entries.flatten().filter(|entry| {
        fs::read_link(entry.path()).is_ok_and(|path| has_prefix(path.as_os_str().as_bytes(), prefixes))
    });
    found.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Puts `/dev/null` in the place of a descriptor. It is closed by an exec if the descriptor would have been.
fn put_null(number: c_int) {
    // SAFETY: F_GETFD takes no argument.
    let flags = unsafe { libc::fcntl(number, libc::F_GETFD) };
    let flags = if flags & libc::FD_CLOEXEC == 0 { 0 } else { libc::O_CLOEXEC };
    // SAFETY: a NUL-terminated path.
    let null = unsafe { libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
    if null < 0 {
        return;
    }
    // SAFETY: the numbers are of descriptors of this process, whose only thread this is. The driver, to which `number`
    // belongs, does not work in the child of a fork.
    unsafe { libc::dup3(null, number, flags) };
    // SAFETY: opened above, and known to nothing else.
    unsafe { libc::close(null) };
}

/// A mapping of a device file, with its protection.
#[derive(Debug, PartialEq, Eq)]
struct Mapping {
    begin: usize,
    end: usize,
    protection: c_int,
}

impl Mapping {
    /// Reads a line of `/proc/PID/maps`, see proc_pid_maps(5).
    fn parse(line: &str, prefixes: &str) -> Option<Self> {
        let mut fields = line.split(' ');
        let (begin, end) = fields.next()?.split_once('-')?;
        let permissions = fields.next()?;
        let path = devices::path_of_mapping(line)?;
        let bit = |letter: char, bit: c_int| if permissions.contains(letter) { bit } else { 0 };
        has_prefix(path.as_bytes(), prefixes).then_some(())?;
        Some(Self {
            begin: usize::from_str_radix(begin, 16).ok()?,
            end: usize::from_str_radix(end, 16).ok()?,
            protection: bit('r', libc::PROT_READ) | bit('w', libc::PROT_WRITE) | bit('x', libc::PROT_EXEC),
        })
    }

    /// Puts zeroed memory in its place, which takes space only where something is written.
    fn replace(&self) {
        let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let at = std::ptr::without_provenance_mut(self.begin);
        // SAFETY: the range is a mapping of a device file, which only the driver uses, and the driver does not work in
        // the child of a fork. This is the process's only thread.
        unsafe { libc::mmap(at, self.end - self.begin, self.protection, flags, -1, 0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_of_device_files_are_found() {
        let line = "7f1c20000000-7f1c20200000 rw-s 00000000 00:06 512                        /dev/nvidia0";
        let found = Mapping::parse(line, DEVICE_FILES).unwrap();
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        assert_eq!(found, Mapping { begin: 0x7f1c_2000_0000, end: 0x7f1c_2020_0000, protection });
        for other in [
            "7f1c20000000-7f1c20200000 rw-s 00000000 00:06 512    /dev/zero (deleted)",
            "7f1c20000000-7f1c20200000 rw-p 00000000 00:00 0 ",
            "7f1c20000000-7f1c20200000 rw-p 00000000 00:00 0",
            "",
        ] {
            assert_eq!(Mapping::parse(other, DEVICE_FILES), None, "{other}");
        }
    }

    #[test]
    fn a_descriptor_and_a_mapping_are_replaced() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(8192).unwrap();
        let path = file.path().to_str().unwrap().to_owned();
        let number = std::os::fd::AsRawFd::as_raw_fd(file.as_file());
        let flags = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), 8192, flags, libc::MAP_SHARED, number, 0) };
        let at = at.cast::<u8>();
        // SAFETY: mapped above, with this length.
        unsafe { at.write(7) };
        assert_eq!(descriptors(&path), [number]);
        put_null(number);
        assert!(descriptors(&path).is_empty(), "it is /dev/null");
        assert_eq!(
            fs::read_link(format!("/proc/self/fd/{number}")).unwrap(),
            std::path::Path::new("/dev/null")
        );
        // SAFETY: F_GETFD takes no argument.
        assert_eq!(unsafe { libc::fcntl(number, libc::F_GETFD) }, libc::FD_CLOEXEC);
        let maps = process::mappings().unwrap();
        let found: Vec<_> = maps.lines().filter_map(|line| Mapping::parse(line, &path)).collect();
        assert_eq!(found.len(), 1);
        found[0].replace();
        // SAFETY: still mapped, as private memory.
        assert_eq!(unsafe { at.read() }, 0);
        // SAFETY: as above.
        unsafe { at.write(8) };
        assert_eq!(fs::read(file.path()).unwrap()[0], 7, "the file is mapped no more");
        // SAFETY: the mapping of this test.
        unsafe { libc::munmap(at.cast(), 8192) };
    }
}
