//! Layout of the floating-point formats; exact values, and the one place where they are rounded.

use super::Rounding;

/// A binary floating-point format: sign, exponent, fraction, from the most significant bit down.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Format {
    exponent_bits: u32,
    fraction_bits: u32,
    /// Bits below the fraction that the container has and the format has not.
    padding_bits: u32,
    /// The largest exponent holds numbers; only the pattern of all ones is a NaN (E4M3).
    no_infinity: bool,
    nan: u64,
}

/// A bit pattern's value.
pub(super) enum Value {
    Nan,
    Infinity { negative: bool },
    Finite(Exact),
}

/// The number `significand * 2^exponent`, negated when `negative`; zero has a sign.
#[derive(Clone, Copy)]
pub(super) struct Exact {
    pub negative: bool,
    pub significand: u64,
    pub exponent: i32,
}

impl Format {
    /// IEEE binary16.
    pub const F16: Format = Format::ieee(5, 10, 0x7fff);
    /// bfloat16: the upper half of an f32.
    pub const BF16: Format = Format::ieee(8, 7, 0x7fff);
    /// IEEE binary32.
    pub const F32: Format = Format::ieee(8, 23, 0x7fff_ffff);
    /// IEEE binary64. Its canonical NaN is that of an invalid operation (`CUDART_NAN` of CUDA's math_constants.h).
    pub const F64: Format = Format::ieee(11, 52, 0xfff8_0000_0000_0000);
    /// `.tf32`: an f32 with a fraction of 10 bits, the 13 lower bits zero.
    pub const TF32: Format = Format { padding_bits: 13, ..Format::ieee(8, 10, 0x7fff_ffff) };
    /// `.e4m3`: largest number 448, no infinity (OCP 8-bit floating point specification 1.0).
    pub const E4M3: Format = Format { no_infinity: true, ..Format::ieee(4, 3, 0x7f) };
    /// `.e5m2`: as IEEE, 8 bits wide (OCP 8-bit floating point specification 1.0).
    pub const E5M2: Format = Format::ieee(5, 2, 0x7f);
    /// The upper word of an f64, of `rcp.approx.ftz.f64` and `rsqrt.approx.ftz.f64`, with the NaN they give.
    pub(super) const F64_UPPER: Format =
        Format { padding_bits: 32, ..Format::ieee(11, 20, 0x7fff_ffff_0000_0000) };

    const fn ieee(exponent_bits: u32, fraction_bits: u32, nan: u64) -> Format {
        Format { exponent_bits, fraction_bits, padding_bits: 0, no_infinity: false, nan }
    }

    /// The bit pattern of the canonical NaN.
    #[inline]
    pub const fn nan(self) -> u64 {
        self.nan
    }

    /// The bit pattern that has only the sign.
    #[inline]
    pub const fn sign_bit(self) -> u64 {
        1 << (self.exponent_bits + self.fraction_bits + self.padding_bits)
    }

    /// The bit pattern of positive infinity; in a format without one, the NaN that takes its place.
    #[inline]
    pub const fn infinity(self) -> u64 {
        if self.no_infinity {
            return self.nan;
        }
        ((1 << self.exponent_bits) - 1) << (self.fraction_bits + self.padding_bits)
    }

    /// The bit pattern of the largest number.
    #[inline]
    pub const fn max_finite(self) -> u64 {
        self.infinity() - (1 << self.padding_bits)
    }

    /// The bit pattern of the smallest positive number that is not subnormal.
    #[inline]
    pub const fn min_normal(self) -> u64 {
        1 << (self.fraction_bits + self.padding_bits)
    }

    /// The bit pattern of 1.0.
    #[inline]
    pub const fn one(self) -> u64 {
        (self.bias() as u64) << (self.fraction_bits + self.padding_bits)
    }

    /// The bits without the sign.
    #[inline]
    pub const fn magnitude(self, bits: u64) -> u64 {
        bits & (self.sign_bit() - 1)
    }

    /// Whether the bits are a NaN.
    #[inline]
    pub const fn is_nan(self, bits: u64) -> bool {
        if self.no_infinity {
            self.magnitude(bits) == self.nan
        } else {
            self.magnitude(bits) > self.infinity()
        }
    }

    /// Whether the bits are an infinity.
    #[inline]
    pub const fn is_infinite(self, bits: u64) -> bool {
        !self.no_infinity && self.magnitude(bits) == self.infinity()
    }

    /// Whether the bits are a number other than zero and below the smallest normal one.
    #[inline]
    pub const fn is_subnormal(self, bits: u64) -> bool {
        self.magnitude(bits) != 0 && self.magnitude(bits) < self.min_normal()
    }

    #[inline]
    pub(super) const fn is_negative(self, bits: u64) -> bool {
        bits & self.sign_bit() != 0
    }

    const fn bias(self) -> i32 {
        (1 << (self.exponent_bits - 1)) - 1
    }

    #[inline]
    pub(super) fn decode(self, bits: u64) -> Value {
        let negative = self.is_negative(bits);
        if self.is_nan(bits) {
            return Value::Nan;
        }
        if self.is_infinite(bits) {
            return Value::Infinity { negative };
        }
        let magnitude = self.magnitude(bits) >> self.padding_bits;
        let biased = (magnitude >> self.fraction_bits) as i32;
        let fraction = magnitude & ((1 << self.fraction_bits) - 1);
        let significand = if biased == 0 { fraction } else { fraction | 1 << self.fraction_bits };
        let exponent = biased.max(1) - self.bias() - self.fraction_bits as i32;
        Value::Finite(Exact { negative, significand, exponent })
    }

    /// The bits of `value` rounded once. Beyond the range it is infinity or, where the direction says so, the
    /// largest number.
    #[inline]
    pub(super) fn encode(self, value: Exact, rounding: Rounding) -> u64 {
        let sign = if value.negative { self.sign_bit() } else { 0 };
        if value.significand == 0 {
            return sign;
        }
        let top_exponent = value.exponent + value.significand.ilog2() as i32;
        if top_exponent > self.bias() + 1 {
            return sign | self.overflow(value.negative, rounding);
        }
        let min_exponent = 1 - self.bias();
        let binade = top_exponent.max(min_exponent);
        let kept = value.to_multiple_of(binade - self.fraction_bits as i32, rounding);
        // The leading one of a normal number adds 1 to the exponent field, as does a carry out of the fraction.
        let magnitude = (((binade - min_exponent) as u64) << self.fraction_bits) + kept;
        let magnitude = magnitude << self.padding_bits;
        if magnitude >= self.infinity() {
            return sign | self.overflow(value.negative, rounding);
        }
        sign | magnitude
    }

    const fn overflow(self, negative: bool, rounding: Rounding) -> u64 {
        match (rounding, negative) {
            (Rounding::Zero, _) | (Rounding::Down, false) | (Rounding::Up, true) => self.max_finite(),
            _ => self.infinity(),
        }
    }

    /// The value as an f64, which holds every number of the narrower formats. NaNs lose their payload.
    #[inline]
    pub(super) fn to_f64(self, bits: u64) -> f64 {
        match self.decode(bits) {
            Value::Nan => f64::NAN,
            Value::Infinity { negative: false } => f64::INFINITY,
            Value::Infinity { negative: true } => f64::NEG_INFINITY,
            Value::Finite(exact) => f64::from_bits(Format::F64.encode(exact, Rounding::Nearest)),
        }
    }

    /// An f64 rounded to this format; a NaN becomes the canonical one.
    #[inline]
    pub(super) fn round_f64(self, value: f64, rounding: Rounding) -> u64 {
        match Format::F64.decode(value.to_bits()) {
            Value::Nan => self.nan,
            Value::Infinity { negative } => self.infinity() | if negative { self.sign_bit() } else { 0 },
            Value::Finite(exact) => self.encode(exact, rounding),
        }
    }
}

impl Exact {
    /// The magnitude in units of `2^quantum_exponent`, rounded to a whole number of them. The caller sees to it
    /// that this fits 64 bits.
    #[inline]
    pub(super) fn to_multiple_of(self, quantum_exponent: i32, rounding: Rounding) -> u64 {
        let shift = quantum_exponent - self.exponent;
        if shift <= 0 {
            return self.significand << -shift;
        }
        // What is cut off, against half a unit; from 65 bits on it is less than half, whatever it is.
        let (kept, rest, half) = match shift {
            1..=63 => (self.significand >> shift, self.significand & ((1 << shift) - 1), 1u64 << (shift - 1)),
            64 => (0, self.significand, 1 << 63),
            _ => (0, u64::from(self.significand != 0), 2),
        };
        let away = match rounding {
            Rounding::Nearest => rest > half || (rest == half && kept & 1 == 1),
            Rounding::NearestAway => rest >= half,
            Rounding::Zero => false,
            Rounding::Down => self.negative && rest != 0,
            Rounding::Up => !self.negative && rest != 0,
        };
        kept + u64::from(away)
    }
}
