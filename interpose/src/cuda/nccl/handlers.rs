//! Handlers of NCCL's calls: communicators are recorded from before their creation until their destruction.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{Communicator, Config, IN_PROGRESS, IS_PASSED, SUCCESS, Status, UniqueId};

/// A communicator that exists, is being created or is being destroyed.
#[derive(Clone, Copy)]
struct Noted {
    /// 0 if unknown: several.
    ranks: c_int,
    call: &'static str,
}

struct Communicators {
    live: BTreeMap<usize, Noted>,
    /// Calls in progress, by their number.
    under_way: BTreeMap<u64, Noted>,
    last: u64,
}

static COMMUNICATORS: Mutex<Communicators> =
    Mutex::new(Communicators { live: BTreeMap::new(), under_way: BTreeMap::new(), last: 0 });

/// The lock must not be held across a call of NCCL.
fn communicators() -> MutexGuard<'static, Communicators> {
    COMMUNICATORS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The reason why the process cannot be saved, if it is NCCL.
pub(crate) fn obstacle() -> Option<String> {
    const CHANGE: &str = "communicators of several ranks cannot be saved; destroy it (ncclCommDestroy), or \
                          run with one rank";
    if IS_PASSED.load(Relaxed) {
        return Some(
            "it uses a second copy of NCCL, whose communicators are not seen; use one only".to_owned(),
        );
    }
    let communicators = communicators();
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
fn ranks_of(communicator: Communicator) -> c_int {
    communicators().live.get(&(communicator as usize)).map_or(0, |noted| noted.ranks)
}

/// Does what makes or destroys a communicator.
fn under_way(noted: Noted, work: impl FnOnce() -> Status) -> Status {
    struct UnderWay(u64);
    impl Drop for UnderWay {
        fn drop(&mut self) {
            communicators().under_way.remove(&self.0);
        }
    }
    let mut communicators = communicators();
    communicators.last += 1;
    let number = communicators.last;
    communicators.under_way.insert(number, noted);
    drop(communicators);
    let _under_way = UnderWay(number);
    work()
}

/// Creates `count` communicators from `out` on, and records them.
fn made(noted: Noted, out: *mut Communicator, count: c_int, make: impl FnOnce() -> Status) -> Status {
    under_way(noted, || {
        let result = make();
        // In a group, or if it is not to block, it is there before it is complete.
        if (result == SUCCESS || result == IN_PROGRESS) && !out.is_null() {
            for index in 0..usize::try_from(count).unwrap_or(0) {
                // SAFETY: NCCL has written that many.
                let made = unsafe { out.wrapping_add(index).read() };
                if !made.is_null() {
                    communicators().live.insert(made as usize, noted);
                }
            }
        }
        result
    })
}

/// Destroys a communicator, which is forgotten before: its handle may be another one's at once.
fn destroyed(communicator: Communicator, destroy: impl FnOnce() -> Status) -> Status {
    let known = communicators().live.get(&(communicator as usize)).copied();
    let Some(noted) = known else { return destroy() };
    under_way(noted, || {
        communicators().live.remove(&(communicator as usize));
        let result = destroy();
        if result != SUCCESS && result != IN_PROGRESS {
            communicators().live.insert(communicator as usize, noted);
        }
        result
    })
}

/// # Safety
/// As for NCCL's.
pub(super) unsafe fn ncclCommInitRank(
    real: unsafe extern "C" fn(*mut Communicator, c_int, UniqueId, c_int) -> Status,
    out: *mut Communicator,
    ranks: c_int,
    id: UniqueId,
    rank: c_int,
) -> Status {
    let noted = Noted { ranks, call: "ncclCommInitRank" };
    // SAFETY: the parameters are those of our own caller.
    made(noted, out, 1, || unsafe { real(out, ranks, id, rank) })
}

/// # Safety
/// As for NCCL's.
pub(super) unsafe fn ncclCommInitRankConfig(
    real: unsafe extern "C" fn(*mut Communicator, c_int, UniqueId, c_int, Config) -> Status,
    out: *mut Communicator,
    ranks: c_int,
    id: UniqueId,
    rank: c_int,
    config: Config,
) -> Status {
    let noted = Noted { ranks, call: "ncclCommInitRankConfig" };
    // SAFETY: the parameters are those of our own caller.
    made(noted, out, 1, || unsafe { real(out, ranks, id, rank, config) })
}

/// # Safety
/// As for NCCL's.
pub(super) unsafe fn ncclCommInitRankScalable(
    real: unsafe extern "C" fn(*mut Communicator, c_int, c_int, c_int, *mut UniqueId, Config) -> Status,
    out: *mut Communicator,
    ranks: c_int,
    rank: c_int,
    id_count: c_int,
    ids: *mut UniqueId,
    config: Config,
) -> Status {
    let noted = Noted { ranks, call: "ncclCommInitRankScalable" };
    // SAFETY: the parameters are those of our own caller.
    made(noted, out, 1, || unsafe { real(out, ranks, rank, id_count, ids, config) })
}

/// # Safety
/// As for NCCL's.
pub(super) unsafe fn ncclCommInitAll(
    real: unsafe extern "C" fn(*mut Communicator, c_int, *const c_int) -> Status,
    out: *mut Communicator,
    count: c_int,
    devices: *const c_int,
) -> Status {
    let noted = Noted { ranks: count, call: "ncclCommInitAll" };
    // SAFETY: the parameters are those of our own caller.
    made(noted, out, count, || unsafe { real(out, count, devices) })
}

/// `ncclCommCount`.
type Count = unsafe extern "C" fn(Communicator, *mut c_int) -> Status;

/// Asks NCCL for the ranks of a communicator. It does not report them for an incomplete one.
fn learn_ranks(communicator: Communicator, count: Count) {
    let mut ranks = 0;
    // The colour for none gives no communicator.
    // SAFETY: the communicator was made just now, `ranks` is a local variable.
    if !communicator.is_null() && unsafe { count(communicator, &raw mut ranks) } == SUCCESS {
        let mut communicators = communicators();
        let known = communicators.live.get_mut(&(communicator as usize));
        known.into_iter().for_each(|noted| noted.ranks = ranks);
    }
}

/// How many ranks there are in a part, the other ranks decide; of one rank there is no smaller part.
///
/// # Safety
/// As for NCCL's.
pub(super) unsafe fn ncclCommSplit(
    real: unsafe extern "C" fn(Communicator, c_int, c_int, *mut Communicator, Config) -> Status,
    of: Communicator,
    color: c_int,
    key: c_int,
    out: *mut Communicator,
    config: Config,
) -> Status {
    let ranks = if ranks_of(of) == 1 { 1 } else { 0 };
    let noted = Noted { ranks, call: "ncclCommSplit" };
    let count = super::of_caller(c"ncclCommCount");
    // SAFETY: the parameters are those of our own caller.
    let result = made(noted, out, 1, || unsafe { real(of, color, key, out, config) });
    if result == SUCCESS && ranks == 0 && !out.is_null() && !count.is_null() {
        // SAFETY: NCCL has written it.
        let part = unsafe { *out };
        // SAFETY: the address is that of NCCL's ncclCommCount, which has this type.
        let count = unsafe { std::mem::transmute::<*mut c_void, Count>(count) };
        learn_ranks(part, count);
    }
    result
}

/// # Safety
/// As for NCCL's.
pub(super) unsafe fn ncclCommShrink(
    real: unsafe extern "C" fn(Communicator, *mut c_int, c_int, *mut Communicator, Config, c_int) -> Status,
    of: Communicator,
    excluded: *mut c_int,
    excluded_count: c_int,
    out: *mut Communicator,
    config: Config,
    flags: c_int,
) -> Status {
    // Less than one would be none of which we know.
    let ranks = ranks_of(of).saturating_sub(excluded_count).max(0);
    let noted = Noted { ranks, call: "ncclCommShrink" };
    // SAFETY: the parameters are those of our own caller.
    made(noted, out, 1, || unsafe { real(of, excluded, excluded_count, out, config, flags) })
}

/// # Safety
/// As for NCCL's.
pub(super) unsafe fn ncclCommGrow(
    real: unsafe extern "C" fn(
        Communicator,
        c_int,
        *const UniqueId,
        c_int,
        *mut Communicator,
        Config,
    ) -> Status,
    of: Communicator,
    ranks: c_int,
    id: *const UniqueId,
    rank: c_int,
    out: *mut Communicator,
    config: Config,
) -> Status {
    let noted = Noted { ranks, call: "ncclCommGrow" };
    // SAFETY: the parameters are those of our own caller.
    made(noted, out, 1, || unsafe { real(of, ranks, id, rank, out, config) })
}

/// # Safety
/// As for NCCL's.
pub(super) unsafe fn ncclCommDestroy(
    real: unsafe extern "C" fn(Communicator) -> Status,
    communicator: Communicator,
) -> Status {
    // SAFETY: the parameters are those of our own caller.
    destroyed(communicator, || unsafe { real(communicator) })
}

/// # Safety
/// As for NCCL's.
pub(super) unsafe fn ncclCommAbort(
    real: unsafe extern "C" fn(Communicator) -> Status,
    communicator: Communicator,
) -> Status {
    // SAFETY: the parameters are those of our own caller.
    destroyed(communicator, || unsafe { real(communicator) })
}
