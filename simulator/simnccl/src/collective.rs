//! From a call to the work of this rank: what it sends to which peers, and what it does with what arrives.

use std::ffi::c_void;

use crate::kernel::{self, ENTRIES_AT, ENTRY_BYTES, fold_id};
use crate::types::{DataType, Error, Reduction, Result, warn};

/// A collective call, checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    AllReduce(Reduction),
    Reduce(Reduction, usize),
    ReduceScatter(Reduction),
    Broadcast(usize),
    AllGather,
    AllToAll,
    Gather(usize),
    Scatter(usize),
    Send(usize),
    Recv(usize),
}

impl Kind {
    fn root(self) -> Option<usize> {
        match self {
            Self::Reduce(_, root)
            | Self::Broadcast(root)
            | Self::Gather(root)
            | Self::Scatter(root)
            | Self::Send(root)
            | Self::Recv(root) => Some(root),
            _ => None,
        }
    }

    pub(crate) fn is_pairwise(self) -> bool {
        matches!(self, Self::Send(_) | Self::Recv(_))
    }
}

/// One direction of a pair of ranks, as one of them sees it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Way {
    pub(crate) peer: usize,
    /// Whether this rank sends.
    pub(crate) sends: bool,
}

/// One call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) kind: Kind,
    pub(crate) input: u64,
    pub(crate) output: u64,
    pub(crate) count: usize,
    pub(crate) ty: DataType,
}

/// A part of this rank's memory and the peer that it goes to or comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Entry {
    peer: usize,
    address: u64,
    bytes: u64,
    /// Not 0 if the receiver reads the sender's memory: for the receiver, where it is.
    source: u64,
}

/// How contributions are joined.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Fold {
    output: u64,
    id: u64,
    shift: u64,
}

/// What one launch of the kernel does, and which copies within the rank go before it.
#[derive(Default, Debug)]
pub(crate) struct Work {
    sends: Vec<Entry>,
    /// With a fold: all contributors in the order of the ranks, this one among them.
    recvs: Vec<Entry>,
    fold: Option<Fold>,
    tag: u32,
    /// The type whose sum multicast can make, and this rank's contribution.
    multicast: Option<(DataType, u64)>,
    /// Target, source, bytes.
    pub(crate) copies: Vec<(u64, u64, usize)>,
}

impl Call {
    /// # Errors
    /// `ncclInvalidArgument` for a root or peer outside the communicator, and for memory that is NULL.
    pub(crate) fn check(&self, rank: usize, ranks: usize) -> Result {
        if self.kind.root().is_some_and(|root| root >= ranks) {
            warn("a root or peer is no rank of the communicator");
            return Err(Error::InvalidArgument);
        }
        let is_root = self.kind.root() == Some(rank);
        let needs_input = match self.kind {
            Kind::Broadcast(_) | Kind::Scatter(_) => is_root,
            Kind::Recv(_) => false,
            _ => true,
        };
        let needs_output = match self.kind {
            Kind::Reduce(..) | Kind::Gather(_) => is_root,
            Kind::Send(_) => false,
            _ => true,
        };
        let is_missing = needs_input && self.input == 0 || needs_output && self.output == 0;
        if self.count > 0 && is_missing {
            warn("a buffer is NULL");
            return Err(Error::InvalidArgument);
        }
        Ok(())
    }

    fn bytes(&self) -> usize {
        self.count * self.ty.bytes()
    }

    /// The pairs of ranks that a call consists of: sends, receives, and what is made of these. None for a collective of all
    /// ranks.
    pub(crate) fn ways(&self, rank: usize, ranks: usize) -> Option<Vec<Way>> {
        let is_of_pairs = matches!(self.kind, Kind::AllToAll | Kind::Gather(_) | Kind::Scatter(_));
        if !is_of_pairs && !self.kind.is_pairwise() {
            return None;
        }
        let ways: Vec<Way> = match self.kind {
            Kind::Send(peer) => vec![Way { peer, sends: true }],
            Kind::Recv(peer) => vec![Way { peer, sends: false }],
            _ => {
                let work = Work::of(self, rank, ranks);
                let sends = work.sends.iter().map(|entry| Way { peer: entry.peer, sends: true });
                sends.chain(work.recvs.iter().map(|entry| Way { peer: entry.peer, sends: false })).collect()
            }
        };
        Some(ways.into_iter().filter(|way| way.peer != rank).collect())
    }

    /// Bytes of the whole input and output, of collectives to which each rank gives as much.
    pub(crate) fn symmetric_bytes(&self, ranks: usize) -> Option<[usize; 2]> {
        let (part, all) = (self.bytes(), self.bytes() * ranks);
        match self.kind {
            Kind::AllReduce(_) => Some([part, part]),
            Kind::AllGather => Some([part, all]),
            Kind::ReduceScatter(_) => Some([all, part]),
            Kind::AllToAll => Some([all, all]),
            _ => None,
        }
    }

    /// The same on all ranks that take part, most likely another one for other calls.
    fn tag(&self) -> u32 {
        let (kind, root, op) = match self.kind {
            Kind::AllReduce(op) => (1, 0, op as u32),
            Kind::Reduce(op, root) => (2, root, op as u32),
            Kind::ReduceScatter(op) => (3, 0, op as u32),
            Kind::Broadcast(root) => (4, root, 0),
            Kind::AllGather => (5, 0, 0),
            Kind::AllToAll => (6, 0, 0),
            Kind::Gather(root) => (7, root, 0),
            Kind::Scatter(root) => (8, root, 0),
            Kind::Send(_) | Kind::Recv(_) => return 9,
        };
        let words = [kind, root as u32, op, self.ty as u32, self.count as u32, (self.count >> 32) as u32];
        words.iter().fold(0x811c_9dc5, |hash, word| mixed(hash, *word))
    }
}

/// FNV-1a.
fn mixed(hash: u32, word: u32) -> u32 {
    (hash ^ word).wrapping_mul(0x0100_0193)
}

/// The addresses of equal parts of a buffer, one for each rank.
fn part(base: u64, index: usize, bytes: usize) -> u64 {
    base + (index * bytes) as u64
}

impl Work {
    /// The work of a collective call.
    pub(crate) fn of(call: &Call, rank: usize, ranks: usize) -> Self {
        let bytes = call.bytes();
        let mut work = Self { tag: call.tag(), ..Self::default() };
        let everybody = || 0..ranks;
        let others = || (0..ranks).filter(|peer| *peer != rank);
        let is_root = call.kind.root() == Some(rank);
        match call.kind {
            Kind::AllReduce(op) => {
                others().for_each(|peer| work.send(peer, call.input, bytes));
                work.reduce(call, op, everybody(), |_| call.input);
                let is_summed = op == Reduction::Sum && kernel::multicast_id(call.ty).is_some();
                work.multicast = is_summed.then_some((call.ty, call.input));
            }
            Kind::Reduce(op, _) if is_root => work.reduce(call, op, everybody(), |_| call.input),
            Kind::Reduce(_, root) | Kind::Gather(root) if !is_root => work.send(root, call.input, bytes),
            Kind::ReduceScatter(op) => {
                others().for_each(|peer| work.send(peer, part(call.input, peer, bytes), bytes));
                work.reduce(call, op, everybody(), |rank| part(call.input, rank, bytes));
            }
            Kind::Broadcast(_) if is_root => {
                others().for_each(|peer| work.send(peer, call.input, bytes));
                work.copy(call.output, call.input, bytes);
            }
            Kind::Broadcast(root) | Kind::Scatter(root) if !is_root => work.receive(root, call.output, bytes),
            Kind::AllGather => {
                others().for_each(|peer| work.send(peer, call.input, bytes));
                others().for_each(|peer| work.receive(peer, part(call.output, peer, bytes), bytes));
                work.copy(part(call.output, rank, bytes), call.input, bytes);
            }
            Kind::AllToAll => {
                others().for_each(|peer| work.send(peer, part(call.input, peer, bytes), bytes));
                others().for_each(|peer| work.receive(peer, part(call.output, peer, bytes), bytes));
                work.copy(part(call.output, rank, bytes), part(call.input, rank, bytes), bytes);
            }
            Kind::Gather(_) => {
                others().for_each(|peer| work.receive(peer, part(call.output, peer, bytes), bytes));
                work.copy(part(call.output, rank, bytes), call.input, bytes);
            }
            Kind::Scatter(_) => {
                others().for_each(|peer| work.send(peer, part(call.input, peer, bytes), bytes));
                work.copy(call.output, part(call.input, rank, bytes), bytes);
            }
            // The guards of the first arms leave nothing else.
            Kind::Reduce(..) | Kind::Broadcast(_) | Kind::Send(_) | Kind::Recv(_) => {}
        }
        work
    }

    /// The work of all sends and receives of a group, in rounds: in each at most one to and one from each peer, which make
    /// progress together.
    ///
    /// # Errors
    /// `ncclInvalidUsage` if what a rank sends to itself and what it receives of itself do not go together.
    pub(crate) fn of_pairs(calls: &[Call], rank: usize) -> Result<Vec<Self>> {
        let mut rounds: Vec<Self> = Vec::new();
        let (mut own_sends, mut own_recvs) = (Vec::new(), Vec::new());
        for call in calls {
            let (sends, peer) = match call.kind {
                Kind::Send(peer) if peer == rank => {
                    own_sends.push((call.input, call.bytes()));
                    continue;
                }
                Kind::Recv(peer) if peer == rank => {
                    own_recvs.push((call.output, call.bytes()));
                    continue;
                }
                Kind::Send(peer) => (true, peer),
                Kind::Recv(peer) => (false, peer),
                _ => continue,
            };
            let has = |round: &Self| {
                let entries = if sends { &round.sends } else { &round.recvs };
                entries.iter().any(|entry| entry.peer == peer)
            };
            let index = rounds.iter().position(|round| !has(round)).unwrap_or(rounds.len());
            if index == rounds.len() {
                rounds.push(Self { tag: call.tag(), ..Self::default() });
            }
            if sends {
                rounds[index].send(peer, call.input, call.bytes());
            } else {
                rounds[index].receive(peer, call.output, call.bytes());
            }
        }
        let fits = |((_, sent), (_, received)): (&(u64, usize), &(u64, usize))| sent == received;
        if own_sends.len() != own_recvs.len() || !own_sends.iter().zip(&own_recvs).all(fits) {
            warn("what a rank sends to itself it has to receive in the same group");
            return Err(Error::InvalidUsage);
        }
        if rounds.is_empty() {
            rounds.push(Self::default());
        }
        for ((from, bytes), (to, _)) in own_sends.into_iter().zip(own_recvs) {
            rounds[0].copy(to, from, bytes);
        }
        Ok(rounds)
    }

    /// Lets each rank read the inputs of the others where they are, by the address of each rank's input. `place` is the
    /// same on all ranks.
    pub(crate) fn read_inputs(&mut self, call: &Call, rank: usize, inputs: &[u64], place: [u32; 4]) {
        let offset = match call.kind {
            Kind::ReduceScatter(_) | Kind::AllToAll => rank * call.bytes(),
            _ => 0,
        };
        self.sends.iter_mut().for_each(|entry| entry.source = entry.address);
        for entry in self.recvs.iter_mut().filter(|entry| entry.peer != rank) {
            entry.source = part(inputs[entry.peer], 1, offset);
        }
        self.multicast = None;
        self.tag = place.into_iter().fold(self.tag, mixed);
    }

    fn send(&mut self, peer: usize, address: u64, bytes: usize) {
        self.sends.push(Entry { peer, address, bytes: bytes as u64, source: 0 });
    }

    fn receive(&mut self, peer: usize, address: u64, bytes: usize) {
        self.recvs.push(Entry { peer, address, bytes: bytes as u64, source: 0 });
    }

    fn copy(&mut self, to: u64, from: u64, bytes: usize) {
        if to != from && bytes > 0 {
            self.copies.push((to, from, bytes));
        }
    }

    /// `own`: where this rank's contribution is; the others' arrive in their slots.
    fn reduce(
        &mut self,
        call: &Call,
        op: Reduction,
        ranks: std::ops::Range<usize>,
        own: impl Fn(usize) -> u64,
    ) {
        ranks.for_each(|rank| self.receive(rank, own(rank), call.bytes()));
        let shift = u64::from(call.ty.bytes().trailing_zeros());
        self.fold = Some(Fold { output: call.output, id: fold_id(call.ty, op), shift });
    }

    /// Whether the kernel has nothing to do.
    pub(crate) fn is_empty(&self) -> bool {
        self.most_bytes() == 0
    }

    fn most_bytes(&self) -> u64 {
        self.sends.iter().chain(&self.recvs).map(|entry| entry.bytes).max().unwrap_or(0)
    }

    /// The descriptor that the kernel reads. `multicast`: the memory of all devices and of this one.
    pub(crate) fn words(&self, rank: usize, ranks: usize, multicast: Option<[u64; 2]>) -> Vec<u64> {
        let mut fold = self.fold.unwrap_or(Fold { output: 0, id: 0, shift: 0 });
        let mut by_multicast = [0; 3];
        if let (Some([all, own]), Some((ty, input))) = (multicast, self.multicast)
            && let Some(id) = kernel::multicast_id(ty)
        {
            fold.id = id;
            by_multicast = [all, own, input];
        }
        let mut words = vec![
            0,
            self.sends.len() as u64,
            self.recvs.len() as u64,
            fold.output,
            fold.id,
            self.most_bytes(),
            self.tag.into(),
            rank as u64,
            fold.shift,
            ranks as u64,
        ];
        words.extend(by_multicast);
        words.resize(ENTRIES_AT / 8, 0);
        for entry in self.sends.iter().chain(&self.recvs) {
            words.extend([entry.peer as u64, entry.address, entry.bytes, entry.source]);
        }
        words
    }

    /// Bytes of the largest descriptor of a collective; a group of sends and receives may need more.
    pub(crate) fn descriptor_bytes(&self) -> usize {
        ENTRIES_AT + (self.sends.len() + self.recvs.len()) * ENTRY_BYTES
    }
}

/// The address of a program's buffer.
pub(crate) fn address(buffer: *const c_void) -> u64 {
    buffer as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(kind: Kind) -> Call {
        Call { kind, input: 0x1000, output: 0x9000, count: 8, ty: DataType::Float32 }
    }

    fn peers(entries: &[Entry]) -> Vec<(usize, u64)> {
        entries.iter().map(|entry| (entry.peer, entry.address)).collect()
    }

    #[test]
    fn each_collective_is_made_of_pairs() {
        let work = Work::of(&call(Kind::AllReduce(Reduction::Sum)), 1, 3);
        assert_eq!(peers(&work.sends), [(0, 0x1000), (2, 0x1000)]);
        assert_eq!(peers(&work.recvs), [(0, 0x1000), (1, 0x1000), (2, 0x1000)]);
        let work = Work::of(&call(Kind::ReduceScatter(Reduction::Sum)), 1, 3);
        assert_eq!(peers(&work.sends), [(0, 0x1000), (2, 0x1040)]);
        assert_eq!(work.recvs[1].address, 0x1020);
        let work = Work::of(&call(Kind::AllGather), 1, 3);
        assert_eq!(peers(&work.recvs), [(0, 0x9000), (2, 0x9040)]);
        assert_eq!(work.copies, [(0x9020, 0x1000, 32)]);
        let work = Work::of(&call(Kind::AllToAll), 0, 2);
        assert_eq!((peers(&work.sends), peers(&work.recvs)), (vec![(1, 0x1020)], vec![(1, 0x9020)]));
        for (kind, root_sends, root_recvs, other_sends, other_recvs) in [
            (Kind::Broadcast(0), 1, 0, 0, 1),
            (Kind::Reduce(Reduction::Max, 0), 0, 2, 1, 0),
            (Kind::Gather(0), 0, 1, 1, 0),
            (Kind::Scatter(0), 1, 0, 0, 1),
        ] {
            let (root, other) = (Work::of(&call(kind), 0, 2), Work::of(&call(kind), 1, 2));
            assert_eq!((root.sends.len(), root.recvs.len()), (root_sends, root_recvs), "{kind:?}");
            assert_eq!((other.sends.len(), other.recvs.len()), (other_sends, other_recvs), "{kind:?}");
        }
    }

    #[test]
    fn inputs_in_windows_are_read_where_they_are() {
        let call = call(Kind::ReduceScatter(Reduction::Sum));
        let mut work = Work::of(&call, 1, 2);
        let tag = work.tag;
        work.read_inputs(&call, 1, &[0x5000, 0x1000], [0, 0x20, 1, 0]);
        assert_eq!(work.sends[0].source, 0x1000, "not copied");
        let sources: Vec<_> = work.recvs.iter().map(|entry| (entry.peer, entry.source)).collect();
        assert_eq!(sources, [(0, 0x5020), (1, 0)]);
        assert_ne!(work.tag, tag, "a rank that uses another place is a mismatch");
        assert_eq!(call.symmetric_bytes(2), Some([64, 32]));
    }

    #[test]
    fn calls_that_differ_have_other_tags() {
        let calls = [
            call(Kind::AllReduce(Reduction::Sum)),
            call(Kind::AllReduce(Reduction::Max)),
            call(Kind::AllGather),
            call(Kind::Broadcast(0)),
            call(Kind::Broadcast(1)),
            Call { count: 9, ..call(Kind::AllGather) },
            Call { ty: DataType::Int32, ..call(Kind::AllGather) },
        ];
        for (index, one) in calls.iter().enumerate() {
            for other in &calls[index + 1..] {
                assert_ne!(one.tag(), other.tag(), "{one:?} {other:?}");
            }
        }
    }

    #[test]
    fn sends_and_receives_go_in_rounds() {
        let pair = [call(Kind::Send(0)), call(Kind::Recv(0))];
        let rounds = Work::of_pairs(&pair, 0).unwrap();
        assert_eq!(rounds[0].copies, [(0x9000, 0x1000, 32)], "to itself it is a copy");
        assert!(rounds.len() == 1 && rounds[0].is_empty());
        assert_eq!(Work::of_pairs(&pair[..1], 0).unwrap_err(), Error::InvalidUsage);
        let calls = [call(Kind::Send(0)), call(Kind::Send(2)), call(Kind::Recv(0)), call(Kind::Send(0))];
        let rounds = Work::of_pairs(&calls, 1).unwrap();
        let sizes: Vec<_> = rounds.iter().map(|round| (round.sends.len(), round.recvs.len())).collect();
        assert_eq!(sizes, [(2, 1), (1, 0)]);
    }
}
