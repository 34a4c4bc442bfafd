//! Writing an object: blocks become parts of one length, several of which are under way at once. A block's memory
//! goes to the network as it is and comes back when its parts are there.
//!
//! ```text
//!   begun ──a part is full──▶ in parts ──finish──▶ completed
//!     │                          └──failure, drop──▶ aborted: the service forgets the parts
//!     └──finish──▶ put in one request
//! ```

use crate::medium::{Core, Shared};
use crate::retry::failure;
use bytes::{Bytes, BytesMut};
use ckpt_snapshot::medium::{Block, ObjectWriter};
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path;
use object_store::{MultipartId, ObjectStoreExt, PutPayload};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;
use tokio::task::{JoinError, JoinSet};
use tokio::time::timeout;

/// S3 takes no shorter parts, but for the last one (bytes).
const SHORTEST_PART_BYTES: usize = 5 << 20;
/// Longer ones do not make it faster (bytes).
const LONGEST_PART_BYTES: usize = 32 << 20;
/// S3 takes no more parts.
const PARTS_MAX: usize = 10_000;
/// How long giving an upload up may take.
const ABORT_LIMIT: Duration = Duration::from_secs(10);

pub(crate) struct Writer {
    shared: Arc<Shared>,
    what: String,
    path: Path,
    blocks: usize,
    block_bytes: usize,
    /// Blocks that were made.
    made: usize,
    free: Receiver<Block>,
    home: Sender<Block>,
    part_bytes: usize,
    /// What is in no part yet.
    rest: Vec<Bytes>,
    rest_bytes: usize,
    total_bytes: u64,
    upload: Option<MultipartId>,
    under_way: JoinSet<(usize, io::Result<PartId>)>,
    parts: Vec<Option<PartId>>,
}

/// A block on its way to the network; its memory goes back to the writer.
struct Lent {
    block: Option<Block>,
    home: Sender<Block>,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        self.block.as_ref().map_or(&[], Block::content)
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(mut block) = self.block.take() {
            block.set_filled(0);
            // The writer may be gone.
            let _ = self.home.send(block);
        }
    }
}

impl Writer {
    pub(crate) fn new(
        shared: Arc<Shared>,
        what: String,
        path: Path,
        blocks: usize,
        block_bytes: usize,
    ) -> Self {
        let (home, free) = channel();
        // A quarter of the memory, so that three parts are under way while the next one is filled.
        let quarter = blocks.saturating_mul(block_bytes) / 4;
        Self {
            shared,
            what,
            path,
            blocks: blocks.max(1),
            block_bytes,
            made: 0,
            free,
            home,
            part_bytes: quarter.clamp(SHORTEST_PART_BYTES, LONGEST_PART_BYTES),
            rest: Vec::new(),
            rest_bytes: 0,
            total_bytes: 0,
            upload: None,
            under_way: JoinSet::new(),
            parts: Vec::new(),
        }
    }

    /// Waits for one of the parts that are under way.
    fn wait_for_one(&mut self) -> io::Result<()> {
        match self.shared.runtime.block_on(self.under_way.join_next()) {
            Some(done) => self.note(done),
            None => Ok(()),
        }
    }

    fn note(&mut self, done: Result<(usize, io::Result<PartId>), JoinError>) -> io::Result<()> {
        let (number, part) = done.map_err(io::Error::other)?;
        self.parts[number] = Some(part?);
        Ok(())
    }

    /// With less memory than a part takes, what waits is put together: the blocks become free.
    fn gather(&mut self) {
        let mut rest = std::mem::take(&mut self.rest).into_iter();
        let Some(first) = rest.next() else { return };
        // What was put together before is added to where it is.
        let mut all = first.try_into_mut().unwrap_or_else(|block| {
            let mut all = BytesMut::with_capacity(self.part_bytes);
            all.extend_from_slice(&block);
            all
        });
        rest.for_each(|block| all.extend_from_slice(&block));
        self.rest = vec![all.freeze()];
    }

    /// Takes the next part out of what waits.
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
            let reason = format!("it is longer than {PARTS_MAX} parts of {} bytes", self.part_bytes);
            return Err(failure(io::ErrorKind::FileTooLarge, &self.what, &reason));
        }
        let core = Arc::clone(&self.shared.core);
        let upload = match &self.upload {
            Some(upload) => upload.clone(),
            None => self.shared.runtime.block_on(core.begin(&self.what, &self.path))?,
        };
        self.upload = Some(upload.clone());
        let (payload, what, path) = (self.cut(bytes), self.what.clone(), self.path.clone());
        let put = async move { (number, core.put_part(&what, &path, &upload, number, payload).await) };
        self.under_way.spawn_on(put, self.shared.runtime.handle());
        self.parts.push(None);
        Ok(())
    }

    /// Gives the upload up, so that the service keeps nothing of it.
    fn abort(&mut self) {
        let Some(upload) = self.upload.take() else { return };
        let core = Arc::clone(&self.shared.core);
        let aborted = self.shared.runtime.block_on(async {
            // A part that came after the end would stay.
            self.under_way.shutdown().await;
            timeout(ABORT_LIMIT, core.abort(&self.what, &self.path, &upload)).await
        });
        match aborted {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!("an unfinished upload stays at the service: {error}"),
            Err(_) => tracing::warn!("an unfinished upload stays at the service: {}: no answer", self.what),
        }
    }

    fn complete(&mut self) -> io::Result<()> {
        let Some(upload) = self.upload.clone() else {
            let bytes = self.rest_bytes;
            let content = self.cut(bytes);
            return self.shared.runtime.block_on(self.shared.core.put(&self.what, &self.path, content));
        };
        if self.rest_bytes > 0 {
            self.send(self.rest_bytes)?;
        }
        while !self.under_way.is_empty() {
            self.wait_for_one()?;
        }
        let parts: Option<Vec<_>> = self.parts.drain(..).collect();
        let parts = parts.ok_or_else(|| failure(io::ErrorKind::Other, &self.what, &"a part is missing"))?;
        let core = &self.shared.core;
        let complete = core.complete(&self.what, &self.path, &upload, parts, self.total_bytes);
        self.shared.runtime.block_on(complete)?;
        self.upload = None;
        Ok(())
    }
}

impl Core {
    fn multipart(&self, what: &str) -> io::Result<&Arc<dyn MultipartStore>> {
        let no_parts = || failure(io::ErrorKind::Unsupported, what, &"the service takes no uploads in parts");
        self.client.parts.as_ref().ok_or_else(no_parts)
    }

    async fn begin(&self, what: &str, path: &Path) -> io::Result<MultipartId> {
        let service = self.multipart(what)?;
        self.retry.run(what, 0, || service.create_multipart(path)).await
    }

    async fn put_part(
        &self,
        what: &str,
        path: &Path,
        upload: &MultipartId,
        number: usize,
        content: PutPayload,
    ) -> io::Result<PartId> {
        let service = self.multipart(what)?;
        let bytes = content.content_length() as u64;
        self.pace.wait(bytes).await;
        self.retry.run(what, bytes, || service.put_part(path, upload, number, content.clone())).await
    }

    /// An attempt whose answer was lost may have worked; the next one then finds no upload. The object's name is
    /// nobody else's, so one of the right length is this one.
    async fn complete(
        &self,
        what: &str,
        path: &Path,
        upload: &MultipartId,
        parts: Vec<PartId>,
        bytes: u64,
    ) -> io::Result<()> {
        let service = self.multipart(what)?;
        let complete = || async {
            let Err(error) = service.complete_multipart(path, upload, parts.clone()).await else {
                return Ok(());
            };
            match self.client.store.head(path).await {
                Ok(found) if found.size == bytes => Ok(()),
                _ => Err(error),
            }
        };
        self.retry.run(what, 0, complete).await
    }

    async fn abort(&self, what: &str, path: &Path, upload: &MultipartId) -> io::Result<()> {
        let service = self.multipart(what)?;
        match self.retry.run(what, 0, || service.abort_multipart(path, upload)).await {
            // It is forgotten already.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }
}

impl ObjectWriter for Writer {
    fn block(&mut self) -> io::Result<Block> {
        loop {
            while let Some(done) = self.under_way.try_join_next() {
                self.note(done)?;
            }
            if let Ok(block) = self.free.try_recv() {
                return Ok(block);
            }
            if self.made < self.blocks {
                break;
            }
            if self.under_way.is_empty() {
                self.gather();
                // None comes back if the caller has thrown blocks away.
                return Ok(self.free.try_recv().unwrap_or_else(|_| Block::new(self.block_bytes)));
            }
            self.wait_for_one()?;
        }
        self.made += 1;
        Ok(Block::new(self.block_bytes))
    }

    fn append(&mut self, block: Block) -> io::Result<()> {
        let bytes = block.filled();
        let lent = Lent { block: Some(block), home: self.home.clone() };
        if bytes == 0 {
            return Ok(());
        }
        self.rest.push(Bytes::from_owner(lent));
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
