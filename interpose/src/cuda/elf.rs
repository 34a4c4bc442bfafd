//! Symbols of a loaded library, read from its own tables in memory. The two functions that usually look symbols up
//! are replaced by this library.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr::null;

const DT_NULL: i64 = 0;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_GNU_HASH: i64 = 0x6fff_fef5;
const DT_VERSYM: i64 = 0x6fff_fff0;
/// Marks, in the table of versions, a symbol that is not its name's default version.
const VERSYM_HIDDEN: u16 = 0x8000;

/// How a file for 64-bit machines begins (elf(5): magic number and class).
const ELF64: [u8; 5] = [0x7f, b'E', b'L', b'F', 2];

#[repr(C)]
struct Dynamic {
    tag: i64,
    value: usize,
}

/// Visits one loaded library; a result ends the search.
type Visitor<'a> = &'a mut dyn FnMut(&libc::dl_phdr_info) -> Option<*const c_void>;

/// The default version of the function `name` in the first loaded library whose file is called as one of
/// `libraries`; null if there is none. Takes no heap.
pub fn function(libraries: &[&str], name: &CStr) -> *const c_void {
    search(&mut |info| {
        let file = file_name(info);
        let is_one = libraries.iter().any(|library| file.starts_with(library.as_bytes()));
        if is_one { find_in(info, name) } else { None }
    })
}

/// Whether a library with this path is loaded, as the loader was asked for it.
pub fn is_loaded(path: &str) -> bool {
    !search(&mut |info| (self::path(info) == path).then_some(info.dlpi_phdr.cast())).is_null()
}

/// The default version of the function `name` in the libraries that come after the one with the code at `caller`
/// in the order of loading, ourselves left out; null if there is none. As the C library does for `RTLD_NEXT`, code
/// that belongs to no library counts as the program's. Takes no heap.
pub fn next(caller: *const c_void, name: &CStr) -> *const c_void {
    let ourselves = (next as *const c_void).addr();
    let is_known = is_in_our_namespace(caller);
    let mut is_after = false;
    search(&mut |info| {
        if !is_after {
            is_after = !is_known || holds(info, caller.addr());
            return None;
        }
        if holds(info, ourselves) { None } else { find_in(info, name) }
    })
}

/// The default version of the function `name` in the library with the code at `caller`; null if there is none.
pub fn function_beside(caller: *const c_void, name: &CStr) -> *const c_void {
    search(&mut |info| if holds(info, caller.addr()) { find_in(info, name) } else { None })
}

/// Whether an address lies in a library of the namespace that the program itself is in.
pub fn is_in_our_namespace(address: *const c_void) -> bool {
    !search(&mut |info| holds(info, address.addr()).then_some(address)).is_null()
}

/// The default version of the function `name` in the library whose file is mapped from `start` on; null if there is
/// none. For libraries of other namespaces, which the C library does not list.
///
/// # Safety
/// At `start` a file is mapped from its beginning; if it has an ELF header, then as a dynamic loader does it, and it
/// stays there.
pub unsafe fn function_at(start: usize, name: &CStr) -> *const c_void {
    // SAFETY: the caller's.
    let info = unsafe { info_at(start) };
    info.and_then(|info| find_in(&info, name)).unwrap_or(null())
}

/// As [`relocated_part`], of a library of another namespace.
///
/// # Safety
/// As [`function_at`].
pub unsafe fn relocated_part_at(start: usize) -> Range<usize> {
    // SAFETY: the caller's.
    let info = unsafe { info_at(start) };
    info.map_or(0..0, |info| relocated_part_of(&info))
}

/// The pages of the library with the code at `address` that the loader makes read-only as the last step of its relocation;
/// empty if there are none.
pub fn relocated_part(address: *const c_void) -> Range<usize> {
    let mut part = 0..0;
    search(&mut |info| {
        let is_it = holds(info, address.addr());
        is_it.then(|| {
            part = relocated_part_of(info);
            address
        })
    });
    part
}

/// PT_GNU_RELRO, of which glibc's `_dl_protect_relro` leaves out a page that it does not fill.
fn relocated_part_of(info: &libc::dl_phdr_info) -> Range<usize> {
    let Some(header) = headers(info).iter().find(|header| header.p_type == libc::PT_GNU_RELRO) else {
        return 0..0;
    };
    // SAFETY: it only answers.
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096);
    let start = info.dlpi_addr.wrapping_add(header.p_vaddr);
    let in_pages = |address: u64| usize::try_from(address).unwrap_or(0) / page * page;
    in_pages(start)..in_pages(start.wrapping_add(header.p_memsz))
}

/// What the C library would tell of the library that is mapped from `start` on.
///
/// # Safety
/// As [`function_at`].
unsafe fn info_at(start: usize) -> Option<libc::dl_phdr_info> {
    // SAFETY: a page is mapped there, and a header has no invalid values.
    let header = unsafe { &*(start as *const libc::Elf64_Ehdr) };
    if header.e_ident[..5] != ELF64 {
        return None;
    }
    let headers_offset = usize::try_from(header.e_phoff).ok()?;
    // SAFETY: all zeros is a valid value of a structure of numbers and pointers.
    let mut info: libc::dl_phdr_info = unsafe { std::mem::zeroed() };
    info.dlpi_phdr = (start + headers_offset) as *const libc::Elf64_Phdr;
    info.dlpi_phnum = header.e_phnum;
    let first = headers(&info).iter().find(|header| header.p_type == libc::PT_LOAD);
    info.dlpi_addr = (start as u64).wrapping_sub(first.map_or(0, |header| header.p_vaddr));
    Some(info)
}

fn search(visitor: Visitor<'_>) -> *const c_void {
    let mut state = (visitor, null());
    // SAFETY: the callback gets the pointer to `state`, which outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut state).cast()) };
    state.1
}

unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, state: *mut c_void) -> c_int {
    // SAFETY: dl_iterate_phdr passes a valid structure.
    let info = unsafe { &*info };
    // SAFETY: dl_iterate_phdr hands on the pointer that `search` gave it.
    let (visitor, found) = unsafe { &mut *state.cast::<(Visitor<'_>, *const c_void)>() };
    *found = visitor(info).unwrap_or(null());
    c_int::from(!found.is_null())
}

/// The name of a library's file without its directory; empty for the program.
fn file_name(info: &libc::dl_phdr_info) -> &[u8] {
    if info.dlpi_name.is_null() {
        return b"";
    }
    // SAFETY: the name is NUL-terminated and lives as long as the library.
    let path = unsafe { CStr::from_ptr(info.dlpi_name) }.to_bytes();
    path.rsplit(|byte| *byte == b'/').next().unwrap_or(path)
}

fn headers(info: &libc::dl_phdr_info) -> &[libc::Elf64_Phdr] {
    // SAFETY: the loader's program headers are an array of this length.
    unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) }
}

/// Whether an address lies in one of a library's segments.
fn holds(info: &libc::dl_phdr_info, address: usize) -> bool {
    let address = (address as u64).wrapping_sub(info.dlpi_addr);
    let is_in = |header: &libc::Elf64_Phdr| {
        header.p_type == libc::PT_LOAD && address.wrapping_sub(header.p_vaddr) < header.p_memsz
    };
    headers(info).iter().any(is_in)
}

/// Where a library's tables of symbols are in memory; 0 for the versions if there are none.
struct Tables {
    base: usize,
    strings: usize,
    symbols: usize,
    hash: usize,
    versions: usize,
}

impl Tables {
    fn of(info: &libc::dl_phdr_info) -> Option<Self> {
        let header = headers(info).iter().find(|header| header.p_type == libc::PT_DYNAMIC)?;
        let base = usize::try_from(info.dlpi_addr).ok()?;
        let mut entry = (base + usize::try_from(header.p_vaddr).ok()?) as *const Dynamic;
        let mut tables = Self { base, strings: 0, symbols: 0, hash: 0, versions: 0 };
        loop {
            // SAFETY: the dynamic section ends with DT_NULL, behind which the loop does not go.
            let Dynamic { tag, value } = unsafe { entry.read() };
            // glibc has made them addresses; where it has not, they are offsets.
            let address = if value < base { base + value } else { value };
            match tag {
                DT_NULL => break,
                DT_STRTAB => tables.strings = address,
                DT_SYMTAB => tables.symbols = address,
                DT_GNU_HASH => tables.hash = address,
                DT_VERSYM => tables.versions = address,
                _ => {}
            }
            // SAFETY: as above.
            entry = unsafe { entry.add(1) };
        }
        (tables.strings != 0 && tables.symbols != 0 && tables.hash != 0).then_some(tables)
    }

    /// A symbol, and its name. The hash table names only indexes that exist.
    fn symbol(&self, index: usize) -> (&libc::Elf64_Sym, &CStr) {
        // SAFETY: the index is one of the table.
        let symbol = unsafe { &*at::<libc::Elf64_Sym>(self.symbols, index) };
        // SAFETY: a symbol's name is a NUL-terminated string of the table.
        let name = unsafe { CStr::from_ptr(at::<c_char>(self.strings, symbol.st_name as usize)) };
        (symbol, name)
    }
}

fn find_in(info: &libc::dl_phdr_info, name: &CStr) -> Option<*const c_void> {
    let tables = Tables::of(info)?;
    chain(tables.hash, name).find_map(|index| {
        let (symbol, its_name) = tables.symbol(index);
        let versions = tables.versions;
        // SAFETY: the table of versions, if there is one, is as long as that of the symbols.
        let is_default = versions == 0 || unsafe { at::<u16>(versions, index).read() } & VERSYM_HIDDEN == 0;
        let is_defined = symbol.st_shndx != 0;
        (is_defined && is_default && its_name == name)
            .then(|| (tables.base + usize::try_from(symbol.st_value).unwrap_or(0)) as *const c_void)
    })
}

/// What an address of code is called: `FILE+0xOFFSET`, and `(FUNCTION+0xOFFSET)` behind it where the library exports
/// the function. Just the number where no library is. Takes none of the loader's locks for long, and not the one that
/// it holds while a library's constructor runs, as dladdr does.
pub fn name_of(address: usize) -> String {
    let mut name = None;
    search(&mut |info| {
        if !holds(info, address) {
            return None;
        }
        let offset = address.wrapping_sub(usize::try_from(info.dlpi_addr).unwrap_or(0));
        let function = function_around(info, offset);
        let function = function.map_or_else(String::new, |(name, within)| format!(" ({name}+{within:#x})"));
        name = Some(format!("{}+{offset:#x}{function}", path(info)));
        Some(address as *const c_void)
    });
    name.unwrap_or_else(|| format!("{address:#x}"))
}

/// The file of a library, or of the program.
fn path(info: &libc::dl_phdr_info) -> String {
    // SAFETY: the name is NUL-terminated and lives as long as the library.
    let known = (!info.dlpi_name.is_null()).then(|| unsafe { CStr::from_ptr(info.dlpi_name) });
    match known.map(CStr::to_string_lossy).filter(|path| !path.is_empty()) {
        Some(path) => path.into_owned(),
        None => std::fs::read_link("/proc/self/exe")
            .map_or_else(|_| "the program".to_owned(), |path| path.to_string_lossy().into_owned()),
    }
}

/// The exported function that an offset in a library lies in, and how far behind its beginning.
fn function_around(info: &libc::dl_phdr_info, offset: usize) -> Option<(String, u64)> {
    const FUNCTION: u8 = 2;
    let tables = Tables::of(info)?;
    let offset = offset as u64;
    exported(tables.hash).find_map(|index| {
        let (symbol, name) = tables.symbol(index);
        let within = offset.checked_sub(symbol.st_value)?;
        let is_it = symbol.st_shndx != 0 && symbol.st_info & 0xf == FUNCTION && within < symbol.st_size;
        is_it.then(|| (name.to_string_lossy().into_owned(), within))
    })
}

/// A loaded library.
pub struct Loaded {
    pub addresses: Range<usize>,
    pub is_program: bool,
    /// Whether its file is called as it was asked for.
    pub is_named: bool,
}

/// The library with the code at `address`, and whether its file's name begins with `name`.
pub fn library_around(address: usize, name: &str) -> Option<Loaded> {
    let mut found = None;
    search(&mut |info| {
        if !holds(info, address) {
            return None;
        }
        let base = usize::try_from(info.dlpi_addr).ok()?;
        let loaded = || headers(info).iter().filter(|header| header.p_type == libc::PT_LOAD);
        let start = loaded().map(|header| header.p_vaddr).min()?;
        let end = loaded().map(|header| header.p_vaddr.wrapping_add(header.p_memsz)).max()?;
        let at = |offset: u64| base.wrapping_add(usize::try_from(offset).unwrap_or(0));
        let file = file_name(info);
        let is_named = file.starts_with(name.as_bytes());
        found = Some(Loaded { addresses: at(start)..at(end), is_program: file.is_empty(), is_named });
        Some(address as *const c_void)
    });
    found
}

/// The addresses that the code of the library takes in which this function is, from the first to behind the last.
pub fn ourselves() -> Range<usize> {
    let here = (ourselves as *const c_void).addr();
    let mut range = 0..0;
    search(&mut |info| {
        let base = usize::try_from(info.dlpi_addr).ok()?;
        let of = |header: &libc::Elf64_Phdr| {
            let start = base.wrapping_add(usize::try_from(header.p_vaddr).unwrap_or(0));
            start..start.wrapping_add(usize::try_from(header.p_memsz).unwrap_or(0))
        };
        let code = headers(info).iter().filter(|header| header.p_type == libc::PT_LOAD).map(of);
        range = code.into_iter().find(|range| range.contains(&here))?;
        Some(here as *const c_void)
    });
    range
}

/// The address of an element of a table in memory.
fn at<T>(table: usize, index: usize) -> *const T {
    (table as *const T).wrapping_add(index)
}

/// The indexes of the symbols that may have this name, by the library's own hash table: a header of four
/// numbers, a filter, the first index of each bucket, and from that index on the hashes of the bucket's
/// symbols, the last one marked by its lowest bit (as glibc's `dl-lookup.c` reads it).
fn chain(table: usize, name: &CStr) -> impl Iterator<Item = usize> {
    let word = move |index: usize| {
        // SAFETY: `index` is within the table, see below.
        unsafe { at::<u32>(table, index).read() }
    };
    let (buckets, first_symbol, filter_words) = (word(0), word(1) as usize, word(2) as usize);
    let hash = name
        .to_bytes()
        .iter()
        .fold(5381_u32, |hash, byte| hash.wrapping_mul(33).wrapping_add(u32::from(*byte)));
    let buckets_at = 4 + filter_words * 2;
    let chains_at = buckets_at + buckets as usize;
    let start = if buckets == 0 { 0 } else { word(buckets_at + (hash % buckets) as usize) as usize };
    let mut next = (start >= first_symbol && start != 0).then_some(start);
    std::iter::from_fn(move || {
        loop {
            let index = next?;
            let its_hash = word(chains_at + index - first_symbol);
            next = (its_hash & 1 == 0).then_some(index + 1);
            if its_hash | 1 == hash | 1 {
                return Some(index);
            }
        }
    })
}

/// The indexes of all symbols that a library's hash table has.
fn exported(table: usize) -> impl Iterator<Item = usize> {
    let word = move |index: usize| {
        // SAFETY: `index` is within the table, see above.
        unsafe { at::<u32>(table, index).read() }
    };
    let (buckets, first_symbol, filter_words) = (word(0) as usize, word(1) as usize, word(2) as usize);
    let buckets_at = 4 + filter_words * 2;
    let chains_at = buckets_at + buckets;
    // The bucket that begins last has the last symbol at its end.
    let last = (0..buckets).map(|bucket| word(buckets_at + bucket) as usize).max().unwrap_or(0);
    let mut next = (last >= first_symbol && last != 0).then_some(first_symbol);
    std::iter::from_fn(move || {
        let index = next?;
        let is_end = index >= last && word(chains_at + index - first_symbol) & 1 != 0;
        next = (!is_end).then_some(index + 1);
        Some(index)
    })
}

/// The loaded library in which an address lies.
pub fn library_of(address: *const c_void) -> Option<libc::Dl_info> {
    let mut info = MaybeUninit::<libc::Dl_info>::uninit();
    // SAFETY: dladdr takes any address, and `info` has room for what it writes.
    let is_known = unsafe { libc::dladdr(address, info.as_mut_ptr()) } != 0;
    // SAFETY: where dladdr succeeds, it has written the whole structure.
    is_known.then(|| unsafe { info.assume_init() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_of_the_c_library_are_found() {
        for name in [c"dlsym", c"dlvsym"] {
            // SAFETY: under test nothing stands in front of dlsym.
            let known = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
            assert_eq!(function(&["libc.so", "libdl.so"], name), known.cast_const());
        }
    }

    #[test]
    fn what_comes_next_is_what_the_c_library_finds() {
        // The caller's library is this test's program, in which the C library's dlsym would start too.
        for name in [c"getpid", c"malloc", c"no_such_function"] {
            // SAFETY: under test nothing stands in front of dlsym.
            let known = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
            // In a test the interposer is the program, and so is left out by coming first.
            for caller in [next as *const c_void, null()] {
                assert_eq!(next(caller, name), known.cast_const(), "{name:?}");
            }
        }
    }

    #[test]
    fn a_library_is_read_from_its_header() {
        let base = library_of(libc::getpid as *const c_void).expect("the C library").dli_fbase.addr();
        // SAFETY: that is where the C library's file is mapped.
        let found = unsafe { function_at(base, c"dlsym") };
        assert_eq!(found, function(&["libc.so"], c"dlsym"));
        let other = [0_u64; 512];
        // SAFETY: an array in memory is as good as a file that is mapped.
        assert!(unsafe { function_at(other.as_ptr().addr(), c"dlsym") }.is_null());
    }

    #[test]
    fn code_is_named_by_its_file_and_function() {
        let getpid = function(&["libc.so"], c"getpid").addr();
        let base = library_of(getpid as *const c_void).expect("the C library").dli_fbase.addr();
        let name = name_of(getpid + 1);
        let offset = format!("+{:#x} (", getpid + 1 - base);
        // Several names may stand for one function.
        assert!(
            name.contains("/libc.so.6") && name.contains(&offset) && name.ends_with("getpid+0x1)"),
            "{name}"
        );
        // What this program does not export has no more than a place.
        let here = name_of((code_is_named_by_its_file_and_function as *const c_void).addr());
        let program = std::env::current_exe().expect("a program").to_string_lossy().into_owned();
        assert!(here.starts_with(&format!("{program}+0x")) && !here.contains('('), "{here}");
        assert_eq!(name_of(5), "0x5");
    }

    #[test]
    fn our_own_code_is_known() {
        assert!(ourselves().contains(&(holds as *const c_void).addr()));
        assert!(!ourselves().contains(&(libc::getpid as *const c_void).addr()));
    }

    #[test]
    fn what_is_not_there_is_not_found() {
        assert!(function(&["libc.so"], c"no_such_function").is_null());
        assert!(function(&["libnothing.so"], c"dlsym").is_null());
    }
}
