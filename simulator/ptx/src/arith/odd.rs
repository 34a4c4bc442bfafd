//! f64 results rounded to odd: the way to round once to a narrower format.
//!
//! A result that is not exact gets the one of its two neighbours whose last bit is 1. Rounding that to a format
//! with at least two bits less, in any direction, gives what rounding the exact result would give (Boldo and
//! Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
//! Operands are values of f32 or a narrower format, or products of two such: then nothing here overflows, and no
//! error term underflows.

use super::Rounding;

/// `value`, the nearest f64 to an exact result, moved to its odd neighbour on the side of `error`, which has the
/// sign of the exact result minus `value`.
#[inline]
fn to_odd(value: f64, error: f64) -> f64 {
    let bits = value.to_bits();
    if error == 0.0 || bits & 1 == 1 {
        return value;
    }
    let away_from_zero = (error > 0.0) == (value > 0.0);
    f64::from_bits(if away_from_zero { bits + 1 } else { bits - 1 })
}

/// `a + b`. `rounding` only decides the sign of a zero that is the sum of two numbers that cancel.
#[inline]
pub(super) fn add(a: f64, b: f64, rounding: Rounding) -> f64 {
    let sum = a + b;
    if sum == 0.0 && rounding == Rounding::Down && a.is_sign_negative() != b.is_sign_negative() {
        return -0.0;
    }
    if !sum.is_finite() || sum == 0.0 {
        return sum;
    }
    // Knuth's two-sum: the part of the exact sum that `sum` lacks.
    let from_b = sum - a;
    let error = (a - (sum - from_b)) + (b - from_b);
    to_odd(sum, error)
}

/// `a / b`.
#[inline]
pub(super) fn div(a: f64, b: f64) -> f64 {
    let quotient = a / b;
    if !quotient.is_finite() || quotient == 0.0 {
        return quotient;
    }
    let remainder = (-quotient).mul_add(b, a);
    to_odd(quotient, if b < 0.0 { -remainder } else { remainder })
}

/// The square root of `a`.
#[inline]
pub(super) fn sqrt(a: f64) -> f64 {
    let root = a.sqrt();
    if !root.is_finite() || root == 0.0 {
        return root;
    }
    to_odd(root, (-root).mul_add(root, a))
}
