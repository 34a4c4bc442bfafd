//! Variables: their declarations and initial values.

use super::{Linkage, Parser, Result, describe};
use crate::error::ParseError;
use crate::ir::Symbol;
use crate::lex::Token;
use crate::module::{Global, Relocation, SharedVariable, Space};
use crate::types::Type;

/// Shared memory of a block ends far below this, so that sums of sizes do not overflow.
const MAX_SHARED_BYTES: usize = 1 << 24;

/// The type, alignment and size of one declared name.
pub(super) struct Declaration {
    pub(super) name: String,
    pub(super) ty: Type,
    pub(super) size_bytes: usize,
    pub(super) align: usize,
    /// An array whose first dimension is left open: `x[]`.
    pub(super) open: bool,
}

/// What precedes the names of a declaration.
#[derive(Clone, Copy)]
pub(super) struct DeclaredType {
    pub(super) ty: Type,
    pub(super) elements: usize,
    align: usize,
}

impl Parser<'_, '_> {
    /// `.align 8 .v2 .f32` and what else may be between the state space and the name.
    pub(super) fn declaration_kind(&mut self) -> Result<DeclaredType> {
        let (mut align, mut elements) = (None, 1);
        loop {
            let Token::Dot(word) = *self.peek() else {
                return self.error(format!("expected a type, found {}", describe(self.peek())));
            };
            self.at += 1;
            match word {
                "align" => align = Some(self.int("an alignment")?),
                "v2" => elements = 2,
                "v4" => elements = 4,
                "v8" => elements = 8,
                _ => {
                    let Some(ty) = Type::named(word) else {
                        self.at -= 1;
                        return self.error(format!("unknown type or attribute `.{word}`"));
                    };
                    let align = match align {
                        Some(align) if !align.is_power_of_two() || align > 4096 => {
                            return self.error(format!("alignment {align} is no power of two up to 4096"));
                        }
                        Some(align) => align as usize,
                        None => ty.bytes() * elements,
                    };
                    return Ok(DeclaredType { ty, elements, align });
                }
            }
        }
    }

    /// A name and its dimensions.
    pub(super) fn declarator(&mut self, kind: DeclaredType) -> Result<Declaration> {
        let name = self.word("a name")?.to_owned();
        self.dimensions(name, kind)
    }

    pub(super) fn dimensions(&mut self, name: String, kind: DeclaredType) -> Result<Declaration> {
        let mut size_bytes = kind.ty.bytes() * kind.elements;
        let mut open = false;
        while self.accept("[") {
            if self.accept("]") {
                open = true;
                continue;
            }
            let count = self.expression()?;
            self.expect("]")?;
            let size = usize::try_from(count).ok().and_then(|count| size_bytes.checked_mul(count));
            match size.filter(|size| *size < 1 << 40) {
                Some(size) => size_bytes = size,
                None => return self.error(format!("`{name}` is too large")),
            }
        }
        Ok(Declaration { name, ty: kind.ty, size_bytes, align: kind.align, open })
    }

    /// `.global …;`, `.const …;` or `.shared …;` outside functions.
    pub(super) fn module_variables(&mut self, linkage: Linkage) -> Result {
        let Token::Dot(space) = self.next() else { unreachable!("the caller saw a directive") };
        let kind = self.declaration_kind()?;
        loop {
            let (name, symbol) = self.variable(space, kind, linkage)?;
            if let Some(symbol) = symbol {
                self.define_variable(&name, symbol, linkage)?;
            }
            if !self.accept(",") {
                return self.expect(";");
            }
        }
    }

    fn define_variable(&mut self, name: &str, symbol: Symbol, linkage: Linkage) -> Result {
        // An external array without a size is the block's dynamic shared memory: defined by its declaration.
        let linkage = if linkage == Linkage::Extern { Linkage::Internal } else { linkage };
        if self.define(name, symbol, linkage)? {
            return Ok(());
        }
        match symbol {
            Symbol::Global(_) => drop(self.module.globals.pop()),
            _ => drop(self.module.shared.pop()),
        }
        Ok(())
    }

    /// One variable with its initial value. No symbol comes back for one that is only declared.
    pub(super) fn variable(
        &mut self,
        space: &str,
        kind: DeclaredType,
        linkage: Linkage,
    ) -> Result<(String, Option<Symbol>)> {
        let mut declared = self.declarator(kind)?;
        if space == "shared" {
            let dynamic = linkage == Linkage::Extern && declared.open;
            if declared.open && !dynamic || declared.size_bytes > MAX_SHARED_BYTES {
                return self.error(format!("`{}` needs a size below 16 MiB", declared.name));
            }
            let size_bytes = if dynamic { 0 } else { declared.size_bytes as u32 };
            let align = declared.align as u32;
            self.module.shared.push(SharedVariable { size_bytes, align, dynamic });
            return Ok((declared.name, Some(Symbol::Shared(self.module.shared.len() as u32 - 1))));
        }
        if linkage == Linkage::Extern {
            self.declare(&declared.name);
            return Ok((declared.name, None));
        }
        let (mut init, mut relocations) = (Vec::new(), Vec::new());
        if self.accept("=") {
            self.initial_value(declared.ty, &mut init, &mut relocations)?;
            if declared.open {
                declared.size_bytes = init.len();
            } else if init.len() > declared.size_bytes {
                return self.error(format!("too many initial values for `{}`", declared.name));
            }
        } else if declared.open {
            return self.error(format!("`{}` needs a size", declared.name));
        }
        self.module.globals.push(Global {
            name: declared.name.clone(),
            space: if space == "const" { Space::Const } else { Space::Global },
            size_bytes: declared.size_bytes,
            align: declared.align,
            visible: matches!(linkage, Linkage::Visible | Linkage::Weak),
            init: if init.iter().all(|byte| *byte == 0) { Vec::new() } else { init },
            relocations,
        });
        Ok((declared.name, Some(Symbol::Global(self.module.globals.len() as u32 - 1))))
    }

    /// A value or a nest of them in braces, which are laid out one after the other.
    fn initial_value(&mut self, ty: Type, init: &mut Vec<u8>, relocations: &mut Vec<Relocation>) -> Result {
        if self.accept("{") {
            while !self.accept("}") {
                self.initial_value(ty, init, relocations)?;
                if !self.accept(",") {
                    self.expect("}")?;
                    break;
                }
            }
            return Ok(());
        }
        let bytes = ty.bytes();
        let value = match *self.peek() {
            Token::F32(_) | Token::F64(_) => self.float_bits(ty, false)?,
            Token::Punct("-") if matches!(self.peek_after(1), Token::F32(_) | Token::F64(_)) => {
                self.at += 1;
                self.float_bits(ty, true)?
            }
            Token::Word(name) if name != "WARP_SZ" => {
                let relocation = self.relocation(init.len(), bytes, u64::MAX)?;
                relocations.push(relocation);
                0
            }
            Token::Int(mask) if matches!(self.peek_after(1), Token::Punct("(")) => {
                // `0xff00(name)`: a part of an address.
                self.at += 2;
                let relocation = self.relocation(init.len(), bytes, mask)?;
                self.expect(")")?;
                relocations.push(relocation);
                0
            }
            _ => self.expression()?,
        };
        init.extend(&value.to_le_bytes()[..bytes.min(8)]);
        init.resize(init.len() + bytes.saturating_sub(8), 0);
        Ok(())
    }

    /// `name`, `name+4`, `generic(name)+4`.
    fn relocation(&mut self, offset: usize, bytes: usize, mask: u64) -> Result<Relocation> {
        let line = self.line();
        let mut symbol = self.word("a name")?;
        if symbol == "generic" && self.accept("(") {
            symbol = self.word("a name")?;
            self.expect(")")?;
        }
        let mut addend = 0i64;
        if matches!(self.peek(), Token::Punct("+" | "-")) {
            addend = self.expression()? as i64;
        }
        match self.names.get(symbol) {
            Some(Symbol::Shared(_) | Symbol::Builtin(_)) | None => Err(ParseError::new(
                line,
                format!("`{symbol}` has no address that could be an initial value"),
            )),
            Some(&target) => Ok(Relocation {
                offset,
                symbol: symbol.to_owned(),
                addend,
                target,
                bytes: bytes.min(8),
                mask,
            }),
        }
    }

    /// The floating-point constant that is next, as a value of type `ty`.
    fn float_bits(&mut self, ty: Type, negative: bool) -> Result<u64> {
        let token = self.next();
        match float_constant(&token, ty, negative) {
            Some(bits) => Ok(bits),
            None => self.error(format!("a floating-point value does not fit type .{}", ty.name())),
        }
    }
}

/// The bits of a floating-point constant as a value of type `ty`; none where the type cannot have it.
pub(super) fn float_constant(token: &Token<'_>, ty: Type, negative: bool) -> Option<u64> {
    let (single, double) = match *token {
        // Not by way of f64, which would make signalling NaNs quiet.
        Token::F32(bits) => (bits, f64::from(f32::from_bits(bits)).to_bits()),
        Token::F64(bits) => ((f64::from_bits(bits) as f32).to_bits(), bits),
        _ => return None,
    };
    match ty {
        Type::F32 => Some(u64::from(single ^ u32::from(negative) << 31)),
        Type::B32 if matches!(token, Token::F32(_)) => Some(u64::from(single ^ u32::from(negative) << 31)),
        Type::F64 => Some(double ^ u64::from(negative) << 63),
        Type::B64 if matches!(token, Token::F64(_)) => Some(double ^ u64::from(negative) << 63),
        _ => None,
    }
}
