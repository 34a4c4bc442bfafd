//! All checks in their order.

use crate::check::Check;
use crate::{checks, questions};

/// Every check and every question.
pub fn all() -> Vec<&'static Check> {
    let areas = [
        checks::entry::CHECKS,
        checks::init::CHECKS,
        checks::context::CHECKS,
        checks::device::CHECKS,
        checks::alloc::CHECKS,
        checks::host::CHECKS,
        checks::vmm::CHECKS,
        checks::host_vmm::CHECKS,
        checks::share::CHECKS,
        checks::multicast::CHECKS,
        checks::peer::CHECKS,
        checks::pointer::CHECKS,
        checks::pool::CHECKS,
        checks::pool_ipc::CHECKS,
        checks::stream::CHECKS,
        checks::event::CHECKS,
        checks::hostfn::CHECKS,
        checks::memop::CHECKS,
        checks::copy::CHECKS,
        checks::capture::CHECKS,
        checks::graph::CHECKS,
        checks::module::CHECKS,
        checks::launch::CHECKS,
        checks::arithmetic::CHECKS,
        checks::kernel::CHECKS,
        checks::fault::CHECKS,
        checks::checkpoint::CHECKS,
        checks::holders::CHECKS,
        checks::nccl::CHECKS,
        checks::nccl_windows::CHECKS,
        questions::CHECKS,
    ];
    areas.into_iter().flatten().collect()
}
