//! The agent protocol: messages between the launcher and the agent in a process of the job.
//!
//! ```text
//! agent                                   launcher
//!   Hello  ------------------------------->
//!          <------------------------------- Welcome, or Refused (ends the connection)
//!                     ... the job runs; the watchdog polls its activity: ...
//!          <------------------------------- QueryActivity
//!   Activity{calls, is_waiting, members}  ->
//!                     ... a checkpoint begins: ...
//!          <------------------------------- Prepare{attempt}
//!   Needs{attempt, mirror_bytes, used_bytes, changes, ranks_on}, or Failed{attempt, reason}  ->
//!   (for a process with device memory to capture:)
//!          <------------------------------- Stage{attempt, mirror, bytes, more_bytes} + the mirror's descriptor
//!   (maps and pins it while the job runs)
//!   Staged{attempt}, or Failed  ---------->
//!                     ... all are prepared ...
//!          <------------------------------- Quiesce{attempt, timeout_ms, park_by_key}, or Unstage
//!   (detaches the process's state from the GPU, if it has any; repeated as needed:)
//!   Park{keys} + descriptors  ------------>
//!          <------------------------------- Parked
//!   Quiesced{attempt, gpu}, or Failed{attempt, reason}  ------>
//!   (Failed: the connection stays open, and the job continues;
//!    Quiesced: closes the connection; the process is dumped, then continues or is restored)
//!   Hello{away: attempt, is_detached}  --->
//!          <------------------------------- Welcome
//!   (if its state is detached from the GPU:)
//!          <------------------------------- Deliver{mirror, bytes} + the mirror's descriptor
//!   (repeated as needed:)
//!   Unpark{keys}  ------------------------>
//!          <------------------------------- Unparked + descriptors
//!   Reconnected{attempt, restored, lost}  ->
//! ```
//!
//! The mirror of a process is memory of the launcher with the content of the process's device memory at its last
//! capture. A capture writes only changes to it. Parked device memory stays on the GPU: the launcher keeps its exported
//! descriptors, so a process that continues after the dump copies nothing back. It keeps them until the memory is withdrawn,
//! as it keeps memory that processes share: the driver does not export memory again that has come back by a descriptor.
//!
//! A partial mirror lacks content that the store has. Only agents whose Needs have `changes` get one. Before such an agent
//! copies from it, after its Unpark, and when it undoes a failed attempt:
//!
//! ```text
//!   Fill{ranges}  ------------------------>
//!          <------------------------------- Filled{problem}
//! ```
//!
//! With `--mirror none` there is no mirror: the store gets the memory while the process is being detached. The launcher sends
//! these messages only to agents that [support](Hello::supports_reads) them. Instead of Stage:
//!
//! ```text
//!          <------------------------------- StageWindow{attempt, mirror, bytes, window_bytes} + the window's descriptor
//!   Staged{attempt}, or Failed  ---------->
//! ```
//!
//! and after Quiesce, before Park:
//!
//! ```text
//!   Readable{attempt, regions, capture, used}  ------>
//!   (repeated as needed:)
//!          <------------------------------- Read{offset, bytes, at}
//!   Content{problem}  -------------------->
//!          <------------------------------- Stored{problem}
//! ```
//!
//! A process whose mirror would take too much memory at a resume gets its device memory from the store through a window. Only
//! agents that [support](Hello::supports_loads) it get one. Instead of Deliver:
//!
//! ```text
//!          <------------------------------- DeliverWindow{mirror, bytes, window_bytes} + the window's descriptor
//!   (repeated as needed, one ahead of the answer:)
//!   Load{ranges, at}  -------------------->
//!          <------------------------------- Loaded{problem}
//! ```
//!
//! The launcher identifies device memory that processes share, by CUDA IPC or by descriptors, by keys. Each of these requests
//! may be sent
//! between a Welcome and the end of the conversation, or as the only request on a connection of its own:
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
//! Before the launcher kills a job, it has the agents release the GPUs:
//!
//! ```text
//!          <------------------------------- Release{timeout_ms}
//!   Released{problem}  ------------------->
//! ```
//!
//! Before a checkpoint, processes that use NCCL stop at a consistent cut (`docs/design/collectives.md`). Each of their agents
//! [supports](Hello::supports_cut) these messages, between Welcome and Quiesce and after Reconnected:
//!
//! ```text
//!          <------------------------------- Cut{order: Count}
//!   Steps{report}  ----------------------->   (again at each change, until Release)
//!          <------------------------------- Cut{order: Reach}   (again as targets rise)
//!                     ... the cut; the checkpoint; all processes are back: ...
//!          <------------------------------- Cut{order: Release}
//! ```
//!
//! The parked calls are part of a process's memory, so a restored process still waits for the Release. An agent that loses
//! the connection while it is not away releases its process itself.
//!
//! How much device memory the driver itself holds for a process is known to NVML alone, which the launcher asks. While the
//! process is being detached, once all memory of the interposer's is off the GPU:
//!
//! ```text
//!   Measure{attempt}  -------------------->   (only if Quiesce offers it)
//!          <------------------------------- Measured{gpus}
//! ```
//!
//! Shared memory is captured by its owner, and no other process may write to it at that time. So every process that
//! shares memory first drains its own work, then waits until all such processes have drained theirs, before it captures:
//!
//! ```text
//!   Drained{attempt}  -------------------->
//!          <------------------------------- AllDrained
//! ```
//!
//! Processes that share multicast objects, the members of a cycle, take each of its steps together. AllDrained names the
//! cycle; only launchers that know these messages do. Sent again as long as the answer is that not all have come:
//!
//! ```text
//!   Arrive{cycle, members, step}  -------->
//!          <------------------------------- Arrived{progress}
//! ```
//!
//! A process that cannot be detached comes back before the others learn of it, and would wait for those that have been
//! detached. So a member of a cycle says so before it comes back:
//!
//! ```text
//!   GivesUp{attempt, reason}  ------------>
//! ```
//!
//! No timeout applies between Welcome and Reconnected: the GPU determines how long it takes to restore the state.
//!
//! Messages added after version 3 are sent only to agents whose Hello announces support for them. The agent is part of
//! its process's snapshot, so it may be older than the launcher that resumes it.
//!
//! The agent sends the first message, and nothing follows a [`ToAgent::Refused`]. A message with an unknown tag ends the
//! connection; unknown fields are skipped. Descriptors follow their message, see [`crate::descriptors`].

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// The version of the protocol, incremented when an older peer would misunderstand a newer one.
pub const PROTOCOL_VERSION: u32 = 3;

/// The environment variable with the path of the launcher's socket, set for the processes of the job.
///
/// Without this variable and [`AUTO_VARIABLE`] the interposer does nothing.
pub const SOCKET_VARIABLE: &str = "CKPT_AGENT_SOCKET";

/// The environment variable that makes a container's first process start the job under the launcher: `1`, or
/// `required` if the job must not run without checkpoints.
pub const AUTO_VARIABLE: &str = "CKPT_AUTO";

/// How much memory each thread pins that copies device memory to a mirror, or back, which is not pinned.
pub const COPY_BUFFERS_BYTES: u64 = 4 << 20;

/// Why a process refuses a dump for which it has not asked for enough memory. It asks for more before the next one, which
/// the launcher tries at once.
pub const WANTS_MORE_ROOM: &str = "this checkpoint has no room for device memory that has to leave the GPU: memory that processes share, memory of the host (cuMemCreate), or memory that was parked before; the next one has room for that";

/// Messages from an agent to the launcher.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FromAgent {
    /// The first message on every connection.
    Hello(Hello),
    /// The answer to [`ToAgent::Prepare`].
    Needs {
        /// The attempt of the request.
        attempt: u64,
        /// The required size of the process's mirror, in bytes; 0 without device memory to capture.
        mirror_bytes: u64,
        /// How much of it will have memory, in bytes: chunks of zeroes have none. The agent allocates it itself. `None` from
        /// older agents, which need the whole mirror allocated.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        used_bytes: Option<u64>,
        /// What the next capture is expected to write. `None` from older agents, which need the whole content in the mirror.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        changes: Option<ExpectedChanges>,
        /// UUIDs of the GPUs on which the process is a rank of NCCL beside others, as in [`GpuUse::uuid`]; empty from older
        /// agents.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        ranks_on: Vec<String>,
    },
    /// Requests that the launcher writes the content of these ranges to a partial mirror, where it has been stored and
    /// freed. The ranges that the last capture has written are not among them.
    Fill {
        /// In bytes from the mirror's beginning: sorted, without overlaps.
        ranges: Vec<Range<u64>>,
    },
    /// Requests that the launcher writes content of the mirror to the window, from the snapshot that the process was restored
    /// from; only after [`ToAgent::DeliverWindow`]. Answers come in the order of the requests.
    Load {
        /// In bytes from the mirror's beginning. They are written one after another.
        ranges: Vec<Range<u64>>,
        /// Where in the window the first one goes, in bytes.
        at: u64,
    },
    /// The device memory of a process without a mirror can be read until [`ToAgent::Stored`]: all work on it has ended.
    Readable {
        /// The attempt of [`ToAgent::Quiesce`].
        attempt: u64,
        /// The device memory. Offsets are those in a mirror that has [`ToAgent::StageWindow::bytes`].
        regions: Vec<Region>,
        /// What has changed since the last capture.
        capture: Capture,
        /// What does not hold zeroes only, in bytes from the mirror's beginning: sorted, without overlaps.
        used: Vec<Range<u64>>,
    },
    /// The answer to [`ToAgent::Read`].
    Content {
        /// Why the content is not in the window, for the user.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        problem: Option<String>,
    },
    /// The mirror of [`ToAgent::Stage`] is mapped, and pinned as far as possible.
    Staged {
        /// The attempt of the request.
        attempt: u64,
    },
    /// The answer to [`ToAgent::QueryActivity`].
    Activity {
        /// A number that changes when the program has made a call that submits work to a GPU, changes its state, or waits
        /// for it.
        calls: u64,
        /// Whether a thread of the program is in a call that waits for a GPU, or has polled a busy GPU since the last
        /// request.
        is_waiting: bool,
        /// How far the process is on each of its communicators; empty without any, and from older agents.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        members: Vec<ckpt_cut::MemberReport>,
    },
    /// Exported physical memory that the launcher must keep alive; a descriptor for each key follows. It keeps them until
    /// they are withdrawn or the process ends.
    Park {
        /// The process's ID in its own PID namespace.
        pid: u32,
        /// The keys of the memory from now on, at most [`crate::descriptors::MOST`].
        keys: Vec<ShareKey>,
        /// As in [`Hello::instance`].
        instance: u64,
    },
    /// Requests parked memory, which stays parked.
    Unpark {
        /// The process's ID.
        pid: u32,
        /// The keys of the memory, at most [`crate::descriptors::MOST`].
        keys: Vec<ShareKey>,
    },
    /// Device memory of this process that others may have; the driver's descriptor of it follows. The launcher keeps it until
    /// it is withdrawn or the process ends, also during a checkpoint of a job that continues.
    Publish {
        /// The process's ID in its own PID namespace.
        pid: u32,
        /// The key of the memory from now on.
        key: ShareKey,
        /// Its size, in bytes.
        bytes: u64,
        /// Whether a second descriptor follows: what memfd_create has returned for a memfd, of which programs have descriptors that
        /// stand for the memory. The launcher keeps the memory after the end of the process too, as long as there are such
        /// descriptors.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        has_root: bool,
        /// Whether it is a multicast object. The launcher closes its descriptor once all processes have taken the object down,
        /// since the driver's checkpoint does not return while there is one.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        is_multicast: bool,
        /// As in [`Hello::instance`].
        #[serde(default, skip_serializing_if = "is_zero")]
        instance: u64,
    },
    /// Requests memory that another process, or this one, has published.
    Fetch {
        /// The ID of the requesting process.
        pid: u32,
        /// The memory's key.
        key: ShareKey,
        /// The ID of the process that has published it.
        owner: u32,
        /// As in [`Hello::instance`].
        #[serde(default, skip_serializing_if = "is_zero")]
        instance: u64,
    },
    /// The process no longer uses this memory, which it has published, parked or fetched.
    Withdraw {
        /// The process's ID.
        pid: u32,
        /// The keys of the memory.
        keys: Vec<ShareKey>,
    },
    /// This process submits no more work to its GPUs, and all submitted work is complete.
    Drained {
        /// The attempt of [`ToAgent::Quiesce`].
        attempt: u64,
        /// The process's ID.
        pid: u32,
        /// The multicast objects that it shares with others, or may share.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        objects: Vec<MulticastObject>,
    },
    /// The process has come to a step of a cycle, see [`ToAgent::AllDrained`].
    Arrive {
        /// The process's ID.
        pid: u32,
        /// The cycle.
        cycle: Cycle,
        /// The step.
        step: CycleStep,
    },
    /// The process cannot be detached in this attempt, and is coming back; a [`FromAgent::Failed`] follows.
    GivesUp {
        /// The attempt of [`ToAgent::Quiesce`].
        attempt: u64,
        /// Why, and what to change, for the user.
        reason: String,
    },
    /// The process's steps of NCCL, at each change while a cut is wanted; see [`ToAgent::Cut`].
    Steps {
        /// The state of the process's collective clock.
        report: ckpt_cut::Report,
    },
    /// Requests how much memory the driver holds for this process on its GPUs: what its restore will take. Only if
    /// [`ToAgent::Quiesce`] offers it.
    Measure {
        /// The attempt of [`ToAgent::Quiesce`].
        attempt: u64,
    },
    /// The process can be dumped as soon as this connection is closed, which the agent does next.
    Quiesced {
        /// The attempt of [`ToAgent::Quiesce`].
        attempt: u64,
        /// The state detached from the GPU; `None` for a process that has never used one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        gpu: Option<GpuReport>,
    },
    /// The answer to [`ToAgent::Release`]. The process can only be killed.
    Released {
        /// Why its state is still on the GPU, if it is.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        problem: Option<String>,
    },
    /// The process cannot be dumped in this attempt. The agent keeps listening; the process continues unless it is lost.
    Failed {
        /// The attempt of [`ToAgent::Quiesce`].
        attempt: u64,
        /// Why, and what to change, for the user.
        reason: String,
        /// Whether the process is lost: its GPU state could not be restored.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        is_lost: bool,
    },
    /// The agent has reconnected after a checkpoint.
    #[serde(rename = "back")]
    Reconnected {
        /// The attempt for which it disconnected.
        attempt: u64,
        /// Whether the process was restored from the checkpoint's images, rather than continued after the dump.
        restored: bool,
        /// Bytes of device memory copied back from the mirror; the rest had been parked.
        #[serde(default)]
        copied_bytes: u64,
        /// Why the process's GPU state could not be restored; the process is then unusable.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        lost: Option<String>,
    },
}

/// The key of device memory that processes of a job share. Keys are random and never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "[u64; 2]", into = "[u64; 2]")]
pub struct ShareKey(pub u128);

/// The upper half first: JSON numbers have at most 64 bits.
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

/// A multicast object that processes share, as one of them knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MulticastObject {
    /// Its key.
    pub key: ShareKey,
    /// How many devices this process has added to it.
    pub devices: u32,
    /// How many devices it is to have; its owner knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub team_size: Option<u32>,
    /// Whether this process has mapped it or bound memory to it, so that all its devices were added.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_used: bool,
}

/// The multicast objects of a job, from their way off the devices in one attempt to their return.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cycle {
    /// A random number.
    pub id: u64,
    /// The IDs of the processes that have the objects, sorted.
    pub members: Vec<u32>,
}

/// The steps of a cycle that all members take together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CycleStep {
    /// This process has nothing of the objects any more. Once all have come, the objects have ended; if the attempt fails
    /// before that, they live on in the launcher.
    Down,
    /// Objects that had ended are there again, and this process has added its devices.
    Added,
    /// Memory is bound, and the objects are mapped.
    Bound,
}

/// How far the members of a cycle are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Progress {
    /// Not all have come to the step.
    Pending,
    /// All have.
    Complete,
    /// The attempt has failed, or a process has ended that is needed.
    Failed,
}

/// What an agent expects of its next capture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpectedChanges {
    /// The number of the last capture, see [`Capture::number`].
    pub captures: u64,
    /// How much of a partial mirror the agent allocates before the capture, in bytes: what the last capture has written, and
    /// memory of which nothing is known.
    pub bytes: u64,
}

/// The identity of an agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`PROTOCOL_VERSION`] of the agent.
    pub version: u32,
    /// The process's ID in its own PID namespace.
    pub pid: u32,
    /// Start time of the process in clock ticks since boot: field 22 of `/proc/self/stat` in the process's own time
    /// namespace; 0 if it could not be read.
    pub start_time_ticks: u64,
    /// The process's program according to `/proc/self/exe`; empty if it could not be read.
    pub exe: String,
    /// The attempt for which this agent disconnected, if it did; a [`FromAgent::Reconnected`] then follows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub away: Option<u64>,
    /// Whether the process's state is detached from the GPU, so that the agent waits for a [`ToAgent::Deliver`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_detached: bool,
    /// Whether the agent supports [`ToAgent::QueryActivity`].
    #[serde(default, rename = "tells_activity", skip_serializing_if = "std::ops::Not::not")]
    pub supports_activity: bool,
    /// Whether the agent supports [`ToAgent::Release`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub supports_release: bool,
    /// Whether the agent supports [`ToAgent::Cut`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub supports_cut: bool,
    /// Whether the agent supports [`ToAgent::StageWindow`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub supports_reads: bool,
    /// Whether the agent supports [`ToAgent::DeliverWindow`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub supports_loads: bool,
    /// Whether the agent parks memory by keys. Older ones did it by numbers, which no launcher supports any more.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub parks_by_key: bool,
    /// A random number that stays the same until the process executes another program, which then has none of its memory;
    /// 0 from older agents.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub instance: u64,
}

/// The GPU state of a process at a checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuReport {
    /// The captured device memory, sorted by address.
    pub regions: Vec<Region>,
    /// The GPUs that the process has memory on; empty from older agents. An agent that reports them understands the pairs
    /// of [`ToAgent::Deliver`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<GpuUse>,
    /// The changes of the mirror; `None` without a capture, and from older agents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capture: Option<Box<Capture>>,
    /// Live objects of the driver, and allocations of the program.
    pub counts: Counts,
    /// Duration of the steps.
    pub times: StepTimes,
    /// Bytes of device memory that were parked rather than released.
    pub parked_bytes: u64,
    /// Why nothing was parked although it was requested, for the user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unparked_because: Option<String>,
    /// Reasons for slow steps and for missing information, for the user.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub remarks: Vec<String>,
    /// Memory allocated by graphs, per device. It is in no region, since the driver saves it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub graph_memory: Vec<GraphMemory>,
    /// The call stacks that [`Region::origin`] refers to, innermost call first. Each entry is a file and an offset, with
    /// the function if known: `FILE+0xOFFSET (FUNCTION+0xOFFSET)`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub origins: Vec<Vec<String>>,
    /// UUIDs of the driver's private tables that the process has requested (cuGetExportTable). The interposer does not see
    /// calls through them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub private_tables: Vec<String>,
}

/// A GPU that a process has memory on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuUse {
    /// The process's ordinal of the device, as in [`Region::device`].
    pub device: i32,
    /// Its UUID as NVML writes it: `GPU-` and groups of hexadecimal digits.
    pub uuid: String,
    /// Memory that the driver's restore will take on it, in bytes: contexts, and memory that the driver saves. `None` if
    /// NVML does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver_bytes: Option<u64>,
}

/// Memory of a GPU that the driver holds for a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriverMemory {
    /// The GPU's UUID, as in [`GpuUse::uuid`].
    pub uuid: String,
    /// In bytes.
    pub bytes: u64,
}

/// A GPU of a process, and the GPU that takes its place; UUIDs as in [`GpuUse::uuid`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuPair {
    /// The GPU that the process was detached from.
    pub old: String,
    /// The GPU that the process is attached to.
    pub new: String,
}

/// The changes that a capture made to the mirror.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capture {
    /// The number of the mirror, from [`ToAgent::Stage`].
    pub mirror: u64,
    /// The sequence number of the capture in the process. It counts every capture that was begun, including failed ones
    /// and those without a mirror. So nothing was written to a mirror between two captures with consecutive numbers.
    pub number: u64,
    /// The ranges that were written, in bytes from the mirror's beginning: sorted, without overlaps. They may cover more
    /// than was written, never less; of a partial mirror they are exact. They are not stored in a snapshot.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub written: Vec<Range<u64>>,
}

/// Memory of the allocation nodes of graphs on a device (CUDA driver API reference, `CUgraphMem_attribute`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GraphMemory {
    /// Ordinal of the device.
    pub device: i32,
    /// Allocated bytes.
    pub used_bytes: u64,
    /// Bytes of physical memory that the driver has reserved for it.
    pub reserved_bytes: u64,
}

/// A region of physical device memory, and the offset of its content in the mirror.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Region {
    /// Its address in the process; 0 if it is not mapped.
    pub address: u64,
    /// Its length, in bytes.
    pub bytes: u64,
    /// Ordinal of the device.
    pub device: i32,
    /// Its use.
    pub kind: RegionKind,
    /// Number of the program's allocations in it.
    pub allocations: u64,
    /// The offset of its content in the mirror, in bytes.
    pub offset: u64,
    /// Bytes changed since the previous capture; `None` if the change was not determined and all of it was copied.
    #[serde(default)]
    pub changed_bytes: Option<u64>,
    /// Its special properties.
    #[serde(default, skip_serializing_if = "RegionFlags::are_none")]
    pub flags: RegionFlags,
    /// The index in [`GpuReport::origins`] of the call that allocated it, if recorded. For a slab or a pool, the call that
    /// created the region.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<usize>,
}

/// Special properties of device memory. Plain memory, used by its own process and device only, has none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RegionFlags {
    /// It stayed on the GPU while the process was dumped; the launcher held its descriptor.
    #[serde(skip_serializing_if = "is_not")]
    pub is_parked: bool,
    /// Other processes of the job may have it (cuIpcGetMemHandle, cuMemExportToShareableHandle). The launcher holds its
    /// descriptor too.
    #[serde(skip_serializing_if = "is_not")]
    pub is_shared: bool,
    /// The program requested exportable memory (`CUmemAllocationProp::requestedHandleTypes`).
    #[serde(skip_serializing_if = "is_not")]
    pub is_exportable: bool,
    /// It is memory of the host (cuMemCreate with a location of the host). The region's device is one that accesses it.
    #[serde(skip_serializing_if = "is_not")]
    pub is_of_host: bool,
    /// It may be compressed (`CU_MEM_ALLOCATION_COMP_GENERIC`).
    #[serde(skip_serializing_if = "is_not")]
    pub is_compressible: bool,
    /// Network cards may read and write it (`gpuDirectRDMACapable`).
    #[serde(skip_serializing_if = "is_not")]
    pub is_rdma_capable: bool,
    /// Number of additional addresses where it is mapped, besides [`Region::address`].
    #[serde(skip_serializing_if = "is_zero")]
    pub aliases: u64,
    /// Ordinals of the other devices that may access it, sorted.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub peers: Vec<i32>,
}

impl RegionFlags {
    /// Whether no flag is set.
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

/// The use of device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RegionKind {
    /// One allocation by cuMemAlloc or a similar function.
    Allocation,
    /// Many small allocations.
    Slab,
    /// Stream-ordered allocations.
    Pool,
    /// Memory that the program created with cuMemCreate.
    Program,
}

/// Number of objects of each type in a process.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Counts {
    /// Contexts.
    pub contexts: u64,
    /// Streams created by the program.
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

/// Duration of each step of detaching a process from its GPUs, in seconds.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct StepTimes {
    /// Waiting until no driver call was in progress and all submitted work was complete.
    pub drain_s: f64,
    /// Finding and copying changes.
    pub capture_s: f64,
    /// Unmapping, parking and releasing device memory.
    pub release_s: f64,
    /// The driver's own lock and checkpoint.
    pub driver_s: f64,
}

/// Messages from the launcher to an agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToAgent {
    /// The answer to a [`FromAgent::Hello`] with a version that the launcher supports.
    Welcome {
        /// [`PROTOCOL_VERSION`] of the launcher.
        version: u32,
    },
    /// The answer to any other Hello; the agent does not connect again.
    Refused {
        /// Why, for the user.
        reason: String,
    },
    /// Requests the GPU activity of the process; only for agents that [support](Hello::supports_activity) it.
    #[serde(rename = "look")]
    QueryActivity,
    /// The process is about to be killed: requests that the agent takes its state off the GPU, without saving it; only for
    /// agents that [support](Hello::supports_release) it.
    Release {
        /// The time for that, in milliseconds.
        timeout_ms: u64,
    },
    /// Announces a checkpoint. The job keeps running. The answer is [`FromAgent::Failed`] if the agent knows already that
    /// its process cannot be dumped.
    Prepare {
        /// The number of this attempt, which the answers repeat.
        attempt: u64,
    },
    /// The mirror; its descriptor follows.
    Stage {
        /// The attempt.
        attempt: u64,
        /// The number of the mirror. Mirrors with the same number still have the content of the last capture.
        mirror: u64,
        /// Its size in bytes, at least the requested one.
        bytes: u64,
        /// How much the agent may allocate beyond [`FromAgent::Needs::used_bytes`], in bytes: memory that the program writes
        /// until the capture. `None` if the whole mirror is allocated.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        more_bytes: Option<u64>,
        /// Whether the mirror is partial. The agent then allocates [`ExpectedChanges::bytes`], and `more_bytes` are beyond
        /// those.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        is_partial: bool,
        /// How many threads of the process copy to the mirror through pinned buffers, which each have
        /// [`COPY_BUFFERS_BYTES`]; 0: the mirror is pinned.
        #[serde(default, skip_serializing_if = "is_zero")]
        copy_threads: u64,
    },
    /// A window through which the launcher reads device memory, instead of a mirror; its descriptor follows.
    StageWindow {
        /// The attempt.
        attempt: u64,
        /// The number of the mirror that there would be, as in [`ToAgent::Stage`].
        mirror: u64,
        /// The size of that mirror, in bytes.
        bytes: u64,
        /// The size of the window, in bytes.
        window_bytes: u64,
    },
    /// Requests that the agent copies device memory to the window. It belongs to one region or several.
    Read {
        /// Where it begins, in bytes from the mirror's beginning.
        offset: u64,
        /// How much, in bytes.
        bytes: u64,
        /// Where in the window, in bytes.
        at: u64,
    },
    /// The answer to [`FromAgent::Readable`]: no more is read.
    Stored {
        /// Why the memory has not been stored, for the user.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        problem: Option<String>,
    },
    /// The attempt is cancelled: the agent releases the mirror.
    Unstage {
        /// The attempt.
        attempt: u64,
    },
    /// The answer to [`FromAgent::Park`].
    Parked {
        /// Whether the launcher keeps the descriptors.
        is_kept: bool,
    },
    /// The data that an agent needs to restore its process's state; the mirror's descriptor follows if there is one.
    Deliver {
        /// The number of the mirror.
        mirror: u64,
        /// Its size, in bytes; 0 if there is none.
        bytes: u64,
        /// Always 0. Agents that parked memory by its number expect this field.
        parked: usize,
        /// Which GPU takes the place of which, for each GPU that the driver knows in the process; empty if all are the
        /// same.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pairs: Vec<GpuPair>,
        /// Whether the mirror is partial.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        is_partial: bool,
        /// Whether the launcher frees nothing of the mirror before it is staged again, so that it may stay pinned.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        may_stay: bool,
        /// As in [`ToAgent::Stage`].
        #[serde(default, skip_serializing_if = "is_zero")]
        copy_threads: u64,
    },
    /// As [`ToAgent::Deliver`], with a window through which the agent loads the mirror's content rather than the mirror; the
    /// window's descriptor follows. Only for agents that [support](Hello::supports_loads) it.
    DeliverWindow {
        /// The number of the mirror that there would be.
        mirror: u64,
        /// The size of that mirror, in bytes.
        bytes: u64,
        /// The size of the window, in bytes.
        window_bytes: u64,
        /// As in [`ToAgent::Deliver`].
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pairs: Vec<GpuPair>,
    },
    /// The answer to [`FromAgent::Load`].
    Loaded {
        /// Why the content is not in the window, for the user.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        problem: Option<String>,
    },
    /// The answer to [`FromAgent::Fill`].
    Filled {
        /// Why the content is not in the mirror, for the user.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        problem: Option<String>,
    },
    /// The answer to [`FromAgent::Unpark`]; its descriptors follow.
    Unparked {
        /// The requested number, or 0 if the launcher does not have all of them.
        count: usize,
    },
    /// The answer to [`FromAgent::Publish`].
    Published {
        /// Whether the launcher keeps the memory.
        is_kept: bool,
    },
    /// The answer to [`FromAgent::Fetch`]; the memory's descriptor follows.
    Shared {
        /// The memory's size, in bytes.
        bytes: u64,
    },
    /// The answer to [`FromAgent::Measure`].
    Measured {
        /// What NVML says; GPUs on which the driver holds nothing for the process are missing.
        gpus: Vec<DriverMemory>,
    },
    /// The other answer to [`FromAgent::Fetch`]: the launcher does not have the memory.
    NotShared {
        /// Whether the answer is final: the owner has restored all its memory after a checkpoint without publishing this. It
        /// is not while the owner's memory is captured.
        is_final: bool,
    },
    /// The answer to [`FromAgent::Withdraw`].
    Withdrawn,
    /// The answer to [`FromAgent::Drained`].
    AllDrained {
        /// Whether all processes that share device memory have drained; if not, the attempt has failed.
        #[serde(rename = "is_so")]
        is_complete: bool,
        /// The multicast objects of the job, if there are any and the process is a member.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cycle: Option<Cycle>,
        /// Why the attempt has failed, for the user; `None` if a process was not drained.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        problem: Option<String>,
    },
    /// The answer to [`FromAgent::Arrive`].
    Arrived {
        /// Of the step.
        progress: Progress,
    },
    /// An order of the coordinator of the cut; only for agents that [support](Hello::supports_cut) it.
    Cut {
        /// The order.
        order: ckpt_cut::Order,
    },
    /// Requests that the agent detaches its process's state from the GPU and closes the connection.
    Quiesce {
        /// The attempt.
        attempt: u64,
        /// The timeout of the preparation, in milliseconds; afterwards the agent answers [`FromAgent::Failed`].
        timeout_ms: u64,
        /// Always false: this asks agents that park memory by its number.
        #[serde(default)]
        park: bool,
        /// Whether the process will continue after the dump, so that parking physical memory is worthwhile.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        park_by_key: bool,
        /// Whether the launcher answers [`FromAgent::Measure`].
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        measures: bool,
    },
}

impl FromAgent {
    /// Number of descriptors that follow this message.
    pub fn descriptors(&self) -> usize {
        match self {
            Self::Park { keys, .. } => keys.len(),
            Self::Publish { has_root, .. } => 1 + usize::from(*has_root),
            _ => 0,
        }
    }
}

impl ToAgent {
    /// Number of descriptors that follow this message.
    pub fn descriptors(&self) -> usize {
        match self {
            Self::Stage { .. }
            | Self::StageWindow { .. }
            | Self::DeliverWindow { .. }
            | Self::Shared { .. } => 1,
            Self::Deliver { bytes, .. } => usize::from(*bytes > 0),
            Self::Unparked { count } => *count,
            _ => 0,
        }
    }

    /// The launcher's answer to a Hello.
    pub fn answer(hello: &Hello) -> Self {
        if hello.version == PROTOCOL_VERSION {
            Self::Welcome { version: PROTOCOL_VERSION }
        } else {
            let reason = format!(
                "the launcher uses version {PROTOCOL_VERSION} of the agent protocol, the agent version {}",
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
            supports_activity: false,
            supports_release: false,
            supports_cut: false,
            supports_reads: false,
            supports_loads: false,
            parks_by_key: false,
            instance: 0,
        }
    }

    fn has_json<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(message: &T, text: &str) {
        assert_eq!(serde_json::to_string(message).expect("JSON"), text);
        assert_eq!(&serde_json::from_str::<T>(text).expect("a message"), message);
    }

    #[test]
    fn messages_before_a_kill_keep_their_json() {
        has_json(&ToAgent::Release { timeout_ms: 5 }, r#"{"type":"release","timeout_ms":5}"#);
        has_json(&FromAgent::Released { problem: None }, r#"{"type":"released"}"#);
    }

    /// Agents and launchers of earlier versions know of no holes in mirrors.
    #[test]
    fn messages_about_mirrors_keep_their_json() {
        let needs = |used_bytes| FromAgent::Needs {
            attempt: 1,
            mirror_bytes: 8,
            used_bytes,
            changes: None,
            ranks_on: Vec::new(),
        };
        has_json(&needs(None), r#"{"type":"needs","attempt":1,"mirror_bytes":8}"#);
        has_json(&needs(Some(0)), r#"{"type":"needs","attempt":1,"mirror_bytes":8,"used_bytes":0}"#);
        let stage = |more_bytes| ToAgent::Stage {
            attempt: 1,
            mirror: 7,
            bytes: 8,
            more_bytes,
            is_partial: false,
            copy_threads: 0,
        };
        has_json(&stage(None), r#"{"type":"stage","attempt":1,"mirror":7,"bytes":8}"#);
        has_json(&stage(Some(3)), r#"{"type":"stage","attempt":1,"mirror":7,"bytes":8,"more_bytes":3}"#);
    }

    /// For agents that support windows.
    #[test]
    fn messages_about_windows_keep_their_json() {
        has_json(
            &ToAgent::StageWindow { attempt: 1, mirror: 7, bytes: 8, window_bytes: 4 },
            r#"{"type":"stage_window","attempt":1,"mirror":7,"bytes":8,"window_bytes":4}"#,
        );
        let capture = Capture { mirror: 7, number: 3, written: vec![0..2] };
        has_json(
            &FromAgent::Readable { attempt: 1, regions: Vec::new(), capture, used: vec![0..4] },
            r#"{"type":"readable","attempt":1,"regions":[],"capture":{"mirror":7,"number":3,"written":[{"start":0,"end":2}]},"used":[{"start":0,"end":4}]}"#,
        );
        has_json(
            &ToAgent::Read { offset: 2, bytes: 4, at: 0 },
            r#"{"type":"read","offset":2,"bytes":4,"at":0}"#,
        );
        has_json(&FromAgent::Content { problem: None }, r#"{"type":"content"}"#);
        has_json(&ToAgent::Stored { problem: Some("full".into()) }, r#"{"type":"stored","problem":"full"}"#);
        has_json(
            &ToAgent::DeliverWindow { mirror: 7, bytes: 8, window_bytes: 4, pairs: Vec::new() },
            r#"{"type":"deliver_window","mirror":7,"bytes":8,"window_bytes":4}"#,
        );
        has_json(
            &FromAgent::Load { ranges: vec![0..2, 4..6], at: 2 },
            r#"{"type":"load","ranges":[{"start":0,"end":2},{"start":4,"end":6}],"at":2}"#,
        );
        has_json(&ToAgent::Loaded { problem: None }, r#"{"type":"loaded"}"#);
    }

    /// Agents and launchers of earlier versions know of no partial mirrors.
    #[test]
    fn messages_about_partial_mirrors_keep_their_json() {
        let changes = Some(ExpectedChanges { captures: 3, bytes: 4 });
        has_json(
            &FromAgent::Needs {
                attempt: 1,
                mirror_bytes: 8,
                used_bytes: Some(6),
                changes,
                ranks_on: Vec::new(),
            },
            r#"{"type":"needs","attempt":1,"mirror_bytes":8,"used_bytes":6,"changes":{"captures":3,"bytes":4}}"#,
        );
        has_json(
            &ToAgent::Stage {
                attempt: 1,
                mirror: 7,
                bytes: 8,
                more_bytes: Some(3),
                is_partial: true,
                copy_threads: 4,
            },
            r#"{"type":"stage","attempt":1,"mirror":7,"bytes":8,"more_bytes":3,"is_partial":true,"copy_threads":4}"#,
        );
        has_json(
            &ToAgent::Deliver {
                mirror: 5,
                bytes: 8,
                parked: 1,
                pairs: Vec::new(),
                is_partial: true,
                may_stay: true,
                copy_threads: 4,
            },
            r#"{"type":"deliver","mirror":5,"bytes":8,"parked":1,"is_partial":true,"may_stay":true,"copy_threads":4}"#,
        );
        has_json(
            &FromAgent::Fill { ranges: vec![0..2, 4..8] },
            r#"{"type":"fill","ranges":[{"start":0,"end":2},{"start":4,"end":8}]}"#,
        );
        has_json(&ToAgent::Filled { problem: None }, r#"{"type":"filled"}"#);
        has_json(
            &ToAgent::Filled { problem: Some("damaged".into()) },
            r#"{"type":"filled","problem":"damaged"}"#,
        );
    }

    #[test]
    fn messages_keep_their_json() {
        has_json(
            &FromAgent::Hello(hello(3, None)),
            r#"{"type":"hello","version":3,"pid":7,"start_time_ticks":99,"exe":"/bin/true"}"#,
        );
        has_json(
            &FromAgent::Hello(hello(3, Some(4))),
            r#"{"type":"hello","version":3,"pid":7,"start_time_ticks":99,"exe":"/bin/true","away":4,"is_detached":true}"#,
        );
        has_json(&FromAgent::Quiesced { attempt: u64::MAX, gpu: None }, {
            r#"{"type":"quiesced","attempt":18446744073709551615}"#
        });
        has_json(
            &FromAgent::Failed { attempt: 3, reason: "managed memory".into(), is_lost: false },
            r#"{"type":"failed","attempt":3,"reason":"managed memory"}"#,
        );
        has_json(
            &FromAgent::Reconnected { attempt: 3, restored: true, copied_bytes: 0, lost: None },
            r#"{"type":"back","attempt":3,"restored":true,"copied_bytes":0}"#,
        );
        has_json(
            &FromAgent::Reconnected {
                attempt: 3,
                restored: false,
                copied_bytes: 7,
                lost: Some("gone".into()),
            },
            r#"{"type":"back","attempt":3,"restored":false,"copied_bytes":7,"lost":"gone"}"#,
        );
    }

    #[test]
    fn messages_about_shared_memory_and_activity_keep_their_json() {
        let key = ShareKey(u128::MAX - 1);
        has_json(
            &FromAgent::Publish { pid: 7, key, bytes: 9, has_root: false, is_multicast: false, instance: 0 },
            r#"{"type":"publish","pid":7,"key":[18446744073709551615,18446744073709551614],"bytes":9}"#,
        );
        has_json(
            &FromAgent::Fetch { pid: 7, key: ShareKey(5), owner: 8, instance: 0 },
            r#"{"type":"fetch","pid":7,"key":[0,5],"owner":8}"#,
        );
        has_json(
            &FromAgent::Park { pid: 7, keys: vec![ShareKey(5)], instance: 8 },
            r#"{"type":"park","pid":7,"keys":[[0,5]],"instance":8}"#,
        );
        has_json(
            &FromAgent::Unpark { pid: 7, keys: vec![ShareKey(5)] },
            r#"{"type":"unpark","pid":7,"keys":[[0,5]]}"#,
        );
        has_json(
            &FromAgent::Withdraw { pid: 7, keys: vec![ShareKey(1 << 64)] },
            r#"{"type":"withdraw","pid":7,"keys":[[1,0]]}"#,
        );
        let with_activity = Hello { supports_activity: true, ..hello(3, None) };
        has_json(
            &FromAgent::Hello(with_activity),
            r#"{"type":"hello","version":3,"pid":7,"start_time_ticks":99,"exe":"/bin/true","tells_activity":true}"#,
        );
        has_json(&ToAgent::QueryActivity, r#"{"type":"look"}"#);
        has_json(
            &FromAgent::Activity { calls: 9, is_waiting: true, members: vec![] },
            r#"{"type":"activity","calls":9,"is_waiting":true}"#,
        );
        has_json(&ToAgent::NotShared { is_final: true }, r#"{"type":"not_shared","is_final":true}"#);
        has_json(&ToAgent::Welcome { version: 3 }, r#"{"type":"welcome","version":3}"#);
        has_json(&ToAgent::Refused { reason: "no".into() }, r#"{"type":"refused","reason":"no"}"#);
        has_json(
            &ToAgent::Quiesce {
                attempt: 3,
                timeout_ms: 500,
                park: false,
                park_by_key: true,
                measures: false,
            },
            r#"{"type":"quiesce","attempt":3,"timeout_ms":500,"park":false,"park_by_key":true}"#,
        );
    }

    #[test]
    fn messages_about_gpus_keep_their_json() {
        has_json(
            &ToAgent::Quiesce { attempt: 3, timeout_ms: 500, park: false, park_by_key: true, measures: true },
            r#"{"type":"quiesce","attempt":3,"timeout_ms":500,"park":false,"park_by_key":true,"measures":true}"#,
        );
        has_json(&FromAgent::Measure { attempt: 3 }, r#"{"type":"measure","attempt":3}"#);
        let gpus = vec![DriverMemory { uuid: "GPU-1".into(), bytes: 7 }];
        has_json(&ToAgent::Measured { gpus }, r#"{"type":"measured","gpus":[{"uuid":"GPU-1","bytes":7}]}"#);
        let deliver = |pairs| ToAgent::Deliver {
            mirror: 5,
            bytes: 0,
            parked: 1,
            pairs,
            is_partial: false,
            may_stay: false,
            copy_threads: 0,
        };
        has_json(&deliver(Vec::new()), r#"{"type":"deliver","mirror":5,"bytes":0,"parked":1}"#);
        let pairs = vec![GpuPair { old: "GPU-1".into(), new: "GPU-2".into() }];
        has_json(
            &deliver(pairs),
            r#"{"type":"deliver","mirror":5,"bytes":0,"parked":1,"pairs":[{"old":"GPU-1","new":"GPU-2"}]}"#,
        );
        let gpu = GpuUse { device: 1, uuid: "GPU-1".into(), driver_bytes: None };
        has_json(&gpu, r#"{"device":1,"uuid":"GPU-1"}"#);
        assert!(!serde_json::to_string(&GpuReport::default()).expect("JSON").contains("gpus"));
    }

    #[test]
    fn messages_about_the_cut_keep_their_json() {
        use ckpt_cut::{Member, MemberReport, Name, Order, Report, Role};
        has_json(
            &FromAgent::Hello(Hello { supports_cut: true, ..hello(3, None) }),
            r#"{"type":"hello","version":3,"pid":7,"start_time_ticks":99,"exe":"/bin/true","supports_cut":true}"#,
        );
        has_json(
            &ToAgent::Cut { order: Order::Count { attempt: 2 } },
            r#"{"type":"cut","order":{"order":"count","attempt":2}}"#,
        );
        let member = Member { communicator: Name(1 << 64 | 5), index: 3 };
        let order = Order::Reach { attempt: 2, version: 1, targets: vec![(member, 9)], is_open: false };
        has_json(
            &ToAgent::Cut { order },
            r#"{"type":"cut","order":{"order":"reach","attempt":2,"version":1,"targets":[[{"communicator":[1,5],"index":3},9]],"is_open":false}}"#,
        );
        has_json(&ToAgent::Cut { order: Order::Release }, r#"{"type":"cut","order":{"order":"release"}}"#);
        let role = Role::Communicator { awaits: Some(2), alias: None };
        let members = vec![MemberReport { member, role, sequence: 9, call: "ncclAllReduce".into() }];
        has_json(
            &FromAgent::Activity { calls: 9, is_waiting: false, members: members.clone() },
            r#"{"type":"activity","calls":9,"is_waiting":false,"members":[{"member":{"communicator":[1,5],"index":3},"role":{"communicator":{"awaits":2}},"sequence":9,"call":"ncclAllReduce"}]}"#,
        );
        let report = Report { attempt: 2, version: 1, in_call: 0, members, parked: vec![] };
        has_json(
            &FromAgent::Steps { report },
            r#"{"type":"steps","report":{"attempt":2,"version":1,"in_call":0,"members":[{"member":{"communicator":[1,5],"index":3},"role":{"communicator":{"awaits":2}},"sequence":9,"call":"ncclAllReduce"}]}}"#,
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
    fn the_same_version_is_welcome() {
        let answer = ToAgent::answer(&hello(PROTOCOL_VERSION, None));
        assert_eq!(answer, ToAgent::Welcome { version: PROTOCOL_VERSION });
    }

    /// A region without flags has the same JSON as one of older agents, which knew no flags.
    #[test]
    fn default_fields_of_a_region_are_omitted() {
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
        has_json(&region, &format!("{text}}}"));
        region.flags =
            RegionFlags { is_parked: true, aliases: 2, peers: vec![1, 3], ..RegionFlags::default() };
        region.origin = Some(5);
        let flags = r#""flags":{"is_parked":true,"aliases":2,"peers":[1,3]},"origin":5"#;
        has_json(&region, &format!("{text},{flags}}}"));
    }

    /// Reports of older agents have no capture.
    #[test]
    fn a_capture_lists_its_written_ranges() {
        let capture = |number, written| Capture { mirror: 3, number, written };
        has_json(&capture(1, Vec::new()), r#"{"mirror":3,"number":1}"#);
        has_json(
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
