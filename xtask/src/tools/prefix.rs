//! Programs of unpacked packages that are newer than the system. They need a newer libc, so the whole set of libraries
//! comes along, and the prefix's own dynamic loader starts them.

use std::path::Path;

/// A program of a prefix, started by the prefix's loader with the prefix's libraries. `program` is relative to it.
pub fn command(prefix: &Path, program: &str) -> [String; 4] {
    let inside = |path: &str| prefix.join(path).to_string_lossy().into_owned();
    let libraries = inside("usr/lib/x86_64-linux-gnu");
    [format!("{libraries}/ld-linux-x86-64.so.2"), "--library-path".into(), libraries, inside(program)]
}

/// A script that stands for the program, with options before those of its caller.
pub fn script(prefix: &Path, program: &str, options: &[String]) -> String {
    let words = command(prefix, program);
    let quoted: Vec<_> =
        words.iter().chain(options).map(|word| format!("'{}'", word.replace('\'', r"'\''"))).collect();
    format!("#!/bin/sh\n# Made by `cargo xtask`.\nexec {} \"$@\"\n", quoted.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_script_survives_a_strange_path() {
        let script = script(Path::new("/tmp/it's a place"), "usr/sbin/criu", &["-L".into()]);
        assert!(script.contains(r"exec '/tmp/it'\''s a place/usr/lib"), "{script}");
        assert!(script.ends_with("/usr/sbin/criu' '-L' \"$@\"\n"), "{script}");
    }
}
