//! Pre-copy: the job's memory is copied while the job runs, and the dump, during which the job is paused, copies only what
//! has changed since.
//!
//! ```text
//!   round 1 (all memory) ──► round 2 (what has changed) ──► … ──► dump of the rest (the job is paused) ──► merge
//!      │ fails, or too little memory is left                        │ fails
//!      └──────────────────────────► plain dump ◄────────────────────┘
//! ```
//!
//! Rounds are CRIU's pre-dumps: the job is paused for a moment, and its pages are written after that. They need soft-dirty
//! bits (CONFIG_MEM_SOFT_DIRTY). The store gets one image of pages per process: no snapshot depends on an older one.

use crate::checkpoint::attempt::{AfterDump, Attempt, AttemptError};
use crate::checkpoint::dump::{Dumped, criu_log, frozen_s};
use crate::criu::{Criu, Merged, Options, Piece, SessionError};
use crate::files::sources::{StagedPart, StagedParts};
use crate::files::staging::{StagedDir, Staging};
use crate::sys::path_text::read_text;
use ckpt_snapshot::SnapshotId;
use std::collections::HashMap;
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Below this, even a plain dump is short.
const LEAST_BYTES: u64 = 1 << 30;
/// The most rounds of `--precopy N`.
const MOST_ROUNDS: u32 = 8;
/// The most rounds of `--precopy auto`.
const AUTO_ROUNDS: u32 = 3;
/// After a round that wrote no more than this, the dump follows.
const FEW_BYTES: u64 = 16 << 20;
/// A trial succeeds if the pause is at most this share of a plain dump's.
const GAIN: f64 = 0.7;
/// After a success, the plain way returns only above this share.
const NO_GAIN: f64 = 0.9;
/// Plain dumps after a failed trial. The number doubles with each further one.
const FIRST_WAIT: u32 = 8;
const LONGEST_WAIT: u32 = 128;

/// The file of a context of asynchronous I/O, in the list of mappings.
const AIO: &str = " /[aio]";

/// Whether memory is copied while the job runs (`--precopy`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precopy {
    /// Where the kernel can, if a trial shows that it shortens the pause.
    #[default]
    Auto,
    /// Never.
    Off,
    /// This many rounds, always.
    Rounds(u32),
}

impl Precopy {
    /// Parses the option.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "auto" => Some(Self::Auto),
            "off" => Some(Self::Off),
            number => {
                number.parse().ok().filter(|rounds| (1..=MOST_ROUNDS).contains(rounds)).map(Self::Rounds)
            }
        }
    }
}

/// What earlier attempts of a job session have shown.
#[derive(Default)]
pub(super) struct Trials {
    /// Whether the kernel tracks changes to memory; `None` until it was asked.
    is_possible: Option<bool>,
    /// The pause of the last plain dump, in seconds per byte of memory.
    plain_s_per_byte: Option<f64>,
    /// The last trial succeeded.
    is_on: bool,
    /// Plain dumps until the next trial.
    wait: u32,
    next_wait: u32,
    /// How many rounds the last attempt was to have at most, and how many have paid, if that is known.
    most_rounds: u32,
    rounds: Option<u32>,
    has_warned: bool,
}

impl Trials {
    /// Whether the attempt of `--precopy auto` copies memory first. The first dump is a plain one, to compare with.
    fn is_due(&mut self, memory_bytes: u64, criu: &Criu) -> bool {
        if memory_bytes < LEAST_BYTES || self.plain_s_per_byte.is_none() {
            return false;
        }
        if self.wait > 0 {
            self.wait -= 1;
            return false;
        }
        *self.is_possible.get_or_insert_with(|| {
            let is_possible = criu.tracks_memory();
            if !is_possible {
                tracing::debug!(
                    "no pre-copy: this kernel does not track changes to memory (CONFIG_MEM_SOFT_DIRTY)"
                );
            }
            is_possible
        })
    }

    /// Records that memory is copied first. Until the attempt has succeeded, this counts as a trial that has failed.
    fn begin(&mut self) {
        self.wait = self.next_wait.max(FIRST_WAIT);
        self.next_wait = (self.wait * 2).min(LONGEST_WAIT);
    }

    /// Records that memory was not copied first, for a reason that says nothing of what that gains: where it has paid until
    /// now, it is tried again soon.
    fn passed_over(&mut self) {
        if self.is_on {
            (self.wait, self.next_wait) = (1, 0);
        }
    }

    /// Records the pause of a successful dump.
    pub(super) fn measure(&mut self, dumped: &Dumped, memory_bytes: u64) {
        self.note(dumped.copies.before().is_some(), dumped.own_stall_s(), memory_bytes);
    }

    fn note(&mut self, was_precopied: bool, stall_s: f64, memory_bytes: u64) {
        let s_per_byte = stall_s / memory_bytes.max(1) as f64;
        if !was_precopied {
            self.plain_s_per_byte = Some(s_per_byte);
            return;
        }
        let Some(plain) = self.plain_s_per_byte else { return };
        let share = s_per_byte / plain.max(f64::MIN_POSITIVE);
        tracing::debug!("with pre-copy the job was paused for {share:.2} of the time of a plain dump");
        self.is_on = share <= if self.is_on { NO_GAIN } else { GAIN };
        if self.is_on {
            (self.wait, self.next_wait) = (0, 0);
        } else if self.most_rounds < AUTO_ROUNDS {
            // The job has changed.
            self.rounds = None;
        }
    }

    /// Reports once why the plain way was taken.
    fn report(&mut self, reason: &str) {
        if std::mem::replace(&mut self.has_warned, true) {
            tracing::debug!("no pre-copy: {reason}");
        } else {
            tracing::warn!(
                "the job's memory is copied while the job is paused, not before (--precopy): {reason}"
            );
        }
    }
}

/// One round.
struct Round {
    name: String,
    images: StagedDir,
    /// Pages written.
    bytes: u64,
    stall_s: f64,
}

/// What was copied before the dump.
pub(super) struct Precopied {
    /// Oldest first; at least one.
    rounds: Vec<Round>,
}

/// The images of pages of a dump and its rounds, as one.
pub(super) struct MergedPages {
    /// Names of the images of pages, by dump, the newest first.
    pub(super) names: Vec<String>,
    pub(super) pieces: Vec<Piece>,
}

impl MergedPages {
    /// The image of pages with these chunk ends. `dirs` are where its files are.
    pub(super) fn file<'a>(
        &'a self,
        dirs: impl Iterator<Item = &'a StagedDir>,
        ends: Vec<u64>,
    ) -> StagedParts<'a> {
        let files = dirs.zip(self.names.iter().map(String::as_str)).collect();
        let part = |piece: &Piece| StagedPart { file: piece.dump, offset: piece.offset, bytes: piece.bytes };
        StagedParts::new(files, self.pieces.iter().map(part), ends)
    }
}

impl Precopied {
    /// The newest round's directory, relative to that of other images.
    pub(super) fn parent(&self) -> String {
        format!("../{}", self.rounds.last().map_or("", |round| &round.name))
    }

    /// For how long the rounds have paused the job.
    pub(super) fn stall_s(&self) -> f64 {
        self.rounds.iter().map(|round| round.stall_s).sum()
    }

    /// Deletes what was copied.
    pub(super) fn discard(self, staging: &Staging) {
        self.rounds.iter().for_each(|round| discard(staging, &round.name));
    }

    /// Merges the pagemaps of `images`, which refer to the rounds. Returns the images of pages by their names.
    pub(super) fn merge(&self, images: &StagedDir) -> io::Result<HashMap<String, MergedPages>> {
        let mut found = HashMap::new();
        for (name, _) in images.files()? {
            if !name.starts_with("pagemap-") {
                continue;
            }
            let mut pagemaps: Vec<Vec<u8>> = images.read(&name)?.into_iter().collect();
            for round in self.rounds.iter().rev() {
                // A process that is newer than the round has none.
                let Some(pagemap) = round.images.read(&name)? else { break };
                pagemaps.push(pagemap);
            }
            let wrong = || io::Error::other(format!("{name} does not fit the earlier copies"));
            let merged = Merged::of(&pagemaps).ok_or_else(wrong)?;
            if merged.pieces.iter().all(|piece| piece.dump == 0) {
                continue;
            }
            images.create(&name)?.write_all(&merged.image)?;
            let names: Vec<_> = merged.pages_ids.iter().map(|id| format!("pages-{id}.img")).collect();
            let own = names.first().cloned().ok_or_else(wrong)?;
            found.insert(own, MergedPages { names, pieces: merged.pieces });
        }
        Ok(found)
    }

    /// The directories of its rounds, the newest first.
    pub(super) fn dirs(&self) -> impl Iterator<Item = &StagedDir> {
        self.rounds.iter().rev().map(|round| &round.images)
    }
}

fn discard(staging: &Staging, name: &str) {
    if let Err(error) = staging.remove_subdir(name) {
        tracing::debug!("cannot remove copies of memory: {error}");
    }
}

/// Whether a process, by its directory in /proc, has a context of asynchronous I/O. One that has ended has none; of one whose
/// mappings cannot be read, it is not known.
fn uses_aio(process: &Path) -> bool {
    match read_text(process.join("maps")) {
        Ok(maps) => maps.contains(AIO),
        Err(_) => process.exists(),
    }
}

impl Attempt<'_> {
    /// Copies the job's memory while the job runs, if that is wanted and possible. `None`: a plain dump follows.
    ///
    /// # Errors
    /// [`AttemptError::Withdrawn`] if the job is being ended meanwhile: its last snapshot must not wait for this one.
    /// [`AttemptError::Nodes`] if the other nodes have given up.
    pub(super) fn precopy(
        &self,
        id: &SnapshotId,
        staging: &Staging,
        memory_bytes: u64,
        trials: &mut Trials,
    ) -> Result<Option<Precopied>, AttemptError> {
        let option = self.parts.precopy;
        // A job that ends with the dump has nothing to do meanwhile.
        if option == Precopy::Off || self.after_dump != AfterDump::KeepRunning || self.is_last_of_nodes() {
            return Ok(None);
        }
        if self.parts.job.agents.is_some() {
            if option != Precopy::Auto {
                trials.report("not supported for jobs with the interposer (--interpose)");
            }
            return Ok(None);
        }
        let most = match option {
            Precopy::Rounds(rounds) => rounds,
            _ if !trials.is_due(memory_bytes, &self.parts.criu) => return Ok(None),
            _ => trials.rounds.unwrap_or(AUTO_ROUNDS),
        };
        trials.begin();
        trials.most_rounds = most;
        let mut precopied = Precopied { rounds: Vec::new() };
        let result = self.copy_rounds(id, staging, memory_bytes, most, &mut precopied);
        let reason = match result {
            Ok(paid) => {
                trials.rounds = Some(paid);
                return Ok(Some(precopied));
            }
            Err(reason) => reason,
        };
        precopied.discard(staging);
        if let Some(error) = self.given_up() {
            return Err(error);
        }
        if self.is_last_of_nodes() {
            return Ok(None);
        }
        if !self.is_wanted() {
            return Err(AttemptError::Withdrawn);
        }
        let survey = self.parts.job.namespace.survey();
        let is_alive = survey.is_ok_and(|survey| survey.pids.contains(&self.parts.job.root_pid));
        if !is_alive || reason == NOTHING_GAINED {
            tracing::debug!("no pre-copy: {reason}");
        } else {
            trials.passed_over();
            trials.report(&reason);
        }
        Ok(None)
    }

    /// Whether copies are wanted: the job is not being ended, and the other nodes have not given up.
    fn is_wanted(&self) -> bool {
        let is_ending = self.parts.is_ending.load(Ordering::Relaxed);
        !is_ending && !self.is_last_of_nodes() && self.given_up().is_none()
    }

    /// Whether the job, on several nodes, ends with this snapshot.
    fn is_last_of_nodes(&self) -> bool {
        self.part.as_ref().is_some_and(|part| part.gate.is_last())
    }

    /// Returns how many rounds have paid: each has written less than half of what the one before wrote.
    fn copy_rounds(
        &self,
        id: &SnapshotId,
        staging: &Staging,
        memory_bytes: u64,
        most: u32,
        precopied: &mut Precopied,
    ) -> Result<u32, String> {
        let is_auto = self.parts.precopy == Precopy::Auto;
        if !staging.is_in_memory() {
            return Err("the images are staged on disk".to_owned());
        }
        let room_bytes = || staging.room_bytes(memory_bytes).map_err(|error| error.to_string());
        let (mut last_bytes, mut paid) = (memory_bytes, most);
        for number in 1..=most {
            self.look_for_aio()?;
            if !self.is_wanted() {
                return Err(SessionError::Withdrawn.to_string());
            }
            // Beside the images of the dump, which may contain everything once more.
            if room_bytes()? < last_bytes {
                return Err("there is not enough free memory for a second copy".to_owned());
            }
            let round = self.copy_round(id, staging, number, precopied)?;
            let (bytes, stall_s) = (round.bytes, round.stall_s);
            tracing::debug!("pre-copy, round {number}: {bytes} bytes, the job was paused for {stall_s:.3} s");
            precopied.rounds.push(round);
            if room_bytes()? == 0 {
                return Err("the job has allocated memory meanwhile, and too little is free".to_owned());
            }
            if is_auto && number > 1 {
                if bytes > memory_bytes / 2 {
                    return Err(NOTHING_GAINED.to_owned());
                }
                // Otherwise the next round would write as much again: a job may write to a part of its memory all the time.
                let gets_less = bytes <= last_bytes / 2;
                if bytes <= FEW_BYTES || !gets_less {
                    paid = if gets_less { AUTO_ROUNDS } else { number - 1 };
                    break;
                }
            }
            last_bytes = bytes;
        }
        self.look_for_aio().map(|()| paid)
    }

    /// What a device writes to a page by asynchronous I/O may leave no soft-dirty bit: the page would be taken for unchanged.
    pub(super) fn look_for_aio(&self) -> Result<(), String> {
        let survey = self.parts.job.namespace.survey().map_err(|error| error.to_string())?;
        let proc = self.proc();
        match survey.pids.iter().find(|pid| uses_aio(&proc.join(pid.to_string()))) {
            None => Ok(()),
            Some(pid) => Err(format!("process {pid} of the job uses asynchronous I/O (io_setup)")),
        }
    }

    /// One pre-dump of CRIU.
    fn copy_round(
        &self,
        id: &SnapshotId,
        staging: &Staging,
        number: u32,
        precopied: &Precopied,
    ) -> Result<Round, String> {
        let name = format!("precopy-{id}-{number}");
        let images = staging.subdir(&name).map_err(|error| error.to_string())?;
        let parent = (!precopied.rounds.is_empty()).then(|| precopied.parent());
        let result = self.pre_dump(&images, parent).and_then(|stall_s| {
            let files = images.files()?;
            let pages = files.iter().filter(|(name, _)| name.starts_with("pages-"));
            Ok((pages.map(|(_, bytes)| bytes).sum(), stall_s))
        });
        match result {
            Ok((bytes, stall_s)) => Ok(Round { name, images, bytes, stall_s }),
            Err(error) => {
                let log = criu_log(&images);
                discard(staging, &name);
                let culprit = crate::criu::explain(&log);
                Err(culprit.unwrap_or_else(|| error.to_string()))
            }
        }
    }

    /// Kills CRIU and the process that it has forked, and waits until both are gone: a dump would find the job traced.
    fn kill_criu(&self, criu_pid: i32) {
        self.stop_criu(criu_pid);
        self.kill_stopped_criu(criu_pid);
    }

    /// Returns for how long the job was paused, in seconds. No process of CRIU is left after an error.
    fn pre_dump(&self, images: &StagedDir, parent_img: Option<String>) -> Result<f64, SessionError> {
        let deadline = Instant::now() + self.freeze_timeout;
        let (session, options) = self.start_dump(images, images, 1, deadline, None)?;
        let options = Options { parent_img, track_mem: Some(true), leave_running: Some(true), ..options };
        let criu_pid = session.process().pid;
        let hit = |point: &str| self.hit(&format!("precopy-{point}"), criu_pid);
        let result = hit("begin").map_err(SessionError::from).and_then(|()| {
            session.pre_dump(options, deadline, &|| self.is_wanted(), &mut |stage| {
                hit(stage).map_err(|error| error.to_string())
            })
        });
        if !matches!(result, Ok(_) | Err(SessionError::Failed(_))) {
            self.kill_criu(criu_pid);
        }
        result?;
        hit("round")?;
        frozen_s(images)
    }
}

/// Two rounds wrote about the same.
const NOTHING_GAINED: &str = "the job rewrites its memory too fast";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_option_is_read() {
        let read = ["auto", "off", "1", "8"].map(Precopy::parse);
        assert_eq!(read, [Precopy::Auto, Precopy::Off, Precopy::Rounds(1), Precopy::Rounds(8)].map(Some));
        for bad in ["", "0", "9", "-1", "on", "2x"] {
            assert_eq!(Precopy::parse(bad), None, "{bad}");
        }
    }

    #[test]
    #[allow(unsafe_code)]
    fn a_context_of_asynchronous_io_is_found() {
        let process = Path::new("/proc/self");
        assert!(!uses_aio(process));
        let mut context = 0_u64;
        // SAFETY: the kernel writes one word to `context`, which outlives the calls.
        let made = unsafe { libc::syscall(libc::SYS_io_setup, 1, &raw mut context) };
        assert_eq!((made, uses_aio(process)), (0, true));
        // SAFETY: a plain system call on an integer.
        unsafe { libc::syscall(libc::SYS_io_destroy, context) };
    }

    /// Attempts of a job: whether each copied memory first. `share` is the pause then, in parts of a plain dump's.
    fn attempts(trials: &mut Trials, count: usize, share: f64) -> Vec<bool> {
        let criu =
            Criu { path: "/nonexistent".into(), version: crate::criu::MIN_VERSION, reason: String::new() };
        let mut attempt = || {
            let is_due = trials.is_due(LEAST_BYTES, &criu);
            if is_due {
                trials.begin();
            }
            trials.note(is_due, if is_due { share } else { 1.0 }, LEAST_BYTES);
            is_due
        };
        (0..count).map(|_| attempt()).collect()
    }

    fn possible() -> Trials {
        Trials { is_possible: Some(true), ..Trials::default() }
    }

    #[test]
    fn pre_copy_stays_while_it_pays() {
        let mut trials = possible();
        assert_eq!(attempts(&mut trials, 3, 0.2), [false, true, true], "the first is to compare with");
        assert_eq!(attempts(&mut trials, 2, 0.8), [true, true], "not worth a change");
        assert_eq!(attempts(&mut trials, 3, 1.0), [true, false, false]);
    }

    /// A round that gained nothing is left out, until the job has changed.
    #[test]
    fn rounds_that_do_not_pay_are_left_out() {
        let mut trials = Trials { plain_s_per_byte: Some(1.0 / LEAST_BYTES as f64), ..possible() };
        let mut trial = |paid: u32, share| {
            trials.most_rounds = trials.rounds.unwrap_or(AUTO_ROUNDS);
            trials.rounds = Some(paid);
            trials.note(true, share, LEAST_BYTES);
            trials.rounds
        };
        assert_eq!(trial(2, 0.75), Some(2), "the third was too much");
        assert_eq!(trial(2, 0.6), Some(2));
        assert_eq!(trial(2, 1.5), None, "the job has changed");
    }

    /// Memory is short for a moment, or CRIU was killed.
    #[test]
    fn what_says_nothing_of_the_gain_costs_one_plain_dump() {
        let mut trials = possible();
        assert_eq!(attempts(&mut trials, 2, 0.2), [false, true]);
        trials.begin();
        trials.passed_over();
        assert_eq!(attempts(&mut trials, 3, 0.2), [false, true, true]);
        let mut trials = possible();
        attempts(&mut trials, 1, 0.2);
        trials.begin();
        trials.passed_over();
        assert_eq!(attempts(&mut trials, 8, 0.2), [false; 8], "it has not paid yet");
    }

    #[test]
    fn trials_that_fail_become_rare() {
        let trials = attempts(&mut possible(), 1000, 0.8);
        let at: Vec<_> = (0..1000).filter(|&number| trials[number]).collect();
        let gaps: Vec<_> = at.windows(2).map(|pair| pair[1] - pair[0] - 1).collect();
        assert_eq!((at[0], &gaps[..6]), (1, &[8, 16, 32, 64, 128, 128][..]));
    }

    #[test]
    fn nothing_is_tried_without_need_or_support() {
        let mut trials = Trials::default();
        assert_eq!(attempts(&mut trials, 9, 0.1), [false; 9]);
        assert_eq!(trials.is_possible, Some(false));
        let mut trials = possible();
        trials.note(false, 1.0, LEAST_BYTES);
        let criu =
            Criu { path: "/nonexistent".into(), version: crate::criu::MIN_VERSION, reason: String::new() };
        assert!(!trials.is_due(LEAST_BYTES - 1, &criu) && trials.is_due(LEAST_BYTES, &criu));
    }
}
