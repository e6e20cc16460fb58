//! Reading ranges of tokens: through parts, prefixes and chunks to the rows.
use crate::dataset::{Dataset, Part};
use crate::decode::{Chunk, Decoder, Target};
use crate::error::{Error, Result};
use crate::index::ChunkRange;
use crate::layout::{kind, MAX_PAYLOAD, RECORD_LEN};
use crate::plan::Plan;
use crate::schema::Site;
use crate::source::{Blocks, Overlay};
use crate::token_crc;

thread_local! {
    static DECODER: std::cell::Cell<Option<Decoder>> = const { std::cell::Cell::new(None) };
}

const MAX_PREFIXES: usize = 64;

/// One range of tokens to read.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The trajectory.
    pub id: &'a str,
    /// First token.
    pub start: u32,
    /// End token.
    pub stop: u32,
    /// The trajectory's ids from its first token on, to be checked.
    pub token_ids: Option<&'a [i64]>,
}

impl Dataset {
    /// Reads the requests' rows one after another into `targets`, one target a name of `sites`.
    pub fn read(&self, requests: &[Request], sites: &[&str], targets: &mut [Target]) -> Result<()> {
        // Kept between calls; a buffer grows to the largest chunk, at most 64 MiB.
        let mut decoder = DECODER.take().unwrap_or_default();
        let mut row = 0;
        let wanted: Vec<usize> = (0..sites.len()).collect();
        let maps: Vec<Vec<Option<usize>>> =
            self.segments.iter().map(|s| sites.iter().map(|n| s.schema.site(n)).collect()).collect();
        let mut fetched = Vec::new();
        if self.segments.iter().any(|s| s.source.remote()) {
            let mut plan = Plan::default();
            let plan_of = Some(&mut plan);
            let mut job =
                Job { data: self, decoder: &mut decoder, sites, maps: &maps, targets, fetched: &[], plan: plan_of };
            for r in requests {
                job.tokens(r.id, r.start, r.stop, r.token_ids, &wanted, 0, MAX_PREFIXES)?;
            }
            fetched = plan.fetch(self)?;
        }
        let fetched = &fetched;
        let mut job = Job { data: self, decoder: &mut decoder, sites, maps: &maps, targets, fetched, plan: None };
        for r in requests {
            job.tokens(r.id, r.start, r.stop, r.token_ids, &wanted, row, MAX_PREFIXES)?;
            row += (r.stop - r.start) as usize;
        }
        DECODER.set(Some(decoder));
        Ok(())
    }
}

type Heads = (usize, usize);

/// Takes `[a, b)` out of ranges of heads.
fn take_heads(ranges: &mut Vec<Heads>, (a, b): Heads) {
    let cut = |&(x, y): &Heads| [(x, y.min(a)), (x.max(b), y)].into_iter().filter(|(p, q)| p < q);
    *ranges = ranges.iter().flat_map(cut).collect();
}

struct Job<'a, 'b> {
    data: &'a Dataset,
    decoder: &'a mut Decoder,
    sites: &'a [&'a str],
    maps: &'a [Vec<Option<usize>>],
    targets: &'a mut [Target<'b>],
    /// What was fetched of each segment.
    fetched: &'a [Blocks],
    /// Collects what will be read, instead of reading it.
    plan: Option<&'a mut Plan>,
}

impl Job<'_, '_> {
    #[allow(clippy::too_many_arguments)]
    fn tokens(
        &mut self,
        id: &str,
        start: u32,
        stop: u32,
        ids: Option<&[i64]>,
        wanted: &[usize],
        row: usize,
        depth: usize,
    ) -> Result<()> {
        let parts = self.data.find(id)?;
        let mut left: Vec<(usize, Vec<Heads>)> = wanted.iter().map(|w| (*w, vec![self.targets[*w].heads])).collect();
        let shared =
            parts.iter().all(|p| (p.traj.first, &p.traj.prefix) == (parts[0].traj.first, &parts[0].traj.prefix));
        let mut prefix_read = false;
        for part in &parts {
            let map = &self.maps[part.segment];
            let schema = &self.data.segments[part.segment].schema;
            let mut here = Vec::new();
            left.retain_mut(|(w, heads)| {
                let Some(site) = map[*w].map(|i| &schema.sites[i]) else { return true };
                let before = heads.clone();
                take_heads(heads, (site.first_plane as usize, (site.first_plane + site.planes) as usize));
                if *heads != before || !site.split() {
                    here.push(*w);
                }
                !heads.is_empty() && site.split()
            });
            if here.is_empty() {
                continue;
            }
            let t = &part.traj;
            if start > stop || stop > t.n_tokens {
                let mut text = format!(
                    "trajectory '{id}' has records for tokens 0..{}, {start}..{stop} was asked for",
                    t.n_tokens
                );
                if stop > t.n_tokens && stop <= t.n_ids {
                    text += ": the last sampled token has none, because it was never fed to the model";
                } else {
                    text += ": ask for tokens that it has";
                }
                return Err(Error::Missing(text));
            }
            let (mut start, mut row) = (start, row);
            if start < t.first {
                let cut = stop.min(t.first);
                if depth == 0 || t.prefix.is_empty() {
                    let what = format!("prefix of '{id}' does not end");
                    return Err(Error::corrupt(&self.data.segments[part.segment].path, 0, what));
                }
                if !prefix_read {
                    // Parts have one prefix, which is read for all of them together.
                    let for_whom = if shared { wanted } else { &here };
                    self.tokens(&t.prefix, start, cut, ids, for_whom, row, depth - 1)?;
                    prefix_read = shared;
                }
                row += (cut - start) as usize;
                start = cut;
            }
            if start < stop {
                self.part(part, start, stop, ids, &here, row)?;
            }
        }
        match left.first() {
            Some((w, heads)) if self.maps.iter().any(|m| m[*w].is_some()) => Err(Error::Missing(format!(
                "trajectory '{id}', site '{}': heads {}..{} are in no part of it: read heads that were recorded",
                self.sites[*w], heads[0].0, heads[0].1
            ))),
            Some((w, _)) => Err(self.data.no_site(self.sites[*w])),
            None => Ok(()),
        }
    }

    fn part(
        &mut self,
        part: &Part,
        start: u32,
        stop: u32,
        ids: Option<&[i64]>,
        wanted: &[usize],
        row: usize,
    ) -> Result<()> {
        let segment = &self.data.segments[part.segment];
        let map = &self.maps[part.segment];
        let mut wants: Vec<(usize, usize)> = wanted.iter().map(|w| (map[*w].unwrap(), *w)).collect();
        wants.sort_unstable();
        let index = &segment.index;
        let bad = |off: u64, what: String| Error::corrupt(&segment.path, off, what);
        let (mut at, end) = (part.chunks.first, part.chunks.first + part.chunks.len);
        let mut found = 0;
        while at < end && found < wants.len() {
            let group = index.chunk(at);
            if group.kind != kind::CHUNK {
                break;
            }
            let (site0, nsites) = (group.site0 as usize, group.nsites as usize);
            let Some(sites) = segment.schema.sites.get(site0..site0 + nsites) else {
                return Err(bad(group.off, "chunk covers sites that the schema lacks".into()));
            };
            let range = |first| ChunkRange { first, len: end - first };
            let next = index.partition(range(at), |e| e.kind == kind::CHUNK && e.site0 == group.site0);
            let first = wants.partition_point(|w| w.0 < site0);
            let last = wants.partition_point(|w| w.0 < site0 + nsites);
            let local: Vec<(usize, usize)> = wants[first..last].iter().map(|w| (w.0 - site0, w.1)).collect();
            found += local.len();
            let mut cursor = start;
            let from =
                index.partition(ChunkRange { first: at, len: next - at }, |e| e.tok0.saturating_add(e.ntok) <= start);
            let first_of_group = at;
            at = next.max(at + 1);
            if local.is_empty() {
                continue;
            }
            for k in from..next {
                let e = index.chunk(k);
                if cursor >= stop || e.tok0 > cursor {
                    break;
                }
                let bytes: usize = sites.iter().map(Site::token_bytes).sum();
                if e.traj != part.traj.number
                    || e.nsites != group.nsites
                    || e.tok0.checked_add(e.ntok).is_none_or(|t| t <= cursor)
                    || e.off.saturating_add(RECORD_LEN as u64 + e.len as u64) > segment.len
                    || bytes as u64 * e.ntok as u64 > MAX_PAYLOAD
                {
                    return Err(bad(e.off, format!("index entry of a chunk of '{}'", part.traj.id)));
                }
                let overlaps = k > first_of_group && index.chunk(k - 1).end() > e.tok0 as u64
                    || k + 1 < next && e.end() > index.chunk(k + 1).tok0 as u64;
                if overlaps {
                    return Err(bad(e.off, format!("chunks of '{}' overlap", part.traj.id)));
                }
                check_tokens(&part.traj.id, &e, ids)?;
                let upto = stop.min(e.tok0 + e.ntok);
                if let Some(plan) = self.plan.as_deref_mut() {
                    plan.chunk(part.segment, e, sites, &local, self.targets);
                    cursor = upto;
                    continue;
                }
                for w in &local {
                    self.targets[w.1].row = row + (cursor - start) as usize;
                }
                let overlay;
                let source = &*segment.source;
                let file = match self.fetched.get(part.segment) {
                    Some(blocks) => {
                        overlay = Overlay { source, blocks };
                        &overlay
                    }
                    None => source,
                };
                let chunk = Chunk { file, path: &segment.path, entry: e, sites, map: segment.map() };
                let (a, b) = ((cursor - e.tok0) as usize, (upto - e.tok0) as usize);
                self.decoder.read(&chunk, a, b, &local, self.targets)?;
                cursor = upto;
            }
            if cursor < stop {
                let what = format!("trajectory '{}' has no valid chunk for token {cursor}", part.traj.id);
                return Err(bad(group.off, what));
            }
        }
        if found < wants.len() {
            let what = format!("trajectory '{}' has no chunk for some of its sites", part.traj.id);
            return Err(bad(segment.header.first_record(), what));
        }
        Ok(())
    }
}

fn check_tokens(id: &str, e: &crate::index::ChunkEntry, ids: Option<&[i64]>) -> Result<()> {
    let Some(ids) = ids else { return Ok(()) };
    let (a, b) = (e.tok0 as usize, (e.tok0 + e.ntok) as usize);
    let Some(tokens) = ids.get(a..b) else {
        return Err(Error::Mismatch(format!(
            "trajectory '{id}': token_ids has {} ids, the record covers tokens {a}..{b}: pass the trajectory's ids from \
             its first token on",
            ids.len()
        )));
    };
    if token_crc(tokens) != e.token_crc {
        return Err(Error::Mismatch(format!(
            "trajectory '{id}': tokens {a}..{b} are not those its record was made for: rows would be misaligned; check \
             which response this id belongs to"
        )));
    }
    Ok(())
}
