//! Which memory of this process others may open.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use ckpt_protocol::agent::ShareKey as Key;

use super::launcher::NOTICES;
use crate::cuda::memory::physical::Id;
use crate::cuda::shared::Shared;
use crate::fork;
use crate::link::Link;

/// The key of each physical allocation that others may open.
pub(super) static PUBLISHED: Shared<BTreeMap<Id, Key>> = Shared::new(BTreeMap::new());

static WAS_PUBLISHED: AtomicBool = AtomicBool::new(false);

/// Whether this process has ever published memory, so that it is likely to do so again.
pub(crate) fn was_published() -> bool {
    WAS_PUBLISHED.load(Relaxed)
}

/// Records that the launcher has the memory of a physical allocation under a key. Returns the allocation's key, which is
/// another one if another thread was faster: this one is withdrawn then.
pub(super) fn record(allocation: Id, key: Key) -> Key {
    WAS_PUBLISHED.store(true, Relaxed);
    let first = *PUBLISHED.lock().entry(allocation).or_insert(key);
    if first != key {
        NOTICES.lock().withdraw(key);
    }
    first
}

/// The key of a physical allocation of this process that others may have open; the launcher keeps the memory of such
/// a physical allocation.
pub(crate) fn key_of(allocation: Id) -> Option<Key> {
    PUBLISHED.lock().get(&allocation).copied()
}

/// A physical allocation's memory is going away: no process can open it any more.
pub(crate) fn withdraw(allocation: Id) {
    let key = PUBLISHED.lock().remove(&allocation);
    key.into_iter().for_each(withdraw_key);
}

/// Has the launcher let go of memory of this process.
pub(super) fn withdraw_key(key: Key) {
    fork::while_none(|| NOTICES.lock().withdraw(key));
    send_notices();
}

/// The same for several pieces, over this connection if it works.
pub(crate) fn withdraw_keys(keys: &[Key], launcher: &mut dyn Link) {
    if keys.is_empty() {
        return;
    }
    fork::while_none(|| {
        let mut notices = NOTICES.lock();
        keys.iter().for_each(|key| notices.withdraw(*key));
        if notices.send(launcher).is_err() {
            notices.send_now();
        }
    });
}

/// Sends what could not be sent when memory was freed; returns whether there was any, and the launcher has let go of it.
pub(crate) fn send_late() -> bool {
    fork::while_none(|| {
        let mut notices = NOTICES.lock();
        notices.has_pending() && {
            notices.send_now();
            !notices.has_pending()
        }
    })
}

/// Sends pending messages to the launcher. If that fails, they are sent with the next message.
pub(super) fn send_notices() {
    fork::while_none(|| NOTICES.lock().send_soon());
}
