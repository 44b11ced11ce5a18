"""The compiled subtree matches its Python reference, and the right one is chosen."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caf_pipeline.caf import merkle_reference
from caf_pipeline.caf.merkle_hashes import BLOCK_BYTES

try:
    import caf_native
except ImportError:
    caf_native = None
NEEDS_NATIVE = pytest.mark.skipif(
    caf_native is None, reason="caf_native is not built: `make setup` does it where cargo is"
)
SIZES = st.integers(1, BLOCK_BYTES) | st.integers(0, 6).map(lambda level: BLOCK_BYTES << level)
FIRST_NUMBERS = st.integers(0, 20).flatmap(
    lambda digits: st.integers(0, min(10**digits, 2**64 - 64))
)
(VECTOR,) = [
    vector
    for vector in json.loads((Path(__file__).parents[1] / "vectors" / "merkle.json").read_text())[
        "vectors"
    ]
    if (vector["size"], vector["proof_type"]) == (1, 3)
]


@NEEDS_NATIVE
@settings(max_examples=50)
@given(SIZES, FIRST_NUMBERS, st.sampled_from([0, 3]), st.integers(0, 1000))
def test_compiled_and_in_python_a_subtree_has_the_same_root(
    size_bytes, first_number, proof_type, seed
):
    blocks = memoryview(random.Random(seed).randbytes(size_bytes))
    native = caf_native.subtree_root(blocks, first_number, proof_type)
    assert native == merkle_reference.subtree_root(blocks, first_number, proof_type)


@NEEDS_NATIVE
@pytest.mark.parametrize(
    ("size_bytes", "first_number", "proof_type"),
    [
        (0, 0, 3),
        (3 * BLOCK_BYTES, 0, 3),
        (BLOCK_BYTES + 1, 0, 0),
        (BLOCK_BYTES, 0, 1),
        (2 * BLOCK_BYTES, 2**64 - 1, 3),
    ],
)
def test_incomplete_subtree_is_refused(size_bytes, first_number, proof_type):
    with pytest.raises(ValueError, match=r"subtree|proof type|64 bits"):
        caf_native.subtree_root(memoryview(bytes(size_bytes)), first_number, proof_type)


@pytest.mark.parametrize("missing", [True, pytest.param(False, marks=NEEDS_NATIVE)])
def test_python_fallback_replaces_a_missing_compiled_module(missing):
    code = f"""
import sys
if {missing}:
    sys.modules["caf_native"] = None
from caf_pipeline.caf import merkle
tree = merkle.MerkleTree(3)
tree.update(bytes([7]))
compiled = getattr(sys.modules["caf_native"], "subtree_root", None)
print(merkle.IMPLEMENTATION, merkle.subtree_root is compiled, tree.root().hex())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        "Python" if missing else "native",
        str(not missing),
        VECTOR["merkle"],
    ]
