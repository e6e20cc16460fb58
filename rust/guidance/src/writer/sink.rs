//! The segment files of a writer: which one a trajectory goes to, when they roll over, when they are synced.
use super::file::{sync_folder, Place, SegmentFile};
use super::{Options, Stats, Sync};
use crate::chunk::Payload;
use crate::error::{Error, Result};
use crate::schema::Schema;
use crate::traj::Traj;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Where a trajectory's records go.
#[derive(Clone, Copy)]
struct Home {
    file: u32,
    number: u32,
    n_chunks: u32,
}

/// Owns the files; the workers and batches take turns.
pub struct Sink {
    dir: PathBuf,
    name: String,
    options: Options,
    files: BTreeMap<u32, SegmentFile>,
    next_file: u32,
    homes: HashMap<u64, Home>,
    last_sync: Instant,
    sealed_bytes: u64,
    /// Counts.
    pub stats: Stats,
}

impl Sink {
    /// A sink without files.
    pub fn new(dir: &Path, options: Options) -> Result<Self> {
        std::fs::create_dir_all(dir).map_err(|e| Error::io(dir, "create", e))?;
        let mut name = [0u8; 4];
        getrandom::fill(&mut name).map_err(|e| Error::io(dir, "name a writer of", std::io::Error::other(e)))?;
        Ok(Sink {
            dir: dir.to_owned(),
            name: format!("{:08x}", u32::from_le_bytes(name)),
            options,
            files: BTreeMap::new(),
            next_file: 0,
            homes: HashMap::new(),
            last_sync: Instant::now(),
            sealed_bytes: 0,
            stats: Stats::default(),
        })
    }

    /// Counts with the sizes of the files.
    pub fn stats(&self) -> Stats {
        let bytes = self.sealed_bytes + self.files.values().map(SegmentFile::len).sum::<u64>();
        Stats { bytes, segments: self.next_file as u64, ..self.stats.clone() }
    }

    fn current(&mut self, schema: &Schema) -> Result<u32> {
        if let Some((key, file)) = self.files.last_key_value() {
            if !file.full && file.len() < self.options.roll_bytes {
                return Ok(*key);
            }
        }
        let old: Vec<u32> = self.files.keys().copied().collect();
        for key in old {
            self.files.get_mut(&key).expect("listed").full = true;
            self.seal_if_done(key)?;
        }
        let key = self.next_file;
        let name = format!("seg-{}-{key:05}", self.name);
        let dir = if self.options.fan_out { self.dir.join(&self.name[..2]) } else { self.dir.clone() };
        if self.options.fan_out && !dir.is_dir() {
            std::fs::create_dir_all(&dir).map_err(|e| Error::io(&dir, "create", e))?;
            sync_folder(&self.dir)?;
        }
        let file = SegmentFile::create(&dir, &name, schema, self.options.mode)?;
        self.next_file += 1;
        self.stats.as_asked += (file.mode() == self.options.mode) as u64;
        self.files.insert(key, file);
        Ok(key)
    }

    fn seal_if_done(&mut self, key: u32) -> Result<()> {
        if self.files.get(&key).is_some_and(|f| f.full && f.open_trajs == 0) {
            let file = self.files.remove(&key).expect("present");
            self.sealed_bytes += file.seal()?;
            if self.options.manifest {
                crate::manifest::commit(&self.dir)?;
            }
        }
        Ok(())
    }

    fn home(&mut self, handle: u64, schema: &Schema) -> Result<Home> {
        if let Some(home) = self.homes.get(&handle) {
            return Ok(*home);
        }
        let file = self.current(schema)?;
        let number = self.files.get_mut(&file).expect("current").begin();
        let home = Home { file, number, n_chunks: 0 };
        self.homes.insert(handle, home);
        Ok(home)
    }

    /// Appends a chunk of trajectory `handle`; `place.traj` is filled in.
    pub fn chunk(&mut self, handle: u64, place: Place, schema: &Schema, payload: &Payload, flags: u8) -> Result<()> {
        let home = self.home(handle, schema)?;
        let file = self.files.get_mut(&home.file).expect("a segment with open trajectories stays open");
        let sites = &schema.sites[place.site0 as usize..(place.site0 + place.nsites) as usize];
        file.chunk(Place { traj: home.number, ..place }, sites, payload, flags)?;
        self.homes.get_mut(&handle).expect("just there").n_chunks += (place.kind == crate::layout::kind::CHUNK) as u32;
        Ok(())
    }

    /// Appends a commit; it counts once [`flush`](Self::flush) has returned.
    pub fn commit(&mut self, handle: u64, schema: &Schema, mut traj: Traj) -> Result<()> {
        let home = self.home(handle, schema)?;
        self.homes.remove(&handle);
        self.stats.trajectories += 1;
        self.stats.tokens += (traj.n_tokens - traj.first) as u64;
        (traj.number, traj.n_chunks) = (home.number, home.n_chunks);
        let file = self.files.get_mut(&home.file).expect("a segment with open trajectories stays open");
        file.commit(traj);
        if file.full {
            return self.seal_if_done(home.file);
        }
        Ok(())
    }

    /// Forgets a trajectory.
    pub fn abandon(&mut self, handle: u64) -> Result<()> {
        self.stats.dropped += 1;
        let Some(home) = self.homes.remove(&handle) else { return Ok(()) };
        self.files.get_mut(&home.file).expect("open").open_trajs -= 1;
        self.seal_if_done(home.file)
    }

    /// Bytes that were appended and not handed to the operating system.
    pub fn buffered(&self) -> usize {
        self.files.values().map(SegmentFile::buffered).sum()
    }

    /// Hands everything to the operating system, and to the disk if `sync` or when the options say so.
    pub fn flush(&mut self, sync: bool) -> Result<()> {
        let due = sync
            || match self.options.sync {
                Sync::Seal => false,
                Sync::Interval => self.last_sync.elapsed() > Duration::from_secs(1),
                Sync::Commit => true,
            };
        for file in self.files.values_mut() {
            file.flush()?;
            if due {
                file.sync()?;
            }
        }
        if due {
            self.last_sync = Instant::now();
        }
        Ok(())
    }

    /// Seals every file; trajectories without a commit are dropped.
    pub fn close(&mut self) -> Result<()> {
        self.homes.clear();
        let keys: Vec<u32> = self.files.keys().copied().collect();
        for key in keys {
            let file = self.files.get_mut(&key).expect("listed");
            (file.full, file.open_trajs) = (true, 0);
            self.seal_if_done(key)?;
        }
        Ok(())
    }
}
