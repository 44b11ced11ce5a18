//! SHA-256 of two messages of equal length in parallel. The instructions of each fill the other's waiting times.

use std::arch::x86_64::*;

const INITIAL: [u32; 8] = [0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19];

const K: [u32; 64] = [
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01,
    0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
    0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08,
    0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
];

/// Returns whether this processor can run `of_two`.
pub fn two_at_once() -> bool {
    is_x86_feature_detected!("sha") && is_x86_feature_detected!("sse4.1") && is_x86_feature_detected!("avx")
}

/// Returns the digests of two messages with the padding of FIPS 180-4, section 5.1.1.
#[target_feature(enable = "sha,sse4.1,avx")]
pub fn of_two(first: &[u8], second: &[u8]) -> [[u8; 32]; 2] {
    let swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    let initial = to_rounds(INITIAL);
    let mut state = [initial, initial];
    for (first, second) in first.as_chunks::<64>().0.iter().zip(second.as_chunks::<64>().0) {
        let before = state;
        let mut w = [[_mm_setzero_si128(); 4]; 2];
        for (words, block) in w.iter_mut().zip([first, second]) {
            for (word, bytes) in words.iter_mut().zip(block.as_chunks::<16>().0) {
                *word = _mm_shuffle_epi8(load(bytes), swap);
            }
        }
        // Unrolled by hand. A loop keeps `w` in memory and is no faster than one message after the other.
        macro_rules! four_rounds {
            ($($i:literal)*) => {$(
                for (w, [abef, cdgh]) in w.iter_mut().zip(&mut state) {
                    let sum = _mm_add_epi32(w[$i % 4], constants::<$i>());
                    *cdgh = _mm_sha256rnds2_epu32(*cdgh, *abef, sum);
                    *abef = _mm_sha256rnds2_epu32(*abef, *cdgh, _mm_shuffle_epi32(sum, 0x0e));
                    if $i >= 3 && $i < 15 {
                        let next = _mm_add_epi32(w[($i + 1) % 4], _mm_alignr_epi8(w[$i % 4], w[($i + 3) % 4], 4));
                        w[($i + 1) % 4] = _mm_sha256msg2_epu32(next, w[$i % 4]);
                    }
                    if $i >= 1 && $i < 13 {
                        w[($i + 3) % 4] = _mm_sha256msg1_epu32(w[($i + 3) % 4], w[$i % 4]);
                    }
                }
            )*};
        }
        four_rounds!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
        for (half, before) in state.as_flattened_mut().iter_mut().zip(before.as_flattened()) {
            *half = _mm_add_epi32(*half, *before);
        }
    }
    [from_rounds(state[0]), from_rounds(state[1])]
}

#[target_feature(enable = "sse2")]
#[inline]
fn constants<const GROUP: usize>() -> __m128i {
    let k = |n| K[4 * GROUP + n] as i32;
    _mm_set_epi32(k(3), k(2), k(1), k(0))
}

#[inline]
fn load(bytes: &[u8; 16]) -> __m128i {
    // SAFETY: there are 16 bytes, and the instruction needs no alignment.
    unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
}

/// The eight words in the order that the instructions expect.
#[target_feature(enable = "sse2")]
fn to_rounds(words: [u32; 8]) -> [__m128i; 2] {
    let [a, b, c, d, e, f, g, h] = words.map(|word| word as i32);
    [_mm_set_epi32(a, b, e, f), _mm_set_epi32(c, d, g, h)]
}

#[target_feature(enable = "sse4.1")]
fn from_rounds([abef, cdgh]: [__m128i; 2]) -> [u8; 32] {
    let words = [
        _mm_extract_epi32(abef, 3),
        _mm_extract_epi32(abef, 2),
        _mm_extract_epi32(cdgh, 3),
        _mm_extract_epi32(cdgh, 2),
        _mm_extract_epi32(abef, 1),
        _mm_extract_epi32(abef, 0),
        _mm_extract_epi32(cdgh, 1),
        _mm_extract_epi32(cdgh, 0),
    ];
    let mut digest = [0; 32];
    for (bytes, word) in digest.as_chunks_mut::<4>().0.iter_mut().zip(words) {
        *bytes = word.to_be_bytes();
    }
    digest
}
