//! PTX arithmetic against other implementations of it: the host's, `rustc_apfloat`, 128-bit integers, and the
//! tables of the PTX ISA.

mod approximate;
mod convert;
mod double;
mod half;
mod integer;
mod single;

use proptest::prelude::*;
use rustc_apfloat::Round;
use simcuda_ptx::arith::{Format, Rounding};

/// The directions of rounding, with `rustc_apfloat`'s names.
const ROUNDINGS: [(Rounding, Round); 5] = [
    (Rounding::Nearest, Round::NearestTiesToEven),
    (Rounding::Zero, Round::TowardZero),
    (Rounding::Down, Round::TowardNegative),
    (Rounding::Up, Round::TowardPositive),
    (Rounding::NearestAway, Round::NearestTiesToAway),
];

/// A number of cases that keeps the whole test under a few seconds; few under Miri, which is slow.
fn config(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases: if cfg!(miri) { 4 } else { cases },
        failure_persistence: None,
        ..Default::default()
    }
}

/// Step through an exhaustive test: all patterns, or under Miri few of them.
fn stride() -> usize {
    if cfg!(miri) { 4999 } else { 1 }
}

/// Bit patterns of a format: uniform ones, and the places where something happens: zeros, subnormal numbers, the
/// ends of the range, infinities, NaNs, and numbers near 1 that cancel.
fn patterns(format: Format) -> impl Strategy<Value = u64> + Clone {
    let (nan, infinity, sign) = (format.nan(), format.infinity(), format.sign_bit());
    let (normal, one, max) = (format.min_normal(), format.one(), format.max_finite());
    let mask = sign | (sign - 1);
    let near =
        move |base: u64| (0u64..8).prop_map(move |offset| base.wrapping_add(offset).wrapping_sub(4) & mask);
    let magnitude = prop_oneof![
        6 => any::<u64>(),
        1 => Just(0),
        1 => prop_oneof![Just(nan), Just(infinity), Just(infinity + 1), Just(max)],
        1 => 0..normal,
        1 => near(normal),
        1 => near(one),
        1 => near(max),
        2 => (0..sign).prop_map(move |low| one ^ (low & (normal - 1))),
    ];
    (magnitude, any::<bool>()).prop_map(move |(bits, flip)| (if flip { bits ^ sign } else { bits }) & mask)
}

fn single_patterns() -> impl Strategy<Value = u32> + Clone {
    patterns(Format::F32).prop_map(|bits| bits as u32)
}

fn half_patterns(format: Format) -> impl Strategy<Value = u16> + Clone {
    patterns(format).prop_map(|bits| bits as u16)
}

/// Asserts that a table of operands and results holds.
fn check_table<A: Copy + std::fmt::LowerHex, R: PartialEq + std::fmt::LowerHex>(
    name: &str,
    function: impl Fn(A) -> R,
    table: &[(A, R)],
) {
    for (operand, expected) in table {
        let result = function(*operand);
        assert!(result == *expected, "{name}({operand:#x}) is {result:#x}, not {expected:#x}");
    }
}

/// 2 to the power `exponent`, a normal number; `powi` promises no exact result.
fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((1023 + exponent) as u64) << 52)
}
