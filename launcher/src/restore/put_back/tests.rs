//! A directory is captured, changed, and put back: it must be as it was.

use super::*;
use crate::files::capture::{Capture, CapturedFiles, OpenForWriting};
use crate::files::history::FileHistory;
use crate::files::inventory::{Copies, Held, Identity, Inventory, Kind, nanoseconds};
use crate::files::rules::{Coverage, FileOptions, FileRules};
use crate::files::staging::{StagedDir, Staging};
use crate::job::alive::LastAlive;
use crate::restore::file_plan::{Present, inventory_of_open_files};
use crate::sys::path_text::path_text;
use std::collections::HashMap;
use std::io::{Seek, Write};
use std::os::unix::fs::symlink;
use std::time::{Duration, Instant, SystemTime};

/// A job's directory, and a store beside it.
struct Job {
    dir: tempfile::TempDir,
    staging: Staging,
    rules: FileRules,
    history: FileHistory,
    touched: Option<BTreeSet<String>>,
    /// What another job has written.
    others: BTreeSet<String>,
    resumes: usize,
}

/// One snapshot of a job's files.
struct Snapshot {
    inventory: Inventory,
    data: HashMap<String, PathBuf>,
    tree: Vec<String>,
}

impl Job {
    fn new(budget_bytes: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for name in ["work", "store", "kept"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        let options =
            FileOptions { exclude: vec!["excluded".into()], budget_bytes, coverage: Coverage::Strict };
        let rules =
            FileRules::new(&options, vec![dir.path().join("store"), dir.path().join("kept")]).unwrap();
        let staging = Staging::on_disk(&dir.path().join("store/staging")).unwrap();
        let history = FileHistory::new(nanoseconds(SystemTime::now() - Duration::from_secs(1)));
        Self { dir, staging, rules, history, touched: None, others: BTreeSet::new(), resumes: 0 }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join("work").join(name)
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        fs::create_dir_all(self.path(name).parent().unwrap()).unwrap();
        fs::write(self.path(name), content).unwrap();
    }

    fn append(&self, name: &str, content: &str) {
        let mut file = File::options().append(true).create(true).open(self.path(name)).unwrap();
        file.write_all(content.as_bytes()).unwrap();
    }

    fn rename(&self, from: &str, to: &str) {
        fs::rename(self.path(from), self.path(to)).unwrap();
    }

    fn held(&self) -> PathBuf {
        self.dir.path().join("store/held")
    }

    /// Captures the files; those in `open` are open for writing.
    fn capture(&mut self, open: &[&str], append_only: &[&str]) -> Snapshot {
        // Changes after this have a later time than those before.
        std::thread::sleep(Duration::from_millis(30));
        let names =
            |names: &[&str]| names.iter().map(|name| self.path(name).to_str().unwrap().to_owned()).collect();
        let open = OpenForWriting {
            writable: names(open),
            append_only: names(append_only),
            ..OpenForWriting::default()
        };
        let work = self.path("");
        let cwd = work.to_str().unwrap().trim_end_matches('/').to_owned();
        let (held, staged) = (self.held(), self.staging.subdir(&self.resumes.to_string()).unwrap());
        self.resumes += 1;
        self.history.touched.clone_from(&self.touched);
        let mut capture = Capture::new(&self.rules, &mut self.history, "/".into(), &cwd, &staged, held);
        capture.prepare();
        let mut files: CapturedFiles =
            capture.freeze(&open, Instant::now() + Duration::from_secs(60)).unwrap();
        let inventory = files.take_inventory("/");
        let data = self.store(&files, &staged);
        std::thread::sleep(Duration::from_millis(30));
        Snapshot { inventory, data, tree: self.tree() }
    }

    fn store(&self, files: &CapturedFiles, staged: &StagedDir) -> HashMap<String, PathBuf> {
        let mut stored = HashMap::new();
        for (path, source) in files.sources(staged) {
            let mut content = vec![0; usize::try_from(source.bytes()).unwrap()];
            source.read_at(0, &mut content).unwrap();
            let at = self.dir.path().join("store").join(format!(
                "{}-{}",
                self.resumes,
                path.as_str().replace('/', "-")
            ));
            fs::write(&at, content).unwrap();
            stored.insert(path.as_str().to_owned(), at);
        }
        stored
    }

    fn plan(&self, snapshot: &Snapshot) -> Result<FilePlan> {
        let now = nanoseconds(SystemTime::now());
        self.plan_after(snapshot, LastAlive { until_ns: now, known_until_ns: now, ..LastAlive::default() })
    }

    /// The plan for a job that last ran at this time, on the same boot.
    fn plan_after(&self, snapshot: &Snapshot, alive: LastAlive) -> Result<FilePlan> {
        let alive = LastAlive { is_same_boot: true, ..alive };
        let (held, outputs, cwd) = (self.held(), BTreeSet::new(), self.path(""));
        let cwd = cwd.to_str().unwrap().trim_end_matches('/');
        let present = Present {
            rules: &self.rules,
            touched: self.touched.as_ref(),
            cwd,
            others: &self.others,
            outputs: &outputs,
            alive: &alive,
            held: &held,
        };
        let manifest = crate::checkpoint::attempt::tests::manifest(Vec::new());
        FilePlan::make(&manifest, &snapshot.inventory, &present, &[])
    }

    fn put_back(&mut self, snapshot: &Snapshot) -> Result<()> {
        let plan = self.plan(snapshot)?;
        self.resumes += 1;
        let kept = self.dir.path().join("kept").join(self.resumes.to_string());
        fs::create_dir(&kept).unwrap();
        let open = |data: &RelPath| File::open(&snapshot.data[data.as_str()]);
        check(&plan, &open)?;
        PutBack::new(&plan, &open, Kept::at(Some(kept), "x".into())).apply()
    }

    /// Every name with kind, content, mode, owner and group of hard links.
    fn tree(&self) -> Vec<String> {
        let mut inodes: HashMap<u64, String> = HashMap::new();
        let mut found = Vec::new();
        for entry in walkdir::WalkDir::new(self.path("")).sort_by_file_name() {
            let entry = entry.unwrap();
            let meta = entry.metadata().unwrap();
            let name = entry.path().strip_prefix(self.path("")).unwrap().display().to_string();
            let content = match meta.file_type() {
                kind if kind.is_file() => blake3::hash(&fs::read(entry.path()).unwrap()).to_hex().to_string(),
                kind if kind.is_symlink() => fs::read_link(entry.path()).unwrap().display().to_string(),
                _ => String::new(),
            };
            let first = if meta.is_file() {
                inodes.entry(meta.ino()).or_insert(name.clone()).clone()
            } else {
                String::new()
            };
            found.push(format!("{name} {:o} {} {content} = {first}", meta.mode(), meta.uid()));
        }
        found
    }

    /// All content that was kept.
    fn kept(&self) -> String {
        let files = walkdir::WalkDir::new(self.dir.path().join("kept")).into_iter().flatten();
        let files = files.filter(|entry| entry.file_type().is_file());
        files.map(|entry| String::from_utf8_lossy(&fs::read(entry.path()).unwrap()).into_owned()).collect()
    }
}

/// Captures what `before` makes, changes it with `after`, and puts it back, twice.
fn round_trip(before: impl Fn(&Job), open: &[&str], after: impl Fn(&Job)) -> Job {
    let mut job = Job::new(1 << 30);
    before(&job);
    let snapshot = job.capture(open, &[]);
    after(&job);
    job.put_back(&snapshot).unwrap();
    assert_eq!(job.tree(), snapshot.tree);
    let kept = job.kept();
    job.put_back(&snapshot).unwrap();
    assert_eq!((job.tree(), job.kept()), (snapshot.tree.clone(), kept), "nothing was left to do");
    // What was put back can be captured and changed again.
    let again = job.capture(open, &[]);
    after(&job);
    job.put_back(&again).unwrap();
    assert_eq!(job.tree(), snapshot.tree);
    job
}

#[test]
fn appended_and_rewritten_files() {
    let job = round_trip(
        |job| {
            job.write("log", "one\n");
            job.write("counter", "1");
            job.write("open.db", "pages");
        },
        &["open.db"],
        |job| {
            job.append("log", "two\n");
            job.write("counter", "12");
            let mut db = File::options().write(true).open(job.path("open.db")).unwrap();
            db.write_all(b"PAGES and more").unwrap();
        },
    );
    let kept = job.kept();
    assert!(kept.contains("two\n") && kept.contains('2') && kept.contains("PAGES and more"), "{kept}");
}

#[test]
fn a_rewritten_file_keeps_its_inode() {
    let mut job = Job::new(1 << 30);
    job.write("db", "before");
    let snapshot = job.capture(&["db"], &[]);
    let inode_before = inode(&job.path("db"));
    job.write("db", "after, and longer");
    job.rename("db", "elsewhere");
    job.write("db", "another");
    job.put_back(&snapshot).unwrap();
    assert_eq!(job.tree(), snapshot.tree);
    assert_eq!(inode(&job.path("db")), inode_before);
}

/// Neither what is put back nor what is kept has the length of a file in blocks.
#[test]
fn a_rewritten_file_keeps_its_holes() {
    let write = |path: &Path, what: &[u8]| {
        let file = File::options().write(true).create(true).truncate(false).open(path).unwrap();
        file.set_len(200 << 20).unwrap();
        file.write_at(what, 100 << 20).unwrap();
        file.sync_all().unwrap();
    };
    let mut job = Job::new(1 << 30);
    write(&job.path("sparse"), b"then");
    let snapshot = job.capture(&["sparse"], &[]);
    write(&job.path("sparse"), b"later");
    job.put_back(&snapshot).unwrap();
    assert_eq!(job.tree(), snapshot.tree);
    let kept = walkdir::WalkDir::new(job.dir.path().join("kept")).into_iter().flatten();
    let kept =
        kept.filter(|entry| entry.file_type().is_file() && entry.metadata().unwrap().len() == 200 << 20);
    let files: Vec<_> = kept.map(walkdir::DirEntry::into_path).chain([job.path("sparse")]).collect();
    assert_eq!(files.len(), 2, "the later version is kept: {files:?}");
    for file in files {
        assert!(file.metadata().unwrap().blocks() < 4096, "{}", file.display());
    }
}

#[test]
fn replaced_deleted_and_new_files() {
    let job = round_trip(
        |job| {
            job.write("ckpt", "epoch 1");
            job.write("gone/deep/file", "x");
            job.write("old", "y");
            symlink("ckpt", job.path("latest")).unwrap();
        },
        &[],
        |job| {
            job.write("ckpt.tmp", "epoch 2");
            job.rename("ckpt.tmp", "ckpt");
            fs::remove_dir_all(job.path("gone")).unwrap();
            fs::remove_file(job.path("old")).unwrap();
            fs::create_dir(job.path("old")).unwrap();
            job.write("old/now a directory", "z");
            job.write("new/tree/file", "made since");
            fs::remove_file(job.path("latest")).unwrap();
            symlink("elsewhere", job.path("latest")).unwrap();
        },
    );
    let kept = job.kept();
    assert!(kept.contains("epoch 2") && kept.contains("made since") && kept.contains('z'), "{kept}");
}

#[test]
fn rotated_logs_and_renamed_directories() {
    round_trip(
        |job| {
            job.write("log", "newest");
            job.write("log.1", "older");
            job.write("log.2", "oldest");
            job.write("run/a", "1");
            job.write("run/b/c", "2");
        },
        &["log"],
        |job| {
            job.append("log", " more");
            fs::remove_file(job.path("log.2")).unwrap();
            job.rename("log.1", "log.2");
            job.rename("log", "log.1");
            job.write("log", "after");
            job.rename("run", "run.done");
            job.append("run.done/a", "more");
        },
    );
}

#[test]
fn modes_and_hard_links() {
    round_trip(
        |job| {
            job.write("a", "shared");
            fs::hard_link(job.path("a"), job.path("b")).unwrap();
            fs::hard_link(job.path("a"), job.path("c")).unwrap();
            job.write("secret", "1");
            fs::set_permissions(job.path("secret"), Permissions::from_mode(0o600)).unwrap();
        },
        &[],
        |job| {
            fs::remove_file(job.path("b")).unwrap();
            job.write("b", "its own");
            job.append("a", " and more");
            fs::remove_file(job.path("c")).unwrap();
            fs::set_permissions(job.path("secret"), Permissions::from_mode(0o644)).unwrap();
        },
    );
}

/// The former file of a name is found at a name that was made since.
#[test]
fn a_replaced_file_with_a_further_name() {
    round_trip(
        |job| {
            job.write("a", "shared");
            fs::hard_link(job.path("a"), job.path("b")).unwrap();
        },
        &[],
        |job| {
            fs::remove_file(job.path("a")).unwrap();
            job.write("a", "its own");
            fs::hard_link(job.path("b"), job.path("c")).unwrap();
        },
    );
}

/// A name that the job has made since is kept with its content, which does not change with the job's file.
#[test]
fn what_is_kept_is_no_further_name_of_a_file_of_the_job() {
    let job = round_trip(
        |job| {
            job.write("a", "shared");
            fs::hard_link(job.path("a"), job.path("x")).unwrap();
        },
        &[],
        |job| {
            fs::remove_file(job.path("x")).unwrap();
            job.rename("a", "c");
            fs::create_dir(job.path("dir")).unwrap();
            for later in ["b", "dir/b"] {
                fs::hard_link(job.path("c"), job.path(later)).unwrap();
            }
            job.append("b", " and more");
        },
    );
    assert_eq!(fs::metadata(job.path("a")).unwrap().nlink(), 2);
    let kept = walkdir::WalkDir::new(job.dir.path().join("kept")).into_iter().map(|entry| entry.unwrap());
    let kept: Vec<_> = kept.filter(|entry| entry.file_name().to_string_lossy().ends_with('b')).collect();
    assert!(kept.len() >= 2, "{kept:?}");
    for entry in kept {
        assert_eq!(fs::read_to_string(entry.path()).unwrap(), "shared and more", "{entry:?}");
    }
}

/// The kernel reports only the name that a file was written through.
#[test]
fn a_file_that_is_written_through_another_name() {
    let mut job = Job::new(1 << 30);
    job.write("a", "1");
    fs::hard_link(job.path("a"), job.path("b")).unwrap();
    let path = |job: &Job, name: &str| job.path(name).to_str().unwrap().to_owned();
    job.touched = Some([path(&job, "a"), path(&job, "b")].into());
    let first = job.capture(&[], &[]);
    let manifest = crate::checkpoint::attempt::tests::manifest(Vec::new());
    job.history.committed(&manifest, first.inventory);
    job.append("b", "2");
    job.touched = Some([path(&job, "b")].into());
    let second = job.capture(&[], &[]);
    job.append("b", "3");
    job.put_back(&second).unwrap();
    assert_eq!(job.tree(), second.tree);
    assert_eq!(fs::read_to_string(job.path("a")).unwrap(), "12");
}

/// The kernel reports the names that files had when they were written, and the names of the renamed directories.
#[test]
fn directories_that_are_filled_and_take_the_place_of_others() {
    let mut job = Job::new(1 << 30);
    let fill = |job: &Job, content: &str| {
        job.write("new/file", content);
        job.write(&format!("new/{content}"), content);
        let _ = fs::remove_dir_all(job.path("now"));
        job.rename("new", "now");
    };
    let touched = |job: &Job, names: &[&str]| {
        Some(names.iter().map(|name| job.path(name).to_str().unwrap().to_owned()).collect())
    };
    fill(&job, "1");
    job.touched = touched(&job, &["new", "now", "new/file", "new/1"]);
    let snapshot = job.capture(&[], &[]);
    fill(&job, "2");
    job.touched = touched(&job, &["new", "now", "now/file", "now/1", "new/2"]);
    job.put_back(&snapshot).unwrap();
    assert_eq!(job.tree(), snapshot.tree);
    fill(&job, "3");
    job.touched = touched(&job, &["new", "now"]);
    job.put_back(&snapshot).unwrap();
    assert_eq!(job.tree(), snapshot.tree);
}

/// Above the budget, a closed file is kept by a hard link, and a file that grows by its checksum.
#[test]
fn files_beyond_the_budget() {
    let mut job = Job::new(0);
    job.write("model", "weights".repeat(1000));
    job.write("stream", "part 1");
    let snapshot = job.capture(&["stream"], &[]);
    assert!(snapshot.data.is_empty(), "nothing was copied");
    fs::remove_file(job.path("model")).unwrap();
    job.append("stream", " and part 2");
    job.rename("stream", "stream.done");
    job.put_back(&snapshot).unwrap();
    assert_eq!(job.tree(), snapshot.tree);
    // What changed in place cannot be put back, and nothing is changed.
    job.write("model", "overwritten");
    job.write("new", "x");
    let before = job.tree();
    let error = job.put_back(&snapshot).unwrap_err().to_string();
    assert!(error.contains("/work/model has 11 bytes, at the snapshot it had 7000"), "{error}");
    assert!(error.contains("No file was changed") && error.contains("--files lenient"), "{error}");
    assert_eq!(job.tree(), before);
    job.rules.coverage = Coverage::Lenient;
    job.put_back(&snapshot).unwrap();
    assert_eq!(fs::read_to_string(job.path("model")).unwrap(), "overwritten");
    assert!(!job.path("new").exists());
}

/// CRIU opens a file of the job only if it has the length that it had.
#[test]
fn open_files_beyond_the_budget_that_are_left_as_they_are_keep_their_length() {
    for is_replaced in [false, true] {
        let mut job = Job::new(0);
        job.write("stream", "part 1");
        let snapshot = job.capture(&["stream"], &[]);
        if is_replaced {
            fs::remove_file(job.path("stream")).unwrap();
        }
        job.write("stream", "PART 1, part 2");
        let error = job.put_back(&snapshot).unwrap_err().to_string();
        assert!(error.contains("--files lenient"), "{error}");
        job.rules.coverage = if is_replaced { Coverage::Lenient } else { Coverage::Off };
        job.put_back(&snapshot).unwrap();
        assert_eq!(fs::read_to_string(job.path("stream")).unwrap(), "PART 1");
        job.write("stream", "part");
        let error = job.put_back(&snapshot).unwrap_err().to_string();
        assert!(error.contains("has 4 bytes, at the snapshot it had 6"), "{error}");
        assert!(!error.contains("--files lenient"), "{error}");
    }
}

/// Nobody may write to an immutable file or change names in an immutable directory, and only some users those of others.
#[test]
fn what_may_not_be_written_is_refused_before_anything_is_changed() {
    let mut job = Job::new(1 << 30);
    fs::create_dir(job.path("dir")).unwrap();
    fs::create_dir(job.path("full")).unwrap();
    for name in ["log", "grown", "appended", "rewritten", "as-it-was", "full/as-it-was"] {
        job.write(name, "1");
    }
    let snapshot = job.capture(&["log", "grown", "appended", "rewritten", "as-it-was"], &["full/as-it-was"]);
    ["log", "grown", "appended"].into_iter().for_each(|name| job.append(name, "2"));
    job.write("made", "2");
    job.append("as-it-was", "");
    fs::write(job.path("rewritten"), "2").unwrap();
    job.write("dir/new", "2");
    let before = job.tree();
    let dir = job.path("");
    let chattr = |flag: &str, name: &str| {
        let mut chattr = std::process::Command::new("chattr");
        chattr.arg(flag).arg(dir.join(name)).stderr(std::process::Stdio::null());
        chattr.status().is_ok_and(|status| status.success())
    };
    let immutable = ["grown", "rewritten", "as-it-was", "dir", "full", "made"];
    if !immutable.iter().all(|name| chattr("+i", name)) || !chattr("+a", "appended") {
        return ckpt_test_skip::skip("the file system or the user cannot make a file immutable");
    }
    let mut results = Vec::new();
    for name in ["grown", "rewritten", "dir", "made", "appended"] {
        let refused = job
            .plan(&snapshot)
            .and_then(|plan| check(&plan, &|data: &RelPath| File::open(&snapshot.data[data.as_str()])));
        results.push((name, refused, job.tree() == before));
        assert!(chattr("-ia", name));
    }
    let done = job.put_back(&snapshot);
    assert!(["as-it-was", "full"].into_iter().all(|name| chattr("-i", name)));
    for (name, refused, is_unchanged) in results {
        let error = refused.expect_err(name).to_string();
        let what = if name == "dir" { "names in " } else { "" };
        let path = job.path(name).display().to_string();
        assert!(
            error.contains(&format!("{what}{path} cannot be")) && error.contains("No file was changed"),
            "{error}"
        );
        assert!(!error.contains("as-it-was") && !error.contains("full") && is_unchanged, "{error}");
    }
    done.unwrap();
    assert_eq!(job.tree(), snapshot.tree);
}

/// The job has moved one of its open files to the name of another: neither is left in its place.
#[test]
fn an_open_file_is_not_left_as_another_one() {
    let mut job = Job::new(0);
    job.write("a", "first");
    job.write("b", "second");
    let snapshot = job.capture(&["a", "b"], &[]);
    fs::write(job.path("b"), "SECOND and more").unwrap();
    job.rename("b", "a");
    job.rules.coverage = Coverage::Lenient;
    let before = job.tree();
    let error = job.put_back(&snapshot).unwrap_err().to_string();
    assert!(error.contains("/work/a ") && error.contains("No file was changed"), "{error}");
    assert_eq!(job.tree(), before);
}

/// Of a file that is open and too large to be copied, there is a checksum, which is of no use if it changes in place.
#[test]
fn a_file_beyond_the_budget_that_changes_in_place_is_named() {
    let mut job = Job::new(10);
    let manifest = crate::checkpoint::attempt::tests::manifest(Vec::new());
    job.write("database", "version 1 of it");
    job.write("log", "line 1 of the log");
    let open = ["database", "log"];
    let first = job.capture(&open, &[]);
    assert!(first.inventory.uncovered.is_empty(), "{:?}", first.inventory.uncovered);
    job.history.committed(&manifest, first.inventory);
    let mut file = File::options().write(true).open(job.path("database")).unwrap();
    file.write_all(b"version 2").unwrap();
    job.append("log", "line 2");
    let second = job.capture(&open, &[]);
    let named: Vec<_> = second.inventory.uncovered.iter().collect();
    let [(path, why)] = named[..] else { panic!("{named:?}") };
    assert!(path.ends_with("/work/database"), "{path}");
    assert_eq!(why, "it has 15 B, and --files-budget is 10 B");
}

/// A reflink is used as long as nobody has written to it, also if it has its old length and time of the content.
#[test]
fn an_altered_reflink_is_not_put_back() {
    let mut job = Job::new(0);
    job.write("model", "weights".repeat(1000));
    // Not every file system has reflinks. A plan makes none.
    let at = job.held().join("reflink");
    fs::create_dir(job.held()).unwrap();
    fs::write(&at, "weights".repeat(1000)).unwrap();
    let mut snapshot = job.capture(&[], &[]);
    let path = job.path("model").to_str().unwrap().to_owned();
    let entry = snapshot.inventory.entries.get_mut(&path).unwrap();
    let held = Held { name: "reflink".into(), is_reflink: true, identity: Identity::of_path(&at) };
    entry.kind = Kind::File(Copies { held: Some(held), ..Copies::default() });
    fs::remove_file(&path).unwrap();
    let files = job.plan(&snapshot).unwrap().files;
    assert!(matches!(files[Path::new(&path)].1, FileAction::Reflink(_)));

    let modified = fs::metadata(&at).unwrap().modified().unwrap();
    let mut file = File::options().write(true).open(&at).unwrap();
    file.write_all(b"W").unwrap();
    file.set_modified(modified).unwrap();
    let error = job.plan(&snapshot).map(|plan| plan.files).unwrap_err().to_string();
    assert!(error.contains("/work/model is missing now"), "{error}");
}

/// A log that is open for appending is not copied. One that was cut and has grown again is refused.
#[test]
fn a_log_that_is_open_for_appending() {
    let mut job = Job::new(1 << 30);
    job.write("log", "line\n".repeat(1 << 20));
    let snapshot = job.capture(&["log"], &["log"]);
    assert!(snapshot.data.is_empty());
    job.append("log", "more\n");
    job.put_back(&snapshot).unwrap();
    assert_eq!(job.tree(), snapshot.tree);
    job.write("log", "other\n".repeat(1 << 20));
    let error = job.put_back(&snapshot).unwrap_err().to_string();
    assert!(error.contains("was changed or replaced since"), "{error}");
}

/// Where it is known what the job touches, files of others are left alone.
#[test]
fn what_the_job_has_not_touched_is_left_alone() {
    let mut job = Job::new(1 << 30);
    job.write("train.py", "version 1");
    job.write("log", "1");
    let touched = |job: &Job, names: &[&str]| -> Option<BTreeSet<String>> {
        Some(names.iter().map(|name| job.path(name).to_str().unwrap().to_owned()).collect())
    };
    job.touched = touched(&job, &["log"]);
    let snapshot = job.capture(&[], &[]);
    job.touched = touched(&job, &["log", "made"]);
    job.write("train.py", "version 2");
    job.write("of a person", "x");
    job.write("log", "22");
    job.write("made", "y");
    job.put_back(&snapshot).unwrap();
    let read = |name: &str| fs::read_to_string(job.path(name)).unwrap();
    assert_eq!(
        (read("train.py"), read("log"), read("of a person")),
        ("version 2".into(), "1".into(), "x".into())
    );
    assert!(!job.path("made").exists());
    // A file that the snapshot does not have.
    let manifest = crate::checkpoint::attempt::tests::manifest(Vec::new());
    job.history.committed(&manifest, snapshot.inventory);
    job.write("older", "x");
    job.touched = touched(&job, &["log"]);
    let snapshot = job.capture(&[], &[]);
    job.touched = touched(&job, &["older"]);
    job.append("older", "changed");
    let error = job.put_back(&snapshot).unwrap_err().to_string();
    assert!(
        error.contains("/work/older was changed since the snapshot, which does not have its content"),
        "{error}"
    );
}

/// A person edits files after the job has died.
#[test]
fn changes_after_the_job_has_ended_are_not_the_jobs() {
    let mut job = Job::new(1 << 30);
    job.write("config", "1");
    job.history.begun_ns = nanoseconds(SystemTime::now() + Duration::from_secs(5));
    let snapshot = job.capture(&[], &[]);
    let ended_ns = nanoseconds(SystemTime::now());
    std::thread::sleep(Duration::from_millis(30));
    job.write("config", "edited");
    job.write("notes", "x");
    let alive = LastAlive { until_ns: ended_ns, ..LastAlive::default() };
    let plan = job.plan_after(&snapshot, alive).unwrap();
    assert!(plan.is_empty() && plan.left_alone.is_empty(), "{plan:?}");
}

/// The log of a pipe into which the output of the next run goes is there right after the kill.
#[test]
fn a_new_file_that_somebody_else_writes_is_not_the_jobs() {
    let mut job = Job::new(1 << 30);
    job.write("log", "1");
    let snapshot = job.capture(&["log"], &[]);
    let touched =
        |job: &Job, names: &[&str]| Some(names.iter().map(|name| path_text(job.path(name))).collect());
    job.touched = touched(&job, &["log"]);
    job.write("of the job", "x");
    job.write("of somebody", "x");
    let open = File::options().append(true).open(job.path("of somebody")).unwrap();
    let alive = LastAlive { until_ns: i64::MAX, known_until_ns: 1, ..LastAlive::default() };
    let plan = job.plan_after(&snapshot, alive).unwrap();
    assert_eq!(plan.aside, [job.path("of the job")].into(), "{plan:?}");
    // One that the job is known to have made is moved aside, whoever has it open.
    job.touched = touched(&job, &["log", "of somebody"]);
    assert!(job.plan(&snapshot).unwrap().aside.contains(&job.path("of somebody")));
    // Where nothing is recorded, and all changes count as the job's.
    job.touched = None;
    job.rules.coverage = Coverage::Strict;
    let plan = job.plan(&snapshot).unwrap();
    assert_eq!(plan.aside, [job.path("of the job")].into(), "{plan:?}");
    drop(open);
}

/// A file that the job had never written has changed in the last moments, of which records may be missing: nobody knows by
/// whom, and that is said.
#[test]
fn a_change_in_the_last_moments_is_told() {
    let mut job = Job::new(1 << 30);
    let path = |job: &Job, name: &str| job.path(name).to_str().unwrap().to_owned();
    for name in ["log", "config", "of another job"] {
        job.write(name, "1");
    }
    job.touched = Some([path(&job, "log")].into());
    let snapshot = job.capture(&[], &[]);
    let recorded_ns = nanoseconds(SystemTime::now());
    std::thread::sleep(Duration::from_millis(30));
    job.write("config", "2");
    job.write("of another job", "2");
    job.others = [path(&job, "of another job")].into();
    let alive = |known_until_ns| LastAlive { until_ns: i64::MAX, known_until_ns, ..LastAlive::default() };
    let plan = job.plan_after(&snapshot, alive(recorded_ns)).unwrap();
    assert!(plan.is_empty() && plan.left_alone == [path(&job, "config")], "{plan:?}");
    let plan = job.plan_after(&snapshot, alive(i64::MAX)).unwrap();
    assert!(plan.is_empty() && plan.left_alone.is_empty(), "all is recorded: {plan:?}");
}

/// The job may have deleted files in the last moments, of which records may be missing: what can come back does.
#[test]
fn a_file_that_is_deleted_in_the_last_moments_comes_back() {
    let mut job = Job::new(1 << 30);
    let path = |job: &Job, name: &str| job.path(name).to_str().unwrap().to_owned();
    for name in ["log", "old", "moved", "moved before"] {
        job.write(name, name);
    }
    job.write("large", "x".repeat(2 << 20));
    fs::hard_link(job.path("large"), job.path("large too")).unwrap();
    fs::hard_link(job.path("old"), job.path("old too")).unwrap();
    symlink("old", job.path("latest")).unwrap();
    job.touched = Some([path(&job, "log")].into());
    let snapshot = job.capture(&[], &[]);
    std::thread::sleep(Duration::from_millis(30));
    // By a person, and its directory changes again later.
    fs::rename(job.path("moved before"), job.path("kept")).unwrap();
    std::thread::sleep(Duration::from_millis(30));
    let recorded_ns = nanoseconds(SystemTime::now());
    std::thread::sleep(Duration::from_millis(30));
    for name in ["old", "old too", "large", "large too", "latest"] {
        fs::remove_file(job.path(name)).unwrap();
    }
    fs::rename(job.path("moved"), job.path("elsewhere")).unwrap();
    let alive = |known_until_ns| LastAlive { until_ns: i64::MAX, known_until_ns, ..LastAlive::default() };
    let plan = job.plan_after(&snapshot, alive(i64::MAX)).unwrap();
    assert!(plan.is_empty() && plan.left_alone.is_empty(), "all is recorded: {plan:?}");
    let plan = job.plan_after(&snapshot, alive(recorded_ns)).unwrap();
    let names = |names: &[&str]| names.iter().map(|name| path(&job, name)).collect::<Vec<_>>();
    assert_eq!(
        plan.left_alone,
        names(&["large", "large too", "moved before"]),
        "the snapshot does not have the first one"
    );
    assert_eq!(plan.come_back, names(&["latest", "moved", "old", "old too"]));
    assert_eq!(plan.hard_links, [(job.path("old too"), job.path("old"))].into());
    let planned: Vec<_> = plan.files.iter().map(|(path, (_, action))| (path.clone(), action)).collect();
    let [(moved, FileAction::Move(from)), (old, FileAction::Replace { at: None, .. })] = &planned[..] else {
        panic!("{planned:?}")
    };
    assert_eq!([moved, from, old], ["moved", "elsewhere", "old"].map(|name| job.path(name)).each_ref());
    assert!(plan.symlinks.contains_key(&job.path("latest")) && plan.aside.is_empty(), "{plan:?}");
}

/// Another machine: what was written since the snapshot is not known.
#[test]
fn only_known_files_are_put_back_where_nothing_is_recorded() {
    let mut job = Job::new(1 << 30);
    job.rules.coverage = Coverage::Auto;
    job.history.track(true);
    job.write("log", "1");
    job.write("of a person", "1");
    job.touched = Some([job.path("log").to_str().unwrap().to_owned()].into());
    let snapshot = job.capture(&[], &[]);
    job.touched = None;
    for name in ["log", "of a person", "made"] {
        job.write(name, "later");
    }
    job.put_back(&snapshot).unwrap();
    let read = |name: &str| fs::read_to_string(job.path(name)).unwrap();
    assert_eq!(["log", "of a person", "made"].map(read), ["1", "later", "later"]);
    // Where nothing is recorded from the beginning, only open files are looked at.
    job.history = FileHistory::new(0);
    let snapshot = job.capture(&["log"], &[]);
    let entries = snapshot.inventory.entries.keys().filter(|path| path.contains("/work/"));
    assert_eq!(entries.collect::<Vec<_>>(), [job.path("log").to_str().unwrap()]);
}

/// The last moments are not recorded: what another job has written then is not moved away.
#[test]
fn files_of_another_job_in_the_same_directory() {
    let mut job = Job::new(1 << 30);
    job.write("log", "1");
    job.touched = Some([job.path("log").to_str().unwrap().to_owned()].into());
    let snapshot = job.capture(&[], &[]);
    job.write("of another job", "x");
    job.write("made", "y");
    job.others = [job.path("of another job").to_str().unwrap().to_owned()].into();
    let killed = LastAlive { until_ns: i64::MAX, known_until_ns: 1, ..LastAlive::default() };
    let plan = job.plan_after(&snapshot, killed).unwrap();
    assert_eq!(plan.aside, [job.path("made")].into());
}

/// What has not changed is not read again, and what is excluded is not touched.
#[test]
fn unchanged_and_excluded_files() {
    let mut job = Job::new(1 << 30);
    job.write("data", "content");
    job.write("excluded/cache", "1");
    let first = job.capture(&[], &[]);
    let manifest = crate::checkpoint::attempt::tests::manifest(Vec::new());
    job.history.committed(&manifest, first.inventory.clone());
    let second = job.capture(&[], &[]);
    let entries = |snapshot: &Snapshot| snapshot.inventory.entries.keys().cloned().collect::<Vec<_>>();
    assert_eq!(entries(&first), entries(&second));
    assert!(!entries(&first).iter().any(|path| path.contains("excluded")));
    job.write("excluded/cache", "2");
    assert!(job.plan(&second).unwrap().is_empty());
    let mut file = File::options().write(true).open(job.path("data")).unwrap();
    file.seek(io::SeekFrom::Start(3)).unwrap();
    file.write_all(b"T").unwrap();
    job.put_back(&second).unwrap();
    assert_eq!(job.tree().iter().filter(|line| !line.contains("cache")).count(), first.tree.len() - 1);
    assert_eq!(fs::read_to_string(job.path("data")).unwrap(), "content");
}

/// Snapshots of older versions list only the files that were open, with their lengths.
#[test]
fn a_snapshot_without_an_inventory() {
    let mut job = Job::new(1 << 30);
    for (name, content) in [("grown", "old|new"), ("same", "abc"), ("other", "x")] {
        job.write(name, content);
    }
    let open = |name: &str, size_bytes| ckpt_snapshot::OpenFile {
        path: job.path(name).to_str().unwrap().into(),
        size_bytes,
    };
    let manifest = |files| crate::checkpoint::attempt::tests::manifest(files);
    let snapshot = |manifest: &ckpt_snapshot::Manifest| Snapshot {
        inventory: inventory_of_open_files(manifest),
        data: HashMap::new(),
        tree: Vec::new(),
    };
    let good = snapshot(&manifest(vec![open("grown", 4), open("same", 3)]));
    let short = snapshot(&manifest(vec![open("same", 4)]));
    let missing = snapshot(&manifest(vec![open("missing", 4)]));
    let directory = snapshot(&manifest(vec![open("", 4)]));
    job.put_back(&good).unwrap();
    let read = |name: &str| fs::read_to_string(job.path(name)).unwrap();
    assert_eq!((read("grown"), read("same"), read("other")), ("old|".into(), "abc".into(), "x".into()));
    assert!(job.kept().contains("new"));
    let mut refused = |snapshot: &Snapshot| job.put_back(snapshot).unwrap_err().to_string();
    assert!(refused(&short).contains("has 3 bytes, at the snapshot it had 4"));
    assert!(refused(&missing).contains("is missing now"));
    assert!(refused(&directory).contains("is missing now") || refused(&directory).contains("work"));
}
