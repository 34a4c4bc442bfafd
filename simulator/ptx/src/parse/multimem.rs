//! `multimem.ld_reduce`, `multimem.st` and `multimem.red` (PTX ISA, "multimem").

use super::memory::{SCOPES, combine};
use super::operand::Arg;
use super::statement::Statement;
use super::{Parser, Result};
use crate::arith::convert::{ConvertMode, float_to_float};
use crate::arith::{self, FloatMode, Format, MinMaxMode, bf16, f16};
use crate::ir::{AtomicOp, Combine, Fold, Multimem, MultimemOp, Op, Order};
use crate::types::{AddressSpace, Type};

const LOAD_ORDERS: [(&str, Order); 2] = [("relaxed", Order::Relaxed), ("acquire", Order::Acquire)];
const STORE_ORDERS: [(&str, Order); 2] = [("relaxed", Order::Relaxed), ("release", Order::Release)];
const VECTORS: [(&str, usize); 3] = [("v2", 2), ("v4", 4), ("v8", 8)];

impl Parser<'_, '_> {
    pub(super) fn multimem(&mut self, s: &mut Statement<'_>) -> Result {
        let kinds = [("ld_reduce", true), ("st", false), ("red", false)];
        let Some((name, is_load)) = kinds.into_iter().find(|(name, _)| s.flag(name)) else {
            return s.unknown();
        };
        let order = s.choose(if is_load { &LOAD_ORDERS } else { &STORE_ORDERS });
        let scope = s.choose(&SCOPES);
        // `multimem.red` has no `.weak`.
        if order.is_none() && scope.is_none() && name != "red" {
            s.flag("weak");
        }
        let space = if s.flag("global") { AddressSpace::Global } else { AddressSpace::Generic };
        let count = s.choose(&VECTORS).unwrap_or(1);
        let in_single = s.flag("acc::f32");
        let operation = ["min", "max", "add", "and", "or", "xor"].into_iter().find(|op| s.flag(op));
        let ty = s.ty()?;
        s.finish(2..=2)?;
        check_size(s, ty, count)?;
        let op = match (name, operation) {
            ("st", None) if !in_single => MultimemOp::Store { from: self.multimem_sources(s, ty, count)? },
            ("red", Some(operation)) if !in_single => {
                let Some(op) = reduction(operation, ty) else { return s.unknown() };
                MultimemOp::Reduce { with: self.multimem_sources(s, ty, count)?, op }
            }
            ("ld_reduce", Some(operation)) => {
                let Some(fold) = fold(operation, ty, in_single) else { return s.unknown() };
                MultimemOp::LoadReduce { to: self.multimem_targets(s, ty, count)?, fold }
            }
            _ => return s.unknown(),
        };
        let address = self.address(s, usize::from(is_load), space)?;
        let (bytes, align) = (ty.bytes() as u32, (ty.bytes() * count) as u32);
        let order = order.unwrap_or(Order::Relaxed);
        self.emit_for(s, Op::Multimem(Box::new(Multimem { space, order, op, bytes, address, align })));
        Ok(())
    }

    fn multimem_sources(
        &mut self,
        s: &Statement<'_>,
        ty: Type,
        count: usize,
    ) -> Result<Vec<crate::ir::Source>> {
        let elements = self.elements(s, 1, count)?;
        elements.iter().map(|arg| self.value(s, arg, ty, false)).collect()
    }

    fn multimem_targets(&mut self, s: &Statement<'_>, ty: Type, count: usize) -> Result<Vec<Option<u32>>> {
        let elements = self.elements(s, 0, count)?;
        let target = |arg: &Arg| match arg {
            Arg::Sink => Ok(None),
            arg => self.target_of(s, arg, ty, false).map(Some),
        };
        elements.iter().map(target).collect()
    }
}

/// Integers come alone, with 32 or 64 bits; floating-point numbers fill 32, 64 or 128 bits, f64 alone.
fn check_size(s: &Statement<'_>, ty: Type, count: usize) -> Result {
    let is_float = matches!(ty, Type::F16 | Type::F16x2 | Type::Bf16 | Type::Bf16x2 | Type::F32 | Type::F64);
    let fits = if is_float && ty != Type::F64 {
        matches!(ty.bits() as usize * count, 32 | 64 | 128)
    } else {
        count == 1 && matches!(ty.bits(), 32 | 64) && (is_float || ty.is_integer() || ty.is_untyped())
    };
    if fits { Ok(()) } else { s.error("a vector of this length and type is not accessed together") }
}

/// Which operations go with which types.
fn joined(operation: &str, ty: Type) -> Option<Combine> {
    let plain = FloatMode::default();
    let extreme = MinMaxMode::default();
    Some(match (operation, ty) {
        ("add", Type::S64) => return None,
        ("add", Type::F32) => Box::new(move |a, b| u64::from(arith::f32::add(a as u32, b as u32, plain))),
        ("min", Type::F16) => Box::new(move |a, b| u64::from(f16::min(a as u16, b as u16, extreme))),
        ("max", Type::F16) => Box::new(move |a, b| u64::from(f16::max(a as u16, b as u16, extreme))),
        ("min", Type::Bf16) => Box::new(move |a, b| u64::from(bf16::min(a as u16, b as u16, extreme))),
        ("max", Type::Bf16) => Box::new(move |a, b| u64::from(bf16::max(a as u16, b as u16, extreme))),
        ("min" | "max", Type::B32 | Type::B64 | Type::F32 | Type::F64) => return None,
        _ => return combine(operation, ty),
    })
}

/// Floating-point numbers are only added (`.redop`).
fn reduction(operation: &str, ty: Type) -> Option<AtomicOp> {
    let is_float = !ty.is_integer() && !ty.is_untyped();
    if is_float && operation != "add" {
        return None;
    }
    joined(operation, ty).map(AtomicOp::Update)
}

/// `in_single`: the sum of 16-bit numbers is kept in f32, and rounded once.
fn fold(operation: &str, ty: Type, in_single: bool) -> Option<Fold> {
    if !in_single {
        let join = joined(operation, ty)?;
        return Some(Box::new(move |values| values.iter().copied().reduce(&join).unwrap_or(0)));
    }
    let format = match ty {
        Type::F16 | Type::F16x2 => Format::F16,
        Type::Bf16 | Type::Bf16x2 => Format::BF16,
        _ => return None,
    };
    if operation != "add" {
        return None;
    }
    let halves = ty.bits() / 16;
    Some(Box::new(move |values| {
        (0..halves).fold(0, |word, half| word | sum_in_single(values, 16 * half, format) << (16 * half))
    }))
}

/// The sum of the 16-bit numbers that begin at bit `shift`.
fn sum_in_single(values: &[u64], shift: u32, format: Format) -> u64 {
    let convert = ConvertMode::default();
    let single = |value: &u64| float_to_float(value >> shift & 0xffff, format, Format::F32, convert);
    let add = |a: u64, b: u64| u64::from(arith::f32::add(a as u32, b as u32, FloatMode::default()));
    let sum = values.iter().map(single).reduce(add).unwrap_or(0);
    float_to_float(sum, Format::F32, format, convert)
}
