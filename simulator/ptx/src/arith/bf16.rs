//! bfloat16 (`.bf16`; the caller splits `.bf16x2`). PTX gives it neither `.ftz` nor `.sat` in `add`, `sub`, `mul`
//! and `fma`.

super::half::half_functions!(Format::BF16);

/// 2 to the power `a`, correctly rounded up to the error of an f64 function, with `.ftz`, which PTX requires here.
/// PTX allows a relative error of 2^-7.
#[inline]
pub fn ex2_approx_ftz(a: u16) -> u16 {
    half::approximate(a, FORMAT, true, libm::exp2)
}
