//! Tests that skip: which may, and which did.
//!
//! A test that cannot run on a machine calls `ckpt_test_skip::skip`, which appends a line to a file. A test that
//! skips without being listed here fails `cargo xtask test`. Tests of `--full` need no entry: they skip without it, and
//! fail if they skip with it.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::workspace;

/// The environment variable with the file, and the start of its lines; both as in tests/skip.
pub const FILE_VARIABLE: &str = "CKPT_TEST_SKIPPED";
const PREFIX: &str = "SKIPPED: ";

const KERNEL: &str = "not every kernel has, or allows in a container, what the test uses";
const REACH: &str = "other users have no access to a workspace in a private directory";
const OWNER: &str = "only root can give files to another user";
/// Why tests of `--full` skip without it; as in tests/skip.
const FULL: &str = "needs `cargo xtask test --full`";
const MACHINE: &str = "another test runs it in a virtual machine";
const FRAMEWORKS: &str = "needs `cargo xtask conformance --real-driver --full`";
const LIMITS: &str = "not every system lets root set limits of memory";
const MOUNT: &str = "not every container allows mounts and loop devices";

/// The tests that may skip, by the end of their path, and why.
const MAY_SKIP: &[(&str, &str)] = &[
    ("a_real_driver_passes_and_the_simulated_driver_does_the_same", "needs a GPU"),
    ("nvidias_nccl_for_cuda_13_fails_as_without_the_interposer", FRAMEWORKS),
    ("frameworks_on_nvidias_driver_fail_as_without_the_interposer", FRAMEWORKS),
    ("pytorchs_cuda_build_on_nvidias_driver_survives", FRAMEWORKS),
    ("performance_counters", KERNEL),
    ("a_userfaultfd", KERNEL),
    ("what_may_not_be_written_is_refused_before_anything_is_changed", KERNEL),
    ("the_fuse_device", KERNEL),
    ("a_virtual_machine", KERNEL),
    ("a_vsock", KERNEL),
    ("a_network_tunnel", KERNEL),
    ("a_namespace_of_its_own", KERNEL),
    ("tcp6", KERNEL),
    ("huge_pages", KERNEL),
    ("a_user_without_any_rights_has_a_job_that_goes_on", REACH),
    ("the_smallest_set_of_capabilities_does_for_tcp_on_the_machines_network", REACH),
    ("the_job_has_none_of_the_capabilities", REACH),
    ("what_needs_more_rights_is_refused_by_name", REACH),
    ("without_rights_and_user_namespaces_nothing_is_started", REACH),
    ("doctor_tells_what_a_user_has", REACH),
    ("another_user_gets_at_nothing", REACH),
    ("files_of_a_user_without_rights", REACH),
    ("the_configuration_of_another_user_is_not_used", OWNER),
    ("the_store_of_another_user_is_not_used", OWNER),
    ("the_limit_of_a_cgroup_further_up_counts", LIMITS),
    ("the_limit_outside_of_a_cgroup_namespace_counts", LIMITS),
    ("the_default_is_chosen_by_what_is_free", LIMITS),
    ("programs_and_logs_of_another_user_are_not_used", OWNER),
    ("a_log_file_by_the_link_of_another_user_is_not_written_to", OWNER),
    ("a_resume_with_another_runtime_directory_has_its_agents", REACH),
    ("a_directory_of_another_user_in_tmp_is_avoided_or_named", REACH),
    ("the_memory_of_an_encrypted_job_is_not_written_to_the_disk", REACH),
    ("whatever_is_in_the_runtime_directory_only_the_job_itself_runs", REACH),
    ("a_job_runs_while_its_checkpoint_waits_for_a_lock", MOUNT),
    ("ext4", MOUNT),
    ("xfs_with_reflinks", MOUNT),
    ("nothing_is_lost_by_kills_during_pre_copy", MACHINE),
    ("parts_whose_memory_was_copied_before_are_one_snapshot", MACHINE),
    ("ext4_keeps_what_was_stored", MOUNT),
    (
        "what_earlier_builds_have_stored_is_resumed",
        "needs `cargo xtask test --full` in a clone with the history",
    ),
    ("tmpfs_with_a_store_on_a_disk", MOUNT),
    ("overlayfs", MOUNT),
    ("a_file_of_a_tmpfs_that_is_changed_through_a_mapping_is_in_the_snapshot", MOUNT),
    ("a_resume_is_refused_before_anything_is_touched", "a file system with reflinks needs no copies"),
];

/// A test that skipped.
#[derive(Debug, PartialEq, Eq)]
pub struct Skip {
    /// Its path in the test program.
    pub test: String,
    /// Why it skipped.
    pub reason: String,
}

impl Skip {
    /// Whether the test may skip in a run with or without `--full`.
    fn is_allowed(&self, is_full: bool) -> bool {
        let name = self.test.rsplit("::").next();
        let is_of_full = !is_full && self.reason == FULL;
        is_of_full || MAY_SKIP.iter().any(|(allowed, _)| name == Some(allowed))
    }
}

/// The file that the tests append to.
pub fn file() -> Result<PathBuf> {
    Ok(workspace::target_dir()?.join("skipped-tests.txt"))
}

/// Removes what an earlier run left.
pub fn clear(file: &Path) -> Result<()> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("removing {}", file.display()))
        }
        _ => Ok(()),
    }
}

/// The tests that skipped in the last run. Without the file, none did.
pub fn read(file: &Path) -> Result<Vec<Skip>> {
    match fs::read_to_string(file) {
        Ok(text) => Ok(parse(&text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| format!("reading {}", file.display())),
    }
}

/// Prints each skipped test, and returns whether all of them may skip in a run with or without `--full`.
pub fn report(skips: &[Skip], is_full: bool) -> bool {
    let (allowed, others): (Vec<_>, Vec<_>) = skips.iter().partition(|skip| skip.is_allowed(is_full));
    for Skip { test, reason } in allowed {
        println!("test: {test} was skipped: {reason}");
    }
    for Skip { test, reason } in &others {
        println!(
            "test: {test} was skipped, which FAILS: {reason}. Tests that may skip are in xtask/src/skips.rs"
        );
    }
    others.is_empty()
}

fn parse(text: &str) -> Vec<Skip> {
    let line = |line: &str| {
        let (test, reason) = line.strip_prefix(PREFIX)?.split_once(": ")?;
        Some(Skip { test: test.to_owned(), reason: reason.to_owned() })
    };
    text.lines().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::process;

    /// Tests that `cargo test` does not run by itself, and what runs them.
    const IGNORED: &[(&str, &str)] = &[
        ("a_collective_costs", "a measurement, run by hand in the release build"),
        ("costs_by_number_of_nodes", "a measurement, run by `cargo xtask bench cluster`"),
        ("faults_of_all_kinds_at_once_change_no_result", "a soak, run by `cargo xtask soak --chaos`"),
        ("ratios", "a measurement, run by `cargo xtask bench gpu`"),
        ("works_on_a_directory", "run by other tests in a process of its own"),
        ("write_the_stores_of_version_3", "run by hand to write the fixture of a version"),
        ("write_the_corpus", "run by hand to write the corpus of the readers"),
        ("writes_until_a_file_is_too_large", "run by another test in a process of its own"),
    ];

    #[test]
    fn reads_the_lines_of_skipped_tests() {
        let skips = parse("SKIPPED: refused::a_vsock: vsock.py: no such device\nother\nSKIPPED: b: c\n");
        let skip = |test: &str, reason: &str| Skip { test: test.to_owned(), reason: reason.to_owned() };
        assert_eq!(skips, [skip("refused::a_vsock", "vsock.py: no such device"), skip("b", "c")]);
        assert_eq!(skips.iter().map(|skip| skip.is_allowed(false)).collect::<Vec<_>>(), [true, false]);
        assert!(!report(&skips, false));
    }

    #[test]
    fn tests_of_full_skip_without_it_only() {
        let skips = parse("SKIPPED: spares: needs `cargo xtask test --full`\n");
        assert!(report(&skips, false));
        assert!(!report(&skips, true));
    }

    #[test]
    fn no_file_is_no_skipped_test() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("skipped");
        clear(&file).unwrap();
        assert_eq!(read(&file).unwrap(), []);
        fs::write(&file, "SKIPPED: a: b\n").unwrap();
        assert_eq!(read(&file).unwrap().len(), 1);
        clear(&file).unwrap();
        assert_eq!(read(&file).unwrap(), []);
    }

    #[test]
    fn the_helper_of_the_tests_writes_these_lines() {
        let source = fs::read_to_string(workspace::root().join("tests/skip/src/lib.rs")).unwrap();
        for text in [FILE_VARIABLE, PREFIX, FULL] {
            assert!(source.contains(&format!("\"{text}\"")), "{text}");
        }
    }

    /// `#[ignore]` is a skip too.
    #[test]
    fn ignored_tests_are_listed() {
        let mut git = Command::new("git");
        git.current_dir(workspace::root()).args(["grep", "-h", "-A3", "^ *#\\[ignore", "--", "*.rs"]);
        let found = process::capture(&mut git).unwrap();
        let names = found.lines().filter_map(|line| line.trim().strip_prefix("fn ")?.split_once('('));
        let mut names: Vec<_> = names.map(|(name, _)| name).collect();
        names.sort_unstable();
        let mut listed: Vec<_> = IGNORED.iter().map(|(name, _)| *name).collect();
        listed.sort_unstable();
        assert_eq!(names, listed);
    }

    /// What is in backticks in a column of the tables of a page, the first being 0.
    fn names_in(page: &str, column: impl Fn(usize) -> usize) -> Vec<String> {
        let text = fs::read_to_string(workspace::root().join(page)).unwrap();
        let rows = text.lines().filter(|line| line.starts_with("| ") && line.ends_with(" |"));
        let cells = rows.map(|row| row[2..row.len() - 2].split(" | ").collect::<Vec<_>>());
        let cells = cells.map(|cells| cells[column(cells.len())]);
        cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).map(str::to_owned).collect()
    }

    fn assert_exists(page: &str, name: &str) {
        let mut git = Command::new("git");
        git.current_dir(workspace::root()).args(["grep", "-qF", &format!("fn {name}("), "--", "*.rs"]);
        let exists = workspace::root().join(name).is_file() || process::capture(&mut git).is_ok();
        assert!(exists, "{page} names {name}, which does not exist");
    }

    /// docs/threat-model.md names tests, and files with tests, in the last column of its tables.
    #[test]
    fn tests_of_the_threat_model_exist() {
        let page = "docs/threat-model.md";
        let mut names = names_in(page, |columns| columns - 1);
        names.retain(|name| name.contains('_') || name.ends_with(".rs"));
        assert!(names.len() > 40, "{names:?}");
        names.iter().for_each(|name| assert_exists(page, name));
    }

    /// docs/simcuda.md does so in the fifth of six columns. Names that are cut have the row above.
    #[test]
    fn tests_of_the_facts_about_drivers_exist() {
        let page = "docs/simcuda.md";
        let mut names = names_in(page, |columns| if columns == 6 { 4 } else { panic!("{columns} columns") });
        let is_whole = |name: &str| name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        names.retain(|name| name.contains('_') && is_whole(name));
        assert!(names.len() > 60, "{names:?}");
        names.iter().for_each(|name| assert_exists(page, name));
    }

    /// A test that is renamed would otherwise fail CI only on machines where it skips.
    #[test]
    fn tests_that_may_skip_exist() {
        for (name, _) in MAY_SKIP {
            let mut git = Command::new("git");
            git.current_dir(workspace::root());
            git.args(["grep", "-l", "-w", name, "--", "*.rs", ":!xtask/src/skips.rs"]);
            assert!(process::capture(&mut git).is_ok(), "there is no test {name}");
        }
    }
}
