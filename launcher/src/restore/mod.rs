//! One resume.

pub mod file_plan;
pub mod kept;
pub mod loading;
mod nodes;
pub mod put_back;
pub mod resume;
