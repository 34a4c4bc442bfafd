//! Physical memory that has addresses of its own: one piece, mapped into one reservation that it fills.

use ckpt_protocol::agent::RegionKind;
use cuda_abi::types::{CUdeviceptr, CUresult};

use super::device::Device;
use super::physical::{self, Id};
use super::{ipc, peer};
use crate::cuda::track::relaxed;
use crate::cuda::{SUCCESS, driver};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) struct Block {
    pub address: CUdeviceptr,
    pub bytes: u64,
    pub piece: Id,
}

impl Block {
    /// Memory that its device, and those that have peer access to it, may read and write. `bytes` is a multiple of the
    /// device's granularity.
    ///
    /// # Errors
    /// The driver's; nothing is left behind.
    pub fn create(kind: RegionKind, device: &Device, bytes: u64) -> Result<Self, CUresult> {
        relaxed(|| {
            // First what may be short.
            let piece = physical::create(kind, bytes, &device.properties())?;
            let address = reserve(bytes).inspect_err(|_| physical::release(piece))?;
            let block = Self { address, bytes, piece };
            if let Err(error) = physical::map(piece, address, bytes) {
                physical::release(piece);
                free_addresses(address, bytes);
                return Err(error);
            }
            peer::grant(device.ordinal, address, bytes).inspect_err(|_| block.give_back())?;
            Ok(block)
        })
    }

    /// Gives memory and addresses back to the driver. Nothing that is submitted may use it any more.
    pub fn give_back(self) {
        ipc::withdraw(self.piece);
        relaxed(|| {
            physical::release(self.piece);
            // What cannot be unmapped (the device is lost) is in nobody's way.
            if physical::unmap(self.address, self.bytes).is_ok() {
                free_addresses(self.address, self.bytes);
            }
        });
    }
}

fn reserve(bytes: u64) -> Result<CUdeviceptr, CUresult> {
    let mut address = 0;
    // SAFETY: `address` is a local variable; 0: any alignment, anywhere, no flags.
    let result = unsafe { driver::cuMemAddressReserve(&raw mut address, bytes as usize, 0, 0, 0) };
    if result == SUCCESS { Ok(address) } else { Err(result) }
}

fn free_addresses(address: CUdeviceptr, bytes: u64) {
    // SAFETY: the reservation is ours and nothing is mapped in it. There is nothing to do about a failure.
    let _ = unsafe { driver::cuMemAddressFree(address, bytes as usize) };
}
