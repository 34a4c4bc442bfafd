//! Entry points of a driver that is newer than the table.
//!
//! Calls of them go straight to the driver: they do not wait at the gate, and what they create is not recorded. A
//! lookup of one is recorded, as a hint if the process is not restored correctly.

use std::ffi::{CStr, CString, c_char};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use super::entry_points;

/// The first ones that were found.
static FOUND: [AtomicPtr<c_char>; 32] = [const { AtomicPtr::new(null_mut()) }; 32];

/// Whether a name may be one of the driver's that the table does not have: `cu` and a capital letter, which those of
/// NVIDIA's other libraries do not begin with.
pub(super) fn may_be(name: &CStr) -> bool {
    let name = name.to_bytes();
    matches!(name, [b'c', b'u', b'A'..=b'Z', ..]) && entry_points::index_of(name).is_none()
}

/// Notes that the driver has it, once.
pub(super) fn note(name: &CStr) {
    if found().any(|known| known == name) {
        return;
    }
    let name = name.to_owned().into_raw();
    let is_free =
        |slot: &AtomicPtr<c_char>| slot.compare_exchange(null_mut(), name, Relaxed, Relaxed).is_ok();
    if !FOUND.iter().any(is_free) {
        // SAFETY: it was made above, and no other thread has seen it.
        drop(unsafe { CString::from_raw(name) });
    }
}

fn found() -> impl Iterator<Item = &'static CStr> {
    let names = FOUND.iter().map(|slot| slot.load(Relaxed)).take_while(|name| !name.is_null());
    // SAFETY: what is in a slot was leaked in `note` and is never changed.
    names.map(|name| unsafe { CStr::from_ptr(name) })
}

/// A line for a log, if there is something to say.
pub(super) fn remark() -> Option<String> {
    let names: Vec<_> = found().map(CStr::to_string_lossy).collect();
    let line = || {
        format!(
            "it has looked up entry points of a newer CUDA driver, whose effect is not known: {}",
            names.join(", ")
        )
    };
    (!names.is_empty()).then(line)
}

#[cfg(test)]
mod tests {
    use std::ffi::{c_int, c_void};

    use super::*;
    use crate::cuda::{hooks, proc_address};

    #[test]
    fn only_names_of_the_driver_that_are_not_in_the_table_may_be_newer() {
        for name in [c"cuFutureCall", c"cuMemAlloc_v9"] {
            assert!(may_be(name), "{name:?}");
        }
        for name in
            [c"cuInit", c"cuMemAlloc", c"cudaMalloc", c"cublasCreate_v2", c"cuptiActivityEnable", c"cu", c""]
        {
            assert!(!may_be(name), "{name:?}");
        }
    }

    /// A driver that is newer than the table, as cuGetProcAddress.
    unsafe extern "C" fn hands_out(
        _: *const c_char,
        out: *mut *mut c_void,
        _: c_int,
        _: u64,
    ) -> cuda_abi::types::CUresult {
        // SAFETY: the test passes a variable.
        unsafe { out.write(std::ptr::without_provenance_mut(0x1000)) };
        0
    }

    #[test]
    fn what_a_program_finds_in_a_newer_driver_is_noted_whatever_the_way() {
        let test = "cuda::unknown_entry_points::tests::what_a_program_finds_in_a_newer_driver_is_noted_whatever_the_way";
        crate::cuda::testing::alone(test, || {
            let directory = tempfile::tempdir().expect("a directory");
            let newer = directory.path().join("libcuda.so.999");
            let source = directory.path().join("newer.c");
            std::fs::write(&source, "int cuFutureCall(void) { return 0; }\n").expect("written");
            let mut cc = std::process::Command::new("cc");
            cc.args(["-shared", "-fPIC", "-o"]).args([&newer, &source]);
            assert!(cc.status().expect("cc").success());
            let path = CString::new(newer.as_os_str().as_encoded_bytes()).expect("a path");
            // SAFETY: the path is NUL-terminated; the library has no constructors.
            let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
            assert_eq!(remark(), None);
            let look = |name: &CStr| {
                // SAFETY: the handle was opened just now, and is never closed.
                unsafe { hooks::dlsym(handle, name.as_ptr()) }
            };
            assert!(look(c"cuMissingCall").is_null());
            assert_eq!(remark(), None);
            assert!(!look(c"cuFutureCall").is_null());
            assert!(remark().is_some_and(|line| line.ends_with(": cuFutureCall")));
            let mut out = null_mut();
            let name = c"cuLaterCall".as_ptr();
            // SAFETY: a played function, a local variable.
            unsafe { proc_address::cuGetProcAddress(hands_out, name, &raw mut out, 99000, 0) };
            assert_eq!(out.addr(), 0x1000);
            assert!(remark().is_some_and(|line| line.ends_with(": cuFutureCall, cuLaterCall")));
        });
    }

    #[test]
    fn names_are_noted_once_as_long_as_there_is_room() {
        assert_eq!(remark(), None);
        for name in [c"cuFutureCall", c"cuOther", c"cuFutureCall"] {
            note(name);
        }
        assert!(remark().is_some_and(|line| line.ends_with(": cuFutureCall, cuOther")));
        for number in 0..FOUND.len() {
            note(&CString::new(format!("cuMore{number}")).expect("a name"));
        }
        assert_eq!(found().count(), FOUND.len());
    }
}
