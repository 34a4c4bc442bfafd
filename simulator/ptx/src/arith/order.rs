//! Comparisons, minimum and maximum, and the properties that `testp` asks for, for every format.

use std::cmp::Ordering;

use super::{Format, sign};

/// The comparison operator of `set` and `setp` (PTX ISA, "Floating Point Comparisons"). `lo`, `ls`, `hi`, `hs`
/// are the first six on an unsigned type.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "each is the PTX operator of the same name")]
pub enum Relation {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    Equ,
    Neu,
    Ltu,
    Leu,
    Gtu,
    Geu,
    /// Both operands are numbers.
    Num,
    /// An operand is a NaN.
    Nan,
}

impl Relation {
    /// Whether it holds between operands that compare so; `None` says that one of them is a NaN.
    #[inline]
    pub fn holds(self, ordering: Option<Ordering>) -> bool {
        let Some(ordering) = ordering else {
            return matches!(
                self,
                Relation::Equ
                    | Relation::Neu
                    | Relation::Ltu
                    | Relation::Leu
                    | Relation::Gtu
                    | Relation::Geu
                    | Relation::Nan
            );
        };
        match self {
            Relation::Eq | Relation::Equ => ordering.is_eq(),
            Relation::Ne | Relation::Neu => ordering.is_ne(),
            Relation::Lt | Relation::Ltu => ordering.is_lt(),
            Relation::Le | Relation::Leu => ordering.is_le(),
            Relation::Gt | Relation::Gtu => ordering.is_gt(),
            Relation::Ge | Relation::Geu => ordering.is_ge(),
            Relation::Num => true,
            Relation::Nan => false,
        }
    }
}

/// Modifiers of `min` and `max` on floating-point types.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MinMaxMode {
    /// `.ftz`: subnormal operands become zero and keep their sign.
    pub ftz: bool,
    /// `.NaN`: the result is the canonical NaN when an operand is a NaN. Otherwise the other operand wins.
    pub nan: bool,
    /// `.abs`: magnitudes are compared.
    pub abs: bool,
    /// `.xorsign`: the result's sign is the exclusive or of the operands' signs. Two operands only.
    pub xorsign: bool,
}

/// What `testp` asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "each is the PTX operator of the same name")]
pub enum Property {
    Finite,
    Infinite,
    Number,
    NotANumber,
    /// Neither NaN nor infinite nor subnormal; zero is normal.
    Normal,
    Subnormal,
}

#[inline]
pub(super) fn testp(bits: u64, format: Format, property: Property) -> bool {
    let nan = format.is_nan(bits);
    let infinite = format.is_infinite(bits);
    match property {
        Property::Finite => !nan && !infinite,
        Property::Infinite => infinite,
        Property::Number => !nan,
        Property::NotANumber => nan,
        Property::Normal => !nan && !infinite && !format.is_subnormal(bits),
        Property::Subnormal => format.is_subnormal(bits),
    }
}

/// Maps numbers to integers in the same order, with -0.0 just below +0.0.
#[inline]
fn order_key(bits: u64, format: Format) -> i64 {
    let magnitude = format.magnitude(bits) as i64;
    if format.is_negative(bits) { -1 - magnitude } else { magnitude }
}

/// How two numbers compare; zeros are equal. `None` when one is a NaN.
#[inline]
pub(super) fn partial_cmp(a: u64, b: u64, format: Format) -> Option<Ordering> {
    if format.is_nan(a) || format.is_nan(b) {
        return None;
    }
    if format.magnitude(a) == 0 && format.magnitude(b) == 0 {
        return Some(Ordering::Equal);
    }
    Some(order_key(a, format).cmp(&order_key(b, format)))
}

#[inline]
pub(super) fn min(a: u64, b: u64, format: Format, mode: MinMaxMode) -> u64 {
    select(a, b, format, mode, Ordering::is_lt)
}

#[inline]
pub(super) fn max(a: u64, b: u64, format: Format, mode: MinMaxMode) -> u64 {
    select(a, b, format, mode, Ordering::is_gt)
}

#[inline]
fn select(a: u64, b: u64, format: Format, mode: MinMaxMode, first_wins: fn(Ordering) -> bool) -> u64 {
    let prepare = |bits| if mode.ftz { sign::flush(bits, format) } else { bits };
    let xor_of_signs = (a ^ b) & format.sign_bit();
    let (mut a, mut b) = (prepare(a), prepare(b));
    if mode.abs {
        (a, b) = (format.magnitude(a), format.magnitude(b));
    }
    let winner = match (format.is_nan(a), format.is_nan(b)) {
        (true, true) => return sign::quiet(a, format),
        (true, false) | (false, true) if mode.nan => return format.nan(),
        (true, false) => b,
        (false, true) => a,
        (false, false) if first_wins(order_key(a, format).cmp(&order_key(b, format))) => a,
        (false, false) => b,
    };
    if mode.xorsign { format.magnitude(winner) | xor_of_signs } else { winner }
}
