//! The names of the driver's entry points, and the index of each in the tables that are built from them.

use std::ffi::CStr;

macro_rules! index {
    ($( fn $name:ident $params:tt = $public:literal since $since:literal, $class:ident
        $(, per_thread $per_thread:ident since $per_thread_since:literal)? ; )*
     $( legacy $legacy:ident = $legacy_public:literal since $legacy_since:literal ; )*) => {
        /// The place of each symbol in the tables here.
        #[allow(non_camel_case_types, clippy::upper_case_acronyms, reason = "the driver's names")]
        #[repr(usize)]
        pub(super) enum Index { $( $name, $( $per_thread, )? )* $( $legacy, )* Count }

        /// How many symbols there are.
        pub(super) const COUNT: usize = Index::Count as usize;

        static NAMES: [&str; COUNT] = [
            $( concat!(stringify!($name), "\0"), $( concat!(stringify!($per_thread), "\0"), )? )*
            $( concat!(stringify!($legacy), "\0"), )*
        ];
    };
}

cuda_abi::entry_points!(index);

/// The name of an index.
pub(super) fn name(index: usize) -> &'static CStr {
    // It ends with the one NUL that `index` has put there.
    CStr::from_bytes_until_nul(NAMES[index].as_bytes()).unwrap_or(c"")
}

/// The index of a name, if it is one of ours.
pub(super) fn index_of(name: &[u8]) -> Option<usize> {
    // Nearly everything that is looked up in a process has another beginning.
    if !name.starts_with(b"cu") {
        return None;
    }
    NAMES.iter().position(|ours| ours.len() == name.len() + 1 && ours.as_bytes().starts_with(name))
}
