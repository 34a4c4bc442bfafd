//! Which GPUs a restore takes.
//!
//! The driver records every GPU of the machine when it is initialised, also those that `CUDA_VISIBLE_DEVICES` hides
//! (cuda-python pull request 1983). A restore without pairs takes the GPUs at the same places of the machine's order,
//! whichever they are (cuda-checkpoint issues 48, 54). Pairs name each recorded GPU and the one that takes its place, which
//! is of the same type (CUDA driver API reference, cuCheckpointProcessRestore).

use cuda_abi::sys::CUresult;
use parking_lot::Mutex;
use simcuda_machine::Gpu;

use super::wire::Pair;
use crate::error::Result;
use crate::{memory, process};

/// A recorded GPU, and its place in the machine's order.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Recorded {
    place: usize,
    gpu: Gpu,
}

static RECORDED: Mutex<Vec<Recorded>> = Mutex::new(Vec::new());

/// Records the machine's GPUs.
pub(super) fn record(gpus: Vec<Gpu>) {
    *RECORDED.lock() = gpus.into_iter().enumerate().map(|(place, gpu)| Recorded { place, gpu }).collect();
}

/// The recorded GPUs, and those that take their places.
#[derive(Debug)]
pub(super) struct Plan(Vec<(Recorded, Option<Recorded>)>);

/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` for pairs that are none; nothing has changed then.
pub(super) fn plan(pairs: &[Pair]) -> Result<Plan> {
    let machine = process::gpus_of(&process::machine()?.config)?;
    plan_for(&RECORDED.lock(), &machine, pairs)
}

fn plan_for(recorded: &[Recorded], machine: &[Gpu], pairs: &[Pair]) -> Result<Plan> {
    const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;
    let at = |place: usize| machine.get(place).map(|gpu| Recorded { place, gpu: gpu.clone() });
    let successor = |old: &Recorded| {
        if pairs.is_empty() {
            return Ok(at(old.place).filter(|new| new.gpu.name == old.gpu.name));
        }
        let new_uuid = pairs.iter().find(|pair| pair[0] == old.gpu.uuid).ok_or(INVALID)?[1];
        let new = machine.iter().position(|gpu| gpu.uuid == new_uuid && gpu.name == old.gpu.name);
        Ok(Some(new.and_then(at).ok_or(INVALID)?))
    };
    let plan: Vec<_> =
        recorded.iter().map(|old| Ok((old.clone(), successor(old)?))).collect::<Result<_>>()?;
    let mut new: Vec<_> = pairs.iter().map(|pair| pair[1]).collect();
    new.sort_unstable();
    new.dedup();
    let is_one_to_one = pairs.is_empty() || (new.len() == recorded.len() && pairs.len() == recorded.len());
    if is_one_to_one { Ok(Plan(plan)) } else { Err(INVALID) }
}

impl Plan {
    /// Puts the new GPUs in the places of the old ones.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_DEVICE` if a device of the process has no successor, else as [`memory::use_gpus`].
    pub(super) fn carry_out(self) -> Result {
        let machine = process::machine()?;
        let mut devices = Vec::new();
        for device in &machine.devices {
            let uuid = device.gpu().uuid;
            let of_device = self.0.iter().find(|(old, _)| old.gpu.uuid == uuid);
            let new = of_device.and_then(|(_, new)| new.clone());
            devices.push(new.ok_or(CUresult::CUDA_ERROR_INVALID_DEVICE)?.gpu);
        }
        if !machine.devices.iter().zip(&devices).all(|(device, gpu)| device.gpu() == *gpu) {
            memory::use_gpus(&machine.config, devices.iter())?;
        }
        for (device, gpu) in machine.devices.iter().zip(devices) {
            device.become_gpu(gpu);
        }
        *RECORDED.lock() = self.0.into_iter().map(|(old, new)| new.unwrap_or(old)).collect();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(id: u8, name: &str) -> Gpu {
        Gpu { id: id.into(), memory_bytes: 1, name: name.into(), uuid: [id; 16] }
    }

    fn recorded(gpus: &[Gpu]) -> Vec<Recorded> {
        gpus.iter().cloned().enumerate().map(|(place, gpu)| Recorded { place, gpu }).collect()
    }

    fn pair(old: u8, new: u8) -> Pair {
        [[old; 16], [new; 16]]
    }

    /// The IDs of the successors.
    fn successors(old: &[Gpu], machine: &[Gpu], pairs: &[Pair]) -> Result<Vec<Option<usize>>> {
        let plan = plan_for(&recorded(old), machine, pairs)?;
        Ok(plan.0.into_iter().map(|(_, new)| new.map(|new| new.gpu.id)).collect())
    }

    #[test]
    fn pairs_name_each_recorded_gpu_once_on_either_side() {
        let two = [gpu(1, "A"), gpu(2, "A")];
        assert_eq!(successors(&two, &two, &[pair(1, 1), pair(2, 2)]), Ok(vec![Some(1), Some(2)]));
        assert_eq!(successors(&two, &two, &[pair(2, 1), pair(1, 2)]), Ok(vec![Some(2), Some(1)]));
        let other = [gpu(3, "A"), gpu(4, "B"), gpu(5, "A")];
        assert_eq!(successors(&two, &other, &[pair(1, 5), pair(2, 3)]), Ok(vec![Some(5), Some(3)]));
        for bad in [
            &[pair(1, 3)][..],
            &[pair(1, 3), pair(2, 3)],
            &[pair(1, 3), pair(1, 5)],
            &[pair(1, 3), pair(2, 4)],
            &[pair(1, 3), pair(2, 9)],
            &[pair(1, 3), pair(2, 5), pair(2, 5)],
        ] {
            assert_eq!(successors(&two, &other, bad), Err(CUresult::CUDA_ERROR_INVALID_VALUE), "{bad:?}");
        }
    }

    #[test]
    fn without_pairs_the_place_decides() {
        let two = [gpu(1, "A"), gpu(2, "A")];
        assert_eq!(successors(&two, &[gpu(2, "A"), gpu(7, "A")], &[]), Ok(vec![Some(2), Some(7)]));
        assert_eq!(successors(&two, &[gpu(2, "A")], &[]), Ok(vec![Some(2), None]));
        assert_eq!(successors(&two, &[gpu(1, "B"), gpu(2, "A")], &[]), Ok(vec![None, Some(2)]));
    }
}
