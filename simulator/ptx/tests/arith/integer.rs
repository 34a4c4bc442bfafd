//! Integers, against 128-bit arithmetic and the bit loops by which the PTX ISA defines them.

use proptest::prelude::*;
use simcuda_ptx::arith::Relation;
use simcuda_ptx::arith::int::{self, IntType, PrmtMode, Surplus};

use crate::config;

const TYPES: [IntType; 6] =
    [IntType::U16, IntType::U32, IntType::U64, IntType::S16, IntType::S32, IntType::S64];

fn operands() -> impl Strategy<Value = u64> + Clone {
    let corners = prop_oneof![Just(0), Just(1), Just(u64::MAX), Just(1 << 63), Just(1 << 31), Just(1 << 15)];
    prop_oneof![3 => any::<u64>(), 2 => 0u64..40, 2 => corners, 1 => any::<i8>().prop_map(|small| small as u64)]
}

fn words() -> impl Strategy<Value = u32> + Clone {
    operands().prop_map(|bits| bits as u32)
}

/// Low bits of a number, for results.
fn low(value: i128, ty: IntType) -> u64 {
    (value & ((1 << ty.bits) - 1)) as u64
}

fn clamp(value: i128, ty: IntType) -> u64 {
    let (min, max) =
        if ty.signed { (-(1 << (ty.bits - 1)), (1 << (ty.bits - 1)) - 1) } else { (0, (1 << ty.bits) - 1) };
    low(value.max(min).min(max), ty)
}

/// The number that the low bits stand for, by the host's casts.
fn number(bits: u64, ty: IntType) -> i128 {
    match (ty.bits, ty.signed) {
        (16, false) => i128::from(bits as u16),
        (16, true) => i128::from(bits as i16),
        (32, false) => i128::from(bits as u32),
        (32, true) => i128::from(bits as i32),
        (64, false) => i128::from(bits),
        _ => i128::from(bits as i64),
    }
}

proptest! {
    #![proptest_config(config(8_000))]

    #[test]
    fn arithmetic(a in operands(), b in operands(), c in operands(), flag: bool) {
        for ty in TYPES {
            let (x, y, z) = (number(a, ty), number(b, ty), number(c, ty));
            prop_assert_eq!(int::add(a, b, ty, false), low(x + y, ty));
            prop_assert_eq!(int::sub(a, b, ty, false), low(x - y, ty));
            prop_assert_eq!(int::add(a, b, ty, true), clamp(x + y, ty));
            prop_assert_eq!(int::sub(a, b, ty, true), clamp(x - y, ty));
            prop_assert_eq!(int::neg(a, ty), low(-x, ty));
            prop_assert_eq!(int::abs(a, ty), low(x.abs(), ty));
            prop_assert_eq!(int::sad(a, b, c, ty), low(z + (x - y).abs(), ty));
            prop_assert_eq!(int::min(a, b, ty), low(x.min(y), ty));
            prop_assert_eq!(int::max(a, b, ty), low(x.max(y), ty));
            prop_assert_eq!(int::relu(a, ty), low(x.max(0), ty));
            prop_assert_eq!(int::compare(Relation::Lt, a, b, ty), x < y);
            prop_assert_eq!(int::compare(Relation::Ge, a, b, ty), x >= y);
            prop_assert_eq!(int::compare(Relation::Ne, a, b, ty), x != y);
            let zero_divisor = low(-1, ty);
            prop_assert_eq!(int::div(a, b, ty), x.checked_div(y).map_or(zero_divisor, |q| low(q, ty)));
            prop_assert_eq!(int::rem(a, b, ty), x.checked_rem(y).map_or(zero_divisor, |r| low(r, ty)));
            let unsigned = IntType { signed: false, ..ty };
            let (x, y, carry) = (number(a, unsigned), number(b, unsigned), i128::from(flag));
            let (sum, carry_out) = (low(x + y + carry, ty), x + y + carry >= 1 << ty.bits);
            prop_assert_eq!(int::add_carry(a, b, flag, ty), (sum, carry_out));
            prop_assert_eq!(int::sub_borrow(a, b, flag, ty), (low(x - y - carry, ty), x < y + carry));
        }
    }

    #[test]
    fn products(a in operands(), b in operands(), c in operands(), sat: bool) {
        for ty in TYPES {
            let (x, y, z) = (number(a, ty), number(b, ty), number(c, ty));
            // The product of two u64 fits u128 only; halves by the schoolbook.
            let high = if ty == IntType::U64 {
                low(((u128::from(a) * u128::from(b)) >> 64) as i128, ty)
            } else {
                low((x * y) >> ty.bits, ty)
            };
            prop_assert_eq!(int::mul_hi(a, b, ty), high);
            prop_assert_eq!(int::mul_lo(a, b, ty), a.wrapping_mul(b) & ty.mask());
            prop_assert_eq!(int::mad_lo(a, b, c, ty), a.wrapping_mul(b).wrapping_add(c) & ty.mask());
            let sum = number(high, ty) + z;
            prop_assert_eq!(int::mad_hi(a, b, c, ty, sat), if sat { clamp(sum, ty) } else { low(sum, ty) });
            if ty.bits < 64 {
                let wide = IntType { bits: 2 * ty.bits, ..ty };
                prop_assert_eq!(int::mul_wide(a, b, ty), low(x * y, wide));
                prop_assert_eq!(int::mad_wide(a, b, c, ty), low(x * y + number(c, wide), wide));
            }
        }
        for ty in [IntType::U32, IntType::S32] {
            let operand = |bits: u64| match ty.signed {
                true => i64::from((bits as u32) << 8) << 32 >> 40,
                false => (bits & 0x00ff_ffff) as i64,
            };
            let (product, z) = (operand(a) * operand(b), number(c, ty));
            prop_assert_eq!(int::mul24_lo(a, b, ty), product as u64 & ty.mask());
            prop_assert_eq!(int::mul24_hi(a, b, ty), (product >> 16) as u64 & ty.mask());
            prop_assert_eq!(int::mad24_lo(a, b, c, ty), low(i128::from(product) + z, ty));
            let high = number((product >> 16) as u64, ty) + z;
            prop_assert_eq!(int::mad24_hi(a, b, c, ty, sat), if sat { clamp(high, ty) } else { low(high, ty) });
        }
    }

    #[test]
    fn counts_and_shifts(a in operands(), count in prop_oneof![0u32..70, any::<u32>()]) {
        for ty in TYPES {
            let bit = |position: u32| a >> position & 1 == 1;
            let ones = (0..ty.bits).filter(|position| bit(*position)).count() as u32;
            prop_assert_eq!(int::popc(a, ty), ones);
            let leading = (0..ty.bits).rev().take_while(|position| !bit(*position)).count() as u32;
            prop_assert_eq!(int::clz(a, ty), leading);
            let fill = ty.signed && bit(ty.bits - 1);
            let found = (0..ty.bits).rev().find(|position| bit(*position) != fill);
            prop_assert_eq!(int::bfind(a, ty, false), found.unwrap_or(u32::MAX));
            prop_assert_eq!(int::bfind(a, ty, true), found.map_or(u32::MAX, |position| ty.bits - 1 - position));
            let reversed = (0..ty.bits).fold(0, |sum, position| sum << 1 | u64::from(bit(position)));
            prop_assert_eq!(int::brev(a, ty), reversed);
            prop_assert_eq!(int::cnot(a, ty), u64::from(ones == 0));
            let clamped = count.min(ty.bits);
            prop_assert_eq!(int::shl(a, count, ty), low(number(a, IntType { signed: false, ..ty }) << clamped, ty));
            prop_assert_eq!(int::shr(a, count, ty), low(number(a, ty) >> clamped, ty));
        }
    }

    #[test]
    fn fields(a in operands(), b in operands(), pos in prop_oneof![0u32..70, any::<u32>()], len in prop_oneof![0u32..70, any::<u32>()]) {
        let (position, length) = (pos & 0xff, len & 0xff);
        for ty in [IntType::U32, IntType::U64, IntType::S32, IntType::S64] {
            let bit = |value: u64, index: u32| value >> index & 1;
            let sign = match ty.signed && length != 0 {
                true => bit(a, (position + length - 1).min(ty.bits - 1)),
                false => 0,
            };
            let (mut extracted, mut inserted) = (0, b & ty.mask());
            for index in 0..ty.bits {
                let inside = index < length && position + index < ty.bits;
                extracted |= if inside { bit(a, position + index) } else { sign } << index;
                if inside {
                    inserted = inserted & !(1 << (position + index)) | bit(a, index) << (position + index);
                }
            }
            prop_assert_eq!(int::bfe(a, pos, len, ty), extracted);
            prop_assert_eq!(int::bfi(a, b, pos, len, ty), inserted);
        }
    }

    #[test]
    fn masks_and_extensions(a in words(), b in prop_oneof![0u32..40, any::<u32>()], c in prop_oneof![0u32..40, any::<u32>()]) {
        let wrapped: u32 = (0..32).filter(|i| (b & 31..(b & 31) + (c & 31)).contains(i)).map(|i| 1 << i).sum();
        prop_assert_eq!(int::bmsk(b, c, Surplus::Wrap), wrapped);
        let clamped: u32 =
            (0..32).filter(|i| (u64::from(b)..u64::from(b) + u64::from(c)).contains(i)).map(|i| 1u32 << i).sum();
        prop_assert_eq!(int::bmsk(b, c, Surplus::Clamp), clamped);
        for (surplus, width) in [(Surplus::Clamp, b.min(32)), (Surplus::Wrap, b & 31)] {
            let low = if width == 32 { a } else { a & ((1 << width) - 1) };
            let negative = width > 0 && a >> (width - 1) & 1 == 1;
            let extended = if negative && width < 32 { low | u32::MAX << width } else { low };
            prop_assert_eq!(int::szext(a, b, false, surplus), low);
            prop_assert_eq!(int::szext(a, b, true, surplus), extended);
        }
        for (surplus, count) in [(Surplus::Clamp, c.min(32)), (Surplus::Wrap, c & 31)] {
            let pair = u128::from(b) << 32 | u128::from(a);
            prop_assert_eq!(int::shf_left(a, b, c, surplus), (pair << count >> 32) as u32);
            prop_assert_eq!(int::shf_right(a, b, c, surplus), (pair >> count) as u32);
        }
    }

    #[test]
    fn logic_tables(a in words(), b in words(), c in words(), table: u8) {
        let expected: u32 = (0..32)
            .map(|bit| {
                let row = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | c >> bit & 1;
                (u32::from(table) >> row & 1) << bit
            })
            .sum();
        prop_assert_eq!(int::lop3(a, b, c, table), expected);
        prop_assert_eq!(int::lop3(a, b, c, 0xF0 & 0xCC | 0xAA), a & b | c);
    }

    #[test]
    fn nth_set_bit(mask in words(), base in 0u32..32, offset in -34i32..34) {
        let mut result = u32::MAX;
        if offset == 0 {
            if mask >> base & 1 == 1 {
                result = base;
            }
        } else {
            let (mut position, mut count) = (base as i32, offset.abs() - 1);
            while (0..32).contains(&position) {
                if mask >> position & 1 == 1 {
                    if count == 0 {
                        result = position as u32;
                        break;
                    }
                    count -= 1;
                }
                position += offset.signum();
            }
        }
        prop_assert_eq!(int::fns(mask, base, offset), result);
    }

    #[test]
    fn packed(a in words(), b in words(), c in words(), flag: bool) {
        let byte = |word: u32, index: usize, signed: bool| {
            let byte = word.to_le_bytes()[index];
            if signed { i64::from(byte as i8) } else { i64::from(byte) }
        };
        let half = |word: u32, index: u32, signed: bool| {
            let half = (word >> (16 * index)) as u16;
            if signed { i64::from(half as i16) } else { i64::from(half) }
        };
        for (x, y) in [(false, false), (false, true), (true, false), (true, true)] {
            let dot: i64 = (0..4).map(|index| byte(a, index, x) * byte(b, index, y)).sum();
            prop_assert_eq!(int::dp4a(a, b, c, x, y), (i64::from(c) + dot) as u32);
            let first = if flag { 2 } else { 0 };
            let dot: i64 = (0..2).map(|index| half(a, index, x) * byte(b, first + index as usize, y)).sum();
            prop_assert_eq!(int::dp2a(a, b, c, x, y, flag), (i64::from(c) + dot) as u32);
        }
        let pair = |function: &dyn Fn(i64, i64) -> i64, signed| {
            (0..2).map(|i| (function(half(a, i, signed), half(b, i, signed)) as u32 & 0xffff) << (16 * i)).sum::<u32>()
        };
        prop_assert_eq!(int::add_16x2(a, b), pair(&|x, y| x + y, false));
        for signed in [false, true] {
            let floor = if flag { 0 } else { i64::MIN };
            prop_assert_eq!(int::min_16x2(a, b, signed, flag), pair(&|x, y| x.min(y).max(floor), signed));
            prop_assert_eq!(int::max_16x2(a, b, signed, flag), pair(&|x, y| x.max(y).max(floor), signed));
        }
        let eight = |word: u32| i64::from(word as i32).clamp(-128, 127) as u32 & 0xff;
        let packed = eight(a) << 8 | eight(b) | c << 16;
        prop_assert_eq!(int::cvt_pack_sat(a, b, c, IntType::S8), packed);
        let sixteen = |word: u32| i64::from(word as i32).clamp(0, 0xffff) as u32;
        prop_assert_eq!(int::cvt_pack_sat(a, b, c, IntType::U16), sixteen(a) << 16 | sixteen(b));
    }

    #[test]
    fn generic_permutation(a in words(), b in words(), c in words()) {
        let source: Vec<u8> = a.to_le_bytes().into_iter().chain(b.to_le_bytes()).collect();
        let result = int::prmt(a, b, c, PrmtMode::Generic).to_le_bytes();
        for (target, byte) in result.into_iter().enumerate() {
            let selector = (c >> (4 * target) & 15) as usize;
            let selected = source[selector & 7];
            let sign = if selected >= 0x80 { 0xff } else { 0 };
            prop_assert_eq!(byte, if selector >= 8 { sign } else { selected });
        }
    }
}

/// PTX ISA, table of `prmt` modes: sources of the bytes from 3 down to 0, for each selector.
#[test]
fn permutation_modes() {
    let table: [(PrmtMode, [u32; 4]); 6] = [
        (PrmtMode::Forward4Extract, [0x3210, 0x4321, 0x5432, 0x6543]),
        (PrmtMode::Backward4Extract, [0x5670, 0x6701, 0x7012, 0x0123]),
        (PrmtMode::Replicate8, [0x0000, 0x1111, 0x2222, 0x3333]),
        (PrmtMode::EdgeClampLeft, [0x3210, 0x3211, 0x3222, 0x3333]),
        (PrmtMode::EdgeClampRight, [0x0000, 0x1110, 0x2210, 0x3210]),
        (PrmtMode::Replicate16, [0x1010, 0x3232, 0x1010, 0x3232]),
    ];
    let (a, b) = (0x8340_e21f, 0x7799_b5d4);
    for (mode, rows) in table {
        for (selector, row) in rows.into_iter().enumerate() {
            // Only the two lowest bits of the selector count.
            let result = int::prmt(a, b, selector as u32 | 0xffff_fffc, mode);
            assert_eq!(result, int::prmt(a, b, row, PrmtMode::Generic), "{mode:?} {selector}");
        }
    }
}

#[test]
fn corners() {
    assert_eq!(int::div(1 << 31, u64::MAX, IntType::S32), 1 << 31);
    assert_eq!(int::rem(1 << 63, u64::MAX, IntType::S64), 0);
    assert_eq!(int::div(7, 0, IntType::U16), 0xffff);
    assert_eq!(int::rem(7, 0, IntType::S64), u64::MAX);
    assert_eq!(int::fns(u32::MAX, 32, 1), u32::MAX);
    assert_eq!(int::fns(1, 31, i32::MIN), u32::MAX);
    assert_eq!(IntType::S16.extend(0x8000), 0xffff_ffff_ffff_8000);
    assert_eq!(IntType::U16.extend(0xffff_8000), 0x8000);
}
