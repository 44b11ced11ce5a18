//! Functions that are too slow in Python: the Merkle root, and listing, reading and writing small files.
//! `caf_pipeline/caf/merkle_reference.py` and `caf_pipeline/system/small_files.py` have the same functions in Python.

mod files;
mod hex;
#[cfg(target_arch = "x86_64")]
mod sha256;
#[cfg(target_arch = "x86_64")]
mod sha3_512;
mod subtree;

use std::path::PathBuf;

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;

use subtree::BLOCK_BYTES;

/// Returns the root of a full subtree, which has a power of two of whole blocks or a single short block.
#[pyfunction]
fn subtree_root<'py>(py: Python<'py>, data: PyBuffer<u8>, first_number: u64, proof_type: u8) -> PyResult<Bound<'py, PyBytes>> {
    let count = data.len_bytes().div_ceil(BLOCK_BYTES);
    let whole = data.len_bytes().is_multiple_of(BLOCK_BYTES);
    if !count.is_power_of_two() || !(whole || count == 1) || !data.is_c_contiguous() {
        return Err(PyValueError::new_err("not the bytes of a full subtree"));
    }
    if first_number.checked_add(count as u64 - 1).is_none() {
        return Err(PyValueError::new_err("a block's number has 64 bits"));
    }
    // SAFETY: the buffer's owner keeps these bytes in place while `data` lives. As with hashlib, no thread may write to them
    // during the call.
    let bytes = unsafe { std::slice::from_raw_parts(data.buf_ptr().cast::<u8>(), data.len_bytes()) };
    match proof_type {
        0 => Ok(PyBytes::new(py, &py.detach(|| subtree::sha_root(bytes, first_number)))),
        3 => Ok(PyBytes::new(py, &py.detach(|| subtree::blake3_root(bytes, first_number)))),
        _ => Err(PyValueError::new_err("a proof type is 0 or 3")),
    }
}

/// Returns name, size and time of modification of each entry of a folder. None if the folder cannot be listed.
#[pyfunction]
fn list_folder(py: Python<'_>, path: PathBuf) -> Option<Vec<files::Entry>> {
    py.detach(|| files::list(&path))
}

/// Writes the bodies of the first files into a buffer. Returns the number of files and, if `hashed`, the SHA-256 of each.
#[pyfunction]
fn read_files<'py>(
    py: Python<'py>,
    buffer: PyBuffer<u8>,
    paths: Vec<PathBuf>,
    sizes: Vec<usize>,
    modified_ns: Vec<i128>,
    hashed: bool,
) -> PyResult<(usize, Vec<Bound<'py, PyBytes>>)> {
    if buffer.readonly() || !buffer.is_c_contiguous() {
        return Err(PyValueError::new_err("not a buffer that can be filled"));
    }
    // SAFETY: the buffer's owner keeps these bytes in place while `buffer` lives. As with a file's readinto, no other thread may
    // use them during the call.
    let bytes = unsafe { std::slice::from_raw_parts_mut(buffer.buf_ptr().cast::<u8>(), buffer.len_bytes()) };
    let (count, digests) = py.detach(|| files::read(bytes, &paths, &sizes, &modified_ns, hashed));
    Ok((count, digests.iter().map(|digest| PyBytes::new(py, digest)).collect()))
}

/// Writes small files into an open folder. Returns which files were written.
#[pyfunction]
fn write_files(
    py: Python<'_>,
    folder: i32,
    first: u64,
    names: Vec<PyBackedBytes>,
    bodies: Vec<PyBuffer<u8>>,
) -> PyResult<Vec<bool>> {
    if names.len() != bodies.len() || !bodies.iter().all(|body| body.is_c_contiguous()) {
        return Err(PyValueError::new_err("not a name and a body for each file"));
    }
    let names: Vec<&[u8]> = names.iter().map(|name| &name[..]).collect();
    // SAFETY: each buffer's owner keeps its bytes in place while `bodies` lives. As with a file's write, no other thread may
    // write to them during the call.
    let bytes_of = |body: &PyBuffer<u8>| unsafe { std::slice::from_raw_parts(body.buf_ptr().cast::<u8>(), body.len_bytes()) };
    let bodies: Vec<&[u8]> = bodies.iter().map(|body| if body.len_bytes() == 0 { &[] } else { bytes_of(body) }).collect();
    Ok(py.detach(|| files::write(folder, first, &names, &bodies)))
}

#[pymodule]
fn caf_native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(list_folder, module)?)?;
    module.add_function(wrap_pyfunction!(read_files, module)?)?;
    module.add_function(wrap_pyfunction!(write_files, module)?)?;
    module.add_function(wrap_pyfunction!(subtree_root, module)?)
}
