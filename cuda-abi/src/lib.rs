//! The one table of the CUDA driver's entry points.
//!
//! The stand-in driver exports it, the interposer gets in front of it and the tests call through it. Each of
//! them expands [`entry_points!`] with a macro of its own, so that a call is added by one row. The same rows as
//! data are [`ENTRY_POINTS`]; [`lookup`] is cuGetProcAddress's rule over them, [`api::Api`] a driver that was
//! opened by path.

#![deny(unsafe_code)]

#[macro_use]
mod table;

#[allow(unsafe_code)]
pub mod api;
pub mod layout;
#[expect(non_camel_case_types, reason = "C's names")]
pub mod types;

pub use cudarc::driver::sys;

/// What the interposer does with a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// Its behaviour changes: it is served from the arena, or answers as if the program had what it asked the
    /// driver for. Passes the gate where it changes state.
    Virtualise,
    /// It creates, changes or destroys state that a checkpoint has to save, or that makes one impossible. The
    /// call is passed on and the state noted. Passes the gate where it changes state.
    Track,
    /// It submits work, or looks at addresses of device memory: it waits while the gate is closed and counts as in flight
    /// until it returns.
    Gate,
    /// It is passed on as it is. It changes nothing that a checkpoint in the same process has to know. Calls that
    /// block until work is done are here too: the gate must not be held while one blocks.
    Leave,
    /// It is passed on, and from then on the process cannot be checkpointed: the call changes state that nobody
    /// saves. Told with its name.
    Taint,
}

/// One row of the table.
#[derive(Clone, Copy, Debug)]
pub struct EntryPoint {
    /// The exact ELF name.
    pub symbol: &'static str,
    /// The name under which cuGetProcAddress knows it; empty if it does not.
    pub public_name: &'static str,
    /// The first CUDA version (1000 * major + 10 * minor) for which cuGetProcAddress hands the symbol out.
    pub since: u32,
    /// The symbol whose default stream is the calling thread's own, and the first version for which it is
    /// handed out.
    pub per_thread: Option<(&'static str, u32)>,
    /// What the interposer does with it; `None` for a row without a signature, which is to be treated as
    /// [`Class::Taint`].
    pub class: Option<Class>,
    /// Name and type of each parameter; empty for a row without a signature.
    pub params: &'static [(&'static str, &'static str)],
}

/// The [`Class`] that a row of [`entry_points!`] names.
#[macro_export]
macro_rules! class {
    (virtualise) => {
        $crate::Class::Virtualise
    };
    (track) => {
        $crate::Class::Track
    };
    (gate) => {
        $crate::Class::Gate
    };
    (leave) => {
        $crate::Class::Leave
    };
    (taint) => {
        $crate::Class::Taint
    };
}

macro_rules! optional {
    () => {
        None
    };
    ($value:expr) => {
        Some($value)
    };
}

macro_rules! list {
    ($( fn $name:ident ( $($arg:ident : $ty:ty),* $(,)? ) = $public:literal since $since:literal, $class:ident
        $(, per_thread $per_thread:ident since $per_thread_since:literal)? ; )*
     $( legacy $legacy:ident = $legacy_public:literal since $legacy_since:literal ; )*) => {
        /// Every row of the table, in its order.
        pub static ENTRY_POINTS: &[EntryPoint] = &[
            $( EntryPoint {
                symbol: stringify!($name),
                public_name: $public,
                since: $since,
                per_thread: optional!($( (stringify!($per_thread), $per_thread_since) )?),
                class: Some(class!($class)),
                params: &[$( (stringify!($arg), stringify!($ty)) ),*],
            }, )*
            $( EntryPoint {
                symbol: stringify!($legacy),
                public_name: $legacy_public,
                since: $legacy_since,
                per_thread: None,
                class: None,
                params: &[],
            }, )*
        ];
    };
}

entry_points!(list);

/// The row that has this ELF name, plain or per-thread.
pub fn by_symbol(symbol: &str) -> Option<&'static EntryPoint> {
    ENTRY_POINTS.iter().find(|row| {
        row.symbol == symbol || row.per_thread.is_some_and(|(per_thread, _)| per_thread == symbol)
    })
}

/// What cuGetProcAddress finds. The three cases are those of `CUdriverProcAddressQueryResult`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// This ELF symbol is handed out.
    Found(&'static str),
    /// The name exists, but only for newer versions than the one asked for.
    VersionNotSufficient,
    /// There is no such name.
    NotFound,
}

/// What cuGetProcAddress hands out for `public_name` to a program built for `cuda_version`.
///
/// It is the newest variant that is not newer than `cuda_version`; with `per_thread`, of a name that has per-thread
/// symbols, the newest of these, and none for a version before the first of them (measured with NVIDIA's driver
/// 550.163: `tests/lookups-550.txt`). Names are public names without a suffix: `cuMemAlloc` is one, `cuMemAlloc_v2`
/// is not.
pub fn lookup(public_name: &str, cuda_version: u32, per_thread: bool) -> Lookup {
    let variants = || ENTRY_POINTS.iter().filter(|row| row.public_name == public_name);
    if public_name.is_empty() || variants().next().is_none() {
        return Lookup::NotFound;
    }
    let per_thread_symbols: Vec<_> =
        variants().filter(|_| per_thread).filter_map(|row| row.per_thread).collect();
    let symbols = if per_thread_symbols.is_empty() {
        variants().map(|row| (row.symbol, row.since)).collect()
    } else {
        per_thread_symbols
    };
    let old_enough = symbols.into_iter().filter(|(_, since)| *since <= cuda_version);
    let newest = old_enough.max_by_key(|(_, since)| *since);
    newest.map_or(Lookup::VersionNotSufficient, |(symbol, _)| Lookup::Found(symbol))
}

#[cfg(test)]
mod tests;
