//! The losses that the example job logs, and two runs of it side by side.

use std::fmt::Write;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, Result};

/// What happened to the broken run, each as the number of steps that were logged then.
pub struct Marks {
    /// When the checkpoint was asked for.
    pub asked_after: usize,
    /// When the snapshot was durable.
    pub durable_after: usize,
    /// When everything was killed.
    pub killed_after: usize,
    /// What the resumed job found done: its state at the snapshot.
    pub resumed_after: usize,
}

/// The complete lines of a log of losses. A log that is not there yet has none, and a line that is being written is
/// none yet.
pub fn read(path: &Path) -> Result<Vec<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(text
            .split_inclusive('\n')
            .filter_map(|line| line.strip_suffix('\n'))
            .map(str::to_owned)
            .collect()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| format!("reading {}", path.display())),
    }
}

/// Two runs, line by line: a missing, double or out-of-place line makes all that follow differ.
pub struct Comparison<'a> {
    unbroken: &'a [String],
    broken: &'a [String],
}

impl<'a> Comparison<'a> {
    /// Of two logs.
    pub fn new(unbroken: &'a [String], broken: &'a [String]) -> Self {
        Self { unbroken, broken }
    }

    /// Whether both have the same lines, and any at all.
    pub fn is_identical(&self) -> bool {
        !self.unbroken.is_empty() && self.unbroken == self.broken
    }

    fn lines(&self) -> usize {
        self.unbroken.len().max(self.broken.len())
    }

    fn differing(&self) -> usize {
        (0..self.lines()).filter(|&i| self.unbroken.get(i) != self.broken.get(i)).count()
    }

    /// One word, or what differs.
    pub fn verdict(&self) -> String {
        if self.is_identical() {
            return format!("identical: all {} steps, bit for bit", self.lines());
        }
        format!(
            "NOT identical: {} of {} lines differ (unbroken run {} lines, broken and resumed run {})",
            self.differing(),
            self.lines(),
            self.unbroken.len(),
            self.broken.len()
        )
    }

    /// Both sequences side by side, with what happened.
    pub fn table(&self, marks: &Marks) -> String {
        let mut table = format!("{:>5}  {:<22} killed and resumed\n", "step", "unbroken");
        for index in 0..self.lines() {
            let (left, right) = (self.unbroken.get(index), self.broken.get(index));
            let loss = |line: Option<&String>| match line.map(|line| line.split_once(' ')) {
                Some(Some((_, loss))) => loss.to_owned(),
                Some(None) => "unreadable".to_owned(),
                None => "missing".to_owned(),
            };
            let step = left.or(right).and_then(|line| line.split(' ').next()).unwrap_or_default();
            let sign = if left == right { "=" } else { "DIFFERS" };
            let note = marks.note(index + 1);
            let line = format!("{step:>5}  {:<22} {:<22} {sign}{note}", loss(left), loss(right));
            let _ = writeln!(table, "{}", line.trim_end());
        }
        table
    }
}

impl Marks {
    fn note(&self, step: usize) -> String {
        if step == self.resumed_after {
            "   snapshot: from here it went on".to_owned()
        } else if step == self.killed_after {
            format!("   killed: steps {} to {step} were done again", self.resumed_after + 1)
        } else {
            String::new()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(lines: &[&str]) -> Vec<String> {
        lines.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_double_line_is_a_difference() {
        let unbroken = log(&["1 a", "2 b", "3 c"]);
        let broken = log(&["1 a", "2 b", "2 b", "3 c"]);
        let comparison = Comparison::new(&unbroken, &broken);
        assert!(!comparison.is_identical());
        assert_eq!(comparison.differing(), 2);
        assert!(comparison.verdict().starts_with("NOT identical: 2 of 4"));
    }

    #[test]
    fn nothing_at_all_is_not_identical() {
        assert!(!Comparison::new(&[], &[]).is_identical());
    }

    #[test]
    fn marks_stand_at_their_steps() {
        let lines = log(&["1 a", "2 b", "3 c", "4 d"]);
        let marks = Marks { asked_after: 1, durable_after: 2, killed_after: 3, resumed_after: 1 };
        let table = Comparison::new(&lines, &lines).table(&marks);
        let notes: Vec<_> =
            table.lines().skip(1).map(|line| line.split('=').nth(1).unwrap().trim()).collect();
        assert_eq!(notes, ["snapshot: from here it went on", "", "killed: steps 2 to 3 were done again", ""]);
    }

    #[test]
    fn a_line_being_written_does_not_count() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("losses.txt");
        assert!(read(&path).unwrap().is_empty());
        fs::write(&path, "1 0x1p-1\n2 0x1.").unwrap();
        assert_eq!(read(&path).unwrap(), ["1 0x1p-1"]);
    }
}
