//! The device code, as PTX text: one kernel that sends to peers, receives from them and reduces, through slots of memory
//! and counters that say how many chunks are ready and how many are consumed. It waits on the counters: where a peer is
//! missing, it waits for ever.

use std::fmt::Write;

use crate::types::{DataType, Reduction};

/// Bytes of one slot: a chunk of a transfer.
pub(crate) const SLOT_BYTES: usize = 64 << 10;
/// Slots of one direction between two ranks; a power of two.
pub(crate) const SLOTS: usize = 2;
/// Threads of the kernel's only block.
pub(crate) const THREADS: u32 = 256;
/// The kernel's name.
pub(crate) const NAME: &str = "simnccl_run";

/// Offset of the entries in a work descriptor.
pub(crate) const ENTRIES_AT: usize = 128;
/// Bytes of an entry: peer, address, length, source, 8 bytes each. The source of what is received is the peer's memory,
/// or 0 if it comes through slots; that of what is sent is not 0 if the peer reads it where it is.
pub(crate) const ENTRY_BYTES: usize = 32;
/// Bytes of a row of the table of peers.
pub(crate) const ROW_BYTES: usize = 64;

/// How a type is loaded, computed with and stored.
struct Arithmetic {
    declarations: &'static str,
    /// Of `%a` into `ACC`.
    load: &'static str,
    /// To `%a`.
    store: &'static str,
    /// The suffix of instructions on the accumulator.
    suffix: &'static str,
    /// The accumulator divided by `%ranks`.
    divide: &'static str,
}

const INT: &str = ".reg .b32 %acc, %x, %by;";
const LONG: &str = ".reg .b64 %acc, %x, %by;";
const SINGLE: &str = ".reg .f32 %acc, %x, %by; .reg .b16 %h;";
const DOUBLE: &str = ".reg .f64 %acc, %x, %by;";
const DIVIDE_SINGLE: &str = "cvt.rn.f32.u32 %by, ranks;\n    div.rn.f32 %acc, %acc, %by;";

/// The parts of an [`Arithmetic`], in its order.
type Parts = [&'static str; 5];

fn of_integers(ty: DataType) -> Option<Parts> {
    Some(match ty {
        DataType::Int8 => {
            [INT, "ld.global.s8 ACC, [%a];", "st.global.u8 [%a], %acc;", "s32", "div.s32 %acc, %acc, ranks;"]
        }
        DataType::Uint8 => {
            [INT, "ld.global.u8 ACC, [%a];", "st.global.u8 [%a], %acc;", "u32", "div.u32 %acc, %acc, ranks;"]
        }
        DataType::Int32 => [
            INT,
            "ld.global.s32 ACC, [%a];",
            "st.global.s32 [%a], %acc;",
            "s32",
            "div.s32 %acc, %acc, ranks;",
        ],
        DataType::Uint32 => [
            INT,
            "ld.global.u32 ACC, [%a];",
            "st.global.u32 [%a], %acc;",
            "u32",
            "div.u32 %acc, %acc, ranks;",
        ],
        DataType::Int64 => [
            LONG,
            "ld.global.s64 ACC, [%a];",
            "st.global.s64 [%a], %acc;",
            "s64",
            "cvt.u64.u32 %by, ranks;\n    div.s64 %acc, %acc, %by;",
        ],
        DataType::Uint64 => [
            LONG,
            "ld.global.u64 ACC, [%a];",
            "st.global.u64 [%a], %acc;",
            "u64",
            "cvt.u64.u32 %by, ranks;\n    div.u64 %acc, %acc, %by;",
        ],
        _ => return None,
    })
}

/// 16-bit numbers are reduced in f32 and rounded once.
fn of_floats(ty: DataType) -> Option<Parts> {
    Some(match ty {
        DataType::Float16 => [
            SINGLE,
            "ld.global.b16 %h, [%a];\n    cvt.f32.f16 ACC, %h;",
            "cvt.rn.f16.f32 %h, %acc;\n    st.global.b16 [%a], %h;",
            "f32",
            DIVIDE_SINGLE,
        ],
        DataType::Bfloat16 => [
            SINGLE,
            "ld.global.b16 %h, [%a];\n    cvt.f32.bf16 ACC, %h;",
            "cvt.rn.bf16.f32 %h, %acc;\n    st.global.b16 [%a], %h;",
            "f32",
            DIVIDE_SINGLE,
        ],
        DataType::Float32 => {
            [SINGLE, "ld.global.f32 ACC, [%a];", "st.global.f32 [%a], %acc;", "f32", DIVIDE_SINGLE]
        }
        DataType::Float64 => [
            DOUBLE,
            "ld.global.f64 ACC, [%a];",
            "st.global.f64 [%a], %acc;",
            "f64",
            "cvt.rn.f64.u32 %by, ranks;\n    div.rn.f64 %acc, %acc, %by;",
        ],
        _ => return None,
    })
}

fn arithmetic(ty: DataType) -> Arithmetic {
    let parts = of_integers(ty).or_else(|| of_floats(ty));
    let [declarations, load, store, suffix, divide] = parts.expect("a type is of integers or of floats");
    Arithmetic { declarations, load, store, suffix, divide }
}

/// `%acc` joined with `%x`.
fn join(reduction: Reduction, suffix: &str) -> String {
    let is_float = suffix.starts_with('f');
    let name = match reduction {
        Reduction::Sum | Reduction::Avg if is_float => "add.rn",
        Reduction::Sum | Reduction::Avg => "add",
        Reduction::Prod if is_float => "mul.rn",
        Reduction::Prod => "mul.lo",
        Reduction::Max => "max",
        Reduction::Min => "min",
    };
    format!("{name}.{suffix} %acc, %acc, %x;")
}

/// The number by which a work descriptor names a reduction.
pub(crate) fn fold_id(ty: DataType, reduction: Reduction) -> u64 {
    ty as u64 * Reduction::ALL.len() as u64 + reduction as u64
}

/// Reduces `count` elements of `n` sources, in their order.
fn fold(ty: DataType, reduction: Reduction) -> String {
    let Arithmetic { declarations, load, store, suffix, divide } = arithmetic(ty);
    let (first, next) = (load.replace("ACC", "%acc"), load.replace("ACC", "%x"));
    let (id, bytes, join) = (fold_id(ty, reduction), ty.bytes(), join(reduction, suffix));
    let divide = if reduction == Reduction::Avg { divide } else { "" };
    format!(
        ".func fold_{id} (.reg .b64 out, .reg .b32 count, .reg .b32 n, .reg .b32 ranks)
{{
    .reg .pred %p; .reg .b32 %i, %j, %step; .reg .b64 %a, %s, %t, %off; {declarations}
    mov.u32 %i, %tid.x;
    mov.u32 %step, %ntid.x;
    mov.u64 %s, sources;
NEXT:
    setp.ge.u32 %p, %i, count;
    @%p bra END;
    mul.wide.u32 %off, %i, {bytes};
    ld.shared.u64 %a, [%s];
    add.u64 %a, %a, %off;
    {first}
    mov.u32 %j, 1;
MORE:
    setp.ge.u32 %p, %j, n;
    @%p bra JOINED;
    mul.wide.u32 %t, %j, 8;
    add.u64 %t, %t, %s;
    ld.shared.u64 %a, [%t];
    add.u64 %a, %a, %off;
    {next}
    {join}
    add.u32 %j, %j, 1;
    bra MORE;
JOINED:
    {divide}
    add.u64 %a, out, %off;
    {store}
    add.u32 %i, %i, %step;
    bra NEXT;
END:
    ret;
}}
"
    )
}

/// The number by which a work descriptor names a sum by multicast; none for types that are not summed so.
pub(crate) fn multicast_id(ty: DataType) -> Option<u64> {
    let first = DataType::ALL.len() * Reduction::ALL.len();
    multicast_load(ty).map(|_| first as u64 + ty as u64)
}

/// Loads the sum at `%a` into `%acc`, and the type of that. 16-bit numbers come in pairs.
fn multicast_load(ty: DataType) -> Option<(&'static str, &'static str)> {
    Some(match ty {
        DataType::Int32 | DataType::Uint32 => ("add.u32", "b32"),
        DataType::Int64 | DataType::Uint64 => ("add.u64", "b64"),
        DataType::Float32 => ("add.f32", "f32"),
        DataType::Float64 => ("add.f64", "f64"),
        DataType::Float16 => ("add.acc::f32.f16x2", "b32"),
        DataType::Bfloat16 => ("add.acc::f32.bf16x2", "b32"),
        DataType::Int8 | DataType::Uint8 => return None,
    })
}

/// Sums `count` elements of all devices at multimem address `from`.
fn multicast_fold(ty: DataType) -> Option<String> {
    let (id, (load, register)) = (multicast_id(ty)?, multicast_load(ty)?);
    let is_pair = ty.bytes() == 2;
    let (step_bytes, per_step) = if is_pair { (4, 2) } else { (ty.bytes(), 1) };
    let store = if is_pair {
        "mov.b32 {%low, %high}, %acc;
    st.global.b16 [%b], %low;
    add.u32 %j, %i, 1;
    setp.lt.u32 %p, %j, count;
    @%p st.global.b16 [%b+2], %high;"
            .to_owned()
    } else {
        format!("st.global.{register} [%b], %acc;")
    };
    Some(format!(
        ".func fold_{id} (.reg .b64 out, .reg .b32 count, .reg .b64 from)
{{
    .reg .pred %p; .reg .b32 %i, %j, %step; .reg .b64 %a, %b, %off; .reg .{register} %acc; .reg .b16 %low, %high;
    mov.u32 %i, %tid.x;
    mul.lo.u32 %i, %i, {per_step};
    mov.u32 %step, %ntid.x;
    mul.lo.u32 %step, %step, {per_step};
NEXT:
    setp.ge.u32 %p, %i, count;
    @%p bra END;
    mul.wide.u32 %off, %i, {each};
    add.u64 %a, from, %off;
    add.u64 %b, out, %off;
    multimem.ld_reduce.relaxed.sys.global.{load} %acc, [%a];
    {store}
    add.u32 %i, %i, %step;
    bra NEXT;
END:
    ret;
}}
",
        each = step_bytes / per_step,
    ))
}

/// Copies in the widest units that everything is a multiple of.
fn copy() -> String {
    let units = [(16, "v4.u32", "{%w0, %w1, %w2, %w3}"), (4, "u32", "%w0"), (1, "u8", "%w0")];
    let mut text = ".func copy (.reg .b64 to, .reg .b64 from, .reg .b32 bytes)
{
    .reg .pred %p; .reg .b32 %i, %step, %bits, %m, %w<4>; .reg .b64 %t, %a, %b;
    or.b64 %t, to, from;
    cvt.u32.u64 %bits, %t;
    or.b32 %bits, %bits, bytes;
    mov.u32 %step, %ntid.x;
"
    .to_owned();
    for (unit, ty, words) in units {
        let _ = write!(
            text,
            "    and.b32 %m, %bits, {mask};
    setp.ne.u32 %p, %m, 0;
    @%p bra NOT_{unit};
    mov.u32 %i, %tid.x;
    mul.lo.u32 %i, %i, {unit};
    mul.lo.u32 %step, %step, {unit};
LOOP_{unit}:
    setp.ge.u32 %p, %i, bytes;
    @%p bra END;
    cvt.u64.u32 %t, %i;
    add.u64 %a, from, %t;
    add.u64 %b, to, %t;
    ld.global.{ty} {words}, [%a];
    st.global.{ty} [%b], {words};
    add.u32 %i, %i, %step;
    bra LOOP_{unit};
NOT_{unit}:
",
            mask = unit - 1
        );
    }
    text + "END:\n    ret;\n}\n"
}

/// Lane 0 of the block waits until `%v`, the word at `%flag`, satisfies `test`, or the communicator is aborted.
fn wait(name: &str, test: &str) -> String {
    format!(
        "POLL_{name}:
    ld.acquire.sys.global.u32 %v, [%flag];
    {test}
    @%q bra READY_{name};
    ld.relaxed.sys.global.u32 %v, [%control];
    setp.ne.u32 %q, %v, 0;
    @%q bra STOP_{name};
    nanosleep.u32 20000;
    bra POLL_{name};
STOP_{name}:
    st.shared.u32 [stopped], 1;
READY_{name}:"
    )
}

/// Ends the kernel if lane 0 has stopped.
const CHECK: &str = "barrier.sync 0;
    ld.shared.u32 %v, [stopped];
    setp.ne.u32 %q, %v, 0;
    @%q bra END;";

/// Loads entry `%e` and skips to `skip` if it has no such chunk.
fn entry(skip: &str) -> String {
    format!(
        "ld.global.u64 %peer, [%e];
    ld.global.u64 %addr, [%e+8];
    ld.global.u64 %len, [%e+16];
    setp.ge.u64 %q, %base, %len;
    @%q bra {skip};
    add.u64 %addr, %addr, %base;
    sub.u64 %left, %len, %base;
    min.u64 %left, %left, {SLOT_BYTES};
    cvt.u32.u64 %bytes, %left;
    shl.b64 %row, %peer, 6;
    add.u64 %row, %row, %peers;"
    )
}

/// With multicast: puts this rank's chunk where all devices' memory is summed. A slot is used again two chunks later: by
/// then all peers have sent the next chunk, and so are done with this one.
fn contribute() -> String {
    let slots_bytes = SLOTS * SLOT_BYTES;
    format!(
        "    setp.eq.u64 %q, %all, 0;
    @%q bra CONTRIBUTED;
    ld.global.u32 %n, [%own+{slots_bytes}];
    and.b32 %slot, %n, {last};
    mul.wide.u32 %t, %slot, {SLOT_BYTES};
    add.u64 %to, %own, %t;
    add.u64 %place, %all, %t;
    add.u64 %from, %input, %base;
    sub.u64 %left, %most, %base;
    min.u64 %left, %left, {SLOT_BYTES};
    cvt.u32.u64 %bytes, %left;
    call copy, (%to, %from, %bytes);
    barrier.sync 0;
    add.u32 %n, %n, 1;
    @%lead st.global.u32 [%own+{slots_bytes}], %n;
    @%lead membar.sys;
CONTRIBUTED:
",
        last = SLOTS - 1,
    )
}

fn send() -> String {
    let poll = wait("SEND", &format!("sub.u32 %v, %n, %v;\n    setp.le.u32 %q, %v, {SLOTS};"));
    format!(
        "    mov.u32 %k, 0;
SEND:
    setp.ge.u32 %q, %k, %sends;
    @%q bra SENT;
    mul.wide.u32 %e, %k, {ENTRY_BYTES};
    add.u64 %e, %e, %entries;
    {entry}
    barrier.sync 0;
    ld.global.u32 %n, [%row+48];
    add.u32 %n, %n, 1;
    @!%lead bra SEND_WAITED;
    ld.global.u64 %flag, [%row+16];
{poll}
SEND_WAITED:
    {CHECK}
    ld.global.u64 %to, [%row];
    and.b32 %slot, %n, {last};
    mul.wide.u32 %t, %slot, {SLOT_BYTES};
    add.u64 %to, %to, %t;
    setp.ne.u64 %q, %all, 0;
    @%q bra SEND_COPIED;
    ld.global.u64 %t, [%e+24];
    setp.ne.u64 %q, %t, 0;
    @%q bra SEND_COPIED;
    call copy, (%to, %addr, %bytes);
SEND_COPIED:
    barrier.sync 0;
    @!%lead bra SEND_NEXT;
    ld.global.u64 %flag, [%row+8];
    mul.wide.u32 %t, %slot, 8;
    add.u64 %t, %t, %flag;
    st.global.v2.u32 [%t+16], {{%tag, %bytes}};
    membar.sys;
    st.release.sys.global.u32 [%flag], %n;
    st.global.u32 [%row+48], %n;
SEND_NEXT:
    add.u32 %k, %k, 1;
    bra SEND;
SENT:
",
        entry = entry("SEND_NEXT"),
        last = SLOTS - 1,
    )
}

fn receive() -> String {
    let poll = wait("RECV", "sub.s32 %v, %v, %n;\n    setp.ge.s32 %q, %v, 0;");
    format!(
        "    mov.u32 %k, 0;
RECV:
    setp.ge.u32 %q, %k, %recvs;
    @%q bra RECEIVED;
    add.u32 %v, %k, %sends;
    mul.wide.u32 %e, %v, {ENTRY_BYTES};
    add.u64 %e, %e, %entries;
    {entry}
    setp.eq.u64 %q, %peer, %me;
    @%q bra OWN;
    barrier.sync 0;
    ld.global.u32 %n, [%row+52];
    add.u32 %n, %n, 1;
    @!%lead bra RECV_WAITED;
    ld.global.u64 %flag, [%row+32];
{poll}
    and.b32 %slot, %n, {last};
    mul.wide.u32 %t, %slot, 8;
    add.u64 %t, %t, %flag;
    ld.global.v2.u32 {{%v, %x}}, [%t+16];
    ld.shared.u32 %slot, [stopped];
    setp.ne.u32 %q, %slot, 0;
    @%q bra RECV_WAITED;
    setp.ne.u32 %q, %v, %tag;
    setp.ne.or.u32 %q, %x, %bytes, %q;
    @!%q bra RECV_WAITED;
    st.relaxed.sys.global.u32 [%control+4], 1;
    st.shared.u32 [stopped], 1;
RECV_WAITED:
    {CHECK}
    ld.global.u64 %from, [%row+24];
    and.b32 %slot, %n, {last};
    mul.wide.u32 %t, %slot, {SLOT_BYTES};
    add.u64 %from, %from, %t;
    ld.global.u64 %t, [%e+24];
    setp.eq.u64 %q, %t, 0;
    @%q bra HAVE;
    add.u64 %from, %t, %base;
    bra HAVE;
OWN:
    mov.u64 %from, %addr;
{taken}RECV_NEXT:
    add.u32 %k, %k, 1;
    bra RECV;
RECEIVED:
",
        entry = entry("RECV_NEXT"),
        last = SLOTS - 1,
        taken = take(),
    )
}

/// The chunk at `%from` is there: it becomes a source of the reduction, or is copied.
fn take() -> String {
    format!(
        "HAVE:
    setp.eq.u64 %q, %out, 0;
    @%q bra TAKE;
    mul.wide.u32 %t, %k, 8;
    mov.u64 %e, sources;
    add.u64 %t, %t, %e;
    @%lead st.shared.u64 [%t], %from;
    bra RECV_NEXT;
TAKE:
    call copy, (%addr, %from, %bytes);
    barrier.sync 0;
    @!%lead bra RECV_NEXT;
    {ACKNOWLEDGE}
"
    )
}

/// Chunk `%n` of the peer in `%row` is consumed.
const ACKNOWLEDGE: &str = "ld.global.u64 %flag, [%row+40];
    membar.sys;
    st.release.sys.global.u32 [%flag], %n;
    st.global.u32 [%row+52], %n;";

/// All sources are there: reduces them, and then lets the peers' slots go.
fn reduce() -> String {
    let mut text = "    setp.eq.u64 %q, %out, 0;
    @%q bra FOLDED;
    setp.ge.u64 %q, %base, %most;
    @%q bra FOLDED;
    barrier.sync 0;
    sub.u64 %left, %most, %base;
    min.u64 %left, %left, SLOT_BYTES;
    cvt.u32.u64 %bytes, %left;
    shr.u32 %bytes, %bytes, %shift;
    add.u64 %to, %out, %base;
"
    .replace("SLOT_BYTES", &SLOT_BYTES.to_string());
    let all = || DataType::ALL.iter().flat_map(|ty| Reduction::ALL.iter().map(|op| fold_id(*ty, *op)));
    for id in all() {
        let _ = writeln!(text, "    setp.eq.u32 %q, %fold, {id};\n    @%q bra FOLD_{id};");
    }
    let by_multicast = || DataType::ALL.iter().filter_map(|ty| multicast_id(*ty));
    for id in by_multicast() {
        let _ = writeln!(text, "    setp.eq.u32 %q, %fold, {id};\n    @%q bra FOLD_{id};");
    }
    text.push_str("    trap;\n");
    for id in by_multicast() {
        let _ = writeln!(text, "FOLD_{id}:\n    call fold_{id}, (%to, %bytes, %place);\n    bra DONE;");
    }
    for id in all() {
        let _ =
            writeln!(text, "FOLD_{id}:\n    call fold_{id}, (%to, %bytes, %recvs, %ranks);\n    bra DONE;");
    }
    let _ = write!(
        text,
        "DONE:
    barrier.sync 0;
    @!%lead bra FOLDED;
    mov.u32 %k, 0;
LET_GO:
    setp.ge.u32 %q, %k, %recvs;
    @%q bra FOLDED;
    add.u32 %v, %k, %sends;
    mul.wide.u32 %e, %v, {ENTRY_BYTES};
    add.u64 %e, %e, %entries;
    ld.global.u64 %peer, [%e];
    setp.eq.u64 %q, %peer, %me;
    @%q bra LET_GO_NEXT;
    shl.b64 %row, %peer, 6;
    add.u64 %row, %row, %peers;
    ld.global.u32 %n, [%row+52];
    add.u32 %n, %n, 1;
    {ACKNOWLEDGE}
LET_GO_NEXT:
    add.u32 %k, %k, 1;
    bra LET_GO;
FOLDED:
"
    );
    text
}

/// What peers read where it is must not change before they have read all of it.
fn drain() -> String {
    let poll = wait("DRAIN", "sub.s32 %v, %v, %n;\n    setp.ge.s32 %q, %v, 0;");
    format!(
        "ALL_SENT:
    barrier.sync 0;
    @!%lead bra END;
    mov.u32 %k, 0;
DRAIN:
    setp.ge.u32 %q, %k, %sends;
    @%q bra END;
    mul.wide.u32 %e, %k, {ENTRY_BYTES};
    add.u64 %e, %e, %entries;
    add.u32 %k, %k, 1;
    ld.global.u64 %t, [%e+24];
    setp.eq.u64 %q, %t, 0;
    @%q bra DRAIN;
    ld.global.u64 %peer, [%e];
    shl.b64 %row, %peer, 6;
    add.u64 %row, %row, %peers;
    ld.global.u32 %n, [%row+48];
    ld.global.u64 %flag, [%row+16];
{poll}
    bra DRAIN;
"
    )
}

/// The registers of the kernel, and the parameters and the descriptor in them.
const PROLOGUE: &str = "    .reg .pred %p, %q, %lead;
    .reg .b32 %k, %n, %v, %x, %slot, %tag, %bytes, %sends, %recvs, %fold, %shift, %ranks;
    .reg .b64 %w, %peers, %control, %entries, %e, %peer, %addr, %len, %left, %row, %flag, %to, %from, %t;
    .reg .b64 %base, %most, %out, %me, %all, %own, %input, %place;
    ld.param.u64 %w, [work];
    ld.param.u64 %peers, [table];
    ld.param.u64 %control, [words];
    mov.u32 %v, %tid.x;
    setp.eq.u32 %lead, %v, 0;
    @%lead st.shared.u32 [stopped], 0;
    ld.global.u32 %sends, [%w+8];
    ld.global.u32 %recvs, [%w+16];
    ld.global.u64 %out, [%w+24];
    ld.global.u32 %fold, [%w+32];
    ld.global.u64 %most, [%w+40];
    ld.global.u32 %tag, [%w+48];
    ld.global.u64 %me, [%w+56];
    ld.global.u32 %shift, [%w+64];
    ld.global.u32 %ranks, [%w+72];
    ld.global.u64 %all, [%w+80];
    ld.global.u64 %own, [%w+88];
    ld.global.u64 %input, [%w+96];
";

/// The whole module.
pub(crate) fn text() -> String {
    let mut text = ".version 8.1
.target sm_90
.address_size 64
.shared .align 8 .b64 sources[64];
.shared .align 4 .b32 stopped;
"
    .to_owned();
    text += &copy();
    for ty in DataType::ALL {
        for reduction in Reduction::ALL {
            text += &fold(ty, reduction);
        }
    }
    for ty in DataType::ALL {
        text += &multicast_fold(ty).unwrap_or_default();
    }
    let _ = write!(
        text,
        ".visible .entry {NAME} (.param .u64 work, .param .u64 table, .param .u64 words)
{{
{PROLOGUE}    add.u64 %entries, %w, {ENTRIES_AT};
    mov.u64 %base, 0;
CHUNK:
    setp.ge.u64 %p, %base, %most;
    @%p bra ALL_SENT;
    barrier.sync 0;
{contribute}{send}{receive}{reduce}    add.u64 %base, %base, {SLOT_BYTES};
    bra CHUNK;
{drain}END:
    barrier.sync 0;
    @!%lead bra OUT;
    membar.sys;
    st.release.sys.global.u32 [%w], 1;
OUT:
    ret;
}}
",
        contribute = contribute(),
        send = send(),
        receive = receive(),
        reduce = reduce(),
        drain = drain(),
    );
    text
}
