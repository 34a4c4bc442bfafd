//! Symbols of a loaded library, read from its own tables in memory: for the two functions by which one would
//! otherwise look symbols up, and which this library stands in front of.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null;

const DT_NULL: i64 = 0;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_GNU_HASH: i64 = 0x6fff_fef5;
const DT_VERSYM: i64 = 0x6fff_fff0;
/// Marks, in the table of versions, a symbol that is not its name's default version.
const VERSYM_HIDDEN: u16 = 0x8000;

#[repr(C)]
struct Dynamic {
    tag: i64,
    value: usize,
}

struct Search<'a> {
    /// Beginnings of the file names of the libraries to look in.
    libraries: &'a [&'a str],
    name: &'a CStr,
    found: *const c_void,
}

/// The default version of the function `name` in the first loaded library whose file is called as one of
/// `libraries`; null if there is none. Takes no heap.
pub(super) fn function(libraries: &[&str], name: &CStr) -> *const c_void {
    let mut search = Search { libraries, name, found: null() };
    // SAFETY: the callback gets the pointer to `search`, which outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    search.found
}

unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, search: *mut c_void) -> c_int {
    // SAFETY: dl_iterate_phdr passes a valid structure.
    let info = unsafe { &*info };
    // SAFETY: dl_iterate_phdr hands on the pointer that `function` gave it.
    let search = unsafe { &mut *search.cast::<Search<'_>>() };
    if info.dlpi_name.is_null() {
        return 0;
    }
    // SAFETY: the name is NUL-terminated and lives as long as the library.
    let path = unsafe { CStr::from_ptr(info.dlpi_name) }.to_bytes();
    let file = path.rsplit(|byte| *byte == b'/').next().unwrap_or(path);
    if search.libraries.iter().any(|library| file.starts_with(library.as_bytes())) {
        search.found = look(info, search.name).unwrap_or(null());
    }
    c_int::from(!search.found.is_null())
}

fn look(info: &libc::dl_phdr_info, name: &CStr) -> Option<*const c_void> {
    // SAFETY: the loader's program headers are an array of this length.
    let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
    let header = headers.iter().find(|header| header.p_type == libc::PT_DYNAMIC)?;
    let base = usize::try_from(info.dlpi_addr).ok()?;
    let mut entry = (base + usize::try_from(header.p_vaddr).ok()?) as *const Dynamic;
    let (mut strings, mut symbols, mut hash, mut versions) = (0, 0, 0, 0);
    loop {
        // SAFETY: the dynamic section ends with DT_NULL, behind which the loop does not go.
        let Dynamic { tag, value } = unsafe { entry.read() };
        // glibc has made them addresses; where it has not, they are offsets.
        let address = if value < base { base + value } else { value };
        match tag {
            DT_NULL => break,
            DT_STRTAB => strings = address,
            DT_SYMTAB => symbols = address,
            DT_GNU_HASH => hash = address,
            DT_VERSYM => versions = address,
            _ => {}
        }
        // SAFETY: as above.
        entry = unsafe { entry.add(1) };
    }
    if strings == 0 || symbols == 0 || hash == 0 {
        return None;
    }
    chain(hash, name).find_map(|index| {
        // SAFETY: the hash table names only symbols that exist.
        let symbol = unsafe { &*at::<libc::Elf64_Sym>(symbols, index) };
        // SAFETY: a symbol's name is a NUL-terminated string of the table.
        let its_name = unsafe { CStr::from_ptr(at::<c_char>(strings, symbol.st_name as usize)) };
        // SAFETY: the table of versions, if there is one, is as long as that of the symbols.
        let is_default = versions == 0 || unsafe { at::<u16>(versions, index).read() } & VERSYM_HIDDEN == 0;
        let is_defined = symbol.st_shndx != 0;
        (is_defined && is_default && its_name == name)
            .then(|| (base + usize::try_from(symbol.st_value).unwrap_or(0)) as *const c_void)
    })
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
    fn what_is_not_there_is_not_found() {
        assert!(function(&["libc.so"], c"no_such_function").is_null());
        assert!(function(&["libnothing.so"], c"dlsym").is_null());
    }
}
