//! Kernels: warps, blocks, atomics, memory spaces, control flow.

use crate::check::{Check, Result, check, expect_equal};
use crate::{gpu, kernels, ok};

/// The checks of this area.
pub const CHECKS: &[Check] = &[
    check("kernel/vector-add", "a kernel over many blocks, the last of which is not full", vector_add),
    check(
        "kernel/warp",
        "shuffles and votes among the lanes of a warp (PTX ISA, shfl.sync, vote.sync)",
        warp,
    ),
    check("kernel/match", "lanes with the same value find each other (PTX ISA, match.sync)", matching),
    check("kernel/atomics", "atomics of all threads of a grid (PTX ISA, atom, red)", atomics),
    check(
        "kernel/compare-and-swap",
        "a lock made of compare-and-swap protects a plain word",
        compare_and_swap,
    ),
    check(
        "kernel/shared-reduction",
        "a reduction in shared memory with barriers (PTX ISA, bar.sync)",
        reduction,
    ),
    check("kernel/local-array", "an array in local memory that is indexed at run time", local_array),
    check("kernel/call", "a function call with parameters and a result (PTX ISA, call)", call),
    check("kernel/vectors", "loads and stores of four words (PTX ISA, Vectors)", vectors),
    check(
        "kernel/places",
        "block and thread numbers in three dimensions (PTX ISA, Special registers)",
        places,
    ),
    check("kernel/divergence", "lanes of a warp leave a loop at different times", divergence),
    check(
        "kernel/generic-addresses",
        "generic addresses of shared, local and global memory (PTX ISA, cvta)",
        generic,
    ),
];

fn vector_add() -> Result {
    gpu::start()?;
    let add = gpu::function(kernels::BASIC, "add")?;
    let count = 100_003_u32;
    let a: Vec<u32> = (0..count).collect();
    let b: Vec<u32> = (0..count).map(|index| index.wrapping_mul(2_654_435_761)).collect();
    let out = gpu::upload(&vec![7_u32; a.len() + 1])?;
    let parameters = [gpu::upload(&a)?, gpu::upload(&b)?, out, u64::from(count)];
    gpu::launch(add, count.div_ceil(256), 256, std::ptr::null_mut(), &parameters)?;
    let mut wanted: Vec<u32> = a.iter().zip(&b).map(|(a, b)| a.wrapping_add(*b)).collect();
    wanted.push(7);
    gpu::expect_content(out, &wanted)
}

fn warp() -> Result {
    gpu::start()?;
    let out = gpu::alloc(32 * 32)?;
    gpu::launch(gpu::function(kernels::TOGETHER, "warp")?, 1, 32, std::ptr::null_mut(), &[out])?;
    let all = gpu::read::<u32>(out, 256)?;
    for (lane, got) in (0_u32..).zip(all.chunks(8)) {
        let wanted = [
            100 + if lane >= 3 { lane - 3 } else { lane },
            100 + if lane + 3 < 32 { lane + 3 } else { lane },
            100 + (lane ^ 3),
            100 + lane / 8 * 8 + 5,
            0xaaaa_aaaa,
            1,
            0,
            u32::MAX,
        ];
        expect_equal(&format!("lane {lane}"), got, &wanted[..])?;
    }
    Ok(())
}

fn matching() -> Result {
    gpu::start()?;
    let out = gpu::alloc(128)?;
    gpu::launch(gpu::function(kernels::TOGETHER, "matching")?, 1, 32, std::ptr::null_mut(), &[out])?;
    let wanted: Vec<u32> =
        (0..32).map(|lane| if lane % 2 == 0 { 0x5555_5555 } else { 0xaaaa_aaaa }).collect();
    gpu::expect_content(out, &wanted)
}

fn atomics() -> Result {
    gpu::start()?;
    let words = gpu::upload(&[0_u32, u32::MAX, 0, u32::MAX, 0, 0, 0, 0])?;
    let (sum64, sum_f32) = (gpu::upload(&[0_u64])?, gpu::upload(&[0.0_f32])?);
    let function = gpu::function(kernels::TOGETHER, "atomics")?;
    // 64 blocks of 128 threads: 8192, of which each bit of a word is used 256 times.
    gpu::launch(function, 64, 128, std::ptr::null_mut(), &[words, sum64, sum_f32])?;
    gpu::expect_content(sum64, &[8192 * 0x1_0000_0001_u64])?;
    gpu::expect_content(sum_f32, &[8192.0_f32])?;
    // inc goes 0, 1, … 9, 0; dec goes 0, 9, 8, … 0: both with a period of 10.
    gpu::expect_content(words, &[8192_u32, 0, 8191, 0, u32::MAX, 0, 2, 8])
}

fn compare_and_swap() -> Result {
    gpu::start()?;
    let (lock, value) = (gpu::upload(&[0_u32])?, gpu::upload(&[0_u32])?);
    let function = gpu::function(kernels::TOGETHER, "locked")?;
    gpu::launch(function, 200, 1, std::ptr::null_mut(), &[lock, value])?;
    gpu::expect_content(value, &[200_u32])?;
    gpu::expect_content(lock, &[0_u32])
}

fn reduction() -> Result {
    gpu::start()?;
    let data: Vec<u32> = (0..256 * 40).map(|index: u32| index.wrapping_mul(40_503)).collect();
    let (input, out) = (gpu::upload(&data)?, gpu::alloc(160)?);
    gpu::launch(gpu::function(kernels::TOGETHER, "reduce")?, 40, 256, std::ptr::null_mut(), &[input, out])?;
    let wanted: Vec<u32> = data
        .chunks(256)
        .map(|block| block.iter().fold(0, |sum: u32, value| sum.wrapping_add(*value)))
        .collect();
    gpu::expect_content(out, &wanted)
}

/// Runs a kernel of 32 threads that takes only where to write a word for each.
fn of_32_threads(name: &str, wanted: impl Fn(u32) -> u32) -> Result {
    gpu::start()?;
    let out = gpu::alloc(128)?;
    gpu::launch(gpu::function(kernels::STRUCTURE, name)?, 1, 32, std::ptr::null_mut(), &[out])?;
    gpu::expect_content(out, &(0..32).map(wanted).collect::<Vec<u32>>())
}

fn local_array() -> Result {
    of_32_threads("local_array", |index| index * (index + 1) / 2)
}

fn call() -> Result {
    of_32_threads("calling", |index| index * index * index)
}

fn divergence() -> Result {
    of_32_threads("diverging", |index| {
        let (mut value, mut steps) = (index + 1, 0);
        while value != 1 {
            value = if value.is_multiple_of(2) { value / 2 } else { 3 * value + 1 };
            steps += 1;
        }
        steps
    })
}

fn vectors() -> Result {
    gpu::start()?;
    let data: Vec<u32> = (0..400).collect();
    let (input, out) = (gpu::upload(&data)?, gpu::alloc(1600)?);
    gpu::launch(gpu::function(kernels::STRUCTURE, "vectors")?, 1, 100, std::ptr::null_mut(), &[input, out])?;
    let wanted: Vec<u32> = data.chunks(4).flat_map(|four| four.iter().rev().copied()).collect();
    gpu::expect_content(out, &wanted)
}

fn places() -> Result {
    gpu::start()?;
    let (grid, block) = ([3_u32, 2, 2], [5_u32, 4, 2]);
    let out = gpu::alloc(12 * 40 * 4)?;
    let function = gpu::function(kernels::STRUCTURE, "places")?;
    gpu::launch_with(function, grid, block, 0, std::ptr::null_mut(), &[out])?;
    ok!(cuCtxSynchronize());
    let mut wanted = Vec::new();
    for number in 0..12 * 40 {
        let (outer, inner) = (number / 40, number % 40);
        let (bx, by, bz) = (outer % 3, outer / 3 % 2, outer / 6);
        let (tx, ty, tz) = (inner % 5, inner / 5 % 4, inner / 20);
        wanted.push(bx << 20 | by << 16 | bz << 12 | tx << 8 | ty << 4 | tz);
    }
    gpu::expect_content(out, &wanted)
}

fn generic() -> Result {
    gpu::start()?;
    let (input, out) = (gpu::upload(&[39_u32])?, gpu::alloc(4)?);
    gpu::launch(gpu::function(kernels::STRUCTURE, "generic")?, 1, 1, std::ptr::null_mut(), &[input, out])?;
    gpu::expect_content(out, &[42_u32])
}
