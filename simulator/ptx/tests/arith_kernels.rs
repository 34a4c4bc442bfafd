//! Kernels of one arithmetic instruction each, run on 32 lanes of random operands, against references that know
//! nothing of this crate: the host's arithmetic, `rustc_apfloat`, 128-bit integers.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;
use rustc_apfloat::ieee::{BFloat, Double, Half, Single};
use rustc_apfloat::{Float, FloatConvert, Round};
use simcuda_ptx::{Image, Launch, Memory, Module, Window};

const LANES: usize = 32;
/// Words of the buffer that a lane owns: three operands and the result.
const WORDS: usize = 4;
const ROUNDINGS: [(&str, Round); 4] = [
    ("rn", Round::NearestTiesToEven),
    ("rz", Round::TowardZero),
    ("rm", Round::TowardNegative),
    ("rp", Round::TowardPositive),
];

/// An instruction and what it computes.
struct Case {
    /// With `d`, `a`, `b`, `c` in braces for the result and the operands.
    text: String,
    /// Widths of the operands.
    operands: Vec<u32>,
    result_bits: u32,
    reference: Box<dyn Fn([u64; 3]) -> u64 + Send + Sync>,
    /// Results that count as equal whatever their payload: f64 NaNs, of which PTX says too little.
    any_nan: bool,
}

impl Case {
    fn new(
        text: String,
        operands: &[u32],
        result_bits: u32,
        reference: impl Fn([u64; 3]) -> u64 + Send + Sync + 'static,
    ) -> Case {
        Case {
            text,
            operands: operands.to_vec(),
            result_bits,
            reference: Box::new(reference),
            any_nan: false,
        }
    }

    fn kernel(&self) -> String {
        let register = |bits: u32, index: usize| match bits {
            16 => format!("%h{index}"),
            32 => format!("%w{index}"),
            _ => format!("%l{index}"),
        };
        let mut body = String::new();
        let mut instruction = self.text.replace("{d}", &register(self.result_bits, 3));
        for (index, (bits, name)) in self.operands.iter().zip(["{a}", "{b}", "{c}"]).enumerate() {
            let operand = register(*bits, index);
            body.push_str(&format!("    ld.global.b{bits} {operand}, [%l9+{}];\n", 8 * index));
            instruction = instruction.replace(name, &operand);
        }
        let (bits, result) = (self.result_bits, register(self.result_bits, 3));
        format!(
            ".version 8.6\n.target sm_90\n.address_size 64\n\
             .visible .entry kernel(.param .u64 buffer)\n{{\n\
             \x20   .reg .pred %p<2>;\n    .reg .b16 %h<4>;\n    .reg .b32 %w<5>;\n    .reg .b64 %l<10>;\n\
             \x20   ld.param.u64 %l8, [buffer];\n    mov.u32 %w4, %tid.x;\n    mad.wide.u32 %l9, %w4, {}, %l8;\n\
             {body}    {instruction};\n    st.global.b{bits} [%l9+24], {result};\n    ret;\n}}\n",
            8 * WORDS
        )
    }
}

/// Device memory of one buffer.
struct Buffer(Arc<Vec<AtomicU64>>);

impl Buffer {
    fn start(&self) -> u64 {
        0x7000_0000_0000 + self.0.as_ptr() as u64 % 16
    }
}

// SAFETY: the only window is the buffer, which outlives the launch.
unsafe impl Memory for Buffer {
    fn window(&self, address: u64) -> Option<Window> {
        let len = 8 * self.0.len() as u64;
        let keep: Arc<dyn Any + Send + Sync> = self.0.clone();
        let host = self.0.as_ptr().cast_mut().cast();
        (self.start()..self.start() + len).contains(&address).then(|| Window {
            start: self.start(),
            len,
            host,
            writable: true,
            keep,
        })
    }
}

fn run(case: &Case, lanes: &[[u64; 3]]) -> Vec<u64> {
    let text = case.kernel();
    let module = Module::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    let image = Image::new(Arc::new(module), Vec::new());
    let words = lanes.iter().flat_map(|[a, b, c]| [*a, *b, *c, 0]).map(AtomicU64::new).collect();
    let memory = Buffer(Arc::new(words));
    let launch = Launch {
        image: &image,
        function: "kernel",
        grid: [1, 1, 1],
        block: [lanes.len() as u32, 1, 1],
        dynamic_shared_bytes: 0,
        params: &memory.start().to_le_bytes(),
        cooperative: false,
        cluster: [1, 1, 1],
        max_shared_bytes: 48 << 10,
    };
    launch.run(&memory, 1).unwrap_or_else(|fault| panic!("{fault}\n{text}"));
    memory.0.chunks(WORDS).map(|lane| lane[3].load(Ordering::Relaxed)).collect()
}

/// A floating-point type: its name in PTX, its width, its canonical NaN, its 1.0.
#[derive(Clone, Copy)]
struct Type {
    name: &'static str,
    bits: u32,
    nan: u64,
    one: u64,
}

const F16: Type = Type { name: "f16", bits: 16, nan: 0x7fff, one: 0x3c00 };
const BF16: Type = Type { name: "bf16", bits: 16, nan: 0x7fff, one: 0x3f80 };
const F32: Type = Type { name: "f32", bits: 32, nan: 0x7fff_ffff, one: 0x3f80_0000 };
const F64: Type = Type { name: "f64", bits: 64, nan: 0x7ff8_0000_0000_0000, one: 0x3ff0_0000_0000_0000 };

impl Type {
    fn operand<F: Float>(self, bits: u64, ftz: bool) -> F {
        let value = F::from_bits(u128::from(bits & (u64::MAX >> (64 - self.bits))));
        if ftz && value.is_denormal() { F::ZERO.copy_sign(value) } else { value }
    }

    fn result<F: Float>(self, value: F, ftz: bool, sat: bool) -> u64 {
        let bits = value.to_bits() as u64;
        let sign = 1 << (self.bits - 1);
        match () {
            () if value.is_nan() => {
                if sat {
                    0
                } else {
                    self.nan
                }
            }
            () if sat && value.is_negative() => 0,
            () if ftz && value.is_denormal() => bits & sign,
            () if sat => bits.min(self.one),
            () => bits,
        }
    }
}

/// `add`, `sub`, `mul`, `fma`, with `div` where the type has it.
fn float_cases<F: Float + 'static>(ty: Type, flushable: bool, div: bool) -> Vec<Case> {
    type Function<F> = fn(F, F, F, Round) -> F;
    let operations: [(&str, usize, Function<F>); 5] = [
        ("add", 2, |a, b, _, round| a.add_r(b, round).value),
        ("sub", 2, |a, b, _, round| a.sub_r(b, round).value),
        ("mul", 2, |a, b, _, round| a.mul_r(b, round).value),
        ("fma", 3, |a, b, c, round| a.mul_add_r(b, c, round).value),
        ("div", 2, |a, b, _, round| a.div_r(b, round).value),
    ];
    let roundings = if ty.bits == 16 { &ROUNDINGS[..1] } else { &ROUNDINGS[..] };
    let flags: &[bool] = if flushable { &[false, true] } else { &[false] };
    let mut cases = Vec::new();
    for (name, arity, function) in operations.into_iter().filter(|(name, ..)| div || *name != "div") {
        for (suffix, round) in roundings.iter().copied() {
            for (ftz, sat) in flags.iter().flat_map(|ftz| flags.iter().map(move |sat| (*ftz, *sat))) {
                if sat && name == "div" {
                    continue;
                }
                let modifiers = [if ftz { ".ftz" } else { "" }, if sat { ".sat" } else { "" }].concat();
                let operands = if arity == 3 { "{a}, {b}, {c}" } else { "{a}, {b}" };
                let text = format!("{name}.{suffix}{modifiers}.{} {{d}}, {operands}", ty.name);
                let mut case = Case::new(text, &vec![ty.bits; arity], ty.bits, move |bits| {
                    let [a, b, c] = bits.map(|bits| ty.operand::<F>(bits, ftz));
                    ty.result(function(a, b, c, round), ftz, sat)
                });
                case.any_nan = ty.bits == 64;
                cases.push(case);
            }
        }
    }
    cases
}

fn conversion<From, To>(from: Type, to: Type, roundings: &[(&str, Round)]) -> Vec<Case>
where
    From: FloatConvert<To> + 'static,
    To: Float + 'static,
{
    let narrowing = from.bits > to.bits;
    let case = |(suffix, round): (&str, Round)| {
        let dot = if narrowing { format!(".{suffix}") } else { String::new() };
        let text = format!("cvt{dot}.{}.{} {{d}}, {{a}}", to.name, from.name);
        let mut case = Case::new(text, &[from.bits], to.bits, move |bits| {
            let converted = from.operand::<From>(bits[0], false).convert_r(round, &mut false).value;
            to.result(converted, false, false)
        });
        case.any_nan = to.bits == 64 || from.name == "bf16";
        case
    };
    roundings.iter().copied().map(case).collect()
}

/// An integer type: its name, its width, and the value of a word's low bits.
type Integer = (&'static str, u32, fn(u64) -> i128);

const INTEGERS: [Integer; 6] = [
    ("u16", 16, |bits| i128::from(bits as u16)),
    ("u32", 32, |bits| i128::from(bits as u32)),
    ("u64", 64, i128::from),
    ("s16", 16, |bits| i128::from(bits as i16)),
    ("s32", 32, |bits| i128::from(bits as i32)),
    ("s64", 64, |bits| i128::from(bits as i64)),
];

fn low(value: i128, bits: u32) -> u64 {
    value as u64 & (u64::MAX >> (64 - bits))
}

fn conversions() -> Vec<Case> {
    let mut cases = conversion::<Double, Single>(F64, F32, &ROUNDINGS);
    cases.extend(conversion::<Single, Half>(F32, F16, &ROUNDINGS[..2]));
    cases.extend(conversion::<Single, BFloat>(F32, BF16, &ROUNDINGS[..2]));
    cases.extend(conversion::<Half, Single>(F16, F32, &ROUNDINGS[..1]));
    cases.extend(conversion::<BFloat, Single>(BF16, F32, &ROUNDINGS[..1]));
    cases.extend(conversion::<Single, Double>(F32, F64, &ROUNDINGS[..1]));
    for (name, bits, value) in INTEGERS {
        for (suffix, round) in ROUNDINGS {
            let single =
                move |bits: [u64; 3]| Single::from_i128_r(value(bits[0]), round).value.to_bits() as u64;
            cases.push(Case::new(format!("cvt.{suffix}.f32.{name} {{d}}, {{a}}"), &[bits], 32, single));
            let double =
                move |bits: [u64; 3]| Double::from_i128_r(value(bits[0]), round).value.to_bits() as u64;
            cases.push(Case::new(format!("cvt.{suffix}.f64.{name} {{d}}, {{a}}"), &[bits], 64, double));
            let integral = move |value: f64| match suffix {
                "rn" => value.round_ties_even(),
                "rz" => value.trunc(),
                "rm" => value.floor(),
                _ => value.ceil(),
            };
            let cast = move |value: f64| match name {
                "u16" => u64::from(value as u16),
                "u32" => u64::from(value as u32),
                "u64" => value as u64,
                "s16" => u64::from(value as i16 as u16),
                "s32" => u64::from(value as i32 as u32),
                _ => value as i64 as u64,
            };
            let text = format!("cvt.{suffix}i.{name}.f32 {{d}}, {{a}}");
            cases.push(Case::new(text, &[32], bits, move |operands| {
                let operand = f64::from(f32::from_bits(operands[0] as u32));
                let nan = if bits == 64 { 1 << 63 } else { 0 };
                if operand.is_nan() { nan } else { cast(integral(operand)) }
            }));
            let text = format!("cvt.{suffix}i.{name}.f64 {{d}}, {{a}}");
            cases.push(Case::new(text, &[64], bits, move |operands| {
                let operand = f64::from_bits(operands[0]);
                if operand.is_nan() { 1 << (bits - 1) } else { cast(integral(operand)) }
            }));
        }
    }
    cases
}

fn integer_cases() -> Vec<Case> {
    type Function = fn(i128, i128, i128) -> i128;
    let operations: [(&str, usize, Function); 10] = [
        ("add", 2, |a, b, _| a + b),
        ("sub", 2, |a, b, _| a - b),
        ("mul.lo", 2, |a, b, _| a.wrapping_mul(b)),
        ("mad.lo", 3, |a, b, c| a.wrapping_mul(b).wrapping_add(c)),
        ("min", 2, |a, b, _| a.min(b)),
        ("max", 2, |a, b, _| a.max(b)),
        ("sad", 3, |a, b, c| c + (a - b).abs()),
        // Division by zero is undefined and not compared.
        ("div", 2, |a, b, _| a / (b | 1)),
        ("rem", 2, |a, b, _| a % (b | 1)),
        ("abs", 1, |a, _, _| a.abs()),
    ];
    let mut cases = Vec::new();
    for (name, bits, value) in INTEGERS {
        for (operation, arity, function) in operations {
            if operation == "abs" && name.starts_with('u') {
                continue;
            }
            let operands = ["{a}", "{a}, {b}", "{a}, {b}, {c}"][arity - 1];
            let odd = if matches!(operation, "div" | "rem") {
                format!("or.b{bits} {{b}}, {{b}}, 1; ")
            } else {
                String::new()
            };
            let text = format!("{odd}{operation}.{name} {{d}}, {operands}");
            cases.push(Case::new(text, &vec![bits; arity], bits, move |operands| {
                let [a, b, c] = operands.map(value);
                low(function(a, b, c), bits)
            }));
        }
        cases.extend(products_and_shifts((name, bits, value)));
    }
    cases.extend(bit_counts());
    cases
}

/// High and wide products, and shifts.
fn products_and_shifts((name, bits, value): Integer) -> Vec<Case> {
    let mut cases = Vec::new();
    cases.push(Case::new(
        format!("mul.hi.{name} {{d}}, {{a}}, {{b}}"),
        &[bits, bits],
        bits,
        move |[a, b, _]| {
            let unsigned = (u128::from(a) * u128::from(b)) >> 64;
            if name == "u64" { unsigned as u64 } else { low((value(a) * value(b)) >> bits, bits) }
        },
    ));
    if bits < 64 {
        let text = format!("mul.wide.{name} {{d}}, {{a}}, {{b}}");
        cases.push(Case::new(text, &[bits, bits], 2 * bits, move |[a, b, _]| {
            low(value(a) * value(b), 2 * bits)
        }));
    }
    cases.push(Case::new(format!("shr.{name} {{d}}, {{a}}, {{b}}"), &[bits, 32], bits, move |[a, b, _]| {
        low(value(a) >> (b as u32).min(64), bits)
    }));
    cases.push(Case::new(format!("shl.b{bits} {{d}}, {{a}}, {{b}}"), &[bits, 32], bits, move |[a, b, _]| {
        low(value(a) << (b as u32).min(64), bits)
    }));
    cases
}

/// Population counts, leading zeros and reversals of bits.
fn bit_counts() -> Vec<Case> {
    let mut cases = Vec::new();
    for (bits, mask) in [(32, u64::from(u32::MAX)), (64, u64::MAX)] {
        cases.push(Case::new(format!("popc.b{bits} {{d}}, {{a}}"), &[bits], 32, move |[a, ..]| {
            u64::from((a & mask).count_ones())
        }));
        cases.push(Case::new(format!("clz.b{bits} {{d}}, {{a}}"), &[bits], 32, move |[a, ..]| {
            u64::from((a & mask).leading_zeros() - (64 - bits))
        }));
        cases.push(Case::new(format!("brev.b{bits} {{d}}, {{a}}"), &[bits], bits, move |[a, ..]| {
            (a & mask).reverse_bits() >> (64 - bits)
        }));
    }
    cases
}

fn comparisons() -> Vec<Case> {
    type Function = fn(f64, f64) -> bool;
    let relations: [(&str, Function); 14] = [
        ("eq", |a, b| a == b),
        ("ne", |a, b| !a.is_nan() && !b.is_nan() && a != b),
        ("lt", |a, b| a < b),
        ("le", |a, b| a <= b),
        ("gt", |a, b| a > b),
        ("ge", |a, b| a >= b),
        ("equ", |a, b| a == b || a.is_nan() || b.is_nan()),
        ("neu", |a, b| a != b),
        ("ltu", |a, b| a < b || a.is_nan() || b.is_nan()),
        ("leu", |a, b| a <= b || a.is_nan() || b.is_nan()),
        ("gtu", |a, b| a > b || a.is_nan() || b.is_nan()),
        ("geu", |a, b| a >= b || a.is_nan() || b.is_nan()),
        ("num", |a, b| !a.is_nan() && !b.is_nan()),
        ("nan", |a, b| a.is_nan() || b.is_nan()),
    ];
    let mut cases = Vec::new();
    for (name, relation) in relations {
        let select = "selp.b32 {d}, 1, 0, %p0";
        let single = |bits: u64| f64::from(f32::from_bits(bits as u32));
        let text = format!("setp.{name}.f32 %p0, {{a}}, {{b}}; {select}");
        cases
            .push(Case::new(text, &[32, 32], 32, move |[a, b, _]| u64::from(relation(single(a), single(b)))));
        let text = format!("setp.{name}.f64 %p0, {{a}}, {{b}}; {select}");
        cases.push(Case::new(text, &[64, 64], 32, move |[a, b, _]| {
            u64::from(relation(f64::from_bits(a), f64::from_bits(b)))
        }));
    }
    cases
}

fn cases() -> Vec<Case> {
    let mut cases = float_cases::<Single>(F32, true, true);
    cases.extend(float_cases::<Double>(F64, false, true));
    cases.extend(float_cases::<Half>(F16, true, false));
    cases.extend(float_cases::<BFloat>(BF16, false, false));
    for (suffix, host) in [("rcp.rn", (|a| 1.0 / a) as fn(f32) -> f32), ("sqrt.rn", f32::sqrt)] {
        cases.push(Case::new(format!("{suffix}.f32 {{d}}, {{a}}"), &[32], 32, move |[a, ..]| {
            let result = host(f32::from_bits(a as u32));
            if result.is_nan() { F32.nan } else { u64::from(result.to_bits()) }
        }));
    }
    cases.extend(conversions());
    cases.extend(integer_cases());
    cases.extend(comparisons());
    cases
}

/// Patterns in which the low 16, 32 and 64 bits are each likely to be special in the types of that width.
fn patterns() -> impl Strategy<Value = u64> {
    let special = prop_oneof![
        Just(0u64),
        Just(1),
        Just(u64::MAX),
        Just(F64.one),
        Just(F32.one),
        Just(F16.one),
        Just(BF16.one),
        Just(0x7ff0_0000_0000_0000),
        Just(0x7f80_0000),
        Just(0x7c00),
        Just(0x7f80),
        Just(0x7ff4_0000_0000_0001),
        Just(0x7fa0_0001),
        Just(0x0080_0000),
        Just(0x007f_ffff),
        Just(0x03ff),
        Just(0x8000_0000_8000_8000),
    ];
    // Numbers of every type with an exponent near that of 1, so that sums cancel and integers are neither 0 nor all.
    let moderate = (any::<u64>(), 0u64..40).prop_map(|(bits, exponent)| {
        (bits & 0x800f_ffff_807f_83ff)
            | (1020 + exponent) << 52
            | (124 + exponent) << 23
            | (exponent & 15) << 10
    });
    prop_oneof![3 => any::<u64>(), 3 => moderate, 2 => 0u64..100, 2 => special.clone(),
        1 => (special, any::<u64>()).prop_map(|(special, bits)| special ^ (bits & 0x8000_0000_8000_8000))]
}

fn is_nan(bits: u64, width: u32) -> bool {
    if width == 64 { f64::from_bits(bits).is_nan() } else { f32::from_bits(bits as u32).is_nan() }
}

fn check(case: &Case, lanes: &[[u64; 3]]) -> Result<(), TestCaseError> {
    for (operands, result) in lanes.iter().zip(run(case, lanes)) {
        let expected = (case.reference)(*operands);
        let same_nan = case.any_nan && is_nan(result, case.result_bits) && is_nan(expected, case.result_bits);
        prop_assert!(
            result == expected || same_nan,
            "{} of {operands:#x?} is {result:#x}, not {expected:#x}",
            case.text
        );
    }
    Ok(())
}

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases: if cfg!(miri) { 2 } else { cases },
        failure_persistence: None,
        ..Default::default()
    }
}

/// Each instruction on some operands.
#[test]
fn every_instruction() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let lanes = prop::collection::vec(prop::array::uniform3(patterns()), LANES);
    for case in cases().iter().step_by(if cfg!(miri) { 101 } else { 1 }) {
        let tree = lanes.new_tree(&mut runner).expect("a strategy without filters");
        check(case, &proptest::strategy::ValueTree::current(&tree)).unwrap_or_else(|error| panic!("{error}"));
    }
}

proptest! {
    #![proptest_config(config(1000))]

    #[test]
    fn random_instructions(
        index: prop::sample::Index,
        lanes in prop::collection::vec(prop::array::uniform3(patterns()), LANES),
    ) {
        let cases = cases();
        check(&cases[index.index(cases.len())], &lanes)?;
    }
}
