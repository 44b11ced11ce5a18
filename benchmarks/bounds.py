"""The bounds of caf's time, by the name of a case without latency.

Each follows from a profile, or from the CPU seconds per second of the newest measurement.
"""

from typing import Final

NOT_MEASURED: Final = "not measured yet at full scale"

BOUNDS: Final = {
    "writer-small": "Python, on one core: opening and closing 100,000 files",
    "writer-large": "the kernel's writes of a MiB, and hashing each byte twice",
    "reader-open": "checking 1,000,000 index entries, on one core",
    "reader-extract": "the kernel: creating 20,000 files",
    "convert": "the disk",
    "merkle-3": "hashing, on both cores",
    "merkle-0": "hashing, on both cores",
    "packing-small": "CPU time of awscrt and Python, beside the S3 server on two cores",
    "packing-small with latency": "CPU time as without latency, and the proxy on the same cores",
    "packing-mix": "hashing, the kernel and the S3 server, which share two cores",
    "packing-large": "hashing, the kernel and the S3 server, which share two cores",
    "packing-encrypted": "encrypting and hashing, which share two cores with the S3 server",
    "seal-file": "encrypting, on both cores, and the program's start",
    "open-file": "decrypting, on both cores, and the program's start",
    "whole-pipeline": "CPU time: caf, the servers and the proxy keep two cores 82 % busy",
    "run-small": "packing and start-up; with latency also 70 requests to the chain in turn",
    "upload": "the loopback provider, which hashes what it receives",
    "upload-three": "copying in the kernel: both cores are 98 % busy; with latency, round trips",
    "get-one": "loading Python's modules; with latency also five round trips in place of two",
    "read-one": "one request: the provider, the network, and Python's HTTP client",
    "read-encrypted": "one request, as read-one",
    "restore-small": "Python, on one core: starting, comparing and creating files",
    "read-large": "the loopback provider, which shares two cores with the reader",
    "journal-small": "packing, as packing-small",
    "journal-large": "packing, as packing-large",
    "planning": "sorting and writing, on both cores",
    "planning-again": "hashing both lists, on both cores",
    "report-csv": "parsing and sorting in DuckDB, and the disk",
    "report-orc": "decoding and sorting, on both cores",
    "report-parquet": "decoding and sorting, on both cores",
    "listing": "the S3 server and the client's parsing, which share two cores",
    "listing with latency": "the S3 server and the client's parsing, as without latency",
    "listing-serially": "the S3 server, which takes both cores for a page",
    "claims": "Postgres, which writes the same rows and indexes",
    "load-in-order": "Postgres, which writes the same rows and indexes",
    "load-random": "Postgres: random places of the indexes",
    "look-up-singly-warm": "Postgres: a plan over five tables, in place of one",
    "look-up-singly-cold": "Postgres: reading five tables' pages from the disk",
    "look-up-batched-warm": "Postgres: a plan over five tables, in place of one",
    "look-up-batched-cold": "Postgres: reading the tables' pages from the disk",
    "list-keys": NOT_MEASURED,
    "list-folders": NOT_MEASURED,
}
