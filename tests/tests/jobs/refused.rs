//! What cannot be saved is named in plain words, with the process and the descriptor, and the job runs on unharmed.

use ckpt_run_tests::{Running, Sandbox, programs, python};
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

const UNAVAILABLE: i32 = 77;

/// Starts the program; `None` when its kind is not available here.
fn start(sandbox: &Sandbox, program: &str, arguments: &[PathBuf]) -> Option<Running> {
    let mut argv = vec!["--".into(), python(), programs().join("refused").join(program)];
    argv.extend(arguments.iter().cloned());
    let mut job = sandbox.start("job", argv);
    while !sandbox.path().join("ready").exists() {
        if job.has_ended() {
            assert_eq!(job.wait(), UNAVAILABLE, "{program}: {}", job.said());
            ckpt_test_skip::skip(format_args!("{program} is not available here"));
            return None;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    job.until_answering(sandbox);
    Some(job)
}

fn go_on(sandbox: &Sandbox, mut job: Running) {
    std::fs::write(sandbox.path().join("go"), "").unwrap();
    assert_eq!(job.wait(), 0, "{}", job.said());
    assert_eq!(sandbox.read("log"), "started\npass\n");
}

/// The checkpoint fails with all of `wanted` in its message; the job continues and passes.
fn is_refused(program: &str, arguments: &[PathBuf], wanted: &[&str]) {
    let sandbox = Sandbox::new();
    let Some(job) = start(&sandbox, program, arguments) else { return };
    let output = sandbox.call(["checkpoint"]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{program}: {said}");
    for part in wanted {
        assert!(said.contains(part), "{program} should say {part:?}: {said}");
    }
    assert_eq!(sandbox.snapshots().len(), 0);
    let status = sandbox.json(["status", "--json"]);
    assert_eq!(status[0]["failed"], 1);
    let reason = status[0]["last_failure"].as_str().unwrap();
    assert!(reason.contains(wanted[0]), "{reason}");
    if let Some(log) = said.split("CRIU's log is in ").nth(1) {
        let log = PathBuf::from(log.trim()).join("criu.log");
        assert!(std::fs::read_to_string(&log).unwrap().contains("Error"), "{}", log.display());
    }
    go_on(&sandbox, job);
}

/// CRIU would delete the new one at the end of a restore, or fail.
#[test]
fn a_deleted_directory_whose_name_is_taken() {
    for (kind, why) in [
        ("open", "something else has its name now"),
        ("cwd", "something else has its name now"),
        ("of-a-file", "which is no directory any more"),
    ] {
        is_refused("deleted_directory.py", &[kind.into()], &["place", why]);
    }
}

#[test]
fn a_unix_connection_to_the_outside() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("echo.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut buffer = [0; 100];
        while let Ok(read @ 1..) = stream.read(&mut buffer) {
            stream.write_all(&buffer[..read]).unwrap();
        }
    });
    is_refused("unix_outside.py", &[path], &["unix socket is connected to a process outside of the job"]);
    server.join().unwrap();
}

#[test]
fn performance_counters() {
    is_refused("perf_event.py", &[], &["performance counter", "(python3), descriptor"]);
}

#[test]
fn a_userfaultfd() {
    is_refused("userfaultfd.py", &[], &["userfaultfd", "(python3), descriptor"]);
}

#[test]
fn the_fuse_device() {
    is_refused("fuse_device.py", &[], &["FUSE", "(python3), descriptor"]);
}

#[test]
fn a_virtual_machine() {
    is_refused("kvm.py", &[], &["virtual machine", "(python3), descriptor"]);
}

#[test]
fn a_vsock() {
    is_refused("vsock.py", &[], &["socket of a kind that cannot be saved", "(python3), descriptor"]);
}

#[test]
fn a_network_tunnel() {
    is_refused("tun.py", &[], &["network tunnel", "(python3), descriptor"]);
}

#[test]
fn a_lease_that_is_being_broken() {
    is_refused("breaking_lease.py", &[], &["has a lease of a file that another program is about to open"]);
}

/// CRIU would lose them, and the job would wait for ever. Once they are received, the job is saved.
#[test]
fn descriptors_that_two_processes_have_sent_each_other() {
    is_refused("unix_rights.py", &[], &["messages with descriptors (SCM_RIGHTS)", "(python3), descriptor"]);
}

#[test]
fn descriptors_in_a_message_of_length_zero() {
    is_refused("unix_empty_rights.py", &[], &["message of length zero", "(python3), descriptor"]);
}

/// A version that did not look at the messages has taken the snapshot. Another try would end as the first.
#[test]
fn descriptors_that_a_resume_would_lose_refuse_it_at_once() {
    let sandbox = Sandbox::new();
    let argv = || ["--".into(), python(), programs().join("refused/unix_rights.py")];
    let mut command = sandbox.command(argv());
    command.env("CKPT_FAULT", "lost-messages=error");
    let mut job = sandbox.start_command("job", command);
    job.until("the program is set up", || sandbox.path().join("ready").exists().then_some(()));
    job.until_answering(&sandbox);
    job.checkpoint(&sandbox);
    job.kill_everything();
    let mut job = sandbox.start("job", argv());
    assert_eq!(job.wait(), 125, "{}", job.said());
    let said = job.said();
    assert_eq!(
        said.matches("(SCM_RIGHTS) between processes of the job, which CRIU would lose").count(),
        1,
        "{said}"
    );
    assert!(
        said.contains("is intact but cannot be restored") && !said.contains("trying once more"),
        "{said}"
    );
    assert!(
        said.find("which CRIU would lose") < said.find(". Fix the cause and run the same command again"),
        "{said}"
    );
    assert_eq!(sandbox.read("log"), "started\n");
}

#[test]
fn an_event_counter_in_semaphore_mode() {
    is_refused("eventfd_semaphore.py", &[], &["semaphore mode", "(python3), descriptor"]);
}

#[test]
fn a_namespace_of_its_own() {
    is_refused("nested_namespace.py", &[], &["mount namespace of its own", "(python3)"]);
}

/// Not refused: a TCP connection to the outside is saved, is reported once, and survives in the running job. A
/// resumed job finds it broken, as after a network failure.
#[test]
fn a_tcp_connection_to_the_outside_is_told() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut buffer = [0; 100];
        while let Ok(read @ 1..) = stream.read(&mut buffer) {
            stream.write_all(&buffer[..read]).unwrap();
        }
    });
    let sandbox = Sandbox::new();
    let script = format!(
        "import os,socket,time\ns=socket.create_connection(('127.0.0.1',{})); s.settimeout(20)\nopen('ready','w')\nwhile not os.path.exists('go'): time.sleep(0.02)\ntry:\n s.send(b'x'*9); time.sleep(0.2); s.send(b'y'); print('got', len(s.recv(9)))\nexcept ConnectionError as e: print('broken')\n",
        address.port()
    );
    let start = |name: &str| sandbox.start(name, ["--", python().to_str().unwrap(), "-c", &script]);
    let mut job = start("first");
    job.until("a connection", || sandbox.path().join("ready").exists().then_some(()));
    job.until_answering(&sandbox);
    job.checkpoint(&sandbox);
    job.checkpoint(&sandbox);
    let told = format!("a TCP connection to {address}, outside of it");
    assert_eq!(job.said().matches(&told).count(), 1, "{}", job.said());
    let mut again = {
        std::fs::write(sandbox.path().join("go"), "").unwrap();
        assert_eq!(job.wait(), 0);
        assert!(job.said().contains("got 9"), "{}", job.said());
        let id = sandbox.snapshots().remove(0);
        sandbox.start("again", ["--resume", &id, "--", python().to_str().unwrap(), "-c", &script])
    };
    assert_eq!(again.wait(), 0, "{}", again.said());
    assert!(again.said().contains("broken"), "{}", again.said());
    server.join().unwrap();
}

/// Not refused: io_uring is answered with "not implemented", so that programs do without it and can be saved.
#[test]
fn io_uring_is_not_there() {
    let sandbox = Sandbox::new();
    let Some(job) = start(&sandbox, "io_uring.py", &[]) else { return };
    job.checkpoint(&sandbox);
    sandbox.verify_all();
    go_on(&sandbox, job);
}

/// Not refused: a request for AMX is answered as on a CPU without it. CRIU saves neither the tile registers nor the
/// permission to use them, and a resumed job would be killed by SIGILL.
#[test]
fn amx_is_not_available() {
    let sandbox = Sandbox::new();
    let Some(job) = start(&sandbox, "amx.py", &[]) else { return };
    job.checkpoint(&sandbox);
    sandbox.verify_all();
    go_on(&sandbox, job);
}
