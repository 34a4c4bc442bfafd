//! The habits on other file systems, which the tests mount for themselves.

use super::{check, mixed, plan};
use ckpt_run_tests::Sandbox;
use ckpt_run_tests::file_systems::{
    FileSystem, in_namespaces, inner_directory, make_layers, mount_overlay, unavailable,
};
use ckpt_run_tests::habits::{self, GROUPS, HabitJob, MAY_REFUSE, Outcome, Plan};
use ckpt_run_tests::is_full_run;
use std::path::Path;

/// Kills of each job; with `--full` all groups run.
const KILLS: u32 = 3;
const FULL_KILLS: u32 = 5;

/// Runs the test again in namespaces of its own, or, there, mounts the file system and runs the jobs.
fn on(kind: FileSystem, test: &str) {
    let name = format!("files::file_systems::{test}");
    let Some(dir) = inner_directory() else {
        let sandbox = Sandbox::new();
        if let Err(why) = in_namespaces(&name, sandbox.path()) {
            ckpt_test_skip::skip(why);
        }
        return;
    };
    let top = kind.mount(&dir).unwrap_or_else(|why| unavailable(&why));
    // Overlayfs cannot be watched, so that closed files outside of the working directory are not covered.
    let is_covered = |habit: &&str| kind != FileSystem::Overlay || !habit.starts_with("outside_");
    let mixed = mixed();
    let mixed: Vec<_> = mixed.iter().map(String::as_str).filter(is_covered).collect();
    let mut jobs = vec![("mixed", mixed, KILLS)];
    if is_full_run() {
        jobs.extend(
            GROUPS.iter().map(|(name, habits)| {
                (*name, habits.iter().copied().filter(is_covered).collect(), FULL_KILLS)
            }),
        );
        jobs.extend(MAY_REFUSE.iter().map(|(habit, _)| (*habit, vec![*habit], FULL_KILLS)));
    } else if kind == FileSystem::Xfs {
        // With reflinks nothing has to be refused.
        jobs.extend(MAY_REFUSE.iter().map(|(habit, _)| (*habit, vec![*habit], KILLS)));
    }
    let options: &[&str] = if kind == FileSystem::Overlay { &["--files", "strict"] } else { &[] };
    for (number, (name, habits, kills)) in jobs.into_iter().enumerate() {
        let outcome = run_on(kind, &dir, &top, number, &plan(&habits, kills, options));
        check(&format!("{name} on {kind:?}"), &outcome);
        let has_reflinks = kind == FileSystem::Xfs;
        assert!(!has_reflinks || outcome.refused.is_none(), "{name}: {:?}", outcome.refused);
    }
}

fn run_on(kind: FileSystem, dir: &Path, top: &Path, number: usize, plan: &Plan) -> Outcome {
    let layers = (kind == FileSystem::Overlay).then(|| make_layers(&top.join(number.to_string())));
    let mut sandbox = Sandbox::new_in(layers.as_deref().unwrap_or(top));
    if kind == FileSystem::Tmpfs {
        // The store lies on another file system than the files.
        sandbox.store = dir.join(format!("store-{number}"));
    }
    let job = HabitJob::new(sandbox, plan);
    if let Some(lower) = layers {
        // The files of an earlier job are in the lower layer.
        mount_overlay(&lower).unwrap_or_else(|why| unavailable(&why));
    }
    habits::run_prepared(job, plan)
}

#[test]
fn ext4() {
    on(FileSystem::Ext4, "ext4");
}

#[test]
fn xfs_with_reflinks() {
    on(FileSystem::Xfs, "xfs_with_reflinks");
}

#[test]
fn tmpfs_with_a_store_on_a_disk() {
    on(FileSystem::Tmpfs, "tmpfs_with_a_store_on_a_disk");
}

#[test]
fn overlayfs() {
    on(FileSystem::Overlay, "overlayfs");
}
