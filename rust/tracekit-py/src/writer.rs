//! `_core.Writer`.
use crate::convert::{f32_bytes, raise, Buffer};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tracekit_guidance::writer::{Begin, Mode, OnFull, Stats, Ticket};
use tracekit_guidance::{Codes, Error, Options, Result, Schema, SiteRows, Status, Sync};

type Rows<'py> = (Option<Bound<'py, PyAny>>, bool, Bound<'py, PyAny>, Option<Bound<'py, PyAny>>);

/// (First byte, bytes) in a row: of packed codes, if there are any, and of scales.
type Column = (Option<(usize, usize)>, (usize, usize));
type Item<'py> = (String, Bound<'py, PyAny>, i64, Bound<'py, PyAny>, Vec<u8>);

/// Bytes `at..at + n` of each row, one after another.
fn take(rows: &[u8], row_bytes: usize, (at, n): (usize, usize), out: &mut Vec<u8>) {
    out.clear();
    out.reserve(rows.len() / row_bytes * n);
    for row in rows.chunks_exact(row_bytes) {
        out.extend_from_slice(&row[at..at + n]);
    }
}

struct Held {
    codes: Option<Buffer<u8>>,
    packed: bool,
    scales: Buffer<u8>,
    token_scale: Option<Buffer<f32>>,
}

impl Held {
    fn get((codes, packed, scales, token_scale): &Rows<'_>) -> PyResult<Self> {
        Ok(Held {
            codes: codes.as_ref().map(|c| Buffer::get(c, "codes")).transpose()?,
            packed: *packed,
            scales: Buffer::get(scales, "scales")?,
            token_scale: token_scale.as_ref().map(|t| Buffer::get(t, "token_scale")).transpose()?,
        })
    }

    fn rows(&self) -> SiteRows<'_> {
        let codes = match &self.codes {
            None => Codes::None,
            Some(c) if self.packed => Codes::Packed(c.slice()),
            Some(c) => Codes::Unpacked(c.slice()),
        };
        let token_scale = self.token_scale.as_ref().map_or(&[][..], |t| f32_bytes(t.slice()));
        SiteRows { codes, scales: self.scales.slice(), token_scale }
    }
}

fn stats_dict(py: Python<'_>, s: Stats) -> PyResult<Bound<'_, PyDict>> {
    let d = PyDict::new(py);
    d.set_item("bytes", s.bytes)?;
    d.set_item("trajectories", s.trajectories)?;
    d.set_item("tokens", s.tokens)?;
    d.set_item("dropped", s.dropped)?;
    d.set_item("segments", s.segments)?;
    d.set_item("as_asked", s.as_asked)?;
    d.set_item("queued", s.queued)?;
    d.set_item("queued_peak", s.queued_peak)?;
    d.set_item("stalls", s.stalls)?;
    Ok(d)
}

/// Waits for a ticket as `Ticket::wait` does, and looks for signals meanwhile: Ctrl-C ends the wait, not the work.
fn wait(py: Python<'_>, ticket: &Ticket, timeout: Option<Duration>) -> PyResult<Option<bool>> {
    const STEP: Duration = Duration::from_millis(200);
    let until = timeout.and_then(|t| Instant::now().checked_add(t));
    loop {
        let left = until.map_or(STEP, |t| t.saturating_duration_since(Instant::now()).min(STEP));
        let done = py.detach(|| ticket.wait(Some(left))).map_err(|e| raise(py, e))?;
        if done.is_some() || until.is_some_and(|t| Instant::now() >= t) {
            return Ok(done);
        }
        py.check_signals()?;
    }
}

/// A commit on its way to the disk.
#[pyclass(frozen)]
pub struct Commit(Ticket);

#[pymethods]
impl Commit {
    /// Waits at most `timeout` seconds; True: committed, False: dropped with the queue full, None: not yet.
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<bool>> {
        let timeout = timeout.map(|t| Duration::try_from_secs_f64(t.max(0.0)).unwrap_or(Duration::MAX / 4));
        wait(py, &self.0, timeout)
    }
}

/// Writes a dataset's segments.
#[pyclass(frozen)]
pub struct Writer(Mutex<tracekit_guidance::Writer>, u32);

impl Writer {
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        f: impl FnOnce(&mut tracekit_guidance::Writer) -> Result<T> + Send,
    ) -> PyResult<T> {
        if std::process::id() != self.1 {
            let text = "a guidance writer cannot be used after a fork: open one in this process";
            return Err(raise(py, Error::Failed(text.into())));
        }
        py.detach(|| match self.0.lock() {
            Ok(mut w) => f(&mut w),
            Err(_) => Err(Error::Failed("the guidance writer stopped in the middle of a write".into())),
        })
        .map_err(|e| raise(py, e))
    }
}

#[pymethods]
impl Writer {
    #[new]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        dir: PathBuf,
        schema: &[u8],
        sync: &str,
        roll_bytes: u64,
        queue_bytes: usize,
        on_full: &str,
        threads: usize,
        manifest: bool,
        fan_out: bool,
        io: &str,
    ) -> PyResult<Self> {
        let on_full = match on_full {
            "block" => OnFull::Block,
            "drop" => OnFull::Drop,
            "raise" => OnFull::Raise,
            _ => return Err(PyValueError::new_err(format!("on_full '{on_full}': use block, drop or raise"))),
        };
        let mode = match io {
            "buffered" => Mode::Buffered,
            "direct" => Mode::Direct,
            "uring" => Mode::Uring,
            _ => return Err(PyValueError::new_err(format!("io '{io}': use buffered, direct or uring"))),
        };
        let sync = match sync {
            "seal" => Sync::Seal,
            "interval" => Sync::Interval,
            "commit" => Sync::Commit,
            _ => return Err(PyValueError::new_err(format!("sync '{sync}': use seal, interval or commit"))),
        };
        let schema = Schema::decode(schema).map_err(|e| raise(py, e))?;
        let options = Options { sync, roll_bytes, queue_bytes, on_full, threads, manifest, fan_out, mode };
        let writer = tracekit_guidance::Writer::new(&dir, schema, options).map_err(|e| raise(py, e))?;
        let pid = writer.pid();
        Ok(Writer(Mutex::new(writer), pid))
    }

    fn begin(
        &self,
        py: Python<'_>,
        id: &str,
        token_ids: &Bound<'_, PyAny>,
        policy: i64,
        prefix: Option<(String, u32)>,
        part: (u16, u16),
    ) -> PyResult<u64> {
        let tokens = Buffer::<i64>::get(token_ids, "token_ids")?;
        let prefix = prefix.as_ref().map(|(p, n)| (p.as_str(), *n));
        let begin = Begin { id, token_ids: tokens.slice(), policy, prefix, part };
        self.with(py, |w| w.begin(&begin))
    }

    fn append(&self, py: Python<'_>, handle: u64, site: usize, tok0: u32, ntok: usize, rows: Rows<'_>) -> PyResult<()> {
        let held = Held::get(&rows)?;
        let rows = held.rows();
        self.with(py, |w| w.append(handle, site, tok0, &rows, ntok))
    }

    fn audit(&self, py: Python<'_>, handle: u64, site: usize, tokens: Vec<u32>, rows: Rows<'_>) -> PyResult<()> {
        let held = Held::get(&rows)?;
        let rows = held.rows();
        self.with(py, |w| w.audit(handle, site, &tokens, &rows))
    }

    fn commit(&self, py: Python<'_>, handle: u64, status: &str, extra: &[u8]) -> PyResult<Commit> {
        let status = Status::parse(status).map_err(|e| raise(py, e))?;
        self.with(py, |w| w.commit(handle, status, extra)).map(Commit)
    }

    fn abandon(&self, py: Python<'_>, handle: u64) -> PyResult<()> {
        self.with(py, |w| w.abandon(handle))
    }

    /// Begins, appends and commits many trajectories.
    #[allow(clippy::too_many_arguments)]
    fn append_batch(
        &self,
        py: Python<'_>,
        ids: Vec<String>,
        tokens: &Bound<'_, PyAny>,
        offsets: &Bound<'_, PyAny>,
        policies: &Bound<'_, PyAny>,
        prefixes: Vec<Option<(String, u32)>>,
        lengths: Vec<u32>,
        sites: Vec<Rows<'_>>,
        status: &str,
    ) -> PyResult<()> {
        let status = Status::parse(status).map_err(|e| raise(py, e))?;
        let tokens = Buffer::<i64>::get(tokens, "token_ids")?;
        let offsets = Buffer::<i64>::get(offsets, "offsets")?;
        let policies = Buffer::<i64>::get(policies, "policy_version")?;
        let n = ids.len();
        if offsets.slice().len() != n + 1 || policies.slice().len() != n || prefixes.len() != n {
            return Err(PyValueError::new_err("a batch needs one policy and one prefix an id, and one offset more"));
        }
        let mut begins = Vec::with_capacity(n);
        for (i, id) in ids.iter().enumerate() {
            let (a, b) = (offsets.slice()[i], offsets.slice()[i + 1]);
            let range =
                usize::try_from(a).ok().zip(usize::try_from(b).ok()).and_then(|(a, b)| tokens.slice().get(a..b));
            let token_ids =
                range.ok_or_else(|| PyValueError::new_err(format!("offsets {a}..{b} are outside token_ids")))?;
            let prefix = prefixes[i].as_ref().map(|(p, n)| (p.as_str(), *n));
            begins.push(Begin { id, token_ids, policy: policies.slice()[i], prefix, part: (0, 1) });
        }
        let held: Vec<Held> = sites.iter().map(Held::get).collect::<PyResult<_>>()?;
        let rows: Vec<SiteRows> = held.iter().map(Held::rows).collect();
        self.with(py, |w| w.append_batch(&begins, &lengths, &rows, status))
    }

    /// Begins, appends and commits trajectories whose rows hold all sites side by side, and waits for the commits; the
    /// GIL is taken twice. An item is (id, token_ids, policy, rows, extra), a column the (first byte, bytes) of a
    /// site's packed codes, if it has any, and of its scales.
    fn append_rows(
        &self,
        py: Python<'_>,
        items: Vec<Item<'_>>,
        row_bytes: usize,
        columns: Vec<Column>,
        part: (u16, u16),
    ) -> PyResult<bool> {
        let parts = || columns.iter().flat_map(|(codes, scales)| codes.iter().chain([scales]));
        if row_bytes == 0 || parts().any(|&(at, n)| at.checked_add(n).is_none_or(|end| end > row_bytes)) {
            return Err(PyValueError::new_err(format!("a column lies outside rows of {row_bytes} bytes")));
        }
        let mut held = Vec::with_capacity(items.len());
        for (id, tokens, policy, rows, extra) in &items {
            let rows = Buffer::<u8>::get(rows, "rows")?;
            if rows.slice().len() % row_bytes != 0 {
                return Err(PyValueError::new_err(format!("rows of '{id}' are not whole rows of {row_bytes} bytes")));
            }
            held.push((id.as_str(), Buffer::<i64>::get(tokens, "token_ids")?, *policy, rows, extra.as_slice()));
        }
        let tickets = self.with(py, |w| {
            let (mut codes, mut scales, mut tickets) = (Vec::new(), Vec::new(), Vec::with_capacity(held.len()));
            for (id, tokens, policy, rows, extra) in &held {
                let begin = Begin { id, token_ids: tokens.slice(), policy: *policy, prefix: None, part };
                let handle = w.begin(&begin)?;
                let mut whole = || {
                    for (site, (of_codes, of_scales)) in columns.iter().enumerate() {
                        take(rows.slice(), row_bytes, of_codes.unwrap_or((0, 0)), &mut codes);
                        take(rows.slice(), row_bytes, *of_scales, &mut scales);
                        let codes = if of_codes.is_some() { Codes::Packed(&codes) } else { Codes::None };
                        let rows_of_site = SiteRows { codes, scales: &scales, token_scale: &[] };
                        w.append(handle, site, 0, &rows_of_site, rows.slice().len() / row_bytes)?;
                    }
                    w.commit(handle, Status::Complete, extra)
                };
                match whole() {
                    Ok(ticket) => tickets.push(ticket),
                    Err(error) => {
                        let _ = w.abandon(handle);
                        return Err(error);
                    }
                }
            }
            Ok(tickets)
        })?;
        tickets.iter().try_fold(true, |all, t| wait(py, t, None).map(|done| all && done == Some(true)))
    }

    fn flush(&self, py: Python<'_>, sync: bool) -> PyResult<()> {
        let tickets = self.with(py, |w| w.flush(sync))?;
        tickets.iter().try_for_each(|t| wait(py, t, None).map(drop))
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.with(py, |w| Ok(w.stats()))?;
        stats_dict(py, stats)
    }

    fn close<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.with(py, |w| w.close())?;
        stats_dict(py, stats)
    }
}
