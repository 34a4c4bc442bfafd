//! State that cannot be saved: calls with a permanent effect, and obstacles that the program can remove again.
//!
//! Each is identified by the name of the program's call. [`begin`] and [`end`] take no lock and no heap once a name
//! has been recorded.

use std::sync::OnceLock;
use std::sync::atomic::{
    AtomicU64,
    Ordering::{AcqRel, Acquire},
};

use cuda_abi::by_symbol;
use cuda_abi::types::CUresult;

use super::{changes, libraries, nccl};
use crate::cuda::result::SUCCESS;

/// The first call whose effect stays.
static TAINT: OnceLock<&'static str> = OnceLock::new();

/// How many obstacles there are for a call.
struct Counted {
    call: OnceLock<&'static str>,
    count: AtomicU64,
}

impl Counted {
    const fn new() -> Self {
        Self { call: OnceLock::new(), count: AtomicU64::new(0) }
    }
}

/// More than the table has names.
static COUNTED: [Counted; 64] = [const { Counted::new() }; 64];

/// The counter of a call, allocated if it has none yet; `None` if all are in use.
fn counted<'a>(places: &'a [Counted], call: &'static str) -> Option<&'a Counted> {
    places.iter().find(|place| *place.call.get_or_init(|| call) == call)
}

/// Marks the process after a call, if it succeeded.
pub(super) fn mark(symbol: &'static str, result: CUresult) {
    if result == SUCCESS {
        mark_untyped(symbol);
    }
}

/// Marks the process because of a call whose result is not known.
pub(super) fn mark_untyped(symbol: &'static str) {
    // The first one stays.
    let _ = TAINT.set(symbol);
}

/// Records something that cannot be saved; `call` has created it.
pub(crate) fn begin(call: &'static str) {
    match counted(&COUNTED, call) {
        Some(place) => _ = place.count.fetch_add(1, AcqRel),
        None => mark_untyped(call),
    }
}

/// Removes one such record: as often as [`begin`].
pub(crate) fn end(call: &'static str) {
    if let Some(place) = counted(&COUNTED, call) {
        let _ = place.count.fetch_update(AcqRel, Acquire, |count| count.checked_sub(1));
        changes::note();
    }
}

/// The reason why the process cannot be saved: the call, and what to change.
pub(super) fn obstacle() -> Option<String> {
    let permanent = TAINT.get().copied();
    let counted = || {
        let is_there = |place: &&Counted| place.count.load(Acquire) > 0;
        COUNTED.iter().find(is_there).and_then(|place| place.call.get().copied())
    };
    // NCCL and profilers first: the program cannot change how they use the driver.
    let of_libraries = nccl::obstacle().or_else(libraries::cupti::obstacle);
    of_libraries.or_else(|| permanent.or_else(counted).map(describe))
}

/// What to change about memory that processes share. NCCL does so unless its variables are set.
const SHARED: &str = "release it; if it is NCCL's, run the job with ckpt-run --nccl p2p (NCCL_NVLS_ENABLE=0 NCCL_CUMEM_HOST_ENABLE=0) or --nccl sockets (NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_NVLS_ENABLE=0)";

/// Prefixes of calls, what such calls create, and what to change. The first match is used.
const WORDS: &[(&str, &str, &str)] = &[
    ("cuMemAllocManaged", "managed memory", "free it, or allocate with cuMemAlloc (cudaMalloc)"),
    ("cuModuleGetGlobal", "a module's __managed__ variable", "unload the module, or make it __device__"),
    ("cuLibraryGetManaged", "a library's __managed__ variable", "unload the library, or make it __device__"),
    ("cuImportExternalMemory", "memory of another API", "destroy it (cuDestroyExternalMemory)"),
    ("cuExternalMemoryGetMappedBuffer", "memory of another API", "free what is mapped (cuMemFree)"),
    ("cuExternalMemory", "memory of another API", "destroy the array (cuMipmappedArrayDestroy)"),
    ("cuImportExternalSemaphore", "a semaphore of another API", "destroy it (cuDestroyExternalSemaphore)"),
    ("cuIpcGetEventHandle", "an event that is shared with other processes", "destroy it (cuEventDestroy)"),
    ("cuIpcOpenEventHandle", "an event of another process", "destroy it (cuEventDestroy)"),
    ("cuIpcGetMemHandle", "memory that is shared with other processes", SHARED),
    ("cuIpcOpenMemHandle", "memory of another process", SHARED),
    // Others may hold what was shared when the pool is destroyed, so that does not help.
    (
        "cuMemPoolExport",
        "a pool that was shared by other handles than descriptors",
        "create it with CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR alone",
    ),
    ("cuMemPoolImport", "a pool from outside the job", "share pools between processes of the job only"),
    ("cuMemCreate", "memory that is neither a device's nor the host's", SHARED),
    ("cuMemMapArrayAsync", "memory that is a part of an array", "release it"),
    ("cuMemMap", "a mapping with an offset or flags", "unmap and release the memory"),
    ("cuMemExportToShareableHandle", "memory that is shared with other processes", SHARED),
    ("cuMemImportFromShareableHandle", "memory of another process", SHARED),
    ("cuMemGetHandleForAddressRange", "memory that other devices may use", "run without GPUDirect RDMA"),
    (
        "cuMemRelease",
        "a multicast object that the driver does not release",
        "resume the job from its last snapshot",
    ),
    ("cuMulticastCreate", "a multicast object with handles other than descriptors", SHARED),
    ("cuMulticast", "a multicast object of unknown origin, or one with memory that is not known,", SHARED),
    ("cuLogicalEndpoint", "a logical endpoint", "run without"),
    ("cuGL", "memory of a graphics library", "run without graphics"),
    ("cuEGL", "memory of a graphics library", "run without graphics"),
    ("cuVDPAU", "memory of a graphics library", "run without graphics"),
    ("cuGraphics", "memory of a graphics library", "run without graphics"),
    ("cuEventCreateFromEGLSync", "an event of a graphics library", "run without graphics"),
    ("cuStreamBeginCaptureToCig", "a capture into a graphics library", "run without graphics"),
    ("cuStreamEndCaptureToCig", "a capture into a graphics library", "run without graphics"),
    ("cuCheckpoint", "a checkpoint of the program's own", "leave checkpoints to ckpt-run"),
];

fn describe(call: &str) -> String {
    if let Some((_, thing, change)) = WORDS.iter().find(|(beginning, ..)| call.starts_with(beginning)) {
        return format!("it has called {call}: {thing} cannot be saved; {change}");
    }
    let is_old = by_symbol(call).is_some_and(|row| row.class.is_none());
    let change = if is_old { "; build it with a newer CUDA, which calls its successor" } else { "" };
    format!("it has called {call}, whose effect cannot be saved{change}")
}

#[cfg(test)]
mod tests {
    use cuda_abi::{Class, ENTRY_POINTS};

    use super::*;
    use crate::cuda::driver::DriverError;
    use crate::cuda::memory::MemoryError;

    #[test]
    fn an_obstacle_is_there_as_often_as_it_has_begun() {
        assert_eq!(obstacle(), None);
        begin("cuMemAllocManaged");
        begin("cuIpcGetEventHandle");
        begin("cuMemAllocManaged");
        end("cuMemAllocManaged");
        let reason = obstacle().expect("one is left");
        assert!(reason.contains("cuMemAllocManaged: managed memory cannot be saved"), "{reason}");
        end("cuMemAllocManaged");
        // One too many changes nothing.
        end("cuMemAllocManaged");
        assert!(obstacle().is_some_and(|reason| reason.contains("cuIpcGetEventHandle")));
        end("cuIpcGetEventHandle");
        assert_eq!(obstacle(), None);
        begin("cuMemAllocManaged");
        assert!(obstacle().is_some());
        end("cuMemAllocManaged");
    }

    #[test]
    fn each_call_has_a_place_until_there_is_none() {
        let places = [const { Counted::new() }; 2];
        let is_at =
            |call, index: usize| counted(&places, call).is_some_and(|at| std::ptr::eq(at, &places[index]));
        assert!(is_at("first", 0) && is_at("second", 1) && is_at("first", 0));
        assert!(counted(&places, "third").is_none());
    }

    /// Every call that taints says what to change.
    #[test]
    fn obstacles_are_told_with_what_to_change() {
        for row in ENTRY_POINTS.iter().filter(|row| matches!(row.class, Some(Class::Taint) | None)) {
            let text = describe(row.symbol);
            assert!(text.contains(row.symbol) && text.contains("; "), "{text}");
        }
    }

    /// Whatever NCCL's ranks share: the variables with which they share nothing are named.
    #[test]
    fn what_cannot_be_shared_is_told_with_the_variables_of_nccl() {
        let of_calls =
            ["cuMemImportFromShareableHandle", "cuIpcOpenMemHandle", "cuMulticastCreate", "cuMemCreate"];
        let failed = MemoryError::Export(DriverError::new("cuMemExportToShareableHandle", 801));
        for text in of_calls.map(describe).into_iter().chain([failed.to_string()]) {
            for variable in ["NCCL_P2P_DISABLE=1", "NCCL_SHM_DISABLE=1", "NCCL_NVLS_ENABLE=0"] {
                assert!(text.contains(variable), "{variable}: {text}");
            }
        }
    }

    #[test]
    fn words_are_for_calls_that_there_are() {
        for (beginning, ..) in WORDS {
            assert!(ENTRY_POINTS.iter().any(|row| row.symbol.starts_with(beginning)), "{beginning}");
        }
    }
}
