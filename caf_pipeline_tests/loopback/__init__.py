"""A Jackal network on one machine: REST servers of a chain, and providers, over real sockets.

    python -m caf_pipeline_tests.loopback --folder DIR [--providers 3] [--fund ADDRESS=UJKL]
        [--space ADDRESS=BYTES] …

It prints one line of JSON when it is ready: `{"lcd": [urls], "providers": [urls], "control": url}`.
Its state is under DIR and survives SIGKILL. The next start from the folder continues with the same
ports.

It is as strict as the real network, and has the same measured quirks. It leaves out consensus, the
chain's other modules, and the arithmetic of proofs: a provider with the bytes proves them.

    network        starts, stops and kills the program, for tests and the demo
    __main__       the command line
    options        the options of a network
    chain_state    records, the state after a block, the database
    wire           protobuf without a schema
    transactions   parses, checks and executes transactions
    blocks         mempool and blocks
    proving        the proofs of each block
    blobs          the bytes of a provider
    misbehaviour   faults that a test may order
    http_server    HTTP/1.1 with access to the sockets
    lcd            REST of a chain's node     answers     its JSON
    provider       HTTP of a provider         uploads     multipart forms     serving     ranges
    control        orders and queries of tests

Sources: the notes on Jackal's protocol (measured on canine-chain v5.0.1 and sequoia 017bbee), the
REST of a Cosmos SDK 0.45 node, and the published source of both. The code marks guesses.
"""
