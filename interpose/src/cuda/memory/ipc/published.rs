//! Which memory of this process others may open.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ckpt_protocol::agent::ShareKey as Key;

use super::launcher::{connect, line};
use crate::cuda::memory::physical::Id;
use crate::fork;

/// The key of each piece that others may take up.
static PUBLISHED: Mutex<BTreeMap<Id, Key>> = Mutex::new(BTreeMap::new());

pub(super) fn published() -> MutexGuard<'static, BTreeMap<Id, Key>> {
    PUBLISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The key of a piece of this process that others may have open; the launcher keeps the memory of such a piece.
pub(crate) fn key_of(piece: Id) -> Option<Key> {
    published().get(&piece).copied()
}

/// A piece's memory is going away: nobody can open it any more.
pub(crate) fn withdraw(piece: Id) {
    let key = published().remove(&piece);
    if let Some(key) = key {
        fork::while_none(|| line().withdraw(key));
        tell();
    }
}

/// Tells the launcher what it is still to hear. If it does not listen, it hears it with what is said next: nobody
/// waits for that.
pub(super) fn tell() {
    fork::while_none(|| {
        let mut line = line();
        if line.has_news()
            && let Ok(mut launcher) = connect()
        {
            let _ = line.tell(&mut launcher);
        }
    });
}
