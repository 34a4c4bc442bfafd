//! Calls of functions, and of the device runtime's functions that are built in.

use super::access::Access;
use super::block::Env;
use super::print;
use super::step::Flow;
use super::warp::{Frame, Position, Warp};
use crate::compute::lanes;
use crate::error::Fault;
use crate::ir::{Builtin, Call, Callee, Op, Order, Slot, Source, Symbol};
use crate::space::function_index;
use crate::types::AddressSpace;

/// Local memory of a thread (CUDA programming guide, "Technical Specifications").
const STACK_BYTES: u32 = 512 << 10;

/// What a nested call costs besides its variables: on a device, registers go to the stack.
const CALL_BYTES: u32 = 16;

/// Bytes of a parameter or result.
type Bytes = Vec<u8>;

impl Warp {
    pub(super) fn call(
        &mut self,
        env: &mut Env<'_>,
        call: &Call,
        mask: u32,
        line: u32,
    ) -> Result<Flow, Fault> {
        let symbol = match call.callee {
            Callee::Symbol(symbol) => env.kernel.module.resolve(symbol),
            Callee::Indirect(source) => return self.call_indirect(env, call, source, mask, line),
        };
        match symbol {
            Some(Symbol::Function(index)) => {
                self.settle(self.active & !mask, self.at.pc + 1);
                self.enter(env, call, index, mask, line)?;
                Ok(Flow::Parted)
            }
            Some(Symbol::Builtin(builtin)) => {
                for lane in lanes(mask) {
                    self.call_builtin(env, call, builtin, lane, line)?;
                }
                Ok(Flow::Next)
            }
            _ => {
                let lane = mask.trailing_zeros() as usize;
                Err(self.illegal(env, lane, line, "a call of a function that is not defined"))
            }
        }
    }

    fn call_indirect(
        &mut self,
        env: &mut Env<'_>,
        call: &Call,
        source: Source,
        mask: u32,
        line: u32,
    ) -> Result<Flow, Fault> {
        let targets = *self.row(env.kernel, source);
        self.settle(self.active & !mask, self.at.pc + 1);
        let mut rest = mask;
        while rest != 0 {
            let lane = rest.trailing_zeros() as usize;
            let target = targets[lane];
            let group = lanes(rest).filter(|l| targets[*l] == target).fold(0, |m, l| m | 1 << l);
            rest &= !group;
            let functions = &env.kernel.module.functions;
            let index =
                function_index(target).filter(|i| functions.get(*i as usize).is_some_and(|f| !f.kernel));
            let Some(index) = index else {
                return Err(Fault::InvalidProgramCounter { target, line, site: self.site(env, lane) });
            };
            self.enter(env, call, index, group, line)?;
        }
        Ok(Flow::Parted)
    }

    /// Pushes a frame for each lane and moves the lanes to the function's start.
    fn enter(&mut self, env: &Env<'_>, call: &Call, index: u32, mask: u32, line: u32) -> Result<(), Fault> {
        let module = env.kernel.module;
        let function = &module.functions[index as usize];
        let caller = self.at;
        let first = mask.trailing_zeros() as usize;
        if call.arguments.len() != function.arguments.len() || call.results.len() != function.results.len() {
            return Err(self.illegal(env, first, line, format!("`{}` has other parameters", function.name)));
        }
        let (rows, predicates) = self.frame_size(env, caller.pc);
        let callee = Position {
            pc: function.start,
            rows: caller.rows + rows,
            predicates: caller.predicates + predicates,
        };
        self.grow(callee, function.rows, function.predicates);
        for lane in lanes(mask) {
            let arguments: Vec<Bytes> =
                call.arguments.iter().map(|slot| self.take(env, *slot, lane)).collect();
            let top = self.local[lane].len().next_multiple_of(16);
            // What a frame keeps in registers here is on the stack of a device, four bytes for each.
            let depth = self.frames[lane].len() as u32 + 1;
            let registers = depth * (CALL_BYTES + 4 * function.rows);
            if top as u32 + function.frame_bytes + registers > STACK_BYTES {
                return Err(Fault::HardwareStackError { line, site: self.site(env, lane) });
            }
            self.local[lane].resize(top + function.frame_bytes as usize, 0);
            self.frames[lane].push(Frame { position: caller, local_base: self.local_base[lane] });
            self.local_base[lane] = top as u32;
            self.positions[lane] = callee;
            self.at = callee;
            for (slot, bytes) in function.arguments.iter().zip(arguments) {
                self.put(*slot, &bytes, lane);
            }
            self.at = caller;
        }
        Ok(())
    }

    /// Registers and predicates of the function that `pc` belongs to.
    fn frame_size(&self, env: &Env<'_>, pc: u32) -> (u32, u32) {
        let functions = &env.kernel.module.functions;
        let function = functions.iter().find(|f| (f.start..f.end).contains(&pc));
        function.map_or((0, 0), |f| (f.rows, f.predicates))
    }

    pub(super) fn return_lanes(&mut self, env: &mut Env<'_>, mask: u32, line: u32) -> Result<Flow, Fault> {
        if self.frames[mask.trailing_zeros() as usize].is_empty() {
            return Ok(self.exit(env, mask));
        }
        self.settle(self.active & !mask, self.at.pc + 1);
        let module = env.kernel.module;
        let callee = self.at;
        let function = module.functions.iter().find(|f| (f.start..f.end).contains(&callee.pc));
        let results = function.map_or(&[][..], |f| &f.results);
        for lane in lanes(mask) {
            let values: Vec<Bytes> = results.iter().map(|slot| self.take(env, *slot, lane)).collect();
            let Some(frame) = self.frames[lane].pop() else {
                return Err(self.illegal(env, lane, line, "a return without a call"));
            };
            let caller_end = self.local_base[lane] as usize;
            self.local[lane].truncate(caller_end);
            self.local_base[lane] = frame.local_base;
            if let Op::Call(call) = &module.code[frame.position.pc as usize].op {
                self.at = frame.position;
                for (slot, bytes) in call.results.iter().zip(values) {
                    self.put(*slot, &bytes, lane);
                }
                self.at = callee;
            }
            self.positions[lane] = Position { pc: frame.position.pc + 1, ..frame.position };
        }
        Ok(Flow::Parted)
    }

    /// The bytes of an argument or result in the current frame.
    fn take(&self, env: &Env<'_>, slot: Slot, lane: usize) -> Bytes {
        match slot {
            Slot::Frame { offset, bytes } => {
                let start = (self.local_base[lane] + offset) as usize;
                self.local[lane][start..start + bytes as usize].to_vec()
            }
            Slot::Register { index, bytes } => {
                let mut value = self.row(env.kernel, Source::Register(index))[lane].to_le_bytes().to_vec();
                value.resize(bytes as usize, 0);
                value
            }
            Slot::Value { source, .. } => self.row(env.kernel, source)[lane].to_le_bytes().to_vec(),
        }
    }

    /// Puts the bytes of an argument or result into the current frame, as many as fit.
    fn put(&mut self, slot: Slot, value: &[u8], lane: usize) {
        let length = value.len().min(slot.bytes() as usize);
        match slot {
            Slot::Frame { offset, .. } => {
                let start = (self.local_base[lane] + offset) as usize;
                self.local[lane][start..start + length].copy_from_slice(&value[..length]);
            }
            Slot::Register { index, .. } => {
                let mut bytes = [0; 8];
                bytes[..length.min(8)].copy_from_slice(&value[..length.min(8)]);
                self.register_mut(index)[lane] = u64::from_le_bytes(bytes);
            }
            Slot::Value { .. } => {}
        }
    }
}

// The device runtime.
impl Warp {
    fn call_builtin(
        &mut self,
        env: &mut Env<'_>,
        call: &Call,
        builtin: Builtin,
        lane: usize,
        line: u32,
    ) -> Result<(), Fault> {
        let arguments: Vec<u64> =
            call.arguments.iter().map(|slot| number(&self.take(env, *slot, lane))).collect();
        match (builtin, &arguments[..]) {
            (Builtin::Vprintf, [format, values]) => {
                let format = self.read_string(env, *format, lane, line)?;
                let mut offset = 0u64;
                let text = print::format(&format, |piece| match piece {
                    print::Piece::Value { bytes } => {
                        offset = offset.next_multiple_of(u64::from(bytes));
                        let address = values.wrapping_add(offset);
                        offset += u64::from(bytes);
                        self.read_number(env, address, bytes, lane, line)
                    }
                    print::Piece::Byte { address } => self.read_number(env, address, 1, lane, line),
                })?;
                env.kernel.memory.print(&text);
                if let Some(slot) = call.results.first() {
                    self.put(*slot, &print::count_values(&format).to_le_bytes(), lane);
                }
                Ok(())
            }
            (Builtin::AssertFail, [message, file, number, function, ..]) => {
                let message = self.read_string(env, *message, lane, line)?;
                let file = self.read_string(env, *file, lane, line)?;
                let function = self.read_string(env, *function, lane, line)?;
                let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
                let ([bx, by, bz], [tx, ty, tz]) = (env.block.index, self.thread_index(env.kernel, lane));
                let message = format!(
                    "{}:{}: {}: block: [{bx},{by},{bz}], thread: [{tx},{ty},{tz}] Assertion `{}` failed.",
                    text(&file),
                    *number as u32,
                    text(&function),
                    text(&message),
                );
                Err(Fault::Assert { message })
            }
            _ => Err(self.illegal(env, lane, line, "a built-in function with other parameters")),
        }
    }

    fn read_number(
        &mut self,
        env: &mut Env<'_>,
        address: u64,
        bytes: u32,
        lane: usize,
        line: u32,
    ) -> Result<u64, Fault> {
        let space = AddressSpace::Generic;
        let access = Access { space, address, total_bytes: bytes, write: false, lane };
        match self.find(env, access, bytes) {
            Ok(found) => Ok(found.load(0, bytes, Order::Relaxed)),
            Err(trouble) => Err(self.fault(env, trouble, line)),
        }
    }

    /// The bytes up to a NUL.
    fn read_string(
        &mut self,
        env: &mut Env<'_>,
        address: u64,
        lane: usize,
        line: u32,
    ) -> Result<Bytes, Fault> {
        let mut text = Vec::new();
        loop {
            let address = address.wrapping_add(text.len() as u64);
            match self.read_number(env, address, 1, lane, line)? as u8 {
                0 => return Ok(text),
                byte => text.push(byte),
            }
        }
    }
}

fn number(bytes: &[u8]) -> u64 {
    let mut value = [0; 8];
    let length = bytes.len().min(8);
    value[..length].copy_from_slice(&bytes[..length]);
    u64::from_le_bytes(value)
}
