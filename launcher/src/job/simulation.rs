//! A simulation of several launchers that claim one job in one object store. They run in turns, which a seeded generator
//! decides before each operation of the store. Operations fail, take effect although they are reported as failed, take
//! effect late or twice; launchers die, or stand still for a while; their clocks jump. Whatever happens, these must hold:
//!
//! - A launcher resumes from what the one before it has saved, or from a later snapshot of the same history.
//! - A snapshot that is resumed has all its data.
//! - A job that is complete is not resumed.
//! - A pinned snapshot stays.
//! - A launcher that claims the job undisturbed can save and complete it.
//!
//! In every second simulation the launchers have a key, and somebody without it puts records where the next one of theirs
//! would be: copies of other records, and a claim of a complete job. The launchers pass over them, as those of running
//! jobs do.

use crate::job::claim::claim_and_decide;
use crate::job::ownership::Ownership;
use crate::job::resume_point::{Resume, abandon_after};
use crate::store::tiers::{self, REMOTE};
use anyhow::{Result, anyhow, ensure};
use ckpt_snapshot::codec::{Codec, Key};
use ckpt_snapshot::medium::{Block, Medium, ObjectReader, ObjectWriter};
use ckpt_snapshot::packed::{Limits, PackStore};
use ckpt_snapshot::{
    Input, JobDir, JobIdentity, JobKey, JobOutcome, Manifest, RelPath, Retention, SnapshotId, Store,
    StoreRoot, Tier, Tiers,
};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

/// Seeds of one test run; `CKPT_TEST_SEEDS` sets another number, and `CKPT_TEST_SEED` the first one.
const SEEDS: u64 = 400;
/// Machines that run launchers, one after another each.
const MACHINES: usize = 3;
const LIVES: u32 = 2;
/// Time that passes with each operation: a save takes less than a day.
const OPERATION: Duration = Duration::from_secs(20);
/// How far a clock may be from the store's, in seconds. Beyond the day for which packs are not deleted, saves may fail.
const CLOCK_ERROR_S: i64 = 60 * 3600;
/// How many turns of the others a launcher may stand still for.
const LONGEST_PAUSE: u32 = 400;
/// The pinned snapshot.
const PINNED: u64 = 1;

/// The store, and what its launchers may expect.
struct World {
    objects: BTreeMap<String, (Arc<Vec<u8>>, Duration)>,
    late: Vec<Write>,
    random: fastrand::Rng,
    now: Duration,
    /// Whose turn it is.
    turn: usize,
    running: Vec<usize>,
    /// Launchers that stand still, and for how many turns.
    paused: BTreeMap<usize, u32>,
    /// Numbers that their launcher was told to be saved, while it owned the job.
    saved: BTreeSet<u64>,
    /// Those of which somebody was told that they are pinned.
    pinned: BTreeSet<u64>,
    /// Whether a launcher that owned the job was told that the job is complete; or may have completed it.
    complete: bool,
    perhaps_complete: bool,
    /// How often the job has begun.
    runs: u32,
    /// The records of somebody without the key, if there is somebody.
    planted: Option<BTreeSet<String>>,
}

/// A record without a code: the job is complete, and another launcher's.
const FALSE_CLAIM: &str = r#"{"version":1,"cwd":"","argv":[],"run":9,"last_sequence":99,"sequence_before_run":99,"abandoned":[],"launcher":"f@f","outcome":{"state":"complete"}}"#;

#[derive(Clone)]
enum Write {
    PutNew(String, Vec<u8>),
    Remove(String),
}

impl World {
    fn new(seed: u64) -> Self {
        Self {
            objects: BTreeMap::new(),
            late: Vec::new(),
            random: fastrand::Rng::with_seed(seed),
            now: Duration::ZERO,
            turn: 0,
            running: vec![0],
            paused: BTreeMap::new(),
            saved: BTreeSet::new(),
            pinned: BTreeSet::new(),
            complete: false,
            perhaps_complete: false,
            runs: 0,
            planted: (seed % 2 == 1).then(BTreeSet::new),
        }
    }

    fn apply(&mut self, write: &Write) -> io::Result<()> {
        match write {
            Write::PutNew(name, _) if self.objects.contains_key(name) => {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            Write::PutNew(name, content) => {
                self.objects.insert(name.clone(), (Arc::new(content.clone()), self.now));
            }
            Write::Remove(name) => {
                self.objects.remove(name);
                self.planted.as_mut().map(|planted| planted.remove(name));
            }
        }
        Ok(())
    }

    /// The newest record in this folder that a launcher has written.
    fn newest(&self, folder: &str) -> Option<(u64, &Arc<Vec<u8>>)> {
        let number = |name: &str| name.strip_prefix(folder)?.strip_suffix(".json")?.parse::<u64>().ok();
        let is_planted = |name: &String| self.planted.as_ref().is_some_and(|planted| planted.contains(name));
        let own = self.objects.iter().filter(|(name, _)| !is_planted(name));
        own.filter_map(|(name, (text, _))| Some((number(name)?, text))).max()
    }

    /// The name of the launcher that owns the job.
    fn owner(&self) -> Option<String> {
        let record: serde_json::Value = serde_json::from_slice(self.newest("job/")?.1).ok()?;
        Some(record["body"]["launcher"].as_str()?.to_owned())
    }

    /// Puts a record where the next one of a launcher would be, as somebody can who does not have the key.
    fn plant(&mut self) {
        let folder = ["job/", "marks/"][self.random.usize(..2)];
        let number = self.newest(folder).map_or(0, |(number, _)| number) + self.random.u64(1..4);
        let name = format!("{folder}{number}.json");
        let is_record = |name: &str| name.starts_with("job/") || name.starts_with("marks/");
        let records = self.objects.iter().filter(|(name, _)| is_record(name)).map(|(_, (text, _))| text);
        let mut texts: Vec<_> = records.cloned().collect();
        let checksum = blake3::hash(FALSE_CLAIM.as_bytes()).to_hex();
        texts.push(Arc::new(format!(r#"{{"checksum":"{checksum}","body":{FALSE_CLAIM}}}"#).into_bytes()));
        let text = self.random.choice(texts).expect("there is one");
        if self.apply(&Write::PutNew(name.clone(), text.to_vec())).is_ok() {
            self.planted.get_or_insert_default().insert(name);
        }
    }
}

/// The store as one launcher sees it.
#[derive(Clone)]
struct Machine {
    world: Arc<(Mutex<World>, Condvar)>,
    me: usize,
    /// Whether operations may fail.
    has_faults: bool,
    /// How far its clock is ahead of the store's, in seconds.
    clock_s: Arc<AtomicI64>,
    is_dead: Arc<AtomicBool>,
}

impl fmt::Debug for Machine {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "machine {}", self.me)
    }
}

impl Machine {
    fn world(&self) -> MutexGuard<'_, World> {
        self.world.0.lock()
    }

    /// Gives the turn to a random launcher, and waits for it to come back.
    fn step(&self) -> io::Result<MutexGuard<'_, World>> {
        let mut world = self.world();
        world.now += OPERATION;
        while !world.late.is_empty() && world.random.u32(..4) == 0 {
            let late = world.late.len();
            let number = world.random.usize(..late);
            let write = world.late.swap_remove(number);
            let _ = world.apply(&write);
        }
        if self.has_faults && world.planted.is_some() && world.random.u32(..20) == 0 {
            world.plant();
        }
        if self.has_faults && world.random.u32(..100) == 0 {
            let error_s = world.random.i64(-CLOCK_ERROR_S..CLOCK_ERROR_S);
            self.clock_s.store(error_s, Relaxed);
        }
        if self.has_faults && world.random.u32(..200) == 0 {
            let turns = world.random.u32(1..LONGEST_PAUSE);
            world.paused.insert(self.me, turns);
        }
        self.pass(&mut world);
        while world.turn != self.me {
            self.world.1.wait(&mut world);
        }
        let is_dead = self.is_dead.load(Relaxed);
        if is_dead || self.has_faults && world.random.u32(..150) == 0 {
            self.is_dead.store(true, Relaxed);
            return Err(io::Error::other("dead"));
        }
        Ok(world)
    }

    fn pass(&self, world: &mut World) {
        world.paused.retain(|_, turns| {
            *turns -= 1;
            *turns > 0
        });
        let World { running, paused, random, .. } = world;
        let awake: Vec<_> = running.iter().filter(|one| !paused.contains_key(one)).collect();
        if let Some(next) = random.choice(if awake.is_empty() { running.iter().collect() } else { awake }) {
            world.turn = *next;
            self.world.1.notify_all();
        }
    }

    fn write(&self, write: &Write) -> io::Result<()> {
        let mut world = self.step()?;
        let fate = if self.has_faults { world.random.u32(..40) } else { 40 };
        let lost = || io::Error::new(io::ErrorKind::TimedOut, "no answer");
        match fate {
            0 => Err(lost()),
            1 => {
                let _ = world.apply(write);
                Err(lost())
            }
            2 | 3 => {
                world.late.push(write.clone());
                Err(lost())
            }
            4 => {
                world.late.push(write.clone());
                world.apply(write)
            }
            _ => world.apply(write),
        }
    }
}

impl Medium for Machine {
    fn describe(&self, name: &RelPath) -> String {
        name.to_string()
    }

    fn create(&self, name: &RelPath, _: usize, block_bytes: usize) -> io::Result<Box<dyn ObjectWriter>> {
        Ok(Box::new(Writer { machine: self.clone(), name: name.clone(), content: Vec::new(), block_bytes }))
    }

    fn put_new(&self, name: &RelPath, content: &[u8]) -> io::Result<()> {
        self.write(&Write::PutNew(name.to_string(), content.to_vec()))
    }

    fn open(&self, name: &RelPath) -> io::Result<Box<dyn ObjectReader>> {
        let found = self.step()?.objects.get(name.as_str()).map(|(content, _)| Arc::clone(content));
        Ok(Box::new(Reader(found.ok_or(io::ErrorKind::NotFound)?)))
    }

    fn list(&self, dir: &RelPath) -> io::Result<Vec<(String, u64)>> {
        let (world, dir) = (self.step()?, format!("{dir}/"));
        let below = world.objects.iter().filter_map(|(name, (content, _))| {
            Some((name.strip_prefix(&dir)?.to_owned(), content.len() as u64))
        });
        Ok(below.collect())
    }

    fn list_times(&self, dir: &RelPath) -> io::Result<Vec<(String, SystemTime)>> {
        let (world, dir) = (self.step()?, format!("{dir}/"));
        // Seen from its own clock.
        let clock_s = self.clock_s.load(Relaxed);
        let ahead = Duration::from_secs(clock_s.unsigned_abs());
        let now = if clock_s < 0 { SystemTime::now() + ahead } else { SystemTime::now() - ahead };
        let below = world.objects.iter().filter_map(|(name, (_, at))| {
            Some((name.strip_prefix(&dir)?.to_owned(), now - (world.now - *at)))
        });
        Ok(below.collect())
    }

    fn remove(&self, name: &RelPath) -> io::Result<()> {
        self.write(&Write::Remove(name.to_string()))
    }

    fn sweep(&self, _: Duration) -> io::Result<Vec<String>> {
        Ok(Vec::new())
    }

    fn free_bytes(&self) -> io::Result<Option<u64>> {
        Ok(None)
    }
}

struct Writer {
    machine: Machine,
    name: RelPath,
    content: Vec<u8>,
    block_bytes: usize,
}

impl ObjectWriter for Writer {
    fn block(&mut self) -> io::Result<Block> {
        Ok(Block::new(self.block_bytes))
    }

    fn append(&mut self, block: Block) -> io::Result<()> {
        self.content.extend_from_slice(block.content());
        Ok(())
    }

    fn finish(self: Box<Self>) -> io::Result<()> {
        self.machine.put_new(&self.name, &self.content)
    }
}

struct Reader(Arc<Vec<u8>>);

impl ObjectReader for Reader {
    fn bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let from = usize::try_from(offset).ok().and_then(|offset| self.0.get(offset..offset + into.len()));
        into.copy_from_slice(from.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// A job as one launcher sees it.
struct Launcher<'a> {
    machine: &'a Machine,
    dir: JobDir,
    store: Arc<Tiers>,
    identity: JobIdentity,
}

/// A violation: a bug, and no failure that the simulation has made.
#[derive(Debug)]
struct Violation(String);

impl fmt::Display for Violation {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

impl std::error::Error for Violation {}

fn encryption_key(local: &Path) -> Key {
    let path = local.join("key");
    if !path.exists() {
        std::fs::write(&path, (1..33).collect::<Vec<u8>>()).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    }
    Key::from_file(&path).unwrap()
}

fn data() -> RelPath {
    RelPath::new("history").unwrap()
}

impl<'a> Launcher<'a> {
    fn new(machine: &'a Machine, local: &Path) -> Self {
        let key = JobKey::named("job").unwrap();
        let root = StoreRoot::open_or_create(&local.join(machine.me.to_string())).unwrap();
        let medium: Arc<dyn Medium> = Arc::new(machine.clone());
        let mut dir = root.job(&key).with_content_in(Arc::clone(&medium));
        if machine.world().planted.is_some() {
            dir = dir.with_key(Some(&encryption_key(local))).passing_over_forgeries();
        }
        let limits = Limits { workers: 1, loaders: 1, ..Limits::remote() };
        let store = PackStore::new(medium, Codec::default(), limits).of_job(&key);
        let store = Arc::new(Tiers::new(vec![Tier::new(REMOTE, Box::new(store), true)]));
        let identity = JobIdentity { key: key.to_string(), cwd: "/".into(), argv: Vec::new() };
        Self { machine, dir, store, identity }
    }

    /// Claims the job, resumes it, saves it a few times, and perhaps completes it.
    fn live(&self, saves: u32, completes: bool) -> Result<()> {
        let (expected, was_complete, perhaps_complete, runs) = {
            let world = self.machine.world();
            (world.saved.clone(), world.complete, world.perhaps_complete, world.runs)
        };
        let (ownership, candidates) =
            claim_and_decide(&Resume::Auto, &self.dir, &self.store, &self.identity, None)?;
        let (mut history, resumed) = self.resume(&candidates)?;
        // Unless another launcher has begun again meanwhile.
        if was_complete && self.machine.world().complete && resumed.is_some() {
            return Err(Violation(format!("a complete job was resumed from {resumed:?}")).into());
        }
        let lost: Vec<_> = expected.iter().filter(|number| !history.contains(number)).collect();
        let starts_again = was_complete || perhaps_complete && resumed.is_none();
        if !(starts_again || lost.is_empty()) {
            // Another launcher may have claimed it meanwhile, completed it, or begun it again.
            ensure!(self.is_owner(&ownership), "another launcher owns it");
            let world = self.machine.world();
            if !world.complete && !world.perhaps_complete && world.runs == runs {
                let found = format!("resumed from {resumed:?} of {candidates:?}");
                return Err(
                    Violation(format!("{lost:?} were saved and are not in {history:?}: {found}")).into()
                );
            }
        }
        if let Some(id) = &resumed {
            ownership.change(|record| abandon_after(record, id))?;
        } else {
            self.begin_again(&ownership);
        }
        for _ in 0..saves {
            let number = self.save(&ownership, &history)?;
            history.insert(number);
        }
        if completes {
            self.complete(&ownership)?;
        }
        Ok(())
    }

    fn is_owner(&self, ownership: &Ownership) -> bool {
        self.machine.world().owner() == Some(ownership.record().launcher)
    }

    /// What was saved before belongs to an earlier run.
    fn begin_again(&self, ownership: &Ownership) {
        let mut world = self.machine.world();
        if world.owner() == Some(ownership.record().launcher) {
            world.saved.clear();
            (world.complete, world.perhaps_complete) = (false, false);
            world.runs += 1;
        }
    }

    /// Reads the newest snapshot that is whole: the numbers of its history.
    fn resume(&self, candidates: &[SnapshotId]) -> Result<(BTreeSet<u64>, Option<SnapshotId>)> {
        for id in candidates.iter().rev() {
            let text =
                self.store.manifest(id).and_then(|found| (&*self.store as &dyn Store).read(&found, &data()));
            match text {
                Ok(text) => {
                    let mut history: BTreeSet<u64> = serde_json::from_slice(&text)?;
                    history.insert(id.sequence());
                    return Ok((history, Some(id.clone())));
                }
                Err(ckpt_snapshot::ReadError::Damaged { .. } | ckpt_snapshot::ReadError::Missing(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        ensure!(candidates.is_empty(), "none of {candidates:?} is whole");
        Ok((BTreeSet::new(), None))
    }

    /// Pins a snapshot that is not older than two others, as the command does.
    fn pin_one(&self, newest: u64) -> Result<()> {
        let number = {
            let mut world = self.machine.world();
            let number = newest - world.random.u64(..newest.min(3));
            if !world.saved.contains(&number) || world.random.u32(..3) > 0 {
                return Ok(());
            }
            number
        };
        let id = SnapshotId::new(number, SystemTime::UNIX_EPOCH);
        if !tiers::list_local(&self.store)?.iter().any(|one| one.id == id) {
            return Ok(());
        }
        self.dir.change_marks(|marks| marks.pin(&id))?;
        if !self.dir.record()?.is_some_and(|record| record.deleted.contains(&number)) {
            self.machine.world().pinned.insert(number);
        }
        Ok(())
    }

    fn save(&self, ownership: &Ownership, history: &BTreeSet<u64>) -> Result<u64> {
        let newest = tiers::list_local(&self.store)?.last().map_or(0, |one| one.id.sequence());
        let number = ownership.next_number(newest)?;
        let id = SnapshotId::new(number, SystemTime::UNIX_EPOCH);
        let home = self.store.tier(REMOTE)?.store();
        let mut writer = home.begin(&id, 0)?;
        let text = serde_json::to_vec(history)?;
        let path = data();
        writer.put(&[Input { path, from: &&text[..] }], &|_| {})?;
        let manifest = Manifest::new(id, self.identity.clone());
        writer.commit(Manifest { run: ownership.record().run, ..manifest })?;
        {
            let mut world = self.machine.world();
            if world.owner() == Some(ownership.record().launcher) {
                world.saved.insert(number);
            }
        }
        self.pin_one(number)?;
        let before = |ids: &[SnapshotId]| Ok(ownership.before_deletion(ids)?);
        // With one, the snapshot that another launcher resumes from may be deleted.
        let keep = self.machine.world().random.usize(1..3);
        let is_pruned = tiers::prune(&self.store, &self.dir, &Retention::newest(keep), None, before);
        if is_pruned && ownership.check().is_ok() {
            tiers::reclaim_local(&self.store, &AtomicBool::new(false))?;
        }
        Ok(number)
    }

    fn complete(&self, ownership: &Ownership) -> Result<()> {
        // Others see the record before this launcher goes on.
        self.machine.world().perhaps_complete = true;
        let done = ownership.change(|record| record.outcome = JobOutcome::Complete);
        let mut world = self.machine.world();
        if done.is_ok() && world.owner() == Some(ownership.record().launcher) {
            world.complete = true;
        }
        Ok(done?)
    }
}

/// Runs one simulation. Returns whether there was a violation.
fn simulate(seed: u64) -> Result<()> {
    let local = tempfile::tempdir()?;
    let world = Arc::new((Mutex::new(World::new(seed)), Condvar::new()));
    let machine = |me, has_faults| Machine {
        world: Arc::clone(&world),
        me,
        has_faults,
        clock_s: Arc::default(),
        is_dead: Arc::default(),
    };
    // A first run, of which a snapshot is pinned.
    let undisturbed = machine(0, false);
    Launcher::new(&undisturbed, local.path()).live(1, false)?;
    let pinned = SnapshotId::new(PINNED, SystemTime::UNIX_EPOCH);
    Launcher::new(&undisturbed, local.path()).dir.change_marks(|marks| marks.pin(&pinned))?;
    world.0.lock().running = (1..=MACHINES).collect();
    let outcomes = std::thread::scope(|scope| {
        let threads: Vec<_> = (1..=MACHINES)
            .map(|me| {
                let (machine, local) = (&machine, local.path());
                scope.spawn(move || live_on(&|| machine(me, true), local, me))
            })
            .collect();
        {
            let mut world = world.0.lock();
            undisturbed.pass(&mut world);
        }
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect::<Vec<_>>()
    });
    outcomes.into_iter().collect::<Result<()>>()?;
    {
        let mut world = world.0.lock();
        (world.turn, world.running) = (0, vec![0]);
        world.now += Duration::from_secs(2 * 24 * 3600);
    }
    // Writes that are late may come now, too.
    Launcher::new(&undisturbed, local.path())
        .live(3, true)
        .map_err(|error| anyhow!("the last one: {error}"))?;
    let last = Launcher::new(&undisturbed, local.path());
    ensure!(last.dir.record()?.is_some_and(|record| record.outcome == JobOutcome::Complete), "not complete");
    let listed: Vec<_> = tiers::list_local(&last.store)?.into_iter().map(|one| one.id).collect();
    let (saved, mut kept) = {
        let world = world.0.lock();
        (world.saved.clone(), world.pinned.clone())
    };
    kept.insert(PINNED);
    let is_there = |number: &u64| listed.iter().any(|id| id.sequence() == *number);
    ensure!(kept.iter().all(is_there), "of the pinned {kept:?} there are {listed:?}");
    // Others may have been stored late, by launchers that did not own the job any more.
    for id in listed.iter().filter(|id| saved.union(&kept).any(|number| *number == id.sequence())) {
        let read =
            last.store.manifest(id).and_then(|found| (&*last.store as &dyn Store).read(&found, &data()));
        read.map_err(|error| anyhow!("{id}: {error}"))?;
    }
    Ok(())
}

/// One launcher after another on one machine. Only violations are errors.
fn live_on(machine: &dyn Fn() -> Machine, local: &Path, me: usize) -> Result<()> {
    let mut result = Ok(());
    for _ in 0..LIVES {
        let machine = machine();
        let (saves, completes) = match machine.step() {
            Ok(mut world) => (world.random.u32(0..4), world.random.u32(..6) == 0),
            Err(_) => continue,
        };
        if let Err(error) = Launcher::new(&machine, local).live(saves, completes)
            && error.is::<Violation>()
        {
            result = Err(error);
            break;
        }
    }
    let machine = machine();
    let mut world = machine.world();
    while world.turn != me {
        machine.world.1.wait(&mut world);
    }
    world.running.retain(|one| *one != me);
    machine.pass(&mut world);
    result
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |text| text.parse().expect("a number"))
}

#[test]
fn launchers_on_several_machines() {
    let first = number("CKPT_TEST_SEED", 0);
    let next = std::sync::atomic::AtomicU64::new(first);
    let end = first + number("CKPT_TEST_SEEDS", SEEDS);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Relaxed);
                    if seed >= end {
                        return;
                    }
                    if let Err(error) = simulate(seed) {
                        panic!("CKPT_TEST_SEED={seed} CKPT_TEST_SEEDS=1: {error:#}");
                    }
                }
            });
        }
    });
}
