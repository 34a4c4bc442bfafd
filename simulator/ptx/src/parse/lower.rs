//! Which instruction is lowered where.

use super::Parser;
use super::Result;
use super::statement::Statement;
use crate::arith::int::IntType;
use crate::compute::{map1, map2, map3};
use crate::ir::Op;
use crate::types::Type;

/// The integer type that arithmetic on `ty` has; `.b` types count as unsigned.
pub(super) fn int_type(ty: Type) -> IntType {
    IntType { bits: ty.bits(), signed: ty.is_signed() }
}

impl Parser<'_, '_> {
    pub(super) fn lower(&mut self, s: &mut Statement<'_>) -> Result {
        match s.name {
            "add" | "sub" | "mul" | "div" | "min" | "max" | "abs" | "neg" | "mad" | "fma" | "and" | "or"
            | "xor" | "not" => self.arithmetic(s),
            "rcp" | "sqrt" | "rsqrt" | "sin" | "cos" | "lg2" | "ex2" | "tanh" | "copysign" | "testp" => {
                self.float(s)
            }
            "addc" | "subc" | "madc" | "mul24" | "mad24" | "sad" | "rem" | "popc" | "clz" | "bfind"
            | "brev" | "bfe" | "bfi" | "fns" | "bmsk" | "szext" | "dp4a" | "dp2a" | "prmt" | "lop3"
            | "cnot" | "shl" | "shr" | "shf" => self.integer(s),
            "mov" | "cvt" | "cvta" | "isspacep" | "set" | "setp" | "selp" | "slct" | "mapa"
            | "getctarank" | "createpolicy" => self.data_movement(s),
            "ld" | "ldu" | "st" | "atom" | "red" | "prefetch" | "prefetchu" | "applypriority" | "discard"
            | "cp" | "mbarrier" => self.memory_access(s),
            "multimem" => self.multimem(s),
            "bra" | "brx" | "ret" | "exit" | "trap" | "brkpt" | "nanosleep" | "griddepcontrol"
            | "setmaxnreg" | "pmevent" => self.control_flow(s),
            "bar" | "barrier" | "membar" | "fence" => self.synchronisation(s),
            "shfl" | "vote" | "match" | "redux" | "activemask" | "elect" => self.warp_wide(s),
            _ => s.unknown(),
        }
    }

    /// Instructions that exist for integers and for floating-point numbers.
    fn arithmetic(&mut self, s: &mut Statement<'_>) -> Result {
        let ty = s.modifiers.iter().find_map(|modifier| Type::named(modifier));
        match ty {
            Some(Type::Pred) => self.predicate_logic(s),
            Some(Type::F16 | Type::F16x2 | Type::Bf16 | Type::Bf16x2) => self.half(s),
            Some(Type::F32 | Type::F64 | Type::F32x2) => self.float(s),
            _ => self.integer(s),
        }
    }

    /// One operand and one result of the same type.
    pub(super) fn emit1(
        &mut self,
        s: &Statement<'_>,
        ty: Type,
        f: impl Fn(u64) -> u64 + Send + Sync + 'static,
    ) -> Result {
        s.finish(2..=2)?;
        let to = self.target(s, 0, ty)?;
        let a = self.source(s, 1, ty)?;
        self.emit_for(s, Op::Map1 { f: map1(f), to, a });
        Ok(())
    }

    /// Two operands and one result of the same type.
    pub(super) fn emit2(
        &mut self,
        s: &Statement<'_>,
        ty: Type,
        f: impl Fn(u64, u64) -> u64 + Send + Sync + 'static,
    ) -> Result {
        self.emit2_as(s, [ty; 3], f)
    }

    /// Two operands; the types of the result and of the operands.
    pub(super) fn emit2_as(
        &mut self,
        s: &Statement<'_>,
        types: [Type; 3],
        f: impl Fn(u64, u64) -> u64 + Send + Sync + 'static,
    ) -> Result {
        s.finish(3..=3)?;
        let to = self.target(s, 0, types[0])?;
        let a = self.source(s, 1, types[1])?;
        let b = self.source(s, 2, types[2])?;
        self.emit_for(s, Op::Map2 { f: map2(f), to, a, b });
        Ok(())
    }

    /// Three operands and one result of the same type.
    pub(super) fn emit3(
        &mut self,
        s: &Statement<'_>,
        ty: Type,
        f: impl Fn(u64, u64, u64) -> u64 + Send + Sync + 'static,
    ) -> Result {
        self.emit3_as(s, [ty; 4], f)
    }

    /// Three operands; the types of the result and of the operands.
    pub(super) fn emit3_as(
        &mut self,
        s: &Statement<'_>,
        types: [Type; 4],
        f: impl Fn(u64, u64, u64) -> u64 + Send + Sync + 'static,
    ) -> Result {
        s.finish(4..=4)?;
        let to = self.target(s, 0, types[0])?;
        let a = self.source(s, 1, types[1])?;
        let b = self.source(s, 2, types[2])?;
        let c = self.source(s, 3, types[3])?;
        self.emit_for(s, Op::Map3 { f: map3(f), to, a, b, c });
        Ok(())
    }
}
