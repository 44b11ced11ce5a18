"""Who proves which file at a block.

A provider that has taken a file is listed with it at the next block, while places are free. In each later window of blocks,
counted from the file's start, it proves the file once more; who missed a whole window is dropped.

Real: the chain lists a provider before it checks the proof, and a proof that fails leaves it listed, so a proof type that
the chain cannot verify is listed for a window and then dropped. Left out: the proofs themselves; having the bytes is proof.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from caf_pipeline_tests.loopback.chain_state import Draft, Holding, PostedFile, Proof, World
from caf_pipeline_tests.loopback.options import Options

CanProve = Callable[[Holding], bool]
"""Whether a provider has all of a file's bytes and is willing."""


def list_new(draft: Draft, waiting: Iterable[Holding], can_prove: CanProve, options: Options, *, height: int) -> list[Holding]:
    """List providers with what they hold; return what is settled, be it that the file is gone or the provider listed."""
    settled = []
    for holding in waiting:
        file: PostedFile | None = draft.get("file", holding.file)
        if file is None or holding.provider in file.provers:
            settled.append(holding)
            continue
        if holding.ready_height > height or len(file.provers) >= file.max_proofs or not can_prove(holding):
            continue
        verified = file.proof_type in options.proof_types
        proof = Proof(holding.provider, file.key, height, verified)
        draft.put("proof", proof.key, proof)
        draft.put("file", file.key, replace(file, provers=(*file.provers, holding.provider)))
        settled.append(holding)
    return settled


def renew(
    draft: Draft, world: World, holdings: Mapping[str, Holding], can_prove: CanProve, *, window: int, height: int
) -> list[str]:
    """Prove again in a file's new window, and drop who has missed the last one.

    Returns:
        Keys of proofs that were dropped.
    """
    dropped = []
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
            elif into > 0 and proof.verified and holding and can_prove(holding):
                draft.put("proof", proof.key, replace(proof, last_proven=height))
    return dropped


def drop(draft: Draft, proof: Proof) -> None:
    """Take a provider off a file."""
    draft.put("proof", proof.key, None)
    file: PostedFile | None = draft.get("file", proof.file)
    if file:
        draft.put("file", file.key, replace(file, provers=tuple(one for one in file.provers if one != proof.provider)))
