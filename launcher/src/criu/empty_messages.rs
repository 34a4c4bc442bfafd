//! Messages of length zero for `sk-queues.img`. CRIU 4.2.1 can restore them, but does not dump them, see
//! [`Namespace::descriptor_state`](crate::namespace::Namespace::descriptor_state).

use super::fields::HEADER_BYTES;
use super::images::{COMMON_MAGIC, FILES_MAGIC, ImageError, entries, next_entry};
use super::unix_queues::{FILES, FileEntry, Holder, PacketEntry, QUEUES, QUEUES_MAGIC};
use crate::namespace::{PeekedMessage, PeekedQueue};
use prost::Message;
use std::collections::{BTreeSet, HashMap};
use std::io;

/// Why empty messages cannot be in an image.
#[derive(Debug, thiserror::Error)]
pub enum EmptyMessagesError {
    /// An image cannot be read.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// It is not known where they are, they have descriptors, or the image has other messages than the queue. These
    /// processes have the sockets.
    #[error("empty messages wait in {} unix sockets", .0.len())]
    Lost(BTreeSet<Option<Holder>>),
}

/// `sk-queues.img` with the empty messages of `queues`; `read` returns the content of an image, or `None` if CRIU did not
/// write it. `None` if nothing has to be added.
///
/// # Errors
/// When an image cannot be read, or a message would be lost.
pub fn with_empty_messages(
    read: &dyn Fn(&str) -> io::Result<Option<Vec<u8>>>,
    queues: &[PeekedQueue],
) -> Result<Option<Vec<u8>>, EmptyMessagesError> {
    if queues.is_empty() {
        return Ok(None);
    }
    let mut sockets = HashMap::new();
    entries(read, FILES, COMMON_MAGIC, FILES_MAGIC, |file: FileEntry| {
        if let Some(socket) = file.unix {
            sockets.insert(u64::from(socket.inode), file.id);
        }
    })?;
    // A socket that is not in the dump has no messages in it either.
    let queues: HashMap<u32, &PeekedQueue> =
        queues.iter().filter_map(|queue| Some((*sockets.get(&queue.inode)?, queue))).collect();
    let image = read(QUEUES).map_err(|source| ImageError::Io { name: QUEUES.to_owned(), source })?;
    let image = image.unwrap_or_else(|| [COMMON_MAGIC, QUEUES_MAGIC].map(u32::to_le_bytes).concat());
    let malformed = |reason: &str| ImageError::Format { name: QUEUES.to_owned(), reason: reason.to_owned() };
    let packets = packets(&image).ok_or_else(|| malformed("it is not valid"))?;
    let (changed, others): (Vec<_>, Vec<_>) =
        packets.into_iter().partition(|(packet, _)| queues.contains_key(&packet.receiver));
    let mut all = image[..HEADER_BYTES].to_vec();
    others.iter().for_each(|(_, raw)| all.extend_from_slice(raw));
    let mut lost = BTreeSet::new();
    for (&receiver, queue) in &queues {
        let dumped = changed.iter().filter(|(packet, _)| packet.receiver == receiver);
        let dumped: Vec<_> = dumped.map(|(packet, raw)| (packet.bytes as usize, *raw)).collect();
        match queue.messages.as_ref().and_then(|messages| completed(receiver, messages, &dumped)) {
            Some(entries) => all.extend(entries),
            None => _ = lost.insert(Some(Holder { pid: queue.pid, fd: queue.fd })),
        }
    }
    if lost.is_empty() { Ok(Some(all)) } else { Err(EmptyMessagesError::Lost(lost)) }
}

/// The entries of the image, each with its bytes, which include the message's.
fn packets(image: &[u8]) -> Option<Vec<(PacketEntry, &[u8])>> {
    let mut rest = image.get(HEADER_BYTES..)?;
    let mut found = Vec::new();
    while !rest.is_empty() {
        let before = rest;
        let packet: PacketEntry = next_entry(&mut rest)?.ok()?;
        rest = rest.get(packet.bytes as usize..)?;
        found.push((packet, &before[..before.len() - rest.len()]));
    }
    Some(found)
}

/// The entries for one queue: those that CRIU has `dumped`, with the empty messages between them. `None` if a message
/// would be lost.
fn completed(receiver: u32, messages: &[PeekedMessage], dumped: &[(usize, &[u8])]) -> Option<Vec<u8>> {
    let mut all = Vec::new();
    let mut left = dumped.iter();
    for PeekedMessage { bytes, has_control, data } in messages {
        if *bytes > 0 && data.is_none() {
            let (_, raw) = left.next().filter(|(dumped, _)| dumped == bytes)?;
            all.extend_from_slice(raw);
            continue;
        }
        let data = data.as_deref().unwrap_or_default();
        if *has_control || data.len() != *bytes || !data.is_empty() && !dumped.is_empty() {
            return None;
        }
        let entry = PacketEntry { receiver, bytes: u32::try_from(*bytes).ok()?, control: Vec::new() };
        let entry = entry.encode_to_vec();
        all.extend(u32::try_from(entry.len()).ok()?.to_le_bytes());
        all.extend(entry);
        all.extend_from_slice(data);
    }
    // What was sent from outside of the job after the look.
    left.for_each(|(_, raw)| all.extend_from_slice(raw));
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::super::unix_queues::tests::{CHILDS_END, PARENTS_END, images, message};
    use super::*;

    /// The inode of the child's end.
    const INODE: u64 = 102;
    const PACKETS: u32 = 5;

    fn peeked(text: &str) -> PeekedMessage {
        PeekedMessage { bytes: text.len(), has_control: false, data: None }
    }

    fn unread(text: &str) -> PeekedMessage {
        PeekedMessage { data: (!text.is_empty()).then(|| text.into()), ..peeked(text) }
    }

    fn queue(messages: Option<Vec<PeekedMessage>>) -> PeekedQueue {
        PeekedQueue { pid: 20, fd: 3, inode: INODE, messages }
    }

    /// Receivers and lengths of the messages in the image; each is "hello".
    fn result(dumped: &[u32], messages: Option<Vec<PeekedMessage>>) -> Option<Vec<(u32, u32)>> {
        let dumped: Vec<_> = dumped.iter().map(|receiver| message(*receiver, &[])).collect();
        let image = with_empty_messages(&|name| Ok(images(PACKETS, &dumped, name)), &[queue(messages)]);
        match image {
            Ok(image) => {
                let image = image.unwrap();
                let packets = packets(&image).unwrap();
                assert!(packets.iter().all(|(packet, raw)| packet.bytes == 0 || raw.ends_with(b"hello")));
                Some(packets.iter().map(|(packet, _)| (packet.receiver, packet.bytes)).collect())
            }
            Err(EmptyMessagesError::Lost(lost)) => {
                assert_eq!(lost, BTreeSet::from([Some(Holder { pid: 20, fd: 3 })]));
                None
            }
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn empty_messages_are_put_between_the_others() {
        let dumped = [CHILDS_END, PARENTS_END, CHILDS_END];
        let messages = ["", "hello", "", "", "hello", ""].map(peeked).to_vec();
        let wanted = [(1, 5), (2, 0), (2, 5), (2, 0), (2, 0), (2, 5), (2, 0)];
        assert_eq!(result(&dumped, Some(messages)).unwrap(), wanted);
    }

    #[test]
    fn what_criu_has_not_read_is_in_the_image_too() {
        let messages = ["", "hello", ""].map(unread).to_vec();
        assert_eq!(result(&[], Some(messages)).unwrap(), [(2, 0), (2, 5), (2, 0)]);
        assert_eq!(result(&[], Some(vec![peeked("")])).unwrap(), [(2, 0)]);
    }

    #[test]
    fn later_messages_from_outside_stay() {
        let messages = ["hello", ""].map(peeked).to_vec();
        let wanted = [(2, 5), (2, 0), (2, 5)];
        assert_eq!(result(&[CHILDS_END, CHILDS_END], Some(messages)).unwrap(), wanted);
    }

    #[test]
    fn what_cannot_be_in_the_image_is_named() {
        assert_eq!(result(&[CHILDS_END], None), None);
        assert_eq!(result(&[CHILDS_END], Some(["", "four"].map(peeked).to_vec())), None);
        assert_eq!(result(&[], Some(["hello", ""].map(peeked).to_vec())), None);
        assert_eq!(result(&[CHILDS_END], Some(["", "hello"].map(unread).to_vec())), None);
        for mut messages in [vec![unread("")], vec![unread(""), unread("hello")]] {
            messages.last_mut().unwrap().has_control = true;
            assert_eq!(result(&[], Some(messages)), None);
        }
    }

    #[test]
    fn without_empty_messages_no_image_is_read() {
        let read = |_: &str| -> io::Result<Option<Vec<u8>>> { panic!("an image is read") };
        assert_eq!(with_empty_messages(&read, &[]).unwrap(), None);
    }

    #[test]
    fn any_image_is_read_or_refused() {
        let dumped = [message(CHILDS_END, &[])];
        let whole = images(PACKETS, &dumped, QUEUES).unwrap();
        ckpt_test_mutate::mutations(&[whole], |bytes| {
            let read = |name: &str| match name == QUEUES {
                true => Ok(Some(bytes.to_vec())),
                false => Ok(images(PACKETS, &dumped, name)),
            };
            let _ = with_empty_messages(&read, &[queue(Some(["hello", ""].map(peeked).to_vec()))]);
        });
    }
}
