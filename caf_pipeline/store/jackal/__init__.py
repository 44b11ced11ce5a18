"""The ChunkStore on Jackal.

    wallet               the key that pays, from its mnemonic
    messages             the chain's messages and signed transactions as bytes, no I/O
    answers              the chain's answers as records, no I/O
    nodes, chain         REST servers of chain nodes, and queries to them
    posting              posts chunks and buys space; pays once, whatever breaks
    provider_http        HTTP with an untrusted server
    provider             the HTTP API of one provider
    provider_selection   the providers, and the order in which to use them
    accepting_providers  checks that enough providers would take a chunk before it is paid for
    upload, download     copies to several providers; bytes from any of them
    chain_diff           the difference between the chain's list and the ledger
    storage_forecast     when the bought space ends or is full
    read, write          the ChunkReader and the ChunkStore over these

`steps` decides when a chunk is posted and uploaded. `ledger` records what was signed and which
copies were checked.

Source: docs/explanation/jackal.md.
"""

from typing import Final

LEAST_DAYS: Final = 30
LEAST_BYTES: Final = 10**9
"""The smallest purchase. The chain sells whole multiples of it.

Source: `MsgBuyStorage` of canine-chain v5.
"""
