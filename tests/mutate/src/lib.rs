//! Fuzzing by mutation: a reader of untrusted bytes gets altered versions of valid input, and must not panic.
//!
//! An ordinary run tries the same versions each time. `CKPT_TEST_MUTATIONS` sets how many are tried, from a random seed on,
//! which is printed if the reader panics. `CKPT_TEST_SEED` repeats a run. `cargo xtask fuzz` lets libFuzzer alter the
//! input, guided by the code that it reaches.

#![cfg_attr(not(feature = "guided"), forbid(unsafe_code))]

#[cfg(feature = "guided")]
mod guided;

use fastrand::Rng;

/// Versions of the input that an ordinary test run tries.
const MUTATIONS: u64 = 3000;
/// Values at which arithmetic on lengths and addresses fails.
const EDGES: [u64; 12] = [
    0,
    1,
    0x7f,
    0xff,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    0xffff_ffff_ffff_f000,
    u64::MAX,
];
/// The same in texts.
const NUMBERS: [&str; 9] = [
    "0",
    "-1",
    "1e999",
    "4294967296",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "null",
    "[]",
];

/// Prints the seed of a run whose reader panics.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("to repeat this: CKPT_TEST_SEED={} CKPT_TEST_MUTATIONS=1", self.0);
        }
    }
}

/// Calls `read` with each of `samples`, and with altered versions of them. Once for each test: `cargo xtask fuzz` ends the
/// process in the first call.
///
/// # Panics
/// If `read` does.
pub fn mutations(samples: &[Vec<u8>], read: impl Fn(&[u8])) {
    samples.iter().for_each(|sample| read(sample));
    #[cfg(feature = "guided")]
    if let Some(options) = guided::Options::from_environment() {
        guided::fuzz(&options, samples, &read);
    }
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse().expect("a number"));
    let wanted = number("CKPT_TEST_MUTATIONS");
    let first =
        number("CKPT_TEST_SEED").unwrap_or_else(|| wanted.map_or(0, |_| fastrand::u64(..u64::MAX / 2)));
    for seed in first..first + wanted.unwrap_or(MUTATIONS) {
        let seed = Seed(seed);
        let random = &mut Rng::with_seed(seed.0);
        let mut bytes = samples[random.usize(..samples.len())].clone();
        for _ in 0..random.u32(1..6) {
            mutate(&mut bytes, samples, random);
        }
        read(&bytes);
    }
}

/// Alters the bytes at one place.
fn mutate(bytes: &mut Vec<u8>, samples: &[Vec<u8>], random: &mut Rng) {
    let at = random.usize(..=bytes.len());
    let end = at + random.usize(..=(bytes.len() - at).min(64));
    match random.u32(..9) {
        0 => bytes.truncate(at),
        1 => drop(bytes.drain(at..end)),
        2 => {
            let piece = bytes[at..end].to_vec();
            bytes.splice(at..at, piece);
        }
        3 => {
            let other = &samples[random.usize(..samples.len())];
            bytes.truncate(at);
            bytes.extend_from_slice(&other[random.usize(..=other.len())..]);
        }
        4 => {
            let edge = EDGES[random.usize(..EDGES.len())].to_le_bytes();
            let width = [1, 2, 4, 8][random.usize(..4)].min(bytes.len() - at);
            bytes[at..at + width].copy_from_slice(&edge[..width]);
        }
        5 => replace_number(bytes, at, random),
        6 => bytes[at..end].fill_with(|| random.u8(..)),
        _ if at < bytes.len() => bytes[at] ^= 1 << random.u32(..8),
        _ => bytes.push(random.u8(..)),
    }
}

/// Replaces the first decimal number from `at` on.
fn replace_number(bytes: &mut Vec<u8>, at: usize, random: &mut Rng) {
    let Some(begin) = bytes[at..].iter().position(u8::is_ascii_digit).map(|skip| at + skip) else { return };
    let digits = bytes[begin..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let number = NUMBERS[random.usize(..NUMBERS.len())];
    bytes.splice(begin..begin + digits, number.bytes());
}
