"""Loaded last by a process of the tests' own that others are forked from: each does without what a
process of the project does without, pandas before all, and looks for no garbage among the modules
that it finds.

Not for a process of pytest, whose tests try what is left out here.
"""

import gc

from caf_pipeline.entry import block_unused_modules

block_unused_modules()
gc.freeze()
