//! Tests that fail, told once more when all have run: a log is long, and often only its end is kept.

use std::io::BufRead;

/// Limits of the report: lines of output for each failed test, their length, and the number of tests that have any.
const LINES: usize = 24;
const LINE_CHARS: usize = 800;
const TOLD: usize = 3;

/// What the test programs of one `cargo test` have reported on their standard output.
#[derive(Default)]
pub struct Failures {
    failed: Vec<Failure>,
    /// Programs that ended before they printed their result: the tests that were said to run long, or the last line.
    ended: Vec<String>,
    /// Whether the lines belong to the output of the last failed test.
    in_output: bool,
    /// The last line of a program that has not printed its result.
    running: Option<String>,
    /// Its tests that have run for a minute, and have not ended.
    slow: Vec<String>,
}

struct Failure {
    test: String,
    output: Vec<String>,
}

impl Failures {
    /// Prints the lines as they come, and keeps what they say of failures.
    pub fn read(mut lines: impl BufRead) -> std::io::Result<Self> {
        let mut failures = Self::default();
        let mut line = Vec::new();
        while lines.read_until(b'\n', &mut line)? > 0 {
            let text = String::from_utf8_lossy(&line);
            print!("{text}");
            failures.line(text.trim_end());
            line.clear();
        }
        failures.end_program(None);
        Ok(failures)
    }

    fn line(&mut self, line: &str) {
        let starts = line.starts_with("running ") && (line.ends_with(" tests") || line.ends_with(" test"));
        if starts && !self.in_output {
            self.end_program(Some(line.to_owned()));
        } else if line.starts_with("test result: ") {
            self.running = None;
            self.in_output = false;
        } else if let Some(test) =
            line.strip_prefix("---- ").and_then(|line| line.strip_suffix(" stdout ----"))
        {
            self.failed.push(Failure { test: test.to_owned(), output: Vec::new() });
            self.in_output = true;
        } else if line == "failures:" {
            self.in_output = false;
        } else if self.in_output {
            self.failed.last_mut().expect("a test whose output this is").output.push(line.to_owned());
        } else if let Some(running) = &mut self.running
            && !line.is_empty()
        {
            line.clone_into(running);
            let test = |line: &str, end| Some(line.strip_prefix("test ")?.split_once(end)?.0.to_owned());
            if let Some(slow) = test(line, " has been running for over ") {
                self.slow.push(slow);
            } else if let Some(done) = test(line, " ... ") {
                self.slow.retain(|slow| *slow != done);
            }
        }
    }

    /// A program has begun, or the last one has ended; the one before should have printed its result.
    fn end_program(&mut self, next: Option<String>) {
        let slow = std::mem::take(&mut self.slow);
        if let Some(last_line) = std::mem::replace(&mut self.running, next) {
            self.ended.push(match slow.is_empty() {
                true => format!("after `{last_line}`"),
                false => format!("in {}", slow.join(", ")),
            });
        }
    }

    /// One paragraph for each failed test: its name, and its output from the panic or the error on, without the
    /// backtrace: a shortened log has to have what was said before it.
    pub fn report(&self) -> String {
        let mut report = String::new();
        for (index, Failure { test, output }) in self.failed.iter().enumerate() {
            report += &format!("test: {test} FAILED\n");
            if index < TOLD {
                let is_reason = |line: &String| line.contains("panicked at") || line.starts_with("Error: ");
                let reason = output.iter().position(is_reason).unwrap_or(0);
                let said = output[reason..].iter().take_while(|line| line.trim() != "stack backtrace:");
                for line in said.filter(|line| !line.is_empty()).take(LINES) {
                    report.extend("    ".chars().chain(line.chars().take(LINE_CHARS)).chain(['\n']));
                }
            }
        }
        for place in &self.ended {
            report += &format!("test: a program has ended without a result, which FAILS, {place}\n");
        }
        report
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_tests_are_told_from_their_panic_or_error_on() {
        let output = "running 2 tests\ntest a ... ok\ntest b::c ... FAILED\n\nfailures:\n\n---- b::c stdout ----\n\
                      a line before\n\nthread 'b::c' panicked at x.rs:1:2:\nleft: 1\nstack backtrace:\n  0: c\n\n\
                      ---- d stdout ----\na line before\nError: \"e\"\n\n\nfailures:\n    b::c\n    d\n\n\
                      test result: FAILED. 1 passed; 1 failed\n\nrunning 1 test\ntest d ... ok\n\n\
                      test result: ok. 1 passed\n";
        let report = Failures::read(output.as_bytes()).unwrap().report();
        let of_panic = "test: b::c FAILED\n    thread 'b::c' panicked at x.rs:1:2:\n    left: 1\n";
        assert_eq!(report, format!("{of_panic}test: d FAILED\n    Error: \"e\"\n"));
    }

    #[test]
    fn programs_that_were_ended_are_told() {
        let output = "running 2 tests\ntest a ... ok\n\nrunning 1 test\n\ntest result: ok. 1 passed\n\n\
                      running 3 tests\ntest d has been running for over 60 seconds\n\
                      test e has been running for over 60 seconds\ntest d ... ok\n";
        let report = Failures::read(output.as_bytes()).unwrap().report();
        let told = |place| format!("test: a program has ended without a result, which FAILS, {place}\n");
        assert_eq!(report, told("after `test a ... ok`") + &told("in e"));
        let passed = "running 1 test\ntest a ... ok\n\ntest result: ok. 1 passed\n";
        assert_eq!(Failures::read(passed.as_bytes()).unwrap().report(), "");
    }
}
