//! What is refused, with its line, and what a module says of itself.

mod support;

use simcuda_ptx::{Module, Space};
use support::kernel;

fn error(text: &str) -> String {
    match Module::parse(text) {
        Ok(_) => panic!("parsed: {text}"),
        Err(error) => error.to_string(),
    }
}

fn body_error(body: &str) -> String {
    let line_of_body = 13;
    let text = kernel(".param .u64 p", body);
    let message = error(&text);
    let prefix = format!("line {line_of_body}: ");
    match message.strip_prefix(&prefix) {
        Some(rest) => rest.to_owned(),
        None => panic!("{message} does not start with {prefix}"),
    }
}

#[test]
fn instructions_that_are_not_known() {
    assert_eq!(body_error("foo.u32 %r1, %r2;"), "unknown instruction `foo.u32`");
    assert_eq!(body_error("tex.1d.v4.f32.s32 %r1, %r2;"), "unknown instruction `tex.1d.v4.f32.s32`");
    assert_eq!(body_error("add.u8 %r1, %r2, %r3;"), "unknown instruction `add.u8`");
    assert_eq!(body_error("add.fast.u32 %r1, %r2, %r3;"), "`add.fast.u32`: `.fast` is not known here");
    assert_eq!(body_error("fence.odd;"), "`fence.odd`: `.odd` is not known here");
}

#[test]
fn operands_that_do_not_fit() {
    for (body, part) in [
        ("add.u32 %r1, %r2;", "2 operands"),
        ("add.u32 %d1, %r2, %r3;", "a register of type .b64 where .u32 is needed"),
        ("add.f32 %f1, %f2, 1;", "an integer constant"),
        ("add.u32 %f1, %r2, %r3;", "a register of type .f32"),
        ("add.u32 %r1, %r2, %r400;", "`%r400` is not declared"),
        ("add.u32 5, %r2, %r3;", "needs a register"),
        ("add.u32 %r1, %tid.x, %r3;", "can only be moved or converted"),
        ("mov.f32 %f1, 0f123;", "floating-point constant"),
        ("ld.global.u32 %r1, %d1;", "address in brackets"),
        ("ld.shared.u32 %r1, [p];", "another state space"),
        ("ld.relaxed.global.u32 %r1, [%d1];", "go together"),
        ("ld.global.v2.u32 {%r1}, [%d1];", "a vector of 2"),
        ("st.param.u64 [p], %d1;", "cannot be written"),
        ("cvt.f32.s32 %f1, %r1;", "needs another rounding"),
        ("div.f32 %f1, %f2, %f3;", "needs a rounding"),
        ("mul.u32 %r1, %r2, %r3;", "needs `.lo`, `.hi` or `.wide`"),
        ("setp.lt.b32 %p1, %r2, %r3;", "does not exist for .b32"),
        ("bar.sync 16;", "barrier 16 does not exist"),
        ("shfl.up.b32 %r1, %r2, 1, 0;", "needs `.sync`"),
        ("bra nowhere;", "label `nowhere` is not defined"),
        ("call nobody;", "function `nobody` is not declared"),
        ("@%r1 ret;", "is no predicate"),
        (".reg .u33 %x;", "unknown type"),
        (".reg .u32 %r0, %r0;", "already defined"),
        (".reg .u32 a; .reg .u32 a;", "already defined"),
        ("L: L: ret;", "already defined"),
        (".weird 5;", "unknown directive `.weird`"),
        (".local .b8 huge[1048576];", "larger than 512 KiB"),
        ("mov.u32 %r1, 5 / 0;", "division by zero"),
    ] {
        let message = body_error(body);
        assert!(message.contains(part), "{body}: {message}");
    }
}

#[test]
fn modules_that_are_malformed() {
    for (text, expected) in [
        ("", "line 1: a module starts with `.version`"),
        (".version 8.0\n.target gfx90", "line 2: unknown target `gfx90`"),
        (".version 12.0", "line 1: PTX version 12.0 is not known"),
        (".version 8.0\n.target sm_80\n.address_size 32", "line 3: only 64-bit addresses are supported"),
        (
            ".version 8.0\n.target sm_80\n\n.entry k() {",
            "line 4: expected an instruction, found the end of the text",
        ),
        (
            ".version 8.0\n.target sm_80\n.global .u32 x[2] = {1, 2, 3};",
            "line 3: too many initial values for `x`",
        ),
        (".version 8.0\n.target sm_80\n.global .u32 x[];", "line 3: `x` needs a size"),
        (".version 8.0\n.target sm_80\n.global .u32 x;\n.global .u32 x;", "line 4: `x` is already defined"),
        (
            ".version 8.0\n.target sm_80\n.global .u64 x = y;",
            "line 3: `y` has no address that could be an initial value",
        ),
        (".version 8.0\n.target sm_80\n.tex .u64 t;", "line 3: unknown directive `.tex`"),
        (".version 8.0\n.target sm_80\n\u{e9}", "line 3: unexpected character `\\u{e9}`"),
    ] {
        assert_eq!(error(text), expected);
    }
}

#[test]
#[cfg_attr(miri, ignore = "reads a file")]
fn any_cut_of_a_module_is_an_error_and_no_panic() {
    let text =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/kernels/language.sm_90.ptx"))
            .unwrap();
    let (step, last) = (7, text.rfind('}').unwrap());
    for end in (0..last).step_by(step).filter(|end| text.is_char_boundary(*end)) {
        // A cut between two functions leaves a module that is whole.
        drop(Module::parse(&text[..end]));
    }
    assert!(Module::parse(&text[..last]).is_err());
}

#[test]
fn a_module_describes_itself() {
    let text = ".version 7.8\n.target sm_90a, debug\n.address_size 64
        .file 1 \"a.cu\"\n.visible .global .align 8 .f32 weights[3] = {1.0, 0f40000000};\n.const .u16 small = 7;
        .global .u64 link = generic(weights)+4;\n.global .u8 low = 0xff(weights);\n.global .u8 next = 0xff00(weights);
        .visible .entry k(.param .u32 a, .param .u64 .ptr .global .align 4 b, .param .align 16 .b8 c[20])
        .minnctapersm 2 .maxntid 8, 4
        { .pragma \"nounroll\"; .local .align 4 .b8 stack[24]; .loc 1 5 3
          ret; }
        .func helper() { ret; }
        .section .debug_str { info: .b8 97, 0 }";
    let module = Module::parse(text).unwrap();
    assert_eq!((module.version(), module.target_sm()), ((7, 8), 90));
    let names: Vec<_> = module.functions().map(|f| f.name.as_str()).collect();
    assert_eq!(names, ["k"]);
    let function = module.function("k").unwrap();
    let params: Vec<_> =
        function.params.iter().map(|p| (p.name.as_str(), p.offset, p.size, p.align)).collect();
    assert_eq!(params, [("a", 0, 4, 4), ("b", 8, 8, 8), ("c", 16, 20, 16)]);
    assert_eq!((function.param_bytes, function.local_bytes, function.max_threads), (36, 24, Some(32)));
    assert!(module.function("helper").is_none());

    let globals = module.globals();
    let shapes: Vec<_> =
        globals.iter().map(|g| (g.name.as_str(), g.space, g.size_bytes, g.align, g.visible)).collect();
    assert_eq!(shapes[0], ("weights", Space::Global, 12, 8, true));
    assert_eq!(shapes[1], ("small", Space::Const, 2, 2, false));
    assert_eq!((globals[2].relocations[0].symbol.as_str(), globals[2].relocations[0].addend), ("weights", 4));

    let addresses = vec![0x1234_5600, 0x2000, 0x3000, 0x4000, 0x4001];
    let image = simcuda_ptx::Image::new(std::sync::Arc::new(module), addresses);
    assert_eq!(image.initial_bytes(0), [1f32.to_le_bytes(), 2f32.to_le_bytes(), [0; 4]].concat());
    assert_eq!(image.initial_bytes(1), [7, 0]);
    assert_eq!(image.initial_bytes(2), 0x1234_5604u64.to_le_bytes());
    assert_eq!((image.initial_bytes(3), image.initial_bytes(4)), (vec![0x00], vec![0x56]));
}
