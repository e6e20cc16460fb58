//! `_core.SlotStore`: rows by slot, written and read by a thread that never needs the interpreter.
use crate::convert::{raise, Buffer};
use pyo3::exceptions::{PyKeyError, PyValueError};
use pyo3::prelude::*;
use std::sync::mpsc::{channel, sync_channel, Receiver, Sender, SyncSender, TrySendError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use tracekit_guidance::slots::{SlotError, Slots};
use tracekit_guidance::Error;

type Answer = Result<(Vec<u8>, Vec<i64>), SlotError>;

#[derive(Default)]
struct Cell {
    answer: Mutex<Option<Answer>>,
    ready: Condvar,
}

enum Job {
    Put(Buffer<i64>, Buffer<u8>, i64),
    Find(Vec<i64>, Arc<Cell>),
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Rows of some slots, as they were when they were asked for.
#[pyclass(frozen)]
pub struct Found(Arc<Cell>);

#[pymethods]
impl Found {
    /// Waits for the rows and copies them to `rows` u8 [n, R] and `versions` int64 [n]. KeyError: a slot without row.
    fn copy_to(&self, py: Python<'_>, rows: &Bound<'_, PyAny>, versions: &Bound<'_, PyAny>) -> PyResult<()> {
        let (mut rows, mut versions) = (Buffer::<u8>::get(rows, "rows")?, Buffer::<i64>::get(versions, "versions")?);
        let (to_rows, to_versions) = (rows.slice_mut()?, versions.slice_mut()?);
        let done = py.detach(|| {
            let mut answer = lock(&self.0.answer);
            while answer.is_none() {
                answer = self.0.ready.wait(answer).unwrap_or_else(PoisonError::into_inner);
            }
            match answer.as_ref() {
                Some(Ok((r, v))) if r.len() == to_rows.len() && v.len() == to_versions.len() => {
                    to_rows.copy_from_slice(r);
                    to_versions.copy_from_slice(v);
                    Ok(())
                }
                Some(Ok((r, _))) => Err((format!("{} bytes do not go into {}", r.len(), to_rows.len()), false)),
                Some(Err(e)) => Err((e.to_string(), true)),
                None => Ok(()),
            }
        });
        done.map_err(|(text, key)| if key { PyKeyError::new_err(text) } else { PyValueError::new_err(text) })
    }
}

/// The store and its thread. Buffers that the thread has read come back to be let go of by who holds the interpreter.
#[pyclass(frozen)]
pub struct SlotStore {
    jobs: Mutex<Option<SyncSender<Job>>>,
    used: Mutex<Receiver<(Buffer<i64>, Buffer<u8>)>>,
    error: Arc<Mutex<Option<String>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

fn work(
    mut slots: Slots,
    jobs: &Receiver<Job>,
    used: &Sender<(Buffer<i64>, Buffer<u8>)>,
    error: &Mutex<Option<String>>,
) {
    for job in jobs {
        match job {
            Job::Put(at, rows, version) => {
                if let Err(e) = slots.put(at.slice(), rows.slice(), version) {
                    lock(error).get_or_insert(e.to_string());
                }
                if let Err(back) = used.send((at, rows)) {
                    std::mem::forget(back); // the interpreter is going away, and its buffers with it
                }
            }
            Job::Find(at, cell) => {
                *lock(&cell.answer) = Some(slots.take(&at));
                cell.ready.notify_all();
            }
        }
    }
}

impl SlotStore {
    fn queue(&self, py: Python<'_>, job: Job) -> PyResult<()> {
        let used = lock(&self.used);
        while let Ok(buffers) = used.try_recv() {
            drop(buffers);
        }
        drop(used);
        let Some(jobs) = lock(&self.jobs).clone() else {
            return Err(raise(py, Error::Failed("the store of rows is closed".into())));
        };
        match jobs.try_send(job) {
            Ok(()) => Ok(()),
            Err(TrySendError::Full(job)) => py.detach(|| jobs.send(job)).map_err(|_| ()),
            Err(TrySendError::Disconnected(_)) => Err(()),
        }
        .map_err(|()| raise(py, Error::Failed("the thread of the store of rows has ended".into())))
    }
}

#[pymethods]
impl SlotStore {
    /// A store of `slots` rows of `row_bytes`; `waiting` jobs may wait before `put` and `find` do.
    #[new]
    fn new(slots: usize, row_bytes: usize, waiting: usize) -> PyResult<Self> {
        if slots.checked_mul(row_bytes).is_none_or(|n| n > isize::MAX as usize) {
            return Err(PyValueError::new_err(format!("{slots} rows of {row_bytes} bytes are too many")));
        }
        let (jobs, take) = sync_channel(waiting);
        let (give, used) = channel();
        let error = Arc::new(Mutex::new(None));
        let told = Arc::clone(&error);
        let thread = std::thread::Builder::new()
            .name("tracekit-slots".into())
            .spawn(move || work(Slots::new(slots, row_bytes), &take, &give, &told))?;
        Ok(SlotStore { jobs: Mutex::new(Some(jobs)), used: Mutex::new(used), error, thread: Mutex::new(Some(thread)) })
    }

    /// What a `put` before this could not do; None if all went well.
    #[getter]
    fn error(&self) -> Option<String> {
        lock(&self.error).clone()
    }

    fn put(&self, py: Python<'_>, slots: &Bound<'_, PyAny>, rows: &Bound<'_, PyAny>, version: i64) -> PyResult<()> {
        let job = Job::Put(Buffer::get(slots, "slots")?, Buffer::get(rows, "rows")?, version);
        self.queue(py, job)
    }

    fn find(&self, py: Python<'_>, slots: &Bound<'_, PyAny>) -> PyResult<Found> {
        let cell = Arc::new(Cell::default());
        let slots = Buffer::<i64>::get(slots, "slots")?.slice().to_vec();
        self.queue(py, Job::Find(slots, Arc::clone(&cell)))?;
        Ok(Found(cell))
    }

    /// Ends the thread after what is queued.
    fn close(&self, py: Python<'_>) {
        drop(lock(&self.jobs).take());
        let thread = lock(&self.thread).take();
        py.detach(|| thread.map(JoinHandle::join));
    }
}
