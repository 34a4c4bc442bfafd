//! IEEE binary16 (`.f16`; the caller splits `.f16x2`). Subnormal numbers are supported unless `.ftz` is given.

super::half::half_functions!(Format::F16);

/// 2 to the power `a`, correctly rounded up to the error of an f64 function. PTX allows a relative error of 2^-9.9.
#[inline]
pub fn ex2_approx(a: u16, ftz: bool) -> u16 {
    half::approximate(a, FORMAT, ftz, libm::exp2)
}
