//! PTX arithmetic on bit patterns: pure functions, no state, no notion of threads or registers.
//!
//! What the PTX ISA calls IEEE 754 compliant (`add`, `sub`, `mul`, `fma`, `div.rn`, `rcp.rn`, `sqrt.rn`, `cvt`,
//! comparisons) is bit-exact in every rounding mode. What it calls an approximation is computed more exactly than
//! its stated bound; each such function says both bounds. Facts are from the PTX ISA 9.1, chapter 9.7, unless a
//! function names another source.
//!
//! Two choices hold throughout, because PTX leaves them open:
//!
//! - A NaN that f32, f16 or bf16 arithmetic makes is the canonical one ([`Format::nan`]: 0x7fffffff, 0x7fff),
//!   as GPUs do (CUDA C++ programming guide, "Floating-point standard"). f64 keeps payloads: the first operand
//!   that is a NaN comes out, made quiet; an invalid operation gives 0xfff8000000000000.
//! - `.ftz` flushes a result that is subnormal after it was rounded to the format's own precision.

pub mod bf16;
pub mod convert;
pub mod f16;
pub mod f32;
pub mod f64;
mod format;
mod half;
pub mod int;
mod odd;
mod order;
mod sign;

pub use format::Format;
pub use order::{MinMaxMode, Property, Relation};

/// Direction of rounding: `.rn`, `.rz`, `.rm`, `.rp`, `.rna`, and `.rni`, `.rzi`, `.rmi`, `.rpi` likewise.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Rounding {
    /// To the nearest, ties to even (`.rn`, `.rni`).
    #[default]
    Nearest,
    /// Towards zero (`.rz`, `.rzi`).
    Zero,
    /// Towards negative infinity (`.rm`, `.rmi`).
    Down,
    /// Towards positive infinity (`.rp`, `.rpi`).
    Up,
    /// To the nearest, ties away from zero (`.rna`).
    NearestAway,
}

/// Modifiers of an instruction on f32 or f16.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FloatMode {
    /// Direction of rounding.
    pub rounding: Rounding,
    /// `.ftz`: subnormal operands and results become zero and keep their sign.
    pub ftz: bool,
    /// `.sat`: the result is clamped to 0.0 to 1.0; NaN and -0.0 become +0.0.
    pub sat: bool,
}
