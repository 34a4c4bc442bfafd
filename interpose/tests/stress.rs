//! Threads that launch all the time while their process is sent away again and again, on a driver that ends the
//! process if a call is inside when it is locked, with a launcher that is played by the test.
//!
//! 5 seconds; as many as `CKPT_TEST_STRESS_S` says.

mod common;

use std::thread::sleep;
use std::time::{Duration, Instant};

use common::launcher::Launcher;
use common::program::{self, Program};
use common::until;

const THREADS: &str = "32";
const INTERVAL: Duration = Duration::from_millis(50);

#[test]
fn nobody_is_inside_and_nobody_sleeps_on() {
    let seconds = std::env::var("CKPT_TEST_STRESS_S").map_or(5, |text| text.parse().expect("seconds"));
    let mut launcher = Launcher::new();
    let mut program = start(&launcher);
    let mut agent = launcher.next();
    let end = Instant::now() + Duration::from_secs(seconds);
    for attempt in 1.. {
        // A path that is there would call it back.
        launcher.stop_listening();
        agent.goes_away(attempt);
        let before = fewest_launches(&mut program);
        launcher.listen();
        agent = launcher.next();
        agent.is_back(attempt);
        // Each thread was woken: what it counts now it may have launched before, what comes next not.
        let what = format!("each thread to launch after attempt {attempt}");
        until(&what, || (fewest_launches(&mut program) > before + 1).then_some(()));
        if Instant::now() >= end {
            break;
        }
        sleep(INTERVAL);
    }
    assert!(program.is_running(), "the program has ended");
}

/// Threads on a driver that ends the process if a call is inside when it is locked.
fn start(launcher: &Launcher) -> Program {
    let (driver, program) = (launcher.path("libcuda.so.1"), launcher.path("threads"));
    program::compile("stress/driver.c", &driver, &["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]);
    program::compile("stress/threads.c", &program, &[driver.as_os_str(), "-lpthread".as_ref()]);
    let mut command = std::process::Command::new(program);
    command.arg(THREADS).env("LD_LIBRARY_PATH", launcher.directory.path());
    program::interpose(&mut command, &launcher.socket());
    Program::start(command)
}

fn fewest_launches(program: &mut Program) -> u64 {
    let answer = program.does("");
    answer.parse().unwrap_or_else(|_| panic!("the program said {answer:?}"))
}
