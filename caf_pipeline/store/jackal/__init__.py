"""The ChunkStore on Jackal.

    wallet, messages, answers   the key that pays; bytes and records of the chain, no I/O
    nodes, chain                REST servers of chain nodes, and queries to them
    posting                     posts chunks and buys space; pays once, whatever breaks
    provider_http, provider     HTTP with an untrusted server; the API of one provider
    provider_selection, accepting_providers, upload, download
                                which providers to use, and copies at several of them
    chain_diff                  the chain's list and the ledger compared
    storage_forecast            when the bought space ends or is full
    read, write                 the ChunkReader and the ChunkStore over these

`steps` decides when a chunk is posted and uploaded. Source: docs/explanation/jackal.md.
"""

from typing import Final

LEAST_DAYS: Final = 30
LEAST_BYTES: Final = 10**9
"""The smallest purchase; only multiples are sold. Source: canine-chain v5, `MsgBuyStorage`."""

LIST_PRICE_BYTES: Final = 3 * 10**12
"""The chain's list price is for a TB in three copies. Source: canine-chain v5, `GetStorageCost`."""
