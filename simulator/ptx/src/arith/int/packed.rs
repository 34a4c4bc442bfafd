//! Several small integers in one 32-bit register.

use super::{IntType, max, min, relu};

/// `c` plus the sum of the products of the four bytes of `a` and `b`.
#[inline]
pub fn dp4a(a: u32, b: u32, c: u32, a_signed: bool, b_signed: bool) -> u32 {
    (0..4).fold(c, |sum, index| {
        let product = element(a, 8, index, a_signed).wrapping_mul(element(b, 8, index, b_signed));
        sum.wrapping_add(product)
    })
}

/// `c` plus the sum of the products of the two halves of `a` and two bytes of `b`: the lower ones, or with `high`
/// (`.hi`) the upper ones.
#[inline]
pub fn dp2a(a: u32, b: u32, c: u32, a_signed: bool, b_signed: bool, high: bool) -> u32 {
    let first = if high { 2 } else { 0 };
    (0..2).fold(c, |sum, index| {
        let product = element(a, 16, index, a_signed).wrapping_mul(element(b, 8, first + index, b_signed));
        sum.wrapping_add(product)
    })
}

/// Element `index` of `bits` bits each, extended to 32.
#[inline]
fn element(packed: u32, bits: u32, index: u32, signed: bool) -> u32 {
    IntType { bits, signed }.extend(u64::from(packed >> (bits * index))) as u32
}

/// `a + b` on each half (`.u16x2`, `.s16x2`).
#[inline]
pub fn add_16x2(a: u32, b: u32) -> u32 {
    halves(a, b, u64::wrapping_add)
}

/// The lesser on each half; with `clamp_negative` (`.relu`) negative ones become 0.
#[inline]
pub fn min_16x2(a: u32, b: u32, signed: bool, clamp_negative: bool) -> u32 {
    let ty = IntType { bits: 16, signed };
    halves(a, b, |x, y| clamped(min(x, y, ty), ty, clamp_negative))
}

/// The greater on each half; with `clamp_negative` (`.relu`) negative ones become 0.
#[inline]
pub fn max_16x2(a: u32, b: u32, signed: bool, clamp_negative: bool) -> u32 {
    let ty = IntType { bits: 16, signed };
    halves(a, b, |x, y| clamped(max(x, y, ty), ty, clamp_negative))
}

#[inline]
fn clamped(a: u64, ty: IntType, clamp_negative: bool) -> u64 {
    if clamp_negative { relu(a, ty) } else { a }
}

#[inline]
fn halves(a: u32, b: u32, function: impl Fn(u64, u64) -> u64) -> u32 {
    let low = function(u64::from(a & 0xffff), u64::from(b & 0xffff)) as u32;
    let high = function(u64::from(a >> 16), u64::from(b >> 16)) as u32;
    high << 16 | (low & 0xffff)
}

/// `cvt.pack.sat`: the signed 32-bit `a` and `b` clamped to `to`, `b` lowest, `a` above it, and above that the low
/// bits of `c`, which a 16-bit `to` leaves no room for.
#[inline]
pub fn cvt_pack_sat(a: u32, b: u32, c: u32, to: IntType) -> u32 {
    let convert = |operand: u32| to.clamp(IntType::S32.value(u64::from(operand)));
    let packed = convert(a) << to.bits | convert(b) | u64::from(c) << (2 * to.bits);
    packed as u32
}
