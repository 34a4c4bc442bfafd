//! `mm-*.img`: the mappings of a process. Field numbers and flags are those of CRIU's images/mm.proto, vma.proto and
//! include/image.h.

use super::images::{COMMON_MAGIC, ImageError, entries};
use super::unix_queues::Read;
use prost::Message;
use std::ops::Range;

const MM_MAGIC: u32 = 0x5749_2820;
/// Kinds of mappings.
const REGULAR: u32 = 1;
const HEAP: u32 = 1 << 5;
const ANON_PRIVATE: u32 = 1 << 9;
/// PROT_READ and PROT_WRITE of mmap(2).
const READ_WRITE: u32 = 3;
/// MAP_PRIVATE, MAP_ANONYMOUS and MAP_NORESERVE of mmap(2).
const PLAIN_FLAGS: u32 = 0x2 | 0x20 | 0x4000;

#[derive(Message)]
struct MemoryEntry {
    #[prost(message, repeated, tag = "14")]
    mappings: Vec<MappingEntry>,
}

#[derive(Clone, Message)]
struct MappingEntry {
    #[prost(uint64, required, tag = "1")]
    start: u64,
    #[prost(uint64, required, tag = "2")]
    end: u64,
    #[prost(uint32, required, tag = "5")]
    protection: u32,
    #[prost(uint32, required, tag = "6")]
    flags: u32,
    #[prost(uint32, required, tag = "7")]
    status: u32,
}

impl MappingEntry {
    /// Private memory without a file that can be read and written, and is nothing else.
    fn is_plain(&self) -> bool {
        self.status & !HEAP == REGULAR | ANON_PRIVATE
            && self.protection == READ_WRITE
            && self.flags & !PLAIN_FLAGS == 0
    }
}

/// The mappings of a process.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Mappings {
    /// All, in order.
    pub all: Vec<Range<u64>>,
    /// Those of private memory without a file that can be read and written, in order.
    pub plain: Vec<Range<u64>>,
}

impl Mappings {
    /// Reads the image of a process, by its PID in the job's namespace.
    ///
    /// # Errors
    /// When the image cannot be read.
    pub fn read(read: Read, pid: i32) -> Result<Self, ImageError> {
        let mut found = Self::default();
        entries(read, &format!("mm-{pid}.img"), COMMON_MAGIC, MM_MAGIC, |memory: MemoryEntry| {
            for mapping in memory.mappings {
                found.all.push(mapping.start..mapping.end);
                if mapping.is_plain() {
                    found.plain.push(mapping.start..mapping.end);
                }
            }
        })?;
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_memory_is_told_from_other_mappings() {
        let mapping = |start, status, protection, flags| MappingEntry {
            start,
            end: start + 0x1000,
            protection,
            flags,
            status,
        };
        let plain = REGULAR | ANON_PRIVATE;
        let mappings = vec![
            mapping(0x1000, plain, 3, 0x22),
            mapping(0x2000, plain | HEAP, 3, 0x22),
            mapping(0x3000, plain, 3, 0x4022),
            mapping(0x4000, plain, 1, 0x22),
            mapping(0x5000, plain, 7, 0x22),
            // MAP_GROWSDOWN, MAP_HUGETLB.
            mapping(0x6000, plain, 3, 0x122),
            mapping(0x7000, plain, 3, 0x40022),
            // A private and a shared file, a stack, shared memory.
            mapping(0x8000, REGULAR | 1 << 6, 3, 0x2),
            mapping(0x9000, REGULAR | 1 << 7, 3, 0x1),
            mapping(0xa000, plain | 1 << 1, 3, 0x22),
            mapping(0xb000, REGULAR | 1 << 8, 3, 0x21),
        ];
        let entry = MemoryEntry { mappings }.encode_to_vec();
        let mut image = [COMMON_MAGIC, MM_MAGIC, entry.len() as u32].map(u32::to_le_bytes).concat();
        image.extend(entry);
        let found = Mappings::read(&|name| Ok((name == "mm-7.img").then(|| image.clone())), 7).unwrap();
        assert_eq!(found.plain, [0x1000..0x2000, 0x2000..0x3000, 0x3000..0x4000]);
        assert_eq!(found.all.len(), 11);
        assert_eq!(Mappings::read(&|_| Ok(None), 7).unwrap(), Mappings::default());
    }
}
