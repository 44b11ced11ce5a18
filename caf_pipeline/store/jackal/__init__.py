"""The ChunkStore on Jackal.

    wallet     the key that pays, from its mnemonic
    messages   the chain's messages and answers as bytes, no I/O
    chain      REST servers of chain nodes
    posting    a post is paid for once, whatever breaks
    exchange   HTTP with a server that nobody vouches for
    provider   one provider's HTTP
    roster     the providers, and who is asked first
    uploads    copies at several providers
    reading    bytes from whoever holds them
    store      the ChunkStore over these

Source: docs/jackal.md.
"""
