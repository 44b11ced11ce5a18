//! A block as lower-case hex.

/// Writes two digits for each byte. `text` is twice as long as `bytes`.
pub fn write(bytes: &[u8], text: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2, which is the only requirement.
        return unsafe { write_avx2(bytes, text) };
    }
    write_anywhere(bytes, text);
}

/// The same function, compiled for registers of 32 bytes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn write_avx2(bytes: &[u8], text: &mut [u8]) {
    write_anywhere(bytes, text);
}

/// Uses arithmetic instead of a table, so that the compiler emits vector instructions.
#[inline(always)]
fn write_anywhere(bytes: &[u8], text: &mut [u8]) {
    assert_eq!(text.len(), 2 * bytes.len());
    for (byte, digits) in bytes.iter().zip(text.chunks_exact_mut(2)) {
        digits[0] = digit(byte >> 4);
        digits[1] = digit(byte & 15);
    }
}

#[inline(always)]
fn digit(value: u8) -> u8 {
    value + b'0' + if value > 9 { b'a' - b'9' - 1 } else { 0 }
}
