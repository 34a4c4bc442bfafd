//! Capture on simcuda, each test in a process of its own: it reads its settings once, and what is found out about it is
//! remembered.

mod measure;

use std::ffi::c_int;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::ptr::null_mut;

use cuda_abi::sys;
use cuda_abi::types::{CUdeviceptr, CUgraph, CUstream, CUstreamCaptureMode};

use super::super::driver::{self, DriverError, check};
use super::super::testing;
use super::allocation::in_context;
use super::copy::Stream;
use super::hash::CHUNK_BYTES;
use super::hash::tests::model;
use super::*;

const CHUNK: usize = CHUNK_BYTES as usize;
const PAGE: usize = 4096;

/// Runs the test of that name once more, in a process of its own with these settings and a driver. Whether this is that
/// process.
pub(super) fn is_on_gpu(test: &str, settings: &[(&str, &str)]) -> bool {
    let is_alone = testing::is_alone(&format!("cuda::capture::tests::{test}"), settings);
    if is_alone {
        activate();
        // SAFETY: cuInit has no preconditions.
        check("cuInit", unsafe { driver::cuInit(0) }).expect("cuInit");
    }
    is_alone
}

fn context_on(device: c_int) -> CUcontext {
    let mut context: CUcontext = null_mut();
    // SAFETY: `context` is a local variable.
    let result = unsafe { driver::cuDevicePrimaryCtxRetain(&raw mut context, device) };
    check("cuDevicePrimaryCtxRetain", result).expect("a context");
    context
}

pub(super) fn device_memory(context: CUcontext, bytes: usize) -> CUdeviceptr {
    let mut address = 0;
    in_context(context, || {
        // SAFETY: `address` is a local variable.
        check("cuMemAlloc", unsafe { driver::cuMemAlloc_v2(&raw mut address, bytes) })
    })
    .expect("device memory");
    address
}

/// Bytes of which no page is like another one.
fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let odd = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let page: Vec<u8> = (1..=PAGE as u64 / 8).flat_map(|word| word.wrapping_mul(odd).to_le_bytes()).collect();
    let mut noise = page.repeat(bytes.div_ceil(PAGE));
    for (number, page) in noise.chunks_exact_mut(PAGE).enumerate() {
        page[..8].copy_from_slice(&(number as u64).to_le_bytes());
    }
    noise.truncate(bytes);
    noise
}

/// Allocations of device memory, one behind the other in a mirror.
pub(super) struct Job {
    pub contexts: Vec<CUcontext>,
    pub allocations: Vec<MappedAllocation>,
    pub file: File,
    pub copy_threads: u64,
}

impl Job {
    /// On each device allocations of these sizes, with something in them.
    pub fn new(devices: c_int, sizes: &[usize]) -> Self {
        let contexts: Vec<CUcontext> = (0..devices).map(context_on).collect();
        let mut allocations: Vec<MappedAllocation> = Vec::new();
        for context in &contexts {
            for bytes in sizes {
                let offset = allocations.last().map_or(0, |last| last.offset + last.bytes);
                let address = device_memory(*context, *bytes);
                let allocation = MappedAllocation {
                    context: *context,
                    address,
                    bytes: *bytes as u64,
                    offset,
                    hashes: Vec::new(),
                };
                allocations.push(allocation);
            }
        }
        let file = tempfile::tempfile_in("/dev/shm").expect("a file");
        let job = Self { contexts, allocations, file, copy_threads: 0 };
        job.file.set_len(job.bytes()).expect("a length");
        for (index, allocation) in job.allocations.iter().enumerate() {
            job.write(index, 0, &noise(index as u64 + 1, allocation.bytes as usize));
        }
        job
    }

    pub fn bytes(&self) -> u64 {
        self.allocations.iter().map(|allocation| allocation.bytes).sum()
    }

    fn write(&self, allocation: usize, at: usize, bytes: &[u8]) {
        let allocation = &self.allocations[allocation];
        in_context(allocation.context, || {
            let address = allocation.address + at as u64;
            // SAFETY: the bytes are a slice, the memory is the test's.
            check("cuMemcpyHtoD", unsafe {
                driver::cuMemcpyHtoD_v2(address, bytes.as_ptr().cast(), bytes.len())
            })
        })
        .expect("written");
    }

    fn read(&self, allocation: usize) -> Vec<u8> {
        let allocation = &self.allocations[allocation];
        let mut bytes = vec![0; allocation.bytes as usize];
        in_context(allocation.context, || {
            // SAFETY: the bytes are a slice of that length.
            check("cuMemcpyDtoH", unsafe {
                driver::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), allocation.address, bytes.len())
            })
        })
        .expect("read");
        bytes
    }

    fn mirrored(&self, allocation: usize) -> Vec<u8> {
        let mut bytes = vec![0; self.allocations[allocation].bytes as usize];
        self.file.read_exact_at(&mut bytes, self.allocations[allocation].offset).expect("read");
        bytes
    }

    fn is_mirrored(&self) -> bool {
        (0..self.allocations.len()).all(|allocation| self.mirrored(allocation) == self.read(allocation))
    }

    fn sizes(&self) -> Vec<u64> {
        self.allocations.iter().map(|allocation| allocation.bytes).collect()
    }

    pub fn stage(&self) -> Mirror {
        let (used, copy_threads) = (vec![0..self.bytes()], self.copy_threads);
        self.stage_with(&Room { used, copy_threads, ..Room::default() })
    }

    fn stage_with(&self, room: &Room) -> Mirror {
        let file = self.file.try_clone().expect("a descriptor");
        Mirror::stage(file.into(), self.bytes(), &self.contexts, room).expect("staged")
    }

    /// What the mirror has memory for, in chunks.
    fn used_chunks(&self) -> u64 {
        self.file.metadata().expect("a file").blocks() * 512 / CHUNK_BYTES
    }

    /// The room for what is in the allocations, by their hashes.
    fn room(&self, more_chunks: u64) -> Room {
        let used = self.allocations.iter().flat_map(|allocation| {
            let used = used_chunks(allocation.bytes, &allocation.hashes).into_iter();
            used.map(|part| allocation.offset + part.start..allocation.offset + part.end)
        });
        Room {
            used: bounded(used.collect()),
            more_bytes: more_chunks * CHUNK_BYTES,
            is_partial: false,
            copy_threads: self.copy_threads,
        }
    }

    /// Captures once, staging included.
    fn capture(&mut self) -> Result<Vec<u64>, String> {
        let mut mirror = self.stage();
        let captured = self.capture_to(&mut mirror);
        mirror.unpin().expect("unpinned");
        captured
    }

    /// Says how many bytes were copied of each allocation. The mirror may have changed nowhere but where it says so.
    fn capture_to(&mut self, mirror: &mut Mirror) -> Result<Vec<u64>, String> {
        let mirrored = |job: &Self| {
            (0..job.allocations.len()).map(|allocation| job.mirrored(allocation)).collect::<Vec<_>>()
        };
        let before = mirrored(self);
        let written = mirror.capture(&mut self.allocations).map_err(|error| error.to_string())?;
        for (index, ((before, after), written)) in before.iter().zip(mirrored(self)).zip(&written).enumerate()
        {
            let place = self.allocations[index].place();
            assert!(
                written.iter().all(|range| place.start <= range.start && range.end <= place.end),
                "{written:?}"
            );
            let is_written = |page: u64| written.iter().any(|range| range.contains(&(place.start + page)));
            let pages = (0..).step_by(PAGE).zip(before.chunks(PAGE).zip(after.chunks(PAGE)));
            let mut changed = pages.filter(|(_, (before, after))| before != after).map(|(page, _)| page);
            let untold = changed.find(|page| !is_written(*page));
            assert_eq!(untold, None, "a change in allocation {index} was not told");
        }
        Ok(written.iter().map(|written| written.iter().map(|range| range.end - range.start).sum()).collect())
    }

    fn has_hashes(&self) -> Vec<bool> {
        self.allocations.iter().map(|allocation| !allocation.hashes.is_empty()).collect()
    }
}

const CHANGED: (&str, &str) = ("CKPT_CAPTURE", "changed");

#[test]
fn the_kernel_computes_what_is_described() {
    if !is_on_gpu("the_kernel_computes_what_is_described", &[CHANGED]) {
        return;
    }
    let mut job = Job::new(1, &[3 * CHUNK, CHUNK]);
    job.write(0, CHUNK, &vec![0; CHUNK]);
    job.capture().expect("captured");
    for (index, allocation) in job.allocations.iter().enumerate() {
        let expected: Vec<Hash> = job.read(index).chunks_exact(CHUNK).map(model).collect();
        assert_eq!(allocation.hashes, expected, "allocation {index}");
    }
}

#[test]
fn only_what_has_changed_is_copied() {
    if !is_on_gpu("only_what_has_changed_is_copied", &[CHANGED]) {
        return;
    }
    let mut job = Job::new(1, &[6 * CHUNK, CHUNK, 2 * CHUNK]);
    assert_eq!(job.capture(), Ok(job.sizes()));
    assert!(job.is_mirrored());
    assert_eq!(job.capture(), Ok(vec![0, 0, 0]));
    // What is not copied shows in the mirror.
    job.file.write_all_at(&[0xAB], job.allocations[0].offset).expect("written");
    job.file.write_all_at(&[0xAB], job.allocations[1].offset).expect("written");
    for at in [CHUNK, 3 * CHUNK - 1, 4 * CHUNK + 17] {
        let byte = job.read(0)[at];
        job.write(0, at, &[byte ^ 1]);
    }
    job.write(2, CHUNK, &noise(99, CHUNK));
    assert_eq!(job.capture(), Ok(vec![3 * CHUNK_BYTES, 0, CHUNK_BYTES]));
    assert_eq!(job.mirrored(0)[0], 0xAB);
    assert_eq!(job.mirrored(1)[0], 0xAB);
    assert_eq!(job.mirrored(0)[1..], job.read(0)[1..]);
    assert_eq!(job.mirrored(2), job.read(2));
    assert_eq!(job.capture(), Ok(vec![0, 0, 0]));
}

#[test]
fn many_chunks_are_hashed_in_parts() {
    if !is_on_gpu("many_chunks_are_hashed_in_parts", &[CHANGED]) {
        return;
    }
    let mut job = Job::new(1, &[7 * CHUNK, 2 * CHUNK, 3 * CHUNK]);
    let capture = |job: &mut Job| {
        let mut mirror = job.stage();
        mirror.hashers[0].part = 6;
        let captured = job.capture_to(&mut mirror);
        mirror.unpin().expect("unpinned");
        captured
    };
    assert_eq!(capture(&mut job), Ok(job.sizes()));
    assert!(job.is_mirrored());
    let expected: Vec<Hash> = (0..3)
        .flat_map(|allocation| job.read(allocation))
        .collect::<Vec<u8>>()
        .chunks_exact(CHUNK)
        .map(model)
        .collect();
    let hashes: Vec<Hash> = job.allocations.iter().flat_map(|allocation| allocation.hashes.clone()).collect();
    assert_eq!(hashes, expected);
    // The last of a part and the first of the next, and the very last one.
    job.write(0, 5 * CHUNK, &vec![7; 2 * CHUNK]);
    job.write(2, 3 * CHUNK - 1, &[7]);
    assert_eq!(capture(&mut job), Ok(vec![2 * CHUNK_BYTES, 0, CHUNK_BYTES]));
    assert!(job.is_mirrored());
    // Numbers that follow one another, and allocations that do not.
    job.write(1, 0, &[9; 9]);
    job.write(2, CHUNK, &[9; 9]);
    assert_eq!(capture(&mut job), Ok(vec![0, CHUNK_BYTES, CHUNK_BYTES]));
    assert!(job.is_mirrored());
}

#[test]
fn all_of_it_is_copied_on_demand() {
    if !is_on_gpu("all_of_it_is_copied_on_demand", &[("CKPT_CAPTURE", "all")]) {
        return;
    }
    // More than what one copy takes.
    let mut job = Job::new(1, &[33 * CHUNK, CHUNK]);
    for _ in 0..2 {
        assert_eq!(job.capture(), Ok(job.sizes()));
        assert!(job.is_mirrored());
        assert_eq!(job.has_hashes(), [false, false]);
    }
}

#[test]
fn what_was_found_out_is_remembered() {
    if !is_on_gpu("what_was_found_out_is_remembered", &[]) {
        return;
    }
    let mut job = Job::new(1, &[CHUNK]);
    assert_eq!(job.capture(), Ok(job.sizes()));
    assert!(job.is_mirrored());
    let is_hashed = job.has_hashes()[0];
    assert_eq!(hashing_policy::remembered(), Some((is_hashed, 1, 16)));
    assert_eq!(job.capture(), Ok(if is_hashed { vec![0] } else { job.sizes() }));
    assert_eq!(hashing_policy::remembered(), Some((is_hashed, 1, 15)));
    // What was tried with less than there is now is tried again.
    let mut more = Job::new(1, &[9 * CHUNK]);
    assert_eq!(more.capture(), Ok(more.sizes()));
    assert!(more.is_mirrored());
    assert_eq!(hashing_policy::remembered(), Some((more.has_hashes()[0], 8, 16)));
    for _ in 0..16 {
        job.capture().expect("captured");
    }
    assert_eq!(hashing_policy::remembered().map(|(_, chunks, left)| (chunks, left)), Some((8, 0)));
    job.capture().expect("captured");
    assert_eq!(hashing_policy::remembered().map(|(_, chunks, left)| (chunks, left)), Some((1, 16)));
}

#[test]
fn a_piece_of_no_whole_chunks_is_copied() {
    if !is_on_gpu("a_piece_of_no_whole_chunks_is_copied", &[CHANGED]) {
        return;
    }
    let mut job = Job::new(1, &[CHUNK + 4096, CHUNK]);
    assert_eq!(job.capture(), Ok(job.sizes()));
    assert_eq!(job.capture(), Ok(vec![CHUNK_BYTES + 4096, 0]));
    assert_eq!(job.has_hashes(), [false, true]);
    assert!(job.is_mirrored());
}

#[test]
fn it_comes_back_as_it_was() {
    if !is_on_gpu("it_comes_back_as_it_was", &[("CKPT_CAPTURE", "all"), ("SIMCUDA_DEVICES", "2")]) {
        return;
    }
    let mut job = Job::new(2, &[33 * CHUNK, CHUNK]);
    job.capture().expect("captured");
    let before: Vec<Vec<u8>> = (0..4).map(|allocation| job.read(allocation)).collect();
    for (allocation, before) in before.iter().enumerate() {
        job.write(allocation, 0, &vec![0; before.len()]);
    }
    let file = job.file.try_clone().expect("a descriptor");
    let whole = 0..job.bytes();
    let mut mirror = Mirror::map(file.into(), job.bytes(), &job.contexts, std::slice::from_ref(&whole), 0)
        .expect("mapped");
    mirror.copy_back(&job.allocations).expect("copied");
    assert!(mirror.shortcomings.is_empty(), "{:?}", mirror.shortcomings);
    mirror.unpin().expect("unpinned");
    for (allocation, before) in before.iter().enumerate() {
        assert!(job.read(allocation) == *before, "allocation {allocation}");
    }
}

/// Chunks of zeroes take no memory in the mirror, whether they were never written or written with zeroes, and are zeroes
/// again after the way back.
#[test]
fn zeroes_take_no_memory() {
    if !is_on_gpu("zeroes_take_no_memory", &[CHANGED]) {
        return;
    }
    let mut job = Job::new(1, &[6 * CHUNK, 2 * CHUNK]);
    job.write(0, CHUNK, &vec![0; 3 * CHUNK]);
    // The mirror has had other content.
    job.file.write_all_at(&vec![7; 8 * CHUNK], 0).expect("written");
    let hashes = hash(&job.allocations).expect("hashed");
    job.allocations.iter_mut().zip(hashes).for_each(|(allocation, hashes)| allocation.hashes = hashes);
    let room = job.room(0);
    assert_eq!(room.used, [0..CHUNK_BYTES, 4 * CHUNK_BYTES..8 * CHUNK_BYTES]);
    // These hashes are not those of the mirror's content.
    job.allocations.iter_mut().for_each(|allocation| allocation.hashes.clear());
    let mut mirror = job.stage_with(&room);
    assert!(mirror.shortcomings.is_empty(), "{:?}", mirror.shortcomings);
    assert_eq!(job.capture_to(&mut mirror), Ok(job.sizes()));
    assert!(job.is_mirrored());
    assert_eq!(job.used_chunks(), 5);
    // More is written than was staged for: one chunk, and then another for which there is no room.
    job.write(0, 2 * CHUNK, &[5]);
    mirror.get_ready(&job.contexts, &job.room(1)).expect("ready");
    assert_eq!(job.capture_to(&mut mirror), Ok(vec![CHUNK_BYTES, 0]));
    assert!(job.is_mirrored());
    assert_eq!(job.used_chunks(), 6);
    job.write(0, CHUNK, &[5]);
    let error = job.capture_to(&mut mirror).expect_err("no room");
    assert!(error.contains("free host memory"), "{error}");
    assert_eq!((job.has_hashes(), job.used_chunks()), (vec![false, false], 6));
    // What becomes zeroes is freed when the mirror is staged the next time.
    mirror.unpin().expect("unpinned");
    drop(mirror);
    job.write(0, CHUNK, &vec![0; 2 * CHUNK]);
    job.write(0, 5 * CHUNK, &vec![0; CHUNK]);
    assert_eq!(job.capture(), Ok(job.sizes()));
    assert_eq!(job.used_chunks(), 8);
    let mut mirror = job.stage_with(&job.room(0));
    assert_eq!(job.capture_to(&mut mirror), Ok(vec![0, 0]));
    assert_eq!(job.used_chunks(), 4);
    mirror.unpin().expect("unpinned");
    drop(mirror);

    let before = [job.read(0), job.read(1)];
    job.write(0, 0, &vec![9; 6 * CHUNK]);
    job.write(1, 0, &vec![9; 2 * CHUNK]);
    let file = job.file.try_clone().expect("a descriptor");
    let mut mirror =
        Mirror::map(file.into(), job.bytes(), &job.contexts, &job.room(0).used, 0).expect("mapped");
    assert_eq!(mirror.copy_back(&job.allocations).expect("copied"), 4 * CHUNK_BYTES);
    assert_eq!(job.used_chunks(), 4);
    assert!(before == [job.read(0), job.read(1)]);
    mirror.unpin().expect("unpinned");
}

#[test]
fn devices_are_captured_side_by_side() {
    if !is_on_gpu("devices_are_captured_side_by_side", &[CHANGED, ("SIMCUDA_DEVICES", "2")]) {
        return;
    }
    let mut job = Job::new(2, &[2 * CHUNK, CHUNK]);
    assert_eq!(job.capture(), Ok(job.sizes()));
    assert!(job.is_mirrored());
    job.write(2, CHUNK, &[1, 2, 3]);
    assert_eq!(job.capture(), Ok(vec![0, 0, CHUNK_BYTES, 0]));
    assert!(job.is_mirrored());
    // A context that came to be after the staging.
    let contexts = std::mem::take(&mut job.contexts);
    job.contexts.push(contexts[0]);
    assert_eq!(job.capture(), Ok(vec![0, 0, 2 * CHUNK_BYTES, CHUNK_BYTES]));
    assert_eq!(job.has_hashes(), [true, true, false, false]);
}

#[test]
fn a_copy_that_fails_leaves_no_hashes() {
    let faults = ("SIMCUDA_FAULT", "cuMemcpyDtoHAsync_v2:4+=CUDA_ERROR_UNKNOWN");
    if !is_on_gpu("a_copy_that_fails_leaves_no_hashes", &[CHANGED, faults]) {
        return;
    }
    let mut job = Job::new(1, &[CHUNK, CHUNK]);
    assert_eq!(job.capture(), Ok(job.sizes()));
    job.write(0, 5, &[1]);
    job.write(1, 5, &[1]);
    let error = job.capture().expect_err("the driver's");
    assert!(error.contains("cuMemcpyDtoHAsync") && error.contains("CUDA_ERROR_UNKNOWN"), "{error}");
    assert_eq!(job.has_hashes(), [false, false]);
}

#[test]
fn nothing_is_under_way_after_an_error() {
    let faults = ("SIMCUDA_FAULT", "cuMemcpyDtoHAsync_v2:2=CUDA_ERROR_UNKNOWN");
    let slow = ("SIMCUDA_COPY_GBPS", "0.02");
    if !is_on_gpu("nothing_is_under_way_after_an_error", &[("CKPT_CAPTURE", "all"), faults, slow]) {
        return;
    }
    let mut job = Job::new(1, &[CHUNK, CHUNK]);
    let mut mirror = job.stage();
    mirror.capture(&mut job.allocations).expect_err("the driver's");
    let mirrored = job.mirrored(0);
    assert!(mirrored == job.read(0), "the first copy was still under direction");
}

#[test]
fn what_cannot_be_hashed_is_copied() {
    let faults = ("SIMCUDA_FAULT", "cuLaunchKernel:2=CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES");
    if !is_on_gpu("what_cannot_be_hashed_is_copied", &[CHANGED, faults]) {
        return;
    }
    let mut job = Job::new(1, &[CHUNK, CHUNK]);
    assert_eq!(job.capture(), Ok(job.sizes()));
    job.write(1, 5, &[1]);
    let mut mirror = job.stage();
    assert_eq!(job.capture_to(&mut mirror), Ok(job.sizes()));
    assert!(mirror.shortcomings[0].contains("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"));
    mirror.unpin().expect("unpinned");
    assert_eq!(job.has_hashes(), [false, false]);
    assert!(job.is_mirrored());
    assert_eq!(job.capture(), Ok(job.sizes()));
    assert_eq!(job.capture(), Ok(vec![0, 0]));
}

#[test]
fn a_driver_that_compiles_nothing_copies_everything() {
    let faults = ("SIMCUDA_FAULT", "cuModuleLoadData:1=CUDA_ERROR_JIT_COMPILER_NOT_FOUND");
    if !is_on_gpu("a_driver_that_compiles_nothing_copies_everything", &[CHANGED, faults]) {
        return;
    }
    let mut job = Job::new(1, &[CHUNK]);
    let mut mirror = job.stage();
    assert!(mirror.shortcomings[0].contains("CUDA_ERROR_JIT_COMPILER_NOT_FOUND"));
    assert_eq!(job.capture_to(&mut mirror), Ok(job.sizes()));
    mirror.unpin().expect("unpinned");
    assert!(job.is_mirrored());
    assert_eq!(job.has_hashes(), [false]);
    // It may have been for want of memory.
    job.capture().expect("captured");
    assert_eq!(job.has_hashes(), [true]);
}

/// What is not a multiple of the buffers' size, several devices, and more threads than there is to copy.
#[test]
fn threads_copy_what_is_not_pinned_there_and_back() {
    let settings = [("CKPT_CAPTURE", "all"), ("SIMCUDA_DEVICES", "2")];
    if !is_on_gpu("threads_copy_what_is_not_pinned_there_and_back", &settings) {
        return;
    }
    // At most as many as there are CPUs, and not so many that these are less than half of them.
    let cpus = process::cpus() as u64;
    for copy_threads in [1, cpus, 2 * cpus] {
        let mut job = Job::new(2, &[33 * CHUNK, CHUNK + 4096, 8]);
        job.copy_threads = copy_threads;
        let mut mirror = job.stage();
        assert!(mirror.shortcomings.is_empty(), "{:?}", mirror.shortcomings);
        assert!(!mirror.is_pinned() && mirror.is_ready());
        for change in [1, 2] {
            job.write(3, 5 * CHUNK, &noise(change, 2 * CHUNK));
            assert_eq!(job.capture_to(&mut mirror), Ok(job.sizes()));
            assert!(job.is_mirrored());
        }
        mirror.unpin().expect("unpinned");
        assert!(!mirror.is_ready());
        // Slower, and as right.
        job.write(0, CHUNK, &[1, 2, 3]);
        assert_eq!(job.capture_to(&mut mirror), Ok(job.sizes()));
        assert!(job.is_mirrored());
        drop(mirror);
        let before: Vec<Vec<u8>> = (0..6).map(|allocation| job.read(allocation)).collect();
        for (allocation, before) in before.iter().enumerate() {
            job.write(allocation, 0, &vec![0; before.len()]);
        }
        let (file, whole) = (job.file.try_clone().expect("a descriptor"), [0..job.bytes()]);
        let mut mirror =
            Mirror::map(file.into(), job.bytes(), &job.contexts, &whole, copy_threads).expect("mapped");
        assert_eq!(mirror.copy_back(&job.allocations).expect("copied"), job.bytes());
        assert!(!mirror.is_pinned() && mirror.shortcomings.is_empty(), "{:?}", mirror.shortcomings);
        drop(mirror);
        for (allocation, before) in before.iter().enumerate() {
            assert!(job.read(allocation) == *before, "allocation {allocation}");
        }
    }
}

#[test]
fn threads_copy_what_has_changed() {
    if !is_on_gpu("threads_copy_what_has_changed", &[CHANGED, ("SIMCUDA_DEVICES", "2")]) {
        return;
    }
    let mut job = Job::new(2, &[6 * CHUNK, CHUNK]);
    job.copy_threads = 3;
    assert_eq!(job.capture(), Ok(job.sizes()));
    assert!(job.is_mirrored());
    job.write(2, CHUNK, &[1, 2, 3]);
    job.write(3, 0, &[4]);
    assert_eq!(job.capture(), Ok(vec![0, 0, CHUNK_BYTES, CHUNK_BYTES]));
    assert!(job.is_mirrored());
}

/// The program has bound itself to fewer CPUs than the launcher has reckoned with.
#[test]
fn with_few_cpus_the_mirror_is_pinned() {
    if !is_on_gpu("with_few_cpus_the_mirror_is_pinned", &[]) {
        return;
    }
    let mut job = Job::new(1, &[CHUNK]);
    job.copy_threads = 2 * process::cpus() as u64 + 2;
    let mirror = job.stage();
    assert!(mirror.is_pinned() && mirror.shortcomings.is_empty(), "{:?}", mirror.shortcomings);
}

/// A context that is reset between the staging and the capture takes its streams with it, and the pinned buffers.
#[test]
fn threads_copy_after_a_context_is_gone() {
    if !is_on_gpu("threads_copy_after_a_context_is_gone", &[CHANGED, ("SIMCUDA_DEVICES", "2")]) {
        return;
    }
    let mut job = Job::new(2, &[3 * CHUNK]);
    job.copy_threads = 2;
    let mut mirror = job.stage();
    forget(job.contexts[0]);
    // SAFETY: plain numbers; nobody uses what is on the device.
    check("cuDevicePrimaryCtxReset", unsafe { driver::cuDevicePrimaryCtxReset_v2(0) }).expect("reset");
    // What the interposer notes when the program calls that.
    crate::cuda::context::contents_removed(job.contexts[0] as usize);
    job.allocations.remove(0);
    assert_eq!(job.capture_to(&mut mirror), Ok(job.sizes()));
    assert!(job.is_mirrored());
    mirror.unpin().expect("unpinned");
}

/// An error of one thread ends all; the buffers are not given back while something is copied to them.
#[test]
fn a_thread_that_fails_leaves_nothing_under_way() {
    for number in ["1", "2", "9", "9+"] {
        let fault = format!("cuMemcpyDtoHAsync_v2:{number}=CUDA_ERROR_UNKNOWN");
        let settings = [("CKPT_CAPTURE", "all"), ("SIMCUDA_FAULT", &fault), ("SIMCUDA_COPY_GBPS", "0.2")];
        if !is_on_gpu("a_thread_that_fails_leaves_nothing_under_way", &settings) {
            continue;
        }
        let mut job = Job::new(1, &[12 * CHUNK]);
        job.copy_threads = 3;
        let mut mirror = job.stage();
        let error = job.capture_to(&mut mirror).expect_err("the driver's");
        assert!(error.contains("cuMemcpyDtoHAsync") && error.contains("CUDA_ERROR_UNKNOWN"), "{error}");
        assert_eq!(job.has_hashes(), [false]);
        mirror.unpin().expect("unpinned");
        drop(mirror);
        return;
    }
}

/// Threads that cannot have buffers, or a mirror that is pinned in part.
#[test]
fn what_has_no_buffers_is_pinned() {
    let fault = ("SIMCUDA_FAULT", "cuMemHostRegister_v2:1=CUDA_ERROR_OUT_OF_MEMORY");
    if !is_on_gpu("what_has_no_buffers_is_pinned", &[CHANGED, fault]) {
        return;
    }
    let mut job = Job::new(1, &[5 * CHUNK]);
    job.copy_threads = 2;
    let (used, copy_threads) = (vec![CHUNK_BYTES..3 * CHUNK_BYTES], 2);
    let mut mirror = job.stage_with(&Room { used, copy_threads, more_bytes: job.bytes(), is_partial: false });
    assert!(mirror.is_pinned());
    let [why] = &mirror.shortcomings[..] else { panic!("{:?}", mirror.shortcomings) };
    assert!(why.starts_with("threads cannot copy: ") && why.contains("CUDA_ERROR_OUT_OF_MEMORY"), "{why}");
    assert_eq!(job.capture_to(&mut mirror), Ok(job.sizes()));
    assert!(job.is_mirrored());
    // Now there are buffers for what is not pinned.
    job.write(0, 0, &noise(9, 5 * CHUNK));
    mirror.get_ready(&job.contexts, &job.room(0)).expect("ready");
    assert_eq!(job.capture_to(&mut mirror), Ok(job.sizes()));
    assert!(job.is_mirrored());
    mirror.unpin().expect("unpinned");
    assert!(!mirror.is_ready());
}

#[test]
fn a_context_that_goes_takes_what_is_in_it() {
    if !is_on_gpu("a_context_that_goes_takes_what_is_in_it", &[CHANGED, ("SIMCUDA_DEVICES", "2")]) {
        return;
    }
    let reset = |device, context| {
        forget(context);
        // SAFETY: plain numbers; nobody uses what is on the device.
        check("cuDevicePrimaryCtxReset", unsafe { driver::cuDevicePrimaryCtxReset_v2(device) })
            .expect("reset");
    };
    let mut before = Job::new(2, &[CHUNK]);
    let mut mirror = before.stage();
    reset(1, before.contexts[1]);
    before.allocations.pop();
    assert_eq!(before.capture_to(&mut mirror), Ok(before.sizes()));
    assert_eq!(before.has_hashes(), [true]);
    // With the mirror's own.
    reset(0, before.contexts[0]);
    mirror.unpin().expect("unpinned");
    let mut after = Job::new(2, &[CHUNK]);
    assert_eq!(after.capture(), Ok(after.sizes()));
    assert_eq!(after.capture(), Ok(vec![0, 0]));
    assert!(after.is_mirrored());
}

#[test]
fn a_context_that_is_destroyed_takes_what_was_pinned_in_it() {
    if !is_on_gpu("a_context_that_is_destroyed_takes_what_was_pinned_in_it", &[]) {
        return;
    }
    let job = Job::new(1, &[2 * CHUNK]);
    let mut own: CUcontext = null_mut();
    // SAFETY: `own` is a local variable.
    check("cuCtxCreate", unsafe { driver::cuCtxCreate_v2(&raw mut own, 0, 0) }).expect("a context");
    let room = |chunks| Room { used: vec![0..chunks * CHUNK_BYTES], ..Room::default() };
    let file = job.file.try_clone().expect("a descriptor");
    let mut mirror = Mirror::stage(file.into(), job.bytes(), &[own], &room(1)).expect("staged");
    forget(own);
    // SAFETY: nothing is done in it any more.
    check("cuCtxDestroy", unsafe { driver::cuCtxDestroy_v2(own) }).expect("destroyed");
    mirror.get_ready(&job.contexts, &room(2)).expect("ready");
    assert!(mirror.shortcomings.is_empty() && mirror.is_pinned(), "{:?}", mirror.shortcomings);
    mirror.unpin().expect("unpinned");
    assert!(!mirror.is_pinned());
}

#[test]
fn a_mirror_that_cannot_be_pinned_is_used_as_it_is() {
    let faults = ("SIMCUDA_FAULT", "cuMemHostRegister_v2:1+=CUDA_ERROR_NOT_SUPPORTED");
    if !is_on_gpu("a_mirror_that_cannot_be_pinned_is_used_as_it_is", &[CHANGED, faults]) {
        return;
    }
    let mut job = Job::new(1, &[2 * CHUNK]);
    let mut mirror = job.stage();
    assert!(mirror.shortcomings[0].contains("CUDA_ERROR_NOT_SUPPORTED"));
    assert_eq!(job.capture_to(&mut mirror), Ok(job.sizes()));
    mirror.copy_back(&job.allocations).expect("copied");
    mirror.unpin().expect("unpinned");
    assert!(job.is_mirrored());
}

#[test]
fn what_does_not_fit_is_refused() {
    if !is_on_gpu("what_does_not_fit_is_refused", &[]) {
        return;
    }
    let mut job = Job::new(1, &[CHUNK, CHUNK]);
    let file = job.file.try_clone().expect("a descriptor");
    let room = Room::default();
    let Err(error) = Mirror::stage(file.into(), job.bytes() + 1, &job.contexts, &room) else {
        panic!("mapped")
    };
    assert_eq!(error.to_string(), "the mirror has 4194304 bytes, not 4194305");
    job.file.set_len(CHUNK_BYTES).expect("cut");
    let file = job.file.try_clone().expect("a descriptor");
    let mut mirror = Mirror::stage(file.into(), CHUNK_BYTES, &job.contexts, &room).expect("staged");
    for refused in
        [mirror.capture(&mut job.allocations).map(|_| ()), mirror.copy_back(&job.allocations).map(|_| ())]
    {
        assert_eq!(
            refused.expect_err("refused").to_string(),
            "2097152 bytes at 2097152 do not fit into a mirror of 2097152 bytes"
        );
    }
}

/// The flags of the mapping of the mirror's file, if there is one.
fn flags(file: &File) -> Option<String> {
    let inode = format!(" {} ", file.metadata().expect("a file").ino());
    let smaps = std::fs::read_to_string("/proc/self/smaps").expect("smaps");
    let mut lines = smaps.lines().skip_while(|line| !line.contains(&inode));
    lines.find_map(|line| line.strip_prefix("VmFlags: ").map(str::to_owned))
}

#[test]
fn children_do_not_inherit_it_and_nothing_is_left_of_it() {
    if !is_on_gpu("children_do_not_inherit_it_and_nothing_is_left_of_it", &[]) {
        return;
    }
    let job = Job::new(1, &[CHUNK]);
    let mirror = job.stage();
    let shown = flags(&job.file).expect("mapped");
    assert!(shown.split(' ').any(|flag| flag == "dc"), "{shown}");
    drop(mirror);
    assert_eq!(flags(&job.file), None);
    drop(job.stage());
    assert_eq!(flags(&job.file), None);
    // Addresses that the driver still thought pinned would not be pinned again.
    let mirror = job.stage();
    assert!(mirror.shortcomings.is_empty(), "{:?}", mirror.shortcomings);
}

#[test]
fn nobodys_stream_capture_is_disturbed() {
    if !is_on_gpu("nobodys_stream_capture_is_disturbed", &[]) {
        return;
    }
    let job = Job::new(1, &[CHUNK]);
    let begun = in_context(job.contexts[0], || {
        let mut stream: CUstream = null_mut();
        // SAFETY: `stream` is a local variable.
        check("cuStreamCreate", unsafe { driver::cuStreamCreate(&raw mut stream, 0) })?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL as CUstreamCaptureMode;
        // SAFETY: the stream was made just now.
        check("cuStreamBeginCapture", unsafe { driver::cuStreamBeginCapture_v2(stream, mode) })?;
        Ok::<_, DriverError>(stream)
    });
    let stream = begun.expect("a capture");
    let file = job.file.try_clone().expect("a descriptor");
    let contexts = [job.contexts[0] as usize];
    let agent = std::thread::spawn(move || {
        let (contexts, whole) = (contexts.map(|context| context as CUcontext), 0..CHUNK_BYTES);
        let room = Room { used: vec![whole], ..Room::default() };
        let mut mirror = Mirror::stage(file.into(), CHUNK_BYTES, &contexts, &room).expect("staged");
        assert!(mirror.shortcomings.is_empty(), "{:?}", mirror.shortcomings);
        mirror.unpin().expect("unpinned");
    });
    agent.join().expect("staged");
    in_context(job.contexts[0], || {
        let mut graph: CUgraph = null_mut();
        // SAFETY: `graph` is a local variable, the stream is ours.
        check("cuStreamEndCapture", unsafe { driver::cuStreamEndCapture(stream, &raw mut graph) })
    })
    .expect("a capture that is whole");
}
