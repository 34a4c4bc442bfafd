//! Fills.

use cuda_abi::types::{CUdeviceptr, CUstream};

use super::Fill;
use super::submit::{asynchronous_fill, synchronous_fill};
use crate::error::Result;

fn row(address: CUdeviceptr, value: impl Into<u32>, element_bytes: usize, width: usize) -> Fill {
    Fill { address, value: value.into(), element_bytes, width, height: 1, pitch_bytes: 0 }
}

macro_rules! fills {
    ($( $value:ty, $element_bytes:literal: $plain:ident, $plain_async:ident, $rows:ident, $rows_async:ident; )*) => {
        $(
            pub(crate) unsafe fn $plain(address: CUdeviceptr, value: $value, width: usize) -> Result {
                synchronous_fill(row(address, value, $element_bytes, width))
            }

            pub(crate) unsafe fn $plain_async(
                address: CUdeviceptr,
                value: $value,
                width: usize,
                stream: CUstream,
            ) -> Result {
                asynchronous_fill(row(address, value, $element_bytes, width), stream)
            }

            pub(crate) unsafe fn $rows(
                address: CUdeviceptr,
                pitch_bytes: usize,
                value: $value,
                width: usize,
                height: usize,
            ) -> Result {
                synchronous_fill(Fill { height, pitch_bytes, ..row(address, value, $element_bytes, width) })
            }

            pub(crate) unsafe fn $rows_async(
                address: CUdeviceptr,
                pitch_bytes: usize,
                value: $value,
                width: usize,
                height: usize,
                stream: CUstream,
            ) -> Result {
                let fill = Fill { height, pitch_bytes, ..row(address, value, $element_bytes, width) };
                asynchronous_fill(fill, stream)
            }
        )*
    };
}

fills! {
    u8, 1: cuMemsetD8_v2, cuMemsetD8Async, cuMemsetD2D8_v2, cuMemsetD2D8Async;
    u16, 2: cuMemsetD16_v2, cuMemsetD16Async, cuMemsetD2D16_v2, cuMemsetD2D16Async;
    u32, 4: cuMemsetD32_v2, cuMemsetD32Async, cuMemsetD2D32_v2, cuMemsetD2D32Async;
}
