//! Device memory for tests, and a launch in one call.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use parking_lot::Mutex;
use simcuda_ptx::{Fault, Image, Launch, Memory, Module, Window};

/// 16 bytes of device memory, aligned as windows are.
#[repr(align(16))]
#[derive(Default)]
struct Cell([AtomicU64; 2]);

struct Buffer {
    start: u64,
    bytes: u64,
    writable: bool,
    cells: Arc<Vec<Cell>>,
}

impl Buffer {
    fn host(&self) -> *mut u8 {
        self.cells.as_ptr().cast_mut().cast()
    }

    fn byte(&self, offset: usize) -> &AtomicU8 {
        assert!((offset as u64) < self.bytes);
        let byte = self.host().wrapping_add(offset);
        // SAFETY: the offset is inside the buffer, whose cells are atomics and live as long as `self`.
        unsafe { AtomicU8::from_ptr(byte) }
    }
}

/// Device memory with gaps between allocations.
#[derive(Default)]
pub struct TestMemory {
    buffers: Vec<Buffer>,
    /// Start and length of each multimem address, and the buffers behind it.
    teams: Vec<(u64, u64, Vec<u64>)>,
    pub cancelled: AtomicBool,
    pub printed: Mutex<Vec<u8>>,
}

impl TestMemory {
    /// Zeroed memory at an address that is a multiple of 256.
    pub fn alloc(&mut self, bytes: usize) -> u64 {
        let start = self
            .buffers
            .last()
            .map_or(0x7f00_0000_0000, |b| (b.start + b.bytes).next_multiple_of(256) + 4096);
        let cells = Arc::new((0..bytes.div_ceil(16)).map(|_| Cell::default()).collect());
        self.buffers.push(Buffer { start, bytes: bytes as u64, writable: true, cells });
        start
    }

    pub fn make_read_only(&mut self, address: u64) {
        self.buffers.iter_mut().find(|b| b.start == address).unwrap().writable = false;
    }

    pub fn write_bytes(&self, address: u64, bytes: &[u8]) {
        let (buffer, offset) = self.find(address);
        for (index, byte) in bytes.iter().enumerate() {
            buffer.byte(offset + index).store(*byte, Ordering::Relaxed);
        }
    }

    pub fn read_bytes(&self, address: u64, count: usize) -> Vec<u8> {
        let (buffer, offset) = self.find(address);
        (0..count).map(|index| buffer.byte(offset + index).load(Ordering::Relaxed)).collect()
    }

    fn find(&self, address: u64) -> (&Buffer, usize) {
        let buffer = self.buffers.iter().find(|b| (b.start..b.start + b.bytes).contains(&address)).unwrap();
        (buffer, (address - buffer.start) as usize)
    }

    /// A multimem address for `bytes` bytes at each of the addresses.
    pub fn join(&mut self, addresses: &[u64], bytes: usize) -> u64 {
        let start = self.alloc(bytes);
        let address = start + (1 << 40);
        self.teams.push((address, bytes as u64, addresses.to_vec()));
        address
    }

    /// Allocates and fills in one.
    pub fn put<T: Plain>(&mut self, values: &[T]) -> u64 {
        let bytes: Vec<u8> = values.iter().flat_map(Plain::bytes).collect();
        let address = self.alloc(bytes.len().max(1));
        self.write_bytes(address, &bytes);
        address
    }

    pub fn get<T: Plain>(&self, address: u64, count: usize) -> Vec<T> {
        self.read_bytes(address, count * size_of::<T>()).chunks(size_of::<T>()).map(T::from_bytes).collect()
    }
}

// SAFETY: a window is one of the buffers, which it keeps alive.
unsafe impl Memory for TestMemory {
    fn window(&self, address: u64) -> Option<Window> {
        let buffer = self.buffers.iter().find(|b| (b.start..b.start + b.bytes).contains(&address))?;
        let keep: Arc<dyn Any + Send + Sync> = buffer.cells.clone();
        Some(Window {
            start: buffer.start,
            len: buffer.bytes,
            host: buffer.host(),
            writable: buffer.writable,
            keep,
        })
    }

    fn team(&self, address: u64) -> Vec<Window> {
        let team = self.teams.iter().find(|(start, len, _)| (*start..start + len).contains(&address));
        let Some((start, len, places)) = team else { return Vec::new() };
        let window = |place: &u64| {
            let window = self.window(*place)?;
            Some(Window { start: *start, len: *len, ..window })
        };
        places.iter().filter_map(window).collect()
    }

    fn cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    fn print(&self, text: &[u8]) {
        self.printed.lock().extend(text);
    }
}

/// Numbers that go to device memory as they are.
pub trait Plain: Sized {
    fn bytes(&self) -> Vec<u8>;
    fn from_bytes(bytes: &[u8]) -> Self;
}

macro_rules! plain {
    ($($ty:ty)*) => {
        $(impl Plain for $ty {
            fn bytes(&self) -> Vec<u8> {
                self.to_le_bytes().to_vec()
            }
            fn from_bytes(bytes: &[u8]) -> Self {
                Self::from_le_bytes(bytes.try_into().unwrap())
            }
        })*
    };
}
plain!(u8 i8 u16 i16 u32 i32 u64 i64 f32 f64);

/// One argument of a kernel.
pub fn arg<T: Plain>(value: T) -> Vec<u8> {
    value.bytes()
}

/// A module whose variables are in memory.
pub fn image(text: &str, memory: &mut TestMemory) -> Image {
    let module = match Module::parse(text) {
        Ok(module) => module,
        Err(error) => panic!("{error}\n{text}"),
    };
    load(Module::link(vec![module]).unwrap(), memory)
}

pub fn load(module: Module, memory: &mut TestMemory) -> Image {
    let addresses: Vec<u64> = module.globals().iter().map(|g| memory.alloc(g.size_bytes.max(1))).collect();
    let image = Image::new(Arc::new(module), addresses.clone());
    for (index, address) in addresses.iter().enumerate() {
        memory.write_bytes(*address, &image.initial_bytes(index));
    }
    image
}

/// How a kernel is launched.
pub struct Shape {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub cluster: [u32; 3],
    pub shared: u32,
    pub cooperative: bool,
    pub workers: usize,
}

impl Shape {
    pub fn new(blocks: u32, threads: u32) -> Shape {
        Shape {
            grid: [blocks, 1, 1],
            block: [threads, 1, 1],
            cluster: [1; 3],
            shared: 0,
            cooperative: false,
            workers: 2,
        }
    }
}

/// Launches with the arguments laid out as the kernel has them.
pub fn launch(
    image: &Image,
    function: &str,
    shape: &Shape,
    args: &[Vec<u8>],
    memory: &TestMemory,
) -> Result<(), Fault> {
    let kernel = image.module().function(function).unwrap_or_else(|| panic!("no kernel `{function}`"));
    let mut params = vec![0; kernel.param_bytes];
    assert_eq!(kernel.params.len(), args.len(), "arguments of {function}");
    for (param, arg) in kernel.params.iter().zip(args) {
        assert_eq!(param.size, arg.len(), "{}", param.name);
        params[param.offset..param.offset + param.size].copy_from_slice(arg);
    }
    Launch {
        image,
        function,
        grid: shape.grid,
        block: shape.block,
        dynamic_shared_bytes: shape.shared,
        params: &params,
        cooperative: shape.cooperative,
        cluster: shape.cluster,
        max_shared_bytes: 227 << 10,
    }
    .run(memory, shape.workers)
}

/// A kernel with the parameters `params` and the body `body`, with registers of every kind declared.
pub fn kernel(params: &str, body: &str) -> String {
    format!(
        ".version 8.7\n.target sm_90\n.address_size 64\n.visible .entry test({params})\n{{\n\
         .reg .pred %p<10>;\n.reg .b16 %h<20>;\n.reg .b32 %r<40>;\n.reg .b64 %d<40>;\n\
         .reg .f32 %f<20>;\n.reg .f64 %fd<20>;\n.reg .b128 %q<4>;\n{body}\nret;\n}}\n"
    )
}

/// Runs one block of the kernel whose body stores `per_thread` words of 32 bits at `%d0` for each thread.
pub fn run_block(declarations: &str, body: &str, threads: u32, per_thread: usize) -> Result<Vec<u32>, Fault> {
    let body = format!(
        "ld.param.u64 %d0, [out];\nmov.u32 %r0, %tid.x;\nmul.wide.u32 %d1, %r0, {};\nadd.u64 %d0, %d0, %d1;\n{body}",
        per_thread * 4
    );
    let text = kernel(".param .u64 out", &body)
        .replace(".visible .entry", &format!("{declarations}\n.visible .entry"));
    let mut memory = TestMemory::default();
    let out = memory.alloc(threads as usize * per_thread * 4);
    let image = image(&text, &mut memory);
    launch(&image, "test", &Shape { workers: 1, ..Shape::new(1, threads) }, &[arg(out)], &memory)?;
    Ok(memory.get(out, threads as usize * per_thread))
}
