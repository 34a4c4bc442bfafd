//! What hardware refuses is refused, with its address, line and thread.

mod support;

use simcuda_ptx::{Fault, Image, Site};
use support::{Shape, TestMemory, arg, image, kernel, launch};

/// Lines of a kernel from `support::kernel` that come before its body.
const LINES_BEFORE: u32 = 13;

fn run(body: &str, memory: &mut TestMemory, shape: &Shape, address: u64) -> Result<(), Fault> {
    let text = kernel(".param .u64 p", &format!("ld.param.u64 %d0, [p];\n{body}")).replace(
        "\n.visible .entry",
        " .shared .align 8 .b8 inner[16]; .const .u32 fixed[2];\n.visible .entry",
    );
    let image = image(&text, memory);
    launch(&image, "test", shape, &[arg(address)], memory)
}

fn one(body: &str, address: u64, memory: &mut TestMemory) -> Fault {
    run(body, memory, &Shape::new(1, 1), address).unwrap_err()
}

fn site(block: u32, thread: u32) -> Site {
    Site { function: "test".into(), block: [block, 0, 0], thread: [thread, 0, 0] }
}

#[test]
fn illegal_addresses() {
    let mut memory = TestMemory::default();
    let buffer = memory.alloc(64);
    let read = |address, size_bytes| Fault::IllegalAddress {
        address,
        size_bytes,
        write: false,
        line: LINES_BEFORE + 1,
        site: site(0, 0),
    };
    assert_eq!(one("ld.global.u32 %r1, [%d0];", 0, &mut memory), read(0, 4));
    assert_eq!(one("ld.global.u32 %r1, [%d0+64];", buffer, &mut memory), read(buffer + 64, 4));
    assert_eq!(one("ld.global.v2.u64 {%d1, %d2}, [%d0+56];", buffer & !15, &mut memory), {
        // Aligned to 8 only.
        Fault::MisalignedAddress {
            address: buffer + 56,
            size_bytes: 16,
            line: LINES_BEFORE + 1,
            site: site(0, 0),
        }
    });
    assert_eq!(one("ld.shared.u32 %r1, [inner+16];", 0, &mut memory), read(16, 4));
    assert_eq!(one("mov.u64 %d1, 0; ld.local.u32 %r1, [%d1];", 0, &mut memory), read(0, 4));
    assert_eq!(one("mov.u64 %d1, 8; ld.param.u32 %r1, [%d1];", 0, &mut memory), read(8, 4));
    assert_eq!(one("cvta.shared.u64 %d1, %d0; ld.u32 %r1, [%d1];", 1 << 20, &mut memory), {
        let Fault::IllegalAddress { address, .. } =
            one("cvta.shared.u64 %d1, %d0; ld.u32 %r1, [%d1];", 1 << 20, &mut memory)
        else {
            panic!("a generic address outside shared memory");
        };
        read(address, 4)
    });
}

#[test]
fn writes_to_read_only_memory() {
    let mut memory = TestMemory::default();
    let buffer = memory.put(&[7u32]);
    memory.make_read_only(buffer);
    assert_eq!(run("ld.global.u32 %r1, [%d0];", &mut memory, &Shape::new(1, 1), buffer), Ok(()));
    for body in ["st.global.u32 [%d0], 1;", "red.global.add.u32 [%d0], 1;"] {
        let fault = one(body, buffer, &mut memory);
        assert!(
            matches!(fault, Fault::IllegalAddress { address, write: true, .. } if address == buffer),
            "{fault}"
        );
    }
    assert_eq!(memory.get::<u32>(buffer, 1), [7]);
}

#[test]
fn misaligned_addresses() {
    let mut memory = TestMemory::default();
    let buffer = memory.alloc(64);
    for (body, offset, size) in [
        ("ld.global.u32 %r1, [%d0];", 2, 4),
        ("st.global.u16 [%d0], 1;", 1, 2),
        ("atom.global.add.u64 %d1, [%d0], 1;", 4, 8),
        ("st.global.v4.u32 [%d0], {1, 2, 3, 4};", 8, 16),
    ] {
        let fault = one(body, buffer + offset, &mut memory);
        let expected = Fault::MisalignedAddress {
            address: buffer + offset,
            size_bytes: size,
            line: LINES_BEFORE + 1,
            site: site(0, 0),
        };
        assert_eq!(fault, expected, "{body}");
    }
    let shared = one("ld.shared.u32 %r1, [inner+1];", 0, &mut memory);
    assert!(matches!(shared, Fault::MisalignedAddress { address: 1, .. }), "{shared}");
}

#[test]
fn the_thread_is_named() {
    let mut memory = TestMemory::default();
    let body = "mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; setp.eq.u32 %p1, %r1, 37; setp.eq.and.u32 %p2, %r2, 2, %p1;\n\
                @%p2 trap;";
    let fault = run(body, &mut memory, &Shape::new(4, 64), 0).unwrap_err();
    assert_eq!(fault, Fault::Trap { line: LINES_BEFORE + 2, site: site(2, 37) });
    assert_eq!(fault.to_string(), "trap (line 15, test block [2, 0, 0] thread [37, 0, 0])");
}

#[test]
fn other_faults() {
    let mut memory = TestMemory::default();
    assert!(matches!(one("brkpt;", 0, &mut memory), Fault::Trap { .. }));
    let indirect = "proto: .callprototype _ (); call %d0, proto;";
    assert!(matches!(one(indirect, 64, &mut memory), Fault::InvalidProgramCounter { target: 64, .. }));
    let table = "targets: .branchtargets A, B; cvt.u32.u64 %r1, %d0; brx.idx %r1, targets; A: B:";
    assert!(matches!(one(table, 2, &mut memory), Fault::InvalidProgramCounter { target: 2, .. }));
    let barrier = "cvt.u32.u64 %r1, %d0; bar.sync %r1;";
    assert!(matches!(one(barrier, 16, &mut memory), Fault::IllegalInstruction { .. }));
}

#[test]
#[cfg_attr(miri, ignore = "calls deeply")]
fn endless_recursion_uses_up_the_stack() {
    let text = kernel("", "call down;").replace(
        ".visible .entry",
        ".func down\n{ .local .b8 area[256]; .reg .u32 x; st.local.u32 [area], 1; call down; ld.local.u32 x, [area]; }\n.visible .entry",
    );
    let mut memory = TestMemory::default();
    let image = image(&text, &mut memory);
    let fault = launch(&image, "test", &Shape::new(1, 32), &[], &memory).unwrap_err();
    assert!(matches!(&fault, Fault::HardwareStackError { site, .. } if site.function == "down"), "{fault}");
}

fn with_directives(directives: &str, memory: &mut TestMemory) -> Image {
    let text = kernel("", "").replace("test()", &format!("test() {directives}"));
    image(&text, memory)
}

#[test]
fn launches_that_do_not_fit() {
    let mut memory = TestMemory::default();
    let plain = with_directives("", &mut memory);
    let small = with_directives(".maxntid 64, 2, 1", &mut memory);
    let exact = with_directives(".reqntid 64", &mut memory);
    let shape = Shape::new;
    let attempt = |image: &Image, shape: Shape| launch(image, "test", &shape, &[], &TestMemory::default());
    assert_eq!(attempt(&small, shape(1, 128)), Ok(()));
    assert!(matches!(attempt(&small, shape(1, 129)), Err(Fault::LaunchOutOfResources(_))));
    assert_eq!(attempt(&exact, shape(1, 64)), Ok(()));
    assert!(matches!(attempt(&exact, shape(1, 63)), Err(Fault::InvalidLaunch(_))));
    assert!(matches!(attempt(&plain, shape(1, 1025)), Err(Fault::LaunchOutOfResources(_))));
    assert!(matches!(attempt(&plain, shape(0, 1)), Err(Fault::InvalidLaunch(_))));
    let large = Shape { shared: 228 << 10, ..shape(1, 1) };
    assert!(matches!(attempt(&plain, large), Err(Fault::LaunchOutOfResources(_))));
    let cluster = Shape { cluster: [2, 1, 1], ..shape(3, 1) };
    assert!(matches!(attempt(&plain, cluster), Err(Fault::InvalidLaunch(_))));
    assert_eq!(small.module().function("test").unwrap().max_threads, Some(128));
    assert_eq!(exact.module().function("test").unwrap().required_threads, Some([64, 1, 1]));
}
