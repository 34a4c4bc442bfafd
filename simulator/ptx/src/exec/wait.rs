//! Lanes that wait: at barriers of the block and of the cluster, and for other lanes of the warp.

use super::block::Env;
use super::step::Flow;
use super::warp::Warp;
use crate::compute::lanes;
use crate::error::Fault;
use crate::ir::{Barrier, BarrierReduction, Op, Source, WarpOp};

impl Warp {
    /// `bar.sync`, `bar.arrive`, `bar.red`.
    pub(super) fn barrier(
        &mut self,
        env: &mut Env<'_>,
        barrier: &Barrier,
        mask: u32,
        line: u32,
    ) -> Result<Flow, Fault> {
        let kernel = env.kernel;
        let ids = *self.row(kernel, barrier.id);
        let threads = barrier.threads.map(|threads| *self.row(kernel, threads));
        let holds = match &barrier.reduction {
            None => 0,
            Some(
                BarrierReduction::PopCount { value, .. }
                | BarrierReduction::All { value, .. }
                | BarrierReduction::Any { value, .. },
            ) => self.condition(*value),
        };
        self.settle(self.active & !mask, self.at.pc + 1);
        let after = if barrier.waits { self.at.pc } else { self.at.pc + 1 };
        self.settle(mask, after);
        let mut rest = mask;
        while rest != 0 {
            // Lanes that name the same barrier arrive together.
            let lane = rest.trailing_zeros() as usize;
            let id = ids[lane] & 0xffff_ffff;
            let count = threads.map(|threads| threads[lane] as u32);
            let group = lanes(rest).filter(|l| ids[*l] & 0xffff_ffff == id).fold(0, |m, l| m | 1 << l);
            rest &= !group;
            let generation = if id < 16 { env.block.barriers.generation(id as usize) } else { 0 };
            let warp = self.index as usize;
            if let Err(reason) = env.block.barriers.arrive(id, count, warp, group, holds) {
                return Err(self.illegal(env, lane, line, reason));
            }
            if barrier.waits {
                self.ready &= !group;
                self.at_barrier |= group;
                for lane in lanes(group) {
                    self.waits_for[lane] = (id as usize, generation);
                }
            }
        }
        Ok(Flow::Parted)
    }

    pub(super) fn cluster_arrive(&mut self, env: &mut Env<'_>, mask: u32) {
        for lane in lanes(mask) {
            self.cluster_generation[lane] = env.cluster.generation;
        }
        env.cluster.arrive(mask.count_ones());
    }

    pub(super) fn cluster_wait(&mut self, env: &mut Env<'_>, mask: u32) -> Flow {
        let waiting = lanes(mask)
            .filter(|lane| self.cluster_generation[*lane] == env.cluster.generation)
            .fold(0, |waiting, lane| waiting | 1 << lane);
        if waiting == 0 {
            return Flow::Next;
        }
        self.settle(self.active & !waiting, self.at.pc + 1);
        self.settle(waiting, self.at.pc);
        self.ready &= !waiting;
        self.at_cluster |= waiting;
        Flow::Parted
    }

    /// An operation of several lanes: done at once if all of them are here, else each waits for the others.
    pub(super) fn warp_op(
        &mut self,
        env: &mut Env<'_>,
        op: &WarpOp,
        members: Option<Source>,
        mask: u32,
    ) -> Flow {
        let Some(members) = members else {
            self.lay_down(env, op, mask);
            self.conclude(env, op, mask, mask);
            return Flow::Next;
        };
        let members = *self.row(env.kernel, members);
        let first = mask.trailing_zeros() as usize;
        let named = members[first] as u32 | mask;
        let alike = lanes(mask).all(|lane| members[lane] as u32 == members[first] as u32);
        if alike && named & self.live & !mask == 0 {
            self.lay_down(env, op, mask);
            self.conclude(env, op, mask, mask);
            return Flow::Next;
        }
        self.lay_down(env, op, mask);
        self.settle(self.active & !mask, self.at.pc + 1);
        self.settle(mask, self.at.pc);
        for lane in lanes(mask) {
            self.members[lane] = members[lane] as u32;
        }
        self.ready &= !mask;
        self.at_warp_op |= mask;
        Flow::Parted
    }

    /// Resumes the lanes whose wait has ended.
    pub(super) fn wake(&mut self, env: &mut Env<'_>) -> Result<(), Fault> {
        if self.at_barrier != 0 {
            let woken = lanes(self.at_barrier)
                .filter(|lane| {
                    let (id, generation) = self.waits_for[*lane];
                    env.block.barriers.generation(id) != generation
                })
                .fold(0, |woken, lane| woken | 1 << lane);
            self.at_barrier &= !woken;
            for lane in lanes(woken) {
                self.leave_barrier(env, lane);
            }
            self.ready |= woken;
        }
        if self.at_cluster != 0 {
            let woken = lanes(self.at_cluster)
                .filter(|lane| self.cluster_generation[*lane] != env.cluster.generation)
                .fold(0, |woken, lane| woken | 1 << lane);
            self.at_cluster &= !woken;
            for lane in lanes(woken) {
                self.positions[lane].pc += 1;
            }
            self.ready |= woken;
        }
        if self.at_warp_op != 0 {
            self.wake_members(env);
        }
        Ok(())
    }

    /// Gives a lane the result of the barrier that it waited at, and sends it on.
    fn leave_barrier(&mut self, env: &Env<'_>, lane: usize) {
        self.at = self.positions[lane];
        self.positions[lane].pc += 1;
        let Op::Barrier(barrier) = &env.kernel.module.code[self.at.pc as usize].op else {
            return;
        };
        let tally = env.block.barriers.result(self.waits_for[lane].0);
        let holds = |condition: bool| if condition { u32::MAX } else { 0 };
        match &barrier.reduction {
            None => {}
            Some(BarrierReduction::PopCount { to, .. }) => {
                self.write(*to, 1 << lane, |_| u64::from(tally.holds));
            }
            Some(BarrierReduction::All { to, .. }) => {
                self.set_predicate(*to, 1 << lane, holds(tally.holds == tally.threads));
            }
            Some(BarrierReduction::Any { to, .. }) => {
                self.set_predicate(*to, 1 << lane, holds(tally.holds > 0));
            }
        }
    }

    /// Concludes the operations whose members have all arrived.
    fn wake_members(&mut self, env: &Env<'_>) {
        let mut rest = self.at_warp_op;
        while rest != 0 {
            let lane = rest.trailing_zeros() as usize;
            let named = self.members[lane];
            let together = lanes(self.at_warp_op)
                .filter(|other| self.members[*other] == named)
                .fold(0, |mask, other| mask | 1 << other);
            rest &= !together;
            if named & self.live & !together != 0 {
                continue;
            }
            self.at_warp_op &= !together;
            self.ready |= together;
            // They may stand at different instructions: each group of them has its own result registers.
            let mut left = together;
            while left != 0 {
                self.at = self.positions[left.trailing_zeros() as usize];
                let group = lanes(left)
                    .filter(|other| self.positions[*other] == self.at)
                    .fold(0, |mask, other| mask | 1 << other);
                left &= !group;
                if let Op::Warp { op, .. } = &env.kernel.module.code[self.at.pc as usize].op {
                    self.conclude(env, op, group, together);
                }
                self.settle(group, self.at.pc + 1);
            }
        }
    }
}
