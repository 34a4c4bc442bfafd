//! Special registers.

use std::time::{SystemTime, UNIX_EPOCH};

use super::block::Env;
use super::warp::Warp;
use crate::ir::{LANES, Row, Special};

/// Multiprocessors that `%nsmid` reports: those of an H100 SXM. Blocks say in turn that they run on one of them.
const MULTIPROCESSORS: u64 = 132;

/// Warps that a multiprocessor holds (`%nwarpid`).
const RESIDENT_WARPS: u64 = 64;

impl Warp {
    pub(super) fn special(&self, env: &Env<'_>, special: Special) -> Row {
        let kernel = env.kernel;
        let mut row = [0; LANES];
        for (lane, value) in row.iter_mut().enumerate() {
            let bit = 1u64 << lane;
            *value = match special {
                Special::Tid(i) => u64::from(self.thread_index(kernel, lane)[i]),
                Special::LaneId => lane as u64,
                Special::LaneMaskEq => bit,
                Special::LaneMaskLt => bit - 1,
                Special::LaneMaskLe => bit | (bit - 1),
                Special::LaneMaskGe => !(bit - 1) & 0xffff_ffff,
                Special::LaneMaskGt => !(bit | (bit - 1)) & 0xffff_ffff,
                _ => return [self.uniform_special(env, special); LANES],
            };
        }
        row
    }

    /// A special register that is the same in all lanes.
    fn uniform_special(&self, env: &Env<'_>, special: Special) -> u64 {
        let kernel = env.kernel;
        let index = env.block.index;
        let ticks = || kernel.start.elapsed().as_nanos() as u64;
        let linear = |index: [u32; 3], size: [u32; 3]| {
            let [x, y, z] = index.map(u64::from);
            let [width, height, _] = size.map(u64::from);
            (z * height + y) * width + x
        };
        match special {
            Special::Ntid(i) => u64::from(kernel.block[i]),
            Special::CtaId(i) => u64::from(index[i]),
            Special::NctaId(i) => u64::from(kernel.grid[i]),
            Special::WarpId => u64::from(self.index),
            Special::NumWarps => RESIDENT_WARPS,
            Special::SmId => linear(index, kernel.grid) % MULTIPROCESSORS,
            Special::NumSms => MULTIPROCESSORS,
            Special::GridId => kernel.grid_id,
            // A clock of 1 GHz.
            Special::Clock => ticks() & 0xffff_ffff,
            Special::ClockHigh => ticks() >> 32,
            Special::Clock64 => ticks(),
            Special::GlobalTimer => global_timer(),
            Special::GlobalTimerLow => global_timer() & 0xffff_ffff,
            Special::GlobalTimerHigh => global_timer() >> 32,
            Special::DynamicSharedBytes => u64::from(kernel.dynamic_shared_bytes),
            Special::TotalSharedBytes => u64::from(kernel.shared_bytes),
            Special::ClusterId(i) => u64::from(index[i] / kernel.cluster[i]),
            Special::NumClusters(i) => u64::from(kernel.grid[i] / kernel.cluster[i]),
            Special::ClusterCtaId(i) => u64::from(index[i] % kernel.cluster[i]),
            Special::ClusterNumCtas(i) => u64::from(kernel.cluster[i]),
            Special::ClusterCtaRank => u64::from(env.block.rank),
            Special::ClusterSize => u64::from(kernel.cluster_size()),
            Special::IsExplicitCluster => u64::from(kernel.cluster_size() > 1),
            _ => 0,
        }
    }
}

/// Nanoseconds, as `%globaltimer` counts them.
fn global_timer() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_nanos() as u64)
}
