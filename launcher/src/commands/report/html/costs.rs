//! What snapshots cost, in the web page: pauses by phase, bytes in the store, memory by process.

use super::super::memory::{Memory, sum_bytes};
use super::super::{UNKNOWN, pause, percent, phase_meaning, phases, stored};
use super::{Escaped, ROWS, stacks};
use crate::commands::print;
use crate::job::times::{Snapshot, Times};
use ckpt_snapshot::ProcessMemory;

/// Pauses by phase: a table, and a chart.
pub fn pauses(times: &Times) -> String {
    let all = phases(&times.totals);
    let whole_us = times.totals.stall_us.max(1) as f64;
    let row = |(name, us): &(&'static str, u64)| {
        let share = *us as f64 / whole_us;
        format!(
            "<tr><td class=\"time\"><span class=\"swatch {name}\"></span>{name}</td><td class=\"number\">{}</td><td class=\"number\">{}</td><td class=\"share\"><span class=\"{name}\" style=\"width:{:.2}%\"></span></td><td class=\"wide soft\">{}</td></tr>\n",
            pause(*us),
            percent(share),
            share * 100.0,
            phase_meaning(name)
        )
    };
    let rows: String = all.iter().map(row).collect();
    if rows.is_empty() {
        return String::new();
    }
    format!(
        "<h3>Pauses by phase</h3>\n<div class=\"scroll\"><table>\n<tr><th>phase</th><th class=\"number\">time</th><th class=\"number\">share</th><th></th><th>the job was paused since</th></tr>\n{rows}</table></div>\n"
    )
}

/// The pause of each snapshot, with its phases.
pub fn pause_chart(times: &Times) -> String {
    let parts = |one: &Snapshot| -> Vec<(&'static str, f64)> {
        match &one.stall_phases {
            Some(phases) => phases.named().map(|(name, us)| (name, us as f64)).into(),
            None => vec![(UNKNOWN, one.stall_us as f64)],
        }
    };
    stacks(times, "Pause of the job", &parts, &|us| pause(us as u64))
}

/// What each snapshot changed, and how much of that compression saved.
pub fn store_chart(times: &Times) -> String {
    let parts = |one: &Snapshot| {
        let stored_bytes = one.stored_bytes.unwrap_or(0);
        let saved_bytes = one.changed_bytes.unwrap_or(0).saturating_sub(stored_bytes);
        vec![("written", stored_bytes as f64), ("compressed", saved_bytes as f64)]
    };
    let chart = stacks(times, "Changed since older snapshots", &parts, &|bytes| print::bytes(bytes as u64));
    if chart.is_empty() {
        return chart;
    }
    let legend = "<ul class=\"legend\"><li><span class=\"swatch written\"></span>written to the store</li><li><span class=\"swatch compressed\"></span>saved by compression</li></ul>";
    format!("{chart}{legend}\n<p class=\"soft\">{}.</p>\n", stored(&times.totals))
}

/// Memory by process.
pub fn memory(memory: Option<&Memory>) -> String {
    let Some(memory) = memory else { return String::new() };
    let most = memory.processes.iter().map(sum_bytes).max().unwrap_or(0).max(1) as f64;
    let row = |process: &ProcessMemory| {
        let parts = [
            ("private", process.private_bytes),
            ("shared", process.shared_bytes),
            ("device", process.device_bytes),
        ];
        let cells: String = parts
            .iter()
            .map(|(_, bytes)| format!("<td class=\"number\">{}</td>", print::bytes(*bytes)))
            .collect();
        let used = parts.iter().filter(|(_, bytes)| *bytes > 0);
        let bars: String = used
            .map(|(name, bytes)| {
                let width = *bytes as f64 / most * 100.0;
                format!("<span class=\"{name}\" style=\"width:{width:.2}%\"></span>")
            })
            .collect();
        format!(
            "<tr><td class=\"number\">{}</td><td class=\"wide\">{}</td>{cells}<td class=\"share parts\">{bars}</td></tr>\n",
            process.pid,
            Escaped(&process.name)
        )
    };
    let rows: String = memory.processes.iter().take(ROWS).map(row).collect();
    let head: String = [("private", "memory"), ("shared", "shared"), ("device", "on GPUs")]
        .map(|(name, title)| {
            format!("<th class=\"number\"><span class=\"swatch {name}\"></span>{title}</th>")
        })
        .concat();
    format!(
        "<section>\n<h2>Memory by process</h2>\n<p class=\"soft\">In the snapshot <code>{}</code>. Shared memory counts for each process that uses it.</p>\n<div class=\"scroll\"><table>\n<tr><th class=\"number\">PID in the job</th><th>program</th>{head}<th></th></tr>\n{rows}</table></div>\n</section>\n",
        Escaped(&memory.snapshot)
    )
}

#[cfg(test)]
mod tests {
    use super::super::super::tests::example;
    use super::*;

    /// The height of each part in a chart, by its class.
    fn heights(chart: &str) -> Vec<(String, f64)> {
        let value = |rect: &str, name: &str| {
            rect.split(&format!("{name}=\"")).nth(1).unwrap().split('"').next().unwrap().to_owned()
        };
        let rects = chart.split("<rect ").skip(1);
        rects.map(|rect| (value(rect, "class"), value(rect, " height").parse().unwrap())).collect()
    }

    #[test]
    fn the_chart_of_pauses_has_the_phases_of_each() {
        let mut times = example().times;
        times.snapshots[1].stall_us = 125_000;
        times.snapshots[1].stall_phases = None;
        let found = heights(&pause_chart(&times));
        let wanted = [("detach", 0.2), ("dump", 0.4), ("attach", 0.4), (UNKNOWN, 0.5)];
        assert_eq!(found, wanted.map(|(name, height)| (name.to_owned(), height)));
    }

    #[test]
    fn the_page_shows_phases_bytes_and_memory() {
        let report = example();
        let table = pauses(&report.times);
        assert!(
            table.contains("detach</td><td class=\"number\">100.0 ms</td><td class=\"number\">20.0 %"),
            "{table}"
        );
        assert!(!table.contains("precopy"), "{table}");
        let chart = store_chart(&report.times);
        let parts = heights(&chart);
        let wanted = [("written", 0.35), ("compressed", 0.65)];
        assert_eq!(parts[..2], wanted.map(|(name, height)| (name.to_owned(), height)));
        assert!(chart.contains("400.0 kB had changed, 140.0 kB were written"), "{chart}");
        let table = memory(report.memory.as_ref());
        assert!(table.contains("<span class=\"device\" style=\"width:60.00%\">"), "{table}");
        assert!(table.contains("&lt;script") && !table.contains("<script"), "{table}");
        assert_eq!(memory(None), "");
    }
}
