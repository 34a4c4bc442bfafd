//! A word of each thread.
//!
//! The library is loaded at the program's start, and its thread-local storage with it: two instructions address it like
//! the program's own. `thread_local!` in a library would call the dynamic linker each time.

/// Defines the module `$name` with the word `$symbol`, which is 0 in a new thread. Instructions elsewhere may name the
/// symbol.
macro_rules! thread_word {
    ($(#[$attribute:meta])* $name:ident, $symbol:literal) => {
        $(#[$attribute])*
        mod $name {
            std::arch::global_asm!(
                concat!(".pushsection .tbss.", $symbol, ",\"awT\",@nobits"),
                ".p2align 3",
                concat!(".hidden ", $symbol),
                concat!(".globl ", $symbol),
                concat!(".type ", $symbol, ",@object"),
                concat!(".size ", $symbol, ",8"),
                concat!($symbol, ":"),
                ".zero 8",
                ".popsection",
            );

            /// The calling thread's word.
            #[inline(always)]
            pub(super) fn get() -> usize {
                let word;
                // SAFETY: reads the calling thread's variable that is defined above.
                unsafe {
                    std::arch::asm!(
                        concat!("mov {word}, qword ptr [rip + ", $symbol, "@GOTTPOFF]"),
                        "mov {word}, qword ptr fs:[{word}]",
                        word = out(reg) word,
                        options(nostack, readonly, preserves_flags),
                    );
                }
                word
            }

            #[allow(dead_code, reason = "one of the words is written in instructions")]
            pub(super) fn set(word: usize) {
                // SAFETY: writes the calling thread's variable that is defined above.
                unsafe {
                    std::arch::asm!(
                        concat!("mov {place}, qword ptr [rip + ", $symbol, "@GOTTPOFF]"),
                        "mov qword ptr fs:[{place}], {word}",
                        place = out(reg) _,
                        word = in(reg) word,
                        options(nostack, preserves_flags),
                    );
                }
            }
        }
    };
}

pub(super) use thread_word;
