//! Groups: calls between `ncclGroupStart` and `ncclGroupEnd` are carried out together, by the end of the outermost group.

use std::cell::RefCell;
use std::sync::Arc;

use crate::collective::Call;
use crate::comm::{Comm, Origin};
use crate::cuda::{self, Stream};
use crate::types::{Error, Result};

/// A thread's group.
#[derive(Default)]
struct Group {
    depth: usize,
    calls: Vec<(Arc<Comm>, Call, Stream)>,
    /// Communicators that are to be made.
    makes: Vec<(Arc<Comm>, Origin)>,
    /// What went wrong in a call of the group: its end says so.
    error: Option<Error>,
}

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

fn carry_out(group: Group) -> Result {
    if let Some(error) = group.error {
        return Err(error);
    }
    connect(group.makes)?;
    let mut comms: Vec<Arc<Comm>> = Vec::new();
    for (comm, ..) in &group.calls {
        if !comms.iter().any(|known| Arc::ptr_eq(known, comm)) {
            comms.push(Arc::clone(comm));
        }
    }
    let (before, _) = cuda::context()?;
    let result = comms.iter().try_for_each(|comm| {
        let is_of = |(other, ..): &&(Arc<Comm>, Call, Stream)| Arc::ptr_eq(other, comm);
        let calls: Vec<_> =
            group.calls.iter().filter(is_of).map(|(_, call, stream)| (*call, *stream)).collect();
        cuda::make_current(comm.context)?;
        comm.enqueue(&calls)
    });
    cuda::make_current(cuda::Context(before))?;
    result
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
