//! The variables with which NCCL uses what CRIU can save (`--nccl`).

use crate::namespace::Network;
use serde::Deserialize;
use std::ffi::OsString;

/// The sockets of ranks on one machine. NCCL user guide, "Environment Variables": without it, NCCL prefers any other
/// interface over loopback, and the connections do not outlive a move of the job.
const INTERFACE: (&str, &str) = ("NCCL_SOCKET_IFNAME", "lo");

/// What leaves NCCL nothing but sockets (the same chapter).
const SOCKETS: [(&str, &str); 4] = [
    ("NCCL_P2P_DISABLE", "1"),
    ("NCCL_SHM_DISABLE", "1"),
    ("NCCL_NVLS_ENABLE", "0"),
    ("NCCL_IB_DISABLE", "1"),
];

/// What leaves NCCL nothing but device memory that ranks share, and sockets (the same chapter). Host memory of
/// cuMemCreate and multicast objects can be saved too, which was tried with simulated GPUs only.
const P2P: [(&str, &str); 3] =
    [("NCCL_NVLS_ENABLE", "0"), ("NCCL_CUMEM_HOST_ENABLE", "0"), ("NCCL_IB_DISABLE", "1")];

/// How NCCL connects the ranks of the job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Nccl {
    /// As it chooses.
    #[default]
    Auto,
    /// By device memory that ranks share, without multicast.
    P2p,
    /// By sockets only, of the loopback interface if all ranks are on this machine.
    Sockets,
}

impl Nccl {
    fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::P2p => "p2p",
            Self::Sockets => "sockets",
        }
    }

    fn variables(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Auto => &[],
            Self::P2p => &P2P,
            Self::Sockets => &SOCKETS,
        }
    }
}

/// Variables of the user that say the opposite.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("--nccl {how} contradicts {}: unset what is set to another value, or use --nccl auto", .set.join(", "))]
pub struct Contradiction {
    how: &'static str,
    set: Vec<String>,
}

/// The variables for a job that sees `network` and has all its ranks on this machine or not; `get` gives those of the user.
///
/// # Errors
/// When the user has set some of them to other values.
pub fn variables(
    nccl: Nccl,
    network: Network,
    is_alone: bool,
    get: impl Fn(&str) -> Option<OsString>,
) -> Result<Vec<(String, OsString)>, Contradiction> {
    let mut wanted = nccl.variables().to_vec();
    let differs = |(name, value): &&(&str, &str)| get(name).is_some_and(|given| given != *value);
    let set = |(name, _): &(&str, &str)| format!("{name}={}", get(name).unwrap_or_default().display());
    let set: Vec<_> = wanted.iter().filter(differs).map(set).collect();
    if !set.is_empty() {
        return Err(Contradiction { how: nccl.name(), set });
    }
    // A private network has no other interface when the job starts.
    let is_local = is_alone && (nccl != Nccl::Auto || network == Network::Private);
    if is_local && get(INTERFACE.0).is_none() {
        wanted.push(INTERFACE);
    }
    Ok(wanted.into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(nccl: Nccl, network: Network, user: &[(&str, &str)]) -> Result<Vec<String>, Contradiction> {
        let get = |name: &str| user.iter().find(|(set, _)| *set == name).map(|(_, value)| (*value).into());
        let variables = variables(nccl, network, true, get)?;
        Ok(variables.iter().map(|(name, value)| format!("{name}={}", value.display())).collect())
    }

    #[test]
    fn sockets_leave_nothing_else() {
        let all = [
            "NCCL_P2P_DISABLE=1",
            "NCCL_SHM_DISABLE=1",
            "NCCL_NVLS_ENABLE=0",
            "NCCL_IB_DISABLE=1",
            "NCCL_SOCKET_IFNAME=lo",
        ];
        let user = [("NCCL_SHM_DISABLE", "1"), ("NCCL_DEBUG", "INFO")];
        assert_eq!(names(Nccl::Sockets, Network::Host, &user).unwrap(), all);
    }

    #[test]
    fn p2p_leaves_out_what_cannot_be_saved() {
        let all =
            ["NCCL_NVLS_ENABLE=0", "NCCL_CUMEM_HOST_ENABLE=0", "NCCL_IB_DISABLE=1", "NCCL_SOCKET_IFNAME=lo"];
        assert_eq!(names(Nccl::P2p, Network::Host, &[]).unwrap(), all);
        let error = names(Nccl::P2p, Network::Host, &[("NCCL_NVLS_ENABLE", "1")]).unwrap_err().to_string();
        assert!(error.starts_with("--nccl p2p contradicts NCCL_NVLS_ENABLE=1: "), "{error}");
    }

    #[test]
    fn the_interface_of_the_user_counts() {
        let user = [("NCCL_SOCKET_IFNAME", "eth0")];
        assert_eq!(names(Nccl::Sockets, Network::Private, &user).unwrap().len(), SOCKETS.len());
        assert_eq!(names(Nccl::Auto, Network::Private, &user).unwrap(), [""; 0]);
        assert_eq!(names(Nccl::Auto, Network::Private, &[]).unwrap(), ["NCCL_SOCKET_IFNAME=lo"]);
        // The job may be one machine's part of a larger one.
        assert_eq!(names(Nccl::Auto, Network::Host, &[]).unwrap(), [""; 0]);
    }

    #[test]
    fn ranks_on_several_nodes_do_not_use_loopback() {
        let variables = variables(Nccl::Sockets, Network::Host, false, |_| None).unwrap();
        assert_eq!(variables.len(), SOCKETS.len());
    }

    #[test]
    fn contrary_variables_are_named() {
        let user = [("NCCL_P2P_DISABLE", "0"), ("NCCL_SHM_DISABLE", "1"), ("NCCL_NVLS_ENABLE", "2")];
        let error = names(Nccl::Sockets, Network::Host, &user).unwrap_err().to_string();
        assert!(error.contains("NCCL_P2P_DISABLE=0, NCCL_NVLS_ENABLE=2: unset"), "{error}");
        assert!(names(Nccl::Auto, Network::Host, &user).is_ok());
    }
}
