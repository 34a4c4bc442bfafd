//! A parsed module: its functions, variables and code, and the image of it at device addresses.

use std::collections::HashMap;
use std::sync::Arc;

use crate::error::ParseError;
use crate::ir::{Base, Callee, Instruction, Op, Row, Slot, Symbol};
use crate::parse;
use crate::space;

/// A state space in which a module has variables that live as long as it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// `.global`
    Global,
    /// `.const`
    Const,
}

/// A formal parameter of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Param {
    /// Its name in the text.
    pub name: String,
    /// Offset in the block of parameters, in bytes.
    pub offset: usize,
    /// Size in bytes.
    pub size: usize,
    /// Alignment in bytes.
    pub align: usize,
}

/// A place in a variable's initial value that takes the address of another variable or function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Relocation {
    /// Offset in the variable, in bytes.
    pub offset: usize,
    /// What it points to.
    pub symbol: String,
    /// What is added to the address.
    pub addend: i64,
    pub(crate) target: Symbol,
    pub(crate) bytes: usize,
    /// The bits of the address that are stored, shifted down to bit 0.
    pub(crate) mask: u64,
}

/// A variable in global or constant memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Global {
    /// Its name in the text.
    pub name: String,
    /// Where it lives.
    pub space: Space,
    /// Size in bytes.
    pub size_bytes: usize,
    /// Alignment in bytes.
    pub align: usize,
    /// Whether other modules and the host may find it by its name (`.visible`, `.weak`).
    pub visible: bool,
    /// The initial value before relocation; empty if it is all zero.
    pub init: Vec<u8>,
    /// What is filled in once addresses are known.
    pub relocations: Vec<Relocation>,
}

/// A function: a kernel, or (inside this crate only) one that kernels call.
pub struct Function {
    /// Its name in the text.
    pub name: String,
    /// The formal parameters; empty for a function that is no kernel.
    pub params: Vec<Param>,
    /// Size of the block of parameters, in bytes.
    pub param_bytes: usize,
    /// Size of the shared variables that it and its callees use, in bytes.
    pub static_shared_bytes: u32,
    /// Size of its own local variables, in bytes per thread.
    pub local_bytes: u32,
    /// An estimate of the registers that a compiler would use per thread.
    pub registers: u32,
    /// `.maxntid`: the product of its dimensions.
    pub max_threads: Option<u32>,
    /// `.reqntid`.
    pub required_threads: Option<[u32; 3]>,
    /// `.reqnctapercluster`.
    pub required_cluster: Option<[u32; 3]>,
    pub(crate) kernel: bool,
    /// First instruction in the module's code.
    pub(crate) start: u32,
    pub(crate) end: u32,
    /// Rows of registers in a frame, and predicates.
    pub(crate) rows: u32,
    pub(crate) predicates: u32,
    /// Local memory of a frame: local variables, parameters of calls.
    pub(crate) frame_bytes: u32,
    pub(crate) arguments: Vec<Slot>,
    pub(crate) results: Vec<Slot>,
    /// Offsets of the module's shared variables when this kernel runs; `u32::MAX` where it does not use one.
    pub(crate) shared_offsets: Vec<u32>,
}

/// A variable in shared memory. An `.extern` one has no size and starts where the static ones end.
pub(crate) struct SharedVariable {
    pub(crate) size_bytes: u32,
    pub(crate) align: u32,
    pub(crate) dynamic: bool,
}

/// A name that is declared and defined elsewhere.
pub(crate) struct Extern {
    pub(crate) name: String,
    pub(crate) line: u32,
    pub(crate) definition: Option<Symbol>,
}

/// A parsed module: checked, names resolved, immutable.
#[derive(Default)]
pub struct Module {
    pub(crate) version: (u32, u32),
    pub(crate) target: u32,
    pub(crate) globals: Vec<Global>,
    pub(crate) functions: Vec<Function>,
    pub(crate) shared: Vec<SharedVariable>,
    pub(crate) externs: Vec<Extern>,
    pub(crate) code: Vec<Instruction>,
    pub(crate) constants: Vec<Row>,
    /// What other modules see.
    pub(crate) exported: HashMap<String, Symbol>,
    texts: Vec<Arc<str>>,
}

impl Module {
    /// Parses one PTX text. Names that it declares `.extern` may stay unresolved until [`Module::link`].
    ///
    /// # Errors
    /// Anything that is not PTX, or that this crate does not implement, with its line.
    pub fn parse(text: &str) -> Result<Module, ParseError> {
        Module::from_texts(vec![Arc::from(text)])
    }

    /// Joins several modules: each `.extern` name is resolved against the `.visible` and `.weak` ones of the others.
    ///
    /// # Errors
    /// A name that is defined twice, or nowhere.
    pub fn link(modules: Vec<Module>) -> Result<Module, ParseError> {
        // Parsing again into one module is what gives all instructions the indexes of the whole.
        let linked = Module::from_texts(modules.into_iter().flat_map(|module| module.texts).collect())?;
        match linked.externs.iter().find(|name| name.definition.is_none()) {
            Some(missing) => {
                Err(ParseError::new(missing.line, format!("unresolved external `{}`", missing.name)))
            }
            None => Ok(linked),
        }
    }

    fn from_texts(texts: Vec<Arc<str>>) -> Result<Module, ParseError> {
        let mut module = Module::default();
        for text in &texts {
            parse::parse_into(&mut module, text)?;
        }
        module.texts = texts;
        for name in &mut module.externs {
            name.definition = name.definition.or_else(|| module.exported.get(&name.name).copied());
        }
        for index in 0..module.functions.len() {
            if module.functions[index].kernel {
                module.lay_out_shared(index);
            }
        }
        Ok(module)
    }

    /// The number in `.target`: 90 for `sm_90` and `sm_90a`.
    pub fn target_sm(&self) -> u32 {
        self.target
    }

    /// Major and minor number of `.version`.
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// The kernels (`.entry`), in the order of the text.
    pub fn functions(&self) -> impl Iterator<Item = &Function> {
        self.functions.iter().filter(|function| function.kernel)
    }

    /// The kernel of this name.
    pub fn function(&self, name: &str) -> Option<&Function> {
        self.functions().find(|function| function.name == name)
    }

    /// The variables in global and constant memory, in the order of the text.
    pub fn globals(&self) -> &[Global] {
        &self.globals
    }

    /// Names that are declared `.extern` and defined nowhere.
    pub fn unresolved(&self) -> impl Iterator<Item = &str> {
        self.externs.iter().filter(|name| name.definition.is_none()).map(|name| name.name.as_str())
    }

    /// What a symbol refers to once externals are resolved; none if it is not defined.
    pub(crate) fn resolve(&self, symbol: Symbol) -> Option<Symbol> {
        match symbol {
            Symbol::Extern(index) => self.externs[index as usize].definition,
            other => Some(other),
        }
    }

    /// Name of the function to which an instruction belongs.
    pub(crate) fn function_at(&self, pc: u32) -> &str {
        self.functions.iter().find(|f| (f.start..f.end).contains(&pc)).map_or("?", |f| &f.name)
    }

    /// Gives the shared variables that a kernel can reach their places.
    fn lay_out_shared(&mut self, kernel: usize) {
        let (reached, variables) = self.reachable(kernel);
        let mut offsets = vec![u32::MAX; self.shared.len()];
        let mut end = 0u32;
        let mut dynamic_align = 1;
        for (index, variable) in self.shared.iter().enumerate().filter(|(index, _)| variables[*index]) {
            if variable.dynamic {
                dynamic_align = dynamic_align.max(variable.align);
            } else {
                offsets[index] = end.next_multiple_of(variable.align);
                end = offsets[index].saturating_add(variable.size_bytes);
            }
        }
        let dynamic_start = end.next_multiple_of(dynamic_align);
        for (index, variable) in self.shared.iter().enumerate() {
            if variable.dynamic && variables[index] {
                offsets[index] = dynamic_start;
                end = dynamic_start;
            }
        }
        let rows = reached.iter().map(|index| self.functions[*index].rows).sum::<u32>();
        let function = &mut self.functions[kernel];
        function.static_shared_bytes = end;
        function.shared_offsets = offsets;
        // PTX has as many registers as it likes; a compiler gets by with fewer, in steps of 8 and at most 255.
        function.registers = (rows / 2).next_multiple_of(8).clamp(8, 248);
    }

    /// The functions that a kernel may call, itself among them, and which shared variables they use.
    fn reachable(&self, kernel: usize) -> (Vec<usize>, Vec<bool>) {
        let mut reached = vec![kernel];
        let mut variables = vec![false; self.shared.len()];
        let mut next = 0;
        while let Some(&function) = reached.get(next) {
            next += 1;
            let range = self.functions[function].start as usize..self.functions[function].end as usize;
            for symbol in self.code[range].iter().filter_map(|instruction| symbol_of(&instruction.op)) {
                match self.resolve(symbol) {
                    Some(Symbol::Shared(index)) => variables[index as usize] = true,
                    Some(Symbol::Function(index)) if !reached.contains(&(index as usize)) => {
                        reached.push(index as usize);
                    }
                    _ => {}
                }
            }
        }
        (reached, variables)
    }
}

/// The name that an instruction refers to.
fn symbol_of(op: &Op) -> Option<Symbol> {
    let address = match op {
        Op::TakeAddress { address, .. } | Op::Mbarrier { address, .. } => address,
        Op::Load(load) => &load.address,
        Op::Store(store) => &store.address,
        Op::Atomic(atomic) => &atomic.address,
        Op::Multimem(access) => &access.address,
        Op::AsyncCopy { to, .. } => to,
        Op::Call(call) => match call.callee {
            Callee::Symbol(symbol) => return Some(symbol),
            Callee::Indirect(_) => return None,
        },
        _ => return None,
    };
    match address.base {
        Base::Symbol(symbol) => Some(symbol),
        _ => None,
    }
}

/// A module whose variables have device addresses.
pub struct Image {
    module: Arc<Module>,
    addresses: Vec<u64>,
}

impl Image {
    /// `addresses[i]` is the device address of `module.globals()[i]`; the caller has allocated it and writes
    /// [`Image::initial_bytes`] there before the first launch.
    ///
    /// # Panics
    /// If there are not as many addresses as variables.
    pub fn new(module: Arc<Module>, addresses: Vec<u64>) -> Image {
        assert_eq!(addresses.len(), module.globals.len(), "one address per variable");
        Image { module, addresses }
    }

    /// The module.
    pub fn module(&self) -> &Arc<Module> {
        &self.module
    }

    /// The whole initial value of a variable, addresses filled in.
    pub fn initial_bytes(&self, global: usize) -> Vec<u8> {
        let variable = &self.module.globals[global];
        let mut bytes = variable.init.clone();
        bytes.resize(variable.size_bytes, 0);
        for relocation in &variable.relocations {
            let address = self.symbol_address(relocation.target).unwrap_or(0);
            let value = address.wrapping_add_signed(relocation.addend) & relocation.mask;
            let value = value >> relocation.mask.trailing_zeros().min(63);
            let place = &mut bytes[relocation.offset..relocation.offset + relocation.bytes];
            place.copy_from_slice(&value.to_le_bytes()[..relocation.bytes]);
        }
        bytes
    }

    /// Generic address of a variable or function; none for shared variables and for what is not defined.
    pub(crate) fn symbol_address(&self, symbol: Symbol) -> Option<u64> {
        match self.module.resolve(symbol)? {
            Symbol::Global(index) => Some(self.addresses[index as usize]),
            Symbol::Function(index) => Some(space::function_address(index)),
            _ => None,
        }
    }

    /// Whether an address lies in a variable in constant memory.
    pub(crate) fn is_const(&self, address: u64) -> bool {
        self.module.globals.iter().zip(&self.addresses).any(|(variable, start)| {
            variable.space == Space::Const && address.wrapping_sub(*start) < variable.size_bytes as u64
        })
    }
}
