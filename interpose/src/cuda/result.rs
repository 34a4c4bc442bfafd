//! Results of driver calls that several modules compare with.

use cuda_abi::sys;
use cuda_abi::types::CUresult;

pub(crate) const SUCCESS: CUresult = 0;
pub(crate) const INVALID_VALUE: CUresult = sys::CUresult::CUDA_ERROR_INVALID_VALUE as CUresult;
pub(crate) const INVALID_CONTEXT: CUresult = sys::CUresult::CUDA_ERROR_INVALID_CONTEXT as CUresult;
pub(crate) const OPERATING_SYSTEM: CUresult = sys::CUresult::CUDA_ERROR_OPERATING_SYSTEM as CUresult;
pub(crate) const OUT_OF_MEMORY: CUresult = sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as CUresult;
