use std::collections::{HashMap, HashSet};

use super::*;
use Lookup::{Found, NotFound, VersionNotSufficient};

#[test]
fn a_version_gets_the_newest_variant_that_it_knows() {
    assert_eq!(lookup("cuMemAlloc", 3020, false), Found("cuMemAlloc_v2"));
    assert_eq!(lookup("cuMemAlloc", 2000, false), Found("cuMemAlloc"));
    assert_eq!(lookup("cuMemAlloc", 12000, false), Found("cuMemAlloc_v2"));
    assert_eq!(lookup("cuCtxCreate", 2000, false), Found("cuCtxCreate"));
    assert_eq!(lookup("cuCtxCreate", 3020, false), Found("cuCtxCreate_v2"));
    assert_eq!(lookup("cuCtxCreate", 11040, false), Found("cuCtxCreate_v3"));
    assert_eq!(lookup("cuCtxCreate", 12040, false), Found("cuCtxCreate_v3"));
    assert_eq!(lookup("cuCtxCreate", 12050, false), Found("cuCtxCreate_v4"));
    assert_eq!(lookup("cuCtxCreate", 13000, false), Found("cuCtxCreate_v4"));
    assert_eq!(lookup("cuGetProcAddress", 11030, false), Found("cuGetProcAddress"));
    assert_eq!(lookup("cuGetProcAddress", 12000, false), Found("cuGetProcAddress_v2"));
}

#[test]
fn per_thread_variants_are_handed_out_from_their_own_version_on() {
    assert_eq!(lookup("cuMemcpyHtoD", 6050, true), VersionNotSufficient);
    assert_eq!(lookup("cuMemcpyHtoD", 7000, true), Found("cuMemcpyHtoD_v2_ptds"));
    assert_eq!(lookup("cuMemcpyHtoD", 7000, false), Found("cuMemcpyHtoD_v2"));
    assert_eq!(lookup("cuMemAlloc", 12000, true), Found("cuMemAlloc_v2"));
    assert_eq!(lookup("cuStreamGetCaptureInfo", 10010, true), Found("cuStreamGetCaptureInfo_ptsz"));
    assert_eq!(lookup("cuStreamGetCaptureInfo", 11020, false), Found("cuStreamGetCaptureInfo"));
    assert_eq!(lookup("cuStreamGetCaptureInfo", 11030, false), Found("cuStreamGetCaptureInfo_v2"));
    assert_eq!(lookup("cuStreamGetCaptureInfo", 12000, true), Found("cuStreamGetCaptureInfo_v2_ptsz"));
    assert_eq!(lookup("cuStreamGetCaptureInfo", 12030, false), Found("cuStreamGetCaptureInfo_v3"));
    assert_eq!(lookup("cuStreamGetCaptureInfo", 13000, true), Found("cuStreamGetCaptureInfo_v3_ptsz"));
}

#[test]
fn a_name_that_is_too_new_differs_from_one_that_does_not_exist() {
    assert_eq!(lookup("cuStreamGetCaptureInfo", 10000, false), VersionNotSufficient);
    assert_eq!(lookup("cuLaunchKernelEx", 11050, true), VersionNotSufficient);
    assert_eq!(lookup("cuMemAlloc_v2", 13000, false), NotFound);
    assert_eq!(lookup("cuMemcpyHtoD_ptds", 13000, true), NotFound);
    assert_eq!(lookup("cudnnCreate", 13000, false), NotFound);
    assert_eq!(lookup("", 0, false), NotFound);
    assert_eq!(lookup("cuEventCreateFromEGLSync", 13000, false), NotFound);
}

#[test]
fn a_row_is_found_by_either_of_its_symbols() {
    let plain = by_symbol("cuMemcpyHtoD_v2").unwrap();
    assert_eq!(plain.class, Some(Class::Gate));
    assert_eq!(plain.params[0], ("dstDevice", "CUdeviceptr"));
    assert_eq!(by_symbol("cuMemcpyHtoD_v2_ptds").unwrap().symbol, "cuMemcpyHtoD_v2");
    assert_eq!(by_symbol("cuMemcpyHtoD").unwrap().class, None);
    assert!(by_symbol("cuMemcpyHtoD_ptds").is_none());
    assert_eq!(by_symbol("cuEventCreateFromEGLSync").unwrap().public_name, "");
}

#[test]
fn no_symbol_occurs_twice() {
    let mut seen = HashSet::new();
    for row in ENTRY_POINTS {
        assert!(seen.insert(row.symbol), "{}", row.symbol);
        if let Some((per_thread, _)) = row.per_thread {
            assert!(seen.insert(per_thread), "{per_thread}");
        }
    }
}

#[test]
fn versions_rise_with_the_suffix_of_a_public_name() {
    let mut variants: HashMap<&str, Vec<&EntryPoint>> = HashMap::new();
    for row in ENTRY_POINTS.iter().filter(|row| !row.public_name.is_empty()) {
        variants.entry(row.public_name).or_default().push(row);
    }
    for (name, mut rows) in variants {
        rows.sort_by_key(|row| row.since);
        for pair in rows.windows(2) {
            assert!(pair[0].since < pair[1].since, "{name}: {} twice", pair[0].since);
            assert!(suffix(pair[0], name) < suffix(pair[1], name), "{name}: versions fall");
        }
        for row in rows {
            if let Some((symbol, since)) = row.per_thread {
                assert!(since >= row.since, "{symbol}");
                let kind = symbol.strip_prefix(row.symbol);
                assert!(matches!(kind, Some("_ptsz" | "_ptds")), "{symbol}");
            }
        }
    }
}

/// 1 for the public name itself, N for `_vN`.
fn suffix(row: &EntryPoint, public_name: &str) -> u32 {
    match row.symbol.strip_prefix(public_name) {
        Some("") => 1,
        Some(suffix) => {
            suffix.strip_prefix("_v").and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("{row:?}"))
        }
        None => panic!("{row:?}"),
    }
}

/// Calls of the interposer's design whose class decides whether a checkpoint is right, one for each rule.
#[test]
fn classes_follow_the_design() {
    let class = |symbol: &str| by_symbol(symbol).unwrap_or_else(|| panic!("{symbol}")).class.unwrap();
    for symbol in ["cuMemAlloc_v2", "cuMemFree_v2", "cuPointerGetAttributes", "cuIpcOpenMemHandle_v2"] {
        assert_eq!(class(symbol), Class::Virtualise, "{symbol}");
    }
    for symbol in
        ["cuMemAllocAsync", "cuMemCreate", "cuModuleLoadData", "cuGraphAddNode_v3", "cuCtxCreate_v4"]
    {
        assert_eq!(class(symbol), Class::Track, "{symbol}");
    }
    for symbol in [
        "cuLaunchKernelEx",
        "cuMemcpyBatchAsync_v2",
        "cuMemsetD2D32Async",
        "cuEventRecord",
        "cuTexObjectCreate",
    ] {
        assert_eq!(class(symbol), Class::Gate, "{symbol}");
    }
    for symbol in ["cuStreamSynchronize", "cuCtxSynchronize_v2", "cuFuncGetAttribute"] {
        assert_eq!(class(symbol), Class::Leave, "{symbol}");
    }
    for symbol in ["cuLogicalEndpointCreate", "cuGraphicsMapResources"] {
        assert_eq!(class(symbol), Class::Taint, "{symbol}");
    }
}
