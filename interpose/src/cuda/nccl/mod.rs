//! Interception of NCCL: every call that other ranks have to match is a step of the consistent cut
//! (`docs/design/collectives.md`).
//!
//! | module | does |
//! |---|---|
//! | `calls` | one exported function for each call that is a step, or that changes which communicators there are |
//! | `library` | which copy of NCCL a call goes to |
//! | `steps` | counts a call, and parks it if a cut is wanted |
//! | `communicators` | the communicators, and the steps of those that do not block |
//! | `graphs`, `graph_calls` | calls that were captured, and the launches of their graphs |
//! | `in_flight` | whether the work of the steps is still on the GPU |
//! | `interface` | the interface of NCCL's sockets |
//!
//! No call here passes the gate, since a call of NCCL may wait for other processes: at a cut it is parked outside, and
//! the driver calls that NCCL makes inside it pass the gate by themselves.
//!
//! Signatures are those of NCCL's public header, `nccl.h`, which are the same in 2.18 to 2.32 (NCCL user guide, "NCCL
//! API"; compared in `docs/measurements.md`).

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{
    AtomicPtr, AtomicU64,
    Ordering::{AcqRel, Acquire},
};

use ckpt_cut::rank::Clock;
use ckpt_cut::{MemberReport, Order, Report};

use super::shared::Shared;
use communicators::Communicators;
use library::Target;

mod calls;
mod communicators;
pub(super) mod graph_calls;
pub(super) mod graphs;
mod in_flight;
pub mod interface;
mod library;
mod steps;

pub(super) use communicators::uncut;
pub(super) use in_flight::InFlight;
pub(super) use library::{concerns_us, is_ours, substitute};

/// `ncclResult_t`.
type Status = c_int;
const SUCCESS: Status = 0;
const SYSTEM_ERROR: Status = 2;
const INVALID_ARGUMENT: Status = 4;
const INVALID_USAGE: Status = 5;
const IN_PROGRESS: Status = 7;

/// `ncclComm_t`.
type Communicator = *mut c_void;

/// A call of NCCL: its index in the table, and what it goes to.
#[derive(Clone, Copy)]
struct Call {
    index: u32,
    target: Target,
    /// The number of the copy of NCCL: 0 for the usual one.
    copy: usize,
}

/// What this process is as a rank. It is made when it is first needed and never freed: calls use it without a lock.
struct Ranks {
    clock: Clock,
    communicators: Shared<Communicators>,
    graphs: Shared<graphs::Graphs>,
}

static RANKS: AtomicPtr<Ranks> = AtomicPtr::new(null_mut());

/// Changes whenever a handle has another meaning: threads keep what they have looked up.
static GENERATION: AtomicU64 = AtomicU64::new(0);

#[inline]
fn ranks() -> &'static Ranks {
    // SAFETY: what is stored was leaked in `make_ranks`.
    unsafe { RANKS.load(Acquire).as_ref() }.unwrap_or_else(make_ranks)
}

fn new_ranks() -> *mut Ranks {
    // The agent polls, so that nothing has to wake it.
    let clock = Clock::new(&calls::CALLS, || ());
    let (communicators, graphs) = (Shared::new(Communicators::new()), Shared::new(graphs::Graphs::new()));
    Box::into_raw(Box::new(Ranks { clock, communicators, graphs }))
}

#[cold]
fn make_ranks() -> &'static Ranks {
    let fresh = new_ranks();
    let current = match RANKS.compare_exchange(null_mut(), fresh, AcqRel, Acquire) {
        Ok(_) => fresh,
        Err(current) => {
            // SAFETY: it was made above and no other thread has seen it.
            drop(unsafe { Box::from_raw(fresh) });
            current
        }
    };
    // SAFETY: what is stored is never freed.
    unsafe { &*current }
}

/// Follows an order of the launcher's coordinator.
pub(super) fn follow(order: Order) {
    ranks().clock.follow(order);
}

/// The process's steps, while a cut is wanted. A step whose work is on the GPU is still in progress.
pub(super) fn report(in_flight: &mut InFlight) -> Option<Report> {
    // SAFETY: what is stored was leaked.
    let ranks = unsafe { RANKS.load(Acquire).as_ref() }?;
    let mut report = ranks.clock.report()?;
    if report.in_call == 0 && ranks.clock.has_met_targets() && in_flight.is_any(&report) {
        report.in_call = 1;
    }
    Some(report)
}

/// How far the process is on each communicator, whether a cut is wanted or not.
pub(super) fn members() -> Vec<MemberReport> {
    // SAFETY: what is stored was leaked.
    unsafe { RANKS.load(Acquire).as_ref() }.map(|ranks| ranks.clock.members()).unwrap_or_default()
}

/// The devices on which the process is a rank beside others.
pub(super) fn devices() -> Vec<c_int> {
    // SAFETY: what is stored was leaked.
    unsafe { RANKS.load(Acquire).as_ref() }
        .map(|ranks| ranks.communicators.lock().devices())
        .unwrap_or_default()
}

/// The call whose effect on the other ranks is not known.
static UNKNOWN: OnceLock<&'static str> = OnceLock::new();

/// Why the process cannot be saved at a cut either, if it is NCCL.
pub(super) fn obstacle() -> Option<String> {
    if library::is_passed() {
        return Some(
            "it uses a copy of NCCL whose communicators are not seen: the fifth one, one loaded by dlmopen, or another \
             than the first that is called by names as pncclAllReduce; use fewer"
                .to_owned(),
        );
    }
    if let Some(call) = UNKNOWN.get() {
        return Some(format!(
            "it has called {call} of NCCL, which ranks wait for in a way that is not supported; run without"
        ));
    }
    // SAFETY: what is stored was leaked.
    if unsafe { RANKS.load(Acquire).as_ref() }.is_some_and(|ranks| ranks.graphs.lock().has_calls_in_bodies())
    {
        return Some(
            "it has captured calls of NCCL into the body of a conditional node, and the GPU decides how often they run; \
             capture them into a graph that the program launches itself"
                .to_owned(),
        );
    }
    communicators::unnamed()
}

/// In the child of a fork: communicators do not outlive a fork, and the threads that may hold a lock are gone.
pub(super) fn after_fork_in_child() {
    if !RANKS.load(Acquire).is_null() {
        RANKS.store(new_ranks(), std::sync::atomic::Ordering::Release);
        GENERATION.fetch_add(1, AcqRel);
        graphs::GENERATION.fetch_add(1, AcqRel);
    }
}
