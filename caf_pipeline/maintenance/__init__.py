"""Maintains stored chunks: proofs, repairs, rebuilds, adoption, and safe deletion at the source."""
