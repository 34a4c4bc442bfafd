//! Numbers of the public header: results, data types, reductions, and the structures that programs pass.

use std::ffi::{c_char, c_int, c_uint};
use std::io::Write;

/// `ncclResult_t`. Its values, other than success, are errors here.
#[allow(clippy::enum_variant_names, reason = "the header's names")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub(crate) enum Error {
    UnhandledCudaError = 1,
    SystemError = 2,
    InternalError = 3,
    InvalidArgument = 4,
    InvalidUsage = 5,
    RemoteError = 6,
    InProgress = 7,
}

/// `ncclSuccess`.
pub(crate) const SUCCESS: u32 = 0;

/// What the functions of this library return.
pub(crate) type Result<T = ()> = std::result::Result<T, Error>;

impl Error {
    /// What `ncclGetErrorString` says.
    pub(crate) fn text(code: u32) -> &'static std::ffi::CStr {
        match code {
            0 => c"no error",
            1 => c"unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
            2 => c"unhandled system error (run with NCCL_DEBUG=INFO for details)",
            3 => c"internal error",
            4 => c"invalid argument (run with NCCL_DEBUG=WARN for details)",
            5 => c"invalid usage (run with NCCL_DEBUG=WARN for details)",
            6 => c"remote process exited or there was a network error",
            7 => c"NCCL operation in progress",
            _ => c"unknown result code",
        }
    }
}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        warn(&error.to_string());
        match error.kind() {
            std::io::ErrorKind::UnexpectedEof
            | std::io::ErrorKind::ConnectionReset
            | std::io::ErrorKind::BrokenPipe => Self::RemoteError,
            _ => Self::SystemError,
        }
    }
}

/// Says why a call fails, if `NCCL_DEBUG` asks for it.
pub(crate) fn warn(text: &str) {
    if std::env::var_os("NCCL_DEBUG").is_some_and(|level| level != "VERSION") {
        // In one piece: ranks write to the same file.
        let _ = std::io::stderr().write_all(format!("simnccl: {text}\n").as_bytes());
    }
}

/// `ncclDataType_t`, without the 8-bit floating-point types.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub(crate) enum DataType {
    Int8 = 0,
    Uint8 = 1,
    Int32 = 2,
    Uint32 = 3,
    Int64 = 4,
    Uint64 = 5,
    Float16 = 6,
    Float32 = 7,
    Float64 = 8,
    Bfloat16 = 9,
}

impl DataType {
    pub(crate) const ALL: [Self; 10] = [
        Self::Int8,
        Self::Uint8,
        Self::Int32,
        Self::Uint32,
        Self::Int64,
        Self::Uint64,
        Self::Float16,
        Self::Float32,
        Self::Float64,
        Self::Bfloat16,
    ];

    /// # Errors
    /// `ncclInvalidArgument` for a number that is none.
    pub(crate) fn of(number: c_int) -> Result<Self> {
        let known = Self::ALL.into_iter().find(|ty| i64::from(*ty as u32) == i64::from(number));
        known.ok_or(Error::InvalidArgument)
    }

    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::Int8 | Self::Uint8 => 1,
            Self::Float16 | Self::Bfloat16 => 2,
            Self::Int32 | Self::Uint32 | Self::Float32 => 4,
            Self::Int64 | Self::Uint64 | Self::Float64 => 8,
        }
    }
}

/// `ncclRedOp_t`, without operations that the program creates.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub(crate) enum Reduction {
    Sum = 0,
    Prod = 1,
    Max = 2,
    Min = 3,
    Avg = 4,
}

impl Reduction {
    pub(crate) const ALL: [Self; 5] = [Self::Sum, Self::Prod, Self::Max, Self::Min, Self::Avg];

    /// # Errors
    /// `ncclInvalidArgument` for a number that is none.
    pub(crate) fn of(number: c_int) -> Result<Self> {
        let known = Self::ALL.into_iter().find(|op| i64::from(*op as u32) == i64::from(number));
        known.ok_or(Error::InvalidArgument)
    }
}

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId {
    pub(crate) bytes: [u8; 128],
}

/// What every version of `ncclConfig_t` begins with.
#[repr(C)]
pub struct ConfigHead {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

const CONFIG_MAGIC: c_uint = 0xcafe_beef;
/// Stands for "not set" in every integer of the configuration.
const UNDEFINED: c_int = c_int::MIN;

/// Whether calls on a communicator wait until they are done.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Config {
    pub(crate) is_blocking: bool,
}

impl Config {
    pub(crate) const DEFAULT: Self = Self { is_blocking: true };

    /// # Errors
    /// `ncclInvalidArgument` for a structure that was not initialised, or a bad value.
    ///
    /// # Safety
    /// `config` is NULL or the program's structure, of the size that it says.
    pub(crate) unsafe fn read(config: *const ConfigHead, inherited: Self) -> Result<Self> {
        // SAFETY: the caller vouches for the structure.
        let Some(config) = (unsafe { config.as_ref() }) else { return Ok(inherited) };
        if config.magic != CONFIG_MAGIC || config.size < size_of::<ConfigHead>() {
            warn("ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
            return Err(Error::InvalidArgument);
        }
        match config.blocking {
            UNDEFINED => Ok(inherited),
            0 => Ok(Self { is_blocking: false }),
            1 => Ok(Self { is_blocking: true }),
            _ => Err(Error::InvalidArgument),
        }
    }
}
