//! Unit tests that need a driver: each in a process of its own, since a process has one driver and one state of it.

use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::exports;

const ALONE: &str = "CKPT_TEST_ALONE";

/// simcuda, as `libcuda.so.1`.
fn driver_path() -> PathBuf {
    let default = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/simcuda/libcuda.so.1");
    let path = std::env::var_os("CKPT_TEST_LIBCUDA").map_or_else(default, PathBuf::from);
    assert!(path.is_file(), "{} is not there: call `cargo xtask test`", path.display());
    path
}

/// Runs the body of the calling test, whose name with its modules is `test`, in a process that has initialised the
/// driver.
pub fn alone(test: &str, body: impl FnOnce()) {
    if std::env::var_os(ALONE).is_some() {
        let path = driver_path();
        let name = CString::new(path.as_os_str().as_encoded_bytes()).expect("a path");
        // SAFETY: the path is NUL-terminated; simcuda's constructors may run at any time.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null(), "{} does not load", path.display());
        super::activate();
        // SAFETY: it takes a number.
        assert_eq!(unsafe { exports::cuInit(0) }, 0);
        body();
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let mut command = Command::new(std::env::current_exe().expect("this test's path"));
    command.args(["--exact", test]).env(ALONE, "1");
    command.env("SIMCUDA_DIR", directory.path()).env("SIMCUDA_MEMORY", "64MiB").env("SIMCUDA_DEVICES", "2");
    let output = command.output().expect("started");
    let said =
        [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat();
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}
