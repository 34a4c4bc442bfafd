//! Reading CRIU's images: the files that the job had open when it was frozen.
//!
//! An image consists of two magic numbers and entries: a length (32-bit, little-endian) and a protobuf message. Field
//! numbers are those of CRIU's images/fdinfo.proto, regfile.proto, pipe.proto, remap-file-path.proto, stats.proto.

use crate::files::links::Ghost;
use crate::sys::path_text::{bytes_text, path_text};
use prost::Message;
use rustix::fs::FileType;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::ffi::OsStr;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// First word of every image.
pub(super) const COMMON_MAGIC: u32 = 0x5456_4319;
/// First word of the images that are not part of a dump (statistics).
const SERVICE_MAGIC: u32 = 0x5510_5940;
pub(super) const FILES_MAGIC: u32 = 0x5630_3138;
const REMAP_MAGIC: u32 = 0x5913_3954;
const STATS_MAGIC: u32 = 0x5709_3306;
/// Of a remap: the file has no name, and its content is in an image.
const GHOST: i32 = 1;
/// O_APPEND.
const APPEND: u32 = 0o2000;
const TRUNCATED: &str = "it is truncated";

/// An image cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The file cannot be opened or read.
    #[error("cannot read CRIU's {name}: {source}")]
    Io {
        /// The image.
        name: String,
        /// Why.
        source: io::Error,
    },
    /// The content is not valid.
    #[error("cannot parse CRIU's {name}: {reason}")]
    Format {
        /// The image.
        name: String,
        /// What is wrong.
        reason: String,
    },
}

#[derive(Message)]
struct FileEntry {
    #[prost(uint32, required, tag = "2")]
    id: u32,
    #[prost(message, optional, tag = "3")]
    regular: Option<RegularEntry>,
    #[prost(message, optional, tag = "4")]
    inet: Option<InetEntry>,
    #[prost(message, optional, tag = "16")]
    unix: Option<UnixEntry>,
}

#[derive(Message)]
struct RegularEntry {
    #[prost(uint32, required, tag = "2")]
    flags: u32,
    #[prost(bytes = "vec", required, tag = "6")]
    name: Vec<u8>,
    #[prost(uint32, optional, tag = "10")]
    mode: Option<u32>,
    /// Of programs and libraries, if CRIU could read it.
    #[prost(uint32, repeated, packed = "false", tag = "11")]
    build_id: Vec<u32>,
}

impl RegularEntry {
    fn is_writable(&self) -> bool {
        self.flags & 3 != 0
    }

    fn is_file(&self) -> bool {
        self.mode.is_none_or(|mode| mode & 0o170_000 == 0o100_000)
    }

    /// The text of its absolute path.
    fn path(&self) -> String {
        format!("/{}", bytes_text(&self.name).trim_start_matches('/'))
    }
}

/// The kind of a TCP socket; the states of one that is connected, and of one that neither is nor listens.
const STREAM: u32 = 1;
const ESTABLISHED: u32 = 1;
const CLOSED: u32 = 7;

#[derive(Message)]
struct InetEntry {
    #[prost(uint32, required, tag = "3")]
    family: u32,
    #[prost(uint32, required, tag = "4")]
    kind: u32,
    #[prost(uint32, required, tag = "6")]
    state: u32,
    #[prost(uint32, required, tag = "7")]
    source_port: u32,
    #[prost(uint32, required, tag = "8")]
    peer_port: u32,
    /// In network byte order; one word for IPv4, four for IPv6.
    #[prost(uint32, repeated, packed = "false", tag = "11")]
    source_address: Vec<u32>,
    /// As the other one.
    #[prost(uint32, repeated, packed = "false", tag = "12")]
    peer_address: Vec<u32>,
}

/// An address in CRIU's words.
fn address(words: &[u32]) -> Option<IpAddr> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    match (<[u8; 4]>::try_from(&bytes[..]), <[u8; 16]>::try_from(&bytes[..])) {
        (Ok(four), _) => Some(four.into()),
        (_, Ok(sixteen)) => Some(sixteen.into()),
        _ => None,
    }
}

fn end(words: &[u32], port: u32) -> Option<SocketAddr> {
    Some(SocketAddr::new(address(words)?.to_canonical(), port.try_into().ok()?))
}

impl InetEntry {
    fn own(&self) -> Option<SocketAddr> {
        end(&self.source_address, self.source_port)
    }

    fn peer(&self) -> Option<SocketAddr> {
        end(&self.peer_address, self.peer_port)
    }

    /// Those of both ends.
    fn ports(&self) -> impl Iterator<Item = u16> + use<> {
        [self.source_port, self.peer_port].into_iter().filter_map(|port| port.try_into().ok())
    }

    fn is_connected(&self) -> bool {
        self.kind == STREAM && self.state == ESTABLISHED && self.family != 0 || self.is_half_closed()
    }

    /// Whether it is a TCP socket in one of the states from FIN_WAIT1 to CLOSING, except TIME_WAIT and CLOSED (the kernel's
    /// include/net/tcp_states.h).
    fn is_half_closed(&self) -> bool {
        self.kind == STREAM && [4, 5, 8, 9, 11].contains(&self.state) && self.family != 0
    }

    /// Whether it is a TCP socket whose packets leave the machine, or may come from outside.
    fn is_beyond_loopback(&self) -> bool {
        let is_open = self.kind == STREAM && self.state != CLOSED && self.family != 0;
        is_open && address(&self.source_address).is_none_or(|own| !own.to_canonical().is_loopback())
    }
}

#[derive(Message)]
struct UnixEntry {
    #[prost(bytes = "vec", required, tag = "11")]
    name: Vec<u8>,
    #[prost(bytes = "vec", optional, tag = "14")]
    name_dir: Option<Vec<u8>>,
}

impl UnixEntry {
    /// The directory of the socket's path; abstract and unnamed sockets have none.
    fn directory(&self) -> Option<String> {
        let name = self.name.split(|byte| *byte == 0).next().filter(|name| !name.is_empty())?;
        let dir = Path::new(OsStr::from_bytes(self.name_dir.as_deref().unwrap_or(b"/")));
        dir.join(OsStr::from_bytes(name)).parent().map(path_text)
    }
}

#[derive(Message)]
struct RemapEntry {
    #[prost(uint32, required, tag = "1")]
    orig_id: u32,
    #[prost(uint32, required, tag = "2")]
    remap_id: u32,
    /// 0: the file has another name, and CRIU has created an additional one. 1: see [`GHOST`].
    #[prost(int32, optional, tag = "3")]
    kind: Option<i32>,
}

#[derive(Message)]
struct StatsEntry {
    #[prost(message, optional, tag = "1")]
    dump: Option<DumpStats>,
}

#[derive(Message)]
struct DumpStats {
    #[prost(uint32, required, tag = "2")]
    frozen_us: u32,
}

/// The open files and sockets of the job, as far as the launcher needs them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Descriptors {
    /// Absolute paths of regular files that are open for writing and still have their name, each once. Lengths are not
    /// included: CRIU does not record them for files that are open for appending.
    pub writable: Vec<String>,
    /// Those of them that are open for appending only.
    pub append_only: BTreeSet<String>,
    /// Absolute paths of the links that CRIU created for open files whose name was removed.
    pub links: Vec<String>,
    /// Absolute paths of the directories of unix sockets.
    pub socket_directories: BTreeSet<String>,
    /// Remote ends of TCP connections of which no process of the job has the other end.
    pub outside_tcp: Vec<SocketAddr>,
    /// All TCP connections, with their own address and the remote one.
    pub tcp_connections: Vec<(SocketAddr, SocketAddr)>,
    /// Local ports of TCP sockets that reach beyond the loopback interface.
    pub tcp_ports: BTreeSet<u16>,
    /// Ports, of both ends, of TCP connections that one end has closed for sending, or both.
    pub half_closed_ports: BTreeSet<u16>,
    /// Ports, of both ends, of all TCP connections.
    pub connected_ports: BTreeSet<u16>,
}

impl Descriptors {
    /// Reads the images `files.img` and `remap-fpath.img`; `read` returns the content of an image, or `None` if CRIU did
    /// not write it.
    ///
    /// # Errors
    /// When an image cannot be read.
    pub fn read(read: &dyn Fn(&str) -> io::Result<Option<Vec<u8>>>) -> Result<Self, ImageError> {
        let (mut unnamed, mut linked) = (HashSet::new(), HashSet::new());
        entries(read, "remap-fpath.img", COMMON_MAGIC, REMAP_MAGIC, |entry: RemapEntry| {
            unnamed.insert(entry.orig_id);
            if entry.kind.unwrap_or(0) == 0 {
                linked.insert(entry.remap_id);
            }
        })?;
        let mut found = Self::default();
        let mut not_append_only = BTreeSet::new();
        let mut seen = HashSet::new();
        let mut tcp = Vec::new();
        entries(read, "files.img", COMMON_MAGIC, FILES_MAGIC, |entry: FileEntry| {
            if let Some(inet) = entry.inet {
                tcp.push(inet);
            }
            found.socket_directories.extend(entry.unix.and_then(|socket| socket.directory()));
            let Some(regular) = entry.regular.filter(|_| !unnamed.contains(&entry.id)) else { return };
            let name = regular.path();
            if linked.contains(&entry.id) {
                return found.links.push(name);
            }
            if !regular.is_writable() || !regular.is_file() {
                return;
            }
            if regular.flags & APPEND == 0 {
                not_append_only.insert(name.clone());
            }
            if seen.insert(name.clone()) {
                found.writable.push(name);
            }
        })?;
        let appended = found.writable.iter().filter(|name| !not_append_only.contains(*name));
        found.append_only = appended.cloned().collect();
        found.outside_tcp = outside(&tcp);
        let ends = |one: &InetEntry| Some((one.own()?, one.peer()?));
        found.tcp_connections = tcp.iter().filter(|one| one.is_connected()).filter_map(ends).collect();
        let beyond = tcp.iter().filter(|one| one.is_beyond_loopback());
        found.tcp_ports = beyond.filter_map(|one| u16::try_from(one.source_port).ok()).collect();
        let half_closed = tcp.iter().filter(|one| one.is_half_closed());
        found.half_closed_ports = half_closed.flat_map(InetEntry::ports).collect();
        found.connected_ports =
            tcp.iter().filter(|one| one.is_connected()).flat_map(InetEntry::ports).collect();
        Ok(found)
    }

    /// Absolute paths of regular files that are open or mapped for reading only, without programs and libraries that have a build
    /// ID, and without files that have lost their name.
    ///
    /// # Errors
    /// When an image cannot be read.
    pub fn only_read(
        read: &dyn Fn(&str) -> io::Result<Option<Vec<u8>>>,
    ) -> Result<BTreeSet<String>, ImageError> {
        let mut unnamed = HashSet::new();
        entries(read, "remap-fpath.img", COMMON_MAGIC, REMAP_MAGIC, |entry: RemapEntry| {
            unnamed.extend([entry.orig_id, entry.remap_id]);
        })?;
        let (mut found, mut written) = (BTreeSet::new(), BTreeSet::new());
        entries(read, "files.img", COMMON_MAGIC, FILES_MAGIC, |entry: FileEntry| {
            let regular = entry.regular.filter(|_| !unnamed.contains(&entry.id));
            let Some(regular) = regular.filter(|regular| regular.is_file() && regular.build_id.is_empty())
            else {
                return;
            };
            let all = if regular.is_writable() { &mut written } else { &mut found };
            all.insert(regular.path());
        })?;
        found.retain(|path| !written.contains(path));
        Ok(found)
    }

    /// The open files and directories without a name that CRIU makes again in a restore.
    ///
    /// # Errors
    /// When an image cannot be read.
    pub fn ghosts(read: &dyn Fn(&str) -> io::Result<Option<Vec<u8>>>) -> Result<Vec<Ghost>, ImageError> {
        let mut ghosts = HashMap::new();
        entries(read, "remap-fpath.img", COMMON_MAGIC, REMAP_MAGIC, |entry: RemapEntry| {
            if entry.kind == Some(GHOST) {
                ghosts.insert(entry.orig_id, entry.remap_id);
            }
        })?;
        let mut found = BTreeSet::new();
        if !ghosts.is_empty() {
            entries(read, "files.img", COMMON_MAGIC, FILES_MAGIC, |entry: FileEntry| {
                if let (Some(regular), Some(id)) = (entry.regular, ghosts.get(&entry.id)) {
                    let is_directory =
                        regular.mode.is_some_and(|mode| FileType::from_raw_mode(mode).is_dir());
                    found.insert(Ghost { path: regular.path(), id: *id, is_directory });
                }
            })?;
        }
        Ok(found.into_iter().collect())
    }

    /// How long the job was frozen, in microseconds, from CRIU's statistics.
    ///
    /// # Errors
    /// When the statistics cannot be read.
    pub fn frozen_us(read: &dyn Fn(&str) -> io::Result<Option<Vec<u8>>>) -> Result<Option<u32>, ImageError> {
        let mut frozen_us = None;
        entries(read, "stats-dump", SERVICE_MAGIC, STATS_MAGIC, |entry: StatsEntry| {
            frozen_us = entry.dump.map(|dump| dump.frozen_us);
        })?;
        Ok(frozen_us)
    }
}

/// Remote ends of established TCP connections of which only one end is in the job.
fn outside(sockets: &[InetEntry]) -> Vec<SocketAddr> {
    const ESTABLISHED: u32 = 1;
    let connected: Vec<_> = sockets
        .iter()
        .filter(|one| one.kind == STREAM && one.state == ESTABLISHED && one.family != 0)
        .collect();
    let ends: HashSet<_> = connected.iter().map(|one| (one.source_port, one.peer_port)).collect();
    let one_sided = connected.iter().filter(|one| !ends.contains(&(one.peer_port, one.source_port)));
    one_sided.copied().filter_map(InetEntry::peer).collect()
}

/// Calls `each` for every entry of an image.
pub(super) fn entries<T: Message + Default>(
    read: &dyn Fn(&str) -> io::Result<Option<Vec<u8>>>,
    name: &str,
    kind: u32,
    magic: u32,
    each: impl FnMut(T),
) -> Result<(), ImageError> {
    entries_with_data(read, name, [kind, magic], |_| 0, each)
}

/// The same for an image in which each entry is followed by so many bytes of data.
pub(super) fn entries_with_data<T: Message + Default>(
    read: &dyn Fn(&str) -> io::Result<Option<Vec<u8>>>,
    name: &str,
    magic: [u32; 2],
    data_bytes: impl Fn(&T) -> usize,
    mut each: impl FnMut(T),
) -> Result<(), ImageError> {
    let content = read(name).map_err(|source| ImageError::Io { name: name.to_owned(), source })?;
    let Some(content) = content else { return Ok(()) };
    let malformed = |reason: String| ImageError::Format { name: name.to_owned(), reason };
    let magic = magic.map(u32::to_le_bytes).concat();
    let Some(mut rest) = content.strip_prefix(&magic[..]) else {
        let found = content.get(..magic.len()).unwrap_or(&content);
        return Err(malformed(format!("its magic numbers are {found:x?}, not {magic:x?}")));
    };
    while let Some(entry) = next_entry(&mut rest) {
        let entry = entry.map_err(malformed)?;
        rest = rest.get(data_bytes(&entry)..).ok_or_else(|| malformed(TRUNCATED.to_owned()))?;
        each(entry);
    }
    if rest.is_empty() { Ok(()) } else { Err(malformed(TRUNCATED.to_owned())) }
}

/// The next entry of an image, which `rest` passes. `None` if there is not even its length; an error if it is not valid.
pub(super) fn next_entry<T: Message + Default>(rest: &mut &[u8]) -> Option<Result<T, String>> {
    let (length, after) = rest.split_first_chunk::<4>()?;
    let length = u32::from_le_bytes(*length) as usize;
    let Some(body) = after.get(..length) else { return Some(Err(TRUNCATED.to_owned())) };
    *rest = &after[length..];
    Some(T::decode(body).map_err(|error| error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::criu::pagemap::Pagemap;

    fn image(kind: u32, magic: u32, entries: &[Vec<u8>]) -> Vec<u8> {
        let mut image = [kind, magic].map(u32::to_le_bytes).concat();
        for entry in entries {
            image.extend_from_slice(&u32::try_from(entry.len()).unwrap().to_le_bytes());
            image.extend_from_slice(entry);
        }
        image
    }

    /// CRIU runs with the rights of the job in a user namespace, and a snapshot's images come from a store.
    #[test]
    fn any_image_is_read_or_refused() {
        let socket = UnixEntry { name: b"/run/a.sock".to_vec(), name_dir: Some(b"/run".to_vec()) };
        let inet = InetEntry {
            family: 2,
            kind: 1,
            state: 1,
            source_port: 80,
            peer_port: 4000,
            source_address: vec![0x0100_007f],
            peer_address: vec![0x0100_007f],
        };
        let (name, mode) = (b"tmp/log".to_vec(), Some(0o100_644));
        let regular = RegularEntry { flags: APPEND | 1, name, mode, build_id: Vec::new() };
        let file = |id| FileEntry { id, regular: None, inet: None, unix: None };
        let files = [
            FileEntry { regular: Some(regular), ..file(1) },
            FileEntry { inet: Some(inet), ..file(2) },
            FileEntry { unix: Some(socket), ..file(3) },
        ];
        let remap = RemapEntry { orig_id: 1, remap_id: 0x1a, kind: Some(GHOST) };
        let samples = [
            image(COMMON_MAGIC, FILES_MAGIC, &files.map(|file| file.encode_to_vec())),
            image(COMMON_MAGIC, REMAP_MAGIC, &[remap.encode_to_vec()]),
            image(SERVICE_MAGIC, STATS_MAGIC, &[vec![10, 2, 24, 7]]),
        ];
        let of = |bytes: &[u8]| Descriptors::read(&|_| Ok(Some(bytes.to_vec())));
        assert_eq!(
            Descriptors::read(&|name| Ok((name == "files.img").then(|| samples[0].clone())))
                .unwrap()
                .writable,
            ["/tmp/log"]
        );
        let images = |name: &str| Ok(Some(samples[usize::from(name == "remap-fpath.img")].clone()));
        let ghosts = Descriptors::ghosts(&images).unwrap();
        assert_eq!(ghosts, [Ghost { path: "/tmp/log".to_owned(), id: 0x1a, is_directory: false }]);
        assert_eq!(ghosts[0].name(), "/tmp/log.cr.1a.ghost");
        ckpt_test_mutate::mutations(&samples, |bytes| {
            let _ = of(bytes);
            let _ = Descriptors::read(&|name| Ok((name == "files.img").then(|| bytes.to_vec())));
            let _ = Descriptors::ghosts(&|_| Ok(Some(bytes.to_vec())));
            let _ = Descriptors::frozen_us(&|_| Ok(Some(bytes.to_vec())));
            let _ = Pagemap::parse(bytes);
        });
    }
}
