//! Tests of streams, through their handlers. What a test must not leave to luck, it steers with host functions
//! that wait at a [`Gate`].

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "the calls in a block have one reason to be safe")]

mod captures;
mod events;
mod host;
mod memops;
mod order;
mod stress;

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cuda_abi::sys::{CUevent_flags, CUresult, CUstream_flags};
use cuda_abi::types::{CUevent, CUstream};
use parking_lot::{Condvar, Mutex};

use super::*;
use crate::entry;

const BLOCKING: u32 = CUstream_flags::CU_STREAM_DEFAULT as u32;
const NON_BLOCKING: u32 = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
const NO_TIMING: u32 = CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
const NULL: CUstream = null_mut();

const LEGACY: usize = 1;
const PER_THREAD: usize = 2;

fn default_stream(handle: usize) -> CUstream {
    handle as CUstream
}

/// Blocks its waiters until it is opened. A test that forgets to open it fails instead of hanging.
#[derive(Default)]
struct Gate {
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    fn new() -> Arc<Self> {
        Arc::default()
    }

    fn open(&self) {
        *self.is_open.lock() = true;
        self.opened.notify_all();
    }

    fn wait(&self) {
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut is_open = self.is_open.lock();
        while !*is_open && !self.opened.wait_until(&mut is_open, deadline).timed_out() {}
    }
}

/// What ran, in its order.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<&'static str>>>);

impl Log {
    fn note(&self, text: &'static str) {
        self.0.lock().push(text);
    }

    fn all(&self) -> Vec<&'static str> {
        self.0.lock().clone()
    }

    /// Puts a note on the stream.
    fn on(&self, stream: CUstream, text: &'static str) {
        let log = self.clone();
        launch(stream, move || log.note(text)).unwrap();
    }

    /// Puts a note on the stream that waits at a gate first.
    fn on_behind(&self, stream: CUstream, gate: &Arc<Gate>, text: &'static str) {
        let (log, gate) = (self.clone(), Arc::clone(gate));
        launch(stream, move || {
            gate.wait();
            log.note(text);
        })
        .unwrap();
    }
}

type Body = Box<dyn FnOnce() + Send>;

unsafe extern "C" fn call_body(data: *mut c_void) {
    // SAFETY: `data` comes from `body_data`, and each is called once.
    let body = unsafe { Box::from_raw(data.cast::<Body>()) };
    body();
}

fn body_data(body: impl FnOnce() + Send + 'static) -> *mut c_void {
    Box::into_raw(Box::new(Box::new(body) as Body)).cast()
}

/// cuLaunchHostFunc with a closure.
fn launch(stream: CUstream, body: impl FnOnce() + Send + 'static) -> Result {
    // SAFETY: the function takes what `body_data` gives.
    unsafe { cuLaunchHostFunc(stream, Some(call_body), body_data(body)) }
}

/// Blocks the stream until the gate opens.
fn block(stream: CUstream, gate: &Arc<Gate>) {
    let gate = Arc::clone(gate);
    launch(stream, move || gate.wait()).unwrap();
}

fn stream(flags: u32) -> CUstream {
    let mut stream = null_mut();
    // SAFETY: `stream` is a local variable.
    unsafe { cuStreamCreate(&raw mut stream, flags) }.unwrap();
    stream
}

fn event(flags: u32) -> CUevent {
    let mut event = null_mut();
    // SAFETY: `event` is a local variable.
    unsafe { cuEventCreate(&raw mut event, flags) }.unwrap();
    event
}

fn synchronize(stream: CUstream) -> Result {
    // SAFETY: handles are checked.
    unsafe { cuStreamSynchronize(stream) }
}

fn query(stream: CUstream) -> Result {
    // SAFETY: handles are checked.
    unsafe { cuStreamQuery(stream) }
}

fn destroy(stream: CUstream) -> Result {
    // SAFETY: handles are checked.
    unsafe { cuStreamDestroy_v2(stream) }
}

fn record(event: CUevent, stream: CUstream) -> Result {
    // SAFETY: handles are checked.
    unsafe { cuEventRecord(event, stream) }
}

fn wait_event(stream: CUstream, event: CUevent) -> Result {
    // SAFETY: handles are checked.
    unsafe { cuStreamWaitEvent(stream, event, 0) }
}

/// Runs `body` as a call through a `_ptsz` symbol.
fn per_thread<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    let mut result = None;
    entry::call("cuStreamQuery_ptsz", 0, cuda_abi::Class::Leave, true, || {
        result = Some(body());
        Ok(())
    });
    result.expect("the call ran")
}

/// Work that fails with `CUDA_ERROR_ILLEGAL_ADDRESS`.
fn fail(stream: CUstream) {
    submit(stream, Work::MemoryOps(Arc::new([MemoryOp::write_unchecked(0x10)]))).unwrap();
}

const NOT_READY: Result = Err(CUresult::CUDA_ERROR_NOT_READY);
