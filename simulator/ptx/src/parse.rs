//! PTX text to a [`Module`]: directives here, the rest in the submodules.
//!
//! [`function`] has bodies and scopes, [`variable`] has variables and their initial values, [`operand`] the operands
//! between commas, [`statement`] one instruction's modifiers and operands. The `lower_*` modules turn each
//! instruction into one or more of [`crate::ir`].

mod compare;
mod control;
mod convert;
mod expression;
mod float;
mod function;
mod half;
mod integer;
mod lower;
mod memory;
mod moves;
mod multimem;
mod operand;
mod statement;
mod sync;
mod variable;
mod warp;

use std::collections::HashMap;

use crate::error::ParseError;
use crate::ir::{Builtin, LANES, Source, Symbol};
use crate::lex::{Spanned, Token, tokens};
use crate::module::{Extern, Module};
use function::Body;

pub(crate) type Result<T = ()> = std::result::Result<T, ParseError>;

/// How a name takes part in linking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Linkage {
    /// Seen in its own text only.
    Internal,
    Visible,
    Weak,
    Extern,
}

struct Parser<'m, 't> {
    tokens: Vec<Spanned<'t>>,
    at: usize,
    module: &'m mut Module,
    /// What the names of this text stand for.
    names: HashMap<String, Symbol>,
    /// Constants of the module by their value.
    constants: HashMap<u64, u32>,
    /// The function whose body is being parsed.
    body: Body,
}

/// Parses one text and adds what it defines to `module`.
pub(crate) fn parse_into(module: &mut Module, text: &str) -> Result {
    let constants = module.constants.iter().enumerate().map(|(index, row)| (row[0], index as u32)).collect();
    let first_extern = module.externs.len();
    let tokens = tokens(text)?;
    let mut parser =
        Parser { tokens, at: 0, module, names: HashMap::new(), constants, body: Body::default() };
    parser.header()?;
    while *parser.peek() != Token::End {
        parser.top_level()?;
    }
    let names = parser.names;
    for declared in &mut module.externs[first_extern..] {
        let own = names.get(&declared.name).copied();
        declared.definition = own.filter(|symbol| !matches!(symbol, Symbol::Extern(_)));
    }
    Ok(())
}

// Walking over tokens.
impl<'t> Parser<'_, 't> {
    fn peek(&self) -> &Token<'t> {
        &self.tokens[self.at].token
    }

    fn peek_after(&self, ahead: usize) -> &Token<'t> {
        &self.tokens[(self.at + ahead).min(self.tokens.len() - 1)].token
    }

    fn line(&self) -> u32 {
        self.tokens[self.at].line
    }

    fn next(&mut self) -> Token<'t> {
        let token = self.tokens[self.at].token.clone();
        if token != Token::End {
            self.at += 1;
        }
        token
    }

    fn error<T>(&self, message: impl Into<String>) -> Result<T> {
        Err(ParseError::new(self.line(), message))
    }

    /// Takes a punctuation mark if it is next.
    fn accept(&mut self, punct: &str) -> bool {
        let found = matches!(self.peek(), Token::Punct(p) if *p == punct);
        if found {
            self.at += 1;
        }
        found
    }

    fn accept_dot(&mut self, name: &str) -> bool {
        let found = matches!(self.peek(), Token::Dot(d) if *d == name);
        if found {
            self.at += 1;
        }
        found
    }

    fn expect(&mut self, punct: &str) -> Result {
        if self.accept(punct) {
            return Ok(());
        }
        let found = describe(self.peek());
        self.error(format!("expected `{punct}`, found {found}"))
    }

    fn word(&mut self, what: &str) -> Result<&'t str> {
        match *self.peek() {
            Token::Word(word) => {
                self.at += 1;
                Ok(word)
            }
            _ => self.error(format!("expected {what}, found {}", describe(self.peek()))),
        }
    }

    fn int(&mut self, what: &str) -> Result<u64> {
        match *self.peek() {
            Token::Int(value) => {
                self.at += 1;
                Ok(value)
            }
            _ => self.error(format!("expected {what}, found {}", describe(self.peek()))),
        }
    }

    fn small_int(&mut self, what: &str) -> Result<u32> {
        let value = self.int(what)?;
        u32::try_from(value).or_else(|_| self.error(format!("{what} {value} is too large")))
    }

    /// Skips lines that are for debuggers only.
    fn skip_line(&mut self) {
        let line = self.line();
        while self.line() == line && *self.peek() != Token::End {
            self.at += 1;
        }
    }

    fn skip_statement(&mut self) -> Result {
        while !self.accept(";") {
            if self.next() == Token::End {
                return self.error("expected `;`, found the end of the text");
            }
        }
        Ok(())
    }

    fn skip_braces(&mut self) -> Result {
        self.expect("{")?;
        let mut depth = 1;
        while depth > 0 {
            match self.next() {
                Token::Punct("{") => depth += 1,
                Token::Punct("}") => depth -= 1,
                Token::End => return self.error("expected `}`, found the end of the text"),
                _ => {}
            }
        }
        Ok(())
    }
}

fn describe(token: &Token<'_>) -> String {
    match token {
        Token::Word(word) => format!("`{word}`"),
        Token::Dot(dot) => format!("`.{dot}`"),
        Token::Int(value) => format!("`{value}`"),
        Token::F32(_) | Token::F64(_) => "a floating-point constant".into(),
        Token::Text(_) => "a string".into(),
        Token::Punct(punct) => format!("`{punct}`"),
        Token::End => "the end of the text".into(),
    }
}

// Directives of the module.
impl Parser<'_, '_> {
    fn header(&mut self) -> Result {
        if !self.accept_dot("version") {
            return self.error("a module starts with `.version`");
        }
        let version = match self.next() {
            // `8.7` reads as a decimal number.
            Token::F64(bits) => {
                let tenths = (f64::from_bits(bits) * 10.0).round() as u32;
                (tenths / 10, tenths % 10)
            }
            _ => return self.error("`.version` needs a number such as 8.0"),
        };
        if version.0 == 0 || version.0 > 9 {
            return self.error(format!("PTX version {}.{} is not known", version.0, version.1));
        }
        self.module.version = self.module.version.max(version);
        if !self.accept_dot("target") {
            return self.error("expected `.target`");
        }
        let target = self.word("a target such as sm_90")?;
        let number = target.strip_prefix("sm_").map(|t| t.trim_end_matches(['a', 'f']));
        match number.and_then(|n| n.parse().ok()).filter(|n| (20..=130).contains(n)) {
            Some(number) => self.module.target = self.module.target.max(number),
            None => return self.error(format!("unknown target `{target}`")),
        }
        while self.accept(",") {
            let option = self.word("a target option")?;
            if !matches!(option, "debug" | "texmode_independent" | "texmode_unified") {
                return self.error(format!("unknown target option `{option}`"));
            }
        }
        if self.accept_dot("address_size") && self.int("64")? != 64 {
            return self.error("only 64-bit addresses are supported");
        }
        Ok(())
    }

    fn top_level(&mut self) -> Result {
        let linkage = self.linkage();
        let Token::Dot(directive) = *self.peek() else {
            return self.error(format!("expected a directive, found {}", describe(self.peek())));
        };
        match directive {
            "file" => self.skip_line(),
            "pragma" => self.skip_statement()?,
            "section" => {
                self.skip_section()?;
            }
            "entry" | "func" => {
                self.at += 1;
                self.function(directive == "entry", linkage)?;
            }
            "global" | "const" | "shared" => self.module_variables(linkage)?,
            "alias" => self.alias()?,
            _ => return self.error(format!("unknown directive `.{directive}`")),
        }
        Ok(())
    }

    fn linkage(&mut self) -> Linkage {
        let linkage = match self.peek() {
            Token::Dot("visible") => Linkage::Visible,
            // A `.common` variable of several modules is one variable, as a weak one is.
            Token::Dot("weak" | "common") => Linkage::Weak,
            Token::Dot("extern") => Linkage::Extern,
            _ => return Linkage::Internal,
        };
        self.at += 1;
        linkage
    }

    /// Debugging information: `.section .debug_info { … }`.
    fn skip_section(&mut self) -> Result {
        while !matches!(self.peek(), Token::Punct("{") | Token::End) {
            self.at += 1;
        }
        self.skip_braces()
    }

    fn alias(&mut self) -> Result {
        self.at += 1;
        let alias = self.word("a name")?;
        self.expect(",")?;
        let aliased = self.word("a name")?;
        self.expect(";")?;
        let Some(&target) = self.names.get(aliased) else {
            return self.error(format!("`{aliased}` is not defined"));
        };
        self.names.insert(alias.to_owned(), target);
        self.module.exported.insert(alias.to_owned(), target);
        Ok(())
    }

    /// The symbol for a name that is declared here and defined later or elsewhere.
    fn declare(&mut self, name: &str) {
        if self.names.contains_key(name) {
            return;
        }
        let symbol = match name {
            "vprintf" => Symbol::Builtin(Builtin::Vprintf),
            "__assertfail" => Symbol::Builtin(Builtin::AssertFail),
            _ => {
                let line = self.line();
                self.module.externs.push(Extern { name: name.to_owned(), line, definition: None });
                Symbol::Extern(self.module.externs.len() as u32 - 1)
            }
        };
        self.names.insert(name.to_owned(), symbol);
    }

    /// Makes a name known to this text and, where its linkage says so, to others. Answers false where a definition
    /// of an earlier text takes the place of this weak one.
    fn define(&mut self, name: &str, symbol: Symbol, linkage: Linkage) -> Result<bool> {
        if let Some(known) = self.names.get(name)
            && !matches!(known, Symbol::Extern(_) | Symbol::Builtin(_))
        {
            return self.error(format!("`{name}` is already defined"));
        }
        let mut symbol = symbol;
        let mut first = true;
        if matches!(linkage, Linkage::Visible | Linkage::Weak) {
            match self.module.exported.get(name) {
                Some(earlier) if linkage == Linkage::Weak => {
                    symbol = *earlier;
                    first = false;
                }
                Some(_) => return self.error(format!("multiple definition of `{name}`")),
                None => {
                    self.module.exported.insert(name.to_owned(), symbol);
                }
            }
        }
        self.names.insert(name.to_owned(), symbol);
        Ok(first)
    }

    /// A constant of the module with this value in every lane.
    fn constant(&mut self, value: u64) -> Source {
        let constants = &mut self.module.constants;
        let index = *self.constants.entry(value).or_insert_with(|| {
            constants.push([value; LANES]);
            constants.len() as u32 - 1
        });
        Source::Constant(index)
    }
}
