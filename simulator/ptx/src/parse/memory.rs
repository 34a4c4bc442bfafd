//! Loads, stores, atomics, asynchronous copies, mbarriers, and hints to caches.

use super::lower::int_type;
use super::moves::SPACES;
use super::operand::Arg;
use super::statement::Statement;
use super::{Parser, Result};
use crate::arith::{self, FloatMode, MinMaxMode, Rounding, bf16, f16, int};
use crate::compute::halves2;
use crate::ir::{Address, Atomic, AtomicOp, Base, Cell, Combine, Load, MbarrierOp, Op, Order, Source, Store};
use crate::types::{AddressSpace, Type};

/// Orders that name a scope. `.weak` and `.volatile` do not.
const ORDERS: [(&str, Order); 4] = [
    ("relaxed", Order::Relaxed),
    ("acquire", Order::Acquire),
    ("release", Order::Release),
    ("acq_rel", Order::AcquireRelease),
];

/// Which threads see the order. The host has one kind of memory order for all of them.
pub(super) const SCOPES: [(&str, ()); 4] = [("cta", ()), ("cluster", ()), ("gpu", ()), ("sys", ())];

const LOAD_CACHES: [(&str, ()); 5] = [("ca", ()), ("cg", ()), ("cs", ()), ("lu", ()), ("cv", ())];

const STORE_CACHES: [(&str, ()); 4] = [("wb", ()), ("cg", ()), ("cs", ()), ("wt", ())];

const VECTORS: [(&str, usize); 3] = [("v2", 2), ("v4", 4), ("v8", 8)];

impl Parser<'_, '_> {
    pub(super) fn memory_access(&mut self, s: &mut Statement<'_>) -> Result {
        match s.name {
            "ld" | "ldu" => self.load(s),
            "st" => self.store(s),
            "atom" | "red" => self.atomic(s),
            "cp" => self.copy_async(s),
            "mbarrier" => self.mbarrier(s),
            // Hints: nothing that a program could see depends on them.
            _ => {
                self.emit_for(s, Op::Nop);
                Ok(())
            }
        }
    }

    /// Takes hints to caches away, and the operand that one of them brings with it.
    fn cache_hints(&mut self, s: &mut Statement<'_>, operands: usize) -> Result {
        let policy = s.modifiers.contains(&"L2::cache_hint");
        s.modifiers.retain(|modifier| !modifier.starts_with("L1::") && !modifier.starts_with("L2::"));
        if policy && s.args.len() == operands + 1 {
            let index = s.args.len() - 1;
            self.source(s, index, Type::B64)?;
            s.args.pop();
        }
        Ok(())
    }

    /// Order, scope, state space and what else loads and stores share.
    fn access(&mut self, s: &mut Statement<'_>) -> Result<(AddressSpace, Order, usize)> {
        self.cache_hints(s, 2)?;
        let store = s.name == "st";
        let order = s.choose(&ORDERS);
        let scope = s.choose(&SCOPES);
        if order.is_some() != scope.is_some() {
            return s.error("an order and its scope go together");
        }
        let forbidden = if store { Order::Acquire } else { Order::Release };
        let order = order.unwrap_or(Order::Relaxed);
        if order == forbidden || order == Order::AcquireRelease {
            return s.error("this order is not for loads or not for stores");
        }
        if scope.is_none() && !s.flag("weak") {
            s.flag("volatile");
        }
        s.choose(if store { &STORE_CACHES[..] } else { &LOAD_CACHES[..] });
        s.flag("mmio");
        s.flag("unified");
        let constant = s.flag("nc");
        let space = s.choose(&SPACES).unwrap_or(AddressSpace::Generic);
        if constant && (store || space != AddressSpace::Global) {
            return s.error("`.nc` is for loads from global memory");
        }
        Ok((space, order, s.choose(&VECTORS).unwrap_or(1)))
    }

    /// The elements of a vector operand, or the operand itself.
    pub(super) fn elements(&self, s: &Statement<'_>, index: usize, count: usize) -> Result<Vec<Arg>> {
        match s.args.get(index) {
            Some(Arg::Vector(elements)) if elements.len() == count => Ok(elements.clone()),
            Some(arg) if count == 1 => Ok(vec![arg.clone()]),
            _ => s.error(format!("needs a vector of {count}")),
        }
    }

    fn load(&mut self, s: &mut Statement<'_>) -> Result {
        let (space, order, count) = self.access(s)?;
        let ty = s.ty()?;
        s.finish(2..=2)?;
        check_vector(s, ty, count)?;
        let mut to = Vec::new();
        for arg in self.elements(s, 0, count)? {
            if matches!(arg, Arg::Sink) {
                to.extend(std::iter::repeat_n(None, ty.bits().div_ceil(64) as usize));
                continue;
            }
            let register = self.target_of(s, &arg, ty, true)?;
            to.push(Some(register));
            if ty == Type::B128 {
                to.push(Some(register + 1));
            }
        }
        let address = self.address(s, 1, space)?;
        let (cell, align) = (cell(ty), (ty.bytes() * count) as u32);
        self.emit_for(s, Op::Load(Box::new(Load { space, order, cell, address, to, align })));
        Ok(())
    }

    fn store(&mut self, s: &mut Statement<'_>) -> Result {
        let (space, order, count) = self.access(s)?;
        let ty = s.ty()?;
        s.finish(2..=2)?;
        check_vector(s, ty, count)?;
        let address = self.address(s, 0, space)?;
        if space == AddressSpace::Const || address.base == Base::EntryParams {
            return s.error("constant memory and parameters of kernels cannot be written");
        }
        let mut from = Vec::new();
        for arg in self.elements(s, 1, count)? {
            let source = self.value(s, &arg, ty, true)?;
            from.push(source);
            match source {
                Source::Register(low) if ty == Type::B128 => from.push(Source::Register(low + 1)),
                _ => {}
            }
        }
        let (cell, align) = (cell(ty), (ty.bytes() * count) as u32);
        self.emit_for(s, Op::Store(Box::new(Store { space, order, cell, address, from, align })));
        Ok(())
    }

    fn atomic(&mut self, s: &mut Statement<'_>) -> Result {
        let returns = s.name == "atom";
        let first = usize::from(returns);
        let order = s.choose(&ORDERS).unwrap_or(Order::Relaxed);
        s.choose(&SCOPES);
        let space = s.choose(&SPACES).unwrap_or(AddressSpace::Generic);
        let count = s.choose(&VECTORS).unwrap_or(1);
        let swap = s.modifiers.contains(&"cas");
        self.cache_hints(s, first + 2 + usize::from(swap))?;
        let (op, ty) = atomic_op(s)?;
        let operands = first + 2 + usize::from(swap);
        s.finish(operands..=operands)?;
        let mut to = Vec::new();
        if returns {
            for arg in self.elements(s, 0, count)? {
                to.push(if matches!(arg, Arg::Sink) {
                    None
                } else {
                    Some(self.target_of(s, &arg, ty, false)?)
                });
            }
        }
        let address = self.address(s, first, space)?;
        let mut b = Vec::new();
        for arg in self.elements(s, first + 1, count)? {
            b.push(self.value(s, &arg, ty, false)?);
        }
        let c = if swap { Some(self.source(s, first + 2, ty)?) } else { None };
        let (bytes, align) = (ty.bytes() as u32, (ty.bytes() * count) as u32);
        self.emit_for(s, Op::Atomic(Box::new(Atomic { space, order, op, bytes, address, to, b, c, align })));
        Ok(())
    }

    fn copy_async(&mut self, s: &mut Statement<'_>) -> Result {
        if !s.flag("async") || s.flag("bulk") {
            return s.unknown();
        }
        // Copies are done at once, so that there is nothing to wait for.
        if s.flag("commit_group") || s.flag("wait_all") {
            s.finish(0..=0)?;
            self.emit_for(s, Op::Nop);
            return Ok(());
        }
        if s.flag("wait_group") {
            s.finish(1..=1)?;
            self.emit_for(s, Op::Nop);
            return Ok(());
        }
        if s.flag("mbarrier") {
            return self.copy_arrive(s);
        }
        self.cache_hints(s, if s.args.len() > 4 { 4 } else { 3 })?;
        let cache = s.require("`.ca` or `.cg`", &[("ca", 4), ("cg", 16)])?;
        let shared = s.require("`.shared`", &SPACES[2..5])?;
        s.require("`.global`", &SPACES[..1])?;
        s.finish(3..=4)?;
        let Some(Arg::Integer(bytes @ (4 | 8 | 16))) = s.args.get(2).cloned() else {
            return s.error("copies 4, 8 or 16 bytes");
        };
        if bytes < cache {
            return s.error("`.cg` copies 16 bytes");
        }
        let to = self.address(s, 0, shared)?;
        let from = self.address(s, 1, AddressSpace::Global)?;
        let (mut present, mut skip) = (None, None);
        match s.args.get(3) {
            None => {}
            Some(Arg::Predicate { .. }) => skip = Some(self.condition(s, 3)?),
            Some(_) => present = Some(self.source(s, 3, Type::U32)?),
        }
        self.emit_for(s, Op::AsyncCopy { to, from, bytes: bytes as u32, present, skip });
        Ok(())
    }

    /// `cp.async.mbarrier.arrive`: the copies are done, so that this arrives at once.
    fn copy_arrive(&mut self, s: &mut Statement<'_>) -> Result {
        if !s.flag("arrive") {
            return s.unknown();
        }
        let counted = s.flag("noinc");
        let space = s.choose(&SPACES).unwrap_or(AddressSpace::Generic);
        s.flag("b64");
        s.finish(1..=1)?;
        let address = self.address(s, 0, space)?;
        // Without `.noinc` the arrival is added to the pending count first: together they change nothing.
        let op = MbarrierOp::Arrive { state: None, count: None, expect_bytes: None, drop: false };
        self.emit_for(s, if counted { Op::Mbarrier { op, space, address } } else { Op::Nop });
        Ok(())
    }

    fn mbarrier(&mut self, s: &mut Statement<'_>) -> Result {
        s.choose(&ORDERS);
        // `.shared::cluster` has no part that is a scope, so that the order of these two does not matter.
        s.choose(&SCOPES);
        let space = s.choose(&SPACES).unwrap_or(AddressSpace::Generic);
        if s.flag("pending_count") {
            s.flag("b64");
            s.finish(2..=2)?;
            let (to, state) = (self.target(s, 0, Type::U32)?, self.source(s, 1, Type::B64)?);
            let address = Address { base: Base::Value(state), offset: 0 };
            let op = MbarrierOp::PendingCount { to, state };
            self.emit_for(s, Op::Mbarrier { op, space, address });
            return Ok(());
        }
        let parity = s.flag("parity");
        let expect = s.flag("expect_tx");
        let operation = match s.modifiers.first().copied() {
            Some(operation) if operation != "b64" => {
                s.modifiers.remove(0);
                operation
            }
            _ if expect => "expect_tx",
            _ => return s.unknown(),
        };
        s.flag("b64");
        let (op, index) = match operation {
            "init" => (MbarrierOp::Init { count: self.source(s, 1, Type::U32)? }, 0),
            "inval" => (MbarrierOp::Invalidate, 0),
            "expect_tx" => (MbarrierOp::ExpectTx { bytes: self.source(s, 1, Type::U32)? }, 0),
            "complete_tx" => (MbarrierOp::CompleteTx { bytes: self.source(s, 1, Type::U32)? }, 0),
            "arrive" | "arrive_drop" => self.mbarrier_arrive(s, operation == "arrive_drop", expect)?,
            "test_wait" | "try_wait" => {
                let done = self.predicate_target(s, 0)?;
                if parity {
                    (MbarrierOp::TestParity { done, parity: self.source(s, 2, Type::U32)? }, 1)
                } else {
                    (MbarrierOp::TestState { done, state: self.source(s, 2, Type::B64)? }, 1)
                }
            }
            _ => return s.unknown(),
        };
        let address = self.address(s, index, space)?;
        s.finish(1..=4)?;
        self.emit_for(s, Op::Mbarrier { op, space, address });
        Ok(())
    }

    fn mbarrier_arrive(
        &mut self,
        s: &mut Statement<'_>,
        drop: bool,
        expect: bool,
    ) -> Result<(MbarrierOp, usize)> {
        s.flag("noComplete");
        // The state may be left out when the object is in another block's memory.
        let first = usize::from(!matches!(s.args.first(), Some(Arg::Memory { .. })));
        let state = match s.args.first() {
            Some(Arg::Sink) => None,
            _ if first == 0 => None,
            _ => Some(self.target(s, 0, Type::B64)?),
        };
        let operand = match s.args.len() - first {
            1 => None,
            _ => Some(self.source(s, first + 1, Type::U32)?),
        };
        let (count, expect_bytes) = if expect { (None, operand) } else { (operand, None) };
        Ok((MbarrierOp::Arrive { state, count, expect_bytes, drop }, first))
    }
}

fn check_vector(s: &Statement<'_>, ty: Type, count: usize) -> Result {
    if count > 1 && (ty == Type::B128 || ty.bytes() * count > 32) || ty == Type::Pred {
        return s.error("a vector that is too long");
    }
    Ok(())
}

fn cell(ty: Type) -> Cell {
    Cell { bytes: ty.bytes().min(8) as u32, signed: ty.is_signed() }
}

/// The operation and the type of an atomic.
fn atomic_op(s: &mut Statement<'_>) -> Result<(AtomicOp, Type)> {
    let names = ["and", "or", "xor", "cas", "exch", "add", "inc", "dec", "min", "max"];
    let Some(name) = names.into_iter().find(|name| s.flag(name)) else {
        return s.error("needs an operation");
    };
    let keeps_subnormals = s.flag("noftz");
    let ty = s.ty()?;
    if keeps_subnormals != matches!(ty, Type::F16 | Type::F16x2 | Type::Bf16 | Type::Bf16x2) {
        return s.error("16-bit floating-point numbers, and no others, need `.noftz`");
    }
    let op = match (name, ty) {
        ("cas" | "exch", _) if s.name == "red" => return s.unknown(),
        ("cas", Type::B16 | Type::B32 | Type::B64) => AtomicOp::CompareAndSwap,
        ("exch", Type::B32 | Type::B64) => AtomicOp::Exchange,
        ("add", Type::U32 | Type::S32 | Type::U64) => AtomicOp::Add,
        ("add", Type::S64) => return s.unknown(),
        ("add", Type::F32) => AtomicOp::AddSingle,
        _ => match combine(name, ty) {
            Some(combine) => AtomicOp::Update(combine),
            None => return s.unknown(),
        },
    };
    Ok((op, ty))
}

/// The function by which an atomic or a reduction joins two values.
pub(super) fn combine(name: &str, ty: Type) -> Option<Combine> {
    let kind = int_type(ty);
    let float = FloatMode { rounding: Rounding::Nearest, ftz: false, sat: false };
    let extreme = MinMaxMode::default();
    let word = matches!(ty, Type::B32 | Type::B64);
    let integer = ty.is_integer() && ty.bits() >= 32;
    Some(match (name, ty) {
        ("and", _) if word => Box::new(|a, b| a & b),
        ("or", _) if word => Box::new(|a, b| a | b),
        ("xor", _) if word => Box::new(|a, b| a ^ b),
        ("add", _) if integer => Box::new(u64::wrapping_add),
        ("min", _) if integer => Box::new(move |a, b| int::min(a, b, kind)),
        ("max", _) if integer => Box::new(move |a, b| int::max(a, b, kind)),
        ("inc", Type::U32) => Box::new(|a, b| {
            let (a, b) = (a as u32, b as u32);
            u64::from(if a >= b { 0 } else { a + 1 })
        }),
        ("dec", Type::U32) => Box::new(|a, b| {
            let (a, b) = (a as u32, b as u32);
            u64::from(if a == 0 || a > b { b } else { a - 1 })
        }),
        ("add", Type::F64) => Box::new(|a, b| arith::f64::add(a, b, Rounding::Nearest)),
        ("add", Type::F16) => Box::new(move |a, b| u64::from(f16::add(a as u16, b as u16, float))),
        ("add", Type::Bf16) => Box::new(move |a, b| u64::from(bf16::add(a as u16, b as u16, float))),
        ("add", Type::F16x2) => Box::new(halves2(move |a, b| f16::add(a, b, float))),
        ("add", Type::Bf16x2) => Box::new(halves2(move |a, b| bf16::add(a, b, float))),
        ("min", Type::F16x2) => Box::new(halves2(move |a, b| f16::min(a, b, extreme))),
        ("max", Type::F16x2) => Box::new(halves2(move |a, b| f16::max(a, b, extreme))),
        ("min", Type::Bf16x2) => Box::new(halves2(move |a, b| bf16::min(a, b, extreme))),
        ("max", Type::Bf16x2) => Box::new(halves2(move |a, b| bf16::max(a, b, extreme))),
        _ => return None,
    })
}
