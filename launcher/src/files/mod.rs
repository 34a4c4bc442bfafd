//! Files: where CRIU leaves its images, and the files of the job that CRIU does not save.

pub mod capture;
pub mod directories;
pub mod held;
pub mod history;
pub mod inventory;
pub mod leases;
pub mod links;
pub mod rules;
pub mod saved;
pub mod sources;
pub mod staging;
pub mod tracking;
pub mod walk;
