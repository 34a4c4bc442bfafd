//! Copies and fills against a model on vectors of bytes, and what they refuse and wait for.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "the calls of a test have one reason to be safe")]

mod errors;
mod order;
mod shapes;
