//! What nobody can save: the first call that makes a checkpoint impossible is remembered by its name.

use std::sync::OnceLock;

use cuda_abi::types::CUresult;

use super::SUCCESS;

static TAINT: OnceLock<&'static str> = OnceLock::new();

/// Marks the process after a call, if it succeeded.
pub(super) fn mark(symbol: &'static str, result: CUresult) {
    if result == SUCCESS {
        mark_untyped(symbol);
    }
}

/// Marks the process because of a call whose result is not known.
pub(super) fn mark_untyped(symbol: &'static str) {
    // The first one stays.
    let _ = TAINT.set(symbol);
}

/// The call that made a checkpoint impossible, if there was one.
pub(super) fn what() -> Option<&'static str> {
    TAINT.get().copied()
}
