//! A physical allocation that is mapped into an address reservation of its own size.

use ckpt_protocol::agent::RegionKind;
use cuda_abi::types::{CUdeviceptr, CUresult};

use super::ipc::published;
use super::physical::{self, Id};
use crate::cuda::driver;
use crate::cuda::stream_capture::relaxed;
use cuda_abi::layout::Properties;

/// The physical allocation lives as long as it is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    pub address: CUdeviceptr,
    pub bytes: u64,
    pub allocation: Id,
}

impl Block {
    /// A block with the access rights that `allow` grants. `bytes` is a multiple of the device's granularity.
    ///
    /// # Errors
    /// A driver call or `allow` failed; nothing is left behind.
    pub fn create(
        kind: RegionKind,
        bytes: u64,
        properties: &Properties,
        allow: impl FnOnce(&Self) -> Result<(), CUresult>,
    ) -> Result<Self, CUresult> {
        // First the memory, which may be short.
        relaxed(|| Self::map(physical::create(kind, bytes, properties)?, bytes, allow))
    }

    /// Maps an existing physical allocation. The caller's reference is released in any case.
    ///
    /// # Errors
    /// As above.
    pub fn map(
        allocation: Id,
        bytes: u64,
        allow: impl FnOnce(&Self) -> Result<(), CUresult>,
    ) -> Result<Self, CUresult> {
        let block = Self::reserve_and_map(allocation, bytes);
        physical::release(allocation);
        let block = block?;
        allow(&block).inspect_err(|_| {
            give_back(block.address, bytes);
        })?;
        Ok(block)
    }

    fn reserve_and_map(allocation: Id, bytes: u64) -> Result<Self, CUresult> {
        let address = reserve(bytes)?;
        physical::map(allocation, address, bytes).inspect_err(|_| free_addresses(address, bytes))?;
        Ok(Self { address, bytes, allocation })
    }

    /// Gives memory and addresses back to the driver. No submitted work may use it any more.
    pub fn give_back(self) {
        published::withdraw(self.allocation);
        relaxed(|| give_back(self.address, self.bytes));
    }
}

/// Gives memory back that is not shared with another process. Returns whether the driver has taken it; if not, it is
/// mapped as before.
pub(super) fn give_back(address: CUdeviceptr, bytes: u64) -> bool {
    let is_unmapped = physical::unmap(address, bytes).is_ok();
    if is_unmapped {
        free_addresses(address, bytes);
    }
    is_unmapped
}

fn reserve(bytes: u64) -> Result<CUdeviceptr, CUresult> {
    // SAFETY: the call writes to a local variable; 0: any alignment, anywhere, no flags.
    driver::ask(0, |address| unsafe { driver::cuMemAddressReserve(address, bytes as usize, 0, 0, 0) })
}

fn free_addresses(address: CUdeviceptr, bytes: u64) {
    // SAFETY: the reservation is ours and nothing is mapped in it. There is nothing to do about a failure.
    let _ = unsafe { driver::cuMemAddressFree(address, bytes as usize) };
}
