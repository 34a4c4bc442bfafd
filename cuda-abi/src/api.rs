//! A driver that was opened by path, with every entry point of the table.

#![expect(non_snake_case, clippy::too_many_arguments, reason = "the driver's own names and signatures")]

use core::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::types::*;

/// A library could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot open {} as a CUDA driver", path.display())]
pub struct LoadError {
    path: PathBuf,
    source: libloading::Error,
}

const NOT_FOUND: CUresult = crate::sys::CUresult::CUDA_ERROR_NOT_FOUND as CUresult;

macro_rules! pointer_type {
    (( $( $arg:ident : $ty:ty ),* $(,)? )) => { Option<unsafe extern "C" fn($($ty),*) -> CUresult> };
}

macro_rules! method {
    ($name:ident ( $( $arg:ident : $ty:ty ),* $(,)? )) => {
        #[doc = concat!("Calls `", stringify!($name), "`; CUDA_ERROR_NOT_FOUND where the driver has no such symbol.")]
        ///
        /// # Safety
        ///
        /// The CUDA driver API reference says what the function asks of its caller.
        pub unsafe fn $name(&self, $($arg: $ty),*) -> CUresult {
            match self.$name {
                // SAFETY: the symbol has this signature, as the table says, and the library is never closed;
                // what the function asks beyond that, our caller promises.
                Some(function) => unsafe { function($($arg),*) },
                None => NOT_FOUND,
            }
        }
    };
}

macro_rules! api {
    ($( fn $name:ident $parameters:tt = $public:literal since $since:literal, $class:ident
        $(, per_thread $per_thread:ident since $per_thread_since:literal)? ; )*
     $( legacy $legacy:ident = $legacy_public:literal since $legacy_since:literal ; )*) => {
        /// The entry points of one driver: a field and a method for every symbol that has a signature.
        ///
        /// The library stays open for ever, because drivers do not survive being closed and the pointers are
        /// copied freely.
        pub struct Api {
            library: ManuallyDrop<Library>,
            $(
                #[doc = concat!("`", stringify!($name), "`, where the driver has it.")]
                pub $name: pointer_type!($parameters),
                $(
                    #[doc = concat!("`", stringify!($per_thread), "`, where the driver has it.")]
                    pub $per_thread: pointer_type!($parameters),
                )?
            )*
        }

        impl Api {
            /// Opens the library at `path`. Symbols that it lacks are `None`.
            ///
            /// # Safety
            ///
            /// The library's constructors run, and what it exports under the table's names must have the
            /// table's signatures.
            pub unsafe fn load(path: &Path) -> Result<Self, LoadError> {
                // SAFETY: our caller answers for the library's constructors.
                let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }
                    .map_err(|source| LoadError { path: path.to_owned(), source })?;
                let library = ManuallyDrop::new(library);
                Ok(Self {
                    $(
                        // SAFETY: our caller says that the symbol has the table's signature.
                        $name: unsafe { address(&library, stringify!($name)) },
                        $(
                            // SAFETY: as above.
                            $per_thread: unsafe { address(&library, stringify!($per_thread)) },
                        )?
                    )*
                    library,
                })
            }

            $(
                method!($name $parameters);
                $( method!($per_thread $parameters); )?
            )*
        }
    };
}

entry_points!(api);

impl Api {
    /// The address of any symbol of the library, whether or not it is in the table; null where there is none.
    pub fn symbol(&self, name: &str) -> *const c_void {
        // SAFETY: a data pointer is a valid type for the address of any symbol.
        unsafe { address(&self.library, name) }.unwrap_or(core::ptr::null())
    }
}

/// The address of `name`, as a function pointer or a data pointer.
///
/// # Safety
///
/// `T` has the size of a pointer and is a type that the symbol's address is a valid value of.
unsafe fn address<T: Copy>(library: &Library, name: &str) -> Option<T> {
    // SAFETY: our caller says that the symbol is a `T`; the copy stays valid because the library stays open.
    unsafe { library.get::<T>(name) }.ok().map(|symbol| *symbol)
}
