//! Where the state spaces lie among generic addresses.
//!
//! Global and constant memory are where the driver put them, below 2^48. The windows of the other spaces lie above,
//! where no driver allocates addresses.

use crate::types::AddressSpace;

const WINDOWS: u64 = 1 << 48;
/// Shared memory: the executing block's own first, then that of the cluster's blocks by rank.
const SHARED: u64 = WINDOWS;
const LOCAL: u64 = WINDOWS + (1 << 32);
const PARAM: u64 = WINDOWS + (2 << 32);
const FUNCTION: u64 = WINDOWS + (3 << 32);
const WINDOW_BYTES: u64 = 1 << 32;

/// Shared memory of the block with rank r is at (r + 1) times this; the executing block's own also at 0.
pub(crate) const SHARED_STRIDE: u64 = 1 << 24;

/// Addresses of `.param` variables in local memory start here; those of a kernel's parameters at 0.
pub(crate) const PARAM_FRAME: u64 = 1 << 31;

/// The generic address of a function, as an indirect call takes it.
pub(crate) fn function_address(index: u32) -> u64 {
    FUNCTION + (u64::from(index) + 1) * 16
}

/// The function at a generic address.
pub(crate) fn function_index(address: u64) -> Option<u32> {
    let offset = address.checked_sub(FUNCTION).filter(|o| *o < WINDOW_BYTES && o % 16 == 0)?;
    u32::try_from(offset / 16).ok()?.checked_sub(1)
}

fn window(space: AddressSpace) -> Option<u64> {
    match space {
        AddressSpace::Shared | AddressSpace::SharedCluster => Some(SHARED),
        AddressSpace::Local => Some(LOCAL),
        AddressSpace::Param => Some(PARAM),
        AddressSpace::Generic | AddressSpace::Global | AddressSpace::Const => None,
    }
}

/// `cvta`: an address of `space` as a generic one.
pub(crate) fn to_generic(address: u64, space: AddressSpace) -> u64 {
    match window(space) {
        Some(start) => start + (address & (WINDOW_BYTES - 1)),
        None => address,
    }
}

/// `cvta.to`: a generic address as one of `space`. One that lies elsewhere gives an address that nothing has.
pub(crate) fn from_generic(address: u64, space: AddressSpace) -> u64 {
    match window(space) {
        Some(start) => address.wrapping_sub(start),
        None => address,
    }
}

/// The space in whose window a generic address lies, and the address in it.
pub(crate) fn classify(address: u64) -> (AddressSpace, u64) {
    if address < WINDOWS {
        return (AddressSpace::Global, address);
    }
    for space in [AddressSpace::SharedCluster, AddressSpace::Local, AddressSpace::Param] {
        let inside = from_generic(address, space);
        if inside < WINDOW_BYTES {
            return (space, inside);
        }
    }
    (AddressSpace::Global, address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_do_not_overlap() {
        for space in [AddressSpace::SharedCluster, AddressSpace::Local, AddressSpace::Param] {
            for address in [0, 4, 0xffff_fffc] {
                assert_eq!(classify(to_generic(address, space)), (space, address));
            }
        }
        assert_eq!(classify(0x7f00_0000_0000), (AddressSpace::Global, 0x7f00_0000_0000));
        assert_eq!(function_index(function_address(7)), Some(7));
        assert_eq!(function_index(function_address(7) + 1), None);
        assert_eq!(function_index(FUNCTION), None);
    }
}
