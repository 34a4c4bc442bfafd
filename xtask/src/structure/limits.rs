//! The limits that the structure of the source code keeps.

use super::{CrateReport, Report};

/// The most lines of a function.
pub const FUNCTION_LINES: usize = 60;

/// The most entries in the top folder of the launcher.
const LAUNCHER_ENTRIES: usize = 19;

/// The most files of the interposer in one import cycle.
const INTERPOSE_CYCLE_FILES: usize = 5;

/// The top-level folders and modules of the launcher, the lowest first. A folder imports only folders before it.
const LAYERS: &[&str] = &[
    "sys",
    "namespace",
    "files",
    "store",
    "job",
    "persist",
    "criu",
    "agents",
    "gpu",
    "cluster",
    "checkpoint",
    "restore",
    "report",
    "observe",
    "cli",
    "container",
    "supervise",
    "commands",
];

/// Everything in the report that exceeds a limit, in words.
pub fn violations(report: &Report) -> Vec<String> {
    let mut found = Vec::new();
    if let Some(launcher) = report.crates.get("launcher") {
        check_launcher(launcher, &mut found);
        check_layers(launcher, LAYERS, &mut found);
    }
    if let Some(interpose) = report.crates.get("interpose") {
        check_interpose(interpose, &mut found);
    }
    for function in &report.long_functions {
        found.push(format!(
            "{}:{}: function {} has {} lines, the limit is {FUNCTION_LINES}",
            function.file, function.line, function.name, function.lines
        ));
    }
    found
}

fn check_launcher(launcher: &CrateReport, found: &mut Vec<String>) {
    let entries = launcher.entries_per_folder.get("src").copied().unwrap_or(0);
    if entries > LAUNCHER_ENTRIES {
        found.push(format!("launcher/src has {entries} entries, the limit is {LAUNCHER_ENTRIES}"));
    }
    for cycle in &launcher.folder_cycles {
        found.push(format!("launcher: import cycle between {}", cycle.join(", ")));
        let is_in_cycle = |folder: &String| cycle.contains(folder);
        let mut shown = Vec::new();
        for import in &launcher.imports {
            let (from, to) = import.folders();
            if from != to
                && is_in_cycle(&from)
                && is_in_cycle(&to)
                && !shown.contains(&(from.clone(), to.clone()))
            {
                found.push(format!("launcher: part of this cycle: {import}"));
                shown.push((from, to));
            }
        }
    }
}

fn check_interpose(interpose: &CrateReport, found: &mut Vec<String>) {
    for cycle in interpose.file_cycles.iter().filter(|cycle| cycle.size > INTERPOSE_CYCLE_FILES) {
        found.push(format!(
            "interpose: import cycle of {} files, the limit is {INTERPOSE_CYCLE_FILES}: {}",
            cycle.size,
            cycle.files.join(", ")
        ));
    }
}

/// Names every folder that has no layer, and every import that points from a lower to a higher layer.
fn check_layers(launcher: &CrateReport, layers: &[&str], found: &mut Vec<String>) {
    let layer = |folder: &str| layers.iter().position(|name| *name == folder);
    for folder in launcher.folders.iter().filter(|folder| layer(folder).is_none()) {
        found.push(format!("launcher/src/{folder} is missing in LAYERS, in xtask/src/structure/limits.rs"));
    }
    for import in &launcher.imports {
        let (from, to) = import.folders();
        if let (Some(from_layer), Some(to_layer)) = (layer(&from), layer(&to))
            && from_layer < to_layer
        {
            found.push(format!("launcher: {import}, but {from} is a lower layer than {to}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::modules::tests::tree;
    use super::*;

    fn launcher(b: &str) -> CrateReport {
        CrateReport::new(&tree(&[
            ("main.rs", "mod a; mod b; mod c;"),
            ("a.rs", "use crate::b::B;"),
            ("b.rs", b),
            ("c.rs", ""),
        ]))
    }

    #[test]
    fn an_import_that_points_up_is_named() {
        let mut found = Vec::new();
        check_layers(&launcher("use crate::c::C;"), &["b", "a", "c"], &mut found);
        assert_eq!(found, ["launcher: b.rs:1 names c.rs, but b is a lower layer than c"]);
    }

    #[test]
    fn a_folder_without_a_layer_is_named() {
        let mut found = Vec::new();
        check_layers(&launcher(""), &["b", "a"], &mut found);
        assert_eq!(found.len(), 1);
        assert!(found[0].starts_with("launcher/src/c is missing in LAYERS"), "{found:?}");
    }

    #[test]
    fn a_cycle_is_named_with_its_imports() {
        let mut found = Vec::new();
        check_launcher(&launcher("use crate::a::A;"), &mut found);
        assert_eq!(found[0], "launcher: import cycle between a, b");
        assert_eq!(found.len(), 3);
        assert_eq!(found[1], "launcher: part of this cycle: a.rs:1 names b.rs");
    }

    #[test]
    fn a_large_cycle_of_files_and_a_long_function_are_named() {
        let mut interpose = launcher("");
        let files = (0..6).map(|n| format!("{n}.rs")).collect();
        interpose.file_cycles.push(super::super::FileCycle { size: 6, files });
        let functions = super::super::functions::find("a.rs", &format!("fn a() {{{}}}", "\n".repeat(60)));
        let report = Report {
            crates: [("interpose".to_owned(), interpose)].into(),
            long_functions: functions.unwrap(),
        };
        let found = violations(&report);
        assert!(found[0].contains("import cycle of 6 files"), "{found:?}");
        assert_eq!(found[1], "a.rs:1: function a has 61 lines, the limit is 60");
    }
}
