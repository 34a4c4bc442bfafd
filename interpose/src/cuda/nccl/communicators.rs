//! NCCL's communicators: recorded from before their creation until their destruction.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering::Relaxed;

use super::{Communicator, IN_PROGRESS, IS_PASSED, SUCCESS, Status};
use crate::cuda::shared::Shared;

/// A communicator that exists, is being created or is being destroyed.
#[derive(Clone, Copy)]
pub(super) struct Noted {
    /// 0 if unknown: several.
    pub ranks: c_int,
    pub call: &'static str,
}

struct Communicators {
    live: BTreeMap<usize, Noted>,
    /// Calls in progress, by their number.
    under_way: BTreeMap<u64, Noted>,
    last: u64,
}

/// The lock must not be held across a call of NCCL.
static COMMUNICATORS: Shared<Communicators> =
    Shared::new(Communicators { live: BTreeMap::new(), under_way: BTreeMap::new(), last: 0 });

/// The reason why the process cannot be saved, if it is NCCL.
pub(crate) fn obstacle() -> Option<String> {
    const CHANGE: &str = "communicators of several ranks cannot be saved; destroy it (ncclCommDestroy), or \
                          run with one rank";
    if IS_PASSED.load(Relaxed) {
        return Some(
            "it uses a second copy of NCCL, whose communicators are not seen; use one only".to_owned(),
        );
    }
    let communicators = COMMUNICATORS.lock();
    let told = |noted: &Noted, state: &str| {
        let Noted { ranks, call } = noted;
        let ranks = if *ranks == 0 { "several".to_owned() } else { ranks.to_string() };
        format!("an NCCL communicator of {ranks} ranks ({call}) {state}: {CHANGE}")
    };
    let is_one = |noted: &&Noted| noted.ranks != 1;
    let live = communicators.live.values().find(is_one).map(|noted| told(noted, "is alive"));
    let under_way = || {
        let noted = communicators.under_way.values().find(is_one);
        noted.map(|noted| told(noted, "is under way"))
    };
    live.or_else(under_way)
}

/// The ranks of a communicator; 0 if unknown.
pub(super) fn ranks_of(communicator: Communicator) -> c_int {
    COMMUNICATORS.lock().live.get(&(communicator as usize)).map_or(0, |noted| noted.ranks)
}

/// Does what makes or destroys a communicator.
fn under_way(noted: Noted, work: impl FnOnce() -> Status) -> Status {
    struct UnderWay(u64);
    impl Drop for UnderWay {
        fn drop(&mut self) {
            COMMUNICATORS.lock().under_way.remove(&self.0);
        }
    }
    let mut communicators = COMMUNICATORS.lock();
    communicators.last += 1;
    let number = communicators.last;
    communicators.under_way.insert(number, noted);
    drop(communicators);
    let _under_way = UnderWay(number);
    work()
}

/// Creates `count` communicators from `out` on, and records them.
pub(super) fn made(
    noted: Noted,
    out: *mut Communicator,
    count: c_int,
    make: impl FnOnce() -> Status,
) -> Status {
    under_way(noted, || {
        let result = make();
        // In a group, or if it is not to block, it is there before it is complete.
        if (result == SUCCESS || result == IN_PROGRESS) && !out.is_null() {
            for index in 0..usize::try_from(count).unwrap_or(0) {
                // SAFETY: NCCL has written that many.
                let made = unsafe { out.wrapping_add(index).read() };
                if !made.is_null() {
                    COMMUNICATORS.lock().live.insert(made as usize, noted);
                }
            }
        }
        result
    })
}

/// Destroys a communicator, which is forgotten before: its handle may be another one's at once.
pub(super) fn destroyed(communicator: Communicator, destroy: impl FnOnce() -> Status) -> Status {
    let known = COMMUNICATORS.lock().live.get(&(communicator as usize)).copied();
    let Some(noted) = known else { return destroy() };
    under_way(noted, || {
        COMMUNICATORS.lock().live.remove(&(communicator as usize));
        let result = destroy();
        if result != SUCCESS && result != IN_PROGRESS {
            COMMUNICATORS.lock().live.insert(communicator as usize, noted);
        }
        result
    })
}

/// `ncclCommCount`.
type Count = unsafe extern "C" fn(Communicator, *mut c_int) -> Status;

/// Asks NCCL for the ranks of a communicator. It does not report them for an incomplete one.
fn learn_ranks(communicator: Communicator, count: Count) {
    let mut ranks = 0;
    // The colour for none gives no communicator.
    // SAFETY: the communicator was made just now, `ranks` is a local variable.
    if !communicator.is_null() && unsafe { count(communicator, &raw mut ranks) } == SUCCESS {
        let mut communicators = COMMUNICATORS.lock();
        let known = communicators.live.get_mut(&(communicator as usize));
        known.into_iter().for_each(|noted| noted.ranks = ranks);
    }
}

/// Splits a communicator. How many ranks there are in a part, the other ranks decide; of one rank there is no smaller
/// part.
pub(super) fn split(of: Communicator, out: *mut Communicator, split: impl FnOnce() -> Status) -> Status {
    let ranks = if ranks_of(of) == 1 { 1 } else { 0 };
    let count = super::of_caller(c"ncclCommCount");
    let result = made(Noted { ranks, call: "ncclCommSplit" }, out, 1, split);
    if result == SUCCESS && ranks == 0 && !out.is_null() && !count.is_null() {
        // SAFETY: NCCL has written it.
        let part = unsafe { *out };
        // SAFETY: the address is that of NCCL's ncclCommCount, which has this type.
        let count = unsafe { std::mem::transmute::<*mut c_void, Count>(count) };
        learn_ranks(part, count);
    }
    result
}
