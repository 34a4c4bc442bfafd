//! The program's driver objects: how many of each kind there are, in which context, and which of them block a
//! checkpoint.
//!
//! An object is recorded by its handle after the call that creates it has succeeded. It is removed before the call
//! that destroys it, since the driver may reuse the handle at once; if that call fails, the object is recorded again.
//! Objects that belong to a context are removed with the context (CUDA driver API reference, cuCtxDestroy).

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::MutexGuard;

use ckpt_protocol::agent::Counts;
use cuda_abi::sys::{self, CUDA_EXTERNAL_MEMORY_HANDLE_DESC, CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC};
use cuda_abi::types::*;

use super::{changes, context, driver, stream_capture, taint};
use crate::cuda::activation::is_started;
use crate::cuda::handler::handlers;
use crate::cuda::result::SUCCESS;
use crate::cuda::shared::Shared;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum ObjectKind {
    Stream,
    Event,
    Module,
    Library,
    Graph,
    GraphExec,
    /// Managed memory, and buffers of external memory: what cuMemFree ends.
    ForeignMemory,
    ExternalMemory,
    ExternalArray,
    ExternalSemaphore,
}

impl ObjectKind {
    /// Whether it belongs to the context in which it was made.
    fn has_context(self) -> bool {
        !matches!(self, Self::Library | Self::Graph | Self::GraphExec)
    }

    /// Whether it may have variables that the driver cannot save.
    fn is_code(self) -> bool {
        matches!(self, Self::Module | Self::Library)
    }
}

#[derive(Clone, Copy)]
struct Object {
    /// 0 for what belongs to no context.
    context: usize,
    /// The call because of which it blocks a checkpoint.
    obstacle: Option<&'static str>,
}

type Objects = BTreeMap<(ObjectKind, usize), Object>;

/// Several maps, to reduce lock contention.
static OBJECTS: [Shared<Objects>; 16] = [const { Shared::new(BTreeMap::new()) }; 16];

/// The part that a handle is in; must not be locked across a driver call.
fn part(handle: usize) -> MutexGuard<'static, Objects> {
    // Handles are addresses: their low bits are the same. The high bits of the product depend on all others.
    let mixed = (handle as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let index = (mixed >> 60) as usize % OBJECTS.len();
    OBJECTS[index].lock()
}

fn all() -> impl Iterator<Item = MutexGuard<'static, Objects>> {
    OBJECTS.iter().map(Shared::lock)
}

/// Counts the objects. Allocations are counted by their allocators.
pub(super) fn counts() -> Counts {
    let mut counts = Counts { contexts: context::all().len() as u64, ..Counts::default() };
    for part in all() {
        for (kind, _) in part.keys() {
            match kind {
                ObjectKind::Stream => counts.streams += 1,
                ObjectKind::Event => counts.events += 1,
                ObjectKind::Module | ObjectKind::Library => counts.modules += 1,
                ObjectKind::Graph | ObjectKind::GraphExec => counts.graphs += 1,
                _ => {}
            }
        }
    }
    counts
}

/// The program's streams, each with its context.
pub(super) fn streams() -> Vec<(CUcontext, CUstream)> {
    let of_part = |part: MutexGuard<'static, Objects>| -> Vec<(CUcontext, CUstream)> {
        let streams = part.iter().filter(|((kind, _), _)| *kind == ObjectKind::Stream);
        streams.map(|((_, handle), object)| (object.context as CUcontext, *handle as CUstream)).collect()
    };
    all().flat_map(of_part).collect()
}

/// A context was removed or reset.
pub(super) fn context_removed(context: CUcontext) {
    let context = context as usize;
    for mut part in all() {
        let is_dead = |(_, object): &(&(ObjectKind, usize), &Object)| object.context == context;
        let dead: Vec<(ObjectKind, usize)> = part.iter().filter(is_dead).map(|(key, _)| *key).collect();
        let dead: Vec<_> = dead.into_iter().map(|key| (key, part.remove(&key))).collect();
        drop(part);
        for ((kind, handle), object) in dead {
            object.into_iter().for_each(ended);
            if kind == ObjectKind::Stream {
                stream_capture::take_capture(handle as CUstream);
            }
        }
    }
}

fn ended(object: Object) {
    object.obstacle.into_iter().for_each(taint::end);
}

fn note(kind: ObjectKind, handle: usize, obstacle: Option<&'static str>) {
    if !is_started() {
        return;
    }
    if kind.is_code() {
        changes::note();
    }
    let current = if kind.has_context() { context::current() } else { None };
    let context = current.map_or(0, |(context, _)| context as usize);
    put(kind, handle, Object { context, obstacle });
}

/// Records an object; its obstacle begins unless it has begun.
fn put(kind: ObjectKind, handle: usize, object: Object) {
    object.obstacle.into_iter().for_each(taint::begin);
    let before = part(handle).insert((kind, handle), object);
    before.into_iter().for_each(ended);
}

/// An object that blocks a checkpoint as long as it lives.
fn burden(kind: ObjectKind, handle: usize, call: &'static str) {
    if !is_started() {
        return;
    }
    let known = part(handle).get(&(kind, handle)).copied();
    match known {
        Some(Object { obstacle: Some(_), .. }) => {}
        Some(Object { context, .. }) => put(kind, handle, Object { context, obstacle: Some(call) }),
        None => note(kind, handle, Some(call)),
    }
}

/// Records the object that a call has created, if it succeeded.
///
/// # Safety
/// `out` is what the driver has written, if the call succeeded, or NULL; it is as large as a handle.
pub(super) unsafe fn made<T>(
    kind: ObjectKind,
    obstacle: Option<&'static str>,
    result: CUresult,
    out: *const T,
) -> CUresult {
    const { assert!(size_of::<T>() == size_of::<usize>()) };
    if result == SUCCESS && !out.is_null() {
        // SAFETY: the driver has written it.
        let handle = unsafe { out.cast::<usize>().read() };
        note(kind, handle, obstacle);
    }
    result
}

/// Removes an object while it is destroyed.
pub(super) fn destroyed(kind: ObjectKind, handle: usize, destroy: impl FnOnce() -> CUresult) -> CUresult {
    if !is_started() {
        return destroy();
    }
    let known = part(handle).remove(&(kind, handle));
    let result = destroy();
    if let Some(object) = known {
        if result != SUCCESS {
            part(handle).insert((kind, handle), object);
        } else {
            ended(object);
            if kind.is_code() {
                changes::note();
            }
        }
    }
    result
}

macro_rules! makers {
    ($( $name:ident ( $out:ident : *mut $handle:ty $(, $arg:ident : $ty:ty)* ) = $kind:ident
        $(, $obstacle:literal)? ; )*) => {
        $(
            /// # Safety
            /// As for the driver's.
            pub(super) unsafe fn $name(
                real: unsafe extern "C" fn(*mut $handle, $($ty),*) -> CUresult,
                $out: *mut $handle,
                $($arg: $ty),*
            ) -> CUresult {
                let obstacle = [$($obstacle)?].first().copied();
                // SAFETY: the parameters are those of our own caller.
                let result = unsafe { real($out, $($arg),*) };
                // SAFETY: as above.
                unsafe { made(ObjectKind::$kind, obstacle, result, $out) }
            }
        )*
    };
}

makers! {
    cuStreamCreate(out: *mut CUstream, flags: c_uint) = Stream;
    cuStreamCreateWithPriority(out: *mut CUstream, flags: c_uint, priority: c_int) = Stream;
    cuGreenCtxStreamCreate(out: *mut CUstream, green: CUgreenCtx, flags: c_uint, priority: c_int) = Stream;
    cuEventCreate(out: *mut CUevent, flags: c_uint) = Event;
    cuModuleLoad(out: *mut CUmodule, path: *const c_char) = Module;
    cuModuleLoadData(out: *mut CUmodule, image: *const c_void) = Module;
    cuModuleLoadDataEx(
        out: *mut CUmodule, image: *const c_void, count: c_uint, options: *mut CUjit_option,
        values: *mut *mut c_void
    ) = Module;
    cuModuleLoadFatBinary(out: *mut CUmodule, image: *const c_void) = Module;
    cuLibraryLoadData(
        out: *mut CUlibrary, code: *const c_void, jit_options: *mut CUjit_option, jit_values: *mut *mut c_void,
        jit_count: c_uint, options: *mut CUlibraryOption, values: *mut *mut c_void, count: c_uint
    ) = Library;
    cuLibraryLoadFromFile(
        out: *mut CUlibrary, path: *const c_char, jit_options: *mut CUjit_option, jit_values: *mut *mut c_void,
        jit_count: c_uint, options: *mut CUlibraryOption, values: *mut *mut c_void, count: c_uint
    ) = Library;
    cuGraphCreate(out: *mut CUgraph, flags: c_uint) = Graph;
    cuGraphClone(out: *mut CUgraph, original: CUgraph) = Graph;
    cuMemAllocManaged(out: *mut CUdeviceptr, bytes: usize, flags: c_uint)
        = ForeignMemory, "cuMemAllocManaged";
    cuImportExternalMemory(out: *mut CUexternalMemory, from: *const CUDA_EXTERNAL_MEMORY_HANDLE_DESC)
        = ExternalMemory, "cuImportExternalMemory";
    cuExternalMemoryGetMappedBuffer(
        out: *mut CUdeviceptr, memory: CUexternalMemory, buffer: *const CUDA_EXTERNAL_MEMORY_BUFFER_DESC
    ) = ForeignMemory, "cuExternalMemoryGetMappedBuffer";
    cuExternalMemoryGetMappedMipmappedArray(
        out: *mut CUmipmappedArray, memory: CUexternalMemory,
        array: *const CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC
    ) = ExternalArray, "cuExternalMemoryGetMappedMipmappedArray";
    cuImportExternalSemaphore(out: *mut CUexternalSemaphore, from: *const CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC)
        = ExternalSemaphore, "cuImportExternalSemaphore";
    cuIpcOpenEventHandle(out: *mut CUevent, handle: CUipcEventHandle) = Event, "cuIpcOpenEventHandle";
}

macro_rules! destroyers {
    ($( $name:ident ( $handle:ty ) = $kind:ident ; )*) => {
        $(
            /// # Safety
            /// As for the driver's.
            pub(super) unsafe fn $name(
                real: unsafe extern "C" fn($handle) -> CUresult,
                handle: $handle,
            ) -> CUresult {
                // SAFETY: the parameters are those of our own caller.
                destroyed(ObjectKind::$kind, handle as usize, || unsafe { real(handle) })
            }
        )*
    };
}

destroyers! {
    cuEventDestroy_v2(CUevent) = Event;
    cuModuleUnload(CUmodule) = Module;
    cuLibraryUnload(CUlibrary) = Library;
    cuGraphDestroy(CUgraph) = Graph;
    cuDestroyExternalMemory(CUexternalMemory) = ExternalMemory;
    cuMipmappedArrayDestroy(CUmipmappedArray) = ExternalArray;
    cuDestroyExternalSemaphore(CUexternalSemaphore) = ExternalSemaphore;
}

fn is_managed(address: CUdeviceptr) -> bool {
    const IS_MANAGED: CUpointer_attribute =
        sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED as CUpointer_attribute;
    let is_managed = driver::ask(0, |is_managed: *mut c_uint| {
        // SAFETY: the attribute is written as an `unsigned int`, which the variable is.
        unsafe { driver::cuPointerGetAttribute(is_managed.cast(), IS_MANAGED, address) }
    });
    is_managed.is_ok_and(|is_managed| is_managed != 0)
}

handlers! {
    /// What the stream was capturing is dropped with it.
    fn cuStreamDestroy_v2(stream: CUstream) |call| {
        let capture = if is_started() { stream_capture::take_capture(stream) } else { None };
        let result = destroyed(ObjectKind::Stream, stream as usize, call);
        if result != SUCCESS {
            capture.into_iter().for_each(stream_capture::put_back);
        }
        result
    }

    fn cuIpcGetEventHandle(out: *mut CUipcEventHandle, event: CUevent) |call| {
        let result = call();
        if result == SUCCESS {
            burden(ObjectKind::Event, event as usize, "cuIpcGetEventHandle");
        }
        result
    }

    fn cuLibraryGetManaged(
        address: *mut CUdeviceptr, bytes: *mut usize, library: CUlibrary, name: *const c_char
    ) |call| {
        let result = call();
        if result == SUCCESS {
            burden(ObjectKind::Library, library as usize, "cuLibraryGetManaged");
        }
        result
    }

    /// A module's managed variables are only known by their addresses.
    fn cuModuleGetGlobal_v2(
        address: *mut CUdeviceptr, bytes: *mut usize, module: CUmodule, name: *const c_char
    ) |call| {
        let result = call();
        if result == SUCCESS && !address.is_null() {
            // SAFETY: the driver has written it.
            let address = unsafe { *address };
            if is_managed(address) {
                burden(ObjectKind::Module, module as usize, "cuModuleGetGlobal");
            }
        }
        result
    }

    fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) |call| {
        // SAFETY: the caller's out parameter.
        let result = unsafe { made(ObjectKind::Graph, None, call(), graph) };
        // SAFETY: as above.
        unsafe { stream_capture::end_called(stream, result, graph) };
        result
    }
}

#[cfg(test)]
mod tests;
