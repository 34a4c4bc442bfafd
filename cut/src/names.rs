//! Names of communicators: the same on all their ranks, without any message between them.

/// The name of a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(from = "[u64; 2]", into = "[u64; 2]"))]
pub struct Name(pub u128);

/// The upper half first: JSON numbers have at most 64 bits.
impl From<[u64; 2]> for Name {
    fn from([upper, lower]: [u64; 2]) -> Self {
        Self(u128::from(upper) << 64 | u128::from(lower))
    }
}

impl From<Name> for [u64; 2] {
    fn from(Name(name): Name) -> Self {
        [(name >> 64) as u64, name as u64]
    }
}

/// A short form for messages.
impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:08x}", (self.0 >> 96) as u32)
    }
}

/// The 128-bit FNV-1a hash. Its input is chosen by NCCL, not by an attacker.
struct Fnv(u128);

impl Fnv {
    const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;

    fn new(kind: u8) -> Self {
        Self(Self::OFFSET).with(&[kind])
    }

    fn with(self, bytes: &[u8]) -> Self {
        Self(bytes.iter().fold(self.0, |hash, byte| (hash ^ u128::from(*byte)).wrapping_mul(Self::PRIME)))
    }

    fn name(self) -> Name {
        Name(self.0)
    }
}

impl Name {
    /// A communicator made from unique IDs (`ncclCommInitRank` and its relatives): their bytes, in order.
    #[must_use]
    pub fn of_unique_ids(ids: &[u8]) -> Self {
        Fnv::new(0).with(ids).name()
    }

    /// A part of a communicator (`ncclCommSplit`). `child` counts the splits of the parent, `color` is the caller's.
    #[must_use]
    pub fn split(self, child: u64, color: i32) -> Self {
        self.child(1, child).with(&color.to_le_bytes()).name()
    }

    /// A communicator without some ranks of its parent (`ncclCommShrink`). `child` counts the calls with the same
    /// `excluded` ranks: the excluded ones do not call it and cannot count with the others.
    #[must_use]
    pub fn shrink(self, child: u64, excluded: &[i32]) -> Self {
        let mut sorted = excluded.to_vec();
        sorted.sort_unstable();
        sorted.iter().fold(self.child(2, child), |hash, rank| hash.with(&rank.to_le_bytes())).name()
    }

    /// A communicator with more ranks than its parent (`ncclCommGrow`), as ranks of the parent name it. `child` counts
    /// the calls. New ranks know the unique ID only: see [`Role::Communicator`](crate::Role::Communicator).
    #[must_use]
    pub fn grow(self, child: u64) -> Self {
        self.child(3, child).name()
    }

    /// The two-member communicator of what rank `from` sends to rank `to` of this communicator.
    #[must_use]
    pub fn pair(self, from: u32, to: u32) -> Self {
        self.child(4, u64::from(from) << 32 | u64::from(to)).name()
    }

    fn child(self, kind: u8, number: u64) -> Fnv {
        Fnv::new(kind).with(&self.0.to_le_bytes()).with(&number.to_le_bytes())
    }
}

/// A place in a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Member {
    /// The communicator.
    pub communicator: Name,
    /// NCCL's rank in it. In a pair: 0 sends, 1 receives.
    pub index: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_depend_on_all_that_makes_a_communicator() {
        let world = Name::of_unique_ids(&[7; 128]);
        let names = [
            world,
            Name::of_unique_ids(&[8; 128]),
            world.split(0, 1),
            world.split(1, 0),
            world.split(0, 0),
            world.split(0, 0).split(0, 0),
            world.shrink(0, &[]),
            world.shrink(0, &[0]),
            world.shrink(0, &[1]),
            world.grow(0),
            world.pair(0, 1),
            world.pair(1, 0),
        ];
        let distinct: std::collections::BTreeSet<_> = names.iter().collect();
        assert_eq!(distinct.len(), names.len());
        assert_eq!(world.shrink(3, &[5, 2]), world.shrink(3, &[2, 5]), "ranks may list them in any order");
    }

    /// A published test vector.
    #[test]
    fn the_hash_is_fnv_1a() {
        assert_eq!(Fnv(Fnv::OFFSET).with(b"a").0, 0xd228_cb69_6f1a_8caf_7891_2b70_4e4a_8964);
    }
}
