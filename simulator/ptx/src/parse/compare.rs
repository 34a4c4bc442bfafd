//! Comparisons: `set` and `setp`.

use super::convert::float_format;
use super::moves::BOOL_OPS;
use super::operand::Arg;
use super::statement::Statement;
use super::{Parser, Result};
use crate::arith::{self, Relation, bf16, f16};
use crate::compute::{map2, relate};
use crate::ir::{BoolOp, Op, Relate};
use crate::types::Type;

const RELATIONS: [(&str, Relation); 14] = [
    ("eq", Relation::Eq),
    ("ne", Relation::Ne),
    ("lt", Relation::Lt),
    ("le", Relation::Le),
    ("gt", Relation::Gt),
    ("ge", Relation::Ge),
    ("equ", Relation::Equ),
    ("neu", Relation::Neu),
    ("ltu", Relation::Ltu),
    ("leu", Relation::Leu),
    ("gtu", Relation::Gtu),
    ("geu", Relation::Geu),
    ("num", Relation::Num),
    ("nan", Relation::Nan),
];

/// Relations of unsigned integers that have names of their own.
const UNSIGNED_RELATIONS: [(&str, Relation); 4] =
    [("lo", Relation::Lt), ("ls", Relation::Le), ("hi", Relation::Gt), ("hs", Relation::Ge)];

/// One closure per relation and width, so that each is compiled for its own.
macro_rules! integer_relation {
    ($relation:expr, $host:ty) => {
        match $relation {
            Relation::Eq => relate(|a, b| a as $host == b as $host),
            Relation::Ne => relate(|a, b| a as $host != b as $host),
            Relation::Lt => relate(|a, b| (a as $host) < b as $host),
            Relation::Le => relate(|a, b| a as $host <= b as $host),
            Relation::Gt => relate(|a, b| a as $host > b as $host),
            _ => relate(|a, b| a as $host >= b as $host),
        }
    };
}

fn relation_of(relation: Relation, ty: Type, ftz: bool) -> Option<Relate> {
    Some(match ty {
        Type::U16 | Type::B16 => integer_relation!(relation, u16),
        Type::S16 => integer_relation!(relation, i16),
        Type::U32 | Type::B32 => integer_relation!(relation, u32),
        Type::S32 => integer_relation!(relation, i32),
        Type::U64 | Type::B64 => integer_relation!(relation, u64),
        Type::S64 => integer_relation!(relation, i64),
        Type::F32 => relate(move |a, b| arith::f32::compare(relation, a as u32, b as u32, ftz)),
        Type::F64 => relate(move |a, b| arith::f64::compare(relation, a, b)),
        Type::F16 => relate(move |a, b| f16::compare(relation, a as u16, b as u16, ftz)),
        Type::Bf16 => relate(move |a, b| bf16::compare(relation, a as u16, b as u16, false)),
        _ => return None,
    })
}

impl Parser<'_, '_> {
    /// The relation and the boolean operator of a comparison.
    fn relation(&mut self, s: &mut Statement<'_>) -> Result<(Relation, Option<BoolOp>, bool)> {
        let unsigned = s.choose(&UNSIGNED_RELATIONS);
        let relation = match unsigned {
            Some(relation) => relation,
            None => s.require("a comparison", &RELATIONS)?,
        };
        Ok((relation, s.choose(&BOOL_OPS), unsigned.is_some()))
    }

    fn comparison(
        &self,
        s: &Statement<'_>,
        relation: Relation,
        unsigned: bool,
        ty: Type,
        ftz: bool,
    ) -> Result<Relate> {
        let ordered = matches!(
            relation,
            Relation::Eq | Relation::Ne | Relation::Lt | Relation::Le | Relation::Gt | Relation::Ge
        );
        let equality = matches!(relation, Relation::Eq | Relation::Ne);
        if unsigned && !matches!(ty, Type::U16 | Type::U32 | Type::U64)
            || !ty.is_float() && !ordered
            || ty.is_untyped() && !equality
        {
            return s.error(format!("this comparison does not exist for .{}", ty.name()));
        }
        match relation_of(relation, ty, ftz) {
            Some(f) => Ok(f),
            None => s.unknown(),
        }
    }

    pub(super) fn set_predicate(&mut self, s: &mut Statement<'_>) -> Result {
        let (relation, combine, unsigned) = self.relation(s)?;
        let ftz = s.flag("ftz");
        let ty = s.ty()?;
        let operands = if combine.is_some() { 4 } else { 3 };
        s.finish(operands..=operands)?;
        let (to, inverse) = match &s.args[0] {
            Arg::Pair(pair) => (self.predicate_of(s, &pair.0)?, self.predicate_of(s, &pair.1)?),
            arg => (self.predicate_of(s, arg)?, None),
        };
        let (a, b) = (self.source(s, 1, ty)?, self.source(s, 2, ty)?);
        let with = match combine {
            Some(op) => Some((op, self.condition(s, 3)?)),
            None => None,
        };
        if matches!(ty, Type::F16x2 | Type::Bf16x2) {
            // The first predicate is for the low halves, the second for the high ones.
            for (shift, to) in [(0, to), (16, inverse)] {
                let f: Relate = match ty {
                    Type::F16x2 => relate(move |a, b| {
                        f16::compare(relation, (a >> shift) as u16, (b >> shift) as u16, ftz)
                    }),
                    _ => relate(move |a, b| {
                        bf16::compare(relation, (a >> shift) as u16, (b >> shift) as u16, ftz)
                    }),
                };
                self.emit_for(s, Op::Compare { f, to, inverse: None, a, b, with });
            }
            return Ok(());
        }
        let f = self.comparison(s, relation, unsigned, ty, ftz)?;
        self.emit_for(s, Op::Compare { f, to, inverse, a, b, with });
        Ok(())
    }

    /// `set`: the outcome as a number, all ones or 1.0.
    pub(super) fn set(&mut self, s: &mut Statement<'_>) -> Result {
        let (relation, combine, unsigned) = self.relation(s)?;
        let ftz = s.flag("ftz");
        let (result, ty) = (s.ty()?, s.ty()?);
        let operands = if combine.is_some() { 4 } else { 3 };
        s.finish(operands..=operands)?;
        let to = self.target(s, 0, result)?;
        let (a, b) = (self.source(s, 1, ty)?, self.source(s, 2, ty)?);
        if let (Type::F16x2 | Type::Bf16x2, None) = (ty, combine) {
            let compare = if ty == Type::F16x2 { f16::compare } else { bf16::compare };
            let one = match result {
                Type::F16x2 => 0x3c00,
                Type::Bf16x2 => 0x3f80,
                _ => u16::MAX,
            };
            let half = move |a, b| if compare(relation, a, b, ftz) { one } else { 0 };
            self.emit_for(s, Op::Map2 { f: map2(crate::compute::halves2(half)), to, a, b });
            return Ok(());
        }
        let with = match combine {
            Some(op) => Some((op, self.condition(s, 3)?)),
            None => None,
        };
        let one = match (result, float_format(result)) {
            (Type::U32 | Type::S32 | Type::U16 | Type::S16, _) => u64::MAX,
            (Type::F32 | Type::F16 | Type::Bf16, Some(format)) => format.one(),
            _ => return s.unknown(),
        };
        let f = self.comparison(s, relation, unsigned, ty, ftz)?;
        let outcome = self.new_predicate();
        self.emit_for(s, Op::Compare { f, to: Some(outcome), inverse: None, a, b, with });
        let condition = super::operand::condition(outcome, false);
        let (one, zero) = (self.constant(one), self.constant(0));
        self.emit_for(s, Op::Select { to, a: one, b: zero, condition });
        Ok(())
    }
}
