//! How many tests run at a time, in the programs of this crate: more than there are CPUs. Their tests are processes, which
//! wait for much of the time, for the disk, for CRIU, for a timer.

#[ctor::ctor(unsafe)]
fn more_tests_at_a_time() {
    if std::env::var_os("RUST_TEST_THREADS").is_none() {
        let threads = std::thread::available_parallelism().map_or(1, usize::from) * 3 / 2;
        // SAFETY: before main, there are no other threads.
        unsafe { std::env::set_var("RUST_TEST_THREADS", threads.max(1).to_string()) };
    }
}
