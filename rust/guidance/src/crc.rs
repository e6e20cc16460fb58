//! CRC32C (Castagnoli, iSCSI), which every checksum of the format is.
use crc_fast::{crc32_iscsi, CrcAlgorithm, Digest};

/// The checksum of `bytes`.
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc32_iscsi(bytes)
}

/// The checksum of bytes whose checksum is `crc`, followed by `bytes`.
pub fn crc32c_append(crc: u32, bytes: &[u8]) -> u32 {
    if bytes.is_empty() {
        return crc;
    }
    let mut sum = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(!crc));
    sum.update(bytes);
    sum.finalize() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_standard_vectors_and_every_split() {
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8A91_36AA);
        let bytes: Vec<u8> = (0..700u32).map(|i| (i * 31) as u8).collect();
        for at in 0..bytes.len() {
            assert_eq!(crc32c_append(crc32c(&bytes[..at]), &bytes[at..]), crc32c(&bytes));
        }
    }
}
