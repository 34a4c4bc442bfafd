//! A model of a job's snapshots on two machines that share an object store, and random actions on both: starts, saves with
//! clocks that jump, tags, pins, removals, machines that lose their memory or their disk. After each action, what is in the
//! tiers must be what the model allows:
//!
//! - Each snapshot in a tier has the content that it was saved with.
//! - A snapshot goes only if somebody removes it, or if it has no mark and the tier has as many newer ones of the job's
//!   history as `--keep` says. Those that need not stay are not kept for ever.
//! - A launcher resumes from the newest snapshot of the history that it can reach: its own machine's, or an uploaded one
//!   if the job has run on the other machine meanwhile. Never from one that was left behind, and not if the job is complete.
//! - After an orderly end the newest snapshot is on the disk.
//! - A tag names one snapshot: the one that any machine has named last.
//! - Once all snapshots are removed, their data is gone.

use crate::job::claim::ClaimedJob;
use crate::job::journal::Journal;
use crate::job::resume_point::{Resume, abandon_after};
use crate::job::status::SharedStatus;
use crate::persist::copier::CopyParts;
use crate::persist::memory::Persister;
use crate::persist::upload::Uploader;
use crate::store::marks::{self, TagChange};
use crate::store::options::StoreOptions;
use crate::store::root::Root;
use crate::store::tiers::{self, DISK, MEMORY, REMOTE};
use ckpt_snapshot::medium::DirMedium;
use ckpt_snapshot::{
    Input, JobDir, JobIdentity, JobKey, JobOutcome, KeepEvery, Manifest, OpenError, RelPath, Retention,
    SnapshotId, Store, Tiers,
};
use proptest::prelude::*;
use proptest::sample::Index;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant, UNIX_EPOCH};

/// Sequences of actions of one test run; `CKPT_TEST_CASES` sets another number.
const CASES: u32 = 48;
const MACHINES: usize = 2;
/// Copies and uploads of some kilobytes.
const ENOUGH: Duration = Duration::from_secs(300);
/// The tags that both machines set.
const TAGS: [&str; 2] = ["best", "before-the-change"];
/// When the first snapshot is taken, in seconds since 1970 UTC.
const FIRST_S: u64 = 1_800_000_000;

type Ids = BTreeSet<SnapshotId>;
/// What each tag names.
type Tags = BTreeMap<&'static str, SnapshotId>;

#[derive(Clone, Copy, Debug)]
struct Settings {
    retention: Retention,
    persist_every: u64,
    upload_every: u64,
}

#[derive(Clone, Debug)]
enum Action {
    Start(Settings),
    /// Starts from the beginning.
    StartAgain(Settings),
    /// Resumes from a snapshot that the user names.
    StartFrom(Settings, Index),
    /// Takes a snapshot; the clock has moved by so many seconds.
    Save(i64),
    /// The launcher ends as after a signal.
    End,
    /// The job completes, and its launcher ends.
    Complete,
    /// The launcher is killed.
    Kill,
    /// The machine is set up anew.
    LoseDisk,
    Pin(Index, bool),
    /// A tag names one snapshot: it moves. Which tag, and whether it is set.
    Tag(Index, usize, bool),
    /// Two restores have failed.
    MarkBad(Index),
    Remove(Index),
}

fn settings() -> impl Strategy<Value = Settings> {
    let every = prop_oneof![
        4 => Just(None),
        1 => (1_u64..4).prop_map(|number| Some(KeepEvery::Nth(number))),
        1 => (1_u64..200).prop_map(|time_s| Some(KeepEvery::Time(Duration::from_secs(time_s)))),
    ];
    (1_usize..4, every, 1_u64..4, 1_u64..3).prop_map(|(keep, every, persist_every, upload_every)| Settings {
        retention: Retention { every, ..Retention::newest(keep) },
        persist_every,
        upload_every,
    })
}

fn action() -> impl Strategy<Value = (usize, Action)> {
    let action = prop_oneof![
        4 => settings().prop_map(Action::Start),
        1 => settings().prop_map(Action::StartAgain),
        2 => (settings(), any::<Index>()).prop_map(|(settings, which)| Action::StartFrom(settings, which)),
        12 => prop_oneof![4 => 1_i64..60, 1 => -100_000_i64..100_000].prop_map(Action::Save),
        2 => Just(Action::End),
        1 => Just(Action::Complete),
        2 => Just(Action::Kill),
        1 => Just(Action::LoseDisk),
        2 => any::<(Index, bool)>().prop_map(|(which, is_set)| Action::Pin(which, is_set)),
        3 => (any::<Index>(), 0..TAGS.len(), any::<bool>()).prop_map(|(which, tag, is_set)| Action::Tag(which, tag, is_set)),
        1 => any::<Index>().prop_map(Action::MarkBad),
        1 => any::<Index>().prop_map(Action::Remove),
    ];
    // Most of the time the job stays where it is.
    (prop_oneof![3 => Just(0), 1 => Just(1)], action)
}

/// A launcher that runs the job.
struct Launcher {
    dir: JobDir,
    store: Arc<Tiers>,
    claimed: ClaimedJob,
    persister: Option<Persister>,
    uploader: Arc<Uploader>,
    status: Arc<SharedStatus>,
    settings: Settings,
    /// What it has resumed and saved, oldest first.
    history: Vec<SnapshotId>,
    has_saved: bool,
}

#[derive(Clone, Default)]
struct Marks {
    pinned: Ids,
    tags: Tags,
    bad: Ids,
}

impl Marks {
    fn is_kept(&self, id: &SnapshotId) -> bool {
        self.kept().any(|kept| kept == id)
    }

    fn kept(&self) -> impl Iterator<Item = &SnapshotId> {
        self.pinned.iter().chain(self.tags.values())
    }

    fn forget(&mut self, id: &SnapshotId) {
        self.pinned.remove(id);
        self.tags.retain(|_, tagged| tagged != id);
        self.bad.remove(id);
    }
}

/// What must be.
#[derive(Default)]
struct Model {
    /// The snapshots of the history that was claimed last, oldest first.
    history: Vec<SnapshotId>,
    /// The machine that claimed it.
    owner: Option<usize>,
    is_complete: bool,
    /// For each snapshot ever taken, the history up to it.
    saved: BTreeMap<SnapshotId, Vec<SnapshotId>>,
    marks: [Marks; MACHINES],
    /// As the machines have told the object store.
    shared_tags: Tags,
    /// By each machine; a machine that has lost its disk cannot take back what it has pinned.
    pinned_remotely: BTreeMap<SnapshotId, BTreeSet<String>>,
    /// Taken by a launcher while the job ran on the other machine. They count for `--keep` and are not resumed.
    stale: Ids,
    now_s: u64,
}

struct World {
    place: tempfile::TempDir,
    launchers: [Option<Launcher>; MACHINES],
    model: Model,
}

/// What is in the tiers that last.
#[derive(Clone, Debug)]
struct Present {
    disks: [Ids; MACHINES],
    remote: Ids,
}

fn data() -> RelPath {
    RelPath::new("history").unwrap()
}

fn read(store: &dyn Store, manifest: &Manifest) -> Vec<SnapshotId> {
    serde_json::from_slice(&store.read(manifest, &data()).unwrap()).unwrap()
}

impl World {
    fn new() -> Self {
        // In memory: nothing here is about durability.
        let place = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        std::fs::create_dir(place.path().join("remote")).unwrap();
        let model = Model { now_s: FIRST_S, ..Model::default() };
        Self { place, launchers: Default::default(), model }
    }

    fn machine(&self, machine: usize) -> PathBuf {
        self.place.path().join(format!("machine-{machine}"))
    }

    fn options(&self, machine: usize) -> StoreOptions {
        let upload = format!("file://{}", self.place.path().join("remote").display());
        StoreOptions {
            dir: self.machine(machine),
            upload: Some(upload.parse().unwrap()),
            ..Default::default()
        }
    }

    fn job(&self, machine: usize) -> JobDir {
        let options = self.options(machine);
        let root = Root::open_or_create(&options, &options.pace()).unwrap();
        let job = root.job(&JobKey::named("job").unwrap());
        // Makes its directory. A process that another test has just forked may hold the lock until its exec.
        while let Err(error) = job.lock_to_run(|_| ()).map(drop) {
            assert!(matches!(error, OpenError::Locked { .. }), "{error}");
            std::thread::yield_now();
        }
        job
    }

    /// The store as a command opens it.
    fn store(&self, machine: usize) -> Arc<Tiers> {
        tiers::open(&self.options(machine), &self.job(machine)).unwrap()
    }

    /// Lists a tier, and reads all that is there.
    fn read_tier(&self, machine: usize, tier: &str) -> Ids {
        let store = self.store(machine);
        let store = store.tier(tier).unwrap().store();
        let listed = store.list().unwrap().into_iter().map(|one| {
            let manifest = one.manifest.unwrap();
            assert_eq!(read(store, &manifest), self.model.saved[&one.id], "{} in {tier}", one.id);
            one.id
        });
        listed.collect()
    }

    fn present(&self) -> Present {
        let disks = std::array::from_fn(|machine| self.read_tier(machine, DISK));
        Present { disks, remote: self.read_tier(0, REMOTE) }
    }

    /// A snapshot that the machine can see.
    fn any(&self, machine: usize, which: &Index) -> Option<SnapshotId> {
        let present = self.present();
        let all: Vec<_> = present.disks[machine].union(&present.remote).cloned().collect();
        (!all.is_empty()).then(|| which.get(&all).clone())
    }

    fn perform(&mut self, machine: usize, action: &Action) {
        let before = self.present();
        let ran = self.launchers[machine].as_ref().map(Launcher::keeps);
        let mut removed = None;
        match action {
            Action::Start(settings) => self.start(machine, *settings, &Resume::Auto),
            Action::StartAgain(settings) => self.start(machine, *settings, &Resume::Never),
            Action::StartFrom(settings, which) => {
                if let Some(id) = self.any(machine, which) {
                    self.start(machine, *settings, &Resume::Snapshot(id.to_string()));
                }
            }
            Action::Save(clock_s) => self.save(machine, *clock_s),
            Action::End => self.end(machine),
            Action::Complete => self.complete(machine),
            Action::Kill => self.kill(machine),
            Action::LoseDisk => self.lose_disk(machine),
            Action::Pin(which, is_set) => self.pin(machine, which, *is_set),
            Action::Tag(which, tag, true) => self.tag(machine, which, TAGS[*tag]),
            Action::Tag(which, tag, false) => self.untag(machine, which, TAGS[*tag]),
            Action::MarkBad(which) => {
                if let Some(id) = self.any(machine, which) {
                    self.model.marks[machine].bad.insert(id.clone());
                    let change = |marks: &mut ckpt_snapshot::Marks| {
                        (0..2).for_each(|_| marks.restore_failed(&id, "no", UNIX_EPOCH));
                    };
                    self.job(machine).change_marks(change).unwrap();
                }
            }
            Action::Remove(which) => removed = self.remove(machine, which),
        }
        let keeps = self.launchers[machine].as_ref().map(Launcher::keeps).or(ran);
        let newest = self.newest(machine, keeps);
        let twins = self.twins(&newest.1);
        self.check(
            &before,
            machine,
            action,
            &Reasons { removed, newest, stale: self.model.stale.clone(), twins },
        );
    }

    /// As the commands that pin, unpin, tag and untag do.
    fn pin(&mut self, machine: usize, which: &Index, is_set: bool) {
        let Some(id) = self.any(machine, which) else { return };
        set(&mut self.model.marks[machine].pinned, &id, is_set);
        let change =
            |marks: &mut ckpt_snapshot::Marks| if is_set { marks.pin(&id) } else { marks.unpin(&id) };
        self.job(machine).change_marks(change).unwrap();
        self.share(machine, &id, None);
        self.check_marks();
    }

    fn tag(&mut self, machine: usize, which: &Index, tag: &'static str) {
        let Some(id) = self.any(machine, which) else { return };
        let moved = self.job(machine).change_marks(|marks| marks.tag(&id, tag)).unwrap().unwrap();
        let before = self.model.marks[machine].tags.insert(tag, id.clone()).filter(|before| *before != id);
        assert_eq!(moved, Vec::from_iter(before));
        moved.iter().for_each(|other| self.share(machine, other, None));
        self.model.shared_tags.insert(tag, id.clone());
        self.share(machine, &id, Some(TagChange::Set(tag)));
        self.check_marks();
    }

    fn untag(&mut self, machine: usize, which: &Index, tag: &'static str) {
        let Some(id) = self.any(machine, which) else { return };
        if self.known_tags(machine).get(tag) != Some(&id) {
            return;
        }
        let tagged = self.model.marks[machine].tags.remove(tag);
        let change = |marks: &mut ckpt_snapshot::Marks| {
            if let Some(id) = &tagged {
                marks.untag(id, tag);
            }
        };
        self.job(machine).change_marks(change).unwrap();
        tagged.iter().filter(|other| **other != id).for_each(|other| self.share(machine, other, None));
        if self.model.shared_tags.get(tag) == Some(&id) {
            self.model.shared_tags.remove(tag);
        }
        self.share(machine, &id, Some(TagChange::Removed(tag)));
        self.check_marks();
    }

    /// Tells the other machine.
    fn share(&mut self, machine: usize, id: &SnapshotId, change: Option<TagChange<'_>>) {
        let job = self.job(machine);
        marks::share(&self.options(machine), &job, id, change).unwrap();
        let (keeper, keepers) =
            (job.keeper().unwrap(), self.model.pinned_remotely.entry(id.clone()).or_default());
        if self.model.marks[machine].is_kept(id) {
            keepers.insert(keeper);
        } else {
            keepers.remove(&keeper);
        }
        self.model.pinned_remotely.retain(|_, keepers| !keepers.is_empty());
    }

    /// What each tag names for a machine: what it names in the object store, or else what this machine has said.
    fn known_tags(&self, machine: usize) -> Tags {
        let shared = self.model.shared_tags.iter();
        let mut tags = self.model.marks[machine].tags.clone();
        tags.extend(shared.map(|(tag, id)| (*tag, id.clone())));
        tags
    }

    fn check_marks(&self) {
        let store = self.store(0);
        assert_eq!(store.tier(REMOTE).unwrap().store().pins().unwrap(), self.model.pinned_remotely);
        for machine in 0..MACHINES {
            let (job, model) = (self.job(machine), &self.model.marks[machine]);
            assert_eq!(
                job.marks().unwrap().kept().cloned().collect::<Ids>(),
                model.kept().cloned().collect()
            );
            let known = marks::of_all_machines(&self.options(machine), &job).unwrap();
            for tag in TAGS {
                let expected = Vec::from_iter(self.known_tags(machine).get(tag).cloned());
                assert_eq!(
                    known.tagged(tag).cloned().collect::<Vec<_>>(),
                    expected,
                    "{tag} on machine {machine}"
                );
            }
        }
    }

    fn remove(&mut self, machine: usize, which: &Index) -> Option<SnapshotId> {
        // A running job would not notice.
        let id = self.any(machine, which).filter(|_| self.launchers.iter().all(Option::is_none))?;
        tiers::remove(&self.options(machine), &self.store(machine), &self.job(machine), &id).unwrap();
        self.model.marks[machine].forget(&id);
        self.model.shared_tags.retain(|_, tagged| *tagged != id);
        self.model.pinned_remotely.remove(&id);
        self.check_marks();
        Some(id)
    }

    /// What a launcher resumes from.
    fn expected(&self, machine: usize, resume: &Resume) -> Option<SnapshotId> {
        let present = self.present();
        match resume {
            Resume::Snapshot(id) => return Some(id.parse().unwrap()),
            Resume::Auto if !self.model.is_complete => {}
            _ => return None,
        }
        let is_here =
            |id: &SnapshotId| self.model.owner == Some(machine) && present.disks[machine].contains(id);
        let mut newest_first = self.model.history.iter().rev();
        newest_first.find(|id| is_here(id) || present.remote.contains(id)).cloned()
    }

    fn start(&mut self, machine: usize, settings: Settings, resume: &Resume) {
        self.kill(machine);
        let (options, dir) = (self.options(machine), self.job(machine));
        let memory = self.machine(machine).join("memory");
        let memory = (settings.persist_every > 1).then(|| DirMedium::new(memory));
        let store = tiers::open_at(&options, &dir, &options.pace(), memory, None).unwrap();
        let identity = JobIdentity { key: "job".into(), cwd: "/".into(), argv: Vec::new() };
        let expected = self.expected(machine, resume);
        let (claimed, candidates) = ClaimedJob::claim(resume, &options, &dir, &store, &identity).unwrap();
        assert_eq!(candidates.last(), expected.as_ref(), "{resume:?}, of {:?}", self.model.history);
        if let Some(id) = &expected {
            claimed.ownership.change(|record| abandon_after(record, id)).unwrap();
        }
        claimed.claim.confirm();
        if expected.is_some() {
            claimed.publish(Instant::now() + ENOUGH);
        }
        let status = Arc::new(SharedStatus::new("job".to_owned()));
        let parts = CopyParts {
            store: Arc::clone(&store),
            dir: dir.clone(),
            retention: settings.retention,
            status: Arc::clone(&status),
            ownership: Arc::clone(&claimed.ownership),
        };
        let handover = claimed.handover.clone();
        let uploader = Arc::new(Uploader::start(parts.clone(), settings.upload_every, handover).unwrap());
        let persister = (settings.persist_every > 1).then(|| {
            let (journal, uploader) = (Arc::new(Journal::of(&dir)), Some(Arc::clone(&uploader)));
            let staged_bytes = Arc::<AtomicU64>::default();
            Persister::start(parts, journal, uploader, Some(settings.persist_every), staged_bytes, None)
                .unwrap()
        });
        let history = expected.map_or_else(Vec::new, |id| self.model.saved[&id].clone());
        self.model.history.clone_from(&history);
        (self.model.owner, self.model.is_complete) = (Some(machine), false);
        let launcher = Launcher {
            dir,
            store,
            claimed,
            persister,
            uploader,
            status,
            settings,
            history,
            has_saved: false,
        };
        self.launchers[machine] = Some(launcher);
    }

    fn save(&mut self, machine: usize, clock_s: i64) {
        self.model.now_s = self.model.now_s.saturating_add_signed(clock_s).max(FIRST_S / 2);
        while self
            .model
            .saved
            .keys()
            .any(|id| id.answers_to(&SnapshotId::new(id.sequence(), at(self.model.now_s)).to_string()))
        {
            self.model.now_s += 1;
        }
        let Some(launcher) = &mut self.launchers[machine] else { return };
        let id = launcher.save(at(self.model.now_s), &mut self.model.saved);
        let is_of_owner = self.model.owner == Some(machine);
        if is_of_owner {
            self.model.history.clone_from(&launcher.history);
        } else {
            self.model.stale.insert(id.clone());
        }
        let uploaded = launcher.status.snapshot().uploads.and_then(|uploads| uploads.newest);
        if uploaded == Some(id.to_string()) {
            assert!(is_of_owner, "{id} was uploaded by a machine that has lost the job");
            let (keeper, marks) = (self.job(machine).keeper().unwrap(), &self.model.marks[machine]);
            for id in marks.kept() {
                self.model.pinned_remotely.entry(id.clone()).or_default().insert(keeper.clone());
            }
        }
    }

    fn end(&mut self, machine: usize) {
        let Some(launcher) = self.launchers[machine].take() else { return };
        if let Some(persister) = &launcher.persister {
            persister.begin_last_copy();
            persister.complete_last_copy(Instant::now() + ENOUGH, || None);
        }
        assert!(launcher.uploader.is_idle_within(ENOUGH));
        launcher.claimed.publish(Instant::now() + ENOUGH);
        let newest = launcher.history.last().filter(|_| launcher.has_saved).cloned();
        drop(launcher);
        self.forget_memory(machine);
        if let Some(newest) = newest {
            assert!(self.read_tier(machine, DISK).contains(&newest), "{newest} is lost at an orderly end");
        }
    }

    fn complete(&mut self, machine: usize) {
        if self.model.owner != Some(machine) {
            return;
        }
        let Some(launcher) = &self.launchers[machine] else { return };
        launcher.claimed.ownership.change(|record| record.outcome = JobOutcome::Complete).unwrap();
        self.model.is_complete = true;
        self.end(machine);
    }

    fn kill(&mut self, machine: usize) {
        drop(self.launchers[machine].take());
        self.forget_memory(machine);
    }

    fn forget_memory(&self, machine: usize) {
        let _ = std::fs::remove_dir_all(self.machine(machine).join("memory"));
    }

    fn lose_disk(&mut self, machine: usize) {
        self.kill(machine);
        let _ = std::fs::remove_dir_all(self.machine(machine));
        self.model.marks[machine] = Marks::default();
        if self.model.owner == Some(machine) {
            self.model.owner = None;
        }
    }

    /// The good snapshots that count for `--keep`, newest first; and how many are kept.
    fn newest(&self, machine: usize, keeps: Option<(usize, Vec<SnapshotId>)>) -> (usize, Vec<SnapshotId>) {
        let (keep, mut history) = keeps.unwrap_or_else(|| (usize::MAX, self.model.history.clone()));
        history.extend(self.model.stale.iter().cloned());
        history.sort();
        history.retain(|id| !self.model.marks[machine].bad.contains(id));
        history.reverse();
        (keep, history)
    }

    /// Snapshots beside the history with the number of one in it: both machines have run the job. The record, which has
    /// numbers, does not tell them from the history, so that they count for `--keep`.
    fn twins(&self, history: &[SnapshotId]) -> Ids {
        let is_twin = |id: &&SnapshotId| {
            !history.contains(id) && history.iter().any(|one| one.sequence() == id.sequence())
        };
        self.model.saved.keys().filter(is_twin).cloned().collect()
    }

    fn check(&self, before: &Present, machine: usize, action: &Action, reasons: &Reasons) {
        let after = self.present();
        for (other, marks) in self.model.marks.iter().enumerate() {
            if other == machine && matches!(action, Action::LoseDisk) {
                continue;
            }
            let change = Change { before: &before.disks[other], after: &after.disks[other] };
            let lost = check_losses(&change, reasons, &|id| marks.is_kept(id));
            assert!(lost == 0 || other == machine, "{lost} have gone from the other machine");
        }
        let change = Change { before: &before.remote, after: &after.remote };
        check_losses(&change, reasons, &|id| self.model.pinned_remotely.contains_key(id));
        if let (Action::Save(_), Some(launcher)) = (action, &self.launchers[machine]) {
            self.check_kept(&after.disks[machine], machine, launcher);
        }
    }

    /// No more are kept than need be.
    fn check_kept(&self, disk: &Ids, machine: usize, launcher: &Launcher) {
        let marks = &self.model.marks[machine];
        let is_newest_on_disk = launcher.history.last().is_some_and(|newest| disk.contains(newest));
        if launcher.settings.retention.every.is_some() || !is_newest_on_disk {
            return;
        }
        let plain = |id: &&SnapshotId| disk.contains(id) && !marks.is_kept(id) && !marks.bad.contains(id);
        let kept: Vec<_> = launcher.history.iter().filter(plain).collect();
        assert!(kept.len() <= launcher.settings.retention.keep, "{kept:?} are kept");
    }

    /// Removes everything: nothing is left of it.
    fn clear(&mut self) {
        (0..MACHINES).for_each(|machine| self.kill(machine));
        for machine in 0..MACHINES {
            let (store, job) = (self.store(machine), self.job(machine));
            for one in store.list().unwrap() {
                tiers::remove(&self.options(machine), &store, &job, &one.id).unwrap();
            }
            tiers::sweep_local(&store).unwrap();
            tiers::reclaim_local(&store, &AtomicBool::new(false)).unwrap();
            let packs = std::fs::read_dir(job.path().join("packs")).map_or(0, Iterator::count);
            assert_eq!(packs, 0, "packs of no snapshot on machine {machine}");
        }
    }
}

/// Why snapshots may go or must stay.
struct Reasons {
    removed: Option<SnapshotId>,
    newest: (usize, Vec<SnapshotId>),
    stale: Ids,
    twins: Ids,
}

struct Change<'a> {
    before: &'a Ids,
    after: &'a Ids,
}

/// What has gone from a tier might go. Returns how many that were, beside the one that was removed.
fn check_losses(change: &Change<'_>, reasons: &Reasons, is_kept: &dyn Fn(&SnapshotId) -> bool) -> usize {
    let (keep, history) = &reasons.newest;
    let is_there = |id: &&SnapshotId| change.before.contains(id) || change.after.contains(id);
    let newest = |all: &[SnapshotId]| all.iter().filter(is_there).take(*keep).cloned().collect::<Ids>();
    let mut with_twins: Vec<_> = history.iter().chain(&reasons.twins).cloned().collect();
    with_twins.sort_by(|one, other| other.cmp(one));
    let (newest, with_twins) = (newest(history), newest(&with_twins));
    let lost = change.before.difference(change.after).filter(|id| reasons.removed.as_ref() != Some(id));
    lost.inspect(|id| {
        assert!(!is_kept(id), "{id} is marked and has gone");
        let is_needed = newest.contains(id) && with_twins.contains(id) && !reasons.stale.contains(id);
        assert!(!is_needed, "{id} is one of the newest {keep} and has gone");
    })
    .count()
}

fn set(ids: &mut Ids, id: &SnapshotId, is_set: bool) {
    if is_set {
        ids.insert(id.clone());
    } else {
        ids.remove(id);
    }
}

fn at(unix_s: u64) -> std::time::SystemTime {
    UNIX_EPOCH + Duration::from_secs(unix_s)
}

impl Launcher {
    /// How many snapshots it keeps, of which history.
    fn keeps(&self) -> (usize, Vec<SnapshotId>) {
        (self.settings.retention.keep, self.history.clone())
    }

    /// As a checkpoint does it.
    fn save(
        &mut self,
        time: std::time::SystemTime,
        saved: &mut BTreeMap<SnapshotId, Vec<SnapshotId>>,
    ) -> SnapshotId {
        let ownership = &self.claimed.ownership;
        let newest = tiers::list_local(&self.store).unwrap().last().map_or(0, |one| one.id.sequence());
        let id = SnapshotId::new(ownership.next_number(newest).unwrap(), time);
        assert!(!saved.contains_key(&id), "{id} exists");
        self.history.push(id.clone());
        saved.insert(id.clone(), self.history.clone());
        let text = serde_json::to_vec(&self.history).unwrap();
        let begun =
            self.persister.as_ref().and_then(|persister| persister.begin(&self.store, &id, 1 << 20, 0));
        let is_in_memory = begun.is_some();
        let mut writer =
            begun.unwrap_or_else(|| self.store.tier(DISK).unwrap().store().begin(&id, 0).unwrap());
        writer.put(&[Input { path: data(), from: &&text[..] }], &|_| {}).unwrap();
        let identity = JobIdentity { key: "job".into(), cwd: "/".into(), argv: Vec::new() };
        let taken_unix_ms = u64::try_from(time.duration_since(UNIX_EPOCH).unwrap().as_millis()).unwrap();
        let manifest = Manifest::new(id.clone(), identity);
        writer.commit(Manifest { run: ownership.record().run, taken_unix_ms, ..manifest }).unwrap();
        self.has_saved = true;
        match &self.persister {
            Some(persister) if is_in_memory => {
                persister.committed(&id);
                assert!(persister.is_idle_within(ENOUGH));
            }
            _ => {
                if let Some(persister) = &self.persister {
                    persister.is_in_store(&id);
                }
                self.uploader.committed(&id, false);
                let before = |ids: &[SnapshotId]| Ok(ownership.before_deletion(ids)?);
                if tiers::prune(&self.store, &self.dir, &self.settings.retention, None, before) {
                    tiers::reclaim_local(&self.store, &AtomicBool::new(false)).unwrap();
                }
            }
        }
        assert!(self.uploader.is_idle_within(ENOUGH));
        let listed = self.store.list_in(&[MEMORY, DISK]).unwrap();
        assert!(listed.iter().any(|one| one.id == id), "{id} was saved");
        id
    }
}

fn cases() -> u32 {
    std::env::var("CKPT_TEST_CASES").map_or(CASES, |text| text.parse().expect("a number"))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(cases()) })]
    #[test]
    fn tiers_have_what_the_model_allows(actions in proptest::collection::vec(action(), 1..40)) {
        let mut world = World::new();
        for (machine, action) in &actions {
            world.perform(*machine, action);
        }
        world.clear();
    }
}
