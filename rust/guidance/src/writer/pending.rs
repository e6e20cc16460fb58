//! Rows of a trajectory that do not fill a chunk yet.
use super::file::Place;
use super::queue::OwnedRows;
use crate::chunk::{Codes, SiteRows};
use crate::error::{Error, Result};
use crate::layout::kind;
use crate::pack::pack_row;
use crate::schema::{Schema, Site};
use crate::token_crc;

/// What `begin` was told, and the rows since the last chunk.
pub struct Pending {
    /// The trajectory's id.
    pub id: String,
    /// Its token ids from token 0 on.
    pub token_ids: Vec<i64>,
    /// Policy version.
    pub policy: i64,
    /// Record of the tokens before `first`.
    pub prefix: String,
    /// First recorded token.
    pub first: u32,
    /// Part number and number of parts.
    pub part: (u16, u16),
    /// Whether the queue was full and the trajectory is given up.
    pub dropped: bool,
    /// Tokens before this one are on their way.
    pub written: u32,
    sites: Vec<Rows>,
}

#[derive(Default)]
struct Rows {
    kept: OwnedRows,
    ntok: u32,
}

impl Pending {
    /// A trajectory without rows.
    pub fn new(b: &super::Begin, first: u32, n_sites: usize) -> Self {
        Pending {
            id: b.id.to_owned(),
            token_ids: b.token_ids.to_vec(),
            policy: b.policy,
            prefix: b.prefix.map(|p| p.0.to_owned()).unwrap_or_default(),
            first,
            part: b.part,
            dropped: false,
            written: first,
            sites: (0..n_sites).map(|_| Rows::default()).collect(),
        }
    }

    /// Adds rows of site `i`; they must follow its last ones.
    pub fn append(&mut self, site: &Site, i: usize, tok0: u32, rows: &SiteRows, ntok: usize) -> Result<()> {
        rows.check(site, ntok)?;
        let next = self.written + self.sites[i].ntok;
        if tok0 != next {
            return Err(Error::Usage(format!(
                "trajectory '{}', site '{}': rows start at token {tok0}, token {next} is next",
                self.id, site.name
            )));
        }
        if next as usize + ntok > self.token_ids.len() {
            return Err(Error::Usage(format!(
                "trajectory '{}', site '{}': rows up to token {}, but token_ids has {}",
                self.id,
                site.name,
                next as usize + ntok,
                self.token_ids.len()
            )));
        }
        let kept = &mut self.sites[i].kept;
        match rows.codes {
            Codes::None => {}
            Codes::Packed(c) => kept.codes.extend_from_slice(c),
            Codes::Unpacked(c) => {
                let (width, row) = (site.width as usize, site.code_row());
                let at = kept.codes.len();
                kept.codes.resize(at + c.len() / width * row, 0);
                for (src, dst) in c.chunks_exact(width).zip(kept.codes[at..].chunks_exact_mut(row)) {
                    pack_row(site.bits, src, dst);
                }
            }
        }
        kept.scales.extend_from_slice(rows.scales);
        kept.token_scale.extend_from_slice(rows.token_scale);
        self.sites[i].ntok += ntok as u32;
        Ok(())
    }

    /// Tokens that every site has.
    pub fn ready(&self) -> u32 {
        self.sites.iter().map(|r| r.ntok).min().unwrap_or(0)
    }

    /// An error if some site has more rows than another.
    pub fn check_even(&self, schema: &Schema) -> Result<()> {
        let least = self.ready();
        let Some(i) = self.sites.iter().position(|r| r.ntok != least) else { return Ok(()) };
        let short = self.sites.iter().position(|r| r.ntok == least).unwrap_or(0);
        Err(Error::Usage(format!(
            "trajectory '{}': site '{}' has rows up to token {}, site '{}' up to {}: append both before commit",
            self.id,
            schema.sites[i].name,
            self.written + self.sites[i].ntok,
            schema.sites[short].name,
            self.written + least
        )))
    }

    /// Takes the first `ntok` rows of every site, with their place.
    pub fn take(&mut self, sites: &[Site], ntok: u32) -> (Place, Vec<OwnedRows>) {
        let (a, b) = (self.written as usize, (self.written + ntok) as usize);
        let place = Place {
            kind: kind::CHUNK,
            traj: 0,
            tok0: self.written,
            ntok,
            site0: 0,
            nsites: sites.len() as u16,
            token_crc: token_crc(&self.token_ids[a..b]),
        };
        let cut = |from: &mut Vec<u8>, n: usize| {
            let rest = from.split_off(n);
            std::mem::replace(from, rest)
        };
        let mut rows = Vec::with_capacity(sites.len());
        for (r, s) in self.sites.iter_mut().zip(sites) {
            let n = ntok as usize * s.planes as usize;
            rows.push(OwnedRows {
                codes: cut(&mut r.kept.codes, n * s.code_row()),
                scales: cut(&mut r.kept.scales, n * s.scale_row()),
                token_scale: cut(&mut r.kept.token_scale, if s.per_token() { 4 * ntok as usize } else { 0 }),
            });
            r.ntok -= ntok;
        }
        self.written += ntok;
        (place, rows)
    }
}
