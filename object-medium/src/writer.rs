//! Writing an object: blocks become parts of equal length, several of which are uploaded concurrently. The memory of a
//! block is sent without a copy, and is reused when its parts are uploaded.
//!
//! ```text
//!   begun ──a part is full──▶ multipart upload ──finish──▶ completed
//!     │                          └──failure, drop──▶ aborted: the service discards the parts
//!     └──finish──▶ put in one request
//! ```

use crate::medium::{Object, Shared};
use crate::retry::failure;
use bytes::{Bytes, BytesMut};
use ckpt_snapshot::medium::{Block, ObjectWriter};
use object_store::multipart::PartId;
use object_store::{MultipartId, ObjectStoreExt, PutPayload};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;
use tokio::task::{JoinError, JoinSet};
use tokio::time::timeout;

/// The minimum length of a part of S3, except for the last one (bytes).
const SHORTEST_PART_BYTES: usize = 5 << 20;
/// Longer parts are not faster (bytes).
const LONGEST_PART_BYTES: usize = 32 << 20;
/// The maximum number of parts of S3.
const PARTS_MAX: usize = 10_000;
/// The timeout for aborting an upload.
const ABORT_TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) struct Writer {
    shared: Arc<Shared>,
    object: Arc<Object>,
    blocks: usize,
    block_bytes: usize,
    /// The number of blocks allocated so far.
    allocated: usize,
    free: Receiver<Block>,
    free_sender: Sender<Block>,
    part_bytes: usize,
    /// Data that is in no part yet.
    rest: Vec<Bytes>,
    rest_bytes: usize,
    total_bytes: u64,
    upload: Option<MultipartId>,
    in_flight: JoinSet<(usize, io::Result<PartId>)>,
    parts: Vec<Option<PartId>>,
}

/// A block that is being sent. On drop it returns to the writer.
struct BlockInFlight {
    block: Option<Block>,
    free: Sender<Block>,
}

impl AsRef<[u8]> for BlockInFlight {
    fn as_ref(&self) -> &[u8] {
        self.block.as_ref().map_or(&[], Block::content)
    }
}

impl Drop for BlockInFlight {
    fn drop(&mut self) {
        if let Some(mut block) = self.block.take() {
            block.set_filled(0);
            // The writer may have been dropped.
            let _ = self.free.send(block);
        }
    }
}

impl Writer {
    pub(crate) fn new(shared: Arc<Shared>, object: Object, blocks: usize, block_bytes: usize) -> Self {
        let (free_sender, free) = channel();
        // A quarter of the memory, so that three parts are in flight while the next one is filled.
        let quarter = blocks.saturating_mul(block_bytes) / 4;
        Self {
            shared,
            object: Arc::new(object),
            blocks: blocks.max(1),
            block_bytes,
            allocated: 0,
            free,
            free_sender,
            part_bytes: quarter.clamp(SHORTEST_PART_BYTES, LONGEST_PART_BYTES),
            rest: Vec::new(),
            rest_bytes: 0,
            total_bytes: 0,
            upload: None,
            in_flight: JoinSet::new(),
            parts: Vec::new(),
        }
    }

    /// Waits for one of the parts in flight.
    fn wait_for_one(&mut self) -> io::Result<()> {
        match self.shared.runtime.block_on(self.in_flight.join_next()) {
            Some(done) => self.note(done),
            None => Ok(()),
        }
    }

    fn note(&mut self, done: Result<(usize, io::Result<PartId>), JoinError>) -> io::Result<()> {
        let (number, part) = done.map_err(io::Error::other)?;
        self.parts[number] = Some(part?);
        Ok(())
    }

    /// Copies the pending data into one buffer, which frees its blocks. Needed if all blocks together are shorter than a
    /// part.
    fn gather(&mut self) {
        let mut rest = std::mem::take(&mut self.rest).into_iter();
        let Some(first) = rest.next() else { return };
        // Data gathered before stays in its buffer.
        let mut all = first.try_into_mut().unwrap_or_else(|block| {
            let mut all = BytesMut::with_capacity(self.part_bytes);
            all.extend_from_slice(&block);
            all
        });
        rest.for_each(|block| all.extend_from_slice(&block));
        self.rest = vec![all.freeze()];
    }

    /// Takes the next part from the pending data.
    fn cut(&mut self, bytes: usize) -> PutPayload {
        let mut part = Vec::new();
        let mut missing = bytes;
        while missing > 0 {
            let first = &mut self.rest[0];
            if first.len() <= missing {
                missing -= first.len();
                part.push(self.rest.remove(0));
            } else {
                part.push(first.split_to(missing));
                missing = 0;
            }
        }
        self.rest_bytes -= bytes;
        part.into_iter().collect()
    }

    fn send(&mut self, bytes: usize) -> io::Result<()> {
        let number = self.parts.len();
        if number == PARTS_MAX {
            let reason = format!("the object is longer than {PARTS_MAX} parts of {} bytes", self.part_bytes);
            return Err(failure(io::ErrorKind::FileTooLarge, &self.object.what, &reason));
        }
        let object = Arc::clone(&self.object);
        let upload = match &self.upload {
            Some(upload) => upload.clone(),
            None => self.shared.runtime.block_on(object.begin())?,
        };
        self.upload = Some(upload.clone());
        let payload = self.cut(bytes);
        let put = async move { (number, object.put_part(&upload, number, payload).await) };
        self.in_flight.spawn_on(put, self.shared.runtime.handle());
        self.parts.push(None);
        Ok(())
    }

    /// Aborts the upload, so that the service discards its parts.
    fn abort(&mut self) {
        let Some(upload) = self.upload.take() else { return };
        let object = Arc::clone(&self.object);
        let aborted = self.shared.runtime.block_on(async {
            // The service would keep a part that arrives after the abort.
            self.in_flight.shutdown().await;
            timeout(ABORT_TIMEOUT, object.abort(&upload)).await
        });
        let error = match aborted {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("{}: no answer within {ABORT_TIMEOUT:?}", self.object.what),
        };
        tracing::warn!("cannot abort an unfinished upload, which may cost money: {error}");
    }

    fn complete(&mut self) -> io::Result<()> {
        let Some(upload) = self.upload.clone() else {
            let bytes = self.rest_bytes;
            let content = self.cut(bytes);
            return self.shared.runtime.block_on(self.object.put(content));
        };
        if self.rest_bytes > 0 {
            self.send(self.rest_bytes)?;
        }
        while !self.in_flight.is_empty() {
            self.wait_for_one()?;
        }
        let parts: Option<Vec<_>> = self.parts.drain(..).collect();
        let parts =
            parts.ok_or_else(|| failure(io::ErrorKind::Other, &self.object.what, &"a part is missing"))?;
        let complete = self.object.complete(&upload, parts, self.total_bytes);
        self.shared.runtime.block_on(complete)?;
        self.upload = None;
        Ok(())
    }
}

impl Object {
    async fn begin(&self) -> io::Result<MultipartId> {
        self.core.retry.run(&self.what, 0, || self.service.create_multipart(&self.path)).await
    }

    async fn put_part(&self, upload: &MultipartId, number: usize, content: PutPayload) -> io::Result<PartId> {
        let bytes = content.content_length() as u64;
        self.core.pace.wait(bytes).await;
        let put = || self.service.put_part(&self.path, upload, number, content.clone());
        self.core.retry.run(&self.what, bytes, put).await
    }

    /// An attempt whose response was lost may have succeeded; the next one then finds no upload. Nobody else uses the
    /// object's name, so an object of the right length is ours.
    async fn complete(&self, upload: &MultipartId, parts: Vec<PartId>, bytes: u64) -> io::Result<()> {
        let complete = || async {
            let Err(error) = self.service.complete_multipart(&self.path, upload, parts.clone()).await else {
                return Ok(());
            };
            match self.core.client.store.head(&self.path).await {
                Ok(found) if found.size == bytes => Ok(()),
                _ => Err(error),
            }
        };
        self.core.retry.run(&self.what, 0, complete).await
    }

    async fn abort(&self, upload: &MultipartId) -> io::Result<()> {
        let abort = || self.service.abort_multipart(&self.path, upload);
        match self.core.retry.run(&self.what, 0, abort).await {
            // The service has discarded it already.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }
}

impl ObjectWriter for Writer {
    fn block(&mut self) -> io::Result<Block> {
        loop {
            while let Some(done) = self.in_flight.try_join_next() {
                self.note(done)?;
            }
            if let Ok(block) = self.free.try_recv() {
                return Ok(block);
            }
            if self.allocated < self.blocks {
                break;
            }
            if self.in_flight.is_empty() {
                self.gather();
                // No block is free if the caller has dropped some.
                return Ok(self.free.try_recv().unwrap_or_else(|_| Block::new(self.block_bytes)));
            }
            self.wait_for_one()?;
        }
        self.allocated += 1;
        Ok(Block::new(self.block_bytes))
    }

    fn append(&mut self, block: Block) -> io::Result<()> {
        let bytes = block.filled();
        let block = BlockInFlight { block: Some(block), free: self.free_sender.clone() };
        if bytes == 0 {
            return Ok(());
        }
        self.rest.push(Bytes::from_owner(block));
        self.rest_bytes += bytes;
        self.total_bytes += bytes as u64;
        while self.rest_bytes >= self.part_bytes {
            self.send(self.part_bytes)?;
        }
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> io::Result<()> {
        self.complete()
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.abort();
    }
}
