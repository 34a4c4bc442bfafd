//! A disk that records what is written to it, for tests of power losses.
//!
//! `recorded-disk IMAGE LOG` mounts a FUSE file system over the file IMAGE: the same file, for a loop device. Each write
//! and each flush is appended to LOG, in the form that `ckpt_run_tests::power_loss` reads. It prints `ready` when IMAGE
//! is mounted, and ends when IMAGE is unmounted.
//!
//! It is a process of its own. In the process of a test, a thread that waits for the disk would keep the server from
//! ending when the test is killed.

use ckpt_run_tests::power_loss::Record;
use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, INodeNo, LockOwner, OpenFlags,
    ReplyAttr, ReplyData, ReplyEmpty, ReplyOpen, ReplyWrite, Request, Session, WriteFlags,
};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, UNIX_EPOCH};

/// How long the kernel may remember the attributes of the image: they never change.
const VALID_FOR: Duration = Duration::from_secs(1 << 30);

struct RecordedDisk {
    image: File,
    bytes: u64,
    log: File,
}

impl RecordedDisk {
    /// One call of the system for each record: whoever reads the log never sees a part of one of an answered request.
    fn note(&self, record: Record<'_>) -> io::Result<()> {
        (&self.log).write_all(&record.to_bytes())
    }

    fn write_and_note(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        if offset.checked_add(data.len() as u64).is_none_or(|end| end > self.bytes) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.image.write_all_at(data, offset)?;
        self.note(Record::Write { offset, data })
    }

    fn read(&self, offset: u64, length: u32) -> io::Result<Vec<u8>> {
        let length = u64::from(length).min(self.bytes.saturating_sub(offset));
        let mut data = vec![0; usize::try_from(length).map_err(io::Error::other)?];
        self.image.read_exact_at(&mut data, offset)?;
        Ok(data)
    }
}

fn errno(error: &io::Error) -> Errno {
    eprintln!("recorded-disk: {error}");
    error.raw_os_error().map_or(Errno::EIO, Errno::from_i32)
}

/// The root is the image: there are no other files. What is not here is answered with ENOSYS, fallocate too: so the
/// loop device supports no discard, and zeroes are written.
impl Filesystem for RecordedDisk {
    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let attributes = FileAttr {
            ino,
            size: self.bytes,
            blocks: self.bytes / 512,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: FileType::RegularFile,
            perm: 0o600,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        };
        reply.attr(&VALID_FOR, &attributes);
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        // Without the page cache, each request of the loop device arrives here before it is answered.
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match RecordedDisk::read(self, offset, size) {
            Ok(data) => reply.data(&data),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        match self.write_and_note(offset, data) {
            Ok(()) => reply.written(u32::try_from(data.len()).expect("the protocol's length")),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        match self.note(Record::Flush) {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(errno(&error)),
        }
    }
}

fn run(image: &Path, log: &Path) -> io::Result<()> {
    let file = File::options().read(true).write(true).open(image)?;
    let bytes = file.metadata()?.len();
    let log = File::options().append(true).create(true).open(log)?;
    let session = Session::new(RecordedDisk { image: file, bytes, log }, image, &Config::default())?;
    println!("ready");
    session.run()
}

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let [image, log] = arguments.as_slice() else {
        eprintln!("usage: recorded-disk IMAGE LOG");
        return ExitCode::from(2);
    };
    match run(image.as_ref(), log.as_ref()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("recorded-disk: {}: {error}", image.display());
            ExitCode::FAILURE
        }
    }
}
