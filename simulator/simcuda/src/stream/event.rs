//! Events: points in a stream's order that others can wait for, and when they were reached.

use std::sync::Arc;
use std::time::Instant;

use cuda_abi::sys::{CUevent_flags, CUevent_record_flags, CUevent_wait_flags, CUresult};
use cuda_abi::types::{CUcontext, CUevent, CUipcEventHandle, CUstream};
use parking_lot::Mutex;

use super::capture;
use super::object::{self, Stream, enqueue, find};
use super::queue::{Point, is_worker};
use super::work::{Task, Work};
use crate::context::{self, Context};
use crate::error::{Result, write_out};
use crate::handle::Table;
use crate::{memory, process};

const DISABLE_TIMING: u32 = CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
const INTERPROCESS: u32 = CUevent_flags::CU_EVENT_INTERPROCESS as u32;
const KNOWN_FLAGS: u32 = CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32 | DISABLE_TIMING | INTERPROCESS;

/// An event, which holds its last record only.
pub(crate) struct Event {
    pub(crate) handle: usize,
    pub(super) context: Arc<Context>,
    flags: u32,
    state: Mutex<State>,
}

struct State {
    /// Counts records, so that an older one that is reached late does not count.
    record: u64,
    last: Last,
    /// When the last record was reached.
    time: Option<Instant>,
}

/// Where an event was recorded last.
#[derive(Clone)]
pub(super) enum Last {
    /// Nowhere: then it counts as reached.
    Never,
    At(Point),
    /// In a stream's capture, at these nodes: then it represents no work.
    Captured(capture::Mark),
}

static EVENTS: Table<Event> = Table::new();

impl Event {
    pub(super) fn last(&self) -> Last {
        self.state.lock().last.clone()
    }

    pub(crate) fn is_of(&self, context: &Arc<Context>) -> bool {
        Arc::ptr_eq(&self.context, context)
    }

    /// What is to be done before the event.
    ///
    /// # Errors
    /// `CUDA_ERROR_CAPTURED_EVENT` if it was recorded in a capture.
    pub(super) fn point(&self) -> Result<Option<Point>> {
        match self.last() {
            Last::Never => Ok(None),
            Last::At(point) => Ok(Some(point)),
            Last::Captured(_) => Err(CUresult::CUDA_ERROR_CAPTURED_EVENT),
        }
    }

    /// Records the event on the stream, behind all of its work and behind `after`.
    fn record(self: &Arc<Self>, stream: &Arc<Stream>, after: Vec<Point>) -> Result {
        stream.queue.wait_for_room();
        // Held across the submission: of two records at once, the later in the order is the last.
        let mut state = self.state.lock();
        let record = state.record + 1;
        let point = enqueue(stream, Task::Stamp(Arc::clone(self), record), after)?;
        *state = State { record, last: Last::At(point), time: None };
        Ok(())
    }

    pub(super) fn mark_captured(&self, mark: capture::Mark) {
        let mut state = self.state.lock();
        *state = State { record: state.record + 1, last: Last::Captured(mark), time: None };
    }

    /// The event counts as recorded at `point` from now on: the launch of a graph that records it, which sets
    /// the time before the point is reached.
    pub(super) fn expect_at(&self, point: Point) {
        let mut state = self.state.lock();
        state.record += 1;
        state.last = Last::At(point);
    }

    /// A record is reached.
    pub(super) fn stamp_record(&self, record: u64) {
        let mut state = self.state.lock();
        if state.record == record {
            state.time = Some(Instant::now());
        }
    }

    /// A graph's node that records the event is reached.
    pub(super) fn stamp(&self) {
        self.state.lock().time = Some(Instant::now());
    }

    /// Where the event was recorded, if its time can be asked for.
    fn timed_point(&self) -> Result<Point> {
        if self.flags & DISABLE_TIMING != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
        }
        self.point()?.ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
    }

    /// When the event was reached.
    fn time(&self, point: &Point) -> Result<Instant> {
        if !point.is_reached() {
            return Err(CUresult::CUDA_ERROR_NOT_READY);
        }
        self.state.lock().time.ok_or(CUresult::CUDA_ERROR_NOT_READY)
    }
}

/// The live event of a handle.
///
/// # Errors
/// `CUDA_ERROR_INVALID_HANDLE`, or the sticky error of the event's context.
pub(crate) fn event_by_handle(handle: CUevent) -> Result<Arc<Event>> {
    process::machine()?;
    let event = EVENTS.get(handle as usize).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
    event.context.check()?;
    Ok(event)
}

/// Destroys the events of a context.
pub(super) fn context_destroyed(context: &Context) {
    for handle in context.streams.events.lock().drain() {
        EVENTS.remove(handle);
    }
}

pub(crate) unsafe fn cuEventCreate(out: *mut CUevent, flags: u32) -> Result {
    let context = context::current()?;
    let needs_no_timing = flags & INTERPROCESS != 0;
    if out.is_null() || flags & !KNOWN_FLAGS != 0 || (needs_no_timing && flags & DISABLE_TIMING == 0) {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let event = EVENTS.insert_with(|handle| {
        let state = State { record: 0, last: Last::Never, time: None };
        Event { handle, context: Arc::clone(&context), flags, state: Mutex::new(state) }
    });
    context.streams.events.lock().insert(event.handle);
    // SAFETY: `out` is the caller's out parameter, checked above.
    unsafe { write_out(out, event.handle as CUevent) }
}

/// Waiters for the event keep waiting for the work that it represented.
pub(crate) unsafe fn cuEventDestroy_v2(handle: CUevent) -> Result {
    process::machine()?;
    let event = EVENTS.remove(handle as usize).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
    event.context.streams.events.lock().remove(&event.handle);
    Ok(())
}

pub(crate) unsafe fn cuEventRecord(event: CUevent, stream: CUstream) -> Result {
    // SAFETY: the handles are checked there.
    unsafe { cuEventRecordWithFlags(event, stream, 0) }
}

pub(crate) unsafe fn cuEventRecordWithFlags(event: CUevent, stream: CUstream, flags: u32) -> Result {
    let is_external = flags == CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL as u32;
    if flags != 0 && !is_external {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let event = event_by_handle(event)?;
    let stream = find(stream)?;
    if !event.is_of(&stream.context) {
        return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
    if capture::record(&stream, &event, is_external)? {
        return Ok(());
    }
    // A record that becomes a node makes sense in a capture only (`cuda.h`, CU_EVENT_RECORD_EXTERNAL).
    if is_external {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    event.record(&stream, Vec::new())
}

pub(crate) unsafe fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: u32) -> Result {
    let is_external = flags == CUevent_wait_flags::CU_EVENT_WAIT_EXTERNAL as u32;
    if flags != 0 && !is_external {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let stream = find(stream)?;
    let event = event_by_handle(event)?;
    if capture::wait(&stream, &event, is_external)? {
        return Ok(());
    }
    if is_external {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    if let Some(point) = event.point()?.filter(|point| !point.is_reached()) {
        stream.queue.wait_for_room();
        enqueue(&stream, Task::Work(Work::Empty), vec![point])?;
    }
    Ok(())
}

/// Also an unsafe call during captures: it may ask about work that waits for the capture to end.
pub(crate) unsafe fn cuEventQuery(handle: CUevent) -> Result {
    let event = event_by_handle(handle)?;
    capture::forbid()?;
    capture::refuse_event(&event)?;
    match event.point()? {
        Some(point) if !point.is_reached() => Err(CUresult::CUDA_ERROR_NOT_READY),
        _ => event.context.check(),
    }
}

pub(crate) unsafe fn cuEventSynchronize(handle: CUevent) -> Result {
    let event = event_by_handle(handle)?;
    capture::refuse_event(&event)?;
    if let Some(point) = event.point()? {
        if is_worker() {
            return Err(CUresult::CUDA_ERROR_NOT_PERMITTED);
        }
        point.wait_for_program(&event.context);
        memory::after_synchronization();
    }
    event.context.check()
}

pub(crate) unsafe fn cuEventElapsedTime(out: *mut f32, start: CUevent, end: CUevent) -> Result {
    let (start, end) = (event_by_handle(start)?, event_by_handle(end)?);
    if !start.is_of(&end.context) {
        return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
    let (started, ended) = (start.timed_point()?, end.timed_point()?);
    let (start, end) = (start.time(&started)?, end.time(&ended)?);
    let milliseconds = match end.checked_duration_since(start) {
        Some(later) => later.as_secs_f64() * 1e3,
        None => start.duration_since(end).as_secs_f64() * -1e3,
    };
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, milliseconds as f32) }
}

pub(crate) unsafe fn cuEventElapsedTime_v2(out: *mut f32, start: CUevent, end: CUevent) -> Result {
    // SAFETY: all parameters are the caller's own.
    unsafe { cuEventElapsedTime(out, start, end) }
}

/// The event represents all work of the context so far.
pub(crate) unsafe fn cuCtxRecordEvent(context: CUcontext, event: CUevent) -> Result {
    let context = context::given_or_current(context)?;
    let event = event_by_handle(event)?;
    if !event.is_of(&context) {
        return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
    capture::refuse_context(&context)?;
    let pending = context.streams.pending();
    event.record(&object::own(&context)?, pending)
}

/// All later work of the context waits for the event.
pub(crate) unsafe fn cuCtxWaitEvent(context: CUcontext, event: CUevent) -> Result {
    let context = context::given_or_current(context)?;
    let event = event_by_handle(event)?;
    capture::refuse_context(&context)?;
    if let Some(point) = event.point()?.filter(|point| !point.is_reached()) {
        context.streams.gate(point);
    }
    Ok(())
}

pub(crate) unsafe fn cuIpcGetEventHandle(_out: *mut CUipcEventHandle, handle: CUevent) -> Result {
    event_by_handle(handle)?;
    Err(CUresult::CUDA_ERROR_NOT_SUPPORTED)
}

pub(crate) unsafe fn cuIpcOpenEventHandle(_out: *mut CUevent, _handle: CUipcEventHandle) -> Result {
    context::current()?;
    Err(CUresult::CUDA_ERROR_NOT_SUPPORTED)
}
