//! What a program sets about a function or a kernel, and what is fixed about it.

use cuda_abi::sys::{self, CUfunction_attribute as A, CUresult};
use simcuda_ptx as ptx;

use crate::device::{
    REGISTERS_PER_MULTIPROCESSOR, SHARED_BYTES_PER_BLOCK, SHARED_BYTES_PER_BLOCK_OPTIN, SM_VERSION,
    THREADS_PER_BLOCK,
};
use crate::error::Result;

/// Blocks of a cluster that every part with clusters can run, and that sm_90 can (CUDA C++ programming guide,
/// "Thread Block Clusters").
pub(super) const PORTABLE_CLUSTER_BLOCKS: u32 = 8;
pub(super) const CLUSTER_BLOCKS_MAX: u32 = 16;

/// The interpreter only estimates how many registers a compiler would use. More than these would forbid blocks
/// of 1024 threads to kernels that run with them on a GPU. So no launch fails here because it needs too many registers.
const REGISTERS_MAX: u32 = REGISTERS_PER_MULTIPROCESSOR / THREADS_PER_BLOCK;

/// Values of the attributes that a program can set, each unset at first.
#[derive(Clone, Copy, Default)]
pub(super) struct Settings {
    max_dynamic_shared_bytes: Option<i32>,
    carveout: Option<i32>,
    cluster: [Option<i32>; 3],
    non_portable_cluster: Option<i32>,
    scheduling: Option<i32>,
}

impl Settings {
    /// These settings, and those of `other` where they are unset.
    pub(super) fn or(&self, other: &Self) -> Self {
        Self {
            max_dynamic_shared_bytes: self.max_dynamic_shared_bytes.or(other.max_dynamic_shared_bytes),
            carveout: self.carveout.or(other.carveout),
            cluster: std::array::from_fn(|axis| self.cluster[axis].or(other.cluster[axis])),
            non_portable_cluster: self.non_portable_cluster.or(other.non_portable_cluster),
            scheduling: self.scheduling.or(other.scheduling),
        }
    }

    /// Sets an attribute.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for a value out of range and for an attribute that cannot be set,
    /// `CUDA_ERROR_NOT_PERMITTED` for cluster dimensions that the code itself sets.
    pub(super) fn set(&mut self, function: &ptx::Function, attribute: u32, value: i32) -> Result {
        let invalid = || Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        let is = |known: A| attribute == known as u32;
        if is(A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
            let most = i64::from(SHARED_BYTES_PER_BLOCK_OPTIN) - i64::from(function.static_shared_bytes);
            if !(0..=most).contains(&i64::from(value)) {
                return invalid();
            }
            self.max_dynamic_shared_bytes = Some(value);
        } else if is(A::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT) {
            // -1 is CU_SHAREDMEM_CARVEOUT_DEFAULT.
            if !(-1..=100).contains(&value) {
                return invalid();
            }
            self.carveout = Some(value);
        } else if let Some(axis) = cluster_axis(attribute) {
            if function.required_cluster.is_some() {
                return Err(CUresult::CUDA_ERROR_NOT_PERMITTED);
            }
            if value < 0 {
                return invalid();
            }
            self.cluster[axis] = Some(value);
        } else if is(A::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED) {
            if !(0..=1).contains(&value) {
                return invalid();
            }
            self.non_portable_cluster = Some(value);
        } else if is(A::CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE) {
            if !(0..=sys::CUclusterSchedulingPolicy::CU_CLUSTER_SCHEDULING_POLICY_LOAD_BALANCING as i32)
                .contains(&value)
            {
                return invalid();
            }
            self.scheduling = Some(value);
        } else {
            return invalid();
        }
        Ok(())
    }

    /// The value of an attribute of a function with these settings.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for an unknown attribute.
    pub(super) fn get(&self, code: &ptx::Module, function: &ptx::Function, attribute: u32) -> Result<i32> {
        let is = |known: A| attribute == known as u32;
        Ok(if is(A::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK) {
            max_threads(function).cast_signed()
        } else if is(A::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES) {
            function.static_shared_bytes.cast_signed()
        } else if is(A::CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES) {
            constant_bytes(code)
        } else if is(A::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES) {
            function.local_bytes.cast_signed()
        } else if is(A::CU_FUNC_ATTRIBUTE_NUM_REGS) {
            registers(function).cast_signed()
        } else if is(A::CU_FUNC_ATTRIBUTE_PTX_VERSION) {
            // Not `.version`, whatever the reference says: the architecture that the text was written for.
            code.target_sm().cast_signed()
        } else if is(A::CU_FUNC_ATTRIBUTE_BINARY_VERSION) {
            SM_VERSION.cast_signed()
        } else if is(A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
            self.max_dynamic_shared_bytes(function).cast_signed()
        } else if is(A::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT) {
            self.carveout.unwrap_or(-1)
        } else if let Some(axis) = cluster_axis(attribute) {
            self.required_cluster(function)[axis].cast_signed()
        } else if is(A::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED) {
            self.non_portable_cluster.unwrap_or(0)
        } else if is(A::CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE) {
            self.scheduling.unwrap_or(0)
        } else if is(A::CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET)
            || is(A::CU_FUNC_ATTRIBUTE_CACHE_MODE_CA)
            || is(A::CU_FUNC_ATTRIBUTE_DEVICE_NODE_UPDATE_SUPPORTED)
        {
            0
        } else {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        })
    }

    /// The dynamic shared memory that a launch may ask for: up to 48 KiB together with the static one, unless
    /// the program asked for more.
    pub(super) fn max_dynamic_shared_bytes(&self, function: &ptx::Function) -> u32 {
        match self.max_dynamic_shared_bytes {
            Some(set) => set.cast_unsigned(),
            None => SHARED_BYTES_PER_BLOCK.saturating_sub(function.static_shared_bytes),
        }
    }

    /// The cluster dimensions that a launch must have; zeros if it may have any.
    pub(super) fn required_cluster(&self, function: &ptx::Function) -> [u32; 3] {
        function.required_cluster.unwrap_or(self.cluster.map(|size| size.unwrap_or(0).cast_unsigned()))
    }

    /// The most blocks that a cluster may have.
    pub(super) fn cluster_blocks_max(&self) -> u32 {
        match self.non_portable_cluster {
            Some(1) => CLUSTER_BLOCKS_MAX,
            _ => PORTABLE_CLUSTER_BLOCKS,
        }
    }
}

fn cluster_axis(attribute: u32) -> Option<usize> {
    [
        A::CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH,
        A::CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT,
        A::CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH,
    ]
    .iter()
    .position(|known| *known as u32 == attribute)
}

fn constant_bytes(code: &ptx::Module) -> i32 {
    let constants = code.globals().iter().filter(|global| global.space == ptx::Space::Const);
    i32::try_from(constants.map(|global| global.size_bytes).sum::<usize>()).unwrap_or(i32::MAX)
}

/// The registers that each thread is taken to use.
pub(super) fn registers(function: &ptx::Function) -> u32 {
    function.registers.clamp(8, REGISTERS_MAX)
}

/// The largest block that a launch may have.
pub(super) fn max_threads(function: &ptx::Function) -> u32 {
    let required = function.required_threads.map(|[x, y, z]| x.saturating_mul(y).saturating_mul(z));
    required.or(function.max_threads).unwrap_or(THREADS_PER_BLOCK).clamp(1, THREADS_PER_BLOCK)
}
