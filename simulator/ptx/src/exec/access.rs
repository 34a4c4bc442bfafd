//! Memory accesses: where an address leads, loads, stores, atomics, copies.

use super::block::Env;
use super::warp::Warp;
use crate::arith::{self, FloatMode};
use crate::compute::lanes;
use crate::error::Fault;
use crate::ir::{Address, Atomic, AtomicOp, Base, Cell, LANES, Load, Order, Row, Store, Symbol};
use crate::memory::Cells;
use crate::space::{PARAM_FRAME, SHARED_STRIDE, classify};
use crate::types::AddressSpace;

/// An access: where it goes and how large it is.
#[derive(Clone, Copy)]
pub(super) struct Access {
    pub(super) space: AddressSpace,
    pub(super) address: u64,
    /// Size of all elements.
    pub(super) total_bytes: u32,
    pub(super) write: bool,
    pub(super) lane: usize,
}

/// Why an access failed.
#[derive(Clone, Copy)]
pub(super) struct Trouble {
    pub(super) access: Access,
    pub(super) misaligned: bool,
}

/// Memory that an access was found to lead to.
pub(super) enum Found<'m> {
    /// Memory that other threads of the host access, too.
    Device(Cells),
    /// Memory of this block or lane.
    Own(&'m mut [u8]),
    /// Parameters of the kernel.
    ReadOnly(&'m [u8]),
}

/// The little-endian number at `offset`; one case per width, so that none of them is a call of `memcpy`.
#[inline]
fn get(memory: &[u8], offset: u32, bytes: u32) -> u64 {
    let memory = &memory[offset as usize..];
    match bytes {
        1 => u64::from(memory[0]),
        2 => u64::from(u16::from_le_bytes(*array(memory))),
        4 => u64::from(u32::from_le_bytes(*array(memory))),
        _ => u64::from_le_bytes(*array(memory)),
    }
}

#[inline]
fn put(memory: &mut [u8], offset: u32, bytes: u32, value: u64) {
    let memory = &mut memory[offset as usize..];
    match bytes {
        1 => memory[0] = value as u8,
        2 => memory[..2].copy_from_slice(&(value as u16).to_le_bytes()),
        4 => memory[..4].copy_from_slice(&(value as u32).to_le_bytes()),
        _ => memory[..8].copy_from_slice(&value.to_le_bytes()),
    }
}

#[inline]
fn array<const N: usize>(memory: &[u8]) -> &[u8; N] {
    memory.first_chunk().expect("the access was checked to lie in this memory")
}

impl Found<'_> {
    #[inline]
    pub(super) fn load(&self, offset: u32, bytes: u32, order: Order) -> u64 {
        match self {
            Found::Device(cells) => cells.load(offset, bytes, order),
            Found::Own(memory) => get(memory, offset, bytes),
            Found::ReadOnly(memory) => get(memory, offset, bytes),
        }
    }

    #[inline]
    pub(super) fn store(&mut self, offset: u32, bytes: u32, value: u64, order: Order) {
        match self {
            Found::Device(cells) => cells.store(offset, bytes, value, order),
            Found::Own(memory) => put(memory, offset, bytes, value),
            Found::ReadOnly(_) => unreachable!("a write to parameters is not found"),
        }
    }

    /// Replaces a value by a function of it. Answers the old one.
    pub(super) fn update(&mut self, offset: u32, bytes: u32, order: Order, f: impl Fn(u64) -> u64) -> u64 {
        if let Found::Device(cells) = self {
            return cells.update(offset, bytes, order, f);
        }
        let old = self.load(offset, bytes, order);
        self.store(offset, bytes, f(old), order);
        old
    }
}

impl Warp {
    /// Where an access leads. What it answers has `total_bytes` bytes.
    #[inline]
    pub(super) fn find<'m>(
        &'m mut self,
        env: &'m mut Env<'_>,
        access: Access,
        align: u32,
    ) -> Result<Found<'m>, Trouble> {
        let (mut space, mut address) = (access.space, access.address);
        if space == AddressSpace::Generic {
            (space, address) = classify(address);
        }
        if address & u64::from(align - 1) != 0 {
            return Err(Trouble { access, misaligned: true });
        }
        let total = access.total_bytes;
        let found = match space {
            AddressSpace::Generic | AddressSpace::Global | AddressSpace::Const => {
                env.windows.cells(env.kernel.memory, address, total, access.write).map(Found::Device)
            }
            AddressSpace::Shared | AddressSpace::SharedCluster => {
                let rank = match address / SHARED_STRIDE {
                    0 => u64::from(env.block.rank),
                    other => other - 1,
                };
                let shared = usize::try_from(rank).ok().and_then(|rank| env.shared.get_mut(rank));
                shared.and_then(|shared| slice(shared, address % SHARED_STRIDE, total)).map(Found::Own)
            }
            AddressSpace::Local => slice(&mut self.local[access.lane], address, total).map(Found::Own),
            AddressSpace::Param => match address.checked_sub(PARAM_FRAME) {
                Some(local) => slice(&mut self.local[access.lane], local, total).map(Found::Own),
                None if access.write => None,
                None => {
                    let params = &env.kernel.params[..env.kernel.function.param_bytes];
                    let start = usize::try_from(address).ok();
                    start.and_then(|start| params.get(start..)?.get(..total as usize)).map(Found::ReadOnly)
                }
            },
        };
        found.ok_or(Trouble { access, misaligned: false })
    }

    pub(super) fn fault(&self, env: &Env<'_>, trouble: Trouble, line: u32) -> Fault {
        let Access { address, total_bytes: size_bytes, write, lane, .. } = trouble.access;
        let site = self.site(env, lane);
        if trouble.misaligned {
            Fault::MisalignedAddress { address, size_bytes, line, site }
        } else {
            Fault::IllegalAddress { address, size_bytes, write, line, site }
        }
    }

    /// The addresses of all lanes, and the space that they are in.
    pub(super) fn addresses(
        &self,
        env: &Env<'_>,
        address: Address,
        space: AddressSpace,
    ) -> Result<(AddressSpace, Row), &'static str> {
        let offset = address.offset as u64;
        match address.base {
            Base::Value(source) => {
                let row = self.row(env.kernel, source);
                Ok((space, std::array::from_fn(|lane| row[lane].wrapping_add(offset))))
            }
            Base::EntryParams => Ok((AddressSpace::Param, [offset; LANES])),
            Base::Frame => {
                let base = &self.local_base;
                let address = |lane: usize| u64::from(base[lane]).wrapping_add(offset);
                Ok((AddressSpace::Local, std::array::from_fn(address)))
            }
            Base::Symbol(symbol) => match env.kernel.module.resolve(symbol) {
                Some(Symbol::Shared(index)) => {
                    let start = env.kernel.function.shared_offsets[index as usize];
                    let own = if space == AddressSpace::SharedCluster { space } else { AddressSpace::Shared };
                    Ok((own, [u64::from(start).wrapping_add(offset); LANES]))
                }
                Some(symbol) => match env.kernel.image.symbol_address(symbol) {
                    Some(start) => Ok((AddressSpace::Global, [start.wrapping_add(offset); LANES])),
                    None => Err("a built-in function has no address"),
                },
                None => Err("an external name that is not defined"),
            },
        }
    }

    pub(super) fn load(&mut self, env: &mut Env<'_>, load: &Load, mask: u32, line: u32) -> Result<(), Fault> {
        let (space, addresses) = self.addresses_or_fault(env, load.address, load.space, mask, line)?;
        let Cell { bytes, signed } = load.cell;
        let total_bytes = bytes * load.to.len() as u32;
        let unused = if signed { 64 - 8 * bytes } else { 0 };
        for lane in lanes(mask) {
            let address = addresses[lane];
            let access = Access { space, address, total_bytes, write: false, lane };
            if let [Some(to)] = load.to[..] {
                match self.find(env, access, load.align) {
                    Ok(found) => {
                        let value = found.load(0, bytes, load.order);
                        let extended = ((value << unused) as i64 >> unused) as u64;
                        self.register_mut(to)[lane] = if signed { extended } else { value };
                    }
                    Err(trouble) => return Err(self.fault(env, trouble, line)),
                }
                continue;
            }
            // A vector has few elements; they are all read before the first register is written.
            let mut values = [0; 8];
            match self.find(env, access, load.align) {
                Ok(found) => {
                    for (element, value) in values.iter_mut().enumerate().take(load.to.len()) {
                        *value = found.load(element as u32 * bytes, bytes, load.order);
                    }
                }
                Err(trouble) => return Err(self.fault(env, trouble, line)),
            }
            for (to, value) in load.to.iter().zip(values) {
                if let Some(to) = to {
                    let extended = ((value << unused) as i64 >> unused) as u64;
                    self.register_mut(*to)[lane] = if signed { extended } else { value };
                }
            }
        }
        Ok(())
    }

    pub(super) fn store(
        &mut self,
        env: &mut Env<'_>,
        store: &Store,
        mask: u32,
        line: u32,
    ) -> Result<(), Fault> {
        let (space, addresses) = self.addresses_or_fault(env, store.address, store.space, mask, line)?;
        let bytes = store.cell.bytes;
        let total_bytes = bytes * store.from.len() as u32;
        for lane in lanes(mask) {
            let mut values = [0; 8];
            for (value, source) in values.iter_mut().zip(&store.from) {
                *value = self.row(env.kernel, *source)[lane];
            }
            let access = Access { space, address: addresses[lane], total_bytes, write: true, lane };
            match self.find(env, access, store.align) {
                Ok(mut found) => {
                    for (element, value) in values.iter().enumerate().take(store.from.len()) {
                        found.store(element as u32 * bytes, bytes, *value, store.order);
                    }
                }
                Err(trouble) => return Err(self.fault(env, trouble, line)),
            }
        }
        Ok(())
    }

    pub(super) fn addresses_or_fault(
        &self,
        env: &Env<'_>,
        address: Address,
        space: AddressSpace,
        mask: u32,
        line: u32,
    ) -> Result<(AddressSpace, Row), Fault> {
        let lane = mask.trailing_zeros().min(31) as usize;
        self.addresses(env, address, space).map_err(|reason| self.illegal(env, lane, line, reason))
    }

    pub(super) fn atomic(
        &mut self,
        env: &mut Env<'_>,
        atomic: &Atomic,
        mask: u32,
        line: u32,
    ) -> Result<(), Fault> {
        let (space, addresses) = self.addresses_or_fault(env, atomic.address, atomic.space, mask, line)?;
        let bytes = atomic.bytes;
        let total_bytes = bytes * atomic.b.len() as u32;
        for lane in lanes(mask) {
            let access = Access { space, address: addresses[lane], total_bytes, write: true, lane };
            for element in 0..atomic.b.len() {
                let b = self.row(env.kernel, atomic.b[element])[lane];
                let c = atomic.c.map_or(0, |c| self.row(env.kernel, c)[lane]);
                let old = match self.find(env, access, atomic.align) {
                    Ok(mut found) => atomic.apply(&mut found, element as u32 * bytes, b, c),
                    Err(trouble) => return Err(self.fault(env, trouble, line)),
                };
                if let Some(Some(to)) = atomic.to.get(element) {
                    self.register_mut(*to)[lane] = old;
                }
            }
        }
        Ok(())
    }

    /// `cp.async`, done at once.
    pub(super) fn copy(
        &mut self,
        env: &mut Env<'_>,
        addresses: [(AddressSpace, Row); 2],
        present: &Row,
        bytes: u32,
        mask: u32,
    ) -> Result<(), Trouble> {
        let [(to_space, to), (from_space, from)] = addresses;
        for lane in lanes(mask) {
            let mut data = [0; 16];
            // Bytes that are not present are zero, and the source is not read for them.
            let present_bytes = u32::try_from(present[lane]).unwrap_or(bytes).min(bytes);
            if present_bytes > 0 {
                let access = Access {
                    space: from_space,
                    address: from[lane],
                    total_bytes: present_bytes,
                    write: false,
                    lane,
                };
                let found = self.find(env, access, bytes)?;
                for (byte, place) in data.iter_mut().enumerate().take(present_bytes as usize) {
                    *place = found.load(byte as u32, 1, Order::Relaxed) as u8;
                }
            }
            let access = Access { space: to_space, address: to[lane], total_bytes: bytes, write: true, lane };
            let mut found = self.find(env, access, bytes)?;
            for (byte, value) in data.iter().enumerate().take(bytes as usize) {
                found.store(byte as u32, 1, u64::from(*value), Order::Relaxed);
            }
        }
        Ok(())
    }
}

impl Atomic {
    /// Does it on one element. Answers the old value.
    fn apply(&self, found: &mut Found<'_>, offset: u32, b: u64, c: u64) -> u64 {
        self.op.apply(found, (offset, self.bytes), self.order, b, c)
    }
}

impl AtomicOp {
    /// Does it on the cell of so many bytes at an offset. Answers the old value.
    pub(super) fn apply(
        &self,
        found: &mut Found<'_>,
        (offset, bytes): (u32, u32),
        order: Order,
        b: u64,
        c: u64,
    ) -> u64 {
        let device = match found {
            Found::Device(cells) => Some(*cells),
            _ => None,
        };
        match (self, device) {
            (AtomicOp::Update(combine), _) => found.update(offset, bytes, order, |old| combine(old, b)),
            (AtomicOp::AddSingle, device) => {
                let mode = FloatMode { ftz: device.is_some(), ..FloatMode::default() };
                let sum = |old: u64| u64::from(arith::f32::add(old as u32, b as u32, mode));
                found.update(offset, bytes, order, sum)
            }
            (AtomicOp::Add, Some(cells)) => cells.add(offset, bytes, b, order),
            (AtomicOp::Add, None) => found.update(offset, bytes, order, |old| old.wrapping_add(b)),
            (AtomicOp::Exchange, Some(cells)) => cells.exchange(offset, bytes, b, order),
            (AtomicOp::Exchange, None) => found.update(offset, bytes, order, |_| b),
            (AtomicOp::CompareAndSwap, Some(cells)) => cells.compare_and_swap(offset, bytes, b, c, order),
            (AtomicOp::CompareAndSwap, None) => {
                let unused = 64 - 8 * bytes;
                found.update(offset, bytes, order, |old| if old << unused == b << unused { c } else { old })
            }
        }
    }
}

/// The bytes from `start` on, if they are all there.
fn slice(memory: &mut [u8], start: u64, bytes: u32) -> Option<&mut [u8]> {
    memory.get_mut(usize::try_from(start).ok()?..)?.get_mut(..bytes as usize)
}
