//! The barriers of a block and of a cluster.
//!
//! A lane that waits remembers the generation of its barrier and continues once that has changed, so that no lane that
//! completes a barrier touches another warp.

/// Barriers that a block has (PTX ISA, "bar").
const BARRIERS: usize = 16;

/// What `bar.red` found in the generation that was completed last.
#[derive(Clone, Copy, Default)]
pub(super) struct Tally {
    pub(super) threads: u32,
    /// Threads whose predicate was true.
    pub(super) holds: u32,
}

#[derive(Clone, Default)]
struct Barrier {
    /// Lanes that arrived, per warp.
    arrived: Vec<u32>,
    /// Number of threads asked for; all of the block where there is none.
    threads: Option<u32>,
    generation: u64,
    tally: Tally,
    result: Tally,
}

/// All barriers of a block, and which of its lanes have not exited.
pub(super) struct Barriers {
    live: Vec<u32>,
    barriers: Vec<Barrier>,
}

impl Barriers {
    pub(super) fn new(warps: usize) -> Barriers {
        let barrier = Barrier { arrived: vec![0; warps], ..Barrier::default() };
        Barriers { live: vec![0; warps], barriers: vec![barrier; BARRIERS] }
    }

    /// Makes everything new for a block of this many threads.
    pub(super) fn start(&mut self, threads: u32) {
        for (warp, live) in self.live.iter_mut().enumerate() {
            *live = lanes_of(threads, warp as u32);
        }
        for barrier in &mut self.barriers {
            barrier.arrived.fill(0);
            (barrier.threads, barrier.tally) = (None, Tally::default());
        }
    }

    pub(super) fn generation(&self, id: usize) -> u64 {
        self.barriers[id].generation
    }

    pub(super) fn result(&self, id: usize) -> Tally {
        self.barriers[id].result
    }

    /// Lanes of a warp arrive, `holds` of them with a true predicate. Says what is wrong with the barrier.
    pub(super) fn arrive(
        &mut self,
        id: u64,
        threads: Option<u32>,
        warp: usize,
        lanes: u32,
        holds: u32,
    ) -> Result<(), String> {
        let Some(barrier) = usize::try_from(id).ok().and_then(|id| self.barriers.get_mut(id)) else {
            return Err(format!("barrier {id} does not exist"));
        };
        if let Some(threads) = threads.filter(|t| *t == 0 || !t.is_multiple_of(32)) {
            return Err(format!("a barrier for {threads} threads, which is no multiple of 32"));
        }
        barrier.arrived[warp] |= lanes;
        barrier.threads = threads;
        barrier.tally.threads += lanes.count_ones();
        barrier.tally.holds += (lanes & holds).count_ones();
        barrier.complete(&self.live);
        Ok(())
    }

    /// Lanes of a warp exit and are no longer waited for.
    pub(super) fn exit(&mut self, warp: usize, lanes: u32) {
        self.live[warp] &= !lanes;
        for barrier in self.barriers.iter_mut().filter(|barrier| barrier.tally.threads > 0) {
            barrier.complete(&self.live);
        }
    }
}

impl Barrier {
    /// Begins a new generation if everybody is there.
    fn complete(&mut self, live: &[u32]) {
        let everybody = match self.threads {
            None => live.iter().zip(&self.arrived).all(|(live, arrived)| live & !arrived == 0),
            Some(threads) => {
                let present = |(live, arrived): (&u32, &u32)| match *arrived {
                    0 => 0,
                    // A warp counts whole, with lanes that it does not have or that exited.
                    arrived if live & !arrived == 0 => 32,
                    arrived => arrived.count_ones(),
                };
                live.iter().zip(&self.arrived).map(present).sum::<u32>() >= threads
            }
        };
        if everybody {
            self.arrived.fill(0);
            self.result = std::mem::take(&mut self.tally);
            self.generation += 1;
        }
    }
}

/// The barrier of a cluster: `barrier.cluster.arrive` and `.wait`.
#[derive(Default)]
pub(super) struct ClusterBarrier {
    live: u32,
    arrived: u32,
    pub(super) generation: u64,
}

impl ClusterBarrier {
    pub(super) fn new(threads: u32) -> ClusterBarrier {
        ClusterBarrier { live: threads, arrived: 0, generation: 0 }
    }

    pub(super) fn arrive(&mut self, threads: u32) {
        self.arrived += threads;
        self.complete();
    }

    pub(super) fn exit(&mut self, threads: u32) {
        self.live -= threads;
        self.complete();
    }

    fn complete(&mut self) {
        if self.arrived > 0 && self.arrived >= self.live {
            self.arrived = 0;
            self.generation += 1;
        }
    }
}

/// The lanes that a warp of a block with this many threads has.
pub(super) fn lanes_of(threads: u32, warp: u32) -> u32 {
    match threads.saturating_sub(warp * 32) {
        0 => 0,
        count @ 1..32 => (1 << count) - 1,
        _ => u32::MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_live_lanes_complete_a_barrier() {
        let mut barriers = Barriers::new(2);
        barriers.start(40);
        barriers.arrive(0, None, 0, u32::MAX, 3).unwrap();
        assert_eq!(barriers.generation(0), 0);
        barriers.arrive(0, None, 1, 0x7f, 1).unwrap();
        assert_eq!(barriers.generation(0), 0);
        barriers.exit(1, 0x80);
        assert_eq!(barriers.generation(0), 1);
        assert_eq!((barriers.result(0).threads, barriers.result(0).holds), (39, 3));
    }

    #[test]
    fn a_thread_count_takes_whole_warps() {
        let mut barriers = Barriers::new(3);
        barriers.start(80);
        assert!(barriers.arrive(1, Some(33), 0, 1, 0).is_err());
        assert!(barriers.arrive(16, None, 0, 1, 0).is_err());
        barriers.arrive(1, Some(64), 2, 0xffff, 0).unwrap();
        assert_eq!(barriers.generation(1), 0);
        barriers.arrive(1, Some(64), 0, u32::MAX, 0).unwrap();
        assert_eq!(barriers.generation(1), 1);
    }
}
