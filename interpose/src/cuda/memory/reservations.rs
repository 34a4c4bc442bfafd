//! Address ranges that the program has reserved. The driver's checkpoint unmaps them even where no memory is mapped,
//! so `address_space` has to know them.

use crate::cuda::activation::is_started;
use crate::cuda::handler::handlers;
use crate::cuda::result::SUCCESS;
use crate::cuda::shared::Shared;
use std::collections::BTreeMap;
use std::ffi::c_ulonglong;

use cuda_abi::types::CUdeviceptr;

/// How long each one is, by its address.
static RESERVATIONS: Shared<BTreeMap<CUdeviceptr, u64>> = Shared::new(BTreeMap::new());

/// The ranges, their ends not included.
pub(crate) fn all() -> Vec<(CUdeviceptr, u64)> {
    RESERVATIONS.lock().iter().map(|(address, bytes)| (*address, address.saturating_add(*bytes))).collect()
}

handlers! {
    fn cuMemAddressReserve(
        address: *mut CUdeviceptr, bytes: usize, alignment: usize, hint: CUdeviceptr, flags: c_ulonglong
    ) |call| {
        let result = call();
        if result == SUCCESS && is_started() {
            // SAFETY: the driver has just written it.
            RESERVATIONS.lock().insert(unsafe { address.read_unaligned() }, bytes as u64);
        }
        result
    }

    fn cuMemAddressFree(address: CUdeviceptr, bytes: usize) |call| {
        // Before: once they are free, another thread may be given them.
        let known = RESERVATIONS.lock().remove(&address);
        let result = call();
        if let Some(known) = known.filter(|_| result != SUCCESS) {
            RESERVATIONS.lock().insert(address, known);
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use cuda_abi::types::CUresult;

    use super::*;

    const INVALID_VALUE: CUresult = cuda_abi::sys::CUresult::CUDA_ERROR_INVALID_VALUE as CUresult;

    unsafe extern "C" fn frees(_: CUdeviceptr, _: usize) -> CUresult {
        SUCCESS
    }

    unsafe extern "C" fn refuses(_: CUdeviceptr, _: usize) -> CUresult {
        INVALID_VALUE
    }

    #[test]
    fn what_is_reserved_is_known_until_it_is_freed() {
        const ADDRESS: CUdeviceptr = 0x7000_0000;
        let is_known = || all().contains(&(ADDRESS, ADDRESS + 4096));
        RESERVATIONS.lock().insert(ADDRESS, 4096);
        // SAFETY: neither function does anything.
        assert_eq!(unsafe { cuMemAddressFree(refuses, ADDRESS, 4096) }, INVALID_VALUE);
        assert!(is_known());
        // SAFETY: as above.
        assert_eq!(unsafe { cuMemAddressFree(frees, ADDRESS, 4096) }, SUCCESS);
        assert!(!is_known());
    }
}
