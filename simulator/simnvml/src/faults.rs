//! Faults of `SIMNVML_FAULT` ([`simcuda_machine::faults`]), whose own effects are the numbers of errors.

use std::sync::LazyLock;

use simcuda_machine::faults::{Faults, Names};

use crate::{Code, OK};

const NAMES: Names<Code> = Names {
    variable: "SIMNVML_FAULT",
    is_call: |symbol| symbol.starts_with("nvml"),
    effect: |number| number.parse().ok().filter(|number| *number != OK),
    effects: "the number of an error",
};

static FAULTS: LazyLock<Faults<Code>> = LazyLock::new(|| Faults::from_environment(NAMES));

/// Called before each function.
///
/// # Errors
/// The first injected one, if this call is due.
pub(crate) fn before(symbol: &str) -> Result<(), Code> {
    FAULTS.before(symbol).first().map_or(Ok(()), |code| Err(*code))
}
