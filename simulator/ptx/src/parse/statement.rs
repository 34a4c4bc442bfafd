//! One instruction: its modifiers, its operands, and what they are as sources and targets.

use super::function::Local;
use super::operand::{Arg, condition};
use super::variable::float_constant;
use super::{Parser, Result, describe};
use crate::error::ParseError;
use crate::ir::{Address, Condition, Op, Register, Source};
use crate::lex::Token;
use crate::types::{AddressSpace, Type};

/// An instruction as written in the text. Lowering takes its modifiers away one by one, so that what nobody took
/// is an error.
pub(super) struct Statement<'t> {
    pub(super) name: &'t str,
    pub(super) modifiers: Vec<&'t str>,
    pub(super) args: Vec<Arg>,
    pub(super) guard: Option<Condition>,
    pub(super) line: u32,
    full_name: String,
}

impl Statement<'_> {
    pub(super) fn error<T>(&self, message: impl AsRef<str>) -> Result<T> {
        Err(ParseError::new(self.line, format!("`{}`: {}", self.full_name, message.as_ref())))
    }

    pub(super) fn unknown<T>(&self) -> Result<T> {
        Err(ParseError::new(self.line, format!("unknown instruction `{}`", self.full_name)))
    }

    /// Takes a modifier if it is there.
    pub(super) fn flag(&mut self, name: &str) -> bool {
        match self.modifiers.iter().position(|modifier| *modifier == name) {
            Some(index) => {
                self.modifiers.remove(index);
                true
            }
            None => false,
        }
    }

    /// Takes the first modifier that is in the table.
    pub(super) fn choose<T: Copy>(&mut self, table: &[(&str, T)]) -> Option<T> {
        let find = |modifier: &&str| table.iter().find(|(name, _)| name == modifier).map(|(_, value)| *value);
        let (index, value) = self.modifiers.iter().enumerate().find_map(|(i, m)| Some((i, find(m)?)))?;
        self.modifiers.remove(index);
        Some(value)
    }

    pub(super) fn require<T: Copy>(&mut self, what: &str, table: &[(&str, T)]) -> Result<T> {
        match self.choose(table) {
            Some(value) => Ok(value),
            None => self.error(format!("needs {what}")),
        }
    }

    /// Takes the first modifier that is a type.
    pub(super) fn maybe_ty(&mut self) -> Option<Type> {
        let (index, ty) = self.modifiers.iter().enumerate().find_map(|(i, m)| Some((i, Type::named(m)?)))?;
        self.modifiers.remove(index);
        Some(ty)
    }

    pub(super) fn ty(&mut self) -> Result<Type> {
        match self.maybe_ty() {
            Some(ty) => Ok(ty),
            None => self.error("needs a type"),
        }
    }

    /// Checks that no modifier is left over, and how many operands there are.
    pub(super) fn finish(&self, operands: std::ops::RangeInclusive<usize>) -> Result {
        if let Some(modifier) = self.modifiers.first() {
            return self.error(format!("`.{modifier}` is not known here"));
        }
        if !operands.contains(&self.args.len()) {
            return self.error(format!("{} operands", self.args.len()));
        }
        Ok(())
    }
}

/// Whether a register of type `register` may stand where an instruction has type `ty`, of the same width.
fn fits(register: Type, ty: Type) -> bool {
    let packed = |ty: Type| !ty.is_integer() && !ty.is_float() && !ty.is_untyped();
    register == ty
        || register.is_untyped()
        || ty.is_untyped()
        || (register.is_integer() && ty.is_integer())
        || (packed(ty) && register.is_integer())
        || (register.is_float() && packed(ty))
}

impl<'t> Parser<'_, 't> {
    /// Parses an instruction and emits what it does.
    pub(super) fn instruction(&mut self) -> Result {
        let line = self.line();
        let guard = self.guard()?;
        let name = self.word("an instruction")?;
        let mut modifiers = Vec::new();
        while let Token::Dot(modifier) = *self.peek() {
            modifiers.push(modifier);
            self.at += 1;
        }
        let full_name = std::iter::once(name).chain(modifiers.iter().copied()).collect::<Vec<_>>().join(".");
        let mut statement = Statement { name, modifiers, args: Vec::new(), guard, line, full_name };
        if name == "call" {
            self.call(&mut statement)?;
        } else {
            while !self.accept(";") {
                statement.args.push(self.arg()?);
                if !self.accept(",") && !matches!(self.peek(), Token::Punct(";")) {
                    return self.error(format!("expected `;`, found {}", describe(self.peek())));
                }
            }
            self.lower(&mut statement)?;
        }
        Ok(())
    }

    /// `@%p` or `@!%p`
    fn guard(&mut self) -> Result<Option<Condition>> {
        if !self.accept("@") {
            return Ok(None);
        }
        let negated = self.accept("!");
        let name = self.word("a predicate")?;
        match self.lookup(name) {
            Some(Local::Predicate(index)) => Ok(Some(condition(index, negated))),
            _ => self.error(format!("`{name}` is no predicate")),
        }
    }
}

// Operands of a statement as an instruction takes them.
impl Parser<'_, '_> {
    /// Emits under the statement's guard.
    pub(super) fn emit_for(&mut self, s: &Statement<'_>, op: Op) {
        self.emit(op, s.guard, s.line);
    }

    /// Operand `index` as a value of type `ty`.
    pub(super) fn source(&mut self, s: &Statement<'_>, index: usize, ty: Type) -> Result<Source> {
        match s.args.get(index) {
            Some(arg) => self.value(s, &arg.clone(), ty, false),
            None => s.error("too few operands"),
        }
    }

    /// Like [`Parser::source`], where the register may be wider than the type (`st`, `cvt`).
    pub(super) fn wide_source(&mut self, s: &Statement<'_>, index: usize, ty: Type) -> Result<Source> {
        match s.args.get(index) {
            Some(arg) => self.value(s, &arg.clone(), ty, true),
            None => s.error("too few operands"),
        }
    }

    pub(super) fn value(&mut self, s: &Statement<'_>, arg: &Arg, ty: Type, wide: bool) -> Result<Source> {
        match arg {
            Arg::Register { index, ty: register } => {
                self.check_register(s, *register, ty, wide)?;
                Ok(Source::Register(*index))
            }
            Arg::Integer(value) => {
                if ty.is_float() {
                    return s.error("an integer constant where a floating-point number belongs");
                }
                Ok(self.constant(*value))
            }
            Arg::Float(token, negative) => match float_constant(token, ty, *negative) {
                Some(bits) => Ok(self.constant(bits)),
                None => s.error(format!("a floating-point constant does not fit .{}", ty.name())),
            },
            Arg::Special(_) => s.error("a special register can only be moved or converted"),
            Arg::Name { address, space, .. } if s.name == "cvta" => {
                let to = self.new_register(Type::B64);
                let op = Op::TakeAddress { to, address: *address, space: *space };
                self.emit(op, None, s.line);
                Ok(Source::Register(to))
            }
            Arg::Name { .. } => s.error("an address must be moved to a register first"),
            Arg::Label(name) => s.error(format!("`{name}` is not declared")),
            _ => s.error("an operand that is no value of one register"),
        }
    }

    fn check_register(&self, s: &Statement<'_>, register: Type, ty: Type, wide: bool) -> Result {
        let width = if wide { register.bits() >= ty.bits() } else { register.bits() == ty.bits() };
        // A wider register holds an integer or bits, whatever the narrow value is.
        let class = if register.bits() == ty.bits() { fits(register, ty) } else { true };
        if width && class {
            return Ok(());
        }
        s.error(format!("a register of type .{} where .{} is needed", register.name(), ty.name()))
    }

    /// Operand `index` as the register that receives a value of type `ty`. The sink `_` gets one of its own.
    pub(super) fn target(&mut self, s: &Statement<'_>, index: usize, ty: Type) -> Result<Register> {
        match s.args.get(index).cloned() {
            Some(arg) => self.target_of(s, &arg, ty, false),
            None => s.error("too few operands"),
        }
    }

    /// Like [`Parser::target`], where the register may be wider than the type (`ld`, `cvt`).
    pub(super) fn wide_target(&mut self, s: &Statement<'_>, index: usize, ty: Type) -> Result<Register> {
        match s.args.get(index).cloned() {
            Some(arg) => self.target_of(s, &arg, ty, true),
            None => s.error("too few operands"),
        }
    }

    pub(super) fn target_of(
        &mut self,
        s: &Statement<'_>,
        arg: &Arg,
        ty: Type,
        wide: bool,
    ) -> Result<Register> {
        match arg {
            Arg::Register { index, ty: register } => {
                self.check_register(s, *register, ty, wide)?;
                Ok(*index)
            }
            Arg::Sink => Ok(self.new_register(Type::B128)),
            Arg::Label(name) => s.error(format!("`{name}` is not declared")),
            _ => s.error("the result needs a register"),
        }
    }

    /// Operand `index` as a predicate that is read.
    pub(super) fn condition(&self, s: &Statement<'_>, index: usize) -> Result<Condition> {
        match s.args.get(index) {
            Some(Arg::Predicate { index, negated }) => Ok(condition(*index, *negated)),
            Some(Arg::Integer(value)) => Ok(Condition::Constant(*value != 0)),
            _ => s.error("needs a predicate"),
        }
    }

    /// An operand as a predicate that is written; none for the sink.
    pub(super) fn predicate_of(&self, s: &Statement<'_>, arg: &Arg) -> Result<Option<u32>> {
        match arg {
            Arg::Predicate { index, negated: false } => Ok(Some(*index)),
            Arg::Sink => Ok(None),
            _ => s.error("the result needs a predicate"),
        }
    }

    /// Operand `index` as a predicate that is written. The sink gets one of its own.
    pub(super) fn predicate_target(&mut self, s: &Statement<'_>, index: usize) -> Result<u32> {
        let Some(arg) = s.args.get(index) else { return s.error("too few operands") };
        match self.predicate_of(s, arg)? {
            Some(predicate) => Ok(predicate),
            None => Ok(self.new_predicate()),
        }
    }

    /// Operand `index` as an address in `space`.
    pub(super) fn address(&self, s: &Statement<'_>, index: usize, space: AddressSpace) -> Result<Address> {
        let Some(Arg::Memory { address, space: named }) = s.args.get(index) else {
            return s.error("needs an address in brackets");
        };
        let agree = match (named, space) {
            (None, _) => true,
            // What a variable's name refers to is known, so that no space needs to be named.
            (
                Some(AddressSpace::Global | AddressSpace::Shared | AddressSpace::Local),
                AddressSpace::Generic,
            ) => true,
            (Some(AddressSpace::Shared), AddressSpace::SharedCluster) => true,
            (Some(named), space) => *named == space,
        };
        if agree { Ok(*address) } else { s.error("the variable lies in another state space") }
    }

    /// A register with the low 32 bits of another, and zeros above.
    pub(super) fn zero_extend(&mut self, from: Register) -> Register {
        let to = self.new_register(Type::B64);
        let line = self.line();
        let a = Source::Register(from);
        self.emit(Op::Map1 { f: crate::compute::map1(|a| a & 0xffff_ffff), to, a }, None, line);
        to
    }
}
