//! One resume.

pub mod file_plan;
#[allow(unsafe_code)]
pub mod huge_pages;
pub mod kept;
mod limits;
pub mod loading;
mod nodes;
mod placing;
pub mod put_back;
mod queues;
mod read_files;
mod resets;
pub mod resume;
mod unmounted;
