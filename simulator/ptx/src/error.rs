//! What can go wrong: text that is not PTX as we know it, and kernels that do what hardware refuses.

use thiserror::Error;

/// PTX text that was refused.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("line {line}: {message}")]
pub struct ParseError {
    /// Line of the text, from 1; 0 where the error belongs to no line (linking).
    pub line: u32,
    /// What is wrong, without the line.
    pub message: String,
}

impl ParseError {
    pub(crate) fn new(line: u32, message: impl Into<String>) -> ParseError {
        ParseError { line, message: message.into() }
    }
}

/// Where in a launch a fault happened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Site {
    /// The function that was executing: the kernel or a function that it called.
    pub function: String,
    /// Index of the block in the grid.
    pub block: [u32; 3],
    /// Index in the block of the first thread that did it.
    pub thread: [u32; 3],
}

impl std::fmt::Display for Site {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} block {:?} thread {:?}", self.function, self.block, self.thread)
    }
}

/// Why a launch ended before its end. `line` is the line of the PTX text.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Fault {
    /// An address outside every window, or a write to a window that is read-only.
    #[error(
        "illegal {} of {size_bytes} bytes at {address:#x} (line {line}, {site})",
        if *write { "write" } else { "read" }
    )]
    IllegalAddress {
        /// Address in the state space of the access.
        address: u64,
        /// Size of the access.
        size_bytes: u32,
        /// Whether it was a store or an atomic.
        write: bool,
        /// Line of the instruction.
        line: u32,
        /// The thread at fault.
        site: Site,
    },
    /// An address that is not a multiple of the access size.
    #[error("misaligned access of {size_bytes} bytes at {address:#x} (line {line}, {site})")]
    MisalignedAddress {
        /// Address in the state space of the access.
        address: u64,
        /// Size of the access.
        size_bytes: u32,
        /// Line of the instruction.
        line: u32,
        /// The thread at fault.
        site: Site,
    },
    /// An instruction that cannot be executed as written, such as a barrier with an impossible thread count.
    #[error("illegal instruction: {reason} (line {line}, {site})")]
    IllegalInstruction {
        /// What is wrong with it.
        reason: String,
        /// Line of the instruction.
        line: u32,
        /// The thread at fault.
        site: Site,
    },
    /// An indirect branch or call to something that is no function.
    #[error("invalid program counter {target:#x} (line {line}, {site})")]
    InvalidProgramCounter {
        /// The value that was jumped to.
        target: u64,
        /// Line of the instruction.
        line: u32,
        /// The thread at fault.
        site: Site,
    },
    /// Calls nested so deeply that a thread's stack is used up.
    #[error("stack overflow (line {line}, {site})")]
    HardwareStackError {
        /// Line of the instruction.
        line: u32,
        /// The thread at fault.
        site: Site,
    },
    /// A failed `assert` (a call of `__assertfail`).
    #[error("{message}")]
    Assert {
        /// The line that the device runtime prints.
        message: String,
    },
    /// `trap` or `brkpt`.
    #[error("trap (line {line}, {site})")]
    Trap {
        /// Line of the instruction.
        line: u32,
        /// The thread at fault.
        site: Site,
    },
    /// [`crate::Memory::cancelled`] answered true.
    #[error("the launch was cancelled")]
    Cancelled,
    /// The module has no entry of this name.
    #[error("no kernel named `{0}`")]
    NoSuchFunction(String),
    /// The block or its shared memory is larger than the kernel or the device allows.
    #[error("launch out of resources: {0}")]
    LaunchOutOfResources(String),
    /// A dimension of zero, too few bytes of parameters, or a grid that is no multiple of the cluster.
    #[error("invalid launch: {0}")]
    InvalidLaunch(String),
}
