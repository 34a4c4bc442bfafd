//! Barriers and fences.

use super::memory::SCOPES;
use super::operand::Arg;
use super::statement::Statement;
use super::{Parser, Result};
use crate::ir::{Barrier, BarrierReduction, Op, WarpOp};
use crate::types::Type;

impl Parser<'_, '_> {
    pub(super) fn synchronisation(&mut self, s: &mut Statement<'_>) -> Result {
        if matches!(s.name, "membar" | "fence") {
            return self.fence(s);
        }
        if s.flag("cluster") {
            return self.cluster_barrier(s);
        }
        if !s.flag("warp") {
            return self.block_barrier(s);
        }
        if !s.flag("sync") {
            return s.unknown();
        }
        s.finish(1..=1)?;
        let members = Some(self.source(s, 0, Type::B32)?);
        self.emit_for(s, Op::Warp { op: Box::new(WarpOp::Barrier), members });
        Ok(())
    }

    fn fence(&mut self, s: &mut Statement<'_>) -> Result {
        // Every scope and every proxy is the same memory here.
        let known = |modifier: &str| {
            matches!(
                modifier,
                "cta"
                    | "gl"
                    | "sys"
                    | "gpu"
                    | "cluster"
                    | "sc"
                    | "acq_rel"
                    | "acquire"
                    | "release"
                    | "alias"
                    | "async"
                    | "mbarrier_init"
                    | "global"
                    | "restrict"
            ) || modifier.starts_with("proxy")
                || modifier.starts_with("tensormap")
                || modifier.starts_with("async::")
                || modifier.starts_with("sync_restrict")
                || modifier.starts_with("shared::")
        };
        if let Some(modifier) = s.modifiers.iter().find(|modifier| !known(modifier)) {
            return s.error(format!("`.{modifier}` is not known here"));
        }
        let weak = s.modifiers.iter().any(|modifier| matches!(*modifier, "acq_rel" | "acquire" | "release"));
        self.emit_for(s, Op::Fence { sequential: !weak });
        Ok(())
    }

    fn cluster_barrier(&mut self, s: &mut Statement<'_>) -> Result {
        let arrive = s.require("`.arrive` or `.wait`", &[("arrive", true), ("wait", false)])?;
        s.choose(&[("acquire", ()), ("release", ()), ("relaxed", ())]);
        s.flag("aligned");
        s.finish(0..=0)?;
        self.emit_for(s, if arrive { Op::ClusterArrive } else { Op::ClusterWait });
        Ok(())
    }

    fn block_barrier(&mut self, s: &mut Statement<'_>) -> Result {
        s.choose(&SCOPES[..1]);
        s.flag("aligned");
        if s.flag("red") {
            return self.reducing_barrier(s);
        }
        let waits = s.require("`.sync`, `.arrive` or `.red`", &[("sync", true), ("arrive", false)])?;
        s.finish(if waits { 1..=2 } else { 2..=2 })?;
        self.check_barrier(s, 0)?;
        let id = self.source(s, 0, Type::U32)?;
        let threads = if s.args.len() > 1 { Some(self.source(s, 1, Type::U32)?) } else { None };
        self.emit_for(s, Op::Barrier(Box::new(Barrier { id, threads, waits, reduction: None })));
        Ok(())
    }

    fn reducing_barrier(&mut self, s: &mut Statement<'_>) -> Result {
        let op = s.require("an operation", &[("popc", 0), ("and", 1), ("or", 2)])?;
        s.maybe_ty();
        s.finish(3..=4)?;
        let value = self.condition(s, s.args.len() - 1)?;
        let reduction = Some(match op {
            0 => BarrierReduction::PopCount { to: self.target(s, 0, Type::U32)?, value },
            1 => BarrierReduction::All { to: self.predicate_target(s, 0)?, value },
            _ => BarrierReduction::Any { to: self.predicate_target(s, 0)?, value },
        });
        self.check_barrier(s, 1)?;
        let id = self.source(s, 1, Type::U32)?;
        let threads = if s.args.len() > 3 { Some(self.source(s, 2, Type::U32)?) } else { None };
        self.emit_for(s, Op::Barrier(Box::new(Barrier { id, threads, waits: true, reduction })));
        Ok(())
    }

    /// Checks a barrier's number and thread count as far as they are constants.
    fn check_barrier(&self, s: &Statement<'_>, first: usize) -> Result {
        match s.args.get(first) {
            Some(Arg::Integer(id)) if *id > 15 => return s.error(format!("barrier {id} does not exist")),
            _ => {}
        }
        match s.args.get(first + 1) {
            Some(Arg::Integer(threads)) if *threads == 0 || !threads.is_multiple_of(32) => {
                s.error("the number of threads is no multiple of the warp size")
            }
            _ => Ok(()),
        }
    }

    /// The predicate of `d|p`, where there is one.
    pub(super) fn pair(&self, s: &Statement<'_>) -> Option<(Arg, Arg)> {
        match s.args.first() {
            Some(Arg::Pair(pair)) => Some((pair.0.clone(), pair.1.clone())),
            _ => None,
        }
    }
}
