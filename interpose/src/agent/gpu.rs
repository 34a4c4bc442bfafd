//! What the agent needs of the process's GPU state; tests replace it.

use std::time::Duration;

use ckpt_protocol::agent::GpuReport;

use crate::cuda;
use crate::cuda::activity::Activity;
use crate::cuda::{AttachError, CaptureError, Delivered, DetachError};
use crate::link::Link;

/// The state of the process on its GPUs, as far as the agent has to do with it.
pub(super) trait Gpu {
    /// See [`cuda::activity::read`].
    fn activity(&self) -> Activity;
    /// See [`cuda::Gpu::mirror_bytes`].
    fn mirror_bytes(&mut self) -> u64;
    /// See [`cuda::Gpu::stage`].
    fn stage(&mut self, mirror: Delivered) -> Result<(), CaptureError>;
    /// See [`cuda::Gpu::unstage`].
    fn unstage(&mut self);
    /// See [`cuda::Gpu::detach`].
    fn detach(
        &mut self,
        attempt: u64,
        timeout: Duration,
        park: bool,
        link: &mut dyn Link,
    ) -> Result<Option<GpuReport>, DetachError>;
    /// See [`cuda::Gpu::undo`].
    fn undo(&mut self, link: &mut dyn Link) -> Result<(), AttachError>;
    /// See [`cuda::Gpu::is_detached`].
    fn is_detached(&self) -> bool;
    /// See [`cuda::Gpu::attach`].
    fn attach(&mut self, mirror: Option<Delivered>, link: &mut dyn Link) -> Result<u64, AttachError>;
}

impl Gpu for cuda::Gpu {
    fn activity(&self) -> Activity {
        cuda::activity::read()
    }

    fn mirror_bytes(&mut self) -> u64 {
        self.mirror_bytes()
    }

    fn stage(&mut self, mirror: Delivered) -> Result<(), CaptureError> {
        self.stage(mirror)
    }

    fn unstage(&mut self) {
        self.unstage();
    }

    fn detach(
        &mut self,
        attempt: u64,
        timeout: Duration,
        park: bool,
        link: &mut dyn Link,
    ) -> Result<Option<GpuReport>, DetachError> {
        self.detach(attempt, timeout, park, link)
    }

    fn undo(&mut self, link: &mut dyn Link) -> Result<(), AttachError> {
        self.undo(link)
    }

    fn is_detached(&self) -> bool {
        self.is_detached()
    }

    fn attach(&mut self, mirror: Option<Delivered>, link: &mut dyn Link) -> Result<u64, AttachError> {
        self.attach(mirror, link)
    }
}
