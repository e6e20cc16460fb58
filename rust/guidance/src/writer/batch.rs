//! Many trajectories in one call, on the caller's thread.
use super::file::Place;
use super::queue::lock;
use super::{Begin, Writer};
use crate::chunk::{Payload, SiteRows};
use crate::error::{Error, Result};
use crate::layout::kind;
use crate::token_crc;
use crate::traj::{Status, Traj};
use std::collections::HashSet;

impl Writer {
    /// Begins, appends and commits many trajectories, on the caller's thread and without a copy of the rows. `rows`
    /// holds every site's rows of all of them, one after another; trajectory `i` has `lengths[i]` rows, from the end
    /// of its prefix on. When this returns, all of them survive the death of the process.
    pub fn append_batch(&mut self, begins: &[Begin], lengths: &[u32], rows: &[SiteRows], status: Status) -> Result<()> {
        self.alive()?;
        let sites = &self.shared.schema.sites;
        if begins.len() != lengths.len() || rows.len() != sites.len() {
            return Err(Error::usage("a batch needs one length a trajectory and rows for every site of the schema"));
        }
        let total: usize = lengths.iter().map(|n| *n as usize).sum();
        for (site, r) in sites.iter().zip(rows) {
            r.check(site, total)?;
        }
        let mut seen = HashSet::with_capacity(begins.len());
        for (b, n) in begins.iter().zip(lengths) {
            let first = self.check_begin(b)?;
            if !seen.insert(b.id) {
                return Err(Error::Usage(format!("trajectory '{}' appears twice in the batch", b.id)));
            }
            if first as usize + *n as usize > b.token_ids.len() {
                return Err(Error::Usage(format!(
                    "trajectory '{}': rows up to token {}, but token_ids has {}",
                    b.id,
                    first + n,
                    b.token_ids.len()
                )));
            }
        }
        self.write_batch(begins, lengths, rows, status).inspect_err(|e| drop(self.shared.fail(e)))?;
        self.ids.extend(seen.into_iter().map(str::to_owned));
        Ok(())
    }

    fn write_batch(&mut self, begins: &[Begin], lengths: &[u32], rows: &[SiteRows], status: Status) -> Result<()> {
        let schema = &self.shared.schema;
        let mut sink = lock(&self.shared.sink);
        let mut row = 0usize;
        for (b, &n) in begins.iter().zip(lengths) {
            self.next_handle += 1;
            let first = b.prefix.map_or(0, |p| p.1);
            let mut done = 0u32;
            while done < n {
                let ntok = schema.chunk_tokens.min(n - done);
                let tok0 = first + done;
                let token_crc = token_crc(&b.token_ids[tok0 as usize..(tok0 + ntok) as usize]);
                for &(a, z) in &self.groups {
                    let at = row + done as usize;
                    let rows = schema.sites[a..z].iter().zip(&rows[a..z]);
                    let part: Vec<SiteRows> = rows.map(|(s, r)| r.slice(s, at, at + ntok as usize)).collect();
                    let (site0, nsites) = (a as u16, (z - a) as u16);
                    let place = Place { kind: kind::CHUNK, traj: 0, tok0, ntok, site0, nsites, token_crc };
                    let mut payload = Payload::in_buffer(std::mem::take(&mut self.buffer));
                    let flags = self.encoder.encode(&schema.sites[a..z], &part, ntok as usize, &mut payload);
                    sink.chunk(self.next_handle, place, schema, &payload, flags)?;
                    self.buffer = payload.bytes;
                }
                done += ntok;
            }
            row += n as usize;
            let traj = Traj {
                n_tokens: first + n,
                n_ids: b.token_ids.len() as u32,
                first,
                policy_min: b.policy,
                policy_max: b.policy,
                status,
                part: b.part.0,
                parts: b.part.1,
                id: b.id.to_owned(),
                prefix: b.prefix.map(|p| p.0.to_owned()).unwrap_or_default(),
                ..Traj::default()
            };
            sink.commit(self.next_handle, schema, traj)?;
        }
        sink.flush(false)
    }
}
