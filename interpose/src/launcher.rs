//! The address of the launcher, and whether this process still talks to it.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use crate::socket::Address;

static ADDRESS: OnceLock<Address> = OnceLock::new();
/// Set once the agent has given up, for this process and its children.
static IS_SILENT: AtomicBool = AtomicBool::new(false);

/// Sets the launcher's address; false if it was set before.
pub fn set_address(address: Address) -> bool {
    ADDRESS.set(address).is_ok()
}

/// Stops talking to the launcher for good.
pub fn silence() {
    IS_SILENT.store(true, SeqCst);
}

/// Where the launcher listens, or will again; `None` if there is none to talk to.
pub fn address() -> Option<&'static Address> {
    ADDRESS.get().filter(|_| !IS_SILENT.load(SeqCst))
}
