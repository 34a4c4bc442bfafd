//! How fast captures are, beside what the driver does at its fastest: for `cargo xtask bench gpu`.

use std::time::Instant;

use super::*;

const ROUNDS: usize = 15;
/// Where kernels are interpreted, a hash takes seconds.
const HASH_ROUNDS: usize = 3;

/// The seconds of the fastest run of each, in turns: whatever else the machine does only adds time.
fn fastest(rounds: usize, works: &mut [&mut dyn FnMut()]) -> Vec<f64> {
    let mut best = vec![f64::INFINITY; works.len()];
    // The first round does not count.
    for round in 0..=rounds {
        for (work, best) in works.iter_mut().zip(&mut best) {
            let begun = Instant::now();
            work();
            if round > 0 {
                *best = best.min(begun.elapsed().as_secs_f64());
            }
        }
    }
    best
}

/// Begins one plain copy of a piece and waits for it.
fn plain(stream: &Stream, copy: impl FnOnce(CUstream) -> cuda_abi::types::CUresult) {
    in_context(stream.context(), || told("copy", copy(stream.handle))).expect("begun");
    stream.finish().expect("copied");
}

#[test]
#[ignore = "a measurement: `cargo xtask bench gpu`"]
fn ratios() {
    if !is_on_gpu("measure::ratios", &[]) {
        return;
    }
    let mib = std::env::var("CKPT_BENCH_MIB").map_or(64, |mib| mib.parse().expect("a number"));
    let mut job = Job::new(1, &[mib << 20]);
    let (context, bytes) = (job.contexts[0], mib << 20);
    let (device, other) = (job.pieces[0].address, device_memory(context, bytes));
    let addresses: Vec<u64> = (0..(bytes / CHUNK) as u64).map(|chunk| device + chunk * CHUNK_BYTES).collect();
    let mut mirror = job.stage();
    assert!(mirror.shortcomings().is_empty(), "{:?}", mirror.shortcomings());
    let stream = Stream::new(context).expect("a stream");
    let host = mirror.memory.at(0);
    // SAFETY: the mirror and the device memory have that many bytes.
    let from_device = |stream| unsafe { driver::cuMemcpyDtoHAsync_v2(host, device, bytes, stream) };
    // SAFETY: as above.
    let to_device = |stream| unsafe { driver::cuMemcpyHtoDAsync_v2(device, host, bytes, stream) };
    // SAFETY: both have that many bytes.
    let on_device = |stream| unsafe { driver::cuMemcpyDtoDAsync_v2(other, device, bytes, stream) };

    let seconds = fastest(
        ROUNDS,
        &mut [&mut || plain(&stream, from_device), &mut || {
            job.pieces[0].hashes.clear();
            assert_eq!(mirror.capture(&mut job.pieces), Ok(vec![bytes as u64]));
        }],
    );
    let capture_ratio = seconds[0] / seconds[1];
    let seconds = fastest(
        ROUNDS,
        &mut [&mut || plain(&stream, to_device), &mut || {
            mirror.copy_back(&job.pieces).expect("copied back");
        }],
    );
    let copyback_ratio = seconds[0] / seconds[1];
    let hasher = &mut mirror.hashers[0];
    let seconds = fastest(
        HASH_ROUNDS,
        &mut [&mut || plain(&stream, on_device), &mut || {
            for part in addresses.chunks(hasher.part) {
                in_context(context, || hasher.begin(part, stream.handle)).expect("begun");
                stream.finish().expect("hashed");
            }
        }],
    );
    let hash_ratio = seconds[0] / seconds[1];
    println!(
        "\n{}",
        json(&[
            ("capture_ratio", capture_ratio),
            ("copyback_ratio", copyback_ratio),
            ("hash_ratio", hash_ratio),
        ])
    );
}

fn json(numbers: &[(&str, f64)]) -> String {
    let fields: Vec<String> = numbers.iter().map(|(name, number)| format!("\"{name}\":{number}")).collect();
    format!("{{{}}}", fields.join(","))
}
