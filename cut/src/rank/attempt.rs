//! One attempt of a cut, as a rank sees it: whether a step may begin.

use std::collections::BTreeMap;

use crate::messages::Order;
use crate::names::Member;

/// An attempt that the rank takes part in.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Attempt {
    pub(crate) number: u64,
    /// 0 until the targets are known.
    pub(crate) version: u64,
    targets: BTreeMap<Member, u64>,
    is_open: bool,
}

impl Attempt {
    /// The state after an order.
    pub(crate) fn after(current: Option<Self>, order: Order) -> Option<Self> {
        match order {
            Order::Count { attempt: number } => {
                Some(Self { number, version: 0, targets: BTreeMap::new(), is_open: false })
            }
            Order::Reach { attempt, version, targets, is_open } => match current {
                Some(current) if current.number == attempt => {
                    Some(Self { number: attempt, version, targets: targets.into_iter().collect(), is_open })
                }
                other => other,
            },
            Order::Release => None,
        }
    }

    /// The rank has left a communicator: what it lacks there is not waited for. Otherwise steps would begin for that target,
    /// even after the cut.
    pub(crate) fn forget(&mut self, members: &[Member]) {
        self.targets.retain(|member, _| !members.contains(member));
    }

    /// Whether a step that begins now has to park: all targets are met. If one is not, the step may lie before the one
    /// that is missing, so it has to be taken, even beyond its own targets.
    pub(crate) fn parks(&self, sequence_of: impl Fn(Member) -> u64) -> bool {
        self.version == 0
            || !self.is_open && self.targets.iter().all(|(member, target)| sequence_of(*member) >= *target)
    }
}
