//! A warp: the state of its lanes, and which of them execute next.
//!
//! Each lane has its own program counter and frame. Lanes with the same ones form a group and execute together. The
//! group in the innermost call, and there at the lowest program counter, goes first: for code that compilers emit,
//! that is where diverged lanes meet again. A group that others have run ahead of for too long gets its turn in
//! between, so that lanes that spin do not keep others from what they wait for.

use super::Kernel;
use super::barrier::lanes_of;
use super::block::Env;
use super::step::Flow;
use crate::compute::lanes;
use crate::error::{Fault, Site};
use crate::ir::{Condition, LANES, Register, Row, Source};

/// Instructions that a warp executes before other warps have their turn. Miri executes them slowly.
const SLICE: u64 = if cfg!(miri) { 1 << 10 } else { 1 << 15 };

/// Instructions after which lanes that could execute and did not are overdue.
const TURN: u64 = if cfg!(miri) { 1 << 9 } else { 1 << 12 };

/// How a time slice ended.
pub(super) enum Outcome {
    Done,
    /// Every lane waits for something.
    Waiting {
        ran: bool,
    },
    SliceUsed,
    /// It asked for a pause.
    Yielded,
}

/// Where a lane executes: its program counter, and where its frame's registers and predicates begin.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Position {
    pub(super) pc: u32,
    pub(super) rows: u32,
    pub(super) predicates: u32,
}

/// What a call leaves behind.
#[derive(Clone, Copy)]
pub(super) struct Frame {
    /// The caller's, at the call.
    pub(super) position: Position,
    pub(super) local_base: u32,
}

pub(super) struct Warp {
    pub(super) index: u32,
    rows: Vec<Row>,
    predicates: Vec<u32>,
    /// Where a result is made before it is written to the active lanes.
    pub(super) scratch: Row,
    /// Where the members of a warp-wide operation lay down their values.
    pub(super) exchange: Row,
    pub(super) positions: [Position; LANES],
    pub(super) frames: Vec<Vec<Frame>>,
    /// Local memory per lane, as much as its frames have.
    pub(super) local: Vec<Vec<u8>>,
    pub(super) local_base: [u32; LANES],
    /// Lanes that have not exited.
    pub(super) live: u32,
    /// Lanes that can execute.
    pub(super) ready: u32,
    /// Lanes that wait for other lanes of the warp, and the members that they named.
    pub(super) at_warp_op: u32,
    pub(super) members: [u32; LANES],
    /// Lanes that wait at a barrier of the block: its number and generation.
    pub(super) at_barrier: u32,
    pub(super) waits_for: [(usize, u64); LANES],
    /// Lanes that wait for their cluster, and the generation of its barrier at their arrival.
    pub(super) at_cluster: u32,
    pub(super) cluster_generation: [u64; LANES],
    /// The group that executes.
    pub(super) active: u32,
    pub(super) at: Position,
    /// The next program counter at which other lanes wait to be joined.
    join_at: u32,
    executed: u64,
    last_turn: [u64; LANES],
    /// Lanes that asked for a pause.
    pausing: u32,
}

impl Warp {
    pub(super) fn new(kernel: &Kernel<'_>, index: u32) -> Warp {
        Warp {
            index,
            rows: Vec::with_capacity(kernel.function.rows as usize),
            predicates: Vec::with_capacity(kernel.function.predicates as usize),
            scratch: [0; LANES],
            exchange: [0; LANES],
            positions: [Position::default(); LANES],
            frames: vec![Vec::new(); LANES],
            local: vec![Vec::new(); LANES],
            local_base: [0; LANES],
            live: 0,
            ready: 0,
            at_warp_op: 0,
            members: [0; LANES],
            at_barrier: 0,
            waits_for: [(0, 0); LANES],
            at_cluster: 0,
            cluster_generation: [0; LANES],
            active: 0,
            at: Position::default(),
            join_at: u32::MAX,
            executed: 0,
            last_turn: [0; LANES],
            pausing: 0,
        }
    }

    /// Begins the kernel anew, in another block.
    pub(super) fn start(&mut self, kernel: &Kernel<'_>) {
        let function = kernel.function;
        self.rows.clear();
        self.rows.resize(function.rows as usize, [0; LANES]);
        self.predicates.clear();
        self.predicates.resize(function.predicates as usize, 0);
        self.positions = [Position { pc: function.start, ..Position::default() }; LANES];
        self.live = lanes_of(kernel.threads, self.index);
        self.ready = self.live;
        (self.at_warp_op, self.at_barrier, self.at_cluster, self.pausing) = (0, 0, 0, 0);
        self.cluster_generation = [0; LANES];
        self.local_base = [0; LANES];
        self.last_turn = [self.executed; LANES];
        for lane in 0..LANES {
            self.frames[lane].clear();
            self.local[lane].clear();
            self.local[lane].resize(function.frame_bytes as usize, 0);
        }
    }

    pub(super) fn is_done(&self) -> bool {
        self.live == 0
    }

    /// Executes until the time slice is used up, every lane waits, or none is left.
    pub(super) fn run(&mut self, env: &mut Env<'_>) -> Result<Outcome, Fault> {
        let first = self.executed;
        loop {
            self.wake(env)?;
            if !self.pick() {
                if self.live == 0 {
                    return Ok(Outcome::Done);
                }
                return Ok(Outcome::Waiting { ran: self.executed != first });
            }
            self.run_group(env)?;
            if self.executed - first >= SLICE {
                return Ok(Outcome::SliceUsed);
            }
            if self.pausing & self.ready == self.ready && self.ready != 0 {
                self.pausing = 0;
                return Ok(Outcome::Yielded);
            }
        }
    }

    /// Chooses the group that executes next, if a lane can.
    fn pick(&mut self) -> bool {
        let mut candidates = self.ready;
        if candidates & !self.pausing != 0 {
            candidates &= !self.pausing;
        }
        self.pausing = 0;
        if candidates == 0 {
            return false;
        }
        let first = candidates.trailing_zeros() as usize;
        self.at = self.positions[first];
        let mut oldest = first;
        for lane in lanes(candidates) {
            let position = self.positions[lane];
            if (position.rows, std::cmp::Reverse(position.pc)) > (self.at.rows, std::cmp::Reverse(self.at.pc))
            {
                self.at = position;
            }
            if self.last_turn[lane] < self.last_turn[oldest] {
                oldest = lane;
            }
        }
        if self.executed - self.last_turn[oldest] > TURN {
            self.at = self.positions[oldest];
        }
        self.active = 0;
        self.join_at = u32::MAX;
        for lane in lanes(self.ready) {
            let position = self.positions[lane];
            if position == self.at {
                self.active |= 1 << lane;
            } else if position.rows == self.at.rows && position.pc > self.at.pc {
                self.join_at = self.join_at.min(position.pc);
            }
        }
        true
    }

    /// Executes the chosen group until its lanes part, meet others, wait, or are to give others a turn.
    fn run_group(&mut self, env: &mut Env<'_>) -> Result<(), Fault> {
        let kernel = env.kernel;
        let code = &kernel.module.code;
        let end = self.executed + TURN;
        while self.executed < end {
            let instruction = &code[self.at.pc as usize];
            self.executed += 1;
            let mask = match instruction.guard {
                None => self.active,
                Some(guard) => self.active & self.condition(guard),
            };
            match self.step(env, instruction, mask)? {
                Flow::Next => self.at.pc += 1,
                Flow::Jump(target) => self.at.pc = target,
                Flow::Pause => {
                    self.at.pc += 1;
                    self.pausing = self.active;
                    break;
                }
                Flow::Parted => {
                    self.stamp();
                    return Ok(());
                }
            }
            if self.at.pc >= self.join_at {
                break;
            }
        }
        self.settle(self.active, self.at.pc);
        self.stamp();
        Ok(())
    }

    fn stamp(&mut self) {
        for lane in lanes(self.active) {
            self.last_turn[lane] = self.executed;
        }
    }

    /// Notes where lanes of the active group continue.
    pub(super) fn settle(&mut self, lanes_to_settle: u32, pc: u32) {
        let position = Position { pc, ..self.at };
        for lane in lanes(lanes_to_settle) {
            self.positions[lane] = position;
        }
    }
}

// Registers.
impl Warp {
    /// The value of a source in every lane.
    #[inline]
    pub(super) fn row<'r>(&'r self, kernel: &'r Kernel<'_>, source: Source) -> &'r Row {
        match source {
            Source::Register(register) => &self.rows[(self.at.rows + register) as usize],
            Source::Constant(index) => &kernel.module.constants[index as usize],
        }
    }

    /// Writes to the lanes of `mask`.
    #[inline]
    pub(super) fn write(&mut self, to: Register, mask: u32, value: impl Fn(usize) -> u64) {
        let row = &mut self.rows[(self.at.rows + to) as usize];
        for lane in lanes(mask) {
            row[lane] = value(lane);
        }
    }

    /// A computation into the scratch row, which then goes to the lanes of `mask`.
    #[inline]
    pub(super) fn compute(
        &mut self,
        kernel: &Kernel<'_>,
        to: Register,
        mask: u32,
        sources: [Source; 3],
        f: impl FnOnce(&mut Row, [&Row; 3]),
    ) {
        let fetch = |source| match source {
            Source::Register(register) => &self.rows[(self.at.rows + register) as usize],
            Source::Constant(index) => &kernel.module.constants[index as usize],
        };
        f(&mut self.scratch, sources.map(fetch));
        let row = &mut self.rows[(self.at.rows + to) as usize];
        if mask == u32::MAX {
            *row = self.scratch;
        } else {
            for lane in lanes(mask) {
                row[lane] = self.scratch[lane];
            }
        }
    }

    #[inline]
    pub(super) fn register_mut(&mut self, register: Register) -> &mut Row {
        &mut self.rows[(self.at.rows + register) as usize]
    }

    /// The lanes in which a condition holds.
    #[inline]
    pub(super) fn condition(&self, condition: Condition) -> u32 {
        match condition {
            Condition::Predicate { index, negated } => {
                let value = self.predicates[(self.at.predicates + index) as usize];
                if negated { !value } else { value }
            }
            Condition::Constant(true) => u32::MAX,
            Condition::Constant(false) => 0,
        }
    }

    #[inline]
    pub(super) fn set_predicate(&mut self, index: u32, mask: u32, value: u32) {
        let place = &mut self.predicates[(self.at.predicates + index) as usize];
        *place = *place & !mask | value & mask;
    }

    /// Makes room for the registers of a frame that begins at `position`.
    pub(super) fn grow(&mut self, position: Position, rows: u32, predicates: u32) {
        let rows = (position.rows + rows) as usize;
        if self.rows.len() < rows {
            self.rows.resize(rows, [0; LANES]);
        }
        let predicates = (position.predicates + predicates) as usize;
        if self.predicates.len() < predicates {
            self.predicates.resize(predicates, 0);
        }
    }

    /// The thread that a fault in this lane is attributed to.
    pub(super) fn site(&self, env: &Env<'_>, lane: usize) -> Site {
        Site {
            function: env.kernel.module.function_at(self.at.pc).to_owned(),
            block: env.block.index,
            thread: self.thread_index(env.kernel, lane),
        }
    }

    pub(super) fn thread_index(&self, kernel: &Kernel<'_>, lane: usize) -> [u32; 3] {
        let linear = self.index * 32 + lane as u32;
        let [x, y, _] = kernel.block;
        [linear % x, linear / x % y, linear / x / y]
    }

    pub(super) fn illegal(&self, env: &Env<'_>, lane: usize, line: u32, reason: impl Into<String>) -> Fault {
        Fault::IllegalInstruction { reason: reason.into(), line, site: self.site(env, lane) }
    }
}
