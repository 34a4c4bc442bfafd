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
const UNSENT_BYTES: u64 = 12;
/// The queues' content follows the message, which is shorter than this with its length.
const MOST_BYTES: u64 = 4096;
/// What makes each byte of a number but the last.
const CONTINUES: u8 = 0x80;

/// Changes the images in `dir` so that no connection has data that was not sent.
///
/// # Errors
/// When an image cannot be read, parsed or changed.
pub fn count_unsent_as_sent(dir: &StagedDir) -> io::Result<()> {
    for (name, _) in dir.files()?.iter().filter(|(name, _)| name.starts_with(PREFIX)) {
        let mut head = Vec::new();
        dir.open(name)?.take(MOST_BYTES).read_to_end(&mut head)?;
        let unsent = unsent(&head).ok_or_else(|| io::Error::other(format!("cannot parse CRIU's {name}")))?;
        if let Some(number) = unsent {
            let zero = zero(number.len());
            dir.change(name)?.write_all_at(&zero, number.start as u64)?;
        }
    }
    Ok(())
}

/// Where the number of bytes that were not sent is, if there are any; `None` if the image cannot be parsed.
fn unsent(head: &[u8]) -> Option<Option<Range<usize>>> {
    let start = HEADER_BYTES + 4;
    let length = u32::from_le_bytes(head.get(HEADER_BYTES..start)?.try_into().ok()?) as usize;
    let number = fields(head, start..start.checked_add(length)?)?.into_iter().find_map(|field| match field {
        (UNSENT_BYTES, Field::Number { value: 1.., bytes }) => Some(bytes),
        _ => None,
    });
    Some(number)
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

    fn image(unsent: Option<u32>) -> Vec<u8> {
        let message = Stream { queued: 300_000, unsent, window: Some(5) }.encode_to_vec();
        let mut image = vec![7; HEADER_BYTES];
        image.extend(u32::try_from(message.len()).unwrap().to_le_bytes());
        image.extend(message);
        image
    }

    #[test]
    fn the_number_becomes_zero_and_nothing_else_changes() {
        let mut changed = image(Some(290_000));
        let number = unsent(&changed).unwrap().unwrap();
        changed[number.clone()].copy_from_slice(&zero(number.len()));
        let read = Stream::decode(&changed[HEADER_BYTES + 4..]).unwrap();
        assert_eq!((read.queued, read.unsent, read.window), (300_000, Some(0), Some(5)));
    }

    #[test]
    fn a_connection_without_such_data_is_left_alone() {
        assert_eq!(unsent(&image(Some(0))), Some(None));
        assert_eq!(unsent(&image(None)), Some(None));
    }

    #[test]
    fn any_image_is_read_or_refused() {
        let samples = [image(Some(290_000)), image(None)];
        ckpt_test_mutate::mutations(&samples, |bytes| {
            if let Some(Some(number)) = unsent(bytes) {
                assert!(number.end <= bytes.len());
            }
        });
    }
}
