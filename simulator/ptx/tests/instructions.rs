//! Each group of instructions in a small kernel. Arithmetic itself is tested in `arith*.rs`; here it is that the right
//! function is chosen, with the right operands, widths and modifiers.

mod support;

use support::run_block;

/// Runs 32 threads and compares `%r10` of each with `expected(thread)`.
fn check(body: &str, expected: impl Fn(u32) -> u32) {
    check_with("", body, expected);
}

fn check_with(declarations: &str, body: &str, expected: impl Fn(u32) -> u32) {
    let result = run_block(declarations, &format!("{body}\nst.global.u32 [%d0], %r10;"), 32, 1).unwrap();
    assert_eq!(result, (0..32).map(expected).collect::<Vec<_>>(), "{body}");
}

/// `%f10` instead of `%r10`.
fn check_float(body: &str, expected: impl Fn(f32) -> f32) {
    let body = format!("cvt.rn.f32.u32 %f0, %r0;\n{body}\nmov.b32 %r10, %f10;");
    check(&body, |thread| expected(thread as f32).to_bits());
}

#[test]
fn integer_arithmetic() {
    check("add.u32 %r10, %r0, 7;", |t| t + 7);
    check("sub.s32 %r10, 5, %r0;", |t| 5u32.wrapping_sub(t));
    check("mul.lo.u32 %r10, %r0, 0x10000001;", |t| t.wrapping_mul(0x1000_0001));
    check("mul.hi.u32 %r10, %r0, 0xf0000000;", |t| ((u64::from(t) * 0xf000_0000) >> 32) as u32);
    check("mul.wide.s32 %d2, %r0, -3; cvt.u32.u64 %r10, %d2;", |t| t.wrapping_mul(3).wrapping_neg());
    check("mad.lo.s32 %r10, %r0, %r0, -1;", |t| (t * t).wrapping_sub(1));
    check("mad.wide.u32 %d2, %r0, 3, %d1; cvt.u32.u64 %r10, %d2;", |t| 3 * t + 4 * t);
    check("add.sat.s32 %r10, 0x7ffffff0, %r0;", |t| 0x7fff_fff0u32.wrapping_add(t).min(0x7fff_ffff));
    check("sub.u32 %r1, %r0, 16; div.s32 %r10, %r1, 3;", |t| ((t as i32 - 16) / 3) as u32);
    check("rem.u32 %r10, %r0, 5;", |t| t % 5);
    check("div.u32 %r10, %r0, 0;", |_| u32::MAX);
    check("sub.s32 %r1, %r0, 16; abs.s32 %r10, %r1;", |t| (t as i32 - 16).unsigned_abs());
    check("neg.s32 %r10, %r0;", u32::wrapping_neg);
    check("sub.s32 %r1, %r0, 16; min.s32 %r2, %r1, 3; max.s32 %r10, %r2, -4;", |t| {
        (t as i32 - 16).clamp(-4, 3) as u32
    });
    check("min.u32 %r2, %r0, 9; max.u32 %r10, %r2, 4;", |t| t.clamp(4, 9));
    check("sad.u32 %r10, %r0, 16, 100;", |t| t.abs_diff(16) + 100);
    check("mul24.lo.u32 %r1, %r0, 9; mad24.lo.u32 %r10, %r1, 2, 1;", |t| t * 18 + 1);
}

#[test]
fn sixteen_bit_integers() {
    check("cvt.u16.u32 %h1, %r0; sub.u16 %h2, %h1, 20; cvt.u32.u16 %r10, %h2;", |t| {
        u32::from((t as u16).wrapping_sub(20))
    });
    check("cvt.u16.u32 %h1, %r0; sub.s16 %h2, %h1, 20; cvt.s32.s16 %r10, %h2;", |t| {
        i32::from((t as i16) - 20) as u32
    });
    check("cvt.u16.u32 %h1, %r0; mul.wide.u16 %r10, %h1, 4000;", |t| t * 4000);
    check("cvt.u16.u32 %h1, %r0; shl.b16 %h2, %h1, 12; shr.s16 %h3, %h2, 12; cvt.s32.s16 %r10, %h3;", |t| {
        i32::from(((t as u16) << 12) as i16 >> 12) as u32
    });
    check("mov.b32 %r1, {%h1, %h2}; mov.u16 %h1, 3; cvt.u16.u32 %h2, %r0; mov.b32 %r10, {%h1, %h2};", |t| {
        3 | t << 16
    });
}

#[test]
fn carries() {
    // 2^64 - 1 + thread, as two halves.
    let sum = "add.cc.u32 %r1, 0xffffffff, %r0; addc.cc.u32 %r2, 0xffffffff, 0; addc.u32 %r3, 0, 0;";
    check(&format!("{sum} shl.b32 %r4, %r3, 8; add.u32 %r10, %r1, %r4;"), |t| match t {
        0 => u32::MAX,
        _ => (t - 1) + 256,
    });
    let difference = "sub.cc.u32 %r1, %r0, 5; subc.u32 %r10, 0, 0;";
    check(difference, |t| if t < 5 { u32::MAX } else { 0 });
    // (2^32 - 1) * thread + 2^32 - 1, its upper half.
    let product = "mad.lo.cc.u32 %r1, 0xffffffff, %r0, 0xffffffff; madc.hi.u32 %r10, 0xffffffff, %r0, 0;";
    check(product, |t| ((0xffff_ffffu64 * u64::from(t) + 0xffff_ffff) >> 32) as u32);
    check("add.cc.u64 %d2, -1, %d1; addc.u64 %d3, 0, 0; cvt.u32.u64 %r10, %d3;", |t| u32::from(t > 0));
}

#[test]
fn bits_and_shifts() {
    check("and.b32 %r1, %r0, 12; or.b32 %r2, %r1, 3; xor.b32 %r10, %r2, -1;", |t| !(t & 12 | 3));
    check("not.b32 %r1, %r0; cnot.b32 %r2, %r0; add.u32 %r10, %r1, %r2;", |t| {
        (!t).wrapping_add(u32::from(t == 0))
    });
    check("shl.b32 %r10, 3, %r0;", |t| 3u32.wrapping_shl(t) & if t > 31 { 0 } else { u32::MAX });
    check("add.u32 %r1, %r0, 20; shr.s32 %r10, -64, %r1;", |t| (-64i32 >> (t + 20).min(31)) as u32);
    check("add.u32 %r1, %r0, 20; shr.u32 %r10, 0x80000000, %r1;", |t| {
        if t + 20 > 31 { 0 } else { 0x8000_0000u32 >> (t + 20) }
    });
    check("popc.b32 %r1, %r0; clz.b32 %r2, %r0; mad.lo.u32 %r10, %r1, 100, %r2;", |t| {
        t.count_ones() * 100 + t.leading_zeros()
    });
    check("brev.b32 %r1, %r0; bfind.u32 %r2, %r0; add.u32 %r10, %r1, %r2;", |t| {
        t.reverse_bits().wrapping_add(if t == 0 { u32::MAX } else { 31 - t.leading_zeros() })
    });
    check("bfe.u32 %r10, %r0, 1, 3;", |t| t >> 1 & 7);
    check("bfe.s32 %r10, %r0, 1, 3;", |t| (((t >> 1 & 7) << 29) as i32 >> 29) as u32);
    check("bfi.b32 %r10, %r0, 0xffffffff, 8, 4;", |t| 0xffff_f0ff | (t & 15) << 8);
    check("lop3.b32 %r10, %r0, 12, 10, 0x96;", |t| t ^ 12 ^ 10);
    check("prmt.b32 %r10, %r0, 0x11223344, 0x4701;", |t| 0x4411_0000 | t << 8);
    check("shf.l.wrap.b32 %r10, 0x80000000, %r0, 1;", |t| t << 1 | 1);
    check("shf.r.clamp.b32 %r10, 16, %r0, 4;", |t| 1 | t << 28);
    check("dp4a.u32.u32 %r10, %r0, 0x01010102, 5;", |t| 2 * t + 5);
    check("bmsk.clamp.b32 %r10, %r0, 2;", |t| 3u32.checked_shl(t).unwrap_or(0));
    check("fns.b32 %r10, 0xf0, 0, 1;", |_| 4);
}

#[test]
fn comparisons_and_selections() {
    check("setp.lt.u32 %p1, %r0, 9; selp.b32 %r10, 1, 2, %p1;", |t| if t < 9 { 1 } else { 2 });
    check("sub.s32 %r1, %r0, 9; setp.hi.u32 %p1, %r1, 3; selp.b32 %r10, 1, 2, %p1;", |t| {
        if t.wrapping_sub(9) > 3 { 1 } else { 2 }
    });
    check(
        "setp.ge.s32 %p1|%p2, %r0, 9; selp.b32 %r1, 1, 0, %p1; selp.b32 %r2, 2, 0, %p2; add.u32 %r10, %r1, %r2;",
        |t| {
            if t >= 9 { 1 } else { 2 }
        },
    );
    check("setp.lt.u32 %p1, %r0, 20; setp.gt.and.u32 %p2, %r0, 10, %p1; selp.b32 %r10, 1, 0, %p2;", |t| {
        u32::from(t > 10 && t < 20)
    });
    check(
        "setp.lt.u32 %p1, %r0, 20; setp.gt.xor.u32 %p2|%p3, %r0, 10, !%p1; selp.b32 %r10, 1, 0, %p3;",
        |t| u32::from((t <= 10) ^ (t >= 20)),
    );
    check("set.eq.u32.u32 %r10, %r0, 3;", |t| if t == 3 { u32::MAX } else { 0 });
    check("set.lt.f32.u32 %f1, %r0, 3; mov.b32 %r10, %f1;", |t| if t < 3 { 1f32.to_bits() } else { 0 });
    check("sub.s32 %r1, %r0, 4; slct.u32.s32 %r10, 7, 8, %r1;", |t| if t >= 4 { 7 } else { 8 });
    check(
        "setp.eq.f32 %p1, 0f7FC00000, 0f7FC00000; setp.nan.f32 %p2, 0f7FC00000, 0f3F800000; \
           selp.b32 %r1, 1, 0, %p1; selp.b32 %r2, 2, 0, %p2; or.b32 %r10, %r1, %r2;",
        |_| 2,
    );
    check(
        "setp.lt.u32 %p1, %r0, 4; setp.eq.u32 %p2, %r0, 7; or.pred %p3, %p1, %p2; not.pred %p4, %p3; \
           mov.pred %p5, %p4; selp.u32 %r10, 1, 0, %p5;",
        |t| u32::from(!(t < 4 || t == 7)),
    );
    check(
        "mov.b32 %r10, 5; setp.eq.u32 %p1, %r0, 3; @%p1 mov.b32 %r10, 6; @!%p1 add.u32 %r10, %r10, 2;",
        |t| {
            if t == 3 { 6 } else { 7 }
        },
    );
}

#[test]
fn single_precision() {
    check_float("fma.rn.f32 %f1, %f0, 0f40000000, 0f3F800000; add.rn.f32 %f10, %f1, 0f3F000000;", |t| {
        2.0 * t + 1.5
    });
    check_float("mul.f32 %f1, %f0, 0f3DCCCCCD; sub.f32 %f10, %f1, 1.0;", |t| t * 0.1 - 1.0);
    check_float("div.rn.f32 %f1, %f0, 0f40400000; sqrt.rn.f32 %f10, %f1;", |t| (t / 3.0).sqrt());
    check_float("add.f32 %f1, %f0, 0f3F800000; rcp.rn.f32 %f10, %f1;", |t| 1.0 / (t + 1.0));
    check_float("add.sat.f32 %f1, %f0, 0fC0000000; neg.f32 %f2, %f1; abs.f32 %f10, %f2;", |t| {
        (t - 2.0).clamp(0.0, 1.0)
    });
    check_float("min.f32 %f1, %f0, 0f40A00000; max.f32 %f10, %f1, 0f40000000;", |t| t.clamp(2.0, 5.0));
    check_float("copysign.f32 %f10, 0fBF800000, %f0;", |t| -t);
    check_float("add.rz.f32 %f1, %f0, 0f33000000; add.rp.f32 %f10, %f1, 0f00000001;", |t| {
        // Truncation forgets 2^-25 unless the sum is small; rounding up then takes one step.
        let truncated = if t == 0.0 { 2f32.powi(-25) } else { t };
        f32::from_bits(truncated.to_bits() + 1)
    });
    check_float("mul.ftz.f32 %f10, %f0, 0f00000001;", |_| 0.0);
    check("mov.b32 %f1, 0x7f800001; add.f32 %f2, %f1, %f1; mov.b32 %r10, %f2;", |_| 0x7fff_ffff);
    check_float("testp.finite.f32 %p1, %f0; selp.f32 %f10, 0f3F800000, 0f00000000, %p1;", |_| 1.0);
    check_float("lg2.approx.f32 %f1, 0f41000000; ex2.approx.f32 %f10, %f1;", |_| 8.0);
    check_float("sin.approx.f32 %f1, 0f00000000; cos.approx.f32 %f2, %f1; add.f32 %f10, %f2, %f0;", |t| {
        1.0 + t
    });
}

#[test]
fn double_precision() {
    let to_word = "cvt.rzi.u32.f64 %r10, %fd5;";
    check(
        &format!(
            "cvt.rn.f64.u32 %fd0, %r0; fma.rn.f64 %fd5, %fd0, 0d4000000000000000, 0d3FF8000000000000; {to_word}"
        ),
        |t| 2 * t + 1,
    );
    check(
        &format!("cvt.rn.f64.u32 %fd0, %r0; mul.f64 %fd1, %fd0, %fd0; sqrt.rn.f64 %fd5, %fd1; {to_word}"),
        |t| t,
    );
    check(
        &format!(
            "cvt.rn.f64.u32 %fd0, %r0; div.rn.f64 %fd1, %fd0, 0d4008000000000000; max.f64 %fd5, %fd1, 0d4014000000000000; {to_word}"
        ),
        |t| (t / 3).max(5),
    );
    check("mov.b64 {%r1, %r10}, 0d3FF0000000000001;", |_| 0x3ff0_0000);
    check("setp.gtu.f64 %p1, 0d7FF8000000000000, 0d0000000000000000; selp.b32 %r10, 1, 0, %p1;", |_| 1);
}

#[test]
fn sixteen_bit_floats() {
    // 1.5 + thread in f16, then back.
    let to_half = "cvt.rn.f32.u32 %f0, %r0; cvt.rn.f16.f32 %h1, %f0;";
    let back = "cvt.f32.f16 %f1, %h3; cvt.rzi.u32.f32 %r10, %f1;";
    check(&format!("{to_half} mov.b16 %h2, 0x3e00; add.rn.f16 %h3, %h1, %h2; {back}"), |t| t + 1);
    check(&format!("{to_half} mov.b16 %h2, 0x4200; fma.rn.f16 %h3, %h1, %h2, %h2; {back}"), |t| 3 * t + 3);
    check(
        &format!(
            "{to_half} mov.b32 %r1, {{%h1, %h1}}; mul.f16x2 %r2, %r1, %r1; mov.b32 {{%h4, %h3}}, %r2; {back}"
        ),
        |t| t * t,
    );
    check("cvt.rn.bf16x2.f32 %r10, 0f3F800000, 0f40000000;", |_| 0x3f80_4000);
    check("cvt.rn.f16x2.f32 %r10, 0f3F800000, 0fC0000000;", |_| 0x3c00_c000);
    check(
        "mov.b32 %r1, 0x3c004000; setp.gt.f16x2 %p1|%p2, %r1, %r1; setp.eq.f16x2 %p3|%p4, %r1, %r1; \
           selp.u32 %r10, 1, 0, %p4;",
        |_| 1,
    );
    check("mov.b32 %r1, 0x3f803f80; fma.rn.bf16x2 %r10, %r1, %r1, %r1;", |_| 0x4000_4000);
}

#[test]
fn conversions() {
    check("sub.s32 %r1, %r0, 16; cvt.s64.s32 %d2, %r1; mov.b64 {%r2, %r10}, %d2;", |t| {
        if t < 16 { u32::MAX } else { 0 }
    });
    check("mul.lo.u32 %r1, %r0, 20; cvt.s32.s8 %r10, %r1;", |t| i32::from((t * 20) as i8) as u32);
    check("mul.lo.u32 %r1, %r0, 20; cvt.sat.s8.s32 %r2, %r1; and.b32 %r10, %r2, 0xff;", |t| {
        (t * 20).min(127)
    });
    check("cvt.rn.f32.u32 %f1, %r0; mul.f32 %f2, %f1, 0f3E800000; cvt.rni.s32.f32 %r10, %f2;", |t| {
        (t as f32 / 4.0).round_ties_even() as u32
    });
    check(
        "cvt.rn.f32.u32 %f1, %r0; mul.f32 %f2, %f1, 0f3E800000; cvt.rpi.f32.f32 %f3, %f2; cvt.rzi.u32.f32 %r10, %f3;",
        |t| (t as f32 / 4.0).ceil() as u32,
    );
    check("cvt.rzi.s32.f32 %r10, 0fCF800000;", |_| i32::MIN as u32);
    check("cvt.rzi.u32.f32 %r10, 0f7FC00000;", |_| 0);
    check("cvt.rz.f32.f64 %f1, 0d3FF0000010000001; mov.b32 %r10, %f1;", |_| 0x3f80_0000);
    check("cvt.rp.f32.f64 %f1, 0d3FF0000010000001; mov.b32 %r10, %f1;", |_| 0x3f80_0001);
    check("cvt.rna.tf32.f32 %r10, 0f3F801000;", |_| 0x3f80_2000);
    check("cvt.pack.sat.u8.s32.b32 %r10, 300, -5, %r0;", |t| t << 16 | 0xff00);
    check(
        "cvt.u64.u32 %d2, %r0; cvt.rn.f64.u64 %fd1, %d2; cvt.rmi.s64.f64 %d3, %fd1; cvt.u32.u64 %r10, %d3;",
        |t| t,
    );
}

#[test]
fn packing() {
    check(
        "mov.b64 %d2, {%r0, 5}; mov.b64 {_, %r1}, %d2; mov.b64 {%r2, _}, %d2; mad.lo.u32 %r10, %r1, 100, %r2;",
        |t| 500 + t,
    );
    check(
        "mov.b64 %d2, {%h1, %h2, %h3, %h4}; mov.b16 %h3, 9; mov.b64 %d2, {%h1, %h2, %h3, %h4}; \
           mov.b64 {%r1, %r10}, %d2; and.b32 %r10, %r10, 0xffff;",
        |_| 9,
    );
    check(
        "mov.u64 %d2, 3; mov.b128 %q1, {%d1, %d2}; mov.b128 %q2, %q1; mov.b128 {%d3, %d4}, %q2; \
           add.u64 %d5, %d3, %d4; cvt.u32.u64 %r10, %d5;",
        |t| 4 * t + 3,
    );
}

#[test]
fn shared_and_generic_addresses() {
    let shared = ".shared .align 16 .b8 before[12];\n.shared .align 4 .u32 values[32];";
    let fill = "mov.u32 %r1, values; shl.b32 %r2, %r0, 2; add.u32 %r3, %r1, %r2; mul.lo.u32 %r4, %r0, 3; \
                st.shared.u32 [%r3], %r4; bar.sync 0;";
    check_with(
        shared,
        &format!("{fill} xor.b32 %r5, %r2, 4; add.u32 %r6, %r1, %r5; ld.shared.u32 %r10, [%r6];"),
        |t| 3 * (t ^ 1),
    );
    check_with(
        shared,
        &format!(
            "{fill} cvta.shared.u64 %d2, %d3; mov.u64 %d3, values; cvta.shared.u64 %d2, %d3; \
               add.u64 %d4, %d2, %d1; ld.u32 %r10, [%d4];"
        ),
        |t| 3 * t,
    );
    check_with(
        shared,
        &format!(
            "{fill} mov.u64 %d3, values; cvta.shared.u64 %d2, %d3; isspacep.shared %p1, %d2; \
               isspacep.global %p2, %d2; isspacep.global %p3, %d0; selp.u32 %r5, 1, 0, %p1; selp.u32 %r6, 2, 0, %p2; \
               selp.u32 %r7, 4, 0, %p3; add.u32 %r8, %r5, %r6; add.u32 %r10, %r8, %r7;"
        ),
        |_| 5,
    );
    check_with(shared, &format!("{fill} ld.shared.u32 %r10, [values+8];"), |_| 6);
    check_with(
        shared,
        &format!(
            "{fill} mov.u64 %d3, values; cvta.shared.u64 %d2, %d3; cvta.to.shared.u64 %d4, %d2; \
               ld.shared.u32 %r10, [%d4+12];"
        ),
        |_| 9,
    );
}

#[test]
fn local_memory() {
    check(
        ".local .align 8 .b8 area[64]; mov.u64 %d2, area; cvta.local.u64 %d3, %d2; st.local.u32 [area+4], %r0; \
           st.u32 [%d3+8], 7; ld.u32 %r1, [%d3+4]; ld.local.u32 %r2, [%d2+8]; add.u32 %r10, %r1, %r2;",
        |t| t + 7,
    );
    check(".local .u32 slot; st.local.u32 [slot], %r0; bar.sync 0; ld.local.u32 %r10, [slot];", |t| t);
}

#[test]
fn constant_and_global_variables() {
    let variables = ".const .align 4 .u32 numbers[4] = {10, 20, 30};\n\
        .global .align 8 .u64 addresses[2] = {generic(numbers), numbers+4};\n\
        .global .f32 real = 1.5;\n.global .s8 small[2] = {-1, 0x7f};\n.global .b8 text[] = {65, 66};";
    check_with(variables, "ld.const.u32 %r10, [numbers+4];", |_| 20);
    check_with(variables, "mov.u64 %d2, numbers; ld.const.u32 %r10, [%d2+12];", |_| 0);
    check_with(variables, "ld.global.u64 %d2, [addresses+8]; ld.u32 %r10, [%d2+4];", |_| 30);
    check_with(variables, "ld.global.f32 %f1, [real]; mov.b32 %r10, %f1;", |_| 1.5f32.to_bits());
    check_with(variables, "ld.global.s8 %r10, [small];", |_| u32::MAX);
    check_with(variables, "ld.global.u8 %r10, [text+1];", |_| 66);
}

#[test]
fn vectors_and_narrow_accesses() {
    let area = ".global .align 16 .b8 area[1024];";
    let slot = "mov.u64 %d2, area; mul.wide.u32 %d3, %r0, 16; add.u64 %d4, %d2, %d3;";
    check_with(
        area,
        &format!(
            "{slot} st.global.v4.u32 [%d4], {{%r0, 1, 2, 3}}; ld.global.v2.u32 {{%r1, %r2}}, [%d4]; \
               ld.global.nc.v4.u32 {{_, _, %r3, %r4}}, [%d4]; add.u32 %r5, %r1, %r2; add.u32 %r6, %r3, %r4; \
               add.u32 %r10, %r5, %r6;"
        ),
        |t| t + 6,
    );
    check_with(
        area,
        &format!(
            "{slot} st.global.u32 [%d4], 0x8091a2ff; ld.global.s8 %r1, [%d4]; ld.global.u8 %r2, [%d4+1]; \
               ld.global.s16 %r3, [%d4+2]; add.u32 %r4, %r1, %r2; add.u32 %r10, %r4, %r3;"
        ),
        |_| (-1i32 + 0xa2 + i32::from(0x8091u16 as i16)) as u32,
    );
    check_with(
        area,
        &format!(
            "{slot} st.global.u8 [%d4], %r0; st.global.u8 [%d4+1], 1; ld.global.u16 %h1, [%d4]; \
               cvt.u32.u16 %r10, %h1;"
        ),
        |t| t | 256,
    );
    check_with(
        area,
        &format!(
            "{slot} mov.b128 %q1, {{%d3, %d1}}; st.global.b128 [%d4], %q1; ld.volatile.global.u32 %r10, [%d4+8];"
        ),
        |t| 4 * t,
    );
    check_with(
        area,
        &format!(
            "{slot} st.release.gpu.global.u32 [%d4], %r0; ld.acquire.sys.global.u32 %r1, [%d4]; \
               ld.relaxed.cta.u32 %r2, [%d4]; add.u32 %r10, %r1, %r2;"
        ),
        |t| 2 * t,
    );
    check_with(
        area,
        &format!(
            "{slot} ld.global.L1::evict_last.L2::128B.u32 %r1, [%d4]; createpolicy.fractional.L2::evict_first.b64 %d5, 1.0; \
               ld.global.L2::cache_hint.u32 %r2, [%d4], %d5; prefetch.global.L2 [%d4]; add.u32 %r10, %r1, %r2;"
        ),
        |_| 0,
    );
}

#[test]
fn asynchronous_copies() {
    let areas = ".shared .align 16 .b8 inner[512];\n.global .align 16 .b8 outer[512];";
    let slots = "mov.u64 %d2, outer; mul.wide.u32 %d3, %r0, 16; add.u64 %d4, %d2, %d3; mov.u32 %r1, inner; \
                 cvt.u32.u64 %r2, %d3; add.u32 %r3, %r1, %r2; st.global.v4.u32 [%d4], {%r0, 1, 2, 3};";
    let wait = "cp.async.commit_group; cp.async.wait_group 0; ld.shared.v4.u32 {%r4, %r5, %r6, %r7}, [%r3]; \
                add.u32 %r8, %r4, %r5; mad.lo.u32 %r10, %r7, 1000, %r8;";
    check_with(areas, &format!("{slots} cp.async.cg.shared.global [%r3], [%d4], 16; {wait}"), |t| {
        t + 1 + 3000
    });
    check_with(
        areas,
        &format!("{slots} cp.async.ca.shared.global.L2::128B [%r3], [%d4], 16, 8; {wait}"),
        |t| t + 1,
    );
}

#[test]
fn atomics_in_every_space() {
    let area = ".global .align 8 .b8 outer[64];\n.shared .align 8 .b8 inner[64];";
    for (space, name) in [("global", "outer"), ("shared", "inner")] {
        let zero = format!("mov.u64 %d2, {name}; st.{space}.u64 [%d2], 0; bar.sync 0;");
        let end = format!("bar.sync 0; ld.{space}.u32 %r10, [%d2];");
        check_with(area, &format!("{zero} red.{space}.add.u32 [%d2], %r0; {end}"), |_| 496);
        check_with(area, &format!("{zero} atom.{space}.max.s32 %r1, [%d2], %r0; {end}"), |_| 31);
        check_with(area, &format!("{zero} atom.{space}.or.b32 %r1, [%d2], %r0; {end}"), |_| 31);
        check_with(area, &format!("{zero} atom.{space}.inc.u32 %r1, [%d2], 9; {end}"), |_| 2);
        check_with(area, &format!("{zero} atom.{space}.dec.u32 %r1, [%d2], 9; {end}"), |_| 8);
        check_with(area, &format!("{zero} red.{space}.add.f32 [%d2], 0f3F800000; {end}"), |_| {
            32f32.to_bits()
        });
        check_with(
            area,
            &format!("{zero} red.{space}.add.noftz.f16x2 [%d2], %r2; {end}")
                .replace("bar.sync 0; red", "bar.sync 0; mov.b32 %r2, 0x3c004000; red"),
            |_| 0x5000_5400,
        );
        check_with(
            area,
            &format!(
                "{zero} red.{space}.add.f64 [%d2], 0d3FF0000000000000; bar.sync 0; ld.{space}.u32 %r10, [%d2+4];"
            ),
            |_| (32f64.to_bits() >> 32) as u32,
        );
        check_with(
            area,
            &format!("{zero} atom.acq_rel.gpu.{space}.cas.b32 %r1, [%d2], 0, %r5; {end}")
                .replace("bar.sync 0; atom", "bar.sync 0; add.u32 %r5, %r0, 100; atom"),
            |_| 100,
        );
        check_with(
            area,
            &format!("{zero} atom.{space}.add.u64 %d5, [%d2], 1; cvt.u32.u64 %r10, %d5;"),
            |t| t,
        );
        check_with(area, &format!("{zero} atom.{space}.exch.b32 %r10, [%d2], %r0;"), |t| t.saturating_sub(1));
    }
    let generic = "mov.u64 %d3, inner; cvta.shared.u64 %d2, %d3; st.u32 [%d2], 0; bar.sync 0; \
                   atom.add.u32 %r1, [%d2], 2; bar.sync 0; ld.u32 %r10, [%d2];";
    check_with(area, generic, |_| 64);
}

#[test]
fn warp_operations() {
    check("shfl.sync.down.b32 %r10|%p1, %r0, 4, 31, -1;", |t| if t < 28 { t + 4 } else { t });
    check("shfl.sync.bfly.b32 %r10, %r0, 3, 31, 0xffffffff;", |t| t ^ 3);
    check(
        "shfl.sync.idx.b32 %r1|%p1, %r0, 9, 0x181f, -1; selp.u32 %r2, 100, 0, %p1; add.u32 %r10, %r1, %r2;",
        |t| (t & 0x18 | 1) + 100,
    );
    check("setp.lt.u32 %p1, %r0, 5; vote.sync.ballot.b32 %r10, %p1, -1;", |_| 31);
    check(
        "setp.lt.u32 %p1, %r0, 5; vote.sync.any.pred %p2, %p1, -1; vote.sync.all.pred %p3, !%p1, -1; \
           vote.sync.uni.pred %p4, %p1, -1; selp.u32 %r1, 1, 0, %p2; selp.u32 %r2, 2, 0, %p3; selp.u32 %r3, 4, 0, %p4; \
           add.u32 %r4, %r1, %r2; add.u32 %r10, %r4, %r3;",
        |_| 1,
    );
    check("and.b32 %r1, %r0, 3; match.any.sync.b32 %r10, %r1, -1;", |t| 0x1111_1111 << (t & 3));
    check("match.all.sync.b32 %r1|%p1, 5, -1; selp.u32 %r10, %r1, 0, %p1;", |_| u32::MAX);
    check(
        "redux.sync.add.u32 %r1, %r0, -1; redux.sync.max.s32 %r2, %r0, -1; add.u32 %r10, %r1, %r2;",
        |_| 496 + 31,
    );
    check("elect.sync %r1|%p1, -1; selp.u32 %r10, 7, %r1, %p1;", |t| if t == 0 { 7 } else { 0 });
    check("activemask.b32 %r10;", |_| u32::MAX);
    check("setp.gt.u32 %p1, %r0, 7; mov.u32 %r10, 0; @%p1 activemask.b32 %r10;", |t| {
        if t > 7 { !0xff } else { 0 }
    });
}

#[test]
fn special_registers() {
    check("mov.u32 %r10, %laneid;", |t| t);
    check("mov.u32 %r1, %lanemask_lt; mov.u32 %r2, %lanemask_ge; add.u32 %r10, %r1, %r2;", |_| u32::MAX);
    check("mov.u32 %r10, %lanemask_le;", |t| (2u64 << t).wrapping_sub(1) as u32);
    check(
        "mov.u32 %r1, %ctaid.x; cvt.u64.u32 %d2, %tid.x; cvt.u32.u64 %r2, %d2; add.u32 %r10, %r1, %r2;",
        |t| t,
    );
    check(
        "mov.u32 %r1, %nctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %ntid.z; mad.lo.u32 %r10, %r1, %r2, %r3;",
        |_| 33,
    );
    check(
        "mov.u64 %d2, %clock64; mov.u64 %d3, %clock64; setp.ge.u64 %p1, %d3, %d2; selp.u32 %r10, 1, 0, %p1;",
        |_| 1,
    );
    check("mov.u32 %r10, WARP_SZ;", |_| 32);
    check(
        "mov.u32 %r1, %cluster_nctarank; mov.u32 %r2, %cluster_ctarank; mad.lo.u32 %r10, %r1, 10, %r2;",
        |_| 10,
    );
}

#[test]
fn mbarriers() {
    let shared = ".shared .align 8 .b64 barrier;";
    let body = "setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared::cta.b64 [barrier], 32; bar.sync 0; \
        mbarrier.arrive.shared::cta.b64 %d2, [barrier];\n\
        again: mbarrier.try_wait.shared::cta.b64 %p2, [barrier], %d2; @!%p2 bra again;\n\
        mbarrier.test_wait.parity.shared::cta.b64 %p3, [barrier], 0; selp.u32 %r10, 1, 0, %p3;";
    check_with(shared, body, |_| 1);
}
