//! Faults of `SIMCUDA_FAULT` ([`simcuda_machine::faults`]). Their own effects are an error, by its name or number, and
//! `lose-device`, which makes every context fail permanently with CUDA_ERROR_UNKNOWN. Calls of the real driver's checkpoint
//! API hang and crash too (nccl issue 2340; cuda-checkpoint issues 17 and 58).

use std::sync::LazyLock;

use cuda_abi::sys::CUresult;
use simcuda_machine::faults::{Faults, Names};

use crate::error::Result;
use crate::{context, proc_address};

#[derive(Debug, Clone, Copy, PartialEq)]
enum Effect {
    Fail(CUresult),
    LoseDevice,
}

const NAMES: Names<Effect> = Names {
    variable: "SIMCUDA_FAULT",
    is_call: |symbol| cuda_abi::by_symbol(symbol).is_some(),
    effect,
    effects: "an error of the driver, lose-device,",
};

static FAULTS: LazyLock<Faults<Effect>> = LazyLock::new(|| Faults::from_environment(NAMES));

fn effect(name: &str) -> Option<Effect> {
    match name {
        "lose-device" => Some(Effect::LoseDevice),
        _ => proc_address::error_by_name_or_number(name).map(Effect::Fail),
    }
}

/// Called before each handler.
///
/// # Errors
/// The first injected one, if this call is due.
pub(crate) fn before(symbol: &str) -> Result {
    let mut result = Ok(());
    for effect in FAULTS.before(symbol) {
        match effect {
            Effect::Fail(error) => result = result.and(Err(error)),
            Effect::LoseDevice => context::lose_all(CUresult::CUDA_ERROR_UNKNOWN),
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn effects_have_names() {
        let fails = |error| Some(Effect::Fail(error));
        assert_eq!(effect("CUDA_ERROR_OUT_OF_MEMORY"), fails(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
        assert_eq!(effect("999"), fails(CUresult::CUDA_ERROR_UNKNOWN));
        assert_eq!(effect("lose-device"), Some(Effect::LoseDevice));
        for bad in ["FOO", "0", ""] {
            assert_eq!(effect(bad), None, "{bad}");
        }
        assert!((NAMES.is_call)("cuMemAlloc_v2") && !(NAMES.is_call)("cuNothing"));
    }
}
