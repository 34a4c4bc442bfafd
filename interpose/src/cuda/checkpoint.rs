//! Taking the process's state off the GPU for a dump, and bringing it back.
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
//! Device memory is copied to the launcher's mirror and taken off the device before the driver is locked, since that
//! takes a driver that works, and comes back after it has been unlocked; the program is kept out by the gate all that
//! time. What has no place in the mirror stays where it is and goes the driver's own, slow way.
//!
//! Lost is for good: the gate stays closed, so that the program does not meet the driver's errors before the launcher
//! ends the job.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU8, Ordering::SeqCst};
use std::time::{Duration, Instant};

use ckpt_protocol::agent::{Capture, GpuReport, Region, RegionFlags};
use cuda_abi::sys::{
    self, CUcheckpointCheckpointArgs, CUcheckpointLockArgs, CUcheckpointRestoreArgs, CUcheckpointUnlockArgs,
};
use cuda_abi::types::{CUcontext, CUresult, CUstreamCaptureMode};

use super::capture::{self, Mirror};
use super::driver::{self, told};
use super::memory::offload::{self, Seen, View, Whose};
use super::memory::physical::{Id, Physical, registry};
use super::memory::{self, ipc, placement};
use super::{
    address_space, bypass, context, driver_support, faults, gate, objects, proc_address, stream_capture,
    taint, unknown_entry_points,
};
use crate::cuda::activation::is_started;
use crate::link::Link;

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

/// How often to look whether a stream capture has ended.
const LOOK: Duration = Duration::from_millis(1);

const LOST: &str = "its GPU state was lost in an earlier restore";

/// Why a process cannot be dumped now.
#[derive(Debug)]
pub struct Refusal {
    /// In words for people.
    pub reason: String,
    /// The process cannot go on either: what had been taken off the GPU could not be put back.
    pub is_lost: bool,
}

impl From<String> for Refusal {
    fn from(reason: String) -> Self {
        Self { reason, is_lost: false }
    }
}

/// A mirror of the launcher's.
pub struct Delivered {
    /// Which one it is.
    pub id: u64,
    /// Its size.
    pub bytes: u64,
    /// Its file.
    pub file: OwnedFd,
}

/// How far the driver has been taken.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Driver {
    Running,
    Locked,
    Checkpointed,
    /// The same, and a restore would overwrite what others have put where the driver's mappings were.
    Displaced,
}

/// A mirror, and the contexts that it needs for as long as it is pinned.
struct Pinned {
    mirror: Mirror,
    contexts: Vec<context::OnDevice>,
}

impl Pinned {
    fn new(
        delivered: Delivered,
        how: fn(OwnedFd, u64, &[CUcontext]) -> Result<Mirror, String>,
    ) -> Result<Self, String> {
        let (contexts, handles) = Self::contexts();
        Ok(Self { mirror: how(delivered.file, delivered.bytes, &handles)?, contexts })
    }

    /// Makes one that was kept ready to be captured to.
    fn get_ready(&mut self) {
        let (contexts, handles) = Self::contexts();
        self.mirror.get_ready(&handles);
        self.contexts.extend(contexts);
    }

    fn contexts() -> (Vec<context::OnDevice>, Vec<CUcontext>) {
        let contexts: Vec<_> = contexts_of_devices(&devices()).into_values().collect();
        let handles = contexts.iter().map(context::OnDevice::context).collect();
        (contexts, handles)
    }

    fn unpin(&mut self) -> Result<(), String> {
        let unpinned = self.mirror.unpin();
        self.contexts.clear();
        unpinned
    }
}

/// The state of this process on its GPUs, in the hands of the agent.
pub struct Gpu {
    driver: Driver,
    /// Mapped, from its staging to its release.
    mirror: Option<Pinned>,
    /// The one that was staged last and is not in use. The driver lets go of pinned memory only when all work has ended,
    /// so it is not told to while the program runs.
    kept: Option<Pinned>,
    /// Older ones, which may not be used again: the file may have been cut and grown since.
    stale: Vec<Pinned>,
    /// Which mirror the places and hashes of the pieces are about.
    mirror_id: u64,
    /// Captures that were begun, into whichever mirror. Never set back: a number that came again would let the launcher
    /// take what it has for what is in the mirror.
    captures: u64,
}

impl Gpu {
    /// Of a process that has just begun.
    pub fn new() -> Self {
        Self {
            driver: Driver::Running,
            mirror: None,
            kept: None,
            stale: Vec::new(),
            mirror_id: 0,
            captures: 0,
        }
    }

    /// How large the mirror has to be for what is on the devices now, in bytes.
    pub fn mirror_bytes(&mut self) -> u64 {
        // A process that will be refused needs none.
        let can_be_saved = is_started() && phase() == Phase::Running && driver_support::refuse().is_ok();
        if can_be_saved { placement::place(&mut registry()) } else { 0 }
    }

    /// Maps and pins the mirror.
    ///
    /// # Errors
    /// It cannot be mapped.
    pub fn stage(&mut self, mirror: Delivered) -> Result<(), String> {
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
                Pinned::new(mirror, Mirror::stage)?
            }
        });
        memory::backtrace::look_up();
        faults::hit("staged");
        Ok(())
    }

    /// The mirror is not used until it is staged again.
    pub fn unstage(&mut self) {
        match self.mirror.take() {
            Some(mirror) if mirror.mirror.is_pinned() => self.stale.extend(self.kept.replace(mirror)),
            other => self.stale.extend(other),
        }
    }

    /// Nothing more is asked of the driver: one that is locked would be waited for, for ever.
    fn abandon(&mut self) {
        std::mem::forget((self.mirror.take(), self.kept.take(), std::mem::take(&mut self.stale)));
    }

    /// Whether the state is off the GPU.
    pub fn is_detached(&self) -> bool {
        phase() == Phase::Detached
    }

    /// Takes the state off the GPU; nothing for a process that has none. With `park`, device memory is handed to the
    /// launcher rather than released.
    ///
    /// # Errors
    /// Why the process cannot be dumped now; unless it is lost, it runs on as before.
    pub fn detach(
        &mut self,
        attempt: u64,
        timeout: Duration,
        park: bool,
        link: &mut dyn Link,
    ) -> Result<Option<GpuReport>, Refusal> {
        bypass::refuse()?;
        if !is_started() {
            return Ok(None);
        }
        match phase() {
            Phase::Running => {}
            Phase::Detached => return Ok(None),
            Phase::Lost => return Err(Refusal { reason: LOST.into(), is_lost: true }),
        }
        driver_support::refuse()?;
        let deadline = Instant::now() + timeout;
        let begun = Instant::now();
        close_between_captures(deadline)?;
        faults::hit("detach-gate");
        relax();
        let result = self.take_off(attempt, begun, deadline, park, link);
        let reason = match result {
            Ok(report) => {
                enter(Phase::Detached);
                faults::hit("detach-checkpointed");
                return Ok(Some(report));
            }
            Err(reason) => reason,
        };
        match self.undo(link) {
            Ok(()) => Err(reason.into()),
            Err(error) => Err(Refusal { reason: format!("{reason}; and then: {error}"), is_lost: true }),
        }
    }

    /// Undoes what has been done of [`Gpu::detach`], and opens the gate.
    ///
    /// # Errors
    /// The process's GPU state is lost.
    pub fn undo(&mut self, link: &mut dyn Link) -> Result<(), String> {
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

    /// Behind the closed gate, so that no call that taints is under way.
    fn take_off(
        &mut self,
        attempt: u64,
        begun: Instant,
        deadline: Instant,
        park: bool,
        link: &mut dyn Link,
    ) -> Result<GpuReport, String> {
        if let Some(obstacle) = taint::what() {
            return Err(obstacle);
        }
        let remarks = unknown_entry_points::told().into_iter().collect();
        let mut report = GpuReport {
            counts: memory::counts(objects::counts()),
            remarks,
            private_tables: proc_address::tables(),
            ..GpuReport::default()
        };
        let is_memory_ours = !registry().pieces.is_empty();
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
        self.lock(deadline)?;
        faults::hit("detach-locked");
        let before =
            address_space::look().map_err(|error| format!("/proc/self/maps cannot be read: {error}"))?;
        self.checkpoint(deadline)?;
        address_space::fill(&before).inspect_err(|_| self.driver = Driver::Displaced)?;
        // Not needed any more: what comes next is another delivery.
        self.mirror = None;
        report.times.driver_s = driven.elapsed().as_secs_f64();
        Ok(report)
    }

    /// Waits until all submitted work has ended. The driver's lock does that, with a deadline.
    fn drain(&mut self, deadline: Instant) -> Result<(), String> {
        self.lock(deadline)?;
        self.unlock()?;
        memory::settle();
        faults::hit("detach-drained");
        Ok(())
    }

    fn take_memory_off(
        &mut self,
        park: bool,
        link: &mut dyn Link,
        report: &mut GpuReport,
    ) -> Result<(), String> {
        let begun = Instant::now();
        (report.regions, report.capture) = self.capture()?;
        faults::hit("detach-captured");
        report.times.capture_s = begun.elapsed().as_secs_f64();
        let begun = Instant::now();
        let ids = self.leaving();
        if park {
            // What is shared with other processes the launcher has already.
            let ids: Vec<Id> =
                ids.iter().copied().filter(|id| ipc::published::key_of(*id).is_none()).collect();
            let parked = offload::park(&ids, link);
            report.parked_bytes = parked.bytes;
            report.unparked_because = parked.refusal;
            faults::hit("detach-parked");
        }
        memory::report::complete(report);
        offload::take_off(&ids)?;
        faults::hit("detach-released");
        report.times.release_s = begun.elapsed().as_secs_f64();
        Ok(())
    }

    /// Has the driver let go of the mirror, also where nothing is left to be captured: a locked driver would not.
    fn unpin(&mut self, report: &mut GpuReport) -> Result<(), String> {
        let Some(mirror) = &mut self.mirror else { return Ok(()) };
        report.remarks.extend_from_slice(mirror.mirror.shortcomings());
        mirror.unpin()
    }

    /// Copies what has changed to the mirror; returns what the mirror has then, and where it was written to.
    fn capture(&mut self) -> Result<(Vec<Region>, Option<Box<Capture>>), String> {
        self.captures += 1;
        let Some(Pinned { mirror, .. }) = &mut self.mirror else {
            // What the launcher stores now is not what was captured before.
            placement::forget(&mut registry());
            self.mirror_id = 0;
            return Ok((Vec::new(), None));
        };
        let seen: Vec<(Seen, u64)> = {
            let mut registry = registry();
            placement::place(&mut registry);
            let fits = |bytes: u64, offset: &u64| offset + bytes <= mirror.bytes();
            let of = |(id, piece): (&Id, &Physical)| {
                let offset = piece.mirrored.offset.filter(|offset| fits(piece.bytes, offset))?;
                placement::is_captured(piece).then(|| (Seen::of(*id, piece, false), offset))
            };
            registry.pieces.iter().filter_map(of).collect()
        };
        let contexts = contexts_of_devices(&seen.iter().map(|(seen, _)| seen.device).collect::<Vec<_>>());
        let mut views = Vec::with_capacity(seen.len());
        let mut pieces = Vec::with_capacity(seen.len());
        for (seen, offset) in &seen {
            let Some(context) = contexts.get(&seen.device) else {
                return Err(format!("no context on device {} can be had to copy its memory", seen.device));
            };
            let view = View::of(seen)?;
            let hashes = take_hashes(seen.id);
            pieces.push(capture::Piece {
                context: context.context(),
                address: view.address,
                bytes: seen.bytes,
                offset: *offset,
                hashes,
            });
            views.push(view);
        }
        let written = mirror.capture(&mut pieces)?;
        drop(views);
        let mut registry = registry();
        let mut regions = Vec::with_capacity(seen.len());
        for (((seen, offset), piece), written) in seen.iter().zip(pieces).zip(&written) {
            let Some(known) = registry.pieces.get_mut(&seen.id) else { continue };
            // What has no hashes was copied unseen.
            let changed_bytes = written.iter().map(|range| range.end - range.start).sum();
            let changed_bytes = (!piece.hashes.is_empty()).then_some(changed_bytes);
            known.mirrored.hashes = piece.hashes;
            let address = known.mappings.first().map_or(0, |mapping| mapping.address);
            regions.push(Region {
                address,
                bytes: seen.bytes,
                device: seen.device,
                kind: known.kind,
                allocations: 0,
                offset: *offset,
                changed_bytes,
                flags: RegionFlags::default(),
                origin: None,
            });
        }
        drop(registry);
        regions.sort_by_key(|region| region.address);
        let written = capture::joined(written.into_iter().flatten().collect());
        let capture = Capture { mirror: self.mirror_id, number: self.captures, written };
        Ok((regions, Some(Box::new(capture))))
    }

    /// What is taken off the device: what the mirror has, and what belongs to another process.
    fn leaving(&self) -> Vec<Id> {
        let mirror_bytes = self.mirror.as_ref().map_or(0, |pinned| pinned.mirror.bytes());
        let registry = registry();
        let is_leaving = |piece: &Physical| {
            !placement::is_captured(piece)
                || piece.mirrored.offset.is_some_and(|offset| offset + piece.bytes <= mirror_bytes)
        };
        registry.pieces.iter().filter(|(_, piece)| is_leaving(piece)).map(|(id, _)| *id).collect()
    }

    /// Brings the state back, in the process that was detached or in one restored from its image; returns how many
    /// bytes were copied back.
    ///
    /// # Errors
    /// The process's GPU state is lost.
    pub fn attach(&mut self, delivered: Option<Delivered>, link: &mut dyn Link) -> Result<u64, String> {
        match phase() {
            Phase::Running => return Ok(0),
            Phase::Detached => {}
            Phase::Lost => return Err(LOST.into()),
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

    fn restore_driver(&mut self) -> Result<(), String> {
        if self.driver == Driver::Displaced {
            return Err("the driver's restore would overwrite what is there now".into());
        }
        if self.driver == Driver::Checkpointed {
            self.restore()?;
            faults::hit("attach-restored");
        }
        if self.driver == Driver::Locked {
            self.unlock()?;
            faults::hit("attach-unlocked");
        }
        Ok(())
    }

    /// Undoes as much as has been done. The mirror is mapped if something has to be copied back.
    fn bring_back(&mut self, delivered: Option<Delivered>, link: &mut dyn Link) -> Result<u64, String> {
        self.restore_driver()?;
        relax();
        offload::unpark(link);
        offload::take_up_shared(Whose::Own, link)?;
        let made = offload::make_anew()?;
        if let Some(delivered) =
            delivered.filter(|delivered| !made.is_empty() && delivered.id == self.mirror_id)
        {
            self.mirror = Some(Pinned::new(delivered, Mirror::map)?);
        }
        offload::map_again(&made)?;
        faults::hit("attach-mapped");
        let copied_bytes = driver::insist(|| self.copy_back(&made))?;
        offload::restrict(&made)?;
        // First everybody's own, then the others': nobody waits for somebody who waits.
        ipc::publish_again(link, &made)?;
        offload::take_up_shared(Whose::Others, link)?;
        offload::map_again(&[])?;
        registry().pieces.values_mut().for_each(|piece| piece.parked = None);
        Ok(copied_bytes)
    }

    fn copy_back(&mut self, ids: &[Id]) -> Result<u64, String> {
        let seen: Vec<(Seen, Option<u64>)> = {
            let registry = registry();
            let of = |id: &Id| {
                registry.pieces.get(id).map(|piece| (Seen::of(*id, piece, true), piece.mirrored.offset))
            };
            ids.iter().filter_map(of).collect()
        };
        if seen.is_empty() {
            return Ok(0);
        }
        let Some(Pinned { mirror, .. }) = &mut self.mirror else {
            return Err("the launcher has not delivered the memory of the GPU".into());
        };
        let contexts = contexts_of_devices(&seen.iter().map(|(seen, _)| seen.device).collect::<Vec<_>>());
        let mut views = Vec::with_capacity(seen.len());
        let mut pieces = Vec::with_capacity(seen.len());
        for (seen, offset) in &seen {
            let context =
                contexts.get(&seen.device).ok_or("no context can be had to copy device memory back")?;
            let view = View::of(seen)?;
            pieces.push(capture::Piece {
                context: context.context(),
                address: view.address,
                bytes: seen.bytes,
                offset: offset.ok_or("device memory without a place in the mirror")?,
                hashes: Vec::new(),
            });
            views.push(view);
        }
        mirror.copy_back(&pieces)?;
        Ok(pieces.iter().map(|piece| piece.bytes).sum())
    }

    /// Waits for submitted work, host functions included.
    fn lock(&mut self, deadline: Instant) -> Result<(), String> {
        let left_ms = deadline.saturating_duration_since(Instant::now()).as_millis();
        // SAFETY: all zeros is a valid value of a structure of numbers.
        let mut args: CUcheckpointLockArgs = unsafe { std::mem::zeroed() };
        // 0 would mean for ever.
        args.timeoutMs = u32::try_from(left_ms).unwrap_or(u32::MAX).max(1);
        // SAFETY: `args` is a local variable.
        let result = unsafe { driver::cuCheckpointProcessLock(pid(), &raw mut args) };
        told("cuCheckpointProcessLock", result).map_err(|error| {
            if result == sys::CUresult::CUDA_ERROR_NOT_READY as CUresult {
                format!("work on the GPU did not end in time ({error})")
            } else if result == sys::CUresult::CUDA_ERROR_NOT_SUPPORTED as CUresult {
                format!("{error}: {}", driver_support::not_supported())
            } else {
                error
            }
        })?;
        self.driver = Driver::Locked;
        Ok(())
    }

    /// Leaves the process locked if it fails.
    fn checkpoint(&mut self, deadline: Instant) -> Result<(), String> {
        // Nobody may be waiting for it any more.
        if Instant::now() >= deadline {
            return Err("cuCheckpointProcessLock took longer than it was given".into());
        }
        // SAFETY: all zeros is a valid value: no storage of our own.
        let mut args: CUcheckpointCheckpointArgs = unsafe { std::mem::zeroed() };
        // SAFETY: `args` is a local variable.
        let result = unsafe { driver::cuCheckpointProcessCheckpoint(pid(), &raw mut args) };
        told("cuCheckpointProcessCheckpoint", result)?;
        self.driver = Driver::Checkpointed;
        Ok(())
    }

    fn restore(&mut self) -> Result<(), String> {
        driver::insist(|| {
            // SAFETY: all zeros is a valid value: the same GPUs.
            let mut args: CUcheckpointRestoreArgs = unsafe { std::mem::zeroed() };
            // SAFETY: `args` is a local variable.
            let result = unsafe { driver::cuCheckpointProcessRestore(pid(), &raw mut args) };
            told("cuCheckpointProcessRestore", result)
        })?;
        self.driver = Driver::Locked;
        Ok(())
    }

    fn unlock(&mut self) -> Result<(), String> {
        driver::insist(|| {
            // SAFETY: all zeros is what the structure has to be.
            let mut args: CUcheckpointUnlockArgs = unsafe { std::mem::zeroed() };
            // SAFETY: `args` is a local variable.
            let result = unsafe { driver::cuCheckpointProcessUnlock(pid(), &raw mut args) };
            told("cuCheckpointProcessUnlock", result)
        })?;
        self.driver = Driver::Running;
        Ok(())
    }
}

/// The hashes of what the mirror has of a piece. The registry has none meanwhile, whatever comes of the capture.
fn take_hashes(id: Id) -> Vec<[u64; 2]> {
    registry().pieces.get_mut(&id).map_or_else(Vec::new, |piece| std::mem::take(&mut piece.mirrored.hashes))
}

/// The devices that have memory of ours.
fn devices() -> Vec<c_int> {
    registry().pieces.values().map(|piece| piece.device).collect()
}

/// A context to work in on each device, where one can be had.
fn contexts_of_devices(devices: &[c_int]) -> BTreeMap<c_int, context::OnDevice> {
    let mut contexts = BTreeMap::new();
    for device in devices {
        if !contexts.contains_key(device)
            && let Some(working) = context::on_device(*device)
        {
            contexts.insert(*device, working);
        }
    }
    contexts
}

/// From now on, calls of the agent's thread disturb nobody's stream capture. Only while the driver runs: a locked one
/// would not answer.
fn relax() {
    let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as CUstreamCaptureMode;
    // SAFETY: the mode is a local variable; the call changes nothing but the thread's mode.
    let _ = unsafe { driver::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
}

/// In the child of a fork, which has no driver's state: neither has what its parent was in the middle of.
pub(super) fn after_fork_in_child() {
    enter(Phase::Running);
}

/// Closes the gate at a moment at which no stream is being captured: a capture may not be kept waiting, since
/// what it waits for may be its own end.
fn close_between_captures(deadline: Instant) -> Result<(), String> {
    loop {
        while stream_capture::open_captures() > 0 {
            if Instant::now() >= deadline {
                return Err("a stream capture (cuStreamBeginCapture) did not end".into());
            }
            std::thread::sleep(LOOK);
        }
        gate::close(deadline).map_err(|inside| match inside {
            0 => "membarrier(2) failed".to_owned(),
            1 => "a call of the CUDA driver did not return".to_owned(),
            _ => format!("calls of the CUDA driver in {inside} threads did not return"),
        })?;
        if stream_capture::open_captures() == 0 {
            return Ok(());
        }
        gate::open();
    }
}

fn pid() -> c_int {
    // SAFETY: getpid has no preconditions.
    unsafe { libc::getpid() }
}
