//! `_core.Reader` and `_core.verify`.
use crate::convert::{f32_bytes_mut, raise, Buffer};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};
use std::path::PathBuf;
use tracekit_guidance::scan::Damage;
use tracekit_guidance::segment::Access;
use tracekit_guidance::{Dataset, Request, Target};

type Array<'py> = Option<Bound<'py, PyAny>>;
type Out<'py> = (Array<'py>, Array<'py>, Array<'py>, Array<'py>, (usize, usize));

struct Held {
    codes: Option<Buffer<u8>>,
    scales: Option<Buffer<u8>>,
    token_scale: Option<Buffer<f32>>,
    checks: Option<Buffer<u8>>,
    heads: (usize, usize),
}

fn damage_list<'py>(py: Python<'py>, damage: &[Damage]) -> PyResult<Bound<'py, PyList>> {
    PyList::new(py, damage.iter().map(|d| (d.offset, d.end, d.what.as_str(), d.torn_tail)))
}

/// Reads a dataset.
#[pyclass(frozen)]
pub struct Reader(Dataset);

#[pymethods]
impl Reader {
    #[new]
    #[pyo3(signature = (place, mmap=false, manifest=false, gap=1 << 20, retries=6))]
    fn new(py: Python<'_>, place: &str, mmap: bool, manifest: bool, gap: u64, retries: usize) -> PyResult<Self> {
        let access = if mmap { Access::Map } else { Access::Read };
        let data =
            py.detach(|| crate::object::open(place, access, manifest, gap, retries)).map_err(|e| raise(py, e))?;
        Ok(Reader(data))
    }

    /// Number of the manifest that the dataset was opened by, and why newer ones were refused.
    fn manifest(&self) -> (Option<u64>, Vec<String>) {
        (self.0.manifest, self.0.refused.clone())
    }

    /// One dict a segment.
    fn segments<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let dict = |s: &tracekit_guidance::segment::Segment| {
            let d = PyDict::new(py);
            d.set_item("path", s.path.to_string_lossy())?;
            d.set_item("bytes", s.len)?;
            d.set_item("sealed", s.sealed)?;
            d.set_item("trajectories", s.index.n_trajs())?;
            d.set_item("chunks", s.index.n_chunks())?;
            d.set_item("version", (s.header.major, s.header.minor))?;
            d.set_item("uuid", PyBytes::new(py, &s.header.uuid))?;
            d.set_item("created_ns", s.header.created_ns)?;
            let schema = s.schema.encode().map_err(|e| raise(py, e))?;
            d.set_item("schema", PyBytes::new(py, &schema))?;
            d.set_item("damage", damage_list(py, &s.damage)?)?;
            Ok(d)
        };
        self.0.segments.iter().map(dict).collect()
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    /// Ids of all trajectories whose parts are all committed, in the order of segments and of their beginning.
    fn ids(&self) -> Vec<String> {
        let mut ids = Vec::with_capacity(self.0.len());
        for s in &self.0.segments {
            for i in 0..s.index.n_trajs() {
                let id = String::from_utf8_lossy(s.index.id(i));
                if s.index.parts(i) <= 1 || self.0.find(&id).is_ok() {
                    ids.push(id.into_owned());
                }
            }
        }
        ids
    }

    fn contains(&self, id: &str) -> bool {
        self.0.find(id).is_ok()
    }

    /// What the commit says, one dict a part.
    fn find<'py>(&self, py: Python<'py>, id: &str) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let parts = self.0.find(id).map_err(|e| raise(py, e))?;
        let dict = |p: &tracekit_guidance::dataset::Part| {
            let d = PyDict::new(py);
            let t = &p.traj;
            d.set_item("segment", p.segment)?;
            d.set_item("n_tokens", t.n_tokens)?;
            d.set_item("n_ids", t.n_ids)?;
            d.set_item("first", t.first)?;
            d.set_item("n_chunks", t.n_chunks)?;
            d.set_item("policy_version", (t.policy_min, t.policy_max))?;
            d.set_item("status", t.status.name())?;
            d.set_item("part", (t.part, t.parts))?;
            d.set_item("prefix", if t.prefix.is_empty() { None } else { Some((&t.prefix, t.first)) })?;
            d.set_item("extra", PyBytes::new(py, &t.extra))?;
            Ok(d)
        };
        parts.iter().map(dict).collect()
    }

    /// Full rows of audited tokens: `(site, token, codes, scales, token scale)`.
    #[allow(clippy::type_complexity)]
    fn audit<'py>(
        &self,
        py: Python<'py>,
        id: &str,
    ) -> PyResult<Vec<(String, u32, Bound<'py, PyBytes>, Bound<'py, PyBytes>, f32)>> {
        let rows = py.detach(|| self.0.audit(id)).map_err(|e| raise(py, e))?;
        let row = |r: tracekit_guidance::audit::Row| {
            let scale = f32::from_le_bytes(r.token_scale);
            (r.site, r.token, PyBytes::new(py, &r.codes), PyBytes::new(py, &r.scales), scale)
        };
        Ok(rows.into_iter().map(row).collect())
    }

    /// Recorded tokens of each trajectory.
    fn lengths(&self, py: Python<'_>, ids: Vec<String>) -> PyResult<Vec<u32>> {
        ids.iter()
            .map(|id| self.0.find(id).map(|p| p[0].traj.n_tokens))
            .collect::<Result<_, _>>()
            .map_err(|e| raise(py, e))
    }

    /// Reads `ids[i]`'s tokens `[starts[i], stops[i])` one after another into `outs`, one
    /// `(codes, scales, token_scale, checks, (first head, end head))` a site.
    #[allow(clippy::too_many_arguments)]
    fn read_batch(
        &self,
        py: Python<'_>,
        ids: Vec<String>,
        starts: Vec<u32>,
        stops: Vec<u32>,
        sites: Vec<String>,
        outs: Vec<Out<'_>>,
        unpack: bool,
        tokens: Option<(Bound<'_, PyAny>, Bound<'_, PyAny>)>,
    ) -> PyResult<()> {
        let n = ids.len();
        if starts.len() != n || stops.len() != n || outs.len() != sites.len() {
            return Err(PyValueError::new_err("a batch needs one start and one stop an id, one output a site"));
        }
        let tokens = match &tokens {
            Some((flat, offsets)) => {
                Some((Buffer::<i64>::get(flat, "token_ids")?, Buffer::<i64>::get(offsets, "offsets")?))
            }
            None => None,
        };
        let mut rows = 0usize;
        let mut requests = Vec::with_capacity(n);
        for (i, id) in ids.iter().enumerate() {
            let (start, stop) = (starts[i], stops[i]);
            if start > stop {
                return Err(PyValueError::new_err(format!("trajectory '{id}': tokens {start}..{stop} run backwards")));
            }
            rows += (stop - start) as usize;
            let token_ids = match &tokens {
                None => None,
                Some((flat, offsets)) => {
                    let at = |k: usize| offsets.slice().get(k).and_then(|v| usize::try_from(*v).ok());
                    let range = at(i).zip(at(i + 1)).and_then(|(a, b)| flat.slice().get(a..b));
                    Some(range.ok_or_else(|| PyValueError::new_err("offsets do not fit token_ids"))?)
                }
            };
            requests.push(Request { id, start, stop, token_ids });
        }
        self.0.check_uniform(&sites).map_err(|e| raise(py, e))?;
        let mut held = Vec::with_capacity(outs.len());
        for (name, (codes, scales, token_scale, checks, (h0, h1))) in sites.iter().zip(&outs) {
            let site = self.0.site(name).map_err(|e| raise(py, e))?;
            if h0 > h1 || *h1 > site.all_planes as usize {
                let text = format!("site '{name}': heads {h0}..{h1} of {}", site.all_planes);
                return Err(PyValueError::new_err(text));
            }
            let h = Held {
                codes: codes.as_ref().map(|c| Buffer::get(c, "codes")).transpose()?,
                scales: scales.as_ref().map(|s| Buffer::get(s, "scales")).transpose()?,
                token_scale: token_scale.as_ref().map(|t| Buffer::get(t, "token_scale")).transpose()?,
                checks: checks.as_ref().map(|c| Buffer::get(c, "checks")).transpose()?,
                heads: (*h0, *h1),
            };
            let values = rows * (h1 - h0);
            let code_row = if unpack && site.bits > 0 { site.width as usize } else { site.code_row() };
            let fits = |got: Option<usize>, want: usize| got.is_none_or(|g| g == want);
            if !fits(h.codes.as_ref().map(|c| c.slice().len()), values * code_row)
                || !fits(h.scales.as_ref().map(|c| c.slice().len()), values * site.scale_row())
                || !fits(h.checks.as_ref().map(|c| c.slice().len()), values * site.check_row())
                || !fits(h.token_scale.as_ref().map(|c| c.slice().len()), rows)
            {
                return Err(PyValueError::new_err(format!("site '{name}': an output array has the wrong size")));
            }
            held.push(h);
        }
        let names: Vec<&str> = sites.iter().map(String::as_str).collect();
        let mut targets = Vec::with_capacity(held.len());
        for h in &mut held {
            targets.push(Target {
                heads: h.heads,
                codes: h.codes.as_mut().map(Buffer::slice_mut).transpose()?,
                unpack,
                scales: h.scales.as_mut().map(Buffer::slice_mut).transpose()?,
                token_scale: match h.token_scale.as_mut() {
                    Some(t) => Some(f32_bytes_mut(t.slice_mut()?)),
                    None => None,
                },
                checks: h.checks.as_mut().map(Buffer::slice_mut).transpose()?,
                row: 0,
            });
        }
        py.detach(|| self.0.read(&requests, &names, &mut targets)).map_err(|e| raise(py, e))
    }
}

/// Rebuilds missing indexes beside their segments: one dict a file.
#[pyfunction]
pub fn recover(py: Python<'_>, dir: PathBuf) -> PyResult<Vec<Bound<'_, PyDict>>> {
    let reports = py.detach(|| tracekit_guidance::recover::recover(&dir)).map_err(|e| raise(py, e))?;
    let dict = |r: &tracekit_guidance::recover::Recovered| {
        let d = PyDict::new(py);
        d.set_item("path", r.path.to_string_lossy())?;
        d.set_item("trajectories", r.trajectories)?;
        d.set_item("torn_bytes", r.torn_bytes)?;
        d.set_item("interior", damage_list(py, &r.interior)?)?;
        d.set_item("sidecar", r.sidecar.as_ref().map(|p| p.to_string_lossy()))?;
        Ok(d)
    };
    reports.iter().map(dict).collect()
}

/// Checks every byte of a dataset: one dict a file.
#[pyfunction]
pub fn verify(py: Python<'_>, dir: PathBuf) -> PyResult<Vec<Bound<'_, PyDict>>> {
    let reports = py.detach(|| tracekit_guidance::verify::verify(&dir)).map_err(|e| raise(py, e))?;
    let dict = |r: &tracekit_guidance::verify::FileReport| {
        let d = PyDict::new(py);
        d.set_item("path", r.path.to_string_lossy())?;
        d.set_item("bytes", r.bytes)?;
        d.set_item("records", r.records)?;
        d.set_item("trajectories", r.trajectories)?;
        d.set_item("sealed", r.sealed)?;
        d.set_item("damage", damage_list(py, &r.damage)?)?;
        Ok(d)
    };
    reports.iter().map(dict).collect()
}
