//! Lines of code.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use proc_macro2::{Delimiter, Span, TokenStream, TokenTree};

/// The number of lines that hold a token, doc comments and the lines `without` left out.
pub fn count(tokens: TokenStream, without: &[RangeInclusive<usize>]) -> usize {
    let mut lines = BTreeSet::new();
    collect(tokens, &mut lines);
    lines.iter().filter(|line| !without.iter().any(|range| range.contains(line))).count()
}

fn collect(tokens: TokenStream, lines: &mut BTreeSet<usize>) {
    let mut tokens = tokens.into_iter().peekable();
    while let Some(token) = tokens.next() {
        match token {
            TokenTree::Punct(sign) if sign.as_char() == '#' => {
                // An inner attribute, `#![…]`, has one more sign.
                let bang = tokens.next_if(|next| matches!(next, TokenTree::Punct(p) if p.as_char() == '!'));
                if tokens.next_if(is_doc).is_none() {
                    add(sign.span(), lines);
                    bang.iter().for_each(|bang| add(bang.span(), lines));
                }
            }
            TokenTree::Group(group) => {
                add(group.span_open(), lines);
                collect(group.stream(), lines);
                add(group.span_close(), lines);
            }
            token => add(token.span(), lines),
        }
    }
}

/// Whether this is `[doc = …]`, which is also how a doc comment looks in tokens.
fn is_doc(token: &TokenTree) -> bool {
    let TokenTree::Group(group) = token else { return false };
    let first = group.stream().into_iter().next();
    group.delimiter() == Delimiter::Bracket && matches!(first, Some(TokenTree::Ident(name)) if name == "doc")
}

fn add(span: Span, lines: &mut BTreeSet<usize>) {
    lines.extend(span.start().line..=span.end().line);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_blank_lines_do_not_count() {
        let text = "//! Doc.\n#![allow(dead_code)]\n\n/// Doc\n/// of a.\n// Why.\nfn a() {\n    // Nothing.\n    \"x\ny\";\n}\n";
        let tokens: TokenStream = text.parse().unwrap();
        assert_eq!(count(tokens.clone(), &[]), 5);
        assert_eq!(count(tokens, &[7..=11, 2..=2]), 0);
    }
}
