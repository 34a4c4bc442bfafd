//! A stream's attributes: kept and handed back, without an effect on the order of work.

use cuda_abi::sys::{self, CUaccessProperty, CUlaunchMemSyncDomain, CUresult, CUsynchronizationPolicy};
use cuda_abi::types::{CUlaunchAttributeID, CUstream, CUstreamAttrID, CUstreamAttrValue};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::calls::clamp_priority;
use super::object::find;
use crate::error::Result;

const ACCESS_POLICY_WINDOW: u32 = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW as u32;
const SYNCHRONIZATION_POLICY: u32 = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY as u32;
const PRIORITY: u32 = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PRIORITY as u32;
const MEM_SYNC_DOMAIN_MAP: u32 = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP as u32;
const MEM_SYNC_DOMAIN: u32 = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN as u32;

/// `CUaccessPolicyWindow` with its enums as integers, since a program may pass any.
#[repr(C)]
#[derive(Clone, Copy)]
struct AccessPolicyWindow {
    base: usize,
    size_bytes: usize,
    hit_ratio: f32,
    hit: u32,
    miss: u32,
}

const _: () = assert!(size_of::<AccessPolicyWindow>() == size_of::<sys::CUaccessPolicyWindow>());

impl AccessPolicyWindow {
    fn is_valid(&self) -> bool {
        // What misses cannot be made to persist (CUDA driver API reference, CUaccessPolicyWindow).
        (0.0..=1.0).contains(&self.hit_ratio)
            && self.hit <= CUaccessProperty::CU_ACCESS_PROPERTY_PERSISTING as u32
            && self.miss <= CUaccessProperty::CU_ACCESS_PROPERTY_STREAMING as u32
    }
}

#[derive(Clone, Copy)]
pub(super) struct Attributes {
    access_policy: AccessPolicyWindow,
    sync_policy: u32,
    /// Which domains stand for the logical domains "default" and "remote".
    domain_map: [u8; 2],
    domain: u32,
}

impl Default for Attributes {
    fn default() -> Self {
        Self {
            access_policy: AccessPolicyWindow { base: 0, size_bytes: 0, hit_ratio: 0.0, hit: 0, miss: 0 },
            sync_policy: CUsynchronizationPolicy::CU_SYNC_POLICY_AUTO as u32,
            domain_map: [0, 1],
            domain: CUlaunchMemSyncDomain::CU_LAUNCH_MEM_SYNC_DOMAIN_DEFAULT as u32,
        }
    }
}

pub(crate) unsafe fn cuStreamGetAttribute(
    handle: CUstream,
    attribute: CUstreamAttrID,
    out: *mut CUstreamAttrValue,
) -> Result {
    let stream = find(handle)?;
    if out.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let attributes = *stream.attributes.lock();
    let out = out.cast::<u8>();
    match attribute {
        // SAFETY: `out` is the caller's out parameter, a union of which this is a member.
        ACCESS_POLICY_WINDOW => unsafe { out.cast::<AccessPolicyWindow>().write(attributes.access_policy) },
        // SAFETY: as above.
        SYNCHRONIZATION_POLICY => unsafe { out.cast::<u32>().write(attributes.sync_policy) },
        // SAFETY: as above.
        PRIORITY => unsafe { out.cast::<i32>().write(stream.priority.load(Ordering::Relaxed)) },
        // SAFETY: as above.
        MEM_SYNC_DOMAIN_MAP => unsafe { out.cast::<[u8; 2]>().write(attributes.domain_map) },
        // SAFETY: as above.
        MEM_SYNC_DOMAIN => unsafe { out.cast::<u32>().write(attributes.domain) },
        _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
    }
    Ok(())
}

pub(crate) unsafe fn cuStreamSetAttribute(
    handle: CUstream,
    attribute: CUstreamAttrID,
    value: *const CUstreamAttrValue,
) -> Result {
    let stream = find(handle)?;
    if value.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let value = value.cast::<u8>();
    let mut attributes = stream.attributes.lock();
    match attribute {
        ACCESS_POLICY_WINDOW => {
            // SAFETY: `value` is the caller's union, of which this is a member.
            attributes.access_policy =
                keep_if(unsafe { value.cast::<AccessPolicyWindow>().read() }, AccessPolicyWindow::is_valid)?;
        }
        SYNCHRONIZATION_POLICY => {
            // SAFETY: as above.
            attributes.sync_policy =
                keep_if(unsafe { value.cast::<u32>().read() }, |policy| matches!(policy, 1..=4))?;
        }
        PRIORITY => {
            // SAFETY: as above.
            let priority = unsafe { value.cast::<i32>().read() };
            stream.priority.store(clamp_priority(priority), Ordering::Relaxed);
        }
        MEM_SYNC_DOMAIN_MAP => {
            // SAFETY: as above.
            attributes.domain_map = keep_if(unsafe { value.cast::<[u8; 2]>().read() }, |map: &[u8; 2]| {
                map.iter().all(|domain| *domain < MEM_SYNC_DOMAINS)
            })?;
        }
        MEM_SYNC_DOMAIN => {
            // SAFETY: as above.
            attributes.domain = keep_if(unsafe { value.cast::<u32>().read() }, |domain| *domain <= 1)?;
        }
        _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
    }
    Ok(())
}

/// CU_DEVICE_ATTRIBUTE_MEM_SYNC_DOMAIN_COUNT of compute capability 9.0.
const MEM_SYNC_DOMAINS: u8 = 4;

fn keep_if<T>(value: T, is_valid: impl FnOnce(&T) -> bool) -> Result<T> {
    if is_valid(&value) { Ok(value) } else { Err(CUresult::CUDA_ERROR_INVALID_VALUE) }
}

pub(crate) unsafe fn cuStreamCopyAttributes(to: CUstream, from: CUstream) -> Result {
    let (to, from) = (find(to)?, find(from)?);
    if !Arc::ptr_eq(&to.context, &from.context) {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let attributes = *from.attributes.lock();
    *to.attributes.lock() = attributes;
    to.priority.store(from.priority.load(Ordering::Relaxed), Ordering::Relaxed);
    Ok(())
}
