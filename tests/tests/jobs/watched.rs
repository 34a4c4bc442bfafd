//! Monitoring of jobs: metrics over HTTP, `status --watch`, and secrets that neither may show.

use ckpt_run_tests::{Running, Sandbox, python, until};
use std::fs;
use std::io::Write;
use std::net::TcpStream;
use std::process::Command;

/// A job that waits for the file `go`; further arguments are its own.
fn start(sandbox: &Sandbox, options: &[&str], arguments: &[&str]) -> Running {
    let script = ": > ready; while [ ! -e go ]; do sleep 0.05; done; echo done";
    let command = ["--", "sh", "-c", script, "train"];
    let argv = options.iter().chain(&command).chain(arguments);
    let mut job = sandbox.start("job", argv);
    job.until("the job is ready", || sandbox.path().join("ready").exists().then_some(()));
    job.until_answering(sandbox);
    job
}

fn finish(sandbox: &Sandbox, mut job: Running) {
    fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0, "{}", job.said());
}

/// Python's own HTTP client.
fn fetch(url: &str) -> Result<String, String> {
    let script = "import sys, urllib.request\nwith urllib.request.urlopen(sys.argv[1]) as answer:\n    print(answer.headers['Content-Type']); print(answer.read().decode(), end='')";
    let output = Command::new(python()).args(["-c", script, url]).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

fn value(page: &str, row: &str) -> Option<f64> {
    let line = page.lines().find_map(|line| line.strip_prefix(row))?;
    Some(line.trim().parse().unwrap())
}

#[test]
fn metrics_are_scraped() {
    let sandbox = Sandbox::new();
    let job = start(&sandbox, &["--job", "watched", "--metrics", "0"], &[]);
    let said = job.said();
    let url = said.split("metrics are at ").nth(1).unwrap().split_whitespace().next().unwrap();
    assert!(url.starts_with("http://127.0.0.1:") && url.ends_with("/metrics"), "{url}");
    let page = fetch(url).unwrap();
    assert!(page.starts_with("text/plain; version=0.0.4"), "{page}");
    let saved = r#"ckpt_run_snapshots_total{job="watched",result="saved"}"#;
    let age = r#"ckpt_run_newest_snapshot_age_seconds{job="watched"}"#;
    assert_eq!((value(&page, saved), value(&page, age)), (Some(0.0), None), "{page}");
    job.checkpoint(&sandbox);
    job.checkpoint(&sandbox);
    let page = fetch(url).unwrap();
    assert_eq!(value(&page, saved), Some(2.0), "{page}");
    assert!((0.0..60.0).contains(&value(&page, age).unwrap()), "{page}");
    let snapshots = sandbox.json(["ls", "--json"]);
    let sum =
        |name: &str| snapshots.as_array().unwrap().iter().map(|row| row[name].as_f64().unwrap()).sum::<f64>();
    let bytes = |kind: &str| format!(r#"ckpt_run_snapshot_bytes_total{{job="watched",kind="{kind}"}}"#);
    assert_eq!(value(&page, &bytes("logical")), Some(sum("bytes")), "{page}");
    assert_eq!(value(&page, &bytes("stored")), Some(sum("stored_bytes")), "{page}");
    let stall_s = value(&page, r#"ckpt_run_stall_seconds_total{job="watched"}"#).unwrap();
    assert!((stall_s - sum("stall_s")).abs() < 1e-6 && stall_s > 0.0, "{page}");
    let durable_s = value(&page, r#"ckpt_run_durable_seconds_total{job="watched"}"#).unwrap();
    assert!(durable_s > stall_s, "{page}");
    let class_s = |class: &str| {
        let name = format!(r#"ckpt_run_time_seconds{{class="{class}",job="watched"}}"#);
        value(&page, &name).unwrap_or_else(|| panic!("{class}: {page}"))
    };
    let classes_s = ["productive", "stall", "redone", "restart", "waiting", "hang", "away"].map(class_s);
    assert!(classes_s[0] > 0.0 && (classes_s[1] - stall_s).abs() < 0.01, "{page}");
    let effective = value(&page, r#"ckpt_run_effective_time_ratio{job="watched"}"#).unwrap();
    assert!((effective - classes_s[0] / classes_s.iter().sum::<f64>()).abs() < 0.01, "{page}");
    let error = fetch(&url.replace("/metrics", "/else")).unwrap_err();
    assert!(error.contains("404"), "{error}");

    // Another launcher cannot have the same port, and says so before anything is touched.
    let address = url.trim_start_matches("http://").trim_end_matches("/metrics");
    let output = sandbox.call(["--job", "other", "--metrics", address, "--", "true"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains(address) && said.contains("--metrics a free port"), "{said}");
    assert!(!sandbox.store.join("jobs/other").exists());
    finish(&sandbox, job);
    fetch(url).unwrap_err();
}

/// Bad requests to the metrics port do not disturb the job or later requests.
#[test]
fn bad_metrics_requests_do_not_harm_the_job() {
    let sandbox = Sandbox::new();
    let job = start(&sandbox, &["--metrics", "0"], &[]);
    let said = job.said();
    let url = said.split("metrics are at ").nth(1).unwrap().split_whitespace().next().unwrap();
    let address = url.trim_start_matches("http://").trim_end_matches("/metrics");
    let mut open = Vec::new();
    for length in ["1000000000000000", "5000"] {
        let mut stream = TcpStream::connect(address).unwrap();
        let request = format!("GET /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        open.push(stream);
    }
    let page = fetch(url).unwrap();
    assert!(page.contains("ckpt_run_job_running"), "{page}");
    // An incomplete request must not delay the end of the job.
    let mut silent = TcpStream::connect(address).unwrap();
    silent.write_all(b"GET /metrics HTTP/1.1\r\nContent-Length: 5000\r\n").unwrap();
    finish(&sandbox, job);
    drop(open);
}

#[test]
fn an_invalid_metrics_address_is_refused() {
    let sandbox = Sandbox::new();
    // An address for documentation (RFC 5737), a word, and an invalid port.
    for wrong in ["192.0.2.1:9400", "everywhere", "127.0.0.1:99999"] {
        let output = sandbox.call(["--metrics", wrong, "--", "touch", "began"]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(wrong) && said.contains("metrics"), "{said}");
    }
    assert!(!sandbox.path().join("began").exists() && !sandbox.store.exists());
}

#[test]
fn watching_needs_a_terminal() {
    let sandbox = Sandbox::new();
    let output = sandbox.call(["status", "--watch"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("status --watch needs a terminal") && said.contains("--json"), "{said}");
}

/// In a real terminal: it draws the job and ends with `q`, and the terminal is as it was.
#[test]
fn status_watch_draws_in_a_terminal() {
    let sandbox = Sandbox::new();
    let job = start(&sandbox, &["--job", "watched"], &[]);
    let script = r#"
import os, pty, select, subprocess, sys, termios, time
ours, theirs = pty.openpty()
termios.tcsetwinsize(theirs, (30, 100)) if hasattr(termios, "tcsetwinsize") else None
before = termios.tcgetattr(theirs)
child = subprocess.Popen(sys.argv[1:], stdin=theirs, stdout=theirs)
seen = b""
deadline = time.monotonic() + 600
while b"watched: running" not in seen:
    assert child.poll() is None and time.monotonic() < deadline, seen
    if select.select([ours], [], [], 0.1)[0]:
        seen += os.read(ours, 65536)
os.write(ours, b"q")
while child.poll() is None:
    assert time.monotonic() < deadline, seen
    if select.select([ours], [], [], 0.1)[0]:
        seen += os.read(ours, 65536)
assert child.returncode == 0, child.returncode
assert termios.tcgetattr(theirs) == before
print("watched")
"#;
    let watch = sandbox.command(["status", "--watch"]);
    let mut python = Command::new(python());
    python.args(["-c", script]).arg(watch.get_program()).args(watch.get_args()).current_dir(sandbox.path());
    let output = python.env("CKPT_STORE", &sandbox.store).env("TERM", "xterm").output().unwrap();
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "watched\n",
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    finish(&sandbox, job);
}

/// Secrets in the command line and the environment of the job are in the snapshot, but in no output.
#[test]
fn secrets_are_not_shown() {
    let sandbox = Sandbox::new();
    let probe = "curl https://me:hunter2@127.0.0.1:1/ >/dev/null 2>&1; exit 127";
    let options =
        ["-vv", "--job", "watched", "--metrics", "0", "--log-file", "messages", "--preempt-probe", probe];
    let arguments =
        ["--api-key", "hunter2", "--lr", "0.5", "WANDB_TOKEN=hunter2", "redis://me:hunter2@host/0"];
    let job = start(&sandbox, &options, &arguments);
    let id = job.checkpoint(&sandbox);
    let said = job.said();
    let url = said.split("metrics are at ").nth(1).unwrap().split_whitespace().next().unwrap();
    let mut seen = vec![("metrics", fetch(url).unwrap())];
    for command in [
        &["show", &id][..],
        &["show", &id, "--json"],
        &["status"],
        &["status", "--json"],
        &["ls", "--json"],
        &["explain", "--all"],
        &["explain", "--all", "--json"],
        &["--preempt-probe", probe, "config"],
        &["--preempt-probe", probe, "config", "--json"],
    ] {
        seen.push((command[0], sandbox.ok(command)));
    }
    finish(&sandbox, job);
    seen.extend([("stderr", sandbox.read("job.err")), ("log", sandbox.read("messages"))]);
    for (where_, text) in &seen {
        assert!(!text.contains("hunter2"), "{where_}: {text}");
    }
    let told = |what: &str| {
        seen.iter().filter(|(where_, _)| *where_ == what).map(|(_, text)| text.as_str()).collect::<String>()
    };
    let shown = "--api-key *** --lr 0.5 WANDB_TOKEN=*** redis://***@host/0";
    for command in ["show", "explain"] {
        assert!(told(command).contains(shown), "{command}: {}", told(command));
    }
    assert!(told("log").contains("https://***@127.0.0.1:1/"), "the probe is told of: {}", told("log"));
    let has_secret = |entry: std::io::Result<fs::DirEntry>| {
        fs::read_to_string(entry.ok()?.path()).ok().filter(|record| record.contains("hunter2"))
    };
    until("the test's own secret in the record", || {
        fs::read_dir(sandbox.job_dir().join("job")).ok()?.find_map(has_secret)
    });
}

/// Only the user can access the control socket and its directory; names cannot point outside of the store.
#[test]
fn the_control_socket_is_private_and_names_stay_in_the_store() {
    use std::os::unix::fs::PermissionsExt;
    let sandbox = Sandbox::new();
    let job = start(&sandbox, &["--job", "watched"], &[]);
    let mode = |path: &std::path::Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let links = fs::read_to_string(format!("/proc/{}/net/unix", job.pid())).unwrap();
    let inodes: Vec<String> = fs::read_dir(format!("/proc/{}/fd", job.pid()))
        .unwrap()
        .filter_map(|fd| fs::read_link(fd.unwrap().path()).ok())
        .filter_map(|link| Some(link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned()))
        .collect();
    // The listening socket, and the sockets of its connections.
    let own: std::collections::BTreeSet<&std::path::Path> = links
        .lines()
        .filter(|line| {
            line.split_whitespace().nth(6).is_some_and(|inode| inodes.iter().any(|own| own == inode))
        })
        .filter_map(|line| line.split_whitespace().nth(7).map(std::path::Path::new))
        .filter(|path| path.extension().is_some_and(|end| end == "sock"))
        .collect();
    assert_eq!(own.len(), 1, "one control socket: {links}");
    let own = own.first().unwrap();
    assert_eq!(mode(own), 0o600);
    assert_eq!(mode(own.parent().unwrap()) & 0o022, 0, "nobody else puts a socket in its place");
    for command in [
        &["--job", "../watched", "--", "true"][..],
        &["--job", ".hidden", "--", "true"],
        &["--job", "a/b", "status"],
        &["status", "../jobs/watched"],
        &["checkpoint", "/"],
        &["show", "../../x"],
        &["rm", "../x"],
        &["tag", "1", "../x"],
    ] {
        let output = sandbox.call(command);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{command:?}: {said}");
    }
    finish(&sandbox, job);
}
