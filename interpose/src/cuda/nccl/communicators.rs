//! NCCL's communicators: recorded from before their creation until their destruction.
//!
//! A call that does not block may return before it is complete. Its step is kept until NCCL reports that the
//! communicator is not in progress any more (`ncclCommGetAsyncError`).

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{
    AtomicUsize,
    Ordering::{AcqRel, Acquire, Release},
};

use ckpt_cut::rank::{Entry, InCall};
use ckpt_cut::{Member, Name, Role};

use super::steps::{Begun, enter, finish};
use super::{
    Call, Communicator, GENERATION, IN_PROGRESS, INVALID_ARGUMENT, INVALID_USAGE, SUCCESS, Status, calls,
    ranks,
};
use crate::cuda::elf;

/// `NCCL_SPLIT_NOCOLOR`.
const NO_COLOR: c_int = -1;
/// A flag of `ncclCommShrink`: what is under way on the parent is stopped first.
const SHRINK_ABORT: c_int = 1;

/// A communicator that exists.
#[derive(Clone)]
struct Known {
    entry: Arc<Entry>,
    /// 0 if unknown: several.
    ranks: c_int,
    /// The process's ordinal of its device; `None` until it exists.
    device: Option<c_int>,
    /// The call that has made it.
    call: u32,
    is_grown: bool,
    /// Whether ranks may name it differently.
    is_unnamed: bool,
    splits: u64,
    grows: u64,
    /// By the excluded ranks.
    shrinks: BTreeMap<Vec<c_int>, u64>,
}

/// A communicator that is being made.
struct Making {
    /// Where NCCL writes its handle.
    out: usize,
    parent: usize,
    known: Known,
    /// For a part of a communicator, which has its own entry from its existence on: its member, as far as that is known.
    part: Option<Member>,
    /// Its step, where the call has returned before.
    in_call: Option<Arc<InCall<'static>>>,
}

/// A step on communicators that are in progress.
struct Kept {
    handles: Vec<usize>,
    _in_call: Arc<InCall<'static>>,
}

/// The lock must not be held across a call of NCCL.
pub(super) struct Communicators {
    live: BTreeMap<usize, Known>,
    making: BTreeMap<u64, Making>,
    kept: Vec<Kept>,
    last: u64,
    /// For names of communicators that only this process has.
    own: u64,
}

impl Communicators {
    pub fn new() -> Self {
        Self { live: BTreeMap::new(), making: BTreeMap::new(), kept: Vec::new(), last: 0, own: 0 }
    }

    /// The devices of communicators of several ranks.
    pub fn devices(&self) -> Vec<c_int> {
        let several = self.live.values().filter(|known| known.ranks != 1);
        let devices: BTreeSet<c_int> = several.filter_map(|known| known.device).collect();
        devices.into_iter().collect()
    }
}

/// How many calls are waited for that have returned.
static WAITING: AtomicUsize = AtomicUsize::new(0);

/// A communicator that a call is to make.
pub(super) struct Plan {
    pub ranks: c_int,
    pub rank: c_int,
    pub name: Name,
    pub alias: Option<Name>,
    pub is_grown: bool,
    pub is_unnamed: bool,
}

impl Plan {
    pub fn of_ids(ranks: c_int, ids: &[u8], rank: c_int) -> Self {
        let name = Name::of_unique_ids(ids);
        Self { ranks, rank, name, alias: None, is_grown: false, is_unnamed: false }
    }
}

/// The communicators of `ncclCommInitAll`, which no other process has.
pub(super) fn plan_all(count: c_int) -> Vec<Plan> {
    let mut communicators = ranks().communicators.lock();
    communicators.own += 1;
    let mut id = [0_u8; 24];
    // SAFETY: getrandom(2) writes at most so many bytes. Without them the name is that of the process.
    unsafe { libc::getrandom(id.as_mut_ptr().cast(), 16, libc::GRND_NONBLOCK) };
    id[16..].copy_from_slice(&(communicators.own << 32 | u64::from(std::process::id())).to_le_bytes());
    (0..count).map(|rank| Plan::of_ids(count, &id, rank)).collect()
}

/// What `ncclCommShrink` leaves of a communicator.
pub(super) fn plan_shrunk(of: Communicator, excluded: &[c_int]) -> Vec<Plan> {
    let mut communicators = ranks().communicators.lock();
    let Some(known) = communicators.live.get_mut(&(of as usize)) else { return Vec::new() };
    let mut sorted = excluded.to_vec();
    sorted.sort_unstable();
    let rank = signed(known.entry.member().index);
    let below = sorted.iter().filter(|excluded| **excluded < rank).count();
    // Less than one would be none of which we know.
    let left = known.ranks.saturating_sub(number(sorted.len())).max(0);
    let name = known.entry.member().communicator;
    let count = known.shrinks.entry(sorted).or_insert(0);
    let name = name.shrink(*count, excluded);
    *count += 1;
    let is_unnamed = known.is_grown || known.is_unnamed;
    let rank = rank.saturating_sub(number(below));
    vec![Plan { ranks: left, rank, name, alias: None, is_grown: false, is_unnamed }]
}

/// What `ncclCommGrow` makes of a communicator, for one of its ranks or for a new one.
pub(super) fn plan_grown(of: Communicator, ranks: c_int, id: Option<&[u8]>, rank: c_int) -> Vec<Plan> {
    let by_id = id.map(Name::of_unique_ids);
    if of.is_null() {
        let Some(name) = by_id else { return Vec::new() };
        return vec![Plan { ranks, rank, name, alias: None, is_grown: true, is_unnamed: false }];
    }
    let mut communicators = super::ranks().communicators.lock();
    let Some(known) = communicators.live.get_mut(&(of as usize)) else { return Vec::new() };
    let Member { communicator, index } = known.entry.member();
    let name = communicator.grow(known.grows);
    known.grows += 1;
    let is_unnamed = known.is_grown || known.is_unnamed;
    vec![Plan { ranks, rank: signed(index), name, alias: by_id, is_grown: true, is_unnamed }]
}

fn signed(index: u32) -> c_int {
    c_int::try_from(index).unwrap_or(c_int::MAX)
}

fn number(count: usize) -> c_int {
    c_int::try_from(count).unwrap_or(c_int::MAX)
}

fn unsigned(number: c_int) -> u32 {
    u32::try_from(number).unwrap_or(0)
}

/// Records what a call is to make, from `out` on; returns the numbers and the entries.
fn plan(
    call: Call,
    out: *mut Communicator,
    parent: Option<Communicator>,
    plans: Vec<Plan>,
) -> Vec<(u64, Arc<Entry>)> {
    let parent = parent.map_or(0, |parent| parent as usize);
    let planned = plans.into_iter().enumerate().map(|(at, plan)| {
        let member = Member { communicator: plan.name, index: unsigned(plan.rank) };
        let role = Role::Communicator { awaits: Some(unsigned(plan.ranks)), alias: plan.alias };
        let entry = ranks().clock.register(member, role);
        let known = Known {
            entry: Arc::clone(&entry),
            ranks: plan.ranks,
            device: None,
            call: call.index,
            is_grown: plan.is_grown,
            is_unnamed: plan.is_unnamed,
            splits: 0,
            grows: 0,
            shrinks: BTreeMap::new(),
        };
        let out = out.wrapping_add(at) as usize;
        (note(Making { out, parent, known, part: None, in_call: None }), entry)
    });
    planned.collect()
}

fn note(making: Making) -> u64 {
    let mut communicators = ranks().communicators.lock();
    communicators.last += 1;
    let number = communicators.last;
    communicators.making.insert(number, making);
    number
}

/// Makes communicators, from `out` on: a step on each of them.
pub(super) fn make(
    call: Call,
    out: *mut Communicator,
    parent: Option<Communicator>,
    plans: impl FnOnce() -> Vec<Plan>,
    real: impl FnOnce() -> Status,
) -> Status {
    let mut makings = Vec::new();
    let mut entered = enter(call, |state| {
        let planned = plan(call, out, parent, plans());
        makings = planned.iter().map(|(number, _)| *number).collect();
        let entries: Vec<_> = planned.iter().map(|(_, entry)| entry).collect();
        let group = state.group(call);
        if group.has(&entries, parent.unwrap_or_default()) {
            group.make(&makings);
            return Begun::InGroup;
        }
        let step: Vec<_> = planned.iter().map(|(_, entry)| (&**entry, 1)).collect();
        Begun::Alone(ranks().clock.begin(&step, call.index))
    });
    let status = real();
    match std::mem::replace(&mut entered.begun, Begun::Passes) {
        Begun::Alone(in_call) => {
            let handles: Vec<usize> = parent.iter().map(|parent| *parent as usize).collect();
            finish(call, status, in_call, &makings, &handles);
        }
        // Its group goes on without it.
        Begun::InGroup if status != SUCCESS && status != IN_PROGRESS => failed(&makings),
        _ => {}
    }
    status
}

/// Splits a communicator: a step on it. How many ranks there are in a part, the other ranks decide.
pub(super) fn split(
    call: Call,
    of: Communicator,
    color: c_int,
    out: *mut Communicator,
    real: impl FnOnce() -> Status,
) -> Status {
    let mut makings = Vec::new();
    let mut entered = enter(call, |state| {
        let Some((entry, part)) = plan_part(call, of, color, out) else { return Begun::Passes };
        makings = part.map(note).into_iter().collect();
        let group = state.group(call);
        if group.has(&[&entry], of) {
            group.make(&makings);
            return Begun::InGroup;
        }
        Begun::Alone(ranks().clock.begin(&[(&*entry, 1)], call.index))
    });
    let status = real();
    if let Begun::Alone(in_call) = std::mem::replace(&mut entered.begun, Begun::Passes) {
        finish(call, status, in_call, &makings, &[of as usize]);
    }
    status
}

/// The entry of a communicator that is split, and the part that this rank will be in.
fn plan_part(
    call: Call,
    of: Communicator,
    color: c_int,
    out: *mut Communicator,
) -> Option<(Arc<Entry>, Option<Making>)> {
    let mut communicators = ranks().communicators.lock();
    let parent = communicators.live.get_mut(&(of as usize))?;
    let Member { communicator, index } = parent.entry.member();
    let name = communicator.split(parent.splits, color);
    parent.splits += 1;
    let entry = Arc::clone(&parent.entry);
    if color == NO_COLOR {
        return Some((entry, None));
    }
    // Of one rank there is no smaller part.
    let ranks = c_int::from(parent.ranks == 1);
    let known = Known {
        entry: Arc::clone(&entry),
        ranks,
        device: None,
        call: call.index,
        is_grown: false,
        is_unnamed: parent.is_grown || parent.is_unnamed,
        splits: 0,
        grows: 0,
        shrinks: BTreeMap::new(),
    };
    let part = Some(Member { communicator: name, index });
    let making = Making { out: out as usize, parent: of as usize, known, part, in_call: None };
    Some((entry, Some(making)))
}

/// What NCCL says of a communicator by this function: its ranks, this rank, or its device.
fn ask(call: Call, name: &CStr, of: usize) -> Option<c_int> {
    let function = elf::function_beside(call.target.real, name);
    if function.is_null() {
        return None;
    }
    type Ask = unsafe extern "C" fn(Communicator, *mut c_int) -> Status;
    // SAFETY: the address is that of NCCL's function of this name, and both have this type.
    let function = unsafe { std::mem::transmute::<*const c_void, Ask>(function) };
    let mut number = 0;
    // SAFETY: the communicator was made just now, `number` is a local variable.
    (unsafe { function(of as Communicator, &raw mut number) } == SUCCESS).then_some(number)
}

/// The communicators exist. Before their step ends.
pub(super) fn made(call: Call, makings: &[u64]) {
    for number in makings {
        let Some(mut making) = ranks().communicators.lock().making.remove(number) else { continue };
        forget_waiting(&making);
        // SAFETY: NCCL has written the handle, there where the program has said.
        let handle = unsafe { (making.out as *const usize).as_ref() }.copied().unwrap_or(0);
        if let (Some(Member { communicator, index }), true) = (making.part, handle != 0) {
            let known = &mut making.known;
            if known.ranks != 1 {
                known.ranks = ask(call, c"ncclCommCount", handle).unwrap_or(0);
            }
            // Only now does NCCL know this rank's place in it.
            let index = ask(call, c"ncclCommUserRank", handle).map_or(index, unsigned);
            let role = Role::Communicator { awaits: None, alias: None };
            known.entry = ranks().clock.register(Member { communicator, index }, role);
        }
        making.known.entry.created();
        if handle != 0 {
            making.known.device = ask(call, c"ncclCommCuDevice", handle);
            ranks().communicators.lock().live.insert(handle, making.known);
        }
        GENERATION.fetch_add(1, AcqRel);
    }
}

/// The communicators could not be made, or are aborted before they are.
pub(super) fn failed(makings: &[u64]) {
    for number in makings {
        let Some(making) = ranks().communicators.lock().making.remove(number) else { continue };
        forget_waiting(&making);
        if making.part.is_none() {
            ranks().clock.retire(&making.known.entry);
        }
    }
}

fn forget_waiting(making: &Making) {
    if making.in_call.is_some() {
        WAITING.fetch_sub(1, AcqRel);
    }
}

/// The communicators will exist when NCCL says so.
pub(super) fn wait_for(makings: &[u64], in_call: &Arc<InCall<'static>>) {
    let mut communicators = ranks().communicators.lock();
    for number in makings {
        if let Some(making) = communicators.making.get_mut(number) {
            making.in_call = Some(Arc::clone(in_call));
            WAITING.fetch_add(1, AcqRel);
        }
    }
}

/// Keeps a step until all these communicators are in progress no more.
pub(super) fn keep(in_call: &Arc<InCall<'static>>, handles: &[usize]) {
    if !handles.is_empty() {
        let kept = Kept { handles: handles.to_vec(), _in_call: Arc::clone(in_call) };
        ranks().communicators.lock().kept.push(kept);
        WAITING.fetch_add(1, Release);
    }
}

/// `ncclCommGetAsyncError`: calls that have returned before their end may be over.
pub(super) fn ask_state(
    call: Call,
    of: Communicator,
    out: *mut Status,
    real: impl FnOnce() -> Status,
) -> Status {
    let status = real();
    if status == SUCCESS && WAITING.load(Acquire) > 0 && !out.is_null() {
        // SAFETY: NCCL has written it.
        let state = unsafe { *out };
        if state != IN_PROGRESS {
            settle(call, of as usize, state);
        }
    }
    status
}

/// A communicator is in progress no more, with this state.
fn settle(call: Call, handle: usize, state: Status) {
    let is_its = |making: &Making| {
        // SAFETY: NCCL writes the handle there until the communicator is complete, so the program keeps the place.
        let is_it = || unsafe { (making.out as *const usize).as_ref() }.is_some_and(|made| *made == handle);
        making.in_call.is_some() && (making.parent == handle || is_it())
    };
    let communicators = ranks().communicators.lock();
    let makings: Vec<u64> =
        communicators.making.iter().filter(|(_, making)| is_its(making)).map(|(number, _)| *number).collect();
    drop(communicators);
    if state == SUCCESS {
        made(call, &makings);
    } else {
        failed(&makings);
    }
    release(handle);
}

/// Steps do not wait for this communicator any more.
fn release(handle: usize) {
    let mut communicators = ranks().communicators.lock();
    let mut over = Vec::new();
    for kept in &mut communicators.kept {
        kept.handles.retain(|known| *known != handle);
    }
    communicators.kept.retain_mut(|kept| {
        let is_over = kept.handles.is_empty();
        if is_over {
            over.push(Arc::clone(&kept._in_call));
        }
        !is_over
    });
    drop(communicators);
    WAITING.fetch_sub(over.len(), AcqRel);
}

/// The entry of a communicator.
pub(super) fn entry(of: Communicator) -> Option<Arc<Entry>> {
    ranks().communicators.lock().live.get(&(of as usize)).map(|known| Arc::clone(&known.entry))
}

/// Removes a communicator before it is destroyed: its handle may be another one's at once.
fn take(of: Communicator) -> Option<Known> {
    let known = ranks().communicators.lock().live.remove(&(of as usize));
    GENERATION.fetch_add(1, AcqRel);
    known
}

/// Destroys a communicator: a step on it.
pub(super) fn destroy(call: Call, of: Communicator, real: impl FnOnce() -> Status) -> Status {
    let mut known = None;
    let entered = enter(call, |state| {
        known = take(of);
        let Some(Known { entry, .. }) = &known else { return Begun::Passes };
        // It ends here, so nothing has to wait for it.
        if state.group(call).has(&[entry], null_mut()) {
            return Begun::InGroup;
        }
        Begun::Alone(ranks().clock.begin(&[(&**entry, 1)], call.index))
    });
    let status = real();
    if let Some(known) = known {
        end(of, known, status);
    }
    drop(entered);
    status
}

/// A call that was to end a communicator has returned.
fn end(of: Communicator, known: Known, status: Status) {
    if status == SUCCESS || status == IN_PROGRESS {
        ranks().clock.retire(&known.entry);
        release(of as usize);
    } else {
        ranks().communicators.lock().live.insert(of as usize, known);
        GENERATION.fetch_add(1, AcqRel);
    }
}

/// Aborts a communicator, whatever it is in: no step, since the other ranks need not do so.
pub(super) fn abort(call: Call, of: Communicator, real: impl FnOnce() -> Status) -> Status {
    let mut known = None;
    let _entered = enter(call, |_| {
        known = take(of);
        Begun::Passes
    });
    if WAITING.load(Acquire) > 0 && !call.target.is_nccls {
        settle(call, of as usize, super::SYSTEM_ERROR);
    }
    let status = real();
    if let Some(known) = known {
        end(of, known, status);
    }
    status
}

/// Revokes a communicator: it stays, but its steps do not count any more.
pub(super) fn revoke(call: Call, of: Communicator, real: impl FnOnce() -> Status) -> Status {
    let _entered = enter(call, |_| Begun::Passes);
    let status = real();
    if status == SUCCESS || status == IN_PROGRESS {
        stopped(of);
    }
    status
}

/// Makes a communicator without some of the ranks of another one. Those need not call it, so it is no step on that one.
pub(super) fn shrink(
    call: Call,
    of: Communicator,
    excluded: &[c_int],
    flags: c_int,
    out: *mut Communicator,
    real: impl FnOnce() -> Status,
) -> Status {
    let status = make(call, out, Some(of), || plan_shrunk(of, excluded), real);
    // The work is stopped first, whatever comes of the rest. After an error of the arguments it is not known whether it was:
    // steps that do not count could be cut in the middle, so they count.
    if flags & SHRINK_ABORT != 0 && ![INVALID_ARGUMENT, INVALID_USAGE].contains(&status) {
        stopped(of);
    }
    status
}

/// A call has stopped what was under way on a communicator: some ranks may have made more steps on it than others. None of
/// them count any more.
fn stopped(of: Communicator) {
    if let Some(entry) = entry(of) {
        ranks().clock.retire(&entry);
        GENERATION.fetch_add(1, AcqRel);
    }
}

fn name(call: u32) -> &'static str {
    calls::CALLS.get(call as usize).copied().unwrap_or_default()
}

/// Communicators of several ranks, each with its state.
fn of_several(communicators: &Communicators) -> Option<(&Known, &'static str)> {
    let live = communicators.live.values().map(|known| (known, "is alive"));
    let making = communicators.making.values().map(|making| (&making.known, "is under way"));
    live.chain(making).find(|(known, _)| known.ranks != 1)
}

/// Whether this process is a rank among others.
pub(crate) fn uses_several_ranks() -> bool {
    of_several(&ranks().communicators.lock()).is_some()
}

/// Why the process cannot be saved: it is a rank among others and does not stand at a cut.
pub(crate) fn uncut() -> Option<String> {
    let is_cut = ranks().clock.report().is_some_and(|report| report.version > 0 && report.in_call == 0);
    if is_cut {
        return None;
    }
    let communicators = ranks().communicators.lock();
    let (Known { ranks, call, .. }, state) = of_several(&communicators)?;
    let ranks = if *ranks == 0 { "several".to_owned() } else { ranks.to_string() };
    Some(format!(
        "an NCCL communicator of {ranks} ranks ({}) {state}: its ranks did not stop at the same call; update ckpt-run, \
         destroy it (ncclCommDestroy), or run with one rank",
        name(*call)
    ))
}

/// Why the process cannot be saved at a cut either: ranks name a communicator differently.
pub(super) fn unnamed() -> Option<String> {
    let communicators = ranks().communicators.lock();
    let making = communicators.making.values().map(|making| &making.known);
    let found = communicators.live.values().chain(making).find(|known| known.is_unnamed)?;
    Some(format!(
        "an NCCL communicator was made from a grown one ({} after ncclCommGrow), which is not supported; destroy it \
         (ncclCommDestroy)",
        name(found.call)
    ))
}
