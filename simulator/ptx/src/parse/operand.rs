//! Operands as they stand in the text, with their names looked up.

use super::function::Local;
use super::{Parser, Result, describe};
use crate::ir::{Address, Base, Condition, Register, Slot, Source, Special, Symbol};
use crate::lex::Token;
use crate::module::Space;
use crate::types::{AddressSpace, Type};

/// One operand.
#[derive(Clone, Debug)]
pub(super) enum Arg {
    Register {
        index: Register,
        ty: Type,
    },
    Predicate {
        index: u32,
        negated: bool,
    },
    Integer(u64),
    /// A floating-point constant and whether a minus precedes it.
    Float(Token<'static>, bool),
    Special(Special),
    /// A variable or function by its name: its address, or itself in a call.
    Name {
        address: Address,
        space: AddressSpace,
        slot: Option<Slot>,
    },
    /// `[…]`, and the space of the variable if it names one.
    Memory {
        address: Address,
        space: Option<AddressSpace>,
    },
    Vector(Vec<Arg>),
    /// `a|b`
    Pair(Box<(Arg, Arg)>),
    /// `_`
    Sink,
    Targets(Vec<String>),
    Prototype,
    /// A name that nothing in scope has: a label.
    Label(String),
}

impl Parser<'_, '_> {
    pub(super) fn arg(&mut self) -> Result<Arg> {
        let first = self.single_arg()?;
        if self.accept("|") {
            return Ok(Arg::Pair(Box::new((first, self.single_arg()?))));
        }
        Ok(first)
    }

    fn single_arg(&mut self) -> Result<Arg> {
        match *self.peek() {
            Token::Punct("{") => self.vector(),
            Token::Punct("[") => self.memory(),
            Token::Punct("!") if matches!(self.peek_after(1), Token::Word(_)) => {
                self.at += 1;
                match self.single_arg()? {
                    Arg::Predicate { index, negated } => Ok(Arg::Predicate { index, negated: !negated }),
                    _ => self.error("`!` needs a predicate"),
                }
            }
            Token::Punct("-") if matches!(self.peek_after(1), Token::F32(_) | Token::F64(_)) => {
                self.at += 1;
                self.float_arg(true)
            }
            Token::F32(_) | Token::F64(_) => self.float_arg(false),
            Token::Word("_") => {
                self.at += 1;
                Ok(Arg::Sink)
            }
            Token::Word("WARP_SZ") | Token::Int(_) | Token::Punct(_) => {
                Ok(Arg::Integer(self.operand_expression()?))
            }
            Token::Word(name) => self.named(name),
            _ => self.error(format!("expected an operand, found {}", describe(self.peek()))),
        }
    }

    fn float_arg(&mut self, negative: bool) -> Result<Arg> {
        match self.next() {
            Token::F32(bits) => Ok(Arg::Float(Token::F32(bits), negative)),
            Token::F64(bits) => Ok(Arg::Float(Token::F64(bits), negative)),
            _ => self.error("expected a floating-point constant"),
        }
    }

    fn vector(&mut self) -> Result<Arg> {
        self.expect("{")?;
        let mut parts = Vec::new();
        loop {
            parts.push(self.single_arg()?);
            if !self.accept(",") {
                self.expect("}")?;
                return Ok(Arg::Vector(parts));
            }
        }
    }

    /// `[%rd1+8]`, `[name]`, `[name+8]`, `[4096]`.
    fn memory(&mut self) -> Result<Arg> {
        self.expect("[")?;
        let (base, mut offset, space) = match *self.peek() {
            Token::Word(name) if name != "WARP_SZ" => match self.named(name)? {
                Arg::Register { index, ty } if matches!(ty.bits(), 32 | 64) && !ty.is_float() => {
                    // A 32-bit address register is extended with zeros.
                    let index = if ty.bits() == 32 { self.zero_extend(index) } else { index };
                    (Base::Value(Source::Register(index)), 0, None)
                }
                Arg::Name { address, space, .. } => (address.base, address.offset, Some(space)),
                _ => return self.error(format!("`{name}` is no address")),
            },
            _ => (Base::Value(self.constant(0)), self.operand_expression()? as i64, None),
        };
        if matches!(self.peek(), Token::Punct("+" | "-")) {
            offset = offset.wrapping_add(self.operand_expression()? as i64);
        }
        self.expect("]")?;
        Ok(Arg::Memory { address: Address { base, offset }, space })
    }

    fn named(&mut self, name: &str) -> Result<Arg> {
        self.at += 1;
        let arg = match self.lookup(name) {
            Some(Local::Register { index, ty, elements: 1 }) => Arg::Register { index, ty },
            Some(Local::Register { index, ty, elements }) => self.vector_register(index, ty, elements),
            Some(Local::Predicate(index)) => Arg::Predicate { index, negated: false },
            Some(Local::EntryParam { offset }) => Arg::Name {
                address: Address { base: Base::EntryParams, offset: i64::from(offset) },
                space: AddressSpace::Param,
                slot: None,
            },
            Some(Local::Frame { offset, bytes, param }) => Arg::Name {
                address: Address { base: Base::Frame, offset: i64::from(offset) },
                space: if param { AddressSpace::Param } else { AddressSpace::Local },
                slot: Some(Slot::Frame { offset, bytes }),
            },
            Some(Local::Symbol(symbol)) => Arg::Name {
                address: Address { base: Base::Symbol(symbol), offset: 0 },
                space: match symbol {
                    Symbol::Shared(_) => AddressSpace::Shared,
                    Symbol::Global(index) => match self.module.globals[index as usize].space {
                        Space::Const => AddressSpace::Const,
                        Space::Global => AddressSpace::Global,
                    },
                    _ => AddressSpace::Global,
                },
                slot: None,
            },
            Some(Local::Targets(labels)) => Arg::Targets(labels),
            Some(Local::Prototype) => Arg::Prototype,
            None if name.starts_with('%') => Arg::Special(self.special(name)?),
            None => Arg::Label(name.to_owned()),
        };
        // `name+4` is the address of something inside the variable.
        if let Arg::Name { mut address, space, slot } = arg {
            if matches!(self.peek(), Token::Punct("+" | "-")) {
                address.offset = address.offset.wrapping_add(self.operand_expression()? as i64);
            }
            return Ok(Arg::Name { address, space, slot });
        }
        Ok(arg)
    }

    /// A register declared `.v4`: whole, or one element of it (`%v.x`).
    fn vector_register(&mut self, first: Register, ty: Type, elements: u32) -> Arg {
        let rows = ty.bits().div_ceil(64);
        let element = |number: u32| Arg::Register { index: first + number * rows, ty };
        let number = match self.peek() {
            Token::Dot("x" | "r") => 0,
            Token::Dot("y" | "g") => 1,
            Token::Dot("z" | "b") if elements > 2 => 2,
            Token::Dot("w" | "a") if elements > 3 => 3,
            _ => return Arg::Vector((0..elements).map(element).collect()),
        };
        self.at += 1;
        element(number)
    }

    fn special(&mut self, name: &str) -> Result<Special> {
        if let Some(special) = simple_special(name) {
            return Ok(special);
        }
        let by_dimension: fn(usize) -> Special = match name {
            "%tid" => Special::Tid,
            "%ntid" => Special::Ntid,
            "%ctaid" => Special::CtaId,
            "%nctaid" => Special::NctaId,
            "%clusterid" => Special::ClusterId,
            "%nclusterid" => Special::NumClusters,
            "%cluster_ctaid" => Special::ClusterCtaId,
            "%cluster_nctaid" => Special::ClusterNumCtas,
            _ => return self.error(format!("`{name}` is not declared")),
        };
        let dimension = match self.next() {
            Token::Dot("x") => 0,
            Token::Dot("y") => 1,
            Token::Dot("z") => 2,
            _ => return self.error(format!("`{name}` needs .x, .y or .z")),
        };
        Ok(by_dimension(dimension))
    }
}

fn simple_special(name: &str) -> Option<Special> {
    Some(match name {
        "%laneid" => Special::LaneId,
        "%warpid" => Special::WarpId,
        "%nwarpid" => Special::NumWarps,
        "%smid" => Special::SmId,
        "%nsmid" => Special::NumSms,
        "%gridid" => Special::GridId,
        "%lanemask_eq" => Special::LaneMaskEq,
        "%lanemask_le" => Special::LaneMaskLe,
        "%lanemask_lt" => Special::LaneMaskLt,
        "%lanemask_ge" => Special::LaneMaskGe,
        "%lanemask_gt" => Special::LaneMaskGt,
        "%clock" => Special::Clock,
        "%clock_hi" => Special::ClockHigh,
        "%clock64" => Special::Clock64,
        "%globaltimer" => Special::GlobalTimer,
        "%globaltimer_lo" => Special::GlobalTimerLow,
        "%globaltimer_hi" => Special::GlobalTimerHigh,
        "%dynamic_smem_size" => Special::DynamicSharedBytes,
        "%total_smem_size" | "%aggr_smem_size" => Special::TotalSharedBytes,
        "%cluster_ctarank" => Special::ClusterCtaRank,
        "%cluster_nctarank" => Special::ClusterSize,
        "%is_explicit_cluster" => Special::IsExplicitCluster,
        _ => {
            let counter = name.strip_prefix("%envreg").or_else(|| name.strip_prefix("%pm"))?;
            let number: u32 = counter.strip_suffix("_64").unwrap_or(counter).parse().ok()?;
            if number > 31 {
                return None;
            }
            Special::Zero
        }
    })
}

/// The guard or operand that a predicate makes.
pub(super) fn condition(index: u32, negated: bool) -> Condition {
    Condition::Predicate { index, negated }
}
