//! Device memory that has no copy goes to the store while the job is paused (`--mirror none`), from a thread of its own.
//!
//! A store may not answer for long: a file server that is down, an object store behind its retries. Such a call cannot be
//! cancelled. It blocks this thread; the job continues after `--freeze-timeout`. The attempt ends when the store has answered
//! at last, and no other attempt begins before that: it would block as well.

use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::Duration;

use ckpt_protocol::control::Phase;
use ckpt_snapshot::{Cancellable, Input, SnapshotWriter, faults};
use crossbeam_channel::{Receiver, Sender, unbounded};
use parking_lot::Mutex;

use crate::agents::Offer;
use crate::checkpoint::attempt::{Attempt, AttemptError};
use crate::gpu::device_memory::OfferedMemory;

/// Has device memory stored during one attempt.
pub(super) struct Storing<'a> {
    offers: Sender<Offer>,
    record: &'a Record,
}

/// What the thread has done.
struct Record {
    progress: Mutex<Progress>,
    store: String,
    limit: Duration,
}

#[derive(Default)]
struct Progress {
    /// Offers that wait or are being stored.
    unfinished: usize,
    /// The writer has failed, and takes no more.
    has_failed: bool,
    /// Why.
    failure: Option<AttemptError>,
}

impl Storing<'_> {
    /// Has device memory stored. It can be read until that is done, or the attempt is given up.
    pub(super) fn store(&self, offer: Offer) {
        let mut progress = self.record.progress.lock();
        if !progress.has_failed && self.offers.send(offer).is_ok() {
            progress.unfinished += 1;
        }
    }

    /// Why memory could not be stored. Called when all processes have detached or the attempt was given up, which is for the
    /// store if one of them has refused (`is_refused`) while its memory was being stored.
    pub(super) fn failure(&self, is_refused: bool) -> Option<AttemptError> {
        let mut progress = self.record.progress.lock();
        if is_refused && progress.unfinished > 0 {
            Some(self.record.too_slow())
        } else {
            progress.failure.take()
        }
    }
}

impl Record {
    fn too_slow(&self) -> AttemptError {
        AttemptError::SlowStore { store: self.store.clone(), limit: self.limit }
    }

    /// Stores what is offered, until the other end is dropped.
    fn serve(&self, offers: &Receiver<Offer>, writer: &mut dyn SnapshotWriter, cancelled: &AtomicBool) {
        for offer in offers {
            if self.progress.lock().has_failed {
                self.progress.lock().unfinished -= 1;
                // The process is told that the attempt was given up.
                continue;
            }
            let stored = store_offer(&offer, writer, cancelled);
            let is_given_up = offer.reader.is_given_up();
            let stored = stored.map_err(|error| if is_given_up { self.too_slow() } else { error });
            let problem = stored.as_ref().err().map(ToString::to_string);
            let mut progress = self.progress.lock();
            progress.unfinished -= 1;
            progress.has_failed = stored.is_err();
            progress.failure = stored.err();
            drop(progress);
            offer.finish(problem);
        }
    }
}

fn store_offer(
    offer: &Offer,
    writer: &mut dyn SnapshotWriter,
    cancelled: &AtomicBool,
) -> Result<(), AttemptError> {
    faults::hit("window").map_err(AttemptError::Staging)?;
    let Some(memory) = OfferedMemory::of(offer)? else { return Ok(()) };
    let (path, from) = memory.source();
    let from = Cancellable::new(from, cancelled);
    writer.put(&[Input { path: path.clone(), from: &from }], &|_| {})?;
    memory.stored();
    Ok(())
}

impl Attempt<'_> {
    /// Does `work`, for which the job is paused, beside a thread that stores device memory with `writer`.
    pub(super) fn beside_storing<T>(
        &self,
        writer: &mut dyn SnapshotWriter,
        work: impl FnOnce(&Storing<'_>) -> Result<T, AttemptError>,
    ) -> Result<T, AttemptError> {
        let parts = self.parts;
        let record = Record {
            progress: Mutex::default(),
            store: parts.store_name.clone(),
            limit: self.freeze_timeout,
        };
        thread::scope(|scope| {
            let (offers, offered) = unbounded();
            let (record, cancelled) = (&record, &*parts.cancelled);
            let serve = move || record.serve(&offered, writer, cancelled);
            thread::Builder::new()
                .name("store-memory".to_owned())
                .spawn_scoped(scope, serve)
                .map_err(AttemptError::Staging)?;
            let done = work(&Storing { offers, record });
            if record.progress.lock().unfinished > 0 {
                tracing::warn!(
                    "the store {} has not taken the memory of the GPUs. The job continues, and the checkpoint ends when the store answers",
                    record.store
                );
                // The job runs.
                parts.status.disturb(false);
                parts.status.enter(Phase::Persist, 0);
            }
            done
        })
    }
}
