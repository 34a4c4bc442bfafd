//! Operations on the sign and the class of a bit pattern, without rounding, for every format.

use super::Format;

/// Subnormal numbers become zero and keep their sign (`.ftz`).
#[inline]
pub(super) fn flush(bits: u64, format: Format) -> u64 {
    if format.is_subnormal(bits) { bits & format.sign_bit() } else { bits }
}

/// Clamps to 0.0 to 1.0; NaN and -0.0 become +0.0 (`.sat`).
#[inline]
pub(super) fn saturate(bits: u64, format: Format) -> u64 {
    if format.is_nan(bits) || format.is_negative(bits) { 0 } else { bits.min(format.one()) }
}

/// Negative numbers and -0.0 become +0.0; NaN becomes the canonical one (`.relu`).
#[inline]
pub(super) fn relu(bits: u64, format: Format) -> u64 {
    if format.is_nan(bits) {
        format.nan()
    } else if format.is_negative(bits) {
        0
    } else {
        bits
    }
}

/// The NaN that results from the operand `bits`, a NaN: f64 keeps the payload, the others are canonical.
#[inline]
pub(super) fn quiet(bits: u64, format: Format) -> u64 {
    if format == Format::F64 { bits | 1 << 51 } else { format.nan() }
}

/// `abs`, except for NaN operands, where formats differ.
#[inline]
pub(super) fn abs(bits: u64, format: Format, ftz: bool) -> u64 {
    let bits = if ftz { flush(bits, format) } else { bits };
    if format.is_nan(bits) { keep_nan(bits, format) } else { format.magnitude(bits) }
}

/// `neg`, except for NaN operands, where formats differ.
#[inline]
pub(super) fn neg(bits: u64, format: Format, ftz: bool) -> u64 {
    let bits = if ftz { flush(bits, format) } else { bits };
    if format.is_nan(bits) { keep_nan(bits, format) } else { bits ^ format.sign_bit() }
}

/// `abs.f64` and `neg.f64` pass a NaN through as it is; the others leave it open and give the canonical one.
fn keep_nan(bits: u64, format: Format) -> u64 {
    if format == Format::F64 { bits } else { format.nan() }
}

/// The value of `b` with the sign of `a`.
#[inline]
pub(super) fn copysign(a: u64, b: u64, format: Format) -> u64 {
    (a & format.sign_bit()) | format.magnitude(b)
}
