//! `ckpt-run status --watch`: the states of jobs on the whole terminal, kept up to date.

use super::jobs::{self, Status, headline, report};
use super::print;
use crate::cli::config::Config;
use crate::report::failure::in_one_line;
use crate::store::root::Root;
use crate::store::tiers;
use crate::sys::deadline::{KEY_POLL_INTERVAL, WATCH_INTERVAL, WATCH_INTERVAL_OBJECT_STORE};
use crate::sys::error::bad_input;
use anyhow::{Result, anyhow};
use ckpt_protocol::control::{Phase, Progress};
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::Line;
use ratatui::widgets::{Block, Gauge, Paragraph};
use ratatui::{DefaultTerminal, Frame};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The action of a key.
#[derive(Debug, PartialEq, Eq)]
enum KeyAction {
    Quit,
    Up,
    Down,
    Nothing,
}

/// Shows jobs until `q` is pressed.
///
/// # Errors
/// Bad input: no terminal, no store, no such job.
pub fn watch(config: &Config, named: Option<&str>) -> Result<i32> {
    if !rustix::termios::isatty(rustix::stdio::stdout()) || !rustix::termios::isatty(rustix::stdio::stdin()) {
        return Err(bad_input(anyhow!(
            "status --watch needs a terminal: run it in one, or use `ckpt-run status --json`"
        )));
    }
    // An error at the start is printed before the terminal is taken over.
    let jobs = read(config, named)?;
    // After a signal too, the terminal must be restored.
    let ended = Arc::new(AtomicBool::new(false));
    for signal in signal_hook::consts::TERM_SIGNALS {
        signal_hook::flag::register(*signal, Arc::clone(&ended))?;
    }
    let every = if config.store.url.is_some() { WATCH_INTERVAL_OBJECT_STORE } else { WATCH_INTERVAL };
    let mut terminal = ratatui::try_init()?;
    let result = show(&mut terminal, jobs, every, &|| read(config, named), &ended);
    ratatui::restore();
    result.map(|()| 0)
}

/// Counts the snapshots of the local tiers only: the object store that they are uploaded to is not polled.
fn read(config: &Config, named: Option<&str>) -> Result<Vec<Status>> {
    jobs::read(config, &Root::open(&config.store)?, named, tiers::list_local)
}

fn show(
    terminal: &mut DefaultTerminal,
    mut jobs: Vec<Status>,
    every: Duration,
    read: &dyn Fn() -> Result<Vec<Status>>,
    ended: &AtomicBool,
) -> Result<()> {
    let (mut first, mut problem, mut next) = (0, None, Instant::now() + every);
    while !ended.load(Ordering::Relaxed) {
        if Instant::now() >= next {
            match read() {
                Ok(now) => (jobs, problem) = (now, None),
                Err(error) => problem = Some(in_one_line(&error)),
            }
            next = Instant::now() + every;
        }
        terminal.draw(|frame| draw(frame, &jobs, first, problem.as_deref()))?;
        let wait = next.saturating_duration_since(Instant::now()).min(KEY_POLL_INTERVAL);
        if !event::poll(wait)? {
            continue;
        }
        match key_action(&event::read()?) {
            KeyAction::Quit => return Ok(()),
            KeyAction::Up => first = first.saturating_sub(1),
            KeyAction::Down => first = (first + 1).min(jobs.len().saturating_sub(1)),
            KeyAction::Nothing => {}
        }
    }
    Ok(())
}

fn key_action(event: &Event) -> KeyAction {
    let Event::Key(KeyEvent { code, modifiers, kind: KeyEventKind::Press, .. }) = event else {
        return KeyAction::Nothing;
    };
    match code {
        KeyCode::Char('c') if modifiers.contains(KeyModifiers::CONTROL) => KeyAction::Quit,
        KeyCode::Char('q') | KeyCode::Esc => KeyAction::Quit,
        KeyCode::Up | KeyCode::Char('k') => KeyAction::Up,
        KeyCode::Down | KeyCode::Char('j') => KeyAction::Down,
        _ => KeyAction::Nothing,
    }
}

/// Draws the jobs from number `first` on, as many as fit.
fn draw(frame: &mut Frame<'_>, jobs: &[Status], first: usize, problem: Option<&str>) {
    let [head, body, foot] =
        Layout::vertical([Constraint::Length(1), Constraint::Min(0), Constraint::Length(1)])
            .areas(frame.area());
    let running = jobs.iter().filter(|job| job.running).count();
    let title = match jobs.len() {
        0 => "ckpt-run: no job yet".to_owned(),
        all => format!("ckpt-run: {}, {running} running", print::count(all as u64, "job")),
    };
    frame.render_widget(Line::from(title).bold(), head);
    let mut rest = body;
    for job in jobs.iter().skip(first) {
        if rest.height == 0 {
            break;
        }
        rest = draw_job(frame, rest, job);
    }
    let footer = match problem {
        Some(problem) => Line::from(format!("not up to date: {problem}")).red(),
        None => Line::from("q quits, up and down scroll").dim(),
    };
    frame.render_widget(footer, foot);
}

/// Draws one job at the top of `area`; returns the rest of the area.
fn draw_job(frame: &mut Frame<'_>, area: Rect, job: &Status) -> Rect {
    let lines = wrapped(&report(job).join("\n"), area.width.saturating_sub(2));
    let progress = job.launcher.as_ref().map(|launcher| launcher.progress);
    let storing = progress.filter(|progress| progress.phase == Phase::Persist && progress.total_bytes > 0);
    let color = match job.launcher.as_ref() {
        Some(launcher) if launcher.last_failure.is_some() || launcher.restart_s.is_some() => Color::Yellow,
        Some(_) => Color::Green,
        None => Color::DarkGray,
    };
    let title = format!(" {} ", headline(job));
    let block = Block::bordered().title(title).border_style(Style::new().fg(color));
    let gauge_height = u16::from(storing.is_some());
    let wanted = u16::try_from(lines.len()).unwrap_or(u16::MAX).saturating_add(2 + gauge_height);
    let [mine, rest] = Layout::vertical([Constraint::Length(wanted), Constraint::Min(0)]).areas(area);
    let [facts, bar] =
        Layout::vertical([Constraint::Min(0), Constraint::Length(gauge_height)]).areas(block.inner(mine));
    frame.render_widget(block, mine);
    frame.render_widget(Paragraph::new(lines), facts);
    if let Some(progress) = storing {
        frame.render_widget(gauge(progress), bar);
    }
    rest
}

/// Lines of at most `width` characters, so that long ones can be read to their end.
fn wrapped(text: &str, width: u16) -> Vec<Line<'static>> {
    let width = usize::from(width.max(1));
    let cut = |line: &str| {
        let line: Vec<char> = line.chars().collect();
        line.chunks(width).map(|part| Line::from(part.iter().collect::<String>())).collect::<Vec<_>>()
    };
    text.lines().flat_map(cut).collect()
}

fn gauge(progress: Progress) -> Gauge<'static> {
    let ratio = (progress.done_bytes as f64 / progress.total_bytes as f64).clamp(0.0, 1.0);
    let label =
        format!("storing {} of {}", print::bytes(progress.done_bytes), print::bytes(progress.total_bytes));
    Gauge::default().ratio(ratio).label(label).gauge_style(Color::Cyan)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::jobs::Ending;
    use crate::job::times::Class;
    use ckpt_protocol::control::JobStatus;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use std::collections::BTreeMap;

    fn drawn(jobs: &[Status], first: usize, problem: Option<&str>, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(80, height)).unwrap();
        terminal.draw(|frame| draw(frame, jobs, first, problem)).unwrap();
        terminal.backend().to_string()
    }

    fn running(progress: Progress) -> Status {
        let launcher = JobStatus { launcher_pid: 77, saved: 3, failed: 1, progress, ..JobStatus::default() };
        let outcome = Ending::Unfinished;
        Status {
            job: "train".into(),
            running: true,
            outcome,
            snapshots: 5,
            can_be_resumed: true,
            time_ms: [(Class::Productive, 90_000), (Class::Stall, 7000), (Class::Redone, 3000)].into(),
            launcher: Some(launcher),
            waiting: None,
            error: None,
            is_remote: false,
        }
    }

    fn complete(job: &str) -> Status {
        let outcome = Ending::Complete;
        let time_ms = BTreeMap::new();
        Status {
            job: job.into(),
            running: false,
            outcome,
            snapshots: 2,
            can_be_resumed: true,
            time_ms,
            launcher: None,
            waiting: None,
            error: None,
            is_remote: false,
        }
    }

    #[test]
    fn jobs_are_shown_with_the_reports_of_their_launchers() {
        let storing = Progress { phase: Phase::Persist, done_bytes: 250_000_000, total_bytes: 1_000_000_000 };
        let shown = drawn(&[running(storing), complete("other")], 0, None, 24);
        for wanted in [
            "ckpt-run: 2 jobs, 1 running",
            "train: running, 5 snapshots",
            "launcher         process 77",
            "snapshots        3 saved, 1 failed",
            "time             90.0 % productive of 1m 40s; stall 7.0 %, redone 3.0 %",
            "storing 250.0 MB of 1.00 GB",
            "other: complete, 2 snapshots",
            "q quits",
        ] {
            assert!(shown.contains(wanted), "{wanted} is not in:\n{shown}");
        }
        // The bar is drawn in the cells left of its label, a quarter of the width at least in part.
        let bar = shown.lines().find(|line| line.contains("storing 250.0 MB of")).unwrap();
        assert!(bar.matches('█').count() >= 15, "{bar}");
    }

    #[test]
    fn without_jobs_and_with_a_problem_it_says_so() {
        let shown = drawn(&[], 0, Some("cannot read the store"), 5);
        assert!(shown.contains("no job yet") && shown.contains("not up to date: cannot read"), "{shown}");
        let mut waiting = running(Progress::default());
        waiting.launcher.as_mut().unwrap().restart_s = Some(4.0);
        waiting.launcher.as_mut().unwrap().last_job_failure = Some("killed by SIGKILL".to_owned());
        waiting.launcher.as_mut().unwrap().last_failure = Some(format!("{} to the end", "long ".repeat(20)));
        let shown = drawn(&[waiting], 0, None, 20);
        assert!(shown.contains("to the end"), "{shown}");
        assert!(shown.contains("waiting for its restart") && shown.contains("killed by SIGKILL"), "{shown}");
    }

    /// More jobs than lines: the scrolled ones are not drawn, and nothing panics without any room.
    #[test]
    fn it_scrolls_and_small_terminals_are_enough() {
        let jobs: Vec<_> = (0..9).map(|number| complete(&format!("job{number}"))).collect();
        let shown = drawn(&jobs, 4, None, 8);
        assert!(!shown.contains("job3") && shown.contains("job4") && !shown.contains("job8"), "{shown}");
        for height in 1..6 {
            drawn(&jobs, 0, Some("x"), height);
        }
    }

    #[test]
    fn keys_match_the_footer() {
        let key = |code, modifiers| Event::Key(KeyEvent::new(code, modifiers));
        let none = KeyModifiers::NONE;
        assert_eq!(key_action(&key(KeyCode::Char('q'), none)), KeyAction::Quit);
        assert_eq!(key_action(&key(KeyCode::Char('c'), KeyModifiers::CONTROL)), KeyAction::Quit);
        assert_eq!(key_action(&key(KeyCode::Char('c'), none)), KeyAction::Nothing);
        assert_eq!(key_action(&key(KeyCode::Down, none)), KeyAction::Down);
        assert_eq!(key_action(&key(KeyCode::Up, none)), KeyAction::Up);
        assert_eq!(key_action(&Event::FocusGained), KeyAction::Nothing);
    }
}
