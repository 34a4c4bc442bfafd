//! What the agent in a process of the job and the launcher say to each other.
//!
//! ```text
//! agent                                   launcher
//!   Hello  ------------------------------->
//!          <------------------------------- Welcome, or Refused and the end
//!                     ... the job runs; as often as it is to be watched: ...
//!          <------------------------------- Look
//!   Activity{calls, is_waiting}  --------->
//!                     ... and when it is to be saved: ...
//!          <------------------------------- Prepare{attempt}
//!   Needs{attempt, mirror_bytes}  -------->
//!   (a process with device memory of its own that is to be captured:)
//!          <------------------------------- Stage{attempt, mirror, bytes} + the mirror's descriptor
//!   (maps and pins it while the job runs)
//!   Staged{attempt}, or Failed  ---------->
//!                     ... all are prepared ...
//!          <------------------------------- Quiesce{attempt, timeout_ms, park}, or Unstage
//!   (takes its process's state off the GPU, if it has any; as often as it takes:)
//!   Park + descriptors  ------------------>
//!          <------------------------------- Parked
//!   Quiesced{attempt, gpu}, or Failed{attempt, reason}  ------>
//!   (Failed: the connection stays, and the job goes on as if nothing had been asked;
//!    Quiesced: closes the connection; the process is dumped; it goes on, or is restored)
//!   Hello{away: attempt, is_detached}  --->
//!          <------------------------------- Welcome
//!   (if its state is off the GPU:)
//!          <------------------------------- Deliver{mirror, bytes} + the mirror's descriptor
//!   (as often as it takes:)
//!   Unpark  ------------------------------>
//!          <------------------------------- Unparked + descriptors
//!   Back{attempt, restored, lost}  ------->
//! ```
//!
//! The mirror of a process is memory of the launcher that holds what the process has on its GPUs, as of its last
//! capture; only what has changed is written to it anew. Physical device memory that is parked is kept alive by the
//! launcher, which holds its exported descriptors, so that a process that goes on copies nothing back.
//!
//! Device memory that processes share is known to the launcher by keys (CUDA IPC). Each of these may be said between a
//! Welcome and the agent's farewell, and as the first and only message on a connection of its own:
//!
//! ```text
//!   Publish{key} + the memory's descriptor  ------>
//!          <------------------------------- Published
//!   Fetch{key, owner}  ------------------->
//!          <------------------------------- Shared{bytes} + the memory's descriptor, or NotShared
//!   Withdraw{keys}  ---------------------->
//!          <------------------------------- Withdrawn
//! ```
//!
//! What such memory holds is captured by the process that it belongs to, while no other one may write to it. So a
//! process that has shared any waits, once its own work is done and before it captures, until all such have got so
//! far:
//!
//! ```text
//!   Drained{attempt}  -------------------->
//!          <------------------------------- AllDrained
//! ```
//!
//! The state is brought back at the pace of the GPU: no time limit of a conversation holds between Welcome and Back.
//!
//! What came later than version 3 is said only to agents whose Hello tells that they know it: an agent is in the snapshots
//! of its process, and is older there than the launcher that resumes them.
//!
//! The agent speaks first, and nothing follows a [`ToAgent::Refused`]. A message with a tag that the other
//! side does not know ends the connection; fields that it does not know are skipped. Descriptors follow their
//! message, see [`crate::descriptors`].

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// The version of these messages. It changes whenever an older peer would misunderstand a newer one.
pub const PROTOCOL_VERSION: u32 = 3;

/// The environment variable that names the launcher's socket to the processes of the job.
///
/// Without it (and without [`AUTO_VARIABLE`]) the interposer does nothing at all.
pub const SOCKET_VARIABLE: &str = "CKPT_AGENT_SOCKET";

/// The environment variable by which a container's first process hands itself over to the launcher: `1`, or
/// `required` if there shall be no job without checkpoints.
pub const AUTO_VARIABLE: &str = "CKPT_AUTO";

/// What an agent says to the launcher.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FromAgent {
    /// The first message on every connection.
    Hello(Hello),
    /// The answer to [`ToAgent::Prepare`].
    Needs {
        /// The attempt that it named.
        attempt: u64,
        /// How large the process's mirror has to be, in bytes; 0 for a process without device memory to capture.
        mirror_bytes: u64,
    },
    /// The mirror of [`ToAgent::Stage`] is mapped and pinned, as far as that was possible.
    Staged {
        /// The attempt that it named.
        attempt: u64,
    },
    /// The answer to [`ToAgent::Look`].
    Activity {
        /// A number that is another one once the program has made a call that submits work to a GPU, changes its state, or
        /// waits for it.
        calls: u64,
        /// Whether one of the program's threads is in a call that waits for a GPU, or has asked in vain since the last
        /// look whether a GPU is done.
        is_waiting: bool,
    },
    /// Exported physical memory that the launcher is to keep alive; that many descriptors follow. They are counted
    /// from 0 over all messages of one attempt.
    Park {
        /// How many descriptors follow, at most [`crate::descriptors::MOST`].
        count: usize,
    },
    /// Asks for parked memory back; the launcher forgets it once it is given out.
    Unpark {
        /// The first one.
        first: usize,
        /// How many, at most [`crate::descriptors::MOST`].
        count: usize,
    },
    /// Device memory of this process that others may take up; its descriptor follows. The launcher keeps it, also over
    /// a checkpoint of a job that runs on, until it is withdrawn or the process ends.
    Publish {
        /// The process's ID in its own PID namespace.
        pid: u32,
        /// What the memory is called from now on.
        key: ShareKey,
        /// Its size, in bytes.
        bytes: u64,
    },
    /// Asks for memory that a process has published, be it another one or the same.
    Fetch {
        /// The asking process's ID.
        pid: u32,
        /// Which memory.
        key: ShareKey,
        /// The ID of the process that has published it.
        owner: u32,
    },
    /// The process has no more to do with this memory, which it has published or fetched.
    Withdraw {
        /// The process's ID.
        pid: u32,
        /// Which memory.
        keys: Vec<ShareKey>,
    },
    /// This process submits no more work to its GPUs, and all that it had submitted is done.
    Drained {
        /// The attempt that [`ToAgent::Quiesce`] named.
        attempt: u64,
        /// The process's ID.
        pid: u32,
    },
    /// Nothing in this process stands against a dump any more, once this connection is closed, which is the
    /// very next thing that the agent does.
    Quiesced {
        /// The attempt that [`ToAgent::Quiesce`] named.
        attempt: u64,
        /// What was taken off the GPU; `None` for a process that has never used one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        gpu: Option<GpuReport>,
    },
    /// The process cannot be dumped this time. It runs on unharmed unless it is lost, and the agent goes on listening.
    Failed {
        /// The attempt that [`ToAgent::Quiesce`] named.
        attempt: u64,
        /// Why, and what to change, for people.
        reason: String,
        /// The process does not run on: its state on the GPU could not be put back.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        is_lost: bool,
    },
    /// The agent is back after having gone away for a checkpoint.
    Back {
        /// The attempt that it went away for.
        attempt: u64,
        /// Whether this process was made anew from the checkpoint's images, and not merely let go on.
        restored: bool,
        /// How much device memory was copied back from the mirror, in bytes; the rest had been parked.
        #[serde(default)]
        copied_bytes: u64,
        /// Why the process's state on the GPU could not be brought back: the process is of no use any more.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        lost: Option<String>,
    },
}

/// Names device memory that processes of a job share; random, so that it is never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "[u64; 2]", into = "[u64; 2]")]
pub struct ShareKey(pub u128);

/// The upper half first: JSON's numbers are taken for 64 bits at most.
impl From<[u64; 2]> for ShareKey {
    fn from([upper, lower]: [u64; 2]) -> Self {
        Self(u128::from(upper) << 64 | u128::from(lower))
    }
}

impl From<ShareKey> for [u64; 2] {
    fn from(ShareKey(key): ShareKey) -> Self {
        [(key >> 64) as u64, key as u64]
    }
}

/// Who an agent is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`PROTOCOL_VERSION`] of the agent.
    pub version: u32,
    /// The process's ID in its own PID namespace.
    pub pid: u32,
    /// When the process started, in clock ticks since boot, as field 22 of `/proc/self/stat` has it in the
    /// process's own time namespace; 0 if that could not be read.
    pub start_time_ticks: u64,
    /// Where the process's program lies, as `/proc/self/exe` has it; empty if that could not be read.
    pub exe: String,
    /// The attempt that this agent went away for, if it did; a [`FromAgent::Back`] then follows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub away: Option<u64>,
    /// Whether the state of the process is off the GPU, so that a [`ToAgent::Deliver`] is waited for.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_detached: bool,
    /// Whether the agent knows [`ToAgent::Look`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tells_activity: bool,
}

/// What a process had on its GPUs when it was taken off them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuReport {
    /// Device memory that was captured, sorted by address.
    pub regions: Vec<Region>,
    /// What the capture has done to the mirror; `None` if there was none, and from an agent that does not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capture: Option<Box<Capture>>,
    /// Live objects of the driver, and allocations of the program.
    pub counts: Counts,
    /// How long the steps took.
    pub times: StepTimes,
    /// How many bytes of device memory were parked rather than released.
    pub parked_bytes: u64,
    /// Why nothing was parked although it was asked for, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unparked_because: Option<String>,
    /// What was slower than it could be or is not known, and why, for people who look for a reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub remarks: Vec<String>,
    /// What graphs have allocated, on each device where they have any: it is in no region, for the driver saves it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub graph_memory: Vec<GraphMemory>,
    /// The stacks of calls that regions name as their [`Region::origin`], innermost call first. Each is a file with an
    /// offset in it, and the function where one is known: `FILE+0xOFFSET (FUNCTION+0xOFFSET)`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub origins: Vec<Vec<String>>,
    /// IDs of the driver's private tables that the process has asked for (cuGetExportTable), as UUIDs are written. What is
    /// done by way of them is not seen.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub private_tables: Vec<String>,
}

/// What a capture has done to the mirror.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capture {
    /// Which mirror, as [`ToAgent::Stage`] has named it.
    pub mirror: u64,
    /// Which capture of the process it was. Every one that was begun counts, also one that has failed and that nobody
    /// was told of, and one without a mirror: if the number is by one higher than that of another capture into the same
    /// mirror, nothing was written between the two.
    pub number: u64,
    /// Where it has written, in bytes from the mirror's beginning: sorted, without overlaps. More than that may be told,
    /// never less. The launcher keeps it to itself: it is not in a snapshot.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub written: Vec<Range<u64>>,
}

/// What the allocation nodes of graphs have on a device (CUDA driver API reference, `CUgraphMem_attribute`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GraphMemory {
    /// Ordinal of the device.
    pub device: i32,
    /// How much of it is allocated, in bytes.
    pub used_bytes: u64,
    /// How much physical memory the driver has set aside for it, in bytes.
    pub reserved_bytes: u64,
}

/// One piece of physical device memory, and where in the mirror its content is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Region {
    /// Where the process sees it; 0 for memory that is mapped nowhere.
    pub address: u64,
    /// Its length, in bytes.
    pub bytes: u64,
    /// Ordinal of the device.
    pub device: i32,
    /// What it is for.
    pub kind: RegionKind,
    /// How many of the program's allocations lie in it.
    pub allocations: u64,
    /// Where its content begins in the mirror, in bytes.
    pub offset: u64,
    /// How much of it was found changed since the capture before, in bytes; `None` if that was not looked for, and all of
    /// it was copied.
    #[serde(default)]
    pub changed_bytes: Option<u64>,
    /// What sets it apart from plain memory.
    #[serde(default, skip_serializing_if = "RegionFlags::are_none")]
    pub flags: RegionFlags,
    /// Which of [`GpuReport::origins`] has made it, where that was noted. With a slab or a pool it is the allocation for
    /// which the first room was made there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<usize>,
}

/// What sets device memory apart from plain memory that its own process and device use and nobody else.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RegionFlags {
    /// It stayed on the GPU while the process was dumped, held by the launcher.
    #[serde(skip_serializing_if = "is_not")]
    pub is_parked: bool,
    /// Other processes of the job may have it open (cuIpcGetMemHandle). The launcher holds it too.
    #[serde(skip_serializing_if = "is_not")]
    pub is_shared: bool,
    /// The program has asked for memory that can be exported (`CUmemAllocationProp::requestedHandleTypes`).
    #[serde(skip_serializing_if = "is_not")]
    pub is_exportable: bool,
    /// It may be compressed (`CU_MEM_ALLOCATION_COMP_GENERIC`).
    #[serde(skip_serializing_if = "is_not")]
    pub is_compressible: bool,
    /// Network cards may read and write it (`gpuDirectRDMACapable`).
    #[serde(skip_serializing_if = "is_not")]
    pub is_rdma_capable: bool,
    /// It is mapped at so many more addresses than [`Region::address`].
    #[serde(skip_serializing_if = "is_zero")]
    pub aliases: u64,
    /// Ordinals of the other devices that may access it, sorted.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub peers: Vec<i32>,
}

impl RegionFlags {
    /// Whether there is nothing to tell.
    #[must_use]
    pub fn are_none(&self) -> bool {
        *self == Self::default()
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_not(flag: &bool) -> bool {
    !flag
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// What device memory is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RegionKind {
    /// An allocation of cuMemAlloc or its kin of its own.
    Allocation,
    /// Many small allocations.
    Slab,
    /// Stream-ordered allocations.
    Pool,
    /// What the program made by cuMemCreate.
    Program,
}

/// How many objects of each kind a process has.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Counts {
    /// Contexts.
    pub contexts: u64,
    /// Streams that the program has made.
    pub streams: u64,
    /// Events.
    pub events: u64,
    /// Modules and libraries.
    pub modules: u64,
    /// Graphs, instantiated ones included.
    pub graphs: u64,
    /// Live allocations of device memory.
    pub allocations: u64,
}

/// How long each step of taking a process off its GPUs took, in seconds.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct StepTimes {
    /// Until no call was inside and all submitted work was done.
    pub drain_s: f64,
    /// Finding and copying what had changed.
    pub capture_s: f64,
    /// Unmapping, parking and releasing device memory.
    pub release_s: f64,
    /// The driver's own lock and checkpoint.
    pub driver_s: f64,
}

/// What the launcher says to an agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToAgent {
    /// The answer to a [`FromAgent::Hello`] of a version that the launcher speaks.
    Welcome {
        /// [`PROTOCOL_VERSION`] of the launcher.
        version: u32,
    },
    /// The answer to any other; the agent stays silent for the rest of its process's life.
    Refused {
        /// Why, for people.
        reason: String,
    },
    /// Asks what the process does with its GPUs; said only to an agent that [tells](Hello::tells_activity) it.
    Look,
    /// Announces a checkpoint. The job runs on.
    Prepare {
        /// The number of this attempt, which the answers repeat.
        attempt: u64,
    },
    /// The mirror; its descriptor follows.
    Stage {
        /// The attempt.
        attempt: u64,
        /// Which mirror it is: as long as the number is the same, so is what the agent has left in it.
        mirror: u64,
        /// Its size, in bytes, at least what the agent has asked for.
        bytes: u64,
    },
    /// The attempt is given up: the mirror is to be let go of.
    Unstage {
        /// The attempt.
        attempt: u64,
    },
    /// The answer to [`FromAgent::Park`].
    Parked {
        /// Whether all descriptors of the attempt so far are kept. If not, none is.
        is_kept: bool,
    },
    /// What an agent needs to put its process's state back; the mirror's descriptor follows if there is one.
    Deliver {
        /// Which mirror it is.
        mirror: u64,
        /// Its size, in bytes; 0 if there is none.
        bytes: u64,
        /// How many pieces of memory are parked.
        parked: usize,
    },
    /// The answer to [`FromAgent::Unpark`]; that many descriptors follow.
    Unparked {
        /// As many as were asked for, or none.
        count: usize,
    },
    /// The answer to [`FromAgent::Publish`].
    Published {
        /// Whether the launcher keeps the memory.
        is_kept: bool,
    },
    /// An answer to [`FromAgent::Fetch`]; the memory's descriptor follows.
    Shared {
        /// The memory's size, in bytes.
        bytes: u64,
    },
    /// The other answer: the launcher does not have it.
    NotShared {
        /// Whether the process that it belongs to has nothing left to put back after a checkpoint, and would have
        /// published it by now.
        is_final: bool,
    },
    /// The answer to [`FromAgent::Withdraw`].
    Withdrawn,
    /// The answer to [`FromAgent::Drained`].
    AllDrained {
        /// Whether that is so for all processes that share device memory; if not, the attempt has failed.
        is_so: bool,
    },
    /// Asks the agent to take its process's state off the GPU and to close the connection.
    Quiesce {
        /// The attempt.
        attempt: u64,
        /// How long the preparation may take, in milliseconds; the agent answers [`FromAgent::Failed`] after that.
        timeout_ms: u64,
        /// Whether the process will run on, so that physical memory is worth parking.
        #[serde(default)]
        park: bool,
    },
}

impl FromAgent {
    /// How many descriptors follow this message.
    pub fn descriptors(&self) -> usize {
        match self {
            Self::Park { count } => *count,
            Self::Publish { .. } => 1,
            _ => 0,
        }
    }
}

impl ToAgent {
    /// How many descriptors follow this message.
    pub fn descriptors(&self) -> usize {
        match self {
            Self::Stage { .. } | Self::Shared { .. } => 1,
            Self::Deliver { bytes, .. } => usize::from(*bytes > 0),
            Self::Unparked { count } => *count,
            _ => 0,
        }
    }

    /// The launcher's answer to a greeting.
    pub fn answer(hello: &Hello) -> Self {
        if hello.version == PROTOCOL_VERSION {
            Self::Welcome { version: PROTOCOL_VERSION }
        } else {
            let reason = format!(
                "the launcher speaks version {PROTOCOL_VERSION} of the agent protocol, the agent version {}",
                hello.version
            );
            Self::Refused { reason }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde::de::DeserializeOwned;

    use super::*;

    fn hello(version: u32, away: Option<u64>) -> Hello {
        Hello {
            version,
            pid: 7,
            start_time_ticks: 99,
            exe: "/bin/true".into(),
            away,
            is_detached: away.is_some(),
            tells_activity: false,
        }
    }

    fn stands_for<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(message: &T, text: &str) {
        assert_eq!(serde_json::to_string(message).expect("JSON"), text);
        assert_eq!(&serde_json::from_str::<T>(text).expect("a message"), message);
    }

    #[test]
    fn messages_keep_their_spelling() {
        stands_for(
            &FromAgent::Hello(hello(3, None)),
            r#"{"type":"hello","version":3,"pid":7,"start_time_ticks":99,"exe":"/bin/true"}"#,
        );
        stands_for(
            &FromAgent::Hello(hello(3, Some(4))),
            r#"{"type":"hello","version":3,"pid":7,"start_time_ticks":99,"exe":"/bin/true","away":4,"is_detached":true}"#,
        );
        stands_for(&FromAgent::Quiesced { attempt: u64::MAX, gpu: None }, {
            r#"{"type":"quiesced","attempt":18446744073709551615}"#
        });
        stands_for(
            &FromAgent::Failed { attempt: 3, reason: "managed memory".into(), is_lost: false },
            r#"{"type":"failed","attempt":3,"reason":"managed memory"}"#,
        );
        stands_for(
            &FromAgent::Back { attempt: 3, restored: true, copied_bytes: 0, lost: None },
            r#"{"type":"back","attempt":3,"restored":true,"copied_bytes":0}"#,
        );
        stands_for(
            &FromAgent::Back { attempt: 3, restored: false, copied_bytes: 7, lost: Some("gone".into()) },
            r#"{"type":"back","attempt":3,"restored":false,"copied_bytes":7,"lost":"gone"}"#,
        );
        let key = ShareKey(u128::MAX - 1);
        stands_for(
            &FromAgent::Publish { pid: 7, key, bytes: 9 },
            r#"{"type":"publish","pid":7,"key":[18446744073709551615,18446744073709551614],"bytes":9}"#,
        );
        stands_for(
            &FromAgent::Fetch { pid: 7, key: ShareKey(5), owner: 8 },
            r#"{"type":"fetch","pid":7,"key":[0,5],"owner":8}"#,
        );
        stands_for(
            &FromAgent::Withdraw { pid: 7, keys: vec![ShareKey(1 << 64)] },
            r#"{"type":"withdraw","pid":7,"keys":[[1,0]]}"#,
        );
        let told = Hello { tells_activity: true, ..hello(3, None) };
        stands_for(
            &FromAgent::Hello(told),
            r#"{"type":"hello","version":3,"pid":7,"start_time_ticks":99,"exe":"/bin/true","tells_activity":true}"#,
        );
        stands_for(&ToAgent::Look, r#"{"type":"look"}"#);
        stands_for(
            &FromAgent::Activity { calls: 9, is_waiting: true },
            r#"{"type":"activity","calls":9,"is_waiting":true}"#,
        );
        stands_for(&ToAgent::NotShared { is_final: true }, r#"{"type":"not_shared","is_final":true}"#);
        stands_for(&ToAgent::Welcome { version: 3 }, r#"{"type":"welcome","version":3}"#);
        stands_for(&ToAgent::Refused { reason: "no".into() }, r#"{"type":"refused","reason":"no"}"#);
        stands_for(
            &ToAgent::Quiesce { attempt: 3, timeout_ms: 500, park: true },
            r#"{"type":"quiesce","attempt":3,"timeout_ms":500,"park":true}"#,
        );
    }

    #[test]
    fn a_newer_hello_is_understood_well_enough_to_be_refused() {
        let text = r#"{"type":"hello","version":9,"pid":7,"start_time_ticks":99,"exe":"","new":[1]}"#;
        let FromAgent::Hello(hello) = serde_json::from_str(text).expect("a greeting") else {
            panic!("not a greeting");
        };
        let ToAgent::Refused { reason } = ToAgent::answer(&hello) else { panic!("not refused") };
        assert!(reason.contains("version 3") && reason.contains("version 9"), "{reason}");
    }

    #[test]
    fn the_own_version_is_welcome() {
        let answer = ToAgent::answer(&hello(PROTOCOL_VERSION, None));
        assert_eq!(answer, ToAgent::Welcome { version: PROTOCOL_VERSION });
    }

    /// What an agent says of a plain region, and what one of before there were flags said, read alike.
    #[test]
    fn a_region_says_only_what_there_is_to_say() {
        let text = r#"{"address":4096,"bytes":8,"device":0,"kind":"slab","allocations":1,"offset":0,"changed_bytes":null"#;
        let mut region = Region {
            address: 4096,
            bytes: 8,
            device: 0,
            kind: RegionKind::Slab,
            allocations: 1,
            offset: 0,
            changed_bytes: None,
            flags: RegionFlags::default(),
            origin: None,
        };
        stands_for(&region, &format!("{text}}}"));
        region.flags =
            RegionFlags { is_parked: true, aliases: 2, peers: vec![1, 3], ..RegionFlags::default() };
        region.origin = Some(5);
        let flags = r#""flags":{"is_parked":true,"aliases":2,"peers":[1,3]},"origin":5"#;
        stands_for(&region, &format!("{text},{flags}}}"));
    }

    /// As does the report of an agent that does not tell what it has written.
    #[test]
    fn a_capture_says_what_it_has_written() {
        let capture = |number, written| Capture { mirror: 3, number, written };
        stands_for(&capture(1, Vec::new()), r#"{"mirror":3,"number":1}"#);
        stands_for(
            &capture(7, vec![0..2, 5..9]),
            r#"{"mirror":3,"number":7,"written":[{"start":0,"end":2},{"start":5,"end":9}]}"#,
        );
        let text = serde_json::to_string(&GpuReport::default()).expect("JSON");
        assert!(!text.contains("capture\""), "{text}");
        assert_eq!(serde_json::from_str::<GpuReport>(&text).expect("a report").capture, None);
    }

    #[test]
    fn an_unknown_message_is_an_error() {
        assert!(serde_json::from_str::<ToAgent>(r#"{"type":"dance"}"#).is_err());
        assert!(serde_json::from_str::<FromAgent>(r#"{"type":"dance"}"#).is_err());
    }
}
