//! Integer arithmetic (PTX ISA, "Integer Arithmetic Instructions", "Extended-Precision Integer Arithmetic
//! Instructions", "Logic and Shift Instructions").
//!
//! Values travel in the low bits of a u64; upper bits of operands are ignored, those of results are zero.

use std::cmp::Ordering;

use super::Relation;

mod bits;
mod packed;

pub use bits::{
    PrmtMode, Surplus, bfe, bfi, bfind, bmsk, brev, clz, cnot, fns, lop3, popc, prmt, shf_left, shf_right,
    shl, shr, szext,
};
pub use packed::{add_16x2, cvt_pack_sat, dp2a, dp4a, max_16x2, min_16x2};

/// An integer type: `.u8` to `.s64`. A `.b` type counts as unsigned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IntType {
    /// Width: 2, 4, 8, 16, 32 or 64.
    pub bits: u32,
    /// Two's complement.
    pub signed: bool,
}

#[allow(missing_docs, reason = "each is the PTX type of the same name")]
impl IntType {
    pub const U8: IntType = IntType { bits: 8, signed: false };
    pub const U16: IntType = IntType { bits: 16, signed: false };
    pub const U32: IntType = IntType { bits: 32, signed: false };
    pub const U64: IntType = IntType { bits: 64, signed: false };
    pub const S8: IntType = IntType { bits: 8, signed: true };
    pub const S16: IntType = IntType { bits: 16, signed: true };
    pub const S32: IntType = IntType { bits: 32, signed: true };
    pub const S64: IntType = IntType { bits: 64, signed: true };
}

impl IntType {
    /// The bits that the type has.
    #[inline]
    pub const fn mask(self) -> u64 {
        u64::MAX >> (64 - self.bits)
    }

    /// The number that the low bits stand for.
    #[inline]
    pub const fn value(self, bits: u64) -> i128 {
        if self.signed { self.sign_extended(bits) as i128 } else { (bits & self.mask()) as i128 }
    }

    /// The low bits of a number.
    #[inline]
    pub const fn wrap(self, value: i128) -> u64 {
        value as u64 & self.mask()
    }

    /// The bits of the number of this type that is nearest to `value`.
    #[inline]
    pub fn clamp(self, value: i128) -> u64 {
        self.wrap(value.clamp(self.min_value(), self.max_value()))
    }

    /// The least number of the type.
    #[inline]
    pub const fn min_value(self) -> i128 {
        if self.signed { -(1 << (self.bits - 1)) } else { 0 }
    }

    /// The greatest number of the type.
    #[inline]
    pub const fn max_value(self) -> i128 {
        if self.signed { (1 << (self.bits - 1)) - 1 } else { (1 << self.bits) - 1 }
    }

    /// The low bits, extended to 64: with the sign where the type has one, else with zeros. A register that is
    /// wider than the type of a conversion's result receives this.
    #[inline]
    pub const fn extend(self, bits: u64) -> u64 {
        if self.signed { self.sign_extended(bits) as u64 } else { bits & self.mask() }
    }

    #[inline]
    const fn sign_extended(self, bits: u64) -> i64 {
        let unused = 64 - self.bits;
        (bits << unused) as i64 >> unused
    }

    #[inline]
    fn is_negative(self, bits: u64) -> bool {
        self.signed && self.sign_extended(bits) < 0
    }
}

/// `a + b`; with `sat` (`.s32` only, in PTX) clamped to the type's range.
#[inline]
pub fn add(a: u64, b: u64, ty: IntType, sat: bool) -> u64 {
    if sat { ty.clamp(ty.value(a) + ty.value(b)) } else { a.wrapping_add(b) & ty.mask() }
}

/// `a - b`; with `sat` (`.s32` only, in PTX) clamped to the type's range.
#[inline]
pub fn sub(a: u64, b: u64, ty: IntType, sat: bool) -> u64 {
    if sat { ty.clamp(ty.value(a) - ty.value(b)) } else { a.wrapping_sub(b) & ty.mask() }
}

/// `a + b + carry` and the carry out of the top bit (`add.cc`, `addc`).
#[inline]
pub fn add_carry(a: u64, b: u64, carry: bool, ty: IntType) -> (u64, bool) {
    let sum = u128::from(a & ty.mask()) + u128::from(b & ty.mask()) + u128::from(carry);
    (sum as u64 & ty.mask(), sum >> ty.bits != 0)
}

/// `a - b - borrow` and the borrow into the top bit (`sub.cc`, `subc`).
#[inline]
pub fn sub_borrow(a: u64, b: u64, borrow: bool, ty: IntType) -> (u64, bool) {
    let (a, subtrahend) = (u128::from(a & ty.mask()), u128::from(b & ty.mask()) + u128::from(borrow));
    (a.wrapping_sub(subtrahend) as u64 & ty.mask(), a < subtrahend)
}

/// The lower half of the product (`mul.lo`).
#[inline]
pub fn mul_lo(a: u64, b: u64, ty: IntType) -> u64 {
    a.wrapping_mul(b) & ty.mask()
}

/// The upper half of the product (`mul.hi`).
#[inline]
pub fn mul_hi(a: u64, b: u64, ty: IntType) -> u64 {
    // Two's complement: the low 128 bits of the product are the same for signed and unsigned operands.
    let product = (ty.value(a) as u128).wrapping_mul(ty.value(b) as u128);
    (product >> ty.bits) as u64 & ty.mask()
}

/// The whole product, twice as wide as the type (`mul.wide`, 8 to 32 bits).
#[inline]
pub fn mul_wide(a: u64, b: u64, ty: IntType) -> u64 {
    IntType { bits: 2 * ty.bits, ..ty }.wrap(ty.value(a) * ty.value(b))
}

/// The product of the low 24 bits of each operand, 48 bits wide, as `mul24` and `mad24` use it.
#[inline]
fn product24(a: u64, b: u64, ty: IntType) -> i128 {
    let operand = IntType { bits: 24, signed: ty.signed };
    operand.value(a) * operand.value(b)
}

/// Bits 31 to 0 of the product of two 24-bit integers (`mul24.lo`).
#[inline]
pub fn mul24_lo(a: u64, b: u64, ty: IntType) -> u64 {
    ty.wrap(product24(a, b, ty))
}

/// Bits 47 to 16 of the product of two 24-bit integers (`mul24.hi`).
#[inline]
pub fn mul24_hi(a: u64, b: u64, ty: IntType) -> u64 {
    ty.wrap(product24(a, b, ty) >> 16)
}

/// `mul.lo` plus `c`.
#[inline]
pub fn mad_lo(a: u64, b: u64, c: u64, ty: IntType) -> u64 {
    add(mul_lo(a, b, ty), c, ty, false)
}

/// `mul.hi` plus `c`; with `sat` (`.s32` only, in PTX) the addition is clamped.
#[inline]
pub fn mad_hi(a: u64, b: u64, c: u64, ty: IntType, sat: bool) -> u64 {
    add(mul_hi(a, b, ty), c, ty, sat)
}

/// `mul.wide` plus `c`, which is as wide as the result.
#[inline]
pub fn mad_wide(a: u64, b: u64, c: u64, ty: IntType) -> u64 {
    add(mul_wide(a, b, ty), c, IntType { bits: 2 * ty.bits, ..ty }, false)
}

/// `mul24.lo` plus `c`.
#[inline]
pub fn mad24_lo(a: u64, b: u64, c: u64, ty: IntType) -> u64 {
    add(mul24_lo(a, b, ty), c, ty, false)
}

/// `mul24.hi` plus `c`; with `sat` (`.s32` only, in PTX) the addition is clamped.
#[inline]
pub fn mad24_hi(a: u64, b: u64, c: u64, ty: IntType, sat: bool) -> u64 {
    add(mul24_hi(a, b, ty), c, ty, sat)
}

/// `c + |a - b|`.
#[inline]
pub fn sad(a: u64, b: u64, c: u64, ty: IntType) -> u64 {
    ty.wrap(ty.value(c) + (ty.value(a) - ty.value(b)).abs())
}

/// `a / b`, towards zero; the least number divided by -1 is itself.
///
/// Division by zero gives all ones. PTX calls the result machine-specific; this is what the code that ptxas emits
/// for a division gives.
#[inline]
pub fn div(a: u64, b: u64, ty: IntType) -> u64 {
    let (a, b) = (ty.extend(a), ty.extend(b));
    let quotient = match (b, ty.signed) {
        (0, _) => u64::MAX,
        (_, true) => (a as i64).wrapping_div(b as i64) as u64,
        (_, false) => a / b,
    };
    quotient & ty.mask()
}

/// The remainder of [`div`], with the sign of `a`.
///
/// Division by zero gives all ones. PTX calls the result machine-specific; the code that ptxas emits for a
/// remainder ends in the same selection as that for a division.
#[inline]
pub fn rem(a: u64, b: u64, ty: IntType) -> u64 {
    let (a, b) = (ty.extend(a), ty.extend(b));
    let remainder = match (b, ty.signed) {
        (0, _) => u64::MAX,
        (_, true) => (a as i64).wrapping_rem(b as i64) as u64,
        (_, false) => a % b,
    };
    remainder & ty.mask()
}

/// The magnitude; that of the least number is itself.
#[inline]
pub fn abs(a: u64, ty: IntType) -> u64 {
    ty.wrap(ty.value(a).abs())
}

/// `-a`; that of the least number is itself.
#[inline]
pub fn neg(a: u64, ty: IntType) -> u64 {
    a.wrapping_neg() & ty.mask()
}

/// The lesser operand.
#[inline]
pub fn min(a: u64, b: u64, ty: IntType) -> u64 {
    if cmp(a, b, ty).is_lt() { a & ty.mask() } else { b & ty.mask() }
}

/// The greater operand.
#[inline]
pub fn max(a: u64, b: u64, ty: IntType) -> u64 {
    if cmp(a, b, ty).is_gt() { a & ty.mask() } else { b & ty.mask() }
}

/// `.relu` on the result of `min` and `max`: negative numbers become 0.
#[inline]
pub fn relu(a: u64, ty: IntType) -> u64 {
    if ty.is_negative(a) { 0 } else { a & ty.mask() }
}

/// Whether the relation holds between `a` and `b`.
#[inline]
pub fn compare(relation: Relation, a: u64, b: u64, ty: IntType) -> bool {
    relation.holds(Some(cmp(a, b, ty)))
}

#[inline]
fn cmp(a: u64, b: u64, ty: IntType) -> Ordering {
    let (a, b) = (ty.extend(a), ty.extend(b));
    if ty.signed { (a as i64).cmp(&(b as i64)) } else { a.cmp(&b) }
}
