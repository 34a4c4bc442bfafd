//! The interface of NCCL's sockets in a job of one machine. NCCL prefers any other interface over loopback (NCCL user guide,
//! "Environment Variables"). Connections from an address of the machine do not outlive a move of the job, or a container
//! that gets another address.

use crate::process;

/// With these, the user has chosen an address.
const CHOSEN_BY: [&[u8]; 2] = [b"NCCL_SOCKET_IFNAME", b"NCCL_COMM_ID"];

/// Has NCCL use loopback, if all ranks are on this machine and the user has not chosen. To be called from the constructor
/// only: it may change the environment.
pub fn choose() {
    if CHOSEN_BY.into_iter().any(|name| process::variable(name).is_some()) {
        return;
    }
    if are_all_here(process::variable(b"WORLD_SIZE"), process::variable(b"LOCAL_WORLD_SIZE")) {
        process::set_variable("NCCL_SOCKET_IFNAME", "lo");
    }
}

/// Whether all ranks are on this machine, by the variables that torchrun gives to each: the number of ranks, and of those
/// here (PyTorch documentation, "torchrun", "Environment Variables").
fn are_all_here(all: Option<&[u8]>, here: Option<&[u8]>) -> bool {
    let number = |text: Option<&[u8]>| str::from_utf8(text?).ok()?.parse::<u32>().ok();
    number(all).is_some_and(|all| all > 1 && number(here) == Some(all))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_other_machines_are_not_here() {
        for (all, here, expected) in [
            (Some("8"), Some("8"), true),
            (Some("16"), Some("8"), false),
            (Some("8"), None, false),
            (None, Some("8"), false),
            (Some("many"), Some("many"), false),
            (Some("1"), Some("1"), false),
            (None, None, false),
        ] {
            assert_eq!(are_all_here(all.map(str::as_bytes), here.map(str::as_bytes)), expected, "{all:?}");
        }
    }
}
