//! A writer by io_uring on a file that may not grow: short write, then an error, each as a result of a write that the
//! kernel had taken. Alone in its process, because the limit is the process's.
#![cfg(all(target_os = "linux", feature = "uring"))]
use tracekit_guidance::recover::recover;
use tracekit_guidance::writer::{Begin, Mode};
use tracekit_guidance::*;

const TOKENS: usize = 256;
const WIDTH: usize = 65_536;

fn site() -> Site {
    Site {
        name: "layers.0.moe_input".into(),
        planes: 1,
        first_plane: 0,
        all_planes: 1,
        width: WIDTH as u32,
        profile: "nvfp4-exact".into(),
        block: 16,
        bits: 1,
        encoding: Encoding::Lossless,
        global_scale: GlobalScale::Static(0x3f80_0000),
        scale_format: ScaleFormat::E4m3,
    }
}

#[test]
fn a_file_that_may_not_grow_fails_the_commit_and_keeps_what_was_committed() {
    let dir = std::env::temp_dir().join(format!("tracekit-uring-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let schema = Schema { sites: vec![site()], chunk_tokens: TOKENS as u32, user: rmpv::Value::Map(vec![]) };
    let mut writer = Writer::new(&dir, schema, Options { mode: Mode::Uring, ..Options::default() }).unwrap();
    let (codes, scales) = (vec![0xa5; TOKENS * WIDTH / 8], vec![100; TOKENS * WIDTH / 16]);
    let ids: Vec<i64> = (0..=TOKENS as i64).collect();
    let rows = SiteRows { codes: Codes::Packed(&codes), scales: &scales, token_scale: &[] };
    let mut write = |name: &str| {
        let handle = writer.begin(&Begin { id: name, token_ids: &ids, part: (0, 1), ..Begin::default() })?;
        writer.append(handle, 0, 0, &rows, TOKENS)?;
        writer.commit(handle, Status::Complete, &[])?.wait(None)
    };
    assert_eq!(write("kept").unwrap(), Some(true));
    let size = std::fs::read_dir(&dir).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).sum::<u64>();
    // SAFETY: plain calls; nothing else of this process writes files.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        let limit = libc::rlimit { rlim_cur: size + (1 << 20) + 12_345, rlim_max: libc::RLIM_INFINITY };
        assert_eq!(libc::setrlimit(libc::RLIMIT_FSIZE, &limit), 0);
    }
    let error = write("lost").unwrap_err().to_string();
    assert!(error.contains("File too large"), "{error}");
    for _ in 0..2 {
        assert!(write("later").unwrap_err().to_string().contains("File too large"), "the error stays");
    }
    let asked = writer.stats().as_asked;
    assert!(writer.close().unwrap_err().to_string().contains("File too large"));
    if asked == 0 {
        eprintln!("the kernel gives no io_uring: the same was seen of plain writes");
    }
    // SAFETY: as above.
    unsafe {
        let limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
        libc::setrlimit(libc::RLIMIT_FSIZE, &limit);
    }
    drop(writer);
    recover(&dir).unwrap();
    let dataset = Dataset::open(&dir).unwrap();
    assert!(dataset.find("kept").is_ok() && dataset.find("lost").is_err());
    std::fs::remove_dir_all(&dir).unwrap();
}
