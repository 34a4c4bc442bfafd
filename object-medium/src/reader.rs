//! Reading an object: ranges of it, several at once, each tried again from where it broke off.

use crate::medium::{Core, Shared};
use crate::retry::{Patience, failure, may_pass, status, to_io};
use ckpt_snapshot::medium::ObjectReader;
use futures_util::stream::{self, StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{Error, GetOptions, GetRange, GetResult, ObjectMeta, ObjectStoreExt};
use std::io;
use std::sync::Arc;
use std::time::Instant;
use tokio::time::timeout;

/// So much comes with the first request: most objects but packs are no longer (bytes).
const HEAD_BYTES: u64 = 64 << 10;
/// A read that is longer is split into requests of this length (bytes).
const RANGE_BYTES: usize = 4 << 20;
/// Requests of one read that are under way at once.
const RANGES_AT_ONCE: usize = 4;
/// A request that brought this much has got on (bytes).
const GOT_ON_BYTES: usize = 64 << 10;

pub(crate) struct Reader {
    shared: Arc<Shared>,
    what: String,
    path: Path,
    bytes: u64,
    /// Says that it is still the same object.
    tag: Option<String>,
    /// How it begins.
    head: Vec<u8>,
}

/// Why an attempt brought less than it should.
enum Broken {
    Again(String),
    ForGood(io::Error),
}

impl Reader {
    pub(crate) fn open(shared: Arc<Shared>, what: String, path: Path) -> io::Result<Self> {
        let (meta, head) = shared.runtime.block_on(shared.core.open(&what, &path))?;
        // A weak tag never compares as equal.
        let tag = meta.e_tag.filter(|tag| !tag.starts_with("W/"));
        Ok(Self { shared, what, path, bytes: meta.size, tag, head })
    }
}

impl Core {
    /// What the object is, and how it begins, in one request where that works.
    async fn open(&self, what: &str, path: &Path) -> io::Result<(ObjectMeta, Vec<u8>)> {
        let first = || async {
            match self.get(path, 0..HEAD_BYTES, None).await {
                Ok(found) => {
                    let meta = found.meta.clone();
                    Ok((meta, found.bytes().await?.to_vec()))
                }
                // There is no first byte.
                Err(error) if status(&error) == Some(416) => {
                    Ok((self.client.store.head(path).await?, Vec::new()))
                }
                Err(error) => Err(error),
            }
        };
        let (meta, head) = self.retry.run(what, HEAD_BYTES, first).await?;
        if head.len() as u64 != meta.size.min(HEAD_BYTES) {
            return Err(failure(
                io::ErrorKind::InvalidData,
                what,
                &"the service sent another length than it said",
            ));
        }
        Ok((meta, head))
    }

    async fn get(
        &self,
        path: &Path,
        range: std::ops::Range<u64>,
        tag: Option<String>,
    ) -> Result<GetResult, Error> {
        let range = Some(GetRange::Bounded(range));
        let options = GetOptions { range, if_match: tag, ..GetOptions::default() };
        self.client.store.get_opts(path, options).await
    }
}

impl Reader {
    /// Fills `into` with what lies at `offset`, in one request if nothing happens.
    async fn fill(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let mut patience = Patience::new(&self.shared.core.retry);
        let mut done = 0;
        while done < into.len() {
            let before = done;
            let reason = match self.attempt(offset, into, &mut done).await {
                Ok(()) => continue,
                Err(Broken::ForGood(error)) => return Err(error),
                Err(Broken::Again(reason)) => reason,
            };
            if done - before >= GOT_ON_BYTES {
                patience.got_on();
            }
            patience.pause(&self.what, &reason).await?;
        }
        Ok(())
    }

    /// One request for what is missing of `into`; `done` says how much is there, also when it fails.
    async fn attempt(&self, offset: u64, into: &mut [u8], done: &mut usize) -> Result<(), Broken> {
        let core = &self.shared.core;
        let missing = (into.len() - *done) as u64;
        let deadline = Instant::now() + core.retry.attempt_limit(missing);
        let stalled = || Broken::Again(format!("nothing came for {:?}", core.retry.stall));
        let from = offset + *done as u64;
        let get = core.get(&self.path, from..from + missing, self.tag.clone());
        let found = timeout(core.retry.stall, get).await.map_err(|_| stalled())?;
        let mut body = found.map_err(|error| self.broken(error))?.into_stream();
        loop {
            let piece = timeout(core.retry.stall, body.next()).await.map_err(|_| stalled())?;
            let Some(piece) = piece else { break };
            let piece = piece.map_err(|error| self.broken(error))?;
            let room = into[*done..].get_mut(..piece.len()).ok_or_else(|| {
                let reason = "the service sent more than was asked for";
                Broken::ForGood(failure(io::ErrorKind::InvalidData, &self.what, &reason))
            })?;
            room.copy_from_slice(&piece);
            *done += piece.len();
            if *done < into.len() && Instant::now() > deadline {
                return Err(Broken::Again("the connection is too slow".to_owned()));
            }
        }
        if *done < into.len() {
            return Err(Broken::Again(format!("it broke off after {} of {missing} bytes", from - offset)));
        }
        Ok(())
    }

    fn broken(&self, error: Error) -> Broken {
        match error {
            Error::Precondition { .. } => {
                let reason = "it was replaced while it was read";
                Broken::ForGood(failure(io::ErrorKind::InvalidData, &self.what, &reason))
            }
            error if may_pass(&error) => Broken::Again(error.to_string()),
            error => Broken::ForGood(to_io(&self.what, error)),
        }
    }
}

impl ObjectReader for Reader {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let end = offset.checked_add(into.len() as u64).filter(|&end| end <= self.bytes);
        let Some(end) = end else {
            let reason = format!("it ends after {} bytes", self.bytes);
            return Err(failure(io::ErrorKind::UnexpectedEof, &self.what, &reason));
        };
        if end <= self.head.len() as u64 {
            let offset = usize::try_from(offset).map_err(io::Error::other)?;
            into.copy_from_slice(&self.head[offset..offset + into.len()]);
            return Ok(());
        }
        let ranges = into.chunks_mut(RANGE_BYTES).enumerate();
        let fills = ranges.map(|(at, range)| self.fill(offset + (at * RANGE_BYTES) as u64, range));
        let all = stream::iter(fills).buffer_unordered(RANGES_AT_ONCE).try_collect::<()>();
        self.shared.runtime.block_on(all)
    }
}
