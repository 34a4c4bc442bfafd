//! What came of the checks, for people and as JSON.

use serde::{Deserialize, Serialize};

/// What came of one check.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "outcome", content = "text")]
pub enum Outcome {
    /// As documented.
    Pass,
    /// What was expected, and what came.
    Fail(String),
    /// What is lacking.
    Skipped(String),
    /// The answer to a question.
    Answer(String),
}

/// One check and what came of it.
#[derive(Debug, Serialize)]
pub struct Line {
    /// The check's name.
    pub name: &'static str,
    /// What it shows.
    pub shows: &'static str,
    /// What came of it.
    #[serde(flatten)]
    pub outcome: Outcome,
    /// How long its process ran.
    pub duration_ms: u64,
}

impl Line {
    /// One line for people.
    pub fn text(&self) -> String {
        let (word, text) = match &self.outcome {
            Outcome::Pass => ("pass", ""),
            Outcome::Fail(text) => ("FAIL", text.as_str()),
            Outcome::Skipped(text) => ("skip", text.as_str()),
            Outcome::Answer(text) => ("answer", text.as_str()),
        };
        format!("{word:<6} {:<44} {}", self.name, text.replace('\n', " | ")).trim_end().to_owned()
    }
}

/// All outcomes of one driver.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The library.
    pub library: String,
    /// What cuDriverGetVersion says.
    pub driver_version: i32,
    /// Name of device 0.
    pub device: String,
    /// In the order of the list.
    pub checks: Vec<Line>,
}

impl Report {
    /// How many checks failed.
    pub fn failed(&self) -> usize {
        self.count(|outcome| matches!(outcome, Outcome::Fail(_)))
    }

    fn count(&self, which: impl Fn(&Outcome) -> bool) -> usize {
        self.checks.iter().filter(|line| which(&line.outcome)).count()
    }

    /// The last lines for people.
    pub fn print_summary(&self) {
        println!(
            "\n{} on {} (driver API {}): {} passed, {} failed, {} answers, {} skipped",
            self.library,
            self.device,
            self.driver_version,
            self.count(|outcome| *outcome == Outcome::Pass),
            self.failed(),
            self.count(|outcome| matches!(outcome, Outcome::Answer(_))),
            self.count(|outcome| matches!(outcome, Outcome::Skipped(_))),
        );
    }
}
