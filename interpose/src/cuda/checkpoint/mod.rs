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
//! | `load` | loads device memory from the store, without a mirror |
//! | `error` | why that fails |

mod driver_state;
mod error;
mod load;
mod pinned_mirror;
mod transfer;

use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering::SeqCst};
use std::time::{Duration, Instant};

use ckpt_cut::{MemberReport, Order, Report};
use ckpt_protocol::agent::{Capture, DriverMemory, ExpectedChanges, FromAgent, GpuPair, GpuReport, ToAgent};
use cuda_abi::sys;
use cuda_abi::types::CUstreamCaptureMode;

use super::activity::{self, Activity};
use super::capture::{self, CaptureError, Room};
use super::context::OnDevice;
use super::driver::DriverError;
use super::memory::offload::{self, Owner};
use super::memory::physical::{Id, registry};
use super::memory::{self, host_access, ipc, multicast, placement};
use super::{
    address_space, bypass, changes, context, device_files, device_modes, driver, driver_support, faults,
    gate, gpus, init, libraries, nccl, objects, proc_address, stream_capture, taint, unknown_entry_points,
};
use crate::cuda::activation::{self, is_started};
use crate::link::{Link, describe};
use driver_state::DriverState;
pub use error::{AttachError, DetachError};
pub use pinned_mirror::Delivered;
use pinned_mirror::PinnedMirror;
use transfer::Readable;

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

/// If there is so much device memory of which nothing is known, it is looked through before a mirror is asked for: much of
/// it may never have been written. In less there is little to save, and the program has to wait for it.
const LOOK_FROM_BYTES: u64 = 64 << 20;
/// The timeout for the program's own calls and work to end, before device memory is looked through.
const LOOK_TIMEOUT: Duration = Duration::from_secs(1);

/// How much larger the mirror of a process that shares memory is than what it has to share now, beside a quarter of that,
/// in bytes: such memory cannot be left to the driver, and more of it may come until the capture.
const MORE_TO_SHARE_BYTES: u64 = 64 << 20;

/// The polling interval for the end of a stream capture.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// How large a process's mirror has to be, in bytes.
#[derive(Default)]
pub struct MirrorNeeds {
    /// Its size.
    pub bytes: u64,
    /// What of it needs memory: all but chunks of zeroes.
    pub used_bytes: u64,
    /// What of it needs memory if it is partial.
    pub changes: Option<ExpectedChanges>,
}

/// The state of a process on its GPUs, as far as the agent has to do with it; tests replace it.
pub trait Gpu {
    /// See [`activity::read`].
    fn activity(&self) -> Activity;

    /// How far the process is on each of its communicators.
    fn members(&self) -> Vec<MemberReport>;

    /// UUIDs of the GPUs on which it is a rank of NCCL beside others.
    fn ranks_on(&self) -> Vec<String>;

    /// Follows an order of the consistent cut.
    fn follow(&mut self, order: Order);

    /// The steps of the process's rank, while a cut is wanted.
    fn steps(&mut self) -> Option<Report>;

    /// Checks that nothing rules a checkpoint out, as far as that is known while the program runs.
    ///
    /// # Errors
    /// Why the process could not be dumped now.
    fn check(&mut self) -> Result<(), DetachError>;

    /// How large the mirror has to be for what is on the devices now.
    ///
    /// # Errors
    /// The process's GPU state is lost.
    fn mirror_needs(&mut self, link: &mut dyn Link) -> Result<MirrorNeeds, AttachError>;

    /// Maps the mirror, and pins it or the buffers of the threads that copy.
    ///
    /// # Errors
    /// It cannot be mapped.
    fn stage(&mut self, mirror: Delivered) -> Result<(), CaptureError>;

    /// The mirror is not used until it is staged again.
    fn unstage(&mut self);

    /// Whether the state is off the GPU.
    fn is_detached(&self) -> bool;

    /// Takes the state off the GPU; nothing for a process that has none.
    ///
    /// # Errors
    /// Why the process cannot be dumped now; unless it is lost, it runs on as before.
    fn detach(&mut self, request: Request, link: &mut dyn Link) -> Result<Option<GpuReport>, DetachError>;

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

    /// Brings the state back, in the process that was detached or in one restored from its image, to the GPUs that the
    /// pairs name or to the same ones; returns how many bytes were copied back.
    ///
    /// # Errors
    /// The process's GPU state is lost.
    fn attach(
        &mut self,
        delivered: Option<Delivered>,
        pairs: &[GpuPair],
        link: &mut dyn Link,
    ) -> Result<u64, AttachError>;
}

/// What the launcher requests, see [`ToAgent::Quiesce`].
#[derive(Clone, Copy)]
pub struct Request {
    pub attempt: u64,
    pub timeout: Duration,
    /// Device memory is handed to the launcher rather than released.
    pub park: bool,
    /// The launcher knows how much memory the driver holds.
    pub measures: bool,
}

/// The state of this process on its GPUs, which the agent detaches and attaches.
#[derive(Default)]
pub struct ProcessGpu {
    driver: DriverState,
    /// The current mirror, from its staging to its release.
    mirror: Option<PinnedMirror>,
    /// The mirror that was staged or copied back last and is not in use. The driver unpins memory only when all work has
    /// ended, and that takes long, so it, or its buffers, stay pinned while the program runs.
    kept: Option<PinnedMirror>,
    /// Older mirrors, which are not used again: the file may have been truncated and extended since.
    stale: Vec<PinnedMirror>,
    /// The parts of the mirror that need memory, as of [`Gpu::mirror_needs`].
    used: Vec<Range<u64>>,
    /// The same for a partial mirror.
    expected: Vec<Range<u64>>,
    /// The ranges that the last capture has written, sorted, without overlaps.
    written: Vec<Range<u64>>,
    /// Whether the current mirror is partial: the launcher has freed parts of it, and fills them again on request.
    is_partial: bool,
    /// The last capture left no copy but that in the store.
    has_no_copy: bool,
    /// The mirror to which the offsets and hashes of the physical allocations refer.
    mirror_id: u64,
    /// From before the lock until after the unlock, for a process that has no context.
    borrowed: Option<OnDevice>,
    /// The driver has restored the process, or its image, from a checkpoint.
    has_restored: bool,
    /// The driver has refused the last attempt as not supported, which is often for good. An attempt costs a pause, and as
    /// much host memory as there is device memory: there is no other one until something has changed.
    refusal: Option<Refusal>,
    /// The work of the rank's steps that may still be on the GPU.
    in_flight: nccl::InFlight,
    /// The number of captures that were begun, into any mirror. It is never reset: the launcher would mistake an
    /// older capture for the mirror's content.
    captures: u64,
}

/// What the driver has refused.
struct Refusal {
    reason: String,
    /// The changes until then.
    changes: u64,
}

impl Gpu for ProcessGpu {
    fn activity(&self) -> Activity {
        activity::read()
    }

    fn members(&self) -> Vec<MemberReport> {
        nccl::members()
    }

    fn ranks_on(&self) -> Vec<String> {
        nccl::devices().into_iter().filter_map(gpus::uuid_of).collect()
    }

    fn follow(&mut self, order: Order) {
        nccl::follow(order);
    }

    fn steps(&mut self) -> Option<Report> {
        nccl::report(&mut self.in_flight)
    }

    fn check(&mut self) -> Result<(), DetachError> {
        bypass::check()?;
        if !is_started() {
            return if device_files::are_open() { check_devices() } else { Ok(()) };
        }
        if phase() == Phase::Lost {
            return Err(DetachError::Lost);
        }
        driver_support::check()?;
        check_obstacles()?;
        self.refusal = self.refusal.take().filter(|refusal| refusal.changes == changes::count());
        match &self.refusal {
            Some(refusal) => Err(DetachError::StillRefused(refusal.reason.clone())),
            None => Ok(()),
        }
    }

    fn mirror_needs(&mut self, link: &mut dyn Link) -> Result<MirrorNeeds, AttachError> {
        // A process that will be refused needs none.
        if !is_started() || phase() != Phase::Running {
            return Ok(MirrorNeeds::default());
        }
        if transfer::unknown_bytes() >= LOOK_FROM_BYTES && !capture::is_unwanted() {
            self.look_through_memory(link)?;
            if self.refusal.is_some() {
                return Ok(MirrorNeeds::default());
            }
        }
        let bytes = placement::place(&mut registry());
        self.used = transfer::used(bytes);
        self.expected = transfer::expected_changes(&self.written, bytes);
        let changes =
            ExpectedChanges { captures: self.captures, bytes: capture::total_bytes(&self.expected) };
        let used_bytes = capture::total_bytes(&self.used);
        let more_bytes = if ipc::may_share() { bytes / 4 + MORE_TO_SHARE_BYTES } else { 0 };
        Ok(MirrorNeeds { bytes: bytes + more_bytes, used_bytes, changes: Some(changes) })
    }

    fn stage(&mut self, mirror: Delivered) -> Result<(), CaptureError> {
        self.unstage();
        relax();
        if mirror.id != self.mirror_id {
            placement::forget(&mut registry());
            self.stale.extend(self.kept.take());
            self.mirror_id = mirror.id;
        }
        self.is_partial = mirror.is_partial;
        if let Some(window_bytes) = mirror.window_bytes {
            self.stale.extend(self.kept.take());
            self.mirror = Some(PinnedMirror::window(mirror, window_bytes)?);
            memory::backtrace::resolve_names();
            faults::hit("staged");
            return Ok(());
        }
        let used = std::mem::take(if self.is_partial { &mut self.expected } else { &mut self.used });
        let copy_threads = mirror.copy_threads;
        let room = match mirror.more_bytes {
            Some(more_bytes) => Room { used, more_bytes, is_partial: self.is_partial, copy_threads },
            None => Room { used: vec![0..mirror.bytes], copy_threads, ..Room::default() },
        };
        self.mirror = Some(match self.kept.take() {
            Some(mut kept) if kept.serves(&mirror, &room) => {
                if let Err(error) = kept.get_ready(&room) {
                    // The driver unpins it only when all work has ended.
                    self.stale.push(kept);
                    return Err(error);
                }
                kept
            }
            other => {
                self.stale.extend(other);
                PinnedMirror::stage(mirror, &room)?
            }
        });
        memory::backtrace::resolve_names();
        faults::hit("staged");
        Ok(())
    }

    fn unstage(&mut self) {
        match self.mirror.take() {
            Some(mirror) if mirror.mirror.is_ready() => self.stale.extend(self.kept.replace(mirror)),
            other => self.stale.extend(other),
        }
    }

    fn is_detached(&self) -> bool {
        phase() == Phase::Detached
    }

    fn detach(&mut self, request: Request, link: &mut dyn Link) -> Result<Option<GpuReport>, DetachError> {
        bypass::check()?;
        match phase() {
            Phase::Running => {}
            Phase::Detached => return Ok(None),
            Phase::Lost => return Err(DetachError::Lost),
        }
        let begun = Instant::now();
        let deadline = begun + request.timeout;
        if !is_started() && !start_for_nvml(deadline)? {
            return Ok(None);
        }
        driver_support::check()?;
        close_between_captures(deadline)?;
        faults::hit("detach-gate");
        relax();
        let result = self.take_off(request, begun, deadline, link);
        let error = match result {
            Ok(report) => {
                self.refusal = None;
                enter(Phase::Detached);
                faults::hit("detach-checkpointed");
                return Ok(Some(report));
            }
            Err(error) => error,
        };
        self.remember(Some(&error));
        give_up(request.attempt, &error, link);
        match self.undo(link) {
            Ok(()) => Err(error),
            Err(undo) => Err(DetachError::NotUndone { error: Box::new(error), undo }),
        }
    }

    fn release(&mut self, timeout: Duration) -> Result<(), DetachError> {
        if phase() == Phase::Detached || !self.has_restored {
            return Ok(());
        }
        check_devices()?;
        let deadline = Instant::now() + timeout;
        // The gate of a process that is lost is closed.
        let is_lost = phase() == Phase::Lost;
        if !is_lost {
            close_between_captures(deadline)?;
            enter(Phase::Lost);
        }
        if self.driver == DriverState::Running {
            self.borrow_context(deadline)?;
            self.drain(deadline)?;
            self.unpin_unused();
            let released = release_memory();
            // What a lost process has not got back cannot be released, and the driver takes the rest away.
            if !is_lost {
                released?;
            }
            self.driver.lock(deadline)?;
        }
        match self.driver {
            DriverState::Locked => self.driver.checkpoint(deadline),
            _ => Ok(()),
        }
    }

    fn undo(&mut self, link: &mut dyn Link) -> Result<(), AttachError> {
        match self.bring_back(None, &[], link) {
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

    fn attach(
        &mut self,
        delivered: Option<Delivered>,
        pairs: &[GpuPair],
        link: &mut dyn Link,
    ) -> Result<u64, AttachError> {
        match phase() {
            Phase::Running => return Ok(0),
            Phase::Detached => {}
            Phase::Lost => return Err(AttachError::Lost),
        }
        if !is_started() {
            // What was held back is NVML.
            enter(Phase::Running);
            gate::open();
            return Ok(0);
        }
        faults::hit("attach-begun");
        let may_stay = delivered.as_ref().is_some_and(|delivered| delivered.may_stay);
        let attached = self.bring_back(delivered, pairs, link);
        if attached.is_ok() {
            let mut mirror = self.mirror.take();
            self.kept = mirror.take_if(|mirror| may_stay && mirror.may_stay() && mirror.mirror.protect());
            // While no work is under way, for which the driver would wait.
            if let Some(mirror) = &mut mirror {
                let _ = driver::retry(|| mirror.unpin());
            }
            faults::hit("attach-done");
            enter(Phase::Running);
            gate::open();
            // It takes long to unmap, for which the program need not wait.
            drop(mirror);
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

    /// Remembers whether the driver has refused.
    fn remember(&mut self, error: Option<&DetachError>) {
        let refused = error.filter(|error| matches!(error, DetachError::DriverRefuses { .. }));
        self.refusal = refused.map(|error| Refusal { reason: describe(error), changes: changes::count() });
    }

    /// Finds out which chunks of device memory hold zeroes only. The program waits at the gate meanwhile. If that is not
    /// possible now, all memory of which nothing is known counts as used.
    fn look_through_memory(&mut self, link: &mut dyn Link) -> Result<(), AttachError> {
        // The work of ranks that do not stand at a cut may wait for others, which do not wait for this one.
        if bypass::check().is_err() || taint::obstacle().is_some() || nccl::uncut().is_some() {
            return Ok(());
        }
        let deadline = Instant::now() + LOOK_TIMEOUT;
        if close_between_captures(deadline).is_err() {
            return Ok(());
        }
        relax();
        faults::hit("look-gate");
        let looked = self.drain(deadline).and_then(|()| transfer::look());
        faults::hit("look-done");
        self.remember(looked.as_ref().err());
        self.undo(link)
    }

    /// Runs behind the closed gate, so that no call can add an obstacle meanwhile.
    fn take_off(
        &mut self,
        request: Request,
        begun: Instant,
        deadline: Instant,
        link: &mut dyn Link,
    ) -> Result<GpuReport, DetachError> {
        check_obstacles()?;
        nccl::uncut().map_or(Ok(()), |found| Err(DetachError::Obstacle(found)))?;
        let remarks = unknown_entry_points::remark().into_iter().chain(activation::remark()).collect();
        let mut report = GpuReport {
            counts: memory::counts(objects::counts()),
            remarks,
            private_tables: proc_address::tables(),
            ..GpuReport::default()
        };
        ipc::descriptors::sweep();
        self.borrow_context(deadline)?;
        let is_memory_ours = !registry().allocations.is_empty();
        let is_pinned = self.mirror.is_some() || self.kept.is_some() || !self.stale.is_empty();
        if is_memory_ours || is_pinned {
            self.drain(deadline)?;
            self.unpin_unused();
        }
        if is_memory_ours {
            host_access::withhold()?;
            multicast::await_drained(link, request.attempt)?;
            faults::hit("detach-all-drained");
            multicast::take_down(link)?;
        }
        report.times.drain_s = begun.elapsed().as_secs_f64();
        report.graph_memory = memory::report::graph_memory();
        if is_memory_ours {
            self.take_memory_off(&request, deadline, link, &mut report)?;
        }
        self.unpin(&mut report)?;
        let driver_memory = if request.measures { measure(request.attempt, link) } else { Vec::new() };
        report.gpus = gpus::in_use(&report.regions, &driver_memory);
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
        request: &Request,
        deadline: Instant,
        link: &mut dyn Link,
        report: &mut GpuReport,
    ) -> Result<(), DetachError> {
        let begun = Instant::now();
        self.captures += 1;
        self.has_no_copy = self.mirror.as_ref().is_some_and(PinnedMirror::is_window);
        match self.has_no_copy {
            true => self.hand_out(request.attempt, deadline, link, report)?,
            false => self.capture(report)?,
        }
        faults::hit("detach-captured");
        // The program's threads may have opened one meanwhile. Once the memory is gone they cannot register it.
        check_devices()?;
        report.times.capture_s = begun.elapsed().as_secs_f64();
        let begun = Instant::now();
        let ids = transfer::leaving(self.mirror.as_ref().map_or(0, PinnedMirror::bytes));
        ipc::check_all_leave(&ids)?;
        if request.park || self.has_no_copy {
            let parked = offload::park(&transfer::to_park(&ids), link);
            report.parked_bytes = parked.bytes;
            report.unparked_because = parked.refusal.map(|refusal| describe(&refusal));
            if let Some(reason) = report.unparked_because.as_ref().filter(|_| self.has_no_copy) {
                return Err(DetachError::NotParked(reason.clone()));
            }
            faults::hit("detach-parked");
        }
        memory::report::complete(report);
        offload::release(&ids)?;
        faults::hit("detach-released");
        report.times.release_s = begun.elapsed().as_secs_f64();
        Ok(())
    }

    /// Unpins the mirrors that are not in use, once all work has ended.
    fn unpin_unused(&mut self) {
        self.kept = None;
        self.stale.clear();
    }

    /// Unpins the mirror, even if nothing was captured: a locked driver could not.
    fn unpin(&mut self, report: &mut GpuReport) -> Result<(), DriverError> {
        let Some(mirror) = &mut self.mirror else { return Ok(()) };
        report.remarks.extend_from_slice(&mirror.mirror.shortcomings);
        mirror.unpin()
    }

    /// Copies the device memory that has changed to the mirror.
    fn capture(&mut self, report: &mut GpuReport) -> Result<(), DetachError> {
        let Some(pinned) = &mut self.mirror else {
            // The launcher's next mirror does not have what was captured before.
            placement::forget(&mut registry());
            self.mirror_id = 0;
            return Ok(());
        };
        let captured = transfer::capture(&mut pinned.mirror)?;
        report.regions = captured.regions;
        // What a partial mirror lacks is only known if these are exact.
        let written = match self.is_partial {
            true => captured.written.clone(),
            false => capture::bounded(captured.written.clone()),
        };
        self.written = captured.written;
        let (mirror, number) = (self.mirror_id, self.captures);
        report.capture = Some(Box::new(Capture { mirror, number, written }));
        Ok(())
    }

    /// Has the launcher read the device memory that the store lacks, through the window.
    fn hand_out(
        &mut self,
        attempt: u64,
        deadline: Instant,
        link: &mut dyn Link,
        report: &mut GpuReport,
    ) -> Result<(), DetachError> {
        let Some(pinned) = &mut self.mirror else { return Ok(()) };
        let mirror_bytes = pinned.bytes();
        let readable = Readable::find(&mut pinned.mirror, mirror_bytes)?;
        let (mirror, number) = (self.mirror_id, self.captures);
        let written = capture::bounded(readable.captured.written.clone());
        report.regions = readable.captured.regions.clone();
        report.capture = Some(Box::new(Capture { mirror, number, written: Vec::new() }));
        self.written = Vec::new();
        let message = FromAgent::Readable {
            attempt,
            regions: report.regions.clone(),
            capture: Capture { mirror, number, written },
            used: readable.used.clone(),
        };
        faults::hit("detach-readable");
        let window = &mut pinned.mirror;
        link.hand_out(&message, deadline, &mut |piece| readable.read(window, piece))
            .map_err(DetachError::NotStored)
    }

    /// Undoes the steps that were done. The mirror is mapped if memory has to be copied back.
    fn bring_back(
        &mut self,
        delivered: Option<Delivered>,
        pairs: &[GpuPair],
        link: &mut dyn Link,
    ) -> Result<u64, AttachError> {
        let was_checkpointed = self.driver == DriverState::Checkpointed;
        let brought_back = self.driver.bring_back(&gpus::pairs(pairs)?);
        self.has_restored |= was_checkpointed && self.driver != DriverState::Checkpointed;
        brought_back?;
        self.borrowed = None;
        relax();
        offload::unpark(link);
        offload::claim_shared(Owner::Own, link)?;
        let made = offload::recreate()?;
        if self.has_no_copy && !made.is_empty() && delivered.is_none() {
            return Err(AttachError::NoCopy);
        }
        if let Some(delivered) =
            delivered.filter(|delivered| !made.is_empty() && delivered.id == self.mirror_id)
        {
            self.is_partial = delivered.is_partial;
            self.mirror = Some(match delivered.window_bytes {
                Some(window_bytes) => PinnedMirror::map_window(delivered, window_bytes)?,
                None => {
                    let used = transfer::used_to_copy_back(&made, delivered.bytes);
                    self.fill(&used, link)?;
                    PinnedMirror::map(delivered, &used)?
                }
            });
        } else if let Some(pinned) = self.mirror.as_ref().filter(|_| !made.is_empty()) {
            let used = transfer::used_to_copy_back(&made, pinned.mirror.bytes());
            self.fill(&used, link)?;
        }
        offload::remap(&made)?;
        faults::hit("attach-mapped");
        let copied_bytes = match &mut self.mirror {
            Some(window) if window.is_window() => load::load(&mut window.mirror, &made, link)?,
            mirror => {
                driver::retry(|| transfer::copy_back(mirror.as_mut().map(|one| &mut one.mirror), &made))?
            }
        };
        offload::restrict(&made)?;
        // First each process's own memory, then that of others, which avoids deadlocks.
        ipc::republish(link, &made)?;
        offload::claim_shared(Owner::Others, link)?;
        offload::remap(&[])?;
        multicast::bring_back(link)?;
        host_access::grant()?;
        Ok(copied_bytes)
    }

    /// Has the launcher fill the parts of a partial mirror that are copied back from. What the last capture has written is
    /// there.
    fn fill(&self, used: &[Range<u64>], link: &mut dyn Link) -> Result<(), AttachError> {
        let ranges = capture::without(used, &self.written);
        if !self.is_partial || ranges.is_empty() {
            return Ok(());
        }
        match link.ask(&FromAgent::Fill { ranges }, &[]) {
            Some((ToAgent::Filled { problem: None }, _)) => Ok(()),
            Some((ToAgent::Filled { problem: Some(problem) }, _)) => Err(AttachError::NotFilled(problem)),
            _ => Err(AttachError::MirrorMissing),
        }
    }
}

/// Releases all memory on the devices, as far as that succeeds: the driver would copy it to host memory.
fn release_memory() -> Result<(), DetachError> {
    let withheld = host_access::withhold().map_err(DetachError::from);
    let is_down = multicast::release().map_err(DetachError::from);
    let ids: Vec<Id> = registry().allocations.keys().copied().collect();
    let released = ids.into_iter().map(|id| offload::release(&[id]).map_err(DetachError::from));
    withheld.and(is_down).and(released.fold(Ok(()), Result::and))
}

/// Tells the launcher that the attempt fails, if others wait for this process to come back while it waits for them.
fn give_up(attempt: u64, error: &DetachError, link: &mut dyn Link) {
    if multicast::is_awaited() {
        link.tell(&FromAgent::GivesUp { attempt, reason: describe(error) });
    }
}

/// Checks that there is nothing in a process with a driver that cannot be saved.
fn check_obstacles() -> Result<(), DetachError> {
    taint::obstacle()
        .or_else(device_modes::obstacle)
        .map_or(Ok(()), |found| Err(DetachError::Obstacle(found)))?;
    check_devices()
}

/// Checks that no memory of a GPU may be registered with another device.
fn check_devices() -> Result<(), DetachError> {
    device_files::obstacle().map_or(Ok(()), |found| Err(DetachError::Obstacle(found)))
}

/// In a process that has not initialised the driver: does so if NVML has device files open, since the driver's checkpoint
/// takes those away too (NVIDIA in cuda-checkpoint's release 570). Where NVML is in use and has none open at this moment,
/// the process counts as detached, behind the closed gate. Returns whether there is anything to take off.
fn start_for_nvml(deadline: Instant) -> Result<bool, DetachError> {
    if !device_files::are_open() {
        if !libraries::nvml_is_used() {
            return Ok(false);
        }
        close(deadline)?;
        if !device_files::are_open() {
            enter(Phase::Detached);
            return Ok(false);
        }
        gate::open();
    }
    check_devices()?;
    init::start_driver()?;
    Ok(true)
}

/// What the driver holds now for this process, by the launcher's account; nothing if the launcher does not know.
fn measure(attempt: u64, link: &mut dyn Link) -> Vec<DriverMemory> {
    match link.ask(&FromAgent::Measure { attempt }, &[]) {
        Some((ToAgent::Measured { gpus }, _)) => gpus,
        _ => Vec::new(),
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

fn close(deadline: Instant) -> Result<(), DetachError> {
    gate::close(deadline).map_err(|inside| match inside {
        0 => DetachError::Membarrier,
        threads => DetachError::CallsInside { threads },
    })
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
        close(deadline)?;
        if stream_capture::open_captures() == 0 {
            return Ok(());
        }
        gate::open();
    }
}
