//! A fix for TCP connections with data that was not yet sent. CRIU restores such data by sending it while other processes
//! are not yet restored: packets of a connection within the job reach no socket, the kernel answers with a reset, and the
//! restore fails ("Can't restore not-sent send queue data"). CRIU's own remedy is to lock the network, for which it needs
//! iptables or nftables on the machine.
//!
//! This module makes the image say that all data was sent. CRIU then restores the data without sending anything, and
//! the kernel sends again what is not acknowledged, as after a loss on the way. The number is changed in place (field
//! numbers: CRIU's images/tcp-stream.proto).

use super::fields::{Field, HEADER_BYTES, fields};
use crate::files::staging::StagedDir;
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// Begins the names of the images, one for each connection.
const PREFIX: &str = "tcp-stream-";
const UNACKNOWLEDGED_BYTES: u64 = 3;
const UNSENT_BYTES: u64 = 12;
/// The queues' content follows the message, which is shorter than this with its length.
const MOST_BYTES: u64 = 4096;
/// What makes each byte of a number but the last.
const CONTINUES: u8 = 0x80;

/// Changes the images in `dir` so that no connection has data that was not sent. Returns whether all data was acknowledged
/// by the other end.
///
/// # Errors
/// When an image cannot be read, parsed or changed.
pub fn count_unsent_as_sent(dir: &StagedDir) -> io::Result<bool> {
    let mut are_acknowledged = true;
    for (name, _) in dir.files()?.iter().filter(|(name, _)| name.starts_with(PREFIX)) {
        let mut head = Vec::new();
        dir.open(name)?.take(MOST_BYTES).read_to_end(&mut head)?;
        let queue =
            Queue::read(&head).ok_or_else(|| io::Error::other(format!("cannot parse CRIU's {name}")))?;
        are_acknowledged &= queue.is_acknowledged;
        if let Some(number) = queue.unsent {
            let zero = zero(number.len());
            dir.change(name)?.write_all_at(&zero, number.start as u64)?;
        }
    }
    Ok(are_acknowledged)
}

/// What a connection sends.
#[derive(Debug, PartialEq, Eq)]
struct Queue {
    /// Whether the other end has acknowledged everything.
    is_acknowledged: bool,
    /// Where the image has the number of bytes that were not sent, if there are any.
    unsent: Option<Range<usize>>,
}

impl Queue {
    /// Reads the beginning of an image; `None` if it cannot be parsed.
    fn read(head: &[u8]) -> Option<Self> {
        let start = HEADER_BYTES + 4;
        let length = u32::from_le_bytes(head.get(HEADER_BYTES..start)?.try_into().ok()?) as usize;
        let mut queue = Self { is_acknowledged: true, unsent: None };
        for field in fields(head, start..start.checked_add(length)?)? {
            match field {
                (UNACKNOWLEDGED_BYTES, Field::Number { value: 1.., .. }) => queue.is_acknowledged = false,
                (UNSENT_BYTES, Field::Number { value: 1.., bytes }) => queue.unsent = Some(bytes),
                _ => {}
            }
        }
        Some(queue)
    }
}

/// Zero as a number of so many bytes.
fn zero(length: usize) -> Vec<u8> {
    let mut bytes = vec![CONTINUES; length];
    bytes[length - 1] = 0;
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use prost::Message;

    #[derive(Message)]
    struct Stream {
        #[prost(uint32, required, tag = "3")]
        queued: u32,
        #[prost(uint32, optional, tag = "12")]
        unsent: Option<u32>,
        #[prost(uint32, optional, tag = "14")]
        window: Option<u32>,
    }

    fn image(queued: u32, unsent: Option<u32>) -> Vec<u8> {
        let message = Stream { queued, unsent, window: Some(5) }.encode_to_vec();
        let mut image = vec![7; HEADER_BYTES];
        image.extend(u32::try_from(message.len()).unwrap().to_le_bytes());
        image.extend(message);
        image
    }

    #[test]
    fn the_number_becomes_zero_and_nothing_else_changes() {
        let mut changed = image(300_000, Some(290_000));
        let number = Queue::read(&changed).unwrap().unsent.unwrap();
        changed[number.clone()].copy_from_slice(&zero(number.len()));
        let read = Stream::decode(&changed[HEADER_BYTES + 4..]).unwrap();
        assert_eq!((read.queued, read.unsent, read.window), (300_000, Some(0), Some(5)));
    }

    #[test]
    fn a_connection_without_such_data_is_left_alone() {
        for unsent in [Some(0), None] {
            for (queued, is_acknowledged) in [(0, true), (300_000, false)] {
                let read = Queue::read(&image(queued, unsent)).unwrap();
                assert_eq!(read, Queue { is_acknowledged, unsent: None });
            }
        }
    }

    #[test]
    fn any_image_is_read_or_refused() {
        let samples = [image(300_000, Some(290_000)), image(300_000, None)];
        ckpt_test_mutate::mutations(&samples, |bytes| {
            if let Some(number) = Queue::read(bytes).and_then(|queue| queue.unsent) {
                assert!(number.end <= bytes.len());
            }
        });
    }
}
