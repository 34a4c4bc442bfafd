//! The subset of CRIU's RPC messages that ckpt-run uses. Field numbers are those of CRIU's images/rpc.proto.
//!
//! The crate rust-criu cannot be used: it starts CRIU outside of the job's namespace, and cannot run code while the job is
//! frozen.

use crate::sys::privileges::Privileges;
use prost::Message;

/// `criu_req_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum RequestType {
    Dump = 1,
    Restore = 2,
    Notify = 6,
    SinglePreDump = 13,
}

/// A descriptor that replaces one in the images.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct InheritFd {
    /// The name in the images: `pipe:[INODE]` or `tty[RDEV:DEV]`, the numbers of a terminal in hexadecimal.
    #[prost(string, required, tag = "1")]
    pub key: String,
    /// Its number in CRIU.
    #[prost(int32, required, tag = "2")]
    pub fd: i32,
}

/// `criu_opts`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Options {
    /// Directory of the images, a descriptor of the process that made the socket.
    #[prost(int32, required, tag = "1")]
    pub images_dir_fd: i32,
    /// Root of the tree to dump.
    #[prost(int32, optional, tag = "2")]
    pub pid: Option<i32>,
    /// The job continues after the dump.
    #[prost(bool, optional, tag = "3")]
    pub leave_running: Option<bool>,
    /// Established TCP connections are saved.
    #[prost(bool, optional, tag = "5")]
    pub tcp_established: Option<bool>,
    /// File locks are saved.
    #[prost(bool, optional, tag = "8")]
    pub file_locks: Option<bool>,
    /// 0 messages, 1 errors, 2 warnings, 3 information, 4 everything.
    #[prost(int32, optional, tag = "9")]
    pub log_level: Option<i32>,
    /// Name of the log in the work directory.
    #[prost(string, optional, tag = "10")]
    pub log_file: Option<String>,
    /// Stop at each stage and wait for an answer.
    #[prost(bool, optional, tag = "12")]
    pub notify_scripts: Option<bool>,
    /// The directory of an older dump of the same tree, relative to that of the images: pages that have not changed since
    /// are not written again.
    #[prost(string, optional, tag = "14")]
    pub parent_img: Option<String>,
    /// Changes to memory are tracked from now on. Needs a kernel with soft-dirty bits.
    #[prost(bool, optional, tag = "15")]
    pub track_mem: Option<bool>,
    /// Restored memory pages are freed in the images.
    #[prost(bool, optional, tag = "16")]
    pub auto_dedup: Option<bool>,
    /// Directory of the log and the statistics.
    #[prost(int32, optional, tag = "17")]
    pub work_dir_fd: Option<i32>,
    /// Files that were renamed or unlinked but have another name are supported.
    #[prost(bool, optional, tag = "18")]
    pub link_remap: Option<bool>,
    /// Descriptors that replace those in the images.
    #[prost(message, repeated, tag = "27")]
    pub inherit_fd: Vec<InheritFd>,
    /// 0: restored tasks stay in CRIU's cgroup.
    #[prost(int32, optional, tag = "34")]
    pub manage_cgroups_mode: Option<i32>,
    /// The largest unlinked file that is saved, bytes.
    #[prost(uint32, optional, tag = "35")]
    pub ghost_limit: Option<u32>,
    /// Resources that are not in the images, such as `tty[RDEV:DEV]`.
    #[prost(string, repeated, tag = "37")]
    pub external: Vec<String>,
    /// Time limit for stopping the tasks, in seconds.
    #[prost(uint32, optional, tag = "45")]
    pub timeout: Option<u32>,
    /// A configuration file with options that are not in the protocol.
    #[prost(string, optional, tag = "51")]
    pub config_file: Option<String>,
    /// 3: connections are not locked while the job is frozen, because both ends are frozen.
    #[prost(int32, optional, tag = "64")]
    pub network_lock: Option<i32>,
    /// CRIU runs without features that need root or capabilities in the initial user namespace.
    #[prost(bool, optional, tag = "67")]
    pub unprivileged: Option<bool>,
}

/// Log level: warnings and errors.
pub const CRIU_WARNINGS: i32 = 2;
/// Log level: everything.
pub const CRIU_EVERYTHING: i32 = 4;

impl Options {
    /// Options that a dump and its restore share. For example, file locks are silently lost if only one of them has the
    /// option.
    #[must_use]
    pub fn common() -> Self {
        Self {
            tcp_established: Some(true),
            file_locks: Some(true),
            link_remap: Some(true),
            manage_cgroups_mode: Some(0),
            log_file: Some("criu.log".to_owned()),
            log_level: Some(CRIU_WARNINGS),
            unprivileged: Some(Privileges::detect().is_limited()),
            ..Self::default()
        }
    }
}

/// `criu_req`.
#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct Request {
    #[prost(int32, required, tag = "1")]
    pub(super) kind: i32,
    #[prost(message, optional, tag = "2")]
    pub(super) opts: Option<Options>,
    #[prost(bool, optional, tag = "3")]
    pub(super) notify_success: Option<bool>,
}

/// `criu_restore_resp`.
#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct Restored {
    #[prost(int32, required, tag = "1")]
    pub(super) pid: i32,
}

/// `criu_notify`.
#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct Notify {
    #[prost(string, optional, tag = "1")]
    pub(super) script: Option<String>,
}

/// `criu_resp`.
#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct Response {
    #[prost(int32, required, tag = "1")]
    pub(super) kind: i32,
    #[prost(bool, required, tag = "2")]
    pub(super) success: bool,
    #[prost(message, optional, tag = "4")]
    pub(super) restore: Option<Restored>,
    #[prost(message, optional, tag = "5")]
    pub(super) notify: Option<Notify>,
    #[prost(int32, optional, tag = "7")]
    pub(super) cr_errno: Option<i32>,
    /// With names of files, in whatever encoding.
    #[prost(bytes = "vec", optional, tag = "9")]
    pub(super) cr_errmsg: Option<Vec<u8>>,
}
