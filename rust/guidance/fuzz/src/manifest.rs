//! Any bytes as a manifest, beside a segment that it may list.
use std::path::Path;
use tracekit_guidance::crc32c;
use tracekit_guidance::manifest::{file_name, Manifest, TAIL};
use tracekit_guidance::Dataset;

/// Runs one input.
pub fn run(data: &[u8]) {
    let mut bytes = data.to_vec();
    if data.first().is_none_or(|b| b & 7 != 0) && bytes.len() >= 16 + TAIL {
        let end = bytes.len() - TAIL;
        bytes[..8].copy_from_slice(b"\x89TKM\r\n\x1a\n");
        bytes[8..10].copy_from_slice(&1u16.to_le_bytes());
        bytes[end + 4..].copy_from_slice(b"TKME");
        let crc = crc32c(&bytes[..end]);
        bytes[end..end + 4].copy_from_slice(&crc.to_le_bytes());
    }
    let Ok(manifest) = Manifest::decode(&bytes, Path::new("m")) else { return };
    let again = manifest.encode().expect("a manifest that parses can be written");
    assert_eq!(Manifest::decode(&again, Path::new("m")).expect("and parsed again"), manifest);
    let dir = std::path::PathBuf::from(format!("/dev/shm/tracekit-fuzz-manifest-{}", std::process::id()));
    std::fs::remove_dir_all(&dir).ok();
    std::fs::create_dir_all(&dir).unwrap();
    for (i, e) in manifest.segments.iter().take(3).enumerate() {
        std::fs::write(dir.join(&e.name), &bytes[..bytes.len() / (i + 1)]).unwrap();
    }
    std::fs::write(dir.join(file_name(manifest.number)), &bytes).unwrap();
    // None of those files is the segment that the manifest lists.
    if !manifest.segments.is_empty() {
        assert!(Dataset::open_listed(&dir, Default::default()).is_err());
    }
    let _ = tracekit_guidance::manifest::commit(&dir);
}
