//! Audit records: all four bits of the codes and the whole scales of a few tokens, whatever a site's encoding.
use crate::chunk::{Codes, Payload, SiteRows};
use crate::crc::{crc32c, crc32c_append};
use crate::dataset::Dataset;
use crate::decode::{Chunk, Decoder, Target};
use crate::encode::Encoder;
use crate::error::{Error, Result};
use crate::index::ChunkEntry;
use crate::layout::{kind, MAX_PAYLOAD, RECORD_LEN};
use crate::schema::{Encoding, Site};

/// One token in so many is audited, unless a writer chooses another number.
pub const EVERY: u32 = 1024;

/// Whether a token of trajectory `id` is among the one in `every` that is audited: a property of the two, so that
/// every rank takes the same tokens.
pub fn sampled(id: &str, token: u32, every: u32) -> bool {
    crc32c_append(crc32c(id.as_bytes()), &token.to_le_bytes()) % every.max(1) == 0
}

/// A site as audit records hold it.
pub fn full(site: &Site) -> Site {
    Site { bits: 4, encoding: Encoding::Lossless, ..site.clone() }
}

/// The payload of an audit record: rows of `ntok` tokens of one site, codes one byte an element.
pub fn encode(encoder: &mut Encoder, site: &Site, rows: &SiteRows, ntok: usize) -> Result<(Payload<'static>, u8)> {
    let site = full(site);
    rows.check(&site, ntok)?;
    if let Codes::Unpacked(codes) = rows.codes {
        if codes.iter().any(|c| *c > 15) {
            return Err(Error::Usage(format!("site '{}': full codes are 0 to 15", site.name)));
        }
    }
    let mut out = Payload::default();
    let flags = encoder.encode_whole(&[site], &[*rows], ntok, &mut out.bytes);
    Ok((out, flags))
}

/// The full rows of one token at one site.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The site's name.
    pub site: String,
    /// The token.
    pub token: u32,
    /// Codes `[planes, K]`, one byte each.
    pub codes: Vec<u8>,
    /// Scales `[planes, scale_row]`.
    pub scales: Vec<u8>,
    /// The encode scale, little-endian fp32.
    pub token_scale: [u8; 4],
}

impl Dataset {
    /// The audited tokens of a trajectory, by site and token. Those of its prefix are the prefix's.
    pub fn audit(&self, id: &str) -> Result<Vec<Row>> {
        let mut out = Vec::new();
        let mut decoder = Decoder::default();
        for part in self.find(id)? {
            let segment = &self.segments[part.segment];
            for i in part.chunks.first..part.chunks.first + part.chunks.len {
                let entry = segment.index.chunk(i);
                if entry.kind != kind::AUDIT {
                    continue;
                }
                let bad = |what: &str| Error::corrupt(&segment.path, entry.off, what);
                let (a, n) = (entry.site0 as usize, entry.nsites as usize);
                let sites =
                    segment.schema.sites.get(a..a + n).ok_or_else(|| bad("audit of sites that are not there"))?;
                let sites: Vec<Site> = sites.iter().map(full).collect();
                let bytes: u64 = sites.iter().map(|s| s.token_bytes() as u64).sum();
                let end = entry.off.saturating_add(RECORD_LEN as u64 + entry.len as u64);
                let whole = entry.flags & crate::chunk::FLAG_PLANES == 0;
                let fits = bytes.saturating_mul(entry.ntok as u64) <= MAX_PAYLOAD && end <= segment.len;
                if !whole || !fits || entry.traj != part.traj.number || entry.tok0.checked_add(entry.ntok).is_none() {
                    return Err(bad("index entry of an audit record"));
                }
                let chunk =
                    Chunk { file: &*segment.source, path: &segment.path, entry, sites: &sites, map: segment.map() };
                rows(&mut decoder, &chunk, &entry, &sites, &mut out)?;
            }
        }
        out.sort_by(|a, b| (&a.site, a.token).cmp(&(&b.site, b.token)));
        Ok(out)
    }
}

fn rows(d: &mut Decoder, chunk: &Chunk, entry: &ChunkEntry, sites: &[Site], out: &mut Vec<Row>) -> Result<()> {
    let ntok = entry.ntok as usize;
    for (i, site) in sites.iter().enumerate() {
        let planes = site.planes as usize;
        let (code_row, scale_row) = (planes * site.width as usize, planes * site.scale_row());
        let (mut codes, mut scales, mut token_scale) =
            (vec![0; ntok * code_row], vec![0; ntok * scale_row], vec![0; 4 * ntok]);
        let target = Target {
            heads: (0, planes),
            codes: Some(&mut codes),
            unpack: true,
            scales: Some(&mut scales),
            checks: None,
            token_scale: Some(&mut token_scale),
            row: 0,
        };
        d.read(chunk, 0, ntok, &[(i, 0)], &mut [target])?;
        for t in 0..ntok {
            out.push(Row {
                site: site.name.clone(),
                token: entry.tok0 + t as u32,
                codes: codes[t * code_row..(t + 1) * code_row].to_vec(),
                scales: scales[t * scale_row..(t + 1) * scale_row].to_vec(),
                token_scale: token_scale[4 * t..4 * t + 4].try_into().unwrap(),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_token_in_about_a_thousand_is_sampled_whatever_the_id() {
        for id in ["t0", "step-7/group-3/sample-12"] {
            let n = (0..1 << 20).filter(|t| sampled(id, *t, EVERY)).count();
            assert!((900..1150).contains(&n), "{id}: {n} of 2^20");
        }
        let n = (0..1 << 12).filter(|t| sampled("t0", *t, 16)).count();
        assert!((200..320).contains(&n), "{n} of 2^12 at one in 16");
        assert!((0..64).all(|t| sampled("t0", t, 1)));
        assert!((0..4096).any(|t| sampled("a", t, EVERY) != sampled("b", t, EVERY)));
    }
}
