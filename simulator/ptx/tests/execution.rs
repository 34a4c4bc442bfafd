//! How threads execute: divergence, barriers, waiting, calls, launches of every shape, and how they end.

mod support;

use std::sync::atomic::Ordering;
use std::time::Duration;

use simcuda_ptx::{Fault, Image, Module};
use support::{Shape, TestMemory, arg, image, kernel, launch, load, run_block};

/// Runs 32 threads; each stores `%r10`.
fn run(declarations: &str, body: &str, threads: u32) -> Vec<u32> {
    run_block(declarations, &format!("{body}\nst.global.u32 [%d0], %r10;"), threads, 1).unwrap()
}

fn with_out(body: &str) -> String {
    kernel(".param .u64 out", &format!("ld.param.u64 %d0, [out];\n{body}"))
}

#[test]
fn diverged_lanes_meet_again() {
    let body = "and.b32 %r1, %r0, 3; setp.eq.u32 %p1, %r1, 0; setp.eq.u32 %p2, %r1, 1; mov.u32 %r10, 0;
        @%p1 bra A; @%p2 bra B; mov.u32 %r10, 300; bra C;
        A: mov.u32 %r10, 100; bra C;
        B: mov.u32 %r10, 200;
        C: activemask.b32 %r2; popc.b32 %r3, %r2; add.u32 %r10, %r10, %r3;";
    let expected: Vec<u32> = (0..32).map(|t| [132, 232, 332, 332][t % 4]).collect();
    assert_eq!(run("", body, 32), expected);
}

#[test]
fn loops_with_a_count_of_their_own() {
    let body = "mov.u32 %r10, 0; mov.u32 %r1, %r0;
        loop: setp.eq.u32 %p1, %r1, 0; @%p1 bra done; add.u32 %r10, %r10, %r1; sub.u32 %r1, %r1, 1; bra loop;
        done: activemask.b32 %r2; setp.ne.u32 %p2, %r2, -1; @%p2 mov.u32 %r10, 9999;";
    assert_eq!(run("", body, 32), (0..32).map(|t| t * (t + 1) / 2).collect::<Vec<_>>());
}

#[test]
fn jump_tables() {
    let body = "rem.u32 %r1, %r0, 3; targets: .branchtargets L0, L1, L2; brx.idx %r1, targets;
        L0: mov.u32 %r10, 5; bra END; L1: mov.u32 %r10, 6; bra END; L2: mov.u32 %r10, 7; END:";
    assert_eq!(run("", body, 32), (0..32).map(|t| 5 + t % 3).collect::<Vec<_>>());
}

#[test]
fn scopes_have_registers_and_labels_of_their_own() {
    let body =
        "mov.u32 %r10, 1; { .reg .u32 %r10; .reg .u32 x<3>; mov.u32 %r10, 50; mov.u32 x2, 7; bra end; end: }
        { .reg .u32 x; mov.u32 x, 8; bra end; add.u32 x, x, 1; end: add.u32 %r10, %r10, x; }";
    assert_eq!(run("", body, 1), [9]);
}

/// Every thread of two warps passes the lock in turn. Lanes of the same warp contend, so that the one that holds it
/// must get on while the others spin.
#[test]
#[cfg_attr(miri, ignore = "spins for long")]
fn a_spin_lock_within_a_warp() {
    let body = "mov.u64 %d2, lock; mov.u64 %d3, counter;
        spin: atom.acquire.gpu.global.cas.b32 %r1, [%d2], 0, 1; setp.ne.u32 %p1, %r1, 0; @%p1 bra spin;
        ld.relaxed.gpu.global.u32 %r2, [%d3]; add.u32 %r2, %r2, 1; st.relaxed.gpu.global.u32 [%d3], %r2;
        membar.gl; st.release.gpu.global.u32 [%d2], 0;
        bar.sync 0; ld.relaxed.gpu.global.u32 %r10, [%d3];";
    assert_eq!(run(".global .u32 lock;\n.global .u32 counter;", body, 64), vec![64; 64]);
}

#[test]
fn one_lane_waits_for_another_at_a_lower_address() {
    // Lane 0 spins before the code that lane 1 must execute to release it.
    let body = "mov.u64 %d2, flag; setp.ne.u32 %p1, %r0, 0; mov.u32 %r10, 1; @%p1 bra SET;
        WAIT: ld.volatile.global.u32 %r1, [%d2]; setp.eq.u32 %p2, %r1, 0; @%p2 bra WAIT; mov.u32 %r10, 2; bra END;
        SET: st.volatile.global.u32 [%d2], 1;
        END:";
    assert_eq!(run(".global .u32 flag;", body, 2), [2, 1]);
}

#[test]
fn a_barrier_orders_shared_memory() {
    let body = "mov.u32 %r1, values; shl.b32 %r2, %r0, 2; add.u32 %r3, %r1, %r2; st.shared.u32 [%r3], %r0; bar.sync 0;
        sub.u32 %r4, 95, %r0; shl.b32 %r4, %r4, 2; add.u32 %r5, %r1, %r4; ld.shared.u32 %r10, [%r5];";
    assert_eq!(run(".shared .u32 values[96];", body, 96), (0..96).rev().collect::<Vec<_>>());
}

#[test]
fn barriers_of_some_warps_and_of_threads_that_are_left() {
    // Warp 0 produces, warp 1 consumes: barrier 1 of 64 threads, at which the producer only arrives.
    let body = "setp.lt.u32 %p1, %r0, 32; mov.u32 %r10, 0; @!%p1 bra CONSUMER;
        st.shared.u32 [value], 77; bar.arrive 1, 64; exit;
        CONSUMER: setp.ge.u32 %p2, %r0, 64; @%p2 bra OTHER; bar.sync 1, 64; ld.shared.u32 %r10, [value]; bra END;
        OTHER: mov.u32 %r10, 5;
        END: bar.sync 0;";
    let result = run(".shared .u32 value;", body, 96);
    assert_eq!(result, [vec![0; 32], vec![77; 32], vec![5; 32]].concat());
}

#[test]
fn barriers_that_reduce() {
    let body = "setp.lt.u32 %p1, %r0, 40; bar.red.popc.u32 %r1, 0, %p1; bar.red.and.pred %p2, 0, %p1;
        bar.red.or.pred %p3, 0, !%p1; selp.u32 %r2, 100, 0, %p2; selp.u32 %r3, 200, 0, %p3;
        add.u32 %r10, %r1, %r2; add.u32 %r10, %r10, %r3;";
    assert_eq!(run("", body, 70), vec![240; 70]);
}

#[test]
fn lanes_that_part_synchronise_among_themselves() {
    // The halves exchange values at different instructions, with masks of their own, and then all together.
    let body = "setp.lt.u32 %p1, %r0, 16; @!%p1 bra HIGH;
        shfl.sync.bfly.b32 %r1, %r0, 1, 31, 0x0000ffff; bra JOIN;
        HIGH: bar.warp.sync 0xffff0000; shfl.sync.bfly.b32 %r1, %r0, 2, 31, 0xffff0000;
        JOIN: shfl.sync.idx.b32 %r2, %r1, 31, 31, -1; mad.lo.u32 %r10, %r2, 100, %r1;";
    let expected: Vec<u32> = (0..32).map(|t| 2900 + if t < 16 { t ^ 1 } else { t ^ 2 }).collect();
    assert_eq!(run("", body, 32), expected);
}

#[test]
fn members_wait_across_branches() {
    // A vote whose members stand at two instructions.
    let body = "setp.lt.u32 %p1, %r0, 20; setp.lt.u32 %p2, %r0, 24; @!%p1 bra ELSE;
        vote.sync.ballot.b32 %r10, %p2, -1; bra JOIN;
        ELSE: vote.sync.ballot.b32 %r10, %p2, -1; add.u32 %r10, %r10, 1;
        JOIN:";
    let expected: Vec<u32> = (0..32).map(|t| 0x00ff_ffff + u32::from(t >= 20)).collect();
    assert_eq!(run("", body, 32), expected);
}

#[test]
fn exited_lanes_are_not_waited_for() {
    let body = "mov.u32 %r10, 4; st.global.u32 [%d0], 3; setp.lt.u32 %p1, %r0, 8; @%p1 exit;
        vote.sync.ballot.b32 %r10, 1, -1; bar.sync 0;";
    let result = run("", body, 32);
    assert_eq!(result, [vec![3; 8], vec![0xffff_ff00; 24]].concat());
}

const FACTORIAL: &str = ".func (.param .b32 result) factorial (.param .b32 n)
{
    .reg .u32 %r<4>; .reg .pred %p;
    .param .b32 arg; .param .b32 ret;
    ld.param.u32 %r1, [n];
    setp.gt.u32 %p, %r1, 1;
    @%p bra RECURSE;
    st.param.u32 [result], 1;
    ret;
RECURSE:
    sub.u32 %r2, %r1, 1;
    st.param.u32 [arg], %r2;
    call (ret), factorial, (arg);
    ld.param.u32 %r3, [ret];
    mul.lo.u32 %r3, %r3, %r1;
    st.param.u32 [result], %r3;
}";

#[test]
fn recursion_of_different_depth_per_lane() {
    let body = "rem.u32 %r1, %r0, 12; .param .b32 a; .param .b32 b; st.param.u32 [a], %r1;
        call (b), factorial, (a); ld.param.u32 %r10, [b];";
    let expected: Vec<u32> = (0..32u32).map(|t| (1..=t % 12).product()).collect();
    assert_eq!(run(FACTORIAL, body, 32), expected);
}

#[test]
fn calls_with_registers_and_local_variables() {
    let function = ".func (.reg .u32 result) twist (.reg .u32 a, .reg .u64 b)
        { .local .align 8 .b8 area[16]; .reg .u32 x; st.local.u32 [area+4], a; cvt.u32.u64 x, b;
          st.local.u32 [area], x; ld.local.u32 x, [area+4]; ld.local.u32 result, [area]; sub.u32 result, x, result; ret; }";
    let body = ".local .u32 own; st.local.u32 [own], %r0; add.u32 %r1, %r0, 10; call (%r2), twist, (%r1, 3);
        ld.local.u32 %r3, [own]; add.u32 %r10, %r2, %r3;";
    assert_eq!(run(function, body, 32), (0..32).map(|t| 2 * t + 7).collect::<Vec<_>>());
}

#[test]
fn indirect_calls() {
    let functions = ".func (.param .b32 r) plus (.param .b32 x) { .reg .u32 a; ld.param.u32 a, [x]; add.u32 a, a, 1; st.param.u32 [r], a; }
        .func (.param .b32 r) times (.param .b32 x) { .reg .u32 a; ld.param.u32 a, [x]; mul.lo.u32 a, a, 2; st.param.u32 [r], a; }
        .global .u64 table[2] = {plus, times};";
    let body = "proto: .callprototype (.param .b32 _) _ (.param .b32 _);
        and.b32 %r1, %r0, 1; mul.wide.u32 %d2, %r1, 8; mov.u64 %d3, table; add.u64 %d3, %d3, %d2; ld.global.u64 %d4, [%d3];
        .param .b32 a; .param .b32 b; st.param.u32 [a], %r0; call (b), %d4, (a), proto; ld.param.u32 %r10, [b];";
    let expected: Vec<u32> = (0..32).map(|t| if t % 2 == 0 { t + 1 } else { 2 * t }).collect();
    assert_eq!(run(functions, body, 32), expected);
}

#[test]
fn three_dimensions_and_many_blocks() {
    let body = "mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mov.u32 %r3, %ctaid.z; mov.u32 %r4, %nctaid.x; mov.u32 %r5, %nctaid.y;
        mad.lo.u32 %r6, %r3, %r5, %r2; mad.lo.u32 %r6, %r6, %r4, %r1;
        mov.u32 %r7, %tid.x; mov.u32 %r8, %tid.y; mov.u32 %r9, %tid.z; mov.u32 %r11, %ntid.x; mov.u32 %r12, %ntid.y;
        mad.lo.u32 %r13, %r9, %r12, %r8; mad.lo.u32 %r13, %r13, %r11, %r7; mad.lo.u32 %r14, %r6, 30, %r13;
        mul.wide.u32 %d1, %r14, 4; add.u64 %d2, %d0, %d1; st.global.u32 [%d2], %r14;";
    let mut memory = TestMemory::default();
    let image = image(&with_out(body), &mut memory);
    let out = memory.alloc(24 * 30 * 4);
    for workers in [1, 3] {
        let shape = Shape { grid: [4, 3, 2], block: [5, 3, 2], workers, ..Shape::new(1, 1) };
        launch(&image, "test", &shape, &[arg(out)], &memory).unwrap();
        assert_eq!(memory.get::<u32>(out, 720), (0..720).collect::<Vec<_>>());
        memory.write_bytes(out, &[0; 2880]);
    }
}

#[test]
fn atomics_from_all_blocks() {
    let body = "atom.global.add.u32 %r1, [%d0], 1; add.u64 %d1, %d0, 8; red.global.max.u32 [%d1], %r1;
        add.u64 %d2, %d0, 16; red.global.add.f64 [%d2], 0d3FF0000000000000;";
    let mut memory = TestMemory::default();
    let image = image(&with_out(body), &mut memory);
    let out = memory.alloc(24);
    launch(&image, "test", &Shape { workers: 3, ..Shape::new(40, 100) }, &[arg(out)], &memory).unwrap();
    assert_eq!(memory.get::<u32>(out, 3), [4000, 0, 3999]);
    assert_eq!(memory.get::<f64>(out + 16, 1), [4000.0]);
}

/// Blocks wait for each other by counting arrivals in global memory, several times.
#[test]
fn a_grid_barrier_in_a_cooperative_launch() {
    let body = "mov.u32 %r1, %tid.x; mov.u32 %r2, %nctaid.x; mov.u32 %r3, 0; setp.eq.u32 %p1, %r1, 0; add.u64 %d1, %d0, 4;
        ROUND: red.global.add.u32 [%d1], 1; bar.sync 0; @!%p1 bra WAITED;
        membar.gl; atom.global.add.u32 %r4, [%d0], 1; add.u32 %r5, %r3, 1; mul.lo.u32 %r5, %r5, %r2;
        SPIN: ld.acquire.gpu.global.u32 %r6, [%d0]; setp.lt.u32 %p2, %r6, %r5; @%p2 bra SPIN;
        WAITED: bar.sync 0; ld.relaxed.gpu.global.u32 %r7, [%d1]; add.u32 %r3, %r3, 1;
        mov.u32 %r8, %ntid.x; mul.lo.u32 %r8, %r8, %r2; mul.lo.u32 %r8, %r8, %r3; setp.lt.u32 %p3, %r7, %r8;
        add.u64 %d2, %d0, 8; @%p3 red.global.add.u32 [%d2], 1; setp.lt.u32 %p4, %r3, 3; @%p4 bra ROUND;";
    for workers in [1, 2] {
        let mut memory = TestMemory::default();
        let image = image(&with_out(body), &mut memory);
        let out = memory.alloc(12);
        let shape = Shape { cooperative: true, workers, ..Shape::new(9, 64) };
        launch(&image, "test", &shape, &[arg(out)], &memory).unwrap();
        assert_eq!(memory.get::<u32>(out, 3), [27, 9 * 64 * 3, 0]);
    }
}

#[test]
fn clusters_share_memory_and_barriers() {
    // Each block writes its rank to the next one's shared memory.
    let body = "mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, %cluster_nctarank; add.u32 %r3, %r1, 1; rem.u32 %r3, %r3, %r2;
        mov.u32 %r4, slot; mapa.shared::cluster.u32 %r5, %r4, %r3; st.shared::cluster.u32 [%r5], %r1;
        barrier.cluster.arrive; barrier.cluster.wait; ld.shared.u32 %r6, [slot];
        mov.u32 %r7, %ctaid.x; mul.wide.u32 %d1, %r7, 4; add.u64 %d2, %d0, %d1; st.global.u32 [%d2], %r6;
        mov.u64 %d3, slot; cvta.shared.u64 %d4, %d3; mapa.u64 %d5, %d4, %r3; getctarank.u32 %r8, %d5;";
    let text = with_out(&body.replace("getctarank.u32", "getctarank.u64"))
        .replace(".visible .entry", ".shared .u32 slot;\n.visible .entry");
    let mut memory = TestMemory::default();
    let image = image(&text, &mut memory);
    let out = memory.alloc(32);
    let shape = Shape { cluster: [4, 1, 1], ..Shape::new(8, 32) };
    launch(&image, "test", &shape, &[arg(out)], &memory).unwrap();
    assert_eq!(memory.get::<u32>(out, 8), [3, 0, 1, 2, 3, 0, 1, 2]);
}

#[test]
fn dynamic_shared_memory_follows_static() {
    let text = with_out(
        "mov.u32 %r1, dynamic; mov.u32 %r2, %dynamic_smem_size; mov.u32 %r3, %total_smem_size;
        st.shared.u32 [dynamic+28], 9; ld.shared.u32 %r4, [dynamic+28];
        st.global.v4.u32 [%d0], {%r1, %r2, %r3, %r4}; st.shared.u32 [fixed], 1;",
    )
    .replace(
        ".visible .entry",
        ".shared .b8 fixed[20];\n.extern .shared .align 16 .b8 dynamic[];\n.visible .entry",
    );
    let mut memory = TestMemory::default();
    let image = image(&text, &mut memory);
    assert_eq!(image.module().function("test").unwrap().static_shared_bytes, 32);
    let out = memory.alloc(16);
    let shape = Shape { shared: 32, ..Shape::new(1, 1) };
    launch(&image, "test", &shape, &[arg(out)], &memory).unwrap();
    assert_eq!(memory.get::<u32>(out, 4), [32, 32, 64, 9]);
    let none = Shape::new(1, 1);
    assert!(matches!(
        launch(&image, "test", &none, &[arg(out)], &memory),
        Err(Fault::IllegalAddress { address: 60, write: true, size_bytes: 4, .. })
    ));
}

#[test]
fn modules_are_linked() {
    let library = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .global .u32 shared_value = 5;
        .global .u32 private = 100;
        .visible .func (.param .b32 r) helper (.param .b32 x)
        { .reg .u32 %a<3>; ld.param.u32 %a0, [x]; ld.global.u32 %a1, [private]; add.u32 %a0, %a0, %a1; st.param.u32 [r], %a0; }";
    let main = with_out(
        ".param .b32 a; .param .b32 b; ld.global.u32 %r1, [shared_value]; st.param.u32 [a], %r1;
        call (b), helper, (a); ld.param.u32 %r2, [b]; ld.global.u32 %r3, [private]; add.u32 %r2, %r2, %r3;
        st.global.u32 [%d0], %r2;",
    )
    .replace(".visible .entry", ".extern .global .u32 shared_value;\n.extern .func (.param .b32 r) helper (.param .b32 x);\n.global .u32 private = 1000;\n.visible .entry");
    let parse = |text: &str| Module::parse(text).unwrap();
    let missing = Module::link(vec![parse(&main)]).err().unwrap();
    assert!(missing.message.contains("shared_value"), "{missing}");
    let twice = Module::link(vec![parse(library), parse(library)]).err().unwrap();
    assert!(twice.message.contains("multiple definition"), "{twice}");

    let mut memory = TestMemory::default();
    for order in [[main.as_str(), library], [library, main.as_str()]] {
        let linked: Image = load(Module::link(order.map(parse).into()).unwrap(), &mut memory);
        let out = memory.alloc(4);
        launch(&linked, "test", &Shape::new(1, 1), &[arg(out)], &memory).unwrap();
        assert_eq!(memory.get::<u32>(out, 1), [1105]);
    }
}

#[test]
fn a_kernel_without_an_end_is_cancelled() {
    for body in [
        "LOOP: bra LOOP;",
        "LOOP: nanosleep.u32 100; bra LOOP;",
        "mov.u32 %r1, %tid.x; setp.eq.u32 %p1, %r1, 0; @%p1 bar.sync 0, 64;",
    ] {
        let mut memory = TestMemory::default();
        let image = image(&with_out(body), &mut memory);
        let result = std::thread::scope(|scope| {
            let running = scope.spawn(|| launch(&image, "test", &Shape::new(4, 32), &[arg(0u64)], &memory));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!running.is_finished(), "{body}");
            memory.cancelled.store(true, Ordering::Relaxed);
            running.join().unwrap()
        });
        assert_eq!(result, Err(Fault::Cancelled), "{body}");
    }
}
