//! Reading an object: several concurrent ranged requests, each resumed from where it was interrupted.

use crate::medium::{Core, Shared};
use crate::retry::{Backoff, failure, is_temporary, status, to_io};
use ckpt_snapshot::medium::ObjectReader;
use futures_util::stream::{self, StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{Error, GetOptions, GetRange, GetResult, ObjectMeta, ObjectStoreExt};
use std::io;
use std::sync::Arc;
use std::time::Instant;
use tokio::time::timeout;

/// The length of the first request (bytes): most objects except packs fit into it.
const HEAD_BYTES: u64 = 64 << 10;
/// Longer reads are split into requests of this length (bytes).
const RANGE_BYTES: usize = 4 << 20;
/// Concurrent requests per read.
const RANGES_AT_ONCE: usize = 4;
/// A failed request that received at least this much has made progress (bytes).
const PROGRESS_BYTES: usize = 64 << 10;

pub(crate) struct Reader {
    shared: Arc<Shared>,
    what: String,
    path: Path,
    bytes: u64,
    /// The object's ETag, which detects that the object was replaced.
    tag: Option<String>,
    /// The first bytes of the object.
    head: Vec<u8>,
}

/// Why a request was incomplete.
enum RequestError {
    Temporary(String),
    Permanent(io::Error),
}

impl Reader {
    pub(crate) fn open(shared: Arc<Shared>, what: String, path: Path) -> io::Result<Self> {
        let (meta, head) = shared.runtime.block_on(shared.core.open(&what, &path))?;
        // A weak ETag never matches.
        let tag = meta.e_tag.filter(|tag| !tag.starts_with("W/"));
        Ok(Self { shared, what, path, bytes: meta.size, tag, head })
    }
}

impl Core {
    /// The object's metadata and first bytes, in one request if possible.
    async fn open(&self, what: &str, path: &Path) -> io::Result<(ObjectMeta, Vec<u8>)> {
        let first = || async {
            match self.get(path, 0..HEAD_BYTES, None).await {
                Ok(found) => {
                    let meta = found.meta.clone();
                    Ok((meta, found.bytes().await?.to_vec()))
                }
                // Range not satisfiable: the object is empty.
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
                &"the service sent another length than it announced",
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
    /// Fills `into` with the content at `offset`, with a new request after each failure.
    async fn fill(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.shared.core.retry.check(&self.what)?;
        let mut backoff = Backoff::new(&self.shared.core.retry);
        let mut done = 0;
        while done < into.len() {
            let before = done;
            let reason = match self.attempt(offset, into, &mut done).await {
                Ok(()) => continue,
                Err(RequestError::Permanent(error)) => return Err(error),
                Err(RequestError::Temporary(reason)) => reason,
            };
            if done - before >= PROGRESS_BYTES {
                backoff.reset();
            }
            backoff.pause(&self.what, &reason).await?;
        }
        Ok(())
    }

    /// One request for the missing part of `into`. Counts the received bytes in `done`, also on failure.
    async fn attempt(&self, offset: u64, into: &mut [u8], done: &mut usize) -> Result<(), RequestError> {
        let core = &self.shared.core;
        let missing = (into.len() - *done) as u64;
        let deadline = Instant::now() + core.retry.attempt_limit(missing);
        let stalled = || RequestError::Temporary(format!("received nothing for {:?}", core.retry.stall));
        let from = offset + *done as u64;
        let get = core.get(&self.path, from..from + missing, self.tag.clone());
        let found = timeout(core.retry.stall, get).await.map_err(|_| stalled())?;
        let mut body = found.map_err(|error| self.request_failed(error))?.into_stream();
        loop {
            let piece = timeout(core.retry.stall, body.next()).await.map_err(|_| stalled())?;
            let Some(piece) = piece else { break };
            let piece = piece.map_err(|error| self.request_failed(error))?;
            let room = into[*done..].get_mut(..piece.len()).ok_or_else(|| {
                let reason = "the service sent more than was requested";
                RequestError::Permanent(failure(io::ErrorKind::InvalidData, &self.what, &reason))
            })?;
            room.copy_from_slice(&piece);
            *done += piece.len();
            if *done < into.len() && Instant::now() > deadline {
                return Err(RequestError::Temporary("the connection is too slow".to_owned()));
            }
        }
        if *done < into.len() {
            let received = missing - (into.len() - *done) as u64;
            let reason = format!("the response ended after {received} of {missing} bytes");
            return Err(RequestError::Temporary(reason));
        }
        Ok(())
    }

    fn request_failed(&self, error: Error) -> RequestError {
        match error {
            Error::Precondition { .. } => {
                let reason = "the object was replaced while it was read";
                RequestError::Permanent(failure(io::ErrorKind::InvalidData, &self.what, &reason))
            }
            error if is_temporary(&error) => RequestError::Temporary(error.to_string()),
            error => RequestError::Permanent(to_io(&self.what, error)),
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
            let reason = format!("the object ends after {} bytes", self.bytes);
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
