//! The privileges of this process, and how jobs are run with them. See docs/privileges.md.
//!
//! ```text
//!   user ID 0 ───────────────────────► unchanged
//!   others with CAP_SYS_ADMIN ───────► CRIU gets the capabilities as ambient ones, the job gets none of them
//!   others ──────────────────────────► the same, in a new user namespace, in which the init has all capabilities
//! ```
//!
//! Some operations need a capability in the initial user namespace. Without it they are skipped, and a checkpoint of state
//! that depends on them is refused.

use rustix::process::getuid;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, capability_is_in_bounding_set, clear_ambient_capability_set,
    configure_capability_in_ambient_set, no_new_privs, set_capabilities,
};
use std::io;

/// A required capability.
#[derive(Clone, Copy)]
pub struct Needed {
    /// The capability.
    pub capability: CapabilitySet,
    /// Its name.
    pub name: &'static str,
    /// The purpose.
    pub why: &'static str,
}

const fn needed(capability: CapabilitySet, name: &'static str, why: &'static str) -> Needed {
    Needed { capability, name, why }
}

const SYS_ADMIN: Needed =
    needed(CapabilitySet::SYS_ADMIN, "CAP_SYS_ADMIN", "the job's namespaces and mounts");
const NET_ADMIN: Needed =
    needed(CapabilitySet::NET_ADMIN, "CAP_NET_ADMIN", "TCP connections, networks of CRIU's");
const SYS_CHROOT: Needed =
    needed(CapabilitySet::SYS_CHROOT, "CAP_SYS_CHROOT", "root directories of resumed processes");
const SYS_TIME: Needed =
    needed(CapabilitySet::SYS_TIME, "CAP_SYS_TIME", "the monotonic clock of a resumed job");
/// CRIU drops capabilities outside the bounding set again, and hangs when it is not allowed to.
const SETPCAP: Needed =
    needed(CapabilitySet::SETPCAP, "CAP_SETPCAP", "resumed processes with a bounding set that is not full");

/// The privileges of this process.
#[derive(Clone, Copy, Debug)]
pub struct Privileges {
    /// Whether the user ID is 0, in any user namespace.
    is_root: bool,
    /// The capabilities, in any user namespace.
    held: CapabilitySet,
    /// Whether the process is in the initial user namespace.
    is_initial: bool,
    /// Whether the bounding set of a resumed process must be reduced.
    is_bounded: bool,
}

impl Privileges {
    /// Detects the privileges of this process.
    #[must_use]
    pub fn detect() -> Self {
        let held = capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.effective);
        let is_initial = is_initial_user_namespace();
        let is_bounded = !no_new_privs().unwrap_or(false) && !has_full_bounding_set();
        Self { is_root: getuid().is_root(), held, is_initial, is_bounded }
    }

    /// Whether the namespaces of the job need a new user namespace.
    #[must_use]
    pub fn wants_user_namespace(self) -> bool {
        !self.is_root && !self.has(CapabilitySet::SYS_ADMIN)
    }

    /// Whether CRIU must run in its unprivileged mode.
    #[must_use]
    pub fn is_limited(self) -> bool {
        !self.is_root || !self.has_real_rights()
    }

    /// Whether CAP_SYS_ADMIN of this process is valid in the initial user namespace.
    #[must_use]
    pub fn has_real_rights(self) -> bool {
        self.is_initial && self.has(CapabilitySet::SYS_ADMIN)
    }

    /// Whether limits can be set above the hard limits of this process.
    #[must_use]
    pub fn may_raise_limits(self) -> bool {
        self.has_real_rights() && self.has(CapabilitySet::SYS_RESOURCE)
    }

    /// Whether the user ID is 0 in the user namespace.
    #[must_use]
    pub fn is_root(self) -> bool {
        self.is_root
    }

    /// The missing capabilities that every job needs to be saved and resumed.
    #[must_use]
    pub fn missing(self) -> Vec<Needed> {
        let mut needed = self.needed();
        needed.retain(|one| !self.has(one.capability));
        needed
    }

    /// The capabilities that every job needs. In a new user namespace it has them all.
    #[must_use]
    pub fn needed(self) -> Vec<Needed> {
        let mut needed = match (self.is_root, self.wants_user_namespace()) {
            (_, true) => return Vec::new(),
            (true, _) => vec![SYS_ADMIN, NET_ADMIN, SYS_CHROOT, SYS_TIME],
            (false, _) => vec![SYS_ADMIN],
        };
        if self.is_bounded {
            needed.push(SETPCAP);
        }
        needed
    }

    /// Whether the process has this capability.
    #[must_use]
    pub fn has(self, capability: CapabilitySet) -> bool {
        self.held.contains(capability)
    }
}

/// The initial user namespace: `USER_NS_INIT_INO` of linux/nsfs.h.
const INITIAL_USER_NAMESPACE: &str = "user:[4026531837]";

/// Needs no descriptor, so that the answer is the same when there is none left.
fn is_initial_user_namespace() -> bool {
    std::fs::read_link("/proc/self/ns/user").is_ok_and(|name| name.as_os_str() == INITIAL_USER_NAMESPACE)
}

fn has_full_bounding_set() -> bool {
    // Beyond the last capability of the kernel, the call fails.
    let mut answers = (0..u64::BITS)
        .map_while(|bit| capability_is_in_bounding_set(CapabilitySet::from_bits_retain(1 << bit)).ok());
    answers.all(|is_in| is_in)
}

/// Capabilities that an unprivileged CRIU must not have: with them, it would try to become root.
const NOT_FOR_CRIU: CapabilitySet = CapabilitySet::SETUID.union(CapabilitySet::SETGID);

/// Makes the capabilities of this process ambient, so that the next executed program has them. Does nothing for root.
/// Makes system calls only.
///
/// # Errors
/// A failed system call.
pub fn hand_on() -> io::Result<()> {
    if getuid().is_root() {
        return Ok(());
    }
    let permitted = capabilities(None)?.permitted.difference(NOT_FOR_CRIU);
    let sets = CapabilitySets { effective: permitted, permitted, inheritable: permitted };
    set_capabilities(None, sets)?;
    let each = (0..u64::BITS).map(|bit| CapabilitySet::from_bits_retain(1 << bit));
    let mut wanted = each.filter(|one| permitted.contains(*one));
    wanted.try_for_each(|one| Ok(configure_capability_in_ambient_set(one, true)?))
}

/// Removes the capabilities from the next executed program: they are for ckpt-run and CRIU only. Does nothing for root,
/// whose programs have these rights without ckpt-run too. Makes system calls only.
///
/// # Errors
/// A failed system call.
pub fn keep_back() -> io::Result<()> {
    if getuid().is_root() {
        return Ok(());
    }
    clear_ambient_capability_set()?;
    let sets = capabilities(None)?;
    Ok(set_capabilities(None, CapabilitySets { inheritable: CapabilitySet::empty(), ..sets })?)
}
