//! Arithmetic on f16 and bf16, single and in pairs.

use super::float::ROUNDINGS;
use super::statement::Statement;
use super::{Parser, Result};
use crate::arith::{FloatMode, MinMaxMode, Rounding, bf16, f16};
use crate::compute::{halves1, halves2, halves3};
use crate::types::Type;

/// The functions of one format.
#[derive(Clone, Copy)]
struct Format {
    add: fn(u16, u16, FloatMode) -> u16,
    sub: fn(u16, u16, FloatMode) -> u16,
    mul: fn(u16, u16, FloatMode) -> u16,
    fma: fn(u16, u16, u16, FloatMode) -> u16,
    min: fn(u16, u16, MinMaxMode) -> u16,
    max: fn(u16, u16, MinMaxMode) -> u16,
    abs: fn(u16, bool) -> u16,
    neg: fn(u16, bool) -> u16,
    relu: fn(u16) -> u16,
    tanh: fn(u16) -> u16,
}

const F16: Format = Format {
    add: f16::add,
    sub: f16::sub,
    mul: f16::mul,
    fma: f16::fma,
    min: f16::min,
    max: f16::max,
    abs: f16::abs,
    neg: f16::neg,
    relu: f16::relu,
    tanh: f16::tanh_approx,
};

const BF16: Format = Format {
    add: bf16::add,
    sub: bf16::sub,
    mul: bf16::mul,
    fma: bf16::fma,
    min: bf16::min,
    max: bf16::max,
    abs: bf16::abs,
    neg: bf16::neg,
    relu: bf16::relu,
    tanh: bf16::tanh_approx,
};

fn format(ty: Type) -> Format {
    if matches!(ty, Type::F16 | Type::F16x2) { F16 } else { BF16 }
}

fn is_pair(ty: Type) -> bool {
    matches!(ty, Type::F16x2 | Type::Bf16x2)
}

impl Parser<'_, '_> {
    fn halves_1(
        &mut self,
        s: &Statement<'_>,
        ty: Type,
        f: impl Fn(u16) -> u16 + Send + Sync + 'static,
    ) -> Result {
        if is_pair(ty) {
            self.emit1(s, ty, halves1(f))
        } else {
            self.emit1(s, ty, move |a| u64::from(f(a as u16)))
        }
    }

    fn halves_2(
        &mut self,
        s: &Statement<'_>,
        ty: Type,
        f: impl Fn(u16, u16) -> u16 + Send + Sync + 'static,
    ) -> Result {
        if is_pair(ty) {
            return self.emit2(s, ty, halves2(f));
        }
        self.emit2(s, ty, move |a, b| u64::from(f(a as u16, b as u16)))
    }

    fn halves_3(
        &mut self,
        s: &Statement<'_>,
        ty: Type,
        f: impl Fn(u16, u16, u16) -> u16 + Send + Sync + 'static,
    ) -> Result {
        if is_pair(ty) {
            return self.emit3(s, ty, halves3(f));
        }
        self.emit3(s, ty, move |a, b, c| u64::from(f(a as u16, b as u16, c as u16)))
    }

    pub(super) fn half(&mut self, s: &mut Statement<'_>) -> Result {
        let ty = s.ty()?;
        let format = format(ty);
        let rounding = s.choose(&ROUNDINGS);
        if rounding.is_some_and(|rounding| rounding != Rounding::Nearest) {
            return s.error("16-bit arithmetic rounds to nearest");
        }
        if s.name == "fma" && rounding.is_none() {
            return s.error("needs a rounding");
        }
        let mode = FloatMode { rounding: Rounding::Nearest, ftz: s.flag("ftz"), sat: s.flag("sat") };
        if matches!(ty, Type::Bf16 | Type::Bf16x2) && (mode.ftz || mode.sat) {
            return s.error("bf16 has neither `.ftz` nor `.sat`");
        }
        let relu = s.flag("relu");
        if relu && s.name != "fma" {
            return s.unknown();
        }
        match s.name {
            "add" => self.halves_2(s, ty, move |a, b| (format.add)(a, b, mode)),
            "sub" => self.halves_2(s, ty, move |a, b| (format.sub)(a, b, mode)),
            "mul" => self.halves_2(s, ty, move |a, b| (format.mul)(a, b, mode)),
            "fma" if relu => self.halves_3(s, ty, move |a, b, c| (format.relu)((format.fma)(a, b, c, mode))),
            "fma" => self.halves_3(s, ty, move |a, b, c| (format.fma)(a, b, c, mode)),
            _ if mode.sat => s.unknown(),
            "abs" => self.halves_1(s, ty, move |a| (format.abs)(a, mode.ftz)),
            "neg" => self.halves_1(s, ty, move |a| (format.neg)(a, mode.ftz)),
            "min" | "max" => {
                let nan = s.flag("NaN");
                let xorsign = s.flag("xorsign");
                let mode = MinMaxMode { ftz: mode.ftz, nan, abs: s.flag("abs"), xorsign };
                if mode.xorsign != mode.abs {
                    return s.error("`.xorsign` and `.abs` go together");
                }
                let f = if s.name == "min" { format.min } else { format.max };
                self.halves_2(s, ty, move |a, b| f(a, b, mode))
            }
            _ => s.unknown(),
        }
    }

    /// `ex2.approx` and `tanh.approx`; the type is already taken.
    pub(super) fn half_approximation(&mut self, s: &mut Statement<'_>, ty: Type) -> Result {
        if !s.flag("approx") {
            return s.error("needs `.approx`");
        }
        let ftz = s.flag("ftz");
        match (s.name, ty) {
            ("tanh", _) if !ftz => self.halves_1(s, ty, format(ty).tanh),
            ("ex2", Type::F16 | Type::F16x2) if !ftz => self.halves_1(s, ty, |a| f16::ex2_approx(a, false)),
            ("ex2", Type::Bf16 | Type::Bf16x2) if ftz => self.halves_1(s, ty, bf16::ex2_approx_ftz),
            _ => s.unknown(),
        }
    }
}
