//! `seeds FOLDER`: writes each target's first inputs to `FOLDER/TARGET/`.
use std::path::PathBuf;

fn main() -> std::io::Result<()> {
    let root = PathBuf::from(std::env::args().nth(1).expect("usage: seeds FOLDER"));
    for target in ["open", "chunk", "index", "manifest"] {
        let dir = root.join(target);
        std::fs::create_dir_all(&dir)?;
        for (i, bytes) in tracekit_guidance_fuzz::seeds::seeds(target).iter().enumerate() {
            std::fs::write(dir.join(format!("seed-{i}")), bytes)?;
        }
    }
    Ok(())
}
