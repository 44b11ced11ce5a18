"""The fault matrix: tests that break something on purpose, and examine the result.

    world         a bucket, a database, a Jackal network and a home, and their examination
    own_postgres  a Postgres of a single test, which can be killed
    matrix        the only list of all faults, by group
    recording     the fixture `fault`, which counts cases
    report        writes docs/explanation/reliability.md from these counts

A test takes `fault` and either `world` (filled) or `new_world` (empty, with changed settings):

    def test_…(fault, world):
        with fault("Killed", "while packing") as case:
            …                   # break it; then let it end well
            world.finish()
            case.check(world)   # raises if anything was lost or done twice

Add the group and the words to `matrix`.

`pytest --soak` is the long form, in which the fixture `soak` is True. `pytest --faults` runs only
the matrix. `--fault-log FILE` logs the cases, one line of JSON each. `--go-on` skips tests that
passed by that log. A failed test's message has the runs with their moments.
"""
