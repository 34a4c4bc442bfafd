//! Notifications (`--notify`), sent to a web server of the test.

use crate::supervisor::{touch, until_ready};
use ckpt_run_tests::{Sandbox, python};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// Dies once if there is `die-once`, and ends when there is `go`.
const JOB: &str = r#"
import os, time
open("ready", "w").close()
while not os.path.exists("go"):
    if os.path.exists("die-once"):
        os.unlink("die-once")
        os.kill(os.getpid(), 9)
    time.sleep(0.02)
"#;

/// Hands the body of one request to `take`, then answers it.
fn answer(stream: TcpStream, status: &str, take: impl FnOnce(Value)) {
    let mut from = BufReader::new(stream);
    let mut length = 0;
    loop {
        let mut line = String::new();
        from.read_line(&mut line).unwrap();
        if line.trim().is_empty() {
            break;
        }
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
    }
    let mut body = vec![0; length];
    from.read_exact(&mut body).unwrap();
    // ckpt-run may end as soon as it has its answer.
    take(serde_json::from_slice(&body).unwrap());
    let reply = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    from.into_inner().write_all(reply.as_bytes()).unwrap();
}

#[test]
fn what_happens_to_a_job_is_sent() {
    let sandbox = Sandbox::new();
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/hooks/SECRET", server.local_addr().unwrap());
    let got = Arc::new(Mutex::new(Vec::new()));
    let bodies = Arc::clone(&got);
    std::thread::spawn(move || {
        for (number, stream) in server.incoming().enumerate() {
            match number {
                // It is sent again.
                0 => answer(stream.unwrap(), "503 Busy", drop),
                _ => answer(stream.unwrap(), "200 OK", |body| bodies.lock().unwrap().push(body)),
            }
        }
    });
    let python = python();
    let mut command = sandbox.command(["--job", "told", "--", python.to_str().unwrap(), "-c", JOB]);
    command.env("CKPT_NOTIFY", &url).env("CKPT_MAX_RESTARTS", "9").env("CKPT_VERBOSE", "2");
    let mut job = sandbox.start_command("job", command);
    until_ready(&mut job, &sandbox);
    job.checkpoint(&sandbox);
    touch(&sandbox, "die-once");
    job.until("the resumed job", || job_is_resumed(&got).then_some(()));
    touch(&sandbox, "go");
    assert_eq!(job.wait(), 0, "{}", job.said());
    let got = got.lock().unwrap();
    let events: Vec<_> = got.iter().map(|body| body["event"].as_str().unwrap()).collect();
    assert_eq!(events, ["started", "failed", "resumed", "complete"], "{}", job.said());
    assert!(got.iter().all(|body| body["job"] == "told" && body["version"] == 1), "{got:?}");
    assert!(got[1]["text"].as_str().unwrap().contains("failed: it was killed by SIGKILL"), "{got:?}");
    let config = sandbox.command(["config"]).env("CKPT_NOTIFY", &url).output().unwrap();
    for said in [job.said(), String::from_utf8(config.stdout).unwrap()] {
        assert!(!said.contains("SECRET"), "{said}");
    }
}

fn job_is_resumed(got: &Mutex<Vec<Value>>) -> bool {
    got.lock().unwrap().iter().any(|body| body["event"] == "resumed")
}

/// A page to which a server redirects is no reader of notifications.
#[test]
fn a_redirect_is_an_error() {
    let sandbox = Sandbox::new();
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/hooks", server.local_addr().unwrap());
    let got = Arc::new(Mutex::new(0));
    let count = Arc::clone(&got);
    std::thread::spawn(move || {
        for stream in server.incoming() {
            // A request without a body would not be read.
            answer(stream.unwrap(), "302 Found\r\nLocation: /login", |_| *count.lock().unwrap() += 1);
        }
    });
    let output = sandbox.call(["--notify", &url, "--", "true"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("Give the address to which it redirects"), "{said}");
    assert_eq!(*got.lock().unwrap(), 2, "it started and is complete: {said}");
}

/// Nobody listens: the job runs and ends as without notifications.
#[test]
fn a_job_does_not_depend_on_notifications() {
    let sandbox = Sandbox::new();
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let output = sandbox.call(["--notify", &format!("http://{closed}/x"), "--", "true"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("the last notifications are not sent"), "{said}");
    let output = sandbox.call(["--notify", "mail@example.org", "--", "true"]);
    assert_eq!(output.status.code(), Some(2));
}
