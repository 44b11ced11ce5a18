//! Many small files found and read at once. `caf_pipeline/system/small_files.py` says what is promised, and has the same in
//! Python.

use std::ffi::OsString;
use std::fs::{self, DirEntry, Metadata, OpenOptions};
use std::io::Read;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;

use sha2::{Digest, Sha256};

/// Name, size and time of modification.
pub type Entry = (OsString, i64, i64);

const MANY: usize = 256; // looks, of a microsecond or two each, that are worth a second thread

/// Returns name, size and time of all in a folder, and the size -1 of what is not plainly a file; None where it cannot be listed.
pub fn list(folder: &Path) -> Option<Vec<Entry>> {
    let entries = fs::read_dir(folder).ok()?.collect::<Result<Vec<_>, _>>().ok()?;
    let mut found = if entries.len() < MANY {
        look_at_each(&entries)?
    } else {
        let (some, others) = entries.split_at(entries.len() / 2);
        thread::scope(|scope| {
            let second = thread::Builder::new().spawn_scoped(scope, || look_at_each(others)).ok()?;
            let mut found = look_at_each(some)?;
            found.extend(second.join().ok()??);
            Some(found)
        })?
    };
    found.sort_unstable();
    Some(found.into_iter().map(|(_, entry)| entry).collect())
}

/// Returns what each is sorted by, and what is said of it.
fn look_at_each(entries: &[DirEntry]) -> Option<Vec<(Vec<u8>, Entry)>> {
    entries.iter().map(look_at).collect()
}

fn look_at(entry: &DirEntry) -> Option<(Vec<u8>, Entry)> {
    let (name, kind) = (entry.file_name(), entry.file_type().ok()?);
    let mut sorted_by = name.clone().into_vec();
    if kind.is_dir() || kind.is_symlink() && fs::metadata(entry.path()).is_ok_and(|target| target.is_dir()) {
        sorted_by.push(b'/');
    }
    let file = if kind.is_file() && name.to_str().is_some() { entry.metadata().ok() } else { None };
    let plain = file.and_then(|file| Some((file.size().try_into().ok()?, modified_ns(&file).try_into().ok()?)));
    let (size, modified) = plain.unwrap_or((-1, 0));
    Some((sorted_by, (name, size, modified)))
}

/// In 128 bits: file systems hold times behind the year 2262, where 64 bits of nanoseconds end.
fn modified_ns(file: &Metadata) -> i128 {
    i128::from(file.mtime()) * 1_000_000_000 + i128::from(file.mtime_nsec())
}

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
    let (size, mut taken) = (room.len() - 1, 0);
    loop {
        match file.read(&mut room[taken..]) {
            Ok(0) => break,
            Ok(more) => taken += more,
            Err(_) => return false,
        }
        if taken >= size {
            break; // nothing is behind it where the file has this size
        }
    }
    let is_as_found = |found: Metadata| found.size() == size as u64 && self::modified_ns(&found) == modified_ns;
    taken == size && file.metadata().is_ok_and(is_as_found)
}
