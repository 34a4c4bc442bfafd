//! Random programs of several ranks. Each rank runs its part of one list of operations, in the list's order: such a
//! program cannot deadlock by itself.

use proptest::prelude::*;

/// What an operation counts on. Ranks are those of the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum On {
    Communicator(usize),
    /// Of a communicator: sender and receiver.
    Pair(usize, usize, usize),
}

#[derive(Clone, Debug)]
pub enum What {
    /// Creation by a unique ID. All ranks have to begin it before it returns.
    Create(usize),
    /// The parent and its parts. All ranks have to begin it before it returns.
    Split(usize, Vec<usize>),
    /// Collectives, sends and receives, alone or in a group. They are enqueued and return.
    Enqueue(Vec<(On, u32)>),
    /// The same while a graph is captured. Connections are set up: all have to begin it before it returns.
    Capture(usize, Vec<(On, u32)>),
    /// A launch of a graph that was captured by all ranks that launch it.
    Launch(usize, Vec<(On, u32)>),
    /// The end of a communicator. It waits for all that the rank has enqueued on it; whether it also waits until all
    /// ranks have begun it.
    Destroy(usize, bool),
    /// The end of a communicator that is no step: ncclCommAbort. The rank makes it when its work there is complete.
    Abort(usize),
    /// The rank waits for all that it has enqueued.
    Synchronize,
    /// On the host, the second rank waits for the first.
    Wait,
}

#[derive(Clone, Debug)]
pub struct Operation {
    pub what: What,
    pub ranks: Vec<usize>,
}

/// A program.
#[derive(Clone, Debug, Default)]
pub struct Program {
    pub operations: Vec<Operation>,
    /// The ranks of each communicator.
    pub communicators: Vec<Vec<usize>>,
    /// By rank: its operations.
    pub of_rank: Vec<Vec<usize>>,
}

/// What a program may contain.
#[derive(Clone, Copy, Debug)]
pub struct Kinds {
    /// Creation, splits and destruction while it runs.
    pub changes: bool,
    /// Waits on the host.
    pub waits: bool,
}

type Raw = (u8, u16, u16);

/// Programs of 2 to `most` ranks.
pub fn programs(kinds: Kinds, most: usize) -> impl Strategy<Value = Program> {
    let raw = prop::collection::vec(any::<Raw>(), 1..40);
    (2..=most, raw).prop_map(move |(ranks, raw)| build(ranks, &raw, kinds))
}

struct Builder {
    program: Program,
    live: Vec<usize>,
    graphs: Vec<Vec<(On, u32)>>,
    live_graphs: Vec<usize>,
}

fn build(ranks: usize, raw: &[Raw], kinds: Kinds) -> Program {
    let (program, live) = (Program::default(), Vec::new());
    let mut builder = Builder { program, live, graphs: Vec::new(), live_graphs: Vec::new() };
    builder.create((0..ranks).collect());
    if !kinds.changes {
        // What a program without changes can use.
        builder.create((0..ranks).filter(|rank| rank % 2 == 0).collect());
        builder.create((0..ranks.div_ceil(2)).collect());
        builder.create((ranks - 2..ranks).collect());
    }
    raw.iter().for_each(|raw| builder.add(*raw, ranks, kinds));
    of_operations(builder.program.operations, builder.program.communicators)
}

/// The program with these operations.
pub fn of_operations(operations: Vec<Operation>, communicators: Vec<Vec<usize>>) -> Program {
    let ranks = operations.iter().flat_map(|operation| &operation.ranks).max().map_or(0, |last| last + 1);
    let part = |rank: usize| {
        let is_part = |(_, operation): &(usize, &Operation)| operation.ranks.contains(&rank);
        operations.iter().enumerate().filter(is_part).map(|(index, _)| index).collect()
    };
    let of_rank = (0..ranks).map(part).collect();
    Program { operations, communicators, of_rank }
}

impl Builder {
    fn add(&mut self, (kind, first, second): Raw, ranks: usize, kinds: Kinds) {
        let communicator = self.live[usize::from(first) % self.live.len()];
        let (first, second) = (usize::from(first), usize::from(second));
        match kind % 13 {
            3 | 4 => self.enqueue_group(first, second),
            5 => self.enqueue_pair(communicator, second),
            6 if kinds.changes => {
                let members: Vec<_> = (0..ranks).filter(|rank| second >> (rank % 16) & 1 == 1).collect();
                if members.len() > 1 {
                    self.create(members);
                }
            }
            7 if kinds.changes => self.split(communicator, second),
            8 => self.capture(communicator, second),
            9 if !self.live_graphs.is_empty() => {
                let graph = self.live_graphs[second % self.live_graphs.len()];
                let on = self.graphs[graph].clone();
                let ranks = self.program.ranks_of(&on);
                self.push(What::Launch(graph, on), ranks);
            }
            10 if kinds.changes && communicator != 0 => {
                let end = match second % 4 {
                    0 => What::Abort(communicator),
                    how => What::Destroy(communicator, how == 1),
                };
                self.end(communicator, end);
            }
            11 => self.push(What::Synchronize, vec![first % ranks]),
            0..=2 | 12 if kinds.waits => self.wait(first % ranks, second % ranks, second / 64 % ranks),
            _ => self.enqueue(vec![(On::Communicator(communicator), 1)]),
        }
    }

    fn push(&mut self, what: What, ranks: Vec<usize>) {
        self.program.operations.push(Operation { what, ranks });
    }

    fn new_communicator(&mut self, ranks: Vec<usize>) -> usize {
        self.program.communicators.push(ranks);
        self.live.push(self.program.communicators.len() - 1);
        self.program.communicators.len() - 1
    }

    fn create(&mut self, ranks: Vec<usize>) {
        let communicator = self.new_communicator(ranks.clone());
        self.push(What::Create(communicator), ranks);
    }

    /// Up to three parts; ranks of the fourth colour are in none.
    fn split(&mut self, parent: usize, colors: usize) {
        let ranks = self.program.communicators[parent].clone();
        let color = |index: usize| (colors >> (2 * (index % 8))) & 3;
        let part = |wanted: usize| {
            let with_color = ranks.iter().enumerate().filter(move |(index, _)| color(*index) == wanted);
            with_color.map(|(_, rank)| *rank).collect::<Vec<_>>()
        };
        let parts: Vec<_> = (0..3).map(part).filter(|part| !part.is_empty()).collect();
        let parts = parts.into_iter().map(|part| self.new_communicator(part)).collect();
        self.push(What::Split(parent, parts), ranks);
    }

    fn pair(&self, communicator: usize, choice: usize) -> Option<(On, u32)> {
        let ranks = &self.program.communicators[communicator];
        let (from, to) = (ranks[choice % ranks.len()], ranks[choice / 16 % ranks.len()]);
        (ranks.len() > 1).then_some((On::Pair(communicator, from, to), 1))
    }

    /// What can make an attempt stuck: `of` has a step of its own before the other one goes on, and a third rank may
    /// have begun what comes after that.
    fn wait(&mut self, of: usize, rank: usize, third: usize) {
        if of != rank {
            self.enqueue(vec![(On::Pair(0, of, of), 1)]);
            self.push(What::Wait, vec![of, rank]);
            self.enqueue(vec![(On::Pair(0, third, rank), 1)]);
        }
    }

    /// Parts of a group that no rank links with the others are operations of their own: nobody waits for both.
    fn enqueue(&mut self, mut on: Vec<(On, u32)>) {
        while let Some(first) = on.pop() {
            let mut linked = vec![first];
            let mut ranks = self.program.ranks_of(&linked);
            let is_linked = |part: &(On, u32), to: &[usize]| {
                self.program.ranks_of(&[*part]).iter().any(|rank| to.contains(rank))
            };
            while let Some(next) = on.iter().position(|part| is_linked(part, &ranks)) {
                linked.push(on.remove(next));
                ranks = self.program.ranks_of(&linked);
            }
            self.push(What::Enqueue(linked), ranks);
        }
    }

    fn enqueue_pair(&mut self, communicator: usize, choice: usize) {
        if let Some(pair) = self.pair(communicator, choice) {
            self.enqueue(vec![pair]);
        }
    }

    fn enqueue_group(&mut self, first: usize, second: usize) {
        let mut on: Vec<_> = (0..1 + first % 3)
            .map(|index| self.live[(second >> (4 * index)) % self.live.len()])
            .map(|communicator| (On::Communicator(communicator), 1))
            .collect();
        on.sort_unstable();
        on.dedup();
        on.extend(self.pair(self.live[second % self.live.len()], first));
        self.enqueue(on);
    }

    fn capture(&mut self, communicator: usize, choice: usize) {
        let mut on = vec![(On::Communicator(communicator), 1 + choice as u32 % 3)];
        on.extend(self.pair(communicator, choice));
        let ranks = self.program.ranks_of(&on);
        self.push(What::Capture(self.graphs.len(), on.clone()), ranks);
        self.live_graphs.push(self.graphs.len());
        self.graphs.push(on);
    }

    fn end(&mut self, communicator: usize, end: What) {
        let ranks = self.program.communicators[communicator].clone();
        self.push(end, ranks);
        self.live.retain(|live| *live != communicator);
        let graphs = &self.graphs;
        let uses = |graph: &usize| graphs[*graph].iter().any(|(on, _)| on.communicator() == communicator);
        self.live_graphs.retain(|graph| !uses(graph));
    }
}

impl Program {
    /// The ranks that take part in one of these.
    pub fn ranks_of(&self, on: &[(On, u32)]) -> Vec<usize> {
        let ranks = |on: &(On, u32)| match on.0 {
            On::Communicator(communicator) => self.communicators[communicator].clone(),
            On::Pair(_, from, to) => vec![from, to],
        };
        let mut ranks: Vec<_> = on.iter().flat_map(ranks).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }
}

impl What {
    /// Whether it is done on a communicator.
    pub fn is_on(&self, communicator: usize) -> bool {
        match self {
            Self::Create(one) | Self::Split(one, _) | Self::Destroy(one, _) | Self::Abort(one) => {
                *one == communicator
            }
            Self::Enqueue(on) | Self::Capture(_, on) | Self::Launch(_, on) => {
                on.iter().any(|(on, _)| on.communicator() == communicator)
            }
            Self::Synchronize | Self::Wait => false,
        }
    }

    /// Whether all its ranks have to begin it.
    pub fn is_common(&self) -> bool {
        !matches!(self, Self::Synchronize | Self::Wait | Self::Destroy(_, false) | Self::Abort(_))
    }
}

impl On {
    pub fn communicator(self) -> usize {
        match self {
            Self::Communicator(communicator) | Self::Pair(communicator, ..) => communicator,
        }
    }
}
