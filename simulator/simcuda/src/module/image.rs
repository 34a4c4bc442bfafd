//! What the loading calls accept: PTX text, fat binaries with PTX in them, and what cuLinkComplete made.

use std::borrow::Cow;
use std::ffi::{CStr, c_char, c_void};
use std::sync::Arc;

use cuda_abi::sys::CUresult;
use simcuda_ptx as ptx;

use super::fatbin;
use super::jit::Messages;
use crate::device::{CONSTANT_BYTES, SHARED_BYTES_PER_BLOCK, SM_VERSION};
use crate::error::Result;
use crate::process;

/// What cuLinkComplete makes: this magic, the size of the whole, and each PTX text with its size before it
/// (all sizes are 64 bits, little-endian).
const LINKED_MAGIC: &[u8; 8] = b"\x7fSIMPTX\x01";
const ELF_MAGIC: &[u8; 4] = b"\x7fELF";
/// `e_machine` of NVIDIA's device code.
const EM_CUDA: u16 = 190;
const ELF_HEADER_BYTES: usize = 64;
/// What a kernel's parameters may take (PTX ISA, section "Kernel Function Parameters").
pub(super) const PARAM_BYTES_MAX: usize = 32764;
const PARAM_BYTES_MAX_BEFORE_8_1: usize = 4352;

/// The PTX texts of an image in memory. Its size is in its own header, or marked by the NUL after a text.
///
/// # Errors
/// As [`texts`].
///
/// # Safety
/// `image` is NULL or points to a whole image of one of the accepted formats, or to a NUL-terminated text.
pub(super) unsafe fn texts_at(image: *const c_void) -> Result<Vec<String>> {
    if image.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller vouches for the image; at least its magic is there, and a text ends no later.
    let image = unsafe { fatbin::container_of(image) };
    // SAFETY: as above.
    let magic = unsafe { prefix::<8>(image) };
    let size_bytes = if magic.starts_with(ELF_MAGIC) {
        ELF_HEADER_BYTES
    } else if magic == *LINKED_MAGIC {
        // SAFETY: a linked image has its size in its second word.
        let second = unsafe { image.cast::<u64>().add(1) };
        // SAFETY: as above.
        usize::try_from(unsafe { second.read_unaligned() }).unwrap_or(0)
    } else if fatbin::is_container(&magic) {
        // SAFETY: a container has at least a whole header.
        fatbin::container_bytes(&unsafe { prefix::<16>(image) })
    } else {
        // SAFETY: what is none of the binary formats is a NUL-terminated text.
        unsafe { CStr::from_ptr(image.cast::<c_char>()) }.count_bytes()
    };
    // SAFETY: the image is as large as its header says, for which the caller vouches.
    texts(unsafe { std::slice::from_raw_parts(image.cast::<u8>(), size_bytes) })
}

/// The first bytes of an image, zeros after a NUL (behind which there may be no memory).
///
/// # Safety
/// `image` points to at least `N` bytes, or to fewer that end with a NUL.
unsafe fn prefix<const N: usize>(image: *const c_void) -> [u8; N] {
    let mut bytes = [0; N];
    // A binary header holds zeros of its own, but not in its magic.
    let mut binary = false;
    for index in 0..N {
        // SAFETY: no NUL of a text came before this byte.
        let place = unsafe { image.cast::<u8>().add(index) };
        // SAFETY: as above.
        bytes[index] = unsafe { place.read() };
        binary |= index == 3 && (bytes.starts_with(ELF_MAGIC) || fatbin::is_container(&bytes));
        if bytes[index] == 0 && !binary {
            break;
        }
    }
    bytes
}

/// The PTX texts of an image whose size is known: of a fat binary the text for the newest architecture that the
/// device can run.
///
/// # Errors
/// `CUDA_ERROR_NO_BINARY_FOR_GPU` for an image with machine code only, `CUDA_ERROR_INVALID_IMAGE` for what is
/// no image at all.
pub(super) fn texts(bytes: &[u8]) -> Result<Vec<String>> {
    if bytes.starts_with(LINKED_MAGIC) {
        return linked_texts(bytes).ok_or(CUresult::CUDA_ERROR_INVALID_IMAGE);
    }
    if bytes.starts_with(ELF_MAGIC) {
        let machine = bytes.get(18..20).map(|field| u16::from_le_bytes([field[0], field[1]]));
        return Err(match machine {
            Some(EM_CUDA) => CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU,
            _ => CUresult::CUDA_ERROR_INVALID_IMAGE,
        });
    }
    let text = if fatbin::is_container(bytes) {
        Cow::Owned(fatbin::newest_ptx(bytes, SM_VERSION)?)
    } else {
        Cow::Borrowed(bytes)
    };
    let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
    let text = std::str::from_utf8(&text[..end]).map_err(|_| CUresult::CUDA_ERROR_INVALID_IMAGE)?;
    // Every PTX text begins with its version (PTX ISA, section "PTX Module Directives: .version").
    if !skip_blank(text).starts_with(".version") {
        return Err(CUresult::CUDA_ERROR_INVALID_IMAGE);
    }
    Ok(vec![text.to_owned()])
}

/// The text from its first directive on.
fn skip_blank(mut text: &str) -> &str {
    loop {
        text = text.trim_start();
        let comment = if text.starts_with("//") {
            text.find('\n')
        } else if text.starts_with("/*") {
            text.find("*/").map(|end| end + 1)
        } else {
            return text;
        };
        text = comment.map_or("", |end| &text[end + 1..]);
    }
}

/// An image that [`texts`] reads again.
pub(super) fn linked(texts: &[String]) -> Vec<u8> {
    let mut bytes = [LINKED_MAGIC.as_slice(), &[0; 8]].concat();
    for text in texts {
        bytes.extend_from_slice(&(text.len() as u64).to_le_bytes());
        bytes.extend_from_slice(text.as_bytes());
    }
    let size_bytes = bytes.len() as u64;
    bytes[8..16].copy_from_slice(&size_bytes.to_le_bytes());
    bytes
}

fn linked_texts(bytes: &[u8]) -> Option<Vec<String>> {
    let word =
        |bytes: &[u8]| bytes.first_chunk().and_then(|word| usize::try_from(u64::from_le_bytes(*word)).ok());
    let mut rest = bytes.get(16..word(bytes.get(8..)?)?)?;
    let mut texts = Vec::new();
    while !rest.is_empty() {
        let (text, after) = rest.get(8..)?.split_at_checked(word(rest)?)?;
        texts.push(String::from_utf8(text.to_vec()).ok()?);
        rest = after;
    }
    Some(texts)
}

/// Parses texts and links them with each other.
///
/// # Errors
/// `CUDA_ERROR_UNSUPPORTED_PTX_VERSION`, `CUDA_ERROR_INVALID_PTX`; the reason and its line are in `messages`.
pub(super) fn compile(texts: &[String], messages: &mut Messages) -> Result<Arc<ptx::Module>> {
    let modules = texts.iter().map(|text| parse(text, "ptx input", messages)).collect::<Result<Vec<_>>>()?;
    let linked = ptx::Module::link(modules).map_err(|error| {
        messages.refuse("ptx input", &error);
        CUresult::CUDA_ERROR_INVALID_PTX
    })?;
    check_sizes(&linked).map_err(|message| {
        messages.refuse("ptx input", &ptx::ParseError { line: 0, message });
        CUresult::CUDA_ERROR_INVALID_PTX
    })?;
    Ok(Arc::new(linked))
}

/// What ptxas refuses for sm_90: memory that the code itself asks for and that no launch can have.
fn check_sizes(code: &ptx::Module) -> std::result::Result<(), String> {
    let constants = code.globals().iter().filter(|global| global.space == ptx::Space::Const);
    let constant_bytes: usize = constants.map(|global| global.size_bytes).sum();
    if constant_bytes > CONSTANT_BYTES {
        return Err(format!(
            "File uses too much global constant data ({constant_bytes:#x} bytes, {CONSTANT_BYTES:#x} max)"
        ));
    }
    let param_bytes_max = if code.version() >= (8, 1) { PARAM_BYTES_MAX } else { PARAM_BYTES_MAX_BEFORE_8_1 };
    for function in code.functions() {
        let name = &function.name;
        let (shared_bytes, param_bytes) = (function.static_shared_bytes, function.param_bytes);
        if shared_bytes > SHARED_BYTES_PER_BLOCK {
            return Err(format!(
                "Entry function '{name}' uses too much shared data ({shared_bytes:#x} bytes, \
                 {SHARED_BYTES_PER_BLOCK:#x} max)"
            ));
        }
        if param_bytes > param_bytes_max {
            return Err(format!(
                "Entry function '{name}' uses too much parameter space ({param_bytes:#x} bytes, \
                 {param_bytes_max:#x} max)"
            ));
        }
    }
    Ok(())
}

/// Parses one text, which `messages` call `name`.
///
/// # Errors
/// As [`compile`].
pub(super) fn parse(text: &str, name: &str, messages: &mut Messages) -> Result<ptx::Module> {
    if let Some(version) = version_of(text)
        && version > newest_version()
    {
        let (major, minor) = newest_version();
        let message =
            format!("Unsupported .version {}.{}; current version is '{major}.{minor}'", version.0, version.1);
        messages.refuse(name, &ptx::ParseError { line: version_line(text), message });
        return Err(CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
    }
    let module = ptx::Module::parse(text).map_err(|error| {
        messages.refuse(name, &error);
        CUresult::CUDA_ERROR_INVALID_PTX
    })?;
    if module.target_sm() > SM_VERSION {
        let message = format!("PTX for .target sm_{} does not run on sm_{SM_VERSION}", module.target_sm());
        messages.refuse(name, &ptx::ParseError { line: 0, message });
        return Err(CUresult::CUDA_ERROR_INVALID_PTX);
    }
    Ok(module)
}

fn version_of(text: &str) -> Option<(u32, u32)> {
    let number = skip_blank(text).strip_prefix(".version")?.split_whitespace().next()?;
    let (major, minor) = number.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

fn version_line(text: &str) -> u32 {
    let before = text.len() - skip_blank(text).len();
    u32::try_from(text[..before].matches('\n').count() + 1).unwrap_or(u32::MAX)
}

/// The newest PTX version that the simulated driver compiles (PTX ISA, section "Release Notes").
fn newest_version() -> (u32, u32) {
    newest_version_of(process::release().map_or(0, |release| release.cuda_version))
}

fn newest_version_of(driver: i32) -> (u32, u32) {
    let (major, minor) = ((driver / 1000).unsigned_abs(), (driver % 1000 / 10).unsigned_abs());
    match (major, minor) {
        (12, 0..=5) => (8, minor),
        // CUDA 12.6 brought no new version.
        (12, _) => (8, minor - 1),
        (major, minor) => (major.saturating_sub(4), minor),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_follow_the_release_notes() {
        for (driver, version) in [
            (11000, (7, 0)),
            (11080, (7, 8)),
            (12000, (8, 0)),
            (12050, (8, 5)),
            (12060, (8, 5)),
            (12080, (8, 7)),
            (12090, (8, 8)),
            (13000, (9, 0)),
            (13010, (9, 1)),
        ] {
            assert_eq!(newest_version_of(driver), version, "driver {driver}");
        }
    }

    #[test]
    fn comments_before_the_version_are_skipped() {
        let text = "// one\n/* two\n three */ .version 8.7\n.target sm_90";
        assert_eq!(version_of(text), Some((8, 7)));
        assert_eq!(version_line(text), 3);
        assert_eq!(texts(text.as_bytes()).unwrap(), [text]);
    }

    #[test]
    fn what_is_no_image_is_refused() {
        assert_eq!(texts(b"hello").unwrap_err(), CUresult::CUDA_ERROR_INVALID_IMAGE);
        assert_eq!(texts(b"").unwrap_err(), CUresult::CUDA_ERROR_INVALID_IMAGE);
        let mut elf = [0; 64];
        elf[..4].copy_from_slice(ELF_MAGIC);
        assert_eq!(texts(&elf).unwrap_err(), CUresult::CUDA_ERROR_INVALID_IMAGE);
        elf[18] = 190;
        assert_eq!(texts(&elf).unwrap_err(), CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU);
        // SAFETY: the array is a whole ELF header.
        let by_pointer = unsafe { texts_at(elf.as_ptr().cast()) };
        assert_eq!(by_pointer.unwrap_err(), CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU);
        // SAFETY: NUL-terminated.
        let by_pointer = unsafe { texts_at(c"x".as_ptr().cast()) };
        assert_eq!(by_pointer.unwrap_err(), CUresult::CUDA_ERROR_INVALID_IMAGE);
    }

    #[test]
    fn a_linked_image_is_read_back_and_a_cut_one_is_refused() {
        let both = ["first".to_owned(), String::new(), "third".to_owned()];
        let image = linked(&both);
        assert_eq!(texts(&image).unwrap(), both);
        // SAFETY: the image is whole.
        assert_eq!(unsafe { texts_at(image.as_ptr().cast()) }.unwrap(), both);
        for cut in 8..image.len() {
            assert_eq!(texts(&image[..cut]).unwrap_err(), CUresult::CUDA_ERROR_INVALID_IMAGE, "{cut}");
        }
    }
}
