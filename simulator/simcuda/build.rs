//! Link options of libsimcuda.so.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // What cuGetProcAddress returns is this library's own code, also below an interposer that exports the
    // same names.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    // Worker threads run in here: the code has to stay mapped whatever dlclose says.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
