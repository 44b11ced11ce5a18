"""A Jackal network on one machine: the chain's REST servers and any number of providers, over real
sockets, in one process.

    python -m caf_pipeline_tests.loopback --folder DIR [--providers 3] [--fund ADDRESS=UJKL]
    [--space ADDRESS=BYTES] …

It prints one line of JSON when it is ready: `{"lcd": [urls], "providers": [urls], "control": url}`.
What it knows lies under DIR, outlives SIGKILL and is taken up again, ports included, by the next
start from the same folder.

It is as strict as the real network, of which it was built from measurements: whoever talks to it
cannot tell it apart by what is promised, and meets its surprises. What it leaves out: consensus,
other modules of the chain, the arithmetic of proofs (a provider that has the bytes proves them).

    network        starts, stops and kills the program; what tests and the demo use
    __main__       the command line
    options        what a network is made of
    chain_state    records, one block's state of all of them, the database
    wire           protobuf without a schema
    transactions   what a transaction says, and what the chain makes of it
    blocks         mempool and blocks
    proving        who proves which file at a block
    blobs          the bytes that a provider has
    misbehaviour   what a test may order
    http_server    HTTP/1.1 with the sockets in reach
    lcd            REST of a chain's node     answers     its JSON
    provider       HTTP of a provider         uploads     multipart forms     serving     ranges
    control        what a test may ask and order

Sources: the notes on Jackal's protocol (measured on canine-chain v5.0.1 and sequoia 017bbee), the
REST of a Cosmos SDK 0.45 node, and where neither tells, the published source of both. Where
something is a guess, the code says so.
"""
