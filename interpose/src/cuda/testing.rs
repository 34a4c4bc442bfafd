//! Support for unit tests that need a driver. Each runs in a process of its own, since a process has one driver with
//! one state.

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

/// The same test once more, in a process of its own with these settings. Whether this is that process, which has the
/// driver loaded then. `test` is the calling test's name with its modules.
pub fn is_alone(test: &str, settings: &[(&str, &str)]) -> bool {
    if std::env::var(ALONE).is_ok_and(|alone| alone == test) {
        load_driver();
        return true;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let mut command = Command::new(std::env::current_exe().expect("this test's path"));
    command.args([test, "--exact", "--include-ignored", "--nocapture"]).env(ALONE, test);
    command.env_remove("CKPT_CAPTURE").env("SIMCUDA_DIR", directory.path()).envs(settings.iter().copied());
    let output = command.output().expect("started");
    let (said, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && said.contains("1 passed"), "{test} on its own:\n{said}\n{errors}");
    print!("{said}");
    false
}

/// Runs the body of the calling test in a process whose program has initialised the driver.
pub fn alone(test: &str, body: impl FnOnce()) {
    alone_under("580", test, body);
}

/// As [`alone`], with a release of the driver.
pub fn alone_under(release: &str, test: &str, body: impl FnOnce()) {
    let environment = [("SIMCUDA_MEMORY", "64MiB"), ("SIMCUDA_DEVICES", "2"), ("SIMCUDA_DRIVER", release)];
    if is_alone(test, &environment) {
        super::activate();
        // SAFETY: it takes a number.
        assert_eq!(unsafe { exports::cuInit(0) }, 0);
        body();
    }
}

fn load_driver() {
    let path = driver_path();
    let name = CString::new(path.as_os_str().as_encoded_bytes()).expect("a path");
    // SAFETY: the path is NUL-terminated; simcuda's constructors may run at any time.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
    assert!(!handle.is_null(), "{} does not load", path.display());
}
