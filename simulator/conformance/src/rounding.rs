//! IEEE arithmetic in the directed rounding modes, made from that to the nearest.
//!
//! Each operation first gives a result to the nearest and the sign of the exact error that it made. From both
//! follows the neighbour that a directed mode gives. Valid where nothing overflows or becomes subnormal.

/// A directed rounding mode.
#[derive(Clone, Copy, Debug)]
pub enum Mode {
    /// Toward zero.
    Zero,
    /// Toward minus infinity.
    Minus,
    /// Toward plus infinity.
    Plus,
}

/// The result of `mode`, from the one to the nearest and the exact result's distance from it (its sign counts).
fn directed64(nearest: f64, error: f64, mode: Mode) -> f64 {
    let down = match mode {
        Mode::Minus => true,
        Mode::Plus => false,
        Mode::Zero => nearest > 0.0,
    };
    if down && error < 0.0 {
        nearest.next_down()
    } else if !down && error > 0.0 {
        nearest.next_up()
    } else {
        nearest
    }
}

/// As [`directed64`] for an exact result of `high + low`, of which `low` only matters by its sign.
#[expect(clippy::cast_possible_truncation, reason = "rounding to the nearest f32 is what is wanted")]
fn directed32(high: f64, low: f64, mode: Mode) -> f32 {
    let nearest = high as f32;
    let distance = high - f64::from(nearest);
    let error = if distance == 0.0 { low } else { distance };
    let down = match mode {
        Mode::Minus => true,
        Mode::Plus => false,
        Mode::Zero => nearest > 0.0,
    };
    if down && error < 0.0 {
        nearest.next_down()
    } else if !down && error > 0.0 {
        nearest.next_up()
    } else {
        nearest
    }
}

/// A sum and its exact error (Knuth's two-sum).
fn two_sum(a: f64, b: f64) -> (f64, f64) {
    let sum = a + b;
    let b_part = sum - a;
    let error = (a - (sum - b_part)) + (b - b_part);
    (sum, error)
}

/// A product and its exact error.
fn two_product(a: f64, b: f64) -> (f64, f64) {
    let product = a * b;
    (product, a.mul_add(b, -product))
}

/// a + b
pub fn add64(a: f64, b: f64, mode: Mode) -> f64 {
    let (sum, error) = two_sum(a, b);
    directed64(sum, error, mode)
}

/// a * b
pub fn mul64(a: f64, b: f64, mode: Mode) -> f64 {
    let (product, error) = two_product(a, b);
    directed64(product, error, mode)
}

/// a / b
pub fn div64(a: f64, b: f64, mode: Mode) -> f64 {
    let (quotient, error) = quotient(a, b);
    directed64(quotient, error, mode)
}

/// A quotient, and a number with the sign of its exact error.
fn quotient(a: f64, b: f64) -> (f64, f64) {
    let quotient = a / b;
    // The remainder is exact; divided by b it is the error.
    (quotient, (-quotient).mul_add(b, a) * b.signum())
}

/// a * b + c, with the error by Boldo and Muller's algorithm.
pub fn fma64(a: f64, b: f64, c: f64, mode: Mode) -> f64 {
    let result = a.mul_add(b, c);
    let (product, product_error) = two_product(a, b);
    let (low, low_error) = two_sum(c, product_error);
    let (high, high_error) = two_sum(product, low);
    let error = ((high - result) + high_error) + low_error;
    directed64(result, error, mode)
}

/// a + b
pub fn add32(a: f32, b: f32, mode: Mode) -> f32 {
    let (sum, error) = two_sum(f64::from(a), f64::from(b));
    directed32(sum, error, mode)
}

/// a * b
pub fn mul32(a: f32, b: f32, mode: Mode) -> f32 {
    directed32(f64::from(a) * f64::from(b), 0.0, mode)
}

/// a / b
pub fn div32(a: f32, b: f32, mode: Mode) -> f32 {
    let (quotient, error) = quotient(f64::from(a), f64::from(b));
    directed32(quotient, error, mode)
}

/// a * b + c
pub fn fma32(a: f32, b: f32, c: f32, mode: Mode) -> f32 {
    let (sum, error) = two_sum(f64::from(a) * f64::from(b), f64::from(c));
    directed32(sum, error, mode)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_that_is_exact_is_the_same_in_all_modes() {
        for mode in [Mode::Zero, Mode::Minus, Mode::Plus] {
            assert_eq!(add32(1.5, 2.25, mode), 3.75);
            assert_eq!(div64(-3.0, 2.0, mode), -1.5);
            assert_eq!(fma64(3.0, 5.0, 1.0, mode), 16.0);
        }
    }

    #[test]
    fn a_third_lies_between_the_neighbours() {
        let third = 1.0_f32 / 3.0;
        assert!(f64::from(third) > 1.0 / 3.0);
        assert_eq!(div32(1.0, 3.0, Mode::Plus), third);
        assert_eq!(div32(1.0, 3.0, Mode::Minus), third.next_down());
        assert_eq!(div32(1.0, 3.0, Mode::Zero), third.next_down());
        assert_eq!(div32(-1.0, 3.0, Mode::Zero), -third.next_down());
        assert_eq!(div32(-1.0, 3.0, Mode::Minus), -third);
    }

    #[test]
    fn what_is_lost_in_a_sum_decides() {
        let tiny = 2.0_f64.powi(-80);
        assert_eq!(add64(1.0, tiny, Mode::Plus), 1.0_f64.next_up());
        assert_eq!(add64(1.0, tiny, Mode::Minus), 1.0);
        assert_eq!(add64(1.0, -tiny, Mode::Zero), 1.0_f64.next_down());
        assert_eq!(fma64(1.0, 1.0, tiny, Mode::Plus), 1.0_f64.next_up());
    }
}
