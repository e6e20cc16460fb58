//! Writing a dataset: producers pack rows and queue them, worker threads encode and write.
mod file;
mod output;
mod pending;
mod queue;
#[cfg(feature = "uring")]
mod ring;
mod sink;

use crate::chunk::{Encoder, Payload, SiteRows};
use crate::error::{Error, Result};
use crate::index::{Status, Traj};
use crate::layout::{kind, MAX_ID};
use crate::schema::Schema;
use crate::token_crc;
use file::Place;
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

/// When written data must survive a power loss. A killed process loses nothing committed in any mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sync {
    /// When a segment is sealed.
    Seal,
    /// At a commit, if the last time is a second ago.
    Interval,
    /// At every commit.
    Commit,
}

/// What happens to rows that find the queue full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnFull {
    /// The producer waits.
    Block,
    /// The trajectory is given up and counted.
    Drop,
    /// The producer gets [`Error::Full`] and may repeat the call.
    Raise,
}

/// How bytes get to a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// By `write`, through the page cache.
    #[default]
    Buffered,
    /// Past the page cache (O_DIRECT), where the file system can; otherwise buffered.
    Direct,
    /// By io_uring, where the kernel and this build (feature `uring`) can; otherwise buffered.
    Uring,
}

/// How a writer behaves.
#[derive(Clone, Debug)]
pub struct Options {
    /// When to fsync.
    pub sync: Sync,
    /// Segments roll over at this size.
    pub roll_bytes: u64,
    /// Bytes of packed rows that may wait.
    pub queue_bytes: usize,
    /// What happens beyond them.
    pub on_full: OnFull,
    /// Threads that encode.
    pub threads: usize,
    /// Whether every seal is followed by a new manifest of the folder.
    pub manifest: bool,
    /// Whether segments lie in a sub-folder of the writer's, one of 256, so that no folder holds too many.
    pub fan_out: bool,
    /// How segments get to their files.
    pub mode: Mode,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            sync: Sync::Seal,
            roll_bytes: 4 << 30,
            queue_bytes: 2 << 30,
            on_full: OnFull::Block,
            threads: 1,
            manifest: false,
            fan_out: false,
            mode: Mode::Buffered,
        }
    }
}

/// What begins a trajectory.
#[derive(Clone, Debug, Default)]
pub struct Begin<'a> {
    /// Its id, 1 to 255 bytes.
    pub id: &'a str,
    /// Token ids from token 0 on, those of the prefix included.
    pub token_ids: &'a [i64],
    /// Policy version that sampled it.
    pub policy: i64,
    /// The record that holds its first tokens, and their number.
    pub prefix: Option<(&'a str, u32)>,
    /// Number of this part and number of parts; `(0, 1)` for a trajectory written by one rank.
    pub part: (u16, u16),
}

/// Counts of a writer.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    /// Bytes of all segments.
    pub bytes: u64,
    /// Committed trajectories.
    pub trajectories: u64,
    /// Committed tokens.
    pub tokens: u64,
    /// Trajectories given up: abandoned, never committed, or with the queue full.
    pub dropped: u64,
    /// Segments.
    pub segments: u64,
    /// Segments that are written in the mode that was asked for.
    pub as_asked: u64,
    /// Bytes waiting.
    pub queued: u64,
    /// Most bytes that ever waited.
    pub queued_peak: u64,
    /// Times a producer waited for room.
    pub stalls: u64,
}

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
