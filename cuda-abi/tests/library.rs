//! Holds the table against a driver's symbols, and calls through [`Api`].
//!
//! `CUDA_ABI_LIBCUDA` names the driver for the test that is ignored otherwise; the others build their libraries.

use std::path::{Path, PathBuf};
use std::process::Command;

use cuda_abi::api::Api;
use cuda_abi::by_symbol;
use cuda_abi::sys::CUresult;
use object::{Object, ObjectSymbol};

/// Builds a shared library of `source` in `directory`.
fn build(directory: &Path, source: &str) -> PathBuf {
    let (file, library) = (directory.join("driver.c"), directory.join("libdriver.so"));
    std::fs::write(&file, source).unwrap();
    let status =
        Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&file).status().unwrap();
    assert!(status.success());
    library
}

/// The driver API's symbols that a library defines and the table lacks.
fn unknown_symbols(library: &Path) -> Vec<String> {
    let bytes = std::fs::read(library).unwrap();
    let file = object::File::parse(&*bytes).unwrap();
    let defined = file.dynamic_symbols().filter(ObjectSymbol::is_definition);
    let names = defined.map(|symbol| symbol.name().unwrap().to_owned());
    let entry_point =
        |name: &String| name.strip_prefix("cu").is_some_and(|rest| rest.starts_with(char::is_uppercase));
    names.filter(entry_point).filter(|name| by_symbol(name).is_none()).collect()
}

#[test]
fn a_symbol_that_the_table_lacks_is_found() {
    let directory = tempfile::tempdir().unwrap();
    let source = "extern int cuImported(void);
        int cuInit(unsigned flags) { return flags ? cuImported() : 0; }
        int cuMemcpyHtoD_v2_ptds(void) { return 0; }
        int cudbgNoEntryPoint(void) { return 0; }
        int cuNewCall_v9(void) { return 0; }";
    assert_eq!(unknown_symbols(&build(directory.path(), source)), ["cuNewCall_v9"]);
}

#[test]
#[ignore = "reads the driver that CUDA_ABI_LIBCUDA names"]
fn the_table_has_every_symbol_of_the_driver() {
    let driver = std::env::var_os("CUDA_ABI_LIBCUDA").expect("CUDA_ABI_LIBCUDA names a libcuda.so.1");
    let unknown = unknown_symbols(Path::new(&driver));
    assert!(unknown.is_empty(), "{unknown:?}");
}

#[test]
fn an_api_calls_what_a_library_has_and_tells_what_it_lacks() {
    let directory = tempfile::tempdir().unwrap();
    let source = "int cuDeviceGetCount(int *count) { *count = 3; return 0; }
        int cuInit(unsigned flags) { return flags; }
        int cuOther(void) { return 0; }";
    let library = build(directory.path(), source);
    // SAFETY: the library has no constructors and its functions the driver's signatures.
    let api = unsafe { Api::load(&library) }.unwrap();

    let mut count = 0;
    // SAFETY: `count` is a valid place for the answer.
    assert_eq!(unsafe { api.cuDeviceGetCount(&raw mut count) }, CUresult::CUDA_SUCCESS as u32);
    assert_eq!(count, 3);
    // SAFETY: it takes an integer only.
    assert_eq!(unsafe { api.cuInit(200) }, 200);
    // SAFETY: as above.
    assert_eq!(unsafe { api.cuCtxSynchronize() }, CUresult::CUDA_ERROR_NOT_FOUND as u32);
    assert!(api.cuCtxSynchronize.is_none());
    assert_eq!(api.symbol("cuInit"), api.cuInit.unwrap() as *const _);
    assert!(!api.symbol("cuOther").is_null());
    assert!(api.symbol("cuCtxSynchronize").is_null());
}

#[test]
fn a_library_that_does_not_exist_is_an_error_that_names_it() {
    // SAFETY: nothing is loaded.
    let Err(error) = (unsafe { Api::load(Path::new("/nonexistent/libcuda.so.1")) }) else { panic!("loaded") };
    assert!(error.to_string().contains("/nonexistent/libcuda.so.1"), "{error}");
}
