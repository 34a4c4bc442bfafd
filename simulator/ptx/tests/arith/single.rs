//! f32.

use proptest::prelude::*;
use rustc_apfloat::Float;
use rustc_apfloat::ieee::Single;
use simcuda_ptx::arith::{FloatMode, MinMaxMode, Property, Relation, Rounding, f32 as ptx};

use crate::{ROUNDINGS, config, single_patterns, stride};

const NAN: u32 = 0x7fff_ffff;
const SIGN: u32 = 0x8000_0000;

fn nearest(ftz: bool, sat: bool) -> FloatMode {
    FloatMode { rounding: Rounding::Nearest, ftz, sat }
}

fn flush(bits: u32) -> u32 {
    if f32::from_bits(bits).is_subnormal() { bits & SIGN } else { bits }
}

/// What the modifiers make of an exactly rounded result.
fn modified(result: f32, mode: FloatMode) -> u32 {
    if result.is_nan() {
        return if mode.sat { 0 } else { NAN };
    }
    let result = if mode.ftz { f32::from_bits(flush(result.to_bits())) } else { result };
    match mode.sat {
        true if result <= 0.0 => 0,
        true if result >= 1.0 => 1f32.to_bits(),
        _ => result.to_bits(),
    }
}

fn soft(bits: u32) -> Single {
    Single::from_bits(u128::from(bits))
}

fn hard(value: Single) -> f32 {
    f32::from_bits(value.to_bits() as u32)
}

proptest! {
    #![proptest_config(config(8_000))]

    #[test]
    fn nearest_is_the_hosts(
        a in single_patterns(), b in single_patterns(), c in single_patterns(), ftz: bool, sat: bool,
    ) {
        let mode = nearest(ftz, sat);
        let operand = |bits| f32::from_bits(if ftz { flush(bits) } else { bits });
        let (x, y, z) = (operand(a), operand(b), operand(c));
        prop_assert_eq!(ptx::add(a, b, mode), modified(x + y, mode));
        prop_assert_eq!(ptx::sub(a, b, mode), modified(x - y, mode));
        prop_assert_eq!(ptx::mul(a, b, mode), modified(x * y, mode));
        prop_assert_eq!(ptx::fma(a, b, c, mode), modified(x.mul_add(y, z), mode));
        prop_assert_eq!(ptx::div(a, b, mode), modified(x / y, mode));
        prop_assert_eq!(ptx::rcp(a, mode), modified(1.0 / x, mode));
        prop_assert_eq!(ptx::sqrt(a, mode), modified(x.sqrt(), mode));
        prop_assert_eq!(ptx::div_full(a, b, ftz), modified(x / y, nearest(ftz, false)));
    }

    #[test]
    fn every_direction_is_apfloats(
        a in single_patterns(), b in single_patterns(), c in single_patterns(), ftz: bool, sat: bool,
    ) {
        let operand = |bits| soft(if ftz { flush(bits) } else { bits });
        let (x, y, z) = (operand(a), operand(b), operand(c));
        for (rounding, round) in ROUNDINGS {
            let mode = FloatMode { rounding, ftz, sat };
            prop_assert_eq!(ptx::add(a, b, mode), modified(hard(x.add_r(y, round).value), mode));
            prop_assert_eq!(ptx::sub(a, b, mode), modified(hard(x.sub_r(y, round).value), mode));
            prop_assert_eq!(ptx::mul(a, b, mode), modified(hard(x.mul_r(y, round).value), mode));
            prop_assert_eq!(ptx::fma(a, b, c, mode), modified(hard(x.mul_add_r(y, z, round).value), mode));
            prop_assert_eq!(ptx::div(a, b, mode), modified(hard(x.div_r(y, round).value), mode));
        }
    }

    /// The square of a candidate is exact in f64, so the neighbours show which root is right.
    #[test]
    fn directed_roots_enclose_the_operand(bits in 1u32..0x7f80_0000) {
        let square = |root: u32| f64::from(f32::from_bits(root)) * f64::from(f32::from_bits(root));
        let operand = f64::from(f32::from_bits(bits));
        let root = |rounding| ptx::sqrt(bits, FloatMode { rounding, ..FloatMode::default() });
        let (down, up) = (root(Rounding::Down), root(Rounding::Up));
        prop_assert_eq!(root(Rounding::Zero), down);
        prop_assert!(square(down) <= operand && operand <= square(up));
        prop_assert_eq!(up - down, u32::from(square(down) != operand));
    }

    #[test]
    fn fma_rounds_once_next_to_a_tie(a in single_patterns(), b in single_patterns(), c in single_patterns()) {
        // The product against an addend some 2^24 to 2^60 times smaller or greater: where rounding twice differs.
        let product = f64::from(f32::from_bits(a)) * f64::from(f32::from_bits(b));
        let scaled = ((product as f32).to_bits() & 0x7f80_0000) ^ (c & 0x8000_0fff);
        for offset in [24 << 23, 25 << 23, 48 << 23] {
            for z in [scaled.wrapping_sub(offset), scaled.wrapping_add(offset)] {
                for (rounding, round) in ROUNDINGS {
                    let mode = FloatMode { rounding, ..FloatMode::default() };
                    let expected = hard(soft(a).mul_add_r(soft(b), soft(z), round).value);
                    prop_assert_eq!(ptx::fma(a, b, z, mode), modified(expected, mode));
                }
            }
        }
    }

    #[test]
    fn comparisons_are_the_hosts(a in single_patterns(), b in single_patterns(), ftz: bool) {
        let operand = |bits| f32::from_bits(if ftz { flush(bits) } else { bits });
        let (x, y) = (operand(a), operand(b));
        let unordered = x.is_nan() || y.is_nan();
        for (relation, expected) in [
            (Relation::Eq, x == y),
            (Relation::Ne, !unordered && x != y),
            (Relation::Lt, x < y),
            (Relation::Le, x <= y),
            (Relation::Gt, x > y),
            (Relation::Ge, x >= y),
            (Relation::Equ, unordered || x == y),
            (Relation::Neu, x != y),
            (Relation::Ltu, unordered || x < y),
            (Relation::Leu, unordered || x <= y),
            (Relation::Gtu, unordered || x > y),
            (Relation::Geu, unordered || x >= y),
            (Relation::Num, !unordered),
            (Relation::Nan, unordered),
        ] {
            prop_assert_eq!(ptx::compare(relation, a, b, ftz), expected, "{:?}", relation);
        }
    }

    #[test]
    fn minimum_and_maximum(a in single_patterns(), b in single_patterns(), ftz: bool, nan: bool, xorsign: bool) {
        let mode = MinMaxMode { ftz, nan, abs: xorsign, xorsign };
        let operand = |bits| f32::from_bits(if ftz { flush(bits) } else { bits });
        let (mut x, mut y) = (operand(a), operand(b));
        if xorsign {
            (x, y) = (x.abs(), y.abs());
        }
        let (min, max) = match (x.is_nan(), y.is_nan()) {
            (true, true) => (f32::NAN, f32::NAN),
            (true, false) | (false, true) if nan => (f32::NAN, f32::NAN),
            (true, false) => (y, y),
            (false, true) => (x, x),
            (false, false) if x.total_cmp(&y).is_lt() => (x, y),
            (false, false) => (y, x),
        };
        let signed = |value: f32| match (value.is_nan(), xorsign) {
            (true, _) => NAN,
            (false, true) => value.to_bits() & !SIGN | (a ^ b) & SIGN,
            (false, false) => value.to_bits(),
        };
        prop_assert_eq!(ptx::min(a, b, mode), signed(min));
        prop_assert_eq!(ptx::max(a, b, mode), signed(max));
    }

    #[test]
    fn signs_and_properties(a in single_patterns(), b in single_patterns()) {
        let x = f32::from_bits(a);
        if x.is_nan() {
            prop_assert_eq!(ptx::abs(a, false), NAN);
            prop_assert_eq!(ptx::neg(a, false), NAN);
        } else {
            prop_assert_eq!(ptx::abs(a, false), x.abs().to_bits());
            prop_assert_eq!(ptx::neg(a, false), (-x).to_bits());
            prop_assert_eq!(ptx::neg(a, true), flush((-x).to_bits()));
        }
        prop_assert_eq!(ptx::copysign(a, b), b & !SIGN | a & SIGN);
        prop_assert_eq!(ptx::testp(a, Property::Finite), x.is_finite());
        prop_assert_eq!(ptx::testp(a, Property::Infinite), x.is_infinite());
        prop_assert_eq!(ptx::testp(a, Property::Number), !x.is_nan());
        prop_assert_eq!(ptx::testp(a, Property::NotANumber), x.is_nan());
        prop_assert_eq!(ptx::testp(a, Property::Normal), x.is_normal() || x == 0.0);
        prop_assert_eq!(ptx::testp(a, Property::Subnormal), x.is_subnormal());
    }
}

#[test]
fn cancelled_sums_are_negative_zero_downwards_only() {
    let one = 1f32.to_bits();
    for (rounding, _) in ROUNDINGS {
        let mode = FloatMode { rounding, ..FloatMode::default() };
        let zero = if rounding == Rounding::Down { SIGN } else { 0 };
        assert_eq!(ptx::sub(one, one, mode), zero);
        assert_eq!(ptx::add(0, SIGN, mode), zero);
        assert_eq!(ptx::fma(one, one, one | SIGN, mode), zero);
        assert_eq!(ptx::add(SIGN, SIGN, mode), SIGN);
        assert_eq!(ptx::add(0, 0, mode), 0);
    }
}

#[test]
fn results_are_flushed_after_rounding() {
    // The largest subnormal number times 1 + 2^-23 rounds up to the smallest normal one, which stays.
    let mode = nearest(true, false);
    let just_above_half = 0x3f00_0001;
    assert_eq!(ptx::mul(0x00ff_ffff, just_above_half, mode), 0x0080_0000);
    assert_eq!(ptx::mul(0x0080_0000, 0xbf00_0000, mode), SIGN);
    assert_eq!(ptx::add(0x0000_0001, SIGN, mode), 0);
}

/// Operands so far apart that the smaller one only decides the direction.
#[test]
fn exponents_far_apart() {
    for exponent in (0..255u32).step_by(stride().min(50)) {
        for b in [1, 1 | SIGN, 0x007f_ffff, 0x0080_0000 | SIGN] {
            let a = exponent << 23 | 1;
            for (rounding, round) in ROUNDINGS {
                let mode = FloatMode { rounding, ..FloatMode::default() };
                assert_eq!(ptx::add(a, b, mode), modified(hard(soft(a).add_r(soft(b), round).value), mode));
            }
        }
    }
}
