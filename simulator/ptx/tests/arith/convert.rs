//! `cvt`.

use proptest::prelude::*;
use rustc_apfloat::ieee::{BFloat, Double, Float8E4M3FN, Float8E5M2, Half, Single};
use rustc_apfloat::{Float, FloatConvert, Round};
use simcuda_ptx::arith::convert::{
    ConvertMode, float_to_float, float_to_int, int_to_float, int_to_int, round_to_integral,
};
use simcuda_ptx::arith::int::IntType;
use simcuda_ptx::arith::{Format, Rounding};

use crate::{ROUNDINGS, config, patterns, stride};

const INT_TYPES: [IntType; 8] = [
    IntType::U8,
    IntType::U16,
    IntType::U32,
    IntType::U64,
    IntType::S8,
    IntType::S16,
    IntType::S32,
    IntType::S64,
];
const FORMATS: [Format; 4] = [Format::F16, Format::BF16, Format::F32, Format::F64];

fn mode(rounding: Rounding) -> ConvertMode {
    ConvertMode { rounding, ..ConvertMode::default() }
}

/// apfloat's conversion, except for NaNs.
fn reference<From: Float + FloatConvert<To>, To: Float>(bits: u64, round: Round) -> u64 {
    From::from_bits(u128::from(bits)).convert_r(round, &mut false).value.to_bits() as u64
}

type Conversion = (Format, Format, fn(u64, Round) -> u64);

const CONVERSIONS: [Conversion; 12] = [
    (Format::F64, Format::F32, reference::<Double, Single>),
    (Format::F64, Format::F16, reference::<Double, Half>),
    (Format::F64, Format::BF16, reference::<Double, BFloat>),
    (Format::F32, Format::F16, reference::<Single, Half>),
    (Format::F32, Format::BF16, reference::<Single, BFloat>),
    (Format::F32, Format::E5M2, reference::<Single, Float8E5M2>),
    (Format::F16, Format::E5M2, reference::<Half, Float8E5M2>),
    (Format::BF16, Format::F16, reference::<BFloat, Half>),
    (Format::F16, Format::BF16, reference::<Half, BFloat>),
    (Format::F16, Format::F64, reference::<Half, Double>),
    (Format::F32, Format::F64, reference::<Single, Double>),
    (Format::E5M2, Format::F16, reference::<Float8E5M2, Half>),
];

fn check_conversion(conversion: Conversion, bits: u64) {
    let (from, to, reference) = conversion;
    if from.is_nan(bits) {
        return;
    }
    for (rounding, round) in ROUNDINGS {
        let result = float_to_float(bits, from, to, mode(rounding));
        assert_eq!(result, reference(bits, round), "{bits:#x} {from:?} to {to:?} {rounding:?}");
    }
}

/// 16-bit and 8-bit operands one by one.
#[test]
fn every_narrow_operand_converts_as_apfloats() {
    for bits in (0..=u64::from(u16::MAX)).step_by(stride()) {
        for conversion in CONVERSIONS.into_iter().filter(|(from, ..)| from.sign_bit() == 0x8000) {
            check_conversion(conversion, bits);
        }
        let bf16 = float_to_float(bits, Format::BF16, Format::F32, mode(Rounding::Nearest));
        assert_eq!(bf16, bits << 16);
        let single = float_to_float(bits, Format::F16, Format::F32, mode(Rounding::Nearest));
        let back = float_to_float(single, Format::F32, Format::F16, mode(Rounding::Zero));
        assert_eq!(back, if Format::F16.is_nan(bits) { 0x7fff } else { bits });
        let expected = if Format::F16.is_nan(bits) {
            0x7fff_ffff
        } else {
            reference::<Half, Single>(bits, Round::TowardZero)
        };
        assert_eq!(single, expected);
    }
    for bits in 0..=255 {
        check_conversion((Format::E5M2, Format::F16, reference::<Float8E5M2, Half>), bits);
        check_conversion((Format::E4M3, Format::F16, reference::<Float8E4M3FN, Half>), bits);
    }
}

/// Every E4M3 and E5M2 number survives f16; what lies between goes to the nearest, and nothing beyond the largest.
#[test]
fn narrow_formats_take_the_nearest() {
    let satfinite = ConvertMode { satfinite: true, ..ConvertMode::default() };
    for (format, largest) in [(Format::E4M3, 448.0), (Format::E5M2, 57344.0)] {
        let value =
            |bits: u64| f64::from_bits(float_to_float(bits, format, Format::F64, ConvertMode::default()));
        assert_eq!(value(format.max_finite()), largest);
        let numbers: Vec<(u64, f64)> =
            (0..256).map(|bits| (bits, value(bits))).filter(|(_, value)| value.is_finite()).collect();
        for bits in (0..=u64::from(u16::MAX)).step_by(3 * stride()) {
            let operand =
                f64::from_bits(float_to_float(bits, Format::F16, Format::F64, mode(Rounding::Nearest)));
            let result = float_to_float(bits, Format::F16, format, satfinite);
            if operand.is_nan() {
                assert_eq!(result, 0x7f);
                continue;
            }
            let clamped = operand.clamp(-largest, largest);
            let distance = (value(result) - clamped).abs();
            for (other, number) in &numbers {
                let farther = (number - clamped).abs();
                assert!(distance <= farther, "{bits:#x} to {result:#x}, not {other:#x}");
                let tie = farther == distance && *number != value(result);
                assert!(!tie || result & 1 == 0, "{bits:#x} to {result:#x}, not to even");
            }
        }
    }
}

proptest! {
    #![proptest_config(config(8_000))]

    #[test]
    fn floats_convert_as_apfloats(wide in patterns(Format::F64), single in patterns(Format::F32)) {
        for conversion in CONVERSIONS {
            match conversion.0 {
                Format::F64 => check_conversion(conversion, wide),
                Format::F32 => check_conversion(conversion, single),
                _ => {}
            }
        }
    }

    /// f32 numbers as f64 and a little beside: where results of f64 arithmetic meet ties of f32.
    #[test]
    fn doubles_near_singles(single in patterns(Format::F32), half in any::<bool>(), beside in 0u64..3) {
        let bits = f64::from(f32::from_bits(single as u32)).to_bits() | u64::from(half) << 28;
        check_conversion((Format::F64, Format::F32, reference::<Double, Single>), (bits + beside).saturating_sub(1));
    }

    #[test]
    fn integers_convert_as_apfloats(bits in prop_oneof![any::<u64>(), any::<u32>().prop_map(u64::from)], shift in 0..64) {
        let bits = bits >> shift;
        for ty in INT_TYPES {
            let value = ty.value(bits);
            for (rounding, round) in ROUNDINGS {
                let expected = [
                    Half::from_i128_r(value, round).value.to_bits() as u64,
                    BFloat::from_i128_r(value, round).value.to_bits() as u64,
                    Single::from_i128_r(value, round).value.to_bits() as u64,
                    Double::from_i128_r(value, round).value.to_bits() as u64,
                ];
                for (format, expected) in FORMATS.into_iter().zip(expected) {
                    prop_assert_eq!(int_to_float(bits, ty, format, mode(rounding)), expected);
                }
            }
            if ty == IntType::S64 {
                let nearest = int_to_float(bits, ty, Format::F32, ConvertMode::default());
                prop_assert_eq!(nearest, u64::from((bits as i64 as f32).to_bits()));
            }
        }
    }

    /// Rounded as `round_to_integral` does, then by the host's saturating cast.
    #[test]
    fn floats_convert_to_integers(single in patterns(Format::F32), shift in 0u64..80) {
        // Most patterns have a magnitude below 1 or beyond all integers; these lie between.
        let near_integers = (single & 0x807f_ffff) | (120 + shift) << 23;
        for bits in [single, near_integers] {
            let value = f32::from_bits(bits as u32);
            let wide = f64::from(value).to_bits();
            for (rounding, _) in ROUNDINGS {
                let integral = host_integral(f64::from(value), rounding);
                for (ty, expected) in host_integers(integral) {
                    if value.is_nan() {
                        let double_nan = 1 << (ty.bits - 1);
                        let single_nan = if ty.bits == 64 { double_nan } else { 0 };
                        prop_assert_eq!(float_to_int(bits, Format::F32, ty, rounding, false), single_nan);
                        prop_assert_eq!(float_to_int(wide, Format::F64, ty, rounding, false), double_nan);
                        continue;
                    }
                    prop_assert_eq!(float_to_int(bits, Format::F32, ty, rounding, false), expected);
                    prop_assert_eq!(float_to_int(wide, Format::F64, ty, rounding, false), expected);
                }
                if !value.is_nan() {
                    let expected = u64::from((integral as f32).to_bits());
                    prop_assert_eq!(round_to_integral(bits, Format::F32, mode(rounding)), expected);
                    prop_assert_eq!(round_to_integral(wide, Format::F64, mode(rounding)), integral.to_bits());
                }
            }
        }
    }

    #[test]
    fn doubles_convert_to_integers(pattern in patterns(Format::F64), shift in 0u64..80) {
        let bits = (pattern & 0x800f_ffff_ffff_ffff) | (1016 + shift) << 52;
        for (rounding, _) in ROUNDINGS {
            let integral = host_integral(f64::from_bits(bits), rounding);
            for (ty, expected) in host_integers(integral) {
                prop_assert_eq!(float_to_int(bits, Format::F64, ty, rounding, false), expected);
            }
        }
    }

    #[test]
    fn integers_convert_to_integers(bits: u64, shift in 0..64) {
        for from in INT_TYPES {
            let value = from.value(bits >> shift);
            for to in INT_TYPES {
                let (min, max) = (to.value(to.clamp(i128::MIN)), to.value(to.clamp(i128::MAX)));
                prop_assert_eq!(to.value(int_to_int(bits >> shift, from, to, true)), value.clamp(min, max));
                prop_assert_eq!(int_to_int(bits >> shift, from, to, false), value as u64 & to.mask());
            }
        }
    }
}

fn host_integral(value: f64, rounding: Rounding) -> f64 {
    match rounding {
        Rounding::Nearest => value.round_ties_even(),
        Rounding::NearestAway => value.round(),
        Rounding::Zero => value.trunc(),
        Rounding::Down => value.floor(),
        Rounding::Up => value.ceil(),
    }
}

/// The host's casts, which saturate.
fn host_integers(value: f64) -> [(IntType, u64); 8] {
    [
        (IntType::U8, u64::from(value as u8)),
        (IntType::U16, u64::from(value as u16)),
        (IntType::U32, u64::from(value as u32)),
        (IntType::U64, value as u64),
        (IntType::S8, u64::from(value as i8 as u8)),
        (IntType::S16, u64::from(value as i16 as u16)),
        (IntType::S32, u64::from(value as i32 as u32)),
        (IntType::S64, value as i64 as u64),
    ]
}

#[test]
fn every_half_converts_to_integers() {
    for bits in (0..=u64::from(u16::MAX)).step_by(stride()) {
        for format in [Format::F16, Format::BF16] {
            let value = f64::from_bits(float_to_float(bits, format, Format::F64, ConvertMode::default()));
            if value.is_nan() {
                assert_eq!(float_to_int(bits, format, IntType::S32, Rounding::Zero, false), 0);
                assert_eq!(float_to_int(bits, format, IntType::U64, Rounding::Zero, false), 1 << 63);
                continue;
            }
            for (rounding, _) in ROUNDINGS {
                let integral = host_integral(value, rounding);
                for (ty, expected) in host_integers(integral) {
                    assert_eq!(float_to_int(bits, format, ty, rounding, false), expected);
                }
                let rounded = round_to_integral(bits, format, mode(rounding));
                let rounded =
                    f64::from_bits(float_to_float(rounded, format, Format::F64, ConvertMode::default()));
                assert_eq!(rounded.to_bits(), integral.to_bits());
            }
        }
    }
}

#[test]
fn modifiers() {
    let (one, sign, nan) = (0x3f80_0000u64, 0x8000_0000u64, 0x7fc0_0001u64);
    let f32_to = |bits, to, mode| float_to_float(bits, Format::F32, to, mode);
    let base = ConvertMode::default();
    let ftz = ConvertMode { ftz: true, ..base };
    let sat = ConvertMode { sat: true, ..base };
    let relu = ConvertMode { relu: true, ..base };
    let satfinite = ConvertMode { satfinite: true, ..base };

    // .ftz is for f32 only, as operand and as result.
    assert_eq!(f32_to(1 | sign, Format::F64, ftz), 1 << 63);
    assert_eq!(f32_to(0x3380_0000, Format::F16, ftz), 1);
    assert_eq!(float_to_float(1, Format::F16, Format::F32, ftz), 0x3380_0000);
    assert_eq!(float_to_float(0x3800_0000_0000_0000, Format::F64, Format::F32, base), 0x0040_0000);
    assert_eq!(float_to_float(0x3800_0000_0000_0000, Format::F64, Format::F32, ftz), 0);
    assert_eq!(float_to_float(1, Format::BF16, Format::F32, ftz), 0);
    assert_eq!(float_to_int(1, Format::F32, IntType::S32, Rounding::Up, false), 1);
    assert_eq!(float_to_int(1, Format::F32, IntType::S32, Rounding::Up, true), 0);
    assert_eq!(
        round_to_integral(1 | sign, Format::F32, ConvertMode { rounding: Rounding::Down, ..ftz }),
        sign
    );

    // .sat clamps to 0 to 1.
    assert_eq!(f32_to(0x4000_0000, Format::F16, sat), 0x3c00);
    assert_eq!(f32_to(one | sign, Format::F64, sat), 0);
    assert_eq!(f32_to(sign, Format::F32, sat), 0);
    assert_eq!(f32_to(nan, Format::F16, sat), 0);
    assert_eq!(int_to_float(7, IntType::S32, Format::F64, sat), 1f64.to_bits());
    assert_eq!(round_to_integral(0x3f40_0000, Format::F32, sat), one);

    // .relu keeps NaN.
    assert_eq!(f32_to(one | sign, Format::BF16, relu), 0);
    assert_eq!(f32_to(nan | sign, Format::BF16, relu), 0x7fff);
    assert_eq!(f32_to(sign, Format::F16, relu), 0);

    // .satfinite keeps NaN and the sign.
    assert_eq!(f32_to(0x7f80_0000, Format::F16, satfinite), 0x7bff);
    assert_eq!(f32_to(0x4780_0000 | sign, Format::F16, satfinite), 0xfbff);
    assert_eq!(f32_to(0x4780_0000, Format::F16, base), 0x7c00);
    assert_eq!(f32_to(nan, Format::F16, satfinite), 0x7fff);
    assert_eq!(f32_to(0x7f7f_ffff, Format::BF16, satfinite), 0x7f7f);
    assert_eq!(f32_to(0x43e8_0001, Format::E4M3, satfinite), 0x7e);
    assert_eq!(f32_to(0x43e8_0001, Format::E4M3, base), 0x7f);
    assert_eq!(f32_to(0xff80_0000, Format::E4M3, satfinite), 0xfe);
    assert_eq!(f32_to(0x7f7f_ffff, Format::TF32, satfinite), 0x7f7f_e000);
}

#[test]
fn tf32_has_ten_bits_of_fraction() {
    let convert = |bits, rounding| float_to_float(bits, Format::F32, Format::TF32, mode(rounding));
    assert_eq!(convert(0x3f80_1000, Rounding::NearestAway), 0x3f80_2000);
    assert_eq!(convert(0x3f80_1000, Rounding::Nearest), 0x3f80_0000);
    assert_eq!(convert(0x3f80_3000, Rounding::Nearest), 0x3f80_4000);
    assert_eq!(convert(0xbf80_1fff, Rounding::Zero), 0xbf80_0000);
    assert_eq!(convert(0x0000_1000, Rounding::NearestAway), 0x0000_2000);
    assert_eq!(convert(0x7f7f_ffff, Rounding::NearestAway), 0x7f80_0000);
    assert_eq!(convert(0xff80_0000, Rounding::NearestAway), 0xff80_0000);
    assert_eq!(convert(0x7fc0_0000, Rounding::NearestAway), 0x7fff_ffff);
}

#[test]
fn nans() {
    let convert = |bits, from, to| float_to_float(bits, from, to, ConvertMode::default());
    assert_eq!(convert(0xfff0_0000_0000_0001, Format::F64, Format::F32), 0x7fff_ffff);
    assert_eq!(convert(0xfff0_0000_0000_0001, Format::F64, Format::F64), 0xfff8_0000_0000_0001);
    assert_eq!(convert(0xff80_0001, Format::F32, Format::F32), 0x7fff_ffff);
    assert_eq!(convert(0xff80_0001, Format::F32, Format::F64), 0xfff8_0000_2000_0000);
    assert_eq!(convert(0x7fff, Format::F16, Format::F64), 0x7fff_ffff_e000_0000);
    assert_eq!(convert(0xff81, Format::BF16, Format::F32), 0xff81_0000);
    assert_eq!(convert(0xff81, Format::BF16, Format::F16), 0x7fff);
    assert_eq!(convert(0xff, Format::E4M3, Format::F16), 0x7fff);
    assert_eq!(convert(0x7d, Format::E5M2, Format::F16), 0x7fff);
    assert_eq!(round_to_integral(0xffc0_0000, Format::F32, ConvertMode::default()), 0x7fff_ffff);
}

/// A u64 register whose upper bits belong to something else.
#[test]
fn upper_bits_of_operands_are_ignored() {
    let high = 0xffff_ffff_0000_0000;
    assert_eq!(float_to_int(high | 0x4040_0000, Format::F32, IntType::U8, Rounding::Zero, false), 3);
    assert_eq!(float_to_float(high | 0x3c00, Format::F16, Format::F32, ConvertMode::default()), 0x3f80_0000);
    assert_eq!(
        int_to_float(high | 0xffff_ffff, IntType::S32, Format::F32, ConvertMode::default()),
        0xbf80_0000
    );
    assert_eq!(int_to_int(high | 5, IntType::U32, IntType::U64, false), 5);
}
