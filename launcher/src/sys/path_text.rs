//! Paths as text: snapshots, records and messages between processes are JSON, and a path may have bytes that are not UTF-8.
//! Such a byte is written as a NUL, which no path has, and two hexadecimal digits.

use std::borrow::Cow;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use procfs_core::FromBufRead;
use procfs_core::process::MemoryMaps;

/// The text of a path. Its components are the texts of the path's components.
#[must_use]
pub fn path_text(path: impl AsRef<Path>) -> String {
    bytes_text(path.as_ref().as_os_str().as_bytes())
}

/// The same, of a path's bytes.
#[must_use]
pub fn bytes_text(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        for byte in chunk.invalid() {
            let _ = write!(text, "\0{byte:02x}");
        }
    }
    text
}

/// The path of a text. Of a text that is none, the path has a NUL, which every system call refuses.
#[must_use]
pub fn text_path(text: &str) -> Cow<'_, Path> {
    if !text.contains('\0') {
        return Cow::Borrowed(Path::new(text));
    }
    let mut parts = text.split('\0');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let code = part.get(..2).and_then(|digits| u8::from_str_radix(digits, 16).ok());
        match code.filter(|byte| !byte.is_ascii()) {
            Some(byte) => {
                bytes.push(byte);
                bytes.extend_from_slice(&part.as_bytes()[2..]);
            }
            None => {
                bytes.push(0);
                bytes.extend_from_slice(part.as_bytes());
            }
        }
    }
    Cow::Owned(PathBuf::from(OsString::from_vec(bytes)))
}

/// What is shown of a path's text: bytes that are not UTF-8 are replaced.
#[must_use]
pub fn shown(text: &str) -> Cow<'_, str> {
    match text_path(text) {
        Cow::Borrowed(_) => Cow::Borrowed(text),
        Cow::Owned(path) => Cow::Owned(path.to_string_lossy().into_owned()),
    }
}

/// The text of a file of /proc. Names of files and threads in it may have bytes that are not UTF-8, which are replaced.
///
/// # Errors
/// When the file cannot be read.
pub fn read_text(path: impl AsRef<Path>) -> io::Result<String> {
    Ok(String::from_utf8_lossy(&fs::read(path)?).into_owned())
}

/// The memory mappings in a process's `maps` or `smaps`. Their paths are texts as of [`path_text`].
///
/// # Errors
/// When the file cannot be read.
pub fn read_maps(path: impl AsRef<Path>) -> io::Result<MemoryMaps> {
    MemoryMaps::from_buf_read(bytes_text(&fs::read(path)?).as_bytes()).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;

    #[test]
    fn every_path_comes_back() {
        let all: [&[u8]; 6] =
            [b"/plain", b"/caf\xe9", b"/\xff\xfe/\xe2\x82", "/ü/é".as_bytes(), b"\xe9e9", b""];
        for bytes in all {
            let path = Path::new(OsStr::from_bytes(bytes));
            let text = path_text(path);
            assert_eq!(text_path(&text), path);
            assert_eq!(text.contains('\0'), path.to_str().is_none());
            let parts = Path::new(&text)
                .components()
                .map(|part| text_path(part.as_os_str().to_str().unwrap()).into_owned());
            assert_eq!(parts.collect::<PathBuf>(), path);
        }
        assert_eq!(path_text(OsStr::from_bytes(b"/a\xe9b")), "/a\0e9b");
        assert_eq!(shown("/a\0e9b"), "/a\u{fffd}b");
    }

    /// A text that somebody else has made.
    #[test]
    fn texts_of_no_path_are_refused_by_the_system() {
        for text in ["/a\0", "/a\0zz", "/a\x0041", "/a\x002f", "/\0\0e9"] {
            let error = fs::File::open(text_path(text)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{text:?}");
        }
    }
}
