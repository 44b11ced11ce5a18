"""Maintains stored chunks: proofs, repairs, rebuilds, adoption, deletion. `steps` makes them."""
