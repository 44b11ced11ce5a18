"""Imported last by processes from which others are forked.

Each lacks what a process of the project lacks, above all pandas, and does not collect garbage among
imported modules. Do not import it in pytest, whose tests cover what is missing here.
"""

import gc

from caf_pipeline.entry import block_unused_modules

block_unused_modules()
gc.freeze()
