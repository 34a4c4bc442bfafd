//! Which machine this is, and which of its addresses the sockets use.

use std::ffi::{CStr, OsString};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::net::Ipv4Addr;

/// The same for all ranks on one machine: a hash of `NCCL_HOSTID`, or else of the name of the host and the number of its
/// boot (NCCL user guide, "NCCL_HOSTID").
pub(crate) fn host() -> [u8; 8] {
    let read = |path: &str| std::fs::read(path).unwrap_or_default();
    let usual = || [read("/proc/sys/kernel/hostname"), read("/proc/sys/kernel/random/boot_id")].concat();
    let mut hasher = DefaultHasher::new();
    std::env::var_os("NCCL_HOSTID").map_or_else(usual, OsString::into_encoded_bytes).hash(&mut hasher);
    hasher.finish().to_le_bytes()
}

/// An interface with an address.
struct Interface {
    name: String,
    address: Ipv4Addr,
    is_loopback: bool,
}

/// The address of the interface that `NCCL_SOCKET_IFNAME` names: a list of prefixes, `=` in front for whole names, `^`
/// for those that are not wanted. Without it: the first interface that is neither the loopback one nor Docker's, and the
/// loopback one if there is no other.
///
/// # Errors
/// If none is named so.
pub(crate) fn address() -> io::Result<Ipv4Addr> {
    let wanted = std::env::var("NCCL_SOCKET_IFNAME").unwrap_or_default();
    chosen(&interfaces()?, &wanted)
        .ok_or_else(|| io::Error::other(format!("no interface is named as NCCL_SOCKET_IFNAME={wanted} says")))
}

fn chosen(interfaces: &[Interface], wanted: &str) -> Option<Ipv4Addr> {
    let first = |test: &dyn Fn(&Interface) -> bool| {
        interfaces.iter().find(|interface| test(interface)).map(|interface| interface.address)
    };
    if wanted.is_empty() {
        let is_usual =
            |interface: &Interface| !interface.is_loopback && !interface.name.starts_with("docker");
        return first(&is_usual).or_else(|| first(&|interface| interface.is_loopback));
    }
    let (is_excluded, wanted) = wanted.strip_prefix('^').map_or((false, wanted), |names| (true, names));
    let (is_whole, names) = wanted.strip_prefix('=').map_or((false, wanted), |names| (true, names));
    let is_named = |interface: &Interface| {
        names
            .split(',')
            .any(|name| if is_whole { interface.name == name } else { interface.name.starts_with(name) })
    };
    first(&|interface| is_named(interface) != is_excluded)
}

fn interfaces() -> io::Result<Vec<Interface>> {
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: `list` is a local variable.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut found = Vec::new();
    let mut next = list;
    // SAFETY: the list ends with NULL and is freed below only.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        let is_up = entry.ifa_flags & libc::IFF_UP as u32 != 0;
        // SAFETY: the address is NULL or one of the family that it names.
        let family = unsafe { entry.ifa_addr.as_ref() }.map(|address| i32::from(address.sa_family));
        if !is_up || family != Some(libc::AF_INET) {
            continue;
        }
        // SAFETY: an address of this family is such a structure.
        let address = unsafe { entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned() };
        // SAFETY: a name ends with NUL and lives as long as the list.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) }.to_string_lossy().into_owned();
        found.push(Interface {
            name,
            address: Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr)),
            is_loopback: entry.ifa_flags & libc::IFF_LOOPBACK as u32 != 0,
        });
    }
    // SAFETY: the list is getifaddrs's, and nothing refers to it any more.
    unsafe { libc::freeifaddrs(list) };
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_prefixes_unless_they_are_said_to_be_whole() {
        let interface = |name: &str, last: u8| Interface {
            name: name.into(),
            address: Ipv4Addr::new(10, 0, 0, last),
            is_loopback: name == "lo",
        };
        let all = [interface("lo", 1), interface("docker0", 2), interface("eth0", 3), interface("eth01", 4)];
        let last = |wanted: &str| chosen(&all, wanted).map(|address| address.octets()[3]);
        assert_eq!(last(""), Some(3));
        assert_eq!(last("lo"), Some(1));
        assert_eq!(last("eth"), Some(3));
        assert_eq!(last("=eth01"), Some(4));
        assert_eq!(last("^lo,docker"), Some(3));
        assert_eq!(last("^=lo"), Some(2));
        assert_eq!(last("ib"), None);
        assert_eq!(chosen(&all[..1], "").map(|address| address.octets()[3]), Some(1));
    }
}
