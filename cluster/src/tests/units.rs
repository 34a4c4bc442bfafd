//! Single rules.

use std::time::Duration;

use crate::{
    AttemptId, Envelope, Log, Message, NodeId, Order, OtherVersion, PartId, PartRecord, Record, VERSION,
};

fn attempt(epoch: u64, number: u64) -> AttemptId {
    AttemptId { epoch, number }
}

fn node(rank: u32) -> NodeId {
    NodeId { rank, incarnation: 1 }
}

#[test]
fn messages_have_a_json_form_and_a_version() {
    let order = Order::Load {
        lease: Duration::from_secs(60),
        from: Some((PartId { attempt: attempt(1, 2), part: 3 }, "hash".to_owned())),
        part: 3,
        places: vec![1, 0],
    };
    let envelope = Envelope::new(7, Message::Order { to: node(1), attempt: attempt(2, 1), order });
    let text = serde_json::to_string(&envelope).unwrap();
    let read: Envelope = serde_json::from_str(&text).unwrap();
    assert_eq!(read, envelope);
    let newer = Envelope { version: VERSION + 1, ..read };
    assert_eq!(newer.open(), Err(OtherVersion { from: 7, found: VERSION + 1 }));
}

#[test]
fn a_log_takes_one_record_at_each_position() {
    let mut log = Log::default();
    log.add(0, Record::Epoch { epoch: 1, coordinator: node(0) });
    log.add(0, Record::Epoch { epoch: 2, coordinator: node(1) });
    log.add(2, Record::Epoch { epoch: 3, coordinator: node(1) });
    assert_eq!((log.end(), log.epoch()), (1, 1));
}

#[test]
fn only_parts_that_cannot_be_committed_any_more_are_garbage() {
    let mut log = Log::default();
    let parts = vec![PartRecord { rank: 0, hash: String::new() }];
    log.add(0, Record::Epoch { epoch: 1, coordinator: node(0) });
    log.add(1, Record::Snapshot { attempt: attempt(1, 2), session: attempt(1, 1), parts });
    log.add(2, Record::Epoch { epoch: 3, coordinator: node(1) });
    let of = |epoch, number| PartId { attempt: attempt(epoch, number), part: 0 };
    let all = [of(1, 2), of(1, 3), of(2, 1), of(3, 4), of(3, 5), of(4, 1)];
    assert_eq!(log.garbage(attempt(3, 5), &all), [of(1, 3), of(2, 1), of(3, 4)]);
}
