//! What a check is, and the words in which checks are written.

use cuda_abi::sys::CUresult;

use crate::gpu;

/// Why a check ended early.
#[derive(Debug)]
pub enum Stop {
    /// What was expected, and what came.
    Failed(String),
    /// What this machine or this driver lacks.
    Skipped(String),
}

/// The outcome of a check or of a part of it.
pub type Result<T = ()> = std::result::Result<T, Stop>;

/// One check. It runs in a process of its own.
pub struct Check {
    /// `area/what-it-is-about`.
    pub name: &'static str,
    /// One sentence on what it shows, and the source of the requirement.
    pub shows: &'static str,
    /// The check itself.
    pub body: Body,
}

/// Whether the right result is known.
pub enum Body {
    /// The documentation defines the right result.
    Check(fn() -> Result),
    /// The documentation does not say; what comes is the answer.
    Question(fn() -> Result<String>),
}

/// A check whose right result is documented.
pub const fn check(name: &'static str, shows: &'static str, body: fn() -> Result) -> Check {
    Check { name, shows, body: Body::Check(body) }
}

/// A question that only a GPU can settle.
pub const fn question(name: &'static str, shows: &'static str, body: fn() -> Result<String>) -> Check {
    Check { name, shows, body: Body::Question(body) }
}

/// Ends the check as failed.
pub fn failed<T>(text: impl Into<String>) -> Result<T> {
    Err(Stop::Failed(text.into()))
}

/// Ends the check as skipped.
pub fn skipped<T>(why: impl Into<String>) -> Result<T> {
    Err(Stop::Skipped(why.into()))
}

/// Fails unless `code`, which `call` gave, is one of those expected.
pub fn expect_code(call: &str, code: u32, expected: &[CUresult]) -> Result {
    if expected.iter().any(|one| *one as u32 == code) {
        return Ok(());
    }
    let names: Vec<_> = expected.iter().map(|one| format!("{one:?}")).collect();
    failed(format!("{call}: expected {}, got {}", names.join(" or "), gpu::name_of(code)))
}

/// Fails unless both are equal.
pub fn expect_equal<T: PartialEq + std::fmt::Debug>(what: &str, got: T, expected: T) -> Result {
    if got == expected { Ok(()) } else { failed(format!("{what}: expected {expected:?}, got {got:?}")) }
}

/// Calls the driver and gives its result code; ends the check as skipped where the driver lacks the symbol.
#[macro_export]
macro_rules! cu {
    ($name:ident ( $($arg:expr),* $(,)? )) => {
        match $crate::gpu::api().$name {
            #[allow(clippy::macro_metavars_in_unsafe, reason = "a check's calls are what the comment is about")]
            // SAFETY: A check is a small C program: pointers that it passes are to its own live variables,
            // or such as the call is documented to refuse; handles are ones that this process was given.
            Some(function) => unsafe { function($($arg),*) },
            None => return $crate::check::skipped(concat!("the driver has no ", stringify!($name))),
        }
    };
}

/// Calls the driver and fails unless it succeeds.
#[macro_export]
macro_rules! ok {
    ($name:ident ( $($arg:expr),* $(,)? )) => {{
        let code = $crate::cu!($name($($arg),*));
        $crate::check::expect_code(stringify!($name), code, &[cuda_abi::sys::CUresult::CUDA_SUCCESS])?
    }};
}

/// Calls the driver and fails unless it gives one of the results named.
#[macro_export]
macro_rules! gives {
    ($($code:ident)|+, $name:ident ( $($arg:expr),* $(,)? )) => {{
        let code = $crate::cu!($name($($arg),*));
        $crate::check::expect_code(stringify!($name), code, &[$(cuda_abi::sys::CUresult::$code),+])?
    }};
}

/// Calls the driver and fails if it succeeds; any error will do where the documentation names none.
#[macro_export]
macro_rules! refuses {
    ($name:ident ( $($arg:expr),* $(,)? )) => {{
        let code = $crate::cu!($name($($arg),*));
        if code == 0 {
            return $crate::check::failed(concat!(stringify!($name), ": expected an error, got CUDA_SUCCESS"));
        }
    }};
}

/// Fails with the text unless the condition holds.
#[macro_export]
macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        let holds: bool = $condition;
        if !holds {
            return $crate::check::failed(format!($($text)+));
        }
    };
}
