//! Whatever a peer sends, a frame is a message or an error.

use ckpt_protocol::agent::{FromAgent, GpuReport, Hello, ToAgent};
use ckpt_protocol::control::{CONTROL_VERSION, Call, Phase, Progress, Reply, Request};
use ckpt_protocol::frame;
use ckpt_test_mutate::mutations;
use serde::Serialize;
use serde::de::DeserializeOwned;

fn framed(message: &impl Serialize) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame::write(&mut bytes, message).unwrap();
    bytes
}

/// What was read can be sent on.
fn reads<T: Serialize + DeserializeOwned>(mut bytes: &[u8]) {
    while let Ok(message) = frame::read::<T>(&mut bytes) {
        frame::read::<T>(&mut &framed(&message)[..]).unwrap();
    }
}

#[test]
fn any_bytes_are_messages_or_errors() {
    let hello = Hello {
        version: 1,
        pid: 7,
        start_time_ticks: 8,
        exe: "/bin/true".to_owned(),
        away: Some(3),
        is_detached: true,
        supports_activity: true,
        supports_release: true,
        supports_cut: false,
        supports_reads: false,
        supports_loads: false,
        parks_by_key: false,
        instance: 0,
    };
    let progress = Progress { phase: Phase::Persist, done_bytes: 3, total_bytes: 10 };
    let samples = [
        framed(&FromAgent::Hello(hello)),
        framed(&GpuReport { parked_bytes: 3, ..GpuReport::default() }),
        framed(&Call { version: CONTROL_VERSION, request: Request::Checkpoint }),
        framed(&Call { version: CONTROL_VERSION, request: Request::Reclaim }),
        framed(&Reply::Reclaimed),
        framed(&Reply::Progress(progress)),
        framed(&ToAgent::QueryActivity),
    ];
    mutations(&samples, |bytes| {
        reads::<FromAgent>(bytes);
        reads::<ToAgent>(bytes);
        reads::<GpuReport>(bytes);
        reads::<Call>(bytes);
        reads::<Reply>(bytes);
    });
}
