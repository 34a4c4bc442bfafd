//! What the tests with programs in C share: the library under test and the programs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The library, built with this test.
pub fn library() -> PathBuf {
    let test = std::env::current_exe().expect("this test's path");
    let deps = test.parent().expect("a directory");
    let built = |path: PathBuf| Some((fs::metadata(&path).ok()?.modified().ok()?, path));
    let places = [deps.join("libsimcuda.so"), deps.with_file_name("libsimcuda.so")];
    places.into_iter().filter_map(built).max().expect("libsimcuda.so is built with this test").1
}

/// Compiles `tests/programs/NAME.c`.
pub fn compile(name: &str) -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/programs/{name}.c"));
    let program = directory.join(name);
    // Another run of the tests may do the same at this moment.
    let fresh = directory.join(format!("{name}.{}", std::process::id()));
    let arguments = ["-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"];
    let status = Command::new("cc").args(arguments).args([&fresh, &source]).arg("-ldl").status();
    assert!(status.expect("a C compiler").success());
    fs::rename(&fresh, &program).expect("a program");
    program
}
