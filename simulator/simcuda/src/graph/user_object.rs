//! Objects of the program that live as long as something refers to them: the program itself, graphs, and the
//! executables and clones made of these (CUDA programming guide, "CUDA User Objects").

use std::sync::Arc;

use cuda_abi::sys::CUresult;
use cuda_abi::types::{CUgraph, CUhostFn, CUuserObject, c_void};
use parking_lot::Mutex;

use super::{INVALID, graph_by_handle};
use crate::error::{Result, write_out};
use crate::handle::Table;
use crate::{entry, process};

const NO_DESTRUCTOR_SYNC: u32 = cuda_abi::sys::CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as u32;
const MOVE: u32 = cuda_abi::sys::CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE as u32;

/// A program's object and its destructor.
struct UserObject {
    handle: usize,
    data: usize,
    destroy: unsafe extern "C" fn(*mut c_void),
    references: Mutex<u64>,
}

static OBJECTS: Table<UserObject> = Table::new();

impl UserObject {
    fn retain(&self, count: u32) {
        *self.references.lock() += u64::from(count);
    }

    /// Gives references back, and destroys the object with the last one.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if there are not as many.
    fn release(&self, count: u32) -> Result {
        let mut references = self.references.lock();
        *references = references.checked_sub(count.into()).ok_or(INVALID)?;
        let is_last = *references == 0;
        drop(references);
        if is_last {
            OBJECTS.remove(self.handle);
            // SAFETY: the program asked for this call, with this argument, when the last reference is released.
            entry::in_host_function(|| unsafe { (self.destroy)(self.data as *mut c_void) });
        }
        Ok(())
    }
}

/// References that a graph or an executable holds.
pub(super) struct Reference {
    object: Arc<UserObject>,
    count: u32,
}

impl Clone for Reference {
    fn clone(&self) -> Self {
        self.object.retain(self.count);
        Self { object: Arc::clone(&self.object), count: self.count }
    }
}

impl Drop for Reference {
    fn drop(&mut self) {
        let released = self.object.release(self.count);
        debug_assert!(released.is_ok(), "a graph's references are counted");
    }
}

fn by_handle(handle: CUuserObject) -> Result<Arc<UserObject>> {
    process::machine()?;
    OBJECTS.get(handle as usize).ok_or(INVALID)
}

fn check_count(count: u32) -> Result {
    if (1..=i32::MAX as u32).contains(&count) { Ok(()) } else { Err(INVALID) }
}

pub(crate) unsafe fn cuUserObjectCreate(
    out: *mut CUuserObject,
    data: *mut c_void,
    destroy: CUhostFn,
    references: u32,
    flags: u32,
) -> Result {
    process::machine()?;
    check_count(references)?;
    let destroy = destroy.ok_or(INVALID)?;
    if out.is_null() || flags != NO_DESTRUCTOR_SYNC {
        return Err(INVALID);
    }
    let references = Mutex::new(references.into());
    let object =
        OBJECTS.insert_with(|handle| UserObject { handle, data: data as usize, destroy, references });
    // SAFETY: `out` is the caller's out parameter.
    unsafe { write_out(out, object.handle as CUuserObject) }
}

pub(crate) unsafe fn cuUserObjectRetain(object: CUuserObject, count: u32) -> Result {
    check_count(count)?;
    by_handle(object)?.retain(count);
    Ok(())
}

pub(crate) unsafe fn cuUserObjectRelease(object: CUuserObject, count: u32) -> Result {
    check_count(count)?;
    by_handle(object)?.release(count)
}

pub(crate) unsafe fn cuGraphRetainUserObject(
    graph: CUgraph,
    object: CUuserObject,
    count: u32,
    flags: u32,
) -> Result {
    let graph = graph_by_handle(graph)?;
    let object = by_handle(object)?;
    check_count(count)?;
    if flags & !MOVE != 0 {
        return Err(INVALID);
    }
    if flags & MOVE == 0 {
        object.retain(count);
    } else if *object.references.lock() < count.into() {
        return Err(INVALID);
    }
    graph.objects.lock().push(Reference { object, count });
    Ok(())
}

pub(crate) unsafe fn cuGraphReleaseUserObject(graph: CUgraph, object: CUuserObject, count: u32) -> Result {
    let graph = graph_by_handle(graph)?;
    let object = by_handle(object)?;
    check_count(count)?;
    let mut released = Vec::new();
    let mut references = graph.objects.lock();
    let is_held = |reference: &Reference| Arc::ptr_eq(&reference.object, &object);
    let held: u64 =
        references.iter().filter(|reference| is_held(reference)).map(|one| u64::from(one.count)).sum();
    if held < count.into() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let mut left = count;
    while left > 0 {
        let Some(place) = references.iter().position(is_held) else { break };
        let reference = &mut references[place];
        if reference.count <= left {
            left -= reference.count;
            released.push(references.swap_remove(place));
        } else {
            reference.count -= left;
            released.push(Reference { object: Arc::clone(&object), count: left });
            left = 0;
        }
    }
    drop(references);
    // The program's destructor may run here, under no lock.
    drop(released);
    Ok(())
}
