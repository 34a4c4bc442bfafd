//! One instruction for the lanes of a group.

use std::sync::atomic::{Ordering, fence};

use super::block::Env;
use super::warp::Warp;
use crate::arith::int::{self, IntType};
use crate::compute::lanes;
use crate::error::Fault;
use crate::ir::{Instruction, LANES, Op, Source};
use crate::space::{self, SHARED_STRIDE};
use crate::types::AddressSpace;

/// Where the group continues.
pub(super) enum Flow {
    /// At the next instruction.
    Next,
    /// All lanes at another one.
    Jump(u32),
    /// At the next one, after the other warps had their turn.
    Pause,
    /// Lanes went different ways, or wait: each has its position.
    Parted,
}

impl Warp {
    pub(super) fn step(
        &mut self,
        env: &mut Env<'_>,
        instruction: &Instruction,
        mask: u32,
    ) -> Result<Flow, Fault> {
        if mask == 0 {
            return Ok(Flow::Next);
        }
        let kernel = env.kernel;
        let line = instruction.line;
        match &instruction.op {
            Op::Map1 { f, to, a } => self.compute(kernel, *to, mask, [*a; 3], |out, [a, ..]| f(out, a, mask)),
            Op::Map2 { f, to, a, b } => {
                self.compute(kernel, *to, mask, [*a, *b, *b], |out, [a, b, _]| f(out, a, b, mask));
            }
            Op::Map3 { f, to, a, b, c } => {
                self.compute(kernel, *to, mask, [*a, *b, *c], |out, [a, b, c]| f(out, a, b, c, mask));
            }
            Op::Move { to, a } => {
                let value = *self.row(kernel, *a);
                self.write(*to, mask, |lane| value[lane]);
            }
            Op::Compare { f, to, inverse, a, b, with } => {
                let holds = f(self.row(kernel, *a), self.row(kernel, *b));
                let joined = |holds: u32| with.map_or(holds, |(op, c)| op.apply(holds, self.condition(c)));
                let (holds, fails) = (joined(holds), joined(!holds));
                if let Some(to) = to {
                    self.set_predicate(*to, mask, holds);
                }
                if let Some(inverse) = inverse {
                    self.set_predicate(*inverse, mask, fails);
                }
            }
            Op::Select { to, a, b, condition } => {
                let (a, b) = (*self.row(kernel, *a), *self.row(kernel, *b));
                let condition = self.condition(*condition);
                self.write(*to, mask, |lane| if condition >> lane & 1 != 0 { a[lane] } else { b[lane] });
            }
            Op::Logic { op, to, a, b } => {
                let value = op.apply(self.condition(*a), self.condition(*b));
                self.set_predicate(*to, mask, value);
            }
            Op::Load(load) => self.load(env, load, mask, line)?,
            Op::Store(store) => self.store(env, store, mask, line)?,
            Op::Atomic(atomic) => self.atomic(env, atomic, mask, line)?,
            Op::Multimem(access) => self.multimem(env, access, mask, line)?,
            Op::Branch { target } => return Ok(self.branch(mask, *target)),
            Op::BranchTable { index, targets } => return self.branch_table(env, *index, targets, mask, line),
            Op::Call(call) => return self.call(env, call, mask, line),
            Op::Return => return self.return_lanes(env, mask, line),
            Op::Exit => return Ok(self.exit(env, mask)),
            Op::Trap => {
                return Err(Fault::Trap { line, site: self.site(env, mask.trailing_zeros() as usize) });
            }
            Op::Warp { op, members } => return Ok(self.warp_op(env, op, *members, mask)),
            Op::Barrier(barrier) => return self.barrier(env, barrier, mask, line),
            Op::ClusterArrive => self.cluster_arrive(env, mask),
            Op::ClusterWait => return Ok(self.cluster_wait(env, mask)),
            Op::Fence { sequential } => {
                fence(if *sequential { Ordering::SeqCst } else { Ordering::AcqRel });
            }
            Op::Mbarrier { op, space, address } => {
                return self.mbarrier(env, *op, *space, *address, mask, line);
            }
            Op::Yield => return Ok(Flow::Pause),
            Op::Nop => {}
            other => self.rare(env, other, mask, line)?,
        }
        Ok(Flow::Next)
    }

    /// Instructions whose speed does not matter.
    fn rare(&mut self, env: &mut Env<'_>, op: &Op, mask: u32, line: u32) -> Result<(), Fault> {
        let kernel = env.kernel;
        match op {
            Op::Pack { to, parts, bits } => {
                let mut value = [0; LANES];
                for (position, part) in parts.iter().enumerate() {
                    let part = self.row(kernel, *part);
                    for lane in 0..LANES {
                        value[lane] |= (part[lane] & low_bits(*bits)) << (position as u32 * bits);
                    }
                }
                self.write(*to, mask, |lane| value[lane]);
            }
            Op::Unpack { parts, a, bits } => {
                let value = *self.row(kernel, *a);
                for (position, part) in parts.iter().enumerate() {
                    if let Some(to) = part {
                        let shift = position as u32 * bits;
                        self.write(*to, mask, |lane| value[lane] >> shift & low_bits(*bits));
                    }
                }
            }
            Op::Carry { to, a, b, bits, subtract, carry_in, carry_out } => {
                self.add_with_carry(env, *to, [*a, *b], (*bits, *subtract), [*carry_in, *carry_out], mask);
            }
            Op::ReadSpecial { to, special } => {
                let value = self.special(env, *special);
                self.write(*to, mask, |lane| value[lane]);
            }
            Op::ReadActiveMask { to } => self.write(*to, mask, |_| u64::from(mask)),
            Op::TakeAddress { to, address, space } => {
                let (_, addresses) = self.addresses_or_fault(env, *address, *space, mask, line)?;
                // A parameter of a function lives in the frame; its address says that it is in `.param`.
                let framed = *space == AddressSpace::Param && matches!(address.base, crate::ir::Base::Frame);
                let bias = if framed { space::PARAM_FRAME } else { 0 };
                self.write(*to, mask, |lane| addresses[lane] + bias);
            }
            Op::AsyncCopy { to, from, bytes, present, skip } => {
                let mask = mask & !skip.map_or(0, |skip| self.condition(skip));
                let to = self.addresses_or_fault(env, *to, AddressSpace::Shared, mask, line)?;
                let from = self.addresses_or_fault(env, *from, AddressSpace::Global, mask, line)?;
                let present = match present {
                    Some(present) => self.row(kernel, *present).map(|bytes| bytes & 0xffff_ffff),
                    None => [u64::from(*bytes); LANES],
                };
                if let Err(trouble) = self.copy(env, [to, from], &present, *bytes, mask) {
                    return Err(self.fault(env, trouble, line));
                }
            }
            other => self.windows_op(env, other, mask),
        }
        Ok(())
    }

    /// Generic addresses and the windows in them.
    fn windows_op(&mut self, env: &Env<'_>, op: &Op, mask: u32) {
        let kernel = env.kernel;
        match op {
            Op::ToGeneric { to, a, space } => {
                let a = *self.row(kernel, *a);
                self.write(*to, mask, |lane| space::to_generic(a[lane], *space));
            }
            Op::FromGeneric { to, a, space } => {
                let a = *self.row(kernel, *a);
                self.write(*to, mask, |lane| space::from_generic(a[lane], *space));
            }
            Op::IsSpace { to, a, space } => {
                let a = *self.row(kernel, *a);
                let rank = env.block.rank;
                let mut holds = 0;
                for lane in lanes(mask) {
                    let (actual, inside) = space::classify(a[lane]);
                    let holds_here = match (space, actual) {
                        (AddressSpace::Const, _) => env.kernel.image.is_const(a[lane]),
                        (AddressSpace::Shared, AddressSpace::SharedCluster) => {
                            matches!(inside / SHARED_STRIDE, 0)
                                || inside / SHARED_STRIDE == u64::from(rank) + 1
                        }
                        (space, actual) => *space == actual,
                    };
                    holds |= u32::from(holds_here) << lane;
                }
                self.set_predicate(*to, mask, holds);
            }
            Op::MapShared { to, a, rank, generic } => {
                let (a, rank) = (*self.row(kernel, *a), *self.row(kernel, *rank));
                self.write(*to, mask, |lane| {
                    let inside =
                        if *generic { space::from_generic(a[lane], AddressSpace::Shared) } else { a[lane] };
                    let mapped = inside % SHARED_STRIDE + ((rank[lane] & 0xff) + 1) * SHARED_STRIDE;
                    if *generic { space::to_generic(mapped, AddressSpace::SharedCluster) } else { mapped }
                });
            }
            Op::SharedRank { to, a, generic } => {
                let a = *self.row(kernel, *a);
                let own = u64::from(env.block.rank);
                self.write(*to, mask, |lane| {
                    let inside =
                        if *generic { space::from_generic(a[lane], AddressSpace::Shared) } else { a[lane] };
                    (inside / SHARED_STRIDE).checked_sub(1).unwrap_or(own)
                });
            }
            _ => unreachable!("every other operation is dealt with before"),
        }
    }

    fn branch(&mut self, mask: u32, target: u32) -> Flow {
        if mask == self.active {
            return Flow::Jump(target);
        }
        self.settle(self.active & !mask, self.at.pc + 1);
        self.settle(mask, target);
        Flow::Parted
    }

    fn branch_table(
        &mut self,
        env: &Env<'_>,
        index: Source,
        targets: &[u32],
        mask: u32,
        line: u32,
    ) -> Result<Flow, Fault> {
        let index = *self.row(env.kernel, index);
        self.settle(self.active & !mask, self.at.pc + 1);
        for lane in lanes(mask) {
            let chosen = index[lane] & 0xffff_ffff;
            let Some(target) = targets.get(chosen as usize) else {
                let site = self.site(env, lane);
                return Err(Fault::InvalidProgramCounter { target: chosen, line, site });
            };
            self.settle(1 << lane, *target);
        }
        Ok(Flow::Parted)
    }

    pub(super) fn exit(&mut self, env: &mut Env<'_>, mask: u32) -> Flow {
        self.settle(self.active & !mask, self.at.pc + 1);
        self.live &= !mask;
        self.ready &= !mask;
        env.block.barriers.exit(self.index as usize, mask);
        env.cluster.exit(mask.count_ones());
        Flow::Parted
    }

    fn add_with_carry(
        &mut self,
        env: &Env<'_>,
        to: u32,
        [a, b]: [Source; 2],
        (bits, subtract): (u32, bool),
        [carry_in, carry_out]: [Option<u32>; 2],
        mask: u32,
    ) {
        let (a, b) = (*self.row(env.kernel, a), *self.row(env.kernel, b));
        let carry =
            carry_in.map(|index| self.condition(crate::ir::Condition::Predicate { index, negated: false }));
        let ty = IntType { bits, signed: false };
        let apply = if subtract { int::sub_borrow } else { int::add_carry };
        let mut carries = 0;
        let mut sums = [0; LANES];
        for lane in lanes(mask) {
            let carry = carry.is_some_and(|carry| carry >> lane & 1 != 0);
            let (sum, carry) = apply(a[lane], b[lane], carry, ty);
            carries |= u32::from(carry) << lane;
            sums[lane] = sum;
        }
        self.write(to, mask, |lane| sums[lane]);
        if let Some(carry_out) = carry_out {
            self.set_predicate(carry_out, mask, carries);
        }
    }
}

fn low_bits(bits: u32) -> u64 {
    u64::MAX >> (64 - bits)
}
