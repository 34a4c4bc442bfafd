//! What other folders build on and that knows nothing of jobs: errors, deadlines, privileges, facts about the machine.

pub mod authentic;
pub mod background;
pub mod deadline;
pub mod descriptor_limit;
pub mod error;
pub mod exit_status;
pub mod gpus;
pub mod host;
pub mod inherited;
pub mod letters;
pub mod memory;
pub mod mounts;
pub mod path_text;
pub mod peer;
pub mod privileges;
pub mod process_memory;
pub mod progress;
pub mod runtime_dir;
pub mod secrets;
pub mod span;
pub mod threads;
pub mod trust;
