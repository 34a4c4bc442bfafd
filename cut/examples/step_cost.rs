//! The cost of a step while no cut is wanted, in nanoseconds: `cargo run --release -p ckpt-cut --example step_cost`.

use std::hint::black_box;
use std::time::Instant;

use ckpt_cut::rank::Clock;
use ckpt_cut::{Member, Name, Role};

const STEPS: u32 = 5_000_000;

fn main() {
    let clock = Clock::new(&["ncclAllReduce"], || ());
    let entries: Vec<_> = (0..4)
        .map(|name| {
            let member = Member { communicator: Name(name), index: 0 };
            clock.register(member, Role::Communicator { awaits: None, alias: None })
        })
        .collect();
    for communicators in [1, 2, 4] {
        let step: Vec<_> = entries[..communicators].iter().map(|entry| (&**entry, 1)).collect();
        let best = (0..5).map(|_| measure(&clock, &step)).fold(f64::INFINITY, f64::min);
        println!("begin and end of a step over {communicators} communicators: {best:.1} ns");
    }
}

fn measure(clock: &Clock, step: &[(&ckpt_cut::rank::Entry, u32)]) -> f64 {
    let start = Instant::now();
    for _ in 0..STEPS {
        drop(clock.begin(black_box(step), 0));
    }
    start.elapsed().as_secs_f64() * 1e9 / f64::from(STEPS)
}
