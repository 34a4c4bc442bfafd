//! Input from libFuzzer. It needs a build that counts what is executed: `cargo xtask fuzz` makes one.

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::{fs, ptr, slice};

/// The driver, which the crate links and does not declare.
#[allow(unsafe_code)]
mod ffi {
    use super::{c_char, c_int};
    use libfuzzer_sys as _;

    // SAFETY: as in FuzzerInterface.h of LLVM.
    unsafe extern "C" {
        pub(super) fn LLVMFuzzerRunDriver(
            argc: *mut c_int,
            argv: *mut *mut *mut c_char,
            run_one: extern "C" fn(*const u8, usize) -> c_int,
        ) -> c_int;
    }

    /// What a program with one reader defines; the crate refers to it, and nothing calls it.
    // SAFETY: no other library has this name, and the type is the one that libfuzzer-sys declares.
    #[unsafe(no_mangle)]
    #[allow(improper_ctypes_definitions)]
    extern "C" fn rust_fuzzer_test_input(_bytes: &[u8]) -> c_int {
        unreachable!("the driver gets a function of its own")
    }
}

/// What `cargo xtask fuzz` asks for.
pub struct Options {
    /// libFuzzer keeps the inputs here that reach new code, and finds them again in the next run.
    corpus: PathBuf,
    /// Further arguments of libFuzzer, one on each line.
    arguments: String,
}

impl Options {
    /// From `CKPT_TEST_FUZZ_CORPUS` and `CKPT_TEST_FUZZ_ARGUMENTS`, if the first one is set.
    pub fn from_environment() -> Option<Self> {
        let corpus = PathBuf::from(std::env::var_os("CKPT_TEST_FUZZ_CORPUS")?);
        Some(Self { corpus, arguments: std::env::var("CKPT_TEST_FUZZ_ARGUMENTS").unwrap_or_default() })
    }
}

/// The reader that the driver calls; it passes no argument of ours.
static READER: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// Lets libFuzzer call `read` until it has had enough, and ends the process: with 0 if nothing was found.
#[allow(unsafe_code)]
pub fn fuzz<F: Fn(&[u8])>(options: &Options, samples: &[Vec<u8>], read: &F) -> ! {
    fs::create_dir_all(&options.corpus).expect("the corpus can be made");
    for (number, sample) in samples.iter().enumerate() {
        fs::write(options.corpus.join(format!("sample-{number}")), sample).expect("a sample can be written");
    }
    let corpus = options.corpus.to_str().expect("a path in UTF-8");
    let words = ["reader", corpus].into_iter().chain(options.arguments.lines());
    let words: Vec<CString> = words.map(|word| CString::new(word).expect("no zero byte")).collect();
    let mut pointers: Vec<*mut c_char> = words.iter().map(|word| word.as_ptr().cast_mut()).collect();
    let mut count = c_int::try_from(pointers.len()).expect("few words");
    pointers.push(ptr::null_mut());
    let mut arguments = pointers.as_mut_ptr();
    READER.store(ptr::from_ref(read).cast_mut().cast(), Ordering::Relaxed);
    // SAFETY: the words live until the end of the process, and so does the reader, which only this thread calls.
    let code = unsafe { ffi::LLVMFuzzerRunDriver(&raw mut count, &raw mut arguments, run_one::<F>) };
    std::process::exit(code)
}

/// A panic of the reader aborts the process, and libFuzzer stores the input.
#[allow(unsafe_code)]
extern "C" fn run_one<F: Fn(&[u8])>(bytes: *const u8, length: usize) -> c_int {
    let bytes = if length == 0 {
        &[][..]
    } else {
        // SAFETY: the driver passes a pointer to so many bytes, which stay until this function returns.
        unsafe { slice::from_raw_parts(bytes, length) }
    };
    // SAFETY: `fuzz` has stored a pointer to its `F`, and does not return.
    let read = unsafe { &*READER.load(Ordering::Relaxed).cast::<F>() };
    read(bytes);
    0
}
