//! Functions: headers, bodies, scopes, labels.

use std::collections::HashMap;

use super::{Linkage, Parser, Result, describe};
use crate::error::ParseError;
use crate::ir::{Condition, Instruction, Op, Register, Slot, Symbol};
use crate::lex::Token;
use crate::module::{Function, Param};
use crate::types::Type;

/// What a name inside a function refers to.
#[derive(Clone, Debug)]
pub(super) enum Local {
    /// The first of `elements` rows that belong to a register.
    Register {
        index: Register,
        ty: Type,
        elements: u32,
    },
    Predicate(u32),
    EntryParam {
        offset: u32,
    },
    /// A variable in the frame's local memory: `.local`, or `.param` of a function or call.
    Frame {
        offset: u32,
        bytes: u32,
        param: bool,
    },
    Symbol(Symbol),
    /// `.branchtargets`: labels for `brx.idx`.
    Targets(Vec<String>),
    /// `.calltargets` or `.callprototype`, which an indirect call names and nothing checks but the call itself.
    Prototype,
}

/// Registers that were declared as `%r<10>`.
struct Family {
    prefix: String,
    first: u32,
    count: u32,
    ty: Type,
}

#[derive(Default)]
struct Scope {
    names: HashMap<String, Local>,
    families: Vec<Family>,
    labels: HashMap<String, u32>,
    /// Branches whose labels are not known yet.
    pending: Vec<Pending>,
}

struct Pending {
    instruction: usize,
    /// Index in the table of a `brx.idx`.
    entry: usize,
    label: String,
    line: u32,
}

/// The function whose body is being parsed.
#[derive(Default)]
pub(super) struct Body {
    pub(super) rows: u32,
    pub(super) predicates: u32,
    pub(super) frame_bytes: u32,
    local_bytes: u32,
    pub(super) results: Vec<Slot>,
    /// The predicate that holds the condition code of `add.cc` and its like.
    pub(super) carry: Option<u32>,
    scopes: Vec<Scope>,
}

#[derive(Default)]
struct Limits {
    max_threads: Option<u32>,
    required_threads: Option<[u32; 3]>,
    required_cluster: Option<[u32; 3]>,
}

impl Parser<'_, '_> {
    /// A function from behind `.entry` or `.func` on.
    pub(super) fn function(&mut self, kernel: bool, linkage: Linkage) -> Result {
        let start = self.module.code.len() as u32;
        self.body = Body { scopes: vec![Scope::default()], ..Body::default() };
        let results = if matches!(self.peek(), Token::Punct("(")) { self.formals()? } else { Vec::new() };
        let name = self.word("a function's name")?.to_owned();
        let mut params = Vec::new();
        let mut arguments = Vec::new();
        if matches!(self.peek(), Token::Punct("(")) {
            if kernel {
                params = self.entry_params()?;
            } else {
                arguments = self.formals()?;
            }
        }
        let limits = self.function_directives()?;
        if self.accept(";") {
            self.declare(&name);
            return Ok(());
        }
        self.body.results = results.clone();
        // Known before its body is parsed, which may call it.
        let index = self.module.functions.len() as u32;
        let linkage = if linkage == Linkage::Extern { Linkage::Visible } else { linkage };
        let first = self.define(&name, Symbol::Function(index), linkage)?;
        let param_bytes = params.last().map_or(0, |p: &Param| p.offset + p.size);
        self.module.functions.push(Function {
            name,
            params,
            param_bytes,
            static_shared_bytes: 0,
            local_bytes: 0,
            registers: 0,
            max_threads: limits.max_threads,
            required_threads: limits.required_threads,
            required_cluster: limits.required_cluster,
            kernel: kernel && first,
            start,
            end: start,
            rows: 0,
            predicates: 0,
            frame_bytes: 0,
            arguments,
            results,
            shared_offsets: Vec::new(),
        });
        self.expect("{")?;
        self.block()?;
        self.finish_function(index as usize)
    }

    fn finish_function(&mut self, index: usize) -> Result {
        let line = self.tokens[self.at.saturating_sub(1)].line;
        // Falling off the end returns.
        self.module.code.push(Instruction { op: Op::Return, guard: None, line });
        self.close_scope()?;
        let function = &mut self.module.functions[index];
        function.end = self.module.code.len() as u32;
        function.rows = self.body.rows;
        function.predicates = self.body.predicates;
        function.frame_bytes = self.body.frame_bytes.next_multiple_of(16);
        function.local_bytes = self.body.local_bytes;
        Ok(())
    }

    /// `.maxntid 256, 1, 1` and the like, between a function's header and its body.
    fn function_directives(&mut self) -> Result<Limits> {
        let mut limits = Limits::default();
        while let Token::Dot(directive) = *self.peek() {
            self.at += 1;
            match directive {
                "maxntid" => {
                    let [x, y, z] = self.dimension_list()?;
                    limits.max_threads = Some(x.saturating_mul(y).saturating_mul(z));
                }
                "reqntid" => limits.required_threads = Some(self.dimension_list()?),
                "reqnctapercluster" => limits.required_cluster = Some(self.dimension_list()?),
                "minnctapersm"
                | "maxnctapersm"
                | "maxnreg"
                | "maxclusterrank"
                | "abi_preserve"
                | "abi_preserve_control" => drop(self.small_int("a number")?),
                "explicitcluster" | "noreturn" | "blocksareclusters" => {}
                "pragma" => self.skip_statement()?,
                _ => {
                    self.at -= 1;
                    return self.error(format!("unknown directive `.{directive}`"));
                }
            }
        }
        Ok(limits)
    }

    fn dimension_list(&mut self) -> Result<[u32; 3]> {
        let mut dimensions = [1; 3];
        for dimension in &mut dimensions {
            *dimension = self.small_int("a dimension")?;
            if !self.accept(",") {
                break;
            }
        }
        Ok(dimensions)
    }

    /// The parameters of a kernel.
    fn entry_params(&mut self) -> Result<Vec<Param>> {
        self.expect("(")?;
        let mut params: Vec<Param> = Vec::new();
        let mut end = 0;
        while !self.accept(")") {
            if !self.accept_dot("param") {
                return self.error("expected `.param`");
            }
            let kind = self.declaration_kind()?;
            self.pointer_attributes()?;
            let declared = self.declarator(kind)?;
            let offset = usize::next_multiple_of(end, declared.align);
            end = offset + declared.size_bytes;
            if end > 32764 {
                return self.error("more than 32764 bytes of parameters");
            }
            self.name(declared.name.clone(), Local::EntryParam { offset: offset as u32 })?;
            params.push(Param {
                name: declared.name,
                offset,
                size: declared.size_bytes,
                align: declared.align,
            });
            if !self.accept(",") {
                self.expect(")")?;
                break;
            }
        }
        Ok(params)
    }

    /// `.ptr .global .align 8`: what a pointer parameter points to.
    fn pointer_attributes(&mut self) -> Result {
        if !self.accept_dot("ptr") {
            return Ok(());
        }
        while let Token::Dot(word) = *self.peek() {
            self.at += 1;
            match word {
                "global" | "shared" | "local" | "const" => {}
                "align" => drop(self.int("an alignment")?),
                _ => return self.error(format!("unknown pointer attribute `.{word}`")),
            }
        }
        Ok(())
    }

    /// The parameters or results of a function that is no kernel.
    fn formals(&mut self) -> Result<Vec<Slot>> {
        self.expect("(")?;
        let mut slots = Vec::new();
        while !self.accept(")") {
            let register = match self.next() {
                Token::Dot("reg") => true,
                Token::Dot("param") => false,
                other => return self.error(format!("expected `.param`, found {}", describe(&other))),
            };
            let kind = self.declaration_kind()?;
            self.pointer_attributes()?;
            let declared = self.declarator(kind)?;
            if register {
                let index = self.new_register(declared.ty);
                let bytes = declared.ty.bytes() as u32;
                let ty = declared.ty;
                self.name(declared.name, Local::Register { index, ty, elements: 1 })?;
                slots.push(Slot::Register { index, bytes });
            } else {
                slots.push(self.frame_variable(declared.name, declared.size_bytes, declared.align, true)?);
            }
            if !self.accept(",") {
                self.expect(")")?;
                break;
            }
        }
        Ok(slots)
    }

    fn frame_variable(&mut self, name: String, bytes: usize, align: usize, param: bool) -> Result<Slot> {
        // The limit on local memory per thread (CUDA programming guide, "Technical Specifications").
        let offset = (self.body.frame_bytes as usize).next_multiple_of(align);
        if offset + bytes > 512 << 10 {
            return self.error(format!("`{name}` makes local memory larger than 512 KiB"));
        }
        self.body.frame_bytes = (offset + bytes) as u32;
        if !param {
            self.body.local_bytes += bytes as u32;
        }
        let (offset, bytes) = (offset as u32, bytes as u32);
        self.name(name, Local::Frame { offset, bytes, param })?;
        Ok(Slot::Frame { offset, bytes })
    }

    pub(super) fn new_register(&mut self, ty: Type) -> Register {
        let index = self.body.rows;
        self.body.rows += ty.bits().div_ceil(64);
        index
    }

    pub(super) fn new_predicate(&mut self) -> u32 {
        self.body.predicates += 1;
        self.body.predicates - 1
    }
}

// Names.
impl Parser<'_, '_> {
    fn scope(&mut self) -> &mut Scope {
        self.body.scopes.last_mut().expect("a body has a scope")
    }

    fn name(&mut self, name: String, local: Local) -> Result {
        // `_` in a declaration is no name.
        if name == "_" {
            return Ok(());
        }
        if self.scope().names.contains_key(&name) {
            return self.error(format!("`{name}` is already defined"));
        }
        self.scope().names.insert(name, local);
        Ok(())
    }

    /// What a name refers to here; none for a label.
    pub(super) fn lookup(&self, name: &str) -> Option<Local> {
        for scope in self.body.scopes.iter().rev() {
            if let Some(local) = scope.names.get(name) {
                return Some(local.clone());
            }
            for family in &scope.families {
                let Some(digits) = name.strip_prefix(family.prefix.as_str()) else { continue };
                let number =
                    digits.parse().ok().filter(|n: &u32| *n < family.count && n.to_string() == digits);
                if let Some(number) = number {
                    return Some(member(family, number));
                }
            }
        }
        self.names.get(name).map(|symbol| Local::Symbol(*symbol))
    }

    fn registers(&mut self) -> Result {
        let kind = self.declaration_kind()?;
        loop {
            let name = self.word("a register's name")?.to_owned();
            if self.accept("<") {
                let count = self.small_int("a count of registers")?;
                self.expect(">")?;
                let first = if kind.ty == Type::Pred { self.body.predicates } else { self.body.rows };
                let rows = count.saturating_mul(kind.ty.bits().div_ceil(64));
                if rows > 1 << 20 {
                    return self.error("more than a million registers");
                }
                match kind.ty {
                    Type::Pred => self.body.predicates += count,
                    _ => self.body.rows += rows,
                }
                self.scope().families.push(Family { prefix: name, first, count, ty: kind.ty });
            } else if kind.ty == Type::Pred {
                let index = self.new_predicate();
                self.name(name, Local::Predicate(index))?;
            } else {
                let index = self.body.rows;
                let elements = kind.elements as u32;
                self.body.rows += elements * kind.ty.bits().div_ceil(64);
                self.name(name, Local::Register { index, ty: kind.ty, elements })?;
            }
            if !self.accept(",") {
                return self.expect(";");
            }
        }
    }

    fn close_scope(&mut self) -> Result {
        let scope = self.body.scopes.pop().expect("a body has a scope");
        for pending in scope.pending {
            match scope.labels.get(&pending.label) {
                Some(target) => self.bind(&pending, *target),
                None => match self.body.scopes.last_mut() {
                    Some(outer) => outer.pending.push(pending),
                    None => {
                        let message = format!("label `{}` is not defined", pending.label);
                        return Err(ParseError::new(pending.line, message));
                    }
                },
            }
        }
        Ok(())
    }

    fn bind(&mut self, pending: &Pending, target: u32) {
        match &mut self.module.code[pending.instruction].op {
            Op::Branch { target: place } => *place = target,
            Op::BranchTable { targets, .. } => targets[pending.entry] = target,
            _ => unreachable!("only branches wait for labels"),
        }
    }

    /// The instruction that was emitted last branches to this label.
    pub(super) fn refer_to_label(&mut self, label: &str, entry: usize, line: u32) {
        let instruction = self.module.code.len() - 1;
        let label = label.to_owned();
        self.scope().pending.push(Pending { instruction, entry, label, line });
    }
}

fn member(family: &Family, number: u32) -> Local {
    match family.ty {
        Type::Pred => Local::Predicate(family.first + number),
        ty => {
            let index = family.first + number * ty.bits().div_ceil(64);
            Local::Register { index, ty, elements: 1 }
        }
    }
}

// Statements.
impl Parser<'_, '_> {
    /// The content of a body's braces, and the closing brace.
    fn block(&mut self) -> Result {
        let mut depth = 1;
        loop {
            match *self.peek() {
                Token::Punct("}") => {
                    self.at += 1;
                    depth -= 1;
                    if depth == 0 {
                        return Ok(());
                    }
                    self.close_scope()?;
                }
                Token::Punct("{") => {
                    self.at += 1;
                    depth += 1;
                    self.body.scopes.push(Scope::default());
                }
                Token::Punct(";") => self.at += 1,
                Token::Dot(directive) => self.body_directive(directive)?,
                Token::Word(name) if matches!(self.peek_after(1), Token::Punct(":")) => self.label(name)?,
                Token::Word(_) | Token::Punct("@") => self.instruction()?,
                _ => return self.error(format!("expected an instruction, found {}", describe(self.peek()))),
            }
        }
    }

    fn body_directive(&mut self, directive: &str) -> Result {
        match directive {
            "loc" | "file" => {
                self.skip_line();
                return Ok(());
            }
            "pragma" => return self.skip_statement(),
            _ => {}
        }
        let linkage = self.linkage();
        let Token::Dot(directive) = self.next() else {
            return self.error("expected a declaration");
        };
        match directive {
            "reg" => self.registers(),
            "local" | "param" => self.frame_variables(directive == "param"),
            "shared" | "global" | "const" => {
                let kind = self.declaration_kind()?;
                loop {
                    let (name, symbol) = self.variable(directive, kind, linkage)?;
                    if let Some(symbol) = symbol {
                        self.name(name, Local::Symbol(symbol))?;
                    }
                    if !self.accept(",") {
                        return self.expect(";");
                    }
                }
            }
            _ => {
                self.at -= 1;
                self.error(format!("unknown directive `.{directive}`"))
            }
        }
    }

    fn frame_variables(&mut self, param: bool) -> Result {
        let kind = self.declaration_kind()?;
        loop {
            let name = self.word("a name")?.to_owned();
            if self.accept("<") {
                let count = self.small_int("a count")?;
                self.expect(">")?;
                for number in 0..count {
                    let declared = self.dimensions(format!("{name}{number}"), kind)?;
                    self.frame_variable(declared.name, declared.size_bytes, declared.align, param)?;
                }
            } else {
                let declared = self.dimensions(name, kind)?;
                self.frame_variable(declared.name, declared.size_bytes, declared.align, param)?;
            }
            if !self.accept(",") {
                return self.expect(";");
            }
        }
    }

    fn label(&mut self, name: &str) -> Result {
        self.at += 2;
        match *self.peek() {
            Token::Dot("branchtargets") => {
                self.at += 1;
                let mut labels = Vec::new();
                loop {
                    labels.push(self.word("a label")?.to_owned());
                    if !self.accept(",") {
                        break;
                    }
                }
                self.expect(";")?;
                self.name(name.to_owned(), Local::Targets(labels))
            }
            Token::Dot("callprototype" | "calltargets") => {
                self.skip_statement()?;
                self.name(name.to_owned(), Local::Prototype)
            }
            _ => {
                let here = self.module.code.len() as u32;
                if self.scope().labels.insert(name.to_owned(), here).is_some() {
                    return self.error(format!("label `{name}` is already defined"));
                }
                Ok(())
            }
        }
    }

    pub(super) fn emit(&mut self, op: Op, guard: Option<Condition>, line: u32) {
        self.module.code.push(Instruction { op, guard, line });
    }
}
