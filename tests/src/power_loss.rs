//! Power losses of a recorded disk: what the disk may hold after one.
//!
//! `src/bin/recorded-disk.rs` records the writes and flushes of a disk. A disk may keep writes in a volatile cache, and
//! write them down in any order, until it is flushed. So a power loss after a flush leaves all writes before that flush,
//! and any part of those between it and the next one.

use fastrand::Rng;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// The offset in a record of a flush.
const FLUSH: u64 = u64::MAX;
/// Offset and length, little-endian.
const HEADER_BYTES: usize = 16;

/// One record of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record<'a> {
    /// Data written at an offset of the disk.
    Write {
        /// Where, in bytes.
        offset: u64,
        /// The data.
        data: &'a [u8],
    },
    /// All writes before are durable.
    Flush,
}

impl Record<'_> {
    /// The record's bytes in the log.
    #[must_use]
    pub fn to_bytes(self) -> Vec<u8> {
        let (offset, data) = match self {
            Self::Write { offset, data } => (offset, data),
            Self::Flush => (FLUSH, &[][..]),
        };
        let mut bytes = Vec::with_capacity(HEADER_BYTES + data.len());
        bytes.extend(offset.to_le_bytes());
        bytes.extend((data.len() as u64).to_le_bytes());
        bytes.extend(data);
        bytes
    }
}

/// A disk that is being recorded. Killed when dropped.
pub struct RecordedDisk {
    server: Child,
    log: PathBuf,
}

impl RecordedDisk {
    /// Records what is written to the file `image` from now on in the file `log`. `program` is `recorded-disk`.
    ///
    /// # Errors
    /// When there is no FUSE.
    pub fn start(program: &Path, image: &Path, log: &Path) -> Result<Self, String> {
        let mut command = Command::new(program);
        let server = command.arg(image).arg(log).stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let mut server = server.map_err(|error| format!("{}: {error}", program.display()))?;
        let stdout = server.stdout.take().ok_or("no pipe")?;
        let disk = Self { server, log: log.to_owned() };
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line).map_err(|error| error.to_string())?;
        if line == "ready\n" { Ok(disk) } else { Err("no FUSE file system can be mounted".to_owned()) }
    }

    /// How many bytes the log has: all that has been written and flushed so far is before that.
    ///
    /// # Panics
    /// When there is no log.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.log.metadata().expect("the log").len()
    }
}

impl Drop for RecordedDisk {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

/// A write in the log.
#[derive(Clone, Copy, Debug)]
struct Write {
    /// Where on the disk.
    offset: u64,
    /// Where in the log.
    data_at: u64,
    bytes: u64,
}

#[derive(Clone, Copy, Debug)]
struct Flush {
    /// The number of writes before it.
    writes: usize,
    /// The position in the log after it.
    end: u64,
}

/// A whole log.
pub struct Recording {
    log: File,
    writes: Vec<Write>,
    flushes: Vec<Flush>,
}

impl Recording {
    /// Reads a log.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn read(path: &Path) -> io::Result<Self> {
        let log = File::open(path)?;
        let end = log.metadata()?.len();
        let (mut writes, mut flushes, mut at) = (Vec::new(), Vec::new(), 0);
        while at < end {
            let mut header = [[0; 8]; 2];
            log.read_exact_at(header.as_flattened_mut(), at)?;
            let [offset, bytes] = header.map(u64::from_le_bytes);
            let data_at = at + HEADER_BYTES as u64;
            at = data_at + bytes;
            if offset == FLUSH {
                flushes.push(Flush { writes: writes.len(), end: at });
            } else {
                writes.push(Write { offset, data_at, bytes });
            }
        }
        Ok(Self { log, writes, flushes })
    }

    /// The number of flushes.
    #[must_use]
    pub fn flushes(&self) -> usize {
        self.flushes.len()
    }

    /// The number of flushes before a position in the log.
    #[must_use]
    pub fn flushes_before(&self, position: u64) -> usize {
        self.flushes.partition_point(|flush| flush.end <= position)
    }

    /// The number of writes before the flush with this number, from 1; 0 is the beginning.
    fn writes_until(&self, flush: usize) -> usize {
        flush.checked_sub(1).map_or(0, |before| self.flushes[before].writes)
    }

    /// The writes after so many flushes and before the next one.
    fn unflushed(&self, flushes: usize) -> &[Write] {
        let end = self.flushes.get(flushes).map_or(self.writes.len(), |next| next.writes);
        &self.writes[self.writes_until(flushes)..end]
    }

    fn data(&self, write: &Write) -> io::Result<Vec<u8>> {
        let mut data = vec![0; usize::try_from(write.bytes).map_err(io::Error::other)?];
        self.log.read_exact_at(&mut data, write.data_at)?;
        Ok(data)
    }
}

/// What a power loss leaves of the writes that were not flushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// Nothing.
    Nothing,
    /// All of them.
    All,
    /// Some of them, any.
    Some,
    /// Of each write some sectors, any.
    Torn,
}

impl Left {
    /// All of them.
    pub const KINDS: [Self; 4] = [Self::Nothing, Self::All, Self::Some, Self::Torn];

    fn has(self, rng: &mut Rng) -> bool {
        match self {
            Self::Nothing => false,
            Self::All => true,
            Self::Some | Self::Torn => rng.bool(),
        }
    }
}

/// Makes images of the disk after power losses.
pub struct PowerLoss {
    recording: Recording,
    /// The disk with everything before a flush.
    flushed: PathBuf,
    /// The number of that flush.
    at: usize,
    /// What the disk writes as a whole, in bytes.
    sector_bytes: usize,
    /// So many bytes at the beginning are written as a whole too.
    whole_bytes: u64,
}

impl PowerLoss {
    /// `start` is an image of the disk from before the recording. It is changed.
    #[must_use]
    pub fn new(recording: Recording, start: &Path, sector_bytes: usize) -> Self {
        Self { recording, flushed: start.to_owned(), at: 0, sector_bytes, whole_bytes: 0 }
    }

    /// No write to so many bytes at the beginning of the disk is torn: a file system relies on that for its super block.
    #[must_use]
    pub fn with_whole(self, whole_bytes: u64) -> Self {
        Self { whole_bytes, ..self }
    }

    /// The recording.
    #[must_use]
    pub fn recording(&self) -> &Recording {
        &self.recording
    }

    /// Makes the file `image`: the disk after a power loss that follows so many flushes. The number must not become smaller
    /// from one call to the next.
    ///
    /// # Errors
    /// When the image cannot be written.
    ///
    /// # Panics
    /// When the number becomes smaller.
    pub fn image(&mut self, flushes: usize, left: Left, rng: &mut Rng, image: &Path) -> io::Result<()> {
        assert!(flushes >= self.at, "{flushes} after {}", self.at);
        let flushed = File::options().write(true).open(&self.flushed)?;
        let (from, to) = (self.recording.writes_until(self.at), self.recording.writes_until(flushes));
        for write in &self.recording.writes[from..to] {
            flushed.write_all_at(&self.recording.data(write)?, write.offset)?;
        }
        self.at = flushes;
        copy_sparse(&self.flushed, image)?;
        let image = File::options().write(true).open(image)?;
        for write in self.recording.unflushed(flushes) {
            let data = self.recording.data(write)?;
            let may_be_torn = left == Left::Torn && write.offset >= self.whole_bytes;
            let unit = if may_be_torn { self.sector_bytes } else { data.len().max(1) };
            for (number, part) in data.chunks(unit).enumerate() {
                if left.has(rng) {
                    image.write_all_at(part, write.offset + (number * unit) as u64)?;
                }
            }
        }
        Ok(())
    }
}

/// Copies a file with its holes.
fn copy_sparse(from: &Path, to: &Path) -> io::Result<()> {
    let status = Command::new("cp").arg("--sparse=auto").arg(from).arg(to).status()?;
    if status.success() { Ok(()) } else { Err(io::Error::other(format!("cp: {status}"))) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::io::Write as _;

    const DISK: &[u8] = b"--------";

    /// The disk after a power loss, as text.
    fn left_at(records: &[Record<'_>], flushes: usize, left: Left, seed: u64) -> String {
        let dir = tempfile::tempdir().unwrap();
        let [log, start, image] = ["log", "start", "image"].map(|name| dir.path().join(name));
        let mut file = File::create(&log).unwrap();
        for record in records {
            file.write_all(&record.to_bytes()).unwrap();
        }
        fs::write(&start, DISK).unwrap();
        let mut loss = PowerLoss::new(Recording::read(&log).unwrap(), &start, 2);
        loss.image(flushes, left, &mut Rng::with_seed(seed), &image).unwrap();
        fs::read_to_string(image).unwrap()
    }

    #[test]
    fn flushed_writes_stay_and_others_may() {
        let write = |offset, data| Record::Write { offset, data };
        let records = [write(0, b"ab"), write(1, b"c"), Record::Flush, write(4, b"defg"), write(2, b"h")];
        assert_eq!(left_at(&records, 0, Left::Nothing, 0), "--------");
        assert_eq!(left_at(&records, 0, Left::All, 0), "ac------");
        assert_eq!(left_at(&records, 1, Left::Nothing, 0), "ac------");
        assert_eq!(left_at(&records, 1, Left::All, 0), "ach-defg");
        let of = |left| {
            (0..100).map(|seed| left_at(&records, 1, left, seed)).collect::<std::collections::BTreeSet<_>>()
        };
        assert_eq!(
            of(Left::Some).into_iter().collect::<Vec<_>>(),
            ["ac------", "ac--defg", "ach-----", "ach-defg"]
        );
        assert_eq!(of(Left::Torn).len(), 8);
    }

    #[test]
    fn a_position_is_after_the_flushes_before_it() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let records = [Record::Flush, Record::Write { offset: 7, data: b"x" }, Record::Flush];
        fs::write(&log, records.map(Record::to_bytes).concat()).unwrap();
        let recording = Recording::read(&log).unwrap();
        assert_eq!(recording.flushes(), 2);
        assert_eq!([0, 15, 16, 33, 48, 49].map(|at| recording.flushes_before(at)), [0, 0, 1, 1, 1, 2]);
    }
}
