//! Detaches the process from its GPUs for a dump, and attaches it again.
//!
//! ```text
//!            detach: gate closed, no capture open, device memory captured and released, driver checkpointed
//!   Running ----------------------------------------------------------------------------------------> Detached
//!    ^ ^ |  any step fails: what was done is undone, the process runs on                              |   |
//!    | | +---> Running, or Lost if it cannot be undone                                                |   |
//!    | |                                                                                              |   |
//!    | +----------------------------------------------------------------------------------------------+   |
//!    |       attach: driver restored, device memory back, gate opened                                     |
//!    |                                                                              any step fails        v
//!    |                                                                             ---------------------> Lost
//! ```
//!
//! Device memory is copied to the launcher's mirror and released before the driver is locked, since that needs a
//! working driver. It is restored after the driver has been unlocked. The gate keeps the program out during all of
//! that. Memory without an offset in the mirror stays on the device and is saved by the driver, which is slower.
//!
//! Lost is final: the gate stays closed, so that the program does not see the driver's errors before the launcher
//! ends the job.
//!
//! | module | does |
//! |---|---|
//! | `driver_state` | the driver's own checkpoint |
//! | `pinned_mirror` | the launcher's mirror, pinned |
//! | `transfer` | copies device memory to the mirror and back |
//! | `error` | why that fails |

mod driver_state;
mod error;
mod pinned_mirror;
mod transfer;

use std::sync::atomic::{AtomicU8, Ordering::SeqCst};
use std::time::{Duration, Instant};

use ckpt_protocol::agent::{Capture, GpuReport};
use cuda_abi::sys;
use cuda_abi::types::CUstreamCaptureMode;

use super::activity::{self, Activity};
use super::capture::{CaptureError, Mirror};
use super::context::OnDevice;
use super::driver::DriverError;
use super::memory::offload::{self, Owner};
use super::memory::physical::{Id, registry};
use super::memory::{self, ipc, placement};
use super::{
    address_space, bypass, context, device_files, driver, driver_support, faults, gate, init, objects,
    proc_address, stream_capture, taint, unknown_entry_points,
};
use crate::cuda::activation::is_started;
use crate::link::{Link, describe};
use driver_state::DriverState;
pub use error::{AttachError, DetachError};
pub use pinned_mirror::Delivered;
use pinned_mirror::PinnedMirror;

#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Phase {
    Running,
    Detached,
    Lost,
}

/// Only the agent's thread moves it. No mutex: a fork may come at any time, and the child has an agent too.
static PHASE: AtomicU8 = AtomicU8::new(Phase::Running as u8);

fn phase() -> Phase {
    let code = PHASE.load(SeqCst);
    let phases = [Phase::Running, Phase::Detached];
    phases.into_iter().find(|phase| *phase as u8 == code).unwrap_or(Phase::Lost)
}

fn enter(phase: Phase) {
    PHASE.store(phase as u8, SeqCst);
}

/// The polling interval for the end of a stream capture.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// The state of a process on its GPUs, as far as the agent has to do with it; tests replace it.
pub trait Gpu {
    /// See [`activity::read`].
    fn activity(&self) -> Activity;

    /// How large the mirror has to be for what is on the devices now, in bytes.
    fn mirror_bytes(&mut self) -> u64;

    /// Maps and pins the mirror.
    ///
    /// # Errors
    /// It cannot be mapped.
    fn stage(&mut self, mirror: Delivered) -> Result<(), CaptureError>;

    /// The mirror is not used until it is staged again.
    fn unstage(&mut self);

    /// Whether the state is off the GPU.
    fn is_detached(&self) -> bool;

    /// Takes the state off the GPU; nothing for a process that has none. With `park`, device memory is handed to the
    /// launcher rather than released.
    ///
    /// # Errors
    /// Why the process cannot be dumped now; unless it is lost, it runs on as before.
    fn detach(
        &mut self,
        attempt: u64,
        timeout: Duration,
        park: bool,
        link: &mut dyn Link,
    ) -> Result<Option<GpuReport>, DetachError>;

    /// Takes the state off the GPU without saving it, if the driver has restored it before: the process is about to be
    /// killed. Killing a process that NVIDIA's driver has restored can hang the host (cuda-checkpoint issue 53).
    ///
    /// # Errors
    /// Why it is still there. The process cannot run on in either case.
    fn release(&mut self, timeout: Duration) -> Result<(), DetachError>;

    /// Undoes what has been done of [`Gpu::detach`], and opens the gate.
    ///
    /// # Errors
    /// The process's GPU state is lost.
    fn undo(&mut self, link: &mut dyn Link) -> Result<(), AttachError>;

    /// Brings the state back, in the process that was detached or in one restored from its image; returns how many
    /// bytes were copied back.
    ///
    /// # Errors
    /// The process's GPU state is lost.
    fn attach(&mut self, delivered: Option<Delivered>, link: &mut dyn Link) -> Result<u64, AttachError>;
}

/// The state of this process on its GPUs, which the agent detaches and attaches.
#[derive(Default)]
pub struct ProcessGpu {
    driver: DriverState,
    /// The current mirror, from its staging to its release.
    mirror: Option<PinnedMirror>,
    /// The mirror that was staged last and is not in use. The driver unpins memory only when all work has ended, so
    /// it stays pinned while the program runs.
    kept: Option<PinnedMirror>,
    /// Older mirrors, which are not used again: the file may have been truncated and extended since.
    stale: Vec<PinnedMirror>,
    /// The mirror to which the offsets and hashes of the physical allocations refer.
    mirror_id: u64,
    /// From before the lock until after the unlock, for a process that has no context.
    borrowed: Option<OnDevice>,
    /// The driver has restored the process, or its image, from a checkpoint.
    has_restored: bool,
    /// The driver has refused the last attempt as not supported, which is often for good (MIG, MPS). Until it has not, no
    /// mirror is asked for: that takes as much host memory as there is device memory.
    is_unsupported: bool,
    /// The number of captures that were begun, into any mirror. It is never reset: the launcher would mistake an
    /// older capture for the mirror's content.
    captures: u64,
}

impl Gpu for ProcessGpu {
    fn activity(&self) -> Activity {
        activity::read()
    }

    fn mirror_bytes(&mut self) -> u64 {
        // A process that will be refused needs none.
        let can_be_saved = is_started()
            && phase() == Phase::Running
            && driver_support::check().is_ok()
            && !self.is_unsupported;
        if can_be_saved { placement::place(&mut registry()) } else { 0 }
    }

    fn stage(&mut self, mirror: Delivered) -> Result<(), CaptureError> {
        self.unstage();
        relax();
        if mirror.id != self.mirror_id {
            placement::forget(&mut registry());
            self.stale.extend(self.kept.take());
            self.mirror_id = mirror.id;
        }
        self.mirror = Some(match self.kept.take() {
            Some(mut kept) if kept.mirror.bytes() == mirror.bytes => {
                kept.get_ready();
                kept
            }
            other => {
                self.stale.extend(other);
                PinnedMirror::new(mirror, Mirror::stage)?
            }
        });
        memory::backtrace::resolve_names();
        faults::hit("staged");
        Ok(())
    }

    fn unstage(&mut self) {
        match self.mirror.take() {
            Some(mirror) if mirror.mirror.is_pinned() => self.stale.extend(self.kept.replace(mirror)),
            other => self.stale.extend(other),
        }
    }

    fn is_detached(&self) -> bool {
        phase() == Phase::Detached
    }

    fn detach(
        &mut self,
        attempt: u64,
        timeout: Duration,
        park: bool,
        link: &mut dyn Link,
    ) -> Result<Option<GpuReport>, DetachError> {
        bypass::check()?;
        if !is_started() {
            if !device_files::are_open() {
                return Ok(None);
            }
            // NVML alone: the driver's checkpoint takes its files away too (NVIDIA in cuda-checkpoint's release 570).
            init::start_driver()?;
        }
        match phase() {
            Phase::Running => {}
            Phase::Detached => return Ok(None),
            Phase::Lost => return Err(DetachError::Lost),
        }
        driver_support::check()?;
        let deadline = Instant::now() + timeout;
        let begun = Instant::now();
        close_between_captures(deadline)?;
        faults::hit("detach-gate");
        relax();
        let result = self.take_off(attempt, begun, deadline, park, link);
        let error = match result {
            Ok(report) => {
                self.is_unsupported = false;
                enter(Phase::Detached);
                faults::hit("detach-checkpointed");
                return Ok(Some(report));
            }
            Err(error) => error,
        };
        self.is_unsupported = matches!(error, DetachError::LockUnsupported { .. });
        match self.undo(link) {
            Ok(()) => Err(error),
            Err(undo) => Err(DetachError::NotUndone { error: Box::new(error), undo }),
        }
    }

    fn release(&mut self, timeout: Duration) -> Result<(), DetachError> {
        if phase() != Phase::Running || !self.has_restored {
            return Ok(());
        }
        let deadline = Instant::now() + timeout;
        close_between_captures(deadline)?;
        enter(Phase::Lost);
        self.borrow_context(deadline)?;
        self.drain(deadline)?;
        // What is left on the device would be copied to host memory by the driver.
        let ids: Vec<Id> = registry().allocations.keys().copied().collect();
        offload::release(&ids)?;
        self.driver.lock(deadline)?;
        self.driver.checkpoint(deadline)
    }

    fn undo(&mut self, link: &mut dyn Link) -> Result<(), AttachError> {
        match self.bring_back(None, link) {
            Ok(_) => {
                self.unstage();
                enter(Phase::Running);
                gate::open();
                Ok(())
            }
            Err(error) => {
                self.abandon();
                enter(Phase::Lost);
                Err(error)
            }
        }
    }

    fn attach(&mut self, delivered: Option<Delivered>, link: &mut dyn Link) -> Result<u64, AttachError> {
        match phase() {
            Phase::Running => return Ok(0),
            Phase::Detached => {}
            Phase::Lost => return Err(AttachError::Lost),
        }
        faults::hit("attach-begun");
        let attached = self.bring_back(delivered, link);
        if attached.is_ok() {
            self.mirror = None;
            faults::hit("attach-done");
            enter(Phase::Running);
            gate::open();
        } else {
            self.abandon();
            enter(Phase::Lost);
        }
        attached
    }
}

impl ProcessGpu {
    /// Leaks the mirrors and the context, so that the driver is not called again: a locked driver would block forever.
    fn abandon(&mut self) {
        let mirrors = (self.mirror.take(), self.kept.take(), std::mem::take(&mut self.stale));
        std::mem::forget((mirrors, self.borrowed.take()));
    }

    /// Runs behind the closed gate, so that no call can add an obstacle meanwhile.
    fn take_off(
        &mut self,
        attempt: u64,
        begun: Instant,
        deadline: Instant,
        park: bool,
        link: &mut dyn Link,
    ) -> Result<GpuReport, DetachError> {
        if let Some(obstacle) = taint::obstacle() {
            return Err(DetachError::Obstacle(obstacle));
        }
        let remarks = unknown_entry_points::remark().into_iter().collect();
        let mut report = GpuReport {
            counts: memory::counts(objects::counts()),
            remarks,
            private_tables: proc_address::tables(),
            ..GpuReport::default()
        };
        self.borrow_context(deadline)?;
        let is_memory_ours = !registry().allocations.is_empty();
        let is_pinned = self.mirror.is_some() || self.kept.is_some() || !self.stale.is_empty();
        if is_memory_ours || is_pinned {
            self.drain(deadline)?;
            self.kept = None;
            self.stale.clear();
        }
        if is_memory_ours {
            ipc::await_drained(link, attempt)?;
        }
        report.times.drain_s = begun.elapsed().as_secs_f64();
        report.graph_memory = memory::report::graph_memory();
        if is_memory_ours {
            self.take_memory_off(park, link, &mut report)?;
        }
        self.unpin(&mut report)?;
        let driven = Instant::now();
        self.driver.lock(deadline)?;
        faults::hit("detach-locked");
        let before = address_space::scan()?;
        self.driver.checkpoint(deadline)?;
        address_space::fill(&before).inspect_err(|_| self.driver = DriverState::Displaced)?;
        // Not needed any more: what comes next is another delivery.
        self.mirror = None;
        report.times.driver_s = driven.elapsed().as_secs_f64();
        Ok(report)
    }

    /// Waits for room for a context, if there is none: other processes that detach make room.
    fn borrow_context(&mut self, deadline: Instant) -> Result<(), DetachError> {
        loop {
            match context::for_lock() {
                Ok(borrowed) => {
                    self.borrowed = borrowed;
                    return Ok(());
                }
                Err(_) if Instant::now() < deadline => std::thread::sleep(POLL_INTERVAL),
                Err(context::NoRoom) => return Err(DetachError::NoRoomForContext),
            }
        }
    }

    /// Waits until all submitted work has ended. The driver's lock does that, with a deadline.
    fn drain(&mut self, deadline: Instant) -> Result<(), DetachError> {
        self.driver.lock(deadline)?;
        self.driver.unlock()?;
        memory::pool::settle();
        faults::hit("detach-drained");
        Ok(())
    }

    fn take_memory_off(
        &mut self,
        park: bool,
        link: &mut dyn Link,
        report: &mut GpuReport,
    ) -> Result<(), DetachError> {
        let begun = Instant::now();
        self.capture(report)?;
        faults::hit("detach-captured");
        report.times.capture_s = begun.elapsed().as_secs_f64();
        let begun = Instant::now();
        let ids = transfer::leaving(self.mirror.as_ref().map_or(0, |pinned| pinned.mirror.bytes()));
        if park {
            // What is shared with other processes the launcher has already.
            let ids: Vec<Id> =
                ids.iter().copied().filter(|id| ipc::published::key_of(*id).is_none()).collect();
            let parked = offload::park(&ids, link);
            report.parked_bytes = parked.bytes;
            report.unparked_because = parked.refusal.map(|refusal| describe(&refusal));
            faults::hit("detach-parked");
        }
        memory::report::complete(report);
        offload::release(&ids)?;
        faults::hit("detach-released");
        report.times.release_s = begun.elapsed().as_secs_f64();
        Ok(())
    }

    /// Unpins the mirror, even if nothing was captured: a locked driver could not.
    fn unpin(&mut self, report: &mut GpuReport) -> Result<(), DriverError> {
        let Some(mirror) = &mut self.mirror else { return Ok(()) };
        report.remarks.extend_from_slice(&mirror.mirror.shortcomings);
        mirror.unpin()
    }

    /// Copies the device memory that has changed to the mirror.
    fn capture(&mut self, report: &mut GpuReport) -> Result<(), DetachError> {
        self.captures += 1;
        let Some(pinned) = &mut self.mirror else {
            // The launcher's next mirror does not have what was captured before.
            placement::forget(&mut registry());
            self.mirror_id = 0;
            return Ok(());
        };
        let captured = transfer::capture(&mut pinned.mirror)?;
        report.regions = captured.regions;
        let (mirror, number, written) = (self.mirror_id, self.captures, captured.written);
        report.capture = Some(Box::new(Capture { mirror, number, written }));
        Ok(())
    }

    /// Undoes the steps that were done. The mirror is mapped if memory has to be copied back.
    fn bring_back(&mut self, delivered: Option<Delivered>, link: &mut dyn Link) -> Result<u64, AttachError> {
        let was_checkpointed = self.driver == DriverState::Checkpointed;
        self.driver.bring_back()?;
        self.has_restored |= was_checkpointed;
        self.borrowed = None;
        relax();
        offload::unpark(link);
        offload::claim_shared(Owner::Own, link)?;
        let made = offload::recreate()?;
        if let Some(delivered) =
            delivered.filter(|delivered| !made.is_empty() && delivered.id == self.mirror_id)
        {
            self.mirror = Some(PinnedMirror::new(delivered, Mirror::map)?);
        }
        offload::remap(&made)?;
        faults::hit("attach-mapped");
        let copied_bytes = driver::retry(|| {
            transfer::copy_back(self.mirror.as_mut().map(|pinned| &mut pinned.mirror), &made)
        })?;
        offload::restrict(&made)?;
        // First each process's own memory, then that of others, which avoids deadlocks.
        ipc::republish(link, &made)?;
        offload::claim_shared(Owner::Others, link)?;
        offload::remap(&[])?;
        registry().allocations.values_mut().for_each(|allocation| allocation.parked = None);
        Ok(copied_bytes)
    }
}

/// From now on, calls of the agent's thread disturb no stream capture. Only while the driver runs: a locked driver
/// would block.
fn relax() {
    let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as CUstreamCaptureMode;
    // SAFETY: the mode is a local variable; the call changes nothing but the thread's mode.
    let _ = unsafe { driver::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
}

/// In the child of a fork, which has no driver state and so is not detached.
pub(super) fn after_fork_in_child() {
    enter(Phase::Running);
}

/// Closes the gate while no stream is being captured. A capture must not wait at the gate: the call that ends it may
/// be the one that waits.
fn close_between_captures(deadline: Instant) -> Result<(), DetachError> {
    loop {
        while stream_capture::open_captures() > 0 {
            if Instant::now() >= deadline {
                return Err(DetachError::CaptureOpen);
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        gate::close(deadline).map_err(|inside| match inside {
            0 => DetachError::Membarrier,
            threads => DetachError::CallsInside { threads },
        })?;
        if stream_capture::open_captures() == 0 {
            return Ok(());
        }
        gate::open();
    }
}
