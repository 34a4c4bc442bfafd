//! Link options of libckpt_interpose.so.

use std::path::PathBuf;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // What the library exports is for the application; its own references must not be pre-empted. It exports functions
    // only. (Zig's linker has no -Bsymbolic-functions.)
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    // A thread of ours runs in here: the code has to stay mapped whatever dlclose says.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // With the unwinder inside, no libgcc_s.so.1 is loaded ahead of the one that the application brings
    // along, which may be newer, and none is needed where there is none.
    if let Some(archive) = static_unwinder() {
        println!("cargo::rustc-link-search=native={}", archive.display());
        println!("cargo::rustc-link-lib=static=gcc_eh");
    }
}

/// The directory of the C compiler's libgcc_eh.a, if it has one. Without it the library links as usual.
fn static_unwinder() -> Option<PathBuf> {
    let answer = Command::new("cc").arg("-print-file-name=libgcc_eh.a").output().ok()?;
    let archive = PathBuf::from(String::from_utf8(answer.stdout).ok()?.trim());
    archive.is_file().then_some(())?;
    Some(archive.parent()?.to_path_buf())
}
