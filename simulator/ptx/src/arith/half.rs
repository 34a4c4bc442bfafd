//! f16 and bf16: the same functions on two formats.
//!
//! Operands become f64, where a product of two is exact and a sum is rounded to odd, and the result is rounded to
//! 16 bits once.

use super::{FloatMode, Format, Rounding, odd, sign};

#[inline]
fn operand(bits: u16, format: Format, mode: FloatMode) -> f64 {
    let bits = u64::from(bits);
    format.to_f64(if mode.ftz { sign::flush(bits, format) } else { bits })
}

#[inline]
pub(super) fn finish(value: f64, format: Format, mode: FloatMode) -> u16 {
    let mut bits = format.round_f64(value, mode.rounding);
    if mode.ftz {
        bits = sign::flush(bits, format);
    }
    if mode.sat {
        bits = sign::saturate(bits, format);
    }
    bits as u16
}

#[inline]
pub(super) fn add(a: u16, b: u16, format: Format, mode: FloatMode) -> u16 {
    let sum = odd::add(operand(a, format, mode), operand(b, format, mode), mode.rounding);
    finish(sum, format, mode)
}

#[inline]
pub(super) fn sub(a: u16, b: u16, format: Format, mode: FloatMode) -> u16 {
    let difference = odd::add(operand(a, format, mode), -operand(b, format, mode), mode.rounding);
    finish(difference, format, mode)
}

#[inline]
pub(super) fn mul(a: u16, b: u16, format: Format, mode: FloatMode) -> u16 {
    finish(operand(a, format, mode) * operand(b, format, mode), format, mode)
}

#[inline]
pub(super) fn fma(a: u16, b: u16, c: u16, format: Format, mode: FloatMode) -> u16 {
    let product = operand(a, format, mode) * operand(b, format, mode);
    finish(odd::add(product, operand(c, format, mode), mode.rounding), format, mode)
}

/// `function` in f64, then rounded once; `.ftz` where `ftz` says so.
#[inline]
pub(super) fn approximate(a: u16, format: Format, ftz: bool, function: fn(f64) -> f64) -> u16 {
    let mode = FloatMode { rounding: Rounding::Nearest, ftz, sat: false };
    finish(function(operand(a, format, mode)), format, mode)
}

/// The functions that f16 and bf16 share, for the format `$format`.
macro_rules! half_functions {
    ($format:expr) => {
        use super::{FloatMode, Format, MinMaxMode, Property, Relation, half, order, sign};

        const FORMAT: Format = $format;

        /// `a + b`.
        #[inline]
        pub fn add(a: u16, b: u16, mode: FloatMode) -> u16 {
            half::add(a, b, FORMAT, mode)
        }

        /// `a - b`.
        #[inline]
        pub fn sub(a: u16, b: u16, mode: FloatMode) -> u16 {
            half::sub(a, b, FORMAT, mode)
        }

        /// `a * b`.
        #[inline]
        pub fn mul(a: u16, b: u16, mode: FloatMode) -> u16 {
            half::mul(a, b, FORMAT, mode)
        }

        /// `a * b + c`, rounded once.
        #[inline]
        pub fn fma(a: u16, b: u16, c: u16, mode: FloatMode) -> u16 {
            half::fma(a, b, c, FORMAT, mode)
        }

        /// `.relu` on a result: negative numbers and -0.0 become +0.0, NaN the canonical one.
        #[inline]
        pub fn relu(a: u16) -> u16 {
            sign::relu(u64::from(a), FORMAT) as u16
        }

        /// The lesser operand; -0.0 is less than +0.0.
        #[inline]
        pub fn min(a: u16, b: u16, mode: MinMaxMode) -> u16 {
            order::min(u64::from(a), u64::from(b), FORMAT, mode) as u16
        }

        /// The greater operand; -0.0 is less than +0.0.
        #[inline]
        pub fn max(a: u16, b: u16, mode: MinMaxMode) -> u16 {
            order::max(u64::from(a), u64::from(b), FORMAT, mode) as u16
        }

        /// The magnitude; a NaN becomes the canonical one.
        #[inline]
        pub fn abs(a: u16, ftz: bool) -> u16 {
            sign::abs(u64::from(a), FORMAT, ftz) as u16
        }

        /// `-a`; a NaN becomes the canonical one.
        #[inline]
        pub fn neg(a: u16, ftz: bool) -> u16 {
            sign::neg(u64::from(a), FORMAT, ftz) as u16
        }

        /// Whether the relation holds between `a` and `b`.
        #[inline]
        pub fn compare(relation: Relation, a: u16, b: u16, ftz: bool) -> bool {
            let prepare = |bits| if ftz { sign::flush(u64::from(bits), FORMAT) } else { u64::from(bits) };
            relation.holds(order::partial_cmp(prepare(a), prepare(b), FORMAT))
        }

        /// Whether `a` has the property.
        #[inline]
        pub fn testp(a: u16, property: Property) -> bool {
            order::testp(u64::from(a), FORMAT, property)
        }

        /// The hyperbolic tangent, correctly rounded up to the error of an f64 function. PTX allows an absolute
        /// error of 2^-10.987 (f16) and 2^-8 (bf16).
        #[inline]
        pub fn tanh_approx(a: u16) -> u16 {
            half::approximate(a, FORMAT, false, libm::tanh)
        }
    };
}

pub(super) use half_functions;
