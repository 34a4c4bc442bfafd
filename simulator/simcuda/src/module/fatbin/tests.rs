use super::*;

/// What `fatbinary --create … --compress-mode none|speed|size --image3 kind=ptx,sm=80,…` of CUDA 13.5 made of one
/// PTX text.
const PLAIN: &[u8] = include_bytes!("add_one_plain.fatbin");
const LZ4: &[u8] = include_bytes!("add_one_lz4.fatbin");
const ZSTD: &[u8] = include_bytes!("add_one_zstd.fatbin");

fn text(container: &[u8]) -> String {
    String::from_utf8(newest_ptx(container, 90).unwrap()).unwrap().trim_end_matches('\0').to_owned()
}

#[test]
fn ptx_is_found_packed_and_unpacked() {
    let plain = text(PLAIN);
    assert!(plain.starts_with(".version 8.0"), "{plain}");
    assert!(plain.contains(".entry add_one"), "{plain}");
    // The tool drops the blanks that end the text when it packs.
    assert_eq!(text(LZ4).trim_end(), plain.trim_end());
    assert_eq!(text(ZSTD).trim_end(), plain.trim_end());
}

/// A container of entries, each of a kind and for an architecture.
fn container(entries: &[(u16, u32, &[u8])]) -> Vec<u8> {
    let mut body = Vec::new();
    for (kind, architecture, payload) in entries {
        let mut header = [0; ENTRY_HEADER_BYTES];
        header[..2].copy_from_slice(&kind.to_le_bytes());
        header[4..8].copy_from_slice(&(ENTRY_HEADER_BYTES as u32).to_le_bytes());
        header[8..16].copy_from_slice(&(payload.len() as u64).to_le_bytes());
        header[28..32].copy_from_slice(&architecture.to_le_bytes());
        body.extend_from_slice(&header);
        body.extend_from_slice(payload);
    }
    let mut all = CONTAINER_MAGIC.to_le_bytes().to_vec();
    all.extend_from_slice(&1u16.to_le_bytes());
    all.extend_from_slice(&(CONTAINER_HEADER_BYTES as u16).to_le_bytes());
    all.extend_from_slice(&(body.len() as u64).to_le_bytes());
    all.extend_from_slice(&body);
    all
}

const KIND_ELF: u16 = 2;

#[test]
fn the_newest_ptx_that_the_device_can_run_is_taken() {
    let all = container(&[
        (KIND_PTX, 70, b"seventy"),
        (KIND_PTX, 90, b"ninety"),
        (KIND_ELF, 90, b"machine code"),
        (KIND_PTX, 100, b"hundred"),
        (KIND_PTX, 90, b"ninety again"),
    ]);
    assert_eq!(newest_ptx(&all, 90).unwrap(), b"ninety");
    assert_eq!(newest_ptx(&all, 86).unwrap(), b"seventy");
}

#[test]
fn without_ptx_there_is_nothing_to_run() {
    let only_code = container(&[(KIND_ELF, 90, b"machine code")]);
    assert_eq!(newest_ptx(&only_code, 90).unwrap_err(), CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU);
    let too_new = container(&[(KIND_PTX, 100, b"hundred")]);
    assert_eq!(newest_ptx(&too_new, 90).unwrap_err(), CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU);
    assert_eq!(newest_ptx(&container(&[]), 90).unwrap_err(), CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU);
}

#[test]
fn damage_is_found() {
    for whole in [PLAIN, LZ4, ZSTD] {
        for cut in 4..whole.len() {
            assert_eq!(
                newest_ptx(&whole[..cut], 90).unwrap_err(),
                CUresult::CUDA_ERROR_INVALID_IMAGE,
                "{cut}"
            );
        }
    }
    let mut too_long = ZSTD.to_vec();
    too_long[CONTAINER_HEADER_BYTES + 56] ^= 0xff;
    assert_eq!(newest_ptx(&too_long, 90).unwrap_err(), CUresult::CUDA_ERROR_INVALID_IMAGE);
}

#[test]
fn a_wrapper_leads_to_its_container() {
    let wrapper = [u64::from(WRAPPER_MAGIC) | 1 << 32, PLAIN.as_ptr().addr() as u64, 0];
    // SAFETY: a whole wrapper.
    assert_eq!(unsafe { container_of(wrapper.as_ptr().cast()) }.addr(), PLAIN.as_ptr().addr());
    // SAFETY: a whole container.
    assert_eq!(unsafe { container_of(PLAIN.as_ptr().cast()) }.addr(), PLAIN.as_ptr().addr());
    // SAFETY: NUL-terminated.
    assert_eq!(unsafe { container_of(c"\xb1".as_ptr().cast()) }.addr(), c"\xb1".as_ptr().addr());
}
