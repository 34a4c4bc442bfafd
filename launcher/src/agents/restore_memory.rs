//! What the driver's restores take of the GPUs: measured before the checkpoint, waited for before the restore.
//!
//! A restore that runs out of device memory makes its process unusable for good (cuda-checkpoint issue 44). While the
//! processes are detached, others may take their memory. So the first agent that is attached again waits, for all of them
//! together, until each GPU has enough free memory: each for itself could take what another one has been promised.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Instant;

use ckpt_protocol::agent::{DriverMemory, GpuPair, GpuReport, Region, ToAgent};
use ckpt_protocol::frame::FrameError;
use ckpt_snapshot::GpuRecord;

use super::stream::AgentStream;
use super::{Agents, Quiesced, Shared};
use crate::sys::gpus::{GpuNeed, Gpus};

/// What the processes that are detached will take.
#[derive(Debug, Default)]
pub(super) struct RestoreMemory {
    needs: Vec<GpuNeed>,
    /// Whether there is enough, once that is known. If not: why not.
    outcome: Option<Result<(), String>>,
}

/// Which GPUs a process is restored on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Placement {
    /// Which takes the place of which; empty if all are the same.
    pub pairs: Vec<GpuPair>,
    /// The UUIDs that the driver knows in the process after the restore.
    pub known: Vec<String>,
    /// What the restore takes.
    pub needs: Vec<GpuNeed>,
}

/// What the GPUs of restored processes were and are, by the processes' IDs in the job's PID namespace.
#[derive(Debug, Default)]
pub(super) struct Migrations {
    /// For the processes that have not returned yet.
    pairs: BTreeMap<u32, Vec<GpuPair>>,
    /// The GPUs that the driver knows in a process. In one that was not restored on others, it knows the machine's.
    known: BTreeMap<u32, Vec<String>>,
}

impl Migrations {
    pub fn take_pairs(&mut self, pid: u32) -> Vec<GpuPair> {
        self.pairs.remove(&pid).unwrap_or_default()
    }

    /// Another process has this ID now.
    pub fn forget(&mut self, pid: u32) {
        self.known.remove(&pid);
    }
}

/// The regions of a device's own memory.
fn regions_on(report: &GpuReport, device: i32) -> impl Iterator<Item = &Region> {
    report.regions.iter().filter(move |region| region.device == device && !region.flags.is_of_host)
}

/// What attaching a process takes, by its report. What the launcher keeps meanwhile stays on the GPU.
fn needs_of(report: &GpuReport) -> impl Iterator<Item = GpuNeed> {
    report.gpus.iter().map(|gpu| {
        let gone = regions_on(report, gpu.device)
            .filter(|region| !region.flags.is_parked && !region.flags.is_shared);
        let captured_bytes = gone.map(|region| region.bytes).fold(0, u64::saturating_add);
        let bytes = captured_bytes.saturating_add(gpu.driver_bytes.unwrap_or(0));
        GpuNeed { uuid: gpu.uuid.clone(), bytes }
    })
}

impl Agents {
    /// The GPUs that the driver knows in a process, with what the process takes of each by its report.
    fn records(&self, pid: Option<u32>, report: &GpuReport, machine: &Gpus) -> Vec<GpuRecord> {
        let migrations = self.shared.migrations.lock();
        let known = pid.and_then(|pid| migrations.known.get(&pid));
        let gpus = machine.gpus.iter().filter(|gpu| known.is_none_or(|known| known.contains(&gpu.uuid)));
        let record = |gpu: &crate::sys::gpus::Gpu| {
            let used = report.gpus.iter().find(|used| used.uuid == gpu.uuid);
            let regions = used.into_iter().flat_map(|used| regions_on(report, used.device));
            GpuRecord {
                uuid: gpu.uuid.clone(),
                name: gpu.name.clone(),
                memory_bytes: gpu.memory_bytes,
                captured_bytes: regions.map(|region| region.bytes).fold(0, u64::saturating_add),
                driver_bytes: used.and_then(|used| used.driver_bytes),
            }
        };
        gpus.map(record).collect()
    }

    /// Adds the GPUs that the driver knows in each process.
    pub(super) fn with_gpus(&self, mut quiesced: Quiesced, machine: Option<&Gpus>) -> Quiesced {
        for one in &mut quiesced.gpu {
            let records = machine.map(|machine| self.records(one.process.pid, &one.report, machine));
            one.gpus = records.unwrap_or_default();
        }
        quiesced
    }

    /// Sets where processes are about to be restored.
    pub(super) fn place(&self, placements: BTreeMap<u32, Placement>) {
        let (mut memory, mut migrations) = (self.shared.restore_memory.lock(), self.shared.migrations.lock());
        for (pid, placement) in placements {
            memory.needs.extend(placement.needs);
            migrations.pairs.insert(pid, placement.pairs);
            migrations.known.insert(pid, placement.known);
        }
    }
}

impl Shared {
    /// Forgets what earlier restores took: all processes have returned.
    pub(super) fn forget_needs(&self) {
        *self.restore_memory.lock() = RestoreMemory::default();
    }

    pub(super) fn note_needs(&self, report: &GpuReport) {
        self.restore_memory.lock().needs.extend(needs_of(report));
    }

    /// Answers what the driver holds for a process now.
    pub(super) fn measure(&self, id: u64, stream: &AgentStream) -> Result<(), FrameError> {
        let pid = self.lock().connections.get(&id).and_then(|connection| connection.process.host_pid);
        let of_process = |gpu: crate::sys::gpus::Gpu| {
            let process = gpu.processes.iter().find(|process| Some(process.pid) == pid)?;
            Some(DriverMemory { uuid: gpu.uuid, bytes: process.bytes })
        };
        let gpus = self.gpus.look().map(|machine| machine.gpus).unwrap_or_default();
        stream.send(&ToAgent::Measured { gpus: gpus.into_iter().filter_map(of_process).collect() })
    }

    /// Waits until all processes that are detached can be restored. All agents get the same answer.
    ///
    /// # Errors
    /// There is too little free memory for too long; says on which GPU.
    pub(super) fn await_restore_memory(&self) -> Result<(), String> {
        let mut memory = self.restore_memory.lock();
        if let Some(outcome) = &memory.outcome {
            return outcome.clone();
        }
        let is_cancelled = || self.is_closed.load(Ordering::Relaxed);
        let until = Instant::now() + self.gpu_timeout;
        let outcome = self.gpus.await_free_memory(&memory.needs, until, &is_cancelled);
        memory.outcome.insert(outcome.map_err(|shortage| shortage.to_string())).clone()
    }
}

#[cfg(test)]
mod tests {
    use ckpt_protocol::agent::{GpuUse, RegionFlags, RegionKind};

    use super::super::tests::{LONG, socket_dir};
    use super::*;
    use crate::sys::gpus::tests::machine;

    fn region(device: i32, bytes: u64, flags: RegionFlags) -> Region {
        Region {
            address: 0,
            bytes,
            device,
            kind: RegionKind::Allocation,
            allocations: 1,
            offset: 0,
            changed_bytes: None,
            flags,
            origin: None,
        }
    }

    fn report() -> GpuReport {
        let gpu = |device, uuid: &str, driver_bytes| GpuUse { device, uuid: uuid.into(), driver_bytes };
        let parked = RegionFlags { is_parked: true, ..RegionFlags::default() };
        let shared = RegionFlags { is_shared: true, ..RegionFlags::default() };
        let of_host = RegionFlags { is_of_host: true, ..RegionFlags::default() };
        GpuReport {
            gpus: vec![gpu(0, "GPU-b", Some(7)), gpu(1, "GPU-a", None)],
            regions: vec![
                region(0, 10, RegionFlags::default()),
                region(0, 20, parked),
                region(0, 40, shared),
                region(1, 5, RegionFlags::default()),
                region(1, 80, of_host),
            ],
            ..GpuReport::default()
        }
    }

    /// What is parked or shared stays on the GPU while the job is dumped, and is gone in a resume.
    #[test]
    fn memory_that_stays_on_the_gpu_is_not_needed_again() {
        let needs: Vec<_> = needs_of(&report()).map(|need| (need.uuid, need.bytes)).collect();
        assert_eq!(needs, [("GPU-b".to_owned(), 17), ("GPU-a".to_owned(), 5)]);
        let (_directory, path) = socket_dir();
        let agents = Agents::listen(&path, LONG).expect("listening");
        let machine = machine("580.1", &[("GPU-a", "A", 1), ("GPU-b", "A", 1), ("GPU-c", "A", 1)]);
        let taken = |records: Vec<GpuRecord>| -> Vec<_> {
            records.into_iter().map(|gpu| (gpu.uuid, gpu.captured_bytes, gpu.driver_bytes)).collect()
        };
        let all = taken(agents.records(Some(7), &report(), &machine));
        let wanted = [("GPU-a", 5, None), ("GPU-b", 70, Some(7)), ("GPU-c", 0, None)];
        assert_eq!(all, wanted.map(|(uuid, bytes, driver)| (uuid.to_owned(), bytes, driver)));
        // The driver of a process that was restored on other GPUs knows those only.
        let placement = Placement { known: vec!["GPU-b".into()], ..Placement::default() };
        agents.place(BTreeMap::from([(7, placement)]));
        assert_eq!(taken(agents.records(Some(7), &report(), &machine)).len(), 1);
        assert_eq!(agents.records(Some(8), &report(), &machine).len(), 3);
        agents.shared.migrations.lock().forget(7);
        assert_eq!(agents.records(Some(7), &report(), &machine).len(), 3);
    }
}
