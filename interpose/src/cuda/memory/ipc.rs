//! Device memory of one process in another.

/// Names shared memory among the processes of a job; random, so that it is never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(in crate::cuda) struct Key(pub u128);
