//! What xtask prints.

use std::time::{Duration, Instant};

/// Prints lines that begin with the time since it was made.
pub struct Clock(Instant);

impl Clock {
    /// Starts at zero.
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Prints one line.
    pub fn say(&self, line: &str) {
        println!("[{:6.1} s] {line}", self.0.elapsed().as_secs_f64());
    }
}

/// A short duration for people: `7 ms`, `3.2 s`, `2 min 5 s`.
pub fn duration(duration: Duration) -> String {
    match duration.as_secs() {
        0 => format!("{} ms", duration.as_millis()),
        1..100 => format!("{:.1} s", duration.as_secs_f64()),
        secs => format!("{} min {} s", secs / 60, secs % 60),
    }
}

/// The last lines of a text, indented, to be shown below an error.
pub fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let shown = &all[all.len().saturating_sub(lines)..];
    shown.iter().map(|line| format!("    {line}\n")).collect()
}
