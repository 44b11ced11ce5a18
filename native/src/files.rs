//! Lists, reads and writes many small files. `caf_pipeline/system/small_files.py` documents the contract and has the same
//! functions in Python.

use std::ffi::{CStr, CString, OsString};
use std::fs::{self, DirEntry, Metadata, OpenOptions};
use std::io::Read;
use std::os::fd::RawFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;

use sha2::{Digest, Sha256};

/// Name, size and time of modification.
pub type Entry = (OsString, i64, i64);

const MANY: usize = 256; // entries, of a microsecond or two each: with fewer, a second thread does not pay

/// Returns name, size and time of each entry of a folder. The size of an entry that is not a regular file, or whose name is not
/// UTF-8, is -1. None if the folder cannot be listed.
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

/// Returns the sort key and the entry of each file.
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

/// In 128 bits, because 64 bits of nanoseconds end in 2262 and file systems can hold later times.
fn modified_ns(file: &Metadata) -> i128 {
    i128::from(file.mtime()) * 1_000_000_000 + i128::from(file.mtime_nsec())
}

/// Writes the bodies of the first files back to back into the buffer, up to a file that does not fit or has changed. Returns the
/// number of files and, if `hashed`, the SHA-256 of each.
pub fn read(buffer: &mut [u8], paths: &[PathBuf], sizes: &[usize], modified_ns: &[i128], hashed: bool) -> (usize, Vec<[u8; 32]>) {
    let (mut count, mut end, mut digests) = (0, 0, Vec::new());
    for ((path, &size), &modified) in paths.iter().zip(sizes).zip(modified_ns) {
        // One more byte, so that a file that has grown is noticed.
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

/// Reads a file. Returns whether it has one byte less than `room` and the expected time of modification.
fn is_read_as_found(path: &Path, modified_ns: i128, room: &mut [u8]) -> bool {
    // The file may have been replaced by a pipe, which must not block.
    let Ok(mut file) = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path) else { return false };
    let (size, mut taken) = (room.len() - 1, 0);
    loop {
        match file.read(&mut room[taken..]) {
            Ok(0) => break,
            Ok(more) => taken += more,
            Err(_) => return false,
        }
        if taken >= size {
            break; // the file has at least the expected size
        }
    }
    let is_as_found = |found: Metadata| found.size() == size as u64 && self::modified_ns(&found) == modified_ns;
    taken == size && file.metadata().is_ok_and(is_as_found)
}

const FEW: usize = 16; // files, of 50 microseconds or more each: with fewer, a second thread does not pay

/// Writes files into an open folder, each under a temporary name until it is complete. Returns which files were written. The
/// temporary names are numbered from `first`.
pub fn write(folder: RawFd, first: u64, names: &[&[u8]], bodies: &[&[u8]]) -> Vec<bool> {
    if names.len() < FEW {
        return write_each(folder, first, names, bodies);
    }
    let half = names.len() / 2;
    let ((some_names, other_names), (some, others)) = (names.split_at(half), bodies.split_at(half));
    let write_others = || write_each(folder, first.wrapping_add(half as u64), other_names, others);
    thread::scope(|scope| {
        let second = thread::Builder::new().spawn_scoped(scope, write_others).ok();
        let mut written = write_each(folder, first, some_names, some);
        let more = second.and_then(|thread| thread.join().ok());
        written.extend(more.unwrap_or_else(|| vec![false; others.len()]));
        written
    })
}

fn write_each(folder: RawFd, first: u64, names: &[&[u8]], bodies: &[&[u8]]) -> Vec<bool> {
    let numbers = (0..).map(|number| first.wrapping_add(number));
    names.iter().zip(bodies).zip(numbers).map(|((name, body), number)| write_one(folder, number, name, body).is_some()).collect()
}

/// None if the file could not be written or its name is taken.
fn write_one(folder: RawFd, number: u64, name: &[u8], body: &[u8]) -> Option<()> {
    let name = CString::new(name).ok()?;
    let temporary = CString::new(format!(".caf-{number:016x}.partial")).ok()?;
    let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL | libc::O_CLOEXEC;
    // SAFETY: the names are C strings, and the caller keeps the folder's descriptor open.
    let file = unsafe { libc::openat(folder, temporary.as_ptr(), flags, 0o666) };
    if file < 0 {
        return None;
    }
    let written = write_all(file, body);
    // SAFETY: this function owns the descriptor and no longer uses it. Some file systems report a full disk only here.
    let closed = unsafe { libc::close(file) } == 0;
    let named = if written && closed { give_name(folder, &temporary, &name) } else { None };
    // SAFETY: as above.
    unsafe { libc::unlinkat(folder, temporary.as_ptr(), 0) };
    named
}

/// Unlike a rename, a link never replaces an existing file.
fn give_name(folder: RawFd, temporary: &CStr, name: &CStr) -> Option<()> {
    // SAFETY: as above.
    (unsafe { libc::linkat(folder, temporary.as_ptr(), folder, name.as_ptr(), 0) } == 0).then_some(())
}

fn write_all(file: RawFd, mut body: &[u8]) -> bool {
    while !body.is_empty() {
        // SAFETY: the kernel reads only the bytes of the slice.
        match usize::try_from(unsafe { libc::write(file, body.as_ptr().cast(), body.len()) }) {
            Ok(some) if some > 0 => body = &body[some..],
            _ => return false,
        }
    }
    true
}
