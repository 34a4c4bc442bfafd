//! The program's call stack at each physical allocation.
//!
//! Off unless the job has `CKPT_ORIGINS=1` in its environment, since it costs some microseconds for each physical
//! allocation (not for each small allocation). Only return addresses are recorded then; they are resolved to names
//! while a checkpoint is staged and the program runs. The unwinder uses the unwind tables of the code and stops where
//! there are none (code that was generated at run time): frame pointers are not reliable.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::sync::OnceLock;

use ckpt_protocol::agent::{GpuReport, Region};

use super::physical::{Id, registry};
use crate::cuda::elf;
use crate::cuda::shared::Shared;
use crate::process;

const VARIABLE: &[u8] = b"CKPT_ORIGINS";

/// Calls of the program's that are noted, the innermost ones.
const CALLS: usize = 16;
/// Calls that are looked at for that, our own included.
const MAX_FRAMES: usize = 64;
/// Different stacks that a report has room for, so that it stays within a message's bounds.
const STACKS: usize = 1024;

/// The addresses of our own code, if origins are to be noted.
static IS_ON: OnceLock<Range<usize>> = OnceLock::new();

/// The names of the addresses that were seen so far.
static NAMES: Shared<BTreeMap<usize, String>> = Shared::new(BTreeMap::new());

/// Reads the environment: from the constructor only.
pub(crate) fn activate() {
    if process::variable(VARIABLE) == Some(b"1") {
        let _ = IS_ON.set(elf::ourselves());
    }
}

/// Return addresses, innermost call first; nothing where origins are not noted.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Backtrace(Option<Box<[usize]>>);

impl Backtrace {
    /// Of the call that is under way. No lock may be held: the unwinder takes the loader's.
    pub fn here() -> Self {
        Self(IS_ON.get().map(|ours| Stack::of_caller(ours).addresses()))
    }

    fn addresses(&self) -> &[usize] {
        self.0.as_deref().unwrap_or_default()
    }
}

/// A stack as far as it was walked.
struct Stack<'a> {
    ours: &'a Range<usize>,
    walked: usize,
    found: [usize; CALLS],
    count: usize,
}

impl<'a> Stack<'a> {
    fn of_caller(ours: &'a Range<usize>) -> Self {
        let mut stack = Self { ours, walked: 0, found: [0; CALLS], count: 0 };
        // SAFETY: `visit` gets the pointer to `stack`, which outlives the call. The unwinder reads the calling thread's
        // stack by the tables of the code on it and changes nothing.
        let _ = unsafe { _Unwind_Backtrace(visit, (&raw mut stack).cast()) };
        stack
    }

    fn addresses(&self) -> Box<[usize]> {
        self.found[..self.count].into()
    }

    /// Whether to go on.
    fn add(&mut self, address: usize) -> bool {
        self.walked += 1;
        if !self.ours.contains(&address) {
            self.found[self.count] = address;
            self.count += 1;
        }
        self.count < CALLS && self.walked < MAX_FRAMES
    }
}

/// The unwinder's own.
#[repr(C)]
struct Context {
    _private: [u8; 0],
}

// Itanium C++ ABI, "Exception Handling", and LSB, "Interfaces for libgcc_s": part of the unwinder that every Rust
// program has.
unsafe extern "C" {
    fn _Unwind_Backtrace(
        visit: unsafe extern "C" fn(*mut Context, *mut c_void) -> c_int,
        data: *mut c_void,
    ) -> c_int;
    fn _Unwind_GetIP(context: *mut Context) -> usize;
}

/// # Safety
/// To be called by the unwinder, with what [`Stack::of_caller`] has given it.
unsafe extern "C" fn visit(context: *mut Context, data: *mut c_void) -> c_int {
    const GO_ON: c_int = 0;
    const NORMAL_STOP: c_int = 4;
    // SAFETY: the context is the unwinder's.
    let address = unsafe { _Unwind_GetIP(context) };
    // SAFETY: it is the stack of `of_caller`, which is not used elsewhere meanwhile.
    let stack = unsafe { &mut *data.cast::<Stack<'_>>() };
    if address != 0 && stack.add(address) { GO_ON } else { NORMAL_STOP }
}

/// Finds the names of what has none yet: while the program runs, since it takes a while.
pub(crate) fn resolve_names() {
    if IS_ON.get().is_none() {
        return;
    }
    let addresses: Vec<usize> = registry()
        .allocations
        .values()
        .flat_map(|allocation| allocation.origin.addresses())
        .copied()
        .collect();
    let mut names = NAMES.lock();
    for address in addresses {
        // The call itself lies before the address that it returns to.
        names.entry(address).or_insert_with(|| elf::name_of(address.wrapping_sub(1)));
    }
}

/// Notes in a report where its regions come from.
pub(crate) fn note(report: &mut GpuReport, ids: &BTreeMap<u64, Id>) {
    if IS_ON.get().is_none() {
        return;
    }
    let registry = registry();
    let mut known = BTreeMap::new();
    let mut is_too_much = false;
    for Region { offset, origin, .. } in &mut report.regions {
        let Some(allocation) = ids.get(offset).and_then(|id| registry.allocations.get(id)) else { continue };
        if allocation.origin.addresses().is_empty() {
            continue;
        }
        let next = known.len();
        if next >= STACKS && !known.contains_key(&allocation.origin) {
            is_too_much = true;
            continue;
        }
        *origin = Some(*known.entry(allocation.origin.clone()).or_insert(next));
    }
    drop(registry);
    let names = NAMES.lock();
    let name = |address: &usize| names.get(address).cloned().unwrap_or_else(|| format!("{address:#x}"));
    let mut stacks: Vec<(usize, Vec<String>)> =
        known.iter().map(|(origin, index)| (*index, origin.addresses().iter().map(name).collect())).collect();
    stacks.sort_unstable_by_key(|(index, _)| *index);
    report.origins = stacks.into_iter().map(|(_, stack)| stack).collect();
    if is_too_much {
        report.remarks.push(format!("memory comes from more than {STACKS} places: not all are reported"));
    }
}
