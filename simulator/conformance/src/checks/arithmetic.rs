//! Arithmetic of kernels, bit by bit, against the host's.

use fastrand::Rng;

use crate::check::{Check, Result, check, expect_equal};
use crate::rounding::{Mode, add32, add64, div32, div64, fma32, fma64, mul32, mul64};
use crate::{ensure, gpu, kernels};

/// The checks of this area.
pub const CHECKS: &[Check] = &[
    check(
        "arithmetic/integer-32",
        "32-bit integer instructions (PTX ISA, Integer arithmetic, Logic and shift)",
        integer32,
    ),
    check("arithmetic/integer-64", "64-bit integer instructions (PTX ISA, Integer arithmetic)", integer64),
    check(
        "arithmetic/carry",
        "add.cc and addc carry over (PTX ISA, Extended-precision integer arithmetic)",
        carry,
    ),
    check(
        "arithmetic/f32",
        "f32 to the nearest is IEEE 754, subnormals and infinities included (PTX ISA)",
        single,
    ),
    check("arithmetic/f64", "f64 to the nearest is IEEE 754 (PTX ISA)", double),
    check(
        "arithmetic/f32-modes",
        "f32 toward zero, minus and plus infinity (PTX ISA, Rounding modifiers)",
        single_modes,
    ),
    check(
        "arithmetic/f64-modes",
        "f64 toward zero, minus and plus infinity (PTX ISA, Rounding modifiers)",
        double_modes,
    ),
    check(
        "arithmetic/nan",
        "an f32 result that is no number is 0x7fffffff; min and max take the number (PTX ISA)",
        nan,
    ),
    check("arithmetic/convert", "conversions round and saturate (PTX ISA, cvt)", convert),
    check("arithmetic/f16", "f32 to f16 and back, ties to even (PTX ISA, cvt)", half),
    check(
        "arithmetic/flush",
        ".ftz flushes subnormals to zeros of their sign, .sat clamps to [0, 1] (PTX ISA)",
        flush,
    ),
    check("arithmetic/approximate", "approximations keep the errors that the PTX ISA states", approximate),
];

/// An f32 between 2^-12 and 2^12, of either sign.
fn random_f32(numbers: &mut Rng) -> f32 {
    let bits = numbers.u32(..);
    f32::from_bits((bits & 0x807f_ffff) | ((115 + (bits >> 23) % 24) << 23))
}

/// An f64 between 2^-12 and 2^12, of either sign.
fn random_f64(numbers: &mut Rng) -> f64 {
    let bits = numbers.u64(..);
    f64::from_bits((bits & 0x800f_ffff_ffff_ffff) | ((1011 + (bits >> 52) % 24) << 52))
}

const THREADS: usize = 256;

/// Runs a kernel over three arrays; gives `count` results for each element.
fn run<T: Copy, U: Copy + Default>(
    ptx: &str,
    name: &str,
    inputs: [&[T]; 3],
    count: usize,
) -> Result<Vec<Vec<U>>> {
    gpu::start()?;
    let function = gpu::function(ptx, name)?;
    let threads = inputs[0].len();
    let (a, b, c) = (gpu::upload(inputs[0])?, gpu::upload(inputs[1])?, gpu::upload(inputs[2])?);
    let out = gpu::alloc(threads * count * size_of::<U>())?;
    let threads_32 = u32::try_from(threads).unwrap_or(u32::MAX);
    gpu::launch(function, 1, threads_32, std::ptr::null_mut(), &[a, b, c, out])?;
    let all = gpu::read::<U>(out, threads * count)?;
    Ok(all.chunks(count).map(<[U]>::to_vec).collect())
}

fn integer32() -> Result {
    let mut numbers = Rng::with_seed(1);
    let edges = [0, 1, 0x7fff_ffff, 0x8000_0001, 0xffff_ffff, 0xffff, 0x1_0000, 31];
    let mut a: Vec<u32> = (0..THREADS).map(|_| numbers.u32(..)).collect();
    let mut b: Vec<u32> = (0..THREADS).map(|_| numbers.u32(..) >> (numbers.u32(..) % 31)).collect();
    for (index, edge) in edges.iter().enumerate() {
        a[index] = *edge;
        b[8 + index] = *edge;
    }
    b.iter_mut().for_each(|b| *b = (*b).max(1));
    let c: Vec<u32> = (0..THREADS).map(|_| numbers.u32(..) % 70).collect();
    let results = run::<u32, u32>(kernels::INTEGER, "integer32", [&a, &b, &c], 29)?;
    for (index, got) in results.iter().enumerate() {
        let (a, b, c) = (a[index], b[index], c[index]);
        let (s, t) = (a as i32, b as i32);
        let wrapped = c % 32;
        let wanted = [
            a.wrapping_add(b),
            a.wrapping_sub(b),
            a.wrapping_mul(b),
            ((i64::from(s) * i64::from(t)) >> 32) as u32,
            ((u64::from(a) * u64::from(b)) >> 32) as u32,
            a.wrapping_mul(b).wrapping_add(c),
            s.wrapping_div(t) as u32,
            s.wrapping_rem(t) as u32,
            a / b,
            a % b,
            s.min(t) as u32,
            a.max(b),
            s.wrapping_abs() as u32,
            s.wrapping_neg() as u32,
            s.saturating_add(t) as u32,
            a.checked_shl(c).unwrap_or(0),
            (s >> c.min(31)) as u32,
            a.checked_shr(c).unwrap_or(0),
            (((u64::from(b) << 32 | u64::from(a)) << wrapped) >> 32) as u32,
            a.count_ones(),
            a.leading_zeros(),
            a.reverse_bits(),
            (a >> 5) & 0x1ff,
            ((s << 18) >> 23) as u32,
            (b & !(0x7ff << 7)) | ((a & 0x7ff) << 7),
            ((a >> 8) & 0xff) | ((b & 0xff) << 8) | ((b >> 24) << 16) | (((a >> 16) & 0xff) << 24),
            a ^ b ^ c,
            !a,
            a.checked_ilog2().unwrap_or(u32::MAX),
        ];
        for (operation, (got, wanted)) in got.iter().zip(wanted).enumerate() {
            let what = format!("operation {operation} of {a:#x}, {b:#x}, {c:#x}");
            expect_equal(&what, format!("{got:#x}"), format!("{wanted:#x}"))?;
        }
    }
    Ok(())
}

fn integer64() -> Result {
    let mut numbers = Rng::with_seed(2);
    let a: Vec<u64> = (0..THREADS).map(|_| numbers.u64(..) >> (numbers.u64(..) % 60)).collect();
    let b: Vec<u64> = (0..THREADS).map(|_| (numbers.u64(..) >> (numbers.u64(..) % 60)).max(1)).collect();
    let c: Vec<u64> = (0..THREADS).map(|_| numbers.u64(..) % 80).collect();
    let results = run::<u64, u64>(kernels::INTEGER, "integer64", [&a, &b, &c], 13)?;
    for (index, got) in results.iter().enumerate() {
        let (a, b, c) = (a[index], b[index], c[index]);
        let (s, t, shift) = (a as i64, b as i64, c as u32);
        let wanted = [
            a.wrapping_add(b),
            a.wrapping_mul(b),
            ((u128::from(a) * u128::from(b)) >> 64) as u64,
            ((i128::from(s) * i128::from(t)) >> 64) as u64,
            s.wrapping_div(t) as u64,
            a % b,
            a.checked_shl(shift).unwrap_or(0),
            (s >> shift.min(63)) as u64,
            u64::from(a.count_ones()),
            u64::from(a.leading_zeros()),
            i64::from(a as i32) as u64,
            s.min(t) as u64,
            if s < t { a } else { c },
        ];
        for (operation, (got, wanted)) in got.iter().zip(wanted).enumerate() {
            let what = format!("operation {operation} of {a:#x}, {b:#x}, {c:#x}");
            expect_equal(&what, format!("{got:#x}"), format!("{wanted:#x}"))?;
        }
    }
    Ok(())
}

fn carry() -> Result {
    gpu::start()?;
    let a = [0xffff_ffff_u64, 0xffff_ffff_ffff_ffff, 1, 0x1234_5678_9abc_def0];
    let b = [1_u64, 1, 2, 0xfedc_ba98_7654_3210];
    let out = gpu::alloc(32)?;
    let parameters = [gpu::upload(&a)?, gpu::upload(&b)?, out];
    gpu::launch(gpu::function(kernels::INTEGER, "carry")?, 1, 4, std::ptr::null_mut(), &parameters)?;
    let wanted: Vec<u64> = a.iter().zip(b).map(|(a, b)| a.wrapping_add(b)).collect();
    gpu::expect_content(out, &wanted)
}

/// Fails unless the bits are the same; all NaNs count as equal.
fn expect_bits32(what: &str, got: f32, wanted: f32) -> Result {
    if got.is_nan() && wanted.is_nan() {
        return Ok(());
    }
    let text = |value: f32| format!("{value:e} ({:#010x})", value.to_bits());
    expect_equal(what, text(got), text(wanted))
}

fn expect_bits64(what: &str, got: f64, wanted: f64) -> Result {
    if got.is_nan() && wanted.is_nan() {
        return Ok(());
    }
    let text = |value: f64| format!("{value:e} ({:#018x})", value.to_bits());
    expect_equal(what, text(got), text(wanted))
}

fn single() -> Result {
    let mut numbers = Rng::with_seed(3);
    let special = [
        0.0,
        -0.0,
        1.0,
        f32::MIN_POSITIVE,
        f32::from_bits(1),
        f32::MAX,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        -1.5,
    ];
    let any = |numbers: &mut Rng| f32::from_bits(numbers.u32(..));
    let mut a: Vec<f32> = (0..THREADS).map(|_| any(&mut numbers)).collect();
    let mut b: Vec<f32> = (0..THREADS).map(|_| any(&mut numbers)).collect();
    let c: Vec<f32> = (0..THREADS).map(|_| random_f32(&mut numbers)).collect();
    for index in 0..100 {
        (a[index], b[index]) = (special[index % 10], special[index / 10]);
    }
    let results = run::<f32, f32>(kernels::FLOAT, "single", [&a, &b, &c], 11)?;
    for (index, got) in results.iter().enumerate() {
        let (a, b, c) = (a[index], b[index], c[index]);
        let wanted =
            [a + b, a - b, a * b, a.mul_add(b, c), a / b, a.sqrt(), 1.0 / a, a.min(b), a.max(b), a.abs(), -a];
        for (operation, (got, wanted)) in got.iter().zip(wanted).enumerate() {
            // Of two zeros Rust's min and max may give either.
            if (7..9).contains(&operation) && a == 0.0 && b == 0.0 {
                continue;
            }
            expect_bits32(&format!("operation {operation} of {a:e}, {b:e}, {c:e}"), *got, wanted)?;
        }
    }
    Ok(())
}

fn double() -> Result {
    let mut numbers = Rng::with_seed(4);
    let any = |numbers: &mut Rng| f64::from_bits(numbers.u64(..));
    let a: Vec<f64> = (0..THREADS).map(|_| any(&mut numbers)).collect();
    let b: Vec<f64> = (0..THREADS).map(|_| any(&mut numbers)).collect();
    let c: Vec<f64> = (0..THREADS).map(|_| random_f64(&mut numbers)).collect();
    let near: Vec<f64> = (0..THREADS).map(|_| random_f64(&mut numbers)).collect();
    for (a, b) in [(&a, &b), (&near, &c), (&c, &a)] {
        let results = run::<f64, f64>(kernels::FLOAT, "double", [a, b, &c], 11)?;
        for (index, got) in results.iter().enumerate() {
            let (a, b, c) = (a[index], b[index], c[index]);
            let wanted = [
                a + b,
                a - b,
                a * b,
                a.mul_add(b, c),
                a / b,
                a.sqrt(),
                1.0 / a,
                a.min(b),
                a.max(b),
                a.abs(),
                -a,
            ];
            for (operation, (got, wanted)) in got.iter().zip(wanted).enumerate() {
                expect_bits64(&format!("operation {operation} of {a:e}, {b:e}, {c:e}"), *got, wanted)?;
            }
        }
    }
    Ok(())
}

const MODES: [Mode; 3] = [Mode::Zero, Mode::Minus, Mode::Plus];

fn single_modes() -> Result {
    let mut numbers = Rng::with_seed(5);
    let mut draw = || (0..THREADS).map(|_| random_f32(&mut numbers)).collect::<Vec<f32>>();
    let (a, b, c) = (draw(), draw(), draw());
    let results = run::<f32, f32>(kernels::FLOAT, "single_modes", [&a, &b, &c], 12)?;
    for (index, got) in results.iter().enumerate() {
        let (a, b, c) = (a[index], b[index], c[index]);
        for (number, mode) in MODES.into_iter().enumerate() {
            let wanted = [add32(a, b, mode), mul32(a, b, mode), div32(a, b, mode), fma32(a, b, c, mode)];
            for (operation, wanted) in wanted.into_iter().enumerate() {
                let what = format!("operation {operation} {mode:?} of {a:e}, {b:e}, {c:e}");
                expect_bits32(&what, got[operation * 3 + number], wanted)?;
            }
        }
    }
    Ok(())
}

fn double_modes() -> Result {
    let mut numbers = Rng::with_seed(6);
    let mut draw = || (0..THREADS).map(|_| random_f64(&mut numbers)).collect::<Vec<f64>>();
    let (a, b, c) = (draw(), draw(), draw());
    let results = run::<f64, f64>(kernels::FLOAT, "double_modes", [&a, &b, &c], 12)?;
    for (index, got) in results.iter().enumerate() {
        let (a, b, c) = (a[index], b[index], c[index]);
        for (number, mode) in MODES.into_iter().enumerate() {
            let wanted = [add64(a, b, mode), mul64(a, b, mode), div64(a, b, mode), fma64(a, b, c, mode)];
            for (operation, wanted) in wanted.into_iter().enumerate() {
                let what = format!("operation {operation} {mode:?} of {a:e}, {b:e}, {c:e}");
                expect_bits64(&what, got[operation * 3 + number], wanted)?;
            }
        }
    }
    Ok(())
}

fn nan() -> Result {
    let quiet = f32::from_bits(0x7fc0_1234);
    let a = [f32::INFINITY, quiet, 0.0, quiet];
    let b = [f32::NEG_INFINITY, 1.0, f32::INFINITY, 2.0];
    let results = run::<f32, u32>(kernels::FLOAT, "single", [&a, &b, &[1.0; 4]], 11)?;
    expect_equal("inf + -inf", results[0][0], 0x7fff_ffff)?;
    expect_equal("NaN + 1", results[1][0], 0x7fff_ffff)?;
    expect_equal("0 * inf", results[2][2], 0x7fff_ffff)?;
    expect_equal("min(NaN, 2)", results[3][7], 2.0_f32.to_bits())?;
    expect_equal("max(NaN, 2)", results[3][8], 2.0_f32.to_bits())
}

fn convert() -> Result {
    let a = [
        0.0,
        -0.0,
        0.5,
        1.5,
        2.5,
        -0.5,
        -1.5,
        -2.5,
        1e9,
        -1e9,
        3e9,
        -3e9,
        1e20,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        0.499_999_97,
        123.75,
        -123.75,
        8_388_607.5,
    ];
    let results = run::<f32, u32>(kernels::FLOAT, "convert", [&a, &a, &a], 10)?;
    for (a, got) in a.into_iter().zip(results) {
        let integer = |value: f32| (value as i32) as u32;
        let wanted = [
            integer(a),
            integer(a.round_ties_even()),
            integer(a.floor()),
            integer(a.ceil()),
            a as u32,
            a.to_bits(),
            ((a as i32) as f32).to_bits(),
        ];
        for (operation, (got, wanted)) in got.iter().zip(wanted).enumerate() {
            if a.is_nan() && operation == 5 {
                continue;
            }
            let what = format!("operation {operation} of {a:e}");
            expect_equal(&what, format!("{got:#x}"), format!("{wanted:#x}"))?;
        }
        expect_bits32(&format!("floor of {a:e}"), f32::from_bits(got[9]), a.floor())?;
    }
    Ok(())
}

fn half() -> Result {
    // A value, its f16, and that as f32. 2^-24 is the smallest f16, 65520 the first that overflows.
    let tiny = 2.0_f32.powi(-24);
    let step = 2.0_f32.powi(-11);
    let cases = [
        (1.0, 0x3c00, 1.0),
        (-2.0, 0xc000, -2.0),
        (65504.0, 0x7bff, 65504.0),
        (65519.0, 0x7bff, 65504.0),
        (65520.0, 0x7c00, f32::INFINITY),
        (tiny, 0x0001, tiny),
        (tiny / 2.0, 0x0000, 0.0),
        (tiny * 1.5, 0x0002, tiny * 2.0),
        (1.0 + step, 0x3c00, 1.0),
        (1.0 + 3.0 * step, 0x3c02, 1.0 + 4.0 * step),
        (-0.0, 0x8000, -0.0),
        (f32::NEG_INFINITY, 0xfc00, f32::NEG_INFINITY),
    ];
    let a: Vec<f32> = cases.iter().map(|case| case.0).collect();
    let results = run::<f32, u32>(kernels::FLOAT, "convert", [&a, &a, &a], 10)?;
    for ((value, bits, back), got) in cases.into_iter().zip(results) {
        let what = format!("f16 of {value:e}");
        expect_equal(&what, format!("{:#06x}", got[7] & 0xffff), format!("{bits:#06x}"))?;
        expect_bits32(&format!("{value:e} as f16 and back"), f32::from_bits(got[8]), back)?;
    }
    Ok(())
}

fn flush() -> Result {
    let small = f32::from_bits(0x0040_0000);
    let a = [small, -small, f32::MIN_POSITIVE, 2.0, -1.0, 0.25];
    let b = [0.0, -0.0, 0.5, 3.0, 0.5, 0.5];
    let results = run::<f32, f32>(kernels::FLOAT, "flush", [&a, &b, &a], 3)?;
    let wanted = [
        [0.0, 0.0, small],
        [-0.0, 0.0, 0.0],
        [f32::MIN_POSITIVE + 0.5, 0.0, f32::MIN_POSITIVE + 0.5],
        [5.0, 6.0, 1.0],
        [-0.5, -0.5, 0.0],
        [0.75, 0.125, 0.75],
    ];
    for (index, (got, wanted)) in results.iter().zip(wanted).enumerate() {
        for operation in 0..3 {
            let what = format!("operation {operation} of {:e}, {:e}", a[index], b[index]);
            expect_bits32(&what, got[operation], wanted[operation])?;
        }
    }
    Ok(())
}

fn approximate() -> Result {
    let mut numbers = Rng::with_seed(7);
    let mut draw = |low: f32, high: f32| -> Vec<f32> {
        let unit = |bits: u32| f32::from_bits(0x3f80_0000 | (bits >> 9)) - 1.0;
        (0..THREADS).map(|_| low + (high - low) * unit(numbers.u32(..))).collect()
    };
    let (a, b, c) = (draw(-20.0, 20.0), draw(0.01, 1000.0), draw(-3.1, 3.1));
    let results = run::<f32, f32>(kernels::FLOAT, "approximate", [&a, &b, &c], 6)?;
    for (index, got) in results.iter().enumerate() {
        let (a, b, c) = (f64::from(a[index]), f64::from(b[index]), f64::from(c[index]));
        let relative = |got: f32, exact: f64| ((f64::from(got) - exact) / exact).abs();
        let absolute = |got: f32, exact: f64| (f64::from(got) - exact).abs();
        // The bounds are those of the PTX ISA with a little room for the rounding of the result.
        let errors = [
            ("ex2", a, relative(got[0], a.exp2()), 2.0_f64.powi(-21)),
            ("lg2", b, absolute(got[1], b.log2()).min(relative(got[1], b.log2())), 2.0_f64.powi(-20)),
            ("sin", c, absolute(got[2], c.sin()), 2.0_f64.powi(-20)),
            ("cos", c, absolute(got[3], c.cos()), 2.0_f64.powi(-20)),
            ("rsqrt", b, relative(got[4], 1.0 / b.sqrt()), 2.0_f64.powi(-22)),
            ("rcp", b, relative(got[5], 1.0 / b), 2.0_f64.powi(-22)),
        ];
        for (name, value, error, bound) in errors {
            ensure!(error <= bound, "{name} of {value}: error {error:e}, permitted {bound:e}");
        }
    }
    Ok(())
}
