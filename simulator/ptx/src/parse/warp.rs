//! What the lanes of a warp do together.

use super::memory::combine;
use super::statement::Statement;
use super::{Parser, Result};
use crate::ir::{Op, ShuffleMode, Source, VoteMode, WarpOp};
use crate::types::Type;

const SHUFFLES: [(&str, ShuffleMode); 4] = [
    ("up", ShuffleMode::Up),
    ("down", ShuffleMode::Down),
    ("bfly", ShuffleMode::Butterfly),
    ("idx", ShuffleMode::Index),
];

const VOTES: [(&str, Option<VoteMode>); 4] = [
    ("all", Some(VoteMode::All)),
    ("any", Some(VoteMode::Any)),
    ("uni", Some(VoteMode::Uniform)),
    ("ballot", None),
];

impl Parser<'_, '_> {
    pub(super) fn warp_wide(&mut self, s: &mut Statement<'_>) -> Result {
        if s.name == "activemask" {
            s.flag("b32");
            s.finish(1..=1)?;
            let to = self.target(s, 0, Type::B32)?;
            self.emit_for(s, Op::ReadActiveMask { to });
            return Ok(());
        }
        let sync = s.flag("sync");
        if !sync && self.module.target >= 70 && self.module.version >= (6, 4) {
            return s.error("needs `.sync` from sm_70 on");
        }
        // The member mask is the last operand.
        let last = s.args.len().saturating_sub(1);
        let members = if sync { Some(self.source(s, last, Type::B32)?) } else { None };
        if sync {
            s.args.pop();
        }
        let op = match s.name {
            "shfl" => self.shuffle(s)?,
            "vote" => self.vote(s)?,
            _ if !sync => return s.error("needs `.sync`"),
            "match" => self.match_values(s)?,
            "redux" => self.reduce(s)?,
            _ => self.elect(s)?,
        };
        self.emit_for(s, Op::Warp { op: Box::new(op), members });
        Ok(())
    }

    fn shuffle(&mut self, s: &mut Statement<'_>) -> Result<WarpOp> {
        let mode = s.require("`.up`, `.down`, `.bfly` or `.idx`", &SHUFFLES)?;
        if s.ty()? != Type::B32 {
            return s.unknown();
        }
        s.finish(4..=4)?;
        let (to, valid) = match self.pair(s) {
            Some((to, valid)) => (self.target_of(s, &to, Type::B32, false)?, self.predicate_of(s, &valid)?),
            None => (self.target(s, 0, Type::B32)?, None),
        };
        let value = self.source(s, 1, Type::B32)?;
        let lane: Source = self.source(s, 2, Type::B32)?;
        let clamp = self.source(s, 3, Type::B32)?;
        Ok(WarpOp::Shuffle { mode, to, valid, value, lane, clamp })
    }

    fn vote(&mut self, s: &mut Statement<'_>) -> Result<WarpOp> {
        let mode = s.require("`.all`, `.any`, `.uni` or `.ballot`", &VOTES)?;
        s.maybe_ty();
        s.finish(2..=2)?;
        let value = self.condition(s, 1)?;
        Ok(match mode {
            Some(mode) => WarpOp::Vote { mode, to: self.predicate_target(s, 0)?, value },
            None => WarpOp::Ballot { to: self.target(s, 0, Type::B32)?, value },
        })
    }

    fn match_values(&mut self, s: &mut Statement<'_>) -> Result<WarpOp> {
        let all = s.require("`.any` or `.all`", &[("any", false), ("all", true)])?;
        let ty = s.ty()?;
        s.finish(2..=2)?;
        if !matches!(ty, Type::B32 | Type::B64) {
            return s.unknown();
        }
        let (value, bits) = (self.source(s, 1, ty)?, ty.bits());
        if !all {
            return Ok(WarpOp::MatchAny { to: self.target(s, 0, Type::B32)?, value, bits });
        }
        let (to, all) = match self.pair(s) {
            Some((to, all)) => (self.target_of(s, &to, Type::B32, false)?, self.predicate_of(s, &all)?),
            None => (self.target(s, 0, Type::B32)?, None),
        };
        Ok(WarpOp::MatchAll { to, all, value, bits })
    }

    fn reduce(&mut self, s: &mut Statement<'_>) -> Result<WarpOp> {
        let Some(name) = ["add", "min", "max", "and", "or", "xor"].into_iter().find(|name| s.flag(name))
        else {
            return s.error("needs an operation");
        };
        let ty = s.ty()?;
        s.finish(2..=2)?;
        match combine(name, ty) {
            Some(combine) if ty.bits() == 32 => {
                Ok(WarpOp::Reduce { to: self.target(s, 0, ty)?, value: self.source(s, 1, ty)?, combine })
            }
            _ => s.unknown(),
        }
    }

    fn elect(&mut self, s: &mut Statement<'_>) -> Result<WarpOp> {
        s.finish(1..=1)?;
        let Some((to, leader)) = self.pair(s) else {
            return s.error("needs `d|p`");
        };
        let leader = match self.predicate_of(s, &leader)? {
            Some(leader) => leader,
            None => self.new_predicate(),
        };
        let to = self.target_of(s, &to, Type::B32, false)?;
        Ok(WarpOp::Elect { to, leader })
    }
}
