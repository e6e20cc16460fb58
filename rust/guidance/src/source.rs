//! Where a segment's bytes come from: a file, or an object of a store.
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// Bytes that can be read at any offset, from any thread.
pub trait ReadAt: Send + Sync + std::fmt::Debug {
    /// Fills `buf` from offset `at`.
    fn read_exact_at(&self, buf: &mut [u8], at: u64) -> io::Result<()>;

    /// Fetches ranges in as few requests as pay. `None`: reads are cheap, nothing is gained by asking first.
    fn fetch(&self, ranges: &[Range<u64>]) -> io::Result<Option<Blocks>> {
        let _ = ranges;
        Ok(None)
    }

    /// The file, if it is one.
    fn as_file(&self) -> Option<&File> {
        None
    }

    /// Whether [`fetch`](Self::fetch) does something.
    fn remote(&self) -> bool {
        false
    }
}

impl ReadAt for File {
    fn read_exact_at(&self, buf: &mut [u8], at: u64) -> io::Result<()> {
        FileExt::read_exact_at(self, buf, at)
    }

    fn as_file(&self) -> Option<&File> {
        Some(self)
    }
}

/// Fetched bytes, by offset.
#[derive(Debug, Default)]
pub struct Blocks(Vec<(u64, Vec<u8>)>);

impl Blocks {
    /// Blocks in any order.
    pub fn new(mut blocks: Vec<(u64, Vec<u8>)>) -> Self {
        blocks.sort_by_key(|b| b.0);
        Blocks(blocks)
    }

    /// The bytes of `[at, at + len)` if one block holds them.
    pub fn get(&self, at: u64, len: usize) -> Option<&[u8]> {
        let (start, bytes) = &self.0[self.0.partition_point(|b| b.0 <= at).checked_sub(1)?];
        let from = usize::try_from(at - start).ok()?;
        bytes.get(from..from.checked_add(len)?)
    }

    /// Adds what another fetch brought.
    pub fn extend(&mut self, other: Blocks) {
        self.0.extend(other.0);
        // Of two blocks at one offset the longer comes last, where `get` looks.
        self.0.sort_by_key(|b| (b.0, b.1.len()));
    }
}

/// A source with some of its bytes fetched already.
#[derive(Debug)]
pub struct Overlay<'a> {
    /// Where the rest is.
    pub source: &'a dyn ReadAt,
    /// What is here.
    pub blocks: &'a Blocks,
}

impl ReadAt for Overlay<'_> {
    fn read_exact_at(&self, buf: &mut [u8], at: u64) -> io::Result<()> {
        match self.blocks.get(at, buf.len()) {
            Some(bytes) => {
                buf.copy_from_slice(bytes);
                Ok(())
            }
            None => self.source.read_exact_at(buf, at),
        }
    }
}

/// Joins ranges whose gaps are at most `gap` bytes, into pieces of at most `most` bytes unless one range is larger.
pub fn coalesce(ranges: &[Range<u64>], gap: u64, most: u64) -> Vec<Range<u64>> {
    let mut sorted: Vec<Range<u64>> = ranges.iter().filter(|r| r.start < r.end).cloned().collect();
    sorted.sort_by_key(|r| (r.start, r.end));
    let mut out: Vec<Range<u64>> = Vec::new();
    for r in sorted {
        match out.last_mut() {
            Some(last) if r.end <= last.end => {}
            Some(last) if r.start <= last.end.saturating_add(gap) && r.end - last.start <= most => last.end = r.end,
            _ => out.push(r),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_ranges_become_one_request_and_no_request_grows_without_bound() {
        let ranges = [10..20, 0..5, 25..30, 100..110, 26..28, 50..50];
        assert_eq!(coalesce(&ranges, 5, 1000), vec![0..30, 100..110]);
        assert_eq!(coalesce(&ranges, 4, 1000), vec![0..5, 10..20, 25..30, 100..110]);
        assert_eq!(coalesce(&ranges, 5, 20), vec![0..20, 25..30, 100..110]);
        assert_eq!(coalesce(&[0..100, 200..201], 0, 10), vec![0..100, 200..201]);
    }

    #[test]
    fn blocks_give_what_they_hold_and_nothing_else() {
        let mut blocks = Blocks::new(vec![(100, vec![7; 10]), (0, (0..50).collect())]);
        assert_eq!(blocks.get(48, 2), Some(&[48, 49][..]));
        assert_eq!(blocks.get(48, 3), None);
        assert_eq!(blocks.get(99, 1), None);
        assert_eq!(blocks.get(105, 5), Some(&[7; 5][..]));
        blocks.extend(Blocks::new(vec![(0, vec![9; 60])]));
        assert_eq!(blocks.get(59, 1), Some(&[9][..]));
    }
}
