//! `mbarrier` objects: 64-bit words in shared memory whose layout is up to the device.
//!
//! Ours, from bit 0: 20 bits of arrivals that a phase expects, 20 bits of arrivals still to come in this one, 21 bits
//! of bytes still to come (two's complement), and in bit 63 the parity of the phase.

use super::access::Access;
use super::block::Env;
use super::step::Flow;
use super::warp::Warp;
use crate::compute::lanes;
use crate::error::Fault;
use crate::ir::{Address, MbarrierOp, Order};
use crate::types::AddressSpace;

const COUNT_BITS: u32 = 20;
const COUNT_MASK: u64 = (1 << COUNT_BITS) - 1;
const PENDING_SHIFT: u32 = COUNT_BITS;
const BYTES_SHIFT: u32 = 2 * COUNT_BITS;
const BYTES_BITS: u32 = 21;
const BYTES_MASK: u64 = (1 << BYTES_BITS) - 1;
const PHASE_SHIFT: u32 = 63;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct State {
    expected: u64,
    pending: u64,
    bytes: i64,
    phase: u64,
}

impl State {
    fn from_word(word: u64) -> State {
        let bytes = word >> BYTES_SHIFT & BYTES_MASK;
        State {
            expected: word & COUNT_MASK,
            pending: word >> PENDING_SHIFT & COUNT_MASK,
            bytes: (bytes << (64 - BYTES_BITS)) as i64 >> (64 - BYTES_BITS),
            phase: word >> PHASE_SHIFT,
        }
    }

    fn word(self) -> u64 {
        self.expected & COUNT_MASK
            | (self.pending & COUNT_MASK) << PENDING_SHIFT
            | (self.bytes as u64 & BYTES_MASK) << BYTES_SHIFT
            | self.phase << PHASE_SHIFT
    }

    /// Begins the next phase if nothing is missing in this one.
    fn advance(mut self) -> State {
        if self.pending == 0 && self.bytes == 0 {
            self.phase ^= 1;
            self.pending = self.expected;
        }
        self
    }
}

impl Warp {
    pub(super) fn mbarrier(
        &mut self,
        env: &mut Env<'_>,
        op: MbarrierOp,
        space: AddressSpace,
        address: Address,
        mask: u32,
        line: u32,
    ) -> Result<Flow, Fault> {
        if let MbarrierOp::PendingCount { to, state } = op {
            let state = *self.row(env.kernel, state);
            self.write(to, mask, |lane| State::from_word(state[lane]).pending);
            return Ok(Flow::Next);
        }
        let (space, addresses) = self.addresses_or_fault(env, address, space, mask, line)?;
        let mut unfinished = false;
        for lane in lanes(mask) {
            let operand = |source| self.row(env.kernel, source)[lane];
            let (a, b) = match op {
                MbarrierOp::Init { count } => (operand(count), 0),
                MbarrierOp::ExpectTx { bytes } | MbarrierOp::CompleteTx { bytes } => (operand(bytes), 0),
                MbarrierOp::TestState { state, .. } => (operand(state), 0),
                MbarrierOp::TestParity { parity, .. } => (operand(parity), 0),
                MbarrierOp::Arrive { count, expect_bytes, .. } => {
                    (count.map_or(1, operand), expect_bytes.map_or(0, operand))
                }
                MbarrierOp::Invalidate | MbarrierOp::PendingCount { .. } => (0, 0),
            };
            let access = Access { space, address: addresses[lane], total_bytes: 8, write: true, lane };
            let old = match self.find(env, access, 8) {
                Ok(mut found) => found.update(0, 8, Order::AcquireRelease, |old| {
                    next_word(op, old, a & 0xffff_ffff, b & 0xffff_ffff)
                }),
                Err(trouble) => return Err(self.fault(env, trouble, line)),
            };
            let state = State::from_word(old);
            match op {
                MbarrierOp::Init { .. } if a & 0xffff_ffff == 0 || a & 0xffff_ffff > COUNT_MASK => {
                    return Err(self.illegal(env, lane, line, format!("an mbarrier for {a} arrivals")));
                }
                MbarrierOp::Arrive { .. } if a & 0xffff_ffff > state.pending => {
                    return Err(self.illegal(env, lane, line, "more arrivals than the mbarrier expects"));
                }
                MbarrierOp::Arrive { state: Some(to), .. } => self.write(to, 1 << lane, |_| old),
                MbarrierOp::TestState { done, .. } => {
                    let finished = state.phase != State::from_word(a).phase;
                    unfinished |= !finished;
                    self.set_predicate(done, 1 << lane, if finished { u32::MAX } else { 0 });
                }
                MbarrierOp::TestParity { done, .. } => {
                    let finished = state.phase != a & 1;
                    unfinished |= !finished;
                    self.set_predicate(done, 1 << lane, if finished { u32::MAX } else { 0 });
                }
                _ => {}
            }
        }
        // A lane that waits in a loop lets the others continue.
        Ok(if unfinished { Flow::Pause } else { Flow::Next })
    }
}

fn next_word(op: MbarrierOp, word: u64, a: u64, b: u64) -> u64 {
    let mut state = State::from_word(word);
    match op {
        MbarrierOp::Init { .. } => return State { expected: a, pending: a, bytes: 0, phase: 0 }.word(),
        MbarrierOp::Invalidate => return 0,
        MbarrierOp::ExpectTx { .. } => state.bytes += a as i64,
        MbarrierOp::CompleteTx { .. } => {
            state.bytes -= a as i64;
            state = state.advance();
        }
        MbarrierOp::Arrive { drop, .. } => {
            state.bytes += b as i64;
            state.pending = state.pending.saturating_sub(a);
            if drop {
                state.expected = state.expected.saturating_sub(a);
            }
            state = state.advance();
        }
        MbarrierOp::TestState { .. } | MbarrierOp::TestParity { .. } | MbarrierOp::PendingCount { .. } => {}
    }
    state.word()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_keeps_its_state() {
        for bytes in [0, 5, -5, (1 << 20) - 1, -(1 << 20)] {
            let state = State { expected: 7, pending: 3, bytes, phase: 1 };
            assert_eq!(State::from_word(state.word()), state);
        }
    }

    #[test]
    fn a_phase_ends_with_its_last_arrival_and_byte() {
        let arrive = MbarrierOp::Arrive { state: None, count: None, expect_bytes: None, drop: false };
        let source = crate::ir::Source::Constant(0);
        let mut word = next_word(MbarrierOp::Init { count: source }, 0, 2, 0);
        word = next_word(arrive, word, 1, 64);
        word = next_word(arrive, word, 1, 0);
        assert_eq!(State::from_word(word).phase, 0);
        word = next_word(MbarrierOp::CompleteTx { bytes: source }, word, 64, 0);
        assert_eq!(State::from_word(word), State { expected: 2, pending: 2, bytes: 0, phase: 1 });
    }
}
