//! What `show` and `explain` say of the job's files in a snapshot.

use crate::files::inventory::{Copies, Inventory};
use crate::sys::path_text::shown;

/// The files of a snapshot in lines of name and value.
#[must_use]
pub fn facts(inventory: &Inventory) -> Vec<(&'static str, String)> {
    let copies: Vec<&Copies> = inventory.entries.values().filter_map(|entry| entry.copies()).collect();
    let count = |is: fn(&Copies) -> bool| copies.iter().filter(|copies| is(copies)).count();
    let written = inventory.entries.values().filter(|entry| entry.written).count();
    let mut facts = vec![(
        "job's files",
        format!(
            "{} names, {written} of them written by the job: {} files copied, {} kept by a link, {} by a checksum",
            inventory.entries.len(),
            count(|copies| copies.data.is_some()),
            count(|copies| copies.held.is_some()),
            count(|copies| copies.data.is_none() && copies.held.is_none() && copies.prefix.is_some()),
        ),
    )];
    facts.extend(inventory.excluded.iter().map(|pattern| ("excluded", pattern.clone())));
    facts.extend(uncovered(inventory));
    facts
}

/// Files that a resume could not put back.
pub fn uncovered(inventory: &Inventory) -> impl Iterator<Item = (&'static str, String)> {
    inventory.uncovered.iter().map(|(path, reason)| ("not covered", format!("{}: {reason}", shown(path))))
}
