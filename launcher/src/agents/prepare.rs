//! Preparing the agents for a checkpoint, while the job runs on.
//!
//! ```text
//!   (none) --Prepare--> Announced --Needs--> Needs --Stage--> Staging --Staged--> Staged --Quiesce--> gone
//!     ^                     |                  |                 |                   |
//!     |                     +------------------+--- Failed: Refused -----------------+
//!     |                                        |                                     |
//!     +----------------------------------------+--- given up: Unstage (if staged) ---+
//! ```
//!
//! A process without device memory needs no mirror and stays at Needs. Whoever connects after the announcement is not
//! prepared: it is asked to go away all the same, and does what it can.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ckpt_protocol::agent::ToAgent;
use tracing::debug;

use super::attend::say;
use super::line::Line;
use super::mirrors::Mirror;
use super::process::{Life, Process, QuiesceError};
use super::state::{Connection, State};
use super::{Agents, Shared};
use crate::files::staging;

/// Pinning a mirror goes at this pace at least; the agent's answer is waited for accordingly.
const STAGED_BYTES_PER_S: u64 = 256 << 20;

/// How far a connection is in an attempt that has not yet begun to send agents away.
pub(super) struct Preparation {
    attempt: u64,
    step: Step,
    /// A mirror was sent, which is to be let go of if the attempt is given up.
    is_staged: bool,
}

/// What is the newest of it.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    Announced,
    /// Says how large its mirror has to be, in bytes.
    Needs(u64),
    Staging,
    Staged,
    /// Says why it cannot be dumped.
    Refused(String),
}

impl Connection {
    /// Takes what the agent says of an attempt; what it says of any other has come too late.
    pub(super) fn advance(&mut self, attempt: u64, step: Step) {
        if let Some(preparation) = &mut self.preparation
            && preparation.attempt == attempt
        {
            preparation.step = step;
        }
    }

    /// How far it is in the attempt.
    fn step(&self, attempt: u64) -> Option<&Step> {
        let preparation = self.preparation.as_ref()?;
        (preparation.attempt == attempt).then_some(&preparation.step)
    }
}

/// The agents are prepared. If they are not sent away, they let go of their mirrors when this is dropped.
pub struct Prepared {
    shared: Arc<Shared>,
    attempt: u64,
    mirror_bytes: u64,
}

impl Prepared {
    /// How much device memory is to be saved, at most.
    pub fn mirror_bytes(&self) -> u64 {
        self.mirror_bytes
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        let mut streams = Vec::new();
        for connection in self.shared.lock().connections.values_mut() {
            if connection.step(self.attempt).is_some()
                && connection.preparation.take().is_some_and(|preparation| preparation.is_staged)
            {
                streams.push(Arc::clone(&connection.stream));
            }
        }
        for stream in streams {
            if let Err(error) = say(&stream, &ToAgent::Unstage { attempt: self.attempt }) {
                debug!(error = &error as &dyn std::error::Error, "an agent keeps its mirror for now");
            }
        }
    }
}

/// A process that needs a mirror.
struct Need {
    connection: u64,
    process: Process,
    pid: u32,
    life: Arc<Life>,
    mirror_bytes: u64,
    present: Option<Mirror>,
}

impl Need {
    fn bytes(&self) -> u64 {
        let present_bytes = self.present.as_ref().map_or(0, |mirror| mirror.bytes);
        Mirror::bytes_for(self.mirror_bytes, present_bytes)
    }

    fn growth_bytes(&self) -> u64 {
        self.bytes().saturating_sub(self.present.as_ref().map_or(0, |mirror| mirror.bytes))
    }

    /// The mirror, in the size that it has to have.
    fn provide(&self) -> Result<Mirror, QuiesceError> {
        let mirror = match &self.present {
            Some(present) => present.resized(self.bytes()),
            None => Mirror::new(self.bytes()),
        };
        mirror.map_err(|source| QuiesceError::Mirror { process: self.process.clone(), source })
    }
}

impl Agents {
    /// Announces a checkpoint to all who are connected, once those who were away are back, and gives them mirrors for
    /// their device memory. The job runs on meanwhile.
    ///
    /// # Errors
    /// [`QuiesceError::Refused`] if a process cannot be dumped, [`QuiesceError::Deadline`] if one does not answer in
    /// time or is not back, [`QuiesceError::NoMemory`] or [`QuiesceError::Mirror`]. Nothing is prepared any more then.
    pub fn prepare(&self, attempt: u64, deadline: Duration) -> Result<Prepared, QuiesceError> {
        let end = Instant::now() + deadline;
        let announced = self.announce(attempt, deadline, end)?;
        let mut prepared = Prepared { shared: Arc::clone(&self.shared), attempt, mirror_bytes: 0 };
        for stream in &announced {
            if let Err(error) = say(stream, &ToAgent::Prepare { attempt }) {
                debug!(
                    error = &error as &dyn std::error::Error,
                    "a checkpoint cannot be announced to an agent"
                );
            }
        }
        self.await_answers(attempt, deadline, end)?;
        let (needs, not_needed) = self.shared.lock().needs(attempt);
        drop(not_needed);
        let growth_bytes = needs.iter().fold(0, |sum: u64, need| sum.saturating_add(need.growth_bytes()));
        check_memory(growth_bytes)?;
        for need in &needs {
            prepared.mirror_bytes = prepared.mirror_bytes.saturating_add(need.mirror_bytes);
            self.stage(attempt, need)?;
        }
        let deadline = deadline + Duration::from_secs(prepared.mirror_bytes / STAGED_BYTES_PER_S);
        self.await_answers(attempt, deadline, Instant::now() + deadline)?;
        Ok(prepared)
    }

    /// Begins to prepare those who are there.
    fn announce(
        &self,
        attempt: u64,
        deadline: Duration,
        end: Instant,
    ) -> Result<Vec<Arc<Line>>, QuiesceError> {
        let mut state = self.all_back(deadline, end)?;
        let over = state.holdings.sweep();
        let mut announced = Vec::new();
        for connection in state.connections.values_mut().filter(|connection| connection.is_greeted) {
            connection.preparation = Some(Preparation { attempt, step: Step::Announced, is_staged: false });
            announced.push(Arc::clone(&connection.stream));
        }
        drop(state);
        drop(over);
        Ok(announced)
    }

    /// Waits until everybody has answered what it was sent last, or is gone.
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

    /// Gives a process its mirror.
    fn stage(&self, attempt: u64, need: &Need) -> Result<(), QuiesceError> {
        let mirror = need.provide()?;
        let mut state = self.shared.lock();
        let old = state.holdings.set_mirror(need.pid, &need.life, Some(mirror.clone()));
        let stream = state.connections.get_mut(&need.connection).map(|connection| {
            connection.preparation = Some(Preparation { attempt, step: Step::Staging, is_staged: true });
            Arc::clone(&connection.stream)
        });
        drop(state);
        drop(old);
        // It may have gone meanwhile.
        let Some(stream) = stream else { return Ok(()) };
        let message = ToAgent::Stage { attempt, mirror: mirror.number, bytes: mirror.bytes };
        if let Err(error) = stream.say_with(&message, &[mirror.file.as_fd()]) {
            debug!(error = &error as &dyn std::error::Error, "a mirror cannot be given to an agent");
        }
        Ok(())
    }
}

impl Shared {
    /// Notes what an agent says while it is being prepared.
    pub(super) fn advance(&self, id: u64, attempt: u64, step: Step) {
        if let Some(connection) = self.lock().connections.get_mut(&id) {
            connection.advance(attempt, step);
        }
        self.changed.notify_all();
    }
}

impl State {
    /// Who needs a mirror; and the mirrors of those who do not any more, to be dropped.
    fn needs(&mut self, attempt: u64) -> (Vec<Need>, Vec<Mirror>) {
        let (mut needs, mut not_needed) = (Vec::new(), Vec::new());
        for (&connection, one) in &self.connections {
            let (Some(&Step::Needs(mirror_bytes)), Some(pid)) = (one.step(attempt), one.process.pid) else {
                continue;
            };
            let (process, life) = (one.process.clone(), Arc::clone(&one.life));
            if mirror_bytes > 0 {
                let present = self.holdings.mirror(pid).cloned();
                needs.push(Need { connection, process, pid, life, mirror_bytes, present });
            } else if self.holdings.mirror(pid).is_some() {
                not_needed.extend(self.holdings.set_mirror(pid, &life, None));
            }
        }
        (needs, not_needed)
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

/// Refuses to take more memory than there is, with some to spare for the rest of the machine.
fn check_memory(needed_bytes: u64) -> Result<(), QuiesceError> {
    if needed_bytes == 0 {
        return Ok(());
    }
    // Not to be found out by taking it: what the kernel ends when memory is used up may be anybody's.
    let available_bytes = staging::available_bytes().unwrap_or(0);
    if needed_bytes.saturating_add(staging::SPARE_BYTES) <= available_bytes {
        return Ok(());
    }
    Err(QuiesceError::NoMemory { needed_bytes, available_bytes })
}

#[cfg(test)]
#[expect(clippy::single_range_in_vec_init, reason = "one range is meant")]
mod tests {
    use std::fs::File;
    use std::os::fd::OwnedFd;
    use std::os::unix::fs::FileExt;
    use std::os::unix::net::UnixStream;
    use std::path::Path;
    use std::thread::{self, JoinHandle};

    use ckpt_protocol::agent::{
        Capture, FromAgent, GpuReport, Hello, PROTOCOL_VERSION, Region, RegionFlags, RegionKind,
    };
    use ckpt_protocol::descriptors;
    use ckpt_snapshot::{DataFile, RelPath};

    use super::super::process::{GpuState, Quiesced};
    use super::super::tests::{LONG, SHORT, agent, connected, is_asked, place, tell, told, until_count};
    use super::*;

    const MIB: u64 = 1 << 20;

    /// An agent's side of the announcement.
    fn needs(stream: &UnixStream, attempt: u64, mirror_bytes: u64) {
        assert_eq!(told(stream).expect("told"), ToAgent::Prepare { attempt });
        tell(stream, &FromAgent::Needs { attempt, mirror_bytes });
    }

    /// An agent's side of getting a mirror, up to its answer.
    fn gets(stream: &UnixStream, wanted: u64) -> (u64, u64, File) {
        let message = told(stream).expect("told");
        let ToAgent::Stage { attempt, mirror, bytes } = message else { panic!("{message:?}") };
        assert_eq!(attempt, wanted);
        let file = descriptors::receive(stream.as_fd(), 1).expect("a file").pop().expect("one");
        (mirror, bytes, file.into())
    }

    fn stages(stream: &UnixStream, attempt: u64, mirror_bytes: u64) -> (u64, u64, File) {
        needs(stream, attempt, mirror_bytes);
        let mirror = gets(stream, attempt);
        tell(stream, &FromAgent::Staged { attempt });
        mirror
    }

    fn prepare(
        agents: &Arc<Agents>,
        attempt: u64,
        deadline: Duration,
    ) -> JoinHandle<Result<Prepared, QuiesceError>> {
        let agents = Arc::clone(agents);
        thread::spawn(move || agents.prepare(attempt, deadline))
    }

    fn prepared(preparing: JoinHandle<Result<Prepared, QuiesceError>>) -> Prepared {
        preparing.join().expect("no panic").expect("prepared")
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

    fn parks(stream: &UnixStream, texts: &[&str]) {
        let files: Vec<_> = texts.iter().map(|text| file_with(text)).collect();
        tell(stream, &FromAgent::Park { count: files.len() });
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

    /// An agent that is back and waits for what it needs: number, size and file of its mirror, and what is parked.
    fn detached(path: &Path, pid: u32, attempt: u64) -> (UnixStream, u64, u64, Option<File>, usize) {
        let stream = connected(path);
        let (away, exe) = (Some(attempt), format!("/bin/{pid}"));
        let version = PROTOCOL_VERSION;
        tell(
            &stream,
            &FromAgent::Hello(Hello {
                version,
                pid,
                start_time_ticks: 1,
                exe,
                away,
                is_detached: true,
                supports_activity: true,
            }),
        );
        assert_eq!(told(&stream).expect("told"), ToAgent::Welcome { version });
        let message = told(&stream).expect("told");
        let ToAgent::Deliver { mirror, bytes, parked } = message else { panic!("{message:?}") };
        let file = (bytes > 0).then(|| descriptors::receive(stream.as_fd(), 1).expect("a file"));
        (stream, mirror, bytes, file.and_then(|mut files| files.pop()).map(File::from), parked)
    }

    fn unparks(stream: &UnixStream, first: usize, count: usize) -> Vec<String> {
        tell(stream, &FromAgent::Unpark { first, count });
        let message = told(stream).expect("told");
        let ToAgent::Unparked { count } = message else { panic!("{message:?}") };
        descriptors::receive(stream.as_fd(), count).expect("files").into_iter().map(text_in).collect()
    }

    fn goes_away(agents: &Agents, stream: UnixStream, attempt: u64) -> Quiesced {
        goes_away_with(agents, stream, attempt, report())
    }

    fn goes_away_with(agents: &Agents, stream: UnixStream, attempt: u64, report: GpuReport) -> Quiesced {
        let leaves = thread::spawn(move || {
            is_asked(&stream, attempt);
            tell(&stream, &FromAgent::Quiesced { attempt, gpu: Some(report) });
        });
        let quiesced = agents.quiesce(attempt, LONG).expect("quiesced");
        leaves.join().expect("an agent");
        quiesced
    }

    /// Where it has written goes to the mirror's record, and no further; of another mirror nothing is noted.
    #[test]
    fn what_a_capture_has_written_is_noted() {
        for skew in [0, 1] {
            let (_directory, path) = place();
            let agents = Arc::new(Agents::listen(&path).expect("listening"));
            let stream = agent(&path, 1, None);
            until_count(&agents, 1);
            let preparing = prepare(&agents, 1, LONG);
            let (number, _, _) = stages(&stream, 1, MIB);
            let prepared = prepared(preparing);
            let capture = Capture { mirror: number + skew, number: 4, written: vec![0..8] };
            let report = GpuReport { capture: Some(Box::new(capture)), ..report() };
            let quiesced = goes_away_with(&agents, stream, 1, report);
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
            mirror.record().committed(Some(4), vec![0..8], &file);
            assert_eq!(mirror.record().of(Some(4)).is_some(), skew == 0);
            let told = report.capture.as_ref().expect("a capture");
            assert_eq!((told.number, told.written.is_empty()), (4, skew == 0));
        }
    }

    #[test]
    fn a_mirror_and_parked_memory_outlast_a_checkpoint() {
        let (_directory, path) = place();
        let agents = Arc::new(Agents::listen(&path).expect("listening"));
        let (first, second) = (agent(&path, 1, None), agent(&path, 2, None));
        until_count(&agents, 2);
        let preparing = prepare(&agents, 1, LONG);
        needs(&second, 1, 0);
        let (number, bytes, file) = stages(&first, 1, 3 * MIB);
        assert_eq!((bytes, file.metadata().expect("facts").len()), (4 * MIB, 4 * MIB));
        file.write_all_at(b"captured", MIB).expect("written");
        let given_up = prepared(preparing);
        assert_eq!(given_up.mirror_bytes(), 3 * MIB);
        drop(given_up);
        assert_eq!(told(&first).expect("told"), ToAgent::Unstage { attempt: 1 });

        // The next time it is larger, and the same.
        let preparing = prepare(&agents, 2, LONG);
        needs(&second, 2, 0);
        let (again, bytes, _) = stages(&first, 2, 5 * MIB);
        assert_eq!((again, bytes), (number, 6 * MIB));
        let go_on = prepared(preparing);
        drop(second);
        until_count(&agents, 1);
        let leaves = thread::spawn(move || {
            is_asked(&first, 2);
            parks(&first, &["a", "b"]);
            assert_eq!(told(&first).expect("told"), ToAgent::Parked { is_kept: true });
            parks(&first, &["c"]);
            assert_eq!(told(&first).expect("told"), ToAgent::Parked { is_kept: true });
            tell(&first, &FromAgent::Quiesced { attempt: 2, gpu: Some(report()) });
        });
        let quiesced = agents.quiesce(2, LONG).expect("quiesced");
        leaves.join().expect("an agent");
        drop(go_on);
        let [gpu] = quiesced.gpu() else { panic!("{quiesced:?}") };
        assert_eq!((gpu.process.pid, &gpu.report), (Some(1), &report()));
        let mut content = [0; 8];
        gpu.mirror.as_ref().expect("a mirror").file.read_exact_at(&mut content, MIB).expect("read");
        assert_eq!(&content, b"captured");

        agents.resume_listening().expect("listening again");
        let (stream, again, bytes, file, parked) = detached(&path, 1, 2);
        assert_eq!((again, bytes, parked), (number, 6 * MIB, 3));
        file.expect("a mirror").read_exact_at(&mut content, MIB).expect("read");
        assert_eq!(&content, b"captured");
        assert_eq!(unparks(&stream, 1, 2), ["b", "c"]);
        assert_eq!(unparks(&stream, 1, 1), [""; 0], "once");
        assert_eq!(unparks(&stream, 0, usize::MAX), [""; 0]);
        assert_eq!(unparks(&stream, 0, 1), ["a"]);
        tell(&stream, &FromAgent::Reconnected { attempt: 2, restored: false, copied_bytes: 77, lost: None });
        let back = agents.await_back(&quiesced, LONG);
        assert_eq!((back.continued, back.copied_bytes), (1, 77));

        // It needs none any more; when it does again, it is another one.
        let preparing = prepare(&agents, 3, LONG);
        needs(&stream, 3, 0);
        drop(prepared(preparing));
        let preparing = prepare(&agents, 4, LONG);
        let (another, ..) = stages(&stream, 4, 1);
        assert_ne!(another, number);
        drop(prepared(preparing));
    }

    #[test]
    fn whoever_begins_anew_gets_another_mirror() {
        let (_directory, path) = place();
        let agents = Arc::new(Agents::listen(&path).expect("listening"));
        let stream = agent(&path, 1, None);
        until_count(&agents, 1);
        let preparing = prepare(&agents, 1, LONG);
        let (number, ..) = stages(&stream, 1, 1);
        drop(prepared(preparing));
        drop(stream);
        until_count(&agents, 0);
        let stream = agent(&path, 1, None);
        until_count(&agents, 1);
        let preparing = prepare(&agents, 2, LONG);
        assert_ne!(stages(&stream, 2, 1).0, number);
        drop(prepared(preparing));
    }

    #[test]
    fn a_refusal_to_be_prepared_is_told_and_the_others_let_go() {
        let (_directory, path) = place();
        let agents = Arc::new(Agents::listen(&path).expect("listening"));
        let (first, second) = (agent(&path, 1, None), agent(&path, 2, None));
        until_count(&agents, 2);
        let preparing = prepare(&agents, 1, LONG);
        needs(&first, 1, 1);
        stages(&second, 1, 1);
        gets(&first, 1);
        tell(&first, &FromAgent::Failed { attempt: 1, reason: "no memory to pin".into(), is_lost: false });
        let error = preparing.join().expect("no panic").err().expect("refused");
        assert!(error.to_string().ends_with("(/bin/1): no memory to pin"), "{error}");
        for stream in [&first, &second] {
            assert_eq!(told(stream).expect("told"), ToAgent::Unstage { attempt: 1 });
        }
        // Nothing of it is left.
        let preparing = prepare(&agents, 2, LONG);
        needs(&second, 2, 0);
        stages(&first, 2, 1);
        drop(prepared(preparing));
    }

    #[test]
    fn whoever_does_not_answer_in_time_is_named_and_answers_too_late() {
        let (_directory, path) = place();
        let agents = Arc::new(Agents::listen(&path).expect("listening"));
        let deaf = agent(&path, 7, None);
        until_count(&agents, 1);
        let error = agents.prepare(1, SHORT).err().expect("no answer");
        let QuiesceError::Deadline { unanswered, .. } = &error else { panic!("{error:?}") };
        assert_eq!(unanswered[0].pid, Some(7));
        let preparing = prepare(&agents, 2, LONG);
        needs(&deaf, 1, 1);
        tell(&deaf, &FromAgent::Failed { attempt: 1, reason: "late".into(), is_lost: false });
        stages(&deaf, 2, 2 * MIB);
        assert_eq!(prepared(preparing).mirror_bytes(), 2 * MIB);
        assert_eq!(told(&deaf).expect("told"), ToAgent::Unstage { attempt: 2 });

        // Nor is it asked twice for having said no too late.
        let preparing = prepare(&agents, 3, LONG);
        stages(&deaf, 3, 1);
        let go_on = prepared(preparing);
        tell(&deaf, &FromAgent::Failed { attempt: 2, reason: "late".into(), is_lost: false });
        assert_eq!(goes_away(&agents, deaf, 3).gpu().len(), 1);
        drop(go_on);
    }

    #[test]
    fn more_memory_than_there_is_is_not_taken() {
        let (_directory, path) = place();
        let agents = Arc::new(Agents::listen(&path).expect("listening"));
        let (first, second) = (agent(&path, 1, None), agent(&path, 2, None));
        until_count(&agents, 2);
        let preparing = prepare(&agents, 1, LONG);
        needs(&first, 1, 1);
        needs(&second, 1, u64::MAX / 2);
        let error = preparing.join().expect("no panic").err().expect("refused").to_string();
        assert!(error.contains("bytes of memory are needed") && error.contains("are free"), "{error}");
        // Nobody was given anything.
        let preparing = prepare(&agents, 2, LONG);
        needs(&first, 2, 0);
        needs(&second, 2, 0);
        assert_eq!(prepared(preparing).mirror_bytes(), 0);
    }

    #[test]
    fn memory_that_cannot_be_parked_is_copied_back() {
        let (_directory, path) = place();
        let agents = Arc::new(Agents::listen(&path).expect("listening"));
        let stream = agent(&path, 1, None);
        let leaves = thread::spawn(move || {
            is_asked(&stream, 1);
            parks(&stream, &["a"]);
            assert_eq!(told(&stream).expect("told"), ToAgent::Parked { is_kept: true });
            // One is announced that does not arrive, as when there are too many open files.
            tell(&stream, &FromAgent::Park { count: 2 });
            descriptors::send(stream.as_fd(), &[file_with("b").as_fd()]).expect("sent");
            assert_eq!(told(&stream).expect("told"), ToAgent::Parked { is_kept: false });
            tell(&stream, &FromAgent::Quiesced { attempt: 1, gpu: Some(report()) });
        });
        let quiesced = agents.quiesce(1, LONG).expect("quiesced");
        leaves.join().expect("an agent");
        assert!(quiesced.gpu()[0].mirror.is_none(), "it was not prepared");
        agents.resume_listening().expect("listening again");
        let (stream, number, bytes, file, parked) = detached(&path, 1, 1);
        assert_eq!((number, bytes, parked), (0, 0, 0));
        assert!(file.is_none());
        tell(&stream, &FromAgent::Reconnected { attempt: 1, restored: false, copied_bytes: 1, lost: None });
        assert_eq!(agents.await_back(&quiesced, LONG).copied_bytes, 1);

        // The next time is a new one.
        let leaves = thread::spawn(move || {
            is_asked(&stream, 2);
            parks(&stream, &["a"]);
            assert_eq!(told(&stream).expect("told"), ToAgent::Parked { is_kept: true });
            tell(
                &stream,
                &FromAgent::Failed { attempt: 2, reason: "changed my mind".into(), is_lost: false },
            );
            is_asked(&stream, 3);
            tell(&stream, &FromAgent::Quiesced { attempt: 3, gpu: None });
        });
        assert!(matches!(agents.quiesce(2, LONG), Err(QuiesceError::Refused { .. })));
        let quiesced = agents.quiesce(3, LONG).expect("quiesced");
        leaves.join().expect("an agent");
        assert!(quiesced.gpu().is_empty());
        agents.resume_listening().expect("listening again");
        assert_eq!(detached(&path, 1, 3).4, 0, "what was parked for the one that was refused is gone");
    }

    #[test]
    fn a_restored_process_gets_the_mirror_that_was_loaded() {
        let (_directory, path) = place();
        let agents = Agents::listen(&path).expect("listening");
        let mirror = |number| Mirror::to_be_filled(number, 2 * MIB).expect("a mirror");
        agents.adopt([(1, mirror(71)), (2, mirror(72))]);
        let (stream, number, bytes, file, parked) = detached(&path, 1, 6);
        assert_eq!((number, bytes, parked), (71, 2 * MIB, 0));
        assert!(file.is_some());
        agents.settle(&Quiesced { attempt: 6, away: Vec::new(), gpu: Vec::new() });
        tell(&stream, &FromAgent::Reconnected { attempt: 6, restored: true, copied_bytes: 0, lost: None });
        until_count(&agents, 1);
        assert_eq!(detached(&path, 2, 6).2, 0, "it was taken for one that has exited");
        let agents = Arc::new(agents);
        let preparing = prepare(&agents, 7, LONG);
        assert_eq!(stages(&stream, 7, MIB).0, 71);
        drop(prepared(preparing));
    }
}
