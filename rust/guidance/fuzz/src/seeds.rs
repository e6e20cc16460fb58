//! Inputs to start from: small datasets with every kind of site, taken apart for each target.
use tracekit_guidance::manifest;
use tracekit_guidance::writer::{Begin, Options};
use tracekit_guidance::{Codes, Encoding, GlobalScale, ScaleFormat, Schema, Site, SiteRows, Status, Writer};

fn site(name: &str, encoding: Encoding, bits: u8, width: u32, planes: u32, per_token: bool) -> Site {
    let mx = name.ends_with('k');
    Site {
        name: name.into(),
        planes,
        first_plane: 0,
        all_planes: planes,
        width,
        profile: if mx { "mxfp4-rceil" } else { "nvfp4-exact" }.into(),
        block: if mx { 32 } else { 16 },
        bits,
        encoding,
        global_scale: if per_token { GlobalScale::PerToken } else { GlobalScale::Static(0x3f80_0000) },
        scale_format: if mx { ScaleFormat::E8m0 } else { ScaleFormat::E4m3 },
    }
}

fn noise(state: &mut u64) -> u8 {
    *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    (*state >> 56) as u8
}

/// A sealed segment of `lengths.len()` trajectories, and the manifest of its folder.
fn segment(encoding: Encoding, lengths: &[usize], chunk_tokens: u32) -> (Vec<u8>, Vec<u8>) {
    let bits = if encoding == Encoding::Rm15 { 1 } else { 2 };
    let sites = vec![
        site("a", encoding, bits, 64, 1, false),
        site("0.k", Encoding::Compact, 1, 64, 2, true),
        site("b", Encoding::Lossless, 0, 40, 1, false),
    ];
    let schema = Schema { sites, chunk_tokens, user: rmpv::Value::Map(vec![("run".into(), 7.into())]) };
    let dir = std::path::PathBuf::from(format!("/dev/shm/tracekit-seeds-{}", std::process::id()));
    std::fs::remove_dir_all(&dir).ok();
    let mut writer = Writer::new(&dir, schema.clone(), Options::default()).expect("a folder in memory");
    let mut state = 1;
    for (i, &n) in lengths.iter().enumerate() {
        let ids: Vec<i64> = (0..=n as i64).collect();
        let id = format!("t{i}");
        let handle = writer.begin(&Begin { id: &id, token_ids: &ids, part: (0, 1), ..Begin::default() }).unwrap();
        for (k, s) in schema.sites.iter().enumerate() {
            let codes: Vec<u8> = (0..n * s.planes as usize * s.code_row()).map(|_| noise(&mut state)).collect();
            let scales: Vec<u8> =
                (0..n * s.planes as usize * s.scale_row()).map(|_| 100 + noise(&mut state) % 4).collect();
            let token_scale = vec![1u8; if s.per_token() { 4 * n } else { 0 }];
            let codes = if s.bits == 0 { Codes::None } else { Codes::Packed(&codes) };
            writer.append(handle, k, 0, &SiteRows { codes, scales: &scales, token_scale: &token_scale }, n).unwrap();
        }
        let (codes, scales) = (vec![9u8; 64], [100u8; 4]);
        let whole = SiteRows { codes: Codes::Unpacked(&codes), scales: &scales, token_scale: &[] };
        writer.audit(handle, 0, &[n as u32 - 1], &whole).unwrap();
        writer.commit(handle, Status::Complete, b"\x80").unwrap();
    }
    writer.close().unwrap();
    let listed = manifest::commit(&dir).expect("the folder is whole");
    let bytes = std::fs::read(dir.join(&listed.segments[0].name)).unwrap();
    let manifest = std::fs::read(dir.join(manifest::file_name(listed.number))).unwrap();
    std::fs::remove_dir_all(&dir).ok();
    (bytes, manifest)
}

/// The inputs that target `name` starts from.
pub fn seeds(name: &str) -> Vec<Vec<u8>> {
    let kinds = [Encoding::Lossless, Encoding::Compact, Encoding::Low2, Encoding::Rm15];
    let mut out = Vec::new();
    for kind in kinds {
        let small = segment(kind, &[3, 9], 4);
        let large = segment(kind, &[900], 1024);
        match name {
            "open" => out.extend([small.0, large.0]),
            "manifest" => out.push(small.1),
            "index" => {
                for bytes in [small.0, large.0] {
                    let post = bytes.len() - 64;
                    let at = |k: usize| u32::from_le_bytes(bytes[post + k..post + k + 4].try_into().unwrap());
                    let (index, schema) = (at(8) as usize, 4096..4096 + u32_at(&bytes, 64) as usize);
                    out.push([&[at(40) as u8, at(44) as u8], &bytes[index..post]].concat());
                    out.push([&[0, 0], &bytes[schema]].concat());
                }
            }
            _ => {
                for bytes in [small.0, large.0] {
                    let first = 4096 + (u32_at(&bytes, 64) as usize).div_ceil(8) * 8;
                    let len = u32_at(&bytes, first + 8) as usize;
                    let head = [bytes[first + 5], bytes[first + 44].wrapping_sub(1), 0, 17];
                    out.push([&head[..], &bytes[first + 64..first + 64 + len]].concat());
                }
            }
        }
    }
    out
}

fn u32_at(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(b[at..at + 4].try_into().unwrap())
}
