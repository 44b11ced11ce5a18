//! The root of a full subtree of the Jackal Merkle tree. `caf_pipeline/caf/merkle.py` describes the tree.

use sha2::{Digest, Sha256};
use sha3::Sha3_512;

use crate::hex;
#[cfg(target_arch = "x86_64")]
use crate::{sha256, sha3_512};

pub const BLOCK_BYTES: usize = 10_240;
const NUMBER_BYTES: usize = 20; // digits of the largest 64-bit number
const PADDING_BYTES: usize = 64 + 8; // the most that SHA-256 appends to a message

/// Returns the root of proof type 3 of blocks that are numbered from `first_number`.
pub fn blake3_root(data: &[u8], first_number: u64) -> [u8; 32] {
    let mut text = Text::new();
    let leaf = |(number, block)| blake3_of(&blake3_of(text.of(number, block)));
    let leaves = numbered(data, first_number).map(leaf).collect();
    reduce::<32, 64>(leaves, |pairs| pairs.iter().map(|pair| blake3_of(pair)).collect())
}

/// Returns the root of proof type 0 of blocks that are numbered from `first_number`.
pub fn sha_root(data: &[u8], first_number: u64) -> [u8; 64] {
    let mut digests = hashed_in_pairs(data, first_number);
    let mut text = Text::new();
    for (number, block) in numbered(data, first_number).skip(digests.len()) {
        digests.push(Sha256::digest(text.of(number, block)).into());
    }
    reduce::<64, 128>(sha3_of_each(&digests), sha3_of_each)
}

/// Returns the SHA-256 of the leading blocks that form pairs. Empty if the processor cannot hash two messages in parallel.
#[cfg(target_arch = "x86_64")]
fn hashed_in_pairs(data: &[u8], first_number: u64) -> Vec<[u8; 32]> {
    let mut digests = Vec::new();
    if sha256::two_at_once() {
        let (mut text, mut other_text) = (Text::new(), Text::new());
        let whole = &data[..data.len() - data.len() % (2 * BLOCK_BYTES)];
        let mut blocks = numbered(whole, first_number);
        while let (Some((number, block)), Some((other_number, other))) = (blocks.next(), blocks.next()) {
            let (first, second) = (text.padded(number, block), other_text.padded(other_number, other));
            // SAFETY: `two_at_once` has checked the required processor features.
            digests.extend(unsafe { sha256::of_two(first, second) });
        }
    }
    digests
}

#[cfg(not(target_arch = "x86_64"))]
fn hashed_in_pairs(_: &[u8], _: u64) -> Vec<[u8; 32]> {
    Vec::new()
}

fn numbered(data: &[u8], first_number: u64) -> impl Iterator<Item = (u64, &[u8])> {
    (first_number..=u64::MAX).zip(data.chunks(BLOCK_BYTES))
}

/// The input of a leaf's hash: the block's number in decimal, then its bytes as hex.
struct Text(Vec<u8>);

impl Text {
    fn new() -> Self {
        Text(vec![0; NUMBER_BYTES + 2 * BLOCK_BYTES + PADDING_BYTES])
    }

    fn of(&mut self, number: u64, block: &[u8]) -> &[u8] {
        let (from, end) = self.write(number, block);
        &self.0[from..end]
    }

    /// Appends SHA-256's padding: a 1 bit, zeros, and the message's number of bits, up to a whole block.
    #[cfg(target_arch = "x86_64")]
    fn padded(&mut self, number: u64, block: &[u8]) -> &[u8] {
        let (from, end) = self.write(number, block);
        let padded_end = from + (end - from + 1 + 8).next_multiple_of(64);
        self.0[end] = 0x80;
        self.0[end + 1..padded_end - 8].fill(0);
        self.0[padded_end - 8..padded_end].copy_from_slice(&(8 * (end - from) as u64).to_be_bytes());
        &self.0[from..padded_end]
    }

    fn write(&mut self, number: u64, block: &[u8]) -> (usize, usize) {
        let digits = number.to_string();
        let (from, end) = (NUMBER_BYTES - digits.len(), NUMBER_BYTES + 2 * block.len());
        self.0[from..NUMBER_BYTES].copy_from_slice(digits.as_bytes());
        hex::write(block, &mut self.0[NUMBER_BYTES..end]);
        (from, end)
    }
}

fn reduce<const NODE: usize, const PAIR: usize>(
    mut level: Vec<[u8; NODE]>,
    hash_each: impl Fn(&[[u8; PAIR]]) -> Vec<[u8; NODE]>,
) -> [u8; NODE] {
    while level.len() > 1 {
        level = hash_each(level.as_flattened().as_chunks().0);
    }
    level[0]
}

fn blake3_of(data: &[u8]) -> [u8; 32] {
    blake3::hash(data).into()
}

fn sha3_of_each<const SIZE: usize>(messages: &[[u8; SIZE]]) -> Vec<[u8; 64]> {
    let mut digests = hashed_in_fours(messages);
    digests.extend(messages[digests.len()..].iter().map(|message| <[u8; 64]>::from(Sha3_512::digest(message))));
    digests
}

/// Returns the SHA3-512 of the leading messages that form groups of four. Empty if the processor cannot hash four in parallel.
#[cfg(target_arch = "x86_64")]
fn hashed_in_fours<const SIZE: usize>(messages: &[[u8; SIZE]]) -> Vec<[u8; 64]> {
    let mut digests = Vec::with_capacity(messages.len());
    if sha3_512::four_at_once() {
        // SAFETY: `four_at_once` has checked the required processor features.
        digests.extend(messages.as_chunks().0.iter().flat_map(|four| unsafe { sha3_512::of_four(four) }));
    }
    digests
}

#[cfg(not(target_arch = "x86_64"))]
fn hashed_in_fours<const SIZE: usize>(messages: &[[u8; SIZE]]) -> Vec<[u8; 64]> {
    Vec::with_capacity(messages.len())
}
