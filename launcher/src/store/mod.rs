//! The store: what `--store` and `--upload` name, and the tiers of a job in it.

pub mod answer;
pub mod lock_scope;
pub mod marks;
pub mod mounted;
pub mod options;
pub mod root;
pub mod tiers;
