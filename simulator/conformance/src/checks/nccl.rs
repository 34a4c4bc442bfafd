//! NCCL: ranks that are processes, over each kind of transport. Sources are NCCL's user guide ("NCCL API", "Environment
//! Variables") and its public header.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use cuda_abi::types::*;

use crate::check::{Check, Result, Stop, check, expect_equal, question};
use crate::nccl::{
    Comm, Config, Rank, SHARES_GPUS, Scenario, UniqueId, ask, code, nccl, of_growth, of_pairs, run, say,
    unique_id,
};
use crate::{cu, ensure, gpu, nc, nccl_gives, nccl_ok, ok};

/// The checks of this area.
pub const CHECKS: &[Check] = &[
    check("nccl/version", "the library has a version and texts of results (source: header)", version),
    check(
        "nccl/arguments",
        "what is no rank, ID or communicator is an invalid argument (source: header)",
        arguments,
    ),
    check("nccl/one-rank", "a communicator of one rank (source: user guide, ncclCommInitRank)", || {
        run("all-reduce", 1, &[])
    }),
    check(
        "nccl/all-reduce-2",
        "reductions of all types by two ranks (source: user guide, ncclAllReduce)",
        || run("all-reduce", 2, &[]),
    ),
    check("nccl/all-reduce-4", "reductions of all types by four ranks", || run("all-reduce", 4, &[])),
    check("nccl/all-reduce-8", "reductions of some types by eight ranks", || run("few-types", 8, &[])),
    check("nccl/collectives-2", "all collectives by two ranks (source: user guide)", || {
        run("collectives", 2, &[])
    }),
    check("nccl/collectives-4", "all collectives by four ranks", || run("collectives", 4, &[])),
    check("nccl/collectives-8", "all collectives by eight ranks", || run("small-collectives", 8, &[])),
    check("nccl/legacy-ipc", "memory of cuMemAlloc, shared by handles (source: NCCL_CUMEM_ENABLE)", || {
        run("collectives", 2, &[("NCCL_CUMEM_ENABLE", "0"), ("NCCL_NVLS_ENABLE", "0")])
    }),
    check("nccl/host-memory", "host memory of cuMemCreate (source: NCCL_P2P_DISABLE)", || {
        run("collectives", 2, &[("NCCL_P2P_DISABLE", "1"), ("NCCL_NVLS_ENABLE", "0")])
    }),
    check("nccl/host-file", "host memory in a file (source: NCCL_CUMEM_HOST_ENABLE)", || {
        let variables =
            [("NCCL_P2P_DISABLE", "1"), ("NCCL_NVLS_ENABLE", "0"), ("NCCL_CUMEM_HOST_ENABLE", "0")];
        run("collectives", 2, &variables)
    }),
    check("nccl/sockets", "sockets only (source: NCCL_SHM_DISABLE)", || run("collectives", 2, SOCKETS)),
    check("nccl/sockets-4", "sockets only, four ranks", || run("small-collectives", 4, SOCKETS)),
    check("nccl/late-rank", "a rank takes what others have sent that have ended their communicators", || {
        run("late-rank", 3, &[])
    }),
    check("nccl/late-rank-sockets", "the same over sockets", || run("late-rank", 3, SOCKETS)),
    check(
        "nccl/groups",
        "sends and receives of a group make progress together (source: user guide, Group Calls)",
        || run("groups", 4, &[]),
    ),
    check("nccl/split", "ranks by colour, key and old rank (source: user guide, ncclCommSplit)", || {
        run("split", 4, &[])
    }),
    check(
        "nccl/capture",
        "a captured collective runs at each launch of its graph (source: user guide, CUDA Graphs)",
        || run("capture", 2, &[]),
    ),
    check(
        "nccl/all-to-all",
        "all-to-all, gather and scatter (source: user guide, ncclAlltoAll, ncclGather, ncclScatter)",
        || run("all-to-all", 3, &[]),
    ),
    check("nccl/streams", "work of one communicator on two streams runs in the order of the calls", || {
        run("streams", 2, &[])
    }),
    check(
        "nccl/nonblocking",
        "a communicator that is being made is in progress (source: user guide, ncclConfig_t)",
        || run("nonblocking", 2, &[]),
    ),
    check("nccl/missing-peer", "a collective waits for a rank that has not called it", || {
        run("missing-peer", 2, &[])
    }),
    check("nccl/missing-peer-sockets", "work without its peer does not end, over sockets", || {
        run("missing-peer", 2, SOCKETS)
    }),
    check(
        "nccl/abort",
        "an abort ends work that waits for a peer (source: user guide, ncclCommAbort)",
        || run("abort", 2, &[]),
    ),
    check(
        "nccl/shrink",
        "ranks go on without one that does not answer (source: user guide, ncclCommShrink)",
        || run("shrink", 3, &[]),
    ),
    check(
        "nccl/revoke",
        "work of a revoked communicator ends, and it can be shrunk (source: header, ncclCommRevoke)",
        || run("revoke", 3, &[]),
    ),
    check(
        "nccl/grow",
        "a rank joins others, which keep their numbers (source: user guide, ncclCommGrow)",
        || run("grow", 3, &[]),
    ),
    check(
        "nccl/finalize",
        "work is done once it is finalized (source: user guide, ncclCommFinalize)",
        || run("finalize", 2, &[]),
    ),
    check(
        "nccl/duplicate-device",
        "two ranks on one device are an invalid usage (source: user guide)",
        || run("duplicate", 2, &[(SHARES_GPUS, "0")]),
    ),
    question(
        "question/nccl-first-calls",
        "how long calls of NCCL take whose peer comes 200 ms late, and what they take of device memory",
        || {
            // What rank 0 has measured, whose peer is late.
            let said = |variables: &[_]| Ok(ask("first-calls", 2, variables)?.swap_remove(0));
            let (usual, sockets) = (said(&[])?, said(SOCKETS)?);
            let (no_cumem, at_init) =
                (said(&[("NCCL_CUMEM_ENABLE", "0")])?, said(&[("NCCL_RUNTIME_CONNECT", "0")])?);
            Ok(format!(
                "{usual}; over sockets: {sockets}; NCCL_CUMEM_ENABLE=0: {no_cumem}; NCCL_RUNTIME_CONNECT=0: {at_init}"
            ))
        },
    ),
    question("question/nccl-mismatch", "what a rank reports whose peer calls another collective", || {
        answers("mismatch", &[])
    }),
    question(
        "question/nccl-other-order",
        "what ranks report that make the same calls in another order",
        || {
            Ok(format!(
                "{}; over sockets: {}",
                answers("other-order", &[])?,
                answers("other-order", SOCKETS)?
            ))
        },
    ),
    question(
        "question/nccl-dead-peer",
        "what a rank reports whose peer was killed, over shared memory",
        || answers("dead-peer", &[]),
    ),
    question(
        "question/nccl-dead-peer-sockets",
        "what a rank reports whose peer was killed, over sockets",
        || answers("dead-peer", SOCKETS),
    ),
    check("nccl/one-process", "one process has all ranks (source: user guide, ncclCommInitAll)", one_process),
];

const SOCKETS: &[(&str, &str)] =
    &[("NCCL_P2P_DISABLE", "1"), ("NCCL_SHM_DISABLE", "1"), ("NCCL_NVLS_ENABLE", "0")];

/// What ranks do, by name.
pub const SCENARIOS: &[(&str, Scenario)] = &[
    ("all-reduce", |rank| all_reduce(rank, &TYPES)),
    ("few-types", |rank| all_reduce(rank, &[INT32, FLOAT32])),
    ("collectives", |rank| collectives(rank, &[1, 1000, 70_001])),
    ("small-collectives", |rank| collectives(rank, &[1, 5000])),
    ("groups", groups),
    ("split", split),
    ("capture", capture),
    ("late-rank", late_rank),
    ("streams", streams),
    ("nonblocking", nonblocking),
    ("first-calls", first_calls),
    ("missing-peer", missing_peer),
    ("abort", abort),
    ("shrink", |rank| shrink(rank, false)),
    ("revoke", |rank| shrink(rank, true)),
    ("grow", grow),
    ("all-to-all", |rank| all_to_all(rank, &[1, 5000])),
    ("finalize", finalize),
    ("duplicate", duplicate),
    ("mismatch", mismatch),
    ("other-order", other_order),
    ("dead-peer", dead_peer),
];

const INT8: i32 = 0;
pub(super) const INT32: i32 = 2;
const INT64: i32 = 4;
const FLOAT16: i32 = 6;
const FLOAT32: i32 = 7;
const BFLOAT16: i32 = 9;
const TYPES: [i32; 10] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9];
pub(super) const SUM: i32 = 0;
const PROD: i32 = 1;
const MAX: i32 = 2;
const MIN: i32 = 3;
const AVG: i32 = 4;

fn bytes_of(ty: i32) -> usize {
    match ty {
        0 | 1 => 1,
        FLOAT16 | BFLOAT16 => 2,
        INT32 | 3 | FLOAT32 => 4,
        _ => 8,
    }
}

/// A small number in a type. The numbers of the checks, and their results, are exact in all types.
fn encoded(ty: i32, value: i32) -> Vec<u8> {
    match ty {
        0 | 1 => vec![value as u8],
        INT32 | 3 => value.to_le_bytes().to_vec(),
        INT64 | 5 => i64::from(value).to_le_bytes().to_vec(),
        FLOAT32 => (value as f32).to_le_bytes().to_vec(),
        8 => f64::from(value).to_le_bytes().to_vec(),
        BFLOAT16 => (((value as f32).to_bits() >> 16) as u16).to_le_bytes().to_vec(),
        _ => half(value).to_le_bytes().to_vec(),
    }
}

/// A whole number of less than 2048 as an f16.
fn half(value: i32) -> u16 {
    if value == 0 {
        return 0;
    }
    let bits = (value as f32).to_bits();
    let exponent = (bits >> 23 & 0xff) as u16 - 127 + 15;
    (bits >> 16 & 0x8000) as u16 | exponent << 10 | (bits >> 13 & 0x3ff) as u16
}

/// Element `index` of a rank's contribution: 1 or 2, so that all products fit.
fn element(rank: usize, index: usize) -> i32 {
    1 + i32::from((rank + index).is_multiple_of(3))
}

fn values(ty: i32, numbers: impl Iterator<Item = i32>) -> Vec<u8> {
    numbers.flat_map(|number| encoded(ty, number)).collect()
}

/// What a reduction of all ranks' elements gives. Averages are those of equal numbers.
fn reduced(op: i32, ranks: usize, index: usize) -> i32 {
    let all = (0..ranks).map(|rank| element(rank, index));
    match op {
        SUM => all.sum(),
        PROD => all.product(),
        MAX => all.max().unwrap_or(0),
        _ => all.min().unwrap_or(0),
    }
}

pub(super) fn synchronized(stream: CUstream) -> Result {
    ok!(cuStreamSynchronize(stream));
    Ok(())
}

pub(super) fn end(comm: Comm) -> Result {
    nccl_ok!(ncclCommFinalize(comm));
    nccl_ok!(ncclCommDestroy(comm));
    Ok(())
}

fn all_reduce(rank: &Rank, types: &[i32]) -> Result {
    let comm = rank.connect()?;
    let stream = gpu::stream()?;
    let count = 1003;
    for ty in types.iter().copied() {
        let input = gpu::upload(&values(ty, (0..count).map(|index| element(rank.rank, index))))?;
        let output = gpu::alloc(count * bytes_of(ty))?;
        for op in [SUM, PROD, MAX, MIN] {
            nccl_ok!(ncclAllReduce(input, output, count, ty, op, comm, stream));
            synchronized(stream)?;
            let wanted = values(ty, (0..count).map(|index| reduced(op, rank.ranks, index)));
            expect_bytes(&format!("type {ty}, operation {op}"), output, &wanted)?;
        }
        let same = gpu::upload(&values(ty, (0..count).map(|index| element(0, index))))?;
        nccl_ok!(ncclAllReduce(same, same, count, ty, AVG, comm, stream));
        synchronized(stream)?;
        expect_bytes(
            &format!("average of type {ty}"),
            same,
            &values(ty, (0..count).map(|index| element(0, index))),
        )?;
    }
    end(comm)
}

pub(super) fn expect_bytes(what: &str, address: u64, wanted: &[u8]) -> Result {
    let got = gpu::read::<u8>(address, wanted.len())?;
    match got.iter().zip(wanted).position(|(got, wanted)| got != wanted) {
        None => Ok(()),
        Some(at) => expect_equal(&format!("{what}, byte {at}"), got[at], wanted[at]),
    }
}

/// What rank `from` gives for `to`, element by element.
pub(super) fn given(from: usize, to: usize, count: usize) -> impl Iterator<Item = i32> {
    (0..count).map(move |index| (from * 1_000_000 + to * 100_000 + index) as i32)
}

pub(super) fn ints(numbers: impl Iterator<Item = i32>) -> Vec<u8> {
    values(INT32, numbers)
}

fn collectives(rank: &Rank, counts: &[usize]) -> Result {
    let comm = rank.connect()?;
    let stream = gpu::stream()?;
    for count in counts.iter().copied() {
        for root in [0, rank.ranks - 1] {
            rooted(rank, comm, stream, count, root)?;
        }
        gathered(rank, comm, stream, count)?;
        exchanged(rank, comm, stream, count)?;
    }
    end(comm)
}

fn rooted(rank: &Rank, comm: Comm, stream: CUstream, count: usize, root: usize) -> Result {
    let (me, ranks, at) = (rank.rank, rank.ranks, root as i32);
    let mine = gpu::upload(&ints(given(me, 0, count)))?;
    let out = gpu::upload(&vec![0_u8; 4 * count][..])?;
    nccl_ok!(ncclBroadcast(mine, out, count, INT32, at, comm, stream));
    synchronized(stream)?;
    expect_bytes(&format!("broadcast of {count}"), out, &ints(given(root, 0, count)))?;
    nccl_ok!(ncclReduce(mine, out, count, INT32, SUM, at, comm, stream));
    synchronized(stream)?;
    let sum = |index: usize| (0..ranks).map(|from| (from * 1_000_000 + index) as i32).sum();
    let wanted = if me == root { ints((0..count).map(sum)) } else { ints(given(root, 0, count)) };
    expect_bytes(&format!("reduction of {count}"), out, &wanted)
}

fn gathered(rank: &Rank, comm: Comm, stream: CUstream, count: usize) -> Result {
    let (me, ranks) = (rank.rank, rank.ranks);
    let mine = gpu::upload(&ints(given(me, 0, count)))?;
    let out = gpu::upload(&vec![0_u8; 4 * count * ranks][..])?;
    nccl_ok!(ncclAllGather(mine, out, count, INT32, comm, stream));
    synchronized(stream)?;
    let all = ints((0..ranks).flat_map(|from| given(from, 0, count)));
    expect_bytes(&format!("all-gather of {count}"), out, &all)?;
    // In place: each rank's part lies where it belongs.
    let place = out + (4 * count * me) as u64;
    ok!(cuMemsetD8_v2(out, 0, 4 * count * ranks));
    gpu::write(place, &ints(given(me, 0, count)))?;
    nccl_ok!(ncclAllGather(place, out, count, INT32, comm, stream));
    synchronized(stream)?;
    expect_bytes(&format!("all-gather of {count} in place"), out, &all)?;
    let parts = gpu::upload(&ints((0..ranks).flat_map(|to| given(me, to, count))))?;
    nccl_ok!(ncclReduceScatter(parts, mine, count, INT32, SUM, comm, stream));
    synchronized(stream)?;
    let sum = |index: usize| (0..ranks).map(|from| (from * 1_000_000 + me * 100_000 + index) as i32).sum();
    expect_bytes(&format!("reduce-scatter of {count}"), mine, &ints((0..count).map(sum)))
}

/// Each rank sends a part to each, itself included.
fn exchanged(rank: &Rank, comm: Comm, stream: CUstream, count: usize) -> Result {
    let (me, ranks) = (rank.rank, rank.ranks);
    let parts = gpu::upload(&ints((0..ranks).flat_map(|to| given(me, to, count))))?;
    let out = gpu::upload(&vec![0_u8; 4 * count * ranks][..])?;
    let part = |base: u64, peer: usize| base + (4 * count * peer) as u64;
    nccl_ok!(ncclGroupStart());
    for peer in 0..ranks {
        nccl_ok!(ncclSend(part(parts, peer), count, INT32, peer as i32, comm, stream));
        nccl_ok!(ncclRecv(part(out, peer), count, INT32, peer as i32, comm, stream));
    }
    nccl_ok!(ncclGroupEnd());
    synchronized(stream)?;
    let wanted = ints((0..ranks).flat_map(|from| given(from, me, count)));
    expect_bytes(&format!("exchange of {count}"), out, &wanted)
}

/// Each rank has a part for each; then one has all of them.
fn all_to_all(rank: &Rank, counts: &[usize]) -> Result {
    // On each rank: no other one waits for it.
    of_pairs()?;
    let comm = rank.connect()?;
    let (stream, me, ranks) = (gpu::stream()?, rank.rank, rank.ranks);
    let say = |what: &str, code| expect_equal(what, code, code::SUCCESS);
    for count in counts.iter().copied() {
        let parts = gpu::upload(&ints((0..ranks).flat_map(|to| given(me, to, count))))?;
        let out = gpu::upload(&vec![0_u8; 4 * count * ranks][..])?;
        say("all-to-all", nc!(in of_pairs, ncclAlltoAll(parts, out, count, INT32, comm, stream)))?;
        synchronized(stream)?;
        let wanted = ints((0..ranks).flat_map(|from| given(from, me, count)));
        expect_bytes(&format!("all-to-all of {count}"), out, &wanted)?;
        for root in [0, ranks - 1] {
            ok!(cuMemsetD8_v2(out, 0, 4 * count * ranks));
            // The stream does not wait for it.
            ok!(cuCtxSynchronize());
            say("gather", nc!(in of_pairs, ncclGather(parts, out, count, INT32, root as i32, comm, stream)))?;
            synchronized(stream)?;
            let all = ints((0..ranks).flat_map(|from| given(from, 0, count)));
            let wanted = if me == root { all } else { vec![0; 4 * count * ranks] };
            expect_bytes(&format!("gather of {count}"), out, &wanted)?;
            say(
                "scatter",
                nc!(in of_pairs, ncclScatter(parts, out, count, INT32, root as i32, comm, stream)),
            )?;
            synchronized(stream)?;
            expect_bytes(&format!("scatter of {count}"), out, &ints(given(root, me, count)))?;
        }
    }
    end(comm)
}

/// A ring with several messages to one peer, and two collectives, in groups.
fn groups(rank: &Rank) -> Result {
    let comm = rank.connect()?;
    let (stream, count) = (gpu::stream()?, 20_000);
    let (me, ranks) = (rank.rank, rank.ranks);
    let (next, previous) = ((me + 1) % ranks, (me + ranks - 1) % ranks);
    let rounds = 5;
    let sends: Vec<u64> =
        (0..rounds).map(|round| gpu::upload(&ints(given(me, round, count)))).collect::<Result<_>>()?;
    let recvs: Vec<u64> = (0..rounds).map(|_| gpu::alloc(4 * count)).collect::<Result<_>>()?;
    nccl_ok!(ncclGroupStart());
    for (send, recv) in sends.iter().zip(&recvs) {
        nccl_ok!(ncclSend(*send, count, INT32, next as i32, comm, stream));
        nccl_ok!(ncclRecv(*recv, count, INT32, previous as i32, comm, stream));
    }
    nccl_ok!(ncclGroupEnd());
    synchronized(stream)?;
    for (round, recv) in recvs.iter().enumerate() {
        expect_bytes(&format!("message {round}"), *recv, &ints(given(previous, round, count)))?;
    }
    let (first, second) =
        (gpu::upload(&ints([1].into_iter()))?, gpu::upload(&ints([me as i32].into_iter()))?);
    nccl_ok!(ncclGroupStart());
    nccl_ok!(ncclAllReduce(first, first, 1, INT32, SUM, comm, stream));
    nccl_ok!(ncclAllReduce(second, second, 1, INT32, MAX, comm, stream));
    nccl_ok!(ncclGroupEnd());
    synchronized(stream)?;
    gpu::expect_content(first, &[ranks as i32])?;
    gpu::expect_content(second, &[ranks as i32 - 1])?;
    end(comm)
}

fn numbers_of(comm: Comm) -> Result<(i32, i32)> {
    let (mut rank, mut ranks) = (-1, -1);
    nccl_ok!(ncclCommUserRank(comm, &raw mut rank));
    nccl_ok!(ncclCommCount(comm, &raw mut ranks));
    Ok((rank, ranks))
}

/// Even and odd ranks in reverse order; then all but the last.
fn split(rank: &Rank) -> Result {
    let comm = rank.connect()?;
    let stream = gpu::stream()?;
    let mut half: Comm = std::ptr::null_mut();
    let (colour, key) = (rank.number() % 2, -rank.number());
    nccl_ok!(ncclCommSplit(comm, colour, key, &raw mut half, std::ptr::null_mut()));
    let ranks = rank.count() / 2;
    expect_equal("rank and ranks of the half", numbers_of(half)?, (ranks - 1 - rank.number() / 2, ranks))?;
    let word = gpu::upload(&ints([rank.number()].into_iter()))?;
    nccl_ok!(ncclAllReduce(word, word, 1, INT32, SUM, half, stream));
    synchronized(stream)?;
    let of_half: i32 = (0..rank.count()).filter(|other| other % 2 == colour).sum();
    gpu::expect_content(word, &[of_half])?;
    let is_last = rank.rank + 1 == rank.ranks;
    let mut most: Comm = std::ptr::null_mut();
    nccl_ok!(ncclCommSplit(comm, if is_last { -1 } else { 5 }, 0, &raw mut most, std::ptr::null_mut()));
    expect_equal("no communicator without a colour", most.is_null(), is_last)?;
    // Both work side by side.
    nccl_ok!(ncclAllReduce(word, word, 1, INT32, MAX, comm, stream));
    if !is_last {
        nccl_ok!(ncclAllReduce(word, word, 1, INT32, SUM, most, stream));
        synchronized(stream)?;
        end(most)?;
    }
    synchronized(stream)?;
    end(half)?;
    end(comm)
}

fn capture(rank: &Rank) -> Result {
    let comm = rank.connect()?;
    let stream = gpu::stream()?;
    let word = gpu::upload(&[1_i32])?;
    let (mut graph, mut exec) = (std::ptr::null_mut(), std::ptr::null_mut());
    ok!(cuStreamBeginCapture_v2(stream, 1));
    nccl_ok!(ncclAllReduce(word, word, 1, INT32, SUM, comm, stream));
    ok!(cuStreamEndCapture(stream, &raw mut graph));
    ok!(cuGraphInstantiateWithFlags(&raw mut exec, graph, 0));
    gpu::expect_content(word, &[1_i32])?;
    let mut wanted = 1;
    for _ in 0..4 {
        ok!(cuGraphLaunch(exec, stream));
        synchronized(stream)?;
        wanted *= rank.count();
        gpu::expect_content(word, &[wanted])?;
        // One that is not captured in between.
        nccl_ok!(ncclAllReduce(word, word, 1, INT32, MAX, comm, stream));
    }
    synchronized(stream)?;
    ok!(cuGraphExecDestroy(exec));
    ok!(cuGraphDestroy(graph));
    end(comm)
}

fn streams(rank: &Rank) -> Result {
    let comm = rank.connect()?;
    let streams = [gpu::stream()?, gpu::stream()?];
    let word = gpu::upload(&[1_i32])?;
    for round in 0..6 {
        nccl_ok!(ncclAllReduce(word, word, 1, INT32, SUM, comm, streams[round % 2]));
    }
    synchronized(streams[1])?;
    gpu::expect_content(word, &[rank.count().pow(6)])?;
    end(comm)
}

/// The others may have ended before the last rank begins: two small broadcasts need no answer.
fn late_rank(rank: &Rank) -> Result {
    let comm = rank.connect()?;
    let stream = gpu::stream()?;
    let word = gpu::upload(&[0_i32])?;
    let is_late = rank.rank + 1 == rank.ranks;
    let pause = || std::thread::sleep(Duration::from_millis(if is_late { 300 } else { 0 }));
    for round in 1..=2 {
        pause();
        if rank.rank == 0 {
            gpu::write(word, &[round])?;
        }
        nccl_ok!(ncclBroadcast(word, word, 1, INT32, 0, comm, stream));
        synchronized(stream)?;
        gpu::expect_content(word, &[round])?;
    }
    pause();
    expect_equal("the state", settled(comm)?, code::SUCCESS)?;
    end(comm)
}

/// Waits until the communicator is no longer in progress.
fn settled(comm: Comm) -> Result<u32> {
    loop {
        let mut state = 77;
        nccl_ok!(ncclCommGetAsyncError(comm, &raw mut state));
        if state != code::IN_PROGRESS {
            return Ok(state);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn nonblocking(rank: &Rank) -> Result {
    rank.start()?;
    let mut config = Config::new();
    config.blocking = 0;
    let mut comm: Comm = std::ptr::null_mut();
    let made =
        nc!(ncclCommInitRankConfig(&raw mut comm, rank.count(), rank.id, rank.number(), &raw mut config));
    ensure!(made == code::IN_PROGRESS || made == code::SUCCESS, "init gave {made}");
    expect_equal("the state in the end", settled(comm)?, code::SUCCESS)?;
    let stream = gpu::stream()?;
    let word = gpu::upload(&[3_i32])?;
    let queued = nc!(ncclAllReduce(word, word, 1, INT32, SUM, comm, stream));
    ensure!(queued == code::IN_PROGRESS || queued == code::SUCCESS, "all-reduce gave {queued}");
    expect_equal("the state then", settled(comm)?, code::SUCCESS)?;
    synchronized(stream)?;
    gpu::expect_content(word, &[3 * rank.count()])?;
    let finalized = nc!(ncclCommFinalize(comm));
    ensure!(finalized == code::IN_PROGRESS || finalized == code::SUCCESS, "finalize gave {finalized}");
    expect_equal("the state at the end", settled(comm)?, code::SUCCESS)?;
    nccl_ok!(ncclCommDestroy(comm));
    Ok(())
}

pub(super) fn is_done(stream: CUstream) -> Result<bool> {
    Ok(cu!(cuStreamQuery(stream)) == 0)
}

fn failure(error: std::io::Error) -> Stop {
    Stop::Failed(error.to_string())
}

/// A communicator whose connections are there: the first collective makes them, and its call returns when all ranks have
/// called it. Also a stream, and a word of 1.
fn connected(rank: &Rank) -> Result<(Comm, CUstream, u64)> {
    let comm = rank.connect()?;
    let stream = gpu::stream()?;
    let word = gpu::upload(&[1_i32])?;
    nccl_ok!(ncclAllReduce(word, word, 1, INT32, SUM, comm, stream));
    synchronized(stream)?;
    gpu::write(word, &[1_i32])?;
    Ok((comm, stream, word))
}

/// How long calls take. Rank 1 comes late.
fn first_calls(rank: &Rank) -> Result {
    const LATE: Duration = Duration::from_millis(200);
    gpu::start()?;
    let mut free_bytes = gpu::free_bytes()?;
    let mut taken_mib = || -> Result<usize> {
        let earlier_bytes = std::mem::replace(&mut free_bytes, gpu::free_bytes()?);
        Ok(earlier_bytes.saturating_sub(free_bytes) >> 20)
    };
    let comm = rank.connect()?;
    let mut said = vec![format!("communicator {} MiB", taken_mib()?)];
    let stream = gpu::stream()?;
    // The simulator's kernels are slow.
    let many_bytes = (gpu::free_bytes()? / 4096).clamp(1 << 20, 64 << 20);
    let words = gpu::alloc(many_bytes)?;
    let (few, many, many_mib) = (1, many_bytes / 4, many_bytes >> 20);
    taken_mib()?;
    let mut measured = |what: &str, call: &dyn Fn() -> Result| -> Result {
        // What one rank does next begins with what the other one has ended before.
        std::thread::sleep(if rank.rank == 0 { Duration::ZERO } else { LATE });
        let begun = Instant::now();
        call()?;
        let call_ms = begun.elapsed().as_millis();
        synchronized(stream)?;
        said.push(format!("{what} {call_ms} ms {} MiB", taken_mib()?));
        Ok(())
    };
    let all_reduce = |count| -> Result {
        nccl_ok!(ncclAllReduce(words, words, count, INT32, SUM, comm, stream));
        Ok(())
    };
    let pass = || -> Result {
        if rank.rank == 0 {
            nccl_ok!(ncclSend(words, 1, INT32, 1, comm, stream));
        } else {
            nccl_ok!(ncclRecv(words, 1, INT32, 0, comm, stream));
        }
        Ok(())
    };
    measured("all-reduce", &|| all_reduce(few))?;
    measured("again", &|| all_reduce(few))?;
    measured(&format!("of {many_mib} MiB"), &|| all_reduce(many))?;
    measured("again", &|| all_reduce(many))?;
    measured("send", &pass)?;
    measured("again", &pass)?;
    say(said.join(", "));
    end(comm)
}

/// A file by which one rank lets another one go on.
struct Signal(PathBuf);

impl Signal {
    fn of(rank: &Rank) -> Self {
        Self(std::env::temp_dir().join(format!("conformance-signal-{}", &rank.id.hex()[..96])))
    }

    fn give(&self) -> Result {
        std::fs::write(&self.0, "").map_err(failure)
    }

    fn wait(&self) -> Result {
        while !self.0.exists() {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::fs::remove_file(&self.0).map_err(failure)
    }
}

/// The other rank begins when this one has looked.
fn missing_peer(rank: &Rank) -> Result {
    let (comm, stream, word) = connected(rank)?;
    let looked = Signal::of(rank);
    if rank.rank == 1 {
        looked.wait()?;
    }
    nccl_ok!(ncclAllReduce(word, word, 1, INT32, SUM, comm, stream));
    if rank.rank == 0 {
        std::thread::sleep(Duration::from_millis(200));
        let is_early = is_done(stream)?;
        looked.give()?;
        ensure!(!is_early, "the collective is done without its peer");
    }
    synchronized(stream)?;
    gpu::expect_content(word, &[rank.count()])?;
    end(comm)
}

/// The other rank never comes.
fn abort(rank: &Rank) -> Result {
    let (comm, stream, word) = connected(rank)?;
    if rank.rank == 0 {
        nccl_ok!(ncclAllReduce(word, word, 1, INT32, SUM, comm, stream));
        std::thread::sleep(Duration::from_millis(200));
        ensure!(!is_done(stream)?, "the collective is done without its peer");
    } else {
        std::thread::sleep(Duration::from_millis(600));
    }
    nccl_ok!(ncclCommAbort(comm));
    synchronized(stream)
}

/// The last rank never comes; the others stop what waits for it, and go on.
fn shrink(rank: &Rank, is_revoked: bool) -> Result {
    const SHRINK_ABORT: i32 = 1;
    let (comm, stream, word) = connected(rank)?;
    let excluded = rank.count() - 1;
    if rank.number() == excluded {
        std::thread::sleep(Duration::from_millis(600));
        nccl_ok!(ncclCommAbort(comm));
        return Ok(());
    }
    nccl_ok!(ncclAllReduce(word, word, 1, INT32, SUM, comm, stream));
    std::thread::sleep(Duration::from_millis(200));
    ensure!(!is_done(stream)?, "the collective is done without its peer");
    let mut left: Comm = std::ptr::null_mut();
    if is_revoked {
        expect_equal("revoked", nc!(in of_failures, ncclCommRevoke(comm, 0)), code::SUCCESS)?;
        synchronized(stream)?;
        ensure!(
            nc!(ncclAllReduce(word, word, 1, INT32, SUM, comm, stream)) != code::SUCCESS,
            "a collective was queued"
        );
    }
    let (config, flags) = (std::ptr::null_mut(), if is_revoked { 0 } else { SHRINK_ABORT });
    let made =
        nc!(in of_failures, ncclCommShrink(comm, &raw const excluded, 1, &raw mut left, config, flags));
    expect_equal("shrunk", made, code::SUCCESS)?;
    expect_equal("rank and ranks", numbers_of(left)?, (rank.number(), excluded))?;
    let word = gpu::upload(&[rank.number() + 1])?;
    nccl_ok!(ncclAllReduce(word, word, 1, INT32, SUM, left, stream));
    synchronized(stream)?;
    gpu::expect_content(word, &[(1..=excluded).sum::<i32>()])?;
    end(left)?;
    nccl_ok!(ncclCommAbort(comm));
    Ok(())
}

/// All but the last rank have a communicator, which the last one joins. Rank 0 makes the ID for it.
fn grow(rank: &Rank) -> Result {
    // On each rank: no other one waits for it.
    of_growth()?;
    let comm = rank.connect()?;
    let stream = gpu::stream()?;
    let (is_first, is_last) = (rank.rank == 0, rank.rank + 1 == rank.ranks);
    let (mut few, mut grown): (Comm, Comm) = (std::ptr::null_mut(), std::ptr::null_mut());
    nccl_ok!(ncclCommSplit(comm, if is_last { -1 } else { 0 }, 0, &raw mut few, std::ptr::null_mut()));
    let mut id = UniqueId::default();
    if is_first {
        expect_equal("the ID", nc!(in of_growth, ncclCommGetUniqueId(few, &raw mut id)), code::SUCCESS)?;
    }
    let shared = gpu::upload(&[id])?;
    nccl_ok!(ncclBroadcast(shared, shared, size_of::<UniqueId>(), INT8, 0, comm, stream));
    synchronized(stream)?;
    let id: UniqueId = gpu::read::<UniqueId>(shared, 1)?[0];
    let passed = if is_first || is_last { &raw const id } else { std::ptr::null() };
    let config = std::ptr::null_mut();
    if !is_last {
        let none_more =
            nc!(in of_growth, ncclCommGrow(few, rank.count() - 1, passed, -1, &raw mut grown, config));
        expect_equal("no rank more", none_more, code::INVALID_ARGUMENT)?;
    }
    let number = if is_last { rank.number() } else { -1 };
    let made = nc!(in of_growth, ncclCommGrow(few, rank.count(), passed, number, &raw mut grown, config));
    expect_equal("grown", made, code::SUCCESS)?;
    expect_equal("rank and ranks", numbers_of(grown)?, (rank.number(), rank.count()))?;
    let word = gpu::upload(&[rank.number() + 1])?;
    nccl_ok!(ncclAllReduce(word, word, 1, INT32, SUM, grown, stream));
    synchronized(stream)?;
    gpu::expect_content(word, &[(1..=rank.count()).sum::<i32>()])?;
    if !is_last {
        end(few)?;
    }
    end(grown)?;
    end(comm)
}

fn finalize(rank: &Rank) -> Result {
    let comm = rank.connect()?;
    let stream = gpu::stream()?;
    let word = gpu::upload(&[1_i32])?;
    nccl_ok!(ncclAllReduce(word, word, 1, INT32, SUM, comm, stream));
    nccl_ok!(ncclCommFinalize(comm));
    gpu::expect_content(word, &[rank.count()])?;
    nccl_ok!(ncclCommDestroy(comm));
    Ok(())
}

fn duplicate(rank: &Rank) -> Result {
    let first = Rank { rank: 0, ranks: rank.ranks, id: rank.id };
    first.start()?;
    let mut comm: Comm = std::ptr::null_mut();
    nccl_gives!(code::INVALID_USAGE, ncclCommInitRank(&raw mut comm, rank.count(), rank.id, rank.number()));
    Ok(())
}

fn answers(scenario: &str, variables: &[(&str, &str)]) -> Result<String> {
    Ok(ask(scenario, 2, variables)?.join("; "))
}

/// Polls as a watchdog does: what becomes of work that cannot succeed. Ends it then.
fn fate(comm: Comm, stream: CUstream) -> Result<String> {
    let limit = Instant::now() + Duration::from_secs(3);
    let mut state = code::SUCCESS;
    while state == code::SUCCESS && !is_done(stream)? && Instant::now() < limit {
        nccl_ok!(ncclCommGetAsyncError(comm, &raw mut state));
        std::thread::sleep(Duration::from_millis(1));
    }
    // What ended the work may have been noted since.
    if state == code::SUCCESS {
        nccl_ok!(ncclCommGetAsyncError(comm, &raw mut state));
    }
    let end = if state != code::SUCCESS {
        format!("asynchronous error {state}")
    } else if is_done(stream)? {
        "done without an error".to_owned()
    } else {
        "still waiting after 3 s".to_owned()
    };
    // Memory of a peer that has ended may be gone from below the work: the context has failed then, and NCCL says so.
    let _ = nc!(ncclCommAbort(comm));
    Ok(end)
}

fn mismatch(rank: &Rank) -> Result {
    let comm = rank.connect()?;
    let stream = gpu::stream()?;
    let words = gpu::upload(&[1_i32; 2])?;
    if rank.rank == 0 {
        nccl_ok!(ncclAllReduce(words, words, 2, INT32, SUM, comm, stream));
    } else {
        nccl_ok!(ncclAllReduce(words, words, 1, INT32, MAX, comm, stream));
    }
    let fate = fate(comm, stream)?;
    say(format!("rank {}: {fate}", rank.rank));
    Ok(())
}

fn other_order(rank: &Rank) -> Result {
    let (comm, stream, word) = connected(rank)?;
    let mut refused = None;
    for is_sum in [rank.rank == 0, rank.rank != 0] {
        let code = match is_sum {
            true => nc!(ncclAllReduce(word, word, 1, INT32, SUM, comm, stream)),
            false => nc!(ncclBroadcast(word, word, 1, INT32, 0, comm, stream)),
        };
        refused = refused.or((code != code::SUCCESS).then_some(code));
    }
    let fate = match refused {
        Some(code) => format!("error {code} of the call"),
        None => fate(comm, stream)?,
    };
    say(format!("rank {}: {fate}", rank.rank));
    Ok(())
}

fn dead_peer(rank: &Rank) -> Result {
    let (comm, stream, word) = connected(rank)?;
    // Its memory is needed until both have done the first one.
    let is_connected = Signal::of(rank);
    if rank.rank == 1 {
        is_connected.wait()?;
        say("rank 1 ended".to_owned());
        // Without a word to the others, as if it had been killed: the answer is printed when it is all over.
        return Ok(());
    }
    is_connected.give()?;
    // The end of the peer may be noticed before the call.
    let code = nc!(ncclAllReduce(word, word, 1, INT32, SUM, comm, stream));
    let fate = if code == 0 { fate(comm, stream)? } else { format!("error {code} of the call") };
    say(format!("rank 0: {fate}"));
    Ok(())
}

fn version() -> Result {
    let mut version = 0;
    nccl()?;
    nccl_ok!(ncclGetVersion(&raw mut version));
    ensure!(version >= 21800, "version {version}");
    nccl_gives!(code::INVALID_ARGUMENT, ncclGetVersion(std::ptr::null_mut()));
    // SAFETY: any number has a text.
    let text = unsafe { (nccl()?.ncclGetErrorString)(code::INVALID_ARGUMENT) };
    ensure!(!text.is_null(), "an error without a text");
    Ok(())
}

fn arguments() -> Result {
    nccl()?;
    gpu::start()?;
    let (id, mut comm): (_, Comm) = (unique_id()?, std::ptr::null_mut());
    for (ranks, rank) in [(0, 0), (2, 2), (2, -1), (-1, 0)] {
        nccl_gives!(code::INVALID_ARGUMENT, ncclCommInitRank(&raw mut comm, ranks, id, rank));
    }
    nccl_ok!(ncclCommInitRank(&raw mut comm, 1, id, 0));
    let mut device = 77;
    nccl_ok!(ncclCommCuDevice(comm, &raw mut device));
    expect_equal("device", device, 0)?;
    let (stream, word) = (gpu::stream()?, gpu::upload(&[1_i32])?);
    nccl_gives!(code::INVALID_ARGUMENT, ncclAllReduce(word, word, 1, 99, SUM, comm, stream));
    nccl_gives!(code::INVALID_ARGUMENT, ncclAllReduce(word, word, 1, INT8 - 1, SUM, comm, stream));
    nccl_gives!(code::INVALID_ARGUMENT, ncclAllReduce(word, word, 1, INT32, 99, comm, stream));
    nccl_gives!(code::INVALID_ARGUMENT, ncclBroadcast(word, word, 1, INT32, 1, comm, stream));
    nccl_gives!(code::INVALID_ARGUMENT, ncclBroadcast(word, word, 1, INT32, -1, comm, stream));
    nccl_ok!(ncclAllReduce(word, word, 1, INT64 - 2, SUM, comm, stream));
    synchronized(stream)?;
    gpu::expect_content(word, &[1_i32])?;
    nccl_gives!(code::INVALID_USAGE, ncclGroupEnd());
    end(comm)
}

fn one_process() -> Result {
    nccl()?;
    gpu::start()?;
    let second = gpu::second_device()?;
    let mut comms: [Comm; 2] = [std::ptr::null_mut(); 2];
    nccl_ok!(ncclCommInitAll(comms.as_mut_ptr(), 2, std::ptr::null()));
    let mut words = Vec::new();
    for device in [0, second] {
        let mut context = std::ptr::null_mut();
        ok!(cuDevicePrimaryCtxRetain(&raw mut context, device));
        ok!(cuCtxSetCurrent(context));
        words.push((context, gpu::stream()?, gpu::upload(&[device + 1])?));
    }
    nccl_ok!(ncclGroupStart());
    for (comm, (_, stream, word)) in comms.into_iter().zip(&words) {
        nccl_ok!(ncclAllReduce(*word, *word, 1, INT32, SUM, comm, *stream));
    }
    nccl_ok!(ncclGroupEnd());
    for (context, stream, word) in words {
        ok!(cuCtxSetCurrent(context));
        synchronized(stream)?;
        gpu::expect_content(word, &[3_i32])?;
    }
    for comm in comms {
        nccl_ok!(ncclCommDestroy(comm));
    }
    Ok(())
}
