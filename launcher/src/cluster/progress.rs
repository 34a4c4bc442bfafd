//! Whether the job's connections to the other nodes move on after a release.
//!
//! A connection whose packets are dropped for ever, or whose ends were saved at moments that do not fit, stands still
//! without an error. The kernel knows: something is sent and not acknowledged, however often it is repeated. When tasks are
//! released, CRIU has each end ask the other one for an acknowledgement, so one comes at once where all is well.
//!
//! A connection with nothing on its way is in order, and so is one whose other end does not read: its kernel acknowledges
//! with a window of nothing.

use super::diag::{self, Flow};
use crate::sys::deadline::{
    NODE_PROGRESS_LIMIT, NODE_PROGRESS_PATIENCE, NODE_PROGRESS_POLL_INTERVAL, NODE_PROGRESS_QUIET,
};
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// The states in which an end may wait for an acknowledgement: established, and those of a connection that is being closed.
const MAY_WAIT: [u8; 5] = [1, 4, 8, 9, 11];

/// When packets went through again, and for how long they did not.
#[derive(Clone, Copy, Debug)]
pub(super) struct Released {
    pub(super) at: Instant,
    pub(super) blocked: Duration,
}

/// A connection that stands still.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Still {
    /// The other end.
    pub(super) remote: IpAddr,
    /// Which one, for people.
    pub(super) what: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Moves,
    /// Nothing is on its way, and nothing has come.
    Quiet,
    Waits,
    Still,
}

/// How a connection does, `since` after the release and when the check has taken `waited`.
fn judge(flow: &Flow, since: Duration, waited: Duration, blocked: Duration) -> Verdict {
    if !MAY_WAIT.contains(&flow.state) || flow.acknowledged < since {
        return Verdict::Moves;
    }
    if flow.unacknowledged == 0 && flow.probes == 0 {
        return if flow.received < since { Verdict::Moves } else { Verdict::Quiet };
    }
    // The kernel repeats at intervals that double: what it repeated in vain while packets were blocked comes again after as
    // long a time.
    if waited >= NODE_PROGRESS_PATIENCE + blocked * 2 { Verdict::Still } else { Verdict::Waits }
}

/// Those of these sockets whose connections do not wait for an acknowledgement for a while already.
#[must_use]
pub fn moving(mut inodes: BTreeSet<u64>) -> BTreeSet<u64> {
    let is_standing = |flow: &Flow| {
        (flow.unacknowledged > 0 || flow.probes > 0) && flow.acknowledged >= NODE_PROGRESS_QUIET
    };
    for flow in diag::flows().unwrap_or_default().iter().filter(|flow| is_standing(flow)) {
        inodes.remove(&flow.inode);
    }
    inodes
}

/// Waits until the connections of these sockets move on. Returns one that stands still and whose other end `counts`; `None`
/// also when that cannot be told in time, or `is_over` says that nobody wants to know any more.
pub(super) fn find_still(
    inodes: &BTreeSet<u64>,
    released: Released,
    counts: impl Fn(IpAddr) -> bool,
    is_over: impl Fn() -> bool,
) -> Option<Still> {
    let (begun, mut inodes) = (Instant::now(), inodes.clone());
    while !is_over() {
        let (since, waited) = (released.at.elapsed(), begun.elapsed());
        let flows = match diag::flows() {
            Ok(flows) => flows,
            Err(error) => {
                tracing::warn!("cannot look whether the job's connections move on: {error}");
                return None;
            }
        };
        let flows = flows.iter().filter(|flow| inodes.contains(&flow.inode));
        let judged: Vec<_> = flows.map(|flow| (judge(flow, since, waited, released.blocked), flow)).collect();
        if let Some((_, flow)) = judged.iter().find(|(verdict, _)| *verdict == Verdict::Still) {
            if counts(flow.remote.ip()) {
                return Some(described(flow, since));
            }
            tracing::warn!(
                "a connection of the job to {}, which is no node of it, stands still since it was released",
                flow.remote
            );
            inodes.remove(&flow.inode);
            continue;
        }
        let has = |wanted| judged.iter().any(|(verdict, _)| *verdict == wanted);
        if !has(Verdict::Waits) && (!has(Verdict::Quiet) || waited >= NODE_PROGRESS_QUIET) {
            return None;
        }
        if waited >= NODE_PROGRESS_LIMIT {
            tracing::warn!("it cannot be told yet whether all connections of the job move on");
            return None;
        }
        std::thread::sleep(NODE_PROGRESS_POLL_INTERVAL);
    }
    None
}

fn described(flow: &Flow, since: Duration) -> Still {
    let what = format!(
        "the job's connection from {} to {} stands still: for {} s since it was released, nothing that was sent is acknowledged",
        flow.local,
        flow.remote,
        since.as_secs()
    );
    Still { remote: flow.remote.ip(), what }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd as _;

    const SECOND: Duration = Duration::from_secs(1);

    /// Released 20 s ago; what came last came before.
    fn flow() -> Flow {
        Flow {
            local: "10.0.0.1:5000".parse().unwrap(),
            remote: "10.0.0.2:40000".parse().unwrap(),
            state: 1,
            inode: 7,
            unacknowledged: 0,
            probes: 0,
            acknowledged: 30 * SECOND,
            received: 30 * SECOND,
        }
    }

    fn judged(flow: &Flow) -> Verdict {
        judge(flow, 20 * SECOND, 18 * SECOND, SECOND)
    }

    #[test]
    fn only_what_is_sent_and_never_acknowledged_stands_still() {
        assert_eq!(judged(&flow()), Verdict::Quiet);
        assert_eq!(judged(&Flow { received: SECOND, ..flow() }), Verdict::Moves);
        for waiting in [Flow { unacknowledged: 3, ..flow() }, Flow { probes: 2, ..flow() }] {
            assert_eq!(judged(&waiting), Verdict::Still);
            assert_eq!(
                judged(&Flow { received: SECOND, ..waiting.clone() }),
                Verdict::Still,
                "one direction"
            );
            // Of a window of nothing, too.
            assert_eq!(judged(&Flow { acknowledged: 19 * SECOND, ..waiting.clone() }), Verdict::Moves);
            let moments = [(2, 1, Verdict::Waits), (20, 9, Verdict::Waits), (60, 9, Verdict::Still)];
            for (waited, blocked, expected) in moments {
                let waiting = Flow { acknowledged: 900 * SECOND, ..waiting.clone() };
                let verdict = judge(&waiting, 600 * SECOND, waited * SECOND, blocked * SECOND);
                assert_eq!(verdict, expected, "{waited} {blocked}");
            }
            for state in [2, 3, 5, 6, 7] {
                assert_eq!(judged(&Flow { state, ..waiting.clone() }), Verdict::Moves, "state {state}");
            }
        }
    }

    #[test]
    fn the_message_names_both_ends() {
        let still = described(&flow(), 20 * SECOND);
        assert_eq!(still.remote.to_string(), "10.0.0.2");
        assert!(
            still.what.contains("from 10.0.0.1:5000 to 10.0.0.2:40000 stands still: for 20 s"),
            "{still:?}"
        );
    }

    /// Released long ago: only what the kernel says counts.
    #[test]
    fn another_end_that_does_not_read_is_in_order() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut own = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let other = listener.accept().unwrap().0;
        own.set_nonblocking(true).unwrap();
        while own.write(&[0; 64 << 10]).is_ok() {}
        let inodes = BTreeSet::from([rustix::fs::fstat(own.as_fd()).unwrap().st_ino]);
        let released = Released { at: Instant::now() - 3600 * SECOND, blocked: Duration::ZERO };
        assert_eq!(find_still(&inodes, released, |_| true, || false), None);
        drop(other);
    }

    #[test]
    fn a_check_that_nobody_wants_ends() {
        let released = Released { at: Instant::now(), blocked: Duration::ZERO };
        assert_eq!(find_still(&BTreeSet::new(), released, |_| true, || true), None);
        assert_eq!(find_still(&BTreeSet::new(), released, |_| true, || false), None);
    }
}
