//! The segment files of a folder.
use crate::error::{Error, Result};
use std::path::{Path, PathBuf};

/// The segment files of a folder and of its fan-out folders, oldest name first.
pub fn segment_files(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    list_segments(dir, true, &mut files)?;
    files.sort_by(|a, b| (a.file_name(), a).cmp(&(b.file_name(), b)));
    Ok(files)
}

/// Where the segment file `name` of a folder lies: there, or in the fan-out folder that its name says.
pub fn segment_path(dir: &Path, name: &str) -> PathBuf {
    let plain = dir.join(name);
    match name.strip_prefix("seg-").and_then(|rest| rest.get(..2)) {
        Some(sub) if !plain.exists() => Some(dir.join(sub).join(name)).filter(|p| p.exists()).unwrap_or(plain),
        _ => plain,
    }
}

fn list_segments(dir: &Path, fan_out: bool, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(dir).map_err(|e| Error::io(dir, "list", e))? {
        let entry = entry.map_err(|e| Error::io(dir, "list", e))?;
        let path = entry.path();
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        if name.ends_with(".tkg") || name.ends_with(".tkg.open") {
            // To open a pipe would wait for somebody to write to it.
            let odd = !entry.file_type().is_ok_and(|t| t.is_file());
            if odd && std::fs::metadata(&path).is_ok_and(|m| !m.is_file()) {
                return Err(Error::Missing(format!("{} is no file: move it out of the folder", path.display())));
            }
            files.push(path);
        } else if fan_out && name.len() == 2 && name.bytes().all(|b| b.is_ascii_hexdigit()) && path.is_dir() {
            list_segments(&path, false, files)?;
        }
    }
    Ok(())
}
