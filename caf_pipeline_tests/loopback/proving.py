"""The proofs of each block.

A provider that holds an unlisted file joins at the next block if a place is free. Joining writes
the height and 0 as the next leaf. The provider proves in the same block, and then once in each
later window of blocks, counted from the file's start. A verified proof writes the height and draws
the next leaf. A failed one writes nothing. A provider that missed a whole window is dropped. It
joins again once it has the bytes and a place.

As on the real chain, a provider is listed before its proof is checked. So a provider whose proofs
all fail stays listed for a window, is dropped, and joins again. The last leaf is never drawn. The
proofs themselves are left out: having the bytes counts as a proof.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final

from caf_pipeline_tests.loopback.chain_state import Draft, Holding, PostedFile, Proof, World
from caf_pipeline_tests.loopback.options import Options

LEAF_BYTES: Final = 10_240

CanProve = Callable[[Holding, int], bool]
"""Returns whether a provider has this leaf of a file and proves it."""


def list_new(
    draft: Draft, waiting: Iterable[Holding], can_prove: CanProve, options: Options, *, height: int
) -> list[Holding]:
    """List providers with their files. Returns holdings that are listed, or whose file is gone."""
    settled = []
    for holding in waiting:
        file: PostedFile | None = draft.get("file", holding.file)
        if file is None or holding.provider in file.provers:
            settled.append(holding)
            continue
        if (
            holding.ready_height > height
            or len(file.provers) >= file.max_proofs
            or not can_prove(holding, 0)
        ):
            continue
        draft.put("file", file.key, replace(file, provers=(*file.provers, holding.provider)))
        joined = Proof(holding.provider, file.key, height)
        draft.put("proof", joined.key, joined)
        _prove(draft, file, joined, options, height=height)
        settled.append(holding)
    return settled


def renew(
    draft: Draft,
    world: World,
    holdings: Mapping[str, Holding],
    can_prove: CanProve,
    options: Options,
    *,
    height: int,
) -> list[str]:
    """Prove again in a file's new window, and drop providers that missed the last one.

    Returns:
        Keys of dropped proofs.
    """
    dropped = []
    window = options.proof_window
    for file in world.files.values():
        into = (height - file.start) % window
        if height - file.start < window:
            continue
        for provider in file.provers:
            proof: Proof | None = draft.get("proof", f"{provider}/{file.key}")
            if proof is None or proof.last_proven >= height - into:
                continue
            holding = holdings.get(proof.key)
            if into == 0 and proof.last_proven < height - window:
                drop(draft, proof)
                dropped.append(proof.key)
            elif into > 0 and holding and can_prove(holding, proof.to_prove):
                _prove(draft, file, proof, options, height=height)
    return dropped


def _prove(draft: Draft, file: PostedFile, proof: Proof, options: Options, *, height: int) -> None:
    """Write a proof if the chain can verify it."""
    if options.verifies(file.proof_type):
        to_prove = _drawn(file, f"{height}/{proof.key}", options)
        draft.put("proof", proof.key, replace(proof, last_proven=height, to_prove=to_prove))


def _drawn(file: PostedFile, seed: str, options: Options) -> int:
    """Draw a leaf, never the last one. With `no_zero_draws`, 0 only if there is no other."""
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big")
    leaves = -(-file.size_bytes // LEAF_BYTES)
    if leaves <= 2:
        return 0
    return 1 + number % (leaves - 2) if options.no_zero_draws else number % (leaves - 1)


def drop(draft: Draft, proof: Proof) -> None:
    """Remove a provider from a file."""
    draft.put("proof", proof.key, None)
    file: PostedFile | None = draft.get("file", proof.file)
    if file:
        draft.put(
            "file",
            file.key,
            replace(
                file,
                provers=tuple(prover for prover in file.provers if prover != proof.provider),
            ),
        )
