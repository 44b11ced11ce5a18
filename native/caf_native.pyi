from collections.abc import Sequence

def list_folder(path: str, /) -> list[tuple[str, int, int]] | None: ...
def read_files(
    buffer: bytearray,
    paths: Sequence[str],
    sizes: Sequence[int],
    modified_ns: Sequence[int],
    hashed: bool,
    /,
) -> tuple[int, list[bytes]]: ...
def subtree_root(data: memoryview, first_number: int, proof_type: int, /) -> bytes: ...
def write_files(
    folder: int, first: int, names: Sequence[bytes], bodies: Sequence[memoryview], /
) -> list[bool]: ...
