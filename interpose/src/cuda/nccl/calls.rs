//! The table: a row is an exported function with what is done with the call.

use std::ffi::{CStr, c_int, c_void};

use cuda_abi::types::CUstream;

use super::communicators::{self, Plan};
use super::library::{self, Function};
use super::{Call, Communicator, SYSTEM_ERROR, Status, UNKNOWN, steps};

/// A pointer that is only passed on: a buffer, a configuration, a window.
type Pointer = *mut c_void;
type Stream = CUstream;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId {
    internal: [u8; 128],
}

/// Number of further copies of NCCL in the process whose calls are counted.
pub(super) const COPIES: usize = 3;

/// The row of the usual copy's other names: each call is exported with a `p` in front too, for profilers that define
/// NCCL's name themselves (`NCCL_API` in NCCL's source, and `nccl.h`). Such a call inside a counted one passes.
const PROFILING: usize = 1 + COPIES;
const ROWS: usize = PROFILING + 1;

/// The copy that the calls of a row go to.
const fn copy_of(row: usize) -> usize {
    if row == PROFILING { 0 } else { row }
}

/// The body of a naked function: notes the caller, and goes on with the same parameters.
macro_rules! counted {
    ($with_parameters:path) => {
        // R11 and RAX hold no parameter; what is on the stack stays where it is.
        std::arch::naked_asm!(
            "mov r11, qword ptr [rsp]",
            "mov rax, qword ptr [rip + ckpt_nccl_caller@GOTTPOFF]",
            "mov qword ptr fs:[rax], r11",
            "jmp {with_parameters}",
            with_parameters = sym $with_parameters,
        )
    };
}

/// The body of a naked function: asks where the call goes to, and goes there with the same parameters.
macro_rules! passed {
    ($pass:path) => {
        // The six integer parameters are kept over the call, and the stack is aligned by a seventh push.
        std::arch::naked_asm!(
            "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9", "push rax",
            "mov rdi, [rsp + 56]",
            "call {pass}",
            "mov r11, rax",
            "pop rax", "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
            "jmp r11",
            pass = sym $pass,
        )
    };
}

macro_rules! exports {
    ($( fn $name:ident ( $($arg:ident : $ty:ty),* ) |$call:ident, $real:ident| $body:block )*
     $( unknown $unknown:ident; )*) => {
        #[allow(non_camel_case_types, reason = "NCCL's names")]
        #[repr(usize)]
        enum Index { $( $name, )* $( $unknown, )* Count }

        /// The names of the calls by their index, and behind them what is a step without a call of NCCL.
        pub(super) static CALLS: [&str; Index::Count as usize + 2] = [$( stringify!($name), )* $( stringify!($unknown), )* "cuStreamBeginCapture", "cuGraphLaunch"];

        /// The functions of NCCL, those of each further copy of it, and the first ones by their other names.
        static FUNCTIONS: [[Function; Index::Count as usize]; ROWS] = {
            let mut rows = [const {
                [$( function(concat!(stringify!($name), "\0")), )* $( function(concat!(stringify!($unknown), "\0")), )*]
            }; ROWS];
            rows[PROFILING] =
                [$( function(concat!("p", stringify!($name), "\0")), )* $( function(concat!("p", stringify!($unknown), "\0")), )*];
            rows
        };

        /// What stands in front of them. The first row and the last one are exported.
        static ADDRESSES: [[Address; Index::Count as usize]; ROWS] = [
            [$( Address($name as *const c_void), )* $( Address($unknown as *const c_void), )*],
            [$( Address($name::entry::<1> as *const c_void), )* $( Address($unknown::entry::<1> as *const c_void), )*],
            [$( Address($name::entry::<2> as *const c_void), )* $( Address($unknown::entry::<2> as *const c_void), )*],
            [$( Address($name::entry::<3> as *const c_void), )* $( Address($unknown::entry::<3> as *const c_void), )*],
            [$( Address($name::profiled as *const c_void), )* $( Address($unknown::profiled as *const c_void), )*],
        ];

        $(
            /// The call in one copy of NCCL.
            #[allow(non_camel_case_types, reason = "NCCL's names")]
            enum $name {}

            impl $name {
                unsafe extern "C" fn with_parameters<const ROW: usize>($($arg: $ty),*) -> Status {
                    type Real = unsafe extern "C" fn($($ty),*) -> Status;
                    let target = FUNCTIONS[ROW][Index::$name as usize].target(library::caller());
                    if target.real.is_null() {
                        return SYSTEM_ERROR;
                    }
                    let $call = Call { index: Index::$name as u32, target, copy: copy_of(ROW) };
                    // SAFETY: the address is that of a symbol of this name, which has the type of NCCL's header.
                    let function = unsafe { std::mem::transmute::<*mut c_void, Real>(target.real) };
                    // SAFETY: the parameters are those of our own caller.
                    let $real = || unsafe { function($($arg),*) };
                    $body
                }

                #[unsafe(naked)]
                unsafe extern "C" fn entry<const ROW: usize>() {
                    counted!(Self::with_parameters::<ROW>)
                }

                #[cfg_attr(not(test), unsafe(export_name = concat!("p", stringify!($name))))]
                #[unsafe(naked)]
                unsafe extern "C" fn profiled() {
                    counted!(Self::with_parameters::<PROFILING>)
                }
            }

            #[doc = concat!("In front of NCCL's `", stringify!($name), "`.")]
            ///
            /// # Safety
            /// As for NCCL's.
            #[cfg_attr(not(test), unsafe(no_mangle))]
            #[unsafe(naked)]
            pub unsafe extern "C" fn $name() {
                counted!($name::with_parameters::<0>)
            }
        )*

        $(
            /// The call in one copy of NCCL.
            #[allow(non_camel_case_types, reason = "NCCL's names")]
            enum $unknown {}

            impl $unknown {
                extern "C" fn pass<const ROW: usize>(caller: usize) -> *const c_void {
                    let target = FUNCTIONS[ROW][Index::$unknown as usize].target(caller);
                    // The first one stays.
                    let _ = UNKNOWN.set(stringify!($unknown));
                    if target.real.is_null() { no_library as *const c_void } else { target.real }
                }

                #[unsafe(naked)]
                unsafe extern "C" fn entry<const ROW: usize>() {
                    passed!(Self::pass::<ROW>)
                }

                #[cfg_attr(not(test), unsafe(export_name = concat!("p", stringify!($unknown))))]
                #[unsafe(naked)]
                unsafe extern "C" fn profiled() {
                    passed!(Self::pass::<PROFILING>)
                }
            }

            #[doc = concat!("In front of NCCL's `", stringify!($unknown), "`, whatever its parameters are.")]
            ///
            /// # Safety
            /// As for NCCL's.
            #[cfg_attr(not(test), unsafe(no_mangle))]
            #[unsafe(naked)]
            pub unsafe extern "C" fn $unknown() {
                passed!($unknown::pass::<0>)
            }
        )*
    };
}

/// The index in [`CALLS`] of the beginning of a capture.
pub(super) const BEGIN_CAPTURE: u32 = Index::Count as u32;
/// The index in [`CALLS`] of the launch of a graph with calls.
pub(super) const GRAPH_LAUNCH: u32 = BEGIN_CAPTURE + 1;

const fn function(name: &'static str) -> Function {
    match CStr::from_bytes_with_nul(name.as_bytes()) {
        Ok(name) => Function::new(name),
        Err(_) => panic!("a name with a NUL"),
    }
}

extern "C" fn no_library() -> Status {
    SYSTEM_ERROR
}

exports! {
    fn ncclCommInitRank(out: *mut Communicator, ranks: c_int, id: UniqueId, rank: c_int) |call, real| {
        communicators::make(call, out, None, || vec![Plan::of_ids(ranks, &id.internal, rank)], real)
    }
    fn ncclCommInitRankConfig(
        out: *mut Communicator, ranks: c_int, id: UniqueId, rank: c_int, config: Pointer
    ) |call, real| {
        communicators::make(call, out, None, || vec![Plan::of_ids(ranks, &id.internal, rank)], real)
    }
    fn ncclCommInitRankScalable(
        out: *mut Communicator, ranks: c_int, rank: c_int, id_count: c_int, ids: *const UniqueId, config: Pointer
    ) |call, real| {
        let count = if ids.is_null() { 0 } else { usize::try_from(id_count).unwrap_or(0) };
        // SAFETY: the program's array of so many IDs; nothing is read where there is none.
        let ids = unsafe { bytes_of(ids, count) };
        communicators::make(call, out, None, || vec![Plan::of_ids(ranks, ids, rank)], real)
    }
    fn ncclCommInitAll(out: *mut Communicator, count: c_int, devices: *const c_int) |call, real| {
        communicators::make(call, out, None, || communicators::plan_all(count), real)
    }
    fn ncclCommSplit(
        of: Communicator, color: c_int, key: c_int, out: *mut Communicator, config: Pointer
    ) |call, real| {
        communicators::split(call, of, color, out, real)
    }
    fn ncclCommShrink(
        of: Communicator, excluded: *const c_int, excluded_count: c_int, out: *mut Communicator, config: Pointer,
        flags: c_int
    ) |call, real| {
        let count = if excluded.is_null() { 0 } else { usize::try_from(excluded_count).unwrap_or(0) };
        // SAFETY: the program's array of so many ranks; an empty one where there is none.
        let excluded = if count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(excluded, count) } };
        communicators::shrink(call, of, excluded, flags, out, real)
    }
    fn ncclCommGrow(
        of: Communicator, ranks: c_int, id: *const UniqueId, rank: c_int, out: *mut Communicator, config: Pointer
    ) |call, real| {
        // SAFETY: NULL, or the program's ID.
        let id = (!id.is_null()).then(|| unsafe { bytes_of(id, 1) });
        let parent = (!of.is_null()).then_some(of);
        communicators::make(call, out, parent, || communicators::plan_grown(of, ranks, id, rank), real)
    }
    fn ncclCommFinalize(of: Communicator) |call, real| {
        steps::operation(call, of, None, None, real)
    }
    fn ncclCommDestroy(of: Communicator) |call, real| {
        communicators::destroy(call, of, real)
    }
    fn ncclCommAbort(of: Communicator) |call, real| {
        communicators::abort(call, of, real)
    }
    fn ncclCommRevoke(of: Communicator, flags: c_int) |call, real| {
        communicators::revoke(call, of, real)
    }
    fn ncclCommGetAsyncError(of: Communicator, out: *mut Status) |call, real| {
        communicators::ask_state(call, of, out, real)
    }
    fn ncclCommWindowRegister(
        of: Communicator, buffer: Pointer, bytes: usize, window: Pointer, flags: c_int
    ) |call, real| {
        steps::operation(call, of, None, None, real)
    }
    fn ncclAllReduce(
        send: Pointer, receive: Pointer, count: usize, ty: c_int, op: c_int, of: Communicator, stream: Stream
    ) |call, real| {
        steps::operation(call, of, None, Some(stream), real)
    }
    fn ncclReduce(
        send: Pointer, receive: Pointer, count: usize, ty: c_int, op: c_int, root: c_int, of: Communicator,
        stream: Stream
    ) |call, real| {
        steps::operation(call, of, None, Some(stream), real)
    }
    fn ncclReduceScatter(
        send: Pointer, receive: Pointer, count: usize, ty: c_int, op: c_int, of: Communicator, stream: Stream
    ) |call, real| {
        steps::operation(call, of, None, Some(stream), real)
    }
    fn ncclBroadcast(
        send: Pointer, receive: Pointer, count: usize, ty: c_int, root: c_int, of: Communicator, stream: Stream
    ) |call, real| {
        steps::operation(call, of, None, Some(stream), real)
    }
    fn ncclBcast(
        buffer: Pointer, count: usize, ty: c_int, root: c_int, of: Communicator, stream: Stream
    ) |call, real| {
        steps::operation(call, of, None, Some(stream), real)
    }
    fn ncclAllGather(
        send: Pointer, receive: Pointer, count: usize, ty: c_int, of: Communicator, stream: Stream
    ) |call, real| {
        steps::operation(call, of, None, Some(stream), real)
    }
    fn ncclAlltoAll(
        send: Pointer, receive: Pointer, count: usize, ty: c_int, of: Communicator, stream: Stream
    ) |call, real| {
        steps::operation(call, of, None, Some(stream), real)
    }
    fn ncclGather(
        send: Pointer, receive: Pointer, count: usize, ty: c_int, root: c_int, of: Communicator, stream: Stream
    ) |call, real| {
        steps::operation(call, of, None, Some(stream), real)
    }
    fn ncclScatter(
        send: Pointer, receive: Pointer, count: usize, ty: c_int, root: c_int, of: Communicator, stream: Stream
    ) |call, real| {
        steps::operation(call, of, None, Some(stream), real)
    }
    fn ncclAllReduceConfig(
        send: Pointer, receive: Pointer, count: usize, ty: c_int, op: c_int, of: Communicator, stream: Stream,
        config: Pointer
    ) |call, real| {
        steps::operation(call, of, None, Some(stream), real)
    }
    fn ncclReduceConfig(
        send: Pointer, receive: Pointer, count: usize, ty: c_int, op: c_int, root: c_int, of: Communicator,
        stream: Stream, config: Pointer
    ) |call, real| {
        steps::operation(call, of, None, Some(stream), real)
    }
    fn ncclReduceScatterConfig(
        send: Pointer, receive: Pointer, count: usize, ty: c_int, op: c_int, of: Communicator, stream: Stream,
        config: Pointer
    ) |call, real| {
        steps::operation(call, of, None, Some(stream), real)
    }
    fn ncclBroadcastConfig(
        send: Pointer, receive: Pointer, count: usize, ty: c_int, root: c_int, of: Communicator, stream: Stream,
        config: Pointer
    ) |call, real| {
        steps::operation(call, of, None, Some(stream), real)
    }
    fn ncclAllGatherConfig(
        send: Pointer, receive: Pointer, count: usize, ty: c_int, of: Communicator, stream: Stream, config: Pointer
    ) |call, real| {
        steps::operation(call, of, None, Some(stream), real)
    }
    fn ncclAlltoAllConfig(
        send: Pointer, receive: Pointer, count: usize, ty: c_int, of: Communicator, stream: Stream, config: Pointer
    ) |call, real| {
        steps::operation(call, of, None, Some(stream), real)
    }
    fn ncclGatherConfig(
        send: Pointer, receive: Pointer, count: usize, ty: c_int, root: c_int, of: Communicator, stream: Stream,
        config: Pointer
    ) |call, real| {
        steps::operation(call, of, None, Some(stream), real)
    }
    fn ncclScatterConfig(
        send: Pointer, receive: Pointer, count: usize, ty: c_int, root: c_int, of: Communicator, stream: Stream,
        config: Pointer
    ) |call, real| {
        steps::operation(call, of, None, Some(stream), real)
    }
    fn ncclSend(
        send: Pointer, count: usize, ty: c_int, peer: c_int, of: Communicator, stream: Stream
    ) |call, real| {
        steps::operation(call, of, Some((peer, true)), Some(stream), real)
    }
    fn ncclRecv(
        receive: Pointer, count: usize, ty: c_int, peer: c_int, of: Communicator, stream: Stream
    ) |call, real| {
        steps::operation(call, of, Some((peer, false)), Some(stream), real)
    }
    fn ncclGroupStart() |call, real| {
        steps::start_group(call, real)
    }
    fn ncclGroupEnd() |call, real| {
        steps::end_group(call, real)
    }
    fn ncclGroupSimulateEnd(info: Pointer) |call, real| {
        steps::simulate_group(call, real)
    }
    // Device memory that a suspended communicator gives back, calls of one side only, and kernels of the program that
    // communicate by themselves.
    unknown ncclCommSuspend;
    unknown ncclPutSignal;
    unknown ncclSignal;
    unknown ncclWaitSignal;
    unknown ncclDevCommCreate;
}

/// # Safety
/// So many IDs are there, if there is any.
unsafe fn bytes_of<'a>(ids: *const UniqueId, count: usize) -> &'a [u8] {
    if count == 0 {
        return &[];
    }
    // SAFETY: the caller vouches for the array, which consists of bytes.
    unsafe { std::slice::from_raw_parts(ids.cast(), count * size_of::<UniqueId>()) }
}

/// The address of a function: nothing is ever read through it.
struct Address(*const c_void);

// SAFETY: it is only used as a number.
unsafe impl Sync for Address {}

/// The row and the index of a call with this name.
fn place_of(name: &CStr) -> Option<(usize, usize)> {
    // Nearly everything that is looked up in a process has another beginning.
    let bytes = name.to_bytes();
    let row = match bytes.first() {
        Some(b'n') if bytes.starts_with(b"nccl") => 0,
        Some(b'p') if bytes.starts_with(b"pnccl") => PROFILING,
        _ => return None,
    };
    Some((row, FUNCTIONS[row].iter().position(|known| known.name == name)?))
}

/// Our function of a name, if there is one.
pub(super) fn ours(name: &CStr) -> Option<*mut c_void> {
    let (row, index) = place_of(name)?;
    Some(ADDRESSES[row][index].0.cast_mut())
}

/// The same for a function of a further copy, which stays loaded. `None` for its other name, which is not counted.
pub(super) fn in_front_of(name: &CStr, real: *mut c_void, copy: usize) -> Option<*mut c_void> {
    let index = place_of(name).filter(|(row, _)| *row == 0)?.1;
    FUNCTIONS[copy][index].set(real);
    Some(ADDRESSES[copy][index].0.cast_mut())
}
