//! Arithmetic on f32 and f64.

use super::statement::Statement;
use super::{Parser, Result};
use crate::arith::{self, FloatMode, MinMaxMode, Property, Rounding};
use crate::ir::Op;
use crate::types::Type;

pub(super) const ROUNDINGS: [(&str, Rounding); 4] =
    [("rn", Rounding::Nearest), ("rz", Rounding::Zero), ("rm", Rounding::Down), ("rp", Rounding::Up)];

const PROPERTIES: [(&str, Property); 6] = [
    ("finite", Property::Finite),
    ("infinite", Property::Infinite),
    ("number", Property::Number),
    ("notanumber", Property::NotANumber),
    ("normal", Property::Normal),
    ("subnormal", Property::Subnormal),
];

/// Round-to-nearest without modifiers.
const PLAIN: FloatMode = FloatMode { rounding: Rounding::Nearest, ftz: false, sat: false };

/// A function of f32 patterns as one of registers.
fn on1(f: impl Fn(u32) -> u32) -> impl Fn(u64) -> u64 {
    move |a| u64::from(f(a as u32))
}

fn on2(f: impl Fn(u32, u32) -> u32) -> impl Fn(u64, u64) -> u64 {
    move |a, b| u64::from(f(a as u32, b as u32))
}

fn on3(f: impl Fn(u32, u32, u32) -> u32) -> impl Fn(u64, u64, u64) -> u64 {
    move |a, b, c| u64::from(f(a as u32, b as u32, c as u32))
}

/// The same on both halves of `.f32x2`.
fn pair2(f: impl Fn(u32, u32) -> u32) -> impl Fn(u64, u64) -> u64 {
    move |a, b| u64::from(f(a as u32, b as u32)) | u64::from(f((a >> 32) as u32, (b >> 32) as u32)) << 32
}

fn pair3(f: impl Fn(u32, u32, u32) -> u32) -> impl Fn(u64, u64, u64) -> u64 {
    move |a, b, c| {
        let high = f((a >> 32) as u32, (b >> 32) as u32, (c >> 32) as u32);
        u64::from(f(a as u32, b as u32, c as u32)) | u64::from(high) << 32
    }
}

impl Parser<'_, '_> {
    pub(super) fn float(&mut self, s: &mut Statement<'_>) -> Result {
        if s.name == "testp" {
            return self.test_property(s);
        }
        let ty = s.ty()?;
        match (s.name, ty) {
            ("ex2" | "tanh", Type::F16 | Type::F16x2 | Type::Bf16 | Type::Bf16x2) => {
                self.half_approximation(s, ty)
            }
            (_, Type::F32 | Type::F32x2) => self.single_precision(s, ty),
            (_, Type::F64) => self.double_precision(s),
            _ => s.unknown(),
        }
    }

    fn test_property(&mut self, s: &mut Statement<'_>) -> Result {
        let property = s.require("a property", &PROPERTIES)?;
        let ty = s.ty()?;
        s.finish(2..=2)?;
        let to = Some(self.predicate_target(s, 0)?);
        let a = self.source(s, 1, ty)?;
        let f = match ty {
            Type::F32 => crate::compute::relate(move |a, _| arith::f32::testp(a as u32, property)),
            Type::F64 => crate::compute::relate(move |a, _| arith::f64::testp(a, property)),
            _ => return s.unknown(),
        };
        self.emit_for(s, Op::Compare { f, to, inverse: None, a, b: a, with: None });
        Ok(())
    }

    fn single_precision(&mut self, s: &mut Statement<'_>, ty: Type) -> Result {
        let approximate = s.flag("approx");
        let full = s.flag("full");
        let rounding = s.choose(&ROUNDINGS);
        let mode = FloatMode {
            rounding: rounding.unwrap_or(Rounding::Nearest),
            ftz: s.flag("ftz"),
            sat: s.flag("sat"),
        };
        if (approximate || full) && (rounding.is_some() || mode.sat) {
            return s.error("an approximation has neither rounding nor `.sat`");
        }
        if matches!(s.name, "fma" | "mad") && rounding.is_none() {
            return s.error("needs a rounding");
        }
        if ty == Type::F32x2 {
            return self.single_precision_pair(s, mode);
        }
        match s.name {
            "add" | "sub" | "mul" | "mad" | "fma" if mode == PLAIN => self.plain_single(s),
            "add" => self.emit2(s, ty, on2(move |a, b| arith::f32::add(a, b, mode))),
            "sub" => self.emit2(s, ty, on2(move |a, b| arith::f32::sub(a, b, mode))),
            "mul" => self.emit2(s, ty, on2(move |a, b| arith::f32::mul(a, b, mode))),
            "mad" | "fma" => self.emit3(s, ty, on3(move |a, b, c| arith::f32::fma(a, b, c, mode))),
            "min" | "max" => self.extreme_single(s, mode.ftz),
            "copysign" => self.emit2(s, ty, on2(arith::f32::copysign)),
            _ if mode.sat => s.unknown(),
            "abs" => self.emit1(s, ty, on1(move |a| arith::f32::abs(a, mode.ftz))),
            "neg" => self.emit1(s, ty, on1(move |a| arith::f32::neg(a, mode.ftz))),
            "div" if full => self.emit2(s, ty, on2(move |a, b| arith::f32::div_full(a, b, mode.ftz))),
            "div" if approximate => {
                self.emit2(s, ty, on2(move |a, b| arith::f32::div_approx(a, b, mode.ftz)))
            }
            "div" if rounding.is_some() => self.emit2(s, ty, on2(move |a, b| arith::f32::div(a, b, mode))),
            _ => self.unary_single(s, approximate, rounding.is_some(), mode),
        }
    }

    /// The common case apart from the others: with the mode known to the compiler, nothing is decided at run time.
    fn plain_single(&mut self, s: &mut Statement<'_>) -> Result {
        let ty = Type::F32;
        match s.name {
            "add" => self.emit2(s, ty, on2(|a, b| arith::f32::add(a, b, PLAIN))),
            "sub" => self.emit2(s, ty, on2(|a, b| arith::f32::sub(a, b, PLAIN))),
            "mul" => self.emit2(s, ty, on2(|a, b| arith::f32::mul(a, b, PLAIN))),
            _ => self.emit3(s, ty, on3(|a, b, c| arith::f32::fma(a, b, c, PLAIN))),
        }
    }

    fn single_precision_pair(&mut self, s: &mut Statement<'_>, mode: FloatMode) -> Result {
        let ty = Type::F32x2;
        match s.name {
            _ if mode.sat => s.unknown(),
            "add" => self.emit2(s, ty, pair2(move |a, b| arith::f32::add(a, b, mode))),
            "sub" => self.emit2(s, ty, pair2(move |a, b| arith::f32::sub(a, b, mode))),
            "mul" => self.emit2(s, ty, pair2(move |a, b| arith::f32::mul(a, b, mode))),
            "fma" => self.emit3(s, ty, pair3(move |a, b, c| arith::f32::fma(a, b, c, mode))),
            _ => s.unknown(),
        }
    }

    fn unary_single(
        &mut self,
        s: &mut Statement<'_>,
        approximate: bool,
        rounded: bool,
        mode: FloatMode,
    ) -> Result {
        let ty = Type::F32;
        let ftz = mode.ftz;
        match s.name {
            "rcp" if rounded => self.emit1(s, ty, on1(move |a| arith::f32::rcp(a, mode))),
            "sqrt" if rounded => self.emit1(s, ty, on1(move |a| arith::f32::sqrt(a, mode))),
            _ if !approximate || rounded => s.error("needs a rounding or `.approx`"),
            "rcp" => self.emit1(s, ty, on1(move |a| arith::f32::rcp_approx(a, ftz))),
            "sqrt" => self.emit1(s, ty, on1(move |a| arith::f32::sqrt_approx(a, ftz))),
            "rsqrt" => self.emit1(s, ty, on1(move |a| arith::f32::rsqrt_approx(a, ftz))),
            "sin" => self.emit1(s, ty, on1(move |a| arith::f32::sin_approx(a, ftz))),
            "cos" => self.emit1(s, ty, on1(move |a| arith::f32::cos_approx(a, ftz))),
            "lg2" => self.emit1(s, ty, on1(move |a| arith::f32::lg2_approx(a, ftz))),
            "ex2" => self.emit1(s, ty, on1(move |a| arith::f32::ex2_approx(a, ftz))),
            "tanh" if !ftz => self.emit1(s, ty, on1(arith::f32::tanh_approx)),
            _ => s.unknown(),
        }
    }

    /// `min` and `max`, of two operands or three.
    fn extreme_single(&mut self, s: &mut Statement<'_>, ftz: bool) -> Result {
        let nan = s.flag("NaN");
        let xorsign = s.flag("xorsign");
        let mode = MinMaxMode { ftz, nan, abs: s.flag("abs"), xorsign };
        if mode.xorsign && !mode.abs {
            return s.error("`.xorsign` needs `.abs`");
        }
        let f = if s.name == "min" { arith::f32::min } else { arith::f32::max };
        if s.args.len() == 4 {
            return self.emit3(s, Type::F32, on3(move |a, b, c| f(f(a, b, mode), c, mode)));
        }
        self.emit2(s, Type::F32, on2(move |a, b| f(a, b, mode)))
    }

    fn double_precision(&mut self, s: &mut Statement<'_>) -> Result {
        let ty = Type::F64;
        let approximate = s.flag("approx");
        let ftz = s.flag("ftz");
        let chosen = s.choose(&ROUNDINGS);
        let rounding = chosen.unwrap_or(Rounding::Nearest);
        if ftz && !approximate {
            return s.error("f64 has no `.ftz` but in approximations");
        }
        match s.name {
            "add" if rounding == Rounding::Nearest => {
                self.emit2(s, ty, |a, b| arith::f64::add(a, b, Rounding::Nearest))
            }
            "mul" if rounding == Rounding::Nearest => {
                self.emit2(s, ty, |a, b| arith::f64::mul(a, b, Rounding::Nearest))
            }
            "add" => self.emit2(s, ty, move |a, b| arith::f64::add(a, b, rounding)),
            "sub" => self.emit2(s, ty, move |a, b| arith::f64::sub(a, b, rounding)),
            "mul" => self.emit2(s, ty, move |a, b| arith::f64::mul(a, b, rounding)),
            "mad" | "fma" if chosen.is_some() => {
                self.emit3(s, ty, move |a, b, c| arith::f64::fma(a, b, c, rounding))
            }
            "min" => self.emit2(s, ty, arith::f64::min),
            "max" => self.emit2(s, ty, arith::f64::max),
            "abs" => self.emit1(s, ty, arith::f64::abs),
            "neg" => self.emit1(s, ty, arith::f64::neg),
            "copysign" => self.emit2(s, ty, arith::f64::copysign),
            "rcp" if approximate && ftz => self.emit1(s, ty, arith::f64::rcp_approx_ftz),
            "rsqrt" if approximate && ftz => self.emit1(s, ty, arith::f64::rsqrt_approx_ftz),
            "rsqrt" if approximate => self.emit1(s, ty, arith::f64::rsqrt_approx),
            _ if approximate => s.unknown(),
            _ if chosen.is_none() => s.error("needs a rounding"),
            "div" => self.emit2(s, ty, move |a, b| arith::f64::div(a, b, rounding)),
            "rcp" => self.emit1(s, ty, move |a| arith::f64::rcp(a, rounding)),
            "sqrt" => self.emit1(s, ty, move |a| arith::f64::sqrt(a, rounding)),
            _ => s.unknown(),
        }
    }
}
