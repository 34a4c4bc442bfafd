//! What is in the queues of the job's unix sockets, and a fix for messages with descriptors (SCM_RIGHTS) among it.
//!
//! CRIU 4.2.1 restores both ends of a connection in one process, which sends the queued messages. It takes the
//! descriptors of a message for those of the process that has the sender's end, which may be another one. If they are
//! not open yet when both ends are, it leaves out all messages of the connection, in both directions, and reports no
//! error (`post_open_interconnected_master` in its sk-unix.c).
//!
//! The restoring process is that of the end that comes later in `files.img`. [`put_senders_last`] has it be the
//! sender's. That process opens its files in its first round and sends in its second, so that no message is lost if it
//! opens all files of the message itself: if, of all processes that have such a file, it has the lowest PID.
//! [`UnixQueues::lost`] names the messages for which this does not hold.
//!
//! Field numbers are those of CRIU's images/sk-packet.proto, sk-unix.proto, pipe.proto, fdinfo.proto, pstree.proto and
//! core.proto.

use super::fields::HEADER_BYTES;
use super::images::{COMMON_MAGIC, FILES_MAGIC, ImageError, entries, entries_with_data, next_entry};
use crate::files::staging::StagedDir;
use prost::Message;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::os::unix::fs::FileExt;

pub(super) const FILES: &str = "files.img";
pub(super) const QUEUES: &str = "sk-queues.img";
pub(super) const QUEUES_MAGIC: u32 = 0x5626_4026;
pub(super) const PROCESSES_MAGIC: u32 = 0x5027_3030;
const IDS_MAGIC: u32 = 0x5443_2030;
const DESCRIPTORS_MAGIC: u32 = 0x5621_3732;

/// Kinds of files (`fd_types`) that a process opens when it first comes to them, whatever the others do: regular files,
/// FIFOs, IP sockets, eventfd, epoll, signalfd, timerfd, memfd.
const INDEPENDENT: [i32; 8] = [1, 3, 4, 6, 7, 9, 17, 18];
const PIPE: i32 = 2;
const UNIX: i32 = 5;
/// Kind of a socket for datagrams.
const DATAGRAM: u32 = 2;

#[derive(Message)]
pub(super) struct FileEntry {
    #[prost(int32, required, tag = "1")]
    kind: i32,
    #[prost(uint32, required, tag = "2")]
    pub(super) id: u32,
    #[prost(message, optional, tag = "16")]
    pub(super) unix: Option<UnixEntry>,
    #[prost(message, optional, tag = "18")]
    pipe: Option<PipeEntry>,
}

#[derive(Message)]
pub(super) struct UnixEntry {
    #[prost(uint32, required, tag = "2")]
    pub(super) inode: u32,
    #[prost(uint32, required, tag = "3")]
    kind: u32,
    #[prost(uint32, required, tag = "8")]
    peer: u32,
}

#[derive(Message)]
pub(super) struct PipeEntry {
    #[prost(uint32, required, tag = "2")]
    pipe: u32,
}

#[derive(Message)]
pub(super) struct PacketEntry {
    #[prost(uint32, required, tag = "1")]
    pub(super) receiver: u32,
    #[prost(uint32, required, tag = "2")]
    pub(super) bytes: u32,
    #[prost(message, repeated, tag = "4")]
    pub(super) control: Vec<ControlEntry>,
}

#[derive(Message)]
pub(super) struct ControlEntry {
    #[prost(uint32, repeated, packed = "false", tag = "2")]
    files: Vec<u32>,
}

#[derive(Message)]
pub(super) struct ProcessEntry {
    #[prost(uint32, required, tag = "1")]
    pub(super) pid: u32,
}

#[derive(Message)]
struct IdsEntry {
    #[prost(uint32, required, tag = "2")]
    files: u32,
}

#[derive(Message)]
struct DescriptorEntry {
    #[prost(uint32, required, tag = "1")]
    file: u32,
    #[prost(uint32, required, tag = "4")]
    fd: u32,
}

/// A descriptor of a process of the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Holder {
    /// The process, in the job's namespace.
    pub pid: i32,
    /// The descriptor's number.
    pub fd: i32,
}

/// The content of a socket's queue, as CRIU has to restore it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queue {
    /// A descriptor of the socket.
    pub holder: Holder,
    /// What FIONREAD returns for it: the bytes of all messages, or of the first one of a socket for datagrams.
    pub bytes: u64,
}

/// The queues of the job's unix sockets.
#[derive(Debug, Default)]
pub struct UnixQueues {
    packets: Vec<PacketEntry>,
    files: HashMap<u32, FileEntry>,
    /// Identifiers of the sockets, by their inode.
    sockets: HashMap<u32, u32>,
    /// Who has a file open: of each table of descriptors, the process with the lowest PID and its lowest descriptor.
    holders: HashMap<u32, BTreeSet<Holder>>,
}

pub(super) type Read<'a> = &'a dyn Fn(&str) -> io::Result<Option<Vec<u8>>>;

/// Changes the order of entries of `files.img` in `dir` so that the sender of a message with descriptors comes after the
/// receiver.
///
/// # Errors
/// When `files.img` cannot be read, parsed or changed.
pub fn put_senders_last(dir: &StagedDir, queues: &UnixQueues) -> io::Result<()> {
    let pairs: Vec<_> = queues.with_rights().map(|(packet, sender)| (packet.receiver, sender)).collect();
    if pairs.is_empty() {
        return Ok(());
    }
    let image = dir.read(FILES)?.unwrap_or_default();
    let changed =
        reordered(&image, &pairs).ok_or_else(|| io::Error::other("cannot parse CRIU's files.img"))?;
    dir.change(FILES)?.write_all_at(&changed, 0)
}

/// The image with each second file of `pairs` after the first. `None` if it cannot be parsed.
fn reordered(image: &[u8], pairs: &[(u32, u32)]) -> Option<Vec<u8>> {
    let (header, mut rest) = image.split_at_checked(HEADER_BYTES)?;
    let mut entries = Vec::new();
    while !rest.is_empty() {
        let before = rest;
        let entry: FileEntry = next_entry(&mut rest)?.ok()?;
        entries.push((entry.id, &before[..before.len() - rest.len()]));
    }
    for (earlier, later) in pairs {
        let position = |wanted| entries.iter().position(|(id, _)| id == wanted);
        let (first, second) = (position(earlier)?, position(later)?);
        if second < first {
            entries[second..=first].rotate_left(1);
        }
    }
    Some([header].into_iter().chain(entries.into_iter().map(|(_, entry)| entry)).collect::<Vec<_>>().concat())
}

impl UnixQueues {
    /// Reads the images; `read` returns the content of one, or `None` if CRIU did not write it. Without a message in any
    /// queue it reads `sk-queues.img` only.
    ///
    /// # Errors
    /// When an image cannot be read.
    pub fn read(read: Read) -> Result<Self, ImageError> {
        let mut found = Self::default();
        let bytes = |packet: &PacketEntry| packet.bytes as usize;
        entries_with_data(read, QUEUES, [COMMON_MAGIC, QUEUES_MAGIC], bytes, |packet| {
            found.packets.push(packet);
        })?;
        if found.packets.is_empty() {
            return Ok(found);
        }
        entries(read, FILES, COMMON_MAGIC, FILES_MAGIC, |file: FileEntry| {
            if let Some(socket) = &file.unix {
                found.sockets.insert(socket.inode, file.id);
            }
            found.files.insert(file.id, file);
        })?;
        found.read_holders(read)?;
        Ok(found)
    }

    fn read_holders(&mut self, read: Read) -> Result<(), ImageError> {
        let mut pids = BTreeSet::new();
        entries(read, "pstree.img", COMMON_MAGIC, PROCESSES_MAGIC, |process: ProcessEntry| {
            pids.extend(i32::try_from(process.pid));
        })?;
        // Processes may share a table of descriptors. CRIU counts it as that of the lowest PID.
        let mut tables = BTreeMap::new();
        for pid in pids {
            entries(read, &format!("ids-{pid}.img"), COMMON_MAGIC, IDS_MAGIC, |ids: IdsEntry| {
                tables.entry(ids.files).or_insert(pid);
            })?;
        }
        for (table, pid) in tables {
            let name = format!("fdinfo-{table}.img");
            entries(read, &name, COMMON_MAGIC, DESCRIPTORS_MAGIC, |descriptor: DescriptorEntry| {
                if let Ok(fd) = i32::try_from(descriptor.fd) {
                    self.holders.entry(descriptor.file).or_default().insert(Holder { pid, fd });
                }
            })?;
        }
        Ok(())
    }

    /// The queues that are not empty, of sockets of which a process has a descriptor.
    #[must_use]
    pub fn lengths(&self) -> Vec<Queue> {
        let mut bytes = BTreeMap::new();
        for packet in &self.packets {
            let is_datagram = self.socket(packet.receiver).is_some_and(|socket| socket.kind == DATAGRAM);
            let more = if is_datagram { 0 } else { u64::from(packet.bytes) };
            let all = bytes.entry(packet.receiver).and_modify(|all| *all += more);
            all.or_insert(u64::from(packet.bytes));
        }
        let queue = |(receiver, bytes)| Some(Queue { holder: self.first_holder(receiver)?, bytes });
        bytes.into_iter().filter_map(queue).collect()
    }

    /// Sockets that have a message with descriptors in their queue that CRIU may lose at a resume: a descriptor of each
    /// socket, or of the other end if nobody has one.
    #[must_use]
    pub fn lost(&self) -> BTreeSet<Option<Holder>> {
        let opened_by = self.opened_by();
        let mut senders = HashMap::new();
        let mut lost = BTreeSet::new();
        for (packet, sender) in self.with_rights() {
            let from = self.first_holder(sender).map(|holder| holder.pid);
            let is_in_flight = [sender, packet.receiver].iter().any(|end| self.is_sent(*end));
            let is_right = from.is_some()
                && !is_in_flight
                && rights(packet).all(|file| self.is_opened_by(file, from, &opened_by));
            // The ends of a connection are restored by one process.
            let pair = (sender.min(packet.receiver), sender.max(packet.receiver));
            let is_only_sender = *senders.entry(pair).or_insert(from) == from;
            if !is_right || !is_only_sender {
                lost.insert(self.first_holder(packet.receiver).or_else(|| self.first_holder(sender)));
            }
        }
        lost
    }

    /// Messages with descriptors between two sockets of which each is the other's peer, with the sender. For others CRIU
    /// waits until the descriptors are open.
    fn with_rights(&self) -> impl Iterator<Item = (&PacketEntry, u32)> {
        self.packets.iter().filter(|packet| rights(packet).next().is_some()).filter_map(|packet| {
            let socket = self.socket(packet.receiver)?;
            Some((packet, self.connected(socket)?))
        })
    }

    /// The other end of a connection, if each end is the peer of the other.
    fn connected(&self, socket: &UnixEntry) -> Option<u32> {
        let other = *self.sockets.get(&socket.peer)?;
        (socket.peer != socket.inode && self.socket(other)?.peer == socket.inode).then_some(other)
    }

    fn socket(&self, file: u32) -> Option<&UnixEntry> {
        self.files.get(&file)?.unix.as_ref()
    }

    fn first_holder(&self, file: u32) -> Option<Holder> {
        self.holders.get(&file)?.first().copied()
    }

    /// Whether a message in a queue has the file.
    fn is_sent(&self, file: u32) -> bool {
        self.packets.iter().any(|packet| rights(packet).any(|sent| sent == file))
    }

    /// Which process opens each file: of those that have it, or send it in a message, the one with the lowest PID.
    fn opened_by(&self) -> HashMap<u32, i32> {
        let mut first: HashMap<u32, i32> = HashMap::new();
        let mut note = |file: u32, pid: i32| {
            let known = first.entry(file).or_insert(pid);
            *known = pid.min(*known);
        };
        for (&file, holders) in &self.holders {
            holders.first().into_iter().for_each(|holder| note(file, holder.pid));
        }
        for packet in self.packets.iter().filter(|packet| rights(packet).next().is_some()) {
            for pid in self.senders(packet.receiver) {
                rights(packet).for_each(|file| note(file, pid));
            }
        }
        first
    }

    /// The processes that may have to send what is in the socket's queue. Of several senders, CRIU chooses one; without
    /// any, the receiver's process sends.
    fn senders(&self, receiver: u32) -> Vec<i32> {
        let Some(socket) = self.socket(receiver) else { return Vec::new() };
        let ends: Vec<u32> = match self.connected(socket) {
            Some(sender) => vec![sender],
            None => {
                let sends =
                    |file: &&FileEntry| file.unix.as_ref().is_some_and(|one| one.peer == socket.inode);
                self.files.values().filter(sends).map(|file| file.id).chain([receiver]).collect()
            }
        };
        ends.into_iter().filter_map(|end| Some(self.first_holder(end)?.pid)).collect()
    }

    /// Whether `pid` opens the file in its first round.
    fn is_opened_by(&self, file: u32, pid: Option<i32>, opened_by: &HashMap<u32, i32>) -> bool {
        let is_first = |file: u32| opened_by.get(&file).copied() == pid;
        let Some(entry) = self.files.get(&file).filter(|_| is_first(file)) else { return false };
        match (entry.kind, &entry.pipe, &entry.unix) {
            // The first process that has one of the ends creates the pipe.
            (PIPE, Some(PipeEntry { pipe }), _) => {
                let ends =
                    self.files.values().filter(|other| other.pipe.as_ref().is_some_and(|p| p.pipe == *pipe));
                ends.filter_map(|end| opened_by.get(&end.id).copied()).min() == pid
            }
            (UNIX, _, Some(socket)) => match socket.peer {
                0 => true,
                _ => self.connected(socket).is_some_and(is_first),
            },
            (kind, ..) => INDEPENDENT.contains(&kind),
        }
    }
}

fn rights(packet: &PacketEntry) -> impl Iterator<Item = u32> {
    packet.control.iter().flat_map(|control| &control.files).copied()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Process 10 has one end of a connection, process 20 the other one.
    const PARENT: u32 = 10;
    const CHILD: u32 = 20;
    pub(in crate::criu) const PARENTS_END: u32 = 1;
    pub(in crate::criu) const CHILDS_END: u32 = 2;
    /// A file that only a message has.
    const SENT: u32 = 3;
    const PARENTS_FILE: u32 = 4;
    const CHILDS_FILE: u32 = 5;
    const PIPE_READ: u32 = 6;
    const PIPE_WRITE: u32 = 7;
    const TERMINAL: u32 = 8;
    const STREAM: u32 = 1;

    fn file(kind: i32, id: u32) -> FileEntry {
        FileEntry { kind, id, unix: None, pipe: None }
    }

    fn socket(id: u32, kind: u32, inode: u32, peer: u32) -> FileEntry {
        FileEntry { unix: Some(UnixEntry { inode, kind, peer }), ..file(UNIX, id) }
    }

    pub(in crate::criu) fn message(receiver: u32, files: &[u32]) -> PacketEntry {
        let control = (!files.is_empty()).then(|| ControlEntry { files: files.to_vec() });
        PacketEntry { receiver, bytes: 5, control: control.into_iter().collect() }
    }

    fn image<T: Message>(magic: u32, entries: &[T], data: &[u8]) -> Vec<u8> {
        let mut image = [COMMON_MAGIC, magic].map(u32::to_le_bytes).concat();
        for entry in entries {
            let entry = entry.encode_to_vec();
            image.extend(u32::try_from(entry.len()).unwrap().to_le_bytes());
            image.extend(entry);
            image.extend(data);
        }
        image
    }

    fn files(kind: u32) -> Vec<FileEntry> {
        let pipe = |id| FileEntry { pipe: Some(PipeEntry { pipe: 77 }), ..file(PIPE, id) };
        vec![
            socket(CHILDS_END, kind, 102, 101),
            file(1, SENT),
            socket(PARENTS_END, kind, 101, 102),
            file(1, PARENTS_FILE),
            file(18, CHILDS_FILE),
            pipe(PIPE_READ),
            pipe(PIPE_WRITE),
            file(11, TERMINAL),
        ]
    }

    pub(in crate::criu) fn images(kind: u32, packets: &[PacketEntry], name: &str) -> Option<Vec<u8>> {
        let descriptors = |files: &[u32]| {
            let entry = |(fd, &file)| DescriptorEntry { file, fd };
            image(DESCRIPTORS_MAGIC, &(3..).zip(files).map(entry).collect::<Vec<_>>(), &[])
        };
        Some(match name {
            "sk-queues.img" => image(QUEUES_MAGIC, packets, b"hello"),
            "files.img" => image(FILES_MAGIC, &files(kind), &[]),
            "pstree.img" => image(PROCESSES_MAGIC, &[CHILD, PARENT].map(|pid| ProcessEntry { pid }), &[]),
            "ids-10.img" => image(IDS_MAGIC, &[IdsEntry { files: 1 }], &[]),
            "ids-20.img" => image(IDS_MAGIC, &[IdsEntry { files: 2 }], &[]),
            "fdinfo-1.img" => descriptors(&[PARENTS_END, PARENTS_FILE, PIPE_WRITE]),
            "fdinfo-2.img" => descriptors(&[CHILDS_END, PARENTS_FILE, CHILDS_FILE]),
            _ => return None,
        })
    }

    fn queues(packets: &[PacketEntry]) -> UnixQueues {
        UnixQueues::read(&|name| Ok(images(STREAM, packets, name))).unwrap()
    }

    fn is_lost(packets: &[PacketEntry]) -> bool {
        !queues(packets).lost().is_empty()
    }

    #[test]
    fn the_sender_opens_what_it_sends() {
        assert!(!is_lost(&[message(CHILDS_END, &[SENT, PARENTS_FILE]), message(CHILDS_END, &[])]));
        assert!(!is_lost(&[message(PARENTS_END, &[SENT, CHILDS_FILE])]));
        assert!(!is_lost(&[message(CHILDS_END, &[PIPE_READ])]));
        assert!(!is_lost(&[message(CHILDS_END, &[]), message(PARENTS_END, &[])]));
    }

    #[test]
    fn messages_whose_files_another_process_opens_are_lost() {
        let lost = queues(&[message(PARENTS_END, &[PARENTS_FILE])]).lost();
        assert_eq!(lost, BTreeSet::from([Some(Holder { pid: 10, fd: 3 })]));
        // Its other end is the parent's.
        assert!(is_lost(&[message(PARENTS_END, &[PIPE_READ])]));
        // Its other half comes first.
        assert!(is_lost(&[message(CHILDS_END, &[TERMINAL])]));
        // The parent sends it too, and opens it.
        assert!(is_lost(&[message(PARENTS_END, &[CHILDS_FILE]), message(CHILDS_END, &[CHILDS_FILE])]));
        // Only one process can send.
        assert!(is_lost(&[message(PARENTS_END, &[CHILDS_FILE]), message(CHILDS_END, &[PARENTS_FILE])]));
        assert!(is_lost(&[message(PARENTS_END, &[CHILDS_END])]));
    }

    #[test]
    fn the_sender_comes_after_the_receiver_and_nothing_else_changes() {
        let before = image(FILES_MAGIC, &files(STREAM), &[]);
        let ids = |image: &[u8]| {
            let mut ids = Vec::new();
            entries(&|_| Ok(Some(image.to_vec())), FILES, COMMON_MAGIC, FILES_MAGIC, |file: FileEntry| {
                ids.push(file.id);
            })
            .unwrap();
            ids
        };
        assert_eq!(ids(&before), [2, 3, 1, 4, 5, 6, 7, 8]);
        assert_eq!(reordered(&before, &[(CHILDS_END, PARENTS_END)]).unwrap(), before);
        let after = reordered(&before, &[(PARENTS_END, CHILDS_END)]).unwrap();
        assert_eq!((ids(&after), after.len()), (vec![3, 1, 2, 4, 5, 6, 7, 8], before.len()));
    }

    #[test]
    fn a_socket_for_datagrams_tells_the_length_of_the_first_one() {
        let packets = [message(PARENTS_END, &[]), message(PARENTS_END, &[])];
        for (kind, bytes) in [(STREAM, 10), (DATAGRAM, 5)] {
            let queues = UnixQueues::read(&|name| Ok(images(kind, &packets, name))).unwrap();
            assert_eq!(queues.lengths(), [Queue { holder: Holder { pid: 10, fd: 3 }, bytes }]);
        }
        let mut queues = UnixQueues::read(&|name| Ok(images(DATAGRAM, &packets, name))).unwrap();
        queues.packets[0].bytes = 0;
        assert_eq!(queues.lengths()[0].bytes, 0);
    }

    #[test]
    fn any_image_is_read_or_refused() {
        let packets = [message(PARENTS_END, &[PIPE_READ, CHILDS_FILE])];
        let names = ["sk-queues.img", "files.img", "pstree.img", "ids-10.img", "fdinfo-2.img"];
        let whole = names.map(|name| images(STREAM, &packets, name).unwrap());
        ckpt_test_mutate::mutations(&whole, |bytes| {
            for name in names {
                let read = |wanted: &str| match wanted == name {
                    true => Ok(Some(bytes.to_vec())),
                    false => Ok(images(STREAM, &packets, wanted)),
                };
                if let Ok(queues) = UnixQueues::read(&read) {
                    let _ = (queues.lost(), queues.lengths());
                }
            }
            let _ = reordered(bytes, &[(PARENTS_END, CHILDS_END)]);
        });
    }
}
