//! The attributes of cuLaunchKernelEx.

use cuda_abi::sys::{self, CUlaunchAttributeID as A, CUlaunchAttributeValue, CUresult};
use cuda_abi::types::CUevent;

use super::Shape;
use crate::error::Result;

/// What the attributes of a launch ask for.
#[derive(Default)]
pub(in crate::module) struct Attributes {
    cooperative: bool,
    pub(in crate::module) cluster: Option<[u32; 3]>,
    pub(super) events: Vec<Event>,
}

/// An event to record with the launch.
pub(super) struct Event {
    pub(super) handle: CUevent,
    pub(super) flags: u32,
}

/// The part of `CUlaunchAttributeValue` that names an event, in both attributes that do.
#[repr(C)]
#[derive(Clone, Copy)]
struct EventValue {
    event: CUevent,
    flags: i32,
}

impl Attributes {
    /// Reads and checks the attributes of a launch.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for an attribute that is unknown or not one of launches, and for a value out
    /// of its range; `CUDA_ERROR_NOT_SUPPORTED` for device-updatable graph nodes.
    ///
    /// # Safety
    /// `config.attrs` is valid for `config.numAttrs` elements.
    pub(in crate::module) unsafe fn read(config: &sys::CUlaunchConfig) -> Result<Self> {
        let mut attributes = Self::default();
        if config.numAttrs > 0 && config.attrs.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let mut preferred_cluster = None;
        for index in 0..config.numAttrs as usize {
            // SAFETY: below `numAttrs`.
            let attribute = unsafe { config.attrs.add(index) };
            // The identifier may be any number, so that it is not read as the enum.
            // SAFETY: the field of an attribute that is there.
            let id = unsafe { &raw const (*attribute).id };
            // SAFETY: as above; the enum is as large as its number.
            let id = unsafe { id.cast::<u32>().read() };
            // SAFETY: as above; the value is read as numbers by `Value`.
            let value = Value(unsafe { &raw const (*attribute).value });
            let is = |known: A| id == known as u32;
            if is(A::CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION) {
                // SAFETY: the value is there.
                preferred_cluster = Some(unsafe { value.read::<[u32; 3]>() });
            } else {
                // SAFETY: as above.
                unsafe { attributes.take(id, value) }?;
            }
        }
        if let Some(preferred) = preferred_cluster {
            attributes.check_preferred_cluster(preferred)?;
        }
        Ok(attributes)
    }

    /// # Safety
    /// `value` points to a value.
    unsafe fn take(&mut self, id: u32, value: Value) -> Result {
        let is = |known: A| id == known as u32;
        // SAFETY: every value is at least a number.
        let number = unsafe { value.read::<u32>() };
        let right = if is(A::CU_LAUNCH_ATTRIBUTE_COOPERATIVE) {
            self.cooperative = number != 0;
            true
        } else if is(A::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
            // SAFETY: the value of this attribute is three numbers.
            let cluster = unsafe { value.read::<[u32; 3]>() };
            self.cluster = Some(cluster);
            !cluster.contains(&0)
        } else if is(A::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT)
            || is(A::CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT)
        {
            // SAFETY: the value of these attributes begins with an event and flags.
            let EventValue { event, flags } = unsafe { value.read::<EventValue>() };
            let flags = flags.cast_unsigned();
            self.events.push(Event { handle: event, flags });
            flags & sys::CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL as u32 == 0
        } else if is(A::CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE) {
            number <= sys::CUclusterSchedulingPolicy::CU_CLUSTER_SCHEDULING_POLICY_LOAD_BALANCING as u32
        } else if is(A::CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN) {
            number <= sys::CUlaunchMemSyncDomain::CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE as u32
        } else if is(A::CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT) {
            // u32::MAX is CU_SHAREDMEM_CARVEOUT_DEFAULT.
            number <= 100 || number == u32::MAX
        } else if is(A::CU_LAUNCH_ATTRIBUTE_NVLINK_UTIL_CENTRIC_SCHEDULING) {
            number <= 1
        } else if is(A::CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE) {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        } else {
            // Hints to caches and schedulers that are not there. A launch that may start before the one ahead
            // of it has ended may also start after it.
            [
                A::CU_LAUNCH_ATTRIBUTE_IGNORE,
                A::CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW,
                A::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                A::CU_LAUNCH_ATTRIBUTE_PRIORITY,
                A::CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP,
            ]
            .iter()
            .any(|known| is(*known))
        };
        if right { Ok(()) } else { Err(CUresult::CUDA_ERROR_INVALID_VALUE) }
    }

    /// A multiple of the cluster that is asked for (CUDA driver API reference, CUlaunchAttributeID); it may be
    /// ignored, as it is here.
    fn check_preferred_cluster(&self, preferred: [u32; 3]) -> Result {
        let Some(cluster) = self.cluster else {
            return Ok(());
        };
        if cluster.iter().zip(preferred).all(|(size, preferred)| preferred > 0 && preferred % size == 0) {
            return Ok(());
        }
        Err(CUresult::CUDA_ERROR_INVALID_VALUE)
    }

    pub(in crate::module) fn shape(&self, config: &sys::CUlaunchConfig) -> Shape {
        let grid = [config.gridDimX, config.gridDimY, config.gridDimZ];
        let block = [config.blockDimX, config.blockDimY, config.blockDimZ];
        let plain = Shape::plain(grid, block, config.sharedMemBytes);
        Shape { cooperative: self.cooperative, cluster: self.cluster, ..plain }
    }
}

/// The value of an attribute, which is what its identifier says.
#[derive(Clone, Copy)]
struct Value(*const CUlaunchAttributeValue);

impl Value {
    /// # Safety
    /// It points to a value, of whose 64 bytes any pattern is a `T`.
    unsafe fn read<T: Copy>(self) -> T {
        const { assert!(size_of::<T>() <= size_of::<CUlaunchAttributeValue>()) };
        // SAFETY: the caller vouches for the pointer, and the value is large enough.
        unsafe { self.0.cast::<T>().read() }
    }
}
