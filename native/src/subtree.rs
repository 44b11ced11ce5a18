//! The root of a full subtree of the Jackal Merkle tree. What the tree is stands in `caf_pipeline/caf/merkle.py`.

use std::io::Write;

use sha2::{Digest, Sha256};
use sha3::Sha3_512;

use crate::hex;
#[cfg(target_arch = "x86_64")]
use crate::sha256;

pub const BLOCK_BYTES: usize = 10_240;
const NUMBER_BYTES: usize = 20; // of the largest 64-bit number in decimal
const TEXT_BYTES: usize = NUMBER_BYTES + 2 * BLOCK_BYTES;

/// Returns the root of proof type 3 over blocks of which the first has this number.
pub fn blake3_root(data: &[u8], first_number: u64) -> [u8; 32] {
    let mut text = Vec::with_capacity(TEXT_BYTES);
    let mut leaves = Vec::new();
    for (number, block) in numbered(data, first_number) {
        write_text(number, block, &mut text);
        leaves.push(blake3_of(&blake3_of(&text)));
    }
    reduce(leaves, blake3_of)
}

/// Returns the root of proof type 0 over blocks of which the first has this number.
pub fn sha_root(data: &[u8], first_number: u64) -> [u8; 64] {
    let mut leaves = Vec::new();
    let mut text = Vec::with_capacity(TEXT_BYTES);
    let paired = pair_leaves(data, first_number, &mut leaves);
    for (number, block) in numbered(data, first_number).skip(paired) {
        write_text(number, block, &mut text);
        leaves.push(sha3_of(&Sha256::digest(&text)));
    }
    reduce(leaves, sha3_of)
}

/// Adds the leaves of as many blocks as go in pairs where the processor hashes two at once, and tells how many those are.
#[cfg(target_arch = "x86_64")]
fn pair_leaves(data: &[u8], first_number: u64, leaves: &mut Vec<[u8; 64]>) -> usize {
    if !sha256::two_at_once() {
        return 0;
    }
    let mut texts = [const { Vec::new() }; 2];
    let whole = &data[..data.len() - data.len() % (2 * BLOCK_BYTES)];
    let mut blocks = numbered(whole, first_number);
    while let (Some(first), Some(second)) = (blocks.next(), blocks.next()) {
        for (text, (number, block)) in texts.iter_mut().zip([first, second]) {
            write_text(number, block, text);
            pad(text);
        }
        // SAFETY: `two_at_once` has found what the function is compiled for.
        let digests = unsafe { sha256::of_two(&texts[0], &texts[1]) };
        leaves.extend(digests.map(|digest| sha3_of(&digest)));
    }
    leaves.len()
}

#[cfg(not(target_arch = "x86_64"))]
fn pair_leaves(_: &[u8], _: u64, _: &mut Vec<[u8; 64]>) -> usize {
    0
}

fn numbered(data: &[u8], first_number: u64) -> impl Iterator<Item = (u64, &[u8])> {
    (first_number..=u64::MAX).zip(data.chunks(BLOCK_BYTES))
}

/// What a leaf hashes: the block's number in decimal, and its bytes as hex.
fn write_text(number: u64, block: &[u8], text: &mut Vec<u8>) {
    text.clear();
    write!(text, "{number}").expect("a vector takes everything");
    let hex_from = text.len();
    text.resize(hex_from + 2 * block.len(), 0);
    hex::write(block, &mut text[hex_from..]);
}

/// Ends a message as SHA-256 wants it: one bit, zeros up to a whole block, the number of bits before.
#[cfg(target_arch = "x86_64")]
fn pad(text: &mut Vec<u8>) {
    let bits = 8 * text.len() as u64;
    text.push(0x80);
    text.resize((text.len() + 8).next_multiple_of(64) - 8, 0);
    text.extend(bits.to_be_bytes());
}

fn reduce<const WIDTH: usize>(mut level: Vec<[u8; WIDTH]>, hash: fn(&[u8]) -> [u8; WIDTH]) -> [u8; WIDTH] {
    while level.len() > 1 {
        level = level.chunks(2).map(|pair| hash(pair.as_flattened())).collect();
    }
    level[0]
}

fn blake3_of(data: &[u8]) -> [u8; 32] {
    blake3::hash(data).into()
}

fn sha3_of(data: &[u8]) -> [u8; 64] {
    Sha3_512::digest(data).into()
}
