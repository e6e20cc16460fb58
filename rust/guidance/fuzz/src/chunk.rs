//! Any bytes as a chunk's payload, in either layout and every encoding.
use std::io::Write;
use tracekit_guidance::crc32c;
use tracekit_guidance::decode::{Chunk, Decoder, Target};
use tracekit_guidance::directory::{directory_len, entries_of};
use tracekit_guidance::index::ChunkEntry;
use tracekit_guidance::{Encoding, GlobalScale, ScaleFormat, Site};

fn site(k: u8) -> Site {
    let encoding = [Encoding::Lossless, Encoding::Compact, Encoding::Low2, Encoding::Rm15][k as usize & 3];
    let token = k & 16 != 0;
    Site {
        name: "x".into(),
        planes: 1 + (k as u32 >> 2 & 3),
        first_plane: 0,
        all_planes: 1 + (k as u32 >> 2 & 3),
        width: 1 + (k as u32 * 7) % 70,
        profile: "p".into(),
        block: 16,
        bits: if encoding == Encoding::Rm15 { 1 } else { k >> 5 & 3 },
        encoding,
        global_scale: if token { GlobalScale::PerToken } else { GlobalScale::Static(1) },
        scale_format: if k & 8 != 0 { ScaleFormat::E8m0 } else { ScaleFormat::E4m3 },
    }
}

/// Runs one input.
pub fn run(data: &[u8]) {
    let [flags, ntok, a, b, payload @ ..] = data else { return };
    let sites = [site(*a), Site { name: "y".into(), ..site(*b) }];
    let ntok = 1 + (*ntok as usize & 31);
    let len = payload.len();
    let mut bytes = payload.to_vec();
    bytes.resize(len.div_ceil(8) * 8, 0);
    let dir = directory_len(entries_of(&sites));
    if flags & 1 != 0 && dir <= len {
        let mut at = dir;
        for i in 0..entries_of(&sites) {
            let size = u32::from_le_bytes(bytes[16 * i..16 * i + 4].try_into().unwrap()) as usize;
            let Some(block) = bytes.get(at..at.saturating_add(size)) else { break };
            let crc = crc32c(block);
            bytes[16 * i + 8..16 * i + 12].copy_from_slice(&crc.to_le_bytes());
            at += size;
        }
        let crc = crc32c(&bytes[..dir - 8]);
        bytes[dir - 8..dir - 4].copy_from_slice(&crc.to_le_bytes());
    }
    let path = std::path::PathBuf::from(format!("/dev/shm/tracekit-fuzz-chunk-{}", std::process::id()));
    let mut file = std::fs::File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
    file.write_all(&[0; 64]).unwrap();
    file.write_all(&bytes).unwrap();
    let entry = ChunkEntry {
        traj: 0,
        site0: 0,
        nsites: 2,
        tok0: 0,
        ntok: ntok as u32,
        off: 0,
        len: len as u32,
        kind: 1,
        flags: flags & 3,
        crc: crc32c(&bytes),
        token_crc: 0,
        seq: 0,
    };
    let mut decoder = Decoder::default();
    for unpack in [false, true] {
        let mut outs: Vec<[Vec<u8>; 4]> = sites
            .iter()
            .map(|s| {
                let rows = ntok * s.planes as usize;
                let width = if unpack { s.width as usize } else { s.code_row() };
                let codes = vec![0; if s.bits > 0 { rows * width } else { 0 }];
                [codes, vec![0; rows * s.scale_row()], vec![0; rows * s.check_row()], vec![0; 4 * ntok]]
            })
            .collect();
        let mut targets: Vec<Target> = sites
            .iter()
            .zip(&mut outs)
            .map(|(s, [codes, scales, checks, token_scale])| Target {
                heads: (0, s.planes as usize),
                codes: (s.bits > 0).then_some(codes),
                unpack,
                scales: Some(scales),
                checks: Some(checks),
                token_scale: Some(token_scale),
                row: 0,
            })
            .collect();
        let chunk = Chunk { file: &file, path: &path, entry, sites: &sites, map: None };
        let _ = decoder.read(&chunk, 0, ntok, &[(0, 0), (1, 1)], &mut targets);
    }
}
