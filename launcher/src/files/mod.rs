//! Files: where CRIU leaves its images, and the files of the job that CRIU does not save.

pub mod directories;
pub mod links;
pub mod saved;
pub mod sources;
pub mod staging;
