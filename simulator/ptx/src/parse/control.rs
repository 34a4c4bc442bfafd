//! Branches, calls and the end of threads.

use super::operand::Arg;
use super::statement::Statement;
use super::{Parser, Result};
use crate::ir::{Base, Call, Callee, Op, Slot, Symbol};
use crate::lex::Token;
use crate::types::Type;

impl Parser<'_, '_> {
    pub(super) fn control_flow(&mut self, s: &mut Statement<'_>) -> Result {
        s.flag("uni");
        match s.name {
            "bra" => {
                s.finish(1..=1)?;
                let Arg::Label(label) = s.args[0].clone() else {
                    return s.error("needs a label");
                };
                self.emit_for(s, Op::Branch { target: u32::MAX });
                self.refer_to_label(&label, 0, s.line);
                return Ok(());
            }
            "brx" => return self.branch_table(s),
            "nanosleep" => {
                s.ty()?;
                s.finish(1..=1)?;
                self.source(s, 0, Type::U32)?;
                self.emit_for(s, Op::Yield);
                return Ok(());
            }
            // The next grid's start, the number of registers, a counter of events: nothing here depends on them.
            "griddepcontrol" | "setmaxnreg" | "pmevent" => {
                self.emit_for(s, Op::Nop);
                return Ok(());
            }
            _ => s.finish(0..=0)?,
        }
        let op = match s.name {
            "ret" => Op::Return,
            "exit" => Op::Exit,
            _ => Op::Trap,
        };
        self.emit_for(s, op);
        Ok(())
    }

    fn branch_table(&mut self, s: &mut Statement<'_>) -> Result {
        if !s.flag("idx") {
            return s.unknown();
        }
        s.finish(2..=2)?;
        let index = self.source(s, 0, Type::U32)?;
        let Arg::Targets(labels) = s.args[1].clone() else {
            return s.error("needs a list of labels (.branchtargets)");
        };
        self.emit_for(s, Op::BranchTable { index, targets: vec![u32::MAX; labels.len()] });
        for (entry, label) in labels.iter().enumerate() {
            self.refer_to_label(label, entry, s.line);
        }
        Ok(())
    }

    /// `call (results), function, (arguments), prototype;` from behind the modifiers on.
    pub(super) fn call(&mut self, s: &mut Statement<'_>) -> Result {
        s.flag("uni");
        s.finish(0..=0)?;
        let mut results = Vec::new();
        if matches!(self.peek(), Token::Punct("(")) {
            results = self.slots(s)?;
            self.expect(",")?;
        }
        let callee = match self.arg()? {
            Arg::Name { address, .. } => match address.base {
                Base::Symbol(symbol @ (Symbol::Function(_) | Symbol::Extern(_) | Symbol::Builtin(_))) => {
                    Callee::Symbol(symbol)
                }
                _ => return s.error("calls something that is no function"),
            },
            Arg::Label(name) => return s.error(format!("function `{name}` is not declared")),
            arg => Callee::Indirect(self.value(s, &arg, Type::B64, false)?),
        };
        let mut arguments = Vec::new();
        if self.accept(",") {
            if matches!(self.peek(), Token::Punct("(")) {
                arguments = self.slots(s)?;
                if self.accept(",") {
                    self.prototype(s)?;
                }
            } else {
                self.prototype(s)?;
            }
        }
        self.expect(";")?;
        if let Callee::Symbol(Symbol::Function(index)) = callee {
            let function = &self.module.functions[index as usize];
            let differs = |actual: &[Slot], formal: &[Slot]| {
                actual.len() != formal.len()
                    || actual.iter().zip(formal).any(|(a, f)| !a.is_value() && a.bytes() != f.bytes())
            };
            if function.kernel
                || differs(&arguments, &function.arguments)
                || differs(&results, &function.results)
            {
                return s.error(format!("the call does not match the declaration of `{}`", function.name));
            }
        }
        self.emit_for(s, Op::Call(Box::new(Call { callee, arguments, results })));
        Ok(())
    }

    fn prototype(&mut self, s: &Statement<'_>) -> Result {
        match self.arg()? {
            Arg::Prototype => Ok(()),
            _ => s.error("needs a prototype (.callprototype) or list of functions (.calltargets)"),
        }
    }

    /// Arguments or results in parentheses.
    fn slots(&mut self, s: &Statement<'_>) -> Result<Vec<Slot>> {
        self.expect("(")?;
        let mut slots = Vec::new();
        while !self.accept(")") {
            let slot = match self.arg()? {
                Arg::Register { index, ty } => Slot::Register { index, bytes: ty.bytes() as u32 },
                Arg::Name { slot: Some(slot), .. } => slot,
                arg @ Arg::Float(Token::F32(_), _) => {
                    Slot::Value { source: self.value(s, &arg, Type::B32, false)?, bytes: 4 }
                }
                Arg::Sink => {
                    let index = self.new_register(Type::B64);
                    Slot::Register { index, bytes: 8 }
                }
                arg @ Arg::Integer(_) => {
                    Slot::Value { source: self.value(s, &arg, Type::B64, false)?, bytes: 8 }
                }
                _ => return s.error("an argument is a register, a constant or a .param variable"),
            };
            slots.push(slot);
            if !self.accept(",") {
                self.expect(")")?;
                break;
            }
        }
        Ok(slots)
    }
}
