//! NCCL beside the driver under test, and ranks that are processes.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::OnceLock;

use cuda_abi::types::*;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use parking_lot::Mutex;

use crate::check::{Result, Stop, failed, skipped};
use crate::{gpu, helper, ok, roles};

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId {
    bytes: [u8; 128],
}

/// A communicator.
pub type Comm = *mut c_void;
/// `ncclResult_t`.
pub type Code = u32;

/// The results that checks name.
pub mod code {
    /// `ncclSuccess`
    pub const SUCCESS: u32 = 0;
    /// `ncclInvalidArgument`
    pub const INVALID_ARGUMENT: u32 = 4;
    /// `ncclInvalidUsage`
    pub const INVALID_USAGE: u32 = 5;
    /// `ncclInProgress`
    pub const IN_PROGRESS: u32 = 7;
}

macro_rules! functions {
    ($( #[$doc:meta] )* $table:ident; $( $name:ident : fn($($ty:ty),* $(,)?) $(-> $result:ty)? ; )*) => {
        $( #[$doc] )*
        #[allow(non_snake_case, reason = "the library's own names")]
        pub struct $table {
            $( #[doc = stringify!($name)] pub $name: unsafe extern "C" fn($($ty),*) -> functions!(@ $($result)?), )*
        }

        impl $table {
            fn load() -> std::result::Result<Self, String> {
                let path = path();
                // SAFETY: the library is NCCL, or what stands in for it.
                let library = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL) };
                let library = library.map_err(|error| format!("{}: {error}", path.display()))?;
                let loaded = Self {
                    $(
                        // SAFETY: the header declares the function so; the library is never closed.
                        $name: *unsafe { library.get(stringify!($name)) }.map_err(|error| error.to_string())?,
                    )*
                };
                std::mem::forget(library);
                Ok(loaded)
            }
        }
    };
    (@) => { Code };
    (@ $result:ty) => { $result };
}

functions! {
    /// The functions of the library.
    Nccl;
    ncclGetErrorString: fn(Code) -> *const c_char;
    ncclGetVersion: fn(*mut c_int);
    ncclGetUniqueId: fn(*mut UniqueId);
    ncclCommInitRank: fn(*mut Comm, c_int, UniqueId, c_int);
    ncclCommInitRankConfig: fn(*mut Comm, c_int, UniqueId, c_int, *mut Config);
    ncclCommInitAll: fn(*mut Comm, c_int, *const c_int);
    ncclCommSplit: fn(Comm, c_int, c_int, *mut Comm, *mut Config);
    ncclCommFinalize: fn(Comm);
    ncclCommDestroy: fn(Comm);
    ncclCommAbort: fn(Comm);
    ncclCommGetAsyncError: fn(Comm, *mut Code);
    ncclCommCount: fn(Comm, *mut c_int);
    ncclCommCuDevice: fn(Comm, *mut c_int);
    ncclCommUserRank: fn(Comm, *mut c_int);
    ncclGroupStart: fn();
    ncclGroupEnd: fn();
    ncclAllReduce: fn(u64, u64, usize, c_int, c_int, Comm, CUstream);
    ncclReduce: fn(u64, u64, usize, c_int, c_int, c_int, Comm, CUstream);
    ncclReduceScatter: fn(u64, u64, usize, c_int, c_int, Comm, CUstream);
    ncclBroadcast: fn(u64, u64, usize, c_int, c_int, Comm, CUstream);
    ncclAllGather: fn(u64, u64, usize, c_int, Comm, CUstream);
    ncclSend: fn(u64, usize, c_int, c_int, Comm, CUstream);
    ncclRecv: fn(u64, usize, c_int, c_int, Comm, CUstream);
}

functions! {
    /// Those for memory of the program, since 2.27.
    OfMemory;
    ncclMemAlloc: fn(*mut u64, usize);
    ncclMemFree: fn(u64);
    ncclCommRegister: fn(Comm, u64, usize, *mut usize);
    ncclCommDeregister: fn(Comm, usize);
    ncclCommWindowRegister: fn(Comm, u64, usize, *mut usize, c_int);
    ncclCommWindowDeregister: fn(Comm, usize);
}

functions! {
    /// Those for ranks that do not answer, since 2.28.
    OfFailures;
    ncclCommShrink: fn(Comm, *const c_int, c_int, *mut Comm, *mut Config, c_int);
    ncclCommRevoke: fn(Comm, c_int);
}

functions! {
    /// Collectives that earlier versions made of sends and receives, since 2.28.
    OfPairs;
    ncclAlltoAll: fn(u64, u64, usize, c_int, Comm, CUstream);
    ncclGather: fn(u64, u64, usize, c_int, c_int, Comm, CUstream);
    ncclScatter: fn(u64, u64, usize, c_int, c_int, Comm, CUstream);
}

functions! {
    /// Those for ranks that join, since 2.29.
    OfGrowth;
    ncclCommGetUniqueId: fn(Comm, *mut UniqueId);
    ncclCommGrow: fn(Comm, c_int, *const UniqueId, c_int, *mut Comm, *mut Config);
}

/// `ncclConfig_t` of version 2.17 and its first successors.
#[repr(C)]
pub struct Config {
    size: usize,
    magic: u32,
    version: u32,
    /// Whether calls wait.
    pub blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    /// As the header's initialiser leaves it.
    pub fn new() -> Self {
        let undefined = c_int::MIN;
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: 21800,
            blocking: undefined,
            cga_cluster_size: undefined,
            min_ctas: undefined,
            max_ctas: undefined,
            net_name: std::ptr::null(),
            split_share: undefined,
        }
    }
}

/// Its name beside a driver.
pub const FILE_NAME: &str = "libnccl.so.2";
/// Tells the process of a check, and those that it starts, where the library is.
pub const PATH_VARIABLE: &str = "CONFORMANCE_NCCL";

fn path() -> PathBuf {
    std::env::var_os(PATH_VARIABLE).map_or_else(|| FILE_NAME.into(), PathBuf::from)
}

/// The library, or the check is skipped.
pub fn nccl() -> Result<&'static Nccl> {
    static NCCL: OnceLock<std::result::Result<Nccl, String>> = OnceLock::new();
    NCCL.get_or_init(Nccl::load).as_ref().or_else(|error| skipped(format!("no NCCL: {error}")))
}

/// The functions for memory, or the check is skipped.
pub fn of_memory() -> Result<&'static OfMemory> {
    static OF_MEMORY: OnceLock<std::result::Result<OfMemory, String>> = OnceLock::new();
    newer(OF_MEMORY.get_or_init(OfMemory::load))
}

/// The functions for ranks that do not answer, or the check is skipped.
pub fn of_failures() -> Result<&'static OfFailures> {
    static OF_FAILURES: OnceLock<std::result::Result<OfFailures, String>> = OnceLock::new();
    newer(OF_FAILURES.get_or_init(OfFailures::load))
}

/// The collectives of 2.28, or the check is skipped.
pub fn of_pairs() -> Result<&'static OfPairs> {
    static OF_PAIRS: OnceLock<std::result::Result<OfPairs, String>> = OnceLock::new();
    newer(OF_PAIRS.get_or_init(OfPairs::load))
}

/// The functions for ranks that join, or the check is skipped.
pub fn of_growth() -> Result<&'static OfGrowth> {
    static OF_GROWTH: OnceLock<std::result::Result<OfGrowth, String>> = OnceLock::new();
    newer(OF_GROWTH.get_or_init(OfGrowth::load))
}

/// Functions that an older NCCL lacks.
fn newer<T>(loaded: &std::result::Result<T, String>) -> Result<&T> {
    loaded.as_ref().or_else(|error| skipped(format!("an older NCCL: {error}")))
}

/// Calls NCCL and gives its result. `in`: the table of the function.
#[macro_export]
macro_rules! nc {
    ($name:ident ( $($arg:expr),* $(,)? )) => { $crate::nc!(in nccl, $name($($arg),*)) };
    (in $table:ident, $name:ident ( $($arg:expr),* $(,)? )) => {{
        let function = $crate::nccl::$table()?.$name;
        #[allow(clippy::macro_metavars_in_unsafe, reason = "a check's calls are what the comment is about")]
        // SAFETY: A check is a small C program: pointers are to its own live variables, or such as the call is documented
        // to refuse; handles are ones that it was given.
        unsafe { function($($arg),*) }
    }};
}

/// Calls NCCL and fails unless it gives this result, success if none is named.
#[macro_export]
macro_rules! nccl_gives {
    ($wanted:expr, $name:ident ( $($arg:expr),* $(,)? )) => {{
        let code = $crate::nc!($name($($arg),*));
        $crate::nccl::expect(stringify!($name), code, $wanted)?
    }};
}

/// Calls NCCL and fails unless it succeeds.
#[macro_export]
macro_rules! nccl_ok {
    ($name:ident ( $($arg:expr),* $(,)? )) => { $crate::nccl_gives!($crate::nccl::code::SUCCESS, $name($($arg),*)) };
}

/// Fails unless a call gave this result.
pub fn expect(call: &str, got: Code, wanted: Code) -> Result {
    if got == wanted {
        return Ok(());
    }
    let text = nccl()?.ncclGetErrorString;
    // SAFETY: the function takes any number.
    let text = unsafe { text(got) };
    // SAFETY: it gives a text that lives as long as the library.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    failed(format!("{call}: expected result {wanted}, got {got} ({text})"))
}

/// A fresh ID.
pub fn unique_id() -> Result<UniqueId> {
    let mut id = UniqueId { bytes: [0; 128] };
    nccl_ok!(ncclGetUniqueId(&raw mut id));
    Ok(id)
}

/// One rank of a scenario.
pub struct Rank {
    /// Its number.
    pub rank: usize,
    /// How many there are.
    pub ranks: usize,
    /// The communicator's ID.
    pub id: UniqueId,
}

impl Default for UniqueId {
    fn default() -> Self {
        Self { bytes: [0; 128] }
    }
}

impl UniqueId {
    /// Lower-case hexadecimal, 256 digits.
    pub fn hex(&self) -> String {
        self.bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl Rank {
    /// This rank's device with a current context.
    pub fn start(&self) -> Result {
        let (mut count, mut context) = (0, std::ptr::null_mut());
        ok!(cuInit(0));
        ok!(cuDeviceGetCount(&raw mut count));
        let device = c_int::try_from(self.rank).unwrap_or(0) % count;
        ok!(cuDevicePrimaryCtxRetain(&raw mut context, device));
        ok!(cuCtxSetCurrent(context));
        Ok(())
    }

    /// The communicator of all ranks.
    pub fn connect(&self) -> Result<Comm> {
        self.start()?;
        let mut comm = std::ptr::null_mut();
        nccl_ok!(ncclCommInitRank(&raw mut comm, self.count(), self.id, self.number()));
        Ok(comm)
    }

    /// The number of ranks, as calls take it.
    pub fn count(&self) -> c_int {
        c_int::try_from(self.ranks).unwrap_or(c_int::MAX)
    }

    /// The rank, as calls take it.
    pub fn number(&self) -> c_int {
        c_int::try_from(self.rank).unwrap_or(c_int::MAX)
    }
}

/// What a rank answers to a question.
static SAID: Mutex<String> = Mutex::new(String::new());

/// Answers a question.
pub fn say(text: String) {
    *SAID.lock() = text;
}

/// Set to 1, it lets ranks share a GPU.
pub const SHARES_GPUS: &str = "NCCL_MULTI_RANK_GPU_ENABLE";
/// From this version on (2.30.3), [`SHARES_GPUS`] lets ranks share a GPU.
const SHARES_GPUS_FROM: c_int = 23003;

/// What a rank does.
pub type Scenario = fn(&Rank) -> Result;

/// Runs a scenario with so many ranks, each in a process of its own with these variables.
pub fn run(scenario: &str, ranks: usize, variables: &[(&str, &str)]) -> Result {
    ask(scenario, ranks, variables).map(drop)
}

/// As [`run`]: what the ranks say.
pub fn ask(scenario: &str, ranks: usize, variables: &[(&str, &str)]) -> Result<Vec<String>> {
    nccl()?;
    let mut devices = 0;
    ok!(cuInit(0));
    ok!(cuDeviceGetCount(&raw mut devices));
    let mut version = 0;
    nccl_ok!(ncclGetVersion(&raw mut version));
    let id = unique_id()?;
    let hex = id.hex();
    let broken = |error: std::io::Error| Stop::Failed(format!("starting a rank: {error}"));
    let mut children = Vec::new();
    for rank in 0..ranks {
        let words = ["nccl", scenario, &rank.to_string(), &ranks.to_string(), &hex];
        let mut command = roles::command(gpu::path(), &words).map_err(broken)?;
        // A device for each rank; only the simulated driver knows the variable.
        command.env("SIMCUDA_DEVICES", ranks.max(2).to_string());
        // Processes of one machine: the sockets stay within it.
        command.env("NCCL_SOCKET_IFNAME", "lo").envs(variables.iter().copied());
        let is_chosen = variables.iter().any(|(name, _)| *name == SHARES_GPUS);
        if !is_chosen && ranks > usize::try_from(devices).unwrap_or(0) {
            command.env(SHARES_GPUS, "1");
            if version < SHARES_GPUS_FROM {
                // Ranks of different machines are not compared.
                command.env("NCCL_HOSTID", format!("rank-{rank}")).env("NCCL_NET", "Socket");
            }
        }
        children.push(command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().map_err(broken)?);
    }
    let outcomes: Vec<Result<String>> =
        children.into_iter().enumerate().map(|(rank, child)| outcome(rank, child)).collect();
    // A failure says more than a rank that was skipped.
    let (skips, others): (Vec<_>, Vec<_>) =
        outcomes.into_iter().partition(|outcome| matches!(outcome, Err(Stop::Skipped(_))));
    others.into_iter().chain(skips).collect()
}

fn outcome(rank: usize, mut child: Child) -> Result<String> {
    let mut text = String::new();
    if let Some(mut stdout) = child.stdout.take() {
        // What came before an error is kept.
        let _ = stdout.read_to_string(&mut text);
    }
    let _ = child.wait();
    let line = text.lines().rev().find_map(|line| line.strip_prefix(helper::ANSWER));
    match line.and_then(|line| line.split_once(' ')) {
        Some(("ok", text)) => Ok(text.to_owned()),
        Some(("skip", why)) => skipped(why),
        Some((_, why)) => failed(format!("rank {rank}: {why}")),
        None => failed(format!("rank {rank} ended without an outcome")),
    }
}

/// Plays one rank; `scenarios` says what each name means.
pub fn play(words: &[String], scenarios: &[(&str, Scenario)]) -> anyhow::Result<()> {
    let [scenario, rank, ranks, hex] = words else { anyhow::bail!("a rank takes four words") };
    let mut id = UniqueId { bytes: [0; 128] };
    for (at, byte) in id.bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(hex.get(2 * at..2 * at + 2).unwrap_or_default(), 16)?;
    }
    let rank = Rank { rank: rank.parse()?, ranks: ranks.parse()?, id };
    let found = scenarios.iter().find(|(name, _)| name == scenario);
    let (_, body) = found.ok_or_else(|| anyhow::anyhow!("no such scenario: {scenario}"))?;
    let line = match body(&rank) {
        Ok(()) => format!("ok {}", SAID.lock()),
        Err(Stop::Failed(why)) => format!("error {why}"),
        Err(Stop::Skipped(why)) => format!("skip {why}"),
    };
    println!("\n{}{line}", helper::ANSWER);
    Ok(())
}
