//! Integer arithmetic, logic and shifts.

use super::lower::int_type;
use super::operand::Arg;
use super::statement::Statement;
use super::{Parser, Result};
use crate::arith::int::{self, IntType, PrmtMode, Surplus};
use crate::compute::{halves2, map2, map3};
use crate::ir::{Op, Register, Source};
use crate::types::Type;

/// Which part of a product an instruction keeps.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Low,
    High,
    Wide,
}

const PARTS: [(&str, Part); 3] = [("lo", Part::Low), ("hi", Part::High), ("wide", Part::Wide)];

const SURPLUS: [(&str, Surplus); 2] = [("clamp", Surplus::Clamp), ("wrap", Surplus::Wrap)];

/// Chooses between three widths, so that each closure is compiled for its own.
macro_rules! by_width {
    ($parser:ident, $s:ident, $ty:ident, |$a:ident, $b:ident| $body:expr) => {
        match $ty.bits() {
            16 => $parser.emit2($s, $ty, |$a, $b| {
                let ($a, $b) = ($a as u16, $b as u16);
                u64::from($body)
            }),
            32 => $parser.emit2($s, $ty, |$a, $b| {
                let ($a, $b) = ($a as u32, $b as u32);
                u64::from($body)
            }),
            64 => $parser.emit2($s, $ty, |$a, $b| $body),
            _ => $s.unknown(),
        }
    };
}

impl Parser<'_, '_> {
    pub(super) fn integer(&mut self, s: &mut Statement<'_>) -> Result {
        match s.name {
            "add" | "sub" | "addc" | "subc" => self.sum(s),
            "mul" | "mad" | "madc" => self.product(s),
            "mul24" | "mad24" => self.product24(s),
            "min" | "max" | "abs" | "neg" | "sad" | "div" | "rem" => self.simple_integer(s),
            "and" | "or" | "xor" | "not" | "cnot" => self.logic(s),
            "shl" | "shr" => self.shift(s),
            _ => self.bits(s),
        }
    }

    fn carry(&mut self) -> u32 {
        match self.body.carry {
            Some(carry) => carry,
            None => {
                let carry = self.new_predicate();
                self.body.carry = Some(carry);
                carry
            }
        }
    }

    /// The sum with carries: `add.cc`, `addc`, and the second half of `mad.cc`.
    fn carried(
        &mut self,
        s: &Statement<'_>,
        with_carry: (bool, bool),
        to: Register,
        ab: [Source; 2],
        bits: u32,
    ) {
        let carry = self.carry();
        let (carry_in, carry_out) = (with_carry.0.then_some(carry), with_carry.1.then_some(carry));
        let subtract = s.name.starts_with("sub");
        let [a, b] = ab;
        self.emit_for(s, Op::Carry { to, a, b, bits, subtract, carry_in, carry_out });
    }

    fn sum(&mut self, s: &mut Statement<'_>) -> Result {
        let (carry_out, saturate, ty) = (s.flag("cc"), s.flag("sat"), s.ty()?);
        let carry_in = s.name.ends_with('c');
        if !ty.is_integer() && !matches!(ty, Type::U16x2 | Type::S16x2) || ty.bits() == 8 {
            return s.unknown();
        }
        if carry_in || carry_out {
            s.finish(3..=3)?;
            let to = self.target(s, 0, ty)?;
            let ab = [self.source(s, 1, ty)?, self.source(s, 2, ty)?];
            self.carried(s, (carry_in, carry_out), to, ab, ty.bits());
            return Ok(());
        }
        match (s.name, ty) {
            ("add", Type::S32) if saturate => self.emit2(s, ty, |a, b| int::add(a, b, IntType::S32, true)),
            ("sub", Type::S32) if saturate => self.emit2(s, ty, |a, b| int::sub(a, b, IntType::S32, true)),
            _ if saturate => s.error("`.sat` is for .s32"),
            ("add", Type::U16x2 | Type::S16x2) => self.emit2(s, ty, halves2(u16::wrapping_add)),
            ("add", _) => by_width!(self, s, ty, |a, b| a.wrapping_add(b)),
            ("sub", _) if ty.is_integer() => by_width!(self, s, ty, |a, b| a.wrapping_sub(b)),
            _ => s.unknown(),
        }
    }

    fn product(&mut self, s: &mut Statement<'_>) -> Result {
        let part = s.require("`.lo`, `.hi` or `.wide`", &PARTS)?;
        let (carry_out, saturate, ty) = (s.flag("cc"), s.flag("sat"), s.ty()?);
        let carry_in = s.name == "madc";
        let kind = int_type(ty);
        let wide = match (part, ty) {
            (Part::Wide, Type::U16) => Type::U32,
            (Part::Wide, Type::S16) => Type::S32,
            (Part::Wide, Type::U32) => Type::U64,
            (Part::Wide, Type::S32) => Type::S64,
            (Part::Low | Part::High, _) if ty.is_integer() && ty.bits() > 8 => ty,
            _ => return s.unknown(),
        };
        if s.name == "mul" {
            return match (part, ty) {
                (Part::Low, _) => by_width!(self, s, ty, |a, b| a.wrapping_mul(b)),
                (Part::Wide, Type::S32) => self.emit2_as(s, [wide, ty, ty], |a, b| {
                    i64::from(a as i32).wrapping_mul(i64::from(b as i32)) as u64
                }),
                (Part::Wide, _) => self.emit2_as(s, [wide, ty, ty], move |a, b| int::mul_wide(a, b, kind)),
                (Part::High, _) => self.emit2(s, ty, move |a, b| int::mul_hi(a, b, kind)),
            };
        }
        if carry_in || carry_out {
            s.finish(4..=4)?;
            let to = self.target(s, 0, ty)?;
            let (a, b) = (self.source(s, 1, ty)?, self.source(s, 2, ty)?);
            let c = self.source(s, 3, ty)?;
            let product = self.new_register(ty);
            let f = match part {
                Part::High => map2(move |a, b| int::mul_hi(a, b, kind)),
                Part::Low => map2(move |a, b| int::mul_lo(a, b, kind)),
                Part::Wide => return s.unknown(),
            };
            self.emit_for(s, Op::Map2 { f, to: product, a, b });
            self.carried(s, (carry_in, carry_out), to, [Source::Register(product), c], ty.bits());
            return Ok(());
        }
        match (part, ty) {
            (Part::High, Type::S32) if saturate => {
                self.emit3(s, ty, |a, b, c| int::mad_hi(a, b, c, IntType::S32, true))
            }
            _ if saturate => s.error("`.sat` is for .hi.s32"),
            (Part::Low, Type::U32 | Type::S32) => self
                .emit3(s, ty, |a, b, c| u64::from((a as u32).wrapping_mul(b as u32).wrapping_add(c as u32))),
            (Part::Low, _) => {
                self.emit3(s, ty, move |a, b, c| a.wrapping_mul(b).wrapping_add(c) & kind.mask())
            }
            (Part::Wide, _) => {
                self.emit3_as(s, [wide, ty, ty, wide], move |a, b, c| int::mad_wide(a, b, c, kind))
            }
            (Part::High, _) => self.emit3(s, ty, move |a, b, c| int::mad_hi(a, b, c, kind, false)),
        }
    }

    fn product24(&mut self, s: &mut Statement<'_>) -> Result {
        let part = s.require("`.lo` or `.hi`", &PARTS[..2])?;
        let (saturate, ty) = (s.flag("sat"), s.ty()?);
        let kind = int_type(ty);
        if !matches!(ty, Type::U32 | Type::S32) {
            return s.unknown();
        }
        match (s.name, part) {
            ("mul24", Part::Low) => self.emit2(s, ty, move |a, b| int::mul24_lo(a, b, kind)),
            ("mul24", _) => self.emit2(s, ty, move |a, b| int::mul24_hi(a, b, kind)),
            (_, Part::Low) => self.emit3(s, ty, move |a, b, c| int::mad24_lo(a, b, c, kind)),
            _ => self.emit3(s, ty, move |a, b, c| int::mad24_hi(a, b, c, kind, saturate)),
        }
    }

    fn simple_integer(&mut self, s: &mut Statement<'_>) -> Result {
        let (relu, ty) = (s.flag("relu"), s.ty()?);
        let kind = int_type(ty);
        let packed = matches!(ty, Type::U16x2 | Type::S16x2);
        if !ty.is_integer() && !packed || ty.bits() == 8 || relu && !matches!(ty, Type::S16x2 | Type::S32) {
            return s.unknown();
        }
        let signed = ty == Type::S16x2;
        match s.name {
            "min" if packed => {
                self.emit2(s, ty, move |a, b| u64::from(int::min_16x2(a as u32, b as u32, signed, relu)))
            }
            "max" if packed => {
                self.emit2(s, ty, move |a, b| u64::from(int::max_16x2(a as u32, b as u32, signed, relu)))
            }
            _ if packed => s.unknown(),
            "min" if relu => self.emit2(s, ty, move |a, b| int::relu(int::min(a, b, kind), kind)),
            "max" if relu => self.emit2(s, ty, move |a, b| int::relu(int::max(a, b, kind), kind)),
            _ if relu => s.unknown(),
            "min" if ty == Type::U32 => self.emit2(s, ty, |a, b| u64::from((a as u32).min(b as u32))),
            "max" if ty == Type::U32 => self.emit2(s, ty, |a, b| u64::from((a as u32).max(b as u32))),
            "min" => self.emit2(s, ty, move |a, b| int::min(a, b, kind)),
            "max" => self.emit2(s, ty, move |a, b| int::max(a, b, kind)),
            "div" if ty == Type::U32 => {
                self.emit2(s, ty, |a, b| u64::from((a as u32).checked_div(b as u32).unwrap_or(u32::MAX)))
            }
            "div" => self.emit2(s, ty, move |a, b| int::div(a, b, kind)),
            "rem" => self.emit2(s, ty, move |a, b| int::rem(a, b, kind)),
            "sad" => {
                let unsigned = if ty.bits() == 16 { Type::U16 } else { ty };
                self.emit3_as(s, [unsigned, ty, ty, unsigned], move |a, b, c| int::sad(a, b, c, kind))
            }
            "abs" if ty.is_signed() => self.emit1(s, ty, move |a| int::abs(a, kind)),
            "neg" if ty.is_signed() => self.emit1(s, ty, move |a| int::neg(a, kind)),
            _ => s.unknown(),
        }
    }

    fn logic(&mut self, s: &mut Statement<'_>) -> Result {
        let ty = s.ty()?;
        if !matches!(ty, Type::B16 | Type::B32 | Type::B64) {
            return s.unknown();
        }
        let kind = int_type(ty);
        match s.name {
            "and" => self.emit2(s, ty, |a, b| a & b),
            "or" => self.emit2(s, ty, |a, b| a | b),
            "xor" => self.emit2(s, ty, |a, b| a ^ b),
            "not" => self.emit1(s, ty, |a| !a),
            _ => self.emit1(s, ty, move |a| int::cnot(a, kind)),
        }
    }

    fn shift(&mut self, s: &mut Statement<'_>) -> Result {
        let ty = s.ty()?;
        let kind = int_type(ty);
        if !matches!(ty.bits(), 16 | 32 | 64) || s.name == "shl" && !ty.is_untyped() || ty.is_float() {
            return s.unknown();
        }
        let types = [ty, ty, Type::U32];
        match (s.name, ty.bits()) {
            ("shl", 32) => {
                self.emit2_as(s, types, |a, b| u64::from((a as u32).checked_shl(b as u32).unwrap_or(0)))
            }
            ("shl", 64) => self.emit2_as(s, types, |a, b| a.checked_shl(b as u32).unwrap_or(0)),
            ("shl", _) => self.emit2_as(s, types, move |a, b| int::shl(a, b as u32, kind)),
            ("shr", 32) if ty.is_signed() => {
                self.emit2_as(s, types, |a, b| u64::from((a as i32 >> (b as u32).min(31)) as u32))
            }
            ("shr", 32) => {
                self.emit2_as(s, types, |a, b| u64::from((a as u32).checked_shr(b as u32).unwrap_or(0)))
            }
            _ => self.emit2_as(s, types, move |a, b| int::shr(a, b as u32, kind)),
        }
    }

    fn bits(&mut self, s: &mut Statement<'_>) -> Result {
        match s.name {
            "popc" | "clz" | "bfind" | "brev" => self.count_bits(s),
            "bfe" => {
                let ty = s.ty()?;
                let kind = int_type(ty);
                if !ty.is_integer() || ty.bits() < 32 {
                    return s.unknown();
                }
                let types = [ty, ty, Type::U32, Type::U32];
                self.emit3_as(s, types, move |a, b, c| int::bfe(a, b as u32, c as u32, kind))
            }
            "bfi" => self.insert_field(s),
            "fns" => {
                let ty = s.ty()?;
                self.emit3(s, ty, |a, b, c| u64::from(int::fns(a as u32, b as u32, c as i32)))
            }
            "bmsk" => {
                let surplus = s.require("`.clamp` or `.wrap`", &SURPLUS)?;
                let ty = s.ty()?;
                self.emit2(s, ty, move |a, b| u64::from(int::bmsk(a as u32, b as u32, surplus)))
            }
            "szext" => {
                let surplus = s.require("`.clamp` or `.wrap`", &SURPLUS)?;
                let ty = s.ty()?;
                let signed = ty.is_signed();
                let types = [ty, ty, Type::U32];
                self.emit2_as(s, types, move |a, b| {
                    u64::from(int::szext(a as u32, b as u32, signed, surplus))
                })
            }
            "shf" => self.funnel_shift(s),
            "prmt" => self.permute(s),
            "lop3" => self.three_input_logic(s),
            _ => self.dot_product(s),
        }
    }

    fn count_bits(&mut self, s: &mut Statement<'_>) -> Result {
        let (shift_amount, ty) = (s.flag("shiftamt"), s.ty()?);
        let kind = int_type(ty);
        let result = if s.name == "brev" { ty } else { Type::U32 };
        let fits = if s.name == "bfind" { ty.is_integer() } else { ty.is_untyped() && !shift_amount };
        if !matches!(ty.bits(), 32 | 64) || !fits {
            return s.unknown();
        }
        s.finish(2..=2)?;
        let to = self.target(s, 0, result)?;
        let a = self.source(s, 1, ty)?;
        let f: Box<dyn Fn(u64) -> u64 + Send + Sync> = match s.name {
            "popc" => Box::new(move |a| u64::from(int::popc(a, kind))),
            "clz" => Box::new(move |a| u64::from(int::clz(a, kind))),
            "brev" => Box::new(move |a| int::brev(a, kind)),
            _ => Box::new(move |a| u64::from(int::bfind(a, kind, shift_amount))),
        };
        self.emit_for(s, Op::Map1 { f: crate::compute::map1(f), to, a });
        Ok(())
    }

    fn insert_field(&mut self, s: &mut Statement<'_>) -> Result {
        let ty = s.ty()?;
        let kind = int_type(ty);
        if !matches!(ty, Type::B32 | Type::B64) {
            return s.unknown();
        }
        s.finish(5..=5)?;
        let to = self.target(s, 0, ty)?;
        let (a, b) = (self.source(s, 1, ty)?, self.source(s, 2, ty)?);
        let (position, length) = (self.source(s, 3, Type::U32)?, self.source(s, 4, Type::U32)?);
        // Position and length share a register: an operation has three operands.
        let field = self.new_register(Type::B64);
        let join = map2(|position, length| position & 0xffff_ffff | length << 32);
        self.emit_for(s, Op::Map2 { f: join, to: field, a: position, b: length });
        let f = map3(move |a, b, field| int::bfi(a, b, field as u32, (field >> 32) as u32, kind));
        self.emit_for(s, Op::Map3 { f, to, a, b, c: Source::Register(field) });
        Ok(())
    }

    fn funnel_shift(&mut self, s: &mut Statement<'_>) -> Result {
        let left = s.require("`.l` or `.r`", &[("l", true), ("r", false)])?;
        let surplus = s.require("`.clamp` or `.wrap`", &SURPLUS)?;
        if s.ty()? != Type::B32 {
            return s.unknown();
        }
        let shift = if left { int::shf_left } else { int::shf_right };
        let types = [Type::B32, Type::B32, Type::B32, Type::U32];
        self.emit3_as(s, types, move |a, b, c| u64::from(shift(a as u32, b as u32, c as u32, surplus)))
    }

    fn permute(&mut self, s: &mut Statement<'_>) -> Result {
        if s.ty()? != Type::B32 {
            return s.unknown();
        }
        let modes = [
            ("f4e", PrmtMode::Forward4Extract),
            ("b4e", PrmtMode::Backward4Extract),
            ("rc8", PrmtMode::Replicate8),
            ("ecl", PrmtMode::EdgeClampLeft),
            ("ecr", PrmtMode::EdgeClampRight),
            ("rc16", PrmtMode::Replicate16),
        ];
        let mode = s.choose(&modes).unwrap_or(PrmtMode::Generic);
        self.emit3(s, Type::B32, move |a, b, c| u64::from(int::prmt(a as u32, b as u32, c as u32, mode)))
    }

    fn three_input_logic(&mut self, s: &mut Statement<'_>) -> Result {
        if s.ty()? != Type::B32 {
            return s.unknown();
        }
        let Some(Arg::Integer(table @ 0..=255)) = s.args.pop() else {
            return s.error("the last operand is a constant from 0 to 255");
        };
        let table = table as u8;
        self.emit3(s, Type::B32, move |a, b, c| u64::from(int::lop3(a as u32, b as u32, c as u32, table)))
    }

    fn dot_product(&mut self, s: &mut Statement<'_>) -> Result {
        let part = if s.name == "dp2a" { Some(s.require("`.lo` or `.hi`", &PARTS[..2])?) } else { None };
        let (a_type, b_type) = (s.ty()?, s.ty()?);
        if a_type.bits() != 32 || b_type.bits() != 32 || !a_type.is_integer() || !b_type.is_integer() {
            return s.unknown();
        }
        let (a_signed, b_signed) = (a_type.is_signed(), b_type.is_signed());
        let sum = if a_signed || b_signed { Type::S32 } else { Type::U32 };
        let types = [sum, Type::B32, Type::B32, sum];
        match part {
            None => self.emit3_as(s, types, move |a, b, c| {
                u64::from(int::dp4a(a as u32, b as u32, c as u32, a_signed, b_signed))
            }),
            Some(part) => self.emit3_as(s, types, move |a, b, c| {
                u64::from(int::dp2a(a as u32, b as u32, c as u32, a_signed, b_signed, part == Part::High))
            }),
        }
    }
}
