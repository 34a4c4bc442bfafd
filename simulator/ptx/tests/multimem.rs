//! Accesses to multimem addresses (PTX ISA, "multimem"): one address for the memory of several devices.

mod support;

use simcuda_ptx::{Fault, Module};
use support::{Plain, Shape, TestMemory, arg, image, kernel, launch};

/// Runs one thread with `%d0` the multimem address of three devices' memory, which holds `contents`, and `%d1` the
/// address of a result of 16 bytes. What the devices hold then, and the result.
fn run<T: Plain + Copy>(contents: [&[T]; 3], body: &str) -> Result<([Vec<T>; 3], Vec<T>), Fault> {
    let mut memory = TestMemory::default();
    let places = contents.map(|content| memory.put(content));
    let count = contents[0].len();
    let address = memory.join(&places, size_of_val(contents[0]));
    let result = memory.put(&[0_u64; 2]);
    let loads = "ld.param.u64 %d0, [team];\nld.param.u64 %d1, [result];";
    let text = kernel(".param .u64 team, .param .u64 result", &format!("{loads}\n{body}"));
    let image = image(&text, &mut memory);
    launch(&image, "test", &Shape::new(1, 1), &[arg(address), arg(result)], &memory)?;
    Ok((places.map(|place| memory.get(place, count)), memory.get(result, 16 / size_of::<T>())))
}

#[test]
fn what_lies_at_all_places_is_joined() {
    let words: [&[u32]; 3] = [&[7, 1 << 31], &[9, 2], &[12, 3]];
    let cases = [
        ("add.u32", 28),
        ("min.u32", 7),
        ("max.u32", 12),
        ("min.s32", 7),
        ("and.b32", 7 & 9 & 12),
        ("or.b32", 15),
        ("xor.b32", 7 ^ 9 ^ 12),
    ];
    for (op, expected) in cases {
        let body =
            format!("multimem.ld_reduce.relaxed.sys.global.{op} %r1, [%d0];\nst.global.b32 [%d1], %r1;");
        let (places, result) = run(words, &body).unwrap();
        assert_eq!(result[0], expected, "{op}");
        assert_eq!(places, words.map(<[u32]>::to_vec), "{op} writes nothing");
    }
    let signed = "multimem.ld_reduce.weak.min.s32 %r1, [%d0+4];\nst.global.b32 [%d1], %r1;";
    assert_eq!(run(words, signed).unwrap().1[0], 1 << 31);
    let wide: [&[u64]; 3] = [&[u64::MAX], &[3], &[5]];
    let sum = "multimem.ld_reduce.acquire.gpu.global.add.u64 %d2, [%d0];\nst.global.b64 [%d1], %d2;";
    assert_eq!(run(wide, sum).unwrap().1[0], 7);
}

#[test]
fn a_vector_is_joined_element_by_element() {
    let floats: [&[f32]; 3] = [&[1.0, 2.0, 3.0, 4.0], &[10.0, 20.0, 30.0, 40.0], &[0.5; 4]];
    let body = "multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%f0, %f1, %f2, %f3}, [%d0];
        st.global.v4.f32 [%d1], {%f0, %f1, %f2, %f3};";
    assert_eq!(run(floats, body).unwrap().1, [11.5, 22.5, 33.5, 44.5]);
    let doubles: [&[f64]; 3] = [&[1.0], &[1e-17], &[2.0]];
    let body = "multimem.ld_reduce.add.f64 %fd0, [%d0];\nst.global.f64 [%d1], %fd0;";
    assert_eq!(run(doubles, body).unwrap().1[0], 3.0);
}

/// 1 + 2^-11 is no f16; in f32 two such steps add up.
#[test]
fn sums_of_halves_are_rounded_each_time_or_once() {
    let (one, step) = (0x3c00_u32, 0x1000_u32);
    let halves: [&[u32]; 3] = [&[one << 16 | one], &[step << 16 | step], &[step << 16 | step]];
    let joined = |modifiers: &str| {
        let body = format!("multimem.ld_reduce.global.add{modifiers} %r1, [%d0];\nst.global.b32 [%d1], %r1;");
        run(halves, &body).unwrap().1[0]
    };
    assert_eq!(joined(".f16x2"), one << 16 | one);
    assert_eq!(joined(".acc::f32.f16x2"), (one + 1) << 16 | (one + 1));
    let (one, two) = (0x3f80_u32, 0x4000_u32);
    let brains: [&[u32]; 3] = [&[one << 16 | two], &[two << 16 | one], &[one]];
    for (op, expected) in
        [("add.bf16x2", 0x4040 << 16 | 0x4080), ("max.bf16x2", two << 16 | two), ("min.bf16x2", one)]
    {
        let body = format!("multimem.ld_reduce.global.{op} %r1, [%d0];\nst.global.b32 [%d1], %r1;");
        assert_eq!(run(brains, &body).unwrap().1[0], expected, "{op}");
    }
    let body =
        "multimem.ld_reduce.global.min.v2.bf16 {%h1, %h2}, [%d0];\nst.global.v2.b16 [%d1], {%h1, %h2};";
    assert_eq!(run(brains, body).unwrap().1[0], one);
}

#[test]
fn a_store_goes_to_all_places() {
    let floats: [&[f32]; 3] = [&[0.0; 2], &[1.0; 2], &[2.0; 2]];
    let body = "mov.f32 %f0, 0f40400000;\nmov.f32 %f1, 0f3f800000;
        multimem.st.release.sys.global.v2.f32 [%d0], {%f0, %f1};";
    let (places, _) = run(floats, body).unwrap();
    assert_eq!(places, [[3.0, 1.0], [3.0, 1.0], [3.0, 1.0]].map(Vec::from));
}

#[test]
fn a_reduction_changes_all_places() {
    let words: [&[u32]; 3] = [&[1], &[2], &[3]];
    for (op, expected) in [("add.u32", [11, 12, 13]), ("max.s32", [10; 3]), ("or.b32", [11, 10, 11])] {
        let (places, _) = run(words, &format!("multimem.red.relaxed.sys.global.{op} [%d0], 10;")).unwrap();
        assert_eq!(places, expected.map(|word| vec![word]), "{op}");
    }
    let floats: [&[f32]; 3] = [&[1.0], &[2.0], &[3.0]];
    let body = "mov.f32 %f0, 0f3f800000;\nmultimem.red.add.f32 [%d0], %f0;";
    assert_eq!(run(floats, body).unwrap().0, [vec![2.0], vec![3.0], vec![4.0]]);
}

/// It is undefined; here it is an error, either way round.
#[test]
fn both_kinds_of_address_are_kept_apart() {
    let words: [&[u32]; 3] = [&[1], &[2], &[3]];
    for body in [
        "ld.global.u32 %r1, [%d0];",
        "st.global.u32 [%d0], 1;",
        "multimem.ld_reduce.add.u32 %r1, [%d1];",
        "multimem.st.u32 [%d1], 1;",
        "multimem.ld_reduce.add.u32 %r1, [%d0+4];",
    ] {
        assert!(matches!(run(words, body), Err(Fault::IllegalAddress { .. })), "{body}");
    }
    let body = "multimem.ld_reduce.add.u32 %r1, [%d0+2];";
    assert!(matches!(run(words, body), Err(Fault::MisalignedAddress { .. })));
}

#[test]
fn what_does_not_go_together_is_refused() {
    for instruction in [
        "multimem.ld_reduce.add.s64 %d2, [%d0];",
        "multimem.ld_reduce.min.f32 %f0, [%d0];",
        "multimem.ld_reduce.add.v2.f64 {%fd0, %fd1}, [%d0];",
        "multimem.ld_reduce.add.f16 %h0, [%d0];",
        "multimem.ld_reduce.add.v8.f16x2 {%r0, %r1, %r2, %r3, %r4, %r5, %r6, %r7}, [%d0];",
        "multimem.ld_reduce.add.v2.u32 {%r0, %r1}, [%d0];",
        "multimem.ld_reduce.add.acc::f32.f32 %f0, [%d0];",
        "multimem.ld_reduce.release.sys.add.u32 %r0, [%d0];",
        "multimem.ld_reduce.and.u32 %r0, [%d0];",
        "multimem.ld_reduce.inc.u32 %r0, [%d0];",
        "multimem.red.max.f16x2 [%d0], %r0;",
        "multimem.red.acquire.sys.add.u32 [%d0], %r0;",
        "multimem.red.weak.add.u32 [%d0], %r0;",
        "multimem.st.add.u32 [%d0], %r0;",
        "multimem.ld.u32 %r0, [%d0];",
    ] {
        assert!(Module::parse(&kernel("", instruction)).is_err(), "{instruction}");
    }
}
