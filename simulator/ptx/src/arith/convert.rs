//! `cvt` (PTX ISA, "Data Movement and Conversion Instructions: cvt"), for any pair of types.
//!
//! Values travel in the low bits of a u64; upper bits of operands are ignored, those of results are zero.

use super::format::{Exact, Value};
use super::int::IntType;
use super::{Format, Rounding, sign};

/// Modifiers of a conversion to a floating-point type.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ConvertMode {
    /// Direction of rounding; of no effect where the conversion is exact.
    pub rounding: Rounding,
    /// `.ftz`: f32 operands and results that are subnormal become zero and keep their sign. Other formats do not.
    pub ftz: bool,
    /// `.sat`: the result is clamped to 0.0 to 1.0; NaN and -0.0 become +0.0.
    pub sat: bool,
    /// `.relu`: negative results and -0.0 become +0.0.
    pub relu: bool,
    /// `.satfinite`: what is beyond the format's largest number becomes that number.
    pub satfinite: bool,
}

impl ConvertMode {
    #[inline]
    fn operand(self, bits: u64, format: Format) -> u64 {
        let bits = bits & (format.sign_bit() | (format.sign_bit() - 1));
        if self.ftz && format == Format::F32 { sign::flush(bits, format) } else { bits }
    }

    #[inline]
    fn finish(self, mut bits: u64, format: Format) -> u64 {
        if self.ftz && format == Format::F32 {
            bits = sign::flush(bits, format);
        }
        if self.relu {
            bits = sign::relu(bits, format);
        }
        if self.sat {
            bits = sign::saturate(bits, format);
        }
        bits
    }

    #[inline]
    fn encode(self, value: Exact, format: Format) -> u64 {
        let bits = format.encode(value, self.rounding);
        // Without infinity the overflow is a NaN; `value` is none.
        if self.satfinite && format.magnitude(bits) > format.max_finite() {
            return (bits & format.sign_bit()) | format.max_finite();
        }
        bits
    }
}

/// From one floating-point format to another, or to the same for the sake of the modifiers.
///
/// NaNs: into f32, f16, bf16 and narrower ones they become the canonical NaN, except that bf16 to f32 keeps the
/// bits, as the shift does by which GPUs convert. Into f64 the payload is kept. PTX specifies none of it.
#[inline]
pub fn float_to_float(bits: u64, from: Format, to: Format, mode: ConvertMode) -> u64 {
    let bits = mode.operand(bits, from);
    let result = match from.decode(bits) {
        Value::Nan => nan_to_float(bits, from, to),
        Value::Infinity { negative } => {
            let sign_bit = if negative { to.sign_bit() } else { 0 };
            sign_bit | if mode.satfinite { to.max_finite() } else { to.infinity() }
        }
        Value::Finite(exact) => mode.encode(exact, to),
    };
    mode.finish(result, to)
}

fn nan_to_float(bits: u64, from: Format, to: Format) -> u64 {
    if to != Format::F64 {
        return if from == Format::BF16 && to == Format::F32 { bits << 16 } else { to.nan() };
    }
    if from == Format::F64 {
        return sign::quiet(bits, from);
    }
    // By way of f32, as the narrower formats go there first.
    let single = if from == Format::F32 { bits } else { nan_to_float(bits, from, Format::F32) };
    let sign_bit = if Format::F32.is_negative(single) { Format::F64.sign_bit() } else { 0 };
    let payload = (single & 0x007f_ffff) << 29;
    sign::quiet(sign_bit | Format::F64.infinity() | payload, Format::F64)
}

/// From an integer to a floating-point format.
#[inline]
pub fn int_to_float(bits: u64, from: IntType, to: Format, mode: ConvertMode) -> u64 {
    let value = from.value(bits);
    let exact = Exact { negative: value < 0, significand: value.unsigned_abs() as u64, exponent: 0 };
    mode.finish(mode.encode(exact, to), to)
}

/// From a floating-point format to an integer: rounded, then clamped to the type's range, with or without `.sat`.
///
/// A NaN gives 0 when the operand is not f64 and the result is not 64 bits wide, else the pattern that has only the
/// top bit. `ftz` is for f32 operands.
#[inline]
pub fn float_to_int(bits: u64, from: Format, to: IntType, rounding: Rounding, ftz: bool) -> u64 {
    let mode = ConvertMode { ftz, ..ConvertMode::default() };
    match from.decode(mode.operand(bits, from)) {
        Value::Nan if from != Format::F64 && to.bits != 64 => 0,
        Value::Nan => 1 << (to.bits - 1),
        Value::Infinity { negative } => to.clamp(if negative { i128::MIN } else { i128::MAX }),
        Value::Finite(exact) => to.clamp(rounded_to_integer(exact, rounding)),
    }
}

/// The integer that `exact` is rounded to, or some integer beyond all types when it does not fit 128 bits.
#[inline]
fn rounded_to_integer(exact: Exact, rounding: Rounding) -> i128 {
    let magnitude = match exact.exponent {
        ..=0 => i128::from(exact.to_multiple_of(0, rounding)),
        1..64 => i128::from(exact.significand) << exact.exponent,
        // Only zero has no leading bit above 2^64.
        _ if exact.significand == 0 => 0,
        _ => i128::MAX,
    };
    if exact.negative { -magnitude } else { magnitude }
}

/// From one integer type to another: the low bits, or with `sat` the nearest number that the type has.
#[inline]
pub fn int_to_int(bits: u64, from: IntType, to: IntType, sat: bool) -> u64 {
    let value = from.value(bits);
    if sat { to.clamp(value) } else { to.wrap(value) }
}

/// To an integral number in the same format (`cvt.rni.f32.f32` and its like). Zeros keep the operand's sign.
#[inline]
pub fn round_to_integral(bits: u64, format: Format, mode: ConvertMode) -> u64 {
    let bits = mode.operand(bits, format);
    let result = match format.decode(bits) {
        Value::Nan => sign::quiet(bits, format),
        Value::Infinity { .. } => bits,
        Value::Finite(exact) if exact.exponent >= 0 => bits,
        Value::Finite(exact) => {
            let significand = exact.to_multiple_of(0, mode.rounding);
            format.encode(Exact { significand, exponent: 0, ..exact }, Rounding::Nearest)
        }
    };
    mode.finish(result, format)
}
