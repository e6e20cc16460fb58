//! Numbered manifests: which sealed segments a dataset had at one moment.
//!
//! A manifest is written once and never changed. It repeats from each segment what recognises it, so that a segment
//! that was cut, replaced or deleted since is an error and not other data.
use crate::crc::crc32c;
use crate::error::{Error, Result};
use crate::folder::segment_files;
use crate::index::Index;
use crate::layout::{put, u16_at, u32_at, u64_at, FileHeader, Postscript, MAJOR};
use crate::segment::{read_head, read_tail};
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// First bytes of a manifest.
pub const MAGIC: [u8; 8] = *b"\x89TKM\r\n\x1a\n";
/// Bytes before the entries.
pub const HEAD: usize = 48;
/// Bytes of an entry.
pub const ENTRY: usize = 80;
/// Bytes after the entries.
pub const TAIL: usize = 8;
/// Most segments of a manifest.
pub const MAX_SEGMENTS: usize = 1 << 16;
/// Manifests that a folder keeps.
const KEPT: usize = 16;
const NAME: usize = 32;

/// A sealed segment as a manifest lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// File name, `seg-….tkg`.
    pub name: String,
    /// Its identity.
    pub uuid: [u8; 16],
    /// Its length.
    pub bytes: u64,
    /// Time of creation, nanoseconds since 1970.
    pub created_ns: u64,
    /// Committed trajectories.
    pub trajectories: u32,
    /// Chunks.
    pub chunks: u32,
    /// CRC32C of its postscript, which holds the checksum of the index, which holds those of the records.
    pub post_crc: u32,
    /// CRC32C of its schema.
    pub schema_crc: u32,
}

impl Entry {
    /// What a manifest says of a sealed segment.
    pub fn new(name: &str, header: &FileHeader, post: &Postscript, index: &Index) -> Self {
        Entry {
            name: name.to_owned(),
            uuid: header.uuid,
            bytes: post.file_len,
            created_ns: header.created_ns,
            trajectories: index.n_trajs() as u32,
            chunks: index.n_chunks() as u32,
            post_crc: crc32c(&post.encode()),
            schema_crc: header.schema_crc,
        }
    }

    /// Whether the segment is the one that was listed.
    pub fn matches(&self, header: &FileHeader, post: &Postscript, index: &Index) -> bool {
        *self == Entry::new(&self.name, header, post, index)
    }
}

/// The sealed segments of a dataset.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Manifest {
    /// Its number, from 1.
    pub number: u64,
    /// Number of the manifest that it follows; 0 if it is the first.
    pub parent: u64,
    /// CRC32C of that one's bytes.
    pub parent_crc: u32,
    /// When it was written, nanoseconds since 1970.
    pub created_ns: u64,
    /// The segments, by name.
    pub segments: Vec<Entry>,
}

/// `manifest-000001`.
pub fn file_name(number: u64) -> String {
    format!("manifest-{number:06}")
}

/// The number in a manifest's file name.
pub fn number_of(name: &str) -> Option<u64> {
    let number = name.strip_prefix("manifest-")?.parse().ok()?;
    (number > 0 && file_name(number) == name).then_some(number)
}

/// A segment's name is never a path.
fn is_segment_name(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    name.len() <= NAME
        && name.strip_prefix("seg-").and_then(|n| n.strip_suffix(".tkg")).is_some_and(|n| n.bytes().all(plain))
}

fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map(|d| d.as_nanos() as u64).unwrap_or(0)
}

impl Manifest {
    /// The manifest after `parent` (with the checksum of its bytes) that lists these segments.
    pub fn after(parent: Option<(&Manifest, u32)>, number: u64, mut segments: Vec<Entry>) -> Self {
        segments.sort_by(|a, b| a.name.cmp(&b.name));
        let (of, parent_crc) = parent.map_or((0, 0), |(m, crc)| (m.number, crc));
        Manifest { number, parent: of, parent_crc, created_ns: now_ns(), segments }
    }

    /// The bytes on disk.
    pub fn encode(&self) -> Result<Vec<u8>> {
        if self.segments.len() > MAX_SEGMENTS {
            return Err(Error::Usage(format!(
                "{} segments in a manifest, at most {MAX_SEGMENTS}",
                self.segments.len()
            )));
        }
        if let Some(bad) = self.segments.iter().find(|e| !is_segment_name(&e.name)) {
            return Err(Error::Usage(format!("'{}' is no segment name: rename it to seg-….tkg", bad.name)));
        }
        let mut b = vec![0u8; HEAD + ENTRY * self.segments.len() + TAIL];
        put(&mut b, 0, &MAGIC);
        put(&mut b, 8, &MAJOR.to_le_bytes());
        put(&mut b, 12, &(self.segments.len() as u32).to_le_bytes());
        put(&mut b, 16, &self.number.to_le_bytes());
        put(&mut b, 24, &self.parent.to_le_bytes());
        put(&mut b, 32, &self.created_ns.to_le_bytes());
        put(&mut b, 40, &self.parent_crc.to_le_bytes());
        for (i, e) in self.segments.iter().enumerate() {
            let at = HEAD + ENTRY * i;
            put(&mut b, at, e.name.as_bytes());
            put(&mut b, at + 32, &e.uuid);
            put(&mut b, at + 48, &e.bytes.to_le_bytes());
            put(&mut b, at + 56, &e.created_ns.to_le_bytes());
            put(&mut b, at + 64, &e.trajectories.to_le_bytes());
            put(&mut b, at + 68, &e.chunks.to_le_bytes());
            put(&mut b, at + 72, &e.post_crc.to_le_bytes());
            put(&mut b, at + 76, &e.schema_crc.to_le_bytes());
        }
        let end = b.len() - TAIL;
        put(&mut b, end + 4, b"TKME");
        let crc = crc32c(&b[..end]);
        put(&mut b, end, &crc.to_le_bytes());
        Ok(b)
    }

    /// Parses and checks the bytes of manifest `path`.
    pub fn decode(b: &[u8], path: &Path) -> Result<Self> {
        let bad = |at: usize, what: &str| Err(Error::corrupt(path, at as u64, what));
        if b.len() < HEAD + TAIL || b[..8] != MAGIC {
            return bad(0, "this is not a manifest");
        }
        if u16_at(b, 8) != MAJOR {
            return Err(Error::Unsupported(format!(
                "{} has format version {}, this build reads {MAJOR}: use the tracekit that wrote it",
                path.display(),
                u16_at(b, 8)
            )));
        }
        let (n, end) = (u32_at(b, 12) as usize, b.len() - TAIL);
        if n > MAX_SEGMENTS || end != HEAD + ENTRY * n || b[end + 4..] != *b"TKME" {
            return bad(12, "its length does not fit its number of segments");
        }
        if crc32c(&b[..end]) != u32_at(b, end) {
            return bad(end, "manifest checksum");
        }
        let mut segments: Vec<Entry> = Vec::with_capacity(n);
        for (i, e) in b[HEAD..end].chunks_exact(ENTRY).enumerate() {
            let len = e[..NAME].iter().position(|c| *c == 0).unwrap_or(NAME);
            let name = std::str::from_utf8(&e[..len]).ok().filter(|n| is_segment_name(n));
            let Some(name) = name.filter(|_| e[len..NAME].iter().all(|c| *c == 0)) else {
                return bad(HEAD + ENTRY * i, "an entry's name is not a segment's");
            };
            if segments.last().is_some_and(|last| last.name.as_str() >= name) {
                return bad(HEAD + ENTRY * i, "segments are not in the order of their names");
            }
            segments.push(Entry {
                name: name.to_owned(),
                uuid: e[32..48].try_into().unwrap(),
                bytes: u64_at(e, 48),
                created_ns: u64_at(e, 56),
                trajectories: u32_at(e, 64),
                chunks: u32_at(e, 68),
                post_crc: u32_at(e, 72),
                schema_crc: u32_at(e, 76),
            });
        }
        let (number, parent) = (u64_at(b, 16), u64_at(b, 24));
        if number == 0 || parent >= number {
            return bad(16, "its number does not follow its parent's");
        }
        Ok(Manifest { number, parent, parent_crc: u32_at(b, 40), created_ns: u64_at(b, 32), segments })
    }
}

/// A manifest and the CRC32C of its bytes.
pub type Found = (Manifest, u32);

/// Numbers of a folder's manifests, newest first.
pub fn numbers(dir: &Path) -> Result<Vec<u64>> {
    let list = std::fs::read_dir(dir).map_err(|e| Error::io(dir, "list", e))?;
    let mut found = Vec::new();
    for entry in list {
        let name = entry.map_err(|e| Error::io(dir, "list", e))?.file_name();
        found.extend(name.to_str().and_then(number_of));
    }
    found.sort_unstable_by(|a, b| b.cmp(a));
    Ok(found)
}

/// The manifest in file `path` and the checksum of its bytes.
pub fn read(path: &Path) -> Result<Found> {
    let file = File::open(path).map_err(|e| Error::io(path, "open", e))?;
    let mut bytes = Vec::new();
    let most = (HEAD + ENTRY * MAX_SEGMENTS + TAIL) as u64;
    file.take(most + 1).read_to_end(&mut bytes).map_err(|e| Error::io(path, "read", e))?;
    let manifest = Manifest::decode(&bytes, path)?;
    if path.file_name().and_then(|n| n.to_str()).and_then(number_of) != Some(manifest.number) {
        return Err(Error::corrupt(path, 16, format!("it says that it is manifest {}", manifest.number)));
    }
    Ok((manifest, crc32c(&bytes)))
}

/// A folder's newest manifest that holds, with the checksum of its bytes, and why newer ones do not.
pub fn latest(dir: &Path) -> Result<(Option<Found>, Vec<String>)> {
    let mut refused = Vec::new();
    for number in numbers(dir)? {
        match read(&dir.join(file_name(number))) {
            Ok(found) => return Ok((Some(found), refused)),
            // Pruned between the listing and the opening.
            Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {}
            Err(e @ (Error::Corrupt { .. } | Error::Unsupported(_))) => refused.push(e.to_string()),
            Err(e) => return Err(e),
        }
    }
    Ok((None, refused))
}

/// The entry of a sealed segment file whose header and index hold.
pub fn entry_of(path: &Path) -> Result<Entry> {
    let file = File::open(path).map_err(|e| Error::io(path, "open", e))?;
    let len = file.metadata().map_err(|e| Error::io(path, "stat", e))?.len();
    let (header, _) = read_head(&file, path)?;
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    match read_tail(&file, path, len, &header)? {
        Ok((post, index)) => Ok(Entry::new(name, &header, &post, &index)),
        Err(damage) => Err(Error::corrupt(path, damage.offset, damage.what)),
    }
}

/// The sealed segments of a folder. What the manifest `known` lists is taken from there.
pub fn sealed(dir: &Path, known: Option<&Manifest>) -> Result<Vec<Entry>> {
    let mut entries = Vec::new();
    for path in segment_files(dir)? {
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        if !name.ends_with(".tkg") {
            continue;
        }
        let len = std::fs::metadata(&path).map(|m| m.len()).ok();
        match known.and_then(|m| m.segments.iter().find(|e| e.name == name && Some(e.bytes) == len)) {
            Some(e) => entries.push(e.clone()),
            None => entries.push(entry_of(&path)?),
        }
    }
    Ok(entries)
}

/// Writes the next manifest of a folder: its sealed segments of now. Any number of writers may do so at once. Returns
/// the newest manifest, which is an old one if nothing changed.
pub fn commit(dir: &Path) -> Result<Manifest> {
    let mut tag = [0u8; 4];
    getrandom::fill(&mut tag).map_err(|e| Error::io(dir, "name a file in", std::io::Error::other(e)))?;
    let temp = dir.join(format!("manifest.{:08x}.tmp", u32::from_le_bytes(tag)));
    let result = commit_by(dir, &temp);
    std::fs::remove_file(&temp).ok();
    result
}

fn commit_by(dir: &Path, temp: &PathBuf) -> Result<Manifest> {
    loop {
        let (parent, _) = latest(dir)?;
        let entries = sealed(dir, parent.as_ref().map(|p| &p.0))?;
        if let Some((m, _)) = parent.as_ref().filter(|p| p.0.segments == entries) {
            return Ok(m.clone());
        }
        // Not the parent's number plus 1: a damaged manifest keeps its number.
        let number = numbers(dir)?.first().map_or(1, |n| n + 1);
        let next = Manifest::after(parent.as_ref().map(|(m, crc)| (m, *crc)), number, entries);
        let bytes = next.encode()?;
        let mut file = File::create(temp).map_err(|e| Error::io(temp, "create", e))?;
        file.write_all(&bytes).and_then(|()| file.sync_all()).map_err(|e| Error::io(temp, "write", e))?;
        let path = dir.join(file_name(number));
        // Unlike a rename, a link fails where another writer took the number.
        match std::fs::hard_link(temp, &path) {
            Ok(()) => {}
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => continue,
            Err(e) => return Err(Error::io(&path, "create", e)),
        }
        File::open(dir).and_then(|d| d.sync_all()).map_err(|e| Error::io(dir, "fsync", e))?;
        for old in numbers(dir)?.into_iter().skip(KEPT) {
            std::fs::remove_file(dir.join(file_name(old))).ok();
        }
        return Ok(next);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some() -> Manifest {
        let entry = |k: u8| Entry {
            name: format!("seg-0000000{k}-00000.tkg"),
            uuid: [k; 16],
            bytes: 1000 + k as u64,
            created_ns: 5,
            trajectories: 3,
            chunks: 4,
            post_crc: 6,
            schema_crc: 7,
        };
        Manifest::after(Some((&Manifest { number: 3, ..Manifest::default() }, 9)), 4, vec![entry(2), entry(1)])
    }

    #[test]
    fn manifests_round_trip_and_every_flipped_bit_is_refused() {
        let m = some();
        let bytes = m.encode().unwrap();
        let path = Path::new("manifest-000004");
        assert_eq!(Manifest::decode(&bytes, path).unwrap(), m);
        for bit in 0..8 * bytes.len() {
            let mut b = bytes.clone();
            b[bit / 8] ^= 1 << (bit % 8);
            assert!(Manifest::decode(&b, path).is_err(), "bit {bit}");
        }
        for len in 0..bytes.len() {
            assert!(Manifest::decode(&bytes[..len], path).is_err());
        }
    }

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
        for name in ["../seg-a.tkg", "seg-../a.tkg", "seg-a.tkg.open", "/seg-a.tkg", "seg-é.tkg", "seg-A.tkg", ""] {
            let mut m = some();
            m.segments[0].name = name.into();
            assert!(m.encode().is_err(), "{name}");
        }
        let mut bytes = some().encode().unwrap();
        bytes[HEAD + 4] = b'/';
        let end = bytes.len() - TAIL;
        let crc = crc32c(&bytes[..end]);
        put(&mut bytes, end, &crc.to_le_bytes());
        assert!(Manifest::decode(&bytes, Path::new("m")).unwrap_err().to_string().contains("not a segment's"));
    }

    #[test]
    fn numbers_come_from_whole_names() {
        assert_eq!(number_of("manifest-000007"), Some(7));
        assert_eq!(number_of("manifest-1234567"), Some(1_234_567));
        for name in ["manifest-7", "manifest-000000", "manifest-+00007", "manifest.1.tmp", "manifest-0000070"] {
            assert_eq!(number_of(name), None, "{name}");
        }
    }
}
