//! What the agent in a process of the job and the launcher say to each other.
//!
//! ```text
//! agent                                   launcher
//!   Hello  ------------------------------->
//!          <------------------------------- Welcome, or Refused and the end
//!                     ... the job runs ...
//!          <------------------------------- Quiesce{attempt, timeout_ms}
//!   (takes its process's state off the GPU, if it has any)
//!   Quiesced{attempt}, or Failed{attempt, reason}  ------>
//!   (Failed: the connection stays, and the job goes on as if nothing had been asked;
//!    Quiesced: closes the connection; the process is dumped; it goes on, or is restored;
//!    the state is brought back to the GPU)
//!   Hello{away: attempt}  ---------------->
//!          <------------------------------- Welcome
//!   Back{attempt, restored, lost}  ------->
//! ```
//!
//! What takes long is done while nobody waits for a message with a short limit: the GPU's state is brought back
//! before the agent connects.
//!
//! The agent speaks first, and nothing follows a [`ToAgent::Refused`]. A message with a tag that the other
//! side does not know ends the connection; fields that it does not know are skipped.

use serde::{Deserialize, Serialize};

/// The version of these messages. It changes whenever an older peer would misunderstand a newer one.
pub const PROTOCOL_VERSION: u32 = 2;

/// The environment variable that names the launcher's socket to the processes of the job.
///
/// Without it the interposer does nothing at all.
pub const SOCKET_VARIABLE: &str = "CKPT_AGENT_SOCKET";

/// What an agent says to the launcher.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FromAgent {
    /// The first message on every connection.
    Hello(Hello),
    /// Nothing in this process stands against a dump any more, once this connection is closed, which is the
    /// very next thing that the agent does.
    Quiesced {
        /// The attempt that [`ToAgent::Quiesce`] named.
        attempt: u64,
    },
    /// The process cannot be dumped this time. It runs on unharmed, and the agent goes on listening.
    Failed {
        /// The attempt that [`ToAgent::Quiesce`] named.
        attempt: u64,
        /// Why, and what to change, for people.
        reason: String,
    },
    /// The agent is back after having gone away for a checkpoint.
    Back {
        /// The attempt that it went away for.
        attempt: u64,
        /// Whether this process was made anew from the checkpoint's images, and not merely let go on.
        restored: bool,
        /// Why the process's state on the GPU could not be brought back: the process is of no use any more.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        lost: Option<String>,
    },
}

/// Who an agent is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`PROTOCOL_VERSION`] of the agent.
    pub version: u32,
    /// The process's ID in its own PID namespace.
    pub pid: u32,
    /// When the process started, in clock ticks since boot, as field 22 of `/proc/self/stat` has it in the
    /// process's own time namespace; 0 if that could not be read.
    pub start_time_ticks: u64,
    /// Where the process's program lies, as `/proc/self/exe` has it; empty if that could not be read.
    pub exe: String,
    /// The attempt that this agent went away for, if it did; a [`FromAgent::Back`] then follows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub away: Option<u64>,
}

/// What the launcher says to an agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToAgent {
    /// The answer to a [`FromAgent::Hello`] of a version that the launcher speaks.
    Welcome {
        /// [`PROTOCOL_VERSION`] of the launcher.
        version: u32,
    },
    /// The answer to any other; the agent stays silent for the rest of its process's life.
    Refused {
        /// Why, for people.
        reason: String,
    },
    /// Asks the agent to prepare its process for a dump and to close the connection.
    Quiesce {
        /// The number of this attempt, which the answers repeat.
        attempt: u64,
        /// How long the preparation may take, in milliseconds; the agent answers [`FromAgent::Failed`] after that.
        timeout_ms: u64,
    },
}

impl ToAgent {
    /// The launcher's answer to a greeting.
    pub fn answer(hello: &Hello) -> Self {
        if hello.version == PROTOCOL_VERSION {
            Self::Welcome { version: PROTOCOL_VERSION }
        } else {
            let reason = format!(
                "the launcher speaks version {PROTOCOL_VERSION} of the agent protocol, the agent version {}",
                hello.version
            );
            Self::Refused { reason }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde::de::DeserializeOwned;

    use super::*;

    fn hello(version: u32, away: Option<u64>) -> Hello {
        Hello { version, pid: 7, start_time_ticks: 99, exe: "/bin/true".into(), away }
    }

    fn stands_for<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(message: &T, text: &str) {
        assert_eq!(serde_json::to_string(message).expect("JSON"), text);
        assert_eq!(&serde_json::from_str::<T>(text).expect("a message"), message);
    }

    #[test]
    fn messages_keep_their_spelling() {
        stands_for(
            &FromAgent::Hello(hello(2, None)),
            r#"{"type":"hello","version":2,"pid":7,"start_time_ticks":99,"exe":"/bin/true"}"#,
        );
        stands_for(
            &FromAgent::Hello(hello(2, Some(4))),
            r#"{"type":"hello","version":2,"pid":7,"start_time_ticks":99,"exe":"/bin/true","away":4}"#,
        );
        stands_for(&FromAgent::Quiesced { attempt: u64::MAX }, {
            r#"{"type":"quiesced","attempt":18446744073709551615}"#
        });
        stands_for(
            &FromAgent::Failed { attempt: 3, reason: "managed memory".into() },
            r#"{"type":"failed","attempt":3,"reason":"managed memory"}"#,
        );
        stands_for(
            &FromAgent::Back { attempt: 3, restored: true, lost: None },
            r#"{"type":"back","attempt":3,"restored":true}"#,
        );
        stands_for(
            &FromAgent::Back { attempt: 3, restored: false, lost: Some("gone".into()) },
            r#"{"type":"back","attempt":3,"restored":false,"lost":"gone"}"#,
        );
        stands_for(&ToAgent::Welcome { version: 2 }, r#"{"type":"welcome","version":2}"#);
        stands_for(&ToAgent::Refused { reason: "no".into() }, r#"{"type":"refused","reason":"no"}"#);
        stands_for(
            &ToAgent::Quiesce { attempt: 3, timeout_ms: 500 },
            r#"{"type":"quiesce","attempt":3,"timeout_ms":500}"#,
        );
    }

    #[test]
    fn a_newer_hello_is_understood_well_enough_to_be_refused() {
        let text = r#"{"type":"hello","version":9,"pid":7,"start_time_ticks":99,"exe":"","new":[1]}"#;
        let FromAgent::Hello(hello) = serde_json::from_str(text).expect("a greeting") else {
            panic!("not a greeting");
        };
        let ToAgent::Refused { reason } = ToAgent::answer(&hello) else { panic!("not refused") };
        assert!(reason.contains("version 2") && reason.contains("version 9"), "{reason}");
    }

    #[test]
    fn the_own_version_is_welcome() {
        let answer = ToAgent::answer(&hello(PROTOCOL_VERSION, None));
        assert_eq!(answer, ToAgent::Welcome { version: PROTOCOL_VERSION });
    }

    #[test]
    fn an_unknown_message_is_an_error() {
        assert!(serde_json::from_str::<ToAgent>(r#"{"type":"dance"}"#).is_err());
        assert!(serde_json::from_str::<FromAgent>(r#"{"type":"dance"}"#).is_err());
    }
}
