//! What a thread is in the middle of: a group, or a call of NCCL that calls NCCL.

use std::sync::Arc;

use super::{Counts, Entry};

/// The state of a thread, kept in its thread-local storage.
#[derive(Default)]
pub struct Thread {
    /// Number of open groups.
    groups: u32,
    group: Counts,
    /// Number of calls that the thread is in.
    calls: u32,
}

impl Thread {
    /// A call begins. Whether it passes without being counted: another call of this thread, which is counted, has made
    /// it.
    #[inline]
    pub fn enter(&mut self) -> bool {
        self.calls += 1;
        self.calls > 1
    }

    /// The call returns.
    #[inline]
    pub fn leave(&mut self) {
        debug_assert!(self.calls > 0, "a call ends that has not begun");
        self.calls = self.calls.saturating_sub(1);
    }

    /// `ncclGroupStart`.
    #[inline]
    pub fn start_group(&mut self) {
        self.groups += 1;
    }

    /// Whether a group is open.
    #[inline]
    #[must_use]
    pub fn is_in_group(&self) -> bool {
        self.groups > 0
    }

    /// Adds operations to the open group. `false` without a group: the call is a step of its own.
    #[inline]
    pub fn add_to_group(&mut self, entry: &Arc<Entry>, operations: u32) -> bool {
        if self.is_in_group() {
            self.group.add(entry, operations);
        }
        self.is_in_group()
    }

    /// `ncclGroupEnd`. If it ends the outermost group, the operations of the group: they are one step. To be cleared
    /// after that.
    #[inline]
    pub fn end_group(&mut self) -> Option<&mut Counts> {
        self.groups = self.groups.saturating_sub(1);
        (self.groups == 0).then_some(&mut self.group)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rank::Clock;
    use crate::{Member, Name, Role};

    #[test]
    fn a_group_is_one_step_when_the_outermost_one_ends() {
        let clock = Clock::new(&["ncclGroupEnd"], || ());
        let register = |name| {
            let member = Member { communicator: Name(name), index: 0 };
            clock.register(member, Role::Communicator { awaits: None, alias: None })
        };
        let (first, second) = (register(1), register(2));
        let mut thread = Thread::default();
        assert!(!thread.add_to_group(&first, 1), "there is no group");
        thread.start_group();
        thread.start_group();
        assert!(thread.add_to_group(&first, 1));
        assert!(thread.end_group().is_none());
        assert!(thread.add_to_group(&second, 1) && thread.add_to_group(&first, 2));
        let group = thread.end_group().expect("the outermost group");
        drop(clock.begin(group.step(), 0));
        assert_eq!((first.sequence(), second.sequence()), (3, 1));
        group.clear();
        thread.start_group();
        assert!(thread.end_group().expect("the outermost group").is_empty());
    }

    #[test]
    fn calls_from_inside_calls_pass() {
        let mut thread = Thread::default();
        assert!(!thread.enter() && thread.enter());
        thread.leave();
        thread.leave();
        assert!(!thread.enter());
    }
}
