//! What a read needs of segments whose every request costs a round trip.
use crate::chunk::FLAG_PLANES;
use crate::dataset::Dataset;
use crate::decode::Target;
use crate::directory::{directory_len, entries_of, parse_directory};
use crate::error::{Error, Result};
use crate::index::{payload_at, ChunkEntry};
use crate::layout::padded;
use crate::schema::Site;
use crate::source::Blocks;
use std::ops::Range;

/// Chunks of which so much is wanted, in parts of 8, are fetched whole: one round trip instead of two.
const WHOLE: usize = 4;

struct Part {
    entry: ChunkEntry,
    sites: Range<usize>,
    /// Wanted sites of the chunk, with the heads wanted of each.
    wants: Vec<(usize, (usize, usize))>,
}

/// Ranges of bytes that a read will touch, by segment.
#[derive(Default)]
pub struct Plan {
    whole: Vec<(usize, Range<u64>)>,
    parts: Vec<(usize, Part)>,
}

impl Plan {
    /// Notes a chunk of segment `segment`; `wants` are pairs of a site of the chunk and its target.
    pub fn chunk(
        &mut self,
        segment: usize,
        entry: ChunkEntry,
        sites: &[Site],
        wants: &[(usize, usize)],
        targets: &[Target],
    ) {
        let at = payload_at(entry.off);
        let heads = |target: usize| targets[target].heads;
        let plane = |s: &Site| s.token_bytes() / s.planes as usize;
        let asked: usize = wants.iter().map(|w| plane(&sites[w.0]) * (heads(w.1).1 - heads(w.1).0)).sum();
        let all: usize = sites.iter().map(Site::token_bytes).sum();
        if entry.flags & FLAG_PLANES == 0 || 8 * asked >= WHOLE * all {
            return self.whole.push((segment, at..at.saturating_add(padded(entry.len as usize) as u64)));
        }
        let first = entry.site0 as usize;
        let sites = first..first + entry.nsites as usize;
        let wants = wants.iter().map(|w| (w.0, heads(w.1))).collect();
        self.parts.push((segment, Part { entry, sites, wants }));
    }

    /// Fetches everything: directories and whole chunks first, then the planes that the directories show.
    pub fn fetch(self, data: &Dataset) -> Result<Vec<Blocks>> {
        let mut first: Vec<Vec<Range<u64>>> = vec![Vec::new(); data.segments.len()];
        for (segment, range) in self.whole {
            first[segment].push(range);
        }
        for (segment, p) in &self.parts {
            let sites = &data.segments[*segment].schema.sites[p.sites.clone()];
            let at = payload_at(p.entry.off);
            let len = directory_len(entries_of(sites)).min(p.entry.len as usize);
            first[*segment].push(at..at + len as u64);
        }
        let mut blocks = fetch(data, &first)?;
        let mut second: Vec<Vec<Range<u64>>> = vec![Vec::new(); data.segments.len()];
        for (segment, p) in &self.parts {
            let sites = &data.segments[*segment].schema.sites[p.sites.clone()];
            let (at, len) = (payload_at(p.entry.off), p.entry.len as usize);
            let dir = blocks[*segment].get(at, directory_len(entries_of(sites)).min(len));
            // A directory that does not hold is the decoder's to report.
            let Some(planes) = dir.and_then(|d| parse_directory(d, sites, p.entry.ntok as usize, len).ok()) else {
                continue;
            };
            for (site, heads) in &p.wants {
                let skip = entries_of(&sites[..*site]);
                let scale = sites[*site].per_token() as usize;
                let entries = (skip..skip + scale).chain(skip + scale + heads.0..skip + scale + heads.1);
                let ranges = entries.map(|i| at + planes[i].off as u64..at + (planes[i].off + planes[i].len) as u64);
                second[*segment].extend(ranges);
            }
        }
        for (have, more) in blocks.iter_mut().zip(fetch(data, &second)?) {
            have.extend(more);
        }
        Ok(blocks)
    }
}

fn fetch(data: &Dataset, ranges: &[Vec<Range<u64>>]) -> Result<Vec<Blocks>> {
    let one = |(s, r): (&crate::segment::Segment, &Vec<Range<u64>>)| {
        let got = if r.is_empty() { Ok(None) } else { s.source.fetch(r) };
        got.map(Option::unwrap_or_default).map_err(|e| Error::io(&s.path, "read", e))
    };
    data.segments.iter().zip(ranges).map(one).collect()
}
