//! State of the whole process behind a lock.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// State behind a lock that must not be held across a driver call. A panic of ours leaves it usable.
pub(crate) struct Shared<T>(Mutex<T>);

impl<T> Shared<T> {
    pub const fn new(state: T) -> Self {
        Self(Mutex::new(state))
    }

    /// In the child of a fork, where a thread that held the lock does not exist: `None` if there was one.
    pub fn lock_after_fork(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
