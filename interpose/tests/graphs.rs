//! Graphs that allocate get the memory that the interposer's pools hold and nobody uses, as they would get the
//! driver's.

mod common;

use std::path::PathBuf;
use std::process::Output;
use std::sync::LazyLock;

use common::program::{self, said};

static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| program::program("graph_memory"));

fn run(part: &str, is_interposed: bool, settings: &[(&str, &str)]) -> Output {
    program::run(&PROGRAM, &[part], is_interposed, &[&[("SIMCUDA_MEMORY", "64MiB")], settings].concat())
}

fn lines(output: &Output) -> Vec<String> {
    said(output).lines().map(str::to_owned).collect()
}

/// What a part says with the interposer in front.
fn interposed(part: &str) -> Vec<String> {
    lines(&run(part, true, &[]))
}

/// What it says when the driver fails a call once, or always, for want of memory; and how often the call was made.
fn failing(part: &str, symbol: &str, which: &str) -> (Vec<String>, usize) {
    let fault = format!("{symbol}:{which}=CUDA_ERROR_OUT_OF_MEMORY");
    let output = run(part, true, &[("SIMCUDA_FAULT", &fault), ("SIMCUDA_TRACE", "1")]);
    let calls = String::from_utf8_lossy(&output.stderr).matches(&format!("simcuda: {symbol} = ")).count();
    (lines(&output), calls)
}

#[test]
fn a_node_gets_what_a_pool_does_not_use() {
    // By then it is the graph's, and the pool's only in the driver's accounts.
    let expected = ["hold 0, the pool holds 40", "node 0, the pool holds 40", "node 2, the pool holds 40"];
    assert_eq!(interposed("nodes"), expected);
    assert_eq!(interposed("any-node"), expected[..2]);
}

#[test]
fn a_captured_allocation_gets_it_too_and_the_capture_goes_on() {
    let expected = [
        "hold 0, the pool holds 40",
        "allocation 0, the pool holds 40",
        "free 0, the pool holds 40",
        "end 0, the pool holds 40",
        "launch 0, the pool holds 40",
    ];
    assert_eq!(interposed("captured"), expected);
}

/// At the calls at which a driver makes the memory, if the device has less than the graph allocates.
#[test]
fn room_is_made_before_a_graph_is_used_for_the_first_time() {
    // 24 MiB are the graphs', which the driver counts as the pool's.
    let expected = [
        "hold 0, the pool holds 56",
        "launch 0, the pool holds 24",
        "hold 0, the pool holds 56",
        "launch again 0, the pool holds 56",
        // It needs 8 MiB, and there are as many.
        "upload 0, the pool holds 56",
        "hold 0, the pool holds 56",
        "launch after a trim 0, the pool holds 24",
        "hold 0, the pool holds 56",
        "instantiate 0, the pool holds 24",
    ];
    assert_eq!(interposed("first-uses"), expected);
}

#[test]
fn what_has_done_nothing_is_tried_once_more_and_a_launch_is_not() {
    for (part, symbol) in [("instantiate", "cuGraphInstantiateWithFlags"), ("upload", "cuGraphUpload")] {
        let succeeds = vec!["hold 0, the pool holds 8".to_owned(), format!("{part} 0, the pool holds 0")];
        assert_eq!(failing(part, symbol, "1"), (succeeds, 2));
        let fails = vec!["hold 0, the pool holds 8".to_owned(), format!("{part} 2, the pool holds 0")];
        assert_eq!(failing(part, symbol, "1+"), (fails, 2));
    }
    let told = ["hold 0, the pool holds 8", "launch 2, the pool holds 0"].map(str::to_owned);
    assert_eq!(failing("launch", "cuGraphLaunch", "1"), (told.to_vec(), 1));
}

/// Two calls for the first node, which gets what the pool holds, and one for the second, for which nothing is left.
#[test]
fn without_room_to_be_made_nothing_is_tried_again() {
    let output = run("nodes", true, &[("SIMCUDA_TRACE", "1")]);
    let trace = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(trace.matches("simcuda: cuGraphAddMemAllocNode = ").count(), 3, "{trace}");
}
