//! The types in which the table's signatures are written.
//!
//! They are cudarc's, with one difference: every enum that is a parameter, or that a parameter points to, is
//! its integer here. A C program may pass any number and a newer driver may return any, and a Rust enum that
//! holds none of its values is undefined behaviour. The enums themselves are in [`sys`](crate::sys), for their
//! constants: `sys::CUlimit::CU_LIMIT_STACK_SIZE as CUlimit`. Fields of structures are as in cudarc: a
//! structure that a program filled in may hold an enum out of range, so read such a field through a raw
//! pointer to its integer.

pub use core::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_ushort, c_void};

pub use crate::sys::*;

macro_rules! enums {
    ($($name:ident),* $(,)?) => {
        $(
            #[doc = concat!("Any value of C's `", stringify!($name), "`, known or not.")]
            pub type $name = c_uint;
        )*

        // An alias stands for its enum only if it is as large.
        $( const _: () = assert!(size_of::<$name>() == size_of::<crate::sys::$name>()); )*
    };
}

enums! {
    CUaddress_mode,
    CUarray_format,
    CUatomicOperation,
    CUcoredumpSettings,
    CUdevResourceType,
    CUdevice_P2PAttribute,
    CUdevice_attribute,
    CUdriverProcAddressQueryResult,
    CUexecAffinityType,
    CUfilter_mode,
    CUflushGPUDirectRDMAWritesScope,
    CUflushGPUDirectRDMAWritesTarget,
    CUfunc_cache,
    CUfunctionLoadingState,
    CUfunction_attribute,
    CUgraphExecUpdateResult,
    CUgraphMem_attribute,
    CUgraphNodeType,
    CUjitInputType,
    CUjit_option,
    CUkernelNodeAttrID,
    CUlibraryOption,
    CUlimit,
    CUlogicalEndpointIpcHandleType,
    CUmemAccess_flags,
    CUmemAllocationGranularity_flags,
    CUmemAllocationType,
    CUmemPool_attribute,
    CUmemRangeHandleType,
    CUmem_advise,
    CUmem_range_attribute,
    CUmoduleLoadingMode,
    CUmulticastGranularity_flags,
    CUoutput_mode,
    CUpointer_attribute,
    CUprocessState,
    CUresult,
    CUsharedconfig,
    CUstreamAttrID,
    CUstreamCaptureMode,
    CUstreamCaptureStatus,
    CUtensorMapDataType,
    CUtensorMapFloatOOBfill,
    CUtensorMapIm2ColWideMode,
    CUtensorMapInterleave,
    CUtensorMapL2promotion,
    CUtensorMapSwizzle,
}

/// A place of memory. Its kind is an integer here: the structure is passed by value.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUmemLocation {
    /// Any value of C's `CUmemLocationType`, known or not.
    pub type_: c_uint,
    /// The number of the device or of the host's NUMA node.
    pub id: c_int,
}

const _: () = assert!(size_of::<CUmemLocation>() == size_of::<crate::sys::CUmemLocation>());

/// Whether CUDA packs tensor maps by many or few; new in CUDA 13.5 (`cuda.h`, `CUtensorMapAllocClass`).
pub type CUtensorMapAllocClass = c_uint;

/// One copy of cuFabricCpyBatchAsync. Only pointers to it are passed on here.
#[repr(C)]
pub struct CUDA_FABRIC_COPY_BATCH_OP {
    _opaque: [u8; 0],
}
