//! f32 approximations: the PTX ISA's tables of special values, and its bounds, which ours keep far inside of.

use proptest::prelude::*;
use simcuda_ptx::arith::f32 as ptx;

use crate::{check_table, config, single_patterns};

const NAN: u32 = 0x7fff_ffff;
const SIGN: u32 = 0x8000_0000;
const INFINITY: u32 = 0x7f80_0000;
const ONE: u32 = 0x3f80_0000;
const SUBNORMAL: u32 = 0x0040_0000;
/// A NaN with a payload that must not survive.
const SIGNALLING: u32 = 0xff80_0001;

#[test]
fn special_values_of_reciprocals_and_roots() {
    check_table(
        "rcp.approx",
        |a| ptx::rcp_approx(a, false),
        &[
            (SIGN | INFINITY, SIGN),
            (SIGN, SIGN | INFINITY),
            (0, INFINITY),
            (INFINITY, 0),
            (SIGNALLING, NAN),
            (SUBNORMAL, 0x7f00_0000),
            (1, INFINITY),
        ],
    );
    check_table(
        "rcp.approx.ftz",
        |a| ptx::rcp_approx(a, true),
        &[(SIGN | SUBNORMAL, SIGN | INFINITY), (SUBNORMAL, INFINITY), (0x7f00_0000, 0), (0xff00_0000, SIGN)],
    );
    check_table(
        "sqrt.approx",
        |a| ptx::sqrt_approx(a, false),
        &[
            (SIGN | INFINITY, NAN),
            (SIGN | ONE, NAN),
            (SIGN | SUBNORMAL, NAN),
            (SIGN, SIGN),
            (0, 0),
            (INFINITY, INFINITY),
            (SIGNALLING, NAN),
        ],
    );
    check_table(
        "sqrt.approx.ftz",
        |a| ptx::sqrt_approx(a, true),
        &[(SIGN | SUBNORMAL, SIGN), (SUBNORMAL, 0)],
    );
    check_table(
        "rsqrt.approx",
        |a| ptx::rsqrt_approx(a, false),
        &[
            (SIGN | INFINITY, NAN),
            (SIGN | ONE, NAN),
            (SIGN, SIGN | INFINITY),
            (0, INFINITY),
            (INFINITY, 0),
            (SIGNALLING, NAN),
            (0x4080_0000, 0x3f00_0000),
        ],
    );
    check_table(
        "rsqrt.approx.ftz",
        |a| ptx::rsqrt_approx(a, true),
        &[(SIGN | SUBNORMAL, SIGN | INFINITY), (SUBNORMAL, INFINITY)],
    );
}

#[test]
fn special_values_of_sine_and_cosine() {
    check_table(
        "sin.approx",
        |a| ptx::sin_approx(a, false),
        &[
            (SIGN | INFINITY, NAN),
            (SIGN, SIGN),
            (0, 0),
            (INFINITY, NAN),
            (SIGNALLING, NAN),
            (SUBNORMAL, SUBNORMAL),
        ],
    );
    check_table("sin.approx.ftz", |a| ptx::sin_approx(a, true), &[(SIGN | SUBNORMAL, SIGN), (SUBNORMAL, 0)]);
    check_table(
        "cos.approx",
        |a| ptx::cos_approx(a, false),
        &[
            (SIGN | INFINITY, NAN),
            (SIGN, ONE),
            (0, ONE),
            (SUBNORMAL, ONE),
            (INFINITY, NAN),
            (SIGNALLING, NAN),
        ],
    );
}

#[test]
fn special_values_of_logarithm_and_exponential() {
    check_table(
        "lg2.approx",
        |a| ptx::lg2_approx(a, false),
        &[
            (SIGN | INFINITY, NAN),
            (SIGN | ONE, NAN),
            (SIGN, SIGN | INFINITY),
            (0, SIGN | INFINITY),
            (INFINITY, INFINITY),
            (SIGNALLING, NAN),
            (ONE, 0),
            (1, (-149f32).to_bits()),
        ],
    );
    check_table(
        "lg2.approx.ftz",
        |a| ptx::lg2_approx(a, true),
        &[(SUBNORMAL, SIGN | INFINITY), (SIGN | SUBNORMAL, SIGN | INFINITY)],
    );
    check_table(
        "ex2.approx",
        |a| ptx::ex2_approx(a, false),
        &[
            (SIGN | INFINITY, 0),
            (SIGN, ONE),
            (0, ONE),
            (INFINITY, INFINITY),
            (SIGNALLING, NAN),
            (128f32.to_bits(), INFINITY),
            ((-149f32).to_bits(), 1),
            ((-127f32).to_bits(), SUBNORMAL),
        ],
    );
    check_table(
        "ex2.approx.ftz",
        |a| ptx::ex2_approx(a, true),
        &[((-127f32).to_bits(), 0), ((-126f32).to_bits(), 0x0080_0000), (SIGN | SUBNORMAL, ONE)],
    );
}

#[test]
fn special_values_of_hyperbolic_tangent() {
    check_table(
        "tanh.approx",
        ptx::tanh_approx,
        &[
            (SIGN | INFINITY, SIGN | ONE),
            (SIGN, SIGN),
            (0, 0),
            (INFINITY, ONE),
            (SIGNALLING, NAN),
            (SUBNORMAL, SUBNORMAL),
            (SIGN | 1, SIGN | 1),
        ],
    );
}

/// Beyond 2^126 the reciprocal of the divisor is zero to `div.approx`.
#[test]
fn special_values_of_division() {
    let (two_to_126, beyond) = (0x7e80_0000, 0x7e80_0001);
    for ftz in [false, true] {
        let div = |a, b| ptx::div_approx(a, b, ftz);
        assert_eq!(div(two_to_126, two_to_126), ONE);
        assert_eq!(div(beyond, beyond), 0);
        assert_eq!(div(beyond | SIGN, beyond), SIGN);
        assert_eq!(div(ONE, SIGN | 0x7f7f_ffff), SIGN);
        assert_eq!(div(INFINITY, beyond), NAN);
        assert_eq!(div(SIGNALLING, beyond), NAN);
        assert_eq!(div(INFINITY, ONE | SIGN), INFINITY | SIGN);
        assert_eq!(div(ONE, INFINITY), 0);
        assert_eq!(div(INFINITY, INFINITY), NAN);
        assert_eq!(div(ONE, 0), INFINITY);
        assert_eq!(div(0, 0), NAN);
        assert_eq!(ptx::div_full(beyond, beyond, ftz), ONE);
    }
    assert_eq!(ptx::div_approx(SUBNORMAL, ONE, true), 0);
    assert_eq!(ptx::div_approx(SUBNORMAL, ONE, false), SUBNORMAL);
}

fn relative_error(result: u32, exact: f64) -> f64 {
    ((f64::from(f32::from_bits(result)) - exact) / exact).abs()
}

proptest! {
    #![proptest_config(config(8_000))]

    /// Our bound, 0.5001 ulp, is a relative error of at most 2^-23.99 of a normal result; the reference is the host's
    /// mathematical library.
    #[test]
    fn errors_keep_our_bounds(a in single_patterns()) {
        let operand = f32::from_bits(a);
        if !operand.is_finite() || operand == 0.0 {
            return Ok(());
        }
        let x = f64::from(operand);
        let bound = 2f64.powf(-23.99);
        let mut results = vec![
            (ptx::sin_approx(a, false), x.sin()),
            (ptx::cos_approx(a, false), x.cos()),
            (ptx::ex2_approx(a, false), x.exp2()),
            (ptx::tanh_approx(a), x.tanh()),
            (ptx::rcp_approx(a, false), 1.0 / x),
        ];
        if operand > 0.0 {
            results.extend([
                (ptx::lg2_approx(a, false), x.log2()),
                (ptx::rsqrt_approx(a, false), 1.0 / x.sqrt()),
                (ptx::sqrt_approx(a, false), x.sqrt()),
            ]);
        }
        for (index, (result, exact)) in results.into_iter().enumerate() {
            if exact.abs() >= f64::from(f32::MIN_POSITIVE) && exact.abs() < f64::from(f32::MAX) {
                prop_assert!(relative_error(result, exact) <= bound, "{}: {:#x} for {}", index, result, exact);
            }
        }
    }

    #[test]
    fn ftz_is_flushing_before_and_after(a in single_patterns()) {
        let flush = |bits: u32| if f32::from_bits(bits).is_subnormal() { bits & SIGN } else { bits };
        type Function = fn(u32, bool) -> u32;
        let functions: [Function; 7] = [
            ptx::rcp_approx, ptx::sqrt_approx, ptx::rsqrt_approx, ptx::sin_approx, ptx::cos_approx,
            ptx::lg2_approx, ptx::ex2_approx,
        ];
        for (index, function) in functions.into_iter().enumerate() {
            prop_assert_eq!(function(a, true), flush(function(flush(a), false)), "{}", index);
        }
    }
}
