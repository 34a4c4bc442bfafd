//! Conversions: `cvt`.

use super::float::ROUNDINGS;
use super::lower::int_type;
use super::operand::Arg;
use super::statement::Statement;
use super::{Parser, Result};
use crate::arith::convert::{self, ConvertMode};
use crate::arith::{Format, Rounding, int};
use crate::compute::{map1, map2, map3};
use crate::ir::{Map1, Op, Source};
use crate::types::Type;

/// Rounding to an integral number, of a conversion.
const INTEGER_ROUNDINGS: [(&str, Rounding); 4] =
    [("rni", Rounding::Nearest), ("rzi", Rounding::Zero), ("rmi", Rounding::Down), ("rpi", Rounding::Up)];

pub(super) fn float_format(ty: Type) -> Option<Format> {
    Some(match ty {
        Type::F16 | Type::F16x2 => Format::F16,
        Type::Bf16 | Type::Bf16x2 => Format::BF16,
        Type::F32 => Format::F32,
        Type::F64 => Format::F64,
        Type::Tf32 => Format::TF32,
        Type::E4m3x2 => Format::E4M3,
        Type::E5m2x2 => Format::E5M2,
        _ => return None,
    })
}

impl Parser<'_, '_> {
    pub(super) fn convert(&mut self, s: &mut Statement<'_>) -> Result {
        let integral = s.choose(&INTEGER_ROUNDINGS);
        let rounding = match s.flag("rna") {
            true => Some(Rounding::NearestAway),
            false => s.choose(&ROUNDINGS),
        };
        let mode = ConvertMode {
            rounding: rounding.or(integral).unwrap_or(Rounding::Nearest),
            ftz: s.flag("ftz"),
            sat: s.flag("sat"),
            relu: s.flag("relu"),
            satfinite: s.flag("satfinite"),
        };
        let (to, from) = (s.ty()?, s.ty()?);
        if matches!(to, Type::F16x2 | Type::Bf16x2 | Type::E4m3x2 | Type::E5m2x2) {
            return self.convert_pair(s, to, from, mode);
        }
        s.finish(2..=2)?;
        if mode.ftz && to != Type::F32 && from != Type::F32 {
            return s.error("`.ftz` is for f32");
        }
        let f = match (float_format(to), float_format(from)) {
            (None, None) if to.is_integer() && from.is_integer() => integer_to_integer(to, from, mode.sat),
            (None, Some(_)) if to.is_integer() && integral.is_some() => float_to_integer(to, from, mode),
            (Some(format), None) if from.is_integer() && rounding.is_some() => {
                integer_to_float(to, format, from, mode)
            }
            (Some(format), Some(_)) if to == from && integral.is_some() => {
                map1(move |a| convert::round_to_integral(a, format, mode))
            }
            (Some(_), Some(_)) if integral.is_none() => {
                let exact = from == to || from.bits() < to.bits();
                if exact == rounding.is_some() {
                    return s.error(if exact { "is exact and has no rounding" } else { "needs a rounding" });
                }
                float_to_float(to, from, mode)
            }
            _ => return s.error("needs another rounding"),
        };
        let register = self.wide_target(s, 0, to)?;
        let a = match s.args[1] {
            Arg::Special(special) => {
                let to = self.new_register(Type::B64);
                self.emit(Op::ReadSpecial { to, special }, None, s.line);
                Source::Register(to)
            }
            _ => self.wide_source(s, 1, from)?,
        };
        self.emit_for(s, Op::Map1 { f, to: register, a });
        Ok(())
    }

    /// Two numbers into a pair: from two f32, or from a pair of another format.
    fn convert_pair(&mut self, s: &mut Statement<'_>, to: Type, from: Type, mode: ConvertMode) -> Result {
        let (Some(to_format), Some(from_format)) = (float_format(to), float_format(from)) else {
            return s.unknown();
        };
        if matches!(to, Type::E4m3x2 | Type::E5m2x2) && !mode.satfinite {
            return s.error("needs `.satfinite`");
        }
        let element = to.bits() / 2;
        let one = move |a: u64| convert::float_to_float(a, from_format, to_format, mode);
        if from == Type::F32 {
            s.finish(3..=3)?;
            let register = self.target(s, 0, to)?;
            let (a, b) = (self.source(s, 1, from)?, self.source(s, 2, from)?);
            // The first operand goes to the upper half.
            let f = map2(move |a, b| one(a) << element | one(b));
            self.emit_for(s, Op::Map2 { f, to: register, a, b });
            return Ok(());
        }
        if !matches!(from, Type::F16x2 | Type::Bf16x2 | Type::E4m3x2 | Type::E5m2x2)
            || from.bits() == to.bits()
        {
            return s.unknown();
        }
        let from_element = from.bits() / 2;
        self.emit1_as(s, to, from, move |a| {
            one(a >> from_element & ((1 << from_element) - 1)) << element | one(a & ((1 << from_element) - 1))
        })
    }

    fn emit1_as(
        &mut self,
        s: &Statement<'_>,
        to: Type,
        from: Type,
        f: impl Fn(u64) -> u64 + Send + Sync + 'static,
    ) -> Result {
        s.finish(2..=2)?;
        let register = self.target(s, 0, to)?;
        let a = self.source(s, 1, from)?;
        self.emit_for(s, Op::Map1 { f: map1(f), to: register, a });
        Ok(())
    }

    /// `cvt.pack.sat.u8.s32.b32 d, a, b, c`
    pub(super) fn convert_pack(&mut self, s: &mut Statement<'_>) -> Result {
        if !s.flag("sat") {
            return s.error("needs `.sat`");
        }
        let (to, from) = (s.ty()?, s.ty()?);
        let rest = s.maybe_ty();
        let operands = if rest.is_some() { 4 } else { 3 };
        s.finish(operands..=operands)?;
        if from != Type::S32 || !to.is_integer() || to.bits() > 16 || (to.bits() == 16) == rest.is_some() {
            return s.unknown();
        }
        let kind = int_type(to);
        let register = self.target(s, 0, Type::B32)?;
        let (a, b) = (self.source(s, 1, from)?, self.source(s, 2, from)?);
        let c = if rest.is_some() { self.source(s, 3, Type::B32)? } else { self.constant(0) };
        let f = map3(move |a, b, c| u64::from(int::cvt_pack_sat(a as u32, b as u32, c as u32, kind)));
        self.emit_for(s, Op::Map3 { f, to: register, a, b, c });
        Ok(())
    }
}

fn integer_to_integer(to: Type, from: Type, sat: bool) -> Map1 {
    let (to, from) = (int_type(to), int_type(from));
    if sat {
        return map1(move |a| to.extend(convert::int_to_int(a, from, to, true)));
    }
    map1(move |a| to.extend(from.extend(a)))
}

fn float_to_integer(to: Type, from: Type, mode: ConvertMode) -> Map1 {
    match (to, from, mode.rounding) {
        // The host's conversion saturates and makes 0 of NaN, as PTX does.
        (Type::S32, Type::F32, Rounding::Zero) => {
            map1(|a| u64::from((f32::from_bits(a as u32) as i32) as u32))
        }
        (Type::U32, Type::F32, Rounding::Zero) => map1(|a| u64::from(f32::from_bits(a as u32) as u32)),
        _ => {
            let format = float_format(from).expect("the caller has seen a format");
            let kind = int_type(to);
            map1(move |a| kind.extend(convert::float_to_int(a, format, kind, mode.rounding, mode.ftz)))
        }
    }
}

fn integer_to_float(to: Type, format: Format, from: Type, mode: ConvertMode) -> Map1 {
    let kind = int_type(from);
    match (to, from) {
        _ if mode != ConvertMode::default() => map1(move |a| convert::int_to_float(a, kind, format, mode)),
        (Type::F32, Type::S32) => map1(|a| u64::from((a as i32 as f32).to_bits())),
        (Type::F32, Type::U32) => map1(|a| u64::from((a as u32 as f32).to_bits())),
        (Type::F64, Type::S32) => map1(|a| f64::from(a as i32).to_bits()),
        (Type::F64, Type::U32) => map1(|a| f64::from(a as u32).to_bits()),
        (Type::F64, Type::S64) => map1(|a| (a as i64 as f64).to_bits()),
        (Type::F64, Type::U64) => map1(|a| (a as f64).to_bits()),
        _ => map1(move |a| convert::int_to_float(a, kind, format, mode)),
    }
}

fn float_to_float(to: Type, from: Type, mode: ConvertMode) -> Map1 {
    let (Some(target), Some(source)) = (float_format(to), float_format(from)) else {
        unreachable!("the caller has seen two formats");
    };
    let general = move |a| convert::float_to_float(a, source, target, mode);
    if mode != ConvertMode::default() {
        return map1(general);
    }
    match (to, from) {
        (Type::F64, Type::F32) => map1(move |a| {
            let value = f32::from_bits(a as u32);
            if value.is_nan() { general(a) } else { f64::from(value).to_bits() }
        }),
        (Type::F32, Type::F64) => map1(move |a| {
            let value = f64::from_bits(a);
            if value.is_nan() { general(a) } else { u64::from((value as f32).to_bits()) }
        }),
        (Type::F32, Type::Bf16) => map1(|a| (a & 0xffff) << 16),
        _ => map1(general),
    }
}
