use super::*;
use crate::testing;

/// A call as the exported symbols make it.
fn as_program(symbol: &'static str, handler: impl FnOnce() -> Result) -> u32 {
    entry::call(symbol, 0, cuda_abi::Class::Gate, false, handler)
}

#[test]
fn host_functions_may_not_call_the_driver() {
    let _context = testing::context();
    let results = Arc::new(Mutex::new(Vec::new()));
    let (found, stream) = (Arc::clone(&results), stream(BLOCKING) as usize);
    launch(stream as CUstream, move || {
        let stream = stream as CUstream;
        found.lock().push(as_program("cuLaunchHostFunc", || launch(stream, || {})));
        // These are not gated, and would wait for themselves.
        for call in [synchronize(stream), submit_and_wait(stream, Work::Empty)] {
            found.lock().push(call.map_or_else(|error| error as u32, |()| 0));
        }
    })
    .unwrap();
    synchronize(stream as CUstream).unwrap();
    let not_permitted = CUresult::CUDA_ERROR_NOT_PERMITTED as u32;
    assert!(results.lock().len() == 3);
    // The worker has no current context either, which is what the last call notices first.
    let invalid_context = CUresult::CUDA_ERROR_INVALID_CONTEXT as u32;
    assert_eq!(*results.lock(), [not_permitted, not_permitted, invalid_context]);
}

#[test]
fn a_host_function_is_needed() {
    let _context = testing::context();
    // SAFETY: there is no function to call.
    let results = unsafe {
        [
            cuLaunchHostFunc(NULL, None, null_mut()),
            cuLaunchHostFunc_v2(NULL, None, null_mut(), 0),
            cuLaunchHostFunc_v2(NULL, Some(call_body), null_mut(), 2),
            cuStreamAddCallback(NULL, None, null_mut(), 0),
            cuStreamAddCallback(NULL, Some(note_status), null_mut(), 1),
        ]
    };
    for result in results {
        assert_eq!(result, Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    }
}

type Results = Arc<Mutex<Vec<(usize, CUresult)>>>;

unsafe extern "C" fn note_status(stream: CUstream, status: CUresult, data: *mut c_void) {
    // SAFETY: `data` comes from `add_callback`, and each is called once.
    let results = unsafe { Arc::from_raw(data.cast::<Mutex<Vec<(usize, CUresult)>>>()) };
    results.lock().push((stream as usize, status));
}

fn add_callback(stream: CUstream, results: &Results) {
    let data = Arc::into_raw(Arc::clone(results)).cast_mut().cast();
    // SAFETY: the function takes what is passed here.
    unsafe { cuStreamAddCallback(stream, Some(note_status), data, 0) }.unwrap();
}

#[test]
fn callbacks_are_told_how_it_went_and_host_functions_do_not_run_after_an_error() {
    let _context = testing::context();
    let (stream, gate, log, results) = (stream(BLOCKING), Gate::new(), Log::default(), Results::default());
    block(stream, &gate);
    add_callback(stream, &results);
    fail(stream);
    log.on(stream, "host function");
    add_callback(stream, &results);
    gate.open();
    let _ = synchronize(stream);
    let handle = stream as usize;
    let expected = [(handle, CUresult::CUDA_SUCCESS), (handle, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS)];
    assert_eq!(*results.lock(), expected);
    assert!(log.all().is_empty());
}

#[test]
fn host_functions_run_on_a_thread_with_all_signals_blocked() {
    let _context = testing::context();
    let blocked = Arc::new(Mutex::new(0));
    let found = Arc::clone(&blocked);
    launch(NULL, move || {
        // SAFETY: a signal set is plain data, for which zero is a value.
        let mut mask: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: `mask` is a local variable; NULL leaves the mask as it is.
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &raw mut mask) };
        // SAFETY: `mask` was filled in above.
        *found.lock() = unsafe { libc::sigismember(&raw const mask, libc::SIGUSR1) };
    })
    .unwrap();
    synchronize(NULL).unwrap();
    assert_eq!(*blocked.lock(), 1);
    // SAFETY: as in the closure.
    let mut mask: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: as in the closure.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &raw mut mask) };
    // SAFETY: as in the closure.
    assert_eq!(unsafe { libc::sigismember(&raw const mask, libc::SIGUSR1) }, 0);
}
