//! Whether the work of a rank's steps is still on the GPU.
//!
//! NCCL's own threads may have to call the driver before a collective ends, on this rank or on another one. So its work
//! has to end while the gate is open, on all ranks. A rank counts a step as in progress until then: the cut is reached
//! when all ranks are parked and none of them waits for another one any more, and only then do gates close.
//!
//! When the rank could stop, all streams of the process are listed, and each is polled until it was idle once. What
//! other threads submit meanwhile is none of a collective's, since those park. No stream can be in a capture then, which
//! a poll would end: a capture is a step, too.

use ckpt_cut::Report;
use cuda_abi::sys;
use cuda_abi::types::{CUcontext, CUresult, CUstream};

use super::communicators;
use crate::cuda::activation::is_started;
use crate::cuda::stream_capture::relaxed;
use crate::cuda::{context, driver, objects};

const NOT_READY: CUresult = sys::CUresult::CUDA_ERROR_NOT_READY as CUresult;

/// `CU_STREAM_LEGACY` (CUDA driver API reference, "Stream synchronization behavior"). A per-thread default stream is
/// only known to its thread.
const LEGACY: usize = 1;

/// The work that was on the GPU when the rank could have stopped.
#[derive(Default)]
pub(crate) struct InFlight {
    /// The attempt, the version of its targets, and the number of operations that the rank had begun.
    of: Option<(u64, u64, u64)>,
    /// Streams that were not idle since.
    busy: Vec<(CUcontext, CUstream)>,
}

impl InFlight {
    /// Whether there is any, for a rank that has met its targets.
    pub(super) fn is_any(&mut self, report: &Report) -> bool {
        let operations = report.members.iter().map(|member| member.sequence).sum();
        let of = Some((report.attempt, report.version, operations));
        if self.of != of {
            self.of = of;
            let is_rank = is_started() && communicators::uses_several_ranks();
            self.busy = if is_rank { streams() } else { Vec::new() };
        }
        relaxed(|| self.busy.retain(|(context, stream)| is_busy(*context, *stream)));
        !self.busy.is_empty()
    }
}

fn streams() -> Vec<(CUcontext, CUstream)> {
    let of_contexts = context::all().into_iter().map(|(context, _)| (context, LEGACY as CUstream));
    of_contexts.chain(objects::streams()).collect()
}

/// A stream that was destroyed, or has failed, is not.
fn is_busy(context: CUcontext, stream: CUstream) -> bool {
    // SAFETY: a stream that is none gives an error.
    context::within(context, || unsafe { driver::cuStreamQuery(stream) }) == Ok(NOT_READY)
}
