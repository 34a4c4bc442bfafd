//! Characters to tokens.

use crate::error::ParseError;

/// One token of PTX text.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Token<'a> {
    /// A name, an opcode, a register: `add`, `%r1`, `$L__BB0_2`.
    Word(&'a str),
    /// A directive, modifier or type, without its dot: `global`, `L1::evict_last`.
    Dot(&'a str),
    /// An integer constant.
    Int(u64),
    /// `0f…`: the bits of a single-precision constant.
    F32(u32),
    /// `0d…` or a decimal: the bits of a double-precision constant.
    F64(u64),
    /// A quoted string, escapes undone.
    Text(String),
    /// Punctuation and operators, one character each except `<<`, `>>`, `==`, `!=`, `<=`, `>=`, `&&`, `||`.
    Punct(&'static str),
    /// The end of the text.
    End,
}

/// A token and its line.
#[derive(Clone, Debug)]
pub(crate) struct Spanned<'a> {
    pub(crate) token: Token<'a>,
    pub(crate) line: u32,
}

const PUNCTUATION: [&str; 30] = [
    "<<", ">>", "==", "!=", "<=", ">=", "&&", "||", ",", ";", "{", "}", "[", "]", "(", ")", "@", "!", "=",
    "+", "-", "*", "/", "<", ">", ":", "|", "&", "^", "~",
];

/// All tokens of `text`, ending with [`Token::End`].
pub(crate) fn tokens(text: &str) -> Result<Vec<Spanned<'_>>, ParseError> {
    // A driver is handed a C string; what follows a NUL that was counted in is not text.
    let text = text.split('\0').next().unwrap_or_default();
    let mut lexer = Lexer { text, at: 0, line: 1 };
    let mut all = Vec::with_capacity(text.len() / 4);
    loop {
        lexer.skip_blanks()?;
        let line = lexer.line;
        let token = lexer.token()?;
        let end = token == Token::End;
        all.push(Spanned { token, line });
        if end {
            return Ok(all);
        }
    }
}

struct Lexer<'a> {
    text: &'a str,
    at: usize,
    line: u32,
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'$'
}

impl<'a> Lexer<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn peek(&self, ahead: usize) -> u8 {
        self.text.as_bytes().get(self.at + ahead).copied().unwrap_or(0)
    }

    fn error<T>(&self, message: impl Into<String>) -> Result<T, ParseError> {
        Err(ParseError::new(self.line, message))
    }

    fn skip_blanks(&mut self) -> Result<(), ParseError> {
        loop {
            match self.peek(0) {
                b'\n' => {
                    self.line += 1;
                    self.at += 1;
                }
                b' ' | b'\t' | b'\r' | b'\x0c' => self.at += 1,
                b'/' if self.peek(1) == b'/' => {
                    self.at += self.rest().find('\n').unwrap_or(self.rest().len());
                }
                b'/' if self.peek(1) == b'*' => {
                    let Some(length) = self.rest().find("*/") else {
                        return self.error("comment without an end");
                    };
                    let lines = self.rest()[..length].matches('\n').count();
                    self.line += u32::try_from(lines).unwrap_or(u32::MAX);
                    self.at += length + 2;
                }
                _ => return Ok(()),
            }
        }
    }

    /// Takes the characters for which `accept` holds, after `skip` others.
    fn take(&mut self, skip: usize, accept: impl Fn(u8) -> bool) -> &'a str {
        let bytes = self.text.as_bytes();
        let start = self.at;
        self.at += skip;
        while self.at < bytes.len() && accept(bytes[self.at]) {
            self.at += 1;
        }
        &self.text[start..self.at]
    }

    fn token(&mut self) -> Result<Token<'a>, ParseError> {
        let first = self.peek(0);
        match first {
            0 => Ok(Token::End),
            b'.' if is_word(self.peek(1)) => Ok(Token::Dot(self.dotted())),
            b'%' if is_word(self.peek(1)) => Ok(Token::Word(self.take(1, is_word))),
            b'%' => {
                self.at += 1;
                Ok(Token::Punct("%"))
            }
            b'0'..=b'9' => self.number(),
            b'"' => self.quoted(),
            _ if is_word(first) => Ok(Token::Word(self.take(0, is_word))),
            _ => match PUNCTUATION.iter().find(|p| self.rest().starts_with(**p)) {
                Some(punct) => {
                    self.at += punct.len();
                    Ok(Token::Punct(punct))
                }
                None => {
                    let odd = self.rest().chars().next().unwrap_or(' ');
                    self.error(format!("unexpected character `{}`", odd.escape_default()))
                }
            },
        }
    }

    /// A modifier, with its `::` parts: `.shared::cta`, `.L2::cache_hint`.
    fn dotted(&mut self) -> &'a str {
        let start = self.at + 1;
        self.take(1, is_word);
        while self.peek(0) == b':' && self.peek(1) == b':' && is_word(self.peek(2)) {
            self.take(2, is_word);
        }
        &self.text[start..self.at]
    }

    fn number(&mut self) -> Result<Token<'a>, ParseError> {
        let prefix = (self.peek(0), self.peek(1) | 0x20);
        if prefix.0 == b'0' && matches!(prefix.1, b'f' | b'd') {
            let digits = &self.take(2, |b| b.is_ascii_hexdigit())[2..];
            return match (prefix.1, digits.len()) {
                (b'f', 8) => u32::from_str_radix(digits, 16).map(Token::F32),
                (b'd', 16) => u64::from_str_radix(digits, 16).map(Token::F64),
                _ => return self.error("a floating-point constant has 8 (0f) or 16 (0d) hexadecimal digits"),
            }
            .or_else(|_| self.error("malformed floating-point constant"));
        }
        if prefix.0 == b'0' && matches!(prefix.1, b'x' | b'b') {
            let radix = if prefix.1 == b'x' { 16 } else { 2 };
            let digits = &self.take(2, |b| b.is_ascii_hexdigit())[2..];
            return self.integer(digits, radix);
        }
        let digits = self.take(0, |b| b.is_ascii_digit());
        let fraction = self.peek(0) == b'.' && self.peek(1).is_ascii_digit();
        let exponent = self.peek(0) | 0x20 == b'e';
        if fraction || exponent {
            return self.decimal(self.at - digits.len());
        }
        // A leading zero makes a constant octal, as in C.
        let radix = if digits.len() > 1 && digits.starts_with('0') { 8 } else { 10 };
        self.integer(digits, radix)
    }

    fn integer(&mut self, digits: &str, radix: u32) -> Result<Token<'a>, ParseError> {
        if self.peek(0) == b'U' {
            self.at += 1;
        }
        if is_word(self.peek(0)) {
            return self.error("malformed number");
        }
        match u64::from_str_radix(digits, radix) {
            Ok(value) => Ok(Token::Int(value)),
            Err(_) => self.error(format!("`{digits}` is no 64-bit number")),
        }
    }

    fn decimal(&mut self, start: usize) -> Result<Token<'a>, ParseError> {
        self.take(usize::from(self.peek(0) == b'.'), |b| b.is_ascii_digit());
        if self.peek(0) | 0x20 == b'e' {
            let sign = usize::from(matches!(self.peek(1), b'+' | b'-'));
            self.take(1 + sign, |b| b.is_ascii_digit());
        }
        match self.text[start..self.at].parse::<f64>() {
            Ok(value) => Ok(Token::F64(value.to_bits())),
            Err(_) => self.error("malformed floating-point constant"),
        }
    }

    fn quoted(&mut self) -> Result<Token<'a>, ParseError> {
        let mut text = String::new();
        let mut chars = self.rest().char_indices().skip(1);
        while let Some((index, c)) = chars.next() {
            match c {
                '"' => {
                    self.at += index + 1;
                    return Ok(Token::Text(text));
                }
                '\n' => break,
                '\\' => text.push(match chars.next() {
                    Some((_, 'n')) => '\n',
                    Some((_, 't')) => '\t',
                    Some((_, '0')) => '\0',
                    Some((_, other)) => other,
                    None => break,
                }),
                other => text.push(other),
            }
        }
        self.error("string without an end")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(text: &str) -> Vec<Token<'_>> {
        tokens(text).unwrap().into_iter().map(|t| t.token).collect()
    }

    #[test]
    fn numbers_of_every_notation() {
        assert_eq!(
            kinds("0x1F 0b101 017 42 7U 0f3F800000 0d3FF0000000000000 1.5 2e3"),
            [
                Token::Int(31),
                Token::Int(5),
                Token::Int(15),
                Token::Int(42),
                Token::Int(7),
                Token::F32(1f32.to_bits()),
                Token::F64(1f64.to_bits()),
                Token::F64(1.5f64.to_bits()),
                Token::F64(2000f64.to_bits()),
                Token::End,
            ]
        );
    }

    #[test]
    fn words_modifiers_and_comments() {
        assert_eq!(
            kinds("ld.global.L1::evict_last.u32 %r1, [$L_x+4]; // end\n/* a\nb */ .reg"),
            [
                Token::Word("ld"),
                Token::Dot("global"),
                Token::Dot("L1::evict_last"),
                Token::Dot("u32"),
                Token::Word("%r1"),
                Token::Punct(","),
                Token::Punct("["),
                Token::Word("$L_x"),
                Token::Punct("+"),
                Token::Int(4),
                Token::Punct("]"),
                Token::Punct(";"),
                Token::Dot("reg"),
                Token::End,
            ]
        );
        assert_eq!(tokens("/* a\nb */ x").unwrap()[0].line, 2);
    }

    #[test]
    fn what_is_refused_has_its_line() {
        for (text, line) in [("a\n\"b", 2), ("/* x", 1), ("\n\n0f12", 3), ("12ab", 1), ("a\n\u{a7}", 2)] {
            assert_eq!(tokens(text).unwrap_err().line, line, "{text:?}");
        }
    }
}
