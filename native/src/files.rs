//! Many small files read at once. `caf_pipeline/system/small_files.py` says what is promised, and has the same in Python.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

/// Puts the bodies of the first files back to back, and returns how many they are, and SHA-256 of each where it is wanted.
pub fn read(buffer: &mut [u8], paths: &[PathBuf], sizes: &[usize], modified_ns: &[i128], hashed: bool) -> (usize, Vec<[u8; 32]>) {
    let (mut count, mut end, mut digests) = (0, 0, Vec::new());
    for ((path, &size), &modified) in paths.iter().zip(sizes).zip(modified_ns) {
        // One byte more: a file that has grown shows it.
        let Some(room) = buffer.get_mut(end..end + size + 1) else { break };
        if !is_read_as_found(path, modified, room) {
            break;
        }
        if hashed {
            digests.push(Sha256::digest(&room[..size]).into());
        }
        (count, end) = (count + 1, end + size);
    }
    (count, digests)
}

/// Reads a file, and tells whether it has exactly one byte less than `room` and was last modified when it was found.
fn is_read_as_found(path: &Path, modified_ns: i128, room: &mut [u8]) -> bool {
    // Something else may be there by now: a pipe must not be waited for.
    let Ok(mut file) = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path) else { return false };
    let mut taken = 0;
    while taken < room.len() {
        match file.read(&mut room[taken..]) {
            Ok(0) => break,
            Ok(size) => taken += size,
            Err(_) => return false,
        }
    }
    let Ok(found) = file.metadata() else { return false };
    // File systems hold times behind the year 2262, where 64 bits of nanoseconds end.
    let found_ns = i128::from(found.mtime()) * 1_000_000_000 + i128::from(found.mtime_nsec());
    taken + 1 == room.len() && found_ns == modified_ns
}
