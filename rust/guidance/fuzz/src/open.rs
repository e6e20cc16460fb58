//! Any bytes as a segment, sealed and unsealed: open, look up, read, verify, recover. The harness repairs checksums,
//! so that the fuzzer gets behind them.
use tracekit_guidance::crc32c;
use tracekit_guidance::{Dataset, Request, Target};

fn put(b: &mut [u8], at: usize, v: u32) {
    b[at..at + 4].copy_from_slice(&v.to_le_bytes());
}

fn u64_at(b: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(b[at..at + 8].try_into().unwrap())
}

/// Makes the checksums of header, schema, records, index and postscript right where the structures allow it.
fn repair(b: &mut [u8]) {
    let len = b.len();
    if len < 4096 {
        return;
    }
    b[..8].copy_from_slice(b"\x89TKG\r\n\x1a\n");
    b[8..10].copy_from_slice(&1u16.to_le_bytes());
    let known = u64_at(b, 16) & tracekit_guidance::layout::KNOWN_INCOMPAT;
    b[16..24].copy_from_slice(&known.to_le_bytes());
    let schema = u32::from_le_bytes(b[64..68].try_into().unwrap()) as usize;
    let first = 4096usize.saturating_add(schema.div_ceil(8) * 8);
    if first <= len {
        let crc = crc32c(&b[4096..first]);
        put(b, 68, crc);
    }
    let crc = crc32c(&b[..4092]);
    put(b, 4092, crc);
    let (uuid, mut at, mut seq) = (u64_at(b, 32), first, 0u64);
    while at.saturating_add(64) <= len && &b[at..at + 4] == b"TKR1" {
        let size = u64_at(b, at + 8);
        let end = (at as u64 + 64).saturating_add(size.div_ceil(8).saturating_mul(8));
        b[at + 16..at + 24].copy_from_slice(&seq.to_le_bytes());
        b[at + 24..at + 32].copy_from_slice(&uuid.to_le_bytes());
        if end <= len as u64 && b[at + 5] & 1 == 0 {
            let crc = crc32c(&b[at + 64..end as usize]);
            put(b, at + 32, crc);
        }
        let crc = crc32c(&b[at..at + 60]);
        put(b, at + 60, crc);
        if end > len as u64 {
            break;
        }
        (at, seq) = (end as usize, seq + 1);
    }
    let post = len - 64;
    b[post..post + 4].copy_from_slice(b"TKP1");
    b[post + 56..].copy_from_slice(b"TKGEND\r\n");
    b[post + 24..post + 32].copy_from_slice(&(len as u64).to_le_bytes());
    b[post + 32..post + 40].copy_from_slice(&uuid.to_le_bytes());
    let off = u64_at(b, post + 8);
    if off <= post as u64 {
        b[post + 16..post + 24].copy_from_slice(&(post as u64 - off).to_le_bytes());
        let crc = crc32c(&b[off as usize..post]);
        put(b, post + 48, crc);
    }
    put(b, post + 52, 0);
    let crc = crc32c(&b[post..]);
    put(b, post + 52, crc);
}

/// Runs one input.
pub fn run(data: &[u8]) {
    let mut bytes = data.to_vec();
    if data.first().is_none_or(|b| b & 7 != 0) {
        repair(&mut bytes);
    }
    let dir = std::path::PathBuf::from(format!("/dev/shm/tracekit-fuzz-open-{}", std::process::id()));
    for name in ["seg-a.tkg", "seg-a.tkg.open"] {
        std::fs::remove_dir_all(&dir).ok();
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join(name), &bytes).unwrap();
        let _ = tracekit_guidance::verify::verify(&dir);
        let _ = tracekit_guidance::recover::recover(&dir);
        let _ = tracekit_guidance::manifest::commit(&dir);
        let Ok(dataset) = Dataset::open(&dir) else { continue };
        let Some(segment) = dataset.segments.first() else { continue };
        for i in 0..segment.index.n_trajs().min(4) {
            let id = String::from_utf8_lossy(segment.index.id(i)).into_owned();
            let _ = dataset.audit(&id);
            let Ok(parts) = dataset.find(&id) else { continue };
            let stop = parts[0].traj.n_tokens.min(16);
            let site = &segment.schema.sites[0];
            let rows = stop as usize * site.planes as usize;
            if rows * site.width as usize > 1 << 22 {
                continue;
            }
            let mut codes = vec![0; if site.bits > 0 { rows * site.width as usize } else { 0 }];
            let (mut scales, mut checks) = (vec![0; rows * site.scale_row()], vec![0; rows * site.check_row()]);
            let mut token_scale = vec![0; 4 * stop as usize];
            let target = Target {
                heads: (0, site.planes as usize),
                codes: (site.bits > 0).then_some(&mut codes[..]),
                unpack: true,
                scales: Some(&mut scales),
                checks: Some(&mut checks),
                token_scale: Some(&mut token_scale),
                row: 0,
            };
            let request = Request { id: &id, start: 0, stop, token_ids: None };
            let _ = dataset.read(&[request], &[&site.name], &mut [target]);
        }
    }
}
