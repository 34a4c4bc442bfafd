//! Holds the table against cudarc's declarations, which are made from the headers of each CUDA version.
//!
//! cudarc's source is read rather than its items named, so that functions of versions other than the pinned one
//! are compared too.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Command;

use cuda_abi::{ENTRY_POINTS, EntryPoint, by_symbol};
use syn::{Attribute, FnArg, Item, ItemFn, Type, UseTree};

/// The version whose declarations cudarc is pinned to; the features of cudarc are named like it.
const PINNED: u32 = 13040;

/// The oldest version whose declarations are compared.
const OLDEST: u32 = 12000;

/// Rows with a signature that cudarc does not declare, and where they come from.
const NOT_IN_CUDARC: &[(&str, &str)] = &[
    ("cuCheckpointOperationComplete", "cuda.h 13.5; cudarc has the types only"),
    ("cuCheckpointProcessCheckpoint", "cuda.h 13.5; cudarc has the types only"),
    ("cuCheckpointProcessGetRestoreThreadId", "cuda.h 13.5; cudarc has the types only"),
    ("cuCheckpointProcessGetState", "cuda.h 13.5; cudarc has the types only"),
    ("cuCheckpointProcessLock", "cuda.h 13.5; cudarc has the types only"),
    ("cuCheckpointProcessRestore", "cuda.h 13.5; cudarc has the types only"),
    ("cuCheckpointProcessUnlock", "cuda.h 13.5; cudarc has the types only"),
    ("cuDeviceGetNvSciSyncAttributes", "cuda.h 13.5; cudarc leaves it out"),
    ("cuFabricCpyBatchAsync", "new in cuda.h 13.5"),
    ("cuTensorMapSetAllocationClass", "new in cuda.h 13.5"),
    ("cuStreamBeginCapture", "internal section of cuda.h 13.5: its per-thread variant is still handed out"),
    (
        "cuIpcOpenMemHandle",
        "internal section of cuda.h 13.5: what programs before CUDA 11.0 were linked with",
    ),
    ("cuGLMapBufferObject_v2", "cudaGL.h 13.5"),
    ("cuGLMapBufferObjectAsync_v2", "cudaGL.h 13.5"),
];

/// What cudarc declares.
struct Declarations {
    /// By symbol: the newest declaration, and the versions that have one.
    functions: BTreeMap<String, (ItemFn, Vec<u32>)>,
    /// The integer that an enum is represented by.
    enums: BTreeMap<String, String>,
    /// Other names of types.
    aliases: BTreeMap<String, String>,
}

impl Declarations {
    fn read() -> Self {
        let source = std::fs::read_to_string(cudarc_root().join("src/driver/sys/mod.rs")).unwrap();
        let mut all = Self { functions: BTreeMap::new(), enums: BTreeMap::new(), aliases: BTreeMap::new() };
        for item in syn::parse_file(&source).unwrap().items {
            all.add(item);
        }
        all
    }

    fn add(&mut self, item: Item) {
        match item {
            Item::Fn(function) => {
                let name = function.sig.ident.to_string();
                let versions = versions(&function.attrs);
                if !name.starts_with("cu") || name == "culib" {
                    return;
                }
                let newer = |(_, known): &(ItemFn, Vec<u32>)| known.last() < versions.last();
                if self.functions.get(&name).is_none_or(newer) {
                    self.functions.insert(name, (function, versions));
                }
            }
            Item::Enum(item) => {
                if let Some(repr) = representation(&item.attrs) {
                    self.enums.insert(item.ident.to_string(), repr);
                }
            }
            Item::Type(item) => {
                if let Some(target) = last_name(&item.ty) {
                    self.aliases.insert(item.ident.to_string(), target);
                }
            }
            Item::Use(item) => {
                if let UseTree::Path(path) = item.tree
                    && let UseTree::Rename(rename) = *path.tree
                    // Of two declarations for different versions, the pinned one's counts.
                    && (item.attrs.is_empty() || versions(&item.attrs).contains(&PINNED))
                {
                    self.aliases.insert(rename.rename.to_string(), rename.ident.to_string());
                }
            }
            _ => {}
        }
    }

    /// The integer that stands for `name` if it is an enum.
    fn enum_representation(&self, name: &str) -> Option<&str> {
        let mut name = name;
        while let Some(target) = self.aliases.get(name) {
            name = target;
        }
        self.enums.get(name).map(String::as_str)
    }

    fn compared(&self) -> impl Iterator<Item = (&String, &ItemFn)> {
        let compared =
            self.functions.iter().filter(|(_, (_, versions))| versions.last().is_none_or(|v| *v >= OLDEST));
        compared.map(|(name, (function, _))| (name, function))
    }
}

fn cudarc_root() -> PathBuf {
    // Without the filter cargo would have to download what only other systems need.
    let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let output = Command::new(env!("CARGO"))
        .args([
            "metadata",
            "--format-version=1",
            "--offline",
            "--filter-platform",
            &platform,
            "--manifest-path",
        ])
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    let cudarc: Vec<_> = packages.iter().filter(|package| package["name"] == "cudarc").collect();
    assert_eq!(cudarc.len(), 1, "versions of cudarc");
    PathBuf::from(cudarc[0]["manifest_path"].as_str().unwrap()).parent().unwrap().to_owned()
}

/// The CUDA versions under whose features an item is compiled, rising; empty for all.
fn versions(attributes: &[Attribute]) -> Vec<u32> {
    let mut versions = Vec::new();
    for attribute in attributes.iter().filter(|attribute| attribute.path().is_ident("cfg")) {
        let condition = attribute.meta.require_list().unwrap().tokens.to_string();
        versions
            .extend(condition.split('"').filter_map(|part| part.strip_prefix("cuda-")?.parse::<u32>().ok()));
    }
    versions.sort_unstable();
    versions
}

fn representation(attributes: &[Attribute]) -> Option<String> {
    let repr = attributes.iter().find(|attribute| attribute.path().is_ident("repr"))?;
    Some(repr.meta.require_list().unwrap().tokens.to_string())
}

fn last_name(ty: &Type) -> Option<String> {
    let Type::Path(path) = ty else { return None };
    path.path.segments.last().map(|segment| segment.ident.to_string())
}

/// A type as one string: the last segment of every path, one space after `*mut` and `*const`.
fn spell(ty: &Type) -> String {
    match ty {
        Type::Ptr(pointer) => {
            let kind = if pointer.mutability.is_some() { "*mut" } else { "*const" };
            format!("{kind} {}", spell(&pointer.elem))
        }
        other => last_name(other).expect("parameters are paths or pointers to paths"),
    }
}

fn parameters(function: &ItemFn) -> Vec<(String, String)> {
    let parameter = |argument: &FnArg| {
        let FnArg::Typed(argument) = argument else { unreachable!("a function without a receiver") };
        let syn::Pat::Ident(name) = &*argument.pat else { unreachable!("a plain parameter") };
        (name.ident.to_string(), spell(&argument.ty))
    };
    function.sig.inputs.iter().map(parameter).collect()
}

fn row_parameters(row: &EntryPoint) -> Vec<(String, String)> {
    let spelled = |ty: &str| spell(&syn::parse_str::<Type>(ty).unwrap());
    row.params.iter().map(|(name, ty)| ((*name).to_owned(), spelled(ty))).collect()
}

#[test]
fn every_declaration_of_cudarc_is_a_row_with_the_same_parameters() {
    let declarations = Declarations::read();
    let mut compared = 0;
    let mut wrong = Vec::new();
    for (name, function) in declarations.compared() {
        compared += 1;
        let row = by_symbol(name).filter(|row| row.class.is_some() && row.symbol == name);
        match row {
            None => wrong.push(format!("{name}: not in the table")),
            Some(row) if row_parameters(row) != parameters(function) => {
                wrong.push(format!(
                    "{name}: {:?} here, {:?} in cudarc",
                    row_parameters(row),
                    parameters(function)
                ));
            }
            Some(_) => {}
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(compared > 450, "only {compared} declarations were found: did cudarc's source change its form?");
}

#[test]
fn every_signature_is_cudarcs_or_has_a_named_source() {
    let declarations = Declarations::read();
    let rows = ENTRY_POINTS.iter().filter(|row| row.class.is_some());
    let unknown: BTreeSet<_> =
        rows.map(|row| row.symbol).filter(|symbol| !declarations.functions.contains_key(*symbol)).collect();
    let listed: BTreeSet<_> = NOT_IN_CUDARC.iter().map(|(symbol, _)| *symbol).collect();
    assert_eq!(unknown, listed);
}

#[test]
fn enums_in_parameters_are_integers_of_their_representation() {
    let declarations = Declarations::read();
    let source = include_str!("../src/types.rs");
    let list = source.split_once("enums! {\n").unwrap().1.split_once('}').unwrap().0;
    let integers: BTreeSet<String> = list.split(',').map(|name| name.trim().to_owned()).collect();
    let mut enums = BTreeSet::from(["CUresult".to_owned()]);
    for row in ENTRY_POINTS {
        for (_, ty) in row_parameters(row) {
            let name = ty.rsplit(' ').next().unwrap().to_owned();
            if let Some(representation) = declarations.enum_representation(&name) {
                assert_eq!(representation, "u32", "{name} of {} is not a c_uint", row.symbol);
                enums.insert(name);
            }
        }
    }
    let missing: Vec<_> = enums.difference(&integers).collect();
    assert!(missing.is_empty(), "Rust enums in signatures: {missing:?}");
    assert!(enums.len() > 40, "only {enums:?} were found: did cudarc's source change its form?");
}
