//! Delivering what a process needs to restore its GPU state: its mirror or a window. Its parked memory comes from the broker.

use std::ops::Range;
use std::os::fd::AsFd;

use ckpt_protocol::agent::{FromAgent, Hello, ToAgent};
use ckpt_protocol::frame::FrameError;
use ckpt_snapshot::faults;
use tracing::debug;

use super::copy_threads::copy_threads;
use super::refill::Refill;
use super::stream::AgentStream;
use super::{Shared, broker};

impl Shared {
    /// Delivers what a returning process needs, and receives the agent's report of its return. Restoring the GPU state has
    /// no time limit. A process for which there is too little device memory gets nothing, and is lost.
    pub(super) fn receive_return(
        &self,
        id: u64,
        stream: &AgentStream,
        hello: &Hello,
    ) -> Result<FromAgent, FrameError> {
        if hello.is_detached {
            stream.set_read_timeout(None)?;
            if let Err(shortage) = self.await_restore_memory() {
                let attempt = hello.away.unwrap_or_default();
                let lost = Some(shortage);
                return Ok(FromAgent::Reconnected { attempt, restored: false, copied_bytes: 0, lost });
            }
            self.deliver(id, stream, hello)?;
        }
        loop {
            match stream.receive()? {
                FromAgent::Fill { ranges } => self.fill(stream, Some(hello.pid), ranges)?,
                FromAgent::Load { ranges, at } => self.load(stream, hello.pid, &ranges, at)?,
                message if broker::sender(&message).is_some() => {
                    self.serve_broker_message(id, stream, &message)?;
                }
                message => return Ok(message),
            }
        }
    }

    fn deliver(&self, id: u64, stream: &AgentStream, hello: &Hello) -> Result<(), FrameError> {
        let pid = hello.pid;
        let mut state = self.lock();
        if let Some(handle) = state.connections.get(&id).map(|connection| connection.handle.clone()) {
            state.holdings.set_handle(pid, &handle);
        }
        let mirror = state.holdings.mirror(pid).cloned();
        let refill = state.holdings.refill(pid).filter(|_| hello.supports_loads);
        let mirrors = state.holdings.mirrors().count();
        drop(state);
        // A window has nothing that could be copied back.
        let mirror = mirror.filter(|mirror| mirror.window.is_none());
        let (number, bytes) = mirror.as_ref().map_or((0, 0), |mirror| (mirror.number, mirror.bytes));
        let files: Vec<_> = mirror.iter().map(|mirror| mirror.file.as_fd()).collect();
        let pairs = self.migrations.lock().take_pairs(pid);
        if let Some(refill) = refill {
            let Refill { number: mirror, bytes, window_bytes, .. } = *refill;
            let message = ToAgent::DeliverWindow { mirror, bytes, window_bytes, pairs };
            stream.send_with_files(&message, &[refill.file.as_fd()])?;
            return faults::hit("delivered").map_err(|source| FrameError::Io { step: "go on", source });
        }
        let is_partial = mirror.as_ref().is_some_and(|mirror| mirror.history.lock().is_freed());
        // A partial one is freed when its content is committed, which a pinned mapping would prevent.
        let may_stay = mirror.as_ref().is_some_and(|mirror| !mirror.is_partial && !is_partial);
        // What was freed of a partial one comes from the store first.
        let used_bytes =
            mirror.as_ref().map_or(0, |one| if is_partial { one.bytes } else { one.allocated_bytes() });
        let copy_threads = copy_threads(used_bytes, mirrors);
        debug!(id, pid, bytes, "delivering mirror to an agent, which copies by {copy_threads} threads");
        let (mirror, parked) = (number, 0);
        let message = ToAgent::Deliver { mirror, bytes, parked, pairs, is_partial, may_stay, copy_threads };
        stream.send_with_files(&message, &files)?;
        faults::hit("delivered").map_err(|source| FrameError::Io { step: "go on", source })
    }

    /// Writes what a partial mirror lacks to it, for an agent that will copy from it.
    pub(super) fn fill(
        &self,
        stream: &AgentStream,
        pid: Option<u32>,
        ranges: Vec<Range<u64>>,
    ) -> Result<(), FrameError> {
        let mirror = pid.and_then(|pid| self.lock().holdings.mirror(pid).cloned());
        self.lock().filling.extend(pid);
        let hit = faults::hit("fill");
        let problem = mirror.and_then(|mirror| mirror.fill(ranges).err()).map(|error| error.to_string());
        pid.map(|pid| self.lock().filling.remove(&pid));
        hit.map_err(|source| FrameError::Io { step: "go on", source })?;
        stream.send(&ToAgent::Filled { problem })
    }
}
