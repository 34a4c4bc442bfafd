//! The VMM calls against a model that keeps a list of pages.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::sample::Index;

use super::vmm::{create, map, release, release_range, reserve, retain, set_access, unmap};
use super::*;

#[derive(Debug, Clone)]
enum Step {
    Reserve {
        pages: u64,
    },
    /// `wrong` asks for another size than was reserved.
    FreeRange {
        range: Index,
        wrong: bool,
    },
    Create {
        pages: u64,
    },
    Release {
        handle: Index,
    },
    Map {
        range: Index,
        page: u64,
        pages: u64,
        handle: Index,
        skew: u64,
    },
    Unmap {
        range: Index,
        page: u64,
        pages: u64,
    },
    SetAccess {
        range: Index,
        page: u64,
        pages: u64,
        flags: u32,
    },
    Retain {
        range: Index,
        page: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let index = any::<Index>;
    // Mostly whole pages; what is not must be refused.
    let skew = prop_oneof![9 => Just(0_u64), 1 => Just(4096_u64)];
    prop_oneof![
        2 => (1_u64..6).prop_map(|pages| Step::Reserve { pages }),
        1 => (index(), any::<bool>()).prop_map(|(range, wrong)| Step::FreeRange { range, wrong }),
        3 => (1_u64..4).prop_map(|pages| Step::Create { pages }),
        2 => index().prop_map(|handle| Step::Release { handle }),
        8 => (index(), 0_u64..6, 0_u64..4, index(), skew)
            .prop_map(|(range, page, pages, handle, skew)| Step::Map { range, page, pages, handle, skew }),
        4 => (index(), 0_u64..6, 0_u64..6).prop_map(|(range, page, pages)| Step::Unmap { range, page, pages }),
        6 => (index(), 0_u64..6, 0_u64..6, prop_oneof![Just(0_u32), Just(1), Just(3), Just(2)])
            .prop_map(|(range, page, pages, flags)| Step::SetAccess { range, page, pages, flags }),
        1 => (index(), 0_u64..6).prop_map(|(range, page)| Step::Retain { range, page }),
    ]
}

/// One page of a mapping.
#[derive(Clone, Copy, PartialEq)]
struct Page {
    /// Which mapping it is of, and where in it.
    mapping: u32,
    number: u64,
    pages: u64,
    handle: u64,
    flags: u32,
}

#[derive(Default)]
struct Model {
    /// Start to pages.
    ranges: Vec<(u64, Vec<Option<Page>>)>,
    /// References and size in pages of each live handle.
    handles: BTreeMap<u64, (u32, u64)>,
    /// Sizes of all handles that ever were, live or not.
    sizes: Vec<(u64, u64)>,
    mappings: u32,
}

impl Model {
    /// The pages of a request, if they are whole mappings.
    fn whole(&self, range: usize, page: u64, pages: u64) -> bool {
        let all = &self.ranges[range].1;
        let Some(part) = all.get(page as usize..(page + pages) as usize) else { return false };
        let Some(Some(first)) = part.first() else { return false };
        let Some(Some(last)) = part.last() else { return false };
        part.iter().all(Option::is_some) && first.number == 0 && last.number + 1 == last.pages
    }

    /// A page of some range. Beyond a range's end there may be another one, so requests start inside.
    fn choose(&self, range: Index, page: u64) -> (usize, u64) {
        let range = range.index(self.ranges.len());
        (range, page % self.ranges[range].1.len() as u64)
    }

    fn run(&mut self, step: Step) {
        let count = self.ranges.len();
        match step {
            Step::Reserve { pages } => {
                self.ranges.push((reserve(pages * PAGE).unwrap(), vec![None; pages as usize]));
            }
            Step::Create { pages } => {
                let handle = create(pages * PAGE).unwrap();
                self.handles.insert(handle, (1, pages));
                self.sizes.push((handle, pages));
            }
            Step::FreeRange { range, wrong } if count > 0 => {
                self.free_range(range.index(count), wrong);
            }
            Step::Release { handle } if !self.sizes.is_empty() => {
                let (handle, _) = self.sizes[handle.index(self.sizes.len())];
                if self.is_gone(handle) {
                    return;
                }
                assert_eq!(release(handle).is_ok(), self.handles.contains_key(&handle));
                self.drop_reference(handle);
            }
            Step::Map { range, page, pages, handle, skew } if count > 0 && !self.sizes.is_empty() => {
                let handle = self.sizes[handle.index(self.sizes.len())].0;
                if self.is_gone(handle) {
                    return;
                }
                let (range, page) = self.choose(range, page);
                self.map(range, page, pages, handle, skew);
            }
            Step::Unmap { range, page, pages } if count > 0 => {
                let (range, page) = self.choose(range, page);
                self.unmap(range, page, pages);
            }
            Step::SetAccess { range, page, pages, flags } if count > 0 => {
                let (range, page) = self.choose(range, page);
                self.set_access(range, page, pages, flags);
            }
            Step::Retain { range, page } if count > 0 => {
                let (range, page) = self.choose(range, page);
                self.retain(range, page);
            }
            _ => {}
        }
    }

    fn free_range(&mut self, range: usize, wrong: bool) {
        let (start, pages) = &self.ranges[range];
        let is_allowed = !wrong && pages.iter().all(Option::is_none);
        let size_bytes = (pages.len() as u64 + u64::from(wrong)) * PAGE;
        assert_eq!(release_range(*start, size_bytes).is_ok(), is_allowed);
        if is_allowed {
            self.ranges.swap_remove(range);
        }
    }

    fn unmap(&mut self, range: usize, page: u64, pages: u64) {
        let is_allowed = pages > 0 && self.whole(range, page, pages);
        let start = self.ranges[range].0 + page * PAGE;
        assert_eq!(unmap(start, pages * PAGE), if is_allowed { Ok(()) } else { INVALID });
        if is_allowed {
            self.ranges[range].1[page as usize..(page + pages) as usize].fill(None);
        }
    }

    fn set_access(&mut self, range: usize, page: u64, pages: u64, flags: u32) {
        let is_allowed = pages > 0 && flags != 2 && self.whole(range, page, pages);
        let start = self.ranges[range].0 + page * PAGE;
        let expected = if is_allowed { Ok(()) } else { INVALID };
        assert_eq!(set_access(start, pages * PAGE, 0, flags), expected);
        if is_allowed {
            let pages = &mut self.ranges[range].1[page as usize..(page + pages) as usize];
            pages.iter_mut().flatten().for_each(|page| page.flags = flags);
        }
    }

    fn retain(&mut self, range: usize, page: u64) {
        let (start, pages) = &self.ranges[range];
        let expected = pages[page as usize].map(|page| page.handle);
        assert_eq!(retain(start + page * PAGE + 17).ok(), expected);
        if let Some(handle) = expected {
            let size = self.sizes.iter().find(|(known, _)| *known == handle).unwrap().1;
            self.handles.entry(handle).or_insert((0, size)).0 += 1;
        }
    }

    /// Whether the use of a handle ends the process: the memory has no other handle and is mapped nowhere.
    fn is_gone(&self, handle: u64) -> bool {
        let mut pages = self.ranges.iter().flat_map(|(_, pages)| pages).flatten();
        !self.handles.contains_key(&handle) && pages.all(|page| page.handle != handle)
    }

    fn drop_reference(&mut self, handle: u64) {
        if let Some((references, _)) = self.handles.get_mut(&handle) {
            *references -= 1;
            if *references == 0 {
                self.handles.remove(&handle);
            }
        }
    }

    fn map(&mut self, range: usize, page: u64, pages: u64, handle: u64, skew: u64) {
        let (start, known) = &mut self.ranges[range];
        let address = *start + page * PAGE + skew;
        let target = known.get_mut(page as usize..(page + pages) as usize);
        let size = self.handles.get(&handle).map(|(_, size)| *size);
        let is_free = target.as_ref().is_some_and(|target| target.iter().all(Option::is_none));
        let is_allowed = skew == 0 && pages > 0 && is_free && size.is_some_and(|size| pages <= size);
        assert_eq!(map(address, pages * PAGE, handle).is_ok(), is_allowed);
        let Some(target) = target.filter(|_| is_allowed) else { return };
        self.mappings += 1;
        for (number, page) in target.iter_mut().enumerate() {
            *page = Some(Page { mapping: self.mappings, number: number as u64, pages, handle, flags: 0 });
        }
    }

    /// Every page is accessible as the model says, and the same physical page shows the same bytes.
    fn check(&self) {
        let mut bytes: BTreeMap<(u64, u64), u8> = BTreeMap::new();
        for (start, pages) in &self.ranges {
            for (index, page) in pages.iter().enumerate() {
                let address = start + index as u64 * PAGE + 123;
                let flags = page.map_or(0, |page| page.flags);
                let found = span(address, 0);
                assert_eq!(found.is_some(), flags != 0);
                assert_eq!(is_accessible(address, 1, 0), flags != 0);
                assert_eq!(found.is_some_and(|span| span.writable), flags == 3);
                if let Some(page) = page.filter(|page| page.flags == 3) {
                    let fresh = (page.mapping as u8).wrapping_mul(31).wrapping_add(page.number as u8);
                    poke(address, 0, fresh);
                    bytes.insert((page.handle, page.number), fresh);
                }
            }
        }
        for (start, pages) in &self.ranges {
            for (index, page) in pages.iter().enumerate() {
                let Some(page) = page.filter(|page| page.flags != 0) else { continue };
                if let Some(byte) = bytes.get(&(page.handle, page.number)) {
                    assert_eq!(peek(start + index as u64 * PAGE + 123, 0), *byte);
                }
            }
        }
    }
}

impl Drop for Model {
    /// Gives everything back, in an order that is allowed.
    fn drop(&mut self) {
        // A case that has failed already must not take the memory that others need.
        let check = |result: Result| assert!(result.is_ok() || std::thread::panicking(), "{result:?}");
        for (start, pages) in &self.ranges {
            for (index, page) in pages.iter().enumerate() {
                if let Some(page) = page.filter(|page| page.number == 0) {
                    check(unmap(start + index as u64 * PAGE, page.pages * PAGE));
                }
            }
            check(release_range(*start, pages.len() as u64 * PAGE));
        }
        for (handle, (references, _)) in &self.handles {
            (0..*references).for_each(|_| check(release(*handle)));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn every_call_answers_as_the_model(steps in proptest::collection::vec(step(), 1..60)) {
        let _context = context();
        let mut model = Model::default();
        for step in steps {
            model.run(step);
            model.check();
        }
    }
}
