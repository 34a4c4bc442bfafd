//! What the tests with programs share: the library, the driver, programs in C, and a launcher that the test plays.

#![allow(dead_code, reason = "each test is a crate of its own and uses a part of this")]

pub mod launcher;
pub mod program;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{env, fs};

/// Longer than anything here takes on a machine that does other things too.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(300);

/// The interposer, built with this test.
pub fn library() -> PathBuf {
    let test = env::current_exe().expect("this test's path");
    let deps = test.parent().expect("a directory");
    let built = |path: PathBuf| Some((fs::metadata(&path).ok()?.modified().ok()?, path));
    let places = [deps.join("libckpt_interpose.so"), deps.with_file_name("libckpt_interpose.so")];
    places.into_iter().filter_map(built).max().expect("libckpt_interpose.so is built with this test").1
}

/// simcuda, as `libcuda.so.1`.
pub fn driver() -> PathBuf {
    let default = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/simcuda/libcuda.so.1");
    let path = env::var_os("CKPT_TEST_LIBCUDA").map_or_else(default, PathBuf::from);
    assert!(path.is_file(), "{} is not there: call `cargo xtask test`", path.display());
    path
}

/// A directory for simulated devices.
pub fn directory() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("interpose-test-").tempdir_in("/dev/shm").expect("a directory")
}

pub fn until<T>(what: &str, mut attempt: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + TEST_TIMEOUT;
    loop {
        if let Some(done) = attempt() {
            return done;
        }
        assert!(Instant::now() < end, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
