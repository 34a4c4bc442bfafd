//! Loads a snapshot from the store for a resume, and verifies the checksums.
//!
//! ```text
//!   small images, saved files  ████┤ CRIU starts
//!   memory pages for CRIU          ████┤ CRIU makes the processes' memory (post-setup-namespaces)
//!   other memory pages                    ████████┤ the processes have their memory (post-restore); see `placing.rs`
//!   device memory              ██████████████████████┤ the processes run (post-restore)
//! ```
//!
//! Device memory of a process without a mirror is read and verified, and not kept: the process loads it when it runs.
//!
//! CRIU's images are loaded into memory of the launcher, and CRIU frees each page as it restores it. CRIU reads nothing,
//! and no process runs, before the data is verified.

use crate::files::sources::StagedFile;
use crate::files::staging::{StagedDir, Staging};
use crate::gpu::device_memory;
use crate::restore::placing::Placing;
use crate::store::answer::AnswerWatch;
use crate::sys::progress::Bar;
use anyhow::{Context, Result};
use ckpt_snapshot::{
    Cancellable, DataFile, Load, Manifest, ReadError, RelPath, Store, Target, Tiers, faults,
};
use std::any::Any;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// What a resume does while it waits for the store.
pub const READING: &str = "the snapshot was being read";
/// The directory of CRIU's images in a snapshot.
const IMAGES: &str = "images/";
/// Prefix of the names of images with memory pages.
const PAGES: &str = "images/pages-";

/// Total size of CRIU's images in a snapshot (bytes).
#[must_use]
pub fn image_bytes(manifest: &Manifest) -> u64 {
    let images = manifest.files.iter().filter(|file| file.path.as_str().starts_with(IMAGES));
    images.map(|file| file.bytes).fold(0, u64::saturating_add)
}

/// Where a snapshot is loaded from.
#[derive(Clone)]
pub struct Origin {
    /// The job's snapshots.
    pub store: Arc<Tiers>,
    /// Whether the store answers.
    pub answers: AnswerWatch,
}

/// A snapshot that is being loaded. Loading stops when this is dropped.
pub struct Loading {
    images: Arc<StagedDir>,
    saved: StagedDir,
    answers: AnswerWatch,
    cancelled: Arc<AtomicBool>,
    work: Work,
    /// The pages that are written into the processes.
    placing: Arc<Placing>,
    pages: Option<Loader>,
    device_memory: Option<Loader>,
}

type Loader = JoinHandle<Result<(), ReadError>>;

impl Loading {
    /// Starts to load device memory into `mirrors`, loads all small images, and the files `saved`, and starts to load memory
    /// pages. If `places`, most of these are left to [`Self::place`].
    ///
    /// # Errors
    /// Damage in those images and files, or no space for them.
    pub fn begin(
        from: Origin,
        manifest: &Manifest,
        staging: &Staging,
        saved: &[&RelPath],
        mirrors: Vec<device_memory::Load>,
        places: bool,
    ) -> Result<Self> {
        let place = || "cannot create a place for the snapshot";
        let images = Arc::new(staging.subdir("images").with_context(place)?);
        let is_pages = |file: &&DataFile| file.path.as_str().starts_with(PAGES);
        let all = manifest.files.iter().filter(|file| file.path.as_str().starts_with(IMAGES));
        let (pages, small): (Vec<_>, Vec<_>) = all.cloned().partition(|file| is_pages(&file));
        let bytes = |files: &[DataFile]| files.iter().map(|file| file.bytes).sum::<u64>();
        let mirror_bytes: u64 = mirrors.iter().map(|mirror| mirror.bytes).sum();
        let bar = Arc::new(Bar::new("loading the snapshot", bytes(&pages) + bytes(&small) + mirror_bytes));
        let (answers, cancelled) = (from.answers.clone(), Arc::<AtomicBool>::default());
        let work = Work { from, manifest: manifest.clone(), bar, cancelled: Arc::clone(&cancelled) };
        let mut loading = Self {
            images: Arc::clone(&images),
            saved: staging.subdir("saved").with_context(place)?,
            answers: answers.clone(),
            cancelled,
            work: work.clone(),
            placing: Arc::default(),
            pages: None,
            device_memory: None,
        };
        let load = work.clone();
        loading.device_memory = Some(spawn("load-device", move || load.mirrors(&mirrors))?);
        answers.during(READING, || {
            hit("load-images")?;
            work.images(&small, &images, &Placing::default())?;
            work.saved(saved, &loading.saved)
        })?;
        if places {
            let bytes_of =
                |path: &str| pages.iter().find(|file| file.path.as_str() == path).map(|file| file.bytes);
            loading.placing = Arc::new(Placing::plan(&images, bytes_of)?);
        }
        let placing = Arc::clone(&loading.placing);
        tracing::debug!("{} bytes of memory are written into the processes", placing.bytes());
        loading.pages = Some(spawn("load-pages", move || {
            hit("load-pages")?;
            work.images(&pages, &images, &placing)
        })?);
        Ok(loading)
    }

    /// The directory of CRIU's images.
    #[must_use]
    pub fn images(&self) -> &StagedDir {
        &self.images
    }

    /// The content of one of the files `saved`.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn open(&self, saved: &RelPath) -> io::Result<File> {
        self.saved.open(&staged_name(saved))
    }

    /// Waits for the memory pages.
    ///
    /// # Errors
    /// Damage. A second call returns no error.
    pub fn wait_for_pages(&mut self) -> Result<(), ReadError> {
        self.answers.during(READING, || join(self.pages.take()))
    }

    /// Loads the pages that CRIU has not into the processes, which have their mappings, and do not run. `init_pid` is that of
    /// their PID namespace, here.
    ///
    /// # Errors
    /// Damage, or memory that cannot be written.
    pub fn place(&self, init_pid: i32) -> Result<(), ReadError> {
        self.answers.during(READING, || {
            hit("load-place")?;
            let failed =
                |source| ReadError::Target { path: "the memory of the processes".to_owned(), source };
            let all = self.placing.for_processes(init_pid).map_err(failed)?;
            self.work.load(all.iter().map(|(path, process)| (path, process as &dyn Target)))
        })
    }

    /// Waits for everything else.
    ///
    /// # Errors
    /// Damage. A second call returns no error.
    pub fn wait_for_all(&mut self) -> Result<(), ReadError> {
        self.wait_for_pages()?;
        self.answers.during(READING, || join(self.device_memory.take()))
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        self.cancelled.store(true, Ordering::Relaxed);
        let threads = [self.pages.take(), self.device_memory.take()].into_iter().flatten();
        // The results do not matter any more.
        self.answers.during(READING, || threads.for_each(|thread| drop(thread.join())));
    }
}

fn spawn(
    name: &str,
    work: impl FnOnce() -> Result<(), ReadError> + Send + 'static,
) -> Result<JoinHandle<Result<(), ReadError>>> {
    std::thread::Builder::new().name(name.to_owned()).spawn(work).context("cannot start to load the snapshot")
}

fn join(thread: Option<Loader>) -> Result<(), ReadError> {
    let Some(thread) = thread else { return Ok(()) };
    let name = thread.thread().name().unwrap_or_default().to_owned();
    thread.join().unwrap_or_else(|panic| Err(panicked(&name, &*panic)))
}

/// A bug in a loading thread ends this restore, not the supervisor that restarts the job.
fn panicked(name: &str, panic: &(dyn Any + Send)) -> ReadError {
    let said =
        panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    let said = said.unwrap_or("no reason given");
    let reason = format!(
        "the thread `{name}` of ckpt-run has panicked ({said}). This is a bug in ckpt-run: please report it"
    );
    ReadError::Target { path: "the snapshot's memory".to_owned(), source: io::Error::other(reason) }
}

/// See [`faults::hit`].
fn hit(point: &str) -> Result<(), ReadError> {
    faults::hit(point).map_err(|source| ReadError::Io { step: "read", path: IMAGES.into(), source })
}

/// The name of a saved file in its staging directory.
fn staged_name(data: &RelPath) -> String {
    data.as_str().replace('/', "-")
}

/// What every loading thread needs.
#[derive(Clone)]
struct Work {
    from: Origin,
    manifest: Manifest,
    bar: Arc<Bar>,
    cancelled: Arc<AtomicBool>,
}

impl Work {
    fn load<'a>(&self, wanted: impl Iterator<Item = (&'a RelPath, &'a dyn Target)>) -> Result<(), ReadError> {
        let targets: Vec<_> =
            wanted.map(|(path, into)| (path, Cancellable::new(into, &self.cancelled))).collect();
        let wanted: Vec<_> = targets.iter().map(|(path, into)| Load { path, into }).collect();
        let progress = |bytes| {
            self.bar.advance(bytes);
            self.from.answers.answered();
        };
        self.from.store.load(&self.manifest, &wanted, &progress)
    }

    fn images(&self, files: &[DataFile], dir: &StagedDir, placing: &Placing) -> Result<(), ReadError> {
        let staged = files.iter().map(|file| {
            let name = || file.path.as_str().trim_start_matches(IMAGES).to_owned();
            let target: Box<dyn Target> = match placing.for_criu(&file.path, dir, name()) {
                Some(part) => Box::new(part),
                None => Box::new(StagedFile::new(dir, name(), file.bytes)),
            };
            (&file.path, target)
        });
        let staged: Vec<_> = staged.collect();
        self.load(staged.iter().map(|(path, target)| (*path, &**target)))
    }

    fn saved(&self, files: &[&RelPath], dir: &StagedDir) -> Result<(), ReadError> {
        let staged: Vec<_> =
            files.iter().map(|path| (*path, StagedFile::new(dir, staged_name(path), 0))).collect();
        self.load(staged.iter().map(|(path, file)| (*path, file as &dyn Target)))
    }

    fn mirrors(&self, mirrors: &[device_memory::Load]) -> Result<(), ReadError> {
        self.load(mirrors.iter().filter_map(device_memory::Load::wanted))?;
        mirrors.iter().try_for_each(device_memory::Load::finish)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_while_loading_is_an_error_of_the_restore() {
        let number = 7;
        let thread = spawn("load-pages", move || panic!("chunk {number} has no place")).unwrap();
        let error = join(Some(thread)).unwrap_err();
        assert!(matches!(error, ReadError::Target { .. }));
        let said = error.to_string();
        assert!(said.contains("load-pages") && said.contains("chunk 7 has no place"), "{said}");
        let fixed = spawn("load-device", || panic!("fixed words")).unwrap();
        assert!(join(Some(fixed)).unwrap_err().to_string().contains("fixed words"));
        assert!(join(None).is_ok() && join(Some(spawn("load-pages", || Ok(())).unwrap())).is_ok());
    }
}
