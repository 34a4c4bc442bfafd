//! What the tests of copies and graphs share: device memory, streams, and functions that wait.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cuda_abi::types::CUstream;
use parking_lot::{Condvar, Mutex};

/// Calls a handler with arguments that the test has made.
macro_rules! call {
    ($name:ident ( $($argument:expr),* $(,)? )) => {
        // SAFETY: a test passes what the call asks for, or what the call is to refuse without following it.
        unsafe { $crate::dispatch::$name($($argument),*) }
    };
}
pub(crate) use call;

/// Device memory of the current context.
pub(crate) struct Device {
    pub(crate) address: u64,
    pub(crate) len: usize,
}

impl Device {
    pub(crate) fn new(len: usize) -> Self {
        let mut address = 0;
        call!(cuMemAlloc_v2(&raw mut address, len)).unwrap();
        Self { address, len }
    }

    pub(crate) fn with(bytes: &[u8]) -> Self {
        let device = Self::new(bytes.len());
        device.write(bytes);
        device
    }

    pub(crate) fn write(&self, bytes: &[u8]) {
        call!(cuMemcpyHtoD_v2(self.address, bytes.as_ptr().cast(), bytes.len())).unwrap();
    }

    /// All bytes, as soon as the default stream comes to it.
    pub(crate) fn read(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        call!(cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), self.address, bytes.len())).unwrap();
        bytes
    }

    pub(crate) fn free(self) {
        call!(cuMemFree_v2(self.address)).unwrap();
    }
}

/// Bytes that differ from place to place.
pub(crate) fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|index| (index as u8).wrapping_mul(31).wrapping_add((index >> 8) as u8) ^ seed).collect()
}

/// A stream that does not wait for the default one.
pub(crate) fn stream() -> CUstream {
    let mut stream = std::ptr::null_mut();
    call!(cuStreamCreate(&raw mut stream, 1)).unwrap();
    stream
}

/// Holds work back until it is opened. A test that never opens it fails instead of hanging.
#[derive(Default)]
pub(crate) struct Gate {
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    /// A gate that the stream's work waits at.
    pub(crate) fn on(stream: CUstream) -> Arc<Self> {
        let gate = Arc::<Self>::default();
        let data = Arc::into_raw(Arc::clone(&gate)).cast_mut().cast();
        call!(cuLaunchHostFunc(stream, Some(wait_at_gate), data)).unwrap();
        gate
    }

    pub(crate) fn open(&self) {
        *self.is_open.lock() = true;
        self.opened.notify_all();
    }
}

unsafe extern "C" fn wait_at_gate(gate: *mut c_void) {
    // SAFETY: made of a gate by `Gate::on`, which calls for this once.
    let gate = unsafe { Arc::from_raw(gate.cast::<Gate>()) };
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut is_open = gate.is_open.lock();
    while !*is_open && !gate.opened.wait_until(&mut is_open, deadline).timed_out() {}
}
