use super::*;

const WORLD: Name = Name(1 << 96);
const HALF: Name = Name(2 << 96);
const LIMIT: Duration = Duration::from_secs(30);

fn report(communicator: Name, index: u32, sequence: u64) -> MemberReport {
    let role = Role::Communicator { awaits: None, alias: None };
    let member = Member { communicator, index };
    MemberReport { member, role, sequence, call: "ncclAllReduce".to_owned() }
}

/// A rank of the whole job that waits for nothing and does nothing.
fn rank(number: u32, sequence: u64) -> (Key, Process) {
    let pid = 100 + number.cast_signed();
    let members = Some(vec![report(WORLD, number, sequence)]);
    let gpu = Gpu::Reported(GpuActivity { calls: 5, is_waiting: false });
    (
        (pid, 1),
        Process {
            pid: number.cast_signed() + 10,
            name: "python3".into(),
            members,
            gpu,
            ..Process::default()
        },
    )
}

/// Ranks with these sequences.
fn job(sequences: &[u64]) -> Seen {
    (0..).zip(sequences).map(|(number, sequence)| rank(number, *sequence)).collect()
}

fn change(seen: &mut Seen, number: i32) -> &mut Process {
    seen.get_mut(&(100 + number, 1)).expect("a rank")
}

/// Polls the state `at` each second. Returns the late ranks of each second.
fn polled(seconds: u64, at: impl Fn(u64) -> (Seen, bool)) -> Vec<Vec<LateRank>> {
    let begun = Instant::now();
    let mut late = LateRanks::new(LIMIT, None, begun);
    let poll = |second| {
        let (seen, is_disturbed) = at(second);
        let found = late.update(&seen, Vec::new(), begun + Duration::from_secs(second), is_disturbed);
        found.into_iter().map(|late| late.rank).collect()
    };
    (0..seconds).map(poll).collect()
}

/// The first second with a late rank, and that rank.
fn first_late(at: impl Fn(u64) -> (Seen, bool)) -> Option<(usize, LateRank)> {
    let all = polled(200, at);
    all.into_iter().enumerate().find_map(|(second, late)| Some((second, late.into_iter().next()?)))
}

#[test]
fn a_rank_that_has_not_made_a_call_is_named() {
    // The others make call 812 after five seconds.
    let others = |second: u64| 811 + u64::from(second >= 5);
    let at = |second| (job(&[others(second), others(second), others(second), 811]), false);
    let (second, late) = first_late(at).unwrap();
    assert_eq!((second, late.rank, late.number, &late.waiting[..]), (35, 3, 812, &[0, 1, 2][..]));
    assert_eq!(
        late.describe(),
        "rank 3 (process 13, python3) has not called ncclAllReduce, no. 812 on communicator 00000001, for 30 s; ranks 0-2 wait in it. It does nothing"
    );
    assert!(late.hangs());
    // It goes away.
    let goes_on = |second| (job(&[others(second), others(second), others(second), 811 + second / 60]), false);
    let all = polled(70, goes_on);
    assert!(
        all[..35].iter().chain(&all[60..]).all(Vec::is_empty)
            && all[35..60].iter().all(|late| late.len() == 1)
    );
}

#[test]
fn a_rank_for_which_nobody_waits_is_not_late() {
    // Nobody is further, however long all of them compute.
    assert_eq!(first_late(|_| (job(&[7, 7, 7]), false)), None);
    // A slow rank moves, and the others are ahead of it all the time.
    assert_eq!(first_late(|second| (job(&[9 + second / 20, 9 + second / 20, 1 + second / 20]), false)), None);
    // The others go on: they do not wait.
    assert_eq!(first_late(|second| (job(&[9 + second, 9 + second, 1]), false)), None);
    // A rank that has ended, or has destroyed its communicator, is not waited for here.
    let ends = |second| {
        let mut seen = job(&[9, 9, 8]);
        if second > 20 {
            change(&mut seen, 2).members = Some(Vec::new());
        }
        (seen, false)
    };
    assert_eq!(first_late(ends), None);
    assert_eq!(first_late(|second| (job(if second > 20 { &[9, 9] } else { &[9, 9, 8] }), false)), None);
}

#[test]
fn a_late_rank_that_works_is_told_from_one_that_hangs() {
    let doing = |change_it: &dyn Fn(u64, &mut Process)| {
        let at = |second| {
            let mut seen = job(&[9, 8]);
            change_it(second, change(&mut seen, 1));
            (seen, false)
        };
        let (second, late) = first_late(at).unwrap();
        assert_eq!(second, 30);
        late.doing
    };
    let reported = |calls, is_waiting| Gpu::Reported(GpuActivity { calls, is_waiting });
    assert_eq!(doing(&|_, _| {}), LateDoing::Nothing);
    assert_eq!(doing(&|second, process| process.gpu = reported(second / 20, true)), LateDoing::GpuWork);
    assert_eq!(doing(&|second, process| process.cpu = Duration::from_secs(second)), LateDoing::Cpu);
    // Half a percent of a CPU is idle, and so is one that spins for its GPU.
    assert_eq!(doing(&|second, process| process.cpu = Duration::from_millis(second * 5)), LateDoing::Nothing);
    let spins = |second, process: &mut Process| {
        (process.cpu, process.gpu) = (Duration::from_secs(second), reported(5, true));
    };
    assert_eq!(doing(&spins), LateDoing::Nothing);
    assert_eq!(doing(&|second, process| process.io_bytes = second << 20), LateDoing::Files);
    assert_eq!(doing(&|_, process| process.is_in_io = true), LateDoing::Files);
    assert_eq!(doing(&|second, process| process.io_bytes = second * 100), LateDoing::Nothing, "a log");
    let steps = |second: u64, process: &mut Process| {
        process.members.as_mut().unwrap().push(report(HALF, 0, second / 10));
    };
    assert_eq!(doing(&steps), LateDoing::OtherCalls);
    let stops = |second, process: &mut Process| {
        process.is_stopped = second > 0;
        if second > 0 {
            (process.members, process.gpu) = (None, Gpu::Unanswered);
        }
    };
    assert_eq!(doing(&stops), LateDoing::Stopped, "its calls are still known");
}

#[test]
fn what_a_process_does_that_the_rank_has_started_counts() {
    let with_child = |parent, child_cpu: fn(u64) -> u64| {
        move |second| {
            let mut seen = job(&[9, 8]);
            let cpu = Duration::from_secs(child_cpu(second));
            seen.insert((200, 1), Process { pid: 20, parent: 101, ..Process::default() });
            seen.insert((201, 1), Process { pid: 21, parent, cpu, ..Process::default() });
            (seen, false)
        }
    };
    let doing = |at: &dyn Fn(u64) -> (Seen, bool)| first_late(at).unwrap().1.doing;
    assert_eq!(doing(&with_child(200, |second| second)), LateDoing::Cpu, "a loader of data");
    assert_eq!(doing(&with_child(200, |_| 0)), LateDoing::Nothing);
    assert_eq!(doing(&with_child(100, |second| second)), LateDoing::Nothing, "of another rank");
    assert_eq!(doing(&with_child(1, |second| second)), LateDoing::Nothing, "of no rank");
}

#[test]
fn checkpoints_do_not_count() {
    // Half of the time a checkpoint works on the job.
    let (second, late) = first_late(|second| (job(&[9, 8]), second % 2 == 1)).unwrap();
    assert_eq!((second, late.late_s), (60, 30.0));
    // Its own CPU time is not the rank's.
    let busy = |second: u64| {
        let mut seen = job(&[9, 8]);
        change(&mut seen, 1).cpu = Duration::from_secs(second.div_ceil(2));
        (seen, second % 2 == 1)
    };
    assert_eq!(first_late(busy).unwrap().1.doing, LateDoing::Nothing);
}

/// Rank 2 is late in the job's communicator, but itself waits for rank 3 in another one.
#[test]
fn the_rank_for_which_all_others_wait_in_the_end_is_named() {
    let at = |_| {
        let mut seen = job(&[9, 9, 8, 8]);
        change(&mut seen, 2).members.as_mut().unwrap().push(report(HALF, 0, 5));
        change(&mut seen, 3).members.as_mut().unwrap().push(report(HALF, 1, 4));
        (seen, false)
    };
    let late = polled(40, at).pop().unwrap();
    assert_eq!(late.iter().map(|late| late.rank).collect::<Vec<_>>(), [3]);
}

/// Two ranks have made calls on two communicators in different orders.
#[test]
fn ranks_that_wait_for_each_other_are_all_named() {
    let at = |_| {
        let mut seen = job(&[9, 8]);
        change(&mut seen, 0).members.as_mut().unwrap().push(report(HALF, 0, 4));
        change(&mut seen, 1).members.as_mut().unwrap().push(report(HALF, 1, 5));
        (seen, false)
    };
    let late = polled(40, at).pop().unwrap();
    let named: Vec<_> =
        late.iter().map(|late| (late.rank, &late.communicator[..], &late.waiting[..])).collect();
    assert_eq!(named, [(0, "00000002", &[1][..]), (1, "00000001", &[0][..])]);
}

#[test]
fn a_receive_that_is_missing_has_a_name() {
    let pair = |index, sequence| MemberReport {
        member: Member { communicator: Name(7 << 96), index },
        role: Role::Pair { of: WORLD, from: 0, to: 1 },
        sequence,
        call: String::new(),
    };
    let at = |_| {
        let mut seen = job(&[9, 9]);
        change(&mut seen, 0).members.as_mut().unwrap().push(pair(0, 3));
        change(&mut seen, 1).members.as_mut().unwrap().push(pair(1, 1));
        (seen, false)
    };
    let late = first_late(at).unwrap().1;
    assert_eq!((late.rank, late.call.as_deref(), late.number), (1, Some("ncclRecv"), 2));
    assert_eq!((&late.communicator[..], &late.waiting[..]), ("00000001", &[0][..]));
}

/// The name of a call is known only from a rank that has made no other one since.
#[test]
fn a_call_whose_name_is_unknown_has_a_number() {
    let late = first_late(|_| (job(&[12, 12, 8]), false)).unwrap().1;
    assert_eq!((late.call.as_deref(), late.number), (None, 9));
    assert!(
        late.describe()
            .contains("has not made call no. 9 on communicator 00000001 for 30 s; ranks 0-1 wait for it")
    );
}

/// Ranks 0 and 1 on node 0, ranks 2 and 3 on node 1, in two launchers.
fn of_two_nodes(at: impl Fn(u64) -> Seen) -> Option<(u64, LateRank)> {
    let begun = Instant::now();
    let mut nodes = [0, 1].map(|node| LateRanks::new(LIMIT, Some(node), begun));
    (0..200).find_map(|second| {
        let now = begun + Duration::from_secs(second);
        let of_node = |node: i32| -> Seen {
            let seen = at(second).into_iter();
            // The same PIDs on both machines.
            let moved = seen.filter(|((pid, _), _)| (pid - 100) / 2 == node);
            moved.map(|((pid, start), process)| ((100 + pid % 2, start), process)).collect()
        };
        let [first, other] = &mut nodes;
        let seen = of_node(1);
        other.update(&seen, Vec::new(), now, false);
        // As they are sent.
        let reports = serde_json::to_vec(&other.reports(&seen)).unwrap();
        let reports: Vec<RankReport> = serde_json::from_slice(&reports).unwrap();
        let others = reports.into_iter().map(|report| (1, report)).collect();
        Some((second, first.update(&of_node(0), others, now, false).into_iter().next()?.rank))
    })
}

#[test]
fn a_late_rank_on_another_node_is_named() {
    let (second, late) = of_two_nodes(|_| job(&[9, 9, 9, 8])).unwrap();
    assert_eq!((second, late.rank, late.pid, late.node), (30, 3, 13, Some(1)));
    assert_eq!(
        late.describe(),
        "rank 3 (process 13, python3, node 1) has not called ncclAllReduce, no. 9 on communicator 00000001, for 30 s; ranks 0-2 wait in it. It does nothing"
    );
    let (_, late) = of_two_nodes(|_| job(&[9, 8, 9, 9])).unwrap();
    assert_eq!((late.rank, late.node), (1, Some(0)));
    // It works, or it moves, or nobody waits.
    let works = |second| {
        let mut seen = job(&[9, 9, 9, 8]);
        change(&mut seen, 3).cpu = Duration::from_secs(second);
        seen
    };
    assert_eq!(of_two_nodes(works).unwrap().1.doing, LateDoing::Cpu);
    let moves = |second| job(&[9 + second / 20, 9 + second / 20, 9 + second / 20, 1 + second / 20]);
    assert_eq!(of_two_nodes(moves), None);
    assert_eq!(of_two_nodes(|second| job(&[9 + second, 9, 9, 9])), None);
    assert_eq!(of_two_nodes(|_| job(&[9, 9, 9, 9])), None);
}

#[test]
fn a_rank_with_very_many_pairs_is_told_in_part() {
    let mut seen = job(&[7]);
    let pair = |to| MemberReport {
        role: Role::Pair { of: WORLD, from: 0, to },
        ..report(Name(u128::from(to)), 0, 1)
    };
    let process = change(&mut seen, 0);
    process.members = Some((0..2000).map(pair).chain([report(WORLD, 0, 7)]).collect());
    let mut late = LateRanks::new(LIMIT, Some(1), Instant::now());
    late.update(&seen, Vec::new(), Instant::now(), false);
    let reports = late.reports(&seen);
    let members = &reports[0].members;
    assert!(members.len() == MEMBERS_TOLD && members[0].member.communicator == WORLD, "{}", members.len());
    assert!(serde_json::to_vec(&reports).unwrap().len() < 64 << 10);
}
