//! Holds the table against a driver's symbols, and calls through [`Api`].
//!
//! One test reads NVIDIA's own library, which `cargo xtask test` sets up; the others build their libraries.

use std::path::{Path, PathBuf};
use std::process::Command;

use cuda_abi::api::Api;
use cuda_abi::sys::CUresult;
use cuda_abi::{Lookup, by_symbol, lookup};
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
    // The interface for debuggers is no part of the driver API.
    let entry_point = |name: &String| name.starts_with("cu") && !name.starts_with("cudbg");
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

/// NVIDIA's own library, as `cargo xtask` sets it up.
fn nvidias_library() -> PathBuf {
    let default = "../target/tools/libcuda/prefix/usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.1";
    let default = || Path::new(env!("CARGO_MANIFEST_DIR")).join(default);
    let path = std::env::var_os("CKPT_TEST_NVIDIA_LIBCUDA").map_or_else(default, PathBuf::from);
    assert!(path.is_file(), "{} is not there: call `cargo xtask test`", path.display());
    path
}

#[test]
fn the_table_has_every_symbol_of_nvidias_library() {
    assert_eq!(unknown_symbols(&nvidias_library()), [""; 0]);
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

/// The symbol for a version, of `VERSION SYMBOL, …`.
fn measured(variants: &str, version: u32) -> Lookup {
    let variants =
        variants.split(", ").map(|variant| variant.trim().split_once(' ').expect("VERSION SYMBOL"));
    let old_enough = variants.filter(|(since, _)| since.parse::<u32>().expect("a version") <= version);
    old_enough.last().map_or(Lookup::VersionNotSufficient, |(_, symbol)| {
        Lookup::Found(by_symbol(symbol).map_or_else(|| panic!("{symbol}"), |row| name_in(row, symbol)))
    })
}

fn name_in(row: &'static cuda_abi::EntryPoint, symbol: &str) -> &'static str {
    row.per_thread.map(|(name, _)| name).filter(|name| *name == symbol).unwrap_or(row.symbol)
}

/// For every name and every version at which an answer of NVIDIA's driver changes.
#[test]
fn look_ups_have_the_answers_of_nvidias_driver() {
    let text = include_str!("lookups-550.txt");
    let lines: Vec<_> = text
        .lines()
        .filter_map(|line| line.split_once(": "))
        .filter(|(name, _)| !name.starts_with('#'))
        .collect();
    let numbers = text.split([' ', ',']).filter_map(|word| word.parse::<u32>().ok());
    let versions: std::collections::BTreeSet<_> = numbers
        .flat_map(|version| [version - 10, version])
        .chain([0, 12040])
        .filter(|version| *version <= 12040)
        .collect();
    let (mut asked, mut wrong) = (0, Vec::new());
    for (name, answers) in lines {
        let (plain, per_thread) = answers.split_once(" | ").unwrap_or((answers, answers));
        for &version in &versions {
            for (flag, variants) in [(false, plain), (true, per_thread)] {
                let (expected, found) = (measured(variants, version), lookup(name, version, flag));
                asked += 1;
                if expected != found {
                    wrong.push(format!("{name} {version} {flag}: {expected:?}, not {found:?}"));
                }
            }
        }
    }
    assert!(asked > 30_000, "{asked}");
    assert!(wrong.is_empty(), "{} of {asked}: {:#?}", wrong.len(), &wrong[..wrong.len().min(20)]);
}
