//! The report as one web page without scripts, which needs nothing else: style and charts are in it.

mod costs;

use super::{Report, kept, meaning, percent, span};
use crate::commands::print;
use crate::job::times::{Class, LateRank, Segment, Session, SessionEnding, Snapshot, Times};
use crate::sys::letters;
use std::fmt::{Display, Write};

const STYLE: &str = include_str!("style.css");
/// A browser loads and runs nothing, whatever a name contains.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'";
/// The width of charts, in columns; longer lists are combined.
const COLUMNS: usize = 400;
/// The number of rows of a table.
const ROWS: usize = 500;

/// Text between tags or in a quoted attribute.
struct Escaped<'a>(&'a str);

impl Display for Escaped<'_> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.chars().try_for_each(|char| match char {
            '&' => out.write_str("&amp;"),
            '<' => out.write_str("&lt;"),
            '>' => out.write_str("&gt;"),
            '"' => out.write_str("&quot;"),
            '\'' => out.write_str("&#39;"),
            // A script in a command has lines.
            '\n' | '\t' => out.write_char(' '),
            char if letters::is_control(char) => out.write_char('\u{fffd}'),
            char => out.write_char(char),
        })
    }
}

/// The page.
pub fn page(report: &Report) -> String {
    let (job, times) = (Escaped(&report.job), &report.times);
    let sections = [
        overview(report),
        classes(report),
        snapshots(times),
        costs::memory(report.memory.as_ref()),
        sessions(times),
        late_ranks(times),
        notes(report),
    ];
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta http-equiv=\"Content-Security-Policy\" content=\"{POLICY}\">\n<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{job}: ckpt-run report</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{job}</h1>\n{}</main>\n</body>\n</html>\n",
        sections.concat()
    )
}

fn overview(report: &Report) -> String {
    let times = &report.times;
    let (begun, ended) = (print::time(times.begun_unix_ms), print::time(times.ended_unix_ms));
    let until = if report.is_running { format!("running, as of {ended}") } else { format!("until {ended}") };
    let headline = report.effective_ratio.map_or("-".to_owned(), percent);
    let facts = [
        ("Whole time", span(report.whole_ms)),
        ("Repetition avoided", span(times.kept_ms)),
        ("Done again", span(times.of(Class::Redone))),
        ("Stall", span(times.of(Class::Stall))),
        ("In no snapshot yet", span(times.unsaved_ms)),
    ];
    let facts: String =
        facts.iter().map(|(name, value)| format!("<div><dt>{name}</dt><dd>{value}</dd></div>")).collect();
    let used = Class::ALL.into_iter().filter(|class| times.of(*class) > 0);
    let legend: String =
        used.map(|class| format!("<li><span class=\"swatch {0}\"></span>{0}</li>", class.name())).collect();
    format!(
        "<p><code>{}</code></p>\n<p class=\"soft\">since {begun}, {until}</p>\n<section>\n<p class=\"soft\">Effective training time</p>\n<p class=\"headline\">{headline}</p>\n<figure>{}{}<ul class=\"legend\">{legend}</ul></figure>\n<dl>{facts}</dl>\n</section>\n",
        Escaped(&times.command),
        timeline(times),
        axis(times)
    )
}

/// The time below a chart.
fn axis(times: &Times) -> String {
    let middle_ms = times.begun_unix_ms + times.whole_ms() / 2;
    let at = [times.begun_unix_ms, middle_ms, times.ended_unix_ms].map(print::time);
    format!("<div class=\"axis\"><span>{}</span><span>{}</span><span>{}</span></div>", at[0], at[1], at[2])
}

/// One column per equal part of the time. A column shows the share of each class in it, so short stretches are seen too.
fn timeline(times: &Times) -> String {
    let whole_ms = times.whole_ms().max(1) as f64;
    let column_of = |at_ms: u64| (at_ms - times.begun_unix_ms) as f64 / whole_ms * COLUMNS as f64;
    let mut rects = String::new();
    // The first column that is not drawn yet.
    let mut drawn = 0;
    let mut shares = [0.0; Class::ALL.len()];
    for Segment { class, begun_unix_ms, ended_unix_ms } in &times.timeline {
        let (mut from, to) = (column_of(*begun_unix_ms), column_of(*ended_unix_ms));
        let index = Class::ALL.iter().position(|one| one == class).unwrap_or(0);
        while to >= (drawn + 1) as f64 {
            let is_whole = from <= drawn as f64;
            if is_whole {
                // As many as the class fills.
                let count = to.floor() as usize - drawn;
                rect(&mut rects, *class, drawn as f64, count as f64, 0.0, 1.0);
                drawn += count;
            } else {
                shares[index] += (drawn + 1) as f64 - from;
                column(&mut rects, drawn, &std::mem::take(&mut shares));
                drawn += 1;
            }
            from = drawn as f64;
        }
        shares[index] += (to - from).max(0.0);
    }
    if shares.iter().sum::<f64>() > 0.0 && drawn < COLUMNS {
        column(&mut rects, drawn, &shares);
    }
    format!(
        "<svg class=\"timeline\" role=\"img\" aria-label=\"What the time of the job went into\" viewBox=\"0 0 {COLUMNS} 1\" preserveAspectRatio=\"none\">{rects}</svg>"
    )
}

/// The first class is at the bottom.
fn column(rects: &mut String, at: usize, shares: &[f64; Class::ALL.len()]) {
    let all: f64 = shares.iter().sum();
    let mut below = 1.0;
    for (class, share) in Class::ALL.into_iter().zip(shares).filter(|(_, share)| **share > 0.0) {
        let height = share / all;
        below -= height;
        rect(rects, class, at as f64, 1.0, below.max(0.0), height);
    }
}

fn rect(rects: &mut String, class: Class, x: f64, width: f64, y: f64, height: f64) {
    let name = class.name();
    // A little wider, so that the page does not shine through between columns.
    let width = width + 0.05;
    let _ = write!(
        rects,
        "<rect class=\"{name}\" x=\"{x:.2}\" y=\"{y:.3}\" width=\"{width:.2}\" height=\"{height:.3}\"><title>{name}</title></rect>"
    );
}

fn classes(report: &Report) -> String {
    let row = |class: Class| {
        let ms = report.times.of(class);
        let share = ms as f64 / report.whole_ms.max(1) as f64;
        let name = class.name();
        let bar = if ms == 0 {
            String::new()
        } else {
            format!("<span class=\"{name}\" style=\"width:{:.2}%\"></span>", share * 100.0)
        };
        format!(
            "<tr><td class=\"time\"><span class=\"swatch {name}\"></span>{name}</td><td class=\"number\">{}</td><td class=\"number\">{}</td><td class=\"share\">{bar}</td><td class=\"wide soft\">{}</td></tr>\n",
            span(ms),
            percent(share),
            meaning(class)
        )
    };
    let rows: String = Class::ALL.into_iter().map(row).collect();
    format!(
        "<section>\n<h2>Where the time went</h2>\n<div class=\"scroll\"><table>\n<tr><th>class</th><th class=\"number\">time</th><th class=\"number\">share</th><th></th><th>the job was</th></tr>\n{rows}</table></div>\n<p class=\"soft\">{}.</p>\n</section>\n",
        kept(&report.times)
    )
}

fn snapshots(times: &Times) -> String {
    let all = &times.snapshots;
    if all.is_empty() {
        return "<section>\n<h2>Snapshots</h2>\n<p>There is none.</p>\n</section>\n".to_owned();
    }
    let chart = |title: &str, value: &dyn Fn(&Snapshot) -> f64, show: &dyn Fn(f64) -> String| {
        bars(times, title, value, show)
    };
    let ms = |value: f64| span(value as u64);
    let charts = [
        costs::pause_chart(times),
        costs::store_chart(times),
        chart("Size", &|one| one.bytes.unwrap_or(0) as f64, &|value| print::bytes(value as u64)),
        chart("Time until it was durable", &|one| one.durable_ms.unwrap_or(0) as f64, &ms),
    ];
    let size = |bytes: Option<u64>| bytes.map_or("-".to_owned(), print::bytes);
    let row = |one: &Snapshot| {
        format!(
            "<tr><td class=\"time\"><code>{}</code></td><td class=\"time\">{}</td><td class=\"number\">{}</td><td class=\"number\">{}</td><td class=\"number\">{}</td><td class=\"number\">{}</td><td class=\"number\">{}{}</td></tr>\n",
            Escaped(&one.id),
            print::time(one.taken_unix_ms),
            span((one.stall_us + 500) / 1000),
            size(one.bytes),
            size(one.changed_bytes),
            size(one.stored_bytes),
            one.durable_ms.map_or("-".to_owned(), span),
            if one.is_in_memory_only { ", in memory only" } else { "" }
        )
    };
    let rows: String = all.iter().rev().take(ROWS).map(row).collect();
    format!(
        "<section>\n<h2>{}</h2>\n{}{}{}\n<details><summary>The newest {}</summary><div class=\"scroll\"><table>\n<tr><th>snapshot</th><th>taken</th><th class=\"number\">pause</th><th class=\"number\">size</th><th class=\"number\">changed</th><th class=\"number\">written</th><th class=\"number\">durable after</th></tr>\n{rows}</table></div></details>\n</section>\n",
        print::count(all.len() as u64, "snapshot"),
        costs::pauses(times),
        charts.concat(),
        axis(times),
        all.len().min(ROWS)
    )
}

/// A bar per snapshot, see [`stacks`].
fn bars(
    times: &Times,
    title: &str,
    value: &dyn Fn(&Snapshot) -> f64,
    show: &dyn Fn(f64) -> String,
) -> String {
    stacks(times, title, &|one| vec![("whole", value(one))], show)
}

/// A bar per snapshot, at the time at which it was taken, with its parts (a class of the style, and a value) upon each other.
/// Of several in one column, the highest is seen.
fn stacks(
    times: &Times,
    title: &str,
    parts: &dyn Fn(&Snapshot) -> Vec<(&'static str, f64)>,
    show: &dyn Fn(f64) -> String,
) -> String {
    let sum = |parts: &[(&str, f64)]| parts.iter().map(|(_, value)| value).sum::<f64>();
    let whole_ms = times.whole_ms().max(1) as f64;
    let mut columns = vec![Vec::new(); COLUMNS];
    for one in &times.snapshots {
        let at = one.taken_unix_ms.saturating_sub(times.begun_unix_ms) as f64 / whole_ms * COLUMNS as f64;
        let column = &mut columns[(at as usize).min(COLUMNS - 1)];
        let parts = parts(one);
        if sum(&parts) > sum(column) {
            *column = parts;
        }
    }
    let highest = columns.iter().map(|parts| sum(parts)).fold(0.0, f64::max);
    if highest <= 0.0 {
        return String::new();
    }
    let mut rects = String::new();
    for (at, parts) in columns.iter().enumerate() {
        let mut above = 1.0;
        for (class, value) in parts.iter().filter(|(_, value)| *value > 0.0) {
            let height = value / highest;
            above -= height;
            let _ = write!(
                rects,
                "<rect class=\"{class}\" x=\"{at}\" y=\"{above:.3}\" width=\"1\" height=\"{height:.3}\"><title>{class} {}, of {}</title></rect>",
                show(*value),
                show(sum(parts))
            );
        }
    }
    format!(
        "<figure><figcaption>{title}, at most {}</figcaption><svg class=\"bars\" role=\"img\" aria-label=\"{title} of each snapshot\" viewBox=\"0 0 {COLUMNS} 1\" preserveAspectRatio=\"none\">{rects}</svg></figure>",
        show(highest)
    )
}

fn ending(ending: SessionEnding) -> &'static str {
    match ending {
        SessionEnding::Complete => "complete",
        SessionEnding::Failed => "failed",
        SessionEnding::Hung => "hung",
        SessionEnding::Ended => "ended",
        SessionEnding::Killed => "killed with ckpt-run",
        SessionEnding::NotStarted => "not started",
    }
}

/// How sessions ended, what that cost, and what followed.
fn sessions(times: &Times) -> String {
    let row = |(at, one): (usize, &Session)| {
        let ended_ms = one.ended_unix_ms?;
        // Restarts that could not begin are rows of their own.
        let began = |one: &&Session| one.ending != Some(SessionEnding::NotStarted);
        let next = times.sessions[at + 1..].iter().find(began);
        let dash = || "-".to_owned();
        let what = one.what.as_deref().unwrap_or("ckpt-run was killed, or the machine went down");
        let remedy =
            one.remedy.as_ref().map(|remedy| format!("<br><span class=\"soft\">{}</span>", Escaped(remedy)));
        Some(format!(
            "<tr><td class=\"time\">{}</td><td>{}</td><td class=\"wide\">{}{}</td><td class=\"number\">{}</td><td class=\"number\">{}</td><td>{}</td></tr>\n",
            print::time(ended_ms),
            one.ending.map_or("", ending),
            Escaped(what),
            remedy.unwrap_or_default(),
            next.map_or_else(dash, |next| span(next.redo_ms)),
            next.map_or_else(dash, |next| span(next.begun_unix_ms.saturating_sub(ended_ms))),
            Escaped(one.host.as_deref().unwrap_or("-"))
        ))
    };
    let rows: Vec<_> = times.sessions.iter().enumerate().filter_map(row).collect();
    if rows.is_empty() {
        return "<section>\n<h2>Interruptions</h2>\n<p>There was none.</p>\n</section>\n".to_owned();
    }
    let rows: String = rows.into_iter().rev().take(ROWS).collect();
    format!(
        "<section>\n<h2>How sessions ended</h2>\n<p class=\"soft\">The newest first.</p>\n<div class=\"scroll\"><table>\n<tr><th>time</th><th>how</th><th>what happened</th><th class=\"number\">done again</th><th class=\"number\">until it ran again</th><th>machine</th></tr>\n{rows}</table></div>\n</section>\n"
    )
}

/// Ranks for which others waited.
fn late_ranks(times: &Times) -> String {
    if times.late_ranks.is_empty() {
        return String::new();
    }
    let row = |late: &LateRank| {
        let at = print::time(late.found_unix_ms);
        format!("<tr><td class=\"time\">{at}</td><td class=\"wide\">{}</td></tr>\n", Escaped(&late.what))
    };
    let rows: String = times.late_ranks.iter().rev().take(ROWS).map(row).collect();
    format!(
        "<section>\n<h2>Late ranks</h2>\n<p class=\"soft\">Ranks of NCCL that did nothing while others waited for them. The newest first.</p>\n<div class=\"scroll\"><table>\n<tr><th>found</th><th>rank</th></tr>\n{rows}</table></div>\n</section>\n"
    )
}

fn notes(report: &Report) -> String {
    let shortened = if report.times.is_shortened {
        "<p>The journal is long, and its oldest entries are deleted: earlier time is not counted.</p>\n"
    } else {
        ""
    };
    format!(
        "<section class=\"soft\">\n{shortened}<p>All times are in UTC. Time after the end of the last launcher does not count. If a launcher is killed, the end of its job is known to about half a second. <code>ckpt-run docs report</code> explains each class.</p>\n<p>Made by ckpt-run {} at {}.</p>\n</section>\n",
        env!("CARGO_PKG_VERSION"),
        print::time(report.read_unix_ms)
    )
}

#[cfg(test)]
mod tests {
    use super::super::tests::example;
    use super::*;

    #[test]
    fn names_are_text_and_nothing_is_loaded() {
        let page = page(&example());
        assert!(!page.contains("<script"), "{page}");
        assert!(page.contains("&lt;script&gt;alert(&#39;&quot;&amp;&#39;)&lt;/script&gt;"), "{page}");
        for outside in ["http:", "https:", "url(", "@import", "src="] {
            assert!(!page.replace("http-equiv", "").contains(outside), "{outside}");
        }
        assert_eq!(Escaped("a\u{1b}[0m").to_string(), "a\u{fffd}[0m");
        assert_eq!(Escaped("sh -c one\n\ttwo").to_string(), "sh -c one  two");
    }

    #[test]
    fn numbers_and_failures_are_shown() {
        let page = page(&example());
        for wanted in [
            "<p class=\"headline\">90.0 %</p>",
            "<h2>2 snapshots</h2>",
            "killed by",
            "9.50 s",
            "<h2>Late ranks</h2>",
            "Pause of the job, at most 250.0 ms",
            "<h3>Pauses by phase</h3>",
            "<h2>Memory by process</h2>",
        ] {
            assert!(page.contains(wanted), "{wanted}: {page}");
        }
        let none =
            Report { times: Times { snapshots: vec![], sessions: vec![], ..example().times }, ..example() };
        let page = super::page(&none);
        assert!(page.contains("There is none.") && page.contains("There was none."), "{page}");
    }

    /// The area of each class in the chart.
    fn areas(chart: &str) -> Vec<f64> {
        let value = |rect: &str, name: &str| -> f64 {
            rect.split(&format!(" {name}=\"")).nth(1).unwrap().split('"').next().unwrap().parse().unwrap()
        };
        let area = |class: Class| {
            let of_class = format!("class=\"{}\"", class.name());
            let rects = chart.split("<rect ").filter(|rect| rect.starts_with(&of_class));
            rects.map(|rect| (value(rect, "width") - 0.05) * value(rect, "height")).sum()
        };
        Class::ALL.map(area).to_vec()
    }

    #[test]
    fn the_timeline_has_the_shares_of_the_classes() {
        let example = example().times;
        let found = areas(&timeline(&example));
        for (class, area) in Class::ALL.into_iter().zip(found) {
            let wanted = example.of(class) as f64 / example.whole_ms() as f64 * COLUMNS as f64;
            assert!((area - wanted).abs() < 0.1, "{class:?}: {area} instead of {wanted}");
        }
        // Many short stretches.
        let one = |at: u64| {
            let class = if at.is_multiple_of(10) { Class::Stall } else { Class::Productive };
            Segment { class, begun_unix_ms: at * 7, ended_unix_ms: at * 7 + 7 }
        };
        let many = Times { ended_unix_ms: 70_000, timeline: (0..10_000).map(one).collect(), ..example };
        let found = areas(&timeline(&many));
        assert!((found[0] - 360.0).abs() < 2.0 && (found[1] - 40.0).abs() < 2.0, "{found:?}");
    }
}
