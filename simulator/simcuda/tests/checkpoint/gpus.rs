//! On which GPUs a process is restored, by the driver's release.

use super::puppet::{
    CHECKPOINTED, INVALID_DEVICE, INVALID_VALUE, Machine, NOT_SUPPORTED, OPERATING_SYSTEM, Puppet, SUCCESS,
};

/// A process with a filled block, checkpointed.
fn checkpointed(machine: &Machine, environment: &[(&str, &str)]) -> Puppet {
    let mut puppet = machine.initialised_with(environment);
    assert_eq!(puppet.ask("alloc 0 3145728 7").split(' ').next(), Some("0"));
    assert_eq!(puppet.call("lock 0 300000"), SUCCESS);
    assert_eq!(puppet.call("checkpoint"), SUCCESS);
    puppet
}

/// Restores with pairs of GPUs by their IDs.
fn restore(machine: &Machine, puppet: &mut Puppet, pairs: &[(String, usize)]) -> i32 {
    let pairs: Vec<_> = pairs.iter().map(|(old, new)| format!("{old}:{}", machine.uuid(*new))).collect();
    puppet.call(&format!("restore-pairs 0 x{}", pairs.join(",")))
}

fn works_on(puppet: &mut Puppet, uuid: &str) {
    assert_eq!(puppet.call("unlock"), SUCCESS);
    assert_eq!(puppet.ask("check 0 7"), "0 same");
    assert_eq!(puppet.ask("uuid 0"), format!("0 {uuid}"));
}

/// Source: cuda-checkpoint issues 48 and 54.
#[test]
fn a_restore_without_pairs_takes_the_gpus_at_the_same_places() {
    let machine = Machine::new();
    machine.set_gpus(&[(0, "A"), (1, "A")]);
    let mut puppet = checkpointed(&machine, &[]);
    machine.set_gpus(&[(5, "A"), (0, "A")]);
    assert_eq!(puppet.call("restore"), SUCCESS);
    works_on(&mut puppet, &machine.uuid(5));
}

#[test]
fn a_restore_without_a_gpu_at_the_same_place_fails_for_good() {
    for gpus in [&[(0, "A")][..], &[(0, "A"), (1, "B")]] {
        let machine = Machine::new();
        machine.set_gpus(&[(0, "A"), (1, "A")]);
        let mut puppet = checkpointed(&machine, &[("CUDA_VISIBLE_DEVICES", "1")]);
        machine.set_gpus(gpus);
        assert_eq!(puppet.call("restore"), INVALID_DEVICE);
        assert_eq!(puppet.call("restore"), OPERATING_SYSTEM);
    }
}

/// Source: CUDA driver API reference, cuCheckpointProcessRestore.
#[test]
fn pairs_name_gpus_of_the_same_type() {
    let machine = Machine::new();
    machine.set_gpus(&[(0, "A"), (1, "A")]);
    let old = [machine.uuid(0), machine.uuid(1)];
    let pairs = |first, second| [(old[0].clone(), first), (old[1].clone(), second)];
    let mut puppet = checkpointed(&machine, &[]);
    machine.set_gpus(&[(7, "B"), (8, "A"), (9, "A")]);
    for (bad, why) in [(pairs(7, 8), "another type"), (pairs(8, 8), "twice")] {
        assert_eq!(restore(&machine, &mut puppet, &bad), INVALID_VALUE, "{why}");
        assert_eq!(puppet.ask("state"), CHECKPOINTED, "nothing is harmed");
    }
    assert_eq!(restore(&machine, &mut puppet, &pairs(9, 8)), SUCCESS);
    works_on(&mut puppet, &machine.uuid(9));
    // From now on the driver knows the new ones.
    assert_eq!(puppet.call("lock 0 300000"), SUCCESS);
    assert_eq!(puppet.call("checkpoint"), SUCCESS);
    let known = [(machine.uuid(9), 8), (machine.uuid(8), 9)];
    assert_eq!(restore(&machine, &mut puppet, &known), SUCCESS);
    works_on(&mut puppet, &machine.uuid(8));
}

/// Source: cuda-python pull request 1983.
#[test]
fn pairs_name_gpus_that_are_hidden_from_the_process_too() {
    let machine = Machine::new();
    machine.set_gpus(&[(0, "A"), (1, "A")]);
    let uuids = [machine.uuid(0), machine.uuid(1)];
    let mut puppet = checkpointed(&machine, &[("CUDA_VISIBLE_DEVICES", "1")]);
    assert_eq!(restore(&machine, &mut puppet, &[(uuids[1].clone(), 1)]), INVALID_VALUE);
    let swapped = [(uuids[0].clone(), 1), (uuids[1].clone(), 0)];
    assert_eq!(restore(&machine, &mut puppet, &swapped), SUCCESS);
    works_on(&mut puppet, &uuids[0]);
}

/// Source: the table of releases in cuda-checkpoint's README. Where the pairs are was reserved before 580.
#[test]
fn pairs_came_with_580() {
    for (release, has_pairs) in [("570", false), ("575", false), ("580", true), ("590", true), ("610", true)]
    {
        let machine = Machine::new();
        let mut puppet = checkpointed(&machine, &[("SIMCUDA_DRIVER", release)]);
        let expected = if has_pairs { SUCCESS } else { INVALID_VALUE };
        assert_eq!(puppet.call("restore-map 0 same"), expected, "{release}");
        if !has_pairs {
            assert_eq!(puppet.call("restore"), SUCCESS, "{release}");
        }
        works_on(&mut puppet, &machine.uuid(0));
    }
}

/// Source: the same table: 550 has no calls, only the program `cuda-checkpoint`.
#[test]
fn the_calls_came_with_570() {
    let machine = Machine::new();
    let mut puppet = machine.initialised_with(&[("SIMCUDA_DRIVER", "550")]);
    assert_eq!(puppet.call("lock 0 300000"), NOT_SUPPORTED);
    assert_eq!(puppet.ask("state").split(' ').next(), Some("801"));
}
