use std::ptr::null_mut;

use super::*;
use crate::cuda::exports as program;
use crate::cuda::testing::alone;

/// Calls the driver as the program does.
macro_rules! call {
    ($name:ident($($arg:expr),*)) => {
        // SAFETY: the parameters are local variables, handles that the driver has given out, and numbers.
        assert_eq!(unsafe { program::$name($($arg),*) }, SUCCESS, stringify!($name))
    };
}

const PTX: &std::ffi::CStr =
    c".version 7.0\n.target sm_50\n.address_size 64\n.visible .entry nothing() { ret; }\n";

fn context_on(device: c_int) -> CUcontext {
    let mut made = null_mut();
    call!(cuCtxCreate_v2(&raw mut made, 0, device));
    made
}

/// In the order of the fields: contexts, streams, events, modules, graphs.
fn counted() -> [u64; 5] {
    let Counts { contexts, streams, events, modules, graphs, .. } = counts();
    [contexts, streams, events, modules, graphs]
}

/// One of each kind in the current context.
fn make_some() {
    let (mut stream, mut event, mut module): (CUstream, CUevent, CUmodule) =
        (null_mut(), null_mut(), null_mut());
    call!(cuStreamCreate(&raw mut stream, 0));
    call!(cuEventCreate(&raw mut event, 0));
    call!(cuModuleLoadData(&raw mut module, PTX.as_ptr().cast()));
}

#[test]
fn objects_are_counted_until_they_are_destroyed() {
    alone("cuda::objects::tests::objects_are_counted_until_they_are_destroyed", || {
        context_on(0);
        make_some();
        assert_eq!(counted(), [1, 1, 1, 1, 0]);
        let mut stream: CUstream = null_mut();
        call!(cuStreamCreateWithPriority(&raw mut stream, 1, 0));
        let mut library: CUlibrary = null_mut();
        let none = null_mut;
        call!(cuLibraryLoadData(
            &raw mut library,
            PTX.as_ptr().cast(),
            none(),
            null_mut(),
            0,
            null_mut(),
            null_mut(),
            0
        ));
        let (mut graph, mut clone, mut captured): (CUgraph, CUgraph, CUgraph) =
            (null_mut(), null_mut(), null_mut());
        let mut execs: [CUgraphExec; 2] = [null_mut(); 2];
        call!(cuGraphCreate(&raw mut graph, 0));
        call!(cuGraphClone(&raw mut clone, graph));
        call!(cuStreamBeginCapture_v2(stream, 2));
        call!(cuStreamEndCapture(stream, &raw mut captured));
        call!(cuGraphInstantiateWithFlags(&raw mut execs[0], graph, 0));
        call!(cuGraphInstantiate_v2(&raw mut execs[1], graph, null_mut(), null_mut(), 0));
        assert_eq!(counted(), [1, 2, 1, 2, 5]);
        for made in [graph, clone, captured] {
            call!(cuGraphDestroy(made));
        }
        for exec in execs {
            call!(cuGraphExecDestroy(exec));
        }
        call!(cuLibraryUnload(library));
        call!(cuStreamDestroy_v2(stream));
        assert_eq!(counted(), [1, 1, 1, 1, 0]);
        // What the driver does not destroy stays.
        // SAFETY: the driver refuses what is not a graph.
        assert_ne!(unsafe { program::cuGraphDestroy(null_mut()) }, SUCCESS);
        assert_eq!(counted(), [1, 1, 1, 1, 0]);
    });
}

#[test]
fn objects_die_with_their_context_and_no_other() {
    alone("cuda::objects::tests::objects_die_with_their_context_and_no_other", || {
        let first = context_on(0);
        make_some();
        let second = context_on(1);
        make_some();
        let mut graph: CUgraph = null_mut();
        call!(cuGraphCreate(&raw mut graph, 0));
        assert_eq!(counted(), [2, 2, 2, 2, 1]);
        call!(cuCtxDestroy_v2(first));
        assert_eq!(context::all(), [(second, 1)]);
        assert_eq!(counted(), [1, 1, 1, 1, 1]);
        call!(cuCtxDestroy_v2(second));
        // A graph belongs to no context.
        assert_eq!(counted(), [0, 0, 0, 0, 1]);
    });
}

#[test]
fn a_primary_context_is_gone_when_nobody_retains_it() {
    alone("cuda::objects::tests::a_primary_context_is_gone_when_nobody_retains_it", || {
        let mut primary: CUcontext = null_mut();
        call!(cuDevicePrimaryCtxRetain(&raw mut primary, 0));
        call!(cuDevicePrimaryCtxRetain(&raw mut primary, 0));
        call!(cuCtxSetCurrent(primary));
        make_some();
        call!(cuDevicePrimaryCtxRelease_v2(0));
        assert_eq!(counted(), [1, 1, 1, 1, 0]);
        // It is emptied, and stays.
        call!(cuDevicePrimaryCtxReset_v2(0));
        assert_eq!(counted(), [1, 0, 0, 0, 0]);
        call!(cuCtxSetCurrent(primary));
        make_some();
        call!(cuDevicePrimaryCtxRelease_v2(0));
        assert_eq!(counted(), [0, 0, 0, 0, 0]);
    });
}

#[test]
fn a_context_that_came_in_another_way_is_met() {
    alone("cuda::objects::tests::a_context_that_came_in_another_way_is_met", || {
        let (mut own, mut primary): (CUcontext, CUcontext) = (null_mut(), null_mut());
        // SAFETY: `own` is a local variable.
        assert_eq!(unsafe { driver::cuCtxCreate_v2(&raw mut own, 0, 0) }, SUCCESS);
        assert_eq!(context::all(), []);
        make_some();
        assert_eq!(context::all(), [(own, 0)]);
        // SAFETY: `primary` is a local variable.
        assert_eq!(unsafe { driver::cuDevicePrimaryCtxRetain(&raw mut primary, 1) }, SUCCESS);
        call!(cuCtxSetCurrent(primary));
        assert_eq!(context::current(), Some((primary, 1)));
        make_some();
        assert_eq!(counted(), [2, 2, 2, 2, 0]);
        // It is known to be the primary one.
        call!(cuDevicePrimaryCtxRelease_v2(1));
        assert_eq!(context::all(), [(own, 0)]);
        assert_eq!(counted(), [1, 1, 1, 1, 0]);
    });
}

#[test]
fn there_is_a_context_to_work_in_on_each_device() {
    alone("cuda::objects::tests::there_is_a_context_to_work_in_on_each_device", || {
        let own = context_on(0);
        call!(cuCtxSetCurrent(null_mut()));
        let on_first = context::on_device(0).expect("the program's");
        assert_eq!(on_first.context, own);
        let mut is_active = 0;
        let mut look = |device| {
            let mut flags = 0;
            call!(cuDevicePrimaryCtxGetState(device, &raw mut flags, &raw mut is_active));
            is_active
        };
        assert_eq!(look(0), 0);
        let on_second = context::on_device(1).expect("the primary one");
        assert_eq!(look(1), 1);
        let device = context::within(on_second.context, context::current).expect("a context");
        assert_eq!(device, Some((on_second.context, 1)));
        assert_eq!(context::current(), None, "the thread's own is current again");
        drop(on_second);
        assert_eq!(look(1), 0);
        assert_eq!(context::all(), [(own, 0)], "it has not become one of the program's");
        assert!(context::on_device(2).is_none());
    });
}

#[test]
fn obstacles_go_with_what_they_are() {
    alone("cuda::objects::tests::obstacles_go_with_what_they_are", || {
        let own = context_on(0);
        let mut address: CUdeviceptr = 0;
        assert_eq!(taint::obstacle(), None);
        call!(cuMemAllocManaged(&raw mut address, 4096, 1));
        assert!(taint::obstacle().is_some_and(|reason| reason.contains("cuMemAllocManaged")));
        call!(cuMemFree_v2(address));
        assert_eq!(taint::obstacle(), None);
        call!(cuMemAllocManaged(&raw mut address, 4096, 1));
        call!(cuCtxDestroy_v2(own));
        assert_eq!(taint::obstacle(), None);
    });
}

/// What simcuda does not have is played.
unsafe extern "C" fn says_yes<T>(_: T) -> CUresult {
    SUCCESS
}

/// Gives its second parameter as the handle.
unsafe extern "C" fn makes<T, U>(out: *mut T, handle: U) -> CUresult {
    // SAFETY: both are as large as a handle, and the test passes a variable.
    unsafe { out.cast::<U>().write(handle) };
    SUCCESS
}

unsafe extern "C" fn makes_with_flags<T>(out: *mut T, _: c_uint) -> CUresult {
    // SAFETY: the test passes a variable as large as a handle.
    unsafe { out.cast::<usize>().write(0x1000) };
    SUCCESS
}

/// Whether an obstacle is told with the name of this call.
fn is_told(call: &str) -> bool {
    taint::obstacle().is_some_and(|reason| reason.contains(&format!("has called {call}: ")))
}

#[test]
fn memory_semaphores_and_events_of_others_are_obstacles_while_they_are_there() {
    let test = "memory_semaphores_and_events_of_others_are_obstacles_while_they_are_there";
    alone(&format!("cuda::objects::tests::{test}"), || {
        let mut memory: CUexternalMemory = null_mut();
        // SAFETY: a played function, local variables.
        let result = unsafe { cuImportExternalMemory(makes, &raw mut memory, 0x40 as *const _) };
        assert!(result == SUCCESS && is_told("cuImportExternalMemory"));
        // SAFETY: as above.
        unsafe { cuDestroyExternalMemory(says_yes, memory) };
        assert_eq!(taint::obstacle(), None);
        let mut semaphore: CUexternalSemaphore = null_mut();
        // SAFETY: as above.
        unsafe { cuImportExternalSemaphore(makes, &raw mut semaphore, 0x80 as *const _) };
        assert!(is_told("cuImportExternalSemaphore"));
        // SAFETY: as above.
        unsafe { cuDestroyExternalSemaphore(says_yes, semaphore) };
        assert_eq!(taint::obstacle(), None);
        let mut event: CUevent = null_mut();
        // SAFETY: as above.
        unsafe { cuEventCreate(makes_with_flags, &raw mut event, 0) };
        assert_eq!(taint::obstacle(), None);
        for _ in 0..2 {
            // SAFETY: as above.
            unsafe { cuIpcGetEventHandle(gives, null_mut(), event) };
            assert!(is_told("cuIpcGetEventHandle"));
        }
        // SAFETY: as above.
        unsafe { cuEventDestroy_v2(says_no, event) };
        assert!(is_told("cuIpcGetEventHandle"), "it is still there");
        // SAFETY: as above.
        unsafe { cuEventDestroy_v2(says_yes, event) };
        assert_eq!(taint::obstacle(), None);
    });
}

unsafe extern "C" fn gives<T, U>(_: T, _: U) -> CUresult {
    SUCCESS
}

unsafe extern "C" fn says_no<T>(_: T) -> CUresult {
    sys::CUresult::CUDA_ERROR_INVALID_HANDLE as CUresult
}

#[test]
fn a_context_lives_until_it_is_detached_as_often_as_attached() {
    let test = "a_context_lives_until_it_is_detached_as_often_as_attached";
    alone(&format!("cuda::objects::tests::{test}"), || {
        let own = context_on(0);
        make_some();
        let mut same: CUcontext = null_mut();
        // SAFETY: a played function, a local variable.
        unsafe { context::cuCtxAttach(makes_with_flags, &raw mut same, 0) };
        // SAFETY: a played function.
        unsafe { context::cuCtxDetach(says_yes, own) };
        assert_eq!(counted(), [1, 1, 1, 1, 0]);
        // SAFETY: a played function.
        unsafe { context::cuCtxDetach(says_yes, own) };
        assert_eq!(counted(), [0, 0, 0, 0, 0]);
    });
}

#[test]
fn a_capture_ends_with_its_stream() {
    alone("cuda::objects::tests::a_capture_ends_with_its_stream", || {
        let own = context_on(0);
        let mut stream: CUstream = null_mut();
        call!(cuStreamCreate(&raw mut stream, 1));
        call!(cuStreamBeginCapture_v2(stream, 2));
        assert_eq!(stream_capture::open_captures(), 1);
        // SAFETY: a played function.
        unsafe { cuStreamDestroy_v2(says_no, stream) };
        assert!(stream_capture::take_capture(stream).map(stream_capture::put_back).is_some(), "it goes on");
        call!(cuStreamDestroy_v2(stream));
        assert!(stream_capture::take_capture(stream).is_none(), "nothing is left to ask the driver for");
        call!(cuStreamCreate(&raw mut stream, 1));
        call!(cuStreamBeginCapture_v2(stream, 2));
        call!(cuCtxDestroy_v2(own));
        assert!(stream_capture::take_capture(stream).is_none());
    });
}
