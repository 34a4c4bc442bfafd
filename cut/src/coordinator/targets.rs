//! How far each rank has to go: a pure function of the ranks' newest reports.

use std::collections::{BTreeMap, BTreeSet};

use super::RankId;
use crate::messages::{Report, Role};
use crate::names::{Member, Name};

/// A communicator whose creation some ranks have begun and others have not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Incomplete {
    pub(super) communicator: Name,
    pub(super) joined: u32,
    pub(super) ranks: u32,
}

/// What the reports ask for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Targets {
    /// By rank: members with a target above 0.
    pub(super) of_ranks: BTreeMap<RankId, BTreeMap<Member, u64>>,
    pub(super) incomplete: Vec<Incomplete>,
}

/// Second names of communicators: `alias` to the name that is used here. They are kept when the rank that knows both
/// is gone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Aliases(BTreeMap<Name, Name>);

impl Aliases {
    pub(super) fn learn(&mut self, report: &Report) {
        for member in &report.members {
            if let Role::Communicator { alias: Some(alias), .. } = member.role {
                self.0.insert(alias, member.member.communicator);
            }
        }
    }

    fn resolve(&self, name: Name) -> Name {
        self.0.get(&name).copied().unwrap_or(name)
    }

    fn resolve_member(&self, member: Member) -> Member {
        Member { communicator: self.resolve(member.communicator), ..member }
    }
}

/// The targets for these reports.
pub(super) fn targets<'a>(
    reports: impl Iterator<Item = (RankId, &'a Report)> + Clone,
    aliases: &Aliases,
) -> Targets {
    let places = Places::of(reports.clone(), aliases);
    let mut targets = Targets { incomplete: places.incomplete(), ..Targets::default() };
    let mut set = |rank: RankId, member: Member, target: u64| {
        if target > 0 {
            targets.of_ranks.entry(rank).or_default().insert(member, target);
        }
    };
    for (member, place) in &places.members {
        let target = places.furthest.get(&member.communicator).copied().unwrap_or(0);
        set(place.rank, place.named, target);
    }
    for ((of, from, to), target) in &places.pairs {
        for (end, index) in [(0, *from), (1, *to)] {
            // An end that has left the communicator, or whose rank has ended, is not waited for.
            if let Some(place) = places.members.get(&Member { communicator: *of, index }) {
                let pair = place.named.communicator.pair(*from, *to);
                set(place.rank, Member { communicator: pair, index: end }, *target);
            }
        }
    }
    targets
}

/// Where a member is.
struct Place {
    rank: RankId,
    /// As this rank names it.
    named: Member,
    has_joined: bool,
}

/// All members, by the names that are used here.
#[derive(Default)]
struct Places {
    members: BTreeMap<Member, Place>,
    /// The highest sequence on each communicator.
    furthest: BTreeMap<Name, u64>,
    /// The highest sequence on each pair.
    pairs: BTreeMap<(Name, u32, u32), u64>,
    /// How many ranks a communicator awaits that is being created.
    awaited: BTreeMap<Name, u32>,
    /// Communicators that exist.
    created: BTreeSet<Name>,
}

impl Places {
    fn of<'a>(reports: impl Iterator<Item = (RankId, &'a Report)>, aliases: &Aliases) -> Self {
        let mut places = Self::default();
        for (rank, report) in reports {
            for report in &report.members {
                let sequence = report.sequence;
                let member = aliases.resolve_member(report.member);
                let name = member.communicator;
                match report.role {
                    Role::Communicator { awaits, .. } => {
                        let place = Place { rank, named: report.member, has_joined: sequence > 0 };
                        places.members.insert(member, place);
                        raise(places.furthest.entry(name).or_default(), sequence);
                        if let Some(ranks) = awaits {
                            places.awaited.insert(name, ranks);
                        } else {
                            places.created.insert(name);
                        }
                    }
                    Role::Pair { of, from, to } => {
                        raise(places.pairs.entry((aliases.resolve(of), from, to)).or_default(), sequence);
                    }
                }
            }
        }
        places
    }

    fn incomplete(&self) -> Vec<Incomplete> {
        let incomplete = self.awaited.iter().filter_map(|(name, ranks)| {
            let first = Member { communicator: *name, index: 0 };
            let last = Member { index: u32::MAX, ..first };
            let joined = self.members.range(first..=last).filter(|(_, place)| place.has_joined).count();
            let joined = u32::try_from(joined).unwrap_or(u32::MAX);
            let is_incomplete = !self.created.contains(name) && (1..*ranks).contains(&joined);
            is_incomplete.then_some(Incomplete { communicator: *name, joined, ranks: *ranks })
        });
        incomplete.collect()
    }
}

fn raise(known: &mut u64, to: u64) {
    *known = to.max(*known);
}
