//! Data movement that touches no memory: moves, selections, address windows.

use super::operand::Arg;
use super::statement::Statement;
use super::{Parser, Result};
use crate::arith::{self, Relation};
use crate::compute::map3;
use crate::ir::{BoolOp, Condition, Op, Source};
use crate::types::{AddressSpace, Type};

pub(super) const SPACES: [(&str, AddressSpace); 9] = [
    ("global", AddressSpace::Global),
    ("const", AddressSpace::Const),
    ("shared", AddressSpace::Shared),
    ("shared::cta", AddressSpace::Shared),
    ("shared::cluster", AddressSpace::SharedCluster),
    ("local", AddressSpace::Local),
    ("param", AddressSpace::Param),
    ("param::entry", AddressSpace::Param),
    ("param::func", AddressSpace::Param),
];

pub(super) const BOOL_OPS: [(&str, BoolOp); 3] =
    [("and", BoolOp::And), ("or", BoolOp::Or), ("xor", BoolOp::Xor)];

impl Parser<'_, '_> {
    pub(super) fn data_movement(&mut self, s: &mut Statement<'_>) -> Result {
        match s.name {
            "mov" => self.mov(s),
            "cvt" => match s.flag("pack") {
                true => self.convert_pack(s),
                false => self.convert(s),
            },
            "set" => self.set(s),
            "setp" => self.set_predicate(s),
            "selp" => {
                let ty = s.ty()?;
                s.finish(4..=4)?;
                let to = self.target(s, 0, ty)?;
                let (a, b) = (self.source(s, 1, ty)?, self.source(s, 2, ty)?);
                let condition = self.condition(s, 3)?;
                self.emit_for(s, Op::Select { to, a, b, condition });
                Ok(())
            }
            "slct" => self.select_by_sign(s),
            "createpolicy" => {
                // A policy is a hint to caches that we do not have; the value is opaque.
                let to = self.target(s, 0, Type::B64)?;
                let a = self.constant(0);
                self.emit_for(s, Op::Move { to, a });
                Ok(())
            }
            _ => self.address_window(s),
        }
    }

    fn mov(&mut self, s: &mut Statement<'_>) -> Result {
        let ty = s.ty()?;
        if ty == Type::Pred {
            s.finish(2..=2)?;
            let (to, a) = (self.predicate_target(s, 0)?, self.condition(s, 1)?);
            self.emit_for(s, Op::Logic { op: BoolOp::Or, to, a, b: Condition::Constant(false) });
            return Ok(());
        }
        s.finish(2..=2)?;
        if s.args.iter().any(|arg| matches!(arg, Arg::Vector(_))) && !ty.is_untyped() {
            return s.error("vectors are moved as .b types");
        }
        match (s.args[0].clone(), s.args[1].clone()) {
            (Arg::Vector(parts), a) => self.unpack(s, &parts, &a, ty),
            (_, Arg::Vector(parts)) => self.pack(s, &parts, ty),
            // Special registers used to be narrower, and old code still moves them so.
            (_, Arg::Special(special)) => {
                if special.is_wide() && ty.bits() != 64 || special.is_narrow() && ty.bits() > 32 {
                    return s.error("the special register has another width");
                }
                let to = self.target(s, 0, ty)?;
                self.emit_for(s, Op::ReadSpecial { to, special });
                Ok(())
            }
            (_, Arg::Name { address, space, .. }) => {
                let to = self.target(s, 0, ty)?;
                self.emit_for(s, Op::TakeAddress { to, address, space });
                Ok(())
            }
            (_, a) => {
                let (to, a) = (self.target(s, 0, ty)?, self.value(s, &a, ty, false)?);
                self.emit_for(s, Op::Move { to, a });
                if let (Type::B128, Source::Register(low)) = (ty, a) {
                    self.emit_for(s, Op::Move { to: to + 1, a: Source::Register(low + 1) });
                }
                Ok(())
            }
        }
    }

    fn part_type(s: &Statement<'_>, whole: Type, parts: usize) -> Result<Type> {
        match whole.bits() as usize / parts.max(1) {
            8 => Ok(Type::B8),
            16 => Ok(Type::B16),
            32 => Ok(Type::B32),
            64 => Ok(Type::B64),
            _ => s.error(format!("a vector of {parts} does not fit .{}", whole.name())),
        }
    }

    fn pack(&mut self, s: &Statement<'_>, parts: &[Arg], ty: Type) -> Result {
        let part = Self::part_type(s, ty, parts.len())?;
        let to = self.target(s, 0, ty)?;
        let sources = parts.iter().map(|arg| self.value(s, arg, part, false)).collect::<Result<Vec<_>>>()?;
        if ty == Type::B128 {
            // Two registers; the second part may be the register that the first move overwrites.
            let low = self.new_register(Type::B64);
            self.emit_for(s, Op::Move { to: low, a: sources[0] });
            self.emit_for(s, Op::Move { to: to + 1, a: sources[1] });
            self.emit_for(s, Op::Move { to, a: Source::Register(low) });
            return Ok(());
        }
        self.emit_for(s, Op::Pack { to, parts: sources, bits: part.bits() });
        Ok(())
    }

    fn unpack(&mut self, s: &Statement<'_>, parts: &[Arg], a: &Arg, ty: Type) -> Result {
        let part = Self::part_type(s, ty, parts.len())?;
        let a = self.value(s, a, ty, false)?;
        let mut targets = Vec::new();
        for arg in parts {
            targets.push(match arg {
                Arg::Sink => None,
                _ => Some(self.target_of(s, arg, part, false)?),
            });
        }
        match (ty, a) {
            (Type::B128, Source::Register(low)) => {
                let high = self.new_register(Type::B64);
                self.emit_for(s, Op::Move { to: high, a: Source::Register(low + 1) });
                for (target, from) in targets.into_iter().zip([low, high]) {
                    if let Some(to) = target {
                        self.emit_for(s, Op::Move { to, a: Source::Register(from) });
                    }
                }
            }
            _ => self.emit_for(s, Op::Unpack { parts: targets, a, bits: part.bits() }),
        }
        Ok(())
    }

    /// `and`, `or`, `xor`, `not` on predicates.
    pub(super) fn predicate_logic(&mut self, s: &mut Statement<'_>) -> Result {
        s.flag("pred");
        let to = self.predicate_target(s, 0)?;
        let a = self.condition(s, 1)?;
        if s.name == "not" {
            s.finish(2..=2)?;
            self.emit_for(s, Op::Logic { op: BoolOp::Xor, to, a, b: Condition::Constant(true) });
            return Ok(());
        }
        s.finish(3..=3)?;
        let b = self.condition(s, 2)?;
        match BOOL_OPS.iter().find(|(name, _)| *name == s.name) {
            Some((_, op)) => self.emit_for(s, Op::Logic { op: *op, to, a, b }),
            None => return s.unknown(),
        }
        Ok(())
    }

    fn select_by_sign(&mut self, s: &mut Statement<'_>) -> Result {
        let ftz = s.flag("ftz");
        let (ty, sign) = (s.ty()?, s.ty()?);
        s.finish(4..=4)?;
        let to = self.target(s, 0, ty)?;
        let (a, b) = (self.source(s, 1, ty)?, self.source(s, 2, ty)?);
        let c = self.source(s, 3, sign)?;
        let not_negative: fn(u64, bool) -> bool = match sign {
            Type::S32 => |c, _| c as i32 >= 0,
            Type::F32 => |c, ftz| arith::f32::compare(Relation::Ge, c as u32, 0, ftz),
            _ => return s.unknown(),
        };
        let f = map3(move |a, b, c| if not_negative(c, ftz) { a } else { b });
        self.emit_for(s, Op::Map3 { f, to, a, b, c });
        Ok(())
    }

    fn address_window(&mut self, s: &mut Statement<'_>) -> Result {
        let to_space = s.flag("to");
        let space = s.choose(&SPACES);
        match (s.name, space) {
            ("isspacep", Some(space)) => {
                s.finish(2..=2)?;
                let (to, a) = (self.predicate_target(s, 0)?, self.source(s, 1, Type::B64)?);
                self.emit_for(s, Op::IsSpace { to, a, space });
            }
            ("cvta", Some(space)) => {
                let ty = s.ty()?;
                s.finish(2..=2)?;
                let (to, a) = (self.target(s, 0, ty)?, self.source(s, 1, ty)?);
                let op = match to_space {
                    true => Op::FromGeneric { to, a, space },
                    false => Op::ToGeneric { to, a, space },
                };
                self.emit_for(s, op);
            }
            ("mapa", _) => {
                let ty = s.ty()?;
                s.finish(3..=3)?;
                let (to, a) = (self.target(s, 0, ty)?, self.source(s, 1, ty)?);
                let rank = self.source(s, 2, Type::U32)?;
                self.emit_for(s, Op::MapShared { to, a, rank, generic: space.is_none() });
            }
            ("getctarank", _) => {
                let ty = s.ty()?;
                s.finish(2..=2)?;
                let (to, a) = (self.target(s, 0, Type::U32)?, self.source(s, 1, ty)?);
                self.emit_for(s, Op::SharedRank { to, a, generic: space.is_none() });
            }
            _ => return s.unknown(),
        }
        Ok(())
    }
}
