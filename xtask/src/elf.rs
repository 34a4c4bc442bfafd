//! Which glibc and which libraries a program or a library needs.

use std::fmt;

use anyhow::{Context, Result};
use object::Endianness;
use object::elf::{DT_NEEDED, FileHeader64};
use object::read::elf::{Dyn, FileHeader};

/// A version of glibc's symbols, for instance 2.35.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32, pub u32);

impl Version {
    /// Of a symbol version's name, `GLIBC_2.35`; `None` for those of other libraries and for `GLIBC_PRIVATE`.
    fn parse(name: &str) -> Option<Self> {
        let mut numbers = name.strip_prefix("GLIBC_")?.split('.').map(str::parse);
        Some(Self(numbers.next()?.ok()?, numbers.next()?.ok()?))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

/// The newest version of glibc's symbols that a 64-bit ELF file asks for; `None` if it asks for none.
///
/// # Errors
/// It is no such file, or damaged.
pub fn needed_glibc(bytes: &[u8]) -> Result<Option<Version>> {
    let header = FileHeader64::<Endianness>::parse(bytes).context("not a 64-bit ELF file")?;
    let endian = header.endian()?;
    let sections = header.sections(endian, bytes)?;
    let Some((mut libraries, link)) = sections.gnu_verneed(endian, bytes)? else { return Ok(None) };
    let names = sections.strings(endian, bytes, link)?;
    let mut newest = None;
    while let Some((_, mut versions)) = libraries.next()? {
        while let Some(version) = versions.next()? {
            let name = String::from_utf8_lossy(version.name(endian, names)?);
            newest = newest.max(Version::parse(&name));
        }
    }
    Ok(newest)
}

/// The libraries that a 64-bit ELF file asks for by name. A static program asks for none.
///
/// # Errors
/// It is no such file, or damaged.
pub fn needed_libraries(bytes: &[u8]) -> Result<Vec<String>> {
    let header = FileHeader64::<Endianness>::parse(bytes).context("not a 64-bit ELF file")?;
    let endian = header.endian()?;
    let sections = header.sections(endian, bytes)?;
    let Some((entries, link)) = sections.dynamic(endian, bytes)? else { return Ok(Vec::new()) };
    let names = sections.strings(endian, bytes, link)?;
    let needed = entries.iter().filter(|entry| entry.tag32(endian) == Some(DT_NEEDED));
    let name = |entry: &object::elf::Dyn64<Endianness>| {
        Ok(String::from_utf8_lossy(entry.string(endian, names)?).into_owned())
    };
    needed.map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_versions_of_symbols() {
        assert_eq!(Version::parse("GLIBC_2.35"), Some(Version(2, 35)));
        assert_eq!(Version::parse("GLIBC_2.2.5"), Some(Version(2, 2)));
        assert_eq!(Version::parse("GLIBC_PRIVATE"), None);
        assert_eq!(Version::parse("GCC_3.0"), None);
        assert!(Version(2, 4) < Version(2, 35));
    }

    #[test]
    fn a_program_needs_a_glibc_and_a_text_is_no_program() {
        let program = std::fs::read(std::env::current_exe().expect("this test")).expect("readable");
        let needed = needed_glibc(&program).expect("ELF").expect("it is linked with glibc");
        assert!(needed > Version(2, 2) && needed < Version(3, 0), "{needed}");
        assert!(needed_glibc(b"#!/bin/sh\n").is_err());
        assert!(needed_libraries(&program).unwrap().contains(&"libc.so.6".to_owned()));
        assert!(needed_libraries(b"#!/bin/sh\n").is_err());
    }
}
