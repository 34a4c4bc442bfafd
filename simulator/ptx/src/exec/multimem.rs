//! Accesses to multimem addresses: one address that stands for the memory of several devices.

use super::access::{Access, Found, Trouble};
use super::block::Env;
use super::warp::Warp;
use crate::compute::lanes;
use crate::error::Fault;
use crate::ir::{Multimem, MultimemOp, Row};
use crate::memory::Cells;
use crate::space::classify;
use crate::types::AddressSpace;

impl Warp {
    pub(super) fn multimem(
        &mut self,
        env: &mut Env<'_>,
        access: &Multimem,
        mask: u32,
        line: u32,
    ) -> Result<(), Fault> {
        let (space, addresses) = self.addresses_or_fault(env, access.address, access.space, mask, line)?;
        for lane in lanes(mask) {
            let team = match team(env, access, (space, &addresses), lane) {
                Ok(team) => team,
                Err(trouble) => return Err(self.fault(env, trouble, line)),
            };
            self.multimem_lane(env, access, &team, lane);
        }
        Ok(())
    }

    /// The devices one after the other, in ascending order: the result is the same each time.
    fn multimem_lane(&mut self, env: &Env<'_>, access: &Multimem, team: &[Cells], lane: usize) {
        let (bytes, order) = (access.bytes, access.order);
        match &access.op {
            MultimemOp::LoadReduce { to, fold } => {
                for (element, to) in (0..).zip(to) {
                    let values: Vec<u64> =
                        team.iter().map(|cells| cells.load(element * bytes, bytes, order)).collect();
                    if let Some(to) = to {
                        self.register_mut(*to)[lane] = fold(&values);
                    }
                }
            }
            MultimemOp::Store { from } => {
                for (element, from) in (0..).zip(from) {
                    let value = self.row(env.kernel, *from)[lane];
                    for cells in team {
                        cells.store(element * bytes, bytes, value, order);
                    }
                }
            }
            MultimemOp::Reduce { with, op } => {
                for (element, with) in (0..).zip(with) {
                    let value = self.row(env.kernel, *with)[lane];
                    for cells in team {
                        op.apply(&mut Found::Device(*cells), (element * bytes, bytes), order, value, 0);
                    }
                }
            }
        }
    }
}

/// The memory of all devices behind a lane's address.
fn team(
    env: &mut Env<'_>,
    multimem: &Multimem,
    (space, addresses): (AddressSpace, &Row),
    lane: usize,
) -> Result<Vec<Cells>, Trouble> {
    let write = !matches!(multimem.op, MultimemOp::LoadReduce { .. });
    let access = Access { space, address: addresses[lane], total_bytes: multimem.align, write, lane };
    let (space, address) = match space {
        AddressSpace::Generic => classify(access.address),
        space => (space, access.address),
    };
    if !address.is_multiple_of(u64::from(multimem.align)) {
        return Err(Trouble { access, misaligned: true });
    }
    // A multimem address is one of global memory (PTX ISA, "multimem").
    let team = match space {
        AddressSpace::Generic | AddressSpace::Global => {
            env.windows.team(env.kernel.memory, address, multimem.align, write)
        }
        _ => None,
    };
    team.ok_or(Trouble { access, misaligned: false })
}
