//! The last output of the job, in memory: a resume cuts it off the user's log, and a terminal may be gone.

use crate::sys::letters;
use parking_lot::Mutex;
use std::collections::VecDeque;

/// How much output is held (bytes). Progress bars that redraw themselves take most of it.
const HELD_BYTES: usize = 32 << 10;
/// The most that is handed out: text of this length, in lines.
const TEXT_BYTES: usize = 4 << 10;

/// The last output of all streams of a job, in the order in which it was read.
#[derive(Default)]
pub struct Tail {
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    bytes: VecDeque<u8>,
    /// Something before them was dropped.
    is_cut: bool,
}

impl Tail {
    pub(super) fn push(&self, chunk: &[u8]) {
        let mut held = self.held.lock();
        held.bytes.extend(chunk);
        let excess = held.bytes.len().saturating_sub(HELD_BYTES);
        held.is_cut |= excess > 0;
        held.bytes.drain(..excess);
    }

    /// The last lines, at most 4 KiB, as a terminal would show them: without escape sequences, and of a line that was
    /// drawn over itself (`\r`), its last version.
    #[must_use]
    pub fn text(&self) -> String {
        let (bytes, is_cut) = {
            let held = self.held.lock();
            (held.bytes.iter().copied().collect::<Vec<_>>(), held.is_cut)
        };
        let text = String::from_utf8_lossy(&bytes);
        // The first line is incomplete, and may begin within a letter or an escape sequence.
        let whole = text.split_once('\n').filter(|_| is_cut).map_or(&*text, |(_, rest)| rest);
        let text = anstream::adapter::strip_str(whole).to_string();
        let lines: Vec<_> = text.trim_end().lines().map(last_version).collect();
        let mut left = TEXT_BYTES;
        let fits = |line: &&String| {
            let is_fitting = line.len() < left;
            left = left.saturating_sub(line.len() + 1);
            is_fitting
        };
        let count = lines.iter().rev().take_while(fits).count();
        match lines.last() {
            // Of a single long line, its end.
            Some(last) if count == 0 => {
                let begin = (last.len() - TEXT_BYTES..).find(|&at| last.is_char_boundary(at));
                last[begin.unwrap_or(last.len())..].to_owned()
            }
            _ => lines[lines.len() - count..].join("\n").trim_start_matches('\n').to_owned(),
        }
    }
}

/// What a terminal shows of a line, without control characters.
fn last_version(line: &str) -> String {
    let drawn = line.trim_end_matches('\r').rsplit('\r').next().unwrap_or_default();
    drawn.trim_end().chars().filter(|letter| !letters::is_control(*letter) || *letter == '\t').collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(chunks: &[&[u8]]) -> String {
        let tail = Tail::default();
        chunks.iter().for_each(|chunk| tail.push(chunk));
        tail.text()
    }

    #[test]
    fn the_last_lines_are_as_a_terminal_shows_them() {
        assert_eq!(text(&[]), "");
        assert_eq!(text(&[b"\n\none\n  two", b" three\n\n"]), "one\n  two three");
        assert_eq!(text(&[b" 10%|#  |\r 20%|## |\r\nend\r\n"]), " 20%|## |\nend");
        assert_eq!(text(&[b"\x1b[1;31merr\x1b[0mor\x07\n"]), "error");
        assert_eq!(text(&[b"\xff\xc3\xa4"]), "\u{fffd}\u{e4}");
    }

    #[test]
    fn it_is_bounded_and_keeps_the_newest() {
        let tail = Tail::default();
        for number in 0..100_000 {
            tail.push(format!("line {number}\n").as_bytes());
        }
        assert!(tail.held.lock().bytes.len() <= HELD_BYTES);
        let text = tail.text();
        assert!(text.len() <= TEXT_BYTES && text.len() > TEXT_BYTES - 20, "{}", text.len());
        assert!(text.starts_with("line ") && text.ends_with("\nline 99999"), "{text}");
        // A line without an end, of letters with two bytes each.
        let long = "\u{e4}".repeat(HELD_BYTES);
        let cut = self::text(&[b"x", long.as_bytes()]);
        assert!(cut.len() <= TEXT_BYTES && cut.chars().all(|letter| letter == '\u{e4}'), "{cut}");
    }
}
