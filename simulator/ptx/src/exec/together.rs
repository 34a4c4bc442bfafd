//! Shuffles, votes, matches and reductions over the lanes of a warp.

use super::block::Env;
use super::warp::Warp;
use crate::compute::lanes;
use crate::ir::{ShuffleMode, VoteMode, WarpOp};

impl Warp {
    /// Lanes lay down what others of the same operation will read.
    pub(super) fn lay_down(&mut self, env: &Env<'_>, op: &WarpOp, mask: u32) {
        let from_condition = |condition: u32, lane: usize| u64::from(condition >> lane & 1);
        match op {
            WarpOp::Shuffle { value, .. } | WarpOp::Reduce { value, .. } => {
                let value = *self.row(env.kernel, *value);
                lanes(mask).for_each(|lane| self.exchange[lane] = value[lane] & 0xffff_ffff);
            }
            WarpOp::MatchAny { value, bits, .. } | WarpOp::MatchAll { value, bits, .. } => {
                let value = *self.row(env.kernel, *value);
                lanes(mask).for_each(|lane| self.exchange[lane] = value[lane] & (u64::MAX >> (64 - bits)));
            }
            WarpOp::Vote { value, .. } | WarpOp::Ballot { value, .. } => {
                let value = self.condition(*value);
                lanes(mask).for_each(|lane| self.exchange[lane] = from_condition(value, lane));
            }
            WarpOp::Elect { .. } | WarpOp::Barrier => {}
        }
    }

    /// Gives the lanes of `mask` the result of an operation in which the lanes `all` took part.
    pub(super) fn conclude(&mut self, env: &Env<'_>, op: &WarpOp, mask: u32, all: u32) {
        let exchange = self.exchange;
        // Lanes that are equal to a value, and those that voted for something.
        let equal = |value: u64| lanes(all).filter(|l| exchange[*l] == value).fold(0, |m, l| m | 1u32 << l);
        let spread = |condition: bool| if condition { u32::MAX } else { 0 };
        match op {
            WarpOp::Shuffle { mode, to, valid, lane, clamp, .. } => {
                let (lane_row, clamp_row) = (*self.row(env.kernel, *lane), *self.row(env.kernel, *clamp));
                let mut in_range = 0;
                let mut values = exchange;
                for lane in lanes(mask) {
                    let (source, inside) =
                        shuffle_source(*mode, lane, lane_row[lane] as u32, clamp_row[lane] as u32);
                    in_range |= u32::from(inside) << lane;
                    // A lane that does not take part has no value; PTX leaves open what comes of it.
                    values[lane] = if all >> source & 1 != 0 { exchange[source] } else { exchange[lane] };
                }
                self.write(*to, mask, |lane| values[lane]);
                if let Some(valid) = valid {
                    self.set_predicate(*valid, mask, in_range);
                }
            }
            WarpOp::Vote { mode, to, .. } => {
                let votes = equal(1);
                let holds = match mode {
                    VoteMode::All => votes == all,
                    VoteMode::Any => votes != 0,
                    VoteMode::Uniform => votes == all || votes == 0,
                };
                self.set_predicate(*to, mask, spread(holds));
            }
            WarpOp::Ballot { to, .. } => self.write(*to, mask, |_| u64::from(equal(1))),
            WarpOp::MatchAny { to, .. } => self.write(*to, mask, |lane| u64::from(equal(exchange[lane]))),
            WarpOp::MatchAll { to, all: agree, .. } => {
                let same = equal(exchange[all.trailing_zeros() as usize & 31]) == all;
                self.write(*to, mask, |_| if same { u64::from(all) } else { 0 });
                if let Some(agree) = agree {
                    self.set_predicate(*agree, mask, spread(same));
                }
            }
            WarpOp::Reduce { to, combine, .. } => {
                let result = lanes(all).map(|lane| exchange[lane]).reduce(combine).unwrap_or(0);
                self.write(*to, mask, |_| result);
            }
            WarpOp::Elect { to, leader } => {
                let elected = all.trailing_zeros();
                self.write(*to, mask, |_| u64::from(elected));
                self.set_predicate(*leader, mask, 1 << (elected & 31));
            }
            WarpOp::Barrier => {}
        }
    }
}

/// The lane whose value a shuffle gives to `lane`, and whether it lies in the same segment (PTX ISA, "shfl").
fn shuffle_source(mode: ShuffleMode, lane: usize, offset: u32, clamp: u32) -> (usize, bool) {
    let (offset, segment, clamp) = (offset as i32 & 31, clamp as i32 >> 8 & 31, clamp as i32 & 31);
    let own = lane as i32;
    let last = own & segment | clamp & !segment;
    let first = own & segment;
    let (source, inside) = match mode {
        ShuffleMode::Up => (own - offset, own - offset >= last),
        ShuffleMode::Down => (own + offset, own + offset <= last),
        ShuffleMode::Butterfly => (own ^ offset, own ^ offset <= last),
        ShuffleMode::Index => {
            let source = first | offset & !segment;
            (source, source <= last)
        }
    };
    if inside { (source as usize & 31, true) } else { (lane, false) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shuffles_stay_in_their_segment() {
        // Width 32: `__shfl_up_sync` passes 0 as clamp, the others 31.
        assert_eq!(shuffle_source(ShuffleMode::Up, 5, 2, 0), (3, true));
        assert_eq!(shuffle_source(ShuffleMode::Up, 1, 2, 0), (1, false));
        assert_eq!(shuffle_source(ShuffleMode::Down, 30, 1, 31), (31, true));
        assert_eq!(shuffle_source(ShuffleMode::Down, 31, 1, 31), (31, false));
        assert_eq!(shuffle_source(ShuffleMode::Butterfly, 5, 16, 31), (21, true));
        assert_eq!(shuffle_source(ShuffleMode::Index, 5, 9, 31), (9, true));
        // Width 8: the segment mask is 0x18.
        assert_eq!(shuffle_source(ShuffleMode::Index, 13, 1, 0x181f), (9, true));
        assert_eq!(shuffle_source(ShuffleMode::Down, 14, 1, 0x181f), (15, true));
        assert_eq!(shuffle_source(ShuffleMode::Down, 15, 1, 0x181f), (15, false));
        assert_eq!(shuffle_source(ShuffleMode::Up, 8, 1, 0x1800), (8, false));
    }
}
