//! The fields of protobuf messages in CRIU's images, with their offsets, to change numbers in place: the rest of an image
//! stays as it is.

use std::ops::Range;

/// The two magic numbers that an image begins with.
pub(super) const HEADER_BYTES: usize = 8;

/// A field's value.
pub(super) enum Field {
    Number { value: u64, bytes: Range<usize> },
    Bytes(Range<usize>),
    Fixed,
}

/// The numbers and values of the fields of one message. `None` if it cannot be parsed.
pub(super) fn fields(image: &[u8], range: Range<usize>) -> Option<Vec<(u64, Field)>> {
    let message = image.get(..range.end)?;
    let mut found = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let tag = varint(message, &mut at)?;
        let field = match tag & 7 {
            0 => {
                let start = at;
                Field::Number { value: varint(message, &mut at)?, bytes: start..at }
            }
            2 => {
                let length = usize::try_from(varint(message, &mut at)?).ok()?;
                let bytes = at..at.checked_add(length)?;
                at = bytes.end;
                Field::Bytes(bytes)
            }
            1 => {
                at += 8;
                Field::Fixed
            }
            5 => {
                at += 4;
                Field::Fixed
            }
            _ => return None,
        };
        found.push((tag >> 3, field));
    }
    (at == range.end).then_some(found)
}

fn varint(message: &[u8], at: &mut usize) -> Option<u64> {
    let mut value = 0_u64;
    for shift in (0..64).step_by(7) {
        let byte = *message.get(*at)?;
        *at += 1;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}
