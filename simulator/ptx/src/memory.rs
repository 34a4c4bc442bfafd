//! Device memory as a kernel sees it, and the cache through which a worker thread reaches it.

use std::any::Any;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use crate::ir::Order;

/// Device memory as a kernel sees it: windows of addresses that are backed by host memory.
///
/// A window may be asked for by several threads at once.
///
/// # Safety
/// Every window that is returned keeps what [`Window`] promises: a launch reads and writes through it.
pub unsafe trait Memory: Sync {
    /// The window that contains `address`, if there is one.
    fn window(&self, address: u64) -> Option<Window>;

    /// The windows behind a multimem address, in the order of the devices: the same range of addresses, and for each
    /// device the memory that is bound there. Empty if it is no multimem address, or if a device has none there.
    fn team(&self, address: u64) -> Vec<Window> {
        let _ = address;
        Vec::new()
    }

    /// Whether the launch is to end as soon as possible. Asked after each time slice of a warp.
    fn cancelled(&self) -> bool {
        false
    }

    /// Takes what a kernel printed: one call per `printf`.
    fn print(&self, text: &[u8]) {
        // A closed standard output is no fault of the kernel's.
        let _ = std::io::stdout().lock().write_all(text);
    }
}

/// A range of device addresses and the host memory behind it.
///
/// `host` must be valid for reads (and writes, where `writable`) of `len` bytes for as long as `keep` lives, must
/// agree with `start` modulo 16, and must be accessed by others only through atomics while a launch runs.
#[derive(Clone)]
pub struct Window {
    /// First device address.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
    /// Host memory behind `start`.
    pub host: *mut u8,
    /// Whether kernels may write.
    pub writable: bool,
    /// Keeps the backing alive as long as the window is cached.
    pub keep: Arc<dyn Any + Send + Sync>,
}

/// Windows that a worker thread keeps, because neighbouring accesses go to few of them.
const CACHED: usize = 8;

/// The windows that a worker thread has used last.
#[derive(Default)]
pub(crate) struct WindowCache {
    windows: [Option<Window>; CACHED],
    latest: usize,
    next: usize,
    /// Those behind the multimem address that was used last.
    team: Vec<Window>,
}

impl WindowCache {
    /// The cells at `address`, if `bytes` from there on lie in one window that allows the access.
    ///
    /// `address` is a multiple of 1, 2, 4 or 8, whichever is the size of the cells that are accessed.
    #[inline]
    pub(crate) fn cells(
        &mut self,
        memory: &dyn Memory,
        address: u64,
        bytes: u32,
        write: bool,
    ) -> Option<Cells> {
        match &self.windows[self.latest] {
            Some(window) if window.contains(address, bytes) => window.cells(address, write),
            _ => self.search(memory, address, bytes)?.cells(address, write),
        }
    }

    /// The cells at a multimem address, one for each device, if `bytes` from there on are bound on all devices.
    pub(crate) fn team(
        &mut self,
        memory: &dyn Memory,
        address: u64,
        bytes: u32,
        write: bool,
    ) -> Option<Vec<Cells>> {
        if !self.team.first().is_some_and(|window| window.contains(address, bytes)) {
            self.team = memory.team(address);
        }
        let cells = |window: &Window| {
            // Else cells would not be aligned on the host.
            assert_eq!(window.start % 16, window.host as u64 % 16, "host and device address agree modulo 16");
            window.contains(address, bytes).then(|| window.cells(address, write)).flatten()
        };
        if self.team.is_empty() { None } else { self.team.iter().map(cells).collect() }
    }

    #[cold]
    fn search(&mut self, memory: &dyn Memory, address: u64, bytes: u32) -> Option<&Window> {
        let known = self.windows.iter().position(|w| w.as_ref().is_some_and(|w| w.contains(address, bytes)));
        self.latest = match known {
            Some(known) => known,
            None => {
                let window = memory.window(address).filter(|window| window.contains(address, bytes))?;
                // Else cells would not be aligned on the host.
                assert_eq!(
                    window.start % 16,
                    window.host as u64 % 16,
                    "host and device address agree modulo 16"
                );
                self.next = (self.next + 1) % CACHED;
                self.windows[self.next] = Some(window);
                self.next
            }
        };
        self.windows[self.latest].as_ref()
    }
}

impl Window {
    #[inline]
    fn contains(&self, address: u64, bytes: u32) -> bool {
        let offset = address.wrapping_sub(self.start);
        offset < self.len && self.len - offset >= u64::from(bytes)
    }

    #[inline]
    fn cells(&self, address: u64, write: bool) -> Option<Cells> {
        (self.writable || !write).then(|| Cells(self.host.wrapping_add((address - self.start) as usize)))
    }
}

/// Memory of a window that was checked to be there. Others access it at the same time, so that each access is an
/// atomic one of the right width.
#[derive(Clone, Copy)]
pub(crate) struct Cells(*mut u8);

/// The unsigned integer of a cell's width as an atomic.
macro_rules! cell {
    ($cells:expr, $offset:expr, $atomic:ty) => {{
        let cell: *mut u8 = $cells.0.wrapping_add($offset as usize);
        // SAFETY: `WindowCache::cells` checked that the access lies in a window, whose backing is valid for as long
        // as the cache holds it; the address is aligned to the cell, and host and device address agree modulo 16;
        // every other access to the memory is atomic (`Window`).
        unsafe { <$atomic>::from_ptr(cell.cast()) }
    }};
}

/// Does the same on a cell of each width.
macro_rules! by_width {
    ($cells:expr, $offset:expr, $bytes:expr, |$cell:ident, $ty:ident| $body:expr) => {
        match $bytes {
            1 => {
                type $ty = u8;
                let $cell = cell!($cells, $offset, AtomicU8);
                $body
            }
            2 => {
                type $ty = u16;
                let $cell = cell!($cells, $offset, AtomicU16);
                $body
            }
            4 => {
                type $ty = u32;
                let $cell = cell!($cells, $offset, AtomicU32);
                $body
            }
            _ => {
                type $ty = u64;
                let $cell = cell!($cells, $offset, AtomicU64);
                $body
            }
        }
    };
}

#[allow(clippy::useless_conversion, reason = "the same code for each width, 64 bits among them")]
impl Cells {
    /// The cell of `bytes` bytes at `offset`, which lies in what was checked.
    #[inline]
    pub(crate) fn load(self, offset: u32, bytes: u32, order: Order) -> u64 {
        let order = match order {
            Order::Relaxed | Order::Release => Ordering::Relaxed,
            Order::Acquire | Order::AcquireRelease => Ordering::Acquire,
        };
        by_width!(self, offset, bytes, |cell, Unsigned| {
            let value: Unsigned = cell.load(order);
            u64::from(value)
        })
    }

    #[inline]
    pub(crate) fn store(self, offset: u32, bytes: u32, value: u64, order: Order) {
        let order = match order {
            Order::Relaxed | Order::Acquire => Ordering::Relaxed,
            Order::Release | Order::AcquireRelease => Ordering::Release,
        };
        by_width!(self, offset, bytes, |cell, Unsigned| cell.store(value as Unsigned, order));
    }

    pub(crate) fn add(self, offset: u32, bytes: u32, value: u64, order: Order) -> u64 {
        let order = read_modify_write(order);
        by_width!(self, offset, bytes, |cell, Unsigned| u64::from(cell.fetch_add(value as Unsigned, order)))
    }

    pub(crate) fn exchange(self, offset: u32, bytes: u32, value: u64, order: Order) -> u64 {
        let order = read_modify_write(order);
        by_width!(self, offset, bytes, |cell, Unsigned| u64::from(cell.swap(value as Unsigned, order)))
    }

    /// Stores `new` where the cell has `expected`. Answers the old value.
    pub(crate) fn compare_and_swap(
        self,
        offset: u32,
        bytes: u32,
        expected: u64,
        new: u64,
        order: Order,
    ) -> u64 {
        let (success, failure) = compare_orders(order);
        by_width!(self, offset, bytes, |cell, Unsigned| {
            match cell.compare_exchange(expected as Unsigned, new as Unsigned, success, failure) {
                Ok(old) | Err(old) => u64::from(old),
            }
        })
    }

    /// Replaces the cell's value by a function of it. Answers the old value.
    pub(crate) fn update(self, offset: u32, bytes: u32, order: Order, f: impl Fn(u64) -> u64) -> u64 {
        let (success, failure) = compare_orders(order);
        by_width!(self, offset, bytes, |cell, Unsigned| {
            let change = |old: Unsigned| Some(f(u64::from(old)) as Unsigned);
            match cell.fetch_update(success, failure, change) {
                Ok(old) | Err(old) => u64::from(old),
            }
        })
    }
}

fn read_modify_write(order: Order) -> Ordering {
    match order {
        Order::Relaxed => Ordering::Relaxed,
        Order::Acquire => Ordering::Acquire,
        Order::Release => Ordering::Release,
        Order::AcquireRelease => Ordering::AcqRel,
    }
}

fn compare_orders(order: Order) -> (Ordering, Ordering) {
    let failure = match order {
        Order::Relaxed | Order::Release => Ordering::Relaxed,
        Order::Acquire | Order::AcquireRelease => Ordering::Acquire,
    };
    (read_modify_write(order), failure)
}
