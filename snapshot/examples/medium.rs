//! How fast objects are written to a directory and read from it, beside `fio` doing the same with direct I/O. Both in
//! turns, several times, on the file system of DIR; one JSON object with bytes per second (medians), the ratios, and
//! the time of the CPU that ours take: on a machine that does other work as well, it is what can be compared.
//!
//! `cargo run --release -p ckpt-snapshot --example medium -- DIR [key=value…]`
//! with `mib` (per writer, 512), `writers` (2), `readers` (2), `blocks` (4), `block_mib` (8), `read_mib` (4), `rounds`
//! (5), `hash` (1: BLAKE3 over all of it, as a save does), `direct` (1), `ring` (1).

use ckpt_snapshot::RelPath;
use ckpt_snapshot::medium::{Block, DirMedium, IoFeatures, Medium};
use std::collections::HashMap;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// What is measured.
struct Settings {
    bytes_each: u64,
    writers: usize,
    readers: usize,
    blocks: usize,
    block_bytes: usize,
    read_bytes: usize,
    rounds: usize,
    hash: bool,
    ways: IoFeatures,
}

impl Settings {
    fn of(arguments: &HashMap<String, u64>) -> Outcome<Self> {
        let known = [
            "mib",
            "writers",
            "readers",
            "blocks",
            "block_mib",
            "read_mib",
            "rounds",
            "hash",
            "direct",
            "ring",
        ];
        if let Some(unknown) = arguments.keys().find(|key| !known.contains(&key.as_str())) {
            return Err(format!("{unknown} is none of {known:?}").into());
        }
        let number = |key: &str, default| arguments.get(key).copied().unwrap_or(default);
        let count = |key: &str, default| usize::try_from(number(key, default));
        Ok(Self {
            bytes_each: number("mib", 512) << 20,
            writers: count("writers", 2)?,
            readers: count("readers", 2)?,
            blocks: count("blocks", 4)?,
            block_bytes: count("block_mib", 8)? << 20,
            read_bytes: count("read_mib", 4)? << 20,
            rounds: count("rounds", 5)?,
            hash: number("hash", 1) != 0,
            ways: IoFeatures { direct: number("direct", 1) != 0, ring: number("ring", 1) != 0 },
        })
    }
}

fn object(number: usize) -> RelPath {
    RelPath::new(format!("packs/{number}")).expect("a plain path")
}

/// Bytes that no disk can make smaller, other ones for each `seed`.
fn noise(into: &mut [u8], seed: u64) {
    fastrand::Rng::with_seed(seed).fill(into);
}

/// Runs `work` in so many threads at once; returns the seconds.
fn in_threads(threads: usize, work: impl Fn(usize) -> Outcome<()> + Sync) -> Outcome<f64> {
    let begin = Instant::now();
    std::thread::scope(|scope| {
        let work = &work;
        let running: Vec<_> = (0..threads).map(|number| scope.spawn(move || work(number))).collect();
        running.into_iter().try_for_each(|thread| thread.join().expect("no panic"))
    })?;
    Ok(begin.elapsed().as_secs_f64())
}

fn write(medium: &DirMedium, settings: &Settings) -> Outcome<f64> {
    let mut sample = vec![0; 1 << 20];
    noise(&mut sample, 1);
    in_threads(settings.writers, |number| {
        let mut writer = medium.create(&object(number), settings.blocks, settings.block_bytes)?;
        let mut left_bytes = settings.bytes_each;
        while left_bytes > 0 {
            let mut block = writer.block()?;
            let bytes = block.len().min(usize::try_from(left_bytes)?);
            // As a save does, which reads the block from somewhere and hashes it.
            for part in block[..bytes].chunks_mut(sample.len()) {
                part.copy_from_slice(&sample[..part.len()]);
            }
            block[..8].copy_from_slice(&left_bytes.to_le_bytes());
            if settings.hash {
                std::hint::black_box(blake3::hash(&block[..bytes]));
            }
            block.set_filled(bytes);
            writer.append(block)?;
            left_bytes -= bytes as u64;
        }
        Ok(writer.finish()?)
    })
}

fn read(medium: &DirMedium, settings: &Settings) -> Outcome<f64> {
    let objects = (0..settings.writers).map(|number| medium.open(&object(number)));
    let objects = objects.collect::<Result<Vec<_>, _>>()?;
    // All readers take the next piece in turn, as a restore does.
    let next = std::sync::atomic::AtomicU64::new(0);
    let pieces = settings.bytes_each / settings.read_bytes as u64;
    in_threads(settings.readers, |_| {
        let mut block = Block::new(settings.read_bytes);
        loop {
            let piece = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let Some(object) = objects.get(usize::try_from(piece / pieces)?) else { return Ok(()) };
            object.read_at(piece % pieces * settings.read_bytes as u64, &mut block)?;
            if settings.hash {
                std::hint::black_box(blake3::hash(&block));
            }
        }
    })
}

/// Seconds that fio takes for the same bytes in files of its own; they stay until [`main`] removes them.
fn fio(dir: &Path, kind: &str, settings: &Settings) -> Outcome<f64> {
    let output = Command::new("fio")
        .args(["--name=fio", "--direct=1", "--ioengine=io_uring", "--end_fsync=1", "--output-format=json"])
        .args(["--group_reporting", "--refill_buffers=0", &format!("--rw={kind}")])
        .arg(format!("--directory={}", dir.display()))
        .arg(format!("--size={}", settings.bytes_each))
        .arg(format!("--numjobs={}", settings.writers))
        .arg(format!("--bs={}", settings.block_bytes))
        .arg(format!("--iodepth={}", settings.blocks))
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let begin = text.find('{').ok_or("fio has said nothing")?;
    let report: serde_json::Value = serde_json::from_str(&text[begin..])?;
    let runtime_ms = report["jobs"][0][kind]["runtime"].as_f64().ok_or("fio has told no time")?;
    Ok(runtime_ms / 1000.0)
}

/// Seconds of the CPU that this process, with all its threads, has taken.
fn cpu_s() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

fn main() -> Outcome<()> {
    let mut arguments = std::env::args().skip(1);
    let parent = PathBuf::from(arguments.next().ok_or("which directory?")?);
    let mut chosen = HashMap::new();
    for argument in arguments {
        let (key, value) = argument.split_once('=').ok_or("key=value is wanted")?;
        chosen.insert(key.to_owned(), value.parse()?);
    }
    let settings = Settings::of(&chosen)?;
    let dir = tempfile::tempdir_in(parent)?;
    let medium = DirMedium::new(dir.path().join("ours")).with_io_features(settings.ways);
    let fio_dir = dir.path().join("fio");
    std::fs::create_dir(&fio_dir)?;
    let mut times: HashMap<&str, Vec<f64>> = HashMap::new();
    let (mut write_cpu_s, mut read_cpu_s) = (0.0, 0.0);
    for _ in 0..settings.rounds.max(1) {
        for number in 0..settings.writers {
            medium.remove(&object(number))?;
            let _ = std::fs::remove_file(fio_dir.join(format!("fio.{number}.0")));
        }
        times.entry("fio_write").or_default().push(fio(&fio_dir, "write", &settings)?);
        let begin = cpu_s();
        times.entry("write").or_default().push(write(&medium, &settings)?);
        write_cpu_s += cpu_s() - begin;
        times.entry("fio_read").or_default().push(fio(&fio_dir, "read", &settings)?);
        let begin = cpu_s();
        times.entry("read").or_default().push(read(&medium, &settings)?);
        read_cpu_s += cpu_s() - begin;
    }
    let bytes = settings.bytes_each as f64 * settings.writers as f64;
    let speed: HashMap<_, _> = times.into_iter().map(|(key, times)| (key, bytes / median(times))).collect();
    let gigabytes = bytes * settings.rounds.max(1) as f64 / 1e9;
    let report = serde_json::json!({
        "write_cpu_s_per_gb": write_cpu_s / gigabytes,
        "read_cpu_s_per_gb": read_cpu_s / gigabytes,
        "write_bytes_per_s": speed["write"] as u64,
        "fio_write_bytes_per_s": speed["fio_write"] as u64,
        "write_ratio_vs_fio": speed["write"] / speed["fio_write"],
        "read_bytes_per_s": speed["read"] as u64,
        "fio_read_bytes_per_s": speed["fio_read"] as u64,
        "read_ratio_vs_fio": speed["read"] / speed["fio_read"],
    });
    println!("{report}");
    Ok(())
}
