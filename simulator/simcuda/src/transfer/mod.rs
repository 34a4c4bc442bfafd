//! Copies and fills in all shapes.
//!
//! A call is turned into a [`Copy`] or a [`Fill`] (`linear`, `shaped`, `batch`, `fill`), its arguments are
//! checked against the memory as it is now (`check`), and it goes to a stream (`submit`), which runs it later
//! (`run`). Overlapping operands of a plain copy are copied as if there were a buffer between them; rows of a
//! 2D or 3D copy that overlap other rows come out undefined, as on a GPU. CUDA arrays are not there.

mod batch;
mod check;
mod fill;
pub(crate) mod layout;
mod linear;
mod peer;
mod run;
mod shaped;
mod submit;

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use std::sync::Arc;

pub(crate) use batch::{
    cuMemcpy3DBatchAsync, cuMemcpy3DBatchAsync_v2, cuMemcpy3DWithAttributesAsync, cuMemcpyBatchAsync,
    cuMemcpyBatchAsync_v2, cuMemcpyWithAttributesAsync,
};
pub(crate) use check::{copy as check_copy, fill as check_fill};
pub(crate) use fill::{
    cuMemsetD2D8_v2, cuMemsetD2D8Async, cuMemsetD2D16_v2, cuMemsetD2D16Async, cuMemsetD2D32_v2,
    cuMemsetD2D32Async, cuMemsetD8_v2, cuMemsetD8Async, cuMemsetD16_v2, cuMemsetD16Async, cuMemsetD32_v2,
    cuMemsetD32Async,
};
pub(crate) use linear::{
    cuMemcpy, cuMemcpyAsync, cuMemcpyDtoD_v2, cuMemcpyDtoDAsync_v2, cuMemcpyDtoH_v2, cuMemcpyDtoHAsync_v2,
    cuMemcpyHtoD_v2, cuMemcpyHtoDAsync_v2,
};
pub(crate) use peer::{cuMemcpy3DPeer, cuMemcpy3DPeerAsync, cuMemcpyPeer, cuMemcpyPeerAsync};
pub(crate) use shaped::{
    cuMemcpy2D_v2, cuMemcpy2DAsync_v2, cuMemcpy2DUnaligned_v2, cuMemcpy3D_v2, cuMemcpy3DAsync_v2, from_3d,
};

/// A copy of `depth` slices of `height` rows of `width_bytes`; plain copies have one row.
#[derive(Clone, Debug)]
pub(crate) struct Copy {
    pub(crate) to: Endpoint,
    pub(crate) from: Endpoint,
    pub(crate) width_bytes: usize,
    pub(crate) height: usize,
    pub(crate) depth: usize,
    /// The source's bytes as they were at the call, row after row: then `from` says where they lie in here.
    pub(crate) staged: Option<Arc<[u8]>>,
}

/// Where one side of a copy lies. Device and host addresses share one address space, as with UVA on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Endpoint {
    pub(crate) address: u64,
    /// What the call says about the address: an invalid device address is an error, whereas any host
    /// address is accepted.
    pub(crate) side: Side,
    pub(crate) pitch_bytes: usize,
    /// Rows from one slice to the next.
    pub(crate) slice_rows: usize,
}

/// How the address of an [`Endpoint`] is to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Device,
    Host,
    /// Whichever it is: device memory if the address lies in some, else host memory.
    Unified,
}

/// A fill of `height` rows of `width` elements with a value of 1, 2 or 4 bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fill {
    pub(crate) address: u64,
    pub(crate) value: u32,
    pub(crate) element_bytes: usize,
    pub(crate) width: usize,
    pub(crate) height: usize,
    pub(crate) pitch_bytes: usize,
}

impl Copy {
    /// A plain copy of `size_bytes`.
    pub(crate) fn linear(to: (u64, Side), from: (u64, Side), size_bytes: usize) -> Self {
        let endpoint = |(address, side)| Endpoint { address, side, pitch_bytes: size_bytes, slice_rows: 1 };
        Self {
            to: endpoint(to),
            from: endpoint(from),
            width_bytes: size_bytes,
            height: 1,
            depth: 1,
            staged: None,
        }
    }

    /// Whether there is nothing to copy.
    pub(crate) fn is_empty(&self) -> bool {
        self.width_bytes == 0 || self.height == 0 || self.depth == 0
    }
}
