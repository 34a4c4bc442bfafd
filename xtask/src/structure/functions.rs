//! Functions and their lengths, found in the tokens: bodies of macros are searched too.

use anyhow::Result;
use proc_macro2::{Delimiter, TokenStream, TokenTree};
use serde::Serialize;

/// A function with a body.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Function {
    pub name: String,
    pub file: String,
    /// The line of `fn`.
    pub line: usize,
    /// From the line of `fn` to that of the closing brace.
    pub lines: usize,
}

/// All functions in a source text, functions inside functions included.
pub fn find(file: &str, text: &str) -> Result<Vec<Function>> {
    let mut found = Vec::new();
    search(file, text.parse().map_err(|error| anyhow::anyhow!("{error}"))?, &mut found);
    Ok(found)
}

fn search(file: &str, tokens: TokenStream, found: &mut Vec<Function>) {
    let mut start: Option<(String, usize)> = None;
    let mut tokens = tokens.into_iter().peekable();
    while let Some(token) = tokens.next() {
        match token {
            // `fn` without a name is a type.
            TokenTree::Ident(word) if word == "fn" => {
                if let Some(TokenTree::Ident(name)) = tokens.peek() {
                    start = Some((name.to_string(), word.span().start().line));
                }
            }
            TokenTree::Punct(sign) if sign.as_char() == ';' => start = None,
            TokenTree::Group(group) => {
                if group.delimiter() == Delimiter::Brace
                    && let Some((name, line)) = start.take()
                {
                    let lines = group.span_close().end().line + 1 - line;
                    found.push(Function { name, file: file.to_owned(), line, lines });
                }
                search(file, group.stream(), found);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(text: &str) -> Vec<(String, usize, usize)> {
        let found = find("a.rs", text).unwrap();
        found.into_iter().map(|function| (function.name, function.line, function.lines)).collect()
    }

    #[test]
    fn counts_from_fn_to_the_closing_brace() {
        let text = "/// Text.\n#[inline]\npub fn a(\n    x: u8,\n) -> u8 {\n    x\n}\nfn b() {}\n";
        assert_eq!(lengths(text), [("a".into(), 3, 5), ("b".into(), 8, 1)]);
    }

    #[test]
    fn finds_methods_and_functions_in_functions_and_macros() {
        let text = "impl A {\n fn a() {\n  fn b() {}\n }\n}\nproptest! {\n fn c(x in 0..3) {\n }\n}\n";
        assert_eq!(lengths(text), [("a".into(), 2, 3), ("b".into(), 3, 1), ("c".into(), 7, 2)]);
    }

    #[test]
    fn a_declaration_or_a_type_is_no_function() {
        let text =
            "trait A { fn a(); }\nextern \"C\" { fn b(x: fn(u8)); }\ntype C = fn();\nstruct D { x: fn() }";
        assert_eq!(lengths(text), []);
    }
}
