"""What Dagster sees: a module for each of its concepts.

Bodies read config, call a step and return metadata.

What works on a chunk is in `steps` and `maintenance`; what sensors and schedules decide is in
`automation`; how Dagster's processes are started, stored and stopped is in `dagster_host`. This
package imports nothing, so that the light module `naming` can be used without loading Dagster.
"""
