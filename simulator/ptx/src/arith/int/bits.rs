//! Bit fields, counts, shifts and permutations.

use super::IntType;

/// What an operand beyond the register's width means (`.clamp`, `.wrap`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Surplus {
    /// It counts as the width.
    Clamp,
    /// Its upper bits are ignored.
    Wrap,
}

/// Result of `bfind` and `fns` when there is no such bit.
const NOT_FOUND: u32 = u32::MAX;

/// The number of bits that are 1.
#[inline]
pub fn popc(a: u64, ty: IntType) -> u32 {
    (a & ty.mask()).count_ones()
}

/// The number of zeros above the topmost 1; the width when there is none.
#[inline]
pub fn clz(a: u64, ty: IntType) -> u32 {
    (a & ty.mask()).leading_zeros() - (64 - ty.bits)
}

/// The position of the topmost bit that differs from the sign, or with `shift_amount` (`.shiftamt`) how far it is
/// from the top; 0xffffffff when there is none.
#[inline]
pub fn bfind(a: u64, ty: IntType, shift_amount: bool) -> u32 {
    let significant = if ty.is_negative(a) { !a } else { a } & ty.mask();
    match significant.checked_ilog2() {
        None => NOT_FOUND,
        Some(position) if shift_amount => ty.bits - 1 - position,
        Some(position) => position,
    }
}

/// The bits in reverse order.
#[inline]
pub fn brev(a: u64, ty: IntType) -> u64 {
    a.reverse_bits() >> (64 - ty.bits)
}

/// 1 when all bits are zero, else 0.
#[inline]
pub fn cnot(a: u64, ty: IntType) -> u64 {
    u64::from(a & ty.mask() == 0)
}

/// Position of the n-th 1 of `mask`, counted from position `base` upwards (`offset` positive) or downwards
/// (negative); `offset` 0 asks for the bit at `base`. 0xffffffff when there is none. A `base` above 31, which PTX
/// leaves undefined, finds nothing.
pub fn fns(mask: u32, base: u32, offset: i32) -> u32 {
    if base > 31 {
        return NOT_FOUND;
    }
    let is_set = |position: &u32| mask >> position & 1 == 1;
    let skipped = offset.unsigned_abs().saturating_sub(1) as usize;
    let found = match offset {
        0 => Some(base).filter(is_set),
        1.. => (base..32).filter(is_set).nth(skipped),
        _ => (0..=base).rev().filter(is_set).nth(skipped),
    };
    found.unwrap_or(NOT_FOUND)
}

/// The field of `len` bits from position `pos`, extended by its sign where the type has one. The low 8 bits of
/// `pos` and `len` count. A field that reaches beyond the top has the operand's sign.
#[inline]
pub fn bfe(a: u64, pos: u32, len: u32, ty: IntType) -> u64 {
    let (pos, len) = (pos & 0xff, len & 0xff);
    if len == 0 {
        return 0;
    }
    // Extended to 128 bits the operand has its sign at all positions above its top, where a field may reach.
    let field = ty.value(a) >> pos.min(127);
    let unused = 128 - len.min(128);
    ty.wrap(if ty.signed { field << unused >> unused } else { ((field as u128) << unused >> unused) as i128 })
}

/// `b` with its `len` bits from position `pos` replaced by the low bits of `a`. The low 8 bits of `pos` and `len`
/// count; what lies beyond the top is lost.
#[inline]
pub fn bfi(a: u64, b: u64, pos: u32, len: u32, ty: IntType) -> u64 {
    let (pos, len) = (pos & 0xff, len & 0xff);
    let field = ones(len).checked_shl(pos).unwrap_or(0);
    let inserted = a.checked_shl(pos).unwrap_or(0);
    ((inserted & field) | (b & !field)) & ty.mask()
}

/// A mask of `width` bits from position `pos`.
#[inline]
pub fn bmsk(pos: u32, width: u32, surplus: Surplus) -> u32 {
    let (pos, width) = match surplus {
        Surplus::Clamp => (pos, width.min(32)),
        Surplus::Wrap => (pos & 31, width & 31),
    };
    ones(width).checked_shl(pos).unwrap_or(0) as u32
}

/// The low `width` bits of `a`, extended to 32 by their sign where the type has one.
#[inline]
pub fn szext(a: u32, width: u32, signed: bool, surplus: Surplus) -> u32 {
    let width = match surplus {
        Surplus::Clamp => width.min(32),
        Surplus::Wrap => width & 31,
    };
    match width {
        0 => 0,
        bits => IntType { bits, signed }.extend(u64::from(a)) as u32,
    }
}

/// The low `count` bits, at most 64.
#[inline]
fn ones(count: u32) -> u64 {
    if count >= 64 { u64::MAX } else { (1 << count) - 1 }
}

/// Mode of `prmt`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PrmtMode {
    /// Four selectors of four bits each.
    Generic,
    /// `.f4e`: four bytes upwards.
    Forward4Extract,
    /// `.b4e`: four bytes downwards, in reverse order.
    Backward4Extract,
    /// `.rc8`: one byte, four times.
    Replicate8,
    /// `.ecl`: as the operand, with the bytes below the selected one replaced by it.
    EdgeClampLeft,
    /// `.ecr`: as the operand, with the bytes above the selected one replaced by it.
    EdgeClampRight,
    /// `.rc16`: one half, twice.
    Replicate16,
}

/// Four bytes out of the eight of `b:a` (`a` has the lower ones), as `c` and the mode select.
#[inline]
pub fn prmt(a: u32, b: u32, c: u32, mode: PrmtMode) -> u32 {
    let source = (u64::from(b) << 32 | u64::from(a)).to_le_bytes();
    let selected: u32 = c & 3;
    let byte = |target: u32| {
        let selector = match mode {
            PrmtMode::Generic => c >> (4 * target) & 15,
            PrmtMode::Forward4Extract => selected + target,
            PrmtMode::Backward4Extract => selected.wrapping_sub(target) & 7,
            PrmtMode::Replicate8 => selected,
            PrmtMode::EdgeClampLeft => selected.max(target),
            PrmtMode::EdgeClampRight => selected.min(target),
            PrmtMode::Replicate16 => (selected & 1) * 2 + (target & 1),
        };
        let value = source[selector as usize & 7];
        // Bit 3 of a generic selector asks for the byte's sign in all of its bits.
        if selector & 8 != 0 { (value as i8 >> 7) as u8 } else { value }
    };
    u32::from_le_bytes([byte(0), byte(1), byte(2), byte(3)])
}

/// The function of three bits whose table is `table`, on each bit: the result for the bits x, y, z of `a`, `b`, `c`
/// is bit 4x + 2y + z of the table.
#[inline]
pub fn lop3(a: u32, b: u32, c: u32, table: u8) -> u32 {
    let mut result = 0;
    for row in 0..8 {
        if table >> row & 1 == 1 {
            let matches = |operand: u32, bit: u8| if row >> bit & 1 == 1 { operand } else { !operand };
            result |= matches(a, 2) & matches(b, 1) & matches(c, 0);
        }
    }
    result
}

/// The upper word of `b:a`, shifted left (`shf.l`).
#[inline]
pub fn shf_left(a: u32, b: u32, count: u32, surplus: Surplus) -> u32 {
    let pair = u64::from(b) << 32 | u64::from(a);
    ((pair << funnel_count(count, surplus)) >> 32) as u32
}

/// The lower word of `b:a`, shifted right (`shf.r`).
#[inline]
pub fn shf_right(a: u32, b: u32, count: u32, surplus: Surplus) -> u32 {
    let pair = u64::from(b) << 32 | u64::from(a);
    (pair >> funnel_count(count, surplus)) as u32
}

#[inline]
fn funnel_count(count: u32, surplus: Surplus) -> u32 {
    match surplus {
        Surplus::Clamp => count.min(32),
        Surplus::Wrap => count & 31,
    }
}

/// `a << count`; a count beyond the width gives 0.
#[inline]
pub fn shl(a: u64, count: u32, ty: IntType) -> u64 {
    a.checked_shl(count).unwrap_or(0) & ty.mask()
}

/// `a >> count`, filled with the sign where the type has one; a count beyond the width leaves nothing but the fill.
#[inline]
pub fn shr(a: u64, count: u32, ty: IntType) -> u64 {
    ty.wrap(ty.value(a) >> count.min(ty.bits))
}
