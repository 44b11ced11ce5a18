"""The fault matrix: what breaks something on purpose, and what is looked at afterwards.

    world       a bucket, a database, a Jackal network and a home; `examine` says whether anything
    was lost or done twice runner      the processes that are killed and paused moments     what
    counts as a moment of a run kept_s3     an S3 server that has its objects again after a kill
    own_postgres   a Postgres of a test's own, to be killed matrix      every fault, by group: the
    only list of them recording   the fixture `fault`, which counts what was tried and what was
    survived report      writes docs/explanation/reliability.md from these counts

A test that breaks something takes `fault` and one of `world` (filled) or `new_world` (empty,
settings changed):

    def test_…(fault, world):
        with fault("Killed", "while packing") as case:
            …                   # break it; then let it end well
            world.finish()
            case.check(world)   # raises where anything was lost or done twice

The group and the words must stand in `matrix`; add yours there.

`pytest --soak` is the long form: `soak` is a fixture that is True then, and
`request.config.getoption("--soak")` says the same. `pytest --faults` runs nothing but the matrix.
`--fault-log FILE` keeps the counts, one line of JSON for each case, and `--go-on` leaves out the
tests that passed by that file. What a failed test did is in its message: the runs with their
moments.
"""
