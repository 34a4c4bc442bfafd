//! Whose a file is: several jobs in one directory, a reboot, another machine.

use super::told::{Told, WRITE};
use ckpt_run_tests::{Running, Sandbox, programs, python, until};
use std::fs;
use std::time::{Duration, SystemTime};

/// Steps of each job, 10 ms long.
const STEPS: u32 = 600;

/// Starts or resumes one of the jobs that share a directory. What the job writes is recorded late.
fn start(sandbox: &Sandbox, job: &str, interval: &str) -> Running {
    let mut command = sandbox.command(["--job", job, "--interval", interval, "--"]);
    command.arg(python()).arg(programs().join("files/steps.py")).args([job, &STEPS.to_string()]);
    command.env_remove("CKPT_FILES_EXCLUDE").current_dir(sandbox.path().join("work"));
    command.env("CKPT_FAULT", "record-append=delay:200");
    sandbox.start_command(job, command)
}

/// The number of lines in the log of a job.
fn lines(sandbox: &Sandbox, job: &str) -> usize {
    sandbox.read(&format!("work/{job}.log")).lines().count()
}

/// Whether a job has a snapshot.
fn is_saved(sandbox: &Sandbox, job: &str) -> bool {
    let listed = sandbox.call(["ls", "--job", job, "--json"]);
    serde_json::from_slice(&listed.stdout).is_ok_and(|rows: Vec<serde_json::Value>| !rows.is_empty())
}

/// Checks that the files of a job are those of a run that nothing interrupted.
fn check(sandbox: &Sandbox, job: &str, said: &str) {
    let log: String = (0..STEPS).map(|step| format!("{step}\n")).collect();
    assert_eq!(sandbox.read(&format!("work/{job}.log")), log, "{said}");
    assert_eq!(sandbox.read(&format!("work/{job}.state")), (STEPS - 1).to_string(), "{said}");
    let mut made: Vec<u32> = fs::read_dir(sandbox.path().join("work"))
        .unwrap()
        .filter_map(|entry| {
            entry.unwrap().file_name().to_str()?.strip_prefix(&format!("{job}-"))?.parse().ok()
        })
        .collect();
    made.sort_unstable();
    assert_eq!(made, (0..STEPS).step_by(10).collect::<Vec<u32>>(), "{said}");
}

#[test]
fn jobs_in_one_directory_leave_each_others_files_alone() {
    let sandbox = Sandbox::new();
    fs::create_dir(sandbox.path().join("work")).unwrap();
    let (mut first, mut second) = (start(&sandbox, "first", "500ms"), start(&sandbox, "second", "500ms"));
    let mut without_snapshots = start(&sandbox, "third", "off");
    let half = usize::try_from(STEPS / 2).unwrap();
    for (job, running, kills) in [("first", &mut first, 3), ("second", &mut second, 1)] {
        // Killed before its first snapshot, a job begins again, among its own files.
        running.until("a snapshot", || is_saved(&sandbox, job).then_some(()));
        // With the init: the last moments are not recorded.
        for _ in 0..kills {
            let wanted = half.min(lines(&sandbox, job) + 80);
            running.until("progress", || (lines(&sandbox, job) >= wanted).then_some(()));
            running.kill_everything();
            *running = start(&sandbox, job, "500ms");
        }
    }
    fs::write(sandbox.path().join("go"), "").unwrap();
    for (job, running) in [("first", &mut first), ("second", &mut second)] {
        assert_eq!(running.wait(), 0, "{job}: {}", running.said());
        assert!(running.said().contains("resumed from snapshot"), "{job}: {}", running.said());
        check(&sandbox, job, &running.said());
    }
    assert_eq!(without_snapshots.wait(), 0, "{}", without_snapshots.said());
    check(&sandbox, "third", &without_snapshots.said());
}

/// Makes it look as if the job had run in another boot of the machine, or on another machine.
fn replace_in_alive(job: &Told, field: &str) {
    let path = job.sandbox.job_dir().join("alive");
    let mut alive: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    alive[field] = "another".into();
    let at = fs::metadata(&path).unwrap().modified().unwrap();
    fs::write(&path, alive.to_string()).unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_modified(at).unwrap();
}

/// A job that has changed its files since the snapshot, beside a person.
fn job_with_changes() -> (Told, usize) {
    let mut job = Told::new(&[]);
    fs::write(job.path("notes"), "then").unwrap();
    job.start(&[]);
    job.tell(WRITE);
    job.tell("write('state', 'then')");
    let told = job.checkpoint();
    job.tell("write('state', 'later'); write('made', 'since')");
    fs::write(job.path("notes"), "a person's").unwrap();
    (job, told)
}

#[test]
fn after_a_reboot_the_record_on_the_disk_counts() {
    let (mut job, told) = job_with_changes();
    let written = SystemTime::now();
    let durable = job.sandbox.job_dir().join("written/durable");
    let since_1970 = |time: SystemTime| time.duration_since(SystemTime::UNIX_EPOCH).unwrap();
    until("the record to be on the disk", || {
        let until_ns: u64 = fs::read_to_string(&durable).ok()?.parse().ok()?;
        (Duration::from_nanos(until_ns) > since_1970(written)).then_some(())
    });
    job.kill(told);
    replace_in_alive(&job, "boot_id");
    let said = job.resume(&[]);
    assert_eq!(["state", "notes"].map(|name| job.read(name)), ["then", "a person's"], "{said}");
    assert!(!job.path("made").exists(), "{said}");
    assert!(!said.contains("not known"), "{said}");
}

#[test]
fn on_another_machine_unknown_files_stay_as_they_are() {
    let (mut job, told) = job_with_changes();
    job.kill(told);
    replace_in_alive(&job, "hostname");
    let said = job.resume(&[]);
    let all = ["state", "notes", "made"].map(|name| job.read(name));
    assert_eq!(all, ["then", "a person's", "since"], "{said}");
    let named =
        said.lines().find(|line| line.contains("not known whether")).unwrap_or_else(|| panic!("{said}"));
    assert!(named.contains("/work/notes") && named.contains("/work/made"), "{named}");
    assert!(!named.contains("/work/state"), "{named}");
}
