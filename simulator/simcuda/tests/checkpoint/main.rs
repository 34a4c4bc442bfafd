//! The checkpoint API in real programs: states, memory, the lock, by PID, failures; with CRIU where there is one.

#[path = "../common/mod.rs"]
mod common;
mod criu;
mod gpus;
mod puppet;

use puppet::{
    CHECKPOINTED, FAILED, ILLEGAL_STATE, INVALID_VALUE, LOCKED, Machine, NOT_INITIALIZED, NOT_READY,
    NOT_SUPPORTED, OPERATING_SYSTEM, OUT_OF_MEMORY, Puppet, RUNNING, SUCCESS, UNKNOWN, dump_blockers,
    has_control, is_mapped,
};

/// Allocates a block filled by its seed; its address.
fn alloc(puppet: &mut Puppet, id: u32, size_bytes: usize, seed: u32) -> u64 {
    let answer = puppet.ask(&format!("alloc {id} {size_bytes} {seed}"));
    let (result, address) = answer.split_once(' ').expect("a result and an address");
    assert_eq!(result, "0", "cuMemAlloc");
    u64::from_str_radix(address, 16).expect("an address")
}

#[test]
fn a_process_does_it_to_itself() {
    let machine = Machine::new();
    let mut puppet = machine.initialised();
    let address = alloc(&mut puppet, 0, 3 << 20, 1);
    assert_eq!(puppet.ask("state"), RUNNING);
    assert_eq!(dump_blockers(puppet.pid), (true, true));
    assert_eq!(puppet.call("lock 0 300000"), SUCCESS);
    assert_eq!(puppet.ask("state"), LOCKED);
    assert!(is_mapped(puppet.pid, address));
    assert_eq!(puppet.call("checkpoint"), SUCCESS);
    assert_eq!(puppet.ask("state"), CHECKPOINTED);
    assert!(is_mapped(puppet.pid, address), "a placeholder lies at the device's addresses");
    assert_eq!(dump_blockers(puppet.pid), (false, false));
    assert_eq!(puppet.call("restore"), SUCCESS);
    assert_eq!(puppet.ask("state"), LOCKED);
    assert!(is_mapped(puppet.pid, address));
    assert_eq!(dump_blockers(puppet.pid), (true, true));
    assert_eq!(puppet.call("unlock"), SUCCESS);
    assert_eq!(puppet.ask("state"), RUNNING);
    assert_eq!(puppet.ask("check 0 1"), "0 same");
    assert_eq!(puppet.call("free 0"), SUCCESS);
}

#[test]
fn a_process_does_it_to_another_and_more_than_once() {
    let machine = Machine::new();
    let mut subject = machine.initialised();
    let mut caller = machine.puppet();
    let pid = subject.pid;
    for seed in 8..11 {
        let address = alloc(&mut subject, 0, 5 << 20, seed);
        assert_eq!(caller.ask(&format!("state {pid}")), RUNNING);
        assert_eq!(caller.call(&format!("lock {pid} 300000")), SUCCESS);
        assert_eq!(caller.ask(&format!("state {pid}")), LOCKED);
        assert_eq!(caller.call(&format!("checkpoint {pid}")), SUCCESS);
        assert_eq!(caller.ask(&format!("state {pid}")), CHECKPOINTED);
        assert!(is_mapped(pid, address));
        assert_eq!(caller.call(&format!("restore {pid}")), SUCCESS);
        assert_eq!(caller.call(&format!("unlock {pid}")), SUCCESS);
        assert!(is_mapped(pid, address));
        assert_eq!(subject.ask(&format!("check 0 {seed}")), "0 same");
        assert_eq!(subject.call("free 0"), SUCCESS);
    }
}

#[test]
fn a_call_in_the_wrong_state() {
    let machine = Machine::new();
    let mut puppet = machine.initialised();
    for wrong in ["checkpoint", "restore", "unlock"] {
        assert_eq!(puppet.call(wrong), ILLEGAL_STATE, "{wrong} while running");
    }
    assert_eq!(puppet.call("lock 0 300000"), SUCCESS);
    for wrong in ["lock 0 300000", "restore"] {
        assert_eq!(puppet.call(wrong), ILLEGAL_STATE, "{wrong} while locked");
    }
    assert_eq!(puppet.call("checkpoint"), SUCCESS);
    for wrong in ["lock 0 300000", "checkpoint", "unlock"] {
        assert_eq!(puppet.call(wrong), ILLEGAL_STATE, "{wrong} while checkpointed");
    }
    assert_eq!(puppet.ask("state"), CHECKPOINTED);
    assert_eq!(puppet.call("restore"), SUCCESS);
    assert_eq!(puppet.call("unlock"), SUCCESS);
}

#[test]
fn arguments() {
    let machine = Machine::new();
    let mut puppet = machine.initialised();
    assert_eq!(puppet.call("lock 0 300000 1"), INVALID_VALUE, "reserved");
    assert_eq!(puppet.call("lock-null"), SUCCESS);
    assert_eq!(puppet.call("unlock 0 1"), INVALID_VALUE, "reserved");
    assert_eq!(puppet.call("checkpoint 0 0 1"), INVALID_VALUE, "reserved");
    assert_eq!(puppet.call("checkpoint 0 1 0"), NOT_SUPPORTED, "custom storage");
    assert_eq!(puppet.call("checkpoint"), SUCCESS);
    assert_eq!(puppet.call("restore-map 0 reserved"), INVALID_VALUE);
    assert_eq!(puppet.call("restore-map 0 custom"), NOT_SUPPORTED);
    assert_eq!(puppet.call("restore-map 0 none"), INVALID_VALUE);
    assert_eq!(puppet.ask("state"), CHECKPOINTED);
}

#[test]
fn maps_of_devices() {
    let machine = Machine::new();
    let mut subject = machine.initialised();
    let mut caller = machine.initialised();
    let pid = subject.pid;
    alloc(&mut subject, 0, 1 << 20, 3);
    assert_eq!(caller.call(&format!("lock {pid} 300000")), SUCCESS);
    for good in ["same", "swapped"] {
        assert_eq!(caller.call(&format!("checkpoint {pid}")), SUCCESS);
        for bad in ["half", "strange", "twice"] {
            assert_eq!(caller.call(&format!("restore-map {pid} {bad}")), INVALID_VALUE, "{bad}");
            assert_eq!(caller.ask(&format!("state {pid}")), CHECKPOINTED);
        }
        assert_eq!(caller.call(&format!("restore-map {pid} {good}")), SUCCESS, "{good}");
    }
    assert_eq!(caller.call(&format!("unlock {pid}")), SUCCESS);
    assert_eq!(subject.ask("check 0 3"), "0 same");
}

#[test]
fn who_cannot_be_asked() {
    let machine = Machine::new();
    let mut caller = machine.puppet();
    assert_eq!(caller.ask("state"), format!("{NOT_INITIALIZED} 99"));
    assert_eq!(caller.call("lock 0 300000"), NOT_INITIALIZED);
    let mut plain = machine.puppet();
    assert_eq!(caller.call(&format!("lock {} 300000", plain.pid)), NOT_INITIALIZED);
    assert_eq!(caller.call("lock -5 300000"), INVALID_VALUE);
    let (ended, exit) = (plain.pid, "exit");
    plain.send(exit);
    plain.ended();
    assert_eq!(caller.call(&format!("lock {ended} 300000")), INVALID_VALUE);
}

#[test]
fn a_threads_id_is_taken_for_its_process() {
    let machine = Machine::new();
    let mut subject = machine.initialised();
    let mut caller = machine.puppet();
    let thread = subject.control_thread();
    assert_eq!(caller.ask(&format!("thread-id {}", subject.pid)), format!("0 {thread}"));
    let name =
        std::fs::read_to_string(format!("/proc/{}/task/{thread}/comm", subject.pid)).expect("a thread");
    assert_eq!(name.trim_end(), "simcuda-control");
    assert_eq!(caller.call(&format!("lock {thread} 300000")), SUCCESS);
    assert_eq!(subject.ask("state"), LOCKED);
}

#[test]
fn a_thread_waits_at_the_lock() {
    let machine = Machine::new();
    let mut subject = machine.initialised();
    let mut caller = machine.puppet();
    let pid = subject.pid;
    assert_eq!(caller.call(&format!("lock {pid} 300000")), SUCCESS);
    let early = subject.spawn();
    subject.until_parked(early);
    assert_eq!(caller.call(&format!("checkpoint {pid}")), SUCCESS);
    let late = subject.spawn();
    subject.until_parked(late);
    assert_eq!(caller.call(&format!("restore {pid}")), SUCCESS);
    subject.until_parked(early);
    subject.until_parked(late);
    assert_eq!(caller.call(&format!("unlock {pid}")), SUCCESS);
    let mut ends = [subject.of_thread(), subject.of_thread()];
    ends.sort();
    let mut expected = [early, late].map(|thread| vec![thread.to_string(), "ends".into(), "0".into()]);
    expected.sort();
    assert_eq!(ends, expected);
}

#[test]
fn work_that_does_not_end_times_the_lock_out() {
    let machine = Machine::new();
    let mut subject = machine.initialised();
    let mut caller = machine.puppet();
    let pid = subject.pid;
    assert_eq!(subject.call("stall"), SUCCESS);
    assert_eq!(caller.call(&format!("lock {pid} 150")), NOT_READY);
    assert_eq!(caller.ask(&format!("state {pid}")), RUNNING);
    alloc(&mut subject, 0, 1 << 20, 1);
    assert_eq!(subject.call("lock 0 50"), NOT_READY, "the process itself fares no better");
    assert_eq!(subject.ask("check 0 1"), "0 same");

    // Without a limit the lock waits for the end of the work.
    let control = subject.control_thread();
    caller.send(&format!("lock {pid} 0"));
    subject.until_parked(control);
    let thread = subject.spawn();
    subject.until_parked(thread);
    assert_eq!(subject.ask("state"), RUNNING, "not locked yet");
    assert_eq!(subject.call("release"), SUCCESS);
    assert_eq!(caller.answer("lock"), "0");
    assert_eq!(subject.ask("state"), LOCKED);
    assert_eq!(caller.call(&format!("unlock {pid}")), SUCCESS);
    assert_eq!(subject.of_thread()[1..], ["ends", "0"]);
}

#[test]
fn a_call_that_is_inside_is_waited_for() {
    let machine = Machine::new();
    let mut subject = machine.initialised();
    let mut caller = machine.puppet();
    let pid = subject.pid;
    assert_eq!(subject.call("stall"), SUCCESS);
    subject.send("synchronize");
    subject.until_parked(pid);
    assert_eq!(caller.call(&format!("lock {pid} 100")), NOT_READY);
    assert_eq!(caller.ask(&format!("state {pid}")), RUNNING);
}

#[test]
fn a_capture_times_the_lock_out() {
    let machine = Machine::new();
    let mut puppet = machine.initialised();
    assert_eq!(puppet.call("capture"), SUCCESS);
    assert_eq!(puppet.call("lock 0 100"), NOT_READY);
    assert_eq!(puppet.ask("state"), RUNNING);
    assert_eq!(puppet.call("end-capture"), SUCCESS);
    assert_eq!(puppet.call("lock 0 300000"), SUCCESS);
}

#[test]
fn a_caller_that_is_killed_leaves_the_process_usable() {
    let machine = Machine::new();
    let mut subject = machine.initialised();
    let pid = subject.pid;
    assert_eq!(subject.call("stall"), SUCCESS);
    let first = machine.puppet();
    let control = subject.control_thread();
    first.send(&format!("lock {pid} 0"));
    subject.until_parked(control);
    let thread = subject.spawn();
    subject.until_parked(thread);
    drop(first);
    assert_eq!(subject.of_thread()[1..], ["ends", "0"], "the lock is given up");
    let mut second = machine.puppet();
    assert_eq!(second.call(&format!("lock {pid} 100")), NOT_READY);
    assert_eq!(subject.call("release"), SUCCESS);
    assert_eq!(second.call(&format!("lock {pid} 300000")), SUCCESS);
    assert_eq!(second.call(&format!("unlock {pid}")), SUCCESS);
}

#[test]
fn managed_memory_is_refused_and_nothing_is_harmed() {
    let machine = Machine::new();
    let mut puppet = machine.initialised();
    let address = alloc(&mut puppet, 0, 1 << 20, 1);
    assert_eq!(puppet.call("managed 1 65536"), SUCCESS);
    assert_eq!(puppet.call("lock 0 300000"), SUCCESS);
    assert_eq!(puppet.call("checkpoint"), NOT_SUPPORTED);
    assert_eq!(puppet.ask("state"), LOCKED);
    assert!(is_mapped(puppet.pid, address));
    assert_eq!(dump_blockers(puppet.pid), (true, true));
    assert_eq!(puppet.call("unlock"), SUCCESS);
    assert_eq!(puppet.ask("check 0 1"), "0 same");
    assert_eq!(puppet.call("free 1"), SUCCESS);
    assert_eq!(puppet.call("lock 0 300000"), SUCCESS);
    assert_eq!(puppet.call("checkpoint"), UNKNOWN, "also without managed memory");
    assert_eq!(puppet.call("unlock"), SUCCESS);
    assert_eq!(puppet.ask("check 0 1"), "0 same");
}

#[test]
fn a_lock_needs_a_context_before_580() {
    let machine = Machine::new();
    for (release, result) in [("575", NOT_INITIALIZED), ("580", SUCCESS)] {
        let mut puppet = machine.puppet_with(&[("SIMCUDA_DRIVER", release)]);
        assert_eq!(puppet.call("init-only"), SUCCESS);
        assert_eq!(puppet.call("lock 0 300000"), result, "{release}");
    }
}

#[test]
fn a_restore_without_enough_memory_fails_for_good() {
    let machine = Machine::new();
    let mut subject = machine.initialised();
    let mut other = machine.initialised();
    let pid = subject.pid;
    alloc(&mut subject, 0, 40 << 20, 1);
    assert_eq!(other.ask("alloc 0 41943040 2").split(' ').next(), Some("2"), "both do not fit");
    assert_eq!(other.call(&format!("lock {pid} 300000")), SUCCESS);
    assert_eq!(other.call(&format!("checkpoint {pid}")), SUCCESS);
    let thread = subject.spawn();
    subject.until_parked(thread);
    alloc(&mut other, 0, 40 << 20, 2);
    assert_eq!(other.call(&format!("restore {pid}")), OUT_OF_MEMORY);
    assert_eq!(other.ask(&format!("state {pid}")), FAILED);
    assert_eq!(subject.of_thread()[1..], ["ends", "304"], "a thread that waits at the lock is refused");
    assert_eq!(other.call("free 0"), SUCCESS);
    assert_eq!(subject.call("synchronize"), OPERATING_SYSTEM);
    assert_eq!(subject.call("managed 1 4096"), OPERATING_SYSTEM);
    assert_eq!(subject.call("init"), OPERATING_SYSTEM);
    for wrong in ["lock", "checkpoint", "unlock"] {
        assert_eq!(other.call(&format!("{wrong} {pid}")), ILLEGAL_STATE, "{wrong}");
    }
    assert_eq!(other.call(&format!("restore {pid}")), OPERATING_SYSTEM, "also with enough memory");
}

#[test]
fn memory_in_the_hole_is_overwritten() {
    let machine = Machine::new();
    let mut puppet = machine.initialised();
    alloc(&mut puppet, 0, 2 << 20, 4);
    assert_eq!(puppet.call("lock 0 300000"), SUCCESS);
    assert_eq!(puppet.call("checkpoint"), SUCCESS);
    assert_eq!(puppet.ask("squat 0"), "0", "a placeholder has the address");
    drop(puppet);
    let mut puppet = machine.initialised_with(&[("SIMCUDA_DRIVER", "575")]);
    alloc(&mut puppet, 0, 2 << 20, 4);
    assert_eq!(puppet.ask("squat 0"), "0", "the address is taken");
    assert_eq!(puppet.call("lock 0 300000"), SUCCESS);
    assert_eq!(puppet.call("checkpoint"), SUCCESS);
    assert_eq!(puppet.ask("squat 0"), "1", "the address is free");
    assert_eq!(puppet.call("restore"), SUCCESS);
    assert_eq!(puppet.call("unlock"), SUCCESS);
    assert_eq!(puppet.ask("check 0 4"), "0 same");
}

#[test]
fn the_child_of_a_fork_does_not_answer_for_its_parent() {
    let machine = Machine::new();
    let mut subject = machine.initialised();
    let mut caller = machine.puppet();
    assert_eq!(caller.call(&format!("lock {} 300000", subject.pid)), SUCCESS);
    let child: i32 = subject.ask("fork").parse().expect("a PID");
    let words = subject.of_thread();
    assert_eq!(words, [child.to_string().as_str(), "child", "3", "3"], "cuInit and the state of itself");
    assert!(!has_control(child));
    assert_eq!(dump_blockers(child), (true, true), "it inherits them");
    assert_eq!(caller.call(&format!("unlock {child}")), NOT_INITIALIZED);
    assert_eq!(caller.ask(&format!("state {}", subject.pid)), LOCKED);
    assert_eq!(dump_blockers(subject.pid), (true, true));
    assert_eq!(caller.call(&format!("unlock {}", subject.pid)), SUCCESS);
}

#[test]
fn callers_take_turns() {
    let machine = Machine::new();
    let mut subject = machine.initialised();
    alloc(&mut subject, 0, 1 << 20, 5);
    let pid = subject.pid;
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let mut caller = machine.puppet();
                for _ in 0..20 {
                    // A caller that finds the process locked came during another caller's turn.
                    match caller.call(&format!("lock {pid} 300000")) {
                        SUCCESS => assert_eq!(caller.call(&format!("unlock {pid}")), SUCCESS),
                        other => assert_eq!(other, ILLEGAL_STATE),
                    }
                }
            });
        }
    });
    assert_eq!(subject.ask("state"), RUNNING);
    assert_eq!(subject.ask("check 0 5"), "0 same");
}
