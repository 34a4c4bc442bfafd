//! IEEE binary32 (`.f32`). Round-to-nearest goes by the host's own arithmetic; the other directions go by f64
//! results that are rounded to odd (module `odd`) and then once to f32.

use super::{FloatMode, Format, MinMaxMode, Property, Relation, Rounding, odd, order, sign};

const FORMAT: Format = Format::F32;
const NAN: u32 = FORMAT.nan() as u32;
const SIGN: u32 = FORMAT.sign_bit() as u32;
const INFINITY: u32 = FORMAT.infinity() as u32;
const MIN_NORMAL: u32 = FORMAT.min_normal() as u32;

#[inline]
fn flush(bits: u32) -> u32 {
    if bits & !SIGN < MIN_NORMAL { bits & SIGN } else { bits }
}

#[inline]
fn operand(bits: u32, ftz: bool) -> f32 {
    f32::from_bits(if ftz { flush(bits) } else { bits })
}

#[inline]
fn finish(bits: u32, mode: FloatMode) -> u32 {
    if bits & !SIGN > INFINITY {
        return if mode.sat { 0 } else { NAN };
    }
    let bits = if mode.ftz { flush(bits) } else { bits };
    if mode.sat { sign::saturate(u64::from(bits), FORMAT) as u32 } else { bits }
}

/// A result in round-to-nearest from the host; in another direction from the f64 that `exact` rounds to odd.
#[inline]
fn round(mode: FloatMode, nearest: f32, to_odd: impl FnOnce() -> f64) -> u32 {
    let bits = match mode.rounding {
        Rounding::Nearest => nearest.to_bits(),
        other => FORMAT.round_f64(to_odd(), other) as u32,
    };
    finish(bits, mode)
}

/// `a + b`.
#[inline]
pub fn add(a: u32, b: u32, mode: FloatMode) -> u32 {
    let (a, b) = (operand(a, mode.ftz), operand(b, mode.ftz));
    round(mode, a + b, || odd::add(f64::from(a), f64::from(b), mode.rounding))
}

/// `a - b`.
#[inline]
pub fn sub(a: u32, b: u32, mode: FloatMode) -> u32 {
    let (a, b) = (operand(a, mode.ftz), operand(b, mode.ftz));
    round(mode, a - b, || odd::add(f64::from(a), -f64::from(b), mode.rounding))
}

/// `a * b`.
#[inline]
pub fn mul(a: u32, b: u32, mode: FloatMode) -> u32 {
    let (a, b) = (operand(a, mode.ftz), operand(b, mode.ftz));
    round(mode, a * b, || f64::from(a) * f64::from(b))
}

/// `a * b + c`, rounded once. `mad.f32` is the same on sm_20 and later.
#[inline]
pub fn fma(a: u32, b: u32, c: u32, mode: FloatMode) -> u32 {
    let (a, b, c) = (operand(a, mode.ftz), operand(b, mode.ftz), operand(c, mode.ftz));
    round(mode, a.mul_add(b, c), || odd::add(f64::from(a) * f64::from(b), f64::from(c), mode.rounding))
}

/// `a / b` (`div.rn` and the other directions).
#[inline]
pub fn div(a: u32, b: u32, mode: FloatMode) -> u32 {
    let (a, b) = (operand(a, mode.ftz), operand(b, mode.ftz));
    round(mode, a / b, || odd::div(f64::from(a), f64::from(b)))
}

/// `1 / a` (`rcp.rn` and the other directions).
#[inline]
pub fn rcp(a: u32, mode: FloatMode) -> u32 {
    div(FORMAT.one() as u32, a, mode)
}

/// The square root (`sqrt.rn` and the other directions).
#[inline]
pub fn sqrt(a: u32, mode: FloatMode) -> u32 {
    let a = operand(a, mode.ftz);
    round(mode, a.sqrt(), || odd::sqrt(f64::from(a)))
}

/// `div.full`: ours is correctly rounded. PTX allows 2 ulp.
#[inline]
pub fn div_full(a: u32, b: u32, ftz: bool) -> u32 {
    div(a, b, nearest(ftz))
}

/// `div.approx`: ours is correctly rounded for |b| up to 2^126. PTX allows 2 ulp for |b| from 2^-126 to 2^126.
///
/// Beyond 2^126 the reciprocal counts as zero, as PTX says: an infinite `a` gives NaN, any other number a zero.
pub fn div_approx(a: u32, b: u32, ftz: bool) -> u32 {
    const TWO_TO_126: u32 = 0x7e80_0000;
    if (TWO_TO_126 + 1..INFINITY).contains(&(b & !SIGN)) {
        return mul(a, b & SIGN, nearest(ftz));
    }
    div(a, b, nearest(ftz))
}

/// `rcp.approx`: ours is correctly rounded. PTX allows 1 ulp.
#[inline]
pub fn rcp_approx(a: u32, ftz: bool) -> u32 {
    rcp(a, nearest(ftz))
}

/// `sqrt.approx`: ours is correctly rounded. PTX allows a relative error of 2^-23.
#[inline]
pub fn sqrt_approx(a: u32, ftz: bool) -> u32 {
    sqrt(a, nearest(ftz))
}

/// `rsqrt.approx`: ours is an f64 result rounded to f32, an error of at most 0.5001 ulp. PTX allows a relative
/// error of 2^-22.9.
#[inline]
pub fn rsqrt_approx(a: u32, ftz: bool) -> u32 {
    approximate(a, ftz, |x| 1.0 / x.sqrt())
}

/// `sin.approx`: ours is an f64 result rounded to f32, an error of at most 0.5001 ulp for every operand. PTX allows
/// an absolute error of 2^-20.5 from -2 pi to 2 pi and 2^-14.7 from -100 pi to 100 pi, and promises nothing beyond.
#[inline]
pub fn sin_approx(a: u32, ftz: bool) -> u32 {
    approximate(a, ftz, libm::sin)
}

/// `cos.approx`: as [`sin_approx`].
#[inline]
pub fn cos_approx(a: u32, ftz: bool) -> u32 {
    approximate(a, ftz, libm::cos)
}

/// `lg2.approx`: ours is an f64 result rounded to f32, an error of at most 0.5001 ulp. PTX allows an absolute error
/// of 2^-22 between 0.5 and 2, a relative error of 2^-22 elsewhere.
#[inline]
pub fn lg2_approx(a: u32, ftz: bool) -> u32 {
    approximate(a, ftz, libm::log2)
}

/// `ex2.approx`: ours is an f64 result rounded to f32, an error of at most 0.5001 ulp. PTX allows 2 ulp from the
/// correctly rounded result.
#[inline]
pub fn ex2_approx(a: u32, ftz: bool) -> u32 {
    approximate(a, ftz, libm::exp2)
}

/// `tanh.approx`: ours is an f64 result rounded to f32, an error of at most 0.5001 ulp. PTX allows a relative error
/// of 2^-11.
#[inline]
pub fn tanh_approx(a: u32) -> u32 {
    approximate(a, false, libm::tanh)
}

#[inline]
fn nearest(ftz: bool) -> FloatMode {
    FloatMode { rounding: Rounding::Nearest, ftz, sat: false }
}

#[inline]
fn approximate(a: u32, ftz: bool, function: impl Fn(f64) -> f64) -> u32 {
    finish((function(f64::from(operand(a, ftz))) as f32).to_bits(), nearest(ftz))
}

/// The lesser operand; -0.0 is less than +0.0.
#[inline]
pub fn min(a: u32, b: u32, mode: MinMaxMode) -> u32 {
    order::min(u64::from(a), u64::from(b), FORMAT, mode) as u32
}

/// The greater operand; -0.0 is less than +0.0.
#[inline]
pub fn max(a: u32, b: u32, mode: MinMaxMode) -> u32 {
    order::max(u64::from(a), u64::from(b), FORMAT, mode) as u32
}

/// The magnitude; a NaN becomes the canonical one.
#[inline]
pub fn abs(a: u32, ftz: bool) -> u32 {
    sign::abs(u64::from(a), FORMAT, ftz) as u32
}

/// `-a`; a NaN becomes the canonical one.
#[inline]
pub fn neg(a: u32, ftz: bool) -> u32 {
    sign::neg(u64::from(a), FORMAT, ftz) as u32
}

/// The value of `b` with the sign of `a`, NaNs included.
#[inline]
pub fn copysign(a: u32, b: u32) -> u32 {
    sign::copysign(u64::from(a), u64::from(b), FORMAT) as u32
}

/// Whether `a` has the property.
#[inline]
pub fn testp(a: u32, property: Property) -> bool {
    order::testp(u64::from(a), FORMAT, property)
}

/// Whether the relation holds between `a` and `b`.
#[inline]
pub fn compare(relation: Relation, a: u32, b: u32, ftz: bool) -> bool {
    relation.holds(operand(a, ftz).partial_cmp(&operand(b, ftz)))
}
