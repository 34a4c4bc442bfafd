//! IEEE binary64 (`.f64`). Round-to-nearest goes by the host's own arithmetic, the other directions by
//! `rustc_apfloat`. PTX gives it no `.ftz` and no `.sat`.
//!
//! NaN payloads are kept (PTX ISA, "Floating-Point Instructions"); which operand's, when several are NaNs, is not
//! documented: here it is the first.

use rustc_apfloat::ieee::Double;
use rustc_apfloat::{Float, Round};

use super::format::Value;
use super::{Format, MinMaxMode, Property, Relation, Rounding, order, sign};

const FORMAT: Format = Format::F64;

#[inline]
fn finish(result: f64, operands: &[u64]) -> u64 {
    if result.is_nan() { nan_of(operands) } else { result.to_bits() }
}

#[cold]
fn nan_of(operands: &[u64]) -> u64 {
    let nan_operand = operands.iter().find(|bits| FORMAT.is_nan(**bits));
    nan_operand.map_or(FORMAT.nan(), |bits| sign::quiet(*bits, FORMAT))
}

fn round(rounding: Rounding) -> Round {
    match rounding {
        Rounding::Nearest => Round::NearestTiesToEven,
        Rounding::Zero => Round::TowardZero,
        Rounding::Down => Round::TowardNegative,
        Rounding::Up => Round::TowardPositive,
        Rounding::NearestAway => Round::NearestTiesToAway,
    }
}

fn soft(bits: u64) -> Double {
    Double::from_bits(u128::from(bits))
}

fn hard(value: Double) -> f64 {
    f64::from_bits(value.to_bits() as u64)
}

/// `a + b`.
#[inline]
pub fn add(a: u64, b: u64, rounding: Rounding) -> u64 {
    let result = match rounding {
        Rounding::Nearest => f64::from_bits(a) + f64::from_bits(b),
        other => hard(soft(a).add_r(soft(b), round(other)).value),
    };
    finish(result, &[a, b])
}

/// `a - b`.
#[inline]
pub fn sub(a: u64, b: u64, rounding: Rounding) -> u64 {
    let result = match rounding {
        Rounding::Nearest => f64::from_bits(a) - f64::from_bits(b),
        other => hard(soft(a).sub_r(soft(b), round(other)).value),
    };
    finish(result, &[a, b])
}

/// `a * b`.
#[inline]
pub fn mul(a: u64, b: u64, rounding: Rounding) -> u64 {
    let result = match rounding {
        Rounding::Nearest => f64::from_bits(a) * f64::from_bits(b),
        other => hard(soft(a).mul_r(soft(b), round(other)).value),
    };
    finish(result, &[a, b])
}

/// `a * b + c`, rounded once. `mad.f64` is the same.
#[inline]
pub fn fma(a: u64, b: u64, c: u64, rounding: Rounding) -> u64 {
    let result = match rounding {
        Rounding::Nearest => f64::from_bits(a).mul_add(f64::from_bits(b), f64::from_bits(c)),
        other => hard(soft(a).mul_add_r(soft(b), soft(c), round(other)).value),
    };
    finish(result, &[a, b, c])
}

/// `a / b`.
#[inline]
pub fn div(a: u64, b: u64, rounding: Rounding) -> u64 {
    let result = match rounding {
        Rounding::Nearest => f64::from_bits(a) / f64::from_bits(b),
        other => hard(soft(a).div_r(soft(b), round(other)).value),
    };
    finish(result, &[a, b])
}

/// `1 / a`.
#[inline]
pub fn rcp(a: u64, rounding: Rounding) -> u64 {
    div(FORMAT.one(), a, rounding)
}

/// The square root.
pub fn sqrt(a: u64, rounding: Rounding) -> u64 {
    let operand = f64::from_bits(a);
    let nearest = operand.sqrt();
    if rounding == Rounding::Nearest || !nearest.is_finite() || nearest == 0.0 {
        return finish(nearest, &[a]);
    }
    // The sign of the exact root minus `nearest` is that of the remainder, which an fma gives exactly once the
    // operand is so large that nothing of it underflows. No root lies half-way, so `NearestAway` is `Nearest`.
    const TWO_TO_300: f64 = f64::from_bits((1023 + 300) << 52);
    let (scaled, root) = if operand < 1e-200 {
        (operand * TWO_TO_300 * TWO_TO_300, nearest * TWO_TO_300)
    } else {
        (operand, nearest)
    };
    let remainder = (-root).mul_add(root, scaled);
    let moved = match rounding {
        Rounding::Up if remainder > 0.0 => nearest.next_up(),
        Rounding::Down | Rounding::Zero if remainder < 0.0 => nearest.next_down(),
        _ => nearest,
    };
    moved.to_bits()
}

/// `rsqrt.approx.f64`: ours has an error of at most 1.5 ulp. PTX states no bound for it.
#[inline]
pub fn rsqrt_approx(a: u64) -> u64 {
    finish(1.0 / f64::from_bits(a).sqrt(), &[a])
}

/// `rcp.approx.ftz.f64`: uses the upper word of `a` only, and the lower word of the result is zero. Ours is the
/// nearest such number; PTX calls it a gross approximation and states no bound.
#[inline]
pub fn rcp_approx_ftz(a: u64) -> u64 {
    approximate_upper(a, |x| 1.0 / x)
}

/// `rsqrt.approx.ftz.f64`: as [`rcp_approx_ftz`].
#[inline]
pub fn rsqrt_approx_ftz(a: u64) -> u64 {
    approximate_upper(a, |x| 1.0 / x.sqrt())
}

fn approximate_upper(a: u64, function: impl Fn(f64) -> f64) -> u64 {
    const UPPER: Format = Format::F64_UPPER;
    // A NaN whose payload is in the lower word only is an infinity to an instruction that ignores that word.
    let upper = sign::flush(a & !u64::from(u32::MAX), UPPER);
    let operand = match UPPER.decode(upper) {
        Value::Nan => return UPPER.nan(),
        Value::Infinity { .. } | Value::Finite(_) => f64::from_bits(upper),
    };
    sign::flush(UPPER.round_f64(function(operand), Rounding::Nearest), UPPER)
}

/// The lesser operand; -0.0 is less than +0.0.
#[inline]
pub fn min(a: u64, b: u64) -> u64 {
    order::min(a, b, FORMAT, MinMaxMode::default())
}

/// The greater operand; -0.0 is less than +0.0.
#[inline]
pub fn max(a: u64, b: u64) -> u64 {
    order::max(a, b, FORMAT, MinMaxMode::default())
}

/// The magnitude; a NaN is passed through unchanged.
#[inline]
pub fn abs(a: u64) -> u64 {
    sign::abs(a, FORMAT, false)
}

/// `-a`; a NaN is passed through unchanged.
#[inline]
pub fn neg(a: u64) -> u64 {
    sign::neg(a, FORMAT, false)
}

/// The value of `b` with the sign of `a`, NaNs included.
#[inline]
pub fn copysign(a: u64, b: u64) -> u64 {
    sign::copysign(a, b, FORMAT)
}

/// Whether `a` has the property.
#[inline]
pub fn testp(a: u64, property: Property) -> bool {
    order::testp(a, FORMAT, property)
}

/// Whether the relation holds between `a` and `b`.
#[inline]
pub fn compare(relation: Relation, a: u64, b: u64) -> bool {
    relation.holds(f64::from_bits(a).partial_cmp(&f64::from_bits(b)))
}
