//! Types and state spaces of PTX.

/// A fundamental or packed type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Type {
    U8,
    U16,
    U32,
    U64,
    S8,
    S16,
    S32,
    S64,
    B8,
    B16,
    B32,
    B64,
    B128,
    F16,
    F16x2,
    Bf16,
    Bf16x2,
    F32,
    F32x2,
    F64,
    U16x2,
    S16x2,
    Tf32,
    E4m3x2,
    E5m2x2,
    Pred,
}

const NAMES: [(&str, Type); 26] = [
    ("u8", Type::U8),
    ("u16", Type::U16),
    ("u32", Type::U32),
    ("u64", Type::U64),
    ("s8", Type::S8),
    ("s16", Type::S16),
    ("s32", Type::S32),
    ("s64", Type::S64),
    ("b8", Type::B8),
    ("b16", Type::B16),
    ("b32", Type::B32),
    ("b64", Type::B64),
    ("b128", Type::B128),
    ("f16", Type::F16),
    ("f16x2", Type::F16x2),
    ("bf16", Type::Bf16),
    ("bf16x2", Type::Bf16x2),
    ("f32", Type::F32),
    ("f32x2", Type::F32x2),
    ("f64", Type::F64),
    ("u16x2", Type::U16x2),
    ("s16x2", Type::S16x2),
    ("tf32", Type::Tf32),
    ("e4m3x2", Type::E4m3x2),
    ("e5m2x2", Type::E5m2x2),
    ("pred", Type::Pred),
];

impl Type {
    /// The type of this name, which comes without its dot.
    pub(crate) fn named(name: &str) -> Option<Type> {
        NAMES.iter().find(|(known, _)| *known == name).map(|(_, ty)| *ty)
    }

    pub(crate) fn name(self) -> &'static str {
        NAMES.iter().find(|(_, ty)| *ty == self).map_or("?", |(name, _)| name)
    }

    /// Width of a value; 1 for predicates.
    pub(crate) fn bits(self) -> u32 {
        match self {
            Type::Pred => 1,
            Type::U8 | Type::S8 | Type::B8 => 8,
            Type::U16 | Type::S16 | Type::B16 | Type::F16 | Type::Bf16 | Type::E4m3x2 | Type::E5m2x2 => 16,
            Type::U32 | Type::S32 | Type::B32 | Type::F32 | Type::Tf32 => 32,
            Type::F16x2 | Type::Bf16x2 | Type::U16x2 | Type::S16x2 => 32,
            Type::U64 | Type::S64 | Type::B64 | Type::F64 | Type::F32x2 => 64,
            Type::B128 => 128,
        }
    }

    pub(crate) fn bytes(self) -> usize {
        self.bits().div_ceil(8) as usize
    }

    pub(crate) fn is_signed(self) -> bool {
        matches!(self, Type::S8 | Type::S16 | Type::S32 | Type::S64)
    }

    /// A signed or unsigned integer, not a packed one and not plain bits.
    pub(crate) fn is_integer(self) -> bool {
        self.is_signed() || matches!(self, Type::U8 | Type::U16 | Type::U32 | Type::U64)
    }

    /// One floating-point number of 16 to 64 bits.
    pub(crate) fn is_float(self) -> bool {
        matches!(self, Type::F16 | Type::Bf16 | Type::F32 | Type::F64)
    }

    /// `bN` or an integer: what fits every instruction of the same width.
    pub(crate) fn is_untyped(self) -> bool {
        matches!(self, Type::B8 | Type::B16 | Type::B32 | Type::B64 | Type::B128)
    }
}

/// A state space as an instruction names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AddressSpace {
    /// No space named: windows of the other spaces in the space of global memory.
    Generic,
    Global,
    Const,
    Shared,
    /// Shared memory of any block of the cluster.
    SharedCluster,
    Local,
    Param,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_widths() {
        for (name, ty) in NAMES {
            assert_eq!(Type::named(name), Some(ty));
            assert_eq!(ty.name(), name);
        }
        assert_eq!(Type::named("q8"), None);
        assert_eq!((Type::F16x2.bits(), Type::F16x2.bytes(), Type::Pred.bits()), (32, 4, 1));
    }
}
