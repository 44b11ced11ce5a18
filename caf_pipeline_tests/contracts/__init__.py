"""Contract suites: test classes that the tests of every implementation inherit.

Each names the fixtures that the subclass must define. Tests of a single implementation are in its
own folder, e.g. `store`.
"""
