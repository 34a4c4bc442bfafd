//! What happens to files that are replaced, excluded, or changed by somebody else. The job does what the test tells it.

use ckpt_run_tests::trees::Tree;
use ckpt_run_tests::{Running, Sandbox, programs, python};
use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

/// A change so shortly before or after a kill of everything counts as the job's (`UNRECORDED` in job/alive.rs), and a
/// moment more.
const UNRECORDED: Duration = Duration::from_millis(2200);

/// A job that executes Python code of the test.
pub(super) struct Told {
    pub(super) sandbox: Sandbox,
    options: Vec<&'static str>,
    running: Option<Running>,
    /// How much code the job has executed.
    told: usize,
    starts: u32,
}

impl Told {
    pub(super) fn new(options: &[&'static str]) -> Self {
        let sandbox = Sandbox::new();
        for dir in ["work", "told"] {
            fs::create_dir(sandbox.path().join(dir)).unwrap();
        }
        Self { sandbox, options: options.to_vec(), running: None, told: 0, starts: 0 }
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.sandbox.path().join("work").join(name)
    }

    pub(super) fn read(&self, name: &str) -> String {
        self.sandbox.read(&format!("work/{name}"))
    }

    fn launch(&mut self, more: &[&str]) -> Running {
        self.starts += 1;
        let mut arguments: Vec<PathBuf> = self.options.iter().chain(more).map(PathBuf::from).collect();
        arguments.extend(["--".into(), python(), programs().join("files/told.py"), "../told".into()]);
        let mut command = self.sandbox.command(arguments);
        command.env_remove("CKPT_FILES_EXCLUDE");
        command.current_dir(self.sandbox.path().join("work"));
        self.sandbox.start_command(&format!("run{}", self.starts), command)
    }

    pub(super) fn start(&mut self, more: &[&str]) -> &mut Running {
        let running = self.launch(more);
        let running = self.running.insert(running);
        running.until_answering(&self.sandbox);
        running
    }

    /// Lets the job execute code and waits for that.
    pub(super) fn tell(&mut self, code: &str) {
        let path = self.sandbox.path().join("told").join(format!("{}.py", self.told));
        let written = path.with_extension("new");
        fs::write(&written, code).unwrap();
        fs::rename(written, path).unwrap();
        let (done, out) = (format!("done {}\n", self.told), format!("run{}.out", self.starts));
        let running = self.running.as_mut().expect("a running job");
        running.until(code, || self.sandbox.read(&out).contains(&done).then_some(()));
        self.told += 1;
    }

    pub(super) fn checkpoint(&mut self) -> usize {
        self.running.as_ref().expect("a running job").checkpoint(&self.sandbox);
        self.told
    }

    /// Kills everything, and forgets what was told since the snapshot.
    pub(super) fn kill(&mut self, told_at_snapshot: usize) {
        let mut running = self.running.take().expect("a running job");
        // What is written right before the init is killed may not be recorded, which docs/resuming.md says. The time of a
        // record that is kept says until when all is.
        let now = SystemTime::now();
        let last = || last_record(&self.sandbox.store);
        if last().is_some_and(|at| at + RECORDED_LATELY > now) {
            running.until("a record of all that was written", || last().filter(|at| *at >= now));
        }
        running.kill_everything();
        self.forget(told_at_snapshot);
    }

    fn forget(&mut self, told_at_snapshot: usize) {
        for number in told_at_snapshot..self.told {
            fs::remove_file(self.sandbox.path().join(format!("told/{number}.py"))).unwrap();
        }
        self.told = told_at_snapshot;
    }

    pub(super) fn resume(&mut self, more: &[&str]) -> String {
        let running = self.start(more);
        let said = running.said();
        assert!(said.contains("resumed from snapshot"), "{said}");
        said
    }

    /// Files in the directories of what was replaced, with their contents.
    fn kept(&self) -> Vec<(String, String)> {
        let mut found = Vec::new();
        let mut open = vec![self.sandbox.job_dir().join("kept")];
        while let Some(dir) = open.pop() {
            for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
                match entry.file_type().unwrap().is_dir() {
                    true => open.push(entry.path()),
                    false => found.push((
                        entry.file_name().to_string_lossy().into_owned(),
                        fs::read_to_string(entry.path()).unwrap(),
                    )),
                }
            }
        }
        found.sort();
        found
    }
}

pub(super) const WRITE: &str =
    "def write(path, text, mode='w'):\n    with open(path, mode) as file: file.write(text)\n";

#[test]
fn later_versions_are_kept() {
    let mut job = Told::new(&[]);
    job.start(&[]);
    job.tell(WRITE);
    job.tell("import os\nfor name in 'changed replaced log deleted'.split(): write(name, 'then\\n')");
    let told = job.checkpoint();
    job.tell("write('changed', 'other text\\n')");
    job.tell("write('new', 'replacement\\n'); os.rename('new', 'replaced')");
    job.tell("write('log', 'more\\n', 'a'); os.unlink('deleted')");
    job.tell(
        "write('made', 'made since\\n'); os.mkdir('dir'); write('dir/inside', 'made in a directory\\n')",
    );
    job.kill(told);
    let said = job.resume(&[]);
    for name in ["changed", "replaced", "log", "deleted"] {
        assert_eq!(job.read(name), "then\n", "{name}: {said}");
    }
    assert!(!job.path("made").exists() && !job.path("dir").exists(), "{said}");
    let kept = job.kept();
    for (name, content) in [
        ("changed", "other text\n"),
        ("replaced", "replacement\n"),
        ("log", "more\n"),
        ("made", "made since\n"),
        ("inside", "made in a directory\n"),
    ] {
        let is_there = kept.iter().any(|(file, text)| file.contains(name) && text == content);
        assert!(is_there, "{name}: {kept:?}\n{said}");
    }
}

#[test]
fn excluded_files_are_left_alone() {
    let mut job = Told::new(&["--files-exclude", "*.cache,scratch"]);
    job.start(&[]);
    job.tell(WRITE);
    job.tell(
        "import os\nos.mkdir('scratch')\nfor name in ('a.cache', 'scratch/b', 'c'): write(name, 'then')",
    );
    let told = job.checkpoint();
    job.tell("for name in ('a.cache', 'scratch/b', 'c'): write(name, 'later')");
    job.tell("for name in ('new.cache', 'scratch/new', 'new'): write(name, 'made since')");
    job.kill(told);
    let said = job.resume(&[]);
    let all = ["a.cache", "scratch/b", "c", "new.cache", "scratch/new", "new"].map(|name| job.read(name));
    assert_eq!(all, ["later", "later", "then", "made since", "made since", ""], "{said}");
}

/// A person edits what the job only reads, and makes files of their own.
fn edits_survive(while_it_runs: bool) {
    let mut job = Told::new(&[]);
    let (small, large) = ("config".to_owned(), "x".repeat(3 << 20));
    for (name, text) in [("config.yaml", &small), ("data.bin", &large)] {
        fs::write(job.path(name), text).unwrap();
    }
    job.start(&[]);
    job.tell(WRITE);
    job.tell("config = open('config.yaml').read(), open('data.bin').read(); write('result', 'then')");
    let told = job.checkpoint();
    job.tell("write('result', 'later')");
    if !while_it_runs {
        // The init records the end of the job.
        job.running.take().expect("a running job").kill_launcher();
        job.forget(told);
    }
    fs::write(job.path("config.yaml"), "edited").unwrap();
    fs::write(job.path("data.bin"), "edited").unwrap();
    fs::write(job.path("notes.txt"), "a person's").unwrap();
    if while_it_runs {
        std::thread::sleep(UNRECORDED);
        job.kill(told);
    }
    let said = job.resume(&[]);
    let all = ["config.yaml", "data.bin", "notes.txt", "result"].map(|name| job.read(name));
    assert_eq!(all, ["edited", "edited", "a person's", "then"], "{said}");
}

#[test]
fn edits_after_the_end_of_the_job_survive() {
    edits_survive(false);
}

/// The kernel reports the process that changes a file to root only.
#[test]
fn edits_while_the_job_runs_survive() {
    edits_survive(true);
}

/// A person also edits a file that the job has written: the job's version is put back, the person's is kept.
#[test]
fn an_edit_of_a_file_of_the_job_is_kept() {
    let mut job = Told::new(&[]);
    job.start(&[]);
    job.tell(WRITE);
    job.tell("write('state', 'then')");
    let told = job.checkpoint();
    job.tell("write('state', 'later')");
    job.kill(told);
    fs::write(job.path("state"), "edited").unwrap();
    let said = job.resume(&[]);
    assert_eq!(job.read("state"), "then", "{said}");
    assert!(job.kept().iter().any(|(_, text)| text == "edited"), "{:?}\n{said}", job.kept());
}

/// Changes of a log that is written all the time are not reported one by one. Its new name is known, whoever has renamed it.
#[test]
fn a_log_that_is_written_all_the_time_is_the_jobs_under_each_name() {
    const LOG: &str =
        "def log(text, file):\n    for line in range(8): file.write(text); file.flush(); time.sleep(0.03)\n";
    let mut job = Told::new(&[]);
    job.start(&[]);
    job.tell(WRITE);
    job.tell(&format!("import time\nfile = open('log', 'a')\n{LOG}log('a', file)"));
    let told = job.checkpoint();
    job.tell("log('b', file); made = open('made', 'a'); log('b', made)");
    for name in ["log", "made"] {
        fs::rename(job.path(name), job.path(&format!("{name}.1"))).unwrap();
    }
    job.tell("log('c', file); log('c', made); write('log', 'new')");
    assert_eq!(job.read("log.1"), format!("{}{}{}", "a".repeat(8), "b".repeat(8), "c".repeat(8)));
    job.kill(told);
    let said = job.resume(&[]);
    assert_eq!(job.read("log"), "a".repeat(8), "{said}");
    assert!(!job.path("log.1").exists() && !job.path("made.1").exists(), "{said}");
    job.tell("log('d', file)");
    let told = job.checkpoint();
    job.tell("log('e', file)");
    job.tell("log('f', file)");
    job.kill(told);
    let said = job.resume(&[]);
    assert_eq!(job.read("log"), format!("{}{}", "a".repeat(8), "d".repeat(8)), "{said}");
}

/// Files cannot be copied for a moment, before the job is frozen and while it is.
#[test]
fn an_error_that_passes_leaves_no_file_out() {
    let mut job = Told::new(&[]);
    let faults: Vec<_> = (1..=6).map(|passage| format!("file-copy@{passage}=eio")).collect();
    job.sandbox.variables.push(("CKPT_FAULT".to_owned(), faults.join(",")));
    job.start(&[]);
    job.tell(WRITE);
    job.tell("write('state', 'then')");
    let told = job.checkpoint();
    job.tell("write('state', 'later')");
    let said = job.running.as_ref().unwrap().said();
    assert_eq!(said.matches("fault point file-copy: eio").count(), 6, "{said}");
    assert!(!said.contains("could not be kept"), "{said}");
    job.kill(told);
    let said = job.resume(&[]);
    assert_eq!(job.read("state"), "then", "{said}");
}

/// All files, with ckpt-run's own left out.
fn tree(top: &Path) -> Tree {
    Tree::read(&top.join("work"))
}

/// A large file of an earlier job, changed in place after the snapshot, is not in the snapshot.
#[test]
fn a_resume_is_refused_before_anything_is_touched() {
    let mut job = Told::new(&["--files-budget", "1MiB"]);
    fs::write(job.path("large"), vec![b'x'; 3 << 20]).unwrap();
    let mut reflink = Command::new("cp");
    reflink.arg("--reflink=always").arg(job.path("large")).arg(job.sandbox.path().join("copy"));
    if reflink.stderr(Stdio::null()).status().unwrap().success() {
        return ckpt_test_skip::skip("target/tests is on a file system with reflinks, which needs no copies");
    }
    job.start(&[]);
    job.tell(WRITE);
    job.tell("write('state', 'then')");
    let told = job.checkpoint();
    job.tell("write('state', 'later'); write('made', 'since')");
    job.tell("with open('large', 'r+b') as file: file.seek(5); file.write(b'changed')");
    job.kill(told);
    let before = tree(job.sandbox.path());
    let mut refused = job.launch(&[]);
    assert_eq!(refused.wait(), 2, "{}", refused.said());
    assert!(refused.said().contains("cannot be put back"), "{}", refused.said());
    assert!(refused.said().contains("work/large was changed"), "{}", refused.said());
    assert_eq!(tree(job.sandbox.path()).differences(&before), [""; 0], "{}", refused.said());

    let said = job.resume(&["--files", "lenient"]);
    assert!(said.contains("work/large"), "{said}");
    assert_eq!(job.read("state"), "then", "{said}");
    assert!(!job.path("made").exists(), "{said}");
    assert_eq!(fs::read(job.path("large")).unwrap()[5..12], *b"changed", "{said}");
}

/// As a database or an array on disk: its holes do not count for `--files-budget`.
#[test]
fn a_sparse_file_is_put_back() {
    const BYTES: u64 = 20 << 30;
    let mut job = Told::new(&["--files-budget", "1MiB"]);
    job.start(&[]);
    job.tell(WRITE);
    let change = |text: &str| {
        format!("with open('sparse', 'r+b') as file: file.seek(15 << 30); file.write(b'{text}')")
    };
    job.tell(&format!("with open('sparse', 'wb') as file: file.truncate({BYTES})"));
    job.tell(&change("then"));
    let told = job.checkpoint();
    job.tell(&change("lost"));
    job.kill(told);
    let said = job.resume(&[]);
    let file = fs::File::open(job.path("sparse")).unwrap();
    let mut content = [0; 4];
    file.read_exact_at(&mut content, 15 << 30).unwrap();
    assert_eq!(&content, b"then", "{said}");
    let meta = file.metadata().unwrap();
    assert!(
        meta.len() == BYTES && meta.blocks() * 512 < 1 << 20,
        "{} in {}: {said}",
        meta.len(),
        meta.blocks()
    );
}

/// How old the last record of what a watched job has written is at most.
const RECORDED_LATELY: Duration = Duration::from_secs(5);

/// The time of the last record of what jobs have written (`jobs/KEY/written/ID` in the store).
fn last_record(store: &Path) -> Option<SystemTime> {
    let entries = |dir: PathBuf| fs::read_dir(dir).into_iter().flatten().flatten();
    let records = entries(store.join("jobs")).flat_map(|job| entries(job.path().join("written")));
    records.filter_map(|record| record.metadata().ok()?.modified().ok()).max()
}
