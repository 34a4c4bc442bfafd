//! Chunks through the codec and back: what comes out is what went in, or an error.

mod common;

use ckpt_snapshot::chunk::CHUNK_BYTES;
use ckpt_snapshot::codec::{Codec, Compression, Encoding, Key, Packing};
use ckpt_snapshot::pack::{FormatError, PackId};
use common::noise;
use proptest::prelude::*;
use std::os::unix::fs::PermissionsExt;

const PACK: PackId = PackId([7; 16]);
const OTHER_PACK: PackId = PackId([8; 16]);

fn key(seed: u8) -> Key {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("key");
    std::fs::write(&path, (seed..seed + 32).collect::<Vec<_>>()).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o400)).unwrap();
    Key::from_file(&path).unwrap()
}

/// Floats between -1 and 1, like weights: `bytes` of 4-byte ones, or of their upper halves.
fn floats(bytes: usize, width: usize, seed: u64) -> Vec<u8> {
    let noise = noise(seed, bytes.div_ceil(width) * 4);
    let numbers = noise.as_chunks::<4>().0.iter().map(|four| i32::from_le_bytes(*four) as f32 / 2e9);
    let mut content: Vec<u8> =
        numbers.flat_map(|number| number.to_le_bytes()[4 - width..].to_vec()).collect();
    content.truncate(bytes);
    content
}

fn content() -> impl Strategy<Value = Vec<u8>> {
    let bytes = prop_oneof![4 => 1..2000_usize, 4 => 1..200_000_usize, 1 => Just(CHUNK_BYTES)];
    (bytes, 0..6_u8, any::<u64>()).prop_map(|(bytes, kind, seed)| match kind {
        0 => noise(seed, bytes),
        1 => floats(bytes, 4, seed),
        2 => floats(bytes, 2, seed),
        3 => vec![seed as u8; bytes],
        4 => b"loss 0.25 step ".iter().copied().cycle().take(bytes).collect(),
        // Changes in the middle, which makes the sample misleading.
        _ => [floats(bytes / 2, 4, seed), noise(seed, bytes - bytes / 2)].concat(),
    })
}

fn codec() -> impl Strategy<Value = Codec> {
    let compression = prop_oneof![
        Just(Compression::None),
        Just(Compression::Auto),
        (1..=5_i32).prop_map(|level| Compression::Zstd { level }),
    ];
    (compression, any::<bool>())
        .prop_map(|(compression, encrypted)| Codec::new(compression, encrypted.then(|| key(1)).as_ref()))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn what_goes_in_comes_out(codec in codec(), content in content(), offset in any::<u64>()) {
        let (mut scratch, mut back) = (noise(1, 100), noise(2, 100));
        let (stored, encoding) = codec.encode(&PACK, offset, &content, &mut scratch);
        prop_assert!(stored.len() <= content.len() + codec.overhead_bytes());
        prop_assert_eq!(Encoding::of_number(encoding.number()), Some(encoding));
        let decoded = codec.decode(&PACK, offset, encoding, stored, content.len(), &mut back).unwrap();
        prop_assert!(decoded == content);
        for raw_bytes in [0, content.len() - 1, content.len() + 1, CHUNK_BYTES + 1, usize::MAX - 100] {
            let decoded = codec.decode(&PACK, offset, encoding, stored, raw_bytes, &mut back);
            prop_assert!(decoded.is_err(), "{} bytes instead of {}", raw_bytes, content.len());
        }
    }

    #[test]
    fn altered_bytes_never_give_more_than_was_asked_for(
        codec in codec(), content in content(), at in any::<prop::sample::Index>(), bit in 0..8_u8, cut in any::<bool>(),
    ) {
        let (mut scratch, mut back) = (Vec::new(), Vec::new());
        let (stored, encoding) = codec.encode(&PACK, 64, &content, &mut scratch);
        let mut altered = stored.to_vec();
        let at = at.index(altered.len());
        if cut { altered.truncate(at) } else { altered[at] ^= 1 << bit }
        match codec.decode(&PACK, 64, encoding, &altered, content.len(), &mut back) {
            Err(_) => {}
            Ok(decoded) => {
                prop_assert_eq!(decoded.len(), content.len());
                prop_assert_eq!(codec.key_number(), 0, "what is encrypted cannot be altered");
            }
        }
    }

    #[test]
    fn encrypted_chunks_are_bound_to_their_place(content in content(), compression in 0..2_u8) {
        let compression = [Compression::None, Compression::Auto][usize::from(compression)];
        let codec = Codec::new(compression, Some(&key(1)));
        let (mut scratch, mut back) = (Vec::new(), Vec::new());
        let (stored, encoding) = codec.encode(&PACK, 64, &content, &mut scratch);
        let mut decode = |codec: &Codec, pack, offset, encoding| {
            codec.decode(pack, offset, encoding, stored, content.len(), &mut back).map(|_| ())
        };
        prop_assert_eq!(decode(&codec, &PACK, 64, encoding), Ok(()));
        prop_assert!(decode(&codec, &PACK, 65, encoding).is_err());
        prop_assert!(decode(&codec, &OTHER_PACK, 64, encoding).is_err());
        prop_assert!(decode(&Codec::new(compression, Some(&key(2))), &PACK, 64, encoding).is_err());
        let no_key = decode(&Codec::default(), &PACK, 64, encoding);
        prop_assert!(matches!(no_key, Err(FormatError::Key(_))));
        for number in (0..=255).filter(|number| *number != encoding.number()) {
            if let Some(other) = Encoding::of_number(number) {
                prop_assert!(matches!(other, Encoding::Raw | Encoding::Compressed(_))
                    || decode(&codec, &PACK, 64, other).is_err());
            }
        }
    }

    #[test]
    fn arbitrary_bytes_never_give_more_than_was_asked_for(
        stored in prop::collection::vec(any::<u8>(), 0..5000), raw_bytes in 0..6000_usize, number in any::<u8>(),
    ) {
        for codec in [Codec::default(), Codec::new(Compression::Auto, Some(&key(1)))] {
            let Some(encoding) = Encoding::of_number(number & 0x83) else { continue };
            let mut scratch = Vec::new();
            if let Ok(decoded) = codec.decode(&PACK, 0, encoding, &stored, raw_bytes, &mut scratch) {
                prop_assert_eq!(decoded.len(), raw_bytes);
            }
        }
    }

    #[test]
    fn sealed_records_open_for_their_context_only(record in prop::collection::vec(any::<u8>(), 0..2000)) {
        let codec = Codec::new(Compression::None, Some(&key(1)));
        let sealed = codec.seal("one", record.clone());
        prop_assert_ne!(&sealed, &codec.seal("one", record.clone()), "each time another salt");
        prop_assert_eq!(codec.unseal("one", sealed.clone()).unwrap(), record);
        prop_assert!(codec.unseal("two", sealed.clone()).is_err());
        prop_assert!(Codec::new(Compression::None, Some(&key(2))).unseal("one", sealed.clone()).is_err());
        for length in 0..40.min(sealed.len()) {
            prop_assert!(codec.unseal("one", sealed[..length].to_vec()).is_err());
        }
    }
}

fn encoding_of(compression: Compression, content: &[u8]) -> (Encoding, f64) {
    let mut scratch = Vec::new();
    let (stored, encoding) = Codec::new(compression, None).encode(&PACK, 64, content, &mut scratch);
    (encoding, stored.len() as f64 / content.len() as f64)
}

#[test]
fn each_kind_of_content_is_stored_in_the_way_that_suits_it() {
    let auto = |content: &[u8]| encoding_of(Compression::Auto, content);
    let (encoding, share) = auto(&floats(CHUNK_BYTES, 4, 1));
    assert_eq!(encoding, Encoding::Compressed(Packing::Planes4));
    assert!(share < 0.9, "{share}");
    let (encoding, share) = auto(&floats(CHUNK_BYTES, 2, 1));
    assert_eq!(encoding, Encoding::Compressed(Packing::Planes2));
    assert!(share < 0.8, "{share}");
    let text = b"step 1: loss 0.25\n".repeat(10_000);
    assert_eq!(auto(&text).0, Encoding::Compressed(Packing::Zstd));
    let zstd = Compression::Zstd { level: 3 };
    assert_eq!(encoding_of(zstd, &text).0, Encoding::Compressed(Packing::Zstd));
    for compression in [Compression::None, Compression::Auto, zstd] {
        assert_eq!(encoding_of(compression, &noise(1, CHUNK_BYTES)), (Encoding::Raw, 1.0), "{compression}");
    }
    assert_eq!(encoding_of(Compression::None, &text).0, Encoding::Raw);
}

#[test]
fn numbers_on_disk_stay_what_they_are() {
    let known = [
        (0, Encoding::Raw),
        (1, Encoding::Compressed(Packing::Zstd)),
        (2, Encoding::Compressed(Packing::Planes2)),
        (3, Encoding::Compressed(Packing::Planes4)),
        (0x80, Encoding::Encrypted(None)),
        (0x81, Encoding::Encrypted(Some(Packing::Zstd))),
        (0x82, Encoding::Encrypted(Some(Packing::Planes2))),
        (0x83, Encoding::Encrypted(Some(Packing::Planes4))),
    ];
    for number in 0..=255 {
        let expected = known.iter().find(|(of, _)| *of == number).map(|(_, encoding)| *encoding);
        assert_eq!(Encoding::of_number(number), expected, "{number}");
        assert!(expected.is_none_or(|encoding| encoding.number() == number));
    }
}

#[test]
fn names_and_checksums_depend_on_the_key() {
    let codecs = [
        Codec::default(),
        Codec::new(Compression::None, Some(&key(1))),
        Codec::new(Compression::None, Some(&key(2))),
    ];
    assert_eq!(codecs[0].id(b"x").0, *blake3::hash(b"x").as_bytes());
    assert_eq!(codecs[0].key_number(), 0);
    for (index, one) in codecs.iter().enumerate() {
        for other in &codecs[..index] {
            assert_ne!(one.id(b"x"), other.id(b"x"));
            assert_ne!(one.checksum(b"x"), other.checksum(b"x"));
            assert_ne!(one.key_number(), other.key_number());
        }
    }
    assert_ne!(codecs[1].id(b"x").0, codecs[1].checksum(b"x"), "one does not stand for the other");
}

#[test]
fn compressions_are_named() {
    for (text, expected) in [
        ("none", Compression::None),
        ("auto", Compression::Auto),
        ("zstd", Compression::Zstd { level: 3 }),
        ("zstd:19", Compression::Zstd { level: 19 }),
    ] {
        let compression: Compression = text.parse().unwrap();
        assert_eq!(compression, expected);
        assert_eq!(compression.to_string().parse(), Ok(expected));
    }
    for bad in ["", "lz4", "zstd:", "zstd:0", "zstd:20", "zstd:-1", "Auto"] {
        assert!(bad.parse::<Compression>().is_err(), "{bad}");
    }
}
