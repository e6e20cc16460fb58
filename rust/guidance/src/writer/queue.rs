//! The queue between producers and the threads that encode and write.
use super::file::Place;
use super::sink::Sink;
use super::OnFull;
use crate::chunk::{Payload, SiteRows};
use crate::encode::Encoder;
use crate::error::{Error, Result};
use crate::schema::Schema;
use crate::traj::Traj;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// Commits that one flush may answer.
const GROUP: usize = 256;
/// Bytes after which waiting commits are flushed even if more work is queued.
const GROUP_BYTES: usize = 1 << 20;

type Answer = std::result::Result<bool, String>;

/// A commit on its way to the disk.
#[derive(Clone, Default)]
pub struct Ticket(Arc<(Mutex<Option<Answer>>, Condvar)>);

impl Ticket {
    /// A ticket that is answered already.
    pub fn answered(committed: bool) -> Self {
        let t = Ticket::default();
        t.answer(Ok(committed));
        t
    }

    fn answer(&self, result: Answer) {
        *lock(&self.0 .0) = Some(result);
        self.0 .1.notify_all();
    }

    /// Waits for the answer: whether the trajectory is committed, or was dropped because the queue was full.
    /// `None` after `timeout`.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<Option<bool>> {
        let mut state = lock(&self.0 .0);
        let until = timeout.and_then(|t| std::time::Instant::now().checked_add(t));
        loop {
            match &*state {
                Some(Ok(committed)) => return Ok(Some(*committed)),
                Some(Err(why)) => return Err(Error::Failed(why.clone())),
                None => {}
            }
            let left = match until {
                None => Duration::from_secs(3600),
                Some(t) => t.saturating_duration_since(std::time::Instant::now()),
            };
            if left.is_zero() {
                return Ok(None);
            }
            state = self.0 .1.wait_timeout(state, left).unwrap_or_else(|e| e.into_inner()).0;
        }
    }
}

/// Rows that a job owns.
#[derive(Default)]
pub struct OwnedRows {
    /// Packed codes, token-major.
    pub codes: Vec<u8>,
    /// Scales.
    pub scales: Vec<u8>,
    /// Encode scales as little-endian fp32.
    pub token_scale: Vec<u8>,
}

/// One thing to do.
pub enum Job {
    /// Encode and append rows of all sites.
    Rows {
        /// The trajectory.
        handle: u64,
        /// Tokens.
        place: Place,
        /// One entry a site.
        rows: Vec<OwnedRows>,
    },
    /// Append a record that is encoded already.
    Encoded {
        /// The trajectory.
        handle: u64,
        /// Tokens and sites.
        place: Place,
        /// The payload.
        payload: Payload<'static>,
        /// Its flags.
        flags: u8,
    },
    /// Append a commit.
    Commit {
        /// The trajectory.
        handle: u64,
        /// What to write.
        traj: Box<Traj>,
        /// Who waits.
        ticket: Ticket,
    },
    /// Forget a trajectory.
    Abandon {
        /// The trajectory.
        handle: u64,
    },
    /// Flush, and sync if set.
    Flush {
        /// Also fsync.
        sync: bool,
        /// Who waits.
        ticket: Ticket,
    },
}

impl Job {
    fn bytes(&self) -> usize {
        match self {
            Job::Rows { rows, .. } => rows.iter().map(|r| r.codes.len() + r.scales.len() + r.token_scale.len()).sum(),
            Job::Encoded { payload, .. } => payload.len(),
            _ => 0,
        }
    }
}

#[derive(Default)]
struct State {
    lanes: Vec<VecDeque<Job>>,
    bytes: usize,
    peak: usize,
    stalls: u64,
    closing: bool,
    failed: Option<String>,
}

/// What producers and workers share.
pub struct Shared {
    state: Mutex<State>,
    work: Condvar,
    room: Condvar,
    limit: usize,
    /// The schema.
    pub schema: Schema,
    groups: Vec<(usize, usize)>,
    /// The files.
    pub sink: Mutex<Sink>,
}

/// A poisoned lock means that a thread panicked; the failure is recorded elsewhere, the data under it is plain.
pub fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(|e| e.into_inner())
}

impl Shared {
    /// A queue of at most `limit` bytes for `lanes` workers.
    pub fn new(schema: Schema, groups: Vec<(usize, usize)>, sink: Sink, limit: usize, lanes: usize) -> Self {
        let state = State { lanes: (0..lanes).map(|_| VecDeque::new()).collect(), ..State::default() };
        Shared {
            state: Mutex::new(state),
            work: Condvar::new(),
            room: Condvar::new(),
            limit,
            schema,
            groups,
            sink: Mutex::new(sink),
        }
    }

    /// An error if the writer failed.
    pub fn alive(&self) -> Result<()> {
        match &lock(&self.state).failed {
            Some(why) => Err(Error::Failed(why.clone())),
            None => Ok(()),
        }
    }

    /// Records the first failure and wakes everybody.
    pub fn fail(&self, error: &Error) -> String {
        let mut state = lock(&self.state);
        let why = state.failed.get_or_insert_with(|| format!("the guidance writer failed: {error}")).clone();
        for lane in &mut state.lanes {
            for job in lane.drain(..) {
                if let Job::Commit { ticket, .. } | Job::Flush { ticket, .. } = job {
                    ticket.answer(Err(why.clone()));
                }
            }
        }
        state.bytes = 0;
        self.work.notify_all();
        self.room.notify_all();
        why
    }

    fn full(&self, state: &State) -> Error {
        Error::Full(format!(
            "the guidance queue is full ({} of {} bytes): the disk is slower than the rollout; try again later, raise \
             queue_bytes or use on_full=\"block\"",
            state.bytes, self.limit
        ))
    }

    /// [`Error::Full`] if there is no room for `bytes`.
    pub fn check_room(&self, bytes: usize) -> Result<()> {
        let state = lock(&self.state);
        if state.failed.is_none() && state.bytes > 0 && state.bytes + bytes > self.limit {
            return Err(self.full(&state));
        }
        Ok(())
    }

    /// Queues a job on the lane of `handle`. `Ok(false)`: the queue is full and `on_full` says drop.
    pub fn push(&self, handle: u64, job: Job, on_full: OnFull) -> Result<bool> {
        let bytes = job.bytes();
        let mut state = lock(&self.state);
        let mut stalled = false;
        loop {
            if let Some(why) = &state.failed {
                return Err(Error::Failed(why.clone()));
            }
            if bytes == 0 || state.bytes == 0 || state.bytes + bytes <= self.limit {
                break;
            }
            match on_full {
                OnFull::Drop => return Ok(false),
                OnFull::Raise => return Err(self.full(&state)),
                OnFull::Block => {
                    state.stalls += !stalled as u64;
                    stalled = true;
                    state = self.room.wait(state).unwrap_or_else(|e| e.into_inner());
                }
            }
        }
        state.bytes += bytes;
        state.peak = state.peak.max(state.bytes);
        let lane = handle as usize % state.lanes.len();
        state.lanes[lane].push_back(job);
        self.work.notify_all();
        Ok(true)
    }

    /// Bytes queued now, at most so far, and how often a producer waited.
    pub fn depth(&self) -> (u64, u64, u64) {
        let state = lock(&self.state);
        (state.bytes as u64, state.peak as u64, state.stalls)
    }

    /// Lets the workers end once their lanes are empty.
    pub fn finish(&self) {
        lock(&self.state).closing = true;
        self.work.notify_all();
    }

    fn next(&self, lane: usize, block: bool) -> Option<Job> {
        let mut state = lock(&self.state);
        loop {
            if let Some(job) = state.lanes[lane].pop_front() {
                return Some(job);
            }
            if !block || state.closing {
                return None;
            }
            state = self.work.wait(state).unwrap_or_else(|e| e.into_inner());
        }
    }

    fn release(&self, bytes: usize) {
        let mut state = lock(&self.state);
        state.bytes = state.bytes.saturating_sub(bytes);
        self.room.notify_all();
    }

    /// A worker's life.
    pub fn work(&self, lane: usize) {
        // Answered when this function ends, after a failure has been recorded.
        let mut waiting = Waiting { tickets: Vec::new(), shared: self };
        let run = std::panic::AssertUnwindSafe(|| self.serve(lane, &mut waiting));
        match std::panic::catch_unwind(run) {
            Ok(Ok(())) => {}
            Ok(Err(e)) => drop(self.fail(&e)),
            Err(_) => drop(self.fail(&Error::Failed("a writer thread panicked; this is a bug".into()))),
        }
    }

    fn serve(&self, lane: usize, waiting: &mut Waiting) -> Result<()> {
        let mut encoder = Encoder::default();
        let mut buffer = Vec::new();
        loop {
            let job = match self.next(lane, waiting.tickets.is_empty()) {
                Some(job) => job,
                None if waiting.tickets.is_empty() => return Ok(()),
                None => {
                    lock(&self.sink).flush(false)?;
                    waiting.answer();
                    continue;
                }
            };
            let bytes = job.bytes();
            match job {
                Job::Rows { handle, place, rows } => {
                    self.encode(handle, place, &rows, &mut encoder, &mut buffer)?;
                    drop(rows);
                    self.release(bytes);
                }
                Job::Encoded { handle, place, payload, flags } => {
                    lock(&self.sink).chunk(handle, place, &self.schema, &payload, flags)?;
                    self.release(bytes);
                }
                Job::Commit { handle, traj, ticket } => {
                    waiting.tickets.push(ticket);
                    lock(&self.sink).commit(handle, &self.schema, *traj)?;
                }
                Job::Abandon { handle } => lock(&self.sink).abandon(handle)?,
                Job::Flush { sync, ticket } => {
                    waiting.tickets.push(ticket);
                    lock(&self.sink).flush(sync)?;
                    waiting.answer();
                }
            }
            if waiting.tickets.len() >= GROUP
                || !waiting.tickets.is_empty() && lock(&self.sink).buffered() > GROUP_BYTES
            {
                lock(&self.sink).flush(false)?;
                waiting.answer();
            }
        }
    }

    fn encode(
        &self,
        handle: u64,
        place: Place,
        rows: &[OwnedRows],
        encoder: &mut Encoder,
        buffer: &mut Vec<u8>,
    ) -> Result<()> {
        for &(a, b) in &self.groups {
            let sites = &self.schema.sites[a..b];
            let views: Vec<SiteRows> = rows[a..b]
                .iter()
                .zip(sites)
                .map(|(r, s)| SiteRows {
                    codes: if s.bits == 0 { crate::Codes::None } else { crate::Codes::Packed(&r.codes) },
                    scales: &r.scales,
                    token_scale: &r.token_scale,
                })
                .collect();
            let mut payload = Payload::in_buffer(std::mem::take(buffer));
            let flags = encoder.encode(sites, &views, place.ntok as usize, &mut payload);
            let place = Place { site0: a as u16, nsites: (b - a) as u16, ..place };
            lock(&self.sink).chunk(handle, place, &self.schema, &payload, flags)?;
            *buffer = payload.bytes;
        }
        Ok(())
    }
}

/// Commits that a worker owes an answer; a worker that dies answers with the failure.
struct Waiting<'a> {
    tickets: Vec<Ticket>,
    shared: &'a Shared,
}

impl Waiting<'_> {
    fn answer(&mut self) {
        self.tickets.drain(..).for_each(|t| t.answer(Ok(true)));
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.tickets.is_empty() {
            return;
        }
        let why = lock(&self.shared.state).failed.clone();
        let why = why.unwrap_or_else(|| "the guidance writer failed before this commit reached the disk".into());
        self.tickets.drain(..).for_each(|t| t.answer(Err(why.clone())));
    }
}
