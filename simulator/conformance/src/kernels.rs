//! The PTX that checks load. Each text ends with a NUL, as cuModuleLoadData asks.

/// Small kernels for every purpose.
pub const BASIC: &str = concat!(include_str!("../kernels/basic.ptx"), "\0");
/// Variables, constants, dynamic shared memory, parameters.
pub const MODULE: &str = concat!(include_str!("../kernels/module.ptx"), "\0");
/// Kernels that cause a sticky error of their context.
pub const FAULTS: &str = concat!(include_str!("../kernels/faults.ptx"), "\0");
/// Integer arithmetic.
pub const INTEGER: &str = concat!(include_str!("../kernels/integer.ptx"), "\0");
/// Floating-point arithmetic and conversions.
pub const FLOAT: &str = concat!(include_str!("../kernels/float.ptx"), "\0");
/// Warps, blocks and grids working together.
pub const TOGETHER: &str = concat!(include_str!("../kernels/together.ptx"), "\0");
/// Local memory, calls, vectors, special registers.
pub const STRUCTURE: &str = concat!(include_str!("../kernels/structure.ptx"), "\0");
/// Accesses to multimem addresses.
pub const MULTICAST: &str = concat!(include_str!("../kernels/multicast.ptx"), "\0");
