//! User objects.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};

use cuda_abi::types::CUuserObject;

use super::{INVALID, graph, instantiate};
use crate::testing;
use crate::transfer::testing::call;

unsafe extern "C" fn count(counter: *mut c_void) {
    // SAFETY: a counter of a test, which is never freed.
    unsafe { &*counter.cast::<AtomicU32>() }.fetch_add(1, Ordering::SeqCst);
}

/// An object with so many references, and how often it has been destroyed.
fn object(references: u32) -> (CUuserObject, &'static AtomicU32) {
    let counter: &'static AtomicU32 = Box::leak(Box::default());
    let mut object = null_mut();
    let data = (&raw const *counter).cast_mut().cast();
    call!(cuUserObjectCreate(&raw mut object, data, Some(count), references, 1)).unwrap();
    (object, counter)
}

#[test]
fn an_object_goes_with_its_last_reference() {
    let _context = testing::context();
    let (object, destroyed) = object(1);
    call!(cuUserObjectRetain(object, 2)).unwrap();
    call!(cuUserObjectRelease(object, 2)).unwrap();
    assert_eq!(call!(cuUserObjectRelease(object, 2)), INVALID);
    assert_eq!(destroyed.load(Ordering::SeqCst), 0);
    call!(cuUserObjectRelease(object, 1)).unwrap();
    assert_eq!(destroyed.load(Ordering::SeqCst), 1);
    assert_eq!(call!(cuUserObjectRelease(object, 1)), INVALID);
}

#[test]
fn graphs_clones_and_executables_hold_objects() {
    let _context = testing::context();
    let (object, destroyed) = object(1);
    let graph = graph();
    call!(cuGraphRetainUserObject(graph, object, 1, 1)).unwrap();
    let mut clone = null_mut();
    call!(cuGraphClone(&raw mut clone, graph)).unwrap();
    let exec = instantiate(graph);
    call!(cuGraphDestroy(graph)).unwrap();
    call!(cuGraphDestroy(clone)).unwrap();
    assert_eq!(destroyed.load(Ordering::SeqCst), 0);
    call!(cuGraphExecDestroy(exec)).unwrap();
    assert_eq!(destroyed.load(Ordering::SeqCst), 1);
}

#[test]
fn a_graph_gives_references_back() {
    let _context = testing::context();
    let (object, destroyed) = object(1);
    let graph = graph();
    call!(cuGraphRetainUserObject(graph, object, 3, 0)).unwrap();
    call!(cuGraphRetainUserObject(graph, object, 2, 0)).unwrap();
    assert_eq!(call!(cuGraphReleaseUserObject(graph, object, 6)), INVALID);
    call!(cuGraphReleaseUserObject(graph, object, 4)).unwrap();
    call!(cuUserObjectRelease(object, 1)).unwrap();
    assert_eq!(destroyed.load(Ordering::SeqCst), 0);
    call!(cuGraphReleaseUserObject(graph, object, 1)).unwrap();
    assert_eq!(destroyed.load(Ordering::SeqCst), 1);
}

#[test]
fn counts_and_flags_are_checked() {
    let _context = testing::context();
    let (object, _) = object(1);
    let mut other = null_mut();
    assert_eq!(call!(cuUserObjectCreate(&raw mut other, null_mut(), None, 1, 1)), INVALID);
    assert_eq!(call!(cuUserObjectCreate(&raw mut other, null_mut(), Some(count), 1, 0)), INVALID);
    assert_eq!(call!(cuUserObjectCreate(&raw mut other, null_mut(), Some(count), 0, 1)), INVALID);
    assert_eq!(call!(cuUserObjectRetain(object, 0)), INVALID);
    assert_eq!(call!(cuUserObjectRetain(object, 1 << 31)), INVALID);
    assert_eq!(call!(cuUserObjectRetain(null_mut(), 1)), INVALID);
    assert_eq!(call!(cuGraphRetainUserObject(graph(), object, 1, 2)), INVALID);
    // There are not as many references to move.
    assert_eq!(call!(cuGraphRetainUserObject(graph(), object, 2, 1)), INVALID);
}
