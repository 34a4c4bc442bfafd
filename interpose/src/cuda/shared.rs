//! State of the whole process behind a lock.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// State behind a lock that must not be held across a driver call. A panic of ours leaves it usable.
pub(crate) struct Shared<T>(Mutex<T>);

impl<T> Shared<T> {
    pub const fn new(state: T) -> Self {
        Self(Mutex::new(state))
    }

    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
