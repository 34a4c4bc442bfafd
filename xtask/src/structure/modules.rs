//! The modules of a crate, found from its `lib.rs` and `main.rs`, tests left out.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use syn::spanned::Spanned;
use syn::{Attribute, ImplItem, Item, ItemMod, Meta};

use super::lines;

/// A module with a file of its own.
pub struct Module {
    /// Its path below `crate`; empty for `main.rs` and `lib.rs`.
    pub path: Vec<String>,
    /// Its file below `src`.
    pub file: PathBuf,
    /// Its items without tests.
    pub items: Vec<Item>,
    pub product_lines: usize,
}

/// All modules of a crate that are no tests.
pub struct SourceTree {
    pub modules: Vec<Module>,
}

/// A file to be read, and the folder that its modules are in.
struct Pending {
    path: Vec<String>,
    file: PathBuf,
}

impl SourceTree {
    /// Reads a crate. `read` returns the text of a file below `src`, or nothing if there is no such file.
    pub fn load(read: &dyn Fn(&Path) -> Option<String>) -> Result<Self> {
        let roots = ["lib.rs", "main.rs"].map(PathBuf::from).into_iter();
        let mut pending: Vec<_> = roots
            .filter(|file| read(file).is_some())
            .map(|file| Pending { path: Vec::new(), file })
            .collect();
        let mut modules: Vec<Module> = Vec::new();
        while let Some(next) = pending.pop() {
            if modules.iter().any(|module| module.file == next.file) {
                continue;
            }
            let shown = next.file.display().to_string();
            let text = read(&next.file).with_context(|| format!("there is no {shown}"))?;
            let module = parse(next, &text).with_context(|| format!("parsing {shown}"))?;
            let folder = module_folder(&module.file);
            find_children(&module.items, &module.path, &folder, read, &mut pending)?;
            modules.push(module);
        }
        modules.sort_by(|a, b| a.file.cmp(&b.file));
        Ok(Self { modules })
    }

    /// The number of entries of each folder, by the folder's path from `src` on.
    pub fn entries_per_folder(&self) -> BTreeMap<String, usize> {
        let mut entries: BTreeMap<PathBuf, BTreeSet<PathBuf>> = BTreeMap::new();
        for module in &self.modules {
            let mut entry = module.file.with_extension("");
            if entry.file_name().is_some_and(|name| name == "mod") {
                entry.pop();
            }
            // Every folder above is an entry of the folder that holds it.
            while let Some(folder) = entry.parent().map(Path::to_path_buf) {
                entries.entry(Path::new("src").join(&folder)).or_default().insert(entry);
                entry = folder;
            }
        }
        let count = |(folder, names): (PathBuf, BTreeSet<_>)| {
            (folder.display().to_string().trim_end_matches('/').to_owned(), names.len())
        };
        entries.into_iter().map(count).collect()
    }
}

fn parse(pending: Pending, text: &str) -> Result<Module> {
    let tokens = text.parse().map_err(|error| anyhow::anyhow!("{error}"))?;
    let mut items = syn::parse_file(text)?.items;
    let mut tests = Vec::new();
    remove_tests(&mut items, &mut tests);
    let Pending { path, file } = pending;
    Ok(Module { path, file, items, product_lines: lines::count(tokens, &tests) })
}

/// Removes the items that are compiled for tests only, and notes their lines.
fn remove_tests(items: &mut Vec<Item>, removed: &mut Vec<RangeInclusive<usize>>) {
    items.retain_mut(|item| {
        if is_test(attributes(item)) {
            removed.push(lines_of(item));
            return false;
        }
        match item {
            Item::Mod(ItemMod { content: Some((_, items)), .. }) => remove_tests(items, removed),
            Item::Impl(block) => block.items.retain(|item| {
                let is_test = is_test(impl_item_attributes(item));
                removed.extend(is_test.then(|| lines_of(item)));
                !is_test
            }),
            _ => {}
        }
        true
    });
}

fn lines_of(node: &impl Spanned) -> RangeInclusive<usize> {
    let span = node.span();
    span.start().line..=span.end().line
}

/// Whether an item with these attributes is left out of a normal build: `#[test]`, `#[cfg(test)]`, or
/// `#[cfg(all(test, …))]`.
fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::Path(path) => path.is_ident("test"),
        Meta::List(list) if list.path.is_ident("cfg") => {
            list.parse_args::<Meta>().is_ok_and(|condition| needs_test(&condition))
        }
        _ => false,
    })
}

fn needs_test(condition: &Meta) -> bool {
    match condition {
        Meta::Path(path) => path.is_ident("test"),
        Meta::List(list) if list.path.is_ident("all") => {
            let parts = syn::punctuated::Punctuated::<Meta, syn::Token![,]>::parse_terminated;
            list.parse_args_with(parts).is_ok_and(|parts| parts.iter().any(needs_test))
        }
        _ => false,
    }
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::TraitAlias(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

fn impl_item_attributes(item: &ImplItem) -> &[Attribute] {
    match item {
        ImplItem::Const(item) => &item.attrs,
        ImplItem::Fn(item) => &item.attrs,
        ImplItem::Type(item) => &item.attrs,
        ImplItem::Macro(item) => &item.attrs,
        _ => &[],
    }
}

/// The folder in which the modules that a file declares are looked for.
fn module_folder(file: &Path) -> PathBuf {
    match file.file_name().and_then(|name| name.to_str()) {
        Some("lib.rs" | "main.rs" | "mod.rs") => file.parent().unwrap_or(Path::new("")).to_path_buf(),
        _ => file.with_extension(""),
    }
}

/// Finds the files of the modules that are declared among `items`.
fn find_children(
    items: &[Item],
    path: &[String],
    folder: &Path,
    read: &dyn Fn(&Path) -> Option<String>,
    found: &mut Vec<Pending>,
) -> Result<()> {
    for item in items {
        let Item::Mod(module) = item else { continue };
        let name = module.ident.to_string();
        let path = [path, std::slice::from_ref(&name)].concat();
        if let Some((_, items)) = &module.content {
            find_children(items, &path, &folder.join(&name), read, found)?;
            continue;
        }
        let candidates = [folder.join(format!("{name}.rs")), folder.join(&name).join("mod.rs")];
        let file = candidates.into_iter().find(|file| read(file).is_some());
        let file = file.with_context(|| format!("module {} has no file", path.join("::")))?;
        found.push(Pending { path, file });
    }
    Ok(())
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A crate of made-up files.
    pub fn tree(files: &[(&str, &str)]) -> SourceTree {
        let read = |path: &Path| {
            let file = files.iter().find(|(name, _)| Path::new(name) == path);
            file.map(|(_, text)| (*text).to_owned())
        };
        SourceTree::load(&read).unwrap()
    }

    #[test]
    fn finds_modules_and_leaves_tests_out() {
        let tree = tree(&[
            ("main.rs", "mod a;\nmod b;\n#[cfg(test)]\nmod fixtures;\nfn main() {}\n"),
            ("a.rs", "mod c { pub mod d; }\n#[cfg(all(test, unix))]\nmod tests {\n}\n"),
            ("a/c/d.rs", "struct A;\nimpl A {\n    #[cfg(test)]\n    fn b() {}\n}\n"),
            ("b/mod.rs", "pub mod e;\n"),
            ("b/e.rs", "#[test]\nfn a() {}\n#[cfg(any(test, unix))]\nfn b() {}\n"),
        ]);
        let found = tree.modules.iter().map(|module| (module.path.join("::"), module.product_lines));
        let found: Vec<_> = found.collect();
        let wanted = [("a::c::d", 3), ("a", 1), ("b::e", 2), ("b", 1), ("", 3)];
        assert_eq!(found, wanted.map(|(path, lines)| (path.to_owned(), lines)));
        let entries: Vec<_> = tree.entries_per_folder().into_iter().collect();
        let wanted = [("src", 3), ("src/a", 1), ("src/a/c", 1), ("src/b", 1)];
        assert_eq!(entries, wanted.map(|(folder, count)| (folder.to_owned(), count)));
    }
}
