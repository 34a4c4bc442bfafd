//! Frames: a little-endian length of four bytes, then that many bytes of JSON.
//!
//! ```text
//! 0        4                 4 + length
//! | length | one JSON value  |
//! ```
//!
//! A length over [`MAX_BYTES`] is refused before any allocation.

use std::io::{self, ErrorKind, Read, Write};

use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

/// The maximum length of a frame's JSON in bytes: enough for a report of some 200,000 regions of device memory.
pub const MAX_BYTES: usize = 64 << 20;

const HEADER_BYTES: usize = size_of::<u32>();

/// Why a frame could not be read or written.
#[derive(Debug, Error)]
pub enum FrameError {
    /// The peer closed the connection between two frames, which is the normal end of a conversation.
    #[error("the peer closed the connection")]
    Closed,
    /// A frame is longer than [`MAX_BYTES`]; no part of its body was read or written.
    #[error("a frame of {bytes} bytes is longer than the allowed {MAX_BYTES}")]
    TooLong {
        /// The announced length, or the length of the value, in bytes.
        bytes: usize,
    },
    /// The connection ended inside a frame.
    #[error("the connection ended after {got} of a frame's {want} bytes")]
    Truncated {
        /// The number of bytes received, including the length field.
        got: usize,
        /// The number of bytes expected, as far as known.
        want: usize,
    },
    /// A complete frame is not JSON, or not of the expected type.
    #[error("a frame does not hold the expected JSON")]
    NotJson(#[source] serde_json::Error),
    /// A value cannot be expressed as JSON.
    #[error("a message cannot be written as JSON")]
    NotSerialisable(#[source] serde_json::Error),
    /// The connection failed.
    #[error("the connection failed to {step}")]
    Io {
        /// The failed step.
        step: &'static str,
        /// The error of the system call.
        source: io::Error,
    },
}

impl FrameError {
    /// Whether the timeout of the socket expired.
    ///
    /// The connection is unusable afterwards: part of a frame may have been read already.
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::Io { source, .. }
            if matches!(source.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut))
    }
}

/// Reads one frame.
///
/// # Errors
/// [`FrameError::Closed`] if the connection ended before the frame's first byte; see [`FrameError`] for the others.
/// After any error the connection is unusable.
pub fn read<T: DeserializeOwned>(source: &mut impl Read) -> Result<T, FrameError> {
    let mut header = [0; HEADER_BYTES];
    match fill(source, &mut header, "read a frame's length")? {
        0 => return Err(FrameError::Closed),
        HEADER_BYTES => {}
        got => return Err(FrameError::Truncated { got, want: HEADER_BYTES }),
    }
    let bytes = usize::try_from(u32::from_le_bytes(header)).unwrap_or(usize::MAX);
    if bytes > MAX_BYTES {
        return Err(FrameError::TooLong { bytes });
    }
    let mut body = vec![0; bytes];
    let got = fill(source, &mut body, "read a frame's body")?;
    if got < bytes {
        return Err(FrameError::Truncated { got: HEADER_BYTES + got, want: HEADER_BYTES + bytes });
    }
    serde_json::from_slice(&body).map_err(FrameError::NotJson)
}

/// Writes one frame, with a single call to [`Write::write_all`], and flushes.
///
/// # Errors
/// [`FrameError::TooLong`] and [`FrameError::NotSerialisable`] do not affect the connection; after [`FrameError::Io`]
/// the connection is unusable.
pub fn write<T: Serialize + ?Sized>(sink: &mut impl Write, value: &T) -> Result<(), FrameError> {
    let mut frame = vec![0; HEADER_BYTES];
    serde_json::to_writer(&mut frame, value).map_err(FrameError::NotSerialisable)?;
    let bytes = frame.len() - HEADER_BYTES;
    let length = u32::try_from(bytes).ok().filter(|_| bytes <= MAX_BYTES);
    let length = length.ok_or(FrameError::TooLong { bytes })?;
    frame[..HEADER_BYTES].copy_from_slice(&length.to_le_bytes());
    sink.write_all(&frame).map_err(|source| FrameError::Io { step: "write a frame", source })?;
    sink.flush().map_err(|source| FrameError::Io { step: "flush a frame", source })
}

/// Reads until `buffer` is full or the source ends, and returns the number of bytes read.
fn fill(source: &mut impl Read, buffer: &mut [u8], step: &'static str) -> Result<usize, FrameError> {
    let mut got = 0;
    while got < buffer.len() {
        match source.read(&mut buffer[got..]) {
            Ok(0) => break,
            Ok(more) => got += more,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(source) => return Err(FrameError::Io { step, source }),
        }
    }
    Ok(got)
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Sample {
        number: u64,
        text: String,
    }

    fn sample() -> Sample {
        Sample { number: u64::MAX, text: "grün\n\0\"".into() }
    }

    fn encoded() -> Vec<u8> {
        let mut bytes = Vec::new();
        write(&mut bytes, &sample()).expect("written");
        bytes
    }

    /// Hands out one byte at a time, and an interruption before each.
    struct Trickle<'a> {
        rest: &'a [u8],
        interrupt: bool,
    }

    impl Read for Trickle<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.interrupt = !self.interrupt;
            if self.interrupt {
                return Err(ErrorKind::Interrupted.into());
            }
            let bytes = self.rest.len().min(buffer.len()).min(1);
            self.rest.read(&mut buffer[..bytes])
        }
    }

    #[test]
    fn layout_is_a_little_endian_length_and_json() {
        let mut bytes = Vec::new();
        write(&mut bytes, "ab").expect("written");
        assert_eq!(bytes, b"\x04\0\0\0\"ab\"");
    }

    #[test]
    fn frames_follow_one_another_until_the_peer_closes() {
        let bytes = [encoded(), encoded()].concat();
        let mut source = bytes.as_slice();
        assert_eq!(read::<Sample>(&mut source).expect("first"), sample());
        assert_eq!(read::<Sample>(&mut source).expect("second"), sample());
        assert!(matches!(read::<Sample>(&mut source), Err(FrameError::Closed)));
    }

    #[test]
    fn pieces_and_interruptions_do_not_matter() {
        let bytes = encoded();
        let mut source = Trickle { rest: &bytes, interrupt: false };
        assert_eq!(read::<Sample>(&mut source).expect("read"), sample());
    }

    #[test]
    fn truncation_is_detected_at_every_byte() {
        let bytes = encoded();
        for cut in 1..bytes.len() {
            let error = read::<Sample>(&mut &bytes[..cut]).expect_err("cut off");
            let FrameError::Truncated { got, want } = error else { panic!("{cut}: {error:?}") };
            assert_eq!(got, cut);
            assert_eq!(want, if cut < HEADER_BYTES { HEADER_BYTES } else { bytes.len() });
        }
    }

    #[test]
    fn the_longest_frame_passes_and_one_byte_more_does_not() {
        let longest = "x".repeat(MAX_BYTES - 2);
        let mut bytes = Vec::new();
        write(&mut bytes, &longest).expect("written");
        assert_eq!(read::<String>(&mut bytes.as_slice()).expect("read"), longest);

        let mut untouched = Vec::new();
        let error = write(&mut untouched, &format!("{longest}x")).expect_err("too long");
        assert!(matches!(error, FrameError::TooLong { bytes } if bytes == MAX_BYTES + 1));
        assert!(untouched.is_empty());
    }

    #[test]
    fn an_announced_length_over_the_bound_is_refused_unread() {
        for bytes in [MAX_BYTES + 1, u32::MAX as usize] {
            let header = u32::try_from(bytes).expect("fits").to_le_bytes();
            let mut source = header.chain(io::repeat(b' '));
            let error = read::<String>(&mut source).expect_err("too long");
            assert!(matches!(error, FrameError::TooLong { bytes: reported } if reported == bytes));
        }
    }

    #[test]
    fn unexpected_json_is_an_error_of_its_own() {
        for body in [&b""[..], b"{", b"\xff", b"[]", b"{\"number\":-1,\"text\":\"\"}", b"\"a\" \"b\""] {
            let mut bytes = u32::try_from(body.len()).expect("fits").to_le_bytes().to_vec();
            bytes.extend_from_slice(body);
            let error = read::<Sample>(&mut bytes.as_slice()).expect_err("not a sample");
            assert!(matches!(error, FrameError::NotJson(_)), "{body:?}: {error:?}");
        }
    }

    #[test]
    fn the_error_of_a_connection_names_the_step() {
        struct Broken;
        impl Read for Broken {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                Err(ErrorKind::WouldBlock.into())
            }
        }
        let error = read::<Sample>(&mut Broken).expect_err("broken");
        assert!(error.is_timeout());
        assert_eq!(error.to_string(), "the connection failed to read a frame's length");
        let mut full: &mut [u8] = &mut [0; 3];
        let error = write(&mut full, "ab").expect_err("no room");
        assert!(matches!(error, FrameError::Io { step: "write a frame", .. }));
    }
}
