//! f16 and bf16.

use proptest::prelude::*;
use rustc_apfloat::ieee::{BFloat, Half};
use rustc_apfloat::{Float, Round};
use simcuda_ptx::arith::{FloatMode, Format, MinMaxMode, Property, Relation, Rounding, bf16, f16};

use crate::{ROUNDINGS, config, half_patterns, power_of_two, stride};

const NAN: u16 = 0x7fff;
const SIGN: u16 = 0x8000;

/// A reference value with PTX's canonical NaN and modifiers; `one` is the pattern of 1.0.
fn modified<F: Float>(value: F, mode: FloatMode, one: u16) -> u16 {
    if value.is_nan() {
        return if mode.sat { 0 } else { NAN };
    }
    let bits = value.to_bits() as u16;
    let bits = if mode.ftz && value.is_denormal() { bits & SIGN } else { bits };
    match mode.sat {
        true if bits & SIGN != 0 => 0,
        true => bits.min(one),
        false => bits,
    }
}

fn operand<F: Float>(bits: u16, ftz: bool) -> F {
    let value = F::from_bits(u128::from(bits));
    if ftz && value.is_denormal() { F::from_bits(u128::from(bits & SIGN)) } else { value }
}

/// Compares the four operations of a format's module with apfloat's in one direction.
macro_rules! check_arithmetic {
    ($module:ident, $reference:ty, $one:expr, $a:expr, $b:expr, $c:expr, $mode:expr, $round:expr) => {{
        let (a, b, c, mode, round): (u16, u16, u16, FloatMode, Round) = ($a, $b, $c, $mode, $round);
        let reference = |bits| operand::<$reference>(bits, mode.ftz);
        let (x, y, z) = (reference(a), reference(b), reference(c));
        let one = $one;
        assert_eq!($module::add(a, b, mode), modified(x.add_r(y, round).value, mode, one), "{a:#x} + {b:#x}");
        assert_eq!($module::sub(a, b, mode), modified(x.sub_r(y, round).value, mode, one), "{a:#x} - {b:#x}");
        assert_eq!($module::mul(a, b, mode), modified(x.mul_r(y, round).value, mode, one), "{a:#x} * {b:#x}");
        let fused = modified(x.mul_add_r(y, z, round).value, mode, one);
        assert_eq!($module::fma(a, b, c, mode), fused, "{a:#x} * {b:#x} + {c:#x}");
    }};
}

proptest! {
    #![proptest_config(config(8_000))]

    #[test]
    fn f16_arithmetic_is_apfloats(
        a in half_patterns(Format::F16), b in half_patterns(Format::F16), c in half_patterns(Format::F16),
        ftz: bool, sat: bool,
    ) {
        for (rounding, round) in ROUNDINGS {
            check_arithmetic!(f16, Half, 0x3c00, a, b, c, FloatMode { rounding, ftz, sat }, round);
        }
    }

    #[test]
    fn bf16_arithmetic_is_apfloats(
        a in half_patterns(Format::BF16), b in half_patterns(Format::BF16), c in half_patterns(Format::BF16),
    ) {
        for (rounding, round) in ROUNDINGS {
            let mode = FloatMode { rounding, ..FloatMode::default() };
            check_arithmetic!(bf16, BFloat, 0x3f80, a, b, c, mode, round);
        }
    }

    #[test]
    fn selections_and_comparisons(a in half_patterns(Format::F16), b in half_patterns(Format::F16), nan: bool) {
        let (x, y) = (operand::<Half>(a, false), operand::<Half>(b, false));
        let mode = MinMaxMode { nan, ..MinMaxMode::default() };
        let canonical = |value: Half| if value.is_nan() { NAN } else { value.to_bits() as u16 };
        let one_is_nan = x.is_nan() || y.is_nan();
        let expected = match (x.is_nan(), y.is_nan()) {
            _ if one_is_nan && nan => (NAN, NAN),
            (true, _) => (canonical(y), canonical(y)),
            (_, true) => (canonical(x), canonical(x)),
            _ => (canonical(x.minimum(y)), canonical(x.maximum(y))),
        };
        prop_assert_eq!((f16::min(a, b, mode), f16::max(a, b, mode)), expected);
        prop_assert_eq!(f16::compare(Relation::Lt, a, b, false), x < y);
        prop_assert_eq!(f16::compare(Relation::Geu, a, b, false), x.partial_cmp(&y).is_none_or(std::cmp::Ordering::is_ge));
        prop_assert_eq!(f16::compare(Relation::Eq, a, b, false), x == y);
        prop_assert_eq!(f16::compare(Relation::Num, a, b, false), !one_is_nan);
    }
}

/// Products that an addend beyond the reach of an f64 moves off a tie: the cases where rounding twice fails.
#[test]
fn fma_rounds_once() {
    for a in (0x3c00..0x4000u16).step_by(31 * stride().min(20)) {
        for b in (0x3c00..0x4000u16).step_by(17 * stride().min(20)) {
            // From the smallest subnormal number upwards, either sign.
            for c in (0..0x7c00u16).step_by(977).map(|bits| bits | 1) {
                for c in [c, c | SIGN] {
                    check_arithmetic!(
                        f16,
                        Half,
                        0x3c00,
                        a,
                        b,
                        c,
                        FloatMode::default(),
                        Round::NearestTiesToEven
                    );
                }
            }
        }
    }
    for a in (0x3f80..0x4000u16).step_by(3 * stride().min(20)) {
        for b in (0x3f80..0x4000u16).step_by(5 * stride().min(20)) {
            for c in (0..0x7f80u16).step_by(1201).map(|bits| bits | 1) {
                for c in [c, c | SIGN] {
                    check_arithmetic!(
                        bf16,
                        BFloat,
                        0x3f80,
                        a,
                        b,
                        c,
                        FloatMode::default(),
                        Round::NearestTiesToEven
                    );
                }
            }
        }
    }
}

/// Every operand against some others, all of them f16 or bf16.
#[test]
fn every_operand_adds_and_multiplies() {
    let others = [0u16, 1, 0x03ff, 0x0400, 0x3bff, 0x3c00, 0x3c01, 0x7bff, 0x7c00, 0x7f80, 0x7fff, 0xb555];
    for a in (0..=u16::MAX).step_by(stride()) {
        for b in others {
            let mode = FloatMode::default();
            check_arithmetic!(f16, Half, 0x3c00, a, b, a ^ b, mode, Round::NearestTiesToEven);
            check_arithmetic!(bf16, BFloat, 0x3f80, a, b, a ^ b, mode, Round::NearestTiesToEven);
        }
    }
}

#[test]
fn every_operand_has_its_sign_and_property() {
    for a in (0..=u16::MAX).step_by(stride()) {
        let x = operand::<Half>(a, false);
        assert_eq!(f16::abs(a, false), if x.is_nan() { NAN } else { a & !SIGN });
        assert_eq!(f16::neg(a, false), if x.is_nan() { NAN } else { a ^ SIGN });
        assert_eq!(
            f16::neg(a, true),
            if x.is_nan() { NAN } else { operand::<Half>(a, true).to_bits() as u16 ^ SIGN }
        );
        let relu = if x.is_nan() { NAN } else { a * u16::from(a & SIGN == 0) };
        assert_eq!(f16::relu(a), relu);
        assert_eq!(f16::testp(a, Property::Subnormal), x.is_denormal());
        assert_eq!(f16::testp(a, Property::Finite), x.is_finite());
        let y = operand::<BFloat>(a, false);
        assert_eq!(bf16::abs(a, false), if y.is_nan() { NAN } else { a & !SIGN });
        assert_eq!(bf16::relu(a), if y.is_nan() { NAN } else { a * u16::from(a & SIGN == 0) });
        assert_eq!(bf16::testp(a, Property::NotANumber), y.is_nan());
    }
}

fn value(bits: u16, format: Format) -> f64 {
    match format {
        Format::BF16 => f64::from(f32::from_bits(u32::from(bits) << 16)),
        _ => {
            let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 0x3ff));
            let magnitude = match exponent {
                0 => fraction * power_of_two(-24),
                31 if fraction == 0.0 => f64::INFINITY,
                31 => f64::NAN,
                _ => (1024.0 + fraction) * power_of_two(exponent - 25),
            };
            if bits & SIGN != 0 { -magnitude } else { magnitude }
        }
    }
}

/// A correctly rounded result is no farther from the exact one than its two neighbours.
fn assert_nearest(result: u16, exact: f64, format: Format) {
    let distance = (value(result, format) - exact).abs();
    for neighbour in [result.wrapping_sub(1), result.wrapping_add(1)] {
        let other = value(neighbour, format);
        assert!(!other.is_finite() || distance <= (other - exact).abs(), "{result:#x} for {exact}");
    }
}

#[test]
fn every_approximation_is_the_nearest() {
    for a in (0..=u16::MAX).step_by(stride()) {
        let x = value(a, Format::F16);
        if x.is_finite() && x < 15.9 {
            assert_nearest(f16::ex2_approx(a, false), x.exp2(), Format::F16);
        }
        let y = value(a, Format::BF16);
        if y.is_finite() && y < 127.9 && y > -125.0 && !(y != 0.0 && y.abs() < 1e-30) {
            assert_nearest(bf16::ex2_approx_ftz(a), y.exp2(), Format::BF16);
        }
        if !x.is_nan() {
            assert_nearest(f16::tanh_approx(a), x.tanh(), Format::F16);
        }
        if !y.is_nan() {
            assert_nearest(bf16::tanh_approx(a), y.tanh(), Format::BF16);
        }
    }
}

/// PTX ISA, tables of half-precision `ex2` and `tanh`.
#[test]
fn special_values_of_approximations() {
    let (one, infinity) = (0x3c00, 0x7c00);
    crate::check_table(
        "ex2.approx.f16",
        |a| f16::ex2_approx(a, false),
        &[
            (SIGN | infinity, 0),
            (SIGN, one),
            (0, one),
            (infinity, infinity),
            (0xfe00, NAN),
            (0x4c00, infinity),
            // 2 to the power -24 is the smallest subnormal number, and supported.
            (0xce00, 1),
        ],
    );
    assert_eq!(f16::ex2_approx(0xce00, true), 0);
    crate::check_table(
        "tanh.approx.f16",
        f16::tanh_approx,
        &[
            (SIGN | infinity, SIGN | one),
            (SIGN, SIGN),
            (0, 0),
            (infinity, one),
            (0x7c01, NAN),
            (1, 1),
            (SIGN | 1, SIGN | 1),
        ],
    );
    let (one, infinity) = (0x3f80, 0x7f80);
    crate::check_table(
        "ex2.approx.ftz.bf16",
        bf16::ex2_approx_ftz,
        &[
            (SIGN | infinity, 0),
            (SIGN | 0x7f, one),
            (SIGN, one),
            (0, one),
            (0x7f, one),
            (infinity, infinity),
            (0xff81, NAN),
            // 2 to the power -127 is subnormal.
            (0xc2fe, 0),
        ],
    );
    crate::check_table(
        "tanh.approx.bf16",
        bf16::tanh_approx,
        &[(SIGN | infinity, SIGN | one), (SIGN, SIGN), (0, 0), (infinity, one), (0x7f81, NAN), (0x7f, 0x7f)],
    );
    assert_eq!(bf16::min(0, SIGN, MinMaxMode::default()), SIGN);
    assert_eq!(bf16::max(SIGN, 0, MinMaxMode::default()), 0);
    let down = FloatMode { rounding: Rounding::Down, ..FloatMode::default() };
    assert_eq!(bf16::sub(one, one, down), SIGN);
}
