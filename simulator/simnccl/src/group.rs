//! Groups: calls between `ncclGroupStart` and `ncclGroupEnd` are carried out together, by the end of the outermost group.

use std::cell::RefCell;
use std::ffi::c_void;
use std::sync::Arc;

use crate::collective::Call;
use crate::comm::{Comm, Origin};
use crate::cuda::{self, Stream};
use crate::types::{Error, Result};
use crate::windows::Request;

/// A thread's group.
#[derive(Default)]
struct Group {
    depth: usize,
    calls: Vec<(Arc<Comm>, Call, Stream)>,
    /// Communicators that are to be made.
    makes: Vec<(Arc<Comm>, Origin)>,
    registrations: Vec<Registration>,
    /// What went wrong in a call of the group: its end says so.
    error: Option<Error>,
}

/// The calls of one communicator.
type Calls = Vec<(Call, Stream)>;

/// A window that is to be registered, and where its handle goes.
type Registration = (Arc<Comm>, Request, *mut *mut c_void);

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

pub(crate) fn start() {
    GROUP.with_borrow_mut(|group| group.depth += 1);
}

/// # Errors
/// `ncclInvalidUsage` without a start, and the errors of the calls.
pub(crate) fn end() -> Result {
    let whole = GROUP.with_borrow_mut(|group| {
        match group.depth {
            0 => return Err(Error::InvalidUsage),
            1 => {}
            _ => {
                group.depth -= 1;
                return Ok(None);
            }
        }
        Ok(Some(std::mem::take(group)))
    })?;
    whole.map_or(Ok(()), carry_out)
}

/// Takes a result of a call into account.
pub(crate) fn note(result: Result) -> Result {
    if let Err(error) = result
        && error != Error::InProgress
    {
        GROUP.with_borrow_mut(|group| {
            if group.depth > 0 {
                group.error.get_or_insert(error);
            }
        });
    }
    result
}

/// A call of a collective or of a send or receive.
pub(crate) fn add(comm: Arc<Comm>, call: Call, stream: Stream) -> Result {
    call.check(comm.rank, comm.ranks)?;
    start();
    GROUP.with_borrow_mut(|group| group.calls.push((comm, call, stream)));
    end()
}

/// A communicator that is to be made: with the others of the group, at its end.
pub(crate) fn make(comm: Arc<Comm>, origin: Origin) -> Result {
    start();
    GROUP.with_borrow_mut(|group| group.makes.push((comm, origin)));
    end()
}

/// A window that is to be registered, as above. `out` is valid for a write until the end of the group.
pub(crate) fn register(comm: Arc<Comm>, request: Request, out: *mut *mut c_void) -> Result {
    start();
    GROUP.with_borrow_mut(|group| group.registrations.push((comm, request, out)));
    end()
}

fn carry_out(group: Group) -> Result {
    if let Some(error) = group.error {
        return Err(error);
    }
    connect(group.makes)?;
    register_all(&group.registrations)?;
    let comms = distinct(group.calls.iter().map(|(comm, ..)| comm));
    let (before, _) = cuda::context()?;
    let (mut now, mut later) = (Vec::new(), Vec::new());
    for comm in comms {
        let is_of = |(other, ..): &&(Arc<Comm>, Call, Stream)| Arc::ptr_eq(other, &comm);
        let calls: Calls =
            group.calls.iter().filter(is_of).map(|(_, call, stream)| (*call, *stream)).collect();
        let waits = comm.has_to_meet(&calls)?;
        if waits && !comm.config.is_blocking { &mut later } else { &mut now }.push((comm, calls, waits));
    }
    meet(&now)?;
    let result = now.iter().try_for_each(|(comm, calls, _)| {
        cuda::make_current(comm.context)?;
        comm.enqueue(calls)
    });
    cuda::make_current(cuda::Context(before))?;
    result?;
    let is_in_progress = !later.is_empty();
    later.into_iter().try_for_each(|(comm, calls, _)| comm.enqueue_later(calls))?;
    if is_in_progress { Err(Error::InProgress) } else { Ok(()) }
}

/// The ranks of all communicators, at once, as each waits for others.
fn meet(all: &[(Arc<Comm>, Calls, bool)]) -> Result {
    std::thread::scope(|scope| {
        let waiting = all.iter().filter(|(.., waits)| *waits);
        let threads: Vec<_> = waiting.map(|(comm, calls, _)| scope.spawn(|| comm.meet(calls))).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Result>| {
            thread.join().unwrap_or(Err(Error::InternalError))
        };
        threads.into_iter().map(join).fold(Ok(()), Result::and)
    })
}

/// Each communicator once.
fn distinct<'a>(all: impl Iterator<Item = &'a Arc<Comm>>) -> Vec<Arc<Comm>> {
    let mut comms: Vec<Arc<Comm>> = Vec::new();
    for comm in all {
        if !comms.iter().any(|known| Arc::ptr_eq(known, comm)) {
            comms.push(Arc::clone(comm));
        }
    }
    comms
}

/// The windows of each communicator in their order, and all communicators at once, as each waits for other ranks.
fn register_all(registrations: &[Registration]) -> Result {
    let of = |comm: &Arc<Comm>| -> Vec<&Registration> {
        registrations.iter().filter(|(other, ..)| Arc::ptr_eq(other, comm)).collect()
    };
    let comms = distinct(registrations.iter().map(|(comm, ..)| comm));
    let made = std::thread::scope(|scope| {
        let threads: Vec<_> = comms
            .iter()
            .map(|comm| {
                let requests: Vec<Request> = of(comm).into_iter().map(|(_, request, _)| *request).collect();
                scope.spawn(move || -> Result<Vec<Option<usize>>> {
                    requests.into_iter().map(|request| comm.register_window(request)).collect()
                })
            })
            .collect();
        let join =
            |thread: std::thread::ScopedJoinHandle<'_, _>| thread.join().unwrap_or(Err(Error::InternalError));
        threads.into_iter().map(join).collect::<Result<Vec<_>>>()
    })?;
    for (comm, handles) in comms.iter().zip(made) {
        for ((_, _, out), handle) in of(comm).into_iter().zip(handles) {
            // SAFETY: the program's out parameter, which is not NULL.
            unsafe { out.write(handle.unwrap_or(0) as *mut c_void) };
        }
    }
    Ok(())
}

/// All at once, as each waits for the others.
fn connect(makes: Vec<(Arc<Comm>, Origin)>) -> Result {
    let mut result = Ok(());
    let mut threads = Vec::new();
    for (comm, origin) in makes {
        let is_blocking = comm.config.is_blocking;
        let make = move || comm.connect(origin);
        let thread = std::thread::Builder::new().name("simnccl-init".into()).spawn(make)?;
        if is_blocking {
            threads.push(thread);
        } else {
            result = Err(Error::InProgress);
        }
    }
    for thread in threads {
        result = result.and(thread.join().unwrap_or(Err(Error::InternalError)));
    }
    result
}
