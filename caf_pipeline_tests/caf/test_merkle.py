"""Jackal roots, compiled and in Python: the chain's vectors, any split, restored states."""

import hashlib
import json
import threading
from itertools import pairwise
from pathlib import Path

import blake3
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caf_pipeline.caf import merkle, merkle_reference
from caf_pipeline.caf.merkle import FileRoots, MerkleTree, merkle_root, merkle_roots
from caf_pipeline.caf.merkle_hashes import BLOCK_BYTES
from caf_pipeline.errors import ArchiveError, UsageError

try:
    import caf_native
except ImportError:
    caf_native = None

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "merkle.json").read_text())["vectors"]
STATES = [  # SHA-256 of the state of version 0.4.0 after 75 blocks and 5 bytes
    (0, "6150fe91ac2f4ff58301d1832bc25b99b1c355e941e6c3ca510c2e0ec7b7a046"),
    (3, "1e936c205cc35e3268ef0da2ed7983d503fb559d0cd2ff71c71af3b5e76f070b"),
]
SIZES = st.integers(0, 3 * BLOCK_BYTES) | st.sampled_from([64, 65, 130, 200]).map(
    lambda blocks: blocks * BLOCK_BYTES + 5
)
NEEDS_NATIVE = pytest.mark.skipif(
    caf_native is None, reason="caf_native is not built: `make setup` does it where cargo is"
)


@pytest.fixture(
    scope="module", autouse=True, params=["Python", pytest.param("native", marks=NEEDS_NATIVE)]
)
def implementation(request):
    """Selects each implementation in turn for the roots of this module's tests."""
    module = caf_native if request.param == "native" else merkle_reference
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merkle, "subtree_root", module.subtree_root)
        yield


def sample(size_bytes: int) -> bytes:
    period = bytes((i * 31 + 7) % 256 for i in range(256))
    return (period * (size_bytes // 256 + 1))[:size_bytes]


def root_by_the_book(content: bytes, proof_type: int) -> bytes:
    """Compute the root level by level in memory."""
    block_hash, tree_hash, width = {
        0: (
            lambda data: hashlib.sha256(data).digest(),
            lambda data: hashlib.sha3_512(data).digest(),
            64,
        ),
        3: (
            lambda data: blake3.blake3(data).digest(),
            lambda data: blake3.blake3(data).digest(),
            32,
        ),
    }[proof_type]
    blocks = [content[start : start + BLOCK_BYTES] for start in range(0, len(content), BLOCK_BYTES)]
    level = [tree_hash(block_hash(f"{n}{block.hex()}".encode())) for n, block in enumerate(blocks)]
    while len(level) & (len(level) - 1):
        level.append(bytes(width))
    while len(level) > 1:
        level = [tree_hash(level[n] + level[n + 1]) for n in range(0, len(level), 2)]
    return level[0]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"{v['size']}-type{v['proof_type']}")
def test_the_root_is_the_chains(vector, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(sample(vector["size"]))
    if vector["merkle"] is None:
        with pytest.raises(ArchiveError):
            merkle_root(path, vector["proof_type"])
    else:
        assert merkle_root(path, vector["proof_type"]).hex() == vector["merkle"]


@settings(max_examples=30)
@given(SIZES, st.lists(st.integers(1, 800_000), max_size=6), st.sampled_from([0, 3]))
def test_root_does_not_depend_on_the_split(size_bytes, pieces, proof_type):
    content, tree, position = sample(size_bytes + 1), MerkleTree(proof_type), 0
    for piece in [*pieces, len(content)]:
        tree.update(memoryview(content)[position : position + piece])
        position += piece
    assert tree.root() == root_by_the_book(content, proof_type)
    assert tree.size_bytes == len(content)


@settings(max_examples=40)
@given(SIZES, SIZES, st.sampled_from([0, 3]))
def test_a_tree_goes_on_from_its_state(first, second, proof_type):
    content = sample(first + second + 1)
    tree = MerkleTree(proof_type)
    tree.update(content[:first])
    resumed = MerkleTree.from_state(tree.state())
    for branch in (tree, resumed):
        branch.update(content[first:])
        assert branch.root() == root_by_the_book(content, proof_type)


def test_asking_for_the_root_does_not_end_the_tree():
    content, tree = sample(50_000), MerkleTree(3)
    tree.update(content[:15_000])
    assert tree.root() == root_by_the_book(content[:15_000], 3)
    tree.update(content[15_000:])
    assert tree.root() == root_by_the_book(content, 3)


def test_a_copy_is_independent():
    tree = MerkleTree(0)
    tree.update(sample(30_000))
    copy = tree.copy()
    copy.update(b"more")
    assert tree.root() == root_by_the_book(sample(30_000), 0)
    assert copy.size_bytes == 30_004


@pytest.mark.parametrize(
    "damage", [lambda s: s[:-1], lambda s: s + b"x", lambda s: b"", lambda s: b"x" + s[1:]]
)
def test_a_damaged_state_is_refused(damage):
    tree = MerkleTree(3)
    tree.update(sample(50_000))
    with pytest.raises(ArchiveError):
        MerkleTree.from_state(damage(tree.state()))


def test_an_unknown_proof_type_is_refused():
    with pytest.raises(UsageError):
        MerkleTree(1)


def test_file_of_several_parts_has_correct_roots(tmp_path):
    content = sample(2 * merkle._PART_BYTES + 3 * BLOCK_BYTES + 5)
    path = tmp_path / "file"
    path.write_bytes(content)
    assert merkle_roots(path, 0, 3) == [root_by_the_book(content, 0), root_by_the_book(content, 3)]


def test_growing_file_has_the_roots_of_its_final_bytes(
    tmp_path,
):
    content = sample(2 * merkle._PART_BYTES + 3 * BLOCK_BYTES + 5)
    cuts = [
        0,
        0,
        1,
        BLOCK_BYTES,
        merkle._PART_BYTES - 1,
        merkle._PART_BYTES,
        2 * merkle._PART_BYTES + 7,
        len(content),
    ]
    with (
        open(tmp_path / "file", "wb", buffering=0) as file,
        FileRoots(tmp_path / "file", 0, 3) as roots,
    ):
        for start, end in pairwise(cuts):
            file.write(content[start:end])
            roots.follow()
        assert roots.finish() == [root_by_the_book(content, 0), root_by_the_book(content, 3)]


def test_abandoned_file_roots_leave_no_thread(tmp_path):
    (tmp_path / "file").write_bytes(sample(3 * merkle._PART_BYTES))
    with FileRoots(tmp_path / "file", 3) as roots:
        roots.follow()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("merkle")]


@pytest.mark.parametrize(("proof_type", "digest"), STATES)
def test_a_state_has_the_bytes_of_earlier_versions(proof_type, digest):
    tree = MerkleTree(proof_type)
    tree.update(sample(75 * BLOCK_BYTES + 5))
    assert hashlib.sha256(tree.state()).hexdigest() == digest
