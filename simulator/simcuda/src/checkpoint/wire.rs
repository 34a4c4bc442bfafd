//! What a process of ours and one that asks it for an operation have in common: a page of memory and two messages.
//!
//! Both sides are on one machine, so numbers are in its byte order.

use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use cuda_abi::sys::CUresult;

use super::state::State;
use crate::error::Result;
use crate::proc_address;

/// The name under which a process's memfd is found.
pub(super) const PAGE_NAME: &str = "simcuda-control";
/// The name of the thread that carries out what others ask for.
pub(super) const THREAD_NAME: &str = "simcuda-control";
pub(super) const PAGE_BYTES: usize = 4096;
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"SIMCUDA\n");
pub(super) const VERSION: u32 = 1;
/// As many devices as the configuration allows.
pub(super) const MAX_PAIRS: usize = 64;

/// The page behind the memfd. Another process maps it too, so all of it is atomic and nothing read from it is
/// trusted.
#[repr(C)]
pub(super) struct Page {
    pub(super) magic: AtomicU64,
    pub(super) version: AtomicU32,
    /// The process's [`State`].
    pub(super) state: AtomicU32,
    /// The number of the descriptor, in the process, over which it is asked.
    pub(super) socket: AtomicI32,
    /// The number of the request of the caller that holds the file lock.
    pub(super) caller: AtomicU64,
}

/// A device by its old and its new UUID.
pub(super) type Pair = [[u8; 16]; 2];

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Operation {
    /// 0: no limit.
    Lock {
        timeout_ms: u32,
    },
    Checkpoint,
    /// No pairs: each device is the same as before.
    Restore {
        pairs: Vec<Pair>,
    },
    Unlock,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Request {
    /// Random, so that the answer to a caller that has ended is not mistaken for one's own.
    pub(super) number: u64,
    pub(super) operation: Operation,
}

pub(super) const MAX_REQUEST_BYTES: usize = 16 + MAX_PAIRS * size_of::<Pair>();
pub(super) const REPLY_BYTES: usize = 12;

impl Request {
    pub(super) fn encode(&self) -> Vec<u8> {
        let (code, timeout_ms, pairs): (u32, u32, &[Pair]) = match &self.operation {
            Operation::Lock { timeout_ms } => (1, *timeout_ms, &[]),
            Operation::Checkpoint => (2, 0, &[]),
            Operation::Restore { pairs } => (3, 0, pairs),
            Operation::Unlock => (4, 0, &[]),
        };
        let mut bytes = Vec::with_capacity(16 + size_of_val(pairs));
        bytes.extend(self.number.to_ne_bytes());
        bytes.extend(code.to_ne_bytes());
        bytes.extend(timeout_ms.to_ne_bytes());
        bytes.extend(pairs.as_flattened().as_flattened());
        bytes
    }

    /// `None` for what no caller of this version sends.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (number, rest) = bytes.split_first_chunk()?;
        let (code, rest) = rest.split_first_chunk()?;
        let (timeout_ms, rest) = rest.split_first_chunk()?;
        let (uuids, remainder) = rest.as_chunks::<16>();
        let (pairs, odd) = uuids.as_chunks::<2>();
        if !remainder.is_empty() || !odd.is_empty() {
            return None;
        }
        let timeout_ms = u32::from_ne_bytes(*timeout_ms);
        let operation = match (u32::from_ne_bytes(*code), timeout_ms, pairs) {
            (1, timeout_ms, []) => Operation::Lock { timeout_ms },
            (2, 0, []) => Operation::Checkpoint,
            (3, 0, pairs) => Operation::Restore { pairs: pairs.to_vec() },
            (4, 0, []) => Operation::Unlock,
            _ => return None,
        };
        Some(Self { number: u64::from_ne_bytes(*number), operation })
    }
}

/// The result of the request `number`.
pub(super) fn encode_reply(number: u64, result: Result) -> [u8; REPLY_BYTES] {
    let code = result.map_or_else(|error| error as u32, |()| 0);
    let mut bytes = [0; REPLY_BYTES];
    bytes[..8].copy_from_slice(&number.to_ne_bytes());
    bytes[8..].copy_from_slice(&code.to_ne_bytes());
    bytes
}

/// The number of a request and its result; `None` for what no process of this version sends.
pub(super) fn decode_reply(bytes: &[u8]) -> Option<(u64, Result)> {
    let (number, rest) = bytes.split_first_chunk()?;
    let code = u32::from_ne_bytes(rest.try_into().ok()?);
    let result = match code {
        0 => Ok(()),
        code => Err(proc_address::error_by_code(code).unwrap_or(CUresult::CUDA_ERROR_UNKNOWN)),
    };
    Some((u64::from_ne_bytes(*number), result))
}

impl Page {
    /// The state that the page says, if it says one.
    pub(super) fn state(&self) -> Option<State> {
        State::from_code(self.state.load(Ordering::Acquire))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_survive_the_way() {
        let pairs = vec![[[1; 16], [2; 16]], [[3; 16], [4; 16]]];
        for operation in [
            Operation::Lock { timeout_ms: 250 },
            Operation::Checkpoint,
            Operation::Restore { pairs: Vec::new() },
            Operation::Restore { pairs },
            Operation::Unlock,
        ] {
            let request = Request { number: 0x0123_4567_89ab_cdef, operation };
            assert_eq!(Request::decode(&request.encode()), Some(request));
        }
    }

    #[test]
    fn the_longest_request_fits() {
        let operation = Operation::Restore { pairs: vec![[[0; 16]; 2]; MAX_PAIRS] };
        assert_eq!(Request { number: 1, operation }.encode().len(), MAX_REQUEST_BYTES);
    }

    #[test]
    fn what_nobody_sends_is_refused() {
        let whole =
            Request { number: 7, operation: Operation::Restore { pairs: vec![[[9; 16]; 2]] } }.encode();
        for len in (0..16).chain(17..whole.len()) {
            assert_eq!(Request::decode(&whole[..len]), None, "{len} bytes");
        }
        let mut unknown = Request { number: 7, operation: Operation::Unlock }.encode();
        unknown[8] = 5;
        assert_eq!(Request::decode(&unknown), None);
        assert_eq!(decode_reply(&[0; 11]), None);
        assert_eq!(decode_reply(&[0; 13]), None);
    }

    #[test]
    fn replies_survive_the_way() {
        for result in [Ok(()), Err(CUresult::CUDA_ERROR_ILLEGAL_STATE)] {
            assert_eq!(decode_reply(&encode_reply(42, result)), Some((42, result)));
        }
    }
}
