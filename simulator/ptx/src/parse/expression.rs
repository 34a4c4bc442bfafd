//! Constant expressions: integers of 64 bits, with C's operators.

use super::{Parser, Result, describe};
use crate::lex::Token;

/// Binary operators by increasing precedence.
const LEVELS: [&[&str]; 9] = [
    &["||"],
    &["&&"],
    &["|"],
    &["^"],
    &["&"],
    &["==", "!=", "<", "<=", ">", ">="],
    &["<<", ">>"],
    &["+", "-"],
    &["*", "/", "%"],
];

impl Parser<'_, '_> {
    /// A constant expression.
    pub(super) fn expression(&mut self) -> Result<u64> {
        self.binary(0)
    }

    /// A constant expression without `|`, which separates operands in an instruction.
    pub(super) fn operand_expression(&mut self) -> Result<u64> {
        self.binary(3)
    }

    fn binary(&mut self, level: usize) -> Result<u64> {
        let Some(operators) = LEVELS.get(level) else {
            return self.unary();
        };
        let mut value = self.binary(level + 1)?;
        while let Token::Punct(operator) = *self.peek() {
            if !operators.contains(&operator) {
                break;
            }
            self.at += 1;
            let right = self.binary(level + 1)?;
            value = self.apply(operator, value, right)?;
        }
        Ok(value)
    }

    fn apply(&self, operator: &str, a: u64, b: u64) -> Result<u64> {
        let (signed_a, signed_b) = (a as i64, b as i64);
        Ok(match operator {
            "||" => u64::from(a != 0 || b != 0),
            "&&" => u64::from(a != 0 && b != 0),
            "|" => a | b,
            "^" => a ^ b,
            "&" => a & b,
            "==" => u64::from(a == b),
            "!=" => u64::from(a != b),
            "<" => u64::from(signed_a < signed_b),
            "<=" => u64::from(signed_a <= signed_b),
            ">" => u64::from(signed_a > signed_b),
            ">=" => u64::from(signed_a >= signed_b),
            "<<" => a.checked_shl(u32::try_from(b).unwrap_or(64)).unwrap_or(0),
            ">>" => a.checked_shr(u32::try_from(b).unwrap_or(64)).unwrap_or(0),
            "+" => a.wrapping_add(b),
            "-" => a.wrapping_sub(b),
            "*" => a.wrapping_mul(b),
            _ if b == 0 => return self.error("division by zero in a constant expression"),
            "/" => signed_a.wrapping_div(signed_b) as u64,
            _ => signed_a.wrapping_rem(signed_b) as u64,
        })
    }

    fn unary(&mut self) -> Result<u64> {
        match self.next() {
            Token::Punct("-") => Ok(self.unary()?.wrapping_neg()),
            Token::Punct("+") => self.unary(),
            Token::Punct("~") => Ok(!self.unary()?),
            Token::Punct("!") => Ok(u64::from(self.unary()? == 0)),
            Token::Punct("(") => {
                // A cast, `(.u64)`, changes nothing about 64 bits.
                if matches!(self.peek(), Token::Dot("u64" | "s64")) {
                    self.at += 1;
                    self.expect(")")?;
                    return self.unary();
                }
                let value = self.expression()?;
                self.expect(")")?;
                Ok(value)
            }
            Token::Int(value) => Ok(value),
            Token::Word("WARP_SZ") => Ok(32),
            other => {
                self.at -= usize::from(other != Token::End);
                self.error(format!("expected a constant, found {}", describe(&other)))
            }
        }
    }
}
