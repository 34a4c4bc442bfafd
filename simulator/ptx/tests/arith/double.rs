//! f64.

use proptest::prelude::*;
use simcuda_ptx::arith::{Format, Property, Relation, Rounding, f64 as ptx};

use crate::{ROUNDINGS, check_table, config, patterns, power_of_two};

const QUIET: u64 = 1 << 51;
const SIGN: u64 = 1 << 63;
const INVALID: u64 = 0xfff8_0000_0000_0000;
const INFINITY: u64 = 0x7ff0_0000_0000_0000;

fn doubles() -> impl Strategy<Value = u64> + Clone {
    patterns(Format::F64)
}

/// Numbers whose sums, products and remainders neither overflow nor underflow.
fn moderate() -> impl Strategy<Value = u64> + Clone {
    (any::<u64>(), 800u64..1250).prop_map(|(bits, exponent)| (bits & 0x800f_ffff_ffff_ffff) | exponent << 52)
}

/// The expected bits of a result, with the NaN rule.
fn expected(result: f64, operands: &[u64]) -> u64 {
    let nan = operands.iter().find(|bits| f64::from_bits(**bits).is_nan());
    match (nan, result.is_nan()) {
        (Some(bits), _) => bits | QUIET,
        (None, true) => INVALID,
        (None, false) => result.to_bits(),
    }
}

/// The nearest result moved to where the sign of its error says, for the directed modes.
fn directed(nearest: f64, error: f64, rounding: Rounding) -> u64 {
    let toward_zero_is_down = nearest > 0.0;
    let value = match rounding {
        Rounding::Up if error > 0.0 => nearest.next_up(),
        Rounding::Down if error < 0.0 => nearest.next_down(),
        Rounding::Zero if toward_zero_is_down && error < 0.0 => nearest.next_down(),
        Rounding::Zero if !toward_zero_is_down && error > 0.0 => nearest.next_up(),
        _ => nearest,
    };
    value.to_bits()
}

const DIRECTED: [Rounding; 3] = [Rounding::Zero, Rounding::Down, Rounding::Up];

proptest! {
    #![proptest_config(config(8_000))]

    #[test]
    fn nearest_is_the_hosts(a in doubles(), b in doubles(), c in doubles()) {
        let (x, y, z) = (f64::from_bits(a), f64::from_bits(b), f64::from_bits(c));
        let mode = Rounding::Nearest;
        prop_assert_eq!(ptx::add(a, b, mode), expected(x + y, &[a, b]));
        prop_assert_eq!(ptx::sub(a, b, mode), expected(x - y, &[a, b]));
        prop_assert_eq!(ptx::mul(a, b, mode), expected(x * y, &[a, b]));
        prop_assert_eq!(ptx::fma(a, b, c, mode), expected(x.mul_add(y, z), &[a, b, c]));
        prop_assert_eq!(ptx::div(a, b, mode), expected(x / y, &[a, b]));
        prop_assert_eq!(ptx::rcp(a, mode), expected(1.0 / x, &[a]));
        prop_assert_eq!(ptx::sqrt(a, mode), expected(x.sqrt(), &[a]));
    }

    /// The error of the host's nearest result is itself an f64, which says what the other directions give.
    #[test]
    fn directions_follow_the_error_of_the_nearest(a in moderate(), b in moderate()) {
        let (x, y) = (f64::from_bits(a), f64::from_bits(b));
        let (sum, product, quotient, root) = (x + y, x * y, x / y, x.abs().sqrt());
        let (greater, lesser) = if x.abs() > y.abs() { (x, y) } else { (y, x) };
        let sum_error = lesser - (sum - greater);
        let product_error = x.mul_add(y, -product);
        let quotient_error = (-quotient).mul_add(y, x) * y.signum();
        let root_error = (-root).mul_add(root, x.abs());
        for rounding in DIRECTED {
            if sum != 0.0 {
                prop_assert_eq!(ptx::add(a, b, rounding), directed(sum, sum_error, rounding));
                prop_assert_eq!(ptx::sub(a, b ^ SIGN, rounding), directed(sum, sum_error, rounding));
            }
            prop_assert_eq!(ptx::mul(a, b, rounding), directed(product, product_error, rounding));
            prop_assert_eq!(ptx::div(a, b, rounding), directed(quotient, quotient_error, rounding));
            prop_assert_eq!(ptx::sqrt(a & !SIGN, rounding), directed(root, root_error, rounding));
        }
    }

    /// The root of a tiny operand, whose remainder underflows, is that of the operand scaled by an even power of 2.
    #[test]
    fn tiny_operands_have_roots_in_every_direction(
        bits in prop_oneof![1u64..1 << 52, any::<u64>().prop_map(|bits| bits >> 2)],
    ) {
        let operand = f64::from_bits(bits);
        if operand >= 1e-180 {
            return Ok(());
        }
        let scaled = (operand * power_of_two(600)).to_bits();
        for (rounding, _) in ROUNDINGS {
            let expected = f64::from_bits(ptx::sqrt(scaled, rounding)) * power_of_two(-300);
            prop_assert_eq!(ptx::sqrt(bits, rounding), expected.to_bits());
        }
    }

    /// Down and up enclose the nearest result and are neighbours, unless the result is exact; so everywhere,
    /// subnormal numbers and overflow included.
    #[test]
    fn directions_enclose_the_nearest(a in doubles(), b in doubles(), c in doubles()) {
        let results = |rounding| [
            ptx::add(a, b, rounding),
            ptx::sub(a, b, rounding),
            ptx::mul(a, b, rounding),
            ptx::fma(a, b, c, rounding),
            ptx::div(a, b, rounding),
            ptx::sqrt(a, rounding),
        ];
        let all = ROUNDINGS.map(|(rounding, _)| results(rounding));
        for index in 0..all[0].len() {
            let [nearest, zero, down, up, _] = all.map(|row| f64::from_bits(row[index]));
            if nearest.is_nan() {
                prop_assert_eq!(all[0][index], all[2][index]);
                prop_assert_eq!(all[0][index], all[3][index]);
                continue;
            }
            prop_assert!(down <= nearest && nearest <= up, "{index}: {down} {nearest} {up}");
            prop_assert!(up == down || up == down.next_up(), "{index}: {down} {up}");
            prop_assert_eq!(zero.abs(), down.abs().min(up.abs()), "{}", index);
        }
    }

    #[test]
    fn comparisons_and_selections(a in doubles(), b in doubles()) {
        let (x, y) = (f64::from_bits(a), f64::from_bits(b));
        prop_assert_eq!(ptx::compare(Relation::Lt, a, b), x < y);
        prop_assert_eq!(ptx::compare(Relation::Geu, a, b), x.partial_cmp(&y).is_none_or(std::cmp::Ordering::is_ge));
        prop_assert_eq!(ptx::compare(Relation::Eq, a, b), x == y);
        let (min, max) = match (x.is_nan(), y.is_nan()) {
            (true, true) => (a | QUIET, a | QUIET),
            (true, false) => (b, b),
            (false, true) => (a, a),
            (false, false) if x.total_cmp(&y).is_lt() => (a, b),
            (false, false) => (b, a),
        };
        prop_assert_eq!(ptx::min(a, b), min);
        prop_assert_eq!(ptx::max(a, b), max);
        prop_assert_eq!(ptx::abs(a), if x.is_nan() { a } else { a & !SIGN });
        prop_assert_eq!(ptx::neg(a), if x.is_nan() { a } else { a ^ SIGN });
        prop_assert_eq!(ptx::copysign(a, b), b & !SIGN | a & SIGN);
        prop_assert_eq!(ptx::testp(a, Property::Subnormal), x.is_subnormal());
        prop_assert_eq!(ptx::testp(a, Property::Normal), x.is_normal() || x == 0.0);
    }

    /// A result of 20 fraction bits, to the nearest: half a unit in the last of them.
    #[test]
    fn upper_word_approximations_are_close(a in doubles()) {
        let x = f64::from_bits(a & !0xffff_ffff);
        if !x.is_normal() {
            return Ok(());
        }
        let check = |result: u64, exact: f64| {
            prop_assert_eq!(result & 0xffff_ffff, 0);
            if exact.is_normal() && exact.abs() > f64::MIN_POSITIVE * 2.0 {
                let error = (f64::from_bits(result) - exact).abs() / exact.abs();
                prop_assert!(error <= power_of_two(-21), "{}", error);
            }
            Ok(())
        };
        check(ptx::rcp_approx_ftz(a), 1.0 / x)?;
        if x > 0.0 {
            check(ptx::rsqrt_approx_ftz(a), 1.0 / x.sqrt())?;
            let root = f64::from_bits(ptx::rsqrt_approx(x.to_bits()));
            prop_assert!((root * root * x - 1.0).abs() <= 4.0 * f64::EPSILON);
        }
    }
}

#[test]
fn cancelled_sums_are_negative_zero_downwards_only() {
    let one = 1f64.to_bits();
    for (rounding, _) in ROUNDINGS {
        let zero = if rounding == Rounding::Down { SIGN } else { 0 };
        assert_eq!(ptx::sub(one, one, rounding), zero);
        assert_eq!(ptx::fma(one, one, one | SIGN, rounding), zero);
        assert_eq!(ptx::add(SIGN, SIGN, rounding), SIGN);
    }
}

#[test]
fn payloads_of_nans_are_kept() {
    let signalling = 0xfff0_0000_0000_1234;
    let other = 0x7ff8_0000_0000_5678;
    assert_eq!(ptx::add(1, signalling, Rounding::Nearest), signalling | QUIET);
    assert_eq!(ptx::mul(other, signalling, Rounding::Up), other);
    assert_eq!(ptx::fma(1, 2, other, Rounding::Down), other);
    assert_eq!(ptx::sub(INFINITY, INFINITY, Rounding::Nearest), INVALID);
    assert_eq!(ptx::mul(INFINITY, 0, Rounding::Zero), INVALID);
    assert_eq!(ptx::sqrt((-1f64).to_bits(), Rounding::Up), INVALID);
}

/// PTX ISA, tables of `rcp.approx.ftz.f64` and `rsqrt.approx.ftz.f64`.
#[test]
fn special_values_of_upper_word_approximations() {
    let negative = SIGN | INFINITY;
    let subnormal = 0x000f_ffff_0000_0000;
    let nan = 0x7fff_ffff_0000_0000;
    check_table(
        "rcp.approx.ftz.f64",
        ptx::rcp_approx_ftz,
        &[
            (negative, SIGN),
            (SIGN | subnormal, negative),
            (SIGN, negative),
            (0, INFINITY),
            (subnormal, INFINITY),
            (INFINITY, 0),
            (0xfff8_0000_0000_0001, nan),
            // Subnormal results are flushed; the lower word is not looked at.
            (f64::MAX.to_bits(), 0),
            (f64::MIN.to_bits(), SIGN),
            (0x4000_0000_ffff_ffff, 0x3fe0_0000_0000_0000),
        ],
    );
    check_table(
        "rsqrt.approx.ftz.f64",
        ptx::rsqrt_approx_ftz,
        &[
            (negative, nan),
            (SIGN | subnormal, negative),
            (SIGN, negative),
            (0, INFINITY),
            (subnormal, INFINITY),
            (INFINITY, 0),
            (0x7ff8_0000_0000_0000, nan),
            (4f64.to_bits(), 0.5f64.to_bits()),
            ((-4f64).to_bits(), nan),
        ],
    );
}
