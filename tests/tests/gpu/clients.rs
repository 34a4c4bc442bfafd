//! Clients of the CUDA driver on simcuda, unchanged: C that links it, Rust by cudarc, Python.

use ckpt_run_tests::gpu::{Gpu, built, cuda_program, cuda_python, example, succeed};
use std::process::Command;

use crate::gpu_job::library;

#[test]
fn legacy_job() {
    let gpu = Gpu::new();
    let directory = tempfile::tempdir().expect("a directory");
    let program = gpu.compile(&example("legacy-job/legacy-job.c"), directory.path());
    let (rounds, cells) = (30, 300);
    let mut command = gpu.command(program);
    command.args([rounds.to_string(), cells.to_string()]).env("SIMCUDA_JITTER", "1");
    assert_eq!(succeed(command), growth(rounds, cells));
}

#[test]
fn train_mlp_learns_and_repeats_itself_bit_for_bit() {
    let train = |jitter: &str| {
        let gpu = Gpu::new();
        let mut command = gpu.command(built("train-mlp"));
        command.args(["--steps", "60"]).env("SIMCUDA_JITTER", jitter);
        succeed(command)
    };
    let losses = train("1");
    assert_eq!(losses, train("2"));
    let loss = |line: &str| line.split(' ').nth(3).expect("a loss").parse::<f64>().expect("a number");
    let losses: Vec<f64> = losses.lines().map(loss).collect();
    assert_eq!(losses.len(), 60);
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    assert!(mean(&losses[50..]) < 0.8 * mean(&losses[..10]), "{losses:?}");
}

/// The ranks of one machine, each with a device of its own, and several on one device.
#[test]
fn train_mlp_with_several_ranks_repeats_itself_bit_for_bit() {
    let train = |ranks: &str, devices: &str, variables: &[(&str, &str)]| {
        let gpu = Gpu::new();
        let mut command = gpu.command(built("train-mlp"));
        command.args(["--steps", "20", "--ranks", ranks]).env("SIMCUDA_DEVICES", devices);
        command.envs(variables.iter().copied());
        succeed(command)
    };
    let losses = train("2", "2", &[]);
    assert_eq!(losses.lines().count(), 20, "{losses}");
    let sockets = [("NCCL_P2P_DISABLE", "1"), ("NCCL_SHM_DISABLE", "1"), ("NCCL_NVLS_ENABLE", "0")];
    assert_eq!(train("2", "2", &sockets), losses);
    assert_eq!(train("2", "1", &[("NCCL_MULTI_RANK_GPU_ENABLE", "1")]), losses);
    assert_ne!(train("4", "4", &[]), losses, "other batches");
}

/// Communicators, streams, groups and captured collectives at the same time: the same results whatever the ranks share.
#[test]
fn ranks_repeat_themselves_over_everything_that_they_may_share() {
    let gpu = Gpu::new();
    let directory = tempfile::tempdir().expect("a directory");
    let program = gpu.compile_with_nccl(&cuda_program("ranks.c"), directory.path());
    let run = |variables: &[(&str, &str)]| {
        let gpu = Gpu::new();
        let mut command = gpu.command(&program);
        command.args(["12", "4"]).env("SIMCUDA_DEVICES", "4").env("SIMCUDA_JITTER", "1");
        command.envs(variables.iter().copied());
        succeed(command)
    };
    let lines = run(&[]);
    assert_eq!(lines.lines().count(), 12, "{lines}");
    assert_eq!(
        run(&[("NCCL_P2P_DISABLE", "1"), ("NCCL_SHM_DISABLE", "1"), ("NCCL_NVLS_ENABLE", "0")]),
        lines
    );
    assert_eq!(run(&[("NCCL_CUMEM_ENABLE", "0"), ("NCCL_NVLS_ENABLE", "0")]), lines);
    assert_eq!(run(&[("NCCL_P2P_DISABLE", "1")]), lines);
}

#[test]
fn cuda_bindings() {
    let output = succeed(Gpu::new().python("bindings_kernels.py"));
    assert_eq!(output.lines().filter(|line| line.ends_with(" ok")).count(), 5, "{output}");
}

#[test]
fn nvml_and_the_driver_tell_the_same_memory() {
    let gpu = Gpu::new();
    let mut command = gpu.python("nvml_memory.py");
    command.env("SIMCUDA_CONTEXT_MEMORY", "4MiB").env("SIMCUDA_MEMORY", "64MiB");
    let output = succeed(command);
    assert!(output.contains(&format!("before {} {}\n", 60 << 20, 4 << 20)), "{output}");
}

/// The interposer is in front of all that a monitor of today can call.
#[test]
fn the_interposer_has_all_functions_of_nvml() {
    let mut command = Command::new(cuda_python());
    command.arg(cuda_program("nvml_names.py")).arg(library());
    let output = succeed(command);
    let (count, missing) = output.split_once(" names\n").expect("a number");
    assert!(count.parse::<u32>().unwrap() > 300 && missing.is_empty(), "{output}");
}

#[test]
fn numba_cuda() {
    let output = succeed(Gpu::new().python("numba_kernels.py"));
    assert_eq!(output.lines().filter(|line| line.ends_with(" ok")).count(), 6, "{output}");
}

#[test]
fn cudarc() {
    let output = succeed(Gpu::new().command(built("cudarc-client")));
    assert_eq!(output, "ok\n");
}

/// What legacy-job prints, computed without a GPU.
fn growth(rounds: u32, cells: usize) -> String {
    let mut random = Random(88_172_645_463_325_252);
    let mut life: Vec<Vec<u32>> = (0..cells).map(|_| birth(&mut random)).collect();
    let mut output = String::new();
    for round in 1..=rounds {
        for _ in 0..=cells / 10 {
            let cell = random.below(cells);
            let neighbour = random.below(cells);
            let salt = random.next() as u32;
            if cell != neighbour {
                let other = life[neighbour].clone();
                for (i, word) in (0u32..).zip(&mut life[cell]) {
                    let added = other[i as usize % other.len()].wrapping_add(salt ^ i);
                    *word = word.wrapping_mul(1_664_525).wrapping_add(added);
                }
            }
        }
        for _ in 0..=cells / 50 {
            let cell = random.below(cells);
            life[cell] = birth(&mut random);
        }
        if round % 10 == 0 || round == rounds {
            let words = life.iter().flatten();
            let sum = words.fold(14_695_981_039_346_656_037, |sum: u64, word| {
                (sum ^ u64::from(*word)).wrapping_mul(1_099_511_628_211)
            });
            output += &format!("round {round} checksum {sum:016x}\n");
        }
    }
    output
}

fn birth(random: &mut Random) -> Vec<u32> {
    let scale = random.next() % 12;
    let count = 1 + (random.next() % (4 << scale)) as usize;
    if random.next().is_multiple_of(2) {
        (0..count).map(|_| random.next() as u32).collect()
    } else {
        vec![random.next() as u32; count]
    }
}

/// xorshift64: the generator of legacy-job, whose output is predicted here.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}
