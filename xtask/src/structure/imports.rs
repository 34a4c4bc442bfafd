//! Which file of a crate names which other: by `use`, by a path in code, or by a path in a macro's arguments.

use std::collections::BTreeMap;
use std::fmt;

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Item, ItemMod, ItemUse, Macro, UseTree, Visibility};

use super::modules::{Module, SourceTree};

/// A path in one file that leads to another.
#[derive(Clone, Debug)]
pub struct Import {
    /// The file with the path.
    pub from: String,
    /// The file of the module that the path names.
    pub to: String,
    /// The line of the path.
    pub line: usize,
    folders: (String, String),
}

impl Import {
    /// The top-level folders or modules of `src` that the two files are in.
    pub fn folders(&self) -> (String, String) {
        self.folders.clone()
    }
}

impl fmt::Display for Import {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{} names {}", self.from, self.line, self.to)
    }
}

/// All imports between different files of a crate. `main.rs` and `lib.rs` are left out: they name everything.
///
/// A module that names its own submodules imports nothing: it consists of them. A submodule that names a module above
/// it is an import.
pub fn between_files(tree: &SourceTree) -> Vec<Import> {
    let files = tree.modules.iter().filter(|module| !module.path.is_empty());
    let files: BTreeMap<_, _> =
        files.map(|module| (module.path.clone(), module.file.display().to_string())).collect();
    let aliases = root_aliases(tree, &files);
    let mut imports = Vec::new();
    for module in tree.modules.iter().filter(|module| !module.path.is_empty()) {
        for (target, line) in paths_of(module, &files, &aliases) {
            if !target.starts_with(&module.path) {
                let from = module.file.display().to_string();
                let to = files[&target].clone();
                let folders = (module.path[0].clone(), target[0].clone());
                imports.push(Import { from, to, line, folders });
            }
        }
    }
    imports
}

type Files = BTreeMap<Vec<String>, String>;
/// What the root of the crate re-exports: the name, and the module that has it.
type Aliases = BTreeMap<String, Vec<String>>;

fn root_aliases(tree: &SourceTree, files: &Files) -> Aliases {
    let mut aliases = Aliases::new();
    for root in tree.modules.iter().filter(|module| module.path.is_empty()) {
        let paths = Paths { module: Vec::new(), files, aliases: &Aliases::new(), found: Vec::new() };
        for item in &root.items {
            let Item::Use(item) = item else { continue };
            for (path, name, _) in flatten(&item.tree) {
                aliases.extend(paths.resolve(&path).map(|target| (name, target)));
            }
        }
    }
    aliases
}

/// The modules that a file names, each with the line.
fn paths_of(module: &Module, files: &Files, aliases: &Aliases) -> Vec<(Vec<String>, usize)> {
    let mut paths = Paths { module: module.path.clone(), files, aliases, found: Vec::new() };
    module.items.iter().for_each(|item| paths.visit_item(item));
    paths.found
}

/// Collects the modules that are named in a syntax tree.
struct Paths<'a> {
    /// The module that is being visited, modules within the file included.
    module: Vec<String>,
    files: &'a Files,
    aliases: &'a Aliases,
    found: Vec<(Vec<String>, usize)>,
}

impl Paths<'_> {
    fn add(&mut self, path: &[String], line: usize) {
        self.found.extend(self.resolve(path).map(|target| (target, line)));
    }

    /// The module with a file that a path names: its longest prefix that is one.
    fn resolve(&self, path: &[String]) -> Option<Vec<String>> {
        let (first, mut rest) = path.split_first()?;
        let mut base = self.module.clone();
        match first.as_str() {
            "crate" => {
                base.clear();
                if let Some(target) = rest.first().and_then(|name| self.aliases.get(name)) {
                    base.clone_from(target);
                }
            }
            "self" => {}
            "super" => {
                base.pop();
                while rest.first().is_some_and(|word| word == "super") {
                    base.pop();
                    rest = &rest[1..];
                }
            }
            // A module that this one declares.
            name => {
                base.push(name.to_owned());
                if !self.files.contains_key(&base) {
                    return None;
                }
            }
        }
        base.extend_from_slice(rest);
        while !base.is_empty() && !self.files.contains_key(&base) {
            base.pop();
        }
        (!base.is_empty()).then_some(base)
    }

    /// Finds paths in the arguments of a macro, or in its definition.
    fn search_tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let (mut line, mut colons) = (0, 0);
        for token in tokens {
            match token {
                TokenTree::Ident(word) => {
                    if colons != 2 {
                        self.add(&path, line);
                        path.clear();
                        line = word.span().start().line;
                    }
                    path.push(word.to_string());
                    colons = 0;
                }
                TokenTree::Punct(sign) if sign.as_char() == ':' => colons += 1,
                TokenTree::Group(group) => {
                    self.search_tokens(group.stream());
                    colons = 0;
                }
                _ => colons = 0,
            }
        }
        self.add(&path, line);
    }
}

impl<'ast> Visit<'ast> for Paths<'_> {
    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        self.module.push(module.ident.to_string());
        visit::visit_item_mod(self, module);
        self.module.pop();
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        if item.leading_colon.is_none() {
            for (path, _, line) in flatten(&item.tree) {
                self.add(&path, line);
            }
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let words: Vec<_> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        if path.leading_colon.is_none() && words.len() > 1 {
            self.add(&words, path.segments[0].ident.span().start().line);
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast Macro) {
        visit::visit_macro(self, call);
        self.search_tokens(call.tokens.clone());
    }

    /// `pub(in crate::a)` names a module, but uses nothing of it.
    fn visit_visibility(&mut self, _: &'ast Visibility) {}
}

/// The paths in a `use`, each with the name that it brings and its line.
fn flatten(tree: &UseTree) -> Vec<(Vec<String>, String, usize)> {
    let line = |name: &syn::Ident| name.span().start().line;
    let leaf = |name: &syn::Ident| (vec![name.to_string()], name.to_string(), line(name));
    match tree {
        UseTree::Path(path) => {
            let mut below = flatten(&path.tree);
            for (words, name, _) in &mut below {
                if words.as_slice() == ["self"] {
                    words.clear();
                    *name = path.ident.to_string();
                }
                words.insert(0, path.ident.to_string());
            }
            below
        }
        UseTree::Name(name) => vec![leaf(&name.ident)],
        UseTree::Rename(rename) => {
            vec![(vec![rename.ident.to_string()], rename.rename.to_string(), line(&rename.ident))]
        }
        UseTree::Glob(glob) => vec![(Vec::new(), "*".to_owned(), glob.star_token.spans[0].start().line)],
        UseTree::Group(group) => group.items.iter().flat_map(flatten).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::modules::tests::tree;
    use super::*;

    /// The imports of `a/x.rs` with this text, in a crate with the modules `a`, `a::x`, `a::y`, `b`, `b::z`.
    fn imports(text: &str) -> Vec<(String, usize)> {
        let tree = tree(&[
            ("lib.rs", "mod a; mod b; pub use b::z::{Thing as Renamed, Other};"),
            ("a/mod.rs", "mod x; mod y;"),
            ("a/x.rs", text),
            ("a/y.rs", ""),
            ("b.rs", "pub mod z;"),
            ("b/z.rs", ""),
        ]);
        let found = between_files(&tree).into_iter().filter(|import| import.from == "a/x.rs");
        found.map(|import| (import.to, import.line)).collect()
    }

    fn targets(text: &str) -> Vec<String> {
        imports(text).into_iter().map(|(to, _)| to).collect()
    }

    #[test]
    fn resolves_use() {
        assert_eq!(imports("\nuse crate::b::z::Thing;"), [("b/z.rs".to_owned(), 2)]);
        assert_eq!(targets("use crate::b::{self, z::{A, B as C}};"), ["b.rs", "b/z.rs", "b/z.rs"]);
        assert_eq!(targets("use super::{y, Thing};"), ["a/y.rs", "a/mod.rs"]);
        assert_eq!(targets("use super::*; use super::super::b::*;"), ["a/mod.rs", "b.rs"]);
        assert_eq!(targets("use self::own::X; use std::b::z; use ::b::z;"), Vec::<String>::new());
    }

    #[test]
    fn resolves_paths_in_code_and_in_macros() {
        let text = "fn a(x: &crate::b::z::Thing<super::y::T>) { super::y::call(); }";
        assert_eq!(targets(text), ["b/z.rs", "a/y.rs", "a/y.rs"]);
        assert_eq!(targets("fn a() { print!(\"{}\", crate::b::name(super::y::T)) }"), ["a/y.rs", "b.rs"]);
        assert_eq!(targets("macro_rules! m { () => { $crate::b::z::call() } }"), ["b/z.rs"]);
    }

    #[test]
    fn follows_what_the_root_exports() {
        assert_eq!(targets("use crate::{Renamed, Other, Unknown};"), ["b/z.rs", "b/z.rs"]);
    }

    #[test]
    fn modules_in_the_file_shift_super() {
        assert_eq!(targets("mod own { use super::super::y; use super::X; }"), ["a/y.rs"]);
    }

    #[test]
    fn tests_and_visibilities_import_nothing() {
        assert_eq!(targets("#[cfg(test)] use crate::b::z; pub(in crate::a) fn f() {}"), Vec::<String>::new());
    }

    #[test]
    fn a_child_imports_its_parent_and_not_the_other_way_round() {
        let tree =
            tree(&[("lib.rs", "mod a;"), ("a.rs", "mod b; pub use b::B;"), ("a/b.rs", "use super::A;")]);
        let found = between_files(&tree);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].to_string(), "a/b.rs:1 names a.rs");
        assert_eq!(found[0].folders(), ("a".to_owned(), "a".to_owned()));
    }
}
