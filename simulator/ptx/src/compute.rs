//! Closures over whole rows, made from functions of one lane.
//!
//! A row is computed for all lanes where all are active, which compilers turn into vector code; else lane by lane.

use crate::ir::{ALL_LANES, LANES, Map1, Map2, Map3, Relate, Row};

/// The active lanes of a mask.
#[inline]
pub(crate) fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    let mut rest = mask;
    std::iter::from_fn(move || {
        let lane = rest.trailing_zeros();
        rest &= rest.wrapping_sub(1);
        (lane < 32).then_some(lane as usize)
    })
}

pub(crate) fn map1(f: impl Fn(u64) -> u64 + Send + Sync + 'static) -> Map1 {
    Box::new(move |out: &mut Row, a: &Row, mask: u32| {
        if mask == ALL_LANES {
            for lane in 0..LANES {
                out[lane] = f(a[lane]);
            }
        } else {
            for lane in lanes(mask) {
                out[lane] = f(a[lane]);
            }
        }
    })
}

pub(crate) fn map2(f: impl Fn(u64, u64) -> u64 + Send + Sync + 'static) -> Map2 {
    Box::new(move |out: &mut Row, a: &Row, b: &Row, mask: u32| {
        if mask == ALL_LANES {
            for lane in 0..LANES {
                out[lane] = f(a[lane], b[lane]);
            }
        } else {
            for lane in lanes(mask) {
                out[lane] = f(a[lane], b[lane]);
            }
        }
    })
}

pub(crate) fn map3(f: impl Fn(u64, u64, u64) -> u64 + Send + Sync + 'static) -> Map3 {
    Box::new(move |out: &mut Row, a: &Row, b: &Row, c: &Row, mask: u32| {
        if mask == ALL_LANES {
            for lane in 0..LANES {
                out[lane] = f(a[lane], b[lane], c[lane]);
            }
        } else {
            for lane in lanes(mask) {
                out[lane] = f(a[lane], b[lane], c[lane]);
            }
        }
    })
}

/// All lanes, active or not: a relation has no side effects.
pub(crate) fn relate(f: impl Fn(u64, u64) -> bool + Send + Sync + 'static) -> Relate {
    Box::new(move |a: &Row, b: &Row| {
        let mut mask = 0;
        for lane in 0..LANES {
            mask |= u32::from(f(a[lane], b[lane])) << lane;
        }
        mask
    })
}

/// A function of 16-bit halves on both halves of 32-bit values.
pub(crate) fn halves1(f: impl Fn(u16) -> u16) -> impl Fn(u64) -> u64 {
    move |a| u64::from(f(a as u16)) | u64::from(f((a >> 16) as u16)) << 16
}

pub(crate) fn halves2(f: impl Fn(u16, u16) -> u16) -> impl Fn(u64, u64) -> u64 {
    move |a, b| u64::from(f(a as u16, b as u16)) | u64::from(f((a >> 16) as u16, (b >> 16) as u16)) << 16
}

pub(crate) fn halves3(f: impl Fn(u16, u16, u16) -> u16) -> impl Fn(u64, u64, u64) -> u64 {
    move |a, b, c| {
        let high = f((a >> 16) as u16, (b >> 16) as u16, (c >> 16) as u16);
        u64::from(f(a as u16, b as u16, c as u16)) | u64::from(high) << 16
    }
}
