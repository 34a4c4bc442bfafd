//! A fix for timer descriptors that CRIU restores incorrectly. A periodic timer that has fired and was not read has no
//! time left until it fires. CRIU arms the timer with a time of zero, which disarms it forever. This module changes the
//! time to one nanosecond, so that the timer fires immediately. The number is changed in place in `files.img` (field
//! numbers: CRIU's images/fdinfo.proto, timerfd.proto); the rest of the image stays as it is.

use super::fields::{Field, HEADER_BYTES, fields};
use crate::files::staging::StagedDir;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

const TIMER_OF_FILE: u64 = 12;
const TICKS: u64 = 5;
const SECONDS_LEFT: u64 = 7;
const NANOSECONDS_LEFT: u64 = 8;
const INTERVAL_SECONDS: u64 = 9;
const INTERVAL_NANOSECONDS: u64 = 10;

/// Arms periodic timers of the images in `dir` that CRIU would leave disarmed.
///
/// # Errors
/// When `files.img` cannot be read or changed.
pub fn arm_expired_timers(dir: &StagedDir) -> io::Result<()> {
    let Some(image) = dir.read("files.img")? else { return Ok(()) };
    let offsets = disarmed_timers(&image).ok_or_else(|| io::Error::other("cannot parse CRIU's files.img"))?;
    if offsets.is_empty() {
        return Ok(());
    }
    let file = dir.change("files.img")?;
    offsets.into_iter().try_for_each(|offset| file.write_all_at(&[1], offset as u64))
}

/// Offsets of the zeroes that have to become ones; `None` if the image cannot be parsed.
fn disarmed_timers(image: &[u8]) -> Option<Vec<usize>> {
    let mut offsets = Vec::new();
    let mut at = HEADER_BYTES;
    while at < image.len() {
        let length = u32::from_le_bytes(image.get(at..at + 4)?.try_into().ok()?) as usize;
        let entry = at + 4..at + 4 + length;
        for (number, field) in fields(image, entry.clone())? {
            if let (TIMER_OF_FILE, Field::Bytes(timer)) = (number, field) {
                offsets.extend(nanoseconds_if_disarmed(image, timer)?);
            }
        }
        at = entry.end;
    }
    Some(offsets)
}

/// The offset of a timer's nanoseconds, if CRIU would disarm the timer.
fn nanoseconds_if_disarmed(image: &[u8], range: Range<usize>) -> Option<Option<usize>> {
    let fields = fields(image, range)?;
    let number = |wanted: u64| {
        fields.iter().find_map(|(number, field)| match field {
            Field::Number { value, bytes } if *number == wanted => Some((*value, bytes.start)),
            _ => None,
        })
    };
    let value = |wanted: u64| number(wanted).map_or(0, |(value, _)| value);
    let periodic = value(INTERVAL_SECONDS) > 0 || value(INTERVAL_NANOSECONDS) > 0;
    let expired = value(TICKS) > 0 && value(SECONDS_LEFT) == 0 && value(NANOSECONDS_LEFT) == 0;
    Some(number(NANOSECONDS_LEFT).filter(|_| periodic && expired).map(|(_, at)| at))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An image with one timer: (ticks, seconds left, nanoseconds left, interval nanoseconds).
    fn image(ticks: u8, seconds: u8, nanoseconds: u8, interval: u8) -> Vec<u8> {
        let timer = [TICKS, SECONDS_LEFT, NANOSECONDS_LEFT, INTERVAL_SECONDS, INTERVAL_NANOSECONDS];
        let values = [ticks, seconds, nanoseconds, 0, interval];
        let timer: Vec<u8> =
            timer.iter().zip(values).flat_map(|(number, value)| [(number << 3) as u8, value]).collect();
        let mut entry = vec![1 << 3, 17, 2 << 3, 5, (TIMER_OF_FILE << 3) as u8 | 2, timer.len() as u8];
        entry.extend(&timer);
        let mut image = vec![0; HEADER_BYTES];
        image.extend((entry.len() as u32).to_le_bytes());
        image.extend(entry);
        image
    }

    #[test]
    fn only_expired_periodic_timers_are_changed() {
        let expired = image(1, 0, 0, 50);
        let offsets = disarmed_timers(&expired).unwrap();
        assert_eq!(offsets.len(), 1);
        assert_eq!((expired[offsets[0] - 1], expired[offsets[0]]), ((NANOSECONDS_LEFT << 3) as u8, 0));
        for other in [image(0, 0, 0, 50), image(1, 0, 9, 50), image(1, 3, 0, 50), image(1, 0, 0, 0)] {
            assert_eq!(disarmed_timers(&other), Some(Vec::new()));
        }
    }

    #[test]
    fn truncated_images_are_refused() {
        let whole = image(1, 0, 0, 50);
        for length in HEADER_BYTES + 1..whole.len() {
            assert_eq!(disarmed_timers(&whole[..length]), None, "{length}");
        }
    }
}
