//! The format strings of a kernel's `printf`.
//!
//! Arguments lie one after the other, each aligned to its size: 4 bytes for integers without a length, 8 bytes for
//! `ll`, `l`, `z`, `j`, `t`, pointers, strings and floating-point numbers (CUDA C++ programming guide, "Formatted
//! Output").

/// What the formatter asks its caller for.
pub(super) enum Piece {
    /// The next argument.
    Value { bytes: u32 },
    /// One character of a string argument.
    Byte { address: u64 },
}

/// `%-08.3lld`
#[derive(Default)]
struct Conversion {
    left: bool,
    plus: bool,
    space: bool,
    alternate: bool,
    zero: bool,
    width: usize,
    precision: Option<usize>,
    wide: bool,
    short_bits: u32,
    kind: u8,
}

/// How many arguments a format string takes.
pub(super) fn count_values(format: &[u8]) -> i32 {
    let mut count = 0;
    let mut rest = format.iter();
    while let Some(byte) = rest.next() {
        if *byte == b'%' {
            let kind = rest.find(|b| b.is_ascii_alphabetic() && !b"hlzjtL".contains(b) || **b == b'%');
            count += i32::from(kind.is_some_and(|kind| *kind != b'%'));
        }
    }
    count
}

/// The text that a format string makes of its arguments.
pub(super) fn format<E>(format: &[u8], mut next: impl FnMut(Piece) -> Result<u64, E>) -> Result<Vec<u8>, E> {
    let mut out = Vec::with_capacity(format.len());
    let mut rest = format;
    while let Some((&first, after)) = rest.split_first() {
        rest = after;
        if first != b'%' {
            out.push(first);
            continue;
        }
        let (conversion, after) = parse(rest, &mut next)?;
        match conversion {
            Some(conversion) => {
                conversion.write(&mut out, &mut next)?;
                rest = after;
            }
            None => out.push(b'%'),
        }
    }
    Ok(out)
}

/// Parses what follows a percent sign. A conversion that is not known is no conversion.
fn parse<'f, E>(
    format: &'f [u8],
    next: &mut impl FnMut(Piece) -> Result<u64, E>,
) -> Result<(Option<Conversion>, &'f [u8]), E> {
    let mut conversion = Conversion { short_bits: 32, ..Conversion::default() };
    let mut rest = format;
    while let Some((flag, after)) = rest.split_first() {
        match flag {
            b'-' => conversion.left = true,
            b'+' => conversion.plus = true,
            b' ' => conversion.space = true,
            b'#' => conversion.alternate = true,
            b'0' => conversion.zero = true,
            _ => break,
        }
        rest = after;
    }
    let (width, after) = count(rest, next)?;
    rest = after;
    conversion.width = width.unwrap_or(0);
    if let Some(after) = rest.strip_prefix(b".") {
        let (precision, after) = count(after, next)?;
        conversion.precision = Some(precision.unwrap_or(0));
        rest = after;
    }
    while let Some((length, after)) = rest.split_first() {
        match length {
            b'l' | b'z' | b'j' | b't' | b'L' => conversion.wide = true,
            b'h' => conversion.short_bits /= 2,
            _ => break,
        }
        rest = after;
    }
    match rest.split_first() {
        Some((&kind, after)) if b"diuxXocspfFeEgGaA%".contains(&kind) => {
            conversion.kind = kind;
            Ok((Some(conversion), after))
        }
        _ => Ok((None, format)),
    }
}

/// A number in the format, or `*` for one among the arguments.
fn count<'f, E>(
    format: &'f [u8],
    next: &mut impl FnMut(Piece) -> Result<u64, E>,
) -> Result<(Option<usize>, &'f [u8]), E> {
    if let Some(rest) = format.strip_prefix(b"*") {
        let value = next(Piece::Value { bytes: 4 })? as i32;
        return Ok((usize::try_from(value).ok(), rest));
    }
    let digits = format.iter().take_while(|b| b.is_ascii_digit()).count();
    let number = std::str::from_utf8(&format[..digits]).ok().and_then(|digits| digits.parse().ok());
    Ok((number.map(|n: usize| n.min(4096)), &format[digits..]))
}

impl Conversion {
    fn write<E>(&self, out: &mut Vec<u8>, next: &mut impl FnMut(Piece) -> Result<u64, E>) -> Result<(), E> {
        let text = match self.kind {
            b'%' => {
                out.push(b'%');
                return Ok(());
            }
            b'c' => vec![next(Piece::Value { bytes: 4 })? as u8],
            b's' => {
                let address = next(Piece::Value { bytes: 8 })?;
                let mut text = Vec::new();
                while text.len() < self.precision.unwrap_or(usize::MAX) {
                    match next(Piece::Byte { address: address.wrapping_add(text.len() as u64) })? {
                        0 => break,
                        byte => text.push(byte as u8),
                    }
                }
                text
            }
            b'p' => format!("{:#x}", next(Piece::Value { bytes: 8 })?).into_bytes(),
            b'd' | b'i' | b'u' | b'x' | b'X' | b'o' => {
                let value = next(Piece::Value { bytes: if self.wide { 8 } else { 4 } })?;
                self.integer(value).into_bytes()
            }
            _ => {
                let value = f64::from_bits(next(Piece::Value { bytes: 8 })?);
                self.float(value).into_bytes()
            }
        };
        let padding = self.width.saturating_sub(text.len());
        if self.left {
            out.extend(text);
            out.resize(out.len() + padding, b' ');
        } else {
            out.resize(out.len() + padding, b' ');
            out.extend(text);
        }
        Ok(())
    }

    fn sign(&self, negative: bool) -> &'static str {
        match negative {
            true => "-",
            false if self.plus => "+",
            false if self.space => " ",
            false => "",
        }
    }

    /// Puts a sign or prefix before digits, with zeros between them where the format says so.
    fn join(&self, prefix: &str, digits: &str, zeros_allowed: bool) -> String {
        let zeros = match self.zero && !self.left && zeros_allowed {
            true => self.width.saturating_sub(prefix.len() + digits.len()),
            false => 0,
        };
        format!("{prefix}{}{digits}", "0".repeat(zeros))
    }

    fn integer(&self, value: u64) -> String {
        let bits = if self.wide { 64 } else { self.short_bits.max(8) };
        let unused = 64 - bits;
        let signed = (value << unused) as i64 >> unused;
        let unsigned = value << unused >> unused;
        let (prefix, mut digits) = match self.kind {
            b'd' | b'i' => (self.sign(signed < 0), signed.unsigned_abs().to_string()),
            b'u' => ("", unsigned.to_string()),
            b'o' => (if self.alternate { "0" } else { "" }, format!("{unsigned:o}")),
            b'x' => (if self.alternate && unsigned != 0 { "0x" } else { "" }, format!("{unsigned:x}")),
            _ => (if self.alternate && unsigned != 0 { "0X" } else { "" }, format!("{unsigned:X}")),
        };
        if let Some(precision) = self.precision {
            digits = "0".repeat(precision.saturating_sub(digits.len())) + &digits;
        }
        self.join(prefix, &digits, self.precision.is_none())
    }

    fn float(&self, value: f64) -> String {
        let negative = value.is_sign_negative() && !value.is_nan();
        let magnitude = value.abs();
        let upper = self.kind.is_ascii_uppercase();
        let digits = if magnitude.is_finite() {
            let precision = self.precision.unwrap_or(6);
            match self.kind.to_ascii_lowercase() {
                b'f' => format!("{magnitude:.precision$}"),
                b'e' => scientific(magnitude, precision),
                b'a' => hexadecimal(magnitude, self.precision),
                _ => general(magnitude, precision, self.alternate),
            }
        } else if value.is_nan() {
            "nan".to_owned()
        } else {
            "inf".to_owned()
        };
        let digits = if upper { digits.to_uppercase() } else { digits };
        self.join(self.sign(negative), &digits, magnitude.is_finite())
    }
}

/// `1.500000e+00`
fn scientific(value: f64, precision: usize) -> String {
    let text = format!("{value:.precision$e}");
    let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    format!("{mantissa}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
}

/// `%g`: as short as the precision allows.
fn general(value: f64, precision: usize, keep_zeros: bool) -> String {
    let precision = precision.max(1);
    let text = scientific(value, precision - 1);
    let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let trim = |text: &str| {
        if keep_zeros || !text.contains('.') {
            return text.to_owned();
        }
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    };
    if exponent < -4 || exponent >= precision as i32 {
        return format!("{}e{}", trim(mantissa), &text[mantissa.len() + 1..]);
    }
    let decimals = (precision as i32 - 1 - exponent).max(0) as usize;
    trim(&format!("{value:.decimals$}"))
}

/// `%a`: the exact binary value.
fn hexadecimal(value: f64, precision: Option<usize>) -> String {
    let bits = value.to_bits();
    let biased = (bits >> 52) as i32;
    let mut fraction = bits & ((1 << 52) - 1);
    let (mut lead, exponent) = match biased {
        0 if fraction == 0 => (0, 0),
        0 => (0, -1022),
        _ => (1u64, biased - 1023),
    };
    let digits = precision.map_or(13, |precision| precision.min(13));
    let dropped = 4 * (13 - digits as u32);
    if dropped > 0 {
        // Round half to even on what is dropped.
        let whole = lead << 52 | fraction;
        let (kept, lost) = (whole >> dropped, whole & ((1 << dropped) - 1));
        let half = 1 << (dropped - 1);
        let rounded = kept + u64::from(lost > half || lost == half && kept & 1 == 1);
        (lead, fraction) = (rounded >> (52 - dropped), rounded << dropped & ((1 << 52) - 1));
    }
    let mut text = format!("{fraction:013x}");
    text.truncate(digits);
    if precision.is_none() {
        text.truncate(text.trim_end_matches('0').len());
    }
    let point = if text.is_empty() { "" } else { "." };
    format!("0x{lead}{point}{text}p{exponent:+}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn print(text: &str, values: &[u64]) -> String {
        let mut values = values.iter();
        let result = format(text.as_bytes(), |piece| match piece {
            Piece::Value { .. } => Ok::<u64, ()>(*values.next().unwrap()),
            Piece::Byte { address } => Ok(b"word\0"[address as usize].into()),
        });
        String::from_utf8(result.unwrap()).unwrap()
    }

    /// The right side of each case is what C's `printf` prints.
    #[test]
    fn as_the_c_library() {
        let f = |value: f64| value.to_bits();
        for (format, values, expected) in [
            ("%d|%5d|%-5d|%05d", vec![-3i64 as u64, 42, 42, 42], "-3|   42|42   |00042"),
            ("%+d % d %u", vec![1, 1, u64::MAX], "+1  1 4294967295"),
            ("%x %X %#x %o %llx", vec![255, 255, 255, 8, u64::MAX], "ff FF 0xff 10 ffffffffffffffff"),
            ("%hd %hhu", vec![0x1_ffff, 0x1ff], "-1 255"),
            (
                "%f|%.2f|%8.3f|%-8.1f|",
                vec![f(1.5), f(2.345), f(-1.0), f(0.25)],
                "1.500000|2.35|  -1.000|0.2     |",
            ),
            ("%e %g %g", vec![f(12345.678), f(0.0001), f(1e10)], "1.234568e+04 0.0001 1e+10"),
            ("%g %G %.3g", vec![f(100.0), f(1e-7), f(1234.5)], "100 1E-07 1.23e+03"),
            ("%s|%6s|%.2s %c %% %p", vec![0, 0, 0, 65, 4096], "word|  word|wo A % 0x1000"),
            ("%*d|%.3d", vec![4, 7, 5], "   7|005"),
            ("%f %F %5.1f", vec![f(f64::INFINITY), f(f64::NAN), f(f64::NEG_INFINITY)], "inf NAN  -inf"),
            ("%a %.1a %a", vec![f(1.0), f(1.96875), f(-0.15625)], "0x1p+0 0x2.0p+0 -0x1.4p-3"),
            ("%y %", vec![], "%y %"),
        ] {
            assert_eq!(print(format, &values), expected, "{format}");
        }
        assert_eq!(count_values(b"%d %% %5.2f %lld %s"), 4);
    }
}
