//! A folder of segments, read as one.
use crate::error::{Error, Result};
use crate::folder::{segment_files, segment_path};
use crate::index::ChunkRange;
use crate::manifest;
use crate::schema::Site;
use crate::segment::{recordless, Access, Segment};
use crate::traj::Traj;
use std::path::{Path, PathBuf};

/// Committed parts of a trajectory.
#[derive(Clone, Debug)]
pub struct Part {
    /// Segment number in the dataset.
    pub segment: usize,
    /// The commit.
    pub traj: Traj,
    /// Its chunks.
    pub chunks: ChunkRange,
}

/// An open dataset.
#[derive(Debug)]
pub struct Dataset {
    /// The folder.
    pub dir: PathBuf,
    /// Its segments, oldest first.
    pub segments: Vec<Segment>,
    /// Number of the manifest that it was opened by; `None` if it was opened by what lies in the folder.
    pub manifest: Option<u64>,
    /// Why newer manifests were refused.
    pub refused: Vec<String>,
}

impl Dataset {
    /// Opens every segment of `dir`; chunks are read into buffers.
    pub fn open(dir: &Path) -> Result<Self> {
        Self::open_with(dir, Access::Read)
    }

    /// Maps every segment into memory, if `access` says so.
    pub fn open_with(dir: &Path, access: Access) -> Result<Self> {
        let files = segment_files(dir)?;
        if files.is_empty() {
            return Err(Error::Missing(format!(
                "{} holds no guidance segments (*.tkg): give the folder that a GuidanceWriter wrote to",
                dir.display()
            )));
        }
        let mut segments = Vec::with_capacity(files.len());
        for path in &files {
            match Segment::open(path) {
                Ok(s) => segments.push(s),
                // Once more: its writer may have been at its head.
                Err(Error::Corrupt { .. }) if !recordless(path) => segments.push(Segment::open(path)?),
                Err(Error::Corrupt { .. }) => {}
                // Sealed between the listing and the opening.
                Err(Error::Io { .. }) if !path.exists() && path.with_extension("").exists() => {
                    segments.push(Segment::open(&path.with_extension(""))?);
                }
                Err(e) => return Err(e),
            }
        }
        if access == Access::Map {
            segments.iter_mut().try_for_each(Segment::map_file)?;
        }
        Ok(Dataset::of(dir, segments, None, Vec::new()))
    }

    /// Opens what the newest valid manifest of `dir` lists: sealed segments only, the same ones for everybody who opens
    /// that manifest, however many writers go on. Without a manifest that holds, what lies in the folder.
    pub fn open_listed(dir: &Path, access: Access) -> Result<Self> {
        let (newest, refused) = manifest::latest(dir)?;
        let Some((listed, _)) = newest else {
            return Dataset::open_with(dir, access).map(|d| Dataset { refused, ..d });
        };
        let mut segments = Vec::with_capacity(listed.segments.len());
        for entry in &listed.segments {
            let path = segment_path(dir, &entry.name);
            let file = std::fs::File::open(&path).map_err(|e| match e.kind() {
                std::io::ErrorKind::NotFound => Error::Missing(format!(
                    "{} is gone, but {} lists it: it was deleted since; publish the folder again, or open it without \
                     its manifest",
                    path.display(),
                    manifest::file_name(listed.number)
                )),
                _ => Error::io(&path, "open", e),
            })?;
            let len = file.metadata().map_err(|e| Error::io(&path, "stat", e))?.len();
            if len != entry.bytes {
                let what = format!("it has {len} bytes, its manifest lists {}", entry.bytes);
                return Err(Error::corrupt(&path, len.min(entry.bytes), what));
            }
            let first = file.try_clone().map_err(|e| Error::io(&path, "open", e))?;
            segments.push(Segment::open_listed(&path, Box::new(file), &first, entry)?);
        }
        if access == Access::Map {
            segments.iter_mut().try_for_each(Segment::map_file)?;
        }
        Ok(Dataset::of(dir, segments, Some(listed.number), refused))
    }

    /// A dataset of open segments.
    pub fn of(dir: &Path, mut segments: Vec<Segment>, manifest: Option<u64>, refused: Vec<String>) -> Self {
        segments.sort_by(|a, b| (a.header.created_ns, &a.path).cmp(&(b.header.created_ns, &b.path)));
        Dataset { dir: dir.to_owned(), segments, manifest, refused }
    }

    /// Committed trajectories, counting a part as one.
    pub fn len(&self) -> usize {
        self.segments.iter().map(|s| s.index.n_trajs()).sum()
    }

    /// Whether nothing is committed.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The committed parts of a trajectory; of a part written twice the newest.
    pub fn find(&self, id: &str) -> Result<Vec<Part>> {
        let mut parts: Vec<Part> = Vec::new();
        for (i, segment) in self.segments.iter().enumerate().rev() {
            let Some(k) = segment.index.find(id) else {
                continue;
            };
            let Some((traj, chunks)) = segment.index.traj(k) else {
                return Err(Error::corrupt(&segment.path, segment.records_end, format!("index entry of '{id}'")));
            };
            if parts.iter().any(|p| p.traj.part == traj.part || p.traj.parts != traj.parts) {
                continue;
            }
            let last = traj.parts <= 1;
            parts.push(Part { segment: i, traj, chunks });
            if last {
                break;
            }
        }
        match parts.first() {
            None => Err(Error::Missing(format!(
                "trajectory '{id}' is not in {}: {} are committed there; check the id and the folder",
                self.dir.display(),
                self.len()
            ))),
            Some(p) if parts.len() < p.traj.parts.max(1) as usize => Err(Error::Missing(format!(
                "trajectory '{id}' has {} of {} parts in {}: wait until every rank has committed",
                parts.len(),
                p.traj.parts,
                self.dir.display()
            ))),
            Some(_) => Ok(parts),
        }
    }

    /// The first segment that has the site, and the site.
    pub fn site(&self, name: &str) -> Result<&Site> {
        self.segments
            .iter()
            .rev()
            .find_map(|s| s.schema.site(name).map(|i| &s.schema.sites[i]))
            .ok_or_else(|| self.no_site(name))
    }

    /// An error if segments disagree on the row layout of a site.
    pub fn check_uniform(&self, names: &[impl AsRef<str>]) -> Result<()> {
        for name in names.iter().map(AsRef::as_ref) {
            let first = self.site(name)?;
            for s in self.segments.iter().filter_map(|s| s.schema.site(name).map(|i| &s.schema.sites[i])) {
                let shape = |s: &Site| (s.all_planes, s.width, s.block, s.bits, s.encoding, s.profile.clone());
                let scale = s.split() && s.global_scale != first.global_scale;
                if shape(s) != shape(first) || scale {
                    return Err(Error::Mismatch(format!(
                        "site '{name}' has other rows in some segments of {}: read each run's folder by itself",
                        self.dir.display()
                    )));
                }
            }
        }
        Ok(())
    }

    pub(crate) fn no_site(&self, name: &str) -> Error {
        let mut have: Vec<&str> =
            self.segments.iter().flat_map(|s| s.schema.sites.iter().map(|s| s.name.as_str())).collect();
        have.sort_unstable();
        have.dedup();
        let few: Vec<&str> = have.iter().take(6).copied().collect();
        Error::Missing(format!(
            "site '{name}' is not recorded in {}: it has {} sites ({}{}); add the site to the writer's schema",
            self.dir.display(),
            have.len(),
            few.join(", "),
            if have.len() > few.len() { " …" } else { "" }
        ))
    }
}
