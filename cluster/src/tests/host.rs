//! What really happens at the nodes, whatever their launchers believe: packet rules, held tasks, captures, parts.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::{AttemptId, Order, PartId, Record, Settings, Step};

/// A node without its launcher.
#[derive(Default)]
pub struct Host {
    /// Whether the packet rule is in place.
    pub has_rule: bool,
    /// Since when tasks are held (time of the node's clock), for how long at most, and for which attempt.
    pub hold: Option<Hold>,
    /// The part of the job: session and part.
    pub job: Option<(AttemptId, u32)>,
    /// The step in progress.
    pub effect: Option<(u64, AttemptId, Order)>,
    captured: Option<(AttemptId, String)>,
}

#[derive(Clone, Copy)]
pub struct Hold {
    pub since: Duration,
    pub limit: Duration,
    attempt: AttemptId,
}

/// When the parts of an attempt were captured or restored, and let go.
#[derive(Default)]
struct Truth {
    captured: BTreeMap<u32, (Duration, AttemptId)>,
    let_go: BTreeMap<u32, Duration>,
    loaded: BTreeMap<u32, Option<AttemptId>>,
}

/// The whole truth, with the store.
#[derive(Default)]
pub struct Ground {
    truth: BTreeMap<AttemptId, Truth>,
    pub log: Vec<Record>,
    pub parts: BTreeMap<PartId, String>,
    pub committed: u64,
}

fn content(attempt: AttemptId, session: AttemptId, part: u32) -> String {
    format!("{}.{} of {}.{}, part {part}", attempt.epoch, attempt.number, session.epoch, session.number)
}

impl Ground {
    /// A step begins. Rules and holds are in place from the beginning on, and removed at the beginning: the worst case.
    pub fn begin(
        &mut self,
        host: &mut Host,
        (now, local): (Duration, Duration),
        attempt: AttemptId,
        order: &Order,
        settings: &Settings,
    ) -> Result<(), String> {
        match order {
            Order::Quiesce { .. } => {
                host.hold = Some(Hold { since: local, limit: settings.lease, attempt });
            }
            Order::Freeze => host.has_rule = true,
            Order::Load { from, part, .. } => {
                if let Some((part, hash)) = from
                    && self.parts.get(part) != Some(hash)
                {
                    return Err(format!("lost: {part:?} of a committed snapshot"));
                }
                host.hold = Some(Hold { since: local, limit: settings.load_lease, attempt });
                host.has_rule = true;
                host.job = Some((attempt, *part));
            }
            Order::Unblock => self.let_go(host, now, settings)?,
            Order::Thaw => host.hold = None,
            Order::End => self.kill(host, now, settings)?,
            Order::Prepare { .. } | Order::Dump | Order::Store | Order::Prove => {}
        }
        Ok(())
    }

    /// A step is done. Returns the hash of a part that was stored.
    pub fn complete(
        &mut self,
        host: &mut Host,
        now: Duration,
        attempt: AttemptId,
        order: &Order,
    ) -> Option<String> {
        let (session, part) = host.job?;
        match order.step() {
            Step::Dump => {
                host.captured = Some((attempt, content(attempt, session, part)));
                self.truth.entry(attempt).or_default().captured.insert(part, (now, session));
            }
            Step::Load => {
                let Order::Load { from, .. } = order else { return None };
                let from = from.as_ref().map(|(part, _)| part.attempt);
                self.truth.entry(attempt).or_default().loaded.insert(part, from);
            }
            Step::Store => {
                let (attempt, hash) = host.captured.clone()?;
                self.parts.insert(PartId { attempt, part }, hash.clone());
                return Some(hash);
            }
            _ => {}
        }
        None
    }

    /// The packet rule is removed, for an order or at the end of a lease. A part that is restored then runs.
    pub fn let_go(&mut self, host: &mut Host, now: Duration, settings: &Settings) -> Result<(), String> {
        host.has_rule = false;
        let (Some(hold), Some((session, part))) = (host.hold, host.job) else { return Ok(()) };
        let truth = self.truth.entry(hold.attempt).or_default();
        truth.let_go.entry(part).or_insert(now);
        let mut sources: Vec<_> = truth.loaded.values().collect();
        sources.dedup();
        if session == hold.attempt && (truth.loaded.len() < settings.parts as usize || sources.len() > 1) {
            return Err(format!("part {part} of {session:?} is released before all are restored"));
        }
        Ok(())
    }

    /// The tasks run, or are dead.
    pub fn release(&mut self, host: &mut Host, now: Duration, settings: &Settings) -> Result<(), String> {
        host.effect = None;
        let result = self.let_go(host, now, settings);
        host.hold = None;
        result
    }

    pub fn kill(&mut self, host: &mut Host, now: Duration, settings: &Settings) -> Result<(), String> {
        host.effect = None;
        if host.hold.is_some_and(|hold| host.job.is_some_and(|(session, _)| session != hold.attempt)) {
            self.let_go(host, now, settings)?;
        }
        *host = Host::default();
        Ok(())
    }

    /// A record is put. Checks that a snapshot is whole, consistent and of the newest epoch.
    pub fn add(&mut self, record: Record, settings: &Settings) -> Result<(), String> {
        let epochs = self.log.iter().rev().filter_map(|record| match record {
            Record::Epoch { epoch, .. } => Some(*epoch),
            Record::Snapshot { .. } | Record::Complete => None,
        });
        let newest = epochs.take(1).next().unwrap_or(0);
        let is_right = match &record {
            Record::Epoch { epoch, .. } if *epoch > newest => Ok(()),
            Record::Epoch { epoch, .. } => Err(format!("epoch {epoch} after {newest}")),
            Record::Snapshot { attempt, .. } if attempt.epoch != newest => {
                Err(format!("stale: {attempt:?} is committed in epoch {newest}"))
            }
            Record::Snapshot { session, .. } if Some(*session) < self.newest_session() => {
                Err(format!("lost: a snapshot of a later session than {session:?}"))
            }
            Record::Snapshot { attempt, session, parts } => {
                self.committed += 1;
                let hashes: Vec<_> = parts.iter().map(|part| part.hash.clone()).collect();
                self.check(*attempt, *session, &hashes, settings)
            }
            Record::Complete => Err("no launcher has said that the job is complete".to_owned()),
        };
        self.log.push(record);
        is_right
    }

    fn newest_session(&self) -> Option<AttemptId> {
        let sessions = self.log.iter().filter_map(|record| match record {
            Record::Epoch { .. } | Record::Complete => None,
            Record::Snapshot { session, .. } => Some(*session),
        });
        sessions.max()
    }

    fn check(
        &self,
        attempt: AttemptId,
        session: AttemptId,
        hashes: &[String],
        settings: &Settings,
    ) -> Result<(), String> {
        let torn = |why: String| Err(format!("torn: {attempt:?}: {why}"));
        if hashes.len() != settings.parts as usize {
            return torn(format!("{} parts", hashes.len()));
        }
        let Some(truth) = self.truth.get(&attempt) else { return torn("nothing was captured".to_owned()) };
        let last = truth.captured.values().map(|(at, _)| *at).max();
        for (part, hash) in (0..).zip(hashes) {
            let is_stored = self.parts.get(&PartId { attempt, part }) == Some(hash);
            let Some((_, of)) = truth.captured.get(&part) else {
                return torn(format!("part {part} was not captured"));
            };
            if !is_stored || *hash != content(attempt, session, part) || *of != session {
                return torn(format!("part {part} is not in the store, or is another one: {hash}"));
            }
            if truth.let_go.get(&part).copied() < last && truth.let_go.contains_key(&part) {
                return torn(format!("part {part} was let go before all were captured"));
            }
        }
        Ok(())
    }

    /// No part of a committed snapshot is missing.
    pub fn check_parts(&self) -> Result<(), String> {
        for record in &self.log {
            let Record::Snapshot { attempt, parts, .. } = record else { continue };
            for (part, record) in (0..).zip(parts) {
                let id = PartId { attempt: *attempt, part };
                if self.parts.get(&id) != Some(&record.hash) {
                    return Err(format!("lost: {id:?} of a committed snapshot"));
                }
            }
        }
        Ok(())
    }
}
