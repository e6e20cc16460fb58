//! Writing a dataset: producers pack rows and queue them, worker threads encode and write.
mod batch;
mod file;
mod options;
mod output;
mod pending;
mod queue;
#[cfg(feature = "uring")]
mod ring;
mod sink;

use crate::chunk::SiteRows;
use crate::encode::Encoder;
use crate::error::{Error, Result};
use crate::layout::{kind, MAX_ID};
use crate::schema::Schema;
use crate::token_crc;
use crate::traj::{Status, Traj};
use file::Place;
pub use options::{Begin, Mode, OnFull, Options, Stats, Sync};
use pending::Pending;
pub use queue::Ticket;
use queue::{lock, Job, Shared};
use sink::Sink;
use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

/// Largest chunk over several sites.
const GROUP_LIMIT: usize = 16 << 20;
/// Largest `extra` of a commit.
const MAX_EXTRA: usize = 64 << 10;

/// Writes one dataset's segments. Any number of writers share a folder.
pub struct Writer {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    on_full: OnFull,
    pid: u32,
    encoder: Encoder,
    buffer: Vec<u8>,
    groups: Vec<(usize, usize)>,
    pending: HashMap<u64, Pending>,
    next_handle: u64,
    ids: HashSet<String>,
    closed: bool,
}

impl Writer {
    /// A writer into `dir`, which is created. Nothing is written before the first trajectory.
    pub fn new(dir: &Path, schema: Schema, options: Options) -> Result<Self> {
        schema.check()?;
        let (threads, limit) = (options.threads.clamp(1, 64), options.queue_bytes);
        let on_full = options.on_full;
        let groups = schema.groups(GROUP_LIMIT);
        let sink = Sink::new(dir, options)?;
        let shared = Arc::new(Shared::new(schema, groups.clone(), sink, limit, threads));
        let mut writer = Writer {
            shared,
            workers: Vec::new(),
            on_full,
            pid: std::process::id(),
            encoder: Encoder::default(),
            buffer: Vec::new(),
            groups,
            pending: HashMap::new(),
            next_handle: 0,
            ids: HashSet::new(),
            closed: false,
        };
        for lane in 0..threads {
            let shared = writer.shared.clone();
            let name = format!("guidance-{lane}");
            let start = std::thread::Builder::new().name(name).spawn(move || shared.work(lane));
            writer.workers.push(start.map_err(|e| Error::io(dir, "start a thread for", e))?);
        }
        Ok(writer)
    }

    /// The schema.
    pub fn schema(&self) -> &Schema {
        &self.shared.schema
    }

    /// The process that may use this writer: threads do not survive a fork.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Counts so far.
    pub fn stats(&self) -> Stats {
        let (queued, queued_peak, stalls) = self.shared.depth();
        Stats { queued, queued_peak, stalls, ..lock(&self.shared.sink).stats() }
    }

    fn alive(&self) -> Result<()> {
        if self.closed {
            return Err(Error::Failed("the guidance writer is closed: open another".into()));
        }
        self.shared.alive()
    }

    fn check_begin(&self, b: &Begin) -> Result<u32> {
        if b.id.is_empty() || b.id.len() > MAX_ID {
            return Err(Error::Usage(format!("trajectory id of {} bytes: use 1 to {MAX_ID}", b.id.len())));
        }
        if self.ids.contains(b.id) {
            return Err(Error::Usage(format!(
                "trajectory '{}' was written before: give each response its own id",
                b.id
            )));
        }
        if b.token_ids.len() > u32::MAX as usize {
            return Err(Error::Usage(format!("trajectory '{}' has more than 2^32 tokens", b.id)));
        }
        if b.part.1 == 0 || b.part.0 >= b.part.1 {
            return Err(Error::Usage(format!("trajectory '{}': part {} of {}", b.id, b.part.0, b.part.1)));
        }
        let Some((prefix, len)) = b.prefix else { return Ok(0) };
        if prefix.is_empty() || prefix.len() > MAX_ID || prefix == b.id || len as usize > b.token_ids.len() {
            return Err(Error::Usage(format!(
                "trajectory '{}': prefix '{prefix}' of {len} tokens does not fit its {} token ids",
                b.id,
                b.token_ids.len()
            )));
        }
        Ok(len)
    }

    /// Begins a trajectory; the handle names it in [`append`](Self::append) and [`commit`](Self::commit).
    pub fn begin(&mut self, b: &Begin) -> Result<u64> {
        self.alive()?;
        let first = self.check_begin(b)?;
        let pending = Pending::new(b, first, self.schema().sites.len());
        self.ids.insert(b.id.to_owned());
        self.next_handle += 1;
        self.pending.insert(self.next_handle, pending);
        Ok(self.next_handle)
    }

    /// Appends `ntok` rows of site number `site`, from token `tok0` on.
    pub fn append(&mut self, handle: u64, site: usize, tok0: u32, rows: &SiteRows, ntok: usize) -> Result<()> {
        self.alive()?;
        let mut p = self.take(handle)?;
        let result = self.append_to(&mut p, handle, site, tok0, rows, ntok);
        self.pending.insert(handle, p);
        result
    }

    fn append_to(
        &mut self,
        p: &mut Pending,
        handle: u64,
        site: usize,
        tok0: u32,
        rows: &SiteRows,
        ntok: usize,
    ) -> Result<()> {
        if p.dropped {
            return Ok(());
        }
        let schema = &self.shared.schema;
        let Some(s) = schema.sites.get(site) else {
            return Err(Error::Usage(format!("site number {site} is not in the schema")));
        };
        if self.on_full == OnFull::Raise && p.ready() as usize + ntok >= schema.chunk_tokens as usize {
            self.check_room(p.ready() as usize + ntok)?;
        }
        p.append(s, site, tok0, rows, ntok)?;
        while p.ready() >= schema.chunk_tokens && !p.dropped {
            self.queue_rows(p, handle, schema.chunk_tokens)?;
        }
        Ok(())
    }

    /// Adds the full rows of audited tokens of site number `site`: `tokens` in any order, codes one byte an element
    /// with all four bits. They are readable when the trajectory is.
    pub fn audit(&mut self, handle: u64, site: usize, tokens: &[u32], rows: &SiteRows) -> Result<()> {
        self.alive()?;
        let p =
            self.pending.get(&handle).ok_or_else(|| Error::usage("this trajectory is committed or dropped already"))?;
        let (dropped, n_ids) = (p.dropped, p.token_ids.len());
        let Some(s) = self.shared.schema.sites.get(site) else {
            return Err(Error::Usage(format!("site number {site} is not in the schema")));
        };
        let whole = crate::audit::full(s);
        rows.check(&whole, tokens.len())?;
        for (i, &token) in tokens.iter().enumerate() {
            let Some(&id) = p.token_ids.get(token as usize) else {
                return Err(Error::Usage(format!(
                    "trajectory '{}', site '{}': audit of token {token}, but token_ids has {n_ids}",
                    p.id, s.name
                )));
            };
            if dropped {
                continue;
            }
            let (payload, flags) = crate::audit::encode(&mut self.encoder, s, &rows.slice(&whole, i, i + 1), 1)?;
            let (site0, token_crc) = (site as u16, token_crc(&[id]));
            let place = Place { kind: kind::AUDIT, traj: 0, tok0: token, ntok: 1, site0, nsites: 1, token_crc };
            // Never dropped: an audit record is small, and a rare one lost would bias what it measures.
            self.shared.push(handle, Job::Encoded { handle, place, payload, flags }, OnFull::Block)?;
        }
        Ok(())
    }

    fn queue_rows(&self, p: &mut Pending, handle: u64, ntok: u32) -> Result<()> {
        let (place, rows) = p.take(&self.shared.schema.sites, ntok);
        if !self.shared.push(handle, Job::Rows { handle, place, rows }, self.on_full)? {
            p.dropped = true;
            self.shared.push(handle, Job::Abandon { handle }, OnFull::Block)?;
        }
        Ok(())
    }

    /// With `on_full = raise` a call is refused before it takes anything, so that it can be repeated.
    fn check_room(&self, ntok: usize) -> Result<()> {
        let token: usize = self.shared.schema.sites.iter().map(|s| s.packed_bytes()).sum();
        self.shared.check_room(token * ntok)
    }

    fn take(&mut self, handle: u64) -> Result<Pending> {
        self.pending
            .remove(&handle)
            .ok_or_else(|| Error::usage("this trajectory is committed or dropped already: begin another"))
    }

    /// Commits a trajectory. When the ticket is answered with `true`, its rows survive the death of the process.
    pub fn commit(&mut self, handle: u64, status: Status, extra: &[u8]) -> Result<Ticket> {
        self.alive()?;
        if extra.len() > MAX_EXTRA {
            return Err(Error::Usage(format!("extra has {} bytes: at most 64 KiB", extra.len())));
        }
        let mut p = self.take(handle)?;
        if status == Status::Complete && !p.dropped {
            if let Err(e) = p.check_even(self.schema()) {
                self.pending.insert(handle, p);
                return Err(e);
            }
        }
        let rest = p.ready();
        if self.on_full == OnFull::Raise && rest > 0 {
            if let Err(e) = self.check_room(rest as usize) {
                self.pending.insert(handle, p);
                return Err(e);
            }
        }
        if rest > 0 && !p.dropped {
            self.queue_rows(&mut p, handle, rest)?;
        }
        if p.dropped {
            self.ids.remove(&p.id);
            return Ok(Ticket::answered(false));
        }
        let traj = Traj {
            n_tokens: p.written,
            n_ids: p.token_ids.len() as u32,
            first: p.first,
            policy_min: p.policy,
            policy_max: p.policy,
            status,
            part: p.part.0,
            parts: p.part.1,
            id: p.id,
            prefix: p.prefix,
            extra: extra.to_vec(),
            ..Traj::default()
        };
        let ticket = Ticket::default();
        let job = Job::Commit { handle, traj: Box::new(traj), ticket: ticket.clone() };
        self.shared.push(handle, job, OnFull::Block)?;
        Ok(ticket)
    }

    /// Forgets a trajectory that was begun; its rows are never readable.
    pub fn abandon(&mut self, handle: u64) -> Result<()> {
        let p = self.take(handle)?;
        self.ids.remove(&p.id);
        if !p.dropped {
            self.shared.push(handle, Job::Abandon { handle }, OnFull::Block)?;
        }
        Ok(())
    }

    /// Queues a flush behind everything queued so far; one ticket a worker.
    pub fn flush(&mut self, sync: bool) -> Result<Vec<Ticket>> {
        self.alive()?;
        let mut tickets = Vec::with_capacity(self.workers.len());
        for lane in 0..self.workers.len() as u64 {
            let ticket = Ticket::default();
            self.shared.push(lane, Job::Flush { sync, ticket: ticket.clone() }, OnFull::Block)?;
            tickets.push(ticket);
        }
        Ok(tickets)
    }

    /// Writes what is queued, seals every segment and ends the threads. Trajectories without a commit are dropped and
    /// counted. An error of any thread is returned here at the latest.
    pub fn close(&mut self) -> Result<Stats> {
        if self.closed {
            self.shared.alive()?;
            return Ok(self.stats());
        }
        self.closed = true;
        self.join();
        let began = self.pending.values().filter(|p| !p.dropped).count() as u64;
        self.pending.clear();
        self.shared.alive()?;
        let mut sink = lock(&self.shared.sink);
        let result = sink.close();
        sink.stats.dropped += began;
        drop(sink);
        result.inspect_err(|e| drop(self.shared.fail(e)))?;
        Ok(self.stats())
    }

    fn join(&mut self) {
        self.shared.finish();
        for worker in self.workers.drain(..) {
            if worker.join().is_err() {
                self.shared.fail(&Error::Failed("a writer thread panicked; this is a bug".into()));
            }
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if self.pid == std::process::id() {
            self.join();
        } else {
            // The threads stayed in the parent.
            self.workers.drain(..).for_each(std::mem::forget);
        }
    }
}
