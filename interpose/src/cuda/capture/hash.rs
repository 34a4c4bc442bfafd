//! Finds out which chunks of device memory have changed: a kernel of ours hashes each chunk.
//!
//! The function is NH, a universal hash (J. Black, S. Halevi, H. Krawczyk, T. Krovetz and P. Rogaway, "UMAC: Fast and
//! Secure Message Authentication", 1999), on two levels, each with two results of 64 bits that use the same keys,
//! the second result two words further on. A message of words m, 32 bits each, and keys k gives
//!
//! ```text
//! NH(m, k) = sum over even i of (m[i] + k[i] mod 2^32) * (m[i+1] + k[i+1] mod 2^32)    mod 2^64
//! ```
//!
//! 1. A chunk's 16-byte vectors are dealt out to 512 streams in turns. Stream t, 1,024 words, gives
//!    `a(t) = [NH(m, K), NH(m, K[2..])]`. All streams have the same keys K.
//! 2. The 512 results one after the other are a message of 2,048 words. The chunk's hash is `[NH(m, L), NH(m,
//!    L[2..])]`.
//!
//! If two different messages of the same length are given, and then the keys are drawn, one result is the same for both
//! with a probability of at most 2^-32, and both results with at most 2^-64 (there, theorem on the Toeplitz
//! construction). Two different chunks differ in some stream, which level 1 misses with at most 2^-64, and then level
//! 2 with at most 2^-64: a change goes unseen with at most 2^-63. Where a word stands decides which keys it meets, so
//! what has only changed places is a change like any other. The keys come from a seed that each process draws at
//! random, by splitmix64 (G. Steele, D. Lea and C. Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
//!
//! It takes four multiplications of 32 bits for 16 bytes, so that the memory's speed is the limit.

use std::ffi::{c_uint, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

use cuda_abi::sys;
use cuda_abi::types::{CUcontext, CUdeviceptr, CUfunction, CUmodule, CUstream};

use super::allocation::{Hash, MappedAllocation, in_context};
use crate::cuda::driver::{self, DriverError, check};
use crate::cuda::shared::Shared;

/// The size of a chunk.
pub(super) const CHUNK_BYTES: u64 = 2 << 20;
const THREADS: c_uint = 512;
/// The number of chunks that one launch hashes: enough to fill a GPU many times over, so that the tail does not
/// count.
const MOST_CHUNKS: usize = 4096;

const PTX: &str = concat!(include_str!("hash.ptx"), "\0");

/// The kernel in each context that it was loaded in, where it stays: addresses that only the driver reads.
static KERNELS: Shared<Vec<(usize, usize)>> = Shared::new(Vec::new());

/// To be called when a context is removed (destroyed, or reset if it is a primary one): our code in it is not used
/// again, nor mistaken for that of a new context at the same address.
pub(crate) fn forget(context: CUcontext) {
    KERNELS.lock().retain(|(known, _)| *known != context as usize);
}

fn is_loaded(context: CUcontext, kernel: CUfunction) -> bool {
    KERNELS.lock().contains(&(context as usize, kernel as usize))
}

fn kernel(context: CUcontext) -> Result<CUfunction, DriverError> {
    let known =
        KERNELS.lock().iter().find(|(known, _)| *known == context as usize).map(|(_, kernel)| *kernel);
    if let Some(kernel) = known {
        return Ok(kernel as CUfunction);
    }
    let kernel = in_context(context, load)?;
    KERNELS.lock().push((context as usize, kernel as usize));
    Ok(kernel)
}

/// Loads the kernel into the current context.
fn load() -> Result<CUfunction, DriverError> {
    let mut module: CUmodule = null_mut();
    // SAFETY: `module` is a local variable, the text ends with a NUL.
    check("cuModuleLoadData", unsafe { driver::cuModuleLoadData(&raw mut module, PTX.as_ptr().cast()) })?;
    let mut function: CUfunction = null_mut();
    // SAFETY: `function` is a local variable, the module was loaded just now.
    let result = unsafe { driver::cuModuleGetFunction(&raw mut function, module, c"ckpt_hash".as_ptr()) };
    check("cuModuleGetFunction", result)?;
    Ok(function)
}

/// The process's: hashes of a capture are compared with those of the next, also in a process that was restored
/// between the two.
fn seed() -> u64 {
    static SEED: OnceLock<u64> = OnceLock::new();
    *SEED.get_or_init(|| {
        let mut seed = [0; 8];
        // Without waiting: a constant seed is nearly as good.
        // SAFETY: the buffer is a local variable.
        unsafe { libc::getrandom(seed.as_mut_ptr().cast(), seed.len(), libc::GRND_NONBLOCK) };
        u64::from_ne_bytes(seed)
    })
}

/// Words of keys, as the kernel makes them.
fn keys(seed: u64, count: usize) -> Vec<u32> {
    let number = |index: u64| {
        let mut z = seed.wrapping_add((index + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    };
    (0..count as u64 / 2).map(number).flat_map(|number| [number as u32, (number >> 32) as u32]).collect()
}

fn nh(words: &[u32], keys: &[u32]) -> u64 {
    let pairs = words.chunks_exact(2).zip(keys.chunks_exact(2));
    let product = |(word, key): (&[u32], &[u32])| {
        u64::from(word[0].wrapping_add(key[0])).wrapping_mul(u64::from(word[1].wrapping_add(key[1])))
    };
    pairs.map(product).fold(0, u64::wrapping_add)
}

/// The hash of a chunk that holds only zeroes: all its streams are alike.
pub(super) fn hash_of_zeroes() -> Hash {
    static HASH: OnceLock<Hash> = OnceLock::new();
    *HASH.get_or_init(|| {
        const STREAMS: usize = THREADS as usize;
        const WORDS: usize = CHUNK_BYTES as usize / 4 / STREAMS;
        let keys = keys(seed(), (WORDS + 4) + (4 * STREAMS + 4));
        let (inner, outer) = keys.split_at(WORDS + 4);
        let stream = [0; WORDS];
        let results = [nh(&stream, inner), nh(&stream, &inner[2..])];
        let words = results.map(|result| [result as u32, (result >> 32) as u32]).concat().repeat(STREAMS);
        [nh(&words, outer), nh(&words, &outer[2..])]
    })
}

/// Pinned host memory that the kernel reads from and writes to.
#[repr(C)]
struct Table {
    /// Where each chunk is.
    addresses: [CUdeviceptr; MOST_CHUNKS],
    hashes: [Hash; MOST_CHUNKS],
}

/// Hashes chunks in one context.
pub(super) struct Hasher {
    pub context: CUcontext,
    function: CUfunction,
    table: *mut Table,
    /// Where the device sees the table.
    address: CUdeviceptr,
    /// How many chunks to hash at a time.
    pub part: usize,
}

impl Hasher {
    /// # Errors
    /// Why chunks cannot be hashed in this context.
    pub fn new(context: CUcontext) -> Result<Self, DriverError> {
        let function = kernel(context)?;
        in_context(context, || {
            let mut table: *mut c_void = null_mut();
            let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
            // SAFETY: `table` is a local variable.
            let result = unsafe { driver::cuMemHostAlloc(&raw mut table, size_of::<Table>(), flags) };
            check("cuMemHostAlloc", result)?;
            let mut hasher = Self { context, function, table: table.cast(), address: 0, part: MOST_CHUNKS };
            // SAFETY: `hasher` is a local variable, the memory was allocated just now.
            let result = unsafe { driver::cuMemHostGetDevicePointer_v2(&raw mut hasher.address, table, 0) };
            check("cuMemHostGetDevicePointer", result)?;
            Ok(hasher)
        })
    }

    /// Whether its context is still there.
    pub fn is_alive(&self) -> bool {
        is_loaded(self.context, self.function)
    }

    /// Whether a allocation is in this context, made up of whole chunks, and where the kernel may read 16 bytes at a
    /// time.
    pub fn can_hash(&self, allocation: &MappedAllocation) -> bool {
        allocation.context == self.context
            && allocation.bytes.is_multiple_of(CHUNK_BYTES)
            && allocation.address.is_multiple_of(16)
    }

    /// Has up to [`MOST_CHUNKS`] chunks hashed on a stream, whose context is current and which is idle.
    ///
    /// # Errors
    /// A driver call failed.
    pub fn begin(&mut self, chunks: &[CUdeviceptr], stream: CUstream) -> Result<(), DriverError> {
        let count = chunks.len().min(MOST_CHUNKS);
        // SAFETY: the table is ours, as large as that, and no kernel is using it: the stream is idle.
        let addresses = unsafe { &raw mut (*self.table).addresses };
        // SAFETY: as above; that many addresses are on either side.
        unsafe { std::ptr::copy_nonoverlapping(chunks.as_ptr(), addresses.cast(), count) };
        let mut parameters =
            [self.address, self.address + std::mem::offset_of!(Table, hashes) as u64, seed()];
        let mut places = parameters.each_mut().map(|parameter| (&raw mut *parameter).cast::<c_void>());
        // SAFETY: the kernel has these three parameters, and reads chunks whose memory is mapped.
        check("cuLaunchKernel", unsafe {
            driver::cuLaunchKernel(
                self.function,
                count as c_uint,
                1,
                1,
                THREADS,
                1,
                1,
                0,
                stream,
                places.as_mut_ptr(),
                null_mut(),
            )
        })
    }

    /// The hashes of the first `count` chunks that were begun last, once the stream is done.
    pub fn hashes(&self, count: usize) -> Vec<Hash> {
        // SAFETY: the table is ours.
        let hashes = unsafe { &raw const (*self.table).hashes }.cast::<Hash>();
        let at = |index| {
            // SAFETY: `index` is less than the table's length. The device may be the one that wrote it.
            unsafe { hashes.wrapping_add(index).read_volatile() }
        };
        (0..count.min(MOST_CHUNKS)).map(at).collect()
    }
}

impl Drop for Hasher {
    fn drop(&mut self) {
        // A removed context has freed its memory.
        if !self.is_alive() {
            return;
        }
        let _ = in_context(self.context, || {
            // SAFETY: the memory is ours, and all work on it has been waited for.
            check("cuMemFreeHost", unsafe { driver::cuMemFreeHost(self.table.cast()) })
        });
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const STREAMS: usize = THREADS as usize;

    /// The function that is described above, by its description.
    pub fn model(chunk: &[u8]) -> Hash {
        let words: Vec<u32> =
            chunk.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect();
        let words_of_stream = words.len() / STREAMS;
        let keys = keys(seed(), (words_of_stream + 4) + (4 * STREAMS + 4));
        let (inner, outer) = keys.split_at(words_of_stream + 4);
        let mut results = Vec::new();
        for stream in 0..STREAMS {
            let vectors = words.chunks_exact(4).skip(stream).step_by(STREAMS);
            let own: Vec<u32> = vectors.flatten().copied().collect();
            for result in [nh(&own, inner), nh(&own, &inner[2..])] {
                results.extend([result as u32, (result >> 32) as u32]);
            }
        }
        [nh(&results, outer), nh(&results, &outer[2..])]
    }

    #[test]
    fn the_hash_of_zeroes_is_that_of_a_chunk_of_zeroes() {
        let mut chunk = vec![0; CHUNK_BYTES as usize];
        assert_eq!(hash_of_zeroes(), model(&chunk));
        chunk[1 << 20] = 1;
        assert_ne!(hash_of_zeroes(), model(&chunk));
    }

    #[test]
    fn what_changes_places_or_sign_changes_the_hash() {
        let chunk: Vec<u8> = (0..CHUNK_BYTES as u32 / 4)
            .flat_map(|word| word.wrapping_mul(2_654_435_761).to_le_bytes())
            .collect();
        let hash = model(&chunk);
        let changed = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut other = chunk.clone();
            change(&mut other);
            model(&other)
        };
        let swapped = |first: usize, second: usize, bytes: usize| {
            changed(&|other| {
                let (left, right) = other.split_at_mut(second);
                left[first..first + bytes].swap_with_slice(&mut right[..bytes]);
            })
        };
        let negated =
            |words: &[usize]| changed(&|other| words.iter().for_each(|word| other[4 * word + 3] ^= 0x80));
        let others = [
            swapped(0, 1 << 20, 1 << 20),
            swapped(0, 8192, 16),
            swapped(0, 16, 16),
            swapped(0, 8, 8),
            swapped(0, 4, 4),
            negated(&[0]),
            negated(&[0, 1]),
            negated(&[0, 2048]),
            negated(&[0, 1, 2, 3, 2048, 2049, 2050, 2051]),
        ];
        for (index, other) in others.iter().enumerate() {
            assert_ne!(hash[0], other[0], "change {index}");
            assert_ne!(hash[1], other[1], "change {index}");
        }
    }
}
