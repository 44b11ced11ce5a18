"""The ChunkStore on Jackal.

    wallet               the key that pays, from its mnemonic
    messages             the chain's messages and answers as bytes, no I/O
    chain                REST servers of chain nodes
    posting              a post is paid for once, whatever breaks
    provider_http        HTTP with a server that nobody vouches for
    provider             one provider's HTTP
    provider_selection   the providers, and which is asked first
    accepting_providers  which of them would take a chunk, asked before a post is paid
    upload, download     copies to several providers; bytes from whichever has them
    chain_diff           what the chain lists beside what the ledger records
    storage_forecast     when the bought space ends or is full
    store                the ChunkStore over these

When a chunk is posted and uploaded is `steps`; what was signed and what copies proved is recorded
by `ledger`.

Source: docs/explanation/jackal.md.
"""

from typing import Final

LEAST_DAYS: Final = 30
LEAST_BYTES: Final = 10**9
"""The chain sells no less, and takes whole multiples of it.

Source: `MsgBuyStorage` of canine-chain v5.
"""
