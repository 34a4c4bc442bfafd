//! Builds the library that is loaded into CRIU. The launcher contains it, so that nothing else has to be installed.

use std::env::{var, var_os};
use std::path::Path;
use std::process::Command;

const SOURCE: &str = "src/criu/library";

fn main() {
    println!("cargo::rerun-if-changed={SOURCE}");
    let of_cargo = |name: &str| var(name).unwrap_or_else(|_| panic!("cargo sets {name}"));
    let library = Path::new(&of_cargo("OUT_DIR")).join("libckpt_criu.so");
    let mut rustc = Command::new(of_cargo("RUSTC"));
    rustc.args(["--crate-name", "ckpt_criu", "--crate-type", "cdylib", "--edition", "2024"]);
    rustc.args(["-Copt-level=s", "-Cpanic=abort", "-Cstrip=symbols", "--target", &of_cargo("TARGET")]);
    if let Some(linker) = var_os("RUSTC_LINKER") {
        rustc.arg("-C").arg(format!("linker={}", linker.to_string_lossy()));
    }
    rustc.arg("-o").arg(&library).arg(Path::new(SOURCE).join("entry.rs"));
    let status = rustc.status().unwrap_or_else(|error| panic!("cannot run {rustc:?}: {error}"));
    assert!(status.success(), "{rustc:?} failed: {status}");
}
