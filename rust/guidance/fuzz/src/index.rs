//! Any bytes as an index, and as a schema.
use std::path::Path;
use tracekit_guidance::index::Index;
use tracekit_guidance::Schema;

/// Runs one input.
pub fn run(data: &[u8]) {
    let [a, b, rest @ ..] = data else { return };
    if let Ok(schema) = Schema::decode(rest) {
        let bytes = schema.encode().expect("a schema that parses can be written");
        // Bytes, not values: a NaN among the user's metadata is not equal to itself.
        let again = Schema::decode(&bytes).expect("and parsed again");
        assert_eq!(again.encode().expect("and written again"), bytes);
    }
    let Ok(index) = Index::from_bytes(rest.to_vec(), *a as usize, *b as usize, Path::new("x")) else { return };
    for i in 0..index.n_chunks() {
        index.chunk(i);
    }
    for i in 0..index.n_trajs() {
        let id = String::from_utf8_lossy(index.id(i)).into_owned();
        index.find(&id);
        if let Some((_, range)) = index.traj(i) {
            index.partition(range, |e| e.tok0 < 5);
        }
    }
}
