//! NCCL: memory of its allocator, buffers and windows that ranks register. Sources are NCCL's user guide
//! (ncclMemAlloc, ncclCommRegister, ncclCommWindowRegister, "Window Registration Flags").

use std::time::Duration;

use cuda_abi::types::CUstream;

use crate::check::{Check, Result, check, expect_equal};
use crate::checks::nccl::{INT32, SUM, end, expect_bytes, given, ints, is_done, synchronized};
use crate::nccl::{Comm, Rank, Scenario, code, expect, run};
use crate::{ensure, gpu, nc, nccl_ok, ok};

/// The checks of this area.
pub const CHECKS: &[Check] = &[
    check(
        "nccl/registered",
        "buffers that a rank registers for itself (source: user guide, ncclCommRegister)",
        || run("registered", 2, &[]),
    ),
    check(
        "nccl/windows-2",
        "collectives on windows of two ranks, at several offsets (source: user guide, ncclCommWindowRegister)",
        || run("windows", 2, &[]),
    ),
    check("nccl/windows-4", "the same with four ranks", || run("windows", 4, &[])),
    check("nccl/windows-sockets", "the same where ranks do not reach each other's memory", || {
        let variables = [("NCCL_P2P_DISABLE", "1"), ("NCCL_SHM_DISABLE", "1"), ("NCCL_NVLS_ENABLE", "0")];
        run("windows", 2, &variables)
    }),
    check(
        "nccl/window-deregistered-alone",
        "a rank deregisters without the others (source: user guide, ncclCommWindowDeregister)",
        || run("deregistered-alone", 2, &[]),
    ),
    check(
        "nccl/window-in-group",
        "windows that are registered in a group are there at its end (source: user guide, ncclCommWindowRegister)",
        || run("windows-in-group", 2, &[]),
    ),
    check(
        "nccl/window-arguments",
        "what is no memory gives no window: an invalid argument, or no error before NCCL 2.29 (source: dev_runtime.cc)",
        || run("window-arguments", 1, &[]),
    ),
    check("nccl/window-captured", "a captured collective on windows", || run("window-captured", 2, &[])),
];

/// What ranks do, by name.
pub const SCENARIOS: &[(&str, Scenario)] = &[
    ("registered", registered),
    ("windows", windows),
    ("deregistered-alone", deregistered_alone),
    ("windows-in-group", in_group),
    ("window-arguments", arguments),
    ("window-captured", captured),
];

/// `NCCL_WIN_DEFAULT`, `NCCL_WIN_COLL_SYMMETRIC`.
const FLAGS: [i32; 2] = [0, 1];
const SYMMETRIC: i32 = 1;
const BYTES: usize = 4 << 20;

/// Calls a function for memory and fails unless it succeeds.
macro_rules! memory_ok {
    ($name:ident ( $($arg:expr),* $(,)? )) => {
        expect(stringify!($name), nc!(in of_memory, $name($($arg),*)), code::SUCCESS)?
    };
}

fn alloc(size_bytes: usize) -> Result<u64> {
    let mut address = 0;
    memory_ok!(ncclMemAlloc(&raw mut address, size_bytes));
    ensure!(address != 0, "no memory");
    Ok(address)
}

fn register(comm: Comm, buffer: u64, flags: i32) -> Result<usize> {
    let mut window = 0;
    memory_ok!(ncclCommWindowRegister(comm, buffer, BYTES, &raw mut window, flags));
    Ok(window)
}

fn sums(ranks: usize, to: usize, count: usize) -> Vec<u8> {
    let sum = |index: usize| (0..ranks).map(|from| (from * 1_000_000 + to * 100_000 + index) as i32).sum();
    ints((0..count).map(sum))
}

/// Collectives from one buffer to another, at offsets that are the same on all ranks, and one in place.
fn collectives(rank: &Rank, comm: Comm, stream: CUstream, [input, output]: [u64; 2], count: usize) -> Result {
    let (me, ranks) = (rank.rank, rank.ranks);
    gpu::write(input, &ints((0..ranks).flat_map(|to| given(me, to, count))))?;
    nccl_ok!(ncclAllReduce(input, output, count, INT32, SUM, comm, stream));
    // Its input may change once the work is done, whatever the others do.
    synchronized(stream)?;
    gpu::write(input, &ints((0..count).map(|_| 77)))?;
    expect_bytes(&format!("all-reduce of {count}"), output, &sums(ranks, 0, count))?;
    gpu::write(input, &ints((0..ranks).flat_map(|to| given(me, to, count))))?;
    nccl_ok!(ncclReduceScatter(input, output, count, INT32, SUM, comm, stream));
    synchronized(stream)?;
    expect_bytes(&format!("reduce-scatter of {count}"), output, &sums(ranks, me, count))?;
    nccl_ok!(ncclAllGather(input, output, count, INT32, comm, stream));
    synchronized(stream)?;
    let all = ints((0..ranks).flat_map(|from| given(from, 0, count)));
    expect_bytes(&format!("all-gather of {count}"), output, &all)?;
    nccl_ok!(ncclAllReduce(input, input, count, INT32, SUM, comm, stream));
    synchronized(stream)?;
    expect_bytes(&format!("all-reduce of {count} in place"), input, &sums(ranks, 0, count))
}

fn registered(rank: &Rank) -> Result {
    let comm = rank.connect()?;
    let stream = gpu::stream()?;
    let buffers = [alloc(BYTES)?, alloc(BYTES)?];
    for _ in 0..2 {
        let mut handles = [0; 2];
        for (buffer, handle) in buffers.into_iter().zip(&mut handles) {
            memory_ok!(ncclCommRegister(comm, buffer, BYTES, std::ptr::from_mut(handle)));
        }
        collectives(rank, comm, stream, buffers, 5000)?;
        for handle in handles {
            memory_ok!(ncclCommDeregister(comm, handle));
        }
    }
    collectives(rank, comm, stream, buffers, 10)?;
    for buffer in buffers {
        memory_ok!(ncclMemFree(buffer));
    }
    end(comm)
}

fn windows(rank: &Rank) -> Result {
    let comm = rank.connect()?;
    let stream = gpu::stream()?;
    for flags in FLAGS {
        let buffers = [alloc(BYTES)?, alloc(BYTES)?];
        let handles = [register(comm, buffers[0], flags)?, register(comm, buffers[1], flags)?];
        for (offset, count) in [(0, 1), (4096, 1000), (64, 70_001)] {
            collectives(rank, comm, stream, [buffers[0] + offset, buffers[1] + 2 * offset], count)?;
        }
        for (handle, buffer) in handles.into_iter().zip(buffers) {
            memory_ok!(ncclCommWindowDeregister(comm, handle));
            memory_ok!(ncclMemFree(buffer));
        }
    }
    end(comm)
}

/// One rank deregisters before a collective on other memory, and the other one after it.
fn deregistered_alone(rank: &Rank) -> Result {
    let comm = rank.connect()?;
    let (stream, buffer, word) = (gpu::stream()?, alloc(BYTES)?, gpu::upload(&[1_i32])?);
    let mut wanted = 1;
    for round in 0..4 {
        let window = register(comm, buffer, SYMMETRIC)?;
        if rank.rank == round % 2 {
            memory_ok!(ncclCommWindowDeregister(comm, window));
        }
        nccl_ok!(ncclAllReduce(word, word, 1, INT32, SUM, comm, stream));
        synchronized(stream)?;
        if rank.rank != round % 2 {
            memory_ok!(ncclCommWindowDeregister(comm, window));
        }
        wanted *= rank.count();
    }
    gpu::expect_content(word, &[wanted])?;
    end(comm)
}

/// The last rank comes late: the others wait for it.
fn in_group(rank: &Rank) -> Result {
    let comm = rank.connect()?;
    let (stream, buffers) = (gpu::stream()?, [alloc(BYTES)?, alloc(BYTES)?]);
    if rank.rank + 1 == rank.ranks {
        std::thread::sleep(Duration::from_millis(300));
    }
    let mut handles = [0; 2];
    nccl_ok!(ncclGroupStart());
    for (buffer, handle) in buffers.into_iter().zip(&mut handles) {
        memory_ok!(ncclCommWindowRegister(comm, buffer, BYTES, std::ptr::from_mut(handle), SYMMETRIC));
    }
    nccl_ok!(ncclGroupEnd());
    // Without symmetric memory both are NULL.
    expect_equal("both or none", handles[0] == 0, handles[1] == 0)?;
    collectives(rank, comm, stream, buffers, 3000)?;
    ensure!(is_done(stream)?, "work is left");
    for handle in handles {
        memory_ok!(ncclCommWindowDeregister(comm, handle));
    }
    end(comm)
}

fn arguments(rank: &Rank) -> Result {
    let comm = rank.connect()?;
    let (buffer, mut window) = (alloc(BYTES)?, 0);
    let mut version = 0;
    nccl_ok!(ncclGetVersion(&raw mut version));
    let wanted = if version < 22_900 { code::SUCCESS } else { code::INVALID_ARGUMENT };
    for code in [
        nc!(in of_memory, ncclCommWindowRegister(comm, 0, BYTES, &raw mut window, SYMMETRIC)),
        nc!(in of_memory, ncclCommWindowRegister(comm, buffer, 0, &raw mut window, SYMMETRIC)),
    ] {
        expect("ncclCommWindowRegister", code, wanted)?;
        expect_equal("the handle", &window, &0)?;
    }
    memory_ok!(ncclMemFree(buffer));
    end(comm)
}

fn captured(rank: &Rank) -> Result {
    let comm = rank.connect()?;
    let (stream, buffers, count) = (gpu::stream()?, [alloc(BYTES)?, alloc(BYTES)?], 1000);
    let handles = [register(comm, buffers[0], SYMMETRIC)?, register(comm, buffers[1], SYMMETRIC)?];
    let (mut graph, mut exec) = (std::ptr::null_mut(), std::ptr::null_mut());
    ok!(cuStreamBeginCapture_v2(stream, 1));
    nccl_ok!(ncclAllReduce(buffers[0], buffers[1], count, INT32, SUM, comm, stream));
    ok!(cuStreamEndCapture(stream, &raw mut graph));
    ok!(cuGraphInstantiateWithFlags(&raw mut exec, graph, 0));
    for to in 0..3 {
        gpu::write(buffers[0], &ints(given(rank.rank, to, count)))?;
        ok!(cuGraphLaunch(exec, stream));
        synchronized(stream)?;
        expect_bytes("what the graph has reduced", buffers[1], &sums(rank.ranks, to, count))?;
    }
    ok!(cuGraphExecDestroy(exec));
    ok!(cuGraphDestroy(graph));
    for handle in handles {
        memory_ok!(ncclCommWindowDeregister(comm, handle));
    }
    end(comm)
}
