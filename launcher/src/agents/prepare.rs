//! Preparing the agents for a checkpoint, while the job runs on.
//!
//! ```text
//!   (none) --Prepare--> Announced --Needs--> Needs --Stage--> Staging --Staged--> Staged --Quiesce--> detached
//!     ^                     |                  |                 |                   |
//!     |                     +------------------+--- Failed: Refused -----------------+
//!     |                                        |                                     |
//!     +----------------------------------------+--- aborted: Unstage (if staged) ----+
//! ```
//!
//! A process without device memory needs no mirror and stays at Needs. An agent that connects after the announcement is
//! not prepared: it is asked to detach nevertheless, without a mirror.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ckpt_protocol::agent::{COPY_BUFFERS_BYTES, ExpectedChanges, ToAgent};

use super::copy_threads::copy_threads;
use super::mirrors::Mirror;
use super::partial::{MirrorMode, Present};
use super::process::{Process, ProcessHandle, QuiesceError};
use super::state::{Connection, State};
use super::stream::AgentStream;
use super::window::window_bytes;
use super::{Agents, Shared};
use crate::sys::memory;

/// The least speed at which a mirror is pinned; determines how long an agent's answer is waited for.
const STAGED_BYTES_PER_S: u64 = 256 << 20;

/// Progress of a connection in an attempt that has not yet begun to detach agents.
pub(super) struct Preparation {
    attempt: u64,
    step: Step,
    /// A mirror was sent, which the agent has to release if the attempt is aborted.
    is_staged: bool,
}

/// The last step of the preparation.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    Announced,
    /// What the process needs, as in [`FromAgent::Needs`](ckpt_protocol::agent::FromAgent::Needs).
    Needs {
        mirror_bytes: u64,
        used_bytes: Option<u64>,
        changes: Option<ExpectedChanges>,
        ranks_on: Vec<String>,
    },
    Staging,
    Staged,
    /// Why the process cannot be dumped.
    Refused(String),
}

impl Connection {
    /// Begins a step that the agent has to answer.
    fn begin_step(&mut self, preparation: Preparation) {
        self.unprepared.sent += 1;
        self.preparation = Some(preparation);
    }

    /// Records a step that the agent has answered; ignores one that belongs to another attempt.
    pub(super) fn record_step(&mut self, attempt: u64, step: Step) {
        self.unprepared.answer();
        if let Some(preparation) = &mut self.preparation
            && preparation.attempt == attempt
        {
            preparation.step = step;
        }
    }

    /// The last step in this attempt.
    fn step(&self, attempt: u64) -> Option<&Step> {
        let preparation = self.preparation.as_ref()?;
        (preparation.attempt == attempt).then_some(&preparation.step)
    }
}

/// The agents are prepared. Dropping this makes agents that have not detached release their mirrors.
pub struct Prepared {
    shared: Arc<Shared>,
    attempt: u64,
    device_bytes: u64,
    has_windows: bool,
}

impl Prepared {
    /// Whether device memory goes to the store while the job is paused, rather than to a mirror.
    pub fn has_windows(&self) -> bool {
        self.has_windows
    }

    /// The device memory to save, in bytes, without chunks of zeroes as far as these are known.
    pub fn device_bytes(&self) -> u64 {
        self.device_bytes
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        let mut streams = Vec::new();
        let mut state = self.shared.lock();
        self.shared.watch_unprepared(&mut state);
        for connection in state.connections.values_mut() {
            if connection.step(self.attempt).is_some()
                && connection.preparation.take().is_some_and(|preparation| preparation.is_staged)
            {
                streams.push(Arc::clone(&connection.stream));
            }
        }
        drop(state);
        for stream in streams {
            let message = ToAgent::Unstage { attempt: self.attempt };
            stream.send_or_log(&message, &[], "an agent cannot be asked to release its mirror");
        }
    }
}

/// A process that needs a mirror.
struct MirrorRequest {
    connection: u64,
    process: Process,
    pid: u32,
    handle: Arc<ProcessHandle>,
    mirror_bytes: u64,
    /// How much of it has memory for all device memory; `None` if all of it is to be allocated.
    content_bytes: Option<u64>,
    /// What the agent expects to write to it, if it may be partial.
    changes: Option<ExpectedChanges>,
    /// How much of it has memory; `None` if all of it is to be allocated.
    used_bytes: Option<u64>,
    /// The agent can hand its memory out through a window.
    supports_reads: bool,
    /// Its memory can stay on the GPU. Otherwise all of it is copied back after each dump.
    parks_by_key: bool,
    /// It gets a window rather than a mirror.
    is_window: bool,
    /// How many of its threads copy to the mirror; 0: that is pinned.
    copy_threads: u64,
    current: Option<Mirror>,
}

fn sum(requests: &[MirrorRequest], bytes: fn(&MirrorRequest) -> u64) -> u64 {
    requests.iter().map(bytes).fold(0, u64::saturating_add)
}

/// What all requests share.
struct Left {
    /// Memory that is left once they have what they have asked for.
    bytes: u64,
    /// The parts of them that have no memory.
    holes_bytes: u64,
    /// All mirrors that may take more than was asked for.
    mirrors_bytes: u64,
}

impl MirrorRequest {
    fn bytes(&self) -> u64 {
        Mirror::bytes_for(self.mirror_bytes, self.current_bytes())
    }

    fn current_bytes(&self) -> u64 {
        self.current.as_ref().map_or(0, |mirror| mirror.bytes)
    }

    /// The memory that it takes beyond what it has.
    fn growth_bytes(&self) -> u64 {
        let allocated_bytes = || self.current.as_ref().map_or(0, Mirror::allocated_bytes);
        match self.used_bytes {
            Some(used_bytes) => used_bytes.saturating_sub(allocated_bytes()),
            None => self.bytes().saturating_sub(self.current_bytes()),
        }
    }

    /// The part of it that has no memory.
    fn holes_bytes(&self) -> u64 {
        if self.is_window {
            return 0;
        }
        self.used_bytes.map_or(0, |used_bytes| self.mirror_bytes.saturating_sub(used_bytes))
    }

    /// Whether it may take more than it has asked for.
    fn has_share(&self) -> bool {
        self.used_bytes.is_some() && !self.is_window
    }

    /// Its share of the memory that is left, for what the program writes until the capture.
    fn share_bytes(&self, left: &Left) -> Option<u64> {
        let used_bytes = self.used_bytes?;
        // What the agent does not expect, as it does not know that its mirror is new.
        let unexpected_bytes = self.changes.map_or(0, |changes| used_bytes.saturating_sub(changes.bytes));
        let of = |total: u64, own: u64, all: u64| {
            u64::try_from(u128::from(total) * u128::from(own) / u128::from(all.max(1))).unwrap_or(u64::MAX)
        };
        let holes_bytes = self.holes_bytes();
        let share = match left.bytes.checked_sub(left.holes_bytes) {
            // What it has used until now may be freed, and other memory written: that is in other places of the mirror.
            Some(spare_bytes) if self.has_share() => {
                let more_bytes = of(spare_bytes, self.bytes(), left.mirrors_bytes);
                holes_bytes.saturating_add(more_bytes.min(self.bytes()))
            }
            Some(_) => holes_bytes,
            None => of(left.bytes, holes_bytes, left.holes_bytes),
        };
        Some(share.saturating_add(unexpected_bytes))
    }

    /// Lets the mirror be partial, if the agent supports that. A mirror whose content is incomplete is replaced.
    fn make_partial(&mut self, mode: MirrorMode, present: &mut Present) {
        self.is_window = mode == MirrorMode::None && self.supports_reads && self.content_bytes.is_some();
        self.current = self.current.take().filter(|mirror| mirror.window.is_some() == self.is_window);
        if self.is_window {
            (self.changes, self.used_bytes) = (None, Some(window_bytes(self.mirror_bytes)));
            return;
        }
        let may_be_partial = matches!(mode, MirrorMode::Changed | MirrorMode::None);
        let is_supported = self.parks_by_key && self.content_bytes.is_some();
        self.changes = self.changes.filter(|_| may_be_partial && is_supported);
        let captures = self.changes.map_or(0, |changes| changes.captures);
        self.current = self.current.take().filter(|mirror| mirror.is_complete(captures, present));
        if let Some(changes) = self.changes.filter(|_| self.current.is_some()) {
            self.used_bytes = Some(changes.bytes.min(self.mirror_bytes));
        }
    }

    /// The mirror, in the size that is needed.
    fn provide(&self) -> Result<Mirror, QuiesceError> {
        let mirror = match &self.current {
            Some(current) => current.resized(self.bytes()),
            None if self.is_window => Mirror::without_content(self.bytes()),
            None if self.used_bytes.is_some() => Mirror::with_holes(self.bytes()),
            None => Mirror::new(self.bytes()),
        };
        let mirror = mirror.map(|mirror| Mirror { is_partial: self.changes.is_some(), ..mirror });
        mirror.map_err(|source| QuiesceError::Mirror { process: self.process.clone(), source })
    }
}

impl Agents {
    /// Waits until all detached agents have returned, announces a checkpoint to all connected agents, and gives them
    /// mirrors for their device memory. The job runs on meanwhile, except while an agent looks for chunks of zeroes.
    /// `image_bytes` of memory will be needed for other things before the mirrors are written.
    ///
    /// # Errors
    /// [`QuiesceError::Refused`] if a process cannot be dumped, [`QuiesceError::Deadline`] if an agent does not answer in
    /// time or has not returned, [`QuiesceError::NoMemory`] or [`QuiesceError::Mirror`]. No agent is prepared then.
    pub fn prepare(
        &self,
        attempt: u64,
        deadline: Duration,
        image_bytes: u64,
    ) -> Result<Prepared, QuiesceError> {
        // The first answer takes longest, and the job runs on meanwhile.
        let _ = self.hold_gpus_of_job();
        let end = Instant::now() + deadline;
        let announced = self.announce(attempt, deadline, end)?;
        let shared = Arc::clone(&self.shared);
        let mut prepared = Prepared { shared, attempt, device_bytes: 0, has_windows: false };
        for stream in &announced {
            let message = ToAgent::Prepare { attempt };
            stream.send_or_log(&message, &[], "a checkpoint cannot be announced to an agent");
        }
        self.await_answers(attempt, deadline, end)?;
        let mut state = self.shared.lock();
        if let Some(refused) = state.ranks_on_one_gpu(attempt) {
            return Err(refused);
        }
        let (mut requests, not_needed) = state.mirror_requests(attempt);
        drop(state);
        drop(not_needed);
        self.make_partial(&mut requests, image_bytes);
        let processes = requests.len();
        for request in requests.iter_mut().filter(|request| !request.is_window) {
            let used_bytes = request.used_bytes.unwrap_or(request.mirror_bytes);
            request.copy_threads = copy_threads(used_bytes, processes);
        }
        let (growth_bytes, buffers_bytes) = (
            sum(&requests, MirrorRequest::growth_bytes),
            sum(&requests, |one| one.copy_threads * COPY_BUFFERS_BYTES),
        );
        let left_bytes = left_memory(growth_bytes.saturating_add(buffers_bytes)).or_else(|_| {
            // Without buffers there may be enough.
            requests.iter_mut().for_each(|request| request.copy_threads = 0);
            left_memory(growth_bytes)
        })?;
        let left = Left {
            bytes: left_bytes.saturating_sub(image_bytes),
            holes_bytes: sum(&requests, MirrorRequest::holes_bytes),
            mirrors_bytes: sum(&requests, |one| if one.has_share() { one.bytes() } else { 0 }),
        };
        for request in &requests {
            let used_bytes = request.content_bytes.unwrap_or(request.mirror_bytes);
            prepared.has_windows |= request.is_window;
            prepared.device_bytes = prepared.device_bytes.saturating_add(used_bytes);
            self.stage(attempt, request, request.share_bytes(&left))?;
        }
        let deadline = deadline + Duration::from_secs(prepared.device_bytes / STAGED_BYTES_PER_S);
        self.await_answers(attempt, deadline, Instant::now() + deadline)?;
        Ok(prepared)
    }

    /// Decides which mirrors are partial.
    fn make_partial(&self, requests: &mut [MirrorRequest], image_bytes: u64) {
        let used_bytes = requests.iter().map(|one| one.content_bytes.unwrap_or(one.mirror_bytes));
        let held_bytes = requests.iter().filter_map(|one| Some(one.current.as_ref()?.allocated_bytes()));
        let held_bytes = held_bytes.fold(0, u64::saturating_add);
        let used_bytes = used_bytes.fold(0, u64::saturating_add);
        let mode = self.shared.decide_mirror_mode(used_bytes, held_bytes, image_bytes);
        let mut present = Present::default();
        requests.iter_mut().for_each(|request| request.make_partial(mode, &mut present));
    }

    /// Begins to prepare the registered agents.
    fn announce(
        &self,
        attempt: u64,
        deadline: Duration,
        end: Instant,
    ) -> Result<Vec<Arc<AgentStream>>, QuiesceError> {
        let mut state = self.await_all_returned(deadline, end)?;
        let ended = state.holdings.remove_ended();
        let mut announced = Vec::new();
        for connection in state.connections.values_mut().filter(|connection| connection.is_registered) {
            connection.begin_step(Preparation { attempt, step: Step::Announced, is_staged: false });
            announced.push(Arc::clone(&connection.stream));
        }
        drop(state);
        drop(ended);
        Ok(announced)
    }

    /// Waits until every agent has answered its last message, or its connection has ended.
    fn await_answers(&self, attempt: u64, deadline: Duration, end: Instant) -> Result<(), QuiesceError> {
        let mut state = self.shared.lock();
        loop {
            let owes = |one: &&Connection| matches!(one.step(attempt), Some(Step::Announced | Step::Staging));
            let unanswered: Vec<_> =
                state.connections.values().filter(owes).map(|one| one.process.clone()).collect();
            let left = end.saturating_duration_since(Instant::now());
            if unanswered.is_empty() || left.is_zero() {
                return match state.refused_to_prepare(attempt) {
                    Some(refused) => Err(refused),
                    None if unanswered.is_empty() => Ok(()),
                    None => Err(QuiesceError::Deadline { deadline, unanswered }),
                };
            }
            self.shared.wait(&mut state, left);
        }
    }

    /// Gives a process its mirror, of which its agent may allocate `more_bytes` beyond what it has asked for.
    fn stage(
        &self,
        attempt: u64,
        request: &MirrorRequest,
        more_bytes: Option<u64>,
    ) -> Result<(), QuiesceError> {
        let mirror = request.provide()?;
        let mut state = self.shared.lock();
        let old = state.holdings.set_mirror(request.pid, &request.handle, Some(mirror.clone()));
        let stream = state.connections.get_mut(&request.connection).map(|connection| {
            connection.begin_step(Preparation { attempt, step: Step::Staging, is_staged: true });
            Arc::clone(&connection.stream)
        });
        drop(state);
        drop(old);
        // The connection may have ended meanwhile.
        let Some(stream) = stream else { return Ok(()) };
        let Mirror { number, bytes, is_partial, .. } = mirror;
        let window_bytes = mirror.file.metadata().map_or(0, |file| file.len());
        let message = match mirror.window {
            Some(_) => ToAgent::StageWindow { attempt, mirror: number, bytes, window_bytes },
            None => {
                let (mirror, copy_threads) = (number, request.copy_threads);
                ToAgent::Stage { attempt, mirror, bytes, more_bytes, is_partial, copy_threads }
            }
        };
        stream.send_or_log(&message, &[mirror.file.as_fd()], "a mirror cannot be given to an agent");
        Ok(())
    }
}

impl Shared {
    /// Records a step of an agent's preparation.
    pub(super) fn record_step(&self, id: u64, attempt: u64, step: Step) {
        if let Some(connection) = self.lock().connections.get_mut(&id) {
            connection.record_step(attempt, step);
        }
        self.changed.notify_all();
    }
}

impl State {
    /// Requests of the processes that need a mirror; and mirrors that are no longer needed, to be dropped.
    fn mirror_requests(&mut self, attempt: u64) -> (Vec<MirrorRequest>, Vec<Mirror>) {
        let (mut requests, mut not_needed) = (Vec::new(), Vec::new());
        for (&connection, one) in &self.connections {
            let (Some(&Step::Needs { mirror_bytes, used_bytes, changes, .. }), Some(pid)) =
                (one.step(attempt), one.process.pid)
            else {
                continue;
            };
            let (process, handle) = (one.process.clone(), Arc::clone(&one.handle));
            if mirror_bytes > 0 {
                let current = self.holdings.mirror(pid).cloned();
                let used_bytes = used_bytes.map(|used_bytes| used_bytes.min(mirror_bytes));
                requests.push(MirrorRequest {
                    connection,
                    process,
                    pid,
                    handle,
                    mirror_bytes,
                    content_bytes: used_bytes,
                    changes,
                    used_bytes,
                    supports_reads: one.supports_reads,
                    parks_by_key: one.parks_by_key,
                    is_window: false,
                    copy_threads: 0,
                    current,
                });
            } else if self.holdings.mirror(pid).is_some() {
                not_needed.extend(self.holdings.set_mirror(pid, &handle, None));
            }
        }
        (requests, not_needed)
    }

    /// Two processes that are ranks of NCCL on one GPU. Their kernels wait for each other, so the GPU has to run them in
    /// turns. After the driver's checkpoint it does not (measured with driver 580.159 on an H200): it ends a kernel that
    /// keeps another process waiting for 5 s (Xid 109), and with it the job.
    fn ranks_on_one_gpu(&self, attempt: u64) -> Option<QuiesceError> {
        let mut seen: BTreeMap<&str, &Process> = BTreeMap::new();
        for one in self.connections.values() {
            let Some(Step::Needs { ranks_on, .. }) = one.step(attempt) else { continue };
            for gpu in ranks_on {
                if let Some(other) = seen.insert(gpu, &one.process) {
                    let reason = format!(
                        "it and {other} are ranks of NCCL on one GPU ({gpu}). After a checkpoint, NVIDIA's driver does \
                         not run the kernels of two processes in turns any more, and NCCL's wait for each other: the \
                         job would fail. Give each rank a GPU of its own"
                    );
                    return Some(QuiesceError::Refused { process: one.process.clone(), reason, others: 0 });
                }
            }
        }
        None
    }

    fn refused_to_prepare(&self, attempt: u64) -> Option<QuiesceError> {
        let mut refusals = self.connections.values().filter_map(|one| match one.step(attempt) {
            Some(Step::Refused(reason)) => Some((one.process.clone(), reason.clone())),
            _ => None,
        });
        let (process, reason) = refusals.next()?;
        Some(QuiesceError::Refused { process, reason, others: refusals.count() })
    }
}

/// The memory that is left when `needed_bytes` are used, with a reserve for the rest of the machine. Fails if there is less.
fn left_memory(needed_bytes: u64) -> Result<u64, QuiesceError> {
    // Allocating to find out is no option: if memory runs out, the kernel may kill any process.
    let available_bytes = memory::available_bytes().unwrap_or(0);
    match available_bytes.checked_sub(needed_bytes.saturating_add(memory::SPARE_BYTES)) {
        Some(left_bytes) => Ok(left_bytes),
        None if needed_bytes == 0 => Ok(0),
        None => Err(QuiesceError::NoMemory { needed_bytes, available_bytes }),
    }
}

#[cfg(test)]
#[expect(clippy::single_range_in_vec_init, reason = "one range is meant")]
mod tests {
    use std::collections::BTreeMap;
    use std::fs::File;
    use std::os::fd::OwnedFd;
    use std::os::unix::fs::FileExt;
    use std::os::unix::net::UnixStream;
    use std::path::Path;
    use std::thread::{self, JoinHandle};

    use ckpt_protocol::agent::{
        Capture, FromAgent, GpuReport, Hello, PROTOCOL_VERSION, Region, RegionFlags, RegionKind, ShareKey,
    };
    use ckpt_protocol::descriptors;
    use ckpt_snapshot::{DataFile, RelPath};

    use super::super::partial::tests::stored_nowhere;
    use super::super::process::{GpuState, Quiesced};
    use super::super::tests::{
        LONG, SHORT, agents_with, connect, connect_agent, expect_quiesce, hello, receive, send, socket_dir,
        until_count,
    };
    use super::*;

    const MIB: u64 = 1 << 20;

    fn needs(attempt: u64, mirror_bytes: u64, used_bytes: Option<u64>) -> FromAgent {
        FromAgent::Needs { attempt, mirror_bytes, used_bytes, changes: None, ranks_on: Vec::new() }
    }

    /// Answers the announcement as an agent.
    fn answer_prepare(stream: &UnixStream, attempt: u64, mirror_bytes: u64) {
        assert_eq!(receive(stream).expect("a message"), ToAgent::Prepare { attempt });
        send(stream, &needs(attempt, mirror_bytes, None));
    }

    /// Receives a mirror as an agent, without answering.
    fn receive_mirror(stream: &UnixStream, wanted: u64) -> (u64, u64, File) {
        let message = receive(stream).expect("a message");
        let ToAgent::Stage { attempt, mirror, bytes, more_bytes: None, is_partial: false, copy_threads: 0 } =
            message
        else {
            panic!("{message:?}")
        };
        assert_eq!(attempt, wanted);
        let file = descriptors::receive(stream.as_fd(), 1).expect("a file").pop().expect("one");
        (mirror, bytes, file.into())
    }

    fn stage(stream: &UnixStream, attempt: u64, mirror_bytes: u64) -> (u64, u64, File) {
        answer_prepare(stream, attempt, mirror_bytes);
        let mirror = receive_mirror(stream, attempt);
        send(stream, &FromAgent::Staged { attempt });
        mirror
    }

    fn start_prepare(
        agents: &Arc<Agents>,
        attempt: u64,
        deadline: Duration,
    ) -> JoinHandle<Result<Prepared, QuiesceError>> {
        let agents = Arc::clone(agents);
        thread::spawn(move || agents.prepare(attempt, deadline, 0))
    }

    fn finish_prepare(preparing: JoinHandle<Result<Prepared, QuiesceError>>) -> Prepared {
        preparing.join().expect("no panic").expect("prepared")
    }

    fn keys(letters: &str) -> Vec<ShareKey> {
        letters.bytes().map(|letter| ShareKey(letter.into())).collect()
    }

    fn file_with(text: &str) -> OwnedFd {
        let file = tempfile::tempfile().expect("a file");
        file.write_all_at(text.as_bytes(), 0).expect("written");
        file.into()
    }

    fn text_in(file: OwnedFd) -> String {
        let mut content = [0; 16];
        let bytes = File::from(file).read_at(&mut content, 0).expect("read");
        String::from_utf8_lossy(&content[..bytes]).into_owned()
    }

    /// Parks memory; the key of each piece is its first letter.
    fn park(stream: &UnixStream, texts: &[&str]) {
        let files: Vec<_> = texts.iter().map(|text| file_with(text)).collect();
        send(
            stream,
            &FromAgent::Park {
                pid: 1,
                keys: texts.iter().flat_map(|text| keys(text)).collect(),
                instance: 0,
            },
        );
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        descriptors::send(stream.as_fd(), &files).expect("sent");
    }

    fn report() -> GpuReport {
        let kind = RegionKind::Allocation;
        let region = Region {
            address: 1,
            bytes: 8,
            device: 0,
            kind,
            allocations: 1,
            offset: 0,
            changed_bytes: Some(8),
            flags: RegionFlags::default(),
            origin: None,
        };
        GpuReport { regions: vec![region], ..GpuReport::default() }
    }

    /// Returns as an agent whose process is off the GPU. The result is the stream, number, size and file of the mirror, which
    /// is whole unless `is_partial`.
    fn return_detached(
        path: &Path,
        pid: u32,
        attempt: u64,
        is_partial: bool,
    ) -> (UnixStream, u64, u64, Option<File>) {
        let stream = connect(path);
        let version = PROTOCOL_VERSION;
        let FromAgent::Hello(plain) = hello(pid, Some(attempt)) else { unreachable!("a hello") };
        send(&stream, &FromAgent::Hello(Hello { is_detached: true, supports_activity: true, ..plain }));
        assert_eq!(receive(&stream).expect("a message"), ToAgent::Welcome { version });
        let message = receive(&stream).expect("a message");
        let ToAgent::Deliver { mirror, bytes, parked: 0, may_stay, .. } = message else {
            panic!("{message:?}")
        };
        assert_eq!(may_stay, bytes > 0 && !is_partial);
        let file = (bytes > 0).then(|| descriptors::receive(stream.as_fd(), 1).expect("a file"));
        (stream, mirror, bytes, file.and_then(|mut files| files.pop()).map(File::from))
    }

    fn unpark(stream: &UnixStream, letters: &str) -> Vec<String> {
        send(stream, &FromAgent::Unpark { pid: 1, keys: keys(letters) });
        let message = receive(stream).expect("a message");
        let ToAgent::Unparked { count } = message else { panic!("{message:?}") };
        descriptors::receive(stream.as_fd(), count).expect("files").into_iter().map(text_in).collect()
    }

    fn quiesce_agent(agents: &Agents, stream: UnixStream, attempt: u64, report: GpuReport) -> Quiesced {
        let detaching = thread::spawn(move || {
            expect_quiesce(&stream, attempt);
            send(&stream, &FromAgent::Quiesced { attempt, gpu: Some(report) });
        });
        let quiesced = agents.quiesce(attempt, LONG).expect("quiesced");
        detaching.join().expect("an agent");
        quiesced
    }

    /// The written ranges go to the mirror's history only; a capture into another mirror is not recorded.
    #[test]
    fn written_ranges_of_a_capture_are_recorded() {
        for skew in [0, 1] {
            let (_directory, _path, agents, [stream]) = agents_with([1]);
            let preparing = start_prepare(&agents, 1, LONG);
            let (number, _, _) = stage(&stream, 1, MIB);
            let prepared = finish_prepare(preparing);
            let capture = Capture { mirror: number + skew, number: 4, written: vec![0..8] };
            let report = GpuReport { capture: Some(Box::new(capture)), ..report() };
            let quiesced = quiesce_agent(&agents, stream, 1, report);
            drop(prepared);
            let [GpuState { mirror: Some(mirror), report, .. }] = quiesced.gpu() else {
                panic!("{quiesced:?}")
            };
            let file = DataFile {
                path: RelPath::new("gpu/1.mem").expect("a path"),
                bytes: 8,
                blake3: None,
                chunks: Vec::new(),
            };
            mirror.history.lock().record_commit(Some(4), vec![0..8], &file, stored_nowhere());
            assert_eq!(mirror.history.lock().unchanged_in(Some(4)).is_some(), skew == 0);
            let reported = report.capture.as_ref().expect("a capture");
            assert_eq!((reported.number, reported.written.is_empty()), (4, skew == 0));
        }
    }

    /// A process that is not back when its snapshot is committed may be copying from its mirror.
    #[test]
    fn a_partial_mirror_is_freed_when_its_process_returns_after_the_commit() {
        let (_directory, path, agents, [stream]) = agents_with([1]);
        agents.set_mirror_mode(MirrorMode::Changed);
        let preparing = start_prepare(&agents, 1, LONG);
        assert_eq!(receive(&stream).expect("a message"), ToAgent::Prepare { attempt: 1 });
        let changes = Some(ExpectedChanges { captures: 0, bytes: MIB });
        let needs = FromAgent::Needs {
            attempt: 1,
            mirror_bytes: MIB,
            used_bytes: Some(MIB),
            changes,
            ranks_on: Vec::new(),
        };
        send(&stream, &needs);
        let message = receive(&stream).expect("a message");
        let ToAgent::Stage { mirror: number, is_partial: true, .. } = message else { panic!("{message:?}") };
        let file = descriptors::receive(stream.as_fd(), 1).expect("a file").pop().expect("one");
        send(&stream, &FromAgent::Staged { attempt: 1 });
        let prepared = finish_prepare(preparing);
        let file = File::from(file);
        file.write_all_at(&[1; 8], 0).expect("written");
        let capture = Capture { mirror: number, number: 1, written: vec![0..8] };
        let report = GpuReport { capture: Some(Box::new(capture)), ..report() };
        let quiesced = quiesce_agent(&agents, stream, 1, report);
        drop(prepared);
        agents.resume_listening().expect("listening again");
        let (stream, ..) = return_detached(&path, 1, 1, true);
        assert_eq!(agents.await_return(&quiesced, SHORT).missing.len(), 1);

        let mirror = quiesced.gpu()[0].mirror.as_ref().expect("a mirror");
        let path = RelPath::new("gpu/1.mem").expect("a path");
        let file = DataFile { path, bytes: 8, blake3: None, chunks: Vec::new() };
        mirror.history.lock().record_commit(Some(1), vec![0..8], &file, stored_nowhere());
        assert!(agents.free_stored() > 0, "its process may be copying from it");
        send(&stream, &FromAgent::Reconnected { attempt: 1, restored: false, copied_bytes: 8, lost: None });
        until_count(&agents, 1);
        assert_eq!(mirror.allocated_bytes(), 0);
    }

    #[test]
    fn a_mirror_and_parked_memory_outlast_a_checkpoint() {
        let (_directory, path, agents, [first, second]) = agents_with([1, 2]);
        let preparing = start_prepare(&agents, 1, LONG);
        answer_prepare(&second, 1, 0);
        let (number, bytes, file) = stage(&first, 1, 3 * MIB);
        assert_eq!((bytes, file.metadata().expect("facts").len()), (4 * MIB, 4 * MIB));
        file.write_all_at(b"captured", MIB).expect("written");
        let aborted = finish_prepare(preparing);
        assert_eq!(aborted.device_bytes(), 3 * MIB);
        drop(aborted);
        assert_eq!(receive(&first).expect("a message"), ToAgent::Unstage { attempt: 1 });

        // In the next attempt the same mirror is larger.
        let preparing = start_prepare(&agents, 2, LONG);
        answer_prepare(&second, 2, 0);
        let (again, bytes, _) = stage(&first, 2, 5 * MIB);
        assert_eq!((again, bytes), (number, 6 * MIB));
        let prepared = finish_prepare(preparing);
        drop(second);
        until_count(&agents, 1);
        let detaching = thread::spawn(move || {
            expect_quiesce(&first, 2);
            park(&first, &["a", "b"]);
            assert_eq!(receive(&first).expect("a message"), ToAgent::Parked { is_kept: true });
            park(&first, &["c"]);
            assert_eq!(receive(&first).expect("a message"), ToAgent::Parked { is_kept: true });
            send(&first, &FromAgent::Quiesced { attempt: 2, gpu: Some(report()) });
        });
        let quiesced = agents.quiesce(2, LONG).expect("quiesced");
        detaching.join().expect("an agent");
        drop(prepared);
        let [gpu] = quiesced.gpu() else { panic!("{quiesced:?}") };
        assert_eq!((gpu.process.pid, &gpu.report), (Some(1), &report()));
        let mut content = [0; 8];
        gpu.mirror.as_ref().expect("a mirror").file.read_exact_at(&mut content, MIB).expect("read");
        assert_eq!(&content, b"captured");

        agents.resume_listening().expect("listening again");
        let (stream, again, bytes, file) = return_detached(&path, 1, 2, false);
        assert_eq!((again, bytes), (number, 6 * MIB));
        file.expect("a mirror").read_exact_at(&mut content, MIB).expect("read");
        assert_eq!(&content, b"captured");
        assert_eq!(unpark(&stream, "bc"), ["b", "c"]);
        assert_eq!(unpark(&stream, "ad"), [""; 0], "it does not have all of them");
        assert_eq!(unpark(&stream, "ac"), ["a", "c"], "they stay parked");
        send(&stream, &FromAgent::Reconnected { attempt: 2, restored: false, copied_bytes: 77, lost: None });
        let summary = agents.await_return(&quiesced, LONG);
        assert_eq!((summary.continued, summary.copied_bytes), (1, 77));

        // The process needs no mirror any more, and gets another one when it needs one again.
        let preparing = start_prepare(&agents, 3, LONG);
        answer_prepare(&stream, 3, 0);
        drop(finish_prepare(preparing));
        let preparing = start_prepare(&agents, 4, LONG);
        let (another, ..) = stage(&stream, 4, 1);
        assert_ne!(another, number);
        drop(finish_prepare(preparing));
    }

    #[test]
    fn a_restarted_process_gets_another_mirror() {
        let (_directory, path, agents, [stream]) = agents_with([1]);
        let preparing = start_prepare(&agents, 1, LONG);
        let (number, ..) = stage(&stream, 1, 1);
        drop(finish_prepare(preparing));
        drop(stream);
        until_count(&agents, 0);
        let stream = connect_agent(&path, 1, None);
        until_count(&agents, 1);
        let preparing = start_prepare(&agents, 2, LONG);
        assert_ne!(stage(&stream, 2, 1).0, number);
        drop(finish_prepare(preparing));
    }

    #[test]
    fn a_refusal_to_prepare_is_reported_and_the_others_release_their_mirrors() {
        let (_directory, _path, agents, [first, second]) = agents_with([1, 2]);
        let preparing = start_prepare(&agents, 1, LONG);
        answer_prepare(&first, 1, 1);
        stage(&second, 1, 1);
        receive_mirror(&first, 1);
        send(&first, &FromAgent::Failed { attempt: 1, reason: "no memory to pin".into(), is_lost: false });
        let error = preparing.join().expect("no panic").err().expect("refused");
        assert!(error.to_string().ends_with("(/bin/1): no memory to pin"), "{error}");
        for stream in [&first, &second] {
            assert_eq!(receive(stream).expect("a message"), ToAgent::Unstage { attempt: 1 });
        }
        // The refusal does not affect the next attempt.
        let preparing = start_prepare(&agents, 2, LONG);
        answer_prepare(&second, 2, 0);
        stage(&first, 2, 1);
        drop(finish_prepare(preparing));
    }

    #[test]
    fn an_agent_that_misses_the_deadline_is_named_and_its_late_answer_is_ignored() {
        let (_directory, _path, agents, [slow]) = agents_with([7]);
        let error = agents.prepare(1, SHORT, 0).err().expect("no answer");
        let QuiesceError::Deadline { unanswered, .. } = &error else { panic!("{error:?}") };
        assert_eq!(unanswered[0].pid, Some(7));
        let preparing = start_prepare(&agents, 2, LONG);
        answer_prepare(&slow, 1, 1);
        send(&slow, &FromAgent::Failed { attempt: 1, reason: "late".into(), is_lost: false });
        stage(&slow, 2, 2 * MIB);
        assert_eq!(finish_prepare(preparing).device_bytes(), 2 * MIB);
        assert_eq!(receive(&slow).expect("a message"), ToAgent::Unstage { attempt: 2 });

        // A late refusal does not make the launcher ask twice.
        let preparing = start_prepare(&agents, 3, LONG);
        stage(&slow, 3, 1);
        let prepared = finish_prepare(preparing);
        send(&slow, &FromAgent::Failed { attempt: 2, reason: "late".into(), is_lost: false });
        assert_eq!(quiesce_agent(&agents, slow, 3, report()).gpu().len(), 1);
        drop(prepared);
    }

    #[test]
    fn mirrors_larger_than_free_memory_are_refused() {
        let (_directory, _path, agents, [first, second]) = agents_with([1, 2]);
        let preparing = start_prepare(&agents, 1, LONG);
        answer_prepare(&first, 1, 1);
        answer_prepare(&second, 1, u64::MAX / 2);
        let error = preparing.join().expect("no panic").err().expect("refused").to_string();
        assert!(error.contains("of memory is needed") && error.contains("is free"), "{error}");
        // No agent was given a mirror.
        let preparing = start_prepare(&agents, 2, LONG);
        answer_prepare(&first, 2, 0);
        answer_prepare(&second, 2, 0);
        assert_eq!(finish_prepare(preparing).device_bytes(), 0);
    }

    #[test]
    fn ranks_on_one_gpu_are_refused() {
        let (_directory, _path, agents, [first, second]) = agents_with([1, 2]);
        let answer = |stream, attempt, gpus: &[&str]| {
            assert_eq!(receive(stream).expect("a message"), ToAgent::Prepare { attempt });
            let ranks_on = gpus.iter().map(|gpu| (*gpu).to_owned()).collect();
            let (used_bytes, changes) = (None, None);
            send(stream, &FromAgent::Needs { attempt, mirror_bytes: 0, used_bytes, changes, ranks_on });
        };
        let preparing = start_prepare(&agents, 1, LONG);
        answer(&first, 1, &["GPU-1", "GPU-2"]);
        answer(&second, 1, &["GPU-2"]);
        let error = preparing.join().expect("no panic").err().expect("refused").to_string();
        assert!(
            error.contains("process 1") && error.contains("process 2") && error.contains("(GPU-2)"),
            "{error}"
        );
        let preparing = start_prepare(&agents, 2, LONG);
        answer(&first, 2, &["GPU-1", "GPU-2"]);
        answer(&second, 2, &["GPU-3"]);
        assert_eq!(finish_prepare(preparing).device_bytes(), 0);
    }

    /// An agent that leaves holes needs memory for the rest only, and may allocate what else is free.
    #[test]
    fn a_mirror_with_holes_takes_what_is_used() {
        let (_directory, _path, agents, [stream]) = agents_with([1]);
        let stage = |attempt, mirror_bytes, used_bytes| {
            assert_eq!(receive(&stream).expect("a message"), ToAgent::Prepare { attempt });
            let used_bytes = Some(used_bytes);
            send(&stream, &needs(attempt, mirror_bytes, used_bytes));
            let message = receive(&stream).expect("a message");
            let ToAgent::Stage { bytes, more_bytes: Some(more_bytes), .. } = message else {
                panic!("{message:?}")
            };
            let file = descriptors::receive(stream.as_fd(), 1).expect("a file").pop().expect("one");
            send(&stream, &FromAgent::Staged { attempt });
            (bytes, more_bytes, File::from(file))
        };
        // More than any machine has.
        let huge_bytes = 1 << 50;
        let preparing = start_prepare(&agents, 1, LONG);
        let (bytes, more_bytes, file) = stage(1, huge_bytes, 4 * MIB);
        assert_eq!((bytes, file.metadata().expect("facts").len()), (huge_bytes, huge_bytes));
        let available_bytes = memory::available_bytes().expect("known");
        assert!(more_bytes > 0 && more_bytes < 2 * available_bytes, "{more_bytes} of {available_bytes}");
        let prepared = finish_prepare(preparing);
        assert_eq!(prepared.device_bytes(), 4 * MIB);
        drop(prepared);
        assert_eq!(receive(&stream).expect("a message"), ToAgent::Unstage { attempt: 1 });
        let preparing = start_prepare(&agents, 2, LONG);
        // What was used may be freed, and all of the mirror be written elsewhere.
        let (bytes, more_bytes, _) = stage(2, 8 * MIB, 6 * MIB);
        assert!(more_bytes >= bytes.min(available_bytes / 2), "{more_bytes} of {bytes}");
        drop(finish_prepare(preparing));
        assert_eq!(receive(&stream).expect("a message"), ToAgent::Unstage { attempt: 2 });
        let preparing = start_prepare(&agents, 3, LONG);
        assert_eq!(receive(&stream).expect("a message"), ToAgent::Prepare { attempt: 3 });
        send(
            &stream,
            &FromAgent::Needs {
                attempt: 3,
                mirror_bytes: huge_bytes,
                used_bytes: Some(huge_bytes),
                changes: None,
                ranks_on: Vec::new(),
            },
        );
        let error = preparing.join().expect("no panic").err().expect("refused").to_string();
        assert!(error.contains("of memory is needed"), "{error}");
    }

    #[test]
    fn memory_that_cannot_be_parked_is_copied_back() {
        let (_directory, path, agents, [stream]) = agents_with([1]);
        let detaching = thread::spawn(move || {
            expect_quiesce(&stream, 1);
            park(&stream, &["a"]);
            assert_eq!(receive(&stream).expect("a message"), ToAgent::Parked { is_kept: true });
            // Two descriptors are announced and one arrives, as when there are too many open files.
            send(&stream, &FromAgent::Park { pid: 1, keys: keys("bc"), instance: 0 });
            descriptors::send(stream.as_fd(), &[file_with("b").as_fd()]).expect("sent");
            assert_eq!(receive(&stream).expect("a message"), ToAgent::Parked { is_kept: false });
            send(&stream, &FromAgent::Quiesced { attempt: 1, gpu: Some(report()) });
        });
        let quiesced = agents.quiesce(1, LONG).expect("quiesced");
        detaching.join().expect("an agent");
        assert!(quiesced.gpu()[0].mirror.is_none(), "it was not prepared");
        agents.resume_listening().expect("listening again");
        let (stream, number, bytes, file) = return_detached(&path, 1, 1, false);
        assert_eq!((number, bytes), (0, 0));
        assert!(file.is_none());
        assert_eq!(unpark(&stream, "a"), ["a"]);
        assert_eq!(unpark(&stream, "b"), [""; 0]);
        send(&stream, &FromAgent::Reconnected { attempt: 1, restored: false, copied_bytes: 1, lost: None });
        assert_eq!(agents.await_return(&quiesced, LONG).copied_bytes, 1);

        // So it is in the next attempt, and after one that is refused.
        let detaching = thread::spawn(move || {
            expect_quiesce(&stream, 2);
            park(&stream, &["a"]);
            assert_eq!(receive(&stream).expect("a message"), ToAgent::Parked { is_kept: true });
            send(
                &stream,
                &FromAgent::Failed { attempt: 2, reason: "changed my mind".into(), is_lost: false },
            );
            expect_quiesce(&stream, 3);
            send(&stream, &FromAgent::Quiesced { attempt: 3, gpu: None });
        });
        assert!(matches!(agents.quiesce(2, LONG), Err(QuiesceError::Refused { .. })));
        let quiesced = agents.quiesce(3, LONG).expect("quiesced");
        detaching.join().expect("an agent");
        assert!(quiesced.gpu().is_empty());
        agents.resume_listening().expect("listening again");
        assert_eq!(unpark(&return_detached(&path, 1, 3, false).0, "a"), ["a"]);
    }

    #[test]
    fn a_restored_process_gets_the_mirror_that_was_loaded() {
        let (_directory, path) = socket_dir();
        let agents = Agents::listen(&path, LONG).expect("listening");
        let mirror = |number| Mirror::to_be_filled(number, 2 * MIB, false).expect("a mirror");
        agents.adopt([(1, mirror(71)), (2, mirror(72))], BTreeMap::new());
        let (stream, number, bytes, file) = return_detached(&path, 1, 6, false);
        assert_eq!((number, bytes), (71, 2 * MIB));
        assert!(file.is_some());
        agents.drop_unexpected_mirrors(&Quiesced { attempt: 6, detached: Vec::new(), gpu: Vec::new() });
        send(&stream, &FromAgent::Reconnected { attempt: 6, restored: true, copied_bytes: 0, lost: None });
        until_count(&agents, 1);
        assert_eq!(return_detached(&path, 2, 6, false).2, 0, "process 2 counts as exited");
        let agents = Arc::new(agents);
        let preparing = start_prepare(&agents, 7, LONG);
        assert_eq!(stage(&stream, 7, MIB).0, 71);
        drop(finish_prepare(preparing));
    }
}
