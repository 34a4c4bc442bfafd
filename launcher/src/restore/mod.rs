//! One resume.

pub mod loading;
pub mod resume;
pub mod rollback;
