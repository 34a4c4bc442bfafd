//! The readers of a store, for tests with the corpus and for the fuzzer (`cargo xtask fuzz`): any bytes give an error or something sound, never a
//! panic. Each reader gets the bytes as they are, and with the checksum that they ought to have, since nothing else
//! would ever get past it.

use ckpt_snapshot::chunk::CHUNK_BYTES;
use ckpt_snapshot::codec::{Codec, Compression, Encoding, Key};
use ckpt_snapshot::pack::{Index, PackId};
use ckpt_snapshot::{Manifest, SnapshotId, sealed};
use std::os::unix::fs::PermissionsExt;
use std::sync::OnceLock;

/// Takes any bytes; panics at a fault.
pub type Entry = fn(&[u8]);

/// An entry by its name, which is also that of its corpus.
pub const ENTRIES: [(&str, Entry); 4] =
    [("manifest_v1", manifest_v1), ("manifest", manifest), ("index", index), ("chunk", chunk)];

/// The snapshot whose manifest the bytes are to be.
pub fn id() -> SnapshotId {
    "000003-20260921T141321Z".parse().expect("an ID")
}

/// The pack whose index the bytes are to be.
pub const PACK: PackId = PackId([7; 16]);

/// One with a key.
pub fn encrypting() -> &'static Codec {
    static CODEC: OnceLock<Codec> = OnceLock::new();
    CODEC.get_or_init(|| {
        let path = std::env::temp_dir().join(format!("ckpt-fuzz-key-{}", std::process::id()));
        std::fs::write(&path, (0..32).collect::<Vec<u8>>()).expect("a key file");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).expect("a private key file");
        let key = Key::from_file(&path).expect("a key");
        std::fs::remove_file(&path).expect("the key file goes");
        Codec::new(Compression::Auto, Some(&key))
    })
}

/// The manifest of version 1.
pub fn manifest_v1(bytes: &[u8]) {
    let check = |text: &[u8]| {
        if let Ok(manifest) = Manifest::decode(&id(), text) {
            assert_eq!(manifest.id, id());
            // Written and read again it is the same.
            let again = Manifest::decode(&id(), &manifest.encode()).expect("what was written reads");
            assert_eq!(format!("{again:?}"), format!("{manifest:?}"));
        }
    };
    check(bytes);
    let checksum = blake3::hash(bytes).to_hex();
    check(&[br#"{"checksum":""#, checksum.as_bytes(), br#"","body":"#, bytes, b"}"].concat());
}

/// The manifest of a packed snapshot.
pub fn manifest(bytes: &[u8]) {
    for codec in [&Codec::default(), encrypting()] {
        let check = |object: &[u8]| {
            if let Ok(manifest) = sealed::decode(&id(), object, codec) {
                let again = sealed::encode(&manifest, codec).expect("what was read is not too long");
                let again = sealed::decode(&id(), &again, codec).expect("what was written reads");
                assert_eq!(format!("{again:?}"), format!("{manifest:?}"));
            }
        };
        check(bytes);
        let body = codec.seal(&id().to_string(), bytes.to_vec());
        let mut object = b"CKPTSNAP\x01\0\0\0\0\0\0\0".to_vec();
        object.extend_from_slice(&codec.key_number().to_le_bytes());
        object.extend_from_slice(&(body.len() as u64).to_le_bytes());
        object.extend_from_slice(&body);
        object.extend_from_slice(&codec.checksum(&object));
        check(&object);
    }
}

/// The index of a pack.
pub fn index(bytes: &[u8]) {
    for codec in [&Codec::default(), encrypting()] {
        let check = |object: &[u8]| {
            if let Ok(index) = Index::decode(&PACK, object, codec) {
                assert_eq!(index.encode(codec), object, "one index has one form");
            }
        };
        check(bytes);
        let mut object = bytes.to_vec();
        if let Some(key_number) = object.get_mut(32..40) {
            key_number.copy_from_slice(&codec.key_number().to_le_bytes());
        }
        object.extend_from_slice(&codec.checksum(&object));
        check(&object);
    }
}

/// A chunk: the number of its encoding, its length, then what is stored.
pub fn chunk(bytes: &[u8]) {
    let Some((head, stored)) = bytes.split_first_chunk::<5>() else { return };
    let Some(encoding) = Encoding::of_number(head[0]) else { return };
    let raw_bytes = u32::from_le_bytes([head[1], head[2], head[3], head[4]]) as usize;
    for codec in [&Codec::default(), encrypting()] {
        let mut scratch = Vec::new();
        if let Ok(content) = codec.decode(&PACK, 64, encoding, stored, raw_bytes, &mut scratch) {
            assert_eq!(content.len(), raw_bytes);
        }
        assert!(scratch.capacity() <= 3 * CHUNK_BYTES + 64);
    }
    // And what is stored, as content.
    let content = &stored[..stored.len().min(CHUNK_BYTES)];
    let (mut scratch, mut back) = (Vec::new(), Vec::new());
    let (stored, encoding) = encrypting().encode(&PACK, 64, content, &mut scratch);
    let read = encrypting().decode(&PACK, 64, encoding, stored, content.len(), &mut back);
    assert_eq!(read.expect("it decodes"), content);
}
