//! What this process may do, and which way of running a job follows from that. docs/privileges.md has what was tried.
//!
//! ```text
//!   user ID 0 ───────────────────────► as it is
//!   others with CAP_SYS_ADMIN ───────► CRIU gets the capabilities as ambient ones, the job gets none of them
//!   others ──────────────────────────► the same, in a user namespace of their own, in which the init has every right
//! ```
//!
//! Some things the kernel does only for who has the right in the initial user namespace. Where nobody does, they are left
//! out, and what then cannot be saved refuses the checkpoint.

use rustix::process::getuid;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, capability_is_in_bounding_set, clear_ambient_capability_set,
    configure_capability_in_ambient_set, no_new_privs, set_capabilities,
};
use std::io;

/// A capability that is needed: by this name, for this.
#[derive(Clone, Copy)]
pub struct Needed {
    /// The capability.
    pub capability: CapabilitySet,
    /// Its name.
    pub name: &'static str,
    /// What for.
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
/// CRIU drops what is not in the bounding set once more, and waits for ever when it may not.
const SETPCAP: Needed =
    needed(CapabilitySet::SETPCAP, "CAP_SETPCAP", "resumed processes with a bounding set that is not full");

/// What this process may do.
#[derive(Clone, Copy, Debug)]
pub struct Privileges {
    /// Whether its user ID is 0, in whichever user namespace.
    is_root: bool,
    /// Its capabilities, in whichever user namespace.
    held: CapabilitySet,
    /// Whether it is in the initial user namespace.
    is_initial: bool,
    /// Whether the bounding set of a resumed process has to be made smaller.
    is_bounded: bool,
}

impl Privileges {
    /// Looks at this process.
    #[must_use]
    pub fn look() -> Self {
        let held = capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.effective);
        let is_initial = is_initial_user_namespace();
        let is_bounded = !no_new_privs().unwrap_or(false) && !has_full_bounding_set();
        Self { is_root: getuid().is_root(), held, is_initial, is_bounded }
    }

    /// Whether the job's namespaces have to lie in a user namespace of their own.
    #[must_use]
    pub fn wants_user_namespace(self) -> bool {
        !self.is_root && !self.has(CapabilitySet::SYS_ADMIN)
    }

    /// Whether CRIU has to accept that it may not do everything.
    #[must_use]
    pub fn is_limited(self) -> bool {
        !self.is_root || !self.has_real_rights()
    }

    /// Whether the rights of this process, or of the init that it makes, count for the whole system.
    #[must_use]
    pub fn has_real_rights(self) -> bool {
        self.is_initial && self.has(CapabilitySet::SYS_ADMIN)
    }

    /// Whether this is user ID 0 in its user namespace.
    #[must_use]
    pub fn is_root(self) -> bool {
        self.is_root
    }

    /// What any job needs that is not there: without one of them it cannot be saved, or not resumed.
    #[must_use]
    pub fn missing(self) -> Vec<Needed> {
        let mut needed = self.needed();
        needed.retain(|one| !self.has(one.capability));
        needed
    }

    /// What any job needs. In a user namespace of its own it has that.
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

    /// Whether it has this capability.
    #[must_use]
    pub fn has(self, capability: CapabilitySet) -> bool {
        self.held.contains(capability)
    }
}

/// The initial user namespace is the one that maps everybody to themselves.
fn is_initial_user_namespace() -> bool {
    std::fs::read_to_string("/proc/self/uid_map")
        .is_ok_and(|map| map.split_ascii_whitespace().eq(["0", "0", "4294967295"]))
}

fn has_full_bounding_set() -> bool {
    // Beyond the last one that the kernel knows it is an error.
    let mut answers = (0..u64::BITS)
        .map_while(|bit| capability_is_in_bounding_set(CapabilitySet::from_bits_retain(1 << bit)).ok());
    answers.all(|is_in| is_in)
}

/// Capabilities that CRIU is not given when it does not run as root: it would take them for a sign to become root.
const NOT_FOR_CRIU: CapabilitySet = CapabilitySet::SETUID.union(CapabilitySet::SETGID);

/// Makes the capabilities of this process those of the program that it is about to execute. Root has no need of it.
/// Makes system calls only.
///
/// # Errors
/// What the kernel says.
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

/// Lets the program that this process is about to execute have no capabilities: they are for ckpt-run and CRIU. Root is
/// as it was: its programs have the rights of root without ckpt-run too. Makes system calls only.
///
/// # Errors
/// What the kernel says.
pub fn keep_back() -> io::Result<()> {
    if getuid().is_root() {
        return Ok(());
    }
    clear_ambient_capability_set()?;
    let sets = capabilities(None)?;
    Ok(set_capabilities(None, CapabilitySets { inheritable: CapabilitySet::empty(), ..sets })?)
}
