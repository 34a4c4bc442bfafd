//! The jobs of the demo, and the processes that they become.
//!
//! The built-in job is two processes, joined by pipes. The second has the memory and computes; the first logs its results.
//! Each result depends on the whole memory, so that a resume that restores anything wrong changes all that follow.

use anyhow::{Context, Result, ensure};
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

/// The first argument of the built-in job.
pub const ARGUMENT: &str = "__demo";
/// The first argument of its second process.
pub const WORKER_ARGUMENT: &str = "__demo-worker";

/// Steps of a job.
pub const STEPS: usize = 60;
/// After this step, the job waits until the file `end` exists: however slow the machine is, the job has not ended when it is
/// killed.
pub const WAIT_AFTER: usize = 40;

/// Memory of the built-in job, in words of 8 bytes.
const MEMORY_WORDS: usize = 2 << 20;
/// Pause after each step.
const STEP_PAUSE: Duration = Duration::from_millis(50);
const END_POLL_INTERVAL: Duration = Duration::from_millis(20);

const TRAINING: &str = include_str!("train.py");

/// What the job is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The built-in job.
    BuiltIn,
    /// A training with PyTorch.
    Training,
}

impl Kind {
    /// A training if there is a Python with PyTorch and `is_plain` is not set.
    pub fn choose(is_plain: bool) -> Self {
        let script = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)";
        let mut python = Command::new("python3");
        // Python looks for modules in the working directory, which may be another user's.
        python
            .current_dir("/")
            .args(["-c", script])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let has_torch = !is_plain && python.status().is_ok_and(|status| status.success());
        if has_torch { Self::Training } else { Self::BuiltIn }
    }

    /// What the demo calls it.
    pub fn description(self) -> &'static str {
        match self {
            Self::BuiltIn => "two processes joined by pipes, 16 MB of memory",
            Self::Training => "a small training with PyTorch",
        }
    }

    /// Its command, in its own directory, where it logs to `log.txt`.
    pub fn command(self, program: &Path, dir: &Path) -> Result<Vec<PathBuf>> {
        let mut command = match self {
            Self::BuiltIn => vec![program.to_owned(), ARGUMENT.into()],
            Self::Training => {
                let script = dir.join("train.py");
                fs::write(&script, TRAINING).with_context(|| format!("cannot write {}", script.display()))?;
                vec!["python3".into(), script]
            }
        };
        command.extend([
            "log.txt".into(),
            END.into(),
            STEPS.to_string().into(),
            WAIT_AFTER.to_string().into(),
        ]);
        Ok(command)
    }
}

/// The file for whose existence a job waits.
pub const END: &str = "end";

/// The whole life of the built-in job.
pub fn main() -> ! {
    let arguments: Vec<String> = std::env::args().skip(2).collect();
    exit(log_results(&arguments))
}

/// The whole life of its second process.
pub fn worker_main() -> ! {
    exit(compute())
}

fn exit(outcome: Result<()>) -> ! {
    match outcome {
        Ok(()) => std::process::exit(0),
        Err(error) => {
            eprintln!("the job of the demo: {error:#}");
            std::process::exit(1)
        }
    }
}

fn log_results(arguments: &[String]) -> Result<()> {
    let [log, end, steps, wait_after] = arguments else { anyhow::bail!("wrong arguments") };
    let (steps, wait_after): (usize, usize) = (steps.parse()?, wait_after.parse()?);
    let mut log = File::options().create(true).append(true).open(log)?;
    let mut worker = Command::new(std::env::current_exe()?)
        .arg(WORKER_ARGUMENT)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut questions = worker.stdin.take().context("no pipe")?;
    let mut answers = BufReader::new(worker.stdout.take().context("no pipe")?);
    for step in 1..=steps {
        writeln!(questions, "{step}")?;
        let mut answer = String::new();
        ensure!(answers.read_line(&mut answer)? > 0, "the second process has ended");
        log.write_all(format!("{step} {answer}").as_bytes())?;
        thread::sleep(STEP_PAUSE);
        while step == wait_after && !Path::new(end).exists() {
            thread::sleep(END_POLL_INTERVAL);
        }
    }
    drop(questions);
    ensure!(worker.wait()?.success(), "the second process has failed");
    Ok(())
}

fn compute() -> Result<()> {
    let mut memory: Vec<u64> = (0..MEMORY_WORDS as u64).collect();
    let mut state = 1;
    for question in io::stdin().lock().lines() {
        let step: u64 = question?.parse()?;
        state = next(&mut memory, state ^ step);
        println!("{state:016x}");
    }
    Ok(())
}

/// Changes every word, and returns what depends on all of them. The multiplier is that of Knuth's MMIX generator.
fn next(memory: &mut [u64], mut state: u64) -> u64 {
    for word in memory {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(*word).rotate_left(23);
        *word ^= state;
    }
    state
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_depend_on_the_whole_memory() {
        let run = |memory: &[u64]| next(&mut memory.to_vec(), 1);
        let memory = [7; 64];
        assert_eq!(run(&memory), run(&memory));
        for index in 0..memory.len() {
            let mut other = memory;
            other[index] ^= 1 << (index % 64);
            assert_ne!(run(&memory), run(&other), "word {index}");
        }
    }
}
