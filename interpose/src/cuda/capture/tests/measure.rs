//! How fast captures are, beside what the driver does at its fastest: for `cargo xtask bench gpu`.

use std::time::Instant;

use super::*;

const ROUNDS: usize = 40;
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

/// Plain copies of equal parts of a allocation, each on a stream of its own.
fn plain(streams: &[Stream], copy: impl Fn(usize, CUstream) -> cuda_abi::types::CUresult) {
    for (part, stream) in streams.iter().enumerate() {
        in_context(stream.context(), || check("copy", copy(part, stream.handle))).expect("begun");
    }
    streams.iter().for_each(|stream| stream.finish().expect("copied"));
}

/// What plain copies of a allocation take, the faster of one copy and of two halves at a time, beside something else.
/// Where one copy is as fast as the bus, two are no faster; where the host copies, they are.
fn beside_plain(
    streams: &[Stream; 2],
    copy: impl Fn(usize, usize, CUstream) -> cuda_abi::types::CUresult,
    bytes: usize,
    other: &mut dyn FnMut(),
) -> f64 {
    let one = &mut || plain(&streams[..1], |_, stream| copy(0, bytes, stream));
    let half = bytes / 2;
    let two = &mut || plain(streams, |part, stream| copy(part * half, half, stream));
    let seconds = fastest(ROUNDS, &mut [one, two, other]);
    seconds[0].min(seconds[1]) / seconds[2]
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
    let (device, other) = (job.allocations[0].address, device_memory(context, bytes));
    let addresses: Vec<u64> = (0..(bytes / CHUNK) as u64).map(|chunk| device + chunk * CHUNK_BYTES).collect();
    let mut mirror = job.stage();
    assert!(mirror.shortcomings.is_empty(), "{:?}", mirror.shortcomings);
    let streams = [0; 2].map(|_| Stream::new(context).expect("a stream"));
    let host = mirror.memory.at(0);
    let from_device = |at: usize, bytes, stream| {
        // SAFETY: the mirror and the device memory have that many bytes there.
        unsafe { driver::cuMemcpyDtoHAsync_v2(host.wrapping_byte_add(at), device + at as u64, bytes, stream) }
    };
    let to_device = |at: usize, bytes, stream| {
        // SAFETY: as above.
        unsafe { driver::cuMemcpyHtoDAsync_v2(device + at as u64, host.wrapping_byte_add(at), bytes, stream) }
    };
    // SAFETY: both have that many bytes.
    let on_device = |_, stream| unsafe { driver::cuMemcpyDtoDAsync_v2(other, device, bytes, stream) };

    let capture_ratio = beside_plain(&streams, from_device, bytes, &mut || {
        job.allocations[0].hashes.clear();
        assert_eq!(mirror.capture(&mut job.allocations).expect("captured").concat(), vec![0..bytes as u64]);
    });
    let copyback_ratio = beside_plain(&streams, to_device, bytes, &mut || {
        mirror.copy_back(&job.allocations).expect("copied back");
    });
    let (alone, stream) = (&streams[..1], &streams[0]);
    let hasher = &mut mirror.hashers[0];
    let seconds = fastest(
        HASH_ROUNDS,
        &mut [&mut || plain(alone, on_device), &mut || {
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
