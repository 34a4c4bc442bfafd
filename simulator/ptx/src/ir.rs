//! What a function body is parsed to: instructions whose operands are indexes.
//!
//! Registers are rows of 32 lanes. A row holds a value of up to 64 bits per lane; bits above a value's width are
//! undefined, so that every reader truncates. Predicates are masks, one bit per lane. A `.b128` register is two
//! rows, the low half first. Arithmetic is a closure that was chosen, with its types and modifiers, when the
//! text was parsed: nothing is decoded at run time but the kind of instruction.

use crate::types::AddressSpace;

pub(crate) const LANES: usize = 32;
pub(crate) const ALL_LANES: u32 = u32::MAX;

/// One value per lane of a warp.
pub(crate) type Row = [u64; LANES];

/// A register of the current frame.
pub(crate) type Register = u32;

/// A register of the current frame, or a constant of the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Register(Register),
    Constant(u32),
}

/// A predicate, perhaps negated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Condition {
    Predicate { index: u32, negated: bool },
    Constant(bool),
}

/// What a name of the module refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Symbol {
    /// Index into the module's variables in global and constant memory.
    Global(u32),
    /// Index into the module's variables in shared memory.
    Shared(u32),
    /// Index into the module's functions.
    Function(u32),
    /// Index into the names that the module declares and does not define.
    Extern(u32),
    /// A function of the device runtime that is built in.
    Builtin(Builtin),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Builtin {
    Vprintf,
    AssertFail,
}

/// What an address is relative to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Base {
    Value(Source),
    /// The parameters of the kernel.
    EntryParams,
    /// The local memory of the current frame.
    Frame,
    Symbol(Symbol),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) base: Base,
    pub(crate) offset: i64,
}

pub(crate) type Map1 = Box<dyn Fn(&mut Row, &Row, u32) + Send + Sync>;
pub(crate) type Map2 = Box<dyn Fn(&mut Row, &Row, &Row, u32) + Send + Sync>;
pub(crate) type Map3 = Box<dyn Fn(&mut Row, &Row, &Row, &Row, u32) + Send + Sync>;
/// The mask of the lanes for which a relation holds.
pub(crate) type Relate = Box<dyn Fn(&Row, &Row) -> u32 + Send + Sync>;
/// A function of two values of one lane, for atomics and reductions.
pub(crate) type Combine = Box<dyn Fn(u64, u64) -> u64 + Send + Sync>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BoolOp {
    And,
    Or,
    Xor,
}

impl BoolOp {
    pub(crate) fn apply(self, a: u32, b: u32) -> u32 {
        match self {
            BoolOp::And => a & b,
            BoolOp::Or => a | b,
            BoolOp::Xor => a ^ b,
        }
    }
}

/// Memory ordering, as far as it matters to the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    Relaxed,
    Acquire,
    Release,
    AcquireRelease,
}

/// How a loaded value fills its register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cell {
    /// 1, 2, 4 or 8.
    pub(crate) bytes: u32,
    pub(crate) signed: bool,
}

pub(crate) struct Load {
    pub(crate) space: AddressSpace,
    pub(crate) order: Order,
    pub(crate) cell: Cell,
    pub(crate) address: Address,
    /// One per element of the vector; none where the element goes to the sink `_`.
    pub(crate) to: Vec<Option<Register>>,
    /// Alignment, which is the size of the whole vector.
    pub(crate) align: u32,
}

pub(crate) struct Store {
    pub(crate) space: AddressSpace,
    pub(crate) order: Order,
    pub(crate) cell: Cell,
    pub(crate) address: Address,
    pub(crate) from: Vec<Source>,
    pub(crate) align: u32,
}

/// What an atomic does to the old value.
pub(crate) enum AtomicOp {
    /// The new value is a function of the old one and of the operand.
    Update(Combine),
    /// Integer addition, which hosts have in hardware.
    Add,
    /// f32 addition, which flushes subnormals in global memory and does not in shared memory.
    AddSingle,
    Exchange,
    /// Stores the second operand where the old value equals the first.
    CompareAndSwap,
}

pub(crate) struct Atomic {
    pub(crate) space: AddressSpace,
    pub(crate) order: Order,
    pub(crate) op: AtomicOp,
    pub(crate) bytes: u32,
    pub(crate) address: Address,
    pub(crate) to: Vec<Option<Register>>,
    pub(crate) b: Vec<Source>,
    pub(crate) c: Option<Source>,
    pub(crate) align: u32,
}

/// A function of one lane's values at the places of a multimem address, in the order of the devices.
pub(crate) type Fold = Box<dyn Fn(&[u64]) -> u64 + Send + Sync>;

/// What an access to a multimem address does at all of its places.
pub(crate) enum MultimemOp {
    /// Joins what lies at the places: one fold for all elements.
    LoadReduce {
        to: Vec<Option<Register>>,
        fold: Fold,
    },
    Store {
        from: Vec<Source>,
    },
    Reduce {
        with: Vec<Source>,
        op: AtomicOp,
    },
}

pub(crate) struct Multimem {
    pub(crate) space: AddressSpace,
    pub(crate) order: Order,
    pub(crate) op: MultimemOp,
    /// Of one element.
    pub(crate) bytes: u32,
    pub(crate) address: Address,
    /// Alignment, which is the size of the whole vector.
    pub(crate) align: u32,
}

/// Something that is carried into or out of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slot {
    /// Bytes in the local memory of a frame.
    Frame { offset: u32, bytes: u32 },
    /// A register of a frame.
    Register { index: Register, bytes: u32 },
    /// A value that is read only.
    Value { source: Source, bytes: u32 },
}

impl Slot {
    /// Whether it takes the width of what it is passed to.
    pub(crate) fn is_value(self) -> bool {
        matches!(self, Slot::Value { .. })
    }

    pub(crate) fn bytes(self) -> u32 {
        match self {
            Slot::Frame { bytes, .. } | Slot::Register { bytes, .. } | Slot::Value { bytes, .. } => bytes,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Callee {
    Symbol(Symbol),
    Indirect(Source),
}

pub(crate) struct Call {
    pub(crate) callee: Callee,
    pub(crate) arguments: Vec<Slot>,
    pub(crate) results: Vec<Slot>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ShuffleMode {
    Up,
    Down,
    Butterfly,
    Index,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VoteMode {
    All,
    Any,
    Uniform,
}

/// What lanes of a warp do together. With `.sync`, the lanes that the member mask names wait for each other.
pub(crate) enum WarpOp {
    Shuffle {
        mode: ShuffleMode,
        to: Register,
        valid: Option<u32>,
        value: Source,
        lane: Source,
        clamp: Source,
    },
    Vote {
        mode: VoteMode,
        to: u32,
        value: Condition,
    },
    Ballot {
        to: Register,
        value: Condition,
    },
    MatchAny {
        to: Register,
        value: Source,
        bits: u32,
    },
    MatchAll {
        to: Register,
        all: Option<u32>,
        value: Source,
        bits: u32,
    },
    Reduce {
        to: Register,
        value: Source,
        combine: Combine,
    },
    Elect {
        to: Register,
        leader: u32,
    },
    Barrier,
}

pub(crate) enum BarrierReduction {
    PopCount { to: Register, value: Condition },
    All { to: u32, value: Condition },
    Any { to: u32, value: Condition },
}

pub(crate) struct Barrier {
    pub(crate) id: Source,
    /// Number of threads; all threads of the block where there is none.
    pub(crate) threads: Option<Source>,
    /// Whether the thread waits (`bar.sync`, `bar.red`) or only arrives.
    pub(crate) waits: bool,
    pub(crate) reduction: Option<BarrierReduction>,
}

/// A special register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Special {
    Tid(usize),
    Ntid(usize),
    CtaId(usize),
    NctaId(usize),
    LaneId,
    WarpId,
    NumWarps,
    SmId,
    NumSms,
    GridId,
    LaneMaskEq,
    LaneMaskLe,
    LaneMaskLt,
    LaneMaskGe,
    LaneMaskGt,
    Clock,
    ClockHigh,
    Clock64,
    GlobalTimer,
    GlobalTimerLow,
    GlobalTimerHigh,
    DynamicSharedBytes,
    TotalSharedBytes,
    ClusterId(usize),
    NumClusters(usize),
    ClusterCtaId(usize),
    ClusterNumCtas(usize),
    ClusterCtaRank,
    ClusterSize,
    IsExplicitCluster,
    /// Performance counters, driver registers: they exist and are zero.
    Zero,
}

impl Special {
    /// Whether it has 64 bits. The 32-bit ones used to be narrower, and `%gridid` may be read as either.
    pub(crate) fn is_wide(self) -> bool {
        matches!(self, Special::Clock64 | Special::GlobalTimer)
    }

    pub(crate) fn is_narrow(self) -> bool {
        !self.is_wide() && self != Special::GridId && self != Special::Zero
    }
}

/// The operations of an `mbarrier` object, which is a 64-bit word in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MbarrierOp {
    Init { count: Source },
    Invalidate,
    Arrive { state: Option<Register>, count: Option<Source>, expect_bytes: Option<Source>, drop: bool },
    ExpectTx { bytes: Source },
    CompleteTx { bytes: Source },
    TestState { done: u32, state: Source },
    TestParity { done: u32, parity: Source },
    PendingCount { to: Register, state: Source },
}

/// What an instruction does.
pub(crate) enum Op {
    Map1 {
        f: Map1,
        to: Register,
        a: Source,
    },
    Map2 {
        f: Map2,
        to: Register,
        a: Source,
        b: Source,
    },
    Map3 {
        f: Map3,
        to: Register,
        a: Source,
        b: Source,
        c: Source,
    },
    Move {
        to: Register,
        a: Source,
    },
    /// Parts of `bits` bits each become one value.
    Pack {
        to: Register,
        parts: Vec<Source>,
        bits: u32,
    },
    Unpack {
        parts: Vec<Option<Register>>,
        a: Source,
        bits: u32,
    },
    Compare {
        f: Relate,
        to: Option<u32>,
        inverse: Option<u32>,
        a: Source,
        b: Source,
        with: Option<(BoolOp, Condition)>,
    },
    Select {
        to: Register,
        a: Source,
        b: Source,
        condition: Condition,
    },
    Logic {
        op: BoolOp,
        to: u32,
        a: Condition,
        b: Condition,
    },
    /// `add.cc`, `subc`, …: addition (of the complement) with the carry of earlier ones.
    Carry {
        to: Register,
        a: Source,
        b: Source,
        bits: u32,
        subtract: bool,
        carry_in: Option<u32>,
        carry_out: Option<u32>,
    },
    ReadSpecial {
        to: Register,
        special: Special,
    },
    ReadActiveMask {
        to: Register,
    },
    TakeAddress {
        to: Register,
        address: Address,
        space: AddressSpace,
    },
    ToGeneric {
        to: Register,
        a: Source,
        space: AddressSpace,
    },
    FromGeneric {
        to: Register,
        a: Source,
        space: AddressSpace,
    },
    IsSpace {
        to: u32,
        a: Source,
        space: AddressSpace,
    },
    MapShared {
        to: Register,
        a: Source,
        rank: Source,
        generic: bool,
    },
    SharedRank {
        to: Register,
        a: Source,
        generic: bool,
    },
    Load(Box<Load>),
    Store(Box<Store>),
    Atomic(Box<Atomic>),
    Multimem(Box<Multimem>),
    /// `cp.async`: done at once. `size` bytes are written, of which those from `present` on are zero.
    AsyncCopy {
        to: Address,
        from: Address,
        bytes: u32,
        present: Option<Source>,
        skip: Option<Condition>,
    },
    Mbarrier {
        op: MbarrierOp,
        space: AddressSpace,
        address: Address,
    },
    Fence {
        sequential: bool,
    },
    Branch {
        target: u32,
    },
    BranchTable {
        index: Source,
        targets: Vec<u32>,
    },
    Call(Box<Call>),
    Return,
    Exit,
    Trap,
    Warp {
        op: Box<WarpOp>,
        members: Option<Source>,
    },
    Barrier(Box<Barrier>),
    ClusterArrive,
    ClusterWait,
    /// Gives other lanes and warps a turn.
    Yield,
    Nop,
}

pub(crate) struct Instruction {
    pub(crate) op: Op,
    pub(crate) guard: Option<Condition>,
    pub(crate) line: u32,
}
